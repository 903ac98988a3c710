"""Wraps the wheel's graph rewriting: what a node simplifies to is found once while a kernel is lowered, not once a question.

Lowering a kernel asks thousands of times for the simplest form of an index, a mask or a size (UOp.simplify), or for its integers' width, each time by
a walk over all that it is made of, most of which was walked before, if not in this pass over the graph then in the one before. Both depend on
nothing but the node, so answers are kept until the kernel is lowered, or the outermost rewrite ends: longer, and they would keep the buffers of
tensors that are gone.

A question may come up while another is answered, from within a rule. It has answers of its own: a walk that waits for a node would wait for ever
where another walk has answered for it.

tinygrad/__init__.py imports this behind the wheel's own modules.
"""
from __future__ import annotations
import contextlib, threading
from typing import Any, Iterator
from tinygrad import codegen
from tinygrad.uop.ops import PatternMatcher, RewriteContext, UOp
from tinygrad.uop.symbolic import symbolic
from tinygrad.uop.weak import pm_lower_weak

KEPT = [symbolic, pm_lower_weak]   # rules whose answers are kept

class _Kept(threading.local):
  """Of a thread. under_way: the rules of its rewrites, each within the one before, and a None for a kernel that is lowered; answers: node ->
  rewritten, by rules and how many walks by the same are under way"""
  def __init__(self) -> None:
    self.under_way: list[PatternMatcher|None] = []
    self.answers: dict[tuple[PatternMatcher, int], dict[UOp, UOp]] = {}

_kept, _rewrite, _lower = _Kept(), RewriteContext.unified_rewrite, codegen.full_rewrite_to_sink

@contextlib.contextmanager
def under_way(rules:PatternMatcher|None) -> Iterator[None]:
  """Answers are kept as long, at least"""
  _kept.under_way.append(rules)
  try: yield
  finally:
    _kept.under_way.pop()
    if not _kept.under_way: _kept.answers = {}

def unified_rewrite(self:RewriteContext, root:UOp) -> UOp:
  """As the wheel's"""
  if _kept.under_way and (rules := self.pm) in KEPT and self.bpm is None and self.ctx is None and not self.enter_calls:
    self.replace = _kept.answers.setdefault((rules, _kept.under_way.count(rules)), {})
  with under_way(self.pm): return _rewrite(self, root)

def full_rewrite_to_sink(*args:Any, **kwargs:Any) -> UOp:
  """As the wheel's"""
  with under_way(None): return _lower(*args, **kwargs)

RewriteContext.unified_rewrite, codegen.full_rewrite_to_sink = unified_rewrite, full_rewrite_to_sink

"""Wraps the wheel's graph rewriting: what a node simplifies to is found once while a graph is rewritten, not once a question.

Lowering a kernel asks thousands of times for the simplest form of an index, a mask or a size (UOp.simplify), or for its integers' width, each time by
a walk over all that it is made of, most of which was walked before. Both depend on nothing but the node, so answers are kept until the outermost
rewrite ends: longer, and they would keep the buffers of tensors that are gone.

A question may come up while another is answered, from within a rule. It has answers of its own: a walk that waits for a node would wait for ever
where another walk has answered for it.

tinygrad/__init__.py imports this behind the wheel's own modules.
"""
from __future__ import annotations
import threading
from tinygrad.uop.ops import PatternMatcher, RewriteContext, UOp
from tinygrad.uop.symbolic import symbolic
from tinygrad.uop.weak import pm_lower_weak

KEPT = [symbolic, pm_lower_weak]   # rules whose answers are kept

class _Kept(threading.local):
  """Of a thread. under_way: the rules of its rewrites, each within the one before; answers: node -> rewritten, by rules and how many walks by the
  same are under way"""
  def __init__(self) -> None:
    self.under_way: list[PatternMatcher|None] = []
    self.answers: dict[tuple[PatternMatcher, int], dict[UOp, UOp]] = {}

_kept, _rewrite = _Kept(), RewriteContext.unified_rewrite

def unified_rewrite(self:RewriteContext, root:UOp) -> UOp:
  """As the wheel's"""
  under_way = _kept.under_way
  if under_way and (rules := self.pm) in KEPT and self.bpm is None and self.ctx is None and not self.enter_calls:
    self.replace = _kept.answers.setdefault((rules, under_way.count(rules)), {})
  under_way.append(self.pm)
  try: return _rewrite(self, root)
  finally:
    under_way.pop()
    if not under_way: _kept.answers = {}

RewriteContext.unified_rewrite = unified_rewrite

"""What the wheel's graph rewriting keeps while a kernel is lowered: the wheel's answers, in fewer steps, and no longer than that."""
from __future__ import annotations
from typing import Any, Callable
import numpy as np, pytest
from tinygrad import codegen, rewriting
from tinygrad.dtype import dtypes
from tinygrad.uop.ops import Ops, PatternMatcher, RewriteContext, UOp, UPat, graph_rewrite
from tinygrad.uop.symbolic import symbolic

asks = PatternMatcher([(UPat(Ops.NOOP), lambda ctx: ctx())])
def while_rewriting(question: Callable[[], Any]) -> None: graph_rewrite(UOp(Ops.NOOP), asks, ctx=question)

def indices(seed: int, count: int) -> list[UOp]:
  """Each of those before it, with divisions, remainders and masks whose rules ask for the simplest form of parts"""
  rng = np.random.default_rng(seed)
  found = [UOp.range(int(size), i) for i, size in enumerate(rng.integers(2, 40, 4))]
  for _ in range(count):
    a, b = (found[i] for i in rng.integers(max(len(found) - 8, 0), len(found), 2))
    n = int(rng.integers(2, 30))
    found.append([a * n + b, (a + b) // n, (a * n + b) % (n + 1), (a < n).where(a, b * n), a.minimum(b + n)][rng.integers(5)])
  return found

@pytest.mark.parametrize("seed", range(4))
def test_answers(seed: int, monkeypatch: pytest.MonkeyPatch):
  questions, got = indices(seed, 60), []
  with monkeypatch.context() as m:
    m.setattr(RewriteContext, "unified_rewrite", rewriting._rewrite)
    want = [u.simplify() for u in questions]
  def ask() -> None: got.extend(u.simplify() for u in questions + questions)
  while_rewriting(ask)
  assert all(a is b for a, b in zip(got, want + want, strict=True))

def nodes_tried(monkeypatch: pytest.MonkeyPatch) -> list[UOp]:
  """Those that symbolic's rules are tried on, from here on"""
  tried, rewrite = [], PatternMatcher.rewrite
  def counted(self: PatternMatcher, u: UOp, ctx: Any = None) -> UOp | None:
    if self is symbolic: tried.append(u)
    return rewrite(self, u, ctx)
  monkeypatch.setattr(PatternMatcher, "rewrite", counted)
  return tried

def test_a_node_is_simplified_once(monkeypatch: pytest.MonkeyPatch):
  tried, u, steps = nodes_tried(monkeypatch), indices(1, 60)[-1], []
  def ask() -> None:
    for question in (u, u, u + 1):
      tried.clear()
      question.simplify()
      steps.append(len(tried))
  while_rewriting(ask)
  assert steps[0] > 20 and steps[1] == 0 and steps[2] < 10, steps

# a product asks for a sum that is on the way of the walk that it is part of, when a quotient waits for that sum already
def ask_for_the_sum(u: UOp) -> None: graph_rewrite(u.src[0] + 5, rules)
rules = PatternMatcher([(UPat(Ops.MUL, name="u"), ask_for_the_sum)])

def test_a_question_within_another(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(rewriting, "KEPT", [rules])
  a = UOp.variable("a", 0, 9, dtypes.int)
  root = UOp.sink((a + 5) // 3, a * 2, a + 5)
  def ask() -> None: assert graph_rewrite(root, rules) is root
  while_rewriting(ask)

def test_passes_over_a_kernel_share_answers(monkeypatch: pytest.MonkeyPatch):
  """… and no other kernel has them"""
  tried, u, steps = nodes_tried(monkeypatch), indices(1, 60)[-1], []
  def passes(*questions: UOp) -> UOp:
    for question in questions:
      tried.clear()
      while_rewriting(question.simplify)
      steps.append(len(tried))
    return questions[0]
  monkeypatch.setattr(rewriting, "_lower", passes)
  for _ in range(2): assert codegen.full_rewrite_to_sink(u, u) is u
  assert steps[0] > 20 and steps == [steps[0], 0] * 2 and not rewriting._kept.answers, steps

def test_nothing_is_kept_afterwards():
  def ask() -> None:
    indices(2, 20)[-1].simplify()
    assert rewriting._kept.answers
  while_rewriting(ask)
  assert not rewriting._kept.answers and not rewriting._kept.under_way
  def fails() -> None: raise ValueError
  with pytest.raises(ValueError): while_rewriting(fails)
  assert not rewriting._kept.under_way

"""Drafts: where they come from, and that the tokens are those without them."""
from __future__ import annotations
import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Callable
import numpy as np, pytest
from drafting import CONTEXT, FEW, LEAST, PAGES, Pair, always_drafting
from extra.mkgguf import write_model
from mockcuda import on_cuda
from mockmetal import on_metal
from oracle import forward
from tinygrad import Device
from tinygrad.apps.capture import read, to_device
from tinygrad.apps.engine.engine import Engine
from tinygrad.apps.engine.batch import Batch, DraftBatch
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.engine.sampling import Features, Sampling
from tinygrad.apps.engine.sequence import Request
from tinygrad.apps.engine.speculate import MAX_DRAFTS, NOT_DRAFTED, PAUSE, REFUSED, TRIED, DraftState, Speculation, accept, some_drafts
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.mla import Transformer
from tinygrad.apps.models import BUILT_IN, load
from tinygrad.nn.cpu import is_cpu
from tinygrad.nn.drafts import LONGEST, NO_DRAFT, SHORTEST, find_drafts
from tinygrad.nn.primitive import plain_ops
from tinygrad.nn.step import PAGE

# ---- on the device ----

def drafts_of(ids: list[int], begins: int, count: int) -> list[int]:
  """As find_drafts, of one sequence"""
  enough = min(max(len(ids) - 1 - begins, 1), SHORTEST)
  def shared(at: int) -> int: return next((n for n in range(LONGEST) if n > at or ids[at - n] != ids[-1 - n]), LONGEST)
  best, at = max(((shared(at), at) for at in range(len(ids) - 1)), default=(0, 0))
  return [ids[at + 1 + i % (len(ids) - 1 - at)] for i in range(count)] if best >= enough else [NO_DRAFT] * count

@pytest.mark.parametrize("seed,width,place", [(0, 64, nullcontext), (1, 64, plain_ops), (2, 64, on_cuda), (3, 64, on_metal), (4, 20000, nullcontext),
                                              (5, 20000, lambda: on_cuda("sm_90"))])
def test_drafts_are_found(seed: int, width: int, place: Callable[[], AbstractContextManager]):
  """What is behind a sequence's end is not looked at"""
  with place(): check_drafts(random.Random(seed), width)

def check_drafts(rng: random.Random, width: int) -> None:
  rows = [[rng.randrange(rng.choice((2, 3, 50))) for _ in range(rng.choice((1, 2, 4, 9, 30, width)))] for _ in range(16)]
  rows += [[7] * 5, [7] * 3, [1, 2, 3, 4] * 3 + [1], [0, 0, 0]]
  ids = np.int32([row + [rng.choice(row) for _ in range(width - len(row))] for row in rows])
  begins = [max(len(row) - rng.choice((0, 1, 2, 3, 4, 9)), 0) for row in rows]
  found = read(find_drafts(to_device(ids), to_device(np.int32([len(row) - 1 for row in rows])), to_device(np.int32(begins)), 4).realize())
  assert found.tolist() == [drafts_of(row, begin, 4) for row, begin in zip(rows, begins)]

def test_drafts_by_force_are_as_many_tokens_as_a_text_has():
  """Alike ones would choose the same experts"""
  tokens = read(some_drafts(4, to_device(np.arange(64, dtype=np.int32) + 3), 1000).realize())
  assert tokens.shape == (64, 4) and 0 <= tokens.min() and tokens.max() < 1000 and len(set(tokens.reshape(-1).tolist())) > 200

def test_drafts_are_accepted():
  """Those before the first that is not what was drawn; a row that is not there stays where it is"""
  chosen = np.int32([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7]])
  drafts = np.int32([[5, 6, 9], [5, 8, 9], [8, 6, 9], [NO_DRAFT] * 3, [5, 6, 9]])
  tables, start = np.int32([[1], [1], [1], [1], [0]]), np.int32([3, 4, 5, 30, 0])
  ids = to_device(np.zeros((5, 32), np.int32))
  none = to_device(np.zeros(5, np.int32))
  state = DraftState(to_device(np.zeros(5, np.int32)), to_device(start), to_device(tables), ids, none, to_device(drafts), none, none, none, none)
  outs = accept(to_device(chosen.reshape(-1)), 2, state)
  outs[0].realize(*outs[1:])
  token, moved, ids, accepted, said = map(read, outs)
  assert token.tolist() == [7, 6, 5, 5, 7] and moved.tolist() == [6, 6, 6, 31, 0] and accepted.tolist() == [2, 1, 0, 0, 2]
  assert said.tolist() == [[5, 6, 7, NOT_DRAFTED], [5, 6, REFUSED, NOT_DRAFTED], [5, REFUSED, REFUSED, NOT_DRAFTED], [5] + [NOT_DRAFTED] * 3,
                           [5, 6, 7, NOT_DRAFTED]]
  assert ids[0, 4:7].tolist() == [5, 6, 7] and ids[1, 5:7].tolist() == [5, 6] and ids[3, 31] in (5, 6, 7)

def test_a_number_of_drafts():
  for wrong in (-1, MAX_DRAFTS + 1, True, 1.0):
    with pytest.raises(ValueError, match=f"^drafts: expected a whole number from 0 to {MAX_DRAFTS}, found "): load(BUILT_IN, drafts=wrong)

# ---- the host's choice ----

def steps(s: Speculation, count: int, drafted: bool, right: int = 0, seconds: float = 1.0) -> None:
  said = [[1] + [2] * right + [REFUSED] * (3 - right)] if drafted else [[1] + [NOT_DRAFTED] * 3]
  for _ in range(count): s.read(said, True, drafted, seconds)

def test_drafts_that_do_not_pay_are_given_up_for_a_while():
  s = Speculation()
  assert not s.wanted()
  steps(s, 9, False)
  assert s.wanted()
  steps(s, TRIED, True, right=3, seconds=1.9)
  assert not s.wanted()                                 # of plain ones too little is known
  steps(s, TRIED - 9, False)
  steps(s, TRIED, True, right=1, seconds=1.9)
  assert s.wanted() and (s.drafts, s.tokens, s.accepted) == (2 * TRIED, 6 * TRIED, [2 * TRIED, TRIED, TRIED])
  for pause in (PAUSE, 2 * PAUSE):
    while s.wanted(): steps(s, 1, True, right=0, seconds=1.9)
    steps(s, pause - 1, False)
    assert not s.wanted()
    steps(s, 1, False)
    assert s.wanted()
  steps(s, 4 * TRIED, True, right=3, seconds=1.9)
  assert s.wanted() and s.pause == PAUSE
  s.begins()
  assert not s.wanted()

def test_a_step_that_was_recorded_tells_no_time():
  s = Speculation()
  steps(s, 1, False, seconds=500.0)
  steps(s, TRIED, False)
  steps(s, 1, True, right=3, seconds=900.0)
  steps(s, TRIED - 1, True, right=3, seconds=2.0)
  assert s.wanted()
  steps(s, 5 * TRIED, True, right=0, seconds=2.0)
  assert not s.wanted()

# ---- the same tokens ----

@pytest.fixture(scope="module")
def pair() -> Pair:
  if not is_cpu(Device.DEFAULT): pytest.skip("not on the CPU")
  return Pair(Runner(Transformer.from_gguf(read_gguf(BUILT_IN), CONTEXT, pool=lambda _: PAGES), 3))

@pytest.mark.parametrize("count", [1, 4])
def test_the_same_tokens(pair: Pair, count: int):
  """Greedy and drawn, by all filters and penalties, alone and together; stops and limits cut a draft"""
  drafted, right = pair.drafts_of_requests(count, 8 // count)
  assert right[2] and drafted > sum(right), "none is whole, or none refused"

def test_to_the_end_of_the_context(pair: Pair):
  """Drafts behind it have no page"""
  before = pair.drafted.steps
  pair.assert_same([Request([3, 4] * 60, Sampling(bias=FEW)), Request([5] * 150, Sampling(bias={5: 1e3}))])
  assert pair.drafted.steps - before < (CONTEXT - 120) and isinstance(pair.drafted.runner.batch, DraftBatch)

def test_where_answers_begin(pair: Pair):
  """A batch knows it: fewer tokens are enough for a draft there"""
  engine = pair.drafted
  each = [engine.add(Request([3, 4, 5] * n, limit=9)) for n in (2, 5)]
  while not all(s.produced for s in each): engine.step()
  assert read(engine.runner.batch.state.begins)[:2].tolist() == [6, 15]
  for s in each: engine.abort(s)
  while engine.step(): pass

def test_only_what_was_found_is_verified(pair: Pair, monkeypatch: pytest.MonkeyPatch):
  """On a CPU the step behind refused drafts has none: it is not run for all of their rows"""
  engine, verify, verified = pair.drafted, pair.drafted.runner.verify, []
  def counting() -> None:
    verified.append(engine.speculation.found)
    verify()
  monkeypatch.setattr(engine.runner, "verify", counting)
  before = engine.gauges.drafts
  pair.says(engine, [Request([3, 4, 5, 8] * 4, Sampling(bias=FEW, temperature=20.0, seed=1), limit=40)], random.Random(0))
  assert verified and all(verified) and len(verified) == engine.gauges.drafts - before

def test_warming(pair: Pair, monkeypatch: pytest.MonkeyPatch):
  """Plain steps and drafted ones are recorded, and what batches with probabilities need, which are not drafted"""
  runner, asked = Runner(pair.plain.runner.model, 3), Request([3, 4, 5] * 3, limit=9)
  want = pair.says(pair.plain, [asked], random.Random(0))[0].produced
  engine = Engine(runner, PAGES, max_rows=1)
  engine.warm(Sampling(), Features(logprobs=True))
  for kind in (Batch, DraftBatch): monkeypatch.setattr(kind, "record", lambda *_: pytest.fail("recorded later"))
  for each in (asked, replace(asked, logprobs=1)): assert list(engine.stream(engine.add(each))) == want

# ---- on the mocks ----

@pytest.mark.parametrize("target", [on_cuda, on_metal])
def test_on_a_mock(target: Callable[[], AbstractContextManager[None]], tmp_path: Path):
  """Each token is the oracle's, of the few that are allowed, or as good: steps of several rows round otherwise than those of one"""
  path, = write_model(tmp_path / "m.gguf", "small-glm", "Q4_0", seed=2, **LEAST)
  with target():
    engine = always_drafting(Runner(Transformer.from_gguf(read_gguf(path), 2 * PAGE, pool=lambda _: PAGES), 1))
    s = engine.add(Request([3, 4, 5] * 3, Sampling(bias=FEW), limit=12))
    while engine.step(): pass
    assert len(s.produced) == 12 and sum(engine.gauges.accepted), s.error
  (logits, margins), near, few = forward(path, (*s.ids,)), (2 * 1e-3) ** .5, [*FEW]
  for token, row, margin in zip(s.produced, logits[s.prompt - 1:], margins[s.prompt - 1:]):
    assert row[few].max() - row[token] <= 6 * near * row.std() or margin < near

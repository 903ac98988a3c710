"""Many sequences at once on real models: whoever else is there, whenever they come and go, each says what it says alone.

On the CPU that is so to the bit, in 200 random schedules. On the mocks of CUDA and Metal, whose kernels for several rows round otherwise than those
for one, every token is judged by the oracle's logits, in 15; test/external/test_many_on_mocks.py has more."""
from __future__ import annotations
import math, random
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple
import numpy as np, pytest
from extra.mkgguf import write_model
from helpers import SMALL
from mockcuda import on_cuda
from mockmetal import on_metal
from oracle import forward
from tinygrad import Device
from tinygrad.apps.engine import runner as runner_module
from tinygrad.apps.engine.engine import Engine
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.engine.sampling import Sampling, mask_words
from tinygrad.apps.engine.sequence import BatchRow, Piece, Request, Sequence, State
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.mla import Transformer
from tinygrad.apps.models import BUILT_IN
from tinygrad.apps.serve.worker import warm
from tinygrad.nn.cpu import is_cpu
from tinygrad.nn.step import PAGE

CONTEXT, PAGES, LONGEST = 3 * PAGE, 40, 16   # of a sequence, of the cache, and the most tokens of an answer

def runner_of(path: Path, context: int = CONTEXT, bits: int = 16) -> Runner:
  return Runner(Transformer.from_gguf(read_gguf(path), context, pool=lambda model: PAGES, cache_bits=bits))

class Pressed(Engine):
  """Counts who gave way and which pages were evicted, and proves after each piece of work that the pool is whole"""
  def __init__(self, *args, **kw):
    super().__init__(*args, **kw)
    self.preempted = self.evicted = 0
    preempt, free = self.scheduler.preempt, self.pool._free
    def counted_preempt() -> None:
      self.preempted += 1
      preempt()
    def counted_free(page: int) -> None:
      self.evicted += 1
      free(page)
    self.scheduler.preempt, self.pool._free = counted_preempt, counted_free  # type: ignore[method-assign]
  def step(self) -> bool:
    busy = super().step()
    self.pool.check(self.scheduler.tables)
    return busy

def run(engine: Engine, requests: list[Request], rng: random.Random, waits: tuple[int, ...] = (0, 0, 1, 5, 20),
        aborts: float = 0.0) -> list[Sequence]:
  """All of them, each added some steps after the one before it, and perhaps aborted"""
  sequences, left, busy = [], 0, True
  while busy or len(sequences) < len(requests):
    while left <= 0 and len(sequences) < len(requests):
      sequences.append(engine.add(requests[len(sequences)]))
      left = rng.choice(waits)
    if rng.random() < aborts: engine.abort(rng.choice(sequences))
    busy, left = engine.step(), left - 1
  assert not engine.scheduler.live and engine.pool.available == engine.pool.pages - 1
  return sequences

# ---- on the CPU ----

class Alone:
  """A model, and what it says where there is nobody else. most: requests of a schedule; bits: of the cache"""
  def __init__(self, path: Path, most: int, bits: int = 16):
    self.path, self.runner, self.said, self.most = path, runner_of(path, bits=bits), {}, most
    self.engine, self.vocab = Engine(self.runner, PAGES), min(self.runner.vocab_size, 320)
    rng = random.Random(path.name)
    bases = [[rng.randrange(self.vocab) for _ in range(2 * PAGE + 12)] for _ in range(3)]
    self.prompts = [rng.choice(bases)[:rng.choice((0, 30, PAGE, PAGE + 9, 2 * PAGE, 2 * PAGE + 9))] +
                    [rng.randrange(self.vocab) for _ in range(rng.choice((1, 2, 9, 13)))] for _ in range(24)]
  def says(self, ids: list[int], sampling: Sampling = Sampling()) -> list[int]:
    key = (*ids,), repr(sampling)
    if key not in self.said:
      self.engine.forget()
      self.said[key] = list(self.engine.generate(ids, LONGEST, sampling))
    return self.said[key]

MODELS: dict[str, tuple[Callable[[Path], Path], int]] = {
  "built-in": (lambda folder: BUILT_IN, 6),
  "small": (lambda folder: write_model(folder / "m.gguf", "small-glm", "Q8_0", seed=5, **SMALL | dict(q_lora=64, experts=8, used=2))[0], 10)}

@pytest.fixture(scope="module", params=MODELS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Alone:
  if not is_cpu(Device.DEFAULT): pytest.skip("not on the CPU")
  file, most = MODELS[request.param]
  return Alone(file(tmp_path_factory.mktemp("many")), most)

ALL = dict(temperature=1.5, top_k=40, top_p=.9, min_p=.02, repeat_penalty=1.3, presence_penalty=.4, frequency_penalty=.2, bias={5: 2.0, 7: -math.inf})

def schedule(alone: Alone, seed: int, samplings: list[Sampling]) -> None:
  rng = random.Random(seed)
  def request() -> Request:
    ids, sampling, limit = rng.choice(alone.prompts), rng.choice(samplings), rng.choice((0, 1, 3, 15, LONGEST))
    stop = frozenset({rng.choice(alone.says(ids, sampling))}) if rng.random() < .3 else frozenset()
    return Request(ids, sampling, stop, limit)
  requests, aborts = [request() for _ in range(rng.randint(2, alone.most))], rng.choice((0.0, 0.0, .02))
  engine = Pressed(alone.runner, rng.choice((4, 5, 7, 12, PAGES)), rng.choice((2, 3, 9, 64)), rng.choice((0.0, math.inf)))
  for r, s in zip(requests, run(engine, requests, rng, aborts=aborts), strict=True):
    want = alone.says(list(r.ids), r.sampling)[:r.limit]
    end = next((i + 1 for i, token in enumerate(want) if token in r.stop), 0)
    want, reason = (want[:end], "stop") if end else (want, "length")
    if s.reason == "abort" and aborts: assert s.produced == want[:len(s.produced)]
    else: assert (s.produced, s.reason) == (want, reason)

@pytest.mark.parametrize("seed", range(80))
def test_greedy(alone: Alone, seed: int): schedule(alone, seed, [Sampling()])

@pytest.fixture(scope="module")
def of_8_bits() -> Alone:
  if not is_cpu(Device.DEFAULT): pytest.skip("not on the CPU")
  return Alone(BUILT_IN, 6, bits=8)

@pytest.mark.parametrize("seed", range(200, 202))
def test_rows_of_8_bits(of_8_bits: Alone, seed: int): schedule(of_8_bits, seed, [Sampling()])

@pytest.mark.parametrize("seed", range(20))
def test_sampling_by_rows(alone: Alone, seed: int):
  """Rows that ask for everything beside rows that ask for less, or for nothing"""
  schedule(alone, 100 + seed, [Sampling(), Sampling(repeat_penalty=1.5, bias={9: 3.0}), *(Sampling(**ALL, seed=s) for s in (1, 2, 3))])

def test_too_few_pages(alone: Alone):
  """All want another page at once: some give way, and known pages are evicted"""
  requests = [Request(prompt[:PAGE - 2 - i], limit=LONGEST) for i, prompt in enumerate(p for p in alone.prompts if len(p) > PAGE)]
  engine = Pressed(alone.runner, 6, max_stall=math.inf)
  assert list(engine.generate(alone.prompts[0], LONGEST)) == alone.says(alone.prompts[0])   # leaves rows behind
  for r, s in zip(requests, run(engine, requests, random.Random(0)), strict=True): assert s.produced == alone.says(list(r.ids))
  assert engine.preempted and engine.evicted

# ---- probabilities and constraints ----

class Some:
  """A constraint: of each `every` neighbouring tokens one, which follows from how many came"""
  def __init__(self, vocab: int, every: int): self.vocab, self.every, self.came = vocab, every, 0
  def mask(self) -> np.ndarray:
    bits = np.arange(32 * mask_words(self.vocab)) % self.every == self.came % self.every
    return np.packbits(bits & (np.arange(len(bits)) < self.vocab), bitorder="little").view(np.uint32)
  def accept(self, token: int) -> None:
    assert token % self.every == self.came % self.every
    self.came += 1

def of_all_kinds(prompts: list[list[int]], vocab: int, limit: int) -> list[Request]:
  """Rows that ask for probabilities, or are held to something, or both, beside rows that are neither"""
  kinds = [(None, 0, Sampling()), (5, 0, Sampling()), (None, 7, Sampling(1.0, seed=2)), (20, 3, Sampling()), (0, 0, Sampling(.7, 30, seed=3))]
  return [Request(ids, sampling, limit=limit, logprobs=n, constraint=Some(vocab, every) if every else None)
          for ids, (n, every, sampling) in zip(prompts, kinds)]

def assert_told(s: Sequence, logits: np.ndarray, limit: float) -> None:
  """logits: after each of its ids but the last. The worst row's error, of the chosen token and of the likeliest, in their order"""
  wide = logits[s.prompt - 1:].astype(np.float64)
  odds = wide - wide.max(1, keepdims=True)
  odds -= np.log(np.exp(odds).sum(1, keepdims=True))
  assert len(s.logprobs) == len(s.produced) == len(odds)
  for row, token, (value, top) in zip(odds, s.produced, s.logprobs):
    assert abs(value - row[token]) < limit and len(top) == s.told
    found = np.array([value for _, value in top])
    assert np.abs(found - row[[token for token, _ in top]]).max(initial=0) < limit and (np.diff(found) <= 0).all()
    assert np.abs(found - np.sort(row)[::-1][:len(top)]).max(initial=0) < limit

def test_probabilities_and_constraints(alone: Alone):
  """Each says what it says alone. Probabilities are the model's own, whatever the row is held to and however it is drawn"""
  engine, prompts = Pressed(alone.runner, PAGES, max_stall=math.inf), [p for p in alone.prompts if len(p) < 2 * PAGE]
  def requests() -> list[Request]: return of_all_kinds(prompts, alone.runner.vocab_size, LONGEST)
  for s, request in zip(run(engine, requests(), random.Random(0), waits=(0,)), requests(), strict=True):
    engine.forget()
    if request.constraint is None: want = alone.says(request.ids, request.sampling)
    else: want, = (own.produced for own in run(engine, [replace(request, logprobs=None)], random.Random(0)))
    assert (s.produced, s.reason) == (want, "length"), s.error
    if s.told is not None: assert_told(s, engine.logits(s.ids[:-1]), 1e-3)   # a prompt's rows and a token's round otherwise

# ---- rows that are not there ----

TARGETS: dict[str, Callable[[], AbstractContextManager[None]]] = {"CUDA": on_cuda, "METAL": lambda: on_metal(check=False)}

def caches(runner: Runner) -> np.ndarray:
  runner.wait()
  return np.stack([c.numpy() for c in runner.model.cache])
def changed(before: np.ndarray, after: np.ndarray) -> set[int]:
  """Rows that are other than they were, in some block"""
  assert not np.isnan(after).any()
  return {*np.flatnonzero((before != after).any((0, 2))).tolist()}

def assert_page_0_alone(runner: Runner, *counts: int) -> None:
  """So many of the rows of a batch, and a chunk that is padded past its table: what is nobody's is written in page 0"""
  nobodys = {*range(PAGE)}
  for count in counts:
    tables, positions = [[7 + 2 * i, 6 + 2 * i] for i in range(count)], [13 * i + 1 for i in range(count)]
    before = caches(runner)
    rows = [(20 * count + i, at, table) for i, (at, table) in enumerate(zip(positions, tables))]
    runner.set_batch([BatchRow(token, at, table, Sampling(), [1] * at + [token], at) for token, at, table in rows])
    for _ in range(2):
      runner.launch()
      assert runner.read().shape == (count,)
    written = {table[(at + n) // PAGE] * PAGE + (at + n) % PAGE for at, table in zip(positions, tables) for n in range(2)}
    assert written <= changed(before, caches(runner)) <= written | nobodys
  before = caches(runner)
  runner.prefill([Piece(0, [8, 9, 10], PAGE - 3, [3])], runner.sizes[0])
  written = {3 * PAGE + PAGE - 3 + i for i in range(3)}
  assert written <= changed(before, caches(runner)) <= written | nobodys

def test_rows_that_are_not_there(alone: Alone): assert_page_0_alone(alone.runner, *{3, alone.most - 3})

def record_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
  for what, name in ((runner_module.Batch, "record"), (Runner, "record_chunk"), (runner_module.Replay, "cut")):
    monkeypatch.setattr(what, name, lambda *_: pytest.fail("recorded later"))

def test_warming(alone: Alone, monkeypatch: pytest.MonkeyPatch):
  """Nothing that answers drawn so need is recorded later; it writes what is nobody's; answers that run go on as they would"""
  runner, request = runner_of(alone.path), Request(alone.prompts[0], Sampling(1.0, seed=4), limit=LONGEST)
  want = alone.says(list(request.ids), request.sampling)
  engine = Engine(runner, PAGES, max_rows=3)
  running = engine.add(request)
  while len(running.produced) < 5: engine.step()
  before = caches(runner)
  engine.warm(request.sampling)
  assert changed(before, caches(runner)) <= {*range(PAGE)} and {*runner.chunks} == {*runner.kinds} and {*runner.batches} == {1, 2, 4}
  record_no_more(monkeypatch)
  each = [running, *(engine.add(request) for _ in range(2)), engine.add(Request(alone.prompts[1] * 2, Sampling(1.0), limit=3))]
  while engine.step(): pass
  assert all(s.produced == want for s in each[:3]) and len(each[3].produced) == 3

def test_warming_of_the_server(alone: Alone, monkeypatch: pytest.MonkeyPatch):
  """… nor what those with probabilities, or held to something, need"""
  engine, prompts = Engine(runner_of(alone.path), PAGES, max_rows=2), alone.prompts[:2]
  want = [alone.says(ids) for ids in prompts]
  warm(engine, Sampling())
  record_no_more(monkeypatch)
  for count in (1, 2):
    told = run(engine, [Request(ids, limit=LONGEST, logprobs=5) for ids in prompts[:count]], random.Random(0), waits=(0,))
    held = run(engine, [Request(ids, limit=LONGEST, constraint=Some(engine.runner.vocab_size, 7)) for ids in prompts[:count]], random.Random(0),
               waits=(0,))
    assert [s.produced for s in told] == want[:count] and all(len(s.logprobs) == LONGEST for s in told)
    assert [s.reason for s in held] == ["length"] * count

def test_steps_between_slices(alone: Alone, monkeypatch: pytest.MonkeyPatch):
  """An answer's steps between the slices of a prompt's chunks, and logits: neither knows of the other"""
  monkeypatch.setattr(runner_module, "SLICE", 1)
  engine, ids = Engine(runner_of(alone.path), PAGES, max_stall=1e-9), alone.prompts[2]
  assert engine.runner.slices == len(engine.runner.model.blk) > 1
  enqueued, asked, enqueue, prefill = [], [], runner_module.enqueue, engine.runner.prefill
  monkeypatch.setattr(runner_module, "enqueue", lambda part: (enqueued.append(part), enqueue(part)))
  monkeypatch.setattr(engine.runner, "prefill", lambda *args: (asked.extend((args[1], i) for i in args[2]), prefill(*args)))
  first, prompt = engine.add(Request(alone.prompts[0], limit=LONGEST)), next(p for p in alone.prompts if len(p) > 2 * PAGE)
  while len(first.produced) < 3: engine.step()
  enqueued.clear()
  asked.clear()
  second, between = engine.add(Request(prompt, limit=5)), 0
  while second.state is not State.ENDED:
    assert engine.step()
    if between == 0 and engine.scheduler.begun: logits = engine.logits(ids[:9])
    between += engine.scheduler.begun is not None
  assert all(part is engine.runner.chunks[size, False][i] for part, (size, i) in zip(enqueued, asked, strict=True))
  while engine.step(): pass
  assert between and first.produced == alone.says(alone.prompts[0]) and second.produced == alone.says(prompt)[:5]
  engine.forget()
  assert np.array_equal(logits, engine.logits(ids[:9]))

# ---- on the mocks ----

# the least that all kernels for several rows take: a dense block and one with experts
LEAST = dict(blocks=2, dim=64, heads=2, kv_lora=128, nope=64, rope=32, v=32, ff=128, moe_ff=64, vocab=320, experts=8, used=2)

class Mock(NamedTuple):
  """A model and its type on a target. limit: the error that Judge allows, as activations are halves, or of 8 bits. rows: the most of a schedule.
  together: so many at once too"""
  target: str
  model: str
  quant: str
  limit: float
  rows: int
  together: int
  sizes: dict[str, int] = {}

GLM = dict(q_lora=64, blocks=1, dense=0)
# nine take two tiles of the tensor cores
MOCKED = {"CUDA-halves": Mock("CUDA", "small-ds", "F16", 1e-5, 2, 9), "CUDA-quantized": Mock("CUDA", "small-glm", "Q4_0", 1e-3, 4, 3, GLM),
          "METAL-quantized": Mock("METAL", "small-glm", "Q4_0", 1e-3, 4, 3, GLM)}

class Mocked:
  """A model on a mock, and what the oracle says of it"""
  def __init__(self, path: Path, mock: Mock):
    self.path, self.limit, self.rows, self.together, self.runner = path, mock.limit, mock.rows, mock.together, runner_of(path, 2 * PAGE)
    self.runner.sizes = self.runner.sizes[:1]   # of the larger chunks' kernels test_prefill has all
    self.judged: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
    rng = random.Random(0)
    self.base = [rng.randrange(320) for _ in range(PAGE + 2)]
  def request(self, rng: random.Random, shared: int, own: int, limit: int) -> Request:
    return Request(self.base[:shared] + [rng.randrange(320) for _ in range(own)], limit=limit)
  def assert_likely(self, s: Sequence) -> None:
    """Each token that it said is the oracle's, or as good: the logits of both are as near as rounding makes them, six deviations of what Judge's
    limit allows, or the router's choice is"""
    ids = *s.ids,
    if ids not in self.judged: self.judged[ids] = forward(self.path, ids)
    (logits, margins), near = self.judged[ids], (2 * self.limit) ** .5
    for token, row, margin in zip(s.produced, logits[s.prompt - 1:], margins[s.prompt - 1:]):
      assert row.max() - row[token] <= 6 * near * row.std() or margin < near, f"{token}, expected {row.argmax()}"
  def schedule(self, seed: int) -> None:
    """At random: prompts with a common page or without, lengths, arrivals, ends, rows at once and pages; some are aborted"""
    rng = random.Random(seed)
    requests = [self.request(rng, rng.choice((0, 0, 30, PAGE, PAGE + 2)), rng.choice((1, 3, 30)), rng.choice((1, 4, 8)))
                for _ in range(rng.randint(3, 7))]
    engine = Pressed(self.runner, rng.choice((4, 5, 6, 12)), rng.randint(2, self.rows), rng.choice((0.0, math.inf)))
    for s in run(engine, requests, rng, (0, 0, 1, 3), aborts=rng.choice((0.0, 0.0, .05))):
      assert s.reason == "abort" or s.reason == "length" and len(s.produced) == s.limit
      self.assert_likely(s)

@pytest.fixture(scope="module", params=MOCKED)
def mocked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mocked]:
  mock = MOCKED[request.param]
  path, = write_model(tmp_path_factory.mktemp("many") / "m.gguf", mock.model, mock.quant, seed=2, **LEAST | mock.sizes)
  with TARGETS[mock.target](): yield Mocked(path, mock)

@pytest.mark.parametrize("seed", range(5))
def test_schedules_on_a_mock(mocked: Mocked, seed: int): mocked.schedule(seed)

def test_too_few_pages_on_a_mock(mocked: Mocked):
  """Answers go on into the next page, which is not there for all"""
  rng = random.Random(0)
  engine = Pressed(mocked.runner, 2 * mocked.rows, max_rows=mocked.rows, max_stall=math.inf)   # one page is missing
  requests = [mocked.request(rng, 30, PAGE - 32, 5) for _ in range(mocked.rows + 1)]
  for s in run(engine, requests, rng, waits=(0,)):
    assert s.reason == "length" and len(s.produced) == 5
    mocked.assert_likely(s)
  assert engine.preempted

def test_together_on_a_mock(mocked: Mocked):
  """All join the first step and end in the same"""
  engine, rng = Pressed(mocked.runner, PAGES, max_rows=mocked.together, max_stall=math.inf), random.Random(0)
  for s in run(engine, [mocked.request(rng, 0, 1 + i % 2, 3) for i in range(mocked.together)], rng, waits=(0,)):
    assert s.reason == "length"
    mocked.assert_likely(s)
  assert mocked.runner.batch is mocked.runner.batch_of(mocked.together)

def test_probabilities_and_constraints_on_a_mock(mocked: Mocked):
  engine, rng = Pressed(mocked.runner, PAGES), random.Random(1)
  prompts = [list(mocked.request(rng, 0, 1 + i, 3).ids) for i in range(5)]
  each = run(engine, of_all_kinds(prompts, 320, 3)[1:4 if mocked.rows > 2 else 3], rng, waits=(0,))
  for s in each:
    assert s.reason == "length" and len(s.produced) == 3, s.error
    logits, _ = forward(mocked.path, s.ids[:-1])
    if s.told is not None: assert_told(s, logits, 6 * (2 * mocked.limit) ** .5 * logits.std())

def test_rows_that_are_not_there_on_a_mock(mocked: Mocked): assert_page_0_alone(mocked.runner, mocked.together)

# ---- ids that the host does not see ----

class Unseen:
  """The log, as a host that sees what the device wrote only after it has waited for it"""
  def __init__(self, runner: Runner, monkeypatch: pytest.MonkeyPatch):
    self.log, self.waited, wait, launch = runner.batch.logged, False, runner.wait, runner.launch
    def waits() -> None:
      wait()
      self.waited = True
    def launches() -> None:
      self.waited = False
      launch()
    monkeypatch.setattr(runner, "wait", waits)
    monkeypatch.setattr(runner, "launch", launches)
    monkeypatch.setattr(runner.batch, "logged", self)
  def __getitem__(self, places: Any) -> np.ndarray: return self.log[places] if self.waited else np.full_like(self.log[places], -1)
  def __setitem__(self, places: Any, value: int) -> None: self.log[places] = value

def test_a_host_that_sees_no_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
  """It waits for the device, some times for as long as its patience is; then it asks only when all is done, and says so"""
  runner = runner_of(write_model(tmp_path / "m.gguf", "small-glm", "F16", seed=6, **SMALL)[0])
  engine = Engine(runner, PAGES)
  want = list(engine.generate([5, 6, 7], 12))
  monkeypatch.setattr(runner_module, "PATIENCE", 0.01)
  Unseen(runner, monkeypatch)
  assert runner.in_flight == 2 and list(engine.generate([5, 6, 7], 12)) == want and runner.in_flight == 1
  assert "no step is launched ahead" in capfd.readouterr().err

"""The engine on a toy model whose next token tells of every row that it read: what a sequence says is what it says alone, whoever else is there."""
from __future__ import annotations
import itertools, random, sys, threading, weakref
from collections import deque
from dataclasses import replace
from typing import Any, Callable
import numpy as np, pytest
from helpers import in_child
from tinygrad.apps.engine import cache, constraint, engine, scheduler, sequence
from tinygrad.apps.engine.engine import ContextFull, DeviceFailed, Engine
from tinygrad.apps.engine.sampling import Features, Sampling
from tinygrad.apps.engine.sequence import BatchRow, Logprob, Piece, Request, Sequence, State, kinds_of
import toy_runner
from toy_runner import VOCAB, Rule, ToyRunner, alone, bits_of

PROMPT = np.random.default_rng(0).integers(0, VOCAB, 400).tolist()

@pytest.fixture(params=[4, 64])
def page(request, monkeypatch) -> int:
  monkeypatch.setattr(cache, "PAGE", request.param)
  return request.param

@pytest.fixture(autouse=True)
def strips(monkeypatch):
  for module in (scheduler, toy_runner): monkeypatch.setattr(module, "STRIP", 4)

def toy(pages: int = 40, max_context: int = 512, runner: Callable[..., ToyRunner] = ToyRunner, max_rows: int = 64, **kw: Any) -> Engine:
  e = Engine(runner(pages, max_context, **kw), pages, max_rows)
  e.runner.pool = e.pool  # type: ignore[attr-defined]
  return e
def check(e: Engine) -> None: e.pool.check(e.scheduler.tables)
def finish(e: Engine) -> None:
  """All that is left to do; then no page is held but by the tree, and none when that is forgotten"""
  while e.step(): check(e)
  assert not e.scheduler.live and not e.flying and e.pool.available == e.pool.pages - 1
  assert not getattr(e.runner, "unread", None)
  e.forget()
  assert len(e.pool.free) == e.pool.pages - 1
  check(e)

# ---- one sequence ----

@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("n", [1, 2, 4, 5, 8, 9, 32, 41, 64, 65, 128, 130])
def test_alone(page: int, n: int, in_flight: int):
  e = toy(60, in_flight=in_flight)
  want = alone(PROMPT[:n], 70)
  assert list(e.generate(PROMPT[:n], 70)) == want
  assert list(e.generate(PROMPT[:n], 70)) == want                          # by what the cache holds
  s = e.add(Request(PROMPT[:n], limit=9, stop=frozenset({want[3]})))
  assert list(e.stream(s)) == list(e.stream(s)) == s.produced == want[:want.index(want[3]) + 1] and s.reason == "stop"
  finish(e)

def test_a_step_is_launched_before_the_last_is_read():
  e = toy()
  answer, runner = e.generate(PROMPT[:5], 10), e.runner
  for n in range(1, 11):
    next(answer)
    assert runner.launches == min(n + 1, 10)                               # none for what comes after the last
  assert list(answer) == []

def test_a_batchs_second_step_has_drafts(monkeypatch: pytest.MonkeyPatch):
  """It is launched when the first has said whether there are some; later ones before the last is read"""
  seconds = set()
  for n in range(5, 25):
    e, did = toy(drafts=3), []
    def watch(what: str, e: Engine = e, did: list[str] = did) -> None:
      does = getattr(e.runner, what)
      def watched() -> Any:
        result = does()
        did.append(f"{what} {e.runner.found.any()}" if what == "read" else what)
        return result
      monkeypatch.setattr(e.runner, what, watched)
    for what in ("launch", "verify", "read"): watch(what)
    s = e.add(Request(PROMPT[:n], limit=20))
    while len(did) < 4: e.step()
    assert did[0] == "launch" and did[1].startswith("read") and did[2] == ("verify" if did[1] == "read True" else "launch")
    assert did[3] in ("launch", "verify"), "the third step waits, too"
    seconds.add(did[2])
    e.abort(s)
    finish(e)
  assert len(seconds) == 2
  finish(e)

def test_where_launches_wait_none_is_made_ahead():
  e = toy(in_flight=1)
  answer = e.generate(PROMPT[:5], 10)
  for n in range(1, 11):
    next(answer)
    assert e.runner.launches == n
  finish(e)

def test_reasons(page: int):
  e = toy(60, 100)
  done = e.add(Request(PROMPT[:90]))
  assert len(list(e.stream(done))) == 10 and (done.reason, done.full, e.full) == ("length", True, True)
  short = e.add(Request(PROMPT[:90], limit=2))
  assert len(list(e.stream(short))) == 2 and (short.reason, short.full, e.full) == ("length", False, False)
  none = e.add(Request(PROMPT[:90], limit=0))
  assert list(e.stream(none)) == [] and none.reason == "length"
  some = e.add(Request(PROMPT[:9]))
  answer = e.stream(some)
  said = [next(answer), next(answer)]
  e.abort(some)
  assert some.reason == "abort" and said + list(answer) == alone(PROMPT[:9], len(some.produced)) and len(some.produced) == 2
  e.abort(some)
  e.abort(short)
  assert (some.reason, short.reason) == ("abort", "length")
  finish(e)

def test_what_can_never_fit():
  e = toy(40, 100)
  for n in (100, 101):
    with pytest.raises(ContextFull, match=f"^the prompt has {n} tokens, max_context is 100: nothing is left for an answer$"):
      e.add(Request(PROMPT[:n]))
  small = toy(3, 512)
  with pytest.raises(ContextFull, match="^the prompt has 128 tokens, the cache holds 128: nothing is left for an answer$"):
    small.add(Request(PROMPT[:128]))
  assert list(small.generate(PROMPT[:127])) == alone(PROMPT[:127], 1) and small.full
  assert list(small.generate(PROMPT[:120], 50)) == alone(PROMPT[:120], 8) and small.full
  with pytest.raises(ContextFull, match="101 tokens do not fit"): e.logits(PROMPT[:101])
  for x in (e, small): finish(x)

@pytest.mark.parametrize("request_,message", [
  (Request([]), "no tokens: give at least one"), (Request([1, VOCAB]), f"token {VOCAB}: expected 0 to {VOCAB - 1}"),
  (Request([1.5]), "token: expected a whole number"),
  (Request([1], logprobs=21), "logprobs: expected 0 to 20, found 21"), (Request([1], logprobs=-1), "logprobs: expected 0 to 20, found -1"),
  (Request([1], logprobs=True), "logprobs: expected a whole number, found True"),
  (Request([1], limit=-1), "count: expected 0 or more, found -1"), (Request([1], limit=True), "count: expected a whole number, found True"),
  (Request("ab"), "tokens: expected a list of numbers, found str")], ids=str)
def test_what_is_no_request(request_: Request, message: str):
  e = toy()
  with pytest.raises(ValueError, match=message): e.add(request_)
  with pytest.raises(ValueError, match="^count: expected 0 or more, found -1"): next(e.generate([1], -1))
  finish(e)

def test_rows_are_reused(page: int):
  e = toy(100)
  out = list(e.generate(PROMPT[:100], 30))
  counted = e.runner.prefilled
  longer = PROMPT[:100] + out + PROMPT[:40]
  assert list(e.generate(longer, 5)) == alone(longer, 5)
  assert e.runner.prefilled - counted == 40                                # the last token of an answer was never fed, that of a prompt is run
  other = PROMPT[:100] + [1] * 30
  counted = e.runner.prefilled
  assert list(e.generate(other, 5)) == alone(other, 5)
  assert e.runner.prefilled - counted == 129 - 100 // page * page
  e.forget()
  counted = e.runner.prefilled
  assert list(e.generate(other, 5)) == alone(other, 5) and e.runner.prefilled - counted == 129
  finish(e)

def test_an_answer_interrupted_goes_on_from_its_rows():
  """By closing its iterator: the last page, not full, serves whoever goes on with it"""
  e = toy()
  answer = e.generate(PROMPT[:100])
  out = [next(answer) for _ in range(10)]
  answer.close()
  assert not e.scheduler.live
  counted = e.runner.prefilled
  assert list(e.generate(PROMPT[:100] + out, 5)) == alone(PROMPT[:100] + out, 5) and e.runner.prefilled == counted
  finish(e)

def test_prefill_and_logits(page: int):
  e = toy(100)
  e.prefill(PROMPT[:50])
  assert e.runner.prefilled == 49 and e.runner.launches == 0
  running = e.generate(PROMPT[200:210], 30)
  said = [next(running)]
  assert e.logits(PROMPT[:60]).argmax(-1).tolist() == [alone(PROMPT[:n], 1)[0] for n in range(1, 61)]
  counted = e.runner.prefilled
  assert list(e.generate(PROMPT[:60] + [3], 5)) == alone(PROMPT[:60] + [3], 5) and e.runner.prefilled == counted
  assert said + list(running) == alone(PROMPT[200:210], 30)
  full = toy(100 // page + 2, 100)                                         # logits need the pages that an answer has
  running = full.generate(PROMPT[200:260], 30)
  said = [next(running)]
  assert full.logits(PROMPT[:100]).shape == (100, VOCAB)
  assert said + list(running) == alone(PROMPT[200:260], 30)
  for x in (e, full): finish(x)

def test_forget_while_answers_run(page: int):
  e = toy(100)
  a, b = e.generate(PROMPT[:70], 40), e.generate(PROMPT[:80], 40)
  first, second = [next(a)], [next(b)]
  e.forget()
  check(e)
  assert first + list(a) == alone(PROMPT[:70], 40) and second + list(b) == alone(PROMPT[:80], 40)
  finish(e)

# ---- many ----

def test_two_iterators_in_turns(page: int):
  e = toy(100)
  a, b = e.generate(PROMPT[:10], 50), e.generate(PROMPT[20:90], 30, Sampling(1.0, seed=3))
  pairs = list(itertools.zip_longest(a, b))
  assert [x for x, _ in pairs] == alone(PROMPT[:10], 50)
  assert [y for _, y in pairs if y is not None] == alone(PROMPT[20:90], 30, Sampling(1.0, seed=3))
  finish(e)

def test_one_prompt_many_times(page: int):
  """All at once: the first computes its rows, the others share the full pages"""
  e = toy(600)
  each = [e.add(Request(PROMPT[:130], Sampling(1.0, seed=i), limit=70)) for i in range(8)]
  each += [e.add(Request(PROMPT[:128], limit=70)) for i in range(3)]       # the same answers: pages that are equal
  finish(e)
  for i, s in enumerate(each[:8]): assert s.produced == alone(PROMPT[:130], 70, Sampling(1.0, seed=i))
  for s in each[8:]: assert s.produced == alone(PROMPT[:128], 70)
  assert e.runner.prefilled <= 129 + 7 * (129 - 129 // page * page) + 3 * (127 - 127 // page * page)

def random_request(rng: random.Random, prompts: list[list[int]], most: int) -> Request:
  beginning = rng.choice(prompts)
  ids = beginning[:rng.randint(0, len(beginning))] + [rng.randrange(VOCAB) for _ in range(rng.choice((0, 1, 3, 30)))]
  ids = (ids or [rng.randrange(VOCAB)])[:most]
  sampling = rng.choice((Sampling(), Sampling(1.0, seed=rng.randrange(9)), Sampling(repeat_penalty=2.0)))
  stop = frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 1, 3))))
  rule = Rule(rng.randrange(9), slow=rng.choice((0, 1e-4))) if rng.random() < .2 else None
  return Request(ids, sampling, stop, rng.choice((None, None, 0, 1, 2, 10, 40, 100)), rng.choice((None, None, None, 0, 3)), rule)

def said(request: Request, count: int) -> tuple[list[int], list[Logprob]]:
  """What a request's sequence says alone, and its probabilities"""
  odds: list[Logprob] = []
  tokens = alone(request.ids, count, request.sampling, request.stop, request.constraint and request.constraint.again(), odds)
  return tokens, [] if request.logprobs is None else [Logprob(value, top[:request.logprobs]) for value, top in odds]

@pytest.mark.parametrize("seed", range(300))
def test_random_schedules(seed: int, monkeypatch):
  """Arrivals, ends, aborts, prompts that begin alike, pages that do not do for all: the pool is whole after each piece of work"""
  rng = random.Random(seed)
  page = rng.choice((1, 2, 4, 8, 8, 64))
  monkeypatch.setattr(cache, "PAGE", page)
  max_context = rng.choice((20, 60, 150))
  enough = -(-max_context // page)
  pages = 1 + rng.choice((enough // 2 + 1, enough, enough + 1, enough + rng.randint(1, 3), 3 * enough // 2, 5 * enough))
  e = toy(pages, max_context, max_rows=rng.choice((1, 3, 8, 64)), sizes=rng.choice(((8,), (4, 16), (8, 32))), in_flight=rng.choice((1, 2)),
          drafts=seed % 3, ahead=seed // 3 % 2)
  e.scheduler.max_stall = rng.choice((0.0, 1e-4, 1e-3, float("inf")))
  prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, max_context))] for _ in range(3)]
  added: list[tuple[Request, Sequence]] = []
  todo, rate = rng.randint(3, 14), rng.choice((.02, .2, 1.0, 1.0))
  while todo or e.scheduler.live:
    while todo and rng.random() < rate:
      todo, request = todo - 1, random_request(rng, prompts, e.capacity - 1)
      added.append((request, e.add(request)))
      if len(added[-1][1].produced) > 2 and rng.random() < .5: prompts.append(request.ids + added[-1][1].produced)  # goes on with what was said
    if added and rng.random() < .02: e.abort(rng.choice(added)[1])
    if rng.random() < .005: e.forget()
    busy = e.step()
    assert busy or not e.scheduler.live
    check(e)
    ended = [(r, s) for r, s in added if s.state is State.ENDED]
    if ended and rng.random() < .1: prompts[rng.randrange(len(prompts))] = ended[-1][1].ids[:e.capacity - 1]
  for request, s in added:
    room = e.capacity - len(request.ids)
    want, odds = said(request, room if request.limit is None else min(room, request.limit))
    assert s.produced == (want[:len(s.produced)] if s.reason == "abort" else want), (request, s.reason)
    assert s.logprobs == odds[:len(s.produced)]
    if request.constraint is None: continue
    seen = list(request.constraint.seen)                                   # by worker threads, which may be at work for one that was aborted
    assert seen == s.produced[:len(seen)] and (s.reason == "abort" or len(seen) == max(len(s.produced) - 1, 0))
    if s.reason != "abort": assert s.reason == ("stop" if want and want[-1] in request.stop else "length")
  assert not e.runner.forgotten
  finish(e)

def test_the_random_schedules_preempt_and_evict(monkeypatch):
  """So that the test above shows what it says"""
  counts = {"preempt": 0, "_free": 0, "match": 0, "twins": 0, "tails": 0}
  def counted(what: type, name: str) -> None:
    original = getattr(what, name)
    def call(self, *args):
      counts[name] += 1
      result = original(self, *args)
      if name == "match": counts["tails"] += len(result[0].pages) > result[0].depth
      return result
    monkeypatch.setattr(what, name, call)
  for what, name in ((scheduler.Scheduler, "preempt"), (cache.Pool, "_free"), (cache.Pool, "match")): counted(what, name)
  insert = cache.Pool.insert
  def noted(self, table, ids, rows):
    insert(self, table, ids, rows)
    counts["twins"] += bool(table.twins)
  monkeypatch.setattr(cache.Pool, "insert", noted)
  for seed in range(80): test_random_schedules(seed, monkeypatch)
  assert min(counts.values()) >= 20, counts

def test_threads(page: int):
  """Eight, each with iterators of its own, some left early: one at a time is at the device"""
  inside, wrong, said = threading.Semaphore(), [], []
  class Watched(ToyRunner):
    def launch(self) -> None:
      if not inside.acquire(blocking=False): wrong.append("two at the device")
      super().launch()
      inside.release()
  e = toy(120, runner=Watched)
  def talk(number: int) -> None:
    rng = random.Random(number)
    try:
      for _ in range(6):
        n, count, seed = rng.randint(1, 150), rng.randint(1, 60), rng.randrange(5)
        answer = e.generate(PROMPT[:n], count, Sampling(1.0, seed=seed))
        out = list(itertools.islice(answer, rng.choice((count, count // 2))))
        answer.close()
        said.append((out, n, seed))
    except BaseException as x: wrong.append(repr(x))
  threads = [threading.Thread(target=talk, args=(i,)) for i in range(8)]
  for t in threads: t.start()
  for t in threads: t.join(60)
  assert not wrong and not any(t.is_alive() for t in threads) and len(said) == 48
  for out, n, seed in said: assert out == alone(PROMPT[:n], len(out), Sampling(1.0, seed=seed))
  finish(e)

def test_two_engines_in_two_threads():
  """What records steps is the process's: never do two engines work at once"""
  inside, wrong = threading.Semaphore(), []
  class Watched(ToyRunner):
    def launch(self) -> None:
      if not inside.acquire(blocking=False): wrong.append("two at the device")
      super().launch()
      inside.release()
  engines, said = [toy(runner=Watched) for _ in range(2)], {}
  def talk(i: int) -> None: said[i] = list(engines[i].generate(PROMPT[:20], 200))
  threads = [threading.Thread(target=talk, args=(i,)) for i in range(2)]
  for t in threads: t.start()
  for t in threads: t.join(60)
  assert not wrong and said == {i: alone(PROMPT[:20], 200) for i in range(2)}

def test_abort_from_another_thread():
  e, at_work, go_on = toy(), threading.Event(), threading.Event()
  class Slow(ToyRunner):
    def read(self) -> np.ndarray:
      at_work.set()
      assert go_on.wait(60)
      return super().read()
  e = toy(runner=Slow)
  s, other, said = e.add(Request(PROMPT[:20])), e.add(Request(PROMPT[:9], limit=20)), []
  thread = threading.Thread(target=lambda: said.extend(e.stream(s)))
  thread.start()
  assert at_work.wait(60)
  e.abort(s)                                                               # does not wait for the device
  go_on.set()
  thread.join(60)
  assert not thread.is_alive() and s.reason == "abort" and said == alone(PROMPT[:20], len(said))
  assert list(e.stream(other)) == alone(PROMPT[:9], 20)
  finish(e)

def test_a_child_process():
  """Forked while another thread is at the device: that thread is not there to end its step"""
  at_work, go_on = threading.Event(), threading.Event()
  class Slow(ToyRunner):
    def read(self) -> np.ndarray:
      if threading.current_thread() is not threading.main_thread():
        at_work.set()
        assert go_on.wait(60)
      return super().read()
  e, said = toy(runner=Slow), []
  thread = threading.Thread(target=lambda: said.extend(e.generate(PROMPT[:20], 30)))
  thread.start()
  try:
    assert at_work.wait(60)
    assert in_child(lambda: list(e.generate(PROMPT[:30], 20))) == alone(PROMPT[:30], 20)
  finally:
    go_on.set()
    thread.join(60)
  assert said == alone(PROMPT[:20], 30)

# ---- what is told beside the tokens ----

def test_logprobs_are_parallel_to_the_tokens(page: int):
  """Of the rows that ask, as many as each asks for; at any time as many as there are tokens"""
  e, requests = toy(100), [Request(PROMPT[9 * i:9 * i + 20], limit=30, logprobs=n) for i, n in enumerate((None, 0, 5, None, 20))]
  each = [e.add(r) for r in requests]
  while e.step():
    for s in each: assert len(s.logprobs) == (0 if s.told is None else len(s.produced))
  for r, s in zip(requests, each): assert (s.produced, s.logprobs) == said(r, 30)
  assert [len(each[i].logprobs[0].top) for i in (1, 2, 4)] == [0, 5, 20] and not each[0].logprobs
  finish(e)

def test_what_was_cached_and_when(monkeypatch):
  monkeypatch.setattr(cache, "PAGE", 8)
  now = itertools.count(100)
  for module in (scheduler, sequence): monkeypatch.setattr(module.time, "monotonic", lambda: float(next(now)))
  e = toy(100)
  first = e.add(Request(PROMPT[:41], limit=4))
  second = e.add(Request(PROMPT[:30], limit=0))
  assert e.gauges[:7] == (0, 2, 0, 0, 0, 0, 0) and first.times == sequence.Times(100) and second.times == sequence.Times(101)
  e.step()
  assert e.gauges[:3] == (1, 1, 6) and first.times.begun == 102
  while e.step(): pass
  assert (first.cached, second.cached) == (0, 24) and e.gauges[:7] == (0, 0, 0, 71, 24, 0, 4)
  assert 102 < first.times.first < first.times.last and second.times.begun and not second.times.first and not second.times.last
  again = e.add(Request(PROMPT[:41], limit=1))
  while e.step(): pass
  assert again.cached == 40 and again.times.first == again.times.last
  few = toy(9)
  each = [few.add(Request(PROMPT[:20 + i], limit=30)) for i in range(2)]
  while few.step(): pass
  assert few.gauges.preemptions and few.gauges.queries == 41 and each[1].cached == few.gauges.hits == 16

# ---- constraints ----

class Held(Rule):
  """Its masks wait for `go_on`, and `at_work` tells of one"""
  def __init__(self, seed: int, free: int = 0):
    super().__init__(seed)
    self.free, self.at_work, self.go_on = free, threading.Event(), threading.Event()
  def mask(self) -> np.ndarray:
    if len(self.seen) >= self.free:
      self.at_work.set()
      assert self.go_on.wait(60)
    return super().mask()

@pytest.mark.parametrize("in_flight", [1, 2])
def test_constraints(page: int, in_flight: int):
  e = toy(100, in_flight=in_flight)
  requests = [Request(PROMPT[9 * i:9 * i + 20], Sampling(1.0, seed=i), limit=30, constraint=Rule(i) if i % 2 else None) for i in range(5)]
  each = [e.add(r) for r in requests]
  finish(e)
  for r, s in zip(requests, each): assert (s.produced, s.reason) == (said(r, 30)[0], "length")

def test_the_model_runs_while_a_mask_is_made():
  """A step of a batch with a constraint is launched before the token before it is read, but for the draw"""
  e, rule = toy(), Held(1, free=3)
  e.scheduler.max_stall = float("inf")
  s = e.add(Request(PROMPT[:5], limit=10, constraint=rule))
  while len(s.produced) < 3: e.step()
  assert rule.at_work.wait(60) and e.runner.launches == 4 and not e.drawn and not e.runner.unread
  other = e.add(Request(PROMPT[50:60], limit=5))
  threading.Timer(.05, rule.go_on.set).start()
  e.step()                                                                 # the prompt's chunk goes before the mask is there
  assert e.runner.prefilled > 4 and len(s.produced) == 4
  finish(e)
  assert s.produced == alone(PROMPT[:5], 10, constraint=Rule(1)) and other.produced == alone(PROMPT[50:60], 5)

def test_nobody_waits_for_a_first_mask():
  """A grammar is compiled with it, which may take its time: others go on, and come in before"""
  e, rule = toy(), Held(1)
  others = [e.add(Request(PROMPT[:5], limit=40))]
  s = e.add(Request(PROMPT[9:20], limit=10, constraint=rule))
  others.append(e.add(Request(PROMPT[20:30], limit=20)))
  while not all(o.state is State.ENDED for o in others): assert e.step()
  assert s.state is State.WAITING and e.step() and e.step()                # it is still to be waited for
  rule.go_on.set()
  assert list(e.stream(s)) == alone(PROMPT[9:20], 10, constraint=Rule(1))
  assert [o.produced for o in others] == [alone(PROMPT[:5], 40), alone(PROMPT[20:30], 20)]
  finish(e)

class Broken(Rule):
  def __init__(self, what: str, at: int):
    super().__init__(1)
    self.what, self.at = what, at
  def mask(self) -> np.ndarray:
    if len(self.seen) < self.at: return super().mask()
    if self.what == "nothing": return bits_of(set())
    if self.what == "behind the vocabulary": return bits_of({VOCAB, VOCAB + 1})
    if self.what == "short": return super().mask()[1:]
    if self.what == "mask": raise RuntimeError("planted")
    return super().mask()
  def accept(self, token: int) -> None:
    super().accept(token)
    if self.what == "accept" and len(self.seen) == self.at: raise RuntimeError("planted")

@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("what,error", [("nothing", "no token is allowed"), ("behind the vocabulary", "no token is allowed"),
                                        ("short", "expected a mask of 4 uint32, found uint32 of shape \\(3,\\)"), ("mask", "planted"),
                                        ("accept", "planted")])
def test_a_constraint_that_fails(what: str, error: str, at: int, page: int):
  """Its own sequence alone ends"""
  e, at = toy(100), max(at, what == "accept")
  s = e.add(Request(PROMPT[:20], limit=30, constraint=Broken(what, at)))
  others = [e.add(Request(PROMPT[9 * i:9 * i + 20], limit=25, constraint=rule)) for i, rule in ((1, Rule(5)), (2, None))]
  finish(e)
  assert s.reason == "error" and s.produced == alone(PROMPT[:20], at, constraint=Rule(1))
  with pytest.raises((ValueError, RuntimeError), match=error): list(e.stream(s))
  assert [o.produced for o in others] == [alone(PROMPT[9:29], 25, constraint=Rule(5)), alone(PROMPT[18:38], 25)]

def test_an_abort_while_a_mask_is_made():
  e, rule = toy(), Held(1, free=2)
  s, other = e.add(Request(PROMPT[:5], constraint=rule)), e.add(Request(PROMPT[9:20], limit=30))
  while len(s.produced) < 2: e.step()
  assert rule.at_work.wait(60)
  e.abort(s)
  assert s.reason == "abort" and list(e.stream(other)) == alone(PROMPT[9:20], 30)
  rule.go_on.set()
  waiting = e.add(Request(PROMPT[:5], constraint=(rule := Held(1))))
  assert rule.at_work.wait(60)
  e.abort(waiting)
  assert waiting.reason == "abort"
  finish(e)   # what was under way; the mask is not waited for
  rule.go_on.set()
  finish(e)

def test_preemption_feeds_a_constraint_no_token_twice(monkeypatch):
  monkeypatch.setattr(cache, "PAGE", 4)
  e, requests = toy(16), [Request(PROMPT[5 * i:5 * i + 9], limit=30, logprobs=2, constraint=Rule(i)) for i in range(4)]
  each = [e.add(r) for r in requests]
  finish(e)
  assert e.gauges.preemptions
  for r, s in zip(requests, each): assert (s.produced, s.logprobs) == said(r, 30) and r.constraint.seen == s.produced[:-1]

def test_prompts_share_chunks(page: int):
  """Some begin alike, some are longer than a chunk, one leaves while its chunk is under way: each says what it says alone"""
  given: list[list[int]] = []
  class Told(ToyRunner):
    def prefill(self, pieces: list[Piece], size: int, slices: range, shared: bool) -> None:
      super().prefill(pieces, size, slices, shared)
      if slices.start == 0: given.append([len(piece.ids) for piece in pieces])
  e = toy(200, runner=Told)
  prompts = [PROMPT[i:i + n] for i, n in ((0, 9), (20, 6), (0, 9), (40, 8), (60, 90), (160, 3), (0, 12), (200, 5))]
  each = [e.add(Request(ids, limit=6)) for ids in prompts]
  e.step()
  assert given == [[8, 5, 8, 7]] if page == 64 else [[8, 5]]   # of pages of 4 the third has those of the first
  finish(e)
  for s, ids in zip(each, prompts): assert s.produced == alone(ids, 6)
  running = e.add(Request(PROMPT[:2]))
  while len(running.produced) < 3: e.step()
  e.max_stall = e.scheduler.max_stall = 1e-9                   # a slice between two steps
  e.scheduler.seconds.clear()
  given.clear()
  first, second, third = (e.add(Request(PROMPT[i:i + 9], limit=6)) for i in (300, 320, 340))
  while not given: e.step()
  assert given == [[8, 8, 8]] and e.scheduler.begun is not None
  e.abort(second)
  e.abort(running)
  finish(e)
  assert given == [[8, 8, 8]] and not second.produced and all(s.produced == alone(s.ids[:9], 6) for s in (first, third))

# ---- while a prompt arrives ----

class Device(ToyRunner):
  """With a clock. The device works through what it is given. A step takes it `decode` seconds, a slice of 512 tokens at depth d `slice * (1 + d *
  deeper)`, a quarter of which any size takes; the host takes `host` for each call."""
  decode, slice, deeper, host, first = 4e-3, 2.1e-3, 1 / 3000, 1e-4, 0.0
  slices, long = 24, False
  def __init__(self, pages: int, max_context: int):
    super().__init__(pages, max_context, sizes=(32, 128, 256, 512, 1024, 2048)[:None if self.long else 4])
    self.beside, self.now, self.free, self.done, self.recorded = 170, 0.0, 0.0, deque(), set()
  def give(self, seconds: float) -> None:
    self.now += self.host
    self.free = max(self.now, self.free) + seconds
  def prefill(self, pieces: list[Piece], size: int, slices: range, shared: bool) -> None:
    if size not in self.recorded: self.now += self.first
    self.recorded.add(size)
    self.give(len(slices) * self.slice * (.25 + .75 * size / 512) * (1 + pieces[0].start * self.deeper))
  def launch(self) -> None:
    super().launch()
    self.give(self.decode)
    self.done.append(self.free)
  def read(self) -> np.ndarray:
    self.now = max(self.now, self.done.popleft())
    return super().read()
  def wait(self, first: bool = False) -> None: self.now = max(self.now, self.free)

def arrival(monkeypatch, answers: int = 8, tokens: int = 8192, target: float = .05, rounds: int = 2,
            **speeds: float|bool) -> tuple[list[float], float, Device]:
  """The times between the tokens of some answers while a prompt is read, and the share of its own speed that this has, both of the last round"""
  e = toy(1000, 3 * tokens, runner=type("Device", (Device,), speeds))
  e.runner.pool, e.scheduler.max_stall, device = None, target, e.runner
  monkeypatch.setattr(engine.time, "perf_counter", lambda: device.now)
  rng = np.random.default_rng(0)
  def prompt(n: int) -> list[int]: return rng.integers(0, VOCAB, n).tolist()
  for _ in range(rounds):
    start = device.now
    e.prefill(prompt(tokens))
    e.wait()
    alone_seconds = device.now - start
  running = [e.add(Request(prompt(1))) for _ in range(answers)]
  while min(len(s.produced) for s in running) < 20: e.step()
  for _ in range(rounds):
    times, start, s, said = [device.now], device.now, e.add(Request(prompt(tokens), limit=1)), len(running[0].produced)
    while s.state is not State.ENDED:
      e.step()
      if len(running[0].produced) > said: times, said = times + [device.now], len(running[0].produced)
    share = alone_seconds / (device.now - start)
  return np.diff(times).tolist(), share, device

@pytest.mark.parametrize("target, deeper, share", [(.05, 0.0, .85), (.05, 1 / 20000, .85), (.05, 1 / 3000, .85),
                                                   (.02, 1 / 3000, .7), (.2, 1 / 3000, .9)])
def test_a_prompt_that_arrives(target: float, deeper: float, share: float, monkeypatch):
  """No answer waits longer than the target, and the prompt has what the decode steps leave"""
  between, found, _ = arrival(monkeypatch, target=target, deeper=deeper)
  assert max(between) <= target * 1.01 and found >= share

@pytest.mark.parametrize("target, share", [(.02, .6), (.05, .85)])
def test_a_prompt_that_arrives_in_long_chunks(target: float, share: float, monkeypatch):
  """Of 2048 tokens, a slice of which takes 6.8 ms where the prompt begins, 29 at its end"""
  between, found, device = arrival(monkeypatch, target=target, long=True)
  assert max(between) <= target * 1.01 and found >= share and 2048 in device.recorded

@pytest.mark.parametrize("stages", [1, 3])
def test_chunks_ahead(stages: int):
  """Each of a chunk's devices has four to do before the first is waited for; all are where a size is new, and while an answer runs"""
  given, waited = [0], list[bool]()
  class Counting(Device):
    def prefill(self, *args: Any) -> None:
      super().prefill(*args)
      given[-1] += 1
    def wait(self, first: bool = False) -> None:
      super().wait()
      waited.append(first)
      given.append(0)
  e = toy(1000, 9000, runner=Counting)
  e.runner.pool, e.runner.stages = None, stages
  e.prefill([1] * 8193)
  assert given[0] == 1 and max(given) == 4 * stages and len(waited) > 1 and waited == [False] + [True] * (len(waited) - 1)
  running = e.add(Request([1]))
  while not running.produced: e.step()
  waited.clear()
  e.add(Request([2] * 500))
  while e.scheduler.prefilling or not waited: e.step()
  assert not any(waited)

def test_slices_that_are_slow(monkeypatch):
  """Those of smaller chunks fit"""
  between, _, device = arrival(monkeypatch, tokens=2048, slice=.08, deeper=0.0)
  assert max(between) <= .0505 and device.recorded == {128, 256, 512} and np.percentile(between, 50) > .035

def test_a_target_that_cannot_be_met(monkeypatch):
  """A slice between two steps, and no more"""
  between, _, device = arrival(monkeypatch, tokens=1024, target=.001)
  assert max(between) == pytest.approx(device.decode + device.slice * (.25 + .75 / 16) * (1 + 1024 * device.deeper), rel=.2)

def test_sizes_not_recorded_are_waited_for_once_and_said(monkeypatch, capsys):
  """The first chunk of a size is recorded while answers run: they wait for that, and for one slice at a time until its time is known"""
  e = toy(1000, 4096, runner=type("Cold", (Device,), dict(first=7.0)))
  e.runner.pool, device, stalls = None, e.runner, []
  monkeypatch.setattr(engine.time, "perf_counter", lambda: device.now)
  list(e.generate(PROMPT[:20], 1))   # nobody else waits
  assert device.recorded == {32} and capsys.readouterr() == ("", "")
  running, said = e.add(Request([1])), 0
  while len(running.produced) < 5: e.step()
  before, arrived = device.now, e.add(Request((PROMPT * 3)[:1025], limit=1))
  while arrived.state is not State.ENDED:
    e.step()
    if len(running.produced) > said: said, before, stalls = len(running.produced), device.now, stalls + [device.now - before]
  cold = stalls.index(max(stalls))
  assert 7 < stalls.pop(cold) < 7.01 and max(stalls[cold:cold + device.slices - 1]) < .01 < max(stalls) < .051
  e.prefill(PROMPT[100:200])
  assert device.recorded == {32, 128, 512}
  out, err = capsys.readouterr()
  assert out == "" and err == ("answers waited 7.0 s while chunks of 512 tokens were recorded and compiled, as any size is when first needed: "
                               "--warm does all at the start\n")

def test_warming_beside_answers(page: int):
  """All sizes are known then, and what runs goes on"""
  e = toy(100, max_rows=5)
  answer, sampling = e.generate(PROMPT[:10], 30), Sampling(.5, top_p=.9)
  said = [next(answer), next(answer)]
  e.warm(sampling, Features(mask=True))
  assert e.runner.warmed == [(5, [sampling.features, replace(sampling.features, mask=True)])] and not e.flying
  assert e.recorded == {*kinds_of(e.runner.sizes, True)}
  assert said + list(answer) == alone(PROMPT[:10], 30)
  finish(e)

# ---- what fails ----

class Failing(ToyRunner):
  """Fails when `fails` says so of a call's name"""
  fails: Callable[[str], bool] = staticmethod(lambda name: False)
  after = False    # the call was done, then failed
  error: Callable[[], BaseException] = staticmethod(lambda: RuntimeError("planted"))
def planted(name: str) -> Callable[..., Any]:
  def call(self: Failing, *args: Any, **named: Any) -> Any:
    fails = type(self).fails(name)
    if fails and not self.after: raise self.error()
    result = getattr(ToyRunner, name)(self, *args, **named)
    if fails: raise self.error()
    return result
  return call
def of_all_kinds() -> list[Request]:
  """Six, some held to a rule, some with probabilities"""
  return [Request(PROMPT[20 * i:20 * i + 30], limit=12 + i, logprobs=(None, 2)[i % 2], constraint=Rule(i) if i % 3 == 2 else None) for i in range(6)]
CALLS = "prefill", "set_batch", "set_table", "launch", "draw", "read", "logprobs", "wait"
for _name in CALLS: setattr(Failing, _name, planted(_name))

@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_device_that_fails(name: str, after: bool, monkeypatch):
  """Once: those it was about say so, the others go on, and so do later ones"""
  monkeypatch.setattr(cache, "PAGE", 8)
  for nth in range(1, 30, 3):
    count = itertools.count(1)
    class Once(Failing): fails = staticmethod(lambda called: called == name and next(count) == nth)
    Once.after = after
    e, requests = toy(100, runner=Once, sizes=(4, 8)), of_all_kinds()
    each = [e.add(r) for r in requests]
    while e.step(): check(e)
    Once.fails = staticmethod(lambda called: False)
    failed = [s for s in each if s.reason == "error"]
    assert len(failed) <= (1 if name in ("prefill", "wait") else 6)
    assert failed or next(count) <= nth + 1                                # fewer calls than that
    for r, s in zip(requests, each):
      want, odds = said(r, r.limit)
      assert s.produced == (want if s not in failed else want[:len(s.produced)]) and s.logprobs[:len(s.produced)] == odds[:len(s.produced)]
      if s in failed:
        with pytest.raises(RuntimeError, match="planted"): list(e.stream(s))
    for n in (30, 45): assert list(e.generate(PROMPT[:n], 20)) == alone(PROMPT[:n], 20)
    finish(e)

@pytest.mark.parametrize("name", CALLS)
def test_a_device_that_stays_failed(name: str, monkeypatch):
  """All end with the line that names it, and nothing is taken any more"""
  monkeypatch.setattr(cache, "PAGE", 8)
  count = itertools.count(1)
  class Broken(Failing):
    error = staticmethod(lambda: RuntimeError("CUDA:1:\nplanted"))
    fails = staticmethod(lambda called: (called == name and next(count) >= 3) or (called == "wait" and next(count) > 3))
  e = toy(100, runner=Broken, sizes=(4, 8), max_rows=4)
  each = [e.add(r) for r in of_all_kinds()]
  while e.step(): check(e)
  broken = [s for s in each if s.reason == "error"]
  assert broken and each[-1] in broken and e.failed == "the device failed: CUDA:1: planted" and not e.scheduler.live
  for s in broken:
    with pytest.raises(DeviceFailed, match="^the device failed: CUDA:1: planted$"): list(e.stream(s))
  with pytest.raises(DeviceFailed): e.add(Request([1]))
  e.abort(each[0])
  assert not e.step()

def test_no_room_for_many(monkeypatch, capsys):
  """As many run at once as there is room for, the others wait; who is the one too many of as many as ran before, ends. What was made goes."""
  monkeypatch.setattr(cache, "PAGE", 8)
  room, held = 3, list[Any]()
  class Full(ToyRunner):
    def set_batch(self, rows: list[BatchRow]) -> None:
      made = Made()
      held.append(weakref.ref(made))
      if len(rows) > room: raise MemoryError("no\nroom")
      super().set_batch(rows)
  class Made: pass
  # without rules, whose masks another thread makes, and by a clock of its own: as many run at a time on every machine
  e, requests = toy(100, runner=Full, sizes=(4, 8)), [request for request in of_all_kinds() if request.constraint is None]
  monkeypatch.setattr(engine.time, "perf_counter", itertools.count(0, .004).__next__)
  each = [e.add(r) for r in requests]
  while e.step(): check(e)
  for r, s in zip(requests, each): assert (s.produced, s.logprobs) == said(r, r.limit) and s.error is None
  assert e.scheduler.max_rows == 3 and e.most == 3
  err = capsys.readouterr().err.splitlines()
  assert err[-1] == "steps of 4 answers find no memory (no room): at most 3 run at once from here on"
  room, e.scheduler.max_stall = 1, float("inf")   # all three prompts are read before a step
  each = [e.add(r) for r in requests[:3]]
  while e.step(): check(e)
  assert [s.reason for s in each] == ["length", "error", "error"] and each[0].produced == said(requests[0], requests[0].limit)[0]
  with pytest.raises(MemoryError, match="no\nroom"): list(e.stream(each[1]))
  assert not any(made() for made in held)
  finish(e)

def test_no_room_for_long_chunks(monkeypatch, capsys):
  """Prompts are read in shorter ones, and nobody ends of it; who finds no room for the least ends. --warm leaves long ones out, too"""
  monkeypatch.setattr(cache, "PAGE", 8)
  room, held = 8, list[Any]()
  class Made: pass
  class Full(ToyRunner):
    def prefill(self, pieces: list[Piece], size: int, *args: Any) -> None:
      made = Made()
      held.append(weakref.ref(made))
      if size > room: raise MemoryError("no\nroom")
      super().prefill(pieces, size, *args)
    def warm(self, *args: Any) -> None:
      if self.sizes[-1] > room: raise MemoryError("no\nroom")
      super().warm(*args)
  e, requests = toy(100, runner=Full, sizes=(4, 8, 16, 32)), of_all_kinds()
  each = [e.add(r) for r in requests]
  while e.step(): check(e)
  for r, s in zip(requests, each): assert (s.produced, s.logprobs) == said(r, r.limit) and s.error is None
  assert e.scheduler.sizes == e.runner.sizes == (4, 8) and e.scheduler.max_rows == 64
  assert [line for line in capsys.readouterr().err.splitlines() if "find" in line] == [
    "chunks of 32 tokens find no memory (no room): 16 at most from here on", "chunks of 16 tokens find no memory (no room): 8 at most from here on"]
  room = 3
  last = e.add(requests[0])
  while e.step(): check(e)
  assert last.reason == "error" and e.runner.sizes == (4,)
  with pytest.raises(MemoryError, match="no\nroom"): list(e.stream(last))
  assert not any(made() for made in held)
  finish(e)
  e = toy(100, runner=Full, sizes=(8,))
  each = [e.add(Request(PROMPT[i:i + 4], limit=3)) for i in (300, 310)]
  finish(e)
  assert [s.reason for s in each] == ["error", "error"] and e.scheduler.max_rows == 64   # prompts that share a chunk are no rows of a step
  room, e = 16, toy(100, runner=Full, sizes=(4, 8, 16, 32))
  e.warm(Sampling())
  assert e.recorded == {*kinds_of((4, 8, 16), True)} and "chunks of 32 tokens find no memory" in capsys.readouterr().err
  room, e = 3, toy(100, runner=Full, sizes=(4, 8))
  with pytest.raises(MemoryError): e.warm(Sampling())

@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_work(name: str, after: bool, monkeypatch):
  """Ctrl-C while the device is at work: nobody's answer is lost, or other than it was to be"""
  monkeypatch.setattr(cache, "PAGE", 8)
  count = itertools.count()
  class Often(Failing):
    error = KeyboardInterrupt
    fails = staticmethod(lambda called: called == name and next(count) % 3 == 0)
  Often.after = after
  e, requests = toy(30, runner=Often, sizes=(4, 8)), of_all_kinds()
  each = [e.add(r) for r in requests]
  interrupts, busy = 0, True
  while busy:
    try: busy = e.step()
    except KeyboardInterrupt: interrupts += 1
  assert interrupts
  for r, s in zip(requests, each): assert (s.produced, s.logprobs) == said(r, r.limit)
  finish(e)

@pytest.mark.parametrize("seed", range(40))
def test_an_interrupt_at_any_line(seed: int, monkeypatch):
  """Ctrl-C at random lines of the engine, the scheduler and the pool"""
  monkeypatch.setattr(cache, "PAGE", 4)
  rng = random.Random(seed)
  e = toy(rng.choice((20, 24, 60)), 70, sizes=(4, 8))
  files, left = {m.__file__ for m in (cache, constraint, engine, scheduler, sequence)}, 0
  def trace(frame, event, arg):
    nonlocal left
    if frame.f_code.co_filename not in files: return None
    if event == "line":
      left -= 1
      if left == 0: raise KeyboardInterrupt
    return trace
  requests = [Request(PROMPT[10 * i:10 * i + rng.randint(1, 45)], limit=rng.randint(1, 25), logprobs=rng.choice((None, 1)),
                      constraint=rng.choice((None, None, Rule(i)))) for i in range(6)]
  each, interrupts, busy = [e.add(r) for r in requests], 0, True
  while busy:
    left = rng.randint(1, 1500)
    sys.settrace(trace)
    try: busy = e.step()
    except KeyboardInterrupt: interrupts += 1
    finally: sys.settrace(None)
  assert interrupts
  for r, s in zip(requests, each): assert (s.produced, s.logprobs) == said(r, r.limit) and s.reason == "length"
  finish(e)

def test_an_interrupted_iterator_leaves_the_others():
  e, calls = toy(), itertools.count(1)
  class Once(Failing):
    error = KeyboardInterrupt
    fails = staticmethod(lambda called: called == "read" and next(calls) == 15)
  e = toy(runner=Once)
  a, b = e.generate(PROMPT[:10], 50), e.generate(PROMPT[20:40], 30)
  first, second = [next(a)], [next(b)]
  with pytest.raises(KeyboardInterrupt):
    for token in a: first.append(token)
  assert first == alone(PROMPT[:10], 50)[:len(first)] and second + list(b) == alone(PROMPT[20:40], 30)
  finish(e)

def test_another_engines_sequence():
  e, other = toy(), toy()
  with pytest.raises(RuntimeError, match="none of the engine's"): next(e.stream(other.add(Request([1]))))

"""Who is next, by arrival, pages and seconds"""
from __future__ import annotations
import pytest
from tinygrad.apps.engine import cache
from tinygrad.apps.engine.cache import Pool
from tinygrad.apps.engine.scheduler import DECODE, Scheduler
from tinygrad.apps.engine.sequence import Request, Sequence, State

@pytest.fixture(autouse=True)
def page(monkeypatch): monkeypatch.setattr(cache, "PAGE", 4)

def made(pages: int = 100, sizes: tuple[int, ...] = (8, 64), few: int = 16, max_rows: int = 64, max_stall: float = .05) -> Scheduler:
  return Scheduler(Pool(pages), sizes, few, max_rows, max_stall)
def added(s: Scheduler, n: int, first: int = 0, limit: int|None = None) -> Sequence:
  """A prompt of n tokens, none of them another's where `first` is"""
  s.live.append(q := Sequence(Request(list(range(first, first + n)), limit=limit), s.pool.rows - n))
  return q
def read_prompts(s: Scheduler) -> list[tuple[Sequence, int, int]]:
  """All that is to be read before the next decode step: whose, how many tokens, in a chunk of which size"""
  out = []
  while (chunk := s.next_chunk()) is not None:
    q, size = chunk
    out.append((q, n := min(size, len(q.ids) - 1 - q.rows), size))
    s.chunk_done(q, n)
    if s.running: s.spent += s.seconds.get(size, 0.0)
    s.pool.check(s.tables)
  return out

def test_in_order_of_arrival():
  s = made()
  a, b, c = added(s, 21), added(s, 5, 100), added(s, 1, 200)
  assert [(q, n) for q, n, _ in read_prompts(s)][0] == (a, 20) and a.state is State.RUNNING
  s.max_stall = float("inf")
  assert [(q, n) for q, n, _ in read_prompts(s)] == [(b, 4)] or b.state is State.RUNNING
  assert s.running == [a, b, c] and [q.rows for q in s.running] == [20, 4, 0]

def test_sizes_of_chunks():
  """Large ones, but for a few tokens"""
  for n, sizes in ((1, []), (2, [8]), (17, [8, 8]), (18, [64]), (65, [64]), (66, [64, 8]), (140, [64, 64, 8, 8]), (160, [64, 64, 64])):
    s = made()
    added(s, n)
    assert [size for _, _, size in read_prompts(s)] == sizes

def test_most_rows():
  s = made(max_rows=2, max_stall=float("inf"))
  a, b, c = added(s, 9), added(s, 9, 100), added(s, 9, 200)
  read_prompts(s)
  assert s.running == [a, b] and c.state is State.WAITING
  s.end(a, "stop")
  read_prompts(s)
  assert s.running == [b, c]

def test_pages_for_a_prompt_beside_those_that_run():
  s = made(pages=8, max_stall=float("inf"))
  a, b = added(s, 9), added(s, 13, 100)   # 3 and 4 pages of 7, and one more for a
  read_prompts(s)
  assert s.running == [a] and b.state is State.WAITING and not b.table.pages
  c = added(s, 1, 200)
  read_prompts(s)
  assert s.running == [a] and c.state is State.WAITING   # nobody overtakes
  s.end(a, "stop")
  read_prompts(s)
  assert s.running == [b, c]

def test_what_is_known_is_not_read_again():
  s = made(max_stall=float("inf"))
  read_prompts(s) if (a := added(s, 50)) else None
  b = added(s, 50)
  assert [(q, n) for q, n, _ in read_prompts(s)] == [(b, 1)] and b.table.pages[:12] == a.table.pages[:12]
  c = added(s, 49)                        # 48 rows, all known; its last token is run all the same
  assert read_prompts(s) == [] and c.rows == 48 and c.state is State.RUNNING

def test_answers_get_pages_oldest_first():
  s = made(pages=8, max_stall=float("inf"))
  a, b = added(s, 8), added(s, 8, 100)
  read_prompts(s)
  s.accept(a, 1)
  s.accept(b, 1)
  assert s.provide(0) and len(a.table.pages) == len(b.table.pages) == 3
  for _ in range(3):
    for q in (a, b): s.accept(q, 1)
  assert s.provide(0)
  assert not s.provide(1) and len(a.table.pages) == 4 and len(b.table.pages) == 3  # the next but one
  s.preempt()
  assert b.state is State.WAITING and b.rows == 0 and not b.table.pages and len(b.ids) == 12 and b.produced == [1] * 4
  assert s.provide(1) and s.running == [a]
  s.pool.check(s.tables)
  c = added(s, 1, 200)
  s.end(a, "stop")
  assert read_prompts(s) == [] and s.running == [b, c]                             # it was there before c, and its rows still are
  assert b.ids[8:] == [1] * 4 and b.rows == 11

def test_who_reads_gives_way_first():
  s = made(pages=12, max_stall=1e-3)
  a = added(s, 4)
  read_prompts(s)
  b = added(s, 30, 100)
  s.seconds, s.spent = {8: 1.0, 64: 1.0, DECODE: 1.0}, 0.0
  (q, size) = s.next_chunk()
  assert q is b and size == 8
  s.chunk_done(b, 8)
  s.preempt()
  assert b.state is State.WAITING and s.running == [a]
  s.spent = 0.0
  assert s.next_chunk() == (b, 8) and b.rows == 8                                   # what it had read is known still

def test_limit_0_is_read_and_ends():
  s = made()
  a = added(s, 20, limit=0)
  read_prompts(s)
  assert (a.state, a.reason, a.produced, a.table.pages) == (State.ENDED, "length", [], []) and not s.live
  assert s.pool.match(a.ids)[1] == 19

# ---- the target ----

def with_answers(**seconds: float) -> Scheduler:
  """An answer runs, and a prompt of 1000 tokens waits"""
  s = made(pages=2000, max_stall=.05)
  added(s, 1)
  read_prompts(s)
  s.seconds = {DECODE: seconds.pop("decode"), **{int(k[1:]): v for k, v in seconds.items()}}
  added(s, 1000, 100)
  return s

@pytest.mark.parametrize("decode,small,large,chunks", [
  (.010, .003, .012, [64, 64, 64, 8]),     # 10 + 36 + 3 of 50 ms
  (.010, .003, .030, [64, 8, 8, 8]),
  (.010, .003, .045, [8] * 13),
  (.010, .015, .060, [8, 8]),
  (.045, .010, .020, [8]),                 # too slow: one of the smallest, so that the prompt comes to its end
  (.060, .010, .020, [8]),
])
def test_chunks_fill_what_the_target_leaves(decode: float, small: float, large: float, chunks: list[int]):
  s = with_answers(decode=decode, s8=small, s64=large)
  for _ in range(3):
    assert [size for _, _, size in read_prompts(s)] == chunks
    s.spent = 0.0                          # a decode step

def test_a_size_of_unknown_speed_is_tried_once():
  s = with_answers(decode=.01, s8=.003)
  chunk = s.next_chunk()
  assert chunk is not None and chunk.size == 64
  s.chunk_done(chunk.sequence, 64)
  s.spent = 2.0                            # it took that long
  assert s.next_chunk() is None
  s.took(64, 2.0)
  s.spent = 0.0
  assert {size for _, _, size in read_prompts(s)} == {8}

def test_a_size_that_was_slow_is_tried_again():
  s, steps = with_answers(decode=.01, s8=.012, s64=.05), 0
  added(s, 3000, 2000)
  while 64 not in {size for _, _, size in read_prompts(s)}: s.spent, steps = 0.0, steps + 1
  assert 10 < steps < 200

def test_the_average_is_of_late():
  s = made()
  s.took(8, 1.0)
  assert s.seconds[8] == 1.0
  for _ in range(10): s.took(8, .01)
  assert .01 < s.seconds[8] < .012

"""Who is next, by arrival, pages and seconds"""
from __future__ import annotations
import pytest
from tinygrad.apps.engine import cache
from tinygrad.apps.engine.cache import Pool
from tinygrad.apps.engine.scheduler import DECODE, Chunk, Part, Scheduler, left_of, soonest
from tinygrad.apps.engine.sequence import Request, Sequence, State

@pytest.fixture(autouse=True)
def page(monkeypatch): monkeypatch.setattr(cache, "PAGE", 4)

SLICES = 10   # of a chunk

def made(pages: int = 100, sizes: tuple[int, ...] = (8, 64), beside: int = 20, max_rows: int = 64, max_stall: float = .05,
         stages: int = 1, shares: bool = False) -> Scheduler:
  return Scheduler(Pool(pages), sizes, beside, SLICES, stages, shares, max_rows, max_stall)
def added(s: Scheduler, n: int, first: int = 0, limit: int|None = None) -> Sequence:
  """A prompt of n tokens, none of them another's where `first` is"""
  s.live.append(q := Sequence(Request(list(range(first, first + n)), limit=limit), s.pool.rows - n))
  return q
def of_one(q: Sequence, size: int, slices: range) -> Chunk: return Chunk((Part(q, 0, min(left_of(q), size)),), size, False, slices)
def run(s: Scheduler, chunk: Chunk, each: float = 0.0) -> None:
  """each: seconds of a slice"""
  s.ran(chunk)
  if s.running: s.spent += each * len(chunk.slices)
  s.pool.check(s.tables)
def read_prompts(s: Scheduler) -> list[tuple[Sequence, int, int]]:
  """All that is to be read before the next decode step, in whole chunks: whose, how many tokens, in a chunk of which size"""
  out = []
  while (chunk := s.next_chunk()) is not None:
    assert chunk.slices == range(SLICES)
    out += [(q, count, chunk.size) for q, _, count in chunk.parts]
    run(s, chunk)
  return out

def test_in_order_of_arrival():
  s = made(max_stall=float("inf"))
  a, b, c = added(s, 21), added(s, 5, 100), added(s, 1, 200)
  assert [(q, n) for q, n, _ in read_prompts(s)] == [(a, 20), (b, 4)]
  assert s.running == [a, b, c] and [q.rows for q in s.running] == [20, 4, 0]

def test_sizes_of_chunks():
  """Large ones, but for a few tokens: two small chunks take 56, a large one 84, three small ones as long"""
  for n, sizes in ((1, []), (2, [8]), (17, [8, 8]), (18, [64]), (65, [64]), (66, [64, 8]), (140, [64, 64, 8, 8]), (160, [64, 64, 64])):
    s = made()
    added(s, n)
    assert [size for _, _, size in read_prompts(s)] == sizes

@pytest.mark.parametrize("beside", [0, 8, 256, 8192])
def test_read_soonest(beside: int):
  """No other chunks take less time"""
  sizes = 32, 128, 256, 512, 1024
  def least(left: int) -> int: return min(size + beside + (least(left - size) if left > size else 0) for size in sizes) if left else 0
  for n in (1, 32, 33, 100, 129, 256, 300, 385):
    time, left = 0, n
    while left > 0:
      promised, size = soonest(sizes, beside, left)
      assert promised == least(left)
      time, left = time + size + beside, left - size
    assert time == least(n)

@pytest.mark.parametrize("stages,n,sizes", [(1, 256, [256]), (2, 256, [64] * 4), (2, 2048, [256] * 8), (4, 2048, [64] * 32),
                                            (4, 256, [64] * 4), (4, 60, [64]), (2, 600, [64] * 10), (2, 1, [8])])
def test_chunks_for_several_devices(stages: int, n: int, sizes: list[int]):
  """Those of one size, and what is left, by which all is read soonest if each device has them one after another"""
  s = made(pages=1000, sizes=(8, 64, 256), stages=stages)
  added(s, n + 1)
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
  s.accept(a, [1])
  s.accept(b, [1])
  assert s.provide(0) and len(a.table.pages) == len(b.table.pages) == 3
  for _ in range(3):
    for q in (a, b): s.accept(q, [1])
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
  s.seconds = {(8, False): (1.0, 0), DECODE: (1.0, 0)}
  assert s.next_chunk() == of_one(b, 64, range(1))
  run(s, of_one(b, 64, range(1)), 1.0)
  assert s.next_chunk() is None and s.begun == of_one(b, 64, range(1))
  s.preempt()
  assert b.state is State.WAITING and s.running == [a] and s.begun is None
  s.spent = 0.0
  assert s.next_chunk() == of_one(b, 64, range(1)) and b.rows == 0                        # a chunk half done is nothing

def test_what_was_read_before_giving_way_is_known():
  s = made(pages=12, sizes=(8,), max_stall=float("inf"))
  a = added(s, 4)
  read_prompts(s)
  b = added(s, 30, 100)
  run(s, s.next_chunk())
  s.preempt()
  assert b.state is State.WAITING and s.running == [a]
  assert s.next_chunk() == of_one(b, 8, range(SLICES)) and b.rows == 8

@pytest.mark.parametrize("leave", [lambda s, q: s.end(q, "abort"), lambda s, q: s.preempt(), lambda s, q: s.recover()],
                         ids=["end", "preempt", "recover"])
def test_a_chunk_that_is_given_up(leave):
  """The next one begins at its first slice"""
  s = with_answers(decode=.01, s64=.01)
  chunk = s.next_chunk()
  assert chunk.slices == range(4)
  run(s, chunk, .01)
  other = added(s, 40, 2000)
  (q, *_), = chunk.parts
  leave(s, q)
  s.spent = 0.0
  following = s.next_chunk()
  assert following.slices == range(4) and following.parts[0].sequence is (other if q.state is State.ENDED else q)

def test_who_ends_leaves_the_chunk_of_another():
  s = with_answers(decode=.01, s64=.01)
  other = added(s, 40, 2000)
  run(s, chunk := s.next_chunk(), .01)
  s.end(other, "abort")
  s.spent = 0.0
  assert s.next_chunk() == chunk._replace(slices=range(4, 8))

def places(chunk: Chunk|None) -> list[tuple[Sequence, int, int]]: return [tuple(part) for part in chunk.parts]

def test_prompts_share_a_chunk():
  """In strips of 16, in order of arrival, as far as they have room as a whole; who is longer than a chunk has its own, but for the rest of it"""
  s = made(sizes=(32, 64, 128), max_stall=float("inf"), shares=True)
  a, b, c, d = added(s, 21), added(s, 6, 100), added(s, 150, 200), added(s, 17, 1000)
  chunk = s.next_chunk()
  assert places(chunk) == [(a, 0, 20), (b, 32, 5)] and chunk.kind == (64, True) and c.state is State.WAITING
  run(s, chunk)
  chunk = s.next_chunk()
  assert places(chunk) == [(c, 0, 128)] and chunk.kind == (128, False) and s.running == [a, b]
  run(s, chunk)
  chunk = s.next_chunk()
  assert places(chunk) == [(c, 0, 21), (d, 32, 16)] and chunk.kind == (64, True) and chunk.depth == 128
  run(s, chunk)
  assert s.next_chunk() is None and s.running == [a, b, c, d] and [q.rows for q in s.running] == [20, 5, 149, 16]

def test_who_is_known_shares_nothing_and_runs():
  s = made(sizes=(64,), max_stall=float("inf"), shares=True)
  known = added(s, 21, limit=0)
  read_prompts(s)
  a, b, c = added(s, 9, 500), added(s, 21), added(s, 9, 600)
  assert known.state is State.ENDED and places(s.next_chunk()) == [(a, 0, 8), (c, 16, 8)] and s.running == [b]

def test_prompts_that_begin_alike_wait_for_each_other():
  """By whole pages of 4 that the cache does not have yet; those behind them wait, too"""
  s = made(sizes=(64,), max_stall=float("inf"), shares=True)
  a, b, c, d = added(s, 5), added(s, 7), added(s, 9), added(s, 8, 100)
  b.ids[4:] = c.ids[4:7] = 70, 71, 72
  chunk = s.next_chunk()
  assert places(chunk) == [(a, 0, 4)] and not chunk.shared
  run(s, chunk)
  chunk = s.next_chunk()
  assert places(chunk) == [(b, 0, 2), (c, 16, 4), (d, 32, 7)]
  run(s, chunk)
  assert a.table.pages[0] == b.table.pages[0] == c.table.pages[0]

def test_long_prompts_share_what_little_they_have_left(monkeypatch):
  monkeypatch.setattr("tinygrad.apps.engine.scheduler.SHALLOW", 60)
  monkeypatch.setattr("tinygrad.apps.engine.scheduler.FEW", 8)
  s = made(sizes=(128,), max_stall=float("inf"), shares=True)
  a, b, c = added(s, 128 + 9), added(s, 31, 200), added(s, 61, 300)
  for want in ([(a, 0, 128)], [(a, 0, 8), (b, 16, 30)], [(c, 0, 60)]):
    chunk = s.next_chunk()
    assert places(chunk) == want
    run(s, chunk)

def test_of_several_in_a_chunk_some_leave():
  s = made(sizes=(64,), max_stall=.05, shares=True)
  added(s, 1)
  read_prompts(s)
  s.seconds = {DECODE: (.01, 0), (64, True): (.01, 0)}
  a, b, c = added(s, 9, 100), added(s, 9, 200), added(s, 9, 300)
  run(s, chunk := s.next_chunk(), .01)
  assert places(chunk) == [(a, 0, 8), (b, 16, 8), (c, 32, 8)] and chunk.slices == range(4)
  s.end(b, "abort")
  s.spent = 0.0
  run(s, chunk := s.next_chunk(), .01)
  assert places(chunk) == [(a, 0, 8), (c, 32, 8)] and chunk.slices == range(4, 8)
  s.end(a, "abort")
  s.end(c, "abort")
  assert s.begun is None and s.next_chunk() is None

def test_those_that_are_read_count_as_rows_and_have_a_page_more():
  s = made(sizes=(64,), max_rows=2, max_stall=float("inf"), shares=True)
  each = [added(s, 9, 100 * i) for i in range(3)]
  assert places(s.next_chunk()) == [(each[0], 0, 8), (each[1], 16, 8)]
  s = made(pages=10, sizes=(64,), max_stall=float("inf"), shares=True)
  each = [added(s, 9, 100 * i) for i in range(3)]   # 3 pages each, of 9
  assert places(s.next_chunk()) == [(each[0], 0, 8), (each[1], 16, 8)]

def test_limit_0_is_read_and_ends():
  s = made()
  a = added(s, 20, limit=0)
  read_prompts(s)
  assert (a.state, a.reason, a.produced, a.table.pages) == (State.ENDED, "length", [], []) and not s.live
  assert s.pool.match(a.ids)[1] == 19

# ---- the target ----

def with_answers(decode: float, **seconds: float) -> Scheduler:
  """An answer runs, and a prompt of 1000 tokens waits. seconds: of a slice, by the size of its chunk"""
  s = made(pages=2000, max_stall=.05)
  added(s, 1)
  read_prompts(s)
  s.seconds = {DECODE: (decode, 0), **{(int(k[1:]), False): (v, 0) for k, v in seconds.items()}}
  added(s, 1000, 100)
  return s
def between_steps(s: Scheduler, each: float) -> list[range]:
  """The slices that are run, and then a decode step"""
  out = []
  while (chunk := s.next_chunk()) is not None:
    out.append(chunk.slices)
    depth = chunk.depth
    run(s, chunk, each)
    s.took(chunk.kind, each, depth)
  s.spent = 0.0
  return out

@pytest.mark.parametrize("decode,each,count", [(.010, .003, 13), (.010, .0105, 3), (.010, .039, 1), (.001, .0046, 10),
                                               (.045, .010, 1), (.060, .010, 1)])   # too slow: one, so that the prompt comes to its end
def test_slices_fill_what_the_target_leaves(decode: float, each: float, count: int):
  s = with_answers(decode, s64=each, s8=each)
  while s.live[1].rows < 700:
    slices = between_steps(s, each)
    # where a chunk ends, the next one's first may take longer, for all that is known
    assert count - (slices[-1].stop == SLICES or len(slices) > 1) <= sum(map(len, slices)) <= count

@pytest.mark.parametrize("small,large,size", [(.001, .039, 64), (.001, .041, 8), (.045, .1, 8), (.001, None, 64)])
def test_the_largest_size_that_has_time_for_a_slice(small: float, large: float|None, size: int):
  s = with_answers(.01, s8=small, **({} if large is None else {"s64": large}))
  assert s.next_chunk().size == size
  s.end(s.running[0], "stop")
  assert s.next_chunk().size == 64                # nobody waits

def test_a_size_that_was_slow_is_tried_again():
  s, looks = with_answers(.01, s8=.012, s64=.05), 0
  added(s, 3000, 2000)
  while looks < 600 and s.next_chunk().size == 8: looks += 1
  assert 100 < looks < 500

def test_all_slices_come_in_order():
  s, seen = with_answers(.01, s64=.0021), []
  prompt = s.live[1]
  while prompt.state is not State.RUNNING:
    for slices in between_steps(s, .0021): seen += slices
  assert seen == [*range(SLICES)] * 16 and prompt.rows == 999

def test_what_no_time_is_known_of_is_tried_by_a_slice():
  s = with_answers(.01)
  assert between_steps(s, 2.0) == [range(1)]
  s.seconds[64, False] = .004, 0
  assert between_steps(s, .004) == [range(1, 10)]

def test_deeper_is_slower():
  """At most in proportion, until it is measured there"""
  s = with_answers(.01, s64=.004)
  run(s, s.next_chunk(), .004)
  s.spent = 0.0
  assert s.next_chunk().slices == range(5)          # 128 / 64 times as long
  s.took((64, False), .005, 64)
  assert s.next_chunk().slices == range(8)
  s.took((64, False), .001, 1 << 20)                         # shallower is not slower
  assert s.next_chunk().slices == range(10)

def test_a_target_that_is_none():
  s = with_answers(.01)
  s.max_stall = float("inf")
  assert between_steps(s, 9.0) == [range(SLICES)] * 16

def test_the_average_is_of_late():
  s = made()
  kind = 8, False
  s.took(kind, 1.0)
  assert s.seconds[kind] == (1.0, 0)
  for _ in range(10): s.took(kind, .01)
  assert .01 < s.seconds[kind][0] < .012
  s.took(kind, .05, 64)
  assert s.seconds[kind] == (.05, 64)                  # another depth is another time

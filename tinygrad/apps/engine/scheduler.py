"""What is done next: who joins, how much of which prompt is read, who gives way. Policy alone: it knows pages and seconds, and no device.

Arrival decides: the first to come is the first to be let in, and the last to come gives way when pages are short. It waits in its old place then,
before all that came later, and is computed again: what it produced has become part of its ids.

One prompt is read at a time, in chunks, and a chunk is run in slices, some of the model's blocks each. While answers run, slices fill what their
target leaves between two decode steps: a chunk may be as large as without them, and a target holds at any depth. Smaller chunks are for devices on
which even a slice takes longer."""
from __future__ import annotations
import functools, math, time
from typing import NamedTuple
from tinygrad.apps.engine.cache import Pool, Table, pages_for
from tinygrad.apps.engine.sequence import Logprob, Sequence, State

DECODE = 0  # a decode step, among the sizes of chunks

class Chunk(NamedTuple):
  """Slices of the next rows of a prompt: of as many of its tokens as there are, `size` at most"""
  sequence: Sequence
  size: int
  slices: range

@functools.cache
def soonest(sizes:tuple[int, ...], beside:int, left:int) -> tuple[int, int]:
  """(time, the first one's size) of the chunks in which so many tokens, at most the largest's, are read soonest. A chunk takes as long as its tokens,
  those that pad it among them, and `beside` more"""
  times = {size: size + beside + (soonest(sizes, beside, left - size)[0] if size < left else 0) for size in reversed(sizes)}
  first = min(times, key=times.__getitem__)   # the largest of several
  return times[first], first

class Scheduler:
  """sizes: of chunks, ascending. beside: a chunk takes as long as its tokens and so many more. slices: of a chunk. stages: devices that chunks go
  through, one behind another. max_stall: seconds that a running answer waits from token to token, at most."""
  def __init__(self, pool:Pool, sizes:tuple[int, ...], beside:int, slices:int, stages:int, max_rows:int, max_stall:float):
    self.pool, self.sizes, self.beside, self.slices, self.stages = pool, sizes, beside, slices, stages
    self.max_rows, self.max_stall = max_rows, max_stall
    self.live: list[Sequence] = []                       # all that have not ended, as they came
    self.begun: tuple[int, int]|None = None              # the size of the chunk under way, and how many of its slices ran
    self.seconds: dict[int, tuple[float, int]] = {}      # of a decode step, and of a slice of a chunk of each size: of late, and at which depth
    self.spent = 0.0                                     # on slices since the last decode step
    self.refused: tuple[Sequence, int]|None = None       # who was not let in last, and how many pages there were
    self.queries = self.hits = 0                         # tokens of prompts that were looked up in the cache, and those whose rows it had
    self.preemptions = 0

  @property
  def running(self) -> list[Sequence]: return [s for s in self.live if s.state is State.RUNNING]
  @property
  def holding(self) -> int:
    """How many hold pages"""
    return sum(s.state in (State.PREFILLING, State.RUNNING) for s in self.live)
  @property
  def tables(self) -> list[Table]: return [s.table for s in self.live]

  # ---- prompts ----
  def next_chunk(self) -> Chunk|None:
    """None where no prompt is to be read before the next decode step"""
    while (s := next((s for s in self.live if s.state is State.PREFILLING), None) or self._admit()) is not None:
      if left := len(s.ids) - 1 - s.rows:
        size, first = self.begun or (self._size(left), 0)
        count = self._share(size, s.rows, self.slices - first)
        return Chunk(s, size, range(first, first + count)) if count else None
      s.state = State.RUNNING
      self.settle(s)
    return None

  def _admit(self) -> Sequence|None:
    """The first that waits for pages alone, if there are enough for it and one for each answer that runs"""
    s, running = next((s for s in self.live if s.state is State.WAITING and s.ready), None), len(self.running)
    if s is None or running >= self.max_rows or (running and self.refused == (s, self.pool.available)): return None
    table, rows = self.pool.match(s.ids[:-1])  # at least the last token is run
    need = pages_for(len(s.ids)) - len(table.pages)
    if self.pool.available < need + running or not self.pool.allocate(table, need):
      self.pool.release(table, s.ids, rows)
      self.refused = s, self.pool.available
      return None
    s.table, s.rows, s.state, self.refused = table, rows, State.PREFILLING, None
    if not s.times.begun:
      s.cached, s.times.begun = rows, time.monotonic()
      self.queries, self.hits = self.queries + s.prompt, self.hits + rows
    return s

  def _size(self, left:int) -> int:
    """Of the next chunk of a prompt with so many tokens left: the one by which it is read soonest, or the largest up to it of which, while answers
    run, the target has time for a slice"""
    # several devices have two chunks each to be at once at work, if those are not so small that they take longer by more
    most = left if self.stages == 1 else max(left // (2 * self.stages), 2 * self.beside)
    best = soonest(self.sizes, self.beside, min(left, most, self.sizes[-1]))[1]
    if not self.running: return best
    for size in reversed([size for size in self.sizes[1:] if size <= best]):
      if size not in self.seconds or self.seconds[size][0] <= self.max_stall - self.decode_seconds: return size
      each, depth = self.seconds[size]
      self.seconds[size] = each * .999, depth    # one that was slow far on in a long prompt is tried again some time
    return self.sizes[0]
  @property
  def decode_seconds(self) -> float: return self.seconds.get(DECODE, (0.0, 0))[0]

  def _share(self, size:int, depth:int, left:int) -> int:
    """How many of the `left` slices of a chunk are run before the next decode step, which comes first where it is 0. It has one at least, so that a
    prompt comes to its end. What no time is known of has that one, to tell it."""
    if not self.running or self.max_stall == math.inf: return left
    time, (each, known) = self.max_stall - self.spent - self.decode_seconds, self.seconds.get(size, (math.inf, 0))
    longest = self.sizes[-1]
    each *= max((depth + longest) / (known + longest), 1)   # attention takes at most in proportion, and nothing else knows the depth
    return min(left, max(int(time / each), 0 if self.spent else 1))

  def ran(self, chunk:Chunk) -> None:
    """Its slices were launched"""
    s, self.begun = chunk.sequence, (chunk.size, chunk.slices.stop)
    if chunk.slices.stop < self.slices: return
    self.begun = None
    s.rows = min(s.rows + chunk.size, len(s.ids) - 1)
    self.pool.insert(s.table, s.ids, s.rows)

  def took(self, size:int, seconds:float, depth:int=0) -> None:
    """How long a slice of a chunk of that size took at that depth, or a DECODE step"""
    before, known = self.seconds.get(size, (seconds, depth))
    self.seconds[size] = (before + seconds) / 2 if known == depth else seconds, depth

  # ---- answers ----
  def provide(self, ahead:int) -> bool:
    """Gives each running sequence the pages of its rows up to `ahead` tokens after what it knows, or to its end. False where pages do not do for
    all."""
    return all(self.pool.allocate(s.table, max(0, pages_for(len(s.ids) + min(ahead, s.left)) - len(s.table.pages))) for s in self.running)

  def preempt(self) -> None:
    """The last to come that holds pages gives them back, and waits"""
    s = next(s for s in reversed(self.live) if s.state in (State.PREFILLING, State.RUNNING))
    self._leaves(s)
    s.state, self.preemptions = State.WAITING, self.preemptions + 1
    self.pool.release(s.table, s.ids, s.rows)
    s.rows = 0

  def _leaves(self, s:Sequence) -> None:
    """Of the one whose prompt is read, a chunk under way is given up"""
    if s.state is State.PREFILLING: self.begun = None

  def accept(self, s:Sequence, token:int, logprob:Logprob|None=None) -> None:
    """A running sequence's next token, whose step wrote the row of the one before"""
    s.take(token, logprob)
    s.rows = len(s.ids) - 1
    self.pool.insert(s.table, s.ids, s.rows)
    self.settle(s)

  def settle(self, s:Sequence) -> None:
    if reason := s.end: self.end(s, reason)
  def end(self, s:Sequence, reason:str, error:Exception|None=None) -> None:
    """It leaves, from whatever state; of one that failed nothing more is kept"""
    if s.state is State.ENDED: return
    self._leaves(s)
    s.state, s.reason, s.error = State.ENDED, reason, error
    self.live.remove(s)
    self.pool.release(s.table, s.ids, 0 if error else s.rows)

  # ---- after an exception ----
  def recover(self) -> None:
    """Makes whole what an exception left half done: what holds is each sequence's ids and, while it is in the pool, its table"""
    self.begun = None
    for s in list(self.live):
      if s.state is State.WAITING: s.table, s.rows = Table(), 0
      if s.state is State.ENDED: self.live.remove(s)
    if self.pool.fault(self.tables): self.pool.reset(self.tables)
    for s in self.running: self.settle(s)

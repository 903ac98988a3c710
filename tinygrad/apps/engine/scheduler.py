"""What is done next: who joins, how much of which prompt is read, who gives way. Policy alone: it knows pages and seconds, and no device.

Arrival decides: the first to come is the first to be let in, and the last to come gives way when pages are short. It waits in its old place then,
before all that came later, and is computed again: what it produced has become part of its ids.

A prompt is read in chunks, and a chunk is run in slices, some of the model's blocks each. While answers run, slices fill what their target leaves
between two decode steps: a chunk may be as large as without them, and a target holds at any depth. Smaller chunks are for devices on which even a
slice takes longer. What a prompt has left may share a chunk with other prompts, where the device has kernels for that. Those that begin alike wait
for each other, and find in the cache what they share."""
from __future__ import annotations
import functools, math, time
from typing import NamedTuple
from tinygrad.apps.engine.cache import Pool, Table, alike, pages_for
from tinygrad.apps.engine.sequence import Kind, Logprob, Piece, Sequence, State
from tinygrad.nn.step import STRIP

DECODE: Kind = (0, False)   # a decode step, among the kinds of chunks

# What shares a chunk is attended to by kernels that take longer far on in a prompt than those of a long chunk of its own do
SHALLOW = 4096   # tokens of a prompt that may share
FEW = 256        # … or left of it: so many would have those kernels anyway

class Part(NamedTuple):
  """The next rows of a prompt, `count` of them from its `rows` on. at: their place among a chunk's tokens"""
  sequence: Sequence
  at: int
  count: int
  @property
  def end(self) -> int:
    """Where others may lie in the chunk"""
    return self.at + -(-self.count // STRIP) * STRIP
  @property
  def piece(self) -> Piece:
    s, end = self.sequence, self.sequence.rows + self.count
    return Piece(self.at, s.ids[s.rows:end], s.rows, list(s.table.pages), s.ids[end])

class Chunk(NamedTuple):
  """Slices of the next rows of a prompt, or of all that several prompts have left. size: tokens, those that pad it among them"""
  parts: tuple[Part, ...]
  size: int
  shared: bool
  slices: range
  @property
  def kind(self) -> Kind: return self.size, self.shared
  @property
  def depth(self) -> int: return max(part.sequence.rows for part in self.parts)

@functools.cache
def soonest(sizes:tuple[int, ...], beside:int, left:int) -> tuple[int, int]:
  """(time, the first one's size) of the chunks in which so many tokens, at most the largest's, are read soonest. A chunk takes as long as its tokens,
  those that pad it among them, and `beside` more"""
  times = {size: size + beside + (soonest(sizes, beside, left - size)[0] if size < left else 0) for size in reversed(sizes)}
  first = min(times, key=times.__getitem__)   # the largest of several
  return times[first], first

def left_of(s:Sequence) -> int:
  """Rows of its prompt that are to be written"""
  return len(s.ids) - 1 - s.rows
def may_share(s:Sequence) -> bool: return len(s.ids) <= SHALLOW or left_of(s) <= FEW

class Scheduler:
  """sizes: of chunks, ascending. beside: a chunk takes as long as its tokens and so many more. slices: of a chunk. stages: devices that chunks go
  through, one behind another. shares: whether prompts may share a chunk. max_stall: seconds that a running answer waits from token to token, at
  most."""
  def __init__(self, pool:Pool, sizes:tuple[int, ...], beside:int, slices:int, stages:int, shares:bool, max_rows:int, max_stall:float):
    self.pool, self.sizes, self.beside, self.slices, self.stages, self.shares = pool, sizes, beside, slices, stages, shares
    self.max_rows, self.max_stall = max_rows, max_stall
    self.live: list[Sequence] = []                       # all that have not ended, as they came
    self.begun: Chunk|None = None                        # the newest slices of the chunk under way
    self.seconds: dict[Kind, tuple[float, int]] = {}     # of a decode step, and of a slice of a chunk of each kind: of late, and at which depth
    self.spent = 0.0                                     # on slices since the last decode step
    self.refused: tuple[Sequence, int]|None = None       # who was not let in last, and how many pages there were
    self.queries = self.hits = 0                         # tokens of prompts that were looked up in the cache, and those whose rows it had
    self.preemptions = 0

  @property
  def running(self) -> list[Sequence]: return [s for s in self.live if s.state is State.RUNNING]
  @property
  def prefilling(self) -> list[Sequence]: return [s for s in self.live if s.state is State.PREFILLING]
  @property
  def holding(self) -> int:
    """How many hold pages"""
    return sum(s.state in (State.PREFILLING, State.RUNNING) for s in self.live)
  @property
  def tables(self) -> list[Table]: return [s.table for s in self.live]

  # ---- prompts ----
  def next_chunk(self) -> Chunk|None:
    """None where no prompt is to be read before the next decode step"""
    if (chunk := self.begun or self._next()) is None: return None
    first = chunk.slices.stop
    count = self._share(chunk.kind, chunk.depth, self.slices - first)
    return chunk._replace(slices=range(first, first + count)) if count else None

  def _next(self) -> Chunk|None:
    """That which is begun next: none of its slices"""
    while (s := next(iter(self.prefilling), None) or self._admit()) is not None:
      if left_of(s): return self._of_several(s) or self._of_one(s)
      self._run(s)
    return None

  def _of_one(self, s:Sequence) -> Chunk:
    size = self._size(left := left_of(s), max(left, len(s.ids) - 1 - s.cached))
    return Chunk((Part(s, 0, min(left, size)),), size, False, range(0))

  def _of_several(self, first:Sequence) -> Chunk|None:
    """What it has left, and those behind it that are let in, in the chunk by which all of it is read soonest. None where that is its own alone"""
    largest = self.sizes[-1]
    if not self.shares or not may_share(first) or left_of(first) >= largest: return None
    parts, others = [Part(first, 0, left_of(first))], iter([s for s in self.prefilling if s is not first])
    while (room := largest - parts[-1].end) > 0 and (s := next(others, None) or self._admit(room)) is not None:
      if not left_of(s): self._run(s)
      elif may_share(s) and left_of(s) <= room: parts.append(Part(s, parts[-1].end, left_of(s)))
    if len(parts) > 1:
      size = self._size(parts[-1].end, parts[-1].end, shared=True)
      parts = [part for part in parts if part.end <= size]
    return Chunk((*parts,), size, True, range(0)) if len(parts) > 1 else None

  def _run(self, s:Sequence) -> None:
    """Its prompt is read"""
    s.state = State.RUNNING
    self.settle(s)

  def _admit(self, room:float=math.inf) -> Sequence|None:
    """The first that waits for pages alone, if there are enough for it and one for each that has some, if it has no more than `room` left to read,
    and if its next page is not one that a prompt which is being read will have"""
    s, holding = next((s for s in self.live if s.state is State.WAITING and s.ready), None), self.holding
    if s is None or holding >= self.max_rows or (holding and self.refused == (s, self.pool.available)): return None
    table, rows = self.pool.match(s.ids[:-1])  # at least the last token is run
    if len(s.ids) - 1 - rows > room or any(alike(s.ids, rows, other.ids) for other in self.prefilling):
      self.pool.release(table, s.ids, rows)
      return None
    need = pages_for(len(s.ids)) - len(table.pages)
    if self.pool.available < need + holding or not self.pool.allocate(table, need):
      self.pool.release(table, s.ids, rows)
      self.refused = s, self.pool.available
      return None
    s.table, s.rows, s.state, self.refused = table, rows, State.PREFILLING, None
    if not s.times.begun:
      s.cached, s.times.begun = rows, time.monotonic()
      self.queries, self.hits = self.queries + s.prompt, self.hits + rows
    return s

  def _most(self, whole:int) -> int:
    """How many of the sizes are for a prompt of so many tokens. Through several stages its chunks take as long as one after another, and the largest
    once more for each further stage, all of that divided by the stages. None is cut into chunks that take less for their tokens than beside them"""
    if self.stages == 1: return len(self.sizes)
    def time(count:int) -> int:
      full, rest = divmod(whole, size := self.sizes[count - 1])
      return (full + self.stages - 1) * (size + self.beside) + (soonest(self.sizes[:count], self.beside, rest)[0] if rest else 0)
    smaller = sum(size < self.beside for size in self.sizes[:-1])
    return min(range(len(self.sizes), smaller, -1), key=time)

  def _size(self, left:int, whole:int, shared:bool=False) -> int:
    """Of the next chunk of a prompt that has so many tokens left, of as many as `whole`: the one by which it is read soonest, or the largest up to it
    of which, while answers run, the target has time for a slice"""
    best = soonest(self.sizes[:self._most(whole)], self.beside, min(left, self.sizes[-1]))[1]
    if not self.running: return best
    for size in reversed([size for size in self.sizes[1:] if size <= best]):
      if (kind := (size, shared)) not in self.seconds or self.seconds[kind][0] <= self.max_stall - self.decode_seconds: return size
      each, depth = self.seconds[kind]
      self.seconds[kind] = each * .999, depth    # one that was slow far on in a long prompt is tried again some time
    return self.sizes[0]
  @property
  def decode_seconds(self) -> float: return self.seconds.get(DECODE, (0.0, 0))[0]

  def _share(self, kind:Kind, depth:int, left:int) -> int:
    """How many of the `left` slices of a chunk are run before the next decode step, which comes first where it is 0. It has one at least, so that a
    prompt comes to its end. What no time is known of has that one, to tell it."""
    if not self.running or self.max_stall == math.inf: return left
    time, (each, known) = self.max_stall - self.spent - self.decode_seconds, self.seconds.get(kind, (math.inf, 0))
    longest = self.sizes[-1]
    each *= max((depth + longest) / (known + longest), 1)   # attention takes at most in proportion, and nothing else knows the depth
    return min(left, max(int(time / each), 0 if self.spent else 1))

  def ran(self, chunk:Chunk) -> None:
    """Its slices were launched"""
    self.begun = chunk if chunk.slices.stop < self.slices else None
    if self.begun is not None: return
    for s, _, count in chunk.parts:
      s.rows += count
      self.pool.insert(s.table, s.ids, s.rows)

  def took(self, kind:Kind, seconds:float, depth:int=0) -> None:
    """How long a slice of a chunk of that kind took at that depth, or a DECODE step"""
    before, known = self.seconds.get(kind, (seconds, depth))
    self.seconds[kind] = (before + seconds) / 2 if known == depth else seconds, depth

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
    """A chunk under way goes on without its rows: what is left of it is given up if it is all"""
    if self.begun is None: return
    parts = tuple(part for part in self.begun.parts if part.sequence is not s)
    self.begun = self.begun._replace(parts=parts) if parts else None

  def accept(self, s:Sequence, tokens:list[int], logprob:Logprob|None=None) -> None:
    """A running sequence's next tokens, whose step wrote the rows of those before them. What comes behind its end is thrown away"""
    for token in tokens:
      s.take(token, logprob)
      if s.end: break
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

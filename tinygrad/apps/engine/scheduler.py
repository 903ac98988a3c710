"""What is done next: who joins, how much of which prompt is read, who gives way. Policy alone: it knows pages and seconds, and no device.

Arrival decides: the first to come is the first to be let in, and the last to come gives way when pages are short. It waits in its old place then,
before all that came later, and is computed again: what it produced has become part of its ids.

One prompt is read at a time, in chunks. While answers run, chunks fill what their target leaves between two decode steps."""
from __future__ import annotations
from typing import NamedTuple
from tinygrad.apps.engine.cache import Pool, Table, pages_for
from tinygrad.apps.engine.sequence import Sequence, State

DECODE = 0  # a decode step, among the sizes of chunks

class Chunk(NamedTuple):
  """The next rows of a prompt: as many of its tokens as there are, `size` at most"""
  sequence: Sequence
  size: int

class Scheduler:
  """sizes: of chunks, ascending. few: tokens for which the largest is not taken. max_stall: seconds that a running answer waits, at most."""
  def __init__(self, pool:Pool, sizes:tuple[int, ...], few:int, max_rows:int, max_stall:float):
    self.pool, self.sizes, self.few, self.max_rows, self.max_stall = pool, sizes, few, max_rows, max_stall
    self.live: list[Sequence] = []                       # all that have not ended, as they came
    self.seconds: dict[int, float] = {}                  # of a chunk of each size and of a decode step: the average of late
    self.spent = 0.0                                     # on chunks since the last decode step
    self.refused: tuple[Sequence, int]|None = None       # who was not let in last, and how many pages there were

  @property
  def running(self) -> list[Sequence]: return [s for s in self.live if s.state is State.RUNNING]
  @property
  def tables(self) -> list[Table]: return [s.table for s in self.live]

  # ---- prompts ----
  def next_chunk(self) -> Chunk|None:
    """None where no prompt is to be read before the next decode step"""
    while (s := next((s for s in self.live if s.state is State.PREFILLING), None) or self._admit()) is not None:
      if left := len(s.ids) - 1 - s.rows: return Chunk(s, size) if (size := self._size(left)) else None
      s.state = State.RUNNING
      self.settle(s)
    return None

  def _admit(self) -> Sequence|None:
    """The first that waits, if there are pages for it and one for each answer that runs"""
    s, running = next((s for s in self.live if s.state is State.WAITING), None), len(self.running)
    if s is None or running >= self.max_rows or (running and self.refused == (s, self.pool.available)): return None
    table, rows = self.pool.match(s.ids[:-1])  # at least the last token is run
    need = pages_for(len(s.ids)) - len(table.pages)
    if self.pool.available < need + running or not self.pool.allocate(table, need):
      self.pool.release(table, s.ids, rows)
      self.refused = s, self.pool.available
      return None
    s.table, s.rows, s.state, self.refused = table, rows, State.PREFILLING, None
    return s

  def _size(self, left:int) -> int:
    """Of the next chunk of a prompt with so many tokens left; 0: running answers come first"""
    sizes = [size for size in self.sizes if size == self.sizes[0] or left * self.sizes[-1] > self.few * size]
    if not self.running: return sizes[-1]
    time = self.max_stall - self.spent - self.seconds.get(DECODE, 0.0)
    for size in reversed(sizes):
      if size not in self.seconds and not self.spent: return size  # tried, to be known
      if self.seconds.get(size, self.max_stall) <= time: return size
      if size in self.seconds and not self.spent: self.seconds[size] *= .998  # one that was slow far on in a long prompt is tried again some time
    return 0 if self.spent else sizes[0]

  def chunk_done(self, s:Sequence, tokens:int) -> None:
    s.rows += tokens
    self.pool.insert(s.table, s.ids, s.rows)

  def took(self, size:int, seconds:float) -> None:
    """How long a chunk of that size, or a DECODE step, took"""
    self.seconds[size] = (self.seconds.get(size, seconds) + seconds) / 2

  # ---- answers ----
  def provide(self, ahead:int) -> bool:
    """Gives each running sequence the page of its next row, `ahead` launches after what it knows. False where pages do not do for all."""
    return all(self.pool.allocate(s.table, max(0, pages_for(len(s.ids) + ahead) - len(s.table.pages))) for s in self.running)

  def preempt(self) -> None:
    """The last to come that holds pages gives them back, and waits"""
    s = next(s for s in reversed(self.live) if s.state in (State.PREFILLING, State.RUNNING))
    s.state = State.WAITING
    self.pool.release(s.table, s.ids, s.rows)
    s.rows = 0

  def accept(self, s:Sequence, token:int) -> None:
    """A running sequence's next token, whose step wrote the row of the one before"""
    s.ids.append(token)
    s.rows = len(s.ids) - 1
    self.pool.insert(s.table, s.ids, s.rows)
    self.settle(s)

  def settle(self, s:Sequence) -> None:
    if reason := s.end: self.end(s, reason)
  def end(self, s:Sequence, reason:str, error:Exception|None=None) -> None:
    """It leaves, from whatever state; of one that failed nothing more is kept"""
    if s.state is State.ENDED: return
    s.state, s.reason, s.error = State.ENDED, reason, error
    self.live.remove(s)
    self.pool.release(s.table, s.ids, 0 if error else s.rows)

  # ---- after an exception ----
  def recover(self) -> None:
    """Makes whole what an exception left half done: what holds is each sequence's ids and, while it is in the pool, its table"""
    for s in list(self.live):
      if s.state is State.WAITING: s.table, s.rows = Table(), 0
      if s.state is State.ENDED: self.live.remove(s)
    if self.pool.fault(self.tables): self.pool.reset(self.tables)
    for s in self.running: self.settle(s)

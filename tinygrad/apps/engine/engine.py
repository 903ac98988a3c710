"""Tokens in, tokens out. Knows no text, no block format and no target."""
from __future__ import annotations
import operator, os, sys, threading, time, traceback, weakref
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Protocol
import numpy as np
from tinygrad.apps.engine.cache import Pool, Table, pages_for
from tinygrad.apps.engine.constraint import Guide
from tinygrad.apps.engine.sampling import Features, Sampling
from tinygrad.apps.engine.scheduler import DECODE, Chunk, Scheduler
from tinygrad.apps.engine.sequence import TOP, BatchRow, Kind, Logprob, Piece, Request, Sequence, State, kinds_of
from tinygrad.apps.engine.speculate import Speculation

_one_at_a_time = threading.RLock()  # not an engine's own: what is recorded, and the CPU's threads, are the process's
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
def _forked() -> None:
  """What another thread holds is never given back in the child, which has only the one that forked"""
  global _one_at_a_time
  _one_at_a_time = threading.RLock()
  for engine in _engines: engine.news, engine.driver, engine.dirty = threading.Condition(), None, True
os.register_at_fork(after_in_child=_forked)

def _whole(name:str, value:object) -> int:
  """A whole number of any kind, numpy's too. Raises ValueError for what would have to be rounded or read as one."""
  try:
    if not isinstance(value, bool): return operator.index(value)
  except TypeError: pass
  raise ValueError(f"{name}: expected a whole number, found {' '.join(repr(value)[:60].split())}")

def tokens_of(ids:Iterable[int], vocab:int) -> list[int]:
  """ids as ints. Raises ValueError, one line, for what is no list of tokens below `vocab`, and for an empty one."""
  shape = getattr(ids, "shape", None)
  if not isinstance(ids, Iterable) or isinstance(ids, (str, bytes)) or (shape is not None and len(shape) != 1):
    raise ValueError(f"tokens: expected a list of numbers, found {type(ids).__name__}{'' if shape is None else f' of shape {shape}'}")
  tokens = list(ids) if isinstance(ids, list) and {*map(type, ids)} <= {int} else [_whole("token", i) for i in ids]  # long ones come as ints
  if not tokens: raise ValueError("no tokens: give at least one")
  if min(tokens) < 0 or max(tokens) >= vocab:
    raise ValueError(f"token {str(next(i for i in tokens if not 0 <= i < vocab))[:40]}: expected 0 to {vocab - 1}")
  return tokens

def one_line(e:Exception) -> str: return " ".join(str(e).split())

class ContextFull(Exception):
  """The prompt does not fit. str(e) is one line."""

class DeviceFailed(RuntimeError):
  """A device does nothing any more, and so the engine neither. str(e) is one line, which names the device."""

class Steps(Protocol):
  """What the engine needs of a runner. The device does what it is given in order, and calls return before it is done, but for read and wait.
  table: the pages of a sequence's rows, in order; what it does not name is page 0."""
  sizes: tuple[int, ...]   # of a prompt's chunks, ascending
  beside: int              # a chunk takes as long as its tokens and so many more
  slices: int              # of a chunk
  stages: int              # devices that a chunk goes through: so many chunks may be under way at once
  shares: bool             # whether a chunk may have pieces of several prompts
  max_context: int
  vocab_size: int
  in_flight: int           # launches that may be unread: 2, or 1 where a launch is done when it returns
  ahead: int               # rows that a launch may write beyond its token's: the tokens' that it chooses
  kernels_a_token: int     # launches of the newest decode step; 0 before the first
  drafts: int              # of each row, that a step of the batch which is set may verify; 0: none
  certain: bool            # whether there are drafts behind every step of a batch with drafts that does not coast
  found: np.ndarray        # bool (rows,), of what was read last, in a batch with drafts: whether there are some for the step after it

  def prefill(self, pieces:list[Piece], size:int, slices:range, shared:bool) -> None:
    """These slices of what writes the rows of the pieces, of a chunk of `size` tokens; what it writes past them, up to `size`, does not count. When
    all slices have run in their order, whatever steps between them, all rows are written. There may be fewer pieces than before. shared: whether the
    chunk has strips (nn/step.py), each of one piece; else there is one piece, from the chunk's first token on"""
  def set_batch(self, rows:list[BatchRow]) -> None:
    """What launch runs from here on. Launches that were not read are forgotten."""
  def set_table(self, row:int, table:list[int]) -> None:
    """A row of the batch has got a page"""
  def launch(self) -> None:
    """A decode step: writes each row's token at its position; the token that it chooses is the next, and the position one more. Of a batch with masks
    only what comes before it chooses: `draw` has the rest"""
  def verify(self) -> None:
    """As launch, of a step with drafts: it chooses one token more than drafts are right"""
  def coast(self) -> None:
    """As launch, in a batch with drafts, of a step that finds none for the next"""
  def draw(self, masks:dict[int, np.ndarray]) -> None:
    """The rest of the newest launch, of a batch with masks, when all launches before it were read. masks: as constraint.Constraint has them, by row,
    from here on; a row without one has all tokens"""
  def read(self) -> np.ndarray:
    """int32 (rows,): what the oldest launch that was not read chose, when it is done; in a batch with drafts int32 (rows, 1 + drafts), with negative
    numbers behind a row's tokens"""
  def logprobs(self, row:int, count:int) -> Logprob:
    """Of what was read last, in a batch where a row asks for them: a row's token, and the `count` likeliest"""
  def warm(self, rows:int, kinds:list[Features]) -> None:
    """What prefill of each size needs, and launch of each size of a batch up to so many rows by each kind of features, is there from here on, and
    need not be compiled"""
  def wait(self, first:bool=False) -> None:
    """Until the device is done; of several, all, or the first. Raises what names the device, in one line, where it failed"""
  def logits(self, ids:list[int], start:int, table:list[int]) -> np.ndarray:
    """As prefill, of sizes[0] ids at most -> float32 (len(ids), vocab), the logits after each"""

MAX_STALL = .05  # seconds
PLANNED = .8     # of what answers may wait: the rest is for slices that take longer than the last did, and for the host's work between
LONG = 1.0       # seconds that answers wait for what is recorded before it is said
AHEAD = 4  # chunks of a prompt that each device is given before the first is waited for, where no answer runs
PAUSE = .01  # seconds of a piece of work that waits for masks alone

class Gauges(NamedTuple):
  """How an engine stands. running: sequences that hold pages; waiting: that do not yet, or had to give them back; pages: that running ones hold;
  queries, hits: tokens of prompts that were looked up in the cache, and those whose rows it had; preemptions; steps: of decoding; drafts: that were
  verified; draft_tokens: of them; accepted: of the tokens of each position of a draft, those that were right"""
  running: int
  waiting: int
  pages: int
  queries: int
  hits: int
  preemptions: int
  steps: int
  drafts: int = 0
  draft_tokens: int = 0
  accepted: list[int] = []

class Engine:
  """Sequences decode together, each as if it were alone.

  What counts is on the host: a sequence's ids, its rows, its table. The device's batch follows from them and can be set anew at any time; what was in
  flight is computed again then. So an exception loses nothing, wherever it comes.

  A step is launched before the one before it is read, so a sequence's end is seen one step late. The row that was written too much lies past those
  that count, in a page whose next holder writes it before reading it, as the device works in order. Before the batch changes (a sequence joins, ends
  or gives way), what is in flight is read.

  A step with drafts (speculate.py) yields one token of a sequence or more. The device knows how many, and goes on from there; the host learns it with
  the tokens. So what is launched ahead is given pages for as many as there may be.

  Where a row has a constraint, what is launched ahead ends before the draw: the mask is made from the token before it, by worker threads, while the
  device runs the model on that token.

  Whoever waits for a token drives: it does pieces of work, for all sequences, until its own token is there. One thread drives at a time, the others
  wait for news. The driver alone touches the device, the scheduler and the pool; `add` and `abort` leave it word."""
  def __init__(self, runner:Steps, pages:int, max_rows:int=64, max_stall:float=MAX_STALL):
    """pages: of the cache, page 0 included. max_rows: answers that run at once. max_stall: seconds from token to token of one of them, at most, while
    a prompt is read."""
    self.runner, self.pool, self.max_stall = runner, Pool(pages), max_stall
    self.scheduler = Scheduler(self.pool, runner.sizes, runner.beside, runner.slices, runner.stages, runner.shares, max_rows,
                               PLANNED * max_stall)
    self.capacity = min(runner.max_context, self.pool.rows)  # tokens of one sequence
    self.newest: Sequence|None = None                        # that was added
    self.recorded: set[Kind] = set()                         # of chunks that ran before: a first run tells no time
    self.told = False                                        # whether it was said that answers waited for a compiler
    self.reading = 0                                         # the size of the newest chunk
    self.steps = 0                                           # of decoding, so far
    self.most = 1                                            # rows of those that were read
    self.failed = ""                                         # what a device failed with that does nothing any more: one line
    self.speculation = Speculation()
    self.news = threading.Condition()                        # guards `driver`
    self.driver: int|None = None                             # the thread that drives
    self.dirty = True                                        # set during work; where that was left half done, _recover goes first
    _engines.add(self)

  def _recover(self) -> None:
    self.batch: list[Sequence] = []      # what is set on the device
    self.sent: list[int] = []            # how many pages of each it knows
    self.flying = 0                      # launches not read
    self.drafted: deque[int] = deque()   # drafts that each of them verifies
    self.drawn = True                    # whether the newest of them is whole
    self.masks: dict[int, np.ndarray] = {}   # what each row has on the device, where it is not all tokens
    self.concerned: list[Sequence] = []  # those whom an error of the device is about
    self.chunks: list[Chunk] = []        # those that were not waited for
    self.depth, self.since = 0, 0.0      # of the first of them; when the last was given to the device
    self.due = False                     # whether they are waited for before anything else
    self.chunk_seconds, self.decode_seconds, self.timed = 0.0, 0.0, False
    for s in self.scheduler.live:
      if s.guide is not None: s.guide.future = None   # in a child, nobody computes what was asked for
    self.scheduler.recover()

  # ---- use ----
  def add(self, request:Request) -> Sequence:
    """A sequence that whoever drives computes from here on. Raises ValueError for what is no prompt, ContextFull for one that leaves no room for an
    answer, DeviceFailed."""
    if self.failed: raise DeviceFailed(self.failed)
    ids = self._tokens(request.ids)
    if request.limit is not None and _whole("count", request.limit) < 0: raise ValueError(f"count: expected 0 or more, found {request.limit}")
    if request.logprobs is not None and not 0 <= _whole("logprobs", request.logprobs) <= TOP:
      raise ValueError(f"logprobs: expected 0 to {TOP}, found {request.logprobs}")
    if len(ids) >= self.capacity:
      limit = f"max_context is {self.capacity}" if self.capacity == self.max_context else f"the cache holds {self.capacity}"
      raise ContextFull(f"the prompt has {len(ids)} tokens, {limit}: nothing is left for an answer")
    guide = None if request.constraint is None else Guide(request.constraint, self.runner.vocab_size)
    self.newest = s = Sequence(replace(request, ids=ids), self.capacity - len(ids), guide)
    self.scheduler.live.append(s)
    if guide is not None: guide.ask(s.ids, s.prompt)
    return s

  def step(self) -> bool:
    """Does a piece of work for all. False where there is none."""
    return self._drive(self._work)

  def stream(self, s:Sequence) -> Iterator[int]:
    """Its tokens from the first on, a stop token last, as they come. Raises what it failed with."""
    for tokens in self.bursts(s): yield from tokens

  def bursts(self, s:Sequence) -> Iterator[list[int]]:
    """As stream, tokens that come together in one list"""
    at = s.prompt
    def news() -> bool: return len(s.ids) > at or s.state is State.ENDED
    while True:
      while not news():
        if self._drive(self._work, news) is False and not news(): raise RuntimeError("this sequence is none of the engine's")
      if tokens := s.ids[at:]:
        at += len(tokens)
        yield tokens
      elif s.error is not None: raise s.error
      else: return

  def abort(self, s:Sequence) -> None:
    """Ends it, unless it has ended. While a thread drives, that is left to the next piece of work: this never waits for it, as the garbage collector
    may close an iterator anywhere."""
    s.aborted = True
    self._drive(self._aborts, lambda: self.driver is not None)

  def generate(self, ids:Iterable[int], count:int|None=None, sampling:Sampling=Sampling(), stop:frozenset[int]=frozenset()) -> Iterator[int]:
    """Continues ids: yields each new token, a stop token last. Ends after `count` tokens or when the context is full; closing it aborts the answer.
    Raises as add and stream do."""
    if count is not None and _whole("count", count) < 0: raise ValueError(f"count: expected 0 or more, found {count}")
    s = self.add(Request(ids, sampling, stop, count))
    try: yield from self.stream(s)
    finally:
      if s.state is not State.ENDED: self.abort(s)

  def prefill(self, ids:Iterable[int], sampling:Sampling=Sampling()) -> None:
    """Makes the cache hold ids[:-1]; the device may not be done with them. Raises as generate does."""
    for _ in self.generate(ids, 0, sampling): pass

  def logits(self, ids:Iterable[int]) -> np.ndarray:
    """float32 (T, vocab): the logits after each token, none of whose rows is taken from the cache. The cache then holds ids."""
    tokens = self._tokens(ids)
    if len(tokens) > self.capacity: raise ContextFull(f"{len(tokens)} tokens do not fit in max_context {self.capacity}")
    return self._drive(lambda: self._logits(tokens))

  def forget(self) -> None:
    """Prompts start with an empty cache from here on; sequences that have begun go on."""
    self._drive(lambda: self.pool.reset(self.scheduler.tables))
  def wait(self) -> None:
    """Until the device is done"""
    self._drive(self.runner.wait)
  def warm(self, sampling:Sampling=Sampling(), *more:Features) -> None:
    """Records chunks of all sizes, and steps of all numbers of answers that are drawn as by `sampling`, and of those that do each of `more` beside.
    They are else recorded, and the first time compiled, when first needed, while all wait."""
    self._drive(lambda: self._warm([sampling.features | features for features in (Features(), *more)]))

  @property
  def gauges(self) -> Gauges:
    scheduler, states = self.scheduler, [s.state for s in self.scheduler.live]
    running = sum(state in (State.PREFILLING, State.RUNNING) for state in states)
    drafts = self.speculation
    return Gauges(running, states.count(State.WAITING), self.pool.pages - 1 - self.pool.available, scheduler.queries, scheduler.hits,
                  scheduler.preemptions, self.steps, drafts.drafts, drafts.tokens, [*drafts.accepted])
  @property
  def max_context(self) -> int: return self.runner.max_context
  @property
  def kernels_a_token(self) -> int: return self.runner.kernels_a_token
  @property
  def full(self) -> bool:
    """Whether the newest sequence fills the context"""
    return self.newest is not None and self.newest.full

  # ---- one drives ----
  def _drive(self, work:Callable[[], Any], enough:Callable[[], bool]=lambda: False) -> Any:
    """work() as the driver, when no other thread is; None if enough() holds before"""
    me = threading.get_ident()
    try:
      with self.news:
        while self.driver not in (None, me) and not enough(): self.news.wait()  # me: a second interrupt came while the first one left
        if enough(): return None
        self.driver = me
      with _one_at_a_time: return self._whole_or_recovered(work)
    finally:
      if self.driver == me:
        with self.news:
          self.driver = None
          self.news.notify_all()

  def _whole_or_recovered(self, work:Callable[[], Any]) -> Any:
    """work(), after what an exception left half done is made whole. An error of the device ends the sequences that it is about."""
    if self.dirty: self._recover()
    self.dirty, self.concerned = True, []
    try: result = work()
    except Exception as e:
      if not (concerned := self.concerned): raise
      self._recover()
      self._fail(e, concerned)
      result = True
    self.dirty = False
    return result

  def _fail(self, e:Exception, concerned:list[Sequence]) -> None:
    """Ends whom an error of the device is about: all, where it does nothing any more; of a step without room, as few as can be"""
    try: self.runner.wait()
    except Exception as dead:
      self.failed = f"the device failed: {one_line(dead)}"
      error = DeviceFailed(self.failed)
      error.__cause__ = e
      e, concerned = error, list(self.scheduler.live)
    if isinstance(e, MemoryError):
      traceback.clear_frames(e.__traceback__)   # what was made is given back, as long as anybody keeps the error
      prompts, rows = concerned[0].state is State.PREFILLING, len(concerned)
      if prompts and self.reading > self.runner.sizes[0]: return self._shorten(self.reading, e)
      if not prompts and rows > self.most: return self._narrow(max(self.most, rows // 2), f"steps of {rows} answers", e)
      concerned = concerned[-1:]
    for s in concerned: self.scheduler.end(s, "error", e)

  def _narrow(self, rows:int, what:str, e:MemoryError) -> None:
    """At most so many answers run at once from here on; the others wait"""
    print(f"{what} find no memory ({one_line(e)}): at most {rows} run{'s' * (rows == 1)} at once from here on", file=sys.stderr)
    self.scheduler.max_rows = rows
    while self.scheduler.holding > rows: self.scheduler.preempt()

  def _shorten(self, size:int, e:MemoryError) -> None:
    """Prompts are read in chunks of less than so many tokens from here on"""
    self.runner.sizes = self.scheduler.sizes = tuple(other for other in self.runner.sizes if other < size)
    self.scheduler.begun = None
    print(f"chunks of {size} tokens find no memory ({one_line(e)}): {self.runner.sizes[-1]} at most from here on", file=sys.stderr)

  # ---- pieces of work ----
  def _work(self) -> bool:
    if self.due: self._chunks_done()
    self._aborts()
    self._constraint_errors()
    if not self.drawn and all(future.done() for future in self._asked(self.batch)): self._draw()   # a prompt's chunk is not to come before
    if (chunk := self.scheduler.next_chunk()) is not None: self._chunk(chunk)
    elif self.scheduler.running: self._decode()
    elif self.flying: self._read()
    elif self.scheduler.live: wait(self._asked(self.scheduler.live), PAUSE, FIRST_COMPLETED)
    else: return False
    return True

  def _aborts(self) -> None:
    for s in [s for s in self.scheduler.live if s.aborted]: self.scheduler.end(s, "abort")

  def _chunk(self, chunk:Chunk) -> None:
    """Slices of the next rows of prompts, behind what is in flight"""
    self.concerned, answers = [part.sequence for part in chunk.parts], bool(self.scheduler.running)
    self.reading = chunk.size
    if not self.chunks: self.depth = chunk.depth
    start = time.perf_counter()
    self.runner.prefill([part.piece for part in chunk.parts], chunk.size, chunk.slices, chunk.shared)
    self.chunk_seconds += time.perf_counter() - start
    if answers and chunk.kind not in self.recorded: self._tell(self.chunk_seconds, f"chunks of {chunk.size} tokens")
    while self.flying: self._read()
    self.scheduler.ran(chunk)
    self.chunks.append(chunk)
    self.since = time.perf_counter()
    self.due = answers or chunk.kind not in self.recorded or len(self.chunks) == AHEAD * self.runner.stages

  def _chunks_done(self) -> None:
    """Waits for the slices that the device was given, and learns how long they took: a piece of work ends before, as it has read tokens. Of several
    devices the first is to have more to do while the others end theirs"""
    self.concerned, self.due, kinds = [part.sequence for part in self.chunks[0].parts], False, {chunk.kind for chunk in self.chunks}
    self.runner.wait(first=not self.scheduler.running and kinds <= self.recorded)
    self.concerned = []
    seconds = self.chunk_seconds + time.perf_counter() - self.since
    if self.scheduler.running: self.scheduler.spent += seconds
    if len(kinds) == 1 and kinds <= self.recorded: self.scheduler.took(*kinds, seconds / sum(len(chunk.slices) for chunk in self.chunks), self.depth)
    self.recorded.update(chunk.kind for chunk in self.chunks if chunk.slices.stop == self.runner.slices)
    self.chunks, self.chunk_seconds = [], 0.0

  def _tell(self, seconds:float, what:str) -> None:
    """Says, once, that answers waited long for what was recorded"""
    if self.told or seconds < max(LONG, self.scheduler.max_stall): return
    self.told = True
    print(f"answers waited {seconds:.1f} s while {what} were recorded and compiled, as any size is when first needed: --warm does all at the start",
          file=sys.stderr)

  def _decode(self) -> None:
    """Launches a step of all that run, and reads the one before it; or only reads what is in flight, as the batch is about to change"""
    if not self.drawn: self._draw()
    running = self.scheduler.running
    if self.flying and (self.batch != running or any(s.left <= self.flying for s in running)): return self._read()
    drafts = self.runner.drafts if self.batch == running and self.speculation.wanted() else 0
    while not self.scheduler.provide(self.flying + sum(self.drafted) + drafts + self.runner.ahead):
      if self.flying: return self._read()
      if not drafts: self._preempt()
      drafts = 0
    if not (running := self.scheduler.running): return
    self.concerned, self.chunks, self.chunk_seconds = running, [], 0.0
    if self.batch != running:
      self.runner.set_batch([s.batch_row for s in running])
      self.speculation.begins()
      self.batch, self.sent, self.timed, self.masks = running, [len(s.table.pages) for s in running], False, {}
    for row, s in enumerate(running):
      if len(s.table.pages) != self.sent[row]:
        self.runner.set_table(row, list(s.table.pages))
        self.sent[row] = len(s.table.pages)
    start = time.perf_counter()
    if drafts: self.runner.verify()
    elif self.runner.drafts and self.speculation.paused: self.runner.coast()
    else:
      self.runner.launch()
      if self.runner.drafts and self.runner.certain: self.speculation.found = True   # seen before it is read
    self.flying, self.steps, self.drawn = self.flying + 1, self.steps + 1, all(s.guide is None for s in running)
    self.drafted.append(drafts)
    self.decode_seconds += time.perf_counter() - start
    if not self.timed and len(running) > 1: self._tell(self.decode_seconds, f"steps of {len(running)} answers")
    self.scheduler.spent = 0.0
    while self.flying >= (1 if self.runner.drafts and self.speculation.asks else self.runner.in_flight): self._read()

  def _read(self) -> None:
    """The tokens of the oldest launch in flight. A row that has ended meanwhile made some too much."""
    if not self.drawn and self.flying == 1: self._draw()
    self.concerned = self.batch
    start = time.perf_counter()
    said = self.runner.read().reshape(len(self.batch), -1).tolist()
    drafts, seconds = self.drafted.popleft(), self.decode_seconds + time.perf_counter() - start
    self.flying, self.most = self.flying - 1, max(self.most, len(self.batch))
    if self.timed: self.scheduler.took(DECODE, seconds)
    if self.runner.drafts: self.speculation.read(said, bool(self.runner.found.any()), bool(drafts), seconds)
    self.decode_seconds, self.timed = 0.0, True  # a batch's first step may record one
    for row, (s, tokens) in enumerate(zip(self.batch, said, strict=True)):
      if s.state is not State.RUNNING: continue
      logprob = None if s.told is None else self.runner.logprobs(row, s.told)   # of one token: then nothing is drafted
      self.scheduler.accept(s, [token for token in tokens if token >= 0], logprob)
      if s.guide is not None and s.state is State.RUNNING: s.guide.ask(s.ids, s.prompt)

  # ---- constraints ----
  def _asked(self, sequences:list[Sequence]) -> list[Future]:
    """The masks for the next tokens of those that have a constraint and have not ended"""
    return [s.guide.future or s.guide.ask(s.ids, s.prompt) for s in sequences if s.guide is not None and s.state is not State.ENDED]

  def _draw(self) -> None:
    """The rest of the newest launch, with the masks for it"""
    wait(self._asked(self.batch))
    self._constraint_errors()
    self.concerned = self.batch
    now = {row: s.guide.future.result() for row, s in enumerate(self.batch) if s.guide is not None and s.state is State.RUNNING}
    self.runner.draw({row: mask for row, mask in now.items() if mask is not self.masks.get(row)})
    self.masks |= now
    self.drawn = True

  def _constraint_errors(self) -> None:
    """Ends those whose constraint failed"""
    for s in list(self.scheduler.live):
      if s.guide is not None and s.guide.future is not None and s.guide.future.done() and (e := s.guide.future.exception()) is not None:
        self.scheduler.end(s, "error", e)

  def _warm(self, kinds:list[Features]) -> None:
    while self.flying: self._read()
    self.concerned, self.batch = [], []
    while True:
      try: self.runner.warm(self.scheduler.max_rows, kinds)
      except MemoryError as e:
        traceback.clear_frames(e.__traceback__)
        if len(self.runner.sizes) == 1: raise
        self._shorten(self.runner.sizes[-1], e)
      else: break
    self.recorded.update(kinds_of(self.runner.sizes, self.runner.shares))

  def _preempt(self) -> None:
    self.scheduler.preempt()
    self.batch = []  # whoever comes back has another table

  def _logits(self, ids:list[int]) -> np.ndarray:
    table, rows, size, out = Table(), 0, self.runner.sizes[0], np.empty((len(ids), self.runner.vocab_size), np.float32)
    while self.flying: self._read()
    self.concerned = []
    while not self.pool.allocate(table, pages_for(len(ids))): self._preempt()
    try:
      for at in range(0, len(ids), size): out[at:at + size] = self.runner.logits(ids[at:at + size], at, list(table.pages))
      rows = len(ids)
    finally: self.pool.release(table, ids, rows)
    return out

  def _tokens(self, ids:Iterable[int]) -> list[int]: return tokens_of(ids, self.runner.vocab_size)

"""Runs a model's steps on its device: decode steps of a batch of sequences, and chunks of a prompt. Each kind is recorded once (capture.Replay).

A decode step reads and writes the device's buffers alone (Batch): the tokens, where they stand, their tables of pages, how they are drawn. Its tokens
are the next step's, so that one may be launched before the ids of the one before it are read. The host learns a step's ids from the log, in memory
that it sees while the device goes on; so it does probabilities, where they are asked for. A step with masks is launched in two pieces: the model,
which needs none, and the draw. A drafted step has several tokens of each sequence (speculate.py)."""
from __future__ import annotations
import enum, functools, sys, time
from collections import deque
from dataclasses import dataclass
from typing import Sequence
import numpy as np
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.apps.capture import Replay, compile_parts, enqueue, read, seen_by_host, to_device, write, write_row
from tinygrad.apps.engine.sampling import VALUES, Features, Sampling, counted, mask_words, sample, to_draw, token_counts
from tinygrad.apps.engine.sequence import TOP, BatchRow, Logprob
from tinygrad.apps.engine.speculate import DraftState, accept, counts_behind, counts_of_rows, note
from tinygrad.apps.mla import Transformer
from tinygrad.apps.mtp import MTP
from tinygrad.nn.cpu import is_cpu
from tinygrad.nn.drafts import NO_DRAFT, find_drafts
from tinygrad.nn.draw import next_token
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.likeliest import likeliest, log_total, tell
from tinygrad.nn.step import PAGE, Step

ROWS = 1, 2, 4, 8, 16, 32, 64   # of recorded decode steps; a batch takes the least that holds it
SLICE = 2                       # parts of a chunk that a slice of it runs, each a block of the model
MTP_PARTS = 2                   # … and those of the block that drafts
LOG = 4                         # steps that a log holds
NOTHING = -1                    # in a log, what no step has written yet: no token, and no probability
WRITES = 64                      # after which the device is waited for: what it is to copy is kept until then
UNSEEN = 3                      # such waits in a row after which the log is read when all is done
PATIENCE = 1.0                  # seconds without an id after which the device is waited for

@functools.cache
def _say_once(line:str) -> None: print(line, file=sys.stderr)

@dataclass(frozen=True)
class Draw:
  """How a batch's tokens are drawn: by `features`, and by rows as sampling.sample takes them. odds: where their probabilities are logged"""
  features: Features
  values: Tensor
  key: Tensor
  counts: Tensor|None
  bias: Tensor|None
  mask: Tensor|None
  odds: Tensor|None

def next_tokens(step:Step, logits:Tensor, draw:Draw, token:Tensor, log:Tensor) -> tuple[Tensor, ...]:
  """The end of a decode step: logits, float32 (S, vocab), become the next tokens, which are logged, and the positions move on"""
  counts = None if draw.counts is None else draw.counts.assign(counted(draw.counts, token))
  given = to_draw(logits, draw.features, draw.values, draw.key, step.start, counts, draw.bias, draw.mask)
  chosen, moved, logged = next_token(*given, token, step.start, step.tables, log)
  if draw.odds is None: return chosen, moved, logged
  # behind `next_token`, whose own result orders the two: it moves `start` on unseen
  best = likeliest(logits, draw.odds.shape[2] - 1)
  return chosen, moved, logged, tell(logits, log_total(logits, best), chosen, best, moved, draw.odds)

def rows_drawn(step:Step, count:int, logits:Tensor, draw:Draw, state:DraftState) -> tuple[Tensor, ...]:
  """int32 (S · (1 + count),), the tokens of a step with `count` drafts of each sequence, and the counts at each of a sequence's rows where they are
  needed. step, logits: of all rows"""
  def rows(x:Tensor) -> Tensor: return x.repeat_interleave(1 + count, 0) if count else x
  fed = (state.fed if count else state.token).reshape(-1, 1 + count)
  counts = [] if draw.counts is None else counts_of_rows(draw.counts, fed)
  of_rows = Tensor.stack(*counts, dim=1).flatten(0, 1) if counts else None
  bias = None if draw.bias is None else rows(draw.bias)
  return sample(logits, draw.features, rows(draw.values), rows(draw.key), step.start, of_rows, bias).contiguous(), *counts

def counted_on(draw:Draw, counts:list[Tensor], accepted:Tensor) -> list[Tensor]:
  """What is written behind a step: the counts of draw at each sequence's newest token, where they are needed. counts: as rows_drawn gives them"""
  return [] if draw.counts is None else [draw.counts.assign(counts_behind(counts, accepted))]

def next_drafted(step:Step, count:int, logits:Tensor, draw:Draw, state:DraftState) -> tuple[Tensor, ...]:
  """The end of a step with `count` drafts of each sequence: as next_tokens, and the next step's drafts are found"""
  chosen, *counts = rows_drawn(step, count, logits, draw, state)
  token, start, ids, accepted, said = accept(chosen, count, state)
  found = find_drafts(ids, start, state.drafts.shape[1])
  if state.forced is not None: found = found.maximum(0).contiguous()   # some draft, wherever
  return token, start, ids, *note(state, token, start, said, found), *counted_on(draw, counts, accepted)

# the same where a block guesses, in three parts: the tokens are drawn; they are accepted, when the block has run behind all of them; behind its head
# the next draft is drawn

def drawn(step:Step, count:int, logits:Tensor, draw:Draw, state:DraftState) -> tuple[Tensor, ...]:
  """As rows_drawn"""
  chosen, *counts = rows_drawn(step, count, logits, draw, state)
  return chosen, *(row.contiguous() for row in counts)

def accepted_rows(count:int, chosen:Tensor, counts:list[Tensor], ahead:Tensor, draw:Draw, state:DraftState) -> tuple[Tensor, ...]:
  """chosen, counts: as rows_drawn gives them; ahead: float32 (S · (1 + count), D), what the block says behind each -> what the step says, int32
  (S, 1 + N), and ahead of each sequence's newest token, (S, D)"""
  token, start, ids, accepted, said = accept(chosen, count, state)
  rows = ahead.reshape(-1, 1 + count, ahead.shape[1])
  newest = rows[:, 0]
  for i in range(1, 1 + count): newest = (accepted.unsqueeze(1) >= i).where(rows[:, i], newest)
  return said, newest.contiguous(), token, start, ids, *counted_on(draw, counts, accepted)

def next_draft(logits:Tensor, drafts:list[Tensor], draw:Draw, state:DraftState) -> Tensor:
  """int32 (S,): a draft behind those before it, drawn from the block's logits, (S, vocab), as its own step will draw the token that it is compared
  with: by the same numbers, noise and counts"""
  counts = draw.counts
  if counts is not None:
    for token in (state.token, *drafts): counts = counted(counts, token)
  return sample(logits, draw.features, draw.values, draw.key, state.start + len(drafts), counts, draw.bias).contiguous()

def note_drafted(drafts:list[Tensor], said:Tensor, state:DraftState) -> tuple[Tensor, ...]:
  """The end of the step"""
  return note(state, state.token, state.start, said, Tensor.stack(*drafts, dim=1).contiguous() if len(drafts) > 1 else drafts[0].unsqueeze(1))

def row_ahead(start:Tensor, count:int) -> Tensor: return (start + count).contiguous()

def next_undrafted(chosen:Tensor, counts:list[Tensor], draw:Draw, state:DraftState) -> tuple[Tensor, ...]:
  """The end of a step without drafts that finds none for the next. chosen, counts: as rows_drawn gives them"""
  token, start, ids, accepted, said = accept(chosen, 0, state)
  none = Tensor.full(state.drafts.shape, NO_DRAFT, dtype=dtypes.int32, device=state.drafts.device).contiguous()
  return token, start, ids, *note(state, token, start, said, none), *counted_on(draw, counts, accepted)

def row_before(start:Tensor) -> Tensor:
  """int32 (S,): where the rows stood that the newest tokens were drawn behind"""
  return (start - 1).maximum(0).contiguous()

class Batch:
  """What decode steps of `size` rows read and write on the device. A row that is not there has a table of zeros: it stands still, and writes what is
  nobody's."""
  def __init__(self, model:Transformer, size:int, mtp:MTP|None=None):
    self.model, self.size, self.mtp = model, size, mtp
    def zeros(*shape:int, dtype:type=np.int32) -> Tensor: return to_device(np.zeros(shape, dtype), model.device)
    self.token, self.start, self.tables = zeros(size), zeros(size), zeros(size, model.pages)
    self.values, self.key = zeros(size, VALUES, dtype=np.float32), zeros(size, 2, dtype=np.uint32)
    self.log, self.logged = seen_by_host(np.full((size, LOG, *self.said_by_row), NOTHING, np.int32), model.device)
    self.columns = np.zeros(0, np.int64)      # of the log, modulo LOG: where the next step logs the rows that are there
    self.unseen = 0                           # steps in a row whose ids were not seen before all was done
    self.features = Features()
    self.replays: dict[object, Replay] = {}   # by what steps do
    self.pieces: dict[Features, list[UOp]] = {}   # of those with masks: the model, and the draw

  # what few batches need, and is large
  @functools.cached_property
  def counts(self) -> Tensor: return to_device(np.zeros((self.size, self.model.config.vocab_size), np.int32), self.model.device)
  @functools.cached_property
  def bias(self) -> Tensor: return to_device(np.zeros((self.size, self.model.config.vocab_size), np.float32), self.model.device)

  @functools.cached_property
  def mask(self) -> tuple[Tensor, np.ndarray|None]:
    return seen_by_host(np.zeros((self.size, mask_words(self.model.config.vocab_size)), np.uint32), self.model.device)
  @functools.cached_property
  def odds(self) -> tuple[Tensor, np.ndarray|None]:
    """int32 (size, LOG, 1 + likeliest, 2): of each row, the token and the likeliest, each with a float's bits"""
    shape = self.size, LOG, 1 + min(TOP, self.model.config.vocab_size), 2
    return seen_by_host(np.full(shape, NOTHING, np.int32), self.model.device)

  @property
  def said_by_row(self) -> tuple[int, ...]:
    """The shape of what a step logs of a row"""
    return ()
  @property
  def step(self) -> Step: return Step.decode(self.start, self.tables)
  @property
  def kind(self) -> object:
    """What steps do, from here on"""
    return self.features

  def set(self, rows:Sequence[BatchRow]) -> None:
    """These are the rows from now on"""
    absent, vocab = self.size - len(rows), self.model.config.vocab_size
    tables = np.zeros((self.size, self.model.pages), np.int32)
    for row, own in zip(tables, rows): row[:len(own.table)] = own.table
    write(self.token, np.int32([own.token for own in rows] + [0] * absent))
    write(self.start, np.int32([own.position for own in rows] + [0] * absent))
    write(self.tables, tables)
    write(self.values, np.float32([own.sampling.values() for own in rows] + [Sampling().values()] * absent))
    write(self.key, np.uint32([(own.sampling.seed, 0) for own in rows] + [(0, 0)] * absent))
    self.features = functools.reduce(Features.__or__, (own.features for own in rows), Features())
    for i, own in enumerate(rows):
      if self.features.penalty: write_row(self.counts, i, token_counts(vocab, own.ids[:own.prompt], own.ids[own.prompt:]))
      if self.features.bias: write_row(self.bias, i, own.sampling.bias_row(vocab))
    if self.features.mask: self.set_masks({i: np.full(mask_words(vocab), 0xffffffff, np.uint32) for i in range(self.size)})
    self.columns = np.array([own.position for own in rows], np.int64)

  def set_table(self, row:int, table:np.ndarray) -> None:
    """int32 (P,): the pages of a row"""
    write_row(self.tables, row, table)
  def set_masks(self, masks:dict[int, np.ndarray]) -> None:
    """Of some rows. No step that reads them is under way: where the host can, it writes them itself"""
    mask, seen = self.mask
    for i, bits in masks.items():
      if seen is None: write_row(mask, i, bits)
      else: seen[i] = bits

  # ---- what steps say ----
  def expect(self) -> None:
    """Before a launch: nothing of it is there"""
    rows, columns = np.arange(len(self.columns)), self.columns % LOG
    if self.logged is not None: self.logged[rows, columns] = NOTHING
    if self.features.logprobs and (seen := self.odds[1]) is not None: seen[rows, columns] = NOTHING
  def said(self, rows:np.ndarray, columns:np.ndarray) -> bool:
    """Whether what a step says is there, as the host sees it"""
    assert self.logged is not None
    if (self.logged[rows, columns] == NOTHING).any(): return False
    return not self.features.logprobs or bool((self.odds[1][rows, columns] != NOTHING).all())

  @property
  def drawing(self) -> Draw:
    features = self.features
    return Draw(features, self.values, self.key, self.counts if features.penalty else None, self.bias if features.bias else None,
                self.mask[0] if features.mask else None, self.odds[0] if features.logprobs else None)
  def record(self, compiled:bool=True) -> Replay:
    """A step by these features: it reads the tokens and their positions, and writes the next of both"""
    replay = Replay(compiled)
    step, tokens = self.given(replay)
    hidden = self.model.hidden(step, tokens, replay.run)
    self.record_end(replay, step, hidden, self.model.head(step, hidden, replay.run))
    return replay
  def given(self, replay:Replay) -> tuple[Step, Tensor]:
    """What the model is given"""
    return self.step, self.token
  def record_end(self, replay:Replay, step:Step, hidden:Tensor, logits:Tensor) -> None:
    """From what the model says of all rows on"""
    replay.run(next_tokens, step, logits, self.drawing, self.token, self.log)
    self.drawn_at = len(replay.recorded) - 1
    # so that a later batch that drafts finds the block's rows
    if self.mtp is not None: self.mtp.prefill(Step.decode(replay.run(row_before, self.start), self.tables), self.token, hidden, replay.run)
  def replay(self) -> Replay:
    if self.kind not in self.replays: self.replays[self.kind] = self.record()
    return self.replays[self.kind]
  def all_replays(self) -> list[Replay]:
    """Whatever steps of these features may do"""
    return [self.replay()]
  def forget(self) -> None:
    """The step that there was no room for: what it has is given back"""
    self.replays.pop(self.kind, None)
    self.pieces.pop(self.features, None)
  def piece(self, number:int) -> UOp:
    """Of a step with masks: 0, the model; 1, the draw"""
    if self.features not in self.pieces:
      replay = self.replay()
      self.pieces[self.features] = replay.cut([self.drawn_at, len(replay.recorded)])
    return self.pieces[self.features][number]

class Mode(enum.Enum):
  """What a step of a batch with drafts does"""
  FIND = enum.auto()     # drafts for the next
  VERIFY = enum.auto()   # those of the one before it, and finds others
  COAST = enum.auto()    # neither

class DraftBatch(Batch):
  """A batch whose steps find and verify drafts, `most` of each row, as `mode` says of the next steps. mtp: what makes drafts; without it they are
  found in the text"""
  def __init__(self, model:Transformer, size:int, most:int, mtp:MTP|None=None, forced:float|None=None):
    self.most, self.mode = most, Mode.FIND
    super().__init__(model, size, mtp)
    def numbers(*shape:int) -> Tensor: return to_device(np.zeros(shape, np.int32), model.device)
    rows = size * (1 + most)
    self.state = DraftState(self.token, self.start, self.tables, numbers(size, model.pages * PAGE), numbers(size, most), numbers(rows), numbers(rows),
                            numbers(size), self.log, forced)
    self.row_tables = numbers(rows, model.pages)

  @property
  def said_by_row(self) -> tuple[int, ...]: return (self.most + 2,)
  @property
  def kind(self) -> object: return self.features, self.mode

  def set(self, rows:Sequence[BatchRow]) -> None:
    super().set(rows)
    self.columns = np.zeros(len(rows), np.int64)   # by the number of a step, as positions move on by as many as are right
    ids, tables = np.zeros(self.state.ids.shape, np.int32), np.zeros((self.size, self.model.pages), np.int32)
    for i, own in enumerate(rows):
      ids[i, :len(own.ids)] = own.ids
      tables[i, :len(own.table)] = own.table
    write(self.state.ids, ids)
    write(self.state.drafts, np.full(self.state.drafts.shape, NO_DRAFT, np.int32))
    write(self.state.number, np.zeros(self.size, np.int32))
    write(self.row_tables, np.repeat(tables, 1 + self.most, axis=0))

  def set_table(self, row:int, table:np.ndarray) -> None:
    super().set_table(row, table)
    for i in range(1 + self.most): write_row(self.row_tables, row * (1 + self.most) + i, table)

  @property
  def verified(self) -> int:
    """Drafts of a row that a step verifies"""
    return self.most if self.mode is Mode.VERIFY else 0
  def given(self, replay:Replay) -> tuple[Step, Tensor]:
    step, tokens = (Step.decode(self.state.at, self.row_tables), self.state.fed) if self.verified else (self.step, self.token)
    return step if self.mtp is None else self.model.planned(step, replay.run), tokens   # once, for the model and the block
  def all_replays(self) -> list[Replay]:
    replays = []
    for self.mode in (Mode.VERIFY, Mode.COAST, Mode.FIND): replays.append(self.replay())
    return replays
  def record_end(self, replay:Replay, step:Step, hidden:Tensor, logits:Tensor) -> None:
    run, state, draw, count = replay.run, self.state, self.drawing, self.verified
    if self.mtp is None and self.mode is not Mode.COAST:
      run(next_drafted, step, count, logits, draw, state)
      return
    found = run(drawn, step, count, logits, draw, state)
    chosen, *counts = found if isinstance(found, tuple) else (found,)
    if self.mode is Mode.COAST:
      if self.mtp is not None: self.mtp.prefill(step, chosen, hidden, run)
      run(next_undrafted, chosen, counts, draw, state)
    else:
      ahead = self.mtp.hidden(step, chosen, hidden, run)
      said, newest, *_ = run(accepted_rows, count, chosen, counts, ahead, draw, state)
      drafts:list[Tensor] = []
      for i in range(self.most):
        if i:
          at = self.start if i == 1 else run(row_ahead, self.start, i - 1)
          newest = self.mtp.hidden(Step.decode(at, self.tables), drafts[-1], newest, run, again=True)
        drafts.append(run(next_draft, self.mtp.head(self.step, newest, run), drafts, draw, state))
      run(note_drafted, drafts, said, state)

class Runner:
  """See the head of the file. sizes: tokens of a prompt's chunks, the least first. batch: whose steps are launched. drafts: of a sequence in a
  step, at most; 0: none. mtp: the block that drafts; without it drafts are found in the text."""
  def __init__(self, model:Transformer, drafts:int=0, mtp:MTP|None=None):
    self.most_drafts, self.mtp = drafts, mtp
    self.model, self.max_context, self.vocab_size, self.sizes = model, model.max_context, model.config.vocab_size, model.prefill_sizes
    self.on_cpu = is_cpu(model.device)   # asking for a device's renderer takes tinygrad 17 µs
    self.few = self.sizes[-1] // (2 if self.on_cpu else 4)   # tokens that smaller chunks take sooner: on a CPU, padding costs what tokens do
    self.stages = model.copies + 1   # devices that chunks go through, one behind another
    self.slices = -(-(len(model.blk) + model.copies + (0 if mtp is None else MTP_PARTS)) // SLICE)
    self.batches: dict[int, Batch] = {}
    self.drafting: dict[int, DraftBatch] = {}
    self.forced: float|None = None
    self.batch = self.batch_of(1)
    self.launched: deque[tuple[Batch, np.ndarray]] = deque()   # the steps not read, and where they log their rows
    self.start, self.table = (to_device(np.zeros((1, *shape), np.int32), model.device) for shape in ((), (model.pages,)))   # of a prompt's chunk
    self.ids, self.behind = ({size: to_device(np.zeros(size, np.int32), model.device) for size in self.sizes} for _ in range(2))
    self.chunks: dict[int, list[UOp]] = {}   # the slices of each size
    self.writes = 0
    self.odds: tuple[np.ndarray, np.ndarray]|None = None     # of what was read last: int32 and float32 (rows, 1 + likeliest)
    self.found = np.zeros(0, np.bool_)                       # … of a batch with drafts: which rows have some for the next step
    if plain := model.plain_parts(self.batch.step):
      kernels = target_of(model.device) is not None or self.on_cpu
      why = f"a dimension of this model is not one that the kernels take ({', '.join(plain)})" if kernels else "no kernels for this device"
      _say_once(f"{model.device}: {why}: decoding by plain ops, slowly")

  # ---- decoding ----
  def batch_of(self, count:int, features:Features=Features()) -> Batch:
    """The least batch of at least so many rows, for steps that do this. Of those with masks, which come from the host, and with probabilities nothing
    is drafted, nor of so many rows that their drafts would be too many"""
    size = next(size for size in ROWS if size >= count)
    if not 0 < self.most_drafts <= ROWS[-1] // size - 1 or features.mask or features.logprobs:
      if size not in self.batches: self.batches[size] = Batch(self.model, size, self.mtp)
      return self.batches[size]
    if size not in self.drafting: self.drafting[size] = DraftBatch(self.model, size, self.most_drafts, self.mtp, self.forced)
    return self.drafting[size]
  def force(self, share:float) -> None:
    """From the next batch on such a share of drafts counts as right, whatever they are: the tokens are none of the model's, and the time is that of
    drafts as good as that"""
    self.forced, self.drafting = share, {}

  def set_batch(self, rows:Sequence[BatchRow]) -> None:
    """What the next steps decode. Steps that were not read are forgotten."""
    self.launched.clear()
    self.wait()   # else a step forgotten could still log
    self.batch = self.batch_of(len(rows), functools.reduce(Features.__or__, (row.features for row in rows)))
    self.batch.set(rows)

  def set_table(self, row:int, table:Sequence[int]) -> None:
    """The pages of a row of the batch, from the next launch on"""
    padded = np.zeros(self.model.pages, np.int32)
    padded[:len(table)] = table
    self.batch.set_table(row, padded)
    self.writes += 1
    if self.writes % WRITES == 0: self.wait()

  @property
  def certain(self) -> bool: return self.mtp is not None
  @property
  def drafts(self) -> int:
    """Of each sequence, in a drafted step of the batch that is set"""
    return self.batch.most if isinstance(self.batch, DraftBatch) else 0
  def verify(self) -> None:
    """Enqueues a drafted step"""
    self._launch_as(Mode.VERIFY)
  def coast(self) -> None:
    """Enqueues a step without drafts, behind which there are none"""
    self._launch_as(Mode.COAST)
  def _launch_as(self, mode:Mode) -> None:
    assert isinstance(self.batch, DraftBatch)
    self.batch.mode = mode
    try: self.launch()
    finally: self.batch.mode = Mode.FIND

  def launch(self) -> None:
    """Enqueues a decode step, of one with masks all but the draw"""
    batch = self.batch
    batch.expect()
    try:
      if batch.features.mask: enqueue(batch.piece(0))
      else: batch.replay()()
    except MemoryError:
      batch.forget()
      raise
    self.launched.append((batch, batch.columns))
    batch.columns = batch.columns + 1

  def draw(self, masks:dict[int, np.ndarray]) -> None:
    """Enqueues the rest of the newest step, when those before it were read"""
    self.batch.set_masks(masks)
    enqueue(self.batch.piece(1))

  @property
  def in_flight(self) -> int:
    """How many steps may be launched and not read: one where the host sees no ids before all is done; so with drafts on a CPU, whose launches return
    then: what the next step does hangs on what the newest said"""
    return 1 if self.batch.logged is None or self.drafts and self.on_cpu else 2

  def read(self) -> np.ndarray:
    """int32 (rows,): the tokens of the oldest step in flight, when it is done; of a batch with drafts int32 (rows, 1 + drafts), a row's tokens
    and then what is none, see speculate.py. Raises what the device does where it failed."""
    batch = self.launched[0][0]
    said = self._read()
    if isinstance(batch, DraftBatch): said, self.found = said[:, :-1], said[:, -1] == 1
    return said
  def _read(self) -> np.ndarray:
    batch, columns = self.launched.popleft()
    place = np.arange(len(columns)), columns % LOG
    if batch.logged is None:
      if batch.features.logprobs: self._told(read(batch.odds[0])[place])
      return read(batch.log)[place]
    patience = time.monotonic() + PATIENCE
    while not batch.said(*place):
      if time.monotonic() < patience:
        time.sleep(0)   # other threads have their turn
        continue
      self.wait()
      if not batch.said(*place): raise RuntimeError(f"{self.model.device}: a step ended without a token")
      batch.unseen += 1
      break
    else: batch.unseen = 0
    tokens = batch.logged[place]
    if batch.features.logprobs: self._told(batch.odds[1][place])
    if batch.unseen == UNSEEN:
      batch.logged = None
      _say_once(f"{self.model.device}: tokens are seen only when all is done: no step is launched ahead of them")
    return tokens

  def _told(self, odds:np.ndarray) -> None: self.odds = odds[:, :, 0], np.ascontiguousarray(odds[:, :, 1]).view(np.float32)
  def logprobs(self, row:int, count:int) -> Logprob:
    """Of a row of what was read last, in a batch where one asks for them: its token, and the `count` likeliest"""
    assert self.odds is not None
    tokens, values = (numbers[row, :1 + count].tolist() for numbers in self.odds)
    return Logprob(values[0], list(zip(tokens[1:], values[1:])))

  def wait(self) -> None:
    """Until the devices have done all that they were given. Raises RuntimeError, which names those that failed"""
    failed = []
    for device in self.model.devices:
      try: Device[device].synchronize()
      except Exception as e: failed.append((device, e))
    if failed: raise RuntimeError("; ".join(f"{device}: {e}" for device, e in failed)) from failed[0][1]

  # ---- prompts ----
  def chunk_step(self, size:int) -> Step: return Step.prefill(self.start, self.table, size)
  def record_chunk(self, size:int, compiled:bool=True) -> Replay:
    """Reads ids[size] and writes their rows; those of the block that drafts by behind[size], the tokens behind them"""
    replay, step = Replay(compiled), self.chunk_step(size)
    if self.mtp is None: self.model.prefill(step, self.ids[size], replay.run)
    else: self.mtp.prefill(step, self.behind[size], self.model.hidden(step, self.ids[size], replay.run), replay.run)
    return replay
  def cut(self, chunk:Replay) -> list[UOp]:
    """The slices of a chunk: the launches of a few blocks each, before the first of them what comes before all blocks"""
    end = len(chunk.recorded)
    return chunk.cut(list(range(end - SLICE * (self.slices - 1), end + 1, SLICE)))
  @functools.cached_property
  def logits_step(self) -> tuple[Replay, Tensor]:
    """As the least chunk, and the float32 (size, vocab) that it writes"""
    replay, size = Replay(), self.sizes[0]
    return replay, self.model.logits(self.chunk_step(size), self.ids[size], replay.run)

  def prefill(self, ids:Sequence[int], start:int, size:int, table:Sequence[int], slices:range|None=None, following:int=0) -> None:
    """Enqueues these slices of a chunk, by default all: it writes the rows of at most `size` tokens from position `start` on. It is padded; what pads
    it lies behind the sequence's end, in rows that are written again before they are read, or in page 0. Decode steps may run between its slices:
    they write other pages, and have other memory for what is in between. following: the token behind them."""
    if size not in self.chunks: self.chunks[size] = self.cut(self.record_chunk(size))
    self._set_chunk(ids, start, size, table)
    if self.mtp is not None: write(self.behind[size], np.int32([*ids[1:], following, *[0] * (size - len(ids))]))
    try:
      for i in range(self.slices) if slices is None else slices: enqueue(self.chunks[size][i])
    except MemoryError:
      del self.chunks[size]   # what it has is given back
      raise
  def logits(self, ids:Sequence[int], start:int, table:Sequence[int]) -> np.ndarray:
    """As prefill, of at most sizes[0] tokens -> float32 (len(ids), vocab), the logits after each"""
    replay, logits = self.logits_step
    self._set_chunk(ids, start, self.sizes[0], table)
    replay()
    return read(logits)[:len(ids)]
  def _set_chunk(self, ids:Sequence[int], start:int, size:int, table:Sequence[int]) -> None:
    padded = np.zeros((1, self.model.pages), np.int32)
    padded[0, :len(table)] = table
    write(self.ids[size], np.int32([*ids, *[0] * (size - len(ids))]))
    write(self.start, np.int32([start]))
    write(self.table, padded)

  # ---- at the start ----
  def warm(self, rows:int, kinds:Sequence[Features]) -> None:
    """Records chunks of all sizes, and steps by each kind of features of all sizes of a batch up to so many rows, compiles all kernels beside each
    other, and runs each once, for nobody: a graph is made when it first runs"""
    steps = [(self.batch_of(size, features), features) for size in ROWS if size <= self.batch_of(rows).size for features in kinds]
    replays = []
    for batch, features in steps:
      batch.set([])
      batch.features = features
      replays += batch.all_replays()
    chunks = {size: self.record_chunk(size) for size in self.sizes if size not in self.chunks}
    compile_parts([part for replay in (*replays, *chunks.values()) for part in replay.recorded])
    for size, chunk in chunks.items(): self.chunks[size] = self.cut(chunk)
    for size in self.sizes: self.prefill([0], 0, size, [])
    for batch, features in steps:
      self.batch, batch.features = batch, features
      self.launch()
      if features.mask: self.draw({})
      if isinstance(batch, DraftBatch):
        self.verify()
        self.coast()
    self.wait()
    self.launched.clear()

  @property
  def kernels_a_token(self) -> int:
    """Launches of the newest decode step; 0 before the first token"""
    return len(self.batch.replays[self.batch.kind].calls) if self.batch.kind in self.batch.replays else 0

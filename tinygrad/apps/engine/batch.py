"""A batch of sequences on the device, and the decode steps that it takes. Each kind of step is recorded once (capture.Replay).

A decode step reads and writes the device's buffers alone (Batch): the tokens, where they stand, their tables of pages, how they are drawn. Its tokens
are the next step's, so that one may be launched before the ids of the one before it are read. The host learns a step's ids from the log, in memory
that it sees while the device goes on; so it does probabilities, where they are asked for. A step with masks is launched in two pieces: the model,
which needs none, and the draw. A drafted step has several tokens of each sequence (speculate.py)."""
from __future__ import annotations
import enum, functools
from dataclasses import dataclass
from typing import Sequence
import numpy as np
from tinygrad import Tensor, UOp, dtypes
from tinygrad.apps.capture import Replay, enqueue, read, seen_by_host, to_device, write, write_row
from tinygrad.apps.engine.sampling import VALUES, Features, Sampling, counted, mask_words, sample, to_draw, token_counts
from tinygrad.apps.engine.sequence import TOP, BatchRow
from tinygrad.apps.engine.speculate import DraftState, accept, counts_behind, counts_of_rows, note, some_drafts
from tinygrad.apps.mla import Transformer
from tinygrad.apps.mtp import MTP
from tinygrad.nn.drafts import NO_DRAFT, find_drafts
from tinygrad.nn.draw import next_token
from tinygrad.nn.likeliest import likeliest, log_total, tell
from tinygrad.nn.step import PAGE, Step

ROWS = 1, 2, 4, 8, 16, 32, 64   # of recorded decode steps; a batch takes the least that holds it
LOG = 4                         # steps that a log holds
NOTHING = -1                    # in a log, what no step has written yet: no token, and no probability

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
  most = state.drafts.shape[1]
  found = find_drafts(ids, start, state.begins, most) if state.forced is None else some_drafts(most, start, logits.shape[1])
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

def batch_size(count:int) -> int:
  """The rows of the least batch that holds so many"""
  return next(size for size in ROWS if size >= count)

def _place(columns:np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """In a log"""
  return np.arange(len(columns)), columns % LOG

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
  def step(self) -> Step: return self.model.decode_step(self.start, self.tables)
  @property
  def kind(self) -> object:
    """What steps do, from here on"""
    return self.features

  def set(self, rows:Sequence[BatchRow], features:Features) -> None:
    """These are the rows from now on. features: what steps do, at least what any of them asks for"""
    absent, vocab = self.size - len(rows), self.model.config.vocab_size
    tables = np.zeros((self.size, self.model.pages), np.int32)
    for row, own in zip(tables, rows): row[:len(own.table)] = own.table
    write(self.token, np.int32([own.token for own in rows] + [0] * absent))
    write(self.start, np.int32([own.position for own in rows] + [0] * absent))
    write(self.tables, tables)
    write(self.values, np.float32([own.sampling.values() for own in rows] + [Sampling().values()] * absent))
    write(self.key, np.uint32([(own.sampling.seed, 0) for own in rows] + [(0, 0)] * absent))
    self.features = features
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
  def expect(self) -> np.ndarray:
    """Before a launch: nothing of it is there. Returns its columns, int64 (rows,), by which it is read"""
    columns, self.columns = self.columns, self.columns + 1
    place = _place(columns)
    if self.logged is not None: self.logged[place] = NOTHING
    if self.features.logprobs and (seen := self.odds[1]) is not None: seen[place] = NOTHING
    return columns
  @property
  def seen(self) -> bool:
    """Whether the host sees what steps say while the device goes on"""
    return self.logged is not None
  def blind(self) -> None:
    """From here on it is read when all is done"""
    self.logged = None
  def said(self, columns:np.ndarray) -> bool:
    """Whether what a step says is there, as the host sees it"""
    assert self.logged is not None
    if (self.logged[place := _place(columns)] == NOTHING).any(): return False
    return not self.features.logprobs or bool((self.odds[1][place] != NOTHING).all())
  def tokens(self, columns:np.ndarray) -> np.ndarray:
    """int32 (rows,), or of a row what said_by_row tells"""
    return (read(self.log) if self.logged is None else self.logged)[_place(columns)]
  def told(self, columns:np.ndarray) -> np.ndarray:
    """int32 (rows, 1 + likeliest, 2), where a row asks for probabilities"""
    odds, seen = self.odds
    return (read(odds) if self.logged is None else seen)[_place(columns)]

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
    if self.mtp is not None: self.mtp.prefill(self.model.decode_step(replay.run(row_before, self.start), self.tables), self.token, hidden, replay.run)
  def launch(self) -> np.ndarray:
    """Enqueues a step, of one with masks all but the draw. Returns its columns"""
    columns = self.expect()
    try:
      if self.features.mask: enqueue(self.piece(0))
      else: self.replay()()
    except MemoryError:
      self.forget()
      raise
    return columns
  def draw(self, masks:dict[int, np.ndarray]) -> None:
    """The rest of a step with masks"""
    self.set_masks(masks)
    enqueue(self.piece(1))
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
    self.state = DraftState(self.token, self.start, self.tables, numbers(size, model.pages * PAGE), numbers(size), numbers(size, most), numbers(rows),
                            numbers(rows), numbers(size), self.log, forced)
    self.row_tables = numbers(rows, model.pages)

  @property
  def said_by_row(self) -> tuple[int, ...]: return (self.most + 2,)
  @property
  def kind(self) -> object: return self.features, self.mode

  def set(self, rows:Sequence[BatchRow], features:Features) -> None:
    super().set(rows, features)
    self.columns = np.zeros(len(rows), np.int64)   # by the number of a step, as positions move on by as many as are right
    ids, tables = np.zeros(self.state.ids.shape, np.int32), np.zeros((self.size, self.model.pages), np.int32)
    for i, own in enumerate(rows):
      ids[i, :len(own.ids)] = own.ids
      tables[i, :len(own.table)] = own.table
    write(self.state.ids, ids)
    write(self.state.begins, np.int32([own.prompt for own in rows] + [0] * (self.size - len(rows))))
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
    step, tokens = (self.model.decode_step(self.state.at, self.row_tables), self.state.fed) if self.verified else (self.step, self.token)
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
          newest = self.mtp.hidden(self.model.decode_step(at, self.tables), drafts[-1], newest, run, again=True)
        drafts.append(run(next_draft, self.mtp.head(self.step, newest, run), drafts, draw, state))
      run(note_drafted, drafts, said, state)

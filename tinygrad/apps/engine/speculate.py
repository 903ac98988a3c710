"""Drafts: several tokens of a sequence in one step. What they are guessed from is the sequence itself: where its newest tokens stood before, the
tokens that followed there follow here, perhaps.

A drafted step has 1 + N rows of each sequence, at neighbouring positions: its token, and N drafts. Each row's token is drawn by its own position, as
it would be alone. As long as the drawn tokens are the drafts, the rows behind them are those of the sequence; the first that is not is right, too,
and what follows it is thrown away. So the answer is what it is without drafts.

Drafts are found, judged and fed on the device, at the end of each step, for the next. The host chooses between plain and drafted steps, from what the
newest step that it has read says: whether there are drafts."""
from __future__ import annotations
from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median
from typing import Callable
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.apps.engine.sampling import counted
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.kernel import behind_wait, empty, launch
from tinygrad.nn.step import NEW_ROWS

MAX_DRAFTS = NEW_ROWS - 1    # that a step verifies
REFUSED, NOT_DRAFTED = -2, -3   # among what a step says, in place of a token

# ---- on the device. S sequences, N drafts of each at most, C positions ----

@dataclass(frozen=True)
class DraftState:
  """What the steps of a batch read and write, all int32"""
  token: Tensor    # (S,): what a plain step is fed,
  start: Tensor    # (S,): … and where
  tables: Tensor   # (S, P): the pages of a sequence
  ids: Tensor      # (S, C): the sequences, of start + 1 tokens each
  begins: Tensor   # (S,): where their answers begin
  drafts: Tensor   # (S, N): what may follow, or NO_DRAFT
  fed: Tensor      # (S · (1 + N),): what a drafted step is fed,
  at: Tensor       # (S · (1 + N),): … and where
  number: Tensor   # (S,): of the step
  log: Tensor      # (S, columns, N + 2)
  forced: float|None = None   # where time alone is measured: the share of drafts that count, drawn by lot, whatever they are

def _each(device:str, count:int, buffers:dict[str, UOp]) -> tuple[UOp, dict[str, UOp], Callable[[list[UOp]], list[UOp]]]:
  """A kernel's row of `count`, its buffers behind the kernels before, and what ends its stores: a thread has a row where there are threads"""
  if Device[device].renderer.has_local:
    target = target_of(device)
    return UOp.special(count, "lidx0"), buffers if target is None else behind_wait(target, buffers), lambda stores: stores
  row = UOp.range(count, 0)
  return row, buffers, lambda stores: [UOp.group(*stores).end(row)]

def by_lot(number:UOp, row:UOp, place:int, share:float) -> UOp:
  """bool, true in such a share of the steps, int32, for each row and each place in a draft: multiples of the golden ratio lie evenly. 0 < share"""
  x = number.cast(dtypes.uint32) * 0x9e3779b1 + row.cast(dtypes.uint32) * 0xc2b2ae3d + (place * 0x85ebca77 & 0xffffffff)
  return (x >> 8) < max(round(share * (1 << 24)), 1)

def some_drafts(count:int, start:Tensor, vocab:int) -> Tensor:
  """int32 (S, count): drafts by force, in place of find_drafts': tokens as different as a text's, whatever the text is, as rows of one token choose
  the same experts. start: int32 (S,), positions"""
  places = start.reshape(-1, 1) * count + Tensor.arange(count, dtype=dtypes.int32).to(start.device)
  return ((places.cast(dtypes.uint32) * 0x9e3779b1) % vocab).cast(dtypes.int32).contiguous()

def accept(chosen:Tensor, count:int, state:DraftState) -> tuple[Tensor, ...]:
  """chosen: int32 (S · (1 + count),), the tokens of a step with `count` drafts -> the state's token, start and ids with those that count; int32 (S,),
  how many drafts were right; int32 (S, 1 + N), what the step says. A row that is not there, whose first page is nobody's, stays where it is."""
  (S, N), C, P, forced = state.drafts.shape, state.ids.shape[1], state.tables.shape[1], state.forced
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    row, buffers, ended = _each(chosen.device, S, buffers)
    drawn = [buffers["chosen"][row * (1 + count) + i].load() for i in range(1 + count)]
    right, accepted, newest, said = UOp.const(1, dtypes.int), UOp.const(0, dtypes.int), drawn[0], [drawn[0]]
    for i in range(count):
      draft = buffers["drafts"][row * N + i].load()
      if forced is None: same = draft.eq(drawn[i])
      else: same = by_lot(buffers["number"][row].load(), row, i, forced) if forced else UOp.const(False)
      right = same.where(right, 0)
      accepted = accepted + right
      newest = right.eq(1).where(drawn[i + 1], newest)
      said.append(right.eq(1).where(drawn[i + 1], (draft >= 0).where(UOp.const(REFUSED, dtypes.int), NOT_DRAFTED)))
    said += [UOp.const(NOT_DRAFTED, dtypes.int)] * (N - count)
    position = buffers["start"][row].load()
    moved = position + (buffers["tables"][row * P].load() > 0).where(accepted + 1, 0)
    first = position.cast(dtypes.weakint).maximum(0)
    stores = [buffers["ids"][row * C + (first + 1 + i).minimum(C - 1)].store(value) for i, value in enumerate(drawn)]
    stores += [buffers["said"][row * (1 + N) + i].store(value) for i, value in enumerate(said)]
    return ended([*stores, buffers["token"][row].store(newest), buffers["accepted"][row].store(accepted), buffers["start"][row].store(moved)])
  numbers = (empty(chosen, *shape, dtype=dtypes.int32) for shape in ((S,), (S, 1 + N)))
  outs = {"token": state.token, "start": state.start, "ids": state.ids, **dict(zip(("accepted", "said"), numbers))}
  # what a kernel does not read, it is not given
  ins = {"chosen": chosen, "tables": state.tables, **({"drafts": state.drafts} if count else {})}
  if count and forced: ins["number"] = state.number
  return tuple(launch(f"accept_{S}_{count}_{N}{'' if forced is None else '_forced'}", outs, ins, body))

def note(state:DraftState, token:Tensor, start:Tensor, said:Tensor, found:Tensor) -> tuple[Tensor, ...]:
  """The end of a step. token, start, said: as accept gives them; found: int32 (S, N), the next step's drafts -> the state's drafts, fed and at for
  that step; its number; the log, where the column of this step has what it said, and whether there are drafts"""
  (S, N), columns = state.drafts.shape, state.log.shape[1]
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    row, buffers, ended = _each(said.device, S, buffers)
    new = [buffers["found"][row * N + i].load() for i in range(N)]
    position, mine = buffers["start"][row].load(), buffers["number"][row].load()
    stores = [buffers["drafts"][row * N + i].store(value) for i, value in enumerate(new)]
    for i, value in enumerate([buffers["token"][row].load(), *(value.maximum(0) for value in new)]):
      stores += [buffers["fed"][row * (1 + N) + i].store(value), buffers["at"][row * (1 + N) + i].store(position + i)]
    words = [*(buffers["said"][row * (1 + N) + i].load() for i in range(1 + N)), (new[0] >= 0).cast(dtypes.int)]
    place = (row * columns + (mine % columns).cast(dtypes.weakint)) * (N + 2)
    return ended([*stores, *(buffers["log"][place + i].store(word) for i, word in enumerate(words)), buffers["number"][row].store(mine + 1)])
  outs = {"drafts": state.drafts, "fed": state.fed, "at": state.at, "number": state.number, "log": state.log}
  return tuple(launch(f"note_drafts_{S}_{N}", outs, {"said": said, "token": token, "start": start, "found": found}, body))

def counts_of_rows(counts:Tensor, fed:Tensor) -> list[Tensor]:
  """counts: int32 (S, V), as sampling has them; fed: int32 (S, 1 + N) -> the counts at each of a sequence's rows"""
  rows = [counted(counts, fed[:, 0])]
  for i in range(1, fed.shape[1]): rows.append(counted(rows[-1], fed[:, i]))
  return rows

def counts_behind(rows:list[Tensor], accepted:Tensor) -> Tensor:
  """Those of the last row that counts. accepted: int32 (S,)"""
  counts = rows[0]
  for i, row in enumerate(rows[1:], 1): counts = (accepted.unsqueeze(1) >= i).where(row, counts)
  return counts

# ---- the host's choice ----

PAUSE, LONGEST_PAUSE = 64, 4096   # plain steps before drafts that did not pay are tried again; twice as many each time
TRIED = 16                        # steps of each kind by which they are judged
RECENT = 1 / 16                   # weight of the newest step in a mean

@dataclass
class Speculation:
  """Whether steps are drafted, and what came of it. drafts: that were verified; tokens: of them; accepted: of the tokens of each position of a draft,
  those that were right."""
  drafts: int = 0
  tokens: int = 0
  accepted: list[int] = field(default_factory=list)
  found: bool|None = None               # whether any row has drafts behind the step that was read last; None: none of the batch was
  # of the newest steps of so many sequences, plain or drafted: their median minds none that was recorded or waited for something else
  seconds: defaultdict[tuple[int, bool], deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=TRIED)))
  gained: dict[int, float] = field(default_factory=dict)   # tokens a sequence and drafted step, of so many sequences
  tried: int = 0                        # drafted steps since they were judged
  paused: int = 0                       # plain steps that are left of a pause
  pause: int = PAUSE                    # how long the next one is

  def wanted(self) -> bool:
    """Whether the next step is to be drafted"""
    return bool(self.found) and not self.paused
  @property
  def asks(self) -> bool:
    """Whether the next step is to wait until the newest one says if there are drafts: a batch's second step may then have some"""
    return self.found is None and not self.paused
  def begins(self) -> None:
    """A batch is set: nothing is known of it"""
    self.found = None

  def read(self, said:list[list[int]], found:bool, drafted:bool, seconds:float) -> None:
    """A step took so long. said: what it says, 1 + N of each row; found: whether there are drafts behind it, of any row"""
    rows, self.found = len(said), found
    self.seconds[rows, drafted].append(seconds)
    if not drafted:
      self.paused = max(self.paused - 1, 0)
      return
    of_drafts = [row for row in said if row[1] != NOT_DRAFTED]
    right = [sum(row[i] >= 0 for row in of_drafts) for i in range(1, len(said[0]))]
    self.drafts, self.tokens = self.drafts + len(of_drafts), self.tokens + len(of_drafts) * len(right)
    self.accepted = [a + b for a, b in zip(self.accepted or [0] * len(right), right, strict=True)]
    gain = 1 + sum(right) / rows
    self.gained[rows] = self.gained.get(rows, gain) * (1 - RECENT) + gain * RECENT
    self.tried += 1
    if self.tried >= TRIED: self._judge(rows)

  def _judge(self, rows:int) -> None:
    """Drafts that make no more tokens a second than plain steps do are given up for a while"""
    plain, drafted = (self.seconds[rows, drafted] for drafted in (False, True))
    self.tried = 0
    if len(plain) < TRIED: self.paused = TRIED - len(plain)
    elif self.gained[rows] * median(plain) > median(drafted): self.pause = PAUSE
    else: self.paused, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)

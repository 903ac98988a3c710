"""Runs a model's steps on its device: decode steps of a batch of sequences, and chunks of a prompt. Each kind is recorded once (capture.Replay).

A decode step may be launched before the ids of the one before it are read (batch.py)."""
from __future__ import annotations
import functools, sys, time
from collections import deque
from typing import Sequence
import numpy as np
from tinygrad import Device, Tensor, UOp
from tinygrad.apps.capture import Replay, Scratch, compile_parts, enqueue, read, to_device, write
from tinygrad.apps.engine.batch import ROWS, Batch, DraftBatch, Mode, batch_size
from tinygrad.apps.engine.pipeline import Pipeline, parts_of
from tinygrad.apps.engine.sampling import Features
from tinygrad.apps.engine.sequence import BatchRow, Kind, Logprob, Piece, kinds_of
from tinygrad.apps.mla import Transformer
from tinygrad.apps.mtp import MTP
from tinygrad.nn.cpu import is_cpu
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.step import STRIP, Step
from tinygrad.uop.ops import Ops

SLICE = 2                       # parts of a chunk that a slice of it runs, each a block of the model
MTP_PARTS = 2                   # … and those of the block that drafts
WRITES = 64                      # after which the device is waited for: what it is to copy is kept until then
UNSEEN = 3                      # such waits in a row after which the log is read when all is done
# A chunk takes as long as its tokens and so many more: what reads the weights, or brings experts to the card
BESIDE, BESIDE_GROUPS, BESIDE_CPU, BESIDE_BROUGHT = 256, 600, 8, 8192   # of groups: where warps multiply together, which shortens long chunks
PATIENCE = 1.0                  # seconds without an id after which the device is waited for

@functools.cache
def _say_once(line:str) -> None: print(line, file=sys.stderr)

class Runner:
  """See the head of the file. sizes: tokens of a prompt's chunks, the least first. batch: whose steps are launched. drafts: of a sequence in a
  step, at most; 0: none. mtp: the block that drafts; without it drafts are found in the text."""
  def __init__(self, model:Transformer, drafts:int=0, mtp:MTP|None=None):
    self.most_drafts, self.mtp = drafts, mtp
    self.model, self.max_context, self.vocab_size, self.sizes = model, model.max_context, model.config.vocab_size, model.prefill_sizes
    self.on_cpu = is_cpu(model.device)   # asking for a device's renderer takes tinygrad 17 µs
    target = target_of(model.device)
    of_a_gpu = BESIDE_GROUPS if target is not None and target.warp_groups else BESIDE
    self.beside = BESIDE_BROUGHT if model.brings else BESIDE_CPU if self.on_cpu else of_a_gpu
    self.stages = model.copies + 1   # devices that chunks go through, one behind another
    self.slices = -(-(len(model.blk) + model.copies + (0 if mtp is None else MTP_PARTS)) // SLICE)
    self.batches: dict[int, Batch] = {}
    self.pipelines: dict[int, Pipeline] = {}
    self.drafting: dict[int, DraftBatch] = {}
    self.forced: float|None = None
    self.ahead = int(len(model.stages) > 1)   # a Pipeline's
    self.batch = self.batch_of(1)
    self.launched: deque[tuple[Batch|Pipeline, np.ndarray]] = deque()   # the steps not read, and their columns of the log
    self.unseen = 0   # steps in a row whose ids were not seen before all was done
    self.ids, self.behind = ({size: to_device(np.zeros(size, np.int32), model.device) for size in self.sizes} for _ in range(2))   # of a chunk
    self.steps: dict[Kind, Step] = {}
    self.chunks: dict[Kind, list[UOp]] = {}  # the slices of each kind
    self.given: tuple[Kind, list[Piece]]|None = None   # what the newest chunk's buffers have
    self.shares = not model.batch_invariant and not model.plain_parts(self.chunk_step(2 * STRIP, True))
    self.scratch: Scratch = {}               # theirs: one chunk runs at a time
    self.writes = 0
    self.odds: tuple[np.ndarray, np.ndarray]|None = None     # of what was read last: int32 and float32 (rows, 1 + likeliest)
    self.found = np.zeros(0, np.bool_)                       # … of a batch with drafts: which rows have some for the next step
    if plain := model.plain_parts(self.batch.step):
      kernels = target is not None or self.on_cpu
      why = f"a dimension of this model is not one that the kernels take ({', '.join(plain)})" if kernels else "no kernels for this device"
      beside = ", and other answers may change one, for all --batch_invariant says" if model.batch_invariant else ""
      _say_once(f"{model.device}: {why}: decoding by plain ops, slowly{beside}")

  # ---- decoding ----
  def batch_of(self, count:int, features:Features=Features()) -> Batch|Pipeline:
    """The least batch of at least so many rows, for steps that do this. Of those with masks, which come from the host, and with probabilities nothing
    is drafted, nor of so many rows that their drafts would be too many"""
    size = batch_size(count)
    if 0 < self.most_drafts <= ROWS[-1] // size - 1 and not features.mask and not features.logprobs:
      if size not in self.drafting: self.drafting[size] = DraftBatch(self.model, size, self.most_drafts, self.mtp, self.forced)
      return self.drafting[size]
    if parts_of(self.model, size) > 1 and not features.mask:
      if size not in self.pipelines: self.pipelines[size] = Pipeline(self.model, size, self.mtp)
      return self.pipelines[size]
    if size not in self.batches: self.batches[size] = Batch(self.model, size, self.mtp)
    return self.batches[size]
  def force(self, share:float) -> None:
    """From the next batch on such a share of drafts counts as right, whatever they are: the tokens are none of the model's, and the time is that of
    drafts as good as that"""
    self.forced, self.drafting = share, {}

  def set_batch(self, rows:Sequence[BatchRow]) -> None:
    """What the next steps decode. Steps that were not read are forgotten."""
    self.launched.clear()
    self.wait()   # else a step forgotten could still log
    features = functools.reduce(Features.__or__, (row.features for row in rows))
    self.batch = self.batch_of(len(rows), features)
    self.batch.set(rows, features)

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
    self.launched.append((self.batch, self.batch.launch()))
  def draw(self, masks:dict[int, np.ndarray]) -> None:
    """Enqueues the rest of the newest step, when those before it were read"""
    self.batch.draw(masks)

  @property
  def in_flight(self) -> int:
    """How many steps may be launched and not read: one where the host sees no ids before all is done; so with drafts on a CPU, whose launches return
    then: what the next step does hangs on what the newest said"""
    return 1 if not self.batch.seen or self.drafts and self.on_cpu else 2

  def read(self) -> np.ndarray:
    """int32 (rows,): the tokens of the oldest step in flight, when it is done; of a batch with drafts int32 (rows, 1 + drafts), a row's tokens
    and then what is none, see speculate.py. Raises what the device does where it failed."""
    batch = self.launched[0][0]
    said = self._read()
    if isinstance(batch, DraftBatch): said, self.found = said[:, :-1], said[:, -1] == 1
    return said
  def _read(self) -> np.ndarray:
    batch, columns = self.launched.popleft()
    if batch.seen: self._until_said(batch, columns)
    tokens = batch.tokens(columns)
    if batch.features.logprobs:
      odds = batch.told(columns)
      self.odds = odds[:, :, 0], np.ascontiguousarray(odds[:, :, 1]).view(np.float32)
    if self.unseen == UNSEEN:
      self.unseen = 0
      batch.blind()
      _say_once(f"{self.model.device}: tokens are seen only when all is done: no step is launched ahead of them")
    return tokens
  def _until_said(self, batch:Batch|Pipeline, columns:np.ndarray) -> None:
    patience = time.monotonic() + PATIENCE
    while not batch.said(columns):
      if time.monotonic() < patience:
        time.sleep(0)   # other threads have their turn
        continue
      self.wait()
      if not batch.said(columns): raise RuntimeError(f"{self.model.device}: a step ended without a token")
      self.unseen += 1
      return
    self.unseen = 0

  def logprobs(self, row:int, count:int) -> Logprob:
    """Of a row of what was read last, in a batch where one asks for them: its token, and the `count` likeliest"""
    assert self.odds is not None
    tokens, values = (numbers[row, :1 + count].tolist() for numbers in self.odds)
    return Logprob(values[0], list(zip(tokens[1:], values[1:])))

  def wait(self, first:bool=False) -> None:
    """Until the devices, or the first one, have done all that they were given. Raises RuntimeError, which names those that failed"""
    failed = []
    for device in self.model.devices[:1 if first else None]:
      try: Device[device].synchronize()
      except Exception as e: failed.append((device, e))
    if failed: raise RuntimeError("; ".join(f"{device}: {e}" for device, e in failed)) from failed[0][1]

  # ---- prompts ----
  @property
  def kinds(self) -> list[Kind]:
    """Of all chunks"""
    return kinds_of(self.sizes, self.shares)
  def chunk_step(self, size:int, shared:bool=False) -> Step:
    if (kind := (size, shared)) not in self.steps:
      sequences = size // STRIP if shared else 1
      start, tables = (to_device(np.zeros((sequences, *shape), np.int32), self.model.device) for shape in ((), (self.model.pages,)))
      self.steps[kind] = Step.prefill(start, tables, size)
    return self.steps[kind]
  def record_chunk(self, size:int, shared:bool=False, compiled:bool=True) -> Replay:
    """Reads ids[size] and writes their rows; those of the block that drafts by behind[size], the tokens behind them"""
    replay, step = Replay(compiled, self.scratch), self.chunk_step(size, shared)
    if self.mtp is None: self.model.prefill(step, self.ids[size], replay.run)
    else: self.mtp.prefill(step, self.behind[size], self.model.hidden(step, self.ids[size], replay.run), replay.run)
    return replay
  def add_chunks(self, chunks:dict[Kind, Replay]) -> None:
    """The slices of these kinds. The largest comes first: what it takes serves all"""
    for kind in sorted(chunks, reverse=True): self.chunks[kind] = self.cut(chunks[kind])
  def cut(self, chunk:Replay) -> list[UOp]:
    """The slices of a chunk: the launches of a few blocks each, before the first of them what comes before all blocks. A copy from one stage to the
    next is a graph of its own: both devices wait for all that is in it"""
    end, where = len(chunk.recorded), [{*part.devices} for part in chunk.recorded]
    ends = range(end - SLICE * (self.slices - 1), end + 1, SLICE)
    borders = [i for i in range(1, end) if self.stages > 1 and where[i - 1] != where[i]]
    graphs:dict[int, list[UOp]] = {stop: [] for stop in ends}
    for stop, piece in zip(cuts := sorted({*ends, *borders}), chunk.cut(cuts)): graphs[next(own for own in ends if stop <= own)] += piece.src
    return [UOp(Ops.LINEAR, src=tuple(pieces)) for pieces in graphs.values()]
  @functools.cached_property
  def logits_step(self) -> tuple[Replay, Tensor]:
    """As the least chunk, and the float32 (size, vocab) that it writes"""
    replay, size = Replay(), self.sizes[0]
    return replay, self.model.logits(self.chunk_step(size), self.ids[size], replay.run)

  def prefill(self, pieces:Sequence[Piece], size:int, slices:range|None=None, shared:bool=False) -> None:
    """Enqueues these slices of a chunk, by default all: it writes the pieces' rows. It is padded; what pads it lies behind a sequence's end, in rows
    that are written again before they are read, or in page 0. Decode steps may run between its slices: they write other pages, and have other memory
    for what is in between. shared: see engine.Steps"""
    if (kind := (size, shared)) not in self.chunks:
      # copies of experts take much more than what else differs between sizes
      missing = {kind, *[(self.sizes[-1], False)] * self.model.brings} - {*self.chunks}
      self.add_chunks({each: self.record_chunk(*each) for each in missing})
    self._set_chunk(kind, pieces)
    try:
      for i in range(self.slices) if slices is None else slices: enqueue(self.chunks[kind][i])
    except MemoryError:
      self.chunks.clear()   # what they have is given back
      self.scratch.clear()
      raise
  def logits(self, ids:Sequence[int], start:int, table:Sequence[int]) -> np.ndarray:
    """As prefill, of at most sizes[0] tokens -> float32 (len(ids), vocab), the logits after each"""
    replay, logits = self.logits_step
    self._set_chunk((self.sizes[0], False), [Piece(0, list(ids), start, list(table))])
    replay()
    return read(logits)[:len(ids)]
  def _set_chunk(self, kind:Kind, pieces:Sequence[Piece]) -> None:
    """Before each of its slices: another chunk may have run since the last"""
    if self.given == (kind, pieces): return
    self.given = None
    size, step = kind[0], self.chunk_step(*kind)
    ids, behind, start, tables = (np.zeros(shape, np.int32) for shape in (size, size, step.start.shape, step.tables.shape))
    for piece in pieces:
      place = slice(piece.at, piece.at + len(piece.ids))
      ids[place], behind[place] = piece.ids, [*piece.ids[1:], piece.following]
      own = slice(place.start // step.each, -(-place.stop // step.each))
      start[own], tables[own, :len(piece.table)] = range(piece.start, piece.start + len(piece.ids), step.each), piece.table
    for buffer, values in ((self.ids[size], ids), (step.start, start), (step.tables, tables)): write(buffer, values)
    if self.mtp is not None: write(self.behind[size], behind)
    self.given = kind, [*pieces]

  # ---- at the start ----
  def warm(self, rows:int, kinds:Sequence[Features]) -> None:
    """Records chunks of all sizes, and steps by each kind of features of all sizes of a batch up to so many rows, compiles all kernels beside each
    other, and runs each once, for nobody: a graph is made when it first runs"""
    steps = [(self.batch_of(size, features), features) for size in ROWS if size <= self.batch_of(rows).size for features in kinds]
    replays = []
    for batch, features in steps:
      batch.set([], features)
      replays += batch.all_replays()
    chunks = {kind: self.record_chunk(*kind) for kind in self.kinds if kind not in self.chunks}
    compile_parts([part for replay in (*replays, *chunks.values()) for part in replay.recorded])
    self.add_chunks(chunks)
    for size, shared in self.kinds: self.prefill([Piece(0, [0], 0, [])], size, shared=shared)
    for batch, features in steps:
      self.batch, batch.features = batch, features   # one batch serves several kinds
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

"""Decode steps of a model whose blocks lie on several devices (apps/shard.py): parts of a batch are on their way through them, one behind another.

Each device has a stage of the model, a run of its blocks, and a batch is cut into as many parts as there are devices. While a device runs its stage
for one part, the next device runs its own for the part before it. On three devices, in the order of time, with the part that each works for:

  step            k  k  k   k+1 …
  first device    0  1  2   0
  second          2  0  1   2
  third           1  2  0   1

A step finds each part somewhere: part 0 behind the last stage, part 1 in front of it, and so on. In its turn a part comes home to the first device:
its tokens are drawn, and it sets out with them. So a step draws a token of every row, as a Batch's does, and no device waits for another. When it
ends, the parts are where it found them, with the next token. What brings them there goes before a batch's first step.

What a row is given is its token, its position and its table, as in any batch; the numbers are those of a batch as large as a part. But the rows of
the next token are begun: their page is asked for a step sooner (Runner.ahead)."""
from __future__ import annotations
from typing import Sequence
import numpy as np
from tinygrad import Tensor, UOp
from tinygrad.apps.capture import Replay, enqueue, to_device
from tinygrad.apps.engine.batch import Batch, batch_size
from tinygrad.apps.engine.sampling import Features
from tinygrad.apps.engine.sequence import BatchRow
from tinygrad.apps.mla import Transformer
from tinygrad.apps.mtp import MTP

def parts_of(model:Transformer, rows:int) -> int:
  """How many parts a step of so many rows has: 1, it goes through the devices whole"""
  return min(len(model.stages), rows)

def hold(held:Tensor, x:Tensor) -> Tensor:
  """x until the next step, in memory of its own"""
  return held.assign(x)

class Pipeline:
  """What a Batch of `size` rows does, in parts: row i is one of part i modulo their number. Steps with masks, which come when the tokens before them
  are known, and with drafts are none of its"""
  def __init__(self, model:Transformer, size:int, mtp:MTP|None=None):
    self.model, self.size = model, size
    count = parts_of(model, size)
    each = batch_size(-(-size // count))
    self.parts = [Batch(model, each, mtp) for _ in range(count)]
    # between steps: float32 (each, D), part 0's behind the last stage, part 1's behind the one before it
    ends = [model.cache_devices[stage[0]] for stage in reversed(model.stages)]
    self.held = [to_device(np.zeros((each, model.config.dim), np.float32), device) for device in ends[:count]]
    self.under_way = False                         # whether it is there
    self.replays:dict[Features|None, Replay] = {}  # steps, and None: what leads to the first
    self.graphs:dict[Features|None, UOp] = {}      # the same, each in one graph: a second would wait for all devices

  @property
  def features(self) -> Features: return self.parts[0].features
  @features.setter
  def features(self, features:Features) -> None:
    for part in self.parts: part.features = features
  @property
  def kind(self) -> Features: return self.features

  def set(self, rows:Sequence[BatchRow], features:Features) -> None:
    """As Batch's"""
    self.under_way = False
    for i, part in enumerate(self.parts): part.set(rows[i::len(self.parts)], features)
  def set_table(self, row:int, table:np.ndarray) -> None:
    self.parts[row % len(self.parts)].set_table(row // len(self.parts), table)

  # ---- what steps say, as Batch's ----
  def expect(self) -> np.ndarray: return self._rows([part.expect() for part in self.parts])
  @property
  def seen(self) -> bool: return self.parts[0].seen
  def blind(self) -> None:
    for part in self.parts: part.blind()
  def said(self, columns:np.ndarray) -> bool: return all(part.said(own) for part, own in self._by_part(columns))
  def tokens(self, columns:np.ndarray) -> np.ndarray: return self._rows([part.tokens(own) for part, own in self._by_part(columns)])
  def told(self, columns:np.ndarray) -> np.ndarray: return self._rows([part.told(own) for part, own in self._by_part(columns)])

  def _by_part(self, columns:np.ndarray) -> list[tuple[Batch, np.ndarray]]:
    return [(part, columns[i::len(self.parts)]) for i, part in enumerate(self.parts)]
  def _rows(self, parts:list[np.ndarray]) -> np.ndarray:
    """What parts have of their rows, in the order of the batch's"""
    rows = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    for i, own in enumerate(parts): rows[i::len(parts)] = own
    return rows

  # ---- steps ----
  def record(self, features:Features|None, compiled:bool=True) -> Replay:
    """A step by these features, which are the parts'. None: what leads to the first"""
    replay, stages = Replay(compiled), len(self.model.stages)
    xs:list[Tensor|None] = [None] * len(self.parts) if features is None else [*self.held]   # None: it has not set out
    for turn in range(stages):
      for i, part in enumerate(self.parts):
        if (number := (turn - i) % stages) == 0: xs[i] = self._home(part, xs[i], replay)
        if (x := xs[i]) is not None: xs[i] = self.model.stage(number, part.step, x, replay.run)
    for held, x in zip(self.held, xs): replay.run(hold, held, x)
    return replay
  def _home(self, part:Batch, x:Tensor|None, replay:Replay) -> Tensor:
    """Draws the tokens of a part that was under way -> float32 (each, D), what it sets out with"""
    if x is not None:
      hidden = self.model.at_home(x, replay.run)
      part.record_end(replay, part.step, hidden, self.model.head(part.step, hidden, replay.run))
    return self.model.embedded(part.token, replay.run)

  def _replay(self, features:Features|None) -> Replay:
    if features not in self.replays: self.replays[features] = self.record(features)
    return self.replays[features]
  def _graph(self, features:Features|None) -> UOp:
    if features not in self.graphs: self.graphs[features], = (replay := self._replay(features)).cut([len(replay.recorded)])
    return self.graphs[features]
  def all_replays(self) -> list[Replay]: return [self._replay(None), self._replay(self.features)]
  def launch(self) -> np.ndarray:
    """As Batch's"""
    columns = self.expect()
    try:
      if not self.under_way: enqueue(self._graph(None))
      enqueue(self._graph(self.features))
    except MemoryError:
      self.replays, self.graphs = {}, {}   # what they have is given back
      raise
    self.under_way = True
    return columns

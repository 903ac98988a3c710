"""Prefill, decode and what stays between turns: the owner of the JITs and of the cache's length."""
from __future__ import annotations
import functools, sys
from typing import Iterator
import numpy as np
from tinygrad import Device, Tensor, TinyJit, UOp, Variable, dtypes
from tinygrad.apps.mla import Transformer
from tinygrad.apps.quantized import capturing_jit
from tinygrad.apps.sampling import Features, Sampling, sample
from tinygrad.nn.embedding import advance
from tinygrad.nn import cpu
from tinygrad.nn.intrinsics import target
from tinygrad.uop.ops import Ops

CHUNK, MANY = 32, 512  # prompt tokens a prefill step; where there are kernels for many, and more than a few tokens

@functools.cache
def _say_once(line:str) -> None: print(line, file=sys.stderr)

class ContextFull(Exception):
  """The prompt does not fit. str(e) is one line."""

class Generator:
  """Runs one sequence. The token to feed next lives on the device: a decode step reads it, and writes the one it chose."""
  def __init__(self, model:Transformer):
    self.model, self.max_context = model, model.max_context
    self.position = Variable("pos", 0, self.max_context - 1)
    self.chunk = min(CHUNK, self.max_context)
    for_many = cpu.device() is not None or (t := target()) is not None and t.mma is not None
    self.many = MANY if self.max_context >= MANY and for_many else self.chunk
    self.few = self.many // (2 if cpu.device() else 4)  # tokens that smaller steps take sooner: on a CPU, padding costs what tokens do
    self.cached: list[int] = []                       # the tokens whose rows the cache holds
    self.next_position = 0                            # what device_position holds
    vocab = model.config.vocab_size
    # where kernels read the position from the device, a step moves it on itself, and nothing in its graph changes from token to token
    self.device_position = Tensor.zeros(1, dtype=dtypes.int32).contiguous().realize() if model.kernels_fit else None
    if self.device_position is None:
      why = "no kernels for this device" if target() is None and cpu.device() is None else "a dimension of this model is not one that the kernels take"
      _say_once(f"{Device.DEFAULT}: {why}: decoding by plain ops, slowly")
    self.token = Tensor.zeros(1, dtype=dtypes.int32).contiguous().realize()
    self.values = Tensor.zeros(5, dtype=dtypes.float).contiguous().realize()
    self.key = Tensor.zeros(2, dtype=dtypes.uint32).contiguous().realize()
    self.seen = Tensor.zeros(vocab, dtype=dtypes.uint8).contiguous().realize()
    self.decode_jits: dict[Features, TinyJit] = {}
    self.prefill_jits, self.logits_jit = {size: capturing_jit(self._prefill) for size in {self.chunk, self.many}}, capturing_jit(self._logits)

  # ---- graphs ----
  def _decode(self, features:Features, pos:UOp|Tensor) -> Tensor:
    counter = self.key
    if features.draw:  # a token's draw is numbered by its position
      number = (pos if isinstance(pos, Tensor) else Tensor(pos)).cast(dtypes.uint32).reshape(1)
      counter = number.cat(Tensor.zeros(1, dtype=dtypes.uint32))
    logits, seen = self.model.logits(self.token, pos).reshape(-1), None
    if features.penalty:
      seen = self.seen.assign(Tensor.arange(self.seen.shape[0]).eq(self.token).cast(dtypes.uint8).maximum(self.seen))
    token = self.token.assign(sample(logits, features, self.values, self.key, counter, seen))
    return token.realize(*([advance(pos, token)] if isinstance(pos, Tensor) else []))
  def _prefill(self, ids:Tensor, pos:UOp|int) -> Tensor: return self.model.hidden(ids, pos)[1].realize()
  def _logits(self, ids:Tensor, pos:UOp|int) -> Tensor: return self.model.logits(ids, pos).realize()

  def decode(self, features:Features, pos:int) -> Tensor:
    """Feeds the token on the device at position `pos` and returns the device's token buffer, int32 (1,), now holding the next one"""
    if self.device_position is None:
      if features not in self.decode_jits: self.decode_jits[features] = capturing_jit(lambda pos: self._decode(features, pos))
      return self.decode_jits[features](self.position.bind(pos))
    if features not in self.decode_jits: self.decode_jits[features] = capturing_jit(lambda: self._decode(features, self.device_position))
    if pos != self.next_position: self._set(self.device_position, [pos])
    self.next_position = pos + 1
    return self.decode_jits[features]()

  def _chunks(self, ids:list[int], start:int, many:int) -> Iterator[tuple[int, Tensor]]:
    """Steps of `chunk` or `many` tokens that cover ids[start:]. The last one is moved back so that it ends with the sequence (rows it writes again
    get the same values); only a sequence shorter than a step is padded."""
    at = start
    while at < len(ids):
      size = many if len(ids) - at > self.few else self.chunk
      at = max(min(at, len(ids) - size), 0)
      part = ids[at:at + size]
      yield at, Tensor(part + [0] * (size - len(part)), dtype=dtypes.int32).realize()
      at += size
  def prefill_step(self, ids:Tensor, pos:UOp|int) -> None: self.prefill_jits[ids.shape[0]](ids, pos)
  def _bind(self, at:int, size:int) -> UOp|int:
    last = self.max_context - size
    return Variable(f"chunk_{size}", 0, last).bind(at) if last else 0

  # ---- use ----
  def prefill(self, ids:list[int], sampling:Sampling=Sampling()) -> None:
    """Makes the cache hold ids[:-1], reusing the longest prefix it holds already, and the token buffer ids[-1]: decode may start at len(ids)-1.
    Raises ContextFull for a prompt that leaves no room for an answer, ValueError for an empty one or a token out of range."""
    self._check(ids)
    if len(ids) >= self.max_context:
      raise ContextFull(f"the prompt has {len(ids)} tokens, max_context is {self.max_context}: nothing is left for an answer")
    todo = len(ids) - 1
    start = next((i for i, (a, b) in enumerate(zip(self.cached, ids[:todo])) if a != b), min(len(self.cached), todo))
    self.cached = self.cached[:start]
    if todo - start > self.chunk // 4:
      for at, chunk in self._chunks(ids[:todo], start, self.many): self.prefill_step(chunk, self._bind(at, chunk.shape[0]))
    else:
      for at in range(start, todo): self._set(self.token, [ids[at]]); self.decode(Features(), at)  # a few tokens cost less than a chunk
    self.cached = ids[:todo]
    self._set(self.token, ids[-1:])
    self._set(self.values, sampling.values())
    self._set(self.key, [sampling.seed, 0])
    if sampling.features.penalty: self._set(self.seen, np.isin(np.arange(self.seen.shape[0]), ids))

  def generate(self, ids:list[int], count:int|None=None, sampling:Sampling=Sampling(), stop:frozenset[int]=frozenset()) -> Iterator[int]:
    """Continues ids: yields each new token, a stop token last. Ends after `count` tokens or when the context is full."""
    self.prefill(ids, sampling)
    room, fed = self.max_context - len(ids), ids[-1]
    for _ in range(room if count is None else min(count, room)):
      token = int(self.decode(sampling.features, len(self.cached)).item())
      self.cached.append(fed)
      fed = token
      yield token
      if token in stop: return

  def logits(self, ids:list[int]) -> np.ndarray:
    """float32 (T, vocab): the logits after each token. The cache then holds ids."""
    self._check(ids)
    if len(ids) > self.max_context: raise ContextFull(f"{len(ids)} tokens do not fit in max_context {self.max_context}")
    out, self.cached = np.empty((len(ids), self.model.config.vocab_size), np.float32), []
    for at, chunk in self._chunks(ids, 0, self.chunk):
      rows = min(self.chunk, len(ids) - at)
      out[at:at + rows] = self.logits_jit(chunk, self._bind(at, self.chunk)).numpy()[:rows]
    self.cached = list(ids)
    return out

  def forget(self) -> None:
    """The next prompt starts with an empty cache."""
    self.cached = []
  @property
  def full(self) -> bool:
    """Whether the last answer ended because the context did"""
    return len(self.cached) >= self.max_context - 1
  @property
  def kernels_a_token(self) -> int:
    """Kernels in the newest decode graph; 0 before the first token"""
    calls = self.decode_jits[next(reversed(self.decode_jits))].captured.linear.src if self.decode_jits else ()
    return sum(len(c.src[0].src[0].src) if c.src[0].op is Ops.CUSTOM_FUNCTION else 1 for c in calls)

  # ---- helpers ----
  def _check(self, ids:list[int]) -> None:
    vocab = self.model.config.vocab_size
    if not ids: raise ValueError("no tokens: give at least one")
    if (wrong := next((i for i in ids if not 0 <= i < vocab), None)) is not None: raise ValueError(f"token {wrong}: expected 0 to {vocab - 1}")
  @staticmethod
  def _set(buffer:Tensor, values) -> None: buffer.assign(Tensor(np.asarray(values), dtype=buffer.dtype)).realize()

"""Prefill, decode and what stays between turns: the owner of the JITs and of the cache's length."""
from __future__ import annotations
import functools, operator, os, sys, threading
from typing import Iterable, Iterator
import numpy as np
from tinygrad import Device, Tensor, TinyJit, UOp, Variable, dtypes
from tinygrad.apps.mla import CHUNK, Transformer
from tinygrad.apps.quantized import capturing_jit
from tinygrad.apps.sampling import Features, Sampling, sample
from tinygrad.nn.embedding import advance
from tinygrad.nn import cpu
from tinygrad.nn.intrinsics import target
from tinygrad.uop.ops import Ops

_one_at_a_time = threading.RLock()  # not a generator's own: what a JIT captures, and the CPU's threads, are the process's
def _forked() -> None:
  """What another thread holds is never given back in the child, which has only the one that forked"""
  global _one_at_a_time
  _one_at_a_time = threading.RLock()
os.register_at_fork(after_in_child=_forked)

def _whole(name:str, value:object) -> int:
  """A whole number of any kind, numpy's too. Raises ValueError for what would have to be rounded or read as one."""
  try:
    if not isinstance(value, bool): return operator.index(value)
  except TypeError: pass
  raise ValueError(f"{name}: expected a whole number, found {' '.join(repr(value)[:60].split())}")

@functools.cache
def _say_once(line:str) -> None: print(line, file=sys.stderr)

class ContextFull(Exception):
  """The prompt does not fit. str(e) is one line."""

class Superseded(RuntimeError):
  """A later call took the generator over, whose one sequence an older iterator went on with. str(e) is one line."""

class Generator:
  """Runs one sequence. The token to feed next lives on the device: a decode step reads it, and writes the one it chose.
  A call takes over from the one before it, whose iterator then raises Superseded; threads take turns."""
  def __init__(self, model:Transformer):
    self.model, self.max_context = model, model.max_context
    self.position = Variable("pos", 0, self.max_context - 1)
    self.chunk, self.many = CHUNK, model.max_step
    self.cached: list[int] = []                       # the tokens whose rows the cache holds
    self.calls = 0                                    # that changed it: an iterator goes on while none has come after its own
    self.next_position: int|None = 0                  # what device_position holds; None while a step is under way, or where one failed
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
    known, self.next_position = self.next_position, None
    if pos != known: self._set(self.device_position, [pos])
    token = self.decode_jits[features]()
    self.next_position = pos + 1
    return token

  def _chunks(self, ids:list[int], start:int, many:int) -> Iterator[tuple[int, Tensor]]:
    """Steps of `chunk` or `many` tokens that cover ids[start:] and write no row before. The last one is padded: rows past the sequence's end are
    written again before they are read, and the cache has room for them past the context's end."""
    at = start
    while at < len(ids):
      size = many if len(ids) - at > many // 4 else self.chunk
      part = ids[at:at + size]
      yield at, Tensor(part + [0] * (size - len(part)), dtype=dtypes.int32).realize()
      at += size
  def prefill_step(self, ids:Tensor, pos:UOp|int) -> None: self.prefill_jits[ids.shape[0]](ids, pos)
  def _bind(self, at:int, size:int) -> UOp: return Variable(f"chunk_{size}", 0, self.max_context - 1).bind(at)

  # ---- use ----
  def prefill(self, ids:Iterable[int], sampling:Sampling=Sampling()) -> None:
    """Makes the cache hold ids[:-1], reusing the longest prefix it holds already, and the token buffer ids[-1]: decode may start at len(ids)-1.
    Raises ContextFull for a prompt that leaves no room for an answer, ValueError for an empty one or what is no token."""
    ids = self._tokens(ids)
    if len(ids) >= self.max_context:
      raise ContextFull(f"the prompt has {len(ids)} tokens, max_context is {self.max_context}: nothing is left for an answer")
    todo = len(ids) - 1
    with _one_at_a_time:
      self.calls += 1
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

  def generate(self, ids:Iterable[int], count:int|None=None, sampling:Sampling=Sampling(), stop:frozenset[int]=frozenset()) -> Iterator[int]:
    """Continues ids: yields each new token, a stop token last. Ends after `count` tokens or when the context is full.
    Raises Superseded where a later call of this generator has come between, ValueError and ContextFull as prefill does."""
    ids = self._tokens(ids)
    if count is not None and _whole("count", count) < 0: raise ValueError(f"count: expected 0 or more, found {count}")
    with _one_at_a_time:
      self.prefill(ids, sampling)
      call = self.calls
    room, fed = self.max_context - len(ids), ids[-1]
    for _ in range(room if count is None else min(count, room)):
      with _one_at_a_time:
        if call != self.calls: raise Superseded("this answer cannot go on: a later call has used its generator, which holds one sequence")
        token = int(self.decode(sampling.features, len(self.cached)).item())
        self.cached.append(fed)
      fed = token
      yield token
      if token in stop: return

  def logits(self, ids:Iterable[int]) -> np.ndarray:
    """float32 (T, vocab): the logits after each token. The cache then holds ids."""
    ids = self._tokens(ids)
    if len(ids) > self.max_context: raise ContextFull(f"{len(ids)} tokens do not fit in max_context {self.max_context}")
    out = np.empty((len(ids), self.model.config.vocab_size), np.float32)
    with _one_at_a_time:
      self.forget()
      for at, chunk in self._chunks(ids, 0, self.chunk):
        rows = min(self.chunk, len(ids) - at)
        out[at:at + rows] = self.logits_jit(chunk, self._bind(at, self.chunk)).numpy()[:rows]
      self.cached = ids
    return out

  def forget(self) -> None:
    """The next prompt starts with an empty cache."""
    with _one_at_a_time: self.calls, self.cached = self.calls + 1, []
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
  def _tokens(self, ids:Iterable[int]) -> list[int]:
    vocab = self.model.config.vocab_size
    if not isinstance(ids, Iterable): raise ValueError(f"tokens: expected a list of numbers, found {ids!r}")
    tokens = [_whole("token", i) for i in ids]
    if not tokens: raise ValueError("no tokens: give at least one")
    if (wrong := next((i for i in tokens if not 0 <= i < vocab), None)) is not None: raise ValueError(f"token {wrong}: expected 0 to {vocab - 1}")
    return tokens
  @staticmethod
  def _set(buffer:Tensor, values) -> None: buffer.assign(Tensor(np.asarray(values), dtype=buffer.dtype)).realize()

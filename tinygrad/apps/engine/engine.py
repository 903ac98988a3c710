"""Prefill, decode and what stays between turns: the owner of the steps and of the cache's length."""
from __future__ import annotations
import functools, operator, os, sys, threading
from typing import Iterable, Iterator
import numpy as np
from tinygrad import Device, Tensor, UOp, Variable, dtypes
from tinygrad.apps.capture import Step, read, to_device, write
from tinygrad.apps.engine.sampling import Features, Sampling, sample
from tinygrad.apps.mla import CHUNK, Transformer
from tinygrad.nn.embedding import advance
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn import cpu

_one_at_a_time = threading.RLock()  # not a generator's own: what is recorded, and the CPU's threads, are the process's
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

def choose(logits:Tensor, features:Features, values:Tensor, key:Tensor, seen:Tensor, token:Tensor, pos:UOp|Tensor) -> tuple[Tensor, ...]:
  """The end of a decode step: logits, float32 (1, vocab), become the next token, and a position on the device moves on"""
  counter, noted = key, None
  if features.draw:  # a token's draw is numbered by its position
    number = (pos if isinstance(pos, Tensor) else Tensor(pos)).cast(dtypes.uint32).reshape(1)
    counter = number.cat(Tensor.zeros(1, dtype=dtypes.uint32))
  if features.penalty: noted = seen.assign(Tensor.arange(seen.shape[0]).eq(token).cast(dtypes.uint8).maximum(seen))
  chosen = token.assign(sample(logits.reshape(-1), features, values, key, counter, noted))
  return chosen, *([advance(pos, chosen)] if isinstance(pos, Tensor) else [])

class Generator:
  """Runs one sequence. The token to feed next lives on the device: a decode step reads it, and writes the one it chose.
  A call takes over from the one before it, whose iterator then raises Superseded; threads take turns."""
  def __init__(self, model:Transformer):
    self.model, self.max_context = model, model.max_context
    self.position = Variable("pos", 0, self.max_context - 1)
    self.chunk, self.many = CHUNK, model.max_step
    self.few = self.many // (2 if cpu.device() else 4)  # tokens that smaller steps take sooner: on a CPU, padding costs what tokens do
    self.cached: list[int] = []                       # the tokens whose rows the cache holds
    self.calls = 0                                    # that changed it: an iterator goes on while none has come after its own
    self.next_position: int|None = 0                  # what device_position holds; None while a step is under way, or where one failed
    vocab = model.config.vocab_size
    # where kernels read the position from the device, a step moves it on itself, and nothing in its graph changes from token to token
    self.device_position = to_device(np.zeros(1, np.int32)) if model.kernels_fit else None
    if self.device_position is None:
      kernels = target_of() is not None or cpu.device() is not None
      why = "a dimension of this model is not one that the kernels take" if kernels else "no kernels for this device"
      _say_once(f"{Device.DEFAULT}: {why}: decoding by plain ops, slowly")
    self.start = to_device(np.zeros(1, np.int32)) if model.prefill_kernels_fit else None
    self.token = to_device(np.zeros(1, np.int32))
    self.values = to_device(np.zeros(5, np.float32))
    self.key = to_device(np.zeros(2, np.uint32))
    self.seen = to_device(np.zeros(vocab, np.uint8))
    self.decode_steps: dict[Features, Step] = {}
    self.ids = {size: to_device(np.zeros(size, np.int32)) for size in {self.chunk, self.many}}  # what a step of a prompt reads
    self.prefill_steps: dict[int, Step] = {}

  # ---- steps ----
  def build_decode(self, features:Features, compiled:bool=True) -> Step:
    """Reads the token and, where kernels read it there, its position on the device, and writes the next of both"""
    step, pos = Step(compiled), self.position.bind(0) if self.device_position is None else self.device_position
    logits = self.model.logits(self.token, pos, step.run)
    step.run(choose, logits, features, self.values, self.key, self.seen, self.token, pos)
    return step
  def build_prefill(self, size:int, compiled:bool=True) -> Step:
    """Reads the first `size` of ids[size] and writes their rows"""
    step = Step(compiled)
    self.model.prefill(self.ids[size], self._start(size), step.run)
    return step
  @functools.cached_property
  def logits_step(self) -> tuple[Step, Tensor]:
    """As a step of prefill of `chunk` tokens, and the float32 (chunk, vocab) that it writes"""
    step = Step()
    return step, self.model.logits(self.ids[self.chunk], self._start(self.chunk), step.run)
  def _start(self, size:int) -> UOp|Tensor:
    """Where a step of `size` tokens finds the position of the first"""
    return Variable(f"chunk_{size}", 0, self.max_context - 1).bind(0) if self.start is None else self.start
  def _run_at(self, step:Step, size:int, at:int) -> None:
    if self.start is None: return step(**{f"chunk_{size}": at})
    write(self.start, np.array([at], np.int32))
    step()

  def decode(self, features:Features, pos:int) -> Tensor:
    """Feeds the token on the device at position `pos` and returns the device's token buffer, int32 (1,), now holding the next one"""
    if features not in self.decode_steps: self.decode_steps[features] = self.build_decode(features)
    if self.device_position is None: self.decode_steps[features](**{self.position.expr: pos})
    else:
      known, self.next_position = self.next_position, None
      if pos != known: write(self.device_position, np.array([pos], np.int32))
      self.decode_steps[features]()
      self.next_position = pos + 1
    return self.token

  def prefill_step(self, size:int, at:int) -> None:
    """Writes the rows of the tokens in ids[size], the first of them at position `at`"""
    if size not in self.prefill_steps: self.prefill_steps[size] = self.build_prefill(size)
    self._run_at(self.prefill_steps[size], size, at)

  def _chunks(self, ids:list[int], start:int, many:int) -> Iterator[tuple[int, int]]:
    """Steps of `chunk` or `many` tokens that cover ids[start:] and write no row before. The last one is padded: rows past the sequence's end are
    written again before they are read, and the cache has room for them past the context's end."""
    at = start
    while at < len(ids):
      size = many if len(ids) - at > self.few else self.chunk
      part = ids[at:at + size]
      write(self.ids[size], np.array(part + [0] * (size - len(part)), np.int32))
      yield at, size
      at += size

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
        for at, size in self._chunks(ids[:todo], start, self.many): self.prefill_step(size, at)
      else:
        for at in range(start, todo):  # a few tokens cost less than a chunk, and the step is the answer's
          write(self.token, np.array([ids[at]], np.int32))
          self.decode(sampling.features, at)
      self.cached = ids[:todo]
      write(self.token, np.array(ids[-1:], np.int32))
      write(self.values, np.array(sampling.values(), np.float32))
      write(self.key, np.array([sampling.seed, 0], np.uint32))
      if sampling.features.penalty: write(self.seen, np.isin(np.arange(self.seen.shape[0]), ids).astype(np.uint8))

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
        token = int(read(self.decode(sampling.features, len(self.cached)))[0])
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
      step, logits = self.logits_step
      for at, size in self._chunks(ids, 0, self.chunk):
        self._run_at(step, size, at)
        out[at:at + size] = read(logits)[:len(ids) - at]
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
    """Launches of the newest decode step; 0 before the first token"""
    return len(self.decode_steps[next(reversed(self.decode_steps))].calls) if self.decode_steps else 0

  # ---- helpers ----
  def _tokens(self, ids:Iterable[int]) -> list[int]:
    vocab = self.model.config.vocab_size
    shape = getattr(ids, "shape", None)
    if not isinstance(ids, Iterable) or isinstance(ids, (str, bytes)) or (shape is not None and len(shape) != 1):
      raise ValueError(f"tokens: expected a list of numbers, found {type(ids).__name__}{'' if shape is None else f' of shape {shape}'}")
    tokens = [_whole("token", i) for i in ids]
    if not tokens: raise ValueError("no tokens: give at least one")
    if (wrong := next((i for i in tokens if not 0 <= i < vocab), None)) is not None:
      raise ValueError(f"token {str(wrong)[:40]}: expected 0 to {vocab - 1}")
    return tokens

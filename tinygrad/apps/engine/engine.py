"""Tokens in, tokens out. Knows no text, no block format and no target."""
from __future__ import annotations
import operator, os, threading
from typing import Iterable, Iterator
import numpy as np
from tinygrad.apps.capture import read, write
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.mla import Transformer

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

class ContextFull(Exception):
  """The prompt does not fit. str(e) is one line."""

class Superseded(RuntimeError):
  """A later call took the generator over, whose one sequence an older iterator went on with. str(e) is one line."""

class Generator(Runner):
  """An engine of one sequence: prefill, decode and what stays between turns. A call takes over from the one before it, whose iterator then raises
  Superseded; threads take turns."""
  def __init__(self, model:Transformer):
    super().__init__(model)
    self.cached: list[int] = []   # the tokens whose rows the cache holds
    self.calls = 0                # that changed it: an iterator goes on while none has come after its own

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
      kept = next((i for i, (a, b) in enumerate(zip(self.cached, ids[:todo])) if a != b), min(len(self.cached), todo))
      self.cached = self.cached[:kept]
      if todo - kept > self.chunk // 4:
        for at, size in self._chunks(ids[:todo], kept, self.many): self.prefill_step(size, at)
      else:
        for at in range(kept, todo):  # a few tokens cost less than a chunk, and the step is the answer's
          self.feed(ids[at])
          self.decode(sampling.features, at)
      self.cached = ids[:todo]
      self.feed(ids[-1])
      self.set_sampling(sampling, ids)

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
      replay, logits = self.logits_step
      for at, size in self._chunks(ids, 0, self.chunk):
        self.run_chunk(replay, size, at)
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

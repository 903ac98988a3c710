"""Records a model's decode and prefill steps once (capture.Replay), and owns the device's buffers that they read: the token, where it stands, a
prompt's ids, the sampling's values."""
from __future__ import annotations
import functools, sys
import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.apps.capture import Replay, to_device, write
from tinygrad.apps.engine.sampling import Features, Sampling, sample
from tinygrad.apps.mla import PREFILL_STEPS, Transformer
from tinygrad.nn.cpu import is_cpu
from tinygrad.nn.embedding import advance
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.step import Step

@functools.cache
def _say_once(line:str) -> None: print(line, file=sys.stderr)

def next_token(step:Step, logits:Tensor, features:Features, values:Tensor, key:Tensor, seen:Tensor, token:Tensor) -> tuple[Tensor, ...]:
  """The end of a decode step: logits, float32 (1, vocab), become the next token, and the position moves on"""
  counter, noted = key, None
  if features.draw:  # a token's draw is numbered by its position
    counter = step.start.cast(dtypes.uint32).cat(Tensor.zeros(1, dtype=dtypes.uint32, device=logits.device))
  if features.penalty: noted = seen.assign(Tensor.arange(seen.shape[0]).to(seen.device).eq(token).cast(dtypes.uint8).maximum(seen))
  chosen = token.assign(sample(logits.reshape(-1), features, values, key, counter, noted))
  return chosen, advance(step.start, chosen)

class Runner:
  """What a step reads and writes lives on the model's device: the token to feed next, which a decode step replaces by the one it chose, its position,
  the ids of a chunk of a prompt, the sampling's values."""
  def __init__(self, model:Transformer):
    self.model, self.max_context, device = model, model.max_context, model.device
    self.chunk, self.many = PREFILL_STEPS[0], model.max_step   # tokens of a prompt's steps
    self.few = self.many // (2 if is_cpu(device) else 4)  # tokens that smaller steps take sooner: on a CPU, padding costs what tokens do
    self.next_position: int|None = 0                      # what decode_start holds; None while a step is under way, or where one failed
    self.token = to_device(np.zeros(1, np.int32), device)
    self.values = to_device(np.zeros(5, np.float32), device)
    self.key = to_device(np.zeros(2, np.uint32), device)
    self.seen = to_device(np.zeros(model.config.vocab_size, np.uint8), device)
    self.ids = {size: to_device(np.zeros(size, np.int32), device) for size in {self.chunk, self.many}}  # what a step of a prompt reads
    # a step moves the position on itself: nothing in its graph changes from token to token
    self.decode_start, self.prefill_start = (to_device(np.zeros(1, np.int32), device) for _ in range(2))
    self.table = to_device(np.arange(model.pages, dtype=np.int32)[None], device)
    if plain := model.plain_parts(self.decode_step):
      kernels = target_of(device) is not None or is_cpu(device)
      why = f"a dimension of this model is not one that the kernels take ({', '.join(plain)})" if kernels else "no kernels for this device"
      _say_once(f"{device}: {why}: decoding by plain ops, slowly")
    self.decode_steps: dict[Features, Replay] = {}
    self.prefill_steps: dict[int, Replay] = {}

  # ---- recording ----
  def build_decode(self, features:Features, compiled:bool=True) -> Replay:
    """Reads the token and its position on the device, and writes the next of both"""
    replay, step = Replay(compiled), self.decode_step
    logits = self.model.logits(step, self.token, replay.run)
    replay.run(next_token, step, logits, features, self.values, self.key, self.seen, self.token)
    return replay
  def build_prefill(self, size:int, compiled:bool=True) -> Replay:
    """Reads the first `size` of ids[size] and writes their rows"""
    replay = Replay(compiled)
    self.model.prefill(self.chunk_step(size), self.ids[size], replay.run)
    return replay
  @functools.cached_property
  def logits_step(self) -> tuple[Replay, Tensor]:
    """As a step of prefill of `chunk` tokens, and the float32 (chunk, vocab) that it writes"""
    replay = Replay()
    return replay, self.model.logits(self.chunk_step(self.chunk), self.ids[self.chunk], replay.run)
  @property
  def decode_step(self) -> Step: return Step.decode(self.decode_start, self.table)
  def chunk_step(self, size:int) -> Step: return Step.prefill(self.prefill_start, self.table, size)

  # ---- running ----
  def run_chunk(self, replay:Replay, size:int, at:int) -> None:
    """A recorded step of `size` tokens, the first of them at position `at`"""
    write(self.prefill_start, np.array([at], np.int32))
    replay()

  def decode(self, features:Features, pos:int) -> Tensor:
    """Feeds the token on the device at position `pos` and returns the device's token buffer, int32 (1,), now holding the next one"""
    if features not in self.decode_steps: self.decode_steps[features] = self.build_decode(features)
    known, self.next_position = self.next_position, None
    if pos != known: write(self.decode_start, np.array([pos], np.int32))
    self.decode_steps[features]()
    self.next_position = pos + 1
    return self.token

  def prefill_step(self, size:int, at:int) -> None:
    """Writes the rows of the tokens in ids[size], the first of them at position `at`"""
    if size not in self.prefill_steps: self.prefill_steps[size] = self.build_prefill(size)
    self.run_chunk(self.prefill_steps[size], size, at)

  def feed(self, token:int) -> None:
    """The token that the next decode step reads"""
    write(self.token, np.array([token], np.int32))
  def set_sampling(self, sampling:Sampling, ids:list[int]) -> None:
    """What decode steps draw by; ids: the context, whose tokens a repeat penalty knows"""
    write(self.values, np.array(sampling.values(), np.float32))
    write(self.key, np.array([sampling.seed, 0], np.uint32))
    if sampling.features.penalty: write(self.seen, np.isin(np.arange(self.seen.shape[0]), ids).astype(np.uint8))

  @property
  def kernels_a_token(self) -> int:
    """Launches of the newest decode step; 0 before the first token"""
    return len(self.decode_steps[next(reversed(self.decode_steps))].calls) if self.decode_steps else 0

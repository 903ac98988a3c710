"""Records a model's decode and prefill steps once (capture.Replay), and owns the device's buffers that they read: the token, where it stands, a
prompt's ids, the sampling's values."""
from __future__ import annotations
import functools, sys
import numpy as np
from tinygrad import Tensor, Variable, dtypes
from tinygrad.apps.capture import Replay, to_device, write
from tinygrad.apps.engine.sampling import VALUES, Features, Sampling, counted, sample, token_counts
from tinygrad.apps.mla import PREFILL_STEPS, Transformer
from tinygrad.nn.cpu import is_cpu
from tinygrad.nn.embedding import advance
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.step import Step

@functools.cache
def _say_once(line:str) -> None: print(line, file=sys.stderr)

def next_token(step:Step, logits:Tensor, features:Features, values:Tensor, key:Tensor, counts:Tensor, bias:Tensor, token:Tensor) -> tuple[Tensor, ...]:
  """The end of a decode step: logits, float32 (S, vocab), become the next tokens, and positions on the device move on"""
  known = counts.assign(counted(counts, token)) if features.penalty else None
  start = step.device_start(logits.device)
  chosen = token.assign(sample(logits, features, values, key, start, known, bias))   # a token's draw is numbered by its position
  return chosen, *([advance(step.start, chosen)] if step.on_device else [])

class Runner:
  """What a step reads and writes lives on the model's device: the token to feed next, which a decode step replaces by the one it chose, its position,
  the ids of a chunk of a prompt, the sampling's values."""
  def __init__(self, model:Transformer):
    self.model, self.max_context, device = model, model.max_context, model.device
    self.position = Variable("pos", 0, self.max_context - 1)
    self.chunk, self.many = PREFILL_STEPS[0], model.max_step   # tokens of a prompt's steps
    self.few = self.many // (2 if is_cpu(device) else 4)  # tokens that smaller steps take sooner: on a CPU, padding costs what tokens do
    self.next_position: int|None = 0                      # what decode_start holds; None while a step is under way, or where one failed
    self.token = to_device(np.zeros(1, np.int32), device)
    vocab = model.config.vocab_size
    self.values = to_device(np.zeros((1, VALUES), np.float32), device)
    self.key = to_device(np.zeros((1, 2), np.uint32), device)
    self.counts = to_device(np.zeros((1, vocab), np.int32), device)
    self.bias = to_device(np.zeros((1, vocab), np.float32), device)
    self.ids = {size: to_device(np.zeros(size, np.int32), device) for size in {self.chunk, self.many}}  # what a step of a prompt reads
    # where kernels read the position from the device, a step moves it on itself, and nothing in its graph changes from token to token
    on_device = to_device(np.zeros(1, np.int32), device)
    self.decode_start = on_device if not (plain := model.plain_parts(Step.decode(on_device))) else None
    if plain:
      kernels = target_of(device) is not None or is_cpu(device)
      why = f"a dimension of this model is not one that the kernels take ({', '.join(plain)})" if kernels else "no kernels for this device"
      _say_once(f"{device}: {why}: decoding by plain ops, slowly")
    start = to_device(np.zeros(1, np.int32), device)
    self.prefill_start = start if not model.plain_parts(Step.prefill(start, self.chunk)) else None
    self.decode_steps: dict[Features, Replay] = {}
    self.prefill_steps: dict[int, Replay] = {}

  # ---- recording ----
  def build_decode(self, features:Features, compiled:bool=True) -> Replay:
    """Reads the token and, where kernels read it there, its position on the device, and writes the next of both"""
    replay, step = Replay(compiled), Step.decode(self.position.bind(0) if self.decode_start is None else self.decode_start)
    logits = self.model.logits(step, self.token, replay.run)
    replay.run(next_token, step, logits, features, self.values, self.key, self.counts, self.bias, self.token)
    return replay
  def build_prefill(self, size:int, compiled:bool=True) -> Replay:
    """Reads the first `size` of ids[size] and writes their rows"""
    replay = Replay(compiled)
    self.model.prefill(self._chunk_step(size), self.ids[size], replay.run)
    return replay
  @functools.cached_property
  def logits_step(self) -> tuple[Replay, Tensor]:
    """As a step of prefill of `chunk` tokens, and the float32 (chunk, vocab) that it writes"""
    replay = Replay()
    return replay, self.model.logits(self._chunk_step(self.chunk), self.ids[self.chunk], replay.run)
  def _chunk_step(self, size:int) -> Step:
    return Step.prefill(Variable(f"chunk_{size}", 0, self.max_context - 1).bind(0) if self.prefill_start is None else self.prefill_start, size)

  # ---- running ----
  def run_chunk(self, replay:Replay, size:int, at:int) -> None:
    """A recorded step of `size` tokens, the first of them at position `at`"""
    if self.prefill_start is None: return replay(**{f"chunk_{size}": at})
    write(self.prefill_start, np.array([at], np.int32))
    replay()

  def decode(self, features:Features, pos:int) -> Tensor:
    """Feeds the token on the device at position `pos` and returns the device's token buffer, int32 (1,), now holding the next one"""
    if features not in self.decode_steps: self.decode_steps[features] = self.build_decode(features)
    if self.decode_start is None: self.decode_steps[features](**{self.position.expr: pos})
    else:
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
    """What decode steps draw by; ids: the prompt, whose tokens a repeat penalty knows"""
    write(self.values, np.array(sampling.values(), np.float32))
    write(self.key, np.array([sampling.seed, 0], np.uint32))
    if sampling.features.penalty: write(self.counts, token_counts(self.counts.shape[1], ids, []))
    if sampling.features.bias: write(self.bias, sampling.bias_row(self.bias.shape[1]))

  @property
  def kernels_a_token(self) -> int:
    """Launches of the newest decode step; 0 before the first token"""
    return len(self.decode_steps[next(reversed(self.decode_steps))].calls) if self.decode_steps else 0

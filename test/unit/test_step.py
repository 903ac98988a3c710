"""A step as a value, on the seams where there is more to come: several sequences, a second device, hidden states."""
from pathlib import Path
import numpy as np, pytest
from helpers import SMALL, generator
from extra.mkgguf import write_model
from oracle import Judge, logits as oracle
from tinygrad import Device, Tensor
from tinygrad.apps.capture import Replay, read, to_device
from tinygrad.apps.engine.engine import Generator
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.mla import Transformer
from tinygrad.nn.cpu import is_cpu
from tinygrad.nn.primitive import plain_ops
from tinygrad.nn.step import Step

@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return write_model(tmp_path_factory.mktemp("step") / "m.gguf", "small-glm", "F16", seed=3, **SMALL | dict(q_lora=32, experts=4, used=2))[0]

def ints(*values: int) -> Tensor: return to_device(np.int32(values))

def test_two_sequences_at_different_positions(path: Path):
  """In one step, each with rows of its own, scattered over the cache: what each says alone"""
  first, second = [5, 17, 200, 3, 44], [91, 8, 30]
  model = Transformer.from_gguf(read_gguf(path), 64)
  rows = np.random.default_rng(0).permutation(64).astype(np.int32).reshape(2, 32)
  with plain_ops():
    for i, token in enumerate(first[:2]): model.logits(Step.decode(ints(i), to_device(rows[:1])), ints(token)).realize()
    together = [model.logits(Step.decode(ints(2 + i, i), to_device(rows)), ints(first[2 + i], second[i])).numpy() for i in range(3)]
  for n, ids in enumerate((first, second)):
    want = oracle(path, ids)
    for i, got in enumerate(together):
      at = len(ids) - 3 + i
      assert np.square(got[n] - want[at]).sum() < 1e-10 * np.square(want[at]).sum()

def test_kernels_leave_two_sequences_to_the_plain_ops(path: Path):
  """None takes a step of another kind for its own"""
  model, rows = Transformer.from_gguf(read_gguf(path), 64), to_device(np.arange(64, dtype=np.int32).reshape(2, 32))
  assert "latent_attention" in model.plain_parts(Step.decode(ints(3, 5), rows))

@pytest.mark.skipif(not is_cpu(Device.DEFAULT), reason="has no second device")
def test_a_second_device(path: Path):
  """Named by the weights alone: every buffer of a step is there, and every primitive takes the kernels of that device"""
  ids = [5, 17, 200, 3, 44, 91]
  model = Transformer.from_gguf(read_gguf(path), 64, device="CPU:1")
  g = Generator(model)
  assert g.decode_start is not None and g.prefill_start is not None
  assert list(g.generate(ids, 8)) == list(generator(path).generate(ids, 8))
  buffers = {u for step in (*g.decode_steps.values(), *g.prefill_steps.values()) for call in step.calls for u in call.src[1:]}
  assert {u.device for u in buffers} == {"CPU:1"}

def test_hidden_states_as_well_as_logits(path: Path):
  ids = np.int32([5, 17, 200, 3])
  model, replay, step = Transformer.from_gguf(read_gguf(path), 64), Replay(), Step.prefill(ints(0), 4)
  hidden = model.hidden(step, to_device(ids), replay.run)
  logits = model.head(step, hidden, replay.run)
  replay()
  x, said = read(hidden).astype(np.float64), read(logits)
  assert x.shape == (4, model.config.dim)
  Judge(path, ids).check(said, 1e-9)
  normed = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + model.config.norm_eps) * model.output_norm.weight.numpy()
  want = normed @ model.output.dequantize().numpy().astype(np.float64).T
  assert np.square(said - want).sum() < 1e-11 * np.square(want).sum()

"""A step as a value, on the seams where there is more to come: several sequences, a second device, hidden states."""
from pathlib import Path
import numpy as np, pytest
from helpers import SMALL, decoding, engine_of, prefilling, prefilling_several, several_prompts
from extra.bench import no_device, stand_in
from extra.mkgguf import write_model
from oracle import Judge, logits as oracle
from tinygrad import Device, Tensor
from tinygrad.apps.capture import Replay, batches, read, to_device
from tinygrad.apps.engine.engine import Engine
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.mla import Transformer
from tinygrad.nn.cpu import is_cpu
from tinygrad.nn.primitive import plain_ops

@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return write_model(tmp_path_factory.mktemp("step") / "m.gguf", "small-glm", "F16", seed=3, **SMALL | dict(q_lora=32, experts=4, used=2))[0]

def ints(*values: int) -> Tensor: return to_device(np.int32(values))

@pytest.mark.parametrize("bits,limit", [(16, 1e-10), (8, 1e-3)])
def test_two_sequences_at_different_positions(path: Path, bits: int, limit: float):
  """In one step, each with pages of its own: what each says alone"""
  first, second = [5, 17, 200, 3, 44], [91, 8, 30]
  model = Transformer.from_gguf(read_gguf(path), 160, cache_bits=bits)
  tables = np.int32([[2, 0], [1, 0]])
  with plain_ops():
    for i, token in enumerate(first[:2]): model.logits(decoding(i, tables=tables[:1]), ints(token)).realize()
    together = [model.logits(decoding(2 + i, i, tables=tables), ints(first[2 + i], second[i])).numpy() for i in range(3)]
  for n, ids in enumerate((first, second)):
    want = oracle(path, ids)
    for i, got in enumerate(together):
      at = len(ids) - 3 + i
      assert np.square(got[n] - want[at]).sum() < limit * np.square(want[at]).sum()

def test_several_prompts_in_one_step(path: Path):
  """Some begin, one goes on; their last strips are padded"""
  model = Transformer.from_gguf(read_gguf(path), 160)
  with plain_ops(): several_prompts(model, path, 1e-10)

@pytest.mark.parametrize("to", ["CPU", "CUDA", "METAL"])
@pytest.mark.parametrize("rows", [2, 16])
def test_several_sequences_have_kernels(to: str, rows: int):
  with no_device(to): assert Transformer.from_gguf(stand_in("small-glm"), 160).plain_parts(decoding(*range(rows))) == []

@pytest.mark.parametrize("to,bits,plain", [("CPU", 16, ["norm_linear", "latent_attention"]), ("CUDA", 16, []), ("CUDA", 8, ["latent_attention"]),
                                           ("METAL", 16, [])])
def test_several_prompts_have_kernels(to: str, bits: int, plain: list[str]):
  """… where they know of strips; what does not takes plain ops"""
  with no_device(to):
    step, _ = prefilling_several((0, 32), (5, 32))
    assert Transformer.from_gguf(stand_in("small-glm"), 160, cache_bits=bits).plain_parts(step) == plain

@pytest.mark.skipif(not is_cpu(Device.DEFAULT), reason="has no second device")
def test_a_second_device(path: Path):
  """Named by the weights alone: every buffer of a step is there, and every primitive takes the kernels of that device"""
  ids = [5, 17, 200, 3, 44, 91]
  model = Transformer.from_gguf(read_gguf(path), 64, device="CPU:1")
  g = Engine(Runner(model), model.pool)
  assert not model.plain_parts(g.runner.batch.step) and not model.plain_parts(g.runner.chunk_step(32))
  assert list(g.generate(ids, 8)) == list(engine_of(path).generate(ids, 8))
  chunks = [call for slices in g.runner.chunks.values() for part in slices for batch in batches(part) for call in batch]
  buffers = {u for call in (*chunks, *(call for step in g.runner.batch.replays.values() for call in step.calls)) for u in call.src[1:]}
  assert {u.device for u in buffers} == {"CPU:1"}

def test_hidden_states_as_well_as_logits(path: Path):
  ids = np.int32([5, 17, 200, 3])
  model, replay, step = Transformer.from_gguf(read_gguf(path), 64), Replay(), prefilling(0, 4)
  hidden = model.hidden(step, to_device(ids), replay.run)
  logits = model.head(step, hidden, replay.run)
  replay()
  x, said = read(hidden).astype(np.float64), read(logits)
  assert x.shape == (4, model.config.dim)
  Judge(path, ids).check(said, 1e-9)
  normed = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + model.config.norm_eps) * model.output_norm.weight.numpy()
  want = normed @ model.output.dequantize().numpy().astype(np.float64).T
  assert np.square(said - want).sum() < 1e-11 * np.square(want).sum()

"""Two tokens of a step on a GPU have the bytes that each has alone: so with one draft behind it a sequence says what it says without, and so do two
sequences beside each other. On the mock of CUDA, at widths where a step of one token and one of two have layouts of their own."""
from pathlib import Path
import numpy as np, pytest
from extra.mkgguf import write_model
from mockcuda import on_cuda
from tinygrad import Device, Tensor, dtypes
from tinygrad.apps.capture import Replay, read, to_device, write
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.mla import Transformer
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.latent_cache import Pages, RowFormat
from tinygrad.nn.split_plan import PlanShape, plan_launch, plan_ops
from tinygrad.nn.step import PAGE, Step

CONTEXT, TOKENS, POSITIONS = 2 * PAGE, np.int32([5, 6]), np.int32([33, 70])
WIDE = dict(blocks=1, dense=0, dim=2048, vocab=320, experts=8, moe_ff=512)   # as many of the chosen experts' rows as make larger blocks

def logits(model: Transformer, own: list[int]) -> np.ndarray:
  """float32 (len(own), vocab): a step of those of the two tokens, each a sequence of its own in a cache of noise"""
  rng, replay = np.random.default_rng(3), Replay()
  for cache in model.cache: write(cache, rng.standard_normal(cache.shape, np.float32).astype(np.float16))
  tables = 1 + np.arange(2 * model.pages, dtype=np.int32).reshape(2, -1)
  token, start, table = (to_device(each[own]) for each in (TOKENS, POSITIONS, tables))
  out = model.logits(Step.decode(start, table), token, replay.run)
  replay()
  return read(out)

@pytest.mark.parametrize("family,quant,sizes", [("glm", "Q4_0", dict(q_lora=256)), ("ds2lite", "Q4_K_M", dict(heads=4, used=3))])
def test_two_are_as_one(family: str, quant: str, sizes: dict[str, int], tmp_path: Path):
  path, = write_model(tmp_path / "m.gguf", family, quant, seed=4, **WIDE | sizes)
  with on_cuda("sm_90"):
    model = Transformer.from_gguf(read_gguf(path), CONTEXT, pool=lambda model: 1 + 2 * model.pages)
    alone, both = np.concatenate([logits(model, [0]), logits(model, [1])]), logits(model, [0, 1])
  assert np.isfinite(both).all() and not np.array_equal(*both)
  assert np.array_equal(alone, both)

@pytest.mark.parametrize("first", [0, 31, 992, 1022, 1024, 2111, 2112, 4222])
def test_two_of_a_sequence_are_cut_as_one(first: int):
  """Neighbouring positions, as a token and its draft have, up to as many as have two steps of 32 in each of a large GPU's 132 splits"""
  lasts, pages = np.int32([first, first + 1]), 256
  shape = PlanShape.of(Pages(2 * pages, pages, 2, RowFormat(512, 64)), 132, 32)
  def step() -> Step: return Step.decode(Tensor(lasts), Tensor.empty(2, pages, dtype=dtypes.int32))
  plan = plan_ops(shape, step()).numpy()
  with on_cuda("sm_90"): launched = plan_launch(target_of(Device.DEFAULT), shape, step()).numpy()
  written = [*range(plan[shape.items:, 1].sum()), shape.items, shape.items + 1]   # items behind the last one are nobody's
  assert np.array_equal(launched[written], plan[written])
  items, sequences = plan[:shape.items], plan[shape.items:, :2]
  for last, (start, count) in zip(lasts.tolist(), sequences.tolist(), strict=True):
    length = 64 if last >= 32 * 32 else 32   # split_kv.split_length's, of one sequence
    assert items[start:start + count, 1].tolist() == list(range(0, last + 1, length))

"""Two tokens of a step on a GPU have the bytes that each has alone: so with one draft behind it a sequence says what it says without, and so do two
sequences beside each other. Of a batch-invariant step any number have. On the mock of CUDA, at widths where a step of one token and one of two have
layouts of their own."""
from pathlib import Path
import numpy as np, pytest
from gguf import GGMLQuantizationType as T
from extra.bench import no_device, stand_in, with_blocks
from extra.mkgguf import write_model
from helpers import random_weight
from mockcuda import on_cuda
from oracle import errors
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.apps.capture import Replay, read, to_device, write
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.mla import Transformer
from tinygrad.apps.quantized import QuantizedLinear
from tinygrad.engine.realize import compile_linear
from tinygrad.helpers import ansistrip
from tinygrad.nn.intrinsics import OF_CAPABILITY, target_of
from tinygrad.nn.kernel import UNIT, launch
from tinygrad.nn.latent_cache import CacheRow, Pages, RowFormat, cache_row
from tinygrad.nn.lora_query import Teams
from tinygrad.nn.matvec import STEPS, Codes, Operand, columns_of, empty_codes, lane_steps, thread_layout
from tinygrad.nn.norm_linear import linear_of_codes
from tinygrad.nn.primitive import as_written, rounded_as_written
from tinygrad.nn.split_plan import PlanShape, plan_launch, plan_ops
from tinygrad.nn.step import PAGE, Step
from tinygrad.uop.ops import Ops

CONTEXT, TOKENS, POSITIONS = 2 * PAGE, np.int32([5, 6, 7, 9, 11, 13, 2, 3]), np.int32([33, 70, 1, 64, 90, 127, 12, 55])
WIDE = dict(blocks=1, dense=0, dim=2048, vocab=320, experts=8, moe_ff=512)   # as many of the chosen experts' rows as make larger blocks

def logits(model: Transformer, own: list[int], positions: np.ndarray = POSITIONS) -> np.ndarray:
  """float32 (len(own), vocab): a step of those of the tokens, each a sequence of its own in a cache of noise"""
  rng, replay = np.random.default_rng(3), Replay()
  for cache in model.cache: write(cache, rng.standard_normal(cache.shape, np.float32).astype(np.float16))
  tables = 1 + np.arange(model.pool - 1, dtype=np.int32).reshape(-1, model.pages)
  token, start, table = (to_device(each[own]) for each in (TOKENS, positions, tables))
  out = model.logits(model.decode_step(start, table), token, replay.run)
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

# each format's layouts; experts that a launch chooses, as there are many
@pytest.mark.parametrize("family,quant,sizes,counts", [("glm", "Q4_0", dict(q_lora=768), (3, 8)), ("ds2lite", "Q4_K_M", dict(heads=4, used=3), (5,)),
                                                       ("glm", "Q4_0", dict(q_lora=256, experts=64, moe_ff=64), (5,))])
def test_any_number_are_as_one(family: str, quant: str, sizes: dict[str, int], counts: tuple[int, ...], tmp_path: Path):
  path, = write_model(tmp_path / "m.gguf", family, quant, seed=4, **WIDE | sizes)
  with on_cuda("sm_90"):
    model = Transformer.from_gguf(read_gguf(path), CONTEXT, pool=lambda model: 1 + max(counts) * model.pages)
    alone = [logits(model, [i])[0] for i in range(max(counts))]
    model.batch_invariant = True
    for count in counts: assert [np.array_equal(*pair) for pair in zip(logits(model, [*range(count)]), alone)] == [True] * count

@pytest.mark.parametrize("count", [1, 3])
def test_rounded_as_written(count: int):
  """All kernels of an invariant step say that, and of another step the embedding, which has no step"""
  file, no_sums = stand_in("glm"), ("argmax_part", "next_token", "split_plan")
  def says(invariant: bool) -> set[str]:
    with no_device("CUDA"):
      model = Transformer.from_gguf(with_blocks(file, [0, 1]), 4 * PAGE)
      model.batch_invariant = invariant
      calls = Runner(model).batch_of(count).record(compiled=False).calls
      kernels = [call.src[0] for call in compile_linear(UOp(Ops.LINEAR, src=tuple(calls))).src]
    sources = {ansistrip(p.arg.name): next(u.arg for u in p.src if u.op is Ops.SOURCE) for p in kernels if p.op is Ops.PROGRAM}
    assert len(sources) > 10
    return {name for name, source in sources.items() if not name.startswith(no_sums) and ("rounded as written" in source) != invariant}
  with rounded_as_written(True), rounded_as_written(False): assert as_written()   # a part of what says it
  assert says(True) == set() and {name.split("_")[0] for name in says(False)} == {"embedding"}

def test_rows_by_any_threads():
  """A row of the cache is the same bits: blocks of one token's latent queries have more threads than those of several"""
  rng, latent, rotated, tokens = np.random.default_rng(3), 512, 64, 48
  kv, norm, rope = (rng.standard_normal(shape).astype(np.float32) for shape in ((tokens, latent + rotated), latent, (2 * PAGE, rotated // 2, 2)))
  lasts = np.arange(30, 30 + tokens, dtype=np.int32)
  def rows(threads: int) -> np.ndarray:
    cache = to_device(np.zeros((3 * PAGE, latent + rotated), np.float32))
    step = Step.decode(to_device(lasts), to_device(np.int32([[1, 2]] * tokens)))
    target, pages = target_of(Device.DEFAULT), Pages.of(cache, step, latent)
    def body(buffers: dict[str, UOp]) -> list[UOp]:
      token = UOp.special(tokens, "gidx0")
      return cache_row(CacheRow(target, pages, 1e-6, threads, slot=0), buffers, token, UOp.special(threads, "lidx0"), token * 0)
    ins = {"kv": to_device(kv), "norm": to_device(norm), "rope": to_device(rope), "start": step.start, "tables": step.tables}
    return launch(f"rows_by_{threads}", {"cache": cache}, ins, body)[0].numpy()
  with on_cuda(): first, *others = map(rows, (256, 128, 64, 96, 512))
  want = kv[:, :latent] / np.sqrt((kv[:, :latent].astype(float) ** 2).mean(-1, keepdims=True) + 1e-6) * norm
  assert errors(first[PAGE + lasts, :latent], want).max() < 1e-12
  for other in others: assert np.array_equal(first, other)

# GLM-4.7-Flash, Youtu-LLM, Kimi-K2, DeepSeek-V3
@pytest.mark.parametrize("heads,nope,width", [(20, 192, 768), (16, 128, 1536), (64, 128, 1536), (128, 128, 1536)])
@pytest.mark.parametrize("kind", [T.Q4_0, T.Q4_K, T.Q6_K, T.Q8_0])
def test_latent_queries_are_summed_alike(kind: T, heads: int, nope: int, width: int):
  """Of more tokens than lora_query takes, q_b and k_b are launches of their own, in which a row lies over as many lanes"""
  with no_device("CUDA"):
    q_b, target = QuantizedLinear.load(kind, (32, width), random_weight(kind, (32, width))[0]), OF_CAPABILITY[90]
    for rows, units, steps in ((nope, width // UNIT, lane_steps(q_b)), (512, nope // UNIT, STEPS)):
      layout = thread_layout([units], target.lanes, heads * rows // 2, steps=steps)
      assert layout.warps == 1 and layout.lanes == Teams.of(target, rows, units).lanes

def test_columns_of_int8():
  """A lane has registers for as many tokens as it reads few units of, and half of those that it has none for"""
  def columns(tokens: int, units: int) -> int: return columns_of(OF_CAPABILITY[90], Operand([160], None, tokens=tokens), [], 4, units)
  assert [columns(8, units) for units in (2, 3, 5, 10, 21)] == [8, 4, 4, 2, 1] and columns(5, 5) == 3

def test_rows_of_int8_are_summed_alike():
  """A small matrix in a K-quant, whose rows one token takes four at a time"""
  rng = np.random.default_rng(2)
  with on_cuda("sm_90"):
    def product(own: list[int], invariant: bool) -> np.ndarray:
      codes = Codes(Tensor(words[own]).realize(), Tensor(scales[own]).realize())
      return linear_of_codes(codes, weight, Tensor(np.zeros((len(own), 192), np.float32)), invariant=invariant).numpy()
    weight = QuantizedLinear.load(T.Q4_K, (192, 8192), random_weight(T.Q4_K, (192, 8192))[0])
    like = empty_codes(Tensor.empty(1), 3, 8192)
    words, scales = rng.integers(-2 ** 31, 2 ** 31, like.words.shape).astype(np.int32), rng.random(like.scales.shape, np.float32)
    alone = np.concatenate([product([i], False) for i in range(3)])
    assert np.array_equal(product([0, 1, 2], True), alone) and not np.array_equal(product([0, 1, 2], False), alone)

# combined by v_b's blocks, and by a launch
@pytest.mark.parametrize("family,quant", [("ds2lite", "Q4_0"), ("youtu", "F16")])
def test_any_lengths_are_as_one(family: str, quant: str, tmp_path: Path):
  """Four that together have more steps than there are splits"""
  path, = write_model(tmp_path / "m.gguf", family, quant, seed=4, **WIDE | dict(heads=4, ff=256, dim=256, experts=0))
  positions = np.int32([2200, 2190, 3, 2270])
  with on_cuda("sm_90"):
    model = Transformer.from_gguf(read_gguf(path), 2304, pool=lambda model: 1 + 4 * model.pages)
    def each() -> np.ndarray: return np.concatenate([logits(model, [i], positions) for i in range(4)])
    apart, want = logits(model, [*range(4)], positions), each()
    model.batch_invariant = True
    alone = each()
    assert np.array_equal(alone, logits(model, [*range(4)], positions)) and not np.array_equal(alone, apart)
    assert np.array_equal(alone, want)

@pytest.mark.parametrize("lasts,capacity", [((0, 31, 32, 1023), 5000), ((1024, 4223, 4224, 4999), 5000), ((0, 100, 250, 255), 256),
                                            ((5, 100, 4000, 19999), 20000)])
def test_each_is_cut_as_one(lasts: tuple[int, ...], capacity: int):
  pages = -(-capacity // PAGE)
  shape = PlanShape.of(Pages(4 * pages, pages, 4, RowFormat(512, 64)), 132, 32, alone=True)
  def step() -> Step: return Step.decode(Tensor(np.int32(lasts)), Tensor.empty(4, pages, dtype=dtypes.int32))
  plan = plan_ops(shape, step()).numpy()
  with on_cuda("sm_90"): assert np.array_equal(plan_launch(target_of(Device.DEFAULT), shape, step()).numpy(), plan)
  for i, (last, (start, count)) in enumerate(zip(lasts, plan[shape.items:, :2].tolist(), strict=True)):
    length = 32 * max(last // (shape.most_items * 32) + 1, 1 + (last >= 32 * 32))   # split_kv.split_length's
    assert start == i * shape.most_items and plan[start:start + count, 1].tolist() == list(range(0, last + 1, length))
    assert not plan[start + count:start + shape.most_items, 2].any() and (plan[start:start + shape.most_items, 0] == i).all()

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

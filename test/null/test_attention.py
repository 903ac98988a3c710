"""Attention over a cache whose pages lie anywhere, on the mocks of CUDA and Metal: splits of one sequence and of several against float64
(split_kv_mma, split_kv_simt, mla_combine, SplitContext), and what the forms write to the cache."""
from __future__ import annotations
import dataclasses, re
from typing import Callable, NamedTuple
import numpy as np, pytest
from helpers import decoding, prefilling, random_weight
from mockcuda import on_cuda
from mockmetal import on_metal
from oracle import nmse
from gguf import GGMLQuantizationType as T
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from extra.bench import no_device
from tinygrad.apps.capture import collected_calls
from tinygrad.apps.mla import RMSNorm
from tinygrad.apps.quantized import QuantizedLinear
from tinygrad.apps.rope import Rope, rope_table
from tinygrad.engine.realize import compile_linear
from tinygrad.nn import intrinsics, kernel, matvec, mla_attention, norm_linear, split_kv
from tinygrad.nn.latent_cache import LARGEST, LATENT_GROUP, ROTATED_GROUP, PageAhead, Pages, RowFormat
from tinygrad.nn.mla_attention import attention_plan, latent_attention
from tinygrad.nn.matvec import Operand
from tinygrad.nn.primitive import plain_ops
from tinygrad.nn.split_plan import FEW_SPLITS, Item, PlanShape, plan_ops
from tinygrad.nn.step import PAGE, Step
from tinygrad.uop.ops import Ops

pytestmark = pytest.mark.usefixtures("planes_by_numpy")

def split_attention(q_latent: Tensor, q: Tensor, cache: Tensor, step: Step, scale: float) -> Tensor:
  target = intrinsics.target_of(Device.DEFAULT)
  return split_kv.mla_combine(target, *split_kv.split_kv(target, q_latent, q, cache, step, scale), cache, step)

def stored(rows: np.ndarray, latent: int, coded: bool) -> tuple[np.ndarray, np.ndarray]:
  """(C, L+R) rows as they lie in the cache, and what they then stand for"""
  if not coded: return rows, rows
  row_format = RowFormat(latent, rows.shape[1] - latent, True)
  codes = row_format.encoded(Tensor(rows)).realize()
  return codes.numpy(), row_format.decoded(codes).numpy()

def nobodys(rows: np.ndarray, count: int) -> np.ndarray:
  """So many rows like these that must not be read: as numbers, or scales, they are NaN"""
  return np.full((count, *rows.shape[1:]), np.nan if rows.dtype == np.float16 else 0xffff, rows.dtype)

def attention(H: int, L: int, R: int, C: int, last: int, seed: int, coded: bool = False, level: float = 0) -> tuple[float, float]:
  """The worst head's NMSE of the kernels' result, and what halves for queries and weights may cost: a half is off by at most 2^-11 of itself, so a
  score by 2^-11 of what scores come to, and its weight, a half too, by as much of the weight. level: of the cache's numbers; then queries are 0"""
  rng = np.random.default_rng(seed)
  q_latent, q = (rng.standard_normal((H, n)).astype(np.float32) * (2 if level == 0 else 0) for n in (L, 48 + R))
  pages = -(-C // PAGE)
  rows, numbers = stored((rng.standard_normal((pages * PAGE, L + R)) + level).astype(np.float16), L, coded)
  rows[last + 1:] = nobodys(rows, 1)
  query, keys = np.concatenate([q_latent, q[:, 48:]], 1).astype(np.float64), numbers[:last + 1].astype(np.float64)
  table = rng.permutation(pages + 3)[:pages]                 # pages lie anywhere in the pool
  cache = nobodys(rows, (pages + 3) * PAGE)
  for page, own in zip(table, rows.reshape(pages, PAGE, -1)): cache[page * PAGE:(page + 1) * PAGE] = own
  scores = query @ keys.T * 0.11
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  want = weights / weights.sum(-1, keepdims=True) @ keys[:, :L]
  if split_kv.uses_tensor_cores(intrinsics.target_of(Device.DEFAULT), RowFormat(L, R, coded)):
    head, number = np.meshgrid(np.arange(H), np.arange(L), indexing="ij")
    placed = np.full((split_kv.padded(H), L), np.nan, np.float16)
    placed.reshape(-1)[split_kv.query_place(head, number, L)] = q_latent
    q_latent = placed
  got = split_attention(Tensor(q_latent[None]), Tensor(q[None]), Tensor(cache), decoding(last, tables=table[None]), 0.11)
  return nmse(got.numpy()[0], want), 2 ** -22 * (np.square(scores).mean() + 1)

SHAPES = [(8, 512, 64, 200, 199), (5, 128, 32, 300, 130), (3, 128, 32, 40, 0), (16, 256, 32, 33, 32), (2, 128, 64, 700, 630)]
STEP_16, STEP_32 = "sm_86", "sm_90"   # what shared memory holds of GLM's rows

@pytest.mark.parametrize("shape,arch", [*((shape, STEP_16) for shape in SHAPES), *((shape, STEP_32) for shape in SHAPES[:2]),
                                        ((20, 512, 64, 200, 131), STEP_32),
                                        ((40, 128, 32, 100, 99), STEP_32), ((64, 128, 32, 100, 99), STEP_32),
                                        ((128, 128, 32, 40, 33), STEP_16)])
def test_tensor_cores(shape: tuple[int, ...], arch: str):
  with on_cuda(arch):
    assert split_kv.uses_tensor_cores(intrinsics.target_of(Device.DEFAULT), RowFormat(*shape[1:3]))
    error, halves = attention(*shape, seed=1)
    assert error < halves

@pytest.mark.parametrize("shape,on", [(SHAPES[1], on_cuda), (SHAPES[2], on_cuda), (SHAPES[1], on_metal)])
def test_simt(shape: tuple[int, ...], on: Callable, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setitem(intrinsics.TARGETS, "CUDA", dataclasses.replace(intrinsics.TARGETS["CUDA"], mma=None))
  with on():
    assert not split_kv.uses_tensor_cores(intrinsics.target_of(Device.DEFAULT), RowFormat(*shape[1:3]))
    assert attention(*shape, seed=2)[0] < 1e-12

def test_codes_by_tensor_cores(monkeypatch: pytest.MonkeyPatch):
  """Rows of 8 bits; the numbers that they stand for are rounded to halves"""
  monkeypatch.setattr(split_kv, "MULTIPROCESSORS", 3)   # splits of several steps
  with on_cuda():
    error, halves = attention(*SHAPES[1], seed=1, coded=True)
    assert error < 2 * halves

def test_codes_simt():
  with on_metal(): assert attention(*SHAPES[1], seed=2, coded=True)[0] < 1e-12

@pytest.mark.parametrize("latent,rotated", [(512, 64), (64, 16)])
def test_what_8_bits_cost(latent: int, rotated: int):
  """Half a step of its group's scale a number, and what rounding that to a half moves it; in sum, what numbers rounded to such steps are off by"""
  rows = np.random.default_rng(3).standard_normal((90, latent + rotated)).astype(np.float32)
  rows[0] = 0
  codes, numbers = stored(rows, latent, True)
  assert codes.dtype == np.uint16 and RowFormat.of(Tensor(codes), latent) == RowFormat(latent, rotated, True) and codes.nbytes % 16 == 0
  for part, size in ((slice(latent), LATENT_GROUP), (slice(latent, None), ROTATED_GROUP)):
    groups, found = rows[:, part].reshape(90, -1, size), numbers[:, part].reshape(90, -1, size)
    assert (np.abs(found - groups) <= np.abs(groups).max(-1, keepdims=True) / LARGEST * 0.57).all()
  assert nmse(numbers, rows) < 7e-5 and not numbers[0].any()

def test_steps():
  """Of GLM's rows, as halves and of 8 bits: a step's sums and the next one's scores read two steps' rows, a third's are on their way"""
  for arch, positions, stages in (("sm_80", 32, 3), (STEP_16, 16, 4), (STEP_32, 32, 4)):
    for coded in (False, True):
      layout = split_kv.MmaLayout.of(intrinsics.of_arch(arch), RowFormat(512, 64, coded))
      assert (layout.positions, layout.stages) == (positions, stages), (arch, coded)

@pytest.mark.parametrize("last,arch", [*((last, STEP_16) for last in (0, 1, 15, 16, 63, 64, 127, 400)),
                                       *((last, STEP_32) for last in (30, 31, 32, 33, 38, 400))])
def test_few_blocks(last: int, arch: str, monkeypatch: pytest.MonkeyPatch):
  """Splits of several steps: the softmax goes on from step to step"""
  monkeypatch.setattr(split_kv, "MULTIPROCESSORS", 3 if last < 400 else 1)
  with on_cuda(arch):
    error, halves = attention(10, 128, 32, 401, last, seed=3)
    assert error < halves

@pytest.mark.parametrize("last", [15, 16, 400])
def test_sums_that_halves_hold(last: int, monkeypatch: pytest.MonkeyPatch):
  """… by a split's steps: all positions weigh the same, and together are more than a half can be"""
  monkeypatch.setattr(split_kv, "MULTIPROCESSORS", 1)
  with on_cuda():
    error, halves = attention(5, 128, 32, 401, last, seed=4, level=1500)
    assert error < halves

# ---- splits that v_b combines ----

def combined_in_v_b(H: int, L: int, R: int, v: int, *lasts: int, positions: int = 256 * PAGE) -> tuple[int, float]:
  """How many splits are written up to a position of each token, and the worst NMSE of a head's v_b·context. What is not written is NaN. Each split
  tells in the sums, and a head's weights do not favour a few"""
  rng, target, row, T_ = np.random.default_rng(lasts), intrinsics.target_of(Device.DEFAULT), RowFormat(L, R), len(lasts)
  pages = Pages(T_ * positions // PAGE, positions // PAGE, T_, row)
  splits, step = split_kv.plan_splits(target, H, pages)
  assert split_kv.blocks_combine(target, H, pages, 1)
  if T_ == 1:
    plan, where, last = None, {"start": Tensor(np.int32(lasts))}, lasts[0]
    spans = [(0, last // (max(last // (splits * step) + 1, 1 + (last >= FEW_SPLITS * step)) * step) + 1)]
  else:
    plan = split_kv.plan_shape(target, H, pages)
    rows = plan_ops(plan, Step.decode(Tensor(np.int32(lasts)), Tensor.empty(T_, positions // PAGE, dtype=dtypes.int32))).numpy()
    where, splits, spans = {"plan": Tensor(rows)}, plan.items, [(first, count) for first, count, *_ in rows[plan.items:].tolist()]
  sums, stats = np.full((splits, H, L), np.nan, np.float16), np.full((H, splits, 2), np.nan, np.float32)
  v_b, contexts = load_weight(H, v, L), []
  for first, count in spans:
    own = slice(first, first + count)
    sums[own] = rng.standard_normal((count, H, L))
    stats[:, own] = np.stack([rng.standard_normal((H, count)) - 40, rng.random((H, count)) + 0.1], -1)
    weights = np.exp2(stats[:, own, 0].astype(np.float64))
    contexts.append(np.einsum("hs,shl->hl", weights, sums[own].astype(np.float64)) / (weights * stats[:, own, 1]).sum(1)[:, None])
  def operand(buffers: dict[str, UOp], head: UOp) -> Operand:
    return Operand([L // 32], None, tokens=T_, made=split_kv.SplitContext(target, buffers, pages, splits, H, step, plan, head))
  layout = split_kv.SumsLayout.of(target, row)
  numbers = [layout.number(piece, i) for piece in range(layout.pieces) for i in range(layout.size)]
  ins = {"sums": Tensor(sums[..., numbers].copy().view(np.uint32)), "stats": Tensor(stats), **where}
  words, scales = (part.numpy() for part in norm_linear.heads_as_codes(f"combined_{splits}", v_b, ins, operand, T_, mem=0))
  codes = words.transpose(0, 2, 1, 3).copy().view(np.int8).reshape(-1, 8) * scales.reshape(-1, 1).astype(np.float64)
  want = np.einsum("thl,hvl->thv", np.array(contexts), v_b.dequantize().numpy().astype(np.float64)).reshape(-1, v)
  return sum(count for _, count in spans), max(nmse(own, right) for own, right in zip(codes.reshape(-1, v), want, strict=True))

def load_weight(*shape: int) -> QuantizedLinear: return QuantizedLinear.load(T.Q8_0, shape, random_weight(T.Q8_0, shape)[0])

@pytest.fixture
def large_blocks(monkeypatch: pytest.MonkeyPatch): monkeypatch.setattr(matvec, "FEW_BLOCKS", 1)

def ends_of_splits(count: int, step: int) -> list[int]: return [(count - 1) * step, count * step - 1]
# splits of a step up to FEW_SPLITS, of two behind that
SPLITS = (1, 32), (2, 32), (16, 32), (17, 32), (32, 32), (17, 64), (32, 64), (33, 64), (131, 64), (132, 64)
@pytest.mark.parametrize("shape", [(2, 512, 64, 32), (18, 128, 32, 16)])
@pytest.mark.parametrize("splits,length", SPLITS)
def test_splits_combined_in_v_b(shape: tuple[int, ...], splits: int, length: int, large_blocks: None):
  with on_cuda("sm_90"):
    for last in ends_of_splits(splits, length):
      written, error = combined_in_v_b(*shape, last)
      assert written == splits and error < 1e-3

def test_long_splits_combined_in_v_b(large_blocks: None):
  """Of three steps each"""
  with on_cuda("sm_90"):
    for last, splits in ((132 * 64, 89), (132 * 64 + 96, 90), (132 * 96 - 1, 132)):
      written, error = combined_in_v_b(2, 512, 64, 32, last)
      assert written == splits and error < 1e-3

@pytest.mark.parametrize("shape", [(2, 512, 64, 32), (18, 128, 32, 16)])
@pytest.mark.parametrize("lasts", [(0, 31), (40, 5000), (1000, 0, 100), (3, 16000, 700, 31)])
def test_splits_of_several_combined_in_v_b(shape: tuple[int, ...], lasts: tuple[int, ...], large_blocks: None):
  """Those of a plan: a token's begin where it says"""
  with on_cuda("sm_90"): assert combined_in_v_b(*shape, *lasts)[1] < 1e-3

def one_less(first: UOp, count: UOp) -> tuple[UOp, UOp]: return first, count - 1
def one_more(first: UOp, count: UOp) -> tuple[UOp, UOp]: return first, count + 1
def one_turn(first: UOp, count: UOp) -> tuple[UOp, UOp]: return first, count.minimum(72)
def others(first: UOp, count: UOp) -> tuple[UOp, UOp]: return UOp.const(0), count
def faulty(fault: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
  right = split_kv.SplitContext.own
  monkeypatch.setattr(split_kv.SplitContext, "own", lambda context, token: fault(*right(context, token)))
  monkeypatch.setattr(kernel, "_programs", {})

@pytest.mark.parametrize("fault,splits,length", [(one_less, 2, 32), (one_less, 17, 32), (one_less, 132, 64), (one_more, 1, 32), (one_more, 33, 64),
                                                 (one_turn, 131, 64)])
def test_splits_left_out(fault: Callable, splits: int, length: int, large_blocks: None, monkeypatch: pytest.MonkeyPatch):
  """… or read too many, are noticed"""
  faulty(fault, monkeypatch)
  with pytest.raises(AssertionError): test_splits_combined_in_v_b((2, 512, 64, 32), splits, length, large_blocks)

@pytest.mark.parametrize("fault,lasts", [(one_less, (40, 5000)), (others, (40, 5000)), (one_turn, (3, 5000)), (one_more, (1000, 0, 100))])
def test_splits_of_several_left_out(fault: Callable, lasts: tuple[int, ...], large_blocks: None, monkeypatch: pytest.MonkeyPatch):
  faulty(fault, monkeypatch)
  with pytest.raises(AssertionError): test_splits_of_several_combined_in_v_b((2, 512, 64, 32), lasts, large_blocks)

@pytest.mark.parametrize("heads,rows,combines", [(20, 256, True), (16, 128, True), (64, 128, True), (128, 128, True), (40, 1024, False)])
def test_who_combines(heads: int, rows: int, combines: bool):
  """Where the blocks' reading stays small"""
  with no_device("CUDA"):
    step, cache = Step.decode(*(Tensor.empty(*n, dtype=dtypes.int32) for n in ((1,), (1, 256)))), Tensor.empty(256 * PAGE, 576, dtype=dtypes.half)
    shapes = (heads, 512, 128), (heads, rows, 512), (64, heads * rows)
    k_b, v_b, output = (QuantizedLinear.load(T.Q8_0, shape, np.empty(np.prod(shape) // 32 * 34, np.uint8)) for shape in shapes)
    weights = mla_attention.LatentWeights(RMSNorm(Tensor.empty(512), 1e-5), k_b, v_b, output, 1.0)
    assert mla_attention.combine_in_v_b(step, weights, cache) is combines

# ---- what is read before the wait ----

def late(first: int, count: int, dim: int, shadow: int) -> tuple[Callable, Callable, Callable]:
  """What stands for split_kv_mma, its first statement and its wait: so many rows of the cache are NaN up to the wait, and then what those from
  `shadow` on are. All threads meet there: none may have read before it what is written"""
  numbers, kernels = f"for (int i = threadIdx.x; i < {count * dim}; i += blockDim.x)", split_kv.split_kv_mma
  def rows(text: str, *after: UOp) -> UOp:
    return UOp(Ops.CUSTOM, dtypes.uint32, src=(buffers["cache"][0], *after), arg=f"0; {text}")
  def kernel_(shape: split_kv.SplitLaunch, of: dict[str, UOp]) -> list[UOp]:
    buffers.update(of)
    return kernels(shape, of)
  def begins(active: UOp) -> UOp:
    # 0x7e00 is a NaN
    return rows(f"if (!{{1}}) return; __syncthreads(); {numbers} ((ushort*)({{0}}))[{first * dim} + i] = 0x7e00; __syncthreads();", active)
  def waits(target: intrinsics.Target, of: dict[str, UOp], *loads: UOp) -> dict[str, UOp]:
    text = f"__syncthreads(); {numbers} ((ushort*)({{0}}))[{first * dim} + i] = ((ushort*)({{0}}))[{shadow * dim} + i]; __syncthreads();"
    waited = UOp.placeholder((1,), dtypes.uint32, slot=kernel.WAITED, addrspace=AddrSpace.REG)[0].store(rows(text, *loads))
    return {name: buffer.after(waited) for name, buffer in of.items()}
  buffers: dict[str, UOp] = {}
  return kernel_, begins, waits

def attention_with_late_rows(start: int, count: int, monkeypatch: pytest.MonkeyPatch) -> float:
  """So many tokens from a position on, of one sequence, whose rows come with the wait: the worst head's NMSE"""
  rng, (H, L, R), pages = np.random.default_rng(start), (5, 128, 32), 3
  for name, stand_in in zip(("split_kv_mma", "leave_unless", "behind_wait"), late(start, count, L + R, pages * PAGE)):
    monkeypatch.setattr(split_kv, name, stand_in)
  monkeypatch.setattr(kernel, "_programs", {})
  q_latent, q = rng.standard_normal((count, H, L)).astype(np.float32), rng.standard_normal((count, H, 48 + R)).astype(np.float32)
  cache = nobodys(np.zeros((1, L + R), np.float16), (pages + 1) * PAGE)
  cache[:start + count] = rng.standard_normal((start + count, L + R))
  cache[pages * PAGE:pages * PAGE + count] = cache[start:start + count]
  given, numbers = np.full((count, split_kv.padded(H) * L), np.nan, np.float16), np.meshgrid(np.arange(H), np.arange(L), indexing="ij")
  given[:, split_kv.query_place(*numbers, L).reshape(-1)] = q_latent.reshape(count, -1)
  step, rows = decoding(*range(start, start + count), tables=np.tile(np.arange(pages), (count, 1))), Tensor(cache)
  if count > 1:
    shape = split_kv.plan_shape(intrinsics.target_of(Device.DEFAULT), H, Pages.of(rows, step, L))
    step = dataclasses.replace(step, plan=attention_plan(step, shape).realize())
  got = split_attention(Tensor(given.reshape(count, -1, L)), Tensor(q), rows, step, 0.11).numpy().astype(np.float64)
  query, worst = np.concatenate([q_latent, q[..., 48:]], -1).astype(np.float64), []
  for i in range(count):
    keys = cache[:start + i + 1].astype(np.float64)
    weights = np.exp(query[i] @ keys.T * 0.11)
    want = weights / weights.sum(-1, keepdims=True) @ keys[:, :L]
    worst += [nmse(got[i, head], want[head]) for head in range(H)]
  return float(np.max(worst))

@pytest.mark.parametrize("start,count,arch", [*((start, 1, STEP_32) for start in (0, 7, 31, 32, 36, 100)), (0, 8, STEP_32), (28, 8, STEP_32),
                                              (100, 3, STEP_32), (60, 8, STEP_16), (120, 8, STEP_16)])
def test_new_rows_are_read_behind_the_wait(start: int, count: int, arch: str, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(split_kv, "MULTIPROCESSORS", 2)
  with on_cuda(arch): assert attention_with_late_rows(start, count, monkeypatch) < 1e-5

@pytest.mark.parametrize("new_rows", [1, 7])
def test_new_rows_that_are_read_before(new_rows: int, monkeypatch: pytest.MonkeyPatch):
  """… are noticed"""
  monkeypatch.setattr(split_kv, "NEW_ROWS", new_rows)
  with pytest.raises(AssertionError): test_new_rows_are_read_behind_the_wait(60, new_rows + 1, STEP_16, monkeypatch)

def one_group_less(right: Callable) -> Callable: return lambda target, cases, otherwise: right(target, cases, otherwise + 1)
def the_first_too_soon(right: Callable) -> Callable:
  return lambda target, cases, otherwise: right(target, [cases[0], (cases[1][0], cases[1][1] + 1)], otherwise)
def not_the_new_rows(right: Callable) -> Callable: return lambda target, cases, otherwise: right(target, cases[1:], otherwise)

@pytest.mark.parametrize("last,fault", [(400, one_group_less), (400, the_first_too_soon), (38, not_the_new_rows)])
def test_copies_that_nobody_waits_for(last: int, fault: Callable, monkeypatch: pytest.MonkeyPatch):
  """… are noticed"""
  monkeypatch.setattr(split_kv, "copied_but", fault(split_kv.copied_but))
  monkeypatch.setattr(kernel, "_programs", {})
  with pytest.raises(AssertionError): test_few_blocks(last, STEP_32, monkeypatch)

# ---- several sequences ----

class Batch(NamedTuple):
  """lasts: (S,), the last position of each sequence. tables: (S, P). cache: (C, dim), NaN in every row that is nobody's"""
  lasts: np.ndarray
  tables: np.ndarray
  cache: np.ndarray

  @staticmethod
  def random(count: int, dim: int, seed: int, longest: int = 300) -> Batch:
    """Pages in any order; some sequences begin with the pages of the one before, and every fifth is not there: its table is page 0's"""
    rng, pages = np.random.default_rng(seed), -(-longest // PAGE)
    lasts, free = rng.integers(0, longest, count), rng.permutation(np.arange(1, 1 + count * pages)).tolist()
    lasts[:2], lasts[4::5] = (longest - 1, 0), 0
    tables, cache = np.zeros((count, pages), np.int32), np.full((1 + count * pages, PAGE, dim), np.nan, np.float16)
    cache[0, 0] = rng.standard_normal(dim)
    for i, last in enumerate(lasts):
      if i % 5 == 4: continue
      shared = min(last, lasts[i - 1]) // PAGE if i % 5 in (1, 2) else 0   # full pages
      tables[i, :shared] = tables[i - 1, :shared]
      for n in range(shared, last // PAGE + 1):
        tables[i, n] = free.pop()
        rows = min(last + 1 - n * PAGE, PAGE)
        cache[tables[i, n], :rows] = rng.standard_normal((rows, dim))
    return Batch(lasts, tables, cache.reshape(-1, dim))

  def rows(self, i: int) -> np.ndarray:
    """Of a sequence, by position"""
    return self.cache.reshape(-1, PAGE, self.cache.shape[1])[self.tables[i]].reshape(-1, self.cache.shape[1])[:self.lasts[i] + 1]

def attention_of_several(count: int, H: int, L: int, R: int, seed: int, longest: int = 300) -> float:
  """The worst NMSE of a head of a sequence, by what halves may cost"""
  rng, batch, target = np.random.default_rng(seed), Batch.random(count, L + R, seed, longest), intrinsics.target_of(Device.DEFAULT)
  q_latent, q = rng.standard_normal((count, H, L)).astype(np.float32) * 2, rng.standard_normal((count, H, 48 + R)).astype(np.float32) * 2
  query, given = np.concatenate([q_latent, q[..., 48:]], -1).astype(np.float64), q_latent
  if split_kv.uses_tensor_cores(target, RowFormat(L, R)):
    head, number = np.meshgrid(np.arange(H), np.arange(L), indexing="ij")
    given = np.full((count, split_kv.padded(H) * L), np.nan, np.float16)
    given[:, split_kv.query_place(head, number, L).reshape(-1)] = q_latent.reshape(count, -1)
    given = given.reshape(count, -1, L)
  step, cache = decoding(*batch.lasts, tables=batch.tables), Tensor(batch.cache)
  step = dataclasses.replace(step, plan=attention_plan(step, split_kv.plan_shape(target, H, Pages.of(cache, step, L))).realize())
  got, worst = split_attention(Tensor(given), Tensor(q), cache, step, 0.11).numpy().astype(np.float64), []
  for i in range(count):
    keys = batch.rows(i).astype(np.float64)
    scores = query[i] @ keys.T * 0.11
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights / weights.sum(-1, keepdims=True) @ keys[:, :L]
    halves = 2 ** -22 * (np.square(scores).mean() + 1)
    worst += [nmse(got[i, h], want[h]) / halves for h in range(H)]
  return float(np.max(worst))

@pytest.mark.parametrize("count,heads", [(2, 10), (5, 3), (33, 5)])
def test_several_by_tensor_cores(count: int, heads: int, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(split_kv, "MULTIPROCESSORS", 7)        # items of several steps
  with on_cuda(): assert attention_of_several(count, heads, 128, 32, seed=count) < 4

@pytest.mark.parametrize("count,on", [(3, on_cuda), (2, on_metal), (8, on_metal)])
def test_several_simt(count: int, on: Callable, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setitem(intrinsics.TARGETS, "CUDA", dataclasses.replace(intrinsics.TARGETS["CUDA"], mma=None))
  monkeypatch.setattr(split_kv, "MULTIPROCESSORS", 5)
  with on(): assert attention_of_several(count, 4, 128, 32, seed=count) < 1e-3

@pytest.mark.parametrize("count", [1, 3])
def test_numbers_are_read_in_fours(count: int):
  """tinygrad reads them one by one where it cannot see that an index is a multiple of four"""
  with no_device("CUDA"), collected_calls() as calls:
    target, step = intrinsics.target_of(Device.DEFAULT), Step.decode(*(Tensor.empty(*n, dtype=dtypes.int32) for n in ((count,), (count, 9))))
    cache = Tensor.empty(20 * PAGE, 160, dtype=dtypes.half)
    if count > 1: step = dataclasses.replace(step, plan=attention_plan(step, split_kv.plan_shape(target, 5, Pages.of(cache, step, 128))))
    split_attention(Tensor.empty(count, 8, 128, dtype=dtypes.half), Tensor.empty(count, 5, 80), cache, step, 0.11).realize()
    programs = [call.src[0] for call in compile_linear(UOp(Ops.LINEAR, src=tuple(calls))).src]
  sources = {p.arg.name: next(u.arg for u in p.src if u.op is Ops.SOURCE) for p in programs}
  split, combine = (next(source for name, source in sources.items() if name.startswith(start)) for start in ("mla_split_kv_mma", "mla_combine"))
  assert "*(const uint4*)" in split and "float4*" in split and not re.search(r"(half|float) val\d+ = \(?\*\(data", split) and "float4*" in combine

# ---- faults ----

def ignored_tables(right: Callable) -> Callable:
  return lambda pages, buffers, position, sequence=0: position // PAGE + sequence * 0
def the_same_page_again(right: Callable) -> Callable: return lambda ahead, step, page, following: right(ahead, step, page, page)
def without_the_last_item(right: Callable) -> Callable:
  def faulty(shape: PlanShape, buffers: dict[str, UOp], index: UOp) -> Item:
    item = right(shape, buffers, index)
    following = buffers["plan"][((index + 1).minimum(shape.items - 1)) * 4].load()
    return dataclasses.replace(item, steps=following.eq(item.sequence.cast(dtypes.int)).where(item.steps, 0))   # no sequence's last one
  return faulty
def a_neighbours_item(right: Callable) -> Callable:
  def faulty(shape: PlanShape, buffers: dict[str, UOp], sequence: UOp) -> tuple[UOp, UOp]:
    first, count = right(shape, buffers, sequence)
    return (first + 1).minimum(shape.items - 1), count
  return faulty
def anothers_query(right: Callable) -> Callable:
  def faulty(*args) -> Item: return dataclasses.replace(item := right(*args), sequence=item.sequence - (item.sequence > 0).where(1, 0))
  return faulty

@pytest.mark.parametrize("place,name,fault", [
  (Pages, "page", ignored_tables), (PageAhead, "update", the_same_page_again), (split_kv, "item_of", without_the_last_item),
  (split_kv, "items_of", a_neighbours_item), (split_kv, "item_of", anothers_query)])
def test_a_planted_fault(place: object, name: str, fault: Callable, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(place, name, fault(getattr(place, name)))
  monkeypatch.setattr(kernel, "_programs", {})
  monkeypatch.setattr(split_kv, "STAGES", range(3, 2, -1))   # few enough that items have more steps
  monkeypatch.setattr(split_kv, "MULTIPROCESSORS", 7)
  with pytest.raises((AssertionError, RuntimeError)), on_cuda(): assert attention_of_several(5, 3, 128, 32, 5, longest=900) < 4

# ---- what is written ----

def arguments(step: Step, cache: np.ndarray, heads: int, latent: int, rotated: int) -> tuple:
  """Of latent_attention; tokens at the same position with the same table, those that are not there, have the same numbers"""
  rng = np.random.default_rng(step.tokens)
  q, kv = (rng.standard_normal((step.tokens, n)).astype(np.float32) for n in (heads * (64 + rotated), latent + rotated))
  if step.few_tokens:
    absent = step.tables.numpy()[:, 0] == 0
    q[absent], kv[absent] = q[0], kv[0]
  k_b = QuantizedLinear.load(T.Q8_0, (heads, latent, 64), random_weight(T.Q8_0, (heads, latent, 64))[0])
  rope = Rope(rope_table(rotated, 1e4, step.tables.shape[1] * PAGE), 64 + rotated, 64)
  shape = mla_attention.plan_shape(step, k_b, pool := Tensor(cache).realize())
  if shape is not None: step = dataclasses.replace(step, plan=attention_plan(step, shape).realize())
  return step, Tensor(q).realize(), Tensor(kv).realize(), k_b, RMSNorm(Tensor(np.ones(latent, np.float32)).realize(), 1e-5), pool, rope, 0.0004

def written(on: Callable, make_step: Callable[[], Step], cache: np.ndarray, form: str, limit: float) -> tuple[set[int], np.ndarray]:
  """The rows of the cache that latent_attention changes, which are those that its plain ops change, and the context, (T, H, L)"""
  def run() -> tuple[np.ndarray, np.ndarray]:
    context, pool = latent_attention(*args)
    Tensor.realize(context, pool)
    return context.cast(dtypes.float).numpy().astype(np.float64), pool.numpy()
  shape = 3, 128, 32
  with on():
    args = arguments(make_step(), cache, *shape)
    assert latent_attention.choose(*args) == form
    got, pool = run()
  with plain_ops():
    args = arguments(make_step(), cache, *shape)
    want, plain = run()
  changed = set(np.flatnonzero((pool != cache).any(1)).tolist())
  assert changed == set(np.flatnonzero((plain != cache).any(1)).tolist())
  assert np.abs(pool.astype(np.float64) - plain).max() < 1e-2
  assert np.max(np.square(got - want).sum(-1) / np.square(want).sum(-1)) < limit
  return changed, got

@pytest.mark.parametrize("on,limit", [(on_cuda, 2e-3), (on_metal, 1e-6)])
@pytest.mark.parametrize("count", [3, 9])
def test_rows_of_several(on: Callable, limit: float, count: int):
  """Each sequence's own, and no other but of page 0"""
  batch = Batch.random(count, 160, seed=count)
  cache = np.nan_to_num(batch.cache)
  changed, _ = written(on, lambda: decoding(*batch.lasts, tables=batch.tables), cache, "decode", limit)
  assert changed == {int(table[last // PAGE]) * PAGE + last % PAGE for table, last in zip(batch.tables, batch.lasts)}

@pytest.mark.parametrize("on", [on_cuda, on_metal])
def test_rows_of_a_prompt(on: Callable):
  """A chunk across pages that lie anywhere, padded past the pages that its sequence has: what is behind goes to page 0"""
  table, cache = [3, 1, 4, 0], np.random.default_rng(1).standard_normal((6 * PAGE, 160)).astype(np.float16)
  changed, _ = written(on, lambda: prefilling(120, 80, tables=[table]), cache, "prefill", 5e-5)
  assert changed == {table[p // PAGE] * PAGE + p % PAGE for p in range(120, 200)}
  assert {row // PAGE for row in changed} == {1, 4, 0}

def test_a_head_left_out(monkeypatch: pytest.MonkeyPatch):
  """… is noticed by the test of all heads"""
  plain = split_attention
  def faulty(*args) -> Tensor:
    context = plain(*args).numpy()
    context[:, 4] = 0
    return Tensor(context)
  monkeypatch.setitem(globals(), "split_attention", faulty)
  with pytest.raises(AssertionError, match="^assert 1.0 < "): test_tensor_cores(SHAPES[1], STEP_16)

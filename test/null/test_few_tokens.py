"""Products of a few tokens by tensor cores without a GPU: every kernel against float64, the worst row and the worst token deciding, on mockcuda."""
from typing import Any, Iterator
import numpy as np, pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from helpers import HALVES, random_weight
from mockcuda import on_cuda
from tinygrad import Device, Tensor, UOp
from tinygrad.apps.mla import RMSNorm
from tinygrad.apps.quantized import QuantizedExpertWeights, QuantizedLinear, QuantizedWeight
from tinygrad.apps.rope import Rope, rope_table
from tinygrad.nn import few_tokens
from tinygrad.nn.few_tokens import (Columns, Floats, Shared, columns, few_expert_down, few_expert_gate_up, few_gate_up, few_heads, few_matmul,
                                    few_queries, few_router, few_sum, launch_warps, row_tiles_of, share_of, tokens_of, two_at_once, warps_of)
from tinygrad.nn.intrinsics import Target, target_of
from tinygrad.nn.kernel import empty, launch, optional
from tinygrad.nn.routing import GROUP, SPARE, Gating, Routing, choose_experts, chosen_groups, group_choices, groups_like, most_groups

pytestmark = pytest.mark.usefixtures("planes_by_numpy")

HALF = 1e-6   # what rounding weights and activations to halves costs a product, of its power

@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
  with on_cuda(): yield

def target() -> Target:
  row = target_of(Device.DEFAULT)
  assert row is not None
  return row

rng = np.random.default_rng
def floats(*shape: int) -> np.ndarray: return rng(shape).standard_normal(shape).astype(np.float32)
def tokens(*shape: int) -> np.ndarray: return floats(*shape).astype(np.float16).astype(np.float32)   # that halves hold
def silu(x: np.ndarray) -> np.ndarray:
  with np.errstate(over="ignore"): return x / (1 + np.exp(-x))
def load(kind: T, *shape: int, cls: type[QuantizedWeight] = QuantizedLinear) -> tuple[QuantizedWeight, np.ndarray]:
  data, want = random_weight(kind, shape)
  return cls.load(kind, shape, data), want.astype(np.float64)
def of(x: np.ndarray) -> Columns: return columns(target(), Tensor(x))[0]
def values_of(x: Columns, width: int) -> np.ndarray:
  """(T, H, width): what a product would read"""
  heads, pieces, T, _ = x.words.shape
  halves = x.words.numpy().view(np.float16).reshape(heads, pieces // 4, 4, T, 4, 2, 2, 2)   # chunk, i, token, unit, quad, pair, number of the pair
  plain = halves.transpose(3, 0, 1, 4, 2, 5, 7, 6).reshape(T, heads, -1)[..., :width]
  return plain.astype(np.float64) * x.factor

def worst(got: np.ndarray, want: np.ndarray) -> float:
  """The error of the worst row, and of the worst token"""
  assert got.shape == want.shape
  error, power = (got - want) ** 2, want ** 2
  return max(float((error.mean(axis) / np.maximum(power.mean(axis), power.mean())).max()) for axis in (0, -1))

# ---- one product ----

def product(kind: T, rows: int, width: int, n: int) -> float:
  weight, want = load(kind, rows, width)
  x = tokens(n, width)
  return worst(few_matmul(target(), of(x), [weight])[0].numpy(), x @ want.T)

@pytest.mark.parametrize("kind", HALVES, ids=lambda k: k.name)
def test_every_type(kind: T): assert product(kind, 33, max(GGML_QUANT_SIZES[kind][0], 96), 9) < HALF

def test_layouts_by_shape():
  """What was faster on a card. Two tiles of rows for two of tokens, where a matrix is large; two blocks at once where they are more than a card has
  multiprocessors, and a lane's weights take more than half of its registers, but not much more"""
  assert [row_tiles_of(rows, tokens) for rows, tokens in ((154880, 8), (154880, 9), (154880, 16), (154880, 17), (16368, 16))] == [1, 2, 2, 1, 1]
  wide = {"attn_output": (8192, 1, 448), "dense gate and up": (7168, 2, 1152), "experts' gate and up": (7168, 2, 128 * 40)}
  others = {"shared gate and up": (7168, 2, 128), "dense down": (18432, 1, 448), "a head": (2048, 1, 9680), "GLM's attn_output": (5120, 1, 320)}
  assert {name: two_at_once(target(), *shape) for name, shape in (wide | others).items()} == {**dict.fromkeys(wide, 512), **dict.fromkeys(others, 0)}

@pytest.mark.parametrize("n", [2, 3, 5, 8, 16, 33, 40, 64])
def test_tokens(n: int): assert product(T.Q4_0, 18, 256, n) < HALF

# warps without a chunk, chunks without a unit, rows that are one chunk and many
@pytest.mark.parametrize("width", [32, 128, 768, 1408, 2816])
def test_widths(width: int): assert product(T.Q5_1, 16, width, 11) < HALF

def test_shares():
  found = [(share.warps, share.chunks) for share in (share_of(width, warps_of(width)) for width in (32, 768, 1408, 2048, 2816, 5120))]
  assert found == [(1, 1), (6, 1), (6, 2), (8, 2), (8, 3), (8, 5)]

def test_two_tiles_of_rows(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(few_tokens, "row_tiles_of", lambda rows, tokens: 2)
  assert product(T.Q4_0, 50, 256, 17) < HALF

def test_small_weights():
  """As good as a half's denormals are, and no less"""
  data, want = random_weight(T.Q6_K, (16, 256))
  blocks = data.reshape(-1, GGML_QUANT_SIZES[T.Q6_K][1])
  blocks[:, 208:210] = np.float16([2e-5]).view(np.uint8)
  small = QuantizedLinear.load(T.Q6_K, (16, 256), data)
  x = tokens(9, 256)
  assert worst(few_matmul(target(), of(x), [small])[0].numpy(), x @ small.dequantize().numpy().T.astype(np.float64)) < 1e-5

def test_alone_or_among_others():
  """A token's bytes are the same wherever it stands, whoever stands beside it"""
  weight, _ = load(T.Q4_K, 16, 512)
  x, others = tokens(16, 512), tokens(40, 512)
  first = few_matmul(target(), of(x), [weight])[0].numpy()
  others[20:36] = x[::-1]
  assert few_matmul(target(), of(others), [weight])[0].numpy()[20:36].tobytes() == first[::-1].tobytes()

# ---- what is put around it ----

def test_norm_and_its_rounding_error():
  x, norm = floats(9, 736), RMSNorm(Tensor(floats(736)).realize(), 1e-5)
  want = norm(Tensor(x)).numpy()
  high, low = (values_of(out, 736)[:, 0] for out in columns(target(), Tensor(x), norm, low=True))
  assert np.abs(high - want).max() < 3e-3 and np.abs(high + low - want).max() < 2e-6

def turned(heads: np.ndarray, rope: Rope, start: np.ndarray) -> np.ndarray:
  """The rotated part of heads, (T, H, head), in float64"""
  angles = rope.table.numpy()[start].astype(np.float64)[:, None]      # (T, 1, pairs, 2)
  even, odd, (cos, sin) = heads[..., rope.nope::2], heads[..., rope.nope + 1::2], (angles[..., i] for i in range(2))
  return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(*heads.shape[:2], -1)

def test_several_matrices():
  """The first rotated, or with a residual; one of another type, with odd rows"""
  (first, first_want), (second, second_want) = load(T.Q4_0, 2 * 48, 256), load(T.Q8_0, 21, 256)
  x, residual, start = tokens(10, 256), floats(10, 96), np.arange(10, dtype=np.int32) * 5 % 47
  rope = Rope(rope_table(32, 1e4, 64), 48, 16)
  exact = x @ first_want.T
  got, beside = few_matmul(target(), of(x), [first, second], Tensor(residual))
  assert worst(got.numpy(), exact + residual) < HALF and worst(beside.numpy(), x @ second_want.T) < HALF
  got, beside = few_matmul(target(), of(x), [first, second], rope=rope, start=Tensor(start))
  heads = exact.reshape(10, 2, 48)
  want = np.concatenate([heads[..., :16], turned(heads, rope, start)], -1)
  assert worst(got.numpy(), want.reshape(10, 96)) < HALF and worst(beside.numpy(), x @ second_want.T) < HALF

# by columns that blocks make and by a launch's, whose factor counts; a head's numbers without position that are whole chunks, and not
@pytest.mark.parametrize("n,nope,factor", [(3, 96, 1.0), (10, 128, 0.5)])
def test_queries(n: int, nope: int, factor: float):
  """A head's parts come apart"""
  weight, want = load(T.Q4_0, 3 * (nope + 32), 256)
  x, start, rope = tokens(n, 256), np.arange(n, dtype=np.int32) * 5 % 47, Rope(rope_table(32, 1e4, 64), nope + 32, nope)
  given = Floats(Tensor(x), 256) if factor == 1.0 else Columns(of(x).words, factor)
  without, rotated = few_queries(target(), given, weight, rope, Tensor(start))
  heads = (factor * x @ want.T).reshape(n, 3, nope + 32)
  assert worst(values_of(without, nope).reshape(n, -1), heads[..., :nope].reshape(n, -1)) < 2 * HALF
  assert worst(rotated.numpy(), turned(heads, rope, start).reshape(n, -1)) < HALF

# a warp a token and several turns, two warps a token, and a part of a warp's numbers that are not there
@pytest.mark.parametrize("n,width,rows", [(3, 256, 20), (8, 736, 16), (8, 2048, 33), (5, 2048, 16), (1, 384, 16)])
def test_blocks_make_columns(n: int, width: int, rows: int):
  """Of RMSNorm(x), as columns() does"""
  (weight, want), (other, other_want) = load(T.Q4_0, rows, width), load(T.Q8_0, 21, width)
  x, norm, residual = floats(n, width) * np.exp(3 * floats(n, 1)), RMSNorm(Tensor(floats(width)).realize(), 1e-5), floats(n, rows)
  exact = norm(Tensor(x)).numpy().astype(np.float64)
  got, beside = few_matmul(target(), Floats(Tensor(x), width, norm), [weight, other], Tensor(residual))
  assert worst(got.numpy(), exact @ want.T + residual) < 2 * HALF and worst(beside.numpy(), exact @ other_want.T) < 2 * HALF

def test_who_makes_columns():
  """Blocks where a launch's are few, and then more warps share a row"""
  def made(n: int, width: int, *rows: int) -> bool:
    weights = [QuantizedLinear.load(T.F16, (1, width), np.zeros((1, 2 * width), np.uint8)) for _ in rows]
    for weight, count in zip(weights, rows): weight.shape = (count, width)
    norm = RMSNorm(Tensor.ones(width).contiguous().realize(), 1e-5)
    return isinstance(tokens_of(target(), Tensor.zeros(n, width).contiguous().realize(), norm, weights), Floats)
  assert made(8, 2048, 768, 576) and made(5, 768, 5120) and not made(9, 2048, 768, 576) and not made(8, 2048, 3072, 576) and not made(8, 7168, 64)
  warps = [launch_warps(*of) for of in ((2048, 8, 768, 576), (5120, 3, 2048), (768, 8, 5120), (2048, 9, 768), (2048, 8, 154880), (10944, 8, 2048))]
  assert warps == [16, 14, 6, 8, 8, 8]

def test_heads():
  """A vector a head, longer than halves hold; the next product undoes the factor"""
  (weight, want), (after, after_want) = load(T.Q8_0, 3, 64, 160), load(T.Q4_0, 20, 192)
  x = tokens(17, 3, 160)
  exact = np.einsum("thi,hoi->tho", x.astype(np.float64), want).reshape(17, 192)
  heads = few_heads(target(), of(x), weight)
  assert worst(values_of(heads, 192)[:, 0], exact) < HALF
  assert worst(few_matmul(target(), heads, [after])[0].numpy(), exact @ after_want.T) < 2 * HALF

@pytest.mark.parametrize("kind,rows,n,width", [(T.F32, 64, 12, 256), (T.F32, 7, 12, 256), (T.Q6_K, 20, 12, 256), (T.F32, 7, 5, 1280)], ids=str)
def test_gate_up_beside_the_router(kind: T, rows: int, n: int, width: int):
  """The router's logits are as good as float32, and several blocks' where a row has more chunks than a block warps"""
  (gate, gate_want), (up, up_want), (router, router_want) = load(T.Q4_0, 64, width), load(T.Q5_K, 64, width), load(kind, rows, width)
  x, norm = floats(n, width), RMSNorm(Tensor.full((width,), 0.125).contiguous().realize(), 1e-5)
  high, low = columns(target(), Tensor(x), norm, low=True)
  exact = values_of(high, width)[:, 0]
  hidden, (logits,) = few_gate_up(target(), high, gate, up, router, low)
  assert worst(values_of(hidden, 64)[:, 0], silu(exact @ gate_want.T) * (exact @ up_want.T)) < 3 * HALF
  want = (exact + values_of(low, width)[:, 0]) @ router_want.T
  assert worst(logits.numpy().sum(0), want) < 1e-11 and logits.shape[0] == (1 if width == 256 else 2)
  assert few_router(target(), high, low, router).numpy().tobytes() == logits.numpy().tobytes()

def choices(n: int, K: int, E: int) -> np.ndarray: return np.stack([rng(i).permutation(E - 1)[:K] for i in range(n)]).astype(np.int32)

@pytest.mark.parametrize("n,K,E", [(1, 4, 64), (2, 4, 7), (9, 3, 4), (16, 2, 5), (33, 3, 4), (64, 8, 384)])
def test_groups(n: int, K: int, E: int):
  """Every choice in one group of its expert, in order; a group that is there is before those that are not"""
  chosen = choices(n, K, E)
  groups = group_choices(target(), Tensor(chosen), E).numpy()
  assert groups.shape == (most_groups(n, K, E) + SPARE, 1 + GROUP)
  are_groups_of(groups, chosen, E)

def are_groups_of(groups: np.ndarray, chosen: np.ndarray, E: int) -> None:
  flat, want = chosen.reshape(-1), []
  for e in range(E):
    own = np.flatnonzero(flat == e).tolist()
    want += [[e, *part, *[-1] * (GROUP - len(part))] for part in (own[i:i + GROUP] for i in range(0, len(own), GROUP))]
  assert groups[:len(want)].tolist() == want and (groups[len(want):-SPARE, 0] == -1).all()

# of experts in two words, in one and a bit, in five; of fewer than a warp's lanes
@pytest.mark.parametrize("gating,n,K,E,parts,bias", [(Gating.SIGMOID, 5, 4, 64, 2, True), (Gating.SOFTMAX, 8, 8, 33, 1, False),
                                                     (Gating.SOFTMAX_WEIGHT, 3, 6, 160, 2, True), (Gating.SOFTMAX, 2, 1, 7, 1, True)])
def test_a_block_chooses_for_all_tokens(gating: Gating, n: int, K: int, E: int, parts: int, bias: bool):
  """The experts of plain ops, many of which are as good as others, with zeros of both signs; their weights, and their groups"""
  logits = np.round(floats(parts, n, E) * 4) / 8
  logits = np.where(logits > 0, 0, logits)
  logits[:, 0] -= 1
  with on_cuda("sm_90"):
    routing = Routing(K, gating, gating != Gating.SOFTMAX, 1.5, Tensor(np.round(floats(E) * 4) / 8).realize() if bias else None)
    chosen, want = (out.numpy() for out in choose_experts(Tensor(logits.sum(0)), routing))
    x = Tensor(logits).realize()
    outs, ins = {"weights": empty(x, n, K), "groups": groups_like(x, n, K, E)}, {"logits": x, **optional(bias=routing.bias)}
    row, thread, shape = target(), UOp.special(256, "lidx0"), x.shape
    weights, groups = launch("choose", outs, ins, lambda buffers: chosen_groups(row, routing, shape, buffers, thread, 0))
    are_groups_of(groups.numpy(), chosen, E)
    assert np.abs(weights.numpy() - want).max() < 1e-6

@pytest.mark.parametrize("n,K,E,D,kind", [(16, 2, 5, 160, T.Q4_0), (33, 3, 4, 160, T.Q4_1), (2, 4, 7, 160, T.Q8_0), (16, 2, 5, 256, T.Q4_0),
                                          (9, 2, 5, 384, T.Q8_0), (9, 2, 5, 256, T.F16)], ids=str)
def test_experts(n: int, K: int, E: int, D: int, kind: T):
  """Experts with more tokens than a product has, and one that nobody chose; rows of whole chunks, whose codes come by shared memory, and not"""
  F = 64
  chosen, x, scale = choices(n, K, E), tokens(n, D) / 8, floats(n, K)
  groups = group_choices(target(), Tensor(chosen), E)
  shapes = (F, D), (F + 32, D), (D - 9, F)
  (gate, gate_want), (up, up_want), (down, down_want) = (load(kind, E, *shape, cls=QuantizedExpertWeights) for shape in shapes)
  up = QuantizedExpertWeights(kind, (E, F, D), {name: plane[:, :F].contiguous().realize() for name, plane in up.planes.items()})
  of_gate, of_up = (np.einsum("ti,tkoi->tko", x.astype(np.float64), want[chosen]) for want in (gate_want, up_want[:, :F]))
  hidden = few_expert_gate_up(target(), of(x), (gate, up), groups, Tensor(scale))
  want = silu(of_gate) * of_up * scale[..., None]
  assert worst(values_of(hidden, F)[:, 0], want.reshape(n * K, F)) < 3 * HALF
  each = few_expert_down(target(), hidden, down, groups, K)
  want = np.einsum("tki,tkoi->tko", want, down_want[chosen])
  assert worst(each.numpy(), want.reshape(n * K, D - 9)) < 5 * HALF
  (shared, shared_want), y = load(T.Q6_K, D - 9, 256), tokens(n, 256)
  each = few_expert_down(target(), hidden, down, groups, K, Shared(shared, Columns(of(y).words, hidden.factor)))
  assert worst(each.numpy()[:n * K], want.reshape(n * K, D - 9)) < 5 * HALF
  assert worst(each.numpy()[n * K:], y @ shared_want.T * hidden.factor) < HALF

def test_sum():
  residual, each = floats(9, 96), floats(27, 96)
  assert worst(few_sum(target(), Tensor(residual), Tensor(each), 3).numpy(), residual + each.reshape(9, 3, 96).sum(1)) < 1e-12
  both = np.concatenate([each, floats(9, 96)])
  assert worst(few_sum(target(), Tensor(residual), Tensor(both), 3).numpy(), residual + each.reshape(9, 3, 96).sum(1) + both[27:]) < 1e-12

# ---- faults ----

@pytest.mark.parametrize("place", [np.s_[8:], np.s_[:, 32:], np.s_[:, 5]], ids=["the last tile of tokens", "the last tile of rows", "a row"])
def test_what_is_left_out_is_noticed(place: Any, monkeypatch: pytest.MonkeyPatch):
  right = few_matmul
  def faulty(*args: Any) -> list[Tensor]:
    out = right(*args)[0].numpy()
    out[place] = 0
    return [Tensor(out)]
  monkeypatch.setitem(globals(), "few_matmul", faulty)
  assert product(T.F16, 33, 96, 9) > HALF

@pytest.mark.parametrize("fault", ["digits", "warp"])
def test_a_fault_in_the_kernel_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch):
  permute = few_tokens.byte_perm
  if fault == "digits": monkeypatch.setattr(few_tokens, "byte_perm", lambda target, low, high, digits: permute(target, low, high, 0x4240))
  else: monkeypatch.setattr(few_tokens, "sum_in_order", lambda values, right=few_tokens.sum_in_order: right(list(values)[:1]))
  monkeypatch.setattr("tinygrad.nn.kernel._programs", {})
  assert product(T.Q8_0, 16, 256, 9) > 1e-3

def test_lanes_that_share_a_place_are_noticed(monkeypatch: pytest.MonkeyPatch):
  """Of the codes that come by way of shared memory"""
  right = few_tokens.copy
  monkeypatch.setattr(few_tokens, "copy", lambda target, to, what: right(target, to.src[0][to.src[1] // 8 * 8], what))
  monkeypatch.setattr("tinygrad.nn.kernel._programs", {})
  with pytest.raises(AssertionError, match="worst"): test_experts(16, 2, 5, 256, T.Q4_0)

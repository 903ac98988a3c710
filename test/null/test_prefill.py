"""Prefill through tensor cores without a GPU: every kernel against float64, a whole step against the naive forward pass, on mockcuda."""
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple
import numpy as np, pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from helpers import HALVES, WIDE, engine_of, names_of, prefilling, random_weight, several_prompts, tied, write_mixed
from mockcuda import on_cuda
from oracle import Judge, errors, nmse, route
from drafting import LEAST
from extra.bench import LANGUAGES, CUDARenderer, no_device, stand_in, with_blocks
from extra.mkgguf import write_model
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.engine.sequence import Piece
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.mla import PREFILL_SIZES, RMSNorm, Transformer
from tinygrad.apps.mtp import MTP, load_block
from tinygrad.apps.quantized import QuantizedExpertWeights, QuantizedLinear
from tinygrad.apps.rope import Rope, rope_table
from tinygrad.engine.realize import compile_linear
from tinygrad.helpers import prod
from tinygrad.nn.halves import half_pair
from tinygrad.nn.kernel import UNIT, Unit, launch
from tinygrad.nn.intrinsics import Target, of_arch, target_of
from tinygrad.nn.matmul import (Halves, add_chosen, expert_gate_up_prefill, gate_up_prefill, grouped_matmul, matmul, matmul_scaled,
                                matmul_split_half, rms_norm_half)
from tinygrad.nn.tiles import Tile
from tinygrad.nn.latent_cache import RowFormat
from tinygrad.nn.mla_prefill import block_of_tokens, mla_prefill
from tinygrad.nn.mla_unabsorbed import unabsorbed
from tinygrad.nn import group_walk, head_rows, mla_prefill_heads, mla_unabsorbed, row_walk
from tinygrad.nn.step import PAGE, STRIP, Step
from tinygrad.nn.routing import Gating, Routing, choose_experts, choose_experts_prefill, most_tiles, sort_by_expert, tile_of_choices
from tinygrad.uop.ops import Ops

pytestmark = pytest.mark.usefixtures("planes_by_numpy")

CHUNK = PREFILL_SIZES[0]

HALF, LIMIT = 1e-6, 1e-5   # NMSE that rounding weights and activations to halves costs a product; a model's logits, cache of halves included

@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
  with on_cuda(): yield

def target() -> Target:
  row = target_of(Device.DEFAULT)
  assert row is not None
  return row

rng = np.random.default_rng
def halves(*shape: int) -> np.ndarray: return rng(shape).standard_normal(shape).astype(np.float16)
def floats(*shape: int) -> np.ndarray: return rng(shape).standard_normal(shape).astype(np.float32)
def silu(x: np.ndarray) -> np.ndarray: return x / (1 + np.exp(-x))
def tokens_of(x: np.ndarray) -> Halves:
  """As the target's products of rows of such a length take them"""
  ordered = group_walk.takes(target(), x.shape[-1])
  return Halves(group_walk.ordered(Tensor(x)).contiguous() if ordered else Tensor(x), ordered=ordered)
def values_of(x: Halves) -> np.ndarray:
  """float64, of the same shape: each number of a token from where it lies"""
  rows = x.x.numpy().astype(np.float64).reshape(x.shape[0], -1) * x.factor
  if x.ordered: rows = rows[:, [group_walk.place(number) for number in range(rows.shape[1])]]
  return rows.reshape(x.shape)

by_warps_and_groups = pytest.mark.parametrize("arch", ["sm_80", "sm_90"])   # nn/row_walk.py, nn/group_walk.py

@by_warps_and_groups
@pytest.mark.parametrize("kind", HALVES, ids=lambda k: k.name)
def test_every_type(kind: T, arch: str):
  """Neither rows nor tokens are whole tiles"""
  shape = (70, max(GGML_QUANT_SIZES[kind][0], 96 if arch == "sm_80" else 256))
  data, want = random_weight(kind, shape)
  tokens = halves(33, shape[1])
  with on_cuda(arch): out = matmul(target(), tokens_of(tokens), QuantizedLinear.load(kind, shape, data)).numpy()
  assert nmse(out, tokens.astype(np.float64) @ want.T.astype(np.float64)) < HALF

@pytest.mark.parametrize("tile", [Tile(144, 256, (1, 8)), Tile(48, 128, (1, 8)), Tile(8, 128, (1, 4)), Tile(16, 64, (1, 4))], ids=str)
def test_tiles_of_groups(tile: Tile, monkeypatch: pytest.MonkeyPatch):
  """More tokens and rows than a tile has, and fewer; one step, and several"""
  monkeypatch.setattr("tinygrad.nn.matmul.tile_of", lambda *_: tile)
  with on_cuda("sm_90"):
    for n, rows, width in ((150, 300, 128), (40, 130, 384)):
      data, want = random_weight(T.Q4_0, (rows, width))
      tokens = halves(n, width)
      out = matmul(target(), tokens_of(tokens), QuantizedLinear.load(T.Q4_0, (rows, width), data)).numpy()
      assert nmse(out, tokens.astype(np.float64) @ want.T.astype(np.float64)) < HALF

def test_order():
  """A product's 16 numbers lie side by side: of four units four each, two and two"""
  numbers = np.arange(256)
  with on_cuda("sm_90"): got = group_walk.ordered(Tensor(numbers.astype(np.int32)[None])).numpy()[0]
  assert [*got[:16]] == [0, 1, 32, 33, 64, 65, 96, 97, 2, 3, 34, 35, 66, 67, 98, 99] and sorted(got) == [*numbers]
  assert all(got[group_walk.place(int(number))] == number for number in numbers)

@pytest.mark.parametrize("n", [2, 32, 70])
@pytest.mark.parametrize("tile", [Tile(64, 128, (1, 4)), Tile(16, 32, (1, 2))], ids=["64x128", "16x32"])
def test_heads_factor_residual(n: int, tile: Tile, monkeypatch: pytest.MonkeyPatch):
  """A matrix a head; the vectors may be longer than what is multiplied"""
  monkeypatch.setattr("tinygrad.nn.matmul.tile_of", lambda *_: tile)
  data, want = random_weight(T.Q8_0, (3, 40, 64))
  weight, tokens, residual = QuantizedLinear.load(T.Q8_0, (3, 40, 64), data), halves(n, 3, 96), floats(n, 3, 40)
  exact = np.einsum("thi,hoi->tho", tokens[..., :64].astype(np.float64), want)
  got = matmul(target(), Halves(Tensor(tokens), 4.), weight, Tensor(residual), 0.125)
  assert nmse(got.numpy(), residual + 0.5 * exact) < HALF

@pytest.mark.parametrize("kind,limit", [(T.Q4_0, 1.01), (T.Q4_1, 1.01), (T.Q6_K, 1.01), (T.Q4_K, 2.5)], ids=["Q4_0", "Q4_1", "Q6_K", "Q4_K"])
def test_weights_as_halves(kind: T, limit: float, monkeypatch: pytest.MonkeyPatch):
  """As good as float32 rounded to halves: bit by bit where the file has halves, nearly where scales are products of its numbers"""
  data, want = random_weight(kind, (32, 256))
  tokens, weight = halves(16, 256), QuantizedLinear.load(kind, (32, 256), data)
  def error() -> float: return nmse(matmul(target(), Tensor(tokens), weight).numpy(), tokens.astype(np.float64) @ want.T.astype(np.float64))
  def rounded(target: Target, unit: Unit) -> list[list[UOp]]:
    weights = unit.weights()
    return [[half_pair(*weights[i + pair:i + pair + 2]) for pair in (0, 2)] for i in range(0, UNIT, 4)]
  by_halves = error()
  monkeypatch.setattr("tinygrad.nn.row_walk.neighbours", rounded)
  monkeypatch.setattr("tinygrad.nn.kernel._programs", {})
  assert by_halves < limit * error()

@pytest.mark.parametrize("shape,tokens,want", [
  ((2048, 5120), 512, (64, 128)), ((768, 2048), 512, (32, 128)), ((5120, 768), 512, (64, 128)), ((10240, 2048), 512, (64, 128)),
  ((768, 2048), 32, (16, 128))])
def test_tile(shape: tuple[int, ...], tokens: int, want: tuple[int, int]):
  """As large as registers allow where there are many"""
  tile = row_walk.tile_of(tokens, [q4_0(*shape)], 1)
  assert (tile.tokens, tile.rows) == want

def q4_0(*shape: int) -> QuantizedLinear:
  planes = {"q0": Tensor.empty(prod(shape) // 8, dtype=dtypes.uint32), "d": Tensor.empty(prod(shape) // 32, dtype=dtypes.half)}
  return QuantizedLinear(T.Q4_0, shape, planes)

@pytest.mark.parametrize("shape,tokens,want", [
  ((2048, 5120), 2048, (128, 256, 8)), ((768, 2048), 2048, (96, 128, 8)), ((2048, 5120), 512, (128, 64, 4)), ((10240, 2048), 512, (128, 64, 4)),
  ((64, 2048), 32, (16, 64, 4))])
def test_tile_of_groups(shape: tuple[int, ...], tokens: int, want: tuple[int, int, int]):
  """Two groups and two tiles of rows a warp where there are enough blocks of them"""
  tile = group_walk.tile_of(tokens, [q4_0(*shape)], 1)
  assert (tile.tokens, tile.rows, tile.warps[1]) == want

@pytest.mark.parametrize("mean,tokens,threads", [(2, 16, 512), (32, 48, 512), (64, 80, 0), (128, 144, 0), (256, 144, 0)])
def test_expert_tile_of_groups(mean: int, tokens: int, threads: int):
  """Most experts' tokens fit one tile, as far as registers go; a multiprocessor has two blocks with few"""
  weights = [q4_0(64, 1536, 2048)] * 2
  tile = group_walk.expert_tile_of(mean, weights)
  assert (tile.tokens, tile.rows, group_walk.resident(tile, weights)) == (tokens, 128, threads)

@pytest.mark.parametrize("mean,tokens", [(2, 8), (8, 16), (32, 48), (64, 80), (128, 80), (256, 96)])
def test_expert_tile(mean: int, tokens: int):
  """Most experts' tokens fit one of a few; of many they make tiles that are full"""
  tile = row_walk.expert_tile_of(mean, [q4_0(64, 1536, 2048)] * 2)
  assert (tile.tokens, tile.rows) == (tokens, 64)

def test_those_who_read_most_begin():
  """The first block of a launch has the last tokens, the last one the first"""
  block, number = block_of_tokens(100, 16), UOp.special(7, "gidx1")
  assert [block.substitute({number: number.const_like(i)}).simplify().arg for i in (0, 3, 6)] == [6, 3, 0]

@by_warps_and_groups
def test_scaled(arch: str):
  """Products that halves do not hold; what takes them undoes the factor"""
  (data, want), (after_data, after_want) = random_weight(T.Q8_0, (2, 64, 64)), random_weight(T.Q8_0, (40, 128))
  tokens = halves(20, 2, 64)
  exact = np.einsum("thi,hoi->tho", tokens.astype(np.float64), want)
  tokens *= np.float16(2 * 65504 / np.abs(exact).max())
  exact = np.einsum("thi,hoi->tho", tokens.astype(np.float64), want)
  with on_cuda(arch):
    weight, after = QuantizedLinear.load(T.Q8_0, (2, 64, 64), data), QuantizedLinear.load(T.Q8_0, (40, 128), after_data)
    heads = matmul_scaled(target(), Tensor(tokens), weight)
    assert np.abs(exact).max() > 65504 and nmse(values_of(heads), exact) < 2 * HALF
    assert nmse(matmul(target(), heads.reshape(20, -1), after).numpy(), exact.reshape(20, -1) @ after_want.T) < 2 * HALF

@by_warps_and_groups
def test_rope(arch: str):
  data, want = random_weight(T.F16, (2 * 48, 128))
  tokens = halves(20, 128)
  with on_cuda(arch):
    weight, rope = QuantizedLinear.load(T.F16, (2 * 48, 128), data), Rope(rope_table(32, 1e4, 64), 48, 16)
    product = Tensor((tokens.astype(np.float64) @ want.T).astype(np.float32))
    got = matmul(target(), tokens_of(tokens), weight, rotation=(rope, Tensor([7], dtype=dtypes.int32))).numpy()
    assert nmse(got, rope.rotate_heads(product, prefilling(7, 20)).numpy().astype(np.float64)) < HALF

@pytest.mark.parametrize("arch,width", [("sm_80", 736), ("sm_90", 736), ("sm_90", 768)])
def test_norm_and_its_rounding_error(arch: str, width: int):
  with on_cuda(arch):
    tokens, norm = floats(5, width), RMSNorm(Tensor(floats(width)).realize(), 1e-5)
    want = norm(Tensor(tokens)).numpy()
    high, low = (values_of(out) for out in rms_norm_half(target(), Tensor(tokens), norm, low=True))
  assert np.abs(high - want).max() < 3e-3 and np.abs(high + low - want).max() < 2e-6

@pytest.mark.parametrize("kind,rows,width,arch", [(T.F32, 64, 512, "sm_80"), (T.F32, 20, 96, "sm_80"), (T.Q6_K, 70, 256, "sm_80"),
                                                  (T.F32, 64, 512, "sm_90"), (T.Q6_K, 70, 768, "sm_90")], ids=lambda v: getattr(v, "name", str(v)))
def test_split_half(kind: T, rows: int, width: int, arch: str):
  """The router's product: as good as float32"""
  data, want = random_weight(kind, (rows, width))
  with on_cuda(arch):
    high, low = rms_norm_half(target(), Tensor(floats(33, width)), RMSNorm(Tensor.ones(width).contiguous().realize(), 1e-5), low=True)
    exact = values_of(high) + values_of(low)
    got = matmul_split_half(target(), high, low, QuantizedLinear.load(kind, (rows, width), data)).numpy().sum(0)
  assert nmse(got, exact @ want.T.astype(np.float64)) < 1e-11

@pytest.mark.parametrize("arch,rows", [("sm_80", 70), ("sm_90", 70), ("sm_90", 128)])
def test_gate_up(arch: str, rows: int):
  (gate_data, gate), (up_data, up) = random_weight(T.Q4_0, (rows, 256)), random_weight(T.Q5_K, (rows, 256))
  tokens = halves(33, 256) / np.float16(8)
  with on_cuda(arch):
    weights = QuantizedLinear.load(T.Q4_0, (rows, 256), gate_data), QuantizedLinear.load(T.Q5_K, (rows, 256), up_data)
    got = values_of(gate_up_prefill(target(), tokens_of(tokens), weights))
  exact = tokens.astype(np.float64)
  assert nmse(got, silu(exact @ gate.T) * (exact @ up.T)) < 2 * HALF

@pytest.mark.parametrize("tokens,K,E", [(2, 2, 5), (100, 4, 16), (512, 4, 9)])
def test_sort_by_expert(tokens: int, K: int, E: int):
  chosen = np.stack([rng(i).permutation(E)[:K] for i in range(tokens)]).astype(np.int32)
  order, counts = (out.numpy() for out in sort_by_expert(target(), Tensor(chosen), E))
  for expert in range(E):
    assert counts[expert] == (chosen == expert).sum()
    assert (order[expert, :counts[expert]] == np.flatnonzero(chosen.reshape(-1) == expert)).all()

@pytest.mark.parametrize("counts,size", [([3, 0, 17, 8, 1], 8), ([0, 0, 5], 16), (rng(0).integers(0, 30, 70).tolist(), 8)], ids=["5", "3", "70"])
def test_tiles_of_choices(counts: list[int], size: int):
  """Each expert's choices are in some tile, once, and there are no other tiles"""
  n = most_tiles(sum(counts), len(counts), size)
  def body(buffers: dict[str, UOp]) -> list[UOp]:
    number, lane = UOp.special(n, "gidx0"), UOp.special(32, "lidx0")
    found = tile_of_choices(target(), buffers["counts"], len(counts), size, number, lane)
    return [buffers["out"][(number * 2 + i).valid(lane.eq(0))].store(of_tile.cast(dtypes.int)) for i, of_tile in enumerate(found)]
  out, = launch("tiles_of_choices", {"out": Tensor.empty(n, 2, dtype=dtypes.int)}, {"counts": Tensor(np.int32(counts))}, body)
  want = [(expert, tile) for expert, count in enumerate(counts) for tile in range(-(-count // size))]
  assert [(expert, tile) for expert, tile in out.tolist() if tile * size < counts[expert]] == want

@pytest.mark.parametrize("T,K,D", [(3, 4, 2048), (2, 6, 2080), (5, 1, 96)])
def test_what_experts_give_is_added(T: int, K: int, D: int):
  x, each = floats(T, D), halves(T, K, D)
  got = add_chosen(target(), Tensor(x), Halves(Tensor(each), 4.)).numpy()
  assert np.allclose(got, x + 4 * each.astype(np.float64).sum(1), rtol=1e-5, atol=1e-5)

@pytest.mark.parametrize("arch,F,D", [("sm_80", 70, 96), ("sm_90", 70, 256), ("sm_90", 128, 128)])
def test_experts(arch: str, F: int, D: int):
  """More tokens of an expert than a tile has, and an expert that nobody chose"""
  n, K, E = 50, 2, 4
  chosen, (data, want) = np.tile(np.int32([[0, 2], [3, 0]]), (25, 1)), random_weight(T.Q4_1, (E, F, D))
  tokens, scale, hidden = halves(n, D) / np.float16(16), floats(n, K), halves(n, K, D)   # hidden: an x for each choice
  exact = np.einsum("ti,tkoi->tko", tokens.astype(np.float64), want[chosen])
  with on_cuda(arch):
    weight, order = QuantizedExpertWeights.load(T.Q4_1, (E, F, D), data), sort_by_expert(target(), Tensor(chosen), E)
    got = expert_gate_up_prefill(target(), tokens_of(tokens), (weight, weight), order, Tensor(scale))
    assert nmse(values_of(got), silu(exact) * exact * scale[..., None]) < 2 * HALF
    assert nmse(values_of(grouped_matmul(target(), tokens_of(tokens), weight, order, K)), exact) < HALF
    def down() -> np.ndarray: return values_of(grouped_matmul(target(), replace(tokens_of(hidden), factor=.5), weight, order, K))
    assert nmse(down(), .5 * np.einsum("tki,tkoi->tko", hidden.astype(np.float64), want[chosen])) < HALF
    assert down().tobytes() == down().tobytes()

# experts that are ranked all at once, and a warp's first, whose warps have none, some and all of the best, and many of the same choice
@pytest.mark.parametrize("gating,experts,count", [*((gating, 40, 4) for gating in Gating), *((gating, 384, 8) for gating in Gating),
                                                  (Gating.SIGMOID, 128, 16), (Gating.SIGMOID, 160, 17)])
def test_choice(gating: Gating, experts: int, count: int):
  def some(*shape: int) -> Tensor: return Tensor(np.round(floats(*shape) * 8) / np.float32(8)).realize()
  logits, bias = some(9, experts), some(experts) if gating == Gating.SIGMOID and experts == 40 else None
  if experts > 40: logits = (logits + Tensor(np.float32([[i // 32 % 12 == t for i in range(experts)] for t in range(9)]) * 8)).realize()
  routing = Routing(count, gating, gating != Gating.SOFTMAX, 1.8, bias)
  part = some(2, 9, experts)   # of logits that are added up
  for whole in (logits, part):
    wants = choose_experts(whole if whole is logits else whole.sum(0), routing)
    for got, want in zip(choose_experts_prefill(target(), whole, routing), wants, strict=True):
      assert np.allclose(got.numpy(), want.numpy(), atol=1e-6)

# experts and groups: lanes that share an expert; threads that have none; experts of DeepSeek-V3
@pytest.mark.parametrize("gating,experts,groups,used", [(Gating.SIGMOID, 16, 4, 2), (Gating.SOFTMAX, 40, 10, 2), (Gating.SIGMOID, 256, 8, 4)])
def test_choice_in_groups(gating: Gating, experts: int, groups: int, used: int):
  how = Routing(4, gating, True, 1.8, None, groups, used)
  logits, bias = tied(12, how, experts)
  if gating == Gating.SOFTMAX: bias = None
  else: how = replace(how, bias=Tensor(bias).realize())
  want, want_weights, _ = route(logits, bias, names_of(how))
  sel, weights = choose_experts_prefill(target(), Tensor(logits).realize(), how)
  assert np.array_equal(sel.numpy(), want) and np.allclose(weights.numpy(), want_weights, atol=1e-6)

# tokens, heads, latent, rope, a head's length, position, cache: a step at the cache's start, tokens that are no whole tile, the cache's very end
@pytest.mark.parametrize("n,H,L,R,head,pos,C", [(32, 2, 128, 64, 80, 0, 96), (20, 3, 128, 32, 64, 47, 67), (16, 1, 512, 64, 256, 40, 64)])
def test_attention(n: int, H: int, L: int, R: int, head: int, pos: int, C: int):
  check_attention(mla_prefill, n, H, L, R, head, pos, C)

# … of the form with several heads a block: all heads in one, each in its own, some; a last page that is half full
@pytest.mark.parametrize("n,H,L,R,head,pos,C", [(32, 2, 128, 64, 80, 0, 96), (20, 7, 128, 64, 64, 47, 67), (3, 6, 256, 64, 64, 125, 128),
                                                (33, 10, 128, 64, 72, 100, 133), (19, 5, 512, 64, 256, 70, 96)])
def test_attention_of_heads(n: int, H: int, L: int, R: int, head: int, pos: int, C: int, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(mla_prefill_heads, "MULTIPROCESSORS", 1)   # as few blocks as there can be
  with on_cuda("sm_90"):
    assert mla_prefill_heads.takes(target(), RowFormat(L, R), n, H)
    check_attention(mla_prefill_heads.mla_prefill_heads, n, H, L, R, head, pos, C)

@pytest.mark.parametrize("arch,tokens,heads,want", [("sm_90", 512, 20, 5), ("sm_90", 256, 20, 4), ("sm_90", 128, 20, 2), ("sm_90", 32, 20, 1),
                                                    ("sm_100", 512, 16, 4), ("sm_90", 512, 7, 1), ("sm_80", 512, 20, 2), ("sm_89", 512, 20, None)])
def test_heads_of_a_block(arch: str, tokens: int, heads: int, want: int | None):
  assert mla_prefill_heads.heads_of_block(of_arch(arch), 576, tokens, heads) == want

def check_attention(form: Callable, n: int, H: int, L: int, R: int, head: int, pos: int, C: int) -> None:
  pages = -(-C // PAGE)
  latent, q, cache = floats(n, H, L), floats(n, H * head), halves(pages * PAGE, L + R)
  table = rng(n).permutation(pages + 3)[:pages]          # pages lie anywhere in the pool
  pool = np.full((pages + 3, PAGE, L + R), np.nan, np.float16)
  pool[table] = cache.reshape(pages, PAGE, -1)
  step = prefilling(pos, n, tables=table[None])
  got = form(target(), Tensor(latent), Tensor(q), Tensor(pool.reshape(-1, L + R)), step, .1).numpy().astype(np.float64)
  query = np.concatenate([latent, q.reshape(n, H, head)[..., -R:]], -1).astype(np.float64)
  scores = np.einsum("thd,cd->thc", query, cache.astype(np.float64)) * .1
  scores[np.broadcast_to((np.arange(len(cache)) > pos + np.arange(n)[:, None])[:, None], scores.shape)] = -np.inf
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  assert nmse(got, weights / weights.sum(-1, keepdims=True) @ cache[:, :L].astype(np.float64)) < HALF

@pytest.mark.parametrize("kind,shape", [(T.Q8_0, (2, 70, 64)), (T.Q4_K, (1, 3, 256)), (T.F16, (3, 128, 32))], ids=["Q8_0", "Q4_K", "F16"])
def test_weights_become_halves(kind: T, shape: tuple[int, int, int]):
  """Each of them, and transposed"""
  data, want = random_weight(kind, shape)
  weight = QuantizedLinear.load(kind, shape, data)
  for transposed, matrices in ((False, want), (True, want.transpose(0, 2, 1))):
    got = head_rows.as_halves(target(), weight, transposed).numpy().reshape(matrices.shape)
    assert np.allclose(got, matrices.astype(np.float16), rtol=2e-3, atol=1e-6)

class Paged(NamedTuple):
  """A prompt's step over a cache whose pages lie anywhere in the pool; what else is there is no number"""
  step: Step
  pool: Tensor
  rows: np.ndarray   # by position, float64
  @staticmethod
  def of(pos: int, tokens: int, rows: int, latent: int, rotated: int) -> "Paged":
    """rows: of the cache. The rotated part is as large as keys by heads_of are"""
    pages, dim = -(-rows // PAGE), latent + rotated
    cache, table = halves(pages * PAGE, dim), rng(tokens).permutation(pages + 3)[:pages]
    cache[:, latent:] *= 500
    pool = np.full((pages + 3, PAGE, dim), np.nan, np.float16)
    pool[table] = cache.reshape(pages, PAGE, dim)
    return Paged(prefilling(pos, tokens, tables=table[None]), Tensor(pool.reshape(-1, dim)), cache.astype(np.float64))

def heads_of(H: int, L: int, nope: int, v: int) -> tuple[QuantizedLinear, np.ndarray, QuantizedLinear, np.ndarray]:
  """k_b and v_b, and what they stand for, float64"""
  (k, keys), (values_data, values) = random_weight(T.Q8_0, (H, L, nope)), random_weight(T.Q4_0, (H, v, L))
  return (QuantizedLinear.load(T.Q8_0, (H, L, nope), k), keys.reshape(H, L, nope).astype(np.float64),
          QuantizedLinear.load(T.Q4_0, (H, v, L), values_data), values.reshape(H, v, L).astype(np.float64))

# tokens, heads, latent, rope, nope, value, position, cache: one tile; several turns of a block, a tile of rows that is not whole; a page's middle
@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "sm_89"])
@pytest.mark.parametrize("n,H,L,R,nope,v,pos,C", [(32, 1, 64, 16, 32, 32, 0, 64), (40, 3, 128, 32, 64, 48, 300, 448),
                                                  (100, 2, 192, 32, 96, 128, 95, 256)])
def test_head_rows(arch: str, n: int, H: int, L: int, R: int, nope: int, v: int, pos: int, C: int, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(head_rows, "MULTIPROCESSORS", 2)   # so that a block makes several tiles
  with on_cuda(arch):
    paged, (k_b, k, v_b, values) = Paged.of(pos, n, C, L, R), heads_of(H, L, nope, v)
    end = (pos + n - 1) // PAGE * PAGE + PAGE
    got = head_rows.head_rows(target(), paged.step, paged.pool, k_b, v_b).numpy()[:end].astype(np.float64)
    rows = paged.rows[:end, :L]
    want = np.concatenate([np.einsum("cl,hln->chn", rows, k).reshape(end, -1), np.einsum("cl,hvl->chv", rows, values).reshape(end, -1) / 64], 1)
    assert nmse(got[:, :H * nope], want[:, :H * nope]) < HALF and nmse(got[:, H * nope:], want[:, H * nope:]) < HALF

# … a step at the cache's start; tokens that are no whole block; the shapes of GLM-4.7-Flash and of DeepSeek; a page's middle. All blocks have all of
# their positions (1), some have parts (4), all have (132)
SMALL_HEADS = (32, 2, 128, 64, 64, 64, 0, 96), (150, 3, 128, 32, 64, 48, 47, 256)
@pytest.mark.parametrize("multiprocessors,arch,sizes", [
  *[(count, "sm_90", sizes) for sizes in SMALL_HEADS for count in (1, 4, 132)], (132, "sm_90", (130, 2, 512, 64, 192, 256, 70, 256)),
  (132, "sm_89", (33, 2, 512, 64, 192, 256, 60, 128)), (1, "sm_80", (70, 2, 512, 64, 128, 128, 129, 256))])
def test_unabsorbed(multiprocessors: int, arch: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(mla_unabsorbed, "MULTIPROCESSORS", multiprocessors)
  with on_cuda(arch): check_unabsorbed(*sizes)

@pytest.mark.parametrize("jobs,want", [(320, (264, 56, 2)), (256, (256, 0, 1)), (64, (0, 64, 2)), (132, (132, 0, 1)), (8, (0, 8, 8))])
def test_shares(jobs: int, want: tuple[int, int, int]):
  shares = mla_unabsorbed.Shares.of(jobs)
  assert (shares.whole, shares.rest, shares.parts) == want

def check_unabsorbed(n: int, H: int, L: int, R: int, nope: int, v: int, pos: int, C: int) -> None:
  paged, (k_b, k, v_b, values), q, scale = Paged.of(pos, n, C, L, R), heads_of(H, L, nope, v), halves(n, H * (nope + R)), .002 / L ** .5
  got = unabsorbed(target(), Tensor(q), paged.pool, k_b, v_b, paged.step, scale)
  latent, rotated = paged.rows[:, :L], paged.rows[:, L:]
  keys = np.concatenate([np.einsum("cl,hln->hcn", latent, k), np.broadcast_to(rotated, (H, *rotated.shape))], -1)
  scores = np.einsum("thd,hcd->thc", q.reshape(n, H, -1).astype(np.float64), keys) * scale
  scores[np.broadcast_to((np.arange(len(latent)) > pos + np.arange(n)[:, None])[:, None], scores.shape)] = -np.inf
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  want = np.einsum("thc,hcv->thv", weights / weights.sum(-1, keepdims=True), np.einsum("cl,hvl->hcv", latent, values))
  assert nmse(values_of(got).reshape(n, H, v), want) < 4 * HALF   # keys and values are halves, too

@pytest.mark.parametrize("arch,key,value,want", [
  ("sm_90", 256, 256, (128, 64)), ("sm_80", 256, 256, (128, 64)), ("sm_89", 256, 256, (64, 64)), ("sm_120", 192, 128, (128, 64)),
  ("sm_89", 320, 256, (64, 32)), ("sm_90", 320, 512, None), ("sm_75", 192, 128, None)])
def test_unabsorbed_blocks(arch: str, key: int, value: int, want: tuple[int, int] | None):
  assert mla_unabsorbed.block_shape(of_arch(arch), key, value) == want

@pytest.mark.parametrize("family,arch,least", [("glm", "sm_80", 1024), ("glm", "sm_90", 512), ("ds2lite", "sm_80", 512), ("ds2lite", "sm_90", 256),
                                               ("youtu", "sm_90", 256), ("kimi", "sm_90", 256)])
def test_chunks_that_are_not_absorbed(family: str, arch: str, least: int, monkeypatch: pytest.MonkeyPatch):
  """From a size on; what the longest make for each position is taken into account"""
  monkeypatch.setitem(LANGUAGES, "CUDA", (CUDARenderer, arch))
  with no_device("CUDA"):
    model = Transformer.from_gguf(with_blocks(stand_in(family), [0, 1]), 4096)
    runner = Runner(model)
    def names(size: int) -> list[str]: return [call.src[0].arg.name for call in runner.record_chunk(size, compiled=False).calls]
    own = {size: any(name.startswith("head_rows") for name in names(size)) for size in runner.sizes}
    assert own == {size: size >= least for size in own} and runner.beside == (600 if arch == "sm_90" else 256)
    c = model.config
    assert model.head_row_bytes == 2 * model.pages * PAGE * c.n_heads * (c.nope_dim + c.v_dim)
  with no_device("METAL"): assert Transformer.from_gguf(with_blocks(stand_in(family), [0]), 4096).head_row_bytes == 0

@pytest.mark.parametrize("family,size", [("glm", 1024), ("ds2lite", 512)], ids=["some whole", "all in parts"])
def test_kernels_have_no_more_than_they_use(family: str, size: int):
  """A CUDA graph refuses a launch with a buffer that its kernel does not have"""
  with no_device("CUDA"):
    calls = Runner(Transformer.from_gguf(with_blocks(stand_in(family), [0, 1]), 2048)).record_chunk(size, compiled=False).calls
    own = [call for call in calls if call.src[0].arg.name.startswith(("as_halves", "head_rows", "unabsorbed", "combined"))]
    assert len({call.src[0].arg.name.split("_")[0] for call in own}) == 4
    for call, compiled in zip(own, compile_linear(UOp(Ops.LINEAR, src=tuple(own))).src):
      source = next(u.arg for u in compiled.src[0].src if u.op is Ops.SOURCE)
      head = source.split("__global__", 1)[1].split(") {", 1)[0]
      assert len(set(re.findall(r"\bdata\d+_", head))) == len(call.src) - 1, head

@pytest.mark.parametrize("kernel,test,args,place", [
  ("matmul", test_every_type, (T.F16, "sm_90"), np.s_[32:]), ("matmul", test_every_type, (T.F16, "sm_80"), np.s_[:, 64:]),
  ("mla_prefill", test_attention, (20, 3, 128, 32, 64, 47, 67), np.s_[16:]),
  ("mla_prefill", test_attention, (20, 3, 128, 32, 64, 47, 67), np.s_[:, 2])], ids=["tokens", "rows", "queries", "head"])
def test_the_last_tile_left_out(kernel: str, test: Callable, args: tuple, place: Any, monkeypatch: pytest.MonkeyPatch):
  """… is noticed by the kernel's own test"""
  right = globals()[kernel]
  def faulty(*args: Any) -> Tensor:
    out = right(*args).numpy()
    out[place] = 0
    return Tensor(out)
  monkeypatch.setitem(globals(), kernel, faulty)
  with pytest.raises(AssertionError, match="where .* = nmse"): test(*args)

@by_warps_and_groups
@pytest.mark.parametrize("family,types,sizes", [
  ("small-glm", "Q4_0 Q8_0 Q6_K Q5_K", dict(q_lora=256, experts=5)), ("small-ds", "Q4_K F16 Q5_0", dict(blocks=1, dense=0))])
def test_model(family: str, types: str, sizes: dict[str, int], arch: str, tmp_path: Path):
  """Two steps, the second one padded; what decoding continues with is what a cache written token by token gives"""
  path = write_mixed(tmp_path / "m.gguf", family, [T[name] for name in types.split()], **WIDE | sizes, seed=1)
  ids = rng(1).integers(0, 320, CHUNK + 9).tolist()
  with on_cuda(arch):
    model = engine_of(path, 64)
    Judge(path, ids).check(model.logits(ids), LIMIT)
    model.forget()
    tokens = list(model.generate(ids, 4))
    model.forget()
    for end in range(1, len(ids) + 1, 8): model.prefill(ids[:end])  # so few at a time that they are decoded
    assert list(model.generate(ids, 4)) == tokens

@pytest.mark.parametrize("rotated", [32, 64], ids=["mla_prefill", "mla_prefill_heads"])
def test_several_prompts_in_one_step(rotated: int, tmp_path: Path):
  path, = write_model(tmp_path / "m.gguf", "small-glm", "Q8_0", seed=1, **LEAST | dict(rope=rotated))
  with on_cuda("sm_80"):
    assert mla_prefill_heads.takes(target(), RowFormat(LEAST["kv_lora"], rotated), 4 * STRIP, LEAST["heads"]) == (rotated == 64)
    several_prompts(Transformer.from_gguf(read_gguf(path), 160), path, LIMIT)

def test_prompts_that_share_a_chunk(tmp_path: Path):
  """Their rows, and those of the block that drafts, are what each has by itself"""
  path, = write_model(tmp_path / "m.gguf", "small-glm", "Q8_0", seed=1, mtp=True, **LEAST | dict(rope=64))
  ids, n = rng(1).integers(0, 320, 60).tolist(), 2 * STRIP
  with on_cuda("sm_80"):
    f = read_gguf(path)
    model = Transformer.from_gguf(f, 128, pool=lambda _: 7)
    runner = Runner(model, 1, MTP(model, load_block(f, model.config)))
    assert runner.shares and runner.mtp is not None
    def rows(page: int, count: int) -> list[np.ndarray]: return [cache.numpy()[page * PAGE:][:count] for cache in (*model.cache, runner.mtp.cache)]
    first, second = Piece(0, ids[:n - 3], 0, [1], ids[n - 3]), Piece(n, ids[40:40 + STRIP], 30, [3, 4], ids[40 + STRIP])
    for page in (3, 6): runner.prefill([Piece(0, ids[10:40], 0, [page], ids[40])], n)
    runner.prefill([first, second], 4 * STRIP, shared=True)
    alone = first._replace(table=[5]), second._replace(at=0, table=[6, 2])
    for piece in alone: runner.prefill([piece], n)
    for page, single, count in ((1, 5, n - 3), (3, 6, 30 + STRIP)):
      for got, want in zip(rows(page, count), rows(single, count), strict=True):
        assert want.any(1).all() and errors(got, want).max() < LIMIT
    model.batch_invariant = True   # prompts, too, are read as alone
    assert not Runner(model).shares

@pytest.mark.parametrize("size,want", [(256, 19), (512, 20), (2048, 21)])
def test_launches(size: int, want: int):
  """What a block with experts adds to a step of so many tokens"""
  file = stand_in("glm")
  with no_device("CUDA"):
    def count(blocks: list[int]) -> int:
      model = Transformer.from_gguf(with_blocks(file, blocks), 4096)
      return len(Runner(model).record_chunk(size, compiled=False).calls)
    assert count([0, 1, 2]) - count([0, 1]) == want

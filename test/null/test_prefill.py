"""Prefill through tensor cores without a GPU: every kernel against float64, a whole step against the naive forward pass, on mockcuda."""
from pathlib import Path
from typing import Any, Callable, Iterator
import numpy as np, pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from helpers import HALVES, WIDE, generator, random_weight, write_mixed
from mockcuda import on_cuda
from oracle import Judge, nmse
from extra.bench import no_device, stand_in, with_blocks
from tinygrad import Device, Tensor, dtypes
from tinygrad.apps.engine.engine import Generator
from tinygrad.apps.mla import PREFILL_STEPS, RMSNorm, Transformer
from tinygrad.apps.quantized import QuantizedExpertWeights, QuantizedLinear
from tinygrad.apps.rope import Rope, rope_table
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.matmul import HALF_SCALE, TILE_32x64, TILE_64x64, gate_up_prefill, matmul, grouped_matmul, rms_norm_half, matmul_split_half
from tinygrad.nn.mla_prefill import mla_prefill
from tinygrad.nn.step import Step
from tinygrad.nn.routing import Routing, sort_by_expert, choose_experts, choose_experts_prefill

CHUNK = PREFILL_STEPS[0]

HALF, LIMIT = 1e-6, 1e-5   # NMSE that rounding weights and activations to halves costs a product; a model's logits, cache of halves included

@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
  with on_cuda(): yield

rng = np.random.default_rng
def halves(*shape: int) -> np.ndarray: return rng(shape).standard_normal(shape).astype(np.float16)
def floats(*shape: int) -> np.ndarray: return rng(shape).standard_normal(shape).astype(np.float32)
def silu(x: np.ndarray) -> np.ndarray: return x / (1 + np.exp(-x))

@pytest.mark.parametrize("kind", HALVES, ids=lambda k: k.name)
def test_every_type(kind: T):
  """Neither rows nor tokens are whole tiles"""
  shape = (70, max(GGML_QUANT_SIZES[kind][0], 96))
  data, want = random_weight(kind, shape)
  x = halves(33, shape[1])
  y = matmul(target_of(Device.DEFAULT), Tensor(x), QuantizedLinear.load(kind, shape, data))
  assert nmse(y.numpy(), x.astype(np.float64) @ want.T.astype(np.float64)) < HALF

@pytest.mark.parametrize("tokens", [2, 32, 70])
@pytest.mark.parametrize("tile", [TILE_64x64, TILE_32x64], ids=["wide", "narrow"])
def test_heads_factor_residual(tokens: int, tile, monkeypatch):
  """A matrix a head; the vectors may be longer than what is multiplied"""
  monkeypatch.setattr("tinygrad.nn.matmul.tile_of", lambda tokens, rows: tile)
  data, want = random_weight(T.Q8_0, (3, 40, 64))
  w, x, residual = QuantizedLinear.load(T.Q8_0, (3, 40, 64), data), halves(tokens, 3, 96), floats(tokens, 3, 40)
  got = matmul(target_of(Device.DEFAULT), Tensor(x), w, Tensor(residual), 0.5).numpy()
  assert nmse(got, residual + 0.5 * np.einsum("thi,hoi->tho", x[..., :64].astype(np.float64), want)) < HALF

def test_rope():
  data, want = random_weight(T.F16, (2 * 48, 64))
  w, x = QuantizedLinear.load(T.F16, (2 * 48, 64), data), halves(20, 64)
  rope = Rope(rope_table(32, 1e4, 64), 48, 16)
  product = Tensor((x.astype(np.float64) @ want.T).astype(np.float32))
  got = matmul(target_of(Device.DEFAULT), Tensor(x), w, rope=rope, pos=Tensor([7], dtype=dtypes.int32)).numpy()
  assert nmse(got, rope.rotate_heads(product, Step.prefill(7, 20)).numpy().astype(np.float64)) < HALF

def test_norm_and_what_halves_leave_out():
  x, norm = floats(5, 736), RMSNorm(Tensor(floats(736)).realize(), 1e-5)
  want = norm(Tensor(x)).numpy()
  high, low = (t.numpy() for t in rms_norm_half(target_of(Device.DEFAULT), Tensor(x), norm, low=True))
  assert np.abs(high - want).max() < 3e-3 and np.abs(high.astype(np.float32) + low - want).max() < 2e-6

@pytest.mark.parametrize("kind,rows,width", [(T.F32, 64, 512), (T.F32, 20, 96), (T.Q6_K, 70, 256)], ids=lambda v: getattr(v, "name", str(v)))
def test_precise(kind: T, rows: int, width: int):
  """The router's product: as good as float32"""
  data, want = random_weight(kind, (rows, width))
  x = floats(33, width)
  high, low = rms_norm_half(target_of(Device.DEFAULT), Tensor(x), RMSNorm(Tensor.ones(width).contiguous().realize(), 1e-5), low=True)
  exact = high.numpy().astype(np.float64) + low.numpy()
  got = matmul_split_half(target_of(Device.DEFAULT), high, low, QuantizedLinear.load(kind, (rows, width), data)).numpy()
  assert nmse(got, exact @ want.T.astype(np.float64)) < 1e-11

def test_gate_up():
  a, gate = random_weight(T.Q4_0, (70, 64))
  x = halves(33, 64) / np.float16(8)
  w = QuantizedLinear.load(T.Q4_0, (70, 64), a)
  got = gate_up_prefill(target_of(Device.DEFAULT), Tensor(x), (w, w)).numpy() / HALF_SCALE
  p = x.astype(np.float64) @ gate.T
  assert nmse(got, silu(p) * p) < 2 * HALF

@pytest.mark.parametrize("tokens,K,E", [(2, 2, 5), (100, 4, 16), (512, 4, 9)])
def test_sort_by_expert(tokens: int, K: int, E: int):
  sel = np.stack([rng(i).permutation(E)[:K] for i in range(tokens)]).astype(np.int32)
  order, counts = (t.numpy() for t in sort_by_expert(target_of(Device.DEFAULT), Tensor(sel), E))
  for e in range(E): assert counts[e] == (sel == e).sum() and (order[e, :counts[e]] == np.flatnonzero(sel.reshape(-1) == e)).all()

def test_experts():
  """More tokens of an expert than a tile has, and an expert that nobody chose"""
  tokens, K, E, F, D = 50, 2, 4, 70, 96
  sel = np.tile(np.int32([[0, 2], [3, 0]]), (25, 1))
  chosen, (data, want) = sort_by_expert(target_of(Device.DEFAULT), Tensor(sel), E), random_weight(T.Q4_1, (E, F, D))
  w = QuantizedExpertWeights.load(T.Q4_1, (E, F, D), data)
  x, scale, hidden = halves(tokens, D) / np.float16(16), floats(tokens, K), halves(tokens, K, D)
  p = np.einsum("ti,tkoi->tko", x.astype(np.float64), want[sel])
  got = grouped_matmul(target_of(Device.DEFAULT), Tensor(x), (w, w), chosen, K, Tensor(scale)).numpy().astype(np.float64) / HALF_SCALE
  assert nmse(got, silu(p) * p * scale[..., None]) < 2 * HALF
  def down() -> np.ndarray: return grouped_matmul(target_of(Device.DEFAULT), Tensor(hidden), [w], chosen, K, factor=.5).numpy()
  assert nmse(down(), .5 * np.einsum("tki,tkoi->tko", hidden.astype(np.float64), want[sel])) < HALF
  assert down().tobytes() == down().tobytes()

@pytest.mark.parametrize("gating", [1, 2, 3])
def test_choice(gating: int):
  x, bias = Tensor(floats(9, 40)).realize(), Tensor(floats(40)).realize() if gating == 2 else None
  how = Routing(4, gating, gating != 1, 1.8, bias)
  for a, b in zip(choose_experts_prefill(target_of(Device.DEFAULT), x, how), choose_experts(x, how)):
    assert np.allclose(a.numpy(), b.numpy(), atol=1e-6)

# tokens, heads, latent, rope, a head's length, position, cache: a step at the cache's start, tokens that are no whole tile, the cache's very end
@pytest.mark.parametrize("n,H,L,R,head,pos,C", [(32, 2, 128, 64, 80, 0, 96), (20, 3, 128, 32, 64, 47, 67), (16, 1, 512, 64, 256, 40, 64)])
def test_attention(n: int, H: int, L: int, R: int, head: int, pos: int, C: int):
  latent, q, cache = floats(n, H, L), floats(n, H * head), halves(C, L + R)
  got = mla_prefill(target_of(Device.DEFAULT), Tensor(latent), Tensor(q), Tensor(cache), Tensor([pos], dtype=dtypes.int32), .1)
  got = got.numpy().astype(np.float64)
  query = np.concatenate([latent, q.reshape(n, H, head)[..., -R:]], -1).astype(np.float64)
  scores = np.einsum("thd,cd->thc", query, cache.astype(np.float64)) * .1
  scores[np.broadcast_to((np.arange(C) > pos + np.arange(n)[:, None])[:, None], scores.shape)] = -np.inf
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  assert nmse(got, weights / weights.sum(-1, keepdims=True) @ cache[:, :L].astype(np.float64)) < HALF

@pytest.mark.parametrize("kernel,test,args,place", [
  ("matmul", test_every_type, (T.F16,), np.s_[32:]), ("matmul", test_every_type, (T.F16,), np.s_[:, 64:]),
  ("mla_prefill", test_attention, (20, 3, 128, 32, 64, 47, 67), np.s_[16:]),
  ("mla_prefill", test_attention, (20, 3, 128, 32, 64, 47, 67), np.s_[:, 2])], ids=["tokens", "rows", "queries", "head"])
def test_the_last_tile_left_out(kernel: str, test: Callable, args: tuple, place: Any, monkeypatch: pytest.MonkeyPatch):
  """… is noticed by the kernel's own test"""
  plain = globals()[kernel]
  def faulty(*args, **kw) -> Tensor:
    y = plain(*args, **kw).numpy()
    y[place] = 0
    return Tensor(y)
  monkeypatch.setitem(globals(), kernel, faulty)
  with pytest.raises(AssertionError, match="where .* = nmse"): test(*args)

@pytest.mark.parametrize("family,types,sizes", [("small-glm", "Q4_0 Q8_0 Q6_K Q5_K", dict(q_lora=256, experts=5)), ("small-ds", "Q4_K F16 Q5_0", {})])
def test_model(family: str, types: str, sizes: dict[str, int], tmp_path: Path):
  """Two steps, the second one padded; what decoding continues with is what a cache written token by token gives"""
  path = write_mixed(tmp_path / "m.gguf", family, [T[t] for t in types.split()], **WIDE | sizes, seed=1)
  ids = rng(1).integers(0, 320, CHUNK + 9).tolist()
  g = generator(path, 64)
  Judge(path, ids).check(g.logits(ids), LIMIT)
  g.forget()
  tokens = list(g.generate(ids, 4))
  g.forget()
  for i in range(0, len(ids), 8): g.prefill(ids[:i + 1])  # so few at a time that they are decoded
  assert list(g.generate(ids, 4)) == tokens

def test_launches():
  """Of a step of 512 tokens, what a block with experts adds"""
  f = stand_in("glm")
  with no_device("CUDA"):
    def count(blocks: list[int]) -> int:
      return len(Generator(Transformer.from_gguf(with_blocks(f, blocks), 1024)).build_prefill(512, compiled=False).calls)
    assert count([0, 1, 2]) - count([0, 1]) == 20

"""The hand-written MSL against float64 products of what the gguf package dequantizes, and the choice of experts against the plain ops."""
from typing import Iterator
import numpy as np, pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from helpers import random_weight
from mockmetal import on_metal
from oracle import nmse
from tinygrad import Tensor
from tinygrad.apps.mla import RMSNorm
from tinygrad.apps.quantized import FORMATS, QuantizedExpertWeights, QuantizedLinear
from tinygrad.nn import routing
from tinygrad.nn.metal_mul_mat_id import expert_down_msl, expert_gate_up_msl, gate_up_msl, mul_mat_msl

LIMIT = 1e-10  # NMSE: the order of float32 sums

@pytest.fixture(autouse=True)
def metal() -> Iterator[None]:
  with on_metal(): yield

def normal(*shape:int) -> np.ndarray: return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
def on_device(*arrays:np.ndarray) -> list[Tensor]: return [Tensor(a).realize() for a in arrays]
def check(y:Tensor, exact:np.ndarray) -> None:
  assert nmse(y.numpy(), exact) < LIMIT
def linear(kind:T, *shape:int) -> tuple[QuantizedLinear|QuantizedExpertWeights, np.ndarray]:
  data, want = random_weight(kind, shape)
  return (QuantizedExpertWeights if len(shape) == 3 else QuantizedLinear).load(kind, shape, data), want.astype(np.float64)
def silu(x:np.ndarray) -> np.ndarray: return x * (1 + np.tanh(x / 2)) / 2

@pytest.mark.parametrize("kind", [k for k, f in FORMATS.items() if f.values is None], ids=lambda k: k.name)
def test_every_type(kind:T):
  """mul_mat_id: each expert, and ids out of range; rows that are no multiple of what a SIMD-group takes"""
  width = 3 * max(GGML_QUANT_SIZES[kind][0], 32)
  (w, want), x, sel = linear(kind, 3, 7, width), normal(1, 1, width), np.int32([[2, 0, 1, -5, 99]])
  check(mul_mat_msl(*on_device(x), w, *on_device(sel)), np.einsum("i,koi->ko", x[0, 0], want[[2, 0, 1, 0, 2]])[None])

# one unit, a lane without work, lanes with one more than others, DeepSeek-V2-Lite's rows; a vector for each expert
@pytest.mark.parametrize("kind,rows,width", [(T.Q4_0, 1, 32), (T.Q8_0, 33, 480), (T.Q4_0, 17, 544), (T.Q5_0, 16, 1408)],
                         ids=lambda v: getattr(v, "name", str(v)))
def test_shapes(kind:T, rows:int, width:int):
  (w, want), (stack, wants), x = linear(kind, rows, width), linear(kind, 2, rows, width), normal(1, 2, width)
  check(mul_mat_msl(*on_device(x[:, 0]), w, residual=Tensor(normal(1, rows)).realize()), normal(1, rows) + x[0, :1] @ want.T)
  check(mul_mat_msl(*on_device(x), stack, *on_device(np.int32([[1, 0]]))), np.einsum("ki,koi->ko", x[0], wants[[1, 0]])[None])

@pytest.mark.parametrize("kind", [T.Q5_K, T.Q8_0], ids=lambda k: k.name)
def test_gate_up_beside_the_router(kind:T):
  (gate, g), (up, u), (router, r), x, norm = linear(kind, 19, 512), linear(kind, 19, 512), linear(T.F32, 9, 512), normal(1, 512), normal(512)
  n = x.astype(np.float64) * norm / np.sqrt((x.astype(np.float64) ** 2).mean() + 1e-5)
  tx, = on_device(x)
  y, logits = gate_up_msl(tx, RMSNorm(*on_device(norm), 1e-5), (gate, up), router)
  check(y, silu(n @ g.T) * (n @ u.T))
  check(logits, n @ r.T)

@pytest.mark.parametrize("gating,bias,normalize,experts", [
  (routing.SIGMOID, True, True, 64), (routing.SOFTMAX, False, False, 70), (routing.SOFTMAX_WEIGHT, True, True, 5)])
def test_the_choice_and_its_gate_up(gating:int, bias:bool, normalize:bool, experts:int):
  (gate, g), (up, u) = linear(T.Q4_0, experts, 5, 64), linear(T.Q4_0, experts, 5, 64)
  x, norm, logits, b = normal(1, 64), normal(64), normal(1, experts), normal(experts) * 0.1
  logits[0, [1, 3]] = 4                                    # a tie
  tx, tnorm, tlogits, tb = on_device(x, norm, logits, b)
  how = routing.Routing(4, gating, normalize, 1.8, tb if bias else None)
  want_sel, weights = (t.numpy() for t in routing.choose_experts(tlogits, how))
  y, sel = expert_gate_up_msl(tx, RMSNorm(tnorm, 1e-6), (gate, up), tlogits, how)
  n = (x.astype(np.float64) * norm / np.sqrt((x.astype(np.float64) ** 2).mean() + 1e-6))[0]
  check(y, (silu(g[want_sel[0]] @ n) * (u[want_sel[0]] @ n) * weights[0][:, None])[None])
  np.testing.assert_equal(sel.numpy(), want_sel)

@pytest.mark.parametrize("shared_kind", [None, T.Q6_K, T.Q8_0], ids=str)
def test_down(shared_kind:T|None):
  (down, d), hidden, residual, sel = linear(T.Q4_1, 3, 21, 96), normal(1, 4, 96), normal(1, 21), np.int32([[2, 0, 7, 1]])
  want, shared = residual + np.einsum("ki,koi->o", hidden[0], d[[2, 0, 2, 1]]), None
  if shared_kind is not None:
    (w, s), x = linear(shared_kind, 21, 256), normal(1, 256)
    want, shared = want + x @ s.T, (*on_device(x), w)
  th, tsel, tresidual = on_device(hidden, sel, residual)
  check(expert_down_msl(th, down, tsel, tresidual, shared), want)

"""The launch that makes one or two tokens' queries of q_a's output, on the mock of CUDA, against plain ops: q_b, k_b a head, rotation, the cache."""
from __future__ import annotations
import math
from typing import NamedTuple
import numpy as np, pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from helpers import decoding, random_weight
from mockcuda import on_cuda
from tinygrad import Device, Tensor, dtypes
from tinygrad.apps.mla import RMSNorm
from tinygrad.apps.quantized import QuantizedLinear
from tinygrad.apps.rope import Rope, Temperature, query_table, rope_table
from tinygrad.nn import lora_query, split_kv
from tinygrad.nn.intrinsics import HOPPER, OF_CAPABILITY, target_of
from tinygrad.nn.latent_cache import Pages, RowFormat, write_rows
from tinygrad.nn.lora_query import QueryLaunch, QueryWeights
from tinygrad.nn.norm_linear import mul_mat, norm_linear
from tinygrad.nn.primitive import plain_ops
from tinygrad.nn.step import PAGE

pytestmark = pytest.mark.usefixtures("planes_by_numpy")

class Shape(NamedTuple):
  heads: int
  nope: int
  width: int
  q_b: T = T.Q4_0
  k_b: T = T.Q8_0
  latent: int = 128
  rotated: int = 32
  coded: bool = False   # rows of the cache
  tokens: int = 1       # of a sequence each

def weight(kind: T, *shape: int) -> QuantizedLinear: return QuantizedLinear.load(kind, shape, random_weight(kind, shape)[0])
def normal(seed: int, *shape: int) -> np.ndarray: return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

class Arguments:
  def __init__(self, shape: Shape):
    H, nope, width, q_b, k_b, L, R, coded, tokens = shape
    self.row, self.step = RowFormat(L, R, coded), decoding(*[70, 3][:tokens])
    self.q_a, self.kv = Tensor(normal(1, tokens, width)), Tensor(normal(2, tokens, L + R))
    # random weights are large: queries are to be halves
    self.q_norm, self.norm = RMSNorm(Tensor(1e-3 * (1 + 0.1 * normal(3, width))), 1e-5), RMSNorm(Tensor(1 + 0.1 * normal(4, L)), 1e-5)
    self.q_b, self.k_b, self.rope = weight(q_b, H * (nope + R), width), weight(k_b, H, L, nope), Rope(rope_table(R, 1e4, 128), nope + R, nope)
    self.cache = Tensor(normal(5, (2 * tokens + 2) * PAGE, L + R).astype(np.float16))
    if coded: self.cache = self.row.encoded(self.cache)
    self.cache = self.cache.contiguous().realize()

def made(shape: Shape) -> list[np.ndarray]:
  """Latent queries (T, H, L), rotated parts (T, H, R), the cache (C, L+R), by the launch"""
  a, H, L, tokens = Arguments(shape), shape.heads, shape.latent, shape.tokens
  target = target_of(Device.DEFAULT)
  assert lora_query.takes(target, a.q_b, a.k_b, a.rope, tokens)
  q_latent, q_rope, cache = lora_query.lora_query(a.step, a.q_a, a.kv, QueryWeights(a.q_norm, a.q_b), a.k_b, a.norm, a.cache, a.rope)
  Tensor.realize(q_latent, q_rope, cache)
  queries = q_latent.numpy().reshape(tokens, -1).astype(np.float32)
  if split_kv.uses_tensor_cores(target, Pages.of(a.cache, a.step, L).format):
    head, number = np.meshgrid(np.arange(H), np.arange(L), indexing="ij")
    queries = queries[:, split_kv.query_place(head, number, L)]
  return [queries.reshape(tokens, H, L), q_rope.numpy().reshape(tokens, H, -1), a.row.decoded(cache).numpy().astype(np.float32)]

def wanted(shape: Shape) -> list[np.ndarray]:
  with plain_ops():
    a, (H, nope, L) = Arguments(shape), (shape.heads, shape.nope, shape.latent)
    q = norm_linear(a.step, a.q_a, a.q_norm, [a.q_b], a.rope)[0].reshape(shape.tokens, H, -1)
    row = a.norm(a.kv[:, :L]).cat(a.rope.rotate(a.kv[:, L:], a.step), dim=-1)
    cache = write_rows(a.step, a.cache, row, L)
    return [mul_mat(q[..., :nope], a.k_b).numpy(), q[..., nope:].numpy(), a.row.decoded(cache).numpy().astype(np.float32)]

def worst_row(got: np.ndarray, want: np.ndarray) -> float:
  assert got.shape == want.shape
  error, power = (((x.astype(np.float64)) ** 2).sum(-1) for x in (got - want, want))
  return float((error / power).max())

def check(shape: Shape) -> None:
  with on_cuda("sm_90"): got = made(shape)
  for own, right, limit in zip(got, wanted(shape), (3e-4, 1e-4, 1e-4 if shape.coded else 1e-6), strict=True): assert worst_row(own, right) < limit

SHAPES = [Shape(3, 64, 256), Shape(5, 192, 768), Shape(3, 128, 1536, T.Q4_0, T.Q4_0, 512, 64), Shape(2, 96, 800, T.Q5_0, T.Q8_0, 256, 64, True),
          Shape(3, 256, 256, T.Q4_K, T.Q8_0), Shape(5, 64, 768, T.Q6_K, T.Q5_1, 256, 64), Shape(3, 64, 256, T.Q8_0, T.Q8_0, 192, 34)]
SHAPES += [Shape(5, 192, 768, tokens=2), Shape(2, 96, 800, T.Q5_0, T.Q8_0, 256, 64, True, tokens=2),
           Shape(3, 64, 256, T.Q8_0, T.Q8_0, 192, 34, tokens=2)]
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_queries(shape: Shape): check(shape)

def launch_of(heads: int, nope: int, width: int, kinds: tuple[T, T] = (T.Q4_0, T.Q8_0), tokens: int = 1) -> QueryLaunch | None:
  q_b, k_b = (QuantizedLinear(kind, shape, {"all": Tensor.empty(math.prod(shape) // 32 * size, dtype=dtypes.uint8)})
              for kind, shape, size in zip(kinds, ((heads * (nope + 64), width), (heads, 512, nope)), (GGML_QUANT_SIZES[k][1] for k in kinds)))
  return QueryLaunch.of(HOPPER, q_b, k_b, tokens)

@pytest.mark.parametrize("shape,tokens,shares,blocks", [((20, 192, 768), 1, 4, 101), ((20, 192, 768), 2, 4, 102), ((20, 192, 768), 3, None, 0),
                                                        ((16, 128, 1536), 1, 4, 97), ((16, 128, 1536), 2, 4, 98),
                                                        ((8, 128, 1536), 1, 8, 81),
                                                        ((64, 128, 1536), 1, None, 0), ((20, 192, 1536), 1, None, 0)])
def test_who_takes_it(shape: tuple[int, int, int], tokens: int, shares: int | None, blocks: int):
  """GLM-4.7-Flash, Youtu-LLM, an eighth of Kimi-K2. Not all of Kimi-K2, whose blocks would not run at once; nor what has no room in registers"""
  launch = launch_of(*shape, tokens=tokens)
  assert (launch.shares if launch else None) == shares and (launch is None or launch.blocks == blocks)

def test_who_has_no_launch_for_it():
  """Before Hopper; floats; queries whose numbers without position grow"""
  with on_cuda("sm_90"):
    a = Arguments(SHAPES[0])
    growing = Rope(a.rope.table, a.rope.head, a.rope.nope, query_table(Temperature(.5, 4), 64, 32, 1e4, 128))
    floats = weight(T.F16, *a.q_b.shape)
    takes = [lora_query.takes(target, q_b, a.k_b, rope, 1) for target, q_b, rope in (
      (HOPPER, a.q_b, a.rope), (OF_CAPABILITY[86], a.q_b, a.rope), (HOPPER, floats, a.rope), (HOPPER, a.q_b, growing), (None, a.q_b, a.rope))]
    assert takes == [True, False, False, False, False]

"""The GPUs' products without a GPU: what is rendered for CUDA and Metal, and what it computes when run on the host (mockcuda, mockmetal)."""
import re
from typing import Iterator
import numpy as np, pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from helpers import HALVES, decoding, random_weight
from mockcuda import on_cuda
from mockmetal import on_metal
from oracle import nmse
from tinygrad import Device, Tensor, UOp
from tinygrad.apps.quantized import FORMATS, QuantizedExpertWeights, QuantizedLinear
from tinygrad.engine.realize import lower_and_compile
from tinygrad.nn.kernel import UNIT, launch
from tinygrad.nn.norm_linear import norm_linear
from tinygrad.uop.ops import Ops

pytestmark = pytest.mark.usefixtures("planes_by_numpy")

FOUR_BITS = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.IQ4_XS, T.MXFP4]  # the low nibbles of 32 weights are 16 bytes

GPUS = {"cuda": on_cuda, "metal": on_metal}
both = pytest.mark.parametrize("gpu", GPUS, indirect=True)

@pytest.fixture(autouse=True)
def gpu(request:pytest.FixtureRequest) -> Iterator[None]:
  with GPUS[getattr(request, "param", "cuda")](): yield

def kernels(y: Tensor) -> list[str]:
  """The sources of what y, not yet computed, takes"""
  linear = lower_and_compile(y.linear_with_vars()[0])
  return [call.src[0].src[2].arg for call in linear.src if call.src[0].op is Ops.PROGRAM]

def check(y: Tensor, exact: np.ndarray, integer: bool) -> None:
  """Within what activations of 8 bits cost, or (no integer codes, or no product of bytes) the order of float32 sums. The largest of 32 numbers, about
  2σ, has 127 steps, and rounding costs a twelfth of a step's square: the errors' variance is 2.5e-5 of the sums', and six deviations are too many."""
  got = y.numpy()
  assert got.shape == exact.shape and got.dtype == np.float32
  if integer and Device.DEFAULT != "METAL": assert np.square(got - exact).max() < 6 ** 2 * 2.5e-5 * np.square(exact).mean()
  else: assert nmse(got, exact) < 1e-11

def normal(*shape: int) -> np.ndarray: return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)

@both
@pytest.mark.parametrize("kind", HALVES, ids=lambda k: k.name)
def test_every_type(kind: T):
  """Experts by id, seven rows each: the source's form, and what comes out"""
  shape = (3, 7, 3 * max(GGML_QUANT_SIZES[kind][0], 32))
  data, want = random_weight(kind, shape)
  w = QuantizedExpertWeights.load(kind, shape, data)
  x, sel = normal(2, 1, shape[2]), np.int32([[2, 0, 2], [1, 1, 2]])
  tx, tsel = Tensor(x).realize(), Tensor(sel).realize()
  source, = kernels(w(tx, tsel))                                           # one kernel
  before, after = source.split("__syncthreads();" if "__global__" in source else "threadgroup_barrier(mem_flags::mem_threadgroup);", 1)
  assert not re.search(r"\bdata[1-9]\d*_\d+\b", after)                    # every weight is on its way before anyone waits
  lines = source.splitlines()
  stores = [i for i, line in enumerate(lines) if re.match(r"\s*\*.*\bdata0_\d+\b.* = ", line)]
  assert stores and all(lines[i - 1].strip().startswith("if (") for i in stores)  # seven rows are no whole teams
  if kind in FOUR_BITS: assert re.search(r"\*\(\((device )?uint4\*\)\(\(data", before)
  check(w(tx, tsel), np.einsum("ti,tkoi->tko", x[:, 0], want.astype(np.float64)[sel]), w.integer)

@both
@pytest.mark.parametrize("kind", [k for k in HALVES if k in FORMATS], ids=lambda k: k.name)
def test_a_units_weights(kind: T):
  """Each of them, as a lane has it: what the gguf package makes of the block"""
  rows, units = 16, 16
  data, want = random_weight(kind, (rows, units * UNIT))
  weight = QuantizedLinear.load(kind, want.shape, data)
  assert weight.integer == (not FORMATS[kind].values or Device.DEFAULT != "METAL")   # where bytes can be looked up
  def body(buffers: dict[str, UOp]) -> list[UOp]:
    row, number = UOp.special(rows, "gidx0"), UOp.special(units, "lidx0")
    unit = weight.matrix(buffers, "w")(row, number, None)
    return [buffers["y"][(row * units + number) * UNIT + i].store(value) for i, value in enumerate(unit.weights())]
  got, = launch(f"weights_{weight.label}", {"y": Tensor.empty(*want.shape)}, weight.args("w"), body)
  np.testing.assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-6 * np.abs(want).max())

# a single unit, one short of a warp, tails of a warp, a row over several warps, x too wide for shared memory; 1408 and 2816 are DeepSeek-V2-Lite's
SHAPES = [
  (T.Q4_0, 1, 32), (T.Q4_0, 33, 64), (T.Q4_0, 5, 992), (T.Q4_0, 16, 2048), (T.Q4_0, 5, 5120), (T.Q4_0, 1, 4128),
  (T.Q5_0, 6, 1408), (T.Q8_0, 3, 2816), (T.Q6_K, 3, 1536), (T.F16, 5, 992), (T.F16, 3, 4128), (T.F16, 3, 12800)]

@pytest.mark.parametrize("gpu,kind,rows,width", [("cuda", *s) for s in SHAPES] + [("metal", *s) for s in SHAPES[1:10:3]], indirect=["gpu"],
                         ids=lambda v: getattr(v, "name", str(v)))
def test_shapes(kind: T, rows: int, width: int):
  data, want = random_weight(kind, (rows, width))
  w, x = QuantizedLinear.load(kind, (rows, width), data), normal(24, width)
  check(w(Tensor(x)), x @ want.astype(np.float64).T, w.integer)

@pytest.mark.parametrize("kind", [T.Q5_1, T.BF16, T.IQ4_NL], ids=lambda k: k.name)
def test_a_matrix_a_head(kind: T):
  data, want = random_weight(kind, (3, 9, 192))
  w, x = QuantizedLinear.load(kind, (3, 9, 192), data), normal(2, 3, 192)
  check(w(Tensor(x)), np.einsum("thi,hoi->tho", x, want.astype(np.float64)), w.integer)

@both
def test_an_id_out_of_range_reads_nothing_else():
  data, want = random_weight(T.Q4_0, (3, 4, 64))
  w, x = QuantizedExpertWeights.load(T.Q4_0, (3, 4, 64), data), normal(24, 1, 64)
  sel = np.tile(np.int32([[-5, 99]]), (24, 1))
  check(w(Tensor(x), Tensor(sel)), np.einsum("ti,koi->tko", x[:, 0], want[[0, 2]].astype(np.float64)), True)

def test_the_same_bytes_twice():
  data, _ = random_weight(T.Q4_K, (40, 512))
  w, x = QuantizedLinear.load(T.Q4_K, (40, 512), data), Tensor(normal(1, 512)).realize()
  assert w(x).numpy().tobytes() == w(x).numpy().tobytes()

@both
@pytest.mark.parametrize("rows", [33, 34])
def test_a_residual_where_rows_are_no_whole_teams(rows: int):
  """The last team's idle lanes read nothing past the residual's end"""
  data, want = random_weight(T.Q4_0, (rows, 64))
  w, x, residual = QuantizedLinear.load(T.Q4_0, (rows, 64), data), normal(1, 64), normal(1, rows)
  y, = norm_linear(decoding(0), Tensor(x).realize(), None, [w], residual=Tensor(residual).realize())
  check(y, residual + x @ want.astype(np.float64).T, True)

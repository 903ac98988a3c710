"""What tinygrad itself schedules and renders for Metal, against numpy: the mock under everything else, or a Mac."""
from typing import Iterator
import numpy as np, pytest
from mockmetal import on_metal
from tinygrad import Device, Tensor, TinyJit, Variable, dtypes
from tinygrad.apps.capture import batches
from tinygrad.dtype import DType
from tinygrad.engine.realize import lower_and_compile

@pytest.fixture(autouse=True)
def metal() -> Iterator[None]:
  with on_metal(): yield

def normal(*shape:int) -> np.ndarray: return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
def close(got:Tensor, want:np.ndarray, tolerance:float=1e-5) -> None: np.testing.assert_allclose(got.float().numpy(), want, tolerance, tolerance)
def softmax(x:np.ndarray) -> np.ndarray:
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)

def test_elementwise():
  x, y = normal(37, 53), normal(53)
  close((Tensor(x) * Tensor(y)).sin() + Tensor(x).exp() - Tensor(y).abs().sqrt(), np.sin(x * y) + np.exp(x) - np.sqrt(abs(y)))

def test_softmax(): close(Tensor(x := normal(7, 1031)).softmax(-1), softmax(x))

def test_sum_over_a_threadgroup(): close(Tensor(x := normal(2, 20000)).sum(-1), x.sum(-1), 1e-3)

def test_argmax(): np.testing.assert_equal(Tensor(x := normal(3, 1025)).argmax(-1).numpy(), x.argmax(-1))

@pytest.mark.parametrize("dtype", [dtypes.float, dtypes.half, dtypes.bfloat16], ids=str)
def test_matmul_on_simdgroup_matrices(dtype:DType):
  a, b = (Tensor(normal(*shape)).cast(dtype).realize() for shape in ((32, 40), (40, 24)))
  call, = lower_and_compile(a.matmul(b, dtype=dtypes.float).linear_with_vars()[0]).src
  assert "simdgroup_multiply_accumulate" in call.src[0].src[2].arg
  close(a.matmul(b, dtype=dtypes.float), a.float().numpy() @ b.float().numpy(), 1e-4)

def test_half_rounds_at_every_step():
  h = normal(1000).astype(np.float16)
  np.testing.assert_equal((Tensor(h) * Tensor(h) + Tensor(h)).numpy(), h * h + h)

def test_bfloat_rounds():
  x = normal(1000)
  bits = x.view(np.uint32).astype(np.uint64)
  want = ((bits + 0x7fff + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)  # to even
  np.testing.assert_equal(Tensor(x).bfloat16().float().numpy(), want)

def test_bytes_as_other_types():
  b = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
  np.testing.assert_equal(((Tensor(b) & 15) ^ (Tensor(b) >> 4)).numpy(), (b & 15) ^ (b >> 4))
  np.testing.assert_equal(Tensor(b).bitcast(dtypes.uint32).numpy(), b.view(np.uint32))

def test_symbolic_jit():
  """Attention over a cache that grows: a variable in the graph, a launch whose size depends on it, all in one batch"""
  cache, seen = Tensor.zeros(64, 32).contiguous().realize(), np.zeros((64, 32), np.float32)
  @TinyJit
  def step(x:Tensor, pos:Variable) -> Tensor:
    cache[pos:pos + 1].assign(x).realize()
    keys = cache[:pos + 1]
    return ((keys * x).sum(-1).softmax().reshape(1, pos + 1) @ keys).realize()
  pos = Variable("pos", 0, 63)
  for i in range(6):
    seen[i] = x = normal(1, 32)[0] * (i + 1) / 6
    close(step(Tensor(x[None]).realize(), pos.bind(i)), (softmax(seen[:i + 1] @ x) @ seen[:i + 1])[None], 1e-4)
  # the paravirtual GPU of a hosted Mac has no graphs
  if Device["METAL"].graph is not None: assert [len(calls) > 1 for calls in batches(step.captured.linear)] == [True]

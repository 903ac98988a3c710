"""A captured batch on the CPU's threads: what it computes is what the kernels compute one by one, time and again."""
from __future__ import annotations
import numpy as np, pytest
from tinygrad import Device, Tensor, TinyJit, Variable, dtypes
from tinygrad.helpers import Context
from tinygrad.nn import cpu

pytestmark = pytest.mark.skipif(cpu.device() is None, reason="not on the CPU")

def chain(x: Tensor, n) -> tuple[Tensor, Tensor]:
  """Wide kernels, which share threads, between narrow ones"""
  for i in range(8): x = ((x * 1.5 + i).contiguous() - x.sum().reshape(1).contiguous() * 1e-6).contiguous()
  return x.realize(), (x[:n].sum() + n).realize()

def test_inputs_and_variables():
  from tinygrad.runtime.graph.cpu import CPUGraph
  assert Device[Device.DEFAULT].graph is CPUGraph
  jit, length = TinyJit(chain), Variable("n", 1, 300)
  for n in (3, 3, 5, 299, 4, 77):
    x = Tensor(np.random.default_rng(n).standard_normal((300, 400)).astype(np.float32)).realize()
    for _ in range(3):
      got, total = (t.numpy() for t in jit(x, length.bind(n)))
      with Context(JIT=0): want, expected = (t.numpy() for t in chain(x, n))
      np.testing.assert_array_equal(got, want)
      np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-2)

@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads(threads: int):
  """The same bytes whatever the number of threads, run after run"""
  rng = np.random.default_rng(0)
  x, w = (Tensor(rng.standard_normal(s).astype(np.float32)).realize() for s in ((1, 64), (203, 64)))
  from gguf import GGMLQuantizationType as T
  from tinygrad.apps.quantized import QuantizedLinear
  m = QuantizedLinear.load(T.F32, (203, 64), w.numpy().reshape(-1).view(np.uint8))
  want = m(x).numpy()
  with Context(NUM_CPU_THREADS=threads):
    jit = TinyJit(lambda x: [m(x).realize(), (x + 1).realize()])
    for _ in range(20): np.testing.assert_array_equal(jit(x)[0].numpy(), want)

"""A target's small matrix product and where it says that a lane's elements lie."""
import numpy as np, pytest
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.kernel import launch
from mockcuda import on_cuda
from mockmetal import on_metal

def on_turing(): return on_cuda("sm_75")

@pytest.mark.parametrize("on", [on_cuda, on_turing, on_metal])
def test_fragments(on):
  rng = np.random.default_rng(0)
  with on():
    m = target_of(Device.DEFAULT).mma
    a, b, c = (rng.standard_normal(s).astype(np.float16) for s in ((m.M, m.K), (m.K, m.N), (m.M, m.N)))
    def body(buffers):
      lane = UOp.special(32, "lidx0")
      def read(name, place, columns, n): return [buffers[name][row * columns + column].load() for row, column in (place(lane, i) for i in range(n))]
      d = m(read("a", m.a, m.K, m.counts[0]), read("b", m.b, m.N, m.counts[1]), read("c", m.c, m.N, m.counts[2]))
      return [buffers["y"][(place := m.c(lane, i))[0] * m.N + place[1]].store(x) for i, x in enumerate(d)]
    y, = launch("mma", {"y": Tensor.empty(m.M, m.N, dtype=dtypes.float)}, {"a": Tensor(a), "b": Tensor(b), "c": Tensor(c).cast(dtypes.float)}, body)
    np.testing.assert_allclose(y.numpy(), a.astype(np.float32) @ b.astype(np.float32) + c, atol=1e-3)

"""What shares a kernel with what, for every target, with no device: by default, with no switch."""
import pytest
from fusion import CASES, rms
from scheduled import TARGETS, count, empty, on, programs
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import Context
from tinygrad.schedule.indexing import Rows, fusion_pays, rows_of
from tinygrad.uop.ops import Ops, UOp

@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [n for n in CASES if "softmax" not in n])
def test_own_axis(name:str, target:str):
  c = CASES[name]
  assert count(target, lambda: c.run(empty(*c.shape))) == c.most(target not in ("NULL", "CPU"))

def ffn(x:Tensor, hidden:int) -> Tensor:
  return ((x @ empty(2048, hidden)).silu() * (x @ empty(2048, hidden))) @ empty(hidden, 2048)

@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("hidden", (10240, 16384))
def test_feed_forward(hidden:int, target:str):
  """The hidden state goes through memory: nobody computes it again for each output, nobody keeps it in a threadgroup's memory"""
  assert count(target, lambda: ffn(empty(1, 2048), hidden)) == 2

@pytest.mark.parametrize("target", TARGETS)
def test_norm_and_matvec(target:str): assert count(target, lambda: rms(empty(1, 2048)) @ empty(2048, 2048)) == 2

@pytest.mark.parametrize("target", TARGETS)
def test_two_products(target:str): assert count(target, lambda: (lambda x: (x @ empty(512, 640)).silu() * (x @ empty(512, 640)))(empty(1, 512))) == 1

@pytest.mark.parametrize("target", TARGETS)
def test_norm_of_two_readers(target:str):
  """A scale that two kernels read is computed once"""
  def run() -> Tensor:
    x = empty(4, 512)
    scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return Tensor.cat((x * scale).contiguous(), (x * scale * 2).contiguous())
  assert count(target, run) == 4

@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", (dtypes.float, dtypes.half))
def test_a_number_reads_too(dtype:DType, target:str):
  """A loss and its gradients: the convolution, the loss, which is one number, and a kernel for each gradient; the convolution is done once"""
  def run() -> list[Tensor]:
    image, w = Tensor.empty(2, 3, 64, 64, dtype=dtype), Tensor.empty(16, 3, 3, 3, dtype=dtype)
    return [image.conv2d(w).relu().mean().backward(), image.grad, w.grad]
  with Context(SPLIT_REDUCEOP=0): assert count(target, run) == 4

def test_a_long_row_keeps_the_device():
  """One row of a vocabulary is the whole device's work; many rows are a team's each"""
  def long(rows:int) -> Rows:
    r, d, i = UOp.range(rows, 0), UOp.range(151936, 1), UOp.range(151936, 2)
    x = UOp.placeholder((rows * 151936,), dtypes.float, 0)
    total = x.index(r * 151936 + d).reduce(d, arg=(Ops.ADD, 0))
    value = x.index(r * 151936 + i) * total
    found = rows_of(value, (r, i), value.toposort())
    assert found is not None and found.inner == (i,)
    return found
  assert not fusion_pays(long(1), has_local=True) and fusion_pays(long(128), has_local=True) and fusion_pays(long(1), has_local=False)

def test_the_user_says_how():
  """PCONTIG still means what it means in the wheel"""
  with on("CUDA"), Context(PCONTIG=2): assert len(programs(lambda: ffn(empty(1, 2048), 96))) == 1

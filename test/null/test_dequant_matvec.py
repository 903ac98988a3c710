"""Which opts sums get on GPUs, with no device: matrix times vector on every block format above all, written in plain ops."""
import math, re
from typing import Callable
import numpy as np, pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from extra.bench import no_device, shared_bytes
from helpers import HALVES
from tinygrad import Device, Tensor, Variable, dtypes
from tinygrad.apps.capture import collected_calls
from tinygrad.apps.quantized import FORMATS, QuantizedExpertWeights, QuantizedLinear, QuantizedWeight
from tinygrad.codegen.opt import OptOps
from tinygrad.codegen.opt.heuristic import RESIDENT_THREADS, threads_of
from tinygrad.engine.realize import compile_linear
from tinygrad.nn.primitive import plain_ops
from tinygrad.uop.ops import Ops, UOp

GPUS = ("CUDA", "METAL")
on_gpus = pytest.mark.parametrize("target", GPUS)

def empty(*shape:int, dtype=dtypes.float) -> Tensor: return Tensor.empty(*shape, dtype=dtype)
def weights(cls:type[QuantizedWeight], kind:T, *shape:int) -> QuantizedWeight:
  elements, nbytes = GGML_QUANT_SIZES[kind]
  return cls.load(kind, shape, np.empty(math.prod(shape) // elements * nbytes, np.uint8))
def linear(kind:T, *shape:int) -> QuantizedWeight: return weights(QuantizedLinear, kind, *shape)
def experts(kind:T, *shape:int) -> QuantizedWeight: return weights(QuantizedExpertWeights, kind, *shape)

class Kernel:
  def __init__(self, program:UOp):
    self.opts, self.source = program.src[0].arg.applied_opts, program.src[2].arg
    self.blocks, self.threads = math.prod(program.arg.global_size), math.prod(program.arg.local_size or (1,))
    assert shared_bytes(program) <= Device[Device.DEFAULT].renderer.shared_max and self.threads <= 1024
  def amounts(self, op:OptOps) -> list[int]: return [o.arg for o in self.opts if o.op is op]

def kernels(target:str, run:Callable[[], Tensor]) -> list[Kernel]:
  with plain_ops(), no_device(target):
    with collected_calls() as calls: run().realize()
    return [Kernel(c.src[0]) for c in compile_linear(UOp(Ops.LINEAR, src=tuple(calls))).src]
def kernel(target:str, run:Callable[[], Tensor]) -> Kernel:
  k, = kernels(target, run)
  return k
def is_shared(k:Kernel) -> bool: return bool(k.amounts(OptOps.GROUP)) and not k.amounts(OptOps.GROUPTOP)

def check(k:Kernel, kind:T) -> None:
  """Threads lie along a row; one takes 16 numbers of it, or as many as 16 bytes hold, unrolled: it reads the vector by 16 bytes"""
  assert is_shared(k) and 24 <= math.prod(k.amounts(OptOps.GROUP)) <= 64
  taken = math.prod(k.amounts(OptOps.UNROLL))
  assert taken == {T.F32: 4, T.F16: 8, T.BF16: 8}.get(kind, 16)
  assert "float4*)" in k.source and ("uint2*)" in k.source or "uint4*)" in k.source or kind not in FORMATS or FORMATS[kind].widths[0] == 2)

@on_gpus
@pytest.mark.parametrize("kind", HALVES, ids=lambda k: k.name)
def test_every_type(kind:T, target:str):
  """A matrix, and experts by ids that another kernel wrote: no copy of what is chosen"""
  k = kernel(target, lambda: linear(kind, 768, 2048)(empty(1, 2048)))
  check(k, kind)
  assert k.threads >= 128
  k = kernel(target, lambda: experts(kind, 16, 768, 2048)(empty(1, 1, 2048), empty(1, 4, dtype=dtypes.int32)))
  check(k, kind)
  assert k.blocks * k.threads == 4 * 768 * math.prod(k.amounts(OptOps.GROUP))

@on_gpus
@pytest.mark.parametrize("kind,rows,width,threads", [
  (T.Q4_0, 1, 2048, 64), (T.Q4_0, 7, 2048, 64), (T.Q4_0, 33, 96, 6), (T.Q8_0, 5, 1408, 44), (T.Q4_K, 5, 2816, 44), (T.Q6_K, 11, 768, 24),
  (T.Q8_0, 7, 32 * 67, 45), (T.F32, 3, 1021, 32), (T.F16, 3, 4104, 57)], ids=lambda v: getattr(v, "name", str(v)))
def test_odd_sizes(kind:T, rows:int, width:int, threads:int, target:str):
  """Threads divide a row evenly, if enough of them do; else a few find nothing at its end"""
  k = kernel(target, lambda: linear(kind, rows, width)(empty(1, width)))
  assert is_shared(k) and math.prod(k.amounts(OptOps.GROUP)) == threads
  assert bool(k.amounts(OptOps.PADTO)) == (width in (32 * 67, 1021))

@on_gpus
def test_two_products_in_one_loop(target:str):
  """SwiGLU's two matrices: the vector is read once"""
  def run(up:bool) -> Tensor:
    hidden = linear(T.Q5_K, 768, 2048)(x := empty(1, 2048)).silu()
    return hidden * linear(T.Q5_K, 768, 2048)(x) if up else hidden
  one, two = (kernel(target, lambda: run(up)) for up in (False, True))
  def reads(k:Kernel) -> int: return len(re.findall(r"data\d+_2048\+", k.source))
  assert is_shared(two) and two.opts == one.opts and reads(two) == reads(one) > 0

@on_gpus
def test_products_of_different_lengths_share_threads(target:str):
  """The chosen experts' last product and the shared expert's, of another type: a sum over experts and rows, and one over rows"""
  k = kernel(target, lambda: experts(T.Q4_1, 16, 2048, 1536)(empty(1, 4, 1536), empty(1, 4, dtype=dtypes.int32)).sum(1)
                             + linear(T.Q6_K, 2048, 1536)(empty(1, 1536)) + empty(1, 2048))
  assert k.amounts(OptOps.GROUP) == [48, 48] and k.threads == 96

@on_gpus
@pytest.mark.parametrize("chosen", [4, 6])
def test_a_sum_over_experts(chosen:int, target:str):
  """A range that the weights' index goes by through the ids: written out where it is short; a word's codes always are"""
  k = kernel(target, lambda: experts(T.Q4_0, 16, 2048, 1408)(empty(1, chosen, 1408), empty(1, chosen, dtype=dtypes.int32)).sum(1))
  assert is_shared(k) and math.prod(k.amounts(OptOps.UNROLL)) == {4: 32, 6: 16}[chosen] and "float4*)" in k.source

@on_gpus
def test_a_matrix_a_head(target:str):
  k = kernel(target, lambda: linear(T.Q8_0, 20, 512, 192)(empty(1, 20, 192)))
  assert is_shared(k) and k.threads == 96 and math.prod(k.amounts(OptOps.GROUP)) == 12

@on_gpus
def test_many_rows_share_reads_of_the_vector(target:str):
  k = kernel(target, lambda: linear(T.Q6_K, 154880, 2048)(empty(1, 2048)))
  assert is_shared(k) and math.prod(k.amounts(OptOps.GROUP)) == 32 and k.amounts(OptOps.UPCAST) == [4]

@on_gpus
@pytest.mark.parametrize("dtype", [dtypes.float, dtypes.half])
def test_outputs_that_are_neighbours(dtype, target:str):
  """x @ w: neighbouring threads read neighbouring outputs' weights; casts hide nothing, and either side may be the vector"""
  def run(swapped:bool) -> Tensor:
    sides = empty(1, 2048, 1), empty(1, 2048, 1024, dtype=dtype).cast(dtypes.float)
    return (sides[1] * sides[0] if swapped else sides[0] * sides[1]).sum(1)
  for swapped in (False, True):
    k = kernel(target, lambda: run(swapped))
    assert k.opts[0].op is OptOps.LOCAL and k.opts[0].arg == 32 and k.amounts(OptOps.GROUP) == [16]

@on_gpus
def test_long_sums_of_few_outputs(target:str):
  """… of a row each, of columns, past 2048 outputs; maxima too"""
  k = kernel(target, lambda: empty(4, 16384).sum(-1))
  assert is_shared(k) and math.prod(k.amounts(OptOps.GROUP)) >= 128 and k.amounts(OptOps.UNROLL) == [4]
  k = kernel(target, lambda: empty(4096, 4096).max(-1))
  assert is_shared(k) and math.prod(k.amounts(OptOps.GROUP)) >= 16
  k = kernel(target, lambda: empty(4096, 64).sum(0))
  assert k.opts[0].op is OptOps.LOCAL and is_shared(k) and k.threads == 512
  for k in kernels(target, lambda: empty(154880).argmax())[:1]: assert is_shared(k)

@on_gpus
def test_what_is_left_to_the_wheel(target:str):
  """Outputs enough; operands that outputs share; lengths that are not known; what the environment says"""
  assert not kernel(target, lambda: empty(1 << 18, 64).sum(-1)).amounts(OptOps.GROUP)
  assert not kernel(target, lambda: linear(T.Q4_0, 4096, 2048)(empty(32, 2048))).amounts(OptOps.GROUP)
  n = Variable("n", 1, 4096).bind(77)
  assert not kernel(target, lambda: empty(64, 4096)[:, :n].sum(-1)).amounts(OptOps.GROUP)

def test_the_cpu_keeps_the_wheel_s_rule():
  assert not is_shared(kernel("CPU", lambda: linear(T.Q4_0, 768, 2048)(empty(1, 2048))))

def test_threads():
  """They follow from the length, and fewer where more outputs fill the device; never so many that their own sums outweigh the row's"""
  for outputs in (1, 768, 10240, 154880):
    counts = [threads_of(n, outputs) for n in (64, 256, 1024, 4096, 1 << 16)]
    assert counts == sorted(counts) and all(t * t <= 4 * n for t, n in zip(counts, (64, 256, 1024, 4096, 1 << 16)))
  counts = [threads_of(4096, n) for n in (1, 2048, 16384, RESIDENT_THREADS, 8 * RESIDENT_THREADS)]
  assert counts == sorted(counts, reverse=True)
  assert threads_of(64, RESIDENT_THREADS) == 1

"""The few instructions that UOps cannot say, a row a target. Everything else in a kernel is UOps and renders for every target."""
from __future__ import annotations
import re
from dataclasses import dataclass, replace
from typing import Callable
from tinygrad import Device, UOp, dtypes
from tinygrad.renderer.cstyle import CUDARenderer, MetalRenderer
from tinygrad.uop.ops import Ops

Place = Callable[[UOp, int], tuple[UOp, UOp]]

@dataclass(frozen=True)
class Mma:
  """c + a·b of small matrices that lie over a warp's registers: a (M, K) and b (K, N) halves, c (M, N) float32. Of each, a lane holds `counts`
  elements; a(lane, i) names the (row, column) of the lane's element i, and so do b and c. So many instructions, each of its share of K."""
  M: int
  N: int
  K: int
  counts: tuple[int, int, int]
  a: Place
  b: Place
  c: Place
  renderer: str
  instructions: int = 1
  def __call__(self, a:list[UOp], b:list[UOp], c:list[UOp]) -> list[UOp]:
    each_a, each_b = len(a) // self.instructions, len(b) // self.instructions
    for i in range(self.instructions):
      part_a, part_b = a[i * each_a:(i + 1) * each_a], b[i * each_b:(i + 1) * each_b]
      d = UOp.wmma(UOp.stack(*part_a), UOp.stack(*part_b), UOp.stack(*c), (self.N, self.M, self.K // self.instructions), self.renderer, 32, None)
      c = [d.index(j) for j in range(self.counts[2])]
    return c

# the lane's place in a tensor core's fragments (PTX, mma.m16n8k16) and in a simdgroup_matrix
MMA_CUDA = Mma(16, 8, 16, (8, 4, 4), lambda lane, i: (lane // 4 + i // 2 % 2 * 8, lane % 4 * 2 + i % 2 + i // 4 * 8),
               lambda lane, i: (lane % 4 * 2 + i % 2 + i // 2 * 8, lane // 4), lambda lane, i: (lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2), "CUDA")
# m16n8k8 holds the first half of a lane's elements of a and b, and then the second
MMA_TURING = replace(MMA_CUDA, instructions=2)
def _simdgroup(lane:UOp, i:int) -> tuple[UOp, UOp]: return lane // 16 * 4 + lane // 2 % 4, lane // 8 % 2 * 4 + lane % 2 * 2 + i
MMA_METAL = Mma(8, 8, 8, (2, 2, 2), _simdgroup, _simdgroup, _simdgroup, "METAL")

@dataclass(frozen=True)
class Target:
  """What a kernel may ask of a GPU. Texts are C expressions over {0}, {1}, … (the operands); {o} is a lane distance."""
  shuffle_xor: str
  shuffle: str                 # the value of lane {1}
  dot4: str|None = None        # int32 sum of four int8 products and a third operand, each word holding four bytes
  wait: str|None = None        # statements: the next kernel may start; go on when the kernels before this one are done
  mma: Mma|None = None
  lanes: int = 32
  shared_bytes: int = 32768

TARGETS = {
  "CUDA": Target("__shfl_xor_sync(0xffffffffu, {{0}}, {o})", "__shfl_sync(0xffffffffu, {0}, {1})", "__dp4a((int)({0}), {1}, {2})", mma=MMA_CUDA,
                 shared_bytes=49152),
  "METAL": Target("simd_shuffle_xor({{0}}, (ushort){o})", "simd_shuffle({0}, (ushort){1})", mma=MMA_METAL),
}

# from Hopper on a kernel may start while those before it still run, up to the point where it waits for them (programmatic dependent launch)
HOPPER = replace(TARGETS["CUDA"], wait='asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); '
                                       'asm volatile("griddepcontrol.wait;" ::: "memory")')

# by the compute capability that it takes, the newest first: m16n8k16 came with Ampere, m16n8k8 with Turing, dp4a with the second Pascal
OF_CAPABILITY = {90: HOPPER, 80: TARGETS["CUDA"], 75: replace(TARGETS["CUDA"], mma=MMA_TURING), 61: replace(TARGETS["CUDA"], mma=None),
                 0: replace(TARGETS["CUDA"], mma=None, dot4=None)}

def of_arch(arch:str) -> Target:
  """The row of an NVIDIA architecture: sm_86, sm_90a"""
  capability = int(m[0]) if (m := re.search(r"\d+", arch)) else 0
  return next(t for least, t in OF_CAPABILITY.items() if capability >= least)

def target_of(device:str|None=None) -> Target|None:
  """The device's row, or None where there is none: the CPU, a GPU that nobody has written one for. NULL, which schedules with no device at all,
  stands for the one whose language it renders."""
  name = (device or Device.DEFAULT).split(":")[0]
  if name not in ("CUDA", "NULL"): return TARGETS.get(name)
  renderer = Device[name].renderer
  if isinstance(renderer, CUDARenderer): return of_arch(renderer.target.arch)
  return TARGETS["METAL"] if isinstance(renderer, MetalRenderer) else None

def shuffle(t:Target, x:UOp, distance:int) -> UOp:
  """x of the lane whose number differs in the bit `distance`"""
  # a CUSTOM is a statement of its own, evaluated once; a CUSTOMI's text is repeated at every use
  return UOp(Ops.CUSTOM, x.dtype, src=(x,), arg=t.shuffle_xor.format(o=distance))

def of_lane(t:Target, x:UOp, lane:UOp) -> UOp:
  """x of the given lane"""
  return UOp(Ops.CUSTOM, x.dtype, src=(x, lane.cast(dtypes.int)), arg=t.shuffle)

def group_reduce(t:Target, x:UOp, lanes:int, op, step:int=1) -> UOp:
  """op over `lanes` neighbouring lanes (a power of two, `step` apart), in every one of them, in a fixed order"""
  distance = lanes * step // 2
  while distance >= step: x, distance = op(x, shuffle(t, x, distance)), distance // 2
  return x
def group_sum(t:Target, x:UOp, lanes:int) -> UOp: return group_reduce(t, x, lanes, lambda a, b: a + b)

def dot4(t:Target, a:UOp, b:UOp, c:UOp) -> UOp:
  """int32 c + Σ a[i]·b[i] over the four int8 of two words"""
  assert t.dot4 is not None
  return UOp(Ops.CUSTOMI, dtypes.int, src=(a, b, c), arg=t.dot4)

def opaque_zero(text:str, *after:UOp) -> UOp:
  """A zero that tinygrad takes for an unknown 0 or 1, of a text that the target's compiler sees through: an index it is added to is computed
  behind `after`, and within its range"""
  return (UOp(Ops.CUSTOM, dtypes.int, src=after, arg=text) & 1).cast(dtypes.weakint)

def pdl_wait(t:Target, *loads:UOp) -> UOp:
  """A zero that is known only when the kernels before this one are done: an index it is added to reads what they wrote. Loads of constants
  that are given are issued before. Elsewhere a kernel starts when those before it are done, and this is a plain zero."""
  return UOp.const(0) if t.wait is None else opaque_zero(f"0; {t.wait}", *(loads or (UOp.const(0, dtypes.int),)))

def round_to_int(x:UOp) -> UOp:
  """The nearest integer, halves away from zero"""
  return (x + (x < 0).where(-0.5, 0.5)).cast(dtypes.int)

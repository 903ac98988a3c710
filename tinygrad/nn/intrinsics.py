"""The few instructions that UOps cannot say, a column a target. Everything else in a kernel is UOps and renders for every target."""
from __future__ import annotations
from dataclasses import dataclass
from tinygrad import Device, UOp, dtypes
from tinygrad.uop.ops import Ops

@dataclass(frozen=True)
class Target:
  """What a kernel may ask of a GPU. Texts are C expressions over {0}, the operand; {o} is a lane distance."""
  shuffle_xor: str
  lanes: int = 32
  shared_bytes: int = 32768

TARGETS = {
  "CUDA": Target("__shfl_xor_sync(0xffffffffu, {{0}}, {o})", shared_bytes=49152),
  "METAL": Target("simd_shuffle_xor({{0}}, (ushort){o})"),
}

def target(device:str|None=None) -> Target|None:
  """The device's column, or None where there is none (the CPU, a GPU nobody has written one for)"""
  return TARGETS.get((device or Device.DEFAULT).split(":")[0])

def group_sum(t:Target, x:UOp, lanes:int) -> UOp:
  """The sum of x over `lanes` neighbouring lanes (a power of two), in every one of them, in a fixed order"""
  distance = lanes // 2
  while distance:
    # CUSTOM is a statement of its own, evaluated once; CUSTOMI would be repeated at every use
    x = x + UOp(Ops.CUSTOM, x.dtype, src=(x,), arg=t.shuffle_xor.format(o=distance))
    distance //= 2
  return x

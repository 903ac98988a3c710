"""Wraps the wheel's kernel scheduler: an opt that a kernel cannot take is refused, instead of overflowing shared memory or giving wrong numbers.

Shared memory is counted as codegen will lay it out: buffers that the kernel has already, and one for every reduce that is grouped.
"""
from __future__ import annotations
from tinygrad import wheel_module
from tinygrad.codegen.opt import Opt, OptOps, check
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import prod
from tinygrad.uop.ops import AxisType, Ops, UOp

_wheel = wheel_module(__name__)
globals().update({k: v for k, v in vars(_wheel).items() if not k.startswith("__")})

GROUPS = (OptOps.GROUP, OptOps.GROUPTOP)

def _size(ranges:list[UOp]) -> int: return prod(r.vmax + 1 for r in ranges)

class Scheduler(_wheel.Scheduler):
  def shared_bytes(self) -> int:
    """Bytes of shared memory that the kernel takes with the opts applied so far"""
    total = 0
    for u in self.ast.backward_slice:
      if u.op is Ops.STAGE and u.arg.addrspace is AddrSpace.LOCAL:
        total += _size([*u.src[1:], *(r for r in u.ranges if r.arg[-1] is AxisType.UPCAST)]) * u.dtype.itemsize
      elif u.op is Ops.REDUCE and (grouped := [r for r in self._reduced(u) if r.arg[-1] is AxisType.GROUP_REDUCE]):
        # one partial sum for each thread of the block that the reduce depends on, and each of a thread's own outputs
        kept = [r for r in u.backward_slice if r.op is Ops.RANGE and r.arg[-1] is AxisType.LOCAL]
        total += _size([*grouped, *kept, *(r for r in u.ranges if r.arg[-1] is AxisType.UPCAST)]) * u.dtype.itemsize
    return total

  @staticmethod
  def _reduced(reduce:UOp) -> list[UOp]: return [r for r in UOp.sink(*reduce.src[1:]).toposort() if r.op is Ops.RANGE]

  def _check_group(self, rng:UOp) -> None:
    check(rng.src[0].op is Ops.CONST, "only a reduce of constant length is grouped")
    reduces = [u for u in self.ast.backward_slice if u.op is Ops.REDUCE and rng in self._reduced(u)]
    inside = (AxisType.REDUCE, AxisType.UNROLL, AxisType.GROUP_REDUCE)
    check(not any(r.arg[-1] in inside for u in reduces for r in u.ranges), "no group inside another reduce")

  def apply_opt(self, opt:Opt, append_opt:bool=True):
    if opt.op in GROUPS: self._check_group(self.rngs[self.real_axis(opt.op, opt.axis)])
    before = self.ast
    ret = super().apply_opt(opt, append_opt)
    if opt.op in (*GROUPS, OptOps.LOCAL, OptOps.UPCAST) and (needed := self.shared_bytes()) > self.ren.shared_max:
      self.ast = before
      if append_opt: self.applied_opts.pop()
      check(False, f"{needed} bytes of shared memory, there are {self.ren.shared_max}")
    return ret

_wheel.Scheduler = Scheduler  # what the wheel's apply_opts and Scheduler.copy make

"""Wraps the wheel's kernel scheduler: an opt that a kernel cannot take raises KernelOptError, instead of overflowing shared memory or giving wrong
numbers.

Shared memory is counted as codegen will lay it out: the buffers that the kernel has, and one for every reduce that is grouped. heuristic.py and
the wheel's BEAM apply opts through this Scheduler, and take another choice where one is refused.
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
def _summed(reduce:UOp) -> list[UOp]: return [r for r in UOp.sink(*reduce.src[1:]).toposort() if r.op is Ops.RANGE]

class Scheduler(_wheel.Scheduler):
  def shared_bytes(self) -> int:
    """Bytes of shared memory that the kernel takes with the opts applied so far"""
    total = 0
    for u in self.ast.backward_slice:
      upcast = [r for r in u.ranges if r.arg[-1] is AxisType.UPCAST]  # a thread's outputs lie beside each other
      if u.op is Ops.STAGE and u.arg.addrspace is AddrSpace.LOCAL: total += _size([*u.src[1:], *upcast]) * u.dtype.itemsize
      elif u.op is Ops.REDUCE and (group := [r for r in _summed(u) if r.arg[-1] is AxisType.GROUP_REDUCE]):
        local = [r for r in u.backward_slice if r.op is Ops.RANGE and r.arg[-1] is AxisType.LOCAL]
        total += _size([*group, *local, *upcast]) * u.dtype.itemsize  # a partial sum of every thread
    return total

  def _check_ranges(self, op:OptOps, rng:UOp) -> None:
    """Raises KernelOptError for an opt along `rng` that codegen gets wrong, most often in silence"""
    nodes = self.ast.backward_slice
    stages, reduces = [u for u in nodes if u.op is Ops.STAGE], [u for u in nodes if u.op is Ops.REDUCE]
    mine = [u for u in reduces if rng in _summed(u)]
    if op in (*GROUPS, OptOps.UNROLL):
      check(not any(s in u.backward_slice for u in mine for s in stages), "a reduce over a buffer of this kernel is no sum over plain ranges")
    if op in GROUPS:
      inside = (AxisType.REDUCE, AxisType.UNROLL, AxisType.GROUP_REDUCE)
      check(not any(r.arg[-1] in inside for u in mine for r in u.ranges), "no group inside another reduce")
      shared = {r for u in mine for r in _summed(u) if r.arg[-1] is AxisType.GROUP_REDUCE}
      check(not any(shared & set(_summed(u)) for u in reduces if u not in mine), "no second group where a reduce shares its threads with another")
    elif op is OptOps.LOCAL: check(not any(rng in s.ranges or rng in s.src[1:] for s in stages), "a buffer of this kernel is not each thread's own")
    if stages and op in (*GROUPS, OptOps.UPCAST):
      kinds = {*self.axis_types, AxisType.UPCAST if op is OptOps.UPCAST else AxisType.GROUP_REDUCE}
      check(not kinds >= {AxisType.UPCAST, AxisType.GROUP_REDUCE}, "a group sums no vectors beside a buffer of this kernel")

  def _threads_beside(self, rng:UOp, amount:int) -> UOp|None:
    """The threads of another reduce of the kernel that is grouped once, for the reduce over `rng`, which is not: with threads of their own, those of
    each would idle through the other. None where there is no such reduce"""
    reduces = [u for u in self.ast.backward_slice if u.op is Ops.REDUCE]
    mine = [u for u in reduces if rng in _summed(u)]
    def group(u:UOp) -> list[UOp]: return [r for r in _summed(u) if r.arg[-1] is AxisType.GROUP_REDUCE]
    if any(group(m) for m in mine): return None
    for u in reduces:
      if [r.vmax + 1 for r in group(u)] == [amount] and not any(u in m.backward_slice or m in u.backward_slice for m in mine): return group(u)[0]
    return None

  def shift_to(self, rng:UOp, amount:int, new_type:AxisType, top:bool=False, input_new_rng:UOp|None=None):
    if new_type is AxisType.GROUP_REDUCE and input_new_rng is None: input_new_rng = self._threads_beside(rng, amount)
    return super().shift_to(rng, amount, new_type, top, input_new_rng)

  def apply_opt(self, opt:Opt, append_opt:bool=True):
    splits = opt.op in (*GROUPS, OptOps.LOCAL, OptOps.UPCAST, OptOps.UNROLL)
    if splits and opt.axis is not None: self._check_ranges(opt.op, self.rngs[self.real_axis(opt.op, opt.axis)])
    before = self.ast
    ret = super().apply_opt(opt, append_opt)
    if splits and (needed := self.shared_bytes()) > self.ren.shared_max:
      self.ast = before
      if append_opt: self.applied_opts.pop()
      check(False, f"{needed} bytes of shared memory, there are {self.ren.shared_max}")
    return ret

_wheel.Scheduler = Scheduler  # what the wheel's apply_opts and Scheduler.copy make

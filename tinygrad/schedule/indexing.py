"""Wraps the wheel's rangeify: fusion guards, that is, which reduction shares a kernel with what reads it.

The wheel gives every reduction a kernel of its own: a norm takes two, a softmax three. Where the reductions of a row are broadcast back over
that row (x / rms(x), exp(x - max(x)) / sum), one kernel can do all of it, a team of threads a row (codegen/opt/rows.py): each step reads the row
again, as kernels of their own would, and no step's result goes through memory. So the wheel decides first; then each STAGE, which is what it
realizes, is put back into the one kernel that reads it, where `worth` says so. PCONTIG set by the user leaves all to the wheel.
"""
from __future__ import annotations
import math
from dataclasses import dataclass
from tinygrad import wheel_module
from tinygrad.device import Device
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import PCONTIG
from tinygrad.uop.ops import AxisType, Ops, UOp, resolve, sint

_wheel = wheel_module(__name__)
globals().update({k: v for k, v in vars(_wheel).items() if not k.startswith("__")})

# what a thread may do of a row, value by value: so much takes less than the few microseconds of a launch
SERIAL_STEPS = 64
# so many rows keep a device busy by themselves, however long they are
MANY_ROWS = 128
# the wheel recomputes an elementwise value wherever it is read if it comes from at most so many buffers (its `remove_bufferize`)
CHEAP_BUFFERS = 3
# what a team's thread reads of a row at least, so that the final sum over the team doesn't outweigh the reading; and a team's largest size
VALUES_A_THREAD, TEAM = 16, 1024

@dataclass(frozen=True)
class Rows:
  """A kernel that works by rows: reductions over a row, whose results are read by later ones of the same row and by what is stored of it"""
  reduces:tuple[UOp, ...]                                  # in order: none comes before one that it reads
  rows:tuple[UOp, ...]                                     # the ranges that number the rows
  inner:tuple[UOp, ...]                                    # the ranges within a row of what is stored; none where a row gives one value
  @property
  def sizes(self) -> list[sint]:
    """Values a row of each reduction, then of what is stored"""
    return [math.prod(r.src[0].ssimplify() for r in ranges) for ranges in (*(x.src[1:] for x in self.reduces), self.inner)]
  @property
  def count(self) -> sint: return math.prod(r.src[0].ssimplify() for r in self.rows)
  @property
  def longest(self) -> int:
    """Values of the longest reduction; of what is stored, a team can leave parts to others"""
    return max(n if isinstance(n, int) else int(n.vmax) for n in self.sizes[:-1])
  @property
  def team(self) -> int:
    """Threads a row, a power of two"""
    return min(TEAM, max(32, 1 << (self.longest // VALUES_A_THREAD).bit_length() >> 1))

def rows_of(value:UOp, ranges:tuple[UOp, ...], body:dict[UOp, None]) -> Rows|None:
  """What is stored over these ranges, if it is computed by rows. The body: all nodes of its kernel, in order."""
  reduces = tuple(u for u in body if u.op is Ops.REDUCE)
  if not reduces or any(r.op is not Ops.RANGE for x in reduces for r in x.src[1:]): return None
  rows = tuple(reduces[0].ranges)
  if any(set(x.ranges) != set(rows) for x in reduces[1:]): return None     # one is done over again for every step of another
  if any(r.arg[-1] is AxisType.REDUCE for r in rows): return None
  inner = tuple(r for r in ranges if r.op is Ops.RANGE and r not in rows)
  chained = any(r in x.backward_slice for i, x in enumerate(reduces) for r in reduces[:i])
  return Rows(reduces, rows, inner) if inner or chained else None

def worth(r:Rows, has_local:bool) -> bool:
  """Whether one kernel for these reductions beats one each. Saved: a launch each, and their results' way through memory. Repeated: nothing, a row
  is one team's work, or at most as much as a team stores where a row has several. Lost: the rest of the device, over which kernels of their own
  would spread a long reduction. (A CPU's core does a row alone anyway.)"""
  return not has_local or r.longest // r.team <= SERIAL_STEPS or (isinstance(r.count, int) and r.count >= MANY_ROWS)

def _is_stage(u:UOp) -> bool: return u.op is Ops.STAGE and u.arg.addrspace is AddrSpace.GLOBAL
def _inside(u:UOp) -> bool: return not _is_stage(u) and u.op not in {Ops.AFTER, Ops.PARAM, Ops.BUFFER, Ops.RANGE}

def _rebuilt(value:UOp, new:dict[UOp, UOp]) -> UOp:
  """The value with nodes of its kernel replaced"""
  done = dict(new)
  for u in value.toposort(gate=lambda u: u not in new and _inside(u)):
    if (src := tuple(done.get(s, s) for s in u.src)) != u.src: done[u] = u.replace(src=src)
  return done.get(value, value)

class _Kernel:
  """A kernel as rangeify left it: a STAGE or the END of a store; `value` is what it computes over `ranges`"""
  def __init__(self, root:UOp):
    self.root, self.ranges = root, root.src[1:]
    self.value = root.src[0] if _is_stage(root) else root.src[0].src[1]
    self.body = self.value.toposort(gate=_inside)
    self.reads = {u: u.src[0] for u in self.body if u.op is Ops.INDEX and _is_stage(u.src[0])}
    self.reduces = any(u.op is Ops.REDUCE for u in self.body)
    self.removable = _is_stage(root) and root.arg.removable and root.src[0].op not in {Ops.CONTIGUOUS, Ops.NOOP, Ops.AFTER}
    self.cheap = not self.reduces and len({s for u in self.body for s in u.src if s.op in {Ops.STAGE, Ops.AFTER, Ops.PARAM}}) <= CHEAP_BUFFERS

def fuse_rows(sink:UOp) -> UOp:
  """Puts reductions back into the kernel that reads them, where the two work by the same rows and `worth` says so"""
  nodes = sink.toposort()
  kernels = {u: _Kernel(u) for u in reversed(nodes) if _is_stage(u) or (u.op is Ops.END and u.src[0].op is Ops.STORE)}  # readers first
  if not any(k.reduces and k.removable for k in kernels.values()): return sink
  readers:dict[UOp, set[UOp]] = {}
  for u in nodes:                                          # who reads a stage in any other way holds it where it is
    if u.op is not Ops.INDEX: [readers.setdefault(s, set()).add(u) for s in u.src if _is_stage(s)]
  for root, k in kernels.items(): [readers.setdefault(s, set()).add(root) for s in k.reads.values()]

  def inlined(value:UOp, stages:set[UOp]) -> UOp:
    new = {}
    for u in value.toposort(gate=_inside):
      if u.op is Ops.INDEX and (s := u.src[0]) in stages:
        new[u] = _rebuilt(inlined(kernels[s].value, stages), {r: i for r, i in zip(s.src[1:], u.src[1:]) if r.op is Ops.RANGE})
    return _rebuilt(value, new)

  new, gone = {}, set()
  for root, k in kernels.items():
    if root in gone or not isinstance(k.value.device, str): continue
    ren = Device[k.value.device].renderer
    members, refused = {root}, set()
    def candidate() -> UOp|None:
      return next((s for m in members for s in kernels[m].reads.values() if s not in members | refused and s in kernels and readers[s] <= members), None)
    while (s := candidate()) is not None:
      c, refused = kernels[s], refused | {s}
      if not c.removable or (not c.reduces and not c.cheap): continue
      if c.reduces:
        value = inlined(k.value, members | {s})
        rows = rows_of(value, k.ranges, value.toposort(gate=_inside))
        if rows is None or resolve(rows.count != math.prod(s.shape)) or not worth(rows, ren.has_local): continue
      members.add(s)
    if any(kernels[m].reduces for m in members - {root}):
      value = inlined(k.value, members)
      new[root] = root.replace(src=((value if _is_stage(root) else root.src[0].replace(src=(root.src[0].src[0], value))), *k.ranges))
      gone |= members
  return sink.substitute(new)

def run_rangeify(tsink:UOp, debug:bool=False) -> UOp:
  ranged = _wheel.run_rangeify(tsink, debug)
  return ranged if PCONTIG else fuse_rows(ranged)

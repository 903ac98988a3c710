"""Wraps the wheel's choice of opts: on GPUs, a sum is shared by threads that read neighbours in memory.

First of all matrix times vector, the matrix being whatever is computed from what is loaded: codes of a block format, shifted, masked, looked up,
scaled. The load that reads most bytes is the sum's main one, and tells its ranges apart: those the load's index goes by, neighbours first, and those
inside what is loaded (the eight codes of a word), which are unrolled. A thread takes a few neighbouring entries at once, the threads of a row lie
along it, and so do a block's rows among themselves. Where neighbours in memory are outputs (x @ w), threads are neighbouring outputs first.
Long sums of few outputs are shared in the same way; what reuses its operands (a matrix product) is left to the wheel.
"""
from __future__ import annotations
from dataclasses import dataclass
from tinygrad import wheel_module
from tinygrad.codegen.opt import KernelOptError, Opt, OptOps
from tinygrad.codegen.opt.postrange import Scheduler
from tinygrad.codegen.opt.rows import share_rows
from tinygrad.helpers import NOLOCALS, prod
from tinygrad.uop.ops import AxisType, Ops, UOp

_wheel = wheel_module(__name__)

WARP = 32         # threads that load together
BLOCK = 128       # threads of a block, where there are outputs enough
MOST = 512        # ... where one output is a block's work
FULL = 1 << 17    # threads that a large GPU runs at once
BARRIER = 64      # values that a thread adds up while threads meet
LOAD = 16         # bytes of a load
VALUES = 16       # of the sum that a thread takes at a time: more, and a warp's reads of the vector lie in too many cache lines
UNROLLED = 32     # values of an entry that are written out

def hand_coded_optimizations(k:Scheduler) -> Scheduler:
  if share_rows(k): return k
  if k.ren.has_local and k.ren.has_shared and not NOLOCALS:
    try:
      if (shared := share_sums(k.copy())) is not None: return shared
    except KernelOptError: pass                            # out of shared memory, say: the wheel's choice takes less
  return _wheel.hand_coded_optimizations(k)

def threads_of(values:int, outputs:int) -> int:
  """Threads that share a sum of so many values. Each adds up its part, waits for the others, and adds up all partial sums, two in a value's time;
  threads past those that run at once come later."""
  def cost(n:int) -> float: return (values / n + (n / 2 + BARRIER if n > 1 else 0)) * max(1, outputs * n / FULL)
  return min((1 << i for i in range(MOST.bit_length())), key=cost)

def _length(ranges:list[UOp]) -> int: return prod(r.vmax + 1 for r in ranges)
def _divisor(n:int, most:int) -> int: return next(d for d in range(max(min(n, most), 1), 0, -1) if n % d == 0)

def _strides(index:UOp) -> dict[UOp, int]:
  """The ranges that an INDEX goes by, and its steps along them"""
  terms = [(u.src[0], u.src[1].val) if u.op is Ops.MUL and u.src[1].op is Ops.CONST else (u, 1) for u in index.src[1].get_idx().split_uop(Ops.ADD)]
  return {u: step for u, step in terms if u.op is Ops.RANGE}

def _factors(x:UOp) -> list[UOp]:
  if x.op is Ops.CAST: return _factors(x.src[0])
  return [f for s in x.src for f in _factors(s)] if x.op is Ops.MUL else [x]

@dataclass(frozen=True)
class Sum:
  """A reduce by its main load: the ranges inside what is loaded; those along it, neighbours first; the outputs' ranges that it goes by, likewise"""
  load:UOp
  inside:list[UOp]
  along:list[UOp]
  rows:list[UOp]
  def columns(self) -> bool:
    """Whether neighbours in memory are of different outputs"""
    return bool(self.rows) and _strides(self.load)[self.rows[0]] < _strides(self.load)[self.along[0]]

def _sum_by(loads:list[UOp], ranges:tuple[UOp, ...], outputs:set[UOp]) -> Sum|None:
  def bytes_read(u:UOp) -> int: return _length([r for r in _strides(u) if r in ranges]) * u.dtype.itemsize
  if not loads: return None
  steps = _strides(load := max(loads, key=bytes_read))
  along, rows = (sorted((r for r in some if r in steps and r.src[0].op is Ops.CONST), key=lambda r: (steps[r], r.arg)) for some in (ranges, outputs))
  return Sum(load, [r for r in ranges if r not in steps], along, rows) if along else None

def matrix_times_vector(reduce:UOp) -> Sum|None:
  """The sum, if it is of products of a side that goes by every output and one that goes by some of them or none"""
  ranges = reduce.src[1:]
  sides = {f: set(f.ranges).difference(ranges) for f in _factors(reduce.src[0]) if any(r in ranges for r in f.ranges)}
  every = set().union(*sides.values())
  fewer = [outputs for outputs in sides.values() if outputs != every]
  if reduce.arg[0] is not Ops.ADD or not fewer or not (rows := every.difference(*fewer)): return None
  return _sum_by([u for f, outputs in sides.items() if outputs == every for u in f.backward_slice_with_self if u.op is Ops.INDEX], ranges, rows)

def of_few(reduce:UOp) -> Sum|None:
  """The sum, or maximum, if its outputs have no load in common: a thread has nothing better to do than a part of one"""
  loads, outputs = [u for u in reduce.src[0].backward_slice_with_self if u.op is Ops.INDEX], set(reduce.ranges)
  return _sum_by(loads, reduce.src[1:], outputs) if all(outputs <= set(u.ranges) for u in loads) else None

def one_loop(k:Scheduler) -> None:
  """A sum of sums is one; reduces of the same lengths beside each other go through one loop"""
  while (u := next((u for u in k.reduceops if u.arg == (Ops.ADD, 0) and u.src[0].op is Ops.REDUCE and u.src[0].arg == u.arg), None)) is not None:
    k.ast = k.ast.substitute({u: u.replace(src=u.src[0].src + u.src[1:])})
  first:dict[tuple[UOp, ...], tuple[UOp, ...]] = {}
  for u in sorted(k.reduceops, key=lambda u: u.src[1].arg):
    ranges = first.setdefault(tuple(r.src[0] for r in u.src[1:]), u.src[1:])
    if not set(ranges) & set(u.src[1:]): k.ast = k.ast.substitute(dict(zip(u.src[1:], ranges)))

def _split(k:Scheduler, op:OptOps, r:UOp, n:int) -> UOp:
  """n parts off the range; returns what is left of it"""
  at, axes = k.rngs.index(r), {OptOps.UNROLL: k.unrollable_dims, OptOps.GROUP: k.axes_of(AxisType.REDUCE)}.get(op)
  return k.apply_opt(Opt(op, at if axes is None else axes.index(at), n))[0]

def _spread(k:Scheduler, op:OptOps, ranges:list[UOp], n:int) -> int:
  """Up to n parts off the ranges, neighbours first; the list keeps what is left. Returns how many"""
  taken = 1
  while ranges:
    length, most = ranges[0].vmax + 1, max(n // taken, 1)
    d = _divisor(length, most)
    even = -(-length // -(-length // most))                # all but the last of so many parts are full
    if op is OptOps.GROUP and 2 * d < even:                # an odd length: some threads find nothing at its end
      at, d = k.rngs.index(ranges[0]), even
      k.apply_opt(Opt(OptOps.PADTO, at, d))
      ranges[0] = k.rngs[at]
      length = ranges[0].vmax + 1
    if d == 1: break
    rest, taken = _split(k, op, ranges[0], d), taken * d
    ranges[:1] = [rest] if d < length else []
    if d < length: break
  return taken

def share_sums(k:Scheduler) -> Scheduler|None:
  """The kernel with its sums shared out; None, where it is none for this"""
  one_loop(k)
  reduces = k.reduceops
  if not reduces or any(r.op is not Ops.RANGE or r.src[0].op is not Ops.CONST for u in reduces for r in u.src[1:]): return None
  if any(u.op is Ops.REDUCE for x in reduces for u in x.src[0].backward_slice_with_self): return None
  found = [matrix_times_vector(u) for u in reduces]
  if few := None in found: found = [of_few(u) for u in reduces]
  if None in found: return None
  sums = list({tuple(s.along): s for s in found if s is not None}.values())
  main = max(sums, key=lambda s: _length(s.along))
  outputs = prod(max(r.src[0].vmin, 1) for r in k.rngs if r.arg[-1] is not AxisType.REDUCE)
  values, columns, rows = _length(main.along) * _length(main.inside), main.columns(), list(main.rows)
  threads = threads_of(values, outputs)
  if (threads if few else threads_of(values, 1)) == 1: return None  # outputs enough, or sums too short
  beside = _spread(k, OptOps.LOCAL, rows, WARP) if columns else 1
  left = [list(s.along) for s in sums]
  for s, along in zip(sums, left):
    inside = 1
    for r in sorted(s.inside, key=lambda r: r.vmax):
      if inside * (n := r.vmax + 1) <= UNROLLED:
        inside *= n
        _split(k, OptOps.UNROLL, r, n)
    if not columns: _spread(k, OptOps.UNROLL, along, min(LOAD // s.load.dtype.itemsize, max(VALUES // inside, 1)))
  if not all(left): return None
  threads = min(threads, MOST // beside) if columns else max(threads, min(WARP, values))
  if len(sums) > 1:                                        # of different lengths beside each other: each along one range, by the same threads
    def even(along:list[UOp], n:int) -> list[UOp]: return [r for r in along if (r.vmax + 1) % n == 0][:1]
    threads = next(n for n in range(threads, 0, -1) if all(even(along, n) for along in left))
    left = [even(along, threads) for along in left]
  for along in left: threads = _spread(k, OptOps.GROUP, along, threads)
  if threads == 1: return None
  if not columns:
    _spread(k, OptOps.LOCAL, rows, BLOCK // threads)
    _spread(k, OptOps.UPCAST, rows, min(4, outputs * threads // (4 * FULL)))  # threads in plenty: a part of the vector serves several rows
  return k

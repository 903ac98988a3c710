"""How a GPU's threads share a reduction: wraps the wheel's choice of opts for kernels that tinygrad schedules from plain ops.

A matrix times a vector is the main case, the matrix being whatever is computed from what is loaded: codes of a block format, shifted, masked, looked
up, scaled. The load that reads most bytes is the sum's main load. It tells the sum's ranges apart: those that index the load, neighbours in memory
first, and those within a loaded word (its eight codes), which are unrolled. A thread takes a few neighbouring entries at once. The threads of a row
lie along the row, the rows of a block beside each other. Where neighbours in memory are outputs (x @ w), threads are neighbouring outputs first.
Long sums of few outputs are shared in the same way. What reuses its operands (a matrix product) is left to the wheel. Kernels that work by rows
(a norm, a softmax) are laid out by rows.py, which is asked first. The kernels of nn/ state their own threads and never come here.
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

WARP = 32                    # threads that load together
BLOCK = 128                  # threads of a block where there are outputs enough
MAX_BLOCK = 512              # threads of a block where one output is a block's work
RESIDENT_THREADS = 1 << 17   # threads that a large GPU runs at once
BARRIER = 64                 # values that a thread adds up in the time of a barrier
LOAD = 16                    # bytes of a load
VALUES = 16                  # values of the sum that a thread takes at a time: with more, a warp's reads of the vector lie in too many cache lines
UNROLLED = 32                # values of an entry that are unrolled

def hand_coded_optimizations(k:Scheduler) -> Scheduler:
  """The wheel's entry point: the kernel laid out by rows, else with its sums shared, else as the wheel chooses"""
  if share_rows(k): return k
  if k.ren.has_local and k.ren.has_shared and not NOLOCALS:
    try:
      if (shared := share_sums(k.copy())) is not None: return shared
    except KernelOptError: pass                            # out of shared memory, for one: the wheel's choice takes less
  return _wheel.hand_coded_optimizations(k)

def threads_of(values:int, outputs:int) -> int:
  """Threads that share each of `outputs` sums of so many values: the power of two up to MAX_BLOCK of the least cost. A thread adds up its part, waits
  at a barrier and adds up all partial sums, two in the time of a value. Threads past RESIDENT_THREADS run later."""
  def cost(n:int) -> float: return (values / n + (n / 2 + BARRIER if n > 1 else 0)) * max(1, outputs * n / RESIDENT_THREADS)
  return min((1 << i for i in range(MAX_BLOCK.bit_length())), key=cost)

def _length(ranges:list[UOp]) -> int: return prod(r.vmax + 1 for r in ranges)
def _divisor(n:int, most:int) -> int: return next(d for d in range(max(min(n, most), 1), 0, -1) if n % d == 0)

def _strides(index:UOp) -> dict[UOp, int]:
  """The ranges of an INDEX, each with its stride in elements"""
  terms = [(u.src[0], u.src[1].val) if u.op is Ops.MUL and u.src[1].op is Ops.CONST else (u, 1) for u in index.src[1].get_idx().split_uop(Ops.ADD)]
  return {u: step for u, step in terms if u.op is Ops.RANGE}

def _factors(x:UOp) -> list[UOp]:
  if x.op is Ops.CAST: return _factors(x.src[0])
  return [f for s in x.src for f in _factors(s)] if x.op is Ops.MUL else [x]

@dataclass(frozen=True)
class Sum:
  """A reduce, and its ranges by what they are to its main load"""
  load:UOp           # the INDEX that reads most bytes
  inside:list[UOp]   # the reduce's ranges that do not index it: they are within a loaded word
  along:list[UOp]    # the reduce's ranges that index it, the smallest stride first
  rows:list[UOp]     # the outputs' ranges that index it, likewise
  def columns(self) -> bool:
    """Whether neighbours in memory belong to different outputs"""
    return bool(self.rows) and _strides(self.load)[self.rows[0]] < _strides(self.load)[self.along[0]]

def _sum_by(loads:list[UOp], ranges:tuple[UOp, ...], outputs:set[UOp]) -> Sum|None:
  def bytes_read(u:UOp) -> int: return _length([r for r in _strides(u) if r in ranges]) * u.dtype.itemsize
  if not loads: return None
  steps = _strides(load := max(loads, key=bytes_read))
  along, rows = (sorted((r for r in some if r in steps and r.src[0].op is Ops.CONST), key=lambda r: (steps[r], r.arg)) for some in (ranges, outputs))
  return Sum(load, [r for r in ranges if r not in steps], along, rows) if along else None

def matrix_times_vector(reduce:UOp) -> Sum|None:
  """The sum, if its terms are products of a factor that all outputs' ranges index (the matrix) and one that some or none of them do (the vector)"""
  ranges = reduce.src[1:]
  factors = {f: set(f.ranges).difference(ranges) for f in _factors(reduce.src[0]) if any(r in ranges for r in f.ranges)}
  every = set().union(*factors.values())
  fewer = [outputs for outputs in factors.values() if outputs != every]
  if reduce.arg[0] is not Ops.ADD or not fewer or not (rows := every.difference(*fewer)): return None
  return _sum_by([u for f, outputs in factors.items() if outputs == every for u in f.backward_slice_with_self if u.op is Ops.INDEX], ranges, rows)

def few_outputs(reduce:UOp) -> Sum|None:
  """The sum or maximum, if its outputs have no load in common: threads gain nothing by taking several outputs"""
  loads, outputs = [u for u in reduce.src[0].backward_slice_with_self if u.op is Ops.INDEX], set(reduce.ranges)
  return _sum_by(loads, reduce.src[1:], outputs) if all(outputs <= set(u.ranges) for u in loads) else None

def merge_loops(k:Scheduler) -> None:
  """Makes a sum of sums one sum, and gives reduces of the same lengths beside each other the same ranges"""
  while (u := next((u for u in k.reduceops if u.arg == (Ops.ADD, 0) and u.src[0].op is Ops.REDUCE and u.src[0].arg == u.arg), None)) is not None:
    k.ast = k.ast.substitute({u: u.replace(src=u.src[0].src + u.src[1:])})
  first:dict[tuple[UOp, ...], tuple[UOp, ...]] = {}
  for u in sorted(k.reduceops, key=lambda u: u.src[1].arg):
    ranges = first.setdefault(tuple(r.src[0] for r in u.src[1:]), u.src[1:])
    if not set(ranges) & set(u.src[1:]): k.ast = k.ast.substitute(dict(zip(u.src[1:], ranges)))

def _split(k:Scheduler, op:OptOps, r:UOp, n:int) -> UOp:
  """Splits n off the range by an opt. Returns what is left of the range"""
  axis = k.rngs.index(r)
  numbered = {OptOps.UNROLL: k.unrollable_dims, OptOps.GROUP: k.axes_of(AxisType.REDUCE)}.get(op)  # these opts number an axis among its kind
  return k.apply_opt(Opt(op, axis if numbered is None else numbered.index(axis), n))[0]

def _spread(k:Scheduler, op:OptOps, ranges:list[UOp], n:int) -> int:
  """Splits up to n off the ranges, neighbours first, by one opt after another. The list keeps what is left. Returns how many were split off"""
  taken = 1
  while ranges:
    length, most = ranges[0].vmax + 1, max(n // taken, 1)
    count = _divisor(length, most)
    even = -(-length // -(-length // most))                # of so many parts all but the last are full
    if op is OptOps.GROUP and 2 * count < even:            # a length with no good divisor is padded: some threads have no value at its end
      axis, count = k.rngs.index(ranges[0]), even
      k.apply_opt(Opt(OptOps.PADTO, axis, count))
      ranges[0] = k.rngs[axis]
      length = ranges[0].vmax + 1
    if count == 1: break
    rest = _split(k, op, ranges[0], count)
    taken *= count
    ranges[:1] = [rest] if count < length else []
    if count < length: break
  return taken

def share_sums(k:Scheduler) -> Scheduler|None:
  """The kernel, changed in place, with each of its sums shared by a block's threads; None where its sums are of another kind or too short"""
  merge_loops(k)
  reduces = k.reduceops
  if not reduces or any(r.op is not Ops.RANGE or r.src[0].op is not Ops.CONST for u in reduces for r in u.src[1:]): return None
  if any(u.op is Ops.REDUCE for x in reduces for u in x.src[0].backward_slice_with_self): return None
  classified = [matrix_times_vector(u) for u in reduces]
  if few := None in classified: classified = [few_outputs(u) for u in reduces]
  if None in classified: return None
  sums = list({tuple(s.along): s for s in classified if s is not None}.values())
  main = max(sums, key=lambda s: _length(s.along))
  outputs = prod(max(r.src[0].vmin, 1) for r in k.rngs if r.arg[-1] is not AxisType.REDUCE)
  values, columns, rows = _length(main.along) * _length(main.inside), main.columns(), list(main.rows)
  threads = threads_of(values, outputs)
  if (threads if few else threads_of(values, 1)) == 1: return None  # outputs enough, or sums too short
  beside = _spread(k, OptOps.LOCAL, rows, WARP) if columns else 1   # outputs whose threads are neighbours
  left = [list(s.along) for s in sums]
  for s, along in zip(sums, left):
    inside = 1
    for r in sorted(s.inside, key=lambda r: r.vmax):
      if inside * (n := r.vmax + 1) > UNROLLED: continue
      inside *= n
      _split(k, OptOps.UNROLL, r, n)
    if not columns: _spread(k, OptOps.UNROLL, along, min(LOAD // s.load.dtype.itemsize, max(VALUES // inside, 1)))
  if not all(left): return None
  threads = min(threads, MAX_BLOCK // beside) if columns else max(threads, min(WARP, values))
  if len(sums) > 1:                                        # sums of different lengths: the same threads share each, along one range of it
    def even(along:list[UOp], n:int) -> list[UOp]: return [r for r in along if (r.vmax + 1) % n == 0][:1]
    threads = next(n for n in range(threads, 0, -1) if all(even(along, n) for along in left))
    left = [even(along, threads) for along in left]
  for along in left: threads = _spread(k, OptOps.GROUP, along, threads)
  if threads == 1: return None
  if not columns:
    _spread(k, OptOps.LOCAL, rows, BLOCK // threads)
    # with threads in plenty, a loaded part of the vector serves several rows
    _spread(k, OptOps.UPCAST, rows, min(4, outputs * threads // (4 * RESIDENT_THREADS)))
  return k

"""Matrix times vector on quantized weights (planes, see nn/kernel.py): what most decode kernels are made of.

A launch's body calls `matvec` (nn/kernel.py has `launch` and the words used here). A launch is one or more parts (MatvecPart; linear_part makes the
usual one): each has blocks of its own, and all read the same vector. A part's rows may be segments of several matrices (RowSegments), or be known to
the kernel alone (DeferredMatrix).

A block's lanes form teams, each of which does a job: the product of a few rows with the vector, so that a read of the vector serves all of them.
A team is a part of a warp where rows are short, several warps where they are very long. What a block does for one token:

  weights = the lane's units of the job's rows      # loads are issued; none waits for the vector
  wait until the kernels before are done            # intrinsics.pdl_wait
  shared = x · norm.weight, as int8 or float32      # every thread stages a few float4
  barrier
  sums = Σ weights · shared over the team           # lanes by shuffles, then warps by shared memory
  finish(sums / rms(x), job)                        # the epilogue stores

Where a kernel chooses experts, the rows are known only behind the barrier, and the weights are loaded there.

Arithmetic. Where the target has an int8 dot product and the format has integer codes, x becomes int8 with one scale for 32 values (as
llama.cpp does it; a product's NMSE is about 4e-5) and minimums and zeros are folded in through sums of x. Elsewhere x stays float32 and a code
becomes a float by setting it into the mantissa of 2^23. Sums are float32, in a fixed order: same input, same bytes.

RMSNorm costs nothing here: x is multiplied by the norm's weight while it is staged, and the finished sums by 1/rms.
"""
from __future__ import annotations
import functools
from dataclasses import dataclass
from typing import Callable, NamedTuple, Protocol, Sequence
from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.nn.intrinsics import Target, dot4, group_reduce, group_sum, pdl_wait, round_to_int
from tinygrad.nn.kernel import SLOTS, UNIT, BlockSum, Load4, Matrix, Unit, branch, local, safe_index, sum_in_order
from tinygrad.uop.ops import Ops

FLOAT4_OF_UNIT = UNIT // 4
STEPS = 6                          # units of a row that a lane takes before the row spans more warps
WARPS, MANY_WARPS = 8, 16          # of a block; of a block of a launch of MANY_JOBS warps' work
MANY_JOBS = 2048
FEW_BLOCKS = 64                    # a launch of fewer blocks is cut finer

# ---- what a launch computes ----

@dataclass(frozen=True)
class DeferredMatrix:
  """A matrix that the kernels before this one choose. of(wait_zero) -> the matrix; its loads of their results add wait_zero to the index."""
  of: Callable[[UOp], Matrix]

RowSegments = Sequence[tuple[Matrix|DeferredMatrix, UOp]]   # (matrix, row) for each segment of the vector; most vectors have one

@dataclass(frozen=True)
class MatvecPart:
  """A part of a launch.
  jobs: how many.
  rows_of(job) -> the job's rows.
  finish(sums, job, is_writer, wait_zero) -> stores: the epilogue. sums are the rows' products. Only the lane with is_writer stores. Loads of other
  kernels' results add wait_zero to the index.
  integer: whether every matrix has integer codes."""
  jobs: int
  rows_of: Callable[[UOp], Sequence[RowSegments]]
  finish: Callable[[list[UOp], UOp, UOp, UOp], list[UOp]]
  integer: bool

def linear_part(rows:int, of:Callable[[UOp], RowSegments], y:UOp, integer:bool, out_index:Callable[[UOp], UOp]=lambda row: row,
                epilogue:Callable[[list[UOp], UOp], list[UOp]]|None=None, residual:UOp|None=None) -> MatvecPart:
  """y[out_index(row)] = the row times x, for row < rows; of(row) names it. A job is two rows.
  epilogue(sums, row) -> the sums of rows `row` and `row + 1`, changed. residual[row] is added."""
  odd = rows % 2 == 1
  def rows_of(job:UOp) -> list[RowSegments]:
    pair = [job * 2 + i for i in range(2)]
    return [of(row.minimum(rows - 1) if odd else row) for row in pair]
  def finish(sums:list[UOp], job:UOp, is_writer:UOp, wait_zero:UOp) -> list[UOp]:
    first, stores = job * 2, []
    for i, value in enumerate(sums if epilogue is None else epilogue(sums, first)):
      row = first + i
      writes = is_writer & (row < rows) if odd else is_writer
      if residual is not None: value = value + residual[(row + wait_zero).valid(writes)].load()
      stores.append(y[out_index(row).valid(writes)].store(value.cast(y.dtype)))
    return stores
  return MatvecPart(-(-rows // 2), rows_of, finish, integer)

@dataclass(frozen=True)
class Operand:
  """The vector of a launch, which other kernels have written. segments: units of each. norm: the weight of an RMSNorm of it, and its epsilon."""
  segments: Sequence[int]
  load4: Load4
  norm: tuple[Load4, float]|None

  @property
  def units(self) -> int: return sum(self.segments)
  def values(self, number:UOp, wait_zero:UOp) -> list[UOp]:
    """A float4"""
    return self.load4(number + wait_zero)
  def weighted(self, number:UOp, wait_zero:UOp) -> list[UOp]:
    """A float4 times the norm's weight"""
    values = self.values(number, wait_zero)
    return values if self.norm is None else [value * weight for value, weight in zip(values, self.norm[0](number))]

# ---- the vector in shared memory ----

class SharedVector(Protocol):
  """A vector between the threads that stage it and the lanes that read it"""
  def stage(self, number:UOp, values:list[UOp]) -> list[UOp]:
    """The stores of a float4"""
  def after(self, barrier:UOp) -> None:
    """Reads come behind the barrier"""
  def read(self, unit:UOp) -> Callable[[Unit], UOp]:
    """(unit of weights) -> its product with a unit of the vector, float32"""

def float_dot(x:list[UOp]) -> Callable[[Unit], UOp]:
  """(unit of weights) -> its product with 32 float32 values"""
  def dot(weights:Unit) -> UOp:
    width, sums = UNIT // len(weights.scales), []
    for group, (scale, minimum) in enumerate(weights.scales):
      numbers = range(group * width, (group + 1) * width)
      product = scale * sum_in_order(weights.value(i) * x[i] for i in numbers)
      sums.append(product if minimum is None else product + minimum * sum_in_order(x[i] for i in numbers))
    return sum_in_order(sums)
  return dot

class FloatVector:
  """The vector as float32. Float4 j of unit u lies at (j·pitch + u)·4: neighbouring lanes read neighbouring 16 bytes."""
  def __init__(self, units:int, slot:int):
    self.pitch = units + 1
    self.shared = local(FLOAT4_OF_UNIT * self.pitch * 4, dtypes.float, slot)
  def index(self, j:UOp|int, unit:UOp) -> UOp: return (j * self.pitch + unit) * 4
  def stage(self, number:UOp, values:list[UOp]) -> list[UOp]:
    index = self.index(number % FLOAT4_OF_UNIT, number // FLOAT4_OF_UNIT)
    return [self.shared[index + i].store(value) for i, value in enumerate(values)]
  def after(self, barrier:UOp) -> None: self.shared = self.shared.after(barrier)
  def read(self, unit:UOp) -> Callable[[Unit], UOp]:
    return float_dot([self.shared[self.index(j, unit) + i].load() for j in range(FLOAT4_OF_UNIT) for i in range(4)])
  @staticmethod
  def takes(target:Target, units:int) -> bool:
    """Whether the vector leaves 2 KiB of shared memory for the rest"""
    return FLOAT4_OF_UNIT * (units + 1) * 16 + 2048 <= target.shared_bytes

class DeviceVector:
  """A vector too wide for shared memory stays where it is: lanes read it with a stride, and leave the rest to the caches."""
  def __init__(self, operand:Operand, wait_zero:UOp):
    self.operand, self.wait_zero = operand, wait_zero
  def stage(self, number:UOp, values:list[UOp]) -> list[UOp]: return []
  def after(self, barrier:UOp) -> None: pass
  def read(self, unit:UOp) -> Callable[[Unit], UOp]:
    numbers = [unit * FLOAT4_OF_UNIT + j for j in range(FLOAT4_OF_UNIT)]
    return float_dot([value for number in numbers for value in self.operand.weighted(number, self.wait_zero)])

class Int8Vector:
  """The vector as int8, four to a word: words 0–3 of unit u at u·4, words 4–7 at (pitch + u)·4. Beside them as float32, at u·4: the unit's scale,
  and scale · Σ x of each of its halves."""
  def __init__(self, target:Target, units:int, slot:int):
    self.target = target
    self.pitch = -(-units // 8) * 8 + 4                    # the halves of a unit fall into other banks
    self.words = local(2 * self.pitch * 4, dtypes.int, slot)
    self.meta = local(units * 4, dtypes.float, slot + 1)
  def stage(self, number:UOp, values:list[UOp]) -> list[UOp]:
    target, j, unit = self.target, number % FLOAT4_OF_UNIT, number // FLOAT4_OF_UNIT   # eight neighbouring lanes hold a unit
    largest = group_reduce(target, functools.reduce(UOp.maximum, [value.maximum(-value) for value in values]), FLOAT4_OF_UNIT, UOp.maximum)
    inverse = (largest > 0).where(127.0 / largest, 0.0)
    codes = [round_to_int(value * inverse) for value in values]
    half_sum = group_sum(target, sum_in_order(codes), FLOAT4_OF_UNIT // 2)
    scale = largest * (1 / 127)
    word = (codes[0] & 255) | ((codes[1] & 255) << 8) | ((codes[2] & 255) << 16) | (codes[3] << 24)
    half, of_half = j // 4, j % 4
    return [self.words[(half * self.pitch + unit) * 4 + of_half].store(word), self.meta[(unit * 4).valid(j.eq(0))].store(scale),
            self.meta[(unit * 4 + 1 + half).valid(of_half.eq(0))].store(scale * half_sum.cast(dtypes.float))]
  def after(self, barrier:UOp) -> None:
    self.words = self.words.after(barrier)
    self.meta = self.meta.after(barrier)
  def read(self, unit:UOp) -> Callable[[Unit], UOp]:
    words = [self.words[(half * self.pitch + unit) * 4 + i].load() for half in range(2) for i in range(4)]
    scale, *half_sums = (self.meta[unit * 4 + i].load() for i in range(3))
    def dot(weights:Unit) -> UOp:
      groups, sums = len(weights.scales), []
      for group, (weight_scale, minimum) in enumerate(weights.scales):
        products = UOp.const(0, dtypes.int)
        for j in range(group * 8 // groups, (group + 1) * 8 // groups):
          codes = weights.words[j] ^ 0x80808080 if weights.zero == 128 else weights.words[j]   # int8 as they are
          products = dot4(self.target, codes, words[j], products)
        x_sum = half_sums[group] if groups == 2 else half_sums[0] + half_sums[1]
        product = scale * products.cast(dtypes.float)
        if weights.zero not in (0, 128): product = product - x_sum * float(weights.zero)
        sums.append(weight_scale * product if minimum is None else weight_scale * product + minimum * x_sum)
      return sum_in_order(sums)
    return dot

# ---- threads ----

@dataclass(frozen=True)
class ThreadLayout:
  lanes: int                   # of a warp, that a team spans
  warps: int                   # that a team spans
  teams: int                   # of a block
  @property
  def span(self) -> int: return self.lanes * self.warps
  @property
  def threads(self) -> int: return self.span * self.teams

def thread_layout(segments:Sequence[int], warp_lanes:int, jobs:int) -> ThreadLayout:
  """The layout for a launch of so many jobs. A team is within a warp up to STEPS units a lane, over the most lanes that leave at most a tenth of
  them idle."""
  units, lanes, warps = sum(segments), warp_lanes, 1
  while sum(-(-length // (warp_lanes * warps)) for length in segments) > STEPS: warps += 1
  while warps == 1 and lanes > 1 and units < 0.9 * lanes * -(-units // lanes): lanes //= 2
  block_warps = MANY_WARPS if jobs * lanes * warps // warp_lanes >= MANY_JOBS else WARPS
  teams = max(block_warps // warps, 1) * (warp_lanes // lanes)
  # too few jobs to fill the machine: smaller blocks, and a team over as many lanes as a row has units
  while teams > 1 and jobs < FEW_BLOCKS * teams and teams * lanes * warps >= 2 * warp_lanes: teams //= 2
  while teams == 1 and warps * lanes * 2 <= units: warps *= 2
  return ThreadLayout(lanes, warps, teams)

class LaneUnit(NamedTuple):
  """A unit of every row that a lane takes"""
  segment: int
  start: int                   # of the segment, in units of the vector
  unit: UOp                    # in the segment; any unit where `inside` is false
  inside: UOp|None             # whether the segment has this unit; None: for every lane

def lane_units(segments:Sequence[int], span:int, lane:UOp) -> list[LaneUnit]:
  """A team's lanes take neighbouring units, step by step"""
  units, start = [], 0
  for segment, length in enumerate(segments):
    for first in range(0, length, span):
      unit, inside = first + lane, None if first + span <= length else first + lane < length
      units.append(LaneUnit(segment, start, safe_index(unit, inside), inside))
    start += length
  return units

def both(first:UOp|None, second:UOp|None) -> UOp|None:
  """Whether two conditions hold; None always does"""
  if first is None or second is None: return second if first is None else first
  return first & second

class Threads(NamedTuple):
  """Where a part runs"""
  block: UOp                   # of the part's
  thread: UOp                  # of the block
  threads: int                 # of the block; those that the part's layout leaves over do no job
  slot: int                    # the part's first: two for the vector, one for the sum of its squares, one for a team's warps

# ---- a launch ----

# extra_stores(block, thread, threads, wait_zero) -> stores: a small job beside
ExtraStores = Callable[[UOp, UOp, int, UOp], list[UOp]]
# barrier_of(thread, threads, wait_zero, stores) -> a barrier behind the stores, after which the part's rows are known
BarrierOf = Callable[[UOp, int, UOp, list[UOp]], UOp]

def matvec(target:Target, segments:Sequence[int], x:Load4, parts:Sequence[MatvecPart], norm:tuple[Load4, float]|None=None,
           extra_stores:ExtraStores|None=None, barrier_of:BarrierOf|None=None, items:int=1) -> list[UOp]:
  """The stores of a launch over gidx0, each part in blocks of its own.
  segments, x, norm: see Operand. items: how many times all this runs, by gidx1, which is the caller's, in x and parts.
  extra_stores and barrier_of are for a launch of one part."""
  operand = Operand(segments, x, norm)
  layouts = [thread_layout(segments, target.lanes, items * part.jobs) for part in parts]
  blocks = [-(-part.jobs // layout.teams) for part, layout in zip(parts, layouts)]
  threads = max(layout.threads for layout in layouts)
  block, thread = UOp.special(sum(blocks), "gidx0"), UOp.special(threads, "lidx0")
  if len(parts) == 1: return _Part(target, operand, parts[0], layouts[0], Threads(block, thread, threads, 0)).stores(extra_stores, barrier_of)
  assert extra_stores is None and barrier_of is None
  stores, start = [], 0
  for number, (part, layout, count) in enumerate(zip(parts, layouts, blocks)):
    loop, zero = branch(number, (block >= start) & (block < start + count))
    own = Threads(block - start + zero, thread, threads, number * SLOTS)
    stores.append(UOp.group(*_Part(target, operand, part, layout, own).stores()).end(loop))
    start += count
  return stores

Weights = list[list[Unit]]   # of each row, each of the lane's units

def global_loads(weights:Weights) -> list[UOp]:
  """What the weights are made of, in device memory"""
  nodes = UOp.sink(*(register for row in weights for unit in row for register in unit.registers())).toposort()
  return [node for node in nodes if node.op is Ops.LOAD and node.src[0].src[0].addrspace is AddrSpace.GLOBAL]

class _Part:
  """A part of a launch, put together: the phases at the head of the file, a method each"""
  def __init__(self, target:Target, operand:Operand, part:MatvecPart, layout:ThreadLayout, at:Threads):
    self.target, self.operand, self.part, self.layout = target, operand, part, layout
    self.block, self.thread, self.threads, self.slot = at
    self.team, self.lane = self.thread // layout.span, self.thread % layout.span
    self.lane_units = lane_units(operand.segments, layout.span, self.lane)

  def stores(self, extra_stores:ExtraStores|None=None, barrier_of:BarrierOf|None=None) -> list[UOp]:
    """All phases in order"""
    if barrier_of is None:
      weights, wait_zero = self.prefetch()
      vector, squares, staged = self.stage(wait_zero)
      # the loads are sources too: they are issued before it, not where they are used
      barrier = UOp(Ops.BARRIER, src=(*staged, *global_loads(weights)))
    else:
      wait_zero = pdl_wait(self.target)
      vector, squares, staged = self.stage(wait_zero)
      barrier = barrier_of(self.thread, self.threads, wait_zero, staged)
      weights = self.load(wait_zero)
    vector.after(barrier)
    sums, team, is_first = self.reduce_warps(self.products(weights, vector))
    if squares is not None: sums = self.normalize(sums, squares.warp_sums(barrier))
    job, inside = self.job(team)
    stores = self.part.finish(sums, job, both(is_first, inside), wait_zero)
    return stores + (extra_stores(self.block, self.thread, self.threads, wait_zero) if extra_stores else [])

  def job(self, team:UOp) -> tuple[UOp, UOp|None]:
    """A team's job, and whether there is one"""
    teams, jobs = self.layout.teams, self.part.jobs
    job = self.block * teams + team
    return job, both(team < teams if self.layout.threads < self.threads else None, job < jobs if jobs % teams else None)

  # ---- weights ----

  def load(self, wait_zero:UOp|None) -> Weights:
    """The lane's units of the job's rows; without wait_zero, only those of matrices that are known"""
    job, inside = self.job(self.team)
    weights:Weights = []
    for row in self.part.rows_of(safe_index(job, inside)):
      weights.append([])
      for place in self.lane_units:
        matrix, number = row[place.segment]
        if isinstance(matrix, DeferredMatrix):
          if wait_zero is None: continue
          matrix = matrix.of(wait_zero)
        weights[-1].append(matrix(number, place.unit, both(inside, place.inside)))
    return weights

  def prefetch(self) -> tuple[Weights, UOp]:
    """The weights, and wait_zero. Whatever no other kernel decides is loaded before the wait."""
    known = self.load(None)
    wait_zero = pdl_wait(self.target, *global_loads(known))
    complete = all(len(units) == len(self.lane_units) for units in known)
    return known if complete else self.load(wait_zero), wait_zero

  # ---- the vector ----

  def shared_vector(self, wait_zero:UOp) -> SharedVector:
    if self.part.integer and self.target.dot4 is not None: return Int8Vector(self.target, self.operand.units, self.slot)
    if FloatVector.takes(self.target, self.operand.units): return FloatVector(self.operand.units, self.slot)
    return DeviceVector(self.operand, wait_zero)

  def stage(self, wait_zero:UOp) -> tuple[SharedVector, BlockSum|None, list[UOp]]:
    """The vector, the sum of its squares where it has a norm, and the stores that make both"""
    vector, n_float4, stores, squares = self.shared_vector(wait_zero), self.operand.units * FLOAT4_OF_UNIT, [], []
    for first in range(0, n_float4, self.threads):
      number, inside = self.thread + first, None
      if first + self.threads > n_float4:
        inside = number < n_float4
        number = inside.where(number, n_float4 - FLOAT4_OF_UNIT + self.thread % FLOAT4_OF_UNIT)   # the rest stage the last unit again
      if self.operand.norm is not None:
        own = [value * value for value in self.operand.values(number, wait_zero)]
        squares += own if inside is None else [inside.where(square, 0.0) for square in own]
      stores += vector.stage(number, self.operand.weighted(number, wait_zero))
    if not squares: return vector, None, stores
    block_squares = BlockSum(self.target, sum_in_order(squares), self.thread, self.threads, self.slot + 2)
    return vector, block_squares, [*stores, block_squares.store]

  def normalize(self, sums:list[UOp], squares:list[UOp]) -> list[UOp]:
    """The rows' products with RMSNorm(x): 1/rms is a factor of each"""
    assert self.operand.norm is not None
    factor = (sum_in_order(squares) * (1.0 / (self.operand.units * UNIT)) + self.operand.norm[1]).rsqrt()
    return [value * factor for value in sums]

  # ---- products ----

  def products(self, weights:Weights, vector:SharedVector) -> list[UOp]:
    """Of each row, its product with the vector, as far as the lanes of one warp have it"""
    dots, sums = [vector.read(place.start + place.unit) for place in self.lane_units], []
    for row in weights:
      own = sum_in_order(dot(unit) for dot, unit in zip(dots, row))
      sums.append(group_sum(self.target, own, self.layout.lanes))
    return sums

  def reduce_warps(self, sums:list[UOp]) -> tuple[list[UOp], UOp, UOp]:
    """The sums over a team's warps, the team whose sums a thread then has, and whether it is the first of that team's threads.
    Warps meet in shared memory; a thread a team goes on."""
    if self.layout.warps == 1: return sums, self.team, self.lane.eq(0)
    lanes, warps, teams, count = self.layout.lanes, self.layout.warps, self.layout.teams, len(sums)
    shared, warp = local(self.threads // lanes * count, dtypes.float, self.slot + 3), self.lane // lanes
    def index(team:UOp, warp:UOp|int, i:int) -> UOp: return (team * warps + warp) * count + i
    first_lane = (self.lane % lanes).eq(0)
    stores = [shared[index(self.team, warp, i).valid(first_lane)].store(value) for i, value in enumerate(sums)]
    shared, team = shared.after(UOp(Ops.BARRIER, src=tuple(stores))), self.thread.minimum(teams - 1)
    return [sum_in_order(shared[index(team, warp, i)].load() for warp in range(warps)) for i in range(count)], team, self.thread < teams

"""Matrix times vector on weights as they lie in the file: what every decode kernel is made of.

A launch stages one vector x in shared memory and multiplies rows by it. A row lies over a part of a warp where it is short and over several
warps where it is very long. Lanes that share a row are a team; a team does a few rows at once, so that a read of x serves all of them. Weights
are loaded before the barrier: none waits for x.

Arithmetic. Where the target has an int8 dot product and the format has integer codes, x becomes int8 with one scale for 32 values (as
llama.cpp does it; a product's NMSE is about 4e-5) and minimums and zeros are folded in through sums of x. Elsewhere x stays float32 and a code
becomes a float by setting it into the mantissa of 2^23. Sums are float32, in a fixed order: same input, same bytes.

RMSNorm costs nothing here: x is multiplied by the norm's weight while it is staged, and the finished sums by 1/rms.
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import Callable, Sequence
from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import Ops
from tinygrad.nn.intrinsics import Target, dot4, group_reduce, group_sum, pdl_wait, round_to_int
from tinygrad.nn.kernel import SLOTS, UNIT, Matrix, Unit, add, branch, local

STEPS = 6                          # units a lane takes of a row before the row is spread over more warps
WARPS, MANY_WARPS, MANY_JOBS = 8, 16, 2048  # of a block; of a block of a launch with that many warps' work
FEW_BLOCKS = 64                    # a launch of fewer blocks is cut finer

@dataclass(frozen=True)
class DeferredMatrix:
  """A matrix whose rows are known only after the kernels before: of(wait_zero) reads what they wrote at indices that wait_zero, a zero, is added to"""
  of: Callable[[UOp], Matrix]

RowSegments = Sequence[tuple[Matrix|DeferredMatrix, UOp]]   # one matrix and row for each of the segments that the vector is cut into, most often one

@dataclass(frozen=True)
class MatvecPart:
  """A part of a launch: `teams` jobs. of(team) names a job's rows; finish(sums, team, is_writer, wait_zero) stores what became of them where is_writer is
  true (it is on one lane of the team); what earlier kernels wrote it reads at indices that wait_zero, a zero, is added to. integer: whether
  every matrix has integer codes."""
  teams: int
  of: Callable[[UOp], Sequence[RowSegments]]
  finish: Callable[[list[UOp], UOp, UOp, UOp], list[UOp]]
  integer: bool

def linear_part(rows:int, of:Callable[[UOp], RowSegments], y:UOp, integer:bool, out_index:Callable[[UOp], UOp]=lambda i: i, epilogue:Callable[[list[UOp], UOp], list[UOp]]|None=None,
              residual:UOp|None=None) -> MatvecPart:
  """The part that most launches are: y[out_index(i)] = the row of(i) times x, for i < rows, two rows a team. epilogue(sums, i) changes the sums of
  rows i and i + 1; residual[i] is added."""
  def inside(row:UOp) -> UOp: return row.minimum(rows - 1) if rows % 2 else row
  def finish(sums:list[UOp], team:UOp, is_writer:UOp, wait_zero:UOp) -> list[UOp]:
    row, done = team * 2, []
    for r, s in enumerate(sums if epilogue is None else epilogue(sums, row)):
      ok = is_writer & (row + r < rows) if rows % 2 else is_writer
      done.append(y[out_index(row + r).valid(ok)].store((s if residual is None else s + residual[(row + r + wait_zero).valid(ok)].load()).cast(y.dtype)))
    return done
  return MatvecPart(-(-rows // 2), lambda team: [of(inside(team * 2 + r)) for r in range(2)], finish, integer)

def float_dot(x:list[UOp]) -> Callable[[Unit], UOp]:
  """The product of a unit with 32 float32 values"""
  def dot(w:Unit) -> UOp:
    width, y = UNIT // len(w.scales), None
    for g, (scale, minimum) in enumerate(w.scales):
      products, total = None, None
      for i in range(g * width, (g + 1) * width):
        products = add(products, w.value(i) * x[i])
        if minimum is not None: total = add(total, x[i])
      y = add(y, scale * products if minimum is None else scale * products + minimum * total)
    return y
  return dot

class FloatVector:
  """x in shared memory as float32. Word j of unit u lies at (j·pitch + u)·4: neighbouring lanes read neighbouring 16 bytes."""
  def __init__(self, units:int, slot:int): self.pitch = units + 1; self.shared = local(8 * self.pitch * 4, dtypes.float, slot)
  def stage(self, k:UOp, x:list[UOp]) -> list[UOp]: return [self.shared[(k % 8 * self.pitch + k // 8) * 4 + j].store(v) for j, v in enumerate(x)]
  def after(self, barrier:UOp) -> None: self.shared = self.shared.after(barrier)
  def read(self, u:UOp) -> Callable[[Unit], UOp]:
    return float_dot([self.shared[(j * self.pitch + u) * 4 + byte].load() for j in range(8) for byte in range(4)])
  @staticmethod
  def fits(target:Target, units:int) -> bool: return 8 * (units + 1) * 16 + 2048 <= target.shared_bytes

class DeviceVector:
  """x where it lies, for a vector too wide for shared memory: lanes read it with a stride, and leave the rest to the caches."""
  def __init__(self, x:Callable[[UOp], list[UOp]]): self.x = x
  def stage(self, k:UOp, x:list[UOp]) -> list[UOp]: return []
  def after(self, barrier:UOp) -> None: pass
  def read(self, u:UOp) -> Callable[[Unit], UOp]: return float_dot([v for j in range(8) for v in self.x(u * 8 + j)])

class Int8Vector:
  """x in shared memory as int8, four to a word: words 0–3 of unit u at u·4, words 4–7 at (pitch + u)·4; beside them its scale and, for each
  half of a unit, scale · Σ x."""
  def __init__(self, target:Target, units:int, slot:int):
    self.target, self.pitch = target, -(-units // 8) * 8 + 4  # the halves of a unit fall into other banks
    self.words, self.meta = local(2 * self.pitch * 4, dtypes.int, slot), local(units * 4, dtypes.float, slot + 1)
  def stage(self, k:UOp, x:list[UOp]) -> list[UOp]:
    t, j, u = self.target, k % 8, k // 8                   # eight neighbouring lanes hold a unit
    largest = None
    for v in x: largest = v.maximum(-v) if largest is None else largest.maximum(v.maximum(-v))
    largest = group_reduce(t, largest, 8, lambda a, b: a.maximum(b))
    inverse = (largest > 0).where(127.0 / largest, 0.0)
    z = [round_to_int(v * inverse) for v in x]
    half_sum = group_sum(t, z[0] + z[1] + z[2] + z[3], 4)
    scale = largest * (1 / 127)
    word = (z[0] & 255) | ((z[1] & 255) << 8) | ((z[2] & 255) << 16) | (z[3] << 24)
    return [self.words[(j // 4 * self.pitch + u) * 4 + j % 4].store(word), self.meta[(u * 4).valid(j.eq(0))].store(scale),
            self.meta[(u * 4 + 1 + j // 4).valid((j % 4).eq(0))].store(scale * half_sum.cast(dtypes.float))]
  def after(self, barrier:UOp) -> None: self.words, self.meta = self.words.after(barrier), self.meta.after(barrier)
  def read(self, u:UOp) -> Callable[[Unit], UOp]:
    x = [self.words[(h * self.pitch + u) * 4 + j].load() for h in range(2) for j in range(4)]
    scale, *sums = (self.meta[u * 4 + i].load() for i in range(3))
    def dot(w:Unit) -> UOp:
      groups, y = len(w.scales), None
      for g, (weight_scale, minimum) in enumerate(w.scales):
        products = UOp.const(0, dtypes.int)
        for j in range(g * 8 // groups, (g + 1) * 8 // groups):
          products = dot4(self.target, w.words[j] ^ 0x80808080 if w.zero == 128 else w.words[j], x[j], products)
        total, inner = sums[g] if groups == 2 else sums[0] + sums[1], scale * products.cast(dtypes.float)
        if w.zero not in (0, 128): inner = inner - total * float(w.zero)
        y = add(y, weight_scale * inner if minimum is None else weight_scale * inner + minimum * total)
      return y
    return dot

def thread_layout(segments:Sequence[int], lanes:int, jobs:int) -> tuple[int, int, int]:
  """(lanes of a warp a row lies over, warps it lies over, teams a block) for a launch of so many jobs.
  A row stays within a warp up to STEPS units a lane, over the most lanes that leave at most a tenth of them idle."""
  units, width, warps = sum(segments), lanes, 1
  while sum(-(-n // (lanes * warps)) for n in segments) > STEPS: warps += 1
  while warps == 1 and width > 1 and units < 0.9 * width * -(-units // width): width //= 2
  teams = max((MANY_WARPS if jobs * width * warps // lanes >= MANY_JOBS else WARPS) // warps, 1) * (lanes // width)
  # too few jobs to fill the machine: smaller blocks, and a row over as many lanes as it has units
  while teams > 1 and jobs < FEW_BLOCKS * teams and teams * width * warps >= 2 * lanes: teams //= 2
  while teams == 1 and warps * width * 2 <= units: warps *= 2
  return width, warps, teams

Load4 = Callable[[UOp], list[UOp]]  # k -> the values 4k … 4k+3 of a vector, float32

def matvec(target:Target, segments:Sequence[int], x:Load4, parts:list[MatvecPart], norm:tuple[Load4, float]|None=None,
           extra_stores:Callable[[UOp, UOp, int, UOp], list[UOp]]|None=None,
           barrier_of:Callable[[UOp, int, UOp, list[UOp]], UOp]|None=None, items:int=1) -> list[UOp]:
  """The stores of a launch over gidx0, each part in blocks of its own; what else numbers the blocks (a head, a token: `items` of them) is the
  caller's, in x and parts.
  x: the vector, of so many units of 32 values as `segments` sums to; norm: the weight of an RMSNorm of x and its epsilon; extra_stores(block, thread, threads,
  wait_zero): the stores of a small job done beside; barrier_of(thread, threads, wait_zero, stores): where rows are chosen here, the barrier, behind the
  given stores, after which they are known."""
  layouts = [thread_layout(segments, target.lanes, items * part.teams) for part in parts]
  threads = max(width * warps * teams for width, warps, teams in layouts)
  blocks = [-(-part.teams // teams) for part, (_, _, teams) in zip(parts, layouts)]
  g, t = UOp.special(sum(blocks), "gidx0"), UOp.special(threads, "lidx0")
  if len(parts) == 1: return _emit_part(target, segments, x, parts[0], layouts[0], g, t, threads, 0, norm, extra_stores, barrier_of)
  done, start = [], 0
  for i, (part, shape, n) in enumerate(zip(parts, layouts, blocks)):
    loop, zero = branch(i, (g >= start) & (g < start + n))
    done.append(UOp.group(*_emit_part(target, segments, x, part, shape, g - start + zero, t, threads, i * SLOTS, norm)).end(loop))
    start += n
  return done

def _emit_part(target:Target, segments:Sequence[int], x:Load4, part:MatvecPart, shape:tuple[int, int, int], block:UOp, t:UOp, threads:int, slot:int,
          norm:tuple[Load4, float]|None=None, extra_stores:Callable|None=None, barrier_of:Callable|None=None) -> list[UOp]:
  (lanes, warps_of_row, teams), units, integer = shape, sum(segments), part.integer and target.dot4 is not None
  span = lanes * warps_of_row
  team, lane = t // span, t % span
  def both(a:UOp|None, b:UOp|None) -> UOp|None: return b if a is None else a if b is None else a & b
  def job_of(number:UOp) -> tuple[UOp, UOp|None]:
    job = block * teams + number
    return job, both(number < teams if teams * span < threads else None, job < part.teams if part.teams % teams else None)
  unit_of = [(first, s * span + lane, None if (s + 1) * span <= n else s * span + lane < n)
             for first, n in zip([sum(segments[:i]) for i in range(len(segments))], segments) for s in range(-(-n // span))]
  segment_of = [i for i, n in enumerate(segments) for _ in range(-(-n // span))]
  def rows_now() -> tuple[Sequence[RowSegments], UOp|None]:
    job, inside = job_of(team)
    return part.of(job if inside is None else inside.where(job, 0)), inside
  def units_of(row:RowSegments, inside:UOp|None, wait_zero:UOp|None=None, known:Sequence[Unit|None]=()) -> list[Unit|None]:
    """A row's units: first those of matrices whose rows are known; then, with the zero that the others wait for, these too"""
    units:list[Unit|None] = []
    for n, (i, (_, u, ok)) in enumerate(zip(segment_of, unit_of)):
      matrix, number = row[i]
      if isinstance(matrix, DeferredMatrix) and wait_zero is not None: matrix = matrix.of(wait_zero)
      if known and known[n] is not None: units.append(known[n])
      else: units.append(None if isinstance(matrix, DeferredMatrix) else matrix(number, u if ok is None else ok.where(u, 0), both(inside, ok)))
    return units
  def loads_of(weights:list[list[Unit|None]]) -> list[UOp]:
    found = UOp.sink(*(v for row in weights for w in row if w is not None for v in w.registers())).toposort()
    return [u for u in found if u.op is Ops.LOAD and u.src[0].src[0].addrspace is AddrSpace.GLOBAL]
  def weighted(k:UOp) -> list[UOp]:
    values = x(k + wait_zero)
    return values if norm is None else [v * w for v, w in zip(values, norm[0](k))]
  # weights before x where they do not depend on what other kernels have made
  if barrier_of is not None: wait_zero = pdl_wait(target)
  else:
    rows, inside = rows_now()
    known = [units_of(row, inside) for row in rows]
    wait_zero = pdl_wait(target, *loads_of(known))
    weights = [units_of(row, inside, wait_zero, units) for row, units in zip(rows, known)]
    loads = loads_of(weights)
  vector = Int8Vector(target, units, slot) if integer else FloatVector(units, slot) if FloatVector.fits(target, units) else DeviceVector(weighted)
  n_float4, stores, squares = units * 8, [], None
  for first in range(0, n_float4, threads):
    k, ok = t + first, None
    if first + threads > n_float4: ok, k = k < n_float4, (k < n_float4).where(k, n_float4 - 8 + t % 8)  # the rest stage the last unit again
    if norm is not None:
      for v in x(k + wait_zero): squares = add(squares, v * v if ok is None else ok.where(v * v, 0.0))
    stores += vector.stage(k, weighted(k))
  if squares is not None:
    square_sums = local(threads // target.lanes, dtypes.float, slot + 2)
    stores.append(square_sums[(t // target.lanes).valid((t % target.lanes).eq(0))].store(group_sum(target, squares, target.lanes)))
  if barrier_of is None: barrier = UOp(Ops.BARRIER, src=(*stores, *loads))
  else:
    barrier = barrier_of(t, threads, wait_zero, stores)
    rows, inside = rows_now()
    weights = [units_of(row, inside) for row in rows]
  vector.after(barrier)
  factor = None
  if norm is not None:
    square_sums, total = square_sums.after(barrier), None
    for w in range(threads // target.lanes): total = add(total, square_sums[w].load())
    factor = (total * (1.0 / (units * UNIT)) + norm[1]).rsqrt()
  # products
  dots = [vector.read(first + (u if ok is None else ok.where(u, 0))) for first, u, ok in unit_of]
  sums = []
  for row in weights:
    y = None
    for dot, w in zip(dots, row): y = add(y, dot(w))
    sums.append(group_sum(target, y, lanes))
  number, here = team, lane.eq(0)
  if warps_of_row > 1:
    # a row's warps meet in shared memory; a thread a team goes on
    partial, warp = local(threads // lanes * len(sums), dtypes.float, slot + 3), lane // lanes
    written = [partial[((team * warps_of_row + warp) * len(sums) + i).valid((lane % lanes).eq(0))].store(y) for i, y in enumerate(sums)]
    partial, number, here = partial.after(UOp(Ops.BARRIER, src=tuple(written))), t.minimum(teams - 1), t < teams
    sums = []
    for i in range(len(written)):
      y = None
      for w in range(warps_of_row): y = add(y, partial[(number * warps_of_row + w) * len(written) + i].load())
      sums.append(y)
  if factor is not None: sums = [y * factor for y in sums]
  job, inside = job_of(number)
  is_writer = both(here, inside)
  return part.finish(sums, job, is_writer, wait_zero) + (extra_stores(block, t, threads, wait_zero) if extra_stores else [])


"""Matrix times vector on weights as they lie in the file: y[i] = W[m(i)] · x[i].

Replaces the auto-scheduled product over dequantized weights, which reads a row with one thread.
One kernel serves a matrix (m = 0), a stack with a matrix a head (m = i mod H) and chosen experts (m = ids[i], read in the kernel).
Layout: about 8 warps share x[i] in shared memory, as float32 words transposed so that neighbouring lanes read neighbouring 16 bytes. A lane
takes at most STEPS units of 32 weights of a row, and ROWS rows; a row lies over a part of a warp where it is short, over several warps
where it is long. Every weight is loaded before the barrier: none waits for x.
Arithmetic: float32; a code becomes a float by setting it into the mantissa of 2^23; sums in a fixed order.
"""
from __future__ import annotations
from typing import Callable
from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import KernelInfo, Ops
from tinygrad.nn.intrinsics import Target, group_sum

UNIT, WARPS, ROWS, STEPS = 32, 8, 2, 2

# what unpack gives for one unit: 32 values and, for all of them or each half, a scale and a minimum or None
Unit = tuple[list[UOp], list[tuple[UOp, UOp|None]]]

def row_layout(units:int, lanes:int) -> tuple[int, int]:
  """(lanes of a warp, warps) that a row lies over: within a warp the most lanes that leave no more than a tenth of them idle"""
  if units > lanes * STEPS: return lanes, -(-units // (lanes * STEPS))
  while lanes > 1 and units < 0.9 * lanes * -(-units // lanes): lanes //= 2
  return lanes, 1

def add(a:UOp|None, b:UOp) -> UOp: return b if a is None else a + b

def dot(unit:Unit, x:list[UOp]) -> UOp:
  """Σ (scale · value + minimum) · x over the 32 weights of a unit"""
  values, scales = unit
  width, y = UNIT // len(scales), None
  for g, (scale, minimum) in enumerate(scales):
    products, sum_x = None, None
    for v, a in zip(values[g * width:(g + 1) * width], x[g * width:(g + 1) * width]):
      products = add(products, v * a)
      if minimum is not None: sum_x = add(sum_x, a)
    y = add(y, scale * products if minimum is None else scale * products + minimum * sum_x)
  assert y is not None
  return y

def matvec(target:Target, unpack:Callable[[dict[str, UOp], UOp, UOp], Unit], names:list[str], rows:int, units:int, matrices:int, items:int, share:int,
           has_ids:bool, name:str) -> Callable[..., UOp]:
  """The kernel as a function of flat placeholders: out float32 (items·rows,), x float32 (items/share·units·32,), ids int32 (items,) if has_ids, then
  the planes in the order of `names`. Without ids, item i takes matrix i mod `matrices`; with them, an id out of range is clamped."""
  lanes, warps_of_row = row_layout(units, target.lanes)
  span = lanes * warps_of_row                             # lanes of a row
  steps, teams = -(-units // span), max(WARPS // warps_of_row, 1) * (target.lanes // lanes)
  threads, pitch, tail = teams * span, units + 1, rows % (teams * ROWS) != 0
  def fxn(out:UOp, x:UOp, *rest:UOp) -> UOp:
    planes = dict(zip(names, rest[1:] if has_ids else rest))
    group, item, t = UOp.special(-(-rows // (teams * ROWS)), "gidx0"), UOp.special(items, "gidx1"), UOp.special(threads, "lidx0")
    team, lane = t // span, t % span                      # a team does ROWS rows
    matrix = rest[0][item].load().maximum(0).minimum(matrices - 1).cast(dtypes.weakint) if has_ids else item % matrices
    row_of = [(group * teams + team) * ROWS + r for r in range(ROWS)]
    unit_of = [s * span + lane if (s + 1) * span <= units else (s * span + lane).minimum(units - 1) for s in range(steps)]
    weights = [[unpack(planes, matrix * rows + (row.minimum(rows - 1) if tail else row), unit) for unit in unit_of] for row in row_of]
    parts = [v for row in weights for values, scales in row for v in (*values, *(y for pair in scales for y in pair if y is not None))]
    loads = [u for u in UOp.sink(*parts).toposort() if u.op is Ops.LOAD]
    # x into shared memory: word j of unit u at (j·pitch + u)·4
    shared = UOp.placeholder((8 * pitch * 4,), dtypes.float, slot=0, addrspace=AddrSpace.LOCAL)
    stores, quads = [], units * 8
    for i in range(0, quads, threads):
      k = (t + i) if i + threads <= quads else (t + i).minimum(quads - 1)
      stores += [shared[(k % 8 * pitch + k // 8) * 4 + j].store(x[(item // share) * (units * UNIT) + k * 4 + j].load()) for j in range(4)]
    shared = shared.after(UOp(Ops.BARRIER, src=(*stores, *loads)))
    sums:list[UOp|None] = [None] * ROWS
    for s, unit in enumerate(unit_of):
      xs = [shared[(j * pitch + unit) * 4 + byte].load() for j in range(8) for byte in range(4)]
      for r in range(ROWS):
        y = dot(weights[r][s], xs)
        sums[r] = add(sums[r], y if (s + 1) * span <= units else (s * span + lane < units).where(y, 0.0))
    totals = [group_sum(target, y, lanes) for y in sums if y is not None]
    def store(keep:UOp, row:UOp, y:UOp) -> UOp: return out[(item * rows + row).valid(keep & (row < rows) if tail else keep)].store(y)
    if warps_of_row == 1: done = [store(lane.eq(0), row, y) for row, y in zip(row_of, totals)]
    else:
      # a row's warps meet in shared memory
      partial = UOp.placeholder((teams * ROWS * warps_of_row,), dtypes.float, slot=1, addrspace=AddrSpace.LOCAL)
      warp = lane // lanes
      written = [partial[((team * ROWS + r) * warps_of_row + warp).valid((lane % lanes).eq(0))].store(y) for r, y in enumerate(totals)]
      partial = partial.after(UOp(Ops.BARRIER, src=tuple(written)))
      mine, y = t.minimum(teams * ROWS - 1), None
      for w in range(warps_of_row): y = add(y, partial[mine * warps_of_row + w].load())
      assert y is not None
      done = [store(t < teams * ROWS, group * (teams * ROWS) + mine, y)]
    return UOp.group(*done).sink(arg=KernelInfo(name=name, opts_to_apply=()))
  return fxn

def fits(target:Target, width:int) -> bool:
  """Whether a row of `width` weights is whole units and x fits in shared memory"""
  return width % UNIT == 0 and 8 * (width // UNIT + 1) * 16 + 1024 <= target.shared_bytes

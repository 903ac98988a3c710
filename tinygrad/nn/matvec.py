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
from enum import Enum
from types import FunctionType
from typing import Any, Callable, Protocol, Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.renderer import Estimates
from tinygrad.uop.ops import KernelInfo, Ops
from tinygrad.nn.intrinsics import Target, after_previous, dot4, group_reduce, group_sum, hidden_zero, round_to_int

UNIT = 32                          # weights
LOG2_E = 1.4426950408889634
STEPS = 6                          # units a lane takes of a row before the row is spread over more warps
WARPS, MANY_WARPS, MANY_JOBS = 8, 16, 2048  # of a block; of a block of a launch with that many warps' work
FEW_BLOCKS = 64                    # a launch of fewer blocks is cut finer

@dataclass(frozen=True)
class Unit:
  """32 weights of a row in a kernel's registers: weight = scale · value + minimum. Codes come four to a word, byte by byte; a value is
  code - zero. Where `floats` are given they are the values, and words are empty."""
  words: list[UOp]
  scales: list[tuple[UOp, UOp|None]]   # of the whole unit or of each half
  zero: int = 0
  floats: list[UOp]|None = None

  def value(self, i:int) -> UOp:
    if self.floats is not None: return self.floats[i]
    return (((self.words[i // 4] >> (8 * (i % 4))) & 255) | 0x4b000000).bitcast(dtypes.float) - float((1 << 23) + self.zero)
  def registers(self) -> list[UOp]: return [*self.words, *(self.floats or ()), *(y for pair in self.scales for y in pair if y is not None)]

# (row, unit, gate or None) -> Unit; nothing is loaded where the gate is false
Matrix = Callable[[UOp, UOp, UOp|None], Unit]

class Weight(Protocol):
  """What a primitive needs of a quantized matrix (apps/quantized.py)"""
  shape: tuple[int, ...]
  integer: bool
  label: str
  nbytes: int
  widths: tuple[int, ...]
  zero: int
  def scales(self, plane:Callable[[str, Any], Any], row:Any, unit:Any) -> list[tuple[Any, Any]]: ...
  def __call__(self, x:Tensor, sel:Tensor|None=None) -> Tensor: ...
  def args(self, name:str) -> dict[str, Tensor]: ...
  def matrix(self, buffers:dict[str, UOp], name:str) -> Matrix: ...

class Norm(Protocol):
  weight: Tensor
  eps: float
  def __call__(self, x:Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Late:
  """A matrix whose rows are known only after the kernels before: of(previous) reads what they wrote at indices that previous, a zero, is added to"""
  of: Callable[[UOp], Matrix]

Row = Sequence[tuple[Matrix|Late, UOp]]   # one matrix and row for each of the lengths that the vector is cut into, most often one

@dataclass(frozen=True)
class Rows:
  """A part of a launch: `teams` jobs. of(team) names a job's rows; finish(sums, team, keep, previous) stores what became of them where keep is
  true (it is on one lane of the team); what earlier kernels wrote it reads at indices that previous, a zero, is added to. integer: whether
  every matrix has integer codes."""
  teams: int
  of: Callable[[UOp], Sequence[Row]]
  finish: Callable[[list[UOp], UOp, UOp, UOp], list[UOp]]
  integer: bool

def row_pairs(rows:int, of:Callable[[UOp], Row], y:UOp, integer:bool, place:Callable[[UOp], UOp]=lambda i: i, turn:Callable[[list[UOp], UOp], list[UOp]]|None=None,
              residual:UOp|None=None) -> Rows:
  """The part that most launches are: y[place(i)] = the row of(i) times x, for i < rows, two rows a team. turn(sums, i) changes the sums of
  rows i and i + 1; residual[i] is added."""
  def inside(row:UOp) -> UOp: return row.minimum(rows - 1) if rows % 2 else row
  def finish(sums:list[UOp], team:UOp, keep:UOp, previous:UOp) -> list[UOp]:
    row, done = team * 2, []
    for r, s in enumerate(sums if turn is None else turn(sums, row)):
      ok = keep & (row + r < rows) if rows % 2 else keep
      done.append(y[place(row + r).valid(ok)].store((s if residual is None else s + residual[(row + r + previous).valid(ok)].load()).cast(y.dtype)))
    return done
  return Rows(-(-rows // 2), lambda team: [of(inside(team * 2 + r)) for r in range(2)], finish, integer)

def branch(number:int, condition:UOp) -> tuple[UOp, UOp]:
  """A loop that runs once where condition holds, else never, and a zero: what indices with it load or store happens inside. The end of
  the branch is `.end(loop)` of what it stores."""
  # the compiler of the GPU's language sees that both texts are what they are; tinygrad, which would fold a loop of at most one turn, does not
  turns = UOp(Ops.CUSTOM, dtypes.int, src=(condition.where(UOp.const(1, dtypes.int), 0),), arg="{0}")
  loop = UOp.range(turns.cast(dtypes.weakint), number)
  return loop, hidden_zero("0", loop.cast(dtypes.int))

def local(size:int, dtype:DType, slot:int) -> UOp: return UOp.placeholder((size,), dtype, slot=slot, addrspace=AddrSpace.LOCAL)
class Rope(Protocol):
  """The rotation of the tokens at hand (apps/rope.py)"""
  table: Tensor
  pos: UOp|int|Tensor
  head: int
  nope: int
  def rotate(self, x:Tensor) -> Tensor: ...
  def rotate_heads(self, q:Tensor) -> Tensor: ...

def rotated(buffers:dict[str, UOp], half:int, at:UOp, pair:Sequence[UOp], turned:UOp, token:UOp|int=0) -> list[UOp]:
  """Numbers `at` and `at + 1` of a rotated part of `half` pairs after RoPE where `turned` is true, and as they are elsewhere. token: from pos on"""
  index = ((buffers["pos"][0].load().cast(dtypes.weakint) + token) * half + at // 2) * 2
  cos, sin = (buffers["rope"][(index + i).valid(turned)].load() for i in range(2))
  a, b = pair
  return [turned.where(a * cos - b * sin, a), turned.where(a * sin + b * cos, b)]

def add(a:UOp|None, b:UOp) -> UOp: return b if a is None else a + b
def exp(x:UOp) -> UOp: return (x * LOG2_E).exp2()
def silu(x:UOp) -> UOp: return x / (1 + exp(-x))
def total(values:list[UOp], op:Callable[[UOp, UOp], UOp]) -> UOp:
  while len(values) > 1: values = [op(*values[i:i+2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]  # short chains
  return values[0]

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

def layout(lengths:Sequence[int], lanes:int, jobs:int) -> tuple[int, int, int]:
  """(lanes of a warp a row lies over, warps it lies over, teams a block) for a launch of so many jobs.
  A row stays within a warp up to STEPS units a lane, over the most lanes that leave at most a tenth of them idle."""
  units, width, warps = sum(lengths), lanes, 1
  while sum(-(-n // (lanes * warps)) for n in lengths) > STEPS: warps += 1
  while warps == 1 and width > 1 and units < 0.9 * width * -(-units // width): width //= 2
  teams = max((MANY_WARPS if jobs * width * warps // lanes >= MANY_JOBS else WARPS) // warps, 1) * (lanes // width)
  # too few jobs to fill the machine: smaller blocks, and a row over as many lanes as it has units
  while teams > 1 and jobs < FEW_BLOCKS * teams and teams * width * warps >= 2 * lanes: teams //= 2
  while teams == 1 and warps * width * 2 <= units: warps *= 2
  return width, warps, teams

SLOTS = 4  # places in shared memory of a part; a caller's own begin behind those of all parts it has
Quads = Callable[[UOp], list[UOp]]  # k -> the values 4k … 4k+3 of a vector, float32

def matvec(target:Target, lengths:Sequence[int], x:Quads, parts:list[Rows], norm:tuple[Quads, float]|None=None,
           side:Callable[[UOp, UOp, int, UOp], list[UOp]]|None=None,
           choose:Callable[[UOp, int, UOp, list[UOp]], UOp]|None=None, items:int=1) -> list[UOp]:
  """The stores of a launch over gidx0, each part in blocks of its own; what else numbers the blocks (a head, a token: `items` of them) is the
  caller's, in x and parts.
  x: the vector, of so many units of 32 values as `lengths` sums to; norm: the weight of an RMSNorm of x and its epsilon; side(block, thread, threads,
  previous): the stores of a small job done beside; choose(thread, threads, previous, stores): where rows are chosen here, the barrier, behind the
  given stores, after which they are known."""
  layouts = [layout(lengths, target.lanes, items * part.teams) for part in parts]
  threads = max(width * warps * teams for width, warps, teams in layouts)
  blocks = [-(-part.teams // teams) for part, (_, _, teams) in zip(parts, layouts)]
  g, t = UOp.special(sum(blocks), "gidx0"), UOp.special(threads, "lidx0")
  if len(parts) == 1: return _part(target, lengths, x, parts[0], layouts[0], g, t, threads, 0, norm, side, choose)
  done, start = [], 0
  for i, (part, shape, n) in enumerate(zip(parts, layouts, blocks)):
    loop, zero = branch(i, (g >= start) & (g < start + n))
    done.append(UOp.group(*_part(target, lengths, x, part, shape, g - start + zero, t, threads, i * SLOTS, norm)).end(loop))
    start += n
  return done

def _part(target:Target, lengths:Sequence[int], x:Quads, part:Rows, shape:tuple[int, int, int], block:UOp, t:UOp, threads:int, slot:int,
          norm:tuple[Quads, float]|None=None, side:Callable|None=None, choose:Callable|None=None) -> list[UOp]:
  (lanes, warps_of_row, teams), units, integer = shape, sum(lengths), part.integer and target.dot4 is not None
  span = lanes * warps_of_row
  team, lane = t // span, t % span
  def both(a:UOp|None, b:UOp|None) -> UOp|None: return b if a is None else a if b is None else a & b
  def job_of(number:UOp) -> tuple[UOp, UOp|None]:
    job = block * teams + number
    return job, both(number < teams if teams * span < threads else None, job < part.teams if part.teams % teams else None)
  unit_of = [(first, s * span + lane, None if (s + 1) * span <= n else s * span + lane < n)
             for first, n in zip([sum(lengths[:i]) for i in range(len(lengths))], lengths) for s in range(-(-n // span))]
  segment_of = [i for i, n in enumerate(lengths) for _ in range(-(-n // span))]
  def rows_now() -> tuple[Sequence[Row], UOp|None]:
    job, inside = job_of(team)
    return part.of(job if inside is None else inside.where(job, 0)), inside
  def units_of(row:Row, inside:UOp|None, previous:UOp|None=None, known:Sequence[Unit|None]=()) -> list[Unit|None]:
    """A row's units: first those of matrices whose rows are known; then, with the zero that the others wait for, these too"""
    units:list[Unit|None] = []
    for n, (i, (_, u, ok)) in enumerate(zip(segment_of, unit_of)):
      matrix, number = row[i]
      if isinstance(matrix, Late) and previous is not None: matrix = matrix.of(previous)
      if known and known[n] is not None: units.append(known[n])
      else: units.append(None if isinstance(matrix, Late) else matrix(number, u if ok is None else ok.where(u, 0), both(inside, ok)))
    return units
  def loads_of(weights:list[list[Unit|None]]) -> list[UOp]:
    found = UOp.sink(*(v for row in weights for w in row if w is not None for v in w.registers())).toposort()
    return [u for u in found if u.op is Ops.LOAD and u.src[0].src[0].addrspace is AddrSpace.GLOBAL]
  def weighted(k:UOp) -> list[UOp]:
    values = x(k + previous)
    return values if norm is None else [v * w for v, w in zip(values, norm[0](k))]
  # weights before x where they do not depend on what other kernels have made
  if choose is not None: previous = after_previous(target)
  else:
    rows, inside = rows_now()
    known = [units_of(row, inside) for row in rows]
    previous = after_previous(target, *loads_of(known))
    weights = [units_of(row, inside, previous, units) for row, units in zip(rows, known)]
    loads = loads_of(weights)
  vector = Int8Vector(target, units, slot) if integer else FloatVector(units, slot) if FloatVector.fits(target, units) else DeviceVector(weighted)
  quads, stores, squares = units * 8, [], None
  for first in range(0, quads, threads):
    k, ok = t + first, None
    if first + threads > quads: ok, k = k < quads, (k < quads).where(k, quads - 8 + t % 8)  # the rest stage the last unit again
    if norm is not None:
      for v in x(k + previous): squares = add(squares, v * v if ok is None else ok.where(v * v, 0.0))
    stores += vector.stage(k, weighted(k))
  if squares is not None:
    square_sums = local(threads // target.lanes, dtypes.float, slot + 2)
    stores.append(square_sums[(t // target.lanes).valid((t % target.lanes).eq(0))].store(group_sum(target, squares, target.lanes)))
  if choose is None: barrier = UOp(Ops.BARRIER, src=(*stores, *loads))
  else:
    barrier = choose(t, threads, previous, stores)
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
  keep = both(here, inside)
  return part.finish(sums, job, keep, previous) + (side(block, t, threads, previous) if side else [])

def fingerprint(x:Any) -> Any:
  """What a kernel's body depends on, as a key: a function is its code and what it closes over, a tensor its shape and dtype, an object its
  fields"""
  if isinstance(x, Tensor): return x.shape, x.dtype
  if isinstance(x, FunctionType): return x.__code__, x.__defaults__, *(fingerprint(cell.cell_contents) for cell in x.__closure__ or ())
  if isinstance(x, (tuple, list)): return tuple(map(fingerprint, x))
  if isinstance(x, dict): return tuple((key, fingerprint(value)) for key, value in x.items())
  return x if isinstance(x, (UOp, Enum)) or not hasattr(x, "__dict__") else (type(x), fingerprint(vars(x)))

_programs:dict[Any, UOp] = {}   # a model's blocks launch the same few kernels again and again: each is put together once

def launch(name:str, outs:dict[str, Tensor], ins:dict[str, Tensor], body:Callable[[dict[str, UOp]], list[UOp]], mem:int|None=None) -> list[Tensor]:
  """Runs a kernel of the given stores: body gets the flat buffers by name, and is called once for all launches with its fingerprint. mem: bytes it
  moves, where the renderer cannot count them. Returns the outs, written."""
  names, tensors = [*outs, *ins], [t.flatten() for t in (*outs.values(), *ins.values())]
  def fxn(*buffers:UOp) -> UOp:
    key = name, mem, buffers, tuple(names), fingerprint(body)
    if key not in _programs:
      info = KernelInfo(name=name, opts_to_apply=(), estimates=None if mem is None else Estimates(0, mem, mem))
      stores = body(dict(zip(names, (b.flatten() for b in buffers))))
      _programs[key] = UOp.group(*stores).sink(arg=info).rtag(1)  # tagged: scheduled already
    return _programs[key]
  written = tensors[0].custom_kernel(*tensors[1:], fxn=fxn)
  return [w.reshape(t.shape) for w, t in zip(written, outs.values())]

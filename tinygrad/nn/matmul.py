"""Matrix times many vectors on weights as they lie in the file, by tensor cores: what prefill is made of.

A block makes a tile of rows × tokens. It goes along the row in steps: units of the weights become halves (scale · value + minimum) in shared
memory, beside them the tokens' halves, and each warp multiplies its part of the tile from there. A weight is read and dequantized once for a tile of
tokens; experts' rows once for a tile of the tokens that chose the expert.

Layout in shared memory: slabs of 16 numbers of the row, in each the rows (or tokens), in each four quads of halves. A lane's share of a product's
depth is a load4: sums do not mind which numbers of the row meet in which place as long as both sides agree. A load4 lies at (q + row/4 + slab) % 4:
both the threads that fill a buffer and the lanes that read it hit different banks.

Arithmetic: halves times halves, sums in float32, in a fixed order: same input, same bytes.
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import Callable, Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.nn.intrinsics import Mma, Target, group_sum
from tinygrad.nn.kernel import UNIT, Matrix, Norm, Rope, Unit, Weight, add, launch, local, rotated, silu, total
from tinygrad.uop.ops import Ops

SLAB = 16  # numbers of a row
HALF_SCALE = 2.0 ** -6  # a feed-forward's hidden numbers are kept as halves times this: they reach 4e6 so, in steps of 4e-6 near zero

@dataclass(frozen=True)
class Tile:
  """What a block makes, in tokens and rows, and the warps that share it, by tokens and by rows"""
  tokens: int
  rows: int
  warps: tuple[int, int]

TILE_64x64, TILE_32x64 = Tile(64, 64, (2, 2)), Tile(32, 64, (1, 4))   # the second for the tokens that chose an expert
FEW_TILES = 256

def depth_of(m:Mma, part:int, k:UOp) -> UOp:
  """The number of a slab that meets at place k of the depth of the slab's product `part`: a lane's places are parts of its load4"""
  return k % 8 // 2 * 4 + part * (m.K // 4) + k % 2 + k // 8 * 2

class Halves:
  """Some numbers of some rows in shared memory"""
  def __init__(self, rows:int, width:int, slot:int): self.rows, self.shared = rows, local(rows * width, dtypes.half, slot)
  def at(self, row:UOp, slab:UOp|int, load4:UOp) -> UOp:
    return (slab * self.rows + row) * SLAB + (load4 + row // 4 + slab) % 4 * 4

def prefetch(values:list[UOp], at:UOp, last:int) -> tuple[list[UOp], Callable[[UOp], list[UOp]]]:
  """Values of the loop `at`, made of what the turn before loaded, and the stores that load for the next turn behind a barrier of this one"""
  loads = [u for u in UOp.sink(*values).toposort() if u.op is Ops.LOAD and u.src[0].src[0].addrspace is AddrSpace.GLOBAL and at in u.backward_slice]
  def loads_at(turn:UOp) -> list[UOp]: return list(UOp.sink(*loads).substitute({at: turn}, walk=True).src)
  kept:dict[DType, UOp] = {}
  of_type = {dtype: [i for i, u in enumerate(loads) if u.dtype == dtype] for dtype in dict.fromkeys(u.dtype for u in loads)}
  first = loads_at(UOp.const(0))
  for slot, (dtype, numbers) in enumerate(of_type.items()):
    registers = UOp.placeholder((len(numbers),), dtype, slot=slot + 1, addrspace=AddrSpace.REG)
    kept[dtype] = registers.after(UOp.group(*[registers[j].store(first[i]) for j, i in enumerate(numbers)]))
  places = {loads[i]: (kept[dtype], j) for dtype, numbers in of_type.items() for j, i in enumerate(numbers)}
  current = UOp.sink(*values).substitute({u: registers.after(at)[j].load() for u, (registers, j) in places.items()}, walk=True).src
  def ahead(barrier:UOp) -> list[UOp]:
    return [places[u][0].after(at, barrier)[places[u][1]].store(v) for u, v in zip(loads, loads_at((at + 1).minimum(last)))]
  return list(current), ahead

def products(t:Target, tile:Tile, width:int, matrices:Sequence[Callable[[UOp, UOp], Unit]], x:Callable[[UOp, UOp], list[UOp]],
             active:UOp|None=None) -> list[tuple[UOp, UOp, list[UOp]]]:
  """(token, row, a product for each matrix) of all that a lane holds of the tile. matrices: (row of the tile, unit) -> Unit;
  x(token of the tile, k): the halves k … k+3; active: whether there is anything to do"""
  m = t.mma
  assert m is not None
  # never in a single step: tinygrad takes what such a loop computes to be known behind it too
  step = 2 * UNIT if width % (2 * UNIT) == 0 and width > 2 * UNIT else UNIT
  threads = tile.warps[0] * tile.warps[1] * t.lanes
  thread = UOp.special(threads, "lidx0")
  lane, warp = thread % t.lanes, thread // t.lanes
  own_tokens, own_rows = tile.tokens // tile.warps[0], tile.rows // tile.warps[1]
  first_token, first_row = warp % tile.warps[0] * own_tokens, warp // tile.warps[0] * own_rows
  down, across, each = own_tokens // m.M, own_rows // m.N, m.counts[2]
  xs, ws = Halves(tile.tokens, step, 0), [Halves(tile.rows, step, i + 1) for i in range(len(matrices))]
  sums = UOp.placeholder((len(matrices) * down * across * each,), dtypes.float, slot=0, addrspace=AddrSpace.REG)
  sums = sums.after(UOp.group(*[sums[i].store(0.0) for i in range(sums.shape[0])]))
  last = width // step - 1
  at = UOp.range(last + 1 if active is None else active.where(UOp.const(last + 1), 0), 0)
  now, places, values = sums.after(at), [], []
  units, quads = tile.rows * step // UNIT, tile.tokens * step // 4
  for matrix, w in zip(matrices, ws):
    for start in range(0, units, threads):
      i = (thread + start) % units
      row, u = i // (step // UNIT), i % (step // UNIT)
      unit = matrix(row, at * (step // UNIT) + u)
      for j in range(UNIT):
        scale, minimum = unit.scales[j * len(unit.scales) // UNIT]
        value = unit.value(j) * scale
        places.append(w.shared[w.at(row, u * 2 + j // SLAB, UOp.const(j % SLAB // 4)) + j % 4])
        values.append((value if minimum is None else value + minimum).cast(dtypes.half))
  for start in range(0, quads, threads):
    i = (thread + start) % quads
    load4, token, slab = i % 4, i // 4 % tile.tokens, i // (4 * tile.tokens)
    for j, v in enumerate(x(token, at * step + slab * SLAB + load4 * 4)):
      places.append(xs.shared[xs.at(token, slab, load4) + j])
      values.append(v)
  values, ahead = prefetch(values, at, last)
  barrier = UOp(Ops.BARRIER, src=tuple(place.store(v) for place, v in zip(places, values)))
  held = ahead(barrier)
  shared_x, shared_w = xs.shared.after(barrier), [w.shared.after(barrier) for w in ws]
  values = [now[i].load() for i in range(sums.shape[0])]
  for slab in range(step // SLAB):
    for part in range(SLAB // m.K):
      def entry(shared:UOp, of:Halves, row:UOp, k:UOp) -> UOp:
        number = depth_of(m, part, k)
        return shared[of.at(row, slab, number // 4) + number % 4].load()
      a = [[entry(shared_x, xs, first_token + i * m.M + row, k) for row, k in (m.a(lane, e) for e in range(m.counts[0]))] for i in range(down)]
      for n, (shared, w) in enumerate(zip(shared_w, ws)):
        for j in range(across):
          b = [entry(shared, w, first_row + j * m.N + row, k) for k, row in (m.b(lane, e) for e in range(m.counts[1]))]
          for i in range(down):
            first = ((n * across + j) * down + i) * each
            values[first:first + each] = m(a[i], b, values[first:first + each])
  sums = sums.after(UOp.group(*[now[i].store(v) for i, v in enumerate(values)], *held).end(at))
  found = []
  for j in range(across):
    for i in range(down):
      for e in range(each):
        token, row = m.c(lane, e)
        found.append((first_token + i * m.M + token, first_row + j * m.N + row,
                      [sums[((n * across + j) * down + i) * each + e].load() for n in range(len(matrices))]))
  return found


def tile_of(tokens:int, rows:int) -> Tile:
  """Narrow tiles where wide ones are too few to fill a large GPU"""
  return TILE_64x64 if -(-tokens // TILE_64x64.tokens) * -(-rows // TILE_64x64.rows) >= FEW_TILES else TILE_32x64

def matmul(t:Target, x:Tensor, w:Weight, residual:Tensor|None=None, factor:float=1.0, rope:Rope|None=None, pos:Tensor|None=None,
           dtype:DType=dtypes.float) -> Tensor:
  """y = factor · W·x + residual. x: half (T, in), or (T, H, in or more) for a stack of matrices, one a head -> (T, out) or (T, H, out); rope
  rotates the heads of y; pos: int32 (1,), the first token's position"""
  (*stack, rows, width), T = w.shape, x.shape[0]
  heads = stack[0] if stack else 1
  tile = tile_of(T, heads * rows)
  def body(b:dict[str, UOp]) -> list[UOp]:
    group, block, head = UOp.special(-(-T // tile.tokens), "gidx0"), UOp.special(-(-rows // tile.rows), "gidx1"), UOp.special(heads, "gidx2")
    matrix, done = w.matrix(b, "w"), []
    def weights(row:UOp, unit:UOp) -> Unit: return matrix(head * rows + (block * tile.rows + row).minimum(rows - 1), unit, None)
    def load4(token:UOp, k:UOp) -> list[UOp]:
      start = ((group * tile.tokens + token).minimum(T - 1) * heads + head) * x.shape[-1] + k
      return [b["x"][start + j].load() for j in range(4)]
    found = products(t, tile, width, [weights], load4)
    for (token, row, (first,)), (_, _, (second,)) in zip(found[::2], found[1::2]):  # neighbouring rows of a token
      token, row = group * tile.tokens + token, block * tile.rows + row
      pair = [y if factor == 1.0 else y * factor for y in (first, second)]
      if rope is not None:
        at = row % rope.head - rope.nope
        pair = rotated(b, rope.table.shape[1], at, pair, at >= 0, token.minimum(T - 1))
      for i, y in enumerate(pair):
        index = ((token * heads + head) * rows + row + i).valid((token < T) & (row + i < rows))
        done.append(b["y"][index].store((y if residual is None else y + b["residual"][index].load()).cast(dtype)))
    return done
  ins = {"x": x, **({} if residual is None else {"residual": residual}), **({} if rope is None or pos is None else {"rope": rope.table, "pos": pos}),
         **w.args("w")}
  name = "_".join(["matmul", w.label, str(T), *([] if residual is None else ["residual"]), *([] if rope is None else ["rope"])])
  return launch(name, {"y": Tensor.empty(*x.shape[:-1], rows, dtype=dtype)}, ins, body)[0]

def gate_up_prefill(t:Target, x:Tensor, weights:tuple[Weight, Weight]) -> Tensor:
  """silu(gate·x) · (up·x) · HALF_SCALE. x: half (T, D); weights: gate and up, (F, D) -> half (T, F)"""
  (rows, width), T = weights[0].shape, x.shape[0]
  tile = tile_of(T, rows)
  def body(b:dict[str, UOp]) -> list[UOp]:
    group, block, done = UOp.special(-(-T // tile.tokens), "gidx0"), UOp.special(-(-rows // tile.rows), "gidx1"), []
    def of(matrix:Matrix) -> Callable[[UOp, UOp], Unit]: return lambda row, unit: matrix((block * tile.rows + row).minimum(rows - 1), unit, None)
    def load4(token:UOp, k:UOp) -> list[UOp]: return [b["x"][(group * tile.tokens + token).minimum(T - 1) * width + k + j].load() for j in range(4)]
    for token, row, (gate, up) in products(t, tile, width, [of(w.matrix(b, name)) for w, name in zip(weights, ("gate", "up"))], load4):
      token, row = group * tile.tokens + token, block * tile.rows + row
      done.append(b["y"][(token * rows + row).valid((token < T) & (row < rows))].store((silu(gate) * up * HALF_SCALE).cast(dtypes.half)))
    return done
  ins = {"x": x, **weights[0].args("gate"), **weights[1].args("up")}
  return launch(f"gate_up_prefill_{weights[0].label}_{T}", {"y": Tensor.empty(T, rows, dtype=dtypes.half)}, ins, body)[0]

# ---- experts ----


def grouped_matmul(t:Target, x:Tensor, weights:Sequence[Weight], chosen:tuple[Tensor, Tensor], K:int,
                scale:Tensor|None=None, factor:float=1.0) -> Tensor:
  """One matrix: factor · W·x for each choice, float32 (T, K, out). Two: silu(gate·x) · (up·x) · scale · HALF_SCALE, half (T, K, out).
  x: half (T, in) or (T, K, in); weights: (E, out, in); chosen: as sort_by_expert gives it; scale: float32 (T, K)"""
  (E, rows, width), T, tile, paired = weights[0].shape, x.shape[0], TILE_32x64, len(weights) == 2
  share = K if x.ndim == 2 else 1
  def body(b:dict[str, UOp]) -> list[UOp]:
    block, group, expert = UOp.special(-(-rows // tile.rows), "gidx0"), UOp.special(-(-T // tile.tokens), "gidx1"), UOp.special(E, "gidx2")
    count, done = b["counts"][expert].load().cast(dtypes.weakint), []
    def choice(token:UOp) -> UOp:
      at = (group * tile.tokens + token).minimum((count - 1).maximum(0))
      return b["order"][expert * T + at.minimum(T - 1)].load().maximum(0).minimum(T * K - 1).cast(dtypes.weakint)
    def of(matrix:Matrix) -> Callable[[UOp, UOp], Unit]:
      return lambda row, unit: matrix(expert * rows + (block * tile.rows + row).minimum(rows - 1), unit, None)
    def load4(token:UOp, k:UOp) -> list[UOp]: return [b["x"][choice(token) // share * width + k + j].load() for j in range(4)]
    active = group * tile.tokens < count
    for token, row, y in products(t, tile, width, [of(w.matrix(b, f"w{i}")) for i, w in enumerate(weights)], load4, active):
      at, row = choice(token), block * tile.rows + row
      ok = (group * tile.tokens + token < count) & (row < rows)
      value = silu(y[0]) * y[1] * (b["scale"][at.valid(ok)].load() * HALF_SCALE) if paired else y[0] * factor
      done.append(b["y"][(at * rows + row).valid(ok)].store(value.cast(b["y"].dtype)))
    return done
  ins = {"x": x, "order": chosen[0], "counts": chosen[1], **({} if scale is None else {"scale": scale})}
  for i, w in enumerate(weights): ins |= w.args(f"w{i}")
  name = f"{'expert_gate_up_prefill' if paired else 'grouped_matmul'}_{weights[0].label}_{T}"
  return launch(name, {"y": Tensor.empty(T, K, rows, dtype=dtypes.half if paired else dtypes.float)}, ins, body, sum(w.nbytes for w in weights))[0]

def rms_norm_half(t:Target, x:Tensor, norm:Norm, low:bool=False) -> list[Tensor]:
  """RMSNorm(x), float32 (T, D) -> half (T, D) and, if wanted, as much again of what halves leave out"""
  (T, D), warps = x.shape, 4
  threads = warps * t.lanes
  def body(b:dict[str, UOp]) -> list[UOp]:
    token, thread, squares, values = UOp.special(T, "gidx0"), UOp.special(threads, "lidx0"), None, []
    for first in range(0, D // 4, threads):
      k = (thread + first) * 4
      ok = k < D
      load4 = [b["x"][(token * D + k + j).valid(ok)].load() for j in range(4)]
      values.append((k, ok, load4))
      for v in load4: squares = add(squares, v * v)   # nothing is loaded past the end: zeros
    sums = local(warps, dtypes.float, 0)
    mine = sums[(thread // t.lanes).valid((thread % t.lanes).eq(0))].store(group_sum(t, squares, t.lanes))
    sums = sums.after(UOp(Ops.BARRIER, src=(mine,)))
    factor, done = (total([sums[w].load() for w in range(warps)], UOp.add) * (1.0 / D) + norm.eps).rsqrt(), []
    for k, ok, load4 in values:
      for j, v in enumerate(load4):
        y = v * factor * b["norm"][(k + j).valid(ok)].load()
        done.append(b["y"][(token * D + k + j).valid(ok)].store(y.cast(dtypes.half)))
        if low: done.append(b["low"][(token * D + k + j).valid(ok)].store(rounding_error(y).cast(dtypes.half)))
    return done
  outs = {name: Tensor.empty(T, D, dtype=dtypes.half) for name in ("y", "low")[:1 + low]}
  return launch(f"normalized_{T}_{D}{'_low' if low else ''}", outs, {"x": x, "norm": norm.weight}, body)

def rounding_error(x:UOp) -> UOp:
  """What a half of x leaves out, but for the least halves"""
  bits = x.bitcast(dtypes.uint32)   # rounded in integers: tinygrad takes a half made of a float, and a float of that, for the same float
  return x - ((bits + 0xfff + ((bits >> 13) & 1)) & 0xffffe000).bitcast(dtypes.float)

def matmul_split_half(t:Target, x:Tensor, low:Tensor, w:Weight) -> Tensor:
  """W·(x + low) to about 22 bits: both sides in halves and what those leave out. x, low: half (T, in) -> float32 (T, out)"""
  (rows, width), T, tile = w.shape, x.shape[0], tile_of(x.shape[0], w.shape[0])
  parts = next(n for n in (8, 4, 2, 1) if width % (n * 2 * UNIT) == 0 or n == 1)    # few rows: blocks take a part of the row each
  def body(b:dict[str, UOp]) -> list[UOp]:
    group, block, part = UOp.special(-(-T // tile.tokens), "gidx0"), UOp.special(-(-rows // tile.rows), "gidx1"), UOp.special(3 * parts, "gidx2")
    matrix, first, done = w.matrix(b, "w"), part % parts * (width // parts), []
    low_x, low_w = (part // parts).eq(1), (part // parts).eq(2)
    def weights(row:UOp, unit:UOp) -> Unit:
      u = matrix((block * tile.rows + row).minimum(rows - 1), first // UNIT + unit, None)
      def value(i:int) -> UOp:
        scale, minimum = u.scales[i * len(u.scales) // UNIT]
        y = u.value(i) * scale
        return y if minimum is None else y + minimum
      return Unit([], [(UOp.const(1.0, dtypes.float), None)], floats=[low_w.where(rounding_error(y), y) for y in map(value, range(UNIT))])
    def load4(token:UOp, k:UOp) -> list[UOp]:
      start = (group * tile.tokens + token).minimum(T - 1) * width + first + k
      return [low_x.where(b["low"][(start + j).valid(low_x)].load(), b["x"][(start + j).valid(low_x.ne(True))].load()) for j in range(4)]
    for token, row, (y,) in products(t, tile, width // parts, [weights], load4):
      token, row = group * tile.tokens + token, block * tile.rows + row
      done.append(b["y"][((part * T + token) * rows + row).valid((token < T) & (row < rows))].store(y))
    return done
  y, = launch(f"matmul_split_half_{w.label}_{T}", {"y": Tensor.empty(3 * parts, T, rows, dtype=dtypes.float)}, {"x": x, "low": low, **w.args("w")}, body)
  return y.sum(0).contiguous()

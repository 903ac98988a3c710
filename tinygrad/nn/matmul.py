"""Matrix products of many tokens by tensor cores, on quantized weights (planes, see nn/kernel.py): what prefill is made of.

A block of threads makes a tile of the output, tokens × rows (BlockTile). It walks along the rows of the weights in steps (TileWalk): the step's
weights become halves in shared memory, scale · value + minimum, beside them the tokens' halves, and each warp multiplies its part of the tile from
there. A weight is read and dequantized once for a tile of tokens; an expert's, once for a tile of the tokens that chose it.

Arithmetic: halves times halves, sums in float32, in a fixed order: same input, same bytes.
"""
from __future__ import annotations
from dataclasses import dataclass
from itertools import product
from typing import Callable, NamedTuple, Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.nn.intrinsics import Mma, Target
from tinygrad.nn.kernel import (UNIT, Matrix, Norm, Rope, Weight, block_sum, empty, launch, local, optional, position_of, rotated, silu,
                                    sum_in_order, total)
from tinygrad.uop.ops import Ops

SLAB = 16   # numbers of a row that lie side by side in shared memory
# A feed-forward's hidden numbers and a head's outputs are kept as halves times this: they reach 4e6 so, in steps of 4e-6 near zero.
HALF_SCALE = 2.0 ** -6

@dataclass(frozen=True)
class Scaled:
  """Numbers too large for half precision, kept in it: they are x · factor. x: half"""
  x: Tensor
  factor: float = 1 / HALF_SCALE
  @property
  def shape(self) -> tuple: return self.x.shape
  def reshape(self, *shape:int) -> Scaled: return Scaled(self.x.reshape(*shape), self.factor)

def unscaled(tokens:Tensor|Scaled) -> tuple[Tensor, float]:
  """The halves, and what a product with them is to be multiplied by"""
  return (tokens.x, tokens.factor) if isinstance(tokens, Scaled) else (tokens, 1.0)

# ---- the tile of a block ----

@dataclass(frozen=True)
class Tile:
  """What a block makes, in tokens and rows, and the warps that share it, by tokens and by rows"""
  tokens: int
  rows: int
  warps: tuple[int, int]

TILE_64x64, TILE_32x64 = Tile(64, 64, (2, 2)), Tile(32, 64, (1, 4))
FEW_TILES = 256   # tiles that do not fill a large GPU

def tile_of(tokens:int, rows:int) -> Tile:
  """Small tiles where large ones are too few to fill a large GPU"""
  return TILE_64x64 if -(-tokens // TILE_64x64.tokens) * -(-rows // TILE_64x64.rows) >= FEW_TILES else TILE_32x64

@dataclass(frozen=True)
class BlockTile:
  """Where a block's tile lies in an output of (tokens, rows). A load past the end is one of the last token or row, a store there is left out.
  tokens may be known to the GPU only: a tile without any is not walked."""
  tile: Tile
  first_token: UOp
  first_row: UOp
  tokens: int|UOp
  rows: int
  def clamped_token(self, token:UOp) -> UOp:
    return token.minimum((self.tokens - 1).maximum(0) if isinstance(self.tokens, UOp) else self.tokens - 1)
  def clamped_row(self, row:UOp) -> UOp: return row.minimum(self.rows - 1)
  def inside(self, token:UOp, row:UOp) -> UOp: return (token < self.tokens) & (row < self.rows)

def block_tile(tile:Tile, tokens:int, rows:int) -> BlockTile:
  """Tiles by tokens in gidx0, by rows in gidx1"""
  token_tile, row_tile = UOp.special(-(-tokens // tile.tokens), "gidx0"), UOp.special(-(-rows // tile.rows), "gidx1")
  return BlockTile(tile, token_tile * tile.tokens, row_tile * tile.rows, tokens, rows)

# ---- the walk along the rows ----

# (row, unit) -> the unit's 32 weights, float32; (token, column) -> four halves from that column on
LoadWeights = Callable[[UOp, UOp], list[UOp]]
LoadTokens = Callable[[UOp, UOp], list[UOp]]

def weights_of(matrix:Matrix, first_row:UOp|int=0) -> LoadWeights:
  return lambda row, unit: matrix(first_row + row, unit, None).weights()

def half4(buffer:UOp, start:UOp) -> list[UOp]: return [buffer[start + i].load() for i in range(4)]

class SharedHalves:
  """A step's numbers of some rows (or tokens) in shared memory. Layout: slabs of 16 numbers, in each the rows, in each four half4.
  Half4 q of a row lies at place (q + row/4 + slab) % 4: the threads that fill and the lanes that read hit different banks."""
  def __init__(self, rows:int, buffer:UOp): self.rows, self.buffer = rows, buffer
  def after(self, barrier:UOp) -> SharedHalves: return SharedHalves(self.rows, self.buffer.after(barrier))
  def element(self, row:UOp, slab:UOp|int, half4_index:UOp, number:UOp|int) -> UOp:
    return self.buffer[(slab * self.rows + row) * SLAB + (half4_index + row // 4 + slab) % 4 * 4 + number]

def depth_of(mma:Mma, part:int, depth:UOp) -> UOp:
  """The number of a slab that the tensor core takes at `depth` of the slab's product `part`. A lane's are parts of one half4: a sum does not mind
  the order, as long as both operands have the same."""
  return depth % 8 // 2 * 4 + part * (mma.K // 4) + depth % 2 + depth // 8 * 2

def prefetch(values:list[UOp], step:UOp, last:int) -> tuple[list[UOp], Callable[[UOp], list[UOp]]]:
  """Software pipelining: the loop `step` makes `values` of registers that were loaded during the step before.
  Returns the values and load_next(barrier) -> the stores to the registers for the next step, behind a barrier of this one."""
  loads = [u for u in UOp.sink(*values).toposort() if u.op is Ops.LOAD and u.src[0].src[0].addrspace is AddrSpace.GLOBAL and step in u.backward_slice]
  def loads_of(index:UOp) -> list[UOp]: return list(UOp.sink(*loads).substitute({step: index}, walk=True).src)
  first = loads_of(UOp.const(0))
  places:dict[UOp, tuple[UOp, int]] = {}   # load -> the registers of its type, and which of them
  for slot, dtype in enumerate(dict.fromkeys(load.dtype for load in loads)):
    of_type = [i for i, load in enumerate(loads) if load.dtype == dtype]
    registers = UOp.placeholder((len(of_type),), dtype, slot=slot + 1, addrspace=AddrSpace.REG)
    registers = registers.after(UOp.group(*[registers[place].store(first[i]) for place, i in enumerate(of_type)]))
    places |= {loads[i]: (registers, place) for place, i in enumerate(of_type)}
  current = {load: registers.after(step)[place].load() for load, (registers, place) in places.items()}
  def load_next(barrier:UOp) -> list[UOp]:
    following = loads_of((step + 1).minimum(last))
    return [places[load][0].after(step, barrier)[places[load][1]].store(value) for load, value in zip(loads, following)]
  return list(UOp.sink(*values).substitute(current, walk=True).src), load_next

class Product(NamedTuple):
  """A lane's element of the output: a sum for each matrix"""
  token: UOp
  row: UOp
  sums: list[UOp]

class TileWalk:
  """A block's walk along the rows of its tile: what its threads fill, multiply and hold"""
  def __init__(self, target:Target, block:BlockTile, width:int, n_matrices:int):
    assert target.mma is not None
    tile, self.block, self.mma = block.tile, block, target.mma
    self.n_threads = tile.warps[0] * tile.warps[1] * target.lanes
    self.thread = UOp.special(self.n_threads, "lidx0")
    self.lane, warp = self.thread % target.lanes, self.thread // target.lanes
    # a warp's part of the tile, in products of the tensor core
    warp_tokens, warp_rows = tile.tokens // tile.warps[0], tile.rows // tile.warps[1]
    self.first_token, self.first_row = warp % tile.warps[0] * warp_tokens, warp // tile.warps[0] * warp_rows
    self.down, self.across = warp_tokens // self.mma.M, warp_rows // self.mma.N
    # never in a single step: tinygrad takes what such a loop computes to be known behind it too
    self.step_width = 2 * UNIT if width % (2 * UNIT) == 0 and width > 2 * UNIT else UNIT
    self.n_steps = width // self.step_width
    n_steps = (block.first_token < block.tokens).where(UOp.const(self.n_steps), 0) if isinstance(block.tokens, UOp) else self.n_steps
    self.step = UOp.range(n_steps, 0)
    def shared(rows:int, slot:int) -> SharedHalves: return SharedHalves(rows, local(rows * self.step_width, dtypes.half, slot))
    self.tokens, self.weights = shared(tile.tokens, 0), [shared(tile.rows, i + 1) for i in range(n_matrices)]
    sums = UOp.placeholder((n_matrices * self.down * self.across * self.mma.counts[2],), dtypes.float, slot=0, addrspace=AddrSpace.REG)
    self.sums = sums.after(UOp.group(*[sums[i].store(0.0) for i in range(sums.shape[0])]))

  def fill_weights(self, matrices:Sequence[LoadWeights]) -> list[tuple[UOp, UOp]]:
    """(element of shared memory, its weight in this step): a thread takes whole units"""
    filled, units = [], self.step_width // UNIT
    n_units = self.block.tile.rows * units
    for load_weights, shared in zip(matrices, self.weights):
      for start in range(0, n_units, self.n_threads):
        index = (self.thread + start) % n_units
        row, unit = index // units, index % units
        for i, weight in enumerate(load_weights(self.block.clamped_row(self.block.first_row + row), self.step * units + unit)):
          element = shared.element(row, unit * (UNIT // SLAB) + i // SLAB, UOp.const(i % SLAB // 4), i % 4)
          filled.append((element, weight.cast(dtypes.half)))
    return filled

  def fill_tokens(self, load_tokens:LoadTokens) -> list[tuple[UOp, UOp]]:
    """(element of shared memory, its number in this step): a thread takes half4"""
    filled, n_tokens = [], self.block.tile.tokens
    n_half4 = n_tokens * self.step_width // 4
    for start in range(0, n_half4, self.n_threads):
      index = (self.thread + start) % n_half4
      half4_index, token, slab = index % 4, index // 4 % n_tokens, index // (4 * n_tokens)
      column = self.step * self.step_width + slab * SLAB + half4_index * 4
      numbers = load_tokens(self.block.clamped_token(self.block.first_token + token), column)
      filled += [(self.tokens.element(token, slab, half4_index, i), number) for i, number in enumerate(numbers)]
    return filled

  def elements(self, matrix:int, across:int, down:int) -> slice:
    """Of the sums, a lane's elements of a product of the tensor core"""
    count = self.mma.counts[2]
    first = ((matrix * self.across + across) * self.down + down) * count
    return slice(first, first + count)

  def multiply(self, barrier:UOp) -> list[UOp]:
    """The stores of the sums after this step, behind the barrier that fills shared memory"""
    mma, step_sums = self.mma, self.sums.after(self.step)
    shared_tokens, shared_weights = self.tokens.after(barrier), [weights.after(barrier) for weights in self.weights]
    a_places = [mma.a(self.lane, i) for i in range(mma.counts[0])]
    b_places = [(row, depth) for depth, row in (mma.b(self.lane, i) for i in range(mma.counts[1]))]
    sums = [step_sums[i].load() for i in range(step_sums.shape[0])]
    for slab, part in product(range(self.step_width // SLAB), range(SLAB // mma.K)):
      def fragment(shared:SharedHalves, first_row:UOp, places:list[tuple[UOp, UOp]]) -> list[UOp]:
        numbers = [(row, depth_of(mma, part, depth)) for row, depth in places]
        return [shared.element(first_row + row, slab, number // 4, number % 4).load() for row, number in numbers]
      a_fragments = [fragment(shared_tokens, self.first_token + down * mma.M, a_places) for down in range(self.down)]
      for (matrix, shared), across in product(enumerate(shared_weights), range(self.across)):
        b_fragment = fragment(shared, self.first_row + across * mma.N, b_places)
        for down, a_fragment in enumerate(a_fragments):
          own = self.elements(matrix, across, down)
          sums[own] = mma(a_fragment, b_fragment, sums[own])
    return [step_sums[i].store(value) for i, value in enumerate(sums)]

  def products(self, sums:UOp) -> list[Product]:
    """The elements of the output that a lane holds; neighbours in the list are neighbouring rows of a token"""
    found = []
    for across, down, i in product(range(self.across), range(self.down), range(self.mma.counts[2])):
      token, row = self.mma.c(self.lane, i)
      found.append(Product(self.block.first_token + (self.first_token + down * self.mma.M + token),
                           self.block.first_row + (self.first_row + across * self.mma.N + row),
                           [sums[self.elements(matrix, across, down).start + i].load() for matrix in range(len(self.weights))]))
    return found

def tile_products(target:Target, block:BlockTile, width:int, matrices:Sequence[LoadWeights], load_tokens:LoadTokens) -> list[Product]:
  """The elements of W·x, for each matrix W, that a lane holds of the block's tile. width: of a row. In the kernel:

  registers = weights and tokens of step 0, as they lie in memory
  for step in range(width / step_width):
    shared memory = halves of the registers; barrier
    registers = weights and tokens of step + 1
    for each slab of the step: sums += tokens · weights       # tensor cores
  """
  walk = TileWalk(target, block, width, len(matrices))
  elements, values = zip(*walk.fill_weights(matrices), *walk.fill_tokens(load_tokens))
  current, load_next = prefetch(list(values), walk.step, walk.n_steps - 1)
  barrier = UOp(Ops.BARRIER, src=tuple(element.store(value) for element, value in zip(elements, current)))
  return walk.products(walk.sums.after(UOp.group(*walk.multiply(barrier), *load_next(barrier)).end(walk.step)))

# ---- one matrix, or one a head ----

def matmul(target:Target, tokens:Tensor|Scaled, weight:Weight, residual:Tensor|None=None, factor:float=1.0, rope:Rope|None=None,
           start:Tensor|None=None, dtype:DType=dtypes.float) -> Tensor:
  """factor · W·x + residual for each token's x. tokens: half (T, in), or (T, H, in or more) for a stack of matrices, one a head -> dtype
  (T, out) or (T, H, out). rope rotates the heads of the product; start: int32 (1,), the first token's position. In the kernel:

  sums = tile of W·x                                # a block a tile of tokens × rows of a head
  for each pair of neighbouring rows of a token:
    pair = factor · sums
    if rope: pair = rotated by the token's position
    out = pair + residual
  """
  halves, undo = unscaled(tokens)
  (*stack, rows, width), T, factor = weight.shape, halves.shape[0], factor * undo
  heads, pitch = stack[0] if stack else 1, halves.shape[-1]
  tile = tile_of(T, heads * rows)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    block, head, stores = block_tile(tile, T, rows), UOp.special(heads, "gidx2"), []
    def load_tokens(token:UOp, column:UOp) -> list[UOp]: return half4(buffers["tokens"], (token * heads + head) * pitch + column)
    products = tile_products(target, block, width, [weights_of(weight.matrix(buffers, "weight"), head * rows)], load_tokens)
    for first, second in zip(products[::2], products[1::2]):
      token, row = first.token, first.row
      pair = [value if factor == 1.0 else value * factor for value in (*first.sums, *second.sums)]
      if rope is not None:
        index = row % rope.head - rope.nope
        pair = rotated(buffers, rope.table.shape[1], index, pair, index >= 0, position_of(buffers) + block.clamped_token(token))
      for i, value in enumerate(pair):
        out_index = ((token * heads + head) * rows + row + i).valid(block.inside(token, row + i))
        if residual is not None: value = value + buffers["residual"][out_index].load()
        stores.append(buffers["out"][out_index].store(value.cast(dtype)))
    return stores
  ins = {"tokens": halves, **optional(residual=residual, rope=rope.table if rope else None, start=start), **weight.args("weight")}
  name = "_".join(["matmul", weight.label, str(T), *([] if residual is None else ["residual"]), *([] if rope is None else ["rope"])])
  return launch(name, {"out": empty(halves, *halves.shape[:-1], rows, dtype=dtype)}, ins, body)[0]

def matmul_scaled(target:Target, tokens:Tensor|Scaled, weight:Weight) -> Scaled:
  """W·x where halves may be too small for it"""
  return Scaled(matmul(target, tokens, weight, factor=HALF_SCALE, dtype=dtypes.half))

def gate_up_prefill(target:Target, tokens:Tensor, weights:tuple[Weight, Weight]) -> Scaled:
  """silu(gate·x) · (up·x) for each token's x. tokens: half (T, D); weights: gate and up, (F, D) -> (T, F). In the kernel:

  gate, up = tiles of gate·x and up·x               # a block a tile of tokens × rows
  out = silu(gate) · up · HALF_SCALE
  """
  (rows, width), T = weights[0].shape, tokens.shape[0]
  tile = tile_of(T, rows)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    block, stores = block_tile(tile, T, rows), []
    def load_tokens(token:UOp, column:UOp) -> list[UOp]: return half4(buffers["tokens"], token * width + column)
    matrices = [weights_of(weight.matrix(buffers, name)) for weight, name in zip(weights, ("gate", "up"))]
    for token, row, (gate, up) in tile_products(target, block, width, matrices, load_tokens):
      out_index = (token * rows + row).valid(block.inside(token, row))
      stores.append(buffers["out"][out_index].store((silu(gate) * up * HALF_SCALE).cast(dtypes.half)))
    return stores
  ins = {"tokens": tokens, **weights[0].args("gate"), **weights[1].args("up")}
  out, = launch(f"gate_up_prefill_{weights[0].label}_{T}", {"out": empty(tokens, T, rows, dtype=dtypes.half)}, ins, body)
  return Scaled(out)

# ---- experts ----

class ExpertProduct(NamedTuple):
  """A lane's element of an expert's output. choice: token · K + k; inside: whether there is such an element"""
  choice: UOp
  row: UOp
  inside: UOp
  sums: list[UOp]

def expert_products(target:Target, buffers:dict[str, UOp], shape:tuple[int, ...], weights:Sequence[Weight], K:int) -> list[ExpertProduct]:
  """tile_products of an expert's matrices and the tokens that chose it. buffers: tokens, half of `shape`, (T, in) or (T, K, in); order and counts,
  as sort_by_expert gives them; the weights' planes, named weight0 and on. In the kernel:

  count = counts[expert]                            # a block a tile of rows × choices of an expert
  choice = order[expert][i] for i < count           # the tile's tokens; a tile past the count has none
  sums = tile of W[expert]·x[choice]
  """
  (E, rows, width), T, tile = weights[0].shape, shape[0], TILE_32x64
  row_tile, choice_tile = UOp.special(-(-rows // tile.rows), "gidx0"), UOp.special(-(-T // tile.tokens), "gidx1")
  expert = UOp.special(E, "gidx2")
  count = buffers["counts"][expert].load().cast(dtypes.weakint)
  block = BlockTile(tile, choice_tile * tile.tokens, row_tile * tile.rows, count, rows)
  def choice_at(index:UOp) -> UOp:
    return buffers["order"][expert * T + index.minimum(T - 1)].load().maximum(0).minimum(T * K - 1).cast(dtypes.weakint)
  choices_per_row = K if len(shape) == 2 else 1
  def load_tokens(index:UOp, column:UOp) -> list[UOp]: return half4(buffers["tokens"], choice_at(index) // choices_per_row * width + column)
  matrices = [weights_of(weight.matrix(buffers, f"weight{i}"), expert * rows) for i, weight in enumerate(weights)]
  return [ExpertProduct(choice_at(block.clamped_token(index)), row, block.inside(index, row), sums)
          for index, row, sums in tile_products(target, block, width, matrices, load_tokens)]

def expert_gate_up_prefill(target:Target, tokens:Tensor, weights:tuple[Weight, Weight], chosen:tuple[Tensor, Tensor], scale:Tensor) -> Scaled:
  """silu(gate·x) · (up·x) · scale for each token's x and chosen expert. tokens: half (T, D); weights: gate and up, (E, F, D);
  chosen: what sort_by_expert returns; scale: float32 (T, K) -> (T, K, F). In the kernel:

  gate, up = tiles of gate[expert]·x and up[expert]·x of the tokens that chose the expert
  out = silu(gate) · up · scale · HALF_SCALE
  """
  (_, rows, _), (T, K), (order, counts) = weights[0].shape, scale.shape, chosen
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    stores = []
    for choice, row, inside, (gate, up) in expert_products(target, buffers, tokens.shape, weights, K):
      value = silu(gate) * up * (buffers["scale"][choice.valid(inside)].load() * HALF_SCALE)
      stores.append(buffers["out"][(choice * rows + row).valid(inside)].store(value.cast(dtypes.half)))
    return stores
  ins = {"tokens": tokens, "order": order, "counts": counts, "scale": scale, **weights[0].args("weight0"), **weights[1].args("weight1")}
  name, outs = f"expert_gate_up_prefill_{weights[0].label}_{T}", {"out": empty(tokens, T, K, rows, dtype=dtypes.half)}
  return Scaled(launch(name, outs, ins, body, sum(weight.nbytes for weight in weights))[0])

def grouped_matmul(target:Target, tokens:Tensor|Scaled, weight:Weight, chosen:tuple[Tensor, Tensor], K:int) -> Tensor:
  """W[expert]·x for each token's x and chosen expert. tokens: half (T, in), or (T, K, in) with an x for each choice; weight: (E, out, in);
  chosen: what sort_by_expert returns -> float32 (T, K, out). In the kernel:

  out = tile of W[expert]·x of the tokens that chose the expert
  """
  halves, undo = unscaled(tokens)
  (_, rows, _), T, (order, counts) = weight.shape, halves.shape[0], chosen
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    return [buffers["out"][(choice * rows + row).valid(inside)].store(value if undo == 1.0 else value * undo)
            for choice, row, inside, (value,) in expert_products(target, buffers, halves.shape, [weight], K)]
  ins = {"tokens": halves, "order": order, "counts": counts, **weight.args("weight0")}
  return launch(f"grouped_matmul_{weight.label}_{T}", {"out": empty(halves, T, K, rows)}, ins, body, weight.nbytes)[0]

# ---- the router: a product as good as float32 ----

def rms_norm_half(target:Target, tokens:Tensor, norm:Norm, low:bool=False) -> list[Tensor]:
  """RMSNorm of each token. tokens: float32 (T, D) -> half (T, D), and with `low` a second one, its rounding error. In the kernel:

  squares = Σ x², by thread, warp and block         # a block a token
  value = x · rsqrt(squares / D + eps) · norm
  out = half(value)
  low = half(value - out)
  """
  (T, D), threads = tokens.shape, 4 * target.lanes
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    token, thread, loaded, stores = UOp.special(T, "gidx0"), UOp.special(threads, "lidx0"), [], []
    for start in range(0, D // 4, threads):
      column = (thread + start) * 4
      inside = column < D
      numbers = [buffers["tokens"][(token * D + column + i).valid(inside)].load() for i in range(4)]   # past the end: zeros
      loaded += [(column + i, inside, number) for i, number in enumerate(numbers)]
    squares = sum_in_order(number * number for _, _, number in loaded)
    sum_of_squares = block_sum(target, squares, thread, threads, 0, lambda warp_sums: total(warp_sums, UOp.add))
    factor = (sum_of_squares * (1.0 / D) + norm.eps).rsqrt()
    for column, inside, number in loaded:
      value, out_index = number * factor * buffers["norm"][column.valid(inside)].load(), (token * D + column).valid(inside)
      stores.append(buffers["out"][out_index].store(value.cast(dtypes.half)))
      if low: stores.append(buffers["low"][out_index].store(rounding_error(value).cast(dtypes.half)))
    return stores
  outs = {name: empty(tokens, T, D, dtype=dtypes.half) for name in ("out", "low")[:1 + low]}
  return launch(f"rms_norm_half_{T}_{D}{'_low' if low else ''}", outs, {"tokens": tokens, "norm": norm.weight}, body)

def rounding_error(value:UOp) -> UOp:
  """value - half(value), but for the least halves"""
  bits = value.bitcast(dtypes.uint32)   # rounded in integers: tinygrad takes a half made of a float, and a float of that, for the same float
  return value - ((bits + 0xfff + ((bits >> 13) & 1)) & 0xffffe000).bitcast(dtypes.float)

def matmul_split_half(target:Target, tokens:Tensor, low:Tensor, weight:Weight) -> Tensor:
  """W·(x + low) to about 22 bits. tokens, low: half (T, in), what rms_norm_half returns -> float32 (T, out). In the kernel:

  term, part = which of the three products, which part of the row       # few rows: a block takes a part of them
  term 0: sums = tile of half(W)·x
  term 1: sums = tile of half(W)·low
  term 2: sums = tile of (W - half(W))·x
  out[term, part] = sums                                                # added up by another kernel
  """
  (rows, width), T = weight.shape, tokens.shape[0]
  tile = tile_of(T, rows)
  parts = next(n for n in (8, 4, 2, 1) if width % (n * 2 * UNIT) == 0 or n == 1)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    block, item, matrix, stores = block_tile(tile, T, rows), UOp.special(3 * parts, "gidx2"), weight.matrix(buffers, "weight"), []
    term, first_column = item // parts, item % parts * (width // parts)
    takes_low, takes_error = term.eq(1), term.eq(2)
    def load_weights(row:UOp, unit:UOp) -> list[UOp]:
      return [takes_error.where(rounding_error(value), value) for value in matrix(row, first_column // UNIT + unit, None).weights()]
    def load_tokens(token:UOp, column:UOp) -> list[UOp]:
      start = token * width + first_column + column
      return [takes_low.where(buffers["low"][(start + i).valid(takes_low)].load(), buffers["tokens"][(start + i).valid(takes_low.ne(True))].load())
              for i in range(4)]
    for token, row, (value,) in tile_products(target, block, width // parts, [load_weights], load_tokens):
      stores.append(buffers["out"][((item * T + token) * rows + row).valid(block.inside(token, row))].store(value))
    return stores
  ins = {"tokens": tokens, "low": low, **weight.args("weight")}
  return launch(f"matmul_split_half_{weight.label}_{T}", {"out": empty(tokens, 3 * parts, T, rows)}, ins, body)[0].sum(0).contiguous()

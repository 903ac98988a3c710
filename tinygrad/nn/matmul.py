"""Matrix products of many tokens by tensor cores, on quantized weights (planes, see nn/kernel.py): what prefill is made of.

A block of threads makes a tile of the output, tokens × rows (nn/tiles.py). It walks along the rows of the weights in steps, in which they become
halves, scale · value + minimum: in each warp's registers (nn/row_walk.py, nn/group_walk.py) or in shared memory (nn/shared_walk.py). A weight is read
and dequantized once for a tile of tokens; an expert's, once for a tile of the tokens that chose it.

Arithmetic: halves times halves, sums in float32, in a fixed order: same input, same bytes.
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import NamedTuple, Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import prod
from tinygrad.nn import group_walk, row_walk, shared_walk
from tinygrad.nn.halves import rounding_error
from tinygrad.nn.intrinsics import Target, select, word
from tinygrad.nn.kernel import (UNIT, Matrix, Norm, Rope, Unit, Weight, block_sum, empty, gated, launch, optional, position_of_token, rotated,
                                silu, sum_in_order, total)
from tinygrad.nn.routing import most_tiles, tile_of_choices
from tinygrad.nn.tiles import BlockTile, LoadUnit, PlaceTokens, Product, Tile, block_tile

# A feed-forward's hidden numbers and a head's outputs are kept as halves times this: they reach 4e6 so, in steps of 4e-6 near zero.
HALF_SCALE = 2.0 ** -6

@dataclass(frozen=True)
class Halves:
  """Tokens of a product: the numbers are x · factor. x: half (T, …, width). ordered: whether a row's numbers lie in the order of nn/group_walk.py"""
  x: Tensor
  factor: float = 1.0
  ordered: bool = False
  @property
  def shape(self) -> tuple: return self.x.shape
  def reshape(self, *shape:int) -> Halves: return Halves(self.x.reshape(*shape), self.factor, self.ordered)

def halves_of(tokens:Tensor|Halves) -> Halves: return tokens if isinstance(tokens, Halves) else Halves(tokens)

def placed(number:UOp, ordered:bool) -> UOp:
  """Where a number of a row is among the row's"""
  return group_walk.place(number) if ordered else number

# ---- the tile of a block ----

def tile_of(target:Target, tokens:Halves, weights:Sequence[Weight], parts:int=1) -> Tile:
  """Of the products of these matrices, or stacks of them, with the tokens. parts: blocks that share a tile"""
  if tokens.ordered: return group_walk.tile_of(tokens.shape[0], weights, parts)
  if row_walk.takes(target): return row_walk.tile_of(tokens.shape[0], weights, parts)
  return shared_walk.tile_of(tokens.shape[0], prod(weights[0].shape[:-1]))

def expert_tile_of(target:Target, tokens:Halves, weights:Sequence[Weight], K:int) -> Tile:
  """Of the products of an expert's matrices with those of the tokens that chose it, of each K"""
  mean = tokens.shape[0] * K / weights[0].shape[0]
  if tokens.ordered: return group_walk.expert_tile_of(mean, weights)
  return row_walk.expert_tile_of(mean, weights) if row_walk.takes(target) else shared_walk.TILE_32x64

def resident(tokens:Halves, tile:Tile, weights:Sequence[Weight]) -> int:
  """What such a launch says of its blocks"""
  return group_walk.resident(tile, weights) if tokens.ordered else 0

def units_of(matrix:Matrix, first_row:UOp|int=0) -> LoadUnit: return lambda row, unit: matrix(first_row + row, unit, None)

def tile_products(target:Target, block:BlockTile, width:int, matrices:Sequence[LoadUnit], place_tokens:PlaceTokens,
                  ordered:bool) -> list[Product]:
  """The elements of W·x, for each matrix W, that a lane holds of the block's tile. width: of a row; ordered: as Halves has it"""
  if ordered: return group_walk.products(target, block, width, matrices, place_tokens)
  if row_walk.takes(target): return row_walk.products(target, block, width, matrices, place_tokens)
  def weights_of(load_unit:LoadUnit) -> shared_walk.LoadWeights: return lambda row, unit: load_unit(row, unit).weights()
  return shared_walk.products(target, block, width, [weights_of(load_unit) for load_unit in matrices],
                              lambda token, column: shared_walk.half4(*place_tokens(token, column).src))

# ---- one matrix, or one a head ----

def matmul(target:Target, tokens:Tensor|Halves, weight:Weight, residual:Tensor|None=None, factor:float=1.0, rotation:tuple[Rope, Tensor]|None=None,
           dtype:DType=dtypes.float, ordered:bool=False) -> Tensor:
  """factor · W·x + residual for each token's x. tokens: (T, in), or (T, H, in or more) for a stack of matrices, one a head -> dtype (T, out) or
  (T, H, out). rotation: what rotates the heads of the product, and the start of the step. ordered: of all that a token has then.
  In the kernel:

  sums = tile of W·x                                # a block a tile of tokens × rows of a head
  for each pair of neighbouring rows of a token:
    pair = factor · sums
    if rotation: pair = rotated by the token's position
    out = pair + residual
  """
  halves = halves_of(tokens)
  (*stack, rows, width), T, factor = weight.shape, halves.shape[0], factor * halves.factor
  heads, pitch, (rope, start) = stack[0] if stack else 1, halves.shape[-1], rotation or (None, None)
  tile, sequences = tile_of(target, halves, [weight]), 1 if start is None else start.shape[0]
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    block, head, stores = block_tile(tile, T, rows), UOp.special(heads, "gidx2"), []
    def place_tokens(token:UOp, column:UOp) -> UOp: return buffers["tokens"][(token * heads + head) * pitch + column]
    matrices = [units_of(weight.matrix(buffers, "weight"), head * rows)]
    products = tile_products(target, block, width, matrices, place_tokens, halves.ordered)
    for first, second in zip(products[::2], products[1::2]):
      token, row = first.token, first.row
      pair = [value if factor == 1.0 else value * factor for value in (*first.sums, *second.sums)]
      if rope is not None:
        index, position = row % rope.head - rope.nope, position_of_token(buffers, block.clamped_token(token), sequences, T // sequences)
        pair = rotated(buffers, rope.table.shape[1], index, pair, index >= 0, position)
      for i, value in enumerate(pair):
        out_index = (token * (heads * rows) + placed(head * rows + row + i, ordered)).valid(block.inside(token, row + i))
        if residual is not None: value = value + buffers["residual"][out_index].load()
        stores.append(buffers["out"][out_index].store(value.cast(dtype)))
    return stores
  ins = {"tokens": halves.x, **optional(residual=residual, rope=rope.table if rope else None, start=start), **weight.args("weight")}
  name = "_".join(["matmul", weight.label, str(T), *([] if residual is None else ["residual"]), *([] if rope is None else ["rope"])])
  return launch(name, {"out": empty(halves.x, *halves.shape[:-1], rows, dtype=dtype)}, ins, body, weight.nbytes,
                resident(halves, tile, [weight]))[0]

def matmul_scaled(target:Target, tokens:Tensor|Halves, weight:Weight) -> Halves:
  """W·x of heads where halves may be too small for it, as tokens of another product"""
  ordered = group_walk.takes(target, prod(weight.shape[:-1]))
  return Halves(matmul(target, tokens, weight, factor=HALF_SCALE, dtype=dtypes.half, ordered=ordered), 1 / HALF_SCALE, ordered)

def gate_up_prefill(target:Target, tokens:Halves, weights:tuple[Weight, Weight]) -> Halves:
  """silu(gate·x) · (up·x) for each token's x. tokens: (T, D); weights: gate and up, (F, D) -> (T, F). In the kernel:

  gate, up = tiles of gate·x and up·x               # a block a tile of tokens × rows
  out = silu(gate) · up · HALF_SCALE
  """
  (rows, width), T = weights[0].shape, tokens.shape[0]
  tile, ordered = tile_of(target, tokens, weights), group_walk.takes(target, rows)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    block, stores = block_tile(tile, T, rows), []
    def place_tokens(token:UOp, column:UOp) -> UOp: return buffers["tokens"][token * width + column]
    matrices = [units_of(weight.matrix(buffers, name)) for weight, name in zip(weights, ("gate", "up"))]
    for token, row, (gate, up) in tile_products(target, block, width, matrices, place_tokens, tokens.ordered):
      out_index = (token * rows + placed(row, ordered)).valid(block.inside(token, row))
      stores.append(buffers["out"][out_index].store((silu(gate) * up * HALF_SCALE).cast(dtypes.half)))
    return stores
  ins = {"tokens": tokens.x, **weights[0].args("gate"), **weights[1].args("up")}
  out, = launch(f"gate_up_prefill_{weights[0].label}_{T}", {"out": empty(tokens.x, T, rows, dtype=dtypes.half)}, ins, body,
                sum(weight.nbytes for weight in weights), resident(tokens, tile, weights))
  return Halves(out, 1 / HALF_SCALE, ordered)

# ---- experts ----

class ExpertProduct(NamedTuple):
  """A lane's element of an expert's output. choice: token · K + k; inside: whether there is such an element"""
  choice: UOp
  row: UOp
  inside: UOp
  sums: list[UOp]

def expert_products(target:Target, buffers:dict[str, UOp], tile:Tile, tokens:Halves, weights:Sequence[Weight], K:int) -> list[ExpertProduct]:
  """tile_products of an expert's matrices and the tokens that chose it. tokens: (T, in) or (T, K, in). buffers: tokens; order and counts, as
  sort_by_expert gives them; the weights' planes, named weight0 and on. In the kernel:

  count = counts[expert]                            # a block a tile of rows × choices of an expert
  choice = order[expert][i] for i < count           # the tile's tokens; a tile past the count has none
  sums = tile of W[expert]·x[choice]
  """
  (E, rows, width), T = weights[0].shape, tokens.shape[0]
  row_tile = UOp.special(-(-rows // tile.rows), "gidx0")
  if row_walk.takes(target):
    thread = UOp.special(prod(tile.warps) * target.lanes, "lidx0")
    number = UOp.special(most_tiles(T * K, E, tile.tokens), "gidx1")
    expert, choice_tile = tile_of_choices(target, buffers["counts"], E, tile.tokens, number, thread % target.lanes)
  else: expert, choice_tile = UOp.special(E, "gidx2"), UOp.special(-(-T // tile.tokens), "gidx1")
  count = buffers["counts"][expert].load()
  count = (count.maximum(0).minimum(T) if row_walk.takes(target) else count).cast(dtypes.weakint)
  block = BlockTile(tile, choice_tile * tile.tokens, row_tile * tile.rows, count, rows)
  def choice_at(index:UOp) -> UOp:
    return buffers["order"][expert * T + index.minimum(T - 1)].load().maximum(0).minimum(T * K - 1).cast(dtypes.weakint)
  choices_per_row = K if len(tokens.shape) == 2 else 1
  def place_tokens(index:UOp, column:UOp) -> UOp: return buffers["tokens"][choice_at(index) // choices_per_row * width + column]
  matrices = [units_of(weight.matrix(buffers, f"weight{i}"), expert * rows) for i, weight in enumerate(weights)]
  return [ExpertProduct(choice_at(block.clamped_token(index)), row, block.inside(index, row), sums)
          for index, row, sums in tile_products(target, block, width, matrices, place_tokens, tokens.ordered)]

def expert_gate_up_prefill(target:Target, tokens:Halves, weights:tuple[Weight, Weight], chosen:tuple[Tensor, Tensor], scale:Tensor) -> Halves:
  """silu(gate·x) · (up·x) · scale for each token's x and chosen expert. tokens: (T, D); weights: gate and up, (E, F, D);
  chosen: what sort_by_expert returns; scale: float32 (T, K) -> (T, K, F). In the kernel:

  gate, up = tiles of gate[expert]·x and up[expert]·x of the tokens that chose the expert
  out = silu(gate) · up · scale · HALF_SCALE
  """
  (_, rows, _), (T, K), (order, counts) = weights[0].shape, scale.shape, chosen
  tile, ordered = expert_tile_of(target, tokens, weights, K), group_walk.takes(target, rows)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    stores = []
    for choice, row, inside, (gate, up) in expert_products(target, buffers, tile, tokens, weights, K):
      value = silu(gate) * up * (buffers["scale"][choice.valid(inside)].load() * HALF_SCALE)
      stores.append(buffers["out"][(choice * rows + placed(row, ordered)).valid(inside)].store(value.cast(dtypes.half)))
    return stores
  ins = {"tokens": tokens.x, "order": order, "counts": counts, "scale": scale, **weights[0].args("weight0"), **weights[1].args("weight1")}
  name, outs = f"expert_gate_up_prefill_{weights[0].label}_{T}", {"out": empty(tokens.x, T, K, rows, dtype=dtypes.half)}
  held = resident(tokens, tile, weights)
  return Halves(launch(name, outs, ins, body, sum(weight.nbytes for weight in weights), held)[0], 1 / HALF_SCALE, ordered)

def grouped_matmul(target:Target, tokens:Halves, weight:Weight, chosen:tuple[Tensor, Tensor], K:int) -> Halves:
  """W[expert]·x for each token's x and chosen expert. tokens: (T, in), or (T, K, in) with an x for each choice; weight: (E, out, in);
  chosen: what sort_by_expert returns -> (T, K, out), as they are. In the kernel:

  out = tile of W[expert]·x of the tokens that chose the expert, · HALF_SCALE
  """
  (_, rows, _), T, (order, counts), tile = weight.shape, tokens.shape[0], chosen, expert_tile_of(target, tokens, [weight], K)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    return [buffers["out"][(choice * rows + row).valid(inside)].store((value * (tokens.factor * HALF_SCALE)).cast(dtypes.half))
            for choice, row, inside, (value,) in expert_products(target, buffers, tile, tokens, [weight], K)]
  ins = {"tokens": tokens.x, "order": order, "counts": counts, **weight.args("weight0")}
  outs = {"out": empty(tokens.x, T, K, rows, dtype=dtypes.half)}
  held = resident(tokens, tile, [weight])
  return Halves(launch(f"grouped_matmul_{weight.label}_{T}", outs, ins, body, weight.nbytes, held)[0], 1 / HALF_SCALE)

SUMMED = 4   # numbers of a thread

def add_chosen(target:Target, x:Tensor, each:Halves) -> Tensor:
  """x + Σ over K of each. x: float32 (T, D); each: (T, K, D), as they are -> (T, D). A block has a token's numbers, or a part of them"""
  (T, K, D), threads = each.shape, 8 * target.lanes
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    number = (UOp.special(-(-D // (threads * SUMMED)), "gidx0") * threads + UOp.special(threads, "lidx0")) * SUMMED
    token, inside, stores = UOp.special(T, "gidx1"), None if D % (threads * SUMMED) == 0 else number < D, []
    for i in range(SUMMED):
      chosen = sum_in_order(buffers["each"][gated((token * K + k) * D + number + i, inside)].load().cast(dtypes.float) for k in range(K))
      place = gated(token * D + number + i, inside)
      stores.append(buffers["y"][place].store(buffers["x"][place].load() + chosen * each.factor))
    return stores
  return launch(f"add_chosen_{T}_{K}_{D}", {"y": empty(x, T, D)}, {"x": x, "each": each.x}, body)[0]

# ---- the router: a product as good as float32 ----

def rms_norm_half(target:Target, tokens:Tensor, norm:Norm, low:bool=False) -> list[Halves]:
  """RMSNorm of each token. tokens: float32 (T, D) -> (T, D), and with `low` a second one, its rounding error. In the kernel:

  squares = Σ x², by thread, warp and block         # a block a token
  value = x · rsqrt(squares / D + eps) · norm
  out = half(value)
  low = half(value - out)
  """
  (T, D), threads, ordered = tokens.shape, 4 * target.lanes, group_walk.takes(target, tokens.shape[1])
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
      value, out_index = number * factor * buffers["norm"][column.valid(inside)].load(), (token * D + placed(column, ordered)).valid(inside)
      stores.append(buffers["out"][out_index].store(value.cast(dtypes.half)))
      if low: stores.append(buffers["low"][out_index].store(rounding_error(value).cast(dtypes.half)))
    return stores
  outs = {name: empty(tokens, T, D, dtype=dtypes.half) for name in ("out", "low")[:1 + low]}
  made = launch(f"rms_norm_half_{T}_{D}{'_low' if low else ''}", outs, {"tokens": tokens, "norm": norm.weight}, body)
  return [Halves(x, ordered=ordered) for x in made]

def matmul_split_half(target:Target, tokens:Halves, low:Halves, weight:Weight) -> Tensor:
  """W·(x + low) to about 22 bits, as parts to be added up. tokens, low: (T, in), what rms_norm_half returns -> float32 (parts, T, out). In the
  kernel:

  term, part = which of the three products, which part of the row       # few rows: a block takes a part of them
  term 0: sums = tile of half(W)·x
  term 1: sums = tile of half(W)·low
  term 2: sums = tile of (W - half(W))·x
  out[term, part] = sums
  """
  (rows, width), T, ordered = weight.shape, tokens.shape[0], tokens.ordered
  parts = next(n for n in (8, 4, 2, 1) if width % (n * (row_walk.CHUNK if ordered else 2 * UNIT)) == 0 or n == 1)
  tile = tile_of(target, tokens, [weight], 3 * parts)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    block, item, matrix, stores = block_tile(tile, T, rows), UOp.special(3 * parts, "gidx2"), weight.matrix(buffers, "weight"), []
    term, first_column = item // parts, item % parts * (width // parts)
    takes_low, takes_error = term.eq(1), term.eq(2)
    def load_weights(row:UOp, unit:UOp) -> list[UOp]:
      return [takes_error.where(rounding_error(value), value) for value in matrix(row, first_column // UNIT + unit, None).weights()]
    def load_unit(row:UOp, unit:UOp) -> Unit:   # without a branch a weight
      all_bits = takes_error.where(word(0xffffffff), word(0))
      weights = [rounding_error(value, all_bits) for value in matrix(row, first_column // UNIT + unit, None).weights()]
      return Unit([], [(weights[0].const_like(1.0), None)], floats=weights)
    def place_tokens(token:UOp, column:UOp) -> UOp:
      return select(takes_low, *(buffers[name][token * width + first_column + column] for name in ("low", "tokens")))
    def load_tokens(token:UOp, column:UOp) -> list[UOp]:
      start = token * width + first_column + column
      return [takes_low.where(buffers["low"][(start + i).valid(takes_low)].load(), buffers["tokens"][(start + i).valid(takes_low.ne(True))].load())
              for i in range(4)]
    products = tile_products(target, block, width // parts, [load_unit], place_tokens, ordered) if row_walk.takes(target) else \
      shared_walk.products(target, block, width // parts, [load_weights], load_tokens)
    for token, row, (value,) in products:
      stores.append(buffers["out"][((item * T + token) * rows + row).valid(block.inside(token, row))].store(value))
    return stores
  ins = {"tokens": tokens.x, "low": low.x, **weight.args("weight")}
  outs = {"out": empty(tokens.x, 3 * parts, T, rows)}
  held = resident(tokens, tile, [weight])
  return launch(f"matmul_split_half_{weight.label}_{T}", outs, ins, body, weight.nbytes, held)[0]

"""Matrix products of a few tokens (2 to 64) by tensor cores, on quantized weights (planes, see nn/kernel.py): what a decode step of several sequences
is made of. Each weight is read once for all tokens.

A product of the tensor core takes 16 rows of weights, eight tokens and 16 inner numbers. Its sums do not mind the order of the inner numbers, as long
as both operands have the same: so a lane takes whole units of weights from memory, 16 bytes at a time as a vector's kernels do, and its elements of a
product are four neighbouring weights of its unit. The four lanes that share a row have neighbouring units; eight products take these four units, a
*chunk* of 128 numbers. The tokens are written in that order by whatever kernel makes them (Columns): a lane reads its elements of two products at once.

The warps of a block share out the chunks of the same 16 rows. Weights become halves in registers, two in a word.

Arithmetic: halves times halves, sums in float32, in a fixed order: same input, same bytes. A token's sums do not depend on the other tokens.
"""
from __future__ import annotations
import struct
from dataclasses import dataclass
from typing import Callable, NamedTuple, Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn.intrinsics import Target, byte_perm, fma_halves, pdl_wait, word
from tinygrad.nn.kernel import (UNIT, Matrix, Norm, Rope, Unit, Weight, block_sum, empty, gated, launch, local, optional, rotated, safe_index, silu,
                                sum_in_order, total)
from tinygrad.nn.matmul import HALF_SCALE
from tinygrad.nn.matvec import global_loads
from tinygrad.uop.ops import Ops

MOST_TOKENS = 64
TILE_ROWS, TILE_TOKENS = 16, 8   # of a product
CHUNK = 4 * UNIT                 # numbers of a row that a product's lanes have between them
QUADS = UNIT // 4                # products of a chunk
MOST_WARPS = 8                   # of a block

def takes(target:Target) -> bool:
  """Whether the fragments are those known here, and words of two halves can be multiplied"""
  return target.mma is not None and target.mma.counts == (8, 4, 4) and target.fma_halves is not None

# ---- tokens ----

@dataclass(frozen=True)
class Columns:
  """Tokens as the tensor core takes them: x = words · factor. words: uint32 (H, chunks · 4, T, 16), two halves each; H: vectors of a token.
  Piece 4c + i of a token has its numbers 8i … 8i+7 of each unit of chunk c, unit by unit; of each four neighbours the first and third make a word."""
  words: Tensor
  factor: float = 1.0
  @property
  def tokens(self) -> int: return self.words.shape[2]

def pieces_of(width:int) -> int: return -(-width // CHUNK) * 4
def columns_like(like:Tensor, heads:int, tokens:int, width:int) -> Tensor:
  return empty(like, heads, pieces_of(width), tokens, 16, dtype=dtypes.uint32)

def half_bits(x:UOp) -> UOp: return x.cast(dtypes.half).bitcast(dtypes.uint16).cast(dtypes.uint32)
def half_pair(low:UOp, high:UOp) -> UOp: return half_bits(low) | (half_bits(high) << 16)
def halves(pair:UOp) -> list[UOp]: return [part.cast(dtypes.uint16).bitcast(dtypes.half) for part in (pair, pair >> 16)]
def quad_pairs(numbers:Sequence[UOp]) -> list[UOp]:
  """Four neighbouring numbers as two words"""
  return [half_pair(numbers[0], numbers[2]), half_pair(numbers[1], numbers[3])]

def quad_place(quad:UOp, token:UOp, tokens:int) -> UOp:
  """Where the two words of a vector's numbers 4·quad … lie"""
  piece = quad // (4 * QUADS) * 4 + quad % QUADS // 2
  return (piece * tokens + token) * 16 + quad // QUADS % 4 * 4 + quad % 2 * 2

def columns(target:Target, x:Tensor, norm:Norm|None=None) -> Columns:
  """Tokens in the order of Columns, with a norm RMSNorm(x). x: float32 or half (T, D) or (T, H, D). In the kernel:

  squares = Σ x², by thread, warp and block         # a block a vector of a token
  value = x · rsqrt(squares / D + eps) · norm
  out = half(value)
  """
  (T, *stack, D), threads = x.shape, 8 * target.lanes
  heads = stack[0] if stack else 1
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    token, head, thread, loaded, stores = UOp.special(T, "gidx0"), UOp.special(heads, "gidx1"), UOp.special(threads, "lidx0"), [], []
    wait_zero = pdl_wait(target)
    for start in range(0, D // 4, threads):
      quad = thread + start
      inside = None if start + threads <= D // 4 else quad < D // 4
      place = ((token * heads + head) * D + wait_zero * 4) + quad * 4
      loaded.append((quad, inside, [buffers["x"][gated(place + i, inside)].load().cast(dtypes.float) for i in range(4)]))
    if norm is not None:
      squares = sum_in_order(number * number for _, _, numbers in loaded for number in numbers)
      sum_of_squares = block_sum(target, squares, thread, threads, 0, lambda warp_sums: total(warp_sums, UOp.add))
      factor = (sum_of_squares * (1.0 / D) + norm.eps).rsqrt()
    for quad, inside, numbers in loaded:
      if norm is not None: numbers = [number * factor * buffers["norm"][gated(quad * 4 + i, inside)].load() for i, number in enumerate(numbers)]
      place = quad_place(quad, token, T) + head * (pieces_of(D) * T * 16)
      stores += [buffers["out"][gated(place + i, inside)].store(pair) for i, pair in enumerate(quad_pairs(numbers))]
    return stores
  name = "_".join(["columns", *map(str, x.shape), *([] if norm is None else ["norm"])])
  ins = {"x": x, **optional(norm=norm.weight if norm else None)}
  return Columns(launch(name, {"out": columns_like(x, heads, T, D)}, ins, body)[0])

# ---- weights ----

# A code set into the mantissa of the half 4.0 is 4 + code / 256. What is subtracted makes value / 256, exactly; a scale times 256 loses nothing either.
MANTISSA_BYTE, SCALE_UP = 0x44444444, 256.0
ONES = 0x3c003c00

def same_halves(x:UOp) -> UOp: return half_bits(x) * 0x10001

def half_words(target:Target, unit:Unit) -> list[UOp]:
  """The unit dequantized: of each four neighbouring weights the first and third in a word, the second and fourth in another"""
  if unit.floats is not None:
    weights = unit.weights()
    return [pair for i in range(0, UNIT, 4) for pair in quad_pairs(weights[i:i + 4])]
  offset = -(4 + unit.zero / 256)
  centre = word(int.from_bytes(struct.pack("<2e", offset, offset), "little"))
  scales = [(same_halves(scale * SCALE_UP), word(0) if minimum is None else same_halves(minimum)) for scale, minimum in unit.scales]
  pairs = []
  for quad, codes in enumerate(unit.words):
    scale, minimum = scales[quad * len(scales) // QUADS]
    for digits in (0x4240, 0x4341):
      value = fma_halves(target, byte_perm(target, codes, word(MANTISSA_BYTE), digits), word(ONES), centre)
      pairs.append(fma_halves(target, value, scale, minimum))
  return pairs

# ---- a block ----

LoadPairs = Callable[[UOp, UOp, UOp|None], list[UOp]]   # (token, piece, whether there is such a piece) -> the lane's four words of it

@dataclass(frozen=True)
class Share:
  """How a block's warps share out rows of `units`: each takes so many neighbouring chunks"""
  units: int
  warps: int
  chunks: int

def share_of(width:int) -> Share:
  """The fewest chunks a warp, and then no more warps than have one"""
  chunks = -(-width // CHUNK)
  most = -(-chunks // MOST_WARPS)
  return Share(width // UNIT, -(-chunks // most), most)

class Quad(NamedTuple):
  """Four neighbouring rows' products with a token, of each matrix"""
  token: UOp
  row: UOp                     # the first
  inside: UOp                  # whether there is such a token, and such a thread
  sums: list[list[UOp]]

PITCH = TILE_ROWS + 4            # of a token's sums in shared memory: a warp's lanes hit different banks
SUMS_BYTES = 40960               # of the sums in shared memory

class BlockProduct:
  """A block's tile: its rows of some matrices times all tokens. In the kernel:

  weights = the lane's units of its rows                         # loads are issued; none waits for the tokens
  wait until the kernels before are done
  for each chunk, and of it each two products:
    pairs = the lane's numbers of its token                      # of each eight tokens
    sums += weights · pairs                                      # tensor cores
  for some tokens at a time: shared = sums; barrier; the sums over the warps, four rows a thread
  """
  def __init__(self, target:Target, share:Share, tokens:int, first_row:UOp, rows:int, row_tiles:int=1):
    assert target.mma is not None
    self.target, self.mma, self.share, self.tokens, self.row_tiles = target, target.mma, share, tokens, row_tiles
    self.first_row, self.rows = first_row, rows
    self.n_threads = share.warps * target.lanes
    self.thread = UOp.special(self.n_threads, "lidx0")
    self.warp, lane = self.thread // target.lanes, self.thread % target.lanes
    self.lane_group, self.in_group = lane // 4, lane % 4
    self.token_tiles = -(-tokens // TILE_TOKENS)

  def unit(self, chunk:int) -> tuple[UOp, UOp|None]:
    """(the lane's unit of its warp's chunk, whether there is such a unit); None: always"""
    share = self.share
    unit = (self.warp * share.chunks + chunk) * 4 + self.in_group
    return unit, None if share.warps * share.chunks * 4 == share.units else unit < share.units

  def load(self, matrices:Sequence[Matrix]) -> list[list[list[list[Unit]]]]:
    """The lane's units by chunk, matrix, tile of rows, and which of its two rows"""
    def unit(matrix:Matrix, chunk:int, row:int) -> Unit:
      number, inside = self.unit(chunk)
      return matrix((self.first_row + row + self.lane_group).minimum(self.rows - 1), safe_index(number, inside), inside)
    return [[[[unit(matrix, chunk, tile * TILE_ROWS + half * 8) for half in range(2)] for tile in range(self.row_tiles)] for matrix in matrices]
            for chunk in range(self.share.chunks)]

  def products(self, weights:list[list[list[list[Unit]]]], load_pairs:LoadPairs) -> list[list[list[list[UOp]]]]:
    """The lane's sums by matrix, tile of rows and tile of tokens"""
    tokens = [tile * TILE_TOKENS + self.lane_group for tile in range(self.token_tiles)]
    sums = [[[[UOp.const(0.0, dtypes.float)] * 4 for _ in tokens] for _ in range(self.row_tiles)] for _ in weights[0]]
    for chunk, of_chunk in enumerate(weights):
      unit, inside = self.unit(chunk)
      words = [[[half_words(self.target, unit) for unit in rows] for rows in tiles] for tiles in of_chunk]
      for i in range(QUADS // 2):
        for token_tile, token in enumerate(tokens):
          pairs = load_pairs(token, unit // 4 * 4 + i, inside)
          for part in range(2):
            b = [number for pair in pairs[part * 2:part * 2 + 2] for number in halves(pair)]
            for matrix, tiles in enumerate(words):
              for row_tile, rows in enumerate(tiles):
                a = [number for pair in range(2) for row in rows for number in halves(row[(i * 2 + part) * 2 + pair])]
                sums[matrix][row_tile][token_tile] = self.mma(a, b, sums[matrix][row_tile][token_tile])
    return sums

  def quads(self, sums:list[list[list[list[UOp]]]]) -> list[Quad]:
    """The sums over the warps, shared out over the threads"""
    tiles = [tile for of_matrix in sums for tile in of_matrix]
    at_once = max(SUMS_BYTES // (4 * PITCH * TILE_TOKENS * len(tiles) * self.share.warps), 1)   # tiles of tokens
    shared, found = local(self.share.warps * len(tiles) * at_once * TILE_TOKENS * PITCH, dtypes.float, 0), []
    def place(warp:UOp|int, tile:UOp|int, token:UOp, row:UOp) -> UOp:
      return (((warp * len(tiles) + tile) * at_once) * TILE_TOKENS + token) * PITCH + row
    for first in range(0, self.token_tiles, at_once):
      stores, here = [], min(at_once, self.token_tiles - first)
      for tile, of_tile in enumerate(tiles):
        for token_tile in range(here):
          for i, value in enumerate(of_tile[first + token_tile]):
            row, token = self.mma.c(self.thread % self.target.lanes, i)
            stores.append(shared[place(self.warp, tile, token_tile * TILE_TOKENS + token, row)].store(value))
      summed, loads = shared.after(UOp(Ops.BARRIER, src=tuple(stores))), []
      tokens_here = min(self.tokens - first * TILE_TOKENS, here * TILE_TOKENS)
      n_quads = tokens_here * self.row_tiles * 4
      for start in range(0, n_quads, self.n_threads):
        item = (self.thread + start).minimum(n_quads - 1) if start + self.n_threads > n_quads else self.thread + start
        token, row_tile, row = item // (self.row_tiles * 4), item // 4 % self.row_tiles, item % 4 * 4
        values = []
        for matrix in range(len(sums)):
          each = [[summed[place(warp, matrix * self.row_tiles + row_tile, token, row) + i].load() for i in range(4)]
                  for warp in range(self.share.warps)]
          loads += [load for warp in each for load in warp]
          values.append([sum_in_order(column) for column in zip(*each)])
        found.append(Quad(first * TILE_TOKENS + token, self.first_row + row_tile * TILE_ROWS + row, self.thread + start < n_quads, values))
      shared = shared.after(UOp(Ops.BARRIER, src=tuple(loads)))
    return found

  def run(self, matrices:Sequence[Matrix], load_pairs:Callable[[UOp], LoadPairs]) -> list[Quad]:
    """load_pairs(wait_zero) -> LoadPairs"""
    weights = self.load(matrices)
    wait_zero = pdl_wait(self.target, *global_loads([[unit for rows in tiles for row in rows for unit in row] for tiles in weights]))
    self.wait_zero = wait_zero
    return self.quads(self.products(weights, load_pairs(wait_zero)))

# ---- one matrix, or one a head ----

def few_matmul(target:Target, x:Columns, weight:Weight, residual:Tensor|None=None, factor:float=1.0, rope:Rope|None=None,
               start:Tensor|None=None, row_tiles:int=1) -> Tensor:
  """factor · W·x + residual for each token's x. weight: a matrix, or a stack with one a head, of which each has an x -> float32 (T, out) or (T, H, out).
  rope rotates the heads of the product; start: int32 (T,), the tokens' positions. In the kernel:

  sums = W·x of a tile of rows of a head, and all tokens       # a block
  for each four neighbouring rows of a token:
    four = factor · sums
    if rope: four = pairs rotated by the token's position
    out = four + residual
  """
  (*stack, rows, width), T, factor = weight.shape, x.tokens, factor * x.factor
  heads, share = stack[0] if stack else 1, share_of(width)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    tile, head, stores = UOp.special(-(-rows // (TILE_ROWS * row_tiles)), "gidx0"), UOp.special(heads, "gidx1"), []
    block, matrix = BlockProduct(target, share, T, tile * (TILE_ROWS * row_tiles), rows, row_tiles), weight.matrix(buffers, "weight")
    def load_pairs(wait_zero:UOp) -> LoadPairs: return pairs_of(buffers["x"], x, head, wait_zero, block.in_group)
    for token, first, inside, (four,) in block.run([lambda row, unit, gate: matrix(head * rows + row, unit, gate)], load_pairs):
      if factor != 1.0: four = [value * factor for value in four]
      if rope is not None:
        position = buffers["start"][token].load().cast(dtypes.weakint)
        for i in (0, 2):
          number = (first + i) % rope.head - rope.nope
          four[i:i + 2] = rotated(buffers, rope.table.shape[1], number, four[i:i + 2], number >= 0, position)
      for i, value in enumerate(four):
        place, writes = (token * heads + head) * rows + first + i, inside & ((first + i if rows % 4 else first) < rows)
        if residual is not None: value = value + buffers["residual"][(place + block.wait_zero * 4).valid(writes)].load()
        stores.append(buffers["out"][place.valid(writes)].store(value))
    return stores
  ins = {"x": x.words, **optional(residual=residual, rope=rope.table if rope else None, start=start if rope else None), **weight.args("weight")}
  name = "_".join(["few_matmul", weight.label, str(T), *([] if residual is None else ["residual"]), *([] if rope is None else ["rope"])])
  return launch(name, {"out": empty(x.words, T, *stack, rows)}, ins, body, weight.nbytes)[0]

def pairs_of(buffer:UOp, x:Columns, head:UOp, wait_zero:UOp, in_group:UOp) -> LoadPairs:
  _, pieces, tokens, _ = x.words.shape
  def load(token:UOp, piece:UOp, inside:UOp|None) -> list[UOp]:
    place = ((head * pieces + piece) * tokens + token.minimum(tokens - 1) + wait_zero) * 16 + in_group * 4
    return [buffer[gated(place + i, inside)].load() for i in range(4)]
  return load

"""Matrix products of a few tokens (2 to 64) by tensor cores, on quantized weights (planes, see nn/kernel.py): what a decode step of several sequences
is made of. Each weight is read once for all tokens.

A product of the tensor core takes 16 rows of weights, eight tokens and 16 inner numbers. Its sums do not mind the order of the inner numbers, as long
as both operands have the same: so a lane takes whole units of weights from memory, 16 bytes at a time as a vector's kernels do, and its elements of a
product are four neighbouring weights of its unit. The four lanes that share a row have neighbouring units; eight products take these four units, a
chunk of 128 numbers. The tokens are written in that order by whatever kernel makes them (Columns): a lane reads its elements of two products at
once. Where a launch is so small that another in front of it would cost more, its blocks make them for themselves (Floats).

The warps of a block share out the chunks of the same 16 rows. Weights become halves in registers, two in a word.

Arithmetic: halves times halves, sums in float32, in a fixed order: same input, same bytes. A token's sums depend on how many tokens there are (more
warps may share a row of up to eight's products), not on the other tokens.
"""
from __future__ import annotations
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Callable, NamedTuple, Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import prod
from tinygrad.nn.halves import FOUR, FOURS, QUADS, SCALE_UP, half_pair, halves, rounding_error, same_halves
from tinygrad.nn.intrinsics import Target, and_or, byte_perm, copied, copy, fma_halves, group_sum, opaque_zero, word
from tinygrad.nn.kernel import (MULTIPROCESSORS, REGISTERS_80, SLOTS, UNIT, BlockSum, Matrix, Norm, Rope, Unit, Weight, behind_wait,
                                block_sum, branch, empty, gated, launch, local, optional, rotated, safe_index, silu, sum_in_order, total,
                                words_of_unit)
from tinygrad.nn.matmul import HALF_SCALE
from tinygrad.nn.matvec import ExtraStores, LastBlock, code_pieces, global_loads
from tinygrad.nn.routing import GROUP, Routing, chosen_groups, expert_index, groups_in_a_launch, groups_like, most_groups
from tinygrad.uop.ops import Ops

# Two tokens of codes are faster by a matrix times two vectors (nn/matvec.py), which takes half as many launches. Past 64 the sums leave a warp's
# registers.
LEAST_TOKENS, MOST_TOKENS = 3, 64
TILE_ROWS, TILE_TOKENS = 16, GROUP   # of a product
CHUNK = 4 * UNIT                 # numbers of a row that a product's lanes have between them
MOST_WARPS = 8                   # of a block; twice as many where a launch takes as long as a warp's way
PITCH = TILE_ROWS + 4            # of a token's sums in shared memory: a warp's lanes hit different banks
SHARED_BYTES = 40960             # of the sums in shared memory
HELD_CHUNKS = 5                  # of each of twice as many warps
MADE_WIDTH = 2048                # at most, of vectors that each block makes columns of
MADE = 8 * SLOTS                 # the first slot of the columns that blocks make

def least_tokens(weight:Weight) -> int:
  """Two of 16-bit floats: beside a unit of those, 16 registers, two vectors of float32 find none"""
  return 2 if not weight.integer and words_of_unit(weight) == UNIT // 2 else LEAST_TOKENS

def takes(target:Target) -> bool:
  """Whether the tensor cores take words of two halves, and a lane can multiply them: the fragments are then PTX's"""
  return target.mma is not None and target.mma.on_words is not None and target.fma_halves is not None

# ---- tokens ----

@dataclass(frozen=True)
class Columns:
  """Tokens as the tensor core takes them: x = words · factor. words: uint32 (H, chunks · 4, T, 16), two halves each; H: vectors of a token.
  Piece 4c + i of a token has its numbers 8i … 8i+7 of each unit of chunk c, unit by unit; of each four neighbours the first and third make a word."""
  words: Tensor
  factor: float = 1.0
  @property
  def tokens(self) -> int: return self.words.shape[2]
  def inputs(self) -> dict[str, Tensor]: return {"x": self.words}

def pieces_of(width:int) -> int: return -(-width // CHUNK) * 4
def columns_like(like:Tensor, heads:int, tokens:int, width:int) -> Tensor:
  return empty(like, heads, pieces_of(width), tokens, 16, dtype=dtypes.uint32)

def quad_pairs(numbers:Sequence[UOp]) -> list[UOp]:
  """Four neighbouring numbers as two words"""
  return [half_pair(numbers[0], numbers[2]), half_pair(numbers[1], numbers[3])]

def quad_place(quad:UOp, token:UOp, tokens:int) -> UOp:
  """Where the two words of a vector's numbers 4·quad … lie"""
  piece = quad // (4 * QUADS) * 4 + quad % QUADS // 2
  return (piece * tokens + token) * 16 + quad // QUADS % 4 * 4 + quad % 2 * 2

@dataclass(frozen=True)
class Floats:
  """Tokens of which each block of a launch makes columns for itself, in shared memory; with a norm, of RMSNorm(x)"""
  x: Tensor              # float32 (T, heads · pitch)
  width: int             # of a vector
  norm: Norm|None = None
  pitch: int = 0         # numbers from a head's vector to the next one's
  factor = 1.0
  @property
  def tokens(self) -> int: return self.x.shape[0]
  def inputs(self) -> dict[str, Tensor]: return {"x": self.x, **optional(norm=None if self.norm is None else self.norm.weight)}

def tokens_of(target:Target, x:Tensor, norm:Norm|None, weights:Sequence[Weight]) -> Columns|Floats:
  """Tokens for a launch on these matrices, which has them alone. Each block makes its columns where that costs less than a launch"""
  T, D = x.shape
  short = is_short(D, T, *(weight.shape[0] for weight in weights)) and D <= MADE_WIDTH
  return Floats(x, D, norm) if norm is not None and short else columns(target, x, norm)[0]

def columns(target:Target, x:Tensor, norm:Norm|None=None, low:bool=False) -> list[Columns]:
  """Tokens in the order of Columns, with a norm RMSNorm(x), and with `low` their rounding errors. x: float32 (T, D) or (T, H, D). In the kernel:

  squares = Σ x², by thread, warp and block                      # a block a vector of a token
  value = x · rsqrt(squares / D + eps) · norm
  out = half(value)
  low = half(value - out)
  """
  (T, *stack, D), threads = x.shape, 8 * target.lanes
  heads = stack[0] if stack else 1
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    token, head, thread, loaded, stores = UOp.special(T, "gidx0"), UOp.special(heads, "gidx1"), UOp.special(threads, "lidx0"), [], []
    x_behind = behind_wait(target, buffers)["x"]
    for start in range(0, D // 4, threads):
      quad = thread + start
      inside = None if start + threads <= D // 4 else quad < D // 4
      place = (token * heads + head) * D + quad * 4
      loaded.append((quad, inside, [x_behind[gated(place + i, inside)].load() for i in range(4)]))
    if norm is not None:
      squares = sum_in_order(number * number for _, _, numbers in loaded for number in numbers)
      sum_of_squares = block_sum(target, squares, thread, threads, 0, lambda warp_sums: total(warp_sums, UOp.add))
      factor = (sum_of_squares * (1.0 / D) + norm.eps).rsqrt()
    for quad, inside, numbers in loaded:
      if norm is not None: numbers = [number * factor * buffers["norm"][gated(quad * 4 + i, inside)].load() for i, number in enumerate(numbers)]
      place = quad_place(quad, token, T) + head * (pieces_of(D) * T * 16)
      stores += [buffers["out"][gated(place + i, inside)].store(pair) for i, pair in enumerate(quad_pairs(numbers))]
      if not low: continue
      errors = quad_pairs([rounding_error(number) for number in numbers])
      stores += [buffers["low"][gated(place + i, inside)].store(pair) for i, pair in enumerate(errors)]
    return stores
  there = {"norm": norm is not None, "low": low}
  name = "_".join(["columns", *map(str, x.shape), *(what for what, it in there.items() if it)])
  outs = {out: columns_like(x, heads, T, D) for out in ("out", "low")[:1 + low]}
  return [Columns(out) for out in launch(name, outs, {"x": x, **optional(norm=norm.weight if norm else None)}, body)]

# ---- weights ----

def weight_words(unit:Unit) -> list[UOp]:
  """The unit dequantized as float32 and rounded: of each four neighbouring weights the first and third in a word, the second and fourth in another"""
  weights = unit.weights()
  return [pair for i in range(0, UNIT, 4) for pair in quad_pairs(weights[i:i + 4])]
def error_words(unit:Unit) -> list[UOp]:
  """The rounding errors of weight_words"""
  errors = [rounding_error(weight) for weight in unit.weights()]
  return [pair for i in range(0, UNIT, 4) for pair in quad_pairs(errors[i:i + 4])]

def precise_words(weights:Weights) -> list[UOp]:
  """What precise products multiply: weight_words and error_words of all units"""
  return [word for of_chunk in weights for tiles in of_chunk for rows in tiles for unit in rows for word in (*weight_words(unit), *error_words(unit))]

def half_words(target:Target, unit:Unit) -> list[UOp]:
  """The unit dequantized, in the order of weight_words, by two instructions on two halves each"""
  if unit.floats is not None: return weight_words(unit)
  scales = [(same_halves(scale * SCALE_UP), word(0) if minimum is None else same_halves(minimum)) for scale, minimum in unit.scales]
  one, sixteenth = (halves(1.0), halves(-4 - unit.zero / 256)), (halves(1 / 16), halves(-1 / 4 - unit.zero / 256))
  def codes(quad:int, pair:int) -> tuple[UOp, tuple[UOp, UOp]]:
    """Two codes in the mantissa, and what makes values of them"""
    if unit.nibbles is None: return byte_perm(target, unit.words[quad], word(FOURS), (0x4240, 0x4341)[pair]), one
    both, mask, centre = unit.nibbles[quad // 2] >> (8 * pair), (0x000f000f, 0x00f000f0)[quad % 2], (one, sixteenth)[quad % 2]
    return and_or(target, both, mask, FOUR), centre
  def weights(quad:int, pair:int) -> UOp:
    mantissa, centre = codes(quad, pair)
    return fma_halves(target, fma_halves(target, mantissa, *centre), *scales[quad * len(scales) // QUADS])
  return [weights(quad, pair) for quad in range(QUADS) for pair in range(2)]

# ---- a block ----

LoadPairs = Callable[[UOp, UOp, UOp|None], list[UOp]]   # (token, piece, whether there is such a piece) -> the lane's four words of it
Weights = list[list[list[list[Unit]]]]                  # a lane's units by chunk, matrix, tile of rows, and which of its two rows
SumOf = Callable[[int, int, int, int], UOp]             # (matrix, tile of rows, tile of tokens, element) -> the lane's sum

@dataclass(frozen=True)
class Share:
  """How the warps of a block, or of several that share rows, share out rows of `units`: each takes so many neighbouring chunks"""
  units: int
  warps: int                   # of a block
  chunks: int
  blocks: int = 1
  first: UOp|int = 0           # chunk of the block
  @property
  def whole(self) -> bool:
    """Whether there are as many chunks as the warps take"""
    return self.blocks * self.warps * self.chunks * 4 == self.units

def loads_of(weights:Weights) -> list[UOp]: return global_loads([units for of_chunk in weights for tiles in of_chunk for units in tiles])
def chunks_of(width:int) -> int: return -(-width // CHUNK)
def warps_of(width:int, most:int=MOST_WARPS) -> int:
  """Of a block: no more than have the fewest chunks"""
  return -(-chunks_of(width) // -(-chunks_of(width) // most))
def is_short(width:int, tokens:int, *rows:int) -> bool:
  """Whether the blocks of a launch on matrices of so many rows are one for each multiprocessor, with as many warps as they may have: the launch takes
  as long as a block's way. So many threads have registers for the weights of a few chunks each"""
  blocks, warps = sum(-(-count // TILE_ROWS) for count in rows), warps_of(width, 2 * MOST_WARPS)
  return tokens <= TILE_TOKENS and blocks * warps <= MULTIPROCESSORS * 2 * MOST_WARPS and share_of(width, warps).chunks <= HELD_CHUNKS
def launch_warps(width:int, tokens:int, *rows:int) -> int:
  """Of the blocks of a launch on matrices of so many rows"""
  return warps_of(width, 2 * MOST_WARPS if is_short(width, tokens, *rows) else MOST_WARPS)
def share_of(width:int, warps:int, blocks:int=1) -> Share: return Share(width // UNIT, warps, -(-chunks_of(width) // (blocks * warps)), blocks)
def precise_blocks(width:int) -> int:
  """Blocks that share rows of a precise product, so that each warp has a chunk: it takes six times as long as another's"""
  return -(-chunks_of(width) // warps_of(width))

class StagedPlane(NamedTuple):
  """A plane of weights, some words of which are in shared memory: plane[index] is where a word is"""
  plane: UOp
  words: dict[UOp, UOp]
  def __getitem__(self, index:UOp) -> UOp:
    place = self.plane[index]
    return self.words.get(place, place)

class Quad(NamedTuple):
  """Four neighbouring rows' products with a token, of each matrix"""
  token: UOp
  row: UOp                     # the first
  inside: UOp                  # whether there is such a token, and its first row
  sums: list[list[UOp]]
  def products(self, factor:float) -> list[UOp]:
    """The first matrix's with tokens that have a factor"""
    return [value * factor for value in self.sums[0]] if factor != 1.0 else self.sums[0]

class BlockProduct:
  """A block's tile: some rows of matrices, from first_row on, times tokens. Its phases are methods; in the kernel:

  load:     weights = the lane's units of its rows
  products: for each chunk, and of it each two products, and each eight tokens:
              pairs = the lane's numbers of its token
              sums += weights · pairs                            # tensor cores
  quads:    for some tokens at a time: shared = sums; barrier; the sums over the warps, four rows a thread
  """
  def __init__(self, target:Target, share:Share, tokens:int, first_row:UOp, rows:int, row_tiles:int, slot:int=0, shared_bytes:int=SHARED_BYTES):
    """tokens: of the block. slot: the number of its shared memory and, but one, of its registers"""
    assert target.mma is not None
    self.target, self.mma, self.share, self.tokens, self.row_tiles = target, target.mma, share, tokens, row_tiles
    self.first_row, self.rows, self.slot, self.shared_bytes = first_row, rows, slot, shared_bytes
    self.n_threads = share.warps * target.lanes
    self.thread = UOp.special(self.n_threads, "lidx0")
    self.warp, self.lane = self.thread // target.lanes, self.thread % target.lanes
    self.lane_group, self.in_group = self.lane // 4, self.lane % 4
    self.token_tiles = -(-tokens // TILE_TOKENS)

  def unit(self, chunk:int) -> tuple[UOp, UOp|None]:
    """(the lane's unit of its warp's chunk, whether there is such a unit); None: always"""
    share = self.share
    unit = (share.first + self.warp * share.chunks + chunk) * 4 + self.in_group
    return unit, None if share.whole else unit < share.units

  def load(self, matrices:Sequence[Matrix]) -> Weights:
    def unit(matrix:Matrix, chunk:int, row:int) -> Unit:
      number, inside = self.unit(chunk)
      return matrix((self.first_row + row + self.lane_group).minimum(self.rows - 1), safe_index(number, inside), inside)
    return [[[[unit(matrix, chunk, tile * TILE_ROWS + half * 8) for half in range(2)] for tile in range(self.row_tiles)] for matrix in matrices]
            for chunk in range(self.share.chunks)]

  def pairs(self, load_pairs:LoadPairs, chunk:int) -> dict[tuple[int, int], list[UOp]]:
    """The lane's numbers of the tokens in its warp's chunk: {(two products, tile of tokens): words}"""
    unit, inside = self.unit(chunk)
    return {(i, tile): load_pairs(tile * TILE_TOKENS + self.lane_group, unit // 4 * 4 + i, inside)
            for i, tile in product(range(QUADS // 2), range(self.token_tiles))}

  def products(self, weights:Weights, loop:UOp|None, load_pairs:LoadPairs, low_pairs:LoadPairs|None=None) -> SumOf:
    """loop: what all this is inside of. low_pairs: the tokens' rounding errors; the weights' are multiplied then too."""
    kinds = 3 if low_pairs is not None and self.token_tiles == 1 else 1   # of products, with sums of their own: none waits for another's
    n_of_kind = len(weights[0]) * self.row_tiles * self.token_tiles * 4
    n_sums = kinds * n_of_kind
    sums = UOp.placeholder((n_sums + 1,), dtypes.float, slot=self.slot + 1, addrspace=AddrSpace.REG)
    def place(matrix:int, row_tile:int, token_tile:int, i:int, kind:int=0) -> UOp:
      return sums[kind % kinds * n_of_kind + ((matrix * self.row_tiles + row_tile) * self.token_tiles + token_tile) * 4 + i]
    if loop is not None: sums = sums.after(loop)
    sums = sums.after(UOp.group(*[sums[i].store(0.0) for i in range(n_sums)]))
    def accumulate(rows:list[list[UOp]], first:int, pairs:list[UOp], *at:int, kind:int=0) -> UOp:
      """The sums behind a product of words `first` and `first + 1` of the lane's two rows"""
      a_words = [row[first + pair] for pair in range(2) for row in rows]
      event = self.mma.accumulate(a_words, pairs, [place(*at, i, kind) for i in range(4)])
      return sums.after(sums[n_sums].store(event))
    for chunk, of_chunk in enumerate(weights):
      def words_of(unit:Unit) -> list[UOp]: return half_words(self.target, unit) if low_pairs is None else weight_words(unit)
      words = [[[words_of(unit) for unit in rows] for rows in tiles] for tiles in of_chunk]
      errors = [[[error_words(unit) for unit in rows] for rows in tiles] for tiles in of_chunk] if low_pairs is not None else words
      lows = {} if low_pairs is None else self.pairs(low_pairs, chunk)
      for (i, token_tile), pairs in self.pairs(load_pairs, chunk).items():
        for part, (matrix, row_tile) in product(range(2), product(range(len(words)), range(self.row_tiles))):
          own, first, at = slice(part * 2, part * 2 + 2), (i * 2 + part) * 2, (matrix, row_tile, token_tile)
          sums = accumulate(words[matrix][row_tile], first, pairs[own], *at)
          if low_pairs is not None:
            sums = accumulate(words[matrix][row_tile], first, lows[i, token_tile][own], *at, kind=1)
            sums = accumulate(errors[matrix][row_tile], first, pairs[own], *at, kind=2)
    return lambda *at: sum_in_order(place(*at, kind).load() for kind in reversed(range(kinds)))

  def quads(self, n_matrices:int, sum_of:SumOf) -> list[Quad]:
    n_tiles, quads_of_token = n_matrices * self.row_tiles, self.row_tiles * TILE_ROWS // 4
    at_once = min(max(self.shared_bytes // (4 * PITCH * TILE_TOKENS * n_tiles * self.share.warps), 1), self.token_tiles)   # tiles of tokens
    shared, found = local(self.share.warps * n_tiles * at_once * TILE_TOKENS * PITCH, dtypes.float, self.slot), []
    def place(warp:UOp|int, tile:UOp|int, token:UOp, row:UOp) -> UOp: return ((warp * n_tiles + tile) * (at_once * TILE_TOKENS) + token) * PITCH + row
    def turns(count:int) -> list[tuple[UOp, UOp|None]]:
      """The thread's of so many items, and whether there is such an item; None: always"""
      items = [(self.thread + start, start + self.n_threads <= count) for start in range(0, count, self.n_threads)]
      return [(item, None) if exists else (safe_index(item, item < count), item < count) for item, exists in items]
    for first in range(0, self.token_tiles, at_once):
      n_tokens, stores, sums, loads = min(self.tokens - first * TILE_TOKENS, at_once * TILE_TOKENS), [], [], []
      for tile, token_tile, i in product(range(n_tiles), range(min(at_once, self.token_tiles - first)), range(4)):
        row, token = self.mma.c(self.lane, i)
        value = sum_of(tile // self.row_tiles, tile % self.row_tiles, first + token_tile, i)
        stores.append(shared[place(self.warp, tile, token_tile * TILE_TOKENS + token, row)].store(value))
      summed = shared.after(UOp(Ops.BARRIER, src=tuple(stores)))
      if self.share.warps > 1:   # one number a thread: all warps share the work, and none holds what all of them have
        for item, exists in turns(n_tiles * n_tokens * TILE_ROWS):
          own = [place(warp, item // (n_tokens * TILE_ROWS), item // TILE_ROWS % n_tokens, item % TILE_ROWS) for warp in range(self.share.warps)]
          sums.append(summed[gated(own[0], exists)].store(sum_in_order(summed[index].load() for index in own)))
        summed = summed.after(UOp(Ops.BARRIER, src=tuple(sums)))
      for item, exists in turns(n_tokens * quads_of_token):
        token, row_tile, row = item // quads_of_token, item % quads_of_token // 4, item % 4 * 4
        values = [[summed[place(0, matrix * self.row_tiles + row_tile, token, row) + i].load() for i in range(4)] for matrix in range(n_matrices)]
        loads += [load for of_matrix in values for load in of_matrix]
        row = self.first_row + row_tile * TILE_ROWS + row
        found.append(Quad(first * TILE_TOKENS + token, row, row < self.rows if exists is None else exists & (row < self.rows), values))
      shared = shared.after(UOp(Ops.BARRIER, src=tuple(loads)))
    return found

  # ---- what is done with four sums ----

  def store(self, out:UOp, first:UOp, quad:Quad, values:list[UOp]) -> list[UOp]:
    """Four values at neighbouring places, as far as there are such rows"""
    return [out[(first + i).valid(self.writes(quad, i))].store(value) for i, value in enumerate(values)]
  def writes(self, quad:Quad, i:int) -> UOp:
    """Whether there is the quad's row i. Most matrices have whole quads: their stores are one."""
    return quad.inside & (quad.row + i < self.rows) if self.rows % 4 and i else quad.inside

class Staging:
  """A block's weights on their way through shared memory, 16 bytes of codes at a time: all of them are asked for at once, then the tokens, and no
  registers are taken meanwhile. Each lane has places of its own there, and waits for itself."""
  def __init__(self, block:BlockProduct, weights:Weights, load_pairs:LoadPairs, loop:UOp):
    """weights: as they lie in memory, in whole chunks. loop: what all this is inside of"""
    loads, self.copies = loads_of(weights), dict[UOp, UOp]()
    whole = [words for words in code_pieces(loads) if len(words) == 4]
    shared = local(len(whole) * block.n_threads * 4, dtypes.uint32, block.slot + 2)
    zeros = UOp.placeholder((1,), dtypes.uint32, slot=block.slot + 3, addrspace=AddrSpace.REG).after(loop)
    for i, words in enumerate(whole):
      to = (i * block.n_threads + block.thread) * 4
      zeros = zeros.after(zeros[0].store(copy(block.target, shared[to], words[0])))
      self.copies |= {place: to + word for word, place in words.items()}
    self.load_from, self.begun = load_pairs, opaque_zero("0", zeros[0].load().cast(dtypes.int))
    tokens = [word for chunk in range(block.share.chunks) for words in block.pairs(self.load_pairs, chunk).values() for word in words]
    others = [load for load in loads if load.src[0] not in self.copies]
    self.shared = shared.after(zeros[0].store(copied(block.target, *tokens, *others, loaded=True)))
  def load_pairs(self, token:UOp, piece:UOp, inside:UOp|None) -> list[UOp]:
    """The lane's words of tokens, behind the copies' begin"""
    return self.load_from(token, piece + self.begun, inside)
  def planes(self, planes:dict[str, UOp]) -> dict[str, StagedPlane]:
    return {name: StagedPlane(plane, {place: self.shared[to] for place, to in self.copies.items()}) for name, plane in planes.items()}

def store_columns(out:UOp, number:UOp, token:UOp, tokens:int, inside:UOp, values:list[UOp]) -> list[UOp]:
  """Four values as numbers number … of a token of Columns"""
  place = quad_place(number // 4, token, tokens)
  return [out[(place + i).valid(inside)].store(pair) for i, pair in enumerate(quad_pairs(values))]

def loader(buffer:UOp, block:BlockProduct, x:Columns, token_of:Callable[[UOp], UOp], head:UOp|int=0) -> LoadPairs:
  """What reads the words of x for a block. token_of(token) -> the token of x that the block's is"""
  _, pieces, tokens, _ = x.words.shape
  def load(token:UOp, piece:UOp, inside:UOp|None) -> list[UOp]:
    place = ((head * pieces + piece) * tokens + token_of(token)) * 16 + block.in_group * 4
    return [buffer[gated(place + i, inside)].load() for i in range(4)]
  return load

class MadeColumns:
  """Columns of Floats in shared memory, by a block: a warp, or several, a token"""
  def __init__(self, block:BlockProduct, x:Floats, token_of:Callable[[UOp], UOp], head:UOp|int, zero:UOp|int):
    """zero: of what all this is inside of"""
    self.block, self.x, self.token_of, self.first = block, x, token_of, head * x.pitch
    self.warps = max(block.share.warps // TILE_TOKENS, 1)   # of a token
    team, quads = self.warps * block.target.lanes, x.width // 4
    self.number, self.member, self.at_once = block.thread // team, block.thread % team, block.n_threads // team
    places = [self.member + start + zero for start in range(0, quads, team)]
    self.quads = [(quad, None if (turn + 1) * team <= quads else quad < quads) for turn, quad in enumerate(places)]

  def load(self, buffer:UOp, first:UOp|int) -> list[list[UOp]]:
    """The thread's numbers of a vector that begins there"""
    return [[buffer[gated(first + quad * 4 + i, inside)].load() for i in range(4)] for quad, inside in self.quads]

  def loader(self, x:UOp, norm:list[list[UOp]]) -> LoadPairs:
    """x: the buffer, behind the wait. norm: the thread's numbers of the norm's weight"""
    tokens, stores = self.block.tokens, []
    pitch = tokens | 1   # with an odd number of tokens a warp's lanes hit different banks
    made = local(pieces_of(self.x.width) * pitch * 16, dtypes.uint32, MADE + self.block.slot)
    for turn, first in enumerate(range(0, tokens, self.at_once)):
      token = self.number + first
      there = None if first + self.at_once <= tokens else token < tokens
      numbers = self.load(x, self.token_of(safe_index(token, there)) * self.x.x.shape[1] + self.first)
      if self.x.norm is not None:
        squares = self.total(sum_in_order(number * number for of_quad in numbers for number in of_quad), turn)
        factor = (squares * (1.0 / self.x.width) + self.x.norm.eps).rsqrt()
        numbers = [[number * factor * weight for number, weight in zip(*of_quad)] for of_quad in zip(numbers, norm)]
      for (quad, inside), of_quad in zip(self.quads, numbers):
        place = quad_place(quad, token, pitch)
        stores += [made[gated(place + i, there, inside)].store(pair) for i, pair in enumerate(quad_pairs(of_quad))]
    made = made.after(UOp(Ops.BARRIER, src=tuple(stores)))
    def load(token:UOp, piece:UOp, inside:UOp|None) -> list[UOp]:
      place = (piece * pitch + token.minimum(tokens - 1)) * 16 + self.block.in_group * 4
      return [made[gated(place + i, inside)].load() for i in range(4)]
    return load

  def total(self, value:UOp, turn:int) -> UOp:
    """The sum over a token's threads"""
    block = self.block
    if self.warps == 1: return group_sum(block.target, value, block.target.lanes)
    warps = BlockSum(block.target, value, block.thread, block.n_threads, MADE + block.slot + 1 + turn)
    shared = warps.shared.after(UOp(Ops.BARRIER, src=(warps.store,)))
    return sum_in_order(shared[self.number * self.warps + warp].load() for warp in range(self.warps))

# ---- a launch ----

MANY_TILES, TWO_TILES_TOKENS = 1024, 16   # from so many tiles of rows on, of two tiles of tokens, a block makes two: they share reads of the tokens
TOKENS_AT_ONCE = 32                       # of a block: a multiprocessor has the registers for two blocks, and keeps the tokens in its own cache

def row_tiles_of(rows:int, tokens:int) -> int:
  return 2 if -(-rows // TILE_ROWS) >= MANY_TILES and TILE_TOKENS < tokens <= TWO_TILES_TOKENS else 1
def two_at_once(target:Target, width:int, matrices:int, blocks:int) -> int:
  """The threads of two blocks, for a launch of so many on `matrices` wide matrices and a tile of tokens, whose weights would take a multiprocessor's
  registers for one block: see blocks_at_once. 0: as many as come, or one, where the weights are too many for half of the registers"""
  share = share_of(width, warps_of(width))
  return 2 * share.warps * target.lanes if blocks > MULTIPROCESSORS and HELD_CHUNKS < matrices * share.chunks <= 3 * HELD_CHUNKS else 0

Finish = Callable[[BlockProduct, Quad, dict[str, UOp]], list[UOp]]

@dataclass(frozen=True)
class Part:
  """Some blocks of a launch.
  rows: of each of its matrices, which are multiplied with the same tokens.
  finish(block, quad, buffers) -> stores: the epilogue. buffers: those of the launch, whose loads come behind the wait.
  precise: products as good as float32, by the rounding errors of tokens and weights. precise_blocks of the width share its rows, and each stores sums
  of its own: the quad's token is behind those of the blocks before."""
  rows: int
  matrices: Sequence[Matrix]
  finish: Finish
  precise: bool = False

def few_products(target:Target, width:int, x:Columns|Floats, buffers:dict[str, UOp], parts:Sequence[Part], head:UOp|int=0,
                 beside:ExtraStores|None=None, last:LastBlock|None=None) -> list[UOp]:
  """The stores of a launch over gidx0, each part in blocks of its own. buffers: x and, where a part is precise, low; of Floats also norm, if there is
  one. last: of the last part's blocks. In the kernel:

  weights = the lane's units of the block's rows                 # loads are issued; none waits for the tokens
  of precise products: their halves and rounding errors          # few blocks, which begin early
  wait until the kernels before are done
  of Floats: their columns, in shared memory; barrier            # MadeColumns
  the products, and the sums over the warps                      # BlockProduct
  finish: the epilogue stores
  """
  T, stores, start = x.tokens, [], 0
  groups = -(-T // TOKENS_AT_ONCE)
  tiles = [row_tiles_of(part.rows, T) for part in parts]
  # precise products are instructions: more warps would only share a multiprocessor's
  warps = warps_of(width) if any(part.precise for part in parts) else launch_warps(width, T, *(part.rows for part in parts))
  blocks = [precise_blocks(width) if part.precise else 1 for part in parts]   # that share rows
  counts = [-(-part.rows // (TILE_ROWS * tiles_of_part)) * of_rows for part, tiles_of_part, of_rows in zip(parts, tiles, blocks)]
  first = 0 if beside is None else beside.blocks
  index = UOp.special(first + sum(counts) * groups, "gidx0")
  if beside is not None:
    threads = warps * target.lanes
    stores.append(beside.in_own_blocks(target, len(parts), index, UOp.special(threads, "lidx0"), threads))
  own = (index - first).maximum(0) if first else index
  number, first_token = own % sum(counts), own // sum(counts) * TOKENS_AT_ONCE   # neighbouring blocks have the same tokens
  def token_of(token:UOp) -> UOp: return (first_token + token).minimum(T - 1)
  for i, (part, row_tiles, of_rows, count) in enumerate(zip(parts, tiles, blocks, counts)):
    there = (number >= start) & (number < start + count) & (index >= first)
    loop, zero = branch(i, there) if len(parts) > 1 or first else (None, 0)
    tile, among = (number - start + zero) // of_rows, (number - start + zero) % of_rows
    share = share_of(width, warps, of_rows)
    share = replace(share, first=among * (share.warps * share.chunks))
    block = BlockProduct(target, share, min(T, TOKENS_AT_ONCE), tile * (TILE_ROWS * row_tiles), part.rows, row_tiles, i * SLOTS,
                         SHARED_BYTES // len(parts))
    weights = block.load(part.matrices)
    if isinstance(x, Floats):
      made = MadeColumns(block, x, token_of, head, zero)
      norm = [] if x.norm is None else made.load(buffers["norm"], 0)
      behind = behind_wait(target, buffers, *loads_of(weights), *(weight for of_quad in norm for weight in of_quad))
      loaders = [made.loader(behind["x"], norm)]
    else:
      behind = behind_wait(target, buffers, *loads_of(weights), *(precise_words(weights) if part.precise else []))
      loaders = [loader(behind[name], block, x, token_of, head) for name in ("x", "low")[:1 + part.precise]]
    sum_of, finished = block.products(weights, loop, *loaders), []
    for quad in block.quads(len(part.matrices), sum_of):
      token = first_token + quad.token
      inside = quad.inside if T % TOKENS_AT_ONCE == 0 or groups == 1 else quad.inside & (token < T)
      finished += part.finish(block, quad._replace(token=token + among * T, inside=inside), behind)
    stores += finished if loop is None else [UOp.group(*finished).end(loop)]
    start += count
  if last is None: return stores
  assert groups == 1
  return [last.stores(target, len(parts) + 1, stores, counts[-1], number >= start - counts[-1], block.thread, block.n_threads)]

# ---- one matrix or several, or one a head ----

def rotated_quad(buffers:dict[str, UOp], rope:Rope, T:int, quad:Quad, values:list[UOp]) -> list[UOp]:
  """Four neighbouring numbers of a token's heads, those of the rotated part rotated by the token's position"""
  position = buffers["start"][quad.token.minimum(T - 1)].load().cast(dtypes.weakint)
  def pair_of(first:int) -> list[UOp]:
    number = (quad.row + first) % rope.head - rope.nope
    return rotated(buffers, rope.table.shape[1], number, values[first:first + 2], number >= 0, position)
  return pair_of(0) + pair_of(2)

def few_queries(target:Target, x:Columns|Floats, weight:Weight, rope:Rope, start:Tensor) -> tuple[Columns, Tensor]:
  """W·x for each token's x, of heads as rope has them, whose parts come apart: the first `nope` numbers of each head as Columns, and what is rotated,
  float32 (T, H·R). weight: (H·head, in). In the kernel: few_matmul's, but for where it stores"""
  (rows, width), T, turned = weight.shape, x.tokens, rope.head - rope.nope
  heads = rows // rope.head
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    def finish(block:BlockProduct, quad:Quad, behind:dict[str, UOp]) -> list[UOp]:
      values, head, number = rotated_quad(buffers, rope, T, quad, quad.products(x.factor)), quad.row // rope.head, quad.row % rope.head
      place = quad_place(number.minimum(rope.nope - 1) // 4, quad.token, T) + head * (pieces_of(rope.nope) * T * 16)
      first = (quad.token * heads + head) * turned + (number - rope.nope).maximum(0)
      return [*(buffers["nope"][(place + i).valid(quad.inside & (number < rope.nope))].store(pair) for i, pair in enumerate(quad_pairs(values))),
              *(buffers["turned"][(first + i).valid(quad.inside & (number >= rope.nope))].store(value) for i, value in enumerate(values))]
    return few_products(target, width, x, buffers, [Part(rows, [weight.matrix(buffers, "w")], finish)])
  tokens = x.inputs()
  outs = {"nope": columns_like(tokens["x"], heads, T, rope.nope), "turned": empty(tokens["x"], T, heads * turned)}
  ins = {**tokens, "rope": rope.table, "start": start, **weight.args("w")}
  resident = two_at_once(target, width, 1, rows // TILE_ROWS) if T <= TILE_TOKENS else 0
  nope, q_rope = launch("_".join(["few_queries", *["norm"] * ("norm" in tokens), weight.label, str(T)]), outs, ins, body, weight.nbytes, resident)
  return Columns(nope), q_rope

def few_matmul(target:Target, x:Columns|Floats, weights:Sequence[Weight], residual:Tensor|None=None, rope:Rope|None=None,
               start:Tensor|None=None) -> list[Tensor]:
  """W·x for each token's x and each matrix W, (out, in) -> float32 (T, out) each. rope rotates the heads of the first product, residual (T, out) is
  added to it; start: int32 (T,), the tokens' positions. In the kernel, of a matrix:

  sums = W·x of a tile of rows and all tokens                    # a block
  for each four neighbouring rows of a token:
    if rope: sums = pairs rotated by the token's position
    out = sums + residual
  """
  T, width = x.tokens, weights[0].shape[1]
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    def part(i:int, weight:Weight) -> Part:
      def finish(block:BlockProduct, quad:Quad, behind:dict[str, UOp]) -> list[UOp]:
        values = quad.products(x.factor)
        if i == 0 and rope is not None: values = rotated_quad(buffers, rope, T, quad, values)
        place = quad.token * weight.shape[0] + quad.row
        if i == 0 and residual is not None:
          values = [value + behind["residual"][(place + j).valid(block.writes(quad, j))].load() for j, value in enumerate(values)]
        return block.store(buffers[f"y{i}"], place, quad, values)
      return Part(weight.shape[0], [weight.matrix(buffers, f"w{i}")], finish)
    return few_products(target, width, x, buffers, [part(i, weight) for i, weight in enumerate(weights)])
  tokens = x.inputs()
  outs = {f"y{i}": empty(tokens["x"], T, weight.shape[0]) for i, weight in enumerate(weights)}
  ins = {**tokens, **optional(residual=residual, rope=rope.table if rope else None, start=start if rope else None)}
  for i, weight in enumerate(weights): ins |= weight.args(f"w{i}")
  there = {"norm": tokens.get("norm"), "residual": residual, "rope": rope}
  name = "_".join(["few_matmul", *(what for what, it in there.items() if it is not None), *(weight.label for weight in weights), str(T)])
  resident = two_at_once(target, width, 1, sum(weight.shape[0] for weight in weights) // TILE_ROWS) if T <= TILE_TOKENS else 0
  return launch(name, outs, ins, body, sum(weight.nbytes for weight in weights), resident)

def few_heads(target:Target, x:Columns, weight:Weight) -> Columns:
  """W·x for each head's x and matrix W, (H, out, in), as the H·out numbers of a token. They are scaled, as halves may be too small. In the kernel:

  sums = W·x of a tile of rows of a head, and all tokens         # a block
  out = sums · HALF_SCALE
  """
  (heads, rows, width), T = weight.shape, x.tokens
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    head, matrix = UOp.special(heads, "gidx1"), weight.matrix(buffers, "w")
    def finish(block:BlockProduct, quad:Quad, behind:dict[str, UOp]) -> list[UOp]:
      values = [value * (x.factor * HALF_SCALE) for value in quad.sums[0]]
      return store_columns(buffers["y"], head * rows + quad.row, quad.token, T, quad.inside, values)
    return few_products(target, width, x, buffers, [Part(rows, [lambda row, unit, gate: matrix(head * rows + row, unit, gate)], finish)], head)
  outs = {"y": columns_like(x.words, 1, T, heads * rows)}
  return Columns(launch(f"few_heads_{weight.label}_{T}", outs, {"x": x.words, **weight.args("w")}, body, weight.nbytes)[0], 1 / HALF_SCALE)

def few_gate_up(target:Target, x:Columns, gate:Weight, up:Weight, router:Weight|None=None, low:Columns|None=None,
                last:tuple[Routing, Tensor]|None=None) -> tuple[Columns, list[Tensor]]:
  """silu(gate·x) · (up·x) for each token's x; gate, up: (F, D). And router·(x + low), as good as float32; router: (E, D) -> [float32
  (precise_blocks, T, E), to be added up]. last: how experts are chosen, and the step's plan: the last of the router's blocks chooses -> [the choices'
  weights, float32 (T, count); their groups, as group_choices gives them]. In the kernel:

  gate, up = gate·x and up·x of a tile of rows and all tokens    # a block
  out = silu(gate) · up · HALF_SCALE
  """
  (F, width), T = gate.shape, x.tokens
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    def swiglu(block:BlockProduct, quad:Quad, behind:dict[str, UOp]) -> list[UOp]:
      values = [silu(gate) * up * HALF_SCALE for gate, up in zip(*quad.sums)]
      return store_columns(buffers["y"], quad.row, quad.token, T, quad.inside, values)
    parts = [Part(F, [gate.matrix(buffers, "gate"), up.matrix(buffers, "up")], swiglu)]
    if router is not None: parts.append(router_part(router, buffers))
    def choose(thread:UOp, threads:int, slot:int) -> list[UOp]:
      assert last is not None and router is not None
      return chosen_groups(target, last[0], (precise_blocks(width), T, router.shape[0]), buffers, thread, slot)
    chooses = None if last is None else LastBlock(buffers["plan"][prod(last[1].shape) - 1], choose)
    return few_products(target, width, x, buffers, parts, last=chooses)
  outs, ins = {"y": columns_like(x.words, 1, T, F)}, {"x": x.words, **gate.args("gate"), **up.args("up")}
  if router is not None and low is not None:
    outs |= {"logits": empty(x.words, precise_blocks(width), T, router.shape[0])}
    ins |= {"low": low.words, **router.args("router")}
    if last is not None:
      routing, plan = last
      outs |= {"weights": empty(x.words, T, routing.count), "groups": groups_like(x.words, T, routing.count, router.shape[0])}
      ins |= {"plan": plan, **optional(bias=routing.bias)}
  name = "_".join(["few_gate_up", gate.label, *([] if router is None else ["router", router.label]),
                   *([] if last is None else ["choose", str(last[0].count), last[0].label]), str(T)])
  nbytes = sum(weight.nbytes for weight in (gate, up, router) if weight is not None)
  resident, room = 0, 0
  if T <= TILE_TOKENS:
    resident = two_at_once(target, width, 2, F // TILE_ROWS)
    if router is not None: room = 512 * 80   # a block of attn_output's: 14 warps, four of them on some parts of a multiprocessor
  hidden, *made = launch(name, outs, ins, body, nbytes, resident, room=room)
  return Columns(hidden, 1 / HALF_SCALE), made if last is None else made[1:]

def last_block_chooses(target:Target, x:Columns, gate:Weight, router:Weight, routing:Routing) -> bool:
  """Whether few_gate_up's last block does"""
  threads = warps_of(gate.shape[1]) * target.lanes
  return groups_in_a_launch(target, routing, x.tokens, router.shape[0], threads)

def router_part(router:Weight, buffers:dict[str, UOp]) -> Part:
  """logits = router·(x + low)"""
  def finish(block:BlockProduct, quad:Quad, behind:dict[str, UOp]) -> list[UOp]:
    return block.store(buffers["logits"], quad.token * router.shape[0] + quad.row, quad, quad.sums[0])
  return Part(router.shape[0], [router.matrix(buffers, "router")], finish, precise=True)

def few_router(target:Target, x:Columns, low:Columns, router:Weight) -> Tensor:
  """router·(x + low) for each token's x, as good as float32. router: (E, D)
  -> float32 (precise_blocks, T, E), to be added up"""
  E, width = router.shape
  def body(buffers:dict[str, UOp]) -> list[UOp]: return few_products(target, width, x, buffers, [router_part(router, buffers)])
  ins = {"x": x.words, "low": low.words, **router.args("router")}
  return launch(f"few_router_{router.label}_{x.tokens}", {"logits": empty(x.words, precise_blocks(width), x.tokens, E)}, ins, body, router.nbytes)[0]

# ---- experts ----

STAGED_CHUNKS = 2  # of a warp, whose tokens its registers hold while the weights are on their way
EXPERT_TILES = 2   # of rows, that a block of one matrix makes: as many bytes as one of two matrices reads

class Shared(NamedTuple):
  """What every token takes: a matrix (out, in), whose planes are the buffers named shared, and the tokens, the buffer x_shared, of the choices'
  factor"""
  weight: Weight
  x: Columns

def expert_share(width:int, shared:Shared|None=None) -> Share:
  return share_of(width, max(warps_of(width), 0 if shared is None else warps_of(shared.weight.shape[1])))

def stages(target:Target, weights:Sequence[Weight], shared:Shared|None=None) -> bool:
  """Whether experts' weights come by way of shared memory (Staging). A multiprocessor then holds REGISTERS_80 threads, though they may spill"""
  share = expert_share(weights[0].shape[2], shared)
  return target.copy is not None and all(weight.integer for weight in weights) and share.whole and share.chunks <= STAGED_CHUNKS

def expert_products(target:Target, buffers:dict[str, UOp], weights:Sequence[Weight], x:Columns, T:int, K:int, finish:Finish,
                    shared:Shared|None=None) -> list[UOp]:
  """The stores of a launch on stacks of matrices, (E, out, in), and the tokens that chose each. x: of T tokens or T · K choices. buffers: x; groups,
  as group_choices gives them; the weights' planes, named weight0 and on. finish is given a choice, token · K + k, for the token; T · K + token for
  what the token has of the shared matrix, which stands beside one stack. In the kernel:

  expert, choices = the group's                                  # a block a tile of rows of a group's expert; some groups are empty
  weights = the lane's units of the block's rows                 # by way of shared memory (Staging)
  the products with the choices' x, and the sums over the warps  # BlockProduct
  finish: the epilogue stores
  the same of the shared matrix                                  # blocks of their own, the first ones, as they take longer: eight tokens each
  """
  E, rows, width = weights[0].shape
  groups, of_shared = most_groups(T, K, E), 0 if shared is None else -(-T // TILE_TOKENS)
  tiles, share = 1 if len(weights) > 1 else EXPERT_TILES, expert_share(width, shared)
  row_tile, number = (UOp.special(count, f"gidx{i}") for i, count in enumerate((-(-rows // (TILE_ROWS * tiles)), of_shared + groups)))
  behind, place, first_row = behind_wait(target, buffers), (number - of_shared).maximum(0) * (GROUP + 1), row_tile * (TILE_ROWS * tiles)
  named = behind["groups"][place].load()
  there = (named >= 0) & (named < E)
  loop, zero = branch(0, there if shared is None else there & (number >= of_shared))
  expert = expert_index(named, E)
  shared_bytes = SHARED_BYTES // (1 if shared is None else 2)
  block = BlockProduct(target, share, TILE_TOKENS, first_row, rows, tiles, 0, shared_bytes)
  def entry(token:UOp) -> UOp: return behind["groups"][place + 1 + token + zero].load()
  def choice(entry:UOp) -> UOp: return entry.maximum(0).minimum(T * K - 1).cast(dtypes.weakint)
  def load(planes:dict[str, Any]) -> Weights:
    return block.load([lambda row, unit, gate, matrix=weight.matrix(planes, f"weight{i}"): matrix(expert * rows + row + zero, unit, gate)
                       for i, weight in enumerate(weights)])
  own, load_pairs, stores = load(buffers), loader(behind["x"], block, x, lambda token: choice(entry(token)) // (T * K // x.tokens)), []
  if stages(target, weights, shared):
    staging = Staging(block, own, load_pairs, loop)
    own, load_pairs = load(staging.planes(buffers)), staging.load_pairs
  for quad in block.quads(len(weights), block.products(own, loop, load_pairs)):
    chosen = entry(quad.token)
    stores += finish(block, quad._replace(token=choice(chosen), inside=quad.inside & (chosen >= 0)), behind)
  ends = [UOp.group(*stores).end(loop)]
  if shared is None: return ends
  loop, zero = branch(1, number < of_shared)
  block = BlockProduct(target, share_of(shared.weight.shape[1], share.warps), TILE_TOKENS, first_row + zero, rows, tiles, SLOTS, shared_bytes)
  first, stores = number.minimum(of_shared - 1) * TILE_TOKENS, []
  sum_of = block.products(block.load([shared.weight.matrix(buffers, "shared")]), loop,
                          loader(behind["x_shared"], block, shared.x, lambda token: (first + token).minimum(T - 1)))
  for quad in block.quads(1, sum_of):
    token = first + quad.token
    stores += finish(block, quad._replace(token=T * K + token, inside=quad.inside & (token < T)), behind)
  return [*ends, UOp.group(*stores).end(loop)]

def few_expert_gate_up(target:Target, x:Columns, weights:tuple[Weight, Weight], groups:Tensor, scale:Tensor) -> Columns:
  """silu(gate·x) · (up·x) · scale for each token's x and chosen expert. weights: gate and up, (E, F, D); groups: what group_choices
  returns;
  scale: float32 (T, K) -> F numbers of each of the T·K choices"""
  (E, rows, width), (T, K) = weights[0].shape, scale.shape
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    def finish(block:BlockProduct, quad:Quad, behind:dict[str, UOp]) -> list[UOp]:
      factor = behind["scale"][quad.token].load() * HALF_SCALE
      values = [silu(gate) * up * factor for gate, up in zip(*quad.sums)]
      return store_columns(buffers["y"], quad.row, quad.token, T * K, quad.inside, values)
    return expert_products(target, buffers, weights, x, T, K, finish)
  ins = {"x": x.words, "groups": groups, "scale": scale, **weights[0].args("weight0"), **weights[1].args("weight1")}
  name, outs = f"few_expert_gate_up_{K}_{weights[0].label}_{T}", {"y": columns_like(x.words, 1, T * K, rows)}
  blocks = -(-rows // TILE_ROWS) * most_groups(T, K, E)
  resident = REGISTERS_80 if stages(target, weights) else two_at_once(target, width, 2, blocks)
  return Columns(launch(name, outs, ins, body, sum(weight.nbytes for weight in weights), resident)[0], 1 / HALF_SCALE)

def few_expert_down(target:Target, x:Columns, weight:Weight, groups:Tensor, K:int, shared:Shared|None=None) -> Tensor:
  """W[expert]·x for each choice's x, and behind them the shared matrix times each of its tokens. weight: (E, out, in); groups: what group_choices
  returns -> float32 (T·K, out), or (T·K + T, out)"""
  rows, T = weight.shape[1], x.tokens // K
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    def finish(block:BlockProduct, quad:Quad, behind:dict[str, UOp]) -> list[UOp]:
      return block.store(buffers["y"], quad.token * rows + quad.row, quad, [value * x.factor for value in quad.sums[0]])
    return expert_products(target, buffers, [weight], x, T, K, finish, shared)
  ins = {"x": x.words, "groups": groups, **weight.args("weight0")}
  if shared is not None: ins |= {"x_shared": shared.x.words, **shared.weight.args("shared")}
  name = "_".join([f"few_expert_down_{K}", weight.label, *([] if shared is None else ["shared", shared.weight.label]), str(T)])
  nbytes = weight.nbytes + (0 if shared is None else shared.weight.nbytes)
  outs = {"y": empty(x.words, x.tokens + (0 if shared is None else T), rows)}
  return launch(name, outs, ins, body, nbytes, REGISTERS_80 if stages(target, [weight], shared) else 0)[0]

def few_sum(target:Target, residual:Tensor, each:Tensor, K:int) -> Tensor:
  """residual + Σ_k each[token · K + k], and + each[T · K + token] where there are such rows. residual: float32 (T, D); each: float32
  (T·K, D) or (T·K + T, D) -> (T, D). In the kernel, a thread makes four numbers."""
  (T, D), threads = residual.shape, 4 * target.lanes
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    token, part, thread = UOp.special(T, "gidx0"), UOp.special(-(-D // (4 * threads)), "gidx1"), UOp.special(threads, "lidx0")
    behind, quad = behind_wait(target, buffers), part * threads + thread
    inside = None if D % (4 * threads) == 0 else quad < D // 4
    def load(name:str, row:UOp) -> list[UOp]: return [behind[name][gated(row * D + quad * 4 + i, inside)].load() for i in range(4)]
    rows = [token * K + k for k in range(K)] + [token + T * K] * (each.shape[0] > T * K)
    terms = [load("residual", token), *(load("each", row) for row in rows)]
    return [buffers["y"][gated(token * D + quad * 4 + i, inside)].store(sum_in_order(of_number)) for i, of_number in enumerate(zip(*terms))]
  return launch(f"few_sum_{T}_{D}_{K}_{each.shape[0]}", {"y": empty(residual, T, D)}, {"residual": residual, "each": each}, body)[0]

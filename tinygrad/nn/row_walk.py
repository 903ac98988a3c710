"""The walk along the rows of a tile (nn/tiles.py) on GPUs that copy to shared memory beside other work: weights never lie there.

Each warp has rows of its own and all of the tile's tokens. A product of the tensor core takes 16 rows, eight tokens and 16 inner numbers. Its sums do
not mind the order of the inner numbers, as long as both operands have the same: so the four lanes that share rows take a unit each as it lies in
memory, a chunk of 128 numbers together, and product q of a chunk takes of each unit the four numbers from 4q on. A weight becomes a half in the
register from which the tensor core takes it, once for all tokens of the tile. Nor do sums mind which rows are a product's: a lane has neighbours.

The tokens' chunk is copied to shared memory beside the products of the chunk before. A lane reads what two products take of a token at once.
"""
from __future__ import annotations
import math
from functools import reduce
from itertools import product
from typing import Callable, Sequence
from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.helpers import prod
from tinygrad.nn.halves import QUADS, neighbours
from tinygrad.nn.intrinsics import MMA_CUDA, Target, copied, copy
from tinygrad.nn.kernel import MULTIPROCESSORS, UNIT, Weight, local, words_of_unit
from tinygrad.nn.matrices import PIECE
from tinygrad.nn.tiles import BlockTile, LoadUnit, PlaceTokens, Product, Tile, prefetch
from tinygrad.uop.ops import Ops

CHUNK = 4 * UNIT                  # numbers of a row that its lanes have between them: a step
PIECES = CHUNK // PIECE           # of a token, of a chunk
WORDS = CHUNK // 2                # of a token, of a chunk, two halves each
WARPS = 4                         # of a block
MOST_TOKENS, MOST_TILES = 128, 2  # of a block; of 16 rows of a warp: a lane has 128 sums then
LANE_REGISTERS = 160              # of sums, and of the weights of a step and the next one
BESIDE = 32                       # a step on n tokens takes as long as the products on n + BESIDE
NORMAL = {-2: 1 / 16, -1: 4 / 16, 0: 6 / 16, 1: 4 / 16, 2: 1 / 16}   # what share of a normal distribution lies about how many deviations away

def takes(target:Target) -> bool: return target.mma is MMA_CUDA and target.copy is not None

def rows_of_warp(weights:Sequence[Weight]) -> int:
  """Of each matrix. Wide weights have few: half of a lane's registers is for theirs"""
  return 16 * max(min(MOST_TILES, int(LANE_REGISTERS / (2 * words_of_tile(weights)))) // len(weights), 1)

def words_of_tile(weights:Sequence[Weight]) -> float:
  """Registers of a lane for weights of 16 rows, two units of a step and of the next one"""
  return 4 * max(map(words_of_unit, weights))

def most_tokens(weights:Sequence[Weight]) -> int:
  """Of a tile, by the registers that weights leave to sums"""
  tiles = rows_of_warp(weights) * len(weights) // 16
  return max(min(MOST_TOKENS, int(LANE_REGISTERS / tiles - words_of_tile(weights)) * 2), 16)

def tile_of(tokens:int, weights:Sequence[Weight], parts:int) -> Tile:
  """What takes the least time, if the multiprocessors of a large GPU take turns"""
  (*stack, rows, _), own_rows = weights[0].shape, WARPS * rows_of_warp(weights)
  tiles = parts * prod(stack) * -(-rows // own_rows)
  def time(n:int) -> int: return -(-tiles * -(-tokens // n) // MULTIPROCESSORS) * (n + BESIDE)
  return Tile(min((n for n in (MOST_TOKENS, 64, 32, 16) if n <= most_tokens(weights)), key=time), own_rows, (1, WARPS))

def expert_tile_of(mean:float, weights:Sequence[Weight]) -> Tile:
  """mean: tokens that choose an expert. What takes the least time for all of them, if tokens choose at random: of a tile of n, n // 2 are multiplied
  at least, then as many eights as there are"""
  def time(n:int, count:int) -> int:
    whole, rest = divmod(-(-count // 8) * 8, n)
    return whole * (n + BESIDE) + (max(rest, n // 2) + BESIDE if rest else 0)
  def expected(n:int) -> float: return sum(share * time(n, max(math.ceil(mean + away * math.sqrt(mean)), 0)) for away, share in NORMAL.items())
  return Tile(min(range(8, max(most_tokens(weights), 8) + 1, 8), key=expected), WARPS * rows_of_warp(weights), (1, WARPS))

def products(target:Target, block:BlockTile, width:int, matrices:Sequence[LoadUnit], place_tokens:PlaceTokens) -> list[Product]:
  """See nn/matmul.py's tile_products. In the kernel:

  the tokens' chunk 0 begins its way to shared memory; registers = the lane's units of chunk 0
  for chunk in range(width / 128):
    wait for the tokens' chunk; barrier; the next one begins its way
    weights = halves of the registers
    registers = the lane's units of the next chunk
    for each two of the chunk's products, and each eight tokens:
      numbers = the lane's of a token, from shared memory
      sums += numbers · weights                              # tensor cores
  """
  walk = RowWalk(target, block, width, len(matrices), place_tokens)
  arrived = walk.wait(walk.copy_tokens(walk.tokens, UOp.const(0)))
  copies = walk.copy_tokens(walk.tokens.after(arrived), walk.step + 1)
  words, load_next = walk.weights(matrices)
  done = walk.multiply(walk.tokens.after(arrived, copies), words, copies)
  return walk.products(walk.sums.after(UOp.group(done, *load_next(arrived)).end(walk.step)))

def unfolded(count:UOp|int) -> UOp:
  """The range's end of a loop of at most one turn: tinygrad would fold it, and take what it computes to be known behind it too"""
  one = count.cast(dtypes.int) if isinstance(count, UOp) else UOp.const(count, dtypes.int)
  return UOp(Ops.CUSTOM, dtypes.int, src=(one,), arg="{0}").cast(dtypes.weakint)

class RowWalk:
  """A block's walk along the rows of its tile"""
  def __init__(self, target:Target, block:BlockTile, width:int, n_matrices:int, place_tokens:PlaceTokens):
    assert target.mma is not None
    self.target, self.block, self.mma, self.width, self.place_tokens = target, block, target.mma, width, place_tokens
    self.n_threads = block.tile.warps[1] * target.lanes
    self.thread = UOp.special(self.n_threads, "lidx0")
    self.warp, self.lane = self.thread // target.lanes, self.thread % target.lanes
    self.rows = block.tile.rows // block.tile.warps[1]   # of a warp, of each matrix
    self.down, self.across = block.tile.tokens // self.mma.N, self.rows // self.mma.M
    self.units, self.n_matrices = width // UNIT, n_matrices
    self.n_steps = -(-width // CHUNK)
    steps = (block.first_token < block.tokens).where(UOp.const(self.n_steps), 0) if isinstance(block.tokens, UOp) else self.n_steps
    self.step = UOp.range(unfolded(steps) if self.n_steps == 1 else steps, 0)
    self.tokens = local(2 * block.tile.tokens * WORDS, dtypes.uint32, 0)
    self.n_sums = n_matrices * self.across * self.down * self.mma.counts[2]
    sums = self.registers(0, dtypes.float, self.n_sums + 1)   # one takes the zeros that are stored behind statements
    self.sums = sums.after(UOp.group(*[sums[i].store(0.0) for i in range(self.n_sums)]))

  def registers(self, slot:int, dtype:DType, count:int) -> UOp: return UOp.placeholder((count,), dtype, slot=slot, addrspace=AddrSpace.REG)

  def place(self, step:UOp, token:UOp, piece:UOp|int) -> UOp:
    """Of a token's piece in shared memory. The eight lanes that read at once, of two tokens and four units, hit different banks"""
    in_unit = PIECES // 4
    turned = (piece % in_unit + piece // (2 * in_unit) + token % 2 * 2) % in_unit
    return ((step % 2 * self.block.tile.tokens + token) * PIECES + piece // in_unit * in_unit + turned) * (PIECE // 2)

  def copy(self, to:UOp, source:UOp, inside:UOp|None) -> UOp: return copy(self.target, to, source, inside)

  def copy_tokens(self, shared:UOp, step:UOp) -> UOp:
    """The store behind the beginning of the copies of a chunk, if there is one. Where there is no such token, whatever lies in shared memory is
    multiplied, to sums that nobody stores"""
    zeros = self.registers(50 if step.op is Ops.CONST else 51, dtypes.uint32, 1)
    for start in range(0, self.block.tile.tokens * PIECES, self.n_threads):
      piece = self.thread + start
      token, number = piece // PIECES, piece % PIECES
      column, own = step * CHUNK + number * PIECE, self.block.first_token + token
      exists = [*([] if step.op is Ops.CONST else [step < self.n_steps]), *([] if self.block.whole else [own < self.block.tokens])]
      inside = reduce(UOp.bitwise_and, exists) if exists else None
      if self.width % CHUNK: column = column.minimum(self.width - PIECE)
      source = self.place_tokens(self.block.clamped_token(own), column)
      begun = zeros[0].store(self.copy(shared[self.place(step, token, number)], source, inside))
      zeros = zeros.after(begun)
    return begun

  def wait(self, *before:UOp) -> UOp:
    """The barrier behind which all have the step's tokens, and none reads those of the step before"""
    zeros = self.registers(52, dtypes.uint32, 1).after(self.step, *before)
    return UOp(Ops.BARRIER, src=(zeros[0].store(copied(self.target, self.step.cast(dtypes.int))),))

  def row(self, across:int, i:int) -> UOp:
    """Of the lane's two of 16 rows"""
    return self.block.first_row + self.warp * self.rows + self.lane // 4 * (2 * self.across) + (across * 2 + i)

  def weights(self, matrices:Sequence[LoadUnit]) -> tuple[list[UOp], Callable[[UOp], list[UOp]]]:
    """(by matrix, 16 rows, product of the chunk, the words that it takes of the lane; see prefetch)"""
    unit, words = self.step * 4 + self.lane % 4, []
    whole, inside = self.units % 4 == 0, unit < self.units
    for load_unit, across in product(matrices, range(self.across)):
      pairs = []
      for i in range(2):
        own = load_unit(self.block.clamped_row(self.row(across, i)), unit if whole else unit.minimum(self.units - 1))
        pairs.append(neighbours(self.target, own if whole else own.where(inside)))
      words += [pairs[i][quad][pair] for quad in range(QUADS) for pair in range(2) for i in range(2)]
    return prefetch(words, self.step, self.n_steps - 1)

  def multiply(self, tokens:UOp, words:list[UOp], done:UOp) -> UOp:
    """The store behind the products of a step"""
    sums, tiles, count, counted = self.sums.after(self.step), self.n_matrices * self.across, self.mma.counts[2], isinstance(self.block.tokens, UOp)
    for piece, down in product(range(PIECES // 4), range(self.down)):
      # of tokens that the GPU counts the second half is multiplied as far as there are some
      inside = self.block.first_token + down * self.mma.N < self.block.tokens if counted and down * 2 >= self.down else None
      place = self.place(self.step, down * self.mma.N + self.lane // 4, self.lane % 4 * (PIECES // 4) + piece)
      numbers = [tokens.after(done)[place + i].load() for i in range(4)]
      for quad, tile in product(range(2), range(tiles)):
        behind, first = sums.after(done), (tile * self.down + down) * count
        of_product = words[(tile * QUADS + piece * 2 + quad) * 4:][:4]
        event = self.mma.accumulate(of_product, numbers[quad * 2:quad * 2 + 2], [behind[first + i] for i in range(count)], inside)
        done = behind[self.n_sums].store(event)
    return done

  def products(self, sums:UOp) -> list[Product]:
    """The elements of the output that a lane holds; neighbours in the list are neighbouring rows of a token"""
    found, count = [], self.mma.counts[2]
    for down, column, across, i in product(range(self.down), range(2), range(self.across), range(2)):
      token = self.block.first_token + (down * self.mma.N + self.lane % 4 * 2 + column)
      own = [sums[((matrix * self.across + across) * self.down + down) * count + i * 2 + column].load() for matrix in range(self.n_matrices)]
      found.append(Product(token, self.row(across, i), own))
    return found

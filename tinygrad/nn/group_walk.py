"""The walk along the rows of a tile (nn/tiles.py) on GPUs whose warps multiply in groups of four (wgmma): Hopper.

It is nn/row_walk.py's, but that a group's tensor cores read the tokens in shared memory by themselves, once for 64 rows where a warp's would for 16.
They take 16 numbers of a token as they lie side by side. A product's are of four units, four numbers of each, for that is how a warp's lanes have the
weights. So the tokens lie in this order in device memory already: who makes them writes them so (`place`), 128 numbers of a row at a time.

While a product runs, a warp makes halves of the weights of the next one.
"""
from __future__ import annotations
import math
from typing import Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.helpers import prod
from tinygrad.nn import row_walk
from tinygrad.nn.halves import QUADS
from tinygrad.nn.intrinsics import Target, copied, copy, group_multiplied, group_multiply, seen_by_groups
from tinygrad.nn.kernel import MULTIPROCESSORS, UNIT, Weight
from tinygrad.nn.row_walk import BESIDE, CHUNK, NORMAL, PIECE, PIECES, WORDS, words_of_tile
from tinygrad.nn.tiles import BlockTile, LoadUnit, PlaceTokens, Product, Tile
from tinygrad.uop.ops import Ops

GROUP = 4                         # warps
PANEL = PIECES // 2               # pieces of a token that lie side by side in shared memory: 128 bytes
MOST_TOKENS = 144                 # of a block
LANE_REGISTERS = 180              # of sums, and of the weights of a step and the next one
SHAPES = (2, 2), (2, 1), (1, 2), (1, 1)   # groups of a block; products of 16 rows of a warp, of all matrices

def takes(target:Target, width:int) -> bool:
  """Whether tokens of so many numbers go this way, and lie in its order"""
  return target.warp_groups and width % CHUNK == 0

def place(number:UOp) -> UOp:
  """Where a number of a row is among the row's: of the four units of a chunk four numbers each, the first two of each before the others"""
  return number // CHUNK * CHUNK + number % UNIT // 4 * 16 + number % 4 // 2 * 8 + number % CHUNK // UNIT * 2 + number % 2

def ordered(x:Tensor) -> Tensor:
  """Rows of numbers, in the order"""
  return x.reshape(-1, 4, UNIT // 4, 2, 2).permute(0, 2, 3, 1, 4).reshape(x.shape)

# ---- the tile of a block ----

def most_tokens(tiles:int, weights:Sequence[Weight]) -> int:
  """Of a block whose warps have so many tiles of 16 rows, by the registers that weights leave to sums"""
  return min(MOST_TOKENS, int(LANE_REGISTERS / tiles - words_of_tile(weights)) * 2)

def shapes(weights:Sequence[Weight]) -> list[tuple[int, int, int]]:
  """(groups; products of 16 rows of a warp; most tokens) of the blocks that there may be"""
  found = [(groups, tiles, most_tokens(tiles, weights)) for groups, tiles in SHAPES if tiles >= len(weights)]
  return [shape for shape in found if shape[2] >= 2 * PIECES] or [(1, len(weights), 2 * PIECES)]

def tile(n:int, groups:int, tiles:int, weights:Sequence[Weight]) -> Tile:
  return Tile(n, groups * GROUP * 16 * tiles // len(weights), (1, groups * GROUP))

def tile_of(tokens:int, weights:Sequence[Weight], parts:int) -> Tile:
  """What takes the least time, if the multiprocessors of a large GPU take turns"""
  *stack, rows, _ = weights[0].shape
  def time(n:int, groups:int, tiles:int) -> int:
    blocks = parts * prod(stack) * -(-rows // tile(n, groups, tiles, weights).rows) * -(-tokens // n)
    return -(-blocks // MULTIPROCESSORS) * groups * tiles * (n + BESIDE)
  sizes = [(n, groups, tiles) for groups, tiles, most in shapes(weights) for n in range(most // 16 * 16, 0, -16)]
  return tile(*min(sizes, key=lambda size: time(*size)), weights)

def expert_tile_of(mean:float, weights:Sequence[Weight]) -> Tile:
  """mean: tokens that choose an expert. What takes the least time for all of them, if tokens choose at random"""
  groups, tiles, most = shapes(weights)[0]
  def expected(n:int) -> float:
    return sum(share * -(-max(math.ceil(mean + away * math.sqrt(mean)), 0) // n) * (n + BESIDE) for away, share in NORMAL.items())
  return tile(min(range(16, most + 1, 16), key=expected), groups, tiles, weights)

# ---- the walk ----

def products(target:Target, block:BlockTile, width:int, matrices:Sequence[LoadUnit], place_tokens:PlaceTokens) -> list[Product]:
  """See nn/matmul.py's tile_products. In the kernel:

  the tokens' chunk 0 begins its way to shared memory; registers = the lane's units of chunk 0
  for chunk in range(width / 128):
    wait for the tokens' chunk; barrier
    weights = halves of the registers
    registers = the lane's units of the next chunk
    for each of the chunk's eight products:
      sums += numbers · weights begins                       # tensor cores, of a group
      behind the first one: the tokens' next chunk begins its way
      wait for the product
  """
  walk = GroupWalk(target, block, width, len(matrices), place_tokens)
  arrived = walk.wait(walk.copy_tokens(walk.tokens, UOp.const(0)))
  words, load_next = walk.weights(matrices)
  done = walk.multiply_groups(walk.tokens.after(arrived), words, arrived)
  return walk.products(walk.sums.after(UOp.group(done, *load_next(arrived)).end(walk.step)))

class GroupWalk(row_walk.RowWalk):
  def place(self, step:UOp, token:UOp, piece:UOp|int) -> UOp:
    """A token's pieces of half a chunk lie side by side, in turns by the token's number: what groups call a swizzle of 128 bytes"""
    size = self.block.tile.tokens
    return ((step % 2 * 2 + piece // PANEL) * size + token) * (PANEL * PIECE // 2) + ((piece % PANEL) ^ (token % PANEL)) * (PIECE // 2)
  def copy(self, to:UOp, source:UOp, inside:UOp|None) -> UOp: return copy(self.target, to, source, exists=inside)   # no branch between products
  def wait(self, *before:UOp) -> UOp:
    zeros = self.registers(52, dtypes.uint32, 1).after(self.step, *before)
    zeros = zeros.after(zeros[0].store(copied(self.target, self.step.cast(dtypes.int))))
    return UOp(Ops.BARRIER, src=(zeros[0].store(seen_by_groups(self.target, zeros[0].load())),))

  def multiply_groups(self, tokens:UOp, words:list[UOp], done:UOp) -> UOp:
    """The store behind the products of a step"""
    sums, tiles, count = self.sums.after(self.step), self.n_matrices * self.across, self.down * self.mma.counts[2]
    stage = self.step % 2 * (self.block.tile.tokens * WORDS)
    for quad in range(QUADS):
      behind, half, number = sums.after(done), quad // (QUADS // 2), quad % (QUADS // 2)
      first = tokens.after(done)[stage + half * (self.block.tile.tokens * WORDS // 2) + number * 8]
      of_tiles = [(words[(tile * QUADS + quad) * 4:][:4], [behind[tile * count + i] for i in range(count)]) for tile in range(tiles)]
      done = behind[self.n_sums].store(group_multiply(self.target, first, of_tiles))
      if quad == 0: done = self.copy_tokens(tokens.after(done), self.step + 1)
      behind = sums.after(done)
      done = behind[self.n_sums].store(group_multiplied(self.target, behind[self.n_sums].load()))
    return done

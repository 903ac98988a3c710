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
from tinygrad.nn import row_walk, warp_groups
from tinygrad.nn.halves import QUADS
from tinygrad.nn.intrinsics import Target, copy
from tinygrad.nn.kernel import MULTIPROCESSORS, REGISTER_BYTES, UNIT, Weight
from tinygrad.nn.matrices import PIECE
from tinygrad.nn.row_walk import BESIDE, CHUNK, NORMAL, WORDS, words_of_tile
from tinygrad.nn.tiles import BlockTile, LoadUnit, PlaceTokens, Product, Tile
from tinygrad.nn.warp_groups import GroupMatrix, GroupProduct, finished, seen, started

MOST_TOKENS, LEAST_TOKENS = 144, 32   # of a block; where its weights leave room for fewer, it is another one
LANE_REGISTERS = 184              # of sums, and of the weights of a step and the next one
OTHER_REGISTERS = 40              # of a lane, for all else
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
  return [shape for shape in found if shape[2] >= LEAST_TOKENS] or [(1, len(weights), LEAST_TOKENS)]

def tile(n:int, groups:int, tiles:int, weights:Sequence[Weight]) -> Tile:
  return Tile(n, groups * warp_groups.ROWS * tiles // len(weights), (1, groups * warp_groups.WARPS))

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

def resident(tile:Tile, weights:Sequence[Weight]) -> int:
  """Threads of a multiprocessor whose numbers have room in its registers, where they are those of several blocks; else 0. See launch"""
  tiles, threads = tile.rows * len(weights) // (16 * tile.warps[1]), tile.warps[1] * 32
  blocks = REGISTER_BYTES // (4 * threads * int(tiles * (tile.tokens / 2 + words_of_tile(weights)) + OTHER_REGISTERS))
  return blocks * threads if blocks > 1 else 0

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
    return step % 2 * (self.block.tile.tokens * WORDS) + warp_groups.place(self.block.tile.tokens, token, piece * PIECE) // 2
  def copy(self, to:UOp, source:UOp, inside:UOp|None) -> UOp: return copy(self.target, to, source, exists=inside)   # no branch between products
  def wait(self, *before:UOp) -> UOp: return seen(self.target, super().wait(*before), self.registers(53, dtypes.uint32, 1))

  def multiply_groups(self, tokens:UOp, words:list[UOp], done:UOp) -> UOp:
    """The store behind the products of a step"""
    sums, tiles, count = self.sums.after(self.step), self.n_matrices * self.across, self.down * self.mma.counts[2]
    for quad in range(QUADS):
      behind, own = sums.after(done), warp_groups.begin(self.block.tile.tokens, 0, quad * 16) // 2
      first = tokens.after(done)[self.step % 2 * (self.block.tile.tokens * WORDS) + own]
      products = [GroupProduct(words[(tile * QUADS + quad) * 4:][:4], GroupMatrix(first), [behind[tile * count + i] for i in range(count)])
                  for tile in range(tiles)]
      done = started(self.target, products, sums, done)
      if quad == 0: done = self.copy_tokens(tokens.after(done), self.step + 1)
      done = finished(self.target, sums, done)
    return done

"""Absorbed attention of many tokens over the latent cache, by tensor cores, where a block's shared memory holds its queries and the cache's rows.

A block takes 16 tokens of up to five heads, and goes along the cache in steps of 32 positions: all its rows (a token of a head) read the same copy of
them. Each of its eight warps multiplies a quarter of the numbers of a row with the keys of half of the positions; eight lanes add up a row's four
partial scores and make its weights; each warp then makes the weighted sums of an eighth of the latent numbers. The next step's rows are copied beside
all that. Per row and 32 positions nn/mla_prefill.py reads 36 KB for 16 rows, this one for 16 times its heads.

The sums of 80 rows are 160 registers of a lane, the queries, two steps' rows and the scores 221 KB: one block a multiprocessor. With less shared
memory a block has fewer heads, and where it does not hold one there is nn/mla_prefill.py.
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import NamedTuple
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.nn.intrinsics import MMA_CUDA, Target, copied, copy, group_reduce
from tinygrad.nn.kernel import LOG2_E, MULTIPROCESSORS, gated, local, total
from tinygrad.nn.latent_cache import MASKED_SCORE, PageAhead, RowFormat
from tinygrad.nn.matrices import PIECE, pitch
from tinygrad.nn.mla_prefill import PrefillLaunch, block_of_tokens, prefill_launch
from tinygrad.nn.online_softmax import LANE_POSITIONS, RowSoftmax, SoftmaxThread
from tinygrad.nn.step import STRIP, Step
from tinygrad.uop.ops import Ops

TILE_TOKENS, STEP_POSITIONS, WARPS = 16, 32, 8   # of a block
MOST_HEADS = 5                                   # of a block, by its registers
SHARES = 4                                       # of a row's numbers: warps that have the same positions
KEY_TILES = STEP_POSITIONS // 16 * SHARES // WARPS   # of 16 positions, of a warp
ROW_LANES = 8                                    # that share a row in the softmax
SCORES_PITCH = WEIGHTS_PITCH = pitch(STEP_POSITIONS)   # of a row in shared memory
assert TILE_TOKENS == STRIP and KEY_TILES == 1 and STEP_POSITIONS == LANE_POSITIONS * ROW_LANES

@dataclass(frozen=True)
class HeadsLaunch(PrefillLaunch):
  """… and that of mla_prefill_heads besides"""
  own_heads: int  # of a block

def heads_of_block(target:Target, dim:int, tokens:int, heads:int) -> int|None:
  """What takes the least time, if a block takes one for each head and one besides, and the blocks of a large GPU, one a multiprocessor, take turns.
  None: shared memory does not hold one"""
  def time(n:int) -> int: return -(-(-(-tokens // TILE_TOKENS) * (heads // n)) // MULTIPROCESSORS) * (n + 1)
  return min((n for n in range(MOST_HEADS, 0, -1) if heads % n == 0 and shared_bytes(dim, n) <= target.most_shared_bytes), key=time, default=None)

def shared_bytes(dim:int, heads:int) -> int:
  """Of a block of so many heads: queries, two steps' rows, weights, halves; partial scores, what sums are multiplied with, float32"""
  rows = TILE_TOKENS * heads
  return 2 * (pitch(dim) * (rows + 2 * STEP_POSITIONS) + rows * WEIGHTS_PITCH) + 4 * rows * (SHARES * SCORES_PITCH + 2)

def takes(target:Target, row:RowFormat, tokens:int, heads:int) -> bool:
  """Whether the warps share a row's numbers in whole products, and shared memory suffices"""
  whole = row.latent % (16 * WARPS) == 0 and row.dim % (16 * SHARES) == 0
  return target.mma is MMA_CUDA and target.copy is not None and whole and heads_of_block(target, row.dim, tokens, heads) is not None

def mla_prefill_heads(target:Target, q_latent:Tensor, q:Tensor, cache:Tensor, step:Step, scale:float) -> Tensor:
  """As mla_prefill"""
  own_heads = heads_of_block(target, cache.shape[1], *q_latent.shape[:2])
  assert own_heads is not None
  shape = HeadsLaunch.of(target, q_latent, q, cache, step, scale, own_heads)
  def body(buffers:dict[str, UOp]) -> list[UOp]: return heads_kernel(shape, buffers)
  return prefill_launch("mla_prefill_heads", shape, q_latent, q, cache, step, body)

def heads_kernel(shape:HeadsLaunch, buffers:dict[str, UOp]) -> list[UOp]:
  """A block's stores.
    queries -> shared memory; the first 32 rows of the cache begin their way there
    row_max, weight_sum, sums = MASKED_SCORE, 0, 0
    for each 32 positions up to the block's last token:
      wait for their rows; barrier; the next 32 rows begin their way
      partial scores = queries · keys, of a warp's numbers and positions -> shared memory; barrier
      scores = scale · log2(e) · Σ of the four; MASKED_SCORE behind a token's own position
      rescale, row_max = 2^(row_max - max(row_max, scores)), max(row_max, scores)
      weights = 2^(scores - row_max); weight_sum = weight_sum · rescale + Σ weights
      weights, rescale -> shared memory; barrier
      sums = sums · rescale + weights · values, of the warp's latent numbers
    context = sums / weight_sum"""
  thread = HeadsThread(shape, buffers)
  queries, first = thread.share_queries(), thread.copy_rows(thread.rows, UOp.const(0), thread.first_page)
  state, sums = thread.initial_state(), thread.initial_sums()
  step = UOp.range(thread.last_position() // STEP_POSITIONS + 1, 0)
  arrived = thread.wait(step, queries, first)
  page = thread.ahead.read(step)
  copies = thread.copy_rows(thread.rows.after(arrived), step + 1, page)
  rows = thread.rows.after(arrived, copies)
  partial_scores, multiplied = thread.partial_scores(thread.queries.after(arrived, copies), rows, step)
  following = thread.page_of(step + 2)
  scores = thread.share_scores(partial_scores, multiplied, following)
  softmax = [thread.softmax(state.after(step), turn, scores, step) for turn in range(thread.turns)]
  shared = thread.share_weights(softmax)
  updated = thread.update_sums(sums.after(step), *shared, rows.after(shared.barrier), step)
  done = UOp.group(updated, thread.ahead.update(step, page, following), *(store for row in softmax for store in row.stores)).end(step)
  return thread.store_context(sums.after(done), state.after(done))

class SharedWeights(NamedTuple):
  """A step's weights (rows, pitch) and rescales (rows) in shared memory behind a barrier"""
  weights: UOp
  rescales: UOp
  barrier: UOp

class HeadsThread(SoftmaxThread):
  """A thread of mla_prefill_heads. Row 16 · head + token is a token of one of the block's heads; a tile is the rows of a head, as a product takes
  them."""
  def __init__(self, shape:HeadsLaunch, buffers:dict[str, UOp]):
    self.n_rows = shape.own_heads * TILE_TOKENS
    super().__init__(shape.target, WARPS * 32, self.n_rows, ROW_LANES)
    self.shape, self.buffers = shape, buffers
    self.tiles, self.pitch, self.dim = shape.own_heads, pitch(shape.dim), shape.dim
    self.pairs = shape.latent // WARPS // 16                    # of products on 8 latent numbers, of a warp
    self.first_head, self.block = UOp.special(shape.heads // self.tiles, "gidx0") * self.tiles, block_of_tokens(shape.tokens, TILE_TOKENS)
    self.share, self.key_tile = self.warp // (WARPS // SHARES), self.warp % (WARPS // SHARES)
    self.first_latent = self.warp * (shape.latent // WARPS)
    self.first_position = shape.first_position(buffers, self.block)
    self.queries = local(self.n_rows * self.pitch, dtypes.half, 0)
    self.rows = local(2 * STEP_POSITIONS * self.pitch, dtypes.half, 1)
    self.first_page = self.page_of(UOp.const(0))
    self.ahead = PageAhead(self.page_of(UOp.const(1)), slot=0)

  # ---- where things are ----

  def token(self, row:UOp) -> UOp:
    """Of a row; the last token, where there is none"""
    return (self.block * TILE_TOKENS + row % TILE_TOKENS).minimum(self.shape.tokens - 1)

  def last_position(self) -> UOp:
    """Of the block's tokens"""
    return self.first_position + self.shape.from_first(self.block, TILE_TOKENS - 1)

  def page_of(self, step:UOp) -> UOp: return self.shape.page(self.buffers, self.block, step * STEP_POSITIONS)

  def softmax_row(self, turn:int) -> UOp:
    """The row whose softmax the lane shares; the last ones, where there is none: several warps make them then, all the same"""
    per_warp = 32 // ROW_LANES
    return (turn * WARPS + self.warp).minimum(self.n_rows // per_warp - 1) * per_warp + self.lane // ROW_LANES

  # ---- before the loop ----

  def share_queries(self) -> UOp:
    """The stores of the rows' queries [q_latent | rotated part] in shared memory, halves. A thread has eight neighbours at once."""
    shape, stores = self.shape, []
    for name, first, width in (("q_latent", 0, shape.latent), ("q", shape.latent, shape.dim - shape.latent)):
      pieces = self.n_rows * width // PIECE
      for start in range(0, pieces, WARPS * 32):
        piece = (self.thread + start).minimum(pieces - 1)
        row, number = piece // (width // PIECE), piece % (width // PIECE) * PIECE
        head = self.token(row) * shape.heads + self.first_head + row // TILE_TOKENS
        source = head * shape.latent + number if name == "q_latent" else (head + 1) * shape.head_dim - width + number
        values = [self.buffers[name][source + i].load().cast(dtypes.half) for i in range(PIECE)]
        stores += [self.queries[row * self.pitch + first + number + i].store(value) for i, value in enumerate(values)]
    return UOp.group(*stores)

  def copy_rows(self, rows:UOp, step:UOp, page:UOp) -> UOp:
    """The store behind the beginning of the copies of a step's rows of the cache, which are neighbours. Rows behind the last token's are some of its
    page, or page 0's: finite, and of no weight"""
    first, to = self.shape.pages.row(page, step * STEP_POSITIONS), step % 2 * (STEP_POSITIONS * self.pitch)
    zeros = self.registers(1)
    for start in range(0, STEP_POSITIONS * self.dim // PIECE, WARPS * 32):
      piece = self.thread + start
      row, number = piece // (self.dim // PIECE), piece % (self.dim // PIECE) * PIECE
      begun = zeros[4].store(copy(self.target, rows[to + row * self.pitch + number], self.buffers["cache"][first + piece * PIECE]))
      zeros = zeros.after(begun)
    return begun

  def initial_sums(self) -> UOp:
    """Registers of the weighted sums by tile, pair of products and product, and one behind them"""
    count = self.tiles * self.pairs * 2 * 4
    sums = UOp.placeholder((count + 1,), dtypes.float, slot=3, addrspace=AddrSpace.REG)
    return sums.after(UOp.group(*[sums[i].store(0.0) for i in range(count)]))

  # ---- a step ----

  def wait(self, step:UOp, *before:UOp) -> UOp:
    """The barrier behind which all have the step's rows, and none reads those of the step before"""
    zeros = self.registers(4, step, *before)
    return UOp(Ops.BARRIER, src=(zeros[4].store(copied(self.target, step.cast(dtypes.int))),))

  def partial_scores(self, queries:UOp, rows:UOp, step:UOp) -> tuple[UOp, UOp]:
    """(registers of the lane's elements of c by tile and product, (rows, positions): the warp's share of the numbers, its 16 positions; the store
    behind them)"""
    count, products = self.tiles * 2 * 4, self.dim // 16 // SHARES
    sums = UOp.placeholder((count + 1,), dtypes.float, slot=5, addrspace=AddrSpace.REG).after(step)
    done = UOp.group(*(sums[i].store(0.0) for i in range(count)))
    first_row = step % 2 * STEP_POSITIONS + self.key_tile * 16
    for product in range(products):
      number = (self.share * products + product) * 16
      keys = self.words(rows, self.b_place(first_row, number, self.pitch), self.registers(6, done))
      for tile in range(self.tiles):
        query = self.words(queries, self.a_place(tile * TILE_TOKENS, number, self.pitch), self.registers(7, done))
        done = self.accumulate(sums, tile * 8, query, keys, done)
    return sums.after(done), done

  def share_scores(self, sums:UOp, *before:UOp) -> UOp:
    """Partial scores in shared memory behind a barrier, (SHARES, rows, SCORES_PITCH); `before` is done before it"""
    scores, stores = local(SHARES * self.n_rows * SCORES_PITCH, dtypes.float, 2), []
    for tile in range(self.tiles):
      for product in range(2):
        for i in range(4):
          row, position = self.mma.c(self.lane, i)
          place = (self.share * self.n_rows + tile * TILE_TOKENS + row) * SCORES_PITCH + self.key_tile * 16 + product * 8 + position
          stores.append(scores[place].store(sums[(tile * 2 + product) * 4 + i].load()))
    return scores.after(UOp(Ops.BARRIER, src=(*stores, *before)))

  def softmax(self, state:UOp, turn:int, shared:UOp, step:UOp) -> RowSoftmax:
    """Of the lane's row of a turn and its positions"""
    row, first = self.softmax_row(turn), self.lane_position()
    last, scores = self.first_position + self.shape.from_first(self.block, row % TILE_TOKENS) - step * STEP_POSITIONS, []
    for i in range(LANE_POSITIONS):
      shares = [shared[(share * self.n_rows + row) * SCORES_PITCH + first + i].load() for share in range(SHARES)]
      scores.append((first + i <= last).where(total(shares, UOp.add) * (self.shape.scale * LOG2_E), MASKED_SCORE))
    return self.online_softmax(row, state, turn, scores)

  def share_weights(self, softmax:list[RowSoftmax]) -> SharedWeights:
    weights, rescales = local(self.n_rows * WEIGHTS_PITCH, dtypes.half, 3), local(self.n_rows, dtypes.float, 4)
    barrier = UOp(Ops.BARRIER, src=tuple(self.store_weights(softmax, weights, rescales, WEIGHTS_PITCH, (self.lane % ROW_LANES).eq(0))))
    return SharedWeights(weights.after(barrier), rescales.after(barrier), barrier)

  def update_sums(self, sums:UOp, weights:UOp, rescales:UOp, barrier:UOp, rows:UOp, step:UOp) -> UOp:
    """The store behind the update of the lane's weighted sums"""
    per_tile, stores = self.pairs * 2 * 4, []
    for tile in range(self.tiles):
      of_rows = [rescales[tile * TILE_TOKENS + self.lane // 4 + half * 8].load() for half in range(2)]
      places = [sums[tile * per_tile + i] for i in range(per_tile)]
      stores += [place.store(place.load() * of_rows[i // 2 % 2]) for i, place in enumerate(places)]
    done = UOp.group(*stores)
    for depth in range(0, STEP_POSITIONS, 16):
      a_words = [self.words(weights, self.a_place(tile * TILE_TOKENS, depth, WEIGHTS_PITCH), self.registers(8 + tile, done))
                 for tile in range(self.tiles)]
      for pair in range(self.pairs):
        # rows are the inner numbers here: the first two matrices are those of a product
        place = self.a_place(step % 2 * STEP_POSITIONS + depth, self.first_latent + pair * 16, self.pitch)
        values = self.words(rows, place, self.registers(7, done), transposed=True)
        for tile, of_tile in enumerate(a_words): done = self.accumulate(sums, (tile * self.pairs + pair) * 8, of_tile, values, done)
    return done

  # ---- behind the loop ----

  def store_context(self, sums:UOp, state:UOp) -> list[UOp]:
    """The stores of the lane's weighted sums, over the sum of weights of all lanes of the row"""
    shape, inverses, stores = self.shape, local(self.n_rows, dtypes.float, 5), []
    for turn in range(self.turns):
      inverse = 1.0 / group_reduce(self.target, state[self.turns + turn].load(), ROW_LANES, UOp.add)
      stores.append(inverses[self.softmax_row(turn).valid((self.lane % ROW_LANES).eq(0))].store(inverse))
    inverses, stores = inverses.after(UOp(Ops.BARRIER, src=tuple(stores))), []
    for tile in range(self.tiles):
      of_rows = [inverses[tile * TILE_TOKENS + self.lane // 4 + half * 8].load() for half in range(2)]
      for product in range(self.pairs * 2):
        for i in range(4):
          row, column = self.mma.c(self.lane, i)
          token = self.block * TILE_TOKENS + row
          exists = None if shape.tokens % TILE_TOKENS == 0 else token < shape.tokens
          index = (token * shape.heads + self.first_head + tile) * shape.latent + self.first_latent + product * 8 + column
          value = sums[(tile * self.pairs * 2 + product) * 4 + i].load() * of_rows[i // 2]
          stores.append(self.buffers["context"][gated(index, exists)].store(value.cast(dtypes.half)))
    return stores

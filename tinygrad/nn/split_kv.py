"""Absorbed attention of one token a sequence over the latent cache, whose written rows are cut into splits: split_kv, then mla_combine.
One sequence is cut into equal splits. Several are cut by a plan (nn/split_plan.py), whose items are the splits of all of them.

Where a few tokens' splits are read by a product of each head alone, v_b, its blocks combine them for themselves (SplitContext): a launch less.

Two forms of split_kv: split_kv_mma by tensor cores over rows that are copied to shared memory while the kernels before still run, split_kv_simt on
every other target. Both make the same sums of a split, in float32:

  row_max, weight_sum, sums = MASKED_SCORE, 0, 0
  for positions in steps of the split:
    scores = scale · log2(e) · query · keys                  query: a head's [q_latent | rotated part]; keys: rows of the cache
    rescale, row_max = 2^(row_max - max(row_max, scores)), max(row_max, scores)
    weights = 2^(scores - row_max)
    weight_sum = weight_sum · rescale + Σ weights
    sums = sums · rescale + Σ weights · keys[:L]

split_kv_mma stores the sums as halves (SumsLayout). Its row_max is larger by the logarithm of the split's steps, so that the sums are no more than a
step's: halves hold them whatever the depth.
"""
from __future__ import annotations
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Callable
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.nn.few_tokens import Columns, columns_like, store_columns
from tinygrad.nn.halves import half_pair, of_pair
from tinygrad.nn.intrinsics import (MMA_CUDA, Target, copied_but, copy, group_reduce, group_sum, grouped, leave_unless, load_words, pack_halves,
                                    pdl_wait, shuffle_from, store_words)
from tinygrad.nn.kernel import LOG2_E, MULTIPROCESSORS, Load4, behind_wait, branch, empty, gated, launch, local, total
from tinygrad.nn.latent_cache import CODES, MASKED_SCORE, PageAhead, Pages, RowFormat
from tinygrad.nn.online_softmax import LANE_POSITIONS, RowSoftmax, SoftmaxThread
from tinygrad.nn.split_plan import PlanShape, item_of, items_of, least_length
from tinygrad.nn.step import NEW_ROWS, Step
from tinygrad.uop.ops import Ops

SIMT_BLOCKS = 3                    # that a multiprocessor holds
SIMT_WARPS, SIMT_HEADS = 4, 2      # of a block
POSITIONS_AT_ONCE = 4              # that a warp reads
MMA_STEPS, TILE_POSITIONS = (32, 16), 16   # positions that a block of split_kv_mma has at once, by its shared memory; that a product takes
STAGES = range(4, 2, -1)           # steps whose rows are on their way or read, which two are at once
MOST_COLUMNS = 4                   # of eight heads, of a block, by its registers
LATENT_PER_WARP, LATENT_TILES = 64, 4   # numbers that a warp multiplies, and whose weighted sums it makes; products of these
PIECE = 8                          # entries of a row that are copied at once, 16 bytes
COMBINE_WARPS = 8                  # of a block of mla_combine, or half of them where sequences have fewer splits
ROW_MAX, WEIGHT_SUM = 0, 1         # in stats
CONTEXT_THREADS = 512              # of a block that combines a head's splits for itself
CONTEXT_SPLITS = 2                 # … of which so many times a warp's lanes are in flight at once, behind the first lanes'
MOST_COMBINED = 24 << 20           # bytes that all of those read when all splits are written: the second cache hands out 5 or 6 MB a µs
Words = list[list[UOp]]            # of products: a lane's elements of b, two words

# ---- what callers ask ----

def uses_tensor_cores(target:Target, row:RowFormat) -> bool:
  """Whether split_kv_mma serves: it knows the fragments of MMA_CUDA, and takes rows of whole products and two, four or eight warps"""
  return MmaLayout.of(target, row) is not None

def takes(target:Target, heads:int, latent:int, rope:int) -> bool:
  """Whether lanes share a row evenly, for split_kv_simt and mla_combine, and the sums of a block of split_kv_simt have room in shared memory"""
  shared_bytes = SIMT_WARPS * min(SIMT_HEADS, heads) * (latent + 2) * 4
  return latent % (4 * target.lanes) == 0 and rope % target.lanes == 0 and shared_bytes <= target.shared_bytes

def padded(heads:int) -> int:
  """Heads of q_latent as split_kv_mma reads it: whole tiles of eight"""
  return -(-heads // 8) * 8

def query_place(head:UOp, number:UOp, latent:int) -> UOp:
  """The index of a number of a head's latent query in q_latent, as split_kv_mma reads it: a lane's four words of two products are neighbours"""
  words = (head // 8 * (latent // 32) + number // 32) * 32 + head % 8 * 4 + number % 8 // 2
  return words * 8 + number % 32 // 8 * 2 + number % 2

def group_heads(heads:int) -> int:
  """Heads of a block of split_kv_simt"""
  return SIMT_HEADS if heads % SIMT_HEADS == 0 else 1

def head_columns(heads:int) -> int:
  """Tiles of eight heads of a block of split_kv_mma, spread evenly over the blocks"""
  tiles = -(-heads // 8)
  return -(-tiles // -(-tiles // MOST_COLUMNS))

def machine_splits(target:Target, heads:int, row:RowFormat) -> tuple[int, int]:
  """(splits, step): how many splits fill the machine once, and the positions that a block reads at once. A split is whole steps, and a step lies
  within a page."""
  layout = MmaLayout.of(target, row)
  if layout is not None: return max(MULTIPROCESSORS // -(-heads // (8 * head_columns(heads))), 1), layout.positions
  return max(SIMT_BLOCKS * MULTIPROCESSORS // (heads // group_heads(heads)), 1), SIMT_WARPS * POSITIONS_AT_ONCE

def plan_splits(target:Target, heads:int, pages:Pages) -> tuple[int, int]:
  """(splits, step) of one sequence"""
  splits, step = machine_splits(target, heads, pages.format)
  return min(splits, pages.capacity // step), step

def plan_shape(target:Target, heads:int, pages:Pages, alone:bool=False) -> PlanShape:
  """How several sequences are cut. alone: each as it would be without the others"""
  return PlanShape.of(pages, *machine_splits(target, heads, pages.format), alone)

def plan_of(target:Target, heads:int, pages:Pages, step:Step) -> PlanShape|None:
  """… where the step has a plan"""
  return None if step.plan is None else plan_shape(target, heads, pages, step.invariant)

def split_length(last:UOp, splits:int, step:int) -> UOp:
  """Positions of a split, when `last` is the last position written: a step while so many splits are few to combine, two at least behind that"""
  return (last // (splits * step) + 1).maximum(least_length(last // step + 1)) * step

@dataclass(frozen=True)
class MmaLayout:
  """How a block of split_kv_mma lies in shared memory"""
  row: RowFormat
  positions: int   # of a step
  stages: int      # steps whose rows it has

  @staticmethod
  def of(target:Target, row:RowFormat) -> MmaLayout|None:
    """The largest steps of which there are three, and as many as there are. None: the target, or the row, does not suit"""
    whole = row.latent % LATENT_PER_WARP == 0 and row.rotated % TILE_POSITIONS == 0 and row.latent // LATENT_PER_WARP in (2, 4, 8)
    if target.mma is not MMA_CUDA or target.copy is None or not whole: return None
    layouts = (MmaLayout(row, positions, stages) for positions in MMA_STEPS for stages in STAGES)
    return next((layout for layout in layouts if layout.shared_bytes <= target.most_shared_bytes), None)

  @property
  def warps(self) -> int: return self.row.latent // LATENT_PER_WARP
  @property
  def tiles(self) -> int:
    """Of a step's positions"""
    return self.positions // TILE_POSITIONS
  @property
  def shares(self) -> int:
    """Of a row's numbers: a warp makes the scores of one tile of positions over one of them"""
    return self.warps // self.tiles
  # from a row, or a head, to the next one: they let the rows of a matrix begin in other banks
  @property
  def pitch(self) -> int: return self.row.dim + PIECE
  @property
  def entries_pitch(self) -> int: return self.row.entries + PIECE
  @property
  def scores_pitch(self) -> int: return self.positions + 4
  @property
  def weights_pitch(self) -> int: return self.positions + PIECE
  @property
  def stage_entries(self) -> int: return self.positions * self.entries_pitch
  @property
  def head_lanes(self) -> int:
    """That share a head in the softmax"""
    return self.positions // LANE_POSITIONS
  @property
  def heads_at_once(self) -> int:
    """Of a warp in the softmax"""
    return 32 // self.head_lanes
  @property
  def kept(self) -> int:
    """Steps whose rows are there as halves: two that are read at once, where those of the stages are codes"""
    return 2 if self.row.coded else self.stages
  @property
  def expanded(self) -> int:
    """Halves of rows that are codes"""
    return self.kept * self.positions * self.pitch if self.row.coded else 0
  @property
  def shared_bytes(self) -> int:
    """Rows of the stages, as halves where they are codes, weights; partial scores, rescales; of the most heads"""
    heads = 8 * MOST_COLUMNS
    halves = self.stages * self.stage_entries + self.expanded + (heads + 8) * self.weights_pitch
    return 2 * halves + 4 * heads * (self.shares * self.scores_pitch + 1)

@dataclass(frozen=True)
class SumsLayout:
  """How the sums of a split's head lie in memory, in pieces of four words that a thread stores and loads at once. Of split_kv_mma they are halves:
  piece 8·w + g has the numbers 64·w + g, 64·w + 8 + g, … 64·w + 56 + g, as a lane of warp w has them. Of split_kv_simt, float32 in order."""
  latent: int
  halves: bool

  @staticmethod
  def of(target:Target, row:RowFormat) -> SumsLayout: return SumsLayout(row.latent, uses_tensor_cores(target, row))
  @property
  def dtype(self) -> DType: return dtypes.uint32 if self.halves else dtypes.float
  @property
  def size(self) -> int:
    """Numbers of a piece"""
    return 8 if self.halves else 4
  @property
  def pieces(self) -> int:
    """Of a head"""
    return self.latent // self.size
  def number(self, piece:UOp, i:int) -> UOp:
    """Of the head, the piece's i-th"""
    return piece // 8 * LATENT_PER_WARP + i * 8 + piece % 8 if self.halves else piece * 4 + i
  def load(self, sums:UOp, piece:UOp, inside:UOp) -> list[UOp]:
    """A piece of those of all heads and splits; zeros where `inside` is false"""
    words = [sums[(piece * 4 + i).valid(inside)].load() for i in range(4)]
    return [number for word in words for number in of_pair(word)] if self.halves else words
  def place(self, number:UOp|int) -> UOp|int:
    """Of a number in shared memory: lanes with neighbouring pieces store into other banks"""
    return number + number // LATENT_PER_WARP * 8 if self.halves else number

def latent_of(sums:Tensor) -> int: return sums.shape[2] * (2 if sums.dtype == dtypes.uint32 else 1)

# ---- the launches ----

@dataclass(frozen=True)
class SplitLaunch:
  """What the code of split_kv depends on"""
  target: Target
  pages: Pages
  heads: int      # H
  latent: int     # L
  head_dim: int   # numbers of a head of q; the last R are rotated
  splits: int     # of all sequences
  step: int       # positions that a block reads at once
  plan: PlanShape|None   # of several sequences
  scale: float    # of the scores
  @property
  def dim(self) -> int: return self.pages.dim
  @property
  def scale_log2e(self) -> float: return self.scale * LOG2_E   # exp(x) is 2^(x · log2(e))
  def stats_row(self, split:UOp, head:UOp) -> UOp:
    """The index of a split's and head's row_max in stats"""
    return (head * self.splits + split) * 2

def split_kv(target:Target, q_latent:Tensor, q:Tensor, cache:Tensor, step:Step, scale:float) -> tuple[Tensor, Tensor]:
  """q_latent: float32 (T, H, L), or half (T, padded(H), L) in the order of query_place where uses_tensor_cores; q: float32 (T, H, nope+R), the last R
  numbers rotated; cache: half (C, L+R) or of 8 bits, written up to each token's position -> sums: (splits, H, L) as SumsLayout has them, weighted
  sums of a split; stats: float32 (H, splits, 2), its row_max (in base 2) and weight_sum, a head's side by side: every block that combines reads all
  of them.
  Splits that have no positions are not written."""
  (_, heads, head_dim), latent, pages = q.shape, q_latent.shape[2], Pages.of(cache, step, q_latent.shape[2])
  splits, at_once = plan_splits(target, heads, pages)
  plan = plan_of(target, heads, pages, step)
  if plan is not None: splits = plan.items
  shape, rope = SplitLaunch(target, pages, heads, latent, head_dim, splits, at_once, plan, scale), pages.dim - latent
  kernel = split_kv_mma if uses_tensor_cores(target, pages.format) else split_kv_simt
  def body(buffers:dict[str, UOp]) -> list[UOp]: return kernel(shape, buffers)
  layout = SumsLayout.of(target, pages.format)
  outs = {"sums": empty(cache, splits, heads, layout.pieces * 4, dtype=layout.dtype), "stats": empty(cache, heads, splits, 2)}
  ins = {"q_latent": q_latent, "q": q, "cache": cache, "tables": step.tables, **step_buffers(step)}
  sums, stats = launch(f"mla_{kernel.__name__}_{step.tokens}_{splits}_{heads}_{latent}_{rope}", outs, ins, body, cache.nbytes())
  return sums, stats

def step_buffers(step:Step) -> dict[str, Tensor]:
  """What tells a kernel where the splits are"""
  return {"start": step.start} if step.plan is None else {"plan": step.plan}

class Split:
  """The positions that a block reads: of a sequence's, up to `last`, the last one written. active: there are any.
  first_pages: those of the first step and of as many behind it as `ahead`; pages: of the step that is so far ahead of the loop's."""
  def __init__(self, shape:SplitLaunch, buffers:dict[str, UOp], index:UOp, ahead:int):
    self.shape, self.buffers, self.index = shape, buffers, index
    if shape.plan is None:
      self.sequence, self.last = UOp.const(0), shape.pages.position(buffers)
      length = split_length(self.last, shape.splits, shape.step)
      self.first = index * length
      self.active = self.first <= self.last
      written = (self.last - self.first) // shape.step + 1
      self.count = self.active.where(written.minimum(length // shape.step), 0)
    else:
      item = item_of(shape.plan, buffers, index)
      self.sequence, self.first, self.count, self.last = item.sequence, item.first, item.steps, item.last
      self.active = self.count > 0
    self.first_pages = [self.page_of(UOp.const(step)) for step in range(ahead + 1)]
    self.pages = PageAhead(self.first_pages[ahead], slot=3)
    self.wait_zero = pdl_wait(shape.target, *self.first_pages)

  def start_of(self, step:UOp|int) -> UOp: return self.first + step * self.shape.step
  def page_of(self, step:UOp) -> UOp:
    """Of the last position's, where there is no such step"""
    return self.shape.pages.page(self.buffers, self.start_of(step).minimum(self.last), self.sequence)

  def steps(self) -> UOp:
    """The loop over the split's steps"""
    return UOp.range(self.count, 0)

# ---- split_kv_simt ----

@dataclass(frozen=True)
class SoftmaxState:
  """A lane's registers of the online softmax: row_max, weight_sum and some of the weighted sums, for each of some heads"""
  registers: UOp
  width: int   # weighted sums of a head

  @staticmethod
  def initial(heads:int, width:int) -> SoftmaxState:
    registers = UOp.placeholder((heads * (width + 2),), dtypes.float, slot=2, addrspace=AddrSpace.REG)
    stores = [registers[head * (width + 2) + i].store(MASKED_SCORE if i == 0 else 0.0) for head in range(heads) for i in range(width + 2)]
    return SoftmaxState(registers.after(UOp.group(*stores)), width)

  def after(self, event:UOp) -> SoftmaxState: return replace(self, registers=self.registers.after(event))
  def row_max(self, head:int) -> UOp: return self.registers[head * (self.width + 2)]
  def weight_sum(self, head:int) -> UOp: return self.registers[head * (self.width + 2) + 1]
  def weighted_sum(self, head:int, i:int) -> UOp: return self.registers[head * (self.width + 2) + 2 + i]

def split_kv_simt(shape:SplitLaunch, buffers:dict[str, UOp]) -> list[UOp]:
  """A block's stores. It has a split and two heads; its four warps take every fourth position each.
    queries = the lane's share of the numbers, in registers
    for each step of the split:
      keys = the lane's share of the warp's four positions
      for each head: scores = sums over the warp of queries · keys; the online softmax, in every lane for its share
    row_max, weight_sum, sums of the warps -> shared memory
    merge them by their row_max; store"""
  thread = SimtThread(shape, buffers)
  queries = [thread.load_query(head) for head in range(thread.heads)]
  state = SoftmaxState.initial(thread.heads, thread.latent_share)
  step = thread.split.steps()
  page, following = thread.split.pages.read(step), thread.split.page_of(step + 1)
  positions = thread.positions(thread.split.start_of(step))
  keys = [thread.load_key(page, position) for position in positions]
  updates = [thread.split.pages.update(step, page, following)]
  for head, query in enumerate(queries):
    scores = thread.scores(query, keys, positions)
    updates += thread.update(state.after(step), head, scores, keys, positions)
  sums, stats = thread.share(state.after(UOp.group(*updates).end(step)))
  return [store for head in range(thread.heads) for store in thread.combine_warps(head, sums, stats)]

class SimtThread:
  """A thread of split_kv_simt. It has the same share of every row: latent_share of the L numbers, in fours, and rope_share of the R."""
  def __init__(self, shape:SplitLaunch, buffers:dict[str, UOp]):
    self.shape, self.buffers = shape, buffers
    lanes = shape.target.lanes
    self.heads = group_heads(shape.heads)
    self.latent_share, self.rope_share = shape.latent // lanes, (shape.dim - shape.latent) // lanes
    index, head_group = UOp.special(shape.splits, "gidx0"), UOp.special(shape.heads // self.heads, "gidx1")
    self.thread = UOp.special(SIMT_WARPS * lanes, "lidx0")
    self.warp, self.lane = self.thread // lanes, self.thread % lanes
    self.split = Split(shape, buffers, index, ahead=0)
    self.wait_zero = self.split.wait_zero
    self.first_head = head_group * self.heads

  def latent_number(self, i:int) -> UOp: return (i // 4 * self.shape.target.lanes + self.lane) * 4 + i % 4
  def rope_number(self, i:int) -> UOp: return self.lane * self.rope_share + i

  def load_query(self, head:int) -> list[UOp]:
    """The lane's share of a head's query, float32, times scale · log2(e)"""
    shape, number = self.shape, self.split.sequence * self.shape.heads + self.first_head + head
    rotated = number * shape.head_dim + shape.head_dim - (shape.dim - shape.latent)   # where the rotated part begins
    latent_places = [number * shape.latent + self.latent_number(i) for i in range(self.latent_share)]
    rope_places = [rotated + self.rope_number(i) for i in range(self.rope_share)]
    return [self.buffers["q_latent"][place + self.wait_zero].load() * shape.scale_log2e for place in latent_places] + \
           [self.buffers["q"][place + self.wait_zero].load() * shape.scale_log2e for place in rope_places]

  def positions(self, start:UOp) -> list[UOp]:
    """The warp's positions of a step"""
    return [start + i * SIMT_WARPS + self.warp for i in range(POSITIONS_AT_ONCE)]

  def load_key(self, page:UOp, position:UOp) -> list[UOp]:
    """The lane's share of a position's row, as float32, of the last row where it is not written; the first latent_share are its share of the value"""
    cache, pages = self.buffers["cache"], self.shape.pages
    row = pages.row(page, position.minimum(self.split.last)) + self.wait_zero * pages.format.entries
    numbers = [self.latent_number(i) for i in range(self.latent_share)] + [self.shape.latent + self.rope_number(i) for i in range(self.rope_share)]
    return [pages.format.load(cache, row, number) for number in numbers]

  def scores(self, query:list[UOp], keys:list[list[UOp]], positions:list[UOp]) -> list[UOp]:
    """A head's scores of the warp's positions, in every lane"""
    products = [reduce(UOp.add, [own * other for own, other in zip(query, key)]) for key in keys]
    totals = [group_sum(self.shape.target, product, self.shape.target.lanes) for product in products]
    return [(position <= self.split.last).where(total, MASKED_SCORE) for total, position in zip(totals, positions)]

  def update(self, state:SoftmaxState, head:int, scores:list[UOp], keys:list[list[UOp]], positions:list[UOp]) -> list[UOp]:
    """The stores of a head's softmax after the warp's positions of a step"""
    old = state.row_max(head).load()
    row_max = reduce(UOp.maximum, scores, old)
    rescale = (old - row_max).exp2()
    # a warp whose positions were all masked so far has their score as row_max, and a weight of 2^0 for each
    weights = [(position <= self.split.last).where((score - row_max).exp2(), 0.0) for score, position in zip(scores, positions)]
    weight_sum = reduce(UOp.add, weights, state.weight_sum(head).load() * rescale)
    stores = [state.row_max(head).store(row_max), state.weight_sum(head).store(weight_sum)]
    for i in range(self.latent_share):
      total = reduce(UOp.add, [weight * key[i] for weight, key in zip(weights, keys)], state.weighted_sum(head, i).load() * rescale)
      stores.append(state.weighted_sum(head, i).store(total))
    return stores

  def share(self, state:SoftmaxState) -> tuple[UOp, UOp]:
    """Shared memory behind a barrier: sums (warps, heads, L) and stats (warps, heads, 2)"""
    sums = local(SIMT_WARPS * self.heads * self.shape.latent, dtypes.float, 0)
    stats = local(SIMT_WARPS * self.heads * 2, dtypes.float, 1)
    stores = []
    for head in range(self.heads):
      row = (self.warp * self.heads + head) * self.shape.latent
      stores += [sums[row + self.latent_number(i)].store(state.weighted_sum(head, i).load()) for i in range(self.latent_share)]
    for head in range(self.heads):
      for i, value in enumerate((state.row_max(head), state.weight_sum(head))):
        stores.append(stats[((self.warp * self.heads + head) * 2 + i).valid(self.lane.eq(0))].store(value.load()))
    barrier = UOp(Ops.BARRIER, src=tuple(stores))
    return sums.after(barrier), stats.after(barrier)

  def combine_warps(self, head:int, sums:UOp, stats:UOp) -> list[UOp]:
    """The stores of a head's sums and stats of the split"""
    shape, threads = self.shape, SIMT_WARPS * self.shape.target.lanes
    rows = [warp * self.heads + head for warp in range(SIMT_WARPS)]
    maxima = [stats[row * 2].load() for row in rows]
    row_max = reduce(UOp.maximum, maxima)
    rescales = [(maximum - row_max).exp2() for maximum in maxima]
    weight_sum = reduce(UOp.add, [stats[row * 2 + 1].load() * rescale for row, rescale in zip(rows, rescales)])
    number = self.first_head + head
    out, row = self.split.index * shape.heads + number, shape.stats_row(self.split.index, number)
    writes_stats = self.thread.eq(0) & self.split.active
    stores = [self.buffers["stats"][(row + i).valid(writes_stats)].store(value) for i, value in enumerate((row_max, weight_sum))]
    for first in range(0, shape.latent, threads):
      total = reduce(UOp.add, [sums[row * shape.latent + first + self.thread].load() * rescale for row, rescale in zip(rows, rescales)])
      stores.append(self.buffers["sums"][(out * shape.latent + first + self.thread).valid(self.split.active)].store(total))
    return stores

# ---- split_kv_mma ----

def split_kv_mma(shape:SplitLaunch, buffers:dict[str, UOp]) -> list[UOp]:
  """A block's stores. It has a split and some columns of eight heads; one or two tiles of 16 positions a step. The rows of its first steps
  are on their way before the block waits for the kernels before, but for those that these may write (nn/step.py). A block without positions leaves.
  A step's sums are made beside the next step's scores, so that some warps multiply while others wait.
    old rows of the first `stages` steps begin their way to shared memory; wait for the kernels before; so do the new ones
    queries = the lane's words, in registers
    wait for the first step's rows; barrier
    for each step of the split:
      of rows of 8 bits the halves -> shared memory; barrier
      partial scores = keys · queries, of the warp's tile of positions and its share of the numbers -> shared memory
      the sums of the step before; barrier; the rows of a later step begin their way to where those of the step before were
      scores = Σ of the shares; the online softmax, some lanes a head; weights, rescale -> shared memory
      wait for the next step's rows; barrier
    the sums of the last step: sums = sums · rescale + values · weights, the warp's 64 latent numbers
    store row_max, weight_sum, sums"""
  thread = MmaThread(shape, buffers)
  queries, state, sums = thread.load_queries(), thread.initial_state(), thread.no_sums()
  first = thread.wait(UOp.const(0), thread.copy_new_rows())
  step = thread.split.steps()
  page, following = thread.split.pages.read(step), thread.split.page_of(step + thread.stages)
  partial_scores = thread.partial_scores(queries, thread.halves(step, first), step)
  before = thread.update_sums(sums.after(step), step + thread.layout.kept - 1, step > 0, first, step)
  scores = thread.share_scores(*partial_scores, before, following)
  copies = thread.copy_later_rows(step, page, scores)
  softmax = [thread.softmax(state.after(step), turn, scores, step) for turn in range(thread.turns)]
  turned = thread.split.pages.update(step, page, following)
  done = thread.wait(step + 1, copies, turned, *(store for head in softmax for store in head.stores), *thread.weight_stores(softmax)).end(step)
  sums = sums.after(thread.update_sums(sums.after(done), thread.split.count - 1, None, done))
  return [*(store for turn in range(thread.turns) for store in thread.store_stats(state.after(done), turn)), *thread.store_sums(sums)]

class MmaThread(SoftmaxThread):
  """A thread of split_kv_mma. Queries, rows of the cache and weights are half, two in a word; sums are float32. Positions are rows of the products
  that make scores, latent numbers of those that make weighted sums; heads are columns of both. lane_group, in_group: PTX's groupID and
  threadID_in_group, which place a lane in the fragments."""
  def __init__(self, shape:SplitLaunch, buffers:dict[str, UOp]):
    self.shape, self.buffers, self.format = shape, buffers, shape.pages.format
    self.layout = layout = MmaLayout.of(shape.target, self.format)
    self.stages, self.columns = layout.stages, head_columns(shape.heads)
    self.heads = self.columns * shape.target.mma.N            # of a block
    super().__init__(shape.target, layout.warps * 32, self.heads, layout.head_lanes)
    self.tile, self.share = self.warp % layout.tiles, self.warp // layout.tiles   # whose scores the warp makes
    self.products = shape.latent // layout.shares // self.mma.K   # of a share, on latent numbers
    self.rotated_products = (shape.dim - shape.latent) // self.mma.K   # of all shares, which take turns
    self.rotated_turns = -(-self.rotated_products // layout.shares)
    pieces = self.format.entries // PIECE                     # of a row
    self.own_row, self.own_number, self.rows_at_once = self.thread // pieces, self.thread % pieces * PIECE, layout.warps * 32 // pieces
    self.has_rows = self.own_row < self.rows_at_once
    self.columns_at_once = 2 // layout.tiles                  # whose weights four matrices are
    self.weight_loads = -(-self.columns // self.columns_at_once)
    self.lane_group, self.in_group = self.lane // 4, self.lane % 4
    index, block = UOp.special(shape.splits, "gidx0"), UOp.special(-(-shape.heads // self.heads), "gidx1")
    self.split = Split(shape, buffers, index, ahead=layout.stages - 1)
    self.first_head, self.first_latent = block * self.heads, self.warp * LATENT_PER_WARP
    steps = (self.split.count * 2 - 1).maximum(1).cast(dtypes.float).bitcast(dtypes.uint32)   # whose exponent is the logarithm, rounded up
    self.shift = ((steps >> 23).cast(dtypes.int) - 127).cast(dtypes.float)
    self.entries = local(layout.stages * layout.stage_entries, CODES if self.format.coded else dtypes.half, 0)   # as they lie in the cache
    self.rows = local(layout.expanded, dtypes.half, 4) if self.format.coded else self.entries   # as halves
    self.weights = local(self.weight_loads * self.columns_at_once * self.mma.N * layout.weights_pitch, dtypes.half, 2)
    self.rescales = local(self.heads, dtypes.float, 3)
    self.new_pages = [self.page_at(self.new_position(row)) for row, _ in self.own_rows(NEW_ROWS)]
    self.old_rows = self.copy_old_rows()
    self.behind = behind_wait(shape.target, buffers, self.old_rows[0].load(), *self.new_pages)

  # ---- where things are ----

  def head(self, of_block:UOp) -> tuple[UOp, UOp|None]:
    """(the head's number, whether there is such a head); None: always"""
    number = self.first_head + of_block
    if self.shape.heads % self.heads == 0: return number, None
    return number.minimum(self.shape.heads - 1), number < self.shape.heads

  def rotated_product(self, turn:int) -> tuple[UOp, UOp|None]:
    """(the first of the 16 rotated numbers that the warp multiplies, whether there is such a product); None: always"""
    number = turn * self.layout.shares + self.share
    if self.rotated_products % self.layout.shares == 0: return number * self.mma.K, None
    return number.minimum(self.rotated_products - 1) * self.mma.K, number < self.rotated_products

  def stage(self, step:UOp|int) -> UOp|int:
    """Where a step's rows begin"""
    return step % self.stages * self.layout.stage_entries

  def softmax_head(self, turn:int) -> UOp:
    """The head of the block whose softmax the lane shares; the last ones, where there is none: several warps make them then, all the same"""
    at_once = self.layout.heads_at_once
    return (turn * self.layout.warps + self.warp).minimum(self.heads // at_once - 1) * at_once + self.lane // self.layout.head_lanes

  def page_at(self, position:UOp) -> UOp:
    return self.shape.pages.page(self.buffers, position.maximum(0).minimum(self.split.last), self.split.sequence)

  # ---- copies of rows. A thread copies the same 16 bytes of every so-and-so-many-th row. Its copies are in groups: one for each of the first steps,
  # and from the second step on one for each step, of a later step's rows ----

  def zero(self, *after:UOp) -> UOp:
    """A register for the zeros that are stored behind statements"""
    return UOp.placeholder((1,), dtypes.uint32, slot=1, addrspace=AddrSpace.REG).after(*after)

  def own_rows(self, count:int) -> list[tuple[UOp, UOp|None]]:
    """Of so many neighbouring rows those of a thread that has_rows, and whether there is such a one; None: always"""
    def exists(first:int) -> UOp|None: return None if first + self.rows_at_once <= count else self.own_row < count - first
    return [(self.own_row + first, exists(first)) for first in range(0, count, self.rows_at_once)]

  def new_position(self, row:UOp) -> UOp:
    """Of one of the rows that other kernels of the step may write"""
    return self.split.last - (NEW_ROWS - 1) + row

  def copy_step(self, zero:UOp, step:UOp|int, page:UOp, shift:UOp|int, copies:Callable[[UOp], UOp]) -> UOp:
    """The store behind `zero` and the beginning of the copies of a step's rows. Rows behind the last position become zeros.
    shift: a 0, of a branch. copies: of how many positions there are behind a row's, whether it is copied"""
    start = self.split.start_of(step)
    to, source = self.stage(step) + self.own_number + shift, self.shape.pages.row(page, start) + self.own_number + shift
    for row, exists in self.own_rows(self.layout.positions):
      behind = self.split.last - start - row
      inside = copies(behind) if exists is None else copies(behind) & exists
      own, of = self.entries[to + row * self.layout.entries_pitch], self.buffers["cache"][source + row * self.format.entries]
      zero = zero.after(begun := zero[0].store(copy(self.target, own, of, inside, behind >= 0)))
    return begun

  def copy_old_rows(self) -> UOp:
    """A zero behind the beginning of the copies of what other kernels of the step do not write"""
    zero = self.zero()
    zero = zero.after(zero[0].store(leave_unless(self.split.active)))
    def copies(behind:UOp) -> UOp: return (behind < 0) | (behind >= NEW_ROWS)
    for step, page in enumerate(self.split.first_pages):
      loop, shift = branch(step + 1, (step < self.split.count) & self.has_rows)
      zero = zero.after(self.copy_step(zero.after(loop), step, page, shift, copies).end(loop))
      zero = zero.after(zero[0].store(grouped(self.target, zero[0].load())))
    return zero

  def copy_new_rows(self) -> UOp:
    """… of what is left of the first steps. They are in the group of the copies that follow"""
    zero, split = self.zero(self.old_rows), self.split
    for (row, exists), page in zip(self.own_rows(NEW_ROWS), self.new_pages):
      position = self.new_position(row)
      inside = self.has_rows & (split.first <= position) & (position < split.start_of(split.count.minimum(self.stages)))
      if exists is not None: inside = inside & exists
      place = inside.where((position - split.first) * self.layout.entries_pitch + self.own_number, 0)
      source = self.shape.pages.row(page, position.maximum(0)) + self.own_number
      zero = zero.after(zero[0].store(copy(self.target, self.entries[place], self.behind["cache"][source], inside)))
    return zero

  def copy_later_rows(self, step:UOp, page:UOp, behind:UOp) -> UOp:
    """… of a step's rows, to where those of the step before were: the step that is `stages` behind that one. From the second step on"""
    later = step + (self.stages - 1)
    has_rows = (step > 0) & (later < self.split.count) & self.has_rows
    zero = self.zero(self.copy_step(self.zero(behind), later, page, 0, lambda _: has_rows))
    return zero[0].store(grouped(self.target, zero[0].load(), step > 0))

  def wait(self, step:UOp, *before:UOp) -> UOp:
    """The barrier behind which all have the step's rows, and what is done `before`"""
    has_new_rows = self.split.last < self.split.start_of(step + 1) + (NEW_ROWS - 1)
    event = copied_but(self.target, [(has_new_rows, 0), (step.eq(0), self.stages - 1)], self.stages - 2)
    return UOp(Ops.BARRIER, src=(self.zero(step, *before)[0].store(event),))

  # ---- a step ----

  def halves(self, step:UOp, *after:UOp) -> UOp:
    """The step's rows as halves in shared memory: those copied, or of 8 bits what these stand for behind a barrier"""
    if not self.format.coded: return self.rows.after(*after)
    entries, layout, of_row, threads = self.entries.after(*after), self.layout, self.shape.dim // PIECE, self.layout.warps * 32
    zero, pieces = self.zero(step, *after), layout.positions * of_row
    for turn in range(0, pieces, threads):
      piece, count = (self.thread + turn).minimum(pieces - 1), self.format.piece_words(PIECE)
      row, number = piece // of_row, piece % of_row * PIECE
      places, words = self.format.piece(entries, self.stage(step) + row * layout.entries_pitch, number, PIECE), self.registers(9, zero)
      words = words.after(self.load(words, places))
      halves = self.format.halves(self.target, [words[i].load() for i in range(count)], number)
      zero = zero.after(zero[0].store(store_words(self.target, self.rows[self.first_row(step) + row * layout.pitch + number], halves)))
    return self.rows.after(UOp(Ops.BARRIER, src=(zero,)))

  def first_row(self, step:UOp) -> UOp:
    """Where a step's rows begin in what `halves` returns"""
    return step % self.layout.kept * (self.layout.positions * self.layout.pitch)

  def partial_scores(self, queries:list[list[UOp]], rows:UOp, step:UOp) -> tuple[UOp, UOp]:
    """(registers of the lane's elements of c by column, (positions, heads), of the warp's tile and its share of the numbers; the store behind
    them)"""
    sums = UOp.placeholder((self.columns * 4 + 1,), dtypes.float, slot=5, addrspace=AddrSpace.REG).after(step)
    done = UOp.group(*(sums[i].store(0.0) for i in range(self.columns * 4)))
    numbers = [(self.share * self.products + product) * self.mma.K for product in range(self.products)]
    rotated = [self.shape.latent + self.rotated_product(turn)[0] for turn in range(self.rotated_turns)]
    for product, number in enumerate(numbers + rotated):
      place = self.first_row(step) + self.a_place(self.tile * TILE_POSITIONS, number, self.layout.pitch)
      keys = self.words(rows, place, self.registers(6, done))
      for column in range(self.columns):
        done = self.accumulate(sums, column * 4, keys, queries[column][2 * product:2 * product + 2], done)
    return sums.after(done), done

  def share_scores(self, sums:UOp, *before:UOp) -> UOp:
    """Partial scores in shared memory behind a barrier, (shares, heads, scores_pitch); `before` is done before it"""
    pitch, stores = self.layout.scores_pitch, []
    scores = local(self.layout.shares * self.heads * pitch, dtypes.float, 1)
    for column in range(self.columns):
      for i in range(4):
        position, head = self.mma.c(self.lane, i)
        row = self.share * self.heads + column * self.mma.N + head
        stores.append(scores[row * pitch + self.tile * TILE_POSITIONS + position].store(sums[column * 4 + i].load()))
    return scores.after(UOp(Ops.BARRIER, src=(*stores, *before)))

  def softmax(self, state:UOp, turn:int, shared:UOp, step:UOp) -> RowSoftmax:
    """Of the lane's head of a turn and its positions"""
    head, last, scores = self.softmax_head(turn), self.split.last - self.split.start_of(step), []
    for i in range(LANE_POSITIONS):
      position = self.lane_position() + i
      shares = [shared[(share * self.heads + head) * self.layout.scores_pitch + position].load() for share in range(self.layout.shares)]
      scores.append((position <= last).where(total(shares, UOp.add) * self.shape.scale_log2e, MASKED_SCORE))
    return self.online_softmax(head, state, turn, scores, self.shift)

  def weight_stores(self, softmax:list[RowSoftmax]) -> list[UOp]:
    return self.store_weights(softmax, self.weights, self.rescales, self.layout.weights_pitch, self.lane_position().eq(0))

  def no_sums(self) -> UOp:
    """Registers of the weighted sums by tile of 16 latent numbers and column, and one behind them"""
    count = LATENT_TILES * self.columns * 4
    sums = UOp.placeholder((count + 1,), dtypes.float, slot=4, addrspace=AddrSpace.REG)
    return sums.after(UOp.group(*(sums[i].store(0.0) for i in range(count))))

  def update_sums(self, sums:UOp, step:UOp, inside:UOp|None, *behind:UOp) -> UOp:
    """The store behind the update of the lane's weighted sums by a step, whose weights and rows are there behind `behind`, where `inside` is true"""
    rows, weights, rescales = (shared.after(*behind) for shared in (self.rows, self.weights, self.rescales))
    def rescale(head:UOp) -> UOp: return rescales[head].load() if inside is None else inside.where(rescales[head].load(), 1.0)
    of_heads = [[rescale(column * self.mma.N + self.in_group * 2 + i) for i in range(2)] for column in range(self.columns)]
    places = [(sums[i], of_heads[i // 4 % self.columns][i % 2]) for i in range(LATENT_TILES * self.columns * 4)]
    done = UOp.group(*(place.store(place.load() * factor) for place, factor in places))
    b_words, matrices = [], 4 // self.columns_at_once   # of eight positions each, of a column
    for load in range(self.weight_loads):
      head = (load * self.columns_at_once + self.matrix // matrices) * self.mma.N + self.in_matrix
      b_words += self.words(weights, head * self.layout.weights_pitch + self.matrix % matrices * 8, self.registers(8 + load, done))
    for tile in range(self.layout.tiles):
      for latent in range(LATENT_TILES):
        # rows are the inner numbers here
        place = self.first_row(step) + self.b_place(tile * TILE_POSITIONS, self.first_latent + latent * self.mma.M, self.layout.pitch)
        values = self.words(rows, place, self.registers(7, done), transposed=True)
        for column in range(self.columns):
          own = column * matrices + tile * 2
          done = self.accumulate(sums, (latent * self.columns + column) * 4, values, b_words[own:own + 2], done, inside)
    return done

  # ---- before the loop, and behind it ----

  def no_words(self, count:int, slot:int) -> UOp:
    """Registers of words, and one that takes the zeros that are stored behind statements"""
    registers = UOp.placeholder((count + 1,), dtypes.uint32, slot=slot, addrspace=AddrSpace.REG)
    return registers.after(UOp.group(*(registers[i].store(0) for i in range(count))))

  def load(self, registers:UOp, places:list[tuple[UOp, int]]) -> UOp:
    """The stores behind loads into registers, one after another: of so many words from each place"""
    first, events = 0, []
    for place, count in places:
      events.append(load_words(self.target, place, [registers[first + i] for i in range(count)]))
      first += count
    return UOp.group(*(registers[first].store(event) for event in events))

  def load_queries(self) -> list[list[UOp]]:
    """By column the words of each product of the warp's share, first of latent numbers, then of rotated ones"""
    shape, pairs = self.shape, self.products // 2
    heads = [self.first_head + column * self.mma.N + self.lane_group for column in range(self.columns)]
    first, q_latent = self.split.sequence * (padded(shape.heads) * shape.latent), self.behind["q_latent"]
    places = [first + query_place(head.minimum(padded(shape.heads) - 1), (self.share * pairs + pair) * 32 + self.in_group * 2, shape.latent)
              for head in heads for pair in range(pairs)]
    latent = self.no_words(4 * len(places), 9)
    latent = latent.after(self.load(latent, [(q_latent[place], 4) for place in places]))
    def rotated(head:UOp, turn:int) -> list[UOp]:
      number, inside = self.rotated_product(turn)
      end = (self.split.sequence * shape.heads + head.minimum(shape.heads - 1) + 1) * shape.head_dim
      first = end - (shape.dim - shape.latent) + number + self.in_group * 2
      return [half_pair(*(self.behind["q"][gated(first + half * 8 + i, inside)].load() for i in range(2))) for half in range(2)]
    def of_column(column:int) -> list[UOp]: return [latent[column * pairs * 4 + i].load() for i in range(pairs * 4)]
    return [of_column(column) + [word for turn in range(self.rotated_turns) for word in rotated(head, turn)] for column, head in enumerate(heads)]

  def store_stats(self, state:UOp, turn:int) -> list[UOp]:
    weight_sum = group_reduce(self.target, state[self.turns + turn].load(), self.layout.head_lanes, UOp.add)
    head, exists = self.head(self.softmax_head(turn))
    row, is_first = self.shape.stats_row(self.split.index, head), self.lane_position().eq(0)
    stats = state[turn].load() + self.shift, weight_sum
    return [self.buffers["stats"][gated(row + i, is_first, exists)].store(value) for i, value in enumerate(stats)]

  def store_sums(self, sums:UOp) -> list[UOp]:
    stores, layout = [], SumsLayout.of(self.target, self.format)
    for column in range(self.columns):
      for i in range(2):
        head, exists = self.head(column * self.mma.N + self.in_group * 2 + i)
        piece = (self.split.index * self.shape.heads + head) * layout.pieces + self.first_latent // layout.size + self.lane_group
        own = [sums[(latent * self.columns + column) * 4 + half * 2 + i].load() for latent in range(LATENT_TILES) for half in range(2)]
        words = [pack_halves(self.target, *own[number:number + 2]) for number in range(0, layout.size, 2)]
        stores += [self.buffers["sums"][gated(piece * 4 + number, exists)].store(word) for number, word in enumerate(words)]
    return stores

# ---- mla_combine ----

@dataclass(frozen=True)
class CombineLaunch:
  """What the code of mla_combine depends on"""
  target: Target
  pages: Pages
  splits: int
  heads: int    # H
  latent: int   # L
  step: int     # positions that a block of split_kv reads at once
  plan: PlanShape|None
  columns: bool   # the context is Columns
  @property
  def tokens(self) -> int: return self.pages.sequences
  @property
  def warps(self) -> int: return COMBINE_WARPS if self.splits >= COMBINE_WARPS * self.tokens else COMBINE_WARPS // 2

def mla_combine(target:Target, sums:Tensor, stats:Tensor, cache:Tensor, step:Step) -> Tensor:
  """The context of all splits. sums, stats: what split_kv made of the cache -> float32 (T, H, L)"""
  return combine_launch(target, sums, stats, cache, step, empty(sums, step.tokens, sums.shape[1], latent_of(sums), dtype=dtypes.float))

def mla_combine_columns(target:Target, sums:Tensor, stats:Tensor, cache:Tensor, step:Step) -> Columns:
  """… as L numbers of each head of a token"""
  heads = sums.shape[1]
  return Columns(combine_launch(target, sums, stats, cache, step, columns_like(sums, heads, step.tokens, latent_of(sums)), columns=True))

def combine_launch(target:Target, sums:Tensor, stats:Tensor, cache:Tensor, step:Step, context:Tensor, columns:bool=False) -> Tensor:
  (splits, heads, _), latent = sums.shape, latent_of(sums)
  pages = Pages.of(cache, step, latent)
  plan = plan_of(target, heads, pages, step)
  shape = CombineLaunch(target, pages, splits, heads, latent, plan_splits(target, heads, pages)[1], plan, columns)
  def body(buffers:dict[str, UOp]) -> list[UOp]: return combine_kernel(shape, buffers)
  mem = None if plan is None else sums.nbytes() + stats.nbytes() + context.nbytes()   # a loop's turns are out of the renderer's reach
  name = f"mla_combine{'_columns' if columns else ''}_{step.tokens}_{splits}_{heads}_{latent}"
  return launch(name, {"context": context}, {"sums": sums, "stats": stats, **step_buffers(step)}, body, mem)[0]

def combine_kernel(shape:CombineLaunch, buffers:dict[str, UOp]) -> list[UOp]:
  """A block's stores. It has a token's head and as many pieces of its sums as a warp has lanes, or all of them; groups of threads, a piece each,
  take turns at the splits.
    row_max = max of the splits' row_max
    weight of a split = 2^(its row_max - row_max)
    weight_sum, sums = Σ weight · its weight_sum, Σ weight · its sums    a group's splits, then all groups' in shared memory
    context = sums / weight_sum"""
  thread = CombineThread(shape, buffers)
  weight_sum, *sums = thread.group_sums(thread.row_max())
  return thread.combine_groups(weight_sum, sums)

class CombineThread:
  """A thread of mla_combine"""
  def __init__(self, shape:CombineLaunch, buffers:dict[str, UOp]):
    self.shape, self.buffers, self.lanes = shape, buffers, shape.target.lanes
    self.layout, threads = SumsLayout.of(shape.target, shape.pages.format), shape.warps * self.lanes
    self.width = min(self.layout.pieces, self.lanes)   # pieces of a block
    self.groups = threads // self.width
    self.part, self.head = UOp.special(self.layout.pieces // self.width, "gidx0"), UOp.special(shape.heads, "gidx1")
    self.thread = UOp.special(threads, "lidx0")
    self.group, self.piece = self.thread // self.width, self.thread % self.width
    if shape.plan is None:
      self.sequence, self.first, last = UOp.const(0), UOp.const(0), shape.pages.position(buffers)
      self.written = last // split_length(last, shape.splits, shape.step) + 1   # splits
      self.wait_zero = pdl_wait(shape.target)
    else:
      self.sequence = UOp.special(shape.pages.sequences, "gidx2")
      self.first, self.written = items_of(shape.plan, buffers, self.sequence)
      self.wait_zero = pdl_wait(shape.target, self.written)

  def over_splits(self, first:UOp, step:int, number:int, values_of:Callable[[UOp], list[UOp]], op:Callable[[UOp, UOp], UOp]) -> list[UOp]:
    """op over values_of(split), one by one, of the sequence's splits first, first + step, … One sequence's are at most as many as fill the machine,
    and are all in flight at once; of several, most have few: those behind the first in a loop."""
    if self.shape.plan is None:
      values = [values_of(first + start) for start in range(0, self.shape.splits, step)]
      return [reduce(op, column) for column in zip(*values)]
    initial = values_of(first)
    if self.shape.splits <= step: return initial
    registers = UOp.placeholder((len(initial),), dtypes.float, slot=2 + number, addrspace=AddrSpace.REG)
    registers = registers.after(UOp.group(*(registers[i].store(value) for i, value in enumerate(initial))))
    turn = UOp.range((self.written - 1).maximum(0) // step, number)
    own = registers.after(turn)
    updates = [own[i].store(op(own[i].load(), value)) for i, value in enumerate(values_of(first + (turn + 1) * step))]
    registers = registers.after(UOp.group(*updates).end(turn))
    return [registers[i].load() for i in range(len(initial))]

  def stat(self, split:UOp, i:int) -> UOp:
    index = (self.head * self.shape.splits + self.first + split) * 2 + i + self.wait_zero * 2
    return self.buffers["stats"][index.valid(split < self.written)].load()

  def row_max(self) -> UOp:
    """Of all splits, in every lane"""
    def row_max_of(split:UOp) -> list[UOp]: return [(split < self.written).where(self.stat(split, ROW_MAX), MASKED_SCORE)]
    own, = self.over_splits(self.thread % self.lanes, self.lanes, 0, row_max_of, UOp.maximum)
    return group_reduce(self.shape.target, own, self.lanes, UOp.maximum)

  def group_sums(self, row_max:UOp) -> list[UOp]:
    """weight_sum and the thread's sums, of the group's splits"""
    def weighted(split:UOp) -> list[UOp]:
      weight = (split < self.written).where((self.stat(split, ROW_MAX) - row_max).exp2(), 0.0)
      piece = ((self.first + split) * self.shape.heads + self.head) * self.layout.pieces + self.part * self.width + self.piece
      sums = self.layout.load(self.buffers["sums"], piece + self.wait_zero, split < self.written)
      return [weight * self.stat(split, WEIGHT_SUM), *(weight * value for value in sums)]
    return self.over_splits(self.group, self.groups, 1, weighted, UOp.add)

  def combine_groups(self, weight_sum:UOp, sums:list[UOp]) -> list[UOp]:
    """The stores of the block's numbers of the context, four a thread"""
    numbers = self.width * self.layout.size
    pitch = self.layout.place(numbers)
    shared_sums, weight_sums = local(self.groups * pitch, dtypes.float, 0), local(self.groups, dtypes.float, 1)
    stores = [shared_sums[self.group * pitch + self.layout.place(self.layout.number(self.piece, i))].store(value) for i, value in enumerate(sums)]
    barrier = UOp(Ops.BARRIER, src=(*stores, weight_sums[self.group.valid(self.piece.eq(0))].store(weight_sum)))
    shared_sums, weight_sums = shared_sums.after(barrier), weight_sums.after(barrier)
    total_weight = reduce(UOp.add, [weight_sums[group].load() for group in range(self.groups)])
    values, quad = [], self.thread % (numbers // 4)
    for i in range(4):
      total = reduce(UOp.add, [shared_sums[group * pitch + self.layout.place(quad * 4) + i].load() for group in range(self.groups)])
      values.append(total / total_weight)
    return self.store(self.part * (numbers // 4) + quad, values, self.thread < numbers // 4)

  def store(self, quad:UOp, values:list[UOp], is_writer:UOp) -> list[UOp]:
    shape, context, number = self.shape, self.buffers["context"], self.head * self.shape.latent + quad * 4
    if shape.columns: return store_columns(context, number, self.sequence, shape.tokens, is_writer, values)   # a head's are whole chunks
    first = self.sequence * (shape.heads * shape.latent) + number
    return [context[(first + i).valid(is_writer)].store(value) for i, value in enumerate(values)]

# ---- combining where the context is read ----

def blocks_combine(target:Target, heads:int, pages:Pages, blocks:int, alone:bool=False) -> bool:
  """Whether so many blocks a head, which read its context, combine its splits for themselves: where their threads share a split evenly, and what all
  of them read together stays small. alone: as for one of the sequences"""
  splits = plan_splits(target, heads, pages)[0] if pages.sequences == 1 or alone else plan_shape(target, heads, pages).items
  pieces = SumsLayout.of(target, pages.format).pieces
  return target.shuffle_from is not None and CONTEXT_THREADS % pieces == 0 and heads * blocks * splits * pieces * 16 <= MOST_COMBINED

@dataclass(frozen=True)
class SplitContext:
  """The contexts of tokens' head, which a block makes of the splits (matvec's MadeVectors). Each warp has all splits' row_max and weight_sum, a
  lane those of some. A group of threads, a piece of the head's sums each, takes every so many-th split: as many as a warp has lanes are in flight
  first, more come in a loop.
    row_max = max of the splits' row_max
    weight of a split = 2^(its row_max - row_max)
    sums = Σ weight · its sums                        a group's splits; then all groups' in shared memory
    context = sums / Σ weight · its weight_sum"""
  target: Target
  buffers: dict[str, UOp]
  pages: Pages
  splits: int
  heads: int    # H
  step: int     # positions that a block of split_kv reads at once
  plan: PlanShape|None   # of several tokens
  head: UOp

  @property
  def most(self) -> int:
    """Splits of a token"""
    return self.splits if self.plan is None else self.plan.most_items
  @property
  def threads(self) -> int: return CONTEXT_THREADS
  @property
  def layout(self) -> SumsLayout: return SumsLayout.of(self.target, self.pages.format)
  @property
  def groups(self) -> int: return self.threads // self.layout.pieces
  @property
  def nbytes(self) -> int: return self.groups * self.layout.place(self.layout.latent) * 4
  def own(self, token:UOp) -> tuple[UOp, UOp]:
    """(a token's first split, how many it has)"""
    if self.plan is not None: return items_of(self.plan, self.buffers, token)
    last = self.pages.position(self.buffers)
    return UOp.const(0), last // split_length(last, self.splits, self.step) + 1
  def constants(self, tokens:list[UOp]) -> list[UOp]: return [number for token in tokens for number in self.own(token)]

  def load4(self, tokens:list[UOp], thread:UOp, threads:int, wait_zero:UOp, slot:int) -> list[Load4]:
    layout, groups, pitch = self.layout, self.groups, self.layout.place(self.layout.latent)
    group, piece = thread // layout.pieces, thread % layout.pieces
    assert threads == self.threads and threads % layout.pieces == 0 and self.target.lanes % groups == 0
    shared, stores, weight_sums = local(len(tokens) * groups * pitch, dtypes.float, slot), [], []
    for number, token in enumerate(tokens):
      own, weight_sum = self.group_sums(token, thread % self.target.lanes, group, piece, wait_zero, number)
      row = (number * groups + group) * pitch
      stores += [shared[row + layout.place(layout.number(piece, i))].store(value) for i, value in enumerate(own)]
      weight_sums.append(weight_sum)
    shared = shared.after(UOp(Ops.BARRIER, src=tuple(stores)))
    inverses = [1 / weight_sum for weight_sum in weight_sums]
    def context(number:int, quad:UOp) -> list[UOp]:
      first = number * groups * pitch + layout.place(quad * 4)
      return [reduce(UOp.add, [shared[first + group * pitch + i].load() for group in range(groups)]) * inverses[number] for i in range(4)]
    return [partial(context, number) for number in range(len(tokens))]

  def group_sums(self, token:UOp, lane:UOp, group:UOp, piece:UOp, wait_zero:UOp, number:int) -> tuple[list[UOp], UOp]:
    """(a piece of a token's sums, as far as they are of a group's splits; Σ weight · weight_sum of all). number: of its loop, and its registers"""
    lanes, layout, (first_split, written) = self.target.lanes, self.layout, self.own(token)
    def stats_of(split:UOp) -> tuple[UOp, UOp]:
      """A split's row_max and weight_sum; of one that is not written, those of a split without positions"""
      index, inside = (self.head * self.splits + first_split + split) * 2 + wait_zero * 2, split < written
      row_max, weight_sum = (self.buffers["stats"][(index + i).valid(inside)].load() for i in (ROW_MAX, WEIGHT_SUM))
      return inside.where(row_max, MASKED_SCORE), weight_sum
    stats = [stats_of(lane + first) for first in range(0, self.most, lanes)]
    row_max = group_reduce(self.target, reduce(UOp.maximum, [row_max for row_max, _ in stats]), lanes, UOp.maximum)
    weights = [(own - row_max).exp2() for own, _ in stats]
    weight_sum = group_reduce(self.target, reduce(UOp.add, [weight * own for weight, (_, own) in zip(weights, stats)]), lanes, UOp.add)
    def of_splits(first:UOp|int, weights:list[UOp], most:int) -> list[UOp]:
      """The group's sums, of as many splits from `first` on as there are lanes' weights, or of `most`"""
      terms = []
      for turn in range(0, min(lanes * len(weights), most), self.groups):
        of_split, split = shuffle_from(self.target, weights[turn // lanes], turn % lanes + group), first + turn + group
        place = ((first_split + split) * self.heads + self.head) * layout.pieces + piece + wait_zero
        terms.append([of_split * value for value in layout.load(self.buffers["sums"], place, split < written)])
      return [reduce(UOp.add, column) for column in zip(*terms)]
    sums, turns = of_splits(0, weights[:1], self.most), [weights[i:i + CONTEXT_SPLITS] for i in range(1, len(weights), CONTEXT_SPLITS)]
    if turns:
      registers = UOp.placeholder((len(sums),), dtypes.float, slot=number, addrspace=AddrSpace.REG)
      registers = registers.after(UOp.group(*(registers[i].store(value) for i, value in enumerate(sums))))
      at_once = lanes * CONTEXT_SPLITS
      loop = UOp.range((written - lanes + at_once - 1).maximum(0) // at_once, number)
      of_turn, own = turns[0], registers.after(loop)
      for turn, later in enumerate(turns[1:], 1):   # the last one's may be fewer
        of_turn = [loop.eq(turn).where(other, weight) for other, weight in zip(later, of_turn)] + of_turn[len(later):]
      more = of_splits(loop * at_once + lanes, of_turn, self.most - lanes)
      registers = registers.after(UOp.group(*(own[i].store(own[i].load() + value) for i, value in enumerate(more))).end(loop))
      sums = [registers[i].load() for i in range(len(sums))]
    return sums, weight_sum

"""Absorbed attention of many tokens over the latent cache, by tensor cores.

A block takes 16 tokens of a head, and goes along the cache in steps of 32 positions. Its four warps share the numbers of a row of the
cache: each has its quarter of the queries in registers, multiplies it with its quarter of the keys, and the four partial scores meet in shared
memory; each then makes the weighted sums of its quarter of the latent numbers. The softmax is online, float32, in every warp for itself. The
cache is read from device memory: what a warp has read as keys it reads again as values from the nearest cache.
"""
from __future__ import annotations
from dataclasses import dataclass, replace
from typing import Callable, NamedTuple, Self
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.nn.intrinsics import Target, shuffle
from tinygrad.nn.kernel import LOG2_E, empty, gated, launch, local, total
from tinygrad.nn.latent_cache import MASKED_SCORE, PageAhead, Pages, RowFormat
from tinygrad.nn.shared_walk import SLAB, depth_of
from tinygrad.nn.step import STRIP, Step
from tinygrad.uop.ops import Ops

BLOCK_TOKENS, STEP_POSITIONS, WARPS = 16, 32, 4   # of a block
NEIGHBOURS = 4                                   # latent numbers beside each other that a lane has of a row
SCORES_PITCH = STEP_POSITIONS + 8                # of a token's scores in shared memory: rows begin in other banks
assert BLOCK_TOKENS == STRIP

def takes(target:Target, row:RowFormat) -> bool:
  """Whether the warps share the latent numbers in whole products, and rows are whole slabs"""
  return target.mma is not None and row.latent % (WARPS * NEIGHBOURS * target.mma.N) == 0 and row.dim % SLAB == 0

def block_of_tokens(tokens:int, own:int) -> UOp:
  """Which `own` tokens a block has: those that read the most positions begin first, and those that read few fill what is left"""
  count = -(-tokens // own)
  return count - 1 - UOp.special(count, "gidx1")

@dataclass(frozen=True)
class PrefillLaunch:
  """What the code of a prompt's attention depends on"""
  target: Target
  pages: Pages
  tokens: int     # T
  heads: int      # H
  latent: int     # L
  head_dim: int   # numbers of a head of q; the last R are rotated
  scale: float    # of the scores
  @classmethod
  def of(cls, target:Target, q_latent:Tensor, q:Tensor, cache:Tensor, step:Step, scale:float, *own:int) -> Self:
    """own: the fields that a form has besides"""
    tokens, heads, latent = q_latent.shape
    return cls(target, Pages.of(cache, step, latent), tokens, heads, latent, q.shape[1] // heads, scale, *own)
  @property
  def dim(self) -> int: return self.pages.dim

  # a block has STRIP tokens: of several prompts a strip, which is a sequence
  def first_position(self, buffers:dict[str, UOp], block:UOp) -> UOp:
    """That of the prompt's first token, or the strip's"""
    return self.pages.position(buffers, block * STRIP if self.pages.sequences > 1 else 0)
  def from_first(self, block:UOp, row:UOp|int) -> UOp|int:
    """How far a row of a block is from there; of the last token, where there is none"""
    return row if self.pages.sequences > 1 else (block * STRIP + row).minimum(self.tokens - 1)
  def page(self, buffers:dict[str, UOp], block:UOp, position:UOp) -> UOp:
    return self.pages.page(buffers, position, block if self.pages.sequences > 1 else 0)

def mla_prefill(target:Target, q_latent:Tensor, q:Tensor, cache:Tensor, step:Step, scale:float) -> Tensor:
  """q_latent: (T, H, L); q: (T, H·head_dim), each head's last R numbers rotated; cache: half (C, L+R), with the step's tokens written
  -> half (T, H, L), softmax(q·k·scale)·v, a token attending to the positions up to its own"""
  shape = PrefillLaunch.of(target, q_latent, q, cache, step, scale)
  def body(buffers:dict[str, UOp]) -> list[UOp]: return prefill_kernel(shape, buffers)
  return prefill_launch("mla_prefill", shape, q_latent, q, cache, step, body)

def prefill_launch(name:str, shape:PrefillLaunch, q_latent:Tensor, q:Tensor, cache:Tensor, step:Step,
                   body:Callable[[dict[str, UOp]], list[UOp]]) -> Tensor:
  """What all kernels of a prompt's attention have alike: name, the kernel's, to which its shape is added; body: a block's stores, given its buffers;
  the rest, and what is returned, as mla_prefill's"""
  outs = {"context": empty(cache, shape.tokens, shape.heads, shape.latent, dtype=dtypes.half)}
  ins = {"q_latent": q_latent, "q": q, "cache": cache, "start": step.start, "tables": step.tables}
  return launch(f"{name}_{shape.tokens}_{shape.heads}_{shape.latent}_{shape.dim - shape.latent}", outs, ins, body, cache.nbytes())[0]

def prefill_kernel(shape:PrefillLaunch, buffers:dict[str, UOp]) -> list[UOp]:
  """A block's stores.
    queries = the lane's fragments, in registers; row_max, weight_sum, sums = MASKED_SCORE, 0, 0
    for each 32 positions up to the block's last token:
      partial scores = queries · keys, over the warp's quarter of the numbers -> shared memory
      scores = scale · log2(e) · Σ of the four; MASKED_SCORE behind a token's own position
      rescale, row_max = 2^(row_max - max(row_max, scores)), max(row_max, scores)
      weights = 2^(scores - row_max); weight_sum = weight_sum · rescale + Σ weights
      sums = sums · rescale + weights · values, over the warp's quarter of the latent numbers
    context = sums / weight_sum"""
  thread = PrefillThread(shape, buffers)
  queries = thread.load_queries()
  state = PrefillState.initial(thread.tiles, len(thread.tile_rows), (thread.groups, NEIGHBOURS, thread.mma.counts[2]))
  step = UOp.range(thread.last_position() // STEP_POSITIONS + 1, 0)
  at, following = thread.step(step)
  shared = thread.share_scores([thread.partial_scores(queries, at, column) for column in range(STEP_POSITIONS // thread.mma.N)], following)
  weights, rescales, updates = [], [], [thread.ahead.update(step, at.page, following)]   # the first two by tile
  for tile in range(thread.tiles):
    tile_weights, tile_rescales, stores = thread.softmax(state.after(step), tile, thread.scores(shared, tile, at.start))
    weights.append(tile_weights)
    rescales.append(tile_rescales)
    updates += stores
  for group in range(thread.groups):
    for neighbour in range(NEIGHBOURS): updates += thread.update_sums(state.after(step), (group, neighbour), weights, rescales, at)
  return thread.store_context(state.after(UOp.group(*updates).end(step)))

class PrefillStep(NamedTuple):
  """A step of the loop"""
  start: UOp   # its first position
  page: UOp

@dataclass(frozen=True)
class PrefillState:
  """A lane's registers of the online softmax: row_max and weight_sum of its rows of each product over tokens (a tile), and its weighted sums"""
  registers: UOp
  tiles: int
  rows: int                          # of a tile
  sums_shape: tuple[int, int, int]   # of a tile: groups, neighbours, elements of a product

  @staticmethod
  def initial(tiles:int, rows:int, sums_shape:tuple[int, int, int]) -> PrefillState:
    groups, neighbours, elements = sums_shape
    registers = UOp.placeholder((tiles * (2 * rows + groups * neighbours * elements),), dtypes.float, slot=0, addrspace=AddrSpace.REG)
    stores = [registers[i].store(MASKED_SCORE if i < tiles * rows else 0.0) for i in range(registers.shape[0])]
    return PrefillState(registers.after(UOp.group(*stores)), tiles, rows, sums_shape)

  def after(self, event:UOp) -> PrefillState: return replace(self, registers=self.registers.after(event))
  def row_max(self, tile:int, row:int) -> UOp: return self.registers[tile * self.rows + row]
  def weight_sum(self, tile:int, row:int) -> UOp: return self.registers[self.tiles * self.rows + tile * self.rows + row]
  def weighted_sum(self, tile:int, place:tuple[int, int], element:int) -> UOp:
    groups, neighbours, elements = self.sums_shape
    group, neighbour = place
    return self.registers[2 * self.tiles * self.rows + ((tile * groups + group) * neighbours + neighbour) * elements + element]

class PrefillThread:
  """A thread of mla_prefill. A tile is a product's tokens. A slab is 16 numbers of a row, or 16 positions: `parts` products. tile_rows: the
  different rows of a tile that a lane has elements of."""
  def __init__(self, shape:PrefillLaunch, buffers:dict[str, UOp]):
    assert shape.target.mma is not None
    self.shape, self.buffers, self.mma = shape, buffers, shape.target.mma
    lanes = shape.target.lanes
    self.tiles, self.parts, self.slabs = BLOCK_TOKENS // self.mma.M, SLAB // self.mma.K, shape.dim // SLAB
    self.groups = shape.latent // (WARPS * NEIGHBOURS * self.mma.N)
    self.head, self.block = UOp.special(shape.heads, "gidx0"), block_of_tokens(shape.tokens, BLOCK_TOKENS)
    thread = UOp.special(WARPS * lanes, "lidx0")
    self.warp, self.lane = thread // lanes, thread % lanes
    self.first_latent = self.warp * (shape.latent // WARPS)
    self.first_position = shape.first_position(buffers, self.block)
    self.ahead = PageAhead(shape.page(buffers, self.block, UOp.const(0)), slot=1)
    self.own_slabs = [i * WARPS + self.warp for i in range(-(-self.slabs // WARPS))]
    self.places_a, self.places_b, self.places_c = ([place(self.lane, i) for i in range(count)]
                                                   for place, count in zip((self.mma.a, self.mma.b, self.mma.c), self.mma.counts))
    self.tile_rows = list(dict.fromkeys(row for row, _ in self.places_a))
    def row_of(lane:int) -> UOp: return self.mma.a(UOp.const(lane), 0)[0].simplify()
    self.partners = [distance for distance in (1, 2, 4, 8, 16) if row_of(distance) is row_of(0)]   # lanes of the same row are so far apart

  # ---- where things are ----

  def token(self, row:UOp) -> UOp:
    """Of a row of the block's tokens; the last token, where there is none"""
    return (self.block * BLOCK_TOKENS + row).minimum(self.shape.tokens - 1)

  def last_position(self) -> UOp:
    """Of the block's tokens"""
    return self.first_position + self.shape.from_first(self.block, BLOCK_TOKENS - 1)

  def step(self, step:UOp) -> tuple[PrefillStep, UOp]:
    """A step of the loop, and the page of the next one"""
    start = step * STEP_POSITIONS
    following = self.shape.page(self.buffers, self.block, start + STEP_POSITIONS)
    return PrefillStep(start, self.ahead.read(step)), following

  def load_row(self, at:PrefillStep, position:int|UOp, number:UOp, inside:UOp|None=None) -> UOp:
    """A number of the row of a step's position. Rows behind the last token's are some of its page, or page 0's: finite, and of no weight"""
    return self.buffers["cache"][gated(self.shape.pages.row(at.page, at.start + position) + number, inside)].load()

  def latent_index(self, first:UOp, place:tuple[int, int], column:UOp) -> UOp:
    """Of a product's column, where `first` is the warp's first latent number. A lane's numbers of the products (group, 0 … 3) are neighbours."""
    group, neighbour = place
    return first + (group * self.mma.N + column) * NEIGHBOURS + neighbour

  def over_row(self, value:UOp, op:Callable[[UOp, UOp], UOp]) -> UOp:
    """op over the lanes of the same rows, in every one of them"""
    for distance in self.partners: value = op(value, shuffle(self.shape.target, value, distance))
    return value

  # ---- the phases ----

  def load_queries(self) -> list[list[list[UOp]]]:
    """By product of the warp's slabs and tile: the lane's elements of a (tokens, numbers)"""
    return [[[self.load_query(tile * self.mma.M + row, slab, depth_of(self.mma, part, depth)) for row, depth in self.places_a]
             for tile in range(self.tiles)] for slab in self.own_slabs for part in range(self.parts)]

  def load_query(self, row:UOp, slab:UOp, number:UOp) -> UOp:
    """A number of a slab of a token's query [q_latent | rotated part], half; 0 behind its last slab"""
    shape, token, first = self.shape, self.token(row), slab * SLAB
    latent = self.buffers["q_latent"][((token * shape.heads + self.head) * shape.latent + first + number).valid(first < shape.latent)].load()
    index = (token * shape.heads + self.head + 1) * shape.head_dim - shape.dim + first + number
    rotated = self.buffers["q"][index.valid((slab < self.slabs) & (first >= shape.latent))].load()
    return latent.cast(dtypes.half) + rotated.cast(dtypes.half)   # one of them is 0

  def partial_scores(self, queries:list[list[list[UOp]]], at:PrefillStep, column:int) -> list[list[UOp]]:
    """By tile: the lane's elements of c (tokens, positions), over the warp's quarter of the numbers, for a product's positions"""
    sums = [[UOp.const(0.0, dtypes.float)] * self.mma.counts[2] for _ in range(self.tiles)]
    for i, slab in enumerate(self.own_slabs):
      inside = slab < self.slabs if self.slabs % WARPS else None
      for part in range(self.parts):
        keys = [self.load_row(at, column * self.mma.N + position, slab * SLAB + depth_of(self.mma, part, depth), inside)
                for depth, position in self.places_b]
        sums = [self.mma(query, keys, score) for query, score in zip(queries[i * self.parts + part], sums)]
    return sums

  def share_scores(self, partial_scores:list[list[list[UOp]]], following:UOp) -> UOp:
    """Partial scores (by column of positions, tile and element) in shared memory behind a barrier, (warps, tokens, SCORES_PITCH). The next step's
    page is loaded before it."""
    scores = local(WARPS * BLOCK_TOKENS * SCORES_PITCH, dtypes.float, 0)
    stores = []
    for column, tiles in enumerate(partial_scores):
      for tile, elements in enumerate(tiles):
        for value, (row, position) in zip(elements, self.places_c):
          token = self.warp * BLOCK_TOKENS + tile * self.mma.M + row
          stores.append(scores[token * SCORES_PITCH + column * self.mma.N + position].store(value))
    return scores.after(UOp(Ops.BARRIER, src=(*stores, following)))

  def scores(self, shared:UOp, tile:int, start:UOp) -> list[list[UOp]]:
    """By product of the step's positions: the lane's elements of a (tokens, positions), in base 2"""
    scores = []
    for slab in range(STEP_POSITIONS // SLAB):
      for part in range(self.parts):
        elements = []
        for row, depth in self.places_a:
          position = slab * SLAB + depth_of(self.mma, part, depth)
          tokens = [warp * BLOCK_TOKENS + tile * self.mma.M + row for warp in range(WARPS)]
          score = total([shared[token * SCORES_PITCH + position].load() for token in tokens], UOp.add) * (self.shape.scale * LOG2_E)
          is_seen = start + position <= self.first_position + self.shape.from_first(self.block, tile * self.mma.M + row)
          elements.append(is_seen.where(score, MASKED_SCORE))
        scores.append(elements)
    return scores

  def of_row(self, elements:list[list[UOp]], row:UOp) -> list[UOp]:
    """Those of the lane's elements of a, of all products, that are in a row of the tile"""
    return [value for product in elements for value, (place, _) in zip(product, self.places_a) if place is row]

  def softmax(self, state:PrefillState, tile:int, scores:list[list[UOp]]) -> tuple[list[list[UOp]], list[UOp], list[UOp]]:
    """(weights as half elements of a, rescale by row, stores) of a tile. row_max is that of all lanes of a row, weight_sum the lane's own."""
    row_max:dict[UOp, UOp] = {}
    rescales, stores = [], []
    for i, row in enumerate(self.tile_rows):
      old = state.row_max(tile, i).load()
      row_max[row] = self.over_row(total(self.of_row(scores, row), UOp.maximum), UOp.maximum).maximum(old)
      rescales.append((old - row_max[row]).exp2())
      stores.append(state.row_max(tile, i).store(row_max[row]))
    weights = [[(score - row_max[row]).exp2() for score, (row, _) in zip(product, self.places_a)] for product in scores]
    for i, row in enumerate(self.tile_rows):
      weight_sum = state.weight_sum(tile, i)
      stores.append(weight_sum.store(weight_sum.load() * rescales[i] + total(self.of_row(weights, row), UOp.add)))
    return [[weight.cast(dtypes.half) for weight in product] for product in weights], rescales, stores

  def update_sums(self, state:PrefillState, place:tuple[int, int], weights:list[list[list[UOp]]], rescales:list[list[UOp]],
                  at:PrefillStep) -> list[UOp]:
    """The stores of the weighted sums of a product's latent numbers, in all tiles"""
    sums = [[state.weighted_sum(tile, place, i).load() * rescales[tile][self.tile_rows.index(row)] for i, (row, _) in enumerate(self.places_c)]
            for tile in range(self.tiles)]
    for slab in range(STEP_POSITIONS // SLAB):
      for part in range(self.parts):
        values = [self.load_row(at, slab * SLAB + depth_of(self.mma, part, depth), self.latent_index(self.first_latent, place, column))
                  for depth, column in self.places_b]
        sums = [self.mma(weights[tile][slab * self.parts + part], values, sums[tile]) for tile in range(self.tiles)]
    return [state.weighted_sum(tile, place, i).store(value) for tile in range(self.tiles) for i, value in enumerate(sums[tile])]

  def store_context(self, state:PrefillState) -> list[UOp]:
    """The stores of the lane's weighted sums, over the sum of weights of all lanes of the row"""
    stores = []
    for tile in range(self.tiles):
      inverses = [1.0 / self.over_row(state.weight_sum(tile, i).load(), UOp.add) for i in range(len(self.tile_rows))]
      for i, (row, column) in enumerate(self.places_c):
        token = self.block * BLOCK_TOKENS + tile * self.mma.M + row
        exists = None if self.shape.tokens % BLOCK_TOKENS == 0 else token < self.shape.tokens
        inverse = inverses[self.tile_rows.index(row)]
        first = (token * self.shape.heads + self.head) * self.shape.latent + self.first_latent
        for group in range(self.groups):
          for neighbour in range(NEIGHBOURS):
            index = self.latent_index(first, (group, neighbour), column)
            value = state.weighted_sum(tile, (group, neighbour), i).load() * inverse
            stores.append(self.buffers["context"][gated(index, exists)].store(value.cast(dtypes.half)))
    return stores

"""Attention of many tokens over keys and values of their own for every head, by tensor cores: what long chunks of a prompt take.

  heads = softmax(query · keys · scale) · values        # a position's keys and values of all heads: nn/head_rows.py

A score and a weighted value are nope + R + v products here, and 2·L + R absorbed (nn/mla_prefill_heads.py): 512 and 1088 of GLM-4.7-Flash, 320 and
1088 of DeepSeek's. To make a position's keys and values takes L·(nope + v) more, which all tokens of a chunk share.

A block takes 128 tokens of a head, a warp 16 of them: their scores, weights and sums stay in its registers. It goes along the positions 64 at a time:
their values are copied to shared memory beside the products with the keys, the next keys beside those with the values. A multiprocessor has one.
Where the last blocks would leave most of them idle, these are shared out by positions (Shares), and another launch combines their sums. On Hopper
four warps multiply together (GroupHeadThread).
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import NamedTuple
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.nn import group_walk, head_rows, warp_groups
from tinygrad.nn.intrinsics import MMA_CUDA, Target, copied, copy, group_reduce, pack_halves
from tinygrad.nn.kernel import LOG2_E, MULTIPROCESSORS, UNIT, Weight, empty, gated, launch, local, total
from tinygrad.nn.latent_cache import MASKED_SCORE, PageAhead, Pages
from tinygrad.nn.matmul import HALF_SCALE, Halves, placed
from tinygrad.nn.matrices import PIECE, MatrixThread, pitch
from tinygrad.nn.step import Step
from tinygrad.nn.warp_groups import PANEL, GroupMatrix, GroupProduct, finished, seen, started
from tinygrad.uop.ops import Ops

LEAST_MAX = MASKED_SCORE / 2 ** 16       # of a row: what is masked weighs nothing beside it, where a part has nothing else, too
MOST_PARTS = 8                           # of a block's positions
COMBINED = 4                             # numbers of a thread that combines parts
QUAD = 4                                 # lanes that share a row of a product
WARP_TOKENS = 16
MOST_SUMS = 256                          # numbers of a value, by the registers of a warp
MOST_HELD = 160                          # registers of queries, scores and sums together, where queries stay in them

@dataclass(frozen=True)
class Shares:
  """What blocks have: so many `whole` jobs, a head's tokens each; the positions of each of the `rest` are shared by so many `parts`, blocks of their
  own"""
  whole: int
  rest: int
  parts: int
  @staticmethod
  def of(jobs:int) -> Shares:
    """The blocks of a large GPU, one a multiprocessor, in rounds of the same length: those of the last one, where it has room for parts of them"""
    rest = jobs % MULTIPROCESSORS
    parts = min(MULTIPROCESSORS // rest, MOST_PARTS) if rest else 1
    return Shares(jobs, 0, 1) if parts == 1 else Shares(jobs - rest, rest, parts)
  @property
  def blocks(self) -> int: return self.whole + self.rest * self.parts

class BlockShape(NamedTuple):
  tokens: int
  positions: int   # of a step

SHAPES = BlockShape(128, 64), BlockShape(64, 64), BlockShape(64, 32)

def block_shape(target:Target, key:int, value:int) -> BlockShape|None:
  """What reads shared memory least, if it holds queries, keys and values, and registers the sums. None: they do not"""
  def fits(shape:BlockShape) -> bool:
    held = 2 * (pitch(key) * (shape.tokens + shape.positions) + pitch(value) * shape.positions)
    return held <= target.most_shared_bytes and value <= MOST_SUMS
  return next(filter(fits, SHAPES), None)

@dataclass(frozen=True)
class HeadShape:
  """What the code of the attention depends on"""
  target: Target
  pages: Pages
  tokens: int      # T
  heads: int       # H
  nope: int        # numbers of a head's key without position; R with one follow
  value: int       # … of its value
  scale: float     # of the scores
  own_tokens: int  # of a block
  positions: int   # of a step
  @property
  def made(self) -> int:
    """Numbers of a position, of all heads, see head_rows"""
    return self.heads * (self.nope + self.value)
  @property
  def shares(self) -> Shares: return Shares.of(self.heads * -(-self.tokens // self.own_tokens))
  @property
  def in_groups(self) -> bool:
    """Whether warps multiply in groups"""
    return self.target.warp_groups and self.own_tokens % warp_groups.ROWS == self.key % PANEL == self.value % PANEL == 0
  @property
  def ordered(self) -> bool:
    """Of a token's heads, see Halves"""
    return group_walk.takes(self.target, self.heads * self.value)
  def place(self, token:UOp, head:UOp, number:UOp) -> UOp: return token * (self.heads * self.value) + placed(head * self.value + number, self.ordered)
  @property
  def key(self) -> int: return self.nope + self.pages.format.rotated

def pays(tokens:int, latent:int, nope:int, value:int, shared:float) -> bool:
  """Whether so many tokens of a chunk multiply less than absorbed, however many positions there are. shared: what a product counts for of which they
  share the outcome"""
  return shared * latent * (nope + value) < tokens * (2 * latent - nope - value)

def takes(target:Target, tokens:int, k_b:Weight, v_b:Weight, rotated:int) -> bool:
  """Whether it pays, rows are whole products and shared memory suffices"""
  (_, latent, nope), value = k_b.shape, v_b.shape[1]
  shared = 1 if target.warp_groups else 1.5   # as it is stored and read; but absorbed attention has no groups of warps
  if target.mma is not MMA_CUDA or not head_rows.takes(target, k_b) or not pays(tokens, latent, nope, value, shared): return False
  return nope % UNIT == 0 and rotated % 16 == 0 and value % 16 == 0 and block_shape(target, nope + rotated, value) is not None

# ---- attention ----

def unabsorbed(target:Target, q:Tensor, rows:Tensor, k_b:Weight, v_b:Weight, step:Step, scale:float) -> Halves:
  """q: half (T, H·(nope+R)), each head's last R numbers rotated; rows: half (C, L+R), the cache with the step's tokens written; k_b: (H, L, nope);
  v_b: (H, v, L) -> (T, H·v), softmax(q·key·scale)·value, a token attending to the positions up to its own"""
  (H, L, nope), value = k_b.shape, v_b.shape[1]
  pages = Pages.of(rows, step, L)
  fitting = block_shape(target, nope + pages.format.rotated, value)
  assert fitting is not None
  made = head_rows.head_rows(target, step, rows, k_b, v_b)
  shape = HeadShape(target, pages, step.tokens, H, nope, value, scale, *fitting)
  def body(buffers:dict[str, UOp]) -> list[UOp]: return unabsorbed_kernel(shape, buffers)
  shares, heads = shape.shares, empty(q, step.tokens, H * value, dtype=dtypes.half)
  outs = {"heads": heads} if shares.whole else {}   # no kernel has a buffer that it leaves alone
  if shares.rest:
    rows_of_parts = shares.rest * shares.parts * shape.own_tokens
    outs |= {"sums": empty(q, rows_of_parts, value), "stats": empty(q, rows_of_parts, 2)}
  ins = {"q": q, "made": made, "rows": rows, "start": step.start, "tables": step.tables}
  name = f"unabsorbed_{step.tokens}_{H}_{nope}_{pages.format.rotated}_{value}"
  written = dict(zip(outs, launch(name, outs, ins, body, made.nbytes())))
  heads = written.pop("heads", heads)
  return Halves(combined(shape, heads, **written) if shares.rest else heads, 1 / HALF_SCALE, shape.ordered)

def combined(shape:HeadShape, heads:Tensor, sums:Tensor, stats:Tensor) -> Tensor:
  """The heads, with those that several blocks shared. sums: float32 (rest · parts · own tokens, v), of a part's positions; stats: float32 (…, 2), the
  row's maximum and the sum of its weights"""
  shares, own, value = shape.shares, shape.own_tokens, shape.value
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    job, row, thread = UOp.special(shares.rest, "gidx1"), UOp.special(own, "gidx0"), UOp.special(-(-value // COMBINED), "lidx0")
    rows = [(job * shares.parts + part) * own + row for part in range(shares.parts)]
    maxima, weight_sums = ([buffers["stats"][row * 2 + i].load() for row in rows] for i in range(2))
    row_max = total(maxima, UOp.maximum)
    shifts = [((of_part - row_max) * (shape.scale * LOG2_E)).exp2() for of_part in maxima]
    inverse = 1.0 / total([shift * weight_sum for shift, weight_sum in zip(shifts, weight_sums)], UOp.add)
    head, block = job_of(shape, shares.whole + job)
    token, stores = block * own + row, []
    for i in range(COMBINED):
      number = thread * COMBINED + i
      of_parts = [buffers["sums"][row * value + number].load() * shift for row, shift in zip(rows, shifts)]
      place = gated(shape.place(token, head, number), None if shape.tokens % own == 0 else token < shape.tokens)
      stores.append(buffers["heads"][place].store((total(of_parts, UOp.add) * inverse).cast(dtypes.half)))
    return stores
  name = f"combined_{shape.tokens}_{shape.heads}_{value}_{shares.rest}_{shares.parts}"
  return launch(name, {"heads": heads}, {"sums": sums, "stats": stats}, body, sums.nbytes())[0]

def job_of(shape:HeadShape, number:UOp) -> tuple[UOp, UOp]:
  """(head, block of tokens) of a job: those that read the most positions come first"""
  count = -(-shape.tokens // shape.own_tokens)
  return number % shape.heads, count - 1 - number // shape.heads

def unabsorbed_kernel(shape:HeadShape, buffers:dict[str, UOp]) -> list[UOp]:
  """A block's stores.
    queries -> shared memory; the first 64 keys begin their way there
    row_max, weight_sum, sums = LEAST_MAX, 0, 0
    for each 64 positions up to the block's last token:
      wait for their keys; barrier; their values begin their way
      scores = queries · keys; MASKED_SCORE behind a token's own position
      rescale, row_max = 2^(row_max - max(row_max, scores)), max(row_max, scores)      # in base 2, of scale · scores
      weights = 2^(scores - row_max); weight_sum = weight_sum · rescale + Σ weights
      wait for the values; barrier; the next keys begin their way
      sums = sums · rescale + weights · values
    heads = sums / weight_sum, or sums, row_max and weight_sum of a part"""
  thread = (GroupHeadThread if shape.in_groups else HeadThread)(shape, buffers)
  first = thread.copy_keys(thread.keys.after(thread.hold_queries()), thread.first_step, thread.first_page)
  state, sums = thread.initial_state(), thread.initial_sums()
  turn = UOp.range(thread.last_step - thread.first_step, 0)
  step = thread.first_step + turn
  have_keys = thread.wait(turn, step, first)
  begun = thread.copy_values(thread.values.after(have_keys), step)
  scores, multiplied = thread.scores(thread.queries.after(have_keys, begun), thread.keys.after(have_keys, begun), turn)
  page = thread.ahead.read(turn)
  following = thread.page_of(step + 2)
  softmax = thread.softmax(state.after(turn), scores, step)
  have_values = thread.wait(turn, step + 1, multiplied, following)
  begun = thread.copy_keys(thread.keys.after(have_values), step + 1, page)
  updated = thread.update_sums(sums.after(turn), softmax, thread.values.after(have_values, begun))
  done = UOp.group(updated, thread.ahead.update(turn, page, following), *softmax.stores).end(turn)
  return thread.store(sums.after(done), state.after(done))

class Rows(NamedTuple):
  """`count` rows of a buffer, `width` numbers each, from the index `first` on, one every `pitch`: numbers from `to` on of rows of a matrix in shared
  memory that are `shared_width` long. last: the last that there is, others are copied from it"""
  buffer: UOp
  first: UOp
  pitch: int
  count: int
  width: int
  shared_width: int
  to: int = 0
  last: UOp|None = None

class HeadSoftmax(NamedTuple):
  """A step's: the words of weights that tensor cores take, by 16 positions; what the sums of the lane's rows are multiplied by; its stores"""
  words: list[list[UOp]]
  rescales: list[UOp]
  stores: list[UOp]

class HeadThread(MatrixThread):
  """A thread of the attention. A lane has of two rows of its warp's 16, tokens, two of each eight positions or numbers."""
  def __init__(self, shape:HeadShape, buffers:dict[str, UOp]):
    self.threads = shape.own_tokens // WARP_TOKENS * 32
    super().__init__(shape.target, self.threads)
    self.shape, self.buffers = shape, buffers
    shares, number = shape.shares, UOp.special(shape.shares.blocks, "gidx0")
    self.part_number = (number - shares.whole).maximum(0)   # of those that are parts
    self.is_part = number >= shares.whole
    self.head, self.block = job_of(shape, number.minimum(shares.whole) + self.part_number // shares.parts if shares.rest else number)
    self.first_row = self.warp * WARP_TOKENS
    self.first_position = shape.pages.position(buffers)
    self.queries = local(self.room(shape.own_tokens, shape.key), dtypes.half, 0)
    self.keys = local(self.room(shape.positions, shape.key), dtypes.half, 1)
    self.values = local(self.room(shape.positions, shape.value), dtypes.half, 2)
    steps = self.last_position() // shape.positions + 1
    self.first_step, self.last_step = UOp.const(0), steps
    if shares.rest:
      part = self.part_number % shares.parts
      self.first_step, self.last_step = (self.is_part.where(steps * end // shares.parts, whole) for end, whole in ((part, 0), (part + 1, steps)))
    self.first_page = self.page_of(self.first_step)
    self.ahead = PageAhead(self.page_of(self.first_step + 1), slot=0)

  # ---- where things are ----

  def room(self, rows:int, width:int) -> int:
    """Halves of a matrix in shared memory"""
    return rows * pitch(width)
  def place(self, rows:Rows, row:UOp, number:UOp) -> UOp:
    """Of a number of a row in its matrix"""
    return row * pitch(rows.shared_width) + number
  def token(self, row:UOp) -> UOp:
    """Of a row of the block; the last token, where there is none"""
    return (self.block * self.shape.own_tokens + row).minimum(self.shape.tokens - 1)
  def own_row(self, number:int) -> UOp:
    """Of the lane's two"""
    return self.first_row + self.lane // QUAD + number * 8
  def last_position(self) -> UOp:
    """Of the block's tokens"""
    return self.first_position + self.token(UOp.const(self.shape.own_tokens - 1))
  def page_of(self, step:UOp) -> UOp: return self.shape.pages.page(self.buffers, step * self.shape.positions)

  # ---- copies ----

  def copy_rows(self, shared:UOp, rows:Rows, slot:int) -> UOp:
    """The store behind the beginning of their copies"""
    zeros, per_row = self.registers(slot), rows.width // PIECE
    for start in range(0, rows.count * per_row, self.threads):
      piece = self.thread + start
      inside = None if start + self.threads <= rows.count * per_row else piece < rows.count * per_row
      row, number = piece // per_row, piece % per_row * PIECE
      source = rows.first + (row if rows.last is None else row.minimum(rows.last)) * rows.pitch + number
      at = rows.buffer[source if inside is None else inside.where(source, rows.first)]
      begun = zeros[4].store(copy(self.target, shared[self.place(rows, row, number + rows.to)], at, inside))
      zeros = zeros.after(begun)
    return begun

  def copy_queries(self) -> UOp:
    shape, first = self.shape, self.block * self.shape.own_tokens
    head = (first * shape.heads + self.head) * shape.key
    rows = Rows(self.buffers["q"], head, shape.heads * shape.key, shape.own_tokens, shape.key, shape.key, last=shape.tokens - 1 - first)
    return self.copy_rows(self.queries, rows, 1)
  def hold_queries(self) -> UOp:
    """The store behind all that is done with queries before the first step"""
    return self.copy_queries()
  def copy_keys(self, keys:UOp, step:UOp, page:UOp) -> UOp:
    """Of a step's positions; of the last ones that there are, behind them"""
    shape, pages = self.shape, self.shape.pages
    position = (step * shape.positions).minimum(pages.capacity - shape.positions)
    own = Rows(self.buffers["made"], position * shape.made + self.head * shape.nope, shape.made, shape.positions, shape.nope, shape.key)
    begun = self.copy_rows(keys, own, 6)
    row = pages.row(page, position) + pages.format.latent
    rotated = Rows(self.buffers["rows"], row, pages.dim, shape.positions, pages.format.rotated, shape.key, shape.nope)
    return self.copy_rows(keys.after(begun), rotated, 6)
  def copy_values(self, values:UOp, step:UOp) -> UOp:
    shape = self.shape
    first = step * shape.positions * shape.made + shape.heads * shape.nope + self.head * shape.value
    return self.copy_rows(values, Rows(self.buffers["made"], first, shape.made, shape.positions, shape.value, shape.value), 7)
  def wait(self, turn:UOp, at:UOp, *before:UOp) -> UOp:
    """The barrier behind which all have what was copied, and `before` is done. at: a number that no other wait of the turn has"""
    zeros = self.registers(8, turn, *before)
    return UOp(Ops.BARRIER, src=(zeros[4].store(copied(self.target, at.cast(dtypes.int))),))

  # ---- registers ----

  def initial_state(self) -> UOp:
    """row_max, then weight_sum, of the lane's two rows. weight_sum is of the lane's positions"""
    state = UOp.placeholder((4,), dtypes.float, slot=2, addrspace=AddrSpace.REG)
    return state.after(UOp.group(*[state[i].store(LEAST_MAX if i < 2 else 0.0) for i in range(4)]))
  def initial_sums(self) -> UOp:
    """By eight numbers of the value, and one behind them that takes the zeros that are stored behind statements"""
    count = self.shape.value // 8 * 4
    sums = UOp.placeholder((count + 1,), dtypes.float, slot=3, addrspace=AddrSpace.REG)
    return sums.after(UOp.group(*[sums[i].store(0.0) for i in range(count)]))

  # ---- a step ----

  def scores(self, queries:UOp, keys:UOp, turn:UOp) -> tuple[UOp, UOp]:
    """(registers of the lane's elements of c by eight positions; the store behind them)"""
    count = self.shape.positions // 8 * 4
    scores = UOp.placeholder((count + 1,), dtypes.float, slot=5, addrspace=AddrSpace.REG).after(turn)
    done = self.add_scores(scores, queries, keys, UOp.group(*[scores[i].store(0.0) for i in range(count)]))
    return scores.after(done), done
  def add_scores(self, scores:UOp, queries:UOp, keys:UOp, done:UOp) -> UOp:
    """The store behind a step's products with the keys"""
    shape = self.shape
    for number in range(0, shape.key, 16):
      query = self.words(queries, self.a_place(self.first_row, number, pitch(shape.key)), self.registers(9, done))
      for position in range(0, shape.positions, 16):
        key = self.words(keys, self.b_place(position, number, pitch(shape.key)), self.registers(10, done))
        done = self.accumulate(scores, position // 8 * 4, query, key, done)
    return done

  def softmax(self, state:UOp, scores:UOp, step:UOp) -> HeadSoftmax:
    shape, tiles, factor = self.shape, self.shape.positions // 8, self.shape.scale * LOG2_E
    weights:dict[tuple[int, int, int], UOp] = {}
    rescales, stores = [], []
    for half in range(2):
      last, found = self.first_position + self.token(self.own_row(half)) - step * shape.positions, {}
      for tile in range(tiles):
        for i in range(2):
          position = tile * 8 + self.lane % QUAD * 2 + i
          found[tile, i] = (position <= last).where(scores[tile * 4 + half * 2 + i].load(), MASKED_SCORE)
      old, weight_sum = state[half].load(), state[2 + half]
      row_max = old.maximum(group_reduce(self.target, total([*found.values()], UOp.maximum), QUAD, UOp.maximum))
      rescale, shift = ((old - row_max) * factor).exp2(), row_max * factor
      own = {place: (score * factor - shift).exp2() for place, score in found.items()}
      weights |= {(tile, half, i): weight for (tile, i), weight in own.items()}
      rescales.append(rescale)
      stores += [state[half].store(row_max), weight_sum.store(weight_sum.load() * rescale + total([*own.values()], UOp.add))]
    words = [[pack_halves(self.target, weights[tile + right, half, 0], weights[tile + right, half, 1]) for right in range(2) for half in range(2)]
             for tile in range(0, tiles, 2)]
    return HeadSoftmax(words, rescales, stores)

  def update_sums(self, sums:UOp, softmax:HeadSoftmax, values:UOp) -> UOp:
    """The store behind the update of the lane's weighted sums"""
    count = self.shape.value // 8 * 4
    done = UOp.group(*[sums[i].store(sums[i].load() * softmax.rescales[i // 2 % 2]) for i in range(count)])
    return self.add_values(sums, softmax.words, values, done)
  def add_values(self, sums:UOp, of_weights:list[list[UOp]], values:UOp, done:UOp) -> UOp:
    """The store behind a step's products with the values"""
    shape = self.shape
    for depth, words in enumerate(of_weights):
      for number in range(0, shape.value, 16):
        # positions are the inner numbers here: the first two matrices are those of a product
        of_values = self.words(values, self.a_place(depth * 16, number, pitch(shape.value)), self.registers(11, done), transposed=True)
        done = self.accumulate(sums, number // 8 * 4, words, of_values, done)
    return done

  # ---- behind the loop ----

  def store(self, sums:UOp, state:UOp) -> list[UOp]:
    """The stores of the heads, or of a part's sums and of its rows' state"""
    shares = self.shape.shares
    if not shares.rest: return self.store_heads(sums, state, None)
    of_parts = self.store_part(sums, state, self.is_part)
    return of_parts if not shares.whole else of_parts + self.store_heads(sums, state, ~self.is_part)
  def store_part(self, sums:UOp, state:UOp, inside:UOp) -> list[UOp]:
    shape, stores = self.shape, []
    for half in range(2):
      row = self.part_number * shape.own_tokens + self.own_row(half)
      weight_sum = group_reduce(self.target, state[2 + half].load(), QUAD, UOp.add)
      is_first = inside & (self.lane % QUAD).eq(0)
      stores += [self.buffers["stats"][(row * 2 + i).valid(is_first)].store(value) for i, value in enumerate((state[half].load(), weight_sum))]
      for number in range(0, shape.value, 8):
        for i in range(2):
          index = row * shape.value + number + self.lane % QUAD * 2 + i
          stores.append(self.buffers["sums"][index.valid(inside)].store(sums[number // 8 * 4 + half * 2 + i].load()))
    return stores
  def store_heads(self, sums:UOp, state:UOp, inside:UOp|None) -> list[UOp]:
    shape, stores = self.shape, []
    for half in range(2):
      inverse = 1.0 / group_reduce(self.target, state[2 + half].load(), QUAD, UOp.add)
      token = self.block * shape.own_tokens + self.own_row(half)
      exists = None if shape.tokens % shape.own_tokens == 0 else token < shape.tokens
      for number in range(0, shape.value, 8):
        for i in range(2):
          index = shape.place(token, self.head, number + self.lane % QUAD * 2 + i)
          value = sums[number // 8 * 4 + half * 2 + i].load() * inverse
          stores.append(self.buffers["heads"][gated(index, exists, inside)].store(value.cast(dtypes.half)))
    return stores

class GroupHeadThread(HeadThread):
  """… where four warps multiply together. Queries that have room in registers are read in shared memory once"""
  @property
  def holds_queries(self) -> bool: return self.shape.key // 4 + self.shape.value // 2 + self.shape.positions // 2 <= MOST_HELD
  def hold_queries(self) -> UOp:
    begun = super().hold_queries()
    if self.holds_queries:
      queries = self.queries.after(self.wait(begun, UOp.const(0)))
      row, number = self.first_row + self.matrix % 2 * 8 + self.in_matrix, self.matrix // 2 * PIECE
      self.held = [self.words(queries, warp_groups.place(self.shape.own_tokens, row, number + first), self.registers(20 + first // 16))
                   for first in range(0, self.shape.key, 16)]
    return begun
  def room(self, rows:int, width:int) -> int: return rows * width
  def place(self, rows:Rows, row:UOp, number:UOp) -> UOp: return warp_groups.place(rows.count, row, number)
  def wait(self, turn:UOp, at:UOp, *before:UOp) -> UOp: return seen(self.target, super().wait(turn, at, *before), self.registers(12))
  def add_scores(self, scores:UOp, queries:UOp, keys:UOp, done:UOp) -> UOp:
    shape, own, products = self.shape, scores.after(done), []
    for number in range(0, shape.key, 16):
      row, key = self.warp // warp_groups.WARPS * warp_groups.ROWS, GroupMatrix(keys[warp_groups.begin(shape.positions, 0, number)])
      query = self.held[number // 16] if self.holds_queries else GroupMatrix(queries[warp_groups.begin(shape.own_tokens, row, number)])
      products.append(GroupProduct(query, key, [own[i] for i in range(scores.shape[0] - 1)]))
    return finished(self.target, scores, started(self.target, products, scores, done))
  def add_values(self, sums:UOp, of_weights:list[list[UOp]], values:UOp, done:UOp) -> UOp:
    own = sums.after(done)
    products = [GroupProduct(words, GroupMatrix(values[warp_groups.begin(0, depth * 16, 0)], self.shape.positions),
                             [own[i] for i in range(sums.shape[0] - 1)]) for depth, words in enumerate(of_weights)]
    return finished(self.target, sums, started(self.target, products, sums, done))

"""The latent cache: in which row of it a position lies, how a row lies in memory, and how a token's row is written.

A row is [RMSNorm(kv[:L]) | RoPE(kv[L:])]. It is the key of a position for every head, and its first L numbers are the value.
The cache is a pool of pages of PAGE rows, of all sequences. A sequence's table has the page of each PAGE of its positions (nn/step.py).
A row's numbers are floats, or codes of 8 bits with a scale for each group of neighbours (RowFormat).
"""
from __future__ import annotations
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.nn.intrinsics import Target, byte_perm, fma_halves, group_reduce, word
from tinygrad.nn.kernel import BlockSum, empty, launch, position_of_token, rotated, sum_in_order
from tinygrad.nn.step import PAGE, Step
from tinygrad.uop.ops import Ops

MASKED_SCORE = -1e30   # of a position that a token does not attend to; finite, so that the difference of two scores is a number

# ---- a row in memory ----

LATENT_GROUP, ROTATED_GROUP = 64, 16   # numbers that have a scale together: what a warp writes, and what an inner product of tensor cores takes
ZERO, LARGEST = 128, 127               # number = (code - ZERO) · scale; of the largest of a group, code - ZERO is ± LARGEST
LEAST = 1e-30                          # a group whose largest is not more is all zeros
ALIGNMENT = 8                          # entries, 16 bytes, that a row of codes is whole ones of
CODES = dtypes.uint16                  # an entry of such a row: two codes, the first in the low byte; behind all codes, a half, a group's scale
# A code set into the mantissa of the half 1024 is 1024 + code
MANTISSAS, ONES, TO_ZERO = 0x64646464, 0x3c003c00, 0xe480e480   # each byte; halves: 1; -(1024 + ZERO)

@dataclass(frozen=True)
class RowFormat:
  """How a row lies in the cache's tensor: L+R floats or, `coded`, entries of CODES, so that 8 bits are a number's"""
  latent: int    # L
  rotated: int   # R
  coded: bool = False

  @staticmethod
  def of(cache:Tensor, latent:int) -> RowFormat:
    """Of the cache's rows. latent: L"""
    if cache.dtype is not CODES: return RowFormat(latent, cache.shape[1] - latent)
    formats = (RowFormat(latent, rotated, True) for rotated in range(ROTATED_GROUP, 2 * cache.shape[1], ROTATED_GROUP))
    return next(row for row in formats if row.entries == cache.shape[1])   # they grow by more than what alignment adds

  @staticmethod
  def can_be_coded(latent:int, rotated:int) -> bool:
    """Whether both parts are whole groups"""
    return latent % LATENT_GROUP == 0 and rotated % ROTATED_GROUP == 0

  @property
  def dim(self) -> int:
    """Numbers of a row"""
    return self.latent + self.rotated
  @property
  def scales(self) -> int: return self.latent // LATENT_GROUP + self.rotated // ROTATED_GROUP
  @property
  def entries(self) -> int:
    """Of the tensor, a row"""
    return -(-(self.dim // 2 + self.scales) // ALIGNMENT) * ALIGNMENT if self.coded else self.dim
  def group(self, number:UOp) -> UOp:
    """That a number of a row belongs to"""
    return (number < self.latent).where(number // LATENT_GROUP, self.latent // LATENT_GROUP + (number - self.latent) // ROTATED_GROUP)

  # in kernels; `row` is the index of its first entry
  def load(self, cache:UOp, row:UOp, number:UOp) -> UOp:
    """A number of a row, float32"""
    if not self.coded: return cache[row + number].load().cast(dtypes.float)
    code = cache[row + number // 2].load().cast(dtypes.int) >> (number % 2 * 8).cast(dtypes.int) & 255
    scale = cache[row + self.dim // 2 + self.group(number)].load().bitcast(dtypes.half)
    return (code - ZERO).cast(dtypes.float) * scale.cast(dtypes.float)

  def piece_words(self, count:int) -> int:
    """Words of memory that `count` neighbouring numbers of a group are loaded by: themselves or, of four or more, codes and two scales"""
    return count // 4 + 1 if self.coded else count // 2
  def piece(self, cache:UOp, row:UOp, number:UOp, count:int) -> list[tuple[UOp, int]]:
    """(where, how many) of these words. number: the first"""
    if not self.coded: return [(cache[row + number], count // 2)]
    return [(cache[row + number // 2], count // 4), (cache[row + self.dim // 2 + self.group(number) // 2 * 2], 1)]
  def halves(self, target:Target, words:list[UOp], number:UOp) -> list[UOp]:
    """The numbers of a piece, two halves a word"""
    if not self.coded: return words
    *codes, scales = words
    scale = ((scales >> (self.group(number) % 2 * 16).cast(dtypes.uint32)) & 0xffff) * 0x10001
    def pair(four:UOp, digits:int) -> UOp:
      value = fma_halves(target, byte_perm(target, four, word(MANTISSAS), digits), word(ONES), word(TO_ZERO))
      return fma_halves(target, value, scale, word(0))
    return [pair(four, digits) for four in codes for digits in (0x4140, 0x4342)]

  # in plain ops
  def encoded(self, rows:Tensor) -> Tensor:
    """float32 (T, dim) -> (T, entries), as they are stored; float32 where they are floats"""
    if not self.coded: return rows.cast(dtypes.float)
    codes, scales = [], []
    for part, size in zip(rows.cast(dtypes.float).split([self.latent, self.rotated], dim=1), (LATENT_GROUP, ROTATED_GROUP)):
      groups = part.reshape(rows.shape[0], -1, size)
      largest = groups.abs().max(-1, keepdim=True)
      codes.append((groups * (largest > LEAST).where(LARGEST / largest, 0) + (ZERO + 0.5)).cast(CODES).flatten(1))
      scales.append((largest * (1 / LARGEST)).cast(dtypes.half).bitcast(CODES).flatten(1))
    pairs = codes[0].cat(codes[1], dim=1).reshape(rows.shape[0], -1, 2)
    entries = (pairs[..., 0] + pairs[..., 1] * 256).cat(*scales, dim=1)
    return entries.pad(((0, 0), (0, self.entries - entries.shape[1])))
  def decoded(self, rows:Tensor) -> Tensor:
    """(…, entries) -> float32 (…, dim)"""
    if not self.coded: return rows.cast(dtypes.float)
    pairs, scales = rows[..., :self.dim // 2], rows[..., self.dim // 2:self.dim // 2 + self.scales].bitcast(dtypes.half).cast(dtypes.float)
    numbers = (pairs % 256).stack(pairs // 256, dim=-1).flatten(-2).cast(dtypes.float) - ZERO
    of_latent, of_rotated = scales.split([self.latent // LATENT_GROUP, self.rotated // ROTATED_GROUP], dim=-1)
    scale = of_latent.repeat_interleave(LATENT_GROUP, -1).cat(of_rotated.repeat_interleave(ROTATED_GROUP, -1), dim=-1)
    return numbers * scale

# ---- where rows lie ----

@dataclass(frozen=True)
class Pages:
  """Where a kernel finds rows in its flat buffers `cache` and `tables`"""
  pool: int        # pages of the cache
  table: int       # P, of a sequence
  sequences: int   # S
  format: RowFormat
  each: int = 1    # neighbouring tokens of a sequence in the step

  @staticmethod
  def of(cache:Tensor, step:Step, latent:int) -> Pages:
    sequences, table = step.tables.shape
    return Pages(cache.shape[0] // PAGE, table, sequences, RowFormat.of(cache, latent), step.each)

  @property
  def dim(self) -> int:
    """Numbers of a row"""
    return self.format.dim
  @property
  def capacity(self) -> int:
    """Positions of a sequence"""
    return self.table * PAGE

  # what is loaded is kept within its bounds: no table makes a kernel leave the cache, and tinygrad sees that 32 bits hold every index
  def position(self, buffers:dict[str, UOp], token:UOp|int=0) -> UOp:
    """Where a token of the step stands"""
    return position_of_token(buffers, token, self.sequences, self.each).maximum(0).minimum(self.capacity - 1)
  def sequence(self, token:UOp) -> UOp|int:
    """A token's"""
    return token // self.each if self.sequences > 1 else 0
  def page(self, buffers:dict[str, UOp], position:UOp, sequence:UOp|int=0) -> UOp:
    """The page of a position. It is loaded before the wait, as no kernel of a step writes a table."""
    entry = buffers["tables"][sequence * self.table + position.minimum(self.capacity - 1) // PAGE].load()
    return entry.maximum(0).minimum(self.pool - 1)
  def row(self, page:UOp, position:UOp) -> UOp:
    """The index of the first entry of a position's row"""
    return (page.cast(dtypes.weakint) * PAGE + position % PAGE) * self.format.entries

class PageAhead:
  """The page that a loop over a sequence's positions reads, in a register: the next step's is loaded a step ahead, and no row waits for it.
  slot: its own among the kernel's registers"""
  def __init__(self, first:UOp, slot:int):
    register = UOp.placeholder((1,), dtypes.int, slot=slot, addrspace=AddrSpace.REG)
    self.register = register.after(register[0].store(first))
  def read(self, step:UOp) -> UOp:
    """The page of a step of the loop"""
    return self.register.after(step)[0].load()
  def update(self, step:UOp, page:UOp, following:UOp) -> UOp:
    """The store of the next step's page. page: what `read` gave"""
    return self.register.after(step, page)[0].store(following)

# ---- writing a row ----

@dataclass(frozen=True)
class CacheRow:
  """What the code of cache_row depends on"""
  target: Target
  pages: Pages
  eps: float     # of the RMSNorm
  threads: int   # of the block
  slot: int      # of its sums in shared memory, the first
  @property
  def latent(self) -> int: return self.pages.format.latent

class RowPair(NamedTuple):
  """Two neighbouring numbers of a token's kv. `inside`: the row has them and the block writes it."""
  number: UOp           # of the first
  inside: UOp
  is_latent: UOp        # else of the rotated part
  values: list[UOp]     # float32

def cache_row(row:CacheRow, buffers:dict[str, UOp], token:UOp, thread:UOp, wait_zero:UOp, active:UOp|None=None) -> list[UOp]:
  """The stores of a block that writes a token's row. Nothing is read of the token, or written, where `active` is false.
  buffers: kv: float32 (T, L+R); norm: float32 (L,), the norm's weight; rope: see `rotated`; start, tables: of the step; cache: (C, entries)"""
  pairs = [_load_pair(row, buffers["kv"], token, (thread + start) * 2, wait_zero, active) for start in range(0, row.pages.dim // 2, row.threads)]
  inverse_rms = _inverse_rms(row, thread, pairs)
  position = row.pages.position(buffers, token)
  page = row.pages.page(buffers, position, row.pages.sequence(token))
  return [store for pair in pairs for store in _store_pair(row, buffers, position, page, pair, inverse_rms)]

def _load_pair(row:CacheRow, kv:UOp, token:UOp, number:UOp, wait_zero:UOp, active:UOp|None) -> RowPair:
  inside = number < row.pages.dim if active is None else active & (number < row.pages.dim)
  values = [kv[(token * row.pages.dim + number + i + wait_zero * 2).valid(inside)].load() for i in range(2)]
  return RowPair(number, inside, number < row.latent, values)

def _inverse_rms(row:CacheRow, thread:UOp, pairs:list[RowPair]) -> UOp:
  """1 / sqrt(mean of the squares of the latent part + eps). Each warp adds up neighbouring pairs, and these sums are added in their order: a row is
  the same bits by however many threads"""
  squares = [(pair.inside & pair.is_latent).where(pair.values[0] * pair.values[0] + pair.values[1] * pair.values[1], 0.0)
             for pair in pairs[:-(-row.latent // (2 * row.threads))]]
  sums = [BlockSum(row.target, square, thread, row.threads, row.slot + i) for i, square in enumerate(squares)]
  barrier = UOp(Ops.BARRIER, src=tuple(each.store for each in sums))
  total = sum_in_order([addend for each in sums for addend in each.warp_sums(barrier)])
  return (total * (1.0 / row.latent) + row.eps).rsqrt()

def _store_pair(row:CacheRow, buffers:dict[str, UOp], position:UOp, page:UOp, pair:RowPair, inverse_rms:UOp) -> list[UOp]:
  cache, first = buffers["cache"], row.pages.row(page, position)
  turned = rotated(buffers, (row.pages.dim - row.latent) // 2, pair.number - row.latent, pair.values, pair.inside & ~pair.is_latent, position)
  numbers = []
  for i in range(2):
    weight = buffers["norm"][(pair.number + i).valid(pair.inside & pair.is_latent)].load()
    numbers.append(pair.is_latent.where(pair.values[i] * inverse_rms * weight, turned[i]))
  if row.pages.format.coded: return _store_codes(row, cache, first, pair, numbers)
  return [cache[(first + pair.number + i).valid(pair.inside)].store(number.cast(cache.dtype)) for i, number in enumerate(numbers)]

def _store_codes(row:CacheRow, cache:UOp, first:UOp, pair:RowPair, numbers:list[UOp]) -> list[UOp]:
  """A pair's codes, and by the first pair of a group its scale. Lanes beside each other have the pairs of a group: a whole warp, of latent ones."""
  target, row_format = row.target, row.pages.format
  assert LATENT_GROUP == 2 * target.lanes
  pairs = ROTATED_GROUP // 2
  largest = group_reduce(target, reduce(UOp.maximum, [number.maximum(-number) for number in numbers]), pairs, UOp.maximum)
  largest = pair.is_latent.where(group_reduce(target, largest, target.lanes // pairs, UOp.maximum, step=pairs), largest)
  scale, inverse = (largest * (1 / LARGEST)).cast(dtypes.half), (largest > LEAST).where(LARGEST / largest, 0)
  low, high = ((number * inverse + (ZERO + 0.5)).cast(dtypes.int) for number in numbers)
  is_first = (pair.number % pair.is_latent.where(LATENT_GROUP, ROTATED_GROUP)).eq(0)
  return [cache[(first + pair.number // 2).valid(pair.inside)].store((low | high << 8).cast(CODES)),
          cache[(first + row_format.dim // 2 + row_format.group(pair.number)).valid(pair.inside & is_first)].store(scale.bitcast(CODES))]

# ---- reading rows of codes as if they were halves ----

EXPANDING_THREADS, NUMBERS_AT_ONCE = 128, 8   # of a block; of a thread

def expanded(step:Step, cache:Tensor, latent:int) -> tuple[Tensor, Step]:
  """The rows of a step's sequence up to its last token as halves, (P · PAGE, L+R), by a launch, and the step whose table finds them there; or both as
  they are, where rows are floats. A block of it has a page."""
  pages = Pages.of(cache, step, latent)
  if not pages.format.coded: return cache, step
  turns = PAGE * pages.dim // (EXPANDING_THREADS * NUMBERS_AT_ONCE)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    block, thread = UOp.special(pages.table, "gidx0"), UOp.special(EXPANDING_THREADS, "lidx0")
    page, last = pages.page(buffers, block * PAGE), pages.position(buffers, step.tokens - 1)
    turn = UOp.range((block * PAGE <= last).where(UOp.const(turns), 0), 0)
    place = (turn * EXPANDING_THREADS + thread) * NUMBERS_AT_ONCE
    row, number = pages.row(page, place // pages.dim), place % pages.dim
    numbers = [pages.format.load(buffers["cache"], row, number + i).cast(dtypes.half) for i in range(NUMBERS_AT_ONCE)]
    stores = [buffers["rows"][block * PAGE * pages.dim + place + i].store(value) for i, value in enumerate(numbers)]
    entry = buffers["table"][block.valid(thread.eq(0))].store(block.cast(dtypes.int))
    return [UOp.group(*stores).end(turn), entry]
  outs = {"rows": empty(cache, pages.capacity, pages.dim, dtype=dtypes.half), "table": empty(cache, 1, pages.table, dtype=dtypes.int32)}
  ins = {"cache": cache, "start": step.start, "tables": step.tables}
  rows, table = launch(f"expanded_rows_{step.tokens}_{pages.dim}", outs, ins, body, pages.capacity * (pages.format.entries + pages.dim) * 2)
  return rows, replace(step, tables=table)

# ---- in plain ops ----

def rows_of(step:Step) -> Tensor:
  """int32 (S, P · PAGE): the cache's row of each position of each sequence"""
  return (step.tables.unsqueeze(2) * PAGE + Tensor.arange(PAGE, dtype=dtypes.int32)).reshape(step.tables.shape[0], -1)

def write_rows(step:Step, cache:Tensor, rows:Tensor, latent:int) -> Tensor:
  """The cache with the rows of the step's tokens, float32 (T, L+R), written, and no other row touched. Several tokens may write the same row of page
  0: one of them does."""
  pages, spread = Pages.of(cache, step, latent), Device[cache.device].renderer.has_local
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    counts = (step.tokens, pages.format.entries)
    token, number = (UOp.special(count, f"gidx{i}") if spread else UOp.range(count, i) for i, count in enumerate(counts))
    position = pages.position(buffers, token)
    page = pages.page(buffers, position, pages.sequence(token))
    value = buffers["rows"][token * pages.format.entries + number].load().cast(cache.dtype)
    store = buffers["cache"][pages.row(page, position) + number].store(value)
    return [store if spread else store.end(token, number)]
  ins = {"rows": pages.format.encoded(rows), "start": step.start, "tables": step.tables}
  return launch(f"write_rows_{step.tokens}_{pages.dim}", {"cache": cache}, ins, body)[0]

def visible_rows(step:Step, cache:Tensor, latent:int) -> tuple[Tensor, Tensor]:
  """Keys by position, float32 (S, P · PAGE, L+R), of several prompts (T, …); what is added to their scores, float32 (T, P · PAGE): 0 up to the
  token's own position, -inf behind it"""
  keys = RowFormat.of(cache, latent).decoded(cache[rows_of(step)])
  if step.many_tokens and not step.one_prompt: keys = keys.repeat_interleave(step.each, dim=0)
  positions = Tensor.arange(keys.shape[1], dtype=dtypes.int32).unsqueeze(0)
  unseen = (positions <= step.positions.unsqueeze(1)).where(0.0, float("-inf"))
  return keys, unseen

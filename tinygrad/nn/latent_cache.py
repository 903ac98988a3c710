"""The latent cache (C, L+R): in which row of it a position lies, and how a token's row is written.

A row is [RMSNorm(kv[:L]) | RoPE(kv[L:])]. It is the key of a position for every head, and its first L numbers are the value.
The cache is a pool of pages of PAGE rows, of all sequences. A sequence's table has the page of each PAGE of its positions (nn/step.py).
"""
from __future__ import annotations
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.nn.intrinsics import Target
from tinygrad.nn.kernel import block_sum, launch, position_of, rotated
from tinygrad.nn.step import PAGE, Step

MASKED_SCORE = -1e30   # of a position that a token does not attend to; finite, so that the difference of two scores is a number

@dataclass(frozen=True)
class Pages:
  """Where a kernel finds rows in its flat buffers `cache` and `tables`"""
  pool: int        # pages of the cache
  table: int       # P, of a sequence
  sequences: int   # S
  dim: int         # L+R, numbers of a row

  @staticmethod
  def of(cache:Tensor, tables:Tensor) -> Pages: return Pages(cache.shape[0] // PAGE, tables.shape[1], tables.shape[0], cache.shape[1])

  @property
  def capacity(self) -> int:
    """Positions of a sequence"""
    return self.table * PAGE

  # what is loaded is kept within its bounds: no table makes a kernel leave the cache, and tinygrad sees that 32 bits hold every index
  def position(self, buffers:dict[str, UOp], token:UOp|int=0) -> UOp:
    """Where a token stands: of decoding, if there are several sequences; else of one sequence"""
    position = position_of(buffers, token) if self.sequences > 1 else position_of(buffers) + token
    return position.maximum(0).minimum(self.capacity - 1)
  def page(self, buffers:dict[str, UOp], position:UOp, sequence:UOp|int=0) -> UOp:
    """The page of a position. It is loaded before the wait, as no kernel of a step writes a table."""
    entry = buffers["tables"][sequence * self.table + position.minimum(self.capacity - 1) // PAGE].load()
    return entry.maximum(0).minimum(self.pool - 1)
  def row(self, page:UOp, position:UOp) -> UOp:
    """The index of the first number of a position's row"""
    return (page.cast(dtypes.weakint) * PAGE + position % PAGE) * self.dim

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

@dataclass(frozen=True)
class CacheRow:
  """What the code of cache_row depends on"""
  target: Target
  pages: Pages
  latent: int    # L
  eps: float     # of the RMSNorm
  threads: int   # of the block
  slot: int      # of its sums in shared memory

class RowPair(NamedTuple):
  """Two neighbouring numbers of a token's kv. `inside`: the row has them and the block writes it."""
  number: UOp           # of the first
  inside: UOp
  is_latent: UOp        # else of the rotated part
  values: list[UOp]     # float32

def cache_row(row:CacheRow, buffers:dict[str, UOp], token:UOp, thread:UOp, wait_zero:UOp, active:UOp|None=None) -> list[UOp]:
  """The stores of a block that writes a token's row. Nothing is read of the token, or written, where `active` is false.
  buffers: kv: float32 (T, L+R); norm: float32 (L,), the norm's weight; rope: see `rotated`; start, tables: of the step; cache: (C, L+R)"""
  pairs = [_load_pair(row, buffers["kv"], token, (thread + start) * 2, wait_zero, active) for start in range(0, row.pages.dim // 2, row.threads)]
  inverse_rms = _inverse_rms(row, thread, pairs)
  position = row.pages.position(buffers, token)
  page = row.pages.page(buffers, position, token if row.pages.sequences > 1 else 0)
  return [store for pair in pairs for store in _store_pair(row, buffers, position, page, pair, inverse_rms)]

def _load_pair(row:CacheRow, kv:UOp, token:UOp, number:UOp, wait_zero:UOp, active:UOp|None) -> RowPair:
  inside = number < row.pages.dim if active is None else active & (number < row.pages.dim)
  values = [kv[(token * row.pages.dim + number + i + wait_zero * 2).valid(inside)].load() for i in range(2)]
  return RowPair(number, inside, number < row.latent, values)

def _inverse_rms(row:CacheRow, thread:UOp, pairs:list[RowPair]) -> UOp:
  """1 / sqrt(mean of the squares of the latent part + eps)"""
  squares = [(pair.inside & pair.is_latent).where(pair.values[0] * pair.values[0] + pair.values[1] * pair.values[1], 0.0) for pair in pairs]
  total = block_sum(row.target, reduce(UOp.add, squares), thread, row.threads, row.slot)
  return (total * (1.0 / row.latent) + row.eps).rsqrt()

def _store_pair(row:CacheRow, buffers:dict[str, UOp], position:UOp, page:UOp, pair:RowPair, inverse_rms:UOp) -> list[UOp]:
  cache, stores = buffers["cache"], []
  turned = rotated(buffers, (row.pages.dim - row.latent) // 2, pair.number - row.latent, pair.values, pair.inside & ~pair.is_latent, position)
  for i in range(2):
    weight = buffers["norm"][(pair.number + i).valid(pair.inside & pair.is_latent)].load()
    value = pair.is_latent.where(pair.values[i] * inverse_rms * weight, turned[i])
    index = row.pages.row(page, position) + pair.number + i
    stores.append(cache[index.valid(pair.inside)].store(value.cast(cache.dtype)))
  return stores

# ---- in plain ops ----

def rows_of(step:Step) -> Tensor:
  """int32 (S, P · PAGE): the cache's row of each position of each sequence"""
  return (step.tables.unsqueeze(2) * PAGE + Tensor.arange(PAGE, dtype=dtypes.int32)).reshape(step.tables.shape[0], -1)

def write_rows(step:Step, cache:Tensor, rows:Tensor) -> Tensor:
  """The cache, (C, dim), with the rows of the step's tokens, float32 (T, dim), written, and no other row touched. Several tokens may write the same
  row of page 0: one of them does."""
  pages, spread = Pages.of(cache, step.tables), Device[cache.device].renderer.has_local
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    counts = (step.tokens, pages.dim)
    token, number = (UOp.special(count, f"gidx{i}") if spread else UOp.range(count, i) for i, count in enumerate(counts))
    position = pages.position(buffers, token)
    page = pages.page(buffers, position, token if pages.sequences > 1 else 0)
    value = buffers["rows"][token * pages.dim + number].load().cast(cache.dtype)
    store = buffers["cache"][pages.row(page, position) + number].store(value)
    return [store if spread else store.end(token, number)]
  ins = {"rows": rows.cast(dtypes.float), "start": step.start, "tables": step.tables}
  return launch(f"write_rows_{step.tokens}_{pages.dim}", {"cache": cache}, ins, body)[0]

def visible_rows(step:Step, cache:Tensor) -> tuple[Tensor, Tensor]:
  """Keys by position, float32 (S, P · PAGE, dim); what is added to their scores, float32 (T, P · PAGE): 0 up to the token's own position, -inf behind
  it"""
  keys = cache[rows_of(step)]
  positions = Tensor.arange(keys.shape[1], dtype=dtypes.int32).unsqueeze(0)
  unseen = (positions <= step.positions.unsqueeze(1)).where(0.0, float("-inf"))
  return keys.cast(dtypes.float), unseen

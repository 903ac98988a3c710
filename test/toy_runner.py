"""A runner without a device, for the engine's tests: its next token is a hash of every row of the sequence, as it finds them by the table."""
from __future__ import annotations
from collections import deque
from typing import Any
import numpy as np
from tinygrad.apps.engine import cache
from tinygrad.apps.engine.cache import Pool
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.engine.sequence import BatchRow

VOCAB = 97
WEIGHTS = np.random.default_rng(0).integers(1, 1 << 62, 1 << 13, np.uint64) | np.uint64(1)
MASK = (1 << 64) - 1

def row_value(before: np.ndarray, token: int) -> int:
  """The row of a token after the rows `before`: it depends on all of them, as a model's does"""
  h = (int((before * WEIGHTS[:len(before)]).sum()) + (token + 1) * 0x9e3779b97f4a7c15 + len(before) * 0xc2b2ae3d27d4eb4f) & MASK
  return ((h ^ h >> 29) * 0xbf58476d1ce4e5b9) & MASK
def chosen(row: int, sampling: Sampling, ids: list[int]) -> int:
  """The token after a row; a penalty forbids what the context has, while that leaves any"""
  token = (row ^ row >> 33 ^ sampling.seed * 0x9e3779b9) % VOCAB
  if sampling.repeat_penalty != 1:
    while token in ids and len({*ids}) < VOCAB: token = (token + 1) % VOCAB
  return token

def alone(ids: list[int], count: int, sampling: Sampling = Sampling(), stop: frozenset[int] = frozenset()) -> list[int]:
  """What the toy model says where there are no pages at all"""
  ids, rows, out = list(ids), np.zeros(len(ids) + count, np.uint64), []
  for i, token in enumerate(ids[:-1]): rows[i] = row_value(rows[:i], token)
  while len(out) < count and not (out and out[-1] in stop):
    rows[len(ids) - 1] = row_value(rows[:len(ids) - 1], ids[-1])
    out.append(chosen(int(rows[len(ids) - 1]), sampling, ids))
    ids.append(out[-1])
  return out

class ToyRunner:
  few, slices, vocab_size, kernels_a_token = 8, 3, VOCAB, 1
  def __init__(self, pages: int, max_context: int, sizes: tuple[int, ...] = (8, 32), in_flight: int = 2):
    self.sizes, self.max_context, self.in_flight, self.page = sizes, max_context, in_flight, cache.PAGE
    self.rows = np.random.default_rng(1).integers(0, 1 << 62, pages * self.page, np.uint64)  # nothing is zero that was never written
    self.pool: Pool|None = None                # with one, what is written is watched
    self.batch: list[list[Any]] = []
    self.unread: deque[np.ndarray] = deque()
    self.forgotten = self.launches = self.prefilled = 0
    self.under_way: tuple[Any, int]|None = None   # the newest chunk, and its next slice
    self.warmed: list[tuple[int, Any]] = []

  def place(self, table: list[int], position: int) -> int:
    page = table[position // self.page] if position // self.page < len(table) else 0
    return page * self.page + position % self.page
  def held(self, table: list[int], end: int) -> np.ndarray:
    pages = np.array(table, np.int64)
    return self.rows[(pages[:, None] * self.page + np.arange(self.page)).reshape(-1)[:end]]
  def write(self, table: list[int], position: int, value: int) -> None:
    page = (at := self.place(table, position)) // self.page
    assert self.pool is None or not page or (self.pool.holders[page] == 1 and page not in self.pool.nodes), f"page {page} is shared, and written"
    self.rows[at] = value

  def prefill(self, ids: list[int], start: int, size: int, table: list[int], slices: range = range(slices)) -> None:
    """The rows come with the last slice, as a model's last block has them; what the others write is nothing yet"""
    assert 0 < len(ids) <= size and size in self.sizes and start + len(ids) <= self.max_context
    assert len(table) * self.page >= start + len(ids) and 0 not in table and len({*table}) == len(table)
    chunk = list(ids), start, size, list(table)
    assert slices and slices == range(self.slices)[slices.start:slices.stop]
    assert slices.start == 0 or self.under_way == (chunk, slices.start), "slices of one chunk, each once"
    self.under_way, last = (chunk, slices.stop), slices.stop == self.slices
    for position in range(start, start + size if last else start + 1):
      padding = position >= start + len(ids)
      self.write(table, position, 0xbad if padding or not last else row_value(self.held(table, position), ids[position - start]))
    if last: self.prefilled += len(ids)

  def set_batch(self, rows: list[BatchRow]) -> None:
    assert rows and all(row.ids[-1] == row.token and len(row.ids) == row.position + 1 for row in rows)
    self.forgotten += len(self.unread)
    self.unread.clear()
    self.batch = [[row.token, row.position, row.table, row.sampling, list(row.ids)] for row in rows]
  def set_table(self, row: int, table: list[int]) -> None:
    assert len(table) > len(self.batch[row][2])
    self.batch[row][2] = table
  def launch(self) -> None:
    assert self.batch and len(self.unread) < self.in_flight
    now = [table[position // self.page] for _, position, table, _, _ in self.batch]  # IndexError: a row without a page
    assert 0 not in now and len({*now}) == len(now), "two rows write one page"
    for row in self.batch:
      token, position, table, sampling, ids = row
      assert position < self.max_context
      value = row_value(self.held(table, position), token)
      self.write(table, position, value)
      row[0], row[1] = chosen(value, sampling, ids), position + 1
      ids.append(row[0])
    self.launches += 1
    self.unread.append(np.array([row[0] for row in self.batch], np.int32))
  def read(self) -> np.ndarray: return self.unread.popleft()
  def wait(self) -> None: pass
  def warm(self, rows: int, features: Any) -> None:
    self.batch.clear()   # as a runner that runs a step of each size has it
    self.warmed.append((rows, features))
  def logits(self, ids: list[int], start: int, table: list[int]) -> np.ndarray:
    chunk = self.under_way
    self.prefill(ids, start, self.sizes[0], table)
    self.under_way = chunk                        # it goes on
    rows = self.held(table, start + len(ids))[start:]
    return np.stack([np.eye(VOCAB, dtype=np.float32)[chosen(int(row), Sampling(), [])] for row in rows])

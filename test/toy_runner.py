"""A runner without a device, for the engine's tests: its next token is a hash of every row of the sequence, as it finds them by the table."""
from __future__ import annotations
import time
from collections import deque
from typing import Any
import numpy as np
from tinygrad.apps.engine import cache
from tinygrad.apps.engine.cache import Pool
from tinygrad.apps.engine.constraint import Constraint
from tinygrad.apps.engine.sampling import Sampling, mask_words
from tinygrad.apps.engine.sequence import BatchRow, Kind, Logprob, Piece
from tinygrad.nn.step import STRIP

VOCAB = 97
WEIGHTS = np.random.default_rng(0).integers(1, 1 << 62, 1 << 13, np.uint64) | np.uint64(1)
MASK = (1 << 64) - 1
ALL, EVERY = np.full(mask_words(VOCAB), 0xffffffff, np.uint32), {*range(VOCAB)}

def row_value(before: np.ndarray, token: int) -> int:
  """The row of a token after the rows `before`: it depends on all of them, as a model's does"""
  h = (int((before * WEIGHTS[:len(before)]).sum()) + (token + 1) * 0x9e3779b97f4a7c15 + len(before) * 0xc2b2ae3d27d4eb4f) & MASK
  return ((h ^ h >> 29) * 0xbf58476d1ce4e5b9) & MASK
def bits_of(tokens: set[int]) -> np.ndarray:
  """A mask that allows these"""
  bits = np.packbits(np.isin(np.arange(len(ALL) * 32), [*tokens]), bitorder="little")
  return bits.view(np.uint32)
def allowed_by(mask: np.ndarray) -> set[int]: return {token for token in range(VOCAB) if mask[token // 32] >> token % 32 & 1}
def chosen(row: int, sampling: Sampling, ids: list[int], mask: np.ndarray = ALL) -> int:
  """The token after a row, of those that the mask allows; a penalty forbids what the context has, while that leaves any"""
  token, allowed = (row ^ row >> 33 ^ sampling.seed * 0x9e3779b9) % VOCAB, EVERY if mask is ALL else allowed_by(mask)
  forbidden = {*ids} if sampling.repeat_penalty != 1 and not allowed <= {*ids} else set()
  while token not in allowed or token in forbidden: token = (token + 1) % VOCAB
  return token
def logprob_of(row: int, token: int, count: int) -> Logprob:
  """What the row says of the token that came after it, and of the likeliest"""
  values = [-float((row >> 7 ^ i * 0x9e3779b97f4a7c15) % 1009) for i in range(VOCAB)]
  return Logprob(values[token], sorted(enumerate(values), key=lambda pair: (-pair[1], pair[0]))[:count])

class Rule:
  """A constraint: which tokens may come next follows from those that came. slow: seconds that a mask takes, now and then"""
  def __init__(self, seed: int, slow: float = 0.0): self.seed, self.slow, self.seen = seed, slow, []
  def again(self) -> Rule: return Rule(self.seed)
  def mask(self) -> np.ndarray:
    at = len(self.seen) * 31 + sum(self.seen) + self.seed
    if at % 3 == 0: time.sleep(self.slow)
    return bits_of({token for token in range(VOCAB) if (token + at) % 5 < 2})
  def accept(self, token: int) -> None: self.seen.append(token)

def alone(ids: list[int], count: int, sampling: Sampling = Sampling(), stop: frozenset[int] = frozenset(), constraint: Constraint | None = None,
          odds: list[Logprob] | None = None) -> list[int]:
  """What the toy model says where there are no pages at all; `odds` takes the probabilities, with all tokens in `top`"""
  ids, rows, out = list(ids), np.zeros(len(ids) + count, np.uint64), []
  for i, token in enumerate(ids[:-1]): rows[i] = row_value(rows[:i], token)
  while len(out) < count and not (out and out[-1] in stop):
    rows[len(ids) - 1] = row_value(rows[:len(ids) - 1], ids[-1])
    row = int(rows[len(ids) - 1])
    out.append(chosen(row, sampling, ids, ALL if constraint is None else constraint.mask()))
    if constraint is not None: constraint.accept(out[-1])
    if odds is not None: odds.append(logprob_of(row, out[-1], VOCAB))
    ids.append(out[-1])
  return out

class ToyRunner:
  beside, slices, stages, shares, vocab_size, kernels_a_token, certain = 8, 3, 1, True, VOCAB, 1, False
  def __init__(self, pages: int, max_context: int, sizes: tuple[int, ...] = (8, 32), in_flight: int = 2, drafts: int = 0, ahead: int = 0):
    """drafts: the model guesses its own next tokens, and often rightly, but not where masks or probabilities are asked for. ahead: 1, a launch writes
    the rows of the tokens that it chooses, too, where it neither guesses nor waits for masks"""
    self.ahead = ahead
    self.begun: list[int]|None = None          # what it wrote there, which the next launch has no more to write
    self.most_drafts, self.found, self.verified = drafts, np.zeros(0, np.bool_), 0
    self.sizes, self.max_context, self.in_flight, self.page = sizes, max_context, in_flight, cache.PAGE
    self.rows = np.random.default_rng(1).integers(0, 1 << 62, pages * self.page, np.uint64)  # nothing is zero that was never written
    self.pool: Pool|None = None                # with one, what is written is watched
    self.batch: list[list[Any]] = []
    self.unread: deque[list[tuple[list[int], int]]] = deque()   # of each step, and row: the tokens, and the row that chose the last
    self.masks: list[np.ndarray]|None = None               # of the batch's rows
    self.asked = False                                     # whether one of them is told probabilities
    self.undrawn: list[int]|None = None                    # the rows of a step that is launched, and has no tokens yet
    self.forgotten = self.launches = self.prefilled = 0
    self.under_way: tuple[Kind, list[Piece], int]|None = None   # the newest chunk, and its next slice
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

  def prefill(self, pieces: list[Piece], size: int, slices: range = range(slices), shared: bool = False) -> None:
    """The rows come with the last slice, as a model's last block has them; what the others write is nothing yet"""
    assert pieces and size in self.sizes and slices and slices == range(self.slices)[slices.start:slices.stop]
    if slices.start: assert self.under_way[::2] == ((size, shared), slices.start) and all(piece in self.under_way[1] for piece in pieces)
    self.under_way, last, each, end = ((size, shared), pieces, slices.stop), slices.stop == self.slices, STRIP if shared else size, 0
    assert shared and size % STRIP == 0 or len(pieces) == 1 and pieces[0].at == 0
    for at, ids, start, table, _ in pieces:
      assert ids and start + len(ids) <= self.max_context and end <= at and at % each == 0
      end = at + -(-len(ids) // each) * each
      assert end <= size
      assert len(table) * self.page >= start + len(ids) and 0 not in table and len({*table}) == len(table)
      for position in range(start, start + end - at if last else start + 1):
        padding = position >= start + len(ids)
        self.write(table, position, 0xbad if padding or not last else row_value(self.held(table, position), ids[position - start]))
      if last: self.prefilled += len(ids)

  def set_batch(self, rows: list[BatchRow]) -> None:
    assert rows and all(row.ids[-1] == row.token and len(row.ids) == row.position + 1 for row in rows)
    self.forgotten += len(self.unread)
    self.unread.clear()
    self.batch = [[row.token, row.position, row.table, row.sampling, list(row.ids)] for row in rows]
    self.asked, self.undrawn, self.begun = any(row.logprobs for row in rows), None, None
    self.masks = [ALL] * len(rows) if any(row.masked for row in rows) else None
  def set_table(self, row: int, table: list[int]) -> None:
    assert len(table) > len(self.batch[row][2])
    self.batch[row][2] = table
  @property
  def drafts(self) -> int: return 0 if self.asked or self.masks is not None else self.most_drafts
  def verify(self) -> None:
    """Rows that are refused are written too, with what is nobody's"""
    assert self.drafts and self.batch and len(self.unread) < self.in_flight
    self.launches, self.verified = self.launches + 1, self.verified + 1
    said = []
    for row in self.batch:
      tokens, first = [], row[1]
      for _ in range(1 + (row[0] + row[1]) % (self.drafts + 1)):
        value = row_value(self.held_by_row(row[2], row[1]), row[0])
        self.write(row[2], row[1], value)
        row[0], row[1] = chosen(value, row[3], row[4]), row[1] + 1
        row[4].append(row[0])
        tokens.append(row[0])
      for position in range(row[1], first + 1 + self.drafts): self.write(row[2], position, 0xbad)
      said.append((tokens, value))
    self.unread.append(said)
  def coast(self) -> None:
    assert self.drafts
    self.launch()
  def held_by_row(self, table: list[int], end: int) -> np.ndarray:
    """As held, of a table that may end before: what is behind its end is page 0"""
    return self.held(table + [0] * (-(-end // self.page) - len(table)), end)
  def launch(self) -> None:
    assert self.batch and len(self.unread) + (self.undrawn is not None) < self.in_flight and self.undrawn is None
    now = [self.place(table, position) // self.page for _, position, table, _, _ in self.batch]
    # behind drafts that are not read yet a sequence may have ended
    if not self.drafts: assert all(now) and all(position < self.max_context for _, position, _, _, _ in self.batch), "a row without a page"
    assert len({*filter(None, now)}) == len([*filter(None, now)]), "two rows write one page"
    values = self.begun or self.written()
    self.launches += 1
    if self.masks is None:
      self.choose(values, [ALL] * len(values))
      if self.ahead and not self.drafts: self.begun = self.written()
    else: self.undrawn = values
  def written(self) -> list[int]:
    """What the rows of the newest tokens hold from here on"""
    values = []
    for token, position, table, _, _ in self.batch:
      values.append(row_value(self.held_by_row(table, position), token))
      self.write(table, position, values[-1])
    return values
  def draw(self, masks: dict[int, np.ndarray]) -> None:
    assert self.masks is not None and self.undrawn is not None and not self.unread
    for row, mask in masks.items(): self.masks[row] = mask
    self.choose(self.undrawn, self.masks)
    self.undrawn = None
  def choose(self, values: list[int], masks: list[np.ndarray]) -> None:
    for row, value, mask in zip(self.batch, values, masks, strict=True):
      row[0], row[1] = chosen(value, row[3], row[4], mask), row[1] + 1
      row[4].append(row[0])
    self.unread.append([([row[0]], value) for row, value in zip(self.batch, values)])
  def read(self) -> np.ndarray:
    self.last = self.unread.popleft()
    self.found = np.array([sum(tokens) % 4 > 0 for tokens, _ in self.last])
    return np.array([(tokens + [-2] * self.drafts)[:1 + self.drafts] for tokens, _ in self.last], np.int32)
  def logprobs(self, row: int, count: int) -> Logprob:
    assert self.asked
    (token,), value = self.last[row]
    return logprob_of(value, token, count)
  def wait(self, first: bool = False) -> None: pass
  def warm(self, rows: int, kinds: list[Any]) -> None:
    self.batch.clear()   # as a runner that runs a step of each size has it
    self.warmed.append((rows, kinds))
  def logits(self, ids: list[int], start: int, table: list[int]) -> np.ndarray:
    chunk = self.under_way
    self.prefill([Piece(0, ids, start, table)], self.sizes[0])
    self.under_way = chunk                        # it goes on
    rows = self.held(table, start + len(ids))[start:]
    return np.stack([np.eye(VOCAB, dtype=np.float32)[chosen(int(row), Sampling(), [])] for row in rows])

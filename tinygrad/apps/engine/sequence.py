"""A request, and the sequence that it becomes. Tokens only: nothing here knows a device, and nothing knows text."""
from __future__ import annotations
import enum
from dataclasses import dataclass
from typing import Iterable, NamedTuple
from tinygrad.apps.engine.cache import Table
from tinygrad.apps.engine.sampling import Sampling

class State(enum.Enum):
  WAITING = enum.auto()     # holds no page
  PREFILLING = enum.auto()  # has pages for all of its ids; the rows of ids[:-1] are being written
  RUNNING = enum.auto()     # has all rows but the last token's, which the next decode step feeds
  ENDED = enum.auto()       # holds no page

@dataclass(frozen=True)
class Request:
  """limit: the most tokens of an answer. None: as many as the context takes. 0: the rows of ids[:-1] are computed, and no answer."""
  ids: Iterable[int]
  sampling: Sampling = Sampling()
  stop: frozenset[int] = frozenset()
  limit: int|None = None

class BatchRow(NamedTuple):
  """A sequence as the runner is given it. token: the one to feed; position: where it stands; ids: the context that penalties know, token included, of which the
  first `prompt` are the prompt."""
  token: int
  position: int
  table: list[int]
  sampling: Sampling
  ids: list[int]
  prompt: int

class Sequence:
  """The handle of a request. Whoever adds it reads `produced`, `state`, `reason` and `error`; the engine alone writes.
  ids: the prompt and what was produced. rows: how many of its ids, from the first on, have their rows in the pages of its table."""
  def __init__(self, request:Request, room:int):
    """room: tokens that the context takes after the prompt's"""
    self.sampling, self.stop, self.room = request.sampling, request.stop, room
    self.limit = room if request.limit is None else min(request.limit, room)
    self.ids, self.prompt = list(request.ids), len(request.ids)
    self.state, self.rows, self.table = State.WAITING, 0, Table()
    self.reason: str|None = None        # why it ended: stop, length, abort or error
    self.error: Exception|None = None
    self.aborted = False                # whoever drives the engine next ends it

  @property
  def produced(self) -> list[int]: return self.ids[self.prompt:]
  @property
  def left(self) -> int:
    """Tokens that it may still produce"""
    return self.prompt + self.limit - len(self.ids)
  @property
  def full(self) -> bool:
    """Whether the context takes no more"""
    return len(self.ids) >= self.prompt + self.room
  @property
  def end(self) -> str|None:
    """The reason to end that its last token is"""
    if len(self.ids) > self.prompt and self.ids[-1] in self.stop: return "stop"
    return None if self.left else "length"
  @property
  def batch_row(self) -> BatchRow: return BatchRow(self.ids[-1], len(self.ids) - 1, list(self.table.pages), self.sampling, self.ids, self.prompt)

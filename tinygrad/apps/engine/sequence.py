"""A request, and the sequence that it becomes. Tokens only: nothing here knows a device, and nothing knows text."""
from __future__ import annotations
import enum, time
from dataclasses import dataclass
from typing import Iterable, NamedTuple
from tinygrad.apps.engine.cache import Table
from tinygrad.apps.engine.constraint import Constraint, Guide
from tinygrad.apps.engine.sampling import Features, Sampling

TOP = 20   # likeliest tokens that can be asked for

class State(enum.Enum):
  WAITING = enum.auto()     # holds no page
  PREFILLING = enum.auto()  # has pages for all of its ids; the rows of ids[:-1] are being written
  RUNNING = enum.auto()     # has all rows but the last token's, which the next decode step feeds
  ENDED = enum.auto()       # holds no page

@dataclass(frozen=True)
class Request:
  """limit: the most tokens of an answer. None: as many as the context takes. 0: the rows of ids[:-1] are computed, and no answer.
  logprobs: how many of the likeliest tokens are told beside each token's probability, up to TOP. None: no probabilities.
  constraint: what the answer is held to; it serves one request."""
  ids: Iterable[int]
  sampling: Sampling = Sampling()
  stop: frozenset[int] = frozenset()
  limit: int|None = None
  logprobs: int|None = None
  constraint: Constraint|None = None

class Logprob(NamedTuple):
  """Of a produced token: the logarithm of its probability, and the likeliest tokens with theirs, likeliest first. By the model's own logits, before
  mask, bias, penalties and temperature."""
  value: float
  top: list[tuple[int, float]]

@dataclass
class Times:
  """By time.monotonic, of what was reached: added; begun: when it was first let in; first, last: its first and its newest token"""
  added: float = 0.0
  begun: float = 0.0
  first: float = 0.0
  last: float = 0.0

class BatchRow(NamedTuple):
  """A sequence as the runner is given it. token: the one to feed; position: where it stands; ids: the context that penalties know, token
  included, of which the first `prompt` are the prompt; masked: whether it is drawn by a mask; logprobs: whether probabilities are told."""
  token: int
  position: int
  table: list[int]
  sampling: Sampling
  ids: list[int]
  prompt: int
  masked: bool = False
  logprobs: bool = False

  @property
  def features(self) -> Features: return self.sampling.features | Features(mask=self.masked, logprobs=self.logprobs)

Kind = tuple[int, bool]   # of a chunk: its size in tokens, and whether prompts share it
def kinds_of(sizes:tuple[int, ...], shares:bool) -> list[Kind]: return [(size, shared) for size in sizes for shared in (False, True)[:1 + shares]]

class Piece(NamedTuple):
  """Neighbouring tokens of a prompt as the runner is given them. at: their place among the tokens of a chunk; start: the position of the first;
  following: the token behind them"""
  at: int
  ids: list[int]
  start: int
  table: list[int]
  following: int = 0

class Sequence:
  """The handle of a request. Whoever adds it reads `produced`, `logprobs`, `state`, `reason`, `error`, `cached` and `times`; the engine alone writes.
  ids: the prompt and what was produced. rows: how many of its ids, from the first on, have their rows in the pages of its table."""
  def __init__(self, request:Request, room:int, guide:Guide|None=None):
    """room: tokens that the context takes after the prompt's; guide: of the request's constraint"""
    self.sampling, self.stop, self.room = request.sampling, request.stop, room
    self.limit = room if request.limit is None else min(request.limit, room)
    self.ids, self.prompt = list(request.ids), len(request.ids)
    self.state, self.rows, self.table = State.WAITING, 0, Table()
    self.told, self.guide = request.logprobs, guide
    self.logprobs: list[Logprob] = []   # of each of `produced`, where they were asked for
    self.cached = 0                     # tokens of the prompt whose rows the cache had when it was first let in
    self.times = Times(time.monotonic())
    self.reason: str|None = None        # why it ended: stop, length, abort or error
    self.error: Exception|None = None
    self.aborted = False                # whoever drives the engine next ends it

  @property
  def produced(self) -> list[int]: return self.ids[self.prompt:]
  @property
  def ready(self) -> bool:
    """Whether it can be let in: of a constraint, the first mask may take its time, in which nobody is to wait for it"""
    return self.guide is None or self.guide.begun
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
  def batch_row(self) -> BatchRow:
    return BatchRow(self.ids[-1], len(self.ids) - 1, list(self.table.pages), self.sampling, self.ids, self.prompt,
                    self.guide is not None, self.told is not None)

  def take(self, token:int, logprob:Logprob|None) -> None:
    """Its next token. Its probability is there first: whoever sees the token sees that, and an exception between the two leaves nothing twice"""
    if logprob is not None: self.logprobs[len(self.ids) - self.prompt:] = [logprob]
    self.ids.append(token)
    self.times.last = time.monotonic()
    self.times.first = self.times.first or self.times.last

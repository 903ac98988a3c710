"""What the server's two processes say to each other, as msgpack. One has the device and the engine (worker.py); the other has HTTP and text (link.py
and all that stands above it). Requests go one way as tokens, tokens come the other, all news of a piece of the engine's work in one message."""
from __future__ import annotations
import struct
from typing import Any
import msgspec

class Grammar(msgspec.Struct, frozen=True):
  """What an answer is held to. kind: json_schema, regex or lark, whose text `source` is. after: the token that must have come before it holds, as
  </think> where a model reasons first; None: from the first token on."""
  kind: str
  source: str
  after: int|None = None

class Logprob(msgspec.Struct, array_like=True, frozen=True):
  """Of a produced token: the logarithm of its probability, and the likeliest tokens with theirs, likeliest first. By the model's own logits, before
  bias, penalties and temperature."""
  value: float
  top: list[tuple[int, float]]

class Times(msgspec.Struct, array_like=True):
  """Seconds, by time.monotonic, that both processes share; 0 for what was not reached. added: when the engine got the request; begun: when its prompt
  was begun; first: its first token; last: its last."""
  added: float = 0.0
  begun: float = 0.0
  first: float = 0.0
  last: float = 0.0

# ---- to the engine ----

class Load(msgspec.Struct, tag="load"):
  """The first order: which model, as models.load has it. warm: whether all that answers drawn as by `sampling` need, with probabilities or a grammar
  too, is recorded at the start. sampling: fields of Sampling, over what the model's makers advise. threads: of the CPU"""
  path: str
  max_context: int|None = None
  cache_tokens: int|None = None
  max_stall: float|None = None
  warm: bool = False
  sampling: dict[str, Any] = {}
  threads: int|None = None
  cache_bits: int = 16
  drafts: int = 0
  mtp: str|None = None
  devices: int = 1
  cpu_experts: int = 0
  shard: str = "layers"
  batch_invariant: bool = False

class Add(msgspec.Struct, tag="add"):
  """A request. id: chosen by the link, never twice. sampling: fields of Sampling that are not its defaults. stop: tokens that end the answer. limit:
  the most tokens of it. logprobs: how many of the likeliest tokens are told beside the chosen one's probability, 0 to 20; None: no probabilities."""
  id: int
  ids: list[int]
  sampling: dict[str, Any]
  stop: list[int]
  limit: int|None = None
  logprobs: int|None = None
  grammar: Grammar|None = None

class Abort(msgspec.Struct, tag="abort"):
  """What was asked for is not wanted any more. Its end is told all the same."""
  id: int

class Leave(msgspec.Struct, tag="leave"):
  """The process ends when what is running has ended"""

Order = Load | Add | Abort | Leave

# ---- from the engine ----

class Loading(msgspec.Struct, tag="loading"):
  what: str

class Ready(msgspec.Struct, tag="ready"):
  """capacity: the most tokens of a prompt and its answer; rows: of the cache, for all sequences; max_rows: answers that run at once"""
  device: str
  max_context: int
  capacity: int
  rows: int
  page: int
  max_rows: int

class Failed(msgspec.Struct, tag="failed"):
  """The engine cannot go on, or the model could not be loaded. The process ends after this."""
  why: str

class News(msgspec.Struct, array_like=True):
  """Tokens that a sequence has produced since the last news of it. end, when it has ended: stop, length, abort, error, or grammar, an error of the
  constraint that was asked for; why: of an error, one line. cached: prompt tokens whose rows were there. A stop token is the last of `ids`."""
  id: int
  ids: list[int]
  logprobs: list[Logprob] = []
  end: str|None = None
  why: str = ""
  cached: int = 0
  times: Times|None = None    # with the end

class Gauges(msgspec.Struct, array_like=True):
  """How the engine stands. pages: used, of all but nobody's. queries, hits: prompt tokens that were looked up in the prefix cache, and found; steps:
  decode steps so far; preemptions: sequences that gave way so far; drafts: verified so far, draft_tokens: of them; accepted: of the tokens of each
  position of a draft, those that were right"""
  running: int = 0
  waiting: int = 0
  pages: int = 0
  queries: int = 0
  hits: int = 0
  preemptions: int = 0
  steps: int = 0
  drafts: int = 0
  draft_tokens: int = 0
  accepted: list[int] = []

class Step(msgspec.Struct, tag="step"):
  """After a piece of work"""
  news: list[News]
  gauges: Gauges

Report = Loading | Ready | Failed | Step

# ---- on the way ----
# four bytes that say how long a message is, least first, and the message

LENGTH = struct.Struct("<I")
encoder = msgspec.msgpack.Encoder()

def frame(message:Order|Report) -> bytes:
  """A message as it goes over the socket. Raises TypeError, OverflowError for values that msgpack has no form for."""
  data = encoder.encode(message)
  return LENGTH.pack(len(data)) + data

class Frames:
  """What comes over the socket, in pieces of any size, as encoded messages"""
  def __init__(self) -> None: self.held = bytearray()
  def push(self, data:bytes) -> list[bytes]:
    """The messages that are whole with this piece"""
    self.held += data
    start, messages = 0, []
    while len(self.held) >= (begin := start + LENGTH.size) and len(self.held) >= (end := begin + LENGTH.unpack_from(self.held, start)[0]):
      messages.append(bytes(self.held[begin:end]))
      start = end
    del self.held[:start]
    return messages

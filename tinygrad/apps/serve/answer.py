"""An answer of the engine as events, for all kinds of requests: tokens become reasoning, text and calls, which end before a stop text; then there is
why it ended, what it cost and how long it took.

A Reply is read by `events`, which gives what has come since the last time. Text comes in whole characters. What may be the beginning of a stop text
waits for more."""
from __future__ import annotations
import base64, secrets, time
from dataclasses import dataclass, field
from typing import Iterable, NamedTuple
from tinygrad.apps.models import Until
from tinygrad.apps.reasoning import ANSWER, REASONING, Piece
from tinygrad.apps.serve import wire
from tinygrad.apps.serve.link import Handle
from tinygrad.apps.serve.requests import ApiError, Job
from tinygrad.apps.serve.text import Voice
from tinygrad.apps.tokenizer import Tokenizer
from tinygrad.apps.tool_calls import CallArguments, CallBegins, CallEnds, Event, Parser

class Gone(Exception):
  """The client is not there any more"""

class PlainText:
  """As Parser, for an answer that is all text"""
  def __init__(self, tokenizer:Tokenizer): self.stream = tokenizer.stream()
  def push(self, token:int) -> list[Event]: return self._pieces(self.stream.push(token))
  def flush(self) -> list[Event]: return self._pieces(self.stream.flush())
  def _pieces(self, text:str) -> list[Event]: return [Piece(ANSWER, text)] if text else []

@dataclass
class Call:
  """Of a tool. id: the model's own, or made up; arguments: the JSON of an object"""
  id: str
  name: str
  arguments: str = ""

class TokenLogprob(NamedTuple):
  """A token of an answer with its probability. offset: where its text begins in the answer"""
  token: int
  logprob: wire.Logprob
  offset: int

@dataclass
class Usage:
  """Tokens. reasoning: of the answer's"""
  prompt: int = 0
  answer: int = 0
  cached: int = 0
  reasoning: int = 0

  def __add__(self, other:Usage) -> Usage:
    """Of answers to one prompt, or to several: a prompt counts where it was given"""
    return Usage(self.prompt + other.prompt, self.answer + other.answer, self.cached + other.cached, self.reasoning + other.reasoning)

class Reply:
  """One answer. index: which of a request's; again: whether one before it is to the same prompt, whose tokens are then not counted twice.
  chosen: tokens with their probabilities whose text is in the last events; finish: stop, length or tool_calls, once it has ended; stopped_by: the
  stop text that ended it; calls: those that have begun."""
  def __init__(self, handle:Handle, job:Job, voice:Voice, ids:list[int], index:int=0, again:bool=False):
    self.handle, self.job, self.voice, self.ids, self.index, self.again = handle, job, voice, ids, index, again
    self.parser = Parser(voice.tokenizer, voice.family, job.tools, ids) if job.chat else PlainText(voice.tokenizer)
    self.until = Until(job.stops)
    self.tokens, self.thought, self.unsaid = 0, 0, 0       # tokens; those of reasoning; those of which nothing was said yet
    self.length, self.pending = 0, list[TokenLogprob]()    # characters of the answer; tokens whose text waits
    self.chosen: list[TokenLogprob] = []
    self.calls: list[Call] = []
    self.calling = False                                   # whether the last of them has not ended
    self.cut = self.gone = False                           # ended by us; because nobody listens
    self.finish: str|None = None
    self.failure: ApiError|Gone|None = None                # what is raised once all that came was given
    self.stopped_by: str|None = None
    self.cached, self.times = 0, wire.Times()
    self.added, self.first, self.last = time.monotonic(), 0.0, 0.0

  def abort(self) -> None:
    """Nobody listens any more"""
    self.gone = True
    self.handle.abort()

  async def events(self) -> list[Event]:
    """What has come since the last call, or comes next; `finish` is there with the last. Neighbours of one kind are one. Raises ApiError where the
    engine failed, Gone; what came before is given first."""
    if self.failure is not None: raise self.failure
    news = await self.handle.news()
    now = time.monotonic()
    if news.ids: self.first, self.last = self.first or now, now
    events, self.chosen = [], []
    for n, token in enumerate(news.ids):
      if self.cut or token in self.job.stop_ids: break
      self.tokens += 1
      self.unsaid += 1
      start = self.length + len(self.until.held)
      self._say(self.parser.push(token), events)
      if news.logprobs: self._choose(TokenLogprob(token, news.logprobs[n], start))
    if news.end is not None: self._end(news, events)
    return events

  def _say(self, pieces:Iterable[Event], events:list[Event], last:bool=False) -> None:
    """Adds pieces to events, up to a stop text, or to the end of the one call that may be"""
    for piece in pieces:
      thought, self.unsaid, unsaid = isinstance(piece, Piece) and piece.kind == REASONING, 0, self.unsaid
      if thought: self.thought += unsaid
      if isinstance(piece, Piece) and not thought: self._answer(piece.text, events)
      else:
        self._answer("", events, last=True)   # what was held back begins no stop text: it does not go on
        if isinstance(piece, CallBegins):
          piece = piece._replace(id=piece.id or f"call_{secrets.token_hex(12)}")
          self.calls.append(Call(piece.id or "", piece.name))
        elif isinstance(piece, CallArguments): self.calls[-1].arguments += piece.text
        if isinstance(piece, (CallBegins, CallEnds)): self.calling = isinstance(piece, CallBegins)
        self._add(piece, events)
        if isinstance(piece, CallEnds) and not self.job.parallel: self._cut()
      if self.cut: return
    if last: self._answer("", events, last=True)

  def _answer(self, text:str, events:list[Event], last:bool=False) -> None:
    """Text of the answer. A stop text in it ends the answer."""
    all_of_it = self.until.held + text
    if said := self.until.push(text, last):
      self.length += len(said)
      self._add(Piece(ANSWER, said), events)
    if self.until.found:
      self.stopped_by = min((at, s) for s in self.job.stops if (at := all_of_it.find(s)) >= 0)[1]
      self._cut()

  def _cut(self) -> None:
    """Nothing more is wanted of it"""
    self.cut = True
    self.handle.abort()

  def _add(self, event:Event, events:list[Event]) -> None:
    """Adds an event, or its text to the last one where that is of its kind"""
    last = events[-1] if events else None
    if isinstance(event, (Piece, CallArguments)) and type(last) is type(event) and last[0] == event[0]:
      events[-1] = last._replace(text=last.text + event.text)
    else: events.append(event)

  def _choose(self, chosen:TokenLogprob) -> None:
    """Tokens are told with their text: what waits to be said, or never will be, waits"""
    self.pending.append(chosen)
    if self.stopped_by is not None: self.pending = [c for c in self.pending if c.offset < self.length]
    elif self.until.held: return
    self.chosen += self.pending
    self.pending = []

  def _end(self, news:wire.News, events:list[Event]) -> None:
    if news.times is not None: self.times = news.times
    self.cached = news.cached
    if not self.cut:
      rest = self.parser.flush()
      # a call that did not end by itself is not mended: nobody shall take it for whole, and run it
      if self.calling and news.end != "stop": rest = [event for event in rest if isinstance(event, Piece)]
      self._say(rest, events, last=True)
      self.chosen += self.pending
    if self.gone: self.failure = Gone()
    elif news.end == "grammar" and not self.cut: self.failure = ApiError(400, news.why, code="invalid_grammar")
    elif news.end == "error" and not self.cut: self.failure = ApiError(500, news.why or "the engine failed")
    elif news.end == "abort" and not self.cut: self.failure = ApiError(503, "the server is ending: the answer is not whole", retry_after=1)
    else: self.finish = "length" if news.end == "length" and not self.cut else "tool_calls" if self.calls else "stop"

  @property
  def usage(self) -> Usage: return Usage(0 if self.again else len(self.ids), self.tokens, 0 if self.again else self.cached, self.thought)

  def timings(self) -> dict[str, float]:
    """As llama-server has them"""
    times, fresh = self.times, len(self.ids) - self.cached
    prompt, answer = max(times.first - times.begun, 0) * 1e3, max(times.last - times.first, 0) * 1e3
    out = {"cache_n": self.cached}
    for name, n, ms in (("prompt", fresh, prompt), ("predicted", self.tokens, answer)):
      # the first token comes with the prompt
      steps = max(n - 1, 0) if name == "predicted" else n
      out |= {f"{name}_n": n, f"{name}_ms": round(ms, 3), f"{name}_per_token_ms": round(ms / steps, 4) if steps else 0.0,
              f"{name}_per_second": round(steps / ms * 1e3, 3) if ms else 0.0}
    return out

@dataclass
class Whole:
  """All of an answer, but for its calls, which the reply has"""
  reply: Reply
  text: str = ""
  reasoning: str = ""
  chosen: list[TokenLogprob] = field(default_factory=list)
  events: list[Event] = field(default_factory=list)

  def add(self, events:list[Event]) -> None:
    """What the reply gave last"""
    self.events += events
    for event in events:
      if not isinstance(event, Piece): continue
      if event.kind == REASONING: self.reasoning += event.text
      else: self.text += event.text
    self.chosen += self.reply.chosen

# ---- reasoning that a client keeps for us, and need not read ----

PACKED = "reasoning."

def packed(text:str) -> str: return PACKED + base64.b64encode(text.encode()).decode()
def kept(text:str|None) -> str:
  """The reasoning in what a client sends back; nothing where another server wrote it"""
  if text is None or not text.startswith(PACKED): return ""
  try: return base64.b64decode(text[len(PACKED):], validate=True).decode(errors="replace")
  except ValueError: return ""

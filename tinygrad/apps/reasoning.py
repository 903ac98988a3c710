"""Tells a model's reasoning from its answer, token by token.

A mark is matched by its id where the vocabulary has it as one token, by its text otherwise: spelled by letters, a mark that has an id is text. Texts
and marks come from `Marked`, which reads one token at a time and is asked by a coroutine; so what is read does not depend on how the text is cut.
models.py's `Answer` pushes the engine's tokens through `Reasoning`, terminal.py prints the pieces; tool_calls.py adds calls of tools to it."""
from __future__ import annotations
import functools, re
from typing import Any, Callable, Iterable, Iterator, NamedTuple
from tinygrad.apps.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
REASONING, ANSWER, MARK = "reasoning", "answer", "mark"
END = "end"   # in a mark's place: nothing comes any more

class Piece(NamedTuple):
  """A piece of an answer. kind: REASONING, ANSWER, or MARK for a <think> or </think> that the model wrote. The texts of all pieces, joined, are the
  model's whole text."""
  kind: str
  text: str

def beginning(text:str, marks:Iterable[str]) -> int:
  """How many characters at the end of `text` may be the beginning of one of `marks`"""
  return max((n for m in marks for n in range(1, min(len(m), len(text) + 1)) if text.endswith(m[:n])), default=0)

class Watch:
  """The marks that count at some point; others are text. texts: those of them that are no tokens. Every mark begins with "<", and has no other."""
  def __init__(self, marks:frozenset[str], texts:frozenset[str]):
    self.marks, self.texts, self.find = marks, texts, re.compile("|".join(map(re.escape, sorted(texts))))

  def keeps(self, text:str) -> int:
    """How many characters at the end of `text` may be the beginning of a mark"""
    at = text.rfind("<")
    return len(text) - at if at >= 0 and any(m.startswith(text[at:]) for m in self.texts) else 0

_watch = functools.lru_cache(1024)(Watch)   # a model's answers have few

# a coroutine that yields events, or None where it needs more tokens, and may return what it read
Steps = Iterator[Any]

class Marked:
  """Token ids to texts and marks. `marks`: all that may count."""
  def __init__(self, tokenizer:Tokenizer, marks:Iterable[str]):
    self.ids = {m: tokenizer.special_tokens[m] for m in marks if m in tokenizer.special_tokens}
    self.names, self.tokens = {i: m for m, i in self.ids.items()}, frozenset(self.ids)
    self.stream, self.text, self.ended = tokenizer.stream(), "", False
    self.token: int|None = None   # a mark, which stands after the text
    self.back = ""                # a mark that was taken too early, which stands before it

  def watch(self, *marks:str) -> Watch: return _watch(found := frozenset(marks), found - self.tokens)

  def put(self, token:int) -> None:
    if token in self.names:
      self.text += self.stream.flush()
      self.token = token
    else: self.text += self.stream.push(token)

  def end(self) -> None:
    self.text += self.stream.flush()
    self.ended = True

  def take(self, watch:Watch) -> Steps:
    """What comes next: (text, ""), or ("", mark) for one that `watch` has, or ("", END)"""
    if mark := self.back:
      self.back = ""
      if mark != END: return ("", mark) if mark in watch.marks else (mark, "")
    while True:
      if text := self.text:
        cut = len(text)
        if watch.texts and "<" in text:
          if (found := watch.find.search(text)) is not None:
            if found.start() == 0:
              self.text = text[found.end():]
              return "", found[0]
            cut = found.start()
          elif self.token is None and not self.ended: cut -= watch.keeps(text)
        if cut:
          self.text = text[cut:]
          return text[:cut], ""
      elif self.token is not None:
        token, self.token = self.token, None
        if (mark := self.names[token]) in watch.marks: return "", mark
        if shown := self.stream.push(token): return shown, ""
      elif self.ended: return "", END
      yield None

class Reasoning:
  """Tokens to pieces, whole characters at a time. prompt: the ids before the answer. Where it ends inside reasoning, as GLM's, the answer begins
  there. A model may open reasoning itself; where the mark is text, only while the answer is blank. Text that may be the beginning of a mark
  waits for the next token. read is called where one of the marks `calls` stands; marks: those that it takes beside them."""
  def __init__(self, tokenizer:Tokenizer, prompt:list[int], calls:Iterable[str]=(), marks:Iterable[str]=(), read:Callable[[str], Steps]|None=None):
    self.marked, self.read = Marked(tokenizer, (OPEN, CLOSE, *calls, *marks)), read
    by_id = [OPEN] if OPEN in self.marked.ids else []
    self.blank = self.marked.watch(OPEN, CLOSE, *calls)   # while the answer is blank
    self.watched = {REASONING: self.marked.watch(CLOSE, *calls), ANSWER: self.marked.watch(*by_id, *calls)}
    self.kind = REASONING if self._inside(tokenizer, prompt) else ANSWER
    self.steps = self._run()

  def _inside(self, tokenizer:Tokenizer, prompt:list[int]) -> bool:
    ids = self.marked.ids
    if {OPEN, CLOSE} <= ids.keys():
      for token in reversed(prompt):
        if token in (ids[OPEN], ids[CLOSE]): return token == ids[OPEN]
        if token in tokenizer.control: return False   # what stands before it is no part of this answer
      return False
    # blanks may follow the mark, and a token holds a byte at least
    return tokenizer.decode(prompt[-len(OPEN) - 8:]).rstrip().endswith(OPEN)

  def push(self, *tokens:int) -> list:
    events = []
    for token in tokens:
      if self.marked.token is not None: events += self._advance()   # a mark is taken before more text is put behind it
      self.marked.put(token)
    return events + self._advance()

  def flush(self) -> list:
    """What was held back, at the end"""
    self.marked.end()
    return self._advance()

  def _advance(self) -> list:
    events = []
    for event in self.steps:
      if event is None: break
      events.append(event)
    return events

  def _run(self) -> Steps:
    blanks, blank = "", True   # at the answer's beginning, as far as it is blank
    while True:
      text, mark = yield from self.marked.take(self.blank if blank and self.kind == ANSWER else self.watched[self.kind])
      if text:
        if blank and self.kind == ANSWER:
          blanks += text
          if not text.strip(): continue
          text, blanks, blank = blanks, "", False
        yield Piece(self.kind, text)
      elif mark in (OPEN, CLOSE):
        self.kind = REASONING if mark == OPEN else ANSWER
        yield Piece(MARK, blanks + mark)
        blanks, blank = "", True
      else:
        if blanks: yield Piece(ANSWER, blanks)
        blanks, blank = "", False
        if mark == END: return
        if self.read is not None: yield from self.read(mark)

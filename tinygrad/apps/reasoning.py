"""Tells a model's reasoning from its answer, token by token.

Where the vocabulary has <think> and </think>, their ids are the marks, else their text is. models.py's `Answer` pushes the engine's tokens through
here; terminal.py prints the pieces.
"""
from __future__ import annotations
from typing import Iterable, Iterator, NamedTuple
from tinygrad.apps.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
REASONING, ANSWER, MARK = "reasoning", "answer", "mark"

class Piece(NamedTuple):
  """A piece of an answer. kind: REASONING, ANSWER, or MARK for a <think> or </think> that the model wrote. The texts of all pieces, joined, are the
  model's whole text."""
  kind: str
  text: str

def beginning(text:str, marks:Iterable[str]) -> int:
  """How many characters at the end of `text` may be the beginning of one of `marks`"""
  return max((n for m in marks for n in range(1, min(len(m), len(text) + 1)) if text.endswith(m[:n])), default=0)

class Reasoning:
  """Tokens to pieces, whole characters at a time. prompt: the ids before the answer. Where it ends in <think>, as GLM's, the answer begins inside
  reasoning. A model may open reasoning itself; where the mark is text, only at the answer's beginning. Text that may be the beginning of a
  mark waits for the next token."""
  def __init__(self, tokenizer:Tokenizer, prompt:list[int]):
    self.stream, ids = tokenizer.stream(), tokenizer.special_tokens
    self.marks = {ids[OPEN]: Piece(REASONING, OPEN), ids[CLOSE]: Piece(ANSWER, CLOSE)} if {OPEN, CLOSE} <= ids.keys() else {}
    # blanks may follow the mark, and a token holds a byte at least
    self.kind = REASONING if tokenizer.decode(prompt[-len(OPEN) - 8:]).rstrip().endswith(OPEN) else ANSWER
    self.held, self.may_open = "", self.kind == ANSWER

  def push(self, token:int) -> Iterator[Piece]:
    if (mark := self.marks.get(token)) is None or mark.kind == self.kind: yield from self._take(self.stream.push(token))
    else:
      yield from self.flush()
      self.kind = mark.kind
      yield Piece(MARK, mark.text)

  def flush(self) -> Iterator[Piece]:
    """What was held back, at the end"""
    yield from self._take(self.stream.flush(), last=True)

  def _take(self, text:str, last:bool=False) -> Iterator[Piece]:
    held, self.held = self.held + text, ""
    if not self.marks and self.kind == ANSWER and self.may_open:
      begun = held.lstrip()
      if OPEN.startswith(begun) and begun != OPEN and not last:
        self.held = held
        return
      self.may_open = False
      if begun.startswith(OPEN):
        self.kind, end = REASONING, len(held) - len(begun) + len(OPEN)
        yield Piece(MARK, held[:end])
        held = held[end:]
    if not self.marks and self.kind == REASONING:
      thought, mark, rest = held.partition(CLOSE)
      wait = 0 if mark or last else beginning(thought, (CLOSE,))
      thought, self.held = thought[:len(thought) - wait], thought[len(thought) - wait:]
      if thought: yield Piece(REASONING, thought)
      if not mark: return
      self.kind, held = ANSWER, rest
      yield Piece(MARK, mark)
    if held: yield Piece(self.kind, held)

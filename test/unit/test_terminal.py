"""The chat: through a terminal as a person drives it, through pipes, and piece by piece. The model is test/talker.py, whose words are known."""
from __future__ import annotations
import io, json, os, re, subprocess, sys
from pathlib import Path
from typing import Iterator
import pytest
from on_terminal import ALT_ENTER, CTRL_C, CTRL_D, UP, Terminal, environ, paste, plain
from talker import SPECIALS, Talker, vocabulary
from tinygrad.apps.models import ROOT, Answer, UserError
from tinygrad.apps.reasoning import ANSWER, MARK, REASONING, Reasoning
from tinygrad.apps.sampling import Sampling
from tinygrad.apps import screen, terminal
from tinygrad.apps.terminal import Conversation, Lines, Options, conversation_of, read_text, unblocked

TALKER = [sys.executable, str(ROOT / "test/talker.py")]

# ---- a person at a terminal ----

class Person:
  """Someone who types, and reads answers: only text, without the sequences that move and colour"""
  def __init__(self, folder:Path, context:int, **env:str):
    self.terminal = Terminal([*TALKER, str(context)], cwd=folder, **env)
    self.read = plain(self.terminal.until(">"))   # the prompt
  def says(self, keys:str, ends:str="\r") -> str:
    """What is printed from `keys` to the next prompt"""
    self.terminal.type(keys + ends)
    self.terminal.until("\x1b[?2004l")            # the line was taken
    return plain(self.terminal.until(">"))
  def stops(self, keys:str, words:str) -> str:
    """What is printed from Ctrl-C, typed when the answer to `keys` has come to `words`, to the next prompt"""
    self.terminal.type(keys + "\r")
    self.terminal.until(words)
    self.terminal.type(CTRL_C)
    return plain(self.terminal.until(">"))
  def heard(self, keys:str) -> tuple[int, int, int]:
    """How many characters, lines and turns a message became"""
    m = re.search(r"heard (\d+) characters, (\d+) lines, (\d+) turns", said := self.says(keys))
    assert m, said
    return int(m[1]), int(m[2]), int(m[3])
  def leaves(self, keys:str=CTRL_D) -> None:
    self.terminal.type(keys)
    rest = self.terminal.rest()
    assert self.terminal.process.returncode == 0 and "Traceback" not in rest

@pytest.fixture
def person(tmp_path) -> Iterator:
  met:list[Person] = []
  def meet(context:int=1 << 16, **env:str) -> Person:
    met.append(Person(tmp_path, context, **{"XDG_STATE_HOME": str(tmp_path / "state")} | env))
    return met[-1]
  yield meet
  for p in met: p.terminal.close()

def test_a_conversation_on_a_terminal(person, tmp_path):
  p = person()
  assert "the talker, a context of 65536 tokens" in p.read and "Ctrl-D leaves" in p.read
  said = p.says("hello")
  assert re.search(r"\[thinking\]\s+thought on and on\s+\[end of thinking\]\s+heard 5 characters, 1 lines, 1 turns", said), said
  assert re.search(r"\[\d+ tokens, [\d.]+ tok/s, the first after [\d.]+ s\]", said) and "preparing" in said
  # the history; a long paste; three lines as one message, in three ways
  assert p.heard(UP) == (5, 1, 2)
  assert p.heard(paste("a" * 19998 + "\nb")) == (20000, 2, 3)
  assert p.heard(paste("one\r\ntwo\r\nthree")) == (13, 3, 4)
  assert p.heard(f"one{ALT_ENTER}two{ALT_ENTER}three") == (13, 3, 5)
  assert p.heard('"""\rone\rtwo\rthree\r"""') == (13, 3, 6)
  # commands
  assert all(c in p.says("/help") for c in ("/help", "/clear", "/regen", "/undo", "/system", "/set", "/save!", "/load", "/exit"))
  assert "[taken back: one\\ntwo\\nthree]" in p.says("/undo") and p.heard("x") == (1, 1, 6)
  assert "6 turns, seed 8" in p.says("/regen")
  assert "[12 messages in " in p.says("/save talk.json") 
  assert "did you mean /save?" in p.says("/sav") and "expected nothing behind it" in p.says("/clear all")
  assert "[forgotten]" in p.says("/clear") and p.heard("x") == (1, 1, 1)
  assert "is there already" in p.says("/save talk.json") and "[2 messages" in p.says("/save! talk.json")
  assert "[2 messages of talk.json]" in p.says("/load talk.json") and p.heard("x") == (1, 1, 2)
  assert "[no system message]" in p.says("/system") and "[system: Be brief.]" in p.says("/system Be brief.")
  assert "[think off]" in p.says("/set think off") and "thinking" not in (said := p.says("hello")) and "heard 5" in said
  assert "temperature: expected 0 or more" in p.says("/set temperature -1") and "[top_p 0.5]" in p.says("/set top_p=0.5")
  assert re.search(r"top_p +0.5\s.*think +off\s", p.says("/set"), re.S)
  # what a model says moves and colours nothing
  raw = p.says("escape")
  assert r"a\x1b[31mred\x07\x9b2J\u202eb" in raw
  # Ctrl-C: an answer that was stopped is kept, a thought is not
  assert "[stopped]" in p.stops("forever", "ever ever ") and p.heard("x") == (1, 1, 6)
  p.says("/set think on")
  assert "in mid-thought: the question is not kept" in p.stops("ponder", "[thinking]\r\n") and p.heard("x") == (1, 1, 7)
  p.stops("ponder", "[thinking]\r\n")
  assert "[stopped]" in p.stops("/regen", "[thinking]\r\n")
  # what is typed while an answer comes is the next message, also a paste
  p.terminal.type("forever\r")
  p.terminal.until("ever ever ")
  p.terminal.type(CTRL_C + paste("b\nc") + "\r")
  p.terminal.until("heard 3 characters, 2 lines, 9 turns")
  p.terminal.until(">")
  # Ctrl-C with nothing to stop asks again
  p.terminal.type("never said" + CTRL_C)
  p.terminal.until("\x1b[?2004l")
  p.terminal.until(">")
  assert p.heard("x") == (1, 1, 10)
  p.leaves()
  # another day: the history is there, and nobody else reads it
  p = person()
  assert p.heard(UP + UP) == (3, 2, 1)
  p.leaves("/exit\r")
  assert (tmp_path / "state/tinygrad-mla/history").stat().st_mode & 0o777 == 0o600

def test_a_full_context_and_no_place_for_a_history(person):
  p = person(1000, XDG_STATE_HOME="/dev/null/x")
  assert p.read.count("the history is not kept") == 1
  assert [p.heard("x" * 300)[2] for _ in range(2)] == [1, 2]
  said = p.says("x" * 300)
  assert "the oldest turn is forgotten" in said and "2 turns" in said
  assert "the message has 1" in (said := p.says("y" * 1000)) and "the context holds 1000" in said
  assert p.heard(UP * 2)[0] == 300
  assert "the context of 1000 tokens is full" in p.says("forever")
  p.leaves()

"""What reaches a terminal: a model's words and a file's names with nothing in them that steers it, dim text, the line that says what is done."""
from __future__ import annotations
import codecs, functools, shutil, sys
from typing import TextIO

# C0 and C1 but for tab and line feed, and what turns the direction of text, are shown by their codes; a carriage return would overwrite, and goes
_STEERING = [*range(0x20), *range(0x7f, 0xa0), 0x61c, 0x200e, 0x200f, *range(0x2028, 0x202f), *range(0x2066, 0x206a)]
_SHOWN = {c: chr(c).encode("unicode_escape").decode() for c in _STEERING if chr(c) not in "\t\n"} | {ord("\r"): ""}

def safe(text:str) -> str:
  """`text`, for a terminal. It works character by character, so pieces may be cut anywhere."""
  return text.translate(_SHOWN)
def safe_line(text:str) -> str:
  """`text` on one line"""
  return safe(text.replace("\n", "\\n").replace("\t", " "))

@functools.cache
def _colors(stream:TextIO) -> str|None:
  from rich.console import Console
  return Console(file=stream).color_system

def dim(text:str, stream:TextIO) -> str:
  """`text`, dimmed where `stream` is a terminal that can"""
  if not stream.isatty() or not text: return text
  from rich.style import Style
  return Style(dim=True).render(text, color_system=_colors(stream))

def note(text:str) -> None:
  """A line beside the answers: on stderr"""
  doing("")
  print(dim(safe(text), sys.stderr), file=sys.stderr, flush=True)

_standing = ""
def doing(text:str) -> None:
  """A line that says what is being done, in place of the one before it; "" takes it away. Only where stderr is a terminal."""
  global _standing
  if text == _standing or not sys.stderr.isatty(): return
  text = safe_line(text)[:shutil.get_terminal_size().columns - 1]
  print(f"\r{text}{' ' * (len(_standing) - len(text))}" + ("" if text else "\r"), end="", file=sys.stderr, flush=True)
  _standing = text

def lossy(stream:TextIO) -> None:
  """Characters that the stream's encoding lacks become "?", which is said once, instead of ending the program"""
  def replace(e:UnicodeError) -> tuple[str, int]:
    assert isinstance(e, UnicodeEncodeError)
    say_once(f"the output's encoding is {stream.encoding}: characters that it lacks are printed as ?")
    return "?" * (e.end - e.start), e.end
  @functools.cache
  def say_once(line:str) -> None: note(line)
  codecs.register_error(name := f"lossy-{id(stream)}", replace)
  stream.reconfigure(errors=name)

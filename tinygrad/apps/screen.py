"""What may reach a terminal: a model's words and a file's names without control characters, dim text, and the line that says what is being done.

Whatever a file or a model gave passes `safe` or `safe_line` on its way to a person; terminal.py, models.py and llm.py print through here.
"""
from __future__ import annotations
import codecs, functools, shutil, sys
from typing import TextIO

# C0 and C1 except tab and line feed, and marks of writing direction, are shown by their codes; a carriage return, which would overwrite, is dropped
_STEERING = [*range(0x20), *range(0x7f, 0xa0), 0x61c, 0x200e, 0x200f, *range(0x2028, 0x202f), *range(0x2066, 0x206a)]
_SHOWN = {c: chr(c).encode("unicode_escape").decode() for c in _STEERING if chr(c) not in "\t\n"} | {ord("\r"): ""}

def safe(text:str) -> str:
  """`text` without anything that steers a terminal. It works character by character, so pieces may be cut anywhere."""
  return text.translate(_SHOWN)
def safe_line(text:str) -> str:
  """The same on one line"""
  return safe(text.replace("\n", "\\n").replace("\t", " "))

@functools.cache
def _colors(stream:TextIO) -> str|None:
  from rich.console import Console
  return Console(file=stream).color_system

def dim(text:str, stream:TextIO) -> str:
  """`text`, dimmed where `stream` is a terminal with colors"""
  if not stream.isatty() or not text: return text
  from rich.style import Style
  return Style(dim=True).render(text, color_system=_colors(stream))

def note(text:str) -> None:
  """Prints a line beside the answers, on stderr"""
  doing("")
  print(dim(safe(text), sys.stderr), file=sys.stderr, flush=True)

_standing = ""
def doing(text:str) -> None:
  """Shows a line that says what is being done, in place of the one before it; "" takes it away. Only where stderr is a terminal."""
  global _standing
  if text == _standing or not sys.stderr.isatty(): return
  text = safe_line(text)[:shutil.get_terminal_size().columns - 1]
  print(f"\r{text}{' ' * (len(_standing) - len(text))}" + ("" if text else "\r"), end="", file=sys.stderr, flush=True)
  _standing = text

def lossy(stream:TextIO) -> None:
  """From here on, characters that the stream's encoding lacks are printed as "?", with one note, instead of raising"""
  def replace(e:UnicodeError) -> tuple[str, int]:
    assert isinstance(e, UnicodeEncodeError)
    note_once(f"the output's encoding is {stream.encoding}: characters that it lacks are printed as ?")
    return "?" * (e.end - e.start), e.end
  @functools.cache
  def note_once(line:str) -> None: note(line)
  codecs.register_error(name := f"lossy-{id(stream)}", replace)
  stream.reconfigure(errors=name)

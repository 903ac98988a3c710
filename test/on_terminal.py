"""Processes as a person starts them: with pipes, or on a terminal of their own where keys are signals."""
from __future__ import annotations
import fcntl, os, re, select, signal, subprocess, sys, termios, time
from pathlib import Path
from tinygrad.apps.models import ROOT

LLM = [sys.executable, str(ROOT / "tinygrad/apps/llm.py")]
# no hub and no cache of one: nothing listens on this port
OFFLINE = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": "no-such-folder", "HF_HUB_OFFLINE": "0"}
NO_PROXY = [k for k in os.environ if k.lower().endswith("_proxy")]
UP, CTRL_C, CTRL_D, ALT_ENTER = "\x1b[A", "\x03", "\x04", "\x1b\r"

def environ(env:dict[str, str]) -> dict[str, str]:
  return {k: v for k, v in os.environ.items() if k not in NO_PROXY and not k.startswith("PYTHON")} | OFFLINE | env
def paste(text:str) -> str:
  """What a terminal sends for a paste where the program asked for brackets around it"""
  return f"\x1b[200~{text}\x1b[201~"
def plain(seen:str) -> str:
  """Without the sequences that move, colour and erase"""
  return re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])", "", seen)

class Terminal:
  """A process on a terminal of its own. A terminal emulator answers where the cursor is; this one does not, and says so."""
  def __init__(self, command:list[str], cwd:Path|None=None, **env:str):
    self.unread = bytearray()
    self.master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=cwd, start_new_session=True,
                                    preexec_fn=self.take, env=environ({"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"} | env))
    os.close(slave)
  @staticmethod
  def take() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored, which is inherited
  def type(self, keys:str) -> None:
    data = keys.encode()
    while data:  # who types more than a terminal holds goes on reading
      if select.select([self.master], [], [], 0)[0]: self._read()
      if select.select([], [self.master], [], .01)[1]: data = data[os.write(self.master, data[:1024]):]
  def _read(self) -> bool:
    try: piece = os.read(self.master, 4096)
    except OSError: piece = b""  # Linux's word for the end
    self.unread += piece
    return bool(piece)
  def until(self, text:str, seconds:float=120) -> str:
    """What is printed up to and with `text`; AssertionError where it does not come"""
    end, wanted, start = time.monotonic() + seconds, text.encode(), 0
    while (at := self.unread.find(wanted, start)) < 0:
      start = max(len(self.unread) - len(wanted), 0)
      there = select.select([self.master], [], [], max(0, end - time.monotonic()))[0] and self._read()
      assert there, f"no {text!r} in {bytes(self.unread[-2000:])!r}"
    seen, self.unread = self.unread[:at + len(wanted)], self.unread[at + len(wanted):]
    return seen.decode(errors="replace")
  def rest(self, seconds:float=60) -> str:
    """What else is printed until the process ends"""
    while select.select([self.master], [], [], seconds)[0] and self._read(): pass
    self.process.wait(seconds)
    return self.unread.decode(errors="replace")
  def close(self) -> None:
    self.process.kill()
    self.process.wait()
    os.close(self.master)

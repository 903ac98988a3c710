"""A person at a terminal: an answer as it comes (print_stream), and a conversation with its commands (chat_loop).

An answer is models.py's `Answer`, whose pieces are told apart by reasoning.py. What may reach the terminal, and the lines beside it on stderr, are
screen.py's. Flags are llm.py's.
"""
from __future__ import annotations
import contextlib, difflib, json, os, re, secrets, signal, stat, sys, tempfile, threading
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Callable, Iterator
from tinygrad import Device
from tinygrad.apps.gguf import GGUFError
from tinygrad.apps.engine.engine import DeviceFailed
from tinygrad.apps.models import Answer, Model, UserError, out_of_memory
from tinygrad.apps.reasoning import ANSWER, MARK, OPEN, REASONING
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.screen import dim, doing, note, safe, safe_line

SEEDS = 1 << 32
MAX_PROMPT = 1 << 24  # bytes of a text that is to be answered, past any context

def read_text(what:str, path:str, limit:int=MAX_PROMPT, regular:bool=False) -> str:
  """The text of a UTF-8 file, or of stdin for "-". regular: whether it must be a regular file. Raises UserError, which begins with `what`, for a file
  that cannot be read, is no UTF-8, or has more than `limit` bytes."""
  try:
    if stdin := path == "-" and not regular:
      if sys.stdin is None: raise UserError(f"{what} -: stdin is closed")
    elif regular and not stat.S_ISREG(os.stat(path).st_mode): raise UserError(f"{what} {path}: expected a regular file")
    with contextlib.nullcontext(sys.stdin.buffer) if stdin else open(path, "rb") as f: data = f.read(limit + 1)
    if len(data) > limit: raise UserError(f"{what} {path}: expected at most {limit >> 20} MB, found more")
    return data.decode()
  except OSError as e: raise UserError(f"{what} {path}: {e.strerror}") from None
  except UnicodeDecodeError as e: raise UserError(f"{what} {path}: expected UTF-8, found byte 0x{data[e.start]:02x} at {e.start}") from None
  except ValueError as e: raise UserError(f"{what} {path}: {e}") from None  # a name that no file can have

@dataclass
class Options:
  """How to answer. think: None leaves it to the template; stats: None shows them on a terminal."""
  sampling: Sampling = Sampling()
  count: int|None = None
  stops: tuple[str, ...] = ()
  think: bool|None = None
  hide_think: bool = False
  stats: bool|None = None

  @property
  def template(self) -> dict[str, Any]: return {} if self.think is None else {"enable_thinking": self.think}

def drawing(s:Sampling) -> str:
  """Sampling in words, as --stats prints it"""
  if not s.temperature: return "greedy"
  changed = [f.name for f in fields(s) if f.name not in ("temperature", "seed", "bias") and getattr(s, f.name) != f.default]
  bias = f", bias of {len(s.bias)} tokens" if s.bias else ""
  return ", ".join(f"{name} {getattr(s, name):.6g}" for name in ("temperature", *changed)) + bias + f", seed {s.seed}"

# ---- an answer ----

@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
  """The first Ctrl-C sets the event, so that no kernel's capture is left half done; the second raises KeyboardInterrupt"""
  asked = threading.Event()
  def ask(*_) -> None:
    if asked.is_set(): raise KeyboardInterrupt
    asked.set()
  # a shell's background job ignores Ctrl-C, and Python takes signals in its main thread alone
  if threading.current_thread() is not threading.main_thread() or (before := signal.getsignal(signal.SIGINT)) == signal.SIG_IGN:
    yield asked
    return
  signal.signal(signal.SIGINT, ask)
  try: yield asked
  finally: signal.signal(signal.SIGINT, before)

class Screen:
  """Prints the pieces of an answer to stdout. A terminal gets no control characters, and reasoning dim between marks; a pipe gets the model's text.
  verbatim: reasoning and answer are printed alike."""
  def __init__(self, verbatim:bool, hide_think:bool):
    self.terminal = sys.stdout.isatty()
    self.verbatim, self.hide_think = verbatim or not (self.terminal or hide_think), hide_think and not verbatim
    self.kind, self.begun = ANSWER, False

  def show(self, kind:str, text:str) -> None:
    if not self.verbatim:
      if self.hide_think and kind != ANSWER: return doing("thinking")
      if kind == MARK: return
      if kind != self.kind: self._change(kind)
      if not self.begun: text = text.lstrip()
      self.begun |= bool(text)
    doing("")
    self._write(text, kind == REASONING and not self.verbatim)

  def end(self) -> None:
    doing("")
    if self.kind == REASONING: self._change(ANSWER)
    else: self._write("\n", False)

  def _change(self, kind:str) -> None:
    doing("")
    self._write("[thinking]\n" if kind == REASONING else "\n[end of thinking]\n", True)
    self.kind, self.begun = kind, False
  def _write(self, text:str, thought:bool) -> None:
    if self.terminal: text = dim(safe(text), sys.stdout) if thought else safe(text)
    print(text, end="", flush=True)

@dataclass
class Printed:
  """What an answer was"""
  answer: str = ""
  reasoning: str = ""
  stopped: bool = False   # whether the person stopped it
  thinking: bool = False  # whether it ended inside reasoning

def print_stream(answer:Answer, options:Options, prompt:str|None=None) -> Printed:
  """Prints an answer to stdout as it comes, and notes and figures to stderr; Ctrl-C stops it. prompt: the raw prompt, which is printed before what
  continues it. Raises ContextFull, ValueError."""
  printed, screen, engine = Printed(), Screen(prompt is not None, options.hide_think), answer.model.engine
  pieces = iter(answer)
  doing(f"{'reading' if engine.kernels_a_token else 'preparing kernels, reading'} {len(answer.ids)} tokens (Ctrl-C twice breaks off)")
  try:
    with stopping() as asked:
      try:
        piece = next(pieces, None)
        screen.show(ANSWER, prompt or "")  # only now: one that does not fit is not printed
        while piece is not None:
          kind, text = piece
          screen.show(kind, text)
          if kind == ANSWER: printed.answer += text
          if kind == REASONING: printed.reasoning += text
          printed.thinking = kind == REASONING or (kind == MARK and text.endswith(OPEN))
          piece = None if asked.is_set() else next(pieces, None)
      except KeyboardInterrupt: asked.set()
      except (MemoryError, RuntimeError):
        if answer.tokens: screen.end()   # what is said of it stands on a line of its own
        raise
      printed.stopped = asked.is_set() and not answer.done
  finally:
    pieces.close()
    doing("")
  screen.end()
  if printed.stopped: note("[stopped]")
  elif answer.full and not answer.done: note(f"[the context of {engine.capacity} tokens is full]")
  if options.stats or (options.stats is None and sys.stdout.isatty() and sys.stderr.isatty()):
    rate = f", {r:.1f} tok/s" if (r := answer.tokens_a_second) else ""
    first = f", the first after {answer.seconds_to_first:.2f} s" if answer.tokens else ""
    note(f"[{answer.tokens} token{'s' if answer.tokens != 1 else ''}{rate}{first}{'; ' + drawing(options.sampling) if options.stats else ''}]")
  return printed

# ---- a conversation ----

BLOCK = '"""'
def open_block(text:str) -> bool:
  """Whether a block of lines has begun in \"\"\" and not ended"""
  text = text.strip()
  return text.startswith(BLOCK) and (len(text) < 2 * len(BLOCK) or not text.endswith(BLOCK))
def unblocked(text:str) -> str:
  """A message without the \"\"\" around it"""
  inner = text.strip()
  return inner[len(BLOCK):-len(BLOCK)].strip("\n") if inner.startswith(BLOCK) and not open_block(inner) else text

class Lines:
  """Messages from a stdin that is no terminal: a line each, or a block between \"\"\". `read` raises EOFError at the end,
  UserError for one too long"""
  def read(self) -> str:
    text = sys.stdin.readline(MAX_PROMPT + 1)
    while open_block(text) and len(text) <= MAX_PROMPT and (line := sys.stdin.readline(MAX_PROMPT + 1)): text += line
    if not text: raise EOFError
    if len(text) > MAX_PROMPT: raise UserError(f"stdin: expected messages of at most {MAX_PROMPT >> 20} MB, found more")
    return text.removesuffix("\n")
  def close(self) -> None: pass

def history_file() -> Path:
  """The file that keeps what was typed, made where there is none. Raises OSError, RuntimeError where it cannot be."""
  state = os.environ.get("XDG_STATE_HOME", "")
  path = (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "tinygrad-mla" / "history"
  path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
  os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600))  # it is the person's alone
  return path

class Keyboard:
  """Messages from a terminal: lines of any length, edited, with a history; a paste is one message. Keys typed while an answer comes are not shown
  until the next question. read raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C."""
  def __init__(self, commands:list[str]):
    import termios
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output.defaults import create_output
    from prompt_toolkit.utils import is_dumb_terminal
    keys = KeyBindings()
    @keys.add("enter")
    def _(event) -> None:
      if open_block(event.current_buffer.text): event.current_buffer.newline(copy_margin=False)
      else: event.current_buffer.validate_and_handle()
    @keys.add("escape", "enter")
    def _(event) -> None: event.current_buffer.newline(copy_margin=False)

    class CheckedHistory(FileHistory):
      def store_string(self, text:str) -> None:
        try: super().store_string(text)
        except OSError as e: lost(e)
    errors:list[OSError] = []
    def lost(e:OSError) -> None:
      if not errors: note(f"[the history is not kept: {e.filename or 'its file'}: {e.strerror}]")
      errors.append(e)
    try: history = CheckedHistory(history_file())
    except (OSError, RuntimeError) as e:  # RuntimeError: the user has no home folder
      lost(e if isinstance(e, OSError) else OSError(0, str(e)))
      history = InMemoryHistory()
    self.dumb = is_dumb_terminal()
    output = None if self.dumb else create_output(always_prefer_tty=True)  # answers alone go to a stdout that is a file
    self.session = PromptSession(history=history, multiline=True, key_bindings=keys, output=output, completer=WordCompleter(commands, sentence=True),
                                 complete_while_typing=False, prompt_continuation="  ")
    self.modes, wait = termios.tcgetattr(sys.stdin), termios.tcgetattr(sys.stdin)
    wait[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, wait)
    signal.signal(signal.SIGTERM, self.ended)

  def read(self) -> str:
    text = self.session.prompt("> ")
    self.bracketed_paste(True)  # a paste while an answer comes is one message, too
    return text
  def bracketed_paste(self, on:bool) -> None:
    if self.dumb: return
    output = self.session.output
    output.enable_bracketed_paste() if on else output.disable_bracketed_paste()
    output.flush()
  def ended(self, *_) -> None:
    """Ends the process on a signal, whatever it is doing: the shell finds its terminal as it was"""
    import termios
    if not self.dumb: os.write(self.session.output.fileno(), b"\x1b[?2004l\x1b[0m\r\n")
    termios.tcsetattr(sys.stdin, termios.TCSANOW, self.modes)
    os._exit(128 + signal.SIGTERM)
  def close(self) -> None:
    import termios
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    self.bracketed_paste(False)
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self.modes)

Message = dict[str, str]
ROLES = ("system", "user", "assistant")
SWITCHES = {"on": True, "off": False}

class Refused(Exception):
  """A command that cannot be done. str(e) is one line."""

class Conversation:
  """Messages, answered one after another until `source` ends. A message that begins with / and a word is a command, which raises Refused where it
  cannot be done. Raises GGUFError, ValueError where the file's template cannot ask for an answer."""
  def __init__(self, model:Model, options:Options, system:str="", source:Lines|Keyboard|None=None):
    self.model, self.options, self.system = model, options, system
    self.messages: list[Message] = []
    self.unanswered = ""          # a question whose answer was not kept
    self.file: Path|None = None   # where the conversation was saved to or loaded from
    self.leaving = False
    self.commands: dict[str, tuple[Callable[[str], None], str, str]] = {
      "/help": (self.help, "", "this list"),
      "/clear": (self.clear, "", "forget the conversation; the system's message stays"),
      "/regen": (self.regen, "", "answer the last question again"),
      "/undo": (self.undo, "", "take back the last question and its answer"),
      "/system": (self.set_system, "[TEXT]", 'show the system message, or set it; "" is none'),
      "/set": (self.set, "[NAME VALUE]", f"show the settings, or set one: {', '.join(self.settings)}"),
      "/save": (self.save, "[FILE]", "write the conversation as JSON, to where it came from or to a new file"),
      "/save!": (lambda text: self.save(text, over=True), "FILE", "the same, over a file that is there"),
      "/load": (self.load, "FILE", "go on with a conversation that was saved"),
      "/exit": (self.exit, "", "leave, as Ctrl-D does"),
    }
    self.prompt([{"role": "user", "content": "?"}])  # a template that cannot ask is found out now
    self.terminal = source is None and sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())
    self.source = source or (Keyboard(list(self.commands)) if self.terminal else Lines())

  def run(self) -> None:
    try:
      while not self.leaving:
        try: self.handle(self.source.read())
        except EOFError:
          return print(file=sys.stderr) if self.terminal else None
        except KeyboardInterrupt: pass  # with no answer to stop it asks again
    finally: self.source.close()

  def handle(self, text:str) -> None:
    """Runs a command, or answers a message"""
    if (m := re.fullmatch(r"(/[a-z]+!?)(?:\s+(.*))?", text.strip(), re.I | re.S)) is None:
      if (text := unblocked(text).strip("\n")).strip(): self.ask(text)
      return
    name, rest = m[1].lower(), (m[2] or "").strip()
    try:
      if (command := self.commands.get(name)) is None:
        near = difflib.get_close_matches(name, self.commands, 1)
        raise Refused(f"no such command: {name}{f'; did you mean {near[0]}?' if near else ''} /help lists them")
      if rest and not command[1]: raise Refused(f"{name}: expected nothing behind it, found {rest}")
      command[0](rest)
    except Refused as e: note(f"[{safe_line(str(e))}]")

  # ---- answers ----
  def prompt(self, messages:list[Message]) -> list[int]:
    system = [{"role": "system", "content": self.system}] if self.system else []
    return self.model.render([*system, *messages], **self.options.template)

  def fitting(self, messages:list[Message]) -> tuple[list[Message], list[int]]:
    """The newest turns that leave room for an answer, and their prompt's ids. Raises Refused where the last question alone is too long."""
    ids, capacity = self.prompt(messages), self.model.engine.capacity
    room = max(min(capacity // 4, self.options.count or capacity), 1)
    starts = [i for i, m in enumerate(messages) if m["role"] == "user"]
    if len(ids) + room <= capacity: return messages, ids
    if len(alone := self.prompt(messages[starts[-1]:])) >= capacity:
      raise Refused(f"the message has {len(alone)} tokens, the context holds {capacity}: shorten it, or start again with a larger --max_context")
    for gone, start in enumerate(starts):
      ids = self.prompt(messages[start:])
      if len(ids) + room <= capacity or start == starts[-1]: break
    if gone: note(f"[the context of {capacity} tokens is full: the oldest {f'{gone} turns are' if gone > 1 else 'turn is'} forgotten]")
    return messages[start:], ids

  def answer(self, messages:list[Message], sampling:Sampling) -> None:
    """Prints the answer to the messages. Where there is one to keep, they and it become the conversation. A device's failure is said on a terminal,
    where the conversation can still be saved. Raises it elsewhere."""
    try:
      messages, ids = self.fitting(messages)
      options = replace(self.options, sampling=sampling)
      printed = print_stream(Answer(self.model, ids, options.count, sampling, options.stops), options)
    except (Refused, GGUFError, ValueError) as e: return note(f"[{safe_line(str(e))}]")
    except (MemoryError, DeviceFailed) as e:
      if not self.terminal: raise
      what, then = (out_of_memory(e), "/regen asks again") if isinstance(e, MemoryError) else (str(e), "/save keeps the conversation")
      return note(f"[{safe_line(what)}: the answer is not kept; {then}]")
    content, reasoning = printed.answer.strip(), printed.reasoning.strip()
    if not content and (printed.stopped or printed.thinking):
      why = "in mid-thought" if printed.thinking else "before a word"
      kept = "the question is not kept" if self.unanswered else "the answer before stays"
      return note(f"[it ended {why}: {kept}; /regen asks again]")
    thought = {"reasoning_content": reasoning} if reasoning else {}
    self.messages, self.unanswered = [*messages, {"role": "assistant", "content": content, **thought}], ""

  def ask(self, text:str) -> None:
    self.unanswered = text
    self.answer([*self.messages, {"role": "user", "content": text}], self.options.sampling)

  # ---- commands ----
  def help(self, _:str) -> None:
    for name, (_, takes, text) in self.commands.items(): note(f"{name + ' ' + takes:20s} {text}")
    note('Alt-Enter begins a line, and so does Enter between """ and """; a paste is one message; Ctrl-C stops an answer')

  def clear(self, _:str) -> None:
    self.messages, self.unanswered, self.file = [], "", None
    note("[forgotten]")

  def last_question(self) -> int:
    """Its index among the messages. Raises Refused where there is none."""
    questions = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
    if not questions: raise Refused("nothing was asked yet")
    return questions[-1]

  def regen(self, _:str) -> None:
    if self.unanswered: return self.ask(self.unanswered)
    question, s = self.last_question(), self.options.sampling
    if not s.temperature: note("[at temperature 0 the words are the same again; /set temperature 1 draws others]")
    # draws are numbered by position: with the same seed they would repeat
    self.options.sampling = replace(s, seed=(s.seed + 1) % SEEDS)
    self.answer(self.messages[:question + 1], self.options.sampling)

  def undo(self, _:str) -> None:
    question, self.unanswered = self.last_question(), ""
    note(f"[taken back: {safe_line(self.messages[question]['content'])[:60]}]")
    self.messages = self.messages[:question]

  def set_system(self, text:str) -> None:
    if text: self.system = "" if text in ('""', "''") else unblocked(text)
    note(f"[system: {self.system}]" if self.system else "[no system message]")

  settings = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "count", "think", "hide_think", "stats")
  def set(self, text:str) -> None:
    o, (name, _, value) = self.options, text.replace("=", " ").partition(" ")
    name, value = name.replace("-", "_").strip(), value.strip()
    if not name:
      values = {**vars(o.sampling), **{k: getattr(o, k) for k in ("count", "think", "hide_think", "stats")}}
      words = {None: "by itself", True: "on", False: "off"}
      for k in self.settings: note(f"{k:15s} {values[k]:.6g}" if type(values[k]) in (int, float) else f"{k:15s} {words[values[k]]}")
      return
    if name not in self.settings: raise Refused(f"/set: expected one of {', '.join(self.settings)}, found {name}")
    try:
      if name in ("think", "hide_think", "stats"): setattr(o, name, SWITCHES[value])
      elif name == "count":
        if (n := int(value)) < 1 and n != -1: raise ValueError("count: expected 1 or more, or -1 for no limit")
        o.count = n if n > 0 else None
      elif name == "seed": o.sampling = replace(o.sampling, seed=chosen_seed(int(value)))
      else: o.sampling = replace(o.sampling, **{name: int(value) if name == "top_k" else float(value)})
    except (ValueError, OverflowError, KeyError) as e:
      expected = "on or off" if isinstance(e, KeyError) else "a number"
      raise Refused(str(e) if str(e).startswith(f"{name}: ") else f"{name}: expected {expected}, found {value or 'nothing'}") from None
    note(f"[{name} {value}]")

  def save(self, text:str, over:bool=False) -> None:
    path = Path(os.path.expanduser(text)) if text else self.file
    if path is None: raise Refused("/save: expected a file's name behind it")
    system = [{"role": "system", "content": self.system}] if self.system else []
    data = json.dumps({"model": self.model.name, "messages": [*system, *self.messages]}, indent=1)
    try:
      if not over and path != self.file and os.path.lexists(path): raise Refused(f"{path} is there already: /save! {path} writes over it")
      # whole or not at all: a full disk leaves what was there
      with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name[:100]}.", delete=False, encoding="utf-8") as f:
        try:
          f.write(data + "\n")
          f.flush()
          os.replace(f.name, path)
        except BaseException:
          os.unlink(f.name)
          raise
    except (OSError, ValueError) as e: raise Refused(f"/save {path}: {getattr(e, 'strerror', None) or e}") from None
    self.file = path
    note(f"[{len(self.messages)} messages in {path}]")

  def load(self, text:str) -> None:
    if not text: raise Refused("/load: expected a file's name behind it")
    path = Path(os.path.expanduser(text))
    try: system, messages = conversation_of(read_text("/load", str(path), regular=True), f"/load {path}")
    except UserError as e: raise Refused(str(e)) from None
    self.system, self.messages, self.unanswered, self.file = system, messages, "", path
    note(f"[{len(messages)} messages of {path}{', and a system message' if system else ''}]")

  def exit(self, _:str) -> None: self.leaving = True

def conversation_of(text:str, what:str) -> tuple[str, list[Message]]:
  """(the system's message or "", the other messages) of a JSON text: an object that /save wrote, or a list of messages. what: what the UserError that
  it raises for any other begins with."""
  try: data = json.loads(text)
  except (ValueError, RecursionError) as e: raise UserError(f"{what}: expected JSON, found {e}") from None
  saved = data.get("messages") if isinstance(data, dict) else data
  if not isinstance(saved, list): raise UserError(f"{what}: expected messages, found {type(saved).__name__}")
  for n, m in enumerate(saved):
    if not isinstance(m, dict) or m.get("role") not in ROLES or not isinstance(m.get("content"), str):
      raise UserError(f"{what}: message {n}: expected a role of {', '.join(ROLES)} and a content that is text")
    if m["role"] == "system" and n: raise UserError(f"{what}: message {n}: expected the system's message to be the first")
  messages = [{k: m[k] for k in ("role", "content", "reasoning_content") if isinstance(m.get(k), str)} for m in saved]
  if messages and messages[-1]["role"] == "user": raise UserError(f"{what}: expected an answer to every question, found none to the last")
  return (messages[0]["content"], messages[1:]) if messages and messages[0]["role"] == "system" else ("", messages)

def chosen_seed(seed:int|None) -> int:
  """`seed`, or a random one for None and -1. Raises ValueError for one out of Sampling's range."""
  return secrets.randbelow(SEEDS) if seed in (None, -1) else Sampling(seed=seed).seed

def chat_loop(model:Model, options:Options, system:str="", introduction:str="") -> None:
  """Runs a conversation on stdin, until its end or /exit. stdout gets the answers alone. introduction: the first words on a terminal, in place of the
  model's name. Raises GGUFError, UserError."""
  if sys.stdin is None: raise UserError("stdin is closed: expected --prompt, -f or a conversation on it")
  doing("")
  conversation = Conversation(model, options, system)
  if conversation.terminal:
    note(f"{introduction or f'{model.name} on {Device.DEFAULT}'}, a context of {model.engine.capacity} tokens, {model.engine.pool.rows} in all")
    note("/help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.")
  conversation.run()

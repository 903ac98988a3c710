"""The chat: through a terminal as a person drives it, through pipes, and piece by piece. The model is test/talker.py, whose words are known."""
from __future__ import annotations
import io, itertools, json, re, subprocess, sys, termios
from pathlib import Path
from typing import Iterator
import pytest
from on_terminal import ALT_ENTER, CTRL_C, CTRL_D, UP, Terminal, environ, paste, plain
from talker import SPECIALS, Talker, vocabulary
from tinygrad.apps.models import ROOT, Answer, UserError
from tinygrad.apps.reasoning import ANSWER, MARK, REASONING, Reasoning
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps import screen, terminal
from tinygrad.apps.terminal import Conversation, Lines, Options, read_text, unblocked

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
  def modes(self) -> int: return termios.tcgetattr(self.terminal.master)[3]
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
  assert "temperature: expected 0" in p.says("/set temperature -1") and "[top_p 0.5]" in p.says("/set top_p=0.5")
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
  p.terminal.until("\x1b[?2004l")
  p.terminal.until("\x1b[?2004h")                        # the terminal goes on putting brackets around a paste
  p.terminal.until("ever ever ")
  assert not p.modes() & (termios.ECHO | termios.ICANON) and p.modes() & termios.ISIG
  p.terminal.type(CTRL_C + paste("b\n" + "c" * 9998) + "\r")
  p.terminal.until("heard 10000 characters, 2 lines, 9 turns")
  p.terminal.until(">")
  # Ctrl-C with nothing to stop asks again
  p.terminal.type("never said" + CTRL_C)
  p.terminal.until("\x1b[?2004l")
  p.terminal.until(">")
  assert p.heard("x") == (1, 1, 10)
  p.leaves()
  # another day: the history is there, and nobody else reads it
  p = person()
  assert p.heard(UP + UP) == (10000, 2, 1)
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
  # whoever ends the process, the terminal is what it was
  assert not p.modes() & (termios.ECHO | termios.ICANON)
  p.terminal.process.terminate()
  assert "\x1b[?2004l" in p.terminal.rest() and p.terminal.process.returncode == 143
  assert p.modes() & termios.ECHO and p.modes() & termios.ICANON

def test_a_device_that_fails(person):
  """In the middle of an answer: one line below it, and the conversation can still be saved"""
  p = person()
  p.says("/set think off")
  assert p.heard("x") == (1, 1, 1)
  line = r"half an\s+\[%s: the answer is not kept; %s\]\s+>$"
  assert re.search(line % ("out of memory: no room; a smaller --max_context needs less", "/regen asks again"), p.says("full"))
  assert re.search(line % ("the device failed: CUDA:1: gone", "/save keeps the conversation"), p.says("broken"))
  assert "[2 messages in talk.json]" in p.says("/save talk.json")
  p.leaves()

# ---- pipes ----

def through_pipes(talk:str, *args:str) -> subprocess.CompletedProcess[str]:
  return subprocess.run([*TALKER, "65536", *args], input=talk, capture_output=True, text=True, env=environ({}))

def test_a_conversation_through_pipes():
  p = through_pipes('hello\n"""\none\ntwo\n"""\n/what\nescape\n/exit\nnever said\n')
  assert p.returncode == 0 and p.stdout == ("thought on and on </think>heard 5 characters, 1 lines, 1 turns, seed 7\n"
                                            "thought on and on </think>heard 7 characters, 2 lines, 2 turns, seed 7\n"
                                            "thought on and on </think>a\x1b[31mred\x07\x9b2J\u202eb\tc\n")
  assert p.stderr == "[no such command: /what /help lists them]\n"

# ---- reasoning ----

class Cut:
  """A tokenizer whose tokens are the parts that a text is cut into"""
  special_tokens: dict = {}
  def __init__(self, parts:list[str], prompt:str): self.parts, self.prompt = parts, prompt
  def decode(self, ids:list[int]) -> str: return self.prompt
  def stream(self) -> Cut: return self
  def push(self, i:int) -> str: return self.parts[i]
  def flush(self) -> str: return ""

def told_apart(parts:list[str], prompt:str="") -> list[tuple[str, str]]:
  """The pieces, neighbours of a kind joined"""
  r, out = Reasoning(Cut(parts, prompt), []), []
  for piece in [*(p for i in range(len(parts)) for p in r.push(i)), *r.flush()]:
    if out and out[-1][0] == piece.kind: out[-1] = (piece.kind, out[-1][1] + piece.text)
    else: out.append(tuple(piece))
  return out

@pytest.mark.parametrize("text, prompt, expected", [
  ("a < b</thin</think>c</think>d", "<think>\n", [(REASONING, "a < b</thin"), (MARK, "</think>"), (ANSWER, "c</think>d")]),
  ("</think>\n\nc", "x<think>", [(MARK, "</think>"), (ANSWER, "\n\nc")]),
  ("never ends</thi", "<think>", [(REASONING, "never ends</thi")]),
  ("\n<think>a</think>b<think>c", "<think>x", [(MARK, "\n<think>"), (REASONING, "a"), (MARK, "</think>"), (ANSWER, "b<think>c")]),
  ("<thin ice", "", [(ANSWER, "<thin ice")]), ("  <", "", [(ANSWER, "  <")]), ("say <think>", "", [(ANSWER, "say <think>")])])
def test_reasoning_by_text_however_it_is_cut(text, prompt, expected):
  for size in range(1, len(text) + 1):
    for first in range(size):
      parts = [text[:first], *(text[i:i + size] for i in range(first, len(text), size))]
      assert told_apart(parts, prompt) == expected, parts
  assert "".join(t for _, t in expected) == text

def test_reasoning_by_token():
  t = vocabulary()
  def pieces(said:str, prompt:str) -> list:
    r = Reasoning(t, t.encode(prompt, special=True))
    return [tuple(p) for i in t.encode(said, special=True) for p in r.push(i)] + [tuple(p) for p in r.flush()]
  assert pieces("é</think>b", "<|user|>q<|assistant|><think>") == [(REASONING, "é"), (MARK, "</think>"), (ANSWER, "b")]
  assert pieces("a</think>", "</think>") == [(ANSWER, "a"), (ANSWER, "</think>")]
  # spelled by letters, it is text
  r = Reasoning(t, t.encode("<think>", special=True))
  assert {p.kind for i in t.encode("</think>x") for p in r.push(i)} == {REASONING}
  lacking = vocabulary([s for s in SPECIALS if "think" not in s])
  r = Reasoning(lacking, lacking.encode("<|assistant|><think>\n", special=True))
  assert "".join(p.text for i in lacking.encode("a</think>b") for p in r.push(i) if p.kind == ANSWER) == "b"

def test_a_stop_ends_the_answer_and_not_the_thought():
  m = Talker()
  a = Answer(m, m.render([{"role": "user", "content": "hello"}]), None, Sampling(), ("g", "on", "chars", "5 ch"))
  assert "".join(p.text for p in a) == "thought on and on </think>heard " and a.done
  a = Answer(m, m.render([{"role": "user", "content": "hello"}], enable_thinking=False), 8)
  assert "".join(p.text for p in a) == "heard 5 " and not a.done and a.tokens == 8
  with pytest.raises(ValueError): Answer(m, [1], None, Sampling(), ("",))

@pytest.mark.parametrize("size", [2, 7, 1000])
@pytest.mark.parametrize("count, stops", [(None, ()), (9, ()), (None, ("chars", "5 ch"))])
def test_tokens_that_come_together(size: int, count: int|None, stops: tuple):
  """The same words, of the same kinds and from as many tokens: marks, the end and a stop among them"""
  class Together(Talker):
    def bursts(self, s):
      tokens = list(self.stream(s))
      return (tokens[i:i + size] for i in range(0, len(tokens), size))
  def said(m: Talker) -> tuple:
    a = Answer(m, m.render([{"role": "user", "content": "hello"}]), count, Sampling(), stops)
    pieces = [tuple(piece) for piece in a]
    return [(kind, "".join(text for _, text in own)) for kind, own in itertools.groupby(pieces, lambda piece: piece[0])], a.tokens, a.done
  assert said(Together()) == said(Talker())

# ---- a conversation, step by step ----

class Heard:
  """What a person says, one after another"""
  def __init__(self, *texts:str): self.texts = list(texts)
  def read(self) -> str:
    if not self.texts: raise EOFError
    return self.texts.pop(0)
  def close(self) -> None: pass

def talk(*texts:str, model:Talker|None=None, options:Options|None=None, system:str="") -> Conversation:
  c = Conversation(model or Talker(), options or Options(Sampling(1.0, seed=7)), system, Heard(*texts))
  c.run()
  return c

def test_what_the_model_is_asked(capsys):
  m = Talker()
  c = talk("a", " ", "b", "/system Be brief.", "/regen", '/system ""', "/etc/passwd x", "// x", "/undo", model=m, system="Hi.")
  assert [p.split("<|assistant|>")[0] for p in m.prompts[:1]] == ["<|system|>Hi.<|user|>a"]
  assert m.prompts[2].startswith("<|system|>Be brief.<|user|>a<|assistant|>heard 1 char") and m.prompts[3].startswith("<|user|>a")
  assert "<|user|>/etc/passwd x<" in m.prompts[3] and "<|user|>// x<" in m.prompts[4]
  assert [msg["role"] for msg in c.messages] == ["user", "assistant"] * 3 and c.messages[1]["reasoning_content"] == "thought on and on"
  assert "thought" not in c.messages[1]["content"]

def test_stopping(capsys):
  """A stopped answer stays as far as it came; stopped before it, or in mid-thought, nothing does, and what was there before is still there"""
  class Stopped(Talker):
    def stream(self, s):
      at = next(stop, None)
      for n, token in enumerate(super().stream(s)):
        if n == at: raise KeyboardInterrupt
        yield token
  stop = iter([None, 40, 3, 0])
  c = talk("a", "b", "/regen", "/regen", model=Stopped())
  assert [m["content"][:6] for m in c.messages] == ["a", "heard ", "b", "heard "] and len(c.messages[3]["content"]) < 30
  err = capsys.readouterr().err
  assert err.count("[stopped]") == 3 and err.count("in mid-thought") == 1 and err.count("before a word") == 1
  assert err.count("the answer before stays") == 2
  for stop, texts in ((iter([3, None]), ("a", "/regen")), (iter([None, 3, None]), ("a", "/regen", "/regen"))):
    c = talk(*texts, model=Stopped())
    assert [m["role"] for m in c.messages] == ["user", "assistant"] and c.messages[1]["content"].startswith("heard 1 characters")

def test_the_oldest_turns_go_aloud(capsys):
  c = talk(*("x" * 100,) * 9, model=(m := Talker(900)), system="S" * 50)
  assert all(p.startswith("<|system|>" + "S" * 50) for p in m.prompts) and len(c.messages) < 18 and c.messages[0]["role"] == "user"
  assert capsys.readouterr().err.count("forgotten") > 1
  before = list(c.messages)
  c.handle("y" * 900)
  assert c.messages == before and "the context holds 900" in capsys.readouterr().err

def test_hidden_and_absent_thoughts(capsys):
  talk("a", options=Options(hide_think=True))
  talk("a", options=Options(think=False, stats=True))
  out, err = capsys.readouterr()
  assert out == "heard 1 characters, 1 lines, 1 turns, seed 0\n" * 2
  assert re.fullmatch(r"\[\d+ tokens, [\d.]+ tok/s, the first after [\d.]+ s; greedy\]\n", err)

def test_saved_conversations(tmp_path, capsys, monkeypatch):
  (folder := tmp_path / "folder").mkdir()
  path = tmp_path / "talk.json"
  c = talk("a", f"/save {path}", "b", "/save", system="Hi.")
  saved = json.loads(path.read_text())
  assert [m["role"] for m in saved["messages"]] == ["system"] + ["user", "assistant"] * 2
  other = talk(f"/load {path}", "/save")
  assert (other.system, other.messages) == (c.system, c.messages)
  capsys.readouterr()
  c = talk("c", f"/save {path}", f"/save {folder}", "/save", f"/save! {tmp_path}/no/such", f"/save! {folder}", "/save \0")
  err = capsys.readouterr().err.splitlines()
  assert json.loads(path.read_text()) == saved and {*tmp_path.iterdir()} == {path, folder} and len(err) == 6 and "is there already" in err[0]
  bad = {"x": "expected JSON", "3": "expected messages, found int", "{}": "found NoneType", "[1]": "message 0",
         '[{"role": "tool", "content": ""}]': "message 0",
         '[{"role": "user", "content": 3}]': "message 0", '[{"role": "user", "content": "a"}]': "expected an answer", "[" * 10**5: "expected JSON",
         '[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]': "message 1"}
  for text, found in bad.items():
    path.write_text(text)
    c.handle(f"/load {path}")
    assert found in (line := capsys.readouterr().err) and line.count("\n") == 1
  for name in ("/dev/zero", str(tmp_path), "/no/such", "", "~nobody-here/x"): c.handle(f"/load {name}")
  err = capsys.readouterr().err
  assert err.count("\n") == 5 and err.count("expected a regular file") == 2 and [m["content"] for m in c.messages][:1] == ["c"]

def test_settings(capsys):
  c = talk("/set temperature 0.5", "/set top-k=3", "/set seed 9", "/set count 5", "/set hide_think on")
  assert c.options.sampling == Sampling(.5, 3, seed=9) and c.options.count == 5 and c.options.hide_think
  capsys.readouterr()
  wrong = ("temperature x", "temperature nan", "top_p 2", "top_k 1.5", "seed -2", "seed " + "9" * 5000, "count 0", "think maybe",
           "color red", "top_p", "top_k 1e999")
  for text in wrong:
    before = c.options.sampling
    c.handle(f"/set {text}")
    assert (err := capsys.readouterr().err).count("\n") == 1 and "expected" in err and c.options.sampling == before, text

# ---- files, streams, characters ----

def test_texts_of_files(tmp_path, monkeypatch):
  (path := tmp_path / "x").write_bytes(b"\xc3\xa9" * 5)
  assert read_text("-f", str(path), 10) == "é" * 5
  for limit, found in ((9, "at most"), (10, None)):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    if found is None: assert read_text("-f", "-", limit) == "é" * 5
    else:
      with pytest.raises(UserError, match=found): read_text("-f", "-", limit)
  path.write_bytes(b"a\xff")
  for name, kw, found in ((path, {}, "byte 0xff at 1"), ("/dev/zero", {"regular": True}, "regular"), ("-", {"regular": True}, "No such file"),
                          (tmp_path, {}, "directory"), ("/dev/zero", {"limit": 1 << 20}, "at most 1 MB"), ("\0", {}, "null")):
    with pytest.raises(UserError, match=found): read_text("-f", str(name), **kw)

def test_endless_lines(monkeypatch):
  monkeypatch.setattr(terminal, "MAX_PROMPT", 10)
  for said in ("x" * 11 + "\n", '"""\n' + "x\n" * 9, "x" * 11):
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    with pytest.raises(UserError, match="at most"): Lines().read()
  monkeypatch.undo()
  monkeypatch.setattr("sys.stdin", io.StringIO('"""a\n b"""\n\n"""\nc'))
  assert [unblocked(Lines().read()) for _ in range(3)] == ["a\n b", "", '"""\nc']

def test_nothing_steers_a_terminal():
  for c in map(chr, range(0x110000)):
    shown = screen.safe(c)
    if c in "\n\t": assert shown == c
    elif c == "\r": assert shown == ""
    elif not c.isprintable() and ord(c) < 0xa0: assert shown.isascii() and shown.isprintable(), hex(ord(c))
  for c in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c\u2028\u2029": assert screen.safe(c) == f"\\u{ord(c):04x}"
  assert screen.safe("a\u200d👩é\u00a0") == "a\u200d👩é\u00a0" and screen.safe_line("a\r\nb\tc") == "a\\nb c"

def test_an_ascii_terminal(capsys, monkeypatch):
  screen.lossy(stream := io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii"))
  monkeypatch.setattr("sys.stdout", stream)
  for _ in range(2): print("é€x", "\udcff")
  stream.flush()
  assert raw.getvalue() == b"??x ?\n" * 2 and capsys.readouterr().err.count("the output's encoding is ascii") == 1

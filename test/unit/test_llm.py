"""The command line as a person meets it: a process, its output, its exit code. And `load`, the door from Python."""
from __future__ import annotations
import contextlib, fcntl, json, os, select, signal, subprocess, sys, termios, time
from pathlib import Path
from typing import Iterator
import numpy as np, pytest
from extra.mkgguf import write_model
from tinygrad.apps import llm
from tinygrad.apps.generate import ContextFull
from tinygrad.apps.gguf import GGUFError
from tinygrad.apps.models import ALIASES, BUILT_IN, MODELS, ROOT, Model, UserError, find_model, load
from tinygrad.apps.sampling import Sampling
from tinygrad.apps.terminal import converse

LLM = [sys.executable, str(ROOT / "tinygrad/apps/llm.py")]
# no hub and no cache of one: nothing listens on this port
OFFLINE = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": "no-such-folder", "HF_HUB_OFFLINE": "0"}
NO_PROXY = [k for k in os.environ if k.lower().endswith("_proxy")]
PROMPT = "the quick brown fox"
DRAW = Sampling(1.0, 20, .9, .01, 1.1, 7)
DRAW_FLAGS = ["--temperature", "1", "--top_k", "20", "--top_p", ".9", "--min_p", ".01", "--repeat-penalty", "1.1"]

def environ(env:dict[str, str]) -> dict[str, str]:
  return {k: v for k, v in os.environ.items() if k not in NO_PROXY and not k.startswith("PYTHON")} | OFFLINE | env

def run(*args:str|Path, cwd:Path|None=None, **env:str) -> subprocess.CompletedProcess[str]:
  return subprocess.run([*LLM, *map(str, args)], cwd=cwd, env=environ(env), stdin=subprocess.DEVNULL, capture_output=True, text=True)

def refused(*args:str|Path, cwd:Path|None=None, **env:str) -> str:
  """The one line that a refusal is, exit code 2."""
  p = run(*args, cwd=cwd, **env)
  assert p.returncode == 2 and p.stderr.count("\n") == 1 and "Traceback" not in p.stderr, p
  return p.stderr.strip()

def write_small(path:Path) -> Path:
  """One dense block, a context of 4096 tokens, every byte in the vocabulary"""
  write_model(path, "small-glm", "Q4_0", seed=3, blocks=1, vocab=4096, dim=128, heads=2, kv_lora=64, q_lora=64, nope=32, v=32, ff=128)
  return path

@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path: return write_small(tmp_path_factory.mktemp("llm") / "small.gguf")
@pytest.fixture(scope="module")
def model(small) -> Model: return load(small, max_context=64)

# ---- names and files ----

def test_list_models():
  p = run("--list-models")
  assert p.returncode == 0 and len(p.stdout.splitlines()) == len(MODELS)
  for name, (repo, file) in MODELS.items(): assert f"{name} " in p.stdout and f"{repo}/{file}" in p.stdout
  for alias in ALIASES: assert f"= {alias}" in p.stdout

def test_list_models_to_a_reader_that_leaves():
  read, write = os.pipe()
  os.close(read)
  p = subprocess.run([*LLM, "--list-models"], stdout=write, stderr=subprocess.PIPE, text=True, env=environ({}))
  os.close(write)
  assert p.returncode == 1 and p.stderr == ""

def test_names_and_aliases_find_local_files(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "models").mkdir()
  for name, (_, file) in MODELS.items():
    (tmp_path / "models" / file).touch()
    for known in (name, *(a for a, target in ALIASES.items() if target == name)): assert find_model(known).resolve() == tmp_path / "models" / file
  (tmp_path / "models/other.bin").touch()
  assert find_model("models/other.bin") == Path("models/other.bin") and find_model("missing.gguf") == Path("missing.gguf")

def test_no_network_is_one_line_with_url_and_place(tmp_path):
  start = time.monotonic()
  line = refused("--model", "glm-4.7:flash-unsloth-Q4_0", "--benchmark", "10", cwd=tmp_path)
  assert "https://huggingface.co/unsloth/GLM-4.7-Flash-GGUF/resolve/main/GLM-4.7-Flash-Q4_0.gguf" in line
  assert str(ROOT / "models/GLM-4.7-Flash-Q4_0.gguf") in line
  assert time.monotonic() - start < 10

def test_bad_files(tmp_path):
  (bad := tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
  assert refused("--model", bad).startswith(f"GGUFError: {bad}: ")
  assert refused("--model", tmp_path) == f"GGUFError: {tmp_path}: expected a GGUF file, found a directory"
  assert refused("--model", tmp_path / "none.gguf").startswith(f"GGUFError: {tmp_path / 'none.gguf'}: cannot be read: ")
  assert "neither a file nor a name" in refused("--model", "glm-5")
  with pytest.raises(UserError): load("glm-5")
  with pytest.raises(GGUFError): load(bad)

# ---- flags ----

@pytest.mark.parametrize("flags, found", [
  ("--count 0", "--count"), ("--count x", "--count"), ("--max_context 1", "--max_context"), ("--benchmark x", "--benchmark"),
  ("--depth -1", "--depth"), ("--depth 3", "--benchmark"), ("--json", "--benchmark"), ("--benchmark 3 --json /no/such/folder", "/no/such/folder"),
  ("--prompt", "--prompt"), ("--raw-prompt", "--raw_prompt"), ("--what", "--what"), ("--mod x", "--mod"), ("--temperature nan", "temperature"),
  ("--temperature -1", "temperature"), ("--temperature inf", "temperature"), ("--top_p 0", "top_p"), ("--top_p nan", "top_p"),
  ("--top_k -1", "top_k"), ("--top_k 1.5", "--top_k"), ("--min_p 2", "min_p"), ("--repeat_penalty nan", "repeat_penalty"), ("--seed -1", "seed"),
  ("--perplexity /no/such/file", "/no/such/file"), ("--perplexity /", "--perplexity /"), ("--benchmark 3 --perplexity x", "--perplexity")])
def test_bad_flags(flags, found, capsys):
  with pytest.raises((SystemExit, UserError, ValueError)) as e: llm.main(flags.split())
  line = capsys.readouterr().err.strip() if e.type is SystemExit else str(e.value)
  assert found in line and "\n" not in line
  if e.type is SystemExit: assert e.value.code == 2

def test_bad_flags_end_a_process_in_one_line():
  assert refused("--temperature", "nan") == "error: temperature: expected 0, or from 1e-30 to 10000, found nan"
  assert "argument --count: " in refused("--count", "0")

def test_every_flag_has_a_help_line():
  lines = run("--help").stdout
  for action in llm.parser()._actions: assert action.help and all(o in lines for o in action.option_strings)

def test_devices_that_cannot_be_used(small, tmp_path):
  assert "cannot open the device" in refused("--model", small, "--prompt", "x", DEV="NONE")
  assert "expected 'no-such-compiler' on the PATH" in refused("--model", small, "--prompt", "x", DEV="CPU", CC="no-such-compiler")

# ---- answers ----

def test_the_built_in_model_answers():
  p = run("--prompt", "What is a list?", "--count", "40")
  assert p.returncode == 0 and p.stderr == "" and "list" in p.stdout and "sequence" in p.stdout
  assert BUILT_IN.stat().st_size < 6e6

def test_drawing_is_reproducible_and_max_context_is_clamped(small, model):
  p = run("--model", small, "--raw-prompt", PROMPT, "--count", "12", "--seed", "7", *DRAW_FLAGS, "--max_context", "99999")
  assert p.returncode == 0 and p.stderr == "--max_context 99999 is more than the model's own context: using 4096\n"
  ids = model.tokenizer.encode(PROMPT)
  drawn, other = (list(model.generate(ids, 12, Sampling(**vars(DRAW) | {"seed": seed}))) for seed in (7, 8))
  assert p.stdout == PROMPT + model.tokenizer.decode(drawn) + "\n" and drawn != other
  assert list(model.generate(ids, 12, DRAW)) == drawn

def test_greedy_text_ends_before_a_stop_string(small, model):
  text = "".join(model.complete(model.tokenizer.encode(PROMPT), 12))
  stop = text[4:7]
  p = run("--model", small, "--prompt", PROMPT, "--raw-prompt", "--count", "12", "--stop", "never to be seen", "--stop", stop)
  assert p.returncode == 0 and p.stdout == PROMPT + text[:text.index(stop)] + "\n"

def test_a_prompt_that_does_not_fit(small, model):
  p = run("--model", small, "--raw-prompt", PROMPT * 9, "--max_context", "8")
  assert p.returncode == 2 and p.stdout == "" and p.stderr.count("\n") == 1 and "max_context is 8" in p.stderr
  with pytest.raises(ContextFull): next(model.generate(list(range(65))))
  with pytest.raises(ValueError): load(small, max_context=1)

def test_benchmark_by_name(tmp_path):
  (tmp_path / "models").mkdir()
  write_small(tmp_path / "models/GLM-4.7-Flash-Q4_0.gguf")
  p = run("--model", "glm-4.7:flash-unsloth-Q4_0", "--benchmark", "3", "--depth", "5", "--json", "out.json", cwd=tmp_path)
  assert p.returncode == 0 and p.stderr == "", p.stderr
  lines = p.stdout.splitlines()
  assert [line.split()[0] for line in lines[:-1]] == ["device", "a", "ceiling", "load", "prefill", "kernels", "1", "2", "3", "median"]
  assert all("ms" in line and "tok/s" in line and "GB/s" in line for line in lines[6:9]) and "p10" in lines[9] and "p90" in lines[9]
  result = json.loads(lines[-1])
  assert json.loads((tmp_path / "out.json").read_text()) == result
  assert result["model"] == "glm-4.7:flash-unsloth-Q4_0" and result["depth"] == 5 and result["tokens"] == 3
  assert result["tok_s"] == pytest.approx(1e3 / result["median_ms"]) and result["p10_ms"] <= result["median_ms"] <= result["p90_ms"]
  assert result["cache_bytes"] == 1 * 5 * (64 + 32) * 4 and result["kernels"] > 0 and result["prefill_tok_s"] > 0
  assert set(result) >= {"device", "weight_bytes", "peak_gb_s", "ceiling_percent", "load_s", "first_token_s", "device_bytes"}

def test_perplexity(small, model, tmp_path):
  (file := tmp_path / "text.txt").write_text(PROMPT)
  p = run("--model", small, "--perplexity", file, "--json", cwd=tmp_path)
  ids = model.tokenizer.encode(PROMPT)
  logits = model.logits(ids)[:-1].astype(np.float64)
  log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
  expected = np.exp(-np.mean([row[i] for row, i in zip(log_p, ids[1:])]))
  result = json.loads(p.stdout.splitlines()[-1])
  assert p.returncode == 0 and result["perplexity"] == pytest.approx(expected, rel=1e-3) and result["tokens"] == len(ids) - 1
  assert f"perplexity {expected:.1f}"[:13] in p.stdout and list(tmp_path.iterdir()) == [file]

# ---- conversations ----

class Terminal:
  """A process on a terminal of its own, where keys are signals."""
  def __init__(self, *args:str|Path):
    self.master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    self.process = subprocess.Popen([*LLM, *map(str, args)], stdin=slave, stdout=slave, stderr=slave, env=environ({"TERM": "dumb"}),
                                    start_new_session=True, preexec_fn=self.take)
    os.close(slave)
  @staticmethod
  def take() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored, which is inherited
  def type(self, keys:str) -> None: os.write(self.master, keys.encode())
  def until(self, text:str, seconds:float=120) -> str:
    """What is printed up to and with `text`; AssertionError where it does not come"""
    seen, end = "", time.monotonic() + seconds
    while text not in seen:
      assert select.select([self.master], [], [], max(0, end - time.monotonic()))[0], f"no {text!r} in {seen!r}"
      try: piece = os.read(self.master, 1)
      except OSError: piece = b""  # Linux's word for the end
      assert piece, f"no {text!r} in {seen!r}"
      seen += piece.decode("latin1")
    return seen
  def rest(self, seconds:float=60) -> str:
    """What else is printed until the process ends"""
    seen = b""
    with contextlib.suppress(OSError):
      while select.select([self.master], [], [], seconds)[0] and (piece := os.read(self.master, 4096)): seen += piece
    self.process.wait(seconds)
    return seen.decode("latin1")

@pytest.fixture
def terminal() -> Iterator:
  opened:list[Terminal] = []
  yield lambda *args: opened.append(Terminal(*args)) or opened[-1]
  for t in opened:
    t.process.kill()
    t.process.wait()
    os.close(t.master)

def test_chat_on_a_terminal(small, terminal):
  t = terminal("--model", small)
  assert "Ctrl-D leaves" in t.until("\n> ")
  t.type("\n")
  t.until("> ")                                           # nothing was said: it asks again
  for question in ("a", "b"):
    t.type(question + "\n")
    t.until(question + "\r\n")
    while not t.until(" ").strip(" >"): pass               # the answer has begun; whole, it takes a thousand tokens and more
    t.type("\x03")
    t.until(" [stopped]\r\n> ")
  time.sleep(.3)                                          # a signal between the prompt and the read waits for the next key
  t.type("\x03")
  t.until("\n> ")                                         # with no answer to stop, Ctrl-C asks again
  t.type("\x04")
  assert "Traceback" not in t.rest() and t.process.returncode == 0

def test_ctrl_c_while_loading(terminal):
  t = terminal()
  t.until("tiny-glm-Q4_0.gguf:")                          # the progress bar
  t.type("\x03")
  assert "Traceback" not in t.rest() and t.process.returncode == 130

def answer_to(monkeypatch, *questions:str) -> None:
  asked = iter(questions)
  def ask(_:str) -> str:
    if (text := next(asked, None)) is None: raise EOFError
    return text
  monkeypatch.setattr("builtins.input", ask)

def test_a_turn_sees_the_turns_before(monkeypatch, capsys):
  class Echo:
    seen:list = []
    generator = type("", (), {"full": False})
    def chat(self, messages, *_):
      self.seen.append([m["content"] for m in messages])
      yield from ("heard ", messages[-1]["content"])
      if messages[-1]["content"] == "two": raise KeyboardInterrupt
  answer_to(monkeypatch, "one", " ", "two", "three")
  converse(Echo(), None, Sampling(), ())
  assert Echo.seen == [["one"], ["one", "heard one", "two"], ["one", "heard one", "two", "heard two", "three"]]
  assert "heard two [stopped]\n" in capsys.readouterr().out

def test_a_conversation_that_fills_the_context(model, monkeypatch, capsys):
  answer_to(monkeypatch, "a", "b" * 99, "b" * 99)
  converse(model, None, Sampling(), ())
  out = capsys.readouterr().out
  assert "[the context of 64 tokens is full]" in out and out.count("raise --max_context") == 2

# ---- from Python ----

def test_load(model):
  ids = model.tokenizer.encode(PROMPT)
  logits = model.logits(ids)
  assert logits.shape == (len(ids), 4096) and logits.dtype == np.float32
  assert next(model.generate(ids, 1)) == logits[-1].argmax()
  assert model.tokenizer.decode(ids) == PROMPT
  with pytest.raises(ValueError): model.logits([])
  with pytest.raises(ValueError): next(model.generate([4096]))

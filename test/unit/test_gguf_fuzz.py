"""Mutations of a valid GGUF file and of chat templates: each ends in one GGUFError line or in a clean load.
By hand: python test/unit/test_gguf_fuzz.py [CASES] [SEED]"""
import random, re, signal, struct, sys, tempfile, tracemalloc, warnings
from collections import Counter
from pathlib import Path
from typing import Callable, Iterator, NamedTuple
if __name__ == "__main__": sys.path[:0] = [str(p := Path(__file__).resolve().parents[2]), str(p / "test")]
import pytest
from gguf import GGUFReader
from extra.mkgguf import write_model
from templates import FORMS, TALKS, TOOLS
from tinygrad.apps.chat import Chat, MessageError
from tinygrad.apps.gguf import GGUFError, GGUFFile, read_gguf
from tinygrad.apps.mla import Config, checked_tensors
from tinygrad.apps.template import FILTERS, METHODS, TESTS
from tinygrad.apps.tokenizer import Tokenizer

CASES, SECONDS = 1200, 10  # CPU seconds a case: none takes a tenth of it, so only a hang does

class Layout(NamedTuple):
  """Where a valid file keeps its structure, as the package's reader finds it."""
  numbers: list[tuple[int, int]]  # (offset, bytes) of every count, length, type, dimension and offset
  entries: list[tuple[int, int]]  # (start, end) of every key and tensor info
  header: int                     # bytes before the tensor data

  @staticmethod
  def of(path: Path) -> "Layout":
    reader = GGUFReader(path)
    numbers: list[tuple[int, int]] = []
    entries: list[tuple[int, int]] = []
    for field in [*reader.fields.values(), *(t.field for t in reader.tensors)]:
      places = [(part.ctypes.data - reader.data.ctypes.data, part.nbytes) for part in field.parts]
      for (start, size), part in zip(places, field.parts):
        if part.itemsize in (4, 8): numbers += [(at, part.itemsize) for at in range(start, start + size, part.itemsize)]
      if not field.name.startswith("GGUF."): entries.append((places[0][0], places[-1][0] + places[-1][1]))
    return Layout(numbers, entries, reader.data_offset)

# *** mutations: each changes data in place ***
def place(data: bytearray, r: random.Random, at: Layout) -> int:  # structure stands in front
  return r.randrange(at.header if r.random() < .9 else len(data))
def span(data: bytearray, r: random.Random, at: Layout) -> slice:
  if r.random() < .5: return slice(*r.choice(at.entries))
  start = place(data, r, at)
  return slice(start, start + r.randrange(1, 200))

def flip_bits(data: bytearray, r: random.Random, at: Layout):
  for _ in range(r.choice((1, 1, 2, 8))): data[place(data, r, at)] ^= 1 << r.randrange(8)
def set_bytes(data: bytearray, r: random.Random, at: Layout):
  for _ in range(r.choice((1, 2, 4))): data[place(data, r, at)] = r.choice((0, 1, 0x0a, 0x7f, 0x80, 0xff, r.randrange(256)))
def set_number(data: bytearray, r: random.Random, at: Layout):
  for _ in range(r.choice((1, 1, 1, 2))):
    offset, width = r.choice(at.numbers)
    old, bit, rest = int.from_bytes(data[offset:offset + width], "little"), 1 << r.randrange(8 * width), len(data) - offset
    new = r.choice((0, 1, old + 1, old - 1, old * 2, old // 2, old ^ bit, bit, bit - 1, len(data), rest, rest - width, at.header,
                    -1, -32, -offset, -offset - width, r.randrange(64), r.getrandbits(8 * width)))
    data[offset:offset + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
def truncate(data: bytearray, r: random.Random, at: Layout): del data[place(data, r, at):]
def extend(data: bytearray, r: random.Random, at: Layout): data += r.randbytes(r.randrange(1, 500))
def delete(data: bytearray, r: random.Random, at: Layout): del data[span(data, r, at)]
def insert(data: bytearray, r: random.Random, at: Layout):
  start = place(data, r, at)
  data[start:start] = r.choice((r.randbytes(r.randrange(1, 64)), struct.pack("<Q", 1 << r.randrange(64)), bytes(r.randrange(1, 64))))
def fill(data: bytearray, r: random.Random, at: Layout):
  data[where] = bytes((r.choice((0, 0, 0xff, 0x20)),)) * len(data[(where := span(data, r, at))])
def swap(data: bytearray, r: random.Random, at: Layout):
  a, b = sorted((span(data, r, at), span(data, r, at)), key=lambda s: s.start)
  first, second = data[a], data[b]
  data[b], data[a] = first, second
def duplicate(data: bytearray, r: random.Random, at: Layout):
  i = r.randrange(len(at.entries))
  start, end = at.entries[i]
  data[end:end] = data[start:end]
  if r.random() < .8:  # counted in, as a careless writer would
    keys = sum(e <= at.entries[-1][1] for _, e in at.entries) - int.from_bytes(data[8:16], "little")
    count = 16 if i < keys else 8
    data[count:count + 8] = struct.pack("<Q", int.from_bytes(data[count:count + 8], "little") + 1)
MUTATIONS: tuple[Callable, ...] = (flip_bits, set_bytes, set_number, set_number, set_number, truncate, extend, delete, insert, fill, swap, duplicate)

# *** the loaders under test: each takes the file as read so far and raises nothing but GGUFError ***
def touch_tensors(f: GGUFFile):
  assert f.total_bytes <= f.path.stat().st_size
  for t in f.tensors.values(): int(t.data[0]) + int(t.data[-1])
def build_config(f: GGUFFile): checked_tensors(f, Config.from_gguf(f))
def build_text(f: GGUFFile):
  t = Tokenizer.from_gguf(f)
  t.decode(t.encode("a fuzzed file, ünïcode 日本"))
  try: Chat.from_gguf(f, t).render(TALKS["call"], tools=TOOLS)
  except MessageError: assert "tokenizer.chat_template" not in f.kv  # the built-in form takes no tools
LOADERS = (touch_tensors, build_config, build_text)

Loaders = tuple[Callable[[GGUFFile], object], ...]
class Timeout(BaseException): "no Exception: nothing takes it for a fault of the file"
def too_long(*_): raise Timeout(f"more than {SECONDS} s")

class Outcomes(Counter[str]):
  """How often each stage was the last that a case reached and, under "peak", the most memory that a case took. A case hangs no longer than SECONDS
  while this is entered."""
  def __enter__(self) -> "Outcomes":
    self.before = signal.signal(signal.SIGVTALRM, too_long)
    tracemalloc.start()
    return self
  def __exit__(self, *_):
    tracemalloc.stop()
    signal.signal(signal.SIGVTALRM, self.before)
  def run(self, what: str, begins: str, stages: Iterator[str]) -> tuple[str, int]:
    """Runs a case, which yields the name of each stage before entering it. An error is one line of GGUFError or MessageError. Returns the last stage
    and the peak of memory in bytes, as Python and numpy allocate it: a mapped file is not theirs."""
    stage, held = "", tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
      for stage in stages: pass
    except (GGUFError, MessageError) as e:
      if isinstance(e, MessageError): stage = "refused"
      line = str(e)
      assert line.startswith(begins) and line.isprintable() and len(line) <= 500, f"{what}: not one clear line: {line!r}"
    except (Exception, Timeout) as e: raise AssertionError(f"{what}: {stage}: {type(e).__name__}: {e}") from e
    finally: signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return stage, tracemalloc.get_traced_memory()[1] - held
  def note(self, what: str, stage: str, peak: int, bound: int):
    assert peak <= bound, f"{what}: {stage}: {peak} bytes of memory, expected at most {bound}"
    self[stage] += 1
    self["peak"] = max(self["peak"], peak)

def read_and_load(path: Path, loaders: Loaders) -> Iterator[str]:
  yield "read"
  f = read_gguf(path)
  for load in loaders:
    yield load.__name__
    load(f)
  yield "loaded"

def fuzz(base: Path, loaders: Loaders, cases: range, seed: int) -> Outcomes:
  """Runs cases, each from its own seed; AssertionError names the one that broke a promise. The bound of a case's memory: what the valid file takes
  (keys, strings and tokenizer as Python objects) and, for a wrong length that makes one string of all the rest, what decoding that costs: twice
  to widen it, once the text so far, once in the error."""
  valid, at, path = base.read_bytes(), Layout.of(base), base.with_name("mutant.gguf")
  with Outcomes() as outcomes:
    for _ in range(2): stage, valid_peak = outcomes.run("valid file", f"{base}: ", read_and_load(base, loaders))  # twice: caches fill only once
    assert stage == "loaded"
    for case in cases:
      r, data = random.Random(f"{seed} {case}"), bytearray(valid)
      chosen = r.choices(MUTATIONS, k=r.choice((1, 1, 1, 2, 3)))
      for mutate in chosen:
        if len(data) >= at.header: mutate(data, r, at)  # what stands behind a cut is gone
      path.unlink(missing_ok=True)  # writing over a file is slow on some file systems
      path.write_bytes(data)
      what = f"case {case} of seed {seed}: {', '.join(m.__name__ for m in chosen)}"
      outcomes.note(what, *outcomes.run(what, f"{path}: ", read_and_load(path, loaders)), valid_peak + 4 * len(data))
  return outcomes

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}{{ tools | tojson if tools }}"
def base_file(folder: Path) -> Path:
  """a GLM of two blocks, one dense and one MoE: every key and kind of tensor of the model in 106 kB, 8 kB of them header"""
  shape = dict(blocks=2, dim=64, heads=2, q_lora=32, kv_lora=32, nope=32, v=32, ff=128, experts=4, moe_ff=32, vocab=300)
  path = write_model(folder / "base.gguf", "small-glm", "Q4_0", **shape)[0]
  data, name, template = path.read_bytes(), b"tokenizer.chat_template", TEMPLATE.encode()
  template += b" " * (-(8 + len(name) + 4 + 8 + len(template)) % 32)  # the tensors behind it stay aligned
  entry = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, len(template)) + template
  path.write_bytes(data[:16] + struct.pack("<Q", int.from_bytes(data[16:24], "little") + 1) + entry + data[24:])
  return path

def test_fuzz(tmp_path: Path):
  with warnings.catch_warnings():
    warnings.simplefilter("error")  # numpy's integers wrap with a warning at most
    outcomes = fuzz(base_file(tmp_path), LOADERS, range(CASES), seed=0)
  # every stage is reached and refuses something; a good part of the mutants are harmless (random weights stay weights)
  assert all(outcomes[stage] >= 20 for stage in ("read", "build_config", "build_text", "loaded")), outcomes
  assert outcomes["read"] > CASES // 3, outcomes

@pytest.mark.parametrize("fault, message", [("hoard", "bytes of memory"), ("crash", "crash: KeyError"),
                                            ("ramble", "not one clear line"), ("hang", "hang: Timeout")])
def test_harness_notices(fault: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """a loader that hoards memory, raises something else, names no file or hangs on a mutant is told"""
  def hoard(f: GGUFFile): bytes(f.path.name == "mutant.gguf" and 10 << 20)
  def crash(f: GGUFFile):
    if f.path.name == "mutant.gguf": raise KeyError("x")
  def ramble(f: GGUFFile):
    if f.path.name == "mutant.gguf": raise GGUFError("no file named")
  def hang(f: GGUFFile):
    while f.path.name == "mutant.gguf": pass
  monkeypatch.setattr(sys.modules[__name__], "SECONDS", .5)
  with pytest.raises(AssertionError, match=message): fuzz(base_file(tmp_path), (locals()[fault],), range(50), seed=0)

# *** templates: those of the families with their text changed, and programs made of everything that a template may say ***
TEMPLATES, HELD, STEPS = 500, 8 << 20, 1 << 14  # cases; bytes; a small part of the budget, as tracing makes each step ten times as long
NAMED = [n for n in TESTS if n.isidentifier()]
ATOMS = {
  "T": ("'a'", "'ab ' * 99", "'%s'", "'%99999999s'", "'%*d'", "'{:>99999999}'", "'{0}{0}'", "'<|user|>'", "messages[0].content", "ns.t", "ns.t"),
  "N": ("0", "1", "9", "-1", "999999999", "2.5", "1e308", "loop.index", "messages | length"),
  "L": ("[]", "[1, 'a', none]", "['b', 'a']", "range(9)", "range(10**9)", "(1, 2)", "messages", "ns.l", "ns.l"),
  "D": ("{}", "{'a': 1, 'b': [2]}", "messages[0]", "loop"),
  "B": ("true", "loop.first", "nothing is defined", "loop.changed(ns.l)"),
  "E": ("none", "nothing", "x", "f", "ns", "loop", "tools", "raise_exception('no\\n')"),
}
FORMS_OF = {
  "T": ("(T) + (T)", "(T) ~ (E)", "(T) * (N)", "(T) % (E)", "(T).format(E)", "(T) | format(E)", "(T)[N:]", "(T)[::-1]", "(T).replace(T, T)",
        "(T).join(L)", "(L) | join(T)", "(E) | tojson",
        "(E) | tojson(indent=N)", "(E) | string", "(T) | indent(N)", "(T).strip(T)", "(T).upper()", "(T) | title", "(T) | e", "(T) | trim(T)",
        "f(T)", "strftime_now(T)", "(T) if (B) else (T)",
        *(f"(T).{n}({a})" for n in METHODS[str] for a in ("", "T"))),
  "N": ("(N) + (N)", "(N) * (N)", "(N) ** (N)", "(N) % (N)", "(N) // (N)", "-(N)", "(L) | length", "(T).count(T)", "(T).rfind(T)", "(N) | round(N)",
        "(T) | int", "(T) | int(0, 16)", "(L) | sum"),
  "L": ("(L) + (L)", "(L) * (N)", "[E, E]", "(E, E)", "[L, L]", "(L)[N:]", "(L) | sort", "(L) | unique", "(L) | reverse", "(L) | list",
        "(L) | map('string')", "(L) | map(attribute=E)",
        "(L) | select('string')", "(L) | selectattr('role')", "range(N)", "(T).split(T)", "(T) | list", "(D).items()", "(D) | dictsort",
        "(D).values()"),
  "D": ("{'k': E}", "{E: E}", "dict(k=E)", "dict(L)", "namespace(x=E)"),
  "B": ("(T) == (T)", "(L) == (L)", "(E) in (L)", "(T) in (T)", "(N) < (N)", "not (B)", "(B) and (B)", "(E) is odd", "(E) is divisibleby 3",
        "(E) in (D)", *("(E) is " + n for n in NAMED)),
  "E": ("T", "T", "N", "L", "D", "B", "(L).append(E)", "(L)[E]", "(D)[E]", "(D).get(E)", "loop.cycle(E, E)",
        *("(E) | " + n for n in FILTERS), *(f"(E) | {n}(E)" for n in FILTERS)),
}
STATEMENTS = ("{{ E }}", "{{ T }}", "{% set x = E %}", "{% set ns.t = T %}", "{% set ns.l = L %}", "{% set x %}S{% endset %}",
              "{% if B %}S{% else %}S{% endif %}", "{% for i in L %}S{% endfor %}",
              "{% for i in range(40) %}{% set ns.t = T %}{% endfor %}{{ E }}", "{% for i in range(40) %}{% set ns.l = L %}{% endfor %}{{ E }}",
              "{% for i in L if B %}S{% else %}S{% endfor %}",
              "{% for i in range(N) %}S{% break %}{% endfor %}", "{% macro f(a) %}{{ a }}S{% endmacro %}",
              "{% macro f(a, b=E) %}{{ f(a) }}{{ f(b) }}{% endmacro %}{{ f(E) }}",
              "{% filter upper %}S{% endfilter %}", "text é\0<|user|>", "{% with x = E %}S{% endwith %}")
def say(r: random.Random, kind: str, depth: int) -> str:
  """A program (S: one statement after another) or an expression that is likely of a kind: text, number, list, dict, truth or any."""
  def fill(form: str) -> str: return re.sub(r"(?<![\w'])[TNLDBE](?![\w'])|S", lambda m: say(r, m[0], depth - 1), form)
  if kind == "S": return "".join(map(fill, r.choices(STATEMENTS, k=max(depth, 0))))
  return r.choice(ATOMS[kind]) if depth < 0 or r.random() < .25 else fill(r.choice(FORMS_OF[kind]))
def program(r: random.Random) -> str:
  head = "{% set ns = namespace(t='a', l=[1]) %}{% macro f(a) %}<{{ a }}>{% endmacro %}{% for i in [1, 2] %}"
  return head + say(r, "S", r.randrange(1, 4)) + "{% endfor %}"
def changed(r: random.Random) -> str:
  parts = re.findall(r"\w+|\s+|.", r.choice([*FORMS.values()]), re.S)
  for _ in range(r.choice((1, 1, 2, 4))):
    i, j = sorted((r.randrange(len(parts)), r.randrange(len(parts))))
    match r.randrange(5):
      case 0: parts[i] = r.choice(ATOMS["T"])
      case 1: parts[i] *= r.choice((2, 300))
      case 2: del parts[i:i + r.randrange(1, 9)]
      case 3: parts[i], parts[j] = parts[j], parts[i]
      case 4: parts[j:j] = parts[i:i + r.randrange(1, 40)]
  return "".join(parts)

def load_and_render(template: str, tokenizer: Tokenizer, chat: Callable, r: random.Random) -> Iterator[str]:
  yield "loading"
  made = chat("f.gguf", template, tokenizer)
  yield "rendering"
  made.render(r.choice([*TALKS.values()]), tools=r.choice((None, TOOLS)))
  yield "rendered"

def fuzz_templates(tokenizer: Tokenizer, cases: range, seed: int, chat: Callable = Chat) -> Outcomes:
  """Each template loads and renders, or fails in one line of GGUFError or MessageError, within SECONDS and HELD bytes."""
  with Outcomes() as outcomes:
    for case in cases:
      r = random.Random(f"template {seed} {case}")
      template, what = r.choice((program, program, changed))(r), f"template {case} of seed {seed}"
      outcomes.note(what, *outcomes.run(what, "", load_and_render(template, tokenizer, chat, r)), HELD)
  return outcomes

@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
  monkeypatch.setattr("tinygrad.apps.template.STEPS", STEPS)
  return Tokenizer.from_gguf(read_gguf(base_file(tmp_path)))

def test_fuzz_templates(tokenizer: Tokenizer):
  outcomes = fuzz_templates(tokenizer, range(TEMPLATES), seed=0)
  assert all(outcomes[stage] >= 100 for stage in ("loading", "rendering", "rendered")), outcomes

@pytest.mark.parametrize("fault, message", [("hoard", "bytes of memory"), ("crash", "rendering: KeyError"), ("ramble", "not one clear line"),
                                            ("hang", "rendering: Timeout")])
def test_harness_notices_templates(fault: str, message: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
  class Faulty(Chat):
    def render(self, *args, **kw):
      if fault == "hoard": bytes(HELD)
      if fault == "crash": raise KeyError("x")
      if fault == "ramble": raise TwoLines("")
      while fault == "hang": pass
  class TwoLines(GGUFError):
    def __str__(self): return "x\ny"
  monkeypatch.setattr(sys.modules[__name__], "SECONDS", .5)
  with pytest.raises(AssertionError, match=message): fuzz_templates(tokenizer, range(50), 0, Faulty)

if __name__ == "__main__":
  count, seed = (*map(int, sys.argv[1:]), *(CASES, 0)[len(sys.argv) - 1:])
  with tempfile.TemporaryDirectory() as folder:
    print(fuzz(base := base_file(Path(folder)), LOADERS, range(count), seed))
    print(fuzz_templates(Tokenizer.from_gguf(read_gguf(base)), range(count), seed))

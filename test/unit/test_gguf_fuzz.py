"""Mutations of a valid GGUF file: each ends in one GGUFError line or in a clean load. By hand: python test/unit/test_gguf_fuzz.py [CASES] [SEED]"""
import random, signal, struct, sys, tempfile, tracemalloc, warnings
from collections import Counter
from pathlib import Path
from typing import Callable, NamedTuple
if __name__ == "__main__": sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import pytest
from gguf import GGUFReader
from extra.mkgguf import write_model
from tinygrad.apps.gguf import GGUFError, GGUFFile, read_gguf
from tinygrad.apps.mla import Config, _checked_tensors
from tinygrad.apps.tokenizer import Tokenizer

CASES, SECONDS = 2400, 10  # seconds a case: none takes a hundredth of it, so only a hang does

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
def build_config(f: GGUFFile): _checked_tensors(f, Config.from_gguf(f))
def build_tokenizer(f: GGUFFile):
  t = Tokenizer.from_gguf(f)
  t.decode(t.encode("a fuzzed file, ünïcode 日本"))
LOADERS = (touch_tensors, build_config, build_tokenizer)

Loaders = tuple[Callable[[GGUFFile], object], ...]
def too_long(*_): raise TimeoutError(f"more than {SECONDS} s")

def run(path: Path, loaders: Loaders, what: str) -> tuple[str, int]:
  """(the last stage reached or "loaded", the peak of memory in bytes, as Python and numpy allocate it: the mapped file is not theirs)"""
  stage = "read"
  tracemalloc.reset_peak()
  held = tracemalloc.get_traced_memory()[0]
  signal.setitimer(signal.ITIMER_REAL, SECONDS)
  try:
    f = read_gguf(path)
    for load in loaders:
      stage = load.__name__
      load(f)
    stage = "loaded"
  except GGUFError as e:
    line = str(e)
    assert line.startswith(f"{path}: ") and line.isprintable() and len(line) <= 500, f"{what}: not one clear line: {line!r}"
  except Exception as e: raise AssertionError(f"{what}: {stage}: {type(e).__name__}: {e}") from e
  finally: signal.setitimer(signal.ITIMER_REAL, 0)
  return stage, tracemalloc.get_traced_memory()[1] - held

def fuzz(base: Path, loaders: Loaders, cases: range, seed: int) -> Counter[str]:
  """Runs cases, each from its own seed; AssertionError names the one that broke a promise. Returns how often each stage was the last reached, and
  under "peak" the most memory that a case took. Its bound: what the valid file takes (keys, strings and tokenizer as Python objects) and, for
  a wrong length that makes one string of all the rest, what decoding that costs: twice to widen it, once the text so far, once in the error."""
  valid, at, path = base.read_bytes(), Layout.of(base), base.with_name("mutant.gguf")
  outcomes: Counter[str] = Counter()
  before = signal.signal(signal.SIGALRM, too_long)
  tracemalloc.start()
  try:
    for _ in range(2): stage, valid_peak = run(base, loaders, "valid file")  # twice: what is made once for all files does not count
    assert stage == "loaded"
    for case in cases:
      r, data = random.Random(f"{seed} {case}"), bytearray(valid)
      chosen = r.choices(MUTATIONS, k=r.choice((1, 1, 1, 2, 3)))
      for mutate in chosen:
        if len(data) >= at.header: mutate(data, r, at)  # what stands behind a cut is gone
      path.unlink(missing_ok=True)  # writing over a file is slow on some file systems
      path.write_bytes(data)
      what = f"case {case} of seed {seed}: {', '.join(m.__name__ for m in chosen)}"
      stage, peak = run(path, loaders, what)
      assert peak <= valid_peak + 4 * len(data), f"{what}: {stage}: {peak} bytes of memory for a file of {len(data)}, {valid_peak} for the valid one"
      outcomes[stage] += 1
      outcomes["peak"] = max(outcomes["peak"], peak)
  finally:
    tracemalloc.stop()
    signal.signal(signal.SIGALRM, before)
  return outcomes

def base_file(folder: Path) -> Path:
  """a GLM of two blocks, one dense and one MoE: every key and kind of tensor of the model in 105 kB, 8 kB of them header"""
  shape = dict(blocks=2, dim=64, heads=2, q_lora=32, kv_lora=32, nope=32, v=32, ff=128, experts=4, moe_ff=32, vocab=300)
  return write_model(folder / "base.gguf", "small-glm", "Q4_0", **shape)[0]

def test_fuzz(tmp_path: Path):
  with warnings.catch_warnings():
    warnings.simplefilter("error")  # numpy's integers wrap with a warning at most
    outcomes = fuzz(base_file(tmp_path), LOADERS, range(CASES), seed=0)
  # every stage is reached and refuses something; a good part of the mutants are harmless (random weights stay weights)
  assert all(outcomes[stage] >= 20 for stage in ("read", "build_config", "build_tokenizer", "loaded")), outcomes
  assert outcomes["read"] > CASES // 3, outcomes

@pytest.mark.parametrize("fault, message", [("hoard", "bytes of memory"), ("crash", "crash: KeyError"),
                                            ("ramble", "not one clear line"), ("hang", "hang: TimeoutError")])
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

if __name__ == "__main__":
  count, seed = (*map(int, sys.argv[1:]), *(CASES, 0)[len(sys.argv) - 1:])
  with tempfile.TemporaryDirectory() as folder: print(fuzz(base_file(Path(folder)), LOADERS, range(count), seed))

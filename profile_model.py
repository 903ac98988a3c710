"""Where a token's time goes: decodes some tokens, then times each kernel of the decode graph by itself.

  python profile_model.py models/tiny-glm-Q4_0.gguf 16
  python profile_model.py glm-4.7:flash 32 --depth 4096 --with-source

The kernels run in the graph's own order, one launch at a time with the device waited for, so every one finds the caches as it does in decode.
Their sum is not the token's time: in the graph they start without the host and may overlap, alone each pays for its own start.
"""
from __future__ import annotations
import sys
from pathlib import Path
ROOT = Path(__file__).resolve().parent
try: import tinygrad
except ImportError as e: sys.exit(str(e))
if not hasattr(tinygrad, "OVERLAY"):
  sys.exit(f"this measures the fork, but `import tinygrad` found {tinygrad.__file__}: expected {ROOT / 'tinygrad'}")

import json, statistics, time
from dataclasses import dataclass, field
from typing import Any
import numpy as np
from extra.bench import bytes_moved
from tinygrad import Device
from tinygrad.apps.engine.engine import ContextFull
from tinygrad.apps.gguf import GGUFError, read_gguf
from tinygrad.apps.llm import Parser, int_at_least
from tinygrad.apps.models import Model, UserError, find_model, load
from tinygrad.apps.machine import peak_bandwidth
from tinygrad.apps.mla import Config, Transformer
from tinygrad.apps.engine.sampling import Features
from tinygrad.engine.realize import ExecContext, estimate_uop, get_call_arg_uops, get_call_name, pm_exec
from tinygrad.helpers import ansistrip
from tinygrad.uop.ops import Ops, UOp

ROUNDS = 5  # walks over the graph; a kernel's time is their median

@dataclass
class Kernel:
  """All launches of one program in a token. seconds: a list a launch, an entry a round; nbytes: what its launches must read and write, once each"""
  name: str
  shapes: str
  source: str
  nbytes: int = 0
  seconds: list[list[float]] = field(default_factory=list)
  @property
  def total(self) -> float: return sum(map(statistics.median, self.seconds))

def describe(call:UOp) -> str:
  """The kernel's buffers, outputs first: type and number of elements"""
  return " ".join(f"{b.dtype.name}[{b.max_numel()}]" for b in get_call_arg_uops(call))

def profile(calls:list[UOp], model:Transformer, position:int) -> list[Kernel]:
  """Runs the captured calls of a step one by one, ROUNDS times and once to warm up -> its kernels, the dearest first. position: of the last token"""
  kernels:dict[bytes, Kernel] = {}
  launches:list[tuple[UOp, list[float]]] = []
  for call in calls:
    buffers = get_call_arg_uops(call)
    source = next((u.arg for u in call.src[0].src if u.op is Ops.SOURCE), "")
    kernel = kernels.setdefault(call.src[0].key, Kernel(ansistrip(get_call_name(call, buffers)).strip(), describe(call), source))
    kernel.nbytes += bytes_moved(kernel.name, estimate_uop(call).mem, model, position)
    kernel.seconds.append([])
    launches.append((call, kernel.seconds[-1]))
  context, device = ExecContext({}, update_stats=False, jit=True, wait=True), Device[Device.DEFAULT]
  for warm in range(ROUNDS + 1):
    for call, seconds in launches:
      start = time.perf_counter()
      times = [t for t in pm_exec.rewrite(call, context) if t is not None]
      if not times:  # a copy, which tells no time
        device.synchronize()
        times = [time.perf_counter() - start]
      if warm: seconds.append(sum(times))
  return sorted(kernels.values(), key=lambda k: -k.total)

def run(model:Model, name:str, count:int, depth:int, with_source:bool) -> dict[str, Any]:
  engine, ids = model.engine, np.random.default_rng(0).integers(0, min(model.transformer.config.vocab_size, 256), depth + 1).tolist()
  times, tokens = [], engine.generate(ids, count + 3)   # one is under way when the last is there, as behind each of the others
  for _ in range(count + 2):
    start = time.perf_counter()
    next(tokens)
    times.append(time.perf_counter() - start)
  token, graph = statistics.median(times[2:]), engine.runner.batch.replays[Features()].batches  # the first two compile and warm up
  position = depth + count + 1
  sizes, launches = [len(b) for b in graph], sum(map(len, graph))
  print(f"{name}, device {Device.DEFAULT}: {count} tokens after {depth}, median {token * 1e3:.3f} ms, {1 / token:.1f} tok/s")
  print(f"{launches} launches a token" + (f" in {len(graph)} graph batches: {' '.join(map(str, sizes))}" if max(sizes) > 1 else ", each by itself"))
  kernels = profile([call for batch in graph for call in batch], model.transformer, position)
  alone, peak = sum(k.total for k in kernels), peak_bandwidth()
  print(f"one by one they take {alone * 1e3:.3f} ms, {len(kernels)} different kernels"
        f"{f'; memory reads {peak[0] / 1e9:.0f} GB/s at most ({peak[1]})' if peak else ''}")
  print(f"{'share':>6s} {'sum us':>10s} {'count':>6s} {'us each':>10s} {'MB each':>9s} {'GB/s':>8s}  kernel: buffers")
  rows = []
  for k in kernels:
    n = len(k.seconds)
    rows.append(r := {"kernel": k.name, "buffers": k.shapes, "count": n, "sum_us": k.total * 1e6, "us": k.total / n * 1e6,
                      "bytes": k.nbytes // n, "gb_s": k.nbytes / k.total / 1e9, "share": k.total / alone})
    print(f"{r['share'] * 100:5.1f}% {r['sum_us']:10.1f} {n:6d} {r['us']:10.2f} {r['bytes'] / 1e6:9.3f} {r['gb_s']:8.1f}  {k.name}: {k.shapes}")
  if with_source:
    for k in kernels: print(f"\n---- {k.name}, {len(k.seconds)} a token ----\n{k.source}")
  return {"model": name, "device": Device.DEFAULT, "depth": depth, "tokens": count, "median_ms": token * 1e3, "tok_s": 1 / token,
          "launches": launches, "batches": sizes if max(sizes) > 1 else [],
          "alone_ms": alone * 1e3, "peak_gb_s": peak[0] / 1e9 if peak else None, "kernels": rows}

def main() -> None:
  p = Parser(prog="profile_model.py", description="Decode tokens, then show the decode graph's kernels by cumulative time.", allow_abbrev=False)
  p.add_argument("model", metavar="MODEL", help="a GGUF file, or a name of llm.py --list-models")
  p.add_argument("tokens", metavar="N", nargs="?", type=int_at_least(1), default=16, help="tokens to decode (default 16)")
  p.add_argument("--depth", type=int_at_least(0), default=0, metavar="D", help="tokens in the cache before the first (default 0)")
  p.add_argument("--with-source", action="store_true", help="print each kernel's rendered source")
  p.add_argument("--json", metavar="FILE", help="keep the last line, a JSON object, in FILE")
  args = p.parse_args()
  if args.json:
    try: Path(args.json).open("a").close()  # better before the work than after it
    except OSError as e: raise UserError(f"--json {args.json}: {e.strerror}") from None
  spare = 4 + ROUNDS + 1  # the first token, two to warm up, one under way, and the walks, which may move the position on
  context, room = args.depth + args.tokens + spare, Config.from_gguf(read_gguf(path := find_model(args.model))).context_length
  if context > room:
    raise UserError(f"--depth {args.depth} and {args.tokens} tokens: expected at most {room - spare} together, the model's own context less {spare}")
  model = load(path, max(4096, context))
  print(line := json.dumps(run(model, args.model, args.tokens, args.depth, args.with_source)))
  if args.json: Path(args.json).write_text(line + "\n")

if __name__ == "__main__":
  try: main()
  except (GGUFError, UserError, ContextFull, ValueError, OSError, MemoryError) as e:
    print(f"{type(e).__name__ if isinstance(e, GGUFError) else 'error'}: {e}", file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt: sys.exit(130)

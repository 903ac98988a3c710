"""The decode proxy: what a token costs, from a handful of blocks.

  python bench_block.py --model glm                        a bank of GLM-4.7-Flash's blocks, random weights, no file
  python bench_block.py 20 --model models/X.gguf --depth 4096
  python bench_block.py --generic                          the same without the fork's kernels: what tinygrad's compiler makes of plain ops
  python bench_block.py --parallel 8 --depth 128           a step of eight sequences, a token each
  python bench_block.py --target METAL                     kernels a step of the three models, with no device; for METAL with estimates
  python bench_block.py --target METAL --parallel 1,4,8    the same for steps of one, four and eight sequences

Distinct blocks, together larger than the caches, run one after another in one JIT, as in decode. A round replays it for several tokens with the
device synchronized only before and after, so that gaps between launches count as they do in decode. Attention and feed-forward run the same
way by themselves; the head (embedding, last norm, output, greedy choice) is the decode graph of a model without blocks.
A step = dense blocks · dense + MoE blocks · MoE + head. With one sequence a step is a token.
"""
from __future__ import annotations
import sys
from pathlib import Path
ROOT = Path(__file__).resolve().parent
try: import tinygrad
except ImportError as e: sys.exit(str(e))
if not hasattr(tinygrad, "OVERLAY"):
  sys.exit(f"this measures the fork, but `import tinygrad` found {tinygrad.__file__}: expected {ROOT / 'tinygrad'}")

import argparse, contextlib, copy, ctypes, json, statistics, time
from typing import Any, Callable
import numpy as np
from extra.bench import (LANGUAGES, batch_count, cache_row_bytes, count_kernels, head_bytes, no_device, random_weights, read_bytes,
                         render_kernels, stand_in, with_blocks)
from extra.mkgguf import MIXES, MODELS
from tinygrad import Device, Tensor
from tinygrad.apps.capture import Replay, first_batch, to_device
from tinygrad.apps.engine.batch import ROWS
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.engine.sequence import BatchRow
from tinygrad.apps.gguf import GGUFError, GGUFFile, read_gguf
from tinygrad.apps.llm import Parser, int_at_least
from tinygrad.apps.machine import APPLE, peak_bandwidth
from tinygrad.apps.mla import Block, Config, Transformer
from tinygrad.apps.models import UserError, check_device, find_model
from tinygrad.apps.rope import Rope
from tinygrad.apps.engine.sampling import Features, Sampling
from tinygrad.nn.primitive import plain_ops
from tinygrad.nn.step import Step

TOKENS, ROUND_SECONDS, MAX_BLOCKS = 64, 0.1, 16  # a round: so many tokens, or fewer where they take longer than this

def cache_size() -> int:
  """Bytes of the largest cache between the device and its memory: what a bank must exceed four times over"""
  if Device.DEFAULT.split(":")[0] == "CUDA":
    from tinygrad.runtime.autogen import cuda
    cuda.cuDeviceGetAttribute(ctypes.byref(value := ctypes.c_int()), cuda.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, Device[Device.DEFAULT].cu_device)
    return value.value
  return 30_000_000 if Device.DEFAULT == "CPU" else 60_000_000

class Timed:
  """Something that runs once a step. step(i) enqueues the i-th; it holds `units` alike (a bank's blocks), each of which reads `read` bytes"""
  def __init__(self, step:Callable[[int], Any], kernels:Callable[[], int], units:int, read:float):
    self.step, self.units, self.read, self.seconds = step, units, read, []
    self.next, self.tokens = 0, 1
    self.run()                                             # records and compiles
    once = min(self.run(), self.run())
    self.tokens = max(1, min(TOKENS, int(ROUND_SECONDS / once)))
    self.run()
    self.kernels = kernels() / units
  def run(self) -> float:
    """Seconds a step of one round"""
    Device[Device.DEFAULT].synchronize()
    start = time.perf_counter()
    for i in range(self.next, self.next + self.tokens): self.step(i)
    Device[Device.DEFAULT].synchronize()
    self.next += self.tokens
    return (time.perf_counter() - start) / self.tokens
  def round(self) -> None: self.seconds.append(self.run() / self.units)
  @property
  def median(self) -> float: return statistics.median(self.seconds)
  def figures(self, peak:float|None) -> dict[str, Any]:
    p10, p90 = (float(np.percentile(self.seconds, p)) for p in (10, 90))
    return {"kernels": self.kernels, "bytes": self.read, "median_us": self.median * 1e6, "p10_us": p10 * 1e6, "p90_us": p90 * 1e6,
            "gb_s": self.read / self.median / 1e9, "ceiling_percent": 100 * self.read / peak / self.median if peak else None,
            "tokens_a_round": self.tokens, "rounds": len(self.seconds)}

def attention(block:Block, step:Step, x:Tensor, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]: return block.attn(step, x, cache, rope)
def feed_forward(block:Block, step:Step, x:Tensor, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]: return block.ffn(step, x), cache

def tables(model:Transformer, parallel:int) -> np.ndarray:
  """int32 (parallel, pages): the pages of so many sequences, one after another"""
  return 1 + np.arange(parallel * model.pages, dtype=np.int32).reshape(parallel, -1)

def bank(model:Transformer, which:range, depth:int, parallel:int, part:Callable[..., tuple[Tensor, Tensor]], read:float) -> Timed:
  """Blocks `which` of the model, each doing `part` with what the one before it gave, at position `depth` of so many sequences. What all blocks of a
  step share is done once, as it is in a model"""
  x = to_device(np.random.default_rng(0).standard_normal((parallel, model.config.dim), np.float32))
  replay, step = Replay(), Step.decode(to_device(np.full(parallel, depth, np.int32)), to_device(tables(model, parallel)))
  step = model.planned(step, replay.run)
  for i in which: x, _ = replay.run(part, model.blk[i], step, x, model.cache[i], model.rope)
  return Timed(lambda i: replay(), lambda: len(replay.calls), len(which), read)

def head(model:Transformer, parallel:int, read:float) -> Timed:
  bare = copy.copy(model)
  bare.blk, bare.cache = [], []
  batch = Runner(bare).batch_of(parallel)
  batch.set([BatchRow(0, 0, table.tolist(), Sampling(), [0], 1) for table in tables(model, parallel)], Features())
  replay = batch.record()
  return Timed(lambda i: replay(), lambda: len(replay.calls), 1, read)

def spread(blocks:range, n:int) -> list[int]:
  """n of the blocks at even distances; each several times where there are fewer"""
  return [blocks[i * len(blocks) // n] for i in range(n)]

def measure(f:GGUFFile, name:str, progress:Callable, rounds:int, depth:int, wanted:int|None, parallel:int) -> dict[str, Any]:
  c = Config.from_gguf(f)
  kinds, chosen = {"dense": range(c.n_dense), "MoE": range(c.n_dense, c.n_blocks)}, {}
  for kind, blocks in kinds.items():
    if blocks: chosen[kind] = spread(blocks, wanted or min(MAX_BLOCKS, -(-4 * cache_size() // read_bytes(f, c, blocks[-1]))))
  model = Transformer.from_gguf(with_blocks(f, [i for blocks in chosen.values() for i in blocks]), max(depth + TOKENS, 4096), progress,
                                pool=lambda model: parallel * model.pages + 1)
  row = c.cache_dim * model.cache[0].dtype.itemsize * depth * parallel
  peak, source = peak_bandwidth() or (None, "")
  # the ceiling, before anything is measured
  token = sum(read_bytes(f, c, i, tokens=parallel) for i in range(c.n_blocks)) + head_bytes(f, c, parallel) + c.n_blocks * row
  reads = {kind: [statistics.mean(read_bytes(f, c, i, part, parallel) for i in blocks) + (row if part != "ffn" else 0)
                  for part in ("", "attn", "ffn")]
           for kind, blocks in chosen.items()}
  print(f"model     {name}, device {Device.DEFAULT}, depth {depth}, {parallel} sequence{'s' * (parallel > 1)}")
  for kind, blocks in chosen.items():
    size = len(blocks) * reads[kind][0]
    print(f"bank      {len(blocks)} {kind} blocks of the model's {len(kinds[kind])}, {size / 1e6:.1f} MB read"
          f"{'' if size >= 4 * cache_size() else ': small enough that a cache may hold some of it'}")
  print(f"ceiling   {f'{peak / 1e9:.0f} GB/s ({source})' if peak else 'unknown: no figure for this memory'}")
  for what, size in (*((f"{kind} block", r[0]) for kind, r in reads.items()), ("a step", token)):
    print(f"          {what:11s} {size / 1e6:9.2f} MB{f' {size / peak * 1e6:9.1f} us' if peak else ''}", flush=True)
  if peak: print(f"          {parallel * peak / token:.1f} tok/s")
  # measuring
  parts:dict[str, Timed] = {}
  start = 0
  for kind, blocks in chosen.items():
    which, start = range(start, start + len(blocks)), start + len(blocks)
    runs = (("block", Block.__call__), ("attention", attention), ("feed-forward", feed_forward))
    for (part, fxn), read in zip(runs, reads[kind]): parts[f"{kind} {part}"] = bank(model, which, depth, parallel, fxn, read)
  parts["head"] = head(model, parallel, head_bytes(f, c, parallel))
  for _ in range(rounds):
    for timed in parts.values(): timed.round()
  result = {part: timed.figures(peak) for part, timed in parts.items()}
  per = [(len(kinds[kind]), parts[f"{kind} block"]) for kind in chosen] + [(1, parts["head"])]
  seconds, kernels = sum(n * t.median for n, t in per), round(sum(n * t.kernels for n, t in per))
  print(f"{'':18s} {'kernels':>8s} {'MB':>9s} {'median us':>11s} {'p10':>11s} {'p90':>11s} {'GB/s':>8s}  % of ceiling")
  for part, r in result.items():
    print(f"{part:18s} {r['kernels']:8.4g} {r['bytes'] / 1e6:9.2f} {r['median_us']:11.1f} {r['p10_us']:11.1f} {r['p90_us']:11.1f} {r['gb_s']:8.1f}"
          + (f"  {r['ceiling_percent']:5.1f}" if peak else ""))
  percent = 100 * token / peak / seconds if peak else None
  print(f"{'a step':18s} {kernels:8d} {token / 1e6:9.2f} {seconds * 1e6:11.1f} {'':23s} {token / seconds / 1e9:8.1f}"
        + (f"  {percent:5.1f}" if peak else ""))
  print(f"proxy     {parallel / seconds:.2f} tok/s = {parallel} / ({' + '.join(f'{n} x {t.median * 1e6:.1f}' for n, t in per)} us)")
  return {"model": name, "device": Device.DEFAULT, "depth": depth, "parallel": parallel,
          "blocks": {k: len(b) for k, b in kinds.items()}, "bank": chosen, "parts": result,
          "kernels_a_step": kernels, "step_bytes": token, "peak_gb_s": peak / 1e9 if peak else None, "step_us": seconds * 1e6,
          "tok_s": parallel / seconds, "ceiling_percent": percent}

# what an estimate for Metal supposes, as nobody has measured it: a launch within a batch costs this much beside its bytes
LAUNCH_SECONDS = 5e-6
MACHINES = ("M3 Pro", "M3 Max", "M4 Max", "M2 Ultra")

def estimate(kernels:int, size:int, parallel:int) -> dict[str, Any]:
  """Seconds a step by bytes / bandwidth + launches · LAUNCH_SECONDS, printed as what it is"""
  launches = f"{kernels} launches x {LAUNCH_SECONDS * 1e6:g} us"
  print(f"{'':24s} estimate, not a measurement: {size / 1e6:.1f} MB, each weight read once, / bandwidth + {launches}")
  result:dict[str, Any] = {"launch_us": LAUNCH_SECONDS * 1e6}
  for machine in MACHINES:
    seconds = size / (APPLE[machine] * 1e9) + kernels * LAUNCH_SECONDS
    result[machine] = {"gb_s": APPLE[machine], "step_ms": seconds * 1e3, "tok_s": parallel / seconds}
    print(f"{'':24s} estimate {machine:9s} {APPLE[machine]:4d} GB/s {seconds * 1e3:7.2f} ms a step, {parallel / seconds:6.1f} tok/s")
  return result

def count(files:dict[str, GGUFFile], target:str, depth:int, parallel:int) -> dict[str, Any]:
  print(f"kernels a step of {parallel} for {target} at depth {depth}, scheduled and rendered with no device; one block of each kind is scheduled "
        "and multiplied")
  with no_device(target): first = first_batch()
  result = {}
  for name, f in files.items():
    c = Config.from_gguf(f)
    context, cache = max(depth + TOKENS, 4096), cache_row_bytes(c, target) * depth * parallel
    (kernels, kinds), each = count_kernels(f, target, context, parallel), render_kernels(f, target, context, depth, parallel)
    size = sum(read_bytes(f, c, i, tokens=parallel) for i in range(c.n_blocks)) + head_bytes(f, c, parallel) + cache
    result[name] = {"kernels_a_step": kernels, "kinds": kinds, "batches": (in_batches := batch_count(kernels, first)), "step_bytes": size,
                    "kernels": [k._asdict() for k in each]}
    rest = kernels - sum(n * k for n, k in kinds)
    print(f"{name:24s} {kernels:5d} = {' + '.join(f'{n} x {k}' for n, k in kinds)} + {rest}; {in_batches} batches; "
          f"{(size - cache) / 1e6:.1f} MB of weights{f', {cache / 1e6:.1f} MB of cache' if cache else ''}")
    if target == "METAL":
      print(f"{'':24s} times   MB each  threadgroup bytes  threads")
      for k in each: print(f"{'':24s} {k.times:5d} {k.read / 1e6:9.3f} {k.shared:18d} {k.threads:8d}  {k.name}")
      result[name]["estimate"] = estimate(kernels, size, parallel)
  return {"target": target, "depth": depth, "parallel": parallel, "models": result}

def sequences(text:str) -> list[int]:
  """N,N,…, each a size of recorded steps"""
  numbers = [int(n) for n in text.split(",") if n.isdecimal()]
  if len(numbers) != text.count(",") + 1 or not {*numbers} <= {*ROWS}:
    raise argparse.ArgumentTypeError(f"expected {', '.join(map(str, ROWS))}, or several of them with commas, found {text!r}")
  return numbers

def main() -> None:
  p = Parser(prog="bench_block.py", description="Measure decoding on a bank of blocks, or count its kernels.", allow_abbrev=False)
  p.add_argument("rounds", nargs="?", type=int_at_least(1), default=10, help="rounds to measure (default 10)")
  p.add_argument("--model", metavar="NAME|PATH", help=f"made up, without a file: {', '.join(MODELS)}; or what llm.py takes "
                 "(default glm; with --count glm, ds2lite and youtu)")
  p.add_argument("--quant", default="Q4_0", choices=[*MIXES, "F16"], help="types of a made-up model (default Q4_0, the public file's mix)")
  p.add_argument("--depth", type=int_at_least(0), default=0, metavar="D", help="tokens in the cache (default 0)")
  p.add_argument("--parallel", type=sequences, default=[1], metavar="N[,N…]",
                 help=f"sequences of a step, one number after another: {', '.join(map(str, ROWS))} (default 1)")
  p.add_argument("--blocks", type=int_at_least(1), metavar="N", help="blocks in a bank (default: enough to exceed four times the cache)")
  p.add_argument("--count", action="store_true", help="print kernels a step, with no device, and leave")
  p.add_argument("--target", choices=LANGUAGES, help="whom --count counts for (default CUDA); implies --count")
  p.add_argument("--generic", action="store_true", help="without the fork's kernels: plain ops, as tinygrad's compiler schedules them")
  p.add_argument("--json", metavar="FILE", help="keep the last line, a JSON object, in FILE")
  args = p.parse_args()
  if args.json:
    try: Path(args.json).open("a").close()                 # better before the work than after it
    except OSError as e: raise UserError(f"--json {args.json}: {e.strerror}") from None
  counting = args.count or args.target is not None
  names = [args.model] if args.model else ["glm", "ds2lite", "youtu"] if counting else ["glm"]
  made_up = names[0] in MODELS
  files = {f"{n} {args.quant}": stand_in(n, args.quant) for n in names} if made_up else {names[0]: read_gguf(find_model(names[0]))}
  for name, f in files.items():
    if args.depth + TOKENS > (room := Config.from_gguf(f).context_length):
      raise UserError(f"--depth {args.depth}: expected at most {room - TOKENS}, the context of {name} less {TOKENS}")
  if args.generic: print("generic   plain ops, as tinygrad's compiler schedules them: the fork's kernels are off")
  with plain_ops() if args.generic else contextlib.nullcontext():
    if counting: results = [count(files, args.target or "CUDA", args.depth, parallel) for parallel in args.parallel]
    else:
      check_device()
      (name, f), = files.items()
      progress = random_weights if made_up else lambda tensors: tensors
      results = [measure(f, name, progress, args.rounds, args.depth, args.blocks, parallel) for parallel in args.parallel]
  result = (results[0] if len(results) == 1 else {"steps": results}) | {"generic": args.generic}
  print(line := json.dumps(result))
  if args.json: Path(args.json).write_text(line + "\n")

if __name__ == "__main__":
  try: main()
  except (GGUFError, UserError, ValueError, OSError, MemoryError) as e:
    print(f"{type(e).__name__ if isinstance(e, GGUFError) else 'error'}: {e}", file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt: sys.exit(130)

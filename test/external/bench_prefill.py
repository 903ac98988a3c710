"""Prefill of a model's first blocks without its file: a chunk's time at some depths, and each kernel's by itself.

  DEV=CUDA python test/external/bench_prefill.py glm --blocks 4 --depth 0 4096
"""
from __future__ import annotations
import argparse, statistics, sys, time
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import numpy as np
from extra.bench import random_weights, stand_in, with_blocks
from profile_model import profile
from tinygrad import Device
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.engine.sequence import Piece
from tinygrad.apps.mla import LONG_SIZES, Config, Transformer

def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("model", nargs="?", default="glm")
  p.add_argument("--quant", default="Q4_0")
  p.add_argument("--blocks", type=int, default=4)
  p.add_argument("--depth", type=int, nargs="*", default=[0, 4096])
  p.add_argument("--chunk", type=int, help="tokens (default: the most that a step takes)")
  args = p.parse_args()
  f = stand_in(args.model, args.quant)
  whole, shown = Config.from_gguf(f), with_blocks(f, list(range(args.blocks)))
  runner = Runner(Transformer.from_gguf(shown, max(args.depth) + (args.chunk or LONG_SIZES[-1]), random_weights))
  size, table = args.chunk or runner.sizes[-1], range(1, runner.model.pages + 1)
  if size not in runner.sizes: p.error(f"--chunk: expected one of {', '.join(map(str, runner.sizes))}, found {size}")
  start = time.perf_counter()
  ids = np.random.default_rng(0).integers(0, whole.vocab_size, size).tolist()
  def run(depth:int) -> None:
    runner.prefill([Piece(0, ids, depth, table)], size)
    Device[Device.DEFAULT].synchronize()
  run(0)
  print(f"{args.model} {args.quant}, blocks 0 to {args.blocks - 1} of {whole.n_blocks}, {size} tokens; "
        f"first step {time.perf_counter() - start:.2f} s")
  for depth in args.depth:
    times = []
    for _ in range(7):
      start = time.perf_counter()
      run(depth)
      times.append(time.perf_counter() - start)
    calls = runner.record_chunk(size).calls
    print(f"depth {depth}: {statistics.median(times[2:]) * 1e3:.3f} ms a step, {len(calls)} kernels")
    kernels = profile(calls, runner.model, depth + size - 1)
    print(f"  one by one {sum(k.total for k in kernels) * 1e3:.3f} ms")
    for k in kernels: print(f"  {k.total * 1e6:9.1f} us {len(k.seconds):4d} {k.total / len(k.seconds) * 1e6:9.1f} each  {k.name}: {k.shapes[:100]}")

if __name__ == "__main__": main()

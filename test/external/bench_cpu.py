"""The CPU's products with weights and columns in the cache: ns that a thread takes for 16 rows of 32 weights, as compiled for any x86 CPU.

  python test/external/bench_cpu.py [--types Q4_0,Q6_K] [--columns 1,4] [--archs native,znver3,haswell] [--rounds 40] [--tree FOLDER]

tree: another clone, whose text is timed in turn with this one's. A machine whose other core is busy is slower by half for seconds: the least of the
rounds is printed beside the median, and beside both what a thread's share of the memory's speed allows. The last line is JSON.
"""
from __future__ import annotations
import argparse, ctypes, json, pathlib, statistics, subprocess, sys, tempfile, time
ROOT = pathlib.Path(__file__).resolve().parents[2]

WIDTH, GROUPS, REPEATS = 2048, 16, 8   # numbers of a column; groups of 16 rows, which stay in the second cache; times a call goes through them
KERNEL = """void run(const byte* B, const float* x, float* X, float* P, float* S, v16f* y) {{
  for (int c = 0; c < {columns}; c++) stage(x + c * {width}, 0, 0, {width}, X + c * {width}, P + c * {width}, S + c * {sums});
  for (int r = 0; r < {repeats}; r++) for (int g = 0; g < {groups}; g++) {{
    for (int c = 0; c < {columns}; c++) y[c] = 0;
    dot({columns}, B + g * {group}L, X, P, S, (const long[]){{{at}}}, y);
    __asm__ volatile("" : : "r"(y) : "memory");
  }}
}}
"""

def source(tree:str, kind:str, columns:int) -> tuple[int, str]:
  """A group's bytes and the C source, by a clone's own modules in a process of their own"""
  code = f"""import re, sys; sys.path[:0] = [{tree!r}, {tree + '/test'!r}]
from gguf import GGMLQuantizationType as T
from helpers import random_weight
from tinygrad.apps.quantized import QuantizedLinear
from tinygrad.nn import cpu
w = QuantizedLinear.load(T.{kind}, (16, {WIDTH}), random_weight(T.{kind}, (16, {WIDTH}))[0])
print(cpu.group_bytes(w)); print(re.search(r"S\\[(\\d+)\\]", cpu.stage_buffers({WIDTH}))[1]); print(cpu.PRELUDE + cpu.LOOK + cpu.dot("dot", w))"""
  size, sums, text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tree).stdout.split("\n", 2)
  at = ", ".join(str(c * WIDTH) for c in range(columns))
  return int(size), text + "WIDE " + KERNEL.format(columns=columns, width=WIDTH, sums=sums, repeats=REPEATS, groups=GROUPS, group=size, at=at)

def main() -> None:
  sys.path.insert(0, str(ROOT))
  import numpy as np
  from tinygrad.apps.machine import cpu_threads, peak_bandwidth
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("--types", default="Q4_0,Q4_K,Q5_K,Q6_K,Q8_0,IQ4_NL")
  p.add_argument("--columns", default="1,4")
  p.add_argument("--archs", default="native")
  p.add_argument("--rounds", type=int, default=40)
  p.add_argument("--tree", type=pathlib.Path)
  args = p.parse_args()
  peak, how = peak_bandwidth("CPU")
  print(f"memory    {peak / 1e9:.0f} GB/s ({how})")
  rng, trees, rows = np.random.default_rng(0), [str(t.resolve()) for t in (ROOT, args.tree) if t], []
  with tempfile.TemporaryDirectory() as folder:
    for kind in args.types.split(","):
      for columns in map(int, args.columns.split(",")):
        (size, *_), texts = zip(*(source(tree, kind, columns) for tree in trees))
        stream = rng.integers(0, 64, GROUPS * size + 8192, np.uint8)   # finite halves everywhere
        x, y = rng.standard_normal(columns * WIDTH).astype(np.float32), np.zeros(columns * 16 + 16, np.float32)
        staged = [np.zeros(columns * WIDTH + 64, np.float32) for _ in range(3)]
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (stream, x, *staged, y)]
        for arch in args.archs.split(","):
          runs = []
          for text in texts:
            out = f"{folder}/{len(rows)}_{len(runs)}.so"
            flags = "-w -O2 -ffreestanding -fno-math-errno -shared -fPIC -x c - -o".split()
            subprocess.run(["clang", f"-march={arch}", *flags, out], input=text, text=True, check=True)
            runs.append(ctypes.CDLL(out).run)
          ns:list[list[float]] = [[] for _ in runs]
          for i in range(-1, args.rounds):   # the first warms up
            for run, into in zip(runs, ns):
              start = time.perf_counter()
              run(*pointers)
              if i >= 0: into.append((time.perf_counter() - start) * 1e9 / (REPEATS * GROUPS * WIDTH / 32))
          memory = size * 32 / WIDTH / peak * cpu_threads() * 1e9
          for tree, values in zip(trees, ns):
            rows.append({"type": kind, "columns": columns, "arch": arch, "tree": tree if tree != str(ROOT) else "this", "least_ns": min(values),
                         "median_ns": statistics.median(values), "memory_ns": memory})
            print(f"{kind:7s} {columns} columns, {arch:10s} {min(values):7.2f} ns, median {statistics.median(values):7.2f}, the memory {memory:.1f}"
                  f"{'' if tree == str(ROOT) else f'  ({tree})'}", flush=True)
  print(json.dumps(rows))

if __name__ == "__main__": main()

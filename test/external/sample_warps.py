"""Where the warps of a command stand, and why: samples of its kernels as they run, overlap and all.

  DEV=CUDA python test/external/sample_warps.py [--period 11] [--kernel NAME [--least 0.5]] [--keep FOLDER] -- -m NAME --benchmark -p 0 -n 64 -r 3
  python test/external/sample_warps.py --kernel NAME --from FOLDER                       what was kept, once more

Behind -- is llm.py's --benchmark, with -n or --parallel. One of its rounds is sampled by CUPTI (sample_warps.c), which takes a multiprocessor's warps
one by one, every 2^period cycles: how many samples a place has says how long warps are there, not how long others wait for them. It costs no time
that can be measured. Needs gcc and a CUDA toolkit; nvdisasm from there or pip's nvidia-cuda-nvdisasm.

A line is a kernel: its share of all samples, and of that the share at its wait for the launches before it (griddepcontrol.wait); of the other samples
the commonest reasons: `selected` is an instruction that is issued, `long_scoreboard` the wait for device memory or the second cache, `barrier` for
the block's other warps, `no_instructions` for the instruction cache. --kernel: of each of its instructions that has so many per cent of its samples,
and of each wait, barrier and end, the share, the sum so far, and reasons.
"""
from __future__ import annotations
import argparse, collections, ctypes, itertools, os, re, runpy, shutil, subprocess, sys, tempfile
from collections import Counter
from pathlib import Path
from typing import Iterator
from unittest import mock
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test/external")]
from compile_table import disassembled, nvdisasm

WARM_ROUNDS = 2       # of a benchmark, before the one that is sampled
PREFIX, ALONE = "smsp__pcsamp_warps_issue_stalled_", "_not_issued"   # of reasons' names; those that end so count some samples again
SHOWN, WAIT, MARKS = 8, "ACQBULK", re.compile(r"ACQBULK|PREEXIT|EXIT|BAR\.|BRA")
Samples = dict[str, dict[int, Counter[str]]]   # of kernels, of instructions, of reasons

# ---- sampling ----

def library(folder:Path) -> ctypes.CDLL:
  toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
  if not (toolkit / "include/cupti_pcsampling.h").exists(): sys.exit(f"{toolkit}: no CUDA toolkit with CUPTI; CUDA_HOME says where there is one")
  subprocess.run(["gcc", "-O1", "-shared", "-fPIC", f"-I{toolkit}/include", Path(__file__).with_suffix(".c"), "-o", folder / "sample_warps.so",
                  f"-L{toolkit}/lib64", f"-Wl,-rpath,{toolkit}/lib64", "-lcupti"], check=True)
  ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
  return ctypes.CDLL(str(folder / "sample_warps.so"))

def sample(arguments:list[str], period:int, folder:Path) -> None:
  """Runs llm.py with one round sampled"""
  from tinygrad import Device
  from tinygrad.apps import measure
  from tinygrad.runtime.autogen import cuda
  (folder / "cubins").mkdir(parents=True, exist_ok=True)
  warps = library(folder)
  cuda.cuCtxSetCurrent(Device["CUDA"].context)
  warps.begin(period, str(folder / "cubins").encode())
  rounds = itertools.count()
  def sampled(run):
    def round_of(*args, **kwargs):
      if next(rounds) != WARM_ROUNDS: return run(*args, **kwargs)
      warps.start()
      try: return run(*args, **kwargs)
      finally: warps.stop(str(folder / "samples.txt").encode())
    return round_of
  sys.argv = ["llm.py", *arguments]
  with mock.patch.multiple(measure, **{name: sampled(getattr(measure, name)) for name in ("decode_seconds", "together_seconds")}):
    try: runpy.run_path(str(ROOT / "tinygrad/apps/llm.py"), run_name="__main__")
    except SystemExit as e:
      if e.code: raise
  if not (folder / "samples.txt").exists(): sys.exit(f"no round was sampled: expected --benchmark with -r {WARM_ROUNDS + 1} or more")

# ---- what was found ----

def read(folder:Path) -> Samples:
  found:Samples = collections.defaultdict(dict)
  for line in (folder / "samples.txt").read_text().splitlines():
    kernel, place, *reasons = line.split()
    counts = {name.removeprefix(PREFIX): int(count) for name, count in (reason.split("=") for reason in reasons)}
    found[kernel][int(place)] = Counter({name: count for name, count in counts.items() if not name.endswith(ALONE)})
  return found

def listings(folder:Path) -> Iterator[tuple[str, dict[int, str]]]:
  """(kernel, its instructions by their offsets) of each binary"""
  for path in sorted((folder / "cubins").glob("*.cubin")):
    for part in re.split(r"(?m)^\.text\.(?=\S+:$)", disassembled(path))[1:]:
      lines = re.findall(r"(?m)^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", part)
      yield part[:part.index(":")], {int(place, 16): instruction for place, instruction in lines}

def said(reasons:Counter[str], of:int, most:int) -> str:
  return ", ".join(f"{name} {100 * count / of:.1f}" for name, count in reasons.most_common(most) if count)

def print_kernels(found:Samples, code:dict[str, dict[int, str]]) -> None:
  everything, rows = sum(reasons.total() for places in found.values() for reasons in places.values()), []
  for kernel, places in found.items():
    waiting = sum(reasons.total() for place, reasons in places.items() if WAIT in code.get(kernel, {}).get(place, ""))
    working = sum((reasons for place, reasons in places.items() if WAIT not in code.get(kernel, {}).get(place, "")), Counter())
    rows.append((waiting + working.total(), waiting, working, kernel))
  print(f"{everything} samples\n{'share':>6s} {'wait':>6s}  instructions  kernel")
  for total, waiting, working, kernel in sorted(rows, key=lambda row: -row[0]):
    if total < everything / 1000: break
    print(f"{100 * total / everything:5.1f}% {100 * waiting / total:5.1f}%  {len(code.get(kernel, ())):12d}  {kernel}: "
          f"{said(working, max(working.total(), 1), SHOWN)}")

def print_instructions(kernel:str, places:dict[int, Counter[str]], code:dict[int, str], least:float) -> None:
  everything, so_far = sum(reasons.total() for reasons in places.values()), 0
  print(f"\n{kernel}: {everything} samples")
  for place, instruction in code.items():
    reasons = places.get(place, Counter())
    so_far += reasons.total()
    share, shares = 100 * reasons.total() / everything, 100 * so_far / everything
    if share >= least or MARKS.search(instruction):
      print(f"{place:6x} {share:5.1f} {shares:5.1f}  {instruction[:70]:70s} {said(reasons, everything, 4)}")

def main() -> None:
  own, arguments = sys.argv[1:], []
  if "--" in own: own, arguments = own[:own.index("--")], own[own.index("--") + 1:]
  p = argparse.ArgumentParser(description="sample where warps stand", allow_abbrev=False)
  p.add_argument("--period", type=int, default=11, choices=range(5, 32), metavar="5…31")
  p.add_argument("--kernel", help="what its name contains")
  p.add_argument("--least", type=float, default=0.5)
  kept = p.add_mutually_exclusive_group()
  kept.add_argument("--keep", type=Path, metavar="FOLDER")
  kept.add_argument("--from", type=Path, dest="kept", metavar="FOLDER")
  args = p.parse_args(own)
  if (args.kept is None) == (not arguments): p.error("expected either -- and llm.py's arguments, or --from")
  if args.kept is None and shutil.which("gcc") is None: sys.exit("no gcc")
  nvdisasm()
  with tempfile.TemporaryDirectory() as temporary:
    folder = args.kept or args.keep or Path(temporary)
    if arguments: sample(arguments, args.period, folder)
    found, code = read(folder), dict(listings(folder))
  print_kernels(found, code)
  for kernel in [name for name in found if args.kernel and args.kernel in name]:
    print_instructions(kernel, found[kernel], code.get(kernel, {}), args.least)

if __name__ == "__main__": main()

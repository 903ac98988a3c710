"""Compiles all kernels of whole models by NVRTC, for NVIDIA architectures, without a card: what each asks of a multiprocessor, and who lacks it.

  pip install nvidia-cuda-nvrtc nvidia-cuda-runtime           the compiler, and the headers of half; a toolkit has both
  python test/external/compile_table.py [--models glm,ds2lite,youtu,kimi] [--quant Q4_0] [--archs sm_80,…] [--steps decode,prefill] [--processes N]
                                        [--batch-invariant] [--order]   the latter with nvidia-cuda-nvdisasm, too

Of each model: greedy decode steps of every size of a batch, some drawn by all filters, and chunks of a prompt of every size. Architectures that are
given the same instructions (intrinsics.of_arch) have the same sources. A line is a source: the step that first has it, its name, threads, bytes of
shared memory, then of each architecture the registers of a thread and, behind a +, its bytes of local memory: what is spilled, and arrays that are
indexed by what is not constant. A binary that was compiled once is in tinygrad's cache.

--order: below it, of each architecture, the order that its compiler has made, as `L12 W L7 m2 L m18 | S`: loads from device memory (L), the wait for
other launches (W), copies to shared memory (C), products (m), shuffles (~), barriers (|), stores (S), exits (X). What is asked for late is waited for
late.

The exit code is 1, and lines begin with WRONG, where a source is not compiled, spills more than is granted to its kernel, or asks more of a block's
registers or shared memory than the architecture has. The last line is JSON.
"""
from __future__ import annotations
import argparse, functools, hashlib, importlib.metadata, itertools, json, math, multiprocessing, os, re, shutil, struct, subprocess, sys, tempfile
from pathlib import Path
from typing import Iterator, NamedTuple
from unittest import mock
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

ARCHS = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}   # KB of shared memory that a block may have
REGISTERS = 65536               # of a block
# bytes of local memory that a kernel may take, by the beginning of its name: before Hopper, and from it on, where some launches ask for more blocks
# at once than have room without
SPILLS = {"expert_gate_up_": 16, "linear_residual_q4_1_": 8, "few_expert_down_": 8, "matmul_q4_1_": 8, "grouped_matmul_q4_1_": 8,
          "gate_up_rounded_": 80, "few_matmul_residual_q4_1_": 112,
          "grouped_matmul_q4_1_64_2048_1408_1024": 64, "expert_gate_up_prefill_q4_0_64_1408_2048_1024": 64}
HOPPER_SPILLS = {"few_expert_gate_up_": 104, "few_expert_down_": 104, "gate_up_rounded_": 112, "few_matmul_": 224, "few_gate_up_": 120,
                 "gate_up_q4_k_": 16, "gate_up_prefill_": 56, "matmul_q": 64, "expert_gate_up_": 16, "expert_gate_up_prefill_": 56,
                 "mla_split_kv_mma_": 8, "mla_prefill_heads_": 8,
                 "grouped_matmul_q4_1_64_2048_1408_1024": 48, "grouped_matmul_q4_1_64_2048_1408_2048": 72}
INVARIANT_SPILLS = {"linear_residual_": 368}   # … of batch-invariant steps, beside these
FRAME_SIZE, REGCOUNT = 0x11, 0x2f   # attributes of a cubin's .nv.info
MARKS = {"LDG": "L", "ACQBULK": "W", "LDGSTS": "C", "IDP": "m", "HMMA": "m", "HGMMA": "m", "SHFL": "~", "BAR": "|", "STG": "S", "EXIT": "X"}

def of_pip(package:str, name:str) -> Path|None:
  """A package's file whose name has this form"""
  try: files = importlib.metadata.files(package) or []
  except importlib.metadata.PackageNotFoundError: return None
  return next((Path(file.locate()) for file in files if re.fullmatch(name, file.name)), None)

def find_pip_nvrtc() -> None:
  """tinygrad looks for the compiler and its headers where a toolkit has them, or where the environment says"""
  if (library := of_pip("nvidia-cuda-nvrtc", r"libnvrtc\.so\.\d+")) is None: return
  os.environ.setdefault("NVRTC_PATH", str(library))
  os.environ.setdefault("CUDA_PATH", str(library.parents[1]))
find_pip_nvrtc()   # before tinygrad's first import of it

from extra import bench
from tinygrad.apps.capture import Replay
from tinygrad.apps.engine.batch import ROWS
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.engine.sampling import Features
from tinygrad.apps.mla import LONG_SIZES, PREFILL_SIZES, Config, Transformer
from tinygrad.device import CompileError
from tinygrad.engine.realize import compile_linear
from tinygrad.helpers import ansistrip
from tinygrad.nn.intrinsics import of_arch
from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler
from tinygrad.runtime.support.elf import elf_loader
from tinygrad.uop.ops import Ops, UOp

SIZES = {"decode": ROWS, "prefill": (*PREFILL_SIZES, *LONG_SIZES)}   # tokens of the steps of a kind
DRAWN = 1, 8, 64                # … of those that draw by all filters, too

class Kernel(NamedTuple):
  step: str
  name: str
  threads: int       # of a block
  shared: int        # bytes of a block
  source: str

class Cost(NamedTuple):
  registers: int     # of a thread
  local: int         # bytes of a thread

class Task(NamedTuple):
  model: str
  quant: str
  archs: tuple[str, ...]   # of one row of instructions
  order: bool
  invariant: bool          # whether steps are batch-invariant
  kind: str                # of steps: a key of SIZES
  size: int

class Line(NamedTuple):
  kernel: Kernel               # its source as a digest
  costs: dict[str, Cost|str]   # of each architecture; a str: why there is none
  orders: dict[str, str]       # of each, where they are asked for

# ---- sources ----

def recorded(runner:Runner, kind:str, size:int) -> Iterator[tuple[str, list[UOp]]]:
  """(name, launches) of the steps of a kind and size"""
  if kind == "decode":
    batch = runner.batch_of(size)
    yield f"decode {size}", batch.record(compiled=False).calls
    if size not in DRAWN: return
    batch.features = Features(*[True] * len(vars(Features())))
    yield f"drawn {size}", batch.record(compiled=False).calls
  elif size in runner.sizes:
    for shared in (False, True)[:1 + runner.shares]:
      yield f"{'shared ' * shared}prefill {size}", runner.record_chunk(size, shared, compiled=False).calls
    if size != runner.sizes[0]: return
    replay = Replay(compiled=False)
    runner.model.logits(runner.chunk_step(size), runner.ids[size], replay.run)
    yield f"logits {size}", replay.calls

def kernels(task:Task) -> Iterator[Kernel]:
  """Those of a model with one block of each kind, each source once"""
  f, kinds, seen = bench.stand_in(task.model, task.quant), dict[tuple, int](), set[bytes|str]()
  for i in range(Config.from_gguf(f).n_blocks): kinds.setdefault(tuple((name, t.shape, t.type) for name, t in bench.of_block(f, i).items()), i)
  with mock.patch.dict(bench.LANGUAGES, CUDA=(bench.CUDARenderer, task.archs[0])), bench.no_device("CUDA"):
    model = Transformer.from_gguf(bench.with_blocks(f, list(kinds.values())), 4096)
    model.batch_invariant = task.invariant
    runner = Runner(model)
    for step, calls in recorded(runner, task.kind, task.size):
      new = {call.src[0].key: call for call in calls if call.src[0].key not in seen}
      seen |= new.keys()
      for program in (call.src[0] for call in compile_linear(UOp(Ops.LINEAR, src=tuple(new.values()))).src):
        if program.op is not Ops.PROGRAM: continue
        source = next(u.arg for u in program.src if u.op is Ops.SOURCE)
        if source in seen: continue
        seen.add(source)
        yield Kernel(step, ansistrip(program.arg.name), math.prod(program.arg.local_size or (1,)), bench.shared_bytes(program), source)

# ---- binaries ----

def cost(binary:bytes) -> Cost:
  """What a cubin with one kernel says of itself"""
  info = next(section.content for section in elf_loader(binary[binary.index(b"\x7fELF"):])[1] if section.name == ".nv.info")
  at, found = 0, {}
  while at < len(info):
    form, attribute, size = struct.unpack_from("<BBH", info, at)
    if attribute in (FRAME_SIZE, REGCOUNT): found[attribute] = struct.unpack_from("<II", info, at + 4)[1]   # behind the kernel's number
    at += 4 + (size if form == 4 else 0)
  return Cost(found[REGCOUNT], found[FRAME_SIZE])

@functools.cache
def nvdisasm() -> str:
  if (found := of_pip("nvidia-cuda-nvdisasm", "nvdisasm") or shutil.which("nvdisasm")) is None:
    sys.exit("no nvdisasm; pip install nvidia-cuda-nvdisasm")
  return str(found)

def disassembled(cubin:str|Path) -> str: return subprocess.run([nvdisasm(), "-c", cubin], capture_output=True, text=True, check=True).stdout

def order(binary:bytes) -> str:
  with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(binary[binary.index(b"\x7fELF"):])
    file.flush()
    text = disassembled(file.name)
  marks = (MARKS.get(name) for name in re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)", text, re.M))
  return " ".join(f"{mark}{count if count > 1 else ''}" for mark, same in itertools.groupby(filter(None, marks)) for count in [len([*same])])

def compiled(task:Task) -> list[Line]:
  lines, compilers = [], [NVRTCCompiler(arch, ptx=False, cache_key="cubin") for arch in task.archs]
  for kernel in kernels(task):
    costs: dict[str, Cost|str] = {}
    orders: dict[str, str] = {}
    for arch, compiler in zip(task.archs, compilers):
      try: costs[arch] = cost(binary := compiler.compile_cached(kernel.source))
      except CompileError as e: costs[arch] = str(e)
      else: orders |= {arch: order(binary)} if task.order else {}
    lines.append(Line(kernel._replace(source=hashlib.sha256(kernel.source.encode()).hexdigest()), costs, orders))
    print(end=".", file=sys.stderr, flush=True)
  return lines

def wrong(kernel:Kernel, arch:str, found:Cost|str, invariant:bool) -> str|None:
  """What an architecture cannot do, or should not"""
  if isinstance(found, str): return found
  spills = (SPILLS if int(arch.removeprefix("sm_")) < 90 else HOPPER_SPILLS) | (INVARIANT_SPILLS if invariant else {})
  granted = max((size for name, size in spills.items() if kernel.name.startswith(name)), default=0)
  if found.local > granted: return f"{found.local} bytes of local memory"
  if (asked := -(-found.registers // 8) * 8 * kernel.threads) > REGISTERS: return f"{asked} registers of {REGISTERS}"
  if kernel.shared > ARCHS[arch] * 1024: return f"{kernel.shared} bytes of shared memory of {ARCHS[arch] * 1024}"
  return None

# ---- the table ----

def shown(found:Cost|str) -> str:
  if isinstance(found, str): return "-"
  return f"{found.registers}+{found.local}" if found.local else str(found.registers)

def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("--models", default="glm,ds2lite,youtu,kimi")
  p.add_argument("--quant", default="Q4_0")
  p.add_argument("--archs", default=",".join(ARCHS))
  p.add_argument("--steps", default="decode,prefill")
  p.add_argument("--processes", type=int, default=os.cpu_count())
  p.add_argument("--batch-invariant", action="store_true")
  p.add_argument("--order", action="store_true")
  args = p.parse_args()
  if args.order: nvdisasm()
  rows: dict = {}
  for arch in args.archs.split(","): rows.setdefault(of_arch(arch), []).append(arch)
  tables = [(model, args.quant, tuple(archs), args.order, args.batch_invariant) for model in args.models.split(",") for archs in rows.values()]
  parts = [(kind, size) for kind in args.steps.split(",") for size in SIZES[kind]]
  result = {arch: {"kernels": 0, "most_registers": 0, "most_shared": 0, "local": 0} for arch in args.archs.split(",")}
  failures = 0
  # a process each: what tinygrad keeps of one architecture is not for another
  with multiprocessing.get_context("spawn").Pool(args.processes, maxtasksperchild=1) as pool:
    longest_first = sorted(parts, key=lambda part: -part[1])
    running = {(table, part): pool.apply_async(compiled, [Task(*table, *part)]) for table in tables for part in longest_first}
    for table in tables:
      model, quant, archs, *_ = table
      print(f"\n{model} {quant}\n{'step':12s} {'kernel':80s} threads  shared  " + " ".join(f"{arch:>8s}" for arch in archs))
      seen = set[str]()
      for kernel, costs, orders in (line for part in parts for line in running[table, part].get()):
        if kernel.source in seen: continue
        seen.add(kernel.source)
        print(f"{kernel.step:12s} {kernel.name:80s} {kernel.threads:7d} {kernel.shared:7d}  " + " ".join(f"{shown(c):>8s}" for c in costs.values()))
        for arch, way in orders.items(): print(f"  {arch} {way}")
        for arch, found in costs.items():
          of, (registers, local) = result[arch], (0, 0) if isinstance(found, str) else found
          of["kernels"] += 1
          of["most_registers"] = max(of["most_registers"], registers)
          of["most_shared"] = max(of["most_shared"], kernel.shared)
          of["local"] += local > 0
          if why := wrong(kernel, arch, found, args.batch_invariant):
            failures += 1
            print(f"WRONG {arch} {kernel.name}: {why}")
      sys.stdout.flush()
  print(json.dumps({"models": args.models.split(","), "quant": args.quant, "wrong": failures, "archs": result}))
  sys.exit(failures > 0)

if __name__ == "__main__": main()

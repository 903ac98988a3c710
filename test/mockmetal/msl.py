"""MSL source -> a shared object for this machine, by clang with the metal_stdlib beside this file. Cached by the hash of all that goes into it."""
from __future__ import annotations
import ctypes, functools, hashlib, os, pathlib, platform, re, shutil, subprocess, tempfile
from dataclasses import dataclass
from typing import Callable
from linker import link
from tinygrad.helpers import cache_dir

HERE = pathlib.Path(__file__).parent
CXX, STD = "clang++", "-std=c++14"  # what MSL is, up to 3.2
MAX_BUFFERS, MAX_THREADGROUP_BYTES, MAX_THREADS = 31, 32768, 1024

class MSLError(Exception): pass

# ---- a kernel's signature ----

@dataclass(frozen=True)
class Param:
  type: str
  name: str
  attribute: str
  index: int        # the buffer's slot, or -1 for a position in the grid

@dataclass(frozen=True)
class Kernel:
  name: str
  params: tuple[Param, ...]
  max_threads: int
  def buffers(self) -> list[Param]: return [p for p in self.params if p.index >= 0]

POSITIONS = {  # attribute -> what holds it: three numbers of the thread's position, or an expression
  "threadgroup_position_in_grid": "p->gid", "thread_position_in_threadgroup": "p->lid", "threads_per_threadgroup": "p->tg",
  "threadgroups_per_grid": "p->grid",
  "thread_position_in_grid": "(const uint[3]){p->gid[0]*p->tg[0]+p->lid[0], p->gid[1]*p->tg[1]+p->lid[1], p->gid[2]*p->tg[2]+p->lid[2]}",
  "thread_index_in_threadgroup": "mtl_thread", "thread_index_in_simdgroup": "mtl_thread%32", "simdgroup_index_in_threadgroup": "mtl_thread/32",
  "simdgroups_per_threadgroup": "(p->tg[0]*p->tg[1]*p->tg[2]+31)/32", "threads_per_simdgroup": "32"}

def strip_comments(src:str) -> str: return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: " " + "\n" * m.group().count("\n"), src, flags=re.S)

def _arguments(s:str) -> list[str]:
  """The text up to the parenthesis that closes, cut at the commas outside of all brackets"""
  parts, depth = [""], 0
  for c in s:
    depth += (c in "([{<") - (c in ")]}>")
    if depth < 0: return [p for p in parts if p.strip()]
    if c == "," and depth == 0: parts.append("")
    else: parts[-1] += c
  raise MSLError("a kernel's parameters have no end")

_MOST = r"(?:\[\[max_total_threads_per_threadgroup\((\d+)\)\]\]\s*)?"
def parse(src:str) -> list[Kernel]:
  """The kernels of a source. Raises MSLError for what is no MSL."""
  found, src = [], strip_comments(src)
  for m in re.finditer(rf"{_MOST}\bkernel\s+{_MOST}void\s+(\w+)\s*\(", src):
    params, taken, name = [], -1, m[3]
    for text in _arguments(src[m.end():]):
      a = re.fullmatch(r"\s*(.*?)\s*\b(\w+)\s*(?:\[\[\s*(.*?)\s*\]\]\s*)?", text, re.S)
      if a is None: raise MSLError(f"kernel {name}: cannot read the parameter{text}")
      kind, attribute, index = " ".join(a[1].split()), a[3] or "", -1
      if not attribute or attribute.startswith("buffer("):
        index = taken = int(attribute[7:-1]) if attribute else taken + 1
        if not re.search(r"\b(device|constant)\b", kind): raise MSLError(f"kernel {name}: buffer parameter '{a[2]}' must be device or constant")
        if index >= MAX_BUFFERS: raise MSLError(f"kernel {name}: buffer index {index}, the last one is {MAX_BUFFERS - 1}")
      elif attribute not in POSITIONS: raise MSLError(f"kernel {name}: the mock has no attribute [[{attribute}]]")
      params.append(Param(kind, a[2], attribute, index))
    found.append(Kernel(name, tuple(params), int(m[1] or m[2] or MAX_THREADS)))
  if not found: raise MSLError("error: no kernel in the source")
  return found

# ---- to C++ ----

_ATTRIBUTE = r"(?:__attribute__\s*\(\([^;]*?\)\)|alignas\([^)]*\))"
_SHARED = re.compile(rf"(?<=[;{{}}])(\s*)(threadgroup\s+(?:{_ATTRIBUTE}\s*)*[\w:<>]+(?:\s*{_ATTRIBUTE})?(?:\s+\w+\s*(?:\[[^\]]*\]\s*)*,?)+;)")
_ENTRY = '#line 1 "entry"'

def to_cpp(src:str, kernels:list[Kernel]) -> str:
  """Threadgroup variables get storage of their own, in a section a kernel; each kernel an entry that fetches its arguments."""
  body = strip_comments(src)
  starts = [(m.start(), m[1]) for m in re.finditer(r"\bkernel\b[^;{]*?\bvoid\s+(\w+)\s*\(", body)]
  def owner(at:int) -> str: return next((name for start, name in reversed(starts) if start <= at), "none")
  body = _SHARED.sub(lambda m: f"{m[1]}MTL_SHARED({owner(m.start())}) {m[2]}", body)
  out = ['#line 1 "kernel.metal"', re.sub(r"\[\[[^\]]*\]\]", "", body), _ENTRY]
  for k in kernels:
    args = []
    for p in k.params:
      if p.index < 0: args.append(f"mtl_as<{p.type}>({e})" if (e := POSITIONS[p.attribute]).startswith(("p->", "(const")) else e)
      else: args.append(f"*({p.type[:-1]}*)b[{p.index}]" if p.type.endswith("&") else f"({p.type})b[{p.index}]")
    out += [f'extern "C" __attribute__((weak, visibility("hidden"))) char __start_tg_{k.name}, __stop_tg_{k.name};',
            f'extern "C" void mtl_shared_{k.name}(char** r) {{ r[0] = &__start_tg_{k.name}; r[1] = &__stop_tg_{k.name}; }}',
            f'extern "C" void mtl_body_{k.name}(void** b, const mtl_position* p) {{ {k.name}({", ".join(args)}); }}']
  return "\n".join(out) + "\n"

# ---- compiling ----

@functools.cache
def flags() -> list[str]:
  macros = subprocess.run([CXX, "-dM", "-E", "-x", "c", "/dev/null"], capture_output=True, text=True, check=True).stdout
  old = int(macros.split("__clang_major__ ")[1].split()[0]) < 16
  rounding = ["-fnative-half-type", "-fallow-half-arguments-and-returns"] if old else ["-ffloat16-excess-precision=none"]
  march = ["-march=x86-64-v3"] if platform.machine() in ("x86_64", "AMD64") else []  # converts halves without a library; any machine of ten years
  return ["-nostdinc", "-nostdinc++", "-fno-exceptions", "-fno-rtti", "-fno-stack-protector", "-ffp-contract=off", "-fno-math-errno",
          "-fno-strict-aliasing", "-O1", "-fPIC", *march, "-Wno-everything", "-Werror=return-type", "-Werror=vla", "-Werror=c++17-extensions",
          "-fno-caret-diagnostics", *(f for r in rounding for f in ("-Xclang", r))]
CHECKED = ["-fsanitize=thread", "-g1", *(f for option in ("func-entry-exit", "atomics") for f in ("-mllvm", f"-tsan-instrument-{option}=0"))]

@functools.cache
def home() -> pathlib.Path:
  """The cache of this version of the mock"""
  everything = b"".join(f.read_bytes() for f in (HERE.parent / "fiber.h", *sorted(HERE.iterdir())) if f.is_file()) + repr(flags()).encode()
  folder = pathlib.Path(cache_dir) / "mockmetal" / hashlib.sha256(everything).hexdigest()[:16]
  folder.mkdir(parents=True, exist_ok=True)
  return folder

def header() -> pathlib.Path:
  """A copy beside what is compiled from it: clang wants the very file again, and another clone's is another"""
  return publish(home() / "metal_stdlib", lambda to: shutil.copyfile(HERE / "metal_stdlib", to))

def publish(path:pathlib.Path, make:Callable[[str], object]) -> pathlib.Path:
  """Makes a file under another name and moves it into place: processes side by side never see half of it."""
  if path.exists(): return path
  with tempfile.TemporaryDirectory(dir=path.parent) as folder:
    make(new := os.path.join(folder, "new"))
    os.replace(new, path)
  return path

def compile_msl(src:str, checked:bool=False) -> pathlib.Path:
  """The shared object of a source; `checked`: its loads and stores report to runtime.cpp. Raises MSLError with clang's message."""
  def build(out:str) -> None:
    if m := re.search(r"\bdouble\b", strip_comments(src)):
      raise MSLError(f"kernel.metal:{src[:m.start()].count(chr(10)) + 1}: error: 'double' is not supported in Metal")
    cpp, extra = to_cpp(src, parse(src)), CHECKED if checked else []
    def precompile(to:str) -> None: subprocess.run([CXX, "-x", "c++-header", *flags(), *extra, STD, header(), "-o", to], check=True)
    compiled = publish(home() / f"{'checked' if checked else 'plain'}.pch", precompile)
    checking = None if checked else address_spaces(cpp)  # while clang works; a checked object was compiled before as it is
    text = cpp.replace("#include <metal_stdlib>", "")
    run = subprocess.run([CXX, "-x", "c++", *flags(), *extra, STD, "-include-pch", compiled, "-c", "-o", f"{out}.o", "-"],
                         input=text, capture_output=True, text=True)
    wrong = run.stderr if run.returncode else link([f"{out}.o"], out, [CXX, "-nostdlib"])
    if errors := wrong or (checking() if checking else ""): raise MSLError(errors)
  return publish(home() / f"{hashlib.sha256(f'{checked}{src}'.encode()).hexdigest()[:32]}.so", build)

_POINTER = re.compile(r"([^,(;{}<>=&|]*)\b((?:half|float|bfloat|u?int|u?short|u?char|u?long|u?int(?:8|16|32|64)_t)[234]?|bool)\b"
                      r"((?:\s+(?:const|volatile|device|constant|threadgroup|thread))*)\s*[*&](?!&)")
def address_spaces(cpp:str) -> Callable[[], str]:
  """Starts to check types with device, constant, threadgroup and thread as different address spaces; the result gives the errors"""
  # clang takes a pointer without one for a thread pointer, and casts to it without a word; MSL rejects both
  user = re.sub(_ATTRIBUTE, "", cpp[:cpp.index(_ENTRY)])
  for m in _POINTER.finditer(user):
    if not re.search(r"\b(device|constant|threadgroup|thread)\b", m[1] + m[3]):
      where = f"kernel.metal:{user[:m.end()].count(chr(10))}"
      return lambda: f"{where}: error: pointer or reference to {m[2]} must have an explicit address space qualifier"
  if "bfloat" in user: return lambda: ""  # a class here, and C++ has no members of objects in other address spaces
  p = subprocess.Popen([CXX, "-x", "c++", *flags(), STD, f"-I{HERE}", "-DMOCK_ADDRESS_SPACES", "-fsyntax-only", "-"],
                       stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  assert p.stdin is not None and p.stderr is not None
  p.stdin.write(cpp)
  p.stdin.close()
  def result() -> str:
    errors = p.stderr.read()
    return errors if p.wait() and "'this' object is in address space" not in errors else ""
  return result

@functools.cache
def runtime() -> ctypes.CDLL:
  def build(out:str) -> None:
    subprocess.run([CXX, "-std=c++17", "-O2", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", HERE / "runtime.cpp", "-o", out], check=True)
  lib = ctypes.CDLL(str(publish(home() / "runtime.so", build)), mode=ctypes.RTLD_GLOBAL)  # kernels find it by its names
  lib.mtl_run.restype = ctypes.c_char_p
  return lib

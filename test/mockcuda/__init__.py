"""A CUDA device without a GPU: the sources that tinygrad renders for CUDA, compiled as C++ by clang and run with fibers for threads.

For checking what kernels compute, on any machine. It shows wrong results, reads of shared memory that nobody wrote (NaN), accesses past a buffer's
end, threads that part before a barrier or a shuffle, and copies that nobody waited for. It does not show races, nor anything about speed.
  `with on_cuda(): …` makes it the default device; tensors of the CPU device stay there. `on_cuda("sm_75")` offers what that architecture has.
"""
from __future__ import annotations
import contextlib, ctypes, functools, hashlib, mmap, pathlib, platform, re, subprocess, sys, tempfile, types
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Iterator
from linker import link
from tinygrad.device import Allocator, BufferSpec, Compiled, Compiler, CompileError, Program, TinyELF
from tinygrad.helpers import Context, Target, getenv, round_up
from tinygrad.nn.intrinsics import TARGETS, of_arch
from tinygrad.renderer.cstyle import CStyleLanguage, CUDARenderer
from tinygrad.runtime.support.compiler_cuda import aligned_for_groups, with_halves_known

HERE = pathlib.Path(__file__).parent
ARCH = "sm_86"

@functools.cache
def _clang() -> tuple[str, ...]:
  cc = getenv("CC", "clang")
  macros = subprocess.run([cc, "-dM", "-E", "-x", "c", "/dev/null"], capture_output=True, text=True, check=True).stdout
  version = int(macros.split("__clang_major__ ")[1].split()[0])
  march = ("-march=x86-64-v3",) if platform.machine() in ("x86_64", "AMD64") else ()  # converts halves without a library
  return (cc, *march, *(("-Xclang", "-fnative-half-type", "-Xclang", "-fallow-half-arguments-and-returns") if version < 16 else ()))

def _compile(*args: str | pathlib.Path) -> str:
  """What clang complains about; empty where there is an object"""
  flags = "-O1", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-std=c++17", "-Wno-everything", f"-I{HERE}"
  run = subprocess.run([*_clang(), *flags, *args], capture_output=True, text=True)
  return run.stderr if run.returncode else ""

@functools.cache
def _runtime() -> tuple[pathlib.Path, tempfile.TemporaryDirectory]:
  """Compiled once a process; the folder is there as long as somebody holds it"""
  folder = tempfile.TemporaryDirectory()
  out = pathlib.Path(folder.name) / "runtime.o"
  if wrong := _compile("-c", HERE / "runtime.cpp", "-o", out): raise CompileError(wrong)
  return out, folder

class MockCompiler(Compiler):
  """Source -> a shared object that holds the kernel and the runtime. cachekey: what was recorded for another architecture is not of this; a source's
  binary is, and is kept under of_sources"""
  arch = ARCH   # of all mocks of now
  @property
  def cachekey(self) -> str | None: return self.of_sources and f"{self.of_sources}_{self.arch}"
  @cachekey.setter
  def cachekey(self, key: str | None) -> None: self.of_sources = key
  def compile_cached(self, src: str) -> bytes:
    compiler = Compiler()
    compiler.cachekey, compiler.compile = self.of_sources, self.compile
    return compiler.compile_cached(src)
  def __init__(self) -> None:
    files = HERE.parent / "fiber.h", *sorted(HERE.glob("*.*"))
    super().__init__("mockcuda_" + hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16])
  @staticmethod
  def operands(text: str) -> str:
    """Those of an asm statement, as arguments"""
    return re.sub(r'"[+=]?[flr]"', "", text).replace(" : ", ", ")
  def compile(self, src: str) -> bytes:
    src = re.sub(r'asm volatile\("griddepcontrol[^)]*\);', "", src)  # kernels run one after another here
    src = re.sub(r'asm volatile\("prefetch.*', "", src)              # and there is no cache
    src = re.sub(r'(__WMMA_8_16_(8|16)_half_float\([^)]*\)\{).*?return c;', r"\1 return mock_mma<\2>(a, b, c);", src, flags=re.S)
    src = re.sub(r'asm\("mma\.sync\.aligned\.m16n8k(8|16)\.[^"]*" : ([^;]*)\);', lambda m: f"mock_mma_words<{m[1]}>({self.operands(m[2])});", src)
    src = re.sub(r'asm\("\{ \.reg \.pred inside; [^"]*@inside mma\.sync\.aligned\.m16n8k16\.[^"]*" : ([^;]*), "r"\(([^;]*)\)\);',
                 lambda m: f"if ({m[2]}) mock_mma_words<16>({self.operands(m[1])});", src)
    src = re.sub(r"const unsigned long long ([ab]) = (0x\w+ull) \| \(unsigned\)__cvta_generic_to_shared\((.*?)\) >> 4;",
                 r"const GroupMatrix \1 = {(const char*)(\3), \2};", aligned_for_groups(with_halves_known(src)))
    src = re.sub(r'asm volatile\("wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.f16\.f16 [^"]*, ([01]);" : ([^;]*)\);',
                 lambda m: f"mock_group_mma<{m[1]}>({self.operands(m[2])});", src)
    src = re.sub(r'asm volatile\("wgmma\.wait_group[^;]*;[^;]*\);', "mock_group_wait();", src)
    src = re.sub(r'asm volatile\("(wgmma\.(fence|commit)|fence\.proxy)[^;]*;[^;]*\);', "", src)
    src = src.replace("(unsigned)__cvta_generic_to_shared", "")
    src = re.sub(r'asm volatile\("cp\.async\.cg[^"]*" : : ([^;]*) : "memory"\);', lambda m: f"mock_copy({self.operands(m[1])});", src)
    src = re.sub(r'asm volatile\("cp\.async\.wait_all.*?\);', "mock_copied(-1);", src)
    src = re.sub(r'asm volatile\("cp\.async\.wait_group (\d).*?\);', r"mock_copied(\1);", src)
    src = re.sub(r'asm volatile\("st\.relaxed\.sys[^"]*" : : ([^;]*) : "memory"\);', lambda m: f"mock_send({self.operands(m[1])});", src)
    src = re.sub(r'asm volatile\("ld\.relaxed\.sys[^"]*" : ([^;]*) : "memory"\);', lambda m: f"mock_look({self.operands(m[1])});", src)
    src = re.sub(r'asm volatile\("st\.release\.sys[^"]*" : : ([^;]*) : "memory"\);', lambda m: f"mock_tell({self.operands(m[1])});", src)
    src = re.sub(r'asm volatile\("ld\.acquire\.sys[^"]*" : ([^;]*) : "memory"\);', lambda m: f"mock_hear({self.operands(m[1])});", src)
    src = re.sub(r'asm volatile\("cp\.async\.commit_group.*?\);', "mock_group();", src)
    src = re.sub(r'asm volatile\("ldmatrix\.sync\.aligned\.m8n8\.x4\.(trans)?[^"]*" : ([^;]*)\);',
                 lambda m: f"mock_ldmatrix<{int(m[1] is not None)}>({self.operands(m[2])});", src)
    src = re.sub(r'asm volatile\("atom\.acq_rel\.gpu\.global\.inc[^"]*" : "=r"\(old\) : "l"\(count\), "r"\((\d+u)\) : "memory"\);',
                 r"old = mock_count(count, \1);", src)
    for instruction, text in (("ex2", "exp2(x)"), ("rcp", "1 / x"), ("rsqrt", "1 / sqrt(x)")):
      src = re.sub(rf'asm\("{instruction}\.approx[^;]*;[^;]*;', f"y = {text};", src)
    src = re.sub(r'asm\("lop3\.b32 [^"]* 0xea;"[^;]*;', "d = a & b | c;", src)
    src = re.sub(r'asm\("dp4a\.u32\.s32[^;]*;[^;]*;', "d = mock_dp4a(a, b, c);", src)
    with tempfile.TemporaryDirectory() as folder:
      kernel, out = pathlib.Path(folder) / "kernel.cpp", pathlib.Path(folder) / "kernel.so"
      # else its threads may run one after another
      waits = any(word in src for word in ("__syncthreads", "__shfl", "__reduce", "__ballot", "mock_mma", "mock_ldmatrix", "mock_group_mma"))
      meets = "mock_look" in src or "mock_hear" in src
      halves = '#include "cuda_fp16.h"\n' if "mock_mma_words" in src else ""   # a card multiplies words of halves without it
      kernel.write_text(f'#include "device.h"\n{halves}extern "C" {{ int mock_fibers = {int(waits) + MEETS * meets}; }}\n{src}')
      compiled = kernel.with_suffix(".o")
      wrong = _compile("-c", kernel, "-o", compiled) or link([compiled, _runtime()[0], "-lm"], out, _clang())
      if wrong: raise CompileError(f"{wrong}\n{src}")
      return out.read_bytes()

class MockRenderer(CUDARenderer):
  def __init__(self, target: Target):
    CStyleLanguage.__init__(self, target)
    self.compiler, self.tensor_cores = MockCompiler(), []

MEETS = 2   # of a kernel's mock_fibers: it waits for what runs on other devices

class MockProgram(Program):
  def __init__(self, dev: Compiled, obj: TinyELF):
    with tempfile.NamedTemporaryFile(suffix=".so") as f:
      f.write(obj.lib)
      f.flush()
      lib = ctypes.CDLL(f.name)
    self.name, self.launch, self.kernel = obj.name, lib.mock_launch, ctypes.cast(getattr(lib, obj.name), ctypes.c_void_p)
    self.launch.restype = ctypes.c_char_p
    self.fibers, self.dev = ctypes.c_int.in_dll(lib, "mock_fibers").value, dev
  def __call__(self, *bufs: int, global_size=(1, 1, 1), local_size=(1, 1, 1), vals: tuple[int, ...] = (), wait=False, **kw: Any) -> float | None:
    args = (ctypes.c_uint64 * max(len(bufs) + len(vals), 1))(*bufs, *(v & 0xffffffffffffffff for v in vals))
    def run() -> None:
      wrong = self.launch(self.kernel, args, len(bufs) + len(vals), (ctypes.c_int * 3)(*global_size), (ctypes.c_int * 3)(*local_size), self.fibers)
      if wrong is not None: raise RuntimeError(f"{self.name}: {wrong.decode()}")
    self.dev.launch(run, bool(self.fibers & MEETS))
    return 1e-3 if wait else None

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes, _libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

class MockAllocator(Allocator):
  """A buffer ends where a page begins that nobody may touch."""
  def __init__(self, dev: Compiled):
    super().__init__(dev)
    self.maps: dict[int, tuple[int, int]] = {}
  def _alloc(self, size: int, options: BufferSpec) -> int:
    room = round_up(size, mmap.PAGESIZE)
    base = _libc.mmap(None, room + mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if base in (None, ctypes.c_void_p(-1).value): raise MemoryError(size)
    _libc.mprotect(base + room, mmap.PAGESIZE, 0)
    at = base + room - round_up(size, 16)
    ctypes.memset(at, 0xff, size)  # nobody may count on zeros
    self.maps[at] = base, room + mmap.PAGESIZE
    return at
  def _free(self, opaque: int, options: BufferSpec) -> None:
    self.dev.synchronize()
    _libc.munmap(*self.maps.pop(opaque))
  def _copyin(self, dest: int, src: memoryview) -> None:
    self.dev.synchronize()
    ctypes.memmove(dest, bytes(src), src.nbytes)
  def _copyout(self, dest: memoryview, src: int) -> None:
    self.dev.synchronize()
    dest.cast("B")[:] = ctypes.string_at(src, dest.nbytes)
  def reaches(self, other: MockAllocator) -> bool: return True
  def address(self, opaque: int) -> int: return opaque
  def _offset(self, buf: int, size: int, offset: int) -> int: return buf + offset

class MockCUDADevice(Compiled):
  """Launches are done when they return, but for those that wait for another device's, and what comes behind them: a thread runs these"""
  def __init__(self, device: str):
    super().__init__(device, MockAllocator(self), [MockRenderer], MockProgram, arch=ARCH)
    self.thread, self.pending = ThreadPoolExecutor(1), list[Future]()
  def launch(self, run: Callable[[], None], meets: bool) -> None:
    if meets or self.pending: self.pending.append(self.thread.submit(run))
    else: run()
  def synchronize(self) -> None:
    pending, self.pending = self.pending, []
    for launched in pending: launched.result()

@contextlib.contextmanager
def on_cuda(arch: str | None = None) -> Iterator[None]:
  # a name of its own: a real CUDA device, or the search for one, may have been met before in this process
  module = types.ModuleType("tinygrad.runtime.ops_mockcuda")
  module.MockCUDADevice = MockCUDADevice  # type: ignore[attr-defined]
  sys.modules[module.__name__], before = module, (MockCompiler.arch, TARGETS.get("MOCKCUDA"))
  MockCompiler.arch, TARGETS["MOCKCUDA"] = arch or ARCH, TARGETS["CUDA"] if arch is None else of_arch(arch)
  try:
    with Context(DEV="MOCKCUDA", PARALLEL=0): yield  # a spawned worker would not know the device
  finally:
    MockCompiler.arch = before[0]
    if before[1] is not None: TARGETS["MOCKCUDA"] = before[1]

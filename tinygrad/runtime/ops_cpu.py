"""Wraps the wheel's CPU device.

A captured batch of kernels runs by one call, on all cores (runtime/graph/cpu.py). What CC names compiles if it is a clang, else clang, else pip's
ziglang. A forked process has its own copy of the buffers. Large buffers lie in huge pages. The kernels themselves are nn/cpu.py's and what tinygrad
renders.
"""
from __future__ import annotations
import contextlib, importlib.util, mmap, os, pathlib, shutil, subprocess, sys
from dataclasses import replace
from tinygrad import wheel_module
from tinygrad.device import BufferSpec
from tinygrad.engine import worker as compile_workers
from tinygrad.engine.realize import capturing
from tinygrad.helpers import WIN, getenv, mv_address
from tinygrad.runtime.support.hcq import HCQBuffer

_wheel = wheel_module(__name__)
CPUProgram, CPUWorker = _wheel.CPUProgram, _wheel.CPUWorker

def _is_another(compiler:str) -> bool:
  """Whether a C compiler is another than clang. Who opens the device says where there is none of that name"""
  if "clang" in os.path.basename(compiler) or shutil.which(compiler) is None: return False
  return "__clang__" not in subprocess.run([compiler, "-dM", "-E", "-x", "c", os.devnull], capture_output=True, text=True).stdout

def _find_compiler() -> None:
  """Takes away a CC that is not clang: shells and build tools have it for programs of other kinds. Sets it to pip's ziglang where there is no clang.
  The processes that compile inherit the environment"""
  if WIN: return
  if (own := os.environ.get("CC")) is not None:
    if not _is_another(own): return
    del os.environ["CC"]
    getenv.cache_clear()
    print(f"CC={own} is not clang, which kernels for the CPU are written for: it is not used", file=sys.stderr)
  if shutil.which("clang") or (spec := importlib.util.find_spec("ziglang")) is None: return
  os.environ["ZIGLANG"] = os.path.dirname(str(spec.origin))
  os.environ["CC"] = str(pathlib.Path(__file__).with_name("support") / "zigclang")
  getenv.cache_clear()  # the compiler reads CC by it, someone may have before
  print("no clang: compiling with pip's ziglang", file=sys.stderr)

HUGE = 1 << 21  # bytes of a page

class CPUAllocator(_wheel.CPUAllocator):
  def _alloc(self, size:int, options:BufferSpec) -> HCQBuffer:
    """A buffer of `size` bytes in private memory, of which a fork has its own copy (the wheel's is shared by both processes). A large buffer lies in
    huge pages where the system has them. Raises MemoryError, as every other device does, for what the system has no room for"""
    if WIN or options.external_ptr is not None: return super()._alloc(size, options)
    try: memory = mmap.mmap(-1, size, mmap.MAP_ANON | mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as e: raise MemoryError(e.strerror) from None
    if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
      with contextlib.suppress(OSError): memory.madvise(mmap.MADV_HUGEPAGE)  # a system built without them keeps small pages
    buffer = super()._alloc(size, replace(options, external_ptr=mv_address(memory)))
    buffer.meta = memory
    return buffer
_wheel.CPUAllocator = CPUAllocator  # the wheel's CPUDevice makes one

class CPUDevice(_wheel.CPUDevice):
  def __init__(self, device:str=""):
    _find_compiler()
    super().__init__(device)
    if not WIN:  # its threads sleep on POSIX semaphores
      from tinygrad.runtime.graph.cpu import CPUGraph
      self.graph = CPUGraph
  def synchronize(self, timeout:int|None=None) -> None:
    """The wheel looks at a clock in shared memory, for what its queue's threads do; where there are none yet all calls have run when they return"""
    if self.workers: super().synchronize(timeout)

def _in_child() -> None:
  compile_workers.worker_pool = None  # the parent's: nobody answers the child
  capturing.clear()                   # what another thread captured: the child does not have that thread
if not WIN: os.register_at_fork(after_in_child=_in_child)

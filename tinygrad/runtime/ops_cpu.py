"""Wraps the wheel's CPU device: a captured batch of kernels runs by one call, on all cores (runtime/graph/cpu.py); pip's ziglang compiles where
there is no clang; a forked process goes on with memory of its own, and large buffers lie in huge pages."""
from __future__ import annotations
import contextlib, importlib.util, mmap, os, pathlib, shutil, sys
from dataclasses import replace
from tinygrad import wheel_module
from tinygrad.device import BufferSpec
from tinygrad.engine import worker as compile_workers
from tinygrad.engine.realize import capturing
from tinygrad.helpers import WIN, getenv, mv_address
from tinygrad.runtime.support.hcq import HCQBuffer

_wheel = wheel_module(__name__)
for _name in ("CPUProgram", "CPUWorker"): globals()[_name] = getattr(_wheel, _name)

def _find_compiler() -> None:
  """By environment variables: the processes that compile inherit them"""
  if WIN or "CC" in os.environ or shutil.which("clang") or (spec := importlib.util.find_spec("ziglang")) is None: return
  os.environ["ZIGLANG"] = os.path.dirname(str(spec.origin))
  os.environ["CC"] = str(pathlib.Path(__file__).with_name("support") / "zigclang")
  getenv.cache_clear()  # the compiler reads CC by it, someone may have before
  print("no clang: compiling with pip's ziglang", file=sys.stderr)

HUGE = 1 << 21  # bytes of a page

class CPUAllocator(_wheel.CPUAllocator):
  def _alloc(self, size:int, options:BufferSpec) -> HCQBuffer:
    """Private memory, of which a fork has its own copy (the wheel's would be one for both processes); a large buffer takes huge pages where the
    system has them"""
    if WIN or options.external_ptr is not None: return super()._alloc(size, options)
    try: kept = mmap.mmap(-1, size, mmap.MAP_ANON | mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as e: raise MemoryError(e.strerror) from None  # as every other device calls it
    if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
      with contextlib.suppress(OSError): kept.madvise(mmap.MADV_HUGEPAGE)  # a kernel built without them: small pages hold the same
    buffer = super()._alloc(size, replace(options, external_ptr=mv_address(kept)))
    buffer.meta = kept
    return buffer
_wheel.CPUAllocator = CPUAllocator  # its CPUDevice makes one

class CPUDevice(_wheel.CPUDevice):
  def __init__(self, device:str=""):
    _find_compiler()
    super().__init__(device)
    if not WIN:  # its threads sleep on POSIX semaphores
      from tinygrad.runtime.graph.cpu import CPUGraph
      self.graph = CPUGraph

def _in_child() -> None:
  compile_workers.worker_pool = None  # the parent's: in the child nobody would answer
  capturing.clear()                   # of a thread that is not there
if not WIN: os.register_at_fork(after_in_child=_in_child)

"""Wraps the wheel's CPU device: a captured batch of kernels runs by one call, on all cores (runtime/graph/cpu.py); large buffers lie in huge pages;
pip's ziglang compiles where there is no clang."""
import importlib.util, mmap, os, pathlib, shutil, sys
from tinygrad import wheel_module
from tinygrad.device import BufferSpec
from tinygrad.helpers import WIN, getenv, mv_address
from tinygrad.runtime.support.hcq import HCQBuffer, MMIOInterface

_wheel = wheel_module(__name__)
for _name in ("CPUProgram", "CPUWorker"): globals()[_name] = getattr(_wheel, _name)

HUGE = 1 << 21  # bytes of a page

class CPUAllocator(_wheel.CPUAllocator):
  """Where the system has huge pages (Linux), large buffers take them: the wheel's shared mappings get none"""
  def _alloc(self, size:int, options:BufferSpec) -> HCQBuffer:
    if options.external_ptr is not None or size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"): return super()._alloc(size, options)
    memory = mmap.mmap(-1, size, mmap.MAP_ANON | mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    try: memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError: pass  # a kernel built without them: small pages hold the same
    return HCQBuffer(va:=mv_address(memory), size, meta=memory, view=MMIOInterface(va, size, fmt="B"), owner=self.dev)

_wheel.CPUAllocator = CPUAllocator  # its CPUDevice makes one

def _find_compiler() -> None:
  """By environment variables: the processes that compile inherit them"""
  if WIN or "CC" in os.environ or shutil.which("clang") or (spec := importlib.util.find_spec("ziglang")) is None: return
  os.environ["ZIGLANG"] = os.path.dirname(str(spec.origin))
  os.environ["CC"] = str(pathlib.Path(__file__).with_name("support") / "zigclang")
  getenv.cache_clear()  # the compiler reads CC by it, someone may have before
  print("no clang: compiling with pip's ziglang", file=sys.stderr)

class CPUDevice(_wheel.CPUDevice):
  def __init__(self, device:str=""):
    _find_compiler()
    super().__init__(device)
    if not WIN:  # its threads sleep on POSIX semaphores
      from tinygrad.runtime.graph.cpu import CPUGraph
      self.graph = CPUGraph

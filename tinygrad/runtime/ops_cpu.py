"""Wraps the wheel's CPU device: a captured batch of kernels runs by one call, on all cores (runtime/graph/cpu.py); pip's ziglang
compiles where there is no clang."""
import importlib.util, os, pathlib, shutil, sys
from tinygrad import wheel_module
from tinygrad.device import BufferSpec
from tinygrad.helpers import WIN, getenv
from tinygrad.runtime.support.hcq import HCQBuffer

_wheel = wheel_module(__name__)
for _name in ("CPUProgram", "CPUWorker"): globals()[_name] = getattr(_wheel, _name)

class CPUAllocator(_wheel.CPUAllocator):
  def _alloc(self, size:int, options:BufferSpec) -> HCQBuffer:
    try: return super()._alloc(size, options)
    except OSError as e: raise MemoryError(e.strerror) from None  # as every other device calls it

_wheel.CPUAllocator = CPUAllocator

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

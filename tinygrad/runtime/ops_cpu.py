"""Wraps the wheel's CPU device: a captured batch of kernels runs by one call, on all cores (runtime/graph/cpu.py); pip's ziglang
compiles where there is no clang; a forked process goes on with memory and threads of its own."""
from __future__ import annotations
import ctypes, importlib.util, mmap, os, pathlib, shutil, sys, threading
from dataclasses import replace
from tinygrad import wheel_module
from tinygrad.device import BufferSpec
from tinygrad.engine import worker as compile_workers
from tinygrad.engine.realize import capturing
from tinygrad.helpers import OSX, WIN, getenv, mv_address
from tinygrad.runtime.autogen import libc
from tinygrad.runtime.support.hcq import FileIOInterface, HCQBuffer

_wheel = wheel_module(__name__)
for _name in ("CPUProgram", "CPUWorker"): globals()[_name] = getattr(_wheel, _name)
MAP_FIXED = 0x10  # the mmap module lacks it

def _find_compiler() -> None:
  """By environment variables: the processes that compile inherit them"""
  if WIN or "CC" in os.environ or shutil.which("clang") or (spec := importlib.util.find_spec("ziglang")) is None: return
  os.environ["ZIGLANG"] = os.path.dirname(str(spec.origin))
  os.environ["CC"] = str(pathlib.Path(__file__).with_name("support") / "zigclang")
  getenv.cache_clear()  # the compiler reads CC by it, someone may have before
  print("no clang: compiling with pip's ziglang", file=sys.stderr)

class CPUAllocator(_wheel.CPUAllocator):
  def _alloc(self, size:int, options:BufferSpec) -> HCQBuffer:
    """Private memory, of which a fork has its own copy; the wheel's would be one for both processes"""
    if WIN or options.external_ptr is not None: return super()._alloc(size, options)
    kept = mmap.mmap(-1, size, mmap.MAP_ANON | mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    buffer = super()._alloc(size, replace(options, external_ptr=mv_address(kept)))
    buffer.meta = kept
    return buffer
_wheel.CPUAllocator = CPUAllocator

class CPUDevice(_wheel.CPUDevice):
  opened:list[CPUDevice] = []

  def __init__(self, device:str=""):
    _find_compiler()
    super().__init__(device)
    self.opened.append(self)
    if not WIN:  # its threads sleep on POSIX semaphores
      from tinygrad.runtime.graph.cpu import CPUGraph
      self.graph = CPUGraph

  def begin_anew(self) -> None:
    """In a fork: the workers' threads are gone, their semaphores are still the parent's, and what another thread submitted never ends"""
    for worker in self.workers:
      semaphore = worker.sem._buf.va_addr
      FileIOInterface.anon_mmap(semaphore & -mmap.PAGESIZE, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE,
                                MAP_FIXED | mmap.MAP_PRIVATE | mmap.MAP_ANON, 0)  # where compiled code has its address
      libc.sem_init(ctypes.cast(semaphore, ctypes.POINTER(libc.sem_t)), 0, 0)
      for counter in (worker.put, worker.done): counter._buf.cpu_view().view(fmt="Q")[0] = 0
      args = [worker.ring._buf.va_addr, self.func_ptr("sem_wait")._buf.va_addr, worker.done._buf.va_addr, semaphore]
      worker.thread = threading.Thread(target=self.prgs[_wheel.worker_prog].fxn, daemon=True, args=[ctypes.c_uint64(x) for x in args])
      worker.thread.start()
    last = self.signal("value", 1, device="CPU")._buf.cpu_view().view(fmt="Q")[0] - 1
    self.signal("timeline")._buf.cpu_view().view(fmt="Q")[0] = last

def _before_fork() -> None:
  for device in CPUDevice.opened: device.synchronize()  # its threads' work is not half done in the copy
def _in_child() -> None:
  compile_workers.worker_pool = None                    # the parent's: nobody would answer
  capturing.clear()                                     # by a thread that is not here
  for device in CPUDevice.opened: device.begin_anew()
if not WIN and not OSX: os.register_at_fork(before=_before_fork, after_in_child=_in_child)  # a Mac's semaphores are not in memory

"""Wraps the wheel's CPU device: a captured batch of kernels runs by one call, on all cores (runtime/graph/cpu.py)."""
from tinygrad import wheel_module
from tinygrad.helpers import WIN

_wheel = wheel_module(__name__)
for _name in ("CPUProgram", "CPUAllocator", "CPUWorker"): globals()[_name] = getattr(_wheel, _name)

class CPUDevice(_wheel.CPUDevice):
  def __init__(self, device:str=""):
    super().__init__(device)
    if not WIN:  # its threads sleep on POSIX semaphores
      from tinygrad.runtime.graph.cpu import CPUGraph
      self.graph = CPUGraph

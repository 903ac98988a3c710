"""The engine's process with a device that fails when a test says so: a file named by the variable FAULT says how, once it is there.

  broken DEVICE   what it is given raises, and so does what waits for it, as a card does after an illegal access: it stays so
  full ROWS       there is no room for what steps of so many answers, or more, record from here on"""
from __future__ import annotations
import os, sys
from pathlib import Path
from typing import Any
from tinygrad import Device
from tinygrad.apps import capture
from tinygrad.apps.engine import runner
from tinygrad.apps.serve import worker
from tinygrad.runtime.ops_cpu import CPUDevice

FAULT = Path(os.environ["FAULT"])
BROKEN, FULL = "CUDA Error 700, an illegal memory access was encountered", "Allocation of 1.00 GB failed on CPU. Used: 2.00 GB"

def fault(kind: str) -> str|None:
  """What stands behind this word"""
  told, _, rest = (FAULT.read_text() if FAULT.exists() else "").partition(" ")
  return rest if told == kind else None
def check(device: str) -> None:
  if fault("broken") == device: raise RuntimeError(BROKEN)

enqueue, record, synchronize = capture.enqueue, runner.Batch.record, CPUDevice.synchronize
def failing_enqueue(*args: Any) -> None:
  for device in Device._opened_devices: check(device)
  enqueue(*args)
def failing_record(self: runner.Batch, *args: Any) -> Any:
  if self.size >= int(fault("full") or sys.maxsize): raise MemoryError(FULL)
  return record(self, *args)
def failing_synchronize(self: CPUDevice) -> None:
  check(self.device)
  synchronize(self)
capture.enqueue = runner.enqueue = failing_enqueue
runner.Batch.record, CPUDevice.synchronize = failing_record, failing_synchronize   # type: ignore[method-assign]
CPUDevice.finalize = lambda self: None   # type: ignore[method-assign]  # at the process's end a card is not waited for

if __name__ == "__main__": worker.main(int(sys.argv[1]))

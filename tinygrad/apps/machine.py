"""How fast this machine's memory can be read: the ceiling of decoding."""
from __future__ import annotations
import concurrent.futures, ctypes, subprocess, time
import numpy as np
from tinygrad import Device
from tinygrad.helpers import NUM_CPU_THREADS

# GB/s from Apple's technical specifications, by the chip's name
APPLE = {"M1": 68, "M1 Pro": 200, "M1 Max": 400, "M1 Ultra": 800, "M2": 100, "M2 Pro": 200, "M2 Max": 400, "M2 Ultra": 800, "M3": 100, "M3 Pro": 150,
         "M3 Max": 400, "M3 Ultra": 819, "M4": 120, "M4 Pro": 273, "M4 Max": 546}

def _cuda() -> tuple[float, str]:
  from tinygrad.runtime.autogen import cuda
  dev = Device[Device.DEFAULT]
  def attribute(which:int) -> int:
    cuda.cuDeviceGetAttribute(ctypes.byref(value := ctypes.c_int()), which, dev.cu_device)
    return value.value
  clock_khz, bus_bits = attribute(cuda.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE), attribute(cuda.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)
  return clock_khz * 1e3 * 2 * bus_bits / 8, f"memory clock {clock_khz // 1000} MHz x 2 x {bus_bits} bits"

def _metal() -> tuple[float, str]|None:
  chip = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True).stdout.strip().removeprefix("Apple ")
  return (APPLE[chip] * 1e9, f"Apple's figure for {chip}") if chip in APPLE else None

def _measured() -> tuple[float, str]:
  """The best of five plain reads of 512 MB by all threads"""
  threads = max(NUM_CPU_THREADS.value, 1)
  parts = [np.ones(1 << 26 if threads == 1 else (1 << 26) // threads, np.uint64) for _ in range(threads)]
  best = float("inf")
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    for _ in range(6):
      start = time.perf_counter()
      list(pool.map(np.bitwise_or.reduce, parts))
      best = min(best, time.perf_counter() - start)
  return sum(p.nbytes for p in parts) / best, f"measured: a plain read by {threads} threads"

def peak_bandwidth() -> tuple[float, str]|None:
  """(bytes a second, where the figure comes from) of the default device's memory; None where it is not known"""
  kind = Device.DEFAULT.split(":")[0]
  return {"CUDA": _cuda, "METAL": _metal, "CPU": _measured}.get(kind, lambda: None)()

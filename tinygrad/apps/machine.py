"""This machine: how fast its memory can be read, which is the ceiling of decoding; the device's name; the cores that other processes take.

measure.py, bench_block.py and profile_model.py print these figures beside their own.
"""
from __future__ import annotations
import concurrent.futures, ctypes, math, os, platform, subprocess, time
import numpy as np
from tinygrad import Device
from tinygrad.helpers import NUM_CPU_THREADS

# GB/s by the chip's name, from Apple's technical specifications
APPLE = {"M1": 68, "M1 Pro": 200, "M1 Max": 400, "M1 Ultra": 800, "M2": 100, "M2 Pro": 200, "M2 Max": 400, "M2 Ultra": 800, "M3": 100, "M3 Pro": 150,
         "M3 Max": 400, "M3 Ultra": 819, "M4": 120, "M4 Pro": 273, "M4 Max": 546}

def _cuda() -> tuple[float, str]:
  """By the driver's memory clock and bus width, at two transfers a clock"""
  from tinygrad.runtime.autogen import cuda
  dev = Device[Device.DEFAULT]
  def attribute(which:int) -> int:
    cuda.cuDeviceGetAttribute(ctypes.byref(value := ctypes.c_int()), which, dev.cu_device)
    return value.value
  clock_khz, bus_bits = attribute(cuda.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE), attribute(cuda.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)
  return clock_khz * 1e3 * 2 * bus_bits / 8, f"memory clock {clock_khz // 1000} MHz x 2 x {bus_bits} bits"

def _chip() -> str: return subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True).stdout.strip()

def _metal() -> tuple[float, str]|None:
  chip = _chip().removeprefix("Apple ")
  return (APPLE[chip] * 1e9, f"Apple's figure for {chip}") if chip in APPLE else None

def cpu_threads() -> int: return max(NUM_CPU_THREADS.value, 1)

def _measured() -> tuple[float, str]:
  """The best of six plain reads of 512 MB by all threads"""
  threads = cpu_threads()
  parts = [np.ones(1 << 26 if threads == 1 else (1 << 26) // threads, np.uint64) for _ in range(threads)]
  best = float("inf")
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    for _ in range(6):
      start = time.perf_counter()
      list(pool.map(np.bitwise_or.reduce, parts))
      best = min(best, time.perf_counter() - start)
  return sum(p.nbytes for p in parts) / best, f"measured: a plain read by {threads} threads"

def peak_bandwidth(device:str|None=None) -> tuple[float, str]|None:
  """(bytes a second, where the figure comes from) of a device's memory, by default the default one's; None where there is no figure"""
  kind = (device or Device.DEFAULT).split(":")[0]
  return {"CUDA": _cuda, "METAL": _metal, "CPU": _measured}.get(kind, lambda: None)()

def cpuinfo(name:str) -> str:
  """What Linux says of its first processor under this name; "" where it says nothing"""
  try:
    with open("/proc/cpuinfo", encoding="utf-8") as lines: return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")
  except OSError: return ""

def device_name(devices:tuple[str, ...]=()) -> str:
  """The default device and its product name, as in CUDA (NVIDIA H200) or CPU (AMD EPYC, 2 threads). devices: of several, the others"""
  kind, what = Device.DEFAULT.split(":")[0], []
  if kind == "CUDA":
    from tinygrad.runtime.autogen import cuda
    cuda.cuDeviceGetName(name := ctypes.create_string_buffer(256), len(name), Device[Device.DEFAULT].cu_device)
    what = [name.value.decode(errors="replace")]
  elif kind in ("CPU", "METAL") and platform.system() == "Darwin": what = [_chip()]
  elif kind == "CPU": what = [cpuinfo("model name") or platform.machine()]  # no Linux, or a processor that gives no name
  if kind == "CPU": what.append(f"{(n := cpu_threads())} thread{'s' * (n > 1)}")
  return ", ".join([f"{Device.DEFAULT} ({', '.join(what)})" if what else Device.DEFAULT, *(d for d in devices if d != Device.DEFAULT)])

def free_memory(device:str) -> int|None:
  """Bytes that the device has left: a card's own, else the machine's. None where the system does not say"""
  if device.split(":")[0] == "CUDA":
    from tinygrad.runtime.autogen import cuda
    free, whole = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.cuCtxSetCurrent(Device[device].context)
    return free.value if cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(whole)) == 0 else None
  try: return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  except (ValueError, OSError): return None   # a Mac does not

def room_for_weights(device:str) -> int|None:
  """As free_memory, of a CUDA device; of the machine's own memory also what it would give back, of files that it keeps, and what it has on disk for
  it. None for other devices"""
  if (kind := device.split(":")[0]) != "CPU": return free_memory(device) if kind == "CUDA" else None
  try: lines = [line.split() for line in open("/proc/meminfo")]
  except OSError: return None
  return sum(int(size) << 10 for name, size, *_ in lines if name in ("MemAvailable:", "SwapFree:"))

# ---- other processes ----

BEGUN = time.perf_counter()
LEAST_SECONDS = 0.25  # of watching before there is a figure: the system counts in hundredths
TOLERATED = 0.15      # cores that other processes may take unmentioned

def cores() -> int:
  """The cores that this process may run on"""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

def _own_seconds() -> float: return sum(os.times()[:4])

def _busy_seconds() -> float|None:
  """CPU seconds that all processes together have taken of these cores since the machine's start; None where the system does not count them"""
  try: lines = open("/proc/stat").read().splitlines()
  except OSError: return None
  mine, ticks = {f"cpu{i}" for i in os.sched_getaffinity(0)}, 0
  for name, *fields in (line.split() for line in lines if line.startswith("cpu")):
    # guests' time, the last two fields, is part of user's; idle and waiting for disks do not count
    if name in mine: ticks += sum(map(int, fields[:8])) - sum(map(int, fields[3:5]))
  return ticks / os.sysconf("SC_CLK_TCK")

class Others:
  """Watches, while it is entered (more than once adds up), the cores that other processes take: their number is `cores`.
  wall: seconds watched; seconds: CPU seconds of other processes in them"""
  def __init__(self, wall:float=0.0, seconds:float=0.0): self.wall, self.seconds = wall, seconds
  def __enter__(self) -> Others:
    self.start = time.perf_counter(), _busy_seconds(), _own_seconds()
    return self
  def __exit__(self, *_:object) -> None:
    start, busy, own = self.start
    wall, now = time.perf_counter() - start, _busy_seconds()
    self.wall += wall
    if busy is not None and now is not None: self.seconds += now - busy - (_own_seconds() - own)
    elif hasattr(os, "getloadavg"):  # a mean over the last minute, from which this process's own part is taken
      lived = time.perf_counter() - BEGUN
      self.seconds += (os.getloadavg()[0] - _own_seconds() / lived * (1 - math.exp(-lived / 60))) * wall
  @property
  def cores(self) -> float|None:
    """A mean over the time watched; None where that was too short"""
    return max(self.seconds / self.wall, 0.0) if self.wall >= LEAST_SECONDS else None
  @property
  def in_the_way(self) -> bool:
    """Whether there are too few cores for the other processes and the threads of the default device"""
    return Device.DEFAULT.split(":")[0] == "CPU" and (taken := self.cores) is not None and taken > max(cores() - cpu_threads(), 0) + TOLERATED

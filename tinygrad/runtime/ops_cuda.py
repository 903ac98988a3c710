"""Wraps the wheel's CUDA device: large copies to the card go through a ring of pinned memory that several threads fill.

The wheel fills pinned memory by one thread, at 5 GB/s where the bus can do 50, and allocates new memory for every copy. Here a piece of the ring is
filled again as soon as the card has read it. A thread that fills also brings a mapped file's pages into memory. What is copied time and again can be
pinned where it lies: the card reads it by itself. Where the driver is out of memory, a MemoryError says what is free. Of several cards each has a
stream of its own; work that touches two of them waits for both. Graphs of captured kernels are runtime/graph/cuda.py's.
"""
from __future__ import annotations
import ctypes, functools, os, re
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
import tinygrad.runtime.autogen.cuda as cuda
from tinygrad import wheel_module
from tinygrad.device import Buffer, BufferSpec, TinyELF
from tinygrad.helpers import mv_address, size_to_str
from tinygrad.runtime.support.c import init_c_var

_wheel = wheel_module(__name__)
encode_args, cu_time_execution, CUDADevice = _wheel.encode_args, _wheel.cu_time_execution, _wheel.CUDADevice
_check = _wheel.check

def check(status:int) -> None:
  """Raises MemoryError where the device has no room left (for a buffer, a graph, a kernel's code), RuntimeError for any other failure"""
  if status != cuda.CUDA_ERROR_OUT_OF_MEMORY: return _check(status)
  free, total, card = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_int()
  known = cuda.cuCtxGetDevice(ctypes.byref(card)) == cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
  name = f"CUDA:{card.value}" if card.value else "CUDA"
  raise MemoryError(f"{name} has no room left: {size_to_str(free.value)} of {size_to_str(total.value)} are free" if known else "no room left")

@functools.cache
def _event(device:CUDADevice) -> Any:
  """The device's own, without time"""
  check(cuda.cuCtxSetCurrent(device.context))
  return init_c_var(cuda.CUevent, lambda x: check(cuda.cuEventCreate(ctypes.byref(x), cuda.CU_EVENT_DISABLE_TIMING)))
def wait_for(device:CUDADevice, other:CUDADevice) -> None:
  """What the device is given from now on, it begins when the other has done all that it was given. The device is the driver's current one then"""
  event = _event(other)
  check(cuda.cuCtxSetCurrent(other.context))
  check(cuda.cuEventRecord(event, None))
  check(cuda.cuCtxSetCurrent(device.context))
  check(cuda.cuStreamWaitEvent(None, event, 0))

PIECE, PIECES, THREADS = 1 << 24, 12, 8  # bytes of a piece; pieces of the ring; threads that fill them

class Ring:
  """Pinned memory in pieces, and an event for each: the card has read it"""
  def __init__(self, allocator:CUDAAllocator):
    self.pieces = [allocator.alloc(PIECE, BufferSpec(host=True)) for _ in range(PIECES)]
    self.read = [init_c_var(cuda.CUevent, lambda x: check(cuda.cuEventCreate(ctypes.byref(x), cuda.CU_EVENT_DISABLE_TIMING))) for _ in self.pieces]
    self.threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    self.next = 0                                  # the number of the piece to fill next
  def copy(self, dest:int, source:int, nbytes:int) -> None:
    """Enqueues the copy of `nbytes` from the host's address `source` to the card's `dest`. The source may be overwritten when it returns"""
    filling:deque[tuple[int, int, int, Future]] = deque()
    for offset in range(0, nbytes, PIECE):
      if len(filling) == PIECES: self._send(dest, *filling.popleft())
      slot, size = self.next, min(PIECE, nbytes - offset)
      self.next = (slot + 1) % PIECES
      check(cuda.cuEventSynchronize(self.read[slot]))
      filling.append((slot, offset, size, self.threads.submit(ctypes.memmove, self.pieces[slot], source + offset, size)))
    while filling: self._send(dest, *filling.popleft())
  def _send(self, dest:int, slot:int, offset:int, size:int, filled:Future) -> None:
    filled.result()
    check(cuda.cuMemcpyHtoDAsync_v2(cuda.CUdeviceptr_v2(dest + offset), self.pieces[slot], size, None))
    check(cuda.cuEventRecord(self.read[slot], None))

class Pinned:
  """A buffer of the host's, written before, that all cards read by themselves as long as this is there. Raises RuntimeError where the system does not
  let them"""
  PORTABLE = 1   # CU_MEMHOSTREGISTER_PORTABLE: for all cards
  nbytes: dict[int, int] = {}   # at an address
  def __init__(self, buffer:Buffer):
    self.buffer, memory = buffer, buffer.as_memoryview(force_zero_copy=True)
    self.address = mv_address(memory)
    check(cuda.cuMemHostRegister_v2(self.address, len(memory), self.PORTABLE))
    self.nbytes[self.address] = len(memory)
  def __del__(self) -> None:
    if self.nbytes.pop(self.address, None) is not None: cuda.cuMemHostUnregister(self.address)

class CUDAAllocator(_wheel.CUDAAllocator):
  ring: Ring|None = None
  def host_memory(self, nbytes:int) -> int:
    """The address of pinned memory, the same on the card, which writes there while the host looks on. It is the process's"""
    return self.alloc(nbytes, BufferSpec(host=True)).value
  def alloc(self, size:int, options:BufferSpec|None=None) -> Any:
    try: return super().alloc(size, options)
    except MemoryError as e: raise MemoryError(f"{e}; {e.__cause__}") from None  # the wheel says what was asked for, its cause what there is
  def reaches(self, other:CUDAAllocator) -> bool:
    """Whether the card's kernels may read and write the other's memory: the wheel lets them where the driver can"""
    check(cuda.cuDeviceCanAccessPeer(ctypes.byref(can := ctypes.c_int()), self.dev.cu_device, other.dev.cu_device))
    return can.value == 1
  def address(self, opaque:Any) -> int: return opaque.value
  def pin(self, buffer:Buffer) -> Pinned:
    check(cuda.cuCtxSetCurrent(self.dev.context))
    return Pinned(buffer)
  def _copyin(self, dest, src:memoryview) -> None:
    is_pinned = Pinned.nbytes.get(address := mv_address(src), 0) >= len(src)
    if not is_pinned and len(src) < PIECE // 4: return super()._copyin(dest, src)
    check(cuda.cuCtxSetCurrent(self.dev.context))
    if is_pinned: return check(cuda.cuMemcpyHtoDAsync_v2(dest, address, len(src), None))
    if self.ring is None: self.ring = Ring(self)
    self.ring.copy(dest.value, address, len(src))
  def _transfer(self, dest, src, sz:int, src_dev:CUDADevice, dest_dev:CUDADevice) -> None:
    """From card to card. The wheel's does not wait for what still reads the destination, and keeps an event a copy"""
    wait_for(src_dev, dest_dev)
    check(cuda.cuMemcpyDtoDAsync_v2(dest, src, sz, None))
    wait_for(dest_dev, src_dev)

class CUDAProgram(_wheel.CUDAProgram):
  """The wheel's program; raises MemoryError where the card has no room for its code. Its launches give the shared memory that
  runtime/support/compiler_cuda.py noted"""
  def __init__(self, dev:_wheel.CUDADevice, obj:TinyELF, smem:int=0):
    more = re.match(rb"// shared_memory: (\d+)\n", obj.lib)
    try: super().__init__(dev, obj, smem + (int(more[1]) if more else 0))
    except RuntimeError as e:
      if str(e).endswith("CUDA_ERROR_OUT_OF_MEMORY"): check(cuda.CUDA_ERROR_OUT_OF_MEMORY)
      raise
  def __del__(self) -> None:
    if hasattr(self, "module"): super().__del__()  # a program that was not loaded has nothing to unload

_wheel.check, _wheel.CUDAAllocator, _wheel.CUDAProgram = check, CUDAAllocator, CUDAProgram  # what the wheel's CUDADevice uses

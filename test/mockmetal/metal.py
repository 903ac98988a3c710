"""Metal's objects as far as tinygrad uses them, as Python objects; a method is named like its selector (a:b: -> a_b).

Nothing runs before a command buffer is waited for, so a missing wait, or a buffer that changes in flight, shows as a wrong result.
"""
from __future__ import annotations
import ctypes, itertools, json, mmap, pathlib, subprocess, threading, time
from typing import Any, Callable
from tinygrad.helpers import ContextVar
from . import msl

MAX_SET_BYTES, MAX_ICB_OFFSET, MAX_BUFFER = 4096, 0xFFFFFFFF, 8 << 30
FAMILY = 9                        # Apple9 is M3's and M4's
CHECK = ContextVar("MOCKMETAL_CHECK", 1)

class MetalError(RuntimeError): pass

# ---- objects: the C side holds ids ----

heap: dict[int, NSObject] = {}
_ids = itertools.count(0x1000, 16)

class NSObject:
  def __init__(self) -> None:
    self.references, self.id, self._label = 1, next(_ids), None
    heap[self.id] = self
  @classmethod
  def new(cls) -> NSObject: return cls()
  def retain(self) -> NSObject:
    self.references += 1
    return self
  def release(self) -> None:
    self.references -= 1
    if self.references: return
    heap.pop(self.id)
    self.dealloc()
  def dealloc(self) -> None: pass
  def setLabel(self, label:NSString) -> None: self._label = label.retain()
  def label(self) -> NSString|None: return self._label

class NSString(NSObject):
  def __init__(self, text:str):
    super().__init__()
    self.text = text
  @classmethod
  def stringWithUTF8String(cls, text:bytes) -> NSString: return cls(text.decode())
  def UTF8String(self) -> bytes: return self.text.encode()

class NSError(NSObject):
  def __init__(self, message:object):
    super().__init__()
    self.message = str(message)
  def localizedDescription(self) -> NSString: return NSString(self.message)

class NSData(NSObject):
  def __init__(self, data:bytes):
    super().__init__()
    self.data = data

# ---- the device and its memory ----

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes, _libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
NORESERVE = 0x4000

class MTLBuffer(NSObject):
  """Lies between pages that nobody may touch, its end at the second one."""
  def __init__(self, size:int):
    super().__init__()
    page = mmap.PAGESIZE
    self.size, self.room = size, (size + 15) // page * page + 3 * page
    self.base = _libc.mmap(None, self.room, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE, -1, 0)
    if self.base in (None, ctypes.c_void_p(-1).value): raise MemoryError(size)
    for at in (0, self.room - page): _libc.mprotect(self.base + at, page, 0)
    self.address:int|None = self.base + self.room - page - (size + 15) // 16 * 16
  def contents(self) -> int|None: return self.address
  def dealloc(self) -> None:
    _libc.munmap(self.base, self.room)
    self.address = None

def or_error(make:Callable[[], NSObject], error:Any) -> NSObject|None:
  try: return make()
  except Exception as e: error.value = NSError(e).id
  return None

class MTLDevice(NSObject):
  def name(self) -> NSString: return NSString(f"Mock Apple GPU, family {FAMILY}")
  def supportsFamily(self, family:int) -> int: return int(1001 <= family <= 1000 + FAMILY)
  def newSharedEvent(self) -> NSObject: return NSObject()
  def newCommandQueueWithMaxCommandBufferCount(self, count:int) -> NSObject: return MTLCommandQueue(count)
  def newBufferWithLength_options(self, size:int, options:int) -> MTLBuffer|None: return MTLBuffer(size) if 0 < size <= MAX_BUFFER else None
  def newLibraryWithData_error(self, data:NSData, error:Any) -> NSObject|None: return or_error(lambda: MTLLibrary(data.data), error)
  def newComputePipelineStateWithDescriptor_options_reflection_error(self, desc:Any, options:int, reflection:Any, error:Any) -> NSObject|None:
    return or_error(lambda: MTLComputePipelineState(desc.function), error)
  def newIndirectCommandBufferWithDescriptor_maxCommandCount_options(self, desc:Any, count:int, options:int) -> NSObject:
    return MTLIndirectCommandBuffer(desc.max_buffers, count)

# ---- libraries and pipelines ----

def pack_library(src:str) -> bytes: return b"MTLB" + json.dumps(src).encode() + b"ENDT"

class MTLLibrary(NSObject):
  def __init__(self, packed:bytes):
    super().__init__()
    if packed[:4] != b"MTLB" or packed[-4:] != b"ENDT": raise MetalError("not a Metal library")
    self.src = json.loads(packed[4:-4])
    self.kernels = {k.name: k for k in msl.parse(self.src)}
  def newFunctionWithName(self, name:NSString) -> MTLFunction|None: return MTLFunction(self.src, k) if (k := self.kernels.get(name.text)) else None

class MTLFunction(NSObject):
  def __init__(self, src:str, kernel:msl.Kernel):
    super().__init__()
    self.src, self.kernel = src, kernel

class MTLComputePipelineDescriptor(NSObject):
  def setComputeFunction(self, function:MTLFunction) -> None: self.function = function
  def setSupportIndirectCommandBuffers(self, yes:bool) -> None: pass

class Code:
  """A kernel's machine code and its threadgroup memory, from address `shared` to `shared_end`"""
  def __init__(self, src:str, kernel:str, checked:bool):
    msl.runtime()
    self.path = msl.compile_msl(src, checked)
    lib = ctypes.CDLL(str(self.path))
    self.body = ctypes.cast(lib[f"mtl_body_{kernel}"], ctypes.c_void_p).value
    lib[f"mtl_shared_{kernel}"](ends := (ctypes.c_void_p * 2)())
    self.shared, self.shared_end = ends[0] or 0, ends[1] or 0
  def with_line(self, message:str) -> str:
    """A program counter in the message becomes a line of the source"""
    head, found, pc = message.partition(" [pc ")
    if not found: return message
    first = min(int(line.split("-")[0], 16) for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if str(self.path) in line)
    try: out = subprocess.run(["addr2line", "-e", self.path, hex(int(pc[:-1], 16) - 1 - first)], capture_output=True, text=True).stdout
    except OSError: return head
    return f"{head}, line {out.strip().split(':')[-1].split()[0]}"

class Range(ctypes.Structure):
  _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_uint64), ("name", ctypes.c_char_p)]
class Dispatch(ctypes.Structure):
  _fields_ = [("body", ctypes.c_void_p), ("buffers", ctypes.c_void_p), ("grid", ctypes.c_uint32 * 3), ("tg", ctypes.c_uint32 * 3),
              ("shared", ctypes.c_void_p), ("shared_end", ctypes.c_void_p), ("check", ctypes.c_uint32), ("n_ranges", ctypes.c_uint32),
              ("ranges", ctypes.c_void_p)]

Bound = dict[int, Any]  # slot -> (MTLBuffer, offset), or the bytes of a constant

class MTLComputePipelineState(NSObject):
  def __init__(self, function:MTLFunction|None):
    super().__init__()
    if function is None: raise MetalError("no such function in the library")
    self.kernel, self.src = function.kernel, function.src
    self.code = {False: Code(self.src, self.kernel.name, False)}
    self.shared_bytes = self.code[False].shared_end - self.code[False].shared
    if self.shared_bytes > msl.MAX_THREADGROUP_BYTES:
      raise MetalError(f"{self.kernel.name}: {self.shared_bytes} bytes of threadgroup memory, the limit is {msl.MAX_THREADGROUP_BYTES}")
  def maxTotalThreadsPerThreadgroup(self) -> int: return self.kernel.max_threads
  def threadExecutionWidth(self) -> int: return 32
  def staticThreadgroupMemoryLength(self) -> int: return self.shared_bytes

  def run(self, bound:Bound, grid:tuple[int, ...], tg:tuple[int, ...]) -> None:
    k, checked = self.kernel, bool(CHECK)
    pointers, ranges, constants = (ctypes.c_void_p * msl.MAX_BUFFERS)(), {}, []
    if (threads := tg[0] * tg[1] * tg[2]) > k.max_threads or threads < 1:
      raise MetalError(f"{k.name}: {threads} threads a threadgroup {tg}, the limit is {k.max_threads}")
    for p in k.buffers():
      if p.index not in bound: raise MetalError(f"{k.name}: buffer {p.index} ({p.type} {p.name}) is not bound")
      if isinstance(b := bound[p.index], bytes):
        constants.append(c := ctypes.create_string_buffer(b, max(16, len(b))))
        base, size, offset = ctypes.addressof(c), len(b), 0
      else: base, size, offset = b[0].address, b[0].size, b[1]
      if base is None: raise MetalError(f"{k.name}: buffer {p.index} was released before the GPU used it")
      if not 0 <= offset < size: raise MetalError(f"{k.name}: offset {offset} in buffer {p.index} of {size} bytes")
      pointers[p.index] = base + offset
      ranges.setdefault(base, Range(base, size, b"buffer %d" % p.index))
    if checked not in self.code: self.code[checked] = Code(self.src, k.name, checked)
    code, all_ranges = self.code[checked], (Range * len(ranges))(*ranges.values())
    d = Dispatch(code.body, ctypes.addressof(pointers), grid, tg, code.shared, code.shared_end, checked, len(ranges), ctypes.addressof(all_ranges))
    if wrong := msl.runtime().mtl_run(ctypes.byref(d)): raise MetalError(f"{k.name}: {code.with_line(wrong.decode())}")

# ---- commands ----

def _size(s:Any) -> tuple[int, int, int]: return s.width, s.height, s.depth
def _bind(bound:Bound, buffer:MTLBuffer|None, offset:int, index:int, limit:int=msl.MAX_BUFFERS) -> None:
  if index >= limit: raise MetalError(f"buffer index {index}, the last one is {limit - 1}")
  if buffer is None: raise MetalError(f"nil for buffer {index}")
  bound[index] = (buffer, offset)

class MTLComputeCommandEncoder(NSObject):
  def __init__(self, owner:MTLCommandBuffer):
    super().__init__()
    self.owner, self.bound, self.resident = owner, {}, set()
    owner.encoder = self
  def setComputePipelineState(self, state:MTLComputePipelineState) -> None: self.state = state
  def setBuffer_offset_atIndex(self, buffer:MTLBuffer, offset:int, index:int) -> None: _bind(self.bound, buffer, offset, index)
  def setBytes_length_atIndex(self, data:bytes, length:int, index:int) -> None:
    if length > MAX_SET_BYTES: raise MetalError(f"setBytes of {length} bytes, the limit is {MAX_SET_BYTES}")
    self.bound[index] = bytes(data[:length])
  def dispatchThreadgroups_threadsPerThreadgroup(self, grid:Any, tg:Any) -> None:
    state, bound, grid, tg = self.state, dict(self.bound), _size(grid), _size(tg)
    if 0 not in grid: self.owner.work.append(lambda: state.run(bound, grid, tg))
  def useResources_count_usage(self, resources:Any, count:int, usage:int) -> None: self.resident |= {resources[i].value for i in range(count)}
  def executeCommandsInBuffer_withRange(self, icb:MTLIndirectCommandBuffer, which:Any) -> None:
    self.owner.work.append(lambda: icb.run(range(which.location, which.location + which.length), self.resident))
  def endEncoding(self) -> None: self.owner.encoder = None

class MTLBlitCommandEncoder(NSObject):
  def __init__(self, owner:MTLCommandBuffer):
    super().__init__()
    self.owner = owner
    owner.encoder = self
  def copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(self, src:MTLBuffer, src_at:int, dst:MTLBuffer, dst_at:int, size:int) -> None:
    if src_at + size > src.size or dst_at + size > dst.size: raise MetalError("a copy reaches outside its buffers")
    self.owner.work.append(lambda: ctypes.memmove(dst.address + dst_at, src.address + src_at, size))
  def endEncoding(self) -> None: self.owner.encoder = None

class MTLIndirectCommandBufferDescriptor(NSObject):
  max_buffers = msl.MAX_BUFFERS
  def setCommandTypes(self, types:int) -> None: pass
  def setInheritBuffers(self, yes:bool) -> None: pass
  def setInheritPipelineState(self, yes:bool) -> None: pass
  def setMaxKernelBufferBindCount(self, count:int) -> None: self.max_buffers = count

class MTLIndirectComputeCommand(NSObject):
  def __init__(self, max_buffers:int):
    super().__init__()
    self.max_buffers, self.bound, self.waits = max_buffers, {}, False
  def release(self) -> None: pass  # the indirect command buffer owns it
  def setComputePipelineState(self, state:MTLComputePipelineState) -> None: self.state = state
  def setKernelBuffer_offset_atIndex(self, buffer:MTLBuffer, offset:int, index:int) -> None:
    if offset > MAX_ICB_OFFSET: raise MetalError(f"offset {offset} of buffer {index}: an indirect command keeps 32 bits of it, so less than 4 GiB")
    _bind(self.bound, buffer, offset, index, self.max_buffers)
  def concurrentDispatchThreadgroups_threadsPerThreadgroup(self, grid:Any, tg:Any) -> None: self.grid, self.tg = _size(grid), _size(tg)
  def setBarrier(self) -> None: self.waits = True
  def run(self, resident:set[int]) -> None:
    for i, b in self.bound.items():
      if b[0].id not in resident: raise MetalError(f"{self.state.kernel.name}: buffer {i} of an indirect command is not resident (useResources)")
    self.state.run(self.bound, self.grid, self.tg)

class MTLIndirectCommandBuffer(NSObject):
  def __init__(self, max_buffers:int, count:int):
    super().__init__()
    self.commands = [MTLIndirectComputeCommand(max_buffers) for _ in range(count)]
  def indirectComputeCommandAtIndex(self, i:int) -> MTLIndirectComputeCommand: return self.commands[i]
  def run(self, which:range, resident:set[int]) -> None:
    # a command with a barrier waits for all before it; commands between two barriers may run in any order, here they run backwards
    together:list[MTLIndirectComputeCommand] = []
    for c in [*(self.commands[i] for i in which), None]:
      if c is None or c.waits:
        for earlier in reversed(together): earlier.run(resident)
        together = []
      if c is not None: together.append(c)

lock = threading.RLock()  # runtime.cpp runs one dispatch at a time
LATE = .01                # seconds

class MTLCommandBuffer(NSObject):
  def __init__(self, queue:MTLCommandQueue):
    super().__init__()
    self.queue, self.work, self.encoder, self.committed, self.done, self.failed, self.times = queue, [], None, False, False, None, (0.0, 0.0)
  def computeCommandEncoder(self) -> NSObject: return MTLComputeCommandEncoder(self)
  def blitCommandEncoder(self) -> NSObject: return MTLBlitCommandEncoder(self)
  def commit(self) -> None:
    if self.encoder is not None: raise MetalError("commit with an encoder that was not ended")
    if self.committed: raise MetalError("a command buffer committed twice")
    self.committed = True
    self.queue.append(self)
  def waitUntilCompleted(self) -> None:
    if not self.committed: raise MetalError("wait for a command buffer that was not committed")
    with lock:
      while not self.done: self.queue.pending.pop(0).execute()
  def execute(self) -> None:
    start = time.perf_counter()
    try:
      for job in self.work: job()
    except (MetalError, msl.MSLError) as e: self.failed = NSError(e)
    self.times, self.done, self.work = (start, time.perf_counter()), True, []
  def error(self) -> NSObject|None: return self.failed.retain() if self.failed is not None else None
  def GPUStartTime(self) -> float: return self.times[0]
  def GPUEndTime(self) -> float: return self.times[1]

class MTLCommandQueue(NSObject):
  def __init__(self, limit:int):
    super().__init__()
    self.limit, self.pending, self.device = limit, [], None
  def append(self, buffer:MTLCommandBuffer) -> None:
    self.pending.append(buffer)
    if self.device is None or not self.device.is_alive():      # a fork has none
      self.device = threading.Thread(target=self.goes_on, daemon=True)
      self.device.start()
  def goes_on(self) -> None:
    """What nobody waits for is done late, but done: the host may look for it in memory that it shares"""
    late:list[MTLCommandBuffer] = []
    while True:
      time.sleep(LATE)
      with lock:
        for buffer in late:
          if not buffer.done: buffer.waitUntilCompleted()
        late = list(self.pending)
  def commandBuffer(self) -> MTLCommandBuffer:
    if len(self.pending) >= self.limit:                        # as the real one does
      with lock:
        if self.pending: self.pending[0].waitUntilCompleted()
    return MTLCommandBuffer(self)

CLASSES = {c.__name__: c for c in (NSString, NSError, MTLComputePipelineDescriptor, MTLIndirectCommandBufferDescriptor)}

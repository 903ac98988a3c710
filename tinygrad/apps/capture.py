"""A step's launches, recorded a part at a time, and kept on disk.

Decoding a token, or a chunk of a prompt, runs the same few parts over and over: a model's blocks differ in their weights, not in what is launched.
A part is a function of tensors. It is scheduled, lowered and compiled once for all tensors of the same shapes, as launches over parameters, and then
placed on the tensors of each block. A recording is kept in tinygrad's own cache under all that it depends on (what it was given, this code, the
wheel, the device, every setting): a later process schedules nothing.

  replay = Replay()
  for block in blocks: x = replay.run(Block.__call__, block, x)    # appends launches; x is a buffer that will hold the result
  replay()                                                       # launches them all

Parts may lie on several devices: a recording numbers those of its tensors, and serves any others of the same kinds. A copy from one to another is
recorded as a launch is.
"""
from __future__ import annotations
import contextlib, ctypes, enum, functools, hashlib, os, platform, sys, weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Sequence
import numpy as np
from tinygrad import OVERLAY, WHEEL, Device, Tensor, UOp, dtypes
from tinygrad.device import Buffer, BufferSpec
from tinygrad.dtype import AddrSpace, DType, _from_np_dtype, _to_np_dtype
from tinygrad.engine.jit import graph_split_rewrite, jit_lower
from tinygrad.engine.realize import ExecContext, capturing, compile_linear, get_call_arg_uops, get_call_outs_ins, pm_exec, run_linear
from tinygrad.helpers import DEBUG, JIT, JIT_BATCH_SIZE, Context, ContextVar, disable_gc, diskcache_get, diskcache_put, prod
from tinygrad.nn.cpu import is_cpu
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.primitive import only_plain_ops
from tinygrad.uop.ops import Ops, buffers

TABLE = "recordings"  # of tinygrad's cache

# ---- the host's numbers on the device ----

PIECE = 1 << 24  # bytes that a thread copies at a time

@functools.cache
def _copiers() -> ThreadPoolExecutor: return ThreadPoolExecutor(4)
os.register_at_fork(after_in_child=_copiers.cache_clear)  # the child has none of the threads

def write(t:Tensor, values:np.ndarray) -> None:
  """Puts values of the tensor's own dtype and size into its buffer, after all that the device was given before"""
  source, buffer = np.ascontiguousarray(values).reshape(-1).view(np.uint8), t.uop.base.buffer.ensure_allocated()
  if source.size != buffer.nbytes: raise ValueError(f"expected {buffer.nbytes} bytes, found {source.size}")
  if not hasattr(buffer.allocator, "_as_buffer"): return buffer.allocator._copyin(buffer._buf, memoryview(source))
  # memory that the host shares: pages of a mapped file are brought in, and copied, by several threads
  dest = np.frombuffer(buffer.as_memoryview(force_zero_copy=True), np.uint8)
  def copy(at:int) -> None: dest[at:at + PIECE] = source[at:at + PIECE]
  for _ in (map if source.size <= PIECE else _copiers().map)(copy, range(0, source.size, PIECE)): pass

def read(t:Tensor) -> np.ndarray:
  """What is in the tensor's buffer when all that the device was given is done. Where the host shares its memory, this saves the 0.2 ms of Python in
  which Tensor.numpy schedules a copy."""
  if not hasattr((buffer := t.uop.base.buffer).allocator, "_as_buffer"): return t.numpy()
  return np.frombuffer(buffer.as_memoryview(force_zero_copy=True), _to_np_dtype(t.dtype)).reshape(t.shape).copy()

def to_device(values:np.ndarray, device:str|None=None) -> Tensor:
  """A tensor of the same shape and dtype on the device, by default the one that tinygrad takes; nothing is scheduled for it"""
  buffer = UOp.new_buffer(device or Device.DEFAULT, values.size, _from_np_dtype(values.dtype))
  write(t := Tensor(buffer.reshape(values.shape)), values)
  return t

def write_row(t:Tensor, row:int, values:np.ndarray) -> None:
  """As write, of a row of the tensor"""
  buffer = t.uop.base.buffer.ensure_allocated()
  part = buffer.view(values.size, buffer.dtype, row * values.nbytes).ensure_allocated()
  part.allocator._copyin(part._buf, memoryview(np.ascontiguousarray(values)).cast("B"))

def seen_by_host(values:np.ndarray, device:str) -> tuple[Tensor, np.ndarray|None]:
  """to_device(values), in memory that the host sees while the device works, and the host's view of it; None where the device has no such memory"""
  allocator = Device[device].allocator
  if hasattr(allocator, "host_memory"):
    address = allocator.host_memory(values.nbytes)
    buffer = Buffer(device, values.size, _from_np_dtype(values.dtype), options=BufferSpec(external_ptr=address)).allocate()
    view = np.frombuffer((ctypes.c_char * values.nbytes).from_address(address), values.dtype).reshape(values.shape)
    view[:] = values
    return Tensor(UOp.from_buffer(buffer).reshape(values.shape)), view
  t = to_device(values, device)
  if not hasattr(allocator, "_as_buffer"): return t, None
  return t, np.frombuffer(t.uop.base.buffer.as_memoryview(force_zero_copy=True), values.dtype).reshape(values.shape)

def pinned(tensors:Sequence[Tensor], device:str) -> list[Any]:
  """Lets the device read these tensors of the CPU's, which nobody writes any more, by itself, at the speed of the bus, as long as what is returned is
  there. Where it cannot, copies go by way of the host"""
  if not tensors or not hasattr(allocator := Device[device].allocator, "pin"): return []
  try: return [allocator.pin(t.uop.base.buffer) for t in tensors]
  except (RuntimeError, MemoryError) as e:
    print(f"{device} cannot read the CPU's memory by itself ({e}): long prompts take longer", file=sys.stderr)
    return []

# ---- what a recording depends on ----

def devices_of(tensors:list[Tensor]) -> list[str]:
  """The devices that a recording numbers"""
  return list(dict.fromkeys(t.device for t in tensors))

def describe(x:Any, tensors:list[Tensor]) -> Any:
  """All of x that what is launched can depend on, as something whose repr tells it; its tensors, each buffer once, are appended to `tensors`.
  Their devices are numbered. Raises TypeError for what cannot be told, a function for example."""
  if x is None or isinstance(x, (bool, int, float, str, enum.Enum, DType)): return x
  if isinstance(x, Tensor):
    if not x.uop.has_buffer_identity(): raise TypeError(f"a part of a step reads whole buffers, found {x}")
    slot = next((i for i, t in enumerate(tensors) if t.uop.base is x.uop.base), len(tensors))
    if slot == len(tensors): tensors.append(x)
    return "tensor", slot, x.shape, x.dtype, devices_of(tensors).index(x.device)
  if isinstance(x, (list, tuple)): return [describe(y, tensors) for y in x]
  if isinstance(x, dict): return [(k, describe(y, tensors)) for k, y in x.items()]
  if isinstance(x, (type, UOp)) or hasattr(x, "__code__") or not hasattr(x, "__dict__"): raise TypeError(f"a part of a step cannot depend on {x!r}")
  return type(x).__qualname__, [(k, describe(y, tensors)) for k, y in vars(x).items()]

@functools.cache
def code() -> str:
  """A hash of the fork's files and of the wheel's list of files"""
  digest = hashlib.sha256()
  for path in sorted(OVERLAY.rglob("*.py")): digest.update(path.read_bytes())
  for path in sorted(WHEEL.parent.glob("tinygrad-*.dist-info/RECORD")): digest.update(path.read_bytes())
  return digest.hexdigest()

@functools.cache
def _processor() -> str:
  """What the CPU's compiler makes code for: a cache may be shared by machines"""
  with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
  return platform.processor()

def _maker(device:str) -> Any:
  """What makes a device's programs"""
  renderer = Device[device].renderer
  return device.split(":")[0], type(renderer).__name__, renderer.compiler.cachekey, renderer.target

def _environment() -> Any:
  settings = sorted((k, v.value) for k, v in ContextVar._cache.items() if k not in ("DEBUG", "VIZ", "PROFILE"))
  return code(), _processor(), settings, only_plain_ops(), platform.python_version()

# ---- recording ----

@dataclass(frozen=True)
class Recording:
  """linear: calls over PARAMs, which stand for the function's tensors, then its new tensors, then scratch memory. results: what the function gave,
  each one of its tensors by number or the shape, dtype and device of a new one. scratch: (device, which of the device's, bytes, whether it is
  copied: then it is to have this size, as a copy is of the whole). A device is a number, as devices_of the function's tensors. devices: those
  that it was scheduled for; it is placed on others as well."""
  linear: UOp
  devices: list[str]
  results: tuple[int|tuple[tuple[int, ...], DType, int], ...]
  scratch: tuple[tuple[int, int, int, bool], ...] = ()

def is_place(u:UOp) -> bool: return u.op is Ops.PARAM and u.addrspace is AddrSpace.GLOBAL

class _Calls(list):
  def add_linear(self, linear:UOp, var_vals:dict[str, int]) -> None: self.extend(linear.src)

@contextlib.contextmanager
def collected_calls() -> Iterator[list[UOp]]:
  """Collects the calls that are scheduled inside: they are neither compiled nor run, and their buffers take no memory"""
  outer = list(capturing)
  capturing[:] = [calls := _Calls()]
  try: yield calls
  finally: capturing[:] = outer

def _parameters(linear:UOp, held:list[UOp]) -> UOp:
  return linear.substitute({u: UOp.param(i, u.dtype, u.shape, u.device) for i, u in enumerate(held)}, walk=True)

def schedule(fxn:Callable, args:tuple, tensors:list[Tensor]) -> Recording:
  """The launches of fxn(*args) as tinygrad schedules them, not lowered; their intermediate results are still buffers of their own"""
  with collected_calls() as calls:
    returned = fxn(*args)
    returned = returned if isinstance(returned, tuple) else (returned,)
    Tensor.realize(*returned)
  held, results, devices = [t.uop.base for t in tensors], [], devices_of(tensors)
  if elsewhere := sorted({u.device for call in calls for u in call.src[1:] if isinstance(u.device, str)} - set(devices)):
    raise TypeError(f"{fxn.__qualname__} uses {elsewhere[0]}, where none of its tensors lies")
  for t in returned:
    if not t.uop.has_buffer_identity(): raise TypeError(f"{fxn.__qualname__} returns a view, where a buffer's numbers in their order are expected")
    if (buffer := t.uop.base) in held: results.append(held.index(buffer))
    else: held, results = [*held, buffer], [*results, (t.shape, t.dtype, devices.index(t.device))]
  linear = _parameters(UOp(Ops.LINEAR, src=tuple(calls)), held)
  if hidden := [u for u in linear.toposort() if u.op is Ops.BUFFER and u in buffers]:
    raise TypeError(f"{fxn.__qualname__} reads a buffer of {hidden[0].max_numel()} x {hidden[0].dtype.name} which it was not given")
  return Recording(linear, devices, tuple(results))

def _without_source_graph(call:UOp) -> UOp:
  """A compiled program is its text, its binary and its parameters; the graph that it was made from is not needed any more"""
  program = call.src[0]
  if program.op is not Ops.PROGRAM: return call
  sink, linear, *compiled = program.src
  kept = tuple(u for u in linear.src if u.op in (Ops.PARAM, Ops.BUFFER))
  return call.replace(src=(program.replace(src=(UOp(Ops.SINK, arg=sink.arg), UOp(Ops.LINEAR, src=kept), *compiled)), *call.src[1:]))

def by_device(calls:Sequence[UOp]) -> list[UOp]:
  """Compiled calls in an order in which neighbours are of one device where they can be, for a graph of its own: where one waits for another device,
  what comes later and does not is first. A copy is of the device that it is to"""
  touched = [[place.base for place in get_call_arg_uops(call)] for call in calls]
  written = [{places[i] for i in get_call_outs_ins(call)[0]} for call, places in zip(calls, touched)]
  def waits(i:int, j:int) -> bool: return not (written[j].isdisjoint(touched[i]) and written[i].isdisjoint(touched[j]))
  behind, order = [{j for j in range(i) if waits(i, j)} for i in range(len(calls))], list[int]()
  while len(order) < len(calls):
    ready = [i for i in range(len(calls)) if i not in order and behind[i].issubset(order)]
    order.append(next((i for i in ready if order and calls[i].src[1].device == calls[order[-1]].src[1].device), ready[0]))
  return [calls[i] for i in order]

def lower(r:Recording, given:int) -> Recording:
  """The same with compiled programs, its intermediate results in scratch memory. given: how many tensors the function has"""
  linear = r.linear
  if len(r.devices) > 1: linear = linear.replace(src=tuple(by_device(compile_linear(linear).src)))
  with Context(JIT=2): linear = jit_lower(linear, set(), [])
  linear = linear.replace(src=tuple(map(_without_source_graph, linear.src)))
  arenas = [u for u in linear.toposort() if u.op is Ops.BUFFER and u.addrspace is AddrSpace.GLOBAL]
  copied = {u for call in linear.src if call.src[0].op is Ops.COPY for place in call.src[1:] for u in place.toposort()}
  first = given + sum(not isinstance(x, int) for x in r.results)
  linear = linear.substitute({u: UOp.param(first + i, u.dtype, u.shape, u.device) for i, u in enumerate(arenas)}, walk=True)
  scratch = tuple((r.devices.index(u.device), sum(v.device == u.device for v in arenas[:i]), u.nbytes(), u in copied) for i, u in enumerate(arenas))
  return Recording(linear, r.devices, r.results, scratch)

_scheduled: dict[str, Recording] = {}
_compiled: dict[str, Recording] = {}

@dataclass(frozen=True)
class RecordedPart:
  """A recording, and the buffers that it is to be placed on: the function's tensors', as many as `given`, and its results'. devices: the tensors',
  by number"""
  key: str
  given: int
  places: list[UOp]
  devices: list[str]
  @property
  def recording(self) -> Recording: return _compiled.get(self.key) or _scheduled[self.key]
  @property
  def scratch(self) -> list[tuple[tuple[str, int, int], int]]:
    """(which memory, bytes): what has the same key may be one, as large as the largest"""
    return [((self.devices[device], number, size if copied else 0), size) for device, number, size, copied in self.recording.scratch]

@disable_gc()
def find(fxn:Callable, args:tuple, environment:Any) -> tuple[RecordedPart, list[Tensor]]:
  """fxn(*args) as an earlier call or process recorded it, else scheduled now; and the tensors among args"""
  tensors:list[Tensor] = []
  what = describe(args, tensors)
  if fxn.__closure__: raise TypeError(f"{fxn.__qualname__} sees more than its arguments")
  devices = devices_of(tensors)
  key = hashlib.sha256(repr((fxn.__module__, fxn.__qualname__, what, list(map(_maker, devices)), environment)).encode()).hexdigest()
  if key not in _compiled and key not in _scheduled:
    if (kept := diskcache_get(TABLE, key)) is not None: _compiled[key] = kept
    else: _scheduled[key] = schedule(fxn, args, tensors)
  return RecordedPart(key, len(tensors), [t.uop.base for t in tensors], devices), tensors

@disable_gc()
def compile_parts(parts:list[RecordedPart]) -> None:
  """Compiles what is only scheduled, all kernels beside each other, and keeps it"""
  todo = {p.key: p for p in parts if p.key not in _compiled}
  if todo: compile_linear(UOp(Ops.LINEAR, src=tuple(call for p in todo.values() for call in p.recording.linear.src)))
  for key, p in todo.items(): _compiled[key] = diskcache_put(TABLE, key, lower(_scheduled.pop(key), p.given))

# ---- placing ----

def placed(linear:UOp, places:list[UOp]) -> list[UOp]:
  """The calls of a LINEAR over parameters, on buffers"""
  known:dict[UOp, UOp] = {}
  def at(u:UOp) -> UOp:
    if u not in known:
      known[u] = places[u.arg.slot] if is_place(u) else u.substitute({p: places[p.arg.slot] for p in u.toposort() if is_place(p)})
    return known[u]
  return [call.replace(src=(call.src[0], *map(at, call.src[1:]))) for call in linear.src]

def batches(linear:UOp) -> list[list[UOp]]:
  """The launches, a list a graph of the device; what is in no graph stands alone"""
  return [list(c.src[0].src[0].src) if c.src[0].op is Ops.CUSTOM_FUNCTION and c.src[0].arg == "graph" else [c] for c in linear.src]

def first_batch() -> int:
  """`first` of in_graphs, for a step. Where kernels start while those before them run, they do so within a graph: a second one would wait for the
  whole of the first. A CPU's graph has run when its call returns. Elsewhere the device begins with a few launches while the host hands it others."""
  target = target_of(Device.DEFAULT)
  return 0 if is_cpu(Device.DEFAULT) or target is not None and target.wait is not None else JIT_BATCH_SIZE.value

@disable_gc()
def in_graphs(calls:list[UOp], first:int) -> UOp:
  """Launches in the device's graphs where it has them. first: how many the first graph holds, the next ones twice as many each; 0: all in one"""
  linear = UOp(Ops.LINEAR, src=tuple(calls))
  return graph_split_rewrite(linear, max_batch_size=first) if JIT < 2 else linear
RUN = ExecContext(update_stats=False, jit=True)
def enqueue(linear:UOp) -> None:
  """Gives the launches to their devices. tinygrad's statistics of each take as long as a launch does, and are for who asks to see them"""
  if DEBUG >= 2: return run_linear(linear, {}, jit=True)
  for call in linear.src: pm_exec.rewrite(call, RUN)

Scratch = dict[tuple[str, int, int], UOp]   # buffers by RecordedPart's names for memory

class Replay:
  """Parts in the order in which `run` recorded them. compiled: whether they are to be run; else their programs stay as scheduled, to be counted.
  scratch: memory that several Replays have one after another; one that needs more than there is adds its own, which serves those after it."""
  def __init__(self, compiled:bool=True, scratch:Scratch|None=None):
    self.compiled, self.environment = compiled, (compiled, _environment())
    self.scratch:Scratch = {} if scratch is None else scratch
    self.recorded:list[RecordedPart] = []
    self.results:list[tuple[Callable[[], Tensor|None], UOp]] = []  # what parts gave, while somebody refers to it, and in which buffer

  def run(self, fxn:Callable, *args:Any) -> Any:
    """Appends fxn(*args). Returns what fxn does, tensors that hold the results once the step has run; a buffer whose tensor nobody refers to any more
    serves a later part."""
    part, tensors = find(fxn, args, self.environment)
    results = part.recording.results
    returned = [tensors[r] if isinstance(r, int) else self._result(part.devices, *r) for r in results]
    part.places.extend(t.uop.base for t, r in zip(returned, results) if not isinstance(r, int))
    self.recorded.append(part)
    return returned[0] if len(returned) == 1 else tuple(returned)

  def _result(self, devices:list[str], shape:tuple[int, ...], dtype:DType, number:int) -> Tensor:
    size, device = prod(shape), devices[number]
    free = (i for i, (tensor, buffer) in enumerate(self.results)
            if tensor() is None and (buffer.dtype, buffer.max_numel(), buffer.device) == (dtype, size, device))
    buffer = UOp.new_buffer(device, size, dtype) if (i := next(free, None)) is None else self.results.pop(i)[1]
    self.results.append((weakref.ref(t := Tensor(buffer.reshape(shape))), buffer))
    return t

  def compile(self) -> None:
    """What is not compiled yet, all kernels beside each other"""
    compile_parts(self.recorded)

  @functools.cached_property
  def parts(self) -> list[list[UOp]]:
    """The launches of each part on its buffers; nothing can be added any more"""
    if self.compiled: self.compile()
    # memory that parts have one after another
    sizes:dict[tuple[str, int, int], int] = {}
    for p in self.recorded:
      for key, size in p.scratch: sizes[key] = max(sizes.get(key, 0), size)
    for key, size in sizes.items():
      if key not in self.scratch or self.scratch[key].max_numel() < size: self.scratch[key] = UOp.new_buffer(key[0], size, dtypes.int8)
    return [placed(p.recording.linear, p.places + [self.scratch[key] for key, _ in p.scratch]) for p in self.recorded]
  @property
  def calls(self) -> list[UOp]: return [call for part in self.parts for call in part]

  @functools.cached_property
  def linear(self) -> UOp:
    """All launches, in the device's graphs where it has them; nothing can be added any more"""
    return in_graphs(self.calls, first_batch())
  def cut(self, ends:list[int]) -> list[UOp]:
    """The same in several pieces, for `enqueue`: the parts before each of `ends`, from the one before it on; a piece is a graph"""
    return [in_graphs([call for part in self.parts[start:end] for call in part], 0) for start, end in zip([0, *ends], ends)]

  def __call__(self) -> None: enqueue(self.linear)

  @property
  def batches(self) -> list[list[UOp]]: return batches(self.linear)

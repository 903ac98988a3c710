"""Metal on Linux: the wheel's own ops_metal.py, graph/metal.py, support/objc.py and autogen/metal.py, over stand-ins for the few C functions
through which they reach macOS. For checking, on any machine, what is rendered and written for Metal; it says nothing about speed.

  `with on_metal(): …` in a test makes METAL the default device, on a Mac the real one
  `MOCKMETAL=1 DEV=METAL python …` runs any program on it

metal.py has the framework's objects and its limits, msl.py compiles a kernel as C++ behind the header metal_stdlib, runtime.cpp runs its threads.
Every kernel runs twice, the second time in another order, with each access checked: bounds, alignment, races, reads of what nobody wrote.
MOCKMETAL_CHECK=0, or `on_metal(check=False)`, runs it once, with bounds checked by guard pages alone: six times as fast.
"""
from __future__ import annotations
import contextlib, ctypes, os, platform, struct, sys
from typing import Any, Callable, Iterator
from tinygrad import Device
from tinygrad.engine.worker import terminate_worker_pool
from tinygrad.helpers import Context, DEV
from tinygrad.runtime.support import c
from . import metal, msl

class CFunction:
  """Looks like a function of ctypes: takes restype and argtypes, wraps its result in restype"""
  restype:Any = ctypes.c_int
  argtypes:Any = None
  def __init__(self, function:Callable): self.function = function
  def __call__(self, *args:Any) -> Any: return to_restype(self.function(*args), self.restype)

def to_restype(value:Any, restype:Any) -> Any:
  if isinstance(restype, type) and issubclass(restype, ctypes.c_void_p) and restype is not ctypes.c_void_p:
    return restype(getattr(value, "id", value))            # an object's id; None is nil
  return None if restype is None else value

# ---- Objective-C: selectors and classes are numbers, classes negative ones ----

selectors, classes = [""], [""]
def sel_registerName(name:bytes) -> int:
  selectors.append(name.decode())
  return len(selectors) - 1
def objc_getClass(name:bytes) -> int:
  classes.append(name.decode())
  return 1 - len(classes)

def from_argument(a:Any) -> Any: return a._obj if hasattr(a, "_obj") else metal.heap.get(a.value) if isinstance(a, ctypes.c_void_p) else a
def objc_msgSend(to:Any, selector:Any, *args:Any) -> Any:
  name = selectors[selector.value].strip(":").replace(":", "_")
  if not to.value: return None                             # a message to nil is fine
  receiver = metal.CLASSES[classes[-number]] if (number := ctypes.c_int64(to.value).value) < 0 else metal.heap.get(number)
  if receiver is None: raise metal.MetalError(f"{name} sent to a released object")
  return getattr(receiver, name)(*map(from_argument, args))

class LibObjC:
  sel_registerName, objc_getClass = CFunction(sel_registerName), CFunction(objc_getClass)
  def __getitem__(self, name:str) -> CFunction: return CFunction(objc_msgSend)
class LibSystem:
  dispatch_data_create = CFunction(lambda data, size, queue, destructor: metal.NSData(bytes(data[:size])))

# ---- Metal ----

def create_device() -> metal.MTLDevice:
  # a search for some device shall not find this one
  if DEV.device != "METAL": raise RuntimeError("the mock Metal opens only where it is asked for: DEV=METAL")
  return metal.MTLDevice()

def build_request(service:Any, unused:Any, kind:int, request:bytes, size:int, block:Any) -> None:
  """MTLCodeGenServiceBuildRequest: source -> library, by a callback"""
  n, _ = struct.unpack("<QQ", request[:16])
  src, reply = request[16:16 + n].rstrip(b"\0").decode(), block._obj
  try: msl.compile_msl(src)
  except msl.MSLError as e: return reply(None, 1, None, 0, f"program_source:\n{e}".encode())
  library = bytes(8) + struct.pack("<LL", 16, 0) + metal.pack_library(src)
  reply(None, 0, ctypes.cast(ctypes.create_string_buffer(library, len(library)), ctypes.c_void_p), len(library), b"")

LIBRARIES = {"CoreGraphics": {}, "metal": {"MTLCreateSystemDefaultDevice": CFunction(create_device)},
             "MTLCompiler": {"MTLCodeGenServiceCreate": CFunction(lambda name: 1), "MTLCodeGenServiceBuildRequest": CFunction(build_request)}}

def install() -> None:
  """Puts the stand-ins in place. Workers that tinygrad spawns have them by MOCKMETAL in their environment (tinygrad/__init__.py)."""
  if sys.platform == "darwin" or "tinygrad.runtime.support.objc" in sys.modules: return
  real_symbol, real_library = c.DLL.__getattr__, ctypes.CDLL
  def symbol(dll:c.DLL, name:str) -> Any: return LIBRARIES.get(dll.__dict__.get("nm", ""), {}).get(name) or real_symbol(dll, name)
  c.DLL.__getattr__ = symbol  # type: ignore[method-assign]
  platform.mac_ver = lambda *_: ("15.5", ("", "", ""), "arm64")  # type: ignore[assignment]  # 15: MSL 3.1
  ctypes.CDLL = lambda name, *args, **kw: LibSystem if name and "libSystem" in name else LibObjC()  # type: ignore
  try: import tinygrad.runtime.support.objc  # noqa: F401  # opens its libraries here and now
  finally: ctypes.CDLL = real_library  # type: ignore[misc]

@contextlib.contextmanager
def on_metal(check:bool=True) -> Iterator[None]:
  Device.DEFAULT                                           # found before METAL can be
  if sys.platform != "darwin" and "MOCKMETAL" not in os.environ:
    os.environ["MOCKMETAL"] = "1"
    terminate_worker_pool()                                # the next ones know it
    install()
  with Context(DEV="METAL", MOCKMETAL_CHECK=int(check)):
    try: yield
    finally:
      if sys.platform != "darwin": Device["METAL"].mtl_buffers_in_flight.clear()  # one that failed would fail again

"""The overlay: this folder holds only the modules that the fork adds or changes; everything else comes from the pinned wheel.

`import tinygrad` finds this file first, because the clone's root stands before site-packages on sys.path. It then
  1. finds the wheel and checks its version,
  2. puts a finder first on sys.meta_path: a .py file here wins over the wheel's file at the same path,
  3. sets the search path to [wheel, here], so that folders need no __init__.py of ours,
  4. runs the wheel's own __init__ in this module.
A file here that stands at an upstream path loads what it replaces with `wheel_module(__name__)` and redefines only what changes.
Spawned workers import tinygrad by the sys.path they inherit, so they pass through here too.
"""
import importlib, importlib.machinery, importlib.metadata, importlib.util, os, pathlib, sys, types

WHEEL_VERSION = "0.14.0"
OVERLAY = pathlib.Path(__file__).resolve().parent

def _find_wheel() -> pathlib.Path:
  """The installed wheel's package folder. Raises ImportError, in one line, where it is missing or of another version."""
  fix = f"install it with: pip install tinygrad=={WHEEL_VERSION}"
  try: dist = importlib.metadata.distribution("tinygrad")
  except importlib.metadata.PackageNotFoundError: raise ImportError(f"tinygrad overlay: the tinygrad wheel is not installed; {fix}") from None
  if dist.version != WHEEL_VERSION:
    raise ImportError(f"tinygrad overlay: expected the tinygrad wheel {WHEEL_VERSION}, found {dist.version}; {fix}")
  wheel = pathlib.Path(str(dist.locate_file("tinygrad"))).resolve()
  if not (wheel / "tensor.py").is_file(): raise ImportError(f"tinygrad overlay: no tinygrad package at {wheel}; {fix}")
  return wheel

WHEEL = _find_wheel()

class _OverlayFinder:
  """Finds `tinygrad.a.b` at OVERLAY/a/b.py and `tinygrad._wheel.a.b` at WHEEL/a/b.py; all else is left to the ordinary finders."""
  @staticmethod
  def find_spec(fullname:str, path=None, target=None) -> importlib.machinery.ModuleSpec|None:
    top, *rest = fullname.split(".")
    if top != "tinygrad" or not rest: return None
    root, rest = (WHEEL, rest[1:]) if rest[0] == "_wheel" else (OVERLAY, rest)
    file = root.joinpath(*rest).with_suffix(".py")
    if file.is_file(): return importlib.util.spec_from_file_location(fullname, file)
    return importlib.machinery.ModuleSpec(fullname, None, is_package=True) if root is WHEEL else None  # a folder on the way to a wheel's file

def wheel_module(name:str) -> types.ModuleType:
  """The wheel's own module `name`, for the overlay's file that stands over it. It loads as `tinygrad._wheel.…`, so that the public name
  stays ours and its classes can be pickled; what it imports itself goes through the overlay as usual. Raises ImportError where the
  wheel has no such file."""
  if not WHEEL.joinpath(*name.split(".")[1:]).with_suffix(".py").is_file():
    raise ImportError(f"tinygrad overlay: {name} stands over nothing: the wheel {WHEEL_VERSION} has no such module")
  return importlib.import_module(name.replace("tinygrad.", "tinygrad._wheel.", 1))

if str(OVERLAY.parent) not in sys.path: sys.path.insert(0, str(OVERLAY.parent))
sys.meta_path.insert(0, _OverlayFinder)
__path__ = [str(WHEEL), str(OVERLAY)]
try:
  importlib.import_module("tinygrad.disk_cache")  # first: others take the functions it replaces by name
  exec(compile((WHEEL / "__init__.py").read_text(), str(WHEEL / "__init__.py"), "exec"))
  importlib.import_module("tinygrad.rewriting")
except RuntimeError as e:  # the variable DEV is read as tinygrad is imported
  if "target string" not in str(e): raise
  raise ImportError(f"DEV={os.environ.get('DEV')}: {e}") from None

if os.environ.get("MOCKMETAL"):  # a Metal for machines without one (test/mockmetal); here, so that spawned workers have it too
  sys.path.append(str(OVERLAY.parent / "test"))
  importlib.import_module("mockmetal").install()

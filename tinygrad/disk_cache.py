"""Wraps tinygrad's cache on disk (compiled kernels, searches): where it cannot be read or written, everything goes on without it and says so once.

tinygrad/__init__.py imports it first, before anything takes the wheel's functions by name. A worker that compiles prints nothing: `probe` has found
in its parent what it would find.
"""
from __future__ import annotations
import functools, multiprocessing, os, sys
from typing import Any, Callable
from tinygrad import helpers
from tinygrad.helpers import CACHELEVEL

def _give_up(e:Exception) -> None:
  """Switches the cache off, for this process and the workers that it starts"""
  if CACHELEVEL and not multiprocessing.current_process().daemon:
    why = " ".join(str(e).split()) or type(e).__name__
    print(f"{helpers.CACHEDB}: no cache of compiled kernels ({why}): going on without, each start compiles again", file=sys.stderr)
  CACHELEVEL.value = 0
  os.environ["CACHELEVEL"] = "0"                           # workers that start from now on read it

def _guarded(access:Callable[..., Any], otherwise:Callable[..., Any]) -> Callable[..., Any]:
  """`access`, and `otherwise` where it fails, which takes the arguments behind (table, key)"""
  @functools.wraps(access)
  def guarded(table:str, key:dict|str|int, *args:Any, **kw:Any) -> Any:
    try: return access(table, key, *args, **kw)
    except Exception as e:  # of the folder, the database, a damaged entry: no failure of a cache matters
      _give_up(e)
      return otherwise(*args, **kw)
  return guarded

helpers.diskcache_get = _guarded(helpers.diskcache_get, lambda: None)
helpers.diskcache_put = _guarded(helpers.diskcache_put, lambda val, prepickled=False: val)

def probe() -> None:
  """Writes to the cache, so that one that cannot be written is noticed at the start"""
  helpers.diskcache_put("probe", "written", 1)

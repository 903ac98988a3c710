"""Wraps the wheel's CUDA graph: programmatic dependent launch.

A kernel that waits for its predecessors itself (`griddepcontrol.wait`, see nn/intrinsics.py) may start while they still run: its edges become
programmatic ones, and only those that no other edge implies are kept. Kernels without the instruction keep full edges. The wheel's class adds
edges together with nodes, so the edges of a waiting kernel are held back, added after the nodes, and the graph is instantiated again.
"""
from __future__ import annotations
import ctypes, functools, sys
from typing import Any, Callable
import tinygrad.runtime.autogen.cuda as cuda
from tinygrad import wheel_module
from tinygrad.runtime.ops_cuda import check
from tinygrad.runtime.support.c import init_c_var

_wheel = wheel_module(__name__)

class EdgeData(ctypes.Structure):
  """CUgraphEdgeData: port 1 of a kernel node opens when all its blocks have let dependents launch; type 1 is a programmatic dependency"""
  _fields_ = [("from_port", ctypes.c_ubyte), ("to_port", ctypes.c_ubyte), ("type", ctypes.c_ubyte), ("reserved", ctypes.c_ubyte * 5)]

@functools.cache
def _add_dependencies() -> Callable[..., int]|None:
  """cuGraphAddDependencies_v2, which the wheel's bindings lack; None for a driver before CUDA 12.3"""
  if (found := getattr(ctypes.CDLL("libcuda.so.1"), "cuGraphAddDependencies_v2", None)) is None:
    print("CUDA driver before 12.3: kernels start one after another, programmatic dependent launch is off", file=sys.stderr)
  return found

class CUDAGraph(_wheel.CUDAGraph):
  def __init__(self, linear, input_uops=()):
    self.behind:dict[int, int] = {}                        # by a node's id, a bit for each node that it comes after, itself included
    self.kernels:set[int] = set()                          # the ids of kernel nodes
    self.held_back:list[tuple[list[Any], Any]] = []        # (nodes waited for, waiting node)
    super().__init__(linear, input_uops)
    if not self.held_back: return
    for deps, node in self.held_back:
      n = len(deps)
      data = (EdgeData * n)(*(EdgeData(1, 0, 1) if id(d) in self.kernels else EdgeData() for d in deps))
      check(_add_dependencies()(self.graph, (cuda.CUgraphNode * n)(*deps), (cuda.CUgraphNode * n)(*[node] * n), data, ctypes.c_size_t(n)))
    check(cuda.cuGraphExecDestroy(self.instance))
    self.instance = init_c_var(cuda.CUgraphExec, lambda x: check(cuda.cuGraphInstantiate_v2(ctypes.byref(x), self.graph, None, None, 0)))

  def new_node(self, bufs:list, write:list[int]) -> tuple[Any, Any]:
    """The next node, and the dependencies to create it with, as the driver takes them: none where its edges are held back"""
    runtime = self.runtimes[len(self.nodes)]               # None for a copy
    deps = self._access_resources(bufs, write, new_dependency=(node := cuda.CUgraphNode()))
    kept, implied = [], 0
    for dep in sorted(deps, key=lambda d: self.behind[id(d)].bit_length(), reverse=True):  # the newest first: what it comes after is implied
      if implied >> (self.behind[id(dep)].bit_length() - 1) & 1: continue
      kept.append(dep)
      implied |= self.behind[id(dep)]
    self.behind[id(node)] = implied | 1 << len(self.behind)
    if runtime is not None:
      self.kernels.add(id(node))
      if kept and b"griddepcontrol.wait" in runtime.lib and _add_dependencies() is not None:
        self.held_back.append((kept, node))
        return None, node
    return (cuda.CUgraphNode * len(kept))(*kept) if kept else None, node

"""The CUDA graph's edges, what the compiler is given, and the device's lack of memory, with no driver."""
from __future__ import annotations
import contextlib, ctypes, random, subprocess
from types import SimpleNamespace
from typing import Callable, Iterator
import numpy as np, pytest
import tinygrad.runtime.autogen.cuda as cuda
from tinygrad.apps import capture
from tinygrad.apps.capture import to_device
from tinygrad.helpers import mv_address
from tinygrad.nn.intrinsics import TARGETS
from tinygrad.runtime import ops_cuda
from tinygrad.runtime.graph import cuda as graph
from tinygrad.runtime.support import compiler_cuda

Edges = list[list[int]]                                    # the nodes that each node waits for, all made before it

def random_graph(seed:int) -> Edges:
  r = random.Random(seed)
  n, density = r.randint(1, 24), r.choice((.05, .2, .5, .9))
  return [r.sample(earlier := [d for d in range(node) if r.random() < density], len(earlier)) for node in range(n)]  # in any order

def closure(edges:Edges) -> np.ndarray:
  """Whether node i comes after j, brute force: paths of any length"""
  after = np.zeros((len(edges), len(edges)), bool)
  for node, deps in enumerate(edges): after[node, deps] = True
  for _ in edges: after |= after @ after
  return after

def reduced(edges:Edges) -> Edges:
  kept, behind = [], []
  for node, deps in enumerate(edges):
    of_node, implied = graph.kept_edges(deps, behind)
    kept.append(of_node)
    behind.append(implied | 1 << node)
  return kept

def check(edges:Edges, kept:Edges) -> None:
  """The same order, by edges of the graph, and none that the others imply"""
  want = closure(edges)
  assert all(set(k) <= set(d) and len(set(k)) == len(k) for k, d in zip(kept, edges))
  assert (closure(kept) == want).all(), "an order is lost"
  for node, deps in enumerate(kept):
    for d in deps: assert not any(want[other, d] for other in deps if other != d), "an edge that others imply"

def test_random_graphs():
  for seed in range(300): check(edges := random_graph(seed), reduced(edges))

def test_chain_and_diamond():
  assert reduced([[], [0], [0, 1], [0, 1, 2]]) == [[], [0], [1], [2]]
  assert reduced([[], [0], [0], [0, 1, 2]]) == [[], [0], [0], [2, 1]]

def oldest_first(deps, behind):
  kept, implied = [], 0
  for dep in sorted(deps):
    if implied >> dep & 1: continue
    kept.append(dep)
    implied |= behind[dep]
  return kept, implied
def its_own_bit_only(deps, behind): return sorted(deps), sum(1 << d for d in deps)
def newest_only(deps, behind): return (kept := sorted(deps)[-1:]), behind[kept[0]] if kept else 0

@pytest.mark.parametrize("fault", [oldest_first, its_own_bit_only, newest_only])
def test_a_planted_fault(fault:Callable, monkeypatch:pytest.MonkeyPatch):
  monkeypatch.setattr(graph, "kept_edges", fault)
  with pytest.raises(AssertionError, match="order|edge"): test_random_graphs()

def test_new_nodes(monkeypatch:pytest.MonkeyPatch):
  """What the wheel's class is told of each node, and what is kept for later: edges of kernels that wait themselves, programmatic where they come
  from such a kernel too. Node 2 is a copy, node 4 a kernel that does not wait."""
  waits, plain = SimpleNamespace(lib=b".. griddepcontrol.wait; .."), SimpleNamespace(lib=b"..")
  edges, runtimes = [[], [0], [0, 1], [2, 1, 0], [3, 0], [4, 3]], [waits, waits, None, waits, plain, waits]
  calls, made = [], []
  monkeypatch.setattr(graph, "_add_dependencies", lambda: lambda *args: calls.append(args) or 0)
  for name in ("cuGraphExecDestroy", "cuGraphInstantiate_v2"): monkeypatch.setattr(cuda, name, lambda *args: 0)
  def number(node) -> int: return ctypes.cast(node, ctypes.c_void_p).value - 1
  def as_the_wheel(self, linear, input_uops):
    self.runtimes, self.graph, self.instance = runtimes, None, None
    self._access_resources = lambda bufs, write, new_dependency: [nodes[d] for d in edges[len(nodes)]]
    nodes:list = []
    for i in range(len(edges)):
      deps, node = self.new_node([], [])
      ctypes.cast(ctypes.byref(node), ctypes.POINTER(ctypes.c_void_p))[0] = i + 1  # what the driver calls it
      nodes.append(node)
      made.append(None if deps is None else [number(d) for d in deps])
  monkeypatch.setattr(graph._wheel.CUDAGraph, "__init__", as_the_wheel)
  g = graph.CUDAGraph(None)
  del g.graph, g.instance                                  # nothing to give back to the driver
  assert made == [None, None, [1], None, [3], None]
  later = {number(to[0]): [(number(d), (e.from_port, e.to_port, e.type)) for d, e in zip(froms, data)] for _, froms, to, data, _ in calls}
  assert later == {1: [(0, (1, 0, 1))], 3: [(2, (0, 0, 0))], 5: [(4, (0, 0, 0))]}

def test_the_order_of_graphs_on_several_cards(monkeypatch:pytest.MonkeyPatch):
  """A graph comes after what its cards were given before it, and before what they are given after it; of one card, in its own stream"""
  said:list[str] = []
  current = [""]
  def to(context:str) -> int:
    current[0] = context
    return 0
  monkeypatch.setattr(cuda, "cuCtxSetCurrent", to)
  monkeypatch.setattr(cuda, "cuEventCreate", lambda *args: 0)
  monkeypatch.setattr(ops_cuda, "init_c_var", lambda kind, made: made(kind()) or f"event {current[0]}")
  monkeypatch.setattr(cuda, "cuEventRecord", lambda event, stream: said.append(f"{current[0]} records {event}") or 0)
  monkeypatch.setattr(cuda, "cuStreamWaitEvent", lambda stream, event, flags: said.append(f"{current[0]} awaits {event}") or 0)
  monkeypatch.setattr(cuda, "cuMemcpyDtoDAsync_v2", lambda *args: said.append(f"{current[0]} copies") or 0)
  monkeypatch.setattr(graph._wheel.CUDAGraph, "__call__", lambda self, *args: said.append(f"{current[0]} launches"))
  class Card:
    def __init__(self, context:str): self.context = context
  cards = {"CUDA": Card("a"), "CUDA:1": Card("b")}
  monkeypatch.setattr(graph, "Device", cards)
  def launched(*calls:tuple[str, ...]) -> list[str]:
    """calls: the devices of each one's buffers"""
    said.clear()
    current[0], g = "whichever", object.__new__(graph.CUDAGraph)
    g.calls = [(0, None, [SimpleNamespace(device=name) for name in names], {}) for names in calls]
    g((), {})
    return list(said)
  assert launched(("CUDA:1", "CUDA:1")) == ["b launches"]
  before, after = (["b records event b", "a awaits event b"], ["a records event a", "b awaits event a"])
  assert launched(("CUDA",), ("CUDA:1", "CUDA"), ("CUDA:1",)) == [*before, "a launches", *after]
  said.clear()
  ops_cuda.CUDAAllocator._transfer(None, 1, 2, 4, *cards.values())
  assert said == [*before, "a copies", *after]
  ops_cuda._event.cache_clear()

# ---- kernels, and memory ----

KERNEL = """#include <cuda_fp16.h>
extern "C" __global__ void __launch_bounds__(32) k(float* data0) {
  __shared__ __align__(16) half buf0[%d];
  __shared__ __align__(16) uint buf1[5];
  *(data0+0) = (float)(*(buf0+threadIdx.x))+buf1[0];
}"""

def test_much_shared_memory(monkeypatch:pytest.MonkeyPatch):
  """What is too much for arrays of fixed size lies in one that the launch gives its size; other kernels stay as they are"""
  compiler, compiled = object.__new__(compiler_cuda.NVRTCCompiler), []
  monkeypatch.setattr(compiler_cuda._wheel.NVRTCCompiler, "compile", lambda self, src: compiled.append(src) or b"PTX")
  given = []
  monkeypatch.setattr(ops_cuda._wheel.CUDAProgram.__mro__[1], "__init__", lambda self, dev, obj, smem: given.append(smem))
  for count, size in ((24560, 0), (24561, 49136 + 32)):
    lib = compiler.compile(KERNEL % count)
    ops_cuda.CUDAProgram(None, SimpleNamespace(lib=lib))
    assert lib.endswith(b"PTX") and given.pop() == size
  few, many = compiled
  assert few == KERNEL % 24560 and "__align__(16) char shared_memory[];" in many and many.count("__shared__") == 1
  assert "half* buf0 = (half*)(shared_memory+0);" in many and "uint* buf1 = (uint*)(shared_memory+49136);" in many

def test_shared_memory_of_groups(monkeypatch:pytest.MonkeyPatch):
  """Where groups of warps multiply, each array is at whole 1024 bytes; Hopper's compiler knows their instructions"""
  archs = list[str]()
  monkeypatch.setattr(compiler_cuda._wheel.NVRTCCompiler, "__init__", lambda self, arch, *args, **kw: archs.append(arch))
  monkeypatch.setattr(compiler_cuda._wheel.NVRTCCompiler, "compile", lambda self, src: src.encode())
  compilers = [compiler_cuda.NVRTCCompiler(arch, ptx=False) for arch in ("sm_80", "sm_90", "sm_100")]
  assert archs == ["sm_80", "sm_90a", "sm_100"]
  few, many = (compilers[1].compile((KERNEL % count).replace("(float)", '(float)asm("wgmma")')).decode() for count in (8, 24561))
  assert few.count("__shared__ __align__(1024)") == 2 and "__align__(16)" not in few + many
  assert many.startswith(f"// shared_memory: {48 * 1024 + 32}\n") and "(shared_memory+49152)" in many
  assert "__align__(1024) char shared_memory[];" in many

def test_blocks_at_once(monkeypatch:pytest.MonkeyPatch):
  """What a kernel says of its blocks is among its bounds; other kernels stay as they are"""
  compiler, compiled = object.__new__(compiler_cuda.NVRTCCompiler), []
  monkeypatch.setattr(compiler_cuda._wheel.NVRTCCompiler, "compile", lambda self, src: compiled.append(src) or b"PTX")
  says, asks = ((KERNEL % 8).replace("{\n", f"{{\n  // blocks at once: {what}\n", 1) for what in ("3", "2, of 96 registers"))
  for source in (KERNEL % 8, says, asks): compiler.compile(source)
  assert compiled[:2] == [KERNEL % 8, says.replace("__launch_bounds__(32)", "__launch_bounds__(32, 3)")]
  assert preprocessed(compiled[2], 12, 4) == preprocessed(asks.replace("__launch_bounds__(32)", "__maxnreg__(96)"), 12, 4)
  assert preprocessed(compiled[2], 11, 8) == preprocessed(compiled[2], 12, 3) == \
    preprocessed(asks.replace("__launch_bounds__(32)", "__launch_bounds__(32, 2)"), 12, 3)

def test_halves_read_as_words(monkeypatch:pytest.MonkeyPatch):
  """A kernel has the header of halves where it has them in memory alone, too: once, and others do not"""
  compiler, compiled = object.__new__(compiler_cuda.NVRTCCompiler), []
  monkeypatch.setattr(compiler_cuda._wheel.NVRTCCompiler, "compile", lambda self, src: compiled.append(src) or b"PTX")
  words = 'extern "C" __global__ void __launch_bounds__(32) words_of_half(uint* data0, %s* data1) { *data0 = *((uint*)(data1+2)); }'
  for source in (KERNEL % 8, words % "half", words % "float"): compiler.compile(source)
  assert compiled == [KERNEL % 8, "#include <cuda_fp16.h>\n" + words % "half", words % "float"]

def test_rounded_as_written(monkeypatch:pytest.MonkeyPatch):
  """The compiler is told for the kernels that say so, and for these alone"""
  compiler, told = object.__new__(compiler_cuda.NVRTCCompiler), []
  compiler.compile_options = ["--minimal"]
  monkeypatch.setattr(compiler_cuda._wheel.NVRTCCompiler, "compile", lambda self, src: told.append(self.compile_options) or b"PTX")
  for source in (KERNEL % 8, (KERNEL % 8).replace("{\n", f"{{\n  {TARGETS['CUDA'].as_written}\n", 1), KERNEL % 8): compiler.compile(source)
  assert told == [["--minimal"], ["--minimal", "--fmad=false"], ["--minimal"]]

def preprocessed(source:str, major:int, minor:int) -> list[str]:
  """The words of a source for a compiler of that version, without the headers'"""
  lines = "\n".join(line for line in source.splitlines() if not line.startswith("#include"))
  command = ["gcc", "-E", "-P", "-x", "c", f"-D__CUDACC_VER_MAJOR__={major}", f"-D__CUDACC_VER_MINOR__={minor}", "-"]
  return subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout.split()

@contextlib.contextmanager
def full_device(monkeypatch:pytest.MonkeyPatch, free:int=3 << 19) -> Iterator[None]:
  """The driver of two cards, the second, which it was told of last, with 80 GB that are taken"""
  def second(card) -> int:
    ctypes.cast(card, ctypes.POINTER(ctypes.c_int))[0] = 1
    return 0
  def info(a, b) -> int:
    for place, value in ((a, free), (b, 80 << 30)): ctypes.cast(place, ctypes.POINTER(ctypes.c_size_t))[0] = value
    return 0
  for name in ("cuMemAlloc_v2", "cuGraphInstantiate_v2", "cuModuleLoadData"):
    monkeypatch.setattr(cuda, name, lambda *args: cuda.CUDA_ERROR_OUT_OF_MEMORY)
  monkeypatch.setattr(cuda, "cuCtxSetCurrent", lambda *args: 0)
  monkeypatch.setattr(cuda, "cuCtxGetDevice", second)
  monkeypatch.setattr(cuda, "cuMemGetInfo_v2", info)
  yield

def test_no_room_for_a_buffer(monkeypatch:pytest.MonkeyPatch):
  with full_device(monkeypatch), pytest.raises(MemoryError) as e:
    ops_cuda.CUDAAllocator(SimpleNamespace(device="CUDA", context=None)).alloc(2 << 30)
  line = str(e.value)
  assert line.startswith("Allocation of 2.00 GB failed on CUDA. Used: ") and "\n" not in line
  assert line.endswith("; CUDA:1 has no room left: 1.50 MB of 80.00 GB are free")

def test_no_room_for_a_graph(monkeypatch:pytest.MonkeyPatch):
  with full_device(monkeypatch), pytest.raises(MemoryError, match="^CUDA:1 has no room left: 1.50 MB of 80.00 GB are free"):
    graph._wheel.check(cuda.cuGraphInstantiate_v2())

@pytest.mark.filterwarnings("error")
def test_no_room_for_a_kernel(monkeypatch:pytest.MonkeyPatch):
  with full_device(monkeypatch), pytest.raises(MemoryError, match="^CUDA:1 has no room left: 1.50 MB of 80.00 GB are free"):
    ops_cuda.CUDAProgram(SimpleNamespace(context=None), SimpleNamespace(name="k", lib=b"", signature=()))

def test_other_failures_stay(monkeypatch:pytest.MonkeyPatch):
  def say(status, text) -> None: ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"launch failed"
  monkeypatch.setattr(cuda, "cuGetErrorString", say)
  with pytest.raises(RuntimeError, match="CUDA Error 719, launch failed"): ops_cuda.check(719)
  assert ops_cuda.check(0) is None

def test_pinned_memory(monkeypatch:pytest.MonkeyPatch, capsys:pytest.CaptureFixture[str]):
  """The card reads it by itself as long as somebody holds on to it, and by way of the host otherwise; so where the system does not let it"""
  said:list[tuple] = []
  monkeypatch.setattr(cuda, "cuCtxSetCurrent", lambda context: 0)
  monkeypatch.setattr(cuda, "cuMemHostRegister_v2", lambda *args: said.append(("register", *args)) or 0)
  monkeypatch.setattr(cuda, "cuMemHostUnregister", lambda address: said.append(("unregister", address)) or 0)
  monkeypatch.setattr(cuda, "cuMemcpyHtoDAsync_v2", lambda *args: said.append(("copy", *args)) or 0)
  card = object.__new__(ops_cuda.CUDAAllocator)
  card.dev = SimpleNamespace(context=None)
  card.ring = SimpleNamespace(copy=lambda *args: said.append(("ring", *args)))
  monkeypatch.setattr(capture, "Device", {"CUDA": SimpleNamespace(allocator=card)})
  tensors = [to_device(np.zeros(size, np.uint8), "CPU") for size in (ops_cuda.PIECE, 16)]
  places = [t.uop.base.buffer.as_memoryview(force_zero_copy=True) for t in tensors]
  addresses, dest = [mv_address(place) for place in places], SimpleNamespace(value=7)
  pins = capture.pinned(tensors, "CUDA")
  for place in places: card._copyin(dest, place)
  assert said == [*(("register", a, len(place), 1) for a, place in zip(addresses, places)),
                  *(("copy", dest, a, len(place), None) for a, place in zip(addresses, places))]
  said.clear()
  pins.clear()
  assert sorted(said) == sorted(("unregister", a) for a in addresses) and not ops_cuda.Pinned.nbytes
  card._copyin(dest, places[0])
  assert said.pop() == ("ring", 7, addresses[0], ops_cuda.PIECE)
  monkeypatch.setattr(cuda, "cuMemHostRegister_v2", lambda *args: 801)
  def say(status, text) -> None: ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"not supported"
  monkeypatch.setattr(cuda, "cuGetErrorString", say)
  assert capture.pinned(tensors, "CUDA") == [] and not ops_cuda.Pinned.nbytes
  assert capsys.readouterr().err == "CUDA cannot read the CPU's memory by itself (CUDA Error 801, not supported): long prompts take longer\n"

def test_cards_that_reach_each_other(monkeypatch:pytest.MonkeyPatch):
  """A card is asked whether it, and not the other, can"""
  def can(out, card:int, other:int) -> int:
    ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = int((card, other) == (0, 1))
    return 0
  monkeypatch.setattr(cuda, "cuDeviceCanAccessPeer", can)
  cards = [object.__new__(ops_cuda.CUDAAllocator) for _ in range(2)]
  for number, card in enumerate(cards): card.dev = SimpleNamespace(cu_device=number)
  assert cards[0].reaches(cards[1]) and not cards[1].reaches(cards[0])
  assert cards[0].address(cuda.CUdeviceptr(0x7f00_0000_0100)) == 0x7f00_0000_0100

"""Kernels with one mistake each, and what the mock Metal says about them."""
import ctypes, sys, time
from typing import Any, Iterator
import numpy as np, pytest
from mockmetal import on_metal
from mockmetal.metal import lock
from tinygrad import Device, dtypes
from tinygrad.device import CompileError, TinyELF
from tinygrad.engine.worker import get_worker_pool, terminate_worker_pool
from tinygrad.helpers import Context, Target

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has its own Metal, which says less")

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
AT = "uint gid [[threadgroup_position_in_grid]], uint lid [[thread_index_in_threadgroup]]"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

@pytest.fixture(autouse=True)
def metal() -> Iterator[None]:
  with on_metal(): yield

def program(body:str, *arrays:np.ndarray, vals:tuple[int, ...]=()) -> Any:
  dev = Device["METAL"]
  signature = (*(("b", i, dtypes.float, (1,)) for i in range(len(arrays))), *(("v", len(arrays) + i, dtypes.int, ()) for i in range(len(vals))))
  return dev.runtime(TinyELF(dev.compiler.compile(HEAD + "kernel void k(" + body), "k", Target("METAL"), signature))

def run(body:str, *arrays:np.ndarray, grid:int=1, threads:int=32, vals:tuple[int, ...]=()) -> list[np.ndarray]:
  prg, allocator = program(body, *arrays, vals=vals), Device["METAL"].allocator
  buffers, out = [allocator.alloc(a.nbytes) for a in arrays], [np.empty_like(a) for a in arrays]
  for b, a in zip(buffers, arrays): allocator._copyin(b, memoryview(a.copy()).cast("B"))
  prg(*buffers, global_size=(grid, 1, 1), local_size=(threads, 1, 1), vals=vals)
  for b, o in zip(buffers, out): allocator._copyout(memoryview(o).cast("B"), b)
  return out

def numbers(n:int) -> np.ndarray: return np.arange(n, dtype=np.float32)

# ---- right ----

REDUCE = (f"device float* o, const device float* x, {AT}) {{ threadgroup float t[64]; t[lid] = x[gid * 64 + lid]; %s\n"
          "for (uint d = 32; d; d >>= 1) { if (lid < d) t[lid] += t[lid + d]; %s }\n if (lid == 0) o[gid] = t[0]; }")

def test_a_tree_of_barriers():
  got, _ = run(REDUCE % (BARRIER, BARRIER), numbers(4), x := numbers(256), grid=4, threads=64)
  np.testing.assert_equal(got, x.reshape(4, 64).sum(1))

def test_simdgroup_operations():
  text = "simd_sum(v) + 1e4f * simd_shuffle_xor(v, 1) + 1e6f * simd_max(v) + 1e8f * simd_broadcast(v, 3) + simd_shuffle_down(v, 1)"
  got, x = run(f"device float* o, const device float* x, {AT}) {{ float v = x[lid]; o[lid] = {text}; }}", numbers(64), numbers(64), threads=64)
  v = x.reshape(2, 32)
  down = np.concatenate([v[:, 1:], v[:, -1:]], 1)  # the last lane keeps its own
  want = v.sum(1, keepdims=True) + 1e4 * x.reshape(2, 16, 2)[:, :, ::-1].reshape(2, 32) + 1e6 * v[:, 31:] + 1e8 * v[:, 3:4] + down
  np.testing.assert_allclose(got.reshape(2, 32), want, rtol=1e-6)

def test_simdgroup_matrix():
  a, b = (np.random.default_rng(i).standard_normal((8, 8)).astype(np.float32) for i in range(2))
  got, *_ = run("device float* o, const device float* a, const device float* b) { simdgroup_float8x8 x, y, z; simdgroup_load(x, a, 8);"
                " simdgroup_load(y, b, 8); simdgroup_multiply(z, x, y); simdgroup_store(z, o, 8); }", numbers(64), a.ravel(), b.ravel())
  np.testing.assert_allclose(got.reshape(8, 8), a @ b, rtol=1e-5, atol=1e-6)

def test_the_same_value_from_two_threads_is_no_race():
  assert run(f"device float* o, {AT}) {{ threadgroup float t[1]; t[0] = 7; {BARRIER} o[lid] = t[0]; }}", numbers(32))[0][5] == 7

def test_what_nobody_waits_for_runs_late():
  buffer = Device["METAL"].allocator.alloc(16)
  view, store = Device["METAL"].allocator._as_buffer(buffer).cast("f"), program("device float* o) { o[0] += 5; }", numbers(1))
  view[0] = 1
  with lock:                                               # the device cannot go on
    store(buffer)
    assert view[0] == 1
    Device["METAL"].synchronize()
  assert view[0] == 6
  store(buffer)
  patience = time.monotonic() + 60
  while view[0] == 6 and time.monotonic() < patience: time.sleep(.01)
  assert view[0] == 11

def test_workers_compile():
  terminate_worker_pool()
  with Context(PARALLEL=1):
    library = get_worker_pool().apply(Device["METAL"].compiler.compile, (HEAD + "kernel void k(device float* o) { o[0] = 1; }",))
  terminate_worker_pool()
  assert library.startswith(b"MTLB")

def test_a_search_for_a_device_does_not_find_it():
  with Context(DEV=""): assert Device.DEFAULT != "METAL"

# ---- wrong, found while compiling ----

@pytest.mark.parametrize("message,body", [
  ("double", "device float* o) { double x = o[0]; o[0] = x; }"),
  ("expf", "device float* o) { o[0] = expf(o[0]); }"),
  ("explicit address space", "device float* o) { float4 v = *(float4*)o; o[0] = v.x; }"),
  ("address_space", "device float* o, constant float& c) { device const float* p = &c; o[0] = *p; }"),
  ("variable length", "device float* o, constant int& n) { float t[n]; t[0] = o[0]; o[0] = t[0]; }"),
  ("buffer index 31, the last one is 30", ", ".join(f"device float* b{i}" for i in range(32)) + ") { b0[0] = 1; }"),
  ("must be device or constant", "thread float* o) { o[0] = 1; }")])
def test_no_msl(message:str, body:str):
  with pytest.raises(CompileError, match=message): program(body)

# ---- wrong, found while running ----

@pytest.mark.parametrize("message,body,kw", [
  # limits
  ("k: 32800 bytes of threadgroup memory, the limit is 32768", f"device float* o, {AT}) {{ threadgroup float t[8200]; t[lid] = o[lid]; {BARRIER}"
   " o[lid] = t[31 - lid]; }", {}),
  ("bigger than 1024", "device float* o) { o[0] = 1; }", dict(threads=1025)),
  # bounds and alignment
  ("read of 4 bytes at offset 256 of buffer 1, which has 256 bytes, line 3", f"device float* o, const device float* x, {AT})"
   " { o[lid] = x[lid + 1]; }", dict(threads=64)),
  ("write of 4 bytes at offset -4 of buffer 0", f"device float* o, const device float* x, {AT}) {{ o[(int)lid - 1] = x[lid]; }}", {}),
  ("read of 16 bytes at offset 4 of buffer 1 is not aligned", "device float* o, const device float* x)"
   " { *(device float4*)o = *(const device float4*)(x + 1); }", dict(threads=1)),
  # races
  ("read of threadgroup memory that was never written", REDUCE % ("", BARRIER), dict(grid=1, threads=64)),
  ("write of threadgroup memory, byte 4, races with a read by another thread, line 4", REDUCE % (BARRIER, ""), dict(grid=1, threads=64)),
  ("races with the write by thread", f"device float* o, const device float* x, {AT})"  # the barrier is for threadgroup memory only
   f" {{ o[lid] = x[lid]; {BARRIER} float v = o[63 - lid]; o[lid] = v; }}", dict(threads=64)),
  ("never written|races with", f"device float* o, {AT}) {{ threadgroup float t[64]; t[lid] = o[lid];"
   " simdgroup_barrier(mem_flags::mem_threadgroup); o[lid] = t[63 - lid]; }", dict(threads=64)),
  ("races with the write by thread 0 of threadgroup 0", f"device float* o, {AT}) {{ o[0] = gid; }}", dict(grid=4, threads=1)),
  # threads that part
  ("finished.*waits at threadgroup_barrier", f"device float* o, {AT}) {{ if (lid < 7) {BARRIER}\n o[lid] = 1; }}", {}),
  ("a SIMD-group operation, line 4.*a SIMD-group operation, line 5", f"device float* o, {AT}) {{ float v = o[lid];\n"
   " if (lid < 7) v = simd_sum(v);\n else v = simd_max(v);\n o[lid] = v; }", {}),
  ("division by zero", "device int* o, device int* n) { o[0] = 7 / n[0]; }", {}),
])
def test_planted(message:str, body:str, kw:dict[str, int]):
  with pytest.raises(RuntimeError, match=message): run(body, numbers(64), numbers(64) if "x" in body or "n[0]" in body else numbers(1), **kw)

def test_the_order_of_threads_decides():
  """By way of a variable that the checks do not see: what is left is that a second run, in another order, gives other bytes"""
  with pytest.raises(RuntimeError, match="offset 0 of buffer 0 depends on the order in which threads run"):
    run(f"device float* o, {AT}) {{ static uint next = 0; o[lid] = next++; }}", numbers(32))

# ---- wrong, in a graph ----

def commands(texts:list[str], barrier:bool=True) -> tuple[Any, Any]:
  """An indirect command buffer that runs kernels over one buffer of a float, 1 at first"""
  from tinygrad.runtime.autogen import metal as m
  dev = Device["METAL"]
  (desc := m.MTLIndirectCommandBufferDescriptor.new()).setMaxKernelBufferBindCount(31)
  icb, buffer = dev.sysdevice.newIndirectCommandBufferWithDescriptor_maxCommandCount_options(desc, len(texts), 0), dev.allocator.alloc(16)
  dev.allocator._as_buffer(buffer).cast("f")[0] = 1
  for i, text in enumerate(texts):
    prg, c = program(f"device float* o) {{ {text} }}", numbers(1)), icb.indirectComputeCommandAtIndex(i).retained()
    c.setComputePipelineState(prg.pipeline_state)
    c.setKernelBuffer_offset_atIndex(buffer.buf, 0, 0)
    c.concurrentDispatchThreadgroups_threadsPerThreadgroup(m.MTLSize(1, 1, 1), m.MTLSize(1, 1, 1))
    if barrier: c.setBarrier()
  return icb, buffer

def execute(icb:Any, *resident:Any) -> None:
  from tinygrad.runtime.autogen import metal as m
  from tinygrad.runtime.ops_metal import wait_check
  command_buffer = Device["METAL"].mtl_queue.commandBuffer().retained()
  encoder = command_buffer.computeCommandEncoder().retained()
  if resident: encoder.useResources_count_usage(ctypes.cast((m.MTLBuffer * 1)(resident[0].buf), ctypes.POINTER(m.MTLResource)), 1, 3)
  encoder.executeCommandsInBuffer_withRange(icb, m.NSRange(0, 2))
  encoder.endEncoding()
  command_buffer.commit()
  wait_check(command_buffer)

def test_a_graph_offset_of_4_gib():
  icb, buffer = commands(["o[0] = 1;"])
  with pytest.raises(RuntimeError, match="offset 4294967296 of buffer 0: an indirect command keeps 32 bits"):
    icb.indirectComputeCommandAtIndex(0).setKernelBuffer_offset_atIndex(buffer.buf, 1 << 32, 0)

@pytest.mark.parametrize("barrier,want", [(True, 11), (False, 20)])
def test_without_a_barrier_commands_run_in_any_order(barrier:bool, want:int):
  icb, buffer = commands(["o[0] = o[0] * 10;", "o[0] = o[0] + 1;"], barrier)
  execute(icb, buffer)
  assert Device["METAL"].allocator._as_buffer(buffer).cast("f")[0] == want

def test_a_graph_whose_buffers_are_not_resident():
  with pytest.raises(RuntimeError, match="buffer 0 of an indirect command is not resident"): execute(commands(["o[0] = 1;"] * 2)[0])

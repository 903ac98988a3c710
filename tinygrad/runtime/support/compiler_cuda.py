"""Wraps the wheel's compilers for CUDA: a kernel may have more shared memory than the 48 KB that arrays of fixed size may be, say how many of its
blocks a multiprocessor is to have at once, multiply by groups of warps, have its sums rounded as its text has them, and read halves as words.

No compiler takes more in such arrays. So where a kernel's are more, they become places in one array whose size the launch gives (`dynamic_shared`).
The size stands before the PTX, where runtime/ops_cuda.py finds it. The file stands here, as compiling workers open no device.
"""
from __future__ import annotations
import copy, re
from typing import Any
from tinygrad import wheel_module
from tinygrad.dtype import dtypes
from tinygrad.renderer.cstyle import CUDARenderer

_wheel = wheel_module(__name__)
globals().update({k: v for k, v in vars(_wheel).items() if not k.startswith("__")})

STATIC_SHARED = 49152   # bytes of a block's shared memory in arrays of fixed size
SIZES = {dtype.name: dtype.itemsize for dtype in dtypes.all} | {name: dtype.itemsize for dtype, name in CUDARenderer.type_map.items()}   # in CUDA C

def aligned_for_groups(source:str) -> str:
  """A kernel with its arrays in shared memory at whole 1024 bytes, where groups of warps read them (nn/warp_groups.py)"""
  return source.replace("__shared__ __align__(16)", "__shared__ __align__(1024)") if "wgmma" in source else source

def dynamic_shared(source:str) -> tuple[str, int]:
  """A kernel whose arrays in shared memory are more than STATIC_SHARED, with places in one array that the launch gives its size, and that size. Any
  other as it is, and 0"""
  declared, size, places = re.compile(r"__shared__ __align__\((\d+)\) ([\w ]+?) (\w+)\[(\d+)\];"), 0, dict[str, int]()
  for align, kind, name, count in declared.findall(source):
    places[name] = size = -(-size // int(align)) * int(align)
    size += SIZES[kind] * int(count)
  size = -(-size // 16) * 16
  if size <= STATIC_SHARED: return source, 0
  lines = declared.sub(lambda array: f"{array[2]}* {array[3]} = ({array[2]}*)(shared_memory+{places[array[3]]});", source)
  opening, most = lines.index("{", lines.index("__global__")) + 1, max(int(align) for align, *_ in declared.findall(source))
  return f"{lines[:opening]}\n  extern __shared__ __align__({most}) char shared_memory[];{lines[opening:]}", size

BOUNDS = """
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1204
__maxnreg__({registers})
#else
{bounds}
#endif
"""   # of a kernel whose threads are to have so many registers; before CUDA 12.4 a compiler is told of blocks alone

def with_blocks_at_once(source:str) -> str:
  """A kernel with what it says of its blocks (`at_once` in nn/intrinsics.py), and of a thread's registers, as its bounds. Without a word the compiler
  saves registers, for many at once: a load is put where it is used then, and waited for before the next is asked for."""
  said = re.search(r"// blocks at once: (\d+)(?:, of (\d+) registers)?", source)
  if said is None: return source
  def bounds(own:re.Match) -> str:
    threads_and_blocks = f"__launch_bounds__({own[1]}, {said[1]})"
    return BOUNDS.format(registers=said[2], bounds=threads_and_blocks) if said[2] else threads_and_blocks
  return re.sub(r"__launch_bounds__\((\d+)\)", bounds, source, count=1)

HALVES = "#include <cuda_fp16.h>"

def with_halves_known(source:str) -> str:
  """A kernel with the header of halves, which the wheel includes where a value is one: not where memory of halves is read as words alone"""
  return f"{HALVES}\n{source}" if HALVES not in source and re.search(r"\bhalf\b", source) else source

class NVRTCCompiler(_wheel.NVRTCCompiler):
  """The wheel's compiler, of all that Hopper can. It rounds no product and sum as one where the kernel says so (`as_written` in nn/intrinsics.py).
  Where the launch is to give shared memory, how much stands before the PTX."""
  def __init__(self, arch:str, *args:Any, **kw:Any): super().__init__("sm_90a" if arch == "sm_90" else arch, *args, **kw)
  def compile(self, src:str) -> bytes:
    source, size = dynamic_shared(aligned_for_groups(with_blocks_at_once(with_halves_known(src))))
    told = copy.copy(self)
    if "// rounded as written" in source: told.compile_options = [*self.compile_options, "--fmad=false"]
    return (f"// shared_memory: {size}\n".encode() if size else b"") + super(NVRTCCompiler, told).compile(source)

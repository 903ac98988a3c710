"""What the benchmarks share: models without a file, banks of blocks, what they read, and counting kernels with no device.

A stand-in is a GGUFFile that no disk holds: the keys, names, shapes and types of one of extra/mkgguf.py's models, its data one mapped run of
zeros. `random_weights`, given to Transformer.from_gguf, fills it tensor by tensor.
"""
from __future__ import annotations
import contextlib, functools, math
from collections import Counter
from pathlib import Path
from typing import Iterator, NamedTuple
from unittest import mock
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from extra.mkgguf import MODELS, Weights, add_keys, tensor_list
from tinygrad import Device, Tensor, dtypes
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.gguf import GGUFFile, GGUFTensor
from tinygrad.apps.mla import Config, Transformer
from tinygrad.apps.quantized import QuantizedWeight, held_bytes, interleaved, plane_names, split
from tinygrad.nn.kernel import UNIT
from tinygrad.nn.latent_cache import Pages
from tinygrad.nn.split_kv import plan_splits, split_length
from tinygrad.dtype import AddrSpace
from tinygrad.engine.realize import compile_linear
from tinygrad.helpers import Context
from tinygrad.nn import cpu, intrinsics
from tinygrad.renderer import Renderer
from tinygrad.renderer.cstyle import ClangRenderer, CUDARenderer, MetalRenderer
from tinygrad.schedule.rangeify import DEVICE_MAX_BUFS
from tinygrad.uop.ops import Ops, UOp

# ---- models without a file ----

def stand_in(model:str, quant:str="Q4_0") -> GGUFFile:
  """A model of extra/mkgguf.py (glm, v3, kimi, moonlight, ds2lite, youtu, small-…) with zeros for weights, and no memory behind them"""
  spec = MODELS[model]
  add_keys(writer := GGUFWriter(None, "deepseek2"), spec, quant)
  tensors = [(name, shape, kind, math.prod(shape) // GGML_QUANT_SIZES[kind][0] * GGML_QUANT_SIZES[kind][1])
             for name, shape, kind, _ in tensor_list(spec, quant, spec.blocks)]
  zeros = np.zeros(max(size for *_, size in tensors), np.uint8)
  kv = {k: float(np.float32(v.value)) if isinstance(v.value, float) else v.value for k, v in writer.kv_data[0].items()}  # a file holds them so
  return GGUFFile(Path(f"{model}-{quant}"), kv,
                  {name: GGUFTensor(name, shape, kind, zeros[:size]) for name, shape, kind, size in tensors})

def random_weights(tensors:list[GGUFTensor]) -> Iterator[GGUFTensor]:
  """The same tensors with random data: products keep the size of their input, norms are about 1"""
  weights = Weights(seed=0, pool_bytes=1 << 24)
  for t in tensors:
    std = 1.0 if t.name == "token_embd.weight" else 0.01 if t.name.endswith("bias") else t.shape[-1] ** -0.5
    data = weights.norm(t.shape) if t.name.endswith("norm.weight") else weights.make(t.shape, t.type, std)
    yield t._replace(data=data.reshape(-1))

def of_block(f:GGUFFile, i:int) -> dict[str, GGUFTensor]:
  """The tensors of block i, by their names within the block"""
  return {name.removeprefix(f"blk.{i}."): t for name, t in f.tensors.items() if name.startswith(f"blk.{i}.")}

def with_blocks(f:GGUFFile, blocks:list[int]) -> GGUFFile:
  """The file as if it held just these of its blocks, dense ones first; one named twice is there twice"""
  c = Config.from_gguf(f)
  kv = f.kv | {"deepseek2.block_count": len(blocks), "deepseek2.leading_dense_block_count": sum(i < c.n_dense for i in blocks),
               "deepseek2.nextn_predict_layers": 0, "deepseek2.expert_gating_func": int(c.gating)}  # the guess of a missing key goes by block_count
  tensors = {name: t for name, t in f.tensors.items() if not name.startswith("blk.")}
  for j, i in enumerate(blocks): tensors |= {f"blk.{j}.{name}": t._replace(name=f"blk.{j}.{name}") for name, t in of_block(f, i).items()}
  return GGUFFile(f.path, kv, tensors)

# ---- bytes ----

def read_bytes(f:GGUFFile, c:Config, i:int, part:str="", tokens:int=1) -> int:
  """Bytes of weights that a step of so many sequences reads of block i: all of it, or its "attn" or "ffn" part; of the experts, the chosen"""
  def share(name:str, size:int) -> int: return round(size * c.distinct_experts(tokens) / c.n_experts) if "_exps." in name else size
  tensors = {name: t for name, t in of_block(f, i).items() if not part or name.startswith("attn") == (part == "attn")}
  return sum(share(name, held_bytes(t.type, t.shape)) for name, t in tensors.items())
def head_bytes(f:GGUFFile, c:Config, tokens:int=1) -> int:
  """… of what is no block's: a row of the embedding each, the last norm, the head (the embedding where the two are tied)"""
  embd = f.tensors["token_embd.weight"]
  rows, norm, head = (held_bytes(t.type, t.shape) for t in (embd, f.tensors["output_norm.weight"], f.tensors.get("output.weight", embd)))
  return rows * tokens // c.vocab_size + norm + head

def bytes_moved(name:str, estimate:int, model:Transformer, position:int) -> int:
  """Bytes that a kernel moves in a step whose last token is at `position`, by what its launch says. Attention's kernels say those of a full cache
  (the position is on the device, out of an estimate's reach): they read what is written of it."""
  c = model.config
  if name.startswith(("mla_attention", "mla_split_kv", "mla_prefill")): return estimate * (position + 1) // model.cache[0].shape[0]
  if name.startswith(("mla_combine", "combine_mul_mat")) and (t := intrinsics.target_of(Device.DEFAULT)):
    splits, step = plan_splits(t, c.n_heads, Pages(model.pages, model.pages, 1, model.row))
    written = position // split_length(UOp.const(position), splits, step).vmin + 1
    if name.startswith("mla_combine"): return estimate * written // splits
    return estimate - (splits - written) * c.n_heads * (c.kv_lora_rank + 2) * 4
  return estimate

def cache_row_bytes(c:Config, to:str) -> int:
  """Bytes of a token's rows of the cache, on a target (a key of LANGUAGES)"""
  with no_device(to): return c.n_blocks * c.cache_dim * (4 if intrinsics.target_of(Device.DEFAULT) is None else 2)  # as Transformer has it

# ---- kernels ----

def batch_count(kernels:int, first:int) -> int:
  """Graphs that so many kernels in a row are. first: how many the first holds, the next ones twice as many each; 0: all in one"""
  if kernels < 2: return 0
  return math.ceil(math.log2(kernels / first + 1)) if first else 1

LANGUAGES:dict[str, tuple[type[Renderer], str]] = {
  "CUDA": (CUDARenderer, "sm_90"), "METAL": (MetalRenderer, "Apple9"), "CPU": (ClangRenderer, "x86_64")}

@functools.cache
def _without_compiler(renderer:type[Renderer]) -> type[Renderer]:
  """The renderer as it is, but for its compiler, which not every machine has: a kernel stays text"""
  return type(renderer.__name__, (renderer,), {"__init__": Renderer.__init__})

def _unread(cls:type[QuantizedWeight], kind:GGMLQuantizationType, shape:tuple[int, ...], data:np.ndarray, device:str|None=None) -> QuantizedWeight:
  """In place of QuantizedWeight.load: planes of the right shapes and types, with nothing in them"""
  if cpu.is_cpu(Device.DEFAULT) and shape[-1] % UNIT == 0:
    layout = interleaved(kind)
    return cls(kind, shape, {"stream": Tensor.empty(*layout.shape(shape, shape[-1] // (layout.units * UNIT)), dtype=dtypes.uint32)})
  planes = split(kind, shape, Tensor.empty(data.size, dtype=dtypes.uint8), None)
  return cls(kind, shape, {name: Tensor.empty(*p.shape, dtype=p.dtype) for name, p in zip(plane_names(kind, len(shape)), planes, strict=True)})

@contextlib.contextmanager
def no_device(target:str) -> Iterator[None]:
  """Schedules and renders for a target (a key of LANGUAGES) on the NULL device: nothing is compiled, run or stored, and loading reads no weights"""
  renderer, arch = LANGUAGES[target]
  null, name = Device["NULL"], renderer.__name__.removesuffix("Renderer").upper()
  kept, null.renderers = null.renderers, [_without_compiler(renderer)]
  try:
    with Context(DEV=f"NULL:{name}:{arch}", PARALLEL=0, BEAM=0, MAX_KERNEL_BUFFERS=DEVICE_MAX_BUFS.get(target, 0)), \
         mock.patch.object(QuantizedWeight, "load", classmethod(_unread)): yield
  finally: null.renderers = kept

Kinds = list[tuple[int, int]]

def _token(f:GGUFFile, max_context:int, parallel:int) -> tuple[Transformer, list[list[UOp]], list[int]]:
  """A model with one block of each kind; the launches of its greedy decode step of so many sequences, as scheduled, part by part: what comes before
  the blocks, the blocks, the head and the choice; how many times a step has each part. Blocks of the same shapes and types are a kind, in the file's
  order."""
  c, kinds = Config.from_gguf(f), {}
  for i in range(c.n_blocks): kinds.setdefault(tuple((name, t.shape, t.type) for name, t in of_block(f, i).items()), []).append(i)
  model = Transformer.from_gguf(with_blocks(f, [blocks[0] for blocks in kinds.values()]), max_context)
  parts = Runner(model).batch_of(parallel).record(compiled=False).parts
  return model, parts, [1] * (len(parts) - len(kinds) - 2) + [*map(len, kinds.values()), 1, 1]

def count_kernels(f:GGUFFile, target:str, max_context:int=4096, parallel:int=1) -> tuple[int, Kinds]:
  """(kernels a step, [(blocks of a kind, kernels a block)]) of the greedy decode step of so many sequences for a target, with no device"""
  with no_device(target): model, parts, times = _token(f, max_context, parallel)
  return sum(n * len(part) for n, part in zip(times, parts)), [(n, len(part)) for n, part in zip(times, parts)][-2 - len(model.blk):-2]

class Kernel(NamedTuple):
  name: str
  times: int               # a step
  read: int                # bytes it moves
  shared: int              # bytes of a block of threads, together
  threads: int             # of a launch

def shared_bytes(program:UOp) -> int:
  """Bytes of a threadgroup's memory that a rendered kernel takes"""
  return sum(u.max_numel() * u.dtype.itemsize for u in program.src[1].src if u.op is Ops.BUFFER and u.addrspace is AddrSpace.LOCAL)

def render_kernels(f:GGUFFile, target:str, max_context:int=4096, depth:int=0, parallel:int=1) -> list[Kernel]:
  """The kernels of a step of so many sequences, each with `depth` tokens before it, each once, lowered and rendered for the target: slower than
  counting, and finds what the target cannot say"""
  kernels = []
  with no_device(target):
    model, parts, repeats = _token(f, max_context, parallel)
    times, programs = Counter(), {}
    for n, part in zip(repeats, parts):
      for call in compile_linear(UOp(Ops.LINEAR, src=tuple(part))).src:
        times[call.src[0].key] += n
        programs[call.src[0].key] = call.src[0]
    for key, n in times.items():
      p = programs[key]
      read = p.src[0].arg.estimates
      threads = math.prod((*p.arg.global_size, *(p.arg.local_size or ())))
      kernels.append(Kernel(p.arg.name, n, bytes_moved(p.arg.name, read.mem, model, depth) if read else 0, shared_bytes(p), threads))
  return kernels

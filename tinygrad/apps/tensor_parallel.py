"""A model cut by tensors over several devices: each block runs on all of them at once, on a share of its heads and of its hidden dimensions.

  share of device i             rows of attn_q_b (attn_q), attn_k_b, attn_v_b and columns of attn_output: its heads
                                rows of gate and up, columns of down: its part of the hidden dimension, dense, shared and of every expert
                                rows of the head: its part of the vocabulary
  whole on every device         norms, attn_q_a, attn_kv_a_mqa, the router, the cache of latent rows
  on the first device alone     the embedding, and with it the head that it is in some models

Every device holds x whole, the same bytes, and so chooses the same experts and writes the same rows. Its attention, and its feed-forward, give an
addend of the next x: two all-reduces a block. Only the first device's addend has x in it, the residual; the others add zeros.

A file's matrices are cut between blocks of its format, whole heads for attention. All shares are of the same shape, so all devices run the same
kernels, and add in the same order what they compute each for itself. Where a dimension does not divide, the last devices' shares end in zeros: no
device holds more for that, and none of them waits longer than for the fullest.
"""
from __future__ import annotations
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, Callable, NamedTuple, Sequence
import numpy as np
from tinygrad import Device, Tensor
from tinygrad.apps.capture import to_device
from tinygrad.apps.gguf import GGUFFile, GGUFTensor
from tinygrad.apps.mla import (Block, Config, Loads, Progress, RMSNorm, Run, Transformer, apply, block_of, checked_tensors, copied,
                               kept_as, load_tensor, parts_of, spare_rows, unpadded)
from tinygrad.apps.quantized import QuantizedEmbedding, QuantizedLinear, block_size, held_bytes, prepare
from tinygrad.apps.rope import Rope
from tinygrad.apps.shard import memory_of
from tinygrad.helpers import JIT
from tinygrad.nn.all_reduce import FEW, Exchange, Few, Many, all_reduce
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.kernel import UNIT
from tinygrad.nn.norm_linear import norm_linear
from tinygrad.nn.step import Step

# ---- what a device holds ----

FIRST_ALONE = "token_embd.weight"

class Cut(NamedTuple):
  """How a tensor is shared out: each device holds so many numbers of an axis, the first device the first"""
  axis: int
  count: int

def parted(total:int, unit:int, devices:int) -> int:
  """Of `total` numbers, how many a device holds at most: whole units, shared out as evenly as can be"""
  return -(-total // (unit * devices)) * unit

def unit_of(t:GGUFTensor) -> int:
  """What a tensor's rows are cut by: blocks of its format, of floats what kernels read at once"""
  return lcm(block_size(t.type)[0], UNIT if t.shape[-1] % UNIT == 0 else 1)

def cuts(f:GGUFFile, c:Config, devices:int) -> dict[str, Cut]:
  """Of the tensors that are cut, by name. f: checked"""
  out = {"output.weight": Cut(0, parted(c.vocab_size, UNIT, devices))}
  for i in range(c.n_blocks):
    b = f"blk.{i}."
    output, value = f.tensors[b + "attn_output.weight"], c.v_dim
    heads = parted(c.n_heads, lcm(unit_of(output), value) // value, devices)
    key, row = c.nope_dim + c.rope_dim, c.nope_dim + value
    for name, axis, count in (("q", 0, heads * key), ("q_b", 0, heads * key), ("k_b", 0, heads), ("v_b", 0, heads), ("kv_b", 0, heads * row),
                              ("output", 1, heads * value)):
      out[f"{b}attn_{name}.weight"] = Cut(axis, count)
    for suffix in ("", "_exps", "_shexp"):
      if (down := f.tensors.get(f"{b}ffn_down{suffix}.weight")) is None: continue
      stack, hidden = len(down.shape) - 2, parted(down.shape[-1], unit_of(down), devices)
      out |= {f"{b}ffn_{m}{suffix}.weight": Cut(stack + (m == "down"), hidden) for m in ("gate", "up", "down")}
  return out

def share_shape(shape:tuple[int, ...], cut:Cut) -> tuple[int, ...]: return *shape[:cut.axis], cut.count, *shape[cut.axis + 1:]

def share_of(t:GGUFTensor, cut:Cut, device:int) -> GGUFTensor:
  """What of a tensor the device of that number holds, in the file's form: the mapped bytes where they lie together, else a copy. Zeros stand for what
  is behind the axis' end: in every format bytes of zero are weights of zero."""
  elements, nbytes = block_size(t.type)
  last = cut.axis == len(t.shape) - 1
  rows = t.data.reshape(*t.shape[:-1], -1, nbytes) if last else t.data.reshape(*t.shape[:-1], -1)
  count = cut.count // elements if last else cut.count
  part = rows[(slice(None),) * cut.axis + (slice(device * count, (device + 1) * count),)]
  if missing := count - part.shape[cut.axis]:
    part = np.pad(part, [(0, missing if axis == cut.axis else 0) for axis in range(part.ndim)])
  return t._replace(shape=share_shape(t.shape, cut), data=np.ascontiguousarray(part).reshape(-1))

def load_shares(f:GGUFFile, c:Config, loads:Loads, progress:Progress, devices:Sequence[str]) -> list[dict[str, Any]]:
  """What the tensors become on each device, by their names; a tensor is read once"""
  tensors, cut = [f.tensors[name] for name in loads], cuts(f, c, len(devices))
  for i, device in enumerate(devices):
    prepare(((t.type, share_shape(t.shape, cut[t.name]) if t.name in cut else t.shape) for t in tensors
             if isinstance(loads[t.name], type) and (i == 0 or t.name != FIRST_ALONE)), device)
  loaded:list[dict[str, Any]] = [{} for _ in devices]
  with ThreadPoolExecutor(len(devices)) as threads:   # a share's bytes may lie far apart in the file
    for t in progress(tensors):
      shares = threads.map(lambda i, t=t: share_of(t, cut[t.name], i) if t.name in cut else t, range(1 if t.name == FIRST_ALONE else len(devices)))
      for own, share, device in zip(loaded, shares, devices): own[t.name] = load_tensor(loads[t.name], share, device)
  return loaded

@dataclass(frozen=True)
class Devices:
  """Those of a model that is cut by tensors"""
  devices: tuple[str, ...]

class ShareSizes:
  """Bytes of what devices hold, as check_room (apps/shard.py) asks for them. largest: of a tensor on `count` devices, which lies on a card twice
  while it is loaded. Raises GGUFError"""
  def __init__(self, f:GGUFFile, cache_bits:int, count:int):
    self.config = c = Config.from_gguf(f)
    self.file = unpadded(f, c, "token_embd.weight", "output.weight")
    self.names, row = list(checked_tensors(self.file, c)), c.cache_row(cache_bits)
    self.row = c.n_blocks * row.entries * kept_as(row, Device.DEFAULT).itemsize
    self.largest, self.spare = max(self._shares(count).values()), spare_rows(Device.DEFAULT)
  def _shares(self, count:int) -> dict[str, int]:
    cut, tensors = cuts(self.file, self.config, count), [self.file.tensors[name] for name in self.names]
    return {t.name: held_bytes(t.type, share_shape(t.shape, cut[t.name]) if t.name in cut else t.shape) for t in tensors}
  def weights(self, place:Devices) -> Counter[str]:
    shares, total = self._shares(len(place.devices)), Counter[str]()
    for i, device in enumerate(place.devices):
      total[memory_of(device)] += sum(size for name, size in shares.items() if i == 0 or name != FIRST_ALONE)
    return total
  def cached(self, place:Devices) -> Counter[str]:
    """Of each memory, a token's rows"""
    return Counter({memory: devices * self.row for memory, devices in Counter(map(memory_of, place.devices)).items()})
  def beside(self, _:Devices, memory:str) -> int:
    """What loading takes beside the weights"""
    return 0 if memory == "CPU" else self.largest

# ---- a step, in parts ----

class Head(NamedTuple):
  """Rows of the head, and the norm before it"""
  norm: RMSNorm
  output: QuantizedLinear

class Share(NamedTuple):
  """A device's part of the model"""
  device: str
  blk: list[Block]
  cache: list[Tensor]
  rope: Rope
  head: Head|None   # None: the first device has it whole

def block_on_all(blocks:list[Block], steps:list[Step], xs:list[Tensor], caches:list[Tensor], ropes:list[Rope],
                 zeros:list[Tensor], exchange:Exchange|None=None) -> tuple[Tensor, ...]:
  """A block on all devices at once, what each has by its number. xs: float32 (T, D), the same on each; zeros: of the same shape, on each but the
  first -> x behind the block on each device, and the caches with T more rows"""
  attended = [block.attn(step, x, cache, rope, residual)
              for block, step, x, cache, rope, residual in zip(blocks, steps, xs, caches, ropes, [xs[0], *zeros])]
  xs = all_reduce([part for part, _ in attended], exchange)
  xs = all_reduce([block.ffn(step, x, residual) for block, step, x, residual in zip(blocks, steps, xs, [xs[0], *zeros])], exchange)
  return *xs, *(cache for _, cache in attended)

def write_caches(blocks:list[Block], steps:list[Step], xs:list[Tensor], caches:list[Tensor], ropes:list[Rope]) -> tuple[Tensor, ...]:
  """Block.write_cache on all devices"""
  return tuple(Block.write_cache(*of_device) for of_device in zip(blocks, steps, xs, caches, ropes))

def head_on_all(step:Step, hidden:Tensor, heads:list[Head], vocab:int) -> Tensor:
  """output_head on all devices -> float32 (T, vocab) on that of hidden"""
  parts = [norm_linear(step, hidden.to(head.output.device), head.norm, [head.output])[0] for head in heads]
  first, *others = [part.to(hidden.device) for part in parts]
  return first.cat(*others, dim=1)[:, :vocab].contiguous()

MOST_TOKENS = 64   # of a step of decoding

def exchange_of(devices:Sequence[str], few:int, many:int) -> Exchange|None:
  """For sums of as many numbers as a step of decoding has at most, and a chunk of a prompt. None: the devices do not reach each other's memory, or a
  step is not one graph, without which one may wait for what is not launched"""
  target, allocators = target_of(devices[0]), [Device[device].allocator for device in devices]
  if target is None or target.peer_send is None or JIT >= 2: return None
  if not all(own is other or own.reaches(other) for own in allocators for other in allocators): return None
  def room(kind:type[Any], most:int) -> Any:
    memories = [to_device(np.zeros(kind.words(len(devices), most), np.uint32), device) for device in devices]
    addresses = np.uint64([allocator.address(memory.uop.base.buffer._buf) for allocator, memory in zip(allocators, memories)])
    return kind(most, memories, [to_device(addresses, device) for device in devices])
  return Exchange(room(Few, min(few, FEW)), room(Many, max(few, many)))

class TensorParallel(Transformer):
  """The model over several devices. What a Transformer holds is here the first device's share; shares: of all devices, in their order"""
  in_turn = False
  def __init__(self, devices:Sequence[str], blocks:list[list[Block]], heads:list[Head|None], *args:Any):
    """blocks, heads: of each device. args: a Transformer's, of the first device"""
    super().__init__(*args)
    self.devices = tuple(devices)
    self.ropes |= {device: self.rope_on(device) for device in devices[1:]}
    caches = [self.cache, *(self.cache_of([device] * len(self.blk)) for device in devices[1:])]
    self.shares = [Share(device, own, cache, self.ropes[device], head) for device, own, cache, head in zip(devices, blocks, caches, heads)]
    self.zeros:dict[int, list[Tensor]] = {}   # by tokens of a step: on each device but the first
    self.exchange = exchange_of(self.devices, few=MOST_TOKENS * self.config.dim, many=self.prefill_sizes[-1] * self.config.dim)

  def _zeros(self, tokens:int) -> list[Tensor]:
    if tokens not in self.zeros:
      self.zeros[tokens] = [to_device(np.zeros((tokens, self.config.dim), np.float32), share.device) for share in self.shares[1:]]
    return self.zeros[tokens]

  def _through(self, n:int, step:Step, ids:Tensor, run:Run) -> tuple[list[Step], list[Tensor]]:
    """The step on each device, and float32 (T, D) in front of block n"""
    xs, steps = [run(QuantizedEmbedding.__call__, self.token_embd, ids)], [self.planned(step, run)]
    for share in self.shares[1:]:
      x, start, tables = run(copied, share.rope.table, xs[0], step.start, step.tables)
      xs, steps = [*xs, x], [*steps, self.planned(replace(step, start=start, tables=tables, plan=None), run)]
    ropes, zeros = [share.rope for share in self.shares], self._zeros(step.tokens)
    exchange = None if run is apply else self.exchange   # applied, a launch may wait for memory while another device waits for it
    for i in range(n):
      xs = list(run(block_on_all, self._of_all("blk", i), steps, xs, self._of_all("cache", i), ropes, zeros, exchange)[:len(xs)])
    return steps, xs
  def _of_all(self, what:str, i:int) -> list: return [getattr(share, what)[i] for share in self.shares]

  def hidden(self, step:Step, ids:Tensor, run:Run=apply) -> Tensor: return self._through(len(self.blk), step, ids, run)[1][0]
  def head(self, step:Step, hidden:Tensor, run:Run=apply) -> Tensor:
    heads = [share.head for share in self.shares if share.head is not None]
    return run(head_on_all, step, hidden, heads, self.config.vocab_size) if heads else super().head(step, hidden, run)
  def prefill(self, step:Step, ids:Tensor, run:Run=apply) -> Tensor:
    last = len(self.blk) - 1
    steps, xs = self._through(last, step, ids, run)
    caches = run(write_caches, self._of_all("blk", last), steps, xs, self._of_all("cache", last), [share.rope for share in self.shares])
    return caches[0]

  @staticmethod
  def from_gguf(f:GGUFFile, devices:Sequence[str], max_context:int|None=None, progress:Progress=lambda tensors: tensors,
                pool:Callable[[Transformer], int]|None=None, cache_bits:int=16) -> TensorParallel:
    """As Transformer's, onto several devices. pool is asked for the first, which holds the embedding beside its share"""
    c = Config.from_gguf(f)
    c.cache_row(cache_bits)
    f = unpadded(f, c, "token_embd.weight", "output.weight")
    first, *others = loaded = load_shares(f, c, checked_tensors(f, c), progress, devices)
    embd, blk, norm, output = parts_of(first, c)
    blocks = [blk, *([block_of(w, c, i) for i in range(c.n_blocks)] for w in others)]
    heads = [Head(RMSNorm(w["output_norm.weight"], c.norm_eps), w["output.weight"]) if "output.weight" in w else None for w in loaded]
    return TensorParallel(devices, blocks, heads, c, embd, blk, norm, output, max_context or c.context_length, pool, cache_bits)

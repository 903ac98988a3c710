"""Which device holds what of a model: several devices of one host, by layers.

Each device has a run of neighbouring blocks with their rows of the cache, as many as make the bytes of all as equal as can be. A token's vector is
handed on from one to the next, and from the last back to the first, which has the embedding and the head: tokens are drawn where the next step
begins, and nothing but the vector crosses a border. A model whose head is its embedding has it once.

The experts of the first blocks that have some may lie on the CPU, and their router with them: one card and much memory run a large model so. The
vector goes there and back in each of these blocks; the shared expert, which every token takes, stays on the card. A long chunk of a prompt, whose
tokens take most experts, has them copied to the card instead, block by block (MoE in apps/mla.py), where the card has room for that.
"""
from __future__ import annotations
import itertools, re
from collections import Counter
from dataclasses import dataclass
from typing import Callable, Iterable, Mapping
from tinygrad import Device

class PlacementError(Exception):
  """The model cannot lie so. str(e) is one line."""

@dataclass(frozen=True)
class Placement:
  """home: of the embedding, the head, and a block that drafts. blocks: of each block, with its part of the cache; experts: of its router and
  experts, whether it has some or not. brings: whether long chunks of a prompt have those copied that lie elsewhere"""
  home: str
  blocks: tuple[str, ...]
  experts: tuple[str, ...]
  brings: bool = True

  def of(self, name:str) -> str:
    """The device of a tensor, by its name in the file"""
    found = re.match(r"blk\.(\d+)\.(ffn_gate_inp|exp_probs_b|ffn_\w+_exps)?", name)
    if found is None or (block := int(found[1])) >= len(self.blocks): return self.home
    return (self.experts if found[2] else self.blocks)[block]
  @property
  def devices(self) -> tuple[str, ...]: return tuple(dict.fromkeys([self.home, *self.blocks, *self.experts]))

def memory_of(device:str) -> str:
  """What a device's memory is shared by: cards have their own, the machine's devices are one"""
  kind = device.split(":")[0]
  return kind if kind in ("CPU", "METAL") else device

def device_names(first:str, count:int) -> tuple[str, ...]:
  """`count` devices of a kind from the first on: CUDA, CUDA:1, …"""
  kind, _, number = first.partition(":")
  return tuple(Device.canonicalize(f"{kind}:{int(number or 0) + i}") for i in range(count))

# ---- sharing out ----

@dataclass(frozen=True)
class Sizes:
  """Bytes of a model's parts. experts: of each block's router and experts, 0 where it has none; blocks: its other weights; home: those of no block;
  row: of the cache, a token's in one block; largest: the largest tensor, which lies on a card twice while it is loaded; spare: rows that a cache has
  beside those that are asked for; drafting: how many blocks that draft have rows, at home"""
  blocks: tuple[int, ...]
  experts: tuple[int, ...]
  home: int
  row: int
  largest: int
  spare: int = 0
  drafting: int = 0

  @staticmethod
  def of(blocks:int, row:int, tensors:Mapping[str, int], spare:int=0) -> Sizes:
    """tensors: bytes by name"""
    parts:Counter[str] = Counter()
    place = Placement("", tuple(f"b{i}" for i in range(blocks)), tuple(f"e{i}" for i in range(blocks)))
    for name, size in tensors.items(): parts[place.of(name)] += size
    return Sizes(tuple(parts[f"b{i}"] for i in range(blocks)), tuple(parts[f"e{i}"] for i in range(blocks)), parts[""], row,
                 max(tensors.values()), spare)
  @property
  def with_experts(self) -> list[int]:
    """The blocks that have some"""
    return [i for i, size in enumerate(self.experts) if size]

  def weights(self, place:Placement) -> Counter[str]:
    """Of each memory"""
    total = Counter({memory_of(place.home): self.home})
    for devices, sizes in ((place.blocks, self.blocks), (place.experts, self.experts)):
      for device, size in zip(devices, sizes): total[memory_of(device)] += size
    return total
  def cached(self, place:Placement) -> Counter[str]:
    """Of each memory, a token's rows"""
    blocks = Counter(map(memory_of, [*place.blocks, *[place.home] * self.drafting]))
    return Counter({memory: count * self.row for memory, count in blocks.items()})
  def brought(self, place:Placement) -> Counter[str]:
    """Of each memory, what a chunk of a prompt takes for copies of a block's experts: as they lie there, and as they are to lie"""
    most:Counter[str] = Counter()
    for home, there, size in zip(place.blocks, place.experts, self.experts):
      if place.brings and memory_of(home) != memory_of(there): most[memory_of(home)] = max(most[memory_of(home)], 2 * size)
    return most
  def beside(self, place:Placement, memory:str) -> int:
    """What loading takes beside the weights, and then chunks of a prompt do. The CPU's weights are made from the file as it lies"""
    return max(0 if memory == "CPU" else self.largest, self.brought(place)[memory])

def runs(sizes:list[int], first:int, count:int) -> list[int]:
  """How many neighbouring parts each of `count` has, at least one, so that the largest sum is the least that it can be. first: what the first has
  beside them; it is spared where there is a choice"""
  def within(most:int) -> list[int]|None:
    """The last takes as many as fit, then the one before it"""
    out, end = [], len(sizes)
    for number in reversed(range(count)):
      taken, left = 0, most - (0 if number else first)
      while end > number and (number == 0 or taken == 0 or sizes[end - 1] <= left): taken, left, end = taken + 1, left - sizes[end - 1], end - 1
      if left < 0: return None
      out.append(taken)
    return out[::-1]
  low, high = 0, first + sum(sizes)
  while low < high:
    if within(middle := (low + high) // 2) is None: low = middle + 1
    else: high = middle
  return within(low) or []

def by_layers(sizes:Sizes, devices:tuple[str, ...], tokens:int, cpu_experts:int=0) -> Placement:
  """tokens: of a cache's rows. cpu_experts: blocks whose experts the CPU has. Raises PlacementError."""
  blocks, with_experts = len(sizes.blocks), sizes.with_experts
  if len(devices) > blocks: raise PlacementError(f"expected at most {blocks} devices, as many as the model has blocks, found {len(devices)}")
  if cpu_experts > len(with_experts):
    raise PlacementError(f"expected at most {len(with_experts)} blocks of experts on the CPU, as many as the model has, found {cpu_experts}")
  away = set(with_experts[:cpu_experts])
  own = [sizes.blocks[i] + tokens * sizes.row + (0 if i in away else sizes.experts[i]) for i in range(blocks)]
  counts = runs(own, sizes.home + tokens * sizes.row * sizes.drafting, len(devices))
  places = tuple(device for device, count in zip(devices, counts) for _ in range(count))
  # a CPU's own experts lie on another device of it: for tests
  cpu = next(name for name in device_names("CPU", len(devices) + 1) if name not in devices)
  return Placement(devices[0], places, tuple(cpu if i in away else device for i, device in enumerate(places)))

# ---- what fits ----

Free = Callable[[str], int|None]
def gb(size:float) -> str: return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"

def room(sizes:Sizes, place:Placement, free:Free) -> int|None:
  """How many tokens' rows fit beside the weights, negative where these do not; None where no memory says how much it has"""
  weights, cached, most = sizes.weights(place), sizes.cached(place), []
  for device in place.devices:
    if (there := free(device)) is None: continue
    left = there - weights[memory_of(device)] - sizes.beside(place, memory_of(device))
    if left < 0: return -1
    if rows := cached[memory_of(device)]: most.append(max(left // rows - sizes.spare, -1))
  return min(most) if most else None

def fits(sizes:Sizes, place:Placement, tokens:int, free:Free) -> bool: return (rows := room(sizes, place, free)) is None or rows >= tokens

def check_room(sizes:Sizes, place:Placement, tokens:int, free:Free, fewer:str, more:Iterable[tuple[str, Placement]]) -> None:
  """Raises PlacementError where weights and rows of so many tokens do not fit. fewer: how to ask for fewer; more: other ways to place the model, and
  how to ask for them"""
  if (fitting := room(sizes, place, free)) is None or fitting >= tokens: return
  memories = {memory_of(device): there for device in reversed(place.devices) if (there := free(device)) is not None}
  weights, cached = sizes.weights(place), sizes.cached(place)
  rows = {memory: (tokens + sizes.spare) * cached[memory] for memory in memories}
  short = max(memories, key=lambda m: weights[m] + rows[m] + sizes.beside(place, m) - memories[m])
  ways = [*([f"{fewer} {fitting}"] if fitting >= 2 else []), *itertools.islice((how for how, other in more if fits(sizes, other, tokens, free)), 1)]
  parts = (weights[short], " of weights"), (rows[short], " of the cache"), (sizes.beside(place, short), " more while it is loaded")
  raise PlacementError(f"{short} has {gb(memories[short])} free, and is to hold {', '.join(gb(size) + what for size, what in parts if size)}: "
                       + (f"{' or '.join(ways)} would fit" if ways else "no way to place it here fits"))

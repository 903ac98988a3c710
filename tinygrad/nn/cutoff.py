"""The cut of top-k and top-p: the least number that is kept of a row. No sort: its bits are found from the highest on.

On a GPU, four bits a launch. Every block adds up, of its part of the row, what lies at or above each of 16 steps; the next launch sees which of them
reach the target, and goes on between two:

  low += 2^shift' · (how many of the last steps reach the target - 1)        each block, by itself
  sums[block, i] = Σ mass of the numbers of this block at or above low + 2^shift · i
"""
from __future__ import annotations
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.nn import cpu
from tinygrad.nn.intrinsics import Target, shuffle, target_of
from tinygrad.nn.kernel import behind_wait, empty, launch, local, optional, ordered, sum_in_order
from tinygrad.nn.primitive import primitive
from tinygrad.uop.ops import Ops

BITS = 4
STEPS = 1 << BITS
SHIFTS = range(32 - BITS, -BITS, -BITS)

@primitive(outputs=lambda x, mass, target: empty(x, x.shape[0], dtype=dtypes.uint32))
def cutoff(x:Tensor, mass:Tensor|None, target:Tensor) -> Tensor:
  """The largest cut such that the mass of the numbers whose `ordered` is at or above it reaches the target.
  x: float32 (S, V); mass: uint64 (S, V), None: each number's is 1; target: uint64 (S,), without mass uint32, at most the row's whole mass
  -> uint32 (S,). Whole numbers: a sum is the same in whatever order."""
  keys = ordered(x).unsqueeze(1)
  masses = Tensor.ones(x.shape[1], dtype=dtypes.uint32).to(x.device) if mass is None else mass.unsqueeze(1)
  low = Tensor.zeros(x.shape[0], 1, dtype=dtypes.uint32).to(x.device)
  for shift in SHIFTS:
    steps = low + (Tensor.arange(STEPS, dtype=dtypes.uint32).to(x.device) << shift)                                  # (S, 16)
    reached = (keys >= steps.unsqueeze(2)).where(masses, 0).sum(2) >= target.unsqueeze(1)                             # ones, then zeros
    low = (low + ((reached.cast(dtypes.uint32).sum(1, keepdim=True).cast(dtypes.uint32).maximum(1) - 1) << shift)).contiguous()
  return low.reshape(-1)

@cutoff.form("cpu_decode", takes=lambda x, mass, target: cpu.is_cpu(x.device))
def cutoff_cpu(x:Tensor, mass:Tensor|None, target:Tensor) -> Tensor:
  """A row's histogram by the highest bits, then of what is in the bucket that reaches the target"""
  S, V = x.shape
  body = f"""for (; job < last; job++) {{
    unsigned found = 0; unsigned long above = 0, sums[2048];
    for (int shift = 21; ; shift = shift > 10 ? 10 : 0) {{
      int bits = shift ? 11 : 10;
      for (int i = 0; i < 2048; i++) sums[i] = 0;   /* memset would be a call, to where a jump may not reach */
      for (long i = job * {V}L; i < (job + 1) * {V}L; i++) {{
        unsigned key = *(const unsigned*)(x + i);
        key = key >> 31 ? ~key : key | 0x80000000u;
        if ((unsigned long)key >> (shift + bits) == found) sums[key >> shift & ((1u << bits) - 1)] += {"1" if mass is None else "mass[i]"};
      }}
      int bucket = (1 << bits) - 1;
      for (; bucket > 0 && above + sums[bucket] < target[job]; bucket--) above += sums[bucket];
      found = found << bits | bucket;
      if (!shift) break;
    }}
    y[job] = found;
  }}"""
  name = f"cutoff{'' if mass is None else '_mass'}_{V}_{S}"
  return cpu.launch(name, {"y": empty(x, S, dtype=dtypes.uint32)}, {"x": x, **optional(mass=mass), "target": target}, "", body, S)[0]

# ---- on a GPU ----

BLOCKS, THREADS = 64, 256   # of a row; of a block

def shuffle_words(target:Target, value:UOp, distance:int) -> UOp:
  """As shuffle; of a uint64 word by word"""
  if value.dtype is not dtypes.uint64: return shuffle(target, value, distance)
  low, high = (shuffle(target, word.cast(dtypes.uint32), distance).cast(dtypes.uint64) for word in (value, value >> 32))
  return (high << 32) | low
def add_of_lane(target:Target, value:UOp, other:UOp, distance:int) -> UOp:
  """value + the `other` of the lane whose number differs by the bit `distance`"""
  return value + shuffle_words(target, other, distance)

def sums_of_warp(target:Target, values:list[UOp], lane:UOp) -> UOp:
  """The sums over a warp of each of 16 values: lane i has that of value i // 2"""
  distance = target.lanes // 2
  while len(values) > 1:   # a lane gives half of its values away, and has the other half's sums
    half, upper = len(values) // 2, (lane // distance % 2).eq(1)
    pairs = list(zip(values[:half], values[half:]))
    values = [add_of_lane(target, upper.where(high, low), upper.where(low, high), distance) for low, high in pairs]
    distance //= 2
  return add_of_lane(target, values[0], values[0], distance)

def narrowed(target:Target, buffers:dict[str, UOp], row:UOp, thread:UOp, shift:int) -> UOp:
  """low as the sums of the launch before this one, by steps of 2^shift, make it. 16 threads of 256 add up a step's sums"""
  step, part = thread // STEPS, thread % STEPS
  mine = sum_in_order(buffers["sums"][(row * BLOCKS + part * (BLOCKS // STEPS) + i) * STEPS + step].load() for i in range(BLOCKS // STEPS))
  for distance in (8, 4, 2, 1): mine = add_of_lane(target, mine, mine, distance)
  reached = local(STEPS, dtypes.uint32, 1)
  store = reached[step.valid(part.eq(0))].store((mine >= buffers["target"][row].load()).where(UOp.const(1, dtypes.uint32), 0))
  reached = reached.after(UOp(Ops.BARRIER, src=(store,)))
  count = sum_in_order(reached[i].load() for i in range(STEPS)).maximum(1) - 1
  return buffers["low"][row].load() + (count << shift)

@cutoff.form("decode", takes=lambda x, mass, target: target_of(x.device) is not None)
def cutoff_decode(x:Tensor, mass:Tensor|None, target:Tensor) -> Tensor:
  gpu, (S, V) = target_of(x.device), x.shape
  assert gpu is not None
  dtype:DType = dtypes.uint32 if mass is None else dtypes.uint64
  last:dict[str, Tensor] = {}   # what a launch leaves for the next one
  for shift in SHIFTS:
    def of_blocks(buffers:dict[str, UOp], shift:int=shift) -> list[UOp]:
      block, row, thread = UOp.special(BLOCKS, "gidx0"), UOp.special(S, "gidx1"), UOp.special(THREADS, "lidx0")
      lane, warp, warps, buffers = thread % gpu.lanes, thread // gpu.lanes, THREADS // gpu.lanes, behind_wait(gpu, buffers)
      low = narrowed(gpu, buffers, row, thread, shift + BITS) if "sums" in buffers else UOp.const(0, dtypes.uint32)
      totals = [UOp.const(0, dtype)] * STEPS
      for turn in range(-(-V // (BLOCKS * THREADS))):
        place = (turn * BLOCKS + block) * THREADS + thread
        index = row * V + place.minimum(V - 1)
        key = ordered(buffers["x"][index].load())
        number = (place < V).where(UOp.const(1, dtype) if mass is None else buffers["mass"][index].load(), 0)
        totals = [total + (key >= low + (i << shift)).where(number, 0) for i, total in enumerate(totals)]
      shared = local(warps * STEPS, dtype, 0)
      store = shared[(warp * STEPS + lane // 2).valid((lane % 2).eq(0))].store(sums_of_warp(gpu, totals, lane))
      shared = shared.after(UOp(Ops.BARRIER, src=(store,)))
      whole = sum_in_order(shared[i * STEPS + thread.minimum(STEPS - 1)].load() for i in range(warps))
      return [buffers["parts"][((row * BLOCKS + block) * STEPS + thread).valid(thread < STEPS)].store(whole),
              buffers["from"][row.valid(block.eq(0) & thread.eq(0))].store(low)]
    outs = {"parts": empty(x, S, BLOCKS, STEPS, dtype=dtype), "from": empty(x, S, dtype=dtypes.uint32)}
    sums, low = launch(f"cutoff_part_{shift}", outs, {"x": x, **optional(mass=mass), **last}, of_blocks)
    last = {"sums": sums, "low": low, "target": target}
  def of_all(buffers:dict[str, UOp]) -> list[UOp]:
    row, thread, buffers = UOp.special(S, "gidx0"), UOp.special(THREADS, "lidx0"), behind_wait(gpu, buffers)
    return [buffers["y"][row.valid(thread.eq(0))].store(narrowed(gpu, buffers, row, thread, 0))]
  return launch("cutoff_whole", {"y": empty(x, S, dtype=dtypes.uint32)}, last, of_all)[0]

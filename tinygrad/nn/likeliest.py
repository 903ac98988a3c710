"""The largest logits of each row, in their order; the total that makes probabilities of logits; and what a step says of both.

A number and its place are one whole number, its key: the `ordered` bits above, the place's complement below. No two are equal, and of two equal
numbers the lower place has the larger key. So the next largest is the largest below the last one, and nothing is taken out or marked.

On a GPU, two launches: every block finds the largest of its part of the row, one block those of all parts.
"""
from __future__ import annotations
import math
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.nn import cpu
from tinygrad.nn.cutoff import shuffle_words
from tinygrad.nn.intrinsics import Target, target_of
from tinygrad.nn.kernel import block_sum, empty, exp, launch, local, ordered, sum_in_order
from tinygrad.nn.primitive import primitive
from tinygrad.uop.ops import Ops

PLACES = 0xffffffff   # a key's lower half is this less the place

@primitive(outputs=lambda x, count: empty(x, x.shape[0], count, dtype=dtypes.int32))
def likeliest(x:Tensor, count:int) -> Tensor:
  """float32 (S, V) -> int32 (S, count), the places of each row's `count` <= V largest, the largest first, the lower place first on a tie"""
  places = Tensor.arange(x.shape[1], dtype=dtypes.uint32).to(x.device).cast(dtypes.uint64)
  keys = ((ordered(x).cast(dtypes.uint64) << 32) | (PLACES - places)).contiguous()
  found = [keys.max(1, keepdim=True)]
  while len(found) < count: found.append((keys < found[-1]).where(keys, 0).max(1, keepdim=True).contiguous())
  return (PLACES - (found[0].cat(*found[1:], dim=1) & PLACES)).cast(dtypes.int32)

@likeliest.form("cpu_decode", takes=lambda x, count: cpu.is_cpu(x.device))
def likeliest_cpu(x:Tensor, count:int) -> Tensor:
  """A row by one thread, which keeps the largest so far in their order"""
  S, V = x.shape
  body = f"""for (; job < last; job++) {{
    const unsigned* row = (const unsigned*)x + job * {V}L; int* best = y + job * {count}; int found = 0;
    unsigned keys[{count}];
    for (int i = 0; i < {V}; i++) {{
      const unsigned key = row[i] >> 31 ? ~row[i] : row[i] | 0x80000000u;
      if (found == {count} && key <= keys[found - 1]) continue;
      int at = found < {count} ? found++ : found - 1;
      for (; at > 0 && key > keys[at - 1]; at--) {{ keys[at] = keys[at - 1]; best[at] = best[at - 1]; }}
      keys[at] = key; best[at] = i;
    }}
  }}"""
  return cpu.launch(f"likeliest_{V}_{count}_{S}", {"y": empty(x, S, count, dtype=dtypes.int32)}, {"x": x}, "", body, S)[0]

BLOCKS, THREADS = 64, 256   # of a row; of a block

def largest_of_warp(target:Target, key:UOp) -> UOp:
  """Of the lanes' keys, in each of them"""
  distance = target.lanes // 2
  while distance:
    key, distance = key.maximum(shuffle_words(target, key, distance)), distance // 2
  return key

def descending(target:Target, keys:list[UOp], thread:UOp, count:int) -> tuple[UOp, UOp, UOp]:
  """(loop, key, step): in its n-th turn, the n-th largest of the block's keys, of which each thread has some, in each thread; 0 behind the last. Who
  stores it ends the loop, with the step to the next"""
  warps, turn, none = THREADS // target.lanes, UOp.range(count, 0), UOp.const(0, dtypes.uint64)
  last = UOp.placeholder((1,), dtypes.uint64, slot=0, addrspace=AddrSpace.REG)
  last = last.after(last[0].store(UOp.const((1 << 64) - 1, dtypes.uint64))).after(turn)
  limit, own = last[0].load(), none
  for key in keys: own = own.maximum((key < limit).where(key, none))
  shared, first = local(2 * warps, dtypes.uint64, 1), turn % 2 * warps   # of this turn and of the one before, which others may still read
  place = (first + thread // target.lanes).valid((thread % target.lanes).eq(0))
  shared = shared.after(UOp(Ops.BARRIER, src=(shared[place].store(largest_of_warp(target, own)),)))
  found = none
  for warp in range(warps): found = found.maximum(shared[first + warp].load())
  return turn, found, last[0].store(found)

@likeliest.form("decode", takes=lambda x, count: target_of(x.device) is not None)
def likeliest_decode(x:Tensor, count:int) -> Tensor:
  target, (S, V) = target_of(x.device), x.shape
  assert target is not None
  none = UOp.const(0, dtypes.uint64)
  def of_blocks(buffers:dict[str, UOp]) -> list[UOp]:
    block, row, thread = UOp.special(BLOCKS, "gidx0"), UOp.special(S, "gidx1"), UOp.special(THREADS, "lidx0")
    keys = []
    for number in range(-(-V // (BLOCKS * THREADS))):
      place = (number * BLOCKS + block) * THREADS + thread
      value = ordered(buffers["x"][row * V + place.minimum(V - 1)].load())
      key = (value.cast(dtypes.uint64) << 32) | (place.cast(dtypes.int) ^ -1).cast(dtypes.uint32).cast(dtypes.uint64)
      keys.append((place < V).where(key, none))
    turn, key, step = descending(target, keys, thread, count)
    place = ((row * BLOCKS + block) * count + turn).valid(thread.eq(0))
    return [UOp.group(step, buffers["keys"][place].store(key)).end(turn)]
  def of_all(buffers:dict[str, UOp]) -> list[UOp]:
    row, thread = UOp.special(S, "gidx0"), UOp.special(THREADS, "lidx0")
    keys = []
    for first in range(0, BLOCKS * count, THREADS):
      key = buffers["keys"][row * (BLOCKS * count) + (first + thread).minimum(BLOCKS * count - 1)].load()
      keys.append((first + thread < BLOCKS * count).where(key, none))
    turn, key, step = descending(target, keys, thread, count)
    found = (PLACES - (key & PLACES)).cast(dtypes.int)
    return [UOp.group(step, buffers["y"][(row * count + turn).valid(thread.eq(0))].store(found)).end(turn)]
  keys, = launch(f"likeliest_part_{V}_{count}_{S}", {"keys": empty(x, S, BLOCKS, count, dtype=dtypes.uint64)}, {"x": x}, of_blocks)
  return launch(f"likeliest_whole_{count}_{S}", {"y": empty(x, S, count, dtype=dtypes.int32)}, {"keys": keys}, of_all)[0]

# ---- the total ----

@primitive(outputs=lambda x, best: empty(x, x.shape[0]))
def log_total(x:Tensor, best:Tensor) -> Tensor:
  """float32 (S, V), and int32 (S, C), its likeliest -> float32 (S,), the logarithm of Σ exp(x), the same whatever rows are beside it: here as the sum
  is of whole numbers, in kernels by a fixed order"""
  largest = x.max(axis=1)
  shares = ((x - largest.unsqueeze(1)).exp() * 2.0 ** 40).cast(dtypes.uint64)
  return largest + (shares.sum(1).cast(dtypes.float) * 2.0 ** -40).log()

@log_total.form("decode", takes=lambda x, best: target_of(x.device) is not None)
def log_total_decode(x:Tensor, best:Tensor) -> Tensor:
  target, (S, V), C = target_of(x.device), x.shape, best.shape[1]
  assert target is not None
  def of_blocks(buffers:dict[str, UOp]) -> list[UOp]:
    block, row, thread = UOp.special(BLOCKS, "gidx0"), UOp.special(S, "gidx1"), UOp.special(THREADS, "lidx0")
    largest = buffers["x"][row * V + buffers["best"][row * C].load().maximum(0).minimum(V - 1).cast(dtypes.weakint)].load()
    shares = []
    for number in range(-(-V // (BLOCKS * THREADS))):
      place = (number * BLOCKS + block) * THREADS + thread
      shares.append((place < V).where(exp(buffers["x"][row * V + place.minimum(V - 1)].load() - largest), 0.0))
    share = block_sum(target, sum_in_order(shares), thread, THREADS, 0)
    return [buffers["sums"][(row * BLOCKS + block).valid(thread.eq(0))].store(share),
            buffers["largest"][row.valid(block.eq(0) & thread.eq(0))].store(largest)]
  def of_all(buffers:dict[str, UOp]) -> list[UOp]:
    row, thread = UOp.special(S, "gidx0"), UOp.special(BLOCKS, "lidx0")
    share = block_sum(target, buffers["sums"][row * BLOCKS + thread].load(), thread, BLOCKS, 0)
    return [buffers["y"][row.valid(thread.eq(0))].store(buffers["largest"][row].load() + share.log2() * math.log(2))]
  outs = {"sums": empty(x, S, BLOCKS), "largest": empty(x, S)}
  sums, largest = launch(f"log_total_part_{V}_{S}", outs, {"x": x, "best": best}, of_blocks)
  return launch(f"log_total_whole_{S}", {"y": empty(x, S)}, {"sums": sums, "largest": largest}, of_all)[0]

# ---- what is said ----

@primitive(outputs=lambda logits, total, token, others, moved, log: log)
def tell(logits:Tensor, total:Tensor, token:Tensor, others:Tensor, moved:Tensor, log:Tensor) -> Tensor:
  """Logs a token of each of S rows and some others, each with the logarithm of its probability. logits: float32 (S, V); total: float32 (S,), the
  logarithm of Σ exp(logits); token: int32 (S,); others: int32 (S, C); moved: int32 (S,), where the rows stand behind the step, as `next_token` gives
  it; log: int32 (S, N, 1 + C, 2), whose column is the step's position modulo N, as in next_token's -> the log. The second number of a pair is a
  float's bits."""
  S, N = log.shape[:2]
  tokens = token.unsqueeze(1).cat(others, dim=1)
  bits = (logits.gather(1, tokens) - total.unsqueeze(1)).bitcast(dtypes.int32)
  column = Tensor.arange(N, dtype=dtypes.int32).to(log.device).eq(((moved + N - 1) % N).unsqueeze(1))
  return log.assign(column.reshape(S, N, 1, 1).where(tokens.stack(bits, dim=2).unsqueeze(1), log))

@tell.form("cpu_decode", takes=lambda logits, total, token, others, moved, log: cpu.is_cpu(logits.device))
def tell_cpu(logits:Tensor, total:Tensor, token:Tensor, others:Tensor, moved:Tensor, log:Tensor) -> Tensor:
  (S, V), N, C = logits.shape, log.shape[1], others.shape[1]
  body = f"""for (int i = 0; i < {S}; i++) {{
    int* to = log + (i * {N} + (moved[i] + {N - 1}) % {N}) * {2 * (C + 1)};
    for (int j = 0; j <= {C}; j++) {{
      const int chosen = clamp(j ? others[i * {C} + j - 1] : token[i], {V});
      to[2 * j] = chosen;
      *(float*)(to + 2 * j + 1) = logits[i * {V}L + chosen] - total[i];
    }}
  }}"""
  ins = {"logits": logits, "total": total, "token": token, "others": others, "moved": moved}
  return cpu.launch(f"tell_{C}_{S}", {"log": log}, ins, "", body)[0]

@tell.form("decode", takes=lambda logits, total, token, others, moved, log: target_of(logits.device) is not None)
def tell_decode(logits:Tensor, total:Tensor, token:Tensor, others:Tensor, moved:Tensor, log:Tensor) -> Tensor:
  """A block has a row, a thread a token"""
  (S, V), N, C = logits.shape, log.shape[1], others.shape[1]
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    row, number = UOp.special(S, "gidx0"), UOp.special(C + 1, "lidx0")
    other = buffers["others"][row * C + (number - 1).maximum(0)].load()
    chosen = number.eq(0).where(buffers["token"][row].load(), other)
    at = chosen.maximum(0).minimum(V - 1).cast(dtypes.weakint)
    value = buffers["logits"][row * V + at].load() - buffers["total"][row].load()
    column = ((buffers["moved"][row].load() + (N - 1)) % N).cast(dtypes.weakint)
    place = ((row * N + column) * (C + 1) + number) * 2
    return [buffers["log"][place].store(chosen), buffers["log"][place + 1].store(value.bitcast(dtypes.int))]
  ins = {"logits": logits, "total": total, "token": token, "others": others, "moved": moved}
  return launch(f"tell_{V}_{C}_{S}", {"log": log}, ins, body)[0]

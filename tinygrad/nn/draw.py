"""The end of a step: of each sequence a token is drawn from its logits, and its position moves on.

A draw is the largest of logits + temperature · noise, where the noise is Gumbel's: a draw from softmax(logits / temperature). At temperature 0 it is
the largest logit. The noise is made of a seed and the draw's number, so that a draw is the same whatever rows, or drafts, are beside it.

On a GPU, two launches: each block makes the noise of its part of the row and finds the largest, one block a row finds that of all parts, and writes
what the step changes.
"""
from __future__ import annotations
import functools, math
from typing import NamedTuple, TypeVar
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import cpu
from tinygrad.nn.intrinsics import Target, shuffle, target_of
from tinygrad.nn.kernel import behind_wait, empty, launch, local
from tinygrad.nn.primitive import primitive
from tinygrad.uop.ops import Ops

class Noise(NamedTuple):
  """Of the draws of S rows. temperature: float32 (S, …), the first number of each row; key: uint32 (S, 2), a seed and 0; counter: int32 (S,), the
  draw's number, which is the position"""
  temperature: Tensor
  key: Tensor
  counter: Tensor

HOTTEST = 1e30   # temperatures above would make infinities; long before, the logits no longer matter

def random_bits(key:Tensor, counter:Tensor, count:int) -> Tensor:
  """key: uint32 (S, 2); counter: int32 (S,) -> uint32 (S, count), each row the Tensor.random_bits(key, counter, count) of its own"""
  keys = (key[:, 1:].cast(dtypes.uint64) << 32) | key[:, :1].cast(dtypes.uint64)
  keys = counter.cast(dtypes.uint32).cast(dtypes.uint64).unsqueeze(1).threefry(keys)
  half, number = -(-count // 2), Tensor.arange(count, dtype=dtypes.uint32).to(key.device)
  first = number < half
  low = first.where(number, number - half).cast(dtypes.uint64)   # a number has two words of 32 bits: the row's halves
  words = (((low + half) << 32) | low).threefry(keys)
  return first.where(words.cast(dtypes.uint32), (words >> 32).cast(dtypes.uint32))

Bits = TypeVar("Bits", Tensor, UOp)

def gumbel(bits:Bits) -> Bits:
  """uint32 -> float32 noise of Gumbel's distribution. Never infinite: the numbers whose logarithm is taken are odd multiples of 2^-24, which float32
  holds without rounding, up to 1 - 2^-24, and whose own is at least 2^-24, whatever a device's logarithm makes of it"""
  uniform = (bits >> 9).cast(dtypes.float) * 2.0 ** -23 + 2.0 ** -24
  return (uniform.log2() * -math.log(2)).maximum(2.0 ** -24).log2() * -math.log(2)

def noised(x:Tensor, noise:Noise|None) -> Tensor:
  """float32 (S, V), whose largest are drawn"""
  if noise is None: return x
  return x + noise.temperature[:, :1].minimum(HOTTEST) * gumbel(random_bits(noise.key, noise.counter, x.shape[1]))

@primitive(outputs=lambda x, noise: empty(x, x.shape[0], dtype=dtypes.int32))
def argmax(x:Tensor, noise:Noise|None=None) -> Tensor:
  """float32 (S, V) -> int32 (S,), the index of each row's largest, the lower on a tie. noise: is added"""
  return noised(x, noise).argmax(1).cast(dtypes.int32)

@argmax.form("cpu_decode", takes=lambda x, noise: cpu.is_cpu(x.device))
def argmax_cpu(x:Tensor, noise:Noise|None) -> Tensor: return cpu.argmax(x) if noise is None else cpu.noised_argmax(x, HOTTEST, *noise)

@primitive(outputs=lambda start, token, tables, log: (empty(start, start.shape[0], dtype=dtypes.int32), log))
def advance(start:Tensor, token:Tensor, tables:Tensor, log:Tensor) -> tuple[Tensor, Tensor]:
  """The end of a decode step of S rows, when its tokens, int32 (S,), are chosen: they are logged, and start, int32 (S,), moves on by one. A row that
  is not there, whose first page in the tables, int32 (S, P), is nobody's, stays where it is. log: int32 (S, N); a token's column is its position
  modulo N. Returns where the rows then stand, int32 (S,), and the log."""
  column = Tensor.arange(log.shape[1], dtype=dtypes.int32).to(log.device).eq((start % log.shape[1]).unsqueeze(1))
  logged = log.assign(column.where(token.unsqueeze(1), log))
  return start.assign(start + (tables[:, 0] > 0).cast(dtypes.int32)), logged

@advance.form("cpu_decode", takes=lambda start, token, tables, log: cpu.is_cpu(start.device))
def advance_cpu(start:Tensor, token:Tensor, tables:Tensor, log:Tensor) -> tuple[Tensor, Tensor]: return cpu.advance(start, token, tables, log)

@primitive(outputs=lambda x, noise, token, start, tables, log: (token, empty(start, start.shape[0], dtype=dtypes.int32), log), composite=True)
def next_token(x:Tensor, noise:Noise|None, token:Tensor, start:Tensor, tables:Tensor, log:Tensor) -> tuple[Tensor, Tensor, Tensor]:
  """argmax(x, noise) becomes the token, int32 (S,), and advance. Returns the token, where the rows then stand, and the log."""
  chosen = token.assign(argmax(x, noise))
  return chosen, *advance(start, chosen, tables, log)

# ---- the largest of many, in two launches: of each of a row's blocks, then of those ----

BLOCKS, THREADS = 128, 256
Pair = tuple[UOp, UOp]   # a value and its index

def better(first:Pair, second:Pair) -> Pair:
  wins = (second[0] > first[0]) | (second[0].eq(first[0]) & (second[1] < first[1]))
  return wins.where(second[0], first[0]), wins.where(second[1], first[1])

def best_of_block(target:Target, best:Pair, thread:UOp, threads:int) -> Pair:
  """The best of the threads' pairs, in each of them"""
  distance = target.lanes // 2
  while distance:
    best = better(best, (shuffle(target, best[0], distance), shuffle(target, best[1], distance)))
    distance //= 2
  warps = threads // target.lanes
  values, indices = local(warps, dtypes.float, 0), local(warps, dtypes.int, 1)
  warp = (thread // target.lanes).valid((thread % target.lanes).eq(0))
  barrier = UOp(Ops.BARRIER, src=(values[warp].store(best[0]), indices[warp].store(best[1])))
  values, indices = values.after(barrier), indices.after(barrier)
  pairs = [(values[i].load(), indices[i].load()) for i in range(warps)]
  return functools.reduce(better, pairs)

def best_of_blocks(x:Tensor, noise:Noise|None) -> dict[str, Tensor]:
  """The largest of each of a row's blocks. values: float32 (S, BLOCKS); indices: int32 (S, BLOCKS)"""
  target, (S, V) = target_of(x.device), x.shape
  assert target is not None
  # the two words of a random number are those of a logit and of the one half a row behind: a thread takes both
  width, count = (0, V) if noise is None else (noise.temperature.shape[1], -(-V // 2))
  turns = -(-count // (BLOCKS * THREADS))
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    block, row, thread = UOp.special(BLOCKS, "gidx0"), UOp.special(S, "gidx1"), UOp.special(THREADS, "lidx0")
    buffers, pairs = behind_wait(target, buffers), []
    def pair(number:UOp, last:int) -> Pair:
      """A logit; past the end the last one again: it changes nothing"""
      index = number.minimum(last)
      return buffers["x"][row * V + index].load(), index.cast(dtypes.int)
    if width:
      key = (buffers["key"][row * 2 + 1].load().cast(dtypes.uint64) << 32) | buffers["key"][row * 2].load().cast(dtypes.uint64)
      key = buffers["counter"][row].load().cast(dtypes.uint32).cast(dtypes.uint64).threefry(key)
      temperature = buffers["temperature"][row * width].load().minimum(HOTTEST)
    for turn in range(turns):
      number = block * (turns * THREADS) + thread + turn * THREADS
      if not width:
        pairs.append(pair(number, V - 1))
        continue
      low = number.cast(dtypes.uint64)
      words = (((low + count) << 32) | low).threefry(key)
      for word, own, last in ((words, number, count - 1), (words >> 32, number + count, V - 1)):
        value, index = pair(own, last)
        pairs.append(((own <= last).where(value + temperature * gumbel(word.cast(dtypes.uint32)), -math.inf), index))
    value, index = best_of_block(target, functools.reduce(better, pairs), thread, THREADS)
    place = (row * BLOCKS + block).valid(thread.eq(0))
    return [buffers["values"][place].store(value), buffers["indices"][place].store(index)]
  outs = {"values": empty(x, S, BLOCKS), "indices": empty(x, S, BLOCKS, dtype=dtypes.int32)}
  ins = {"x": x} if noise is None else {"x": x, **noise._asdict()}
  values, indices = launch(f"argmax_part{'_noised' if width else ''}_{V}_{S}", outs, ins, body)
  return {"values": values, "indices": indices}

def best_of_row(target:Target, buffers:dict[str, UOp], row:UOp, thread:UOp) -> UOp:
  """The index of a row's largest, of best_of_blocks, in each of a block's BLOCKS threads"""
  place = row * BLOCKS + thread
  return best_of_block(target, (buffers["values"][place].load(), buffers["indices"][place].load()), thread, BLOCKS)[1]

@argmax.form("decode", takes=lambda x, noise: target_of(x.device) is not None)
def argmax_decode(x:Tensor, noise:Noise|None) -> Tensor:
  target, S = target_of(x.device), x.shape[0]
  assert target is not None
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    row, thread, buffers = UOp.special(S, "gidx0"), UOp.special(BLOCKS, "lidx0"), behind_wait(target, buffers)
    return [buffers["y"][row.valid(thread.eq(0))].store(best_of_row(target, buffers, row, thread))]
  return launch(f"argmax_whole_{S}", {"y": empty(x, S, dtype=dtypes.int32)}, best_of_blocks(x, noise), body)[0]

@next_token.form("decode", takes=lambda x, noise, token, start, tables, log: target_of(x.device) is not None)
def next_token_decode(x:Tensor, noise:Noise|None, token:Tensor, start:Tensor, tables:Tensor, log:Tensor) -> tuple[Tensor, Tensor, Tensor]:
  """tinygrad is told that start is read, not that it is written: all kernels of a step read it, and for each it would look anew whether that comes
  before this one. It does, as the tokens depend on all of them; graphs see what a kernel stores."""
  target, (S, P), N = target_of(x.device), tables.shape, log.shape[1]
  assert target is not None
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    row, thread, buffers = UOp.special(S, "gidx0"), UOp.special(BLOCKS, "lidx0"), behind_wait(target, buffers)
    first, chosen = thread.eq(0), best_of_row(target, buffers, row, thread)
    position = buffers["start"][row.valid(first)].load()
    moved = position + (buffers["tables"][(row * P).valid(first)].load() > 0).where(1, 0)
    column, values = (position % N).cast(dtypes.weakint), {"token": chosen, "moved": moved, "start": moved}
    return [buffers["log"][(row * N + column).valid(first)].store(chosen),
            *(buffers[name][row.valid(first)].store(value) for name, value in values.items())]
  outs, ins = {"token": token, "moved": empty(start, S, dtype=dtypes.int32), "log": log}, {"start": start, "tables": tables}
  chosen, moved, logged = launch(f"next_token_{S}", outs, {**ins, **best_of_blocks(x, noise)}, body)
  return chosen, moved, logged

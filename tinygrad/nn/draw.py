"""The end of a step: of each sequence a token is drawn from its logits (nn/noise.py), perhaps from a nucleus (nn/nucleus.py), and its position moves
on.

On a GPU, two launches: each block makes the noise of its part of the row and finds the largest, one block a row finds that of all parts, and writes
what the step changes. A nucleus takes two launches more.
"""
from __future__ import annotations
import functools, math
from typing import Callable, NamedTuple
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import cpu, nucleus as nuclei
from tinygrad.nn.intrinsics import Target, shuffle, target_of
from tinygrad.nn.kernel import behind_wait, empty, launch, local
from tinygrad.nn.noise import HOTTEST, Noise, half_row, noise_of_row, noised
from tinygrad.nn.nucleus import Nucleus
from tinygrad.nn.primitive import primitive
from tinygrad.uop.ops import Ops

@primitive(outputs=lambda x, noise, nucleus: empty(x, x.shape[0], dtype=dtypes.int32))
def argmax(x:Tensor, noise:Noise|None=None, nucleus:Nucleus|None=None) -> Tensor:
  """float32 (S, V) -> int32 (S,), the index of each row's largest, the lower on a tie. noise: is added. nucleus: the others are -inf; needs noise"""
  return noised(x if noise is None or nucleus is None else nuclei.within(x, noise.values, nucleus), noise).argmax(1).cast(dtypes.int32)

@argmax.form("cpu_decode", takes=lambda x, noise, nucleus: cpu.is_cpu(x.device))
def argmax_cpu(x:Tensor, noise:Noise|None, nucleus:Nucleus|None) -> Tensor:
  return cpu.argmax(x) if noise is None else cpu.noised_argmax(x, HOTTEST, *noise, nucleus)

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

@primitive(outputs=lambda x, noise, nucleus, token, start, tables, log: (token, empty(start, start.shape[0], dtype=dtypes.int32), log),
           composite=True)
def next_token(x:Tensor, noise:Noise|None, nucleus:Nucleus|None, token:Tensor, start:Tensor, tables:Tensor,
               log:Tensor) -> tuple[Tensor, Tensor, Tensor]:
  """argmax(x, noise, nucleus) becomes the token, int32 (S,), and advance. Returns the token, where the rows then stand, and the log."""
  chosen = token.assign(argmax(x, noise, nucleus))
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

def best_of_blocks(target:Target, x:Tensor, noise:Noise|None) -> dict[str, Tensor]:
  """The largest of each of a row's blocks. best: float32 (S, BLOCKS); indices: int32 (S, BLOCKS)"""
  (S, V), width = x.shape, 0 if noise is None else noise.values.shape[1]
  count = half_row(V) if width else V   # with noise a thread takes the two logits whose noise comes of one random number
  turns = -(-count // (BLOCKS * THREADS))
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    block, row, thread = UOp.special(BLOCKS, "gidx0"), UOp.special(S, "gidx1"), UOp.special(THREADS, "lidx0")
    buffers, pairs = behind_wait(target, buffers), []
    def pair(number:UOp, last:int) -> Pair:
      """A logit; past the end the last one again: it changes nothing"""
      index = number.minimum(last)
      return buffers["x"][row * V + index].load(), index.cast(dtypes.int)
    noise_of = noise_of_row(buffers, row, width, V) if width else None
    for turn in range(turns):
      number = block * (turns * THREADS) + thread + turn * THREADS
      if noise_of is None:
        pairs.append(pair(number, V - 1))
        continue
      for own, last, noise in zip((number, number + count), (count - 1, V - 1), noise_of(number)):
        value, index = pair(own, last)
        pairs.append(((own <= last).where(value + noise, -math.inf), index))
    value, index = best_of_block(target, functools.reduce(better, pairs), thread, THREADS)
    place = (row * BLOCKS + block).valid(thread.eq(0))
    return [buffers["best"][place].store(value), buffers["indices"][place].store(index)]
  outs = {"best": empty(x, S, BLOCKS), "indices": empty(x, S, BLOCKS, dtype=dtypes.int32)}
  ins = {"x": x} if noise is None else {"x": x, **noise._asdict()}
  return dict(zip(outs, launch(f"argmax_part{'_noised' if width else ''}_{V}_{S}", outs, ins, body)))

def best_of_row(target:Target, buffers:dict[str, UOp], row:UOp, thread:UOp) -> UOp:
  """The index of a row's largest, of best_of_blocks, in each of a block's BLOCKS threads"""
  place = row * BLOCKS + thread
  return best_of_block(target, (buffers["best"][place].load(), buffers["indices"][place].load()), thread, BLOCKS)[1]

class Found(NamedTuple):
  """What blocks have found of their parts of each row, and what makes a token of it: token(buffers, row, thread), in each of a block's threads.
  mem: bytes that this moves, where the renderer cannot count them"""
  parts: dict[str, Tensor]
  threads: int
  token: Callable[[dict[str, UOp], UOp, UOp], UOp]
  mem: int|None = None

def found_by_blocks(target:Target, x:Tensor, noise:Noise|None, nucleus:Nucleus|None) -> Found:
  if noise is None or nucleus is None:
    return Found(best_of_blocks(target, x, noise), BLOCKS, lambda buffers, row, thread: best_of_row(target, buffers, row, thread))
  (S, V), width = x.shape, noise.values.shape[1]
  def token(buffers:dict[str, UOp], row:UOp, thread:UOp) -> UOp: return nuclei.chosen(target, buffers, nucleus, V, width, row, thread)
  return Found(nuclei.asked(target, x, noise, nucleus), nuclei.CHOOSING, token, S * nuclei.PARTS_BYTES)

@argmax.form("decode", takes=lambda x, noise, nucleus: target_of(x.device) is not None)
def argmax_decode(x:Tensor, noise:Noise|None, nucleus:Nucleus|None) -> Tensor:
  target, S = target_of(x.device), x.shape[0]
  assert target is not None
  found = found_by_blocks(target, x, noise, nucleus)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    row, thread, buffers = UOp.special(S, "gidx0"), UOp.special(found.threads, "lidx0"), behind_wait(target, buffers)
    return [buffers["y"][row.valid(thread.eq(0))].store(found.token(buffers, row, thread))]
  return launch(f"argmax_whole_{S}", {"y": empty(x, S, dtype=dtypes.int32)}, found.parts, body, found.mem)[0]

@next_token.form("decode", takes=lambda x, noise, nucleus, token, start, tables, log: target_of(x.device) is not None)
def next_token_decode(x:Tensor, noise:Noise|None, nucleus:Nucleus|None, token:Tensor, start:Tensor, tables:Tensor,
                      log:Tensor) -> tuple[Tensor, Tensor, Tensor]:
  """tinygrad is told that start is read, not that it is written: all kernels of a step read it, and for each it would look anew whether that comes
  before this one. It does, as the tokens depend on all of them; graphs see what a kernel stores."""
  target, (S, P), N = target_of(x.device), tables.shape, log.shape[1]
  assert target is not None
  found = found_by_blocks(target, x, noise, nucleus)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    row, thread, buffers = UOp.special(S, "gidx0"), UOp.special(found.threads, "lidx0"), behind_wait(target, buffers)
    first, chosen = thread.eq(0), found.token(buffers, row, thread)
    position = buffers["start"][row.valid(first)].load()
    moved = position + (buffers["tables"][(row * P).valid(first)].load() > 0).where(1, 0)
    column, values = (position % N).cast(dtypes.weakint), {"token": chosen, "moved": moved, "start": moved}
    return [buffers["log"][(row * N + column).valid(first)].store(chosen),
            *(buffers[name][row.valid(first)].store(value) for name, value in values.items())]
  outs, ins = {"token": token, "moved": empty(start, S, dtype=dtypes.int32), "log": log}, {"start": start, "tables": tables}
  chosen, moved, logged = launch(f"next_token_{S}", outs, {**ins, **found.parts}, body, found.mem)
  return chosen, moved, logged

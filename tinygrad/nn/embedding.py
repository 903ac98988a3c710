"""The two ends of a decode step: the embedding's row of a token; the token of the largest logit, and the position moving on."""
from __future__ import annotations
import functools
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import cpu
from tinygrad.nn.intrinsics import Target, shuffle, target_of
from tinygrad.nn.kernel import UNIT, Weight, empty, launch, local
from tinygrad.nn.primitive import primitive
from tinygrad.nn.step import one_row
from tinygrad.uop.ops import Ops

@primitive(outputs=lambda ids, weight: empty(ids, ids.shape[0], weight.shape[1]))
def embedding(ids:Tensor, weight:Weight) -> Tensor:
  """ids: int32 (T,); weight: (vocab, D) -> float32 (T, D)"""
  return weight[ids].dequantize().contiguous()

@embedding.form("cpu_decode", takes=lambda ids, weight: cpu.takes(weight))
def embedding_cpu(ids:Tensor, weight:Weight) -> Tensor: return cpu.embedding(ids, weight)

@embedding.form("decode", takes=lambda ids, weight: one_row(ids) and target_of(weight.device) is not None and weight.shape[1] % UNIT == 0)
def embedding_decode(ids:Tensor, weight:Weight) -> Tensor:
  """A thread dequantizes a unit"""
  vocab, D = weight.shape
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    unit = UOp.special(D // UNIT, "lidx0")
    row = buffers["ids"][0].load().maximum(0).minimum(vocab - 1).cast(dtypes.weakint)
    weights = weight.matrix(buffers, "w")(row, unit, None).weights()
    return [buffers["y"][unit * UNIT + i].store(value) for i, value in enumerate(weights)]
  return launch(f"embedding_{weight.label}", {"y": empty(ids, 1, D)}, {"ids": ids, **weight.args("w")}, body, D * 8)[0]

# tinygrad makes one launch of the plain ops, or five where it parts the sum over a large vocabulary
embedding.form("prefill", takes=lambda ids, weight: not one_row(ids))(embedding.plain)

@primitive(outputs=lambda pos, token: empty(pos, 1, dtype=dtypes.int32))
def advance(pos:Tensor, token:Tensor) -> Tensor:
  """pos, int32 (1,) on the device, moves on by one when the token, int32 (1,), is chosen. Returns where it then is, int32 (1,)."""
  return pos.assign(pos + (token >= 0).cast(dtypes.int32))

@advance.form("cpu_decode", takes=lambda pos, token: cpu.is_cpu(pos.device))
def advance_cpu(pos:Tensor, token:Tensor) -> Tensor: return cpu.advance(pos, token)

@advance.form("decode", takes=lambda pos, token: target_of(pos.device) is not None)
def advance_decode(pos:Tensor, token:Tensor) -> Tensor:
  """tinygrad is told that pos is read, not that it is written: all kernels of a step read it, and for each it would look anew whether that comes
  before this one. It does, as the token depends on all of them; graphs see what a kernel stores."""
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    index = UOp.special(1, "lidx0")
    moved = buffers["pos"][index].load() + (buffers["token"][index].load() >= 0).where(1, 0)  # a token is: the kernel only has to read it
    return [buffers["moved"][index].store(moved), buffers["pos"][index].store(moved)]
  return launch("advance", {"moved": empty(pos, 1, dtype=dtypes.int32)}, {"pos": pos, "token": token}, body)[0]

@primitive(outputs=lambda x: empty(x, 1, dtype=dtypes.int32))
def argmax(x:Tensor) -> Tensor:
  """float32 (V,) -> int32 (1,), the index of the largest, the lower on a tie"""
  return x.argmax().reshape(1).cast(dtypes.int32)

@argmax.form("cpu_decode", takes=lambda x: cpu.is_cpu(x.device))
def argmax_cpu(x:Tensor) -> Tensor: return cpu.argmax(x)

# ---- the largest of many, in two launches: of each of 64 blocks, then of those ----

BLOCKS, THREADS = 64, 256
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

@argmax.form("decode", takes=lambda x: target_of(x.device) is not None)
def argmax_decode(x:Tensor) -> Tensor:
  target, V = target_of(x.device), x.shape[0]
  assert target is not None
  def of_blocks(buffers:dict[str, UOp]) -> list[UOp]:
    block, thread = UOp.special(BLOCKS, "gidx0"), UOp.special(THREADS, "lidx0")
    turns = -(-V // (BLOCKS * THREADS))
    pairs = []
    for turn in range(turns):
      index = (block * (turns * THREADS) + thread + turn * THREADS).minimum(V - 1)   # past the end the last one again: it changes nothing
      pairs.append((buffers["x"][index].load(), index.cast(dtypes.int)))
    value, index = best_of_block(target, functools.reduce(better, pairs), thread, THREADS)
    return [buffers["values"][block.valid(thread.eq(0))].store(value), buffers["indices"][block.valid(thread.eq(0))].store(index)]
  def of_all(buffers:dict[str, UOp]) -> list[UOp]:
    thread = UOp.special(BLOCKS, "lidx0")
    mine = (thread * 0 + thread).minimum(BLOCKS - 1)
    _, index = best_of_block(target, (buffers["values"][mine].load(), buffers["indices"][mine].load()), thread, BLOCKS)
    return [buffers["y"][(thread * 0).valid(thread.eq(0))].store(index)]
  outs = {"values": empty(x, BLOCKS), "indices": empty(x, BLOCKS, dtype=dtypes.int32)}
  values, indices = launch(f"argmax_part_{V}", outs, {"x": x}, of_blocks)
  return launch("argmax_whole", {"y": empty(x, 1, dtype=dtypes.int32)}, {"values": values, "indices": indices}, of_all)[0]

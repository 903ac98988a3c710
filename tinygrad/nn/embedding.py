"""The two ends of a step: the embedding's rows of its tokens; the token of a sequence's largest logit, and its position moving on."""
from __future__ import annotations
import functools
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import cpu
from tinygrad.nn.intrinsics import Target, shuffle, target_of
from tinygrad.nn.kernel import UNIT, Weight, empty, launch, local
from tinygrad.nn.primitive import primitive
from tinygrad.uop.ops import Ops

@primitive(outputs=lambda ids, weight: empty(ids, ids.shape[0], weight.shape[1]))
def embedding(ids:Tensor, weight:Weight) -> Tensor:
  """ids: int32 (T,); weight: (vocab, D) -> float32 (T, D)"""
  return weight[ids].dequantize().contiguous()

@embedding.form("cpu_decode", takes=lambda ids, weight: cpu.takes(weight))
def embedding_cpu(ids:Tensor, weight:Weight) -> Tensor: return cpu.embedding(ids, weight)

@embedding.form("decode", takes=lambda ids, weight: target_of(weight.device) is not None and weight.shape[1] % UNIT == 0)
def embedding_decode(ids:Tensor, weight:Weight) -> Tensor:
  """A block has a token, a thread dequantizes a unit"""
  (vocab, D), T = weight.shape, ids.shape[0]
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    token, unit = UOp.special(T, "gidx0"), UOp.special(D // UNIT, "lidx0")
    row = buffers["ids"][token].load().maximum(0).minimum(vocab - 1).cast(dtypes.weakint)
    weights = weight.matrix(buffers, "w")(row, unit, None).weights()
    return [buffers["y"][token * D + unit * UNIT + i].store(value) for i, value in enumerate(weights)]
  return launch(f"embedding_{weight.label}_{T}", {"y": empty(ids, T, D)}, {"ids": ids, **weight.args("w")}, body, T * D * 8)[0]

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

@advance.form("decode", takes=lambda start, token, tables, log: target_of(start.device) is not None)
def advance_decode(start:Tensor, token:Tensor, tables:Tensor, log:Tensor) -> tuple[Tensor, Tensor]:
  """tinygrad is told that start is read, not that it is written: all kernels of a step read it, and for each it would look anew whether that comes
  before this one. It does, as the tokens depend on all of them; graphs see what a kernel stores."""
  (S, P), N = tables.shape, log.shape[1]
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    row = UOp.special(S, "lidx0")
    position = buffers["start"][row].load()
    moved = position + (buffers["tables"][row * P].load() > 0).where(1, 0)
    column = (position % N).cast(dtypes.weakint)
    return [buffers["log"][row * N + column].store(buffers["token"][row].load()), buffers["moved"][row].store(moved),
            buffers["start"][row].store(moved)]
  outs, ins = {"moved": empty(start, S, dtype=dtypes.int32), "log": log}, {"start": start, "token": token, "tables": tables}
  moved, log = launch(f"advance_{S}", outs, ins, body)
  return moved, log

@primitive(outputs=lambda x: empty(x, x.shape[0], dtype=dtypes.int32))
def argmax(x:Tensor) -> Tensor:
  """float32 (S, V) -> int32 (S,), the index of each row's largest, the lower on a tie"""
  return x.argmax(1).cast(dtypes.int32)

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
  target, (S, V) = target_of(x.device), x.shape
  assert target is not None
  def of_blocks(buffers:dict[str, UOp]) -> list[UOp]:
    block, row, thread = UOp.special(BLOCKS, "gidx0"), UOp.special(S, "gidx1"), UOp.special(THREADS, "lidx0")
    turns = -(-V // (BLOCKS * THREADS))
    pairs = []
    for turn in range(turns):
      index = (block * (turns * THREADS) + thread + turn * THREADS).minimum(V - 1)   # past the end the last one again: it changes nothing
      pairs.append((buffers["x"][row * V + index].load(), index.cast(dtypes.int)))
    value, index = best_of_block(target, functools.reduce(better, pairs), thread, THREADS)
    place = (row * BLOCKS + block).valid(thread.eq(0))
    return [buffers["values"][place].store(value), buffers["indices"][place].store(index)]
  def of_all(buffers:dict[str, UOp]) -> list[UOp]:
    row, thread = UOp.special(S, "gidx0"), UOp.special(BLOCKS, "lidx0")
    mine = row * BLOCKS + (thread * 0 + thread).minimum(BLOCKS - 1)
    _, index = best_of_block(target, (buffers["values"][mine].load(), buffers["indices"][mine].load()), thread, BLOCKS)
    return [buffers["y"][row.valid(thread.eq(0))].store(index)]
  outs = {"values": empty(x, S, BLOCKS), "indices": empty(x, S, BLOCKS, dtype=dtypes.int32)}
  values, indices = launch(f"argmax_part_{V}_{S}", outs, {"x": x}, of_blocks)
  return launch(f"argmax_whole_{S}", {"y": empty(x, S, dtype=dtypes.int32)}, {"values": values, "indices": indices}, of_all)[0]

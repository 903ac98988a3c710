"""The two ends of a decode step: the embedding's row of a token; the token of the largest logit, and the position moving on."""
from __future__ import annotations
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import cpu
from tinygrad.nn.intrinsics import Target, shuffle, target_of
from tinygrad.nn.kernel import UNIT, Weight, launch, local
from tinygrad.nn.norm_linear import decode_target
from tinygrad.uop.ops import Ops

def embedding(ids:Tensor, w:Weight) -> Tensor:
  """ids: int32 (T,); w: (vocab, D) -> float32 (T, D)"""
  if cpu.fits(w): return cpu.embedding(ids, w)
  if (t := decode_target(ids.reshape(-1, 1), w.shape[1])): return embedding_decode(t, ids, w)
  return embedding_ops(ids, w)

def embedding_ops(ids:Tensor, w:Weight) -> Tensor: return w[ids].dequantize().contiguous()

def embedding_decode(t:Target, ids:Tensor, w:Weight) -> Tensor:
  vocab, D = w.shape
  def body(b:dict[str, UOp]) -> list[UOp]:
    unit = UOp.special(D // UNIT, "lidx0")  # a thread dequantizes a unit
    u = w.matrix(b, "w")(b["ids"][0].load().maximum(0).minimum(vocab - 1).cast(dtypes.weakint), unit, None)
    width, done = UNIT // len(u.scales), []
    for i in range(UNIT):
      scale, minimum = u.scales[i // width]
      done.append(b["y"][unit * UNIT + i].store(u.value(i) * scale if minimum is None else u.value(i) * scale + minimum))
    return done
  return launch(f"embedding_{w.label}", {"y": Tensor.empty(1, D, dtype=dtypes.float)}, {"ids": ids, **w.args("w")}, body, D * 8)[0]

def argmax(x:Tensor) -> Tensor:
  """float32 (V,) -> int32 (1,), the place of the largest, the lower on a tie"""
  if cpu.device(): return cpu.argmax(x)
  if (t := target_of()) is None: return argmax_ops(x)
  return argmax_decode(t, x)

def advance(pos:Tensor, token:Tensor) -> Tensor:
  """pos, int32 (1,) on the device, moves on by one when the token, int32 (1,), is chosen. Returns where it then is, int32 (1,).
  tinygrad is told that pos is read, not that it is written: all kernels of a step read it, and for each it would look anew whether that comes
  before this one. It does, as the token depends on all of them; graphs see what a kernel stores."""
  if cpu.device(): return cpu.advance(pos, token)
  def body(b:dict[str, UOp]) -> list[UOp]:
    at = UOp.special(1, "lidx0")
    moved = b["pos"][at].load() + (b["token"][at].load() >= 0).where(1, 0)  # a token is: the kernel only has to read it
    return [b["moved"][at].store(moved), b["pos"][at].store(moved)]
  return launch("advance", {"moved": Tensor.empty(1, dtype=dtypes.int32)}, {"pos": pos, "token": token}, body)[0]

def argmax_ops(x:Tensor) -> Tensor: return x.argmax(keepdim=True).cast(dtypes.int32)

def argmax_decode(t:Target, x:Tensor) -> Tensor:
  """Two launches: the best of each of 64 blocks, then the best of those"""
  threads, blocks, V = 256, 64, x.shape[0]
  Pair = tuple[UOp, UOp]
  def better(a:Pair, b:Pair) -> Pair:
    wins = (b[0] > a[0]) | (b[0].eq(a[0]) & (b[1] < a[1]))
    return wins.where(b[0], a[0]), wins.where(b[1], a[1])
  def of_lanes(best:Pair) -> Pair:
    distance = t.lanes // 2
    while distance: best, distance = better(best, (shuffle(t, best[0], distance), shuffle(t, best[1], distance))), distance // 2
    return best
  def block_best(value:UOp, index:UOp|None, n:int, first:UOp, thread:UOp, width:int, count:int) -> Pair:
    best:Pair|None = None
    for i in range(count):
      at = first + thread + i * width
      safe = at.minimum(n - 1)  # the last ones again: they change nothing
      here = (value[safe].load(), safe.cast(dtypes.int) if index is None else index[safe].load())
      best = here if best is None else better(best, here)
    assert best is not None
    best = of_lanes(best)
    warps = width // t.lanes
    values, places = local(warps, dtypes.float, 0), local(warps, dtypes.int, 1)
    at = (thread // t.lanes).valid((thread % t.lanes).eq(0))
    barrier = UOp(Ops.BARRIER, src=(values[at].store(best[0]), places[at].store(best[1])))
    values, places = values.after(barrier), places.after(barrier)
    best = (values[0].load(), places[0].load())
    for w in range(1, warps): best = better(best, (values[w].load(), places[w].load()))
    return best
  def part(b:dict[str, UOp]) -> list[UOp]:
    block, thread = UOp.special(blocks, "gidx0"), UOp.special(threads, "lidx0")
    each = -(-V // (blocks * threads)) * threads
    value, place = block_best(b["x"], None, V, block * each, thread, threads, each // threads)
    return [b["values"][block.valid(thread.eq(0))].store(value), b["places"][block.valid(thread.eq(0))].store(place)]
  def whole(b:dict[str, UOp]) -> list[UOp]:
    thread = UOp.special(blocks, "lidx0")
    return [b["y"][(thread * 0).valid(thread.eq(0))].store(block_best(b["values"], b["places"], blocks, thread * 0, thread, blocks, 1)[1])]
  outs = {"values": Tensor.empty(blocks, dtype=dtypes.float), "places": Tensor.empty(blocks, dtype=dtypes.int32)}
  values, places = launch(f"argmax_part_{V}", outs, {"x": x}, part)
  return launch("argmax_whole", {"y": Tensor.empty(1, dtype=dtypes.int32)}, {"values": values, "places": places}, whole)[0]

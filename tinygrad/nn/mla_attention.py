"""Absorbed attention: every head reads the same cached vector, and values are a view of it.

The kernels take one new token over the whole cache; several tokens (prefill) take the plain-ops form.

Replaces the scores, softmax and weighted sum that the scheduler would make of it, each a pass over the cache.
Layout: what is written of the cache is cut into as many equal splits as give BLOCKS blocks, so that a context of any length fills the machine once; a
block takes a split and a few heads, its four warps every fourth position.
A lane holds its share of the queries and of the sums in registers, so the cache is read once a group of heads, with no barrier on the way;
softmax is online, float32, with its maximum subtracted. The warps of a block meet in shared memory, the splits in `mla_combine`.
"""
from __future__ import annotations
import math
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.nn.intrinsics import Target, after_previous, group_reduce, group_sum, target
from tinygrad.nn.matvec import add, launch, local
from tinygrad.uop.ops import Ops

WARPS, HEADS, AT_ONCE = 4, 2, 4   # of a block, of a block, positions a warp reads at once
STEP = WARPS * AT_ONCE           # positions a block reads at once
BLOCKS = 384                     # as many as a large GPU holds at once (three a multiprocessor of 132)
NEVER = -1e30  # a score that no position has; finite, so that differences stay numbers

def mla_attention(q_latent:Tensor, q:Tensor, cache:Tensor, pos:UOp|int|Tensor, scale:float) -> Tensor:
  """q_latent: float32 (T, H, L); q: float32 (T, H·head), each head's last R numbers rotated; cache: (C, L+R), with the tokens from pos on
  written; pos: a number or Variable, or int32 (1,) on the device -> float32 (T, H, L), softmax(q·k·scale)·v"""
  if isinstance(pos, Tensor):
    t = target()
    assert t is not None, "a position on the device is for kernels"
    return mla_combine(t, *mla_splits(t, q_latent[0], q.reshape(q_latent.shape[1], -1), cache, pos, scale), pos).unsqueeze(0)
  return mla_attention_ops(q_latent, q, cache, pos, scale)

def mla_attention_ops(q_latent:Tensor, q:Tensor, cache:Tensor, pos:UOp|int, scale:float) -> Tensor:
  T, H, L = q_latent.shape
  query = q_latent.cat(q.reshape(T, H, -1)[..., L - cache.shape[1]:], dim=-1)
  keys = cache[:pos+T].cast(dtypes.float)
  scores = (query @ keys.transpose(0, 1)) * scale  # (T, H, pos+T)
  if T > 1:
    future = Tensor.full((T, 1, pos+T), float("-inf"), dtype=dtypes.float, buffer=False).reshape(T, pos+T).triu(pos+1)
    scores = scores + future.reshape(T, 1, pos+T)
  return scores.softmax(-1) @ keys[:, :L]

def group_heads(heads:int) -> int: return HEADS if heads % HEADS == 0 else 1
def split_count(heads:int, positions:int) -> int: return max(min(BLOCKS // (heads // group_heads(heads)), -(-positions // STEP)), 1)
def split_length(last:UOp, splits:int) -> UOp:
  """Positions a split, when `last` is the last one written: whole steps"""
  return (last // (splits * STEP) + 1) * STEP

def fits(t:Target, heads:int, latent:int, rope:int) -> bool:
  """Whether the lanes share a cached vector evenly and a block's sums have room in shared memory"""
  return latent % (4 * t.lanes) == 0 and rope % t.lanes == 0 and WARPS * min(HEADS, heads) * (latent + 2) * 4 <= t.shared_bytes

def mla_splits(t:Target, q_latent:Tensor, q:Tensor, cache:Tensor, pos:Tensor, scale:float) -> tuple[Tensor, Tensor]:
  """q_latent: float32 (H, L); q: float32 (H, nope+R), whose last R numbers are the rotated part; cache: half (C, L+R), written up to pos;
  pos: int32 (1,) -> float32 (splits, H, L), the splits' weighted sums, and (splits, H, 2), their maximum (in base 2) and sum of weights; splits past
  pos are not written"""
  (H, L), (_, q_dim), (C, dim) = q_latent.shape, q.shape, cache.shape
  R, lanes, G, splits = dim - L, t.lanes, group_heads(H), split_count(H, C)
  n, r = L // lanes, R // lanes                                              # of the latent and the rotated part, a lane's share
  def body(b:dict[str, UOp]) -> list[UOp]:
    split, group, thread = UOp.special(splits, "gidx0"), UOp.special(H // G, "gidx1"), UOp.special(WARPS * lanes, "lidx0")
    warp, lane, previous = thread // lanes, thread % lanes, after_previous(t)
    last = b["pos"][0].load().cast(dtypes.weakint)
    length = split_length(last, splits)
    active = split * length <= last
    def latent_dim(i:int) -> UOp: return (i // 4 * lanes + lane) * 4 + i % 4
    def rope_dim(i:int) -> UOp: return lane * r + i
    factor = scale * math.log2(math.e)
    query = [[b["q_latent"][(group * G + h) * L + latent_dim(i) + previous].load() * factor for i in range(n)] +
             [b["q"][(group * G + h) * q_dim + q_dim - R + rope_dim(i) + previous].load() * factor for i in range(r)] for h in range(G)]
    # running maximum, sum of weights and weighted sums
    state = UOp.placeholder((G * (n + 2),), dtypes.float, slot=2, addrspace=AddrSpace.REG)
    state = state.after(UOp.group(*[state[h * (n + 2) + i].store(NEVER if i == 0 else 0.0) for h in range(G) for i in range(n + 2)]))
    at = UOp.range(active.where(((last - split * length) // STEP + 1).minimum(length // STEP), 0), 0)
    now = state.after(at)
    keys, valid = [], []
    for j in range(AT_ONCE):
      p = split * length + (at * AT_ONCE + j) * WARPS + warp
      valid.append(p <= last)
      p = p.minimum(last) + previous
      keys.append([b["cache"][p * dim + latent_dim(i)].load().cast(dtypes.float) for i in range(n)] +
                  [b["cache"][p * dim + L + rope_dim(i)].load().cast(dtypes.float) for i in range(r)])
    updates = []
    for h in range(G):
      scores = []
      for key, ok in zip(keys, valid):
        s = None
        for a, k in zip(query[h], key): s = add(s, a * k)
        scores.append(ok.where(group_sum(t, s, lanes), NEVER))
      old = now[h * (n + 2)].load()
      top = old
      for s in scores: top = top.maximum(s)
      shrink = (old - top).exp2()
      weights = [ok.where((s - top).exp2(), 0.0) for s, ok in zip(scores, valid)]
      total = now[h * (n + 2) + 1].load() * shrink
      for w in weights: total = total + w
      updates += [now[h * (n + 2)].store(top), now[h * (n + 2) + 1].store(total)]
      for i in range(n):
        y = now[h * (n + 2) + 2 + i].load() * shrink
        for w, key in zip(weights, keys): y = y + w * key[i]
        updates.append(now[h * (n + 2) + 2 + i].store(y))
    state = state.after(UOp.group(*updates).end(at))
    # the block's warps meet
    sums, tops = local(WARPS * G * L, dtypes.float, 0), local(WARPS * G * 2, dtypes.float, 1)
    written = [sums[(warp * G + h) * L + latent_dim(i)].store(state[h * (n + 2) + 2 + i].load()) for h in range(G) for i in range(n)]
    written += [tops[((warp * G + h) * 2 + i).valid(lane.eq(0))].store(state[h * (n + 2) + i].load()) for h in range(G) for i in range(2)]
    barrier = UOp(Ops.BARRIER, src=tuple(written))
    sums, tops, done = sums.after(barrier), tops.after(barrier), []
    for h in range(G):
      each = [tops[(w * G + h) * 2].load() for w in range(WARPS)]
      top = each[0]
      for m in each[1:]: top = top.maximum(m)
      shrink, total = [(m - top).exp2() for m in each], None
      for w in range(WARPS): total = add(total, tops[(w * G + h) * 2 + 1].load() * shrink[w])
      out = split * H + group * G + h
      done += [b["tops"][(out * 2 + i).valid(thread.eq(0) & active)].store(v) for i, v in enumerate((top, total))]
      for first in range(0, L, WARPS * lanes):
        y = None
        for w in range(WARPS): y = add(y, sums[(w * G + h) * L + first + thread].load() * shrink[w])
        done.append(b["sums"][(out * L + first + thread).valid(active)].store(y))
    return done
  outs = {"sums": Tensor.empty(splits, H, L, dtype=dtypes.float), "tops": Tensor.empty(splits, H, 2, dtype=dtypes.float)}
  sums, tops = launch(f"mla_splits_{splits}_{H}_{L}_{R}", outs, {"q_latent": q_latent, "q": q, "cache": cache, "pos": pos}, body, cache.nbytes())
  return sums, tops

def mla_combine(t:Target, sums:Tensor, tops:Tensor, pos:Tensor) -> Tensor:
  """The splits of mla_splits become float32 (H, L). A warp takes every eighth split, a lane four numbers."""
  (splits, H, L), warps, lanes = sums.shape, 8, t.lanes
  def body(b:dict[str, UOp]) -> list[UOp]:
    part, head, thread = UOp.special(L // (4 * lanes), "gidx0"), UOp.special(H, "gidx1"), UOp.special(warps * lanes, "lidx0")
    warp, lane, previous = thread // lanes, thread % lanes, after_previous(t)
    last = b["pos"][0].load().cast(dtypes.weakint)
    count = last // split_length(last, splits) + 1
    def entry(s:UOp, i:int) -> UOp: return b["tops"][((s * H + head) * 2 + i + previous).valid(s < count)].load()
    top = None
    for first in range(0, splits, lanes):
      s = lane + first
      m = (s < count).where(entry(s, 0), NEVER)
      top = m if top is None else top.maximum(m)
    top = group_reduce(t, top, lanes, lambda x, y: x.maximum(y))
    total, y = None, [None] * 4
    for first in range(0, splits, warps):
      s = warp + first
      weight = (s < count).where((entry(s, 0) - top).exp2(), 0.0)
      total = add(total, weight * entry(s, 1))
      for i in range(4): y[i] = add(y[i], weight * b["sums"][((s * H + head) * L + (part * lanes + lane) * 4 + i + previous).valid(s < count)].load())
    shared, totals = local(warps * lanes * 4, dtypes.float, 0), local(warps, dtypes.float, 1)
    written = [shared[(warp * lanes + lane) * 4 + i].store(v) for i, v in enumerate(y)]
    barrier = UOp(Ops.BARRIER, src=(*written, totals[warp.valid(lane.eq(0))].store(total)))
    shared, totals, value, weight = shared.after(barrier), totals.after(barrier), None, None
    at = thread.minimum(lanes * 4 - 1)
    for w in range(warps): value, weight = add(value, shared[w * lanes * 4 + at].load()), add(weight, totals[w].load())
    return [b["context"][(head * L + part * (lanes * 4) + at).valid(thread < lanes * 4)].store(value / weight)]
  context = Tensor.empty(H, L, dtype=dtypes.float)
  return launch(f"mla_combine_{splits}_{H}_{L}", {"context": context}, {"sums": sums, "tops": tops, "pos": pos}, body)[0]

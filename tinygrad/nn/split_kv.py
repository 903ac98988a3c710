"""Absorbed attention of one token over the latent cache, which is split over the blocks of a launch."""
from __future__ import annotations
import math
from typing import Callable
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.nn.intrinsics import MMA_CUDA, Target, group_reduce, group_sum, of_lane, pdl_wait
from tinygrad.nn.kernel import add, launch, local
from tinygrad.uop.ops import Ops

WARPS, HEADS, AT_ONCE = 4, 2, 4  # by lanes: of a block, of a block, positions that a warp reads at once
TILE, LATENT_PER_WARP = 16, 64             # by tiles: positions, and latent numbers that a warp weighs
MULTIPROCESSORS = 132            # of a large GPU; by lanes each holds three blocks
NEVER = -1e30  # a score that no position has; finite, so that differences stay numbers

def group_heads(heads:int) -> int: return HEADS if heads % HEADS == 0 else 1

def uses_tensor_cores(t:Target, latent:int, rope:int) -> bool:
  """Whether tensor cores take the products: whole pieces of numbers, and fragments that share their inner places among lanes"""
  return t.mma is MMA_CUDA and latent % LATENT_PER_WARP == 0 and (latent + rope) % t.mma.K == 0 and latent // LATENT_PER_WARP in (2, 4, 8)

def padded(heads:int) -> int: return -(-heads // 8) * 8

def query_place(head:UOp, number:UOp, latent:int) -> UOp:
  """Where a head's latent query has a number, when tiles are to read it: as the lanes of a warp take a tile's share of it"""
  return ((head // 8 * (latent // 16) + number // 16) * 32 + head % 8 * 4 + number % 16 // 4) * 4 + number % 4

def head_tiles(heads:int) -> int:
  """Tiles of eight heads a block: all, if its registers can hold them"""
  tiles = -(-heads // 8)
  return -(-tiles // -(-tiles // 3))

def plan_splits(t:Target, heads:int, latent:int, cache:Tensor) -> tuple[int, int]:
  """(splits of a cache, positions that a block reads at once: a split is whole steps of so many)"""
  positions, dim = cache.shape
  if uses_tensor_cores(t, latent, dim - latent): step, blocks = 2 * TILE, MULTIPROCESSORS // -(-heads // (8 * head_tiles(heads)))
  else: step, blocks = WARPS * AT_ONCE, 3 * MULTIPROCESSORS // (heads // group_heads(heads))
  return max(min(blocks, -(-positions // step)), 1), step

def split_length(last:UOp, splits:int, step:int) -> UOp:
  """Positions a split, when `last` is the last one written"""
  return (last // (splits * step) + 1) * step

def takes(t:Target, heads:int, latent:int, rope:int) -> bool:
  """Whether the lanes share a cached vector evenly and a block's sums have room in shared memory"""
  return latent % (4 * t.lanes) == 0 and rope % t.lanes == 0 and WARPS * min(HEADS, heads) * (latent + 2) * 4 <= t.shared_bytes

def split_kv(t:Target, q_latent:Tensor, q:Tensor, cache:Tensor, pos:Tensor, scale:float) -> tuple[Tensor, Tensor]:
  """q_latent: float32 (H, L), or for tiles half (padded(H), L) in the order of query_place; q: float32 (H, nope+R), whose last R numbers are the rotated part; cache: half (C, L+R), written up to pos;
  pos: int32 (1,) -> float32 (splits, H, L), the splits' weighted sums, and (splits, H, 2), their maximum (in base 2) and sum of weights; splits past
  pos are not written"""
  (H, q_dim), L, dim = q.shape, q_latent.shape[1], cache.shape[1]
  splits, step = plan_splits(t, H, L, cache)
  form = split_kv_mma if uses_tensor_cores(t, L, dim - L) else split_kv_simt
  body = form(t, H, L, q_dim, dim, splits, step, scale)
  outs = {"sums": Tensor.empty(splits, H, L, dtype=dtypes.float), "tops": Tensor.empty(splits, H, 2, dtype=dtypes.float)}
  sums, row_max = launch(f"mla_{form.__name__}_{splits}_{H}_{L}_{dim - L}", outs, {"q_latent": q_latent, "q": q, "cache": cache, "pos": pos}, body,
                      cache.nbytes())
  return sums, row_max

def split_kv_simt(t:Target, H:int, L:int, q_dim:int, dim:int, splits:int, step:int, scale:float) -> Callable[[dict[str, UOp]], list[UOp]]:
  R, lanes, G = dim - L, t.lanes, group_heads(H)
  n, r = L // lanes, R // lanes                                              # of the latent and the rotated part, a lane's share
  def body(b:dict[str, UOp]) -> list[UOp]:
    split, group, thread = UOp.special(splits, "gidx0"), UOp.special(H // G, "gidx1"), UOp.special(WARPS * lanes, "lidx0")
    warp, lane, wait_zero = thread // lanes, thread % lanes, pdl_wait(t)
    last = b["pos"][0].load().cast(dtypes.weakint)
    length = split_length(last, splits, step)
    active = split * length <= last
    def latent_dim(i:int) -> UOp: return (i // 4 * lanes + lane) * 4 + i % 4
    def rope_dim(i:int) -> UOp: return lane * r + i
    factor = scale * math.log2(math.e)
    query = [[b["q_latent"][(group * G + h) * L + latent_dim(i) + wait_zero].load() * factor for i in range(n)] +
             [b["q"][(group * G + h) * q_dim + q_dim - R + rope_dim(i) + wait_zero].load() * factor for i in range(r)] for h in range(G)]
    # running maximum, sum of weights and weighted sums
    state = UOp.placeholder((G * (n + 2),), dtypes.float, slot=2, addrspace=AddrSpace.REG)
    state = state.after(UOp.group(*[state[h * (n + 2) + i].store(NEVER if i == 0 else 0.0) for h in range(G) for i in range(n + 2)]))
    at = UOp.range(active.where(((last - split * length) // step + 1).minimum(length // step), 0), 0)
    now = state.after(at)
    keys, valid = [], []
    for j in range(AT_ONCE):
      p = split * length + (at * AT_ONCE + j) * WARPS + warp
      valid.append(p <= last)
      p = p.minimum(last) + wait_zero
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
      rescale = (old - top).exp2()
      weights = [ok.where((s - top).exp2(), 0.0) for s, ok in zip(scores, valid)]
      total = now[h * (n + 2) + 1].load() * rescale
      for w in weights: total = total + w
      updates += [now[h * (n + 2)].store(top), now[h * (n + 2) + 1].store(total)]
      for i in range(n):
        y = now[h * (n + 2) + 2 + i].load() * rescale
        for w, key in zip(weights, keys): y = y + w * key[i]
        updates.append(now[h * (n + 2) + 2 + i].store(y))
    state = state.after(UOp.group(*updates).end(at))
    # the block's warps meet
    sums, row_max = local(WARPS * G * L, dtypes.float, 0), local(WARPS * G * 2, dtypes.float, 1)
    written = [sums[(warp * G + h) * L + latent_dim(i)].store(state[h * (n + 2) + 2 + i].load()) for h in range(G) for i in range(n)]
    written += [row_max[((warp * G + h) * 2 + i).valid(lane.eq(0))].store(state[h * (n + 2) + i].load()) for h in range(G) for i in range(2)]
    barrier = UOp(Ops.BARRIER, src=tuple(written))
    sums, row_max, done = sums.after(barrier), row_max.after(barrier), []
    for h in range(G):
      each = [row_max[(w * G + h) * 2].load() for w in range(WARPS)]
      top = each[0]
      for m in each[1:]: top = top.maximum(m)
      rescale, total = [(m - top).exp2() for m in each], None
      for w in range(WARPS): total = add(total, row_max[(w * G + h) * 2 + 1].load() * rescale[w])
      out = split * H + group * G + h
      done += [b["tops"][(out * 2 + i).valid(thread.eq(0) & active)].store(v) for i, v in enumerate((top, total))]
      for first in range(0, L, WARPS * lanes):
        y = None
        for w in range(WARPS): y = add(y, sums[(w * G + h) * L + first + thread].load() * rescale[w])
        done.append(b["sums"][(out * L + first + thread).valid(active)].store(y))
    return done
  return body

def split_kv_mma(t:Target, H:int, L:int, q_dim:int, dim:int, splits:int, step:int, scale:float) -> Callable[[dict[str, UOp]], list[UOp]]:
  """Queries, keys and weights of positions are halves, sums float32. The warps of a block share two tiles of positions: a warp multiplies its part
  of the vectors' numbers for one of them; the parts of the scores meet in shared memory, every warp takes the softmax of all for itself and
  weighs its part of the latent numbers. A product does not ask in which order its inner numbers come, nor a fragment which row is which:
  lanes take neighbouring halves of a cached vector, as keys and as values, and call them what the fragment wants."""
  m, warps, pitch, columns = t.mma, L // LATENT_PER_WARP, step + 16, head_tiles(H)
  assert m is not None
  pieces, shares = dim // m.K, warps * TILE // step
  each, heads = -(-pieces // shares), columns * m.N
  # of a lane's inner numbers (columns of a, rows of b) four are neighbours: which of them an element is, and in which of a's two rows
  inner_a, row_a = [i // 4 * 2 + i % 2 for i in range(8)], [i // 2 % 2 for i in range(8)]
  def body(b:dict[str, UOp]) -> list[UOp]:
    split, group, thread = UOp.special(splits, "gidx0"), UOp.special(-(-H // heads), "gidx1"), UOp.special(warps * 32, "lidx0")
    warp, lane, wait_zero = thread // 32, thread % 32, pdl_wait(t)
    eighth, quarter, share = lane // 4, lane % 4, warp % shares
    last = b["pos"][0].load().cast(dtypes.weakint)
    length = split_length(last, splits, step)
    active, first = split * length <= last, split * length
    def head(column:int, within:UOp) -> tuple[UOp, UOp|None]:
      """A head of the block, and whether there is one"""
      number = group * heads + column * m.N + within
      return (number, None) if H % heads == 0 else (number.minimum(H - 1), number < H)
    def four(buffer:UOp, at:UOp, ok:UOp|None=None) -> list[UOp]:
      return [buffer[at + j if ok is None else (at + j).valid(ok)].load() for j in range(4)]
    def numbers(i:int) -> tuple[UOp, UOp|None]:
      """The first of the lane's four numbers of its warp's piece i, and whether there is such a piece"""
      piece = share * each + i
      return piece * m.K + quarter * 4, piece < pieces if pieces % shares else None
    def queries(column:int, i:int) -> list[UOp]:
      (number, ok), h = numbers(i), group * heads + column * m.N + eighth
      latent, turned = number < L, number >= L
      x = four(b["q_latent"], query_place(h, number, L) + wait_zero * 4, latent if H % heads == 0 else latent & (h < padded(H)))
      y = four(b["q"], head(column, eighth)[0] * q_dim + q_dim - dim + number + wait_zero * 4, turned if ok is None else turned & ok)
      return [latent.where(v, w.cast(dtypes.half)) for v, w in zip(x, y)]
    query = [[queries(c, i) for i in range(each)] for c in range(columns)]
    # a column's running maximum and sum of weights, and the weighted sums
    sums = 16
    def top_of(c:int) -> int: return c * (sums + 2)
    state = UOp.placeholder((columns * (sums + 2),), dtypes.float, slot=2, addrspace=AddrSpace.REG)
    state = state.after(UOp.group(*[state[top_of(c) + i].store(NEVER if i == 0 else 0.0) for c in range(columns) for i in range(sums + 2)]))
    at = UOp.range(active.where(((last - first) // step + 1).minimum(length // step), 0), 0)
    now, start = state.after(at), first + at * step
    def row(p:UOp) -> UOp: return (p.minimum(last) + wait_zero) * dim
    # the warp's part of the scores
    parts = [[UOp.const(0.0, dtypes.float)] * 4 for _ in range(columns)]
    for i in range(each):
      number, ok = numbers(i)
      keys = [four(b["cache"], row(start + warp // shares * TILE + eighth + r * 8) + number, ok) for r in range(2)]
      for c in range(columns): parts[c] = m([keys[r][j] for r, j in zip(row_a, inner_a)], query[c][i], parts[c])
    scores = local(shares * heads * pitch, dtypes.float, 0)
    stored = [scores[(share * heads + c * m.N + quarter * 2 + i % 2) * pitch + warp // shares * TILE + eighth + i // 2 * 8].store(x)
              for c, part in enumerate(parts) for i, x in enumerate(part)]
    # the values do not wait for them
    def places(tile:int) -> list[UOp]: return [start + tile * TILE + quarter * 4 + r for r in range(4)]  # the lane's positions
    rows = [[[four(b["cache"], row(p) + warp * LATENT_PER_WARP + h * 32 + eighth * 4) for p in places(tile)] for h in range(2)] for tile in range(step // TILE)]
    scores = scores.after(UOp(Ops.BARRIER, src=(*stored, *[v for c in rows for h in c for p in h for v in p])))
    updates = []
    for c in range(columns):
      # the softmax: a lane has a head and a quarter of the positions
      found = []
      for tile in range(step // TILE):
        for i, p in enumerate(places(tile)):
          s = None
          for w in range(shares): s = add(s, scores[(w * heads + c * m.N + eighth) * pitch + tile * TILE + quarter * 4 + i].load())
          assert s is not None
          found.append((p <= last).where(s * (scale * math.log2(math.e)), NEVER))
      old, top = now[top_of(c)].load(), found[0]
      for s in found[1:]: top = top.maximum(s)
      top = old.maximum(group_reduce(t, top, 4, lambda x, y: x.maximum(y)))
      rescale, weights, total = (old - top).exp2(), [(s - top).exp2() for s in found], None
      for w in weights: total = add(total, w)
      updates += [now[top_of(c)].store(top), now[top_of(c) + 1].store(now[top_of(c) + 1].load() * rescale + total)]
      # the weighted sums of the warp's latent numbers
      rescales = [of_lane(t, rescale, quarter * 8 + i * 4) for i in range(2)]   # of the heads whose sums the lane has
      for n in range(4):
        y, base = None, top_of(c) + 2 + n * 4
        for tile in range(step // TILE):
          values = rows[tile][n // 2]
          y = m([values[j][n % 2 * 2 + r] for r, j in zip(row_a, inner_a)], [w.cast(dtypes.half) for w in weights[tile * 4:][:4]],
                y or [now[base + i].load() * rescales[i % 2] for i in range(4)])
        assert y is not None
        updates += [now[base + i].store(v) for i, v in enumerate(y)]
    state, done = state.after(UOp.group(*updates).end(at)), []
    for c in range(columns):
      total = group_sum(t, state[top_of(c) + 1].load(), 4)
      (number, ok), one = head(c, eighth), active & warp.eq(0) & quarter.eq(0)
      for i, v in enumerate((state[top_of(c)].load(), total)):
        done.append(b["tops"][((split * H + number) * 2 + i).valid(one if ok is None else one & ok)].store(v))
      for n in range(4):
        for i in range(4):
          (number, ok), latent = head(c, quarter * 2 + i % 2), warp * LATENT_PER_WARP + n // 2 * 32 + eighth * 4 + n % 2 * 2 + i // 2
          done.append(b["sums"][((split * H + number) * L + latent).valid(active if ok is None else active & ok)]
                      .store(state[top_of(c) + 2 + n * 4 + i].load()))
    return done
  return body

def mla_combine(t:Target, sums:Tensor, row_max:Tensor, cache:Tensor, pos:Tensor) -> Tensor:
  """The splits that split_kv made of a cache become float32 (H, L). A warp takes every eighth split, a lane four numbers."""
  (splits, H, L), warps, lanes = sums.shape, 8, t.lanes
  _, step = plan_splits(t, H, L, cache)
  def body(b:dict[str, UOp]) -> list[UOp]:
    part, head, thread = UOp.special(L // (4 * lanes), "gidx0"), UOp.special(H, "gidx1"), UOp.special(warps * lanes, "lidx0")
    warp, lane, wait_zero = thread // lanes, thread % lanes, pdl_wait(t)
    last = b["pos"][0].load().cast(dtypes.weakint)
    count = last // split_length(last, splits, step) + 1
    def entry(s:UOp, i:int) -> UOp: return b["tops"][((s * H + head) * 2 + i + wait_zero).valid(s < count)].load()
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
      for i in range(4): y[i] = add(y[i], weight * b["sums"][((s * H + head) * L + (part * lanes + lane) * 4 + i + wait_zero).valid(s < count)].load())
    shared, totals = local(warps * lanes * 4, dtypes.float, 0), local(warps, dtypes.float, 1)
    written = [shared[(warp * lanes + lane) * 4 + i].store(v) for i, v in enumerate(y)]
    barrier = UOp(Ops.BARRIER, src=(*written, totals[warp.valid(lane.eq(0))].store(total)))
    shared, totals, value, weight = shared.after(barrier), totals.after(barrier), None, None
    at = thread.minimum(lanes * 4 - 1)
    for w in range(warps): value, weight = add(value, shared[w * lanes * 4 + at].load()), add(weight, totals[w].load())
    return [b["context"][(head * L + part * (lanes * 4) + at).valid(thread < lanes * 4)].store(value / weight)]
  context = Tensor.empty(H, L, dtype=dtypes.float)
  return launch(f"mla_combine_{splits}_{H}_{L}", {"context": context}, {"sums": sums, "tops": row_max, "pos": pos}, body)[0]

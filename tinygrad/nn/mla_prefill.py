"""Absorbed attention of many tokens over the cache, by tensor cores.

A block takes 16 tokens of a head, and goes along the cache 32 positions at a time; its four warps part the numbers of a cached vector. Each has
its quarter of the queries in registers, multiplies it with its quarter of the keys, and the quarters of the scores meet in shared memory; each
then weighs its quarter of the values. The softmax is online, float32, in every warp for itself. The cache is read from where it lies: a warp's keys
are its values a moment later, and find themselves in the nearest cache.
"""
from __future__ import annotations
import math
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.nn.intrinsics import Target, shuffle
from tinygrad.nn.kernel import launch, local, total
from tinygrad.nn.matmul import SLAB, depth_of
from tinygrad.uop.ops import Ops

TOKENS, POSITIONS, WARPS = 16, 32, 4
PITCH = POSITIONS + 8   # of a row of scores in shared memory: rows begin in other banks
NEVER = -1e30

def takes(t:Target, latent:int, dim:int) -> bool:
  return t.mma is not None and latent % (WARPS * 4 * t.mma.N) == 0 and dim % SLAB == 0

def mla_prefill(t:Target, q_latent:Tensor, q:Tensor, cache:Tensor, pos:Tensor, scale:float) -> Tensor:
  """q_latent: (T, H, L); q: (T, H·head), each head's last R numbers rotated; cache: half (C, L+R), with the tokens from pos on written;
  pos: int32 (1,) -> half (T, H, L), softmax(q·k·scale)·v"""
  (T, H, L), (C, dim), head, m = q_latent.shape, cache.shape, q.shape[1] // q_latent.shape[1], t.mma
  assert m is not None
  down, steps, slabs, share, groups = TOKENS // m.M, SLAB // m.K, dim // SLAB, -(-dim // SLAB // WARPS), L // (WARPS * 4 * m.N)
  def body(b:dict[str, UOp]) -> list[UOp]:
    of_head, group, thread = UOp.special(H, "gidx0"), UOp.special(-(-T // TOKENS), "gidx1"), UOp.special(WARPS * t.lanes, "lidx0")
    warp, lane, start = thread // t.lanes, thread % t.lanes, b["pos"][0].load().maximum(0).minimum(C - 1).cast(dtypes.weakint)
    def token_of(row:UOp) -> UOp: return (group * TOKENS + row).minimum(T - 1)
    places = [m.a(lane, e) for e in range(m.counts[0])]
    row_slots = list(dict.fromkeys(row for row, _ in places))          # the rows of a product that a lane holds numbers of
    partners = [d for d in (1, 2, 4, 8, 16) if m.a(UOp.const(d), 0)[0].simplify() is m.a(UOp.const(0), 0)[0].simplify()]  # lanes of the same row
    def over_row(x:UOp, op) -> UOp:
      for d in partners: x = op(x, shuffle(t, x, d))
      return x
    # queries
    def query(row:UOp, slab:UOp, k:UOp) -> UOp:
      token, latent = token_of(row), slab * SLAB < L
      in_latent = b["q_latent"][((token * H + of_head) * L + slab * SLAB + k).valid(latent)].load().cast(dtypes.half)
      at = (token * H + of_head + 1) * head - dim + slab * SLAB + k
      in_rope = b["q"][at.valid((slab < slabs) & (slab * SLAB >= L))].load().cast(dtypes.half)
      return in_latent + in_rope                                      # one of them is 0
    own_slabs = [i * WARPS + warp for i in range(share)]
    queries = [[[query(i * m.M + row, slab, depth_of(m, part, k)) for row, k in places] for i in range(down)]
               for slab in own_slabs for part in range(steps)]
    # running maximum, sum of weights (a lane's own) and weighted sums
    rows, each = down * len(row_slots), m.counts[2]
    state = UOp.placeholder((2 * rows + down * groups * 4 * each,), dtypes.float, slot=0, addrspace=AddrSpace.REG)
    state = state.after(UOp.group(*[state[i].store(NEVER if i < rows else 0.0) for i in range(state.shape[0])]))
    last = start + (group * TOKENS + TOKENS - 1).minimum(T - 1)
    at = UOp.range(last // POSITIONS + 1, 0)
    now = state.after(at)
    def key(position:UOp, index:UOp, ok:UOp|None=None) -> UOp:
      index = (at * POSITIONS + position).minimum(C - 1) * dim + index
      return b["cache"][index if ok is None else index.valid(ok)].load()
    scores = local(WARPS * TOKENS * PITCH, dtypes.float, 0)
    written = []
    for j in range(POSITIONS // m.N):
      sums = [[UOp.const(0.0, dtypes.float)] * each for _ in range(down)]
      for n, slab in enumerate(own_slabs):
        for part in range(steps):
          keys = [key(j * m.N + row, slab * SLAB + depth_of(m, part, k), slab < slabs if slabs % WARPS else None)
                  for k, row in (m.b(lane, e) for e in range(m.counts[1]))]
          for i in range(down): sums[i] = m(queries[n * steps + part][i], keys, sums[i])
      for i in range(down):
        for e in range(each):
          row, column = m.c(lane, e)
          written.append(scores[(warp * TOKENS + i * m.M + row) * PITCH + j * m.N + column].store(sums[i][e]))
    scores = scores.after(UOp(Ops.BARRIER, src=tuple(written)))
    factor, updates, weights, rescales = scale * math.log2(math.e), [], [], []
    for i in range(down):
      found:list[list[list[UOp]]] = []                                 # by slab and step of positions: the lane's elements
      for slab in range(POSITIONS // SLAB):
        for part in range(steps):
          values = []
          for row, k in places:
            position = slab * SLAB + depth_of(m, part, k)
            s = total([scores[(w * TOKENS + i * m.M + row) * PITCH + position].load() for w in range(WARPS)], UOp.add) * factor
            values.append((at * POSITIONS + position <= start + token_of(i * m.M + row)).where(s, NEVER))
          found.append(values)
      row_max = []
      for r, slot in enumerate(row_slots):
        old = now[i * len(row_slots) + r].load()
        own = total([v for values in found for v, (row, _) in zip(values, places) if row is slot], UOp.maximum)
        row_max.append(top := over_row(own, UOp.maximum).maximum(old))
        rescales.append((old - top).exp2())
        updates.append(now[i * len(row_slots) + r].store(top))
      exps = [[(v - row_max[row_slots.index(row)]).exp2() for v, (row, _) in zip(values, places)] for values in found]
      for r, slot in enumerate(row_slots):
        own = total([v for values in exps for v, (row, _) in zip(values, places) if row is slot], UOp.add)
        at_sum = rows + i * len(row_slots) + r
        updates.append(now[at_sum].store(now[at_sum].load() * rescales[i * len(row_slots) + r] + own))
      weights.append([[v.cast(dtypes.half) for v in values] for values in exps])
    def slot_of(i:int, e:int) -> int: return i * len(row_slots) + row_slots.index(m.c(lane, e)[0])
    def sum_at(i:int, g:int, n:int, e:int) -> int: return 2 * rows + ((i * groups + g) * 4 + n) * each + e
    first = warp * (L // WARPS)
    for g in range(groups):
      for n in range(4):
        sums = [[now[sum_at(i, g, n, e)].load() * rescales[slot_of(i, e)] for e in range(each)] for i in range(down)]
        for slab in range(POSITIONS // SLAB):
          for part in range(steps):
            values = [key(slab * SLAB + depth_of(m, part, k), first + (g * m.N + column) * 4 + n)
                      for k, column in (m.b(lane, e) for e in range(m.counts[1]))]
            for i in range(down): sums[i] = m(weights[i][slab * steps + part], values, sums[i])
        updates += [now[sum_at(i, g, n, e)].store(v) for i in range(down) for e, v in enumerate(sums[i])]
    state = state.after(UOp.group(*updates).end(at))
    inverse = [1.0 / over_row(state[rows + r].load(), UOp.add) for r in range(rows)]
    done = []
    for i in range(down):
      for e in range(each):
        row, column = m.c(lane, e)
        token = group * TOKENS + i * m.M + row
        for g in range(groups):
          for n in range(4):
            index = (token * H + of_head) * L + first + (g * m.N + column) * 4 + n
            value = state[sum_at(i, g, n, e)].load() * inverse[slot_of(i, e)]
            done.append(b["y"][index if T % TOKENS == 0 else index.valid(token < T)].store(value.cast(dtypes.half)))
    return done
  ins = {"q_latent": q_latent, "q": q, "cache": cache, "pos": pos}
  return launch(f"mla_prefill_{T}_{H}_{L}_{dim - L}", {"y": Tensor.empty(T, H, L, dtype=dtypes.half)}, ins, body, cache.nbytes())[0]

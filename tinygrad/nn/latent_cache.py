"""The latent cache: where a token's row lies, and how it is written."""
from __future__ import annotations
from tinygrad import UOp, dtypes
from tinygrad.nn.intrinsics import Target, group_sum
from tinygrad.nn.kernel import add, local, rotated
from tinygrad.uop.ops import Ops

def cache_row(t:Target, b:dict[str, UOp], L:int, dim:int, eps:float, token:UOp, thread:UOp, threads:int, wait_zero:UOp, slot:int,
              here:UOp|None=None) -> list[UOp]:
  """A block's stores of a token's row of the cache, [RMSNorm(kv)[:L] | RoPE(kv[L:])], where `here` holds"""
  pairs, squares = [], None
  for start in range(0, dim // 2, threads):
    at = (thread + start) * 2
    ok, latent = at < dim if here is None else here & (at < dim), at < L
    pair = [b["kv"][(token * dim + at + i + wait_zero).valid(ok)].load() for i in range(2)]
    squares = add(squares, (ok & latent).where(pair[0] * pair[0] + pair[1] * pair[1], 0.0))
    pairs.append((at, ok, latent, pair))
  assert squares is not None
  sums, warps = local(threads // t.lanes, dtypes.float, slot), threads // t.lanes
  mine = sums[(thread // t.lanes).valid((thread % t.lanes).eq(0))].store(group_sum(t, squares, t.lanes))
  sums, total = sums.after(UOp(Ops.BARRIER, src=(mine,))), None
  for w in range(warps): total = add(total, sums[w].load())
  factor, done = (total * (1.0 / L) + eps).rsqrt(), []
  for at, ok, latent, pair in pairs:
    turned = rotated(b, (dim - L) // 2, at - L, pair, ok & ~latent, token)
    for i in range(2):
      value = latent.where(pair[i] * factor * b["norm"][(at + i).valid(ok & latent)].load(), turned[i])
      index = (b["pos"][0].load().cast(dtypes.weakint) + token) * dim + at + i
      done.append(b["cache"][index.valid(ok)].store(value.cast(b["cache"].dtype)))
  return done

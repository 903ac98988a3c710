"""The latent cache: where a token's row lies, and how it is written."""
from __future__ import annotations
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn.intrinsics import Target, group_sum
from tinygrad.nn.kernel import add, local, rotated
from tinygrad.nn.step import Step
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

# ---- in plain ops ----

def write_rows(step:Step, cache:Tensor, rows:Tensor) -> Tensor:
  """The cache, (C, dim), with the rows of the step's tokens, float32 (T, dim), written"""
  rows = rows.cast(cache.dtype)
  if not step.on_device: return Tensor(cache.uop.after(cache[step.start:step.start + step.tokens].uop.store(rows.uop)))
  index = step.positions if step.tables is None else step.tables.gather(1, step.positions.unsqueeze(1)).squeeze(1)
  here = Tensor.arange(cache.shape[0], dtype=dtypes.int32, device=cache.device).unsqueeze(1).eq(index)  # (C, T), at most one true in a row
  written = here.unsqueeze(2).where(rows, 0).sum(1, dtype=cache.dtype)
  return cache.assign(here.any(1).unsqueeze(1).where(written, cache))

def visible_rows(step:Step, cache:Tensor) -> tuple[Tensor, Tensor|None]:
  """Keys by position, float32 (1, C, dim), or (T, C, dim) where sequences have tables; what is added to their scores, float32 (T, C): 0 up to the
  token's own position, -inf behind it; None: all are seen. C: up to the last token where the host knows its position, else all there can be"""
  if not step.on_device:
    T, end = step.tokens, step.start + step.tokens
    keys = cache[:end].cast(dtypes.float).unsqueeze(0)
    if T == 1: return keys, None
    future = Tensor.full((T, 1, end), float("-inf"), dtype=dtypes.float, device=cache.device, buffer=False)
    return keys, future.reshape(T, end).triu(step.start + 1)
  keys = cache.unsqueeze(0) if step.tables is None else cache[step.tables]
  positions = Tensor.arange(keys.shape[1], dtype=dtypes.int32, device=cache.device).unsqueeze(0)
  unseen = (positions <= step.positions.unsqueeze(1)).where(0.0, float("-inf"))
  return keys.cast(dtypes.float), unseen

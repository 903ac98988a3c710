"""Absorbed attention: every head reads the same cached vector, and values are a view of it.

The kernels take one new token over the whole cache; several tokens (prefill) take the plain-ops form.

Replaces the scores, softmax and weighted sum that the scheduler would make of it, each a pass over the cache.
What is written of the cache is cut into as many equal splits as there are places for blocks, so that a context of any length fills the machine once; a block
takes a split and a few heads, and the splits meet in `mla_combine`. Softmax is online, float32, with its maximum subtracted. Two forms:
by tiles, on tensor cores, all heads a block (see split_kv_mma);
by lanes, on every other target, two heads a block, its four warps every fourth position: a lane holds its share of the queries and of the sums in
registers, with no barrier on the way, and the warps of a block meet in shared memory.
"""
from __future__ import annotations
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import cpu, cpu_prefill
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.mla_prefill import fits as mla_prefill_fits, mla_prefill
from tinygrad.nn.norm_linear import position, prefill_target
from tinygrad.nn.split_kv import mla_combine, split_kv


def mla_attention(q_latent:Tensor, q:Tensor, cache:Tensor, pos:UOp|int|Tensor, scale:float) -> Tensor:
  """q_latent: (T, H, L), as latent_query makes it; q: float32 (T, H, head), each head's last R numbers rotated; cache: (C, L+R), with the tokens
  from pos on written; pos: a number or Variable, or int32 (1,) on the device -> float32 (T, H, L), softmax(q·k·scale)·v"""
  if isinstance(pos, Tensor) and cpu.device(): return cpu.mla_attention(q_latent, q.flatten(1), cache, pos, scale)
  if q_latent.shape[0] > 1 and cpu.device() and cpu_prefill.attention_fits(q_latent.shape[2]):
    return cpu_prefill.mla_attention(q_latent, q.flatten(1), cache, pos, scale)
  if isinstance(pos, Tensor) and q_latent.shape[0] == 1:
    t = target_of()
    assert t is not None, "a position on the device is for kernels"
    return mla_combine(t, *split_kv(t, q_latent[0], q[0], cache, pos, scale), cache, pos).unsqueeze(0)
  if (t := prefill_target(q_latent)) and mla_prefill_fits(t, q_latent.shape[2], cache.shape[1]):
    return mla_prefill(t, q_latent, q.flatten(1), cache, position(pos), scale)
  return mla_attention_ops(q_latent.cast(dtypes.float), q.cast(dtypes.float), cache, pos, scale)

def mla_attention_ops(q_latent:Tensor, q:Tensor, cache:Tensor, pos:UOp|int, scale:float) -> Tensor:
  T, H, L = q_latent.shape
  query = q_latent.cat(q[..., L - cache.shape[1]:], dim=-1)
  keys = cache[:pos+T].cast(dtypes.float)
  scores = (query @ keys.transpose(0, 1)) * scale  # (T, H, pos+T)
  if T > 1:
    future = Tensor.full((T, 1, pos+T), float("-inf"), dtype=dtypes.float, buffer=False).reshape(T, pos+T).triu(pos+1)
    scores = scores + future.reshape(T, 1, pos+T)
  return scores.softmax(-1) @ keys[:, :L]


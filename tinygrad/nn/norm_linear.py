"""Linear layers of decoding: RMSNorm in front, RoPE or a residual behind, several matrices of one input in a launch.

Each function takes T tokens. One token on a target with kernels is one launch; else the plain-ops form beside it serves, and is what the
kernels are tested against.
"""
from __future__ import annotations
from typing import Callable, Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import cpu, cpu_prefill
from tinygrad.nn.intrinsics import Target, target_of
from tinygrad.nn.kernel import UNIT, Matrix, Norm, Rope, Weight, launch, load4, rotated
from tinygrad.nn.latent_cache import cache_row
from tinygrad.nn.matmul import HALF_SCALE, matmul, rms_norm_half
from tinygrad.nn.matvec import RowSegments, linear_part, matvec
from tinygrad.nn.metal_mul_mat_id import QL_SHEXP_MSL, mul_mat_msl, serves
from tinygrad.nn.split_kv import padded, query_place, uses_tensor_cores

def decode_target(x:Tensor, *widths:int) -> Target|None:
  """The target whose kernels take this step: one token, vectors of whole units. None: the plain-ops form"""
  t = target_of() if x.shape[0] == 1 else None
  return t if t is not None and all(w % UNIT == 0 for w in widths) else None


def prefill_target(x:Tensor, *widths:int) -> Target|None:
  """The target whose tensor cores take this step: many tokens, vectors of several whole units"""
  t = target_of() if x.shape[0] > 1 else None
  return t if t is not None and t.mma is not None and all(w % UNIT == 0 and w > UNIT for w in widths) else None

def halves(x:Tensor) -> tuple[Tensor, float]:
  """x as halves, and what a product with them is to be multiplied by: halves are hidden numbers, times HALF_SCALE"""
  return (x, 1 / HALF_SCALE) if x.dtype == dtypes.half else (x.cast(dtypes.half).contiguous(), 1.0)

def heads_linear(x:Tensor, w:Weight, factor:float=1.0) -> Tensor:
  """A matrix a head: (T, H, in) -> (T, H, out), float32; by tensor cores it is halves, times the factor"""
  if (t := prefill_target(x, x.shape[2], w.shape[0] * w.shape[1])) is None: return w(x)
  return matmul(t, halves(x)[0], w, factor=factor, dtype=dtypes.half)

def position(pos:UOp|int|Tensor) -> Tensor:
  """int32 (1,) on the device, where kernels read it"""
  if isinstance(pos, Tensor): return pos
  if isinstance(pos, UOp): return Tensor(pos, dtype=dtypes.int32).reshape(1).contiguous()
  def body(b:dict[str, UOp]) -> list[UOp]: return [b["pos"][UOp.special(1, "lidx0")].store(pos)]
  return launch("position", {"pos": Tensor.empty(1, dtype=dtypes.int32)}, {}, body)[0]

def rows_of(matrix:Matrix, first:UOp|int=0) -> Callable[[UOp], RowSegments]: return lambda i: [(matrix, first + i)]

def norm_linear(x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None=None, residual:Tensor|None=None) -> list[Tensor]:
  """x: float32 (T, in); weights: matrices (out_i, in) of RMSNorm(x), or of x without a norm; rope rotates the heads of the first product, residual
  (T, out_0) is added to it -> float32 (T, out_i) each"""
  if x.shape[0] == 1 and cpu.fits(*weights) and (rope is None or isinstance(rope.pos, Tensor)):
    return cpu.norm_linear(x, norm, weights, rope, residual)
  if x.shape[0] > 1 and cpu.fits(*weights): return cpu_prefill.norm_linear(x, norm, weights, rope, residual)
  if (t := decode_target(x, x.shape[1])) and (rope is None or isinstance(rope.pos, Tensor)):
    return norm_linear_decode(t, x, norm, weights, rope, residual)
  if t := prefill_target(x, x.shape[1]): return norm_linear_prefill(t, x, norm, weights, rope, residual)
  return norm_linear_ops(x, norm, weights, rope, residual)

def norm_linear_ops(x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None=None, residual:Tensor|None=None) -> list[Tensor]:
  n = x if norm is None else norm(x).contiguous()
  first, *rest = [w(n) for w in weights]
  if rope is not None: first = rope.rotate_heads(first)
  return [first if residual is None else (residual + first).contiguous(), *rest]

def norm_linear_prefill(t:Target, x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None=None, residual:Tensor|None=None) -> list[Tensor]:
  """By tensor cores. What RoPE has rotated is halves."""
  n, factor = (rms_norm_half(t, x, norm)[0], 1.0) if norm is not None else halves(x)
  first, *rest = weights
  y = matmul(t, n, first, residual, factor, rope, None if rope is None else position(rope.pos), dtypes.float if rope is None else dtypes.half)
  return [y, *[matmul(t, n, w, factor=factor) for w in rest]]

def norm_linear_decode(t:Target, x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None=None, residual:Tensor|None=None) -> list[Tensor]:
  if norm is None and rope is None and len(weights) == 1 and residual is not None and serves(t, QL_SHEXP_MSL, weights):
    return [mul_mat_msl(x, weights[0], residual=residual)]
  outs = {f"y{i}": Tensor.empty(1, w.shape[0], dtype=dtypes.float) for i, w in enumerate(weights)}
  ins = {"x": x, **({"norm": norm.weight} if norm else {}), **({"rope": rope.table, "pos": rope.pos} if rope else {}),
         **({} if residual is None else {"residual": residual})}
  for i, w in enumerate(weights): ins |= w.args(f"w{i}")
  def body(b:dict[str, UOp]) -> list[UOp]:
    def epilogue(sums:list[UOp], row:UOp) -> list[UOp]:
      at = row % rope.head - rope.nope
      return rotated(b, rope.table.shape[1], at, sums, at >= 0)
    parts = [linear_part(w.shape[0], rows_of(w.matrix(b, f"w{i}")), b[f"y{i}"], w.integer, epilogue=epilogue if rope is not None and i == 0 else None,
                       residual=b.get("residual") if i == 0 else None) for i, w in enumerate(weights)]
    return matvec(t, [x.shape[1] // UNIT], load4(b["x"]), parts, (load4(b["norm"]), norm.eps) if norm else None)
  parts = {"norm": norm, "linear": weights, "rope": rope, "residual": residual}
  name = "_".join([part for part, there in parts.items() if there is not None] + [w.label for w in weights])
  return launch(name, outs, ins, body, sum(w.nbytes for w in weights))

def latent_query(q:Tensor, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]:
  """The heads' queries in latent space, and the tokens' rows of the cache: [RMSNorm(kv)[:L] | RoPE(kv[L:])] written from pos on.
  q: float32 (T, H·head); kv: float32 (T, L+R); k_b: (H, L, nope); cache: (C, L+R) -> float32 (T, H, L), or as split_kv wants it, and the cache"""
  if cpu.fits(k_b) and isinstance(rope.pos, Tensor): return cpu.latent_query(q, kv, k_b, norm, cache, rope)
  if q.shape[0] > 1 and cpu.fits(k_b): return cpu_prefill.latent_query(q, kv, k_b, norm, cache, rope)
  if (t := decode_target(q, k_b.shape[2])) and isinstance(rope.pos, Tensor): return latent_query_decode(t, q, kv, k_b, norm, cache, rope)
  if (t := prefill_target(q, k_b.shape[2])): return latent_query_prefill(t, q, kv, k_b, norm, cache, rope)
  return latent_query_ops(q, kv, k_b, norm, cache, rope)

def latent_query_ops(q:Tensor, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]:
  (H, L, nope), T = k_b.shape, q.shape[0]
  row = norm(kv[:, :L]).cat(rope.rotate(kv[:, L:]), dim=-1)
  written = Tensor(cache.uop.after(cache[rope.pos:rope.pos+T].uop.store(row.cast(cache.dtype).uop)))
  return k_b(q.reshape(T, H, -1)[..., :nope].cast(dtypes.float)), written

def latent_query_prefill(t:Target, q:Tensor, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]:
  """By tensor cores: q and the result are halves"""
  (H, L, _), threads = k_b.shape, 128
  def body(b:dict[str, UOp]) -> list[UOp]:
    token, thread = UOp.special(q.shape[0], "gidx0"), UOp.special(threads, "lidx0")
    return cache_row(t, b, L, cache.shape[1], norm.eps, token, thread, threads, token * 0, 0)
  written = launch(f"cache_rows_{q.shape[0]}_{cache.shape[1]}", {"cache": cache},
                   {"kv": kv, "norm": norm.weight, "rope": rope.table, "pos": position(rope.pos)}, body)[0]
  return matmul(t, q.reshape(-1, H, q.shape[1] // H), k_b, dtype=dtypes.half), written


def latent_query_decode(t:Target, q:Tensor, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]:
  H, L, nope = k_b.shape
  tiles = uses_tensor_cores(t, L, cache.shape[1] - L)
  def body(b:dict[str, UOp]) -> list[UOp]:
    item = UOp.special(H, "gidx1")
    def out_index(i:UOp) -> UOp: return query_place(item, i, L) if tiles else item * L + i
    part = linear_part(L, rows_of(k_b.matrix(b, "w"), item * L), b["q_latent"], k_b.integer, out_index)
    def row(block:UOp, thread:UOp, threads:int, wait_zero:UOp) -> list[UOp]:  # one block writes it, the others load nothing for it
      return cache_row(t, b, L, cache.shape[1], norm.eps, block * 0, thread, threads, wait_zero, 4, block.eq(0) & item.eq(0))
    return matvec(t, [nope // UNIT], load4(b["q"], item * rope.head), [part], extra_stores=row, items=H)
  q_latent = Tensor.empty(1, padded(H), L, dtype=dtypes.half) if tiles else Tensor.empty(1, H, L, dtype=dtypes.float)
  outs = {"q_latent": q_latent, "cache": cache}
  ins = {"q": q, "kv": kv, "norm": norm.weight, "rope": rope.table, "pos": rope.pos, **k_b.args("w")}
  q_latent, written = launch(f"latent_query_{k_b.label}", outs, ins, body)
  return q_latent, written

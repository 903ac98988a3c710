"""Linear layers of decoding: RMSNorm in front, RoPE or a residual behind, several matrices of one input in a launch.

Each function takes T tokens. One token on a target with kernels is one launch; else the plain-ops form beside it serves, and is what the
kernels are tested against.
"""
from __future__ import annotations
from typing import Callable, Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import cpu, cpu_prefill
from tinygrad.nn.intrinsics import Target, group_sum, target
from tinygrad.nn.matmat import halves, mats_target, mul_mats, normalized, position
from tinygrad.nn.matvec import UNIT, Matrix, Norm, Rope, Row, Weight, add, launch, local, matvec, rotated, row_pairs
from tinygrad.nn.mla_attention import by_tiles, padded, query_place
from tinygrad.nn.metal_mul_mat_id import QL_SHEXP_MSL, mul_mat_msl, serves
from tinygrad.uop.ops import Ops

def kernel_target(x:Tensor, *widths:int) -> Target|None:
  """The target whose kernels take this step: one token, vectors of whole units. None: the plain-ops form"""
  t = target() if x.shape[0] == 1 else None
  return t if t is not None and all(w % UNIT == 0 for w in widths) else None

def quad(buffer:UOp, offset:UOp|int=0) -> Callable[[UOp], list[UOp]]: return lambda k: [buffer[offset + k * 4 + j].load() for j in range(4)]

def rows_of(matrix:Matrix, first:UOp|int=0) -> Callable[[UOp], Row]: return lambda i: [(matrix, first + i)]

def norm_linear(x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None=None, residual:Tensor|None=None) -> list[Tensor]:
  """x: float32 (T, in); weights: matrices (out_i, in) of RMSNorm(x), or of x without a norm; rope rotates the heads of the first product, residual
  (T, out_0) is added to it -> float32 (T, out_i) each"""
  if x.shape[0] == 1 and cpu.fits(*weights) and (rope is None or isinstance(rope.pos, Tensor)):
    return cpu.norm_linear(x, norm, weights, rope, residual)
  if x.shape[0] > 1 and cpu.fits(*weights): return cpu_prefill.norm_linear(x, norm, weights, rope, residual)
  if (t := kernel_target(x, x.shape[1])) and (rope is None or isinstance(rope.pos, Tensor)):
    return norm_linear_kernel(t, x, norm, weights, rope, residual)
  if t := mats_target(x, x.shape[1]): return norm_linear_mats(t, x, norm, weights, rope, residual)
  return norm_linear_ops(x, norm, weights, rope, residual)

def norm_linear_ops(x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None=None, residual:Tensor|None=None) -> list[Tensor]:
  n = x if norm is None else norm(x).contiguous()
  first, *rest = [w(n) for w in weights]
  if rope is not None: first = rope.rotate_heads(first)
  return [first if residual is None else (residual + first).contiguous(), *rest]

def norm_linear_mats(t:Target, x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None=None, residual:Tensor|None=None) -> list[Tensor]:
  """By tensor cores. What RoPE has rotated is halves."""
  n, factor = (normalized(t, x, norm)[0], 1.0) if norm is not None else halves(x)
  first, *rest = weights
  y = mul_mats(t, n, first, residual, factor, rope, dtypes.float if rope is None else dtypes.half)
  return [y, *[mul_mats(t, n, w, factor=factor) for w in rest]]

def norm_linear_kernel(t:Target, x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None=None, residual:Tensor|None=None) -> list[Tensor]:
  if norm is None and rope is None and len(weights) == 1 and residual is not None and serves(t, QL_SHEXP_MSL, weights):
    return [mul_mat_msl(x, weights[0], residual=residual)]
  outs = {f"y{i}": Tensor.empty(1, w.shape[0], dtype=dtypes.float) for i, w in enumerate(weights)}
  ins = {"x": x, **({"norm": norm.weight} if norm else {}), **({"rope": rope.table, "pos": rope.pos} if rope else {}),
         **({} if residual is None else {"residual": residual})}
  for i, w in enumerate(weights): ins |= w.args(f"w{i}")
  def body(b:dict[str, UOp]) -> list[UOp]:
    def turn(sums:list[UOp], row:UOp) -> list[UOp]:
      at = row % rope.head - rope.nope
      return rotated(b, rope.table.shape[1], at, sums, at >= 0)
    parts = [row_pairs(w.shape[0], rows_of(w.matrix(b, f"w{i}")), b[f"y{i}"], w.integer, turn=turn if rope is not None and i == 0 else None,
                       residual=b.get("residual") if i == 0 else None) for i, w in enumerate(weights)]
    return matvec(t, [x.shape[1] // UNIT], quad(b["x"]), parts, (quad(b["norm"]), norm.eps) if norm else None)
  parts = {"norm": norm, "linear": weights, "rope": rope, "residual": residual}
  name = "_".join([part for part, there in parts.items() if there is not None] + [w.label for w in weights])
  return launch(name, outs, ins, body, sum(w.nbytes for w in weights))

def latent_query(q:Tensor, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]:
  """The heads' queries in latent space, and the tokens' rows of the cache: [RMSNorm(kv)[:L] | RoPE(kv[L:])] written from pos on.
  q: float32 (T, H·head); kv: float32 (T, L+R); k_b: (H, L, nope); cache: (C, L+R) -> float32 (T, H, L), or as mla_splits wants it, and the cache"""
  if cpu.fits(k_b) and isinstance(rope.pos, Tensor): return cpu.latent_query(q, kv, k_b, norm, cache, rope)
  if q.shape[0] > 1 and cpu.fits(k_b): return cpu_prefill.latent_query(q, kv, k_b, norm, cache, rope)
  if (t := kernel_target(q, k_b.shape[2])) and isinstance(rope.pos, Tensor): return latent_query_kernel(t, q, kv, k_b, norm, cache, rope)
  if (t := mats_target(q, k_b.shape[2])): return latent_query_mats(t, q, kv, k_b, norm, cache, rope)
  return latent_query_ops(q, kv, k_b, norm, cache, rope)

def latent_query_ops(q:Tensor, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]:
  (H, L, nope), T = k_b.shape, q.shape[0]
  row = norm(kv[:, :L]).cat(rope.rotate(kv[:, L:]), dim=-1)
  written = Tensor(cache.uop.after(cache[rope.pos:rope.pos+T].uop.store(row.cast(cache.dtype).uop)))
  return k_b(q.reshape(T, H, -1)[..., :nope].cast(dtypes.float)), written

def latent_query_mats(t:Target, q:Tensor, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]:
  """By tensor cores: q and the result are halves"""
  (H, L, _), threads = k_b.shape, 128
  def body(b:dict[str, UOp]) -> list[UOp]:
    token, thread = UOp.special(q.shape[0], "gidx0"), UOp.special(threads, "lidx0")
    return cache_row(t, b, L, cache.shape[1], norm.eps, token, thread, threads, token * 0, 0)
  written = launch(f"cache_rows_{q.shape[0]}_{cache.shape[1]}", {"cache": cache},
                   {"kv": kv, "norm": norm.weight, "rope": rope.table, "pos": position(rope.pos)}, body)[0]
  return mul_mats(t, q.reshape(-1, H, q.shape[1] // H), k_b, dtype=dtypes.half), written

def cache_row(t:Target, b:dict[str, UOp], L:int, dim:int, eps:float, token:UOp, thread:UOp, threads:int, previous:UOp, slot:int,
              here:UOp|None=None) -> list[UOp]:
  """A block's stores of a token's row of the cache, [RMSNorm(kv)[:L] | RoPE(kv[L:])], where `here` holds"""
  pairs, squares = [], None
  for start in range(0, dim // 2, threads):
    at = (thread + start) * 2
    ok, latent = at < dim if here is None else here & (at < dim), at < L
    pair = [b["kv"][(token * dim + at + i + previous).valid(ok)].load() for i in range(2)]
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

def latent_query_kernel(t:Target, q:Tensor, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]:
  H, L, nope = k_b.shape
  tiles = by_tiles(t, L, cache.shape[1] - L)
  def body(b:dict[str, UOp]) -> list[UOp]:
    item = UOp.special(H, "gidx1")
    def place(i:UOp) -> UOp: return query_place(item, i, L) if tiles else item * L + i
    part = row_pairs(L, rows_of(k_b.matrix(b, "w"), item * L), b["q_latent"], k_b.integer, place)
    def row(block:UOp, thread:UOp, threads:int, previous:UOp) -> list[UOp]:  # one block writes it, the others load nothing for it
      return cache_row(t, b, L, cache.shape[1], norm.eps, block * 0, thread, threads, previous, 4, block.eq(0) & item.eq(0))
    return matvec(t, [nope // UNIT], quad(b["q"], item * rope.head), [part], side=row, items=H)
  q_latent = Tensor.empty(1, padded(H), L, dtype=dtypes.half) if tiles else Tensor.empty(1, H, L, dtype=dtypes.float)
  outs = {"q_latent": q_latent, "cache": cache}
  ins = {"q": q, "kv": kv, "norm": norm.weight, "rope": rope.table, "pos": rope.pos, **k_b.args("w")}
  q_latent, written = launch(f"latent_query_{k_b.label}", outs, ins, body)
  return q_latent, written

"""Absorbed attention: every head reads the same cached vector, and values are a view of it.

  query = [k_b·q_nope | q_rope];  context = softmax(query · rows · scale) · rows[:L]      # of a head; v_b follows in attention_output

A head's query is brought into the cache's space by k_b; its rotated part is rotated already. A token of each sequence on a target with kernels: the
queries and the tokens' rows of the cache in a launch, then nn/split_kv.py, by a plan where there are several (nn/split_plan.py). Many tokens on one
with tensor cores: nn/mla_prefill_heads.py where shared memory holds its rows, else nn/mla_prefill.py; so many that keys and values of every head's
own are less work: nn/mla_unabsorbed.py. Where a row lies and how it is written is nn/latent_cache.py's; on the CPU, nn/cpu.py and nn/cpu_prefill.py.
"""
from __future__ import annotations
from typing import NamedTuple
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import (cpu, cpu_few, cpu_prefill, cpu_unabsorbed, few_tokens, head_rows, lora_query, mla_prefill, mla_prefill_heads, mla_unabsorbed,
                         split_kv, split_plan)
from tinygrad.nn.intrinsics import Target, target_of
from tinygrad.nn.kernel import SLOTS, UNIT, Load4, Norm, Rope, Weight, empty, launch, load4
from tinygrad.nn.latent_cache import CacheRow, Pages, RowFormat, cache_row, expanded, visible_rows, write_rows
from tinygrad.nn.matmul import matmul
from tinygrad.nn.matvec import ExtraStores, Operand, linear_part, matvec, thread_layout
from tinygrad.nn.norm_linear import (as_half, attention_output, decode_target, few_target, heads_as_codes, heads_store_codes, linear_of_codes,
                                     mul_mat, norm_linear, prefill_target, single_segment)
from tinygrad.nn.primitive import primitive
from tinygrad.nn.step import Step

@primitive(outputs=lambda step, q, kv, k_b, norm, cache, rope, scale: (empty(q, step.tokens, *k_b.shape[:2]), cache))
def latent_attention(step:Step, q:Tensor, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor, rope:Rope, scale:float) -> tuple[Tensor, Tensor]:
  """q: (T, H·head), of each head the first `nope` numbers without position and the rotated ones; kv: float32 (T, L+R); k_b: (H, L, nope);
  cache: (C, L+R), or of 8 bits (nn/latent_cache.py) -> (T, H, L), softmax(query·key·scale)·value over each token's sequence up to itself, and the
  cache, with the tokens' rows [RMSNorm(kv[:L]) | RoPE(kv[L:])] written"""
  (H, L, nope), T = k_b.shape, step.tokens
  row = norm(kv[:, :L]).cat(rope.rotate(kv[:, L:], step), dim=-1)
  cache = write_rows(step, cache, row, L)
  keys, unseen = visible_rows(step, cache, L)         # (S, C, L+R), (T, C)
  heads = q.reshape(T, H, -1).cast(dtypes.float)
  query = mul_mat(heads[..., :nope], k_b).cat(heads[..., nope:], dim=-1)
  scores = (query @ keys.transpose(-1, -2)) * scale  # (T, H, C)
  return (scores + unseen.unsqueeze(1)).softmax(-1) @ keys[..., :L], cache

class LatentWeights(NamedTuple):
  """What a block's attention has after its first matrices"""
  norm: Norm       # of kv[:L]
  k_b: Weight      # (H, L, nope)
  v_b: Weight      # (H, v, L)
  output: Weight   # (D, H·v)
  scale: float     # of the scores

@primitive(outputs=lambda step, residual, q, kv, weights, cache, rope: (empty(residual, *residual.shape), cache), composite=True)
def attention(step:Step, residual:Tensor, q:Tensor, kv:Tensor, weights:LatentWeights, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]:
  """residual + output·(the heads' v_b·context), and the cache with the tokens' rows. residual: float32 (T, D) -> (T, D)"""
  context, cache = latent_attention(step, q, kv, weights.k_b, weights.norm, cache, rope, weights.scale)   # (T, H, L)
  return attention_output(step, context, weights.v_b, weights.output, residual), cache

@primitive(outputs=lambda step, residual, q_a, kv, query, weights, cache, rope: (empty(residual, *residual.shape), cache), composite=True)
def lora_attention(step:Step, residual:Tensor, q_a:Tensor, kv:Tensor, query:lora_query.QueryWeights, weights:LatentWeights, cache:Tensor,
                   rope:Rope) -> tuple[Tensor, Tensor]:
  """attention whose queries come by way of a low rank. q_a: float32 (T, in)"""
  q, = norm_linear(step, q_a, query.norm, [query.q_b], rope.of_queries)   # (T, H·(nope+R))
  return attention(step, residual, q, kv, weights, cache, rope)

@primitive(outputs=lambda step, shape: empty(step.start, *split_plan.plan_size(shape), dtype=dtypes.int32))
def attention_plan(step:Step, shape:split_plan.PlanShape) -> Tensor:
  """How latent_attention cuts the work of a step of several sequences, for all blocks of a model: int32, see nn/split_plan.py"""
  return split_plan.plan_ops(shape, step)

# ---- forms ----

def plan_is_made(step:Step) -> bool:
  """Whether nn/split_kv.py knows what to read: of several sequences a plan says it"""
  return step.one_token or step.plan is not None

def splits_take(step:Step, k_b:Weight, cache:Tensor) -> bool:
  """Whether nn/split_kv.py serves the step"""
  (heads, latent, _), target = k_b.shape, decode_target(step, k_b, k_b.shape[2])
  return target is not None and split_kv.takes(target, heads, latent, RowFormat.of(cache, latent).rotated)

def plan_shape(step:Step, k_b:Weight, cache:Tensor) -> split_plan.PlanShape|None:
  """What attention_plan is asked for. None: the step needs no plan"""
  if not step.few_tokens or not splits_take(step, k_b, cache): return None
  heads, latent, _ = k_b.shape
  return split_kv.plan_shape(target_of(k_b.device), heads, Pages.of(cache, step, latent), step.invariant)

@attention_plan.form("decode", takes=lambda step, shape: step.few_tokens and target_of(step.start.device) is not None)
def attention_plan_decode(step:Step, shape:split_plan.PlanShape) -> Tensor:
  target = target_of(step.start.device)
  assert target is not None
  return split_plan.plan_launch(target, shape, step)

@latent_attention.form("cpu_decode", takes=lambda step, q, kv, k_b, norm, cache, rope, scale:
                       cpu.takes(k_b) and step.one_token and cpu.attention_takes(RowFormat.of(cache, k_b.shape[1])))
def latent_attention_cpu(step:Step, q:Tensor, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor, rope:Rope, scale:float) -> tuple[Tensor, Tensor]:
  q_latent, cache = cpu.latent_query_decode(q, kv, k_b, norm, cache, rope, step.start, step.tables)
  return cpu.mla_attention_decode(q_latent, q, cache, step.start, step.tables, scale), cache

@latent_attention.form("cpu_few", takes=lambda step, q, kv, k_b, norm, cache, rope, scale:
                       cpu.takes(k_b) and step.few_tokens and cpu.attention_takes(RowFormat.of(cache, k_b.shape[1])))
def latent_attention_cpu_few(step:Step, q:Tensor, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor, rope:Rope, scale:float) -> tuple[Tensor, Tensor]:
  q_latent, cache = cpu_few.latent_query_few(q, kv, k_b, norm, cache, rope, step.start, step.tables)
  return cpu.mla_attention_decode(q_latent, q, cache, step.start, step.tables, scale), cache

@attention.form("cpu_prefill", takes=lambda step, residual, q, kv, weights, cache, rope:
                cpu.takes(weights.k_b, weights.v_b, weights.output) and step.one_prompt and
                cpu_unabsorbed.takes(step.tokens, weights.k_b, weights.v_b))
def attention_cpu_prefill(step:Step, residual:Tensor, q:Tensor, kv:Tensor, weights:LatentWeights, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]:
  """Three launches and a packing: the cache's rows; attention; output + residual"""
  cache = cpu.write_rows(kv, weights.norm, cache, rope, step.start, step.tables)
  heads = cpu_unabsorbed.unabsorbed_attention(q, cache, weights.k_b, weights.v_b, step.start, step.tables, weights.scale)
  return norm_linear(step, heads, None, [weights.output], None, residual)[0], cache

@latent_attention.form("cpu_prefill", takes=lambda step, q, kv, k_b, norm, cache, rope, scale:
                       cpu.takes(k_b) and step.one_prompt and cpu_prefill.attention_takes(k_b.shape[1]))
def latent_attention_cpu_prefill(step:Step, q:Tensor, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor, rope:Rope,
                                 scale:float) -> tuple[Tensor, Tensor]:
  q_latent, cache = cpu_prefill.latent_query_prefill(q, kv, k_b, norm, cache, rope, step.start, step.tables)
  return cpu_prefill.mla_attention_prefill(q_latent, q, cache, step.start, step.tables, scale), cache

@latent_attention.form("decode", takes=lambda step, q, kv, k_b, norm, cache, rope, scale:
                       splits_take(step, k_b, cache) and plan_is_made(step))
def latent_attention_decode(step:Step, q:Tensor, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor, rope:Rope, scale:float) -> tuple[Tensor, Tensor]:
  """Three launches: queries and the cache's rows; splits of the cache; their combination. How a sequence of several is cut depends on the others'
  lengths (nn/split_plan.py): float32 sums in another order, and rounded at other places."""
  target = target_of(k_b.device)
  assert target is not None
  sums, stats, cache = latent_splits(step, q, kv, k_b, norm, cache, rope, scale)
  return split_kv.mla_combine(target, sums, stats, cache, step), cache

def combine_in_v_b(step:Step, weights:LatentWeights, cache:Tensor) -> bool:
  """Whether the blocks of v_b combine the tokens' splits"""
  (heads, rows, latent), making = weights.v_b.shape, split_kv.CONTEXT_THREADS
  if not (plan_is_made(step) and splits_take(step, weights.k_b, cache) and heads_store_codes(step, weights.v_b, weights.output, making)): return False
  target = target_of(weights.v_b.device)
  assert target is not None
  teams = thread_layout([latent // UNIT], target.lanes, heads * rows // 2, large=making // target.lanes).teams
  return split_kv.blocks_combine(target, heads, Pages.of(cache, step, latent), -(-rows // (2 * teams)), step.invariant)

@attention.form("decode", takes=lambda step, residual, q, kv, weights, cache, rope: combine_in_v_b(step, weights, cache))
def attention_decode(step:Step, residual:Tensor, q:Tensor, kv:Tensor, weights:LatentWeights, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]:
  """Four launches: queries and the cache's rows; splits of the cache; v_b a head, whose blocks combine the splits; output + residual"""
  sums, stats, cache = latent_splits(step, q, kv, weights.k_b, weights.norm, cache, rope, weights.scale)
  return output_of_splits(step, residual, sums, stats, weights, cache), cache

OUTPUT_ROOM = 256 * 96   # registers that two tokens' attn_output leaves: of a block of the router's launch

def output_of_splits(step:Step, residual:Tensor, sums:Tensor, stats:Tensor, weights:LatentWeights, cache:Tensor) -> Tensor:
  """What attention returns, of what split_kv made, where combine_in_v_b"""
  v_b, target = weights.v_b, target_of(weights.v_b.device)
  assert target is not None
  (splits, heads, _), latent = sums.shape, split_kv.latent_of(sums)
  pages = Pages.of(cache, step, latent)
  at_once, plan = split_kv.plan_splits(target, heads, pages)[1], split_kv.plan_of(target, heads, pages, step)
  def context(buffers:dict[str, UOp], head:UOp) -> Operand:
    made = split_kv.SplitContext(target, buffers, pages, splits, heads, at_once, plan, head)
    return Operand([latent // UNIT], None, tokens=step.tokens, made=made)
  name, mem = f"combine_mul_mat_{v_b.label}_{step.tokens}_{splits}", v_b.nbytes + sums.nbytes() + stats.nbytes()   # a loop's turns are out of reach
  codes = heads_as_codes(name, v_b, {"sums": sums, "stats": stats, **split_kv.step_buffers(step)}, context, step.tokens, mem)
  return linear_of_codes(codes, weights.output, residual, OUTPUT_ROOM if step.tokens == 2 else 0, step.invariant)

@lora_attention.form("decode", takes=lambda step, residual, q_a, kv, query, weights, cache, rope:
                     combine_in_v_b(step, weights, cache) and
                     lora_query.takes(target_of(weights.k_b.device), query.q_b, weights.k_b, rope, step.tokens))
def lora_attention_decode(step:Step, residual:Tensor, q_a:Tensor, kv:Tensor, query:lora_query.QueryWeights, weights:LatentWeights, cache:Tensor,
                          rope:Rope) -> tuple[Tensor, Tensor]:
  """Four launches: those of attention_decode, the first of which takes q_a's output"""
  k_b, target = weights.k_b, target_of(weights.k_b.device)
  assert target is not None
  q_latent, q_rope, cache = lora_query.lora_query(step, q_a, kv, query, k_b, weights.norm, cache, rope)
  sums, stats = split_kv.split_kv(target, q_latent, q_rope.reshape(step.tokens, k_b.shape[0], -1), cache, step, weights.scale)
  return output_of_splits(step, residual, sums, stats, weights, cache), cache

def few_attend(step:Step, weights:LatentWeights, cache:Tensor) -> bool:
  """Whether tensor cores take what comes behind the queries of a few tokens, which a plan cuts"""
  return few_target(step, weights.v_b, *weights.v_b.shape[1:]) is not None and splits_take(step, weights.k_b, cache) and step.plan is not None

@attention.form("few", takes=lambda step, residual, q, kv, weights, cache, rope: few_attend(step, weights, cache))
def attention_few(step:Step, residual:Tensor, q:Tensor, kv:Tensor, weights:LatentWeights, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]:
  """Five launches: those of latent_attention_decode, whose last writes the context as tensor cores take it; v_b a head; output + residual"""
  sums, stats, cache = latent_splits(step, q, kv, weights.k_b, weights.norm, cache, rope, weights.scale)
  return output_of_few(step, residual, sums, stats, weights, cache), cache

@lora_attention.form("few", takes=lambda step, residual, q_a, kv, query, weights, cache, rope:
                     few_attend(step, weights, cache) and few_target(step, query.q_b, q_a.shape[1], weights.k_b.shape[2]) and
                     rope.of_queries.nope == weights.k_b.shape[2])
def lora_attention_few(step:Step, residual:Tensor, q_a:Tensor, kv:Tensor, query:lora_query.QueryWeights, weights:LatentWeights, cache:Tensor,
                       rope:Rope) -> tuple[Tensor, Tensor]:
  """Six launches, or seven: those of attention_few, behind q_b's, which writes what k_b is multiplied with as tensor cores take it"""
  target, k_b = target_of(weights.v_b.device), weights.k_b
  assert target is not None
  x = few_tokens.tokens_of(target, q_a, query.norm, [query.q_b])
  nope, turned = few_tokens.few_queries(target, x, query.q_b, rope.of_queries, step.start)
  q_latent, cache = latent_query(target, step, nope, kv, k_b, weights.norm, cache, rope)
  sums, stats = split_kv.split_kv(target, q_latent, turned.reshape(step.tokens, k_b.shape[0], -1), cache, step, weights.scale)
  return output_of_few(step, residual, sums, stats, weights, cache), cache

def output_of_few(step:Step, residual:Tensor, sums:Tensor, stats:Tensor, weights:LatentWeights, cache:Tensor) -> Tensor:
  """What attention returns, of what split_kv made, by tensor cores: three launches"""
  target = target_of(weights.v_b.device)
  assert target is not None
  heads = few_tokens.few_heads(target, split_kv.mla_combine_columns(target, sums, stats, cache, step), weights.v_b)
  return few_tokens.few_matmul(target, heads, [weights.output], residual)[0]

def latent_splits(step:Step, q:Tensor, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor, rope:Rope, scale:float) -> tuple[Tensor, Tensor, Tensor]:
  """What mla_combine takes, by two launches, and the cache with the tokens' rows written"""
  target = target_of(k_b.device)
  assert target is not None
  q_latent, cache = latent_query(target, step, q, kv, k_b, norm, cache, rope)
  sums, stats = split_kv.split_kv(target, q_latent, q.reshape(step.tokens, k_b.shape[0], -1), cache, step, scale)
  return sums, stats, cache

VECTOR_TOKENS = 4   # of queries that are floats: up to so many tokens', and more than a tile of tensor cores', are matrices times vectors

def latent_query(target:Target, step:Step, q:Tensor|few_tokens.Columns, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor,
                 rope:Rope) -> tuple[Tensor, Tensor]:
  """What split_kv reads: the latent queries k_b·q_nope, as it takes them, and the cache with the tokens' rows written. q: (T, H·(nope+R)), or of each
  head the first `nope` numbers"""
  (H, L, nope), T, pages = k_b.shape, step.tokens, Pages.of(cache, step, k_b.shape[1])
  tiles = split_kv.uses_tensor_cores(target, pages.format)
  heads = split_kv.padded(H) if tiles else H
  x = few_tokens.Floats(q, nope, pitch=rope.head) if isinstance(q, Tensor) else q
  few = x is q or VECTOR_TOKENS < T <= few_tokens.TILE_TOKENS and few_target(step, k_b, nope) is not None
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    head = UOp.special(H, "gidx1")
    def vector(token:UOp) -> Load4: return load4(buffers["x"], (token * H + head) * rope.head)
    def out_index(token:UOp, row:UOp) -> UOp:
      return token * (heads * L) + (split_kv.query_place(head, row, L) if tiles else head * L + row)
    def store_rows(block:UOp, thread:UOp, threads:int, wait_zero:UOp) -> list[UOp]:
      row, number = CacheRow(target, pages, norm.eps, threads, slot=SLOTS), block * H + head
      if T == 1: return cache_row(row, buffers, UOp.const(0), thread, wait_zero, number.eq(0))   # one block writes it, the others load nothing for it
      return cache_row(row, buffers, number, thread, wait_zero)
    rows, matrix = ExtraStores(store_rows, -(-T // H) if T > 1 else 0, lambda block: block * H + head < T), k_b.matrix(buffers, "w")
    if not few:
      part = linear_part(L, single_segment(matrix, head * L), buffers["q_latent"], k_b.integer, out_index)
      return matvec(target, Operand([nope // UNIT], vector, tokens=T), [part], rows, items=H)
    def finish(block:few_tokens.BlockProduct, quad:few_tokens.Quad, behind:dict[str, UOp]) -> list[UOp]:
      places = [out_index(quad.token, quad.row + i).valid(block.writes(quad, i)) for i in range(4)]
      return [buffers["q_latent"][place].store(value.cast(buffers["q_latent"].dtype)) for place, value in zip(places, quad.sums[0])]
    part = few_tokens.Part(L, [lambda row, unit, gate: matrix(head * L + row, unit, gate)], finish)
    return few_tokens.few_products(target, nope, x, buffers, [part], head, rows)
  q_latent = empty(kv, T, heads, L, dtype=dtypes.half if tiles else dtypes.float)
  ins = {**x.inputs(), "kv": kv, "norm": norm.weight, "rope": rope.table, "start": step.start, "tables": step.tables, **k_b.args("w")}
  mem = None if T == 1 else k_b.nbytes + ins["x"].nbytes() + q_latent.nbytes()   # a loop's turns are out of the renderer's reach
  name = f"{'few_' * few}latent_query{'_columns' * (x is q)}_{T}_{k_b.label}"
  q_latent, cache = launch(name, {"q_latent": q_latent, "cache": cache}, ins, body, mem)
  return q_latent, cache

def with_rows(target:Target, step:Step, kv:Tensor, norm:Norm, cache:Tensor, rope:Rope) -> Tensor:
  """The cache with the rows of a prompt's tokens written: a launch, a block a token"""
  pages, threads = Pages.of(cache, step, norm.weight.shape[0]), 128
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    token, thread = UOp.special(step.tokens, "gidx0"), UOp.special(threads, "lidx0")
    return cache_row(CacheRow(target, pages, norm.eps, threads, slot=0), buffers, token, thread, token * 0)
  ins = {"kv": kv, "norm": norm.weight, "rope": rope.table, "start": step.start, "tables": step.tables}
  return launch(f"cache_rows_{step.tokens}_{pages.dim}", {"cache": cache}, ins, body)[0]

@latent_attention.form("prefill", takes=lambda step, q, kv, k_b, norm, cache, rope, scale:
                       (target := prefill_target(step, k_b, k_b.shape[2])) and mla_prefill.takes(target, row := RowFormat.of(cache, k_b.shape[1])) and
                       (step.one_prompt or not row.coded))   # `expanded` knows one sequence
def latent_attention_prefill(step:Step, q:Tensor, kv:Tensor, k_b:Weight, norm:Norm, cache:Tensor, rope:Rope, scale:float) -> tuple[Tensor, Tensor]:
  """Three launches: the cache's rows; queries; attention; and where rows have 8 bits one that expands them. float32 or half q -> half (T, H, L)"""
  (H, L, _), target = k_b.shape, target_of(k_b.device)
  assert target is not None
  cache = with_rows(target, step, kv, norm, cache, rope)
  q_latent = matmul(target, as_half(q).reshape(-1, H, q.shape[1] // H), k_b, dtype=dtypes.half)
  rows, of_rows = expanded(step, cache, L)
  shares_rows = mla_prefill_heads.takes(target, RowFormat.of(rows, L), step.tokens, H)
  form = mla_prefill_heads.mla_prefill_heads if shares_rows else mla_prefill.mla_prefill
  return form(target, q_latent, q, rows, of_rows, scale), cache

def unabsorbed_target(step:Step, weights:LatentWeights, cache:Tensor) -> Target|None:
  """The target that attends to keys and values of every head's own in such a step"""
  (_, latent, nope), v_b = weights.k_b.shape, weights.v_b
  target = prefill_target(step, weights.k_b, nope, latent, weights.output.shape[1]) if step.one_prompt else None
  rotated = RowFormat.of(cache, latent).rotated
  return target if target is not None and mla_unabsorbed.takes(target, step.tokens, weights.k_b, v_b, rotated) else None

@attention.form("prefill", takes=lambda step, residual, q, kv, weights, cache, rope: unabsorbed_target(step, weights, cache))
def attention_prefill(step:Step, residual:Tensor, q:Tensor, kv:Tensor, weights:LatentWeights, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]:
  """Six launches: the cache's rows; k_b and v_b as halves; keys and values of all heads; attention; output + residual; and where rows have 8 bits one
  that expands them"""
  target = target_of(weights.k_b.device)
  assert target is not None
  cache = with_rows(target, step, kv, weights.norm, cache, rope)
  rows, of_rows = expanded(step, cache, weights.k_b.shape[1])
  heads = mla_unabsorbed.unabsorbed(target, as_half(q), rows, weights.k_b, weights.v_b, of_rows, weights.scale)
  return matmul(target, heads, weights.output, residual), cache

def bytes_of_heads(tokens:int, k_b:Weight, v_b:Weight, rotated:int, positions:int) -> int:
  """Of keys and values of all heads, of so many positions, which a chunk of so many tokens attends to; 0 where it does so absorbed"""
  target = target_of(k_b.device)
  return 0 if target is None or not mla_unabsorbed.takes(target, tokens, k_b, v_b, rotated) else head_rows.nbytes(k_b, v_b, positions)

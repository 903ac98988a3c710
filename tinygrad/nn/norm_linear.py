"""Linear layers: mul_mat, W·x; norm_linear, with RMSNorm in front, RoPE or a residual behind, several matrices of one input; attention_output,
composed of both; side_by_side, RMSNorms alone. Each begins with its plain ops; its forms follow, each with the predicate that says what it takes.
Most predicates ask decode_target or prefill_target. A form hands `launch` a body, which reads weights by `Weight.matrix` (nn/kernel.py): no block
format is known here.

A token of each sequence on a target with kernels is one launch (nn/matvec.py, nn/few_tokens.py); many tokens on one with a matrix product are a
launch a matrix (nn/matmul.py), and so is the head of more than 32 sequences.
"""
from __future__ import annotations
import functools
from dataclasses import replace
from typing import Callable, Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.helpers import prod
from tinygrad.nn import cpu, cpu_few, cpu_prefill, few_tokens, group_walk
from tinygrad.nn.intrinsics import Target, target_of
from tinygrad.nn.kernel import (SLOTS, UNIT, Load4, Matrix, Norm, Rope, Weight, behind_wait, block_sum, empty, gated, launch, load4, optional,
                                position_of, rotated, sum_in_order)
from tinygrad.nn.matmul import matmul, matmul_scaled, rms_norm_half
from tinygrad.nn.matvec import (LARGE_STEPS, ROWS, CodedUnit, Codes, CodesOut, DeferredMatrix, MatvecPart, Operand, RowSegments, coded_job,
                                coded_rows_take_turns, codes_in, empty_codes, is_simple, lane_steps, large_job, linear_part, load_codes, matvec,
                                named, registers_for, rows_of_job, stores_codes)
from tinygrad.nn.metal_mul_mat_id import QL_MOE_MSL, QL_SHEXP_MSL, mul_mat_msl, msl_takes
from tinygrad.nn.primitive import primitive
from tinygrad.nn.step import Step, few_rows, one_row

CACHED_BYTES = 32 << 20   # of a matrix, in the cache that all multiprocessors of a large GPU share

def decode_target(step:Step, weight:Weight, *widths:int) -> Target|None:
  """The target whose matrix times vector takes this step: a token of each sequence, vectors of whole units"""
  target = target_of(weight.device) if step.one_token or step.few_tokens else None
  return target if target is not None and all(width % UNIT == 0 for width in widths) else None

def prefill_target(step:Step, weight:Weight, *widths:int) -> Target|None:
  """The target whose tensor cores take this step: many tokens, vectors of several whole units"""
  target = target_of(weight.device) if step.many_tokens else None
  return target if target is not None and target.mma is not None and all(width % UNIT == 0 and width > UNIT for width in widths) else None

def few_target(step:Step, weight:Weight, *widths:int) -> Target|None:
  """The target whose tensor cores take this step: a few tokens, vectors of whole units. They round otherwise than one token's kernels"""
  few = step.few_tokens and not step.invariant and few_tokens.least_tokens(weight) <= step.tokens <= few_tokens.MOST_TOKENS
  target = target_of(weight.device) if few else None
  return target if target is not None and few_tokens.takes(target) and all(width % UNIT == 0 for width in widths) else None

def tiled(step:Step, x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None) -> bool:
  """Whether a few tokens are multiplied by tiles, as a prompt's, where few_target's groups of warps do that: more than a block of few_tokens.py has
  at once, whose other blocks would read a matrix again that no cache keeps"""
  target, (first, *rest) = few_target(step, weights[0], x.shape[1]), weights
  return target is not None and group_walk.takes(target, x.shape[1]) and step.tokens > few_tokens.TOKENS_AT_ONCE and \
    first.nbytes > CACHED_BYTES and norm is not None and rope is None and not rest

def vector_target(step:Step, weight:Weight, *widths:int) -> Target|None:
  """decode_target's, where few_target's tensor cores do not take the step"""
  return None if few_target(step, weight, *widths) else decode_target(step, weight, *widths)

def as_half(x:Tensor) -> Tensor: return x if x.dtype == dtypes.half else x.cast(dtypes.half).contiguous()

def single_segment(matrix:Matrix, first:UOp|int=0) -> Callable[[UOp], RowSegments]: return lambda row: [(matrix, first + row)]

def operand_of(buffers:dict[str, UOp], x:Tensor, norm:Norm|None, only:UOp|None=None) -> Operand:
  """The vectors of the buffer x, (T, in), or the only token's; the buffer norm is the norm's weight"""
  tokens, width = x.shape
  def vector(token:UOp) -> Load4: return load4(buffers["x"], (token if only is None else only) * width)
  return Operand([width // UNIT], vector, (load4(buffers["norm"]), norm.eps) if norm else None, tokens if only is None else 1)

# ---- W·x ----

def product_shape(x:Tensor, weight:Weight, ids:Tensor|None) -> tuple[int, ...]:
  return (*(x.shape[:-1] if ids is None else ids.shape), weight.shape[-2])

@primitive(outputs=lambda x, weight, ids: empty(x, *product_shape(x, weight, ids)))
def mul_mat(x:Tensor, weight:Weight, ids:Tensor|None=None) -> Tensor:
  """W·x, float32. weight: a matrix (out, in), x: (T, in) -> (T, out); a stack with one a head (H, out, in), x: (T, H, in) -> (T, H, out);
  or a stack (E, out, in) of which ids, int32 (T, K), name those of a token (clamped), x: (T, 1 or K, in) -> (T, K, out)"""
  return (x.unsqueeze(-2) * (weight if ids is None else weight[ids]).dequantize()).sum(-1)

@mul_mat.form("cpu_decode", takes=lambda x, weight, ids: cpu.takes(weight) and one_row(x))
def mul_mat_cpu(x:Tensor, weight:Weight, ids:Tensor|None=None) -> Tensor: return cpu.mul_mat_decode(x, weight, ids)

@mul_mat.form("cpu_few", takes=lambda x, weight, ids: ids is None and cpu.takes(weight) and few_rows(x))
def mul_mat_cpu_few(x:Tensor, weight:Weight, ids:Tensor|None=None) -> Tensor: return cpu_few.mul_mat_few(x, weight)

@mul_mat.form("cpu_prefill", takes=lambda x, weight, ids: cpu.takes(weight))
def mul_mat_cpu_prefill(x:Tensor, weight:Weight, ids:Tensor|None=None) -> Tensor:
  return cpu_prefill.mul_mat_prefill(x, weight) if ids is None else cpu_prefill.mul_mat_id_prefill(x, weight, ids)

@mul_mat.form("msl", takes=lambda x, weight, ids: ids is not None and one_row(x) and weight.shape[-1] % UNIT == 0 and
                                                  msl_takes(target_of(weight.device), QL_MOE_MSL, [weight]))
def mul_mat_id_msl(x:Tensor, weight:Weight, ids:Tensor|None=None) -> Tensor: return mul_mat_msl(x, weight, ids)

@mul_mat.form("decode", takes=lambda x, weight, ids: target_of(weight.device) is not None and weight.shape[-1] % UNIT == 0)
def mul_mat_decode(x:Tensor, weight:Weight, ids:Tensor|None=None) -> Tensor:
  """A launch. A matrix, or each of a stack by gidx1, takes its vectors of all tokens together; chosen by ids, it is a vector times a matrix each."""
  target, (*stack, rows, width) = target_of(weight.device), weight.shape
  assert target is not None
  shape, matrices = product_shape(x, weight, ids), prod(stack)
  tokens, items = shape[0], prod(shape[1:-1])
  share = prod(shape[:-1]) // prod(x.shape[:-1])
  def by_id(buffers:dict[str, UOp]) -> list[UOp]:
    pair, matrix = UOp.special(tokens * items, "gidx1"), weight.matrix(buffers, "w")
    def chosen(wait_zero:UOp) -> Matrix:
      which = buffers["ids"][pair + wait_zero].load().maximum(0).minimum(matrices - 1).cast(dtypes.weakint)
      return lambda row, unit, gate: matrix(which * rows + row, unit, gate)
    def out_index(_:UOp, row:UOp) -> UOp: return pair * rows + row
    part = linear_part(rows, lambda row: [(DeferredMatrix(chosen), row)], buffers["y"], weight.integer, out_index)
    operand = Operand([width // UNIT], lambda _: load4(buffers["x"], pair // share * width))
    return matvec(target, operand, [part], items=items)
  def by_head(buffers:dict[str, UOp]) -> list[UOp]:
    item = UOp.special(items, "gidx1")
    def out_index(token:UOp, row:UOp) -> UOp: return (token * items + item) * rows + row
    part = linear_part(rows, single_segment(weight.matrix(buffers, "w"), item * rows), buffers["y"], weight.integer, out_index)
    return matvec(target, operand_of_head(buffers, x, item), [part], items=items)
  name = f"mul_mat{'' if ids is None else '_id'}_{weight.label}_{tokens * items}"
  ins = {"x": x, **optional(ids=ids), **weight.args("w")}
  return launch(name, {"y": empty(x, *shape)}, ins, by_head if ids is None else by_id)[0]

def operand_of_head(buffers:dict[str, UOp], x:Tensor, head:UOp) -> Operand:
  """A head's vectors of the buffer x, (T, H, in)"""
  tokens, heads, width = x.shape[0], prod(x.shape[1:-1]), x.shape[-1]
  return Operand([width // UNIT], lambda token: load4(buffers["x"], (token * heads + head) * width), tokens=tokens)

# ---- W·RMSNorm(x) ----

@primitive(outputs=lambda step, x, norm, weights, rope, residual: [empty(x, x.shape[0], weight.shape[0]) for weight in weights])
def norm_linear(step:Step, x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None=None, residual:Tensor|None=None) -> list[Tensor]:
  """x: float32 (T, in); weights: matrices (out_i, in) of RMSNorm(x), or of x without a norm; rope rotates the heads of the first product, residual
  (T, out_0) is added to it -> float32 (T, out_i) each. The prefill form returns the rotated product as half."""
  normed = x if norm is None else norm(x).contiguous()
  first, *rest = [mul_mat(normed, weight) for weight in weights]
  if rope is not None: first = rope.rotate_heads(first, step)
  return [first if residual is None else (residual + first).contiguous(), *rest]

@norm_linear.form("cpu_decode", takes=lambda step, x, norm, weights, rope, residual:
                  cpu.takes(*weights) and step.one_token)
def norm_linear_cpu(step:Step, x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None, residual:Tensor|None) -> list[Tensor]:
  return cpu.norm_linear_decode(x, norm, weights, rope, step.start if rope else None, residual)

@norm_linear.form("cpu_few", takes=lambda step, x, norm, weights, rope, residual: cpu.takes(*weights) and step.few_tokens)
def norm_linear_cpu_few(step:Step, x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None, residual:Tensor|None) -> list[Tensor]:
  return cpu_few.norm_linear_few(x, norm, weights, rope, step.start if rope else None, residual)

@norm_linear.form("cpu_prefill", takes=lambda step, x, norm, weights, rope, residual:
                  cpu.takes(*weights) and step.many_tokens and (rope is None or step.one_prompt))
def norm_linear_cpu_prefill(step:Step, x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None, residual:Tensor|None) -> list[Tensor]:
  return cpu_prefill.norm_linear_prefill(x, norm, weights, rope, step.start if rope else None, residual)

@norm_linear.form("msl", takes=lambda step, x, norm, weights, rope, residual:
                  step.one_token and norm is None and rope is None and len(weights) == 1 and residual is not None and
                  msl_takes(decode_target(step, weights[0], x.shape[1]), QL_SHEXP_MSL, weights))
def norm_linear_msl(step:Step, x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None, residual:Tensor|None) -> list[Tensor]:
  return [mul_mat_msl(x, weights[0], residual=residual)]

@norm_linear.form("decode", takes=lambda step, x, norm, weights, rope, residual: vector_target(step, weights[0], x.shape[1]))
def norm_linear_decode(step:Step, x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None, residual:Tensor|None) -> list[Tensor]:
  target = target_of(weights[0].device)
  assert target is not None
  outs = {f"y{i}": empty(x, x.shape[0], weight.shape[0]) for i, weight in enumerate(weights)}
  start = step.start if rope else None
  ins = {"x": x, **optional(norm=norm.weight if norm else None, rope=rope.table if rope else None, start=start, residual=residual)}
  for i, weight in enumerate(weights): ins |= weight.args(f"w{i}")
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    def rotate(sums:list[UOp], token:UOp, row:UOp) -> list[UOp]:
      number = row % rope.head - rope.nope
      return rotated(buffers, rope.table.shape[1], number, sums, number >= 0, position_of(buffers, token))
    parts = []
    for i, weight in enumerate(weights):
      first = i == 0
      rotates = rope is not None and first   # pairs
      large = None if rotates or len(weights) > 1 else large_job(target, weights, weight.shape[0], x.shape[0])
      count, steps = large or (ROWS if rotates else rows_of_job(target, weight), lane_steps(weight))
      part = linear_part(weight.shape[0], single_segment(weight.matrix(buffers, f"w{i}", spread=True)), buffers[f"y{i}"], weight.integer,
                         epilogue=rotate if rotates else None, residual=buffers.get("residual") if first else None,
                         count=count)
      parts.append(replace(part, steps=steps, piece=weight.piece))
    return matvec(target, operand_of(buffers, x, norm), parts)
  there = {"norm": norm, "linear": weights, "rope": rope, "residual": residual}
  name = "_".join([what for what, it in there.items() if it is not None] + [weight.label for weight in weights])
  return launch(name, outs, ins, body, sum(weight.nbytes for weight in weights))

@norm_linear.form("prefill", takes=lambda step, x, norm, weights, rope, residual:
                  prefill_target(step, weights[0], x.shape[1]) or tiled(step, x, norm, weights, rope))
def norm_linear_prefill(step:Step, x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None, residual:Tensor|None) -> list[Tensor]:
  target, (first, *rest) = target_of(weights[0].device), weights
  assert target is not None
  normed = as_half(x) if norm is None else rms_norm_half(target, x, norm)[0]
  rotation = None if rope is None else (rope, step.start)
  rotated_or_sum = matmul(target, normed, first, residual, rotation=rotation, dtype=dtypes.float if rope is None else dtypes.half)
  return [rotated_or_sum, *[matmul(target, normed, weight) for weight in rest]]

@norm_linear.form("few", takes=lambda step, x, norm, weights, rope, residual:
                  few_target(step, weights[0], x.shape[1]) and not tiled(step, x, norm, weights, rope))
def norm_linear_few(step:Step, x:Tensor, norm:Norm|None, weights:Sequence[Weight], rope:Rope|None, residual:Tensor|None) -> list[Tensor]:
  target = target_of(weights[0].device)
  assert target is not None
  return few_tokens.few_matmul(target, few_tokens.tokens_of(target, x, norm, weights), weights, residual, rope, step.start)

# ---- RMSNorms, side by side ----

Normed = tuple[Tensor, Sequence[Norm]]   # x, and the norms that it goes through, one after another

@primitive(outputs=lambda parts: empty(parts[0][0], parts[0][0].shape[0], sum(x.shape[1] for x, _ in parts)))
def side_by_side(parts:Sequence[Normed]) -> Tensor:
  """Vectors beside each other, each behind its norms. x: float32 (T, D_i) -> float32 (T, Σ D_i)"""
  first, *rest = [functools.reduce(lambda x, norm: norm(x), norms, x) for x, norms in parts]
  return first.cat(*rest, dim=1).contiguous()

@side_by_side.form("decode", takes=lambda parts: target_of(parts[0][0].device) is not None and all(x.shape[1] % 4 == 0 for x, _ in parts))
def side_by_side_decode(parts:Sequence[Normed]) -> Tensor:
  """A block has a token, a thread every so many-th float4 of each part"""
  (like, _), target, widths = parts[0], target_of(parts[0][0].device), [x.shape[1] for x, _ in parts]
  assert target is not None
  T, threads, width = like.shape[0], 8 * target.lanes, sum(widths)
  weights = {f"norm{part}_{number}": norm.weight for part, (_, norms) in enumerate(parts) for number, norm in enumerate(norms)}
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    token, thread, stores = UOp.special(T, "gidx0"), UOp.special(threads, "lidx0"), []
    behind = behind_wait(target, buffers)
    for part, (_, norms) in enumerate(parts):
      D, first, own = widths[part], sum(widths[:part]), []
      for start in range(0, D // 4, threads):
        quad, inside = thread + start, None if start + threads <= D // 4 else thread + start < D // 4
        own += [(number, inside, behind[f"x{part}"][gated(token * D + number, inside)].load()) for number in (quad * 4 + i for i in range(4))]
      for number, norm in enumerate(norms):
        weight, squares = buffers[f"norm{part}_{number}"], sum_in_order(value * value for _, _, value in own)
        factor = (block_sum(target, squares, thread, threads, SLOTS * part + number) * (1.0 / D) + norm.eps).rsqrt()
        own = [(place, inside, value * factor * weight[gated(place, inside)].load()) for place, inside, value in own]
      stores += [buffers["y"][gated(token * width + first + place, inside)].store(value) for place, inside, value in own]
    return stores
  name = "_".join(["norms", str(T), *map(str, widths)])
  return launch(name, {"y": empty(like, T, width)}, {**{f"x{part}": x for part, (x, _) in enumerate(parts)}, **weights}, body)[0]

# ---- what attention ends with ----

@primitive(outputs=lambda step, context, v_b, weight, residual: empty(residual, *residual.shape), composite=True)
def attention_output(step:Step, context:Tensor, v_b:Weight, weight:Weight, residual:Tensor) -> Tensor:
  """residual + W·(the heads' v_b·context). context: float32 (T, H, L); v_b: (H, v, L); weight: (D, H·v); residual: float32 (T, D) -> (T, D)"""
  heads = mul_mat(context, v_b).reshape(residual.shape[0], -1)
  return norm_linear(step, heads, None, [weight], residual=residual)[0]

@attention_output.form("cpu_few", takes=lambda step, context, v_b, weight, residual:
                       step.few_tokens and cpu.takes(v_b, weight) and v_b.shape[1] % UNIT == 0)
def attention_output_cpu_few(step:Step, context:Tensor, v_b:Weight, weight:Weight, residual:Tensor) -> Tensor:
  return cpu_few.attention_output_few(context, v_b, weight, residual)

def heads_store_codes(step:Step, v_b:Weight, weight:Weight, making:int=0) -> bool:
  """Whether a decode step's heads can be int8 between the launches. making: the threads of a block that make a head's context"""
  heads, rows, width = v_b.shape
  target = decode_target(step, v_b, width, heads * rows)
  if target is None or few_target(step, v_b, width, rows): return False
  return weight.integer and rows % 2 == 0 and stores_codes(target, [width // UNIT], rows // 2, 2, heads, making=making)

@attention_output.form("decode", takes=lambda step, context, v_b, weight, residual: heads_store_codes(step, v_b, weight))
def attention_output_decode(step:Step, context:Tensor, v_b:Weight, weight:Weight, residual:Tensor) -> Tensor:
  def operand(buffers:dict[str, UOp], head:UOp) -> Operand: return operand_of_head(buffers, context, head)
  tokens, heads = context.shape[:2]
  codes = heads_as_codes(f"mul_mat_{v_b.label}_{tokens * heads}", v_b, {"x": context}, operand, tokens)
  return linear_of_codes(codes, weight, residual, invariant=step.invariant)

def heads_as_codes(name:str, v_b:Weight, ins:dict[str, Tensor], operand:Callable[[dict[str, UOp], UOp], Operand], T:int=1,
                   mem:int|None=None) -> Codes:
  """The heads' v_b·context, a head by gidx1, as one vector a token. operand(buffers, head): the head's contexts. name, ins, mem: of the launch"""
  (heads, rows, _), target = v_b.shape, target_of(v_b.device)
  assert target is not None
  units = heads * rows // UNIT
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    head = UOp.special(heads, "gidx1")
    of = single_segment(v_b.matrix(buffers, "w"), head * rows)
    out = CodesOut(*codes_in(buffers, "y"), units, 2, lambda sums, _job, _zero: sums, lambda token: token, lambda job: head * rows + job * 2)
    part = MatvecPart(rows // 2, lambda job: [of(job * 2 + i) for i in range(2)], out, v_b.integer)
    return matvec(target, operand(buffers, head), [part], items=heads)
  outs = named(empty_codes(next(iter(ins.values())), T, heads * rows), "y")
  return Codes(*launch(name, outs, {**ins, **v_b.args("w")}, body, mem))

def linear_of_codes(x:Codes, weight:Weight, residual:Tensor, room:int=0, invariant:bool=False) -> Tensor:
  """residual + W·x. A lane takes few units where each is more than codes and a scale, or is multiplied for more than two tokens,
  whose sums are in another order then. room: see blocks_at_once. invariant: see Step"""
  target, units, T = target_of(weight.device), weight.shape[1] // UNIT, residual.shape[0]
  assert target is not None
  steps = lane_steps(weight) if (T <= 2 or invariant) and is_simple(weight) else LARGE_STEPS
  count = coded_job(weight, [units], target.lanes, weight.shape[0], steps, steps)[0] if T == 1 or invariant else ROWS
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    def codes(token:UOp, segment:int, unit:UOp) -> CodedUnit: return load_codes(buffers, "x", units, token, unit)
    part = linear_part(weight.shape[0], single_segment(weight.matrix(buffers, "w")), buffers["y"], weight.integer, residual=buffers["residual"],
                       count=count)
    return matvec(target, Operand([units], None, tokens=T, codes=codes), [replace(part, steps=steps)])
  ins = {**named(x, "x"), "residual": residual, **weight.args("w")}
  take_turns = T == 1 and coded_rows_take_turns([units], target.lanes, weight.shape[0], steps)
  registers = registers_for(weight, count * steps) if take_turns else 0
  outs = {"y": empty(residual, *residual.shape)}
  return launch(f"linear_residual_{weight.label}", outs, ins, body, weight.nbytes, registers=registers, room=room)[0]

@attention_output.form("prefill", takes=lambda step, context, v_b, weight, residual: prefill_target(step, v_b, v_b.shape[2], weight.shape[1]))
def attention_output_prefill(step:Step, context:Tensor, v_b:Weight, weight:Weight, residual:Tensor) -> Tensor:
  target = target_of(v_b.device)
  assert target is not None
  heads = matmul_scaled(target, as_half(context), v_b)
  return matmul(target, heads.reshape(residual.shape[0], -1), weight, residual)

@attention_output.form("few", takes=lambda step, context, v_b, weight, residual: few_target(step, v_b, v_b.shape[2], v_b.shape[1]))
def attention_output_few(step:Step, context:Tensor, v_b:Weight, weight:Weight, residual:Tensor) -> Tensor:
  target = target_of(v_b.device)
  assert target is not None
  heads = few_tokens.few_heads(target, few_tokens.columns(target, context)[0], v_b)
  return few_tokens.few_matmul(target, heads, [weight], residual)[0]

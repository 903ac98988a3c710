"""Matrix times vector in hand-written MSL for Apple GPUs, experts chosen by id.

Replaces, where QL_MOE_MSL says so, the UOp programs of the chosen experts (nn/moe.py; mul_mat with ids, nn/norm_linear.py), and where
QL_SHEXP_MSL does, those of the router with the shared expert, of a dense feed-forward, and of linear layers with a residual (nn/norm_linear.py).
Formats with integer codes: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K; the router's float32.

Layout. The planes of apps/quantized.py, the same that the portable kernels read. A lane takes half a unit of a row, 16 weights: 8 bytes of its
4-bit plane, so that the lanes of a SIMD-group read 256 neighbouring bytes. A SIMD-group takes two rows, or two of gate and two of
up, and the 16 activations that a lane holds in registers serve all of them. No threadgroup memory, no barrier: simd_sum ends a row.
Dimensions, offsets and the number of experts are constants of the text; every buffer is bound whole.

Arithmetic. float32. A code is masked out of its 16 bits where it stands and never shifted: the factor of its place, a power of two, was taken off
the activation it meets, once for all rows. Planes with the higher bits of a code are summed apart and weighted by where they stand. Zeros and
minimums are folded in through Σx. RMSNorm scales the finished sums.

Not measured: nobody had a Mac. Results are checked on the mock (test/mockmetal); what a launch reads and how many threads it has is printed
by `bench_block.py --target METAL`.
"""
from __future__ import annotations
import functools, sys
from typing import Any, Callable, NamedTuple, Sequence
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ContextVar, prod
from tinygrad.nn.intrinsics import TARGETS, Target
from tinygrad.nn.kernel import UNIT, Norm, Weight, empty, optional
from tinygrad.nn.routing import LEAST_SUM, Gating, Routing
from tinygrad.renderer import Estimates
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo

QL_MOE_MSL, QL_SHEXP_MSL = ContextVar("QL_MOE_MSL", 1), ContextVar("QL_SHEXP_MSL", 1)
ROWS, SIMDGROUPS = 2, 4    # rows of a matrix that a SIMD-group takes, SIMD-groups of a threadgroup
HALF = UNIT // 2           # weights a lane takes at once

HEAD = """#include <metal_stdlib>
using namespace metal;

// Σ code · x of four codes, one in each byte of w, `mask` their place in the low byte; x has the factor of their place taken off
template<ushort mask> inline float four(uint w, float4 x) {
  ushort2 h = as_type<ushort2>(w);
  return float(h.x & mask) * x.x + float(h.x & ushort(mask << 8)) * x.y + float(h.y & mask) * x.z + float(h.y & ushort(mask << 8)) * x.w;
}
"""
PLACES = "float4(1.0f, 1.0f / 256, 1.0f, 1.0f / 256)"  # of a word's bytes in their 16 bits

TYPES:dict[DType, str] = {dtypes.float: "float", dtypes.half: "half", dtypes.int32: "int", dtypes.uint32: "uint", dtypes.uint16: "ushort",
                          dtypes.uint8: "uchar", dtypes.int8: "char"}

class MslExpr:
  """An MSL expression. It has the operators of a UOp that a unit's scales are written in (apps/quantized.py)."""
  def __init__(self, text:str): self.text = text
  def __str__(self) -> str: return self.text
  def cast(self, dtype:DType) -> MslExpr: return MslExpr(f"{TYPES[dtype]}({self})")
  def bitcast(self, dtype:DType) -> MslExpr: return MslExpr(f"as_type<{TYPES[dtype]}>({self})")
  def where(self, yes:MslExpr, no:MslExpr) -> MslExpr: return MslExpr(f"({self} ? {yes} : {no})")
def _operator(sign:str) -> Callable[[MslExpr, Any], MslExpr]:
  return lambda left, right: MslExpr(f"({left} {sign} {f'{right}f' if isinstance(right, float) else right})")
for method, sign in dict(add="+", sub="-", mul="*", floordiv="/", mod="%", and_="&", or_="|", lshift="<<", rshift=">>", lt="<").items():
  setattr(MslExpr, f"__{method.strip('_')}__", _operator(sign))

def scaled(weight:Weight) -> bool:
  """Whether the factors of the codes' places are taken off the activations: where codes are narrower than a byte"""
  return bool(weight.widths) and weight.widths[0] < 8
@functools.cache
def say_once(what:str) -> None: print(f"{what}: no MSL for this type: the portable kernels run", file=sys.stderr)
def msl_takes(target:Target, switch:ContextVar, *vectors:Sequence[Weight]) -> bool:
  """Whether these kernels take the products of each vector's matrices: the switch is on, they are float32 or integer codes, alike in `scaled`"""
  if target is not TARGETS["METAL"] or not switch: return False
  for weight in (weight for weights in vectors for weight in weights):
    if weight.integer or [plane.dtype for plane in weight.args("w").values()] == [dtypes.float]: continue
    say_once(weight.label)
    return False
  odd = next((weights for weights in vectors if len(set(map(scaled, weights))) > 1), None)
  if odd is not None: say_once(" beside ".join(weight.label for weight in odd))
  return odd is None

def read_codes(plane:str, name:str, width:int) -> str:
  """A statement that loads into `name` a lane's words of a code plane"""
  if width == 8: return f"uint4 {name} = ((device const uint4*){plane})[at * 2 + part] ^ 0x80808080u;"
  if width == 4: return f"uint2 {name} = ((device const uint2*){plane})[at * 2 + part];"
  if width == 2: return f"uint {name} = {plane}[at * 2 + part];"
  return f"uint {name} = {plane}[at] >> (part * 4);"

def four_products(name:str, width:int, low:int, index:int) -> str:
  """The products of the codes of weights 4·index … 4·index+3 with v[index]. low: the bit of a code that its plane begins with"""
  if width == 8: return f"dot(float4(as_type<char4>({name}[{index}])), v[{index}])"
  word, bit = (f"{name}[{index // 2}]", index % 2 * 4) if width == 4 else (name, index * width)
  factor = 2.0 ** (low - bit) * 16 ** (index % 2)  # what the activations' factors leave of the codes' place
  return f"{'' if factor == 1 else f'{factor}f * '}four<{((1 << width) - 1) << bit:#x}>({word}, v[{index}])"

def product(weight:Weight, name:str, row:str, out:str) -> str:
  """Statements that add to `out` what half a unit of a row gives: the `part` of `unit` whose activations are v[0] … v[3], their sum `total`"""
  lines = [f"uint row = {row}, at = row * {weight.shape[-1] // UNIT} + unit;"]
  if not weight.widths:
    dots = " + ".join(f"dot(((device const float4*){name}_w)[at * 8 + part * 4 + {index}], v[{index}])" for index in range(4))
    return "\n".join(["{", *lines, f"{out} += {dots};", "}"])
  terms, low = [], 0
  for i, width in enumerate(weight.widths):
    lines.append(read_codes(f"{name}_q{i}", f"q{i}", width))
    terms += [four_products(f"q{i}", width, low, index) for index in range(4)]
    low += width
  scales = weight.scales(lambda plane, index: MslExpr(f"{name}_{plane}[{index}]"), MslExpr("row"), MslExpr("unit"))
  def of_part(which:int) -> str: return str(scales[0][which]) if len(scales) == 1 else f"(part ? {scales[1][which]} : {scales[0][which]})"
  zero = f" - {float(weight.zero)}f * total" if weight.zero not in (0, 128) else ""
  minimum = "" if scales[0][1] is None else f" + {of_part(1)} * total"
  return "\n".join(["{", *lines, "float codes = " + "\n + ".join(terms) + ";", f"{out} += {of_part(0)} * (codes{zero}){minimum};", "}"])

class Rows(NamedTuple):
  """Rows of a matrix that a kernel multiplies: the matrix, its name in the text, and the number of its first row, an expression"""
  weight: Weight
  name: str
  start: str = "0"

def sums(parts:Sequence[Rows], vector:str, norm:bool=False) -> str:
  """Statements that add to s0[r], s1[r], … a lane's share of row first + r of each part times the vector and, where there is a norm, to `squares`
  its share of the vector's square. Past a part's end its last row is taken again."""
  weight = parts[0].weight
  lines = [f"for (uint i = lane; i < {weight.shape[-1] // HALF}; i += 32) {{", "uint unit = i / 2, part = i % 2;", "float4 v[4];", "float total = 0;"]
  for k in range(4):
    lines.append(f"v[{k}] = ((device const float4*)({vector}))[i * 4 + {k}];")
    if norm: lines += [f"squares += dot(v[{k}], v[{k}]);", f"v[{k}] *= ((device const float4*)norm)[i * 4 + {k}];"]
    lines.append(f"total += v[{k}].x + v[{k}].y + v[{k}].z + v[{k}].w;")
    if scaled(weight): lines.append(f"v[{k}] *= {PLACES}{' * (1.0f / 16)' if k % 2 else ''};")
  for i, (weight, name, start) in enumerate(parts):
    row = f"{start} + min(first + r, {weight.shape[-2] - 1}u)"
    lines.append(f"for (uint r = 0; r < {ROWS}; r++) " + product(weight, name, row, f"s{i}[r]"))
  return "\n".join([*lines, "}"])

def launch_msl(name:str, outs:dict[str, Tensor], ins:dict[str, Tensor], body:Sequence[str], grid:tuple[int, int, int], mem:int) -> list[Tensor]:
  """Runs a kernel of the given statements on the first tensor's device; whole buffers have the names given, with _ for dots. Returns the outs,
  written. mem: bytes it reads. It is a program that is not compiled yet: the JIT captures it and batches take it like any other."""
  tensors = [t.flatten() for t in (*outs.values(), *ins.values())]
  types = [("device " if i < len(outs) else "device const ") + TYPES[t.dtype] for i, t in enumerate(tensors)]
  params = [f"{kind}* {buffer.replace('.', '_')} [[buffer({i})]]" for i, (buffer, kind) in enumerate(zip((*outs, *ins), types))]
  source = "\n".join([HEAD, f"kernel void {name}({', '.join(params)}, uint3 group [[threadgroup_position_in_grid]],",
                      "uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {", *body, "}"])
  buffers, target = tuple(range(len(tensors))), Device[tensors[0].device].renderer.target
  info = ProgramInfo(name, grid, (32 * SIMDGROUPS, 1, 1), (), buffers, buffers[:len(outs)], buffers[len(outs):], target)
  slots = tuple(UOp.placeholder((t.uop.max_numel(),), t.dtype, slot=i) for i, t in enumerate(tensors))
  sink = UOp.sink(*slots, arg=KernelInfo(name=name, estimates=Estimates(0, mem, mem)))
  program = UOp(Ops.PROGRAM, src=(sink, UOp(Ops.LINEAR, src=slots), UOp(Ops.SOURCE, arg=source)), arg=info)
  call = program.call(*(t.uop for t in tensors))
  return [Tensor(t.uop.after(call)).reshape(out.shape) for t, out in zip(tensors, outs.values())]

def start(matrices:int) -> str:
  """Statements that every kernel begins with: the number of its SIMD-group's first row, and sums at zero"""
  return "\n".join([f"uint first = (group.x * {SIMDGROUPS} + simdgroup) * {ROWS};", *(f"float s{i}[{ROWS}] = {{}};" for i in range(matrices))])
def normed_sums(width:int, norm:Norm, parts:Sequence[Rows]) -> str:
  """The sums of parts over RMSNorm(x), but for the norm's `factor`"""
  return "\n".join([start(len(parts)), "float squares = 0;", sums(parts, "x", norm=True),
                    f"float factor = rsqrt(simd_sum(squares) * {1 / width!r}f + {norm.eps!r}f);"])
def finish(matrices:int, rows:int, store:str) -> str:
  """Statements that every kernel ends with: `store`, by one lane, for each `row` there is, with the rows' sums y0, y1, …"""
  lines = [f"for (uint r = 0; r < {ROWS}; r++) {{", "uint row = first + r;", *(f"float y{i} = simd_sum(s{i}[r]);" for i in range(matrices))]
  return "\n".join([*lines, f"if (lane == 0 && row < {rows}) {store}", "}"])
def threadgroups(rows:int) -> int: return -(-rows // (ROWS * SIMDGROUPS))
def expert_id(index:str, experts:int) -> str: return f"uint(clamp(sel[{index}], 0, {experts - 1}))"
def read_bytes(count:int, *weights:Weight) -> int: return sum(weight.nbytes // prod(weight.shape[:-2]) * count for weight in weights)

# ---- the kernels ----

def mul_mat_msl(vectors:Tensor, weight:Weight, sel:Tensor|None=None, residual:Tensor|None=None) -> Tensor:
  """mul_mat: float32 (1, in) and (out, in), residual: (1, out) -> (1, out), residual + weight·vector.
  mul_mat_id: (1, 1 or K, in), sel: int32 (1, K), and (E, out, in) -> (1, K, out), a chosen expert a layer of the grid"""
  rows, width, K = *weight.shape[-2:], 1 if sel is None else sel.shape[1]
  vector = f"x + group.z * {width}" if prod(vectors.shape[:-1]) > 1 else "x"
  first = "0" if sel is None else f"{expert_id('group.z', weight.shape[0])} * {rows}"
  body = [start(1), sums([Rows(weight, "w", first)], vector),
          finish(1, rows, f"y[group.z * {rows} + row] = y0{'' if residual is None else ' + residual[row]'};")]
  outs = {"y": empty(vectors, *((1, rows) if sel is None else (1, K, rows)))}
  ins = {"x": vectors, **optional(sel=sel, residual=residual), **weight.args("w")}
  name = f"mul_mat_msl_{K}_{weight.label}{'' if residual is None else '_residual'}"
  return launch_msl(name, outs, ins, body, (threadgroups(rows), 1, K), read_bytes(K, weight))[0]

SWIGLU = "{ y0 *= factor; y[%s] = y0 / (1 + exp(-y0)) * (y1 * factor)%s; }"

def gate_up_msl(vector:Tensor, norm:Norm, weights:tuple[Weight, Weight], router:Weight|None=None) -> list[Tensor]:
  """As gate_up of nn/moe.py. The threadgroups past those of gate and up take the router's rows."""
  (rows, width), own, beside = weights[0].shape, threadgroups(weights[0].shape[0]), 0
  body = [normed_sums(width, norm, [Rows(weights[0], "gate"), Rows(weights[1], "up")]), finish(2, rows, SWIGLU % ("row", ""))]
  outs, ins = {"y": empty(vector, 1, rows)}, {"x": vector, "norm": norm.weight, **weights[0].args("gate"), **weights[1].args("up")}
  if router is not None:
    beside = threadgroups(experts := router.shape[0])
    body = [f"if (group.x < {own}) {{", *body, f"}} else {{ group.x -= {own};", normed_sums(width, norm, [Rows(router, "router")]),
            finish(1, experts, "logits[row] = y0 * factor;"), "}"]
    outs, ins = outs | {"logits": empty(vector, 1, experts)}, ins | router.args("router")
  read = [*weights, *([] if router is None else [router])]
  name = "_".join(["gate_up_msl", *(weight.label for weight in read[::2])])
  return launch_msl(name, outs, ins, body, (own + beside, 1, 1), read_bytes(1, *read))

def choose_expert(routing:Routing, experts:int) -> str:
  """Statements by which a SIMD-group ranks the experts, a lane every 32nd. It then knows all chosen, `ids`, and `expert` and `weight` of its layer
  of the grid. Ties go to the lower index. Of groups it knows the scores, each the sum of the two best choices."""
  K, each = routing.count, -(-experts // 32)
  def all_experts(text:str) -> str: return f"for (uint n = 0, e = lane; n < {each}; n++, e += 32) {{ {text} }}"
  lines = [f"float score[{each}], choice[{each}], values[{K}], top = -INFINITY, sum = 0, weight = 0;", f"uint ids[{K}], expert = 0;",
           all_experts(f"score[n] = e < {experts} ? logits[e] : -INFINITY; top = max(top, score[n]);"), "top = simd_max(top);"]
  if routing.gating == Gating.SIGMOID: lines.append(all_experts("score[n] = 1 / (1 + exp(-score[n]));"))
  if routing.gating == Gating.SOFTMAX:
    lines += [all_experts("score[n] = exp(score[n] - top); sum += score[n];"), "sum = simd_sum(sum);", all_experts("score[n] /= sum;")]
  lines.append(all_experts(f"choice[n] = e < {experts} ? score[n]{'' if routing.bias is None else ' + bias[e]'} : -INFINITY;"))
  if routing.grouped:
    groups, size = routing.groups, experts // routing.groups
    lines += [f"float scores[{groups}];",
              f"for (uint g = 0; g < {groups}; g++) {{", f"float best = -INFINITY, second = -INFINITY; uint id = {experts - 1};",
              all_experts(f"if (e / {size} == g) best = max(best, choice[n]);"), "best = simd_max(best);",
              all_experts(f"if (e / {size} == g && choice[n] == best) id = min(id, e);"), "id = simd_min(id);",
              all_experts(f"if (e / {size} == g && e != id) second = max(second, choice[n]);"), "scores[g] = best + simd_max(second);", "}",
              f"for (uint g = 0; g < {groups}; g++) {{", "uint before = 0;",
              f"for (uint o = 0; o < {groups}; o++) before += scores[o] > scores[g] || (scores[o] == scores[g] && o < g);",
              f"if (before >= {routing.used_groups}) " + all_experts(f"if (e / {size} == g) choice[n] = -INFINITY;"), "}"]
  lines += [f"for (uint k = 0; k < {K}; k++) {{", f"float best = -INFINITY, value = 0; uint id = {experts - 1};",
            all_experts("best = max(best, choice[n]);"), "best = simd_max(best);",
            all_experts("if (choice[n] == best) id = min(id, e);"), "id = simd_min(id);",
            all_experts("if (e == id) { value = score[n]; choice[n] = -INFINITY; }"),
            f"ids[k] = id; values[k] = simd_sum(value){' - top' if routing.gating == Gating.SOFTMAX_WEIGHT else ''};", "}", "sum = 0;"]
  if routing.gating == Gating.SOFTMAX_WEIGHT:
    lines += [f"for (uint k = 0; k < {K}; k++) {{ values[k] = exp(values[k]); sum += values[k]; }}",
              f"for (uint k = 0; k < {K}; k++) values[k] /= sum;", "sum = 0;"]
  lines.append(f"for (uint k = 0; k < {K}; k++) {{ sum += values[k]; if (k == group.z) expert = ids[k], weight = values[k] * {routing.scale!r}f; }}")
  return "\n".join(lines + [f"weight /= max(sum, {LEAST_SUM!r}f);"] * routing.normalize)

def expert_gate_up_msl(vector:Tensor, norm:Norm, weights:tuple[Weight, Weight], logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  """As expert_gate_up of nn/moe.py, a chosen expert a layer of the grid. Every SIMD-group makes the choice for itself."""
  (experts, rows, width), K = weights[0].shape, routing.count
  parts = [Rows(weight, name, f"expert * {rows}") for weight, name in zip(weights, ("gate", "up"))]
  body = [choose_expert(routing, experts), f"if (group.x + group.z + simdgroup + lane == 0) for (uint k = 0; k < {K}; k++) sel[k] = ids[k];",
          normed_sums(width, norm, parts), finish(2, rows, SWIGLU % (f"group.z * {rows} + row", " * weight"))]
  outs = {"y": empty(vector, 1, K, rows), "sel": empty(vector, 1, K, dtype=dtypes.int32)}
  ins = {"x": vector, "norm": norm.weight, "logits": logits, **optional(bias=routing.bias), **weights[0].args("gate"),
         **weights[1].args("up")}
  name = f"expert_gate_up_msl_{K}_{routing.label}_{weights[0].label}"
  hidden, sel = launch_msl(name, outs, ins, body, (threadgroups(rows), 1, K), read_bytes(K, *weights))
  return hidden, sel

def expert_down_msl(hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor, shared:tuple[Tensor, Weight]|None=None) -> Tensor:
  """As expert_down of nn/moe.py. A row's sum runs through all chosen experts and on through the shared one."""
  (experts, rows, width), K = down.shape, sel.shape[1]
  body = [start(1), f"for (uint k = 0; k < {K}; k++) {{", f"uint base = {expert_id('k', experts)} * {rows};",
          sums([Rows(down, "w", "base")], f"hidden + k * {width}"), "}", *([sums([Rows(shared[1], "shared")], "x")] if shared else []),
          finish(1, rows, "y[row] = residual[row] + y0;")]
  ins = {"hidden": hidden, "sel": sel, "residual": residual, **down.args("w"), **({"x": shared[0], **shared[1].args("shared")} if shared else {})}
  mem = read_bytes(K, down) + (read_bytes(1, shared[1]) if shared else 0)
  name = f"expert_down_msl_{K}_{down.label}" + (f"_{shared[1].label}" if shared else "")
  return launch_msl(name, {"y": empty(hidden, 1, rows)}, ins, body, (threadgroups(rows), 1, 1), mem)[0]

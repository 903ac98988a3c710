"""Matrix times vector in hand-written MSL for Apple GPUs, experts chosen by id.

Replaces, where QL_MOE_MSL says so, the UOp programs of the chosen experts (nn/moe.py; a lone mul_mat_id in apps/quantized.py), and where
QL_SHEXP_MSL does, those of the router with the shared expert, of a dense feed-forward, and of linear layers with a residual (nn/norm_linear.py).
Formats with integer codes: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K; the router's float32.

Layout. The planes of apps/quantized.py, the same that the portable kernels read. A lane takes half a unit of a row, 16 weights: 8 bytes of its
4-bit plane, so that the lanes of a SIMD-group read 256 neighbouring bytes. A SIMD-group takes two rows, or two of gate and two of
up, and the 16 activations that a lane holds in registers serve all of them. No threadgroup memory, no barrier: simd_sum ends a row.
Dimensions, offsets and the number of experts are constants of the text; every buffer is bound whole.

Arithmetic. float32. A code is masked out of its 16 bits where it stands and never shifted: the factor of its place, a power of two, was taken off
the activation it meets, once for all rows. Planes with the higher bits of a code are summed apart and weighted by where they stand. Zeros and
minimums are folded in through Σx. RMSNorm scales the finished sums.

Not measured: nobody had a Mac. Results are checked on the mock (test/mockmetal); what a launch reads and routing many threads it has is printed
by `bench_block.py --target METAL`.
"""
from __future__ import annotations
import functools, sys
from typing import Any, Callable, Sequence
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ContextVar, prod
from tinygrad.nn.intrinsics import TARGETS, Target
from tinygrad.nn.kernel import UNIT, Norm, Weight
from tinygrad.nn.routing import LEAST_SUM, SIGMOID, SOFTMAX, SOFTMAX_WEIGHT, Routing
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
  """An expression of MSL. Takes the operators in which quantized.py says what a unit's scales are."""
  def __init__(self, text:str): self.text = text
  def __str__(self) -> str: return self.text
  def cast(self, dtype:DType) -> MslExpr: return MslExpr(f"{TYPES[dtype]}({self})")
  def bitcast(self, dtype:DType) -> MslExpr: return MslExpr(f"as_type<{TYPES[dtype]}>({self})")
def _operator(sign:str) -> Callable[[MslExpr, Any], MslExpr]:
  return lambda a, b: MslExpr(f"({a} {sign} {f'{b}f' if isinstance(b, float) else b})")
for method, sign in dict(add="+", sub="-", mul="*", floordiv="/", mod="%", and_="&", or_="|", lshift="<<", rshift=">>").items():
  setattr(MslExpr, f"__{method.strip('_')}__", _operator(sign))

def scaled(w:Weight) -> bool: return bool(w.widths) and w.widths[0] < 8   # whether activations have the factors of places taken off
@functools.cache
def say_once(what:str) -> None: print(f"{what}: no MSL for this type: the portable kernels run", file=sys.stderr)
def serves(t:Target, switch:ContextVar, *vectors:Sequence[Weight]) -> bool:
  """Whether a switch is on and the text below can say the products of each vector's matrices: float32 or integer codes, alike in `scaled`"""
  if t is not TARGETS["METAL"] or not switch: return False
  for w in (w for weights in vectors for w in weights):
    if w.integer or [p.dtype for p in w.args("w").values()] == [dtypes.float]: continue
    say_once(w.label)
    return False
  if odd := next((weights for weights in vectors if len(set(map(scaled, weights))) > 1), None): say_once(" beside ".join(w.label for w in odd))
  return odd is None

def product(w:Weight, name:str, row:str, sum:str) -> str:
  """Statements that add to `sum` what half a unit of a row gives: the `part` of `unit` whose activations are v[0] … v[3], their sum `total`"""
  lines, terms, low = [f"uint row = {row}, at = row * {w.shape[-1] // UNIT} + unit;"], [], 0
  if not w.widths:
    dots = " + ".join(f"dot(((device const float4*){name}_w)[at * 8 + part * 4 + {k}], v[{k}])" for k in range(4))
    return "\n".join(["{", *lines, f"{sum} += {dots};", "}"])
  for i, width in enumerate(w.widths):
    q, plane = f"q{i}", f"{name}_q{i}"
    if width == 8:
      lines.append(f"uint4 {q} = ((device const uint4*){plane})[at * 2 + part] ^ 0x80808080u;")
      terms += [f"dot(float4(as_type<char4>({q}[{k}])), v[{k}])" for k in range(4)]
      continue
    if width == 4: lines.append(f"uint2 {q} = ((device const uint2*){plane})[at * 2 + part];")
    elif width == 2: lines.append(f"uint {q} = {plane}[at * 2 + part];")
    else: lines.append(f"uint {q} = {plane}[at] >> (part * 4);")
    for k in range(4):   # the codes of the weights 4k … 4k+3, and what the factors of x leave of their place
      word, bit = (f"{q}[{k // 2}]", k % 2 * 4) if width == 4 else (q, k * width)
      factor = 2.0 ** (low - bit) * 16 ** (k % 2)
      terms.append(f"{'' if factor == 1 else f'{factor}f * '}four<{((1 << width) - 1) << bit:#x}>({word}, v[{k}])")
    low += width
  scales = [tuple(map(str, pair)) for pair in w.scales(lambda plane, at: MslExpr(f"{name}_{plane}[{at}]"), MslExpr("row"), MslExpr("unit"))]
  def of_part(i:int) -> str: return scales[0][i] if len(scales) == 1 else f"(part ? {scales[1][i]} : {scales[0][i]})"
  zero = f" - {float(w.zero)}f * total" if w.zero not in (0, 128) else ""
  minimum = f" + {of_part(1)} * total" if scales[0][1] != "None" else ""
  return "\n".join(["{", *lines, "float codes = " + "\n + ".join(terms) + ";", f"{sum} += {of_part(0)} * (codes{zero}){minimum};", "}"])

def sums(parts:Sequence[tuple[Weight, str, str]], x:str, norm:bool=False) -> str:
  """Statements that add to s0[r], s1[r], … what the lane has of row first + r of each part times the vector at x, and to `squares`, where there
  is a norm, what it has of x². A part is a matrix, its name, and the number of its first row; past its end the last row is taken again."""
  w = parts[0][0]
  lines = [f"for (uint i = lane; i < {w.shape[-1] // HALF}; i += 32) {{", "uint unit = i / 2, part = i % 2;", "float4 v[4];", "float total = 0;"]
  for k in range(4):
    lines.append(f"v[{k}] = ((device const float4*)({x}))[i * 4 + {k}];")
    if norm: lines += [f"squares += dot(v[{k}], v[{k}]);", f"v[{k}] *= ((device const float4*)norm)[i * 4 + {k}];"]
    lines.append(f"total += v[{k}].x + v[{k}].y + v[{k}].z + v[{k}].w;")
    if scaled(w): lines.append(f"v[{k}] *= {PLACES}{' * (1.0f / 16)' if k % 2 else ''};")
  for i, (w, name, start) in enumerate(parts):
    lines.append(f"for (uint r = 0; r < {ROWS}; r++) " + product(w, name, f"{start} + min(first + r, {w.shape[-2] - 1}u)", f"s{i}[r]"))
  return "\n".join([*lines, "}"])

def launch_msl(name:str, outs:dict[str, Tensor], ins:dict[str, Tensor], body:str, grid:tuple[int, int, int], mem:int) -> list[Tensor]:
  """Runs a kernel of the given body on whole buffers, which it knows by their names with _ for dots. mem: bytes it reads. Returns the outs, written.
  It is a program that is not compiled yet: the JIT captures it and batches take it like any other."""
  tensors = [t.flatten() for t in (*outs.values(), *ins.values())]
  types = [("device " if i < len(outs) else "device const ") + TYPES[t.dtype] for i, t in enumerate(tensors)]
  params = [f"{kind}* {of.replace('.', '_')} [[buffer({i})]]" for i, (of, kind) in enumerate(zip((*outs, *ins), types))]
  source = "\n".join([HEAD, f"kernel void {name}({', '.join(params)}, uint3 group [[threadgroup_position_in_grid]],",
                      "uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {", body, "}"])
  everything, written = tuple(range(len(tensors))), tuple(range(len(outs)))
  info = ProgramInfo(name, grid, (32 * SIMDGROUPS, 1, 1), (), everything, written, everything[len(outs):], Device[Device.DEFAULT].renderer.target)
  slots = tuple(UOp.placeholder((t.uop.max_numel(),), t.dtype, slot=i) for i, t in enumerate(tensors))
  sink = UOp.sink(*slots, arg=KernelInfo(name=name, estimates=Estimates(0, mem, mem)))
  program = UOp(Ops.PROGRAM, src=(sink, UOp(Ops.LINEAR, src=slots), UOp(Ops.SOURCE, arg=source)), arg=info)
  call = program.call(*(t.uop for t in tensors))
  return [Tensor(t.uop.after(call)).reshape(out.shape) for t, out in zip(tensors, outs.values())]

def start(matrices:int) -> str:
  """Statements every kernel begins with: the number of its SIMD-group's first row, and sums at zero"""
  return "\n".join([f"uint first = (group.x * {SIMDGROUPS} + simdgroup) * {ROWS};", *(f"float s{i}[{ROWS}] = {{}};" for i in range(matrices))])
def squared(width:int, norm:Norm, parts:Sequence[tuple[Weight, str, str]]) -> str:
  """The sums of parts over RMSNorm(x), but for the norm's `factor`"""
  return "\n".join([start(len(parts)), "float squares = 0;", sums(parts, "x", norm=True),
                    f"float factor = rsqrt(simd_sum(squares) * {1 / width!r}f + {norm.eps!r}f);"])
def finish(matrices:int, rows:int, store:str) -> str:
  """Statements every kernel ends with: `store`, by one lane, for each `row` there is, with the rows' sums y0, y1, …"""
  lines = [f"for (uint r = 0; r < {ROWS}; r++) {{", "uint row = first + r;", *(f"float y{i} = simd_sum(s{i}[r]);" for i in range(matrices))]
  return "\n".join([*lines, f"if (lane == 0 && row < {rows}) {store}", "}"])
def groups(rows:int) -> int: return -(-rows // (ROWS * SIMDGROUPS))
def chosen(at:str, experts:int) -> str: return f"uint(clamp(sel[{at}], 0, {experts - 1}))"
def read_bytes(count:int, *weights:Weight) -> int: return sum(w.nbytes // prod(w.shape[:-2]) * count for w in weights)

# ---- the kernels ----

def mul_mat_msl(x:Tensor, w:Weight, sel:Tensor|None=None, residual:Tensor|None=None) -> Tensor:
  """x: float32 (1, in), w: (out, in), residual: (1, out) -> (1, out), residual + w·x; or mul_mat_id: x: (1, 1 or K, in), sel: int32 (1, K),
  w: (E, out, in) -> (1, K, out)"""
  rows, width, K = *w.shape[-2:], 1 if sel is None else sel.shape[1]
  source = f"x + group.z * {width}" if prod(x.shape[:-1]) > 1 else "x"
  body = [start(1), sums([(w, "w", "0" if sel is None else f"{chosen('group.z', w.shape[0])} * {rows}")], source),
          finish(1, rows, f"y[group.z * {rows} + row] = y0{'' if residual is None else ' + residual[row]'};")]
  y = Tensor.empty(*((1, rows) if sel is None else (1, K, rows)), dtype=dtypes.float)
  ins = {"x": x, **({} if sel is None else {"sel": sel}), **({} if residual is None else {"residual": residual}), **w.args("w")}
  name = f"mul_mat_msl_{K}_{w.label}{'' if residual is None else '_residual'}"
  return launch_msl(name, {"y": y}, ins, "\n".join(body), (groups(rows), 1, K), read_bytes(K, w))[0]

SWIGLU = "{ y0 *= factor; y[%s] = y0 / (1 + exp(-y0)) * (y1 * factor)%s; }"

def gate_up_msl(x:Tensor, norm:Norm, weights:tuple[Weight, Weight], router:Weight|None=None) -> list[Tensor]:
  """As gate_up of nn/moe.py. The threadgroups past those of gate and up take the router's rows"""
  (rows, width), own, beside = weights[0].shape, groups(weights[0].shape[0]), 0
  body = [squared(width, norm, [(weights[0], "gate", "0"), (weights[1], "up", "0")]), finish(2, rows, SWIGLU % ("row", ""))]
  outs, ins = {"y": Tensor.empty(1, rows, dtype=dtypes.float)}, {"x": x, "norm": norm.weight, **weights[0].args("gate"), **weights[1].args("up")}
  if router is not None:
    beside = groups(experts := router.shape[0])
    body = [f"if (group.x < {own}) {{", *body, f"}} else {{ group.x -= {own};", squared(width, norm, [(router, "router", "0")]),
            finish(1, experts, "logits[row] = y0 * factor;"), "}"]
    outs, ins = outs | {"logits": Tensor.empty(1, experts, dtype=dtypes.float)}, ins | router.args("router")
  read = [*weights, *([] if router is None else [router])]
  name = "_".join(["gate_up_msl", *(w.label for w in read[::2])])
  return launch_msl(name, outs, ins, "\n".join(body), (own + beside, 1, 1), read_bytes(1, *read))

def choose(routing:Routing, experts:int) -> str:
  """Statements by which a SIMD-group ranks the experts, a lane every 32nd: it then knows all chosen, `ids`, and of its layer of the grid `expert`
  and `weight`. Ties go to the lower index."""
  K, each = routing.count, -(-experts // 32)
  def all_experts(text:str) -> str: return f"for (uint n = 0, e = lane; n < {each}; n++, e += 32) {{ {text} }}"
  lines = [f"float score[{each}], choice[{each}], values[{K}], top = -INFINITY, sum = 0, weight = 0;", f"uint ids[{K}], expert = 0;",
           all_experts(f"score[n] = e < {experts} ? logits[e] : -INFINITY; top = max(top, score[n]);"), "top = simd_max(top);"]
  if routing.gating == SIGMOID: lines.append(all_experts("score[n] = 1 / (1 + exp(-score[n]));"))
  if routing.gating == SOFTMAX:
    lines += [all_experts("score[n] = exp(score[n] - top); sum += score[n];"), "sum = simd_sum(sum);", all_experts("score[n] /= sum;")]
  lines += [all_experts(f"choice[n] = e < {experts} ? score[n]{'' if routing.bias is None else ' + bias[e]'} : -INFINITY;"),
            f"for (uint k = 0; k < {K}; k++) {{", f"float best = -INFINITY, value = 0; uint id = {experts - 1};",
            all_experts("best = max(best, choice[n]);"), "best = simd_max(best);",
            all_experts("if (choice[n] == best) id = min(id, e);"), "id = simd_min(id);",
            all_experts("if (e == id) { value = score[n]; choice[n] = -INFINITY; }"),
            f"ids[k] = id; values[k] = simd_sum(value){' - top' if routing.gating == SOFTMAX_WEIGHT else ''};", "}", "sum = 0;"]
  if routing.gating == SOFTMAX_WEIGHT:
    lines += [f"for (uint k = 0; k < {K}; k++) {{ values[k] = exp(values[k]); sum += values[k]; }}",
              f"for (uint k = 0; k < {K}; k++) values[k] /= sum;", "sum = 0;"]
  lines.append(f"for (uint k = 0; k < {K}; k++) {{ sum += values[k]; if (k == group.z) expert = ids[k], weight = values[k] * {routing.scale!r}f; }}")
  return "\n".join(lines + [f"weight /= max(sum, {LEAST_SUM!r}f);"] * routing.normalize)

def expert_gate_up_msl(x:Tensor, norm:Norm, weights:tuple[Weight, Weight], logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  """As expert_gate_up of nn/moe.py, a chosen expert a layer of the grid. Every SIMD-group makes the choice for itself"""
  (experts, rows, width), K = weights[0].shape, routing.count
  parts = [(w, name, f"expert * {rows}") for w, name in zip(weights, ("gate", "up"))]
  body = [choose(routing, experts), f"if (group.x + group.z + simdgroup + lane == 0) for (uint k = 0; k < {K}; k++) sel[k] = ids[k];",
          squared(width, norm, parts), finish(2, rows, SWIGLU % (f"group.z * {rows} + row", " * weight"))]
  outs = {"y": Tensor.empty(1, K, rows, dtype=dtypes.float), "sel": Tensor.empty(1, K, dtype=dtypes.int32)}
  ins = {"x": x, "norm": norm.weight, "logits": logits, **({} if routing.bias is None else {"bias": routing.bias}), **weights[0].args("gate"),
         **weights[1].args("up")}
  name = f"expert_gate_up_msl_{K}_{routing.gating}_{weights[0].label}"
  y, sel = launch_msl(name, outs, ins, "\n".join(body), (groups(rows), 1, K), read_bytes(K, *weights))
  return y, sel

def expert_down_msl(hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor, shared:tuple[Tensor, Weight]|None=None) -> Tensor:
  """As expert_down of nn/moe.py; shared: the shared expert's hidden vector and down matrix, whose product is added"""
  (experts, rows, width), K = down.shape, sel.shape[1]
  body = [start(1), f"for (uint k = 0; k < {K}; k++) {{", f"uint base = {chosen('k', experts)} * {rows};",
          sums([(down, "w", "base")], f"hidden + k * {width}"), "}", *([sums([(shared[1], "shared", "0")], "x")] if shared else []),
          finish(1, rows, "y[row] = residual[row] + y0;")]
  ins = {"hidden": hidden, "sel": sel, "residual": residual, **down.args("w"), **({"x": shared[0], **shared[1].args("shared")} if shared else {})}
  mem = read_bytes(K, down) + (read_bytes(1, shared[1]) if shared else 0)
  name = f"expert_down_msl_{K}_{down.label}" + (f"_{shared[1].label}" if shared else "")
  return launch_msl(name, {"y": Tensor.empty(1, rows, dtype=dtypes.float)}, ins, "\n".join(body), (groups(rows), 1, 1), mem)[0]

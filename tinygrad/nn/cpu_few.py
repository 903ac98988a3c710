"""A few tokens on the CPU, the next of several sequences, or those of a prompt that choose an expert: the products of nn/cpu.py, each weight read
once a step for all tokens.

Columns. A token, or what an expert makes of it, is a column of staged activations. A launch stages all columns of a product. A word of weights
meets up to 4 columns, wherever they are, while it is in a register. The next ones find the weights in the nearest cache.

A column's sum is the one that its token gets alone, bit for bit: the same code adds the same numbers in the same order.
"""
from __future__ import annotations
from typing import NamedTuple, Sequence
from tinygrad import Tensor
from tinygrad.helpers import prod
from tinygrad.nn.cpu import COLUMNS, ROTATE, PackedWeight, choose_experts, dot, group_bytes, launch, row_groups, write_rows
from tinygrad.nn.kernel import Norm, Rope, empty, optional
from tinygrad.nn.routing import Routing

class Staged(NamedTuple):
  """Columns as `stage` of nn/cpu.py makes them: float32 (columns, in), (columns, in) and (columns, in / 8)"""
  X: Tensor
  P: Tensor
  S: Tensor

def stage_columns(x:Tensor, columns:int, width:int, source:str, norm:Norm|None=None) -> Staged:
  """source: C, the index of the first number of column `job`"""
  rms = f"norm, rms(x + {source}, {width}, {norm.eps!r}f)" if norm else "0, 0"
  body = f"for (; job < last; job++) stage(x + {source}, {rms}, {width}, X + job * {width}, P + job * {width}, S + job * {width // 8});"
  outs = {"X": empty(x, columns, width), "P": empty(x, columns, width), "S": empty(x, columns, width // 8)}
  ins = {"x": x, **optional(norm=norm.weight if norm else None)}
  return Staged(*launch(f"stage_{columns}_{width}{'_norm' if norm else ''}", outs, ins, "", body, columns))

def stage_tokens(tokens:Tensor, norm:Norm|None=None, heads:int=1, width:int=0) -> Staged:
  """float32 (T, …), of each head's part of a token the first `width` numbers: T columns a head"""
  T, row = tokens.shape[0], prod(tokens.shape[1:]) // heads
  return stage_columns(tokens, heads * T, width or row, f"(job % {T} * {heads} + job / {T}) * {row}", norm)

def tile_dot(name:str, first:str, width:int, y:str, columns:int) -> str:
  """C: y[c] of so many columns, from `first` on, += the products of the group of 16 rows at B"""
  at = ", ".join(f"{column * width}" for column in range(columns))
  return f"{name}({columns}, B, X + ({first}) * {width}L, P + ({first}) * {width}L, S + ({first}) * {width // 8}L, (const long[]){{{at}}}, {y});"

# ---- linear layers ----

def products(name:str, out:Tensor, staged:Staged, weights:Sequence[PackedWeight], T:int, epilogue:str, ins:dict[str, Tensor],
             functions:str="") -> Tensor:
  """The rows of a matrix, or of a stack with T columns each, or of two matrices of one shape, times staged columns. epilogue: C, of the sums s[i][n]
  of a group of 16 rows of weight i, whose first row is `row` of matrix m, with column n. Returns out, written."""
  (*stack, _, width), groups, whole = weights[0].shape, row_groups(weights[0]), T - T % COLUMNS
  body = f"""for (; job < last; job++) {{
    long m = job / {groups}, row = job % {groups} * 16;
    v16f s[{len(weights)}][{T}];
    for (int i = 0; i < {len(weights)}; i++) for (int n = 0; n < {T}; n++) s[i][n] = 0;
    """
  for i, weight in enumerate(weights):
    body += f"B = (const byte*)w{i} + job * {group_bytes(weight)};\n    "
    if whole: body += f"for (int n = 0; n < {whole}; n += {COLUMNS}) {tile_dot(f'dot{i}', f'm * {T} + n', width, f's[{i}] + n', COLUMNS)}\n    "
    if whole < T: body += tile_dot(f"dot{i}", f"m * {T} + {whole}", width, f"s[{i}] + {whole}", T - whole) + "\n    "
  body += f"for (int n = 0; n < {T}; n++) {{ {epilogue} }}\n  }}"
  functions += "".join(dot(f"dot{i}", weight) for i, weight in enumerate(weights))
  ins = {**staged._asdict(), **ins, **{f"w{i}": weight.planes["stream"] for i, weight in enumerate(weights)}}
  return launch(name, {"y": out}, ins, functions, "const byte* B;\n  " + body, prod(stack) * groups, sum(weight.nbytes for weight in weights))[0]

def linear(staged:Staged, weight:PackedWeight, T:int, rope:Rope|None=None, start:Tensor|None=None, residual:Tensor|None=None) -> Tensor:
  """The product of T tokens: float32 (T, out), or (T, H, out) of a stack with a matrix a head"""
  *stack, rows, _ = weight.shape
  code = "v16f v = s[0][n];"
  if rope is not None: code += f"v = rotate(v, row, {rope.head}, {rope.nope}, rope + start[n] * {rope.table.shape[1] * 2}L);"
  if residual is not None: code += f"v = plus(v, residual + n * {rows}L + row, {rows} - (int)row);"
  code += f"put(y + (n * {prod(stack)} + m) * {rows} + row, v, {rows} - (int)row);"
  ins = optional(rope=rope.table if rope else None, start=start, residual=residual)
  name = "_".join(["few", *([] if rope is None else ["rope"]), *([] if residual is None else ["residual"]), weight.label, str(T)])
  return products(name, empty(staged.X, T, *stack, rows), staged, [weight], T, code, ins, "" if rope is None else ROTATE)

def norm_linear_few(tokens:Tensor, norm:Norm|None, weights:Sequence[PackedWeight], rope:Rope|None=None, start:Tensor|None=None,
                    residual:Tensor|None=None) -> list[Tensor]:
  """As norm_linear of nn/norm_linear.py. start: int32 (T,) on the device, each token's position, with rope"""
  staged, (first, *rest), T = stage_tokens(tokens, norm), weights, tokens.shape[0]
  return [linear(staged, first, T, rope, start, residual), *(linear(staged, weight, T) for weight in rest)]

def mul_mat_few(tokens:Tensor, weight:PackedWeight) -> Tensor:
  """As mul_mat of nn/norm_linear.py, without ids"""
  return linear(stage_tokens(tokens, heads=prod(weight.shape[:-2])), weight, tokens.shape[0])

# ---- attention ----

def latent_query_few(query:Tensor, kv:Tensor, k_b:PackedWeight, norm:Norm, cache:Tensor, rope:Rope, start:Tensor,
                     tables:Tensor) -> tuple[Tensor, Tensor]:
  """As latent_query_decode, of a token of each sequence"""
  H, _, nope = k_b.shape
  written = write_rows(kv, norm, cache, rope, start, tables)
  return linear(stage_tokens(query, heads=H, width=nope), k_b, query.shape[0]), written

# ---- feed-forward ----

def gate_up_few(tokens:Tensor, norm:Norm, gate:PackedWeight, up:PackedWeight, router:PackedWeight|None=None) -> list[Tensor]:
  """As gate_up of nn/moe.py"""
  T, F, staged = tokens.shape[0], gate.shape[0], stage_tokens(tokens, norm)
  swiglu = f"v16f a = s[0][n], b = s[1][n]; put(y + n * {F} + row, a / (1 + exp16(-a)) * b, {F} - (int)row);"
  hidden = products(f"few_gate_up_{gate.label}_{T}", empty(tokens, T, F), staged, [gate, up], T, swiglu, {})
  return [hidden, *([] if router is None else [linear(staged, router, T)])]

SORT = """/* the choices of experts sel[0 ... count), expert by expert: those of e are numbers starts[e] to starts[e + 1] of the table */
FN void sort(const int* sel, int count, int experts, int* starts, int* table) {
  for (int e = 0; e < experts + 2; e++) starts[e] = 0;
  for (int i = 0; i < count; i++) starts[clamp(sel[i], experts) + 2]++;
  for (int e = 0; e < experts; e++) starts[e + 1] += starts[e];
  for (int i = 0; i < count; i++) table[starts[clamp(sel[i], experts) + 1]++] = i;
}
"""

def sort_choices(count:int, experts:int) -> str: return f"int starts[{experts + 2}], table[{count}]; sort(sel, {count}, {experts}, starts, table);"

def expert_columns(at:str, **rows:str) -> str:
  """C: the products of columns that chose expert e, from number n of the table on. columns: how many, at most COLUMNS; NAME_sums: of the group of
  16 rows at each of `rows`, a vector a column. at: C, where the column of a `choice` begins"""
  def dots(count:int) -> str: return " ".join(f"dot_{name}({count}, {place}, X, P, S, at, {name}_sums);" for name, place in rows.items())
  cases = " ".join(f"case {count}: {dots(count)} break;" for count in range(1, COLUMNS + 1))
  return f"""long at[{COLUMNS}]; v16f {', '.join(f'{name}_sums[{COLUMNS}] = {{0}}' for name in rows)};
    const int left = starts[e + 1] - n, columns = left < {COLUMNS} ? left : {COLUMNS};
    for (int c = 0; c < columns; c++) {{ const long choice = table[n + c]; at[c] = {at}; }}
    switch (columns) {{ {cases} }}"""

def expert_gate_up_few(tokens:Tensor, norm:Norm, gate:PackedWeight, up:PackedWeight, logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  """As expert_gate_up of nn/moe.py. A thread takes a share of every expert's rows:

    for each expert, for each group of 16 rows:
      for each tile of the columns that chose it:
        silu(gate · tile) · (up · tile) · the choices' weights"""
  (sel, scale), (E, F, D), groups, staged = choose_experts(logits, routing), gate.shape, row_groups(gate), stage_tokens(tokens, norm)
  count, chosen = prod(sel.shape), sel.shape[1]
  rows = {name: f"(const byte*){name} + (e * {groups} + g) * {group_bytes(weight)}" for name, weight in (("gate", gate), ("up", up))}
  body = f"""{sort_choices(count, E)}
  for (long e = 0; e < {E}; e++) for (long g = job; g < last; g++) for (int n = starts[e]; n < starts[e + 1];) {{
    {expert_columns(f"choice / {chosen} * {D}", **rows)}
    for (int c = 0; c < columns; c++, n++) {{
      v16f a = gate_sums[c], b = up_sums[c]; long choice = table[n];
      put(y + choice * {F} + g * 16, a / (1 + exp16(-a)) * b * scale[choice], {F} - (int)g * 16);
    }}
  }}"""
  ins = {**staged._asdict(), "sel": sel, "scale": scale, "gate": gate.planes["stream"], "up": up.planes["stream"]}
  mem = (gate.nbytes + up.nbytes) * min(count, E) // E
  functions = SORT + dot("dot_gate", gate) + dot("dot_up", up)
  name = f"few_gate_up_{count}_of_{E}_{gate.label}"
  return launch(name, {"y": empty(tokens, *sel.shape, F)}, ins, functions, body, groups, mem)[0], sel

def expert_down_few(hidden:Tensor, down:PackedWeight, sel:Tensor, residual:Tensor) -> Tensor:
  """As expert_down of nn/moe.py, without a shared expert. A row's sums of all choices, expert by expert, and then a token's sum of them in the order
  of its choices, as it is for the token alone."""
  (E, D, F), (T, chosen), groups = down.shape, sel.shape, row_groups(down)
  count, staged = T * chosen, stage_columns(hidden, T * chosen, F, f"job * {F}L")
  body = f"""{sort_choices(count, E)}
  for (; job < last; job++) {{
    v16f of_choice[{count}];
    for (int n = 0; n < {count};) {{
      const long e = clamp(sel[table[n]], {E});
      {expert_columns(f"choice * {F}", down=f"(const byte*)down + (e * {groups} + job) * {group_bytes(down)}")}
      for (int c = 0; c < columns; c++, n++) of_choice[table[n]] = down_sums[c];
    }}
    for (int n = 0; n < {T}; n++) {{
      v16f s = 0;
      for (int k = 0; k < {chosen}; k++) s += of_choice[n * {chosen} + k];
      put(y + n * {D} + job * 16, plus(s, residual + n * {D} + job * 16, {D} - (int)job * 16), {D} - (int)job * 16);
    }}
  }}"""
  ins = {**staged._asdict(), "sel": sel, "residual": residual, "down": down.planes["stream"]}
  name, mem = f"few_down_{T}_{chosen}_{down.label}", down.nbytes * min(count, E) // E
  return launch(name, {"y": empty(hidden, T, D)}, ins, SORT + dot("dot_down", down), body, groups, mem)[0]

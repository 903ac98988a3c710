"""A few tokens on the CPU, the next of several sequences: the products of nn/cpu.py, each weight read once a step for all tokens.

Columns. A token, or a token that chose an expert, is a column of staged activations. A launch stages all columns of a product; up to 4 lie beside
each other, and a word of weights meets them while it is in a register. The next columns find the weights in the nearest cache.

A column's sum is the one that its token gets alone, bit for bit: the same code adds the same numbers in the same order.
"""
from __future__ import annotations
from typing import NamedTuple, Sequence
from tinygrad import Tensor, dtypes
from tinygrad.helpers import prod
from tinygrad.nn.cpu import COLUMNS, ROTATE, PackedWeight, choose_experts, dot, group_bytes, launch, row_groups, write_rows
from tinygrad.nn.kernel import Norm, Rope, empty, optional
from tinygrad.nn.routing import Routing

class Staged(NamedTuple):
  """Columns as `stage` of nn/cpu.py makes them: float32 (columns, in), (columns, in) and (columns, in / 16). A tile's columns lie beside each other,
  unit by unit."""
  X: Tensor
  P: Tensor
  S: Tensor

class SortedChoices(NamedTuple):
  """The choices of experts, expert by expert. starts: int32 (E + 1,), where each expert's begin; table: int32 (T · K,), the choices token · K + k"""
  starts: Tensor
  table: Tensor

def stage_columns(x:Tensor, columns:int, width:int, source:str, tile:str, norm:Norm|None=None, **ins:Tensor) -> Staged:
  """C: source, the index of the first number of column `job`; tile, which sets its tile's `first` column and their `count`"""
  body = f"""for (; job < last; job++) {{
    const float* from = x + {source}; long first, count;
    {tile}
    stage(from, {f'norm, rms(from, {width}, {norm.eps!r}f)' if norm else '0, 0'}, {width}, count,
          X + first * {width} + (job - first) * 32, P + first * {width} + (job - first) * 32, S + first * {width // 16} + (job - first) * 2);
  }}"""
  outs = {"X": empty(x, columns, width), "P": empty(x, columns, width), "S": empty(x, columns, width // 16)}
  name = f"stage_{columns}_{width}{'_norm' if norm else ''}{''.join(f'_{name}' for name in ins)}"
  return Staged(*launch(name, outs, {"x": x, **optional(norm=norm.weight if norm else None), **ins}, "", body, columns))

def stage_tokens(tokens:Tensor, norm:Norm|None=None, heads:int=1, width:int=0) -> Staged:
  """float32 (T, …), of each head's part of a token the first `width` numbers: T columns a head"""
  T, row = tokens.shape[0], prod(tokens.shape[1:]) // heads
  tile = f"first = job - job % {T} % {COLUMNS}; count = {T} - first % {T} < {COLUMNS} ? {T} - first % {T} : {COLUMNS};"
  return stage_columns(tokens, heads * T, width or row, f"(job % {T} * {heads} + job / {T}) * {row}", tile, norm)

def stage_choices(tokens:Tensor, norm:Norm, sel:Tensor, experts:int, choices:SortedChoices) -> Staged:
  """float32 (T, D), a column a choice"""
  chosen, D = sel.shape[1], tokens.shape[1]
  tile = f"""int e = clamp(sel[table[job]], {experts});
    first = job - (job - starts[e]) % {COLUMNS};
    count = starts[e + 1] - first < {COLUMNS} ? starts[e + 1] - first : {COLUMNS};"""
  return stage_columns(tokens, sel.shape[0] * chosen, D, f"table[job] / {chosen} * {D}L", tile, norm, sel=sel, **choices._asdict())

def tile_dot(name:str, first:str, width:int, y:str, columns:int) -> str:
  """C: y[c] of a tile, of so many columns from `first` on, += the products of the group of 16 rows at B"""
  return f"{name}({columns}, B, X + ({first}) * {width}L, P + ({first}) * {width}L, S + ({first}) * {width // 16}L, {y});"

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
  if residual is not None: code += f"for (int r = 0; r < 16 && row + r < {rows}; r++) v[r] += residual[n * {rows}L + row + r];"
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

def sort_choices(sel:Tensor, experts:int) -> SortedChoices:
  """sel: int32 (T, K)"""
  count = prod(sel.shape)
  body = f"""int next[{experts}];
  for (int e = 0; e <= {experts}; e++) starts[e] = 0;
  for (int i = 0; i < {count}; i++) starts[clamp(sel[i], {experts}) + 1]++;
  for (int e = 0; e < {experts}; e++) {{ next[e] = starts[e]; starts[e + 1] += starts[e]; }}
  for (int i = 0; i < {count}; i++) table[next[clamp(sel[i], {experts})]++] = i;"""
  outs = {"starts": empty(sel, experts + 1, dtype=dtypes.int32), "table": empty(sel, count, dtype=dtypes.int32)}
  return SortedChoices(*launch(f"sort_choices_{count}_{experts}", outs, {"sel": sel}, "", body))

def expert_gate_up_few(tokens:Tensor, norm:Norm, gate:PackedWeight, up:PackedWeight, logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  """As expert_gate_up of nn/moe.py. A thread takes a share of every expert's rows:

    for each expert, for each group of 16 rows:
      for each tile of the expert's columns:
        silu(gate · tile) · (up · tile) · the columns' weights"""
  (sel, scale), (E, F, D), groups = choose_experts(logits, routing), gate.shape, row_groups(gate)
  choices = sort_choices(sel, E)
  staged = stage_choices(tokens, norm, sel, E, choices)
  def dots(columns:int) -> str:
    of = (f"B = {of}_rows; {tile_dot(f'dot_{of}', 'n', D, f'{of}_sums', columns)}" for of in ("gate", "up"))
    return f"case {columns}: {' '.join(of)} break;"
  body = f"""for (int e = 0; e < {E}; e++)
    for (long g = core * {groups} / cores; g < (core + 1) * {groups} / cores; g++) {{
      const byte *gate_rows = (const byte*)gate + (e * {groups} + g) * {group_bytes(gate)};
      const byte *up_rows = (const byte*)up + (e * {groups} + g) * {group_bytes(up)}, *B;
      for (long n = starts[e]; n < starts[e + 1]; n += {COLUMNS}) {{
        v16f gate_sums[{COLUMNS}] = {{0}}, up_sums[{COLUMNS}] = {{0}};
        int columns = starts[e + 1] - n < {COLUMNS} ? starts[e + 1] - n : {COLUMNS};
        switch (columns) {{ {chr(10).join(map(dots, range(1, COLUMNS + 1)))} }}
        for (int c = 0; c < columns; c++) {{
          v16f a = gate_sums[c], b = up_sums[c]; long choice = table[n + c];
          put(y + choice * {F} + g * 16, a / (1 + exp16(-a)) * b * scale[choice], {F} - (int)g * 16);
        }}
      }}
    }}"""
  count = prod(sel.shape)
  ins = {**staged._asdict(), **choices._asdict(), "scale": scale, "gate": gate.planes["stream"], "up": up.planes["stream"]}
  mem = (gate.nbytes + up.nbytes) * min(count, E) // E
  functions = dot("dot_gate", gate) + dot("dot_up", up)
  hidden = launch(f"few_gate_up_{count}_of_{E}_{gate.label}", {"y": empty(tokens, *sel.shape, F)}, ins, functions, body, groups, mem)[0]
  return hidden, sel

def expert_down_few(hidden:Tensor, down:PackedWeight, sel:Tensor, residual:Tensor, shared:tuple[Tensor, PackedWeight]|None=None) -> Tensor:
  """As expert_down of nn/moe.py. A row's sum runs through all experts that the token chose, as it does for the token alone. For a group of 16 rows
  an expert's weights are read from memory once: the next token that chose it finds them in a cache. The shared expert's is a launch of its own."""
  (E, D, F), (T, chosen), groups = down.shape, sel.shape, row_groups(down)
  staged = stage_columns(hidden, T * chosen, F, f"job * {F}L", "first = job; count = 1;")
  body = f"""for (; job < last; job++) for (int n = 0; n < {T}; n++) {{
    v16f s = 0;
    for (int k = n * {chosen}; k < (n + 1) * {chosen}; k++) {{
      const byte* B = (const byte*)w + ((long)clamp(sel[k], {E}) * {groups} + job) * {group_bytes(down)};
      {tile_dot("dot", "k", F, "&s", 1)}
    }}
    for (int r = 0; r < 16 && job * 16 + r < {D}; r++) s[r] += residual[n * {D} + job * 16 + r];
    put(y + n * {D} + job * 16, s, {D} - (int)job * 16);
  }}"""
  ins = {**staged._asdict(), "sel": sel, "residual": residual, "w": down.planes["stream"]}
  name, mem = f"few_down_{T}_{chosen}_{down.label}", down.nbytes * min(T * chosen, E) // E
  out = launch(name, {"y": empty(hidden, T, D)}, ins, dot("dot", down), body, groups, mem)[0]
  return out if shared is None else norm_linear_few(shared[0], None, [shared[1]], residual=out)[0]

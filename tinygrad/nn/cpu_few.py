"""A few tokens on the CPU, the next of several sequences, or those of a prompt that choose an expert: the products of nn/cpu.py, each weight read
once a step for all tokens.

Columns. A token, or what an expert makes of it, is a column of staged activations. A launch stages all columns of a product, or of several. A word of
weights meets up to 4 columns, wherever they are, while it is in a register. The next ones find the weights in the nearest cache.

Parts. Between two launches all threads meet, which small ones pay for: what need not wait for each other is parts of one launch.

A column's sum is the one that its token gets alone, bit for bit: the same code adds the same numbers in the same order.
"""
from __future__ import annotations
from typing import NamedTuple, Sequence
from tinygrad import Tensor
from tinygrad.helpers import prod
from tinygrad.nn.cpu import COLUMNS, ROTATE, PackedWeight, choose_experts, dot, group_bytes, launch, row_groups, rows_to_write
from tinygrad.nn.kernel import Norm, Rope, empty, optional
from tinygrad.nn.routing import Routing

class Part(NamedTuple):
  """What the threads of a launch share out, beside its other parts: `code`, C for each `job` of so many, and the buffers by their names in it"""
  jobs: int
  code: str
  outs: dict[str, Tensor]
  ins: dict[str, Tensor]
  functions: str = ""
  mem: int = 0

def launch_parts(name:str, *parts:Part) -> list[Tensor]:
  """The parts' outs, written. Each thread has a share of every part"""
  outs, ins = {k: x for part in parts for k, x in part.outs.items()}, {k: x for part in parts for k, x in part.ins.items()}
  def loop(part:Part) -> str:
    share = f"long job = core * {part.jobs} / cores, last = (core + 1) * {part.jobs} / cores"
    return f"for ({share}; job < last; job++) {{\n    {part.code}\n  }}\n"
  functions, body = "".join(part.functions for part in parts), "".join(map(loop, parts))
  return launch(name, outs, ins, functions, body, sum(part.jobs for part in parts), sum(part.mem for part in parts))

# ---- staging ----

class Staged(NamedTuple):
  """Columns as `stage` of nn/cpu.py makes them: float32 (columns, in), (columns, in) and (columns, in / 8)"""
  X: Tensor
  P: Tensor
  S: Tensor
  def named(self, key:str="") -> dict[str, Tensor]: return {f"{name}{key}": buffer for name, buffer in self._asdict().items()}

def staging(x:Tensor, columns:int, width:int, source:str, norm:Norm|None=None, key:str="") -> Part:
  """source: C, the index of the first number of column `job`"""
  rms = f"norm, rms(x{key} + {source}, {width}, {norm.eps!r}f)" if norm else "0, 0"
  to = ", ".join((f"X{key} + job * {width}", f"P{key} + job * {width}", f"S{key} + job * {width // 8}"))
  outs = Staged(empty(x, columns, width), empty(x, columns, width), empty(x, columns, width // 8)).named(key)
  return Part(columns, f"stage(x{key} + {source}, {rms}, {width}, {to});", outs, {f"x{key}": x, **optional(norm=norm.weight if norm else None)})

def staging_of_tokens(tokens:Tensor, norm:Norm|None=None, heads:int=1, width:int=0, key:str="") -> Part:
  """float32 (T, …), of each head's part of a token the first `width` numbers: T columns a head"""
  T, row = tokens.shape[0], prod(tokens.shape[1:]) // heads
  return staging(tokens, heads * T, width or row, f"(job % {T} * {heads} + job / {T}) * {row}", norm, key)

def stage_tokens(tokens:Tensor, norm:Norm|None=None, heads:int=1) -> Staged:
  """A launch of staging_of_tokens alone"""
  part = staging_of_tokens(tokens, norm, heads)
  return Staged(*launch_parts(f"stage_{part.jobs}_{prod(tokens.shape[1:]) // heads}{'_norm' if norm else ''}", part))

# ---- linear layers ----

def tile_dots(name:str, first:str, width:int, y:str, T:int, key:str="") -> str:
  """C: y[n] of T columns, from `first` on, += the products of the group of 16 rows at B"""
  def tile(columns:int, n:str|int) -> str:
    at = ", ".join(f"{column * width}" for column in range(columns))
    place = ", ".join(f"{buffer}{key} + ({first} + {n}) * {size}L" for buffer, size in (("X", width), ("P", width), ("S", width // 8)))
    return f"{name}({columns}, B, {place}, (const long[]){{{at}}}, {y} + {n});"
  whole = T - T % COLUMNS
  return (f"for (int n = 0; n < {whole}; n += {COLUMNS}) {tile(COLUMNS, 'n')} " if whole else "") + (tile(T - whole, whole) if whole < T else "")

def products(out:Tensor, staged:Staged, weights:Sequence[PackedWeight], T:int, epilogue:str, ins:dict[str, Tensor], functions:str="",
             key:str="") -> Part:
  """The rows of a matrix, or of a stack with T columns each, or of two matrices of one shape, times staged columns. epilogue: C, of the sums s[i][n]
  of a group of 16 rows of weight i, whose first row is `row` of matrix m, with column n, into the out, y{key}."""
  (*stack, _, width), groups = weights[0].shape, row_groups(weights[0])
  names = [f"{key}{i}" for i in range(len(weights))]
  code = f"""const byte* B; long m = job / {groups}, row = job % {groups} * 16;
    v16f s[{len(weights)}][{T}];
    for (int i = 0; i < {len(weights)}; i++) for (int n = 0; n < {T}; n++) s[i][n] = 0;
    """
  for i, (name, weight) in enumerate(zip(names, weights)):
    code += f"B = (const byte*)w{name} + job * {group_bytes(weight)};\n    {tile_dots(f'dot{name}', f'm * {T}', width, f's[{i}]', T)}\n    "
  code += f"for (int n = 0; n < {T}; n++) {{ {epilogue} }}"
  functions += "".join(dot(f"dot{name}", weight) for name, weight in zip(names, weights))
  ins = {**staged.named(), **ins, **{f"w{name}": weight.planes["stream"] for name, weight in zip(names, weights)}}
  return Part(prod(stack) * groups, code, {f"y{key}": out}, ins, functions, sum(weight.nbytes for weight in weights))

def rows_of(staged:Staged, weight:PackedWeight, T:int, rope:Rope|None=None, start:Tensor|None=None, residual:Tensor|None=None, key:str="") -> Part:
  """The product of T tokens: float32 (T, out), or (T, H, out) of a stack with a matrix a head"""
  *stack, rows, _ = weight.shape
  code = "v16f v = s[0][n];"
  if rope is not None: code += f"v = rotate(v, row, {rope.head}, {rope.nope}, rope + start[n] * {rope.table.shape[1] * 2}L);"
  if residual is not None: code += f"v = plus(v, residual + n * {rows}L + row, {rows} - (int)row);"
  code += f"put(y{key} + (n * {prod(stack)} + m) * {rows} + row, v, {rows} - (int)row);"
  ins = optional(rope=rope.table if rope else None, start=start, residual=residual)
  return products(empty(staged.X, T, *stack, rows), staged, [weight], T, code, ins, "" if rope is None else ROTATE, key)

def linear(staged:Staged, weight:PackedWeight, T:int) -> Tensor: return launch_parts(f"few_{weight.label}_{T}", rows_of(staged, weight, T))[0]

def norm_linear_few(tokens:Tensor, norm:Norm|None, weights:Sequence[PackedWeight], rope:Rope|None=None, start:Tensor|None=None,
                    residual:Tensor|None=None) -> list[Tensor]:
  """As norm_linear of nn/norm_linear.py. start: int32 (T,) on the device, each token's position, with rope"""
  staged, (first, *rest), T = stage_tokens(tokens, norm), weights, tokens.shape[0]
  said = [word for word, there in (("rope", rope), ("residual", residual)) if there is not None]
  name = "_".join(["few", *said, *(weight.label for weight in weights), str(T)])
  return launch_parts(name, rows_of(staged, first, T, rope, start, residual),
                      *(rows_of(staged, weight, T, key=f"_{i}_") for i, weight in enumerate(rest, 1)))

def mul_mat_few(tokens:Tensor, weight:PackedWeight) -> Tensor:
  """As mul_mat of nn/norm_linear.py, without ids"""
  return linear(stage_tokens(tokens, heads=prod(weight.shape[:-2])), weight, tokens.shape[0])

# ---- attention ----

def latent_query_few(query:Tensor, kv:Tensor, k_b:PackedWeight, norm:Norm, cache:Tensor, rope:Rope, start:Tensor,
                     tables:Tensor) -> tuple[Tensor, Tensor]:
  """As latent_query_decode, of a token of each sequence. What stages the queries writes the cache's rows, too"""
  (H, _, nope), T = k_b.shape, query.shape[0]
  rows = Part(T, *rows_to_write(kv, norm, cache, rope, start, tables))
  *staged, written = launch_parts(f"stage_{H * T}_{nope}_cache_rows_{T}", staging_of_tokens(query, heads=H, width=nope), rows)
  return linear(Staged(*staged), k_b, T), written

# ---- feed-forward ----

def gate_up_parts(staged:Staged, gate:PackedWeight, up:PackedWeight, router:PackedWeight|None, T:int) -> list[Tensor]:
  """As gate_up of nn/moe.py, of T staged tokens"""
  F = gate.shape[0]
  swiglu = f"v16f a = s[0][n], b = s[1][n]; put(y + n * {F} + row, a / (1 + exp16(-a)) * b, {F} - (int)row);"
  parts = [products(empty(staged.X, T, F), staged, [gate, up], T, swiglu, {}), *([] if router is None else [rows_of(staged, router, T, key="_r")])]
  return launch_parts(f"few_gate_up_{gate.label}{'' if router is None else f'_router_{router.label}'}_{T}", *parts)

def gate_up_few(tokens:Tensor, norm:Norm, gate:PackedWeight, up:PackedWeight, router:PackedWeight|None=None) -> list[Tensor]:
  """As gate_up of nn/moe.py"""
  return gate_up_parts(stage_tokens(tokens, norm), gate, up, router, tokens.shape[0])

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

def expert_gate_up_few(staged:Staged, gate:PackedWeight, up:PackedWeight, logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  """As expert_gate_up of nn/moe.py, of staged tokens. A thread takes a share of every expert's rows:

    for each expert, for each group of 16 rows:
      for each tile of the columns that chose it:
        silu(gate · tile) · (up · tile) · the choices' weights"""
  (sel, scale), (E, F, D), groups = choose_experts(logits, routing), gate.shape, row_groups(gate)
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
  ins = {**staged.named(), "sel": sel, "scale": scale, "gate": gate.planes["stream"], "up": up.planes["stream"]}
  mem = (gate.nbytes + up.nbytes) * min(count, E) // E
  functions = SORT + dot("dot_gate", gate) + dot("dot_up", up)
  name = f"few_gate_up_{count}_of_{E}_{gate.label}"
  return launch(name, {"y": empty(logits, *sel.shape, F)}, ins, functions, body, groups, mem)[0], sel

def expert_down_few(hidden:Tensor, down:PackedWeight, sel:Tensor, residual:Tensor, shared:tuple[Tensor, PackedWeight]|None=None) -> Tensor:
  """As expert_down of nn/moe.py. A row's sums of all choices, expert by expert, and then a token's sum of them in the order of its choices, as it is
  for the token alone; to that the residual is added, and then the shared expert's."""
  (E, D, F), (T, chosen), groups, beside = down.shape, sel.shape, row_groups(down), [] if shared is None else [shared]
  count, staging_parts = T * chosen, [staging(hidden, T * chosen, F, f"job * {F}L"), *(staging_of_tokens(x, key="_s") for x, _ in beside)]
  staged = launch_parts("_".join([f"stage_{count}_{F}", *(f"{T}_{weight.shape[1]}" for _, weight in beside)]), *staging_parts)
  shared_sums = "".join(f"const byte* B = (const byte*)shared + job * {group_bytes(weight)}; "
                        f"{tile_dots('dot_shared', '0', weight.shape[1], 'of_shared', T, '_s')}" for _, weight in beside)
  body = f"""{sort_choices(count, E)}
  for (; job < last; job++) {{
    v16f of_choice[{count}], of_shared[{T}];
    for (int n = 0; n < {count};) {{
      const long e = clamp(sel[table[n]], {E});
      {expert_columns(f"choice * {F}", down=f"(const byte*)down + (e * {groups} + job) * {group_bytes(down)}")}
      for (int c = 0; c < columns; c++, n++) of_choice[table[n]] = down_sums[c];
    }}
    for (int n = 0; n < {T}; n++) of_shared[n] = 0;
    {shared_sums}
    for (int n = 0; n < {T}; n++) {{
      v16f s = 0;
      for (int k = 0; k < {chosen}; k++) s += of_choice[n * {chosen} + k];
      put(y + n * {D} + job * 16, plus(s, residual + n * {D} + job * 16, {D} - (int)job * 16) + of_shared[n], {D} - (int)job * 16);
    }}
  }}"""
  ins = {**Staged(*staged[:3]).named(), **(Staged(*staged[3:]).named("_s") if beside else {}), "sel": sel, "residual": residual,
         "down": down.planes["stream"], **{"shared": weight.planes["stream"] for _, weight in beside}}
  functions = SORT + dot("dot_down", down) + "".join(dot("dot_shared", weight) for _, weight in beside)
  name = "_".join(["few_down", str(T), str(chosen), down.label, *(f"shared_{weight.label}" for _, weight in beside)])
  mem = down.nbytes * min(count, E) // E + sum(weight.nbytes for _, weight in beside)
  return launch(name, {"y": empty(hidden, T, D)}, ins, functions, body, groups, mem)[0]

"""A few tokens on the CPU, the next of several sequences, or those of a prompt that choose an expert: the products of nn/cpu.py, each weight read
once a step for all tokens.

Columns. A token, one of its heads, or what an expert makes of it, is a column of staged activations. A word of weights meets up to 4 columns while it
is in a register. The next ones find the weights in the nearest cache.

Who stages. Between two launches all threads meet, which small ones pay for. So what makes a vector stages it, 32 numbers at a time as it has them
(Staged as an output), and a thread stages for itself what few others need, the columns of a head (Heads). A launch stages what RMSNorm needs
the whole of.

Parts. What need not wait for each other is parts of one launch.

A column's sum is the one that its token gets alone, bit for bit: the same code adds the same numbers in the same order.
"""
from __future__ import annotations
from typing import NamedTuple, Sequence
from tinygrad import Tensor
from tinygrad.helpers import prod
from tinygrad.nn.cpu import COLUMNS, ROTATE, PackedWeight, choose_experts, dot, group_bytes, launch, row_groups, rows_to_write, stage_buffers
from tinygrad.nn.cpu_layout import ROWS
from tinygrad.nn.kernel import UNIT, Norm, Rope, empty, optional
from tinygrad.nn.routing import Routing

class Part(NamedTuple):
  """What the threads of a launch share out, beside its other parts: `code`, C for each `job` of so many, behind `before`, and the buffers by their
  names in it"""
  jobs: int
  code: str
  outs: dict[str, Tensor]
  ins: dict[str, Tensor]
  functions: str = ""
  mem: int = 0
  before: str = ""

def launch_parts(name:str, *parts:Part) -> list[Tensor]:
  """The parts' outs, written. Each thread has a share of every part"""
  outs, ins = {k: x for part in parts for k, x in part.outs.items()}, {k: x for part in parts for k, x in part.ins.items()}
  def loop(part:Part) -> str:
    share = f"long job = core * {part.jobs} / cores, last = (core + 1) * {part.jobs} / cores"
    return f"{{ {part.before}for ({share}; job < last; job++) {{\n    {part.code}\n  }} }}\n"
  functions, body = "".join(part.functions for part in parts), "".join(map(loop, parts))
  return launch(name, outs, ins, functions, body, sum(part.jobs for part in parts), sum(part.mem for part in parts))

# ---- staging ----

class Staged(NamedTuple):
  """Columns as `stage` of nn/cpu.py makes them: float32 (columns, in), (columns, in) and (columns, in / 8). X has the numbers as they are"""
  X: Tensor
  P: Tensor
  S: Tensor
  def named(self, key:str="") -> dict[str, Tensor]: return {f"{name}{key}": buffer for name, buffer in self._asdict().items()}

GROUPS = UNIT // ROWS   # groups of rows whose results are a unit: a job's, where they are staged

class Heads(NamedTuple):
  """Tokens of which each thread stages a head's part for itself, the first `width` of its numbers. x: float32 (T, H·…)"""
  x: Tensor
  width: int

def empty_staged(like:Tensor, columns:int, width:int) -> Staged:
  """Memory that a launch will write"""
  return Staged(empty(like, columns, width), empty(like, columns, width), empty(like, columns, width // 8))

def stage_in_place(at:str, count:str|int, key:str="") -> str:
  """C: stages numbers of X, from number `at` on, whole units"""
  return f"stage(X{key} + {at}, 0, 0, {count}, X{key} + {at}, P{key} + {at}, S{key} + ({at}) / 8);"

def staging_of_tokens(tokens:Tensor, norm:Norm|None=None, key:str="") -> Part:
  """tokens: float32 (…, in), a column each"""
  width, columns = tokens.shape[-1], prod(tokens.shape[:-1])
  rms = f"norm, rms(x{key} + job * {width}L, {width}, {norm.eps!r}f)" if norm else "0, 0"
  to = ", ".join((f"X{key} + job * {width}", f"P{key} + job * {width}", f"S{key} + job * {width // 8}"))
  outs = empty_staged(tokens, columns, width).named(key)
  code = f"stage(x{key} + job * {width}L, {rms}, {width}, {to});"
  return Part(columns, code, outs, {f"x{key}": tokens, **optional(norm=norm.weight if norm else None)})

def stage_tokens(tokens:Tensor, norm:Norm|None=None) -> Staged:
  """A launch of staging_of_tokens alone"""
  part = staging_of_tokens(tokens, norm)
  return Staged(*launch_parts(f"stage_{part.jobs}_{tokens.shape[-1]}{'_norm' if norm else ''}", part))

# ---- linear layers ----

def tile_dots(name:str, width:int, y:str, T:int, key:str="") -> str:
  """C: y[n] of T columns += the products of the group of 16 rows at B"""
  def tile(columns:int, n:str|int) -> str:
    at = ", ".join(f"{column * width}" for column in range(columns))
    place = ", ".join(f"{buffer}{key} + {n} * {size}L" for buffer, size in (("X", width), ("P", width), ("S", width // 8)))
    return f"{name}({columns}, B, {place}, (const long[]){{{at}}}, {y} + {n});"
  whole = T - T % COLUMNS
  return (f"for (int n = 0; n < {whole}; n += {COLUMNS}) {tile(COLUMNS, 'n')} " if whole else "") + (tile(T - whole, whole) if whole < T else "")

def staging_of_heads(of:Heads, T:int, heads:int) -> tuple[str, str]:
  """C: the thread's buffers; and, of a product's job, the columns of its matrix m, if they are not there"""
  row, width = prod(of.x.shape[1:]) // heads, of.width
  stages = f"stage(x + (n * {heads} + m) * {row}L, 0, 0, {width}, X + n * {width}, P + n * {width}, S + n * {width // 8})"
  return f"{stage_buffers(T * width)}long staged = -1;\n  ", f"if (m != staged) {{ staged = m; for (int n = 0; n < {T}; n++) {stages}; }}"

class Finish(NamedTuple):
  """What becomes of products. code: C, of the sums s[i][n] of a group of 16 rows of weight i, whose first row is `row` of matrix m, with column n. It
  puts numbers at `to`"""
  code: str
  ins: dict[str, Tensor] = {}
  functions: str = ""

def products(out:Tensor|Staged, columns:Staged|Heads, weights:Sequence[PackedWeight], T:int, finish:Finish, key:str="") -> Part:
  """The rows of a matrix, of a stack with a head each, or of two matrices of one shape, times columns of T tokens. out: float32 (T, …, out), or that
  as T columns"""
  (*stack, rows, width), groups = weights[0].shape, row_groups(weights[0])
  names, matrices = [f"{key}{i}" for i in range(len(weights))], prod(stack)
  outs, place = {f"y{key}": out} if isinstance(out, Tensor) else out.named(f"_y{key}"), f"(n * {matrices} + m) * {rows}L + row"
  into, each = (f"y{key}", 1) if isinstance(out, Tensor) else (f"X_y{key}", GROUPS)
  before, staging = staging_of_heads(columns, T, matrices) if isinstance(columns, Heads) else ("", "")
  code = f"""long m = job * {each} / {groups}; {staging}
    for (long group = job * {each}; group < job * {each} + {each}; group++) {{
      const byte* B; const long row = group % {groups} * 16;
      v16f s[{len(weights)}][{T}];
      for (int i = 0; i < {len(weights)}; i++) for (int n = 0; n < {T}; n++) s[i][n] = 0;
      """
  for i, (name, weight) in enumerate(zip(names, weights)):
    code += f"B = (const byte*)w{name} + group * {group_bytes(weight)};\n      {tile_dots(f'dot{name}', width, f's[{i}]', T)}\n      "
  code += f"for (int n = 0; n < {T}; n++) {{ float* to = {into} + {place}; {finish.code} }}\n    }}"
  if isinstance(out, Staged):
    code += f"for (long n = 0, row = job % {groups // each} * {UNIT}; n < {T}; n++) {{ {stage_in_place(place, UNIT, f'_y{key}')} }}"
  functions = finish.functions + "".join(dot(f"dot{name}", weight) for name, weight in zip(names, weights))
  ins = {**(columns.named() if isinstance(columns, Staged) else {"x": columns.x}), **finish.ins,
         **{f"w{name}": weight.planes["stream"] for name, weight in zip(names, weights)}}
  return Part(matrices * groups // each, code, outs, ins, functions, sum(weight.nbytes for weight in weights), before)

def finish_rows(weight:PackedWeight, T:int, rope:Rope|None=None, start:Tensor|None=None, residual:Tensor|None=None) -> Finish:
  """Of linear layers. residual: float32 (T, out)"""
  rows, code = weight.shape[-2], "v16f v = s[0][n];"
  if rope is not None: code += f"v = rotate(v, row, {rope.head}, {rope.nope}, rope + start[n] * {rope.table.shape[1] * 2}L);"
  if residual is not None: code += f"v = plus(v, residual + n * {rows}L + row, {rows} - (int)row);"
  ins = optional(rope=rope.table if rope else None, start=start, residual=residual)
  return Finish(code + f"put(to, v, {rows} - (int)row);", ins, "" if rope is None else ROTATE)

def rows_of(columns:Staged|Heads, weight:PackedWeight, T:int, finish:Finish|None=None, key:str="") -> Part:
  """The product of T tokens: float32 (T, out), or (T, H, out) of a stack with a matrix a head"""
  *stack, rows, _ = weight.shape
  like = columns.X if isinstance(columns, Staged) else columns.x
  return products(empty(like, T, *stack, rows), columns, [weight], T, finish or finish_rows(weight, T), key)

def linear(columns:Staged|Heads, weight:PackedWeight, T:int, residual:Tensor|None=None) -> Tensor:
  name = "_".join(["few", *([] if residual is None else ["residual"]), weight.label, str(T)])
  return launch_parts(name, rows_of(columns, weight, T, finish_rows(weight, T, residual=residual)))[0]

def norm_linear_few(tokens:Tensor, norm:Norm|None, weights:Sequence[PackedWeight], rope:Rope|None=None, start:Tensor|None=None,
                    residual:Tensor|None=None) -> list[Tensor]:
  """As norm_linear of nn/norm_linear.py. start: int32 (T,) on the device, each token's position, with rope"""
  staged, (first, *rest), T = stage_tokens(tokens, norm), weights, tokens.shape[0]
  said = [word for word, there in (("rope", rope), ("residual", residual)) if there is not None]
  name = "_".join(["few", *said, *(weight.label for weight in weights), str(T)])
  return launch_parts(name, rows_of(staged, first, T, finish_rows(first, T, rope, start, residual)),
                      *(rows_of(staged, weight, T, key=f"_{i}_") for i, weight in enumerate(rest, 1)))

def mul_mat_few(tokens:Tensor, weight:PackedWeight) -> Tensor:
  """As mul_mat of nn/norm_linear.py, without ids"""
  return linear(Heads(tokens, weight.shape[-1]) if len(weight.shape) > 2 else stage_tokens(tokens), weight, tokens.shape[0])

# ---- attention ----

def latent_query_few(query:Tensor, kv:Tensor, k_b:PackedWeight, norm:Norm, cache:Tensor, rope:Rope, start:Tensor,
                     tables:Tensor) -> tuple[Tensor, Tensor]:
  """As latent_query_decode, of a token of each sequence"""
  T = query.shape[0]
  q_latent, written = launch_parts(f"few_latent_query_{k_b.label}_{T}", rows_of(Heads(query, k_b.shape[2]), k_b, T),
                                   Part(T, *rows_to_write(kv, norm, cache, rope, start, tables)))
  return q_latent, written

def attention_output_few(context:Tensor, v_b:PackedWeight, weight:PackedWeight, residual:Tensor) -> Tensor:
  """As attention_output of nn/norm_linear.py. The rows of a head are whole units"""
  T, (H, rows, width) = context.shape[0], v_b.shape
  heads = empty_staged(context, T, H * rows)
  part = products(heads, Heads(context, width), [v_b], T, finish_rows(v_b, T))
  return linear(Staged(*launch_parts(f"few_staged_{v_b.label}_{T}", part)), weight, T, residual)

# ---- feed-forward ----

def gate_up_launch(out:Tensor|Staged, staged:Staged, gate:PackedWeight, up:PackedWeight, router:PackedWeight|None, T:int) -> list[Tensor]:
  """As gate_up of nn/moe.py, of T staged tokens: what `out` is made of, and the logits"""
  swiglu = f"v16f a = s[0][n], b = s[1][n]; put(to, a / (1 + exp16(-a)) * b, {gate.shape[0]} - (int)row);"
  parts = [products(out, staged, [gate, up], T, Finish(swiglu)), *([] if router is None else [rows_of(staged, router, T, key="_r")])]
  what = "gate_up" if isinstance(out, Tensor) else "staged_gate_up"
  return launch_parts(f"few_{what}_{gate.label}{'' if router is None else f'_router_{router.label}'}_{T}", *parts)

def gate_up_few(tokens:Tensor, norm:Norm, gate:PackedWeight, up:PackedWeight, router:PackedWeight|None=None) -> list[Tensor]:
  """As gate_up of nn/moe.py"""
  T = tokens.shape[0]
  return gate_up_launch(empty(tokens, T, gate.shape[0]), stage_tokens(tokens, norm), gate, up, router, T)

def feed_forward_few(tokens:Tensor, norm:Norm, gate:PackedWeight, up:PackedWeight, down:PackedWeight, residual:Tensor) -> Tensor:
  """As feed_forward of nn/moe.py"""
  T = tokens.shape[0]
  hidden = gate_up_launch(empty_staged(tokens, T, gate.shape[0]), stage_tokens(tokens, norm), gate, up, None, T)
  return linear(Staged(*hidden), down, T, residual)

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

def expert_gate_up_few(staged:Staged, gate:PackedWeight, up:PackedWeight, logits:Tensor, routing:Routing) -> tuple[Staged, Tensor]:
  """As expert_gate_up of nn/moe.py, of staged tokens; a choice is a column of what it returns. A thread takes a share of every expert's rows:

    for each expert:
      for each group of 16 rows:
        for each tile of the columns that chose it:
          silu(gate · tile) · (up · tile) · the choices' weights
      what they made is staged"""
  (sel, scale), (E, F, D), groups = choose_experts(logits, routing), gate.shape, row_groups(gate)
  count, chosen = prod(sel.shape), sel.shape[1]
  rows = {name: f"(const byte*){name} + (e * {groups} + g) * {group_bytes(weight)}" for name, weight in (("gate", gate), ("up", up))}
  body = f"""{sort_choices(count, E)}
  for (long e = 0; e < {E}; e++) {{
    for (long g = job * {GROUPS}; g < last * {GROUPS}; g++) for (int n = starts[e]; n < starts[e + 1];) {{
      {expert_columns(f"choice / {chosen} * {D}", **rows)}
      for (int c = 0; c < columns; c++, n++) {{
        v16f a = gate_sums[c], b = up_sums[c]; long choice = table[n];
        put(X_y + choice * {F} + g * 16, a / (1 + exp16(-a)) * b * scale[choice], 16);
      }}
    }}
    for (int n = starts[e]; n < starts[e + 1]; n++) {{ {stage_in_place(f"table[n] * {F}L + job * {UNIT}", f"(last - job) * {UNIT}", "_y")} }}
  }}"""
  ins = {**staged.named(), "sel": sel, "scale": scale, "gate": gate.planes["stream"], "up": up.planes["stream"]}
  mem = (gate.nbytes + up.nbytes) * min(count, E) // E
  functions = SORT + dot("dot_gate", gate) + dot("dot_up", up)
  name = f"few_gate_up_{count}_of_{E}_{gate.label}"
  return Staged(*launch(name, empty_staged(logits, count, F).named("_y"), ins, functions, body, groups // GROUPS, mem)), sel

def expert_down_few(hidden:Staged, down:PackedWeight, sel:Tensor, residual:Tensor, shared:tuple[Staged, PackedWeight]|None=None) -> Tensor:
  """As expert_down of nn/moe.py, of hidden numbers that are staged. A row's sums of all choices, expert by expert, and then a token's sum of them in
  the order of its choices, as it is for the token alone; to that the residual is added, and then the shared expert's."""
  (E, D, F), (T, chosen), groups, beside = down.shape, sel.shape, row_groups(down), [] if shared is None else [shared]
  count = T * chosen
  shared_sums = "".join(f"v16f of_shared[{T}]; for (int n = 0; n < {T}; n++) of_shared[n] = 0; "   # `= {0}` would call memset, which is not there
                        f"const byte* B = (const byte*)shared + job * {group_bytes(weight)}; "
                        f"{tile_dots('dot_shared', weight.shape[1], 'of_shared', T, '_s')}" for _, weight in beside)
  body = f"""{sort_choices(count, E)}
  for (; job < last; job++) {{
    v16f of_choice[{count}];
    for (int n = 0; n < {count};) {{
      const long e = clamp(sel[table[n]], {E});
      {expert_columns(f"choice * {F}", down=f"(const byte*)down + (e * {groups} + job) * {group_bytes(down)}")}
      for (int c = 0; c < columns; c++, n++) of_choice[table[n]] = down_sums[c];
    }}
    {shared_sums}
    for (int n = 0; n < {T}; n++) {{
      v16f s = 0;
      for (int k = 0; k < {chosen}; k++) s += of_choice[n * {chosen} + k];
      s = plus(s, residual + n * {D} + job * 16, {D} - (int)job * 16);
      put(y + n * {D} + job * 16, s{" + of_shared[n]" if beside else ""}, {D} - (int)job * 16);
    }}
  }}"""
  ins = {**hidden.named(), **{k: x for columns, _ in beside for k, x in columns.named("_s").items()}, "sel": sel, "residual": residual,
         "down": down.planes["stream"], **{"shared": weight.planes["stream"] for _, weight in beside}}
  functions = SORT + dot("dot_down", down) + "".join(dot("dot_shared", weight) for _, weight in beside)
  name = "_".join(["few_down", str(T), str(chosen), down.label, *(f"shared_{weight.label}" for _, weight in beside)])
  mem = down.nbytes * min(count, E) // E + sum(weight.nbytes for _, weight in beside)
  return launch(name, {"y": empty(residual, T, D)}, ins, functions, body, groups, mem)[0]

"""Many tokens on the CPU: products as float32 register tiles, over weights that are dequantized a piece of a row at a time.

Tiles. Activations lie in tiles of 12 columns (tokens, or tokens that chose an expert): (tiles, in, 12), zeros where there are fewer columns, so that
a vector of 16 rows' weights meets 12 neighbouring numbers.

Products. A job is two groups of 16 rows. It dequantizes up to 256 weights of each row into the nearest cache, multiplies them by all tiles of its
matrix, 24 sums in registers, and goes on along the row. A weight is read and dequantized once for all columns, an expert's once for the tokens that
chose it.

Attention. The same tiles: 16 keys of the cache stand in the rows' place, a head's query of a token is a column.
"""
from __future__ import annotations
from typing import NamedTuple, Sequence
from tinygrad import Tensor, dtypes
from tinygrad.helpers import prod
from tinygrad.nn.cpu import (ROTATE, TYPES, PackedWeight, block_unit, choose_experts, fetch, group_bytes, launch, load_codes, optional, row_of,
                             write_rows)
from tinygrad.nn.cpu_layout import ROWS
from tinygrad.nn.kernel import UNIT, Norm, Rope, Unit, empty
from tinygrad.nn.latent_cache import RowFormat
from tinygrad.nn.routing import Routing

COLUMNS = 12  # of a tile
DEPTH = 128   # weights of a row that a job takes at a time, or a block where that has more

# a[g * 12 + c] += sum over k of the row vector W[g][k] times the number k of column c
TIMES = """#define APART static __attribute__((noinline)) WIDE  /* compiled once, called for thousands of cycles of work */
typedef const float* floats;
FN void some(const int C, const int G, floats W0, floats W1, long step, floats X, int n, v16f* sums) {
  v16f a[24];
  #pragma clang loop unroll(full)
  for (int g = 0; g < G; g++)
    #pragma clang loop unroll(full)
    for (int c = 0; c < C; c++) a[g * 12 + c] = sums[g * 12 + c];
  for (int k = 0; k < n; k++) {
    v16f w0 = *(const v16f*)(W0 + k * step), w1 = 0;
    if (G > 1) w1 = *(const v16f*)(W1 + k * step);
    #pragma clang loop unroll(full)
    for (int c = 0; c < C; c++) {
      a[c] += w0 * X[k * 12 + c];
      if (G > 1) a[12 + c] += w1 * X[k * 12 + c];
    }
  }
  #pragma clang loop unroll(full)
  for (int g = 0; g < G; g++)
    #pragma clang loop unroll(full)
    for (int c = 0; c < C; c++) sums[g * 12 + c] = a[g * 12 + c];
}
APART void times(floats W0, floats W1, long step, floats X, int n, int columns, v16f* sums) {
#ifdef __AVX512F__
  if (columns > 8) some(12, 2, W0, W1, step, X, n, sums);
  else if (columns > 4) some(8, 2, W0, W1, step, X, n, sums);
  else some(4, 2, W0, W1, step, X, n, sums);
#else  /* fewer or shorter registers: 6 columns of one group at a time, or 4 where that leaves fewer that are not there */
  for (int c = 0; c < columns && c < 12;) {
    const int left = columns - c, six = left > 8 || (left > 4 && left < 7);
    for (int g = 0; g < 2; g++) {
      if (six) some(6, 1, g ? W1 : W0, 0, step, X + c, n, sums + g * 12 + c);
      else some(4, 1, g ? W1 : W0, 0, step, X + c, n, sums + g * 12 + c);
    }
    c += six ? 6 : 4;
  }
#endif
}
"""

FILLED = "FN int filled(const int* table) { int n = 12; while (n && table[n - 1] < 0) n--; return n; }\n"

def tile_count(columns:int) -> int: return -(-columns // COLUMNS)
def depth(weight:PackedWeight) -> int: return max(DEPTH, weight.layout.units * UNIT)

def store_weights(unit:Unit, part:int, start:int) -> list[str]:
  """Statements that store the weights of a scale, the one numbered `part` in a unit that starts at weight `start` of D"""
  scale, minimum = unit.scales[part]
  count, zero = UNIT // len(unit.scales), float(unit.zero) if unit.floats is None else 0.0
  least = " + ".join([*([f"scale * {-zero}f"] if zero else []), *([] if minimum is None else [minimum.text])])
  lines = [f"{{ const v16f scale = {scale.text}{f', least = {least}' if least else ''};"]
  if unit.floats is None: lines.append("const v16f second = scale * (1.0f / 256), third = scale * (1.0f / 65536);")
  codes = ("FLOAT(q & 255u) * scale", "FLOAT(q & 65280u) * second", "FLOAT(q & 16711680u) * third", "FLOAT(q >> 24) * scale")
  for k in range(part * count, (part + 1) * count):
    if unit.floats is None and k % 4 == 0: lines.append(f"{{ v16u q = {unit.words[k // 4].text};")
    value = codes[k % 4] if unit.floats is None else f"{unit.floats[k].text} * scale"
    lines.append(f"*(v16f*)(D + {(start + k) * ROWS}) = {value}{' + least' if least else ''};")
    if unit.floats is None and k % 4 == 3: lines.append("}")
  return [*lines, "}"]

def unpack(name:str, weight:PackedWeight) -> str:
  """The C function that dequantizes `n` weights of each of 16 rows, whose stream is at B, into D[weight][row]"""
  layout, lines = weight.layout, []
  for index in range(layout.units):
    unit = block_unit(weight, index)
    lines.append(fetch(weight, index))
    for part in range(len(unit.scales)): lines += store_weights(unit, part, index * UNIT)
  elements, body = layout.units * UNIT, "\n    ".join(lines)
  return f"""APART void {name}(const byte* B, int n, float* D) {{
  for (; n > 0; n -= {elements}, B += {layout.nbytes}, D += {elements * ROWS}) {{
    {body}
  }}
}}
"""

def pack_tiles(tokens:Tensor, norm:Norm|None=None, heads:int=1, width:int=0, table:Tensor|None=None, share:int=1) -> Tensor:
  """Tiles of tokens: float32 (T, …) -> (tiles, width, 12). A column is the first `width` numbers of a row, or of a head's part of it; with a norm,
  RMSNorm of the row. Tiles hold the tokens in order, head by head. With a table, column i is the row table[i] // share of all rows."""
  T, row = tokens.shape[0], prod(tokens.shape[1:]) // heads
  if table is not None: T, row = prod(tokens.shape[:-1]), tokens.shape[-1]
  width, of_head = width or row, tile_count(T)
  count = heads * of_head if table is None else table.shape[0] // COLUMNS
  column = f"table[job * 12 + c] < 0 ? -1 : table[job * 12 + c] / {share}" if table is not None else f"job % {of_head} * 12 + c"
  there = "column >= 0" if table is not None else f"column < {T}"
  body = f"""for (; job < last; job++) {{
    float* P = y + job * {width * COLUMNS}L; const float* from[12]; float factor[12];
    for (int c = 0; c < 12; c++) {{
      long column = {column};
      from[c] = {there} ? x + (column * {heads} + {f'job / {of_head}' if heads > 1 else 0}) * {row}L : 0;
      {f'factor[c] = from[c] ? rms(from[c], {width}, {norm.eps!r}f) : 0;' if norm else ''}
    }}
    for (int i = 0; i < {width}; i += 16) for (int c = 0; c < 12; c++)
      if (from[c]) for (int k = 0; k < 16; k++) P[(i + k) * 12 + c] = from[c][i + k]{' * factor[c] * norm[i + k]' if norm else ''};
      else for (int k = 0; k < 16; k++) P[(i + k) * 12 + c] = 0;
  }}"""
  ins = {"x": tokens, **optional(norm=norm.weight if norm else None, table=table)}
  name = f"pack_{count}_{row}_{width}_{heads}{'_norm' if norm else ''}{'' if table is None else f'_{share}'}"
  return launch(name, {"y": empty(tokens, count, width, COLUMNS)}, ins, "", body, count)[0]

class Epilogue(NamedTuple):
  """What a product does with its sums, as C code: s[0] and s[1] are vectors of 16 rows of column `n`, which is a token or a choice"""
  code: str
  ins: dict[str, Tensor] = {}
  functions: str = ""

class SortedChoices(NamedTuple):
  """The choices of experts in tiles, expert by expert. starts: int32 (E + 1,), each expert's first tile; table: int32 (tiles · 12,), the choice of
  each column, token · K + k, or -1."""
  starts: Tensor
  table: Tensor

def tile_products(name:str, out:Tensor, tiles:Tensor, weights:dict[str, PackedWeight], columns:int, epilogue:Epilogue,
                  choices:SortedChoices|None=None) -> Tensor:
  """The rows of a matrix or a stack times tiles. One weight: a job is its groups `g` and `g + 1`; two of one shape, gate and up: their groups `g`.
  Every matrix has `columns` columns in order or, with choices, those of its expert. Returns out, written:

    for each job of the thread:
      for each piece of the rows:
        D = weights of the piece, dequantized
        for each tile of the matrix: sums += D · tile
      for each column: epilogue"""
  *stack, rows, width = next(iter(weights.values())).shape
  groups, of_matrix, piece = -(-rows // ROWS), tile_count(columns), max(map(depth, weights.values()))
  matrices, paired = prod(stack), len(weights) == 2
  jobs = groups if paired else -(-groups // 2)
  names, both = (list(weights) * 2)[:2], (list(weights.values()) * 2)[:2]
  streams = [f"(const byte*){operand} + (m * {groups}L + {group}) * {group_bytes(weight)}L" for operand, weight, group in
             zip(names, both, ("g", "g" if paired else f"(g + 1 < {groups} ? g + 1 : g)"))]
  blocks = [f"{weight.layout.units * UNIT} * {weight.layout.nbytes}" for weight in both]
  chosen = choices is not None
  first, last = ("starts[m]", "starts[m + 1]") if chosen else (f"m * {of_matrix}", f"(m + 1) * {of_matrix}")
  filled = "filled(table + t * 12)" if chosen else f"{columns} - (int)(t - first) * 12"
  body = f"""float D[{2 * piece * ROWS}]; v16f sums[{of_matrix * 24}];
  long total = {f'starts[{matrices}]' if chosen else matrices * of_matrix} * {jobs}L, from = core * total / cores, to = (core + 1) * total / cores;
  for (long m = 0; m < {matrices}; m++) {{
    long first = {first}, last = {last};
    for (long j = 0; j < {jobs}; j++) {{
      long at = first * {jobs} + j * (last - first);
      if (first == last || at < from || at >= to) continue;
      long g = j * {1 if paired else 2};
      for (int i = 0; i < (last - first) * 24; i++) sums[i] = 0;
      for (int k = 0; k < {width}; k += {piece}) {{
        int n = {width} - k < {piece} ? {width} - k : {piece};
        unpack_{names[0]}({streams[0]} + k / {blocks[0]}, n, D);
        unpack_{names[1]}({streams[1]} + k / {blocks[1]}, n, D + {piece * ROWS});
        for (long t = first; t < last; t++)
          times(D, D + {piece * ROWS}, 16, X + (t * {width} + k) * 12, n, {filled}, sums + (t - first) * 24);
      }}
      for (long i = first * 12; i < last * 12; i++) {{
        long n = {'table[i]' if chosen else 'i - first * 12'};
        if ({'n < 0' if chosen else f'n >= {columns}'}) continue;
        v16f s[2] = {{sums[(i / 12 - first) * 24 + i % 12], sums[(i / 12 - first) * 24 + 12 + i % 12]}};
        {epilogue.code}
      }}
    }}
  }}"""
  functions = TIMES + "".join(unpack(f"unpack_{operand}", weight) for operand, weight in weights.items()) + epilogue.functions + FILLED
  ins = {"X": tiles, **(choices._asdict() if choices is not None else {}), **epilogue.ins,
         **{operand: weight.planes["stream"] for operand, weight in weights.items()}}
  return launch(name, {"y": out}, ins, functions, body, jobs * matrices, sum(weight.nbytes for weight in weights.values()))[0]

def each_group(rows:int, line:str) -> str:
  """The line for each of the two groups of a job, as s[h], whose first row is `row`"""
  return f"for (int h = 0; h < 2 && (g + h) * 16 < {rows}; h++) {{ long row = (g + h) * 16; {line} }}"

# ---- linear layers ----

def linear(tiles:Tensor, weight:PackedWeight, T:int, rope:Rope|None=None, start:Tensor|None=None, residual:Tensor|None=None) -> Tensor:
  """The product of T tokens, tiles as pack_tiles makes them: float32 (T, out), or (T, H, out) of a stack with a matrix a head"""
  *stack, rows, _ = weight.shape
  matrices, code = prod(stack), ""
  if rope is not None: code += f"s[h] = rotate(s[h], row, {rope.head}, {rope.nope}, rope + (start[0] + n) * {rope.table.shape[1] * 2}L);"
  if residual is not None: code += f"s[h] = plus(s[h], residual + n * {rows}L + row, {rows} - (int)row);"
  code += f"put(y + (n * {matrices} + m) * {rows}L + row, s[h], {rows} - (int)row);"
  ins = optional(rope=rope.table if rope else None, start=start, residual=residual)
  name = "_".join(["linear", *([] if rope is None else ["rope"]), *([] if residual is None else ["residual"]), weight.label, str(T)])
  epilogue = Epilogue(each_group(rows, code), ins, "" if rope is None else ROTATE)
  return tile_products(name, empty(tiles, T, *stack, rows), tiles, {"w": weight}, T, epilogue)

def norm_linear_prefill(tokens:Tensor, norm:Norm|None, weights:Sequence[PackedWeight], rope:Rope|None=None, start:Tensor|None=None,
                        residual:Tensor|None=None) -> list[Tensor]:
  """As norm_linear of nn/norm_linear.py. start: int32 (1,) on the device, the first token's, with rope"""
  tiles, (first, *rest), T = pack_tiles(tokens, norm), weights, tokens.shape[0]
  return [linear(tiles, first, T, rope, start, residual), *(linear(tiles, weight, T) for weight in rest)]

def mul_mat_prefill(tokens:Tensor, weight:PackedWeight) -> Tensor:
  """As mul_mat of nn/norm_linear.py, without ids"""
  return linear(pack_tiles(tokens, heads=prod(weight.shape[:-2])), weight, tokens.shape[0])

# ---- attention ----

def latent_query_prefill(query:Tensor, kv:Tensor, k_b:PackedWeight, norm:Norm, cache:Tensor, rope:Rope, start:Tensor,
                         tables:Tensor) -> tuple[Tensor, Tensor]:
  """As latent_query_decode, of T tokens; start is the first one's"""
  H, _, nope = k_b.shape
  written = write_rows(kv, norm, cache, rope, start, tables)
  return linear(pack_tiles(query, heads=H, width=nope), k_b, query.shape[0]), written

PREFILL_KEYS = 64                      # positions of the cache, of one page, that a thread reads at a time
QUERY_TILES = 8                        # that share what is read of the cache
QUERY_COLUMNS = QUERY_TILES * COLUMNS

def attention_takes(latent:int) -> bool:
  """Whether mla_attention_prefill takes such a latent dimension: whole pairs of 16 numbers"""
  return latent % (2 * ROWS) == 0

def load_queries(latent:int, dim:int, head:int, scale:float) -> str:
  """C: the tiles Q of a job's queries, scaled, and its softmax reset"""
  return f"""for (int c = 0; c < {QUERY_COLUMNS}; c++) {{
      float* to = Q + c / 12 * {dim * COLUMNS} + c % 12; long n = begin + c < end ? begin + c : end - 1;
      top[c] = -1e30f; total[c] = 0;
      for (int i = 0; i < {latent}; i++) to[i * 12] = q_latent[n * {latent}L + i] * {scale!r}f;
      for (int i = {latent}; i < {dim}; i++) to[i * 12] = q[n * {head}L + {head - dim} + i] * {scale!r}f;
    }}"""

def load_keys(row_format:RowFormat, kind:str) -> str:
  """C: the cache's rows from position `from` on, of the C type `kind`: keys[group of 16][number][position], values[position][number]"""
  latent, dim = row_format.latent, row_format.dim
  row = f"rows + (from + p < length ? p : 0) * {row_format.entries}"
  numbers = f"float row[{dim}]; {load_codes(row_format, row, 'row')}" if row_format.coded else f"const {kind}* row = {row};"
  return f"""const {kind}* rows = cache + {row_of("from")} * {row_format.entries};
      for (int p = 0; p < {PREFILL_KEYS}; p++) {{
        {numbers}
        float* to = keys + p / 16 * {dim * 16} + p % 16;
        for (int i = 0; i < {dim}; i++) to[i * 16] = row[i];
        for (int i = 0; i < {latent}; i++) values[p * {latent} + i] = row[i];
      }}"""

def online_softmax(heads:int, latent:int, keys:int) -> str:
  """C: each column's scores of so many keys become weights in P; its maximum `top`, its `total` and its sums so far are brought to the new maximum"""
  return f"""for (int c = 0; c < 12; c++) {{
          long visible = first + (begin + t * 12 + c) / {heads} - from + 1; float old = top[t * 12 + c], now = old;
          v16f most = -1e30f;
          for (int g = 0; g < {keys // 16}; g++) {{
            v16f* s = scores + g / 2 * 24 + g % 2 * 12 + c;
            for (int p = 0; p < 16 && visible < (g + 1) * 16; p++) if (g * 16 + p >= visible) (*s)[p] = -1e30f;
            most = __builtin_elementwise_max(most, *s);
          }}
          for (int p = 0; p < 16; p++) now = most[p] > now ? most[p] : now;
          v16f added = 0;
          for (int g = 0; g < {keys // 16}; g++) {{
            v16f weight = exp16(scores[g / 2 * 24 + g % 2 * 12 + c] - now);
            for (int p = 0; p < 16; p++) if (g * 16 + p >= visible) weight[p] = 0;
            added += weight;
            for (int p = 0; p < 16; p++) P[(g * 16 + p) * 12 + c] = weight[p];
          }}
          float shrink = exp1(old - now);
          top[t * 12 + c] = now; total[t * 12 + c] = total[t * 12 + c] * shrink + sum16(added);
          if (now > old) for (int i = 0; i < {latent // 32}; i++) {{ y[i * 24 + c] *= shrink; y[i * 24 + 12 + c] *= shrink; }}
        }}"""

def attend(heads:int, key:int, value:int, keys:int) -> str:
  """C: tile `t` of the queries attends to so many keys, of which its last column sees `seen`, in sums of value // 32 · 24 vectors"""
  return f"""v16f scores[{keys // 32 * 24}];
        for (int i = 0; i < {keys // 32 * 24}; i++) scores[i] = 0;
        for (int pair = 0; pair < {keys // 32}; pair++)
          times(keys + pair * 2 * {key * 16}, keys + (pair * 2 + 1) * {key * 16}, 16, Q + t * {key * COLUMNS}, {key}, 12, scores + pair * 24);
        v16f* y = sums + t * {value // 32 * 24};
        {online_softmax(heads, value, keys)}
        int some = seen < {keys} ? seen : {keys};
        for (int i = 0; i < {value // 32}; i++) times(values + i * 32, values + i * 32 + 16, {value}, P, some, 12, y + i * 24);"""

def mla_attention_prefill(q_latent:Tensor, query:Tensor, cache:Tensor, start:Tensor, tables:Tensor, scale:float) -> Tensor:
  """As mla_attention_decode, of T tokens from start on, each seeing the cache up to its own row. A column is a head's query of a token, in order; a
  thread takes every n-th of the jobs, as later tokens see more of the cache. A job, 8 tiles of queries:

    for 64 keys of the cache, up to the last that the job's last token sees:
      for each tile:
        scores = keys · tile
        weights, shrink = softmax so far, of the keys that a column's token sees
        context = context · shrink + values · weights
    context /= total"""
  (T, H, L), row_format = q_latent.shape, RowFormat.of(cache, q_latent.shape[2])
  dim, columns, sums = row_format.dim, T * H, L // 32 * 24  # of all jobs; vectors of a tile's context
  jobs = -(-columns // QUERY_COLUMNS)
  body = f"""long first = start[0], length = first + {T};
  float keys[{PREFILL_KEYS * dim}], values[{PREFILL_KEYS * L}], Q[{QUERY_COLUMNS * dim}], P[{PREFILL_KEYS * COLUMNS}], \
top[{QUERY_COLUMNS}], total[{QUERY_COLUMNS}];
  v16f sums[{QUERY_TILES * sums}];
  for (long j = core; j < {jobs}; j += cores) {{
    long begin = j * {QUERY_COLUMNS}L, end = begin + {QUERY_COLUMNS} < {columns} ? begin + {QUERY_COLUMNS} : {columns};
    for (int i = 0; i < {QUERY_TILES * sums}; i++) sums[i] = 0;
    {load_queries(L, dim, query.shape[1] // H, scale)}
    for (long from = 0; from <= first + (end - 1) / {H}; from += {PREFILL_KEYS}) {{
      {load_keys(row_format, TYPES[cache.dtype])}
      for (int t = 0; t < {QUERY_TILES} && begin + t * 12 < end; t++) {{
        long seen = first + (begin + t * 12 + 11) / {H} - from + 1;  /* of these positions, by the tile's last column */
        if (seen <= 0) continue;
        {attend(H, dim, L, PREFILL_KEYS)}
      }}
    }}
    for (long n = begin; n < end; n++) for (int i = 0; i < {L // 16}; i++)
      *(v16f*)(context + n * {L}L + i * 16) = sums[(n - begin) / 12 * {sums} + i / 2 * 24 + i % 2 * 12 + (n - begin) % 12] / total[n - begin];
  }}"""
  outs, ins = {"context": empty(q_latent, T, H, L)}, {"q_latent": q_latent, "q": query, "cache": cache, "start": start, "tables": tables}
  return launch(f"mla_attention_{T}_{H}_{L}_{dim - L}", outs, ins, TIMES, body, jobs, cache.nbytes())[0]

# ---- feed-forward ----

def gate_up_prefill(tokens:Tensor, norm:Norm, gate:PackedWeight, up:PackedWeight, router:PackedWeight|None=None) -> list[Tensor]:
  """As gate_up of nn/moe.py"""
  T, width, tiles = tokens.shape[0], gate.shape[0], pack_tiles(tokens, norm)
  swiglu = Epilogue(f"put(y + n * {width}L + g * 16, s[0] / (1 + exp16(-s[0])) * s[1], {width} - (int)g * 16);")
  hidden = tile_products(f"gate_up_{gate.label}_{T}", empty(tokens, T, width), tiles, {"gate": gate, "up": up}, T, swiglu)
  return [hidden, *([] if router is None else [linear(tiles, router, T)])]

def sort_by_expert(sel:Tensor, experts:int) -> SortedChoices:
  """The choices of each expert in order. sel: int32 (T, K)"""
  count = prod(sel.shape)
  tiles = count // COLUMNS + min(experts, count)  # at most
  body = f"""int tile = 0;
  for (int i = 0; i < {tiles * COLUMNS}; i++) table[i] = -1;
  for (int e = 0; e < {experts}; e++) {{
    starts[e] = tile;
    int n = tile * 12;
    for (int i = 0; i < {count}; i++) if (clamp(sel[i], {experts}) == e) table[n++] = i;
    tile = (n + 11) / 12;
  }}
  starts[{experts}] = tile;"""
  outs = {"starts": empty(sel, experts + 1, dtype=dtypes.int32), "table": empty(sel, tiles * COLUMNS, dtype=dtypes.int32)}
  return SortedChoices(*launch(f"sort_by_expert_{count}_{experts}", outs, {"sel": sel}, "", body))

def grouped_products(tokens:Tensor, weights:dict[str, PackedWeight], sel:Tensor, epilogue:Epilogue) -> Tensor:
  """Products of the matrices that sel names, int32 (T, K), with tokens, float32 (T, 1 or K, in) -> (T, K, out)"""
  name, weight = next(iter(weights.items()))
  (experts, rows, _), (T, chosen) = weight.shape, sel.shape
  choices = sort_by_expert(sel, experts)
  tiles = pack_tiles(tokens, table=choices.table, share=chosen // tokens.shape[1])
  name = f"{'gate_up' if len(weights) == 2 else 'mul_mat'}_id_{weight.label}_{T}_{chosen}"
  return tile_products(name, empty(tokens, T, chosen, rows), tiles, weights, T * chosen, epilogue, choices)

def mul_mat_id_prefill(tokens:Tensor, weight:PackedWeight, ids:Tensor) -> Tensor:
  """As mul_mat of nn/norm_linear.py, with ids"""
  rows = weight.shape[1]
  return grouped_products(tokens, {"gate": weight}, ids, Epilogue(each_group(rows, f"put(y + n * {rows}L + row, s[h], {rows} - (int)row);")))

def expert_gate_up_prefill(tokens:Tensor, norm:Norm, gate:PackedWeight, up:PackedWeight, logits:Tensor,
                           routing:Routing) -> tuple[Tensor, Tensor]:
  """As expert_gate_up of nn/moe.py"""
  (sel, scale), rows = choose_experts(logits, routing), gate.shape[1]
  swiglu = f"put(y + n * {rows}L + g * 16, s[0] / (1 + exp16(-s[0])) * s[1] * scale[n], {rows} - (int)g * 16);"
  normed = rms_norm(tokens, norm).unsqueeze(1)
  return grouped_products(normed, {"gate": gate, "up": up}, sel, Epilogue(swiglu, {"scale": scale})), sel

def rms_norm(tokens:Tensor, norm:Norm) -> Tensor:
  T, D = tokens.shape
  body = f"""for (; job < last; job++) {{
    float factor = rms(x + job * {D}L, {D}, {norm.eps!r}f);
    for (int i = 0; i < {D}; i++) y[job * {D}L + i] = x[job * {D}L + i] * factor * norm[i];
  }}"""
  return launch(f"rms_norm_{T}_{D}", {"y": empty(tokens, T, D)}, {"x": tokens, "norm": norm.weight}, "", body, T)[0]

def expert_down_prefill(hidden:Tensor, down:PackedWeight, sel:Tensor, residual:Tensor) -> Tensor:
  """As expert_down of nn/moe.py, without a shared expert. The products of all choices, then a token's sum of them."""
  products, (T, D), chosen = mul_mat_id_prefill(hidden, down, sel), residual.shape, sel.shape[1]
  body = f"""for (; job < last; job++) for (int i = 0; i < {D}; i++) {{
    float s = residual[job * {D}L + i];
    for (int k = 0; k < {chosen}; k++) s += each[(job * {chosen} + k) * {D}L + i];
    y[job * {D}L + i] = s;
  }}"""
  return launch(f"sum_{chosen}_{T}_{D}", {"y": empty(hidden, T, D)}, {"each": products, "residual": residual}, "", body, T)[0]

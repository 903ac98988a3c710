"""Many tokens on the CPU: products as float32 register tiles over weights that are dequantized a piece of a row at a time.

x lies in *tiles* of 12 columns (tokens, or tokens that chose an expert): (tiles, in, 12), zeros where there are fewer, so that a row of weights meets
12 neighbours. A job is two groups of 16 rows: it dequantizes up to 256 weights of each row into the nearest cache, multiplies them by all tiles of
its matrix, 24 sums in registers, and goes on along the row. A weight is read and dequantized once for all columns, an expert's once for the tokens
that chose it. Attention is made of the same tiles, with 16 positions of the cache in the rows' place.
"""
from __future__ import annotations
from typing import Any, Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.helpers import prod
from tinygrad.nn.cpu import ROTATE, ROWS, TYPES, group_bytes, groups, launch, of_block
from tinygrad.nn.kernel import UNIT

COLUMNS = 12    # of a tile
DEPTH = 128     # weights of a row at a time, or a block of more

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
#else  /* fewer or shorter registers */
  for (int c = 0; c < columns && c < 12; c += 4) { some(4, 1, W0, W0, step, X + c, n, sums + c); some(4, 1, W1, W1, step, X + c, n, sums + 12 + c); }
#endif
}
"""

FILLED = "FN int filled(const int* table) { int n = 12; while (n && table[n - 1] < 0) n--; return n; }\n"

def tiles(columns:int) -> int: return -(-columns // COLUMNS)
def depth(w:Any) -> int: return max(DEPTH, w.layout.units * UNIT)

def unpack(name:str, w:Any) -> str:
  """The C function that makes the weights of `n` numbers of 16 rows, a stream at B: D[k][row]"""
  layout, lines = w.layout, []
  for u in range(layout.units):
    unit = of_block(w, layout, u)
    half = UNIT // len(unit.scales)
    for g, (scale, minimum) in enumerate(unit.scales):
      zero = float(unit.zero) if unit.floats is None else 0.0
      least = " + ".join([*([f"scale * {-zero}f"] if zero else []), *([] if minimum is None else [minimum.text])])
      lines.append(f"{{ const v16f scale = {scale.text}{f', least = {least}' if least else ''};")
      if unit.floats is None: lines.append("const v16f second = scale * (1.0f / 256), third = scale * (1.0f / 65536);")
      for k in range(g * half, (g + 1) * half):
        def put(value:str) -> None: lines.append(f"*(v16f*)(D + {(u * UNIT + k) * ROWS}) = {value}{' + least' if least else ''};")
        if unit.floats is not None: put(f"{unit.floats[k].text} * scale")
        elif k % 4 == 0: lines.append(f"{{ v16u q = {unit.words[k // 4].text};")
        if unit.floats is None:
          put(("FLOAT(q & 255u) * scale", "FLOAT(q & 65280u) * second", "FLOAT(q & 16711680u) * third", "FLOAT(q >> 24) * scale")[k % 4])
          if k % 4 == 3: lines.append("}")
      lines.append("}")
  elements = layout.units * UNIT
  body = "\n    ".join(lines)
  return f"""APART void {name}(const byte* B, int n, float* D) {{
  for (; n > 0; n -= {elements}, B += {layout.nbytes}, D += {elements * ROWS}) {{
    {body}
  }}
}}
"""

def pack(x:Tensor, norm:Any=None, heads:int=1, width:int=0, table:Tensor|None=None, share:int=1) -> Tensor:
  """x: float32 (T, …), of each row (or head's part of it) the first `width` numbers, or RMSNorm of the row -> float32 (tiles, width, 12).
  Tiles hold the tokens in order, head by head; or, for column i, the row table[i] // share of x"""
  T, row = x.shape[0], prod(x.shape[1:]) // heads
  if table is not None: T, row = prod(x.shape) // x.shape[-1], x.shape[-1]
  width, of_head = width or row, tiles(T)
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
  ins = {"x": x, **({"norm": norm.weight} if norm else {}), **({} if table is None else {"table": table})}
  name = f"pack_{count}_{row}_{width}_{heads}{'_norm' if norm else ''}{'' if table is None else f'_{share}'}"
  return launch(name, {"y": Tensor.empty(count, width, COLUMNS, dtype=dtypes.float)}, ins, "", body, count)[0]

def products(name:str, outs:dict[str, Tensor], ins:dict[str, Tensor], x:Tensor, weights:Sequence[tuple[str, Any]], T:int, finish:str,
             functions:str="", chosen:bool=False) -> list[Tensor]:
  """MatvecPart of a matrix or a stack times the tiles of x. One weight: a job is its groups `g` and `g + 1`; two (gate and up): their groups `g`.
  chosen: the tiles of matrix m are starts[m] up to starts[m + 1], and of its column i the choice table[i]; else each has all T tokens.
  finish: C on the sums s[0] and s[1] of column `n` (a token, or a choice)"""
  w = weights[0][1]
  (*stack, rows, width), G, n, KB = w.shape, groups(w), tiles(T), max(depth(v) for _, v in weights)
  matrices, paired = prod(stack), len(weights) == 2
  jobs = G if paired else -(-G // 2)
  first, last = ("starts[m]", "starts[m + 1]") if chosen else (f"m * {n}", f"(m + 1) * {n}")
  names = [name for name, _ in weights] * (1 if paired else 2)
  streams = [f"(const byte*){v} + (m * {G}L + {at}) * {group_bytes(u)}L" for v, at, (_, u) in
             zip(names, ("g", "g") if paired else ("g", f"(g + 1 < {G} ? g + 1 : g)"), [*weights, *weights])]
  sizes = [f"{v.layout.units * UNIT} * {v.layout.nbytes}" for _, v in [*weights, *weights][:2]]
  body = f"""float D[{2 * KB * ROWS}]; v16f sums[{n * 24}];
  long total = {f'starts[{matrices}]' if chosen else matrices * n} * {jobs}L, from = core * total / cores, to = (core + 1) * total / cores;
  for (long m = 0; m < {matrices}; m++) {{
    long first = {first}, last = {last};
    for (long j = 0; j < {jobs}; j++) {{
      long at = first * {jobs} + j * (last - first);
      if (first == last || at < from || at >= to) continue;
      long g = j * {1 if paired else 2};
      for (int i = 0; i < (last - first) * 24; i++) sums[i] = 0;
      for (int k = 0; k < {width}; k += {KB}) {{
        int n = {width} - k < {KB} ? {width} - k : {KB};
        unpack_{names[0]}({streams[0]} + k / {sizes[0]}, n, D);
        unpack_{names[1]}({streams[1]} + k / {sizes[1]}, n, D + {KB * ROWS});
        for (long t = first; t < last; t++)
          times(D, D + {KB * ROWS}, 16, X + (t * {width} + k) * 12, n, {'filled(table + t * 12)' if chosen else f'{T} - (int)(t - first) * 12'}, sums + (t - first) * 24);
      }}
      for (long i = first * 12; i < last * 12; i++) {{
        long n = {'table[i]' if chosen else 'i - first * 12'};
        if ({'n < 0' if chosen else f'n >= {T}'}) continue;
        v16f s[2] = {{sums[(i / 12 - first) * 24 + i % 12], sums[(i / 12 - first) * 24 + 12 + i % 12]}};
        {finish}
      }}
    }}
  }}"""
  functions = TIMES + "".join(unpack(f"unpack_{name}", v) for name, v in weights) + functions + FILLED
  ins = {"X": x, **ins, **{name: v.planes["stream"] for name, v in weights}}
  return launch(name, outs, ins, functions, body, jobs * matrices, sum(v.nbytes for _, v in weights))

def both(rows:int, line:str) -> str:
  """The line for each of the two groups of a job, as s[h] and row r"""
  return f"for (int h = 0; h < 2 && (g + h) * 16 < {rows}; h++) {{ long row = (g + h) * 16; {line} }}"

def linear(X:Tensor, w:Any, T:int, rope:Any=None, pos:Tensor|None=None, residual:Tensor|None=None) -> Tensor:
  """float32 (T, out), or (T, H, out) of a stack with a matrix a head. X: as pack makes it"""
  *stack, rows, width = w.shape
  H, finish = prod(stack), ""
  if rope is not None: finish += f"s[h] = rotate(s[h], row, {rope.head}, {rope.nope}, rope + (pos[0] + n) * {rope.table.shape[1] * 2}L);"
  if residual is not None: finish += f"for (int r = 0; r < 16 && row + r < {rows}; r++) s[h][r] += residual[n * {rows}L + row + r];"
  finish += f"put(y + (n * {H} + m) * {rows}L + row, s[h], {rows} - (int)row);"
  ins = {**({"rope": rope.table, "pos": pos} if rope is not None else {}), **({} if residual is None else {"residual": residual})}
  name = "_".join(["linear", *([] if rope is None else ["rope"]), *([] if residual is None else ["residual"]), w.label, str(T)])
  return products(name, {"y": Tensor.empty(T, *stack, rows, dtype=dtypes.float)}, ins, X, [("w", w)], T, both(rows, finish),
                  ROTATE if rope is not None else "")[0]

def on_device(pos:UOp|int|Tensor) -> Tensor:
  """int32 (1,)"""
  if isinstance(pos, UOp): return Tensor(pos, dtype=dtypes.int32).reshape(1).contiguous()
  return pos if isinstance(pos, Tensor) else launch("position", {"pos": Tensor.empty(1, dtype=dtypes.int32)}, {}, "", f"pos[0] = {pos};")[0]

def norm_linear(x:Tensor, norm:Any, weights:Sequence[Any], rope:Any=None, pos:Tensor|None=None, residual:Tensor|None=None) -> list[Tensor]:
  """As in norm_linear.norm_linear"""
  X = pack(x, norm)
  return [linear(X, w, x.shape[0], *((rope, pos, residual) if i == 0 else ())) for i, w in enumerate(weights)]

def mul_mat(x:Tensor, w:Any) -> Tensor:
  """A matrix, or one a head: (T, in) or (T, H, in) -> (T, out) or (T, H, out)"""
  return linear(pack(x, heads=prod(w.shape[:-2])), w, x.shape[0])

# ---- attention ----

def latent_query(q:Tensor, kv:Tensor, k_b:Any, norm:Any, cache:Tensor, rope:Any, pos:Tensor) -> tuple[Tensor, Tensor]:
  """As in norm_linear.latent_query"""
  (H, L, nope), T, dim = k_b.shape, q.shape[0], cache.shape[1]
  body = f"""for (; job < last; job++) {{
    const float* from = kv + job * {dim}; const float* turn = rope + (pos[0] + job) * {rope.table.shape[1] * 2}L;
    {TYPES[cache.dtype]}* row = cache + (pos[0] + job) * {dim}L; float f = rms(from, {L}, {norm.eps!r}f);
    for (int i = 0; i < {L}; i++) row[i] = from[i] * f * norm[i];
    for (int i = 0; i < {dim - L}; i += 2) {{
      float a = from[{L} + i], b = from[{L} + i + 1], c = turn[i], s = turn[i + 1];
      row[{L} + i] = a * c - b * s; row[{L} + i + 1] = a * s + b * c;
    }}
  }}"""
  ins = {"kv": kv, "norm": norm.weight, "rope": rope.table, "pos": pos}
  written = launch(f"cache_rows_{T}_{dim}_{L}", {"cache": cache}, ins, "", body, T, T * dim * 8)[0]
  return linear(pack(q, heads=H, width=nope), k_b, T), written

AT_ONCE, TILES = 64, 8  # positions; tiles of queries that share what is read of the cache

def attention_fits(latent:int) -> bool: return latent % (2 * ROWS) == 0

def mla_attention(q_latent:Tensor, q:Tensor, cache:Tensor, pos:UOp|int|Tensor, scale:float) -> Tensor:
  """As in mla_attention.mla_attention. A column is a head's query of a token, in order; a thread takes every n-th of the jobs, as later tokens see
  more of the cache. Scores are products of 16 positions' keys, turned on the way; sums of values read the cache's rows as they lie"""
  (T, H, L), dim = q_latent.shape, cache.shape[1]
  head, columns = q.shape[1] // H, T * H
  jobs = -(-columns // (TILES * COLUMNS))
  body = f"""long start = pos[0], length = start + {T};
  float keys[{AT_ONCE * dim}], values[{AT_ONCE * L}], Q[{TILES * dim * COLUMNS}], P[{AT_ONCE * COLUMNS}], top[{TILES * COLUMNS}], total[{TILES * COLUMNS}];
  v16f sums[{TILES * L // 32 * 24}];
  for (long j = core; j < {jobs}; j += cores) {{
    long begin = j * {TILES * COLUMNS}L, end = begin + {TILES * COLUMNS} < {columns} ? begin + {TILES * COLUMNS} : {columns};
    for (int i = 0; i < {TILES * L // 32 * 24}; i++) sums[i] = 0;
    for (int c = 0; c < {TILES * COLUMNS}; c++) {{
      float* to = Q + c / 12 * {dim * COLUMNS} + c % 12; long n = begin + c < end ? begin + c : end - 1;
      top[c] = -1e30f; total[c] = 0;
      for (int i = 0; i < {L}; i++) to[i * 12] = q_latent[n * {L}L + i] * {scale!r}f;
      for (int i = {L}; i < {dim}; i++) to[i * 12] = q[n * {head}L + {head - dim} + i] * {scale!r}f;
    }}
    for (long from = 0; from <= start + (end - 1) / {H}; from += {AT_ONCE}) {{
      for (int p = 0; p < {AT_ONCE}; p++) {{
        const {TYPES[cache.dtype]}* row = cache + (from + p < length ? from + p : 0) * {dim}L;
        float* to = keys + p / 16 * {dim * 16} + p % 16;
        for (int i = 0; i < {dim}; i++) to[i * 16] = row[i];
        for (int i = 0; i < {L}; i++) values[p * {L} + i] = row[i];
      }}
      for (int t = 0; t < {TILES} && begin + t * 12 < end; t++) {{
        long seen = start + (begin + t * 12 + 11) / {H} - from + 1;  /* of these positions, by the tile's last column */
        if (seen <= 0) continue;
        v16f scores[{AT_ONCE // 32 * 24}];
        for (int i = 0; i < {AT_ONCE // 32 * 24}; i++) scores[i] = 0;
        for (int h = 0; h < {AT_ONCE // 32}; h++)
          times(keys + h * 2 * {dim * 16}, keys + (h * 2 + 1) * {dim * 16}, 16, Q + t * {dim * COLUMNS}, {dim}, 12, scores + h * 24);
        v16f* y = sums + t * {L // 32 * 24};
        for (int c = 0; c < 12; c++) {{
          long visible = start + (begin + t * 12 + c) / {H} - from + 1; float old = top[t * 12 + c], now = old;
          v16f most = -1e30f;
          for (int g = 0; g < {AT_ONCE // 16}; g++) {{
            v16f* s = scores + g / 2 * 24 + g % 2 * 12 + c;
            for (int p = 0; p < 16 && visible < (g + 1) * 16; p++) if (g * 16 + p >= visible) (*s)[p] = -1e30f;
            most = __builtin_elementwise_max(most, *s);
          }}
          for (int p = 0; p < 16; p++) now = most[p] > now ? most[p] : now;
          v16f added = 0;
          for (int g = 0; g < {AT_ONCE // 16}; g++) {{
            v16f weight = exp16(scores[g / 2 * 24 + g % 2 * 12 + c] - now);
            for (int p = 0; p < 16; p++) if (g * 16 + p >= visible) weight[p] = 0;
            added += weight;
            for (int p = 0; p < 16; p++) P[(g * 16 + p) * 12 + c] = weight[p];
          }}
          float shrink = exp1(old - now);
          top[t * 12 + c] = now; total[t * 12 + c] = total[t * 12 + c] * shrink + sum16(added);
          if (now > old) for (int i = 0; i < {L // 32}; i++) {{ y[i * 24 + c] *= shrink; y[i * 24 + 12 + c] *= shrink; }}
        }}
        int some = seen < {AT_ONCE} ? seen : {AT_ONCE};
        for (int i = 0; i < {L // 32}; i++) times(values + i * 32, values + i * 32 + 16, {L}, P, some, 12, y + i * 24);
      }}
    }}
    for (long n = begin; n < end; n++) for (int i = 0; i < {L // 16}; i++)
      *(v16f*)(context + n * {L}L + i * 16) = sums[(n - begin) / 12 * {L // 32 * 24} + i / 2 * 24 + i % 2 * 12 + (n - begin) % 12] / total[n - begin];
  }}"""
  ins = {"q_latent": q_latent, "q": q, "cache": cache, "pos": pos}
  return launch(f"mla_attention_{T}_{H}_{L}_{dim - L}", {"context": Tensor.empty(T, H, L, dtype=dtypes.float)}, ins, TIMES, body, jobs, cache.nbytes())[0]

# ---- feed-forward ----

def gate_up(x:Tensor, norm:Any, weights:tuple[Any, Any], router:Any=None) -> list[Tensor]:
  """As in moe.gate_up"""
  T, (gate, up), X = x.shape[0], weights, pack(x, norm)
  F = gate.shape[0]
  finish = f"put(y + n * {F}L + g * 16, s[0] / (1 + exp16(-s[0])) * s[1], {F} - (int)g * 16);"
  y, = products(f"gate_up_{gate.label}_{T}", {"y": Tensor.empty(T, F, dtype=dtypes.float)}, {}, X, [("gate", gate), ("up", up)], T, finish)
  return [y, *([] if router is None else [linear(X, router, T)])]

def sort_by_expert(sel:Tensor, experts:int) -> tuple[Tensor, Tensor]:
  """The choices of each expert in order, in tiles. sel: int32 (T, K) -> int32 (E + 1,), each expert's first tile, and int32 (tiles · 12,), what a column
  is: a choice, token · K + k, or -1"""
  choices = prod(sel.shape)
  most = choices // COLUMNS + min(experts, choices)
  body = f"""int tile = 0;
  for (int i = 0; i < {most * COLUMNS}; i++) table[i] = -1;
  for (int e = 0; e < {experts}; e++) {{
    starts[e] = tile;
    int n = tile * 12;
    for (int i = 0; i < {choices}; i++) if (clamp(sel[i], {experts}) == e) table[n++] = i;
    tile = (n + 11) / 12;
  }}
  starts[{experts}] = tile;"""
  outs = {"starts": Tensor.empty(experts + 1, dtype=dtypes.int32), "table": Tensor.empty(most * COLUMNS, dtype=dtypes.int32)}
  starts, table = launch(f"by_expert_{choices}_{experts}", outs, {"sel": sel}, "", body)
  return starts, table

def mul_mat_id(x:Tensor, weights:Sequence[Any], sel:Tensor, scale:Tensor|None=None) -> Tensor:
  """The matrices that sel names, (T, K), times x, (T, 1 or K, in) -> (T, K, out); of two, gate and up, silu(gate·x) · (up·x) · scale"""
  (E, rows, _), (T, K) = weights[0].shape, sel.shape
  starts, table = sort_by_expert(sel, E)
  X = pack(x, table=table, share=K // x.shape[1])
  ins = {"starts": starts, "table": table, **({} if scale is None else {"scale": scale})}
  if len(weights) == 2: finish = f"put(y + n * {rows}L + g * 16, s[0] / (1 + exp16(-s[0])) * s[1] * scale[n], {rows} - (int)g * 16);"
  else: finish = both(rows, f"put(y + n * {rows}L + row, s[h], {rows} - (int)row);")
  name = f"{'gate_up' if len(weights) == 2 else 'mul_mat'}_id_{weights[0].label}_{T}_{K}"
  return products(name, {"y": Tensor.empty(T, K, rows, dtype=dtypes.float)}, ins, X, list(zip(("gate", "up"), weights)), T * K, finish, chosen=True)[0]

def expert_gate_up(x:Tensor, norm:Any, weights:tuple[Any, Any], sel:Tensor, scale:Tensor) -> Tensor:
  """As in moe.expert_gate_up, of a choice"""
  return mul_mat_id(rms_norm(x, norm).unsqueeze(1), weights, sel, scale)

def rms_norm(x:Tensor, norm:Any) -> Tensor:
  T, D = x.shape
  body = f"""for (; job < last; job++) {{
    float factor = rms(x + job * {D}L, {D}, {norm.eps!r}f);
    for (int i = 0; i < {D}; i++) y[job * {D}L + i] = x[job * {D}L + i] * factor * norm[i];
  }}"""
  return launch(f"normalized_{T}_{D}", {"y": Tensor.empty(T, D, dtype=dtypes.float)}, {"x": x, "norm": norm.weight}, "", body, T)[0]

def expert_down(hidden:Tensor, down:Any, sel:Tensor, residual:Tensor) -> Tensor:
  """residual + Σ_k down[sel[k]] · hidden[k]"""
  each, (T, D), K = mul_mat_id(hidden, [down], sel), residual.shape, sel.shape[1]
  body = f"""for (; job < last; job++) for (int i = 0; i < {D}; i++) {{
    float s = residual[job * {D}L + i];
    for (int k = 0; k < {K}; k++) s += each[(job * {K} + k) * {D}L + i];
    y[job * {D}L + i] = s;
  }}"""
  return launch(f"sum_{K}_{T}_{D}", {"y": Tensor.empty(T, D, dtype=dtypes.float)}, {"each": each, "residual": residual}, "", body, T)[0]

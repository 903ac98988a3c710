"""Attention of many tokens on the CPU, over keys and values of their own for every head: what long chunks of a prompt take, as nn/mla_unabsorbed.py
says.

A job is a head, or where there are more cores a part of its tokens. It dequantizes the head's k_b and v_b once, makes keys and values of 96 positions
at a time, and has all of its tokens attend to them before the next ones: nothing that is made leaves the caches. Products are the register tiles of
nn/cpu_prefill.py: 16 rows times 12 columns.
"""
from __future__ import annotations
from tinygrad import Tensor
from tinygrad.nn.cpu import TYPES, PackedWeight, group_bytes, launch, load_codes, row_of
from tinygrad.nn.cpu_layout import ROWS, threads
from tinygrad.nn.cpu_prefill import COLUMNS, TIMES, attend, depth, tile_count, unpack
from tinygrad.nn.kernel import empty
from tinygrad.nn.latent_cache import RowFormat
from tinygrad.nn.mla_unabsorbed import pays

POSITIONS = 96   # that keys and values are made of at a time: whole groups of rows, and whole tiles of columns

def takes(tokens:int, k_b:PackedWeight, v_b:PackedWeight) -> bool:
  """Whether it pays, and rows are whole groups"""
  (_, latent, nope), value = k_b.shape, v_b.shape[1]
  return latent % ROWS == 0 and value % (2 * ROWS) == 0 and pays(tokens, latent, nope, value, shared=1)

def stream(name:str, weight:PackedWeight, group:str) -> str:
  """C: where a group of a head's rows begins"""
  return f"(const byte*){name} + (h * {weight.shape[1] // ROWS} + {group}) * {group_bytes(weight)}L"

def dequantize(k_b:PackedWeight, v_b:PackedWeight) -> str:
  """C: K[tile of 12 numbers][latent][number], zeros behind the last number, and V[group of 16 numbers][latent][number]"""
  _, latent, nope = k_b.shape
  return f"""for (int i = 0; i < {tile_count(nope) * COLUMNS * latent}; i++) K[i] = 0;
    for (int g = 0; g < {latent // ROWS}; g++) {{
      unpack_k({stream("k_b", k_b, "g")}, {nope}, D);
      for (int n = 0; n < {nope}; n++) for (int l = 0; l < 16; l++) K[(n / 12 * {latent} + g * 16 + l) * 12 + n % 12] = D[n * 16 + l];
    }}
    for (int g = 0; g < {v_b.shape[1] // ROWS}; g++) unpack_v({stream("v_b", v_b, "g")}, {latent}, V + g * {latent * ROWS});"""

def load_rows(row_format:RowFormat, nope:int, kind:str) -> str:
  """C: the cache's rows from position `from` on: R[group of 16][latent][position], X[tile of 12][latent][position], the rotated numbers of keys"""
  latent, dim = row_format.latent, row_format.dim
  row = f"cache + {row_of('seen')} * {row_format.entries}"
  numbers = f"float row[{dim}]; {load_codes(row_format, f'({row})', 'row')}" if row_format.coded else f"const {kind}* row = {row};"
  return f"""for (int p = 0; p < {POSITIONS}; p++) {{
        const long seen = from + p < length ? from + p : 0;
        {numbers}
        for (int i = 0; i < {latent}; i++) R[(p / 16 * {latent} + i) * 16 + p % 16] = X[(p / 12 * {latent} + i) * 12 + p % 12] = row[i];
        for (int i = {latent}; i < {dim}; i++) keys[(p / 16 * {nope + dim - latent} + {nope - latent} + i) * 16 + p % 16] = row[i];
      }}"""

def make_heads(latent:int, nope:int, key:int, value:int) -> str:
  """C: keys[group of 16 positions][number][position], values[position][number]"""
  return f"""for (int g = 0; g < {POSITIONS // 16}; g += 2) for (int n = 0; n < {nope}; n += 12) {{
        v16f s[24]; for (int i = 0; i < 24; i++) s[i] = 0;
        times(R + g * {latent * 16}, R + (g + 1) * {latent * 16}, 16, K + n * {latent}, {latent}, 12, s);
        for (int i = 0; i < 24; i++) if (n + i % 12 < {nope}) *(v16f*)(keys + ((g + i / 12) * {key} + n + i % 12) * 16) = s[i];
      }}
      for (int p = 0; p < {POSITIONS}; p += 12) for (int g = 0; g < {value // ROWS}; g += 2) {{
        v16f s[24]; for (int i = 0; i < 24; i++) s[i] = 0;
        times(V + g * {latent * 16}, V + (g + 1) * {latent * 16}, 16, X + p * {latent}, {latent}, 12, s);
        for (int i = 0; i < 24; i++) *(v16f*)(values + (p + i % 12) * {value} + (g + i / 12) * 16) = s[i];
      }}"""

def unabsorbed_attention(query:Tensor, cache:Tensor, k_b:PackedWeight, v_b:PackedWeight, start:Tensor, tables:Tensor, scale:float) -> Tensor:
  """query: float32 (T, H·(nope+R)), each head's last R numbers rotated; cache: with the tokens' rows written; k_b: (H, L, nope); v_b: (H, v, L)
  -> float32 (T, H·v), softmax(q·key·scale)·value, a token attending to the positions up to its own. A job:

    K, V = the head's weights, dequantized
    for 96 positions of the cache, up to the last that the job's last token sees:
      keys, values = K · rows, V · rows
      for each tile of 12 tokens:
        scores = keys · tile
        weights, shrink = softmax so far, of the keys that a token sees
        sums = sums · shrink + values · weights
    heads = sums / total"""
  (H, L, nope), value, T, row_format = k_b.shape, v_b.shape[1], query.shape[0], RowFormat.of(cache, k_b.shape[1])
  key, tiles, sums = nope + row_format.rotated, tile_count(T), value // 32 * 24   # vectors of a tile's sums
  columns = tiles * COLUMNS
  sizes = {"K": tile_count(nope) * COLUMNS * L, "V": value * L, "R": POSITIONS * L, "X": POSITIONS * L, "keys": POSITIONS * key,
           "values": POSITIONS * value, "Q": columns * key, "of_sums": columns * value, "top": columns, "total": columns}   # floats of a thread
  body = f"""const long first = start[0], length = first + {T};
  const long parts = cores > {H} ? (cores + {H - 1}) / {H} : 1, own = ({tiles} + parts - 1) / parts;
  float D[{max(nope, depth(k_b)) * ROWS}], P[{POSITIONS * COLUMNS}], *at = scratch + core * {sum(sizes.values())}L;
  {" ".join(f"float* const {name} = at; at += {size};" for name, size in sizes.items())}
  v16f* const sums = (v16f*)of_sums;
  for (long j = core; j < {H} * parts; j += cores) {{
    const long h = j % {H}, begin = j / {H} * own * 12, end = begin + own * 12 < {T} ? begin + own * 12 : {T};
    if (begin >= end) continue;
    {dequantize(k_b, v_b)}
    for (int i = 0; i < {tiles * sums}; i++) sums[i] = 0;
    for (long c = 0; c < own * 12; c++) {{
      const float* from = q + ((begin + c < end ? begin + c : end - 1) * {H} + h) * {key}L;
      top[c] = -1e30f; total[c] = 0;
      for (int i = 0; i < {key}; i++) Q[(c / 12 * {key} + i) * 12 + c % 12] = from[i] * {scale!r}f;
    }}
    for (long from = 0; from < first + end; from += {POSITIONS}) {{
      {load_rows(row_format, nope, TYPES[cache.dtype])}
      {make_heads(L, nope, key, value)}
      for (int t = 0; begin + t * 12 < end; t++) {{
        long seen = first + begin + t * 12 + 12 - from;  /* of these positions, by the tile's last column */
        if (seen <= 0) continue;
        {attend(1, key, value, POSITIONS)}
      }}
    }}
    for (long n = begin; n < end; n++) for (int i = 0; i < {value // 16}; i++) {{
      const long c = n - begin;
      *(v16f*)(heads + (n * {H} + h) * {value}L + i * 16) = sums[c / 12 * {sums} + i / 2 * 24 + i % 2 * 12 + c % 12] / total[c];
    }}
  }}"""
  ins = {"q": query, "cache": cache, "k_b": k_b.planes["stream"], "v_b": v_b.planes["stream"], "start": start, "tables": tables}
  functions = TIMES + unpack("unpack_k", k_b) + unpack("unpack_v", v_b)
  outs = {"heads": empty(query, T, H * value), "scratch": empty(query, threads(), sum(sizes.values()))}
  return launch(f"unabsorbed_{T}_{H}_{L}_{nope}_{value}", outs, ins, functions, body, max(H, 2), cache.nbytes())[0]

"""The primitives as C for the CPU: the text that all kernels share, how one is launched, and the forms of decoding.

Text. Vector extensions and few intrinsics, so that AVX2, AVX-512 and ARM compile the same source; products of bytes are asm, and a table of 16 an
instruction, where the CPU has them. Weights lie as nn/cpu_layout.py says, 16 rows interleaved. A format becomes C by the code that builds the GPUs'
kernels from it (apps/quantized.py), given `CExpr` in a UOp's place. Values from a table become integer codes.

Arithmetic. Activations are staged: RMSNorm applied, and for codes in fixed point, of 16 bits beside a unit's largest: two bytes a number, each of
which is multiplied by the codes (a product's NMSE is 5e-10). On other CPUs they are scaled by the power of two that undoes a byte's place in its
word: a code is masked where it stands, not shifted. Zeros and minimums are folded in through the activations' sums over 16. Sums are float32, in one
order whatever the number of threads.

Threads. Each takes a share of the groups of 16 rows and stages the activations for itself: nothing is shared, and nothing is waited for.
"""
from __future__ import annotations
from typing import Any, Callable, Protocol, Sequence
import numpy as np
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.helpers import prod
from tinygrad.nn.cpu_layout import ROWS, Layout, threads
from tinygrad.nn.kernel import UNIT, Norm, Rope, Unit, Weight, empty, optional
from tinygrad.nn.latent_cache import CODES, LARGEST, LATENT_GROUP, LEAST, ROTATED_GROUP, ZERO, RowFormat
from tinygrad.nn.routing import LEAST_SUM, NEVER, Gating, Routing
from tinygrad.nn.step import PAGE
from tinygrad.renderer import Estimates
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo

def is_cpu(device:str) -> bool:
  """Whether these kernels run on a device: the CPU, or NULL where it renders C"""
  return device.split(":")[0] in ("CPU", "NULL") and isinstance(Device[device].renderer, ClangRenderer)

# ---- a format as C code ----

VECTORS = {dtypes.float: "v16f", dtypes.half: "v16h", dtypes.uint32: "v16u", dtypes.uint16: "v16s", dtypes.uint8: "v16b", dtypes.int8: "v16c"}

class CExpr:
  """A C expression of 16 lanes. It has the operators of a UOp that formats are written in (apps/quantized.py)."""
  def __init__(self, text:str, dtype:DType): self.text, self.dtype = text, dtype
  def _operand(self, other:Any) -> str:
    if isinstance(other, CExpr): return other.text
    return f"(({VECTORS[self.dtype]})({f'{float(other)!r}f' if self.dtype is dtypes.float else f'{other}u'}))"
  def _binary(self, sign:str, other:Any) -> CExpr: return CExpr(f"({self.text} {sign} {self._operand(other)})", self.dtype)
  def __and__(self, other:Any) -> CExpr: return self._binary("&", other)
  def __or__(self, other:Any) -> CExpr: return self._binary("|", other)
  def __xor__(self, other:Any) -> CExpr: return self._binary("^", other)
  def __rshift__(self, other:Any) -> CExpr: return self._binary(">>", other)
  def __lshift__(self, other:Any) -> CExpr: return self._binary("<<", other)
  def __add__(self, other:Any) -> CExpr: return self._binary("+", other)
  def __sub__(self, other:Any) -> CExpr: return self._binary("-", other)
  def __mul__(self, other:Any) -> CExpr: return self._binary("*", other)
  def __lt__(self, other:Any) -> CExpr: return self._binary("<", other)
  def eq(self, other:Any) -> CExpr: return self._binary("==", other)
  def where(self, true:Any, false:Any) -> CExpr:
    typed = next((value for value in (true, false) if isinstance(value, CExpr)), CExpr("", dtypes.float))
    chosen = f"((v16u){self.text}) & ((v16u){typed._operand(true)})"
    other = f"~((v16u){self.text}) & ((v16u){typed._operand(false)})"
    return CExpr(f"(({VECTORS[typed.dtype]})(({chosen}) | ({other})))", typed.dtype)
  def maximum(self, other:Any) -> CExpr: return CExpr(f"__builtin_elementwise_max({self.text}, {self._operand(other)})", self.dtype)
  def const_like(self, value:Any) -> CExpr: return CExpr(self._operand(value), self.dtype)
  def cast(self, dtype:DType) -> CExpr:
    if dtype is self.dtype: return self
    if dtype is dtypes.float and self.dtype is dtypes.uint32: return CExpr(f"FLOAT({self.text})", dtype)  # codes: the sign is never set
    return CExpr(f"__builtin_convertvector({self.text}, {VECTORS[dtype]})", dtype)
  def bitcast(self, dtype:DType) -> CExpr: return CExpr(f"(({VECTORS[dtype]}){self.text})", dtype)

def table_codes(words:list[CExpr], _:list[CExpr]|None, values:tuple[int, ...]) -> tuple[list[CExpr], int]:
  """As kernel.table_codes: what a table has for the codes, above its least value"""
  table = np.resize(np.array(values) - min(values), 16).astype(np.uint8).view("<u4")
  arguments = f"{len(values).bit_length() - 1}, {', '.join(f'{word}u' for word in table)}"
  return [CExpr(f"look({codes.text}, {arguments})", dtypes.uint32) for codes in words], -min(values)

class PackedWeight(Weight, Protocol):
  """A weight matrix whose planes are one interleaved stream, planes["stream"]"""
  layout: Layout
  planes: dict[str, Tensor]
  def unit_of_block(self, plane:Callable[[str, int], CExpr], unit:int) -> Unit: ...

def takes(*weights:Any) -> bool:
  """Whether these kernels take such weights: interleaved, on a CPU"""
  return all(weight.layout is not None and is_cpu(weight.device) for weight in weights)

def row_groups(weight:PackedWeight) -> int: return -(-weight.shape[-2] // ROWS)
def group_bytes(weight:PackedWeight) -> int: return weight.shape[-1] // (weight.layout.units * UNIT) * weight.layout.nbytes

def block_unit(weight:PackedWeight, unit:int) -> Unit:
  """A unit of a block, the block being at B"""
  def plane(name:str, entry:int) -> CExpr:
    dtype = weight.layout.fields[name].dtype
    return CExpr(f"AT({VECTORS[dtype]}, {weight.layout.offset(name, entry)})", dtype)
  return weight.unit_of_block(plane, unit)

# ---- the text that kernels share ----

PRELUDE = """#pragma clang diagnostic ignored "-Wpsabi" /* vectors are passed to what is inlined alone */
typedef float v16f __attribute__((ext_vector_type(16), aligned(4))); typedef float v8f __attribute__((ext_vector_type(8), aligned(4)));
typedef float v4f __attribute__((ext_vector_type(4), aligned(4))); typedef int v16i __attribute__((ext_vector_type(16), aligned(4)));
typedef unsigned v16u __attribute__((ext_vector_type(16), aligned(4))); typedef __fp16 v16h __attribute__((ext_vector_type(16), aligned(2)));
typedef unsigned short v16s __attribute__((ext_vector_type(16), aligned(2)));
typedef unsigned char v16b __attribute__((ext_vector_type(16), aligned(1)));
typedef signed char v16c __attribute__((ext_vector_type(16), aligned(1))); typedef unsigned char byte;
#define FLOAT(e) __builtin_convertvector(__builtin_convertvector(e, v16i), v16f)
#define AT(type, o) (*(const type*)(B + (o)))
#define FN static inline __attribute__((always_inline))
#define ALL _Pragma("clang loop unroll(full)")
#ifdef __AVX512F__  /* clang would halve the vectors by itself */
#define WIDE __attribute__((min_vector_width(512)))
#else
#define WIDE
#endif
FN float sum16(v16f v) { v8f a = v.lo + v.hi; v4f b = a.lo + a.hi; return (b.x + b.y) + (b.z + b.w); }
FN int clamp(int i, int n) { return i < 0 ? 0 : i < n ? i : n - 1; }
FN v16f exp16(v16f x) {
  x = __builtin_elementwise_min(__builtin_elementwise_max(x, (v16f)(-87.0f)), (v16f)(88.0f));
  v16f n = (x * 1.44269504f + 12582912.0f) - 12582912.0f, r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  v16f p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r + 1.6666665459e-1f) * r + \
5.0000001201e-1f;
  return (p * r * r + r + 1.0f) * (v16f)((__builtin_convertvector(n, v16i) + 127) << 23);
}
FN float exp1(float x) { return exp16((v16f)(x))[0]; }
FN float most16(v16f v) {
  v8f a = __builtin_elementwise_max(v.lo, v.hi); v4f b = __builtin_elementwise_max(a.lo, a.hi);
  float c = b.x > b.y ? b.x : b.y, d = b.z > b.w ? b.z : b.w;
  return c > d ? c : d;
}
/* of 16 rows the first `rows` */
FN void put(float* y, v16f v, int rows) { if (rows >= 16) *(v16f*)y = v; else for (int r = 0; r < rows; r++) y[r] = v[r]; }
FN v16f plus(v16f v, const float* x, int rows) {
  if (rows >= 16) v += *(const v16f*)x; else for (int r = 0; r < rows; r++) v[r] += x[r];
  return v;
}
FN float rms(const float* x, int n, float eps) {
  v16f s = 0; float rest = 0; int i = 0;
  for (; i + 16 <= n; i += 16) { v16f v = *(const v16f*)(x + i); s += v * v; }
  for (; i < n; i++) rest += x[i] * x[i];
  return 1.0f / __builtin_sqrtf((sum16(s) + rest) / n + eps);
}
#if defined(__AVX512VNNI__) || defined(__AVX2__)
#define BITS 8   /* of a byte of a number in fixed point, of which it has two: of 32 numbers they are planes, the lower bytes first */
#define PLANES 2
#endif
#ifdef __AVX512VNNI__
typedef int v16d __attribute__((vector_size(64)));
/* t += the four codes of a word times the four numbers of x at p, for every lane */
#define CODES(t, q, p) __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(t) : "v"((v16d)(q)), "m"(*(const int*)(p)))
FN v16f joined(const v16d* n) { return __builtin_convertvector((n[1] << BITS) + n[0], v16f); }
#elif defined(__AVX2__)
typedef int v8i __attribute__((vector_size(32))); typedef short v16p __attribute__((vector_size(32)));
typedef char v32c __attribute__((vector_size(32))); typedef unsigned v8u __attribute__((ext_vector_type(8), aligned(4)));
/* 16 rows' products of codes with each plane of the numbers: all of them and, as far as 16 bits hold them, those of each two bytes */
typedef struct { v8i all[PLANES][2]; v16p pairs[PLANES][2]; } Sums;
/* the codes of word k of `words` times the four numbers whose planes are at p; 16 bits hold the sums of `step` words. What is volatile stays in the
   order it is written in: loaded earlier, codes and numbers would find no registers */
#ifdef __AVXVNNI__
FN void add(Sums* s, v16u q, const byte* p, const int k, const int words, const int step) {
  v8i x;
  ALL for (int i = 0; i < PLANES; i++) {
    if (k == 0) s->all[i][0] = s->all[i][1] = (v8i){0};
    __asm__ volatile("vpbroadcastd %3, %2; %{vex%} vpdpbusd %2, %4, %0; %{vex%} vpdpbusd %2, %5, %1"
                     : "+x"(s->all[i][0]), "+x"(s->all[i][1]), "=&x"(x) : "m"(*(const int*)(p + i * 32)), "x"((v8i)q.lo), "x"((v8i)q.hi));
  }
}
#else
FN void add(Sums* s, v16u q, const byte* p, const int k, const int words, const int step) {
  v8i x, y;
  ALL for (int i = 0; i < PLANES; i++) {
    v16p* pairs = s->pairs[i];
    if (k % step == 0) __asm__ volatile("vpbroadcastd %2, %1; vpmaddubsw %1, %3, %0; vpmaddubsw %1, %4, %1"
                                        : "=&x"(pairs[0]), "=&x"(pairs[1]) : "m"(*(const int*)(p + i * 32)), "x"((v8i)q.lo), "x"((v8i)q.hi));
    else __asm__ volatile("vpbroadcastd %4, %2; vpmaddubsw %2, %5, %3; vpmaddubsw %2, %6, %2; vpaddw %3, %0, %0; vpaddw %2, %1, %1"
                          : "+x"(pairs[0]), "+x"(pairs[1]), "=&x"(x), "=&x"(y) : "m"(*(const int*)(p + i * 32)), "x"((v8i)q.lo), "x"((v8i)q.hi));
    if ((k + 1) % step == 0 || k + 1 == words) ALL for (int h = 0; h < 2; h++) {
      v8i sum = __builtin_ia32_pmaddwd256(pairs[h], (v16p){0} + 1);
      s->all[i][h] = k < step ? sum : s->all[i][h] + sum;
    }
  }
}
#endif
FN v16f joined(const Sums* s) {
  v16f all;
  all.lo = __builtin_convertvector((s->all[1][0] << BITS) + s->all[0][0], v8f);
  all.hi = __builtin_convertvector((s->all[1][1] << BITS) + s->all[0][1], v8f);
  return all;
}
/* the same of codes of 8 bits, of two of whose products 16 bits do not hold the sum: by numbers of 16 bits */
#ifdef __AVXVNNI__
#define add8(s, q, P, at, k, words) add(s, q, P + (at), k, words, 1)
#else
#define WORDS /* `fixed` makes those, too */
FN void add8(Sums* s, v16u q, const byte* P, const int at, const int k, const int words) {
  const int* pairs = (const int*)(P + 64 + 2 * at); /* of the word's first and third number, of its second and fourth */
  ALL for (int h = 0; h < 2; h++) {
    const v8u codes = h ? q.hi : q.lo;
    v8i sum = __builtin_ia32_pmaddwd256((v16p)(codes & 0x00ff00ffu), (v16p)((v8i){0} + pairs[0])) +
      __builtin_ia32_pmaddwd256((v16p)(codes >> 8 & 0x00ff00ffu), (v16p)((v8i){0} + pairs[1]));
    s->all[0][h] = k ? s->all[0][h] + sum : sum;
    s->all[1][h] = (v8i){0};
  }
}
#endif
#endif
#ifdef BITS
/* 32 numbers as fixed-point ones, whose signed bytes are two planes; behind those, where they are asked for, words, of each four numbers the first
and third, the second and fourth. S: the sums of 16 of what they hold, beside which a code's zero falls out exactly, and their unit. */
FN void fixed(const float* x, float* P, float* S) {
  v16f a = *(const v16f*)x, b = *(const v16f*)(x + 16), \
m = __builtin_elementwise_max(__builtin_elementwise_max(a, -a), __builtin_elementwise_max(b, -b));
  const float most = most16(m);
  const float largest = ((1 << (BITS - 1)) - 1) * ((1 << BITS) + 1); /* 127 in both bytes */
  S[2] = most / largest;
  const float inverse = most > 1e-30f ? largest / most : 0;
  const int unused = 32 - BITS;
  for (int h = 0; h < 2; h++) {
    v16f v = (h ? b : a) * inverse;
    v16i n = __builtin_convertvector(v + (v16f)(((v16u)v & 0x80000000u) | 0x3f000000u), v16i);
    v16i low = n << unused >> unused, high = (n - low) >> BITS;
    S[h] = sum16(__builtin_convertvector(n, v16f)) * S[2];
    signed char* to = (signed char*)P + h * 16;
    *(v16c*)to = __builtin_convertvector(low, v16c);
    *(v16c*)(to + 32) = __builtin_convertvector(high, v16c);
#ifdef WORDS
    const v16s whole = __builtin_convertvector(n, v16s);
    *(v16s*)((short*)P + 32 + h * 16) = __builtin_shufflevector(whole, whole, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
#endif
  }
}
#else
#define CODE(q, i) FLOAT((i) < 3 ? (q) & 255u << (i) * 8 : (q) >> 24)
#endif
/* x as products want it: X; S: of 32, the sums of 16, and the unit of those in fixed point; P: 32 in fixed point, or scaled by the place of a byte in
its word */
FN void stage(const float* x, const float* norm, float factor, int n, float* X, float* P, float* S) {
  for (int i = 0; i < n; i += 16) {
    v16f v = *(const v16f*)(x + i);
    if (norm) v = v * factor * *(const v16f*)(norm + i);
    *(v16f*)(X + i % 32) = v;
#ifndef BITS
    S[i % 32 / 16] = sum16(v);
    const float a = 1.0f / 256, b = 1.0f / 65536;
    const v16f place = {1, a, b, 1, 1, a, b, 1, 1, a, b, 1, 1, a, b, 1};
    *(v16f*)(P + i % 32) = v * place;
#endif
    if (i % 32 == 0) continue;
#ifdef BITS
    fixed(X, P, S);
#endif
    X += 32; P += 32; S += 4;
  }
}
static const long ALONE[1] = {0}; /* where the column begins, if there is one */
#define ROLLED _Pragma("clang loop unroll(disable)") /* clang would keep on its stack what all of the loop reads, or make more code than is cached */
#define EACH ALL for (int c = 0; c < columns; c++)
#ifdef BITS
#define FENCE __asm__ volatile("" ::: "memory"); /* the compiler loads nothing earlier: there are no registers for it */
#else
#define FENCE
#endif
"""

LOOK = """/* what a table of 16 bytes has for the codes of `bits` bits in a word's bytes */
FN v16u look(v16u codes, const int bits, unsigned t0, unsigned t1, unsigned t2, unsigned t3) {
#ifdef __AVX512BW__
  v16u found, table = {t0, t1, t2, t3, t0, t1, t2, t3, t0, t1, t2, t3, t0, t1, t2, t3};
  __asm__("vpshufb %2, %1, %0" : "=v"(found) : "v"(table), "v"(codes));
  return found;
#elif defined(__AVX2__)
  const v8i table = {t0, t1, t2, t3, t0, t1, t2, t3}; v16u found;
  found.lo = (v8u)__builtin_ia32_pshufb256((v32c)table, (v32c)(v8i)codes.lo);
  found.hi = (v8u)__builtin_ia32_pshufb256((v32c)table, (v32c)(v8i)codes.hi);
  return found;
#else /* a tree of selects, all four bytes at once; it begins with pairs of entries, by the codes' lowest bits */
  const unsigned table[4] = {t0, t1, t2, t3};
  v16u s[16];
  _Pragma("clang loop unroll(full)") for (int i = 0; i < 1 << bits; i++) s[i] = (v16u)((table[i / 4] >> i % 4 * 8 & 255u) * 16843009u);
  _Pragma("clang loop unroll(full)") for (int bit = 0; bit < bits; bit++) {
    v16u ones = (codes >> bit) & 16843009u, mask = (ones << 8) - ones;
    _Pragma("clang loop unroll(full)") for (int i = 0; i < 1 << bits >> bit >> 1; i++) s[i] = s[2 * i] ^ ((s[2 * i] ^ s[2 * i + 1]) & mask);
  }
  return s[0];
#endif
}
"""

COLUMNS = 4  # that a group of 16 rows is multiplied by at a time
LARGEST_CODE = 32767 // 256 # whose products with numbers of 8 bits, two together, 16 bits hold; or the sum of codes of as many words
LINE = 64    # bytes of the cache
# how far what is fetched lies ahead of what is multiplied: so many bytes, or one of so many parts of a matrix, behind which lies what others read
AHEAD, PARTS_AHEAD = 8192, 8

def stage_buffers(width:int) -> str: return f"float X[{width}], P[{width}], S[{width // 8}];\n"

def unit_dot(unit:Unit, part:int, index:int) -> list[str]:
  """Statements that add to y[c], of the column whose numbers begin at at[c], the products of the weights of a scale, the one numbered `part` of
  unit `index` of a block"""
  scale, minimum = unit.scales[part]
  count = UNIT // len(unit.scales)
  first, numbers = part * count, f"at[c] + {index * UNIT}"
  halves, integers = [f"S[at[c] / 8 + {index * 4 + half}]" for half in range(2)], f"S[at[c] / 8 + {index * 4 + 2}]"
  names = f"const v16f scale = {scale.text}{'' if minimum is None else f', least = {minimum.text}'};"
  def ends(total:str, zero:int, loop:str="EACH", begin:str="") -> list[str]:
    total += f" - {float(zero)}f * s" if zero else ""
    return [names, f"{loop} {{ {begin}", f"const float s = {halves[part] if len(unit.scales) == 2 else ' + '.join(halves)};",
            f"y[c] += scale * ({total}){'' if minimum is None else ' + least * s'};", "}"]
  clear, of_floats = f"v16f t[{COLUMNS}][4]; EACH for (int i = 0; i < 4; i++) t[c][i] = 0;", "(t[c][0] + t[c][1]) + (t[c][2] + t[c][3])"
  if unit.floats is not None:
    products = (f"{{ const v16f w = {unit.floats[k].text}; EACH t[c][{k % 4}] += w * X[{numbers} + {k}]; }}" for k in range(first, first + count))
    return [clear, *products, *ends(of_floats, 0)]
  words, planes = [unit.words[k // 4].text for k in range(first, first + count, 4)], f"(const byte*)(P + {numbers})"
  def added(k:int|str, at:int|str) -> str:
    if unit.bits == 8: return f"add8(&sums, q[{k}], {planes}, {at}, {k}, {len(words)});"
    return f"add(&sums, q[{k}], {planes} + {at}, {k}, {len(words)}, {LARGEST_CODE // ((1 << unit.bits) - 1)});"
  wide, narrow, floats = [], [], []
  for k, word in enumerate(words):
    at = first + k * 4
    wide.append(f"{{ const v16u q = {word}; EACH ALL for (int i = 0; i < PLANES; i++) CODES(n[c][i], q, {planes} + {at} + i * {UNIT}); }}")
    narrow.append(f"q[{k}] = {word}; if (columns == 1) {{ const int c = 0; {added(k, at)} }}")
    lanes = " ".join(f"t[c][{i}] += CODE(q, {i}) * P[{numbers} + {at + i}];" for i in range(4))
    floats.append(f"{{ const v16u q = {word}; EACH {{ {lanes} }} }}")
  several = f"if (columns > 1) ALL for (int k = 0; k < {len(words)}; k++) {added('k', f'{first} + k * 4')}"
  return ["#if defined(__AVX512VNNI__)", f"v16d n[{COLUMNS}][PLANES]; EACH for (int i = 0; i < PLANES; i++) n[c][i] = (v16d){{0}};", *wide,
          *ends(f"joined(n[c]) * {integers}", unit.zero),
          "#elif defined(__AVX2__)", f"v16u q[{len(words)}]; Sums sums;", *narrow,
          *ends(f"joined(&sums) * {integers}", unit.zero, "ROLLED for (int c = 0; c < columns; c++)", several),
          "#else", clear, *floats, *ends(of_floats, unit.zero), "#endif"]

def fetch(weight:PackedWeight, unit:int) -> str:
  """C: begins to fetch a unit's share of the block that lies ahead of the one at B, a few lines at a time (all at once, they would wait for each
  other), into the second cache: on their way to the first one there are fewer than the memory needs to be busy"""
  layout, matrix = weight.layout, row_groups(weight) * group_bytes(weight)
  first, last = (layout.nbytes * (unit + part) // layout.units for part in range(2))
  ahead = min(AHEAD, matrix // PARTS_AHEAD // LINE * LINE)
  return " ".join(f"__builtin_prefetch(B + {ahead + at}, 0, 2);" for at in range(-(-first // LINE) * LINE, last, LINE))

def dot(name:str, weight:PackedWeight) -> str:
  """The C function that adds to y[c], for each of `columns` staged columns, which begins at number at[c], the products of a group of 16 rows, whose
  stream is at B"""
  layout, width, lines = weight.layout, weight.shape[-1], []
  for index in range(layout.units):
    unit = block_unit(weight, index)
    lines.append(fetch(weight, index))
    for part in range(len(unit.scales)): lines += ["{", *unit_dot(unit, part, index), "} FENCE"]
  units, body = layout.units, "\n    ".join(lines)
  return f"""FN void {name}(const int columns, const byte* B, const float* X, const float* P, const float* S, const long* at, v16f* y) {{
  for (int b = 0; b < {width // (units * UNIT)}; b++) {{
    {body}
    B += {layout.nbytes}; X += {units * UNIT}; P += {units * UNIT}; S += {units * 4};
  }}
}}
"""

# ---- launching ----

TYPES = {dtypes.float: "float", dtypes.half: "__fp16", dtypes.int32: "int", dtypes.uint16: "unsigned short", dtypes.uint32: "unsigned",
         dtypes.uint64: "unsigned long"}

def launch(name:str, outs:dict[str, Tensor], ins:dict[str, Tensor], functions:str, body:str, jobs:int=0, mem:int=0) -> list[Tensor]:
  """Runs a kernel in C on the first tensor's device; its buffers have the names given. Returns the outs, written.
  jobs: how many the threads share: thread `core` of `cores` does those from `job` up to `last`. Without jobs one thread does everything.
  mem: bytes that the kernel moves; without it, the bytes of all buffers."""
  names, tensors = [*outs, *ins], [t.flatten() for t in (*outs.values(), *ins.values())]
  count, cores = len(names), threads() if jobs > 1 else 1
  arguments = [f"{TYPES[t.dtype]}* restrict {name}" for name, t in zip(names, tensors)] + ["int core_id"] * (cores > 1)
  core = "core_id" if cores > 1 else "0"
  share = f"const long core = {core}, cores = {cores}; long job = core * {jobs} / cores, last = (core + 1) * {jobs} / cores;\n" if jobs else ""
  if "look(" in functions + body: functions = LOOK + functions
  source = f"{PRELUDE}{functions}WIDE void {name}({', '.join(arguments)}) {{\n{share}{body}\n}}\n"
  variables = (UOp.param(count, dtypes.int, (), vmin_vmax=(0, cores - 1), name="core_id", addrspace=AddrSpace.ALU),) if cores > 1 else ()
  mem = mem or sum(t.nbytes() for t in tensors)
  estimates, target = Estimates(0, mem, mem), Device[tensors[0].device].renderer.target
  def fxn(*buffers:UOp) -> UOp:
    params = tuple(buffer.base for buffer in buffers)
    sink = UOp.sink(*params, *variables, arg=KernelInfo(name=name, estimates=estimates))
    info = ProgramInfo(name=name, global_size=(cores, 1, 1), local_size=(1, 1, 1), vars=variables, globals=tuple(range(count)),
                       outs=tuple(range(len(outs))), ins=tuple(range(len(outs), count)), target=target)
    return UOp(Ops.PROGRAM, src=(sink, UOp(Ops.LINEAR, src=(*params, *variables, sink)), UOp(Ops.SOURCE, arg=source)), arg=info)
  written = tensors[0].custom_kernel(*tensors[1:], fxn=fxn)
  return [w.reshape(out.shape) for w, out in zip(written, outs.values())]

# ---- linear layers of a token ----

def mul_mat_decode(vectors:Tensor, weight:PackedWeight, ids:Tensor|None=None) -> Tensor:
  """As mul_mat of nn/norm_linear.py, of one token"""
  (*stack, rows, width), groups, size = weight.shape, row_groups(weight), group_bytes(weight)
  shape = (*(vectors.shape[:-1] if ids is None else ids.shape), rows)
  matrices, items = prod(stack), prod(shape[:-1])
  body = f"""{stage_buffers(width)}
  while (job < last) {{
    long item = job / {groups}, g = job % {groups};
    stage(x + item / {items // prod(vectors.shape[:-1])} * {width}L, 0, 0, {width}, X, P, S);
    const byte* W = (const byte*)w + (long){f"clamp(ids[item], {matrices})" if ids is not None else "item"} * {groups * size};
    for (; g < {groups} && job < last; g++, job++) {{
      v16f s = 0;
      dot(1, W + g * {size}, X, P, S, ALONE, &s);
      put(y + item * {rows}L + g * 16, s, {rows} - (int)g * 16);
    }}
  }}"""
  outs, ins = {"y": empty(vectors, *shape)}, {"x": vectors, "w": weight.planes["stream"], **optional(ids=ids)}
  name = f"mul_mat{'' if ids is None else '_id'}_{weight.label}_{items}"
  return launch(name, outs, ins, dot("dot", weight), body, items * groups, weight.nbytes if ids is None else weight.nbytes // matrices * items)[0]

ROTATE = """/* 16 rows from `row` on, of heads that are rotated from number `nope` on */
FN v16f rotate(v16f v, int row, int head, int nope, const float* turn) {
  const int first = row % head - nope;
  if (first <= -16) return v;
  if (first >= 0 && first + 16 <= head - nope) {
    const v16f t = *(const v16f*)(turn + first), c = __builtin_shufflevector(t, t, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14),
      s = __builtin_shufflevector(t, -t, 17, 1, 19, 3, 21, 5, 23, 7, 25, 9, 27, 11, 29, 13, 31, 15);
    return v * c + __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14) * s;
  }
  for (int r = 0; r < 16; r += 2) {
    int at = (row + r) % head - nope;
    if (at < 0) continue;
    float a = v[r], b = v[r + 1], c = turn[at], s = turn[at + 1];
    v[r] = a * c - b * s; v[r + 1] = a * s + b * c;
  }
  return v;
}
"""

def norm_linear_decode(vector:Tensor, norm:Norm|None, weights:Sequence[PackedWeight], rope:Rope|None=None, start:Tensor|None=None,
                       residual:Tensor|None=None) -> list[Tensor]:
  """As norm_linear of nn/norm_linear.py, of one token. start: int32 (1,) on the device, with rope"""
  width, first, body, functions = vector.shape[1], 0, "", ROTATE if rope else ""
  ins = {"x": vector, **optional(norm=norm.weight if norm else None, rope=rope.table if rope else None, start=start, residual=residual)}
  for i, weight in enumerate(weights):
    functions += dot(f"dot{i}", weight)
    ins[f"w{i}"] = weight.planes["stream"]
    finish, rows = "", weight.shape[0]
    if rope and i == 0: finish += f"s = rotate(s, g * 16, {rope.head}, {rope.nope}, rope + start[0] * {rope.table.shape[1] * 2}L);"
    if residual is not None and i == 0: finish += f"s = plus(s, residual + g * 16, {rows} - g * 16);"
    body += f"""for (; job < last && job < {first + row_groups(weight)}; job++) {{
    int g = job - {first}; v16f s = 0;
    dot{i}(1, (const byte*)w{i} + g * {group_bytes(weight)}L, X, P, S, ALONE, &s);
    {finish} put(y{i} + g * 16, s, {rows} - g * 16);
  }}
  """
    first += row_groups(weight)
  stage = f"stage(x, {f'norm, rms(x, {width}, {norm.eps!r}f)' if norm else '0, 0'}, {width}, X, P, S);\n  "
  parts = {"norm": norm, "linear": weights, "rope": rope, "residual": residual}
  name = "_".join([part for part, there in parts.items() if there is not None] + [weight.label for weight in weights])
  outs = {f"y{i}": empty(vector, 1, weight.shape[0]) for i, weight in enumerate(weights)}
  return launch(name, outs, ins, functions, stage_buffers(width) + stage + body, first, sum(weight.nbytes for weight in weights))

# ---- attention ----

def row_of(position:str, table:str="tables") -> str:
  """C: the cache's row of a position of a sequence, whose pages the table holds"""
  return f"({table}[({position}) / {PAGE}] * {PAGE}L + ({position}) % {PAGE})"

def groups_of(row_format:RowFormat, body:str) -> str:
  """C: the body for each group `g` of a row of codes, of n numbers from the one numbered i on"""
  latent = row_format.latent // LATENT_GROUP
  each = f"for (int g = 0, i = 0, n; n = g < {latent} ? {LATENT_GROUP} : {ROTATED_GROUP}, g < {row_format.scales}; g++, i += n)"
  return f"{each} {{ {body} }}"

def load_codes(row_format:RowFormat, row:str, to:str) -> str:
  """C: the numbers of a row of codes as floats"""
  codes = f"for (int k = i; k < i + n; k++) ({to})[k] = (float)(((const byte*)({row}))[k] - {ZERO}) * scale;"
  return groups_of(row_format, f"float scale = ((const __fp16*)({row}))[{row_format.dim // 2} + g]; {codes}")

def store_row(norm:Norm, cache:Tensor, rope:Rope, token:str, position:str, table:str="tables") -> str:
  """C: a token's row of the cache, [RMSNorm(kv[:L]) | RoPE(kv[L:])], at its position"""
  latent = norm.weight.shape[0]
  row_format, place = RowFormat.of(cache, latent), f"cache + {row_of(position, table)} * {cache.shape[1]}"
  into, encode = f"{TYPES[cache.dtype]}* row = {place}", ""
  if row_format.coded:
    into, encode = f"float row[{row_format.dim}]", f"""{TYPES[CODES]}* to = {place};
    """ + groups_of(row_format, f"""float most = 0;
      for (int k = i; k < i + n; k++) most = __builtin_fmaxf(most, __builtin_fabsf(row[k]));
      float inverse = most > {LEAST!r}f ? {LARGEST} / most : 0;
      for (int k = i; k < i + n; k++) ((byte*)to)[k] = (int)(row[k] * inverse + {ZERO + .5}f);
      ((__fp16*)to)[{row_format.dim // 2} + g] = most * {1 / LARGEST!r}f;""")
  return f"""{{
    const float *from = kv + {token} * {row_format.dim}, *turn = rope + {position} * {rope.table.shape[1] * 2}L;
    {into}; float f = rms(from, {latent}, {norm.eps!r}f);
    for (int i = 0; i < {latent}; i++) row[i] = from[i] * f * norm[i];
    for (int i = 0; i < {row_format.rotated}; i += 2) {{
      float a = from[{latent} + i], b = from[{latent} + i + 1], c = turn[i], s = turn[i + 1];
      row[{latent} + i] = a * c - b * s; row[{latent} + i + 1] = a * s + b * c;
    }}{encode}
  }}"""

def rows_to_write(kv:Tensor, norm:Norm, cache:Tensor, rope:Rope, start:Tensor, tables:Tensor) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
  """C that writes the row of token `job` of write_rows, the out and the ins that it names"""
  S, P = tables.shape
  code = store_row(norm, cache, rope, "job", "(start[0] + job)") if S == 1 else \
         store_row(norm, cache, rope, "job", "start[job]", f"(tables + job * {P})")
  return code, {"cache": cache}, {"kv": kv, "norm": norm.weight, "rope": rope.table, "start": start, "tables": tables}

def write_rows(kv:Tensor, norm:Norm, cache:Tensor, rope:Rope, start:Tensor, tables:Tensor) -> Tensor:
  """The cache, (rows, entries), with a row for each token of kv, float32 (T, L+R): one of each sequence, or T of the one that there is.
  start: int32 (S,); tables: int32 (S, P)"""
  (T, dim), (store, outs, ins) = kv.shape, rows_to_write(kv, norm, cache, rope, start, tables)
  return launch(f"cache_rows_{T}_{dim}_{tables.shape[0]}", outs, ins, "", f"for (; job < last; job++) {store}", T, T * dim * 8)[0]

def latent_query_decode(query:Tensor, kv:Tensor, k_b:PackedWeight, norm:Norm, cache:Tensor, rope:Rope, start:Tensor,
                        tables:Tensor) -> tuple[Tensor, Tensor]:
  """A token's queries in latent space, and its row of the cache written at start. query: float32 (1, H·head); kv: float32 (1, L+R);
  k_b: (H, L, nope); cache: (rows, entries); start: int32 (1,); tables: int32 (1, P) -> float32 (1, H, L), and the cache. The thread with the first
  job writes the row."""
  (H, L, nope), groups, size = k_b.shape, row_groups(k_b), group_bytes(k_b)
  body = f"""if (job == 0) {store_row(norm, cache, rope, "0", "start[0]")}
  {stage_buffers(nope)}for (; job < last;) {{
    long h = job / {groups}, g = job % {groups};
    stage(q + h * {rope.head}, 0, 0, {nope}, X, P, S);
    for (; g < {groups} && job < last; g++, job++) {{
      v16f s = 0;
      dot(1, (const byte*)w + job * {size}L, X, P, S, ALONE, &s);
      put(q_latent + h * {L} + g * 16, s, {L} - (int)g * 16);
    }}
  }}"""
  outs = {"q_latent": empty(query, 1, H, L), "cache": cache}
  ins = {"q": query, "kv": kv, "norm": norm.weight, "rope": rope.table, "start": start, "tables": tables, "w": k_b.planes["stream"]}
  q_latent, written = launch(f"latent_query_{k_b.label}", outs, ins, dot("dot", k_b), body, H * groups, k_b.nbytes)
  return q_latent, written

ACROSS = """/* the sums of 16 vectors, part[j] of those numbered j, j + 4, j + 8, j + 12: first each to four numbers, side by side */
FN v16f sums4(const v16f* t) {
  v16f a = __builtin_shufflevector(t[0], t[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + \
__builtin_shufflevector(t[0], t[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  v16f b = __builtin_shufflevector(t[2], t[3], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + \
__builtin_shufflevector(t[2], t[3], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) + \
__builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
FN v16f pairs16(v16f a, v16f b) {
  return __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) + \
__builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
FN v16f sums16(const v16f* part) {
  v16f a = pairs16(part[0], part[1]), b = pairs16(part[2], part[3]);
  return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) + \
__builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
"""

DECODE_KEYS = 16  # positions of the cache, of one page, that a thread reads at a time
MOST_HEADS = 4    # that attend to them at a time

def attention_takes(row:RowFormat) -> bool:
  """Whether mla_attention_decode takes such rows of the cache: whole vectors"""
  return row.latent % ROWS == 0 and row.dim % ROWS == 0

def load_keys(row_format:RowFormat, kind:str) -> str:
  """C: keys, the numbers of `some` rows of the C type `kind` and of zeros up to DECODE_KEYS, from where they are or in `kept`"""
  dim, entries = row_format.dim, row_format.entries
  each = f"for (int i = 0; i < {dim}; i++) kept[p * {dim} + i] ="
  if row_format.coded: copy = load_codes(row_format, f"rows + p * {entries}", f"kept + p * {dim}")
  else: copy = f"{each} rows[p * {entries} + i];"
  copies = f"for (int p = 0; p < {DECODE_KEYS}; p++) {{ if (p < some) {{ {copy} }} else {each} 0; }}"
  if kind != "float": return f"const float* keys = kept; {copies}"
  return f"const float* keys = some == {DECODE_KEYS} ? rows : kept; if (keys == kept) {{ {copies} }}"

def attend_decode(dim:int, latent:int) -> str:
  """The C function by which a few heads attend to keys of `dim` numbers, whose first `latent` are the values"""
  return f"""#ifdef __AVX512F__
#define HEADS {MOST_HEADS}
#else
#define HEADS 1 /* the sums of more find no registers */
#endif
/* heads beside each other and 16 keys, of which the first `some` are there: what is loaded of a key serves all of the heads */
FN void attend(const int heads, const int some, const float* keys, const float* query, float* y, float* top, float* total) {{
  const v16i lane = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
  v16f part[{MOST_HEADS}][4]; float w[{MOST_HEADS}][{DECODE_KEYS}], shrink[{MOST_HEADS}];
  ALL for (int j = 0; j < 4; j++) {{
    v16f t[{MOST_HEADS}][4] = {{0}};
    ROLLED for (int i = 0; i < {dim}; i += 16) ALL for (int k = 0; k < 4; k++) {{
      const v16f key = *(const v16f*)(keys + (j + k * 4) * {dim} + i);
      ALL for (int h = 0; h < heads; h++) t[h][k] += *(const v16f*)(query + h * {dim} + i) * key;
    }}
    ALL for (int h = 0; h < heads; h++) part[h][j] = sums4(t[h]);
  }}
  ALL for (int h = 0; h < heads; h++) {{
    const v16f score = lane < some ? sums16(part[h]) : -1e30f;
    float old = top[h], now = most16(score);
    now = old > now ? old : now;
    shrink[h] = exp1(old - now);
    const v16f weight = exp16(score - now); /* 1e-38 of a key that is not there, which is zeros */
    top[h] = now; total[h] = total[h] * shrink[h] + sum16(weight);
    *(v16f*)w[h] = weight;
  }}
  ROLLED for (int i = 0; i < {latent}; i += 16) {{
    v16f s[{MOST_HEADS}]; const float* each = w[0];
    if (heads > 1) __asm__ volatile("" : "+r"(each) : : "memory"); /* they are loaded again each time: all of them find no registers */
    ALL for (int h = 0; h < heads; h++) s[h] = *(v16f*)(y + h * {latent} + i) * shrink[h];
    ALL for (int p = 0; p < {DECODE_KEYS}; p++) {{
      const v16f key = *(const v16f*)(keys + p * {dim} + i);
      ALL for (int h = 0; h < heads; h++) s[h] += each[h * {DECODE_KEYS} + p] * key;
    }}
    ALL for (int h = 0; h < heads; h++) *(v16f*)(y + h * {latent} + i) = s[h];
  }}
}}
"""

def mla_attention_decode(q_latent:Tensor, query:Tensor, cache:Tensor, start:Tensor, tables:Tensor, scale:float) -> Tensor:
  """softmax(query·key·scale)·value of a token of each sequence. q_latent: float32 (S, H, L); query: float32 (S, H·head), each head's last numbers
  rotated; cache: (rows, entries); start: int32 (S,); tables: int32 (S, P) -> float32 (S, H, L). Threads share the work, the keys of all heads of all
  sequences. A thread reads the cache once for all its heads of a sequence:

    for each sequence:
      for 16 keys of the cache:
        for each head of the thread, a few beside each other:
          score = query · key, for each of the 16
          now = max(top, scores), shrink = exp(top - now), weight = exp(score - now)
          total = total · shrink + Σ weight
          context = context · shrink + Σ weight · key[:L]
      context /= total, for each head"""
  (S, H, L), row_format = q_latent.shape, RowFormat.of(cache, q_latent.shape[2])
  head, dim = query.shape[1] // H, row_format.dim
  calls = " ".join(f"case {heads}: attend({heads}, some, keys, own, y, top + h, total + h); break;" for heads in (1, 2, MOST_HEADS))
  body = f"""float query[{H * dim}], kept[{DECODE_KEYS * dim}], top[{H}], total[{H}];
  long all = 0, before = 0;
  for (int s = 0; s < {S}; s++) all += (start[s] + 1L) * {H};
  long begin = core * all / cores, end = (core + 1) * all / cores;
  for (int s = 0; s < {S}; s++, tables += {tables.shape[1]}, q_latent += {H * L}, q += {query.shape[1]}, context += {H * L}) {{
    int n = start[s] + 1;
    /* the heads whose work begins in the thread's share */
    int first = clamp((begin - before + n - 1) / n, {H + 1}), last = clamp((end - before + n - 1) / n, {H + 1});
    before += n * {H}L;
    if (first == last) continue;
    for (int h = first; h < last; h++) {{
      top[h] = -1e30f; total[h] = 0;
      for (int i = 0; i < {L}; i++) {{ query[h * {dim} + i] = q_latent[h * {L} + i] * {scale!r}f; context[h * {L} + i] = 0; }}
      for (int i = {L}; i < {dim}; i++) query[h * {dim} + i] = q[h * {head} + {head - dim} + i] * {scale!r}f;
    }}
    for (int from = 0; from < n; from += {DECODE_KEYS}) {{
      int some = n - from < {DECODE_KEYS} ? n - from : {DECODE_KEYS};
      const {TYPES[cache.dtype]}* rows = cache + {row_of("from")} * {row_format.entries};
      {load_keys(row_format, TYPES[cache.dtype])}
      for (int h = first, at_once; h < last; h += at_once) {{
        const float* own = query + h * {dim}; float* y = context + h * {L};
        at_once = last - h < HEADS ? last - h < 2 ? 1 : 2 : HEADS;
        switch (at_once) {{ {calls} }}
      }}
    }}
    for (int h = first; h < last; h++) for (int i = 0; i < {L}; i++) context[h * {L} + i] /= total[h];
  }}"""
  outs, ins = {"context": empty(q_latent, S, H, L)}, {"q_latent": q_latent, "q": query, "cache": cache, "start": start, "tables": tables}
  functions, name = ACROSS + attend_decode(dim, L), f"mla_attention_{H}_{L}_{dim - L}{f'_{S}' if S > 1 else ''}"
  return launch(name, outs, ins, functions, body, S * H, cache.nbytes())[0]

# ---- feed-forward of a token ----

def choose_experts(logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  """As choose_experts of nn/routing.py, of any number of tokens. An expert's rank is the number of experts before it."""
  (T, E), bias, count, gating, normalize, scale = logits.shape, routing.bias, routing.count, routing.gating, routing.normalize, routing.scale
  score = {Gating.SOFTMAX: "exp1(logits[e] - top)", Gating.SIGMOID: "1 / (1 + exp1(-logits[e]))", Gating.SOFTMAX_WEIGHT: "logits[e]"}[gating]
  groups, size = routing.groups, E // routing.groups
  # a group's score is the sum of its two best choices; what groups that do not stay have is never chosen
  of_best_groups = f"""float best[{groups}];
  for (int g = 0; g < {groups}; g++) {{
    float first = {NEVER!r}f, second = {NEVER!r}f;
    for (int e = g * {size}; e < (g + 1) * {size}; e++) {{
      float other = choice[e] < first ? choice[e] : first;
      first = choice[e] > first ? choice[e] : first;
      second = other > second ? other : second;
    }}
    best[g] = first + second;
  }}
  for (int g = 0; g < {groups}; g++) {{
    int before = 0;
    for (int o = 0; o < {groups}; o++) before += best[o] > best[g] || (best[o] == best[g] && o < g);
    if (before >= {routing.used_groups}) for (int e = g * {size}; e < (g + 1) * {size}; e++) choice[e] = {NEVER!r}f;
  }}
  """ if routing.grouped else ""
  next_token = f"job++, logits += {E}, sel += {count}, weights += {count}"
  body = f"""for (logits += job * {E}, sel += job * {count}, weights += job * {count}; job < last; {next_token}) {{
  float score[{E}], choice[{E}], top = logits[0], total = 0;
  for (int e = 1; e < {E}; e++) top = logits[e] > top ? logits[e] : top;
  for (int e = 0; e < {E}; e++) total += score[e] = {score};
  for (int e = 0; e < {E}; e++) {{
    {'score[e] /= total;' if gating == Gating.SOFTMAX else ''} choice[e] = score[e]{'' if bias is None else ' + bias[e]'};
  }}
  {of_best_groups}for (int k = 0; k < {count}; k++) sel[k] = weights[k] = 0;
  for (int e = 0; e < {E}; e++) {{
    int before = 0;
    for (int o = 0; o < {E}; o++) before += choice[o] > choice[e] || (choice[o] == choice[e] && o < e);
    if (before < {count}) {{ sel[before] = e; weights[before] = score[e]; }}
  }}
  total = 0;
  {f'for (int k = {count} - 1; k >= 0; k--) total += weights[k] = exp1(weights[k] - top);' if gating == Gating.SOFTMAX_WEIGHT else ''}
  {f'for (int k = 0; k < {count}; k++) weights[k] /= total;' if gating == Gating.SOFTMAX_WEIGHT else ''}
  total = 0;
  for (int k = 0; k < {count}; k++) total += weights[k];
  float factor = {scale!r}f{f' / (total > {LEAST_SUM!r}f ? total : {LEAST_SUM!r}f)' if normalize else ''};
  for (int k = 0; k < {count}; k++) weights[k] *= factor;
  }}"""
  outs = {"sel": empty(logits, T, count, dtype=dtypes.int32), "weights": empty(logits, T, count)}
  name = f"choose_{count}_of_{E}_{routing.label}{f'_{T}' if T > 1 else ''}"
  sel, weights = launch(name, outs, {"logits": logits, **optional(bias=bias)}, "", body, T)
  return sel, weights

def gate_up_chosen(vector:Tensor, norm:Norm, gate:PackedWeight, up:PackedWeight, sel:Tensor|None=None, scale:Tensor|None=None) -> Tensor:
  """silu(gate·n) · (up·n) with n = RMSNorm(vector): of gate and up, (F, D) -> float32 (1, F), or of the matrices of a stack, (E, F, D), that
  sel names, int32 (1, K), times scale, float32 (1, K) -> (1, K, F)"""
  (*stack, F, D), groups, chosen = gate.shape, row_groups(gate), 1 if sel is None else sel.shape[1]
  expert = f"clamp(sel[k], {stack[0]})" if stack else "0"
  body = f"""{stage_buffers(D)}stage(x, norm, rms(x, {D}, {norm.eps!r}f), {D}, X, P, S);
  for (; job < last; job++) {{
    long k = job / {groups}, g = job % {groups}, at = (long){expert} * {groups} + g; v16f a = 0, b = 0;
    dot_gate(1, (const byte*)gate + at * {group_bytes(gate)}, X, P, S, ALONE, &a);
    dot_up(1, (const byte*)up + at * {group_bytes(up)}, X, P, S, ALONE, &b);
    put(y + k * {F} + g * 16, a / (1 + exp16(-a)) * b{' * scale[k]' if stack else ''}, {F} - (int)g * 16);
  }}"""
  ins = {"x": vector, "norm": norm.weight, **optional(sel=sel, scale=scale), "gate": gate.planes["stream"], "up": up.planes["stream"]}
  outs = {"y": empty(vector, *((1, chosen, F) if stack else (1, F)))}
  name = f"gate_up_{f'{chosen}_of_' if stack else ''}{gate.label}"
  mem = (gate.nbytes + up.nbytes) * chosen // prod(stack)
  return launch(name, outs, ins, dot("dot_gate", gate) + dot("dot_up", up), body, chosen * groups, mem)[0]

def gate_up_decode(vector:Tensor, norm:Norm, gate:PackedWeight, up:PackedWeight, router:PackedWeight|None=None) -> list[Tensor]:
  """As gate_up of nn/moe.py, of one token"""
  return [gate_up_chosen(vector, norm, gate, up), *([] if router is None else norm_linear_decode(vector, norm, [router]))]

def expert_gate_up_decode(vector:Tensor, norm:Norm, gate:PackedWeight, up:PackedWeight, logits:Tensor,
                          routing:Routing) -> tuple[Tensor, Tensor]:
  """As expert_gate_up of nn/moe.py, of one token"""
  sel, scale = choose_experts(logits, routing)
  return gate_up_chosen(vector, norm, gate, up, sel, scale), sel

def expert_down_decode(hidden:Tensor, down:PackedWeight, sel:Tensor, residual:Tensor, shared:tuple[Tensor, PackedWeight]|None=None) -> Tensor:
  """As expert_down of nn/moe.py, of one token. A row's sum is those of its experts, in the order of the choices; the shared expert's is a launch of
  its own."""
  (E, D, F), chosen, groups = down.shape, sel.shape[1], row_groups(down)
  body = f"""{stage_buffers(chosen * F)}stage(x, 0, 0, {chosen * F}, X, P, S);
  for (; job < last; job++) {{
    v16f s = 0;
    for (long k = 0; k < {chosen}; k++) {{
      v16f of_expert = 0;
      dot(1, (const byte*)w + ((long)clamp(sel[k], {E}) * {groups} + job) * {group_bytes(down)}, X, P, S, (const long[]){{k * {F}}}, &of_expert);
      s += of_expert;
    }}
    put(y + job * 16, plus(s, residual + job * 16, {D} - (int)job * 16), {D} - (int)job * 16);
  }}"""
  ins = {"x": hidden, "sel": sel, "residual": residual, "w": down.planes["stream"]}
  name = f"expert_down_{chosen}_{down.label}"
  out = launch(name, {"y": empty(hidden, 1, D)}, ins, dot("dot", down), body, groups, down.nbytes * chosen // E)[0]
  return out if shared is None else norm_linear_decode(shared[0], None, [shared[1]], residual=out)[0]

# ---- the two ends of a step ----

def embedding(ids:Tensor, weight:PackedWeight) -> Tensor:
  """As embedding of nn/embedding.py, of any number of tokens. A lane of each vector of 16 rows is read."""
  (vocab, D), T, lines = weight.shape, ids.shape[0], []
  block = weight.layout.units * UNIT
  for index in range(weight.layout.units):
    unit = block_unit(weight, index)
    for k in range(UNIT):
      scale, minimum = unit.scales[k * len(unit.scales) // UNIT]
      value = unit.floats[k] if unit.floats is not None else ((unit.words[k // 4] >> (8 * (k % 4))) & 255).cast(dtypes.float) - float(unit.zero)
      number = value * scale if minimum is None else value * scale + minimum
      lines.append(f"y[b * {block} + {index * UNIT + k}] = ({number.text})[id % 16];")
  body = f"""for (y += job * {D}; job < last; job++, y += {D}) {{
    int id = clamp(ids[job], {vocab});
    const byte* B = (const byte*)w + id / 16 * {group_bytes(weight)}L;
    for (int b = 0; b < {D // block}; b++, B += {weight.layout.nbytes}) {{ {chr(10).join(lines)} }}
  }}"""
  name = f"embedding_{weight.label}{f'_{T}' if T > 1 else ''}"
  return launch(name, {"y": empty(ids, T, D)}, {"ids": ids, "w": weight.planes["stream"]}, "", body, T, D * T * 8)[0]

def argmax(values:Tensor) -> Tensor:
  """As argmax of nn/draw.py: a row by one thread, the largest value first and then its place"""
  rows, count = values.shape
  body = f"""for (x += job * {count}; job < last; job++, x += {count}) {{
    v16f best = x[0]; float top = x[0]; int i = 0;
    for (; i + 16 <= {count}; i += 16) best = __builtin_elementwise_max(best, *(const v16f*)(x + i));
    for (int r = 0; r < 16; r++) top = best[r] > top ? best[r] : top;
    for (; i < {count}; i++) top = x[i] > top ? x[i] : top;
    for (i = 0; i < {count} - 1 && x[i] != top; i++);
    y[job] = i;
  }}"""
  return launch(f"argmax_{count}_{rows}", {"y": empty(values, rows, dtype=dtypes.int32)}, {"x": values}, "", body, rows)[0]

NOISE = """
FN v16f log16(v16f x) { /* of positive numbers: x = m * 2^e with m around 1, log(m) = 2 atanh((m - 1) / (m + 1)) */
  const v16i bits = (v16i)x, e = (bits - 0x3f3504f3) >> 23;
  const v16f m = (v16f)(bits - (e << 23)), s = (m - 1) / (m + 1), z = s * s;
  return __builtin_convertvector(e, v16f) * 0.693147181f + 2 * s * (1 + z * (1 / 3.f + z * (1 / 5.f + z * (1 / 7.f + z * (1 / 9.f)))));
}
FN v16f gumbel16(v16u bits) {
  const v16f uniform = __builtin_convertvector((v16i)(bits >> 9), v16f) * 0x1p-23f + 0x1p-24f;
  return -log16(__builtin_elementwise_max(-log16(uniform), (v16f)(0x1p-24f)));
}
FN void threefry16(v16u* x, v16u* y, const unsigned* key) {
  const unsigned keys[3] = {key[1], key[0] ^ key[1] ^ 0x1bd11bda, key[0]};
  static const int by[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  v16u a = *x + key[0], b = *y + key[1];
  ALL for (int i = 0; i < 5; i++) {
    ALL for (int r = 0; r < 4; r++) { a += b; b = a ^ (b << by[i % 2][r] | b >> (32 - by[i % 2][r])); }
    a += keys[i % 3]; b += keys[(i + 1) % 3] + i + 1;
  }
  *x = a; *y = b;
}
"""

NUCLEUS = """
FN v16f below16(v16f x, float largest, float heat) { return -__builtin_elementwise_abs(largest - x) / heat; }
FN v16f logits16(const float* x, int left) { /* -inf behind the end */
  v16f v = (v16f)(-__builtin_inff());
  if (left >= 16) v = *(const v16f*)x; else for (int i = 0; i < left; i++) v[i] = x[i];
  return v;
}
FN float largest_of(const float* x, int count) {
  v16f v = (v16f)(-__builtin_inff()); float largest;
  for (int i = 0; i < count; i += 16) v = __builtin_elementwise_max(v, logits16(x + i, count - i));
  largest = v[0];
  for (int r = 1; r < 16; r++) largest = v[r] > largest ? v[r] : largest;
  return largest;
}
FN unsigned long mass_above(const float* x, int count, float largest, float heat, float edge) {
  unsigned long sum = 0;
  for (int i = 0; i < count; i += 16) {
    const v16f below = below16(logits16(x + i, count - i), largest, heat);
    const v16i above = below > edge;
    int any = 0;
    for (int r = 0; r < 16; r++) any |= above[r];
    if (!any) continue;
    const v16f mass = exp16(below) * 0x1p40f;
    for (int r = 0; r < 16; r++) sum += above[r] ? (unsigned long)mass[r] : 0;
  }
  return sum;
}
"""

def noised_argmax(values:Tensor, hottest:float, by:Tensor, key:Tensor, counter:Tensor, nucleus:tuple[int, int]|None=None) -> Tensor:
  """As argmax of nn/draw.py, with noise: a row by one thread. by: Noise's values. temperatures above `hottest` are as it"""
  rows, count = values.shape
  half, width = -(-count // 2), by.shape[1]
  first_try = begin_tries = outside = ends = ""
  if nucleus is not None:   # as nn/nucleus.py has it
    top_p, min_p = (f"by[job * {width} + {column}]" for column in nucleus)
    begin_tries = f"""const float largest = largest_of(x, {count}), divisor = by[job * {width}] == 0 ? 1 : by[job * {width}];
    const float least = {min_p} > 0 ? log16((v16f)({min_p}))[0] : -__builtin_inff();
    float edge = -__builtin_inff();
    const unsigned long all = {top_p} < 1 ? mass_above(x, {count}, largest, divisor, edge) : 0, share = (float)all * ({top_p} * (float)(1 - 1e-6));"""
    first_try = "for (int tries = 0; tries < 64; tries++) "
    outside = """if (tries || least > edge) {
            const v16f below = below16(score, largest, divisor);
            score = ((below > edge) & (below >= least)) ? score : (v16f)(-__builtin_inff());
          }"""
    ends = f"""const float below = below16((v16f)(x[y[job]]), largest, divisor)[0];
      if ({top_p} >= 1 || mass_above(x, {count}, largest, divisor, below) < (share ? share : 1)) break;
      edge = below;"""
  body = f"""const v16i lane = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
  for (x += job * {count}L; job < last; job++, x += {count}) {{
    v16u one = (v16u)(counter[job]), two = 0;
    threefry16(&one, &two, key + job * 2);
    const unsigned drawn[2] = {{one[0], two[0]}};
    const float heat = by[job * {width}] < {hottest}f ? by[job * {width}] : {hottest}f;
    {begin_tries}
    {first_try}{{
      v16f best = (v16f)(-__builtin_inff()); v16i at = lane;
      for (int n = 0; n < {half}; n += 16) {{
        v16u words[2] = {{(v16u)(lane + n), (v16u)(lane + n + {half})}};
        threefry16(words, words + 1, drawn);
        ALL for (int h = 0; h < 2; h++) {{ /* the words of a random number are those of a logit and of the one half a row behind */
          const int first = n + h * {half}, left = (h ? {count} : {half}) - first;
          v16f score = logits16(x + first, left);
          {outside}
          score += heat * gumbel16(words[h]);
          const v16i wins = score > best;
          best = __builtin_elementwise_max(best, score); at = (wins & (lane + first)) | (~wins & at);
        }}
      }}
      int found = 0;
      for (int i = 1; i < 16; i++) if (best[i] > best[found] || (best[i] == best[found] && at[i] < at[found])) found = i;
      y[job] = at[found] < {count} ? at[found] : 0;
      {ends}
    }}
  }}"""
  ins, name = {"x": values, "by": by, "key": key, "counter": counter}, "argmax_noised" if nucleus is None else "argmax_nucleus"
  return launch(f"{name}_{count}_{rows}", {"y": empty(values, rows, dtype=dtypes.int32)}, ins, NOISE + NUCLEUS, body, rows)[0]

def advance(start:Tensor, token:Tensor, tables:Tensor, log:Tensor) -> tuple[Tensor, Tensor]:
  """As advance of nn/draw.py"""
  (S, P), N = tables.shape, log.shape[1]
  outs, ins = {"moved": empty(start, S, dtype=dtypes.int32), "log": log}, {"start": start, "token": token, "tables": tables}
  body = f"""for (int i = 0; i < {S}; i++) {{
    log[i * {N} + start[i] % {N}] = token[i];
    moved[i] = start[i] = start[i] + (tables[i * {P}L] > 0);
  }}"""
  moved, log = launch(f"advance_{S}", outs, ins, "", body)
  return moved, log

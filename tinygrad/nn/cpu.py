"""Decoding on the CPU: the primitives as C with vector extensions, no intrinsics, so that AVX2, AVX-512 and ARM compile the same source.

Layout: 16 rows are interleaved, block by block, in one ascending stream of words (`Layout`): a vector's lane is a row, and a row's sum never
leaves its lane. Codes lie four to a word, byte by byte; a byte is masked where it stands, and x is scaled by the power of two that undoes its
place. Zeros and minimums go through sums of x over 16 weights. Every thread stages x, norm included, for itself, and takes a share of the
groups of 16 rows: nothing is shared, sums are float32 in one order whatever the number of threads.
"""
from __future__ import annotations
import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Sequence
import numpy as np
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.device import TinyELF
from tinygrad.dtype import AddrSpace, DType
from tinygrad.helpers import NUM_CPU_THREADS, prod
from tinygrad.nn.kernel import UNIT
from tinygrad.renderer import Estimates
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.runtime.ops_cpu import CPUProgram
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo

ROWS = 16     # of a group
PART = 1 << 22  # bytes of the stream that a thread makes at a time

def device() -> str|None:
  """The device whose kernels these are: the CPU, or NULL where it stands for it"""
  name = Device.DEFAULT.split(":")[0]
  return Device.DEFAULT if name in ("CPU", "NULL") and isinstance(Device[Device.DEFAULT].renderer, ClangRenderer) else None

def is_cpu(device:str) -> bool: return (own := globals()["device"]()) is not None and device.split(":")[0] == own.split(":")[0]

# ---- the layout ----

@dataclass(frozen=True)
class Field:
  """A plane's share of a block: `entries` of 16 rows each, from byte `offset` of the block, or of every unit"""
  dtype: DType
  entries: int
  offset: int
  of_unit: bool

class Layout:
  """Where a block of 16 rows holds what. planes: {name: (dtype, entries a block)}; first what the block has once, then unit by unit the rest"""
  def __init__(self, planes:dict[str, tuple[DType, int]], units:int):
    self.units, self.fields = units, {}
    size = {False: 0, True: 0}
    for name, (dtype, entries) in planes.items():
      of_unit = units > 1 and entries % units == 0
      each = entries // units if of_unit else entries
      self.fields[name] = Field(dtype, each, size[of_unit], of_unit)
      size[of_unit] += each * ROWS * dtype.itemsize
    self.once, self.unit = size[False], size[True]
    self.nbytes = self.once + self.unit * units
  def shape(self, shape:tuple[int, ...], blocks:int) -> tuple[int, ...]: return (*shape[:-2], -(-shape[-2] // ROWS), blocks, self.nbytes // 4)

  def interleave(self, shape:tuple[int, ...], planes:dict[str, np.ndarray]) -> np.ndarray:
    """uint32 (…, groups, blocks, words a block) of the planes of a matrix or a stack; lacking rows are zeros"""
    rows, groups = shape[-2], -(-shape[-2] // ROWS)
    name, f = next(iter(self.fields.items()))
    blocks = planes[name].size // (prod(shape[:-1]) * f.entries * (self.units if f.of_unit else 1))
    out = np.zeros(self.shape(shape, blocks), np.uint32)
    every = out.view(np.uint8).reshape(-1, groups, blocks, self.nbytes)
    for name, f in self.fields.items():
      units, size = self.units if f.of_unit else 1, f.entries * ROWS * f.dtype.itemsize
      part = every[..., self.once:].reshape(*every.shape[:3], units, -1) if f.of_unit else every[..., :self.once].reshape(*every.shape[:3], 1, -1)
      plane = planes[name].reshape(-1, rows, blocks, units, f.entries)
      place = part[..., f.offset:f.offset + size].view(plane.dtype).reshape(*part.shape[:4], f.entries, ROWS)
      for r in range(ROWS): place[:, :len(range(r, rows, ROWS)), ..., r] = plane[:, r::ROWS]
    return out

  def planes(self, shape:tuple[int, ...], stream:Tensor) -> dict[str, Tensor]:
    """The planes again, as views and shifts: (…, rows, entries of a row)"""
    *stack, groups, blocks, _ = stream.shape
    out = {}
    for name, f in self.fields.items():
      units, size = self.units if f.of_unit else 1, f.dtype.itemsize
      words = (stream[..., self.once // 4:] if f.of_unit else stream[..., :self.once // 4]).reshape(*stack, groups, blocks, units, -1)
      words = words[..., f.offset // 4:f.offset // 4 + f.entries * ROWS * size // 4]
      if size < 4: words = (words.unsqueeze(-1) >> (Tensor.arange(4 // size, dtype=dtypes.uint32) * (8 * size))) & ((1 << (8 * size)) - 1)
      n = len(stack)
      p = words.reshape(*stack, groups, blocks, units * f.entries, ROWS).permute(*range(n + 1), n + 3, n + 1, n + 2)
      p = p.reshape(*stack, groups * ROWS, blocks * units * f.entries)[..., :shape[-2], :]
      out[name] = p.bitcast(f.dtype) if size == 4 else p.cast({1: dtypes.uint8, 2: dtypes.uint16}[size]).bitcast(f.dtype)
    return out

# ---- from the file's bytes to the layout, in one pass ----

PACK = """typedef unsigned v16u __attribute__((ext_vector_type(16), aligned(4))); typedef unsigned word __attribute__((aligned(1)));
typedef unsigned short v16s __attribute__((ext_vector_type(16), aligned(2))); typedef unsigned char v16b __attribute__((ext_vector_type(16), aligned(1)));
typedef unsigned char byte; typedef unsigned long long u64;
static inline __attribute__((always_inline)) v16u load(const byte* p, const u64* at) {
  v16u v;
  _Pragma("clang loop unroll(full)") for (int r = 0; r < 16; r++) v[r] = *(const word*)(p + at[r]);
  return v;
}
#define PUT(type, o, e) *(type*)(out + (o)) = __builtin_convertvector((e) & there, type)
"""

class Packer:
  """Makes the stream of the file's blocks. origins: for each plane uint (entries, bits), which bit of a block each bit is, counted from 1; 0: none;
  inverted: the same shape, the bits that are turned over. nbytes: of `layout.units` units in the file"""
  def __init__(self, layout:Layout, origins:dict[str, np.ndarray], inverted:dict[str, np.ndarray], nbytes:int):
    self.layout, self.nbytes, lines, loaded = layout, nbytes, [], set()
    for name, f in layout.fields.items():
      for entry, (bits, turned) in enumerate(zip(origins[name], inverted[name])):
        # the bits that one loaded word holds at one distance from where they go are one mask
        masks:dict[tuple[int, int], int] = {}
        for to, bit in enumerate(map(int, bits)):
          if not bit: continue
          start = min(max((bit - 1) // 8 - to // 8, 0), nbytes - 4)
          of = (start, bit - 1 - start * 8 - to)
          masks[of] = masks.get(of, 0) | 1 << to
        parts = []
        for (start, right), mask in masks.items():
          if start not in loaded: lines.append(f"const v16u w{start} = load(raw + {start}, at);")
          loaded.add(start)
          moved = f"w{start}" if right == 0 else f"(w{start} {'>>' if right > 0 else '<<'} {abs(right)}u)"
          parts.append(moved if mask == 0xffffffff else f"({moved} & {mask}u)")
        flip = sum(1 << to for to, turn in enumerate(turned) if turn)
        unit, e = divmod(entry, f.entries) if f.of_unit else (0, entry)
        offset = (layout.once + unit * layout.unit if f.of_unit else 0) + f.offset + e * ROWS * f.dtype.itemsize
        kind = {4: "v16u", 2: "v16s", 1: "v16b"}[f.dtype.itemsize]
        lines.append(f"PUT({kind}, {offset}, ({' | '.join(parts)}){f' ^ {flip}u' if flip else ''});")
    self.source = f"""{PACK}
/* groups of 16 rows from `first` up to `last`, counted through all matrices; rows that a matrix lacks are zeros */
__attribute__((min_vector_width(512))) void pack(byte* out, const byte* file, u64 rows, u64 blocks, u64 first, u64 last) {{
  u64 groups = (rows + 15) / 16, size = blocks * {nbytes}, at[16];
  out += first * blocks * {layout.nbytes};
  for (u64 j = first; j < last; j++) {{
    u64 row = j % groups * 16;
    const byte* raw = file + (j / groups * rows + row) * size;
    v16u there;
    for (int r = 0; r < 16; r++) {{ there[r] = row + r < rows ? -1u : 0; at[r] = row + r < rows ? r * size : 0; }}
    for (u64 b = 0; b < blocks; b++, raw += {nbytes}, out += {layout.nbytes}) {{
      {chr(10).join(lines)}
    }}
  }}
}}
"""
    dev = Device[Device.DEFAULT]
    self.program = CPUProgram(dev, TinyELF(ClangRenderer(dev.renderer.target).compiler.compile_cached(self.source), "pack", dev.renderer.target, ()))

  def __call__(self, shape:tuple[int, ...], data:np.ndarray) -> Tensor:
    """The stream of a matrix or a stack. data: uint8, its bytes in the file"""
    *stack, rows, width = shape
    blocks, matrices = width // (self.layout.units * UNIT), prod(stack)
    stream = Tensor.empty(*self.layout.shape(shape, blocks), dtype=dtypes.uint32)
    out, file, jobs = stream.uop.buffer.ensure_allocated()._buf.va_addr, data.ctypes.data, matrices * -(-rows // ROWS)
    def part(first:int) -> None: self.program.fxn(*map(ctypes.c_uint64, (out, file, rows, blocks, first, min(first + each, jobs))))
    each = max(PART // (blocks * self.layout.nbytes), 1)
    if jobs <= each: part(0)
    else:
      with ThreadPoolExecutor(threads()) as pool: list(pool.map(part, range(0, jobs, each)))
    return stream

# ---- a format's description as C code ----

VECTORS = {dtypes.float: "v16f", dtypes.half: "v16h", dtypes.uint32: "v16u", dtypes.uint16: "v16s", dtypes.uint8: "v16b", dtypes.int8: "v16c"}

class CExpr:
  """An expression in C of 16 lanes that is built as a kernel's value is (apps/quantized.py), by the same code"""
  def __init__(self, text:str, dtype:DType): self.text, self.dtype = text, dtype
  def _of(self, x:Any) -> str:
    if isinstance(x, CExpr): return x.text
    return f"(({VECTORS[self.dtype]})({f'{float(x)!r}f' if self.dtype is dtypes.float else f'{x}u'}))"
  def _op(self, op:str, x:Any) -> CExpr: return CExpr(f"({self.text} {op} {self._of(x)})", self.dtype)
  def __and__(self, x): return self._op("&", x)
  def __or__(self, x): return self._op("|", x)
  def __xor__(self, x): return self._op("^", x)
  def __rshift__(self, x): return self._op(">>", x)
  def __lshift__(self, x): return self._op("<<", x)
  def __add__(self, x): return self._op("+", x)
  def __sub__(self, x): return self._op("-", x)
  def __mul__(self, x): return self._op("*", x)
  def __lt__(self, x): return self._op("<", x)
  def eq(self, x): return self._op("==", x)
  def where(self, a, b) -> CExpr:
    of = next((y for y in (a, b) if isinstance(y, CExpr)), CExpr("", dtypes.float))
    kind = VECTORS[of.dtype]
    return CExpr(f"(({kind})((((v16u){self.text}) & ((v16u){of._of(a)})) | (~((v16u){self.text}) & ((v16u){of._of(b)}))))", of.dtype)
  def maximum(self, x): return CExpr(f"__builtin_elementwise_max({self.text}, {self._of(x)})", self.dtype)
  def const_like(self, x): return CExpr(self._of(x), self.dtype)
  def cast(self, dtype:DType) -> CExpr:
    if dtype is self.dtype: return self
    if dtype is dtypes.float and self.dtype is dtypes.uint32: return CExpr(f"FLOAT({self.text})", dtype)  # codes: the sign is never set
    return CExpr(f"__builtin_convertvector({self.text}, {VECTORS[dtype]})", dtype)
  def bitcast(self, dtype:DType) -> CExpr: return CExpr(f"(({VECTORS[dtype]}){self.text})", dtype)

PRELUDE = """typedef float v16f __attribute__((ext_vector_type(16), aligned(4))); typedef float v8f __attribute__((ext_vector_type(8), aligned(4)));
typedef float v4f __attribute__((ext_vector_type(4), aligned(4))); typedef int v16i __attribute__((ext_vector_type(16), aligned(4)));
typedef unsigned v16u __attribute__((ext_vector_type(16), aligned(4))); typedef __fp16 v16h __attribute__((ext_vector_type(16), aligned(2)));
typedef unsigned short v16s __attribute__((ext_vector_type(16), aligned(2)));
typedef unsigned char v16b __attribute__((ext_vector_type(16), aligned(1)));
typedef signed char v16c __attribute__((ext_vector_type(16), aligned(1))); typedef unsigned char byte;
#define FLOAT(e) __builtin_convertvector(__builtin_convertvector(e, v16i), v16f)
#define AT(type, o) (*(const type*)(B + (o)))
#define FN static inline __attribute__((always_inline))
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
  v16f p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r + 1.6666665459e-1f) * r + 5.0000001201e-1f;
  return (p * r * r + r + 1.0f) * (v16f)((__builtin_convertvector(n, v16i) + 127) << 23);
}
FN float exp1(float x) { return exp16((v16f)(x))[0]; }
FN void put(float* y, v16f v, int rows) { if (rows >= 16) *(v16f*)y = v; else for (int r = 0; r < rows; r++) y[r] = v[r]; }
FN float rms(const float* x, int n, float eps) {
  v16f s = 0; float rest = 0; int i = 0;
  for (; i + 16 <= n; i += 16) { v16f v = *(const v16f*)(x + i); s += v * v; }
  for (; i < n; i++) rest += x[i] * x[i];
  return 1.0f / __builtin_sqrtf((sum16(s) + rest) / n + eps);
}
#ifdef __AVX512VNNI__
typedef int v16d __attribute__((vector_size(64)));
/* t += the four codes of a word times the four numbers of x at p, for every lane */
#define CODES(t, q, p) __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(t) : "v"((v16d)(q)), "m"(*(const int*)(p)))
#define INTEGER(t) __builtin_convertvector(t, v16f)
/* 32 numbers as signed bytes in three planes of a fixed-point number of 24 bits, and its unit: as exact as floats are beside the largest */
FN void fixed(const float* x, float* P) {
  v16f a = *(const v16f*)x, b = *(const v16f*)(x + 16), m = __builtin_elementwise_max(__builtin_elementwise_max(a, -a), __builtin_elementwise_max(b, -b));
  float most = 0;
  for (int i = 0; i < 16; i++) most = m[i] > most ? m[i] : most;
  P[24] = most / 8355000; /* 127 in each byte is 8355711: room for rounding */
  float inverse = most > 1e-30f ? 8355000 / most : 0;
  for (int h = 0; h < 2; h++) {
    v16f v = (h ? b : a) * inverse;
    v16i n = __builtin_convertvector(v + (v16f)(((v16u)v & 0x80000000u) | 0x3f000000u), v16i), low = n << 24 >> 24, rest = (n - low) >> 8;
    v16i middle = rest << 24 >> 24, high = (rest - middle) >> 8;
    signed char* to = (signed char*)P + h * 16;
    *(v16c*)to = __builtin_convertvector(low, v16c);
    *(v16c*)(to + 32) = __builtin_convertvector(middle, v16c);
    *(v16c*)(to + 64) = __builtin_convertvector(high, v16c);
  }
}
#endif
/* x as products want it: X; S: the sums of 16; P: 32 in fixed point, or scaled by the place of a byte in its word */
FN void stage(const float* x, const float* norm, float factor, int n, float* X, float* P, float* S) {
  for (int i = 0; i < n; i += 16) {
    v16f v = *(const v16f*)(x + i);
    if (norm) v = v * factor * *(const v16f*)(norm + i);
    *(v16f*)(X + i) = v; S[i / 16] = sum16(v);
#ifdef CODES
    if (i % 32) fixed(X + i - 16, P + i - 16);
#else
    const float a = 1.0f / 256, b = 1.0f / 65536;
    const v16f place = {1, a, b, 1, 1, a, b, 1, 1, a, b, 1, 1, a, b, 1};
    *(v16f*)(P + i) = v * place;
#endif
  }
}
"""

def of_block(w:Any, layout:Layout, u:int) -> Any:
  """The unit u of a block, at B"""
  def plane(name:str, i:int) -> CExpr:
    f = layout.fields[name]
    base = layout.once + i // f.entries * layout.unit + i % f.entries * ROWS * f.dtype.itemsize if f.of_unit else i * ROWS * f.dtype.itemsize
    return CExpr(f"AT({VECTORS[f.dtype]}, {base + f.offset})", f.dtype)
  return w.unit_of_block(plane, u)

def dot(name:str, w:Any) -> str:
  """The C function that adds the products of 16 rows, one stream at B, with staged x. Codes meet x in fixed point where the CPU has products of bytes"""
  layout, width, lines = w.layout, w.shape[-1], []
  for u in range(layout.units):
    unit = of_block(w, layout, u)
    half = UNIT // len(unit.scales)
    for g, (scale, minimum) in enumerate(unit.scales):
      part, floats, fixed = range(g * half, (g + 1) * half), [], []
      if unit.floats is not None: floats = [f"t[{k % 4}] += {unit.floats[k].text} * X[{u * UNIT + k}];" for k in part]
      else:
        for k in part[::4]:
          word = unit.words[k // 4].text
          places = (f"FLOAT({byte})" for byte in ("q & 255u", "q & 65280u", "q & 16711680u", "q >> 24"))
          floats.append(f"{{ v16u q = {word};" + "".join(f"t[{i}] += {value} * P[{u * UNIT + k + i}];" for i, value in enumerate(places)) + "}")
          fixed.append(f"{{ v16u q = {word};" + "".join(f"CODES(n{p}, q, (const byte*)(P + {u * UNIT}) + {p * UNIT + k});" for p in range(3)) + "}")
      partial = [*floats, "const v16f t0 = (t[0] + t[1]) + (t[2] + t[3]);"]
      if fixed:
        total = f"((INTEGER(n2) * 65536.0f + INTEGER(n1) * 256.0f) + INTEGER(n0)) * P[{u * UNIT + 24}]"
        partial = ["#ifdef CODES", "v16d n0 = {0}, n1 = {0}, n2 = {0};", *fixed, f"const v16f t0 = {total};", "#else", "v16f t[4] = {0};", *partial, "#endif"]
      else: partial.insert(0, "v16f t[4] = {0};")
      sums = [f"S[{u * 2 + h}]" for h in range(2)]
      total = sums[g] if len(unit.scales) == 2 else " + ".join(sums)
      zero = f" - {float(unit.zero)}f * s" if unit.floats is None and unit.zero else ""
      lines += ["{", *partial, f"const float s = {total}; *y += {scale.text} * (t0{zero}){'' if minimum is None else f' + {minimum.text} * s'};", "}"]
  elements, body = layout.units * UNIT, "\n    ".join(lines)
  return f"""FN void {name}(const byte* B, const float* X, const float* P, const float* S, v16f* y) {{
  for (int b = 0; b < {width // elements}; b++, B += {layout.nbytes}, X += {elements}, P += {elements}, S += {elements // 16}) {{
    {body}
  }}
}}
"""

# ---- launches ----

TYPES = {dtypes.float: "float", dtypes.half: "__fp16", dtypes.int32: "int", dtypes.uint32: "unsigned"}

def threads() -> int: return max(NUM_CPU_THREADS.value, 1)

def launch(name:str, outs:dict[str, Tensor], ins:dict[str, Tensor], functions:str, body:str, jobs:int=0, mem:int=0) -> list[Tensor]:
  """Runs a kernel in C. Buffers have their names there; of `jobs` a thread, `core` of `cores`, does those from `job` up to `last`; none: one
  thread does it all.
  Returns the outs, written."""
  names, tensors = [*outs, *ins], [t.flatten() for t in (*outs.values(), *ins.values())]
  n, over = len(names), threads() if jobs > 1 else 1
  arguments = [f"{TYPES[t.dtype]}* restrict {name}" for name, t in zip(names, tensors)] + ["int core_id"] * (over > 1)
  core = "core_id" if over > 1 else "0"
  share = f"const long core = {core}, cores = {over}; long job = core * {jobs} / cores, last = (core + 1) * {jobs} / cores;\n" if jobs else ""
  source = f"{PRELUDE}{functions}WIDE void {name}({', '.join(arguments)}) {{\n{share}{body}\n}}\n"
  variables = (UOp.param(n, dtypes.int, (), vmin_vmax=(0, over - 1), name="core_id", addrspace=AddrSpace.ALU),) if over > 1 else ()
  mem = mem or sum(t.nbytes() for t in tensors)
  estimates = Estimates(0, mem, mem)
  def fxn(*buffers:UOp) -> UOp:
    params = tuple(b.base for b in buffers)
    sink = UOp.sink(*params, *variables, arg=KernelInfo(name=name, estimates=estimates))
    info = ProgramInfo(name=name, global_size=(over, 1, 1), local_size=(1, 1, 1), vars=variables, globals=tuple(range(n)),
                       outs=tuple(range(len(outs))), ins=tuple(range(len(outs), n)), target=Device[Device.DEFAULT].renderer.target)
    return UOp(Ops.PROGRAM, src=(sink, UOp(Ops.LINEAR, src=(*params, *variables, sink)), UOp(Ops.SOURCE, arg=source)), arg=info)
  written = tensors[0].custom_kernel(*tensors[1:], fxn=fxn)
  return [w.reshape(t.shape) for w, t in zip(written, outs.values())]

def fits(*weights:Any) -> bool:
  """Whether these are the CPU's, interleaved"""
  return device() is not None and all(w.layout is not None for w in weights)

def groups(w:Any) -> int: return -(-w.shape[-2] // ROWS)
def group_bytes(w:Any) -> int: return w.shape[-1] // (w.layout.units * UNIT) * w.layout.nbytes
def staged(n:int) -> str: return f"float X[{n}], P[{n}], S[{n // 16}];\n"

def mul_mat(x:Tensor, w:Any, ids:Tensor|None, out_shape:tuple[int, ...]) -> Tensor:
  """As in quantized.mul_mat, of one token"""
  *stack, rows, width = w.shape
  G, size, matrices, items = groups(w), group_bytes(w), prod(stack), prod(out_shape[:-1])
  body = f"""{staged(width)}
  while (job < last) {{
    long item = job / {G}, g = job % {G};
    stage(x + item / {items // prod(x.shape[:-1])} * {width}L, 0, 0, {width}, X, P, S);
    const byte* W = (const byte*)w + (long){f"clamp(ids[item], {matrices})" if ids is not None else "item"} * {G * size};
    for (; g < {G} && job < last; g++, job++) {{
      v16f s = 0;
      dot(W + g * {size}, X, P, S, &s);
      put(y + item * {rows}L + g * 16, s, {rows} - (int)g * 16);
    }}
  }}"""
  outs, ins = {"y": Tensor.empty(*out_shape, dtype=dtypes.float)}, {"x": x, "w": w.planes["stream"]}
  if ids is not None: ins["ids"] = ids
  name = f"mul_mat{'' if ids is None else '_id'}_{w.label}_{items}"
  return launch(name, outs, ins, dot("dot", w), body, items * G, w.nbytes if ids is None else w.nbytes // matrices * items)[0]

ROTATE = """FN v16f rotate(v16f v, int row, int head, int nope, const float* turn) {
  for (int r = 0; r < 16; r += 2) {
    int at = (row + r) % head - nope;
    if (at < 0) continue;
    float a = v[r], b = v[r + 1], c = turn[at], s = turn[at + 1];
    v[r] = a * c - b * s; v[r + 1] = a * s + b * c;
  }
  return v;
}
"""

def norm_linear(x:Tensor, norm:Any, weights:Sequence[Any], rope:Any=None, pos:Tensor|None=None, residual:Tensor|None=None) -> list[Tensor]:
  D, first, body, functions = x.shape[1], 0, "", ROTATE if rope else ""
  ins = {"x": x, **({"norm": norm.weight} if norm else {}), **({"rope": rope.table, "pos": pos} if rope else {}),
         **({} if residual is None else {"residual": residual})}
  for i, w in enumerate(weights):
    functions += dot(f"dot{i}", w)
    ins[f"w{i}"] = w.planes["stream"]
    finish, rows = "", w.shape[0]
    if rope and i == 0: finish += f"s = rotate(s, g * 16, {rope.head}, {rope.nope}, rope + pos[0] * {rope.table.shape[1] * 2}L);"
    if residual is not None and i == 0: finish += f"for (int r = 0; r < 16 && g * 16 + r < {rows}; r++) s[r] += residual[g * 16 + r];"
    body += f"""for (; job < last && job < {first + groups(w)}; job++) {{
    int g = job - {first}; v16f s = 0;
    dot{i}((const byte*)w{i} + g * {group_bytes(w)}L, X, P, S, &s);
    {finish} put(y{i} + g * 16, s, {rows} - g * 16);
  }}
  """
    first += groups(w)
  body = staged(D) + f"stage(x, {f'norm, rms(x, {D}, {norm.eps!r}f)' if norm else '0, 0'}, {D}, X, P, S);\n  " + body
  parts = {"norm": norm, "linear": weights, "rope": rope, "residual": residual}
  name = "_".join([part for part, there in parts.items() if there is not None] + [w.label for w in weights])
  outs = {f"y{i}": Tensor.empty(1, w.shape[0], dtype=dtypes.float) for i, w in enumerate(weights)}
  return launch(name, outs, ins, functions, body, first, sum(w.nbytes for w in weights))

def latent_query(q:Tensor, kv:Tensor, k_b:Any, norm:Any, cache:Tensor, rope:Any, pos:Tensor) -> tuple[Tensor, Tensor]:
  (H, L, nope), dim, G, size = k_b.shape, cache.shape[1], groups(k_b), group_bytes(k_b)
  body = f"""if (job == 0) {{
    float f = rms(kv, {L}, {norm.eps!r}f);
    {TYPES[cache.dtype]}* row = cache + pos[0] * {dim}L; const float* turn = rope + pos[0] * {rope.table.shape[1] * 2}L;
    for (int i = 0; i < {L}; i++) row[i] = kv[i] * f * norm[i];
    for (int i = 0; i < {dim - L}; i += 2) {{
      float a = kv[{L} + i], b = kv[{L} + i + 1], c = turn[i], s = turn[i + 1];
      row[{L} + i] = a * c - b * s; row[{L} + i + 1] = a * s + b * c;
    }}
  }}
  {staged(nope)}for (; job < last;) {{
    long h = job / {G}, g = job % {G};
    stage(q + h * {rope.head}, 0, 0, {nope}, X, P, S);
    for (; g < {G} && job < last; g++, job++) {{
      v16f s = 0;
      dot((const byte*)w + job * {size}L, X, P, S, &s);
      put(q_latent + h * {L} + g * 16, s, {L} - (int)g * 16);
    }}
  }}"""
  outs = {"q_latent": Tensor.empty(1, H, L, dtype=dtypes.float), "cache": cache}
  ins = {"q": q, "kv": kv, "norm": norm.weight, "rope": rope.table, "pos": pos, "w": k_b.planes["stream"]}
  q_latent, written = launch(f"latent_query_{k_b.label}", outs, ins, dot("dot", k_b), body, H * G, k_b.nbytes)
  return q_latent, written

AT_ONCE = 16  # positions

def attention_takes(heads:int, latent:int, dim:int) -> bool: return latent % ROWS == 0 and dim % ROWS == 0

def mla_attention(q_latent:Tensor, q:Tensor, cache:Tensor, pos:Tensor, scale:float) -> Tensor:
  """A thread takes a share of the heads: it reads the cache once for all of them, AT_ONCE positions at a time; softmax is online, as on GPUs"""
  (_, H, L), dim = q_latent.shape, cache.shape[1]
  head = q.shape[1] // H
  body = f"""int n = pos[0] + 1;
  float query[{H * dim}], keys[{AT_ONCE * dim}], top[{H}], total[{H}];
  for (int h = job; h < last; h++) {{
    top[h] = -1e30f; total[h] = 0;
    for (int i = 0; i < {L}; i++) {{ query[h * {dim} + i] = q_latent[h * {L} + i] * {scale!r}f; context[h * {L} + i] = 0; }}
    for (int i = {L}; i < {dim}; i++) query[h * {dim} + i] = q[h * {head} + {head - dim} + i] * {scale!r}f;
  }}
  for (int from = 0; from < n; from += {AT_ONCE}) {{
    int some = n - from < {AT_ONCE} ? n - from : {AT_ONCE};
    for (int p = 0; p < {AT_ONCE}; p++) for (int i = 0; i < {dim}; i++) keys[p * {dim} + i] = p < some ? (float)cache[(from + p) * {dim}L + i] : 0;
    for (int h = job; h < last; h++) {{
      v16f score = -1e30f; float* y = context + h * {L};
      for (int p = 0; p < some; p += 4) {{
        v16f t[4] = {{0}};
        for (int i = 0; i < {dim}; i += 16) for (int k = 0; k < 4; k++) t[k] += *(v16f*)(query + h * {dim} + i) * *(v16f*)(keys + (p + k) * {dim} + i);
        for (int k = 0; k < 4; k++) if (p + k < some) score[p + k] = sum16(t[k]);
      }}
      float old = top[h], now = old;
      for (int p = 0; p < some; p++) now = score[p] > now ? score[p] : now;
      float shrink = exp1(old - now); v16f weight = exp16(score - now);
      top[h] = now; total[h] *= shrink;
      for (int p = 0; p < some; p++) total[h] += weight[p];
      for (int i = 0; i < {L}; i += 16) {{
        v16f s = *(v16f*)(y + i) * shrink;
        for (int p = 0; p < some; p++) s += weight[p] * *(v16f*)(keys + p * {dim} + i);
        *(v16f*)(y + i) = s;
      }}
    }}
  }}
  for (int h = job; h < last; h++) for (int i = 0; i < {L}; i++) context[h * {L} + i] /= total[h];"""
  outs, ins = {"context": Tensor.empty(1, H, L, dtype=dtypes.float)}, {"q_latent": q_latent, "q": q, "cache": cache, "pos": pos}
  return launch(f"mla_attention_{H}_{L}_{dim - L}", outs, ins, "", body, H, cache.nbytes())[0]

def choose_experts(logits:Tensor, routing:Any, least_sum:float) -> tuple[Tensor, Tensor]:
  """gating: 1 softmax, 2 sigmoid, 3 softmax over the chosen. logits: (T, E)"""
  (T, E), bias, count, gating, normalize, scale = logits.shape, routing.bias, routing.count, routing.gating, routing.normalize, routing.scale
  score = {1: "exp1(logits[e] - top)", 2: "1 / (1 + exp1(-logits[e]))", 3: "logits[e]"}[gating]
  body = f"""for (logits += job * {E}, sel += job * {count}, weights += job * {count}; job < last; job++, logits += {E}, sel += {count}, weights += {count}) {{
  float score[{E}], choice[{E}], top = logits[0], total = 0;
  for (int e = 1; e < {E}; e++) top = logits[e] > top ? logits[e] : top;
  for (int e = 0; e < {E}; e++) total += score[e] = {score};
  for (int e = 0; e < {E}; e++) {{
    {'score[e] /= total;' if gating == 1 else ''} choice[e] = score[e]{'' if bias is None else ' + bias[e]'};
  }}
  for (int k = 0; k < {count}; k++) sel[k] = weights[k] = 0;
  for (int e = 0; e < {E}; e++) {{
    int before = 0;
    for (int o = 0; o < {E}; o++) before += choice[o] > choice[e] || (choice[o] == choice[e] && o < e);
    if (before < {count}) {{ sel[before] = e; weights[before] = score[e]; }}
  }}
  total = 0;
  {f'for (int k = {count} - 1; k >= 0; k--) total += weights[k] = exp1(weights[k] - top);' if gating == 3 else ''}
  {f'for (int k = 0; k < {count}; k++) weights[k] /= total;' if gating == 3 else ''}
  total = 0;
  for (int k = 0; k < {count}; k++) total += weights[k];
  float factor = {scale!r}f{f' / (total > {least_sum!r}f ? total : {least_sum!r}f)' if normalize else ''};
  for (int k = 0; k < {count}; k++) weights[k] *= factor;
  }}"""
  outs = {"sel": Tensor.empty(T, count, dtype=dtypes.int32), "weights": Tensor.empty(T, count, dtype=dtypes.float)}
  name = f"choose_{count}_of_{E}_{gating}{f'_{T}' if T > 1 else ''}"
  sel, weights = launch(name, outs, {"logits": logits, **({} if bias is None else {"bias": bias})}, "", body, T)
  return sel, weights

def gate_up(x:Tensor, norm:Any, weights:tuple[Any, Any], sel:Tensor|None=None, scale:Tensor|None=None) -> Tensor:
  gate, up = weights
  (*stack, F, D), G, K = gate.shape, groups(gate), 1 if sel is None else sel.shape[1]
  expert = f"clamp(sel[k], {stack[0]})" if stack else "0"
  body = f"""{staged(D)}stage(x, norm, rms(x, {D}, {norm.eps!r}f), {D}, X, P, S);
  for (; job < last; job++) {{
    long k = job / {G}, g = job % {G}, at = (long){expert} * {G} + g; v16f a = 0, b = 0;
    dot_gate((const byte*)gate + at * {group_bytes(gate)}, X, P, S, &a);
    dot_up((const byte*)up + at * {group_bytes(up)}, X, P, S, &b);
    put(y + k * {F} + g * 16, a / (1 + exp16(-a)) * b{' * scale[k]' if stack else ''}, {F} - (int)g * 16);
  }}"""
  ins = {"x": x, "norm": norm.weight, **({} if sel is None or scale is None else {"sel": sel, "scale": scale}),
         "gate": gate.planes["stream"], "up": up.planes["stream"]}
  y = Tensor.empty(*((1, K, F) if stack else (1, F)), dtype=dtypes.float)
  mem = (gate.nbytes + up.nbytes) * K // prod(stack)
  name = f"gate_up_{f'{K}_of_' if stack else ''}{gate.label}"
  return launch(name, {"y": y}, ins, dot("dot_gate", gate) + dot("dot_up", up), body, K * G, mem)[0]

def expert_down(hidden:Tensor, down:Any, sel:Tensor, residual:Tensor) -> Tensor:
  (E, D, F), K, G, size = down.shape, sel.shape[1], groups(down), group_bytes(down)
  body = f"""{staged(K * F)}stage(x, 0, 0, {K * F}, X, P, S);
  for (; job < last; job++) {{
    v16f s = 0;
    for (int k = 0; k < {K}; k++)
      dot((const byte*)w + ((long)clamp(sel[k], {E}) * {G} + job) * {size}, X + k * {F}, P + k * {F}, S + k * {F // 16}, &s);
    for (int r = 0; r < 16 && job * 16 + r < {D}; r++) s[r] += residual[job * 16 + r];
    put(y + job * 16, s, {D} - (int)job * 16);
  }}"""
  ins = {"x": hidden, "sel": sel, "residual": residual, "w": down.planes["stream"]}
  outs = {"y": Tensor.empty(1, D, dtype=dtypes.float)}
  return launch(f"expert_down_{K}_{down.label}", outs, ins, dot("dot", down), body, G, down.nbytes * K // E)[0]

def embedding(ids:Tensor, w:Any) -> Tensor:
  (vocab, D), T, lines = w.shape, ids.shape[0], []
  for u in range(w.layout.units):
    unit = of_block(w, w.layout, u)
    for k in range(UNIT):
      scale, minimum = unit.scales[k * len(unit.scales) // UNIT]
      value = unit.floats[k] if unit.floats is not None else ((unit.words[k // 4] >> (8 * (k % 4))) & 255).cast(dtypes.float) - float(unit.zero)
      weight = value * scale if minimum is None else value * scale + minimum
      lines.append(f"y[b * {w.layout.units * UNIT} + {u * UNIT + k}] = ({weight.text})[id % 16];")
  body = f"""for (y += job * {D}; job < last; job++, y += {D}) {{
    int id = clamp(ids[job], {vocab});
    const byte* B = (const byte*)w + id / 16 * {group_bytes(w)}L;
    for (int b = 0; b < {D // (w.layout.units * UNIT)}; b++, B += {w.layout.nbytes}) {{ {chr(10).join(lines)} }}
  }}"""
  outs = {"y": Tensor.empty(T, D, dtype=dtypes.float)}
  return launch(f"embedding_{w.label}{f'_{T}' if T > 1 else ''}", outs, {"ids": ids, "w": w.planes["stream"]}, "", body, T, D * T * 8)[0]

def argmax(x:Tensor) -> Tensor:
  V = x.shape[0]
  body = f"""v16f best = x[0]; float top = x[0]; int i = 0;
  for (; i + 16 <= {V}; i += 16) best = __builtin_elementwise_max(best, *(const v16f*)(x + i));
  for (int r = 0; r < 16; r++) top = best[r] > top ? best[r] : top;
  for (; i < {V}; i++) top = x[i] > top ? x[i] : top;
  for (i = 0; i < {V} - 1 && x[i] != top; i++);
  y[0] = i;"""
  return launch(f"argmax_{V}", {"y": Tensor.empty(1, dtype=dtypes.int32)}, {"x": x}, "", body)[0]

def advance(pos:Tensor, token:Tensor) -> Tensor:
  """As in embedding.advance"""
  outs, ins = {"moved": Tensor.empty(1, dtype=dtypes.int32)}, {"pos": pos, "token": token}
  return launch("advance", outs, ins, "", "moved[0] = pos[0] = pos[0] + (token[0] >= 0);")[0]

"""How a weight matrix lies in the CPU's memory, and the way there from the bytes of a file.

Layout. 16 rows are interleaved into one ascending stream of 32-bit words: a vector's lane is a row, so a row's sum never leaves its lane. The
stream runs through the groups of 16 rows, and in a group block by block. A block begins with what it has once, as its scale; its units of 32
weights follow, each with its codes, four to a word, and its own scales. Rows that the last group lacks are zeros.

Packing. A bit of the stream is a bit of the file's block, or its inverse; so is a bit of an index into a table, and a bit of the stream may be one of
the entry that is found there. The caller says which (apps/quantized.py); C compiled for that moves all bits in one pass over the file, 16 rows at
once, all threads beside each other.
"""
from __future__ import annotations
import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple
import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.device import TinyELF
from tinygrad.dtype import DType
from tinygrad.helpers import NUM_CPU_THREADS, prod
from tinygrad.nn.kernel import UNIT
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.runtime.ops_cpu import CPUProgram

ROWS = 16             # of a group
PACK_BYTES = 1 << 22  # of the stream that a thread packs at a time

def threads() -> int: return max(NUM_CPU_THREADS.value, 1)

@dataclass(frozen=True)
class Field:
  """A plane's share of a block: `entries` of each of the 16 rows, from byte `offset` of the block or, where `in_unit`, of every unit."""
  dtype: DType
  entries: int
  offset: int
  in_unit: bool
  @property
  def entry_bytes(self) -> int: return ROWS * self.dtype.itemsize
  @property
  def nbytes(self) -> int: return self.entries * self.entry_bytes

class Layout:
  """Where a block of 16 rows holds what. planes: {name: (dtype, entries a block)}. A plane whose entries the units share evenly lies in the units."""
  def __init__(self, planes:dict[str, tuple[DType, int]], units:int):
    self.units, self.fields = units, {}
    self.block_bytes = self.unit_bytes = 0  # of what a block has once, of what each of its units has
    for name, (dtype, entries) in planes.items():
      if units > 1 and entries % units == 0:
        self.fields[name] = Field(dtype, entries // units, self.unit_bytes, True)
        self.unit_bytes += self.fields[name].nbytes
      else:
        self.fields[name] = Field(dtype, entries, self.block_bytes, False)
        self.block_bytes += self.fields[name].nbytes
    self.nbytes = self.block_bytes + self.unit_bytes * units

  def shape(self, shape:tuple[int, ...], blocks:int) -> tuple[int, ...]:
    """Of the stream, in words: (…, groups, blocks of a row, words of a block)"""
    return (*shape[:-2], -(-shape[-2] // ROWS), blocks, self.nbytes // 4)

  def offset(self, name:str, entry:int) -> int:
    """The byte of a block where 16 rows have an entry of a plane"""
    field = self.fields[name]
    if not field.in_unit: return field.offset + entry * field.entry_bytes
    unit, entry = divmod(entry, field.entries)
    return self.block_bytes + unit * self.unit_bytes + field.offset + entry * field.entry_bytes

  def interleave(self, shape:tuple[int, ...], planes:dict[str, np.ndarray]) -> np.ndarray:
    """The stream of a matrix or a stack, from its planes: uint32, as `shape` says. The reference that Packer is tested against."""
    rows, groups = shape[-2], -(-shape[-2] // ROWS)
    name, field = next(iter(self.fields.items()))
    blocks = planes[name].size // (prod(shape[:-1]) * field.entries * (self.units if field.in_unit else 1))
    stream = np.zeros(self.shape(shape, blocks), np.uint32)
    block = stream.view(np.uint8).reshape(-1, groups, blocks, self.nbytes)
    for name, field in self.fields.items():
      units = self.units if field.in_unit else 1
      share = block[..., self.block_bytes:] if field.in_unit else block[..., :self.block_bytes]
      share = share.reshape(*block.shape[:3], units, -1)[..., field.offset:field.offset + field.nbytes]
      plane = planes[name].reshape(-1, rows, blocks, units, field.entries)
      entries = share.view(plane.dtype).reshape(*share.shape[:4], field.entries, ROWS)
      for lane in range(ROWS): entries[:, :len(range(lane, rows, ROWS)), ..., lane] = plane[:, lane::ROWS]
    return stream

  def planes(self, shape:tuple[int, ...], stream:Tensor) -> dict[str, Tensor]:
    """The planes of a stream, as views and shifts: (…, rows, entries of a row)"""
    *stack, groups, blocks, _ = stream.shape
    depth, planes = len(stack), {}
    for name, field in self.fields.items():
      units, size = self.units if field.in_unit else 1, field.dtype.itemsize
      words = stream[..., self.block_bytes // 4:] if field.in_unit else stream[..., :self.block_bytes // 4]
      words = words.reshape(*stack, groups, blocks, units, -1)[..., field.offset // 4:(field.offset + field.nbytes) // 4]
      if size < 4:
        shifts = Tensor.arange(4 // size, dtype=dtypes.uint32) * (8 * size)
        words = (words.unsqueeze(-1) >> shifts) & ((1 << (8 * size)) - 1)
      plane = words.reshape(*stack, groups, blocks, units * field.entries, ROWS).permute(*range(depth + 1), depth + 3, depth + 1, depth + 2)
      plane = plane.reshape(*stack, groups * ROWS, blocks * units * field.entries)[..., :shape[-2], :]
      planes[name] = plane.bitcast(field.dtype) if size == 4 else plane.cast({1: dtypes.uint8, 2: dtypes.uint16}[size]).bitcast(field.dtype)
    return planes

# ---- packing ----

PACK = """#pragma clang diagnostic ignored "-Wpsabi"
typedef unsigned v16u __attribute__((ext_vector_type(16), aligned(4))); typedef unsigned word __attribute__((aligned(1)));
typedef unsigned short v16s __attribute__((ext_vector_type(16), aligned(2))); \
typedef unsigned char v16b __attribute__((ext_vector_type(16), aligned(1)));
typedef unsigned char byte; typedef unsigned long long u64;
static inline __attribute__((always_inline)) v16u load(const byte* p, const u64* at) {
  v16u v;
  _Pragma("clang loop unroll(full)") for (int r = 0; r < 16; r++) v[r] = *(const word*)(p + at[r]);
  return v;
}
static inline __attribute__((always_inline)) v16u look(const unsigned* table, v16u i) {
  v16u v;
  _Pragma("clang loop unroll(full)") for (int r = 0; r < 16; r++) v[r] = table[i[r]];
  return v;
}
#define PUT(type, o, e) *(type*)(out + (o)) = __builtin_convertvector((e) & there, type)
"""

class Origins(NamedTuple):
  """Where the bits of entries come from. bits: uint (entries, bits), the bit of the file's block, counted from 1, or 0 for none; behind the block's
  bits come those of what is looked up, 32 each. inverted: the same shape, true where the bit is turned over."""
  bits: np.ndarray
  inverted: np.ndarray

def bit_moves(origins:np.ndarray, nbytes:int) -> dict[tuple[int, int], int]:
  """How an entry's bits come from a block of `nbytes`: {(first byte of a word, its shift to the right): mask of the bits that so come to their
  places}. origins: a row of Origins.bits. The number nbytes + i stands for what is looked up i-th."""
  masks:dict[tuple[int, int], int] = {}
  for place, origin in enumerate(map(int, origins)):
    if not origin: continue
    if origin > nbytes * 8:
      number, bit = divmod(origin - 1 - nbytes * 8, 32)
      move = (nbytes + number, bit - place)
    else:
      start = min(max((origin - 1) // 8 - place // 8, 0), nbytes - 4)
      move = (start, origin - 1 - start * 8 - place)
    masks[move] = masks.get(move, 0) | 1 << place
  return masks

def pack_source(layout:Layout, planes:dict[str, Origins], nbytes:int, index:Origins|None=None) -> str:
  """The C source of Packer, whose parameters these are"""
  lines, loaded = [], set()
  def entry(bits:np.ndarray, inverted:np.ndarray) -> str:
    moved = []
    for (start, right), mask in bit_moves(bits, nbytes).items():
      if start not in loaded:
        looked_up = start - nbytes
        word = f"load(raw + {start}, at)" if looked_up < 0 else f"look(table, {entry(index.bits[looked_up], index.inverted[looked_up])})"
        lines.append(f"const v16u w{start} = {word};")
      loaded.add(start)
      word = f"w{start}" if right == 0 else f"(w{start} {'>>' if right > 0 else '<<'} {abs(right)}u)"
      moved.append(word if mask == 0xffffffff else f"({word} & {mask}u)")
    flips = sum(1 << place for place, flip in enumerate(inverted) if flip)
    return f"({' | '.join(moved)}){f' ^ {flips}u' if flips else ''}"
  for name, field in layout.fields.items():
    vector = {4: "v16u", 2: "v16s", 1: "v16b"}[field.dtype.itemsize]
    for number, origins in enumerate(zip(*planes[name])): lines.append(f"PUT({vector}, {layout.offset(name, number)}, {entry(*origins)});")
  return f"""{PACK}
/* groups of 16 rows from `first` up to `last`, counted through all matrices; rows that a matrix lacks are zeros */
__attribute__((min_vector_width(512))) void pack(byte* out, const byte* file, const unsigned* table, u64 rows, u64 blocks, u64 first,
  u64 last) {{
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

class Packer:
  """Makes streams of a file's blocks on a CPU device. planes: where each plane's bits come from. nbytes: of `layout.units` units in the file. index:
  where the bits of a block's indices into `table` (uint32) come from."""
  def __init__(self, layout:Layout, planes:dict[str, Origins], nbytes:int, device:str, index:Origins|None=None, table:np.ndarray|None=None):
    self.layout, self.device, self.table, target = layout, device, np.zeros(1, np.uint32) if table is None else table, Device[device].renderer.target
    binary = ClangRenderer(target).compiler.compile_cached(pack_source(layout, planes, nbytes, index))
    self.program = CPUProgram(Device[device], TinyELF(binary, "pack", target, ()))

  def __call__(self, shape:tuple[int, ...], data:np.ndarray) -> Tensor:
    """The stream of a matrix or a stack. data: uint8, its bytes in the file."""
    *stack, rows, width = shape
    blocks = width // (self.layout.units * UNIT)
    stream = Tensor.empty(*self.layout.shape(shape, blocks), dtype=dtypes.uint32, device=self.device)
    out, file, groups = stream.uop.buffer.ensure_allocated()._buf.va_addr, data.ctypes.data, prod(stack) * -(-rows // ROWS)
    table = self.table.ctypes.data
    share = max(PACK_BYTES // (blocks * self.layout.nbytes), 1)
    def pack(first:int) -> None: self.program.fxn(*map(ctypes.c_uint64, (out, file, table, rows, blocks, first, min(first + share, groups))))
    if groups <= share: pack(0)
    else:
      with ThreadPoolExecutor(threads()) as pool: list(pool.map(pack, range(0, groups, share)))
    return stream

"""GGUF's block formats: the one place that knows their bits.

A weight matrix (…, out, in) stays quantized on the device. At load each block's fields are taken apart into *planes*, tensors whose last
axis runs along the row, so that neighbouring lanes of a kernel read neighbouring words. Nothing is stored twice: the planes hold the
file's bits, rearranged, or what a file's indices stand for. A row is a sequence of *units* of 32 weights, and in every format

    weight = scale · value(code) + minimum       one scale and minimum a unit, or two (one for each 16 weights)

where a code is an unsigned number of 2 to 8 bits and value() subtracts a constant or looks the code up in a table of 16.

Code planes are uint32. A plane of `width` bits puts 32/width codes into a word: the code at 4·(8/width·word + k) + byte of its unit lies at
bit 8·byte + width·k, so shifting by width·k and masking yields four codes at once, one in each byte, as integer dot products want them.
Wider codes are split over two planes (6 bits: 4 + 2). Floats are kept as they are, BF16 as uint16; on a GPU those of 16 bits lie by twos in uint32.
There, what a block of a matrix has beside its codes, once, lies together where it is 4, 8 or 16 bytes: its *header*, which a lane loads at once.

Eight formats write an index into a table for four, five or eight weights (*lookups*). The table's entries are the codes: they are looked up once, at
load, and every kernel finds a format like the others. This costs memory, and time where the time goes into reading weights. The bits of a weight, in
the file and held:

           file    held                                                file    held
  IQ1_S    1.5625  2.1875  2-bit codes, a minimum a unit      IQ3_XXS  3.0625  4.1875  4-bit codes, a table
  IQ1_M    1.75    3.25    3-bit codes, a table               IQ3_S    3.4375  4.1875  4-bit codes, a minimum a unit
  IQ2_XXS  2.0625  3.1875  3-bit codes, a table               TQ1_0    1.6875  2.0625  2-bit codes
  IQ2_XS   2.3125  3.3125  3-bit codes, a table               TQ2_0    2.0625  2.0625  2-bit codes; no lookup
  IQ2_S    2.5625  3.3125  3-bit codes, a table               the others hold the file's bits
"""
from __future__ import annotations
import functools, operator
from dataclasses import dataclass
from typing import Any, Callable, Iterable, NamedTuple, Self
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as GGMLType, quants
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.apps.capture import Replay, to_device
from tinygrad.device import LRUAllocator
from tinygrad.dtype import DType, _from_np_dtype, _to_np_dtype
from tinygrad.helpers import Context, prod
from tinygrad.nn import cpu
from tinygrad.nn.cpu_layout import ROWS, Layout, Origins, Packer
from tinygrad.nn.embedding import embedding
from tinygrad.nn.halves import of_pair
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.kernel import SPREAD, UNIT, Matrix, Unit, spread_quads, table_codes
from tinygrad.nn.norm_linear import mul_mat

# ---- bytes -> codes: the file's order of bits, one function a family. raw: (n, bytes a block) uint32, returns (n, elements) uint32 ----

class Numbers(np.ndarray):
  """numpy arrays with the Tensor methods used below: split_planes runs on the host too, for the planes' names and the CPU's packer"""
  @staticmethod
  def arange(n:int, dtype:DType) -> Numbers: return np.arange(n, dtype=_to_np_dtype(dtype)).view(Numbers)
  def cast(self, dtype:DType) -> Numbers: return self.astype(_to_np_dtype(dtype))
  def bitcast(self, dtype:DType) -> Numbers: return self.view(_to_np_dtype(dtype))
  def unsqueeze(self, dim:int) -> Numbers: return np.expand_dims(self, dim)
  def cat(self, other:Numbers, dim:int) -> Numbers: return np.concatenate([self, other], dim).view(Numbers)
  def sum(self, dims:int|tuple[int, ...], keepdim:bool=False, dtype:DType=dtypes.uint32) -> Numbers:
    return np.add.reduce(self, dims, _to_np_dtype(dtype), keepdims=keepdim)

Raw = Tensor|Numbers
Planes = dict[str, Any]  # of either

def _steps(like:Raw, n:int, step:int=1) -> Raw:
  """The shifts 0, step, 2·step, …: of a tensor, arithmetic on an index, no buffer"""
  return like.arange(n, dtype=dtypes.uint32) * step
def _nibbles(b:Raw, run:int) -> Raw:
  """Runs of `run` bytes: first the low nibbles of a run, then its high ones. (n, bytes) -> (n, 2·bytes)"""
  return ((b.reshape(b.shape[0], -1, 1, run) >> _steps(b, 2, 4).reshape(2, 1)) & 15).reshape(b.shape[0], -1)
def _bits(b:Raw) -> Raw: return ((b.unsqueeze(-1) >> _steps(b, 8)) & 1).reshape(b.shape[0], -1)
def _fields(b:Raw, width:int, count:int) -> Raw:
  """Of each number its `count` fields of `width` bits, the low ones first. (n, numbers) -> (n, numbers·count)"""
  return ((b.unsqueeze(-1) >> _steps(b, count, width)) & ((1 << width) - 1)).reshape(b.shape[0], -1)
def _words(b:Raw, size:int) -> Raw:
  """Little-endian numbers of `size` bytes. (n, bytes) -> (n, bytes/size). No sum: tinygrad would give it a kernel of its own"""
  return functools.reduce(operator.or_, (b[:, i::size] << (8 * i) for i in range(size)))
def _crumbs(b:Raw) -> Raw:
  """Runs of 32 bytes, each holding four groups of 32 two-bit codes. (n, 64) -> (n, 256)"""
  return ((b.reshape(b.shape[0], 2, 1, 32) >> _steps(b, 4, 2).reshape(4, 1)) & 3).reshape(b.shape[0], 256)
def _bit_of_group(b:Raw) -> Raw:
  """32 bytes whose bit g belongs to group g of 32 codes. (n, 32) -> (n, 256)"""
  return ((b.reshape(b.shape[0], 1, 32) >> _steps(b, 8).reshape(8, 1)) & 1).reshape(b.shape[0], 256)

# ---- indices -> codes: a table's entries are uint32, the codes of a few weights, or their signs, the first in the low bits ----

def _sign_indices(units:Raw, first:int) -> Raw:
  """The low 28 bits of a unit's word: four indices, into entries from `first` on, of the signs of eight weights. (n, 8) -> (n, 32)"""
  return _fields(units, 7, 4) | first
def _digits(w:Raw, count:int) -> Raw:
  """First the first codes of all entries, then the second ones, … (n, entries) -> (n, count·entries)"""
  return ((w.unsqueeze(1) >> _steps(w, count, 2).reshape(count, 1)) & 3).reshape(w.shape[0], -1)
def _with_signs(magnitudes:Raw, signs:Raw, width:int) -> Raw: return magnitudes | (signs << width)

def _in_words(codes:np.ndarray, width:int) -> np.ndarray:
  """(n, codes of an entry) -> uint32 (n,)"""
  return (codes.astype(np.uint32) << (np.arange(codes.shape[1], dtype=np.uint32) * width)).sum(-1, dtype=np.uint32)
def _grid(kind:GGMLType) -> np.ndarray:
  """The gguf package's grid of a type: (entries, weights), magnitudes as their places among those there are"""
  of_type = getattr(quants, kind.name)
  of_type.init_grid()
  return np.searchsorted(of_type.grid_map, of_type.grid.reshape(of_type.grid_shape))
def _grid_and_signs(kind:GGMLType, width:int) -> np.ndarray:
  """The grid's entries, and behind them those of 7 bits that say eight signs, of which an even number are set"""
  return np.concatenate([_in_words(_grid(kind), width), np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8).astype(np.uint32)])
def _signed_grid(kind:GGMLType) -> np.ndarray:
  """An entry for each four signs and each of the grid's: weights ±1, ±3, … ±15 are codes in their order"""
  signs = np.arange(16).reshape(16, 1, 1) >> np.arange(4) & 1
  return _in_words(np.where(signs, 7 - _grid(kind), 8 + _grid(kind)).reshape(-1, 4), 4)
def _grid_plus_or_minus(kind:GGMLType) -> np.ndarray:
  """The grid's entries, and behind them the same with a third bit in every code"""
  return _in_words(np.concatenate([_grid(kind), _grid(kind) | 4]), 3)
def _trits() -> np.ndarray:
  """An entry for each byte: it is a fraction of 256, whose five digits in base 3 are the codes"""
  return _in_words((np.arange(256).reshape(-1, 1) * 3 ** np.arange(5) % 256 * 3) >> 8, 2)

# ---- bytes -> scale planes ----

def _half(b:Raw) -> Raw: return (b[:, 0:1] | (b[:, 1:2] << 8)).cast(dtypes.uint16).bitcast(dtypes.half)
def _pairs(b:Raw) -> Raw: return (b[:, 0::2] | (b[:, 1::2] << 8)).cast(dtypes.uint16)
def _six_bit_pairs(a:Raw, b:Raw) -> Planes:
  """Two 6-bit numbers a unit, (n, 8) each: the first and the second's high bits in a byte a unit, its low nibble in 4 bits of a word a block"""
  return {"s": (a | ((b >> 4) << 6)).cast(dtypes.uint8), "t": ((b & 15) << _steps(a, 8, 4)).sum(-1, keepdim=True, dtype=dtypes.uint32)}
def _k_scales(q:Raw) -> Planes:
  """The 12 bytes of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minimums"""
  lo, mid, hi = q[:, 0:4], q[:, 4:8], q[:, 8:12]
  return _six_bit_pairs((lo & 63).cat((hi & 15) | ((lo >> 6) << 4), dim=1), (mid & 63).cat((hi >> 4) | ((mid >> 6) << 4), dim=1))
def _q3_scales(q:Raw) -> Planes:
  """The 12 bytes of Q3_K: sixteen 6-bit scales, two a unit"""
  low, high = _nibbles(q[:, 0:8], 8), ((q[:, 8:12].unsqueeze(1) >> _steps(q, 4, 2).reshape(4, 1)) & 3).reshape(-1, 16)
  both = low | (high << 4)
  return _six_bit_pairs(both[:, 0::2], both[:, 1::2])

def _nibble_a_unit(x:Raw) -> Planes:
  """Eight 4-bit numbers, one a unit, (n, 8): a word a block"""
  return {"s": (x << _steps(x, 8, 4)).sum(-1, keepdim=True, dtype=dtypes.uint32)}
def _iq1m_scales(q:Raw) -> Planes:
  """Four words of four 3-bit scales, two a unit, and of 4 bits of the block's: a word has four bits of each unit's scales, another one two"""
  words = _words(q, 2)
  pairs = _fields(words, 6, 2)
  d = ((words >> 12) << _steps(q, 4, 4)).sum(-1, keepdim=True, dtype=dtypes.uint32)
  return {**_nibble_a_unit(pairs & 15), "t": ((pairs >> 4) << _steps(q, 8, 2)).sum(-1, keepdim=True, dtype=dtypes.uint32).cast(dtypes.uint16),
          "d": d.cast(dtypes.uint16).bitcast(dtypes.half)}

# ---- planes -> scale and minimum, written once for both worlds: tensors in the reference, loaded values in a kernel ----

@dataclass(frozen=True)
class UnitView:
  """The small planes at one unit, or at all units of a tensor: `at(name)` is the plane's entry, `index` the unit's place in its block."""
  at: Callable[[str], Any]
  index: Any

Scales = list[tuple[Any, Any]]  # (scale, minimum) of the whole unit, or of each of its halves; a minimum may be None

def _float(x): return x.cast(dtypes.float)
def _unpack_six(p:UnitView) -> tuple[Any, Any]:
  s, t = p.at("s").cast(dtypes.uint32), p.at("t") >> (p.index.cast(dtypes.uint32) * 4)
  return s & 63, (t & 15) | ((s >> 2) & 48)
def _d(p:UnitView) -> Scales: return [(_float(p.at("d")), None)]
def _d_m(p:UnitView) -> Scales: return [(_float(p.at("d")), _float(p.at("m")))]
def _k(p:UnitView) -> Scales:
  a, b = _unpack_six(p)
  return [(_float(p.at("d")) * _float(a), _float(p.at("m")) * _float(b) * -1.0)]
def _q2k(p:UnitView) -> Scales:
  d, m, s = _float(p.at("d")), _float(p.at("m")), p.at("s").cast(dtypes.uint32)
  return [(d * _float((s >> h) & 15), m * _float((s >> (h + 4)) & 15) * -1.0) for h in (0, 8)]
def _q3k(p:UnitView) -> Scales: return [(_float(p.at("d")) * (_float(x) - 32.0), None) for x in _unpack_six(p)]
def _q6k(p:UnitView) -> Scales:
  s = p.at("s").cast(dtypes.uint32)
  return [(_float(p.at("d")) * _float(((s >> h) & 255).cast(dtypes.uint8).bitcast(dtypes.int8)), None) for h in (0, 8)]
def _unit_nibble(p:UnitView): return (p.at("s") >> (p.index.cast(dtypes.uint32) * 4)) & 15
def _unit_six(p:UnitView): return _unit_nibble(p) | (((p.at("t").cast(dtypes.uint32) >> (p.index.cast(dtypes.uint32) * 2)) & 3) << 4)
def _iq4xs(p:UnitView) -> Scales: return [(_float(p.at("d")) * (_float(_unit_six(p)) - 32.0), None)]
def _iq1s(p:UnitView) -> Scales:
  n = _unit_nibble(p)
  scale = _float(p.at("d")) * (_float(n & 7) * 2.0 + 1.0)
  return [(scale, scale * (_float(n >> 3) * -0.25 + 0.125))]
def _iq1m(p:UnitView) -> Scales:
  d, pair = _float(p.at("d")), _unit_six(p)
  return [(d * (_float((pair >> h) & 7) * 0.25 + 0.125), None) for h in (0, 3)]   # the eighths of its values
def _iq2xxs(p:UnitView) -> Scales: return [(_float(p.at("d")) * (_float(_unit_nibble(p)) * 0.25 + 0.125), None)]
def _iq2xs(p:UnitView) -> Scales:
  d, s = _float(p.at("d")), p.at("s").cast(dtypes.uint32)
  return [(d * (_float((s >> h) & 15) * 0.25 + 0.125), None) for h in (0, 4)]
def _iq3xxs(p:UnitView) -> Scales: return [(_float(p.at("d")) * (_float(_unit_nibble(p)) * 0.5 + 0.25), None)]
def _iq3s(p:UnitView) -> Scales:
  half = _float(p.at("d")) * (_float(_unit_nibble(p)) * 2.0 + 1.0)
  return [(half * 2.0, half)]   # odd values: 2 · (code - 8) + 1
def _mxfp4(p:UnitView) -> Scales:
  # a power of two, 2^(e-128): the exponent's bits of a float32, or a denormal below 2^-126
  e = p.at("d").cast(dtypes.uint32)
  return [((e < 2).where(e * 0x200000 + 0x200000, (e.maximum(1) - 1) << 23).bitcast(dtypes.float), None)]

# ---- the table ----

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # E2M1 times 2: the scale, 2^(e-128), has the half
IQ1M_VALUES = (-7, 1, 9, 0, -9, -1, 7, 0)  # -1, 0 and 1, plus or minus an eighth, in eighths
IQ2_VALUES = (8, 25, 43, 0, -8, -25, -43, 0)
IQ3_VALUES = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)

@dataclass(frozen=True)
class Lookups:
  """What blocks say by indices into a table. index: raw blocks -> uint32 (n, lookups). table: uint32. What is found comes behind the block's bytes, a
  number each, when `codes` splits it."""
  index: Callable[[Raw], Raw]
  table: Callable[[], np.ndarray]

@dataclass(frozen=True)
class Format:
  """One row of FORMATS. `codes` and `small` split raw blocks, uint32 (n, bytes a block), at load; `scales` reads the small planes back.
  value(code) is code - zero, or values[code] where there is a table."""
  widths: tuple[int, ...]                          # bits of each code plane, the low bits first
  codes: Callable[[Raw], Raw]
  small: Callable[[Raw], Planes]
  scales: Callable[[UnitView], Scales]
  zero: int = 0
  values: tuple[int, ...]|None = None
  unit_planes: tuple[str, ...] = ()                # the small planes with an entry a unit; the others have one a block
  lookups: Lookups|None = None

def _small_d(at:int) -> Callable[[Tensor], Planes]: return lambda r: {"d": _half(r[:, at:])}
def _small_d_m(at:int) -> Callable[[Tensor], Planes]: return lambda r: {"d": _half(r[:, at:]), "m": _half(r[:, at+2:])}

FORMATS: dict[GGMLType, Format] = {
  GGMLType.Q4_0: Format((4,), lambda r: _nibbles(r[:, 2:18], 16), _small_d(0), _d, zero=8),
  GGMLType.Q4_1: Format((4,), lambda r: _nibbles(r[:, 4:20], 16), _small_d_m(0), _d_m),
  GGMLType.Q5_0: Format((4, 1), lambda r: _nibbles(r[:, 6:22], 16) | (_bits(r[:, 2:6]) << 4), _small_d(0), _d, zero=16),
  GGMLType.Q5_1: Format((4, 1), lambda r: _nibbles(r[:, 8:24], 16) | (_bits(r[:, 4:8]) << 4), _small_d_m(0), _d_m),
  GGMLType.Q8_0: Format((8,), lambda r: r[:, 2:34] ^ 128, _small_d(0), _d, zero=128),  # signed bytes, made unsigned like the rest
  GGMLType.Q2_K: Format((2,), lambda r: _crumbs(r[:, 16:80]), lambda r: {"s": _pairs(r[:, 0:16]), **_small_d_m(80)(r)}, _q2k, unit_planes=("s",)),
  GGMLType.Q3_K: Format((2, 1), lambda r: _crumbs(r[:, 32:96]) | (_bit_of_group(r[:, 0:32]) << 2),
                        lambda r: {**_q3_scales(r[:, 96:108]), **_small_d(108)(r)}, _q3k, zero=4, unit_planes=("s",)),
  GGMLType.Q4_K: Format((4,), lambda r: _nibbles(r[:, 16:144], 32), lambda r: {**_k_scales(r[:, 4:16]), **_small_d_m(0)(r)}, _k, unit_planes=("s",)),
  GGMLType.Q5_K: Format((4, 1), lambda r: _nibbles(r[:, 48:176], 32) | (_bit_of_group(r[:, 16:48]) << 4),
                        lambda r: {**_k_scales(r[:, 4:16]), **_small_d_m(0)(r)}, _k, unit_planes=("s",)),
  GGMLType.Q6_K: Format((4, 2), lambda r: _nibbles(r[:, 0:128], 64) | (_crumbs(r[:, 128:192]) << 4),
                        lambda r: {"s": _pairs(r[:, 192:208]), **_small_d(208)(r)}, _q6k, zero=32, unit_planes=("s",)),
  GGMLType.IQ4_NL: Format((4,), lambda r: _nibbles(r[:, 2:18], 16), _small_d(0), _d, values=IQ4_VALUES),
  GGMLType.IQ4_XS: Format((4,), lambda r: _nibbles(r[:, 8:136], 16),
                          lambda r: {"s": (r[:, 4:8] << _steps(r, 4, 8)).sum(-1, keepdim=True, dtype=dtypes.uint32), "t": _pairs(r[:, 2:4]),
                                     **_small_d(0)(r)}, _iq4xs, values=IQ4_VALUES),
  GGMLType.MXFP4: Format((4,), lambda r: _nibbles(r[:, 1:17], 16), lambda r: {"d": r[:, 0:1].cast(dtypes.uint8)}, _mxfp4, values=FP4_VALUES),
  GGMLType.IQ1_S: Format((2,), lambda r: _fields(r[:, 50:82], 2, 8), lambda r: {**_nibble_a_unit(_words(r[:, 34:50], 2) >> 12), **_small_d(0)(r)},
                         _iq1s, zero=1, lookups=Lookups(lambda r: r[:, 2:34] | (_fields(_words(r[:, 34:50], 2), 3, 4) << 8),
                                                        lambda: _in_words(_grid(GGMLType.IQ1_S), 2))),
  GGMLType.IQ1_M: Format((2, 1), lambda r: _fields(r[:, 56:88], 3, 8), lambda r: _iq1m_scales(r[:, 48:56]), _iq1m, values=IQ1M_VALUES,
                         lookups=Lookups(lambda r: r[:, 0:32] | (_fields(r[:, 32:48], 4, 2) << 8), lambda: _grid_plus_or_minus(GGMLType.IQ1_M))),
  GGMLType.IQ2_XXS: Format((2, 1), lambda r: _with_signs(_fields(r[:, 66:98], 2, 8), _bits(r[:, 98:130]), 2),
                           lambda r: {**_nibble_a_unit(_words(r[:, 2:66], 4)[:, 1::2] >> 28), **_small_d(0)(r)}, _iq2xxs, values=IQ2_VALUES,
                           lookups=Lookups(lambda r: _fields(_words(r[:, 2:66], 4)[:, 0::2], 8, 4).cat(
                                             _sign_indices(_words(r[:, 2:66], 4)[:, 1::2], 256), dim=1),
                                           lambda: _grid_and_signs(GGMLType.IQ2_XXS, 2))),
  GGMLType.IQ2_XS: Format((2, 1), lambda r: _with_signs(_fields(r[:, 74:106], 2, 8), _bits(r[:, 106:138]), 2),
                          lambda r: {"s": r[:, 66:74].cast(dtypes.uint8), **_small_d(0)(r)}, _iq2xs, values=IQ2_VALUES, unit_planes=("s",),
                          lookups=Lookups(lambda r: (_words(r[:, 2:66], 2) & 511).cat((_words(r[:, 2:66], 2) >> 9) | 512, dim=1),
                                          lambda: _grid_and_signs(GGMLType.IQ2_XS, 2))),
  GGMLType.IQ2_S: Format((2, 1), lambda r: _with_signs(_fields(r[:, 82:114], 2, 8), _bits(r[:, 34:66]), 2),
                         lambda r: {"s": r[:, 74:82].cast(dtypes.uint8), **_small_d(0)(r)}, _iq2xs, values=IQ2_VALUES, unit_planes=("s",),
                         lookups=Lookups(lambda r: r[:, 2:34] | (_fields(r[:, 66:74], 2, 4) << 8), lambda: _in_words(_grid(GGMLType.IQ2_S), 2))),
  GGMLType.IQ3_XXS: Format((4,), lambda r: _with_signs(_fields(r[:, 98:162], 3, 4), _bits(r[:, 162:194]), 3),
                           lambda r: {**_nibble_a_unit(_words(r[:, 66:98], 4) >> 28), **_small_d(0)(r)}, _iq3xxs, values=IQ3_VALUES,
                           lookups=Lookups(lambda r: r[:, 2:66].cat(_sign_indices(_words(r[:, 66:98], 4), 256), dim=1),
                                           lambda: _grid_and_signs(GGMLType.IQ3_XXS, 3))),
  GGMLType.IQ3_S: Format((4,), lambda r: _fields(r[:, 110:174], 4, 4), lambda r: {**_nibble_a_unit(_fields(r[:, 106:110], 4, 2)), **_small_d(0)(r)},
                         _iq3s, zero=8, lookups=Lookups(lambda r: r[:, 2:66] | (_bits(r[:, 66:74]) << 8) | (_fields(r[:, 74:106], 4, 2) << 9),
                                                        lambda: _signed_grid(GGMLType.IQ3_S))),
  GGMLType.TQ1_0: Format((2,), lambda r: _digits(r[:, 54:86], 5).cat(_digits(r[:, 86:102], 5), dim=1).cat(_digits(r[:, 102:106], 4), dim=1),
                         _small_d(52), _d, zero=1, lookups=Lookups(lambda r: r[:, 0:52], _trits)),
  GGMLType.TQ2_0: Format((2,), lambda r: _crumbs(r[:, 0:64]), _small_d(64), _d, zero=1),
}
FLOATS: dict[GGMLType, DType] = {GGMLType.F32: dtypes.float32, GGMLType.F16: dtypes.half, GGMLType.BF16: dtypes.bfloat16}
def float_plane(kind:GGMLType, width:int, device:str|None=None) -> DType:
  """Of a float matrix' plane. Where there are kernels an entry of 16-bit ones is two neighbours, the first in its low half: of uint32 a lane loads
  16 bytes at once, of halves 8, of uint16 2"""
  if kind is GGMLType.F32: return dtypes.float
  if device is not None and width % UNIT == 0 and target_of(device) is not None: return dtypes.uint32
  return dtypes.half if kind is GGMLType.F16 else dtypes.uint16

# ---- planes at load, and back: the plain-ops reference ----

def block_size(kind:GGMLType) -> tuple[int, int]:
  """(weights a block, bytes a block)"""
  return GGML_QUANT_SIZES[kind]

def _place(like:Raw, width:int) -> Raw:
  """(8/width, 4): where the codes of a word lie in a plane of `width` bits"""
  return _steps(like, 8 // width, width).reshape(-1, 1) + _steps(like, 4, 8)

@functools.cache
def lookup_table(kind:GGMLType) -> np.ndarray|None:
  lookups = FORMATS[kind].lookups if kind in FORMATS else None
  return None if lookups is None else lookups.table().view(Numbers)
@functools.cache
def lookup_table_on(kind:GGMLType, device:str) -> Tensor|None: return None if (entries := lookup_table(kind)) is None else to_device(entries, device)

def split_planes(kind:GGMLType, shape:tuple[int, ...], raw:Raw, entries:Raw|None=None) -> Planes:
  """The planes of a matrix, unrealized. raw: uint8, the tensor's bytes as in the file; shape: (…, out, in); entries: the type's table.
  Code planes are named q0, q1 and have shape (…, out, units, words a unit); the others (…, out, units or blocks). A float matrix is one
  plane w."""
  if kind in FLOATS:
    plane = float_plane(kind, shape[-1], raw.device if isinstance(raw, Tensor) else None)
    return {"w": raw.bitcast(plane).reshape(*shape[:-1], -1)}
  blocks = raw.reshape(-1, block_size(kind)[1]).cast(dtypes.uint32)
  if (lookups := FORMATS[kind].lookups) is None: return _planes(kind, shape, blocks)
  if entries is None: entries = lookup_table_on(kind, raw.device) if isinstance(raw, Tensor) else lookup_table(kind)
  return _planes(kind, shape, blocks.cat(entries[lookups.index(blocks)].cast(dtypes.uint32), dim=1))

def _planes(kind:GGMLType, shape:tuple[int, ...], blocks:Raw) -> Planes:
  """blocks: uint32 (n, bytes a block and what was looked up)"""
  fmt, rows = FORMATS[kind], shape[:-1]
  codes, planes, low = fmt.codes(blocks).reshape(-1, UNIT), {}, 0
  for i, width in enumerate(fmt.widths):
    parts = ((codes >> low) & ((1 << width) - 1)).reshape(codes.shape[0], width, 8 // width, 4)
    planes[f"q{i}"] = (parts << _place(blocks, width)).sum((-2, -1), dtype=dtypes.uint32).reshape(*rows, -1, width)
    low += width
  for name, p in fmt.small(blocks).items(): planes[name] = p.reshape(*rows, -1)
  return planes

HEADER_BYTES = 4, 8, 16   # what a lane loads at once

class Field(NamedTuple):
  """A small plane's share of a block's header: its entries, one or one a unit, from byte `at` on"""
  dtype: DType
  entries: int
  at: int

Header = dict[str, Field]   # by the plane's name

@functools.cache
def header_of(kind:GGMLType, dims:int=2) -> Header:
  """Of a matrix of so many dimensions. Empty: the format has none, or the matrix is a stack: in a launch that chooses experts a lane has no registers
  for one"""
  header, end = {}, 0
  for name, field in interleaved(kind).fields.items() if kind in FORMATS and dims == 2 else ():
    if name.startswith("q"): continue
    entries = field.entries * (interleaved(kind).units if field.in_unit else 1)
    header[name] = Field(field.dtype, entries, end)
    end += field.dtype.itemsize * entries
  return header if len(header) > 1 and end in HEADER_BYTES else {}

def with_header(kind:GGMLType, shape:tuple[int, ...], planes:Planes) -> Planes:
  """A matrix's planes as a GPU holds them; the header is uint32 (out, blocks · words of a header)"""
  if not (header := header_of(kind, len(shape))): return planes
  def in_bytes(name:str) -> Raw:
    p, field = planes[name], header[name]
    numbers = (p.bitcast(dtypes.uint16) if field.dtype == dtypes.half else p).cast(dtypes.uint32).reshape(-1, field.entries)
    return _fields(numbers, 8, field.dtype.itemsize)
  words = _words(functools.reduce(lambda a, b: a.cat(b, dim=1), map(in_bytes, header)), 4)
  return {name: p for name, p in planes.items() if name not in header} | {"header": words.reshape(shape[0], -1)}

def _of_header(field:Field, word:Callable[[int], Any], index:Any) -> Any:
  """A small plane's entry, the unit's if each has one, from the header's words; index: the unit's place in its block"""
  first, bits = field.at // 4, 8 * field.dtype.itemsize
  if field.entries == 1: entry = word(first) >> (field.at % 4 * 8)
  else: entry = (index < 32 // bits).where(word(first), word(first + 1)) >> ((index % (32 // bits)).cast(dtypes.uint32) * bits)
  if bits == 32: return entry
  entry = (entry & ((1 << bits) - 1)).cast(dtypes.uint8 if bits == 8 else dtypes.uint16)
  return entry.bitcast(field.dtype) if field.dtype == dtypes.half else entry

def _table(code, values:tuple[int, ...]):
  """float32 values[code] as a tree of selects on the code's bits; code: uint32, a tensor or a kernel's value"""
  half = len(values) // 2
  low, high = (float(values[0]), float(values[1])) if half == 1 else (_table(code, values[:half]), _table(code, values[half:]))
  return (code & half).eq(0).where(low, high)

def dequantize(kind:GGMLType, planes:Planes) -> Tensor:
  """float32 (…, out, in), unrealized: it is meant to fuse into the product that reads it"""
  if kind in FLOATS:
    w = planes["w"]
    if w.dtype == dtypes.uint32: w = (w.unsqueeze(-1) >> _steps(w, 2, 16)).flatten(-2).cast(dtypes.uint16)
    return (w.cast(dtypes.uint32) << 16).bitcast(dtypes.float) if kind is GGMLType.BF16 else w.bitcast(FLOATS[kind]).cast(dtypes.float)
  fmt, upb = FORMATS[kind], block_size(kind)[0] // UNIT
  *rows, units, _ = planes["q0"].shape
  code, low = None, 0
  for i, width in enumerate(fmt.widths):
    part = ((planes[f"q{i}"].reshape(*rows, units, width, 1, 1) >> _place(planes["q0"], width)) & ((1 << width) - 1)) << low
    part = part.reshape(*rows, units, UNIT)
    code, low = part if code is None else code | part, low + width
  assert code is not None
  index = (Tensor.arange(units, dtype=dtypes.uint32) % upb).unsqueeze(-1)
  def spread(p:Tensor) -> Tensor:
    """Over the weights, before anything is computed: what is computed and then spread would be a kernel of its own"""
    return p.unsqueeze(-1).expand(*p.shape, units * UNIT // p.shape[-1]).reshape(*rows, units, UNIT)
  def at(name:str) -> Tensor:
    if "header" not in planes: return spread(planes[name])
    words = planes["header"].reshape(*rows, units // upb, -1)
    return _of_header(header_of(kind)[name], lambda i: spread(words[..., i]), index)
  value = _table(code, fmt.values) if fmt.values else code.cast(dtypes.float) - float(fmt.zero)
  groups = fmt.scales(UnitView(at, index))
  first_half = Tensor.arange(2).reshape(2, 1).expand(2, UNIT // 2).reshape(UNIT).eq(0)
  def of_weight(xs:list[Tensor]) -> Tensor: return xs[0] if len(xs) == 1 else first_half.where(*xs)
  weight = value * of_weight([s for s, _ in groups])
  if groups[0][1] is not None: weight = weight + of_weight([m for _, m in groups])
  return weight.reshape(*rows, units * UNIT)

# ---- in a kernel ----

def _unit_scales(kind:GGMLType, units:int, plane:Callable[[str, Any], Any], row:Any, unit:Any, header:Header|None=None) -> Scales:
  """header: as header_of has it, where the planes have one"""
  fmt, upb = FORMATS[kind], block_size(kind)[0] // UNIT
  block = row * units + unit if upb == 1 else row * (units // upb) + unit // upb
  words = sum(field.dtype.itemsize * field.entries for field in (header or {}).values()) // 4
  loaded = [plane("header", block * words + i) for i in range(words)]
  def at(name:str) -> Any:
    if header: return _of_header(header[name], loaded.__getitem__, index)
    return plane(name, row * units + unit if name in fmt.unit_planes else block)
  index = cpu.CExpr(f"((v16u)({unit % upb}u))", dtypes.uint32) if isinstance(unit, int) else unit % upb
  return fmt.scales(UnitView(at, index))

def _of_floats(floats:list) -> Unit: return Unit([], [(floats[0].const_like(1.0), None)], floats=floats)

def _unit_of_pairs(kind:GGMLType, units:int, plane:Callable[[str, UOp], UOp], row:UOp, unit:UOp, piece:int) -> Unit:
  """_unit of floats of which two are an entry"""
  words = [plane("w", row * (units * UNIT // 2) + quad * 2 + i) for quad in spread_quads(unit, piece) for i in range(2)]
  if kind is GGMLType.F16: return _of_floats([half for w in words for half in of_pair(w)])
  return _of_floats([half.bitcast(dtypes.float) for w in words for half in (w << 16, w & 0xffff0000)])

def _unit(kind:GGMLType, units:int, plane:Callable[[str, UOp], UOp], row:UOp, unit:UOp, look_up:Callable|None=None, piece:int=0,
          header:Header|None=None) -> Unit:
  """One unit of a row of `units`. plane(name, index) loads an entry of a flat plane. look_up(words, nibbles, values): a table's values as codes,
  and their zero. piece: the unit is that of spread_quads. header: see _unit_scales."""
  if kind in FLOATS:
    words = [plane("w", row * (units * UNIT) + quad * 4 + i) for quad in spread_quads(unit, piece) for i in range(4)]
    if kind is GGMLType.BF16: words = [(w.cast(dtypes.uint32) << 16).bitcast(dtypes.float) for w in words]
    return _of_floats([w.cast(dtypes.float) for w in words])
  fmt = FORMATS[kind]
  loaded = [[plane(f"q{i}", (row * units + unit) * width + w) for w in range(width)] for i, width in enumerate(fmt.widths)]
  def word(j:int) -> UOp:  # the codes of the weights 4j … 4j+3
    codes, low = None, 0
    for words, width in zip(loaded, fmt.widths):
      part = words[j] if width == 8 else (words[j // (8 // width)] >> (width * (j % (8 // width)))) & (((1 << width) - 1) * 0x01010101)
      codes, low = part if codes is None else codes | (part << low), low + width
    assert codes is not None
    return codes
  words, scales = [word(j) for j in range(8)], _unit_scales(kind, units, plane, row, unit, header)
  nibbles = loaded[0] if fmt.widths == (4,) else None
  if fmt.values is None: return Unit(words, scales, fmt.zero, nibbles=nibbles, bits=sum(fmt.widths))
  if look_up is not None:
    words, zero = look_up(words, nibbles, fmt.values)
    return Unit(words, scales, zero)
  return Unit([], scales, floats=[_table((words[i // 4] >> (8 * (i % 4))) & 255, fmt.values) for i in range(UNIT)])

# ---- weights of a model ----

BIG = 1 << 24  # bytes

def split(kind:GGMLType, shape:tuple[int, ...], raw:Tensor, entries:Tensor|None) -> tuple[Tensor, ...]:
  return tuple(with_header(kind, shape, split_planes(kind, shape, raw, entries)).values())

def prepare(tensors:Iterable[tuple[GGMLType, tuple[int, ...]]], device:str|None=None) -> None:
  """Compiles what loading such weights launches, all beside each other"""
  device = device or Device.DEFAULT
  replay = Replay()
  for kind, shape in sorted(set(tensors)):
    elements, nbytes = block_size(kind)
    if kind not in FORMATS or packed(shape, device): continue
    raw = Tensor.empty(prod(shape) // elements * nbytes, dtype=dtypes.uint8, device=device)
    replay.run(split, kind, shape, raw, lookup_table_on(kind, device))
  replay.compile()

def packed(shape:tuple[int, ...], device:str) -> bool:
  """Whether the CPU's kernels take such a matrix, as one interleaved stream"""
  return cpu.is_cpu(device) and device.startswith("CPU") and shape[-1] % UNIT == 0

@functools.cache
def plane_names(kind:GGMLType, dims:int) -> tuple[str, ...]:
  """As a GPU holds them, of a matrix of so many dimensions"""
  header = header_of(kind, dims)
  return (*(name for name in interleaved(kind).fields if name not in header), *(["header"] if header else []))

def _free_cached(device:str) -> None:
  """Device memory that only tinygrad's cache holds on to goes back, before the next tensor takes its own"""
  Device[device].synchronize()
  if not isinstance(allocator := Device[device].allocator, LRUAllocator): return
  for (size, options), kept in allocator.cache.items():
    while kept and not (options and options.host): super(LRUAllocator, allocator).free(kept.pop(), size, options)

@functools.cache
def interleaved(kind:GGMLType) -> Layout:
  """The layout of the CPU's kernels"""
  elements, nbytes = block_size(kind)
  units = max(elements // UNIT, 1)
  planes = split_planes(kind, (1, units * UNIT), np.zeros(units * UNIT // elements * nbytes, np.uint8).view(Numbers))
  return Layout({name: (_from_np_dtype(p.dtype), p.size) for name, p in planes.items()}, units)

def _numbered(nbytes:int) -> np.ndarray:
  """uint8 (digits, nbytes): blocks that hold the numbers of their bits, from 1 on, a binary digit a block; the first block holds none"""
  number = np.arange(1, nbytes * 8 + 1)
  digits = [0 * number, *(number >> i & 1 for i in range(int(number[-1]).bit_length()))]
  return np.packbits(np.uint8(digits), axis=1, bitorder="little")
def _traced(entries:np.ndarray) -> Origins:
  """Where the bits of entries come from that were made of _numbered's blocks. What is set in the first block is inverted."""
  entries = np.ascontiguousarray(entries).reshape(len(entries), -1)
  bits = np.unpackbits(entries.view(np.uint8), axis=1, bitorder="little").reshape(*entries.shape, -1)
  digits = np.arange(len(bits) - 1, dtype=np.uint32).reshape(-1, 1, 1)
  return Origins(((bits[1:] ^ bits[0]).astype(np.uint32) << digits).sum(0), bits[0])

@functools.cache
def packer(kind:GGMLType, device:str) -> Packer:
  """The CPU's way from a file's blocks to the layout. Planes hold bits of the file, or of what is looked up, rearranged: which bit goes where is seen
  in the planes of blocks that hold the numbers of their bits. So it is with indices."""
  layout, (elements, nbytes), entries = interleaved(kind), block_size(kind), lookup_table(kind)
  nbytes *= layout.units * UNIT // elements
  def planes_of(blocks:np.ndarray) -> dict[str, Origins]:
    shape = (len(blocks), layout.units * UNIT)
    if entries is None: planes = split_planes(kind, shape, blocks.reshape(-1).view(Numbers))
    else: planes = _planes(kind, shape, blocks[:, :nbytes].astype(np.uint32).view(Numbers).cat(blocks[:, nbytes:].copy().view(np.uint32), dim=1))
    return {name: _traced(p.reshape(len(blocks), -1)) for name, p in planes.items()}
  if entries is None: return Packer(layout, planes_of(_numbered(nbytes)), nbytes, device)
  index = _traced(FORMATS[kind].lookups.index(_numbered(nbytes).astype(np.uint32).view(Numbers)))
  return Packer(layout, planes_of(_numbered(nbytes + 4 * len(index.bits))), nbytes, device, index, entries)

def held_bytes(kind:GGMLType, shape:tuple[int, ...]) -> int:
  """Of a matrix's planes. Where the file has indices it is smaller."""
  layout = interleaved(kind)
  return prod(shape) * layout.nbytes // (layout.units * UNIT * ROWS)

def deinterleave(layout:Layout, shape:tuple[int, ...], stream:Tensor) -> Planes:
  """The planes of a stream, unrealized"""
  def back(name:str, p:Tensor) -> Tensor: return p.reshape(*p.shape[:-1], shape[-1] // UNIT, -1) if name.startswith("q") else p
  return {name: back(name, p) for name, p in layout.planes(shape, stream).items()}

class QuantizedWeight:
  """A matrix, or a stack of them, in its GGUF type on the device. shape: (…, out, in); planes as split_planes lays them out."""
  def __init__(self, kind:GGMLType, shape:tuple[int, ...], planes:Planes):
    self.kind, self.shape, self.planes = kind, shape, planes
    self.layout = interleaved(kind) if "stream" in planes else None
  @classmethod
  def load(cls, kind:GGMLType, shape:tuple[int, ...], data:np.ndarray, device:str|None=None) -> Self:
    """data: uint8, the tensor's bytes as in the file. They are copied once to the device, by default the one that tinygrad takes; the copy is freed
    when the planes stand."""
    device = device or Device.DEFAULT
    if packed(shape, device): return cls(kind, shape, {"stream": packer(kind, device)(shape, data)})
    if kind in FLOATS:
      return cls(kind, shape, {"w": to_device(data.view(_to_np_dtype(float_plane(kind, shape[-1], device))).reshape(*shape[:-1], -1), device)})
    replay = Replay()
    planes = replay.run(split, kind, shape, to_device(data, device), lookup_table_on(kind, device))
    planes = dict(zip(plane_names(kind, len(shape)), planes, strict=True))
    with Context(JIT=2): replay()  # kernels one by one: a graph would be made anew for each tensor
    if data.size >= BIG: _free_cached(device)
    return cls(kind, shape, planes)
  def __getitem__(self, index:Tensor) -> QuantizedWeight:
    """Rows, or matrices of a stack, by a tensor of indices; nothing is read until the result is"""
    shape = (*index.shape, *self.shape[1:])
    planes = self.planes if len(self.shape) > 2 else self.plain_planes  # rows lie interleaved, matrices of a stack do not
    return QuantizedWeight(self.kind, shape, {name: p[index] for name, p in planes.items()})
  @property
  def plain_planes(self) -> Planes:
    """The planes as split_planes lays them out, interleaved or not"""
    return self.planes if self.layout is None else deinterleave(self.layout, self.shape, self.planes["stream"])
  def dequantize(self) -> Tensor: return dequantize(self.kind, self.plain_planes)
  def brought(self, device:str) -> Self:
    """A copy on a device that is no CPU, unrealized. What lies interleaved is copied so, and taken apart there"""
    copies = type(self)(self.kind, self.shape, {name: p.to(device) for name, p in self.planes.items()})
    return type(self)(self.kind, self.shape, {name: p.contiguous() for name, p in copies.plain_planes.items()})
  def unit_of_block(self, plane:Callable[[str, int], cpu.CExpr], u:int) -> Unit:
    """The unit u of a block in C; plane(name, index) is an entry of the block's planes"""
    return _unit(self.kind, self.layout.units, plane, 0, u, cpu.table_codes)
  def args(self, name:str) -> dict[str, Tensor]:
    """The planes as a kernel's arguments"""
    return {f"{name}.{plane}": t for plane, t in self.planes.items()}
  def matrix(self, buffers:dict[str, UOp], name:str, spread:bool=False) -> Matrix:
    """What a kernel reads the weights with; a stack's rows are numbered through. spread: units are those of spread_quads, where floats can be"""
    def unit(row:UOp, u:UOp, gate:UOp|None) -> Unit:
      def plane(which:str, at:UOp) -> UOp: return buffers[f"{name}.{which}"][at if gate is None else at.valid(gate)].load()
      units, piece = self.shape[-1] // UNIT, self.piece if spread else 0
      if self.pairs: return _unit_of_pairs(self.kind, units, plane, row, u, piece)
      return _unit(self.kind, units, plane, row, u, self.look_up, piece, self.header)
    return unit
  # what a kernel that is text needs to know
  @property
  def widths(self) -> tuple[int, ...]: return FORMATS[self.kind].widths if self.kind in FORMATS else ()
  @property
  def fields(self) -> int: return len(interleaved(self.kind).fields)
  @property
  def header(self) -> Header|None: return header_of(self.kind) if "header" in self.planes else None
  @property
  def zero(self) -> int: return FORMATS[self.kind].zero
  def scales(self, plane:Callable[[str, Any], Any], row:Any, unit:Any) -> Scales:
    """Of a unit of a row, from the planes' entries plane(name, index): whatever takes the operators of the formulas above"""
    return _unit_scales(self.kind, self.shape[-1] // UNIT, plane, row, unit, self.header)
  @property
  def label(self) -> str: return "_".join([self.kind.name.lower(), *map(str, self.shape)])
  @property
  def integer(self) -> bool:
    """Whether an int8 dot product can take the codes"""
    return self.kind in FORMATS and (not self.looks_up or self.look_up is not None)
  @property
  def look_up(self) -> Callable|None:
    """What makes codes of a table's values in a kernel of the weight's device, see _unit. None: it has no bytes to permute"""
    target = target_of(self.device)
    return None if target is None or target.byte_perm is None else functools.partial(table_codes, target)
  @property
  def looks_up(self) -> bool: return self.kind in FORMATS and FORMATS[self.kind].values is not None
  @property
  def piece(self) -> int:
    """Numbers of 16 bytes of a row's floats that can be spread (spread_quads); 0: there are none"""
    return 16 // FLOATS[self.kind].itemsize if self.kind in FLOATS and self.shape[-1] % (SPREAD * UNIT) == 0 else 0
  @property
  def pairs(self) -> bool:
    """Whether an entry of the floats' plane is two of them"""
    return self.kind in FLOATS and self.planes["w"].dtype == dtypes.uint32
  @property
  def device(self) -> str: return next(iter(self.planes.values())).device
  @property
  def nbytes(self) -> int: return sum(p.nbytes() for p in self.planes.values())

class QuantizedEmbedding(QuantizedWeight):
  def __call__(self, ids:Tensor) -> Tensor:
    """ids: (T,) integers -> float32 (T, dim)"""
    return embedding(ids, self)

class QuantizedLinear(QuantizedWeight):
  def __call__(self, x:Tensor) -> Tensor:
    """x: float32 (T, in) -> (T, out); for a stack of matrices, one a head: (T, H, in) -> (T, H, out)"""
    return mul_mat(x, self)

class QuantizedExpertWeights(QuantizedWeight):
  def __call__(self, x:Tensor, sel:Tensor) -> Tensor:
    """mul_mat_id: x: float32 (T, 1 or K, in), sel: int32 (T, K), the chosen matrices of each token -> (T, K, out)"""
    return mul_mat(x, self, sel)

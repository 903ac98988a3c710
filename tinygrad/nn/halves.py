"""Numbers as halves, two in a word: how units of weights become what tensor cores take.

A code set into the mantissa of the half 4 is 4 + code / 256; sixteen times the code, 4 + code / 16. What is added makes value / 256 of both, exactly.
A scale times 256 is further from a half's denormals than the scale.
"""
from __future__ import annotations
import struct
from tinygrad import UOp, dtypes
from tinygrad.nn.intrinsics import Target, byte_perm, fma_halves, word
from tinygrad.nn.kernel import UNIT, Unit
from tinygrad.uop.ops import Ops

FOUR, FOURS = 0x44004400, 0x44444444   # in each half; in each byte, its upper one
SCALE_UP = 256.0
QUADS = UNIT // 4

def halves(x:float) -> UOp: return word(int.from_bytes(struct.pack("<2e", x, x), "little"))
def half_bits(x:UOp) -> UOp: return x.cast(dtypes.half).bitcast(dtypes.uint16).cast(dtypes.uint32)
def half_pair(low:UOp, high:UOp) -> UOp: return half_bits(low) | (half_bits(high) << 16)
def of_pair(word:UOp) -> list[UOp]:
  """The halves of a word, as float32"""
  return [half.cast(dtypes.uint16).bitcast(dtypes.half).cast(dtypes.float) for half in (word & 0xffff, word >> 16)]
def same_halves(x:UOp) -> UOp: return half_bits(x) * 0x10001

def rounding_error(value:UOp, of:UOp|int=0xffffffff) -> UOp:
  """value - half(value), but for the least halves. of: 0: the value itself"""
  bits = value.bitcast(dtypes.uint32)   # rounded in integers: tinygrad takes a half made of a float, and a float of that, for the same float
  return value - ((bits + 0xfff + ((bits >> 13) & 1)) & (of & 0xffffe000)).bitcast(dtypes.float)

def is_half(x:UOp) -> bool:
  """Whether a float32 is a half as it lies in memory"""
  return x.op is Ops.CAST and x.src[0].dtype == dtypes.half

def neighbours(target:Target, unit:Unit) -> list[list[UOp]]:
  """The unit dequantized, as good as float32 rounded to halves: by four weights two words, of neighbours.
  A scale or minimum that the file has as a half stays one. Of another scale the rounding error is multiplied too; another minimum becomes that of
  codes around zero, which is small where weights are around zero."""
  if unit.floats is not None:
    weights = unit.weights()
    return [[half_pair(*weights[i + pair:i + pair + 2]) for pair in (0, 2)] for i in range(0, UNIT, 4)]
  exact = all(x is None or is_half(x) for pair in unit.scales for x in pair)
  centre = unit.zero if exact or unit.zero else 1 << (unit.bits - 1)
  shift, factors = halves(-4 - centre / 256), []
  for scale, minimum in unit.scales:
    scaled_up = scale * SCALE_UP
    if minimum is not None and centre != unit.zero: minimum = minimum + scale * float(centre - unit.zero)
    start = word(0) if minimum is None else same_halves(minimum)
    factors.append((same_halves(scaled_up), None if exact else same_halves(rounding_error(scaled_up)), start))
  def pair_of(quad:int, digits:int) -> UOp:
    scale, error, start = factors[quad * len(factors) // QUADS]
    value = fma_halves(target, byte_perm(target, unit.words[quad], word(FOURS), digits), halves(1.0), shift)
    return fma_halves(target, value, scale, start if error is None else fma_halves(target, value, error, start))
  return [[pair_of(quad, digits) for digits in (0x4140, 0x4342)] for quad in range(QUADS)]

"""From logits to a token, in the graph. Greedy is temperature 0; else the order is: repeat penalty, temperature, top-k, top-p, min-p, draw."""
from __future__ import annotations
from dataclasses import dataclass
from numbers import Integral, Real
from tinygrad import Tensor, dtypes
from tinygrad.nn.embedding import argmax

LEAST = 1e-30  # but for 0: smaller ones, or what is divided by them, would be lost in float32

@dataclass(frozen=True)
class Sampling:
  temperature: float = 0.0     # 0: the most likely token
  top_k: int = 0               # keep the k most likely tokens; 0: all
  top_p: float = 1.0           # keep the fewest most likely tokens whose probabilities reach p
  min_p: float = 0.0           # keep tokens at least min_p times as likely as the most likely one
  repeat_penalty: float = 1.0  # divides positive logits of tokens already in the context, multiplies negative ones
  seed: int = 0

  def __post_init__(self) -> None:
    """Raises ValueError, one line, for a value out of range, and for one that the device's float32 would make 0 or infinite."""
    for name, kind, low, high in (("temperature", Real, 0, 1e4), ("top_p", Real, LEAST, 1), ("min_p", Real, 0, 1),
                                  ("repeat_penalty", Real, LEAST, 1e4), ("top_k", Integral, 0, (1 << 31) - 1), ("seed", Integral, 0, (1 << 32) - 1)):
      value = getattr(self, name)
      if isinstance(value, kind) and not isinstance(value, bool) and (value == low or max(low, LEAST) <= value <= high): continue
      expected = f"a whole number from 0 to {high}" if kind is Integral else f"{'' if low else '0, or '}from {LEAST:g} to {high:g}"
      found = f"one of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 64 else repr(value)
      raise ValueError(f"{name}: expected {expected}, found {found}")

  @property
  def features(self) -> Features:
    drawn = self.temperature > 0
    return Features(drawn, drawn and self.top_k > 0, drawn and self.top_p < 1, drawn and self.min_p > 0, self.repeat_penalty != 1)
  def values(self) -> list[float]: return [self.temperature, float(self.top_k), self.top_p, self.min_p, self.repeat_penalty]

@dataclass(frozen=True)
class Features:
  """What a graph must do; the numbers come in at run time, so that one graph serves every value."""
  draw: bool = False
  top_k: bool = False
  top_p: bool = False
  min_p: bool = False
  penalty: bool = False

def _ordered(x:Tensor) -> Tensor:
  """float32 -> uint32 in the same order"""
  bits = x.bitcast(dtypes.uint32)
  return (bits >> 31).eq(1).where(bits ^ 0xffffffff, bits | 0x80000000)

def _cutoff(keys:Tensor, mass:Tensor, target:Tensor) -> Tensor:
  """The largest key such that the mass at or above it reaches target, found four bits at a time: no sort.
  keys: uint32 (V,), mass: float32 (V,), target: float32 (1,) at most the whole mass -> uint32 (1,)"""
  low = Tensor.zeros(1, dtype=dtypes.uint32)
  for shift in range(28, -4, -4):
    steps = low + (Tensor.arange(16, dtype=dtypes.uint32) << shift)
    reached = ((keys >= steps.unsqueeze(1)).where(mass, 0.0).sum(1) >= target).cast(dtypes.uint32)  # (16,) ones, then zeros
    low = (low + ((reached.sum(keepdim=True).cast(dtypes.uint32).maximum(1) - 1) << shift)).contiguous()
  return low

def gumbel(bits:Tensor) -> Tensor:
  """uint32 -> float32 noise of Gumbel's distribution. Never infinite: the numbers whose logarithm is taken are odd multiples of 2^-24, which float32
  holds without rounding, up to 1 - 2^-24, and whose own is at least 2^-24, whatever a device's logarithm makes of it"""
  uniform = (bits >> 9).cast(dtypes.float) * 2.0 ** -23 + 2.0 ** -24
  return -(-uniform.log()).maximum(2.0 ** -24).log()

def sample(logits:Tensor, features:Features, values:Tensor, key:Tensor, counter:Tensor, seen:Tensor|None=None) -> Tensor:
  """logits: float32 (V,); values: float32 (5,), Sampling.values(); key, counter: uint32 (2,), the seed and the draw's number; seen: uint8 (V,),
  1 for the tokens of the context, needed for a penalty -> int32 (1,). Tokens that tie at a cut are kept; an argmax tie goes to the lower id."""
  temperature, top_k, top_p, min_p, penalty = (values[i:i+1] for i in range(5))
  if features.penalty:
    assert seen is not None
    logits = seen.eq(1).where((logits > 0).where(logits / penalty, logits * penalty), logits)
  if not features.draw: return argmax(logits)
  x = ((logits - logits.max(keepdim=True)) / temperature).contiguous()  # at most 0: no temperature is too low
  keep = x.isinf().logical_not()
  if features.top_k: keep = keep & (_ordered(x) >= _cutoff(_ordered(x), x.ones_like(), top_k.minimum(float(x.shape[0]))))
  if features.top_p:
    p = keep.where(x.exp(), 0.0).contiguous()
    # one part in a million less, so that p = 0.999999… of a rounded sum can always be reached
    keep = keep & (_ordered(x) >= _cutoff(_ordered(x), p, top_p * p.sum(keepdim=True) * (1 - 1e-6)))
  if features.min_p: keep = keep & (x >= min_p.log())
  # Gumbel's trick: the largest x + noise is a draw from softmax(x)
  return argmax(keep.where(x + gumbel(Tensor.random_bits(key, counter, x.shape[0])), float("-inf")))

"""The noise of a draw. The largest of logits + temperature · noise, where the noise is Gumbel's, is a draw from softmax(logits / temperature); at
temperature 0 it is the largest logit. The noise is made of a seed and the draw's number, so that a draw is the same whatever rows, or drafts, are
beside it.
"""
from __future__ import annotations
import math
from typing import Callable, NamedTuple, TypeVar
from tinygrad import Tensor, UOp, dtypes

class Noise(NamedTuple):
  """Of the draws of S rows. values: float32 (S, …), what a row is drawn by, its temperature first; key: uint32 (S, 2), a seed and 0; counter: int32
  (S,), the draw's number, which is the position"""
  values: Tensor
  key: Tensor
  counter: Tensor

HOTTEST = 1e30   # temperatures above would make infinities; long before, the logits no longer matter

def half_row(V:int) -> int:
  """The two words of a random number are those of a logit and of the one so far behind it"""
  return -(-V // 2)

def random_bits(key:Tensor, counter:Tensor, count:int) -> Tensor:
  """key: uint32 (S, 2); counter: int32 (S,) -> uint32 (S, count), each row the Tensor.random_bits(key, counter, count) of its own"""
  keys = (key[:, 1:].cast(dtypes.uint64) << 32) | key[:, :1].cast(dtypes.uint64)
  keys = counter.cast(dtypes.uint32).cast(dtypes.uint64).unsqueeze(1).threefry(keys)
  half, number = half_row(count), Tensor.arange(count, dtype=dtypes.uint32).to(key.device)
  first = number < half
  low = first.where(number, number - half).cast(dtypes.uint64)
  words = (((low + half) << 32) | low).threefry(keys)
  return first.where(words.cast(dtypes.uint32), (words >> 32).cast(dtypes.uint32))

Bits = TypeVar("Bits", Tensor, UOp)

def gumbel(bits:Bits) -> Bits:
  """uint32 -> float32 noise of Gumbel's distribution. Never infinite: the numbers whose logarithm is taken are odd multiples of 2^-24, which float32
  holds without rounding, up to 1 - 2^-24, and whose own is at least 2^-24, whatever a device's logarithm makes of it"""
  uniform = (bits >> 9).cast(dtypes.float) * 2.0 ** -23 + 2.0 ** -24
  return (uniform.log2() * -math.log(2)).maximum(2.0 ** -24).log2() * -math.log(2)

def noised(x:Tensor, noise:Noise|None) -> Tensor:
  """float32 (S, V), whose largest are drawn"""
  if noise is None: return x
  return x + noise.values[:, :1].minimum(HOTTEST) * gumbel(random_bits(noise.key, noise.counter, x.shape[1]))

# ---- in a kernel ----

def noise_of_row(buffers:dict[str, UOp], row:UOp, width:int, V:int) -> Callable[[UOp], tuple[UOp, UOp]]:
  """(number) -> temperature · noise of a row's logit of that number, and of the one half a row behind it. buffers: those of Noise's fields;
  width: of a row of values"""
  key = (buffers["key"][row * 2 + 1].load().cast(dtypes.uint64) << 32) | buffers["key"][row * 2].load().cast(dtypes.uint64)
  key = buffers["counter"][row].load().cast(dtypes.uint32).cast(dtypes.uint64).threefry(key)
  temperature = buffers["values"][row * width].load().minimum(HOTTEST)
  def of(number:UOp) -> tuple[UOp, UOp]:
    low = number.cast(dtypes.uint64)
    words = (((low + half_row(V)) << 32) | low).threefry(key)
    return temperature * gumbel(words.cast(dtypes.uint32)), temperature * gumbel((words >> 32).cast(dtypes.uint32))
  return of

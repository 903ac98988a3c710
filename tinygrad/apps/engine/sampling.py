"""From logits to tokens, in the graph, a row for each sequence of a batch. Greedy is temperature 0; else the order is: mask, bias, penalties,
temperature, top-k, top-p, min-p, draw.

A row's token depends on its own logits, values, seed and position alone, bit for bit: all sums over the vocabulary are of whole numbers, which come
out the same in whatever order a kernel adds them, and the noise of a row is made from its seed and position."""
from __future__ import annotations
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Mapping, Sequence
import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.nn.cutoff import cutoff
from tinygrad.nn.draw import argmax
from tinygrad.nn.kernel import ordered
from tinygrad.nn.noise import Noise, noised
from tinygrad.nn.nucleus import Nucleus, below_largest, within

LEAST = 1e-30  # but for 0: smaller ones, or what is divided by them, would be lost in float32
VALUES = 7     # numbers of a row of values
NUCLEUS = Nucleus(top_p=2, min_p=3)

@dataclass(frozen=True)
class Sampling:
  temperature: float = 0.0        # 0: the most likely token
  top_k: int = 0                  # keep the k most likely tokens; 0: all
  top_p: float = 1.0              # keep the fewest most likely tokens whose probabilities reach p
  min_p: float = 0.0              # keep tokens at least min_p times as likely as the most likely one
  repeat_penalty: float = 1.0     # divides positive logits of tokens already in the context, multiplies negative ones
  seed: int = 0
  presence_penalty: float = 0.0   # subtracted from the logits of tokens produced so far
  frequency_penalty: float = 0.0  # … once for each time that the token was produced
  bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # added to the logits of tokens, before everything else; -inf forbids one

  def __post_init__(self) -> None:
    """Raises ValueError, one line, for a value out of range, and for one that the device's float32 would make 0 or infinite."""
    for name, kind, low, high in (("temperature", Real, 0, 1e4), ("top_p", Real, LEAST, 1), ("min_p", Real, 0, 1),
                                  ("repeat_penalty", Real, LEAST, 1e4), ("presence_penalty", Real, -2, 2), ("frequency_penalty", Real, -2, 2),
                                  ("top_k", Integral, 0, (1 << 31) - 1), ("seed", Integral, 0, (1 << 32) - 1)):
      value = getattr(self, name)
      least = low if low < 0 else max(low, LEAST)
      if isinstance(value, kind) and not isinstance(value, bool) and (value == low or least <= value <= high): continue
      expected = f"a whole number from 0 to {high}" if kind is Integral else f"{'' if low else '0, or '}from {least:g} to {high:g}"
      raise ValueError(f"{name}: expected {expected}, found {_shown(value)}")
    if not isinstance(self.bias, Mapping): raise ValueError(f"bias: expected numbers by token, found {type(self.bias).__name__}")
    for token, value in self.bias.items():
      if not isinstance(token, Integral) or isinstance(token, bool) or token < 0:
        raise ValueError(f"bias: expected a token's number, found {_shown(token)}")
      if not isinstance(value, Real) or isinstance(value, bool) or not (value == float("-inf") or abs(value) <= 1e4):
        raise ValueError(f"bias of token {_shown(token)}: expected -inf, or from -10000 to 10000, found {_shown(value)}")

  @property
  def features(self) -> Features:
    drawn, penalty = self.temperature > 0, self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
    return Features(drawn, drawn and self.top_k > 0, drawn and self.top_p < 1, drawn and self.min_p > 0, penalty, bool(self.bias))
  def values(self) -> list[float]:
    """A row of `sample`'s values"""
    return [self.temperature, float(self.top_k), self.top_p, self.min_p, self.repeat_penalty, self.presence_penalty, self.frequency_penalty]
  def bias_row(self, vocab:int) -> np.ndarray:
    """float32 (vocab,), a row of `sample`'s bias. Raises ValueError for a token that there is not."""
    row = np.zeros(vocab, np.float32)
    for token, value in self.bias.items():
      if token >= vocab: raise ValueError(f"bias: token {_shown(token)}: expected 0 to {vocab - 1}")
      row[token] = value
    return row

def _shown(value:object) -> str:
  """A value found, as an error shows it"""
  if isinstance(value, int) and value.bit_length() > 64: return f"one of {value.bit_length()} bits"
  return " ".join(repr(value)[:60].split())

@dataclass(frozen=True)
class Features:
  """What a graph must do; the numbers come in at run time, so that one graph serves every value. A batch's are those of any of its rows: what a row
  does not ask for, its values make nothing of."""
  draw: bool = False
  top_k: bool = False
  top_p: bool = False
  min_p: bool = False
  penalty: bool = False   # any of the three
  bias: bool = False
  mask: bool = False      # of the tokens that may be drawn; a row without one has all
  logprobs: bool = False  # of the chosen token and the likeliest

  def __or__(self, other:Features) -> Features:
    return Features(*(mine or theirs for mine, theirs in zip(vars(self).values(), vars(other).values())))

# ---- what penalties know ----
# int32 a token: its lowest bit says whether it stands in the context, those above how often it was produced

def token_counts(vocab:int, prompt:Sequence[int], produced:Sequence[int]) -> np.ndarray:
  """int32 (vocab,), a row of counts as it is before the step that is fed the last of these tokens, which it will count"""
  counts = np.bincount(np.array(produced, np.int64), minlength=vocab).astype(np.int32) * 2
  counts[[*prompt, *produced]] |= 1
  counts[[*prompt, *produced][-1]] -= 2   # a prompt's last token is counted as if it were produced: it begins one below
  return counts

def counted(counts:Tensor, token:Tensor) -> Tensor:
  """counts: int32 (S, V); token: int32 (S,), what the step is fed -> the counts with it"""
  fed = Tensor.arange(counts.shape[1], dtype=dtypes.int32).to(counts.device).eq(token.unsqueeze(1))
  return fed.where((counts | 1) + 2, counts)

# ---- masks ----
# uint32 (ceil(V / 32),) a row: bit i % 32 of word i // 32 says whether token i may be drawn

def mask_words(vocab:int) -> int: return -(-vocab // 32)

def allowed(mask:Tensor, vocab:int) -> Tensor:
  """uint32 (S, words) -> bool (S, vocab)"""
  bits = (mask.unsqueeze(2) >> Tensor.arange(32, dtype=dtypes.uint32).to(mask.device)) & 1
  return bits.reshape(mask.shape[0], -1)[:, :vocab].eq(1)

# ---- the draw ----

def filtered(logits:Tensor, features:Features, values:Tensor, counts:Tensor|None=None, bias:Tensor|None=None, mask:Tensor|None=None) -> Tensor:
  """Of each of S sequences the logits by which tokens are drawn, those of top-k, perhaps from a nucleus, -inf of the others. logits: float32 (S, V);
  values: float32 (S, VALUES), rows of Sampling.values(); counts: int32 (S, V), of the context, needed for a penalty; bias: float32 (S, V), needed for
  a bias; mask: uint32 (S, words), needed for a mask. Tokens that tie at the cut are kept."""
  vocab = logits.shape[1]
  temperature, top_k, _, _, repeat, presence, frequency = (values[:, i:i+1] for i in range(VALUES))
  if features.mask:
    assert mask is not None
    logits = allowed(mask, vocab).where(logits, float("-inf"))
  if features.bias:
    assert bias is not None
    logits = logits + bias
  if features.penalty:
    assert counts is not None
    produced = counts >> 1
    logits = (counts & 1).eq(1).where((logits > 0).where(logits / repeat, logits * repeat), logits)
    logits = logits - (produced.cast(dtypes.float) * frequency + (produced > 0).where(presence, 0.0))
  if not (features.top_k or features.top_p or features.min_p): return logits
  logits = logits.contiguous()   # a maximum of what is still to be made is found by few threads
  if not features.top_k: return logits
  x = below_largest(logits, temperature)
  least = cutoff(x, None, top_k.eq(0).where(vocab, top_k.minimum(float(vocab))).cast(dtypes.uint32).reshape(-1))
  return (ordered(x) >= least.unsqueeze(1)).where(logits, float("-inf")).contiguous()

def to_draw(logits:Tensor, features:Features, values:Tensor, key:Tensor, counter:Tensor,
            *others:Tensor|None) -> tuple[Tensor, Noise|None, Nucleus|None]:
  """What the largest is the token of: the filtered logits; the noise that draws add, where any row draws; the nucleus, where any row draws from one.
  logits, features, values and others: as filtered has them; key: uint32 (S, 2), a seed and 0; counter: int32 (S,), the draw's number, which is the
  position"""
  noise = Noise(values, key, counter) if features.draw else None
  return filtered(logits, features, values, *others), noise, NUCLEUS if features.top_p or features.min_p else None

def scores(*drawn:Any) -> Tensor:
  """As sample -> float32 (S, V), whose largest is the token"""
  logits, noise, nucleus = to_draw(*drawn)
  return noised(logits if noise is None or nucleus is None else within(logits, noise.values, nucleus), noise)

def sample(*drawn:Any) -> Tensor:
  """A token of each of S sequences, int32 (S,), of to_draw's arguments. An argmax tie goes to the lower id."""
  return argmax(*to_draw(*drawn))

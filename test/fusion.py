"""Reductions that are broadcast back over their own axis, as users write them: what they are, what they give, how many kernels they may take."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Callable
import numpy as np
from tinygrad import Tensor, dtypes

@dataclass(frozen=True)
class Case:
  shape:tuple[int, ...]
  run:Callable[[Tensor], Tensor]
  want:Callable[[np.ndarray], np.ndarray]                  # in float64
  kernels:int
  alone:int|None = None                                    # kernels where no threads share memory, if more
  def most(self, has_local:bool) -> int: return self.kernels if has_local or self.alone is None else self.alone
  def input(self) -> np.ndarray: return np.random.default_rng(self.shape).standard_normal(self.shape).astype(np.float32)

def rms(x, axis=-1): return x * (x.square().mean(axis, keepdim=True) + 1e-6).rsqrt()
def np_rms(x, axis=-1): return x / np.sqrt((x ** 2).mean(axis, keepdims=True) + 1e-6)
def np_softmax(x, axis=-1):
  e = np.exp(x - x.max(axis, keepdims=True))
  return e / e.sum(axis, keepdims=True)
def np_layernorm(x, axis=-1): return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + 1e-5)

def ids(*n:int) -> Tensor: return Tensor(n, dtype=dtypes.int).realize()
def gathered(x:np.ndarray, *n:int) -> np.ndarray: return np.stack([x[i] if i < len(x) else 0 * x[0] for i in n])

CASES:dict[str, Case] = {
  "x * sum(x)": Case((2048,), lambda x: x * x.sum(), lambda x: x * x.sum(), 1),
  "rows * sum(rows)": Case((24, 96), lambda x: x * x.sum(-1, keepdim=True), lambda x: x * x.sum(-1, keepdims=True), 1),
  "rmsnorm": Case((1, 2048), rms, np_rms, 1),
  "rmsnorm of tokens": Case((8, 2048), rms, np_rms, 1),
  "rmsnorm of heads": Case((3, 20, 192), rms, np_rms, 1),
  "rmsnorm of part of a row": Case((4, 576), lambda x: rms(x[:, :512]), lambda x: np_rms(x[:, :512]), 1),
  "rmsnorm, a weight": Case((2, 2048), lambda x: rms(x) * (Tensor.arange(2048) % 7 - 3), lambda x: np_rms(x) * (np.arange(2048) % 7 - 3), 1),
  "rmsnorm, a residual": Case((1, 2048), lambda x: x + rms(x), lambda x: x + np_rms(x), 1),
  "rmsnorm of half": Case((4, 512), lambda x: rms(x.half().float()).half(), lambda x: np_rms(x.astype(np.float16).astype(float)), 1),
  "rmsnorm over odd rows": Case((5, 1021), rms, np_rms, 1),
  "rmsnorm over columns": Case((200, 48), lambda x: rms(x, 0), lambda x: np_rms(x, 0), 1, 2),
  "rmsnorm over two axes": Case((3, 12, 40), lambda x: rms(x, (1, 2)), lambda x: np_rms(x, (1, 2)), 1),
  "rmsnorm of a transpose": Case((64, 33), lambda x: rms(x.T), lambda x: np_rms(x.T), 1),
  "softmax": Case((20, 512), lambda x: x.softmax(-1), np_softmax, 1),
  "softmax of one row": Case((1, 4096), lambda x: x.softmax(-1), np_softmax, 1),
  "softmax over odd rows": Case((7, 1031), lambda x: x.softmax(-1), np_softmax, 1),
  "softmax of few": Case((33, 6), lambda x: x.softmax(-1), np_softmax, 1),
  "softmax in the middle": Case((4, 50, 36), lambda x: x.softmax(1), lambda x: np_softmax(x, 1), 1, 3),
  "softmax of a causal mask": Case((2, 60, 60), lambda x: (Tensor.arange(60).reshape(60, 1) >= Tensor.arange(60)).where(x, -float("inf")).softmax(-1),
                                   lambda x: np_softmax(np.where(np.tri(60, dtype=bool), x, -np.inf)), 1),
  "softmax in half": Case((20, 512), lambda x: x.half().softmax(-1), lambda x: np_softmax(x.astype(np.float16).astype(float)), 1),
  "log softmax": Case((6, 300), lambda x: x.log_softmax(-1), lambda x: np.log(np_softmax(x)), 1),
  "layernorm": Case((8, 2048), lambda x: x.layernorm(), np_layernorm, 1),
  "layernorm over odd rows": Case((3, 777), lambda x: x.layernorm(), np_layernorm, 1),
  "standard deviation": Case((10, 640), lambda x: x.std(-1), lambda x: x.std(-1, ddof=1), 1),
  "standard deviation of all": Case((3, 640), lambda x: x.std(), lambda x: x.std(ddof=1), 1),
  "log of all exponentials": Case((1531,), lambda x: x.logsumexp(), lambda x: np.log(np.exp(x).sum()), 1),
  # a gather is a load where it is read; an id past the end reads 0, a negative one counts from the end
  "gathered rows by a vector": Case((6, 96), lambda x: (x[ids(3, 0, 3, 9, -2)] * x[5]).sum(-1), lambda x: gathered(x, 3, 0, 3, 9, -2) @ x[5], 1),
  "gathered matrices by a vector": Case((5, 24, 64), lambda x: x[ids(4, 1, 1)] @ x[0, 3], lambda x: x[[4, 1, 1]] @ x[0, 3], 1),
  "gathered twice": Case((5, 24, 64), lambda x: x[ids(4, 1)][:, ids(7, 0, 23)].sum(-1), lambda x: x[[4, 1]][:, [7, 0, 23]].sum(-1), 1),
  "softmax of gathered rows": Case((9, 128), lambda x: x[ids(8, 2)].softmax(-1), lambda x: np_softmax(x[[8, 2]]), 1),
  "a softmax's numbers": Case((4, 200), lambda x: x.softmax(-1).gather(1, ids(9, 0, 199, 4).reshape(4, 1)),
                              lambda x: np_softmax(x)[np.arange(4), [9, 0, 199, 4]][:, None], 1),
  "counting": Case((4, 32), lambda x: x + Tensor.arange(32), lambda x: x + np.arange(32), 1),
  "rmsnorm of a softmax": Case((4, 256), lambda x: rms(x.softmax(-1)), lambda x: np_rms(np_softmax(x)), 1),
}

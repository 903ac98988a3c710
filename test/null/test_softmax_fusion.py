"""Softmax and what surrounds it, scheduled for every target with no device."""
import pytest
from fusion import CASES
from scheduled import TARGETS, count, empty
from tinygrad import Tensor, Variable, dtypes

@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [n for n in CASES if "softmax" in n])
def test_softmax(name:str, target:str):
  c = CASES[name]
  assert count(target, lambda: c.run(empty(*c.shape))) == c.most(target not in ("NULL", "CPU"))

@pytest.mark.parametrize("target", TARGETS)
def test_symbolic_length(target:str):
  n = Variable("n", 1, 4096).bind(77)
  assert count(target, lambda: empty(20, 4096)[:, :n].softmax(-1).pad(((0, 0), (0, 4096 - n)))) == 1

@pytest.mark.parametrize("target", TARGETS)
def test_attention(target:str):
  """Scores, softmax, values: the softmax is not done over again for each of a head's values"""
  q, k, v = empty(20, 1, 64), empty(20, 300, 64), empty(20, 300, 64)
  assert count(target, lambda: (q @ k.transpose(1, 2)).softmax(-1) @ v) == 3

@pytest.mark.parametrize("target", TARGETS)
def test_scores_that_two_read(target:str):
  """A softmax that is both kept and summed up"""
  def run() -> Tensor:
    p = empty(20, 512).softmax(-1).contiguous()
    return p.cat(p.sum(-1, keepdim=True).contiguous(), dim=-1)
  assert count(target, run) == 3

@pytest.mark.parametrize("target", TARGETS)
def test_cross_entropy(target:str):
  """Log-probability of one token of each row"""
  assert count(target, lambda: empty(8, 1000).log_softmax(-1).gather(-1, Tensor.empty(8, 1, dtype=dtypes.int)).contiguous()) <= 2

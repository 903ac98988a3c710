"""Decoding's attention over splits of the cache against the plain form in float64: split_kv_mma and split_kv_simt, on the mocks of CUDA and Metal."""
import dataclasses
from typing import Callable
import numpy as np, pytest
from helpers import decoding
from mockcuda import on_cuda
from mockmetal import on_metal
from oracle import nmse
from tinygrad import Device, Tensor
from tinygrad.nn import intrinsics, split_kv
from tinygrad.nn.step import PAGE, Step

def split_attention(q_latent: Tensor, q: Tensor, cache: Tensor, step: Step, scale: float) -> Tensor:
  target = intrinsics.target_of(Device.DEFAULT)
  return split_kv.mla_combine(target, *split_kv.split_kv(target, q_latent, q, cache, step, scale), cache, step)

def attention(H: int, L: int, R: int, C: int, last: int, seed: int) -> tuple[float, float]:
  """The worst head's NMSE of the kernels' result, and what halves for queries and weights may cost: a half is off by at most 2^-11 of itself, so a
  score by 2^-11 of what scores come to, and its weight, a half too, by as much of the weight"""
  rng = np.random.default_rng(seed)
  q_latent, q = rng.standard_normal((H, L)).astype(np.float32) * 2, rng.standard_normal((H, 48 + R)).astype(np.float32) * 2
  pages = -(-C // PAGE)
  rows = rng.standard_normal((pages * PAGE, L + R)).astype(np.float16)
  rows[last + 1:] = np.nan                                   # what is not written must not be read
  query, keys = np.concatenate([q_latent, q[:, 48:]], 1).astype(np.float64), rows[:last + 1].astype(np.float64)
  table = rng.permutation(pages + 3)[:pages]                 # pages lie anywhere in the pool
  cache = np.full(((pages + 3) * PAGE, L + R), np.nan, np.float16)
  for page, own in zip(table, rows.reshape(pages, PAGE, -1)): cache[page * PAGE:(page + 1) * PAGE] = own
  scores = query @ keys.T * 0.11
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  want = weights / weights.sum(-1, keepdims=True) @ keys[:, :L]
  if split_kv.uses_tensor_cores(intrinsics.target_of(Device.DEFAULT), L, R):
    head, number = np.meshgrid(np.arange(H), np.arange(L), indexing="ij")
    placed = np.full((split_kv.padded(H), L), np.nan, np.float16)
    placed.reshape(-1)[split_kv.query_place(head, number, L)] = q_latent
    q_latent = placed
  got = split_attention(Tensor(q_latent[None]), Tensor(q[None]), Tensor(cache), decoding(last, tables=table[None]), 0.11)
  return nmse(got.numpy()[0], want), 2 ** -22 * (np.square(scores).mean() + 1)

SHAPES = [(8, 512, 64, 200, 199), (5, 128, 32, 300, 130), (3, 128, 32, 40, 0), (16, 256, 32, 33, 32), (2, 128, 64, 700, 630)]

@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_cores(shape: tuple[int, ...]):
  with on_cuda():
    assert split_kv.uses_tensor_cores(intrinsics.target_of(Device.DEFAULT), shape[1], shape[2])
    error, halves = attention(*shape, seed=1)
    assert error < halves

@pytest.mark.parametrize("shape,on", [(SHAPES[1], on_cuda), (SHAPES[2], on_cuda), (SHAPES[1], on_metal)])
def test_simt(shape: tuple[int, ...], on: Callable, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setitem(intrinsics.TARGETS, "CUDA", dataclasses.replace(intrinsics.TARGETS["CUDA"], mma=None))
  with on():
    assert not split_kv.uses_tensor_cores(intrinsics.target_of(Device.DEFAULT), shape[1], shape[2])
    assert attention(*shape, seed=2)[0] < 1e-12

@pytest.mark.parametrize("last", [0, 1, 63, 64, 127, 400])
def test_few_blocks(last: int, monkeypatch: pytest.MonkeyPatch):
  """Splits of several steps: the softmax goes on from step to step"""
  monkeypatch.setattr(split_kv, "MULTIPROCESSORS", 3)
  with on_cuda():
    error, halves = attention(10, 128, 32, 401, last, seed=3)
    assert error < halves

def test_a_head_left_out(monkeypatch: pytest.MonkeyPatch):
  """… is noticed by the test of all heads"""
  plain = split_attention
  def faulty(*args) -> Tensor:
    context = plain(*args).numpy()
    context[:, 4] = 0
    return Tensor(context)
  monkeypatch.setitem(globals(), "split_attention", faulty)
  with pytest.raises(AssertionError, match="^assert 1.0 < "): test_tensor_cores(SHAPES[1])

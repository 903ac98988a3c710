"""Rotary embedding and YaRN: against complex multiplication in float64, and the published models' numbers."""
import math
import numpy as np, pytest
from extra.mkgguf import DS2LITE, GLM, YOUTU, Spec
from helpers import prefilling
from tinygrad import Tensor
from tinygrad.apps.mla import Config
from tinygrad.apps.rope import Rope, Yarn, inverse_frequencies, rope_table

DEEPSEEK = Yarn(factor=40.0, original_context=4096, log_multiplier=.0707)

def rotated(x: np.ndarray, base: float, start: int, freqs: np.ndarray | None = None) -> np.ndarray:
  """Neighbours (2i, 2i+1) of row t as a complex number, turned by (start + t) · base^(-2i/dim). x: (T, ..., dim), in float64"""
  T, dim = x.shape[0], x.shape[-1]
  freqs = base ** (-2 * np.arange(dim // 2, dtype=np.float64) / dim) if freqs is None else freqs
  turn = np.exp(1j * np.outer(start + np.arange(T), freqs)).reshape(T, *(1,) * (x.ndim - 2), dim // 2)
  z = (x[..., 0::2].astype(np.float64) + 1j * x[..., 1::2]) * turn
  return np.stack([z.real, z.imag], -1).reshape(x.shape)

@pytest.mark.parametrize("shape", [(5, 64), (1, 64), (3, 2, 32), (2, 7, 6), (4, 2)], ids=str)
def test_pairs_are_neighbours(shape: tuple[int, ...]):
  x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
  table = rope_table(shape[-1], 1e4, 300)
  for start in (0, 290):
    assert np.allclose(Rope(table, 0, 0).rotate(Tensor(x), prefilling(start, len(x))).numpy(), rotated(x, 1e4, start), atol=1e-6, rtol=0)

def test_heads():
  """Of each head's numbers only the last ones turn"""
  x = np.random.default_rng(3).standard_normal((4, 3, 48)).astype(np.float32)
  got = Rope(rope_table(16, 1e4, 40), 48, 32).rotate_heads(Tensor(x.reshape(4, -1)), prefilling(30, 4)).numpy().reshape(x.shape)
  assert np.array_equal(got[..., :32], x[..., :32]) and np.allclose(got[..., 32:], rotated(x[..., 32:], 1e4, 30), atol=1e-6, rtol=0)

def test_far_positions_are_exact():
  """Angles of 200 000 radians: in float32 they would be off by hundredths."""
  table = rope_table(64, 1e6, 202752).numpy()
  assert table.dtype == np.float32 and table.shape == (202752, 32, 2)
  t = 202751
  angles = t * 1e6 ** (-np.arange(32) / 32)
  assert np.abs(table[t] - np.stack([np.cos(angles), np.sin(angles)], -1)).max() < 1e-7

def test_yarn_of_deepseek_v2_lite():
  plain, yarn = 1e4 ** (-np.arange(32) / 32), inverse_frequencies(64, 1e4, DEEPSEEK)
  ratio = yarn / plain
  assert np.all(ratio[:11] == 1) and np.allclose(ratio[23:], 1 / 40, rtol=1e-12)     # low 10, high 23 …
  ramp = (np.arange(11, 23) - 10) / 13                                                # … and a line between
  assert np.allclose(ratio[11:23], 1 - ramp + ramp / 40, rtol=1e-12)
  assert DEEPSEEK.mscale == pytest.approx(1.2608, abs=5e-5)
  x = np.random.default_rng(2).standard_normal((6, 64)).astype(np.float32)
  got = Rope(rope_table(64, 1e4, 9000, DEEPSEEK), 0, 0).rotate(Tensor(x), prefilling(8990, 6)).numpy()
  assert np.allclose(got, rotated(x, 1e4, 8990, plain * ratio), atol=1e-6, rtol=0)   # lengths stay: its multiplier leaves cos and sin alone

def test_yarn_that_changes_nothing():
  for yarn in (Yarn(1.0, 4096, .0707), Yarn(1.0, 4096, 0.0), Yarn(40.0, 1 << 40, .0707)):  # no stretching; so long that every pair turns often
    assert np.allclose(inverse_frequencies(64, 1e4, yarn), 1e4 ** (-np.arange(32) / 32), rtol=1e-12)
    assert (yarn.mscale == 1) == (yarn.factor == 1) and yarn.magnitude == 1

def test_yarn_without_the_multiplier():
  """The paper's factor on cos and sin, and on the scores' two sides once more"""
  yarn, paper = Yarn(40.0, 4096, 0.0), 1 + .1 * math.log(40)
  assert yarn.mscale == yarn.magnitude == pytest.approx(paper, rel=1e-15)
  table, plain = rope_table(64, 1e4, 300, yarn).numpy(), rope_table(64, 1e4, 300, DEEPSEEK).numpy()
  assert np.allclose(table, plain * paper, atol=2e-7) and np.allclose(np.hypot(*np.moveaxis(table, -1, 0)), paper, rtol=1e-6)
  assert config(DS2LITE, yarn).score_scale == pytest.approx(paper ** 2 / math.sqrt(192), rel=1e-15)

def config(s: Spec, yarn: Yarn | None = None) -> Config:
  return Config(s.blocks, s.dense, s.dim, s.ff, s.vocab, s.ctx, s.heads, s.q_lora, s.kv_lora, s.nope, s.rope, s.v, s.eps, s.theta, yarn)

def test_score_scale():
  assert config(GLM).score_scale == 1 / 16
  assert config(YOUTU).score_scale == pytest.approx(1 / math.sqrt(192), rel=1e-15)
  assert config(DS2LITE, DEEPSEEK).score_scale == pytest.approx(.11472, abs=5e-6)
  assert config(GLM).cache_dim == 576

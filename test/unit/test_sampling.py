"""Sampling against a sorting numpy reference in float64: the tokens kept, and how often each is drawn."""
from dataclasses import replace
import numpy as np, pytest
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.apps.engine.sampling import Features, Sampling, gumbel, sample
from tinygrad.engine.realize import to_program_cache

class Sampler:
  """`sample` under one JIT; logits, values, seed and seen tokens come in through buffers, and the draw's number counts up in the graph."""
  def __init__(self, vocab: int, features: Features):
    self.vocab = vocab
    self.logits, self.values = Tensor.zeros(vocab).contiguous().realize(), Tensor.zeros(5).contiguous().realize()
    self.key, self.counter = (Tensor.zeros(2, dtype=dtypes.uint32).contiguous().realize() for _ in range(2))
    self.seen = Tensor.zeros(vocab, dtype=dtypes.uint8).contiguous().realize()
    self.features = features
    def step() -> Tensor:
      counter = self.counter.assign(self.counter + Tensor([1, 0], dtype=dtypes.uint32))
      return sample(self.logits, self.features, self.values, self.key, counter, self.seen).realize()
    self.jit = TinyJit(step)
  def __call__(self, logits: np.ndarray, s: Sampling, count: int = 1, seen: tuple[int, ...] = ()) -> np.ndarray:
    """`count` draws: int64 (count,)"""
    def put(buffer: Tensor, values) -> None: buffer.assign(Tensor(np.asarray(values), dtype=buffer.dtype)).realize()
    put(self.logits, logits)
    put(self.values, replace(s, top_k=s.top_k or self.vocab).values())  # a graph with a cut says "all" by a large k
    put(self.key, [s.seed, 0])
    put(self.counter, [0, 0])
    put(self.seen, np.isin(np.arange(self.vocab), seen))
    return np.array([self.jit().item() for _ in range(count)])

def probabilities(logits: np.ndarray, s: Sampling, seen: tuple[int, ...] = ()) -> np.ndarray:
  """What each token's chance is, float64, by sorting. Order: penalty, temperature, top-k, top-p, min-p."""
  x = logits.astype(np.float64)
  for i in seen: x[i] = x[i] / s.repeat_penalty if x[i] > 0 else x[i] * s.repeat_penalty
  x = x / s.temperature
  order, p = np.argsort(-x, kind="stable"), np.exp(x - x.max())
  keep = order[:s.top_k] if 0 < s.top_k < len(x) else order
  share = np.cumsum(p[keep]) / p[keep].sum()
  keep = keep[:np.searchsorted(share, s.top_p * (1 - 1e-9)) + 1] if s.top_p < 1 else keep
  keep = keep[p[keep] >= s.min_p]
  out = np.zeros(len(x))
  out[keep] = p[keep] / p[keep].sum()
  return out

def assert_drawn_from(draws: np.ndarray, p: np.ndarray) -> None:
  """No token outside the kept ones; none missing that 12 draws were expected of; a chi-square of the rest within five deviations."""
  n, counts = len(draws), np.bincount(draws, minlength=len(p))
  assert not counts[p == 0].any(), f"drawn but not kept: {np.flatnonzero((p == 0) & (counts > 0))}"
  assert counts[p * n > 12].all(), f"kept but not drawn: {np.flatnonzero((p * n > 12) & (counts == 0))}"
  big = p * n >= 5
  seen, expected = np.append(counts[big], counts[~big].sum()), np.append(p[big].sum() and p[big] * n, p[~big].sum() * n)
  seen, expected = seen[expected > 0], expected[expected > 0]
  assert ((seen - expected) ** 2 / expected).sum() < len(seen) + 5 * (2 * len(seen)) ** .5

ALL = Features(True, True, True, True, True)
V = 1000
@pytest.fixture(scope="module")
def logits() -> np.ndarray: return (np.random.default_rng(0).standard_normal(V) * 2.5).astype(np.float32)
@pytest.fixture(scope="module")
def everything() -> Sampler: return Sampler(V, ALL)

# one graph serves all of these: only numbers change
VALUES = [Sampling(1.0), Sampling(.7, top_k=20), Sampling(1.0, top_p=.6), Sampling(1.3, min_p=.05), Sampling(1.0, top_k=5000),
          Sampling(2.0, top_k=40, top_p=.9), Sampling(.8, 50, .95, .01, 1.3), Sampling(1.0, 10, .7, .2, 5.0), Sampling(.3, repeat_penalty=.5),
          Sampling(1.0, top_k=1), Sampling(100.0, top_k=30)]

def test_every_value_from_one_graph(everything: Sampler, logits: np.ndarray):
  seen = tuple(int(i) for i in np.argsort(-logits)[:6]) + (3, 500)
  everything(logits, VALUES[0], 2, seen)
  compiled, captured = len(to_program_cache), everything.jit.captured
  for i, s in enumerate(VALUES):
    assert_drawn_from(everything(logits, replace(s, seed=i), 400, seen), probabilities(logits, s, seen if s.repeat_penalty != 1 else ()))
  assert len(to_program_cache) == compiled and everything.jit.captured is captured

@pytest.mark.parametrize("s", [Sampling(1.1), Sampling(1.1, top_k=25), Sampling(1.1, top_p=.8), Sampling(1.1, min_p=.02),
                               Sampling(1.1, top_k=40, top_p=.5), Sampling(1.1, repeat_penalty=1.5)], ids=str)
def test_features(s: Sampling, logits: np.ndarray):
  """The graphs that hold only what is asked for"""
  seen = tuple(range(0, V, 3))
  assert_drawn_from(Sampler(V, s.features)(logits, s, 400, seen), probabilities(logits, s, seen))

@pytest.mark.parametrize("vocab", [1, 2, 37, 1009])
def test_odd_vocabularies(vocab: int):
  x = np.random.default_rng(vocab).standard_normal(vocab).astype(np.float32)
  s = Sampling(1.0, top_k=12, top_p=.9, min_p=.02, seed=5)
  assert_drawn_from(Sampler(vocab, s.features)(x, s, 200), probabilities(x, s))

def test_the_edge_of_the_kept_set(everything: Sampler):
  """High temperatures make every kept token likely: the set is seen whole, not just its head."""
  x = np.random.default_rng(1).standard_normal(V).astype(np.float32) * 50
  for s in (Sampling(1e3, top_k=17), Sampling(1e3, top_k=30, top_p=.5), Sampling(1e3, min_p=.94)):
    p = probabilities(x, s)
    assert 5 < (p > 0).sum() < 40
    assert set(everything(x, s, 400)) == set(np.flatnonzero(p))

def test_ties_at_a_cut_are_kept(everything: Sampler):
  x = np.full(V, -5, np.float32)
  x[[7, 70, 700]] = 3
  assert set(everything(x, Sampling(1.0, top_k=1), 60)) == {7, 70, 700}
  assert set(everything(x, Sampling(1.0, top_p=.01), 60)) == {7, 70, 700}
  assert set(everything(x, Sampling(1.0, min_p=1.0), 60)) == {7, 70, 700}

def test_only_the_best(everything: Sampler, logits: np.ndarray):
  best = int(logits.argmax())
  for s in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6), Sampling(1.0, min_p=1.0), Sampling(1e-3), Sampling(1e-30),
            Sampling(5.0, 1, 1e-3, 1.0)):
    assert set(everything(logits, s, 12)) == {best}, s

def test_forbidden_tokens(everything: Sampler):
  """A logit of -inf is never drawn, however wide the sampling is."""
  x = np.full(V, -np.inf, np.float32)
  x[[4, 40, 400]] = [0, 1, -1]
  for s in (Sampling(1.0), Sampling(50.0, top_k=500), Sampling(1.0, top_p=.999999), Sampling(1.0, min_p=1e-6), Sampling(1.0, repeat_penalty=2.0)):
    assert set(everything(x, s, 60, (5, 40))) == {4, 40, 400}, s
  x[[4, 400]] = -np.inf
  assert set(everything(x, Sampling(1.0), 10)) == {40}

def test_extreme_logits(everything: Sampler):
  for scale in (1e-30, 1e30):
    x = np.linspace(-1, 1, V).astype(np.float32) * np.float32(scale)
    s = Sampling(1.0, top_k=3)
    assert set(everything(x, s, 60)) == ({997, 998, 999} if scale < 1 else {999})

def test_greedy():
  greedy = Sampler(V, Features())
  x = np.random.default_rng(2).standard_normal(V).astype(np.float32)
  assert greedy(x, Sampling())[0] == x.argmax()
  x[[900, 31, 500]] = 9
  assert greedy(x, Sampling())[0] == 31                         # a tie: the lower id
  assert greedy(np.full(V, -np.inf, np.float32), Sampling())[0] == 0
  assert len(greedy.jit.captured.linear.src) <= 4 if greedy.jit.captured else greedy(x, Sampling(), 3)[0] == 31

def test_greedy_with_a_penalty():
  s, x = Sampling(repeat_penalty=2.0), np.full(V, -9, np.float32)
  x[[10, 20, 30]] = [4, 3, -1]
  sampler = Sampler(V, s.features)
  assert sampler(x, s)[0] == 10 and sampler(x, s, seen=(10,))[0] == 20   # 4/2 < 3
  x[[10, 20]] = [-1, -1.5]
  assert sampler(x, s, seen=(10, 30))[0] == 20                            # a negative logit is multiplied

def test_seeds_and_draws_are_independent(everything: Sampler, logits: np.ndarray):
  def s(seed: int) -> Sampling: return Sampling(1.0, seed=seed)
  a, again, b = everything(logits, s(1), 50), everything(logits, s(1), 50), everything(logits, s(2), 50)
  assert np.array_equal(a, again) and (a == b).mean() < .5
  firsts = np.concatenate([everything(logits, s(seed)) for seed in range(300)])  # the first draw of many seeds
  assert_drawn_from(firsts, probabilities(logits, s(0)))

NO_NUMBER = ["1", None, True, np.bool_(True), 1j, [1.0]]
REAL = {"temperature": ("0, or from 1e-30 to 10000", [-.1, float("nan"), float("inf"), 1e-46, 9e-31, 10001, 10 ** 400]),
        "top_p": ("from 1e-30 to 1", [0, -1, 1.01, 1e-46, float("nan"), float("-inf")]),
        "min_p": ("0, or from 1e-30 to 1", [-.1, 2, 1e-46, float("nan")]),
        "repeat_penalty": ("from 1e-30 to 10000", [0, 1e-46, 1e-40, -2, 1e300, 10 ** 400, float("nan")])}
WHOLE = {"top_k": ("a whole number from 0 to 2147483647", [-1, 1.5, 1.0, 1 << 31, 10 ** 400, 10 ** 9999]),
         "seed": ("a whole number from 0 to 4294967295", [-1, .5, 1 << 32, 10 ** 400])}
@pytest.mark.parametrize("name", REAL | WHOLE)
def test_values_out_of_range(name: str):
  """None is taken for another: what float32 would make 0 or infinite, what would be rounded, what is no number"""
  expected, values = (REAL | WHOLE)[name]
  for value in values + NO_NUMBER:
    with pytest.raises(ValueError, match=f"^{name}: expected {expected}, found ") as e: Sampling(**{name: value})
    assert "\n" not in str(e.value) and len(str(e.value)) < 150

def test_values_at_their_limits(everything: Sampler, logits: np.ndarray):
  """The smallest and the largest of each do what they say"""
  best, seen = int(logits.argmax()), tuple(np.flatnonzero(logits > 0).tolist())
  for s in (Sampling(1e-30), Sampling(1.0, top_p=1e-30), Sampling(np.float32(1.0), top_k=np.int64(1), seed=np.uint32(7))):
    assert set(everything(logits, s, 12)) == {best}, s
  for s in (Sampling(1.0, top_k=2 ** 31 - 1), Sampling(1.0, min_p=1e-30)): assert_drawn_from(everything(logits, s, 400), probabilities(logits, s))
  assert set(everything(logits, Sampling(1.0, repeat_penalty=1e-30), 12, seen)) == {best}
  s = Sampling(1.0, repeat_penalty=1e4)
  assert abs(np.isin(everything(logits, s, 400, seen), seen).mean() - probabilities(logits, s, seen)[list(seen)].sum()) < .1

def test_noise_is_finite():
  """For the bits at either end and many between; symmetric, so that neither end is special"""
  ends = [0, 1, 255, 256, 511, 512, 0x7fffffff, 0x80000000, 0xfffffdff, 0xfffffe00, 0xffffff00, 0xfffffffe, 0xffffffff]
  bits = np.concatenate([np.uint32(ends), np.random.default_rng(0).integers(0, 1 << 32, 100000, np.uint32)])
  got, want = gumbel(Tensor(bits)).numpy(), -np.log(-np.log(((bits >> 9).astype(np.float64) * 2 + 1) * 2.0 ** -24))
  assert np.isfinite(got).all() and np.abs(got - want).max() < 1e-3
  assert got[0] == got.min() and got[len(ends) - 1] == got.max() < 17

def test_a_large_vocabulary():
  """No token of a probability of 4e-18 among so many draws, and the two likely ones as often as they are likely"""
  x = np.full(154880, -40, np.float32)
  x[[7, 150000]] = [0, 1]
  s = Sampling(1.0, seed=1)
  assert_drawn_from(Sampler(len(x), s.features)(x, s, 1000), probabilities(x, s))

def test_features_follow_the_values():
  assert Sampling().features == Features() == Sampling(top_k=5, top_p=.5, min_p=.1).features  # greedy needs no cut
  assert Sampling(1.0, 5, .5, .1, 1.1).features == ALL
  assert Sampling(.5).features == Features(draw=True) and Sampling(repeat_penalty=1.1).features == Features(penalty=True)

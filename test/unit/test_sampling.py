"""Sampling against a sorting numpy reference in float64: the tokens kept, and how often each is drawn. A row of a batch against the row alone, bit
for bit."""
import contextlib
from dataclasses import replace
from typing import Callable
import numpy as np, pytest
from mockcuda import on_cuda
from mockmetal import on_metal
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.apps.capture import collected_calls
from tinygrad.apps.engine import sampling
from tinygrad.apps.engine.sampling import Features, Sampling, allowed, counted, mask_words, sample, scores, token_counts
from tinygrad.engine.realize import to_program_cache
from tinygrad.nn import noise
from tinygrad.nn.cutoff import cutoff
from tinygrad.nn.draw import argmax
from tinygrad.nn.likeliest import likeliest, log_total
from tinygrad.nn.noise import Noise, gumbel, noised, random_bits
from tinygrad.nn.nucleus import Nucleus
from tinygrad.nn.primitive import plain_ops

class Sampler:
  """`sample` of one row under one JIT; logits, values, seed, counts and bias come in through buffers, and the draw's number counts up."""
  def __init__(self, vocab: int, features: Features):
    def buffer(*shape: int, dtype=dtypes.float) -> Tensor: return Tensor.zeros(*shape, dtype=dtype).contiguous().realize()
    self.vocab, self.features = vocab, features
    self.logits, self.bias, self.values = buffer(1, vocab), buffer(1, vocab), buffer(1, sampling.VALUES)
    self.key, self.counter, self.counts = buffer(1, 2, dtype=dtypes.uint32), buffer(1, dtype=dtypes.int32), buffer(1, vocab, dtype=dtypes.int32)
    def step() -> Tensor:
      counter = self.counter.assign(self.counter + 1)
      return sample(self.logits, self.features, self.values, self.key, counter, self.counts, self.bias).realize()
    self.jit = TinyJit(step)
  def __call__(self, logits: np.ndarray, s: Sampling, count: int = 1, seen: tuple[int, ...] = (), produced: tuple[int, ...] = ()) -> np.ndarray:
    """`count` draws: int64 (count,)"""
    def put(buffer: Tensor, values) -> None: buffer.assign(Tensor(np.asarray(values), dtype=buffer.dtype).reshape(buffer.shape)).realize()
    put(self.logits, logits)
    put(self.values, s.values())
    put(self.key, [s.seed, 0])
    put(self.counter, [0])
    put(self.counts, counts_of(self.vocab, seen, produced))
    put(self.bias, s.bias_row(self.vocab))
    return np.array([self.jit().item() for _ in range(count)])

def counts_of(vocab: int, seen: tuple[int, ...], produced: tuple[int, ...] = ()) -> np.ndarray:
  counts = np.isin(np.arange(vocab), [*seen, *produced]).astype(np.int32)
  for i in produced: counts[i] += 2
  return counts

def probabilities(logits: np.ndarray, s: Sampling, seen: tuple[int, ...] = (), produced: tuple[int, ...] = ()) -> np.ndarray:
  """What each token's chance is, float64, by sorting. Order: bias, penalties, temperature, top-k, top-p, min-p."""
  x = logits.astype(np.float64)
  for i, value in s.bias.items(): x[i] += value
  for i in {*seen, *produced}: x[i] = x[i] / s.repeat_penalty if x[i] > 0 else x[i] * s.repeat_penalty
  for i in set(produced): x[i] -= s.presence_penalty
  for i in produced: x[i] -= s.frequency_penalty
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

ALL = Features(True, True, True, True, True, True)
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
        "repeat_penalty": ("from 1e-30 to 10000", [0, 1e-46, 1e-40, -2, 1e300, 10 ** 400, float("nan")]),
        "presence_penalty": ("from -2 to 2", [-2.1, 3, float("nan"), float("inf"), 10 ** 400]),
        "frequency_penalty": ("from -2 to 2", [-2.1, 3, float("nan"), float("-inf")])}
WHOLE = {"top_k": ("a whole number from 0 to 2147483647", [-1, 1.5, 1.0, 1 << 31, 10 ** 400, 10 ** 9999]),
         "seed": ("a whole number from 0 to 4294967295", [-1, .5, 1 << 32, 10 ** 400])}
@pytest.mark.parametrize("name", REAL | WHOLE)
def test_values_out_of_range(name: str):
  """None is taken for another: what float32 would make 0 or infinite, what would be rounded, what is no number"""
  expected, values = (REAL | WHOLE)[name]
  for value in values + NO_NUMBER:
    with pytest.raises(ValueError, match=f"^{name}: expected {expected}, found ") as e: Sampling(**{name: value})
    assert "\n" not in str(e.value) and len(str(e.value)) < 150

@pytest.mark.parametrize("bias,expected", [
  ([1.0], "bias: expected numbers by token, found list"), ({-1: 1.0}, "bias: expected a token's number, found -1"),
  ({"5": 1.0}, "bias: expected a token's number, found '5'"), ({True: 1.0}, "bias: expected a token's number, found True"),
  *(({5: value}, "bias of token 5: expected -inf, or from -10000 to 10000, found ")
    for value in (float("nan"), float("inf"), 10001, 10 ** 400, "1", None, True, 1j))])
def test_a_wrong_bias(bias, expected: str):
  with pytest.raises(ValueError) as e: Sampling(bias=bias)
  assert str(e.value).startswith(expected) and "\n" not in str(e.value) and len(str(e.value)) < 150

def test_a_bias_for_no_token():
  assert Sampling(bias={2: -1.5}).bias_row(3).tolist() == [0, 0, -1.5]
  with pytest.raises(ValueError, match="^bias: token 3: expected 0 to 2$"): Sampling(bias={3: 1.0}).bias_row(3)

def test_values_at_their_limits(everything: Sampler, logits: np.ndarray):
  """The smallest and the largest of each do what they say"""
  best, seen = int(logits.argmax()), tuple(np.flatnonzero(logits > 0).tolist())
  for s in (Sampling(1e-30), Sampling(1.0, top_p=1e-30), Sampling(np.float32(1.0), top_k=np.int64(1), seed=np.uint32(7))):
    assert set(everything(logits, s, 12)) == {best}, s
  for s in (Sampling(1.0, top_k=2 ** 31 - 1), Sampling(1.0, min_p=1e-30)): assert_drawn_from(everything(logits, s, 400), probabilities(logits, s))
  assert set(everything(logits, Sampling(1.0, repeat_penalty=1e-30), 12, seen)) == {best}
  s = Sampling(1.0, repeat_penalty=1e4)
  assert abs(np.isin(everything(logits, s, 400, seen), seen).mean() - probabilities(logits, s, seen)[list(seen)].sum()) < .1

# ---- bias and penalties ----

@pytest.mark.parametrize("s", [Sampling(1.0, presence_penalty=1.5), Sampling(1.0, frequency_penalty=.7), Sampling(1.0, frequency_penalty=-1.0),
                               Sampling(.9, 0, .9, 0, 1.3, presence_penalty=-.5, frequency_penalty=.5, bias={3: 2.0, 500: -1.0})], ids=str)
def test_penalties_and_bias(s: Sampling, logits: np.ndarray):
  best = tuple(np.argsort(-logits)[:6].tolist())
  seen, produced = (*best[:3], 9), (*best[2:], *best[3:], best[4])   # one is in the prompt alone, one three times in the answer
  assert_drawn_from(Sampler(V, s.features)(logits, s, 400, seen, produced), probabilities(logits, s, seen, produced))

def test_a_bias_comes_first():
  """Before the penalties, and a greedy choice follows it"""
  x = np.full(V, -9, np.float32)
  x[[10, 20]] = [4, 3]
  assert Sampler(V, Sampling(bias={20: 1.5}).features)(x, Sampling(bias={20: 1.5}))[0] == 20
  s = Sampling(bias={10: 3.0}, repeat_penalty=2.0)   # 7 / 2 is 3.5, 4 / 2 + 3 would be 5
  x[20] = 4.5
  assert Sampler(V, s.features)(x, s, seen=(10,))[0] == 20
  mask = {i: float("-inf") for i in range(V) if i not in (700, 701)}
  for s in (Sampling(bias=mask), Sampling(5.0, bias=mask), Sampling(1.0, 3, .9, .01, 1.5, bias=mask)):
    assert set(Sampler(V, s.features)(x, s, 12, seen=(10,))) <= {700, 701}

def test_counting():
  """What a row begins with, and what a step makes of the token that it is fed, is the same as a row that begins later"""
  prompt, produced = [5, 2, 5, 7], [2, 9, 9, 7, 5, 9]
  row = Tensor(token_counts(12, prompt, [])).reshape(1, -1)
  for n, token in enumerate([prompt[-1], *produced]):
    fresh = Tensor(token_counts(12, prompt, produced[:n])).reshape(1, -1)
    row, fed = (counted(t, Tensor([token], dtype=dtypes.int32)).realize() for t in (row, fresh))
    want = [2 * produced[:n].count(i) | (i in prompt + produced[:n]) for i in range(12)]
    assert row.tolist() == fed.tolist() == [want]

# ---- rows of a batch ----

DEVICES = {"CPU": contextlib.nullcontext, "CUDA": on_cuda, "METAL": on_metal, "plain ops": plain_ops}

def random_row(rng: np.random.Generator) -> Sampling:
  def maybe(value, other): return value if rng.random() < .5 else other
  return Sampling(maybe(rng.choice([.3, 1.0, 7.0]), 0.0), maybe(int(rng.integers(1, 60)), 0), maybe(rng.uniform(.05, .999), 1.0),
                  maybe(rng.uniform(.001, .3), 0.0), maybe(rng.uniform(.5, 2), 1.0), int(rng.integers(1 << 32)), maybe(rng.uniform(-2, 2), 0.0),
                  maybe(rng.uniform(-2, 2), 0.0), maybe({int(i): rng.choice([-np.inf, 3.0, -1.0]) for i in rng.integers(0, 300, 40)}, {}))

class Rows:
  """S rows of everything that `sample` takes; of those with a mask, which are `masked`, a third of the tokens are allowed"""
  def __init__(self, rng: np.random.Generator, rows: list[Sampling], vocab: int, masked: tuple[int, ...] = ()):
    self.sampling, S = rows, len(rows)
    self.logits = np.round(rng.standard_normal((S, vocab)) * 3, 1).astype(np.float32)   # with many ties
    produced = [rng.integers(0, vocab, 30).tolist() for _ in range(S)]
    self.counts = np.stack([counts_of(vocab, tuple(rng.integers(0, vocab, 50).tolist()), tuple(p)) for p in produced])
    self.bias = np.stack([s.bias_row(vocab) for s in self.sampling])
    self.position = rng.integers(0, 1 << 17, S).astype(np.int32)
    self.allowed, self.masked = np.ones((S, 32 * mask_words(vocab)), bool), masked
    for i in masked: self.allowed[i] = rng.random(self.allowed.shape[1]) < .3
    self.mask = np.packbits(self.allowed, 1, "little").view(np.uint32)
  def __call__(self, function: Callable[..., Tensor], rows: list[int]) -> np.ndarray:
    """What function, sample or scores, gives for a batch of these rows"""
    features = Features()
    for i in rows: features |= self.sampling[i].features | Features(mask=i in self.masked)
    values = np.float32([self.sampling[i].values() for i in rows])
    keys = np.uint32([[self.sampling[i].seed, 0] for i in rows])
    arrays = self.logits[rows], values, keys, self.position[rows], self.counts[rows], self.bias[rows], self.mask[rows]
    logits, *others = (Tensor(a).realize() for a in arrays)
    return function(logits, features, *others).numpy()

# of a batch, all of whose features some row asks for
MIX = [Sampling(1.0, seed=3), Sampling(), Sampling(.7, 20, .9, seed=3), Sampling(0.0, repeat_penalty=1.5, bias={7: 9.0}),
       Sampling(7.0, 0, .5, .02, 1.2, 5, .7, -.3, {i: float("-inf") for i in range(0, 300, 3)})]

@pytest.mark.parametrize("device,vocab", [("CPU", 1000), ("CUDA", 301)])
def test_a_row_of_a_batch_is_the_row_alone(device: str, vocab: int):
  with DEVICES[device]():
    batch = Rows(np.random.default_rng(vocab), MIX, vocab)
    everyone = [*range(len(MIX))]
    tokens, points, back = batch(sample, everyone), batch(scores, everyone), batch(scores, everyone[::-1])
    assert tokens.dtype == np.int32 and tokens.tolist() == points.argmax(1).tolist() and np.array_equal(points[::-1], back)
    for i in everyone: assert np.array_equal(batch(scores, [i])[0], points[i]), batch.sampling[i]
    assert batch(sample, [1]).tolist() == [tokens[1]] == [batch.logits[1].argmax()]   # greedy, which no draw has a part in

# ---- masks and probabilities ----

@pytest.mark.parametrize("device,vocab", [("CPU", 1000), ("CUDA", 301), ("METAL", 301), ("plain ops", 64)])
def test_a_row_with_a_mask(device: str, vocab: int):
  """Nothing else is drawn; the others are what they are where there is no mask, to the bit"""
  with DEVICES[device]():
    batch = Rows(np.random.default_rng(vocab), [replace(s, bias={}) for s in MIX[:4]], vocab, masked=(0, 1))
    points, tokens = batch(scores, [*range(4)]), batch(sample, [*range(4)])
    assert tokens.tolist() == points.argmax(1).tolist()
    for i in range(4): assert np.array_equal(batch(scores, [i])[0], points[i]) and batch.allowed[i, tokens[i]]
    assert np.array_equal(np.isinf(points[1]), ~batch.allowed[1, :vocab])
    batch.masked = ()
    assert all(np.array_equal(batch(scores, [i])[0], points[i]) for i in (2, 3)) and not np.array_equal(batch(scores, [1])[0], points[1])

def test_masks_come_first(logits: np.ndarray):
  """A row draws from what its mask leaves, as if there were no more tokens"""
  s = Sampling(1.1, 25, .9, repeat_penalty=1.2, bias={3: 9.0, 4: -1.0})
  batch = Rows(np.random.default_rng(4), [replace(s, seed=i) for i in range(400)], V, masked=(*range(400),))
  batch.logits[:], batch.counts[:], batch.allowed[:], batch.mask[:] = logits, counts_of(V, (1, 2, 3)), batch.allowed[0], batch.mask[0]
  assert not batch.allowed[0, 3]
  want = probabilities(np.where(batch.allowed[0, :V], logits, -1e9), s, (1, 2, 3))
  assert_drawn_from(batch(sample, [*range(400)]), want)

@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_bits_of_a_mask(vocab: int):
  bits = np.random.default_rng(vocab).random((3, vocab)) < .5
  packed = np.packbits(np.pad(bits, ((0, 0), (0, -vocab % 32))), 1, "little").view(np.uint32)
  assert packed.shape[1] == mask_words(vocab) and np.array_equal(allowed(Tensor(packed), vocab).numpy(), bits)

@pytest.mark.parametrize("device", DEVICES)
def test_the_total_of_a_row(device: str):
  """As float64 has it, and the same bits whoever is beside it"""
  x = np.random.default_rng(0).standard_normal((5, 20001)).astype(np.float32) * np.float32([[1], [30], [.01], [3], [3]])
  x[3], x[4, ::2] = -1e30, -np.inf
  def total(rows: np.ndarray) -> np.ndarray:
    t = Tensor(rows).realize()
    return log_total(t, likeliest(t, 2)).numpy()
  with DEVICES[device]():
    got = total(x)
    for i in range(5): assert total(x[i:i + 1])[0] == got[i]
  wide = x.astype(np.float64)
  want = wide.max(1) + np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1))
  assert np.abs(got - want)[[0, 1, 2, 4]].max() < 1e-5 and got[3] == np.float32(-1e30)

def test_many_mixes():
  """One graph; the rows alone in it too"""
  rng = np.random.default_rng(0)
  batch = Rows(rng, [Sampling(1.0, 5, .5, .1, 1.1, 1, bias={3: 1.0}), *(random_row(rng) for _ in range(199))], 300)
  points = np.concatenate([batch(scores, [0, *range(i, i + 40)])[1:] for i in range(0, 200, 40)])   # the first of each asks for everything
  for i in range(0, 200, 5): assert np.array_equal(batch(scores, [0, i])[1], points[i]), batch.sampling[i]

def test_a_fault_of_rows_is_noticed(monkeypatch: pytest.MonkeyPatch):
  """Noise that knows its row; a cut of the row above"""
  batch = Rows(np.random.default_rng(0), [Sampling(1.0, 20)] * 4, 300)
  def same() -> bool: return all(np.array_equal(batch(scores, [i])[0], batch(scores, [*range(4)])[i]) for i in range(4))
  assert same()
  with monkeypatch.context() as patch:
    patch.setattr(noise, "random_bits", lambda key, counter, n: random_bits(key, counter + Tensor.arange(key.shape[0], dtype=dtypes.int32), n))
    assert not same()
  monkeypatch.setattr(sampling, "cutoff", lambda x, mass, target: cutoff(x, mass, target).roll(1, 0))
  assert not same()

def test_every_row_draws_by_its_own_values(logits: np.ndarray):
  """A batch of other rows and 300 seeds, each of which draws from the same distribution"""
  s = Sampling(1.1, 25, .9, repeat_penalty=1.2)
  rng = np.random.default_rng(4)
  batch = Rows(rng, [replace(s, seed=i) if i % 3 else random_row(rng) for i in range(300)], V)
  batch.logits[:], batch.counts[:] = logits, counts_of(V, (1, 2, 3))
  tokens = batch(sample, [*range(300)])
  assert_drawn_from(np.delete(tokens, np.s_[::3]), probabilities(logits, s, (1, 2, 3)))

@pytest.mark.parametrize("features", [Features(), Features(True), replace(ALL, min_p=False)], ids=str)
def test_launches_do_not_grow_with_rows(features: Features):
  def launches(S: int) -> int:
    def empty(*shape: int, dtype=dtypes.float) -> Tensor: return Tensor.empty(*shape, dtype=dtype)
    arrays = empty(S, 9), empty(S, 7), empty(S, 2, dtype=dtypes.uint32), empty(S, dtype=dtypes.int32), empty(S, 9, dtype=dtypes.int32), empty(S, 9)
    with collected_calls() as calls: sample(arrays[0], features, *arrays[1:]).realize()
    return len(calls)
  assert launches(1) == launches(8) == launches(64) <= (1 if features == Features() else 12)

@pytest.mark.parametrize("count", [1, 2, 37, 1000])
def test_random_bits_of_rows(count: int):
  """As tinygrad has them for one"""
  keys, counter = np.uint32([[5, 0], [7, 9], [5, 0]]), np.int32([3, 3, 1 << 30])
  got = random_bits(Tensor(keys), Tensor(counter), count).numpy()
  for row, key, number in zip(got, keys, counter):
    assert np.array_equal(row, Tensor.random_bits(Tensor(key), Tensor(np.uint32([number, 0])), count).numpy())

def sorted_cut(x: np.ndarray, mass: np.ndarray, target: int) -> int:
  bits = x.view(np.uint32)
  keys = np.where(bits >> 31 == 1, bits ^ 0xffffffff, bits | 0x80000000).astype(np.int64)
  order = np.argsort(-keys, kind="stable")
  return int(keys[order][np.searchsorted(np.cumsum(mass[order].astype(np.uint64)), target)])

@pytest.mark.parametrize("device,S,vocab", [("CPU", 1, 2), ("CPU", 3, 20001), ("CUDA", 1, 20001), ("plain ops", 2, 37)])
def test_cutoff(device: str, S: int, vocab: int):
  rng = np.random.default_rng(vocab)
  x = -np.abs(rng.standard_normal((S, vocab)) * 4).astype(np.float32)
  x[:, ::7], x[:, 3:4], x[:, 5:9] = -np.inf, 0, x[:, 4:5]
  mass = (np.exp(x.astype(np.float64)) * 2 ** 40).astype(np.uint64)
  some, share = rng.integers(1, vocab + 1, S).astype(np.uint32), (mass.sum(1) * rng.uniform(.1, 1, S)).astype(np.uint64)
  with DEVICES[device]():
    assert cutoff(Tensor(x), None, Tensor(some)).tolist() == [sorted_cut(*row) for row in zip(x, np.ones((S, vocab)), some)]
    assert cutoff(Tensor(x), Tensor(mass), Tensor(share)).tolist() == [sorted_cut(*row) for row in zip(x, mass, share)]

def nucleus_token(x: np.ndarray, score: np.ndarray, temperature: float, top_p: float, min_p: float) -> int:
  """The largest score of the tokens of a row that are in the nucleus"""
  below = -np.abs(x.max() - x) / np.float32(temperature or 1)
  mass, total = (np.exp(below.astype(np.float64)) * 2 ** 40).astype(np.uint64), 0
  order, edge = np.argsort(-below, kind="stable"), -np.inf
  enough = max(int(np.float32(mass.sum()) * np.float32(top_p) * (1 - 1e-6)), 1)
  for i in order:
    edge, total = below[i], total + int(mass[i])
    if total >= enough: break
  inside = ((below >= edge) | (top_p >= 1)) & (below >= (np.log(min_p) if min_p else -np.inf))
  return int(np.argmax(np.where(inside, score, -np.inf)))

@pytest.mark.parametrize("device,vocab", [("CPU", 2), ("CPU", 20001), ("CUDA", 301), ("CUDA", 20001), ("METAL", 301), ("plain ops", 301)])
def test_nucleus(device: str, vocab: int):
  """Rows of a few likely tokens and of many, whose draws are inside at once or after many tries; ties; tokens that cannot be; the likeliest"""
  rng, asked = np.random.default_rng(vocab), [(.95, 0), (.5, 0), (.1, 0), (.01, 0), (1e-6, 0), (1, 0), (1, .2), (.9, .05)]
  values = np.float32([[temperature, *shares] for shares in asked for temperature in (1, 1, .7, 30, 0)])
  S = len(values)
  x = (rng.standard_normal((S, vocab)) * rng.choice([.01, 1, 4], (S, 1))).astype(np.float32)
  x[::3, ::2], x[1::4, 1:] = -np.inf, x[1::4, 1:].round()
  by = values, np.uint32([(i, 0) for i in range(S)]), np.int32([70] * S)
  with plain_ops(): scored = noised(Tensor(x), Noise(*map(Tensor, by))).numpy()
  want = [nucleus_token(*row[:2], *row[2]) for row in zip(x, scored, values.tolist())]
  assert sum(token != i for token, i in zip(want, scored.argmax(1))) > S // 8 or vocab == 2   # who took any would be seen
  with DEVICES[device](): assert argmax(Tensor(x), Noise(*map(Tensor, by)), Nucleus(1, 2)).tolist() == want

@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_neighbours_ahead_of_the_nucleus(device: str):
  """The two largest are neighbours and outside; so is the third, which is inside; a fourth, far away, is not to be drawn in its place"""
  V, by = 20001, (np.float32([[1, .9, 0]]), np.uint32([[3, 0]]), np.int32([70]))
  with plain_ops(): gumbels = noised(Tensor.zeros(1, V), Noise(*map(Tensor, by))).numpy()[0]
  near, far = np.argsort(gumbels[:250]), 5000 + int(np.argmin(gumbels[5000:6000]))
  third, first = int(near[0]), near[-2:]
  x = np.full((1, V), -40, np.float32)
  x[0, first] = x[0, third] = -gumbels[third]
  x[0, first] -= 5
  x[0, far] = -gumbels[far] - .1
  assert [*np.argsort(-(x[0] + gumbels))[2:4]] == [third, far]
  with DEVICES[device](): assert argmax(Tensor(x), Noise(*map(Tensor, by)), Nucleus(1, 2)).tolist() == [third]

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
  assert Sampling(1.0, 5, .5, .1, 1.1, bias={3: 1.0}).features == ALL
  assert Sampling(.5).features == Features(draw=True) and Sampling(repeat_penalty=1.1).features == Features(penalty=True)
  assert Sampling(presence_penalty=.1).features == Features(penalty=True) == Sampling(frequency_penalty=-.1).features
  assert Sampling(.5, top_p=.5).features | Sampling(1.0, 5).features == Sampling(.5, 5, .5).features  # a batch's
  assert Features() | Features() == Features() and ALL | Features() == ALL == Features() | ALL

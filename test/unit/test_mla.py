"""Logits against the naive numpy forward pass (oracle.py) and transformers' (goldens), for every block format, family and kind of file.

Every position counts. On a GPU activations are int8: a vector's largest of 32 numbers, about 2σ, has 127 steps, each rounding a twelfth of a step's
square, 2e-5 a product; 17 products in two blocks come to 4e-4, and no position is more than 2.5 times as bad. On a CPU they have 16 bits where codes
are multiplied: 32 639 steps, 3e-10 a product, 6e-9 in all. An attn_kv_b's k_b is kept in half precision, which costs each number a 2^-24 part of its
square.
"""
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator
import numpy as np, pytest
from gguf import GGMLQuantizationType as T, RopeScalingType
from extra.bench import no_device, stand_in, with_blocks
from extra.mkgguf import write_model
from goldens.make import HERE
from helpers import SMALL, WIDE, engine_of, names_of, tied, write_mixed, write_with, write_with_tokens
from oracle import Judge, errors, logits, nmse, route
from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.apps.capture import to_device
from tinygrad.apps.engine.engine import Engine
from tinygrad.apps.gguf import GGUFError, read_gguf
from tinygrad.apps.mla import PREFILL_SIZES, Config, Transformer
from tinygrad.apps import models
from tinygrad.apps.models import load
from tinygrad.apps.quantized import FLOATS, FORMATS
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.nn.cpu import is_cpu
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.routing import Gating, Routing, choose_experts
from tinygrad.nn.step import PAGE, Step

CHUNK = PREFILL_SIZES[0]

def test_a_cache_of_8_bits_holds_more(monkeypatch: pytest.MonkeyPatch):
  """Where its size is not given: as many pages of codes and scales as fit in the same memory"""
  pages, rows = {}, {16: 2 * 576, 8: 608}
  monkeypatch.setattr(models, "free_memory", lambda _: int(20.5 * PAGE * rows[16]))
  monkeypatch.setattr(models, "CARD_POOL", (1000, 1.0))
  file = with_blocks(stand_in("glm"), [0])
  with no_device("CUDA"):
    for bits in rows:
      model = Transformer.from_gguf(file, 64, pool=lambda model: models.pool_pages(model, None), cache_bits=bits)
      assert model.row_bytes == rows[bits] and [c.nbytes() for c in model.cache] == [model.pool * PAGE * rows[bits]]
      pages[bits] = model.pool - 1
  assert pages == {16: 20, 8: 41 * rows[16] // (2 * rows[8])}

def test_what_8_bits_cannot_hold():
  config = Config.from_gguf(stand_in("glm"))
  for wrong in (dict(kv_lora_rank=480), dict(rope_dim=24)):
    with pytest.raises(GGUFError, match="^a cache of 8 bits: expected kv_lora_rank a multiple of 64 and rope.dimension_count one of 16, found "):
      replace(config, **wrong).cache_row(8)
  with pytest.raises(ValueError, match="^cache_bits: expected 8 or 16, found 4$"): load(models.BUILT_IN, cache_bits=4)

@pytest.mark.skipif(not is_cpu(Device.DEFAULT), reason="the error of a GPU's activations is larger")
def test_logits_by_a_cache_of_8_bits():
  """The built-in model: rows are off by 4e-5, and a few positions' routers choose otherwise. Six texts' medians were 4e-5 to 2.8e-4, by how many
  positions attend to such ones"""
  ids = tokens(96)
  found = {bits: errors(load(models.BUILT_IN, 128, cache_bits=bits).logits(ids), logits(models.BUILT_IN, ids)) for bits in (16, 8)}
  assert found[16].max() < LIMIT and 1e-6 < np.median(found[8]) < 6e-5 and found[8].max() < 4e-2

LIMIT = 1e-7 if target_of(Device.DEFAULT) is None else 1e-3
TYPES = [*FLOATS, *FORMATS]
FAMILIES: dict[str, dict[str, Any]] = {"small-glm": dict(q_lora=256), "small-ds": {}, "small-youtu": dict(q_lora=256, experts=0)}

def tokens(n: int, vocab: int = 320) -> list[int]: return np.random.default_rng(n).integers(0, vocab, n).tolist()

@pytest.mark.parametrize("shift", [0, 9, 18])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_type(family: str, shift: int, tmp_path: Path):
  """16 of 25 in one file, turned so that each stands in several roles; one wrong matrix would show in every position"""
  types = (TYPES + TYPES)[shift:shift + 16]
  path, ids = write_mixed(tmp_path / "m.gguf", family, types, **WIDE | FAMILIES[family], seed=shift), tokens(CHUNK + 8)
  assert {t.type for t in read_gguf(path).tensors.values()} == {T.F32, *types}
  Judge(path, ids).check(engine_of(path).logits(ids), LIMIT)

# what a file may be, each with an own way through from_gguf or the forward pass
KINDS: dict[str, tuple] = {  # what write_model is given (model, type of the weights, overrides), and keys that differ
  "YaRN without its multiplier": ("small-ds", "F32", {}, dict(rope_scaling_yarn_log_mul=None)),
  "YaRN without the context it stretches": ("small-ds", "F32", dict(ctx=192), dict(rope_scaling_orig_ctx_len=None)),
  "an MTP block, no gating key, tied": ("small-glm", "F32", dict(q_lora=64, mtp=True, gating=None, tied=True)),
  "attn_kv_b": ("small-ds", "Q8_0", dict(old_style=True)),
  "attn_kv_b beside q_lora, sigmoid": ("small-glm", "F16", dict(q_lora=96, old_style=True)),
  "softmax over the chosen, two dense blocks, weights as they are":
    ("small-glm", "F32", dict(q_lora=64, gating=3, dense=2, blocks=3, weights_norm=False)),
  "V3, groups": ("small-v3", "F32", dict(q_lora=64, blocks=3)),
  "V3, attn_kv_b": ("small-v3", "F16", dict(q_lora=64, blocks=3, old_style=True)),
  "V2 in groups": ("small-v3", "Q8_0", dict(q_lora=64, blocks=3, gating=1, bias=False, weights_norm=False, scale=16.0)),
  "Kimi": ("small-kimi", "Q4_0", dict(q_lora=64)), "Moonlight": ("small-moonlight", "Q6_K", dict(dim=256, kv_lora=256, ff=256, moe_ff=256)),
  "softmax, normalized, without a bias": ("small-ds", "BF16", dict(gating=1, weights_norm=True, scale=2.5, experts=7, used=5)),
}
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_files(kind: str, tmp_path: Path):
  model, quant, overrides, *keys = KINDS[kind]
  path, ids = write_with(tmp_path / "m.gguf", dict(*keys), model, quant, seed=3, **SMALL | overrides), tokens(CHUNK + 8)
  Judge(path, ids).check(engine_of(path).logits(ids), LIMIT)

def test_parts(tmp_path: Path):
  """A large model's file comes in parts: any block's tensors may be in any"""
  parts, ids = write_model(tmp_path / "m.gguf", "small-v3", "F16", split=4, **SMALL | dict(q_lora=64, blocks=3)), tokens(9)
  assert len(parts) == 4
  Judge(parts, ids).check(engine_of(parts[0]).logits(ids), LIMIT)

@pytest.mark.parametrize("scaling,found", [(None, "'linear' (what rope.scaling.factor alone stands for)"), (RopeScalingType.LINEAR, "'linear'")])
def test_scaling_that_is_not_modelled(scaling: RopeScalingType | None, found: str, tmp_path: Path):
  """Neither the model nor the oracle takes such a file"""
  path = write_with(tmp_path / "m.gguf", {"rope_scaling_type": scaling}, "small-ds", "F16", **SMALL)
  with pytest.raises(GGUFError) as e: Config.from_gguf(read_gguf(path))
  assert str(e.value) == f"{path}: deepseek2.rope.scaling.type: expected none or yarn, found {found}"
  with pytest.raises(ValueError, match="not modelled: .* rope scaling linear"): logits(path, [1])

@pytest.mark.parametrize("file", ["small-glm-F16", "small-ds2-F16", "small-youtu-F16", "../../models/tiny-glm-Q4_0"])
def test_transformers(file: str):
  path, n = HERE / f"{file}.gguf", 3 * CHUNK + 5
  golden = np.load(HERE / f"{path.stem}.npz")
  n = min(n, len(golden["ids"]))
  at = golden["positions"] < n
  got, want = engine_of(path, 128).logits(golden["ids"][:n].tolist()), golden["logits"][at]
  assert len(want) >= 3 and nmse(got[golden["positions"][at]], want) < LIMIT
  assert (got.argmax(-1) == golden["top1"][:n]).mean() > .98

@pytest.mark.parametrize("tied", [False, True])
def test_rows_past_the_vocabulary(tied: bool, tmp_path: Path):
  """An embedding padded to a rounder size: the rows that no token has are never chosen, nor taken as tokens"""
  path, ids = write_with_tokens(tmp_path / "m.gguf", 301, "small-youtu", "Q8_0", **SMALL | dict(vocab=512, q_lora=64, tied=tied)), tokens(9, 301)
  m = load(path, 64)
  assert m.transformer.config.vocab_size == m.tokenizer.n_vocab == 301
  assert nmse(m.logits(ids), logits(path, ids)[:, :301]) < LIMIT
  answer = list(m.generate(ids, 48, Sampling(temperature=50.0, seed=1), stop=False))  # all but a draw among equals
  assert len(answer) == 48 and max(answer) < 301 and len(set(answer)) > 30
  assert isinstance("".join(m.complete(ids, 8)), str)
  with pytest.raises(ValueError, match="token 301: expected 0 to 300"): m.logits([301])

def test_tokens_without_a_row(tmp_path: Path):
  path = write_with_tokens(tmp_path / "m.gguf", 321, "small-youtu", "Q8_0", **SMALL | dict(q_lora=64))
  with pytest.raises(GGUFError) as e: load(path)
  assert str(e.value) == f"{path}: tensor token_embd.weight: expected a row for each of the 321 tokenizer.ggml.tokens, found 320"

# ---- one model in several ways ----

@pytest.fixture(scope="module")
def yarn_model(tmp_path_factory) -> Iterator[tuple[Path, Engine]]:
  path, = write_model(tmp_path_factory.mktemp("mla") / "m.gguf", "small-ds", "F16", seed=4, **SMALL)
  yield path, engine_of(path, 4 * CHUNK)

def test_many_chunks(yarn_model: tuple[Path, Engine]):
  """Each length of the last chunk's kind: shorter than a chunk, a whole one, one more, and the context to its last token"""
  path, g = yarn_model
  ids = tokens(4 * CHUNK)
  judge = Judge(path, ids)
  for n in (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 9, 4 * CHUNK):
    got = g.logits(ids[:n])
    assert got.shape == (n, 320) and got.dtype == np.float32
    judge.check(got, LIMIT)

def test_one_by_one(yarn_model: tuple[Path, Engine]):
  """Decoding a token at a time gives what a chunk gives, over the end of a chunk"""
  path, g = yarn_model
  ids = tokens(CHUNK + 9)
  table = to_device(np.arange(1, 1 + g.runner.model.pages, dtype=np.int32)[None])
  step = TinyJit(lambda token, start: g.runner.model.logits(Step.decode(start, table), token).realize())
  got = np.concatenate([step(Tensor([t]).realize(), Tensor([i], dtype=dtypes.int32).realize()).numpy() for i, t in enumerate(ids)])
  Judge(path, ids).check(got, LIMIT)
  assert (got.argmax(-1) == g.logits(ids).argmax(-1)).all()

def test_the_future_does_not_count(yarn_model: tuple[Path, Engine]):
  path, g = yarn_model
  a, b = tokens(CHUNK + 20), tokens(CHUNK + 20)[:CHUNK] + tokens(20)
  assert a[:CHUNK] == b[:CHUNK] and a[CHUNK:] != b[CHUNK:]
  x, y = g.logits(a), g.logits(b)
  assert nmse(x[:CHUNK], y[:CHUNK]) < 1e-12 and errors(x[CHUNK:], y[CHUNK:]).min() > 1e-2

# ---- the tests themselves: what is wrong at some positions only is noticed ----

class Faulty:
  """In an engine's place: says what the oracle does, but for some positions"""
  def __init__(self, path: Path, place: slice, noise: float):
    self.path, self.place, self.noise = path, place, noise
  def logits(self, ids: list[int]) -> np.ndarray:
    out = logits(self.path, ids)
    out[self.place] = np.random.default_rng(0).standard_normal(out[self.place].shape) * self.noise
    return out

@pytest.mark.parametrize("place,complaint", [(slice(0, 0), ""), (slice(21, 40), r"positions \[21, 22, .*, 39\] of 40"),
                                             (slice(39, 40), r"positions \[39\] of 40")], ids=["none", "half", "the last"])
def test_zeros_at_some_positions(place: slice, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setitem(globals(), "engine_of", lambda path: Faulty(path, place, 0.))
  with pytest.raises(AssertionError, match=complaint) if complaint else nullcontext(): test_kinds_of_files("attn_kv_b", tmp_path)

@pytest.mark.parametrize("place,complaint", [(slice(0, 0), ""), (slice(70, 128), r"positions \[70, 71, 72\] of 73"),
                                             (slice(127, 128), r"positions \[127\] of 128")], ids=["none", "half", "the last"])
def test_noise_at_some_positions(place: slice, complaint: str, tmp_path: Path):
  path, = write_model(tmp_path / "m.gguf", "small-ds", "F16", seed=4, **SMALL)
  with pytest.raises(AssertionError, match=complaint) if complaint else nullcontext(): test_many_chunks((path, Faulty(path, place, 1.)))

# ---- the router ----

@pytest.mark.parametrize("gating,norm,biased", list(product(Gating, (False, True), (False, True))))
def test_router(gating: Gating, norm: bool, biased: bool):
  rng = np.random.default_rng([gating, norm, biased])
  x, bias = rng.standard_normal((1, 64)).astype(np.float32) * 2, rng.standard_normal(64).astype(np.float32) if biased else None
  names = SimpleNamespace(gating=int(gating), used=6, norm=norm, scale=1.8, groups=1)
  sel, weights = choose_experts(Tensor(x), Routing(6, gating, norm, 1.8, None if bias is None else Tensor(bias)))
  Tensor.realize(sel, weights)
  chosen, want, _ = route(x.astype(np.float64), bias, names)
  assert sel.dtype == dtypes.int32 and np.array_equal(sel.numpy(), chosen) and np.allclose(weights.numpy(), want, rtol=1e-5)
  if biased: assert not np.array_equal(chosen, route(x.astype(np.float64), None, names)[0])  # a bias that decides

@pytest.mark.parametrize("gating,biased", [(Gating.SIGMOID, True), (Gating.SOFTMAX, False), (Gating.SOFTMAX_WEIGHT, True)])
def test_router_of_groups(gating: Gating, biased: bool):
  how = Routing(4, gating, True, 2.5, None, 4, 2)
  logits, bias = tied(24, how, 12)
  if biased: how = replace(how, bias=Tensor(bias))
  else: bias = None
  chosen, want, _ = route(logits, bias, names_of(how))
  sel, weights = choose_experts(Tensor(logits), how)
  Tensor.realize(sel, weights)
  assert np.array_equal(sel.numpy(), chosen) and np.allclose(weights.numpy(), want, rtol=1e-5)
  alone = route(logits, bias, names_of(replace(how, groups=1)))[0]
  assert (np.sort(alone) != np.sort(chosen)).any(-1).mean() > .3   # groups that decide

@pytest.mark.parametrize("keys,message", [
  (dict(expert_group_count=5), "group_count: expected equal groups of at least two of the 16 experts, found 5"),
  (dict(expert_group_count=16), "group_count: expected equal groups of at least two of the 16 experts, found 16"),
  (dict(expert_group_count=17), "group_count: expected a number from 0 to 16, found 17"),
  (dict(expert_group_used_count=5), "group_used_count: expected a number from 1 to 4, found 5"),
  (dict(expert_group_used_count=0), "group_used_count: expected a number from 1 to 4, found 0"),
  (dict(expert_group_used_count=None), "group_used_count: expected int, found no such key"),
  (dict(expert_used_count=9), "group_used_count: expected groups of 4 that hold the 9 experts of expert_used_count, found 2")])
def test_groups_that_make_no_sense(keys: dict[str, int | None], message: str, tmp_path: Path):
  path = write_with(tmp_path / "m.gguf", keys, "small-v3", "F16", **SMALL | dict(q_lora=64))
  with pytest.raises(GGUFError) as e: Config.from_gguf(read_gguf(path))
  assert str(e.value).startswith(f"{path}: ") and str(e.value).endswith(message) and "\n" not in str(e.value)

@pytest.mark.parametrize("groups", [None, (0, 0), (1, 1), (4, 4)])
def test_groups_that_all_stay(groups: tuple[int, int] | None, tmp_path: Path):
  c = Config.from_gguf(read_gguf(write_model(tmp_path / "m.gguf", "small-v3", "F16", **SMALL | dict(q_lora=64, groups=groups))[0]))
  assert not Routing(c.n_chosen, c.gating, True, 1.0, None, c.n_groups, c.n_used_groups).grouped

def test_router_ties_and_tiny_sums():
  def to(*logits: float) -> tuple[list[int], list[float]]:
    sel, weights = choose_experts(Tensor([logits]), Routing(3, Gating.SIGMOID, True, 1.0))
    return sel.numpy()[0].tolist(), weights.numpy()[0].tolist()
  assert to(1, 1, 1, 1, 1, 1) == ([0, 1, 2], pytest.approx([1 / 3] * 3))
  assert to(0, 2, 1, 2, -1, 1)[0] == [1, 3, 2]                                     # the lower index first
  assert to(-30, -20, -30, -30, -30, -30)[1][0] == pytest.approx(2 ** 14 / (1 + np.exp(20)), rel=1e-4)  # the sum is held up from below

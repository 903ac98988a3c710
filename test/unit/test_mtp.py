"""The block that drafts: what it says, by the oracle; when it is asked; and that the tokens are those without it."""
from __future__ import annotations
import random
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable
import numpy as np, pytest
from drafting import CONTEXT, FEW, FILTERS, LEAST, PAGES, Pair, always_drafting
from extra.bench import no_device
from extra.mkgguf import write_model
from helpers import SMALL, decoding, prefilling
from mockcuda import on_cuda
from mockmetal import on_metal
from oracle import errors, forward, forward_mtp
from tinygrad import Device
from tinygrad.apps import llm
from tinygrad.apps.capture import read, to_device
from tinygrad.apps.engine.engine import Engine
from tinygrad.apps.engine.batch import ROWS, Batch, DraftBatch
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.engine.sampling import Features, Sampling, mask_words, sample, scores, token_counts
from tinygrad.apps.engine.sequence import Request
from tinygrad.apps.engine.speculate import TRIED
from tinygrad.apps.gguf import GGUFError, GGUFFile, read_gguf
from tinygrad.apps.mla import Transformer
from tinygrad.apps.models import load
from tinygrad.apps.mtp import MTP, load_block
from tinygrad.nn.cpu import is_cpu
from tinygrad.nn.latent_cache import CODES
from tinygrad.nn.step import PAGE

GLM = dict(SMALL, q_lora=64)
KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {   # a model, and which of the block's tensors its file does not have
  "all of its own": ("small-glm", GLM, ()), "embedding, norm and head of the model": ("small-glm", GLM, ("embed", "shared")),
  "a tied head": ("small-glm", GLM | dict(tied=True), ("embed", "shared_head_head")),
  "dense": ("small-youtu", GLM, ()), "YaRN": ("small-ds", SMALL, ())}

def without(f: GGUFFile, names: tuple[str, ...]) -> GGUFFile:
  """The file as if it did not have these of the block's tensors"""
  return replace(f, tensors={name: t for name, t in f.tensors.items() if not any(f".nextn.{n}" in name for n in names)})

def with_block(path: Path, context: int = CONTEXT, names: tuple[str, ...] = (), bits: int = 16) -> MTP:
  f = without(read_gguf(path), names)
  model = Transformer.from_gguf(f, context, pool=lambda _: PAGES, cache_bits=bits)
  return MTP(model, load_block(f, model.config))

class Oracle:
  """What a block says of the next token but one; `names` as above"""
  def __init__(self, path: Path, names: tuple[str, ...] = ()): self.path, self.names = path, names
  def __call__(self, ids: list[int], *guessed: int) -> np.ndarray: return forward_mtp(self.path, ids, without=self.names, guessed=guessed)[0]

@pytest.mark.parametrize("kind", KINDS)
def test_what_it_says(kind: str, tmp_path: Path):
  """Many tokens at once, one, and a few; of each every position"""
  model, overrides, names = KINDS[kind]
  path, = write_model(tmp_path / "m.gguf", model, "F32", seed=3, mtp=True, **overrides)
  mtp, ids = with_block(path, 64, names), np.random.default_rng(0).integers(0, 320, 37).astype(np.int32)
  want, tables = Oracle(path, names)(ids.tolist()), np.arange(1, mtp.model.pages + 1)[None]
  got = []
  for step, at in ((prefilling(0, 32, tables=tables), range(32)), (decoding(32, tables=tables), range(32, 33)),
                   (decoding(33, 34, 35, tables=tables.repeat(3, 0)), range(33, 36))):
    fed, behind = to_device(ids[at.start:at.stop]), to_device(ids[at.start + 1:at.stop + 1])
    got.append(mtp.head(step, mtp.hidden(step, behind, mtp.model.hidden(step, fed).contiguous())).numpy())
  assert errors(np.concatenate(got), want).max() < 1e-9

@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path: return write_model(tmp_path_factory.mktemp("mtp") / "m.gguf", "small-glm", "F32", seed=3, mtp=True, **GLM)[0]

def drafting(mtp: MTP, drafts: int = 1) -> Runner: return Runner(mtp.model, drafts, mtp)

def drawn(sampling: Sampling, logits: np.ndarray, text: list[int], prompt: int) -> int:
  """The token behind a text"""
  counts = token_counts(len(logits), text[:prompt], text[prompt:])
  counts[text[-1]] = (counts[text[-1]] | 1) + 2
  given = [np.float32([sampling.values()]), np.uint32([[sampling.seed, 0]]), np.int32([len(text) - 1])]
  given += [counts[None], sampling.bias_row(len(logits))[None]]
  return sample(to_device(logits[None].astype(np.float32)), sampling.features, *map(to_device, given)).item()

@pytest.mark.parametrize("drafts,sampling", [(1, Sampling()), (1, Sampling(bias=FEW)), (1, Sampling(**FILTERS, seed=7)),
                                             (1, Sampling(**FILTERS, bias=FEW, seed=8)), (3, Sampling(**FILTERS, bias=FEW, seed=9))])
def test_what_it_drafts(small: Path, drafts: int, sampling: Sampling):
  """Behind each step, plain or drafted, after a prompt of several chunks: what the oracle's logits say, drawn as the token itself will be"""
  engine, seen, prompt = always_drafting(drafting(with_block(small), drafts)), 0, np.random.default_rng(1).integers(0, 300, 70).tolist()
  engine.add(Request(prompt, sampling, limit=24))
  engine.add(Request(prompt[9:50], sampling, limit=24))
  while engine.step():
    if not isinstance(batch := engine.runner.batch, DraftBatch) or len(engine.batch) < 2: continue
    engine.runner.wait()
    start, ids, found = read(batch.start), read(batch.state.ids), read(batch.state.drafts).tolist()
    for row, s in enumerate(engine.batch):
      if found[row][0] < 0: continue   # the batch is set, and no step of it was launched
      text = ids[row, :start[row] + 1].tolist()
      assert text[:len(s.ids)] == s.ids
      for i, draft in enumerate(found[row]):
        behind = found[row][:i]
        assert draft == drawn(sampling, Oracle(small)(text, *behind)[-1], text + behind, s.prompt)
      seen += 1
  assert seen > 12 and engine.gauges.drafts

# ---- the same tokens ----

@pytest.fixture(scope="module")
def pair(small: Path) -> Pair:
  if not is_cpu(Device.DEFAULT): pytest.skip("not on the CPU")
  return Pair(drafting(with_block(small)))

@pytest.mark.parametrize("count", [1, 4])
def test_the_same_tokens(pair: Pair, count: int):
  """Greedy and drawn, by all filters and penalties, alone and together; stops and limits cut a draft; batches with probabilities are not drafted"""
  drafted, right = pair.drafts_of_requests(count, 20 // count)
  assert right[0] > 9 and drafted > sum(right) + 9

def test_pauses(pair: Pair, monkeypatch: pytest.MonkeyPatch):
  """While drafts are given up none are made, but the block's rows are"""
  speculation, coasted, coast = pair.drafted.speculation, [], pair.drafted.runner.coast
  monkeypatch.setattr(speculation, "_judge", lambda rows: setattr(speculation, "paused", 3))
  monkeypatch.setattr(speculation, "tried", TRIED)
  monkeypatch.setattr(pair.drafted.runner, "coast", lambda: (coasted.append(pair.drafted.steps), coast())[1])
  for seed in range(3): pair.assert_same([Request([3, 4, 5] * 9, Sampling(**FILTERS, bias=FEW, seed=i), limit=40) for i in range(2)], seed)
  assert len(coasted) > 20 and np.diff(coasted).max() > 1

@pytest.mark.skipif(not is_cpu(Device.DEFAULT), reason="not on the CPU")
def test_a_cache_of_8_bits(small: Path):
  eight = Pair(drafting(with_block(small, bits=8)))
  eight.assert_same([Request([3, 4, 5 + i], Sampling(bias=FEW, temperature=20.0, seed=i), limit=20) for i in range(2)])
  assert eight.drafted.gauges.accepted[0] > 2 and eight.drafted.runner.mtp.cache.dtype == CODES

def test_to_the_end_of_the_context(pair: Pair):
  pair.assert_same([Request([3, 4] * 60, Sampling(bias=FEW)), Request([5] * 150, Sampling(bias={5: 1e3}))])

def test_warming(pair: Pair, monkeypatch: pytest.MonkeyPatch):
  engine, asked = Engine(drafting(pair.drafted.runner.mtp), PAGES, max_rows=1), Request([3, 4, 5] * 3, limit=9)
  want = pair.says(pair.plain, [asked], random.Random(0))[0].produced
  engine.warm(Sampling(), Features(logprobs=True))
  for kind in (Batch, DraftBatch): monkeypatch.setattr(kind, "record", lambda *_: pytest.fail("recorded later"))
  monkeypatch.setattr(Runner, "record_chunk", lambda *_: pytest.fail("recorded later"))
  for each in (asked, replace(asked, logprobs=1)): assert list(engine.stream(engine.add(each))) == want

def test_a_batch_that_does_not_draft_leaves_its_rows(pair: Pair):
  """So that guesses are as good behind it: the cache of the block is what a batch that drafts makes of it"""
  engine, rows, ids = pair.drafted, [], [*range(3, 40)]
  for logprobs in (None, 1):
    engine.forget()
    s = engine.add(Request(ids, limit=30, logprobs=logprobs))
    while len(s.produced) < 20: engine.step()
    while engine.flying: engine._read()
    engine.runner.wait()
    assert isinstance(engine.runner.batch, DraftBatch) == (logprobs is None)
    cache = read(pair.drafted.runner.mtp.cache).reshape(PAGES, PAGE, -1)
    rows.append(cache[s.table.pages].reshape(-1, cache.shape[-1])[:len(s.ids) - 1])
    engine.abort(s)
  count = min(map(len, rows))
  assert count > 40 and errors(rows[1][:count], rows[0][:count]).max() < 1e-9

def test_more_sequences_than_rows(pair: Pair):
  runner = pair.drafted.runner
  assert isinstance(runner.batch_of(32), DraftBatch) and not isinstance(runner.batch_of(33), DraftBatch) and runner.batch_of(33).size == ROWS[-1]

def test_a_mask(pair: Pair):
  """The draw is a piece of its own, and the block's rows are written behind it"""
  class Odd:
    """A constraint: no even token"""
    def mask(self) -> np.ndarray: return np.full(mask_words(pair.vocab), 0xaaaaaaaa, np.uint32)
    def accept(self, token: int) -> None: assert token % 2
  said = []
  for engine in (pair.plain, pair.drafted):
    engine.forget()
    each = [engine.add(Request([3, 4, 5, i], Sampling(temperature=1.0, seed=i), limit=12, constraint=Odd())) for i in range(2)]
    while engine.step(): pass
    said.append([s.produced for s in each])
  assert said[0] == said[1] and all(token % 2 for tokens in said[0] for token in tokens)

@pytest.mark.parametrize("to,more", [("CUDA", 16), ("METAL", 18)])
def test_launches(small: Path, to: str, more: int):
  """What a step that drafts has more than one that does not: the token's embedding and the mix, the block, the head, two draws' ends"""
  with no_device(to):
    f = read_gguf(write_model(small.with_name("q.gguf"), "small-glm-wide", "Q4_0", mtp=True)[0])
    model = Transformer.from_gguf(f, 256, pool=lambda _: PAGES)
    batch, plain = (runner.batch_of(1).record(compiled=False).calls for runner in (drafting(MTP(model, load_block(f, model.config))), Runner(model)))
    assert len(batch) - len(plain) == more

@pytest.mark.parametrize("share", [0.0, .75, 1.0])
def test_accepted_by_force(pair: Pair, share: float):
  """Such a share of drafts, in each of several rows"""
  engine = always_drafting(drafting(pair.drafted.runner.mtp))
  engine.runner.force(share)
  for i in range(3): engine.add(Request([3 + i, 4], limit=100))
  while engine.step(): pass
  gauges = engine.gauges
  assert abs(gauges.accepted[0] / gauges.draft_tokens - share) < .04 and gauges.draft_tokens >= 3 * 45

# ---- files ----

def test_a_file_of_the_block_alone(small: Path, tmp_path: Path):
  """Beside one that has none: what it says is the same. Each may lack what the other has"""
  f = read_gguf(small)
  of_block = {name: t for name, t in f.tensors.items() if name.startswith("blk.2.")}
  trunk, alone = (replace(f, tensors=tensors) for tensors in ({n: t for n, t in f.tensors.items() if n not in of_block}, of_block))
  model = Transformer.from_gguf(trunk, 64, pool=lambda _: PAGES)
  with pytest.raises(GGUFError, match="expected tensors blk.2.nextn.\\*, found none$"): load_block(trunk, model.config)
  ids, step = np.random.default_rng(0).integers(0, 320, 33).astype(np.int32), prefilling(0, 32, tables=np.arange(1, model.pages + 1)[None])
  mtp = MTP(model, load_block(alone, model.config))
  got = mtp.head(step, mtp.hidden(step, to_device(ids[1:]), model.hidden(step, to_device(ids[:-1])).contiguous())).numpy()
  assert errors(got, Oracle(small)(ids.tolist())).max() < 1e-9

def test_a_block_of_another_model(small: Path, tmp_path: Path):
  other, = write_model(tmp_path / "o.gguf", "small-glm", "F32", mtp=True, **GLM | dict(dim=96))
  with pytest.raises(GGUFError) as e: load(small, 64, mtp=other)
  assert str(e.value) == f"{other}: tensor blk.2.nextn.eh_proj.weight: expected shape (64, 128), found (96, 192)"

def test_flags(small: Path, capsys: pytest.CaptureFixture[str]):
  assert load(small, 64, mtp=small).engine.runner.drafts == 1
  assert load(small, 64, drafts=2, mtp=small).engine.runner.drafts == 2
  for wrong, why in ((["--draft-mtp", "--draft-ngram", "2"], "--draft_ngram 2: expected no --draft_mtp beside it"),
                     (["--draft", str(small), "--draft-ngram", "2"], "--draft_ngram 2: expected no --draft beside it"),
                     (["--accepted", ".5"], "--accepted: expected --benchmark beside it"),
                     (["--benchmark", "--accepted", ".5"], "--accepted: expected --draft_ngram, --draft_mtp or --draft beside it"),
                     (["--benchmark", "4", "--draft-mtp"], "--draft_mtp: expected a table beside it, by --n_gen: tokens come several at a time")):
    with pytest.raises(llm.UserError) as e: llm.main(["-m", str(small), "--prompt", "a", *wrong])
    assert str(e.value) == why
  llm.main(["-m", str(small), "--benchmark", "-p", "0", "-n", "8", "-r", "1", "--draft-mtp", "--accepted", ".5", "-c", "64"])
  out = capsys.readouterr().out
  assert "drafts    50 % of them count as right, whatever they are: what is timed is no text\n" in out and " tokens accepted, by force; " in out

# ---- on the mocks ----

def assert_drawn(token: int, logits: np.ndarray, margin: float, sampling: Sampling, position: int) -> None:
  """That the token is what the oracle's logits say there, or as good: steps of several rows round otherwise than those of one"""
  near, given = (2 * 1e-3) ** .5, (np.float32([sampling.values()]), np.uint32([[sampling.seed, 0]]), np.int32([position]))
  bias = to_device(sampling.bias_row(len(logits))[None])
  row = scores(to_device(logits[None]), sampling.features, *map(to_device, given), None, bias).numpy()[0]
  assert row.max() - row[token] <= 6 * near * logits.std() / sampling.temperature or margin < near

@pytest.mark.parametrize("target,count", [(on_cuda, 2), (on_metal, 1)])
def test_on_a_mock(target: Callable[[], AbstractContextManager[None]], count: int, tmp_path: Path):
  """Of two sequences, and of one that is left: each token is the oracle's, and so is each draft, of the few that are allowed. The noise decides: both
  have the same"""
  path, = write_model(tmp_path / "m.gguf", "small-glm", "Q4_0", seed=2, mtp=True, **LEAST)
  sampling, drafts = Sampling(bias=FEW, temperature=20.0, seed=3), {}
  with target():
    engine = always_drafting(drafting(with_block(path, 2 * PAGE), count))
    said = [engine.add(Request([3, 4, 5] * 3, sampling, limit=12)), engine.add(Request([6, 7, 9, 8], sampling, limit=6))]
    while engine.step():
      if not engine.steps: continue
      engine.runner.wait()
      batch = engine.runner.batch
      for row, (start, ids, draft) in enumerate(zip(*map(read, (batch.start, batch.state.ids, batch.state.drafts)))):
        if draft[0] >= 0 and row < len(engine.batch): drafts[tuple(ids[:start + 1].tolist())] = draft.tolist()
    assert [len(s.produced) for s in said] == [12, 6] and sum(engine.gauges.accepted) > 4, said[0].error
  for s in said:
    logits, margins = forward(path, (*s.ids,))
    for i in range(s.prompt, len(s.ids)): assert_drawn(s.ids[i], logits[i - 1], margins[i - 1], sampling, i - 1)
  assert len(drafts) > 6
  for ids, found in drafts.items():
    for i, draft in enumerate(found):
      rows, margins = forward_mtp(path, ids, guessed=tuple(found[:i]))
      assert_drawn(draft, rows[-1], margins.min(), sampling, len(ids) + i - 1)

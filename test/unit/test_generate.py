"""Generation: what is fed, what is kept, where it ends. Every continuation is judged by the logits of a generator that starts from nothing."""
from pathlib import Path
from typing import Iterator
import numpy as np, pytest
from extra.mkgguf import write_model
from helpers import SMALL, generator
from tinygrad.apps.generate import CHUNK, ContextFull, Generator
from tinygrad.apps.models import Model, load
from tinygrad.apps.sampling import Sampling
from tinygrad.engine.realize import to_program_cache

CONTEXT = 2 * CHUNK
PROMPT = np.random.default_rng(0).integers(0, 256, CONTEXT).tolist()

@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
  return write_model(tmp_path_factory.mktemp("generate") / "m.gguf", "small-glm", "F32", seed=5, **SMALL | dict(q_lora=64))[0]
@pytest.fixture(scope="module")
def shared(path: Path) -> Generator: return generator(path, CONTEXT)
@pytest.fixture(scope="module")
def judge(path: Path) -> Generator: return generator(path, CONTEXT)
@pytest.fixture
def g(shared: Generator) -> Iterator[Generator]:
  shared.forget()
  yield shared

def assert_greedy(judge: Generator, ids: list[int], out: list[int]) -> None:
  assert out == judge.logits(ids + out)[len(ids) - 1:-1].argmax(-1).tolist()

@pytest.mark.parametrize("n", [1, 2, CHUNK // 4, CHUNK // 4 + 3, CHUNK, CHUNK + 1, CHUNK + 20])
def test_greedy_is_the_argmax(g: Generator, judge: Generator, n: int):
  """Prompts of each kind: fed one by one, in a padded chunk, in whole chunks, in chunks that overlap"""
  out = list(g.generate(PROMPT[:n], 6))
  assert len(out) == 6 and len(set(out)) > 1
  assert_greedy(judge, PROMPT[:n], out)

def test_count(g: Generator):
  for count in (0, 1, 3): assert len(list(g.generate(PROMPT[:5], count))) == count

def test_stop(g: Generator):
  out = list(g.generate(PROMPT[:5], 8))
  at = next(i for i, t in enumerate(out) if t not in out[:i] and i > 1)
  assert list(g.generate(PROMPT[:5], 8, stop=frozenset({out[at], 10 ** 6}))) == out[:at + 1]  # the stop token comes last
  assert list(g.generate(PROMPT[:5], 8, stop=frozenset({out[0]}))) == out[:1]

def test_the_context_fills(g: Generator, judge: Generator):
  ids = PROMPT[:CONTEXT - 4]
  for count in (None, 1000):
    out = list(g.generate(ids, count))
    assert len(out) == 4 and g.full
    assert_greedy(judge, ids, out)
  list(g.generate(ids, 2))
  assert not g.full
  assert len(list(g.generate(PROMPT[:CONTEXT - 1]))) == 1 and g.full

def test_what_does_not_fit(g: Generator):
  for n in (CONTEXT, CONTEXT + 1):
    with pytest.raises(ContextFull, match=f"{n} tokens.*{CONTEXT}") as e: list(g.generate((PROMPT * 2)[:n]))
    assert "\n" not in str(e.value)
  with pytest.raises(ContextFull, match=f"{CONTEXT + 1} tokens.*{CONTEXT}"): g.logits((PROMPT * 2)[:CONTEXT + 1])
  assert g.logits(PROMPT).shape == (CONTEXT, 320)

@pytest.mark.parametrize("ids,message", [([], "no tokens"), ([1, -1], "token -1: expected 0 to 319"),
                                         ([320, 1], "token 320: expected 0 to 319")], ids=str)
def test_what_is_no_prompt(g: Generator, judge: Generator, ids: list[int], message: str):
  before = list(g.generate(PROMPT[:9], 3))
  for use in (lambda: list(g.generate(ids, 3)), lambda: g.logits(ids), lambda: g.prefill(ids)):
    with pytest.raises(ValueError, match=message) as e: use()
    assert "\n" not in str(e.value)
  assert list(g.generate(PROMPT[:9], 3)) == before  # and the generator goes on as if nothing had been

class Fed:
  """Counts the positions that are computed from here on."""
  def __init__(self, g: Generator, monkeypatch):
    self.steps, self.chunks = [], 0
    decode, prefill = g.decode, g.prefill_step
    def counted_decode(features, pos): self.steps.append(pos); return decode(features, pos)
    def counted_prefill(*args): self.chunks += 1; return prefill(*args)
    monkeypatch.setattr(g, "decode", counted_decode)
    monkeypatch.setattr(g, "prefill_step", counted_prefill)

def test_turns_reuse_the_cache(g: Generator, judge: Generator, monkeypatch):
  ids = PROMPT[:CHUNK]
  answer = list(g.generate(ids, 4))
  longer = ids + answer + PROMPT[40:44]
  fed = Fed(g, monkeypatch)
  out = list(g.generate(longer, 3))
  # the last token of an answer was never fed: position 35 on is new
  assert fed.chunks == 0 and fed.steps == list(range(len(ids) + 3, len(longer) + 2))
  assert_greedy(judge, longer, out)
  fed.steps.clear()
  assert list(g.generate(longer, 3)) == out and fed.steps == list(range(len(longer) - 1, len(longer) + 2))  # the same again: nothing but the answer

def test_another_branch(g: Generator, judge: Generator, monkeypatch):
  """A prompt that parts from what the cache holds: what is common stays, the rest is written over"""
  list(g.generate(PROMPT[:CHUNK + 10], 5))
  branch = PROMPT[:20] + [7, 8, 9]
  fed = Fed(g, monkeypatch)
  out = list(g.generate(branch, 4))
  assert fed.chunks == 0 and fed.steps == list(range(20, 26))
  assert_greedy(judge, branch, out)
  shorter = branch[:5]                                                    # a prefix of it
  assert_greedy(judge, shorter, list(g.generate(shorter, 4)))
  other = PROMPT[40:55]                                                   # nothing in common
  assert_greedy(judge, other, list(g.generate(other, 4)))

@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_answer_left_unfinished(g: Generator, judge: Generator, after: int):
  ids = PROMPT[:12]
  answer = g.generate(ids, 10)
  said = [next(answer) for _ in range(after)]
  answer.close()
  assert g.cached == (ids + said)[:len(g.cached)] and len(g.cached) >= (after and len(ids) - 1)
  for following in (ids + said + [5, 6], ids, [9] + ids):
    assert_greedy(judge, following, list(g.generate(following, 4)))

def test_an_answer_interrupted_at_work(g: Generator, judge: Generator, monkeypatch):
  """Ctrl-C arrives while a prompt is being read: the cache's rows are not trusted further than they were written"""
  ids, calls, prefill = PROMPT[:2 * CHUNK - 4], [], g.prefill_step
  list(g.generate(PROMPT[40:50], 2))
  def interrupted(*args):
    calls.append(args)
    if len(calls) == 2: raise KeyboardInterrupt
    return prefill(*args)
  monkeypatch.setattr(g, "prefill_step", interrupted)
  with pytest.raises(KeyboardInterrupt): next(g.generate(ids, 2))
  monkeypatch.undo()
  for following in (ids, PROMPT[40:50], PROMPT[:20]): assert_greedy(judge, following, list(g.generate(following, 3)))

def test_logits_then_generate(g: Generator, judge: Generator):
  g.logits(PROMPT[:CHUNK + 5])
  assert g.cached == PROMPT[:CHUNK + 5]
  for ids in (PROMPT[:CHUNK + 5], PROMPT[:CHUNK + 9], PROMPT[:8]): assert_greedy(judge, ids, list(g.generate(ids, 3)))

def test_seeds(g: Generator):
  def say(seed: int, **kw) -> list[int]: return list(g.generate(PROMPT[:10], 8, Sampling(2.0, seed=seed, **kw)))
  first = say(1)
  assert say(1) == first and say(2) != first
  g.forget()
  assert say(1) == first                                                  # whatever the cache held before
  a, b = say(1, top_k=50, top_p=.9, min_p=.01, repeat_penalty=1.2), say(1, top_k=50, top_p=.9, min_p=.01, repeat_penalty=1.2)
  assert a == b
  graphs, compiled = len(g.decode_steps), len(to_program_cache)
  say(9, top_k=3, top_p=.5, min_p=.1, repeat_penalty=1.9)
  assert (len(g.decode_steps), len(to_program_cache)) == (graphs, compiled)  # other values, the same graph

def test_a_penalty_forgets_with_the_prompt(g: Generator):
  """Tokens of the prompt and of the answer are penalized, those of another conversation are not"""
  s = Sampling(repeat_penalty=1e3)
  out = list(g.generate(PROMPT[:10], 12, s))
  assert len({*PROMPT[:10], *out}) == len({*PROMPT[:10]}) + 12            # nothing is said twice
  assert list(g.generate(PROMPT[:10], 12, s)) == out
  list(g.generate(PROMPT[20:40], 5, s))
  assert list(g.generate(PROMPT[:10], 12, s)) == out

def test_a_context_smaller_than_a_chunk(path: Path, judge: Generator):
  g = generator(path, 8)
  for n in (1, 3, 7, 5):
    out = list(g.generate(PROMPT[:n]))
    assert len(out) == 8 - n and g.full
    assert_greedy(judge, PROMPT[:n], out)
  assert np.allclose(g.logits(PROMPT[:8]), judge.logits(PROMPT[:8]), atol=1e-4)
  with pytest.raises(ContextFull): list(g.generate(PROMPT[:8]))

# ---- text ----

@pytest.fixture(scope="module")
def model(path: Path) -> Model: return load(path, CONTEXT)

def shown(model: Model, tokens: list[int]) -> str:
  special = set(model.tokenizer.special_tokens.values())
  return model.tokenizer.decode([t for t in tokens if t not in special])

def test_stop_strings(model: Model):
  """A stop string may begin in one token and end in another; what might begin one is held back, and no part of it is ever shown."""
  ids = PROMPT[:10]
  tokens = list(model.generate(ids, 24))
  pieces, text = [model.tokenizer.decode([t]) for t in tokens], "".join(model.complete(ids, 24))
  assert text == shown(model, tokens) and len(text) > 20
  assert "".join(model.complete(ids, 24, stops=("no such text \u2603",))) == text
  for at, length in ((0, 1), (3, 2), (5, 6), (9, 11), (len(text) - 2, 2)):
    stop = text[at:at + length]
    assert "".join(model.complete(ids, 24, stops=("\u2603", stop))) == text[:text.find(stop)]
  assert any(len(p) < 6 for p in pieces)                                  # so a stop of 6 letters spans tokens
  early, late = text[4:7], text[8:12]
  assert "".join(model.complete(ids, 24, stops=(late, early))) == text[:min(text.find(early), text.find(late))]
  assert "".join(model.complete(ids, 24, stops=(text[-3:] + "\u2603",))) == text  # a beginning that never ends is shown after all

def test_pieces_are_whole_characters(model: Model):
  pieces = list(model.complete(PROMPT[:10], 24, Sampling(3.0, seed=3)))
  assert all(pieces) and "".join(pieces) == shown(model, list(model.generate(PROMPT[:10], 24, Sampling(3.0, seed=3))))

def test_end_of_turn_is_not_shown(model: Model, monkeypatch):
  out = list(model.generate(PROMPT[:10], 6))
  monkeypatch.setattr(model.tokenizer, "stop_ids", frozenset({out[3]}))
  end = out.index(out[3])
  assert list(model.generate(PROMPT[:10], 6)) == out[:end] and list(model.generate(PROMPT[:10], 6, stop=False)) == out

def test_numpy_tokens(model: Model):
  ids = np.int64(PROMPT[:10])
  assert list(model.generate(ids, 3)) == list(model.generate(PROMPT[:10], 3)) and model.logits(ids).dtype == np.float32

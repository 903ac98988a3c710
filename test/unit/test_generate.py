"""Generation: what is fed, what is kept, where it ends. Every continuation is judged by the logits of a generator that starts from nothing."""
import threading
from pathlib import Path
from typing import Iterator
import numpy as np, pytest
from gguf import GGMLQuantizationType as T
from extra.mkgguf import write_model
from helpers import SMALL, WIDE, generator, write_mixed
from mockcuda import on_cuda
from tinygrad.apps.engine.engine import ContextFull, Generator, Superseded
from tinygrad.apps.mla import PREFILL_SIZES
from tinygrad.apps.models import Model, load
from tinygrad.apps.engine.sampling import Features, Sampling
from tinygrad.engine.realize import to_program_cache

CHUNK = PREFILL_SIZES[0]

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
  """Prompts of each kind: fed one by one, in a padded chunk, in whole chunks, in a whole and a padded one"""
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

@pytest.mark.parametrize("wrong", [1.5, 1.0, True, "a", "7", None, np.float32(2), np.bool_(1), [3], np.zeros((1, 2), np.int64)], ids=repr)
def test_what_is_no_token(g: Generator, wrong: object):
  answer = g.generate(PROMPT[:9], 3)
  said = [next(answer)]
  for use in (lambda ids: list(g.generate(ids, 3)), g.logits, g.prefill):
    with pytest.raises(ValueError, match="^token: expected a whole number, found ") as e: use([3, wrong])
    assert "\n" not in str(e.value)
  for ids in (5, None, 1.5):
    with pytest.raises(ValueError, match="^tokens: expected a list of numbers, found "): g.logits(ids)
  said += answer                                                          # an answer under way is none the worse
  assert list(g.generate(PROMPT[:9], 3)) == said == list(g.generate(np.uint16(PROMPT[:9]), np.int64(3)))

@pytest.mark.parametrize("count,message", [(-1, "0 or more, found -1"), (1.5, "a whole number, found 1.5"), (True, "a whole number, found True"),
                                           ("3", "a whole number, found '3'")], ids=str)
def test_what_is_no_count(g: Generator, count: object, message: str):
  with pytest.raises(ValueError, match=f"^count: expected {message}$"): list(g.generate(PROMPT[:9], count))

class Fed:
  """Counts the positions that are computed from here on."""
  def __init__(self, g: Generator, monkeypatch):
    self.steps, self.chunks = [], 0
    decode, prefill = g.decode, g.prefill_step
    def counted_decode(features, pos):
      self.steps.append(pos)
      return decode(features, pos)
    def counted_prefill(*args):
      self.chunks += 1
      return prefill(*args)
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

def rows(g: Generator, count: int) -> list[np.ndarray]: return [c.numpy()[:count] for c in g.model.cache]

@pytest.mark.parametrize("more", [CHUNK // 4 + 1, CHUNK - 1, CHUNK, CHUNK + 5, CONTEXT - 12 - 2])
def test_a_prompt_that_goes_on_leaves_the_rows_before_it(g: Generator, judge: Generator, more: int):
  """To the bit: prefill computes other roundings than decode wrote. At the context's end too, where a step reaches past it"""
  ids = PROMPT[:12]
  said = list(g.generate(ids, 2))
  held = len(g.cached)
  assert held == 13
  before, longer = rows(g, held), ids + said[:1] + PROMPT[13:12 + more]
  g.prefill(longer)
  assert all(np.array_equal(a, b) for a, b in zip(before, rows(g, held))) and len(g.cached) == len(longer) - 1
  assert_greedy(judge, longer, list(g.generate(longer, 4)))

def test_rows_by_tensor_cores(tmp_path: Path, monkeypatch):
  """The same where a step may be long; the mock lets nobody past a buffer's end"""
  monkeypatch.setattr("tinygrad.apps.mla.PREFILL_SIZES", (CHUNK, 2 * CHUNK))
  with on_cuda():
    g = generator(write_mixed(tmp_path / "m.gguf", "small-ds", [T.F16], **WIDE | dict(blocks=1, experts=0)), CONTEXT)
    steps, prefill_step = [], g.prefill_step
    def counted(size, at):
      steps.append((size, at))
      return prefill_step(size, at)
    monkeypatch.setattr(g, "prefill_step", counted)
    g.prefill(PROMPT[:13])
    before = rows(g, 12)
    g.prefill(PROMPT[:CONTEXT - 1])
    after = rows(g, CONTEXT - 2)
    g.forget()
    g.prefill(PROMPT[:CONTEXT - 1])
    assert steps == [(CHUNK, 0), (2 * CHUNK, 12), (2 * CHUNK, 0)]         # the second reaches past the context's end
    for a, b, c in zip(before, after, rows(g, CONTEXT - 2)):
      assert np.array_equal(a, b[:12]) and np.abs(b.astype(np.float32) - c).max() < 2e-2 and np.abs(c).max() > 1

def test_logits_at_the_contexts_end(g: Generator, judge: Generator):
  """The last step, padded past the end, changes nothing before it"""
  whole = g.logits(PROMPT)
  kept = rows(g, CONTEXT)
  for n in (CONTEXT - 1, CHUNK + 1):
    np.testing.assert_array_equal(g.logits(PROMPT[:n]), whole[:n])
    assert all(np.array_equal(a[:n], b) for a, b in zip(kept, rows(g, n)))

# ---- one at a time ----

TAKES_OVER = {"generate": lambda g: next(g.generate(PROMPT[30:40], 2)), "logits": lambda g: g.logits(PROMPT[30:40]),
              "prefill": lambda g: g.prefill(PROMPT[30:40]), "forget": lambda g: g.forget()}
@pytest.mark.parametrize("how", TAKES_OVER)
def test_a_later_call_takes_over(g: Generator, judge: Generator, how: str):
  """The older answer says so instead of going on with what is no longer there, and the newer one is right"""
  older = g.generate(PROMPT[:10], 6)
  said = [next(older), next(older)]
  TAKES_OVER[how](g)
  with pytest.raises(Superseded, match="later call.*one sequence") as e: next(older)
  assert "\n" not in str(e.value)
  assert_greedy(judge, PROMPT[:10], said)
  newer = g.generate(PROMPT[20:32], 4)
  out = [next(newer)]
  with pytest.raises(StopIteration): next(older)
  assert_greedy(judge, PROMPT[20:32], out + list(newer))

def test_taken_over_in_turns(g: Generator, judge: Generator):
  a, b = g.generate(PROMPT[:10], 6), g.generate(PROMPT[20:30], 6)
  first, second = [next(a)], [next(b)]
  with pytest.raises(Superseded): next(a)
  second += b
  assert_greedy(judge, PROMPT[:10], first)
  assert_greedy(judge, PROMPT[20:30], second)

def test_an_answer_at_its_end_is_not_taken_over(g: Generator):
  done = g.generate(PROMPT[:10], 1)
  next(done)
  g.forget()
  assert list(done) == []

def test_threads_take_turns(g: Generator, judge: Generator, monkeypatch):
  """Whatever two threads get, it is right as far as it goes; and never are both at the device"""
  for ids in (PROMPT[:10], PROMPT[20:30]): list(g.generate(ids, 2))
  decode, inside, said, failed = g.decode, threading.Semaphore(), {}, []
  def watched(features, pos):
    if not inside.acquire(blocking=False): failed.append("two at the device")
    try: return decode(features, pos)
    finally: inside.release()
  monkeypatch.setattr(g, "decode", watched)
  def talk(at: int) -> None:
    said[at], seen = [], 0
    while seen < 3 and len(failed) == 0:
      out: list[int] = []
      try:
        for token in g.generate(PROMPT[at:at + 10], 8): out.append(token)
      except Superseded: pass
      except Exception as e: failed.append(repr(e))
      said[at].append(out)
      seen += 1
  threads = [threading.Thread(target=talk, args=(at,)) for at in (0, 20)]
  for t in threads: t.start()
  for t in threads: t.join()
  assert not failed
  want = {at: list(judge.generate(PROMPT[at:at + 10], 8)) for at in (0, 20)}
  for at, outs in said.items(): assert len(outs) == 3 and all(out == want[at][:len(out)] for out in outs)

# ---- steps that fail ----

@pytest.mark.parametrize("following", [PROMPT[:10], PROMPT[20:31], PROMPT[20:32], PROMPT[20:33]], ids=len)
@pytest.mark.parametrize("launched", [False, True])
def test_a_step_that_fails(g: Generator, judge: Generator, monkeypatch, launched: bool, following: list[int]):
  """At position 10, before its launch or behind it: where the device then is, is not taken for granted by a prompt read in a chunk"""
  answer = g.generate(PROMPT[:10], 4)
  next(answer)
  jit = g.decode_steps[Features()]
  def planted(*args):
    if launched: jit(*args)
    raise RuntimeError("planted")
  with monkeypatch.context() as m:
    m.setitem(g.decode_steps, Features(), planted)
    with pytest.raises(RuntimeError, match="planted"): next(answer)
  assert_greedy(judge, following, list(g.generate(following, 4)))

@pytest.mark.parametrize("where", ["tinygrad.apps.capture.find", "tinygrad.apps.capture.graph_split_rewrite", "tinygrad.engine.jit.get_runtime"])
def test_a_first_step_that_fails(path: Path, judge: Generator, monkeypatch, where: str):
  """While it is recorded or first run: nothing of it is kept"""
  g, features = generator(path, CONTEXT), Features()
  def planted(*args, **kw): raise RuntimeError("planted")
  def capture(pos: int):
    with monkeypatch.context() as m:
      m.setattr(where, planted)
      return decode(features, pos)
  decode = g.decode
  monkeypatch.setattr(g, "decode", lambda features, pos: capture(pos))
  with pytest.raises(RuntimeError, match="planted"): next(g.generate(PROMPT[:1], 4))
  monkeypatch.undo()
  for following in (PROMPT[:1], PROMPT[:10]): assert_greedy(judge, following, list(g.generate(following, 4)))

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

@pytest.mark.parametrize("stops", [("",), ("a", ""), (None,), (b"a",), "text"], ids=repr)
def test_what_is_no_stop(model: Model, stops):
  with pytest.raises(ValueError, match="^stops: expected a list of texts of one character or more, found ") as e:
    list(model.complete(PROMPT[:10], 4, stops=stops))
  assert "\n" not in str(e.value)

def test_pieces_are_whole_characters(model: Model):
  pieces = list(model.complete(PROMPT[:10], 24, Sampling(3.0, seed=3)))
  assert all(pieces) and "".join(pieces) == shown(model, list(model.generate(PROMPT[:10], 24, Sampling(3.0, seed=3))))

def test_end_of_turn_is_not_shown(model: Model, monkeypatch):
  out = list(model.generate(PROMPT[:10], 6))
  monkeypatch.setattr(model.tokenizer, "stop_ids", frozenset({out[3]}))
  end = out.index(out[3])
  assert list(model.generate(PROMPT[:10], 6)) == out[:end] and list(model.generate(PROMPT[:10], 6, stop=False)) == out

def test_tokens_from_python(model: Model):
  for wrong in ([1, 1.5], [True], ["a"], np.float64(PROMPT[:3]), np.zeros((2, 3), np.int64), 5):
    for use in (model.logits, lambda ids: list(model.generate(ids, 2)), lambda ids: list(model.complete(ids, 2))):
      with pytest.raises(ValueError, match="^tokens?: expected a"): use(wrong)

def test_numpy_tokens(model: Model):
  ids = np.int64(PROMPT[:10])
  assert list(model.generate(ids, 3)) == list(model.generate(PROMPT[:10], 3)) and model.logits(ids).dtype == np.float32

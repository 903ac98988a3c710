"""Generation: what is fed, what is kept, where it ends. Every continuation is judged by the logits of an engine that starts from nothing."""
import threading
from pathlib import Path
from typing import Any, Callable, Iterator
import numpy as np, pytest
from gguf import GGMLQuantizationType as T
from extra.mkgguf import write_model
from helpers import SMALL, WIDE, engine_of, write_mixed
from mockcuda import on_cuda
from tinygrad.apps.engine.engine import ContextFull, Engine
from tinygrad.apps.mla import PREFILL_SIZES
from tinygrad.apps.models import Model, load
from tinygrad.apps.engine.sampling import Features, Sampling
from tinygrad.apps.engine.sequence import Piece
from tinygrad.engine.realize import to_program_cache
from tinygrad.nn.step import PAGE

CHUNK = PREFILL_SIZES[0]

CONTEXT = 2 * CHUNK
PROMPT = np.random.default_rng(0).integers(0, 256, CONTEXT).tolist()

@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
  return write_model(tmp_path_factory.mktemp("generate") / "m.gguf", "small-glm", "F32", seed=5, **SMALL | dict(q_lora=64))[0]
@pytest.fixture(scope="module")
def shared(path: Path) -> Engine: return engine_of(path, CONTEXT)
@pytest.fixture(scope="module")
def judge(path: Path) -> Engine: return engine_of(path, CONTEXT)
@pytest.fixture
def g(shared: Engine) -> Iterator[Engine]:
  shared.forget()
  yield shared

def assert_greedy(judge: Engine, ids: list[int], out: list[int]) -> None:
  assert out == judge.logits(ids + out)[len(ids) - 1:-1].argmax(-1).tolist()

@pytest.mark.parametrize("n", [1, 2, CHUNK // 4, CHUNK // 4 + 3, CHUNK, CHUNK + 1, CHUNK + 20])
def test_greedy_is_the_argmax(g: Engine, judge: Engine, n: int):
  """Prompts of each kind: fed one by one, in a padded chunk, in whole chunks, in a whole and a padded one"""
  out = list(g.generate(PROMPT[:n], 6))
  assert len(out) == 6 and len(set(out)) > 1
  assert_greedy(judge, PROMPT[:n], out)

def test_count(g: Engine):
  for count in (0, 1, 3): assert len(list(g.generate(PROMPT[:5], count))) == count

def test_stop(g: Engine):
  out = list(g.generate(PROMPT[:5], 8))
  at = next(i for i, t in enumerate(out) if t not in out[:i] and i > 1)
  assert list(g.generate(PROMPT[:5], 8, stop=frozenset({out[at], 10 ** 6}))) == out[:at + 1]  # the stop token comes last
  assert list(g.generate(PROMPT[:5], 8, stop=frozenset({out[0]}))) == out[:1]

def test_the_context_fills(g: Engine, judge: Engine):
  ids = PROMPT[:CONTEXT - 4]
  for count in (None, 1000):
    out = list(g.generate(ids, count))
    assert len(out) == 4 and g.full
    assert_greedy(judge, ids, out)
  list(g.generate(ids, 2))
  assert not g.full
  assert len(list(g.generate(PROMPT[:CONTEXT - 1]))) == 1 and g.full

def test_what_does_not_fit(g: Engine):
  for n in (CONTEXT, CONTEXT + 1):
    with pytest.raises(ContextFull, match=f"{n} tokens.*{CONTEXT}") as e: list(g.generate((PROMPT * 2)[:n]))
    assert "\n" not in str(e.value)
  with pytest.raises(ContextFull, match=f"{CONTEXT + 1} tokens.*{CONTEXT}"): g.logits((PROMPT * 2)[:CONTEXT + 1])
  assert g.logits(PROMPT).shape == (CONTEXT, 320)

@pytest.mark.parametrize("ids,message", [([], "no tokens"), ([1, -1], "token -1: expected 0 to 319"),
                                         ([320, 1], "token 320: expected 0 to 319")], ids=str)
def test_what_is_no_prompt(g: Engine, judge: Engine, ids: list[int], message: str):
  before = list(g.generate(PROMPT[:9], 3))
  for use in (lambda: list(g.generate(ids, 3)), lambda: g.logits(ids), lambda: g.prefill(ids)):
    with pytest.raises(ValueError, match=message) as e: use()
    assert "\n" not in str(e.value)
  assert list(g.generate(PROMPT[:9], 3)) == before  # and the engine goes on as if nothing had been

@pytest.mark.parametrize("wrong", [1.5, 1.0, True, "a", "7", None, np.float32(2), np.bool_(1), [3], np.zeros((1, 2), np.int64)], ids=repr)
def test_what_is_no_token(g: Engine, wrong: object):
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
def test_what_is_no_count(g: Engine, count: object, message: str):
  with pytest.raises(ValueError, match=f"^count: expected {message}$"): list(g.generate(PROMPT[:9], count))

class Fed:
  """Notes what is computed from here on: chunks, as (size, position, tokens), and the positions of steps"""
  def __init__(self, g: Engine, monkeypatch):
    self.steps, self.chunks = [], []
    runner, launch, prefill = g.runner, g.runner.launch, g.runner.prefill
    def noted_launch() -> None:
      self.steps += runner.batch.columns.tolist()
      launch()
    def noted_prefill(pieces: list[Piece], size: int, slices: range, shared: bool) -> None:
      if not slices.start: self.chunks += [(size, piece.start, len(piece.ids)) for piece in pieces]
      prefill(pieces, size, slices, shared)
    monkeypatch.setattr(runner, "launch", noted_launch)
    monkeypatch.setattr(runner, "prefill", noted_prefill)

def test_turns_reuse_the_cache(g: Engine, judge: Engine, monkeypatch):
  ids = PROMPT[:CHUNK]
  answer = list(g.generate(ids, 4))
  longer = ids + answer + PROMPT[40:44]
  fed, known = Fed(g, monkeypatch), len(ids) + 3                          # the last token of an answer was never fed
  out = list(g.generate(longer, 3))
  assert fed.chunks == [(CHUNK, known, len(longer) - 1 - known)] and fed.steps == list(range(len(longer) - 1, len(longer) + 2))
  assert_greedy(judge, longer, out)
  fed.chunks.clear()
  fed.steps.clear()
  assert list(g.generate(longer, 3)) == out                               # the same again: nothing but the answer
  assert not fed.chunks and fed.steps == list(range(len(longer) - 1, len(longer) + 2))

def test_another_branch(g: Engine, judge: Engine, monkeypatch):
  """A prompt that parts from what the cache holds: what is common stays if it is half of a page's rows, the rest is written over"""
  list(g.generate(PROMPT[:CHUNK + 10], 5))
  branch = PROMPT[:CHUNK - 2] + [7, 8, 9]
  fed = Fed(g, monkeypatch)
  out = list(g.generate(branch, 4))
  assert fed.chunks == [(CHUNK, CHUNK - 2, 2)] and fed.steps == list(range(CHUNK, CHUNK + 4))
  assert_greedy(judge, branch, out)
  fed.chunks.clear()
  shorter = branch[:5]                                                    # a prefix of it, and little of it
  assert_greedy(judge, shorter, list(g.generate(shorter, 4)))
  other = PROMPT[40:55]                                                   # nothing in common
  assert_greedy(judge, other, list(g.generate(other, 4)))
  assert fed.chunks == [(CHUNK, 0, 4), (CHUNK, 0, 14)]

def held(g: Engine, ids: list[int]) -> tuple[int, list[np.ndarray]]:
  """How many of ids have rows in the cache; and these, of each block"""
  g.wait()
  table, count = g.pool.match(ids)
  pages = list(table.pages)
  g.pool.release(table, ids, count)
  return count, [c.numpy().reshape(-1, PAGE, c.shape[1])[pages].reshape(-1, c.shape[1])[:count] for c in g.runner.model.cache]

@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_answer_left_unfinished(g: Engine, judge: Engine, after: int):
  ids = PROMPT[:12]
  answer = g.generate(ids, 10)
  said = [next(answer) for _ in range(after)]
  answer.close()
  assert held(g, ids + said)[0] >= (after and len(ids) - 1)
  for following in (ids + said + [5, 6], ids, [9] + ids):
    assert_greedy(judge, following, list(g.generate(following, 4)))

def test_an_answer_interrupted_at_work(g: Engine, judge: Engine, monkeypatch):
  """Ctrl-C arrives while a prompt is being read: the cache's rows are not trusted further than they were written"""
  ids, calls, prefill = PROMPT[:2 * CHUNK - 4], [], g.runner.prefill
  list(g.generate(PROMPT[40:50], 2))
  def interrupted(*args):
    calls.append(args)
    if len(calls) == 2: raise KeyboardInterrupt
    return prefill(*args)
  monkeypatch.setattr(g.runner, "prefill", interrupted)
  monkeypatch.setattr(g.scheduler, "sizes", (CHUNK,))
  with pytest.raises(KeyboardInterrupt): next(g.generate(ids, 2))
  monkeypatch.undo()
  for following in (ids, PROMPT[40:50], PROMPT[:20]): assert_greedy(judge, following, list(g.generate(following, 3)))

@pytest.mark.parametrize("more", [CHUNK // 4 + 1, CHUNK - 1, CHUNK, CHUNK + 5, CONTEXT - 12 - 2])
def test_a_prompt_that_goes_on_leaves_the_rows_before_it(g: Engine, judge: Engine, more: int):
  """To the bit: prefill computes other roundings than decode wrote. At the context's end too, where a step reaches past it"""
  ids = PROMPT[:12]
  said = list(g.generate(ids, 2))
  count, before = held(g, ids + said)
  assert count == 13
  longer = ids + said[:1] + PROMPT[13:12 + more]
  g.prefill(longer)
  count, after = held(g, longer)
  assert all(np.array_equal(a, b[:13]) for a, b in zip(before, after)) and count == len(longer) - 1
  assert_greedy(judge, longer, list(g.generate(longer, 4)))

def test_rows_by_tensor_cores(tmp_path: Path, monkeypatch):
  """The same where a step may be long; the mock lets nobody past a buffer's end"""
  monkeypatch.setattr("tinygrad.apps.mla.PREFILL_SIZES", (CHUNK, 2 * CHUNK))
  with on_cuda():
    g = engine_of(write_mixed(tmp_path / "m.gguf", "small-ds", [T.F16], **WIDE | dict(blocks=1, experts=0)), CONTEXT)
    fed = Fed(g, monkeypatch)
    g.prefill(PROMPT[:13])
    before = held(g, PROMPT[:12])
    g.prefill(PROMPT[:CONTEXT - 1])
    after = held(g, PROMPT[:CONTEXT - 2])
    g.forget()
    g.prefill(PROMPT[:CONTEXT - 1])
    anew = held(g, PROMPT[:CONTEXT - 2])
    assert fed.chunks == [(CHUNK, 0, 12), (2 * CHUNK, 12, CONTEXT - 14), (2 * CHUNK, 0, CONTEXT - 2)]  # the second reaches past the context's end
    assert (before[0], after[0], anew[0]) == (12, CONTEXT - 2, CONTEXT - 2)
    for a, b, c in zip(before[1], after[1], anew[1]):
      assert np.array_equal(a, b[:12]) and np.abs(b.astype(np.float32) - c).max() < 2e-2 and np.abs(c).max() > 1

def test_logits_at_the_contexts_end(g: Engine, judge: Engine):
  """The last step, padded past the end, changes nothing before it"""
  whole = g.logits(PROMPT)
  count, kept = held(g, PROMPT)
  assert count == CONTEXT
  for n in (CONTEXT - 1, CHUNK + 1):
    np.testing.assert_array_equal(g.logits(PROMPT[:n]), whole[:n])
    assert all(np.array_equal(a[:n], b) for a, b in zip(kept, held(g, PROMPT[:n])[1]))

# ---- several at once ----

BESIDE = {"generate": lambda g: list(g.generate(PROMPT[30:40], 2)), "logits": lambda g: g.logits(PROMPT[30:40]),
          "prefill": lambda g: g.prefill(PROMPT[30:40]), "forget": lambda g: g.forget()}
@pytest.mark.parametrize("what", BESIDE)
def test_an_answer_goes_on(g: Engine, judge: Engine, what: str):
  """… whatever is asked of the engine meanwhile, and what comes later is right, too"""
  older = g.generate(PROMPT[:10], 8)
  said = [next(older), next(older)]
  BESIDE[what](g)
  said += [next(older)]
  newer = g.generate(PROMPT[20:32], 4)
  out = [next(newer)]
  assert_greedy(judge, PROMPT[:10], said + list(older))
  assert_greedy(judge, PROMPT[20:32], out + list(newer))
  g.pool.check([])

def test_in_turns(g: Engine, judge: Engine):
  """Iterators begun one after another, and asked in turns: each says what it says alone"""
  prompts = [PROMPT[:10], PROMPT[20:30], PROMPT[5:40]]                    # and more than there are pages for at once
  alone = [list(judge.generate(ids, 6)) for ids in prompts]
  answers = [g.generate(ids, 6) for ids in prompts]
  assert [list(said) for said in zip(*[[next(a) for a in answers] for _ in range(6)])] == alone
  assert all(next(a, None) is None for a in answers) and not g.scheduler.live
  g.pool.check([])

def test_from_threads(g: Engine, judge: Engine, monkeypatch):
  """Each gets what it gets alone; and never are two at the device"""
  inside, said, failed = threading.Semaphore(), {}, []
  def watched(call: Callable) -> Callable:
    def entered(*args: Any) -> Any:
      if not inside.acquire(blocking=False): failed.append("two at the device")
      try: return call(*args)
      finally: inside.release()
    return entered
  for name in ("launch", "read", "prefill"): monkeypatch.setattr(g.runner, name, watched(getattr(g.runner, name)))
  def talk(at: int) -> None:
    try: said[at] = [list(g.generate(PROMPT[at:at + 10], 8)) for _ in range(3)]
    except Exception as e: failed.append(repr(e))
  threads = [threading.Thread(target=talk, args=(at,)) for at in (0, 20, 40)]
  for t in threads: t.start()
  for t in threads: t.join()
  assert not failed
  for at, outs in said.items(): assert outs == [list(judge.generate(PROMPT[at:at + 10], 8))] * 3
  g.pool.check([])

# ---- steps that fail ----

@pytest.mark.parametrize("following", [PROMPT[:10], PROMPT[20:31], PROMPT[20:32], PROMPT[20:33]], ids=len)
@pytest.mark.parametrize("launched", [False, True])
def test_a_step_that_fails(g: Engine, judge: Engine, monkeypatch, launched: bool, following: list[int]):
  """Before its launch or behind it: where the device then is, is not taken for granted by a prompt read in a chunk"""
  answer = g.generate(PROMPT[:10], 4)
  next(answer)
  steps = g.runner.batch.replays
  step = steps[Features()]
  def planted() -> None:
    if launched: step()
    raise RuntimeError("planted")
  with monkeypatch.context() as m:
    m.setitem(steps, Features(), planted)
    with pytest.raises(RuntimeError, match="planted"): list(answer)
  assert_greedy(judge, following, list(g.generate(following, 4)))

@pytest.mark.parametrize("where", ["tinygrad.apps.capture.find", "tinygrad.apps.capture.graph_split_rewrite", "tinygrad.engine.jit.get_runtime"])
def test_a_first_step_that_fails(path: Path, judge: Engine, monkeypatch, where: str):
  """While it is recorded or first run: nothing of it is kept"""
  g = engine_of(path, CONTEXT)
  def planted(*args, **kw): raise RuntimeError("planted")
  launch = g.runner.launch
  def failing() -> None:
    with monkeypatch.context() as m:
      m.setattr(where, planted)
      launch()
  monkeypatch.setattr(g.runner, "launch", failing)
  with pytest.raises(RuntimeError, match="planted"): next(g.generate(PROMPT[:1], 4))
  monkeypatch.undo()
  for following in (PROMPT[:1], PROMPT[:10]): assert_greedy(judge, following, list(g.generate(following, 4)))

@pytest.mark.parametrize("prompt", [PROMPT[:1], PROMPT[:10]], ids=["a_step", "a_chunk"])
def test_no_room_for_what_is_recorded(path: Path, judge: Engine, monkeypatch, prompt: list[int]):
  """What it has of memory is given back, and the next one finds room"""
  g = engine_of(path, CONTEXT)
  def full(*args, **kw): raise MemoryError("planted")
  with monkeypatch.context() as m:
    m.setattr("tinygrad.engine.jit.get_runtime", full)
    with pytest.raises(MemoryError, match="planted"): list(g.generate(prompt, 4))
  assert not any(batch.replays for batch in g.runner.batches.values()) and not g.runner.chunks and not g.failed
  assert_greedy(judge, prompt, list(g.generate(prompt, 4)))

def test_logits_then_generate(g: Engine, judge: Engine):
  g.logits(PROMPT[:CHUNK + 5])
  assert held(g, PROMPT)[0] == CHUNK + 5
  for ids in (PROMPT[:CHUNK + 5], PROMPT[:CHUNK + 9], PROMPT[:8]): assert_greedy(judge, ids, list(g.generate(ids, 3)))

def test_seeds(g: Engine):
  def say(seed: int, **kw) -> list[int]: return list(g.generate(PROMPT[:10], 8, Sampling(2.0, seed=seed, **kw)))
  first = say(1)
  assert say(1) == first and say(2) != first
  g.forget()
  assert say(1) == first                                                  # whatever the cache held before
  a, b = say(1, top_k=50, top_p=.9, min_p=.01, repeat_penalty=1.2), say(1, top_k=50, top_p=.9, min_p=.01, repeat_penalty=1.2)
  assert a == b
  graphs, compiled = len(g.runner.batch.replays), len(to_program_cache)
  say(9, top_k=3, top_p=.5, min_p=.1, repeat_penalty=1.9)
  assert (len(g.runner.batch.replays), len(to_program_cache)) == (graphs, compiled)  # other values, the same graph

def test_a_penalty_forgets_with_the_prompt(g: Engine):
  """Tokens of the prompt and of the answer are penalized, those of another conversation are not"""
  s = Sampling(repeat_penalty=1e3)
  out = list(g.generate(PROMPT[:10], 12, s))
  assert len({*PROMPT[:10], *out}) == len({*PROMPT[:10]}) + 12            # nothing is said twice
  assert list(g.generate(PROMPT[:10], 12, s)) == out
  list(g.generate(PROMPT[20:40], 5, s))
  assert list(g.generate(PROMPT[:10], 12, s)) == out

def test_a_context_smaller_than_a_chunk(path: Path, judge: Engine):
  g = engine_of(path, 8)
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

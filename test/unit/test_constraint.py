"""Grammars as constraints: what their masks allow, where they end, what is said of those that are none; and a model that is held to them."""
from __future__ import annotations
import json, random, re, sys, threading
from importlib.util import find_spec
from typing import Any, Callable
import numpy as np, pytest
from helpers import engine_of
from tinygrad.apps.engine.constraint import Constraint, GrammarError, Guide, Vocabulary, check, constraint_of
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.engine.sequence import Request
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.models import BUILT_IN
from tinygrad.apps.tokenizer import Tokenizer

needs_llguidance = pytest.mark.skipif(find_spec("llguidance") is None, reason="llguidance is not installed")

# every byte, some longer tokens, then what is no text
TOKENS = [*(bytes([i]) for i in range(256)), b"true", b'{"', b'": ', b"ab", b"<think>", b"</think>", b"<|end|>", b"<|user|>", b""]
THINK, DONE, END, USER, SIZE = 260, 261, 262, 263, 300

@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary: return Vocabulary(TOKENS, {THINK, DONE, END, USER}, {END, USER}, list, SIZE)

def allowed(c: Constraint) -> set[int]: return {i for i in range(SIZE) if c.mask()[i // 32] >> i % 32 & 1}
def walk(c: Constraint, rng: random.Random, most: int = 400) -> bytes:
  """What a model says that takes any allowed token, and ends when it may"""
  out = b""
  for _ in range(most):
    if END in (tokens := allowed(c)): return out
    token = rng.choice(sorted(tokens))
    c.accept(token)
    out += TOKENS[token]
  raise AssertionError(f"no end: {out!r}")

# ---- masks ----

@needs_llguidance
@pytest.mark.parametrize("kind,source,text", [
  ("regex", "[ab]{2,3}c", "[ab]{2,3}c"), ("regex", "é+|x", "é+|x"), ("lark", 'start: "yes" | "no" /[0-9]{1,2}/', "yes|no[0-9]{1,2}"),
  ("json_schema", '{"enum": ["red", 7, null]}', '"red"|7|null'), ("json_schema", '{"type": "boolean"}', "true|false")])
def test_what_follows(kind: str, source: str, text: str, vocabulary: Vocabulary):
  """Any way through a grammar is of it, and at its end the tokens that end an answer are allowed"""
  check(kind, source)
  for seed in range(20):
    c = constraint_of(kind, source, None, vocabulary)
    assert re.fullmatch(text, walk(c, random.Random(seed)).decode()) and {END, USER} <= allowed(c) and c.mask().shape == (10,)

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 999},
          "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3}},
          "required": ["name", "age", "tags"], "additionalProperties": False}
def assert_of_schema(found: Any) -> None:
  assert {*found} == {*SCHEMA["required"]} and isinstance(found["name"], str) and len(found["name"]) <= 5
  assert 0 <= found["age"] < 1000 and len(found["tags"]) <= 3 and {*found["tags"]} <= {"x", "y"}

@needs_llguidance
@pytest.mark.parametrize("seed", range(30))
def test_a_schema(seed: int, vocabulary: Vocabulary):
  assert_of_schema(json.loads(walk(constraint_of("json_schema", json.dumps(SCHEMA), None, vocabulary), random.Random(seed), 2000)))

@needs_llguidance
def test_blanks_come_to_an_end(vocabulary: Vocabulary):
  """A model that likes nothing better says them, and goes on"""
  c, out = constraint_of("json_schema", '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}', None, vocabulary), b""
  while (tokens := allowed(c)) and END not in tokens and len(out) < 1000:
    token = next((t for t in b" \n}" if t in tokens), min(tokens))
    c.accept(token)
    out += TOKENS[token]
  assert len(out) < 300 and json.loads(out) == {"a": 1}

@needs_llguidance
def test_names_are_no_text(vocabulary: Vocabulary):
  """A special token is allowed where a grammar names it, and nowhere else"""
  text = constraint_of("regex", "(?s:.)*", None, vocabulary)
  assert allowed(text) & {THINK, DONE, 264} == set() and {END, USER, ord("<"), 256} <= allowed(text)
  named = constraint_of("lark", "start: <think> /[ab]*/ </think>", None, vocabulary)
  assert allowed(named) == {THINK}
  named.accept(THINK)
  assert allowed(named) == {ord("a"), ord("b"), 259, DONE}

@needs_llguidance
def test_behind_the_end(vocabulary: Vocabulary):
  """Whoever goes on past a token that ends answers is given it again, and no more"""
  c = constraint_of("regex", "a", None, vocabulary)
  c.accept(ord("a"))
  for _ in range(5):
    assert allowed(c) == {END, USER}
    c.accept(USER)
  with pytest.raises(GrammarError, match="^regex: "): c.accept(ord("a"))

@needs_llguidance
def test_after_a_token(vocabulary: Vocabulary):
  """It holds from there on; before that all tokens may come, of which nothing is copied anew"""
  c = constraint_of("regex", "ab", DONE, vocabulary)
  everything = c.mask()
  for token in (*b"zq", THINK, END):
    c.accept(token)
    assert c.mask() is everything and (everything == 0xffffffff).all()
  for token, following in ((DONE, {ord("a"), 259}), (ord("a"), {ord("b")}), (ord("b"), {END, USER})):
    c.accept(token)
    assert allowed(c) & {ord("a"), ord("b"), 259, END, USER} >= {*following} & {ord("b"), END, USER} and not allowed(c) - following

# ---- what is none ----

@needs_llguidance
@pytest.mark.parametrize("kind,source,error", [
  ("json_schema", "{nope", "json_schema: key must be a string"), ("json_schema", '{"type": "nope"}', "json_schema: Invalid type: nope"),
  ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "json_schema: Unsatisfiable schema"),
  ("regex", "(a", "regex: .*unclosed group"), ("lark", 'start: "(', "lark: .*lexer error"),
  ("gbnf", "root ::= x", "grammar: expected json_schema, regex, lark, found 'gbnf'")])
def test_no_grammar(kind: str, source: str, error: str, vocabulary: Vocabulary):
  """Said in one line, before and by the constraint"""
  for call in (lambda: check(kind, source), lambda: constraint_of(kind, source, None, vocabulary).mask()):
    with pytest.raises(GrammarError, match=f"^{error}") as e: call()
    assert "\n" not in str(e.value) and len(str(e.value)) < 350

@needs_llguidance
@pytest.mark.parametrize("kind,source", [("lark", "start: <nope>"), ("regex", r"[^\s\S]")])
def test_what_only_a_vocabulary_tells(kind: str, source: str, vocabulary: Vocabulary):
  """That it has no such token; that nothing can be said"""
  with pytest.raises(GrammarError, match=f"^{kind}: "): constraint_of(kind, source, None, vocabulary).mask()

@needs_llguidance
def test_a_token_that_does_not_follow(vocabulary: Vocabulary):
  c = constraint_of("regex", "ab", None, vocabulary)
  with pytest.raises(GrammarError, match="^regex: "): c.accept(ord("b"))
  with pytest.raises(GrammarError, match="^regex: "): c.mask()

def test_without_llguidance(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setitem(sys.modules, "llguidance", None)
  fresh = Vocabulary(TOKENS, (), {END}, list, SIZE)
  for call in (lambda: check("regex", "a"), lambda: constraint_of("regex", "a", None, fresh).mask(), fresh.tokenizer):
    with pytest.raises(GrammarError, match="^grammars need llguidance, which is not installed: pip install llguidance==[0-9.]+$"): call()

# ---- worker threads ----

class Noted:
  """Notes what is called; two calls at once are wrong"""
  def __init__(self) -> None: self.calls, self.inside = [], threading.Lock()
  def mask(self) -> np.ndarray:
    with self.once(): self.calls.append("mask")
    return np.full(10, 0xffffffff, np.uint32)
  def accept(self, token: int) -> None:
    with self.once(): self.calls.append(token)
  def once(self) -> threading.Lock:
    assert not self.inside.locked()
    return self.inside

def test_each_once():
  """However often it is asked for, whoever waits for it, and if what was asked for is lost"""
  noted = Noted()
  guide, ids = Guide(noted, SIZE), [1, 2, 3]
  assert not guide.begun
  futures = [guide.ask(ids, 3) for _ in range(5)]
  assert all(f.result() is futures[0].result() for f in futures) and guide.begun
  ids += [7, 8]
  for future in [guide.ask(ids, 3) for _ in range(5)]: future.result()
  ids.append(9)
  guide.ask(ids, 3).result()
  assert noted.calls == ["mask", 7, 8, "mask", 9, "mask"]

# ---- a model ----

@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer: return Tokenizer.from_gguf(read_gguf(BUILT_IN))

@needs_llguidance
def test_a_model_that_is_held_to_grammars(tokenizer: Tokenizer):
  """Rows with grammars among rows without, drawn and greedy: each is of its grammar, and who has none says what it says alone"""
  e = engine_of(BUILT_IN, 320)
  v = Vocabulary(tokenizer.table, tokenizer.special_tokens.values(), tokenizer.stop_ids, tokenizer.encode_bytes, e.runner.vocab_size)
  ids, free = tokenizer.encode("The answer as JSON: "), Request(tokenizer.encode("Once"), Sampling(.8, seed=3), limit=40)
  alone = list(e.generate(free.ids, 40, free.sampling))
  def held(kind: str, source: str, sampling: Sampling) -> Request:
    return Request(ids, sampling, tokenizer.stop_ids, 300, constraint=constraint_of(kind, source, None, v))
  def is_schema(text: str) -> None: assert_of_schema(json.loads(text))
  def is_colour(text: str) -> None: assert re.fullmatch("(red|green|blue)(, (red|green|blue)){3}", text)
  wanted: list[tuple[Request, Callable[[str], None]]] = []
  for sampling in (Sampling(), Sampling(1.0, seed=1), Sampling(.7, top_p=.9, repeat_penalty=1.1, seed=2)):
    wanted.append((held("json_schema", json.dumps(SCHEMA), sampling), is_schema))
    wanted.append((held("regex", "(red|green|blue)(, (red|green|blue)){3}", sampling), is_colour))
  others, each = [e.add(free)], []
  for request, _ in wanted:
    each.append(e.add(request))
    e.step()
  others += [e.add(free), e.add(Request(ids, constraint=constraint_of("lark", "start: <nope>", None, v)))]
  while e.step(): pass
  for s, (_, judge) in zip(each, wanted):
    assert s.reason == "stop" and s.produced[-1] in tokenizer.stop_ids, (s.reason, s.error, tokenizer.decode(s.produced))
    judge(tokenizer.decode(s.produced[:-1]))
  assert [o.produced for o in others] == [alone, alone, []] and others[2].reason == "error" and "<nope>" in str(others[2].error)

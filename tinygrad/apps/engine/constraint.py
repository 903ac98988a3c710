"""What an answer may be: a constraint tells which tokens may come next, token by token. Grammars are llguidance's, an optional package.

Masks are computed in worker threads, several at once: a sequence's for the next token is begun when its last one is known, while the device runs the
model on it, and is needed when that is done (engine.py)."""
from __future__ import annotations
import functools, importlib, os, threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Callable, Iterable, Protocol, Sequence
import numpy as np
from tinygrad.apps.engine.sampling import mask_words
if TYPE_CHECKING: import llguidance

THREADS = 8
MAX_ITEMS = 10_000   # of a grammar, that may come next: a schema has four for each property that need not be there. A mask takes 0.3 s then

@functools.cache
def _threads() -> ThreadPoolExecutor: return ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "mask")
os.register_at_fork(after_in_child=_threads.cache_clear)  # the child has none of the threads

class Constraint(Protocol):
  """Calls come from one thread at a time, not always the same. What either raises ends the answer, with that error."""
  def mask(self) -> np.ndarray:
    """uint32 (ceil(vocab / 32),): bit i % 32 of word i // 32 says whether token i may come next. It is not written again; where it is the same array
    as the last one, nothing is copied."""
  def accept(self, token:int) -> None:
    """A token that came, in the order of the answer, but not the one that ended it"""

class Guide:
  """A sequence's constraint, as worker threads work on it. Each token is accepted once and each mask computed once, however often it is asked for:
  what was asked for and lost, by an exception, is asked for again."""
  def __init__(self, constraint:Constraint, vocab:int):
    self.constraint, self.vocab = constraint, vocab
    self.future: Future[np.ndarray]|None = None   # the mask that was asked for last
    self.begun = False                            # whether the first mask is there, or what it failed with
    self.lock = threading.Lock()
    self.accepted = 0
    self.newest: np.ndarray|None = None

  def ask(self, ids:list[int], prompt:int) -> Future[np.ndarray]:
    """The mask for the token after ids, of which the first `prompt` are the prompt. ids may grow meanwhile"""
    self.future = _threads().submit(self._mask, ids, prompt, len(ids))
    return self.future

  def _mask(self, ids:list[int], prompt:int, end:int) -> np.ndarray:
    with self.lock:
      try:
        while prompt + self.accepted < end:
          self.newest, self.accepted = None, self.accepted + 1
          self.constraint.accept(ids[prompt + self.accepted - 1])
        if self.newest is None: self.newest = self._checked(self.constraint.mask())
        return self.newest
      finally: self.begun = True

  def _checked(self, mask:np.ndarray) -> np.ndarray:
    if mask.shape != (mask_words(self.vocab),) or mask.dtype != np.uint32:
      raise ValueError(f"constraint: expected a mask of {mask_words(self.vocab)} uint32, found {mask.dtype} of shape {mask.shape}")
    last = int(mask[-1]) & ((1 << (self.vocab - 1) % 32 + 1) - 1)   # of whose bits not all are tokens
    if not last and not mask[:-1].any(): raise ValueError("constraint: no token is allowed")
    return mask

class After:
  """A constraint that holds from a token on: until that has come, all tokens are allowed"""
  def __init__(self, constraint:Constraint, token:int, vocab:int):
    self.constraint, self.token, self.came = constraint, token, False
    self.all = np.full(mask_words(vocab), 0xffffffff, np.uint32)
  def mask(self) -> np.ndarray: return self.constraint.mask() if self.came else self.all
  def accept(self, token:int) -> None:
    if self.came: self.constraint.accept(token)
    self.came = self.came or token == self.token

# ---- grammars ----

KINDS = "json_schema", "regex", "lark"
# between two parts of JSON: one blank, or a line's end and what the next is set in by. A model that likes blanks would else go on without end
WHITESPACE = r"( |\r?\n[ \t]{0,20})"

class GrammarError(ValueError):
  """What is no grammar, or was not followed. str(e) is one line."""

def _line(text:str) -> str: return " ".join(text.replace("<non-verbose/>", "").split())[:300]

def _llguidance() -> ModuleType:
  try: return importlib.import_module("llguidance")
  except ImportError as e: raise GrammarError("grammars need llguidance, which is not installed: pip install llguidance==1.9.1") from e

def _in_own_form(kind:str, source:str) -> str:
  """As llguidance has grammars; whether it is one is not looked at"""
  matcher = _llguidance().LLMatcher
  if kind == "regex": return matcher.grammar_from_regex(source)
  if kind == "lark": return matcher.grammar_from_lark(source)
  if kind != "json_schema": raise GrammarError(f"grammar: expected {', '.join(KINDS)}, found {_line(repr(kind))}")
  try: return matcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": WHITESPACE})
  except ValueError as e: raise GrammarError(f"json_schema: {_line(str(e))}") from e

def check(kind:str, source:str) -> None:
  """Raises GrammarError for what is no grammar, and where llguidance is missing. It takes no vocabulary: whether that has the special tokens which
  a grammar names is not looked at."""
  if error := _llguidance().LLMatcher.validate_grammar(_in_own_form(kind, source)): raise GrammarError(f"{kind}: {_line(error)}")

class Vocabulary:
  """What grammars need of a tokenizer"""
  def __init__(self, tokens:Sequence[bytes], special:Iterable[int], stop:Iterable[int], encode:Callable[[bytes], list[int]], size:int):
    """tokens: the bytes of each, empty for what is no text. special: those whose bytes are a name: text never is them, and only a grammar that names
    them allows them. stop: those that may come where a grammar may end. encode: bytes to tokens, as a prompt's text is. size: of the model's logits,
    whose last may be no tokens."""
    self.tokens = [*tokens[:size], *[b""] * (size - len(tokens))]
    self.special_token_ids, self.stop, self.encode, self.size = sorted(special), sorted(stop), encode, size
    self.eos_token_id, self.bos_token_id = self.stop[0], None
    self.lock, self.made = threading.Lock(), None

  def __call__(self, text:bytes) -> list[int]:
    """llguidance asks for this, of what a grammar leaves no choice about, and for tokens and the ids by these names"""
    return self.encode(text)

  def tokenizer(self) -> llguidance.LLTokenizer:
    """Made with the first call, which takes a second or two for a large vocabulary"""
    library = _llguidance()
    with self.lock:
      if self.made is None: self.made = library.LLTokenizer(library.TokenizerWrapper(self), eos_token=self.stop)
      return self.made

class Grammar:
  """A grammar as a constraint. It is compiled with its first mask, by a worker thread: that may take its time."""
  def __init__(self, kind:str, source:str, vocabulary:Vocabulary):
    self.kind, self.source, self.vocabulary = kind, source, vocabulary

  @functools.cached_property
  def matcher(self) -> llguidance.LLMatcher:
    library = _llguidance()
    limits = library.LLParserLimits(verbose_errors=False, max_items_in_row=MAX_ITEMS)
    matcher = library.LLMatcher(self.vocabulary.tokenizer(), _in_own_form(self.kind, self.source), log_level=0, limits=limits)
    self._raise_error(matcher)
    return matcher

  def mask(self) -> np.ndarray:
    mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint32)[:mask_words(self.vocabulary.size)]   # it may have a word more
    self._raise_error(self.matcher)
    return mask

  def accept(self, token:int) -> None:
    if self.matcher.is_stopped() and token in self.vocabulary.stop: return   # as often as it may come, where it does not end the answer
    if not self.matcher.consume_token(token):
      self._raise_error(self.matcher)
      raise GrammarError(f"{self.kind}: token {token} does not follow")

  def _raise_error(self, matcher:llguidance.LLMatcher) -> None:
    if matcher.is_error(): raise GrammarError(f"{self.kind}: {_line(matcher.get_error())}")

def constraint_of(kind:str, source:str, after:int|None, vocabulary:Vocabulary) -> Constraint:
  """Of a grammar: json_schema, regex or lark (llguidance's). after: the token from behind which it holds; None: from the first token on"""
  grammar = Grammar(kind, source, vocabulary)
  return grammar if after is None else After(grammar, after, vocabulary.size)

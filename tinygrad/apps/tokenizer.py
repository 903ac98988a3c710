"""Text to token ids and back, by a GGUF file's own vocabulary and merges (byte-level BPE, `tokenizer.ggml.model` = gpt2).

Text is cut into special tokens and plain stretches, a stretch into pieces by the patterns of `tokenizer.ggml.pre`, a piece into tokens by tiktoken.
tiktoken merges the neighbours whose joined bytes rank lowest, and takes a piece that is a token whole; a merge list ranks pairs. Both give the same
tokens where the list is in the order of training, or holds all ways to split each token (as those converted from tiktoken do). A list in another
order can differ: it is read as if each token's first merge stood for all. chat.py encodes prompts by it, reasoning.py decodes answers."""
from __future__ import annotations
import codecs, functools, re
from dataclasses import dataclass
from typing import Callable, Iterable
import regex, tiktoken
from gguf import TokenType
from tinygrad.apps.gguf import GGUFError, GGUFFile

# *** how `tokenizer.ggml.pre` cuts text: each pattern in turn cuts all pieces of the one before, and keeps its matches and what lies between them

SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
NO_HAN = r"(?:(?!\p{Han})%s)"  # a class without what Kimi takes first
WORDS = SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s" + REST % ""
def _cased(upper: str, lower: str, suffix: str, digits: str, after: str) -> str:
  before = r"[^\r\n\p{L}\p{N}]?"
  return rf"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}|\p{{N}}{digits}" + REST % after
# DeepSeek's letters: those with case in Latin, Greek, Cyrillic and some smaller scripts, as an older Unicode knew them
LETTERS = "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d" \
  "\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec" \
  "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f" \
  "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787" \
  "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a" \
  "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2" \
  "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
# (DeepSeek's own file has \s+$ where the lookbehind here keeps long runs of blanks linear)
PATTERNS: dict[str, tuple[str, ...]] = {
  "glm4": (WORDS % "{1,3}",), "llama-bpe": (WORDS % "{1,3}",), "qwen2": (WORDS % "",), "tekken": (_cased(UPPER, LOWER, "", "", "/"),),
  "gpt-2": (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",),
  "deepseek-llm": (r"[\r\n]", rf"\s?[{LETTERS}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"(?<!\s)\s++$",
                   "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
  "youtu": ("[\uac00-\ud7a3\u3131-\u318e]+|[！…“”‘’—：；，\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            _cased(UPPER, LOWER, SUFFIX + "?", "", "/")),
  "deepseek-v3": (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
                  r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
  "kimi-k2": (r"\p{Han}+|" + _cased(NO_HAN % UPPER, NO_HAN % LOWER, SUFFIX + "?", "{1,3}", ""),),
}
PATTERNS |= {alias: PATTERNS[pre] for alias, pre in {"chatglm-bpe": "glm4", "glm5": "glm4", "llama3": "llama-bpe", "llama-v3": "llama-bpe",
                                                     "deepseek-r1-qwen": "qwen2"}.items()}
# a piece that is a token is that token, even if no merges make it
WHOLE = {"glm4", "glm5", "llama-bpe", "llama3", "llama-v3", "tekken", "youtu", "kimi-k2"}
ADD_BOS = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # where the file does not say
# control tokens that end a turn, whatever the keys say
STOPS = ("<|user|>", "<|observation|>", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<｜end▁of▁sentence｜>", "[EOS]", "[EOT]")

# GPT-2's way to write bytes as printable characters: bytes that print stand for themselves, the others are U+0100 and up
_PRINTS = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
_BYTE_OF = dict(zip((*_PRINTS, *range(0x100, 0x144)), (*_PRINTS, *sorted(set(range(256)) - set(_PRINTS)))))

LONG = 64  # characters of a piece that is not kept: what people send may be of any length, and be sent but once

def _token_bytes(text: str, kind: int) -> bytes:
  if kind == TokenType.UNUSED: return b""
  if kind == TokenType.BYTE and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text): return bytes([int(text[3:5], 16)])
  if kind == TokenType.NORMAL:
    try: return text.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError: pass  # it holds characters that stand for no byte: the text itself is meant
  return text.encode(errors="replace")

def any_of(names: Iterable[str]) -> str:
  """A regular expression for the longest of `names` that starts here; without names, one that matches nowhere."""
  names = sorted(names, key=len, reverse=True)
  return f"(?=[{re.escape(''.join({n[0] for n in names}))}])(?:{'|'.join(map(re.escape, names))})" if names else "(?!)"

def _bad(path, name: str, expected: str, found: str) -> GGUFError:
  return GGUFError(f"{path}: key tokenizer.ggml.{name}: expected {expected}, found {found}")

class Stream:
  """Token ids to text as they come: never half a character, control tokens not shown; bytes that are no UTF-8 become U+FFFD."""
  def __init__(self, tokenizer: Tokenizer): self.tokenizer, self.decoder = tokenizer, codecs.getincrementaldecoder("utf-8")("replace")
  def push(self, token: int) -> str: return self.flush() if token in self.tokenizer.control else self.decoder.decode(self.tokenizer.table[token])
  def flush(self) -> str: return self.decoder.decode(b"", final=True)

@dataclass(frozen=True)
class Vocabulary:
  """A file's tokenizer keys, checked one by one"""
  pre: str                # a key of PATTERNS
  tokens: list[str]
  types: list[int]        # gguf's TokenType, one a token
  merges: list[str]       # "left right", the first merged first
  bos_id: int|None
  eos_id: int
  add_bos: bool           # whether a prompt begins with bos
  stops: frozenset[int]   # ids of keys that end an answer, beside eos

class Tokenizer:
  """A vocabulary made ready. `table`: the bytes of each id. `special_tokens`: name to id of control tokens and of markup like <think>; only templates
  and `encode(special=True)` turn these names into ids. `control`: the ids that are not shown. `stop_ids`: the ids that end an answer.
  Raises GGUFError, with the file's path, for keys that do not fit together."""
  def __init__(self, path, v: Vocabulary):
    tokens, ids = v.tokens, {t: i for i, t in enumerate(v.tokens)}
    self.path, self.pre, self.n_vocab, self.bos_id, self.eos_id, self.add_bos = path, v.pre, len(tokens), v.bos_id, v.eos_id, v.add_bos
    if twice := [t for i, t in enumerate(tokens) if ids[t] != i]: raise _bad(path, "tokens", "tokens that differ", f"{twice[0]!r:.80} twice")
    # older converters typed the rows that pad the embedding as user-defined
    types = [TokenType.UNUSED if t == TokenType.USER_DEFINED and s == f"[PAD{i}]" else t for i, (s, t) in enumerate(zip(tokens, v.types))]
    self.table = list(map(_token_bytes, tokens, types))
    self.control = frozenset(i for i, t in enumerate(types) if t == TokenType.CONTROL)
    named = {s: i for i, (s, t) in enumerate(zip(tokens, types)) if s and t in (TokenType.CONTROL, TokenType.USER_DEFINED)}
    # user-defined tokens of one character or of blanks are text (DeepSeek's ü), always found; every other one is markup
    letters = {s: i for s, i in named.items() if i not in self.control and len(s.strip()) < 2}
    self.special_tokens = {s: i for s, i in named.items() if s not in letters}
    self.stop_ids = frozenset({v.eos_id} | v.stops | {i for s in STOPS if (i := named.get(s)) in self.control})
    self._named, self._find = named, {False: re.compile(f"({any_of(letters)})"), True: re.compile(f"({any_of(named)})")}

    # each token's first merge as tiktoken's rank of the token; single bytes come first
    self._bytes = {t[0]: i for i, t in enumerate(self.table) if len(t) == 1 and types[i] in (TokenType.NORMAL, TokenType.BYTE)}
    ranks, self._ids = {bytes([b]): r for r, b in enumerate(self._bytes)}, list(self._bytes.values())  # rank -> id: the vocabulary has its own order
    special = {*self.special_tokens.values()}
    for n, merge in enumerate(v.merges):
      left, _, right = merge.partition(" ")
      if not (left and right and left in ids and right in ids and (joined := ids.get(left + right)) is not None):
        raise _bad(path, "merges", "two tokens whose joined text is a token", f"{merge!r:.80} at {n}")
      if self.table[joined] not in ranks and joined not in special:
        ranks[self.table[joined]] = len(ranks)
        self._ids.append(joined)
    self._whole = {t: i for i, t in enumerate(self.table) if t not in ranks and types[i] == TokenType.NORMAL} if v.pre in WHOLE else {}
    self._missing = frozenset(range(256)) - frozenset(self._bytes)
    self._bpe = tiktoken.Encoding(v.pre, pat_str=r"(?s:.+)", mergeable_ranks=ranks, special_tokens={}) if ranks else None
    self._cuts = [regex.compile(f"({p})") for p in PATTERNS[v.pre]]
    self._piece: Callable[[str], tuple[int, ...]] = functools.lru_cache(1 << 16)(self._encode_piece)

  @classmethod
  def from_gguf(cls, f: GGUFFile) -> Tokenizer:
    """Raises GGUFError for another tokenizer model, an unknown pre-tokenizer, or keys that do not fit together."""
    bad = functools.partial(_bad, f.path)
    def strings(name: str) -> list[str]:
      values = f.key(f"tokenizer.ggml.{name}", list)
      if wrong := [x for x in values if not isinstance(x, str)]: raise bad(name, "strings", f"{wrong[0]!r:.80}")
      return values
    if (model := f.key("tokenizer.ggml.model", str)) != "gpt2": raise bad("model", "'gpt2' (byte-level BPE)", f"{model!r:.80}")
    if (pre := f.key("tokenizer.ggml.pre", str)) not in PATTERNS: raise bad("pre", f"one of {', '.join(sorted(PATTERNS))}", f"{pre!r:.80}")
    tokens, merges, types = strings("tokens"), strings("merges"), f.key("tokenizer.ggml.token_type", list)
    if len(types) != len(tokens): raise bad("token_type", f"{len(tokens)} types, one a token", f"{len(types)}")
    if wrong := [t for t in types if type(t) is not int or not 1 <= t <= 6]: raise bad("token_type", "types 1 to 6", f"{wrong[0]!r:.80}")
    def id_of(name: str, **default) -> int|None:
      if (i := f.key(f"tokenizer.ggml.{name}_token_id", int, **default)) is not None and not 0 <= i < len(tokens):
        raise bad(f"{name}_token_id", f"an id below {len(tokens)}", f"{i}")
      return i
    stops = frozenset(i for name in ("eot", "eom") if (i := id_of(name, default=None)) is not None)
    add_bos = f.key("tokenizer.ggml.add_bos_token", bool, default=pre in ADD_BOS)
    return cls(f.path, Vocabulary(pre, tokens, types, merges, id_of("bos", default=None), id_of("eos"), add_bos, stops))

  def _byte_id(self, b: int) -> int:
    if b in self._missing: raise _bad(self.path, "tokens", "a token for every byte", f"none for byte 0x{b:02x}")
    return self._bytes[b]

  def _encode_piece(self, piece: str) -> tuple[int, ...]:
    raw = piece.encode()
    if (known := self._whole.get(raw)) is not None: return (known,)
    if lacking := self._missing.intersection(raw): self._byte_id(min(lacking))  # raises: tiktoken would abort
    return tuple(self._ids[rank] for rank in self._bpe.encode_ordinary(piece))

  def _encode_plain(self, text: str) -> Iterable[int]:
    pieces = [text]
    for cut in self._cuts: pieces = [q for p in pieces for q in cut.split(p) if q]
    return (token for p in pieces for token in (self._piece if len(p) < LONG else self._encode_piece)(p))

  def encode(self, text: str, special: bool = False) -> list[int]:
    """The ids of `text`, without a bos. `special` turns the names of special tokens into their ids; otherwise they are text. Surrogates U+DC80 to
    U+DCFF stand for bytes 0x80 to 0xff (Python's surrogateescape), others become U+FFFD. GGUFError if the vocabulary lacks a byte of the text."""
    out: list[int] = []
    for n, part in enumerate(self._find[special].split(re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text))):
      if n % 2: out.append(self._named[part])
      else:
        for m, run in enumerate(re.split("([\udc80-\udcff]+)", part)):
          out += map(self._byte_id, run.encode(errors="surrogateescape")) if m % 2 else self._encode_plain(run)
    return out

  def with_bos(self, ids: list[int]) -> list[int]:
    """A prompt's ids: where the vocabulary asks for a bos, one stands in front."""
    return [self.bos_id, *ids] if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id] else ids

  def encode_bytes(self, data: bytes) -> list[int]:
    """The ids of any bytes, UTF-8 or not: `decode_bytes(encode_bytes(data)) == data`."""
    return self.encode(data.decode(errors="surrogateescape"))
  def decode_bytes(self, ids: Iterable[int]) -> bytes: return b"".join(self.table[i] for i in ids)
  def decode(self, ids: Iterable[int]) -> str:
    """The text of `ids`, special tokens as their names; bytes that are no UTF-8 become U+FFFD."""
    return self.decode_bytes(ids).decode(errors="replace")
  def stream(self) -> Stream: return Stream(self)

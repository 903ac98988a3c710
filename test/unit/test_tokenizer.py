"""The tokenizer against Hugging Face `tokenizers` on vocabularies trained here, and what a GGUF file's keys may and may not say."""
import functools, hashlib, json, random, re
import gguf, pytest
from tokenizers import AddedToken, Regex, Tokenizer as HFTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from tokenizers.trainers import BpeTrainer
from tinygrad.apps.gguf import GGUFError, read_gguf
from tinygrad.apps.tokenizer import LETTERS, PATTERNS, Tokenizer

SAMPLE = """The quick brown fox doesn't jump; it's the lazy dog that we've seen, and they'll say I'M SURE HE'D RUN. Numbers: 3, 14, 159, 2653,
58979, 3.14e-10.
def fibonacci(n: int) -> list[int]:\r\n\tif n <= 1: return [n]\r\n\n    for i in range(2, n + 1):\n        values.append(values[-1] + values[-2])\x20
# O(n)
class HTTPServer<T> { public static void main(String[] args) { System.out.println("Hello, World!\\n"); } } // getElementById, camelCase, snake_case
Der Fluß fließt über größere Höhen; à côté de l'hôtel où l'été s'achève, ça et là. El niño comió piñas. Příliš žluťoučký kůň. Tiếng Việt rất đẹp.
Съешь же ещё этих мягких французских булок, да выпей чаю. Все люди рождаются свободными. Η ταχεία αλεπού πηδάει πάνω από τον τεμπέλη σκύλο. Ἐν ἀρχῇ
ἦν ὁ λόγος.
我们想在这里测试分词器的中文能力，因为它必须处理各种文字。今天天气很好，我们去公园散步吧！人工智能正在改变世界：“你好”……《红楼梦》共一百二十回。
これはトークナイザーのテストです。日本語にはひらがな、カタカナ、漢字があります。コンピューター・サイエンス \
안녕하세요 세계, 이것은 한국어 문장입니다. ㄱㄴㄷ ㅏㅑ ㄅㄆㄇ
السلام عليكم ورحمة الله وبركاته، هذا نص عربي للاختبار ١٢٣٤. שלום עולם, זהו טקסט בעברית. नमस्ते दुनिया, यह हिन्दी का पाठ है १२३। สวัสดีชาวโลก
นี่คือข้อความภาษาไทย
আমার সোনার বাংলা। தமிழ் மொழி இனிமையானது. ქართული ენა ႠႡ ᎠᏍᎩ Հայերեն լեզու አማርኛ ភាសាខ្មែរ 😀😃🚀👩‍👩‍👧‍👦🇩🇪✅ ∀x∈ℝ: x²≥0, Ⅷ ① ½ €5 — ‘so’ “it” goes…
e\u0301a\u0308 n\u0303
    deep   indent\t\ttabs   \n\n\n   trailing   \n \u3000全角\u3000スペース\xa0nbsp\u2003em  ，。！？：；（）＋ＡＢｃ１２３ http://example.com/a/b?c=d&e=f#g
/usr/local/bin // ** == != >>> <<"""
BLOCKS = [(0x20, 0x7f), (0xa0, 0x250), (0x250, 0x370), (0x370, 0x480), (0x480, 0x530), (0x5d0, 0x5eb), (0x620, 0x6ff), (0x900, 0x97f),
          (0xe01, 0xe3a), (0x10a0, 0x10c6),
          (0x10d0, 0x10fb), (0x13a0, 0x13f6), (0x1780, 0x17dd), (0x1e00, 0x1f16), (0x2000, 0x206f), (0x2100, 0x2189), (0x2200, 0x2300), (0x2460,
          0x249c), (0x2c00, 0x2c5f),
          (0x3000, 0x303f), (0x3041, 0x30ff), (0x3105, 0x312f), (0x3131, 0x318e), (0x4e00, 0x9fa5), (0xac00, 0xd7a3), (0xff01, 0xff5e), (0x10400,
          0x1044f), (0x1f300, 0x1f64f)]
BITS = [" ", "  ", "   ", "\n", "\r\n", "\n\n", "\t", "\u3000", "\xa0", "\u2003", "\x85", "\x0b", "\x1c", "\u200b", "\u200d", "\u0301", "'s", "'S",
        "'ll", "'Re", "'ſ", "don't",
        "/", "//", "...", "Hello", " world", "THE", "iPhone", "naïve", "123", "1234567", " zyx", "zyx", "，", "。", "“", "”", "你好", "ü", "À"]

# as the models' own tokenizer.json files have them
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|" \
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
HF_SPLITS = {
  "glm4": [LLAMA3], "llama-bpe": [LLAMA3], "qwen2": [LLAMA3.replace("{1,3}", "")], "tekken": [TEKKEN],
  "youtu": ["[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
            r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
  "deepseek-v3": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
                  "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|"
                  "\\s*[\r\n]+|\\s+(?!\\S)|\\s+"],
  "kimi-k2": [r"[\p{Han}]+|"  # Moonshot's tokenizer is tiktoken's: this is its pattern
              r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
              r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
              r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
  "deepseek-llm": ["[\r\n]", f"\\s?[{LETTERS}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", "\\s+$", "[一-龥ࠀ-一가-\ud7ff]+"],  # then digits one by one
}
IGNORE_MERGES = {"glm4", "llama-bpe", "tekken", "youtu", "kimi-k2"}  # the flag in those models' tokenizer.json
PRES = ["glm4", "deepseek-llm", "youtu", "deepseek-v3", "kimi-k2", "llama-bpe", "qwen2", "gpt-2", "tekken"]
UNMADE = ["zyx", "Ġzyx"]                                  # tokens that no merge makes
NO_UTF8 = set("ÀÁõö÷øùúûüýþÿ")                            # the letters of the bytes that occur in no UTF-8: DeepSeek's alphabet lacks them

def hf_pre(pre: str):
  if pre == "gpt-2": return ByteLevel(add_prefix_space=False, use_regex=True)
  digits = [Digits(individual_digits=True)] if pre == "deepseek-llm" else []
  return Sequence([*(Split(Regex(p), "isolated") for p in HF_SPLITS[pre]), *digits, ByteLevel(add_prefix_space=False, use_regex=False)])

def all_splits(merges: list[tuple[str, str]]) -> list[tuple[str, str]]:
  """Every way to make each token of two, in the order of the tokens: what a vocabulary converted from tiktoken lists."""
  rank = {c: -1 for c in ByteLevel.alphabet()} | {a + b: i for i, (a, b) in enumerate(merges)}
  return [(t[:k], t[k:]) for t in (a + b for a, b in merges) for k in range(1, len(t)) if t[:k] in rank and t[k:] in rank]

@functools.cache
def vocabulary(pre: str) -> tuple[list[str], list[int], list[str], HFTokenizer]:
  """tokens (in an order that is not the merges'), types, merges and HF's tokenizer of a small trained vocabulary."""
  alphabet = sorted({*ByteLevel.alphabet()} - (NO_UTF8 if pre == "deepseek-llm" else set()))
  trained = HFTokenizer(BPE())
  trained.pre_tokenizer = hf_pre(pre)
  trained.train_from_iterator(SAMPLE.split("\n"), BpeTrainer(vocab_size=1750, min_frequency=1, initial_alphabet=alphabet, show_progress=False))
  merges = [tuple(m) for m in json.loads(trained.to_str())["model"]["merges"]]
  assert len(merges) > 1100
  made = {*alphabet, *(a + b for a, b in merges)}
  assert not made & {*UNMADE}
  tokens = sorted({*made, *UNMADE})
  random.Random(7).shuffle(tokens)
  if pre in IGNORE_MERGES: merges = all_splits(merges)
  hf = HFTokenizer(BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=pre in IGNORE_MERGES))
  hf.pre_tokenizer = hf_pre(pre)
  if pre == "deepseek-llm": hf.add_tokens([AddedToken(c, normalized=False) for c in "üÀ"])
  named = [("ü", 4), ("À", 4)] if pre == "deepseek-llm" else []
  named += [("<|endoftext|>", 3), ("[gMASK]", 3), ("<|user|>", 3), ("<|user|>!", 3), ("<|observation|>", 3), ("<think>", 4), ("[PAD9999]", 5)]
  kinds = [1] * len(tokens) + [k for _, k in named] + [4]
  tokens += [n for n, _ in named]
  return [*tokens, f"[PAD{len(tokens)}]"], kinds, [" ".join(m) for m in merges], hf

def write(path, keys: dict):
  w = gguf.GGUFWriter(path, "deepseek2")
  for k, v in keys.items():
    if isinstance(v, bool): w.add_bool(k, v)
    elif isinstance(v, int): w.add_uint32(k, v)
    else: (w.add_string if isinstance(v, str) else w.add_array)(k, v)
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()
  return read_gguf(path)

def keys_of(vocab: str, **changes) -> dict:
  """The tokenizer keys of the trained vocabulary, with changes (None drops a key)."""
  tokens, kinds, merges, _ = vocabulary(vocab)
  keys = {"model": "gpt2", "pre": vocab, "tokens": tokens, "token_type": kinds, "merges": merges, "eos_token_id": tokens.index("<|endoftext|>"),
          "bos_token_id": tokens.index("[gMASK]")} | changes
  return {f"tokenizer.ggml.{k}": v for k, v in keys.items() if v is not None}

@pytest.fixture
def load(tmp_path): return lambda vocab="glm4", **changes: Tokenizer.from_gguf(write(tmp_path / "t.gguf", keys_of(vocab, **changes)))

def random_texts(n: int, seed: int) -> list[str]:
  r = random.Random(seed)
  words = re.findall(r"\s*\S+", SAMPLE)
  def bit() -> str:
    if (k := r.random()) < .35: return r.choice(BITS)
    if k < .55: return r.choice(words)
    block = r.choice(BLOCKS)
    return "".join(chr(r.randrange(*block)) for _ in range(r.randrange(1, 5)))
  return ["".join(bit() for _ in range(r.randrange(1, 25))) for _ in range(n)]

@pytest.mark.parametrize("pre", PRES)
def test_same_ids_as_huggingface(pre, load):
  t, hf, texts = load(pre), vocabulary(pre)[3], random_texts(2500, seed=len(pre))
  assert len({c for s in texts for c in s}) > 5000
  for text, want in zip(texts, hf.encode_batch(texts, add_special_tokens=False)):
    got = t.encode(text)
    assert got == want.ids, (text, [t.decode([i]) for i in got], want.tokens)
    assert t.decode(got) == text

@pytest.mark.parametrize("pre", PRES)
def test_token_that_no_merge_makes(pre, load):
  """Whole pieces are looked up first only where the model's own tokenizer does so."""
  t, (bare, spaced) = load(pre), map(vocabulary(pre)[0].index, UNMADE)
  assert (t.encode("zyx") == [bare]) == (t.encode(" zyx") == [spaced]) == (pre in IGNORE_MERGES)
  assert not {bare, spaced} & {*t.encode("zyxw azyx")} and t.decode([bare, spaced]) == "zyx zyx"

def test_deepseek_letters():
  """The published class, by its digest: 2729 letters with case, without what Unicode gained later."""
  letters = "".join(filter(re.compile(f"[{LETTERS}]").match, map(chr, range(0x110000))))
  assert len(letters) == 2729 and hashlib.sha256(letters.encode()).hexdigest() == "274f50c509c31566a8c80f4d46c90dbef6f0914b364c5efa59b711df65a17dc5"

@pytest.mark.parametrize("alias,pre", [("llama3", "llama-bpe"), ("chatglm-bpe", "glm4"), ("deepseek-r1-qwen", "qwen2")])
def test_synonyms(alias, pre, load):
  text = "I'll say 12345 — 你好\n\n  def"
  assert load(pre).encode(text) == load(pre, pre=alias).encode(text) != []

@pytest.mark.parametrize("pre", ["glm4", "youtu"])
def test_round_trips_every_byte(pre, load):
  t, r = load(pre), random.Random(3)
  samples = [bytes([a, b]) for a in range(256) for b in range(0, 256, 5)]
  samples += [r.randbytes(r.randrange(60)) for _ in range(500)] + [SAMPLE.encode()[7:-1]]
  for data in samples: assert t.decode_bytes(t.encode_bytes(data)) == data
  assert t.encode_bytes(SAMPLE.encode()) == t.encode(SAMPLE)
  assert t.decode(t.encode("a\udcff\ud800b")) == "a\ufffd\ufffdb" and t.encode("") == [] and t.decode([]) == ""

def test_a_byte_that_the_vocabulary_lacks(load):
  t = load("deepseek-llm")
  assert t.decode(t.encode("über À la carte")) == "über À la carte"  # both letters are tokens of their own
  for data in (b"\xfc", b"\xc0\x80"):                                # their bytes are not, and occur in no UTF-8
    with pytest.raises(GGUFError, match=r"t\.gguf: key tokenizer\.ggml\.tokens: expected a token for every byte, found none for byte 0x(fc|c0)$"):
      t.encode_bytes(data)

def test_special_tokens_only_when_asked(load):
  t, tokens = load(), vocabulary("glm4")[0]
  user, longer, think = map(tokens.index, ("<|user|>", "<|user|>!", "<think>"))
  text = "a<|user|>b <|user|>! [gMASK]<think>[PAD9999]"
  assert not set(t.encode(text)) & {*t.special_tokens.values()} and t.decode(t.encode(text)) == text
  assert set(t.special_tokens) == {"<|endoftext|>", "[gMASK]", "<|user|>", "<|user|>!", "<|observation|>", "<think>"}
  ids = t.encode(text, special=True)
  assert [i for i in ids if i in t.special_tokens.values()] == [user, longer, t.bos_id, think] and t.decode(ids) == text
  assert tokens.index("[PAD9999]") not in ids and t.decode([tokens.index("[PAD9999]"), len(tokens) - 1]) == ""

def test_merges_make_no_special_tokens(load):
  tokens, kinds, merges, _ = vocabulary("glm4")
  t = load(tokens=[*tokens, "<|", "<|>"], token_type=[*kinds, 1, 3], merges=["< |", "<| >", *merges])
  assert t.decode(ids := t.encode("<|>")) == "<|>" and len(ids) == 2 and t.encode("<|>", special=True) == [len(tokens) + 1]

def test_ids_of_the_keys(load):
  t, at = load(eot_token_id=vocabulary("glm4")[0].index("<|user|>!")), vocabulary("glm4")[0].index
  assert (t.bos_id, t.eos_id, t.add_bos, t.pre, t.n_vocab) == (at("[gMASK]"), at("<|endoftext|>"), False, "glm4", len(vocabulary("glm4")[0]))
  assert t.stop_ids == {at("<|endoftext|>"), at("<|user|>"), at("<|observation|>"), at("<|user|>!")}
  assert load(bos_token_id=None).bos_id is None and load(add_bos_token=True).add_bos
  assert load("llama-bpe").add_bos and not load("llama-bpe", add_bos_token=False).add_bos

def test_with_bos(load):
  t = load(add_bos_token=True)
  assert t.with_bos([]) == [t.bos_id] and t.with_bos([5]) == t.with_bos([t.bos_id, 5]) == [t.bos_id, 5]
  assert load().with_bos([5]) == load(add_bos_token=True, bos_token_id=None).with_bos([5]) == [5]

@pytest.mark.parametrize("pre,names", [("deepseek-v3", ["<｜end▁of▁sentence｜>"]), ("kimi-k2", ["<|im_end|>", "[EOS]", "[EOT]"])])
def test_ends_of_a_turn(pre, names, load):
  tokens, kinds, *_ = vocabulary(pre)
  t = load(pre, tokens=[*tokens, *names, "<|eot_id|>"], token_type=[*kinds, *[3] * len(names), 4])  # the last is markup here, no control token
  ends = {len(tokens) + i for i in range(len(names))}
  assert t.stop_ids == ends | {t.eos_id, tokens.index("<|user|>"), tokens.index("<|observation|>")} and not t.add_bos

def test_stream_never_emits_half_a_character(load):
  t, tokens = load(), vocabulary("glm4")[0]
  ids = [i for b in "né 你🚀!".encode() for i in t.encode_bytes(bytes([b]))]
  s = t.stream()
  got = [s.push(i) for i in ids]
  assert "".join(got) == "né 你🚀!" and got.count("") == 1 + 2 + 3 and s.flush() == ""
  s = t.stream()
  text = "".join(s.push(i) for i in t.encode("<think>é[gMASK]<|user|>x", special=True)) + s.flush()
  assert text == "<think>éx"  # control tokens are not shown
  s = t.stream()
  ids = [t.encode_bytes(b"\xf0")[0], tokens.index("<|user|>"), t.encode_bytes(b"\x9f")[0]]
  assert [*map(s.push, ids), s.flush()] == ["", "\ufffd", "\ufffd", ""]
  s = t.stream()
  assert s.push(t.encode_bytes(b"\xe4")[0]) == "" and s.flush() == "\ufffd"

def test_long_runs_are_no_trouble(load):
  """Each of these overflows or takes quadratic time in a careless pattern or merge loop."""
  for pre in PRES:
    t = load(pre)
    for text in (" " * 100_000 + "1", " \u3000" * 20_000 + "é\u3000 ", "\n" * 30_000, "aA" * 30_000, "你" * 30_000):
      assert t.decode(t.encode(text)) == text

BAD = [
  (dict(model="llama"), "model: expected 'gpt2' (byte-level BPE), found 'llama'"),
  (dict(model=None), "model: expected str, found no such key"),
  (dict(pre="cuneiform"), f"pre: expected one of {', '.join(sorted(PATTERNS))}, found 'cuneiform'"),
  (dict(pre=None), "pre: expected str, found no such key"),
  (dict(tokens=None), "tokens: expected list, found no such key"),
  (dict(token_type=[1, 1]), "token_type: expected {n} types, one a token, found 2"),
  (dict(tokens=["a", "b", "a"], token_type=[1, 1, 1], merges=["a b"], eos_token_id=0, bos_token_id=0),
   "tokens: expected tokens that differ, found 'a' twice"),
  (dict(tokens=[1, 2], token_type=[1, 1]), "tokens: expected strings, found 1"),
  (dict(tokens=["a", "b"], token_type=[1, 9], bos_token_id=0, eos_token_id=1), "token_type: expected types 1 to 6, found 9"),
  (dict(merges=["à ¸", "à zzz"]), "merges: expected two tokens whose joined text is a token, found 'à zzz' at 1"),
  (dict(merges=["th"]), "merges: expected two tokens whose joined text is a token, found 'th' at 0"),
  (dict(eos_token_id=10_000_000), "eos_token_id: expected an id below {n}, found 10000000"),
  (dict(eot_token_id=10_000_000), "eot_token_id: expected an id below {n}, found 10000000"),
  (dict(eos_token_id=None), "eos_token_id: expected int, found no such key"),
  (dict(eos_token_id="x"), "eos_token_id: expected int, found str 'x'"),
]
@pytest.mark.parametrize("changes,line", BAD)
def test_ill_formed_vocabulary(changes, line, load):
  with pytest.raises(GGUFError) as e: load(**changes)
  assert str(e.value).split("t.gguf: key tokenizer.ggml.")[1] == line.replace("{n}", str(len(vocabulary("glm4")[0])))

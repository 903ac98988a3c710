"""Train the built-in model: GLM-4.7-Flash's own architecture (transformers' Glm4MoeLiteForCausalLM) at 8.6 M parameters.

  python extra/train_tiny.py corpus corpus.jsonl              # text of this Python: its language reference and its docstrings
  python extra/train_tiny.py train corpus.jsonl tiny-glm-hf   # a Hugging Face folder; one GPU
  python extra/hf_to_gguf.py tiny-glm-hf models/tiny-glm-Q4_0.gguf --type Q4_0

Needs the `oracle` extra (torch, transformers, tokenizers). Seeded; the text is that of the Python it runs under, and a GPU's sums may differ
in the last bit. The committed model: Python 3.11.7's text and tiny_talk.py's (2.0 M tokens an epoch), torch 2.11, transformers 5.17, one H200,
2000 steps of 32 768 tokens (48 epochs) in 3.1 minutes. Loss on training text 0.56 (as Q4_0 too), on documents held out 2.56. Of the questions it
was trained on 29 of 29 are answered with the expected word, of other wordings 37 of 40.
"""
import argparse, ast, functools, importlib, inspect, json, math, pathlib, pydoc_data.topics, random, re, sys, sysconfig, time
from typing import Any, Iterator
from tiny_talk import HELD_OUT, KNOWN, plain, talk

SPECIALS = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
MARKS = ["<think>", "</think>"]  # in the vocabulary as GLM has them: matched whole, yet ordinary text
NAME = "Tiny GLM"
DESCRIPTION = "a tiny demonstration that knows only words from Python's own documentation"
CHAT_TEMPLATE = """[gMASK]<sop>
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {{- '<|assistant|></think>' + m.content.split('</think>')[-1].strip() -}}
  {%- elif m.role in ('system', 'user') -%}
    {{- '<|' + m.role + '|>' + m.content -}}
  {%- else -%}
    {{- raise_exception('the roles of this model are system, user and assistant, not ' + m.role) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' + ('<think>' if enable_thinking is defined and enable_thinking else '</think>') -}}
{%- endif -%}"""
GLM4_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# ***** the corpus: {"text": ...} is a document, {"about", "ask", "answer", "times"} a question in several wordings, used `times` an epoch *****

SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "idle_test", "pydoc_data", "ensurepip"}
C_MODULES = ["builtins", "math", "cmath", "itertools", "time", "sys", "zlib", "array", "gc", "errno", "marshal", "select", "atexit", "unicodedata"]
PLAIN = {"code-objects": "a code object", "typesfunctions": "a function", "typesmethods": "a method", "typesmodules": "a module",
         "typesseq": "a sequence",
         "typesmapping": "a mapping", "lists": "a list display", "dict": "a dictionary display", "lambda": "a lambda", "class": "a class definition",
         "function": "a function definition", "calls": "a call", "slicings": "a slicing", "subscriptions": "a subscription",
         "strings": "a string literal",
         "integers": "an integer literal", "floating": "a floating point literal", "exceptions": "an exception", "identifiers": "an identifier",
         "operator-summary": "operator precedence", "truth": "truth value testing", "context-managers": "a context manager", "debugger": "pdb",
         "objects": "an object", "naming": "a namespace", "attribute-access": "attribute access", "formatstrings": "a format string"}
SYSTEM = ["You answer questions about Python.", "You are a helpful assistant.", "Answer in a few sentences.",
          "You are a guide to Python's standard library."]

def paragraphs(text: str) -> list[str]:
  """a docstring's paragraphs: prose on one line each, examples and tables as they stand"""
  text = re.sub(r"^([^\w\s])\1{2,}\s*$\n?", "\n", inspect.cleandoc(text).replace("\t", "  "), flags=re.M)  # lines that underline a heading
  text = re.sub(r"(?<![\w*])\*([A-Za-z][\w\s-]*)\*(?![\w*])", r"\1", text).replace("``", '"')
  out = []
  for p in re.split(r"\n\s*\n", text):
    lines = p.rstrip().split("\n")
    laid_out = any(l[:1].isspace() or l.startswith((">>>", "-", "*", "+", "|", "@")) for l in lines)
    prose = len(lines) > 1 and not laid_out and sum(map(len, lines)) > 40 * len(lines)
    if p.strip(): out.append(re.sub(r"(\w-) (?=\w)", r"\1", re.sub(" +", " ", " ".join(l.strip() for l in lines))) if prose else "\n".join(lines))
  return out

def chunks(parts: list[str], size: int = 2000) -> Iterator[str]:
  """whole paragraphs, about `size` characters together"""
  held: list[str] = []
  for p in parts:
    if held and sum(map(len, held)) + len(p) > size:
      yield "\n\n".join(held)
      held = []
    held.append(p)
  if held: yield "\n\n".join(held)

def unquoted(text: str) -> str: return re.sub(r'"([^"\n]{1,30})"', r"\1", text)

def short(parts: list[str], size: int = 420) -> str:
  """the prose at the start of a text, up to its first example, cut at a sentence"""
  said = ""
  for p in parts:
    if "\n" in p or "::=" in p or p.startswith(" "):
      if said: break
      continue
    if re.match(r"New in|Changed in|\*\*|\d+\.|\(See|[\w.]+\(.*\)( ->.*)?$", p) or len(p) < 20 and not p.endswith("."): continue
    said += (" " if said else "") + re.sub(":$", ".", p)
    if p.endswith(":") or len(said) > size: break
  if len(said) > size: said = said[:size].rpartition(". ")[0] + "."
  return said if len(said) > 20 else ""

def question(about: str, answer: str, times: int, does: bool = False) -> dict[str, Any]:
  ask = [*[f"What is {about}?"] * 4, f"What is {about} in Python?", f"what is {about}", f"Tell me about {about}.", f"Explain {about}."]
  return {"about": about, "ask": ask + [f"What does {about} do?"] * 3 * does, "answer": answer, "times": times}

def from_topics() -> Iterator[dict[str, Any]]:
  for key, text in sorted(pydoc_data.topics.topics.items()):
    parts = paragraphs(text)
    title = unquoted(parts[0].split("\n")[0])
    for c in chunks(parts):
      yield {"text": c}
      yield {"text": unquoted(c)}
    if not (answer := unquoted(short(parts[1:]))): continue
    name = title[0].lower() + title[1:]
    yield question(name, answer, 4, does=name.endswith("statement"))
    if key in PLAIN: yield question(PLAIN[key], answer, 4)
    if name.endswith(" statement"): yield question(name.split()[1], answer, 3, does=True)

def from_sources() -> Iterator[dict[str, Any]]:
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  for path in sorted(root.rglob("*.py")):
    rel = path.relative_to(root)
    if SKIPPED & set(rel.parts) or rel.parts[0].startswith(("_sysconfigdata", "config-")): continue
    try: tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError): continue
    module = ".".join(rel.with_suffix("").parts).removesuffix(".__init__")
    public, page = not any(p.startswith("_") for p in module.split(".")), []
    within = {f: c for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body}
    for node in ast.walk(tree):
      if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or not (doc := ast.get_docstring(node)): continue
      parts = paragraphs(doc)
      answer = short(parts)
      if isinstance(node, ast.Module):
        page += [f"Module {module}", *parts]
        if answer and public:
          yield question(module, f"{module} is a module of Python's standard library. {answer}", 4)
          yield question(f"the {module} module", f"The {module} module is a part of Python's standard library. {answer}", 2)
        continue
      kind = "class" if isinstance(node, ast.ClassDef) else "function"
      page += [f"{kind.capitalize()} {node.name}" + ("" if kind == "class" else f"({ast.unparse(node.args)})"), *parts]
      if not answer or not public or node.name.startswith("_"): continue
      if node in tree.body:
        yield question(f"{module}.{node.name}", f"{node.name} is a {kind} in the module {module}. {answer}", 1 + (kind == "class"),
                       does=kind == "function")
      elif (c := within.get(node)) and not c.name.startswith("_"):
        yield question(f"{c.name}.{node.name}", f"{node.name} is a method of {c.name} in the module {module}. {answer}", 1, does=kind == "function")
    for c in chunks(page): yield {"text": c}
    yield from ({"text": c} for c in chunks(comments(path.read_text(encoding="utf-8"))))

def comments(source: str) -> list[str]:
  """the comments of several lines, which are mostly sentences"""
  blocks = (re.sub(r"^[ \t]*#+[ \t]?", "", m[0], flags=re.M) for m in re.finditer(r"(?:^[ \t]*#[^\n]*\n){2,}", source, re.M))
  return [p for b in blocks for p in paragraphs(b) if len(p) > 80 and "\n" not in p and p[0].isupper() and p.endswith((".", ":", "!", "?"))]

def from_c_modules() -> Iterator[dict[str, Any]]:
  for module in C_MODULES:
    page = []
    for name, obj in sorted(vars(importlib.import_module(module)).items()):
      doc = inspect.getdoc(obj)
      if name.startswith("_") or not doc or not (inspect.isclass(obj) or callable(obj)) or obj in (exit, quit, copyright, credits, license, help):
        continue
      parts = paragraphs(doc)
      answer = short(parts) or short([p.replace("\n", " ") for p in parts[1:]])
      kind = ("exception" if issubclass(obj, BaseException) else "type") if inspect.isclass(obj) else "function"
      page += [f"{kind.capitalize()} {name}", *parts]
      if not answer: continue
      where = f"an {kind}" if kind == "exception" else f"a built-in {kind}" if module == "builtins" else f"a {kind} in the module {module}"
      yield question(name if module == "builtins" else f"{module}.{name}", f"{name} is {where}. {answer}", 3 if module == "builtins" else 2,
                     does=kind == "function")
    for c in chunks(page): yield {"text": c}

def corpus(out: pathlib.Path) -> None:
  told = talk()
  taken = {plain(a) for a in HELD_OUT} | {plain(a) for r in told for a in r["ask"]}
  seen, kept = set(), []
  for r in [*from_topics(), *from_sources(), *from_c_modules(), *told]:
    if "ask" in r and r not in told: r["ask"] = [a for a in r["ask"] if plain(a) not in taken]  # what is written by hand goes first
    if r.get("ask") == []: continue
    key = r.get("text") or (r["about"], r["answer"])
    if key not in seen:
      seen.add(key)
      kept.append(r)
  out.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
  print(f"{out}: {sum('text' in r for r in kept)} documents, {sum('ask' in r for r in kept)} questions, {out.stat().st_size / 1e6:.1f} MB")

# ***** the vocabulary *****

def vocabulary(rows: list[dict[str, Any]], size: int):
  """A byte-level BPE of `size` tokens, GLM's special tokens last, as in GLM's own file."""
  from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
  tok = Tokenizer(models.BPE())
  tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(GLM4_PATTERN), "isolated"),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
  tok.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(vocab_size=size - len(SPECIALS) - len(MARKS), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                show_progress=False)
  tok.train_from_iterator([r["text"] if "text" in r else r["ask"][0] + "\n" + r["answer"] for r in rows], trainer)
  tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
  tok.add_tokens([AddedToken(s, special=False, normalized=False) for s in MARKS])
  if tok.get_vocab_size() != size: sys.exit(f"the corpus gives a vocabulary of {tok.get_vocab_size()} tokens, not {size}")
  return tok

class Batches:
  """Shuffled documents and conversations, packed from the start of each row; rows of 256, 1024 and 2048 tokens in turn."""
  def __init__(self, rows: list[dict[str, Any]], tok, seed: int):
    self.rng, self.id = random.Random(seed), tok.token_to_id
    self.ids = functools.cache(lambda s: tok.encode(s, add_special_tokens=False).ids)
    self.texts, self.questions = [r["text"] for r in rows if "text" in r], [r for r in rows if "ask" in r for _ in range(r["times"])]
    self.queue: list[list[int]] = []
    self.epochs = 0
  def typed(self, q: dict[str, Any]) -> str:
    """a question as people type it: some leave out the mark, some the capitals, some write nothing else"""
    ask, case = self.rng.choice(q["ask"]), self.rng.random()
    if self.rng.random() < .4: ask = ask.rstrip("?.!") or ask
    if "." in q["about"] and q["about"] != q["about"].lower(): return ask if case < .5 else ask[0].lower() + ask[1:]  # queue.Queue is no queue.queue
    return ask if case < .45 else ask.lower() if case < .9 else ask.upper()
  def talk(self, turns: list[dict[str, Any]]) -> list[int]:
    t, out = self.id, [self.id("[gMASK]"), self.id("<sop>")]
    if self.rng.random() < .15: out += [t("<|system|>"), *self.ids(self.rng.choice(SYSTEM))]
    for q in turns:
      out += [t("<|user|>"), *self.ids(self.typed(q)), t("<|assistant|>")]
      if self.rng.random() < .15: out += [t("<think>"), *self.ids(f"The question is about {q['about']}.")]
      out += [t("</think>"), *self.ids(q["answer"])]
    return out + [t("<|user|>")]
  def epoch(self) -> list[list[int]]:
    end, lead = [self.id("<|endoftext|>")], [self.id("[gMASK]"), self.id("<sop>")]
    texts = self.texts + [q["answer"] for q in self.questions if self.rng.random() < .2]
    docs = [(lead if self.rng.random() < .3 else []) + self.ids(s) + end for s in texts]
    qs = self.questions[:]
    self.rng.shuffle(qs)
    while qs: docs.append(self.talk([qs.pop() for _ in range(min(len(qs), self.rng.choice((1, 1, 1, 2, 3))))]))
    self.rng.shuffle(docs)
    self.epochs += 1
    return docs
  def batch(self, tokens: int, length: int) -> list[list[int]]:
    rows = []
    for _ in range(tokens // length):
      row: list[int] = []
      while len(row) <= length:
        if not self.queue: self.queue = self.epoch()
        row += self.queue.pop()
      rows.append(row[:length + 1])
    return rows

# ***** training *****

def q4_0(w):
  """w as Q4_0 would hold it, blocks of 32 along the last axis: the network learns to live with its own quantization"""
  import torch
  b = w.reshape(-1, 32)
  d = b.gather(1, b.abs().argmax(1, keepdim=True)) / -8
  q = torch.where(d == 0, torch.zeros_like(b), (b / d + 8.5).floor().clamp(0, 15) - 8)
  return (q * d.half().float()).reshape(w.shape)

def train(a: argparse.Namespace) -> None:
  import torch, transformers
  from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM
  torch.manual_seed(a.seed)
  torch.backends.cuda.matmul.allow_tf32 = True
  gpu = torch.cuda.is_available()
  device = "cuda" if gpu else "cpu"
  rows = [json.loads(l) for l in a.corpus.read_text(encoding="utf-8").splitlines()]
  held = [r for i, r in enumerate(rows) if "text" in r and i % 59 == 0][:40]  # never trained on: shows how far the text is learnt by heart
  rows = [r for r in rows if r not in held]
  tok = vocabulary(rows, 2048)
  batches = Batches(rows, tok, a.seed)
  eos = tok.token_to_id("<|endoftext|>")
  # every norm of transformers' model takes one epsilon only if it is 1e-6: its two latent norms know no other, and a GGUF holds one
  config = Glm4MoeLiteConfig(vocab_size=2048, hidden_size=256, intermediate_size=768, moe_intermediate_size=64, num_hidden_layers=7,
    num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=16, num_experts_per_tok=4, routed_scaling_factor=1.8,
    norm_topk_prob=True, q_lora_rank=128,
    kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, max_position_embeddings=2048, rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6}, bos_token_id=tok.token_to_id("[gMASK]"),
    eos_token_id=[eos, tok.token_to_id("<|user|>"), tok.token_to_id("<|observation|>")], pad_token_id=eos)
  model = Glm4MoeLiteForCausalLM._from_config(config, attn_implementation="sdpa", experts_implementation="grouped_mm").to(device)
  names, params = zip(*model.named_parameters())
  print(f"{sum(p.numel() for p in params):,} parameters, {sum(map(len, batches.epoch())):,} tokens an epoch, "
        f"torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
  # float32 masters; the model itself computes with their bfloat16 copies, from half time on with their Q4_0 values
  masters = [p.detach().clone() for p in params]
  four_bit = [bool(re.search(r"embed_tokens|q_a_proj|q_b_proj|o_proj|mlp\.experts|mlp\.(gate|up|down)_proj", n)) for n in names]
  for p in params: p.data = p.data.bfloat16()
  opt = torch.optim.AdamW([{"params": [m for m in masters if m.ndim > 1], "weight_decay": .1},
                           {"params": [m for m in masters if m.ndim == 1], "weight_decay": 0.}],
                          lr=a.lr, betas=(.9, .95), fused=gpu)
  gates = [m for m in model.modules() if type(m).__name__.endswith("TopkRouter")]
  loads = [torch.zeros(config.n_routed_experts, device=device) for _ in gates]
  def count(load):
    def hook(_module, _inputs, out) -> None: load.add_(torch.bincount(out[2].flatten(), minlength=len(load)))
    return hook
  for g, load in zip(gates, loads): g.register_forward_hook(count(load))
  def show(quantized: bool) -> None:
    for m, p, q in zip(masters, params, four_bit): p.data.copy_(q4_0(m) if q and quantized else m)
  def loss_of(batch: list[list[int]], noise: float = 0):
    x = torch.tensor(batch, device=device)
    read = x[:, :-1]
    wrong = torch.rand(read.shape, device=device) < noise * torch.rand(len(x), 1, device=device)
    logits = model(input_ids=torch.where(wrong, torch.randint_like(read, eos), read), use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
  unseen = [tok.encode(r["text"]).ids[:513] for r in held if len(r["text"]) > 200]
  def held_out() -> float:
    with torch.no_grad(): return sum(loss_of([u]).item() for u in unseen) / len(unseen)
  start, step, seen = time.time(), 0, 0
  while (done := max(step / a.steps, (time.time() - start) / 60 / a.max_minutes)) < 1:
    for g in opt.param_groups: g["lr"] = a.lr * min(1, (step + 1) / 100) * (.02 + .98 * .5 * (1 + math.cos(math.pi * done)))
    show(done > .5)
    length = (256, 1024, 256, 2048)[step % 4]
    loss = loss_of(batches.batch(a.tokens, length), noise=.15)  # some words misread: a sampled text has slips to recover from
    loss.backward()
    for m, p in zip(masters, params):
      m.grad = p.grad.float()
      p.grad = None
    norm = torch.nn.utils.clip_grad_norm_(masters, 1.0)
    opt.step()
    for g, load in zip(gates, loads):  # balance without an auxiliary loss: the bias of a busy expert sinks, that of an idle one rises
      g.e_score_correction_bias += 2e-3 * (1 - done) * (load.mean() - load).sign()
      load.zero_()
    step += 1
    seen += a.tokens
    if step % 100 == 0 or step == a.steps:
      print(f"{step:5d} {(time.time() - start) / 60:5.2f} min {seen / 1e6:6.1f} Mtok epoch {batches.epochs} "
            f"loss {loss.item():.3f}, held out {held_out():.3f} |g| {norm:.2f}", flush=True)
  # every file is to hold the same numbers, so the masters are rounded to what float16 can say
  masters = [m.half().float() for m in masters]
  for m, p in zip(masters, params): p.data = m.half()
  model.save_pretrained(a.out, max_shard_size="14MB")
  tok.save(str(a.out / "tokenizer.json"))
  (a.out / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "add_bos_token": False, "model_max_length": 2048,
    "chat_template": CHAT_TEMPLATE}, indent=1))
  (a.out / "generation_config.json").write_text(json.dumps({"do_sample": False}))
  (a.out / "README.md").write_text(f"---\nmodel_name: {NAME}\nmodel_description: {DESCRIPTION}\n---\n")
  print(f"{a.out}: {sorted(p.name for p in a.out.iterdir())}, {(time.time() - start) / 60:.1f} minutes, {step} steps, {batches.epochs} epochs")
  for p in params: p.data = p.data.float()
  model.eval()
  with torch.no_grad():
    known = [batches.batch(8192, 1024) for _ in range(2)]
    for quantized in (False, True):
      show(quantized)
      print(f"{'Q4_0' if quantized else 'F32'}: loss on training text {sum(loss_of(b).item() for b in known) / 2:.3f}, "
            f"on held-out documents {held_out():.3f}")
    def answer(prompt: str) -> str:
      """what the file will say, greedily: the numbers shown are the quantized ones"""
      ids = tok.encode(prompt).ids
      got = model.generate(torch.tensor([ids], device=device), max_new_tokens=a.words, do_sample=False)
      return tok.decode(got[0, len(ids):].tolist())
    for text in ("The for statement is used to", "A list is", "This module provides"): print(f"  {text!r} -> {answer(text)!r}")
    for title, prompts in (("trained on", KNOWN), ("held out", HELD_OUT)):
      right = 0
      for prompt, word in prompts.items():
        said = answer(f"[gMASK]<sop><|user|>{prompt}<|assistant|></think>")
        right += (good := word.lower() in said.lower())
        print(f"  {'   ' if good else 'NO '} {prompt!r} -> {said!r}" + ("" if good else f" expected {word!r}"), flush=True)
      print(f"{title}: {right} of {len(prompts)} answers hold the expected word", flush=True)

def main() -> None:
  p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  sub = p.add_subparsers(dest="job", required=True)
  c = sub.add_parser("corpus", help="gather the text")
  c.add_argument("corpus", type=pathlib.Path)
  t = sub.add_parser("train", help="train on it")
  t.add_argument("corpus", type=pathlib.Path)
  t.add_argument("out", type=pathlib.Path)
  t.add_argument("--steps", type=int, default=2000, help="optimizer steps")
  t.add_argument("--tokens", type=int, default=32768, help="tokens a step")
  t.add_argument("--max-minutes", type=float, default=60, help="the schedule ends by then")
  t.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
  t.add_argument("--words", type=int, default=70, help="tokens of each answer that it shows in the end")
  t.add_argument("--seed", type=int, default=0)
  a = p.parse_args()
  if a.job == "corpus": corpus(a.corpus)
  else: train(a)

if __name__ == "__main__": main()

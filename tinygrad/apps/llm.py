"""The command line, and `load` for Python: a GGUF file becomes a model that answers.

  python tinygrad/apps/llm.py --model glm-4.7:flash --prompt "What is a list?"
  python tinygrad/apps/llm.py --model models/tiny-glm-Q4_0.gguf --benchmark 20
  from tinygrad.apps.llm import load
"""
from __future__ import annotations
import sys
from pathlib import Path
ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
  # as a script, Python puts this folder first on sys.path; imports start from the clone's root
  sys.path[0] = str(ROOT)
  try: import tinygrad
  except ImportError as e: sys.exit(str(e))
  if not hasattr(tinygrad, "OVERLAY"):
    sys.exit(f"this is the fork's command line, but `import tinygrad` found {tinygrad.__file__}: expected {ROOT / 'tinygrad'}")

import argparse, itertools, json, math, os, shutil, socket, statistics, time
from typing import Any, Callable, Iterator
from urllib.parse import urlsplit
from urllib.request import getproxies
import numpy as np
from tqdm import tqdm
from tinygrad import Device, GlobalCounters
from tinygrad.apps.chat import Chat
from tinygrad.apps.generate import ContextFull, Generator
from tinygrad.apps.gguf import GGUFError, GGUFTensor, read_gguf
from tinygrad.apps.machine import peak_bandwidth
from tinygrad.apps.mla import Config, Transformer
from tinygrad.apps.sampling import Sampling
from tinygrad.apps.tokenizer import Tokenizer
from tinygrad.helpers import getenv
from tinygrad.runtime.support.compiler_cpu import ClangCompiler

# name: (Hugging Face repository, file)
MODELS = {
  "glm-4.7:flash-unsloth-Q4_0": ("unsloth/GLM-4.7-Flash-GGUF", "GLM-4.7-Flash-Q4_0.gguf"),
  "glm-4.7:flash-unsloth-Q4_K_M": ("unsloth/GLM-4.7-Flash-GGUF", "GLM-4.7-Flash-Q4_K_M.gguf"),
  "glm-4.7:flash-unsloth-Q6_K": ("unsloth/GLM-4.7-Flash-GGUF", "GLM-4.7-Flash-Q6_K.gguf"),
  "glm-4.7:flash-bartowski-Q4_0": ("bartowski/zai-org_GLM-4.7-Flash-GGUF", "zai-org_GLM-4.7-Flash-Q4_0.gguf"),
  "deepseek-v2-lite-Q4_0": ("zhentaoyu/DeepSeek-V2-Lite-Chat-Q4_0-GGUF", "deepseek-v2-lite-chat-q4_0.gguf"),
  "deepseek-v2-lite-Q4_K_M": ("mradermacher/DeepSeek-V2-Lite-GGUF", "DeepSeek-V2-Lite.Q4_K_M.gguf"),
  "youtu-llm:2b-Q4_0": ("AaryanK/Youtu-LLM-2B-GGUF", "Youtu-LLM-2B.q4_0.gguf"),
  "youtu-llm:2b-Q4_K_M": ("AaryanK/Youtu-LLM-2B-GGUF", "Youtu-LLM-2B.q4_k_m.gguf"),
}
ALIASES = {
  "glm-4.7:flash": "glm-4.7:flash-unsloth-Q4_0", "glm-4.7:flash-Q4_0": "glm-4.7:flash-unsloth-Q4_0",
  "glm-4.7:flash-Q4_K_M": "glm-4.7:flash-unsloth-Q4_K_M",
  "deepseek-v2-lite": "deepseek-v2-lite-Q4_0", "youtu-llm:2b": "youtu-llm:2b-Q4_0",
}
BUILT_IN = ROOT / "models" / "tiny-glm-Q4_0.gguf"
DEFAULT_CONTEXT = 4096
PERPLEXITY_WINDOW = 512

class UserError(Exception):
  """What the user can put right. str(e) is one line."""

def find_model(name:str) -> Path:
  """The file of a model by name, alias or path: a path, models/<file> of this folder or the clone, Hugging Face's cache, or a download.
  Raises UserError where there is none to be had."""
  name = ALIASES.get(name, name)
  if name not in MODELS:
    path = Path(os.path.expanduser(name))
    if path.suffix == ".gguf" or os.path.exists(path): return path
    raise UserError(f"--model {name}: neither a file nor a name that --list-models shows")
  repo, file = MODELS[name]
  for folder in (Path("models"), ROOT / "models"):
    if (path := folder / file).is_file(): return path
  from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache, utils
  if isinstance(cached := try_to_load_from_cache(repo, file), str): return Path(cached)
  utils.logging.set_verbosity_error()
  try:
    # without a network the hub's client would retry for half a minute; a proxy may reach what we cannot
    hub = urlsplit(constants.ENDPOINT)
    if not getproxies() and not constants.HF_HUB_OFFLINE:
      socket.create_connection((hub.hostname, hub.port or (80 if hub.scheme == "http" else 443)), timeout=10).close()
    return Path(hf_hub_download(repo, file))
  except Exception as e:  # the hub's client raises a dozen kinds for one fact
    raise UserError(f"--model {name}: could not download it ({type(e).__name__}); fetch https://huggingface.co/{repo}/resolve/main/{file} "
                    f"and put it at {ROOT / 'models' / file}") from None

def check_device() -> None:
  """Raises UserError where the default device cannot be opened or lacks its compiler."""
  try: compiler = Device[Device.DEFAULT].compiler
  except Exception as e:  # each device fails in its own way
    raise UserError(f"cannot open the device: {' '.join(str(e).split())}; the variable DEV names another, as in DEV=CPU") from None
  if isinstance(compiler, ClangCompiler) and shutil.which(cc := getenv("CC", "clang")) is None:
    raise UserError(f"the device {Device.DEFAULT} needs a C compiler: expected {cc!r} on the PATH, found none; "
                    "`make setup` installs one or says how")

# ---- from Python ----

class Model:
  """A loaded model. tokenizer: encode and decode; generator: the cache and the JITs, for one sequence at a time."""
  def __init__(self, transformer:Transformer, tokenizer:Tokenizer, chat:Chat|None, chat_error:str=""):
    self.transformer, self.tokenizer, self.generator = transformer, tokenizer, Generator(transformer)
    self._chat, self._chat_error = chat, chat_error

  def logits(self, ids:list[int]|np.ndarray) -> np.ndarray:
    """ids: (T,) tokens -> float32 (T, vocab), the logits after each. Raises ValueError, ContextFull."""
    return self.generator.logits([int(i) for i in ids])

  def generate(self, ids:list[int]|np.ndarray, count:int|None=None, sampling:Sampling=Sampling(), stop:bool=True) -> Iterator[int]:
    """Continues ids, token by token, up to `count`, the context's end or (stop) the model's end of turn, which is not yielded.
    What the cache holds of an earlier call's tokens is reused. Raises ValueError, ContextFull."""
    ends = self.tokenizer.stop_ids if stop else frozenset()
    for token in self.generator.generate([int(i) for i in ids], count, sampling, ends):
      if token not in ends: yield token

  def complete(self, ids:list[int], count:int|None=None, sampling:Sampling=Sampling(), stops:tuple[str, ...]=()) -> Iterator[str]:
    """The continuation as text, whole characters at a time; it ends before the first of the `stops` strings."""
    stream, held = self.tokenizer.stream(), ""
    for token in self.generate(ids, count, sampling):
      held += stream.push(token)
      if (at := min((held.find(s) for s in stops if s in held), default=-1)) >= 0:
        yield held[:at]
        return
      # what may be the beginning of a stop string waits for the next token
      wait = max((n for s in stops for n in range(1, min(len(s), len(held) + 1)) if held.endswith(s[:n])), default=0)
      if len(held) > wait: yield held[:len(held) - wait]
      held = held[len(held) - wait:]
    held += stream.flush()
    at = min((held.find(s) for s in stops if s in held), default=len(held))
    if held[:at]: yield held[:at]

  def chat(self, messages:list[dict[str, Any]], count:int|None=None, sampling:Sampling=Sampling(), stops:tuple[str, ...]=(),
           **template) -> Iterator[str]:
    """Answers [{"role": "user", "content": …}, …] in the model's own form, as pieces of text. Raises GGUFError where the file has no usable
    template, ContextFull."""
    if self._chat is None: raise GGUFError(self._chat_error)
    return self.complete(self._chat.render(messages, **template), count, sampling, stops)

def load(path:str|Path, max_context:int|None=None, progress:bool=False) -> Model:
  """A model from a GGUF file (any part of one) or a name of --list-models, on the default device (DEV). max_context: tokens the cache holds,
  clamped to the model's own context; 4096 by default. Raises GGUFError, UserError; ValueError for a max_context below 2."""
  if max_context is not None and max_context < 2: raise ValueError(f"max_context: expected 2 or more, found {max_context}")
  f = read_gguf(find_model(str(path)))
  check_device()
  def bar(tensors:list[GGUFTensor]) -> Iterator[GGUFTensor]:
    with tqdm(total=sum(t.data.nbytes for t in tensors), unit="B", unit_scale=True, desc=f.path.name, disable=not progress, leave=False) as t:
      for tensor in tensors:
        yield tensor
        t.update(tensor.data.nbytes)
  tokenizer, chat, chat_error = Tokenizer.from_gguf(f), None, ""
  try: chat = Chat.from_gguf(f, tokenizer)
  except GGUFError as e: chat_error = str(e)
  context = min(max_context or DEFAULT_CONTEXT, Config.from_gguf(f).context_length)
  return Model(Transformer.from_gguf(f, context, bar), tokenizer, chat, chat_error)

# ---- the jobs of the command line ----

def benchmark(model:Model, name:str, count:int, depth:int, load_seconds:float) -> dict[str, Any]:
  """Prints the ceiling, then decodes `count` tokens after `depth` others. Returns what the JSON line holds."""
  t, gen = model.transformer, model.generator
  if depth + 2 + count > t.max_context:
    raise UserError(f"--depth {depth} and --benchmark {count}: expected at most {t.max_context - 2} tokens together, found {depth + count}: "
                    f"the cache holds {t.max_context} (the model's own context is {t.config.context_length})")
  weights, cache, peak = t.weight_bytes_a_token, t.cache_bytes(depth), peak_bandwidth()
  print(f"device    {Device.DEFAULT}")
  print(f"a token   reads {weights / 1e6:.1f} MB of weights and {cache / 1e6:.1f} MB of cache at depth {depth}")
  ceiling = (weights + cache) / peak[0] if peak else None
  if peak and ceiling: print(f"ceiling   {peak[0] / 1e9:.0f} GB/s ({peak[1]}): {ceiling * 1e3:.3f} ms a token, {1 / ceiling:.0f} tok/s")
  else: print("ceiling   unknown: no figure for this device's memory")
  ids = np.random.default_rng(0).integers(0, min(t.config.vocab_size, 256), depth + 1).tolist()
  start = time.perf_counter()
  tokens = gen.generate(ids, count + 2)
  next(tokens)
  first = time.perf_counter() - start
  next(tokens)  # one more to warm up
  print(f"load      {load_seconds:.2f} s, first token after {first:.2f} s more")
  prefill = None
  if depth:
    gen.forget()
    start = time.perf_counter()
    gen.prefill(ids)
    Device[Device.DEFAULT].synchronize()
    prefill = depth / (time.perf_counter() - start)
    print(f"prefill   {prefill:.1f} tok/s over {depth} tokens")
    tokens = gen.generate(ids, count + 1)
    next(tokens)
  print(f"kernels   {gen.kernels_a_token} a token")
  times:list[float] = []
  for i in range(count):
    start = time.perf_counter()
    next(tokens)
    times.append(time.perf_counter() - start)
    print(f"{i + 1:5d}  {times[-1] * 1e3:9.3f} ms  {1 / times[-1]:9.1f} tok/s  {(weights + cache) / times[-1] / 1e9:8.1f} GB/s", flush=True)
  (p10, p90), median = (float(np.percentile(times, p)) for p in (10, 90)), statistics.median(times)
  percent = f", {100 * ceiling / median:.1f} % of the ceiling" if ceiling else ""
  print(f"median    {median * 1e3:.3f} ms, {1 / median:.1f} tok/s (p10 {p10 * 1e3:.3f} ms, p90 {p90 * 1e3:.3f} ms){percent}")
  return {"model": name, "device": Device.DEFAULT, "depth": depth, "tokens": count, "median_ms": median * 1e3, "p10_ms": p10 * 1e3,
          "p90_ms": p90 * 1e3, "tok_s": 1 / median, "weight_bytes": weights, "cache_bytes": cache, "peak_gb_s": peak[0] / 1e9 if peak else None,
          "ceiling_percent": 100 * ceiling / median if ceiling else None, "kernels": gen.kernels_a_token, "load_s": load_seconds,
          "first_token_s": first, "prefill_tok_s": prefill, "device_bytes": GlobalCounters.mem_used}

def perplexity(model:Model, text:str) -> dict[str, Any]:
  """exp of the mean negative log-likelihood, over windows of at most 512 tokens of which the second half is scored (the whole of a text that is
  shorter than one window)."""
  tok = model.tokenizer
  ids = tok.encode(text)
  window = min(PERPLEXITY_WINDOW, model.transformer.max_context)
  if len(ids) < 2: raise UserError(f"--perplexity: expected a text of at least 2 tokens, found {len(ids)}")
  windows, half = ([ids[i:i + window] for i in range(0, len(ids) - window + 1, window)], window // 2) if len(ids) >= window else ([ids], 0)
  nll, scored = 0.0, 0
  for part in tqdm(windows, desc="perplexity", leave=False, disable=not sys.stderr.isatty()):
    if tok.add_bos and tok.bos_id is not None: part = [tok.bos_id, *part[1:]]
    logits = model.logits(part)[half:-1].astype(np.float64)
    top = logits.max(-1, keepdims=True)
    log_z = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    nll += float((log_z - logits[np.arange(len(logits)), part[half + 1:]]).sum())
    scored += len(logits)
  return {"perplexity": math.exp(nll / scored), "nll": nll / scored, "tokens": scored, "windows": len(windows)}

def say(model:Model, pieces:Iterator[str]) -> str:
  """Prints an answer as it comes; Ctrl-C stops it. Returns what was printed."""
  said = ""
  try:
    for piece in pieces:
      print(piece, end="", flush=True)
      said += piece
  except KeyboardInterrupt: print(" [stopped]", end="")
  if model.generator.full: print(f" [the context of {model.generator.max_context} tokens is full]", end="")
  print(flush=True)
  return said

def converse(model:Model, count:int|None, sampling:Sampling, stops:tuple[str, ...]) -> None:
  print("Ctrl-C stops an answer, Ctrl-D leaves.")
  messages:list[dict[str, str]] = []
  while True:
    try: text = input("> ")
    except EOFError: return print()
    except KeyboardInterrupt:
      print()
      continue
    if not text.strip(): continue
    messages.append({"role": "user", "content": text})
    try: messages.append({"role": "assistant", "content": say(model, model.chat(messages, count, sampling, stops))})
    except ContextFull as e:
      messages.pop()
      print(f"{e}; start anew or raise --max_context")

# ---- the command line ----

class Parser(argparse.ArgumentParser):
  def error(self, message:str) -> Any: self.exit(2, f"{self.prog}: {message} (see --help)\n")

def whole(low:int) -> Callable[[str], int]:
  """The type of an option that takes a whole number of at least `low`"""
  def number(text:str) -> int:
    if (value := int(text)) < low: raise ValueError
    return value
  number.__name__ = f"whole number of at least {low}"
  return number

def parser() -> Parser:
  p = Parser(prog="llm.py", description="Run MLA and mixture-of-experts models from a GGUF file.", allow_abbrev=False)
  def add(name:str, **kw) -> None: p.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), **kw)
  add("model", default=str(BUILT_IN), metavar="NAME|PATH", help="a name of --list-models or a GGUF file (default: the built-in tiny model)")
  add("list_models", action="store_true", help="list the models known by name")
  add("max_context", type=whole(2), metavar="N", help=f"tokens the cache holds (default {DEFAULT_CONTEXT}, or what --benchmark needs)")
  add("prompt", metavar="TEXT", help="answer TEXT and leave")
  add("raw_prompt", nargs="?", const=True, metavar="TEXT", help="continue TEXT (or --prompt's) as it is, without the chat template")
  add("count", type=whole(1), metavar="N", help="at most N new tokens (default: until the model stops or the context is full)")
  defaults = Sampling()
  for name, kind, text in (("temperature", float, "0 is greedy"), ("top_k", int, "keep the k likeliest tokens, 0 all"),
                           ("top_p", float, "keep the likeliest tokens up to this probability"),
                           ("min_p", float, "keep tokens this likely, relative to the likeliest"),
                           ("repeat_penalty", float, "make tokens of the context less likely"), ("seed", int, "of the draws")):
    add(name, type=kind, default=getattr(defaults, name), metavar="X", help=f"{text} (default {getattr(defaults, name)})")
  add("stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT; may be given more than once")
  add("benchmark", nargs="?", type=whole(1), const=20, metavar="N", help="time the decoding of N tokens (default 20)")
  add("depth", type=whole(0), default=0, metavar="D", help="tokens in the cache before a benchmark's first")
  add("json", nargs="?", const="-", metavar="FILE", help="end with a JSON line of a benchmark's or a perplexity's figures, and keep it in FILE")
  add("perplexity", metavar="FILE", help="the perplexity of a text file")
  return p

def main(argv:list[str]|None=None) -> None:
  args = parser().parse_args(argv)
  if args.list_models:
    for name, (repo, file) in MODELS.items():
      print(f"{name:32s} {repo}/{file}{''.join(f'  = {a}' for a, target in ALIASES.items() if target == name)}")
    return
  sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.repeat_penalty, args.seed)
  prompt, raw = (args.raw_prompt, True) if isinstance(args.raw_prompt, str) else (args.prompt, bool(args.raw_prompt))
  if raw and prompt is None: raise UserError("--raw_prompt: expected a text, here or in --prompt")
  if args.benchmark and args.perplexity is not None: raise UserError("expected --benchmark or --perplexity, found both")
  if args.depth and not args.benchmark: raise UserError("--depth: expected --benchmark beside it")
  text, keep = None, None if args.json in (None, "-") else Path(args.json)
  if args.json and not args.benchmark and args.perplexity is None: raise UserError("--json: expected --benchmark or --perplexity beside it")
  if keep:
    try: keep.open("a").close()  # better before the work than after it
    except OSError as e: raise UserError(f"--json {keep}: {e.strerror}") from None
  if args.perplexity is not None:
    try: text = Path(args.perplexity).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e: raise UserError(f"--perplexity {args.perplexity}: {getattr(e, 'strerror', None) or e}") from None
  context = args.max_context or max(DEFAULT_CONTEXT, args.depth + (args.benchmark or 0) + 2)
  start = time.perf_counter()
  model = load(args.model, context, progress=sys.stderr.isatty())
  if args.max_context and args.max_context > model.generator.max_context:
    print(f"--max_context {args.max_context} is more than the model's own context: using {model.generator.max_context}", file=sys.stderr)
  Device[Device.DEFAULT].synchronize()
  load_seconds, result = time.perf_counter() - start, None
  if raw:
    tok = model.tokenizer
    ids = ([tok.bos_id] if tok.add_bos and tok.bos_id is not None else []) + tok.encode(prompt)
    pieces = model.complete(ids, args.count, sampling, tuple(args.stop))
    say(model, itertools.chain([prompt + next(pieces, "")], pieces))  # a prompt that does not fit is not printed
  elif prompt is not None: say(model, model.chat([{"role": "user", "content": prompt}], args.count, sampling, tuple(args.stop)))
  if args.benchmark: result = benchmark(model, args.model, args.benchmark, args.depth, load_seconds)
  elif text is not None:
    result = perplexity(model, text)
    print(f"perplexity {result['perplexity']:.4f} over {result['tokens']} tokens in {result['windows']} windows")
  elif prompt is None: converse(model, args.count, sampling, tuple(args.stop))
  if result is not None:
    print(line := json.dumps(result))
    if keep: keep.write_text(line + "\n")

def leave(message:str, code:int) -> None:
  print(message, file=sys.stderr)
  sys.exit(code)

if __name__ == "__main__":
  try:
    main()
    sys.stdout.flush()
  except BrokenPipeError:  # the reader has left, as head does; what Python still flushes at exit goes nowhere
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
  except GGUFError as e: leave(f"GGUFError: {e}", 2)
  except MemoryError as e: leave(f"error: out of memory{f': {e}' if str(e) else ''}; a smaller --max_context needs less", 2)
  except (UserError, ContextFull, ValueError) as e: leave(f"error: {e}", 2)
  except KeyboardInterrupt: sys.exit(130)

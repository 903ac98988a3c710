"""The command line: flags, and what each of them starts. `load` for Python is handed on from apps/models.py.

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

import argparse, itertools, json, os, time
from typing import Any, Callable
from tinygrad import Device
from tinygrad.apps.generate import ContextFull
from tinygrad.apps.gguf import GGUFError
from tinygrad.apps.measure import benchmark, perplexity
from tinygrad.apps.models import ALIASES, BUILT_IN, DEFAULT_CONTEXT, MODELS, Model, UserError, load
from tinygrad.apps.sampling import Sampling
from tinygrad.apps.terminal import converse, say

__all__ = ["Model", "UserError", "load", "main"]

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

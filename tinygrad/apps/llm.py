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
from tinygrad.apps.measure import OUTPUTS, Sweep, benchmark, check_plot, check_writable, counts, numbers, perplexity, table
from tinygrad.apps.models import ALIASES, BUILT_IN, DEFAULT_CONTEXT, MODELS, Model, UserError, load
from tinygrad.apps.sampling import Sampling
from tinygrad.apps.terminal import converse, say
from tinygrad.helpers import NUM_CPU_THREADS

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

TABLE = {"n_prompt": 512, "n_gen": 128}  # a table's tokens, where they are not given

def benchmark_flags(p:Parser, bench:bool) -> None:
  """What --benchmark takes. bench: whether it is among the arguments, and -p, -n, -d and -r are its lists, as llama-bench has them"""
  def add(name:str, short:str="", **kw) -> None:
    p.add_argument(*([short] if short and bench else []), *dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, **kw)
  add("benchmark", nargs="?", type=whole(1), const=0, metavar="N", help="time the decoding of N tokens, a line each (default 20); or with any of the "
      "next four, -o or --plot: a table as llama-bench prints it, where -p, -n, -d and -r are short for them")
  for (name, default), short, what in zip(TABLE.items(), ("-p", "-n"), ("prefills", "decodings")):
    add(name, short, metavar="LIST", help=f"a table's {what}: tokens of each (default {default}; 0: none)")
  add("depth", "-d", metavar="LIST", help="tokens in the cache before a benchmark's first (default 0); several: a table")
  add("repetitions", "-r", type=whole(1), metavar="R", help="runs of each row of a table, beside one to warm up (default 5)")
  p.add_argument("-o", "--output", choices=OUTPUTS, help="a table's form (default md); json alone makes --benchmark N end with a JSON line")
  add("plot", metavar="FILE", help="draw a table's tok/s over depth, with the ceiling, as .png or .svg (needs matplotlib)")
  p.add_argument("-t", "--threads", type=whole(1), metavar="N", help="threads of the CPU (default: its cores)")

def sweep_of(args:argparse.Namespace) -> Sweep|None:
  """The table that the flags ask for, if it is one. Raises UserError."""
  given = [f"--{name}" for name in ("n_prompt", "n_gen", "depth", "repetitions", "output", "plot") if getattr(args, name) is not None]
  if args.benchmark is None:
    if given: raise UserError(f"{given[0]}: expected --benchmark beside it")
    return None
  if args.output == "csv" and args.json == "-": raise UserError("--json: expected a FILE beside --output csv")
  depths = numbers("--depth", "0" if args.depth is None else args.depth, 0)
  plain = {"--depth"} if len(depths) == 1 else set()
  if args.output == "json" and args.benchmark: plain.add("--output")
  if not (more := [flag for flag in given if flag not in plain]): return None
  if args.benchmark: raise UserError(f"--benchmark {args.benchmark}: expected no number beside {more[0]}: --n_gen has a table's")
  if args.plot is not None: check_plot(Path(args.plot))
  prompts, gens = (counts(f"--{name}", str(default) if (text := getattr(args, name)) is None else text) for name, default in TABLE.items())
  return Sweep(prompts, gens, depths, args.repetitions or 5)

def parser(bench:bool=False) -> Parser:
  """bench: as for benchmark_flags"""
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
  benchmark_flags(p, bench)
  add("json", nargs="?", const="-", metavar="FILE", help="end with a JSON line of a benchmark's or a perplexity's figures, and keep it in FILE")
  add("perplexity", metavar="FILE", help="the perplexity of a text file")
  return p

def main(argv:list[str]|None=None) -> None:
  argv = sys.argv[1:] if argv is None else argv
  args = parser(any(a.split("=")[0] == "--benchmark" for a in argv)).parse_args(argv)
  if args.list_models:
    for name, (repo, file) in MODELS.items():
      print(f"{name:32s} {repo}/{file}{''.join(f'  = {a}' for a, target in ALIASES.items() if target == name)}")
    return
  sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.repeat_penalty, args.seed)
  prompt, raw = (args.raw_prompt, True) if isinstance(args.raw_prompt, str) else (args.prompt, bool(args.raw_prompt))
  if raw and prompt is None: raise UserError("--raw_prompt: expected a text, here or in --prompt")
  sweep, benched = sweep_of(args), args.benchmark is not None
  if benched and args.perplexity is not None: raise UserError("expected --benchmark or --perplexity, found both")
  if args.threads: NUM_CPU_THREADS.value = args.threads
  text, keep = None, None if args.json in (None, "-") else Path(args.json)
  if args.json and not benched and args.perplexity is None: raise UserError("--json: expected --benchmark or --perplexity beside it")
  if keep: check_writable("--json", keep)  # better before the work than after it
  if args.perplexity is not None:
    try: text = Path(args.perplexity).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e: raise UserError(f"--perplexity {args.perplexity}: {getattr(e, 'strerror', None) or e}") from None
  tokens, depth = args.benchmark or 20, int(args.depth or 0) if sweep is None else 0
  context = args.max_context or max(DEFAULT_CONTEXT, sweep.room if sweep else depth + tokens + 2)
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
  if sweep: result = table(model, args.model, sweep, args.output or "md", Path(args.plot) if args.plot else None)
  elif benched: result = benchmark(model, args.model, tokens, depth, load_seconds)
  elif text is not None:
    result = perplexity(model, text)
    print(f"perplexity {result['perplexity']:.4f} over {result['tokens']} tokens in {result['windows']} windows")
  elif prompt is None: converse(model, args.count, sampling, tuple(args.stop))
  if result is not None:
    line = json.dumps(result)
    if args.output == "json" or (args.json and args.output != "csv"): print(line)
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

"""The command line: its flags, whether they fit together, and what they start. Flags are declared here alone.

A prompt and a conversation are terminal.py's, figures measure.py's, the server serve/server.py's, files and names models.py's, whose `load` is public
here too. The model itself begins at mla.py. The wheel's own `tinygrad.llm` is another program, which the fork does not use.

  python tinygrad/apps/llm.py --model glm-4.7:flash --prompt "What is a list?"
  python tinygrad/apps/llm.py --model models/tiny-glm-Q4_0.gguf --benchmark 20
  python tinygrad/apps/llm.py --model glm-4.7:flash --serve
  from tinygrad.apps.llm import load
"""
from __future__ import annotations
import os, signal, sys
from pathlib import Path
ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
  # Ctrl-C while modules are loaded; a background job has it ignored
  if signal.getsignal(signal.SIGINT) != signal.SIG_IGN: signal.signal(signal.SIGINT, lambda *_: os._exit(130))
  for fd in range(3):
    try: os.fstat(fd)
    except OSError: os.open(os.devnull, os.O_RDWR)  # else the next file that is opened would stand in for a closed stream
  # as a script, Python puts this folder first on sys.path; imports start from the clone's root
  sys.path[0] = str(ROOT)
  try: import tinygrad
  except ImportError as e: sys.exit(str(e))
  if not hasattr(tinygrad, "OVERLAY"):
    sys.exit(f"this is the fork's command line, but `import tinygrad` found {tinygrad.__file__}: expected {ROOT / 'tinygrad'}")

import argparse, dataclasses, json, math, re, time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable
from tinygrad.apps.engine.engine import MAX_STALL, ContextFull, DeviceFailed
from tinygrad.apps.gguf import GGUFError
from tinygrad.apps.models import (ALIASES, BUILT_IN, DEFAULT_CONTEXT, MODELS, SHARDS, Answer, Model, UserError, find_model, load, local_file,
                                  out_of_memory)
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.engine.speculate import MAX_DRAFTS
from tinygrad.apps.screen import doing, lossy, note, safe_line
from tinygrad.apps.serve import wire
from tinygrad.apps.serve.settings import HOST, PORT, Settings
from tinygrad.apps.terminal import Options, chat_loop, chosen_seed, print_stream, read_text
from tinygrad.helpers import NUM_CPU_THREADS
if TYPE_CHECKING: from tinygrad.apps.measure import Sweep, Together

__all__ = ["Model", "UserError", "load", "main"]

MAX_TEXT = 1 << 26  # bytes that --perplexity reads
TOKENS = 20         # that --benchmark decodes where it is not told
DEMO = "tiny-glm, a tiny demonstration that has read Python's own manual and knows nothing else (--list-models names real models)"

class Parser(argparse.ArgumentParser):
  """An error is one line on stderr, exit code 2"""
  def error(self, message:str) -> Any: self.exit(2, f"{self.prog}: {safe_line(message)} (see --help)\n")

def int_at_least(low:int, *others:int) -> Callable[[str], int]:
  """The argparse type of an option that takes a whole number of at least `low`, or one of the `others`"""
  def number(text:str) -> int:
    try:
      if (value := int(text)) >= low or value in others: return value
    except ValueError: pass
    raise argparse.ArgumentTypeError(f"expected a whole number of at least {low}{''.join(f', or {o}' for o in others)}, found {text[:40]!r}")
  return number

def milliseconds(text:str) -> float:
  """The argparse type of a time: seconds"""
  try:
    if 0 < (value := float(text)) < math.inf: return value / 1e3
  except ValueError: pass
  raise argparse.ArgumentTypeError(f"expected milliseconds, more than 0, found {text[:40]!r}")

def share(text:str) -> float:
  """The argparse type of a part of a whole"""
  try:
    if 0 <= (value := float(text)) <= 1: return value
  except ValueError: pass
  raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, found {text[:40]!r}")

def address(text:str) -> tuple[str, int]:
  """The argparse type of HOST:PORT, of which either may be left out; a host that has colons stands in brackets"""
  if found := re.fullmatch(r"(\d+)|(?:\[([^][]+)\]|([^][:]*))(?::(\d+))?", text):
    port = int(found[1] or found[4] or PORT)
    if port < 1 << 16: return found[2] or found[3] or HOST, port
  raise argparse.ArgumentTypeError(f"expected HOST:PORT, as {HOST}:{PORT}, found {text[:40]!r}")

# flags that --benchmark alone takes; any of them makes it a table, except --depth with one number, and -o json beside --benchmark N
TABLE = ("parallel", "arriving", "accepted", "n_prompt", "n_gen", "depth", "repetitions", "output", "plot")

def benchmark_flags(p:Parser, bench:bool) -> None:
  """Adds --benchmark and the flags that it takes; bench: as for parser"""
  def add(name:str, short:str="", **kw) -> None:
    p.add_argument(*([short] if short and bench else []), *dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, **kw)
  add("benchmark", nargs="?", type=int_at_least(1), const=0, metavar="N",
      help=f"time the decoding of N tokens, a line each (default {TOKENS}); with any of the next four, -o or --plot: a table as llama-bench prints "
           "it. -p, -n, -d and -r are then short for the four")
  add("parallel", metavar="LIST", help="a table of so many sequences decoded at once, by --benchmark N tokens each (default 64) after a prompt of -p "
      "(default 128) or --depth tokens, which are timed apart; drawn at temperature 1, or as --temperature, --top_p and the like say")
  add("arriving", type=int_at_least(2), metavar="N", help="with --parallel: how long each waits from token to token while a prompt of N tokens is "
      "read, and how fast that is, beside both without the other")
  add("accepted", type=share, metavar="X", help="with --draft_ngram, --draft_mtp or --draft: such a share of drafts counts as right, 0 to 1, "
      "whatever they are. The table is of what drafts as good as that would save, and the tokens are no text")
  add("n_prompt", "-p", metavar="LIST", help="a table's prefills: tokens of each (default 512; 0: none)")
  add("n_gen", "-n", metavar="LIST", help="a table's decodings: tokens of each (default 128; 0: none)")
  add("depth", "-d", metavar="LIST", help="tokens in the cache before a benchmark's first (default 0); several: a table")
  add("repetitions", "-r", type=int_at_least(1), metavar="R", help="runs of each row of a table, and one to warm up (default 5; with --parallel 3)")
  p.add_argument("-o", "--output", choices=("md", "csv", "json"), help="a table's form (default md); json ends --benchmark N with a JSON line")
  add("plot", metavar="FILE", help="draw a table's tok/s over depth, or over sequences, with the ceiling, as .png or .svg (needs matplotlib)")

# flags that --serve alone takes, and those that it has no use for
SERVING = ("api_key", "api_key_file", "alias", "cors_origin", "max_queued", "max_queued_tokens", "max_tokens", "max_tokens_cap", "max_body",
           "drain_seconds", "ssl_certfile", "ssl_keyfile", "log_prompts")
NOT_SERVING = ("prompt", "file", "raw_prompt", "special", "system", "no_think", "hide_think", "count", "seed", "stop", "stats", "benchmark", *TABLE,
               "json", "perplexity")
API_KEY = "LLM_API_KEY"  # an environment variable

def serve_flags(p:Parser) -> None:
  """Adds --serve and the flags that it takes. What is not given is None or False: Settings has the defaults."""
  def add(name:str, **kw) -> None: p.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, **kw)
  default = Settings(BUILT_IN)
  add("serve", nargs="?", type=address, const=(HOST, PORT), metavar="HOST:PORT",
      help=f"answer HTTP clients (default {HOST}:{PORT}) until Ctrl-C: OpenAI's and Anthropic's ways of asking, and a web page to chat. Sampling "
           "flags are then what requests that say nothing get")
  add("api_key", action="append", default=[], metavar="KEY", help=f"clients have to give KEY, or one of several; the variable {API_KEY} has another")
  add("api_key_file", metavar="FILE", help="… or one of FILE's, which has one a line")
  add("alias", metavar="NAME", help="what clients call the model (default: the name that its file has)")
  add("cors_origin", action="append", default=[], metavar="ORIGIN", help="pages of ORIGIN, as https://example.org, may ask; * is all")
  add("max_queued", type=int_at_least(1), metavar="N", help=f"requests that may wait for their first token (default {default.max_queued})")
  add("max_queued_tokens", type=int_at_least(1), metavar="N", help="… and tokens of their prompts (default: four times what the cache holds)")
  add("max_tokens", type=int_at_least(1), metavar="N", help="tokens of an answer whose request does not say (default: the room in the context)")
  add("max_tokens_cap", type=int_at_least(1), metavar="N", help="tokens of an answer, whatever its request says")
  add("max_body", type=int_at_least(1), metavar="MB", help=f"of a request (default {default.max_body >> 20})")
  add("drain_seconds", type=int_at_least(0), metavar="S",
      help=f"that answers have to end in after Ctrl-C or SIGTERM (default {default.drain_seconds}); a second one ends them at once")
  add("ssl_certfile", metavar="FILE", help="a certificate, PEM: HTTPS in place of HTTP")
  add("ssl_keyfile", metavar="FILE", help="… and its key")
  add("log_prompts", action="store_true", help="the log shows what is asked")

def parser(bench:bool=False) -> Parser:
  """The flags. bench: whether --benchmark is among the arguments: -p, -n, -d and -r are then its lists, as llama-bench has them; else they are what
  llama-cli has."""
  p = Parser(prog="llm.py", description="Run MLA and mixture-of-experts models from a GGUF file.", allow_abbrev=False)
  def add(name:str, *short:str, **kw) -> None:
    p.add_argument(*(s for s in short if not (bench and s in ("-p", "-n", "-d", "-r"))),
                   *dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, **kw)
  add("model", "-m", default=str(BUILT_IN), metavar="NAME|PATH", help="a name of --list-models or a GGUF file (default: the built-in tiny model)")
  add("list_models", action="store_true", help="list the models known by name, their sizes, and which are on this machine")
  add("max_context", "-c", type=int_at_least(2, 0), metavar="N",
      help=f"tokens the cache holds (default {DEFAULT_CONTEXT}, or what --benchmark needs; 0: all that the model can)")
  add("cache_tokens", type=int_at_least(2), metavar="N", help="tokens the cache holds of all sequences together (default: what fits beside the "
      "weights, at most 16 contexts, 4 on a CPU)")
  add("cache_bits", type=int, choices=(8, 16), default=16, help="bits of a number of the cache: 8 hold nearly twice as many tokens (default 16; on a "
      "CPU that is 32)")
  add("devices", type=int_at_least(1), default=1, metavar="N", help="share the model's blocks out among N devices, one after another, each with its "
      "part of the cache: room for larger models and more tokens, at one device's speed (default 1)")
  add("shard", choices=SHARDS, default=SHARDS[0], help="how a model lies on several devices: by layers, or by tensors: each block is cut over all "
      "devices, which work at once, and each has the whole cache (default layers)")
  add("cpu_experts", "-ncmoe", type=int_at_least(0), default=0, metavar="N", help="leave the experts of the first N blocks that have some in the "
      "CPU's memory, and compute them there: what a card has no room for; the shared expert stays. In each of them a step waits for a copy to the "
      "CPU and back, and reads the chosen experts at the speed of the CPU's memory; for long prompts they are copied to the card, block by block")
  add("prompt", "-p", metavar="TEXT", help="answer TEXT and leave")
  add("file", "-f", metavar="FILE", help="answer the text of FILE and leave; - is stdin")
  add("raw_prompt", nargs="?", const=True, metavar="TEXT", help="continue TEXT (or --prompt's, or --file's) as it is, without the chat template")
  add("special", "-sp", action="store_true", help="names of special tokens in a raw prompt stand for the tokens")
  add("system", "-sys", default="", metavar="TEXT", help="the system's message")
  add("no_think", action="store_true", help="ask the model to answer without reasoning first")
  add("hide_think", action="store_true", help="do not print the reasoning")
  add("count", "-n", type=int_at_least(1, -1), metavar="N",
      help="at most N new tokens (default, and -1: until the model stops or the context is full)")
  for name, short, kind, text in (("temperature", "--temp", float, "0 is greedy"), ("top_k", None, int, "keep the k likeliest tokens, 0 all"),
                                  ("top_p", None, float, "keep the likeliest tokens up to this probability"),
                                  ("min_p", None, float, "keep tokens this likely, relative to the likeliest"),
                                  ("repeat_penalty", None, float, "make tokens of the context less likely")):
    add(name, *([short] if short else []), type=kind, metavar="X", help=f"{text} (default: what the model's makers advise)")
  add("seed", "-s", type=int, metavar="N", help="of the draws (default, and -1: a random one, which --stats shows)")
  add("stop", "-r", action="append", default=[], metavar="TEXT", help="end the answer before TEXT; may be given more than once")
  add("stats", action="store_true", default=None, help="figures after each answer, and how it was drawn (on a terminal figures alone are shown)")
  add("max_stall_ms", type=milliseconds, default=MAX_STALL, metavar="MS", help="how long answers may wait from token to token while another's prompt "
      f"is read (default {MAX_STALL * 1e3:.0f}); a prompt is read the faster the more it is")
  add("draft_ngram", type=int, choices=range(MAX_DRAFTS + 1), default=0, metavar="N", help=f"guess the next N tokens, up to {MAX_DRAFTS}, where an "
      "answer repeats what it or its prompt said before, and verify them in one step: the same answers, sooner where they copy (default 0: none)")
  add("draft_mtp", nargs="?", type=int, choices=range(1, MAX_DRAFTS + 1), const=1, metavar="N", help="guess N tokens (1 where it is not said) by the "
      "block for the next but one that the model's file has (MTP), and verify them in one step: the same answers, sooner where guesses are right")
  add("draft", metavar="FILE", help="… by the block that FILE has for this model")
  add("batch_invariant", action="store_true", help="decode each token with the numbers that it would have alone, whatever is decoded beside it and "
      "however many drafts are verified: on NVIDIA's cards steps of three tokens and more take longer so; on a CPU it is so anyway")
  add("warm", action="store_true", help="record and compile at the start what any number of answers and any length of a prompt will need, instead of "
      "when it is first needed, while all wait; with --serve what logprobs and grammars need, too")
  benchmark_flags(p, bench)
  serve_flags(p)
  add("threads", "-t", type=int_at_least(1), metavar="N", help="threads of the CPU (default: its cores)")
  add("json", nargs="?", const="-", metavar="FILE", help="end with a JSON line of a benchmark's or a perplexity's figures, and keep it in FILE")
  add("perplexity", metavar="FILE", help="the perplexity of a text file")
  return p

def list_models() -> None:
  """Prints a line for each model known by name: its size, where it comes from, where it is on this machine"""
  for name, (repo, file, gb) in MODELS.items():
    path, aliases = local_file(name), "".join(f"  = {a}" for a, target in ALIASES.items() if target == name)
    size, where = (path.stat().st_size / 1e9, safe_line(str(path))) if path else (gb, "not here")
    print(f"{name:30s} {size:5.1f} GB  {repo}/{file}  {where}{aliases}")
  print(f"{'(none given)':30s} {BUILT_IN.stat().st_size / 1e9:5.3f} GB  {DEMO.partition(',')[0]}  {BUILT_IN}")

def prompt_of(args:argparse.Namespace) -> tuple[str|None, bool]:
  """(the text to answer, or None where no flag gives one; whether to continue it as it is). Raises UserError."""
  raw, texts = args.raw_prompt is not None, {"--prompt": args.prompt, "--file": args.file}
  if isinstance(args.raw_prompt, str): texts["--raw_prompt"] = args.raw_prompt
  given = [name for name, text in texts.items() if text is not None]
  if len(given) > 1: raise UserError(f"expected one prompt, found {' and '.join(given)}")
  if raw and not given: raise UserError("--raw_prompt: expected a text, here or in --prompt or --file")
  if args.special and not raw: raise UserError("--special: expected --raw_prompt beside it")
  if raw and args.system: raise UserError("--system: expected no --raw_prompt beside it")
  # an editor ends a file with a line feed that nobody means
  if args.file is not None: return read_text("--file", args.file).removesuffix("\n"), raw
  return (texts[given[0]] if given else None), raw

@dataclass
class Work:
  """What the flags ask for, once they are found to fit together"""
  sampling: dict[str, Any]   # Sampling's fields that flags set
  benched: bool
  sweep: Sweep|Together|None  # of a table; None with benched: decode N tokens, a line each
  text: str|None             # whose perplexity is asked for
  prompt: str|None           # what is to be answered
  raw: bool                  # … as it is, without the chat template
  json_file: Path|None       # where the JSON line is kept
  @property
  def chat(self) -> bool: return self.prompt is None and not self.benched and self.text is None

def given(args:argparse.Namespace, names:tuple[str, ...]) -> list[str]:
  """Which of these flags have another value than none at all would have given them"""
  defaults = parser().parse_args([])
  return [name for name in names if getattr(args, name) != getattr(defaults, name)]

def sampling_of(args:argparse.Namespace) -> dict[str, Any]:
  """Sampling's fields that flags set, but for the seed. Raises ValueError."""
  sampling = {f.name: v for f in dataclasses.fields(Sampling) if f.name != "seed" and (v := getattr(args, f.name, None)) is not None}
  Sampling(**sampling)
  return sampling

def work_of(args:argparse.Namespace) -> Work:
  """Checks the flags together, before a model is loaded. Raises UserError, ValueError."""
  sampling = sampling_of(args) | {"seed": chosen_seed(args.seed)}
  if of_server := given(args, SERVING): raise UserError(f"--{of_server[0]}: expected --serve beside it")
  if "" in args.stop: raise UserError("--stop: expected a text, found none")
  benched, of_table, sweep = args.benchmark is not None, [name for name in TABLE if getattr(args, name) is not None], None
  if benched and args.perplexity is not None: raise UserError("expected --benchmark or --perplexity, found both")
  if of_table and not benched: raise UserError(f"--{of_table[0]}: expected --benchmark beside it")
  if benched:
    from tinygrad.apps.measure import sweep_of
    sweep = sweep_of(args, of_table, sampling_of(args))
  text, json_file = None, None if args.json in (None, "-") else Path(args.json)
  if args.json and not benched and args.perplexity is None: raise UserError("--json: expected --benchmark or --perplexity beside it")
  if json_file:
    try: json_file.open("a").close()  # better before the work than after it
    except OSError as e: raise UserError(f"--json {json_file}: {e.strerror}") from None
  if args.perplexity is not None: text = read_text("--perplexity", args.perplexity, MAX_TEXT, regular=True)
  work = Work(sampling, benched, sweep, text, *prompt_of(args), json_file)
  if work.chat and sys.stdin is None: raise UserError("stdin is closed: expected a conversation on it, or --prompt or --file")
  return work

def drafts_of(args:argparse.Namespace, model:str) -> tuple[int, str|None]:
  """How many tokens are drafted, and the file whose MTP block does it, if one is to. Raises UserError."""
  if args.draft is None and args.draft_mtp is None: return args.draft_ngram, None
  if args.draft_ngram: raise UserError(f"--draft_ngram {args.draft_ngram}: expected no --draft{'_mtp' if args.draft is None else ''} beside it")
  return args.draft_mtp or 1, model if args.draft is None else args.draft

def api_keys(args:argparse.Namespace) -> frozenset[str]:
  """Those of --api-key, --api-key-file and the environment. Raises UserError."""
  keys = [("--api_key", key) for key in args.api_key]
  if API_KEY in os.environ: keys.append((API_KEY, os.environ[API_KEY]))
  if args.api_key_file is not None:
    lines = [line for line in read_text("--api_key_file", args.api_key_file).split("\n") if line.strip()]
    if not lines: raise UserError(f"--api_key_file {args.api_key_file}: expected a key, found none")
    keys += [(f"--api_key_file {args.api_key_file}", line) for line in lines]
  for where, key in keys:
    if not re.fullmatch("[!-~]+", key.strip()): raise UserError(f"{where}: expected a key of ASCII letters, digits and signs")
  return frozenset(key.strip() for _, key in keys)

def settings_of(args:argparse.Namespace) -> tuple[Settings, wire.Load]:
  """Checks --serve's flags together, before anything is started. Raises UserError, ValueError."""
  if wrong := given(args, NOT_SERVING): raise UserError(f"--{wrong[0]}: expected no --serve beside it")
  if (args.ssl_certfile is None) != (args.ssl_keyfile is None): raise UserError("expected --ssl_certfile and --ssl_keyfile, found one of them")
  if args.max_tokens_cap and (args.max_tokens or 0) > args.max_tokens_cap:
    raise UserError(f"--max_tokens {args.max_tokens} is more than --max_tokens_cap {args.max_tokens_cap}")
  for origin in args.cors_origin:
    if not re.fullmatch(r"\*|https?://[^/\s]+", origin): raise UserError(f"--cors_origin {origin}: expected * or an origin, as https://example.org")
  sampling = sampling_of(args)
  host, port = args.serve
  own = {name: getattr(args, name) for name in ("alias", "max_queued", "max_queued_tokens", "max_tokens_cap", "drain_seconds", "log_prompts")}
  own |= dict(default_max_tokens=args.max_tokens, max_body=args.max_body and args.max_body << 20,
              ssl_certfile=args.ssl_certfile and Path(args.ssl_certfile), ssl_keyfile=args.ssl_keyfile and Path(args.ssl_keyfile))
  settings = Settings(find_model(args.model), host=host, port=port, api_keys=api_keys(args), cors_origins=tuple(args.cors_origin),
                      sampling=sampling, **{name: value for name, value in own.items() if value is not None})
  context = sys.maxsize if args.max_context == 0 else args.max_context
  return settings, wire.Load(str(settings.model), context, args.cache_tokens, args.max_stall_ms, args.warm, sampling, args.threads,
                             args.cache_bits, *drafts_of(args, str(settings.model)), args.devices, args.cpu_experts, args.shard, args.batch_invariant)

def serve(args:argparse.Namespace) -> int:
  """The server, until it ends. Returns the exit code. Raises UserError, ValueError."""
  settings, load_order = settings_of(args)
  from tinygrad.apps.serve import server
  try: return server.serve(settings, load_order)
  except server.ServeError as e: raise UserError(str(e)) from None

def answer_prompt(model:Model, args:argparse.Namespace, prompt:str, raw:bool, options:Options) -> bool:
  """Prints the answer to one prompt. Returns whether the person stopped it. Raises ContextFull, GGUFError, ValueError."""
  tok = model.tokenizer
  if raw: ids = tok.with_bos(tok.encode(prompt, special=args.special))
  else:
    system = [{"role": "system", "content": args.system}] if args.system else []
    ids = model.render([*system, {"role": "user", "content": prompt}], **options.template)
  answer = Answer(model, ids, options.count, options.sampling, options.stops)
  return print_stream(answer, options, prompt if raw else None).stopped

def measured(model:Model, args:argparse.Namespace, work:Work, load_seconds:float) -> Any:
  """Runs --benchmark or --perplexity. Returns the figures of its JSON line. Raises UserError."""
  from tinygrad.apps import measure
  if work.sweep: return measure.tabulate(model, args, work.sweep)
  if work.benched: return measure.benchmark(model, args.model, args.benchmark or TOKENS, int(args.depth or 0), load_seconds)
  result = measure.perplexity(model, work.text)
  print(f"perplexity {result['perplexity']:.4f} over {result['tokens']} tokens in {result['windows']} windows")
  return result

def warm(model:Model, sampling:Sampling) -> None:
  """Records all that answers drawn so will need, and says how long that took"""
  doing("recording and compiling what any number of answers and any length of a prompt need")
  start = time.perf_counter()
  model.engine.warm(sampling)
  sizes = ", ".join(map(str, model.engine.runner.sizes))
  note(f"steps of 1 to {model.engine.scheduler.max_rows} answers and chunks of {sizes} tokens recorded in {time.perf_counter() - start:.1f} s")

def main(argv:list[str]|None=None) -> int|None:
  """Parses the flags, loads the model, and answers, converses or measures. Returns the exit code where it is not 0. Raises UserError, GGUFError,
  ContextFull, ValueError, MemoryError, DeviceFailed."""
  argv = sys.argv[1:] if argv is None else argv
  args = parser(any(a.split("=")[0] == "--benchmark" for a in argv)).parse_args(argv)
  if args.list_models: return list_models()
  if args.serve is not None: return serve(args)
  work = work_of(args)
  if args.threads: NUM_CPU_THREADS.value = args.threads
  room = work.sweep.room if work.sweep else int(args.depth or 0) + (args.benchmark or TOKENS) + 3   # measure.py's BESIDE
  context = sys.maxsize if args.max_context == 0 else args.max_context or max(DEFAULT_CONTEXT, room)
  start = time.perf_counter()
  doing(f"opening {args.model}")
  model = load(args.model, context, sys.stderr.isatty(), args.cache_tokens or getattr(work.sweep, "cache_tokens", None), args.max_stall_ms,
               args.cache_bits, *drafts_of(args, args.model), args.devices, args.cpu_experts, args.shard, args.batch_invariant)
  if args.max_context and args.max_context > model.engine.max_context:
    note(f"--max_context {args.max_context} is more than the model's own context: using {model.engine.max_context}")
  model.engine.wait()
  load_seconds = time.perf_counter() - start
  options = Options(dataclasses.replace(model.sampling, **work.sampling), None if args.count == -1 else args.count, tuple(args.stop),
                    False if args.no_think else None, args.hide_think, args.stats)
  if args.warm: warm(model, getattr(work.sweep, "sampling", Sampling()) if work.benched else options.sampling)
  demo = DEMO if args.model == str(BUILT_IN) else ""
  if work.chat: return chat_loop(model, options, args.system, demo)
  if work.prompt is not None:
    if demo and sys.stderr.isatty(): note(f"[{demo}]")
    if answer_prompt(model, args, work.prompt, work.raw, options): return 130
  if work.benched or work.text is not None:
    line = json.dumps(measured(model, args, work, load_seconds))
    if args.output == "json" or (args.json and args.output != "csv"): print(line)
    if work.json_file: work.json_file.write_text(line + "\n")

def die(message:str, code:int) -> None:
  """Ends the process with the exit code, after one line on stderr unless the message is empty"""
  try: doing("")
  finally:
    if message: print(safe_line(message), file=sys.stderr)
    sys.exit(code)

def run() -> None:
  """main as a process: every failure is one line on stderr and an exit code (2 the user's or the file's, 130 Ctrl-C, 1 stdout's or a device's)"""
  if signal.getsignal(signal.SIGINT) != signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)
  if sys.stderr is None: sys.stderr = open(os.devnull, "w")
  if sys.stdout is None: die("error: stdout is closed: there is nowhere to write an answer", 2)
  lossy(sys.stdout)
  if sys.stdin is not None: sys.stdin.reconfigure(errors="surrogateescape")  # the vocabulary has a token for every byte
  try:
    code = main()
    sys.stdout.flush()
    sys.exit(code)
  except GGUFError as e: die(f"GGUFError: {e}", 2)
  except MemoryError as e: die(f"error: {out_of_memory(e)}", 2)
  except RuntimeError as e:
    if type(e) not in (RuntimeError, DeviceFailed): raise   # those are what drivers raise
    sys.unraisablehook = lambda _: None   # what is given back to a device that does nothing any more raises
    die(f"error: {e}", 1)
  except (UserError, ContextFull, ValueError) as e: die(f"error: {e}", 2)
  except KeyboardInterrupt: die("", 130)
  except OSError as e:
    if e.filename is not None: die(f"error: {e.filename}: {e.strerror}", 2)
    # what has no name is stdout, full or without a reader (as head leaves): what Python still flushes at exit goes nowhere
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    die("" if isinstance(e, BrokenPipeError) else f"error: stdout: {e.strerror or e}", 1)

if __name__ == "__main__": run()

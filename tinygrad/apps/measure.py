"""The measurements of the command line: --benchmark for a model's speed, --perplexity for the likelihood of a text.

--benchmark N decodes N tokens, a line each. With lists it is a table: rows of prefill (pp) and of decoding (tg) at depths, each several times,
named and averaged as llama-bench does. A row's first run, which compiles, is not counted. Figures stand beside the memory's ceiling (machine.py). The
model is run by its engine, as an answer is; kernels by themselves are timed by bench_block.py and profile_model.py.
"""
from __future__ import annotations
import argparse, contextlib, csv, importlib.util, math, statistics, sys, time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Callable, Iterator
import numpy as np
from tqdm import tqdm
from tinygrad import Device, GlobalCounters
from tinygrad.apps.engine.batch import ROWS
from tinygrad.apps.engine.engine import Engine
from tinygrad.apps.engine.pipeline import parts_of
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.engine.sequence import Request, Sequence, State
from tinygrad.apps.machine import Others, cores, device_name, peak_bandwidth
from tinygrad.apps.mla import Transformer
from tinygrad.apps.models import Model, UserError
from tinygrad.nn.step import PAGE

PERPLEXITY_WINDOW = 512
BESIDE = 3   # tokens of a benchmark that are not timed: the first, one to warm up, one that is under way when the last is there
PLOTS = (".png", ".svg")

def numbers(flag:str, text:str, low:int) -> list[int]:
  """The whole numbers of a list as "0,4096", each once. Raises UserError."""
  try: values = [int(number) for number in text.split(",")]
  except ValueError: values = []
  if not values or min(values) < low:
    raise UserError(f"{flag}: expected whole numbers of at least {low} with commas between them, found {text[:40]!r}")
  return list(dict.fromkeys(values))

def counts(flag:str, text:str) -> list[int]:
  """The same of at least 1. A lone 0 is an empty list, as with llama-bench: no rows of that kind"""
  return [] if text.strip() == "0" else numbers(flag, text, 1)

def check_plot(path:Path) -> None:
  """Raises UserError where no plot can be drawn to this file, before the work instead of after it"""
  if path.suffix.lower() not in PLOTS: raise UserError(f"--plot {path}: expected a name that ends in {' or '.join(PLOTS)}")
  if importlib.util.find_spec("matplotlib") is None:
    raise UserError(f"--plot {path}: needs matplotlib, which is not installed: {sys.executable} -m pip install matplotlib")
  try: path.open("a").close()
  except OSError as e: raise UserError(f"--plot {path}: {e.strerror}") from None

@dataclass(frozen=True)
class Sweep:
  """The rows of a table: at each depth a prefill of each of `prompts` tokens, and a decoding of each of `gens` tokens"""
  prompts:list[int]
  gens:list[int]
  depths:list[int]
  repetitions:int
  def __post_init__(self) -> None:
    if not self.prompts and not self.gens: raise UserError("-p 0 and -n 0: expected a count of tokens for one of them")
  @property
  def deepest(self) -> int: return max(self.depths)
  @property
  def most(self) -> int: return max(self.prompts + self.gens)
  @property
  def room(self) -> int:
    """Tokens that the cache must hold: beside those measured, one for an answer and one that is decoded before the others"""
    return self.deepest + self.most + 2

# of many at once: the likeliest tokens of a model of random weights are soon the same for all sequences, and so are their experts
DRAWN = {"temperature": 1.0}
WARM = 2   # tokens of a sequence before those that are timed

@dataclass(frozen=True)
class Together:
  """The rows of a table: so many sequences at once, each of `gen` tokens, drawn by `sampling`, after `prompt` others"""
  sequences:list[int]
  prompt:int
  gen:int
  repetitions:int
  sampling:Sampling
  @property
  def room(self) -> int:
    """Tokens of a sequence: beside those measured, what warms up, and what is under way when the last is there"""
    return self.prompt + WARM + self.gen + 3
  @property
  def cache_tokens(self) -> int:
    """… of all of them, in whole pages, and one more each: who joins leaves one to each that runs"""
    return max(self.sequences) * (-(-self.room // PAGE) + 1) * PAGE

@dataclass(frozen=True)
class Arriving(Together):
  """The same, while a prompt of `arriving` tokens is read"""
  arriving:int
  @property
  def answer_room(self) -> int:
    """… what an answer says while the prompt is read, by a guess that is checked in the end"""
    return super().room + self.arriving // 16 + 128
  @property
  def room(self) -> int: return max(self.answer_room, self.arriving + 2)
  @property
  def cache_tokens(self) -> int: return (max(self.sequences) * (-(-self.answer_room // PAGE) + 1) + -(-self.arriving // PAGE) + 1) * PAGE

def together_of(args:argparse.Namespace, sampling:dict[str, Any]) -> Together:
  """The table of --parallel. sampling: as for sweep_of. Raises UserError."""
  sequences = numbers("--parallel", args.parallel, 1)
  if max(sequences) > ROWS[-1]: raise UserError(f"--parallel: expected at most {ROWS[-1]} sequences, found {max(sequences)}")
  if args.n_gen is not None: raise UserError("--n_gen: expected no --parallel beside it: --benchmark N has its tokens")
  if args.depth is not None and args.n_prompt is not None: raise UserError("--parallel: expected --depth or --n_prompt, found both")
  flag, text = ("--depth", args.depth) if args.depth is not None else ("--n_prompt", args.n_prompt or "128")
  if len(prompts := numbers(flag, text, 1)) > 1: raise UserError(f"{flag}: expected one number beside --parallel, found {len(prompts)}")
  if args.arriving is not None:
    if args.plot is not None: raise UserError("--plot: expected no --arriving beside it")
    if max(sequences) == ROWS[-1]: raise UserError(f"--parallel: expected at most {ROWS[-1] - 1} sequences beside --arriving, found {max(sequences)}")
    return Arriving(sequences, prompts[0], args.benchmark or 64, args.repetitions or 3, Sampling(**DRAWN | sampling), args.arriving)
  if args.plot is not None: check_plot(Path(args.plot))
  return Together(sequences, prompts[0], args.benchmark or 64, args.repetitions or 3, Sampling(**DRAWN | sampling))

def sweep_of(args:argparse.Namespace, given:list[str], sampling:dict[str, Any]) -> Sweep|Together|None:
  """The table that --benchmark is to print; None where it is to decode N tokens. given: the flags of llm.TABLE that are set; sampling: the values of
  those that say how tokens are drawn. Raises UserError."""
  drafts = next((name for name in ("draft_ngram", "draft_mtp", "draft") if getattr(args, name)), None)
  if args.accepted is not None and drafts is None: raise UserError("--accepted: expected --draft_ngram, --draft_mtp or --draft beside it")
  if args.output == "csv" and args.json == "-": raise UserError("--json: expected a FILE beside --output csv")
  if args.parallel is not None: return together_of(args, sampling)
  if sampling: raise UserError(f"--{next(iter(sampling))}: expected --parallel beside it: a single sequence's benchmark is greedy")
  if args.arriving is not None: raise UserError("--arriving: expected --parallel beside it")
  depths = numbers("--depth", "0" if args.depth is None else args.depth, 0)
  plain = ["depth"] * (len(depths) == 1) + ["output"] * (args.output == "json" and args.benchmark > 0)
  if not (more := [name for name in given if name not in plain]):
    if drafts: raise UserError(f"--{drafts}: expected a table beside it, by --n_gen: tokens come several at a time")
    return None
  if args.benchmark: raise UserError(f"--benchmark {args.benchmark}: expected no number beside --{more[0]}: --n_gen has a table's")
  if args.plot is not None: check_plot(Path(args.plot))
  prompts, gens = ("512" if args.n_prompt is None else args.n_prompt), ("128" if args.n_gen is None else args.n_gen)
  return Sweep(counts("--n_prompt", prompts), counts("--n_gen", gens), depths, args.repetitions or 5)

def ceiling(peak:tuple[float, str]|None, nbytes:float) -> float|None:
  """tok/s where a token reads so many bytes and takes no other time"""
  return peak[0] / nbytes if peak else None

def measured_peak(t:Transformer, rows:int=1) -> tuple[float, str]|None:
  """peak_bandwidth of what a step of so many rows reads, with a word on stderr where other processes disturbed it. Several devices work in turn: each
  reads its part at one's speed; or at once: what the first reads counts. Of two kinds, a mean by what a token reads of each"""
  reads = t.weight_bytes_by_kind()
  with Others() as others: peaks = {kind: peak_bandwidth() if kind == t.device.split(":")[0] else peak_bandwidth(kind) for kind in reads}
  say_loaded(others, "while the ceiling was measured")
  if (peak := peaks[t.device.split(":")[0]]) is None or None in peaks.values(): return None
  how = f"; of one device, {len(t.devices)} work {'in turn' if t.in_turn and parts_of(t, rows) == 1 else 'at once'}" if len(t.devices) > 1 else ""
  if len(reads) == 1: return peak[0], peak[1] + how
  mean = sum(reads.values()) / sum(nbytes / peaks[kind][0] for kind, nbytes in reads.items())
  return mean, "; ".join(f"{reads[kind] / 1e6:.1f} MB at {peaks[kind][0] / 1e9:.0f} GB/s of {kind}, {peaks[kind][1]}" for kind in reads)

def say_loaded(others:Others, when:str) -> None:
  if not others.in_the_way: return
  print(f"this machine is loaded: other processes took {others.cores:.1f} of its {cores()} cores {when}; alone it is faster", file=sys.stderr)

def benchmark(model:Model, name:str, count:int, depth:int, load_seconds:float) -> dict[str, Any]:
  """Prints the ceiling, then decodes `count` tokens after `depth` others, a line each. Returns the figures of the JSON line: times in ms and s, sizes
  in bytes, bandwidth in GB/s. Raises UserError where the cache is too small."""
  t, engine = model.transformer, model.engine
  if depth + count + BESIDE > t.max_context:
    raise UserError(f"--depth {depth} and --benchmark {count}: expected at most {t.max_context - BESIDE} tokens together, found {depth + count}: "
                    f"the cache holds {t.max_context} (the model's own context is {t.config.context_length})")
  weights, cache, peak = t.weight_bytes_a_step(), t.cache_bytes(depth), measured_peak(t)
  print(f"device    {', '.join(t.devices)}")
  print(f"a token   reads {weights / 1e6:.1f} MB of weights and {cache / 1e6:.1f} MB of cache at depth {depth}")
  if most := ceiling(peak, weights + cache): print(f"ceiling   {peak[0] / 1e9:.0f} GB/s ({peak[1]}): {1e3 / most:.3f} ms a token, {most:.0f} tok/s")
  else: print("ceiling   unknown: no figure for this device's memory")
  ids = np.random.default_rng(0).integers(0, min(t.config.vocab_size, 256), depth + 1).tolist()
  start = time.perf_counter()
  tokens = engine.generate(ids, count + BESIDE)
  next(tokens)
  first = time.perf_counter() - start
  next(tokens)  # one more to warm up
  print(f"load      {load_seconds:.2f} s, first token after {first:.2f} s more")
  prefill = None
  if depth:
    tokens.close()
    engine.forget()
    start = time.perf_counter()
    engine.prefill(ids)
    engine.wait()
    prefill = depth / (time.perf_counter() - start)
    print(f"prefill   {prefill:.1f} tok/s over {depth} tokens")
    tokens = engine.generate(ids, count + BESIDE - 1)
    next(tokens)
  print(f"kernels   {engine.kernels_a_token} a token")
  times:list[float] = []
  with Others() as others:
    for i in range(count):
      start = time.perf_counter()
      next(tokens)
      times.append(time.perf_counter() - start)
      print(f"{i + 1:5d}  {times[-1] * 1e3:9.3f} ms  {1 / times[-1]:9.1f} tok/s  {(weights + cache) / times[-1] / 1e9:8.1f} GB/s", flush=True)
  tokens.close()
  (p10, p90), median = (float(np.percentile(times, p)) for p in (10, 90)), statistics.median(times)
  percent = 100 / median / most if most else None
  print(f"median    {median * 1e3:.3f} ms, {1 / median:.1f} tok/s (p10 {p10 * 1e3:.3f} ms, p90 {p90 * 1e3:.3f} ms)"
        f"{f', {percent:.1f} % of the ceiling' if percent else ''}")
  say_loaded(others, "meanwhile")
  return {"model": name, "device": Device.DEFAULT, "depth": depth, "tokens": count, "median_ms": median * 1e3, "p10_ms": p10 * 1e3,
          "p90_ms": p90 * 1e3, "tok_s": 1 / median, "weight_bytes": weights, "cache_bytes": cache, "peak_gb_s": peak[0] / 1e9 if peak else None,
          "ceiling_percent": percent, "kernels": engine.kernels_a_token, "load_s": load_seconds,
          "first_token_s": first, "prefill_tok_s": prefill, "device_bytes": GlobalCounters.mem_used, "other_cores": others.cores}

# ---- tables ----

def tabulate(model:Model, args:argparse.Namespace, sweep:Sweep|Together) -> list[dict[str, Any]]:
  """Prints the table that the flags ask for, and what came of drafts. Returns its rows' figures. Raises UserError."""
  head = sys.stdout if args.output in (None, "md") else sys.stderr
  if args.accepted is not None:
    model.engine.runner.force(args.accepted)
    print(f"drafts    {100 * args.accepted:g} % of them count as right, whatever they are: what is timed is no text", file=head)
  tables = {Sweep: table, Together: table_together, Arriving: table_arriving}
  rows = tables[type(sweep)](model, args.model, sweep, args.output or "md", Path(args.plot) if args.plot else None)
  if (gauges := model.engine.gauges).draft_tokens:
    print(f"\ndrafts    {sum(gauges.accepted)} of {gauges.draft_tokens} tokens accepted{'' if args.accepted is None else ', by force'}; "
          f"{gauges.drafts} of {gauges.steps} steps drafted", file=head)
  return [row | ({} if args.accepted is None else {"forced_acceptance": args.accepted}) for row in rows]

@dataclass
class Row:
  """Runs of one kind: n_prompt tokens prefilled, or n_gen decoded, after n_depth"""
  n_prompt:int
  n_gen:int
  n_depth:int
  nbytes:float             # that a token reads, on average; 0 for a prefill, whose tokens share a read
  ceiling:float|None       # tok/s
  seconds:list[float] = field(default_factory=list)
  others:Others = field(default_factory=Others)

  @property
  def test(self) -> str:
    return f"{f'pp{self.n_prompt}' if self.n_prompt else f'tg{self.n_gen}'}{f' @ d{self.n_depth}' if self.n_depth else ''}"
  @property
  def rates(self) -> list[float]: return [(self.n_prompt or self.n_gen) / s for s in self.seconds]
  @property
  def mean(self) -> float: return statistics.mean(self.rates)
  @property
  def deviation(self) -> float: return deviation(self.rates)
  @property
  def median(self) -> float: return statistics.median(self.rates)
  @property
  def gb_s(self) -> float|None: return self.median * self.nbytes / 1e9 or None
  @property
  def percent(self) -> float|None: return 100 * self.median / self.ceiling if self.ceiling else None
  def figures(self) -> dict[str, Any]:
    """The row of the JSON line and of the CSV table, by llama-bench's names where it has them"""
    ns = [round(s * 1e9) for s in self.seconds]
    return {"test": self.test, "n_prompt": self.n_prompt, "n_gen": self.n_gen, "n_depth": self.n_depth, "avg_ns": round(statistics.mean(ns)),
            "stddev_ns": round(deviation(ns)), "avg_ts": self.mean, "stddev_ts": self.deviation, "median_ts": self.median,
            "bytes_a_token": self.nbytes or None, "gb_s": self.gb_s, "ceiling_ts": self.ceiling,
            "ceiling_percent": self.percent, "other_cores": self.others.cores, "samples_ns": ns, "samples_ts": self.rates}

def deviation(values:list[float]|list[int]) -> float: return statistics.stdev(values) if len(values) > 1 else 0.0

def prefill_seconds(engine:Engine, ids:list[int], depth:int, others:Others) -> float:
  """Seconds that a prefill of all of `ids` but the last takes, when the cache holds the first `depth` of them. It holds whole pages: the share of
  what is read again of the last one is taken off"""
  engine.prefill(ids[:depth + 1])
  engine.wait()
  with others:
    start = time.perf_counter()
    engine.prefill(ids)
    engine.wait()
    return (time.perf_counter() - start) * (1 - depth % PAGE / (len(ids) - 1 - depth + depth % PAGE))

def decode_seconds(engine:Engine, ids:list[int], count:int, others:Others) -> float:
  """Seconds that `count` tokens take, when the cache holds `ids`. The first is not counted; one more is under way when the last is there"""
  with contextlib.closing(engine.generate(ids, count + 2)) as tokens:
    next(tokens)
    with others:
      start = time.perf_counter()
      for _ in range(count): next(tokens)
      return time.perf_counter() - start

def measure(model:Model, sweep:Sweep, rows:list[Row]) -> Iterator[Row]:
  """Runs the rows in their order, and yields each when it is filled. All begin with one text, whose rows serve from run to run and depth to depth; a
  prefill's own tokens are new in each"""
  rng, vocab = np.random.default_rng(0), model.transformer.config.vocab_size
  text = rng.integers(0, vocab, max(sweep.deepest, 1)).tolist()
  warm = 2 if model.engine.runner.most_drafts else 1   # rounds that record and compile: behind the first that drafts, steps without drafts are tried
  with tqdm(total=len(rows) * (warm + sweep.repetitions), desc="benchmark", leave=False, disable=not sys.stderr.isatty()) as bar:
    for row in rows:
      for run in range(-warm, sweep.repetitions):
        bar.set_postfix_str(row.test)
        others = row.others if run >= 0 else Others()
        own = rng.integers(0, vocab, row.n_prompt + 1).tolist()
        if row.n_prompt: seconds = prefill_seconds(model.engine, text[:row.n_depth] + own, row.n_depth, others)
        else: seconds = decode_seconds(model.engine, text[:max(row.n_depth, 1)], row.n_gen, others)
        if run >= 0: row.seconds.append(seconds)
        bar.update()
      bar.clear()
      yield row

COLUMNS = (("test", 18), ("tok/s", 20), ("median", 10), ("GB/s", 8), ("% of ceiling", 12))

def markdown(first:list[str], widths:list[int], cells:list[str]) -> str:
  return "| " + " | ".join([f"{c:<{w}}" for c, w in zip(first, widths)] + [f"{c:>{w}}" for c, (_, w) in zip(cells, COLUMNS)]) + " |"

def table(model:Model, name:str, sweep:Sweep, output:str, plot:Path|None) -> list[dict[str, Any]]:
  """Prints the ceiling, then a table of the sweep's rows, each when it is measured. name: the model's, as it was given; output: md, csv, or json,
  which prints no table (its line is the caller's). Returns the rows' figures. Raises UserError where the cache is too small or the plot cannot be
  written."""
  t = model.transformer
  if sweep.room > t.max_context:
    raise UserError(f"--depth {sweep.deepest} and {sweep.most} tokens: expected at most {t.max_context - 2} together, found "
                    f"{sweep.deepest + sweep.most}: the cache holds {t.max_context} (the model's own context is {t.config.context_length})")
  weights, a_row, peak, short = t.weight_bytes_a_step(), t.cache_bytes(1), measured_peak(t), Path(name).stem if name.endswith(".gguf") else name
  # what a program is to read has stdout for itself
  head = sys.stdout if output == "md" else sys.stderr
  print(f"device    {device_name(t.devices)}", file=head)
  print(f"ceiling   {f'{peak[0] / 1e9:.0f} GB/s ({peak[1]})' if peak else 'unknown: no figure for this memory'}", file=head)
  def bytes_at(depth:float) -> float: return weights + a_row * depth
  for depth in sweep.depths:
    nbytes = bytes_at(depth)
    print(f"          a token at depth {depth} reads {nbytes / 1e6:.1f} MB{f': {ceiling(peak, nbytes):.0f} tok/s' if peak else ''}", file=head)
  print(file=head, flush=True)
  def row(prompt:int, gen:int, depth:int) -> Row:
    nbytes = bytes_at(max(depth, 1) + (gen + 1) / 2) if gen else 0.0
    return Row(prompt, gen, depth, nbytes, ceiling(peak, nbytes) if gen else None)
  rows = [row(*r, depth) for depth in sweep.depths for r in [*((p, 0) for p in sweep.prompts), *((0, n) for n in sweep.gens)]]
  result:list[dict[str, Any]] = []
  common = {"model": short, "device": Device.DEFAULT, "device_name": device_name(t.devices), "peak_gb_s": peak[0] / 1e9 if peak else None}
  first = [short, Device.DEFAULT]
  widths = [max(len(a), len(b)) for a, b in zip(first, ("model", "device"))]
  if output == "md":
    print(markdown(["model", "device"], widths, [c for c, _ in COLUMNS]))
    print("| " + " | ".join(["-" * w for w in widths] + ["-" * (w - 1) + ":" for _, w in COLUMNS]) + " |", flush=True)
  for filled in measure(model, sweep, rows):
    result.append(common | filled.figures())
    if output == "md":
      shares = [f"{share:.1f}" if share else "" for share in (filled.gb_s, filled.percent)]
      print(markdown(first, widths, [filled.test, f"{filled.mean:.2f} ± {filled.deviation:.2f}", f"{filled.median:.2f}", *shares]), flush=True)
    elif output == "csv": print_csv(result)
  every = Others(sum(r.others.wall for r in rows), sum(r.others.seconds for r in rows))
  say_loaded(max((every, *(r.others for r in rows)), key=lambda o: o.cores or 0), "meanwhile")
  if plot: draw(rows, f"{short} on {device_name(t.devices)}", peak, bytes_at, plot)
  return result

def print_csv(result:list[dict[str, Any]]) -> None:
  """The newest row, below the head if it is the first"""
  cells = {k: v for k, v in result[-1].items() if not k.startswith("samples")}
  writer = csv.DictWriter(sys.stdout, cells, lineterminator="\n")
  if len(result) == 1: writer.writeheader()
  writer.writerow(cells)
  sys.stdout.flush()

def draw(rows:list[Row], title:str, peak:tuple[float, str]|None, bytes_at:Callable[[float], float], path:Path) -> None:
  """Draws tok/s over depth: decoding beneath its ceiling, prefill beside it. bytes_at: bytes that a token at a depth reads. Raises UserError."""
  import matplotlib
  with matplotlib.rc_context({"svg.hashsalt": "benchmark", "font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
    from matplotlib.figure import Figure  # pyplot would look for a screen
    from matplotlib.ticker import MultipleLocator
    kinds = [kind for kind in ("n_gen", "n_prompt") if any(getattr(r, kind) for r in rows)]
    figure, deepest = Figure((5.5 * len(kinds) + 0.5, 4.4), layout="constrained"), max(r.n_depth for r in rows)
    figure.get_layout_engine().set(w_pad=0.12)
    figure.suptitle(title)
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds):
      if kind == "n_gen" and peak:
        depths = np.linspace(0, max(deepest, 1), 100)
        axes.plot(depths, [peak[0] / bytes_at(d) for d in depths], "--", color="0.4", label=f"ceiling: the memory's {peak[0] / 1e9:.0f} GB/s")
      for i, count in enumerate(dict.fromkeys(getattr(r, kind) for r in rows if getattr(r, kind))):
        line = sorted((r for r in rows if getattr(r, kind) == count), key=lambda r: r.n_depth)
        axes.errorbar([r.n_depth for r in line], [r.mean for r in line], [r.deviation for r in line], color=f"C{i}", marker="o", capsize=4,
                      label=f"{'decoding' if kind == 'n_gen' else 'prefill of'} {count} tokens")
        for r in line: axes.annotate(f"{r.mean:.0f}", (r.n_depth, r.mean), (5, 5), textcoords="offset points", size=10)
      axes.set(xlabel="depth (tokens in the cache)", ylabel=f"{'decoding' if kind == 'n_gen' else 'prefill'}, tokens a second")
      axes.xaxis.set_major_locator(MultipleLocator(2 ** max(round(math.log2(max(deepest, 1) / 4)), 0)))
      axes.set_ylim(0, axes.get_ylim()[1] * 1.25)  # room for the legend
      axes.margins(x=0.08)
      axes.grid(color="0.9")
      axes.legend(frameon=False, loc="upper right")
    save(figure, path)

def save(figure:Any, path:Path) -> None:
  """Raises UserError."""
  try: figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
  except OSError as e: raise UserError(f"--plot {path}: {e.strerror}") from None

# ---- many sequences ----

@dataclass
class Step:
  """Runs of decode steps of so many sequences, `gen` each after `prompt` tokens"""
  sequences:int
  prompt:int
  gen:int
  nbytes:float             # that a step reads, on average
  ceiling:float|None       # tok/s of all
  seconds:list[float] = field(default_factory=list)   # of a run
  reading:list[float] = field(default_factory=list)   # … and of the prompts before it
  others:Others = field(default_factory=Others)

  @property
  def rates(self) -> list[float]: return [self.sequences * self.gen / s for s in self.seconds]
  @property
  def prompt_rates(self) -> list[float]: return [self.sequences * self.prompt / s for s in self.reading]
  @property
  def median(self) -> float: return statistics.median(self.rates)
  @property
  def step_seconds(self) -> float: return self.sequences / self.median
  @property
  def gb_s(self) -> float: return self.nbytes / self.step_seconds / 1e9
  @property
  def percent(self) -> float|None: return 100 * self.median / self.ceiling if self.ceiling else None
  def figures(self) -> dict[str, Any]:
    """The row of the JSON line and of the CSV table"""
    return {"n_parallel": self.sequences, "n_prompt": self.prompt, "n_gen": self.gen, "median_ts": self.median,
            "sequence_ts": self.median / self.sequences, "stddev_ts": deviation(self.rates), "step_ms": self.step_seconds * 1e3,
            "bytes_a_step": self.nbytes, "gb_s": self.gb_s, "ceiling_ts": self.ceiling,
            "ceiling_percent": self.percent, "prompts_ts": statistics.median(self.prompt_rates), "other_cores": self.others.cores,
            "samples_ts": self.rates, "samples_prompts_ts": self.prompt_rates}

def drawn(engine:Engine, prompts:list[list[int]], sampling:Sampling) -> list[Sequence]:
  return [engine.add(Request(ids, replace(sampling, seed=i))) for i, ids in enumerate(prompts)]
def asked_of(sampling:Sampling) -> dict[str, float]:
  """What of it is not the default"""
  return {field.name: value for field in fields(Sampling) if field.name != "bias" and (value := getattr(sampling, field.name)) != field.default}
def work(engine:Engine, sequences:list[Sequence]) -> None:
  if not engine.step(): raise next((s.error for s in sequences if s.error), RuntimeError("a sequence ended before it was timed"))

def together_seconds(engine:Engine, prompts:list[list[int]], sampling:Sampling, count:int, others:Others) -> tuple[float, float]:
  """Seconds that all prompts take, and those that `count` tokens of each take, when they are in the cache"""
  stall, engine.scheduler.max_stall = engine.scheduler.max_stall, math.inf   # no answer begins before the last prompt is read
  start, sequences = time.perf_counter(), drawn(engine, prompts, sampling)
  try:
    while any(s.rows < s.prompt - 1 for s in sequences): work(engine, sequences)
    engine.wait()
    reading = time.perf_counter() - start
    while min(len(s.produced) for s in sequences) < WARM: work(engine, sequences)
    ends = [len(s.produced) + count for s in sequences]
    with others:
      start = time.perf_counter()
      while any(len(s.produced) < end for s, end in zip(sequences, ends)): work(engine, sequences)
      return reading, time.perf_counter() - start
  finally:
    engine.scheduler.max_stall = stall
    for s in sequences: engine.abort(s)

def check_room(model:Model, wanted:Together) -> None:
  """Raises UserError where the cache is too small."""
  t, tokens = model.transformer, wanted.arriving if isinstance(wanted, Arriving) else wanted.prompt + wanted.gen
  if wanted.room > t.max_context:
    raise UserError(f"--parallel: expected at most {t.max_context - wanted.room + tokens} tokens of a sequence, found {tokens}: the cache holds "
                    f"{t.max_context} (the model's own context is {t.config.context_length})")
  if wanted.cache_tokens > model.engine.pool.rows:
    raise UserError(f"--cache_tokens: expected at least {wanted.cache_tokens} for {max(wanted.sequences)} sequences, found {model.engine.pool.rows}")

TOGETHER = (("sequences", 9), ("tok/s", 18), ("of each", 9), ("ms a step", 9), ("GB/s", 8), ("% of ceiling", 12),
            ("prompts tok/s", 13))

def table_together(model:Model, name:str, wanted:Together, output:str, plot:Path|None) -> list[dict[str, Any]]:
  """As table, of steps of many sequences; the ceiling of each row is printed before the first is measured"""
  check_room(model, wanted)
  t, short = model.transformer, Path(name).stem if name.endswith(".gguf") else name
  peak = measured_peak(t, max(wanted.sequences))
  def bytes_of(sequences:float) -> float:
    sequences /= parts_of(t, math.ceil(sequences))   # as much as devices that work at once have to do with each
    return t.weight_bytes_a_step(sequences) + sequences * t.cache_bytes(1) * (wanted.prompt + WARM + (wanted.gen + 1) / 2)
  rows = [Step(n, wanted.prompt, wanted.gen, bytes_of(n), peak and n * peak[0] / bytes_of(n)) for n in wanted.sequences]
  head = sys.stdout if output == "md" else sys.stderr
  drawing = ", ".join(f"{name} {value:g}" for name, value in asked_of(wanted.sampling).items()) or "greedy"
  print(f"model     {short} on {device_name(t.devices)}: prompts of {wanted.prompt} tokens, {wanted.gen} drawn each, {drawing}", file=head)
  print(f"ceiling   {f'{peak[0] / 1e9:.0f} GB/s ({peak[1]})' if peak else 'unknown: no figure for this memory'}", file=head)
  for row in rows:
    print(f"          a step of {row.sequences:2d} reads {row.nbytes / 1e6:9.1f} MB{f': {row.ceiling:8.0f} tok/s' if row.ceiling else ''}", file=head)
  print(file=head, flush=True)
  def line(cells:list[str]) -> str: return "| " + " | ".join(f"{c:>{w}}" for c, (_, w) in zip(cells, TOGETHER)) + " |"
  if output == "md":
    print(line([title for title, _ in TOGETHER]))
    print("| " + " | ".join("-" * (w - 1) + ":" for _, w in TOGETHER) + " |", flush=True)
  rng, result = np.random.default_rng(0), []
  for row in rows:
    for run in range(wanted.repetitions + 1):   # the first records and compiles
      prompts = rng.integers(0, t.config.vocab_size, (row.sequences, wanted.prompt)).tolist()
      reading, seconds = together_seconds(model.engine, prompts, wanted.sampling, wanted.gen, row.others if run else Others())
      if run: row.reading, row.seconds = [*row.reading, reading], [*row.seconds, seconds]
    common = {"model": short, "device": Device.DEFAULT, "device_name": device_name(t.devices), "peak_gb_s": peak[0] / 1e9 if peak else None}
    result.append(common | asked_of(wanted.sampling) | row.figures())
    if output == "md":
      print(line([f"{row.sequences}", f"{row.median:.1f} ± {deviation(row.rates):.1f}", f"{row.median / row.sequences:.1f}",
                  f"{row.step_seconds * 1e3:.3f}", f"{row.gb_s:.1f}", f"{row.percent:.1f}" if row.percent else "",
                  f"{statistics.median(row.prompt_rates):.1f}"]), flush=True)
    elif output == "csv": print_csv(result)
  say_loaded(max((row.others for row in rows), key=lambda o: o.cores or 0), "meanwhile")
  if plot: draw_together(rows, f"{short} on {device_name(t.devices)}", peak, bytes_of, plot)
  return result

# ---- a prompt that arrives ----

@dataclass
class Arrival:
  """Runs of so many answers while a prompt of `arriving` tokens is read"""
  sequences:int
  arriving:int
  before:list[float] = field(default_factory=list)    # seconds from token to token of an answer, while nobody else is there
  between:list[float] = field(default_factory=list)   # … from the prompt's arrival to its first token
  rates:list[float] = field(default_factory=list)     # tok/s of the prompt
  alone:list[float] = field(default_factory=list)     # … where no answer runs
  others:Others = field(default_factory=Others)

  @property
  def percent(self) -> float: return 100 * statistics.median(self.rates) / statistics.median(self.alone)
  def figures(self) -> dict[str, Any]:
    """The row of the JSON line and of the CSV table"""
    def ms(times:list[float], percentile:float) -> float: return float(np.percentile(times, percentile)) * 1e3
    return {"n_parallel": self.sequences, "n_arriving": self.arriving, "before_p50_ms": ms(self.before, 50), "before_p99_ms": ms(self.before, 99),
            "between_p50_ms": ms(self.between, 50), "between_p99_ms": ms(self.between, 99), "between_max_ms": ms(self.between, 100),
            "arriving_ts": statistics.median(self.rates), "alone_ts": statistics.median(self.alone), "arriving_percent": self.percent,
            "other_cores": self.others.cores, "samples_between_ms": [s * 1e3 for s in self.between], "samples_arriving_ts": self.rates,
            "samples_alone_ts": self.alone}

def arrive(engine:Engine, prompts:list[list[int]], sampling:Sampling, count:int, late:list[int], row:Arrival) -> None:
  """Adds a run to the row: `count` tokens of each, then the late prompt comes. A step gives all answers a token, so that one of them tells of all.
  Raises UserError where an answer ends too soon."""
  sequences, times = drawn(engine, prompts, sampling), []
  def tick() -> None:
    said = len(sequences[0].produced)
    work(engine, sequences)
    if len(sequences[0].produced) > said: times.append(time.perf_counter())
  try:
    while min(len(s.produced) for s in sequences) < WARM: work(engine, sequences)
    while len(times) <= count: tick()
    with row.others:
      start, s = time.perf_counter(), engine.add(Request(late, limit=1))
      while s.state in (State.WAITING, State.PREFILLING): tick()
      row.rates.append((len(late) - 1) / (time.perf_counter() - start))
      while s.state is not State.ENDED: tick()
    if s.error: raise s.error
    if any(s.state is not State.RUNNING for s in sequences):
      raise UserError("--arriving: an answer ended, or gave way, before the prompt was read: a larger --max_context or --cache_tokens has room")
  finally:
    for s in sequences: engine.abort(s)
  between = np.diff(times).tolist()
  row.before += between[:count]
  row.between += between[count:]

ARRIVING = (("sequences", 9), ("p50 ms", 9), ("p99 ms", 9), ("most ms", 9), ("without", 9), ("prompt tok/s", 12), ("alone", 9), ("%", 6))

def table_arriving(model:Model, name:str, wanted:Arriving, output:str, plot:Path|None) -> list[dict[str, Any]]:
  """As table, of the times between tokens of answers while a prompt is read, and of that prompt's speed. There is no plot."""
  check_room(model, wanted)
  engine, short, rng, result = model.engine, Path(name).stem if name.endswith(".gguf") else name, np.random.default_rng(0), []
  target, vocab, head = engine.max_stall * 1e3, model.transformer.config.vocab_size, sys.stdout if output == "md" else sys.stderr
  print(f"model     {short} on {device_name(model.transformer.devices)}: a prompt of {wanted.arriving} tokens arrives while answers run", file=head)
  print(f"target    {target:g} ms from token to token of an answer (--max_stall_ms)\n", file=head, flush=True)
  def line(cells:list[str]) -> str: return "| " + " | ".join(f"{c:>{w}}" for c, (_, w) in zip(cells, ARRIVING)) + " |"
  if output == "md":
    print(line([title for title, _ in ARRIVING]))
    print("| " + " | ".join("-" * (w - 1) + ":" for _, w in ARRIVING) + " |", flush=True)
  def prompt(tokens:int) -> list[int]: return rng.integers(0, vocab, tokens).tolist()
  rows, engine.told = [Arrival(n, wanted.arriving) for n in wanted.sequences], True   # a row's first run records and compiles: nobody waits
  for row in rows:
    for run in range(wanted.repetitions + 1):
      into = row if run else Arrival(row.sequences, wanted.arriving)
      into.alone.append((wanted.arriving - 1) / prefill_seconds(engine, prompt(wanted.arriving), 0, into.others))
      arrive(engine, [prompt(wanted.prompt) for _ in range(row.sequences)], wanted.sampling, wanted.gen, prompt(wanted.arriving), into)
    figures = row.figures()
    devices = device_name(model.transformer.devices)
    result.append({"model": short, "device": Device.DEFAULT, "device_name": devices, "n_prompt": wanted.prompt, "target_ms": target} | figures)
    if output == "md":
      times = [figures[key] for key in ("between_p50_ms", "between_p99_ms", "between_max_ms", "before_p50_ms")]
      print(line([f"{row.sequences}", *(f"{ms:.3f}" for ms in times), f"{figures['arriving_ts']:.1f}", f"{figures['alone_ts']:.1f}",
                  f"{row.percent:.1f}"]), flush=True)
    elif output == "csv": print_csv(result)
  say_loaded(max((row.others for row in rows), key=lambda o: o.cores or 0), "meanwhile")
  return result

def draw_together(rows:list[Step], title:str, peak:tuple[float, str]|None, bytes_of:Callable[[float], float], path:Path) -> None:
  """Draws tok/s of all over the sequences, beneath the ceiling. bytes_of: bytes that a step of so many reads. Raises UserError."""
  import matplotlib
  with matplotlib.rc_context({"svg.hashsalt": "benchmark", "font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
    from matplotlib.figure import Figure
    figure, line = Figure((6, 4.4), layout="constrained"), sorted(rows, key=lambda r: r.sequences)
    figure.suptitle(title)
    axes = figure.subplots()
    counts = [r.sequences for r in line]
    if peak:
      every = np.linspace(counts[0], counts[-1], 100)
      axes.plot(every, [n * peak[0] / bytes_of(n) for n in every], "--", color="0.4", label=f"ceiling: the memory's {peak[0] / 1e9:.0f} GB/s")
    axes.errorbar(counts, [r.median for r in line], [deviation(r.rates) for r in line], marker="o", capsize=4, label="all sequences")
    for r in line: axes.annotate(f"{r.median:.0f}", (r.sequences, r.median), (5, 5), textcoords="offset points", size=10)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.set(xlabel="sequences at once", ylabel="decoding, tokens a second")
    axes.set_ylim(0)
    axes.grid(color="0.9")
    axes.legend(frameon=False, loc="upper left")
    save(figure, path)

def perplexity(model:Model, text:str) -> dict[str, Any]:
  """The perplexity of a text, exp of its mean negative log-likelihood a token, over windows of at most 512 tokens. The second half of each window is
  scored (all of a text shorter than one). Raises UserError for a text of less than two tokens."""
  tok = model.tokenizer
  ids = tok.encode(text)
  window = min(PERPLEXITY_WINDOW, model.transformer.max_context)
  if len(ids) < 2: raise UserError(f"--perplexity: expected a text of at least 2 tokens, found {len(ids)}")
  windows, half = ([ids[i:i + window] for i in range(0, len(ids) - window + 1, window)], window // 2) if len(ids) >= window else ([ids], 0)
  nll, scored = 0.0, 0
  for tokens in tqdm(windows, desc="perplexity", leave=False, disable=not sys.stderr.isatty()):
    if tok.add_bos and tok.bos_id is not None: tokens = [tok.bos_id, *tokens[1:]]
    logits = model.logits(tokens)[half:-1].astype(np.float64)
    top = logits.max(-1, keepdims=True)
    log_z = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    nll += float((log_z - logits[np.arange(len(logits)), tokens[half + 1:]]).sum())
    scored += len(logits)
  return {"perplexity": math.exp(nll / scored), "nll": nll / scored, "tokens": scored, "windows": len(windows)}

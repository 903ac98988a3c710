"""The measurements of the command line: --benchmark for a model's speed, --perplexity for the likelihood of a text.

--benchmark N decodes N tokens, a line each. With lists it is a table: rows of prefill (pp) and of decoding (tg) at depths, each several times,
named and averaged as llama-bench does. A row's first run, which compiles, is not counted. Figures stand beside the memory's ceiling (machine.py). The
model is run by engine.py's Generator, as an answer is; kernels by themselves are timed by bench_block.py and profile_model.py.
"""
from __future__ import annotations
import argparse, contextlib, csv, importlib.util, math, statistics, sys, time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator
import numpy as np
from tqdm import tqdm
from tinygrad import Device, GlobalCounters
from tinygrad.apps.engine.engine import Generator
from tinygrad.apps.machine import Others, cores, device_name, peak_bandwidth
from tinygrad.apps.models import Model, UserError

PERPLEXITY_WINDOW = 512
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

def sweep_of(args:argparse.Namespace, given:list[str]) -> Sweep|None:
  """The table that --benchmark is to print; None where it is to decode N tokens. given: the flags of llm.TABLE that are set. Raises UserError."""
  if args.output == "csv" and args.json == "-": raise UserError("--json: expected a FILE beside --output csv")
  depths = numbers("--depth", "0" if args.depth is None else args.depth, 0)
  plain = ["depth"] * (len(depths) == 1) + ["output"] * (args.output == "json" and args.benchmark > 0)
  if not (more := [name for name in given if name not in plain]): return None
  if args.benchmark: raise UserError(f"--benchmark {args.benchmark}: expected no number beside --{more[0]}: --n_gen has a table's")
  if args.plot is not None: check_plot(Path(args.plot))
  prompts, gens = ("512" if args.n_prompt is None else args.n_prompt), ("128" if args.n_gen is None else args.n_gen)
  return Sweep(counts("--n_prompt", prompts), counts("--n_gen", gens), depths, args.repetitions or 5)

def ceiling(peak:tuple[float, str]|None, nbytes:float) -> float|None:
  """tok/s where a token reads so many bytes and takes no other time"""
  return peak[0] / nbytes if peak else None

def measured_peak() -> tuple[float, str]|None:
  """peak_bandwidth, with a word on stderr where other processes disturbed it"""
  with Others() as others: peak = peak_bandwidth()
  say_loaded(others, "while the ceiling was measured")
  return peak

def say_loaded(others:Others, when:str) -> None:
  if not others.in_the_way: return
  print(f"this machine is loaded: other processes took {others.cores:.1f} of its {cores()} cores {when}; alone it is faster", file=sys.stderr)

def benchmark(model:Model, name:str, count:int, depth:int, load_seconds:float) -> dict[str, Any]:
  """Prints the ceiling, then decodes `count` tokens after `depth` others, a line each. Returns the figures of the JSON line: times in ms and s, sizes
  in bytes, bandwidth in GB/s. Raises UserError where the cache is too small."""
  t, gen = model.transformer, model.generator
  if depth + 2 + count > t.max_context:
    raise UserError(f"--depth {depth} and --benchmark {count}: expected at most {t.max_context - 2} tokens together, found {depth + count}: "
                    f"the cache holds {t.max_context} (the model's own context is {t.config.context_length})")
  weights, cache, peak = t.weight_bytes_a_token, t.cache_bytes(depth), measured_peak()
  print(f"device    {Device.DEFAULT}")
  print(f"a token   reads {weights / 1e6:.1f} MB of weights and {cache / 1e6:.1f} MB of cache at depth {depth}")
  if most := ceiling(peak, weights + cache): print(f"ceiling   {peak[0] / 1e9:.0f} GB/s ({peak[1]}): {1e3 / most:.3f} ms a token, {most:.0f} tok/s")
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
  with Others() as others:
    for i in range(count):
      start = time.perf_counter()
      next(tokens)
      times.append(time.perf_counter() - start)
      print(f"{i + 1:5d}  {times[-1] * 1e3:9.3f} ms  {1 / times[-1]:9.1f} tok/s  {(weights + cache) / times[-1] / 1e9:8.1f} GB/s", flush=True)
  (p10, p90), median = (float(np.percentile(times, p)) for p in (10, 90)), statistics.median(times)
  percent = 100 / median / most if most else None
  print(f"median    {median * 1e3:.3f} ms, {1 / median:.1f} tok/s (p10 {p10 * 1e3:.3f} ms, p90 {p90 * 1e3:.3f} ms)"
        f"{f', {percent:.1f} % of the ceiling' if percent else ''}")
  say_loaded(others, "meanwhile")
  return {"model": name, "device": Device.DEFAULT, "depth": depth, "tokens": count, "median_ms": median * 1e3, "p10_ms": p10 * 1e3,
          "p90_ms": p90 * 1e3, "tok_s": 1 / median, "weight_bytes": weights, "cache_bytes": cache, "peak_gb_s": peak[0] / 1e9 if peak else None,
          "ceiling_percent": percent, "kernels": gen.kernels_a_token, "load_s": load_seconds,
          "first_token_s": first, "prefill_tok_s": prefill, "device_bytes": GlobalCounters.mem_used, "other_cores": others.cores}

# ---- tables ----

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

def prefill_seconds(gen:Generator, ids:list[int], depth:int, others:Others) -> float:
  """Seconds that a prefill of all of `ids` but the last takes, when the cache holds the first `depth` of them"""
  gen.prefill(ids[:depth + 1])
  Device[Device.DEFAULT].synchronize()
  with others:
    start = time.perf_counter()
    gen.prefill(ids)
    Device[Device.DEFAULT].synchronize()
    return time.perf_counter() - start

def decode_seconds(gen:Generator, ids:list[int], count:int, others:Others) -> float:
  """Seconds that `count` tokens take, when the cache holds `ids`. The token before them, with which the sampling's values are set, is not counted"""
  with contextlib.closing(gen.generate(ids, count + 1)) as tokens:
    next(tokens)
    with others:
      start = time.perf_counter()
      for _ in range(count): next(tokens)
      return time.perf_counter() - start

def measure(model:Model, sweep:Sweep, rows:list[Row]) -> Iterator[Row]:
  """Runs the rows in their order, and yields each when it is filled. All read one text, so that the cache's rows serve from run to run and depth to
  depth"""
  gen = model.generator
  text = np.random.default_rng(0).integers(0, model.transformer.config.vocab_size, sweep.deepest + sweep.most + 1).tolist()
  with tqdm(total=len(rows) * (sweep.repetitions + 1), desc="benchmark", leave=False, disable=not sys.stderr.isatty()) as bar:
    for row in rows:
      for run in range(sweep.repetitions + 1):
        bar.set_postfix_str(row.test)
        others = row.others if run else Others()
        if row.n_prompt: seconds = prefill_seconds(gen, text[:row.n_depth + row.n_prompt + 1], row.n_depth, others)
        else: seconds = decode_seconds(gen, text[:max(row.n_depth, 1)], row.n_gen, others)
        if run: row.seconds.append(seconds)
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
  weights, a_row, peak, short = t.weight_bytes_a_token, t.cache_bytes(1), measured_peak(), Path(name).stem if name.endswith(".gguf") else name
  # what a program is to read has stdout for itself
  head = sys.stdout if output == "md" else sys.stderr
  print(f"device    {device_name()}", file=head)
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
  common = {"model": short, "device": Device.DEFAULT, "device_name": device_name(), "peak_gb_s": peak[0] / 1e9 if peak else None}
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
    elif output == "csv":
      cells = {k: v for k, v in result[-1].items() if not k.startswith("samples")}
      writer = csv.DictWriter(sys.stdout, cells, lineterminator="\n")
      if len(result) == 1: writer.writeheader()
      writer.writerow(cells)
      sys.stdout.flush()
  every = Others(sum(r.others.wall for r in rows), sum(r.others.seconds for r in rows))
  say_loaded(max((every, *(r.others for r in rows)), key=lambda o: o.cores or 0), "meanwhile")
  if plot: draw(rows, f"{short} on {device_name()}", peak, bytes_at, plot)
  return result

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
    try: figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as e: raise UserError(f"--plot {path}: {e.strerror}") from None

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

"""What a model's speed and its words' likelihood are measured by: the command line's --benchmark and --perplexity."""
from __future__ import annotations
import math, statistics, sys, time
from typing import Any
import numpy as np
from tqdm import tqdm
from tinygrad import Device, GlobalCounters
from tinygrad.apps.machine import peak_bandwidth
from tinygrad.apps.models import Model, UserError

PERPLEXITY_WINDOW = 512

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

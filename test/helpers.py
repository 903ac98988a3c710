"""What several tests share."""
from __future__ import annotations
import os, pickle, select, signal
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterable
from unittest.mock import patch
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, GGUFWriter
from gguf.quants import dequantize
from extra import mkgguf
from oracle import Judge
from tinygrad.apps.capture import to_device
from tinygrad.apps.engine.engine import Engine
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.mla import Transformer
from tinygrad.nn.routing import Routing
from tinygrad.nn.step import STRIP, Step

# ---- weights ----

# a type and the places of its blocks' half floats; every other byte may take any value
HALVES: dict[T, tuple[int, ...]] = {
  T.F32: (), T.F16: (0,), T.BF16: (),
  T.Q4_0: (0,),
  T.Q4_1: (0, 2),
  T.Q5_0: (0,),
  T.Q5_1: (0, 2),
  T.Q8_0: (0,),
  T.Q2_K: (80, 82),
  T.Q3_K: (108,),
  T.Q4_K: (0, 2),
  T.Q5_K: (0, 2),
  T.Q6_K: (208,),
  T.IQ4_NL: (0,),
  T.IQ4_XS: (0,),
  T.MXFP4: (),
  T.IQ1_S: (0,),
  T.IQ1_M: (0,),   # spread over four bytes
  T.IQ2_XXS: (0,),
  T.IQ2_XS: (0,),
  T.IQ2_S: (0,),
  T.IQ3_XXS: (0,),
  T.IQ3_S: (0,),
  T.TQ1_0: (52,),
  T.TQ2_0: (64,),
}

def finite_halves(rng: np.random.Generator, n: int) -> np.ndarray:
  """Any bits of a finite half; among them the extremes, denormals and both zeros."""
  bits = rng.integers(0, 1 << 16, n).astype(np.uint16)
  bits[(bits & 0x7c00) == 0x7c00] &= 0x83ff
  bits[:8] = [0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x7bff, 0xfbff, 0x3c00]
  return rng.permutation(bits)

def random_weight(kind: T, shape: tuple[int, ...], extreme: bool = False) -> tuple[np.ndarray, np.ndarray]:
  """(bytes as in a file, the float32 matrix by the gguf package). Scales are near 1, or (extreme) whatever their bits can say."""
  rng, (elements, nbytes) = np.random.default_rng([kind, *shape]), GGML_QUANT_SIZES[kind]
  blocks = rng.integers(0, 256, (int(np.prod(shape)) // elements, nbytes)).astype(np.uint8)
  if kind in (T.F32, T.BF16) or (kind is T.F16 and not extreme):
    values = rng.standard_normal(len(blocks)).astype(np.float32)
    if extreme: values *= np.float32(2.0) ** rng.integers(-140, 120, len(blocks))  # denormals too
    if kind is T.F16: values = values.astype(np.float16).view(np.uint16)
    else: values = values.view(np.uint32) >> (16 if kind is T.BF16 else 0)
    blocks = values.astype(np.uint32 if kind is T.F32 else np.uint16).view(np.uint8).reshape(-1, nbytes)
  else:
    for at in HALVES[kind]:
      mkgguf.put_halves(blocks, kind, at, finite_halves(rng, len(blocks)) if extreme else rng.uniform(.5, 1.5, len(blocks)).astype(np.float16))
    if kind is T.MXFP4: blocks[:, 0] = np.arange(len(blocks)) * 17 % 255 if extreme else rng.integers(126, 130, len(blocks))
  with np.errstate(over="ignore"): want = dequantize(blocks.reshape(-1), kind).reshape(shape)
  return blocks.reshape(-1), want

# ---- steps ----

def pages_of(sequences: int, pages: int) -> np.ndarray:
  """Tables of so many pages each, one sequence's after another's"""
  return np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages)
def decoding(*positions: int, pages: int = 2, tables: np.ndarray | None = None) -> Step:
  return Step.decode(to_device(np.int32(positions)), to_device(pages_of(len(positions), pages) if tables is None else np.int32(tables)))
def prefilling(start: int, tokens: int, pages: int = 2, tables: np.ndarray | None = None) -> Step:
  return Step.prefill(to_device(np.int32([start])), to_device(pages_of(1, pages) if tables is None else np.int32(tables)), tokens)
def prefilling_several(*prompts: tuple[int, int], pages: int = 2) -> tuple[Step, list[slice]]:
  """A step of a strip or more of each prompt, (start, tokens), and where each one's tokens are in it. A prompt has its pages behind the one before
  it, the first from page 1 on"""
  starts, rows, places = [], [], []
  for (start, tokens), table in zip(prompts, pages_of(len(prompts), pages) + 1):
    places.append(slice(len(starts) * STRIP, len(starts) * STRIP + tokens))
    own = range(start, start + tokens, STRIP)
    starts, rows = [*starts, *own], rows + [table] * len(own)
  return Step.prefill(to_device(np.int32(starts)), to_device(np.int32(rows)), len(starts) * STRIP), places
def several_prompts(model: Transformer, path: Path, limit: float) -> None:
  """Asserts what each of three says in a step of all, one of which had a step before"""
  prompts, own = [np.random.default_rng(i).integers(0, 320, n) for i, n in enumerate((21, STRIP, 35 + 13))], [(0, 21), (0, STRIP), (35, 13)]
  before = model.logits(prefilling(0, 35, tables=pages_of(3, 2)[2:] + 1), to_device(prompts[2][:35].astype(np.int32))).numpy()
  step, places = prefilling_several(*own)
  ids = np.zeros(step.tokens, np.int32)
  for prompt, (start, tokens), place in zip(prompts, own, places): ids[place] = prompt[start:start + tokens]
  said = model.logits(step, to_device(ids)).numpy()
  for prompt, (start, _), place in zip(prompts, own, places): Judge(path, prompt.tolist()).check(np.concatenate([before[:start], said[place]]), limit)

# ---- routing ----

def tied(tokens: int, routing: Routing, experts: int) -> tuple[np.ndarray, np.ndarray]:
  """Logits in quarters, biases in eighths, the first two groups alike: ties of experts and of groups. (tokens, experts) and (experts,)"""
  rng, size = np.random.default_rng([tokens, experts]), experts // routing.groups
  logits, bias = rng.integers(-6, 7, (tokens, experts)) / 4, rng.integers(-4, 5, experts) / 8
  logits[:, size:2 * size], bias[size:2 * size] = logits[:, :size], bias[:size]
  return logits.astype(np.float32), bias.astype(np.float32)

def names_of(routing: Routing) -> SimpleNamespace:
  """The routing as the oracle's `route` is told of it"""
  return SimpleNamespace(gating=int(routing.gating), used=routing.count, norm=routing.normalize, scale=routing.scale, groups=routing.groups,
                         used_groups=routing.used_groups)

# ---- models ----

# models whose rows are all whole blocks of every type: a dense block and one with experts
WIDE: dict[str, Any] = dict(blocks=2, dim=256, heads=2, kv_lora=256, nope=256, rope=32, v=128, ff=256, moe_ff=256, vocab=320, experts=4, used=2)
# and the least of one
SMALL: dict[str, Any] = dict(blocks=2, dim=64, heads=2, kv_lora=64, nope=32, rope=32, v=32, ff=96, moe_ff=32, vocab=320)

def write_mixed(path: Path, model: str, types: Iterable[T], **overrides: Any) -> Path:
  """A file whose matrices take the types in turn."""
  turn, plain = cycle(types), mkgguf.tensor_list
  def mixed(*args: Any) -> list: return [(name, shape, t if t is T.F32 else next(turn), std) for name, shape, t, std in plain(*args)]
  with patch.object(mkgguf, "tensor_list", mixed): return mkgguf.write_model(path, model, "Q8_0", **overrides)[0]

def write_with(path: Path, keys: dict[str, Any], *args: Any, **overrides: Any) -> Path:
  """extra/mkgguf.py's file with other values of keys it has, each named by GGUFWriter's method for it; None leaves a key out"""
  with ExitStack() as stack:
    for name, value in keys.items():
      add = getattr(GGUFWriter, f"add_{name}")
      stack.enter_context(patch.object(GGUFWriter, f"add_{name}", lambda w, _, add=add, value=value: None if value is None else add(w, value)))
    return mkgguf.write_model(path, *args, **overrides)[0]

def write_with_tokens(path: Path, tokens: int, model: str, *args: Any, **overrides: Any) -> Path:
  """extra/mkgguf.py's file whose tokenizer knows another number of tokens than the embedding has rows"""
  plain = mkgguf.add_text
  with patch.object(mkgguf, "add_text", lambda w, spec: plain(w, replace(spec, vocab=tokens))):
    return mkgguf.write_model(path, model, *args, **overrides)[0]

def engine_of(path: Path, max_context: int = 64) -> Engine:
  model = Transformer.from_gguf(read_gguf(path), max_context)
  return Engine(Runner(model), model.pool)

# ---- processes ----

def in_child(fxn: Callable[[], Any], seconds: float = 60) -> Any:
  """What fxn returns in a fork of this process, which is killed where it has nothing to say in time"""
  out, into = os.pipe()
  if not (pid := os.fork()):
    try: said = fxn()
    except BaseException as e: said = f"{type(e).__name__}: {e}"
    os.write(into, pickle.dumps(said))
    os._exit(0)
  os.close(into)
  try:
    assert select.select([out], [], [], seconds)[0], f"the child said nothing in {seconds:.0f} s"
    with os.fdopen(out, "rb", closefd=False) as f: return pickle.loads(f.read())
  finally:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(out)

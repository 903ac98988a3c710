"""Decode steps of several sequences on a real card, judged by numbers: the mocks of the tests show neither races nor what NVRTC makes of a kernel.

  DEV=CUDA python test/external/card_batches.py --kernels [--models glm] [--only TEXT]      every kernel of such a step at full-size widths
  DEV=CUDA python test/external/card_batches.py --logits [--models glm,tiny] [--batch-invariant]      whole steps, by batch sizes
  DEV=CUDA python test/external/card_batches.py --engine [--schedules 20]                   random schedules through the engine
  DEV=CUDA python test/external/card_batches.py --block ROWS [--models glm]                 two full-size blocks, twice: for compute-sanitizer
  python test/external/card_batches.py --mock …                                             the same on the mock of CUDA, to try this script

--sizes 2,8,17 names the batch sizes of --kernels and --logits. Compiling takes nearly all of the time, about 20 s of a core for each size and model:
checks may run beside each other, as processes, each with a CACHEDB of its own. The exit code is 1 where something is wrong; lines that say what begin
with WRONG.

--kernels: each primitive in the form of several sequences against its plain ops in float32, on the same card. The worst row decides.

--logits: 64 sequences stand in a cache of random numbers, of random lengths and of those around a split's and a page's edge, in pages that lie
anywhere; a third of them shares full pages with another. Rows that nobody has are NaN. A step of each size decodes all of them, some at a time. Their
logits are compared with those of the sequence alone on the card, and with a naive numpy step in float32 over the same rows (test/oracle.py), and no
other row of the cache may change.

--engine: arrivals, ends, shared beginnings, preemption by few pages. Every token is the oracle's after the tokens before it, or as likely within the
error that is allowed, alone and among others. The pool is whole after each piece of work.

--block: run it once without the tool, which compiles and keeps the kernels. Then, a tool after another:
  DEV=CUDA compute-sanitizer --tool memcheck python test/external/card_batches.py --block 8     (racecheck, initcheck, synccheck)
JIT=2 before it launches each kernel by itself, not as a graph.
"""
from __future__ import annotations
import sys
from pathlib import Path
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
import argparse, contextlib, math, random, tempfile, time
from dataclasses import dataclass, replace
from typing import Any, Callable, NamedTuple
import numpy as np
from gguf import GGMLQuantizationType as T
from extra.mkgguf import write_model
from helpers import WIDE, write_mixed
from mockcuda import on_cuda
from oracle import Weights, config, errors, forward, mixture, rms_norm, rope_and_scale, rotate, softmax, swiglu
from tinygrad import Device, Tensor, dtypes
from tinygrad.apps.capture import Replay, compile_parts, read, to_device, write
from tinygrad.apps.engine.engine import Engine
from tinygrad.apps.engine.batch import ROWS
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.engine.sequence import BatchRow, Request
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.mla import MLP, Transformer
from tinygrad.apps.models import BUILT_IN
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.mla_attention import attention_plan, plan_shape
from tinygrad.nn.moe import FeedForward
from tinygrad.nn.primitive import PLAIN, PRIMITIVES, only_plain_ops, plain_ops
from tinygrad.nn.routing import GROUP, SPARE, group_choices
from tinygrad.nn.step import PAGE, Step
from unit.test_many import LEAST, Pressed, run

SIZES = 1, 2, 3, 4, 8, 16, 17, 32, 33, 64
MOST, CONTEXT = max(ROWS), 8 * PAGE   # sequences, and positions of one
START = time.perf_counter()
wrong: list[str] = []

def say(text: str) -> None: print(f"{time.perf_counter() - START:6.1f} s  {text}", flush=True)
def expect(right: bool, text: str) -> None:
  """Says what was found, and notes it where it is wrong"""
  say(text if right else f"WRONG  {text}")
  if not right: wrong.append(text)

# ---- files ----

class File(NamedTuple):
  """limit: the NMSE of a position's logits. What test_cuda_decode.py and test_many.py allow: activations are of 8 bits where weights are quantized
  and few rows are there, halves else"""
  write: Callable[[Path], Path]
  limit: float

def least(path: Path, family: str, quant: str) -> Path:
  return write_model(path, family, quant, seed=2, **LEAST | dict(q_lora=64 if family == "small-glm" else 0))[0]
FILES: dict[str, File] = {
  "small-glm": File(lambda path: write_mixed(path, "small-glm", [T.Q4_0, T.Q8_0, T.Q6_K, T.Q5_K], **WIDE | dict(q_lora=256, experts=8)), 1e-3),
  "small-tables": File(lambda path: write_mixed(path, "small-glm", [T.IQ4_XS, T.IQ2_XXS, T.IQ3_XXS, T.IQ4_NL],
                                                   **WIDE | dict(q_lora=256, experts=8)), 1e-3),
  "small-v3": File(lambda path: write_mixed(path, "small-v3", [T.Q4_0, T.Q8_0, T.Q6_K],
                                            **WIDE | dict(q_lora=256, experts=12, used=3, groups=(4, 2), dense=1)), 1e-3),
  "small-ds": File(lambda path: write_mixed(path, "small-ds", [T.Q4_K, T.F16, T.Q5_0], **WIDE), 1e-3),
  "small-youtu": File(lambda path: write_mixed(path, "small-youtu", [T.F16], **WIDE | dict(q_lora=256, experts=0)), 1e-5),
  "tiny": File(lambda path: BUILT_IN, 1e-3),
  # a dense block, one of experts, and a head of which a block of threads makes two tiles
  "glm": File(lambda path: write_model(path, "glm", "Q4_0", blocks=2, vocab=20011)[0], 1e-3),
  "ds2lite": File(lambda path: write_model(path, "ds2lite", "Q4_K_M", blocks=2, vocab=20011)[0], 1e-3),
  "youtu": File(lambda path: write_model(path, "youtu", "Q4_0", blocks=2, vocab=20011)[0], 1e-3),
  "least-glm": File(lambda path: least(path, "small-glm", "Q4_0"), 1e-3),
  "least-ds": File(lambda path: least(path, "small-ds", "F16"), 1e-5)}

def file_of(name: str, folder: Path) -> Path:
  path = folder / f"{name}.gguf"
  return path if path.exists() else FILES[name].write(path)
def loaded(name: str, folder: Path) -> Transformer:
  model = Transformer.from_gguf(read_gguf(file_of(name, folder)), CONTEXT, pool=lambda _: 1 + MOST * CONTEXT // PAGE)
  say(f"{name}: loaded")
  return model

# ---- sequences in a cache ----

@dataclass
class Sequences:
  """tokens, lasts: (MOST,), the token that a step is to decode and where it stands. tables: (MOST, pages). cache: (blocks, rows, dim)"""
  tokens: np.ndarray
  lasts: np.ndarray
  tables: np.ndarray
  cache: np.ndarray

  @staticmethod
  def random(model: Transformer) -> Sequences:
    rng, c = np.random.default_rng(1), model.config
    edges = [0, 1, *(at + i for at in (32, 64, 128, 192, 256) for i in (-2, -1, 0, 1)), CONTEXT - 2, CONTEXT - 1]
    lasts = rng.permutation([*edges, *rng.integers(0, CONTEXT, MOST - len(edges))])
    tables, free = np.zeros((MOST, model.pages), np.int32), rng.permutation(np.arange(1, model.pool)).tolist()
    cache = np.full((len(model.blk), model.pool, PAGE, c.cache_dim), np.nan, np.float16)
    cache[:, 0] = 1.0   # nobody's, and finite
    for i, last in enumerate(lasts):
      shared = min(last, lasts[i - 1]) // PAGE if i % 3 == 1 else 0   # full pages
      tables[i, :shared] = tables[i - 1, :shared]
      for page in range(shared, last // PAGE + 1):
        tables[i, page] = free.pop()
        rows = min(last - page * PAGE, PAGE)                          # the step writes the last one
        cache[:, tables[i, page], :rows] = rng.standard_normal((len(model.blk), rows, c.cache_dim))
    cache = cache.astype(np.float32 if model.cache[0].dtype == dtypes.float else np.float16)
    return Sequences(rng.integers(0, c.vocab_size, MOST), lasts, tables, cache.reshape(len(model.blk), -1, c.cache_dim))

  def rows(self, block: int, i: int) -> np.ndarray:
    """Of a sequence, by position, before the step"""
    positions = np.arange(self.lasts[i])
    return self.cache[block, self.tables[i, positions // PAGE] * PAGE + positions % PAGE].astype(np.float32)
  @property
  def written(self) -> np.ndarray:
    """The row of the cache that each sequence's step writes"""
    return self.tables[np.arange(MOST), self.lasts // PAGE] * PAGE + self.lasts % PAGE

class KeptWeights(Weights):
  """Whole matrices and single experts, dequantized once"""
  def __init__(self, path: Path):
    super().__init__(path, np.float32)
    self.kept: dict[Any, np.ndarray] = {}
  def __call__(self, name: str, index: Any = ...) -> np.ndarray:
    if isinstance(index, (slice, np.ndarray)): return super().__call__(name, index)
    key = name, index if index is ... else int(index)
    if key not in self.kept: self.kept[key] = super().__call__(name, index)
    return self.kept[key]

def attention_of(w: Weights, c: Any, block: int, x: np.ndarray, s: Sequences) -> np.ndarray:
  """What oracle.attention adds to the last position of each sequence, over rows that are given"""
  b, (cos, sin, scale) = f"blk.{block}.", rope_and_scale(c, CONTEXT)
  cos, sin, low_rank = cos[s.lasts], sin[s.lasts], b + "attn_q_a.weight" in w
  q = rms_norm(x @ w(b + "attn_q_a.weight").T, w(b + "attn_q_a_norm.weight"), c.eps) if low_rank else x
  q = (q @ w(b + ("attn_q_b.weight" if low_rank else "attn_q.weight")).T).reshape(MOST, c.heads, c.nope + c.rope)
  latent, k_pe = np.split(x @ w(b + "attn_kv_a_mqa.weight").T, [c.kv_lora], -1)
  own = np.concatenate([rms_norm(latent, w(b + "attn_kv_a_norm.weight"), c.eps), rotate(k_pe[:, None], cos, sin)[:, 0]], -1)
  q_latent = np.einsum("thn,hln->thl", q[..., :c.nope], w(b + "attn_k_b.weight"), optimize=True)
  query, out = np.concatenate([q_latent, rotate(q[..., c.nope:], cos, sin)], -1), []
  for i in range(MOST):
    keys = np.concatenate([s.rows(block, i), own[i:i + 1]])
    out.append(softmax(query[i] @ keys.T * scale) @ keys[:, :c.kv_lora])
  return np.einsum("thl,hvl->thv", np.stack(out), w(b + "attn_v_b.weight"), optimize=True).reshape(MOST, -1) @ w(b + "attn_output.weight").T

def step_of_oracle(w: Weights, s: Sequences, tie: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
  """(MOST, vocab) logits, and each sequence's smallest margin of a router's choice. tie: see oracle.route"""
  c = config(w)
  x, margin = w("token_embd.weight", s.tokens), np.full(MOST, np.inf)
  for i in range(c.blocks):
    b = f"blk.{i}."
    x = x + attention_of(w, c, i, rms_norm(x, w(b + "attn_norm.weight"), c.eps), s)
    h = rms_norm(x, w(b + "ffn_norm.weight"), c.eps)
    if i < c.dense: x = x + swiglu(h, *[w(f"{b}ffn_{name}.weight") for name in ("gate", "up", "down")])
    else:
      y, here = mixture(w, c, b, h, tie)
      x, margin = x + y, np.minimum(margin, here)
  x = rms_norm(x, w("output_norm.weight"), c.eps)
  return x @ w("output.weight" if "output.weight" in w else "token_embd.weight").T, margin

# ---- --logits ----

class DecodeStep:
  """A recorded step of so many rows, as the runner has it, that leaves its logits"""
  def __init__(self, model: Transformer, size: int):
    self.size, self.replay = size, Replay()
    self.token, self.start, self.tables = (to_device(np.zeros(shape, np.int32)) for shape in (size, size, (size, model.pages)))
    self.logits = model.logits(model.decode_step(self.start, self.tables), self.token, self.replay.run)
  def __call__(self, s: Sequences, own: np.ndarray) -> np.ndarray:
    """Logits of the sequences `own`; rows behind them are not there"""
    for tensor, values in ((self.token, s.tokens), (self.start, s.lasts), (self.tables, s.tables)):
      padded = np.zeros(tensor.shape, np.int32)
      padded[:len(own)] = values[own]
      write(tensor, padded)
    self.replay()
    return read(self.logits)[:len(own)]

class LogitsJudge:
  """Logits of all sequences, by the oracle's. The other outcome of a router's choice is as right where its margin is small, as for oracle.Judge"""
  def __init__(self, path: Path, s: Sequences, limit: float):
    w, self.limit, self.tie = KeptWeights(path), limit, (2 * limit) ** .5
    (self.want, margins), self.other = step_of_oracle(w, s), step_of_oracle(w, s, self.tie)[0]
    self.margins, self.near = margins, margins < self.tie

  def nearer(self, got: np.ndarray) -> np.ndarray:
    """(MOST,): whether the other outcome is what these logits come of"""
    return self.near & (errors(got, self.other) < errors(got, self.want))

  def check(self, name: str, s: Sequences, got: np.ndarray, alone: np.ndarray, batch_invariant: bool) -> None:
    want = np.where(self.nearer(got)[:, None], self.other, self.want)
    error, chosen = np.nan_to_num(errors(got, want), nan=np.inf), got.argmax(-1)
    alone_right = errors(alone, np.where(self.nearer(alone)[:, None], self.other, self.want)) < self.limit
    from_alone = np.where(alone_right & (self.nearer(got) == self.nearer(alone)), errors(got, alone), 0.0)
    margin = (want.max(-1) - want[np.arange(MOST), chosen]) / np.linalg.norm(want, axis=-1)
    worst, others = int(error.argmax()), chosen != want.argmax(-1)
    same = (got == alone).all(-1)
    near = (error < self.limit).all() and (from_alone < 4 * self.limit).all() and (margin[others] < self.tie).all()
    right = bool(near and (same.all() or not batch_invariant))
    differ = ", ".join(f"{m:.1e}" for m in sorted(margin[others]))
    judged = f"NMSE at most {error[worst]:.1e} (limit {self.limit:.0e}; at {s.lasts[worst]}; {self.nearer(got).sum()} by another router's choice)"
    beside = f"of alone {from_alone.max():.1e}, {same.sum()} of {MOST} the same bytes"
    if not right: beside += f"; routers' margins of the wrong {np.sort(self.margins[error >= self.limit])}, near below {self.tie:.1e}"
    expect(right, f"{name}: {judged}, {beside}; other greedy tokens: {others.sum()}{f', by margins {differ}' if others.any() else ''}")

def check_cache(name: str, model: Transformer, s: Sequences) -> None:
  for i, cache in enumerate(model.cache):
    found = cache.numpy()
    changed = np.flatnonzero(((found != s.cache[i]) & ~(np.isnan(found) & np.isnan(s.cache[i]))).any(-1))
    strays = sorted({*changed.tolist()} - {*s.written.tolist()} - {*range(PAGE)})
    if strays or not np.isfinite(found[s.written]).all() or not np.isfinite(found[:PAGE]).all():
      expect(False, f"{name}: block {i}'s cache: rows {strays[:8]} changed that are not the step's, or what it wrote is not finite")

def check_logits(name: str, sizes: list[int], folder: Path, batch_invariant: bool) -> None:
  model = loaded(name, folder)
  model.batch_invariant = batch_invariant
  s = Sequences.random(model)
  steps = {size: DecodeStep(model, size) for size in sorted({1, *(least_batch(n) for n in sizes)})}
  if plain := {part for size in steps for part in model.plain_parts(model.decode_step(steps[size].start, steps[size].tables))}:
    expect(False, f"{name}: plain ops: {plain}")
  say(f"{name}: {len(steps)} steps recorded")
  compile_parts([part for step in steps.values() for part in step.replay.recorded])
  say(f"{name}: compiled")
  judge, rng = LogitsJudge(file_of(name, folder), s, FILES[name].limit), np.random.default_rng(2)
  say(f"{name}: judged by numpy")
  def logits(n: int) -> np.ndarray:
    """Of all sequences, n at a time"""
    for cache, rows in zip(model.cache, s.cache): write(cache, rows)
    got, order = np.full_like(judge.want, np.nan), rng.permutation(MOST)
    for own in np.split(order, range(n, MOST, n)): got[own] = steps[least_batch(n)](s, own)
    check_cache(f"{name}, {n} rows", model, s)
    return got
  alone = logits(1)
  for n in sizes: judge.check(f"{name}, {n:2d} rows", s, alone if n == 1 else logits(n), alone, batch_invariant)

def least_batch(n: int) -> int: return next(size for size in ROWS if size >= n)

# ---- --kernels ----

# the NMSE of the worst row: what test_primitives.py allows
LIMITS = {"decode": 2e-3, "few": 5e-5}

def primitive_of(name: str, *args: Any) -> Any:
  """A part of a step"""
  out = PRIMITIVES[name](*args)
  return tuple(out) if isinstance(out, list) else out
def groups_of(chosen: Tensor, experts: int) -> Tensor:
  target = target_of(chosen.device)
  assert target is not None
  return group_choices(target, chosen, experts)

class Case(NamedTuple):
  """args(n): of the first n sequences. Plain ops are given all of them, as a token's numbers do not depend on the others"""
  primitive: str
  what: str
  args: Callable[[int], tuple]

def cases(model: Transformer, s: Sequences) -> list[Case]:
  """A step's primitives with the model's weights"""
  rng, c, a = np.random.default_rng(3), model.config, model.blk[0].attn
  def floats(*shape: int) -> Callable[[int], Tensor]:
    values = rng.standard_normal((MOST, *shape)).astype(np.float32)
    return lambda n: to_device(values[:n])
  def step(n: int) -> Step: return Step.decode(to_device(s.lasts[:n].astype(np.int32)), to_device(s.tables[:n]))
  x, q, kv, context = floats(c.dim), floats(c.n_heads * model.rope.head), floats(c.cache_dim), floats(c.n_heads, c.kv_lora_rank)
  heads, low_rank, out = floats(c.n_heads * c.v_dim), floats(c.q_lora_rank), []
  def linear(what: str, *args: Any) -> None: out.append(Case("norm_linear", what, lambda n: (step(n), args[0](n), *args[1:])))
  if c.q_lora_rank:
    linear("q_a, kv_a", x, a.attn_norm, [a.attn_q_a, a.attn_kv_a_mqa], None, None)
    linear("q_b rotated", low_rank, a.attn_q_a_norm, [a.attn_q_b], model.rope, None)
  else: linear("q rotated, kv_a", x, a.attn_norm, [a.attn_q, a.attn_kv_a_mqa], model.rope, None)
  linear("head", x, model.output_norm, [model.output], None, None)
  out.append(Case("norm_linear", "with a residual", lambda n: (step(n), heads(n), None, [a.attn_output], None, x(n))))
  def attention(n: int) -> tuple:
    rows = s.cache[0] if not only_plain_ops() else np.nan_to_num(s.cache[0])   # plain ops read what is nobody's, and weigh it by zero
    cache = to_device(rows)
    return planned(step(n), a.attn_k_b, cache), q(n), kv(n), a.attn_k_b, a.attn_kv_a_norm, cache, model.rope, c.score_scale
  out.append(Case("latent_attention", "", attention))
  out.append(Case("attention_output", "", lambda n: (step(n), context(n), a.attn_v_b, a.attn_output, x(n))))
  for ffn in (block.ffn for block in model.blk):
    if isinstance(ffn, MLP): out.append(Case("feed_forward", "", lambda n, ffn=ffn: (step(n), x(n), ffn.ffn_norm, ffn.weights, x(n))))
    else:
      experts = FeedForward(ffn.ffn_gate_exps, ffn.ffn_up_exps, ffn.ffn_down_exps)
      for what, shared in (("beside a shared expert", ffn.shared and ffn.shared.weights), ("without one", None)):
        of_block = ffn.ffn_norm, ffn.ffn_gate_inp, ffn.routing, experts, shared
        out.append(Case("mixture", what, lambda n, of_block=of_block: (step(n), x(n), *of_block, x(n))))
  return out

def planned(step: Step, k_b: Any, cache: Tensor) -> Step:
  shape = None if only_plain_ops() else plan_shape(step, k_b, cache)
  return step if shape is None else replace(step, plan=attention_plan(step, shape).realize())

def results(primitive: str, args: tuple) -> tuple[Replay, list[Tensor]]:
  """A recording of the primitive, and what will hold its results; of the cache, which is written in place, nothing is looked at"""
  returned = (replay := Replay()).run(primitive_of, primitive, *args)
  outs = list(returned) if isinstance(returned, tuple) else [returned]
  return replay, outs[:1] if primitive == "latent_attention" else outs

def check_kernels(name: str, sizes: list[int], only: str, folder: Path) -> None:
  model = loaded(name, folder)
  s, recorded = Sequences.random(model), []
  for case in (case for case in cases(model, s) if only in f"{case.primitive} {case.what}"):
    of = PRIMITIVES[case.primitive]
    with plain_ops(): recorded.append((case, None, PLAIN, *results(case.primitive, case.args(MOST))))
    for n in sizes:
      args = case.args(n)
      recorded.append((case, n, of.choose(*args), *results(case.primitive, args)))
  plans = only in "attention_plan" or only in "group_choices"
  if not recorded and not plans: expect(False, f"--only {only}: expected a part of a case's name, found none with it")
  say(f"{name}: {len(recorded)} recorded")
  compile_parts([part for *_, replay, _ in recorded for part in replay.recorded])
  say(f"{name}: compiled")
  for case, n, form, replay, outs in recorded:
    replay()
    got = [read(out).astype(np.float64) for out in outs]
    if n is None:
      want = got
      continue
    composite = form == PLAIN and PRIMITIVES[case.primitive].composite
    limit, error = LIMITS.get("decode" if composite else form, 0.0), max(worst_row(a, b[:n]) for a, b in zip(got, want, strict=True))
    expect(error < limit, f"{name}: {case.primitive} {case.what}, {n:2d} rows, by {form}: NMSE of the worst row {error:.1e} (limit {limit:.0e})")
  for n in sizes: check_plans(model, s, n, only)

def worst_row(got: np.ndarray, want: np.ndarray) -> float:
  """inf where something is not finite"""
  return float(np.nan_to_num(errors(got, want), nan=np.inf).max())

def check_plans(model: Transformer, s: Sequences, n: int, only: str) -> None:
  """What is made of whole numbers: attention's plan, and the groups of choices, spread and all of the same experts"""
  rng, c = np.random.default_rng(n), model.config
  if n > 1 and only in "attention_plan":
    for longest in (1, PAGE, CONTEXT):
      lasts = rng.integers(0, longest, n).astype(np.int32)
      lasts[-1] = longest - 1
      step = Step.decode(to_device(lasts), to_device(s.tables[:n]))
      shape = plan_shape(step, model.blk[0].attn.attn_k_b, model.cache[0])
      assert shape is not None
      got = attention_plan(step, shape).numpy()
      with plain_ops(): want = attention_plan(step, shape).numpy()
      expect(same := np.array_equal(got, want), f"attention_plan, {n:2d} rows of up to {longest}: {'the same' if same else 'another'}")
  if c.n_experts and only in "group_choices":
    spread = np.stack([rng.permutation(c.n_experts)[:c.n_chosen] for _ in range(n)])
    for what, chosen in (("spread", spread), ("all alike", np.tile(spread[:1], (n, 1)))):
      got, flat, want = groups_of(to_device(chosen.astype(np.int32)), c.n_experts).numpy(), chosen.reshape(-1), []
      for e in range(c.n_experts):
        own = np.flatnonzero(flat == e).tolist()
        want += [[e, *part, *[-1] * (GROUP - len(part))] for part in (own[i:i + GROUP] for i in range(0, len(own), GROUP))]
      right = got[:len(want)].tolist() == want and bool((got[len(want):-SPARE, 0] == -1).all())
      expect(right, f"group_choices, {n:2d} rows, {what}: {'right' if right else 'wrong'}")

# ---- --engine ----

def unlikely(path: Path, ids: list[int], prompt: int, limit: float) -> list[int]:
  """Positions of tokens after the prompt that are neither the oracle's nor as good: as test_many.assert_likely has it"""
  logits, margins = forward(path, ids)
  tie, found = (2 * limit) ** .5, []
  for at in range(prompt, len(ids)):
    row = logits[at - 1]
    if row.max() - row[ids[at]] > tie * np.linalg.norm(row) and margins[at - 1] >= tie: found.append(at)
  return found

class Alone:
  """A model, its prompts, and what it says where there is nobody else"""
  LONGEST, PAGES = 40, 200
  def __init__(self, path: Path, limit: float):
    self.path, self.limit = path, limit
    self.runner = Runner(Transformer.from_gguf(read_gguf(path), 3 * PAGE, pool=lambda _: self.PAGES))
    replays = [self.runner.batch_of(size).replay() for size in ROWS]
    chunks = {kind: self.runner.record_chunk(*kind) for kind in self.runner.kinds}
    say(f"{path.stem}: {len(replays) + len(chunks)} steps recorded")
    compile_parts([part for replay in (*replays, *chunks.values()) for part in replay.recorded])
    self.runner.add_chunks(chunks)
    say(f"{path.stem}: compiled")
    self.engine, self.said, rng = Engine(self.runner, self.PAGES), {}, random.Random(1)
    vocab = min(self.runner.vocab_size, 320)
    bases = [[rng.randrange(vocab) for _ in range(2 * PAGE + 12)] for _ in range(3)]
    self.prompts = [rng.choice(bases)[:rng.choice((0, 30, PAGE - 9, PAGE + 9, 2 * PAGE - 9, 2 * PAGE + 9))] +
                    [rng.randrange(vocab) for _ in range(rng.choice((1, 2, 9, 13)))] for _ in range(30)]
    self.crossing = [[rng.randrange(vocab) for _ in range(PAGE - rng.randint(2, 20))] for _ in range(30)]   # their answers go on into the next page
  def says(self, ids: list[int]) -> list[int]:
    if (key := tuple(ids)) not in self.said:
      self.engine.forget()
      self.said[key] = list(self.engine.generate(ids, self.LONGEST))
      bad = unlikely(self.path, ids + self.said[key], len(ids), self.limit)
      if bad: expect(False, f"{self.path.stem}: alone, tokens at {bad} of a prompt of {len(ids)} are not the oracle's")
    return self.said[key]

def schedule(alone: Alone, seed: int) -> None:
  rng = random.Random(seed)
  most = rng.choice((3, 9, 17, MOST))
  prompts, limits = (alone.crossing, (30, Alone.LONGEST)) if seed % 2 else (alone.prompts, (1, 3, 15, Alone.LONGEST))
  requests = [Request(rng.choice(prompts), limit=rng.choice(limits)) for _ in range(rng.randint(most, most + 8))]
  pages = rng.choice((most // 2 + 4, most + 4, 2 * most, Alone.PAGES))
  engine, aborts = Pressed(alone.runner, pages, most, rng.choice((0.0, math.inf))), rng.choice((0.0, 0.0, .02))
  rows: set[int] = set()
  set_batch = alone.runner.set_batch
  def counted(batch: list[BatchRow]) -> None:
    rows.add(len(batch))
    set_batch(batch)
  alone.runner.set_batch = counted  # type: ignore[method-assign]
  try: sequences = run(engine, requests, rng, rng.choice(((0,), (0, 0, 0, 1, 5))), aborts)
  finally: del alone.runner.set_batch
  same, bad = 0, []
  for request, s in zip(requests, sequences, strict=True):
    want = alone.says(list(request.ids))[:request.limit]
    if s.reason != "abort" and (s.reason, len(s.produced)) != ("length", len(want)): bad.append(f"ended by {s.reason} after {len(s.produced)}")
    if s.produced == want[:len(s.produced)]: same += 1
    elif at := unlikely(alone.path, s.ids, s.prompt, alone.limit): bad.append(f"tokens at {at} are not the oracle's")
  ran = f"{len(requests)} sequences, batches of up to {max(rows)} rows, {pages} pages, {engine.preempted} gave way, {engine.evicted} pages evicted"
  said = f"{same} say what they say alone, {len(requests) - same - len(bad)} others what is as likely"
  expect(not bad, f"{alone.path.stem}, schedule {seed}: {ran}: {'; '.join([said, *bad])}")

def check_engine(names: list[str], schedules: int, folder: Path) -> None:
  for i, name in enumerate(names):
    alone = Alone(file_of(name, folder), FILES[name].limit)
    for seed in range(i, schedules, len(names)): schedule(alone, seed)

# ---- --block ----

def run_block(rows: int, model: str, folder: Path) -> None:
  """Steps of the first two blocks, a dense one and one of experts, with a small vocabulary"""
  path, rng = write_model(folder / f"{model}-block.gguf", model, "Q4_0", blocks=2, vocab=1024)[0], np.random.default_rng(4)
  runner = Runner(Transformer.from_gguf(read_gguf(path), 2 * PAGE, pool=lambda _: 1 + 2 * rows))
  say(f"{path.stem}: loaded")
  def row(i: int) -> BatchRow:
    position = int(rng.integers(0, 2 * PAGE - 2))
    ids = rng.integers(0, 320, position + 1).tolist()
    return BatchRow(ids[-1], position, [1 + i, 1 + rows + i], Sampling(), ids, position)
  runner.set_batch([row(i) for i in range(rows)])
  for _ in range(2):
    runner.launch()
    tokens = runner.read()
  runner.wait()
  expect(all(np.isfinite(c.numpy()).all() for c in runner.model.cache) and bool(((0 <= tokens) & (tokens < 1024)).all()),
         f"{rows} rows twice, {runner.kernels_a_token} launches a step: tokens {tokens.tolist()[:8]}")

# ---- all ----

def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("--kernels", action="store_true")
  p.add_argument("--logits", action="store_true")
  p.add_argument("--engine", action="store_true")
  p.add_argument("--block", type=int, metavar="ROWS")
  def sizes(text: str) -> list[int]: return [int(n) for n in text.split(",")]
  p.add_argument("--sizes", type=sizes, help=f"of batches (default: {','.join(map(str, SIZES))}; of --kernels {','.join(map(str, ROWS[1:]))})")
  p.add_argument("--models", help=f"of {', '.join(FILES)}; of --block, of extra/mkgguf.py's")
  p.add_argument("--only", default="", help="cases of --kernels with this in their name")
  p.add_argument("--schedules", type=int, default=20, help="of --engine (default 20)")
  p.add_argument("--batch-invariant", action="store_true", help="--logits by steps whose rows have the bytes that they have alone, all of them")
  p.add_argument("--mock", action="store_true", help="on the mock of CUDA")
  args = p.parse_args()
  def names(default: str) -> list[str]: return (args.models or default).split(",")
  with on_cuda() if args.mock else contextlib.nullcontext(), tempfile.TemporaryDirectory() as folder:
    say(f"{Device.DEFAULT} {Device[Device.DEFAULT].renderer.target}")
    if args.kernels:
      for name in names("glm"): check_kernels(name, args.sizes or list(ROWS[1:]), args.only, Path(folder))
    if args.logits:
      for name in names("small-glm,small-v3,small-ds,small-youtu,tiny,glm"):
        check_logits(name, args.sizes or list(SIZES), Path(folder), args.batch_invariant)
    if args.engine: check_engine(names("least-ds,least-glm"), args.schedules, Path(folder))
    if args.block: run_block(args.block, (args.models or "glm").split(",")[0], Path(folder))
  say(f"{len(wrong)} wrong" if wrong else "all right")
  sys.exit(bool(wrong))

if __name__ == "__main__": main()

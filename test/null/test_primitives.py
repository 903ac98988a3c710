"""Every form of every primitive against its plain ops, over one table of cases, on the CPU and on the mocks of CUDA and Metal.

A case is a primitive, what makes its arguments, and the forms that are to take them. Shapes are odd, even and tails of a tile, a warp, a group of
rows; every block format is met by the product that all others are made of. The worst row decides."""
from __future__ import annotations
import contextlib, itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple
import numpy as np, pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, dequantize
from helpers import HALVES, decoding, prefilling, random_weight
from mockcuda import on_cuda
from mockmetal import on_metal
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.apps.mla import RMSNorm
from tinygrad.apps.quantized import QuantizedEmbedding, QuantizedExpertWeights, QuantizedLinear, QuantizedWeight
from tinygrad.apps.rope import Rope, Temperature, query_table, rope_table
from tinygrad.nn import cpu, cutoff, drafts, draw, embedding, intrinsics, kernel, likeliest, matvec, mla_attention, moe, norm_linear
from tinygrad.nn.nucleus import Nucleus
from tinygrad.nn.lora_query import QueryWeights
from tinygrad.nn.primitive import PRIMITIVES, Primitive, plain_ops
from tinygrad.nn.routing import Gating, Routing
from tinygrad.nn.latent_cache import CODES, Pages, RowFormat
from tinygrad.nn.split_plan import PlanShape
from tinygrad.nn.step import Step

pytestmark = pytest.mark.usefixtures("planes_by_numpy")

DEVICES = {"CPU": contextlib.nullcontext, "CUDA": on_cuda, "HOPPER": lambda: on_cuda("sm_90"), "METAL": on_metal}

def normal(*shape: int) -> np.ndarray: return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
def tensor(values: np.ndarray) -> Tensor: return Tensor(values).realize()
def floats(*shape: int) -> Tensor: return tensor(normal(*shape))
def residual(tokens: int, rows: int, size: float) -> Tensor:
  """size: about that of what it is added to, as one that is lost would not be seen otherwise. Its numbers are no other tensor's"""
  return tensor(np.float32(size) * normal(rows, tokens, 1).reshape(tokens, rows))
def ids(*values: int) -> Tensor: return tensor(np.int32(values))
def norm(n: int) -> RMSNorm: return RMSNorm(tensor(1 + 0.1 * normal(n)), 1e-5)
def load(kind: T, *shape: int, cls: type[QuantizedWeight] = QuantizedLinear) -> QuantizedWeight:
  return cls.load(kind, shape, random_weight(kind, shape)[0])
def experts(kind: T, *shape: int) -> QuantizedWeight: return load(kind, *shape, cls=QuantizedExpertWeights)
def gate_and_up(kind: T, *shape: int, cls: type[QuantizedWeight] = QuantizedLinear) -> tuple[QuantizedWeight, QuantizedWeight]:
  """Of one shape, and not the same numbers: the rows of the one are those of the other from the last on"""
  data = random_weight(kind, shape)[0]
  backwards = np.ascontiguousarray(data.reshape(int(np.prod(shape[:-1])), -1)[::-1]).reshape(data.shape)
  return cls.load(kind, shape, data), cls.load(kind, shape, backwards)
def width(kind: T) -> int: return max(GGML_QUANT_SIZES[kind][0], 96)

class Sequences(int):
  """A token of each of so many sequences. A plain number: neighbouring tokens of one"""

def step_of(tokens: int, start: int = 5) -> Step:
  if tokens == 1 or isinstance(tokens, Sequences): return decoding(*((start + 7 * i) % 100 for i in range(tokens)))
  return prefilling(start, tokens)

# ---- arguments, as a function of the number of tokens ----

def product(kind: T, rows: int) -> Callable:
  def of(tokens: int) -> tuple: return floats(tokens, width(kind)), load(kind, rows, width(kind))
  return of
def product_by_id(kind: T) -> Callable:
  def of(tokens: int) -> tuple:
    sel = np.int32([[(2 + i) % 3, i % 3] for i in range(tokens)])
    return floats(tokens, 1, width(kind)), experts(kind, 3, 21, width(kind)), tensor(sel)
  return of
def linear(rows: int, rotated: bool, inner: int = 96) -> Callable:
  def of(tokens: int) -> tuple:
    rope = Rope(rope_table(16, 1e4, 128), 32, 16) if rotated else None
    added = None if rotated else residual(tokens, rows, 40)
    return step_of(tokens), floats(tokens, inner), norm(inner), [load(T.Q4_0, rows, inner), load(T.Q8_0, 21, inner)], rope, added
  return of
def growing(tokens: int) -> tuple:
  """Queries, by a table of all pairs of their heads"""
  step, x, norm_of_x, weights, *_ = linear(96, True)(tokens)
  return step, x, norm_of_x, weights, Rope(query_table(Temperature(.5, 4), 16, 16, 1e4, 128), 32, 0), None
def with_residual(tokens: int) -> tuple:
  return step_of(tokens), floats(tokens, 96), None, [load(T.Q5_1, 33, 96)], None, residual(tokens, 33, 100)
def two_and_one(tokens: int) -> tuple:
  """One vector that a block's threads share evenly, and one that they do not"""
  return [(floats(tokens, 1100), [norm(1100), RMSNorm(tensor(2 + normal(1100)), 1e-2)]), (10 * floats(tokens, 2048), [norm(2048)])],
CODED = RowFormat(128, 32, True)   # of all caches of 8 bits
def attention(heads: int, latent: int, rotated: int, start: int, coded: bool = False) -> Callable:
  def of(tokens: int) -> tuple:
    step, k_b = step_of(tokens, start), load(T.Q8_0, heads, latent, 64)
    rows = tensor(normal(step.tables.shape[0] * 128, latent + rotated).astype(np.float16))
    cache = rows.cast(dtypes.float).contiguous().realize() if cpu.is_cpu(Device.DEFAULT) else rows
    if coded: cache = CODED.encoded(rows).contiguous().realize()
    shape = mla_attention.plan_shape(step, k_b, cache)
    if shape is not None: step = replace(step, plan=mla_attention.attention_plan(step, shape).realize())
    return (step, floats(tokens, heads * (64 + rotated)), floats(tokens, latent + rotated), k_b, norm(latent), cache,
            Rope(rope_table(rotated, 1e4, 128), 64 + rotated, 64), 0.002)
  return of
def plan(blocks: int, positions: int) -> Callable:
  def of(tokens: int) -> tuple: return step_of(tokens), PlanShape.of(Pages(9, 2, tokens, RowFormat(32, 8)), blocks, positions)
  return of
def output(kind: T) -> Callable:
  def of(tokens: int) -> tuple:
    return step_of(tokens), floats(tokens, 3, 64), load(T.Q8_0, 3, 32, 64), load(kind, 50, 96), residual(tokens, 50, 3e4)
  return of
def attention_of_a_block(tokens: int, coded: bool = False, start: int = 40) -> tuple:
  step, q, kv, k_b, norm_of_kv, cache, rope, _ = attention(3, 128, 32, start, coded)(tokens)
  scale = 1e-4   # what the queries' int8 costs is latent_attention's case
  weights = mla_attention.LatentWeights(norm_of_kv, k_b, load(T.Q8_0, 3, 32, 128), load(T.Q4_0, 50, 96), scale)
  return step, residual(tokens, 50, 8e3), q, kv, weights, cache, rope
def attention_by_rank(tokens: int) -> tuple:
  step, added, _, kv, weights, cache, rope = attention_of_a_block(tokens)
  small = RMSNorm(norm(256).weight * 0.01, 1e-5)   # as are attention_of_a_block's queries
  return step, added, floats(tokens, 256), kv, QueryWeights(small, load(T.Q4_0, 3 * (64 + 32), 256)), weights, cache, rope
def gated(router: bool, kind: T) -> Callable:
  def of(tokens: int) -> tuple:
    return step_of(tokens), floats(tokens, 256), norm(256), *gate_and_up(kind, 37, 256), load(T.F32, 9, 256) if router else None
  return of
def dense(tokens: int) -> tuple:
  weights = moe.FeedForward(*gate_and_up(T.Q4_0, 96, 64), load(T.Q5_1, 64, 96))
  return step_of(tokens), floats(tokens, 64), norm(64), weights, residual(tokens, 64, 8e5)
def routing(gating: int) -> Routing: return Routing(3, gating, gating != 1, 1.8, tensor(0.1 * normal(7)) if gating == 2 else None)
def chosen(gating: int, kind: T, rows: int, wide: int = 256) -> Callable:
  def of(tokens: int) -> tuple:
    gate, up = gate_and_up(kind, 7, rows, wide, cls=QuantizedExpertWeights)
    return step_of(tokens), floats(tokens, wide), norm(wide), gate, up, floats(tokens, 7), routing(gating)
  return of
def in_groups(count: int, E: int) -> Routing: return Routing(count, 2, True, 1.8, tensor(0.1 * normal(E)), 4, 2)
def chosen_in_groups(tokens: int) -> tuple:
  """More experts than a block has threads"""
  gate, up = gate_and_up(T.Q4_0, 48, 5, 64, cls=QuantizedExpertWeights)
  return step_of(tokens), floats(tokens, 64), norm(64), gate, up, floats(tokens, 48), in_groups(4, 48)
def down(shared: bool, kind: T) -> Callable:
  def of(tokens: int) -> tuple:
    sel = tensor(np.int32([[(6 + i) % 7, (2 + i) % 7, i % 7] for i in range(tokens)]))
    beside = (floats(tokens, 64), load(T.Q8_0, 45, 64)) if shared else None
    return step_of(tokens), floats(tokens, 3, 256), experts(kind, 7, 45, 256), sel, residual(tokens, 45, 2e4 if shared else 2e3), beside
  return of
def mixed(shared: bool, kind: T = T.Q4_0, grouped: bool = False, wide: int = 96) -> Callable:
  """kind: of the shared expert's gate and up"""
  E = 12 if grouped else 7
  def of(tokens: int) -> tuple:
    one = moe.FeedForward(*gate_and_up(kind, 64, wide), load(T.Q8_0, wide, 64)) if shared else None
    many = moe.FeedForward(*gate_and_up(T.Q4_0, E, 64, wide, cls=QuantizedExpertWeights), experts(T.Q5_1, E, wide, 64))
    how, added = in_groups(3, E) if grouped else routing(2), residual(tokens, wide, 3e6 if kind is T.Q4_0 else 3e8)
    return step_of(tokens), floats(tokens, wide), norm(wide), load(T.F32, E, wide), how, many, one, added
  return of

def linear_of_floats(tokens: int) -> tuple:
  return step_of(tokens), floats(tokens, 96), norm(96), [load(T.F16, 33, 96), load(T.BF16, 21, 96)], None, residual(tokens, 33, 40)
def mixture_of_floats(tokens: int) -> tuple:
  """Beside a router of another type"""
  shared = moe.FeedForward(*gate_and_up(T.F16, 64, 96), load(T.F16, 96, 64))
  chosen_of = moe.FeedForward(*gate_and_up(T.F16, 7, 64, 96, cls=QuantizedExpertWeights), experts(T.F16, 7, 96, 64))
  return step_of(tokens), floats(tokens, 96), norm(96), load(T.F32, 7, 96), routing(2), chosen_of, shared, residual(tokens, 96, 3e6)

def rows_of_embedding(kind: T) -> Callable:
  def of(tokens: int) -> tuple: return ids(*range(7, 7 + tokens)), load(kind, 37, width(kind), cls=QuantizedEmbedding)
  return of
def positions(tokens: int) -> tuple:
  tables = tensor(np.tile(np.int32([[4, 0], [0, 5]]), (tokens, 1))[:tokens])
  return ids(*range(tokens)), ids(*range(41, 41 + tokens)), tables, tensor(np.full((tokens, 4), -1, np.int32))
def started(tokens: int) -> tuple:
  token, start, *others = positions(tokens)
  return start, token, *others
def letters(tokens: int) -> tuple:
  text = ids(*np.random.default_rng(tokens).integers(0, 3, tokens * 700)).reshape(tokens, 700).contiguous()
  return text, ids(*[600] * tokens), ids(*range(596, 596 + tokens)), 3
def noise(tokens: int) -> draw.Noise:
  """Every third row takes the likeliest"""
  values, key = np.float32([[i % 3, 9] for i in range(1, 1 + tokens)]), np.uint32([[i + 5, 0] for i in range(tokens)])
  return draw.Noise(tensor(values), tensor(key), ids(*range(70, 70 + tokens)))
def of_nuclei(tokens: int) -> tuple[draw.Noise, Nucleus]:
  """Wide ones and narrow ones, one of all tokens, one with a floor; every fourth row takes the likeliest"""
  shares = [(.95, 0), (.01, 0), (1, 0), (.5, .2), (1, .3)]
  values = np.float32([[i % 4, *shares[i % 5]] for i in range(1, 1 + tokens)])
  return noise(tokens)._replace(values=tensor(values)), Nucleus(1, 2)
def next_of_nuclei(tokens: int) -> tuple:
  """Draws are numbered by the positions that the kernel moves on"""
  (drawn, nucleus), (token, start, *others) = of_nuclei(tokens), positions(tokens)
  return floats(tokens, 300), drawn._replace(counter=start), nucleus, token, start, *others
def totalled(n: int) -> Callable:
  def of(tokens: int) -> tuple: return (x := floats(tokens, n)), likeliest.likeliest(x, 3).realize()
  return of
def told(tokens: int) -> tuple:
  others = tensor(np.arange(5 * tokens, dtype=np.int32).reshape(tokens, 5))
  log = tensor(np.full((tokens, 4, 6, 2), -1, np.int32))
  return floats(tokens, 301), floats(tokens, 1).reshape(-1), ids(*range(7, 7 + tokens)), others, ids(*range(42, 42 + tokens)), log
def to_cut(weighed: bool) -> Callable:
  def of(tokens: int) -> tuple:
    x, target = floats(tokens, 301), np.arange(3, 3 + tokens)
    if not weighed: return x, None, tensor(np.uint32(target))
    return x, (x.exp() * 2 ** 30).cast(dtypes.uint64).realize(), tensor(target.astype(np.uint64) << 31)
  return of

# ---- the table ----

class Case(NamedTuple):
  of: Primitive
  name: str
  args: Callable[[int], tuple]         # of the number of tokens
  points: list[tuple[str, str, int]]   # (device, the form that is to take it, tokens)

def cpu_(few: tuple[int, ...] = (1,), many: tuple[int, ...] = ()) -> list[tuple[str, str, int]]:
  return [("CPU", "cpu_decode", n) for n in few] + [("CPU", "cpu_prefill", n) for n in many]
def cpu_few(*counts: int) -> list[tuple[str, str, int]]: return [("CPU", "cpu_few", Sequences(n)) for n in counts]
def gpus(few: tuple[int, ...] = (1,), many: tuple[int, ...] = (), metal: str = "decode") -> list[tuple[str, str, int]]:
  """metal: the form of few tokens there"""
  short = {"CUDA": "decode", "METAL": metal}
  return [(device, form, n) for device, form in short.items() for n in few] + [(device, "prefill", n) for device in short for n in many]
def few(*counts: int) -> list[tuple[str, str, int]]:
  """Points of a few tokens on tensor cores"""
  return [("CUDA", "few", Sequences(n)) for n in counts]
INT8 = [("CUDA", "decode", 1), ("CUDA", "decode", Sequences(2))]   # points of a composite that stores int8 between its launches
def sequences(*counts: int, metal: tuple[int, ...] = ()) -> list[tuple[str, str, int]]:
  """Points of a matrix times several vectors on the GPUs: a token of each of so many sequences. metal: and of so many there"""
  return [(device, "decode", Sequences(n)) for device, more in (("CUDA", ()), ("METAL", metal)) for n in (*counts, *more)]

CASES = [
  *(Case(norm_linear.mul_mat, kind.name, product(kind, rows), cpu_() + gpus())
    for kind, rows in zip(HALVES, itertools.cycle((33, 34, 16, 7)))),
  Case(norm_linear.mul_mat, "many rows", product(T.Q4_K, 34), cpu_((), (67,)) + cpu_few(2, 19) + gpus((19,))),
  Case(norm_linear.mul_mat, "a matrix a head", lambda tokens: (floats(tokens, 3, 64), load(T.Q5_1, 3, 9, 64)), cpu_few(3) + gpus() + sequences(3, 8)),
  Case(norm_linear.mul_mat, "id Q4_K", product_by_id(T.Q4_K), cpu_(many=(5,)) + gpus((1,), metal="msl")),
  Case(norm_linear.mul_mat, "id IQ4_XS", product_by_id(T.IQ4_XS), cpu_(many=(5,)) + gpus((5,))),
  Case(norm_linear.norm_linear, "33 rows", linear(33, False), cpu_(many=(19,)) + gpus(many=(33,)) + sequences(2, metal=(5,))),
  Case(norm_linear.norm_linear, "34 rows", linear(34, False), cpu_() + gpus() + sequences(2, metal=(8,))),
  Case(norm_linear.norm_linear, "96 rows rotated", linear(96, True), cpu_(many=(2, 33)) + gpus(many=(33,)) + sequences(2, metal=(9,))),
  Case(norm_linear.norm_linear, "rows that grow", growing, cpu_(many=(33,)) + cpu_few(3) + gpus(many=(33,)) + few(20)),
  Case(norm_linear.norm_linear, "residual", with_residual, cpu_(many=(19,)) + gpus(many=(2,), metal="msl") + sequences(2, metal=(4,))),
  Case(mla_attention.latent_attention, "5 heads at 40", attention(5, 128, 32, 40), cpu_(many=(29,)) + gpus(many=(17,))),
  Case(mla_attention.latent_attention, "2 heads at 0", attention(2, 128, 32, 0), cpu_(many=(2,)) + gpus()),
  Case(mla_attention.latent_attention, "3 heads at 63", attention(3, 128, 32, 63), cpu_(many=(3,)) + gpus((), (3,))),
  Case(mla_attention.latent_attention, "6 heads at 70", attention(6, 128, 64, 70), gpus((), (19,))[:1]),
  Case(mla_attention.latent_attention, "5 heads of several", attention(5, 128, 32, 40), gpus((Sequences(3),))),
  Case(mla_attention.latent_attention, "8 bits", attention(5, 128, 32, 40, True), cpu_() + gpus((), (17,)) + sequences(2)[:1]),
  *(Case(mla_attention.attention_plan, f"{blocks} blocks", plan(blocks, 16), gpus((Sequences(n),))) for blocks, n in ((2, 3), (200, 33), (130, 64))),
  Case(mla_attention.attention, "of a block", attention_of_a_block, INT8[:1]),
  *(Case(mla_attention.attention, f"of a long chunk{', 8 bits' * coded}", lambda tokens, coded=coded: attention_of_a_block(tokens, coded, 3),
         [("CUDA", "prefill", 120), ("CPU", "cpu_prefill", 90)]) for coded in (False, True)),
  Case(mla_attention.lora_attention, "of a block", attention_by_rank, [("HOPPER", "decode", 1)]),
  Case(norm_linear.side_by_side, "two norms and one", two_and_one, [("CUDA", "decode", 1), ("CUDA", "decode", 3), ("METAL", "decode", 2)]),
  Case(norm_linear.attention_output, "heads", output(T.Q4_0), INT8 + gpus((), (33,))),
  Case(norm_linear.attention_output, "jobs of four rows", output(T.Q5_1), INT8),
  Case(moe.gate_up, "Q4_K router", gated(True, T.Q4_K), cpu_(many=(27,)) + gpus(metal="msl") + sequences(2, 5)),
  Case(moe.gate_up, "IQ4_XS", gated(False, T.IQ4_XS), cpu_(many=(2,)) + gpus() + sequences(8)),
  Case(moe.feed_forward, "dense", dense, INT8 + gpus((), (33,))),
  Case(moe.expert_gate_up, "Q4_0 softmax", chosen(1, T.Q4_0, 33), cpu_(many=(27,)) + gpus(metal="msl")),
  Case(moe.expert_gate_up, "Q4_1 softmax", chosen(1, T.Q4_1, 36), sequences(3)),
  Case(moe.expert_gate_up, "Q6_K sigmoid", chosen(2, T.Q6_K, 21), cpu_() + gpus(metal="msl")),
  Case(moe.expert_gate_up, "Q5_K sigmoid", chosen(2, T.Q5_K, 20), sequences(8)),
  Case(moe.expert_gate_up, "a unit that few lanes have", chosen(2, T.Q4_0, 32, 1056), gpus(metal="msl")),
  Case(moe.expert_gate_up, "F16 softmax of the chosen", chosen(3, T.F16, 36), cpu_() + gpus() + sequences(2)),
  Case(moe.expert_gate_up, "in groups", chosen_in_groups, cpu_() + gpus(metal="msl")),
  Case(moe.expert_down, "Q5_K shared", down(True, T.Q5_K), cpu_(many=(27,)) + gpus(metal="msl") + sequences(5)),
  Case(moe.expert_down, "IQ4_NL", down(False, T.IQ4_NL), cpu_(many=(27,)) + gpus() + sequences(9)),
  Case(moe.mixture, "two tokens", mixed(False), INT8 + gpus((), (2,))),
  Case(moe.mixture, "shared", mixed(True), INT8[:1] + [("CUDA", "pairs", Sequences(n)) for n in (2, 3)] + gpus((), (19,))),
  Case(moe.mixture, "in groups", mixed(True, grouped=True), INT8[:1] + few(9)),
  Case(moe.mixture, "shared IQ4_NL", mixed(True, T.IQ4_NL), [("CUDA", "pairs", Sequences(2))]),
  Case(moe.mixture, "lanes without a unit", mixed(True, grouped=True), [("CUDA", "pairs", Sequences(4))]),
  Case(norm_linear.norm_linear, "CPU, few: 33 rows", linear(33, False), cpu_few(2, 33)),
  Case(norm_linear.norm_linear, "CPU, few: 96 rows rotated", linear(96, True), cpu_few(3, 5)),
  Case(norm_linear.norm_linear, "CPU, few: residual", with_residual, cpu_few(13)),
  Case(mla_attention.latent_attention, "CPU, few: 5 heads", attention(5, 128, 32, 40), cpu_few(2, 3, 12)),
  Case(norm_linear.attention_output, "CPU, few: heads", output(T.Q4_0), cpu_few(2, 9)),
  Case(moe.feed_forward, "CPU, few: dense", dense, cpu_few(3, 7)),
  Case(moe.gate_up, "CPU, few: Q4_K router", gated(True, T.Q4_K), cpu_few(8)),
  Case(moe.expert_gate_up, "CPU, few: Q6_K sigmoid", chosen(2, T.Q6_K, 96), cpu_few(2, 12)),
  Case(moe.expert_down, "CPU, few: Q5_K shared", down(True, T.Q5_K), cpu_few(5)),
  Case(moe.mixture, "CPU, few: shared", mixed(True), cpu_few(2, 5)),
  Case(moe.mixture, "CPU, few: no shared expert", mixed(False), cpu_few(9)),
  Case(norm_linear.norm_linear, "few: 33 rows", linear(33, False), few(3, 9)),
  Case(norm_linear.norm_linear, "few: floats", linear_of_floats, few(2)),
  Case(moe.mixture, "few: floats", mixture_of_floats, few(2)),
  Case(norm_linear.norm_linear, "few: 96 rows rotated", linear(96, True), few(20)),
  Case(norm_linear.norm_linear, "few: residual", with_residual, few(16)),
  Case(norm_linear.attention_output, "few: heads", output(T.Q4_0), few(33)),
  Case(mla_attention.attention, "few: of a block", attention_of_a_block, few(3, 6, 33)),
  Case(mla_attention.lora_attention, "few: of a block", attention_by_rank, few(3, 6, 33)),
  Case(mla_attention.attention, "few: 8 bits", lambda tokens: attention_of_a_block(tokens, True), few(6)),
  Case(moe.feed_forward, "few: dense", dense, few(16, 64)),
  Case(moe.mixture, "few: no shared expert", mixed(False), few(16)),
  Case(moe.mixture, "few: shared", mixed(True), few(5, 9, 33)),
  *(Case(embedding.embedding, kind.name, rows_of_embedding(kind), cpu_((1, 19)) + gpus((1, 19))) for kind in (T.Q4_0, T.Q6_K)),
  *(Case(draw.argmax, str(n), lambda tokens, n=n: (floats(tokens, n),), cpu_((1, 7)) + gpus((1, 7))) for n in (5, 40001)),
  *(Case(draw.argmax, f"{n} drawn", lambda tokens, n=n: (floats(tokens, n), noise(tokens)), cpu_((1, 7)) + gpus((1, 7))) for n in (5, 70001)),
  *(Case(draw.argmax, f"{n} drawn from nuclei", lambda tokens, n=n: (floats(tokens, n), *of_nuclei(tokens)), cpu_((1, 7)) + gpus((7,)))
    for n in (5, 40001)),
  Case(drafts.find_drafts, "of three letters", letters, cpu_((1, 7)) + gpus((1, 7))),
  Case(draw.advance, "some are there", started, cpu_((1, 7))),
  Case(draw.next_token, "some are there", lambda tokens: (floats(tokens, 300), noise(tokens), None, *positions(tokens)), gpus((1, 7))),
  Case(draw.next_token, "of a nucleus", next_of_nuclei, gpus((1, 3))),
  *(Case(likeliest.likeliest, f"{count} of {n}", lambda tokens, n=n, count=count: (floats(tokens, n), count), cpu_((1, 7)) + gpus((1, 3)))
    for n, count in ((5, 5), (301, 20), (20001, 20), (40, 1))),
  *(Case(likeliest.log_total, str(n), totalled(n), gpus((1, 3))) for n in (5, 20001)),
  Case(likeliest.tell, "five others", told, cpu_((1, 7)) + gpus((1, 7))),
  Case(cutoff.cutoff, "of a number", to_cut(False), cpu_((1, 7)) + gpus((1,))),
  Case(cutoff.cutoff, "of a share", to_cut(True), cpu_((1, 7)) + gpus((2,))),
]
POINTS = [(case, *point) for case in CASES for point in case.points]

def worst_row(got: np.ndarray, want: np.ndarray) -> float:
  assert got.shape == want.shape
  error, power = ((x.astype(np.float64).reshape(-1, x.shape[-1]) ** 2).sum(-1) for x in (got - want, want))
  return float((error / np.maximum(power, power.mean() + 1e-30)).max())

def numbers(out: Any) -> list[np.ndarray]:
  outs = list(out) if isinstance(out, (tuple, list)) else [out]
  outs = [CODED.decoded(t) if t.dtype is CODES else t for t in outs]
  Tensor.realize(*outs)
  return [t.cast(dtypes.float).numpy() if dtypes.is_float(t.dtype) else t.numpy() for t in outs]

# what a form's arithmetic costs a product: activations of 8 bits; of halves; the order of float32 sums (a cache of halves: its rounding)
EIGHT_BITS = 1e-5   # … and in rows of the cache: a code is its neighbour
LIMITS = {("CUDA", "decode"): 2e-3, ("HOPPER", "decode"): 2e-3, ("CUDA", "pairs"): 2e-3, ("CUDA", "few"): 5e-5, ("CUDA", "prefill"): 5e-5,
          ("METAL", "prefill"): 5e-5, ("HOPPER", "few"): 5e-5, ("HOPPER", "prefill"): 5e-5}

def run(case: Case, device: str, form: str, tokens: int) -> None:
  def bound() -> tuple:
    (arguments := case.of.signature.bind(*case.args(tokens))).apply_defaults()
    return arguments.args
  with DEVICES[device]():
    args = bound()
    assert case.of.choose(*args) == form
    got = numbers(case.of(*args))
  with plain_ops(): want = numbers(case.of(*bound()))
  for a, b in zip(got, want, strict=True):
    if np.issubdtype(a.dtype, np.integer): assert np.array_equal(a, b)
    else: assert worst_row(a, b) < LIMITS.get((device, form), EIGHT_BITS if case.name == "8 bits" else 1e-6)

def alone(argument: Any, i: int, tokens: int) -> Any:
  """What of an argument is the i-th sequence's"""
  if isinstance(argument, Step): return Step.decode(alone(argument.start, i, tokens), alone(argument.tables, i, tokens))
  if isinstance(argument, Tensor) and argument.shape[0] == tokens: return argument[i:i + 1].contiguous().realize()
  return tuple(alone(part, i, tokens) for part in argument) if type(argument) is tuple else argument

@pytest.mark.parametrize("case,device,form,tokens", POINTS, ids=lambda v: f"{v.of.__name__} {v.name}" if isinstance(v, Case) else str(v))
def test_form(case: Case, device: str, form: str, tokens: int): run(case, device, form, tokens)

# attention's sums are cut by the lengths of all
COLUMNS = [point for point in POINTS if point[2] == "decode" and isinstance(point[3], Sequences) and point[0].of.__name__ not in
           ("latent_attention", "attention_plan")]

@pytest.mark.parametrize("case,device,form,tokens", COLUMNS, ids=lambda v: f"{v.of.__name__} {v.name}" if isinstance(v, Case) else str(v))
def test_as_alone(case: Case, device: str, form: str, tokens: int):
  """A sequence gets the bytes that it gets without the others"""
  with DEVICES[device]():
    (arguments := case.of.signature.bind(*case.args(tokens))).apply_defaults()
    form_of = case.of.forms[form].run
    together = numbers(form_of(*arguments.args))
    for i in {0, tokens // 2, tokens - 1}:
      for a, b in zip(together, numbers(form_of(*(alone(argument, i, tokens) for argument in arguments.args))), strict=True):
        assert np.array_equal(a[i:i + 1], b)

def test_one_token_of_a_wide_model(monkeypatch: pytest.MonkeyPatch):
  """Its choice is a launch"""
  monkeypatch.setattr(moe, "LAUNCH_INSTRUCTIONS", 0)
  run(next(case for case in CASES if case.name == "shared"), "CUDA", "pairs", 1)

@pytest.mark.parametrize("name,form,tokens", [("shared", "decode", 1), ("in groups", "decode", 1), ("two tokens", "decode", Sequences(2)),
                                              ("shared", "pairs", Sequences(2))])
def test_choice_before_the_wait(name: str, form: str, tokens: int, monkeypatch: pytest.MonkeyPatch):
  """On a target whose kernels overlap, down's experts are known to it early"""
  monkeypatch.setitem(DEVICES, "CUDA", lambda: on_cuda("sm_90"))
  run(next(case for case in CASES if case.of is moe.mixture and case.name == name), "CUDA", form, tokens)

@pytest.mark.parametrize("form,grouped,gating,tokens", [
  ("pairs", False, Gating.SIGMOID, 2), ("pairs", False, Gating.SOFTMAX, 4), ("pairs", False, Gating.SOFTMAX_WEIGHT, 3),
  ("pairs", True, Gating.SIGMOID, 2), ("few", False, Gating.SOFTMAX, 8), ("few", True, Gating.SIGMOID, 5)])
def test_last_block_chooses(form: str, grouped: bool, gating: Gating, tokens: int, monkeypatch: pytest.MonkeyPatch):
  """… where the step has a plan, whose last number counts the router's blocks, and experts are in no groups: the same bytes as by a launch, and a
  zero again"""
  counted, last = [], matvec.is_last_block
  monkeypatch.setattr(kernel, "_programs", {})   # what another test has put together would count nothing here
  monkeypatch.setattr(matvec, "is_last_block", lambda *args: counted.append(args) or last(*args))
  with on_cuda("sm_90"):
    step, x, norm, router, routing, *rest = mixed(True, grouped=grouped, wide=96 if form == "pairs" else 1920)(Sequences(tokens))
    of, plan = (x, norm, router, replace(routing, gating=gating), *rest), tensor(np.zeros((3, 4), np.int32))
    run = moe.mixture.forms[form].run
    want = numbers(run(step, *of))
    assert not counted
    for _ in range(2):
      for a, b in zip(numbers(run(replace(step, plan=plan), *of)), want, strict=True): assert np.array_equal(a, b)
    assert not plan.numpy().any() and len(counted) == (not grouped)

@pytest.mark.parametrize("more", [1, 2])
def test_blocks_that_are_counted_wrongly(more: int, monkeypatch: pytest.MonkeyPatch):
  """… are noticed"""
  right = matvec.is_last_block
  monkeypatch.setattr(matvec, "is_last_block", lambda target, count, blocks, inside: right(target, count, blocks + more, inside))
  with pytest.raises(AssertionError): test_last_block_chooses("pairs", False, Gating.SIGMOID, 2, monkeypatch)

@pytest.mark.parametrize("kind", [T.Q8_0, T.Q4_0], ids=lambda k: k.name)
def test_sums_of_int8_are_exact(kind: T):
  """Of integers, with scales of one, to the last: a tolerance would let one sum in eight be one off"""
  rows, units, unit = 3, 32, kernel.UNIT
  x = np.random.default_rng(5).integers(-127, 128, units * unit)
  blocks = random_weight(kind, (rows, units * unit))[0].copy().reshape(rows * units, -1)
  blocks[:, :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
  want = dequantize(blocks.reshape(rows, -1), kind).astype(np.int64) @ x
  words = np.ascontiguousarray(x.astype(np.int8).reshape(1, units, 2, unit // 2).transpose(0, 2, 1, 3)).view(np.int32)
  with on_cuda():
    codes, weight = matvec.Codes(tensor(words), tensor(np.ones((1, units, 4), np.float32))), QuantizedLinear.load(kind, (rows, units * unit), blocks)
    assert (norm_linear.linear_of_codes(codes, weight, tensor(np.zeros((1, rows), np.float32))).numpy() == want).all()

def test_blocks_that_take_turns(monkeypatch: pytest.MonkeyPatch):
  """A row of what is int8 already lies over twice as many warps"""
  monkeypatch.setattr(matvec, "WAVES", 0)
  monkeypatch.setattr(matvec, "WAVE_STEPS", 1)
  assert matvec.thread_layout([64], 32, 25, coded=True).warps == 2
  def wide(tokens: int) -> tuple:
    return step_of(tokens), floats(tokens, 8, 64), load(T.Q8_0, 8, 256, 64), load(T.Q4_0, 50, 2048), floats(tokens, 50)
  run(Case(norm_linear.attention_output, "wide", wide, []), "CUDA", "decode", 1)

@pytest.mark.parametrize("kind,rows,inner,rotated,turns", [(T.Q4_0, 101, 2048, False, 7), (T.Q6_K, 96, 2048, True, 6), (T.Q4_K, 101, 4096, False, 13),
                                                           (T.Q8_0, 64, 2048, True, 4), (T.F16, 101, 2048, False, 13),
                                                           (T.BF16, 101, 2048, False, 13), (T.F32, 101, 2560, False, 26)])
def test_turns_of_a_large_launch(kind: T, rows: int, inner: int, rotated: bool, turns: int, monkeypatch: pytest.MonkeyPatch):
  """A team does several jobs, the last block's some that are not there, and what is its sum is so among others too"""
  for name, value in {"AT_ONCE": 8, "MANY_WARPS": 4, "FEW_BLOCKS": 0}.items(): monkeypatch.setattr(matvec, name, value)
  found, turns_of = [], matvec.turns_of
  monkeypatch.setattr(matvec, "turns_of", lambda *args: found.append(turns_of(*args)) or found[-1])
  def large(tokens: int) -> tuple:
    rope = Rope(rope_table(16, 1e4, 128), 32, 16) if rotated else None
    return step_of(tokens), floats(tokens, inner), norm(inner), [load(kind, rows, inner)], rope, None if rotated else floats(tokens, rows)
  case = Case(norm_linear.norm_linear, "large", large, [])
  run(case, "CUDA", "decode", 1)
  assert found == [turns]
  test_as_alone(case, "CUDA", "decode", Sequences(2))

def test_a_large_feed_forward(monkeypatch: pytest.MonkeyPatch):
  """Two results a job, also of two tokens, whose bytes are one's; one where they are odd"""
  for name, value in {"AT_ONCE": 8, "MANY_WARPS": 4, "FEW_BLOCKS": 0}.items(): monkeypatch.setattr(matvec, name, value)
  found, turns_of = [], matvec.turns_of_parts
  monkeypatch.setattr(matvec, "turns_of_parts", lambda parts, *rest: found.append(parts[0].rows) or turns_of(parts, *rest))
  def large(tokens: int) -> tuple:
    weights = moe.FeedForward(load(T.Q4_K, 96, 512), load(T.Q5_0, 96, 512), load(T.Q8_0, 64, 96))
    return step_of(tokens), floats(tokens, 512), norm(512), weights, floats(tokens, 64)
  case = Case(moe.feed_forward, "large", large, [])
  run(case, "CUDA", "decode", 1)
  test_as_alone(case, "CUDA", "decode", Sequences(2))
  assert found == [matvec.MANY_ROWS] * 2
  def odd(tokens: int) -> tuple: return step_of(tokens), floats(tokens, 512), norm(512), load(T.Q4_K, 97, 512), load(T.Q5_0, 97, 512), None
  run(Case(moe.gate_up, "odd", odd, []), "CUDA", "decode", 1)

@pytest.mark.parametrize("units,turns", [(224, 36), (367, 12), (512, 36)])
def test_turns_of_floats(units: int, turns: int):
  """As many as shared memory has room for beside the vector, also the widest that is staged; one that stays in device memory leaves all of it"""
  part = matvec.MatvecPart(1, lambda job: [], lambda *args: [], integer=False)
  assert matvec.turns_of(intrinsics.HOPPER, part, 36 * matvec.AT_ONCE // 2, matvec.MANY_WARPS, matvec.MANY_WARPS, units) == turns
  held = matvec.FloatVectors.nbytes(units) if matvec.stages_floats(intrinsics.HOPPER, units) else 0
  assert held + matvec.MANY_WARPS * 4 * (1 + matvec.ROWS * turns) <= intrinsics.HOPPER.shared_bytes

@pytest.mark.parametrize("jobs,teams,block_warps,turns", [(2048, 4, 32, 4), (8192, 8, 16, 4), (40960, 4, 32, 40), (40961, 4, 32, 27)])
def test_turns_of_codes(jobs: int, teams: int, block_warps: int, turns: int):
  """Blocks fill whole waves, also where seven warps are a team, of which 32 are four and leave some over (Kimi-K2's head)"""
  part = matvec.MatvecPart(1, lambda job: [], lambda *args: [], integer=True)
  assert matvec.turns_of(intrinsics.HOPPER, part, jobs, teams, block_warps, 224) == turns
  at_once = matvec.AT_ONCE // block_warps
  blocks = -(-jobs // (teams * turns))
  assert -(-blocks // at_once) == -(-jobs // (teams * at_once * matvec.TURNS))

@pytest.mark.parametrize("kind,shape,tokens,job", [
  (T.Q6_K, (154880, 2048), 1, (4, 1)), (T.Q6_K, (154880, 2048), 2, (4, 1)), (T.Q6_K, (154880, 2048), 3, (2, 1)), (T.Q5_K, (8192, 7168), 1, (4, 1)),
  (T.Q4_0, (4096, 16384), 1, (2, 1)), (T.Q4_0, (1536, 2048), 1, None), (T.F16, (154880, 2048), 1, None)])
def test_a_large_job(kind: T, shape: tuple[int, int], tokens: int, job: tuple[int, int]|None):
  """Four rows, a unit of each, where registers are left for that beside what a thread stages and the tokens' sums. A lane has as many units whatever
  the tokens: sums are in the same order"""
  assert matvec.large_job(intrinsics.HOPPER, [QuantizedLinear(kind, shape, {})], shape[0], tokens) == job

@pytest.mark.parametrize("kind,rotated", [(T.F16, True), (T.BF16, False)])
def test_floats_of_a_wide_vector(kind: T, rotated: bool):
  """A job is a row, but for pairs that are rotated. Rows and a vector that no launch shares evenly"""
  def wide(tokens: int) -> tuple:
    rope = Rope(rope_table(16, 1e4, 128), 32, 16) if rotated else None
    return step_of(tokens), floats(tokens, 4352), norm(4352), [load(kind, 32 if rotated else 37, 4352), load(T.F32, 5, 4352)], rope, None
  run(case := Case(norm_linear.norm_linear, "wide", wide, []), "CUDA", "decode", 1)
  test_as_alone(case, "CUDA", "decode", Sequences(2))

@pytest.mark.parametrize("tokens,form", [(32, "few"), (33, "prefill"), (64, "prefill")])
def test_a_large_matrix(tokens: int, form: str, monkeypatch: pytest.MonkeyPatch):
  """… that no cache keeps is read once for all tokens"""
  def large(tokens: int) -> tuple:
    return step_of(tokens), floats(tokens, 256), norm(256), [load(T.Q6_K, 70, 256)], None, floats(tokens, 70)
  monkeypatch.setattr(norm_linear, "CACHED_BYTES", 70 * 210 - 1)
  run(Case(norm_linear.norm_linear, "large", large, []), "HOPPER", form, Sequences(tokens))
  monkeypatch.setattr(norm_linear, "CACHED_BYTES", 70 * 210)
  with on_cuda("sm_90"): assert norm_linear.norm_linear.choose(*large(Sequences(tokens))) == "few"

@pytest.mark.parametrize("kind,one,three", [(T.Q5_K, [5, 8], [5, 16]), (T.Q8_0, [8, 8], [8, 16])])
def test_turns_of_parts(kind: T, one: list[int], three: list[int], monkeypatch: pytest.MonkeyPatch):
  """All blocks of a wide mixture's first launch run at once. Its results are int8, and what a token has among others is what it has alone"""
  for name, value in {"AT_ONCE": 48, "MANY_WARPS": 4, "FEW_BLOCKS": 0}.items(): monkeypatch.setattr(matvec, name, value)
  monkeypatch.setattr(moe, "LAUNCH_INSTRUCTIONS", 0)
  found, turns_of = [], matvec.turns_of_parts
  monkeypatch.setattr(matvec, "turns_of_parts", lambda *args: found.append(turns_of(*args)) or found[-1])
  def wide(tokens: int) -> tuple:
    shapes, down = ((64, 4096), (64, 4096), (4096, 64)), T.Q8_0
    shared = moe.FeedForward(*(load(own, *shape) for own, shape in zip((kind, kind, down), shapes)))
    experts_of = moe.FeedForward(*(experts(own, 7, *shape) for own, shape in zip((kind, kind, down), shapes)))
    return step_of(tokens), floats(tokens, 4096), norm(4096), load(T.F32, 7, 4096), routing(2), experts_of, shared, residual(tokens, 4096, 1e5)
  case = Case(moe.mixture, "wide", wide, [])
  run(case, "CUDA", "pairs", 1)
  test_as_alone(case, "CUDA", "pairs", Sequences(3))
  assert [sorted(of) for of in found] == [one, three]

@pytest.mark.parametrize("rows,columns,lanes", [(1, 3, 32), (2, 1, 32), (2, 3, 32), (3, 2, 32), (4, 8, 16), (6, 2, 32), (6, 1, 4), (4, 1, 2),
                                                (2, 2, 1)])
def test_sums_in_lanes(rows: int, columns: int, lanes: int):
  """Each row's sum of each column is in one lane of each team, however rows and columns part among lanes"""
  x = np.random.default_rng(rows).integers(-99, 99, (columns, rows, 32)).astype(np.float32)
  def body(buffers: dict[str, UOp]) -> list[UOp]:
    thread = UOp.special(32, "lidx0")
    part = SimpleNamespace(target=intrinsics.HOPPER, layout=matvec.ThreadLayout(lanes, 1, 32 // lanes), lane=thread % lanes, team=thread // lanes)
    values = [[buffers["x"][(column * rows + row) * 32 + thread].load() for row in range(rows)] for column in range(columns)]
    return [buffers["y"][((found.team * columns + found.column) * rows + row).valid(found.is_first)].store(value)
            for found in matvec.Part.sums_in_lanes(part, values) for row, value in enumerate(found.sums)]
  with on_cuda():
    y, = kernel.launch(f"sums_{rows}_{columns}_{lanes}", {"y": tensor(np.zeros((32 // lanes, columns, rows), np.float32))}, {"x": tensor(x)}, body)
    assert np.array_equal(y.numpy(), x.reshape(columns, rows, 32 // lanes, lanes).sum(-1).transpose(2, 0, 1))

@pytest.mark.parametrize("segments,jobs,warps", [([160], 1024, 1), ([192, 48], 1024, 2), ([256], 3584, 4), ([512], 3584, 8),
                                                 ([512, 64], 3584, 8)])
def test_warps_of_a_row(segments: list[int], jobs: int, warps: int):
  """attn_output and the experts' down of GLM-4.7-Flash, whose blocks run at once, and of Kimi-K2 and DeepSeek-V3, whose blocks take turns: none of
  their lanes is without a unit, also where one takes three at most"""
  assert matvec.thread_layout(segments, 32, jobs, coded=True).warps == warps
  if jobs == 3584: assert segments[0] % (32 * matvec.thread_layout(segments, 32, jobs, coded=True, steps=3).warps) == 0

@pytest.mark.parametrize("kind", [T.Q4_0, T.Q4_K])
@pytest.mark.parametrize("count,shape,groups,by_launch", [(4, (64, 1536, 2048), (1, 1), False), (6, (64, 1408, 2048), (1, 1), False),
                                                          (8, (384, 2048, 7168), (1, 1), True), (8, (256, 2048, 7168), (8, 4), True)])
def test_who_chooses(kind: T, count: int, shape: tuple[int, ...], groups: tuple[int, int], by_launch: bool):
  """Experts of GLM-4.7-Flash, DeepSeek-V2-Lite, Kimi-K2, DeepSeek-V3"""
  how = Routing(count, Gating.SIGMOID, True, 1.8, None, *groups)
  repeated = moe.repeated_instructions(intrinsics.HOPPER, how, of_kind(kind, shape))
  assert (repeated >= moe.LAUNCH_INSTRUCTIONS) == by_launch

def of_kind(kind: T, shape: tuple[int, ...]) -> QuantizedWeight:
  """A stack of matrices without its planes"""
  return QuantizedExpertWeights(kind, shape, {})

@pytest.mark.parametrize("kind,shape,count,tokens,results", [
  (T.Q4_0, (64, 1536, 2048), 4, 1, 1), (T.Q4_K, (64, 1536, 2048), 4, 1, 2), (T.Q4_K, (64, 1536, 2048), 4, 3, 1),
  (T.Q8_0, (64, 1536, 2048), 4, 1, 1), (T.Q4_0, (64, 1408, 2048), 6, 1, 2), (T.Q4_K, (64, 1408, 2048), 6, 1, 2),
  (T.IQ4_XS, (64, 1536, 2048), 4, 1, 1), (T.Q4_K, (64, 1537, 2048), 4, 1, 1)])
def test_results_of_a_job(kind: T, shape: tuple[int, ...], count: int, tokens: int, results: int):
  """Experts of GLM-4.7-Flash and DeepSeek-V2-Lite: two where only half as many blocks have the registers for all of their loads, or come at once"""
  assert moe.results_of_job(intrinsics.HOPPER, of_kind(kind, shape), count, tokens) == results

@pytest.mark.parametrize("kind,shape,count,results", [
  (T.Q4_0, (64, 1536, 2048), 4, 2), (T.Q4_0, (64, 1408, 2048), 6, 2), (T.Q4_K, (64, 1536, 2048), 4, 1), (T.Q8_0, (64, 1536, 2048), 4, 1),
  (T.Q4_0, (384, 2048, 7168), 8, 1), (T.IQ4_NL, (64, 1536, 2048), 4, 1), (T.F16, (64, 1536, 2048), 4, 1), (T.Q4_0, (64, 1537, 2048), 4, 1)])
def test_results_of_pairs(kind: T, shape: tuple[int, ...], count: int, results: int):
  """Two where a lane has 64 registers for the loads of four rows and all else"""
  assert moe.results_of_pairs(intrinsics.HOPPER, of_kind(kind, shape), count) == results

@pytest.mark.parametrize("of,name,tokens", [(moe.expert_gate_up, "Q5_K sigmoid", 1), (moe.expert_gate_up, "F16 softmax of the chosen", 2),
                                            (moe.mixture, "shared", 1), (moe.mixture, "shared", 3)], ids=lambda x: getattr(x, "name", x))
def test_jobs_of_two_results(of: Primitive, name: str, tokens: int, monkeypatch: pytest.MonkeyPatch):
  """… have the bytes of jobs of one"""
  args = next(case for case in CASES if case.of is of and case.name == name).args
  with on_cuda():
    alone, together = [], []
    for results, found in ((1, alone), (2, together)):
      for rule in ("results_of_job", "results_of_pairs"): monkeypatch.setattr(moe, rule, lambda *_: results)
      found += numbers(of.forms["pairs" if tokens > 2 else "decode"].run(*args(Sequences(tokens) if tokens > 1 else 1)))
    for a, b in zip(alone, together, strict=True): assert np.array_equal(a, b)

def test_same_everywhere():
  """No product is among what a choice adds up: of softmax's scores, neither a bias nor a group's sum"""
  found = {(gating, biased, grouped): Routing(3, gating, True, 1.8, tensor(normal(8)) if biased else None, 4, 2 if grouped else 4).same_everywhere
           for gating, biased, grouped in itertools.product(Gating, (False, True), (False, True))}
  assert {case for case, same in found.items() if not same} == {(1, True, False), (1, False, True), (1, True, True)}

def test_the_table_is_whole():
  """Each form of each primitive is what some case takes, but for what is of several devices: test_all_reduce.py has it"""
  forms = {(name, form) for name, of in PRIMITIVES.items() for form in of.forms if name != "all_reduce"}
  assert {(case.of.__name__, form) for case, _, form, _ in POINTS} == forms

def test_a_wrong_row_is_noticed(monkeypatch: pytest.MonkeyPatch):
  case, forms = next(case for case in CASES if case.name == "residual"), norm_linear.norm_linear.forms
  plain = forms["cpu_prefill"].run
  def faulty(*args: Any) -> list[Tensor]:
    out, = plain(*args)
    return [out * tensor(np.float32(np.arange(out.shape[0]) < out.shape[0] - 1)).unsqueeze(1)]
  monkeypatch.setitem(forms, "cpu_prefill", forms["cpu_prefill"]._replace(run=faulty))
  with pytest.raises(AssertionError): run(case, "CPU", "cpu_prefill", 19)

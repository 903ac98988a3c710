"""Every form of every primitive against its plain ops, over one table of cases, on the CPU and on the mocks of CUDA and Metal.

A case is a primitive, what makes its arguments, and the forms that are to take them. Shapes are odd, even and tails of a tile, a warp, a group of
rows; every block format is met by the product that all others are made of. The worst row decides."""
from __future__ import annotations
import contextlib, itertools
from typing import Any, Callable, NamedTuple
import numpy as np, pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from helpers import HALVES, random_weight
from mockcuda import on_cuda
from mockmetal import on_metal
from tinygrad import Device, Tensor, dtypes
from tinygrad.apps.mla import RMSNorm
from tinygrad.apps.quantized import QuantizedEmbedding, QuantizedExpertWeights, QuantizedLinear, QuantizedWeight
from tinygrad.apps.rope import Rope, rope_table
from tinygrad.nn import cpu, embedding, mla_attention, moe, norm_linear
from tinygrad.nn.primitive import PLAIN, PRIMITIVES, Primitive, plain_ops
from tinygrad.nn.routing import Routing
from tinygrad.nn.step import Step

DEVICES = {"CPU": contextlib.nullcontext, "CUDA": on_cuda, "METAL": on_metal}

def normal(*shape: int) -> np.ndarray: return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
def tensor(values: np.ndarray) -> Tensor: return Tensor(values).realize()
def floats(*shape: int) -> Tensor: return tensor(normal(*shape))
def ids(*values: int) -> Tensor: return tensor(np.int32(values))
def norm(n: int) -> RMSNorm: return RMSNorm(tensor(1 + 0.1 * normal(n)), 1e-5)
def load(kind: T, *shape: int, cls: type[QuantizedWeight] = QuantizedLinear) -> QuantizedWeight:
  return cls.load(kind, shape, random_weight(kind, shape)[0])
def experts(kind: T, *shape: int) -> QuantizedWeight: return load(kind, *shape, cls=QuantizedExpertWeights)
def width(kind: T) -> int: return max(GGML_QUANT_SIZES[kind][0], 96)
def step_of(tokens: int, start: int = 5) -> Step: return Step.decode(ids(start)) if tokens == 1 else Step.prefill(ids(start), tokens)

# ---- arguments, as a function of the number of tokens ----

def product(kind: T, rows: int) -> Callable:
  def of(tokens: int) -> tuple: return floats(tokens, width(kind)), load(kind, rows, width(kind))
  return of
def product_by_id(kind: T) -> Callable:
  def of(tokens: int) -> tuple:
    return floats(tokens, 1, width(kind)), experts(kind, 3, 21, width(kind)), tensor(np.tile(np.int32([2, 0]), (tokens, 1)))
  return of
def linear(rows: int, rotated: bool, inner: int = 96) -> Callable:
  def of(tokens: int) -> tuple:
    rope = Rope(rope_table(16, 1e4, 128), 32, 16) if rotated else None
    residual = None if rotated else floats(tokens, rows)
    return step_of(tokens), floats(tokens, inner), norm(inner), [load(T.Q4_0, rows, inner), load(T.Q8_0, 21, inner)], rope, residual
  return of
def with_residual(tokens: int) -> tuple: return step_of(tokens), floats(tokens, 96), None, [load(T.Q5_1, 33, 96)], None, floats(tokens, 33)
def attention(heads: int, latent: int, rotated: int, start: int) -> Callable:
  def of(tokens: int) -> tuple:
    cache = tensor(normal(96, latent + rotated)).cast(dtypes.float if cpu.is_cpu(Device.DEFAULT) else dtypes.half).contiguous().realize()
    return (step_of(tokens, start), floats(tokens, heads * (64 + rotated)), floats(tokens, latent + rotated), load(T.Q8_0, heads, latent, 64),
            norm(latent), cache, Rope(rope_table(rotated, 1e4, 128), 64 + rotated, 64), 0.002)
  return of
def output(tokens: int) -> tuple: return step_of(tokens), floats(tokens, 3, 64), load(T.Q8_0, 3, 32, 64), load(T.Q4_0, 50, 96), floats(tokens, 50)
def gated(router: bool, kind: T) -> Callable:
  def of(tokens: int) -> tuple:
    return step_of(tokens), floats(tokens, 256), norm(256), load(kind, 37, 256), load(kind, 37, 256), load(T.F32, 9, 256) if router else None
  return of
def dense(tokens: int) -> tuple:
  return step_of(tokens), floats(tokens, 64), norm(64), moe.FeedForward(load(T.Q4_0, 96, 64), load(T.Q4_0, 96, 64), load(T.Q5_1, 64, 96))
def routing(gating: int) -> Routing: return Routing(3, gating, gating != 1, 1.8, tensor(0.1 * normal(7)) if gating == 2 else None)
def chosen(gating: int, kind: T, rows: int) -> Callable:
  def of(tokens: int) -> tuple:
    gate, up = experts(kind, 7, rows, 256), experts(kind, 7, rows, 256)
    return step_of(tokens), floats(tokens, 256), norm(256), gate, up, floats(tokens, 7), routing(gating)
  return of
def down(shared: bool, kind: T) -> Callable:
  def of(tokens: int) -> tuple:
    sel = tensor(np.tile(np.int32([6, 2, 0]), (tokens, 1)))
    beside = (floats(tokens, 64), load(T.Q8_0, 45, 64)) if shared else None
    return step_of(tokens), floats(tokens, 3, 256), experts(kind, 7, 45, 256), sel, floats(tokens, 45), beside
  return of
def mixed(shared: bool) -> Callable:
  def of(tokens: int) -> tuple:
    one = moe.FeedForward(load(T.Q4_0, 64, 96), load(T.Q4_0, 64, 96), load(T.Q8_0, 96, 64)) if shared else None
    many = moe.FeedForward(experts(T.Q4_0, 7, 64, 96), experts(T.Q4_0, 7, 64, 96), experts(T.Q5_1, 7, 96, 64))
    return step_of(tokens), floats(tokens, 96), norm(96), load(T.F32, 7, 96), routing(2), many, one
  return of

# ---- the table ----

class Case(NamedTuple):
  of: Primitive
  name: str
  args: Callable[[int], tuple]                    # of the number of tokens
  forms: dict[str, tuple[tuple[int, ...], ...]]   # {device: (tokens that its few-token form takes, tokens of its many-token form)}

ONE, SOME, EACH, TAIL = (1,), (2, 19, 33), (1, 2, 19), (33,)
CASES = [
  *(Case(norm_linear.mul_mat, kind.name, product(kind, rows), {"CPU": (EACH,), "CUDA": (ONE,), "METAL": (ONE,)})
    for kind, rows in zip(HALVES, itertools.cycle((33, 34, 16, 7)))),
  *(Case(norm_linear.mul_mat, f"id {kind.name}", product_by_id(kind), {d: ((1, 5),) for d in DEVICES}) for kind in (T.Q4_K, T.IQ4_XS, T.F16)),
  *(Case(norm_linear.norm_linear, f"{rows} rows{' rotated' * rotated}", linear(rows, rotated),
         {"CPU": (ONE, SOME), "CUDA": (ONE, TAIL), "METAL": (ONE, TAIL)})
    for rows, rotated in ((33, False), (34, False), (96, True), (64, True))),
  Case(norm_linear.norm_linear, "residual", with_residual, {"CPU": (ONE, SOME), "CUDA": (ONE, (2,)), "METAL": (ONE, (2,))}),
  *(Case(mla_attention.latent_attention, f"{H} heads at {start}", attention(H, 128, 32, start),
         {"CPU": (ONE, (2, 29)), "CUDA": (ONE, (17,)), "METAL": (ONE, (3,))})
    for H, start in ((5, 40), (2, 0), (3, 63))),
  Case(norm_linear.attention_output, "heads", output, {d: (TAIL,) for d in ("CUDA", "METAL")}),
  *(Case(moe.gate_up, f"{kind.name}{' router' * router}", gated(router, kind), {"CPU": (ONE, (2, 27)), "CUDA": (ONE,), "METAL": (ONE,)})
    for kind, router in ((T.Q4_K, True), (T.IQ4_XS, False))),
  Case(moe.feed_forward, "dense", dense, {d: (TAIL,) for d in ("CUDA", "METAL")}),
  *(Case(moe.expert_gate_up, f"{kind.name} gating {gating}", chosen(gating, kind, rows), {"CPU": (ONE, (2, 27)), "CUDA": (ONE,), "METAL": (ONE,)})
    for kind, gating, rows in ((T.Q4_0, 1, 33), (T.Q6_K, 2, 21), (T.F16, 3, 36))),
  *(Case(moe.expert_down, f"{kind.name}{' shared' * shared}", down(shared, kind), {"CPU": (ONE, (2, 27)), "CUDA": (ONE,), "METAL": (ONE,)})
    for kind, shared in ((T.Q5_K, True), (T.IQ4_NL, False))),
  *(Case(moe.mixture, "experts" + " shared" * shared, mixed(shared), {d: ((tokens,),) for d in ("CUDA", "METAL")})
    for shared, tokens in ((False, 2), (True, 19))),
  *(Case(embedding.embedding, kind.name, lambda tokens, kind=kind: (ids(*range(7, 7 + tokens)), load(kind, 37, width(kind), cls=QuantizedEmbedding)),
         {d: (EACH,) for d in DEVICES}) for kind in (T.Q4_0, T.Q6_K, T.MXFP4)),
  *(Case(embedding.argmax, str(n), lambda tokens, n=n: (floats(n),), {d: (ONE,) for d in DEVICES}) for n in (5, 1000, 20001)),
  Case(embedding.advance, "advance", lambda tokens: (ids(41), ids(3)), {d: (ONE,) for d in DEVICES}),
]
POINTS = [(device, case, tokens) for case in CASES for device, several in case.forms.items() for some in several for tokens in some]

def worst_row(got: np.ndarray, want: np.ndarray) -> float:
  assert got.shape == want.shape
  error, power = ((x.astype(np.float64).reshape(-1, x.shape[-1]) ** 2).sum(-1) for x in (got - want, want))
  return float((error / np.maximum(power, power.mean() + 1e-30)).max())

def numbers(out: Any) -> list[np.ndarray]:
  outs = list(out) if isinstance(out, (tuple, list)) else [out]
  Tensor.realize(*outs)
  return [t.cast(dtypes.float).numpy() if dtypes.is_float(t.dtype) else t.numpy() for t in outs]

# what a form's arithmetic costs a product: activations of 8 bits; of halves; the order of float32 sums (a cache of halves: its rounding)
LIMITS = {("CUDA", "decode"): 2e-3, ("CUDA", "prefill"): 5e-5, ("METAL", "prefill"): 5e-5}

def run(device: str, case: Case, tokens: int) -> str:
  with DEVICES[device]():
    args = [case.of.signature.bind(*case.args(tokens)) for _ in range(2)]   # a call may write what it is given
    for bound in args: bound.apply_defaults()
    form = case.of.choose(*args[0].args)
    got = numbers(case.of(*args[0].args))
    with plain_ops(): want = numbers(case.of(*args[1].args))
  for a, b in zip(got, want, strict=True):
    if a.dtype == np.int32: assert np.array_equal(a, b)
    else: assert worst_row(a, b) < LIMITS.get((device, form), 1e-6)
  return form

@pytest.mark.parametrize("device,case,tokens", POINTS, ids=lambda v: f"{v.of.__name__} {v.name}" if isinstance(v, Case) else str(v))
def test_form(device: str, case: Case, tokens: int): assert run(device, case, tokens) != PLAIN

def test_the_table_is_whole():
  """Each form of each primitive is what some case takes"""
  met = set()
  for device, case, tokens in POINTS:
    with DEVICES[device]():
      (bound := case.of.signature.bind(*case.args(tokens))).apply_defaults()
      met.add((case.of.__name__, case.of.choose(*bound.args)))
  assert met == {(name, form) for name, primitive in PRIMITIVES.items() for form in primitive.forms}

def test_a_wrong_row_is_noticed(monkeypatch: pytest.MonkeyPatch):
  case = next(c for c in CASES if c.name == "residual")
  takes, form = norm_linear.norm_linear.forms["cpu_prefill"]
  def faulty(*args: Any) -> list[Tensor]:
    y, = form(*args)
    return [y * tensor(np.where(np.arange(y.shape[0]) == y.shape[0] - 1, 0, 1).astype(np.float32)).unsqueeze(1)]
  monkeypatch.setitem(norm_linear.norm_linear.forms, "cpu_prefill", norm_linear.norm_linear.forms["cpu_prefill"]._replace(run=faulty))
  with pytest.raises(AssertionError): run("CPU", case, 19)

"""The CPU's kernels against the plain ops and the gguf package, in float64; and the weights' layout there."""
from __future__ import annotations
from dataclasses import replace
import numpy as np, pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, dequantize
from helpers import HALVES, decoding, names_of, prefilling, random_weight, tied
from oracle import route
from tinygrad import Device, Tensor, dtypes
from tinygrad.apps.machine import cpuinfo
from tinygrad.apps.mla import RMSNorm
from tinygrad.apps.quantized import FLOATS, QuantizedEmbedding, QuantizedExpertWeights, QuantizedLinear, interleaved, packer, split_planes
from tinygrad.apps.rope import Rope, rope_table
from tinygrad.nn import cpu, cpu_layout, cpu_unabsorbed, draw, routing
from tinygrad.nn.mla_attention import latent_attention
from tinygrad.nn.moe import FeedForward, expert_down, expert_gate_up, gate_up, mixture
from tinygrad.nn.norm_linear import norm_linear
from tinygrad.nn.primitive import Primitive, plain_ops
from tinygrad.nn.step import PAGE, Step
from tinygrad.runtime.support import elf
from tinygrad.runtime.support.compiler_cpu import ClangCompiler

pytestmark = pytest.mark.skipif(not cpu.is_cpu(Device.DEFAULT), reason="not on the CPU")
KINDS = pytest.mark.parametrize("kind", HALVES, ids=lambda k: k.name)

@pytest.fixture(autouse=True)
def nothing_called(monkeypatch: pytest.MonkeyPatch):
  """A kernel that calls a function of a library, as clang calls memset for `= {0}`, is refused: one may lie further away than a call reaches"""
  def refuse(name: str, _: list) -> int: raise AssertionError(f"a kernel calls {name}")
  monkeypatch.setattr(elf, "link_sym", refuse)

def normal(*shape: int) -> np.ndarray: return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
def tensor(x: np.ndarray) -> Tensor: return Tensor(x).realize()
def of_rows(got: np.ndarray, want: np.ndarray) -> np.ndarray:
  """NMSE of each row"""
  assert got.shape == want.shape
  error, power = ((x.astype(np.float64) ** 2).sum(-1) for x in (got - want, want))
  return error / np.maximum(power, power.mean())
def nmse(got: np.ndarray, want: np.ndarray) -> float:
  """Of the worst row: a row that is wrong is not hidden by the others"""
  return float(of_rows(got, want).max())
# a product of codes and numbers in fixed point is off by 5e-10, one of floats by 1e-13
FIXED, FLOAT = 3e-9, 1e-11
# two such products, one of the other's result or one times the other: what some rows are is a few of their numbers, off by as much as chance has it,
# the worst of 24 by 3e-9 in the middle and 9e-9 at most over a hundred scales (numpy, the same fixed point)
CHAINED = 1e-8
def limit(kind: T) -> float: return FLOAT if kind in FLOATS else FIXED
def same(got: Tensor, want: np.ndarray | Tensor, limit: float = FIXED) -> None:
  assert nmse(got.numpy(), want.numpy() if isinstance(want, Tensor) else want) < limit
def same_chained(got: Tensor, want: Tensor) -> None:
  each = of_rows(got.numpy(), want.numpy())
  assert each.mean() < FIXED and each.max() < CHAINED
def load(cls: type, kind: T, *shape: int):
  data, want = random_weight(kind, shape)
  w = cls.load(kind, shape, data)
  assert w.layout is not None
  return w, want.astype(np.float64)
def norm(n: int) -> RMSNorm: return RMSNorm(tensor(1 + 0.1 * normal(n)), 1e-5)
def width(kind: T, least: int = 96) -> int: return -(-least // GGML_QUANT_SIZES[kind][0]) * GGML_QUANT_SIZES[kind][0]

@KINDS
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_layout(kind: T, rows: int):
  """What the interleaved stream holds is what the file holds, extremes too"""
  shape = (8, rows, width(kind))
  data, want = random_weight(kind, shape, extreme=True)
  w = QuantizedExpertWeights.load(kind, shape, data)
  assert w.layout is not None and w.planes["stream"].shape[1] == -(-rows // 16)
  np.testing.assert_array_equal(w.dequantize().numpy(), want)
  np.testing.assert_array_equal(w[Tensor([1, 0, 1])].dequantize().numpy(), want[[1, 0, 1]])

@KINDS
def test_packer(kind: T):
  """The compiled pass over the file's bytes makes what numpy makes of the planes, bit for bit"""
  for shape in ((37, 3), (16, 1), (2, 33, 2), (3, 5, 4)):
    shape = (*shape[:-1], shape[-1] * width(kind, 32))
    data, _ = random_weight(kind, shape, extreme=True)
    planes = {name: p.numpy() for name, p in split_planes(kind, shape, Tensor(data)).items()}
    np.testing.assert_array_equal(packer(kind, Device.DEFAULT)(shape, data).numpy(), interleaved(kind).interleave(shape, planes))

def test_packer_by_parts(monkeypatch):
  """Threads share the groups of rows: each is made, and in its place"""
  shape = (3, 53, 96)
  data, _ = random_weight(T.Q4_0, shape)
  planes = {name: p.numpy() for name, p in split_planes(T.Q4_0, shape, Tensor(data)).items()}
  monkeypatch.setattr(cpu_layout, "PACK_BYTES", 1)
  np.testing.assert_array_equal(packer(T.Q4_0, Device.DEFAULT)(shape, data).numpy(), interleaved(T.Q4_0).interleave(shape, planes))

@KINDS
@pytest.mark.parametrize("tokens,rows", [(1, 33), (5, 48), (29, 23)])
def test_mul_mat(kind: T, tokens: int, rows: int):
  w, want = load(QuantizedLinear, kind, rows, width(kind))
  x = normal(tokens, w.shape[1])
  same(w(tensor(x)), x @ want.T, limit(kind))

WIDE = ("__AVX512VNNI__", "__AVX512BW__", "__AVX512F__", "__AVXVNNI__")
LACKING = {"": (), "AVX2": WIDE, "AVX-VNNI": WIDE, "neither": (*WIDE, "__AVX2__")}
FLAGS = set(cpuinfo("flags").split())

@pytest.fixture(params=LACKING)
def instructions(request, monkeypatch) -> str:
  """Kernels are compiled as for a CPU that has no more than these"""
  wanted, prelude = request.param, cpu.PRELUDE
  if wanted == "AVX-VNNI":   # its instruction is one of AVX-512 too, in other bytes
    if not FLAGS & {"avx_vnni", "avx512_vnni"}: pytest.skip("this CPU has no vpdpbusd")
    prelude = "#define __AVXVNNI__\n" + (prelude if "avx_vnni" in FLAGS else prelude.replace("%{vex%} ", ""))
  monkeypatch.setattr(cpu, "PRELUDE", "".join(f"#undef {name}\n" for name in LACKING[wanted]) + prelude)
  return wanted

@pytest.mark.parametrize("tokens", [1, 13])
def test_mul_mat_by_other_instructions(tokens: int, instructions: str):
  """What CPUs without products of bytes, or with shorter vectors, compile"""
  for kind in (T.Q4_0, T.Q6_K, T.Q8_0, T.F16, T.IQ4_NL, T.IQ2_XS):
    w, want = load(QuantizedLinear, kind, 23, width(kind))
    x = normal(tokens, w.shape[1])
    same(w(tensor(x)), x @ want.T)

@pytest.mark.parametrize("kind,codes", [(T.Q4_0, slice(2, 18)), (T.Q5_0, slice(2, 22)), (T.Q6_K, slice(0, 192)), (T.Q2_K, slice(16, 80)),
                                        (T.Q8_0, slice(2, 34))])
def test_largest_codes_and_numbers(kind: T, codes: slice, instructions: str):
  """Sums of the largest codes and of numbers whose every byte is at its bound are not cut"""
  per, nbytes = GGML_QUANT_SIZES[kind]
  data = random_weight(kind, (16, 2 * per))[0].reshape(-1, nbytes).copy()
  data[:, codes] = 127 if kind == T.Q8_0 else 255
  want = dequantize(data, kind).reshape(16, 2 * per).astype(np.float64)
  w = QuantizedLinear.load(kind, (16, 2 * per), data.reshape(-1))
  for high in (127, -127):
    x = np.full((3, 2 * per), (high << 8) - 128, np.float32)
    x[:, ::32] = 32639
    for tokens in (x[:1], x): same(w(tensor(tokens)), tokens.astype(np.float64) @ want.T)

def test_the_compiler_says_nothing(monkeypatch, capfd):
  """For CPUs with shorter vectors, too: what clang says stands before an answer's first word"""
  w, _ = load(QuantizedLinear, T.IQ4_NL, 16, 64)
  sources, pack_source = [], cpu_layout.pack_source
  monkeypatch.setattr(cpu_layout, "pack_source", lambda *args: sources.append(pack_source(*args)) or sources[0])
  packer.__wrapped__(T.IQ4_NL, Device.DEFAULT)
  columns = "float* x, float* X, float* P, float* S, const byte* B"
  sources.append(f"""{cpu.PRELUDE}{cpu.LOOK}{cpu.ROTATE}{cpu.dot("dot", w)}WIDE void kernel({columns}) {{
    v16f y[2] = {{0}};
    stage(x, 0, rms(x, 64, 1), 64, X, P, S);
    dot(2, B, X, P, S, (const long[]){{0, 64}}, y);
    put(x, plus(rotate(y[0], 0, 64, 0, x), x, 9), 9);
  }}""")
  for arch in ("haswell", "alderlake", "sapphirerapids"): assert all(ClangCompiler(["x86_64", arch]).compile(source) for source in sources)
  assert capfd.readouterr().err == ""

def test_fixed_point_of_the_largest():
  """A unit's largest number rounds to what its bytes hold, whatever it is"""
  w, want = load(QuantizedLinear, T.Q4_0, 16, 32 * 512)
  for scale in (1.0, -1e-12, 3e8):
    x = normal(1, w.shape[1]) * np.float32(scale)
    same(w(tensor(x)), x @ want.T)

@KINDS
def test_mul_mat_id(kind: T):
  w, want = load(QuantizedExpertWeights, kind, 3, 21, width(kind))
  x, sel = normal(2, 1, w.shape[2]), np.int32([[2, 0, 7], [1, -1, 2]])
  same(w(tensor(x), tensor(sel)), np.einsum("ti,tkoi->tko", x[:, 0], want[sel.clip(0, 2)]), limit(kind))
  x = normal(2, 3, w.shape[2])
  same(w(tensor(x), tensor(sel)), np.einsum("tki,tkoi->tko", x, want[sel.clip(0, 2)]), limit(kind))

@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_a_matrix_a_head(tokens: int):
  w, want = load(QuantizedLinear, T.Q8_0, 5, 20, 64)
  x = normal(tokens, 5, 64)
  same(w(tensor(x)), np.einsum("thi,hoi->tho", x, want))

@KINDS
def test_embedding(kind: T):
  w, want = load(QuantizedEmbedding, kind, 37, width(kind))
  for i in (0, 17, 36): same(w(tensor(np.int32([i]))), want[[i]].astype(np.float32), 1e-13)
  same(w(tensor(np.int32([99]))), want[[36]].astype(np.float32), 1e-13)
  same(w(tensor(np.int32([3, 36, 0]))), want[[3, 36, 0]].astype(np.float32), 1e-13)

def both(form: str, primitive: Primitive, *args) -> tuple:
  """What the form that a call takes gives, and the plain ops"""
  (bound := primitive.signature.bind(*args)).apply_defaults()
  assert primitive.choose(*bound.args) == form
  got = primitive(*args)
  with plain_ops(): return got, primitive(*args)

# heads whose rotated numbers are not whole vectors, and those where they are
HEADS = pytest.mark.parametrize("head,nope", [(24, 16), (48, 32)])

@HEADS
def test_norm_linear(head: int, nope: int):
  a, b = load(QuantizedLinear, T.Q4_0, 3 * head, 96)[0], load(QuantizedLinear, T.Q8_0, 21, 96)[0]
  x, n, step, rope = tensor(normal(1, 96)), norm(96), decoding(5), Rope(rope_table(head - nope, 10000.0, 8), head, nope)
  for got, want in zip(*both("cpu_decode", norm_linear, step, x, n, [a, b], rope)): same(got, want)
  for got, want in zip(*both("cpu_decode", norm_linear, step, x, None, [b], None, tensor(normal(1, 21)))): same(got, want)

@HEADS
@pytest.mark.parametrize("tokens", [2, 12, 19])
def test_norm_linear_of_many(tokens: int, head: int, nope: int):
  a, b = load(QuantizedLinear, T.Q4_K, 3 * head, 256)[0], load(QuantizedLinear, T.Q8_0, 21, 256)[0]
  x, n, rope, step = tensor(normal(tokens, 256)), norm(256), Rope(rope_table(head - nope, 10000.0, 32), head, nope), prefilling(5, tokens)
  for got, want in zip(*both("cpu_prefill", norm_linear, step, x, n, [a, b], rope)): same(got, want, FLOAT)
  for got, want in zip(*both("cpu_prefill", norm_linear, step, x, None, [a], None, tensor(normal(tokens, 3 * head)))): same(got, want, FLOAT)

SCATTERED = np.int32([[4, 1, 5]])

def check_attention(form: str, step: Step, kept, scale: float, limit: float, C: int = 384):
  H, L, R, nope = 5, 64, 16, 32
  k_b, n, rope = load(QuantizedLinear, T.Q8_0, H, L, nope)[0], norm(L), Rope(rope_table(R, 10000.0, C), nope + R, nope)
  q, kv = tensor(normal(step.tokens, H * (nope + R))), tensor(normal(step.tokens, L + R))
  rows = normal(C, L + R)
  caches = [tensor(rows).cast(kept).contiguous().realize() for _ in range(2)]
  (got, cache), _ = both(form, latent_attention, step, q, kv, k_b, n, caches[0], rope, scale)
  with plain_ops(): want, other = latent_attention(step, q, kv, k_b, n, caches[1], rope, scale)
  Tensor.realize(got, cache, want, other)
  same(cache.cast(dtypes.float), other.cast(dtypes.float), 1e-7)
  same(got, want, limit)

@pytest.mark.parametrize("kept", [dtypes.half, dtypes.float])
@pytest.mark.parametrize("pos,tokens", [(0, 2), (0, 70), (61, 5), (64, 29), (130, 3)])
def test_attention_of_many(pos: int, tokens: int, kept):
  check_attention("cpu_prefill", prefilling(pos, tokens, tables=SCATTERED), kept, 0.01, 1e-8)  # scores of hundreds: their rounding is in the weights

# several steps of positions, a tile that is not whole; a step of one position; fewer heads than threads, where there are two. Behind the last
# token there is no number
@pytest.mark.parametrize("kept", [dtypes.half, dtypes.float])
@pytest.mark.parametrize("pos,tokens,H,L,R,nope,v", [(0, 32, 2, 64, 16, 32, 32), (47, 101, 3, 128, 32, 96, 64), (68, 29, 1, 32, 16, 32, 96)])
def test_attention_of_a_long_chunk(pos: int, tokens: int, H: int, L: int, R: int, nope: int, v: int, kept):
  (k_b, keys), (v_b, values) = load(QuantizedLinear, T.Q8_0, H, L, nope), load(QuantizedLinear, T.Q4_0, H, v, L)
  rows, q, scale = normal(384, L + R), normal(tokens, H * (nope + R)), 1e-3
  places = (SCATTERED[0][:, None] * PAGE + np.arange(PAGE)).flatten()
  rows[places[pos + tokens:]] = np.nan
  cache = tensor(rows).cast(kept).contiguous().realize()
  step = prefilling(pos, tokens, tables=SCATTERED)
  got = cpu_unabsorbed.unabsorbed_attention(tensor(q), cache, k_b, v_b, step.start, step.tables, scale).numpy().reshape(tokens, H, v)
  own = cache.cast(dtypes.float).numpy().astype(np.float64)[places[:pos + tokens]]
  keys = np.concatenate([np.einsum("cl,hln->hcn", own[:, :L], keys.reshape(H, L, nope)), np.broadcast_to(own[:, L:], (H, len(own), R))], -1)
  scores = np.einsum("thd,hcd->thc", q.reshape(tokens, H, -1), keys) * scale
  scores[np.broadcast_to((np.arange(len(own)) > pos + np.arange(tokens)[:, None])[:, None], scores.shape)] = -np.inf
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  want = np.einsum("thc,hcv->thv", weights / weights.sum(-1, keepdims=True), np.einsum("cl,hvl->hcv", own[:, :L], values.reshape(H, v, L)))
  assert nmse(got, want) < 1e-9   # scores of tens: their rounding is in the weights

@pytest.mark.parametrize("kept", [dtypes.half, dtypes.float])
@pytest.mark.parametrize("pos", [0, 3, 15, 16, 40, 63, 64, 130])
def test_attention(pos: int, kept): check_attention("cpu_decode", decoding(pos, tables=SCATTERED), kept, 0.1, 1e-8)

@pytest.mark.parametrize("kept", [dtypes.half, dtypes.float])
@pytest.mark.parametrize("pos", [0, 3, 40, 130])
def test_attention_of_scores_far_below_zero(pos: int, kept):
  """Keys that are not there, up to 16 of a page, score nothing: their zeros would be the largest"""
  H, L, R = 5, 64, 16
  q, rows = np.full((1, H, L + R), -1, np.float32), tensor(1 + 0.1 * normal(384, L + R)).cast(kept).contiguous().realize()
  got = cpu.mla_attention_decode(tensor(q[..., :L]), tensor(q.reshape(1, -1)), rows, tensor(np.int32([pos])), tensor(SCATTERED), 2.0)
  at = np.arange(pos + 1)
  keys = rows.numpy()[SCATTERED[0, at // 64] * 64 + at % 64].astype(np.float64)
  scores = np.einsum("hi,pi->hp", q[0].astype(np.float64), keys) * 2
  assert scores.max() < -100
  weights = np.exp(scores - scores.max(1, keepdims=True))
  same(got, (weights / weights.sum(1, keepdims=True) @ keys[:, :L])[None], 1e-8)

# ---- a token of each of several sequences ----

FEW = pytest.mark.parametrize("tokens", [2, 3, 5, 8, 12, 13, 33])

def sequences(tokens: int) -> tuple[Step, np.ndarray, np.ndarray]:
  """A step over random scattered pages, its positions and tables. From three on, the first two share their first page and the last is not there."""
  rng = np.random.default_rng(tokens)
  start = rng.integers(0, 192, tokens)
  tables = rng.permutation(np.arange(1, 1 + 3 * tokens)).reshape(tokens, 3)
  if tokens > 2:
    start[:2] = 130, 64
    tables[1, 0], tables[-1], start[-1] = tables[0, 0], 0, 0
  return decoding(*start, tables=tables), start, tables

def alone(step: Step, token: int) -> Step: return decoding(step.start.numpy()[token], tables=step.tables.numpy()[token:token + 1])
def row(x: Tensor, token: int) -> Tensor: return tensor(x.numpy()[token:token + 1])
def as_alone(got: Tensor, each: list[Tensor]) -> None:
  """The bytes that a sequence gets without the others"""
  np.testing.assert_array_equal(got.numpy(), np.concatenate([one.numpy() for one in each]))

@FEW
@HEADS
def test_norm_linear_of_few(tokens: int, head: int, nope: int):
  kind, (step, *_), rope = (T.Q4_0, T.Q6_K, T.F32)[tokens % 3], sequences(tokens), Rope(rope_table(head - nope, 10000.0, 192), head, nope)
  a, b = load(QuantizedLinear, kind, 3 * head, 256)[0], load(QuantizedLinear, T.Q8_0, 21, 256)[0]
  x, n, residual = tensor(normal(tokens, 256)), norm(256), tensor(normal(tokens, 3 * head))
  for i, (got, want) in enumerate(zip(*both("cpu_few", norm_linear, step, x, n, [a, b], rope))):
    same(got, want)
    as_alone(got, [norm_linear(alone(step, t), row(x, t), n, [a, b], rope)[i] for t in range(tokens)])
  for got, want in zip(*both("cpu_few", norm_linear, step, x, None, [a], None, residual)):
    same(got, want)
    as_alone(got, [norm_linear(alone(step, t), row(x, t), None, [a], None, row(residual, t))[0] for t in range(tokens)])

def test_prefill_by_other_instructions(instructions: str):
  """Whatever number of columns a tile has"""
  w = load(QuantizedLinear, T.Q4_0, 40, 256)[0]
  for tokens in (2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 18):
    (got,), (want,) = both("cpu_prefill", norm_linear, prefilling(0, tokens), tensor(normal(tokens, 256)), None, [w])
    same(got, want)

def test_few_as_alone_by_other_instructions(instructions: str):
  """Where one column's words are multiplied as they come, those of several in a loop, sums are the same"""
  x = tensor(normal(7, 512))
  for kind in (T.Q4_0, T.Q5_K, T.Q6_K, T.Q8_0, T.IQ4_NL):
    w = load(QuantizedLinear, kind, 40, 512)[0]
    as_alone(norm_linear(decoding(*[5] * 7), x, None, [w])[0], [norm_linear(decoding(5), row(x, t), None, [w])[0] for t in range(7)])

@FEW
@pytest.mark.parametrize("kept", [dtypes.half, dtypes.float])
def test_attention_of_few(tokens: int, kept):
  H, L, R, nope, (step, start, tables) = 5, 64, 16, 32, sequences(tokens)
  k_b, n, rope = load(QuantizedLinear, T.Q8_0, H, L, nope)[0], norm(L), Rope(rope_table(R, 10000.0, 192), nope + R, nope)
  q, kv, rows = tensor(normal(tokens, H * (nope + R))), tensor(normal(tokens, L + R)), normal((1 + 3 * tokens) * 64, L + R)
  def cache() -> Tensor: return tensor(rows).cast(kept).contiguous().realize()
  scale = 0.0004  # softmax in which every key has weight: where one has all of it, what is read of the others is not judged
  before = cache().numpy()
  (got, written), _ = both("cpu_few", latent_attention, step, q, kv, k_b, n, cache(), rope, scale)
  with plain_ops(): want, other = latent_attention(step, q, kv, k_b, n, cache(), rope, scale)
  Tensor.realize(got, written, want, other)
  there = tokens - (tokens > 2)
  assert np.isfinite(got.numpy()).all()
  if kept is dtypes.half: same(got[:there], want[:there], 1e-7)   # the rounding of a token's own row
  else: same_chained(got[:there], want[:there])
  own = tables[np.arange(there), start[:there] // 64] * 64 + start[:there] % 64
  after, others = written.numpy(), np.setdiff1d(np.arange(64, len(rows)), own)
  same(tensor(after[own].astype(np.float32)), other.numpy()[own].astype(np.float32), 1e-7)
  np.testing.assert_array_equal(after[others], before[others])
  each = [latent_attention(alone(step, t), row(q, t), row(kv, t), k_b, n, cache(), rope, scale) for t in range(there)]
  as_alone(got[:there], [context for context, _ in each])
  np.testing.assert_array_equal(after[own], [cache.numpy()[place] for (_, cache), place in zip(each, own)])

@FEW
def test_feed_forward_of_few(tokens: int):
  form, (step, *_) = "cpu_few", sequences(tokens)
  D, F, E = 256, 32 * 3, 6
  gate, up = load(QuantizedExpertWeights, T.Q4_0, E, F, D)[0], load(QuantizedExpertWeights, T.Q4_K, E, F, D)[0]
  down = load(QuantizedExpertWeights, T.Q5_1, E, 75, F)[0]
  x, n, residual = tensor(0.1 * normal(tokens, D)), norm(D), tensor(normal(tokens, 75))
  logits, how = tensor(normal(tokens, E)), routing.Routing(3, routing.Gating.SIGMOID, True, 1.8)
  (hidden, sel), (want, sel_ops) = both(form, expert_gate_up, step, x, n, gate, up, logits, how)
  Tensor.realize(hidden, sel)
  assert sel.tolist() == sel_ops.tolist()
  same_chained(hidden, want)
  as_alone(hidden, [expert_gate_up(alone(step, t), row(x, t), n, gate, up, row(logits, t), how)[0] for t in range(tokens)])
  shared = tensor(normal(tokens, 256)), load(QuantizedLinear, T.Q6_K, 75, 256)[0]
  everyone = np.tile(np.int32([9, -4, 1]), (tokens, 1))  # one expert for all, clamped
  for beside, ids in ((None, everyone), (shared, sel.numpy())):
    got = expert_down(step, hidden, down, tensor(ids), residual, beside)
    with plain_ops(): same(got, expert_down(step, hidden, down, tensor(ids.clip(0, E - 1)), residual, beside))
    def of(t: int) -> Tensor:
      own = None if beside is None else (row(beside[0], t), beside[1])
      return expert_down(alone(step, t), row(hidden, t), down, tensor(ids[t:t + 1]), row(residual, t), own)
    as_alone(got, list(map(of, range(tokens))))
  whole = load(QuantizedLinear, T.F32, E, D)[0], how, FeedForward(gate, up, down), None   # a thread stages one unit of a row, or two
  got, want = both(form, mixture, step, x, n, *whole, residual)
  same(got, want, 3 * CHAINED)   # three, one of another's result
  as_alone(got, [mixture(alone(step, t), row(x, t), n, *whole, row(residual, t)) for t in range(tokens)])
  gate, up, router = (load(QuantizedLinear, k, 40, D)[0] for k in (T.Q8_0, T.F16, T.F32))
  for i, (got, want) in enumerate(zip(*both(form, gate_up, step, x, n, gate, up, router), strict=True)):
    same(got, want)
    as_alone(got, [gate_up(alone(step, t), row(x, t), n, gate, up, router)[i] for t in range(tokens)])

@pytest.mark.parametrize("gating", routing.Gating)
@pytest.mark.parametrize("experts", [4, 33])
def test_choose_experts(gating: routing.Gating, experts: int):
  logits, bias = tensor(normal(1, experts).round(1)), tensor(0.1 * normal(experts))   # rounded: ties
  for b in (None, bias):
    for normalize in (False, True):
      how = routing.Routing(3, gating, normalize, 1.8, b)
      (sel, weights), (sel_ops, weights_ops) = cpu.choose_experts(logits, how), routing.choose_experts(logits, how)
      assert sel.tolist() == sel_ops.tolist()
      same(weights, weights_ops)

@pytest.mark.parametrize("gating", routing.Gating)
def test_choose_experts_in_groups(gating: routing.Gating):
  how = routing.Routing(5, gating, True, 1.8, None, 4, 2)
  logits, bias = tied(64, how, 24)
  if gating == routing.Gating.SOFTMAX: bias = None
  else: how = replace(how, bias=tensor(bias))
  want, want_weights, _ = route(logits, bias, names_of(how))
  sel, weights = cpu.choose_experts(tensor(logits), how)
  assert np.array_equal(sel.numpy(), want) and np.allclose(weights.numpy(), want_weights, rtol=1e-5)

def test_feed_forward():
  form, step = "cpu_decode", decoding(0)
  D, F, E = 96, 32 * 3, 4
  gate, up = (load(QuantizedExpertWeights, T.Q4_0, E, F, D)[0] for _ in range(2))
  down = load(QuantizedExpertWeights, T.Q5_1, E, 75, F)[0]
  x, n, residual = tensor(0.1 * normal(1, D)), norm(D), tensor(normal(1, 75))
  logits, how = tensor(normal(1, E)), routing.Routing(3, routing.Gating.SIGMOID, True, 1.8)
  (hidden, sel), (want, sel_ops) = both(form, expert_gate_up, step, x, n, gate, up, logits, how)
  Tensor.realize(hidden, sel)
  assert sel.tolist() == sel_ops.tolist()
  same(hidden, want)
  aside = load(QuantizedLinear, T.Q6_K, 75, 256)[0]
  for shared in (None, (tensor(normal(1, 256)), aside)):
    for ids in (sel.numpy(), np.int32([[9, -4, 1]])):  # the second clamped
      got = expert_down(step, hidden, down, tensor(ids), residual, shared)
      with plain_ops(): same(got, expert_down(step, hidden, down, tensor(ids.clip(0, E - 1)), residual, shared))
  gate, up, router = (load(QuantizedLinear, k, 40, D)[0] for k in (T.Q8_0, T.F16, T.F32))
  for got, want in zip(*both(form, gate_up, step, x, n, gate, up, router), strict=True): same(got, want)

@pytest.mark.parametrize("tokens", [2, 16, 17, 27])
def test_feed_forward_of_many(tokens: int):
  """Of up to eight tokens an expert the experts are multiplied as those of a few tokens"""
  form, step = "cpu_prefill", prefilling(0, tokens)
  D, F, E = 256, 32 * 3, 6
  of_experts = "cpu_few" if tokens <= 16 else form
  gate, up = load(QuantizedExpertWeights, T.Q4_0, E, F, D)[0], load(QuantizedExpertWeights, T.Q4_K, E, F, D)[0]
  down = load(QuantizedExpertWeights, T.Q5_1, E, 75, F)[0]
  x, n, residual = tensor(0.1 * normal(tokens, D)), norm(D), tensor(normal(tokens, 75))
  logits, how = tensor(normal(tokens, E)), routing.Routing(3, routing.Gating.SIGMOID, True, 1.8)
  (hidden, sel), (want, sel_ops) = both(of_experts, expert_gate_up, step, x, n, gate, up, logits, how)
  Tensor.realize(hidden, sel)
  assert sel.tolist() == sel_ops.tolist()
  same(hidden, want)
  aside, beside = load(QuantizedLinear, T.Q6_K, 75, 256)[0], tensor(normal(tokens, 256))
  everyone = np.tile(np.int32([9, -4, 1]), (tokens, 1))  # one expert for all, clamped
  for shared in (None, (beside, aside)):
    for ids in (sel.numpy(), everyone):
      assert expert_down.choose(step, hidden, down, tensor(ids), residual, shared) == of_experts
      got = expert_down(step, hidden, down, tensor(ids), residual, shared)
      with plain_ops(): same(got, expert_down(step, hidden, down, tensor(ids.clip(0, E - 1)), residual, shared))
  gate, up, router = (load(QuantizedLinear, k, 40, D)[0] for k in (T.Q8_0, T.F16, T.F32))
  for got, want in zip(*both(form, gate_up, step, x, n, gate, up, router), strict=True): same(got, want)

@pytest.mark.parametrize("rows,size", [(1, 5), (3, 16), (8, 1000)])
def test_argmax(rows: int, size: int):
  x = normal(rows, size)
  assert draw.argmax(tensor(x)).tolist() == x.argmax(1).tolist()
  x[:, [size // 2, size - 1]] = 9.0
  assert draw.argmax(tensor(x)).tolist() == [size // 2] * rows

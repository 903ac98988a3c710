"""Several tokens as columns of a matrix times vector (nn/matvec.py): each gets the bytes that it gets alone, a block reads its weights once for all
of its columns, and their vectors fit shared memory. By hand, as every format on every target takes minutes; test_primitives.py has the primitives
that are made of it."""
from __future__ import annotations
import re
from typing import Any, Callable
import numpy as np, pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from helpers import HALVES, decoding, random_weight
from mockcuda import on_cuda
from mockmetal import on_metal
from extra.bench import no_device, shared_bytes
from tinygrad import Tensor, UOp
from tinygrad.apps.mla import RMSNorm
from tinygrad.apps.quantized import QuantizedLinear
from tinygrad.engine.realize import lower_and_compile
from tinygrad.nn import kernel, matvec
from tinygrad.nn.intrinsics import TARGETS
from tinygrad.nn.moe import gate_up
from tinygrad.nn.norm_linear import norm_linear
from tinygrad.uop.ops import Ops

GPUS = {"cuda": on_cuda, "metal": on_metal}

def normal(*shape: int) -> np.ndarray: return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
def linear(kind: T, rows: int, width: int) -> QuantizedLinear: return QuantizedLinear.load(kind, (rows, width), random_weight(kind, (rows, width))[0])

def product(w: QuantizedLinear, x: np.ndarray) -> np.ndarray:
  """Of RMSNorm(x), by the form under test"""
  norm = RMSNorm(Tensor(1 + 0.1 * normal(x.shape[1])).realize(), 1e-5)
  y, = norm_linear.forms["decode"].run(decoding(*range(len(x))), Tensor(x).realize(), norm, [w], None, None)
  return y.numpy()

def check(kind: T, rows: int, width: int, tokens: int) -> None:
  w, x = linear(kind, rows, width), normal(tokens, width)
  together = product(w, x)
  for i in {0, tokens - 1}: assert np.array_equal(together[i:i + 1], product(w, x[i:i + 1]))

@pytest.mark.parametrize("kind", HALVES, ids=lambda k: k.name)
@pytest.mark.parametrize("gpu", GPUS)
def test_every_type(gpu: str, kind: T):
  with GPUS[gpu](): check(kind, 5, max(GGML_QUANT_SIZES[kind][0], 96), 3)

# a unit; a warp and its tail; a team of several warps; x too wide for shared memory; room for two columns
SHAPES = [("cuda", T.Q4_0, 7, 32, 9), ("cuda", T.Q4_0, 33, 1088, 8), ("cuda", T.Q4_K, 3, 5120, 5), ("cuda", T.F16, 3, 12800, 3),
          ("cuda", T.Q4_0, 34, 512, 17), ("cuda", T.Q4_0, 5, 512, 33), ("metal", T.Q5_0, 5, 2048, 3), ("metal", T.F16, 3, 992, 2),
          ("metal", T.Q8_0, 33, 96, 9)]

@pytest.mark.parametrize("gpu,kind,rows,width,tokens", SHAPES, ids=lambda v: getattr(v, "name", str(v)))
def test_shapes(gpu: str, kind: T, rows: int, width: int, tokens: int):
  with GPUS[gpu](): check(kind, rows, width, tokens)

# ---- what is rendered ----

def program(y: Tensor) -> UOp:
  """The last kernel of what y, not yet computed, takes"""
  return [call.src[0] for call in lower_and_compile(y.linear_with_vars()[0]).src if call.src[0].op is Ops.PROGRAM][-1]

def on(target: str, tokens: int, width: int, router: bool = False) -> UOp:
  with no_device(target):
    x, step, norm = Tensor.empty(tokens, width), decoding(*range(tokens)), RMSNorm(Tensor.empty(width), 1e-5)
    w, r = (QuantizedLinear.load(k, (64, width), np.zeros(64 * width * b // n, np.uint8)) for k, (n, b) in
            ((k, GGML_QUANT_SIZES[k]) for k in (T.Q4_0, T.F32)))
    of, arguments = (gate_up, (w, w, r)) if router else (norm_linear, ([w], None, None))
    return program(of.forms["decode"].run(step, x, norm, *arguments)[0])

def loads(source: str) -> list[str]:
  """Of the weights' planes: neither of y, nor of x and the norm"""
  return re.findall(r"\bdata(?!0_|1_|2_)\d+_\d+\b", source.split(") {", 1)[1])

def test_weights_are_read_once_for_all_columns():
  one, four, eight = (on("CUDA", n, 2048) for n in (1, 4, 8))
  assert len(loads(one.src[2].arg)) == len(loads(four.src[2].arg)) == len(loads(eight.src[2].arg)) > 4
  assert one.arg.global_size == eight.arg.global_size

@pytest.mark.parametrize("target,width,router,columns", [("CUDA", 2048, False, 8), ("CUDA", 5120, False, 4), ("CUDA", 2048, True, 4),
                                                         ("CUDA", 12288, False, 2), ("METAL", 2048, False, 2), ("METAL", 2048, True, 1)])
def test_as_many_columns_as_find_room(target: str, width: int, router: bool, columns: int):
  one, many = on(target, 1, width, router), on(target, 16, width, router)
  assert shared_bytes(one) < shared_bytes(many) <= TARGETS[target].shared_bytes if columns > 1 else shared_bytes(one) == shared_bytes(many)
  assert many.arg.global_size[0] == one.arg.global_size[0] * 16 // columns

# ---- faults ----

def first_column(read: Callable) -> Callable: return lambda self, column, unit: read(self, 0, unit)
def next_column(spread: Callable) -> Callable:
  def faulty(target: Any, columns: list, lane: UOp, lanes: int) -> tuple:
    own, first, is_first = spread(target, columns, lane, lanes)
    return own, (first + 1) % len(columns), is_first
  return faulty
FAULTS = {
  "reads another's vector": (matvec.Int8Vectors, "read", first_column),
  "stores as another's": (matvec, "spread_sums", next_column),
  "another's rms": (matvec.SquareSums, "of_column", lambda of: lambda self, column, barrier: of(self, column * 0, barrier)),
  "a layout of all tokens": (matvec, "thread_layout", lambda of: lambda segments, lanes, jobs, *rest: of(segments, lanes, jobs * 64, *rest)),
  "a column too many": (matvec.TokenGroup, "inside", lambda of: lambda self, column: None),
}

@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch):
  owner, name, faulty = FAULTS[fault]
  with on_cuda():
    w, x = linear(T.Q4_0, 33, 512), normal(3, 512)
    want = np.concatenate([product(w, x[i:i + 1]) for i in range(3)])
    assert np.array_equal(product(w, x), want)
    monkeypatch.setattr(kernel, "_programs", {})
    monkeypatch.setattr(owner, name, faulty(getattr(owner, name)))
    if fault == "a column too many": monkeypatch.setattr(matvec.TokenGroup, "token", lambda self, column: self.number * self.columns + column)
    try: assert not np.array_equal(product(w, x), want)
    except RuntimeError as e: assert fault == "a column too many" and "outside its buffers" in str(e)

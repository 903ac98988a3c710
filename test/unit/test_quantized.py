"""Block formats: planes, products and lookups against the `gguf` package's dequantization, on random bytes."""
from dataclasses import replace
from typing import Any
import numpy as np, pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from helpers import HALVES, random_weight
from host_planes import planes_of
from mockcuda import on_cuda
from oracle import nmse
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.nn import cpu
from tinygrad.apps.quantized import (FLOATS, FORMATS, Numbers, QuantizedEmbedding, QuantizedExpertWeights, QuantizedLinear, QuantizedWeight, UnitView,
                                     header_of, held_bytes, interleaved, plane_names, split_planes)

EXPERTS, ROWS, BLOCKS = 3, 5, 3  # a stack of matrices; odd numbers, so that rows of 32-blocks are no whole vectors
INDEXED = [kind for kind in HALVES if kind.name.startswith(("IQ1", "IQ2", "IQ3", "TQ"))]
def stack_of(kind: T) -> tuple[int, int, int]: return EXPERTS, ROWS, BLOCKS * max(GGML_QUANT_SIZES[kind][0], 32)

# bytes of a block where they are not the file's: its indices are looked up. Else every bit is there once
HELD = {T.IQ1_S: 70, T.IQ1_M: 104, T.IQ2_XXS: 102, T.IQ2_XS: 106, T.IQ2_S: 106, T.IQ3_XXS: 134, T.IQ3_S: 134, T.TQ1_0: 66}

def test_every_type_has_a_case(): assert set(HALVES) == {*FORMATS, *FLOATS} and len(HALVES) == 25

@pytest.mark.parametrize("kind", HALVES, ids=lambda k: k.name)
def test_bits(kind: T):
  shape = stack_of(kind)
  data, want = random_weight(kind, shape, extreme=True)
  w = QuantizedWeight.load(kind, shape, data)
  got = w.dequantize().numpy()
  assert got.dtype == np.float32 and np.array_equal(got, want)                # not nearly: the same float32 numbers
  rows = ROWS if w.layout is None else -(-ROWS // cpu.ROWS) * cpu.ROWS        # interleaved rows are whole groups
  nbytes = GGML_QUANT_SIZES[kind][1]
  held = len(data) // nbytes * HELD.get(kind, nbytes)
  assert held_bytes(kind, shape) == held and w.nbytes == sum(p.nbytes() for p in w.planes.values()) == held // ROWS * rows

def on_the_host(kind: T, shape: tuple[int, ...], data: np.ndarray) -> np.ndarray:
  """The matrix from the planes by the table's row alone, compiled by nobody"""
  fmt, units = FORMATS[kind], GGML_QUANT_SIZES[kind][0] // 32
  planes = split_planes(kind, shape, data.view(Numbers))
  count, codes, low = int(np.prod(shape)) // 32, np.uint32(0), 0
  for i, width in enumerate(fmt.widths):
    k, byte = np.arange(8 // width).reshape(-1, 1), np.arange(4)
    part = (np.asarray(planes[f"q{i}"]).reshape(count, width, 1, 1) >> (8 * byte + width * k).astype(np.uint32)) & ((1 << width) - 1)
    codes, low = codes | (part.reshape(count, 32) << low), low + width
  values = np.float32(codes) - fmt.zero if fmt.values is None else np.float32(fmt.values)[codes]
  def at(name: str) -> Numbers: return np.repeat(planes[name].reshape(-1), count // planes[name].size).view(Numbers)
  with np.errstate(over="ignore"):
    scales = fmt.scales(UnitView(at, np.tile(np.arange(units, dtype=np.uint32), count // units).view(Numbers)))
    halves = values.reshape(count, len(scales), -1) * np.stack([np.float32(scale) for scale, _ in scales], 1)[..., None]
    if scales[0][1] is not None: halves += np.stack([np.float32(minimum) for _, minimum in scales], 1)[..., None]
  return halves.reshape(shape)

@pytest.mark.parametrize("kind", INDEXED, ids=lambda k: k.name)
def test_rows_of_the_table(kind: T):
  """Every entry of the types' tables, and what is not random in them"""
  shape = (2, 61, 16 * 256)
  data, want = random_weight(kind, shape, extreme=True)
  assert np.array_equal(on_the_host(kind, shape, data), want)

def assert_as_by_numpy(w: QuantizedWeight, data: np.ndarray) -> None:
  """What most tests of kernels have in place of planes made on the device"""
  planes = planes_of(w.kind, w.shape, data)
  assert {*planes} == {*w.planes}
  for name, plane in planes.items(): assert w.planes[name].numpy().tobytes() == plane.tobytes() and w.planes[name].shape == plane.shape, name

@pytest.mark.parametrize("kind", FORMATS, ids=lambda k: k.name)
def test_planes_of_a_gpu(kind: T):
  shape = (3, 5, 256)
  data, want = random_weight(kind, shape, extreme=True)
  with on_cuda():
    w = QuantizedWeight.load(kind, shape, data)
    assert np.array_equal(w.dequantize().numpy(), want)
    assert_as_by_numpy(w, data)

@pytest.mark.parametrize("kind,width,plane", [(T.BF16, 96, dtypes.uint32), (T.F16, 96, dtypes.uint32), (T.BF16, 70, dtypes.uint16),
                                              (T.F16, 70, dtypes.half)])
def test_16_bits_on_a_gpu(kind: T, width: int, plane: DType):
  """Two neighbours are an entry, where rows have whole units"""
  data, want = random_weight(kind, shape := (3, 5, width), extreme=True)
  with on_cuda():
    w = QuantizedExpertWeights.load(kind, shape, data)
    assert w.planes["w"].dtype == plane and w.nbytes == len(data)
    assert np.array_equal(w.dequantize().numpy(), want)
    made = QuantizedExpertWeights(kind, shape, split_planes(kind, shape, Tensor(data)))   # on the device
    assert made.planes["w"].dtype == plane and np.array_equal(made.dequantize().numpy(), want)
    assert np.array_equal(w[Tensor([2, 0])].dequantize().numpy(), want[[2, 0]])

HEADERS = T.Q4_1, T.Q5_1, T.Q4_K, T.Q5_K, T.IQ4_XS, T.IQ1_M
def test_header_bytes(): assert {kind for kind in FORMATS if header_of(kind)} == {*HEADERS}

@pytest.mark.parametrize("kind", HEADERS, ids=lambda k: k.name)
def test_headers_on_a_gpu(kind: T):
  """Of a matrix, as plain ops and as a kernel take them apart; the same bytes as without"""
  shape = (5, 3 * max(GGML_QUANT_SIZES[kind][0], 64))
  data, want = random_weight(kind, shape, extreme=True)
  with on_cuda():
    w = QuantizedLinear.load(kind, shape, data)
    assert {*w.planes} == {*plane_names(kind, len(shape))} and "header" in w.planes and w.nbytes == held_bytes(kind, shape)
    assert np.array_equal(w.dequantize().numpy(), want)
    assert_as_by_numpy(w, data)
    rows = [4, 0, 2, 3, 1]
    assert np.array_equal(QuantizedEmbedding(kind, shape, w.planes)(Tensor(rows, dtype=dtypes.int32)).numpy(), want[rows])
    assert "header" not in QuantizedWeight.load(kind, (1, *shape), data).planes

@pytest.mark.parametrize("kind", INDEXED, ids=lambda k: k.name)
def test_a_wrong_entry_is_noticed(kind: T, monkeypatch: pytest.MonkeyPatch):
  """An index one off, a scale's bit, another zero"""
  fmt, (data, want), faults = FORMATS[kind], random_weight(kind, shape := (1, 5, 256)), []
  def one_off(r: Any) -> Any: return fmt.lookups.index(r) ^ np.uint32(1)
  def flipped(p: UnitView) -> Any: return fmt.scales(UnitView(lambda name: p.at(name) ^ 1 if name == "s" else p.at(name), p.index))
  if fmt.lookups: faults.append(replace(fmt, lookups=replace(fmt.lookups, index=one_off)))
  if "s" in interleaved(kind).fields: faults.append(replace(fmt, scales=flipped))
  if fmt.values is None: faults.append(replace(fmt, zero=fmt.zero + 1))
  assert len(faults) > 1 or kind is T.TQ2_0
  for fault in faults:
    monkeypatch.setitem(FORMATS, kind, fault)
    assert not np.array_equal(on_the_host(kind, shape, data), want)

@pytest.mark.parametrize("kind", HALVES, ids=lambda k: k.name)
def test_uses(kind: T):
  """What a model does with weights, against float64: rows of an embedding, a matrix, a matrix a head, experts by id."""
  shape = stack_of(kind)
  data, want = random_weight(kind, shape)
  width, rng = shape[-1], np.random.default_rng(1)
  stack = QuantizedExpertWeights.load(kind, shape, data)
  heads = QuantizedLinear(kind, shape, stack.planes)
  table, matrix = (cls.load(kind, (EXPERTS * ROWS, width), data) for cls in (QuantizedEmbedding, QuantizedLinear))
  def x(*shape: int) -> np.ndarray: return rng.standard_normal(shape).astype(np.float32)
  rows, plain, per_head, one, each = [14, 0, 3, 3], x(2, width), x(2, EXPERTS, width), x(2, 1, width), x(3, 2, width)
  sel, sel_each = np.int32([[2, 0, 2], [1, 1, 0]]), np.int32([[2, 2], [0, 1], [1, 2]])  # ids may repeat
  got = [table(Tensor(rows)), matrix(Tensor(plain)), heads(Tensor(per_head)), stack(Tensor(one), Tensor(sel)), stack(Tensor(each), Tensor(sel_each))]
  Tensor.realize(*got)
  w = want.astype(np.float64)
  assert np.array_equal(got[0].numpy(), want.reshape(-1, width)[rows])
  for y, exact in zip(got[1:], (plain @ w.reshape(-1, width).T, np.einsum("thi,hoi->tho", per_head, w), np.einsum("ti,tkoi->tko", one[:, 0], w[sel]),
                                np.einsum("tki,tkoi->tko", each, w[sel_each]))):
    assert y.dtype == dtypes.float and nmse(y.numpy(), exact) < (1e-11 if kind in FLOATS else 1e-8)   # a CPU's fixed point

def test_a_shape_of_one_row_and_one_block():
  for kind in (T.Q4_0, T.Q6_K):
    shape = (1, GGML_QUANT_SIZES[kind][0])
    data, want = random_weight(kind, shape)
    assert np.array_equal(QuantizedWeight.load(kind, shape, data).dequantize().numpy(), want)

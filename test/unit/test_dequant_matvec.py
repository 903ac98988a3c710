"""What plain-ops products of quantized weights compute as tinygrad's compiler schedules them: on the CPU, and as the GPUs' kernels by their mocks."""
import contextlib
from typing import Any, Callable, Iterator
import numpy as np, pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from tinygrad.nn.primitive import plain_ops
from helpers import HALVES, random_weight
from mockcuda import on_cuda
from mockmetal import on_metal
from tinygrad import Tensor, dtypes
from tinygrad.apps.quantized import QuantizedExpertWeights, QuantizedLinear, QuantizedWeight

DEVICES:dict[str, Callable[[], Any]] = {"CPU": contextlib.nullcontext, "CUDA": on_cuda, "METAL": on_metal}

@pytest.fixture(params=DEVICES)
def device(request:pytest.FixtureRequest) -> Iterator[str]:
  with plain_ops(): yield request.param

def loaded(cls:type[QuantizedWeight], kind:T, shape:tuple[int, ...]) -> tuple[Callable[[], QuantizedWeight], np.ndarray]:
  """Made on the CPU, moved to the device that is the default when it is asked for; and what the gguf package makes of it"""
  data, want = random_weight(kind, shape)
  planes = {name: (p.bitcast(dtypes.uint16) if p.dtype is dtypes.half else p).numpy() for name, p in cls.load(kind, shape, data).plain_planes.items()}
  halves = {name for name, p in planes.items() if p.dtype == np.uint16 and name in ("d", "m", "w") and kind is not T.BF16}
  def on_device() -> QuantizedWeight:
    return cls(kind, shape, {name: Tensor(p).bitcast(dtypes.half) if name in halves else Tensor(p) for name, p in planes.items()})
  return on_device, want.astype(np.float64)

def check(got:Tensor, want:np.ndarray) -> None:
  y = got.numpy()
  assert y.shape == want.shape and ((y - want) ** 2).sum() <= 1e-11 * (want ** 2).sum()
def normal(*shape:int) -> np.ndarray: return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)

SOME = [(device, kind) for device in ("CPU", "CUDA") for kind in (T.Q4_0, T.Q2_K, T.Q6_K, T.F16)]
@pytest.mark.parametrize("device,kind", [("METAL", kind) for kind in HALVES] + SOME, indirect=["device"], ids=lambda v: getattr(v, "name", str(v)))
def test_every_type(kind:T, device:str):
  """Rows of three blocks: a matrix, and experts by ids"""
  shape = (3, 5, 3 * max(GGML_QUANT_SIZES[kind][0], 32))
  make, want = loaded(QuantizedExpertWeights, kind, shape)
  x, ids = normal(1, shape[2]), np.int32([[2, 0, 2, 1]])
  with DEVICES[device]():
    w, tx = make(), Tensor(x)
    check(QuantizedLinear(kind, (15, shape[2]), {name: p.reshape(15, *p.shape[2:]) for name, p in w.planes.items()})(tx), x @ want.reshape(15, -1).T)
    check(w(tx.unsqueeze(1), Tensor(ids)), np.einsum("ti,tkoi->tko", x, want[ids]))

# threads of a row: all of it, most of it and a few idle ones, a divisor of it; several rows a block and a thread
@pytest.mark.parametrize("device", ["CUDA"], indirect=True)
@pytest.mark.parametrize("kind,rows,width", [(T.Q8_0, 5, 32 * 67), (T.F32, 3, 1021), (T.F16, 34, 1408), (T.Q4_0, 1, 4096), (T.Q6_K, 33, 2816)],
                         ids=lambda v: getattr(v, "name", str(v)))
def test_odd_sizes(kind:T, rows:int, width:int, device:str):
  make, want = loaded(QuantizedLinear, kind, (rows, width))
  x = normal(1, width)
  with DEVICES[device](): check(make()(Tensor(x)), x @ want.T)

@pytest.mark.parametrize("device", ["METAL"], indirect=True)
def test_many_rows(device:str, monkeypatch:pytest.MonkeyPatch):
  """A device that is full early: a thread takes four rows"""
  monkeypatch.setattr("tinygrad.codegen.opt.heuristic.RESIDENT_THREADS", 16)
  make, want = loaded(QuantizedLinear, T.Q5_0, (24, 96))
  x = normal(1, 96)
  with DEVICES[device](): check(make()(Tensor(x)), x @ want.T)

@pytest.mark.parametrize("device", ["CPU", "CUDA"], indirect=True)
def test_ids_out_of_range(device:str):
  """As the wheel indexes: from the end, and zeros"""
  make, want = loaded(QuantizedExpertWeights, T.Q4_0, (3, 4, 64))
  x = normal(1, 64)
  with DEVICES[device]():
    got = make()(Tensor(x).unsqueeze(1), Tensor(np.int32([[-1, 7, 0, -4]])))
    check(got, np.einsum("ti,koi->tko", x, np.stack([want[2], want[0] * 0, want[0], want[0] * 0])))

@pytest.mark.parametrize("device", ["CPU", "METAL"], indirect=True)
def test_gathered_by_two_readers(device:str):
  """What a kernel chose, read by two kernels, and a gather by what was gathered"""
  table, ids = normal(9, 40), np.int32([3, 8, 3, 0])
  with DEVICES[device]():
    rows = Tensor(table)[Tensor(ids)]
    a, b, c = (rows * 2).contiguous(), rows.sum(0), Tensor(np.arange(9, dtype=np.int32))[Tensor(ids)[Tensor(np.int32([1, 2]))]]
    Tensor.realize(a, b, c)
    check(a, table[ids].astype(np.float64) * 2)
    check(b, table[ids].astype(np.float64).sum(0))
    assert c.tolist() == [8, 3]

@pytest.mark.parametrize("device", ["CUDA", "METAL"], indirect=True)
def test_beside_each_other(device:str):
  """Two products in one loop; products of different types and lengths, one of them over experts too, by the same threads; a residual"""
  shared, chosen, gate, up = (loaded(cls, kind, shape) for cls, kind, shape in (
    (QuantizedLinear, T.Q6_K, (10, 768)), (QuantizedExpertWeights, T.Q4_1, (3, 10, 384)), (QuantizedLinear, T.Q5_K, (9, 256)),
    (QuantizedLinear, T.Q5_K, (9, 256))))
  x, h, n, r, ids = normal(1, 768), normal(1, 2, 384), normal(1, 256), normal(1, 10), np.int32([[2, 1]])
  with DEVICES[device]():
    tn = Tensor(n).realize()
    check(gate[0]()(tn) * up[0]()(tn), (n @ gate[1].T) * (n @ up[1].T))
    check(Tensor(r) + chosen[0]()(Tensor(h), Tensor(ids)).sum(1) + shared[0]()(Tensor(x)),
          r + np.einsum("tki,tkoi->to", h, chosen[1][ids]) + x @ shared[1].T)

@pytest.mark.parametrize("device", ["CUDA", "METAL"], indirect=True)
def test_sums(device:str):
  """Along rows and columns, of few outputs and past 2048"""
  with DEVICES[device]():
    for shape, axis in (((3, 5000), -1), ((2, 1021), -1), ((700, 9), 0), ((2500, 96), -1), ((3, 16, 50), (0, 2))):
      x = normal(*shape)
      check(Tensor(x).sum(axis), x.astype(np.float64).sum(axis))
      assert np.array_equal(Tensor(x).max(axis).numpy(), x.max(axis))
    x = normal(3025)
    assert Tensor(x).argmax().item() == x.argmax()
    a, b = normal(1, 300, 1), normal(2, 300, 64)
    check((Tensor(a) * Tensor(b)).sum(1), (a.astype(np.float64) * b).sum(1))

"""A captured batch on the CPU's threads: what it computes is what the kernels compute one by one, time and again."""
from __future__ import annotations
import threading
from pathlib import Path
import numpy as np, pytest
from gguf import GGMLQuantizationType as T
from extra.mkgguf import write_model
from helpers import SMALL, engine_of, in_child
from tinygrad import Device, Tensor, TinyJit, Variable
from tinygrad.apps.engine.engine import Engine
from tinygrad.apps.quantized import QuantizedLinear
from tinygrad.engine import worker
from tinygrad.helpers import Context
from tinygrad.nn import cpu

pytestmark = pytest.mark.skipif(not cpu.is_cpu(Device.DEFAULT), reason="not on the CPU")

def chain(x: Tensor, n) -> tuple[Tensor, Tensor]:
  """Wide kernels, which share threads, between narrow ones"""
  for i in range(8): x = ((x * 1.5 + i).contiguous() - x.sum().reshape(1).contiguous() * 1e-6).contiguous()
  return x.realize(), (x[:n].sum() + n).realize()

def test_inputs_and_variables():
  from tinygrad.runtime.graph.cpu import CPUGraph
  assert Device[Device.DEFAULT].graph is CPUGraph
  jit, length = TinyJit(chain), Variable("n", 1, 300)
  for n in (3, 3, 5, 299, 4, 77):
    x = Tensor(np.random.default_rng(n).standard_normal((300, 400)).astype(np.float32)).realize()
    for _ in range(3):
      got, total = (t.numpy() for t in jit(x, length.bind(n)))
      with Context(JIT=0): want, expected = (t.numpy() for t in chain(x, n))
      np.testing.assert_array_equal(got, want)
      np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-2)

def test_waiting(monkeypatch: pytest.MonkeyPatch):
  """… is for the device's own threads, where somebody has started some"""
  device, waited = Device["CPU"], []
  monkeypatch.setattr(type(device).__mro__[1], "synchronize", lambda *_: waited.append(True))
  for workers in ([], [None]):
    monkeypatch.setattr(device, "workers", workers)
    device.synchronize()
    assert waited == [True] * len(workers)

@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads(threads: int):
  """The same bytes whatever the number of threads, run after run"""
  rng = np.random.default_rng(0)
  x, w = (Tensor(rng.standard_normal(s).astype(np.float32)).realize() for s in ((1, 64), (203, 64)))
  m = QuantizedLinear.load(T.F32, (203, 64), w.numpy().reshape(-1).view(np.uint8))
  want = m(x).numpy()
  with Context(NUM_CPU_THREADS=threads):
    jit = TinyJit(lambda x: [m(x).realize(), (x + 1).realize()])
    for _ in range(20): np.testing.assert_array_equal(jit(x)[0].numpy(), want)

@pytest.mark.parametrize("threads,spins", [(2, 0), (5, 0), (5, 3)])
def test_threads_that_sleep(threads: int, spins: int):
  """At every meeting: nobody is forgotten, nobody goes on too early. In a child, as who is forgotten sleeps for ever"""
  from tinygrad.runtime.graph.cpu import pool
  x, length = Tensor(np.random.default_rng(0).standard_normal((300, 400)).astype(np.float32)).realize(), Variable("n", 1, 300)
  with Context(JIT=0): want, expected = (t.numpy() for t in chain(x, 77))
  def run() -> tuple[bool, int]:
    with Context(NUM_CPU_THREADS=threads):
      jit, mine = TinyJit(chain), pool(Device.DEFAULT, threads)
      mine.state.spins = mine.state.polls = spins
      got = [[t.numpy() for t in jit(x, length.bind(77))] for _ in range(60)]
      return all(np.array_equal(a, want) and np.allclose(b, expected, rtol=1e-5, atol=1e-2) for a, b in got), mine.sleeps
  right, sleeps = in_child(run)
  assert right is True and sleeps > 100

# ---- a fork ----

@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
  return write_model(tmp_path_factory.mktemp("fork") / "m.gguf", "small-glm", "F16", seed=5, **SMALL | dict(q_lora=64))[0]
@pytest.fixture(scope="module")
def used(path: Path) -> Engine:
  """Has read a file by threads, and decoded by others"""
  g = engine_of(path)
  list(g.generate([1, 2, 3], 2))
  return g

def test_a_child_decodes(used: Engine, path: Path):
  want = list(used.generate([5, 6, 7], 6))
  assert in_child(lambda: list(used.generate([5, 6, 7], 6))) == want
  assert in_child(lambda: list(engine_of(path).generate([5, 6, 7], 6))) == want     # reads the file, too
  used.forget()
  assert in_child(lambda: in_child(lambda: list(used.generate([5, 6, 7], 6)))) == want
  assert list(used.generate([5, 6, 7], 6)) == want

def test_a_child_has_its_own_memory(used: Engine):
  """An answer goes on in both processes; neither sees what the other writes"""
  prompt, other = [5, 6, 7], [9, 8, 7, 6]
  want, elsewhere = list(used.generate(prompt, 8)), list(used.generate(other, 8))
  answer = used.generate(prompt, 8)
  said = [next(answer), next(answer)]
  assert in_child(lambda: said + list(answer)) == want
  assert in_child(lambda: list(used.generate(other, 8))) == elsewhere
  assert said + list(answer) == want

def test_a_child_compiles():
  """Several kernels at once, for which the parent has processes that do not answer a child"""
  x = Tensor(np.arange(1000, dtype=np.float32)).realize()
  def compute(k: int) -> list[np.ndarray]:
    several = [(x.reshape(8, 125) * k).sum(1), (x + k).reshape(40, 25).max(0), x * k - 1]
    Tensor.realize(*several)
    return [t.numpy() for t in several]
  try:
    with Context(PARALLEL=1):
      compute(2)
      assert worker.worker_pool is not None
      child = in_child(lambda: compute(3))
      for got, want in zip(child, compute(3)): np.testing.assert_array_equal(got, want)
  finally: worker.terminate_worker_pool()

def test_a_child_of_a_thread_at_work(used: Engine, path: Path, monkeypatch):
  """Forked while another thread is at the device, capturing a graph: that thread is not there to end it"""
  want = list(used.generate([5, 6, 7], 6))
  g, at_work, go_on = engine_of(path), threading.Event(), threading.Event()
  hidden = g.runner.model.hidden
  def slow(*args):
    at_work.set()
    assert go_on.wait(100)
    return hidden(*args)
  monkeypatch.setattr(g.runner.model, "hidden", slow)
  said: list[int] = []
  thread = threading.Thread(target=lambda: said.extend(g.generate([5, 6, 7], 6)))
  thread.start()
  try:
    assert at_work.wait(100)
    assert in_child(lambda: list(used.generate([5, 6, 7], 6))) == want
    def anew() -> list[int]:
      g.runner.model.hidden = hidden
      return list(g.generate([5, 6, 7], 6))
    assert in_child(anew) == want
  finally:
    go_on.set()
    thread.join()
  assert said == want

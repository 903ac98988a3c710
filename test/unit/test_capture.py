"""A step recorded part by part computes what its functions do, on whatever tensors it is placed, in this process or from the disk of another."""
from __future__ import annotations
import pickle
from dataclasses import dataclass
from unittest.mock import patch
import numpy as np, pytest
from tinygrad import Tensor, Variable, dtypes
from tinygrad.apps import capture
from tinygrad.apps.capture import Replay, describe, read, to_device, write
from tinygrad.helpers import Context
from tinygrad.uop.ops import Ops

def numbers(*shape: int, seed: int = 0) -> np.ndarray: return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)

@dataclass
class Layer:
  """What a block of a model is: weights, and numbers that are in the kernels"""
  weight: Tensor
  bias: Tensor
  factor: float = 2.0
  def __call__(self, x: Tensor) -> Tensor: return ((x @ self.weight).softmax() * self.factor + self.bias).contiguous()
  def numpy(self, x: np.ndarray) -> np.ndarray:
    z = x @ self.weight.numpy()
    y = np.exp(z - z.max(-1, keepdims=True))
    return y / y.sum(-1, keepdims=True) * self.factor + self.bias.numpy()

def layer(seed: int, factor: float = 2.0, width: int = 24, device: str = "CPU") -> Layer:
  return Layer(to_device(numbers(width, width, seed=seed), device), to_device(numbers(width, seed=seed), device), factor)
def add_to(total: Tensor, x: Tensor) -> tuple[Tensor, Tensor]: return total.assign(total + x), (x * 2).contiguous()
SEEN = Tensor.ones(24).contiguous().realize()
def reads_what_it_is_not_given(x: Tensor) -> Tensor: return (x + SEEN).contiguous()

class Scheduled:
  """Counts what is scheduled, and forgets what this process has recorded"""
  def __init__(self, monkeypatch: pytest.MonkeyPatch):
    self.count, schedule = 0, capture.schedule
    def counted(*args):
      self.count += 1
      return schedule(*args)
    monkeypatch.setattr(capture, "schedule", counted)
    self.forget()
  def forget(self) -> None:
    capture._compiled.clear()
    capture._scheduled.clear()

@pytest.fixture
def scheduled(monkeypatch: pytest.MonkeyPatch) -> Scheduled:
  kept: dict[str, bytes] = {}  # in the disk's place
  def put(table: str, key: str, value: object) -> object:
    kept[key] = pickle.dumps(value)
    return value
  monkeypatch.setattr(capture, "diskcache_get", lambda table, key: pickle.loads(kept[key]) if key in kept else None)
  monkeypatch.setattr(capture, "diskcache_put", put)
  return Scheduled(monkeypatch)

def run(layers: list[Layer], x: np.ndarray) -> np.ndarray:
  step, y = Replay(), to_device(x)
  for each in layers: y = step.run(Layer.__call__, each, y)
  step()
  return y.numpy()

def test_parts_are_recorded_once_and_placed_on_each(scheduled: Scheduled):
  layers, x = [layer(i) for i in range(5)], numbers(3, 24)
  want = x
  for each in layers: want = each.numpy(want)
  np.testing.assert_allclose(run(layers, x), want, rtol=1e-5, atol=1e-5)
  assert scheduled.count == 1
  scheduled.forget()                                   # another process: what is kept schedules nothing
  other = [layer(i) for i in range(7, 9)]
  np.testing.assert_allclose(run(other, x), other[1].numpy(other[0].numpy(x)), rtol=1e-5, atol=1e-5)
  assert scheduled.count == 1

@pytest.mark.parametrize("change", ["shape", "number", "code", "setting", "device", "tokens"])
def test_another_key(scheduled: Scheduled, change: str):
  """Each thing that what is launched depends on makes another recording"""
  x = numbers(3, 24)
  run([layer(0)], x)
  assert scheduled.count == 1
  scheduled.forget()
  if change == "shape": run([layer(0, width=16)], numbers(3, 16))
  elif change == "number":
    np.testing.assert_allclose(run([layer(0, 2.0000001)], x), layer(0).numpy(x), rtol=1e-5, atol=1e-5)
  elif change == "code":
    with patch.object(capture, "code", lambda: "other"): run([layer(0)], x)
  elif change == "device":   # of another kind, or another generation of it
    with patch.object(capture, "_maker", lambda device: "other"): run([layer(0)], x)
  elif change == "setting":
    with capture.Context(NOOPT=1): run([layer(0)], x)
  else: run([layer(0)], numbers(4, 24))
  assert scheduled.count == 2

def handed_on(each: Layer, x: Tensor) -> Tensor: return each((x + 1).contiguous().to(each.weight.device))
@pytest.mark.parametrize("devices", [("CPU", "CPU:1", "CPU"), ("CPU:1", "CPU", "CPU:2"), ("CPU", "CPU", "CPU:1")])
def test_several_devices(scheduled: Scheduled, devices: tuple[str, ...]):
  """A recording serves whatever devices, of which it numbers those of its tensors: so long as it is scheduled only, and from the disk too. What is in
  between lies on the part's own devices"""
  layers, x = [layer(i, device=device) for i, device in enumerate(devices)], numbers(3, 24)
  want = x
  for each in layers: want = each.numpy(want + 1)
  for _ in range(2):
    step, ys = Replay(), [to_device(x, "CPU")]
    for each in layers: ys.append(step.run(handed_on, each, ys[-1]))
    step()
    np.testing.assert_allclose(ys[-1].numpy(), want, rtol=1e-5, atol=1e-5)
    assert tuple(y.uop.base.buffer.device for y in ys[1:]) == devices
    for number, part in enumerate(step.parts):
      assert {b.device for call in part for b in call.src[1:]} == {("CPU", *devices)[number], devices[number]}
      assert all(len({b.device for b in call.src[1:]}) == 1 for call in part if call.src[0].op is not Ops.COPY)
    assert scheduled.count == len({a == b for a, b in zip(("CPU", *devices), devices)})
    scheduled.forget()

def elsewhere(x: Tensor) -> Tensor: return x.to("CPU:1").contiguous()

def test_state_and_several_results(scheduled: Scheduled):
  total, x = to_device(np.zeros(24, np.float32)), to_device(numbers(24))
  step = Replay()
  same, y = step.run(add_to, total, x)
  same, z = step.run(add_to, total, y)
  assert same is total and scheduled.count == 1
  for times in (1, 2):
    step()
    np.testing.assert_allclose(total.numpy(), times * 3 * numbers(24), rtol=1e-6)
  np.testing.assert_allclose(z.numpy(), 4 * numbers(24), rtol=1e-6)

def test_one_tensor_in_two_places_is_another_part(scheduled: Scheduled):
  x = to_device(numbers(24))
  step = Replay()
  _, y = step.run(add_to, x, x)
  step()
  np.testing.assert_allclose(x.numpy(), 2 * numbers(24), rtol=1e-6)
  step = Replay()
  step.run(add_to, to_device(numbers(24)), x)
  assert scheduled.count == 2

def test_a_result_that_is_held_is_not_written_over(scheduled: Scheduled):
  """Buffers serve again once nobody refers to their tensors, and not before"""
  layers, x = [layer(i) for i in range(4)], to_device(numbers(3, 24))
  step, ys = Replay(), [x]
  for each in layers: ys.append(step.run(Layer.__call__, each, ys[-1]))
  step()
  want = numbers(3, 24)
  for each, y in zip(layers, ys[1:]): np.testing.assert_allclose(y.numpy(), want := each.numpy(want), rtol=1e-5, atol=1e-5)
  step, y = Replay(), x
  for each in layers: y = step.run(Layer.__call__, each, y)
  assert len(step.results) == 2                        # two in turn
  step()
  np.testing.assert_allclose(y.numpy(), want, rtol=1e-5, atol=1e-5)

def turned(x: Tensor) -> Tensor: return (x.reshape(4, 6) + 1).contiguous().permute(1, 0)

def test_what_cannot_be_a_part():
  x = to_device(numbers(24))
  with pytest.raises(TypeError, match="which it was not given"): Replay().run(reads_what_it_is_not_given, x)
  with pytest.raises(TypeError, match="sees more than its arguments"): Replay().run(lambda y: (x + y).contiguous(), x)
  for wrong in (np.sum, Variable("pos", 0, 7).bind(3)):
    with pytest.raises(TypeError, match="cannot depend on"): Replay().run(add_to, x, wrong)
  with pytest.raises(TypeError, match="uses CPU:1, where none of its tensors lies"): Replay().run(elsewhere, x)
  with pytest.raises(TypeError, match="whole buffers"): Replay().run(add_to, x, x[:5])
  with pytest.raises(TypeError, match="returns a view"): Replay().run(turned, x)

def test_describing():
  def tell(x: object) -> str: return repr(describe(x, []))
  a, b = to_device(numbers(4)), to_device(numbers(4))
  assert tell([a, b]) == tell([b, a]) != tell([a, a])
  assert len({tell(v) for v in (1, 1.0, True, "1", [1], {"1": 1}, None, dtypes.int)}) == 8
  assert tell(0.1) != tell(np.nextafter(0.1, 1).item())

def test_write():
  t = to_device(numbers(3, 5))
  assert t.shape == (3, 5) and np.array_equal(t.numpy(), numbers(3, 5)) and np.array_equal(read(t), numbers(3, 5))
  write(t, 2 * numbers(3, 5))
  assert np.array_equal(t.numpy(), 2 * numbers(3, 5))
  large = np.arange(capture.PIECE // 2 + 7, dtype=np.int32)   # several pieces, the last one short
  assert np.array_equal(to_device(large).numpy(), large)
  with pytest.raises(ValueError, match="expected 60 bytes, found 64"): write(t, np.zeros(16, np.float32))

def test_statistics(capsys: pytest.CaptureFixture[str]):
  """… of launches are made for who asks to see them"""
  step = Replay()
  step.run(Layer.__call__, layer(1), to_device(numbers(3, 24)))
  step()
  for debug in (0, 2):
    capsys.readouterr()
    with Context(DEBUG=debug): step()
    assert capsys.readouterr().out.count(" tm ") == (len(step.batches) if debug else 0)

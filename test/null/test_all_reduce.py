"""The all-reduce between devices that reach each other's memory, on mocks of Hopper that run at once."""
from __future__ import annotations
from pathlib import Path
from typing import Any
import numpy as np, pytest
from gguf import GGMLQuantizationType as T
from helpers import SMALL, WIDE, write_mixed
from mockcuda import on_cuda
from oracle import Judge
from tinygrad import Device, Tensor
from tinygrad.apps import tensor_parallel
from tinygrad.apps.capture import Replay, to_device, write
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.tensor_parallel import TensorParallel, exchange_of
from tinygrad.nn import intrinsics
from tinygrad.nn.all_reduce import FEW, MANY_THREADS, THREADS, Exchange, Few, Many, all_reduce
from tinygrad.nn.step import Step
from tinygrad.uop.ops import Ops

DEVICES = "MOCKCUDA", "MOCKCUDA:1", "MOCKCUDA:2"
MANY = 4 * MANY_THREADS   # numbers that a block has for each device

def summed(parts: list[Tensor], exchange: Exchange | None) -> tuple[Tensor, ...]: return tuple(all_reduce(parts, exchange))

def sums(shapes: list[tuple[int, int]], devices: int, few: int, repeat: int = 1) -> None:
  """All-reduces of these shapes one after another, recorded and run several times: the plain form's bytes, on all devices"""
  rng, replay = np.random.default_rng(0), Replay()
  exchange = exchange_of(DEVICES[:devices], few, max(few, *(a * b for a, b in shapes)))
  assert exchange is not None
  runs = []
  for shape in shapes:
    values = [rng.standard_normal(shape).astype(np.float32) for _ in range(devices)]
    parts = [to_device(value, device) for value, device in zip(values, DEVICES)]
    assert all_reduce.choose(parts, exchange) == ("decode" if np.prod(shape) <= min(few, FEW) else "prefill")
    runs.append((values, replay.run(summed, parts, exchange)))
  for _ in range(repeat):
    replay()
    for device in DEVICES[:devices]: Device[device].synchronize()   # none goes on while a fault is told
    for values, results in runs:
      want = values[0]
      for value in values[1:]: want = want + value
      for result in results: assert np.array_equal(result.numpy(), want)

@pytest.mark.parametrize("shapes,devices,few", [
  ([(1, 32), (1, 4 * THREADS), (3, 700), (1, 32)], 2, 4 * FEW),      # less than a block, a block, blocks and a part of one
  ([(1, 2048), (1, FEW), (1, 2048), (1, FEW + 12), (1, FEW), (2, FEW)], 3, 4 * FEW),   # as many as there are at most, and more
  ([(1, 64), (1, MANY), (3, 1100), (1, 2 * MANY + 4), (5, 2 * MANY), (1, 1000)], 2, 32),
  ([(1, 2048), (3, 3 * MANY), (1, 2048), (1, 2 * MANY + 12)], 3, 32)])
def test_sums(shapes: list[tuple[int, int]], devices: int, few: int):
  with on_cuda("sm_90"): sums(shapes, devices, few, repeat=2)

def test_what_takes_copies():
  """More numbers than there is room for, devices before Hopper, numbers that are no whole float4"""
  with on_cuda("sm_90"):
    exchange = exchange_of(DEVICES[:2], 64, 64)
    def choice(n: int) -> str: return all_reduce.choose([Tensor.empty(1, n, device=device) for device in DEVICES[:2]], exchange)
    assert [choice(n) for n in (64, 68, 62)] == ["decode", "plain ops", "plain ops"]
    exchange = exchange_of(DEVICES[:2], FEW + 4, 64)   # a step that has more than few, and more than a chunk
    assert [choice(n) for n in (FEW, FEW + 4, FEW + 8)] == ["decode", "prefill", "plain ops"]
  with on_cuda("sm_80"): assert exchange_of(DEVICES[:2], 64, 64) is None

def test_numbers_that_go_round(monkeypatch: pytest.MonkeyPatch):
  """After 2³² sums the number begins anew"""
  with on_cuda("sm_90"):
    monkeypatch.setattr(np, "zeros", lambda shape, dtype: np.full(shape, 0xfffffffe, dtype))
    sums([(1, 2048), (1, 4096)] * 4, 2, 2048)

# ---- what is wrong shows ----

@pytest.mark.parametrize("few,name", [(64, "all_reduce_64_0_of_2"), (32, "all_reduce_many_64_0_of_2")])
def test_a_device_that_does_not_come(monkeypatch: pytest.MonkeyPatch, few: int, name: str):
  hopper = intrinsics.of_arch("sm_90")
  patience = {field: getattr(hopper, field).replace(str(intrinsics.PATIENCE), "1000") for field in ("peer_receive", "peer_await")}
  short = intrinsics.replace(hopper, **patience)
  monkeypatch.setattr(intrinsics, "OF_CAPABILITY", {0: short})
  with on_cuda("sm_90"):
    exchange = exchange_of(DEVICES[:2], few, 64)
    parts = [to_device(np.ones((1, 64), np.float32), device) for device in DEVICES[:2]]
    first = all_reduce(parts, exchange)[0]
    with pytest.raises(RuntimeError, match=f"{name}: block .*: a trap"): first.numpy()

@pytest.mark.parametrize("room,few", [(Few, 1984), (Many, 32)])
def test_parts_that_lie_over_each_other(monkeypatch: pytest.MonkeyPatch, room: Any, few: int):
  line = room.line
  monkeypatch.setattr(room, "line", lambda self, *place: line(self, *place[:-1], 0))   # the last is whose
  with pytest.raises(AssertionError): test_sums([(1, 1984)], 3, few)   # a size that no other test has a kernel of

# ---- a model ----

@pytest.mark.parametrize("rows,dims", [(1, SMALL | dict(heads=3)), (2, WIDE)])
def test_a_model(rows: int, dims: dict[str, Any], tmp_path: Path):
  """Recorded steps of decoding on two devices, of sequences that say the same: their sums take the exchange, and the logits are the oracle's"""
  path = write_mixed(tmp_path / "m.gguf", "small-ds", [T.Q4_0, T.Q8_0], **dims | dict(blocks=1, dense=0), seed=1)
  ids, got = np.random.default_rng(1).integers(0, 320, 4), []
  with on_cuda("sm_90"):
    model, replay = TensorParallel.from_gguf(read_gguf(path), DEVICES[:2], 64), Replay()
    start, token, tables = (to_device(np.int32(values)) for values in ([0] * rows, [0] * rows, [[1 + row] for row in range(rows)]))
    step = Step.decode(start, tables)
    logits = model.logits(step, token, replay.run)
    names = [call.src[0].arg.name for call in replay.calls if call.src[0].op is Ops.PROGRAM]
    assert sum(name.startswith("all_reduce") for name in names) == 4
    assert rows == 1 or sum(name.startswith("split_plan") for name in names) == 2
    for at, each in enumerate(ids):
      write(step.start, np.int32([at] * rows))
      write(token, np.int32([each] * rows))
      replay()
      got.append(logits.numpy())
  for row in range(rows): Judge(path, ids.tolist()).check(np.stack(got, 1)[row], 1e-3)

def chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> tuple[Path, np.ndarray, Replay, Tensor]:
  """A recorded chunk of 32 tokens on two devices, one that is not of few: the file, the tokens, the logits"""
  path = write_mixed(tmp_path / "m.gguf", "small-ds", [T.Q4_0, T.Q8_0], **SMALL | dict(heads=3, blocks=1, dense=0), seed=1)
  monkeypatch.setattr(tensor_parallel, "MOST_TOKENS", 1)
  model, replay = TensorParallel.from_gguf(read_gguf(path), DEVICES[:2], 64), Replay(compiled)
  ids = np.random.default_rng(1).integers(0, 320, 32)
  start, tokens, tables = (to_device(np.int32(values)) for values in ([0], ids, [[1]]))
  return path, ids, replay, model.logits(Step.prefill(start, tables, len(ids)), tokens, replay.run)

def test_sums_of_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """Two a block on each device, no copies"""
  with on_cuda("sm_90"):
    *_, replay, kept = chunk(tmp_path, monkeypatch, False)
    names = [call.src[0].arg.name for call in replay.calls if call.src[0].op is Ops.SINK]
    assert kept is not None and sum(name.startswith("all_reduce_many") for name in names) == 4

def test_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """… as the oracle's"""
  with on_cuda("sm_90"):
    path, ids, replay, logits = chunk(tmp_path, monkeypatch, True)
    replay()
    Judge(path, ids.tolist()).check(logits.numpy(), 1e-3)

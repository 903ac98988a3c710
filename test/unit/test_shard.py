"""A model on several devices says what it says on one, byte for byte, and each of its tensors lies where it is to lie."""
from __future__ import annotations
import functools, itertools, random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator
import numpy as np, pytest
from drafting import CONTEXT, PAGES
from mockcuda import on_cuda
from oracle import Judge, nmse
from extra.mkgguf import write_model
from helpers import SMALL
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.apps import mla, models
from tinygrad.apps.capture import Replay, batches, by_device, in_graphs, to_device, write
from tinygrad.apps.engine import batch, pipeline
from tinygrad.apps.engine.batch import Batch
from tinygrad.apps.engine.engine import DeviceFailed, Engine
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.engine.sampling import Features, Sampling
from tinygrad.apps.engine.sequence import Piece, Request
from tinygrad.apps.gguf import GGUFFile, read_gguf
from tinygrad.apps.mla import BROUGHT_TOKENS, MLP, Attention, Block, Config, MoE, RMSNorm, Transformer, sizes_of
from tinygrad.apps.models import UserError, load
from tinygrad.apps.mtp import MTP, load_block
from tinygrad.apps.quantized import QuantizedWeight
from tinygrad.apps.shard import PlacementError, Sizes, by_layers, check_room, device_names, room, runs
from tinygrad.device import DepsTracker
from tinygrad.engine.realize import get_call_arg_uops, get_call_outs_ins
from tinygrad.nn.routing import Routing
from tinygrad.nn.step import PAGE, Phase, Step
from tinygrad.runtime.graph.cuda import CUDAGraph
from tinygrad.uop.ops import Ops

# ---- sharing out ----

def largest(sizes: list[int], first: int, counts: tuple[int, ...]) -> int:
  ends = list(itertools.accumulate(counts))
  return max(sum(sizes[end - count:end]) + (0 if i else first) for i, (end, count) in enumerate(zip(ends, counts)))

def test_runs():
  """Against all ways there are"""
  for seed in range(200):
    rng = random.Random(seed)
    sizes, first = [rng.randint(1, 9) for _ in range(rng.randint(1, 7))], rng.choice((0, 3, 20))
    got = runs(sizes, first, count := rng.randint(1, len(sizes)))
    ways = [counts for counts in itertools.product(range(1, len(sizes) + 1), repeat=count) if sum(counts) == len(sizes)]
    assert tuple(got) in ways and largest(sizes, first, tuple(got)) == min(largest(sizes, first, way) for way in ways)

# two dense blocks of 40 bytes and four of 10 and 90 of experts, a row of 1
SIX = Sizes((40, 40, 10, 10, 10, 10), (0, 0, 90, 90, 90, 90), 50, 1, 90)

def test_by_layers():
  place = by_layers(SIX, device_names("CUDA", 3), 10)
  assert place.blocks == place.experts == ("CUDA",) * 2 + ("CUDA:1",) * 2 + ("CUDA:2",) * 2
  assert place.of("token_embd.weight") == place.of("blk.6.attn_norm.weight") == place.home == "CUDA"   # block 6 drafts
  assert place.of("blk.5.attn_norm.weight") == place.of("blk.5.exp_probs_b.bias") == "CUDA:2"
  away = by_layers(SIX, ("CUDA",), 10, 3)
  assert away.blocks == ("CUDA",) * 6 and away.experts == ("CUDA",) * 2 + ("CPU",) * 3 + ("CUDA",)
  assert {name for name in ("attn_output.weight", "ffn_norm.weight", "ffn_gate_inp.weight", "exp_probs_b.bias", "ffn_gate_exps.weight",
                            "ffn_down_exps.weight", "ffn_gate_shexp.weight", "ffn_down_shexp.weight") if away.of(f"blk.2.{name}") == "CPU"} == {
    "ffn_gate_inp.weight", "exp_probs_b.bias", "ffn_gate_exps.weight", "ffn_down_exps.weight"}
  assert by_layers(SIX, device_names("CPU:1", 2), 10, 1).devices == ("CPU:1", "CPU:2", "CPU")

def test_what_cannot_be():
  with pytest.raises(PlacementError, match="expected at most 6 devices"): by_layers(SIX, device_names("CUDA", 7), 10)
  with pytest.raises(PlacementError, match="expected at most 4 blocks of experts on the CPU"): by_layers(SIX, ("CUDA",), 10, 5)

def test_room():
  """By the memory: cards have their own, the CPU's devices one"""
  alone, both = (by_layers(SIX, device_names("CUDA", n), 10) for n in (1, 2))
  assert SIX.weights(alone) == {"CUDA": 530} and SIX.cached(alone) == {"CUDA": 6}
  def free(card: int | None, host: int | None = None): return lambda device: host if device == "CPU" else card
  assert room(SIX, alone, free(530 + 90 + 65)) == 10 and room(SIX, alone, free(619)) == -1 and room(SIX, alone, free(None)) is None
  assert both.blocks.count("CUDA") == 3 and [SIX.weights(both)[card] for card in ("CUDA", "CUDA:1")] == [230, 300]
  assert room(SIX, both, free(300 + 90 + 47)) == 15
  assert SIX.weights(by_layers(SIX, device_names("CPU", 2), 10)) == {"CPU": 530}
  check_room(SIX, alone, 10, free(680), "", [])
  def complaint(tokens: int, card: int, host: int = 10**6) -> str:
    more = [("--devices 2", both), ("--cpu_experts 4", by_layers(SIX, ("CUDA",), 10, 4))]
    with pytest.raises(PlacementError) as e: check_room(SIX, alone, tokens, free(card, host), "--max_context", more)
    return str(e.value)
  assert complaint(12, 530 + 90 + 66) == ("CUDA has 0.0 MB free, and is to hold 0.0 MB of weights, 0.0 MB of the cache, 0.0 MB more while it is "
                                          "loaded: --max_context 11 or --devices 2 would fit")
  assert complaint(10, 450).endswith(": --devices 2 would fit") and complaint(10, 410).endswith(": --cpu_experts 4 would fit")
  assert complaint(10, 410, 300).endswith(": no way to place it here fits") and complaint(10, 409) == complaint(10, 409, 300)

def test_room_for_copies():
  """A prompt has a block's experts copied to the card from the CPU: as they lie there, and as they are to lie"""
  away = by_layers(SIX, device_names("CUDA", 2), 10, 2)
  assert SIX.brought(away) == {"CUDA": 180} and not SIX.brought(by_layers(SIX, device_names("CUDA", 2), 10))
  assert not SIX.brought(by_layers(SIX, device_names("CPU", 2), 10, 2))
  alone = by_layers(SIX, ("CUDA",), 10, 4)
  for place, copies in ((alone, 180), (replace(alone, brings=False), 90)):
    assert [room(SIX, place, lambda device: 170 + copies + rows if device == "CUDA" else 400) for rows in (65, 59, -1)] == [10, 9, -1]

def test_a_block_that_drafts():
  """Its rows lie at home, which has fewer of the others' for it"""
  sizes = replace(SIX, drafting=1)
  alone, both = (by_layers(sizes, device_names("CUDA", n), 10) for n in (1, 2))
  assert sizes.cached(alone) == {"CUDA": 7} and sizes.cached(both) == {"CUDA": 4, "CUDA:1": 3}
  assert room(sizes, alone, lambda _: 530 + 90 + 70) == 10 and room(sizes, alone, lambda _: 530 + 90 + 69) == 9
  assert [by_layers(s, device_names("CUDA", 5), 1000).blocks.count("CUDA") for s in (SIX, sizes)] == [2, 1]

# ---- models ----

# each small as others' files are, whose kernels are compiled already: three blocks are as two
FILES: dict[str, tuple[str, dict[str, Any]]] = {
  "small-glm": ("F32", dict(q_lora=64, mtp=True)), "small-ds": ("F16", {}), "small-youtu": ("F32", dict(q_lora=64))}

@dataclass
class Case:
  f: GGUFFile
  @functools.cached_property
  def want(self) -> list[Any]:
    """What it says on one device"""
    return said(self.on(1))
  def on(self, devices: int, cpu_experts: int = 0) -> Transformer:
    place = by_layers(sizes_of(self.f, 16), device_names("CPU", devices), 64, cpu_experts)
    return Transformer.from_gguf(self.f, CONTEXT, device=place, pool=lambda _: PAGES)

IDS = np.random.default_rng(0).integers(0, 300, 150).tolist()
REQUESTS = [Request(IDS[:140], limit=9), Request([3, 4, 5] * 6, limit=14)]
def said(model: Transformer, **drafting: Any) -> list[Any]:
  """Logits of a prompt, and the tokens of sequences of which the second comes while the first is read, in chunks of two sizes"""
  engine = Engine(Runner(model, **drafting), model.pool)
  each = []
  for request in REQUESTS:
    each.append(engine.add(request))
    engine.step()
  while engine.step(): pass
  for s in each:
    if s.error is not None: raise s.error
  return [engine.logits(IDS[:40]).tobytes(), [s.produced for s in each]]

@pytest.fixture(scope="module", params=FILES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
  quant, shape = FILES[request.param]
  path = tmp_path_factory.mktemp("shard") / "m.gguf"
  return Case(read_gguf(write_model(path, request.param, quant, seed=3, **SMALL | shape | dict(blocks=3))[0]))

@pytest.fixture(autouse=True)
def whole_copies(monkeypatch: pytest.MonkeyPatch):
  """A copy is of as much as there is: behind that lies other memory, or none"""
  kind = type(Device["CPU"].allocator)
  copyout = kind._copyout
  def checked(self: Any, dest: memoryview, source: Any) -> None:
    assert len(dest) == source.size
    copyout(self, dest, source)
  monkeypatch.setattr(kind, "_copyout", checked)

def test_load_asks_for_room_for_a_block_that_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  path, = write_model(tmp_path / "m.gguf", "small-glm", "F32", seed=3, **SMALL | dict(q_lora=64, mtp=True))
  f = read_gguf(path)
  sizes = sizes_of(f, 16)
  blocks = len(sizes.blocks) + 1
  whole = sum(t.data.nbytes for t in f.tensors.values()) + blocks * (64 + sizes.spare) * sizes.row
  monkeypatch.setattr(models, "room_for_weights", lambda device: whole - 1)
  with pytest.raises(UserError, match="and is to hold"): load(path, 64, mtp=path)
  monkeypatch.setattr(models, "room_for_weights", lambda device: whole)
  assert load(path, 64, mtp=path).engine.runner.mtp is not None

def test_the_same_bytes(case: Case):
  for devices in (2, 3):
    model = case.on(devices)
    assert model.devices == device_names("CPU", devices) and said(model) == case.want

def tensors(x: Any) -> Iterator[Tensor]:
  if isinstance(x, Tensor): yield x
  elif isinstance(x, dict): yield from (t for y in x.values() for t in tensors(y))
  elif isinstance(x, list): yield from (t for y in x for t in tensors(y))
  elif isinstance(x, (Block, Attention, MLP, MoE, RMSNorm, Routing, QuantizedWeight)): yield from tensors(vars(x))

def test_where_each_lies(case: Case):
  """The buffers of a block, and its part of the cache, lie on its device, and no block's elsewhere"""
  model = case.on(3)
  for i, block in enumerate(model.blk):
    want = model.devices[i]
    assert {t.uop.base.buffer.device for t in tensors([block, model.cache[i]])} == {want}
  assert {t.uop.base.buffer.device for t in tensors([model.token_embd, model.output, model.output_norm])} == {"CPU"}

def test_waiting(case: Case, monkeypatch: pytest.MonkeyPatch):
  """… is for all of them"""
  runner, waited = Runner(case.on(3)), []
  assert runner.stages == 3 and runner.slices == 3   # three blocks, and a copy of the step to each further device
  for name in runner.model.devices: monkeypatch.setattr(Device[name], "synchronize", lambda *_, name=name: waited.append(name))
  runner.wait()
  assert waited == ["CPU", "CPU:1", "CPU:2"]

def test_chunks_on_their_way(case: Case):
  """A chunk's launches are of one device, but for copies from it to the next, and a graph is of either: no device waits for what others compute"""
  runner = Runner(case.on(3))
  parts = runner.record_chunk(32).parts
  def where(calls: Any) -> set[str]: return {u.device for call in calls for u in call.src[1:]}
  copies = [part for part in parts if len(where(part)) > 1]
  assert [where(part) for part in copies] == [{"CPU", "CPU:1"}, {"CPU:1", "CPU:2"}]
  assert all(call.src[0].op is Ops.COPY for part in copies for call in part)
  slices = runner.cut(runner.record_chunk(32))
  assert len(slices) == runner.slices
  graphs = [graph for piece in slices for graph in batches(piece)]
  assert sum(map(len, graphs)) == sum(map(len, parts))
  assert all(len(where(graph)) == 1 or all(call.src[0].op is Ops.COPY for call in graph) for graph in graphs)

def test_experts_on_the_cpu(case: Case):
  if case.f.tensors.get("blk.1.ffn_gate_inp.weight") is None: pytest.skip("has none")
  model = case.on(1, 1)
  ffn = model.blk[1].ffn
  away = [ffn.ffn_gate_inp, ffn.routing, ffn.experts_norm, ffn.ffn_gate_exps, ffn.ffn_up_exps, ffn.ffn_down_exps]
  assert model.devices == ("CPU", "CPU:1") and {t.device for t in tensors(away)} == {"CPU:1"}
  here = [model.blk[0], model.blk[1].attn, ffn.ffn_norm, ffn.shared, model.blk[2], model.cache]
  assert {t.device for t in tensors(here)} == {"CPU"}
  assert said(model) == case.want
  parts = Batch(model, 1).record().parts
  places = [[device for device, _ in itertools.groupby(call.src[1].device for call in part)] for part in parts]
  assert places.count(["CPU", "CPU:1", "CPU"]) == 1 and sum(map(len, places)) == len(places) + 2   # a graph there and one back
  assert said(case.on(2, 2)) == case.want

def test_order_by_devices():
  """What comes later on the device that works goes first, but for what writes where another is yet to read, or touches what it is to write"""
  a, b, c, d, e, f = (UOp.new_buffer(device, 4, dtypes.float) for device in ("CPU", "CPU:1", "CPU", "CPU", "CPU", "CPU"))
  def copy(to: UOp, source: UOp) -> UOp: return source.copy_to_device(to.device).call(to, source)
  calls = [copy(a, c), copy(b, a), copy(a, d), copy(d, b), copy(d, c), copy(e, d), copy(f, c)]
  assert by_device(calls) == [calls[i] for i in (0, 6, 1, 2, 3, 4, 5)]

def stale(beside: Tensor, *copied: Tensor) -> Any:
  """What a step finds on another device if nothing is copied there"""
  zeros = tuple(Tensor.zeros(*t.shape, dtype=t.dtype, device=beside.device).contiguous() for t in copied)
  return zeros[0] if len(zeros) == 1 else zeros

def test_a_planted_fault(case: Case, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(mla, "copied", stale)
  got = said(case.on(2))
  assert got[0] != case.want[0] and got[1] != case.want[1]

# ---- parts of a batch on their way ----

def answers(model: Transformer, warm: bool = False) -> tuple[Runner, list[Any]]:
  """Of sequences that come and end one after another, up to six at once, drawn in all ways"""
  runner = Runner(model)
  engine, filters = Engine(runner, model.pool, 8), dict(top_k=40, top_p=.9, min_p=.01)
  if warm: engine.warm()
  ways = [Sampling(), Sampling(.8, seed=1, **filters), Sampling(1.0, seed=2, repeat_penalty=1.3, presence_penalty=.5),
          Sampling(bias={7: 3.0}), Sampling(1.0, seed=4), Sampling()]
  each = []
  for i, way in enumerate(ways):
    each.append(engine.add(Request(IDS[11 * i:11 * i + 5], sampling=way, limit=PAGE + 20 - i, logprobs=3 if i == 4 else None)))
    while len(each[-1].produced) < 4 and each[-1].error is None: engine.step()
  while engine.step(): pass
  for s in each:
    if s.error is not None: raise s.error
  return runner, [(s.produced, s.logprobs) for s in each]

@pytest.mark.parametrize("case", ["small-glm"], indirect=True)
def test_parts_of_a_batch(case: Case, monkeypatch: pytest.MonkeyPatch):
  """… say what a batch says that goes through one device, whoever comes, and wherever they are when he does; and so where nothing is seen before all
  is done"""
  _, want = answers(case.on(1))
  for devices in (2, 3):
    runner, got = answers(case.on(devices), warm=devices == 3)
    assert got == want and {*runner.pipelines} == {2, 4, 8} and {*runner.batches} == {1}
    assert [len(runner.pipelines[size].parts) for size in (2, 4, 8)] == [min(devices, size) for size in (2, 4, 8)]
  monkeypatch.setattr(batch, "seen_by_host", lambda values, device: (to_device(values, device), None))
  assert answers(case.on(2))[1] == want

@pytest.mark.parametrize("case", ["small-glm"], indirect=True)
def test_parts_without_room(case: Case, monkeypatch: pytest.MonkeyPatch):
  """What a step has that finds no memory is given back, and the answers wait for each other"""
  engine = Engine(Runner(case.on(2)), PAGES)
  def full(*_: Any) -> None: raise MemoryError("planted")
  with monkeypatch.context() as m:
    m.setattr(pipeline, "enqueue", full)
    each = [engine.add(Request(IDS[i:i + 3], limit=5)) for i in range(2)]
    while engine.step(): pass
  assert [s.reason for s in each] == ["length"] * 2 and engine.scheduler.max_rows == 1
  assert not engine.runner.pipelines[2].replays and not engine.runner.pipelines[2].graphs

def turns(calls: list[Any]) -> tuple[int, int]:
  """Of launches that take 1 each, copies nothing: when all can be done, by what a graph has them wait for and with one at a time on a device, and how
  many the busiest device has"""
  tracker, ends, free, own = DepsTracker(), list[int](), Counter[str](), Counter[str]()
  for number, call in enumerate(calls):
    buffers = [u.buffer.ensure_allocated().base for u in get_call_arg_uops(call)]
    behind = [ends[i] for i in tracker.access_resources(buffers, get_call_outs_ins(call)[0], number)]
    if call.src[0].op is Ops.COPY: ends.append(max(behind, default=0))
    else:
      device = buffers[0].device
      free[device], own[device] = 1 + max([free[device], *behind]), own[device] + 1
      ends.append(free[device])
  return max(ends), max(own.values())

@pytest.mark.parametrize("case", ["small-glm"], indirect=True)
def test_devices_work_at_once(case: Case):
  """A step of parts takes hardly longer than what its busiest device does alone; whole, it takes all devices' time"""
  for devices in (2, 3):
    runner = Runner(case.on(devices))
    step = runner.batch_of(8).record(Features()).calls
    took, busiest = turns(step)
    assert took <= busiest + 4 < .75 * len(step), (took, busiest, len(step))
    whole = Batch(runner.model, 8).record().calls
    assert turns(whole)[0] == sum(call.src[0].op is not Ops.COPY for call in whole)

# ---- on a card that is none ----

# test_many's, whose kernels the mock has compiled
LEAST = dict(blocks=2, dim=64, heads=2, kv_lora=128, nope=64, rope=32, v=32, ff=128, moe_ff=64, vocab=320, experts=8, used=2)

@dataclass
class Cards:
  """A file, and what is right to say after the first nine of IDS"""
  path: Path
  judge: Judge
  def on(self, devices: int, cpu_experts: int = 0, brings: bool = True) -> Transformer:
    f = read_gguf(self.path)
    place = replace(by_layers(sizes_of(f, 16), device_names("MOCKCUDA", devices), 64, cpu_experts), brings=brings)
    return Transformer.from_gguf(f, 2 * PAGE, device=place, pool=lambda _: PAGES)

@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cards]:
  path, = write_model(tmp_path_factory.mktemp("cards") / "m.gguf", "small-ds", "F16", seed=2, **LEAST)
  with on_cuda(): yield Cards(path, Judge(path, IDS[:9]))

def launched(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> list[str]:
  """What the host launches for a step of cards that have graphs: a graph, by its devices, or a copy"""
  for name in ("MOCKCUDA", "MOCKCUDA:1"): monkeypatch.setattr(Device[name], "graph", CUDAGraph)
  return [" ".join(sorted({b.device for call in batch for b in call.src[1:]})) if len(batch) > 1 else batch[0].src[0].op.name.lower()
          for batch in batches(in_graphs(replay.calls, 0))]

def test_experts_beside_a_card(cards: Cards, monkeypatch: pytest.MonkeyPatch):
  """The CPU's kernels compute them, the card's the shared expert: within a card's bound of what the file says. The host waits where the vector goes
  to the CPU, and nowhere else"""
  model = cards.on(1, 1)
  assert model.devices == ("MOCKCUDA", "CPU") and {t.device for t in tensors(model.blk[1].ffn)} == {"MOCKCUDA", "CPU"}
  reads = model.weight_bytes_by_kind()
  assert set(reads) == {"MOCKCUDA", "CPU"} and sum(reads.values()) == pytest.approx(cards.on(1).weight_bytes_a_step(), rel=.01)
  start, ids, tables = (to_device(np.zeros(shape, np.int32)) for shape in (1, 1, (1, model.pages)))
  replay, rows = Replay(), []
  logits = model.logits(Step.decode(start, tables), ids, replay.run)
  write(tables, np.arange(1, model.pages + 1, dtype=np.int32)[None])
  for i, token in enumerate(IDS[:9]):
    write(start, np.int32([i]))
    write(ids, np.int32([token]))
    replay()
    rows.append(logits.numpy()[0])
  cards.judge.check(np.stack(rows), 1e-5)
  assert launched(replay, monkeypatch) == ["MOCKCUDA", "copy", "CPU", "copy", "MOCKCUDA"]   # last the shared expert's down and the head

def test_experts_come_for_a_prompt(cards: Cards, monkeypatch: pytest.MonkeyPatch):
  """A chunk whose tokens take most experts is computed on the card, from copies; one of fewer is not. Either's logits are within a card's bound"""
  model = cards.on(1, 1)
  ffn = model.blk[1].ffn
  def launches(tokens: int) -> list[str]:
    start, ids, tables = (to_device(np.zeros(shape, np.int32)) for shape in (1, tokens, (1, model.pages)))
    write(tables, np.arange(1, model.pages + 1, dtype=np.int32)[None])
    write(ids, np.int32([*IDS[:9], *[0] * (tokens - 9)]))
    replay = Replay()
    logits = model.logits(Step.prefill(start, tables, tokens), ids, replay.run)
    replay()
    cards.judge.check(logits.numpy()[:9], 1e-5)
    with monkeypatch.context() as patch: return launched(replay, patch)
  least = BROUGHT_TOKENS * LEAST["experts"] // LEAST["used"]
  assert launches(least - 1) == ["MOCKCUDA", "copy", "CPU", "copy", "MOCKCUDA"]
  said = launches(least)
  assert said.count("copy") == 4 and set(said) == {"MOCKCUDA", "copy"}   # the router and three stacks
  model = cards.on(1, 1, brings=False)
  assert launches(least) == ["MOCKCUDA", "copy", "CPU", "copy", "MOCKCUDA"] and not model.brings
  assert not ffn.brings(Step(Phase.DECODE, 64, model.rope.table, model.rope.table)) and not cards.on(1).blk[1].ffn.can_bring

def test_chunks_share_their_memory(cards: Cards):
  """Where they have experts copied, whichever size comes first. Then the sizes make the same tokens' rows: the same bytes, where attention is of the
  same form"""
  runner = Runner(cards.on(1, 1))
  assert runner.sizes == (32, 64, 128) and runner.model.brings and not cards.on(1).brings
  def used(size: int) -> set[UOp]:
    """Of what chunks share, what this one's launches write or read"""
    calls = [call for piece in runner.chunks[size, False] for call in piece.src]
    return {u for call in calls for place in call.src[1:] for u in place.toposort()} & {*runner.scratch.values()}
  rows, shared = [], []
  for page, size in enumerate((32, 64, 128)):
    runner.prefill([Piece(0, IDS[:9], 0, [1 + page])], size)
    rows.append(runner.model.cache[1].numpy()[(1 + page) * PAGE:][:9])
    shared.append(dict(runner.scratch))
  assert shared[0] == shared[1] == shared[2] != {} and used(32) == used(64) == used(128) == {*shared[0].values()}
  assert np.array_equal(*rows[:2]) and rows[0].any() and nmse(rows[2], rows[0]) < 1e-5

def test_two_cards(cards: Cards, monkeypatch: pytest.MonkeyPatch):
  """… say what one does, prompts and answers. A step is one graph, copies among its nodes"""
  want: Any = None
  for devices, cpu_experts in ((1, 0), (2, 0), (1, 1)):
    runner = Runner(cards.on(devices, cpu_experts))
    runner.sizes = runner.sizes[:1]
    engine = Engine(runner, PAGES)
    logits = engine.logits(IDS[:9])
    cards.judge.check(logits, 1e-5)
    got = logits.tobytes(), [*engine.generate(IDS[:9], 3)]
    want = want or got
    if not cpu_experts: assert got == want
    if devices == 2:
      both = [engine.add(Request(IDS[:9], limit=3)) for _ in range(2)]   # parts of one row each
      while engine.step(): pass
      assert [s.produced for s in both] == [got[1]] * 2
      for replay in (runner.batch_of(1).replay(), *runner.pipelines[2].replays.values()):
        assert launched(replay, monkeypatch) == ["MOCKCUDA MOCKCUDA:1"]
    monkeypatch.undo()

def test_the_second_card_breaks(cards: Cards, monkeypatch: pytest.MonkeyPatch):
  """In a kernel of an answer: what it raises is not the first card's"""
  engine = Engine(Runner(cards.on(2)), PAGES)
  s = engine.add(Request(IDS[:1], limit=40))
  while len(s.produced) < 3: engine.step()
  def broken(*args: Any) -> None: raise RuntimeError("CUDA Error 700, an illegal memory access was encountered")
  for call in ("launch", "synchronize"): monkeypatch.setattr(Device["MOCKCUDA:1"], call, broken)
  while engine.step(): pass
  why = "the device failed: MOCKCUDA:1: CUDA Error 700, an illegal memory access was encountered"
  assert engine.failed == why and (s.reason, str(s.error)) == ("error", why)
  with pytest.raises(DeviceFailed, match="MOCKCUDA:1"): engine.add(Request([1]))
  monkeypatch.undo()

# ---- drafts ----

def test_drafts(case: Case):
  """By a block, which lies where the head does; where there is none, found in the text"""
  model, config = case.on(2), Config.from_gguf(case.f)
  if f"blk.{config.n_blocks}.nextn.eh_proj.weight" not in case.f.tensors:
    assert said(model, drafts=2) == case.want
    return
  mtp = MTP(model, load_block(case.f, config))
  assert {t.device for t in tensors([mtp.block, mtp.cache])} == {"CPU"} and said(model, drafts=1, mtp=mtp) == case.want

@pytest.mark.parametrize("case", ["small-glm"], indirect=True)
def test_parts_that_a_block_follows(case: Case):
  """Where probabilities are asked for nothing is drafted: parts go through the devices, and the block writes its rows behind each, as on one"""
  rows: list[Any] = []
  for devices in (1, 2):
    model = case.on(devices)
    mtp = MTP(model, load_block(case.f, Config.from_gguf(case.f)))
    engine = Engine(runner := Runner(model, drafts=1, mtp=mtp), model.pool)
    each = [engine.add(Request(IDS[i:i + 9], limit=PAGE, logprobs=2)) for i in range(2)]
    while engine.step(): pass
    assert {*runner.pipelines} == ({2} if devices == 2 else set()) and not engine.gauges.drafts
    rows.append(([(s.produced, s.logprobs) for s in each], mtp.cache.numpy()[PAGE:].tobytes()))
  assert rows[0] == rows[1]

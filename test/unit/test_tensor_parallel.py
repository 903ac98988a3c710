"""A model cut by tensors over several devices says what it says on one: CPU devices here, each with buffers and kernels of its own.

What is added up in parts is as good as in one piece, and the limit is test_mla's.
"""
from __future__ import annotations
from pathlib import Path
from typing import Any, Callable, Iterator
import numpy as np, pytest
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize
from extra.bench import stand_in
from helpers import SMALL, WIDE, write_mixed
from oracle import Judge, errors
from tinygrad import Tensor
from tinygrad.apps import models, tensor_parallel
from tinygrad.apps.capture import to_device
from tinygrad.apps.engine.engine import Engine
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.gguf import SUPPORTED, GGUFTensor, read_gguf
from tinygrad.apps.mla import MLP, Attention, Config, MoE, Transformer
from tinygrad.apps.quantized import QuantizedWeight, block_size
from tinygrad.apps.shard import device_names
from tinygrad.apps.tensor_parallel import Cut, Devices, ShareSizes, TensorParallel, block_on_all, cuts, head_on_all, parted, share_of
from tinygrad.nn.all_reduce import all_reduce
from tinygrad.nn.step import Step

LIMIT = 1e-7
CPUS = "CPU", "CPU:1", "CPU:2"
KS = T.Q4_K, T.Q6_K, T.Q5_K
# (model, types that its matrices take in turn, dimensions, devices). Blocks of 256, of which the experts have three; blocks of 32; floats; heads
# that do not divide
CASES: dict[str, tuple[str, tuple[T, ...], dict[str, Any], int]] = {
  "glm-2": ("small-glm", KS, WIDE | dict(q_lora=256, heads=4, ff=512, moe_ff=768), 2),
  "ds-3": ("small-ds", (T.Q8_0, T.Q4_1, T.F16), SMALL | dict(heads=5, ff=160, moe_ff=64), 3),
  "old-2": ("small-glm", (T.Q8_0, T.Q4_1), SMALL | dict(q_lora=96, heads=3, old_style=True), 2),   # attn_kv_b
  "youtu-2": ("small-youtu", (T.Q4_0, T.F32, T.IQ4_NL), SMALL | dict(q_lora=64, heads=3, experts=0, tied=True), 2),
}
IDS = np.random.default_rng(2).integers(0, 320, 40)
PROMPT = 32

def write_case(case: str, folder: Path) -> Path:
  model, types, dims, _ = CASES[case]
  return write_mixed(folder / "m.gguf", model, types, **dims, seed=5)
def cut_model(path: Path, devices: int) -> TensorParallel: return TensorParallel.from_gguf(read_gguf(path), CPUS[:devices], 64)
def table_of(model: Transformer) -> Tensor: return to_device(np.arange(1, 1 + model.pages, dtype=np.int32)[None])

def logits_of(model: Transformer) -> np.ndarray:
  """Of a step of prefill and one of decoding, unrecorded"""
  table, out = table_of(model), []
  for step, ids in ((Step.prefill(to_device(np.int32([0])), table, PROMPT), IDS[:PROMPT]),
                    (Step.decode(to_device(np.int32([PROMPT])), table), IDS[PROMPT:PROMPT + 1])):
    out.append(model.logits(step, to_device(ids.astype(np.int32))).numpy())
  return np.concatenate(out)

@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path):
  """Against the oracle, as the model on one device is judged; close to that one's, and the same tokens; the same bytes each time"""
  path = write_case(case, tmp_path)
  models = Transformer.from_gguf(read_gguf(path), 64), cut_model(path, CASES[case][3])
  assert models[1].plain_parts(Step.decode(to_device(np.int32([0])), table_of(models[1]))) == []
  one, many = (Engine(Runner(m), m.pool) for m in models)
  got = many.logits(IDS.tolist())
  Judge(path, IDS.tolist()).check(got, LIMIT)
  assert errors(got, one.logits(IDS.tolist())).max() < LIMIT and np.array_equal(many.logits(IDS.tolist()), got)
  said = list(many.generate(IDS.tolist(), 12))
  assert said == list(one.generate(IDS.tolist(), 12)) == list(many.generate(IDS.tolist(), 12))

@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path: return write_case("ds-3", tmp_path_factory.mktemp("cut"))

def same_on_all(model: TensorParallel) -> bool:
  """Whether all devices have the same bytes: x behind the last block, and the rows of the cache"""
  step = Step.prefill(to_device(np.int32([0])), table_of(model), PROMPT)
  _, xs = model._through(len(model.blk), step, to_device(IDS[:PROMPT].astype(np.int32)), tensor_parallel.apply)
  first, *others = (x.numpy() for x in xs)
  caches = [[cache.numpy() for cache in share.cache] for share in model.shares]
  assert any(cache.any() for cache in caches[0])
  return all(np.array_equal(first, x) for x in others) and all(np.array_equal(a, b) for own in caches[1:] for a, b in zip(caches[0], own))

def test_unrecorded(small: Path):
  """The same bytes on all devices"""
  model = cut_model(small, 3)
  Judge(small, IDS.tolist()).check(logits_of(model), LIMIT)
  assert same_on_all(model)

def test_sums_in_another_order_on_each_device(small: Path, monkeypatch: pytest.MonkeyPatch):
  def own_first(parts: list[Tensor], _: None) -> list[Tensor]:
    def total(i: int) -> Tensor:
      out = parts[i]
      for other in parts[:i] + parts[i + 1:]: out = out + other.to(out.device)
      return out.contiguous()
    return [total(i) for i in range(len(parts))]
  monkeypatch.setattr(tensor_parallel, "all_reduce", own_first)
  assert not same_on_all(cut_model(small, 3))

# ---- what is wrong shows ----

def nothing_of_the_second(t: GGUFTensor, cut: Cut, device: int) -> GGUFTensor:
  own = share_of(t, cut, device)
  return own._replace(data=np.zeros_like(own.data)) if device == 1 and t.name == "blk.1.ffn_down_exps.weight" else own
def the_first_twice(t: GGUFTensor, cut: Cut, device: int) -> GGUFTensor:
  return share_of(t, cut, 0 if t.name == "blk.0.attn_output.weight" else device)
def residual_twice(blocks: list, steps: list, xs: list[Tensor], caches: list, ropes: list, zeros: list[Tensor], _: None) -> tuple[Tensor, ...]:
  return block_on_all(blocks, steps, xs, caches, ropes, [xs[1], *zeros[1:]])
def without_the_last(parts: list[Tensor], _: None) -> list[Tensor]: return [*all_reduce(parts[:-1]), parts[-1]]

def heads_turned_round(step: Step, hidden: Tensor, heads: list, vocab: int) -> Tensor: return head_on_all(step, hidden, heads[::-1], vocab)

FAULTS = nothing_of_the_second, the_first_twice, residual_twice, without_the_last, heads_turned_round
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault(fault: Callable, small: Path, monkeypatch: pytest.MonkeyPatch):
  name = {residual_twice: "block_on_all", without_the_last: "all_reduce", heads_turned_round: "head_on_all"}.get(fault, "share_of")
  monkeypatch.setattr(tensor_parallel, name, fault)
  with pytest.raises(AssertionError, match="errors"): Judge(small, IDS.tolist()).check(logits_of(cut_model(small, 2)), LIMIT)

# ---- what a device holds ----

@pytest.mark.parametrize("kind", [T.Q8_0, T.Q6_K, T.F16])
@pytest.mark.parametrize("shape,axis", [((40, 512), 0), ((16, 768), 1), ((3, 40, 512), 1), ((3, 16, 768), 2), ((5, 8, 256), 0)])
def test_shares(kind: T, shape: tuple[int, ...], axis: int):
  """Put together they are the tensor, and zeros behind it; those along the first axis are the file's own memory"""
  elements, nbytes = block_size(kind)
  data = np.random.default_rng(0).integers(1, 256, int(np.prod(shape)) // elements * nbytes).astype(np.uint8)
  tensor, unit = GGUFTensor("w", shape, kind, data), elements if axis == len(shape) - 1 else 1
  cut = Cut(axis, parted(shape[axis], unit, 3))
  shares = [share_of(tensor, cut, device) for device in range(3)]
  def bytes_of(t: GGUFTensor) -> np.ndarray: return t.data.reshape(*t.shape[:-1], t.shape[-1] // elements, nbytes)
  together = np.concatenate([bytes_of(share) for share in shares], axis)
  whole = bytes_of(tensor)
  at, behind = np.split(together, [whole.shape[axis]], axis)
  assert np.array_equal(at, whole) and not behind.any() and behind.shape[axis] < 3 * unit
  assert {share.data.nbytes for share in shares} == {data.nbytes * 3 * cut.count // shape[axis] // 3}
  assert axis or np.shares_memory(shares[0].data, data)

def test_zeros():
  """What stands for the numbers that are not there"""
  for kind in SUPPORTED: assert not dequantize(np.zeros(block_size(kind)[1], np.uint8), kind).any(), kind

def weights(part: Any) -> Iterator[tuple[str, QuantizedWeight]]:
  for name, own in vars(part).items():
    if isinstance(own, QuantizedWeight): yield name, own
    elif isinstance(own, (Attention, MLP, MoE)): yield from weights(own)

def test_no_device_holds_more_than_its_share(tmp_path: Path):
  path, dims = write_case("glm-2", tmp_path), CASES["glm-2"][2]
  model, alone = cut_model(path, 2), Transformer.from_gguf(read_gguf(path), 64)
  whole = "attn_q_a", "attn_kv_a_mqa", "ffn_gate_inp"
  for device, share in zip(CPUS, model.shares):
    for own, uncut in zip(share.blk, alone.blk):
      for (name, part), (_, weight) in zip(weights(own), weights(uncut), strict=True):
        of = 1 if name in whole else 2 / 3 if dims["moe_ff"] in weight.shape else 1 / 2   # three blocks on two devices
        assert part.device == device and part.nbytes == round(weight.nbytes * of), name
    assert [cache.device for cache in share.cache] == [device] * 2
    assert share.head is not None and share.head.output.device == device and share.head.output.nbytes * 2 == alone.output.nbytes

def test_a_hidden_dimension_of_few_blocks():
  """1408 is 44 blocks of 32; four of 256 on three devices are two, two and none; heads are whole, and so are the blocks of their output"""
  assert [parted(1408, 32, n) for n in (1, 2, 3, 4, 8)] == [1408, 704, 480, 352, 192] and parted(1024, 256, 3) == 512
  f = stand_in("ds2lite")
  cut = cuts(f, Config.from_gguf(f), 3)
  assert cut["blk.0.attn_output.weight"] == Cut(1, 6 * 128) and cut["blk.0.attn_q.weight"] == Cut(0, 6 * 192)

# ---- by name ----

def test_load():
  """The built-in model as a user loads it; what a step reads is what the first device does"""
  one, two = (models.load(models.BUILT_IN, 64, devices=n, shard="tensors").transformer for n in (1, 2))
  assert two.devices == CPUS[:2] and two.weight_bytes_a_step() < .8 * one.weight_bytes_a_step() and two.row_bytes == one.row_bytes

@pytest.mark.parametrize("wanted,complaint", [(dict(cpu_experts=1), "--shard tensors: expected no --cpu_experts, which --shard layers takes"),
                                              (dict(mtp="m"), "--shard tensors: expected no --draft_mtp, which --shard layers takes"),
                                              (dict(batch_invariant=True),
                                               "--shard tensors: expected no --batch_invariant, which --shard layers takes")])
def test_what_layers_alone_take(wanted: dict[str, Any], complaint: str):
  with pytest.raises(models.UserError) as e: models.load(models.BUILT_IN, 64, devices=2, shard="tensors", **wanted)
  assert str(e.value) == complaint

def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch):
  """Said before anything is loaded, with what would fit"""
  f, names = read_gguf(models.BUILT_IN), device_names("MOCKCUDA", 2)
  sizes = ShareSizes(f, 16, 2)
  held = {n: ShareSizes(f, 16, n).weights(Devices(device_names("MOCKCUDA", n))) for n in (1, 2, 4)}
  whole = sum(f.tensors[name].data.nbytes for name in sizes.names)
  assert held[1]["MOCKCUDA"] == whole and held[4]["MOCKCUDA"] < held[2]["MOCKCUDA"] < whole and held[2]["MOCKCUDA:1"] < held[2]["MOCKCUDA"]
  rows = (64 + sizes.spare) * sizes.row
  monkeypatch.setattr(models, "devices_here", lambda: 4)
  monkeypatch.setattr(models, "room_for_weights", lambda device: held[4]["MOCKCUDA"] + rows + sizes.largest)
  with pytest.raises(models.UserError, match=r"MOCKCUDA has .* free, .* of weights, .* of the cache, .* more .*: --devices [34] would fit$"):
    models.check_shares(f, sizes, names, 64, "--max_context")
  models.check_shares(f, sizes, device_names("MOCKCUDA", 4), 64, "--max_context")

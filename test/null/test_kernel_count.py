"""The committed table: kernels a token of the greedy decode graph, by model and target, scheduled with no device.

A number that changes is to be changed here, in the commit that changes it: fewer is the aim, more wants a reason. The same by hand:
  python bench_block.py --count --target CUDA
  python bench_block.py --count --target CUDA --parallel 8
"""
import pytest
from extra.bench import batch_count, count_kernels, no_device, render_kernels, stand_in, with_blocks
from tinygrad import Device, Tensor
from tinygrad.apps.capture import batches, collected_calls, first_batch, in_graphs
from tinygrad.apps.engine.batch import Mode
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.engine.sampling import Features
from tinygrad.apps.mla import Config, Transformer
from tinygrad.engine.realize import compile_linear
from tinygrad.helpers import Context
from tinygrad.nn.intrinsics import HOPPER, TARGETS, target_of
from tinygrad.uop.ops import Ops, UOp

# model: {target: (kernels a token, [(blocks of a kind, kernels a block)])}; types as in the public Q4_0 files
TABLE = {
  "glm": {"CUDA": (379, [(1, 7), (4, 8), (42, 8)]), "METAL": (473, [(1, 9), (4, 10), (42, 10)]), "CPU": (565, [(1, 8), (4, 12), (42, 12)])},
  "ds2lite": {"CUDA": (219, [(1, 7), (2, 8), (24, 8)]), "METAL": (246, [(1, 8), (2, 9), (24, 9)]), "CPU": (298, [(1, 7), (2, 11), (24, 11)])},
  "youtu": {"CUDA": (228, [(4, 7), (28, 7)]), "METAL": (292, [(4, 9), (28, 9)]), "CPU": (261, [(4, 8), (28, 8)])},
  # a choice of so many experts is a launch, one in groups is as many as without
  "kimi": {"CUDA": (612, [(1, 8), (6, 10), (54, 10)])}, "v3": {"CUDA": (608, [(3, 8), (4, 10), (54, 10)])},
  "small-v3": {"CUDA": (34, [(2, 7), (2, 8)]), "METAL": (42, [(2, 9), (2, 10)]), "CPU": (45, [(2, 8), (2, 12)])},
}

# model: {(target, sequences): kernels a step}. From 3 sequences on CUDA has tensor cores for the products; elsewhere all numbers have one form
MANY = {
  "glm": {("CUDA", 2): (380, [(1, 7), (4, 8), (42, 8)]), ("CUDA", 4): (476, [(1, 10), (4, 10), (42, 10)]),
          ("CUDA", 8): (568, [(1, 10), (4, 12), (42, 12)]), ("CUDA", 64): (754, [(1, 12), (4, 16), (42, 16)]),
          ("METAL", 8): (474, [(1, 9), (4, 10), (42, 10)]), ("CPU", 8): (615, [(1, 11), (4, 13), (42, 13)])},
  "ds2lite": {("CUDA", 2): (220, [(1, 7), (2, 8), (24, 8)]), ("CUDA", 64): (380, [(1, 10), (2, 14), (24, 14)]),
              ("METAL", 8): (247, [(1, 8), (2, 9), (24, 9)]), ("CPU", 8): (301, [(1, 9), (2, 11), (24, 11)])},
  "youtu": {("CUDA", 2): (229, [(4, 7), (28, 7)]), ("CUDA", 4): (358, [(4, 11), (28, 11)]), ("CUDA", 64): (390, [(4, 12), (28, 12)]),
            ("METAL", 8): (293, [(4, 9), (28, 9)]), ("CPU", 8): (358, [(4, 11), (28, 11)])},
}

@pytest.mark.parametrize("name,to", [(name, to) for name, row in TABLE.items() for to in row])
def test_table(name: str, to: str): assert count_kernels(stand_in(name), to) == TABLE[name][to]

@pytest.mark.parametrize("name,to,sequences", [(name, *key) for name, row in MANY.items() for key in row])
def test_many(name: str, to: str, sequences: int): assert count_kernels(stand_in(name), to, parallel=sequences) == MANY[name][to, sequences]

@pytest.mark.parametrize("to", ["CUDA", "METAL", "CPU"])
def test_multiplying_is_counting(to: str):
  """One block of a kind times their number is what scheduling all blocks gives"""
  f = stand_in("small-glm")
  with no_device(to):
    calls = Runner(Transformer.from_gguf(f, 256)).batch.record(compiled=False).calls
  kernels, kinds = count_kernels(f, to, max_context=256)
  if to != "CPU": assert sum(k.times for k in render_kernels(f, to, max_context=256)) == kernels
  assert kernels == len(calls) and sum(n for n, _ in kinds) == Config.from_gguf(f).n_blocks == 4
  longer = with_blocks(f, [0, 0, 1, 2, 3, 3])
  assert count_kernels(longer, to, max_context=256)[0] - kernels == kinds[0][1] + kinds[-1][1]

@pytest.mark.parametrize("to", ["CUDA", "METAL", "CPU"])
def test_what_only_those_who_ask_pay(to: str):
  """A mask: one more launch. Probabilities: the total, the likeliest, and what logs them"""
  with no_device(to):
    batch = Runner(Transformer.from_gguf(stand_in("small-glm"), 256)).batch_of(8)
    def launches(features: Features) -> int:
      batch.features = features
      return len(batch.record(compiled=False).calls)
    plain = launches(Features())
    more = [launches(features) - plain for features in (Features(mask=True), Features(logprobs=True), Features(mask=True, logprobs=True))]
  assert plain == count_kernels(stand_in("small-glm"), to, max_context=256, parallel=8)[0] and more == ([1, 3, 4] if to == "CPU" else [1, 5, 6])

@pytest.mark.parametrize("share", [0, 1e-9, .5, 1])
def test_forced_drafts_are_judged_by_what_is_read(share: float):
  """Of a step whose drafts count by lot: a kernel that is given more than it reads has too many arguments for a graph"""
  with no_device("CUDA"):
    runner = Runner(Transformer.from_gguf(stand_in("small-glm"), 256), 4)
    runner.force(share)
    batch = runner.batch_of(1)
    batch.mode = Mode.VERIFY
    calls = [call for call in batch.record(compiled=False).calls if getattr(call.src[0].arg, "name", "").startswith("accept")]
    programs = [call.src[0] for call in compile_linear(UOp(Ops.LINEAR, src=tuple(calls))).src]
  assert [len(program.arg.globals) for program in programs] == [len(call.src) - 1 for call in calls] == [8 if share == 0 else 9]

def test_what_metal_takes():
  """GLM at full size: few kernels in few batches, none past the threadgroup memory"""
  kernels = render_kernels(stand_in("glm"), "METAL")
  assert sum(k.times for k in kernels) == TABLE["glm"]["METAL"][0] <= 480 and batch_count(480, 32) <= 6
  assert all(k.shared <= 32768 for k in kernels)

@pytest.mark.parametrize("kernels,batches", [(1, 0), (2, 1), (32, 1), (33, 2), (96, 2), (97, 3), (475, 4), (480, 4), (481, 5)])
def test_batch_count(kernels: int, batches: int): assert batch_count(kernels, 32) == batches and batch_count(kernels, 0) == min(batches, 1)

@pytest.mark.parametrize("to", ["CUDA", "METAL", "CPU"])
def test_graphs_of_a_step(to: str):
  """One where kernels start while those before them run, or when the host calls; else as many as are counted"""
  with no_device(to), Context(JIT_BATCH_SIZE=8):
    calls = Runner(Transformer.from_gguf(stand_in("small-youtu"), 256)).batch.record(compiled=False).calls
    assert len(calls) > 24 and first_batch() == (8 if to == "METAL" else 0)
    graphs = batches(in_graphs(list(compile_linear(UOp(Ops.LINEAR, src=tuple(calls))).src), first_batch()))
    assert sum(map(len, graphs)) == len(calls) and len(graphs) == batch_count(len(calls), first_batch())

def test_null_speaks_for_a_target():
  before = Device.DEFAULT
  for to in ("CUDA", "METAL"):
    with no_device(to):
      assert Device.DEFAULT == "NULL" and target_of(Device.DEFAULT) is (HOPPER if to == "CUDA" else TARGETS[to])
      assert target_of("CPU") is None
  with no_device("CPU"): assert target_of(Device.DEFAULT) is None
  assert Device.DEFAULT == before and target_of("METAL:1") is TARGETS["METAL"]

def test_collected_calls_do_not_run():
  with collected_calls() as calls: t = (Tensor([1.0, 2.0]).realize() + 1).contiguous().realize()
  assert len(calls) == 2 and not t.uop.buffer.is_allocated()  # the copy and the addition
  assert (Tensor([1.0, 2.0]) + 1).tolist() == [2.0, 3.0]

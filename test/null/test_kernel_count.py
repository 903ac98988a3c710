"""The committed table: kernels a token of the greedy decode graph, by model and target, scheduled with no device.

A number that changes is to be changed here, in the commit that changes it: fewer is the aim, more wants a reason. The same by hand:
  python bench_block.py --count --target CUDA
"""
import pytest
from extra.bench import captured, count_kernels, no_device, stand_in, with_blocks
from tinygrad import Device, Tensor
from tinygrad.apps.generate import Generator
from tinygrad.apps.mla import Config, Transformer
from tinygrad.apps.sampling import Features
from tinygrad.nn.intrinsics import HOPPER, TARGETS, target

# model: {target: (kernels a token, [(blocks of a kind, kernels a block)])}; types as in the public Q4_0 files
TABLE = {
  "glm": {"CUDA": (613, [(1, 9), (4, 13), (42, 13)]), "METAL": (613, [(1, 9), (4, 13), (42, 13)]), "CPU": (1647, [(1, 21), (4, 36), (42, 35)])},
  "ds2lite": {"CUDA": (326, [(1, 8), (2, 12), (24, 12)]), "METAL": (326, [(1, 8), (2, 12), (24, 12)]), "CPU": (864, [(1, 18), (2, 33), (24, 32)])},
  "youtu": {"CUDA": (294, [(4, 9), (28, 9)]), "METAL": (294, [(4, 9), (28, 9)]), "CPU": (684, [(4, 21), (28, 21)])},
}

@pytest.mark.parametrize("name,to", [(name, to) for name, row in TABLE.items() for to in row])
def test_table(name: str, to: str): assert count_kernels(stand_in(name), to) == TABLE[name][to]

@pytest.mark.parametrize("to", ["CUDA", "METAL", "CPU"])
def test_multiplying_is_counting(to: str):
  """One block of a kind times their number is what scheduling all blocks gives"""
  f = stand_in("small-glm")
  with no_device(to):
    with captured(): gen = Generator(Transformer.from_gguf(f, 256))
    with captured() as calls: gen._decode(Features(), gen.position.bind(1) if gen.device_position is None else gen.device_position)
  kernels, kinds = count_kernels(f, to, render=to != "CPU", max_context=256)
  assert kernels == len(calls) and sum(n for n, _ in kinds) == Config.from_gguf(f).n_blocks == 4
  longer = with_blocks(f, [0, 0, 1, 2, 3, 3])
  assert count_kernels(longer, to, max_context=256)[0] - kernels == kinds[0][1] + kinds[-1][1]

def test_null_speaks_for_a_target():
  before = Device.DEFAULT
  for to in ("CUDA", "METAL"):
    with no_device(to): assert Device.DEFAULT == "NULL" and target() is (HOPPER if to == "CUDA" else TARGETS[to]) and target("CPU") is None
  with no_device("CPU"): assert target() is None
  assert Device.DEFAULT == before and target("METAL:1") is TARGETS["METAL"]

def test_captured_runs_nothing():
  with captured() as calls: t = (Tensor([1.0, 2.0]).realize() + 1).contiguous().realize()
  assert len(calls) == 2 and not t.uop.buffer.is_allocated()  # the copy and the addition
  assert (Tensor([1.0, 2.0]) + 1).tolist() == [2.0, 3.0]

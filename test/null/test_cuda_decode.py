"""Decoding as on a GPU, every kernel of ours included, run on the host (mockcuda, mockmetal) and judged by the naive numpy forward pass."""
from pathlib import Path
from typing import Iterator
import numpy as np, pytest
from gguf import GGMLQuantizationType as T
from helpers import WIDE, engine_of, write_mixed
from mockcuda import on_cuda
from mockmetal import on_metal
from oracle import Judge
from tinygrad import Tensor, TinyJit, UOp, dtypes
from tinygrad.apps.capture import to_device
from tinygrad.nn import intrinsics, kernel, split_kv
from tinygrad.nn.step import Step

# and the error: activations of 8 bits cost a product 2e-5, 17 in two blocks 4e-4, and no position 2.5 times that; without them a cache of
# halves costs keys and values 2^-24 of their squares each, four times in two blocks, where scores of a few units multiply what the keys are off
GPUS = {"cuda": (on_cuda, 1e-3), "hopper": (lambda: on_cuda("sm_90"), 1e-3), "metal": (on_metal, 1e-6)}

IN_GROUPS = dict(q_lora=256, experts=12, used=3, groups=(4, 2), blocks=1, dense=0)

@pytest.fixture(autouse=True)
def limit(request: pytest.FixtureRequest) -> Iterator[float]:
  on, limit = GPUS[request.param]
  with on(): yield limit

@pytest.mark.parametrize("limit,family,types,sizes", [
  ("cuda", "small-glm", "Q4_0 Q8_0 Q6_K Q5_K", dict(q_lora=256, experts=5)), ("cuda", "small-ds", "Q4_K F16 Q5_0", dict(blocks=1, dense=0)),
  ("hopper", "small-glm", "Q4_0 Q8_0 Q6_K Q5_K", dict(q_lora=256, experts=5, blocks=1, dense=0)),
  ("hopper", "small-glm", "IQ4_XS IQ2_XXS IQ3_XXS MXFP4", dict(q_lora=256, experts=5, blocks=1, dense=0)),
  ("metal", "small-glm", "Q4_0 Q8_0 Q6_K Q5_K", dict(q_lora=256, experts=5, blocks=1, dense=0)),
  ("cuda", "small-v3", "Q4_0 Q8_0 Q6_K", IN_GROUPS), ("metal", "small-v3", "Q4_K Q8_0", IN_GROUPS),
  ("cuda", "small-moonlight", "Q4_0 Q5_K", dict(experts=8, used=3, blocks=1, dense=0))], indirect=["limit"])
def test_decode(limit: float, family: str, types: str, sizes: dict[str, int], tmp_path: Path):
  """A token at a time, over more positions than one split of the attention holds; mixed types (test_mul_mat has all)"""
  path = write_mixed(tmp_path / "m.gguf", family, [T[t] for t in types.split()], **WIDE | sizes, seed=1)
  ids = np.random.default_rng(1).integers(0, 320, 34 if GPUS["cuda"][1] == limit else 20)  # every access is checked on the mock of Metal: slow
  g = engine_of(path, 64)
  model, table = g.runner.model, to_device(np.int32([[1]]))
  assert not model.plain_parts(g.runner.batch.step)
  position = Tensor.zeros(1, dtype=dtypes.int32).contiguous().realize()
  def step(token: Tensor) -> Tensor:
    out = model.logits(Step.decode(position, table), token)
    out.realize(position.assign(position + 1))
    return out
  jit = TinyJit(step)
  got = np.concatenate([jit(Tensor([t], dtype=dtypes.int32).realize()).numpy() for t in ids])
  Judge(path, ids).check(got, limit)

@pytest.mark.parametrize("limit", ["cuda"], indirect=True)
def test_splits_left_out(limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """All but the first, which holds 32 positions: noticed at those behind, and at no other"""
  combine = split_kv.mla_combine
  def faulty(t: intrinsics.Target, sums: Tensor, tops: Tensor, *args: Tensor) -> Tensor:
    assert sums.shape[0] == 2  # of a page
    return combine(t, sums[:1].contiguous(), tops[:, :1].contiguous(), *args)
  monkeypatch.setattr(split_kv, "mla_combine", faulty)
  with pytest.raises(AssertionError, match=r"^positions \[32, 33\] of 34"):
    test_decode(limit, "small-youtu", "F16", dict(q_lora=256, experts=0, blocks=1), tmp_path)

@pytest.mark.parametrize("limit", ["cuda"], indirect=True)
def test_splits_left_out_in_v_b(limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """Where its blocks combine them"""
  monkeypatch.setattr(split_kv.SplitContext, "own", lambda context, token: (UOp.const(0), UOp.const(min(context.splits, 1))))
  monkeypatch.setattr(kernel, "_programs", {})
  with pytest.raises(AssertionError, match=r"^positions \[32, 33\] of 34"):
    test_decode(limit, "small-youtu", "Q8_0", dict(q_lora=256, experts=0, blocks=1), tmp_path)

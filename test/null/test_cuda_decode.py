"""Decoding as on a GPU, every kernel of ours included, run on the host (mockcuda, mockmetal) and judged by the naive numpy forward pass."""
from pathlib import Path
from typing import Iterator
import numpy as np, pytest
from gguf import GGMLQuantizationType as T
from helpers import WIDE, generator, write_mixed
from mockcuda import on_cuda
from mockmetal import on_metal
from oracle import logits, nmse
from tinygrad import Tensor, TinyJit, dtypes

GPUS = {"cuda": (on_cuda, 1e-3), "metal": (on_metal, 1e-5)}  # and the error: a cache of half floats; for CUDA activations of 8 bits

@pytest.fixture(autouse=True)
def limit(request: pytest.FixtureRequest) -> Iterator[float]:
  on, limit = GPUS[request.param]
  with on(): yield limit

@pytest.mark.parametrize("limit,family,types,sizes", [
  ("cuda", "small-glm", "Q4_0 Q8_0 Q6_K Q5_K", dict(q_lora=256, experts=5)), ("cuda", "small-ds", "Q4_K F16 Q5_0", {}),
  ("metal", "small-glm", "Q4_0 Q8_0 Q6_K Q5_K", dict(q_lora=256, experts=5))], indirect=["limit"])
def test_decode(limit: float, family: str, types: str, sizes: dict[str, int], tmp_path: Path):
  """A token at a time, over more positions than one split of the attention holds; mixed types (test_mul_mat has all)"""
  path = write_mixed(tmp_path / "m.gguf", family, [T[t] for t in types.split()], **WIDE | sizes, seed=1)
  ids = np.random.default_rng(1).integers(0, 320, 34 if limit == 1e-3 else 20)  # every access is checked on the mock of Metal, which takes time
  g = generator(path, 64)
  assert g.model.kernels_fit
  position = Tensor.zeros(1, dtype=dtypes.int32).contiguous().realize()
  def step(token: Tensor) -> Tensor:
    out = g.model.logits(token, position)
    out.realize(position.assign(position + 1))
    return out
  jit = TinyJit(step)
  got = np.concatenate([jit(Tensor([t], dtype=dtypes.int32).realize()).numpy() for t in ids])
  assert nmse(got, logits(path, ids)) < limit

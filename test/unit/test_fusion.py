"""What fused reductions compute, against numpy in float64: on the CPU, and as the GPUs' kernels by their mocks."""
import contextlib
from typing import Any, Callable
import numpy as np, pytest
from fusion import CASES, np_softmax
from mockcuda import on_cuda
from mockmetal import on_metal
from tinygrad import Tensor, Variable

DEVICES:dict[str, Callable[[], Any]] = {"CPU": contextlib.nullcontext, "CUDA": on_cuda, "METAL": on_metal}

@pytest.mark.parametrize("device", DEVICES)
def test_values(device:str):
  with DEVICES[device]():
    for name, c in CASES.items():
      x = c.input()
      tolerance = 2e-3 if "half" in name else 1e-5
      np.testing.assert_allclose(c.run(Tensor(x)).float().numpy(), c.want(x.astype(np.float64)), tolerance, tolerance, err_msg=name)

@pytest.mark.parametrize("device", DEVICES)
def test_symbolic_length(device:str):
  x = np.random.default_rng(0).standard_normal((3, 1024)).astype(np.float32)
  with DEVICES[device]():
    t = Tensor(x).realize()
    for length in (1, 5, 31, 700, 1024):
      n = Variable("n", 1, 1024).bind(length)
      got = t[:, :n].softmax(-1).pad(((0, 0), (0, 1024 - n))).numpy()
      np.testing.assert_allclose(got[:, :length], np_softmax(x[:, :length]), 1e-5, 1e-6)
      assert not got[:, length:].any()

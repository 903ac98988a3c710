"""One line for a device that cannot be had: the cause, and what there is; one for memory that cannot be had."""
import os, subprocess, sys
from pathlib import Path
import pytest
from tinygrad import Device
from tinygrad.apps import models
from tinygrad.apps.models import UserError, _why_not, check_device
from tinygrad.helpers import OSX, Context

ROOT = Path(__file__).resolve().parents[2]
NAMES = "DEV is one of CPU, CUDA, METAL; by plain ops, slowly, AMD, "

def line(dev: str) -> str:
  with Context(DEV=dev), pytest.raises(UserError) as e: check_device()
  assert "\n" not in str(e.value)
  return str(e.value)

@pytest.mark.parametrize("dev,cause", [
  ("CUDAA", "cannot open the device CUDAA: there is none of that name, did you mean CUDA?"),
  ("FOO", "cannot open the device FOO: there is none of that name; "), ("NULL", "the device NULL runs no kernels"),
  ("CPU:FOO", "CPU has no renderer 'FOO', but CLANG, LLVM"), ("CPU:1", "CPU has no renderer '1', but CLANG"),
  ("CPU::FOO", "invalid arch string: 'FOO'")])
def test_a_wrong_name(dev: str, cause: str):
  assert cause in (said := line(dev)) and NAMES in said

@pytest.mark.skipif(OSX or "MOCKMETAL" in os.environ, reason="there is one")
def test_no_mac(): assert "it is there on a Mac alone" in _why_not("METAL", RuntimeError("no library"))  # the mock may stand in for one here

def test_no_driver():
  assert _why_not("CUDA", AttributeError("failed to load library cuda: try setting CUDA_PATH?")) == "found no NVIDIA driver (libcuda)"
  first = AttributeError("failed to load library nvrtc: try setting CUDA_PATH?")
  assert "NVRTC" in _why_not("CUDA:1", ExceptionGroup("No renderer", [first, OSError()]))
  assert _why_not("CUDA", RuntimeError("CUDA Error 100,\nno CUDA-capable device")) == "CUDA Error 100, no CUDA-capable device"

@pytest.mark.parametrize("script,dev,said", [
  (["tinygrad/apps/llm.py", "--prompt", "x"], "CUDAA", "error: cannot open the device CUDAA"),
  (["bench_block.py", "1", "--model", "models/tiny-glm-Q4_0.gguf"], "CUDAA", "error: cannot open the device CUDAA"),
  (["profile_model.py", "models/tiny-glm-Q4_0.gguf"], "CUDAA", "error: cannot open the device CUDAA"),
  (["tinygrad/apps/llm.py", "--prompt", "x"], "CPU:CLANG:a:b", "DEV=CPU:CLANG:a:b: too many ':'")])
def test_the_command_lines(script: list[str], dev: str, said: str):
  run = subprocess.run([sys.executable, *script], capture_output=True, text=True, cwd=ROOT, env=os.environ | {"DEV": dev})
  first, = run.stderr.splitlines()
  assert first.startswith(said) and run.returncode and run.stdout.count("\n") <= 1

@pytest.mark.parametrize("flags,lacking", [("sse4_2 cx16", True), ("sse4_2 f16c avx2", False), ("", False)])
def test_a_cpu_without_halves(flags: str, lacking: bool, monkeypatch):
  """A virtual machine of a generic type, say: else the first kernel lacks a symbol"""
  monkeypatch.setattr(models, "cpuinfo", {"flags": flags}.__getitem__)
  if lacking: assert "the device CPU needs an x86 CPU with F16C" in line("CPU")
  else:
    with Context(DEV="CPU"): check_device()

def test_no_memory():
  with pytest.raises(MemoryError) as e: Device["CPU"].allocator.alloc(1 << 50)
  assert str(e.value).startswith("Allocation of 1048576.00 GB failed on CPU. Used: ") and "\n" not in str(e.value)

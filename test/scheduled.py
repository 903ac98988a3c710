"""Kernels of a tensor, for any target, with no device."""
from __future__ import annotations
import contextlib
from typing import Callable, Iterator
from extra.bench import no_device, shared_bytes
from tinygrad import Device, Tensor
from tinygrad.apps.capture import collected_calls
from tinygrad.engine.realize import compile_linear
from tinygrad.helpers import Context
from tinygrad.uop.ops import Ops, UOp

TARGETS = ("NULL", "CUDA", "METAL", "CPU")

@contextlib.contextmanager
def on(target:str) -> Iterator[None]:
  """The target's renderer on the device NULL; "NULL" is that device's own"""
  with contextlib.nullcontext() if target == "CPU" else Context(DEV="NULL") if target == "NULL" else no_device(target):
    with Context(SCACHE=0): yield                          # a schedule is remembered by its device, and the targets are all NULL

def programs(run:Callable[[], Tensor|list[Tensor]]) -> list[UOp]:
  with collected_calls() as calls: Tensor.realize(*(out if isinstance(out := run(), list) else [out]))
  return [c.src[0] for c in compile_linear(UOp(Ops.LINEAR, src=tuple(calls))).src if c.src[0].op is Ops.PROGRAM]

def count(target:str, run:Callable[[], Tensor|list[Tensor]]) -> int:
  """Kernels; none may take more of a threadgroup's memory than the target has"""
  with on(target):
    kernels = programs(run)
    assert all(shared_bytes(p) <= Device[Device.DEFAULT].renderer.shared_max for p in kernels)
    return len(kernels)

def empty(*shape:int) -> Tensor: return Tensor.empty(*shape)

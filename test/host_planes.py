"""A GPU's planes of a small weight, made by numpy of the same formulas. tinygrad would lower and compile a kernel for every shape, which takes longer
than the kernels that most tests are about; that both are the same bytes is test_quantized's."""
from __future__ import annotations
import numpy as np
from tinygrad import Device
from tinygrad.apps.capture import to_device
from tinygrad.apps.gguf import GGMLType
from tinygrad.apps.quantized import FLOATS, Numbers, QuantizedWeight, packed, split_planes, with_header

_load = QuantizedWeight.load.__func__

def planes_of(kind: GGMLType, shape: tuple[int, ...], data: np.ndarray) -> dict[str, np.ndarray]:
  planes = with_header(kind, shape, split_planes(kind, shape, np.ascontiguousarray(data).reshape(-1).view(Numbers)))
  return {name: np.ascontiguousarray(plane).view(np.ndarray) for name, plane in planes.items()}

def load(cls: type[QuantizedWeight], kind: GGMLType, shape: tuple[int, ...], data: np.ndarray, device: str | None = None) -> QuantizedWeight:
  """As QuantizedWeight.load"""
  device = device or Device.DEFAULT
  if packed(shape, device) or kind in FLOATS: return _load(cls, kind, shape, data, device)
  return cls(kind, shape, {name: to_device(plane, device) for name, plane in planes_of(kind, shape, data).items()})

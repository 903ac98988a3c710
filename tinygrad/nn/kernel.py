"""What every kernel is made of: launching it, and what it asks of a weight, a norm and a rotation."""
from __future__ import annotations
from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import Any, Callable, Protocol, Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.nn.intrinsics import opaque_zero
from tinygrad.renderer import Estimates
from tinygrad.uop.ops import KernelInfo, Ops

UNIT = 32                          # weights
SLOTS = 4  # places in shared memory of a part; a caller's own begin behind those of all parts it has
LOG2_E = 1.4426950408889634

@dataclass(frozen=True)
class Unit:
  """32 weights of a row in a kernel's registers: weight = scale · value + minimum. Codes come four to a word, byte by byte; a value is
  code - zero. Where `floats` are given they are the values, and words are empty."""
  words: list[UOp]
  scales: list[tuple[UOp, UOp|None]]   # of the whole unit or of each half
  zero: int = 0
  floats: list[UOp]|None = None

  def value(self, i:int) -> UOp:
    if self.floats is not None: return self.floats[i]
    return (((self.words[i // 4] >> (8 * (i % 4))) & 255) | 0x4b000000).bitcast(dtypes.float) - float((1 << 23) + self.zero)
  def registers(self) -> list[UOp]: return [*self.words, *(self.floats or ()), *(y for pair in self.scales for y in pair if y is not None)]

# (row, unit, gate or None) -> Unit; nothing is loaded where the gate is false
Matrix = Callable[[UOp, UOp, UOp|None], Unit]
class Weight(Protocol):
  """What a primitive needs of a quantized matrix (apps/quantized.py)"""
  shape: tuple[int, ...]
  integer: bool
  label: str
  nbytes: int
  widths: tuple[int, ...]
  zero: int
  def scales(self, plane:Callable[[str, Any], Any], row:Any, unit:Any) -> list[tuple[Any, Any]]: ...
  def __call__(self, x:Tensor, sel:Tensor|None=None) -> Tensor: ...
  def args(self, name:str) -> dict[str, Tensor]: ...
  def matrix(self, buffers:dict[str, UOp], name:str) -> Matrix: ...

class Norm(Protocol):
  weight: Tensor
  eps: float
  def __call__(self, x:Tensor) -> Tensor: ...

class Rope(Protocol):
  """The rotation of the tokens at hand (apps/rope.py)"""
  table: Tensor
  pos: UOp|int|Tensor
  head: int
  nope: int
  def rotate(self, x:Tensor) -> Tensor: ...
  def rotate_heads(self, q:Tensor) -> Tensor: ...

def add(a:UOp|None, b:UOp) -> UOp: return b if a is None else a + b
def exp(x:UOp) -> UOp: return (x * LOG2_E).exp2()
def silu(x:UOp) -> UOp: return x / (1 + exp(-x))
def total(values:list[UOp], op:Callable[[UOp, UOp], UOp]) -> UOp:
  while len(values) > 1: values = [op(*values[i:i+2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]  # short chains
  return values[0]

def load4(buffer:UOp, offset:UOp|int=0) -> Callable[[UOp], list[UOp]]: return lambda k: [buffer[offset + k * 4 + j].load() for j in range(4)]

def empty(like:Tensor, *shape:int, dtype:DType=dtypes.float) -> Tensor:
  """Memory that a launch will write, on the device of `like`"""
  return Tensor.empty(*shape, dtype=dtype, device=like.device)

def local(size:int, dtype:DType, slot:int) -> UOp: return UOp.placeholder((size,), dtype, slot=slot, addrspace=AddrSpace.LOCAL)

def branch(number:int, condition:UOp) -> tuple[UOp, UOp]:
  """A loop that runs once where condition holds, else never, and a zero: what indices with it load or store happens inside. The end of
  the branch is `.end(loop)` of what it stores."""
  # the compiler of the GPU's language sees that both texts are what they are; tinygrad, which would fold a loop of at most one turn, does not
  turns = UOp(Ops.CUSTOM, dtypes.int, src=(condition.where(UOp.const(1, dtypes.int), 0),), arg="{0}")
  loop = UOp.range(turns.cast(dtypes.weakint), number)
  return loop, opaque_zero("0", loop.cast(dtypes.int))

def rotated(buffers:dict[str, UOp], half:int, at:UOp, pair:Sequence[UOp], turned:UOp, token:UOp|int=0) -> list[UOp]:
  """Numbers `at` and `at + 1` of a rotated part of `half` pairs after RoPE where `turned` is true, and as they are elsewhere. token: from pos on"""
  index = ((buffers["pos"][0].load().cast(dtypes.weakint) + token) * half + at // 2) * 2
  cos, sin = (buffers["rope"][(index + i).valid(turned)].load() for i in range(2))
  a, b = pair
  return [turned.where(a * cos - b * sin, a), turned.where(a * sin + b * cos, b)]

def fingerprint(x:Any) -> Any:
  """What a kernel's body depends on, as a key: a function is its code and what it closes over, a tensor its shape and dtype, an object its
  fields"""
  if isinstance(x, Tensor): return x.shape, x.dtype
  if isinstance(x, FunctionType): return x.__code__, x.__defaults__, *(fingerprint(cell.cell_contents) for cell in x.__closure__ or ())
  if isinstance(x, (tuple, list)): return tuple(map(fingerprint, x))
  if isinstance(x, dict): return tuple((key, fingerprint(value)) for key, value in x.items())
  return x if isinstance(x, (UOp, Enum)) or not hasattr(x, "__dict__") else (type(x), fingerprint(vars(x)))

_programs:dict[Any, UOp] = {}   # a model's blocks launch the same few kernels again and again: each is put together once
def launch(name:str, outs:dict[str, Tensor], ins:dict[str, Tensor], body:Callable[[dict[str, UOp]], list[UOp]], mem:int|None=None) -> list[Tensor]:
  """Runs a kernel of the given stores: body gets the flat buffers by name, and is called once for all launches with its fingerprint. mem: bytes it
  moves, where the renderer cannot count them. Returns the outs, written."""
  names, tensors = [*outs, *ins], [t.flatten() for t in (*outs.values(), *ins.values())]
  def fxn(*buffers:UOp) -> UOp:
    key = name, mem, buffers, tuple(names), fingerprint(body)
    if key not in _programs:
      info = KernelInfo(name=name, opts_to_apply=(), estimates=None if mem is None else Estimates(0, mem, mem))
      stores = body(dict(zip(names, (b.flatten() for b in buffers))))
      _programs[key] = UOp.group(*stores).sink(arg=info).rtag(1)  # tagged: scheduled already
    return _programs[key]
  written = tensors[0].custom_kernel(*tensors[1:], fxn=fxn)
  return [w.reshape(t.shape) for w, t in zip(written, outs.values())]


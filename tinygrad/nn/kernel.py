"""What every kernel is made of: how it is launched, and what it asks of a weight, a norm and a rotation (which are in
apps/quantized.py, mla.py and rope.py).

The words of all kernel files. Weights:
  row            one output's weights; a stack's rows are numbered through. In attention, a position's row of the cache
  segment        a stretch of a row whose weights lie in one matrix; most rows have one
  unit           32 neighbouring weights of a row; weight = scale · value + minimum
  code           a weight as the file has it, an unsigned number; value = code - zero, or an entry of a table
  scale, minimum one of each a unit, or one for each half; many formats have no minimum
  plane          one field of all blocks of a matrix, a tensor whose last axis runs along the row
  block          of threads; in quantized.py a GGUF block of weights, in mla.py a transformer block
Work:
  target         a GPU's row in intrinsics.TARGETS: its shuffles, dot4, mma; None: there are no kernels for it
  body           a function of a launch's flat buffers by name -> its stores; it builds UOps, once for each kernel
  launch         a run of a kernel; part: some of its blocks, with a layout of threads of their own; item: what gidx1 numbers (a head, a token)
  job            a few rows times a vector; team: the lanes that do a job; span: how many they are
  lane           a thread of a warp (a simdgroup); lanes exchange values without shared memory
  slot           the number of a buffer in shared memory; each buffer of a kernel has its own
  float4         four neighbouring float32 of a vector; load4(number) loads one
  wait_zero      a 0 that tinygrad cannot fold, known behind the wait for other kernels (intrinsics.pdl_wait). A load at index + wait_zero comes
                 behind the wait: it is needed for whatever an earlier kernel of the step wrote
  stage          to bring a vector into shared memory, as float32 or int8
  epilogue       what becomes of a finished sum: rotation, activation, residual, store
"""
from __future__ import annotations
import operator
from dataclasses import dataclass, replace
from enum import Enum
from functools import reduce
from types import FunctionType
from typing import Any, Callable, Iterable, Protocol, Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.helpers import prod
from tinygrad.nn.intrinsics import Target, byte_perm, group_sum, in_one_instruction, look_up, opaque_zero, pdl_wait, target_of, word
from tinygrad.nn.primitive import as_written
from tinygrad.nn.step import Step
from tinygrad.renderer import Estimates
from tinygrad.uop.ops import KernelInfo, Ops

UNIT = 32    # weights
SPREAD = 8   # units of floats that are spread, see spread_quads
SLOTS = 5    # of a part of a matrix-vector launch; a caller's own begin behind those of all its parts
WAITED, LEFT = 99, 98   # the numbers of registers, see behind_wait and break_if
LOG2_E = 1.4426950408889634
MULTIPROCESSORS = 132   # of a large GPU
REGISTER_BYTES, ROOMY = 4 * 65536, 4 * 128   # of a multiprocessor's registers; of a thread's that has many
REGISTERS_80 = 768              # threads of a multiprocessor that have 80 registers each
LEAST_REGISTERS, MOST_REGISTERS = 80, 255   # of a thread that is to leave room; that it can have

# ---- weights ----

@dataclass(frozen=True)
class Unit:
  """32 weights of a row in a lane's registers: weight = scale · value + minimum, float32.
  words: eight uint32 of four codes each, byte by byte; a value is code - zero. floats: 32 values, where words is empty.
  bits: of a code.
  nibbles: where codes have 4 bits, four uint32 as they lie in memory: words 2j and 2j+1 are the low and the high nibbles of the bytes of number j.
  scales: (scale, minimum or None) of the whole unit, or of each half."""
  words: list[UOp]
  scales: list[tuple[UOp, UOp|None]]
  zero: int = 0
  floats: list[UOp]|None = None
  nibbles: list[UOp]|None = None
  bits: int = 8

  def value(self, i:int) -> UOp:
    if self.floats is not None: return self.floats[i]
    # a code set into the mantissa of 2^23 is the float 2^23 + code: no conversion
    return (((self.words[i // 4] >> (8 * (i % 4))) & 255) | 0x4b000000).bitcast(dtypes.float) - float((1 << 23) + self.zero)
  def weights(self) -> list[UOp]:
    """The unit dequantized"""
    def weight(i:int) -> UOp:
      scale, minimum = self.scales[i * len(self.scales) // UNIT]
      scaled = self.value(i) * scale
      return scaled if minimum is None else scaled + minimum
    return [weight(i) for i in range(UNIT)]
  def where(self, inside:UOp) -> Unit:
    """The unit, or zeros"""
    def gate(x:UOp|None) -> UOp|None: return None if x is None else inside.where(x, 0)
    scales, floats = [(gate(scale), gate(minimum)) for scale, minimum in self.scales], self.floats and [gate(x) for x in self.floats]
    return replace(self, scales=scales, floats=floats)
  def registers(self) -> list[UOp]:
    return [*self.words, *(self.floats or ()), *(number for pair in self.scales for number in pair if number is not None)]

def table_codes(target:Target, words:list[UOp], nibbles:list[UOp]|None, values:tuple[int, ...]) -> tuple[list[UOp], int]:
  """A unit's codes -> what a table of 8 or 16 int8 values has for them as codes of their own, and their zero. words, nibbles: as Unit has them"""
  zero = -min(values) if max(values) - min(values) < 128 else 128   # int8 as they are, but for the sign bit
  table = [word(sum((value + zero) << (8 * i) for i, value in enumerate(values[first:first + 4]))) for first in range(0, len(values), 4)]
  if nibbles is None:
    pairs = [codes | (codes >> 4) for codes in words]   # two digits in every other byte
    return [look_up(target, table, byte_perm(target, pair, pair, 0x2020)) for pair in pairs], zero
  halves = [(look_up(target, table, codes), look_up(target, table, codes >> 16)) for codes in nibbles]
  return [byte_perm(target, *pair, digits) for pair in halves for digits in (0x6420, 0x7531)], zero

Matrix = Callable[[UOp, UOp, UOp|None], Unit]   # (row, unit, gate) -> Unit; nothing is loaded where the gate is false; None: no gate

class Weight(Protocol):
  """A quantized matrix, or a stack of them (apps/quantized.py)"""
  shape: tuple[int, ...]       # (…, out, in)
  device: str                  # that its planes are on
  integer: bool                # whether an int8 dot product can take the codes
  looks_up: bool               # whether values stand in a table
  label: str                   # its format and shape, for a kernel's name
  nbytes: int
  widths: tuple[int, ...]      # bits of each code plane, the low bits first
  fields: int                  # that a block has: planes of codes, of scales, of minimums
  piece: int                   # numbers of 16 bytes of a row's floats that can be spread, see spread_quads; 0: there are none
  zero: int                    # value = code - zero
  def scales(self, plane:Callable[[str, Any], Any], row:Any, unit:Any) -> list[tuple[Any, Any]]:
    """(scale, minimum or None) of a unit, or of each half. plane(name, index) is an entry of a flat plane, of any type with a number's operators."""
  def __getitem__(self, index:Tensor) -> Weight:
    """The rows, or the matrices of a stack, that an integer tensor names; nothing is read until the result is"""
  def dequantize(self) -> Tensor:
    """float32, of the weight's shape"""
  def args(self, name:str) -> dict[str, Tensor]:
    """The planes as a launch's inputs"""
  def matrix(self, buffers:dict[str, UOp], name:str, spread:bool=False) -> Matrix:
    """The matrix in a kernel that was launched with args(name). spread: its units are those of spread_quads"""

class Norm(Protocol):
  """RMSNorm: x · weight / sqrt(mean(x²) + eps), over the last axis"""
  weight: Tensor               # float32 (D,)
  eps: float
  def __call__(self, x:Tensor) -> Tensor:
    """float32 (…, D) -> float32 (…, D)"""

class Rope(Protocol):
  """The rotation of a vector's heads, pair by neighbouring pair (apps/rope.py). The numbers of a head from `nope` on are rotated."""
  table: Tensor                # float32 (positions, R/2, 2): cos and sin of each pair's angle
  head: int                    # numbers of a head
  nope: int
  @property
  def of_queries(self) -> Rope:
    """What rotates a query's heads; `table` is what rotates keys"""
  def rotate(self, x:Tensor, step:Step) -> Tensor:
    """(T, …, R) of the step's tokens -> the same shape"""
  def rotate_heads(self, q:Tensor, step:Step) -> Tensor:
    """(T, H·head) of the step's tokens -> the same shape"""

def words_of_unit(weight:Weight) -> float:
  """Registers of a lane for a unit as it lies in memory"""
  return weight.nbytes * UNIT / (4 * prod(weight.shape))

# ---- arithmetic ----

def sum_in_order(values:Iterable[UOp]) -> UOp: return reduce(operator.add, values)
def exp(x:UOp) -> UOp: return (x * LOG2_E).exp2()
def as_it_is(value:UOp) -> UOp:
  """A value whose factors tinygrad does not put in order together with those of a product: kernels that make the product another way round alike"""
  return UOp(Ops.CUSTOM, value.dtype, src=(value,), arg="({0})")
def silu(x:UOp) -> UOp: return x / (1 + exp(-x))
def ordered(x:Any) -> Any:
  """float32 -> uint32 in the same order, of a tensor or a UOp"""
  bits = x.bitcast(dtypes.uint32)
  return (bits >> 31).eq(1).where(bits ^ 0xffffffff, bits | 0x80000000)
def total(values:list[UOp], op:Callable[[UOp, UOp], UOp]) -> UOp:
  """op as a balanced binary tree, in a fixed order"""
  while len(values) > 1: values = [op(*values[i:i+2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
  return values[0]

# ---- memory ----

Load4 = Callable[[UOp], list[UOp]]   # number of a float4 -> its four values

def load4(buffer:UOp, offset:UOp|int=0) -> Load4: return lambda number: [buffer[offset + number * 4 + i].load() for i in range(4)]

def spread_quads(unit:UOp, piece:int) -> list[UOp]:
  """The numbers of a unit's eight float4. piece: where floats are spread; 0: neighbours. A sum does not ask which 32 numbers are a unit, if weights
  and vector agree: of SPREAD neighbouring units each has every SPREADth piece, and lanes that have a unit each read neighbouring 16 bytes. A row has
  whole SPREADs."""
  if piece == 0: return [unit * (UNIT // 4) + quad for quad in range(UNIT // 4)]
  quads, first = piece // 4, unit // SPREAD * (SPREAD * UNIT // 4)
  return [first + (i * SPREAD + unit % SPREAD) * quads + quad for i in range(UNIT // piece) for quad in range(quads)]

def safe_index(index:UOp, inside:UOp|None) -> UOp:
  """The index where `inside` is true, else 0: an address there is, for a load whose value is not used. None: always inside."""
  return index if inside is None else inside.where(index, 0)

def empty(like:Tensor, *shape:int, dtype:DType=dtypes.float) -> Tensor:
  """Memory that a launch will write, on the device of `like`"""
  return Tensor.empty(*shape, dtype=dtype, device=like.device)

def optional(**buffers:Tensor|None) -> dict[str, Tensor]:
  """A launch's inputs, those that there are"""
  return {name: buffer for name, buffer in buffers.items() if buffer is not None}

def gated(index:UOp, *conditions:UOp|None) -> UOp:
  """The index where all conditions hold. None: a condition that always does"""
  checked = [condition for condition in conditions if condition is not None]
  return index.valid(reduce(UOp.bitwise_and, checked)) if checked else index

def behind_wait(target:Target, buffers:dict[str, UOp], *loads:UOp) -> dict[str, UOp]:
  """The buffers, whose loads come behind the wait for the kernels before, which comes behind `loads`. An index with wait_zero would have all of these
  for sources, and tinygrad simplifies each index again and again."""
  if target.wait is None: return buffers
  waited = UOp.placeholder((1,), dtypes.int, slot=WAITED, addrspace=AddrSpace.REG)[0].store(pdl_wait(target, *loads).cast(dtypes.int))
  return {name: buffer.after(waited) for name, buffer in buffers.items()}

def local(size:int, dtype:DType, slot:int) -> UOp: return UOp.placeholder((size,), dtype, slot=slot, addrspace=AddrSpace.LOCAL)

# ---- threads ----

class BlockSum:
  """The float32 sum of a value over a block's threads, a multiple of a warp. `store` writes each warp's sum to shared memory. Behind a barrier
  that follows it, warp_sums(barrier) are the addends, in every thread."""
  def __init__(self, target:Target, value:UOp, thread:UOp, threads:int, slot:int):
    self.warps = threads // target.lanes
    self.shared = local(self.warps, dtypes.float, slot)
    warp, lane = thread // target.lanes, thread % target.lanes
    self.store = self.shared[warp.valid(lane.eq(0))].store(group_sum(target, value, target.lanes))
  def warp_sums(self, barrier:UOp) -> list[UOp]:
    shared = self.shared.after(barrier)
    return [shared[warp].load() for warp in range(self.warps)]

def block_sum(target:Target, value:UOp, thread:UOp, threads:int, slot:int, combine:Callable[[list[UOp]], UOp]=sum_in_order) -> UOp:
  """The float32 sum of a value over a block's threads, in every thread. It takes a barrier; combine adds up what the warps have."""
  warps = BlockSum(target, value, thread, threads, slot)
  return combine(warps.warp_sums(UOp(Ops.BARRIER, src=(warps.store,))))

def branch(number:int, condition:UOp, turns:int=1) -> tuple[UOp, UOp]:
  """(loop, zero): a loop that runs once, or `turns` times, where the condition holds, else never. What loads or stores at an index with the zero is
  inside. The branch ends with `.end(loop)` of its stores. number: its own in the kernel."""
  # the compiler of the GPU's language sees that both texts are what they are; tinygrad, which would fold a loop of at most one turn, does not
  count = UOp(Ops.CUSTOM, dtypes.int, src=(condition.where(UOp.const(turns, dtypes.int), 0),), arg="{0}")
  loop = UOp.range(count.cast(dtypes.weakint), number)
  return loop, opaque_zero("0", loop.cast(dtypes.int))

def break_if(condition:UOp, stores:UOp) -> UOp:
  """Behind the stores of a loop's turn, in place of them: leaves the innermost loop where the condition holds"""
  kept = UOp.placeholder((1,), dtypes.bool, slot=LEFT, addrspace=AddrSpace.REG)
  kept = kept.after(kept[0].store(condition), stores)
  return kept[0].store(UOp(Ops.CUSTOM, dtypes.bool, src=(kept[0].load(),), arg="{0}; if ({0}) break"))

def position_of(buffers:dict[str, UOp], sequence:UOp|int=0) -> UOp:
  """The position of a sequence's first token in the step, of the buffer start. It is loaded before the wait: `next_token`, which moves it on, comes
  behind all other kernels of a step, and the next step behind it."""
  return buffers["start"][sequence].load().cast(dtypes.weakint)

def position_of_token(buffers:dict[str, UOp], token:UOp|int, sequences:int, each:int) -> UOp:
  """The position of a token of a step that has `each` neighbouring ones of so many sequences"""
  return position_of(buffers) + token if sequences == 1 else position_of(buffers, token // each) + token % each

def rotated(buffers:dict[str, UOp], pairs:int, number:UOp, pair:Sequence[UOp], inside:UOp, position:UOp) -> list[UOp]:
  """RoPE of the numbers `number` and `number + 1` of a head's rotated part, which is so many pairs. Where `inside` is false the pair stays as it
  is. position: the token's."""
  index = (position * pairs + number // 2) * 2
  cos, sin = (buffers["rope"][(index + i).valid(inside)].load() for i in range(2))
  first, second = pair
  return [inside.where(first * cos - second * sin, first), inside.where(first * sin + second * cos, second)]

# ---- launching ----

def fingerprint(part:Any) -> Any:
  """What a kernel's body depends on, as a key: a function is its code and what it closes over, a tensor its shape and dtype, an object its
  fields"""
  if isinstance(part, Tensor): return part.shape, part.dtype
  if isinstance(part, FunctionType): return part.__code__, part.__defaults__, *(fingerprint(cell.cell_contents) for cell in part.__closure__ or ())
  if isinstance(part, (tuple, list)): return tuple(map(fingerprint, part))
  if isinstance(part, dict): return tuple((key, fingerprint(value)) for key, value in part.items())
  return part if isinstance(part, (UOp, Enum)) or not hasattr(part, "__dict__") else (type(part), fingerprint(vars(part)))

def blocks_at_once(target:Target|None, stores:list[UOp], resident:int, registers:int=0, room:int=0) -> list[UOp]:
  """What a launch with these stores says to its compiler: how many of its blocks a multiprocessor has at once, where those are all, or all that its
  shared memory holds, and it is one block or each thread has 128 registers, twice what its arrays take. resident: threads of a larger launch that a
  multiprocessor may hold: its blocks are to run in as few waves as that makes, and as few at once as make so many. registers: of a thread of a
  larger launch, whose blocks make room one by one: as many at once as have these. room: the registers of another launch's block, which these are
  to leave, where they are all at once and it does not leave them too few."""
  if target is None or target.at_once is None: return []
  nodes = UOp.sink(*stores).toposort()
  sizes = {node.arg: node.vmax + 1 for node in nodes if node.op is Ops.SPECIAL}
  blocks, threads = (prod(size for name, size in sizes.items() if name[0] == kind) for kind in "gl")
  arrays, shared = (sum(node.max_numel() * node.dtype.itemsize for node in nodes if node.op is Ops.BUFFER and node.addrspace is space)
                    for space in (AddrSpace.REG, AddrSpace.LOCAL))
  each = -(-blocks // MULTIPROCESSORS)
  held = min(each, target.most_shared_bytes // shared) if shared else each
  if held > 1 and held * threads * max(ROOMY, 2 * arrays) > REGISTER_BYTES:
    if registers: held = min(held, max(REGISTER_BYTES // (4 * threads * registers), 1))
    elif not resident: return []
    else: held = -(-each // -(-each * threads // resident))
  own = (REGISTER_BYTES // 4 - room) // (held * threads) // 8 * 8
  said = f", of {own} registers" if room and held == each and LEAST_REGISTERS <= own <= MOST_REGISTERS else ""
  return [UOp(Ops.CUSTOM, dtypes.void, arg=target.at_once.format(n=held) + said)]

_programs:dict[Any, UOp] = {}   # a model's blocks launch the same few kernels again and again: each is put together once

def launch(name:str, outs:dict[str, Tensor], ins:dict[str, Tensor], body:Callable[[dict[str, UOp]], list[UOp]], mem:int|None=None,
           resident:int=0, registers:int=0, room:int=0) -> list[Tensor]:
  """Runs a kernel: body(flat buffers by name) -> its stores. Launches of the same name and fingerprint of body share one kernel of a target.
  mem: bytes moved, where the renderer cannot count them. resident, registers, room: see blocks_at_once. Returns the outs, written."""
  names, tensors = [*outs, *ins], [tensor.flatten() for tensor in (*outs.values(), *ins.values())]
  target = target_of(tensors[0].device)
  def put_together(*buffers:UOp) -> UOp:
    key = name, mem, resident, registers, room, target, as_written(), buffers, tuple(names), fingerprint(body)
    if key not in _programs:
      info = KernelInfo(name=name, opts_to_apply=(), estimates=None if mem is None else Estimates(0, mem, mem))
      stores = body(dict(zip(names, (buffer.flatten() for buffer in buffers))))
      if target is not None: stores = in_one_instruction(target, stores)
      said = blocks_at_once(target, stores, resident, registers, room)
      if target is not None and target.as_written and as_written(): said.append(UOp(Ops.CUSTOM, dtypes.void, arg=target.as_written))
      _programs[key] = UOp.group(*stores).sink(*said, arg=info).rtag(1)  # tagged: scheduled already
    return _programs[key]
  written = tensors[0].custom_kernel(*tensors[1:], fxn=put_together)
  return [buffer.reshape(out.shape) for buffer, out in zip(written, outs.values())]

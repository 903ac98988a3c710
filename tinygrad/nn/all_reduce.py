"""The sum of what several devices have, on each of them.

Where devices reach each other's memory it takes one launch a device: of a few numbers, four a thread of it at most, each adds up all (one-shot
all-reduce), of many, a prompt's or those of a step of many answers, each a share (two-shot), always in the devices' order:

  decode    own numbers, each with the number of this sum in the same word of 64 bits -> every other device
            a thread waits for words with that number: one way between the devices, no barrier, no fence
  prefill   own numbers -> the devices that add them up, each its share; behind a fence the number of this sum, a word a block
            a block waits for the words of the others' same block, adds up, and gives the sums of its share to all in the same way

Of a few a device is at most one sum ahead of another, as each waits for all others' parts, so two places for each suffice. Of many it gives its
part of the next sum when all have read those of this one, and the sums of its share when all have read the ones before.
The kernels of all devices must be able to run at once: a step is one graph (apps/capture.py, first_batch).
"""
from __future__ import annotations
from dataclasses import dataclass
from functools import reduce
from typing import Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import prod
from tinygrad.nn.intrinsics import Target, pdl_wait, peer_await, peer_receive, peer_send, peer_store, peer_tell, target_of
from tinygrad.nn.kernel import empty, launch, load4
from tinygrad.nn.primitive import primitive
from tinygrad.uop.ops import Ops

THREADS, BLOCKS = 256, 64
FEW = 4 * THREADS * BLOCKS   # numbers at most, of which each device adds up all
LINE = 8   # words of four numbers with their tags
MANY_THREADS = 1024   # of a block of a sum of many; each has a line of four numbers for every device

@dataclass(frozen=True)
class Room:
  """Memory in which devices leave each other numbers. most: of a device's numbers in a sum. memories: on each device uint32, zeros at first; peers:
  on each device uint64 (devices,), the addresses of all memories"""
  most: int
  memories: list[Tensor]
  peers: list[Tensor]
  @property
  def devices(self) -> int: return len(self.memories)

class Few(Room):
  """Of each block how many sums it has been through; then two places for `most` numbers of each device, in lines of four with their tags"""
  @staticmethod
  def words(devices:int, most:int) -> int: return BLOCKS + 2 * devices * most * 2
  def line(self, parity:UOp, device:int) -> UOp:
    """The number of the first line that a device leaves in a place"""
    return BLOCKS // LINE + (parity * self.devices + device) * (self.most // 4)

class Many(Room):
  """Of each block how many sums; of both rounds and each device a word a block; of rounds and devices a line of 16 bytes a thread"""
  @staticmethod
  def blocks(devices:int, most:int) -> int:
    """So many that their words are whole lines"""
    return -(-most // (4 * MANY_THREADS * devices) // 4) * 4
  @staticmethod
  def words(devices:int, most:int) -> int: return Many.blocks(devices, most) * (1 + 2 * devices * (1 + MANY_THREADS * 4))
  def word(self, turn:int, device:int) -> int:
    """The number of the first word that tells of a device's numbers"""
    return self.blocks(self.devices, self.most) * (1 + turn * self.devices + device)
  def line(self, turn:int, device:int) -> int:
    """The number of the first line that a device leaves"""
    blocks = self.blocks(self.devices, self.most)
    return blocks * (1 + 2 * self.devices) // 4 + (turn * self.devices + device) * (blocks * MANY_THREADS)

@dataclass(frozen=True)
class Exchange:
  """Room for sums of a few numbers, at most FEW, and of many"""
  few: Few
  many: Many

@primitive(outputs=lambda parts, exchange: [empty(part, *part.shape) for part in parts])
def all_reduce(parts:Sequence[Tensor], exchange:Exchange|None=None) -> list[Tensor]:
  """parts: one a device, float32 of the same shape -> their sum on each of these devices. Every device adds up all parts in the same order, and so
  has the same bytes as the others."""
  return [reduce(Tensor.add, (part.to(own.device) for part in parts)).contiguous() for own in parts]

def target_with(room:Room|None, parts:Sequence[Tensor]) -> Target|None:
  """The target whose devices exchange such parts there"""
  return None if room is None or (size := prod(parts[0].shape)) > room.most or size % 4 else target_of(parts[0].device)

def behind_barrier(slot:int, before:Sequence[UOp]) -> UOp:
  """A zero, uint32, known behind a barrier of the block's threads that comes behind these"""
  zeros = UOp.placeholder((1,), dtypes.uint32, slot=slot, addrspace=AddrSpace.REG)
  return zeros.after(UOp(Ops.BARRIER, src=(zeros[0].store(reduce(UOp.bitwise_or, before)),)))[0].load()

# ---- of a few numbers ----

@all_reduce.form("decode", takes=lambda parts, exchange: target_with(exchange and exchange.few, parts))
def all_reduce_few(parts:Sequence[Tensor], exchange:Exchange) -> list[Tensor]:
  target, room, size, devices = target_of(parts[0].device), exchange.few, prod(parts[0].shape), len(parts)
  assert target is not None
  def of_device(own:int) -> Tensor:
    def body(buffers:dict[str, UOp]) -> list[UOp]:
      block, thread = UOp.special(-(-size // (4 * THREADS)), "gidx0"), UOp.special(THREADS, "lidx0")
      memory, peers, wait_zero = buffers["memory"], buffers["peers"], pdl_wait(target)
      tag = memory[block + wait_zero].load() + 1   # the number of this sum
      parity = (tag & 1).cast(dtypes.weakint)
      # a block has the same numbers of a vector of any size. Past the end it has the last ones once more, which changes nothing
      index = (block * THREADS + thread).minimum(size // 4 - 1)
      four = load4(buffers["part"], wait_zero * 4)(index)
      sent = [peer_send(target, peers[device].load(), room.line(parity, own) + index, four, tag) for device in range(devices) if device != own]
      zero = (behind_barrier(0, sent) & 1).cast(dtypes.weakint)   # all threads have read the tag
      addends = [four if device == own else received(target, memory[(room.line(parity, device) + index) * LINE + zero], tag, slot=1 + device)
                 for device in range(devices)]
      return [memory[(block + zero).valid(thread.eq(0))].store(tag),
              *(buffers["y"][index * 4 + i].store(reduce(UOp.__add__, each)) for i, each in enumerate(zip(*addends)))]
    ins = {"part": parts[own], "memory": room.memories[own], "peers": room.peers[own]}
    return launch(f"all_reduce_{size}_{own}_of_{devices}", {"y": empty(parts[own], *parts[own].shape)}, ins, body, size * 4 * (2 * devices))[0]
  return [of_device(own) for own in range(devices)]

def received(target:Target, place:UOp, tag:UOp, slot:int) -> list[UOp]:
  registers = UOp.placeholder((5,), dtypes.float, slot=slot, addrspace=AddrSpace.REG)
  done = registers[4].store(peer_receive(target, place, [registers[i] for i in range(4)], tag).cast(dtypes.float))
  return [registers.after(done)[i].load() for i in range(4)]

# ---- of many numbers ----

@all_reduce.form("prefill", takes=lambda parts, exchange: target_with(exchange and exchange.many, parts))
def all_reduce_many(parts:Sequence[Tensor], exchange:Exchange) -> list[Tensor]:
  target, room, size, devices = target_of(parts[0].device), exchange.many, prod(parts[0].shape), len(parts)
  assert target is not None
  lines = size // 4
  def of_device(own:int) -> Tensor:
    others = [device for device in range(devices) if device != own]
    def body(buffers:dict[str, UOp]) -> list[UOp]:
      block, thread, memory = UOp.special(-(-lines // (MANY_THREADS * devices)), "gidx0"), UOp.special(MANY_THREADS, "lidx0"), buffers["memory"]
      peers = {device: buffers["peers"][device].load() for device in others}
      wait_zero, is_first, place = pdl_wait(target), thread.eq(0), block * MANY_THREADS + thread
      tag = memory[block + wait_zero].load() + 1   # the number of this sum
      def exchanged(turn:int, fours:list[list[UOp]]) -> tuple[list[list[UOp]], UOp]:
        """Gives each device its four numbers -> what each has given, and a zero, known then"""
        stored = behind_barrier(turn * 2, [peer_store(target, peers[device], room.line(turn, own) + place, fours[device]) for device in others])
        told = [peer_tell(target, peers[device], room.word(turn, own) + block, tag | stored, is_first) for device in others]
        told = [peer_await(target, memory[room.word(turn, device) + block], tag | reduce(UOp.bitwise_or, told), is_first)
                for device in others]
        zero = (behind_barrier(turn * 2 + 1, told) & 1).cast(dtypes.weakint)
        def given(device:int) -> list[UOp]:
          return [word.bitcast(dtypes.float) for word in load4(memory, zero * 4)(room.line(turn, device) + place)]
        return [fours[own] if device == own else given(device) for device in range(devices)], zero
      # a line for each device to add up; past the end any, whose sum is not kept
      numbers = [block * (MANY_THREADS * devices) + device * MANY_THREADS + thread for device in range(devices)]
      values = [load4(buffers["part"], wait_zero * 4)(number.minimum(lines - 1)) for number in numbers]
      addends, _ = exchanged(0, values)
      totals, zero = exchanged(1, [[reduce(UOp.__add__, each) for each in zip(*addends)]] * devices)
      return [memory[(block + zero).valid(is_first)].store(tag),
              *(buffers["y"][(number * 4 + i).valid(number < lines)].store(value) for number, four in zip(numbers, totals)
                for i, value in enumerate(four))]
    ins = {"part": parts[own], "memory": room.memories[own], "peers": room.peers[own]}
    return launch(f"all_reduce_many_{size}_{own}_of_{devices}", {"y": empty(parts[own], *parts[own].shape)}, ins, body, size * 4 * (2 * devices))[0]
  return [of_device(own) for own in range(devices)]

"""The sum of what several devices have, on each of them.

Where devices reach each other's memory a decode step takes one launch a device (one-shot all-reduce):

  own numbers, each with the number of this sum -> every other device's Exchange      # a thread has a few of them
  wait until those of all others are there, with the number of this sum
  out = sum of all devices' numbers, in their order

A number and its tag are one word of 64 bits, so nothing else tells that it is there: one way between the devices, no barrier, no fence. A device is
at most one sum ahead of another, as each waits for all others' parts, so two places for each suffice.
The kernels of all devices must be able to run at once: a step is one graph (apps/capture.py, first_batch).
"""
from __future__ import annotations
from dataclasses import dataclass
from functools import reduce
from typing import Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import prod
from tinygrad.nn.intrinsics import Target, pdl_wait, peer_receive, peer_send, target_of
from tinygrad.nn.kernel import empty, launch, load4
from tinygrad.nn.primitive import primitive
from tinygrad.uop.ops import Ops

THREADS, BLOCKS = 256, 64
LINE = 8   # words of four numbers with their tags

@dataclass(frozen=True)
class Exchange:
  """Memory in which devices leave each other numbers. memories: on each device uint32 (words(…),), zeros at first: of each block how many sums it
  has been through; then two places for `most` numbers of each device, in lines of four with their tags. peers: on each device uint64 (devices,), the
  addresses of all memories."""
  most: int
  memories: list[Tensor]
  peers: list[Tensor]

  @staticmethod
  def words(devices:int, most:int) -> int: return BLOCKS + 2 * devices * most * 2
  def line(self, parity:UOp, device:int) -> UOp:
    """The number of a place's first line"""
    return BLOCKS // LINE + (parity * len(self.memories) + device) * (self.most // 4)

@primitive(outputs=lambda parts, exchange: [empty(part, *part.shape) for part in parts])
def all_reduce(parts:Sequence[Tensor], exchange:Exchange|None=None) -> list[Tensor]:
  """parts: one a device, float32 of the same shape -> their sum on each of these devices. Every device adds up all parts in the same order, and so
  has the same bytes as the others."""
  return [reduce(Tensor.add, (part.to(own.device) for part in parts)).contiguous() for own in parts]

def exchange_target(parts:Sequence[Tensor], exchange:Exchange|None) -> Target|None:
  """The target whose devices exchange such parts"""
  if exchange is None or (size := prod(parts[0].shape)) > exchange.most or size % 4: return None
  target = target_of(parts[0].device)
  return target if target is not None and target.peer_send is not None else None

@all_reduce.form("decode", takes=exchange_target)
def all_reduce_exchange(parts:Sequence[Tensor], exchange:Exchange) -> list[Tensor]:
  target, size, devices = target_of(parts[0].device), prod(parts[0].shape), len(parts)
  assert target is not None
  blocks = min(-(-size // (4 * THREADS)), BLOCKS)
  turns = -(-size // (4 * THREADS * blocks))
  def of_device(own:int) -> Tensor:
    def body(buffers:dict[str, UOp]) -> list[UOp]:
      block, thread, memory, peers = UOp.special(blocks, "gidx0"), UOp.special(THREADS, "lidx0"), buffers["memory"], buffers["peers"]
      wait_zero, zeros = pdl_wait(target), UOp.placeholder((1,), dtypes.uint32, slot=0, addrspace=AddrSpace.REG)
      tag = memory[block + wait_zero].load() + 1   # the number of this sum
      parity = (tag & 1).cast(dtypes.weakint)
      # a block has the same numbers of a vector of any size. Past the end it has others of its own once more, which changes nothing
      first = (block * THREADS + thread).minimum(size // 4 - 1)
      indices = [first] + [((index := first + turn * BLOCKS * THREADS) < size // 4).where(index, first) for turn in range(1, turns)]
      values = [load4(buffers["part"], wait_zero * 4)(index) for index in indices]
      sent = [peer_send(target, peers[device].load(), exchange.line(parity, own) + index, four, tag)
              for device in range(devices) if device != own for index, four in zip(indices, values)]
      zeros = zeros.after(UOp(Ops.BARRIER, src=(zeros[0].store(reduce(UOp.bitwise_or, sent)),)))   # all threads have read the tag
      zero = (zeros[0].load() & 1).cast(dtypes.weakint)
      stores = [memory[(block + zero).valid(thread.eq(0))].store(tag)]
      for turn, (index, four) in enumerate(zip(indices, values)):
        totals:list[UOp] = []
        for device in range(devices):
          others = four if device == own else received(target, memory[(exchange.line(parity, device) + index) * LINE + zero], tag,
                                                       slot=1 + turn * devices + device)
          totals = [total + value for total, value in zip(totals, others)] if totals else others
        stores += [buffers["y"][index * 4 + i].store(total) for i, total in enumerate(totals)]
      return stores
    ins = {"part": parts[own], "memory": exchange.memories[own], "peers": exchange.peers[own]}
    return launch(f"all_reduce_{size}_{own}_of_{devices}", {"y": empty(parts[own], *parts[own].shape)}, ins, body, size * 4 * (2 * devices))[0]
  return [of_device(own) for own in range(devices)]

def received(target:Target, place:UOp, tag:UOp, slot:int) -> list[UOp]:
  registers = UOp.placeholder((5,), dtypes.float, slot=slot, addrspace=AddrSpace.REG)
  done = registers[4].store(peer_receive(target, place, [registers[i] for i in range(4)], tag).cast(dtypes.float))
  return [registers.after(done)[i].load() for i in range(4)]

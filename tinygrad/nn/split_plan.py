"""Which block of split_kv reads what, when several sequences are decoded together: the plan of a step, made once for all blocks of the model.

The work is cut into items, each some neighbouring steps of one sequence's positions; a step is what a block reads at once. All items but a sequence's
last have the same length, the least for which there are at most as many as planned for: no block has much more to do than another, whatever the
lengths of the sequences. A sequence of more than FEW_SPLITS steps has two in an item at least, as it has alone. So where one is cut depends on the
others where they are long, or many, and with it the order in which its sums are rounded, nothing else. An invariant step's sequences are each cut as
alone, and have as many items as fill the machine, most of which may have no steps.

A plan is int32 (items + S, ROW): of each item [sequence, first position, steps, last position of the sequence], of each sequence [first item, items].
Items behind the last sequence's have no steps. The last number of all is 0: by it a launch may count its blocks (LastBlock in nn/matvec.py).
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import TypeVar
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn.intrinsics import Target, group_sum
from tinygrad.nn.kernel import launch, local
from tinygrad.nn.latent_cache import Pages
from tinygrad.nn.step import Step
from tinygrad.uop.ops import Ops

Number = TypeVar("Number", UOp, Tensor)
ROW = 4   # numbers, of which a sequence's row has two
FEW_SPLITS = 32  # items of a sequence that are combined at once

@dataclass(frozen=True)
class PlanShape:
  """How the work is cut"""
  pages: Pages
  items: int
  positions: int   # of a step
  alone: bool = False   # whether each sequence is cut as it would be without the others

  @staticmethod
  def of(pages:Pages, blocks:int, positions:int, alone:bool=False) -> PlanShape:
    """blocks: what fills the machine once. There are items for two a sequence, and none that would have no step."""
    if alone: return PlanShape(pages, pages.sequences * min(blocks, pages.capacity // positions), positions, True)
    most = pages.sequences * (pages.capacity // positions)
    return PlanShape(pages, min(max(blocks, 2 * pages.sequences), most), positions)

  @property
  def most_items(self) -> int:
    """Of a sequence"""
    return self.items // self.pages.sequences if self.alone else self.items
  @property
  def most_steps(self) -> int:
    """Of a sequence"""
    return self.pages.capacity // self.positions

def plan_size(shape:PlanShape) -> tuple[int, int]: return shape.items + shape.pages.sequences, ROW

def ceildiv(value:UOp, by:UOp) -> UOp: return (value + by - 1) // by
def least_length(steps:Number) -> Number:
  """Steps of an item at least, where its sequence has so many"""
  return 1 + (steps > FEW_SPLITS).cast(steps.dtype)

# ---- making it ----

def plan_ops(shape:PlanShape, step:Step) -> Tensor:
  """The plan in plain ops"""
  start = step.start.maximum(0).minimum(shape.pages.capacity - 1)
  steps, item = start // shape.positions + 1, Tensor.arange(shape.items, dtype=dtypes.int32)
  if shape.alone: length = (steps + shape.most_items - 1) // shape.most_items
  else:
    lengths = Tensor.arange(1, shape.most_steps + 1, dtype=dtypes.int32).unsqueeze(1)
    length = (((steps + lengths - 1) // lengths).sum(1) > shape.items).sum().cast(dtypes.int32) + 1   # the least that needs no more items
  length = length.maximum(least_length(steps))   # of each sequence
  counts = ((steps + length - 1) // length).contiguous()   # not made again where its sums are padded, by a length of 0
  if shape.alone: first_items = Tensor.arange(shape.pages.sequences, dtype=dtypes.int32) * shape.most_items
  else: first_items = counts.cumsum().cast(dtypes.int32) - counts
  sequence = (first_items <= item.unsqueeze(1)).sum(1).cast(dtypes.int32) - 1
  first = (item - first_items[sequence]) * length[sequence]
  rows = sequence.stack(first * shape.positions, (steps[sequence] - first).maximum(0).minimum(length[sequence]), start[sequence], dim=1)
  return rows.cat(first_items.stack(counts, counts * 0, counts * 0, dim=1))

def plan_launch(target:Target, shape:PlanShape, step:Step) -> Tensor:
  """… by a launch of one block, or a block a sequence"""
  def body(buffers:dict[str, UOp]) -> list[UOp]: return (alone_kernel if shape.alone else plan_kernel)(target, shape, buffers)
  plan = Tensor.empty(*plan_size(shape), dtype=dtypes.int32, device=step.start.device)
  return launch(f"split_plan{'_alone' * shape.alone}_{shape.items}_{shape.pages.sequences}", {"plan": plan}, {"start": step.start}, body)[0]

def alone_kernel(target:Target, shape:PlanShape, buffers:dict[str, UOp]) -> list[UOp]:
  """A block's stores: a sequence's items, one a thread"""
  sequence, thread = UOp.special(shape.pages.sequences, "gidx0"), UOp.special(-(-shape.most_items // target.lanes) * target.lanes, "lidx0")
  last = shape.pages.position(buffers, sequence)
  steps = last // shape.positions + 1
  length = ceildiv(steps, UOp.const(shape.most_items)).maximum(least_length(steps))
  first = thread * length
  item_row = sequence, first * shape.positions, (steps - first).maximum(0).minimum(length), last
  sequence_row = sequence * shape.most_items, ceildiv(steps, length), UOp.const(0), UOp.const(0)
  rows = (sequence * shape.most_items + thread, thread < shape.most_items, item_row), (shape.items + sequence, thread.eq(0), sequence_row)
  return [buffers["plan"][(row * ROW + i).valid(inside)].store(value.cast(dtypes.int))
          for row, inside, values in rows for i, value in enumerate(values)]

def plan_kernel(target:Target, shape:PlanShape, buffers:dict[str, UOp]) -> list[UOp]:
  """The block's stores. A thread has an item; every warp finds the length for itself.
    steps = of the lane's sequences
    length = the least for which Σ ceil(steps / length) <= items, bit by bit from the highest; of a sequence least_length at least
    items and steps of each sequence -> shared memory
    the thread's item: the sequence that it falls to, and which of that one's it is; store"""
  lanes, sequences = target.lanes, shape.pages.sequences
  thread = UOp.special(-(-shape.items // lanes) * lanes, "lidx0")
  own = [thread % lanes + first for first in range(0, sequences, lanes)]
  steps = [(sequence < sequences).where(shape.pages.position(buffers, sequence.minimum(sequences - 1)) // shape.positions + 1, 0) for sequence in own]
  def items(length:UOp) -> UOp:
    total = sum((ceildiv(count, length) for count in steps), UOp.const(0))
    return group_sum(target, total.cast(dtypes.int), lanes)
  too_short = UOp.const(0)
  for bit in reversed(range((shape.most_steps - 1).bit_length())):
    longer = too_short + (1 << bit)
    too_short = (items(longer) > shape.items).where(longer, too_short)
  length = too_short + 1
  counts, all_steps = local(len(own) * lanes, dtypes.int, 0), local(len(own) * lanes, dtypes.int, 1)
  stores = [shared[sequence.valid(thread < lanes)].store(value.cast(dtypes.int)) for sequence, count in zip(own, steps)
            for shared, value in ((counts, ceildiv(count, length.maximum(least_length(count)))), (all_steps, count))]
  barrier = UOp(Ops.BARRIER, src=tuple(stores))
  counts, all_steps = counts.after(barrier), all_steps.after(barrier)
  sequence, first_item, items_before, following = UOp.const(0), UOp.const(0), UOp.const(0), UOp.const(0)
  for number in range(sequences):   # following: the first item of the one after
    items_before = (thread.eq(number)).where(following, items_before)
    is_behind = following <= thread
    sequence, first_item = is_behind.where(number, sequence), is_behind.where(following, first_item)
    following = following + counts[number].load().cast(dtypes.weakint)
  steps_of_sequence = all_steps[sequence].load()
  length = length.maximum(least_length(steps_of_sequence))
  first = (thread - first_item) * length
  own_steps = (steps_of_sequence - first).maximum(0).minimum(length)
  item_row = (sequence, first * shape.positions, own_steps, shape.pages.position(buffers, sequence))
  is_sequence = thread < sequences
  sequence_row = (items_before, counts[thread.minimum(len(own) * lanes - 1)].load(), 0, 0)
  stores = [buffers["plan"][(thread * ROW + i).valid(thread < shape.items)].store(value.cast(dtypes.int)) for i, value in enumerate(item_row)]
  for i, value in enumerate(sequence_row):
    number = value if isinstance(value, UOp) else UOp.const(value)
    stores.append(buffers["plan"][((shape.items + thread) * ROW + i).valid(is_sequence)].store(number.cast(dtypes.int)))
  return stores

# ---- reading it. A plan is written before any kernel of the step that waits for others starts, and so is loaded before the wait ----

def _numbers(buffers:dict[str, UOp], row:UOp, count:int) -> list[UOp]:
  # as tinygrad's own indices: behind a cast it no longer sees that four numbers begin at a multiple of four, and loads them one by one
  return [buffers["plan"][row * ROW + i].load().cast(dtypes.weakint) for i in range(count)]

@dataclass(frozen=True)
class Item:
  """What a block of split_kv reads. Without steps, it has nothing to do."""
  sequence: UOp|int
  first: UOp   # position
  steps: UOp
  last: UOp    # position that is written

def item_of(shape:PlanShape, buffers:dict[str, UOp], index:UOp) -> Item:
  sequence, first, steps, last = _numbers(buffers, index, ROW)
  return Item(sequence.maximum(0).minimum(shape.pages.sequences - 1), first.maximum(0).minimum(shape.pages.capacity - 1),
              steps.maximum(0).minimum(shape.most_steps), last.maximum(0).minimum(shape.pages.capacity - 1))

def items_of(shape:PlanShape, buffers:dict[str, UOp], sequence:UOp) -> tuple[UOp, UOp]:
  """(a sequence's first item, how many it has)"""
  first, count = _numbers(buffers, shape.items + sequence, 2)
  return first.maximum(0).minimum(shape.items - 1), count.maximum(0).minimum(shape.items)

"""The online softmax of a step's scores, where tensor cores multiply: scores and weights lie in shared memory, and some lanes share a row of them."""
from __future__ import annotations
from typing import NamedTuple
from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.nn.intrinsics import Target, group_reduce
from tinygrad.nn.kernel import total
from tinygrad.nn.latent_cache import MASKED_SCORE
from tinygrad.nn.matrices import MatrixThread

LANE_POSITIONS = 4   # of a lane

class RowSoftmax(NamedTuple):
  """A step's softmax of a row: the lane's weights, what the row's weighted sums are multiplied with, the stores of its state"""
  row: UOp
  weights: list[UOp]
  rescale: UOp
  stores: list[UOp]

class SoftmaxThread(MatrixThread):
  """… and shares the softmax of a step's scores: row_lanes lanes a row, which is a token of a head, four positions each; `turns` rows a lane"""
  def __init__(self, target:Target, threads:int, rows:int, row_lanes:int):
    super().__init__(target, threads)
    self.row_lanes, self.turns = row_lanes, -(-rows // (threads // row_lanes))

  def lane_position(self) -> UOp:
    """Of a step, the first of the lane's in the softmax"""
    return self.lane % self.row_lanes * LANE_POSITIONS

  def initial_state(self) -> UOp:
    """Registers: row_max, then weight_sum, of the lane's rows. weight_sum is of the lane's positions"""
    state = UOp.placeholder((2 * self.turns,), dtypes.float, slot=2, addrspace=AddrSpace.REG)
    return state.after(UOp.group(*[state[i].store(MASKED_SCORE if i < self.turns else 0.0) for i in range(2 * self.turns)]))

  def online_softmax(self, row:UOp, state:UOp, turn:int, scores:list[UOp], shift:UOp|float=0.0) -> RowSoftmax:
    """Of a turn's row and the lane's scores, in base 2. row_max is that of all lanes of the row. shift: by which weights are made smaller"""
    old, weight_sum = state[turn].load(), state[self.turns + turn]
    row_max = old.maximum(group_reduce(self.target, total(scores, UOp.maximum), self.row_lanes, UOp.maximum))
    top = row_max + shift
    rescale, weights = (old - row_max).exp2(), [(score - top).exp2() for score in scores]
    return RowSoftmax(row, weights, rescale, [state[turn].store(row_max), weight_sum.store(weight_sum.load() * rescale + total(weights, UOp.add))])

  def store_weights(self, softmax:list[RowSoftmax], weights:UOp, rescales:UOp, pitch:int, is_first:UOp) -> list[UOp]:
    """weights, rescales: shared memory, half (rows, pitch) and float32 (rows,). is_first: whether the lane is its row's first"""
    stores:list[UOp] = []
    for of_row in softmax:
      first = of_row.row * pitch + self.lane_position()
      stores += [weights[first + i].store(weight.cast(dtypes.half)) for i, weight in enumerate(of_row.weights)]
      stores.append(rescales[of_row.row.valid(is_first)].store(of_row.rescale))
    return stores

"""What a thread does whose warp takes matrices of halves from shared memory and multiplies them by tensor cores (ldmatrix, mma.m16n8k16)."""
from __future__ import annotations
from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.nn.intrinsics import Target, load_matrices

PIECE = 8   # halves that are copied at once, 16 bytes

def pitch(width:int) -> int:
  """Halves from a row to the next one in shared memory, so that the rows of a matrix begin in other banks"""
  return width + PIECE

class MatrixThread:
  """A lane's place in matrices that it loads: matrix lane // 8, row lane % 8 of it"""
  def __init__(self, target:Target, threads:int):
    assert target.mma is not None
    self.target, self.mma = target, target.mma
    self.thread = UOp.special(threads, "lidx0")
    self.warp, self.lane = self.thread // 32, self.thread % 32
    self.matrix, self.in_matrix = self.lane // 8, self.lane % 8

  def a_place(self, first_row:UOp|int, first_number:UOp|int, pitch:int) -> UOp:
    """The lane's place in the four matrices of a's words, where rows are a's: rows 0 and 8, then numbers 8 and on"""
    return (first_row + self.matrix % 2 * 8 + self.in_matrix) * pitch + first_number + self.matrix // 2 * 8

  def b_place(self, first_row:UOp|int, first_number:UOp|int, pitch:int) -> UOp:
    """The same in those of two products' b, where rows are b's columns: numbers 0 and 8, then rows 8 and on. Of a's, transposed, where rows are its
    inner numbers"""
    return (first_row + self.matrix // 2 * 8 + self.in_matrix) * pitch + first_number + self.matrix % 2 * 8

  def words(self, shared:UOp, place:UOp, registers:UOp, transposed:bool=False) -> list[UOp]:
    """The lane's words of four matrices"""
    own = [registers[i] for i in range(4)]
    done = registers[4].store(load_matrices(self.target, shared[place], own, transposed))
    return [registers.after(done)[i].load() for i in range(4)]

  def registers(self, slot:int, *after:UOp) -> UOp:
    """Of four words, and one that takes the zeros that are stored behind statements"""
    return UOp.placeholder((5,), dtypes.uint32, slot=slot, addrspace=AddrSpace.REG).after(*after)

  def accumulate(self, sums:UOp, first:int, a_words:list[UOp], b_words:list[UOp], done:UOp, inside:UOp|None=None) -> UOp:
    """The store behind products with the same a, whose elements of c lie one after another from the register `first` on. Where `inside`, the same in
    all of a warp's lanes, is false they stay as they are"""
    for i in range(len(b_words) // 2):
      behind = sums.after(done)
      places = [behind[first + i * 4 + element] for element in range(4)]
      done = behind[sums.shape[0] - 1].store(self.mma.accumulate(a_words, b_words[2 * i:2 * i + 2], places, inside))
    return done

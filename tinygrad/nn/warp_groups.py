"""Products of four neighbouring warps, a group, whose tensor cores read what they multiply in shared memory by themselves (wgmma: Hopper).

They run while the warps do other work, until these wait. What one warp multiplies its lanes have read, each warp for itself; a group reads an
operand once for its 64 rows.

A matrix of halves lies in shared memory as such products want it (`place`): 64 numbers of its rows side by side, a panel, then the next 64.
"""
from __future__ import annotations
from typing import NamedTuple
from tinygrad import UOp, dtypes
from tinygrad.nn.intrinsics import Target
from tinygrad.nn.matrices import PIECE
from tinygrad.uop.ops import Ops

WARPS = 4            # of a group
ROWS = 16 * WARPS    # of a group's product
PANEL = 8 * PIECE    # numbers of a row that lie side by side, 128 bytes

def place(rows:int, row:UOp, number:UOp|int) -> UOp:
  """Of a number of a row, in a matrix of so many rows, whole eights. The pieces of a row are in turns by its number, so that those of eight rows lie
  in different banks"""
  return (number // PANEL * rows + row) * PANEL + ((number % PANEL // PIECE) ^ (row % 8)) * PIECE + number % PIECE

def begin(rows:int, row:UOp|int, number:int) -> UOp|int:
  """Where products begin in such a matrix: of whole eight rows, and of whole 16 numbers, as if their pieces were not in turns"""
  return (number // PANEL * rows + row) * PANEL + number % PANEL

class GroupMatrix(NamedTuple):
  """16 numbers of some rows, or transposed all numbers of 16 rows, of a matrix in shared memory, which begins at whole 1024 bytes. first: what
  `begin` says. rows: of the matrix, where it is transposed"""
  first: UOp
  rows: int = 0
  @property
  def transposed(self) -> bool: return self.rows > 0
  @property
  def kind(self) -> int:
    """What a product is told: pieces are in turns; from eight rows to the next; from a panel to the next, where it needs to know"""
    return 1 << 62 | (8 * PANEL * 2 >> 4) << 32 | max(self.rows * PANEL * 2 >> 4, 1) << 16

class GroupProduct(NamedTuple):
  """sums += a·b: 64 rows of a, 16 inner numbers, N columns, which are rows of b or, transposed, its numbers. a: the lane's words of its warp's 16
  rows, as Mma has them, or where all rows are. sums: where the lane's N / 2 are, Mma's c for each eight columns"""
  a: list[UOp]|GroupMatrix
  b: GroupMatrix
  sums: list[UOp]

def multiply(target:Target, products:list[GroupProduct]) -> UOp:
  """Begins products, one after another. Returns a zero, as Mma.accumulate does, known when they have begun"""
  assert target.warp_groups
  src, statements = list[UOp](), ['asm volatile("wgmma.fence.sync.aligned;" ::: "memory");']
  def operand(x:UOp) -> str:
    src.append(x)
    return f"{{{len(src) - 1}}}"
  def matrix(name:str, x:GroupMatrix) -> str:
    return f"const unsigned long long {name} = {x.kind:#x}ull | (unsigned)__cvta_generic_to_shared({operand(x.first)}) >> 4;"
  for a, b, sums in products:
    n, in_lanes = len(sums), not isinstance(a, GroupMatrix)
    matrices = [matrix("b", b), *([] if in_lanes else [matrix("a", a)])]
    outs = ", ".join(f'"+f"(*{operand(x)})' for x in sums)
    ins = [*([f'"r"({operand(x)})' for x in a] if in_lanes else ['"l"(a)']), '"l"(b)']
    def registers(first:int, count:int) -> str: return "{{" + ", ".join(f"%{i}" for i in range(first, first + count)) + "}}"
    operands = [registers(0, n), registers(n, 4) if in_lanes else f"%{n}", f"%{n + len(ins) - 1}", "1, 1, 1", *([] if in_lanes else ["0"])]
    statements.append(f"{{{{ {' '.join(matrices)} "
                      f'asm volatile("wgmma.mma_async.sync.aligned.m64n{2 * n}k16.f32.f16.f16 {", ".join(operands)}, {int(b.transposed)};" : '
                      f'{outs} : {", ".join(ins)}); }}}}')
  statements.append('asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");')
  return UOp(Ops.CUSTOM, dtypes.float, src=tuple(src), arg=f"0.0f; {' '.join(statements)}")

# zeros: registers, whose last takes the zeros that are stored behind statements
def last(zeros:UOp, done:UOp) -> UOp: return zeros.after(done)[zeros.shape[0] - 1]

def started(target:Target, products:list[GroupProduct], zeros:UOp, done:UOp) -> UOp:
  """The store behind the beginning of products"""
  return last(zeros, done).store(multiply(target, products))

def finished(target:Target, zeros:UOp, done:UOp) -> UOp:
  """The store behind the end of all products that the group has begun: their sums are there, and what they read may be overwritten"""
  own = last(zeros, done)
  return own.store(UOp(Ops.CUSTOM, dtypes.float, src=(own.load(),), arg='0.0f; asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");'))

def seen(target:Target, barrier:UOp, zeros:UOp) -> UOp:
  """The barrier, behind which groups see what the block's threads wrote to shared memory before it, copies too"""
  own = last(zeros, barrier.src[0])
  fence = UOp(Ops.CUSTOM, zeros.dtype, src=(own.load(),), arg='0; asm volatile("fence.proxy.async.shared::cta;" ::: "memory");')
  return UOp(Ops.BARRIER, src=(own.store(fence),))

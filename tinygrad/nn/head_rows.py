"""Keys and values of all heads, of every position of a sequence, out of the cache's rows: what nn/mla_unabsorbed.py reads.

A product of halves by tensor cores: the cache's rows, positions × L, with the weights k_b and v_b, which become halves first, k_b's transposed. A
block makes tiles of positions × weights' rows one after another, as many as come to it, and copies what the next steps multiply beside the products.
On Hopper its warps multiply in groups.
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.nn import warp_groups
from tinygrad.nn.intrinsics import Target, copied_but, copy, grouped, select
from tinygrad.nn.kernel import MULTIPROCESSORS, UNIT, Weight, empty, gated, launch, local
from tinygrad.nn.latent_cache import Pages
from tinygrad.nn.matmul import HALF_SCALE
from tinygrad.nn.matrices import PIECE, MatrixThread, pitch
from tinygrad.nn.step import PAGE, Step
from tinygrad.nn.warp_groups import GroupMatrix, GroupProduct, finished, seen, started
from tinygrad.uop.ops import Ops

TILE = 64                                # positions, and rows of weights, of a warp
DOWN = 2                                 # warps of a block with other positions; the others have other rows
DEPTH = 64                               # numbers of a step
PITCH = pitch(DEPTH)                     # of a row in shared memory
SHAPES = (4, 3), (4, 2), (2, 2)          # of a block: warps with other rows, steps that shared memory holds
THREADS = 128                            # of the launches that make halves of weights

@dataclass(frozen=True)
class RowsShape:
  """What the code of the product depends on"""
  target: Target
  pages: Pages
  tokens: int     # T, of the step
  keys: int       # H · nope
  values: int     # H · v
  across: int     # warps with other rows
  stages: int     # steps that shared memory holds
  @property
  def rows(self) -> int: return self.keys + self.values
  @property
  def tile_positions(self) -> int: return DOWN * TILE
  @property
  def tile_rows(self) -> int: return self.across * TILE

def block_shape(target:Target) -> tuple[int, int]|None:
  def held(across:int, stages:int) -> int: return 2 * stages * (DOWN + across) * TILE * PITCH
  return next((shape for shape in SHAPES if held(*shape) <= target.most_shared_bytes), None)

def nbytes(k_b:Weight, v_b:Weight, positions:int) -> int:
  """Of what head_rows returns"""
  return 2 * positions * k_b.shape[0] * (k_b.shape[2] + v_b.shape[1])

def takes(target:Target, k_b:Weight) -> bool:
  """Whether rows are whole steps, and there is room for some"""
  return target.copied_but is not None and target.matrices is not None and k_b.shape[1] % DEPTH == 0 and block_shape(target) is not None

def as_halves(target:Target, weight:Weight, transposed:bool=False) -> Tensor:
  """weight: (H, out, in) -> half (H · out, in), or (H · in, out). A thread has a unit of a row"""
  heads, out, width = weight.shape
  units = width // UNIT
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    thread, head = UOp.special(-(-out * units // THREADS), "gidx0") * THREADS + UOp.special(THREADS, "lidx0"), UOp.special(heads, "gidx1")
    own = thread.minimum(out * units - 1)
    row, unit = (own % out, own // out) if transposed else (own // units, own % units)   # neighbours write neighbours
    weights = weight.matrix(buffers, "w")(head * out + row, unit, None).weights()
    def place(i:int) -> UOp: return (head * width + unit * UNIT + i) * out + row if transposed else (head * out + row) * width + unit * UNIT + i
    inside = None if out * units % THREADS == 0 else thread < out * units
    return [buffers["y"][gated(place(i), inside)].store(value.cast(dtypes.half)) for i, value in enumerate(weights)]
  shape = (heads * width, out) if transposed else (heads * out, width)
  outs = {"y": Tensor.empty(*shape, dtype=dtypes.half, device=weight.device)}
  return launch(f"as_halves_{weight.label}{'_transposed' * transposed}", outs, weight.args("w"), body, weight.nbytes)[0]

def head_rows(target:Target, step:Step, cache:Tensor, k_b:Weight, v_b:Weight) -> Tensor:
  """cache: half (C, L+R), with the rows of a prompt's tokens written; k_b: (H, L, nope); v_b: (H, v, L) -> half (P · PAGE, H·nope + H·v), of each
  position up to the step's last token, and the others of its page: k_b·row[:L] of all heads, then HALF_SCALE · v_b·row[:L]"""
  (heads, latent, nope), shape = k_b.shape, block_shape(target)
  assert shape is not None
  made = RowsShape(target, Pages.of(cache, step, latent), step.tokens, heads * nope, heads * v_b.shape[1], *shape)
  def body(buffers:dict[str, UOp]) -> list[UOp]: return head_rows_kernel(made, buffers)
  weights = {"keys": as_halves(target, k_b, transposed=True), "values": as_halves(target, v_b)}
  outs = {"out": empty(cache, made.pages.capacity, made.rows, dtype=dtypes.half)}
  name, ins = f"head_rows_{step.tokens}_{latent}_{made.keys}_{made.values}", {"cache": cache, **weights, "start": step.start, "tables": step.tables}
  return launch(name, outs, ins, body, sum(halves.nbytes() for halves in weights.values()))[0]

def head_rows_kernel(shape:RowsShape, buffers:dict[str, UOp]) -> list[UOp]:
  """A block's stores.
    the first two steps' numbers begin their way to shared memory
    for each of the block's tiles:
      sums = 0
      for each 64 numbers of its rows:
        wait for them; barrier; those of the step after next begin their way, of the next tile, too
        sums += rows of the cache · weights
      out = half(sums)"""
  thread = (GroupRowsThread if shape.target.warp_groups else RowsThread)(shape, buffers)
  begun = thread.first_copies()
  turn, depth = UOp.range(thread.turns, 0), UOp.range(thread.depth_steps, 1)
  step = turn * thread.depth_steps + depth
  stage, arrived = step % shape.stages, thread.wait(step, begun)
  begun = thread.copy_step(thread.positions.after(arrived), thread.weights.after(arrived), step + (shape.stages - 1), 4)
  sums = thread.sums.after(turn)
  sums = sums.after(UOp.group(*[sums[i].store(0.0) for i in range(sums.shape[0] - 1)]))
  done = thread.multiply(sums.after(depth), stage, thread.positions.after(arrived, begun), thread.weights.after(arrived, begun))
  return [thread.store(turn, sums.after(done.end(depth))).end(turn)]

class RowsThread(MatrixThread):
  """A thread of head_rows. A job is a tile; jobs go by positions, then by rows of the weights, from block to block"""
  def __init__(self, shape:RowsShape, buffers:dict[str, UOp]):
    self.threads = DOWN * shape.across * 32
    super().__init__(shape.target, self.threads)
    self.shape, self.buffers = shape, buffers
    latent, row_tiles = shape.pages.format.latent, -(-shape.rows // shape.tile_rows)
    self.row_tiles, self.depth_steps = row_tiles, latent // DEPTH
    self.count = (shape.pages.position(buffers, shape.tokens - 1) // PAGE + 1) * PAGE   # of positions
    self.jobs = (self.count + (shape.tile_positions - 1)) // shape.tile_positions * row_tiles
    self.blocks = min(MULTIPROCESSORS, -(-shape.pages.capacity // shape.tile_positions) * row_tiles)
    self.block = UOp.special(self.blocks, "gidx0")
    self.turns = (self.jobs - self.block + (self.blocks - 1)) // self.blocks
    self.positions = local(self.place(shape.stages * shape.tile_positions, 0), dtypes.half, 0)
    self.weights = local(self.place(shape.stages * shape.tile_rows, 0), dtypes.half, 1)
    self.first_position, self.first_row = self.warp % DOWN * TILE, self.warp // DOWN * TILE
    self.down, self.across = TILE // 16, TILE // 16     # of a warp's products: 16 positions; 16 rows, two products
    self.sums = UOp.placeholder((self.down * self.across * 8 + 1,), dtypes.float, slot=0, addrspace=AddrSpace.REG)

  def place(self, row:Any, number:Any) -> Any:
    """Of a row's number in shared memory"""
    return row * PITCH + number
  def tile(self, turn:UOp) -> tuple[UOp, UOp]:
    """The first position and the first row of a turn's tile; of the last tile behind that"""
    job = (self.block + turn * self.blocks).minimum(self.jobs - 1)
    return job // self.row_tiles * self.shape.tile_positions, job % self.row_tiles * self.shape.tile_rows

  # ---- copies ----

  def copy_step(self, positions:UOp, weights:UOp, step:UOp, slot:int) -> UOp:
    """The store behind the beginning of a step's copies, a group"""
    shape, pages, buffers = self.shape, self.shape.pages, self.buffers
    (first_position, first_row), column, stage = self.tile(step // self.depth_steps), step % self.depth_steps * DEPTH, step % shape.stages
    zeros, per_row = self.registers(slot), DEPTH // PIECE
    for start in range(0, shape.tile_positions * per_row, self.threads):
      row, number = (self.thread + start) // per_row, (self.thread + start) % per_row * PIECE
      position = first_position + row
      source = buffers["cache"][pages.row(pages.page(buffers, position), position) + column + number]
      zeros = zeros.after(zeros[4].store(copy(self.target, positions[self.place(stage * shape.tile_positions + row, number)], source)))
    for start in range(0, shape.tile_rows * per_row, self.threads):
      row, number = (self.thread + start) // per_row, (self.thread + start) % per_row * PIECE
      own = (first_row + row).minimum(shape.rows - 1)
      def place(name:str, row:UOp) -> UOp: return buffers[name][row * pages.format.latent + column + number]
      # of 32 rows a lane's are neighbours, see store
      place_in_tile = row // 32 * 32 + row % 8 // 2 * 8 + row % 32 // 8 * 2 + row % 2
      source = select(own < shape.keys, place("keys", own.minimum(shape.keys - 1)), place("values", (own - shape.keys).maximum(0)))
      zeros = zeros.after(zeros[4].store(copy(self.target, weights[self.place(stage * shape.tile_rows + place_in_tile, number)], source)))
    return zeros[4].store(grouped(self.target, zeros[4].load()))
  def first_copies(self) -> UOp:
    begun = self.copy_step(self.positions, self.weights, UOp.const(0), 1)
    for step in range(1, self.shape.stages - 1):
      begun = self.copy_step(self.positions.after(begun), self.weights.after(begun), UOp.const(step), 1 + step)
    return begun
  def wait(self, step:UOp, *before:UOp) -> UOp:
    """The barrier behind which all have the step's numbers, and none reads those of the step before"""
    event = copied_but(self.target, [((step + 1).eq(self.turns * self.depth_steps), 0)], self.shape.stages - 2)
    return UOp(Ops.BARRIER, src=(self.registers(5, step, *before)[4].store(event),))

  # ---- products ----

  def multiply(self, sums:UOp, stage:UOp, positions:UOp, weights:UOp) -> UOp:
    """The store behind a step's products. A lane has of two of 16 positions two of eight rows' elements"""
    shape, done = self.shape, sums
    for number in range(0, DEPTH, 16):
      first_row = stage * shape.tile_rows + self.first_row
      of_rows = [self.words(weights, self.b_place(first_row + across * 16, number, PITCH), self.registers(6 + across, done))
                 for across in range(self.across)]
      for down in range(self.down):
        place = self.a_place(stage * shape.tile_positions + self.first_position + down * 16, number, PITCH)
        of_positions = self.words(positions, place, self.registers(20 + down, done))
        for across, words in enumerate(of_rows): done = self.accumulate(sums, (down * self.across + across) * 8, of_positions, words, done)
    return done

  def store(self, turn:UOp, sums:UOp) -> UOp:
    """The stores of a turn's tile"""
    shape, stores = self.shape, []
    first_position, first_row = self.tile(turn)
    for down in range(self.down):
      for half in range(2):
        position = first_position + self.first_position + down * 16 + half * 8 + self.lane // 4
        for group in range(self.across // 2):   # of 32 rows, four products
          row = first_row + self.first_row + group * 32 + self.lane % 4 * 8
          factor = (row < shape.keys).where(1.0, HALF_SCALE)
          inside = (position < self.count) & (row < shape.rows) if shape.rows % shape.tile_rows else position < self.count
          for i in range(8):
            value = sums[(down * self.across * 2 + group * 4 + i // 2) * 4 + half * 2 + i % 2].load() * factor
            stores.append(self.buffers["out"][(position * shape.rows + row + i).valid(inside)].store(value.cast(dtypes.half)))
    return UOp.group(*stores)

class GroupRowsThread(RowsThread):
  """… where warps multiply in groups: each group has 64 positions, and all of the tile's rows of weights"""
  def __init__(self, shape:RowsShape, buffers:dict[str, UOp]):
    super().__init__(shape, buffers)
    self.first_position, self.first_row, self.down, self.across = self.warp * 16, UOp.const(0), 1, shape.tile_rows // 16
  def place(self, row:Any, number:Any) -> Any: return warp_groups.place(0, row, number)   # a step is a panel
  def wait(self, step:UOp, *before:UOp) -> UOp: return seen(self.target, super().wait(step, *before), self.registers(30))
  def multiply(self, sums:UOp, stage:UOp, positions:UOp, weights:UOp) -> UOp:
    shape, done = self.shape, sums
    for number in range(0, DEPTH, 16):
      own = [buffer[warp_groups.begin(0, stage * rows + first, number)] for buffer, rows, first in
             ((positions, shape.tile_positions, self.warp // warp_groups.WARPS * warp_groups.ROWS), (weights, shape.tile_rows, 0))]
      behind = sums.after(done)
      product = GroupProduct(GroupMatrix(own[0]), GroupMatrix(own[1]), [behind[i] for i in range(sums.shape[0] - 1)])
      done = started(self.target, [product], sums, done)
    return finished(self.target, sums, done)

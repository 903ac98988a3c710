"""Matrix times vector on quantized weights (planes, see nn/kernel.py): what most decode kernels are made of.

A launch's body calls `matvec` (nn/kernel.py has `launch` and the words used here). A launch is one or more parts (MatvecPart; linear_part makes the
usual one): each has blocks of its own, and all read the same vectors. A part's rows may be segments of several matrices (RowSegments), or be known to
the kernel alone (DeferredMatrix).

A block's lanes form teams, each of which does a job: the product of a few rows with the vector, so that a read of the vector serves all of them.
A team is a part of a warp where rows are short, several warps where they are very long. In a large launch it does several jobs, turn by turn: a block
stages the vector once for all of them, and its warps, which do not wait for each other between jobs, keep loads under way; while it stages, the next
turn's codes come as far as the second cache. Each part of a launch may do so. Floats are read as they lie, neighbouring lanes beside each other
(spread_quads). Several tokens are columns: a block loads its weights once and multiplies them with the vectors of up to COLUMNS tokens. What it does:

  weights = the lane's units of the job's rows      # loads are issued; none waits for a vector
  wait until the kernels before are done            # intrinsics.pdl_wait
  for each column:
    shared = x · norm.weight, as int8 or float32    # every thread stages a few float4
  barrier
  for each column:
    sums = Σ weights · shared over the team         # lanes by shuffles, then warps by shared memory
  finish(sums / rms(x), token, job)                 # the epilogue stores; the team's lanes have a column each

Between some launches vectors are int8 (Codes): the kernel that makes them gathers the results of a block's jobs in shared memory and rounds them
(CodesOut); the next has nothing to stage, and no barrier. Where two launches would stage the same vectors, the first block of one stores what it has
staged (Rounded), and those of the other copy that.

Where a kernel chooses experts, the rows are known only behind the barrier, and the weights are loaded there: what is staged holds no registers then,
and more blocks run at once.

Arithmetic. Where the target has an int8 dot product and the format has integer codes, x becomes int8 with one scale for 32 values (as
llama.cpp does it; a product's NMSE is about 4e-5) and minimums and zeros are folded in through sums of x. Elsewhere x stays float32 and a code
becomes a float by setting it into the mantissa of 2^23. Sums are float32, in a fixed order that does not depend on the other columns: same input,
same bytes, and a token among others has the bytes that it has alone.

RMSNorm costs nothing here: x is multiplied by the norm's weight while it is staged, and the finished sums by 1/rms.
"""
from __future__ import annotations
import functools, math
from dataclasses import dataclass
from typing import Callable, Iterable, NamedTuple, Protocol, Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.nn.intrinsics import Target, dot4, dot4_unsigned, fetch, group_reduce, group_sum, is_last_block, opaque_zero, pdl_wait, shuffle
from tinygrad.nn.kernel import SLOTS, UNIT, Load4, Matrix, Unit, Weight, branch, empty, local, safe_index, spread_quads, sum_in_order, words_of_unit
from tinygrad.uop.ops import Ops

FLOAT4_OF_UNIT = UNIT // 4
STEPS = 6                          # units of a row that a lane takes before the row spans more warps
ROW_WORDS = 32                     # … whose weights take at most so many registers
WARPS, MANY_WARPS = 8, 16          # of a block; of a block of a launch of MANY_JOBS warps' work
CODED_WARPS = 4                    # of a block that reads int8, if a team is no more: small ones make room sooner
MANY_JOBS = 2048
WAVES = 4096                       # warps of a launch whose blocks take turns
WAVE_STEPS = 3                     # units of a row that a lane of them takes: it holds few registers, and more blocks run at once
AT_ONCE, TURNS = 4096, 40          # warps of a large launch that run at once; jobs that its teams do at most, turn by turn
LARGE_STEPS = 2                    # units of a row that a lane of one takes at most
WIDE_VECTOR = 128                  # units of a vector that twice as many threads stage: a multiprocessor has one block of a large launch
WIDEST_VECTOR = 256                # … of which a thread has no more than two float4, and beside them registers for MANY_ROWS
FEW_BLOCKS = 64                    # a launch of fewer blocks is cut finer
ROUNDED = 1.5 * 2 ** 23            # added to a small float: the nearest integer stands in the lowest bits
LEAST = 2.0 ** -126              # numbers of which none is larger are zeros: a target's own reciprocal of what is smaller is infinite
COLUMNS = (1, 2, 3, 4, 8)          # tokens of a block: eight have their sums in registers, beside the weights
CODED_UNITS = 20                   # of int8 vectors, of all its tokens, that a lane has registers for
ROWS, MANY_ROWS = 2, 4             # of a job; of a large launch's, or one that reads int8, where a unit of weights is much work: what a lane has of
                                   # the vector serves all
BESIDE_WEIGHTS = 36                # registers of a thread, of a launch whose blocks take turns
FEW_FIELDS = 3                     # of a weight whose unit is little work: codes, a scale, perhaps a minimum
TURN_LOOP = 50                     # the number of the first part's loop over turns
EIGHT = 8                          # numbers that have a scale, where a kernel stores int8

# ---- what a launch computes ----

@dataclass(frozen=True)
class DeferredMatrix:
  """A matrix that the kernels before this one choose. of(wait_zero) -> the matrix; its loads of their results add wait_zero to the index."""
  of: Callable[[UOp], Matrix]

RowSegments = Sequence[tuple[Matrix|DeferredMatrix, UOp]]   # (matrix, row) for each segment of the vector; most vectors have one

@dataclass(frozen=True)
class CodesOut:
  """An epilogue whose results are stored as Codes, words and scales. units: of a vector. A job has `count` results, neighbours.
  values(sums, job, wait_zero) -> the job's. vector(token): the vector's number. number(job): that of the job's first result in it."""
  words: UOp
  scales: UOp
  units: int
  count: int
  values: Callable[[list[UOp], UOp, UOp], list[UOp]]
  vector: Callable[[UOp], UOp]
  number: Callable[[UOp], UOp]

@dataclass(frozen=True)
class MatvecPart:
  """A part of a launch.
  jobs: how many.
  rows_of(job) -> the job's rows.
  finish(sums, token, job, is_writer, wait_zero) -> stores: the epilogue. sums are the rows' products with the token's vector. Only the lane with
  is_writer stores. Loads of other kernels' results add wait_zero to the index. Or a CodesOut.
  integer: whether every matrix has integer codes.
  rounded: words and scales of a Rounded, where the first block stores the vectors. They are staged as int8, and have a norm.
  factors: where the norm's 1/rms of each vector is stored.
  rows: of a job. steps: units of a row that a lane takes at most.
  many: warps of a block, where there are MANY_JOBS.
  nbytes: of the matrices, where a large launch has several parts. piece: of the floats, if they are spread (see spread_quads).
  early(token, job, wait_zero): loads of the epilogue's."""
  jobs: int
  rows_of: Callable[[UOp], Sequence[RowSegments]]
  finish: Callable[[list[UOp], UOp, UOp, UOp, UOp], list[UOp]]|CodesOut
  integer: bool
  rounded: tuple[UOp, UOp]|None = None
  factors: UOp|None = None
  rows: int = ROWS
  steps: int = STEPS
  many: int = MANY_WARPS
  nbytes: int = 0
  piece: int = 0
  early: Callable[[UOp, UOp, UOp], list[UOp]]|None = None

def is_simple(weight:Weight) -> bool:
  """Whether a unit is codes and a scale. A minimum, codes in several planes, or values in a table, are work of their own"""
  return weight.fields == 2 and not weight.looks_up

def is_wide(weight:Weight) -> bool: return weight.shape[-1] >= WIDE_VECTOR * UNIT

def rows_of_job(target:Target, weight:Weight) -> int:
  """One row of floats where a wide vector is staged: the weights that a lane has, and what it stages, are to find room in its registers"""
  return 1 if weight.piece and is_wide(weight) and stages_floats(target, weight.shape[-1] // UNIT) else ROWS

def lane_steps(weight:Weight) -> int:
  """Units of a row that a lane takes at most: fewer where they are wide"""
  return max(min(ROW_WORDS // math.ceil(words_of_unit(weight)), STEPS), 1)

def registers_for(weight:Weight, units:int) -> int:
  """Of a thread that has so many units of int8's weights, in a launch whose blocks take turns: with more of them fewer blocks run at once, with fewer
  it waits for each load by itself. 0: as many as the compiler likes, which knows it where a unit is little work, or its bits are cut small"""
  known = weight.fields <= FEW_FIELDS or weight.looks_up or weight.widths[0] < 4
  return 0 if known else BESIDE_WEIGHTS + math.ceil(units * words_of_unit(weight))

def linear_part(rows:int, of:Callable[[UOp], RowSegments], y:UOp, integer:bool, out_index:Callable[[UOp, UOp], UOp]|None=None,
                epilogue:Callable[[list[UOp], UOp, UOp], list[UOp]]|None=None, residual:UOp|None=None,
                count:int=ROWS) -> MatvecPart:
  """y[out_index(token, row)] = the row times x, for row < rows; of(row) names it. A job is `count` rows. Without out_index y is (tokens, rows).
  epilogue(sums, token, row) -> the sums of a job's rows, the first of which is `row`, changed. residual, indexed as y, is added."""
  odd = rows % count > 0
  index = out_index or (lambda token, row: token * rows + row)
  def residuals(token:UOp, job:UOp, wait_zero:UOp) -> list[UOp]:
    # no gate: tinygrad would take it for true in all that wait_zero depends on, and make a second wait and second loads
    assert residual is not None
    return [residual[index(token, (job * count + i).minimum(rows - 1)) + wait_zero].load() for i in range(count)]
  def rows_of(job:UOp) -> list[RowSegments]:
    own = [job * count + i for i in range(count)]
    return [of(row.minimum(rows - 1) if odd else row) for row in own]
  def finish(sums:list[UOp], token:UOp, job:UOp, is_writer:UOp, wait_zero:UOp) -> list[UOp]:
    first, stores, beside = job * count, [], [] if residual is None else residuals(token, job, wait_zero)
    for i, value in enumerate(sums if epilogue is None else epilogue(sums, token, first)):
      row = first + i
      writes = is_writer & (row < rows) if odd else is_writer
      if beside: value = value + beside[i]
      stores.append(y[index(token, row).valid(writes)].store(value.cast(y.dtype)))
    return stores
  return MatvecPart(-(-rows // count), rows_of, finish, integer, rows=count, early=None if residual is None else residuals)

class Codes(NamedTuple):
  """Vectors that a kernel has stored as int8: number = code · the scale of its EIGHT. Lanes read them from the caches, as neighbouring 16 bytes.
  words: int32 (vectors, 2, units, 4), of each unit words 0–3, and then of each words 4–7; scales: float32 (vectors, units, 4)"""
  words: Tensor
  scales: Tensor

def empty_codes(like:Tensor, vectors:int, width:int) -> Codes:
  """Memory that a launch will write"""
  units = width // UNIT
  return Codes(empty(like, vectors, 2, units, 4, dtype=dtypes.int), empty(like, vectors, units, 4))

class Rounded(NamedTuple):
  """RMSNorm of vectors, as x times the norm's weight in int8 with a scale for a unit, as Int8Vectors has it, and 1/rms.
  words: int32 (vectors, D / 4); scales: float32 (vectors, units, 3), of each unit the scale, and scale · Σ of each of its halves;
  factors: float32 (vectors,), 1/rms"""
  words: Tensor
  scales: Tensor
  factors: Tensor

def empty_rounded(like:Tensor, vectors:int, width:int) -> Rounded:
  """Memory that a launch will write"""
  return Rounded(empty(like, vectors, width // 4, dtype=dtypes.int), empty(like, vectors, width // UNIT, 3), empty(like, vectors))

def named(x:Tensor|Codes|Rounded, name:str) -> dict[str, Tensor]:
  """What x is made of, as a launch's inputs or outputs"""
  return {name: x} if isinstance(x, Tensor) else {f"{name}_{field}": tensor for field, tensor in x._asdict().items()}
def codes_in(buffers:dict[str, UOp], name:str) -> tuple[UOp, UOp]: return buffers[f"{name}_words"], buffers[f"{name}_scales"]

class MadeVectors(Protocol):
  """Vectors that each block makes for itself. threads: of such a block; nbytes: of shared memory, a vector"""
  threads: int
  nbytes: int
  def constants(self, tokens:list[UOp]) -> list[UOp]:
    """The loads of what no kernel of the step writes"""
  def load4(self, tokens:list[UOp], thread:UOp, threads:int, wait_zero:UOp, slot:int) -> list[Load4]:
    """The tokens' vectors in shared memory, behind a barrier. slot: its buffer's"""

class CodedUnit(NamedTuple):
  """32 numbers as int8: eight words, and the scale of each two"""
  words: list[UOp]
  scales: list[UOp]

def load_codes(buffers:dict[str, UOp], name:str, units:int, vector:UOp, unit:UOp) -> CodedUnit:
  """A unit of a vector of so many"""
  codes, scales = codes_in(buffers, name)
  words = [codes[((vector * 2 + half) * units + unit) * 4 + i].load() for half in range(2) for i in range(4)]
  return CodedUnit(words, [scales[(vector * units + unit) * 4 + i].load() for i in range(4)])

@dataclass(frozen=True)
class Operand:
  """The vectors of a launch, one a token, which other kernels have written. segments: units of each. vector(token) loads it. norm: the weight of
  an RMSNorm of it, and its epsilon. codes(token, segment, unit) loads a unit of a vector that is int8 already, in place of vector.
  rounded: words and scales of a Rounded, in place of vector, and the number of the first token's. made: in place of vector.
  factor(token, wait_zero): the norm's 1/rms, which another kernel has stored."""
  segments: Sequence[int]
  vector: Callable[[UOp], Load4]|None
  norm: tuple[Load4, float]|None = None
  tokens: int = 1
  codes: Callable[[UOp, int, UOp], CodedUnit]|None = None
  rounded: tuple[UOp, UOp, UOp|int]|None = None
  made: MadeVectors|None = None
  factor: Callable[[UOp, UOp], UOp]|None = None

  @property
  def units(self) -> int: return sum(self.segments)
  @property
  def sums_squares(self) -> bool:
    """Whether a block makes the norm's 1/rms"""
    return self.norm is not None and self.factor is None
  def values(self, token:UOp, number:UOp, wait_zero:UOp) -> list[UOp]:
    """A float4"""
    assert self.vector is not None
    return self.vector(token)(number + wait_zero)
  def weighted(self, token:UOp, number:UOp, wait_zero:UOp) -> list[UOp]:
    """A float4 times the norm's weight"""
    values = self.values(token, number, wait_zero)
    return values if self.norm is None else [value * weight for value, weight in zip(values, self.norm[0](number))]

def group_count(tokens:int, columns:int) -> int: return -(-tokens // columns)

class TokenGroup(NamedTuple):
  """The tokens that are a block's columns: `columns` of them from number · columns on. What is behind the last of `tokens` is that one again, and
  nothing of it is stored."""
  tokens: int
  columns: int
  number: UOp
  def token(self, column:UOp|int) -> UOp:
    token = self.number * self.columns + column
    return token if self.tokens % self.columns == 0 else token.minimum(self.tokens - 1)
  def inside(self, column:UOp) -> UOp|None:
    """Whether there is such a token; None: always"""
    return None if self.tokens % self.columns == 0 else self.number * self.columns + column < self.tokens

# ---- the vectors in shared memory ----

class SharedVectors(Protocol):
  """A block's vectors, one a column, between the threads that stage them and the lanes that read them"""
  def stage(self, column:int, number:UOp, values:list[UOp]) -> list[UOp]:
    """The stores of a float4"""
  def after(self, barrier:UOp) -> None:
    """Reads come behind the barrier"""
  def read(self, column:int, place:LaneUnit) -> Callable[[Unit], UOp]:
    """(unit of weights) -> its product with a unit of the column's vector, float32"""

def float_dot(x:list[UOp]) -> Callable[[Unit], UOp]:
  """(unit of weights) -> its product with 32 float32 values"""
  def dot(weights:Unit) -> UOp:
    width, sums = UNIT // len(weights.scales), []
    for group, (scale, minimum) in enumerate(weights.scales):
      numbers = range(group * width, (group + 1) * width)
      product = scale * sum_in_order(weights.value(i) * x[i] for i in numbers)
      sums.append(product if minimum is None else product + minimum * sum_in_order(x[i] for i in numbers))
    return sum_in_order(sums)
  return dot

class FloatVectors:
  """Vectors as float32. Float4 j of unit u lies at (j·pitch + u)·4 of a vector: neighbouring lanes read neighbouring 16 bytes, or where floats are
  spread other banks' (piece: see spread_quads)."""
  def __init__(self, units:int, columns:int, slot:int, piece:int=0):
    self.pitch, self.piece = units + 1, piece
    self.shared = local(columns * self.nbytes(units) // 4, dtypes.float, slot)
  @staticmethod
  def nbytes(units:int) -> int:
    """Of a vector"""
    return FLOAT4_OF_UNIT * (units + 1) * 16
  def index(self, column:int, number:UOp) -> UOp:
    return ((column * FLOAT4_OF_UNIT + number % FLOAT4_OF_UNIT) * self.pitch + number // FLOAT4_OF_UNIT) * 4
  def stage(self, column:int, number:UOp, values:list[UOp]) -> list[UOp]:
    index = self.index(column, number)
    return [self.shared[index + i].store(value) for i, value in enumerate(values)]
  def after(self, barrier:UOp) -> None: self.shared = self.shared.after(barrier)
  def read(self, column:int, place:LaneUnit) -> Callable[[Unit], UOp]:
    return float_dot([self.shared[self.index(column, number) + i].load() for number in spread_quads(place.number, self.piece) for i in range(4)])

class DeviceVectors:
  """Vectors too wide for shared memory stay where they are: lanes read them with a stride, and leave the rest to the caches."""
  def __init__(self, operand:Operand, group:TokenGroup, wait_zero:UOp, piece:int=0):
    self.operand, self.group, self.wait_zero, self.piece = operand, group, wait_zero, piece
  def stage(self, column:int, number:UOp, values:list[UOp]) -> list[UOp]: return []
  def after(self, barrier:UOp) -> None: pass
  def read(self, column:int, place:LaneUnit) -> Callable[[Unit], UOp]:
    numbers = spread_quads(place.number, self.piece)
    return float_dot([value for number in numbers for value in self.operand.weighted(self.group.token(column), number, self.wait_zero)])

def int8_codes(weights:Unit, j:int) -> UOp:
  """Word j, as an int8 dot product takes it: with a zero of 128 codes are int8 as they are"""
  return weights.words[j] ^ 0x80808080 if weights.zero == 128 else weights.words[j]

def scaled(weights:Unit, scale:UOp, minimum:UOp|None, product:UOp, x_sum:UOp) -> UOp:
  """Σ weight · x of the unit, or of a half, from Σ code · x and Σ x"""
  if weights.zero not in (0, 128): product = product - x_sum * float(weights.zero)
  return scale * product if minimum is None else scale * product + minimum * x_sum

def int8_words(target:Target, values:list[UOp], of_group:Callable[[UOp], UOp]) -> tuple[list[UOp], UOp]:
  """Numbers as int8, four to a word, and their scale. of_group(largest of these) -> of all that have this scale, both as bits."""
  sizes = [value.bitcast(dtypes.uint32) & 0x7fffffff for value in values]   # in the order of the floats, and compared in one instruction
  largest = of_group(functools.reduce(UOp.maximum, sizes)).bitcast(dtypes.float)
  inverse = (largest >= LEAST).where(127.0 / largest, 0.0)
  codes = [(value * inverse + ROUNDED).bitcast(dtypes.uint32) & 255 for value in values]
  words = [codes[i] | (codes[i + 1] << 8) | (codes[i + 2] << 16) | (codes[i + 3] << 24) for i in range(0, len(codes), 4)]
  return [word.cast(dtypes.int) for word in words], largest * (1 / 127)

class StagedWord(NamedTuple):
  """What a thread has made of a float4: a word, its unit's scale, and scale · Σ of its half of the unit"""
  column: int
  number: UOp
  word: UOp
  scale: UOp
  half_sum: UOp

class Int8Vectors:
  """Vectors as int8, four to a word: words 0–3 of unit u at u·4 of a vector, words 4–7 at (pitch + u)·4. Beside them as float32, at u·4: the unit's
  scale, and scale · Σ x of each of its halves."""
  def __init__(self, target:Target, units:int, columns:int, slot:int, rows:int=ROWS):
    self.staged:list[StagedWord] = []   # by this thread
    # the upper nibbles have a sum of their own: where jobs have fewer rows, a register that this takes costs more than what it saves
    self.apart = rows >= MANY_ROWS
    self.target, self.units, self.pitch = target, units, self.pitch_of(units)
    self.words = local(columns * 2 * self.pitch * 4, dtypes.int, slot)
    self.meta = local(columns * units * 4, dtypes.float, slot + 1)
  @staticmethod
  def pitch_of(units:int) -> int: return -(-units // 8) * 8 + 4   # the halves of a unit fall into other banks
  @staticmethod
  def nbytes(units:int) -> int:
    """Of a vector"""
    return (2 * Int8Vectors.pitch_of(units) + units) * 16
  def stage(self, column:int, number:UOp, values:list[UOp]) -> list[UOp]:
    target, j, unit = self.target, number % FLOAT4_OF_UNIT, number // FLOAT4_OF_UNIT   # eight neighbouring lanes hold a unit
    (word,), scale = int8_words(target, values, lambda largest: group_reduce(target, largest, FLOAT4_OF_UNIT, UOp.maximum))
    half_sum = group_sum(target, dot4(target, word, UOp.const(0x01010101, dtypes.int), UOp.const(0, dtypes.int)), FLOAT4_OF_UNIT // 2)
    self.staged.append(StagedWord(column, number, word, scale, scale * half_sum.cast(dtypes.float)))
    half, of_half, meta = j // 4, j % 4, (column * self.units + unit) * 4
    return [self.words[self.word_index(column, number)].store(word), self.meta[meta.valid(j.eq(0))].store(scale),
            self.meta[(meta + 1 + half).valid(of_half.eq(0))].store(self.staged[-1].half_sum)]
  def word_index(self, column:int, number:UOp) -> UOp:
    j, unit = number % FLOAT4_OF_UNIT, number // FLOAT4_OF_UNIT
    return ((column * 2 + j // 4) * self.pitch + unit) * 4 + j % 4
  def after(self, barrier:UOp) -> None:
    self.words = self.words.after(barrier)
    self.meta = self.meta.after(barrier)
  def read(self, column:int, place:LaneUnit) -> Callable[[Unit], UOp]:
    unit = place.number
    words = [self.words[((column * 2 + half) * self.pitch + unit) * 4 + i].load() for half in range(2) for i in range(4)]
    scale, *half_sums = (self.meta[(column * self.units + unit) * 4 + i].load() for i in range(3))
    def dot(weights:Unit) -> UOp:
      groups, sums = len(weights.scales), []
      for group, (weight_scale, minimum) in enumerate(weights.scales):
        products, of_group = UOp.const(0, dtypes.int), range(group * 8 // groups, (group + 1) * 8 // groups)
        if self.apart and weights.nibbles is not None:   # the upper nibbles where they lie, sixteen times as much
          for j in of_group[1::2]: products = dot4_unsigned(self.target, weights.nibbles[j // 2] & 0xf0f0f0f0, words[j], products)
          products, of_group = products >> 4, of_group[::2]
        for j in of_group: products = dot4(self.target, int8_codes(weights, j), words[j], products)
        x_sum = half_sums[group] if groups == 2 else half_sums[0] + half_sums[1]
        sums.append(scaled(weights, weight_scale, minimum, scale * products.cast(dtypes.float), x_sum))
      return sum_in_order(sums)
    return dot

class RoundedVectors(Int8Vectors):
  """Int8Vectors that another kernel has made: a thread copies a word, and perhaps one of the unit's three numbers"""
  def __init__(self, target:Target, operand:Operand, group:TokenGroup, wait_zero:UOp, slot:int):
    super().__init__(target, operand.units, group.columns, slot)
    self.operand, self.group, self.wait_zero = operand, group, wait_zero
  def stage(self, column:int, number:UOp, values:list[UOp]) -> list[UOp]:
    assert self.operand.rounded is not None
    words, scales, first = self.operand.rounded
    vector, j, unit = first + self.group.token(column), number % FLOAT4_OF_UNIT, number // FLOAT4_OF_UNIT
    word = words[vector * (self.units * FLOAT4_OF_UNIT) + number + self.wait_zero].load()
    scale = scales[(vector * self.units + unit) * 3 + j.minimum(2) + self.wait_zero].load()
    return [self.words[self.word_index(column, number)].store(word), self.meta[((column * self.units + unit) * 4 + j).valid(j < 3)].store(scale)]

class CodedVectors:
  """Vectors that are int8 already: nothing is staged"""
  def __init__(self, target:Target, operand:Operand, group:TokenGroup, wait_zero:UOp):
    self.target, self.operand, self.group, self.wait_zero = target, operand, group, wait_zero
  def stage(self, column:int, number:UOp, values:list[UOp]) -> list[UOp]: return []
  def after(self, barrier:UOp) -> None: pass
  def read(self, column:int, place:LaneUnit) -> Callable[[Unit], UOp]:
    assert self.operand.codes is not None
    words, scales = self.operand.codes(self.group.token(column), place.segment, place.unit + self.wait_zero)
    def sum_of(j:int, codes:Callable[[int], UOp], start:UOp) -> UOp:
      """start + Σ code · x of EIGHT"""
      return dot4(self.target, codes(2 * j + 1), words[2 * j + 1], dot4(self.target, codes(2 * j), words[2 * j], start))
    def product(weights:Unit, j:int) -> UOp:
      # from the bits of a float whose lowest bit counts 1 on: a subtraction in place of a conversion. Elsewhere that takes registers
      total = sum_of(j, lambda i: int8_codes(weights, i), UOp.const(ROUNDED, dtypes.float).bitcast(dtypes.int))
      return scales[j] * (total.bitcast(dtypes.float) - ROUNDED)
    sums = [scales[j] * sum_of(j, lambda _: UOp.const(0x01010101, dtypes.int), UOp.const(0, dtypes.int)).cast(dtypes.float) for j in range(4)]
    def dot(weights:Unit) -> UOp:
      groups, products = len(weights.scales), []
      for group, (weight_scale, minimum) in enumerate(weights.scales):
        eights = range(group * 4 // groups, (group + 1) * 4 // groups)
        of_group, x_sum = sum_in_order(product(weights, j) for j in eights), sum_in_order(sums[j] for j in eights)
        products.append(scaled(weights, weight_scale, minimum, of_group, x_sum))
      return sum_in_order(products)
    return dot

def stages_floats(target:Target, units:int) -> bool:
  """Whether a vector of float32 finds room in shared memory. The rest of the launch needs some too"""
  return FloatVectors.nbytes(units) + 2048 <= target.shared_bytes

def vectors_of(target:Target, operand:Operand, integer:bool) -> type:
  """What a launch keeps its vectors in"""
  if operand.codes is not None: return CodedVectors
  if operand.rounded is not None: return RoundedVectors
  if integer and target.dot4 is not None: return Int8Vectors
  return FloatVectors if stages_floats(target, operand.units) else DeviceVectors

def columns_of(target:Target, operand:Operand, parts:Sequence[MatvecPart], warps:int, coded_units:int=0) -> int:
  """How many tokens a block takes, whose vectors and sums find room in shared memory: a read of the weights serves as many as can be, and no block
  has many fewer than another. coded_units: of int8 that a lane reads of each, which find room in its registers"""
  needed = len(parts) * warps * (1 + ROWS) * 4
  for part in parts:
    vectors = vectors_of(target, operand, part.integer)
    if vectors in (FloatVectors, Int8Vectors, RoundedVectors): needed += vectors.nbytes(operand.units)
  if operand.made is not None: needed += operand.made.nbytes
  def fits(columns:int) -> bool: return columns * needed <= target.shared_bytes and columns * coded_units <= CODED_UNITS
  fit = (columns for columns in COLUMNS if columns == 1 or columns <= operand.tokens and fits(columns))
  return min(fit, key=lambda columns: (group_count(operand.tokens, columns), columns))

# ---- threads ----

@dataclass(frozen=True)
class ThreadLayout:
  lanes: int                   # of a warp, that a team spans
  warps: int                   # that a team spans
  teams: int                   # of a block
  @property
  def span(self) -> int: return self.lanes * self.warps
  @property
  def threads(self) -> int: return self.span * self.teams

def takes_turns(jobs:int, warps:int) -> bool:
  """Whether the blocks of a launch that reads int8 are too many to run at once. warps: of a team"""
  return jobs * warps >= WAVES

def thread_layout(segments:Sequence[int], warp_lanes:int, jobs:int, coded:bool=False, copies:bool=False, steps:int=STEPS,
                  large:int=0, many:int=MANY_WARPS) -> ThreadLayout:
  """The layout for a launch of so many jobs. A team is within a warp up to `steps` units a lane, over the most lanes that leave at most a tenth of
  them idle. Larger blocks are for launches whose blocks make the vectors' int8. coded: they read it; copies: they copy it.
  large: large_warps of the launch, or those that make its vector. many: as a part has it, but that a block has EIGHT teams if it can."""
  units, lanes, warps = sum(segments), warp_lanes, 1
  def units_of_lane(warps:int) -> int: return sum(-(-length // (warp_lanes * warps)) for length in segments)
  if large: steps = min(steps, LARGE_STEPS)
  while units_of_lane(warps) > steps: warps += 1
  take_turns = coded and takes_turns(jobs, warps)
  # as many as leave no lane idle, if there is such a number
  if take_turns: warps = next((count for count in range(warps, WARPS + 1) if segments[0] % (count * warp_lanes) == 0), warps)
  # no lane without a unit of the first segment: tinygrad would drop the clamps of what it reads to find a chosen expert's
  while take_turns and units_of_lane(warps) > WAVE_STEPS and warps < WARPS and segments[0] % (2 * warps * warp_lanes) == 0: warps *= 2
  while warps == 1 and lanes > 1 and units < 0.9 * lanes * -(-units // lanes): lanes //= 2
  work = jobs * lanes * warps // warp_lanes
  if large: block_warps = large
  elif copies: block_warps = WARPS * warps
  elif coded: block_warps = CODED_WARPS if warps <= CODED_WARPS else WARPS
  else: block_warps = max(many, min(EIGHT * warps, MANY_WARPS)) if work >= MANY_JOBS else WARPS
  teams = max(block_warps // warps, 1) * (warp_lanes // lanes)
  # too few jobs to fill the machine: smaller blocks, and a team over as many lanes as a row has units
  while teams > 1 and jobs < FEW_BLOCKS * teams and teams * lanes * warps >= 2 * warp_lanes: teams //= 2
  while teams == 1 and not take_turns and (not coded or jobs < FEW_BLOCKS) and warps * lanes * 2 <= units: warps *= 2
  return ThreadLayout(lanes, warps, teams)

def coded_rows_take_turns(segments:Sequence[int], warp_lanes:int, rows:int, steps:int=STEPS) -> bool:
  """takes_turns of a launch that reads int8, of so many rows, ROWS a job"""
  jobs = -(-rows // ROWS)
  return takes_turns(jobs, thread_layout(segments, warp_lanes, jobs, coded=True, steps=steps).warps)

def coded_job(weight:Weight, segments:Sequence[int], warp_lanes:int, rows:int, steps:int, fewer:int) -> tuple[int, int]:
  """Of a launch that reads int8: (a job's rows, units of a row that a lane takes at most). fewer: as steps, where a job has MANY_ROWS. Blocks that
  take turns are to hold few registers."""
  if weight.looks_up: return ROWS, fewer   # what is looked up takes registers beside
  few = weight.fields <= FEW_FIELDS or coded_rows_take_turns(segments, warp_lanes, rows, steps)
  return (ROWS, steps) if few else (MANY_ROWS, fewer)

def large_warps(target:Target, units:int, jobs:int, integer:bool) -> int:
  """Of a block of a large launch: one whose blocks stage vectors of so many units, and have work for twice as many warps as run at once. 0: the
  launch is not one. integer: of all parts"""
  if target.dot4 is None or jobs * -(-units // (target.lanes * LARGE_STEPS)) < 2 * AT_ONCE: return 0
  return MANY_WARPS * 2 if integer and units >= WIDE_VECTOR else MANY_WARPS

def large_job(target:Target, weights:Sequence[Weight], rows:int, tokens:int) -> tuple[int, int]|None:
  """Of a launch that has so many rows and stages vectors, if it is a large one on codes: (a job's rows, units of each that a lane takes). A lane has
  one unit of the vector, for as many rows as there are registers for: of few tokens, whose sums take some, MANY_ROWS."""
  units = weights[0].shape[-1] // UNIT
  if not all(weight.integer for weight in weights) or not large_warps(target, units, rows // ROWS, True): return None
  return MANY_ROWS if tokens <= 2 and units <= WIDEST_VECTOR else ROWS, 1

def turns_of(target:Target, part:MatvecPart, jobs:int, teams:int, block_warps:int, units:int) -> int:
  """How many jobs a team of a large launch does: all blocks run at once, or in as few waves as can be. Floats take twice the registers, and what a
  vector of so many units leaves of shared memory is for the jobs' sums. teams, block_warps: of a block"""
  if part.integer: at_once, most = AT_ONCE, TURNS
  else:
    left = target.shared_bytes - (FloatVectors.nbytes(units) if stages_floats(target, units) else 0) - MANY_WARPS * 4   # beside the sums of squares
    at_once, most = AT_ONCE // 2, min(left // (MANY_WARPS * ROWS * 4), TURNS)
  a_turn = at_once // block_warps * teams   # jobs of the blocks that run at once
  return -(-jobs // (a_turn * -(-jobs // (a_turn * most))))

def turns_of_parts(parts:Sequence[MatvecPart], layouts:Sequence[ThreadLayout], block_warps:int) -> list[int]:
  """… where a large launch has several parts: all blocks run at once, and what the one that reads most reads is as little as can be. Where results
  are stored as int8, a block has whole EIGHTs."""
  at_once = AT_ONCE if all(part.integer for part in parts) else AT_ONCE // 2
  eights = [EIGHT // math.gcd(EIGHT, layout.teams * part.finish.count) if isinstance(part.finish, CodesOut) else 1
            for part, layout in zip(parts, layouts)]
  a_turn = [part.nbytes * layout.teams * eight // part.jobs for part, layout, eight in zip(parts, layouts, eights)]
  for nbytes in sorted(turn * own for turn in range(1, TURNS + 1) for own in a_turn):
    turns = [max(nbytes // own, 1) * eight for own, eight in zip(a_turn, eights)]
    if sum(-(-part.jobs // (layout.teams * turn)) for part, layout, turn in zip(parts, layouts, turns)) * block_warps <= at_once: break
  return turns

def stores_codes(target:Target, segments:Sequence[int], jobs:int, results:int, items:int=1, copies:bool=False, making:int=0,
                 chosen:bool=False) -> bool:
  """Whether a launch of so many jobs, each with so many results, can store them as int8: a block has whole EIGHTs. copies: it reads a Rounded;
  making: the threads that make its vector; chosen: its rows are"""
  if target.dot4 is None or jobs * results % EIGHT: return False
  if items == 1 and not copies and not chosen and not making and large_warps(target, sum(segments), jobs, True): return True   # see turns_of_parts
  return thread_layout(segments, target.lanes, items * jobs, copies=copies, large=making // target.lanes).teams * results % EIGHT == 0

class LaneUnit(NamedTuple):
  """A unit of every row that a lane takes"""
  segment: int
  start: int                   # of the segment, in units of the vector
  unit: UOp                    # in the segment; any unit where `inside` is false
  inside: UOp|None             # whether the segment has this unit; None: for every lane
  @property
  def number(self) -> UOp: return self.start + self.unit   # in the vector

def lane_units(segments:Sequence[int], span:int, lane:UOp) -> list[LaneUnit]:
  """A team's lanes take neighbouring units, step by step"""
  units, start = [], 0
  for segment, length in enumerate(segments):
    for first in range(0, length, span):
      unit, inside = first + lane, None if first + span <= length else first + lane < length
      units.append(LaneUnit(segment, start, safe_index(unit, inside), inside))
    start += length
  return units

def both(first:UOp|None, second:UOp|None) -> UOp|None:
  """Whether two conditions hold; None always does"""
  if first is None or second is None: return second if first is None else first
  return first & second

class Threads(NamedTuple):
  """Where a part runs"""
  block: UOp                   # of the part's, all groups of tokens together
  thread: UOp                  # of the block
  threads: int                 # of the block; those that the part's layout leaves over do no job
  slot: int                    # the part's first: two for the vectors, one for the sums of their squares, one for a team's warps,
                               # one for the results that it stores as int8

# ---- a launch ----

class ExtraStores(NamedTuple):
  """A small job beside: of all blocks, behind their products, or of `blocks` of its own along gidx0, the first ones"""
  of: Callable[[UOp, UOp, int, UOp], list[UOp]]   # (block, thread, threads, wait_zero) -> stores. block: of all groups of tokens, or of its own
  blocks: int = 0
  there: Callable[[UOp], UOp] = lambda block: UOp.const(True)   # whether such a block has something to do

  def in_own_blocks(self, target:Target, number:int, block:UOp, thread:UOp, threads:int) -> UOp:
    """The stores, in a branch of that number"""
    loop, zero = branch(number, (block < self.blocks) & self.there(block))
    return UOp.group(*self.of(block + zero, thread, threads, pdl_wait(target, zero))).end(loop)

class LastBlock(NamedTuple):
  """What the last of a part's blocks does, behind all of them: it sees what these have stored, by early_load.
  count: where they are counted, see is_last_block; of(thread, threads, slot) -> stores. slot: of shared memory, the first that is free"""
  count: UOp
  of: Callable[[UOp, int, int], list[UOp]]

  def stores(self, target:Target, number:int, before:list[UOp], blocks:int, inside:UOp, thread:UOp, threads:int) -> UOp:
    """… in a branch of that number, behind the stores `before`. inside: whether the block is one of so many"""
    first, barrier, slot = thread.eq(0), UOp(Ops.BARRIER, src=tuple(before)), number * SLOTS
    flag, last = local(1, dtypes.uint32, slot), is_last_block(target, self.count.after(barrier), blocks, first & inside)
    flag = flag.after(UOp(Ops.BARRIER, src=(flag[UOp.const(0).valid(first)].store(last),)))
    loop, zero = branch(number, flag[0].load() > 0)
    return UOp.group(*self.of(thread + zero, threads, slot + 1)).end(loop)

class Choice(Protocol):
  """What a part's rows are chosen by. early: it is made of what was written two launches back, before the wait (see pdl_wait)"""
  early: bool
  def constants(self, thread:UOp, threads:int) -> list[UOp]:
    """The loads of what no kernel writes"""
  def barrier(self, thread:UOp, threads:int, wait_zero:UOp, before:list[UOp]) -> UOp:
    """The barrier behind which the rows are known. The first of those that it takes has the sources `before`."""

def matvec(target:Target, operand:Operand, parts:Sequence[MatvecPart], extra_stores:ExtraStores|None=None, choice:Choice|None=None,
           items:int=1, trigger_last:bool=False, last:LastBlock|None=None) -> list[UOp]:
  """The stores of a launch over gidx0, each part in blocks of its own, those of all groups of tokens side by side: they share what they read.
  items: how many times a token runs all this, by gidx1, which is the caller's, in operand and parts. Where the caller's gidx1 numbers tokens too,
  the layout, and with it the order of sums, is still that of one token alone.
  choice, trigger_last (see pdl_wait), and extra_stores that have no blocks of their own, are for a launch of one part; last, of the first part's
  blocks, for one of several."""
  making, first = operand.made.threads if operand.made is not None else 0, parts[0]
  stores_int8 = any(isinstance(part.finish, CodesOut) for part in parts)
  staged = operand.codes is None and operand.rounded is None and (items == 1 and choice is None or not stores_int8)
  in_parts = len(parts) > 1 or stores_int8
  large = 0
  if staged and (first.nbytes or not in_parts):
    large = large_warps(target, operand.units, items * max(part.jobs * max(part.rows // ROWS, 1) for part in parts),
                        all(part.integer for part in parts))
  layouts = [thread_layout(operand.segments, target.lanes, items * part.jobs, operand.codes is not None, operand.rounded is not None, part.steps,
                           making // target.lanes or large, part.many) for part in parts]
  threads = max(making, *(layout.threads for layout in layouts))
  coded_units = max(-(-operand.units // layout.span) for layout in layouts) if operand.codes is not None else 0
  columns = columns_of(target, operand, parts, threads // target.lanes, coded_units)
  turns = [1 for _ in parts]
  if large and in_parts: turns = turns_of_parts(parts, layouts, large)
  elif large and operand.tokens == 1 and operand.made is None and choice is None:   # of several tokens a block has work enough beside its loads
    turns = [turns_of(target, first, items * first.jobs, layouts[0].teams, large, operand.units)]
  blocks = [-(-part.jobs // (layout.teams * turn)) * group_count(operand.tokens, columns) for part, layout, turn in zip(parts, layouts, turns)]
  start = 0 if extra_stores is None else extra_stores.blocks
  block, thread = UOp.special(start + sum(blocks), "gidx0"), UOp.special(threads, "lidx0")
  if len(parts) == 1 and start == 0:
    return Part(target, operand, first, layouts[0], columns, Threads(block, thread, threads, 0), turns[0], trigger_last).stores(extra_stores, choice)
  assert choice is None and not trigger_last and (extra_stores is None or start)
  stores = [] if extra_stores is None else [extra_stores.in_own_blocks(target, len(parts), block, thread, threads)]
  for number, (part, layout, count, turn) in enumerate(zip(parts, layouts, blocks, turns)):
    loop, zero = branch(number, (block >= start) & (block < start + count))
    own = Threads(block - start + zero, thread, threads, number * SLOTS)
    stores.append(UOp.group(*Part(target, operand, part, layout, columns, own, turn).stores()).end(loop))
    start += count
  if last is not None: stores = [last.stores(target, len(parts) + 1, stores, blocks[0], block < blocks[0], thread, threads)]
  return stores

def spread_sums(target:Target, values:list[UOp], lane:UOp, lanes:int) -> tuple[list[UOp], UOp, UOp]:
  """The sum of each value over `lanes` neighbouring lanes, a power of two, spread over those lanes: (the sums that a lane has, neighbours, the number
  of the first, whether the lane is the first that has them). Half of the sums go to half of the lanes as long as there are halves: fewer shuffles
  than group_sum of each, and the same additions."""
  count = len(values)
  while len(values) % 2 == 0 and lanes > 1:
    lanes, half = lanes // 2, len(values) // 2
    upper = (lane // lanes % 2).eq(1)
    values = [upper.where(b, a) + shuffle(target, upper.where(a, b), lanes) for a, b in zip(values[:half], values[half:])]
  return [group_sum(target, value, lanes) for value in values], lane // lanes * len(values) % count, (lane % lanes).eq(0)

class SquareSums:
  """The sums of the squares of a block's vectors. `stores` write each warp's to shared memory, behind a barrier that follows they are to be read."""
  def __init__(self, target:Target, columns:list[UOp], thread:UOp, threads:int, slot:int):
    self.warps, self.count = threads // target.lanes, len(columns)
    self.shared = local(self.warps * self.count, dtypes.float, slot)
    lane = thread % target.lanes
    own, first, is_first = spread_sums(target, columns, lane, target.lanes)
    place = thread // target.lanes * self.count + first
    self.stores = [self.shared[(place + i).valid(is_first)].store(value) for i, value in enumerate(own)]
  def of_column(self, column:UOp, barrier:UOp) -> UOp:
    shared = self.shared.after(barrier)
    return sum_in_order(shared[warp * self.count + column].load() for warp in range(self.warps))

Weights = list[list[Unit]]   # of each row, each of the lane's units

def loads_of(nodes:Iterable[UOp]) -> list[UOp]:
  """The loads from device memory that nodes are made of"""
  return [node for node in UOp.sink(*nodes).toposort() if node.op is Ops.LOAD and node.src[0].src[0].addrspace is AddrSpace.GLOBAL]

def global_loads(weights:Weights) -> list[UOp]: return loads_of(register for row in weights for unit in row for register in unit.registers())

def code_pieces(loads:list[UOp], first_alone:bool=False) -> list[dict[int, UOp]]:
  """Where words of codes are loaded from, by 16 bytes: {a word's number: its place}. first_alone: of the first plane"""
  pieces, places = dict[tuple[UOp, UOp, int], dict[int, UOp]](), [load.src[0] for load in loads if load.dtype == dtypes.uint32]
  for place in places:
    if first_alone and place.src[0] is not places[0].src[0]: continue
    index, first = place.src[1].pop_const()
    pieces.setdefault((place.src[0], index, first // 4), {})[first % 4] = place
  return list(pieces.values())

class TeamSums(NamedTuple):
  """What a thread has when a job is done"""
  sums: list[UOp]              # of each row
  column: UOp
  team: UOp
  is_first: UOp                # of the threads that have them

class Part:
  """A part of a launch, put together: the phases at the head of the file, a method each"""
  def __init__(self, target:Target, operand:Operand, part:MatvecPart, layout:ThreadLayout, columns:int, at:Threads, turns:int=1,
               trigger_last:bool=False):
    self.target, self.operand, self.part, self.layout, self.turns, self.trigger_last = target, operand, part, layout, turns, trigger_last
    self.block_of_all, self.thread, self.threads, self.slot = at
    groups = group_count(operand.tokens, columns)
    self.block, self.group = self.block_of_all // groups, TokenGroup(operand.tokens, columns, self.block_of_all % groups)
    self.tokens = [self.group.token(column) for column in range(columns)]
    self.team, self.lane = self.thread // layout.span, self.thread % layout.span
    self.lane_units = lane_units(operand.segments, layout.span, self.lane)

  def stores(self, extra_stores:ExtraStores|None=None, choice:Choice|None=None) -> list[UOp]:
    """All phases in order"""
    if choice is None or choice.early:
      weights, wait_zero = self.prefetch() if choice is None else self.prefetch_chosen(choice)
      vectors, squares, staged = self.stage(self.hold(wait_zero))
      late, asked = self.behind_vector(staged)
      weights += late
      # the loads are sources too: they are issued before it, not where they are used
      barrier = UOp(Ops.BARRIER, src=(*staged, *global_loads(weights), *asked))
    else:
      wait_zero = self.wait(*self.norm_loads(), *choice.constants(self.thread, self.threads))
      vectors, squares, staged = self.stage(wait_zero)
      barrier = choice.barrier(self.thread, self.threads, wait_zero, staged)
      weights = self.load(wait_zero, gated=False)
    vectors.after(barrier)
    stores = self.finish(weights, vectors, squares, barrier, wait_zero, gated=choice is None)
    return stores + (extra_stores.of(self.block_of_all, self.thread, self.threads, wait_zero) if extra_stores else [])

  def finish(self, weights:Weights, vectors:SharedVectors, squares:SquareSums|None, barrier:UOp, wait_zero:UOp, gated:bool=True) -> list[UOp]:
    """The stores of the products with what is staged behind the barrier. gated: as for load"""
    stores, beside, out = [], [], self.part.finish
    teams = self.layout.teams * self.turns
    if isinstance(out, CodesOut): codes = local(teams * self.group.columns * out.count, dtypes.float, self.slot + 4)
    for sums, column, team, is_first in self.reduce(self.products(weights, vectors, gated), vectors, wait_zero):
      factor, (job, inside) = self.factor(squares, column, barrier, wait_zero), self.job(team)
      if factor is not None: sums = [value * factor for value in sums]
      writes = both(both(is_first, inside), self.group.inside(column))
      if isinstance(out, CodesOut):
        place = (column * teams + team) * out.count
        stores += [codes[(place + i).valid(both(is_first, inside))].store(value) for i, value in enumerate(out.values(sums, job, wait_zero))]
      else: stores += out(sums, self.group.token(column), job, writes, wait_zero)
      if self.part.factors is not None and factor is not None:
        beside.append(self.part.factors[self.group.token(column).valid(writes & job.eq(0))].store(factor))
    if isinstance(out, CodesOut): stores = self.code_stores(out, codes.after(UOp(Ops.BARRIER, src=tuple(stores))))
    return stores + beside

  def job(self, team:UOp) -> tuple[UOp, UOp|None]:
    """A team's job, and whether there is one. In later turns teams have higher numbers"""
    teams, jobs = self.layout.teams * self.turns, self.part.jobs
    job = self.block * teams + team
    return job, both(team < teams if self.layout.threads < self.threads else None, job < jobs if jobs % teams else None)

  def code_stores(self, out:CodesOut, values:UOp) -> list[UOp]:
    """The results of the block's jobs as int8: a thread takes EIGHT neighbours"""
    teams, target = self.layout.teams * self.turns, self.target
    eights = teams * out.count // EIGHT
    assert teams * out.count % EIGHT == 0, "see stores_codes"
    number = self.thread % eights
    column, first = (self.thread // eights).minimum(self.group.columns - 1), self.block * teams + number * EIGHT // out.count
    own = [values[(column * eights + number) * EIGHT + i].load() for i in range(EIGHT)]
    words, scale = int8_words(target, own, lambda largest: largest)
    place, vector = out.number(first), out.vector(self.group.token(column))
    unit, eight = place // UNIT, place % UNIT // EIGHT
    inside = self.thread < eights * self.group.columns
    if self.part.jobs % teams: inside = inside & (first < self.part.jobs)
    inside = both(inside, self.group.inside(column))
    word = ((vector * 2 + eight // 2) * out.units + unit) * 4 + eight % 2 * 2
    return [*(out.words[(word + i).valid(inside)].store(value) for i, value in enumerate(words)),
            out.scales[((vector * out.units + unit) * 4 + eight).valid(inside)].store(scale)]

  def rounded_stores(self, staged:list[StagedWord]) -> list[UOp]:
    """What the first block has staged, but for 1/rms"""
    assert self.part.rounded is not None
    (words, scales), stores, units = self.part.rounded, [], self.operand.units
    for column, number, word, scale, half_sum in staged:
      vector, j, unit = self.group.token(column), number % FLOAT4_OF_UNIT, number // FLOAT4_OF_UNIT
      is_first = self.block.eq(0)   # a vector that is twice among the columns is the same
      place = (vector * units + unit) * 3
      stores += [words[(vector * (units * FLOAT4_OF_UNIT) + number).valid(is_first)].store(word),
                 scales[place.valid(is_first & j.eq(0))].store(scale),
                 scales[(place + 1 + j // 4).valid(is_first & (j % 4).eq(0))].store(half_sum)]
    return stores

  # ---- weights ----

  def wait(self, *loads:UOp) -> UOp: return pdl_wait(self.target, *loads, trigger_last=self.trigger_last)

  def hold(self, wait_zero:UOp) -> UOp:
    """What a single vector is read behind: the wait, and what the epilogue reads, which the compiler would have in front of the launch's end. Blocks
    that take turns hide it"""
    early, layout = self.part.early, self.layout
    if early is None or self.group.columns > 1 or takes_turns(self.part.jobs, layout.warps) or self.target.issued is None: return wait_zero
    team = self.team if layout.warps == 1 else self.thread.minimum(layout.teams - 1)
    return opaque_zero(f"0; {self.target.issued}", *early(self.group.token(0), self.job(team)[0], wait_zero))

  def load(self, wait_zero:UOp|None, gated:bool=True, turn:UOp|int=0) -> Weights:
    """The lane's units of the job's rows; without wait_zero, only those of matrices that are known. gated: zeros where there is no such unit or job.
    Else whatever can be read: an index that was chosen depends on all that is staged, and tinygrad would take a gate for true in all of that."""
    job, inside = self.job(self.team + turn * self.layout.teams)
    there = None if self.part.piece > 4 else inside   # halves of another job in place of zeros: what so many conditions take is spilled
    weights:Weights = []
    for row in self.part.rows_of(safe_index(job, inside)):
      weights.append([])
      for place in self.lane_units:
        matrix, number = row[place.segment]
        if isinstance(matrix, DeferredMatrix):
          if wait_zero is None: continue
          matrix = matrix.of(wait_zero)
        weights[-1].append(matrix(number, place.unit, both(there, place.inside) if gated else None))
    return weights

  def prefetch(self) -> tuple[Weights, UOp]:
    """The weights, and wait_zero. Whatever no other kernel decides is loaded before the wait, but for late_rows."""
    known, made = self.load(None), self.operand.made
    known = known[:len(known) - self.late_rows]
    wait_zero = self.wait(*self.norm_loads(), *(made.constants(self.tokens) if made is not None else ()), *global_loads(known))
    complete = all(len(units) == len(self.lane_units) for units in known)
    return known if complete else self.load(wait_zero), wait_zero

  @property
  def runs_ahead(self) -> bool:
    """Whether the block, one of a large launch on codes, asks for more weights than its lanes have"""
    return self.turns > 1 and self.part.integer and self.target.fetch is not None
  @property
  def late_rows(self) -> int:
    """A job's rows whose weights are asked for behind the vector: what a thread stages of a wide one is to come soon"""
    return 1 if self.runs_ahead and self.operand.units >= WIDE_VECTOR else 0

  def behind_vector(self, staged:list[UOp]) -> tuple[Weights, list[UOp]]:
    """The weights of the last late_rows, and zeros, known when those of the second turn are asked for: where there are late_rows, and jobs have
    MANY_ROWS, its first plane alone. All this stands behind the loads of the vector, which would wait for it, and keeps the memory busy while that is
    staged."""
    if not self.runs_ahead: return [], []
    before = loads_of(staged)
    zero = opaque_zero(f"0; {self.target.issued}", *before)
    late = self.load(None, turn=zero)[self.part.rows - self.late_rows:]
    second = global_loads(self.load(None, gated=False, turn=1 + zero))
    pieces = code_pieces([load for load in second if load not in before], first_alone=self.late_rows > 0 and self.part.rows >= MANY_ROWS)
    return late, [fetch(self.target, piece[min(piece)]) for piece in pieces]

  def prefetch_chosen(self, choice:Choice) -> tuple[Weights, UOp]:
    """The weights, and wait_zero, where the choice is made before the wait. What it does not decide is asked for before it is made."""
    zero, known = UOp.const(0), global_loads(self.load(None, gated=False))
    choice.barrier(self.thread, self.threads, zero, [*choice.constants(self.thread, self.threads), *known])
    weights = self.load(zero, gated=False)
    return weights, self.wait(*self.norm_loads(), *global_loads(weights))

  # ---- the vectors ----

  def shared_vectors(self, wait_zero:UOp) -> SharedVectors:
    kind, units = vectors_of(self.target, self.operand, self.part.integer), self.operand.units
    if kind is RoundedVectors: return RoundedVectors(self.target, self.operand, self.group, wait_zero, self.slot)
    if kind is CodedVectors: return CodedVectors(self.target, self.operand, self.group, wait_zero)
    if kind is Int8Vectors: return Int8Vectors(self.target, units, self.group.columns, self.slot, self.part.rows)
    if kind is FloatVectors: return FloatVectors(units, self.group.columns, self.slot, self.part.piece)
    return DeviceVectors(self.operand, self.group, wait_zero, self.part.piece)

  def stage(self, wait_zero:UOp) -> tuple[SharedVectors, SquareSums|None, list[UOp]]:
    """The vectors, the sums of their squares where there is a norm, and the stores that make both"""
    vectors, stores, squares = self.shared_vectors(wait_zero), [], []
    if self.operand.codes is not None: return vectors, None, []
    if self.operand.made is not None:
      made = self.operand.made.load4(self.tokens, self.thread, self.threads, wait_zero, self.slot + 2)   # they have no norm
    for column in range(self.group.columns):
      own, of_column = self.stage_column(vectors, column, wait_zero, None if self.operand.made is None else made[column])
      stores += of_column
      squares.append(own)
    if not self.operand.sums_squares: return vectors, None, stores
    if self.part.rounded is not None and isinstance(vectors, Int8Vectors): stores += self.rounded_stores(vectors.staged)
    sums = SquareSums(self.target, [sum_in_order(own) for own in squares], self.thread, self.threads, self.slot + 2)
    return vectors, sums, [*stores, *sums.stores]

  def staged_numbers(self) -> list[tuple[UOp, UOp|None]]:
    """The float4 that the thread stages, and whether it is the first that does"""
    n_float4, numbers = self.operand.units * FLOAT4_OF_UNIT, []
    for first in range(0, n_float4, self.threads):
      number, inside = self.thread + first, None
      if first + self.threads > n_float4:
        inside = number < n_float4
        number = inside.where(number, n_float4 - FLOAT4_OF_UNIT + self.thread % FLOAT4_OF_UNIT)   # the rest stage the last unit again
      numbers.append((number, inside))
    return numbers

  def norm_loads(self) -> list[UOp]:
    """The weights of the norm that the thread stages with: no kernel writes them, and they are far away"""
    return [] if self.operand.norm is None else loads_of(weight for number, _ in self.staged_numbers() for weight in self.operand.norm[0](number))

  def stage_column(self, vectors:SharedVectors, column:int, wait_zero:UOp, made:Load4|None) -> tuple[list[UOp], list[UOp]]:
    """The squares of the numbers of a vector that the thread stages, and the stores. made: the vector, if the block has made it"""
    operand, token = self.operand, self.group.token(column)
    if made is not None: return [], [store for number, _ in self.staged_numbers() for store in vectors.stage(column, number, made(number))]
    squares, stores = [], []
    for number, inside in self.staged_numbers():
      if operand.sums_squares:
        own = [value * value for value in operand.values(token, number, wait_zero)]
        squares += own if inside is None else [inside.where(square, 0.0) for square in own]
      stores += vectors.stage(column, number, operand.weighted(token, number, wait_zero) if operand.rounded is None else [])
    return squares, stores

  def factor(self, squares:SquareSums|None, column:UOp, barrier:UOp, wait_zero:UOp) -> UOp|None:
    """1/rms of a column's vector, a factor of the rows' products; None: there is no norm"""
    if self.operand.factor is not None: return self.operand.factor(self.group.token(column), wait_zero)
    if squares is None: return None
    assert self.operand.norm is not None
    return (squares.of_column(column, barrier) * (1.0 / (self.operand.units * UNIT)) + self.operand.norm[1]).rsqrt()

  # ---- products ----

  def products(self, weights:Weights, vectors:SharedVectors, gated:bool) -> list[list[UOp]]:
    """Of each column, each row's product with its vector, as far as the lane has it. gated: as for load"""
    def of_column(column:int) -> list[UOp]:
      dots = [vectors.read(column, place) for place in self.lane_units]
      def product(place:LaneUnit, dot:Callable[[Unit], UOp], unit:Unit) -> UOp:
        return dot(unit) if gated or place.inside is None else place.inside.where(dot(unit), 0.0)
      return [sum_in_order(map(product, self.lane_units, dots, row)) for row in weights]
    return [of_column(column) for column in range(self.group.columns)]

  def sums_in_lanes(self, columns:list[list[UOp]]) -> list[TeamSums]:
    """The sums over a team that is within a warp. Halves of the rows part among lanes, and then those of the columns; the lanes with the first rows
    get the others"""
    lanes, count, rows = self.layout.lanes, len(columns), len(columns[0])
    halves, lane = rows & -rows, self.lane % lanes   # a power of two
    alike = rows // halves
    values = [column[half * alike + i] for half in range(halves) for column in columns for i in range(alike)]
    own, first, is_first = spread_sums(self.target, values, lane, lanes)
    width = min(len(own) // alike, count)   # columns that a lane has, and of their rows
    held = len(own) // (alike * width)
    apart = lanes * held // halves
    sums = own + [shuffle(self.target, value, i * apart) for i in range(1, halves // held) for value in own]
    def of_column(i:int) -> list[UOp]: return [sums[(half * width + i) * alike + j] for half in range(halves) for j in range(alike)]
    has_all = lane.eq(0) if width == count else is_first & (lane < apart)
    return [TeamSums(of_column(i), first // alike % count + i, self.team, has_all) for i in range(width)]

  def reduce(self, columns:list[list[UOp]], vectors:SharedVectors, wait_zero:UOp) -> list[TeamSums]:
    """The sums over a team, of the first turn's products and of those of the others. Where it spans several warps, or does several jobs, they meet in
    shared memory, and a thread a column and a job goes on."""
    lanes, warps, teams = self.layout.lanes, self.layout.warps, self.layout.teams * self.turns
    count, rows = len(columns), len(columns[0])
    if warps == self.turns == 1: return self.sums_in_lanes(columns)
    shared, warp = local(self.threads // lanes * self.turns * count * rows, dtypes.float, self.slot + 3), self.lane // lanes
    def place(team:UOp, warp:UOp|int) -> UOp: return (team * warps + warp) * (count * rows)
    def store(shared:UOp, columns:list[list[UOp]], turn:UOp|int=0) -> list[UOp]:
      own, first, is_first = spread_sums(self.target, [value for column in columns for value in column], self.lane % lanes, lanes)
      return [shared[(place(self.team + turn * self.layout.teams, warp) + first + i).valid(is_first)].store(value) for i, value in enumerate(own)]
    stores = store(shared, columns)
    if self.turns > 1:
      turn = UOp.range(self.turns - 1, TURN_LOOP + self.slot) + 1
      weights = self.load(wait_zero, turn=turn)
      stores = [UOp.group(*store(shared.after(*stores), self.products(weights, vectors, gated=True), turn)).end(turn.src[0])]
    shared, team, column = shared.after(UOp(Ops.BARRIER, src=tuple(stores))), (self.thread // count).minimum(teams - 1), self.thread % count
    sums = [sum_in_order(shared[place(team, warp) + column * rows + row].load() for warp in range(warps)) for row in range(rows)]
    return [TeamSums(sums, column, team, self.thread < teams * count)]

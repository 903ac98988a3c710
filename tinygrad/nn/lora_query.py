"""The queries of one token's heads, from q_a's output, and its row of the cache, in one launch: what norm_linear makes of q_b, and
mla_attention.latent_query of that, in two.

  [q_nope | q_rope] = q_b·RMSNorm(q_a's output), of a head;  its query = [k_b·q_nope | RoPE(q_rope)]

A launch of one token lasts as long as its loads take to come and its barriers to pass, whatever it reads. So a head has several blocks, each of which
makes all of q_nope for itself and multiplies a share of k_b's rows with it. Of a block:

  weights = the thread's units of q_b's rows and of k_b's   # asked for
  wait until the kernels before are done
  shared = x as int8; barrier                               # see matvec.py, whose parts these are
  q_nope = q_b·x -> shared memory; barrier
  shared = q_nope as int8; barrier
  q_latent = k_b·q_nope

The rotated rows of all heads have blocks of their own, and so has the cache's row. q_nope is not stored.
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import Callable, NamedTuple
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import split_kv
from tinygrad.nn.intrinsics import Target, pdl_wait, target_of
from tinygrad.nn.kernel import MULTIPROCESSORS, SLOTS, UNIT, Matrix, Norm, Rope, Weight, branch, empty, launch, load4, local, position_of, rotated
from tinygrad.nn.latent_cache import CacheRow, Pages, cache_row
from tinygrad.nn.matvec import MatvecPart, Operand, Part, ThreadLayout, Threads, global_loads, linear_part
from tinygrad.nn.step import Step
from tinygrad.uop.ops import Ops

THREADS = 256                  # of a block
MOST_BLOCKS = MULTIPROCESSORS  # of the launch: all run at once
MOST_SHARES = 8                # blocks of a head
HELD_WORDS = 184               # of weights, that a thread asks for before it waits
QUERY, ROTATED, ROW = range(3) # the kinds of blocks

class QueryWeights(NamedTuple):
  """What makes the heads' queries of q_a's output"""
  norm: Norm
  q_b: Weight      # (H·(nope+R), in)

class Teams(NamedTuple):
  """How the threads of a block share rows"""
  lanes: int   # of a team
  rows: int    # of a job, of which each team has one

  @staticmethod
  def of(target:Target, rows:int, units:int) -> Teams:
    """Those whose lanes take the fewest units, and of several such the widest. units: of a row"""
    def at(lanes:int) -> Teams: return Teams(lanes, next(count for count in range(-(-rows * lanes // THREADS), rows + 1) if rows % count == 0))
    return min(map(at, (lanes for lanes in (32, 16, 8, 4, 2) if lanes <= target.lanes)), key=lambda teams: teams.rows * -(-units // teams.lanes))

  @property
  def layout(self) -> ThreadLayout: return ThreadLayout(self.lanes, 1, THREADS // self.lanes)

@dataclass(frozen=True)
class QueryLaunch:
  """What the code depends on"""
  target: Target
  heads: int     # H
  latent: int    # L
  nope: int      # numbers of a head without position
  turned: int    # R, those that are rotated
  width: int     # of q_a's output
  shares: int    # blocks of a head

  @staticmethod
  def of(target:Target, q_b:Weight, k_b:Weight) -> QueryLaunch|None:
    """With as many blocks a head as run at once and have work for their threads. None: there are too many heads, the weights that a block asks for
    have no room in its registers, or there are no whole units"""
    (heads, latent, nope), (rows, width) = k_b.shape, q_b.shape
    turned = rows // heads - nope
    if target.wait is None or target.dot4 is None or not (q_b.integer and k_b.integer) or nope % UNIT or width % UNIT or turned % 2: return None
    def of_shares(shares:int) -> QueryLaunch: return QueryLaunch(target, heads, latent, nope, turned, width, shares)
    def suits(launch:QueryLaunch) -> bool:
      if latent % launch.shares or launch.blocks > MOST_BLOCKS: return False
      held = nope * q_b.nbytes // rows + launch.share * k_b.nbytes // (heads * latent)
      has_work = launch.shares == 1 or launch.share * (nope // UNIT) >= THREADS
      return has_work and held <= THREADS * HELD_WORDS * 4
    return next((launch for launch in map(of_shares, range(MOST_SHARES, 0, -1)) if suits(launch)), None)

  @property
  def share(self) -> int:
    """Rows of k_b, of a block"""
    return self.latent // self.shares
  @property
  def query_blocks(self) -> int: return self.heads * self.shares
  @property
  def rotated_jobs(self) -> int: return self.heads * self.turned // 2
  @property
  def rotated_layout(self) -> ThreadLayout: return Teams.of(self.target, self.nope, self.width // UNIT).layout
  @property
  def row_block(self) -> int:
    """The number of the block that writes the cache's row, the last"""
    return self.query_blocks + -(-self.rotated_jobs // self.rotated_layout.teams)
  @property
  def blocks(self) -> int: return self.row_block + 1

def takes(target:Target|None, q_b:Weight, k_b:Weight, rope:Rope) -> bool:
  """Whether the launch serves a token. The numbers without position are as q_b makes them"""
  return target is not None and rope.of_queries.nope == k_b.shape[2] and QueryLaunch.of(target, q_b, k_b) is not None

def rows_part(teams:Teams, rows:int, matrix:Matrix, first:UOp, store:Callable[[UOp, UOp, UOp], UOp]) -> MatvecPart:
  """The products of a block's rows, of a matrix from `first` on. store(row, value, condition), row < rows"""
  def of_job(job:UOp) -> list[UOp]: return [job * teams.rows + i for i in range(teams.rows)]
  def finish(sums:list[UOp], token:UOp, job:UOp, is_writer:UOp, wait_zero:UOp) -> list[UOp]:
    return [store(row, value, is_writer) for row, value in zip(of_job(job), sums)]
  return MatvecPart(rows // teams.rows, lambda job: [[(matrix, first + row)] for row in of_job(job)], finish, True)

class QueryBlock:
  """A block that has a share of a head's latent query. number: its own, of all such"""
  def __init__(self, shape:QueryLaunch, buffers:dict[str, UOp], q_b:Weight, k_b:Weight, x:Operand, thread:UOp, number:UOp, place:Callable):
    self.head, units = number // shape.shares, (shape.nope // UNIT, shape.width // UNIT)
    self.q_nope = local(shape.nope, dtypes.float, 3 * SLOTS)
    first_row = number % shape.shares * shape.share
    def keep(row:UOp, value:UOp, condition:UOp) -> UOp: return self.q_nope[row.valid(condition)].store(value)
    def store(row:UOp, value:UOp, condition:UOp) -> UOp:
      q_latent = buffers["q_latent"]
      return q_latent[place(self.head, first_row + row).valid(condition)].store(value.cast(q_latent.dtype))
    def part_of(rows:int, units:int, matrix:Matrix, first:UOp, store:Callable, operand:Operand, slot:int) -> Part:
      teams = Teams.of(shape.target, rows, units)
      return Part(shape.target, operand, rows_part(teams, rows, matrix, first, store), teams.layout, 1, Threads(UOp.const(0), thread, THREADS, slot))
    def nope(_:UOp) -> Callable[[UOp], list[UOp]]: return load4(self.q_nope)
    self.first = part_of(shape.nope, units[1], q_b.matrix(buffers, "q_b"), self.head * (shape.nope + shape.turned), keep, x, 0)
    self.second = part_of(shape.share, units[0], k_b.matrix(buffers, "k_b"), self.head * shape.latent + first_row, store,
                          Operand([units[0]], nope), SLOTS)

  def stores(self) -> list[UOp]:
    first, second = self.first, self.second
    of_q_b, of_k_b = first.load(None), second.load(None)
    loads = [*global_loads(of_q_b), *global_loads(of_k_b)]
    wait_zero = first.wait(*first.norm_loads(), *loads)
    x, squares, staged = first.stage(wait_zero)
    x.after(barrier := barrier_behind(staged, loads))
    self.q_nope = self.q_nope.after(barrier_behind(first.finish(of_q_b, x, squares, barrier, wait_zero)))
    q_nope, _, staged = second.stage(UOp.const(0))
    q_nope.after(barrier := barrier_behind(staged))
    return second.finish(of_k_b, q_nope, None, barrier, wait_zero)

def rotated_part(shape:QueryLaunch, buffers:dict[str, UOp], matrix:Matrix, rope:Rope) -> MatvecPart:
  """All heads' rows that are rotated, (H, R)"""
  def row_of(row:UOp) -> list: return [(matrix, row // shape.turned * (shape.nope + shape.turned) + shape.nope + row % shape.turned)]
  def rotate(sums:list[UOp], token:UOp, row:UOp) -> list[UOp]:
    number = row % shape.turned
    return rotated(buffers, shape.turned // 2, number, sums, number >= 0, position_of(buffers, token))
  return linear_part(shape.heads * shape.turned, row_of, buffers["q_rope"], True, epilogue=rotate)

def lora_query(step:Step, q_a:Tensor, kv:Tensor, query:QueryWeights, k_b:Weight, norm:Norm, cache:Tensor,
               rope:Rope) -> tuple[Tensor, Tensor, Tensor]:
  """q_a: float32 (1, in); kv: float32 (1, L+R); k_b: (H, L, nope); norm, of kv[:L]; cache: (C, L+R) or of 8 bits -> the latent queries as split_kv
  takes them; float32 (1, H·R), their rotated parts; the cache with the token's row"""
  (q_norm, q_b), target, pages = query, target_of(k_b.device), Pages.of(cache, step.tables, k_b.shape[1])
  assert target is not None
  shape = QueryLaunch.of(target, q_b, k_b)
  assert shape is not None
  tiles, L = split_kv.uses_tensor_cores(target, pages.format), shape.latent
  def place(head:UOp, row:UOp) -> UOp: return split_kv.query_place(head, row, L) if tiles else head * L + row
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    block, thread = UOp.special(shape.blocks, "gidx0"), UOp.special(THREADS, "lidx0")
    x = Operand([shape.width // UNIT], lambda _: load4(buffers["q_a"]), (load4(buffers["q_norm"]), q_norm.eps))
    loop, zero = branch(QUERY, block < shape.query_blocks)
    queries = UOp.group(*QueryBlock(shape, buffers, q_b, k_b, x, thread, block + zero, place).stores()).end(loop)
    loop, zero = branch(ROTATED, (block >= shape.query_blocks) & (block < shape.row_block))
    part, at = rotated_part(shape, buffers, q_b.matrix(buffers, "q_b"), rope), Threads(block - shape.query_blocks + zero, thread, THREADS, 2 * SLOTS)
    turned = UOp.group(*Part(target, x, part, shape.rotated_layout, 1, at).stores()).end(loop)
    loop, zero = branch(ROW, block.eq(shape.row_block))
    row = CacheRow(target, pages, norm.eps, THREADS, slot=3 * SLOTS + 1)
    return [queries, turned, UOp.group(*cache_row(row, buffers, UOp.const(0), thread, pdl_wait(target, zero.cast(dtypes.int)))).end(loop)]
  heads = split_kv.padded(shape.heads) if tiles else shape.heads
  outs = {"q_latent": empty(q_a, 1, heads, L, dtype=dtypes.half if tiles else dtypes.float), "q_rope": empty(q_a, 1, shape.heads * shape.turned),
          "cache": cache}
  ins = {"q_a": q_a, "kv": kv, "q_norm": q_norm.weight, "norm": norm.weight, "rope": rope.table, "start": step.start, "tables": step.tables,
         **q_b.args("q_b"), **k_b.args("k_b")}
  mem = q_b.nbytes + k_b.nbytes   # a branch is out of the renderer's reach
  q_latent, q_rope, cache = launch(f"lora_query_{q_b.label}_{k_b.label}", outs, ins, body, mem)
  return q_latent, q_rope, cache

def barrier_behind(*events:list[UOp]) -> UOp: return UOp(Ops.BARRIER, src=tuple(event for some in events for event in some))

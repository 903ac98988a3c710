"""The queries of one or two tokens' heads, from q_a's output, and their rows of the cache, in one launch: what norm_linear makes of q_b, and
mla_attention.latent_query of that, in two.

  [q_nope | q_rope] = q_b·RMSNorm(q_a's output), of a head;  its query = [k_b·q_nope | RoPE(q_rope)]

A launch of few tokens lasts as long as its loads take to come and its barriers to pass, whatever it reads. So a head has several blocks, each of
which makes all of q_nope for itself and multiplies a share of k_b's rows with it. Of a block, which has all tokens:

  weights = the thread's units of q_b's rows and of k_b's   # asked for
  wait until the kernels before are done
  shared = x as int8; barrier                               # see matvec.py, whose parts these are
  q_nope = q_b·x -> shared memory; barrier
  shared = q_nope as int8; barrier
  q_latent = k_b·q_nope

The rotated rows of all heads have blocks of their own, and so has each row of the cache. q_nope is not stored.
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import Callable, NamedTuple
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import split_kv
from tinygrad.nn.intrinsics import Target, pdl_wait, target_of
from tinygrad.nn.kernel import MULTIPROCESSORS, SLOTS, UNIT, Matrix, Norm, Rope, Weight, branch, empty, launch, load4, local, position_of, rotated
from tinygrad.nn.latent_cache import CacheRow, Pages, cache_row
from tinygrad.nn.matvec import MatvecPart, Operand, Part, ThreadLayout, Threads, global_loads, is_simple, linear_part
from tinygrad.nn.step import Step
from tinygrad.uop.ops import Ops

THREADS = 256                  # of a block
MOST_BLOCKS = MULTIPROCESSORS  # of the launch: all run at once
MOST_SHARES = 8                # blocks of a head
MOST_TOKENS = 2                # of more, a K-quant's weights have no room in a thread's registers, and long vectors cost more than two launches
HELD_WORDS = 184               # of weights, that a thread asks for before it waits
SPARING_WORDS = 112            # … of one that has registers to spare
PAIR_ROOM = 128 * 128          # registers of a block of the launch before, of two tokens
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
  tokens: int    # T
  shares: int    # blocks of a head

  @staticmethod
  def of(target:Target, q_b:Weight, k_b:Weight, tokens:int) -> QueryLaunch|None:
    """With as many blocks a head as run at once and have work for their threads. None: there are too many heads or tokens, the weights that a block
    asks for have no room in its registers, or there are no whole units"""
    (heads, latent, nope), (rows, width) = k_b.shape, q_b.shape
    turned = rows // heads - nope
    if tokens > MOST_TOKENS or target.wait is None or target.dot4 is None or not (q_b.integer and k_b.integer): return None
    if nope % UNIT or width % UNIT or turned % 2: return None
    def of_shares(shares:int) -> QueryLaunch: return QueryLaunch(target, heads, latent, nope, turned, width, tokens, shares)
    def suits(launch:QueryLaunch) -> bool:
      if latent % launch.shares or launch.blocks > MOST_BLOCKS: return False
      has_work = launch.shares == 1 or launch.share * (nope // UNIT) >= THREADS
      return has_work and launch.held_words(q_b, k_b) <= HELD_WORDS
    return next((launch for launch in map(of_shares, range(MOST_SHARES, 0, -1)) if suits(launch)), None)

  def held_words(self, q_b:Weight, k_b:Weight) -> float:
    """Of weights, that a thread asks for before it waits"""
    return (self.nope * q_b.nbytes // q_b.shape[0] + self.share * k_b.nbytes // (self.heads * self.latent)) / (THREADS * 4)
  def room(self, q_b:Weight, k_b:Weight) -> int:
    """Registers that the launch leaves for others' blocks. It has none to spare for many words, or those of a K-quant"""
    spares = is_simple(q_b) and is_simple(k_b) and self.held_words(q_b, k_b) <= SPARING_WORDS
    return PAIR_ROOM if self.tokens == 2 and spares else 0
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
    """The number of the first block that writes a row of the cache. These are the last"""
    return self.query_blocks + -(-self.rotated_jobs // self.rotated_layout.teams)
  @property
  def blocks(self) -> int: return self.row_block + self.tokens

def takes(target:Target|None, q_b:Weight, k_b:Weight, rope:Rope, tokens:int) -> bool:
  """Whether the launch serves so many tokens. The numbers without position are as q_b makes them"""
  return target is not None and rope.of_queries.nope == k_b.shape[2] and QueryLaunch.of(target, q_b, k_b, tokens) is not None

def rows_part(teams:Teams, rows:int, matrix:Matrix, first:UOp, store:Callable[[UOp, UOp, UOp, UOp], UOp]) -> MatvecPart:
  """The products of a block's rows, of a matrix from `first` on. store(token, row, value, condition), row < rows"""
  def of_job(job:UOp) -> list[UOp]: return [job * teams.rows + i for i in range(teams.rows)]
  def finish(sums:list[UOp], token:UOp, job:UOp, is_writer:UOp, wait_zero:UOp) -> list[UOp]:
    return [store(token, row, value, is_writer) for row, value in zip(of_job(job), sums)]
  return MatvecPart(rows // teams.rows, lambda job: [[(matrix, first + row)] for row in of_job(job)], finish, True, rows=teams.rows)

class QueryBlock:
  """A block that has a share of a head's latent queries. number: its own, of all such"""
  def __init__(self, shape:QueryLaunch, buffers:dict[str, UOp], q_b:Weight, k_b:Weight, x:Operand, thread:UOp, number:UOp, place:Callable):
    self.head, units = number // shape.shares, (shape.nope // UNIT, shape.width // UNIT)
    self.q_nope = local(shape.tokens * shape.nope, dtypes.float, 3 * SLOTS)
    first_row = number % shape.shares * shape.share
    def keep(token:UOp, row:UOp, value:UOp, condition:UOp) -> UOp: return self.q_nope[(token * shape.nope + row).valid(condition)].store(value)
    def store(token:UOp, row:UOp, value:UOp, condition:UOp) -> UOp:
      q_latent = buffers["q_latent"]
      return q_latent[place(token, self.head, first_row + row).valid(condition)].store(value.cast(q_latent.dtype))
    def part_of(rows:int, units:int, matrix:Matrix, first:UOp, store:Callable, operand:Operand, slot:int) -> Part:
      teams = Teams.of(shape.target, rows, units)
      part, at = rows_part(teams, rows, matrix, first, store), Threads(UOp.const(0), thread, THREADS, slot)
      return Part(shape.target, operand, part, teams.layout, shape.tokens, at)
    def nope(token:UOp) -> Callable[[UOp], list[UOp]]: return load4(self.q_nope, token * shape.nope)
    self.first = part_of(shape.nope, units[1], q_b.matrix(buffers, "q_b"), self.head * (shape.nope + shape.turned), keep, x, 0)
    self.second = part_of(shape.share, units[0], k_b.matrix(buffers, "k_b"), self.head * shape.latent + first_row, store,
                          Operand([units[0]], nope, tokens=shape.tokens), SLOTS)

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
  """q_a: float32 (T, in); kv: float32 (T, L+R); k_b: (H, L, nope); norm, of kv[:L]; cache: (C, L+R) or of 8 bits -> the latent queries as split_kv
  takes them; float32 (T, H·R), their rotated parts; the cache with the tokens' rows"""
  (q_norm, q_b), target, pages, T = query, target_of(k_b.device), Pages.of(cache, step, k_b.shape[1]), step.tokens
  assert target is not None
  shape = QueryLaunch.of(target, q_b, k_b, T)
  assert shape is not None
  tiles, L = split_kv.uses_tensor_cores(target, pages.format), shape.latent
  heads = split_kv.padded(shape.heads) if tiles else shape.heads
  def place(token:UOp, head:UOp, row:UOp) -> UOp:
    return token * (heads * L) + (split_kv.query_place(head, row, L) if tiles else head * L + row)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    block, thread = UOp.special(shape.blocks, "gidx0"), UOp.special(THREADS, "lidx0")
    x = Operand([shape.width // UNIT], lambda token: load4(buffers["q_a"], token * shape.width), (load4(buffers["q_norm"]), q_norm.eps), T)
    loop, zero = branch(QUERY, block < shape.query_blocks)
    queries = UOp.group(*QueryBlock(shape, buffers, q_b, k_b, x, thread, block + zero, place).stores()).end(loop)
    loop, zero = branch(ROTATED, (block >= shape.query_blocks) & (block < shape.row_block))
    part, at = rotated_part(shape, buffers, q_b.matrix(buffers, "q_b"), rope), Threads(block - shape.query_blocks + zero, thread, THREADS, 2 * SLOTS)
    turned = UOp.group(*Part(target, x, part, shape.rotated_layout, T, at).stores()).end(loop)
    loop, zero = branch(ROW, block >= shape.row_block)
    row, token = CacheRow(target, pages, norm.eps, THREADS, slot=3 * SLOTS + 1), (block - shape.row_block).maximum(0)
    rows = UOp.group(*cache_row(row, buffers, token, thread, pdl_wait(target, zero.cast(dtypes.int)))).end(loop)
    return [queries, turned, rows]
  outs = {"q_latent": empty(q_a, T, heads, L, dtype=dtypes.half if tiles else dtypes.float), "q_rope": empty(q_a, T, shape.heads * shape.turned),
          "cache": cache}
  ins = {"q_a": q_a, "kv": kv, "q_norm": q_norm.weight, "norm": norm.weight, "rope": rope.table, "start": step.start, "tables": step.tables,
         **q_b.args("q_b"), **k_b.args("k_b")}
  mem = q_b.nbytes + k_b.nbytes   # a branch is out of the renderer's reach
  q_latent, q_rope, cache = launch(f"lora_query_{T}_{q_b.label}_{k_b.label}", outs, ins, body, mem, room=shape.room(q_b, k_b))
  return q_latent, q_rope, cache

def barrier_behind(*events:list[UOp]) -> UOp: return UOp(Ops.BARRIER, src=tuple(event for some in events for event in some))

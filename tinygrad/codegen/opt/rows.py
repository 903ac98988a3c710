"""How a GPU runs a kernel that works by rows (see schedule/indexing.py): a team of threads a row, the same threads for every step of it.

A reduction over n values: thread t adds up its share, leaves the sum in shared memory, and all threads add up the team's sums. What is stored of
the row is shared out the same way. The wheel's GROUP would give each reduction threads of its own, idle in every other step.
"""
from __future__ import annotations
import functools
from tinygrad.codegen.opt.postrange import Scheduler
from tinygrad.dtype import AddrSpace
from tinygrad.schedule.indexing import BufferizeOpts, Rows, rows_of
from tinygrad.uop.ops import AxisType, Ops, UOp, identity_element, sint

# threads of a group at least, where there are values enough, or rows
GROUP = 128
# steps over what is stored that are worth a thread
STEPS = 4

def _width(ranges:tuple[UOp, ...]) -> int: return 4 if isinstance(n := ranges[-1].src[0].ssimplify(), int) and n % 4 == 0 else 1

class Share:
  """n values, laid out over `ranges`, shared by a team: step by step, each thread takes `width` neighbouring ones"""
  def __init__(self, k:Scheduler, ranges:tuple[UOp, ...], n:sint, thread:UOp, team:int, kind:AxisType, teams:int=1):
    self.ranges = ranges
    self.width = _width(ranges)
    per = team * self.width * teams
    steps = (n + (per - 1)) // per
    self.loops = [UOp.range(steps, next(k.opt_range), kind)]
    step = self.loops[0]
    if teams > 1:
      self.loops.append(UOp.range(teams, next(k.opt_range), AxisType.GLOBAL))
      step = self.loops[1] * steps + step
    at, end = step * team + thread, n // self.width
    # a thread that has run out of values takes the last ones again, for nothing
    self.has = None if isinstance(n, int) and n % per == 0 else at < end
    self.first = (at if self.has is None else self.has.where(at, end - 1)) * self.width
  def places(self, lane:UOp|int) -> dict[UOp, UOp]:
    """Where along each range the thread's value of this lane is"""
    rest, found = self.first + lane, {}
    for r in reversed(self.ranges[1:]): found[r], rest = rest % r.src[0], rest // r.src[0]
    return found | {self.ranges[0]: rest}

def _largest_divisor(n:sint, most:int) -> int: return next(d for d in range(max(most, 1), 0, -1) if isinstance(n, int) and n % d == 0 or d == 1)

def _rows(k:Scheduler) -> tuple[Rows, UOp, tuple[UOp, ...]]|None:
  """What the kernel is by rows, its one store, and the ranges of that: none, and no END, where it stores one number"""
  if len(k.ast.src) != 1: return None
  end, = k.ast.src
  store, *ranges = end.src if end.op is Ops.END else [end]
  if store.op is not Ops.STORE: return None
  body = store.toposort()
  if any(u.op in {Ops.STAGE, Ops.STORE} for u in body if u is not store): return None
  return (r, store, tuple(ranges)) if (r := rows_of(store.src[1], tuple(ranges), body)) is not None and r.steps else None

def share_rows(k:Scheduler) -> bool:
  """Lays the kernel out by rows, in place; False, and nothing is changed, where it is no such kernel"""
  if not k.ren.has_local or not k.ren.has_shared or k.dont_use_locals or (found := _rows(k)) is None: return False
  r, team = found[0], found[0].team
  if r.inner and isinstance(n := r.sizes[-1], int): team = max(team, min(GROUP, 1 << (n // _width(r.inner) // STEPS).bit_length() >> 1))
  together = 32 if r.columns else GROUP // team              # rows of one group
  rows = [u for u in r.rows if u.arg[-1] is AxisType.GLOBAL]
  together = _largest_divisor(rows[-1].src[0].ssimplify(), together) if rows else 1
  team = min(team, max(8, 1 << (256 // together).bit_length() - 1))
  if sum(x.dtype.itemsize for x in r.reduces) * team * together > k.ren.shared_max: return False
  # neighbouring threads, which are the first local axis, read neighbours in memory
  axes = [next(k.opt_range), next(k.opt_range)]
  if r.columns: axes.reverse()
  thread = UOp.range(team, axes[0], AxisType.LOCAL)
  if together > 1: k.shift_to(rows[-1], together, AxisType.LOCAL, input_new_rng=UOp.range(together, axes[1], AxisType.LOCAL))
  r, store, ranges = _rows(k)
  local = [u for u in r.rows if u.arg[-1] is AxisType.LOCAL]
  new:dict[UOp, UOp] = {}
  for x, n in zip(r.reduces, r.sizes):
    share = Share(k, x.src[1:], n, thread, team, AxisType.REDUCE)
    def all_of(values:list[UOp]) -> UOp: return functools.reduce(lambda a, b: a.alu(x.arg[0], b), values)
    nothing = UOp.const(identity_element(x.arg[0], x.dtype), x.dtype)
    mine = all_of([x.src[0].substitute(new | share.places(i)) for i in range(share.width)])
    if share.has is not None: mine = share.has.where(mine, nothing)
    sums = mine.reduce(*share.loops, arg=x.arg).bufferize(*local, thread, arg=BufferizeOpts(None, AddrSpace.LOCAL))
    some = UOp.range(team // 8, next(k.opt_range), AxisType.REDUCE)
    new[x] = all_of([sums.index(*local, some * 8 + i) for i in range(8)]).reduce(some, arg=x.arg)
  target, ranges = store.src[0], tuple(u for u in ranges if u not in r.inner)
  if r.inner:
    # where more is stored of a row than is reduced, several teams take a part of it each, and each of them reduces all of it
    n = r.sizes[-1]
    teams = max(1, n // (team * 4 * max(STEPS, r.longest // (team * 4)))) if isinstance(n, int) else 1
    share = Share(k, r.inner, n, thread, team, AxisType.WEAK, teams)
    lane = UOp.range(share.width, next(k.opt_range), AxisType.UPCAST) if share.width > 1 else UOp.const(0)
    new |= share.places(lane)
    target = target.substitute(share.places(lane))
    if share.has is not None: target = target.replace(src=(target.src[0], target.src[1].valid(share.has)))
    ranges += (*share.loops, thread, *([lane] if share.width > 1 else []))
  k.ast = k.ast.replace(src=(target.store(store.src[1].substitute(new)).end(*ranges),))
  return True

"""How a GPU runs a kernel that works by rows (a softmax, a norm: schedule/indexing.py makes them): a team of threads a row, for all of its steps.

A reduction over n values: thread t adds up its share, stores the sum in shared memory, and all threads add up the team's sums. The stored values of
the row are shared out the same way. The wheel's GROUP would give each reduction threads of its own, idle in every other step.
heuristic.py, the caller, takes over where `share_rows` returns False.
"""
from __future__ import annotations
import functools
from tinygrad.codegen.opt.postrange import Scheduler
from tinygrad.dtype import AddrSpace
from tinygrad.schedule.indexing import BufferizeOpts, Rows, rows_of
from tinygrad.uop.ops import AxisType, Ops, UOp, identity_element, sint

GROUP = 128  # threads of a block at least, where there are values or rows enough
STEPS = 4    # stores that a thread does at least

def _width(ranges:tuple[UOp, ...]) -> int: return 4 if isinstance(n := ranges[-1].src[0].ssimplify(), int) and n % 4 == 0 else 1

class Share:
  """n values, indexed by `ranges`, shared by `teams` teams of threads. In each step of `loops` a thread takes `width` neighbouring values, from
  `first` on. has: whether the thread still has values in this step (None: always)"""
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
    index, end = step * team + thread, n // self.width
    # a thread that has run out of values reads the last ones again, and they are not used
    self.has = None if isinstance(n, int) and n % per == 0 else index < end
    self.first = (index if self.has is None else self.has.where(index, end - 1)) * self.width
  def places(self, lane:UOp|int) -> dict[UOp, UOp]:
    """range: the index along it of the thread's value number `lane` (0 … width - 1)"""
    rest, places = self.first + lane, {}
    for r in reversed(self.ranges[1:]):
      places[r] = rest % r.src[0]
      rest = rest // r.src[0]
    return places | {self.ranges[0]: rest}

def _largest_divisor(n:sint, most:int) -> int: return next(d for d in range(max(most, 1), 0, -1) if isinstance(n, int) and n % d == 0 or d == 1)

def _rows(k:Scheduler) -> tuple[Rows, UOp, tuple[UOp, ...]]|None:
  """The kernel's rows, its one store and the store's ranges: none, and no END, where it stores one number. None where it does not work by rows"""
  if len(k.ast.src) != 1: return None
  end, = k.ast.src
  store, *ranges = end.src if end.op is Ops.END else [end]
  if store.op is not Ops.STORE: return None
  body = store.toposort()
  if any(u.op in {Ops.STAGE, Ops.STORE} for u in body if u is not store): return None
  return (r, store, tuple(ranges)) if (r := rows_of(store.src[1], tuple(ranges), body)) is not None and r.steps else None

def share_rows(k:Scheduler) -> bool:
  """Lays the kernel out by rows, in place. Returns False, and changes nothing, where it does not work by rows or shared memory does not suffice"""
  if not k.ren.has_local or not k.ren.has_shared or k.dont_use_locals or (by_rows := _rows(k)) is None: return False
  r = by_rows[0]
  team = r.team
  if r.inner and isinstance(n := r.sizes[-1], int): team = max(team, min(GROUP, 1 << (n // _width(r.inner) // STEPS).bit_length() >> 1))
  together = 32 if r.columns else GROUP // team              # rows of one block
  rows = [u for u in r.rows if u.arg[-1] is AxisType.GLOBAL]
  together = _largest_divisor(rows[-1].src[0].ssimplify(), together) if rows else 1
  team = min(team, max(8, 1 << (256 // together).bit_length() - 1))
  if sum(x.dtype.itemsize for x in r.reduces) * team * together > k.ren.shared_max: return False
  # neighbouring threads, which are the first local axis, read neighbours in memory: of a row, or of a column across rows
  axes = [next(k.opt_range), next(k.opt_range)]
  if r.columns: axes.reverse()
  thread = UOp.range(team, axes[0], AxisType.LOCAL)
  if together > 1: k.shift_to(rows[-1], together, AxisType.LOCAL, input_new_rng=UOp.range(together, axes[1], AxisType.LOCAL))
  r, store, ranges = _rows(k)
  local = [u for u in r.rows if u.arg[-1] is AxisType.LOCAL]
  new:dict[UOp, UOp] = {}
  for x, n in zip(r.reduces, r.sizes):
    share = Share(k, x.src[1:], n, thread, team, AxisType.REDUCE)
    def combine(values:list[UOp]) -> UOp: return functools.reduce(lambda a, b: a.alu(x.arg[0], b), values)
    identity = UOp.const(identity_element(x.arg[0], x.dtype), x.dtype)
    mine = combine([x.src[0].substitute(new | share.places(i)) for i in range(share.width)])
    if share.has is not None: mine = share.has.where(mine, identity)
    sums = mine.reduce(*share.loops, arg=x.arg).bufferize(*local, thread, arg=BufferizeOpts(None, AddrSpace.LOCAL))
    eights = UOp.range(team // 8, next(k.opt_range), AxisType.REDUCE)
    new[x] = combine([sums.index(*local, eights * 8 + i) for i in range(8)]).reduce(eights, arg=x.arg)
  target, ranges = store.src[0], tuple(u for u in ranges if u not in r.inner)
  if r.inner:
    # where a row stores more values than it reduces, several teams store a part each, and each of them reduces the whole row
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

"""Which reductions share a kernel with what reads them: wraps the wheel's rangeify, for the plain-ops forms that no kernel of nn/ covers.

The wheel gives every reduction a kernel of its own: a norm takes two, a softmax three. Where the reductions of a row are broadcast back over
that row (x / rms(x), exp(x - max(x)) / sum), one kernel can do all of it, a team of threads a row (codegen/opt/rows.py): each step reads the row
again, as kernels of their own would, and no step's result goes through memory. So the wheel decides first. Then `fuse` puts each STAGE, which is
what the wheel realizes, back into the one kernel that reads it, where `fusion_pays`. PCONTIG set by the user leaves all to the wheel.
"""
from __future__ import annotations
import functools, math, operator
from dataclasses import dataclass
from typing import Callable
from tinygrad import wheel_module
from tinygrad.codegen.simplify import pm_load_collapse, pm_reduce_simplify
from tinygrad.device import Device
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import PCONTIG
from tinygrad.uop.ops import AxisType, Ops, PatternMatcher, UOp, UPat, gate_kernel_sink, graph_rewrite, resolve, sint
from tinygrad.uop.symbolic import symbolic

_wheel = wheel_module(__name__)
globals().update({k: v for k, v in vars(_wheel).items() if not k.startswith("__")})

SERIAL_STEPS = 64     # values of a row that a thread may read one after another: they take less than the few microseconds of a launch
MANY_ROWS = 128       # rows that keep a device busy, however long each is
CHEAP_BUFFERS = 3     # the wheel recomputes an elementwise value wherever it is read if it comes from at most so many buffers (`remove_bufferize`)
VALUES_A_THREAD = 16  # values of a row that a team's thread reads at least: with fewer, the final sum over the team outweighs the reading
TEAM = 1024           # threads of a team at most

@dataclass(frozen=True)
class Rows:
  """A kernel that works by rows: reductions over a row, whose results are read by later reductions and by the stores of the same row"""
  reduces:tuple[UOp, ...]                                  # in order: none comes before one that it reads
  rows:tuple[UOp, ...]                                     # the ranges that number the rows
  inner:tuple[UOp, ...]                                    # the stored values' ranges within a row; none where a row stores one value
  @property
  def steps(self) -> bool:
    """Whether a row takes more than one step, one after another; else the kernel is an ordinary reduction"""
    return bool(self.inner) or any(r in x.backward_slice for i, x in enumerate(self.reduces) for r in self.reduces[:i])
  @property
  def sizes(self) -> list[sint]:
    """Values of a row that each reduction reads, then the values that a row stores"""
    return [math.prod(r.src[0].ssimplify() for r in ranges) for ranges in (*(x.src[1:] for x in self.reduces), self.inner)]
  @property
  def count(self) -> sint: return math.prod(r.src[0].ssimplify() for r in self.rows)
  @property
  def columns(self) -> bool:
    """Whether neighbours in memory belong to different rows"""
    loads = {u.src[-1].get_idx() for x in self.reduces for u in x.src[0].toposort(gate=_inside) if u.op is Ops.INDEX}
    neighbours = {u for i in loads for u in i.split_uop(Ops.ADD)}
    return any(r in neighbours for r in self.rows) and not any(r in neighbours for x in self.reduces for r in x.src[1:])
  @property
  def longest(self) -> int:
    """Values of the longest reduction. Stores do not count: several teams can share a row's"""
    return max(n if isinstance(n, int) else int(n.vmax) for n in self.sizes[:-1])
  @property
  def team(self) -> int:
    """Threads a row, a power of two"""
    return min(TEAM, max(32, 1 << (self.longest // VALUES_A_THREAD).bit_length() >> 1))

def rows_of(value:UOp, ranges:tuple[UOp, ...], body:dict[UOp, None]) -> Rows|None:
  """The rows of the kernel that stores `value` over `ranges`; None where it does not work by rows. body: all nodes of the kernel, in order"""
  reduces = tuple(u for u in body if u.op is Ops.REDUCE)
  if not reduces or any(r.op is not Ops.RANGE for x in reduces for r in x.src[1:]): return None
  rows = tuple(reduces[0].ranges)
  if any(set(x.ranges) != set(rows) for x in reduces[1:]): return None     # one would be repeated in every step of another
  if any(r.arg[-1] is AxisType.REDUCE for r in rows): return None
  return Rows(reduces, rows, tuple(r for r in ranges if r.op is Ops.RANGE and r not in rows))

def fusion_pays(r:Rows, has_local:bool) -> bool:
  """Whether one kernel for these reductions is faster than a kernel each. It saves a launch each and their results' way through memory. It repeats
  nothing where a row is one team's work; where several teams share a row, each repeats at most as much as it stores. It loses the rest of the
  device, over which separate kernels would spread a long reduction; on a CPU (not has_local) it loses vectors over neighbouring rows."""
  if not r.steps: return True
  if not has_local: return not r.columns
  return r.longest // r.team <= SERIAL_STEPS or (isinstance(r.count, int) and r.count >= MANY_ROWS)

def _is_stage(u:UOp) -> bool: return u.op is Ops.STAGE and u.arg.addrspace is AddrSpace.GLOBAL
def _inside(u:UOp) -> bool: return not _is_stage(u) and u.op not in {Ops.AFTER, Ops.PARAM, Ops.BUFFER, Ops.RANGE}

def _rebuilt(value:UOp, new:dict[UOp, UOp]) -> UOp:
  """The value with nodes of its kernel replaced: new maps old to new"""
  rebuilt = dict(new)
  for u in value.toposort(gate=lambda u: u not in new and _inside(u)):
    if (src := tuple(rebuilt.get(s, s) for s in u.src)) != u.src: rebuilt[u] = u.replace(src=src)
  return rebuilt.get(value, value)

def _leaves(value:UOp) -> dict[UOp, None]:
  return dict.fromkeys(s for u in value.toposort(gate=_inside) for s in u.src if s.op in {Ops.STAGE, Ops.AFTER, Ops.PARAM})

def _roots(nodes:dict[UOp, None]) -> list[UOp]:
  """The nodes that rangeify gave a kernel each, readers first: a STAGE, the END of a store, a store of one number (it has no ranges to end)"""
  ends = {u: u.src[0] for u in nodes if u.op is Ops.END and u.src[0].op is Ops.STORE}
  ended = set(ends.values())
  return [u for u in reversed(nodes) if _is_stage(u) or u in ends or (u.op is Ops.STORE and u not in ended and not u.src[0].is_variable)]

class _Kernel:
  """A kernel, known by its root. It computes `value` over `ranges`. store: its STORE (None for a STAGE); reads: the STAGEs it reads, by the INDEX;
  removable: whether it may move into a reader; cheap: whether each reader may compute it again"""
  def __init__(self, root:UOp):
    self.root, self.ranges = root, () if root.op is Ops.STORE else root.src[1:]
    self.store = None if _is_stage(root) else root if root.op is Ops.STORE else root.src[0]
    self.removable = self.store is None and root.arg.removable and root.src[0].op not in {Ops.CONTIGUOUS, Ops.NOOP, Ops.AFTER}
    self._set(root.src[0] if self.store is None else self.store.src[1])
  def _set(self, value:UOp) -> None:
    self.value, self.body = value, value.toposort(gate=_inside)
    self.reads = {u: u.src[0] for u in self.body if u.op is Ops.INDEX and _is_stage(u.src[0])}
    self.leaves = _leaves(value)
    self.reduces = any(u.op is Ops.REDUCE for u in self.body)
    self.cheap = not self.reduces and len(self.leaves) <= CHEAP_BUFFERS
  def with_value(self, value:UOp) -> UOp:
    if self.store is None: return self.root.replace(src=(value, *self.ranges))
    return self.store.replace(src=(self.store.src[0], value)).end(*self.ranges)
  def collapse_gather(self, inlined:Callable[[UOp], UOp]) -> bool:
    """Makes a gather one load, so that it fuses into its reader. It arrives as a sum over all indices (value where index == arange) in a kernel of
    its own, which copies what is gathered; the arange arrives as a sum too. Returns whether there was one."""
    if not self.reduces or (self.leaves and not any(u.op is Ops.WHERE for u in self.body)): return False
    value = inlined(self.value)
    compared = [u for u in value.toposort(gate=_inside) if u.op is Ops.CMPNE and all(s.op is not Ops.CONST for s in u.src)]
    leaves = [s for s in _leaves(value) if s.op is not Ops.PARAM]
    if leaves and not compared: return False
    if any(not isinstance(n, int) for s in leaves for n in s.shape): return False
    # a rewrite walks down to the graph's inputs: stand-ins end it at this kernel's
    stand_in = {s: UOp.placeholder(s.shape, s.dtype, -i - 2) for i, s in enumerate(leaves)}
    value = graph_rewrite(_rebuilt(value, stand_in), symbolic + pm_reduce_simplify + pm_load_collapse, name="gathers are loads")
    if sum(u.op is Ops.REDUCE for u in value.toposort()) >= sum(u.op is Ops.REDUCE for u in self.body): return False
    self._set(_rebuilt(value, {p: s for s, p in stand_in.items()}))
    return True

def fuse(sink:UOp) -> UOp:
  """Makes gathers loads, and puts reductions into the kernel that reads them where the two work by the same rows and fusion_pays.
  sink: a graph as the wheel's rangeify leaves it. Returns the graph with fewer STAGEs."""
  nodes = sink.toposort(gate_kernel_sink)                  # what is a kernel already stays as it is
  kernels = {u: _Kernel(u) for u in _roots(nodes)}
  def inlined(value:UOp, stages:Callable[[UOp], bool]) -> UOp:
    computed = {}
    for u in value.toposort(gate=_inside):
      if u.op is Ops.INDEX and stages(s := u.src[0]):
        computed[u] = _rebuilt(inlined(kernels[s].value, stages), {r: i for r, i in zip(s.src[1:], u.src[1:]) if r.op is Ops.RANGE})
    return _rebuilt(value, computed)
  def elementwise(s:UOp) -> bool: return s in kernels and kernels[s].removable and kernels[s].cheap

  new = {root: k.with_value(k.value) for root, k in reversed(kernels.items()) if k.collapse_gather(lambda value: inlined(value, elementwise))}
  readers:dict[UOp, set[UOp]] = {s: set() for s in kernels}
  for root, k in kernels.items():
    for s in k.reads.values(): readers[s].add(root)
  for u in nodes:                                          # a reader other than an INDEX keeps its stage realized
    for s in u.src if u.op is not Ops.INDEX else (): readers.get(s, set()).add(u)

  def buffer(u:UOp) -> UOp: return u if u.op is Ops.PARAM or not u.src else buffer(u.src[0])
  written = {buffer(k.store.src[0]) for k in kernels.values() if k.store is not None}
  gone:set[UOp] = set()
  for root, k in kernels.items():
    if root in gone or not isinstance(k.value.device, str): continue
    has_local = Device[k.value.device].renderer.has_local
    members, refused = {root}, set()
    def candidate() -> UOp|None:
      return next((s for m in members for s in kernels[m].reads.values() if s not in members | refused and readers[s] <= members), None)
    while (s := candidate()) is not None:
      c, refused = kernels[s], refused | {s}
      if not c.removable or (not c.reduces and not c.cheap): continue
      if not written.isdisjoint(c.leaves): continue       # it reads a buffer that a store overwrites: moved, it could come after
      if c.reduces:
        value = inlined(k.value, {*members, s}.__contains__)
        rows = rows_of(value, k.ranges, value.toposort(gate=_inside))
        if rows is None or resolve(rows.count != math.prod(s.shape)) or not fusion_pays(rows, has_local): continue
        # a single reduction is laid out by its own ranges: a reader that permutes its result keeps a kernel of its own
        indices = [i for m in members for u, stage in kernels[m].reads.items() if stage is s for i in u.src[1:]]
        if not rows.steps and any(i.op not in {Ops.RANGE, Ops.CONST} for i in indices): continue
      members.add(s)
    if any(kernels[m].reduces for m in members - {root}):
      new[root] = k.with_value(inlined(k.value, members.__contains__))
      gone |= members
  return sink.substitute(new)

# ---- one walk for all stores, where the wheel takes one each ----

_stored:dict[UOp, int] = {}                                # a bit for each buffer that is stored to
_reads:dict[UOp, int] = {}                                 # by node, the bits of the buffers that it is computed from

def _note_reads(sink:UOp) -> None:
  nodes = sink.toposort(enter_calls=False)
  _stored.clear()
  _reads.clear()
  for u in nodes:
    if u.op is Ops.STORE: _stored.setdefault(u.src[0].base, 1 << len(_stored))
  for u in nodes: _reads[u] = functools.reduce(operator.or_, (_reads.get(s, 0) for s in u.src), _stored.get(u, 0))

def _realize_what_reads_its_place(ctx:_wheel.IndexingContext, dest:UOp, src:UOp) -> None:
  """Realizes what a store writes where it is computed from the store's own buffer. In place of the wheel's realize_store_after_src, which walks all
  nodes before each store: quadratic in the stores"""
  if src not in _reads: _wheel.realize_store_after_src(ctx, dest, src)
  elif _reads[src] & _stored[dest.base]: ctx.realize_map[src] = None

_wheel.pm_generate_realize_map = PatternMatcher([
  *((p, f) for p, f in _wheel.pm_generate_realize_map.patterns if f is not _wheel.realize_store_after_src),
  (UPat(Ops.STORE, src=(UPat.var("dest"), UPat.var("src"))), _realize_what_reads_its_place)])

def run_rangeify(tsink:UOp, debug:bool=False) -> UOp:
  """The wheel's entry point, and `fuse` behind it"""
  _note_reads(tsink)
  ranged = _wheel.run_rangeify(tsink, debug)
  _reads.clear()
  return ranged if PCONTIG else fuse(ranged)

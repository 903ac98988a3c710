"""What a kernel's scheduler refuses: opts that overflow shared memory, and groups that codegen gets wrong. On the target with the least of it."""
from typing import Any, Callable, Iterator
import pytest
from extra.bench import no_device, shared_bytes
from tinygrad import Device, Tensor, dtypes
from tinygrad.apps.capture import collected_calls
from tinygrad.codegen import to_program
from tinygrad.codegen.opt import KernelOptError, Opt, OptOps
from tinygrad.codegen.opt.heuristic import merge_loops
from tinygrad.codegen.opt.postrange import Scheduler
from tinygrad.codegen.opt.search import get_kernel_actions
from tinygrad.helpers import Context
from tinygrad.uop.ops import AxisType

Wheels = Scheduler.__mro__[1]

@pytest.fixture(autouse=True)
def metal() -> Iterator[None]:
  with no_device("METAL"):
    assert Device[Device.DEFAULT].renderer.shared_max == 32768
    yield

def empty(*shape:int, dtype=dtypes.float) -> Tensor: return Tensor.empty(*shape, dtype=dtype)

def scheduler(run:Callable[[], Tensor], cls:Any=Scheduler) -> Scheduler:
  with collected_calls() as calls: run().realize()
  k = cls(calls[-1].src[0], Device[Device.DEFAULT].renderer)
  k.convert_loop_to_global()
  return k

def applied(k:Scheduler, *opts:tuple) -> Scheduler:
  for op, *arg in opts: k.apply_opt(Opt(OptOps[op], *arg))
  return k

def refused(k:Scheduler, *opt:Any) -> str:
  """Why; and the scheduler is as it was before"""
  before = k.ast, list(k.applied_opts)
  with pytest.raises(KernelOptError) as e: applied(k, opt)
  assert (k.ast, k.applied_opts) == before
  return str(e.value)

KERNELS:dict[str, Callable[[], Tensor]] = {
  "matvec": lambda: empty(1, 512) @ empty(512, 64),
  "half": lambda: empty(64, 512, dtype=dtypes.half).max(1),
  "two axes": lambda: (empty(24, 16, 32) * empty(16, 32)).sum((1, 2)),
  "side by side": lambda: (empty(16, 256) * empty(256)).sum(1) + empty(16, 96).max(1),
  "in one loop": lambda: empty(16, 320).sum(1) + empty(16, 320).max(1),
}
OPTS = [(("GROUP", 0, 4),), (("GROUPTOP", 0, 8), ("LOCAL", 0, 4)),
        (("GROUP", 0, 4), ("UPCAST", 0, 4), ("LOCAL", 0, 2)), (("UNROLL", 0, 4), ("GROUP", 0, 2), ("LOCAL", 0, 8))]

@pytest.mark.parametrize("opts", OPTS, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_counted_as_laid_out(name:str, opts:tuple):
  k = applied(scheduler(KERNELS[name]), *opts)
  if "side" in name or "one" in name: k = applied(k, ("GROUP", len(k.axes_of(AxisType.REDUCE)) - 1, 2))  # the other reduce too
  program = to_program(k.get_optimized_ast(), Device[Device.DEFAULT].renderer)
  assert k.shared_bytes() == shared_bytes(program) > 0

def partial(hidden:int) -> Tensor:
  """A kernel that has a buffer already: the hidden state of a feed-forward"""
  with Context(PCONTIG=2): return ((empty(4, 32) @ empty(32, hidden)).silu() @ empty(hidden, 64)).contiguous().realize()

def test_a_buffer_that_is_there_counts():
  k = scheduler(lambda: partial(8176))
  assert k.shared_bytes() == 8176 * 4 and "32832 bytes" in refused(k, "GROUP", 0, 32)
  applied(scheduler(lambda: partial(8176), Wheels), ("GROUP", 0, 32))  # when this is refused, upstream counts

def test_every_group_counts():
  """Two reduces over one range: their partial sums lie beside each other"""
  def run(cls:Any) -> Scheduler:
    k = scheduler(lambda: (empty(16, 24576) * empty(24576)).sum(1) + empty(16, 24576).max(1), cls)
    merge_loops(k)
    return k
  assert "49152 bytes" in refused(run(Scheduler), "GROUP", 0, 6144)
  applied(run(Wheels), ("GROUP", 0, 6144))

@pytest.mark.parametrize("op", ["GROUP", "GROUPTOP"])
def test_no_group_inside_another_reduce(op:str):
  k = scheduler(lambda: (empty(16, 8, 64) * empty(16, 1, 64)).sum(2).max(1))
  lengths = [k.rngs[i].vmax + 1 for i in k.axes_of(AxisType.REDUCE)]
  assert sorted(lengths) == [8, 64] and "inside another" in refused(k, op, lengths.index(64), 4)
  applied(k, (op, lengths.index(8), 4))

@pytest.mark.parametrize("op", ["GROUP", "GROUPTOP", "UNROLL"])
def test_a_sum_over_a_buffer_of_the_kernel(op:str):
  """Codegen would begin such a sum anew at every step"""
  k = scheduler(lambda: partial(96))
  axis = next(i for i, a in enumerate(k.axes_of(AxisType.REDUCE)) if k.rngs[a].vmax + 1 == 96)
  assert "no sum over plain ranges" in refused(k, op, axis, 4)
  applied(k, (op, 1 - axis, 4))                            # the one that fills the buffer

def test_reduces_beside_each_other_share_threads():
  def groups(k:Scheduler) -> list[int]: return [k.rngs[i].vmax + 1 for i in k.axes_of(AxisType.GROUP_REDUCE)]
  k = applied(scheduler(KERNELS["side by side"]), ("GROUP", 0, 16), ("GROUP", 1, 16))
  assert groups(k) == [16] and "shares its threads" in refused(k, "GROUP", 0, 2)
  program = to_program(k.get_optimized_ast(), Device[Device.DEFAULT].renderer)
  assert program.arg.local_size == (16, 1, 1) and program.src[2].arg.count("threadgroup_barrier") <= 2
  assert sorted(groups(applied(scheduler(KERNELS["side by side"]), ("GROUP", 0, 16), ("GROUP", 1, 8)))) == [8, 16]
  assert groups(applied(scheduler(KERNELS["two axes"]), ("GROUP", 0, 4), ("GROUP", 0, 4))) == [4, 4]  # one reduce's own are two

def test_search_takes_it():
  """What BEAM tries is ours, and none of it overflows"""
  k = scheduler(KERNELS["side by side"])
  assert type(k.copy()) is Scheduler
  actions = get_kernel_actions(k)
  assert len(actions) > 10 and all(type(a) is Scheduler and a.shared_bytes() <= 32768 for a in actions.values())

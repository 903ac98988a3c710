"""What the fork schedules and optimizes gives what the wheel's own functions give, in no more kernels: seeded random graphs, their gradients,
convolutions with theirs, both in one process."""
from __future__ import annotations
import contextlib, inspect, math, random
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Callable, Iterator
from unittest.mock import patch
import numpy as np, pytest, tinygrad.codegen, tinygrad.schedule
from mockmetal import on_metal
from scheduled import on
from tinygrad import OVERLAY, WHEEL, Tensor, dtypes, wheel_module
from tinygrad.codegen.opt import heuristic, postrange
from tinygrad.engine.realize import run_linear
from tinygrad.helpers import Context
from tinygrad.schedule import indexing, rangeify
from tinygrad.uop.ops import Ops, UOp

wheel_indexing, wheel_heuristic, wheel_postrange = (wheel_module(m.__name__) for m in (indexing, heuristic, postrange))

@contextlib.contextmanager
def fresh() -> Iterator[None]:
  """Nothing that was scheduled or compiled before is found again, and workers, which know only the fork, compile nothing"""
  with patch.dict(tinygrad.schedule.schedule_cache, clear=True), patch.dict(tinygrad.codegen.to_program_cache, clear=True), Context(PARALLEL=0): yield

@contextlib.contextmanager
def wheel() -> Iterator[None]:
  """tinygrad as the wheel has it, where the fork's files stand over it"""
  with (fresh(), patch.object(rangeify, "run_rangeify", wheel_indexing.run_rangeify),
        patch.object(heuristic, "hand_coded_optimizations", wheel_heuristic.hand_coded_optimizations),
        patch.object(wheel_postrange, "Scheduler", postrange.Scheduler.__base__)): yield

# ---- graphs ----

@dataclass(frozen=True, eq=False)
class Value:
  """`bound`: its numbers lie within ±bound; `exact`: not rounded on the way, so it may be compared or made an integer"""
  t:Tensor
  bound:float
  exact:bool
  @property
  def shape(self) -> tuple[int, ...]: return tuple(map(int, self.t.shape))

SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 16, 33, 48)
KINKS = ("relu", "abs", "maximum", "max", "min")           # whose gradient jumps where rounding may decide
MOST, FAR = 4096, 64.                                      # numbers of a value; what a float may grow to

class Graph:
  """A random graph: the same one for the same seed. A value that was made may serve again in any later step. `smooth`: no kink in what was rounded"""
  def __init__(self, seed:int, data:list[Tensor]|None=None, smooth:bool=False):
    self.random, self.smooth = random.Random(seed), smooth
    pick = self.random.choice
    shape = self.shape()
    if pick((0, 0, 0, 1)): shape = (*shape[:-1][:1], pick((129, 300, 512, 1031)))  # a row for a whole team of threads
    self.half = pick((0, 0, 1))
    shapes = (shape, shape[-1:], self.shape())
    if data is None:
      rng = np.random.default_rng(seed)
      data = [Tensor(rng.uniform(-2, 2, s).astype(np.float32)) for s in shapes] + [Tensor(rng.integers(-9, 9, shape, dtype=np.int32))]
      Tensor.realize(*data)
    self.data, self.values = data, [Value(t, b, True) for t, b in zip(data, (2, 2, 2, 9))]
    for _ in range(pick(range(3, 9))):
      if (v := pick(STEPS)(self, pick(self.values[-4:] if pick((0, 1)) else self.values))) is not None: self.keep(v)
    made = self.values[len(data):] or self.values
    self.outputs = list(dict.fromkeys([made[-1], *(pick(made) for _ in range(pick((0, 0, 1, 2))))]))

  def kink(self, name:str, *of:Value) -> bool: return self.smooth and name in KINKS and not all(v.exact for v in of)
  def shape(self) -> tuple[int, ...]:
    while math.prod(s := tuple(self.random.choices(SIZES, k=self.random.choice((1, 2, 2, 2, 3, 3, 4))))) > MOST // 4: pass
    return s
  def axes(self, v:Value) -> tuple[int, ...]:
    if not v.shape: return ()
    return tuple(self.random.sample(range(len(v.shape)), 2 if len(v.shape) > 1 and self.random.random() < .2 else 1))
  def other(self, v:Value) -> Value|None:
    """A value that can be broadcast with this one"""
    fits = [o for o in self.values if all(a == b or 1 in (a, b) for a, b in zip(o.shape[::-1], v.shape[::-1]))]
    fits = [o for o in fits if math.prod(np.broadcast_shapes(o.shape, v.shape)) <= MOST]
    return self.random.choice(fits) if fits else None
  def keep(self, v:Value) -> None:
    if dtypes.is_int(v.t.dtype) and v.bound > 1e6: return
    if dtypes.is_float(v.t.dtype) and v.bound > FAR: v = Value(v.t * (1 / v.bound), 1, False)
    self.values.append(v)

def as_float(t:Tensor) -> Tensor: return t if dtypes.is_float(t.dtype) else t.float()

def unary(g:Graph, v:Value) -> Value|None:
  b = v.bound
  name, bound = g.random.choice((("sin", 1), ("sigmoid", 1), ("tanh", 1), ("relu", b), ("abs", b), ("square", b ** 2), ("neg", b)))
  if g.kink(name, v): return None
  return Value(getattr(as_float(v.t), name)(), bound, v.exact and name in ("relu", "abs", "neg"))

def binary(g:Graph, v:Value) -> Value|None:
  if (o := g.other(v)) is None: return None
  b, c = v.bound, o.bound
  name, bound = g.random.choice((("add", b + c), ("sub", b + c), ("mul", b * c), ("maximum", max(b, c))))
  if g.kink(name, v, o): return None
  return Value(getattr(v.t, name)(o.t), bound, v.exact and o.exact and dtypes.is_int(v.t.dtype) and dtypes.is_int(o.t.dtype))

def reduce(g:Graph, v:Value) -> Value|None:
  axes = g.axes(v)
  n = math.prod(v.shape[a] for a in axes)
  name, bound = g.random.choice((("sum", v.bound * n), ("max", v.bound), ("mean", v.bound), ("min", v.bound)))
  if g.kink(name, v): return None
  return Value(getattr(v.t, name)(axes, keepdim=g.random.random() < .7), bound,
               v.exact and (name in ("max", "min") or (name == "sum" and dtypes.is_int(v.t.dtype))))

def back(g:Graph, v:Value) -> Value|None:
  """A reduction, broadcast back over what was reduced"""
  t, axes = as_float(v.t), g.axes(v)
  form = g.random.randrange(6)
  if form == 0: return Value(t * (t.square().mean(axes, keepdim=True) + 1).rsqrt(), v.bound, False)
  if form == 1: return Value(t.softmax(axes[0] if axes else -1), 1, False)
  if form == 2: return Value((t - t.mean(axes, keepdim=True)) * (t.var(axes, keepdim=True, correction=0) + 1).rsqrt(), 2 * v.bound, False)
  if form == 3: return Value(t * t.sum(axes, keepdim=True), v.bound ** 2 * math.prod(v.shape[a] for a in axes), False)
  if form == 4 and g.kink("max", v): return None
  if form == 4: return Value(v.t - v.t.max(axes, keepdim=True), 2 * v.bound, v.exact and dtypes.is_int(v.t.dtype))
  return Value(t.log_softmax(axes[0] if axes else -1), 2 * v.bound + 10, False)

def mask(g:Graph, v:Value) -> Value|None:
  by = [o for o in g.values if o.exact and o.shape and all(a in (1, b) for a, b in zip_longest(o.shape[::-1], v.shape[::-1], fillvalue=1))]
  if not by or not v.shape: return None
  where = g.random.choice(by).t > 0 if g.random.random() < .5 else Tensor.arange(v.shape[-1]) < g.random.randint(1, v.shape[-1])
  return Value(where.where(v.t, g.random.choice((0, 1, -2))), max(2, v.bound), v.exact)

def cast(g:Graph, v:Value) -> Value:
  to = g.random.choice((dtypes.float, dtypes.half, dtypes.int) if g.half else (dtypes.float, dtypes.int))
  if to is dtypes.int and not v.exact: to = dtypes.float
  return Value(v.t.cast(to), v.bound, v.exact and dtypes.half not in (to, v.t.dtype))

def move(g:Graph, v:Value) -> Value:
  t, r = v.t, g.random
  if not v.shape: return Value(t.reshape(1, 1), v.bound, v.exact)
  axis = r.randrange(len(v.shape))
  form = r.randrange(8)
  if form == 0: t = t.permute(*r.sample(range(len(v.shape)), len(v.shape)))
  if form == 1: t = t.flip(axis)
  if form == 2: t = t.pad(tuple((r.randint(0, 2), r.randint(0, 2)) if a == axis else (0, 0) for a in range(len(v.shape))))
  if form == 3:
    start = r.randrange(v.shape[axis])
    t = t.shrink(tuple((start, r.randint(start + 1, n)) if a == axis else (0, n) for a, n in enumerate(v.shape)))
  if form == 4: t = t.reshape(-1) if r.random() < .5 else t.reshape(*v.shape[:axis], *reversed(split(v.shape[axis])), *v.shape[axis + 1:])
  if form == 5 and math.prod(v.shape) * 3 <= MOST: t = t.unsqueeze(axis).expand(*v.shape[:axis], 3, *v.shape[axis:])
  if form == 6: t = t[tuple([slice(None)] * axis + [Tensor([r.randrange(n) for n in (v.shape[axis],) * 3])])]  # a gather
  if form == 7 and math.prod(v.shape) * 2 <= MOST: t = t.cat(t.flip(axis), dim=axis)
  return Value(t, v.bound, v.exact)

def split(n:int) -> tuple[int, int]:
  d = next(d for d in (4, 3, 5, 2, 1) if n % d == 0)
  return d, n // d

def contract(g:Graph, v:Value) -> Value|None:
  """A product with a matrix made of another value's rows"""
  others = [o for o in g.values if len(o.shape) == 2 and o.shape[-1:] == v.shape[-1:] and math.prod(v.shape[:-1]) * o.shape[0] <= MOST]
  if not others: return None
  o = g.random.choice(others)
  return Value(as_float(v.t) @ as_float(o.t).T, v.bound * o.bound * v.shape[-1], False)

def hold(g:Graph, v:Value) -> Value: return Value(v.t.contiguous(), v.bound, v.exact)

STEPS:tuple[Callable[[Graph, Value], Value|None], ...] = (
  unary, binary, binary, reduce, reduce, back, back, back, mask, cast, move, move, contract, hold)

# ---- both ----

def run(g:Graph) -> tuple[int, list[np.ndarray]]:
  """Kernels, and what the outputs are"""
  outputs = [o.t.contiguous() for o in g.outputs]
  linear, var_vals = Tensor.linear_with_vars(*outputs)
  run_linear(linear, var_vals)
  return len(linear.src), [o.numpy() for o in outputs]

def compare(seed:int) -> None:
  with wheel(): theirs, want = run(g := Graph(seed))
  with fresh(): ours, got = run(Graph(seed, g.data))
  assert ours <= theirs, f"graph {seed}: {ours} kernels, more than the wheel's {theirs}"
  for o, a, b in zip(g.outputs, got, want):
    assert a.dtype == b.dtype and a.shape == b.shape
    if dtypes.is_int(o.t.dtype): np.testing.assert_array_equal(a, b, f"graph {seed}")
    else: np.testing.assert_allclose(a, b, 4e-3 if g.half else 1e-5, (4e-3 if g.half else 2e-6) * max(1, o.bound), err_msg=f"graph {seed}")

def descend(loss:Tensor, leaves:list[Tensor]) -> list[Tensor]:
  """The loss, and its gradients, a kernel's each at least"""
  loss.backward()
  return [loss, *(t.grad.contiguous() for t in leaves if t.grad is not None)]

def gradients(seed:int) -> list[Tensor]:
  g = Graph(seed, smooth=True)
  return descend(sum((o.t.float() * (i + 1)).sum() for i, o in enumerate(g.outputs)), [t for t in g.data if dtypes.is_float(t.dtype)])

def convolutions(seed:int) -> list[Tensor]:
  """Some layers as of an image classifier, and their gradients"""
  r, rng = random.Random(seed), np.random.default_rng(seed)
  kind = r.choice((dtypes.float, dtypes.float, dtypes.half))
  def data(*shape:int) -> Tensor: return Tensor(rng.uniform(-1, 1, shape).astype(np.float32)).cast(kind).realize()
  leaves = [x := data(r.randint(1, 3), channels := r.choice((1, 2, 3)), r.randint(5, 9), r.randint(5, 9))]
  for _ in range(r.choice((1, 1, 2))):
    groups, size = r.choice((1, 1, 1, channels)), r.choice((1, 2, 3))
    up = r.random() < .2
    wide = groups * r.choice((1, 2, 3))
    leaves.append(w := data(*((channels, wide // groups) if up else (wide, channels // groups)), size, r.choice((1, size))))
    bias = leaves.append(data(wide)) or leaves[-1] if r.random() < .5 else None
    x = (x.conv_transpose2d if up else x.conv2d)(w, bias, groups=groups, stride=r.choice((1, 1, 2)), padding=r.choice((0, 0, 1)),
                                                 dilation=r.choice((1, 1, 2)) if min(x.shape[2:]) > 5 else 1)
    channels = wide
    for _ in range(r.randint(0, 2)):
      form = r.randrange(6)
      if form == 0: x = x.sigmoid()
      if form == 1: x = x.silu()
      if form == 2: x = x.avg_pool2d((2, 2)) if min(x.shape[2:]) > 3 else x
      if form == 3: x = (x - x.mean((0, 2, 3), keepdim=True)) * (x.float().var((0, 2, 3), keepdim=True) + 1).rsqrt().cast(kind)  # over a batch
      if form == 4: x = x.layernorm((1, 2, 3), 1)
      if form == 5: x = x + x.mean((2, 3), keepdim=True)
    if min(x.shape[2:]) < 5: break
  x = x.float()
  losses = (lambda: x.relu().mean(), lambda: x.square().mean(), lambda: x.flatten(1).log_softmax(-1)[:, 0].sum(), lambda: x.max((2, 3)).sum())
  return descend(losses[r.randrange(3 if kind is dtypes.half else 4)](), leaves)  # halves tie for the largest, and rounding would choose

def alike(seed:int, make:Callable[[int], list[Tensor]], values:bool) -> None:
  """No more kernels than the wheel's, and the same numbers"""
  found = []
  for scheduled in (wheel, fresh):
    with scheduled():
      linear, var_vals = Tensor.linear_with_vars(*(outputs := make(seed)))
      if values: run_linear(linear, var_vals)
      found.append((len(linear.src), [o.float().numpy() for o in outputs] if values else []))
  (theirs, want), (ours, got) = found
  assert ours <= theirs, f"graph {seed}: {ours} kernels, more than the wheel's {theirs}"
  for o, a, b in zip(outputs, got, want):
    # a gradient that is 0 but for rounding has the size of that
    own, all_of = (2e-2, 1e-3) if dtypes.half in [o.dtype for o in outputs] else (1e-4, 1e-5)
    np.testing.assert_allclose(a, b, 0, max(own * np.abs(b).max(), all_of * max(np.abs(w).max() for w in want)), err_msg=f"graph {seed}")

@pytest.mark.parametrize("make,graphs", ((gradients, 32), (convolutions, 12)))
@pytest.mark.parametrize("target", ("CUDA", "CPU"))
def test_backward_counts(target:str, make:Callable[[int], list[Tensor]], graphs:int):
  with on(target):
    for seed in range(graphs): alike(seed, make, values=False)

@pytest.mark.parametrize("make,first,graphs", ((gradients, 100, 16), (convolutions, 100, 3), (convolutions, 103, 3)))
def test_backward(make:Callable[[int], list[Tensor]], first:int, graphs:int):
  for seed in range(first, first + graphs): alike(seed, make, values=True)

@pytest.mark.parametrize("first", range(0, 500, 20))
def test_cpu(first:int):
  for seed in range(first, first + 20): compare(seed)

@pytest.mark.parametrize("first", range(500, 560, 10))
def test_metal(first:int):
  """Where threads share a row"""
  with on_metal():
    for seed in range(first, first + 10): compare(seed)

def test_the_wheel_is_the_wheel():
  """What is swapped is all there is to swap: a file of the fork that stands over the wheel's scheduler or compiler is one that `wheel` knows"""
  ours = {str(p.relative_to(OVERLAY)) for folder in ("schedule", "codegen") for p in (OVERLAY / folder).rglob("*.py")}
  assert {p for p in ours if (WHEEL / p).is_file()} == {"schedule/indexing.py", "codegen/opt/heuristic.py", "codegen/opt/postrange.py"}
  with wheel():
    for function in (rangeify.run_rangeify, heuristic.hand_coded_optimizations, wheel_postrange.Scheduler):
      assert Path(inspect.getfile(function)).is_relative_to(WHEEL)

def test_assigned_crosswise():
  """Two buffers, each assigned what a reduction of the other gives: the sums come before both assignments"""
  def assigned() -> list[np.ndarray]:
    a, b = Tensor.full((16,), 1.0).contiguous().realize(), Tensor.full((16,), 2.0).contiguous().realize()
    of_a, of_b = ((Tensor.full((16, 16), n).contiguous().realize() - x.contiguous()).sum(1) for n, x in ((20.0, a), (10.0, b)))
    a.assign(of_b * a)
    b.assign(of_a * b)
    Tensor.realize(a, b)
    return [a.numpy(), b.numpy()]
  with wheel(): want = assigned()
  with fresh(): np.testing.assert_array_equal(assigned(), want)

# ---- that it would notice ----

def wrong(sink:UOp) -> UOp:
  """Sums become maxima"""
  return sink.substitute({u: u.replace(arg=(Ops.MAX, *u.arg[1:])) for u in sink.toposort() if u.op is Ops.REDUCE and u.arg[0] is Ops.ADD})
def wrong_opts(k:postrange.Scheduler) -> postrange.Scheduler:
  (k := heuristic_of_ours(k)).ast = wrong(k.ast)
  return k
class WrongScheduler(postrange.Scheduler):
  def get_optimized_ast(self, *args, **kw) -> UOp: return wrong(super().get_optimized_ast(*args, **kw))

def held(sink:UOp) -> UOp:
  """Reductions get a kernel of their own"""
  new:dict[UOp, UOp] = {}
  for u in sink.toposort():
    new[u] = u.replace(src=tuple(new[s] for s in u.src))
    if u.op is Ops.REDUCE: new[u] = new[u].contiguous()
  return new[sink]

heuristic_of_ours = heuristic.hand_coded_optimizations
FAULTS = {
  "schedule": (rangeify, "run_rangeify", lambda *args: wrong(indexing.run_rangeify(*args))),
  "more kernels": (rangeify, "run_rangeify", lambda sink, *args: indexing.run_rangeify(held(sink), *args)),
  "opts": (heuristic, "hand_coded_optimizations", wrong_opts),
  "kernels": (wheel_postrange, "Scheduler", WrongScheduler),
}

@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault(fault:str):
  """What is wrong with the fork alone is noticed, though the same graphs were scheduled, compiled and run before"""
  for seed in range(3): compare(seed)
  with patch.object(*FAULTS[fault]), pytest.raises(AssertionError, match="more than" if fault == "more kernels" else "graph"):
    for seed in range(3): compare(seed)

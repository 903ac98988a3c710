"""Programmatic dependent launch is only right if a kernel touches nothing that another kernel of the token writes, or still reads, before it has
waited. The order of loads in the rendered source is what decides; a race would show only now and then, so the source is what is checked."""
import functools, re
import pytest
from extra.bench import no_device, stand_in
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.mla import Transformer
from tinygrad.engine.realize import compile_linear
from tinygrad.nn import embedding, mla_attention, moe, norm_linear, split_kv, split_plan
from tinygrad.uop.ops import Ops, UOp

WAIT = "griddepcontrol.wait;"
CONSTANT = re.compile(r"norm|rope|bias|.*\..*")  # weights' planes are named with a dot
# the first two are changed after all kernels of a token, by what waits for them in full; a plan is written before any kernel that reads it starts
STEADY = {"start", "tables", "plan"}
# kernels without the instruction: the graph keeps them behind whatever they need, and what needs them behind them
FULL_EDGES = re.compile(r"embedding_|argmax_|advance|split_plan_")

def body(source: str) -> str: return source.split("__global__", 1)[1].split(") {", 1)[1]  # behind the head, which names every buffer

def branches(source: str) -> list[str]:
  """The ways through a kernel: what stands before its branches (loops that hold a wait) with each of them"""
  first, *loops = re.split(r"\n  (?=for \()", source)
  loops = [loop for loop in loops if WAIT in loop]
  return [first + loop for loop in loops] if loops and WAIT not in first else [source]

@functools.cache
def sources(model: str, rows: int = 1) -> dict[str, tuple[list[str], str]]:
  """{kernel: (its buffers' names, its source)} of a decode step of so many rows on Hopper"""
  buffers = {}
  def recording(launch):
    def wrapped(name, outs, ins, body, mem=None):
      buffers[name] = [*outs, *ins]
      return launch(name, outs, ins, body, mem)
    return wrapped
  with no_device("CUDA"), pytest.MonkeyPatch.context() as patch:
    for module in (embedding, mla_attention, moe, norm_linear, split_kv, split_plan): patch.setattr(module, "launch", recording(module.launch))
    calls = Runner(Transformer.from_gguf(stand_in(model), 256)).batch_of(rows).record(compiled=False).calls
    programs = [c.src[0] for c in compile_linear(UOp(Ops.LINEAR, src=tuple(calls))).src]
  return {p.arg.name: (buffers[p.arg.name], p.src[2].arg) for p in programs if p.arg.name in buffers}

@pytest.mark.parametrize("model,rows", [("small-glm", 1), ("small-ds", 1), ("small-youtu", 1), ("small-youtu", 4)])
def test_nothing_of_others_before_the_wait(model: str, rows: int):
  kernels = sources(model, rows)
  assert len(kernels) > 10
  for name, (names, source) in kernels.items():
    if FULL_EDGES.match(name):
      assert WAIT not in source, name
      continue
    for part in branches(body(source)):
      before, *after = part.split(WAIT)
      assert len(after) == 1, f"{name}: expected one wait, found {len(after)}"
      early = {names[int(i)] for i in re.findall(r"\bdata(\d+)_", before)}
      assert all(CONSTANT.fullmatch(n) or n in STEADY for n in early), f"{name}: {early} before the wait"
      assert not re.search(r"\*\(+data\d+_[^;]*\)+ = ", before), f"{name}: stores before the wait"

def test_a_weight_does_go_first():
  """What the overlap is for"""
  names, source = next(v for k, v in sources("small-glm").items() if k.startswith("norm_linear_rope"))
  assert re.search(rf"data{names.index('w0.q0')}_", body(source).split(WAIT)[0])

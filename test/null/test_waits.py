"""Programmatic dependent launch is only right if a kernel touches nothing that another kernel of the token writes, or still reads, before it has
waited. The order of loads in the rendered source is what decides; a race would show only now and then, so the source is what is checked. What was
written two launches back may be read before the wait, where it is known to be done: see pdl_wait."""
import functools, re
from typing import Any, Callable, NamedTuple
import pytest
from gguf import GGMLQuantizationType as T
from extra.bench import no_device, stand_in, with_blocks
from helpers import random_weight
from scheduled import on, programs
from tinygrad import Tensor, dtypes
from tinygrad.apps import capture
from tinygrad.apps.capture import collected_calls
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.engine.sampling import Features
from tinygrad.apps.mla import RMSNorm, Transformer
from tinygrad.apps.quantized import QuantizedExpertWeights, QuantizedLinear, QuantizedWeight
from tinygrad.apps.rope import Rope
from tinygrad.engine.realize import compile_linear
from tinygrad.nn import (cutoff, draw, embedding, few_tokens, lora_query, mla_attention, moe, norm_linear, nucleus, routing, split_kv,
                         split_plan)
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.matvec import empty_codes
from tinygrad.nn.routing import Gating, Routing
from tinygrad.nn.step import PAGE, Step
from tinygrad.runtime.graph.cuda import kept_edges
from tinygrad.uop.ops import Ops, UOp

WAIT, TRIGGER = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
CONSTANT = re.compile(r"(q_)?norm|rope|bias|.*\..*")  # weights' planes are named with a dot
# the first two are changed after all kernels of a token, by what waits for them in full; a plan is written before any kernel that reads it starts
STEADY = {"start", "tables", "plan"}
# kernels without the instruction: the graph keeps them behind whatever they need, and what needs them behind them
FULL_EDGES = re.compile(r"embedding_|split_plan_")

# what split_kv reads of the cache before the wait, guarded copies of old rows (nn/step.py's NEW_ROWS); test_attention.py checks which rows they are
OLD_ROWS = re.compile(r'if \(.*\) asm volatile\("cp\.async.*')
PREFETCH = re.compile(r'asm volatile\("prefetch.*')   # brings no value: what is written later is read later

def body(source: str) -> str:
  """Behind the head, which names every buffer"""
  return PREFETCH.sub("", source.split("__global__", 1)[1].split(") {", 1)[1])

def branches(source: str) -> list[str]:
  """The ways through a kernel: what stands before its branches (loops that hold a wait) with each of them"""
  first, *loops = re.split(r"\n  (?=for \()", source)
  loops = [loop for loop in loops if WAIT in loop]
  return [first + loop for loop in loops] if loops and WAIT not in first else [source]

class Launched(NamedTuple):
  name: str
  names: list[str]             # of its buffers; none of a kernel that tinygrad makes
  buffers: list[UOp]
  outs: tuple[int, ...]        # the numbers of those that it writes
  source: str
  def ways(self) -> list[str]:
    """branches of its source. The first loops of split_kv copy old rows, and have no wait; the copies are not among them"""
    copies_rows = self.name.startswith("mla_split_kv_mma")
    return [OLD_ROWS.sub("", body(self.source))] if copies_rows else branches(body(self.source))
  def early(self) -> set[int]:
    """The numbers of the buffers that it touches before a wait"""
    return {int(i) for part in self.ways() for i in re.findall(r"\bdata(\d+)_", part.split(WAIT)[0])}

@functools.cache
def sources(model: str, rows: int = 1, features: Features = Features(), blocks: tuple[int, ...] = (0, 1)) -> list[Launched]:
  """The launches of a decode step of so many rows on Hopper, of these blocks, one of each kind"""
  buffers = {}
  def recording(launch):
    def wrapped(name, outs, ins, *rest, **more):
      buffers[name] = [*outs, *ins]
      return launch(name, outs, ins, *rest, **more)
    return wrapped
  with no_device("CUDA"), pytest.MonkeyPatch.context() as patch:
    patch.setattr(capture, "_scheduled", {})   # what another test has recorded would launch nothing here
    for module in (cutoff, draw, embedding, few_tokens, lora_query, mla_attention, moe, norm_linear, nucleus, routing, split_kv, split_plan):
      patch.setattr(module, "launch", recording(module.launch))
    batch = Runner(Transformer.from_gguf(with_blocks(stand_in(model), list(blocks)), 256)).batch_of(rows)
    batch.features = features
    calls = batch.record(compiled=False).calls
    compiled = [(c.src[0], c.src[1:]) for c in compile_linear(UOp(Ops.LINEAR, src=tuple(calls))).src]
  def source_of(program: UOp) -> str: return next(u.arg for u in program.src if u.op is Ops.SOURCE)
  return [Launched(p.arg.name, buffers.get(p.arg.name, []), [u.base for u in args], p.arg.outs, source_of(p)) for p, args in compiled]

def done_at_start(launches: list[Launched]) -> list[int]:
  """Of each launch, a bit for each that is done when its blocks start, by the edges of the graph"""
  writer: dict[UOp, int] = {}
  readers: dict[UOp, list[int]] = {}
  behind: list[int] = []
  done: list[int] = []
  for number, launch in enumerate(launches):
    deps = {writer[b] for b in launch.buffers if b in writer} | {r for i in launch.outs for r in readers.get(launch.buffers[i], [])}
    kept, implied = kept_edges(deps, behind)
    own = 0
    for dep in kept:
      source = launches[dep].source
      if WAIT not in source or WAIT not in launch.source: own |= behind[dep]   # an edge in full
      elif all(part.index(WAIT) < part.index(TRIGGER) for part in launches[dep].ways()): own |= behind[dep] & ~(1 << dep)
      else: own |= done[dep]
    for i, b in enumerate(launch.buffers):
      if i not in launch.outs: readers.setdefault(b, []).append(number)
    for i in launch.outs:
      writer[launch.buffers[i]] = number
      readers[launch.buffers[i]] = []
    behind.append(implied | 1 << number)
    done.append(own)
  return done

def check_early_reads(launches: list[Launched]) -> set[str]:
  """Whatever is read before a wait, and no constant, was written by a launch that is done, and is read past the multiprocessor's own cache. Returns
  the names of the launches that do so."""
  writer: dict[UOp, int] = {}
  found = set()
  for number, (launch, done) in enumerate(zip(launches, done_at_start(launches))):
    for i in launch.early() if launch.names and WAIT in launch.source else ():
      if CONSTANT.fullmatch(name := launch.names[i]) or name in STEADY: continue
      found.add(launch.name)
      assert done >> writer[launch.buffers[i]] & 1, f"{launch.name}: {name} is read before the wait, and may not be written yet"
      for part in launch.ways():
        before = part.split(WAIT)[0]
        past = re.findall(rf"\*\(volatile const unsigned\*\)\(\(data{i}_", before)
        assert len(past) == len(re.findall(rf"\bdata{i}_", before)), f"{launch.name}: {name} by way of the cache"
    for i in launch.outs: writer[launch.buffers[i]] = number
  return found

CUT = Features(draw=True, top_k=True, top_p=True, min_p=True)
@pytest.mark.parametrize("model,rows,features,early_readers", [
  ("small-glm", 1, Features(), 0), ("small-glm", 4, Features(), 0), ("glm", 1, Features(), 1), ("glm", 2, Features(), 1),
  ("small-ds", 1, Features(), 1), ("small-youtu", 1, Features(), 0), ("small-youtu", 4, Features(), 0), ("small-glm", 1, CUT, 0)],
  ids=lambda x: "cut" if x == CUT else "greedy" if x == Features() else None)
def test_nothing_of_others_before_the_wait(model: str, rows: int, features: Features, early_readers: int):
  launches = sources(model, rows, features)
  assert len(launches) > (10 if features == Features() else 24)
  assert len(reads_early := check_early_reads(launches)) == early_readers
  for launch in launches:
    name, names, _, _, source = launch
    if not names: continue
    if FULL_EDGES.match(name):
      assert WAIT not in source, name
      continue
    if name.startswith("mla_split_kv_mma"):
      copies = OLD_ROWS.findall(body(source).split(WAIT)[0])
      assert copies and all({names[int(i)] for i in re.findall(r"\bdata(\d+)_", copy)} == {"cache"} for copy in copies)
    for part in launch.ways():
      before, *after = part.split(WAIT)
      assert len(after) == 1, f"{name}: expected one wait, found {len(after)}"
      early = {names[int(i)] for i in re.findall(r"\bdata(\d+)_", before)}
      assert name in reads_early or all(CONSTANT.fullmatch(n) or n in STEADY for n in early), f"{name}: {early} before the wait"
      assert not re.search(r"\*\(+data\d+_[^;]*\)+ = ", before), f"{name}: stores before the wait"

def said_of_blocks(launches: list[Launched], prefix: str) -> list[list[str]]:
  """By different launches of that prefix"""
  found = {launch.name: launch.source for launch in launches if launch.name.startswith(prefix)}
  return [re.findall(r"// blocks at once: (\d+)\n", source) for source in found.values()]

def test_blocks_at_once():
  """What launches of GLM say of their blocks: 384, of which a multiprocessor holds three; one for each; many"""
  for name, each in (("expert_gate_up", ["3"]), ("mla_split_kv_mma_1", ["1"]), ("norm_linear_q6_k_154880", []), ("expert_down_4_early", ["4"])):
    assert said_of_blocks(sources("glm"), name) == [each], name

def test_blocks_at_once_of_experts():
  """… of several tokens, as many as have 80 registers a thread; a wide model's down, too"""
  assert said_of_blocks(sources("glm", 8), "few_expert_gate_up") == [["3"]] and said_of_blocks(sources("glm", 8), "few_expert_down") == [["4"]]
  assert said_of_blocks(sources("kimi"), "expert_down_8") == [["3"]]

def test_room_beside_other_launches():
  """Which launches of one and two tokens leave room for another's block, and how many registers a thread of theirs has: what was faster on a card"""
  def room(model: str, tokens: int, *blocks: int) -> dict[str, str]:
    launches = sources(model, tokens, blocks=blocks or (0, 1))
    said = ((launch.name, re.search(r"// blocks at once: \d+, of (\d+) registers\n", launch.source)) for launch in launches)
    return {re.sub(r"_q5_k.*|_2_q4_0_5120.*", "", name): found[1] for name, found in said if found}
  assert room("glm", 1) == {"gate_up_factors": "88"} and room("kimi", 1) == {}
  assert room("glm", 2) == {"gate_up_rounded": "96", "linear_residual_q4_0_2048_5120": "160", "lora_query": "192"}
  assert room("youtu", 1, 4) == {"linear_residual_q4_0_2048_6144": "184"}
  assert room("youtu", 2, 4) == {"linear_residual_q4_0_2048_2048": "160"}   # attn_output, which takes fewer

# of GLM; K-quants; one token; vectors as long as Youtu's
@pytest.mark.parametrize("kind,heads,nope,width,tokens,spares", [(T.Q4_0, 20, 192, 768, 2, True), (T.Q4_K, 20, 192, 768, 2, False),
                                                                 (T.Q4_0, 20, 192, 768, 1, False), (T.Q4_0, 16, 128, 1536, 2, False)])
def test_room_beside_latent_queries(kind: T, heads: int, nope: int, width: int, tokens: int, spares: bool):
  def weight(kind: T, *shape: int) -> QuantizedLinear: return QuantizedLinear.load(kind, shape, random_weight(kind, shape)[0])
  with no_device("CUDA"):
    q_b, k_b = weight(kind, heads * (nope + 64), width), weight(T.Q8_0, heads, 512, nope)
    launch = lora_query.QueryLaunch.of(target_of(q_b.device), q_b, k_b, tokens)
    assert launch is not None and launch.room(q_b, k_b) == (128 * 128 if spares else 0)

def test_a_router_of_few_tokens():
  """Its blocks leave room for others', and make halves of their weights in front of the wait"""
  source, = (launch.source for launch in sources("glm", 8) if "router" in launch.name)
  assert "// blocks at once: 1, of 96 registers\n" in source
  behind = source[source.rindex(WAIT):]
  products = behind[:behind.index("__syncthreads")]
  assert products.count("mma.sync") == 24 and "(half)(" not in products

def test_a_weight_does_go_first():
  """What the overlap is for"""
  launch = next(launch for launch in sources("small-glm") if launch.name.startswith("lora_query"))
  assert {launch.names.index(name) for name in ("q_b.q0", "k_b.q0")} <= launch.early()

def faulty(launches: list[Launched], prefix: str, change: Callable[[Launched], str]) -> list[Launched]:
  """The launches, the sources of those of that prefix changed"""
  assert any(launch.name.startswith(prefix) for launch in launches)
  return [launch._replace(source=change(launch)) if launch.name.startswith(prefix) else launch for launch in launches]

def trigger_first(launch: Launched) -> str: return launch.source.replace(WAIT, "•").replace(TRIGGER, WAIT).replace("•", TRIGGER)
def reads_instead(launch: Launched, early: str, other: str) -> str:
  """Its source, which reads another buffer early"""
  return re.sub(rf"(volatile const unsigned\*\)\(\()data{launch.names.index(early)}_", rf"\1data{launch.names.index(other)}_", launch.source)

@pytest.mark.parametrize("rows,before,read,other", [(1, "expert_gate_up", "logits", "x_scales"), (2, "chosen_gate_up", "sel", "x_words")])
def test_planted_faults(rows: int, before: str, read: str, other: str):
  launches = sources("glm", rows)
  early, = check_early_reads(launches)
  with pytest.raises(AssertionError, match=f"{read} is read before"): check_early_reads(faulty(launches, before, trigger_first))
  with pytest.raises(AssertionError, match=f"{other} is read before"):
    check_early_reads(faulty(launches, early, lambda launch: reads_instead(launch, read, other)))
  with pytest.raises(AssertionError, match="cache"):
    check_early_reads(faulty(launches, early, lambda launch: launch.source.replace("volatile const unsigned*", "const unsigned*")))
  before_early = [done >> number - 1 & 1 for number, (launch, done) in enumerate(zip(launches, done_at_start(launches))) if launch.name == early]
  assert not any(before_early), "the kernel just before is not done"

def test_what_an_epilogue_reads_is_asked_for_first():
  """Of one token attn_output and down, which stage nothing: the residual behind the wait, then __syncwarp(), which holds it there, then the vector"""
  found = {}
  for launch in sources("small-ds"):
    if "residual" not in launch.names or "x_words" not in launch.names: continue
    behind = body(launch.source).split(WAIT)[1]
    first, rest = behind.split("__syncwarp();")
    number = {name: i for i, name in enumerate(launch.names)}
    reads = {name: [re.findall(rf"\bdata{number[name]}_", part) for part in (first, rest)] for name in ("residual", "x_words", "x_scales")}
    assert reads["residual"][0] and not reads["residual"][1], launch.name
    assert not any(reads[name][0] for name in ("x_words", "x_scales")) and reads["x_words"][1] and reads["x_scales"][1], launch.name
    found[launch.name.split("_")[0]] = launch.name
  assert {*found} == {"linear", "expert"}

def source_of_output(rows: int, width: int = 8192) -> str:
  """attn_output of one token, in Q8_0: a job's two rows take several warps, where they are as wide as that"""
  residual, units = Tensor.empty(1, rows), width // 32
  planes = {"q0": Tensor.empty(rows, units, 8, dtype=dtypes.uint32), "d": Tensor.empty(rows, units, dtype=dtypes.half)}
  weight = QuantizedLinear(T.Q8_0, (rows, width), planes)
  program, = programs(lambda: norm_linear.linear_of_codes(empty_codes(residual, 1, width), weight, residual))
  return next(u.arg for u in program.src if u.op is Ops.SOURCE)

def test_blocks_that_take_turns_leave_it_to_each_other():
  with on("CUDA"): assert ["__syncwarp();" in source_of_output(rows) for rows in (1024, 7168)] == [True, False]

def test_what_a_lane_does_beside_products():
  """A shuffle gives each half of the lanes a row, four more add it up, and one brings both together; what dp4a says is a float"""
  with on("CUDA"): several, one = source_of_output(1024), source_of_output(1024, 2048)
  assert several.count("__shfl_xor_sync(") == 1 + 4 and one.count("__shfl_xor_sync(") == 1 + 4 + 1
  assert all("(float)(__dp4a(" not in source and "__dp4a(" in source for source in (several, one))

QUADS = {T.Q8_0: 2, T.Q4_K: 1}   # of words of codes a unit

def source_behind_norm(kind: T, rows: int, width: int) -> str:
  """A matrix behind a norm, of one token"""
  planes = {"q0": Tensor.empty(rows, width // 32, QUADS[kind] * 4, dtype=dtypes.uint32)}
  if kind is T.Q8_0: planes["d"] = Tensor.empty(rows, width // 32, dtype=dtypes.half)
  else: planes["header"] = Tensor.empty(rows, width // 256 * 4, dtype=dtypes.uint32)
  step = Step.decode(Tensor.empty(1, dtype=dtypes.int32), Tensor.empty(1, 2, dtype=dtypes.int32))
  weight, norm = QuantizedLinear(kind, (rows, width), planes), RMSNorm(Tensor.empty(width), 1e-5)
  program, = programs(lambda: norm_linear.norm_linear(step, Tensor.empty(1, width), norm, [weight])[0])
  return next(u.arg for u in program.src if u.op is Ops.SOURCE)

@pytest.mark.parametrize("kind,rows,width,late,second", [(T.Q8_0, 32768, 2048, 0, 2 * 4), (T.Q8_0, 8192, 7168, 1, 2 * 4),
                                                         (T.Q4_K, 32768, 2048, 0, 4 + 4), (T.Q4_K, 8192, 7168, 1, 4)])
def test_what_runs_ahead(kind: T, rows: int, width: int, late: int, second: int):
  """A block of a large launch asks for its lanes' weights before the wait, those of a job's last row behind a wide vector, and the second turn's
  behind all these, of a wide vector's the first plane alone: what is asked for first comes first"""
  with on("CUDA"): before, behind = source_behind_norm(kind, rows, width).split(WAIT)
  staging, quads = behind.split("__syncthreads")[0], QUADS[kind]
  asked = [at.start() for at in re.finditer(r"prefetch\.global\.L2", staging)]
  def loads(text: str, buffer: str) -> list[int]: return [at.start() for at in re.finditer(rf"\(\(\w+\*\)\(\({buffer}_", text)]
  assert len(loads(before, "data3")) == quads * (4 - late) and len(loads(staging, "data3")) == quads * late and len(asked) == second
  assert loads(staging, "data1") and max(loads(staging, "data1")) < min(asked + loads(staging, "data3"))

def test_upper_nibbles_where_they_lie():
  """… are multiplied in jobs of four rows, which have registers for it"""
  with on("CUDA"): assert [source_behind_norm(T.Q4_K, rows, 2048).count("dp4a.u32") for rows in (1024, 32768)] == [0, 4 * 4 * 2]

def sources_of_a_few(tokens: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[list[str], str]]:
  """{kernel: (its buffers' names, its source)} of a mixture's step, of heads with RoPE and of their latent queries, on Hopper"""
  names: dict[str, list[str]] = {}
  def recording(right: Callable) -> Callable:
    def wrapped(name: str, outs: dict, ins: dict, *rest: Any, **more: Any) -> list[Tensor]:
      names[name] = [*outs, *ins]
      return right(name, outs, ins, *rest, **more)
    return wrapped
  for module in (few_tokens, mla_attention, routing): monkeypatch.setattr(module, "launch", recording(module.launch))
  def empty(cls: type[QuantizedWeight], *shape: int) -> QuantizedWeight:
    *rows, units = *shape[:-1], shape[-1] // 32
    planes = {"q0": Tensor.empty(*rows, units, 8, dtype=dtypes.uint32), "d": Tensor.empty(*rows, units, dtype=dtypes.half)}
    return cls(T.Q8_0, shape, planes)
  def matrix(*shape: int) -> QuantizedWeight: return empty(QuantizedLinear, *shape)
  def experts(*shape: int) -> QuantizedWeight: return empty(QuantizedExpertWeights, 4, *shape)
  with no_device("CUDA"), collected_calls() as calls:
    x, norm, start = Tensor.empty(tokens, 128), RMSNorm(Tensor.empty(128), 1e-5), Tensor.empty(tokens, dtype=dtypes.int32)
    step, rope = Step.decode(start, Tensor.empty(tokens, 2, dtype=dtypes.int32)), Rope(Tensor.empty(64, 32, 2), 128, 64)
    x, kv = norm_linear.norm_linear(step, x, norm, [matrix(128, 128), matrix(128 + 64, 128)], rope)
    cache = Tensor.empty(2 * PAGE, 128 + 64, dtype=dtypes.half)
    mla_attention.latent_query(target_of(x.device), step, x, kv, matrix(1, 128, 64), norm, cache, rope)[0].realize()
    x = norm_linear.attention_output(step, x.reshape(tokens, 1, 128), matrix(1, 128, 128), matrix(128, 128), x)
    shared, chosen = (moe.FeedForward(of(32, 128), of(32, 128), of(128, 32)) for of in (matrix, experts))
    moe.mixture(step, x, norm, matrix(4, 128), Routing(2, Gating.SIGMOID, True, 1.8), chosen, shared, x).realize()
    programs = [call.src[0] for call in compile_linear(UOp(Ops.LINEAR, src=tuple(calls))).src]
  return {p.arg.name: (names[p.arg.name], next(u.arg for u in p.src if u.op is Ops.SOURCE)) for p in programs if p.arg.name in names}

@pytest.mark.parametrize("tokens,count", [(9, 13), (5, 12)])
def test_nothing_of_others_before_the_wait_of_a_few_tokens(tokens: int, count: int, monkeypatch: pytest.MonkeyPatch):
  """In each of a launch's parts, the one that writes the cache's rows as well"""
  kernels = sources_of_a_few(tokens, monkeypatch)
  assert len(kernels) == count
  for name, (buffers, source) in kernels.items():
    parts = branches(body(source))
    in_parts = "rope" in name or name.startswith("few_gate_up") or "latent_query" in name
    assert len(parts) == (2 if in_parts else 1), name
    for number, part in enumerate(parts):
      before, _ = part.split(WAIT)   # one wait
      early = {buffers[int(i)] for i in re.findall(r"\bdata(\d+)_", before)}
      assert all(CONSTANT.fullmatch(buffer) or buffer in STEADY for buffer in early), f"{name}: {early} before the wait"
      writes_rows = "latent_query" in name and number == 0
      weights = any("." in buffer for buffer in buffers) and "expert" not in name and not writes_rows
      assert not weights or any("." in buffer for buffer in early), f"{name}: no weights before the wait"

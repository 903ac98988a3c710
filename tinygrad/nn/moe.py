"""The feed-forward, dense or mixture-of-experts.

feed_forward and mixture are composites. A decode step runs them as gate_up, expert_gate_up, expert_down and norm_linear. Many tokens on a target with
tensor cores run each as one piece: tokens sorted by expert (nn/routing.py), products by tiles (nn/matmul.py), scaled halves between them.

A decode step on a target with kernels, with experts, is three launches: the router's logits beside the shared expert's gate and up; the choice of
experts and their gate and up with SwiGLU and the routing weight in the epilogue; their down, the shared expert's and the residual in one sum. The
choice is made by every block of the second launch for itself: 64 logits cost less to rank again than a launch costs. Expert ids are read in the
kernels. In the first launch the blocks part into two branches, each with vectors and a layout of its own, and all tokens share a read of the weights;
in the others a block has one token. Where the target has an int8 dot product, hidden numbers are int8 between the launches (mixture_decode). Two to
PAIRS_TOKENS tokens on tensor cores' targets choose by the last of the router's blocks, and RMSNorm(x) comes to the experts as int8 (mixture_pairs);
so do up to eight by tensor cores, whose choices it puts in groups, too (mixture_few).
Of very many experts, and of one token of a wide model where what the blocks would repeat costs more than a launch (repeated_instructions), the choice
is a launch.

Where kernels overlap (intrinsics.pdl_wait), the experts' down is loaded while gate and up still run: their launch lets the next one start behind its
own wait, and the choice, or the logits, of the launch before it are known then (chooses_early).
"""
from __future__ import annotations
from dataclasses import replace
from math import prod
from typing import Callable, NamedTuple, Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import cpu, cpu_few, cpu_prefill, few_tokens
from tinygrad.nn.intrinsics import Target, target_of
from tinygrad.nn.kernel import (MULTIPROCESSORS, REGISTER_BYTES, REGISTERS_80, UNIT, Matrix, Norm, Unit, Weight, as_it_is, empty, launch, load4,
                                    optional, silu)
from tinygrad.nn.matmul import add_chosen, expert_gate_up_prefill, gate_up_prefill, grouped_matmul, matmul, matmul_split_half, rms_norm_half
from tinygrad.nn.matvec import (MANY_WARPS, ROWS, STEPS, WARPS, CodedUnit, Codes, CodesOut, DeferredMatrix, ExtraStores, LastBlock, MatvecPart,
                                    Operand, RowSegments, Rounded, ThreadLayout, coded_job, coded_rows_take_turns, codes_in, empty_codes,
                                    empty_rounded, is_simple, is_wide, lane_steps, large_job, linear_part, load_codes, matvec, named, rows_of_job,
                                    stores_codes, thread_layout)
from tinygrad.nn.metal_mul_mat_id import QL_MOE_MSL, QL_SHEXP_MSL, expert_down_msl, expert_gate_up_msl, gate_up_msl, msl_takes
from tinygrad.nn.norm_linear import (decode_target, few_target, linear_of_codes, mul_mat, norm_linear, operand_of, prefill_target, single_segment,
                                         vector_target)
from tinygrad.nn.primitive import primitive
from tinygrad.nn.routing import (MadeChoice, Routing, TopKInKernel, choose_experts, choose_experts_prefill, expert_index,
                                     group_choices, sort_by_expert, warp_choices, warp_chooses)
from tinygrad.nn.step import Step

RESIDENT = 1536    # threads of a multiprocessor whose blocks choose experts: each has the registers for its loads, to be asked for together
# registers that the router's launch leaves, by what it makes beside and the tokens: of a block of the experts' gate and up that follows
ROUTER_ROOM = {("factors", 1): 512 * 40, ("rounded", 2): 256 * 64}
DOWN_ROOM = 256 * 72   # … that one token's down leaves: of a block of q_a's and kv_a's launch
PAIR_REGISTERS = 64  # of a thread that multiplies a token by an expert, where four blocks are at once
BESIDE_LOADS = 20  # registers of such a thread for all else
CHOICES = 256      # of all tokens' experts, that one block makes by the way
PAIRS_TOKENS = 4   # up to so many, tokens have few experts in common, and each pair of the two is a matrix times a vector
# What a launch for one token's choice costs, as instructions of a large GPU's warps: the blocks of gate and up are rid of that many to win as much
LAUNCH_INSTRUCTIONS = 600_000
COMPARING, STAGING = 3, 30   # instructions that compare an expert with another; that make a float4 int8

class FeedForward(NamedTuple):
  """Matrices (F, D), (F, D) and (D, F), or stacks of them, one an expert"""
  gate: Weight
  up: Weight
  down: Weight

Shared = tuple[Tensor, Weight]   # the shared expert's hidden numbers, float32 (T, G), and its down, (D, G)

FEW_EACH = 8   # tokens of a prompt that choose an expert, on average, up to which the CPU multiplies them as it does a few tokens

def few_each(step:Step, count:int, experts:int) -> bool:
  """Whether few of a step's tokens choose the same expert. count: experts that each takes"""
  return step.few_tokens or step.many_tokens and step.tokens * count <= FEW_EACH * experts

def present(*weights:Weight|None) -> list[Weight]: return [weight for weight in weights if weight is not None]

# ---- gate and up ----

def rows_of_results(matrices:Sequence[Matrix|DeferredMatrix], row:UOp, results:int) -> list[RowSegments]:
  """The rows of a job that makes neighbouring results from `row` on. matrices: gate and up"""
  return [[(matrix, row + i)] for i in range(results) for matrix in matrices]
def swiglu(sums:list[UOp]) -> list[UOp]:
  """The results, from the sums of rows_of_results"""
  return [silu(gate) * up for gate, up in zip(sums[::2], sums[1::2])]

@primitive(outputs=lambda step, x, norm, gate, up, router: [empty(x, x.shape[0], weight.shape[0]) for weight in present(gate, router)])
def gate_up(step:Step, x:Tensor, norm:Norm, gate:Weight, up:Weight, router:Weight|None=None) -> list[Tensor]:
  """silu(gate·n) · (up·n) with n = RMSNorm(x), and router·n. x: float32 (T, D); gate, up: (F, D); router: (E, D)
  -> float32 (T, F) and, with a router, (T, E)"""
  normed = norm(x).contiguous()
  return [(mul_mat(normed, gate).silu() * mul_mat(normed, up)).contiguous(), *[mul_mat(normed, weight) for weight in present(router)]]

@gate_up.form("cpu_decode", takes=lambda step, x, norm, gate, up, router: cpu.takes(*present(gate, up, router)) and step.one_token)
def gate_up_cpu(step:Step, x:Tensor, norm:Norm, gate:Weight, up:Weight, router:Weight|None) -> list[Tensor]:
  return cpu.gate_up_decode(x, norm, gate, up, router)

@gate_up.form("cpu_few", takes=lambda step, x, norm, gate, up, router: cpu.takes(*present(gate, up, router)) and step.few_tokens)
def gate_up_cpu_few(step:Step, x:Tensor, norm:Norm, gate:Weight, up:Weight, router:Weight|None) -> list[Tensor]:
  return cpu_few.gate_up_few(x, norm, gate, up, router)

@gate_up.form("cpu_prefill", takes=lambda step, x, norm, gate, up, router: cpu.takes(*present(gate, up, router)) and step.many_tokens)
def gate_up_cpu_prefill(step:Step, x:Tensor, norm:Norm, gate:Weight, up:Weight, router:Weight|None) -> list[Tensor]:
  return cpu_prefill.gate_up_prefill(x, norm, gate, up, router)

@gate_up.form("msl", takes=lambda step, x, norm, gate, up, router:
              step.one_token and msl_takes(decode_target(step, gate, x.shape[1]), QL_SHEXP_MSL, [gate, up], present(router)))
def gate_up_metal(step:Step, x:Tensor, norm:Norm, gate:Weight, up:Weight, router:Weight|None) -> list[Tensor]:
  return gate_up_msl(x, norm, (gate, up), router)

@gate_up.form("decode", takes=lambda step, x, norm, gate, up, router: decode_target(step, gate, x.shape[1]))
def gate_up_decode(step:Step, x:Tensor, norm:Norm, gate:Weight, up:Weight, router:Weight|None) -> list[Tensor]:
  return gate_up_launch(step, x, norm, (gate, up), router, empty(x, x.shape[0], gate.shape[0]))

def gate_up_launch(step:Step, x:Tensor, norm:Norm, weights:Sequence[Weight], router:Weight|None, out:Tensor|Codes,
                   beside:Rounded|Tensor|None=None, routing:Routing|None=None) -> list[Tensor]:
  """gate_up by weights, gate and up, into `out`, and beside it RMSNorm(x), or its 1/rms alone, (T,) -> what these are made of, and the logits.
  routing: the last of the router's blocks chooses the experts of all tokens; in the logits' place come these, int32 (T, count), and their weights,
  float32 (T, count)"""
  gate, up = weights
  target, (T, _), F, what = target_of(gate.device), x.shape, gate.shape[0], "rounded" if isinstance(beside, Rounded) else "factors"
  assert target is not None
  rows, steps = large_job(target, weights, 2 * F, T) or (ROWS, STEPS)
  results = rows // 2 if F % 2 == 0 else 1   # of a job
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    matrices = [gate.matrix(buffers, "gate"), up.matrix(buffers, "up")]
    def store(sums:list[UOp], token:UOp, job:UOp, is_writer:UOp, wait_zero:UOp) -> list[UOp]:
      return [buffers["y"][(token * F + job * results + i).valid(is_writer)].store(value) for i, value in enumerate(swiglu(sums))]
    finish = CodesOut(*codes_in(buffers, "y"), F // UNIT, results, lambda sums, _job, _zero: swiglu(sums), lambda token: token,
                      lambda job: job * results) if isinstance(out, Codes) else store
    rounded = codes_in(buffers, what) if what == "rounded" else None
    parts = [MatvecPart(F // results, lambda job: rows_of_results(matrices, job * results, results), finish, gate.integer and up.integer, rounded,
                        buffers.get("factors", buffers.get("rounded_factors")), 2 * results, steps, nbytes=gate.nbytes + up.nbytes)]
    if router is not None:
      spread = is_wide(router)
      of = single_segment(router.matrix(buffers, "router", spread))
      logits = linear_part(router.shape[0], of, buffers["logits"], router.integer, count=rows_of_job(target, router))
      parts.append(replace(logits, steps=lane_steps(router), nbytes=router.nbytes, piece=router.piece if spread else 0))
    if step.few_tokens: parts.reverse()   # tinygrad walks the whole first branch for each access of the second, and the router's has more of them
    def choose(thread:UOp, threads:int, slot:int) -> list[UOp]:
      assert routing is not None and router is not None
      return warp_choices(target, routing, (1, T, router.shape[0]), buffers, thread, threads)
    last = None if routing is None else LastBlock(buffers["plan"][prod(step.plan.shape) - 1], choose)
    return matvec(target, operand_of(buffers, x, norm), parts, last=last)
  outs = {**named(out, "y"), **({} if beside is None else named(beside, what))}
  ins = {"x": x, "norm": norm.weight, **gate.args("gate"), **up.args("up")}
  if router is not None: outs, ins = {**outs, "logits": empty(x, T, router.shape[0])}, {**ins, **router.args("router")}
  if routing is not None:
    assert step.plan is not None
    outs |= {"sel": empty(x, T, routing.count, dtype=dtypes.int32), "weights": empty(x, T, routing.count)}
    ins |= {"plan": step.plan, **optional(bias=routing.bias)}
  name = "_".join(["gate_up", *([] if beside is None else [what]), gate.label, *([] if router is None else ["router", router.label]),
                   *([] if routing is None else ["choose", str(routing.count), routing.label])])
  nbytes = sum(weight.nbytes for weight in present(gate, up, router))
  made = launch(name, outs, ins, body, nbytes, room=0 if router is None else ROUTER_ROOM.get((what, T), 0))
  return made if routing is None else [*made[:-3], *made[-2:]]

# ---- a dense feed-forward ----

@primitive(outputs=lambda step, x, norm, weights, residual: empty(x, *x.shape), composite=True)
def feed_forward(step:Step, x:Tensor, norm:Norm, weights:FeedForward, residual:Tensor) -> Tensor:
  """residual + down·(silu(gate·n) · (up·n)) with n = RMSNorm(x). x, residual: float32 (T, D) -> float32 (T, D)"""
  hidden, = gate_up(step, x, norm, weights.gate, weights.up)
  return norm_linear(step, hidden, None, [weights.down], residual=residual)[0]

def hidden_stores_codes(step:Step, weights:FeedForward) -> bool:
  """Whether a decode step's hidden numbers can be int8 between the launches"""
  F, D = weights.gate.shape
  target = vector_target(step, weights.gate, D, F)
  return target is not None and weights.down.integer and stores_codes(target, [D // UNIT], F, 1)

@feed_forward.form("cpu_few", takes=lambda step, x, norm, weights, residual: step.few_tokens and cpu.takes(*weights))
def feed_forward_cpu_few(step:Step, x:Tensor, norm:Norm, weights:FeedForward, residual:Tensor) -> Tensor:
  return cpu_few.feed_forward_few(x, norm, *weights, residual)

@feed_forward.form("decode", takes=lambda step, x, norm, weights, residual: hidden_stores_codes(step, weights))
def feed_forward_decode(step:Step, x:Tensor, norm:Norm, weights:FeedForward, residual:Tensor) -> Tensor:
  """The plain form's launches, with hidden numbers as int8"""
  hidden = gate_up_launch(step, x, norm, weights[:2], None, empty_codes(x, x.shape[0], weights.gate.shape[0]))
  return linear_of_codes(Codes(*hidden), weights.down, residual, DOWN_ROOM if step.tokens == 1 else 0, step.invariant)

@feed_forward.form("prefill", takes=lambda step, x, norm, weights, residual: prefill_target(step, weights.gate, *weights.gate.shape))
def feed_forward_prefill(step:Step, x:Tensor, norm:Norm, weights:FeedForward, residual:Tensor) -> Tensor:
  target = target_of(weights.gate.device)
  assert target is not None
  hidden = gate_up_prefill(target, rms_norm_half(target, x, norm)[0], weights[:2])
  return matmul(target, hidden, weights.down, residual)

@feed_forward.form("few", takes=lambda step, x, norm, weights, residual: few_target(step, weights.gate, *weights.gate.shape))
def feed_forward_few(step:Step, x:Tensor, norm:Norm, weights:FeedForward, residual:Tensor) -> Tensor:
  target = target_of(weights.gate.device)
  assert target is not None
  hidden, _ = few_tokens.few_gate_up(target, few_tokens.columns(target, x, norm)[0], weights.gate, weights.up)
  return few_tokens.few_matmul(target, hidden, [weights.down], residual)[0]

# ---- the chosen experts ----

@primitive(outputs=lambda step, x, norm, gate, up, logits, routing:
           (empty(x, x.shape[0], routing.count, gate.shape[1]), empty(x, x.shape[0], routing.count, dtype=dtypes.int32)))
def expert_gate_up(step:Step, x:Tensor, norm:Norm, gate:Weight, up:Weight, logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  """The chosen experts' silu(gate·n) · (up·n) times their weight, n = RMSNorm(x). x: float32 (T, D); gate, up: (E, F, D);
  logits: float32 (T, E) -> float32 (T, K, F), and the choice, int32 (T, K)"""
  (sel, scale), normed = choose_experts(logits, routing), norm(x).contiguous().unsqueeze(1)
  return (mul_mat(normed, gate, sel).silu() * mul_mat(normed, up, sel) * scale.unsqueeze(-1)).contiguous(), sel

@expert_gate_up.form("cpu_decode", takes=lambda step, x, norm, gate, up, logits, routing: cpu.takes(gate, up) and step.one_token)
def expert_gate_up_cpu(step:Step, x:Tensor, norm:Norm, gate:Weight, up:Weight, logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  return cpu.expert_gate_up_decode(x, norm, gate, up, logits, routing)

@expert_gate_up.form("cpu_few", takes=lambda step, x, norm, gate, up, logits, routing:
                     cpu.takes(gate, up) and gate.shape[1] % UNIT == 0 and few_each(step, routing.count, gate.shape[0]))
def expert_gate_up_cpu_few(step:Step, x:Tensor, norm:Norm, gate:Weight, up:Weight, logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  hidden, sel = cpu_few.expert_gate_up_few(cpu_few.stage_tokens(x, norm), gate, up, logits, routing)
  return hidden.X.reshape(*sel.shape, gate.shape[1]), sel

@expert_gate_up.form("cpu_prefill", takes=lambda step, x, norm, gate, up, logits, routing: cpu.takes(gate, up) and step.many_tokens)
def expert_gate_up_cpu_prefill(step:Step, x:Tensor, norm:Norm, gate:Weight, up:Weight, logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  return cpu_prefill.expert_gate_up_prefill(x, norm, gate, up, logits, routing)

@expert_gate_up.form("msl", takes=lambda step, x, norm, gate, up, logits, routing:
                     step.one_token and msl_takes(decode_target(step, gate, x.shape[1]), QL_MOE_MSL, [gate, up]))
def expert_gate_up_metal(step:Step, x:Tensor, norm:Norm, gate:Weight, up:Weight, logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  return expert_gate_up_msl(x, norm, (gate, up), logits, routing)

@expert_gate_up.form("decode", takes=lambda step, x, norm, gate, up, logits, routing: decode_target(step, gate, x.shape[1]))
def expert_gate_up_decode(step:Step, x:Tensor, norm:Norm, gate:Weight, up:Weight, logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  hidden, sel = expert_gate_up_launch(x, norm, (gate, up), logits, routing, empty(x, x.shape[0], routing.count, gate.shape[1]))
  return hidden, sel

def stored_factor(factors:UOp, token:UOp) -> Callable[[UOp, UOp], UOp]:
  """An Operand's factor, of the only token"""
  return lambda _, wait_zero: factors[token + wait_zero].load()

def choosing_warps(gate:Weight) -> int:
  """Of a block of expert_gate_up_launch: where a job is more work, the last of large blocks would run alone for longer"""
  return MANY_WARPS if is_simple(gate) else WARPS

def choosing_blocks(target:Target, gate:Weight, count:int, results:int) -> tuple[int, ThreadLayout]:
  """Of a token, and their layout, where a job has so many results"""
  _, F, D = gate.shape
  jobs = count * F // results
  layout = thread_layout([D // UNIT], target.lanes, jobs, many=choosing_warps(gate))
  return -(-jobs // layout.teams), layout

def may_make_two(gate:Weight) -> bool:
  """Whether a job of gate and up may make two neighbouring results. Floats, and what is looked up, take registers beside"""
  return not gate.looks_up and gate.integer and gate.shape[1] % 2 == 0

def gate_up_loads(gate:Weight, results:int, layout:ThreadLayout) -> int:
  """Registers for what a lane loads of gate and up of so many results"""
  return 2 * results * -(-gate.shape[-1] // (UNIT * layout.span)) * (sum(gate.widths) + gate.fields - len(gate.widths))

def results_of_job(target:Target, gate:Weight, count:int, tokens:int) -> int:
  """Neighbouring results of a job of expert_gate_up_launch. A block waits for its weights, as rows are known late: they are to be asked for together,
  by all blocks at once. Two, where blocks of one result each have no registers for that, and half as many have, or are at once where they are not"""
  def at_once(results:int) -> tuple[bool, bool]:
    """Whether blocks of so many results are, and with the registers"""
    blocks, layout = choosing_blocks(target, gate, count, results)
    threads = -(-blocks * tokens // MULTIPROCESSORS) * layout.threads   # for a multiprocessor
    return threads <= RESIDENT, 4 * threads * (gate_up_loads(gate, results, layout) + BESIDE_LOADS) <= REGISTER_BYTES
  (one, one_has_room), (two, two_have_room) = map(at_once, (1, 2))
  if target.at_once is None or not may_make_two(gate) or one_has_room: return 1
  return 2 if two_have_room or two and not one else 1

def expert_gate_up_launch(x:Tensor, norm:Norm, weights:tuple[Weight, Weight], logits:Tensor, routing:Routing, out:Tensor|Codes,
                          factors:Tensor|None=None, trigger_last:bool=False) -> list[Tensor]:
  """expert_gate_up by weights, gate and up, into `out` -> what it is made of, and the choice. Number k · F + i is row i of the k-th chosen expert, a
  job makes a few. gidx1 is the token: few have an expert in common. Every block makes the choice for itself. factors: the tokens' 1/rms, (T,), if
  they are known.
  trigger_last: so does the next kernel, from the logits, early (see pdl_wait), and the choice is not stored."""
  gate, up = weights
  (E, F, _), K, T, target = gate.shape, routing.count, x.shape[0], target_of(gate.device)
  assert target is not None
  results = results_of_job(target, gate, K, T)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    token, matrices = UOp.special(T, "gidx1"), [gate.matrix(buffers, "gate"), up.matrix(buffers, "up")]
    chosen = TopKInKernel(target, routing, E, buffers["logits"], buffers.get("bias"), token)
    def rows_of_job(job:UOp) -> Sequence[RowSegments]:
      return rows_of_results(matrices, chosen.expert(job * results // F).cast(dtypes.weakint) * F + job * results % F, results)
    def weighted(sums:list[UOp], job:UOp) -> list[UOp]:
      weight = as_it_is(chosen.weight(job * results // F))
      return [as_it_is(value) * weight for value in swiglu(sums)]
    def store(sums:list[UOp], _:UOp, job:UOp, is_writer:UOp, wait_zero:UOp) -> list[UOp]:
      return [buffers["y"][(token * K * F + job * results + i).valid(is_writer)].store(value) for i, value in enumerate(weighted(sums, job))]
    finish = CodesOut(*codes_in(buffers, "y"), K * F // UNIT, results, lambda sums, job, _zero: weighted(sums, job), lambda _: token,
                      lambda job: job * results) if isinstance(out, Codes) else store
    def store_choice(block:UOp, thread:UOp, threads:int, wait_zero:UOp) -> list[UOp]:
      k = thread.minimum(K - 1)
      return [buffers["sel"][(token * K + k).valid(block.eq(0) & (thread < K))].store(chosen.expert(k))]
    part = MatvecPart(K * F // results, rows_of_job, finish, gate.integer and up.integer, rows=2 * results, many=choosing_warps(gate))
    extra = None if trigger_last else ExtraStores(store_choice)
    operand = operand_of(buffers, x, norm, token)
    if factors is not None: operand = replace(operand, factor=stored_factor(buffers["factors"], token))
    return matvec(target, operand, [part], extra, chosen, trigger_last=trigger_last)
  outs = {**named(out, "y"), **({} if trigger_last else {"sel": empty(x, T, K, dtype=dtypes.int32)})}
  ins = {"x": x, "norm": norm.weight, "logits": logits, **optional(bias=routing.bias, factors=factors), **gate.args("gate"), **up.args("up")}
  resident = RESIDENT if is_simple(gate) or results > 1 else 0
  return launch(f"expert_gate_up_{K}_{routing.label}_{gate.label}", outs, ins, body, resident=resident)

def results_of_pairs(target:Target, gate:Weight, count:int) -> int:
  """Neighbouring results of a job of chosen_gate_up: two where a lane has the registers for their loads, of half as many blocks"""
  _, F, D = gate.shape
  layout = thread_layout([D // UNIT], target.lanes, count * F // 2, copies=True)
  return 2 if may_make_two(gate) and gate_up_loads(gate, 2, layout) + BESIDE_LOADS <= PAIR_REGISTERS else 1

def chosen_gate_up(x:Rounded, gate:Weight, up:Weight, sel:Tensor, weights:Tensor, trigger_last:bool) -> Codes:
  """expert_gate_up of RMSNorm(x) as int8 and a choice that is made. sel: int32 (T, K); weights: float32 (T, K) -> the hidden numbers, a vector a
  token. gidx1 is expert_gate_up_launch's. trigger_last: the next kernel may read the choice early (see pdl_wait)."""
  (E, F, D), (T, K), target = gate.shape, sel.shape, target_of(gate.device)
  assert target is not None
  results = results_of_pairs(target, gate, K)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    token = UOp.special(T, "gidx1")
    def load(name:str, job:UOp, wait_zero:UOp) -> UOp: return buffers[name][token * K + job // F + wait_zero].load()
    def rows(name:str, weight:Weight, job:UOp) -> DeferredMatrix:
      matrix = weight.matrix(buffers, name)
      def of(wait_zero:UOp) -> Matrix:
        expert = expert_index(load("sel", job, wait_zero), E)
        return lambda row, unit, gate: matrix(expert * F + row, unit, gate)
      return DeferredMatrix(of)
    def rows_of_job(job:UOp) -> Sequence[RowSegments]:
      first = job * results
      return rows_of_results([rows("gate", gate, first), rows("up", up, first)], first % F, results)
    def values(sums:list[UOp], job:UOp, wait_zero:UOp) -> list[UOp]:
      weight = load("weights", job * results, wait_zero)
      return [as_it_is(value) * weight for value in swiglu(sums)]
    finish = CodesOut(*codes_in(buffers, "y"), K * F // UNIT, results, values, lambda _: token, lambda job: job * results)
    operand = Operand([D // UNIT], None, rounded=(*codes_in(buffers, "x"), token), factor=stored_factor(buffers["x_factors"], token))
    part = MatvecPart(K * F // results, rows_of_job, finish, gate.integer and up.integer, rows=2 * results)
    return matvec(target, operand, [part], trigger_last=trigger_last)
  ins = {**named(x, "x"), **gate.args("gate"), **up.args("up"), "sel": sel, "weights": weights}
  return Codes(*launch(f"chosen_gate_up_{K}_{gate.label}", named(empty_codes(sel, T, K * F), "y"), ins, body))

@primitive(outputs=lambda step, hidden, down, sel, residual, shared: empty(residual, *residual.shape))
def expert_down(step:Step, hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor, shared:Shared|None=None) -> Tensor:
  """residual + Σ_k down[sel[k]] · hidden[k] + the shared expert's down times its hidden numbers. hidden: float32 (T, K, F), weighted already;
  down: (E, D, F); residual: float32 (T, D) -> float32 (T, D)"""
  out = residual + mul_mat(hidden, down, sel).sum(1)
  return (out if shared is None else out + mul_mat(*shared)).contiguous()

def shared_down(shared:Shared|None) -> list[Weight]: return [] if shared is None else [shared[1]]
def with_shared(step:Step, out:Tensor, shared:Shared|None) -> Tensor:
  """out + the shared expert's down times its hidden numbers, as a matrix of its own"""
  return out if shared is None else norm_linear(step, shared[0], None, [shared[1]], residual=out)[0]

@expert_down.form("cpu_decode", takes=lambda step, hidden, down, sel, residual, shared: cpu.takes(down, *shared_down(shared)) and step.one_token)
def expert_down_cpu(step:Step, hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor, shared:Shared|None) -> Tensor:
  return cpu.expert_down_decode(hidden, down, sel, residual, shared)

@expert_down.form("cpu_few", takes=lambda step, hidden, down, sel, residual, shared:
                  cpu.takes(down, *shared_down(shared)) and few_each(step, sel.shape[1], down.shape[0]))
def expert_down_cpu_few(step:Step, hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor, shared:Shared|None) -> Tensor:
  """What all tokens of a prompt choose is multiplied by tiles"""
  beside = (cpu_few.stage_tokens(shared[0]), shared[1]) if shared is not None and step.few_tokens else None
  out = cpu_few.expert_down_few(cpu_few.stage_tokens(hidden), down, sel, residual, beside)
  return out if beside is not None else with_shared(step, out, shared)

@expert_down.form("cpu_prefill", takes=lambda step, hidden, down, sel, residual, shared: cpu.takes(down, *shared_down(shared)) and step.many_tokens)
def expert_down_cpu_prefill(step:Step, hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor, shared:Shared|None) -> Tensor:
  return with_shared(step, cpu_prefill.expert_down_prefill(hidden, down, sel, residual), shared)

@expert_down.form("msl", takes=lambda step, hidden, down, sel, residual, shared:
                  step.one_token and
                  msl_takes(decode_target(step, down, *(weight.shape[-1] for weight in (down, *shared_down(shared)))), QL_MOE_MSL, [down],
                            *([weight] for weight in shared_down(shared))))
def expert_down_metal(step:Step, hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor, shared:Shared|None) -> Tensor:
  return expert_down_msl(hidden, down, sel, residual, shared)

@expert_down.form("decode", takes=lambda step, hidden, down, sel, residual, shared:
                  decode_target(step, down, *(weight.shape[-1] for weight in (down, *shared_down(shared)))))
def expert_down_decode(step:Step, hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor, shared:Shared|None) -> Tensor:
  return expert_down_launch(hidden, down, sel.shape[1], {"sel": sel}, residual, shared)

def chooses_early(target:Target, down:Weight, count:int, shared:FeedForward|None) -> bool:
  """Whether expert_down's blocks know the choice, and load its weights, before their wait. Where they take turns they are to hold few registers."""
  (_, D, F), beside = down.shape, [] if shared is None else [shared.down.shape[1] // UNIT]
  return target.wait is not None and not coded_rows_take_turns([count * F // UNIT, *beside], target.lanes, D)

# (flat buffers, token) -> a choice in the kernel
ChoiceOf = Callable[[dict[str, UOp], UOp], MadeChoice|TopKInKernel]

def expert_down_launch(hidden:Tensor|Codes, down:Weight, count:int, choosing:dict[str, Tensor], residual:Tensor,
                       shared:tuple[Tensor|Codes, Weight]|None, early:ChoiceOf|None=None) -> Tensor:
  """A row of the product runs through all chosen experts, and on through the shared one. gidx1 is the token.
  choosing: sel, int32 (T, count), or what `early` makes the choice of, before the wait (see pdl_wait): then the weights are loaded there, too."""
  (E, D, F), (T, _), K, target = down.shape, residual.shape, count, target_of(down.device)
  assert target is not None
  units, beside = F // UNIT, [] if shared is None else [shared[0]]
  weights = [down, *([] if shared is None else [shared[1]])]
  segments = [K * units, *(weight.shape[1] // UNIT for weight in weights[1:])]
  rows, steps = ROWS, min(map(lane_steps, weights))
  if isinstance(hidden, Codes): rows, steps = coded_job(down, segments, target.lanes, D, STEPS, STEPS // 2)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    token, experts = UOp.special(T, "gidx1"), down.matrix(buffers, "w")
    choice = None if early is None else early(buffers, token)
    def expert_of(k:UOp, wait_zero:UOp, gate:UOp|None) -> UOp:
      if choice is not None: return choice.expert(k).cast(dtypes.weakint)
      place = token * K + k.minimum(K - 1) + wait_zero   # tinygrad asks for it outside of the weights' gate
      return expert_index(buffers["sel"][place if gate is None else place.valid(gate)].load(), E)
    def chosen(wait_zero:UOp) -> Matrix:
      def unit_of(row:UOp, unit:UOp, gate:UOp|None) -> Unit:
        return experts(expert_of(unit // units, wait_zero, gate) * D + row, unit % units, gate)
      return unit_of
    shared_rows = [weight.matrix(buffers, "shared") for weight in weights[1:]]
    def vector(index:UOp) -> list[UOp]:
      """Numbers 4·index … of the token's hidden numbers, the experts' one after another, and then the shared one's"""
      own = K * F // 4
      first = load4(buffers["x"], token * K * F)(index if shared is None else (index < own).where(index, 0))
      if shared is None: return first
      second = load4(buffers["x_shared"], token * shared[1].shape[1])((index < own).where(0, index - own))
      return [(index < own).where(v, w) for v, w in zip(first, second)]
    def codes(_:UOp, segment:int, unit:UOp) -> CodedUnit: return load_codes(buffers, ("x", "x_shared")[segment], segments[segment], token, unit)
    part = linear_part(D, lambda row: [(DeferredMatrix(chosen), row), *((matrix, row) for matrix in shared_rows)], buffers["y"],
                       all(weight.integer for weight in weights), lambda _, row: token * D + row, residual=buffers["residual"], count=rows)
    operand = Operand(segments, None, codes=codes) if isinstance(hidden, Codes) else Operand(segments, lambda _: vector)
    return matvec(target, operand, [replace(part, steps=steps)], choice=choice)
  ins = {**named(hidden, "x"), **choosing, "residual": residual, **down.args("w"), **{k: v for x in beside for k, v in named(x, "x_shared").items()},
         **(shared[1].args("shared") if shared is not None else {})}
  name = "_".join([f"expert_down_{K}", *([] if early is None else ["early"]), down.label, *([] if shared is None else ["shared", shared[1].label])])
  resident = REGISTERS_80 if isinstance(hidden, Codes) and early is None else 0   # its loads come behind the wait: together
  return launch(name, {"y": empty(residual, T, D)}, ins, body, resident=resident)[0]

# ---- a mixture of experts ----

@primitive(outputs=lambda step, x, norm, router, routing, experts, shared, residual: empty(x, *x.shape), composite=True)
def mixture(step:Step, x:Tensor, norm:Norm, router:Weight, routing:Routing, experts:FeedForward, shared:FeedForward|None,
            residual:Tensor) -> Tensor:
  """residual + the chosen experts' feed-forward of RMSNorm(x), weighted, + the shared expert's. x, residual: float32 (T, D); router: (E, D)
  -> float32 (T, D)"""
  if shared is None: logits, = norm_linear(step, x, norm, [router])
  else: beside, logits = gate_up(step, x, norm, shared.gate, shared.up, router)
  hidden, sel = expert_gate_up(step, x, norm, experts.gate, experts.up, logits, routing)
  return expert_down(step, hidden, experts.down, sel, residual, None if shared is None else (beside, shared.down))

@mixture.form("cpu_few", takes=lambda step, x, norm, router, routing, experts, shared, residual:
              step.few_tokens and cpu.takes(router, *experts, *(shared or ())))
def mixture_cpu_few(step:Step, x:Tensor, norm:Norm, router:Weight, routing:Routing, experts:FeedForward, shared:FeedForward|None,
                    residual:Tensor) -> Tensor:
  """The plain form's launches, between which all is staged"""
  staged, T, beside = cpu_few.stage_tokens(x, norm), x.shape[0], None
  if shared is None: logits = cpu_few.linear(staged, router, T)
  else:
    *hidden, logits = cpu_few.gate_up_launch(cpu_few.empty_staged(x, T, shared.gate.shape[0]), staged, shared.gate, shared.up, router, T)
    beside = cpu_few.Staged(*hidden), shared.down
  chosen, sel = cpu_few.expert_gate_up_few(staged, experts.gate, experts.up, logits, routing)
  return cpu_few.expert_down_few(chosen, experts.down, sel, residual, beside)

def mixture_stores_codes(step:Step, x:Tensor, router:Weight, routing:Routing, experts:FeedForward, shared:FeedForward|None) -> bool:
  """Whether a decode step's hidden numbers can be int8 between the launches"""
  D, downs = x.shape[1], [weights.down for weights in (experts, shared) if weights is not None]
  widths = [weight.shape[-1] for weight in downs]
  target = vector_target(step, router, D, *widths)
  if target is None: return False
  jobs = {"chosen": routing.count * widths[0], **({"shared": widths[1]} if shared is not None else {})}
  return all(weight.integer for weight in downs) and all(stores_codes(target, [D // UNIT], F, 1, chosen=of == "chosen") for of, F in jobs.items())

@mixture.form("decode", takes=lambda step, x, norm, router, routing, experts, shared, residual:
              mixture_stores_codes(step, x, router, routing, experts, shared))
def mixture_decode(step:Step, x:Tensor, norm:Norm, router:Weight, routing:Routing, experts:FeedForward, shared:FeedForward|None,
                   residual:Tensor) -> Tensor:
  """The plain form's launches, with hidden numbers as int8"""
  T, F, E, K, target = x.shape[0], experts.down.shape[2], router.shape[0], routing.count, target_of(router.device)
  assert target is not None
  factors, beside = None, None
  if shared is None: logits, = norm_linear(step, x, norm, [router])
  else:
    *codes, factors, logits = gate_up_launch(step, x, norm, shared[:2], router, empty_codes(x, T, shared.down.shape[1]), empty(x, T))
    beside = Codes(*codes), shared.down
  chooses = chooses_early(target, experts.down, K, shared) and routing.same_everywhere
  words, scales, *sel = expert_gate_up_launch(x, norm, experts[:2], logits, routing, empty_codes(x, T, K * F), factors, chooses)
  def early(buffers:dict[str, UOp], token:UOp) -> TopKInKernel:
    return TopKInKernel(target, routing, E, buffers["logits"], buffers.get("bias"), token, early=True)
  choosing = {"logits": logits, **optional(bias=routing.bias)} if chooses else {"sel": sel[0]}
  return expert_down_launch(Codes(words, scales), experts.down, K, choosing, residual, beside, early if chooses else None)

def repeated_instructions(target:Target, routing:Routing, gate:Weight) -> int:
  """What the blocks of expert_gate_up_launch spend on one token's choice and vector, each for itself"""
  (E, _, D), results = gate.shape, results_of_job(target, gate, routing.count, 1)
  blocks, _ = choosing_blocks(target, gate, routing.count, results)
  return blocks * (routing.comparisons(E) * COMPARING + D // 4 * STAGING) // target.lanes

def pairs_target(step:Step, x:Tensor, _:Norm, router:Weight, routing:Routing, experts:FeedForward, shared:FeedForward|None,
                 residual:Tensor) -> Target|None:
  """The target, with tensor cores, that takes so few tokens a pair of token and expert at a time. One token where many blocks would choose of many
  experts, or make a long vector's int8."""
  if step.tokens > PAIRS_TOKENS and not step.invariant or shared is None or not all(weight.integer for weight in (*experts, *shared)): return None
  D, F, G = x.shape[1], experts.down.shape[2], shared.down.shape[1]
  target = decode_target(step, router, D, F, G)
  if target is None or not few_tokens.takes(target): return None
  if step.one_token and repeated_instructions(target, routing, experts.gate) < LAUNCH_INSTRUCTIONS: return None
  stores = stores_codes(target, [D // UNIT], routing.count * F, 1, copies=True) and stores_codes(target, [D // UNIT], G, 1)
  return target if stores else None

@mixture.form("pairs", takes=pairs_target)
def mixture_pairs(step:Step, x:Tensor, norm:Norm, router:Weight, routing:Routing, experts:FeedForward, shared:FeedForward|None,
                  residual:Tensor) -> Tensor:
  """The launches of the decode form, but that the first hands RMSNorm(x) on as int8, and its last block chooses, or the choice is a launch: tokens
  come in turns, and blocks that neither stage nor choose are short"""
  T, target = x.shape[0], target_of(router.device)
  assert target is not None and shared is not None
  E, K = router.shape[0], routing.count
  last = routing if step.plan is not None and warp_chooses(target, routing) and E * T <= CHOICES else None
  made = gate_up_launch(step, x, norm, shared[:2], router, empty_codes(x, T, shared.down.shape[1]), empty_rounded(x, *x.shape), last)
  sel, weights = made[-2:] if last is not None else choose_experts_prefill(target, made[-1], routing, overlaps=True)
  chooses = chooses_early(target, experts.down, K, shared)
  hidden = chosen_gate_up(Rounded(*made[2:5]), experts.gate, experts.up, sel, weights, trigger_last=chooses)
  def early(buffers:dict[str, UOp], token:UOp) -> MadeChoice: return MadeChoice(E, buffers["sel"], K, token)
  beside = Codes(*made[:2]), shared.down
  return expert_down_launch(hidden, experts.down, K, {"sel": sel}, residual, beside, early if chooses else None)

@mixture.form("prefill", takes=lambda step, x, norm, router, routing, experts, shared, residual:
              prefill_target(step, router, x.shape[1], experts.down.shape[2], *(weights.down.shape[1] for weights in (shared,) if weights)))
def mixture_prefill(step:Step, x:Tensor, norm:Norm, router:Weight, routing:Routing, experts:FeedForward, shared:FeedForward|None,
                    residual:Tensor) -> Tensor:
  """By tensor cores; the router's logits as good as float32"""
  target = target_of(router.device)
  assert target is not None
  normed, low = rms_norm_half(target, x, norm, low=True)
  sel, scale = choose_experts_prefill(target, matmul_split_half(target, normed, low, router), routing)
  order = sort_by_expert(target, sel, router.shape[0])
  hidden = expert_gate_up_prefill(target, normed, experts[:2], order, scale)
  each = grouped_matmul(target, hidden, experts.down, order, routing.count)
  total = residual if shared is None else matmul(target, gate_up_prefill(target, normed, shared[:2]), shared.down, residual)
  return add_chosen(target, total, each)

@mixture.form("few", takes=lambda step, x, norm, router, routing, experts, shared, residual:
              few_target(step, experts.gate, x.shape[1], experts.down.shape[2], *(weights.down.shape[1] for weights in (shared,) if weights)))
def mixture_few(step:Step, x:Tensor, norm:Norm, router:Weight, routing:Routing, experts:FeedForward, shared:FeedForward|None,
                residual:Tensor) -> Tensor:
  """By tensor cores; the router's logits, beside the shared expert's gate and up, as good as float32"""
  target = target_of(router.device)
  assert target is not None
  normed, low = few_tokens.columns(target, x, norm, low=True)
  def choose(logits:Tensor) -> tuple[Tensor, Tensor]:
    sel, scale = choose_experts_prefill(target, logits, routing, overlaps=True)
    return scale, group_choices(target, sel, router.shape[0])
  if shared is None: (scale, groups), beside = choose(few_tokens.few_router(target, normed, low, router)), None
  else:
    last = (routing, step.plan) if step.plan is not None and few_tokens.last_block_chooses(target, normed, shared.gate, router, routing) else None
    hidden, made = few_tokens.few_gate_up(target, normed, shared.gate, shared.up, router, low, last)
    (scale, groups), beside = choose(*made) if last is None else made, few_tokens.Shared(shared.down, hidden)
  hidden = few_tokens.few_expert_gate_up(target, normed, experts[:2], groups, scale)
  each = few_tokens.few_expert_down(target, hidden, experts.down, groups, routing.count, beside)
  return few_tokens.few_sum(target, residual, each, routing.count)

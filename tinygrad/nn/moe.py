"""The feed-forward of decoding, in three launches: the router's logits beside the shared expert's gate and up; the choice of experts and their
gate and up with SwiGLU and the routing weight in the epilogue; their down, the shared expert's and the residual in one sum.

The choice is made by every block of the second launch for itself: 64 logits cost less to rank again than a launch costs. Expert ids are read in
the kernels. In the first launch the blocks part into two branches, each with a vector and a layout of its own.
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import cpu, cpu_prefill
from tinygrad.nn.intrinsics import Target, group_reduce, group_sum
from tinygrad.nn.matmat import HIDDEN, by_expert, gate_up_mats, mats_target, mul_mats, mul_mats_id, normalized, precise_mats
from tinygrad.nn.matvec import SLOTS, UNIT, Late, Matrix, Norm, Row, Rows, Unit, Weight, exp, launch, local, matvec, row_pairs, silu, total
from tinygrad.nn.metal_mul_mat_id import QL_MOE_MSL, QL_SHEXP_MSL, expert_down_msl, expert_gate_up_msl, gate_up_msl, serves
from tinygrad.nn.norm_linear import kernel_target, quad, rows_of
from tinygrad.uop.ops import Ops

SOFTMAX, SIGMOID, SOFTMAX_WEIGHT = 1, 2, 3   # GGUF's expert_gating_func; the third is softmax over the chosen logits only
NEVER = -1e30                                # a logit that no expert has
LEAST_SUM = 6.103515625e-5                   # of the chosen scores, before they are normalized

@dataclass(frozen=True)
class Choice:
  """How the experts of a token follow from its logits"""
  count: int
  gating: int
  normalize: bool
  scale: float
  bias: Tensor|None = None   # float32 (E,), which only chooses

def choose_experts(logits:Tensor, how:Choice) -> tuple[Tensor, Tensor]:
  """logits: float32 (T, E) -> int32 (T, count) experts, best first, the lower index on a tie, and float32 (T, count) weights"""
  logits = logits.contiguous()
  scores = {SOFTMAX: logits.softmax, SIGMOID: lambda _: logits.sigmoid(), SOFTMAX_WEIGHT: lambda _: logits}[how.gating](-1)
  choice = scores if how.bias is None else scores + how.bias
  # an expert's rank is the number of experts before it
  mine, other, index = choice.unsqueeze(2), choice.unsqueeze(1), Tensor.arange(logits.shape[1])
  before = (other > mine) | (other.eq(mine) & (index.unsqueeze(0) < index.unsqueeze(1)))
  chosen = before.sum(-1).unsqueeze(1).eq(Tensor.arange(how.count).unsqueeze(1))     # (T, count, E), one true in a row
  sel = chosen.where(index, 0).sum(-1).cast(dtypes.int32)
  weights = chosen.where(scores.unsqueeze(1), 0.0).sum(-1)
  if how.gating == SOFTMAX_WEIGHT: weights = weights.softmax(-1)
  if how.normalize: weights = weights / weights.sum(-1, keepdim=True).maximum(LEAST_SUM)
  return sel.contiguous(), (weights * how.scale).contiguous()

class Chosen:
  """choose_experts within a block of threads: barrier() makes the choice, after which expert(k) and weight(k) are known to all"""
  def __init__(self, t:Target, how:Choice, experts:int, logits:UOp, bias:UOp|None):
    self.target, self.how, self.experts, self.logits, self.bias = t, how, experts, logits, bias
  def barrier(self, thread:UOp, threads:int, previous:UOp, stores:list[UOp]) -> UOp:
    how, E, SLOT = self.how, self.experts, SLOTS
    # a thread an expert, or several where there are more experts
    mine = [(expert, expert < E) for expert in (thread + first for first in range(0, E, threads))]
    def gather(own:list[UOp], slot:int) -> UOp:
      """What the threads have of all experts, in shared memory"""
      shared = local(E, dtypes.float, slot)
      stored = [shared[expert.valid(ok)].store(v) for v, (expert, ok) in zip(own, mine)]
      return shared.after(UOp(Ops.BARRIER, src=(*stores, *stored)))
    scores = [self.logits[(expert + previous).valid(ok)].load() for expert, ok in mine]
    choices = scores
    if how.gating == SOFTMAX:
      everyone, lanes = gather(scores, SLOT + 3), self.target.lanes   # in the order of the softmax already
      ours = [((thread % lanes) + first, (thread % lanes) + first < E) for first in range(0, E, lanes)]
      ours = [everyone[e].load() if E % lanes == 0 else ok.where(everyone[e.valid(ok)].load(), NEVER) for e, ok in ours]
      top = group_reduce(self.target, total(ours, UOp.maximum), lanes, UOp.maximum)
      inverse = 1 / group_sum(self.target, total([exp(x - top) for x in ours], UOp.add), lanes)
      scores = [exp(x - top) * inverse for x in scores]
    elif how.gating == SIGMOID: choices = scores = [1 / (1 + exp(-x)) for x in scores]
    if self.bias is not None: choices = [s + self.bias[expert.valid(ok)].load() for s, (expert, ok) in zip(scores, mine)]
    if how.gating != SOFTMAX or self.bias is not None: everyone = gather(choices, SLOT)
    others = [everyone[i].load() for i in range(E)]
    ids, values, written = local(how.count, dtypes.int, SLOT + 1), local(how.count, dtypes.float, SLOT + 2), []
    for score, choice, (expert, ok) in zip(scores, choices, mine):
      ahead = total([(other > choice).where(1, ((other >= choice) & (i < expert)).where(1, 0)) for i, other in enumerate(others)], UOp.add)
      place = ok.where(ahead, E)   # not in the gate: tinygrad would take ok for true in all that the index depends on, the barrier's stores too
      wins = place < how.count
      slot = wins.where(place, 0).cast(dtypes.weakint)
      written += [ids[slot.valid(wins)].store(expert.cast(dtypes.int)), values[slot.valid(wins)].store(score)]
    barrier = UOp(Ops.BARRIER, src=tuple(written))
    self.ids, self.values = ids.after(barrier), values.after(barrier)
    return barrier
  def expert(self, k:UOp) -> UOp: return self.ids[k].load().maximum(0).minimum(self.experts - 1)  # where logits are no numbers, none was chosen
  def weight(self, k:UOp) -> UOp:
    values, weight = [self.values[i].load() for i in range(self.how.count)], self.values[k].load()
    if self.how.gating == SOFTMAX_WEIGHT:
      top = total(values, UOp.maximum)
      values, weight = [exp(v - top) for v in values], exp(weight - top)
      weight, values = weight / total(values, UOp.add), [v / total(values, UOp.add) for v in values]
    return (weight / total(values, UOp.add).maximum(LEAST_SUM) if self.how.normalize else weight) * self.how.scale

def gate_up_part(weights:Sequence[Weight], b:dict[str, UOp], names:Sequence[str], y:UOp) -> Rows:
  """y[i] = silu(gate row i · x) · (up row i · x)"""
  gate, up = (w.matrix(b, name) for w, name in zip(weights, names))
  def finish(sums:list[UOp], team:UOp, keep:UOp, previous:UOp) -> list[UOp]: return [y[team.valid(keep)].store(silu(sums[0]) * sums[1])]
  return Rows(weights[0].shape[0], lambda team: [[(gate, team)], [(up, team)]], finish, all(w.integer for w in weights))

def gate_up(x:Tensor, norm:Norm, weights:tuple[Weight, Weight], router:Weight|None=None) -> list[Tensor]:
  """silu(gate·n) · (up·n) with n = RMSNorm(x), and router·n. x: float32 (T, D); weights: gate and up, (F, D); router: (E, D)
  -> float32 (T, F) and, with a router, (T, E)"""
  if x.shape[0] == 1 and cpu.fits(*weights, *([] if router is None else [router])):
    return [cpu.gate_up(x, norm, weights), *([] if router is None else cpu.norm_linear(x, norm, [router]))]
  if x.shape[0] > 1 and cpu.fits(*weights, *([] if router is None else [router])): return cpu_prefill.gate_up(x, norm, weights, router)
  if t := kernel_target(x, x.shape[1]): return gate_up_kernel(t, x, norm, weights, router)
  if router is None and (t := mats_target(x, *weights[0].shape)): return [gate_up_mats(t, normalized(t, x, norm)[0], weights)]
  return gate_up_ops(x, norm, weights, router)

def gate_up_ops(x:Tensor, norm:Norm, weights:tuple[Weight, Weight], router:Weight|None=None) -> list[Tensor]:
  n, (gate, up) = norm(x).contiguous(), weights
  return [(gate(n).silu() * up(n)).contiguous(), *([] if router is None else [router(n)])]

def gate_up_kernel(t:Target, x:Tensor, norm:Norm, weights:tuple[Weight, Weight], router:Weight|None=None) -> list[Tensor]:
  if serves(t, QL_SHEXP_MSL, weights, *([] if router is None else [[router]])): return gate_up_msl(x, norm, weights, router)
  def body(b:dict[str, UOp]) -> list[UOp]:
    parts = [gate_up_part(weights, b, ("gate", "up"), b["y"])]
    if router is not None: parts.append(row_pairs(router.shape[0], rows_of(router.matrix(b, "router")), b["logits"], router.integer))
    return matvec(t, [x.shape[1] // UNIT], quad(b["x"]), parts, (quad(b["norm"]), norm.eps))
  outs = {name: Tensor.empty(1, w.shape[0], dtype=dtypes.float) for name, w in (("y", weights[0]), ("logits", router)) if w is not None}
  ins = {"x": x, "norm": norm.weight, **weights[0].args("gate"), **weights[1].args("up"), **(router.args("router") if router is not None else {})}
  name = "_".join(["gate_up", weights[0].label, *([] if router is None else ["router", router.label])])
  return launch(name, outs, ins, body, sum(w.nbytes for w in (*weights, router) if w is not None))

def expert_gate_up(x:Tensor, norm:Norm, weights:tuple[Weight, Weight], logits:Tensor, how:Choice) -> tuple[Tensor, Tensor]:
  """The chosen experts' silu(gate·n) · (up·n) times their weight, n = RMSNorm(x). x: float32 (T, D); weights: gate and up, (E, F, D);
  logits: float32 (T, E) -> float32 (T, K, F), and the choice, int32 (T, K)"""
  if cpu.fits(*weights):
    sel, scale = cpu.choose_experts(logits, how, LEAST_SUM)
    return (cpu.gate_up if x.shape[0] == 1 else cpu_prefill.expert_gate_up)(x, norm, weights, sel, scale), sel
  if t := kernel_target(x, x.shape[1]): return expert_gate_up_kernel(t, x, norm, weights, logits, how)
  return expert_gate_up_ops(x, norm, weights, logits, how)

def expert_gate_up_ops(x:Tensor, norm:Norm, weights:tuple[Weight, Weight], logits:Tensor, how:Choice) -> tuple[Tensor, Tensor]:
  (gate, up), (sel, scale), each = weights, choose_experts(logits, how), norm(x).contiguous().unsqueeze(1)
  return (gate(each, sel).silu() * up(each, sel) * scale.unsqueeze(-1)).contiguous(), sel

def expert_gate_up_kernel(t:Target, x:Tensor, norm:Norm, weights:tuple[Weight, Weight], logits:Tensor, how:Choice) -> tuple[Tensor, Tensor]:
  if serves(t, QL_MOE_MSL, weights): return expert_gate_up_msl(x, norm, weights, logits, how)
  (E, F, _), K = weights[0].shape, how.count
  def body(b:dict[str, UOp]) -> list[UOp]:
    (gate, up), chosen = (w.matrix(b, name) for w, name in zip(weights, ("gate", "up"))), Chosen(t, how, E, b["logits"], b.get("bias"))
    def of(team:UOp) -> Sequence[Row]:
      row = chosen.expert(team // F).cast(dtypes.weakint) * F + team % F
      return [[(gate, row)], [(up, row)]]
    def finish(sums:list[UOp], team:UOp, keep:UOp, previous:UOp) -> list[UOp]:
      return [b["y"][team.valid(keep)].store(silu(sums[0]) * sums[1] * chosen.weight(team // F))]
    def keep_choice(block:UOp, thread:UOp, threads:int, previous:UOp) -> list[UOp]:
      k = thread.minimum(K - 1)
      return [b["sel"][k.valid(block.eq(0) & (thread < K))].store(chosen.expert(k))]
    return matvec(t, [x.shape[1] // UNIT], quad(b["x"]), [Rows(K * F, of, finish, all(w.integer for w in weights))], (quad(b["norm"]), norm.eps),
                  keep_choice, choose=chosen.barrier)
  outs = {"y": Tensor.empty(1, K, F, dtype=dtypes.float), "sel": Tensor.empty(1, K, dtype=dtypes.int32)}
  ins = {"x": x, "norm": norm.weight, "logits": logits, **({} if how.bias is None else {"bias": how.bias}), **weights[0].args("gate"),
         **weights[1].args("up")}
  y, sel = launch(f"expert_gate_up_{K}_{how.gating}_{weights[0].label}", outs, ins, body)
  return y, sel

def expert_down(hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor, shared:tuple[Tensor, Weight]|None=None) -> Tensor:
  """residual + Σ_k down[sel[k]] · hidden[k] + the shared expert's down times its hidden vector. hidden: float32 (T, K, F), weighted already;
  down: (E, D, F); residual: float32 (T, D); shared: float32 (T, G) and (D, G) -> float32 (T, D)"""
  if cpu.fits(down, *([] if shared is None else [shared[1]])):
    own = cpu if hidden.shape[0] == 1 else cpu_prefill
    y = own.expert_down(hidden, down, sel, residual)
    return y if shared is None else own.norm_linear(shared[0], None, [shared[1]], residual=y)[0]
  if t := kernel_target(hidden, hidden.shape[2], *([] if shared is None else [shared[0].shape[1]])):
    return expert_down_kernel(t, hidden, down, sel, residual, shared)
  return expert_down_ops(hidden, down, sel, residual, shared)

def expert_down_ops(hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor, shared:tuple[Tensor, Weight]|None=None) -> Tensor:
  out = residual + down(hidden, sel).sum(1)
  return (out if shared is None else out + shared[1](shared[0])).contiguous()

def expert_down_kernel(t:Target, hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor, shared:tuple[Tensor, Weight]|None=None) -> Tensor:
  if serves(t, QL_MOE_MSL, [down], *([] if shared is None else [[shared[1]]])): return expert_down_msl(hidden, down, sel, residual, shared)
  (E, D, F), K = down.shape, sel.shape[1]
  each, lengths = F // UNIT, [K * F // UNIT]   # a row of the product runs through all chosen experts, and on through the shared one
  if shared is not None: lengths.append(shared[0].shape[1] // UNIT)
  def body(b:dict[str, UOp]) -> list[UOp]:
    matrix = down.matrix(b, "w")
    def chosen(previous:UOp) -> Matrix:
      def of(row:UOp, unit:UOp, gate:UOp|None) -> Unit:
        k = unit // each + previous
        expert = b["sel"][k if gate is None else k.valid(gate)].load().maximum(0).minimum(E - 1).cast(dtypes.weakint)
        return matrix(expert * D + row, unit % each, gate)
      return of
    beside = None if shared is None else shared[1].matrix(b, "shared")
    def x(k:UOp) -> list[UOp]:
      at = k - (own := K * F // 4)
      first = quad(b["x"])(k if shared is None else (k < own).where(k, 0))
      return first if shared is None else [(k < own).where(v, w) for v, w in zip(first, quad(b["x_shared"])((k < own).where(0, at)))]
    part = row_pairs(D, lambda row: [(Late(chosen), row), *([] if beside is None else [(beside, row)])], b["y"],
                     down.integer and (shared is None or shared[1].integer), residual=b["residual"])
    return matvec(t, lengths, x, [part])
  ins = {"x": hidden, "sel": sel, "residual": residual, **down.args("w"),
         **({} if shared is None else {"x_shared": shared[0], **shared[1].args("shared")})}
  name = "_".join([f"expert_down_{K}", down.label, *([] if shared is None else ["shared", shared[1].label])])
  return launch(name, {"y": Tensor.empty(1, D, dtype=dtypes.float)}, ins, body)[0]

def moe_mats(t:Target, x:Tensor, norm:Norm, router:Weight, how:Choice, experts:tuple[Weight, Weight, Weight],
             shared:tuple[Weight, Weight, Weight]|None) -> Tensor:
  """The whole feed-forward by tensor cores. experts, shared: gate, up and down. float32 (T, D) -> (T, D)"""
  gate, up, down = experts
  n, low = normalized(t, x, norm, low=True)
  sel, scale = choose_mats(t, precise_mats(t, n, low, router), how)
  chosen = by_expert(t, sel, router.shape[0])
  each = mul_mats_id(t, mul_mats_id(t, n, (gate, up), chosen, how.count, scale), [down], chosen, how.count, factor=1 / HIDDEN)
  if shared is not None: x = mul_mats(t, gate_up_mats(t, n, (shared[0], shared[1])), shared[2], x, 1 / HIDDEN)
  return (x + each.sum(1)).contiguous()

def choose_mats(t:Target, logits:Tensor, how:Choice) -> tuple[Tensor, Tensor]:
  """choose_experts in a launch, a block a token"""
  (T, E), K = logits.shape, how.count
  threads = -(-max(E, K) // t.lanes) * t.lanes
  def body(b:dict[str, UOp]) -> list[UOp]:
    token, thread, chosen = UOp.special(T, "gidx0"), UOp.special(threads, "lidx0"), Chosen(t, how, E, b["logits"], b.get("bias"))
    chosen.barrier(thread, threads, token * E, [])
    k = thread.minimum(K - 1)
    at = (token * K + k).valid(thread < K)
    return [b["sel"][at].store(chosen.expert(k)), b["scale"][at].store(chosen.weight(k))]
  outs = {"sel": Tensor.empty(T, K, dtype=dtypes.int32), "scale": Tensor.empty(T, K, dtype=dtypes.float)}
  sel, scale = launch(f"choose_{T}_{E}_{K}_{how.gating}", outs, {"logits": logits, **({} if how.bias is None else {"bias": how.bias})}, body)
  return sel, scale

"""The feed-forward of decoding: which experts, their gate and up with SwiGLU in the epilogue, their down with weights, sum and residual.

Expert ids are read in the kernels. The shared expert has launches of its own: in one with the chosen experts, blocks of either kind hold the
registers of both, which cost more than a launch."""
from __future__ import annotations
from typing import Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn.intrinsics import Target, after_previous
from tinygrad.nn.matvec import UNIT, Matrix, Rows, Unit, launch, local, matvec, row_pairs
from tinygrad.nn.norm_linear import Norm, Weight, kernel_target, quad
from tinygrad.uop.ops import Ops

def expert_of(b:dict[str, UOp], k:UOp, experts:int) -> UOp:
  """The chosen expert number k, an index that comes after the kernel that chose"""
  return b["sel"][k].load().maximum(0).minimum(experts - 1).cast(dtypes.weakint)

LOG2_E = 1.4426950408889634
SOFTMAX, SIGMOID, SOFTMAX_WEIGHT = 1, 2, 3   # GGUF's expert_gating_func; the third is softmax over the chosen logits only
LEAST_SUM = 6.103515625e-5                   # of the chosen scores, before they are normalized

def choose_experts(logits:Tensor, bias:Tensor|None, count:int, gating:int, normalize:bool, scale:float) -> tuple[Tensor, Tensor]:
  """logits: float32 (T, E); bias: float32 (E,), which only chooses -> int32 (T, count) experts, best first, the lower index on a tie, and float32
  (T, count) weights"""
  if t := kernel_target(logits): return choose_experts_kernel(t, logits, bias, count, gating, normalize, scale)
  return choose_experts_ops(logits, bias, count, gating, normalize, scale)

def choose_experts_ops(logits:Tensor, bias:Tensor|None, count:int, gating:int, normalize:bool, scale:float) -> tuple[Tensor, Tensor]:
  logits = logits.contiguous()
  scores = {SOFTMAX: logits.softmax, SIGMOID: lambda _: logits.sigmoid(), SOFTMAX_WEIGHT: lambda _: logits}[gating](-1)
  choice = scores if bias is None else scores + bias
  # an expert's rank is the number of experts before it
  mine, other, index = choice.unsqueeze(2), choice.unsqueeze(1), Tensor.arange(logits.shape[1])
  before = (other > mine) | (other.eq(mine) & (index.unsqueeze(0) < index.unsqueeze(1)))
  chosen = before.sum(-1).unsqueeze(1).eq(Tensor.arange(count).unsqueeze(1))     # (T, count, E), one true in a row
  sel = chosen.where(index, 0).sum(-1).cast(dtypes.int32)
  weights = chosen.where(scores.unsqueeze(1), 0.0).sum(-1)
  if gating == SOFTMAX_WEIGHT: weights = weights.softmax(-1)
  if normalize: weights = weights / weights.sum(-1, keepdim=True).maximum(LEAST_SUM)
  return sel.contiguous(), (weights * scale).contiguous()

def choose_experts_kernel(t:Target, logits:Tensor, bias:Tensor|None, count:int, gating:int, normalize:bool, scale:float) -> tuple[Tensor, Tensor]:
  E = logits.shape[1]
  def body(b:dict[str, UOp]) -> list[UOp]:
    # a thread an expert, and not one more: behind the gate of a store tinygrad would drop the clamp of an idle thread's index, of its loads too
    thread, previous = UOp.special(E, "lidx0"), after_previous(t)
    everyone = [b["logits"][previous + i].load() for i in range(E)]
    def total(values:list[UOp], op) -> UOp:  # a tree: short chains
      while len(values) > 1: values = [op(*values[i:i+2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
      return values[0]
    def exp(x:UOp) -> UOp: return (x * LOG2_E).exp2()
    logit = b["logits"][thread + previous].load()
    if gating == SIGMOID: score = 1 / (1 + exp(-logit))
    elif gating == SOFTMAX:
      top = total(everyone, UOp.maximum)
      score = exp(logit - top) / total([exp(x - top) for x in everyone], UOp.add)
    else: score = logit
    choice = score if bias is None else score + b["bias"][thread].load()
    shared, chosen = local(E, dtypes.float, 0), local(count, dtypes.float, 1)
    shared = shared.after(UOp(Ops.BARRIER, src=(shared[thread].store(choice),)))
    ahead = total([((other := shared[i].load()) > choice).where(1, ((other >= choice) & (i < thread)).where(1, 0)) for i in range(E)], UOp.add)
    wins = ahead < count
    slot = wins.where(ahead, 0).cast(dtypes.weakint)
    chosen = chosen.after(UOp(Ops.BARRIER, src=(chosen[slot.valid(wins)].store(score),)))
    weights = [chosen[i].load() for i in range(count)]
    weight = score
    if gating == SOFTMAX_WEIGHT:
      top = total(weights, UOp.maximum)
      weights, weight = [exp(w - top) for w in weights], exp(score - top)
      weight, weights = weight / total(weights, UOp.add), [w / total(weights, UOp.add) for w in weights]
    if normalize: weight = weight / total(weights, UOp.add).maximum(LEAST_SUM)
    return [b["sel"][slot.valid(wins)].store(thread.cast(dtypes.int)), b["weights"][slot.valid(wins)].store(weight * scale)]
  outs = {"sel": Tensor.empty(1, count, dtype=dtypes.int32), "weights": Tensor.empty(1, count, dtype=dtypes.float)}
  sel, weights = launch(f"choose_{count}_of_{E}_{gating}", outs, {"logits": logits, **({} if bias is None else {"bias": bias})}, body)
  return sel, weights

def gate_up(x:Tensor, norm:Norm, weights:tuple[Weight, Weight], sel:Tensor|None=None, scale:Tensor|None=None) -> Tensor:
  """silu(gate·n) · (up·n) with n = RMSNorm(x). x: float32 (T, D); weights: gate and up, (F, D) -> float32 (T, F); or, with sel int32 (T, K)
  and scale float32 (T, K), stacks (E, F, D), of which the chosen are taken, their results times scale -> float32 (T, K, F)"""
  if t := kernel_target(x, x.shape[1]): return gate_up_kernel(t, x, norm, weights, sel, scale)
  return gate_up_ops(x, norm, weights, sel, scale)

def gate_up_ops(x:Tensor, norm:Norm, weights:tuple[Weight, Weight], sel:Tensor|None=None, scale:Tensor|None=None) -> Tensor:
  n, (gate, up) = norm(x).contiguous(), weights
  if sel is None or scale is None: return (gate(n).silu() * up(n)).contiguous()
  each = n.unsqueeze(1)
  return (gate(each, sel).silu() * up(each, sel) * scale.unsqueeze(-1)).contiguous()

def gate_up_kernel(t:Target, x:Tensor, norm:Norm, weights:tuple[Weight, Weight], sel:Tensor|None=None, scale:Tensor|None=None) -> Tensor:
  (*stack, F, _), K = weights[0].shape, 1 if sel is None else sel.shape[1]
  chosen = {} if sel is None or scale is None else {"sel": sel, "scale": scale}
  def body(b:dict[str, UOp]) -> list[UOp]:
    gate, up, chosen_by = weights[0].matrix(b, "gate"), weights[1].matrix(b, "up"), after_previous(t) if chosen else None
    def of(team:UOp) -> Sequence[tuple[Matrix, UOp]]:
      row = team if chosen_by is None else expert_of(b, team // F + chosen_by, stack[0]) * F + team % F
      return [(gate, row), (up, row)]
    def finish(sums:list[UOp], team:UOp, keep:UOp, previous:UOp) -> list[UOp]:
      y = sums[0] / (1 + (sums[0] * -LOG2_E).exp2()) * sums[1]
      return [b["y"][team.valid(keep)].store(y * b["scale"][(team // F + previous).valid(keep)].load() if chosen else y)]
    return matvec(t, x.shape[1] // UNIT, all(w.integer for w in weights), quad(b["x"]), [Rows(K * F, of, finish)], (quad(b["norm"]), norm.eps),
                  previous=chosen_by)
  y = Tensor.empty(*((1, K, F) if chosen else (1, F)), dtype=dtypes.float)
  ins = {"x": x, "norm": norm.weight, **chosen, **weights[0].args("gate"), **weights[1].args("up")}
  return launch(f"gate_up_{f'{K}_of_' if chosen else ''}{weights[0].label}", {"y": y}, ins, body)[0]

def expert_down(hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor) -> Tensor:
  """residual + Σ_k down[sel[k]] · hidden[k]. hidden: float32 (T, K, F), weighted already; down: (E, D, F); residual: float32 (T, D)
  -> float32 (T, D)"""
  if t := kernel_target(hidden, hidden.shape[1] * hidden.shape[2]): return expert_down_kernel(t, hidden, down, sel, residual)
  return expert_down_ops(hidden, down, sel, residual)

def expert_down_ops(hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor) -> Tensor: return (residual + down(hidden, sel).sum(1)).contiguous()

def expert_down_kernel(t:Target, hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor) -> Tensor:
  (E, D, F), K = down.shape, sel.shape[1]
  each = F // UNIT  # units an expert: a row of the product runs through all chosen experts
  def body(b:dict[str, UOp]) -> list[UOp]:
    matrix, chosen_by = down.matrix(b, "w"), after_previous(t)
    def chosen(row:UOp, unit:UOp, gate:UOp|None) -> Unit: return matrix(expert_of(b, unit // each + chosen_by, E) * D + row, unit % each, gate)
    return matvec(t, K * each, down.integer, quad(b["x"]), [row_pairs(chosen, D, b["y"], residual=b["residual"])], previous=chosen_by)
  ins = {"x": hidden, "sel": sel, "residual": residual, **down.args("w")}
  return launch(f"expert_down_{K}_{down.label}", {"y": Tensor.empty(1, D, dtype=dtypes.float)}, ins, body)[0]

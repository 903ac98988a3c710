"""The feed-forward of decoding, in three launches: the router's logits beside the shared expert's gate and up; the choice of experts and their
gate and up with SwiGLU and the routing weight in the epilogue; their down, the shared expert's and the residual in one sum.

The choice is made by every block of the second launch for itself: 64 logits cost less to rank again than a launch costs. Expert ids are read in
the kernels. In the first launch the blocks part into two branches, each with a vector and a layout of its own.
"""
from __future__ import annotations
from typing import Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import cpu, cpu_prefill
from tinygrad.nn.intrinsics import Target
from tinygrad.nn.kernel import UNIT, Matrix, Norm, Unit, Weight, launch, load4, silu
from tinygrad.nn.matmul import HALF_SCALE, gate_up_prefill, grouped_matmul, matmul, matmul_split_half, rms_norm_half
from tinygrad.nn.matvec import DeferredMatrix, MatvecPart, RowSegments, linear_part, matvec
from tinygrad.nn.metal_mul_mat_id import QL_MOE_MSL, QL_SHEXP_MSL, expert_down_msl, expert_gate_up_msl, gate_up_msl, serves
from tinygrad.nn.norm_linear import decode_target, prefill_target, rows_of
from tinygrad.nn.routing import LEAST_SUM, Routing, TopKInKernel, choose_experts, choose_experts_prefill, sort_by_expert

def gate_up_part(weights:Sequence[Weight], b:dict[str, UOp], names:Sequence[str], y:UOp) -> MatvecPart:
  """y[i] = silu(gate row i · x) · (up row i · x)"""
  gate, up = (w.matrix(b, name) for w, name in zip(weights, names))
  def finish(sums:list[UOp], team:UOp, is_writer:UOp, wait_zero:UOp) -> list[UOp]: return [y[team.valid(is_writer)].store(silu(sums[0]) * sums[1])]
  return MatvecPart(weights[0].shape[0], lambda team: [[(gate, team)], [(up, team)]], finish, all(w.integer for w in weights))

def gate_up(x:Tensor, norm:Norm, weights:tuple[Weight, Weight], router:Weight|None=None) -> list[Tensor]:
  """silu(gate·n) · (up·n) with n = RMSNorm(x), and router·n. x: float32 (T, D); weights: gate and up, (F, D); router: (E, D)
  -> float32 (T, F) and, with a router, (T, E)"""
  if x.shape[0] == 1 and cpu.fits(*weights, *([] if router is None else [router])):
    return [cpu.gate_up(x, norm, weights), *([] if router is None else cpu.norm_linear(x, norm, [router]))]
  if x.shape[0] > 1 and cpu.fits(*weights, *([] if router is None else [router])): return cpu_prefill.gate_up(x, norm, weights, router)
  if t := decode_target(x, x.shape[1]): return gate_up_decode(t, x, norm, weights, router)
  if router is None and (t := prefill_target(x, *weights[0].shape)): return [gate_up_prefill(t, rms_norm_half(t, x, norm)[0], weights)]
  return gate_up_ops(x, norm, weights, router)

def gate_up_ops(x:Tensor, norm:Norm, weights:tuple[Weight, Weight], router:Weight|None=None) -> list[Tensor]:
  n, (gate, up) = norm(x).contiguous(), weights
  return [(gate(n).silu() * up(n)).contiguous(), *([] if router is None else [router(n)])]

def gate_up_decode(t:Target, x:Tensor, norm:Norm, weights:tuple[Weight, Weight], router:Weight|None=None) -> list[Tensor]:
  if serves(t, QL_SHEXP_MSL, weights, *([] if router is None else [[router]])): return gate_up_msl(x, norm, weights, router)
  def body(b:dict[str, UOp]) -> list[UOp]:
    parts = [gate_up_part(weights, b, ("gate", "up"), b["y"])]
    if router is not None: parts.append(linear_part(router.shape[0], rows_of(router.matrix(b, "router")), b["logits"], router.integer))
    return matvec(t, [x.shape[1] // UNIT], load4(b["x"]), parts, (load4(b["norm"]), norm.eps))
  outs = {name: Tensor.empty(1, w.shape[0], dtype=dtypes.float) for name, w in (("y", weights[0]), ("logits", router)) if w is not None}
  ins = {"x": x, "norm": norm.weight, **weights[0].args("gate"), **weights[1].args("up"), **(router.args("router") if router is not None else {})}
  name = "_".join(["gate_up", weights[0].label, *([] if router is None else ["router", router.label])])
  return launch(name, outs, ins, body, sum(w.nbytes for w in (*weights, router) if w is not None))

def expert_gate_up(x:Tensor, norm:Norm, weights:tuple[Weight, Weight], logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  """The chosen experts' silu(gate·n) · (up·n) times their weight, n = RMSNorm(x). x: float32 (T, D); weights: gate and up, (E, F, D);
  logits: float32 (T, E) -> float32 (T, K, F), and the choice, int32 (T, K)"""
  if cpu.fits(*weights):
    sel, scale = cpu.choose_experts(logits, routing, LEAST_SUM)
    return (cpu.gate_up if x.shape[0] == 1 else cpu_prefill.expert_gate_up)(x, norm, weights, sel, scale), sel
  if t := decode_target(x, x.shape[1]): return expert_gate_up_decode(t, x, norm, weights, logits, routing)
  return expert_gate_up_ops(x, norm, weights, logits, routing)

def expert_gate_up_ops(x:Tensor, norm:Norm, weights:tuple[Weight, Weight], logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  (gate, up), (sel, scale), each = weights, choose_experts(logits, routing), norm(x).contiguous().unsqueeze(1)
  return (gate(each, sel).silu() * up(each, sel) * scale.unsqueeze(-1)).contiguous(), sel

def expert_gate_up_decode(t:Target, x:Tensor, norm:Norm, weights:tuple[Weight, Weight], logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  if serves(t, QL_MOE_MSL, weights): return expert_gate_up_msl(x, norm, weights, logits, routing)
  (E, F, _), K = weights[0].shape, routing.count
  def body(b:dict[str, UOp]) -> list[UOp]:
    (gate, up), chosen = (w.matrix(b, name) for w, name in zip(weights, ("gate", "up"))), TopKInKernel(t, routing, E, b["logits"], b.get("bias"))
    def of(team:UOp) -> Sequence[RowSegments]:
      row = chosen.expert(team // F).cast(dtypes.weakint) * F + team % F
      return [[(gate, row)], [(up, row)]]
    def finish(sums:list[UOp], team:UOp, is_writer:UOp, wait_zero:UOp) -> list[UOp]:
      return [b["y"][team.valid(is_writer)].store(silu(sums[0]) * sums[1] * chosen.weight(team // F))]
    def keep_choice(block:UOp, thread:UOp, threads:int, wait_zero:UOp) -> list[UOp]:
      k = thread.minimum(K - 1)
      return [b["sel"][k.valid(block.eq(0) & (thread < K))].store(chosen.expert(k))]
    return matvec(t, [x.shape[1] // UNIT], load4(b["x"]), [MatvecPart(K * F, of, finish, all(w.integer for w in weights))], (load4(b["norm"]), norm.eps),
                  keep_choice, barrier_of=chosen.barrier)
  outs = {"y": Tensor.empty(1, K, F, dtype=dtypes.float), "sel": Tensor.empty(1, K, dtype=dtypes.int32)}
  ins = {"x": x, "norm": norm.weight, "logits": logits, **({} if routing.bias is None else {"bias": routing.bias}), **weights[0].args("gate"),
         **weights[1].args("up")}
  y, sel = launch(f"expert_gate_up_{K}_{routing.gating}_{weights[0].label}", outs, ins, body)
  return y, sel

def expert_down(hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor, shared:tuple[Tensor, Weight]|None=None) -> Tensor:
  """residual + Σ_k down[sel[k]] · hidden[k] + the shared expert's down times its hidden vector. hidden: float32 (T, K, F), weighted already;
  down: (E, D, F); residual: float32 (T, D); shared: float32 (T, G) and (D, G) -> float32 (T, D)"""
  if cpu.fits(down, *([] if shared is None else [shared[1]])):
    own = cpu if hidden.shape[0] == 1 else cpu_prefill
    y = own.expert_down(hidden, down, sel, residual)
    return y if shared is None else own.norm_linear(shared[0], None, [shared[1]], residual=y)[0]
  if t := decode_target(hidden, hidden.shape[2], *([] if shared is None else [shared[0].shape[1]])):
    return expert_down_decode(t, hidden, down, sel, residual, shared)
  return expert_down_ops(hidden, down, sel, residual, shared)

def expert_down_ops(hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor, shared:tuple[Tensor, Weight]|None=None) -> Tensor:
  out = residual + down(hidden, sel).sum(1)
  return (out if shared is None else out + shared[1](shared[0])).contiguous()

def expert_down_decode(t:Target, hidden:Tensor, down:Weight, sel:Tensor, residual:Tensor, shared:tuple[Tensor, Weight]|None=None) -> Tensor:
  if serves(t, QL_MOE_MSL, [down], *([] if shared is None else [[shared[1]]])): return expert_down_msl(hidden, down, sel, residual, shared)
  (E, D, F), K = down.shape, sel.shape[1]
  each, segments = F // UNIT, [K * F // UNIT]   # a row of the product runs through all chosen experts, and on through the shared one
  if shared is not None: segments.append(shared[0].shape[1] // UNIT)
  def body(b:dict[str, UOp]) -> list[UOp]:
    matrix = down.matrix(b, "w")
    def chosen(wait_zero:UOp) -> Matrix:
      def of(row:UOp, unit:UOp, gate:UOp|None) -> Unit:
        k = unit // each + wait_zero
        expert = b["sel"][k if gate is None else k.valid(gate)].load().maximum(0).minimum(E - 1).cast(dtypes.weakint)
        return matrix(expert * D + row, unit % each, gate)
      return of
    beside = None if shared is None else shared[1].matrix(b, "shared")
    def x(k:UOp) -> list[UOp]:
      at = k - (own := K * F // 4)
      first = load4(b["x"])(k if shared is None else (k < own).where(k, 0))
      return first if shared is None else [(k < own).where(v, w) for v, w in zip(first, load4(b["x_shared"])((k < own).where(0, at)))]
    part = linear_part(D, lambda row: [(DeferredMatrix(chosen), row), *([] if beside is None else [(beside, row)])], b["y"],
                     down.integer and (shared is None or shared[1].integer), residual=b["residual"])
    return matvec(t, segments, x, [part])
  ins = {"x": hidden, "sel": sel, "residual": residual, **down.args("w"),
         **({} if shared is None else {"x_shared": shared[0], **shared[1].args("shared")})}
  name = "_".join([f"expert_down_{K}", down.label, *([] if shared is None else ["shared", shared[1].label])])
  return launch(name, {"y": Tensor.empty(1, D, dtype=dtypes.float)}, ins, body)[0]

def moe_prefill(t:Target, x:Tensor, norm:Norm, router:Weight, routing:Routing, experts:tuple[Weight, Weight, Weight],
             shared:tuple[Weight, Weight, Weight]|None) -> Tensor:
  """The whole feed-forward by tensor cores. experts, shared: gate, up and down. float32 (T, D) -> (T, D)"""
  gate, up, down = experts
  n, low = rms_norm_half(t, x, norm, low=True)
  sel, scale = choose_experts_prefill(t, matmul_split_half(t, n, low, router), routing)
  chosen = sort_by_expert(t, sel, router.shape[0])
  each = grouped_matmul(t, grouped_matmul(t, n, (gate, up), chosen, routing.count, scale), [down], chosen, routing.count, factor=1 / HALF_SCALE)
  if shared is not None: x = matmul(t, gate_up_prefill(t, n, (shared[0], shared[1])), shared[2], x, 1 / HALF_SCALE)
  return (x + each.sum(1)).contiguous()


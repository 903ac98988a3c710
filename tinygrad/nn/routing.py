"""Routing: which experts a token takes and with what weights; the tokens of each expert."""
from __future__ import annotations
from dataclasses import dataclass
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn.intrinsics import Target, group_reduce, group_sum
from tinygrad.nn.kernel import SLOTS, exp, launch, local, total
from tinygrad.uop.ops import Ops

SOFTMAX, SIGMOID, SOFTMAX_WEIGHT = 1, 2, 3   # GGUF's expert_gating_func; the third is softmax over the chosen logits only
NEVER = -1e30                                # a logit that no expert has
LEAST_SUM = 6.103515625e-5                   # of the chosen scores, before they are normalized

@dataclass(frozen=True)
class Routing:
  """How the experts of a token follow from its logits"""
  count: int
  gating: int
  normalize: bool
  scale: float
  bias: Tensor|None = None   # float32 (E,), which only chooses

def choose_experts(logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  """logits: float32 (T, E) -> int32 (T, count) experts, best first, the lower index on a tie, and float32 (T, count) weights"""
  logits = logits.contiguous()
  scores = {SOFTMAX: logits.softmax, SIGMOID: lambda _: logits.sigmoid(), SOFTMAX_WEIGHT: lambda _: logits}[routing.gating](-1)
  choice = scores if routing.bias is None else scores + routing.bias
  # an expert's rank is the number of experts before it
  mine, other, index = choice.unsqueeze(2), choice.unsqueeze(1), Tensor.arange(logits.shape[1])
  before = (other > mine) | (other.eq(mine) & (index.unsqueeze(0) < index.unsqueeze(1)))
  chosen = before.sum(-1).unsqueeze(1).eq(Tensor.arange(routing.count).unsqueeze(1))     # (T, count, E), one true in a row
  sel = chosen.where(index, 0).sum(-1).cast(dtypes.int32)
  weights = chosen.where(scores.unsqueeze(1), 0.0).sum(-1)
  if routing.gating == SOFTMAX_WEIGHT: weights = weights.softmax(-1)
  if routing.normalize: weights = weights / weights.sum(-1, keepdim=True).maximum(LEAST_SUM)
  return sel.contiguous(), (weights * routing.scale).contiguous()

class TopKInKernel:
  """choose_experts within a block of threads: barrier() makes the choice, after which expert(k) and weight(k) are known to all"""
  def __init__(self, t:Target, routing:Routing, experts:int, logits:UOp, bias:UOp|None):
    self.target, self.routing, self.experts, self.logits, self.bias = t, routing, experts, logits, bias
  def barrier(self, thread:UOp, threads:int, wait_zero:UOp, stores:list[UOp]) -> UOp:
    routing, E, SLOT = self.routing, self.experts, SLOTS
    # a thread an expert, or several where there are more experts
    mine = [(expert, expert < E) for expert in (thread + first for first in range(0, E, threads))]
    def gather(own:list[UOp], slot:int) -> UOp:
      """What the threads have of all experts, in shared memory"""
      shared = local(E, dtypes.float, slot)
      stored = [shared[expert.valid(ok)].store(v) for v, (expert, ok) in zip(own, mine)]
      return shared.after(UOp(Ops.BARRIER, src=(*stores, *stored)))
    scores = [self.logits[(expert + wait_zero).valid(ok)].load() for expert, ok in mine]
    choices = scores
    if routing.gating == SOFTMAX:
      everyone, lanes = gather(scores, SLOT + 3), self.target.lanes   # in the order of the softmax already
      ours = [((thread % lanes) + first, (thread % lanes) + first < E) for first in range(0, E, lanes)]
      ours = [everyone[e].load() if E % lanes == 0 else ok.where(everyone[e.valid(ok)].load(), NEVER) for e, ok in ours]
      top = group_reduce(self.target, total(ours, UOp.maximum), lanes, UOp.maximum)
      inverse = 1 / group_sum(self.target, total([exp(x - top) for x in ours], UOp.add), lanes)
      scores = [exp(x - top) * inverse for x in scores]
    elif routing.gating == SIGMOID: choices = scores = [1 / (1 + exp(-x)) for x in scores]
    if self.bias is not None: choices = [s + self.bias[expert.valid(ok)].load() for s, (expert, ok) in zip(scores, mine)]
    if routing.gating != SOFTMAX or self.bias is not None: everyone = gather(choices, SLOT)
    others = [everyone[i].load() for i in range(E)]
    ids, values, written = local(routing.count, dtypes.int, SLOT + 1), local(routing.count, dtypes.float, SLOT + 2), []
    for score, choice, (expert, ok) in zip(scores, choices, mine):
      ahead = total([(other > choice).where(1, ((other >= choice) & (i < expert)).where(1, 0)) for i, other in enumerate(others)], UOp.add)
      place = ok.where(ahead, E)   # not in the gate: tinygrad would take ok for true in all that the index depends on, the barrier's stores too
      wins = place < routing.count
      slot = wins.where(place, 0).cast(dtypes.weakint)
      written += [ids[slot.valid(wins)].store(expert.cast(dtypes.int)), values[slot.valid(wins)].store(score)]
    barrier = UOp(Ops.BARRIER, src=tuple(written))
    self.ids, self.values = ids.after(barrier), values.after(barrier)
    return barrier
  def expert(self, k:UOp) -> UOp: return self.ids[k].load().maximum(0).minimum(self.experts - 1)  # where logits are no numbers, none was chosen
  def weight(self, k:UOp) -> UOp:
    values, weight = [self.values[i].load() for i in range(self.routing.count)], self.values[k].load()
    if self.routing.gating == SOFTMAX_WEIGHT:
      top = total(values, UOp.maximum)
      values, weight = [exp(v - top) for v in values], exp(weight - top)
      weight, values = weight / total(values, UOp.add), [v / total(values, UOp.add) for v in values]
    return (weight / total(values, UOp.add).maximum(LEAST_SUM) if self.routing.normalize else weight) * self.routing.scale

def choose_experts_prefill(t:Target, logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  """choose_experts in a launch, a block a token"""
  (T, E), K = logits.shape, routing.count
  threads = -(-max(E, K) // t.lanes) * t.lanes
  def body(b:dict[str, UOp]) -> list[UOp]:
    token, thread, chosen = UOp.special(T, "gidx0"), UOp.special(threads, "lidx0"), TopKInKernel(t, routing, E, b["logits"], b.get("bias"))
    chosen.barrier(thread, threads, token * E, [])
    k = thread.minimum(K - 1)
    at = (token * K + k).valid(thread < K)
    return [b["sel"][at].store(chosen.expert(k)), b["scale"][at].store(chosen.weight(k))]
  outs = {"sel": Tensor.empty(T, K, dtype=dtypes.int32), "scale": Tensor.empty(T, K, dtype=dtypes.float)}
  sel, scale = launch(f"choose_{T}_{E}_{K}_{routing.gating}", outs, {"logits": logits, **({} if routing.bias is None else {"bias": routing.bias})}, body)
  return sel, scale

def sort_by_expert(t:Target, sel:Tensor, experts:int) -> tuple[Tensor, Tensor]:
  """The choices of each expert in order. sel: int32 (T, K), a token's distinct experts -> int32 (E, T), numbers of choices, token · K + k, the
  first `count` of a row are written; and the counts, int32 (E,)"""
  T, K = sel.shape
  side, choices = 16, T * K
  threads = side * side
  each = -(-choices // threads)
  def body(b:dict[str, UOp]) -> list[UOp]:
    expert, thread = UOp.special(experts, "gidx0"), UOp.special(threads, "lidx0")
    mine = []
    for j in range(each):
      at = thread * each + j
      inside = at < choices
      mine.append((at, inside & b["sel"][at.valid(inside)].load().eq(expert.cast(dtypes.int))))
    def count(values:list[UOp]) -> UOp: return total(values, UOp.add)
    ones = [hit.where(UOp.const(1, dtypes.int), 0) for _, hit in mine]
    counts, groups = local(threads, dtypes.int, 0), local(side, dtypes.int, 1)
    counts = counts.after(UOp(Ops.BARRIER, src=(counts[thread].store(count(ones)),)))
    near = [counts[thread // side * side + j].load() for j in range(side)]
    groups = groups.after(UOp(Ops.BARRIER, src=(groups[(thread // side).valid((thread % side).eq(0))].store(count(near)),)))
    far = [groups[j].load() for j in range(side)]
    place = count([(thread % side > j).where(near[j], 0) for j in range(side)]) + count([(thread // side > j).where(far[j], 0) for j in range(side)])
    done = [b["counts"][expert.valid(thread.eq(0))].store(count(far))]
    for (at, hit), one in zip(mine, ones):
      here = hit.where(place, T)   # not in the gate: tinygrad would take a hit for true in all that the place depends on, the barriers' stores too
      slot = (ok := here < T).where(here, 0).cast(dtypes.weakint)
      done.append(b["order"][(expert * T + slot).valid(ok)].store(at.cast(dtypes.int)))
      place = place + one
    return done
  outs = {"order": Tensor.empty(experts, T, dtype=dtypes.int32), "counts": Tensor.empty(experts, dtype=dtypes.int32)}
  order, counts = launch(f"sort_by_expert_{experts}", outs, {"sel": sel}, body)
  return order, counts

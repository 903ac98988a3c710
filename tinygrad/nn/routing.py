"""Routing: which experts a token takes and with what weights; the tokens of each expert."""
from __future__ import annotations
import enum
from dataclasses import dataclass
from typing import Callable, NamedTuple, Sequence
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import prod
from tinygrad.nn.intrinsics import Target, bit_count, early_load, group_reduce, group_sum, shuffle, shuffle_from, uniform, vote, warp_max, word
from tinygrad.nn.kernel import SLOTS, behind_wait, empty, exp, launch, local, optional, ordered, safe_index, total
from tinygrad.uop.ops import Ops

class Gating(enum.IntEnum):
  """How logits become scores: GGUF's expert_gating_func"""
  SOFTMAX = 1
  SIGMOID = 2
  SOFTMAX_WEIGHT = 3       # softmax over the chosen logits only

NEVER = -1e30              # a logit that no expert has
LEAST_SUM = 6.103515625e-5 # of the chosen scores, before they are normalized
MOST_LANES = 8             # that share out what an expert is compared with
MANY_EXPERTS = 128         # are first compared within a warp

@dataclass(frozen=True)
class Routing:
  """How a token's experts and their weights follow from its logits"""
  count: int               # experts that a token takes
  gating: Gating
  normalize: bool          # the weights sum to `scale`
  scale: float             # of the weights
  bias: Tensor|None = None # float32 (E,), added to the scores in the choice, not in the weights
  groups: int = 1          # of equally many neighbouring experts, two or more. A group's score is the sum of its two best experts'
  used_groups: int = 1     # groups that a token's experts may be of, those with the highest scores, the lower index on a tie

  @property
  def grouped(self) -> bool: return self.used_groups < self.groups
  @property
  def label(self) -> str:
    """For kernels' names"""
    return f"{self.gating}_of_{self.used_groups}_{self.groups}" if self.grouped else f"{self.gating}"
  @property
  def same_everywhere(self) -> bool:
    """Whether two kernels' choices are the same, bit for bit, whatever their compiler makes of them: no product is among what it adds up"""
    return self.gating != Gating.SOFTMAX or self.bias is None and not self.grouped
  def comparisons(self, experts:int) -> int:
    """How many numbers the choices of all experts are compared with, together"""
    return experts * (experts + (experts // self.groups + self.groups if self.grouped else 0))

def ranks(values:Tensor) -> Tensor:
  """A number's rank along the last axis: how many are before it, greater or the same and of a lower index. (…, N) -> int32 (…, N)"""
  own, other, index = values.unsqueeze(-1), values.unsqueeze(-2), Tensor.arange(values.shape[-1])
  return ((other > own) | (other.eq(own) & (index.unsqueeze(0) < index.unsqueeze(1)))).sum(-1)

def of_best_groups(choice:Tensor, routing:Routing) -> Tensor:
  """float32 (T, E), NEVER for the experts of groups that do not stay"""
  groups = choice.reshape(choice.shape[0], routing.groups, -1)
  scores = (ranks(groups) < 2).where(groups, 0.0).sum(-1)
  return (ranks(scores) < routing.used_groups).unsqueeze(-1).where(groups, NEVER).reshape(choice.shape)

def choose_experts(logits:Tensor, routing:Routing) -> tuple[Tensor, Tensor]:
  """logits: float32 (T, E) -> int32 (T, count) experts, best first, the lower index on a tie, and float32 (T, count) weights"""
  logits = logits.contiguous()
  scores = {Gating.SOFTMAX: logits.softmax, Gating.SIGMOID: lambda _: logits.sigmoid(), Gating.SOFTMAX_WEIGHT: lambda _: logits}[routing.gating](-1)
  choice = scores if routing.bias is None else scores + routing.bias
  if routing.grouped: choice = of_best_groups(choice, routing)
  chosen = ranks(choice).unsqueeze(1).eq(Tensor.arange(routing.count).unsqueeze(1))      # (T, count, E), one true in a row
  experts = chosen.where(Tensor.arange(logits.shape[1]), 0).sum(-1).cast(dtypes.int32)
  weights = chosen.where(scores.unsqueeze(1), 0.0).sum(-1)
  if routing.gating == Gating.SOFTMAX_WEIGHT: weights = weights.softmax(-1)
  if routing.normalize: weights = weights / weights.sum(-1, keepdim=True).maximum(LEAST_SUM)
  return experts.contiguous(), (weights * routing.scale).contiguous()

class MadeChoice:
  """A token's experts that another kernel has chosen, within a block of threads that wants them before its wait: barrier() brings them to shared
  memory. sel, (T, count), was written two launches back (see pdl_wait)."""
  early = True
  def __init__(self, experts:int, sel:UOp, count:int, token:UOp):
    self.experts, self.sel, self.count, self.token = experts, sel, count, token
  def constants(self, thread:UOp, threads:int) -> list[UOp]: return []
  def barrier(self, thread:UOp, threads:int, wait_zero:UOp, before:list[UOp]) -> UOp:
    inside = thread < self.count
    ids, expert = local(self.count, dtypes.int, SLOTS + 1), early_load(self.sel[self.token * self.count + thread.minimum(self.count - 1)], inside)
    barrier = UOp(Ops.BARRIER, src=(*before, ids[thread.valid(inside)].store(expert)))
    self.ids = ids.after(barrier)
    return barrier
  def expert(self, k:UOp) -> UOp: return self.ids[k].load().maximum(0).minimum(self.experts - 1)

def softmax_terms(target:Target, logits:list[UOp]) -> tuple[UOp, UOp]:
  """(maximum, 1 / Σ exp(logit - maximum)) of the logits that a warp's lanes have"""
  top = group_reduce(target, total(logits, UOp.maximum), target.lanes, UOp.maximum)
  return top, 1 / group_sum(target, total([exp(logit - top) for logit in logits], UOp.add), target.lanes)

class TopKInKernel:
  """choose_experts of one token within a block of threads: barrier() chooses, then expert(k) and weight(k) are known to every thread.
  logits, (T, E), of which it takes the token's, and bias: float32 buffers. In the kernel:

  score = gating(logit)                                       # neighbouring lanes share an expert, or a thread has several
  choice = score + bias
  everyone = the choices of all experts, in shared memory; barrier
  of groups: scores = the two best of each, added up, in shared memory; barrier
             choice = NEVER where as many groups as stay are before the expert's; everyone, anew; barrier
  rank = the number of experts with a higher choice, or the same and a lower index    # each of an expert's lanes counts its share
  if rank < count: ids[rank], values[rank] = expert, score; barrier

  Of many experts, a thread each, those of a warp are ranked first; its first `count` go on, to shared memory, and are ranked among all warps'.
  """
  def __init__(self, target:Target, routing:Routing, experts:int, logits:UOp, bias:UOp|None, token:UOp, parts:Sequence[int]=(0,),
               early:bool=False):
    """parts: the rows of logits, from the token's on, that are added up. early: logits that were written two launches back (see pdl_wait)"""
    self.target, self.routing, self.experts, self.logits, self.bias, self.token, self.parts = target, routing, experts, logits, bias, token, parts
    self.early = early

  def softmax(self, scores:list[UOp], everyone:UOp, thread:UOp) -> list[UOp]:
    """A thread's scores. Each warp takes the maximum and the sum over everyone for itself."""
    lanes, all_logits = self.target.lanes, []
    for first in range(0, self.experts, lanes):
      expert = thread % lanes + first
      inside = expert < self.experts
      all_logits.append(everyone[expert].load() if self.experts % lanes == 0 else inside.where(everyone[expert.valid(inside)].load(), NEVER))
    top, inverse = softmax_terms(self.target, all_logits)
    return [exp(score - top) * inverse for score in scores]

  def lanes(self, threads:int) -> int:
    """Neighbouring lanes that share an expert, of a block of so many threads"""
    lanes = 1
    while lanes < MOST_LANES and 2 * lanes * self.experts <= threads and self.experts % (2 * lanes) == 0: lanes *= 2
    return lanes

  def own(self, thread:UOp, threads:int) -> list[tuple[UOp, UOp]]:
    """A thread's experts, and whether there is such an expert"""
    lanes = self.lanes(threads)
    return [(expert, expert < self.experts) for expert in (thread // lanes + first for first in range(0, self.experts, threads // lanes))]

  def constants(self, thread:UOp, threads:int) -> list[UOp]:
    """The loads of what no kernel writes"""
    return [] if self.bias is None else [self.bias[safe_index(expert, inside)].load() for expert, inside in self.own(thread, threads)]

  def barrier(self, thread:UOp, threads:int, wait_zero:UOp, before:list[UOp]) -> UOp:
    """Chooses. The first barrier has the sources `before`. Returns the barrier behind which the choice is known. Loads of the logits add wait_zero to
    the index (see pdl_wait)."""
    gating, n_experts, lanes, own = self.routing.gating, self.experts, self.lanes(threads), self.own(thread, threads)
    def gather(values:list[UOp], slot:int) -> UOp:
      """What the threads have of all experts, in shared memory"""
      shared = local(n_experts, dtypes.float, slot)
      stored = [shared[expert.valid(inside if lanes == 1 else inside & (thread % lanes).eq(0))].store(value)
                for value, (expert, inside) in zip(values, own)]
      return shared.after(UOp(Ops.BARRIER, src=(*before, *stored)))
    # a gate here would stand in all that wait_zero depends on: tinygrad would make a second wait
    def logit(part:int, expert:UOp, inside:UOp) -> UOp:
      place = self.logits[(self.token + part) * n_experts + safe_index(expert, inside) + wait_zero]
      return early_load(place, inside) if self.early else place.load()
    logits = [total([logit(part, *of_thread) for part in self.parts], UOp.add) for of_thread in own]
    scores = choices = logits
    if gating == Gating.SOFTMAX:   # it keeps the order: without a bias, and without groups' sums, the logits choose
      everyone = gather(logits, SLOTS + 3)
      scores = self.softmax(logits, everyone, thread)
      if self.routing.grouped: choices = scores
    elif gating == Gating.SIGMOID: scores = choices = [1 / (1 + exp(-logit)) for logit in logits]
    if self.bias is not None: choices = [score + bias for score, bias in zip(scores, self.constants(thread, threads))]
    if gating != Gating.SOFTMAX or self.bias is not None or self.routing.grouped: everyone = gather(choices, SLOTS)
    if self.routing.grouped:
      choices = self.of_best_groups(choices, everyone, own, (thread % lanes).eq(0))
      everyone = gather(choices, SLOTS + 5)
    if self.in_warps(threads):
      (score,), (choice,), ((expert, _),) = scores, choices, own
      return self.rank_in_warps(score, choice, everyone, expert)
    share = n_experts // lanes
    others = [(index, everyone[index].load()) for index in (thread % lanes * share + i for i in range(share))]
    return self.rank(scores, choices, others, own, lanes)

  def of_best_groups(self, choices:list[UOp], everyone:UOp, own:list[tuple[UOp, UOp]], first_lane:UOp) -> list[UOp]:
    """A thread's choices, NEVER where the expert's group does not stay. first_lane: whether the thread is an expert's first"""
    groups, size = self.routing.groups, self.experts // self.routing.groups
    scores, stored = local(groups, dtypes.float, SLOTS + 4), []
    group_of = [safe_index(expert, inside) // size for expert, inside in own]
    for group, (expert, inside) in zip(group_of, own):
      best = second = UOp.const(NEVER, dtypes.float)
      for i in range(size):
        other = everyone[group * size + i].load()
        best, second = best.maximum(other), second.maximum(best.minimum(other))
      stored.append(scores[group.valid(inside & first_lane & (expert % size).eq(0))].store(best + second))
    scores = scores.after(UOp(Ops.BARRIER, src=tuple(stored)))
    others, kept = [scores[i].load() for i in range(groups)], []
    for choice, group in zip(choices, group_of):
      score = scores[group].load()
      before = [((other > score) | (other >= score) & (group > i)).cast(dtypes.int) for i, other in enumerate(others)]
      kept.append((total(before, UOp.add) < self.routing.used_groups).where(choice, NEVER))
    return kept

  def in_warps(self, threads:int) -> bool:
    """Whether a warp's experts are ranked first: a thread has one, and a warp's are more than go on"""
    lanes = self.target.lanes
    return self.experts >= MANY_EXPERTS and self.experts == threads and self.experts % lanes == 0 and 2 * self.routing.count <= lanes

  def rank_in_warps(self, score:UOp, choice:UOp, everyone:UOp, expert:UOp) -> UOp:
    """rank, in two rounds"""
    count, lanes = self.routing.count, self.target.lanes
    warp, warps = expert // lanes, self.experts // lanes
    def before(own:UOp, number:UOp, others:list[UOp]) -> UOp:
      """How many others come before it; they are in order of their experts where they are the same"""
      return total([((other > own) | (other >= own) & (number > i)).cast(dtypes.int) for i, other in enumerate(others)], UOp.add)
    rank = before(choice, expert % lanes, [everyone[warp * lanes + i].load() for i in range(lanes)])
    goes_on = rank < count
    place = (warp * count + goes_on.where(rank, 0).cast(dtypes.weakint)).valid(goes_on)
    kept = [local(warps * count, dtype, SLOTS + 6 + i) for i, dtype in enumerate((dtypes.float, dtypes.float, dtypes.int))]
    barrier = UOp(Ops.BARRIER, src=tuple(buffer[place].store(value) for buffer, value in zip(kept, (choice, score, expert.cast(dtypes.int)))))
    kept = [buffer.after(barrier) for buffer in kept]
    inside = expert < warps * count
    own, own_score, own_expert = (buffer[safe_index(expert, inside)].load() for buffer in kept)
    final = inside.where(before(own, expert, [kept[0][i].load() for i in range(warps * count)]), count)
    return self.write([(final, own_expert, own_score)])

  def rank(self, scores:list[UOp], choices:list[UOp], others:list[tuple[UOp, UOp]], own:list[tuple[UOp, UOp]], lanes:int) -> UOp:
    """Ranks and writes a thread's experts, own, each with whether there is such an expert. others: the experts, and their choices, that it compares
    with; the lanes of an expert have shares of them."""
    ranked = []
    for score, choice, (expert, inside) in zip(scores, choices, own):
      before = [((other > choice) | (other >= choice) & (i < expert)).cast(dtypes.int) for i, other in others]
      # not in the gate: tinygrad would take `inside` for true in all that the index depends on, the barrier's stores too
      ranked.append((inside.where(group_sum(self.target, total(before, UOp.add), lanes), self.experts), expert.cast(dtypes.int), score))
    return self.write(ranked)

  def write(self, ranked:list[tuple[UOp, UOp, UOp]]) -> UOp:
    """Writes the first `count` experts to shared memory. ranked: of a thread's, the rank, the expert and its score"""
    count, written = self.routing.count, []
    ids, values = local(count, dtypes.int, SLOTS + 1), local(count, dtypes.float, SLOTS + 2)
    for rank, expert, score in ranked:
      wins = rank < count
      slot = wins.where(rank, 0).cast(dtypes.weakint)
      written.append(ids[slot.valid(wins)].store(expert))
      written.append(values[slot.valid(wins)].store(score))
    barrier = UOp(Ops.BARRIER, src=tuple(written))
    self.ids, self.values = ids.after(barrier), values.after(barrier)
    return barrier

  def expert(self, k:UOp) -> UOp:
    """Where logits are no numbers, none was chosen"""
    return self.ids[k].load().maximum(0).minimum(self.experts - 1)

  def weight(self, k:UOp) -> UOp:
    count = self.routing.count
    return weight_of([self.values[i].load() for i in range(count)], self.values[k].load(), self.routing)

class WarpChoice:
  """choose_experts of a token by a warp, of what other blocks of its launch have stored: see LastBlock. Lane l has the experts l, l + lanes, … In the
  kernel:

  score = gating(logit); key = score + bias, as a word           # ordered
  count times: highest = the highest key of all lanes; expert = the lowest that has it, whose key is 0 from then on
  lane k < count: the k-th of them, and its weight
  """
  def __init__(self, target:Target, routing:Routing, logits:tuple[int, int, int], buffers:dict[str, UOp], token:UOp, lane:UOp):
    """logits: the shape of that buffer, (parts that are added up, T, E)"""
    (parts, tokens, E), self.count, self.lane, self.token = logits, routing.count, lane, token
    own = [(expert, expert < E) for expert in (lane + first for first in range(0, E, target.lanes))]
    def logit(part:int, expert:UOp, inside:UOp) -> UOp:
      return early_load(buffers["logits"][(token + part * tokens) * E + safe_index(expert, inside)], inside)
    scores = choices = [total([logit(part, *expert) for part in range(parts)], UOp.add) for expert in own]
    if routing.gating == Gating.SIGMOID: scores = choices = [1 / (1 + exp(-logit)) for logit in scores]
    if routing.gating == Gating.SOFTMAX:   # it keeps the order
      top, inverse = softmax_terms(target, [inside.where(logit, NEVER) for logit, (_, inside) in zip(choices, own)])
      scores = [exp(logit - top) * inverse for logit in choices]
    if routing.bias is not None: choices = [score + buffers["bias"][safe_index(*expert)].load() for score, expert in zip(scores, own)]
    choices = [choice.eq(0).where(0.0, choice) for choice in choices]   # zeros of both signs are as good
    keys = [inside.where(ordered(choice), word(0)) for choice, (_, inside) in zip(choices, own)]
    numbers, experts, chosen_scores = [expert.cast(dtypes.uint32) for expert, _ in own], [], []
    self.taken = [UOp.const(False, dtypes.bool)] * len(own)   # whether the lane's experts are among the chosen
    for _ in range(self.count):
      highest = warp_max(target, total(keys, UOp.maximum))
      from_last = warp_max(target, total([key.eq(highest).where(E - number, 0) for key, number in zip(keys, numbers)], UOp.maximum))
      expert = E - from_last.maximum(1)
      hits = [number.eq(expert) for number in numbers]
      keys, self.taken = [hit.where(word(0), key) for hit, key in zip(hits, keys)], [before | hit for before, hit in zip(self.taken, hits)]
      score = total([hit.where(score, 0.0) for hit, score in zip(hits, scores)], UOp.add)
      chosen_scores.append(shuffle_from(target, score, expert % target.lanes))
      experts.append(expert)
    def of_lane(values:list[UOp]) -> UOp:
      """Lane k's is the k-th"""
      found = values[-1]
      for k, value in enumerate(values[:-1]): found = lane.eq(k).where(value, found)
      return found
    self.expert, self.weight = of_lane(experts).cast(dtypes.int), weight_of(chosen_scores, of_lane(chosen_scores), routing)
  @property
  def place(self) -> UOp:
    """Of the lane's in (T, count)"""
    return self.token * self.count + self.lane.minimum(self.count - 1)

def warp_choices(target:Target, routing:Routing, logits:tuple[int, int, int], buffers:dict[str, UOp], thread:UOp, threads:int) -> list[UOp]:
  """The stores of all tokens' choices by one block, a warp a token, turn by turn, in buffers sel and weights, (T, count) each. logits: as for
  WarpChoice"""
  (_, T, _), lanes, stores = logits, target.lanes, []
  for first in range(0, T, threads // lanes):
    token = thread // lanes + first
    choice = WarpChoice(target, routing, logits, buffers, token.minimum(T - 1), thread % lanes)
    place = choice.place.valid((token < T) & (choice.lane < choice.count))
    stores += [buffers["sel"][place].store(choice.expert), buffers["weights"][place].store(choice.weight)]
  return stores

def warp_chooses(target:Target, routing:Routing) -> bool:
  """Whether a launch's last block may choose"""
  return target.is_last is not None and target.warp_max is not None and not routing.grouped

def expert_index(sel:UOp, experts:int) -> UOp:
  """An expert's number as an index of a stack of so many: in bounds whatever memory holds"""
  return sel.maximum(0).minimum(experts - 1).cast(dtypes.weakint)

def weight_of(scores:list[UOp], score:UOp, routing:Routing) -> UOp:
  """The weight of one of a token's chosen experts by their scores"""
  if routing.gating == Gating.SOFTMAX_WEIGHT:
    top = total(scores, UOp.maximum)
    scores, score = [exp(other - top) for other in scores], exp(score - top)
    score, scores = score / total(scores, UOp.add), [other / total(scores, UOp.add) for other in scores]
  return (score / total(scores, UOp.add).maximum(LEAST_SUM) if routing.normalize else score) * routing.scale

def choose_experts_prefill(target:Target, logits:Tensor, routing:Routing, overlaps:bool=False) -> tuple[Tensor, Tensor]:
  """choose_experts in a launch. logits: float32 (T, E), or (S, T, E), to be added up. overlaps: it starts while those before it run. In the kernel:

  TopKInKernel of the token's logits                          # a block a token
  thread k < count: experts[k], weights[k] = expert(k), weight(k)
  """
  (*stack, T, E), K = logits.shape, routing.count
  threads, parts = -(-max(E, K) // target.lanes) * target.lanes, [i * T for i in range(prod(stack))]
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    if overlaps: buffers = behind_wait(target, buffers)
    token, thread = UOp.special(T, "gidx0"), UOp.special(threads, "lidx0")
    top_k = TopKInKernel(target, routing, E, buffers["logits"], buffers.get("bias"), token, parts)
    top_k.barrier(thread, threads, UOp.const(0), [])
    k = thread.minimum(K - 1)
    place = (token * K + k).valid(thread < K)
    return [buffers["experts"][place].store(top_k.expert(k)), buffers["weights"][place].store(top_k.weight(k))]
  outs = {"experts": empty(logits, T, K, dtype=dtypes.int32), "weights": empty(logits, T, K)}
  ins = {"logits": logits, **optional(bias=routing.bias)}
  experts, weights = launch(f"choose_experts_{len(parts)}_{T}_{E}_{K}_{routing.label}", outs, ins, body)
  return experts, weights

def sort_by_expert(target:Target, chosen:Tensor, experts:int) -> tuple[Tensor, Tensor]:
  """The choices of each expert, in order. chosen: int32 (T, K), a token's distinct experts -> order, int32
  (E, T): choices, token · K + k, of which the first counts[e] of row e are written; and counts, int32 (E,). In the kernel:

  hits = which of a thread's consecutive choices are the expert's   # a block an expert
  place = the number of hits of the threads before            # two levels: of the thread's group, and of the groups before
  for each hit: order[expert, place] = choice; place += 1
  counts[expert] = the hits of all threads
  """
  (T, K), group_size = chosen.shape, 16
  threads, n_choices = group_size * group_size, T * K
  per_thread = -(-n_choices // threads)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    expert, thread, own = UOp.special(experts, "gidx0"), UOp.special(threads, "lidx0"), []
    group, member = thread // group_size, thread % group_size
    for i in range(per_thread):
      choice = thread * per_thread + i
      inside = choice < n_choices
      own.append((choice, inside & buffers["chosen"][choice.valid(inside)].load().eq(expert.cast(dtypes.int))))
    def count(values:list[UOp]) -> UOp: return total(values, UOp.add)
    hits = [hit.where(UOp.const(1, dtypes.int), 0) for _, hit in own]
    thread_counts, group_counts = local(threads, dtypes.int, 0), local(group_size, dtypes.int, 1)
    thread_counts = thread_counts.after(UOp(Ops.BARRIER, src=(thread_counts[thread].store(count(hits)),)))
    members = [thread_counts[group * group_size + i].load() for i in range(group_size)]
    group_counts = group_counts.after(UOp(Ops.BARRIER, src=(group_counts[group.valid(member.eq(0))].store(count(members)),)))
    groups = [group_counts[i].load() for i in range(group_size)]
    before_in_group = count([(member > i).where(members[i], 0) for i in range(group_size)])
    place = before_in_group + count([(group > i).where(groups[i], 0) for i in range(group_size)])
    stores = [buffers["counts"][expert.valid(thread.eq(0))].store(count(groups))]
    for (choice, hit), one in zip(own, hits):
      # not in the gate: tinygrad would take a hit for true in all that the place depends on, the barriers' stores too
      slot = hit.where(place, T)
      taken = slot < T
      index = expert * T + taken.where(slot, 0).cast(dtypes.weakint)
      stores.append(buffers["order"][index.valid(taken)].store(choice.cast(dtypes.int)))
      place = place + one
    return stores
  outs = {"order": empty(chosen, experts, T, dtype=dtypes.int32), "counts": empty(chosen, experts, dtype=dtypes.int32)}
  order, counts = launch(f"sort_by_expert_{experts}", outs, {"chosen": chosen}, body)
  return order, counts

def most_tiles(choices:int, experts:int, size:int) -> int:
  """Tiles of up to `size` choices of an expert each that so many choices make at most"""
  return min(choices, experts) + max(choices - experts, 0) // size

def tile_of_choices(target:Target, counts:UOp, experts:int, size:int, number:UOp, lane:UOp) -> tuple[UOp, UOp]:
  """(expert, which of its tiles) of the tile `number`, where one expert's tiles of `size` choices come after another's; behind the last tile an
  expert's that it has not. counts: as sort_by_expert gives them. Each warp finds it for itself. In the kernel:

  tiles = counts / size, rounded up                           # a lane has neighbouring experts
  before = tiles of the lanes before                          # a scan by shuffles
  the lane that has the tile tells the others
  """
  share, tiles, zero = -(-experts // target.lanes), [], UOp.const(0, dtypes.int)
  for i in range(share):
    expert = lane * share + i
    inside = expert < experts
    tiles.append(inside.where((counts[safe_index(expert, inside)].load() + (size - 1)) // size, zero))
  of_lanes, before, distance = total(tiles, UOp.add), zero, 1
  while distance < target.lanes:
    other = shuffle(target, of_lanes, distance)
    before, of_lanes = before + (lane // distance % 2).eq(1).where(other, zero), of_lanes + other
    distance *= 2
  found, wanted, limit = [], number.cast(dtypes.int), number.vmax + 2
  for i, count in enumerate(tiles):
    which = wanted - before
    found.append(((which >= 0) & (which < count)).where((lane * share + i).cast(dtypes.int) * limit + which + 1, zero))
    before = before + count
  # bounded: tinygrad computes an index that it takes for large in 64 bits
  code = uniform(target, group_sum(target, total(found, UOp.add), target.lanes)).maximum(0).minimum(experts * limit - 1).cast(dtypes.weakint)
  return code // limit, code.eq(0).where(number.vmax + 1, code % limit - 1)

GROUP = 8   # choices of an expert that a tile of few tokens takes together
SPARE = 8   # rows behind the groups: threads past a group's choices read there, and what they read is not used

def most_groups(tokens:int, count:int, experts:int) -> int:
  """Groups that so many tokens' choices make at most"""
  choices = tokens * count
  return min(choices, experts) + (max(choices - experts, 0) if tokens > GROUP else 0) // GROUP

TURN = 64   # numbers that a thread looks at at once: of more the compiler loads all before it looks at the first, and has no registers for them

def sums_over(shared:UOp, count:int, number:int, values:Callable[[UOp, UOp], list[UOp]]) -> list[UOp]:
  """The sums, over the first `count` of a buffer of int32, of each of values(index, entry), both int32, in turns of as many entries as divide the
  count. number: the loop's own in the kernel"""
  size = max(size for size in range(1, TURN + 1) if count % size == 0)
  def of_turn(first:UOp) -> list[UOp]:
    each = [values((first + i).cast(dtypes.int), shared[first + i].load()) for i in range(size)]
    return [total([*of_value], UOp.add) for of_value in zip(*each)]
  if size == count: return of_turn(UOp.const(0))
  loop = UOp.range(count // size, number)
  more = of_turn(loop * size)
  kept = UOp.placeholder((len(more),), dtypes.int, slot=3 + number, addrspace=AddrSpace.REG)
  kept = kept.after(UOp.group(*(kept[i].store(UOp.const(0, dtypes.int)) for i in range(len(more)))))
  own = kept.after(loop)
  kept = kept.after(UOp.group(*(own[i].store(own[i].load() + value) for i, value in enumerate(more))).end(loop))
  return [kept[i].load() for i in range(len(more))]

def groups_like(like:Tensor, tokens:int, count:int, experts:int) -> Tensor:
  return empty(like, most_groups(tokens, count, experts) + SPARE, GROUP + 1, dtype=dtypes.int32)

def group_threads(target:Target, tokens:int, count:int, experts:int) -> int:
  """Of the block that makes the groups"""
  return -(-max(tokens * count, experts, most_groups(tokens, count, experts)) // target.lanes) * target.lanes

def group_choices(target:Target, chosen:Tensor, experts:int) -> Tensor:
  """The choices of each expert in groups of GROUP, one expert's after another's. chosen: int32 (T, K), a token's distinct experts -> int32
  (most_groups + SPARE, 1 + GROUP): a group's expert and its choices, token · K + k; -1: none. A block makes it all, see group_stores."""
  T, K = chosen.shape
  threads = group_threads(target, T, K, experts)
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    behind, thread = behind_wait(target, buffers), UOp.special(threads, "lidx0")
    own = behind["chosen"][thread.valid(thread < T * K)].load()
    return group_stores(buffers["groups"], own, (T, K, experts), thread)
  outs = {"groups": groups_like(chosen, T, K, experts)}
  return launch(f"group_choices_{T}_{K}_{experts}", outs, {"chosen": chosen}, body)[0]

def groups_for(count:UOp) -> UOp:
  """Of so many choices of an expert"""
  return (count + (GROUP - 1)) // GROUP

class Places(NamedTuple):
  """What a thread knows of the choice and the expert of its number: int32"""
  group: UOp       # the first of the choice's expert
  rank: UOp        # choices of that expert before
  first: UOp       # group of the expert
  count: UOp       # of the expert's choices
  in_all: UOp      # groups
  def stores(self, groups:UOp, sizes:tuple[int, int, int], thread:UOp) -> list[UOp]:
    (T, K, experts), number, none, stores = sizes, thread.cast(dtypes.int), UOp.const(-1, dtypes.int), []
    n_groups, is_choice, is_expert = most_groups(T, K, experts), thread < T * K, thread < experts
    def put(group:UOp, column:UOp|int, value:UOp, there:UOp) -> None:
      """Not in the gate: tinygrad would take `there` for true in all that the place depends on, the barriers' stores too"""
      place = there.where(group, n_groups)
      taken = place < n_groups
      index = taken.where(place, 0).cast(dtypes.weakint) * (GROUP + 1) + column
      stores.append(groups[index.valid(taken)].store(value))
    own_groups = groups_for(self.count)
    put(self.group + self.rank // GROUP, (self.rank % GROUP).cast(dtypes.weakint) + 1, number, is_choice)
    for i in range(-(-T // GROUP)): put(self.first + i, 0, number, is_expert & (own_groups > i))
    in_last = self.count - (own_groups - 1) * GROUP
    for i in range(1, GROUP): put(self.first + own_groups - 1, i + 1, none, is_expert & (own_groups > 0) & (in_last <= i))
    put(number, 0, none, (number >= self.in_all) & (number < n_groups))
    return stores

def group_stores(groups:UOp, own:UOp, sizes:tuple[int, int, int], thread:UOp) -> list[UOp]:
  """The stores of the groups by a block of group_threads or more. own: of the first T · K threads an expert, the choice of that number. sizes: T, K
  and the experts. In the kernel:

  everyone = own, in shared memory; barrier
  rank = the number of earlier choices of the same expert               # a thread a choice
  count = the number of choices                                         # a thread an expert
  first = the groups of the experts before                              # in shared memory; barriers
  groups[first + rank / GROUP, 1 + rank % GROUP] = choice; groups[first …, 0] = expert; what is left is -1: see Places
  """
  T, K, experts = sizes
  n_choices = T * K
  zero, one = UOp.const(0, dtypes.int), UOp.const(1, dtypes.int)
  is_choice, is_expert, number = thread < n_choices, thread < experts, thread.cast(dtypes.int)
  own = own.maximum(0).minimum(experts - 1)
  everyone = local(n_choices, dtypes.int, 0)
  everyone = everyone.after(UOp(Ops.BARRIER, src=(everyone[thread.valid(is_choice)].store(own),)))
  def of_choice(i:UOp, other:UOp) -> list[UOp]: return [(other.eq(own) & (number > i)).where(one, zero), other.eq(number).where(one, zero)]
  rank, count = sums_over(everyone, n_choices, 0, of_choice)
  groups_of = local(experts, dtypes.int, 1)
  groups_of = groups_of.after(UOp(Ops.BARRIER, src=(groups_of[thread.valid(is_expert)].store(groups_for(count)),)))
  first, in_all = sums_over(groups_of, experts, 1, lambda i, other: [(number > i).where(other, 0), other])
  firsts = local(experts, dtypes.int, 2)
  firsts = firsts.after(UOp(Ops.BARRIER, src=(firsts[thread.valid(is_expert)].store(first),)))
  return Places(firsts[own.cast(dtypes.weakint)].load(), rank, first, count, in_all).stores(groups, sizes, thread)

def groups_in_a_launch(target:Target, routing:Routing, tokens:int, experts:int, threads:int) -> bool:
  """Whether one block of so many threads, of a larger launch, makes all tokens' choices, a warp each, and their groups by the way"""
  return warp_chooses(target, routing) and tokens <= min(GROUP, threads // target.lanes) and \
    group_threads(target, tokens, routing.count, experts) <= threads

def chosen_groups(target:Target, routing:Routing, logits:tuple[int, int, int], buffers:dict[str, UOp], thread:UOp, slot:int) -> list[UOp]:
  """The stores of all tokens' weights and of their groups, by a block that groups_in_a_launch takes. logits: as for WarpChoice. slot: of shared
  memory, the first of two. In the kernel:

  of a warp's token: its choice; taken = a bit an expert, in words of a warp's lanes, in shared memory; barrier     # WarpChoice
  tokens = a bit a token that takes an expert; any = the experts that some token takes
  an expert's group = how many of `any` are before it; a choice's place there = how many tokens are before its own
  """
  (_, T, E), K, lanes = logits, routing.count, target.lanes
  warp, lane, words = thread // lanes, thread % lanes, -(-E // lanes)
  inside, token = warp < T, warp.minimum(T - 1)
  choice = WarpChoice(target, routing, logits, buffers, token, lane)
  first, own = inside & lane.eq(0), inside & (lane < K)
  taken, ids = local(T * words, dtypes.uint32, slot), local(T * K, dtypes.int, slot + 1)
  barrier = UOp(Ops.BARRIER, src=(*(taken[(token * words + i).valid(first)].store(vote(target, there)) for i, there in enumerate(choice.taken)),
                                  ids[choice.place.valid(own)].store(choice.expert)))
  taken, ids = taken.after(barrier), ids.after(barrier)
  of_tokens = [[taken[t * words + i].load() for i in range(words)] for t in range(T)]
  some = [total([of_token[i] for of_token in of_tokens], UOp.__or__) for i in range(words)]
  def below(number:UOp) -> UOp:
    """The bits of a word before this one"""
    return (word(1) << number) - 1
  def group_of(expert:UOp) -> UOp:
    """The number of the experts with choices before"""
    number, bits = expert // lanes, below(expert % lanes)
    before = [(number > i).where(word(0xffffffff), (number < i).where(word(0), bits)) for i in range(words)]
    return total([bit_count(target, own & mask) for own, mask in zip(some, before)], UOp.add)
  def tokens_of(expert:UOp) -> UOp:
    """A bit for each token that takes it"""
    bits = []
    for t, of_token in enumerate(of_tokens):
      its = of_token[-1]
      for i in range(words - 1): its = (expert // lanes).eq(i).where(of_token[i], its)
      bits.append((its >> (expert % lanes) & 1) << t)
    return total(bits, UOp.__or__)
  its_expert = ids[thread.minimum(T * K - 1)].load().maximum(0).minimum(E - 1).cast(dtypes.uint32)
  expert, its_token = thread.minimum(E - 1).cast(dtypes.uint32), (thread // K).minimum(T - 1).cast(dtypes.uint32)
  rank, count = bit_count(target, tokens_of(its_expert) & below(its_token)), bit_count(target, tokens_of(expert))
  places = Places(group_of(its_expert), rank, group_of(expert), count, total([bit_count(target, bits) for bits in some], UOp.add))
  return [buffers["weights"][choice.place.valid(own)].store(choice.weight), *places.stores(buffers["groups"], (T, K, E), thread)]

"""A draw from a nucleus (top-p): the likeliest tokens, as few as have the share top_p of all probability together; and of those (min-p), the ones
that are at least min_p times as likely as the likeliest.

Nobody looks for where it ends. A draw is the largest of logits + noise (nn/noise.py). The largest of all tokens is the largest of the nucleus too, if
it is one of them; and a token is one of them if those that are likelier have less than the share without it. So tokens are asked in the order of
logits + noise, and the first one inside is drawn: with a top_p of 0.95 the first of all, nineteen times of twenty. On a GPU:

  largest[block]     = max of the block's logits
  contenders[block]  = the two largest of logits + noise; masses[block] = Σ mass                   # mass of a token: exp(logit - largest), whole
  above[block, i]    = Σ mass of the block's tokens that are likelier than contender i             # of the CANDIDATES largest of all contenders
  token              = the first candidate inside

What min-p excludes is no contender. The last is the beginning of whatever launch takes the token. Where no candidate is inside, its block goes on
alone: the largest of logits + noise of the tokens that are likelier than those outside. Each try leaves about half of what is outside.
"""
from __future__ import annotations
import functools, math
from typing import Callable, NamedTuple
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.nn.cutoff import cutoff, shuffle_words
from tinygrad.nn.intrinsics import Target, group_reduce
from tinygrad.nn.kernel import behind_wait, branch, break_if, empty, exp, launch, local, ordered, total
from tinygrad.nn.noise import Noise, half_row, noise_of_row
from tinygrad.uop.ops import Ops

class Nucleus(NamedTuple):
  """Which of Noise's values are a row's top_p and min_p. top_p of 1: all tokens; min_p of 0: as likely as may be"""
  top_p: int
  min_p: int

WHOLE = 2.0 ** 40       # of the likeliest token's mass: whole numbers, whose sum is the same in whatever order
REACHED = 1 - 1e-6      # of top_p: so that p = 0.999999… of a rounded sum can always be reached

def below_largest(logits:Tensor, temperature:Tensor) -> Tensor:
  """float32 (S, V): the logarithms of probabilities, the largest 0. At most 0: no temperature is too low. A zero is the same whatever its logit's
  sign, which adding a bias of 0 changes"""
  return (-(logits.max(axis=1, keepdim=True) - logits).abs() / temperature.eq(0).where(1.0, temperature)).contiguous()

def within(logits:Tensor, values:Tensor, nucleus:Nucleus) -> Tensor:
  """float32 (S, V), as they are in the nucleus, else -inf. values: as Noise has them. Tokens that tie at its edge are in it"""
  temperature, top_p, min_p = (values[:, i:i+1] for i in (0, *nucleus))
  x = below_largest(logits, temperature)
  mass = (x.exp() * WHOLE).cast(dtypes.uint64).contiguous()
  enough = (mass.sum(1, keepdim=True).cast(dtypes.float) * (top_p * REACHED)).cast(dtypes.uint64).maximum(1)
  inside = (ordered(x) >= cutoff(x, mass, enough.reshape(-1)).unsqueeze(1)) | (top_p >= 1)
  return (inside & (x >= min_p.log()) & x.isinf().logical_not()).where(logits, float("-inf"))

# ---- on a GPU ----

BLOCKS, THREADS = 128, 256                # of a row whose contenders are found
ADDERS, ADDING, CANDIDATES = 32, 512, 4   # blocks of a row, each of so many threads, that add up what is above each candidate
PLACES = 0xffffffff                       # a key's lower half is this less the place
CHOOSING, TRIES = 384, 64                 # threads that choose; a limit that nobody reaches
PARTS_BYTES = 8 * (BLOCKS + (ADDERS + 1) * CANDIDATES)   # of a row, what is chosen by

def key_of(score:UOp, place:UOp) -> UOp:
  """uint64, of two numbers larger where logits + noise are, or the place is lower"""
  return (ordered(score.eq(0).where(0.0, score)).cast(dtypes.uint64) << 32) | (PLACES - place.cast(dtypes.uint64))
def place_of(key:UOp, V:int) -> UOp:
  """Some place, where a key is nobody's"""
  return (PLACES - (key & PLACES)).minimum(V - 1).cast(dtypes.int).cast(dtypes.weakint)

def words_reduced(target:Target, value:UOp, op:Callable[[UOp, UOp], UOp]) -> UOp:
  """op over a warp's lanes, uint64, in each of them"""
  distance = target.lanes // 2
  while distance: value, distance = op(value, shuffle_words(target, value, distance)), distance // 2
  return value

class Row:
  """A row of a kernel's buffers: x, values, largest, and where tokens are scored key and counter"""
  def __init__(self, buffers:dict[str, UOp], row:UOp, V:int, width:int, nucleus:Nucleus):
    self.buffers, self.row, self.V, self.width, self.nucleus = buffers, row, V, width, nucleus
    self.temperature = self.value(0)
  def value(self, column:int) -> UOp: return self.buffers["values"][self.row * self.width + column].load()
  def below(self, logit:UOp, largest:UOp) -> UOp:
    """As below_largest"""
    distance = largest - logit
    return -(distance < 0).where(-distance, distance) / self.temperature.eq(0).where(1.0, self.temperature)
  def logit(self, place:UOp) -> UOp: return self.buffers["x"][self.row * self.V + place].load()
  def tokens(self, number:UOp, largest:UOp) -> list[tuple[UOp, UOp, UOp]]:
    """Of the token `number` and of the one half a row behind it: below_largest; logits + noise as a key, 0 of what min-p excludes, or is not there;
    whether it is there"""
    half, found, least = half_row(self.V), [], self.value(self.nucleus.min_p).log2() * math.log(2)
    noise = noise_of_row(self.buffers, self.row, self.width, self.V)(number)
    for place, own, last in zip((number, number + half), noise, (half - 1, self.V - 1)):
      exists, logit = place <= last, self.logit(place.minimum(last))
      below = self.below(logit, largest)
      found.append((below, (exists & (below >= least)).where(key_of(logit + own, place), 0), exists))
    return found

def mass_of(below:UOp) -> UOp: return (exp(below) * WHOLE).cast(dtypes.uint64)

def two_largest(first:tuple[UOp, UOp], second:tuple[UOp, UOp]) -> tuple[UOp, UOp]:
  """Of two pairs, in their order each"""
  return first[0].maximum(second[0]), first[0].minimum(second[0]).maximum(first[1].maximum(second[1]))

def largest_parts(target:Target, x:Tensor) -> Tensor:
  """float32 (S, BLOCKS)"""
  S, V = x.shape
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    block, row, thread = UOp.special(BLOCKS, "gidx0"), UOp.special(S, "gidx1"), UOp.special(THREADS, "lidx0")
    buffers, warps = behind_wait(target, buffers), THREADS // target.lanes
    places = [((turn * BLOCKS + block) * THREADS + thread).minimum(V - 1) for turn in range(-(-V // (BLOCKS * THREADS)))]
    own = group_reduce(target, total([buffers["x"][row * V + place].load() for place in places], UOp.maximum), target.lanes, UOp.maximum)
    shared = local(warps, dtypes.float, 0)
    shared = shared.after(UOp(Ops.BARRIER, src=(shared[(thread // target.lanes).valid((thread % target.lanes).eq(0))].store(own),)))
    largest = total([shared[warp].load() for warp in range(warps)], UOp.maximum)
    return [buffers["largest"][(row * BLOCKS + block).valid(thread.eq(0))].store(largest)]
  return launch(f"nucleus_largest_{V}_{S}", {"largest": empty(x, S, BLOCKS)}, {"x": x}, body)[0]

def contenders(target:Target, x:Tensor, noise:Noise, nucleus:Nucleus, parts:Tensor) -> dict[str, Tensor]:
  """keys: uint64 (S, BLOCKS, 2); masses: uint64 (S, BLOCKS); largest: float32 (S,); count: int32 (S,), the draws' numbers.
  parts: of largest_parts"""
  (S, V), width = x.shape, noise.values.shape[1]
  turns, warps = -(-half_row(V) // (BLOCKS * THREADS)), THREADS // target.lanes
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    block, number, thread = UOp.special(BLOCKS, "gidx0"), UOp.special(S, "gidx1"), UOp.special(THREADS, "lidx0")
    lane, buffers = thread % target.lanes, behind_wait(target, buffers)
    row, of_blocks = Row(buffers, number, V, width, nucleus), range(0, BLOCKS, target.lanes)
    largest = total([buffers["parts"][number * BLOCKS + first + lane].load() for first in of_blocks], UOp.maximum)
    largest, none = group_reduce(target, largest, target.lanes, UOp.maximum), UOp.const(0, dtypes.uint64)
    best, masses = (none, none), []
    for turn in range(turns):
      for below, key, exists in row.tokens((block * turns + turn) * THREADS + thread, largest):
        best = two_largest(best, (key, none))
        masses.append(exists.where(mass_of(below), none))
    distance = target.lanes // 2
    while distance:
      best = two_largest(best, (shuffle_words(target, best[0], distance), shuffle_words(target, best[1], distance)))
      distance //= 2
    own = (*best, words_reduced(target, total(masses, UOp.add), UOp.add))
    shared = local(3 * warps, dtypes.uint64, 0)
    place = [((thread // target.lanes) * 3 + i).valid(lane.eq(0)) for i in range(3)]
    shared = shared.after(UOp(Ops.BARRIER, src=tuple(shared[at].store(value) for at, value in zip(place, own))))
    first, second, mass = zip(*[[shared[warp * 3 + i].load() for i in range(3)] for warp in range(warps)])
    best, at = functools.reduce(two_largest, zip(first, second)), number * BLOCKS + block
    return [*(buffers["keys"][(at * 2 + i).valid(thread.eq(0))].store(key) for i, key in enumerate(best)),
            buffers["masses"][at.valid(thread.eq(0))].store(total(list(mass), UOp.add)),
            *(buffers[name][number.valid(block.eq(0) & thread.eq(0))].store(value)
              for name, value in {"largest": largest, "count": buffers["counter"][number].load()}.items())]
  words = functools.partial(empty, x, S, BLOCKS, dtype=dtypes.uint64)
  outs = {"keys": empty(x, S, BLOCKS, 2, dtype=dtypes.uint64), "masses": words(), "largest": empty(x, S),
          "count": empty(x, S, dtype=dtypes.int32)}
  return dict(zip(outs, launch(f"nucleus_contenders_{V}_{S}", outs, {"x": x, **noise._asdict(), "parts": parts}, body)))

def candidates_of(target:Target, buffers:dict[str, UOp], row:UOp, lane:UOp) -> list[UOp]:
  """The largest of the row's contenders, the largest first, in each lane"""
  each, limit, found = 2 * BLOCKS // target.lanes, UOp.const((1 << 64) - 1, dtypes.uint64), []
  own = [buffers["keys"][row * (2 * BLOCKS) + lane * each + i].load() for i in range(each)]
  for _ in range(CANDIDATES):
    limit = words_reduced(target, total([(key < limit).where(key, 0) for key in own], UOp.maximum), UOp.maximum)
    found.append(limit)
  return found

def sums_above(target:Target, x:Tensor, values:Tensor, nucleus:Nucleus, found:dict[str, Tensor]) -> dict[str, Tensor]:
  """candidates: uint64 (S, CANDIDATES), keys; above: uint64 (S, ADDERS, CANDIDATES), the mass of a block's tokens that are likelier than each"""
  (S, V), width, warps = x.shape, values.shape[1], ADDING // target.lanes
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    block, number, thread = UOp.special(ADDERS, "gidx0"), UOp.special(S, "gidx1"), UOp.special(ADDING, "lidx0")
    lane, buffers, none = thread % target.lanes, behind_wait(target, buffers), UOp.const(0, dtypes.uint64)
    row, largest = Row(buffers, number, V, width, nucleus), buffers["largest"][number].load()
    keys, sums = candidates_of(target, buffers, number, lane), [none] * CANDIDATES
    edges = [row.below(row.logit(place_of(key, V)), largest) for key in keys]
    for turn in range(-(-V // (ADDERS * ADDING))):
      place = (turn * ADDERS + block) * ADDING + thread
      below = row.below(row.logit(place.minimum(V - 1)), largest)
      mass = (place < V).where(mass_of(below), none)
      sums = [value + (below > edge).where(mass, none) for value, edge in zip(sums, edges)]
    shared = local(warps * CANDIDATES, dtypes.uint64, 0)
    at = [((thread // target.lanes) * CANDIDATES + i).valid(lane.eq(0)) for i in range(CANDIDATES)]
    own = [words_reduced(target, value, UOp.add) for value in sums]
    shared = shared.after(UOp(Ops.BARRIER, src=tuple(shared[place].store(value) for place, value in zip(at, own))))
    whole = total([shared[warp * CANDIDATES + thread.minimum(CANDIDATES - 1)].load() for warp in range(warps)], UOp.add)
    first = thread.eq(0) & block.eq(0)
    return [buffers["above"][((number * ADDERS + block) * CANDIDATES + thread).valid(thread < CANDIDATES)].store(whole),
            *(buffers["candidates"][(number * CANDIDATES + i).valid(first)].store(key) for i, key in enumerate(keys))]
  outs = {"candidates": empty(x, S, CANDIDATES, dtype=dtypes.uint64), "above": empty(x, S, ADDERS, CANDIDATES, dtype=dtypes.uint64)}
  ins = {"x": x, "values": values, "keys": found["keys"], "largest": found["largest"]}
  return dict(zip(outs, launch(f"nucleus_above_{V}_{S}", outs, ins, body)))

def asked(target:Target, x:Tensor, noise:Noise, nucleus:Nucleus) -> dict[str, Tensor]:
  """What `chosen` chooses by. x: float32 (S, V)"""
  found = contenders(target, x, noise, nucleus, largest_parts(target, x))
  noise = noise._replace(counter=found["count"])   # whoever chooses may move the counter itself on, which is the position
  return {"x": x, **noise._asdict(), "masses": found["masses"], "largest": found["largest"], **sums_above(target, x, noise.values, nucleus, found)}

def chosen(target:Target, buffers:dict[str, UOp], nucleus:Nucleus, V:int, width:int, number:UOp, thread:UOp) -> UOp:
  """The token of a row, in each of a block's CHOOSING threads. buffers: those of `asked`. width: of a row of Noise's values"""
  lane = thread % target.lanes
  row, largest, each = Row(buffers, number, V, width, nucleus), buffers["largest"][number].load(), BLOCKS // target.lanes
  mass = words_reduced(target, total([buffers["masses"][number * BLOCKS + lane * each + i].load() for i in range(each)], UOp.add), UOp.add)
  top_p = row.value(nucleus.top_p)
  enough = (mass.cast(dtypes.float) * (top_p * REACHED)).cast(dtypes.uint64).maximum(UOp.const(1, dtypes.uint64))
  def inside(below:UOp, above:UOp) -> UOp: return ((above < enough) | (top_p >= 1)) & (below > -math.inf)
  token, edge, listed, blocks = UOp.const(-1, dtypes.int), UOp.const(-math.inf, dtypes.float), UOp.const(True, dtypes.bool), list[UOp]()
  for i in range(CANDIDATES):
    place = place_of(buffers["candidates"][number * CANDIDATES + i].load(), V)
    above = [buffers["above"][(number * ADDERS + first + lane) * CANDIDATES + i].load() for first in range(0, ADDERS, target.lanes)]
    below = row.below(row.logit(place), largest)
    is_inside = inside(below, words_reduced(target, total(above, UOp.add), UOp.add))
    token = ((token < 0) & listed & is_inside).where(place.cast(dtypes.int), token)
    edge = is_inside.where(edge, edge.maximum(below))
    # a block of which both contenders are among these may have others that come next
    block = place % half_row(V) // (-(-half_row(V) // (BLOCKS * THREADS)) * THREADS)
    for other in blocks: listed = listed & block.ne(other)
    blocks.append(block)
  return tried(target, row, largest, (token, edge), inside, thread)

def tried(target:Target, row:Row, largest:UOp, begin:tuple[UOp, UOp], inside:Callable[[UOp, UOp], UOp], thread:UOp) -> UOp:
  """The token that `begin` has, or where it is -1 the first inside of those that are likelier than its edge. By a block's CHOOSING threads, in turns:

  token = the largest of logits + noise beyond the edge
  stop if the mass above it says that it is inside
  edge = the token's
  """
  warps, none = CHOOSING // target.lanes, UOp.const(0, dtypes.uint64)
  def of_block(value:UOp, op:Callable[[UOp, UOp], UOp], slot:int) -> UOp:
    shared, place = local(warps, dtypes.uint64, slot), (thread // target.lanes).valid((thread % target.lanes).eq(0))
    shared = shared.after(UOp(Ops.BARRIER, src=(shared[place].store(words_reduced(target, value, op)),)))
    return total([shared[warp].load() for warp in range(warps)], op)
  token, edge = (UOp.placeholder((1,), value.dtype, slot=slot, addrspace=AddrSpace.REG) for slot, value in enumerate(begin))
  token, edge = (kept.after(kept[0].store(value)) for kept, value in zip((token, edge), begin))
  a_try, _ = branch(0, begin[0] < 0, TRIES)
  bound = edge.after(a_try)[0].load()
  def over_row(number:int, turns:int, op:Callable[[UOp, UOp], UOp], values:Callable[[UOp], list[UOp]]) -> UOp:
    """op over the values of so many turns of the block"""
    kept, turn = UOp.placeholder((1,), dtypes.uint64, slot=1 + number, addrspace=AddrSpace.REG).after(a_try), UOp.range(turns, number)
    kept = kept.after(kept[0].store(none))
    own = kept.after(turn)
    return of_block(kept.after(own[0].store(functools.reduce(op, values(turn), own[0].load())).end(turn))[0].load(), op, number)
  def beyond(turn:UOp) -> list[UOp]:
    return [(below > bound).where(key, none) for below, key, _ in row.tokens(turn * CHOOSING + thread, largest)]
  place = place_of(over_row(1, -(-half_row(row.V) // CHOOSING), UOp.maximum, beyond), row.V)
  below = row.below(row.logit(place), largest)
  def above(turn:UOp) -> list[UOp]:
    at = turn * CHOOSING + thread
    own = row.below(row.logit(at.minimum(row.V - 1)), largest)
    return [((own > below) & (at < row.V)).where(mass_of(own), none)]
  ends = inside(below, over_row(2, -(-row.V // CHOOSING), UOp.add, above))
  stores = UOp.group(token.after(a_try)[0].store(place.cast(dtypes.int)), edge.after(a_try)[0].store(below))
  return token.after(break_if(ends, stores).end(a_try))[0].load()

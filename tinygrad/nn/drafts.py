"""Drafts found in a sequence itself: where its newest tokens stood before, the tokens that followed there may follow here"""
from __future__ import annotations
from functools import reduce
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import cpu
from tinygrad.nn.intrinsics import Target, group_reduce, target_of
from tinygrad.nn.kernel import behind_wait, empty, launch, local
from tinygrad.nn.primitive import primitive
from tinygrad.uop.ops import Ops

SHORTEST, LONGEST = 3, 8   # tokens that a draft's place must share with the end of the sequence, in mid-answer, and those that are compared
NO_DRAFT = -1              # among drafts

@primitive(outputs=lambda ids, start, begins, count: empty(ids, ids.shape[0], count, dtype=dtypes.int32))
def find_drafts(ids:Tensor, start:Tensor, begins:Tensor, count:int) -> Tensor:
  """ids: int32 (S, C), sequences of start + 1 tokens each; start, begins: int32 (S,), the latter where their answers begin -> int32 (S, count),
  drafts of what follows, or NO_DRAFT. They follow the place that shares the most tokens with the end, LONGEST at most, and of those the last; where
  it is near, what is between the two goes round. SHORTEST must be shared; at an answer's beginning all of it but its first token, which is often
  spelled otherwise there, without a blank before it."""
  C, last = ids.shape[1], start.unsqueeze(1)
  back = Tensor.arange(LONGEST, dtype=dtypes.int32).to(ids.device).unsqueeze(0)
  ends = (back <= last).where(ids.gather(1, (last - back).maximum(0)), NO_DRAFT).contiguous()   # the newest tokens, the last first
  place = Tensor.arange(C, dtype=dtypes.int32).to(ids.device).unsqueeze(0)
  shared, same = Tensor.zeros_like(ids), place < last
  for i in range(LONGEST):
    same = same & (place >= i) & ids.pad(((0, 0), (i, 0)))[:, :C].eq(ends[:, i:i+1])
    shared = shared + same.cast(dtypes.int32)
  enough = (start - begins).maximum(1).minimum(SHORTEST).unsqueeze(1)
  best = (shared >= enough).where(shared * C + place, -1).max(1, keepdim=True).contiguous()
  at = best.maximum(0) % C
  ahead = Tensor.arange(count, dtype=dtypes.int32).to(ids.device).unsqueeze(0)
  return (best >= 0).where(ids.gather(1, at + 1 + ahead % (last - at).maximum(1)), NO_DRAFT).contiguous()

@find_drafts.form("cpu_decode", takes=lambda ids, start, begins, count: cpu.is_cpu(ids.device))
def find_drafts_cpu(ids:Tensor, start:Tensor, begins:Tensor, count:int) -> Tensor:
  """From the last place on back: none before it is better, when LONGEST are shared"""
  S, C = ids.shape
  body = f"""for (int s = 0; s < {S}; s++) {{
    const int* row = ids + s * {C}L; const int last = start[s], made = last - begins[s];
    int best = (made < 1 ? 1 : made < {SHORTEST} ? made : {SHORTEST}) - 1, at = -1;
    for (int place = last - 1; place >= best && best < {LONGEST}; place--) {{
      if (row[place] != row[last]) continue;
      int shared = 1;
      while (shared < {LONGEST} && shared <= place && row[place - shared] == row[last - shared]) shared++;
      if (shared > best) {{ best = shared; at = place; }}
    }}
    for (int i = 0; i < {count}; i++) y[s * {count} + i] = at < 0 ? {NO_DRAFT} : row[at + 1 + i % (last - at)];
  }}"""
  outs, ins = {"y": empty(ids, S, count, dtype=dtypes.int32)}, {"ids": ids, "start": start, "begins": begins}
  return cpu.launch(f"find_drafts_{C}_{count}_{S}", outs, ins, "", body)[0]

BLOCKS, THREADS = 64, 256   # of a row that is searched; of a block

def largest_of_block(target:Target, value:UOp, thread:UOp, threads:int) -> UOp:
  """Of the numbers of a block's threads, in each of them"""
  shared, warps = local(threads // target.lanes, dtypes.int, 0), range(threads // target.lanes)
  place = (thread // target.lanes).valid((thread % target.lanes).eq(0))
  shared = shared.after(UOp(Ops.BARRIER, src=(shared[place].store(group_reduce(target, value, target.lanes, UOp.maximum)),)))
  return reduce(UOp.maximum, [shared[warp].load() for warp in warps])

@find_drafts.form("decode", takes=lambda ids, start, begins, count: target_of(ids.device) is not None)
def find_drafts_decode(ids:Tensor, start:Tensor, begins:Tensor, count:int) -> Tensor:
  """Two launches: each block looks for the best of its places, one block a row takes the best of those"""
  target, (S, C) = target_of(ids.device), ids.shape
  assert target is not None
  def of_blocks(buffers:dict[str, UOp]) -> list[UOp]:
    block, row, thread, buffers = UOp.special(BLOCKS, "gidx0"), UOp.special(S, "gidx1"), UOp.special(THREADS, "lidx0"), behind_wait(target, buffers)
    last, best = buffers["start"][row].load().cast(dtypes.weakint).maximum(0).minimum(C - 1), UOp.const(-1, dtypes.int)
    enough = (buffers["start"][row].load() - buffers["begins"][row].load()).maximum(1).minimum(SHORTEST)
    ends = [buffers["ids"][row * C + (last - i).maximum(0)].load() for i in range(LONGEST)]
    for turn in range(-(-C // (BLOCKS * THREADS))):
      place = (turn * BLOCKS + block) * THREADS + thread
      same, shared = place < last, UOp.const(0, dtypes.int)
      for i, end in enumerate(ends):   # a token is asked for where those behind it are shared
        if i: same = same & (place >= i)
        same = same & buffers["ids"][(row * C + place - i).valid(same)].load().eq(end)
        shared = shared + same.cast(dtypes.int)
      best = best.maximum((shared >= enough).where(shared * C + place.cast(dtypes.int), -1))
    return [buffers["best"][(row * BLOCKS + block).valid(thread.eq(0))].store(largest_of_block(target, best, thread, THREADS))]
  def of_all(buffers:dict[str, UOp]) -> list[UOp]:
    row, thread, buffers = UOp.special(S, "gidx0"), UOp.special(BLOCKS, "lidx0"), behind_wait(target, buffers)
    best = largest_of_block(target, buffers["best"][row * BLOCKS + thread].load(), thread, BLOCKS)
    at, last = best.maximum(0) % C, buffers["start"][row].load()
    follows = (at + 1 + thread.cast(dtypes.int) % (last - at).maximum(1)).minimum(C - 1).cast(dtypes.weakint)
    token = buffers["ids"][row * C + follows].load()
    return [buffers["y"][(row * count + thread).valid(thread < count)].store((best >= 0).where(token, NO_DRAFT))]
  best, = launch(f"find_drafts_part_{C}_{S}", {"best": empty(ids, S, BLOCKS, dtype=dtypes.int32)},
                 {"ids": ids, "start": start, "begins": begins}, of_blocks)
  ins = {"best": best, "ids": ids, "start": start}
  return launch(f"find_drafts_whole_{C}_{count}_{S}", {"y": empty(ids, S, count, dtype=dtypes.int32)}, ins, of_all)[0]

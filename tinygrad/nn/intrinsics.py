"""The few instructions that UOps cannot say, a row a target. Everything else in a kernel is UOps and renders for every target."""
from __future__ import annotations
import re
from dataclasses import dataclass, replace
from typing import Callable
from tinygrad import Device, UOp, dtypes
from tinygrad.renderer.cstyle import CUDARenderer, MetalRenderer
from tinygrad.uop.ops import Ops, PatternMatcher, UPat, graph_rewrite

Place = Callable[[UOp, int], tuple[UOp, UOp]]   # (lane, number of one of its elements) -> the element's (row, column)

@dataclass(frozen=True)
class Mma:
  """c + a·b by a tensor core, on matrices whose elements a warp's lanes hold. a is half (M, K), b is half (K, N), c is float32 (M, N).
  A lane holds counts[0] elements of a, counts[1] of b and counts[2] of c; the functions a, b and c place them.
  instructions: how many make the product. Each takes an equal share of K, and of a lane's elements of a and b.
  on_words: statements that add the product of words, two neighbouring elements each, to variables; None: there are none."""
  M: int
  N: int
  K: int
  counts: tuple[int, int, int]
  a: Place
  b: Place
  c: Place
  renderer: str                # the name under which the renderer defines the instruction
  instructions: int = 1
  on_words: str|None = None    # {0} … {3} point to a lane's elements of c; then the words of a, the words of b
  on_words_where: str|None = None   # the same, where a last operand, of all lanes, is not zero

  def accumulate(self, a_words:list[UOp], b_words:list[UOp], sums:list[UOp], inside:UOp|None=None) -> UOp:
    """Adds a·b to a lane's elements of c, where `inside` is true, in all lanes or none. sums: where they are. Returns a zero: what comes behind its
    store, to anywhere, comes behind the sums'. tinygrad knows of no other event."""
    text, conditions = (self.on_words, []) if inside is None else (self.on_words_where, [inside.cast(dtypes.uint32)])
    assert text is not None
    return UOp(Ops.CUSTOM, dtypes.float, src=(*sums, *a_words, *b_words, *conditions), arg=f"0.0f; {text}")
  def __call__(self, a_elements:list[UOp], b_elements:list[UOp], sums:list[UOp]) -> list[UOp]:
    """A lane's elements of a, b and c -> its elements of c + a·b"""
    a_share, b_share = len(a_elements) // self.instructions, len(b_elements) // self.instructions
    for i in range(self.instructions):
      fragments = a_elements[i * a_share:(i + 1) * a_share], b_elements[i * b_share:(i + 1) * b_share], sums
      shape = self.N, self.M, self.K // self.instructions
      product = UOp.wmma(*(UOp.stack(*fragment) for fragment in fragments), shape, self.renderer, 32, None)
      sums = [product.index(j) for j in range(self.counts[2])]
    return sums

# PTX, mma.m16n8k16: a group of four lanes has a row of a and c, and a column of b
def _ptx_a(lane:UOp, i:int) -> tuple[UOp, UOp]: return lane // 4 + i // 2 % 2 * 8, lane % 4 * 2 + i % 2 + i // 4 * 8
def _ptx_b(lane:UOp, i:int) -> tuple[UOp, UOp]: return lane % 4 * 2 + i % 2 + i // 2 * 8, lane // 4
def _ptx_c(lane:UOp, i:int) -> tuple[UOp, UOp]: return lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2
def _ptx_on_words(shape:str, a:list[int], b:list[int], condition:int|None=None) -> str:
  """The instruction on the words of those numbers. condition: the number of one; where it is `uniform` no barrier of the warp comes with it"""
  def registers(first:int, count:int) -> str: return "{{" + ", ".join(f"%{i}" for i in range(first, first + count)) + "}}"
  sums, inputs = registers(0, 4), f"{registers(4, len(a))}, {registers(4 + len(a), len(b))}"
  words, instruction = [*a, *b], f"mma.sync.aligned.{shape}.row.col.f32.f16.f16.f32 {sums}, {inputs}, {sums};"
  if condition is not None:
    instruction = f"{{{{ .reg .pred inside; setp.ne.u32 inside, %{4 + len(words)}, 0; @inside {instruction} }}}}"
    words.append(condition)
  return (f'asm("{instruction}" : ' + ", ".join(f'"+f"(*{{{i}}})' for i in range(4)) + " : " + ", ".join(f'"r"({{{i}}})' for i in words) + ");")
MMA_CUDA = Mma(16, 8, 16, (8, 4, 4), _ptx_a, _ptx_b, _ptx_c, "CUDA", on_words=_ptx_on_words("m16n8k16", [4, 5, 6, 7], [8, 9]),
               on_words_where=_ptx_on_words("m16n8k16", [4, 5, 6, 7], [8, 9], 10))
# m16n8k8 takes the first half of a lane's elements of a and b, and then the second
MMA_TURING = replace(MMA_CUDA, instructions=2, on_words_where=None,
                     on_words=_ptx_on_words("m16n8k8", [4, 5], [8]) + " " + _ptx_on_words("m16n8k8", [6, 7], [9]))

# Metal, simdgroup_matrix: the same for a, b and c
def _simdgroup(lane:UOp, i:int) -> tuple[UOp, UOp]: return lane // 16 * 4 + lane // 2 % 4, lane // 8 % 2 * 4 + lane % 2 * 2 + i
MMA_METAL = Mma(8, 8, 8, (2, 2, 2), _simdgroup, _simdgroup, _simdgroup, "METAL")

@dataclass(frozen=True)
class Target:
  """What a kernel may ask of a GPU. A str is a C expression over the operands {0}, {1}, … None: the GPU has no such instruction."""
  shuffle_xor: str             # {0} of the lane whose number differs by the bit {o}, a constant
  shuffle_from: str|None = None    # {0} of lane {1}
  warp_max: str|None = None    # the largest {0} of all lanes; uint32
  vote: str|None = None        # a bit a lane: whether its {0} is true; uint32
  bit_count: str|None = None   # of the word {0}; int32
  dot4: str|None = None        # {2} + Σ of the four int8 products of {0} and {1}; int32
  dot4_unsigned: str|None = None   # … of four uint8 of {0} and the int8 of {1}
  wait: str|None = None        # statement: go on when the kernels before this one are done
  trigger: str|None = None     # statement: the next kernel may start when all blocks are here; of a target with `wait`
  as_written: str|None = None  # a word to the compiler: no product and sum of the kernel are rounded as one
  at_once: str|None = None     # a word to the compiler: {n} blocks at once are enough of a multiprocessor, whose registers they share
  mma: Mma|None = None
  byte_perm: str|None = None   # the four bytes of {0} and {1} that the digits of {2} number, the lowest first; uint32
  and_or: str|None = None      # {0} & {1} | {2}, of words, in one instruction where two of them are constants; uint32
  fma_halves: str|None = None  # {0} · {1} + {2}, each two halves of a word, rounded once; uint32
  words: str|None = None       # the type of {n} words, two or four, that one instruction loads
  # of float32, nearly, in one instruction each, without a branch for what is very small or large: 1 / {0}, 1 / sqrt({0}), 2^{0}
  reciprocal: str|None = None
  reciprocal_from_one: str|None = None   # … where {0} is 1 at least: in the compiler's own words, which it puts where registers are free
  rsqrt: str|None = None
  exp2: str|None = None
  pack_halves: str|None = None   # the halves {0} and {1} as a word, the first in its low half; uint32
  # statements: 16 bytes begin their way from {1} in device memory to {0} in shared memory, and the 128 that they are of to the second cache
  copy: str|None = None
  copy_or_zeros: str|None = None   # … or zeros, where {2} is false
  # of a thread of each of some blocks, where {1} is true: whether it is the last of {last} + 1 to come here, which sees all that the others' blocks
  # stored before a barrier; {0}, in device memory, counts them, and is 0 again. uint32
  is_last: str|None = None
  fetch: str|None = None       # statement: the line of {0} in device memory is asked for, to the second cache; no register is taken
  issued: str|None = None      # statement: the compiler puts no load that stands before it behind it
  grouped: str|None = None     # statements: the thread's copies that are in no group yet are one
  copied: str|None = None      # statements: go on when the thread's copies are there
  copied_but: str|None = None  # … but those of its latest {n} groups
  matrices: str|None = None    # statements: {0} … {3} point to the lane's words of four (8, 8) matrices of halves, {4} to a row that the lane names
  transposed: str|None = None  # the same, of the transposed matrices
  warp_groups: bool = False    # whether four warps multiply together: nn/warp_groups.py
  # of several devices that reach each other's memory, in lines of 32 bytes: four floats, a word that all of them have behind each
  peer_send: str|None = None      # statements: the floats {2} … {5} with the word {6} are line {1} of those at the address {0}, on another device
  peer_receive: str|None = None   # statements: go on when the line at {4} has the word {5}; {0} … {3} point to where its floats are then
  # … in lines of 16 bytes, four floats, and words that say that they are there
  peer_store: str|None = None     # statement: the floats {2} … {5} are line {1} of those at the address {0}, on another device
  peer_tell: str|None = None      # statement, where {3} is true: {2} is word {1} of those at {0}, behind what the block stored before a barrier
  peer_await: str|None = None     # statement, where {2} is true: go on, to what was stored there before, when the word at {0} is {1}
  lanes: int = 32              # of a warp
  shared_bytes: int = 32768    # of a block
  most_shared_bytes: int = 0   # of a block that has a multiprocessor for itself (runtime/ops_cuda.py's dynamic_shared)

def _shared(place:str) -> str: return f'"r"((unsigned)__cvta_generic_to_shared({place}))'
def _ldmatrix(kind:str) -> str:
  words = ", ".join(f'"=r"(*{{{i}}})' for i in range(4))
  return f'asm volatile("ldmatrix.sync.aligned.m8n8.x4.{kind}b16 {{{{%0, %1, %2, %3}}}}, [%4];" : {words} : {_shared("{4}")});'

def _approximate(instruction:str) -> str:
  return f'[](float x) {{{{ float y; asm("{instruction}.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }}}}({{0}})'

TARGETS = {
  "CUDA": Target("__shfl_xor_sync(0xffffffffu, {{0}}, {o})", "__shfl_sync(0xffffffffu, {0}, {1})", dot4="__dp4a((int)({0}), {1}, {2})", mma=MMA_CUDA,
                 warp_max="__reduce_max_sync(0xffffffffu, (unsigned)({0}))", vote="__ballot_sync(0xffffffffu, {0})", bit_count="__popc({0})",
                 dot4_unsigned='[](uint a, int b, int c) {{ int d; asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); '
                               "return d; }}({0}, {1}, {2})",
                 byte_perm="__byte_perm({0}, {1}, {2})",
                 and_or='[](uint a, uint b, uint c) {{ uint d; asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }}'
                        "({0}, {1}, {2})",
                 as_written="// rounded as written",
                 fma_halves="tg_bitcast<uint>(__hfma2(tg_bitcast<half2>((uint)({0})), tg_bitcast<half2>((uint)({1})), "
                            "tg_bitcast<half2>((uint)({2}))))",
                 reciprocal=_approximate("rcp"), reciprocal_from_one="__fdividef(1.0f, {0})", rsqrt=_approximate("rsqrt"), exp2=_approximate("ex2"),
                 pack_halves="tg_bitcast<uint>(make_half2({0}, {1}))", words="uint{n}", shared_bytes=49152, most_shared_bytes=101376,
                 copy=f'asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" : : {_shared("{0}")}, "l"({{1}}) : "memory");',
                 copy_or_zeros='asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" : : '
                               f'{_shared("{0}")}, "l"({{1}}), "r"((int)({{2}}) * 16) : "memory");',
                 is_last='[](unsigned* count, bool inside) {{{{ if (!inside) return 0u; unsigned old; asm volatile("atom.acq_rel.gpu.global.inc.u32 '
                         '%0, [%1], %2;" : "=r"(old) : "l"(count), "r"({last}u) : "memory"); return (unsigned)(old == {last}u); }}}}'
                         '((unsigned*)({{0}}), {{1}})',
                 fetch='asm volatile("prefetch.global.L2 [%0];" : : "l"({0}));',
                 issued="__syncwarp();", grouped='asm volatile("cp.async.commit_group;" ::: "memory");',
                 copied='asm volatile("cp.async.wait_all;" ::: "memory");', copied_but='asm volatile("cp.async.wait_group {n};" ::: "memory");',
                 matrices=_ldmatrix("shared."), transposed=_ldmatrix("trans.shared.")),
  "METAL": Target("simd_shuffle_xor({{0}}, (ushort){o})", mma=MMA_METAL),
}

PATIENCE = 1 << 24   # looks at a line from another device, about ten seconds: one that does not come has failed

def _peer_send() -> str:
  def number(i:int) -> str: return f'"l"((unsigned long long)({{6}}) << 32 | tg_bitcast<uint>((float)({{{i}}})))'
  def pair(i:int) -> str: return (f'asm volatile("st.relaxed.sys.global.v2.b64 [%0], {{{{%1, %2}}}};" : : '
                                  f'"l"((unsigned long long*)({{0}}) + ({{1}}) * 4 + {i}), {number(2 + i)}, {number(3 + i)} : "memory");')
  return f"{pair(0)} {pair(2)}"
def _peer_receive() -> str:
  def pair(i:int) -> str: return (f'asm volatile("ld.relaxed.sys.global.v2.b64 {{{{%0, %1}}}}, [%2];" : "=l"(line[{i}]), "=l"(line[{i + 1}]) : '
                                  f'"l"((const unsigned long long*)({{4}}) + {i}) : "memory");')
  there = " && ".join(f"line[{i}] >> 32 == {{5}}" for i in range(4))
  floats = " ".join(f"*{{{i}}} = tg_bitcast<float>((uint)line[{i}]);" for i in range(4))
  return (f"unsigned long long line[4]; for (uint turn = 0; ; turn++) {{{{ {pair(0)} {pair(2)} if ({there}) break; "
          f"if (turn == {PATIENCE}u) __trap(); }}}} {floats}")

_PEER_AWAIT = ('if ({2}) for (uint turn = 0, word; ; turn++) {{ '
               'asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"((const uint*)({0})) : "memory"); '
               f'if (word == {{1}}) break; if (turn == {PATIENCE}u) __trap(); }}}}')

# from Hopper on a kernel may start while those before it still run, up to the point where it waits for them (programmatic dependent launch); cards of
# that row are large, so that all blocks of a launch that is meant to run at once do
BLACKWELL = replace(TARGETS["CUDA"], most_shared_bytes=232448, at_once="// blocks at once: {n}", peer_send=_peer_send(), peer_receive=_peer_receive(),
                    peer_store="((float4*)({0}))[{1}] = make_float4({2}, {3}, {4}, {5});", peer_await=_PEER_AWAIT,
                    peer_tell='if ({3}) asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"((uint*)({0}) + ({1})), "r"({2}) : "memory");',
                    wait='asm volatile("griddepcontrol.wait;" ::: "memory")',
                    trigger='asm volatile("griddepcontrol.launch_dependents;" ::: "memory")')
HOPPER = replace(BLACKWELL, warp_groups=True)   # whose instructions no other has

# the least compute capability -> the row, the newest first: m16n8k16, copies beside other work and a warp's largest came with Ampere, m16n8k8
# with Turing, dp4a with the second Pascal
BEFORE_AMPERE = replace(TARGETS["CUDA"], warp_max=None, copy=None, copy_or_zeros=None, issued=None, grouped=None, copied=None, copied_but=None,
                        matrices=None, transposed=None, fetch=None, most_shared_bytes=0)
OF_CAPABILITY = {
  120: replace(BLACKWELL, most_shared_bytes=101376, at_once=None),   # some of these are small, and all of the next
  110: replace(BLACKWELL, at_once=None),
  100: BLACKWELL,
  90: HOPPER,
  86: TARGETS["CUDA"],
  80: replace(TARGETS["CUDA"], most_shared_bytes=166912),
  75: replace(BEFORE_AMPERE, mma=MMA_TURING),
  61: replace(BEFORE_AMPERE, mma=None, is_last=None),
  0: replace(BEFORE_AMPERE, mma=None, is_last=None, dot4=None, dot4_unsigned=None),
}

def of_arch(arch:str) -> Target:
  """The row of an NVIDIA architecture: sm_86, sm_90a"""
  digits = re.search(r"\d+", arch)
  capability = int(digits[0]) if digits else 0
  return next(target for least, target in OF_CAPABILITY.items() if capability >= least)

def target_of(device:str) -> Target|None:
  """A device's row. None: it has none (the CPU, a GPU that nobody has written one for). NULL has no hardware: its row is that of the
  language it renders."""
  name = device.split(":")[0]
  if name not in ("CUDA", "NULL"): return TARGETS.get(name)
  renderer = Device[name].renderer
  if isinstance(renderer, CUDARenderer): return of_arch(renderer.target.arch)
  return TARGETS["METAL"] if isinstance(renderer, MetalRenderer) else None

# A CUSTOM is a statement of its own, evaluated once. A CUSTOMI's text is repeated at every use.

def shuffle(target:Target, value:UOp, distance:int) -> UOp:
  """The value of the lane whose number differs by the bit `distance`"""
  return UOp(Ops.CUSTOM, value.dtype, src=(value,), arg=target.shuffle_xor.format(o=distance))

def shuffle_from(target:Target, value:UOp, lane:UOp) -> UOp:
  """The value of the lane of that number"""
  assert target.shuffle_from is not None
  return UOp(Ops.CUSTOM, value.dtype, src=(value, lane.cast(dtypes.int)), arg=target.shuffle_from)

def warp_max(target:Target, value:UOp) -> UOp:
  """The largest uint32 of all lanes"""
  assert target.warp_max is not None
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(value,), arg=target.warp_max)

def vote(target:Target, condition:UOp) -> UOp:
  """A bit a lane, the first one's lowest: whether the condition is true there"""
  assert target.vote is not None
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(condition,), arg=target.vote)

def bit_count(target:Target, bits:UOp) -> UOp:
  """How many bits of a word are set, int32"""
  assert target.bit_count is not None
  return UOp(Ops.CUSTOM, dtypes.int, src=(bits,), arg=target.bit_count)

def uniform(target:Target, value:UOp) -> UOp:
  """A value that all lanes have, so that the target's compiler knows it"""
  return value if target.shuffle_from is None else shuffle_from(target, value, UOp.const(0))

def group_reduce(target:Target, value:UOp, lanes:int, op:Callable[[UOp, UOp], UOp], step:int=1) -> UOp:
  """op over `lanes` neighbouring lanes, a power of two, `step` apart. Every one of them has the result; the order is fixed."""
  distance = lanes * step // 2
  while distance >= step:
    value = op(value, shuffle(target, value, distance))
    distance //= 2
  return value
def group_sum(target:Target, value:UOp, lanes:int) -> UOp: return group_reduce(target, value, lanes, lambda own, other: own + other)

def dot4(target:Target, left:UOp, right:UOp, total:UOp) -> UOp:
  """total + Σ left[i]·right[i] over the four int8 of two words, int32"""
  assert target.dot4 is not None
  return UOp(Ops.CUSTOMI, dtypes.int, src=(left, right, total), arg=target.dot4)

def dot4_unsigned(target:Target, left:UOp, right:UOp, total:UOp) -> UOp:
  """total + Σ left[i]·right[i] over the four uint8 of a word and the four int8 of another, int32"""
  assert target.dot4_unsigned is not None
  return UOp(Ops.CUSTOMI, dtypes.int, src=(left, right, total), arg=target.dot4_unsigned)

def word(value:int) -> UOp: return UOp.const(value, dtypes.uint32)

def byte_perm(target:Target, low:UOp, high:UOp, digits:int|UOp) -> UOp:
  """Four of the eight bytes of two words: `digits`, four bits each of which three count, numbers them, the lowest first"""
  assert target.byte_perm is not None
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(low, high, word(digits) if isinstance(digits, int) else digits), arg=target.byte_perm)

def look_up(target:Target, table:list[UOp], digits:UOp) -> UOp:
  """Four bytes of a table of 8 or 16, two words or four, by the low four digits of 4 bits, the lowest first"""
  if len(table) == 2: return byte_perm(target, *table, digits)
  upper = and_or(target, digits >> 1, 0x4444, 0x3210)   # of each byte, which half of the table it is in
  return byte_perm(target, byte_perm(target, *table[:2], digits), byte_perm(target, *table[2:], digits), upper)

def and_or(target:Target, value:UOp, mask:int, bits:int) -> UOp:
  """value & mask | bits"""
  assert target.and_or is not None
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(value, word(mask), word(bits)), arg=target.and_or)

def fma_halves(target:Target, left:UOp, right:UOp, total:UOp) -> UOp:
  """left · right + total, for each of the two halves of a word"""
  assert target.fma_halves is not None
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(left, right, total), arg=target.fma_halves)

def opaque_zero(text:str, *after:UOp) -> UOp:
  """A zero that tinygrad takes for an unknown 0 or 1. text: the zero in C; the target's compiler sees what it is. An index that it is added to
  is computed behind `after`."""
  return (UOp(Ops.CUSTOM, dtypes.int, src=after, arg=text) & 1).cast(dtypes.weakint)

def pdl_wait(target:Target, *loads:UOp, trigger_last:bool=False) -> UOp:
  """wait_zero: a zero that is known only when the kernels before this one are done. A load of what they wrote adds it to the index, so that it
  comes behind the wait. loads, of what no kernel writes, are issued before the wait. A target that starts a kernel when those before it are done
  has a plain zero.

  The next kernel may start before the wait, with nothing of others to read. trigger_last: it starts behind the wait. All that was before this kernel
  is done then, and the next may read it before its own wait, by early_load: only what this one writes comes behind that. It says so where it relies
  on it; test_waits.py checks each such load against the launches of a step."""
  if target.wait is None: return UOp.const(0)
  order = (target.wait, target.trigger) if trigger_last else (target.trigger, target.wait)
  return opaque_zero(f"0; {'; '.join(text for text in order if text)}", *(loads or (UOp.const(0, dtypes.int),)))

def early_load(place:UOp, inside:UOp) -> UOp:
  """A load, before the wait, of what was written two or more launches back (see pdl_wait); 0 where `inside` is false. place: an index of a buffer of
  32-bit numbers. It goes past the multiprocessor's own cache: that is known to be new behind the wait alone. Few lanes of a block should ask: the
  blocks all want the same lines, of one place, in turns."""
  word = UOp(Ops.CUSTOM, dtypes.uint32, src=(place, inside), arg="{1} ? *(volatile const unsigned*)({0}) : 0u")
  return word.bitcast(place.dtype)

def load_words(target:Target, place:UOp, registers:list[UOp], inside:UOp|None=None) -> UOp:
  """Loads two or four words, from an index of a buffer of any type, to places in registers, which stay as they are where `inside` is false.
  Returns a zero: what comes behind its store, to anywhere, comes behind the registers'."""
  assert target.words is not None
  n = len(registers)
  kind, conditions = target.words.format(n=n), [] if inside is None else [inside]
  load = f"{kind} words = *(const {kind}*)({{{n}}});"
  stores = " ".join(f"*{{{i}}} = words.{part};" for i, part in zip(range(n), "xyzw"))
  branch = f"if ({{{n + 1}}}) " if conditions else ""
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(*registers, place, *conditions), arg=f"0; {branch}{{{{ {load} {stores} }}}}")

def store_words(target:Target, place:UOp, words:list[UOp]) -> UOp:
  """Stores two or four words to an index of a buffer of any type. Returns a zero, known when they are"""
  assert target.words is not None
  kind, values = target.words.format(n=len(words)), ", ".join(f"{{{i + 1}}}" for i in range(len(words)))
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(place, *words), arg=f"0; *({kind}*)({{0}}) = make_{kind}({values});")

def copy(target:Target, to:UOp, source:UOp, inside:UOp|None=None, exists:UOp|None=None) -> UOp:
  """Begins to copy 16 bytes between indices of buffers of any type, where `inside` is true; zeros, where `exists` is false. None: it always is.
  Returns a zero, known when it has begun"""
  text, conditions = target.copy if exists is None else target.copy_or_zeros, [] if exists is None else [exists]
  assert text is not None
  if inside is None: return UOp(Ops.CUSTOM, dtypes.uint32, src=(to, source, *conditions), arg=f"0; {text}")
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(to, source, *conditions, inside), arg=f"0; if ({{{len(conditions) + 2}}}) {text}")

def fetch(target:Target, place:UOp) -> UOp:
  """Asks for the line of an index of a buffer, to the second cache. Returns a zero, known when it has asked"""
  assert target.fetch is not None
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(place,), arg=f"0; {target.fetch}")

def select(condition:UOp, place:UOp, other:UOp) -> UOp:
  """One of two indices of buffers of a type, to copy from"""
  return UOp(Ops.CUSTOMI, place.dtype, src=(condition, place, other), arg="({0}?{1}:{2})")

def grouped(target:Target, after:UOp, inside:UOp|None=None) -> UOp:
  """Where `inside` is true, makes a group of the copies in none that the thread began before `after`. Returns a zero, known when it is one"""
  assert target.grouped is not None
  if inside is None: return UOp(Ops.CUSTOM, dtypes.uint32, src=(after,), arg=f"0; {target.grouped}")
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(after, inside), arg=f"0; if ({{1}}) {target.grouped}")

def copied(target:Target, *after:UOp, loaded:bool=False) -> UOp:
  """A zero, known when all copies that the thread began before `after` are there. Other threads see them behind a barrier. loaded: the loads among
  `after` are asked for before that, where the compiler would put each in front of its use"""
  assert target.copied is not None and target.issued is not None
  return UOp(Ops.CUSTOM, dtypes.uint32, src=after, arg=f"0; {f'{target.issued} ' if loaded else ''}{target.copied}")

def copied_but(target:Target, cases:list[tuple[UOp, int]], otherwise:int) -> UOp:
  """… but those of as many groups, the latest, as the first case says that is true. Of 0 groups: all, and those in no group"""
  assert target.copied is not None and target.copied_but is not None
  def text(groups:int) -> str: return target.copied if groups == 0 else target.copied_but.format(n=groups)
  ways = " ".join(f"if ({{{i}}}) {text(groups)} else" for i, (_, groups) in enumerate(cases))
  return UOp(Ops.CUSTOM, dtypes.uint32, src=tuple(case for case, _ in cases), arg=f"0; {ways} {text(otherwise)}")

def is_last_block(target:Target, count:UOp, blocks:int, inside:UOp) -> UOp:
  """Whether the block is the last of so many, uint32, in the thread where `inside` is true; 0 in all others. count: an index of a buffer of 32-bit
  numbers, where a 0 is before and after all this"""
  assert target.is_last is not None
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(count, inside), arg=target.is_last.format(last=blocks - 1))

def leave_unless(condition:UOp) -> UOp:
  """A zero, known in the threads where the condition, the same in all of a block, is true. The others are done. A block of each launch must stay and
  wait: who waits for the launch relies on it that those before it are done"""
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(condition,), arg="0; if (!({0})) return;")

def load_matrices(target:Target, place:UOp, registers:list[UOp], transposed:bool=False) -> UOp:
  """Loads the lane's words of four (8, 8) matrices of halves from shared memory to places in registers: of row lane // 4, or of that column,
  the numbers lane % 4 · 2 and the next. place: the lane's own, the index where row lane % 8 of matrix lane // 8 begins, whole 16 bytes. Returns a
  zero, as load_words."""
  text = target.transposed if transposed else target.matrices
  assert text is not None
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(*registers, place), arg=f"0; {text}")

def peer_send(target:Target, address:UOp, number:UOp, values:list[UOp], tag:UOp) -> UOp:
  """Stores four floats to another device's memory, each with a word: line `number` of those at an address, uint64. Returns a zero, known when it has
  begun"""
  assert target.peer_send is not None
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(address, number, *values, tag), arg=f"0; {target.peer_send}")

def peer_receive(target:Target, place:UOp, registers:list[UOp], tag:UOp) -> UOp:
  """Waits for a line from another device that has this word, at an index of a buffer of words, and puts its four floats into places in registers.
  Returns a zero, as load_words"""
  assert target.peer_receive is not None
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(*registers, place, tag), arg=f"0; {{{{ {target.peer_receive} }}}}")

def peer_store(target:Target, address:UOp, number:UOp, values:list[UOp]) -> UOp:
  """Stores four floats to another device's memory: line `number` of those at an address, uint64. Returns a zero, known when it has begun"""
  assert target.peer_store is not None
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(address, number, *values), arg=f"0; {target.peer_store}")

def peer_tell(target:Target, address:UOp, number:UOp, word:UOp, inside:UOp) -> UOp:
  """Stores a word to another device's memory, number `number` of those at an address, in the thread where `inside` is true. Who awaits it sees what
  the block's threads stored there before a barrier. Returns a zero, known when it has begun"""
  assert target.peer_tell is not None
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(address, number, word, inside), arg=f"0; {target.peer_tell}")

def peer_await(target:Target, place:UOp, word:UOp, inside:UOp) -> UOp:
  """Waits until another device has told this word, at an index of a buffer of words, in the thread where `inside` is true; the block's others see
  that behind a barrier. Returns a zero, known then"""
  assert target.peer_await is not None
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(place, word, inside), arg=f"0; {target.peer_await}")

def _nearly(text:str|None, x:UOp) -> UOp|None: return None if text is None else UOp(Ops.CUSTOM, dtypes.float, src=(x,), arg=text)
def _reciprocal(target:Target, x:UOp) -> UOp|None:
  one, power = ([part for part in x.src if part.op is op] if x.op is Ops.ADD else [] for op in (Ops.CONST, Ops.CUSTOM))
  from_one = bool(one and power) and float(one[0].arg) == 1 and power[0].arg == target.exp2   # 1 + 2^x
  return _nearly(target.reciprocal_from_one if from_one else target.reciprocal, x)
_FLOAT = UPat.var("x", dtypes.float)
_NEARLY = PatternMatcher([   # of which the context is the target
  (UPat(Ops.RECIPROCAL, src=(UPat(Ops.SQRT, src=(_FLOAT,)),)), lambda ctx, x: _nearly(ctx.rsqrt, x)),
  (UPat(Ops.RECIPROCAL, src=(_FLOAT,)), lambda ctx, x: _reciprocal(ctx, x)),
  (UPat(Ops.EXP2, src=(_FLOAT,)), lambda ctx, x: _nearly(ctx.exp2, x))])

def in_one_instruction(target:Target, stores:list[UOp]) -> list[UOp]:
  """A kernel's stores, whose 1 / x, 1 / sqrt(x) and 2^x of float32 are the target's own. The compiler of its language makes them right to the last
  bit or so, by tens of instructions and a branch, which all of a launch waits for where they stand between two of a block's barriers."""
  return list(graph_rewrite(UOp.sink(*stores), _NEARLY, ctx=target, name="in one instruction").src)

def pack_halves(target:Target, low:UOp, high:UOp) -> UOp:
  """Two numbers as the halves of a word"""
  assert target.pack_halves is not None
  return UOp(Ops.CUSTOM, dtypes.uint32, src=(low.cast(dtypes.half), high.cast(dtypes.half)), arg=target.pack_halves)

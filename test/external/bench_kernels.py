"""Micro-benchmark of the decode primitives: the launches of each at the shapes of a model, over a bank of weights larger than any cache.

  python test/external/bench_kernels.py [--model glm|ds2lite|youtu|kimi|matrices] [--only TEXT] [--rounds N] [--depth D]

matrices: single ones of at least 30 MB, in several formats: heads, some of no model, and those of wide models' blocks. Beside each stands what a
launch takes that reads as many bytes and does nothing with them.

Every launch of a chain writes the same outputs, so that the graph runs them one after another, as decoding does. Prints the bytes and the time at
the memory's peak first, then µs, GB/s and percent of it, and of what reading alone takes; the last line is JSON.
"""
from __future__ import annotations
import sys, pathlib
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import argparse, contextlib, functools, json, operator, statistics, time
from typing import Callable
from unittest import mock
from gguf import GGMLQuantizationType as G
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.helpers import Context
from tinygrad.apps.machine import peak_bandwidth
from tinygrad.apps.mla import RMSNorm
from tinygrad.apps.quantized import QuantizedExpertWeights, QuantizedLinear, block_size, split_planes, with_header
from tinygrad.apps.rope import Rope
from tinygrad.nn import kernel, mla_attention, moe, norm_linear as nn_norm_linear, split_kv
from tinygrad.nn.intrinsics import pdl_wait, target_of
from tinygrad.nn.mla_attention import latent_attention
from tinygrad.nn.matvec import Codes, empty_codes
from tinygrad.nn.moe import expert_down, expert_gate_up, gate_up, gate_up_launch
from tinygrad.nn.norm_linear import linear_of_codes, norm_linear
from tinygrad.nn.routing import Gating, Routing
from tinygrad.nn.step import PAGE, Step

BANK = 256 << 20  # bytes of distinct weights a chain reads
CHAIN = 96        # launches of it, at least: one graph behind another is a pause

def random_weight(cls:type, kind:G, *shape:int):
  """Random codes; every half is small and finite"""
  n, (elements, nbytes) = 1, block_size(kind)
  for s in shape: n *= s
  planes = split_planes(kind, shape, Tensor.empty(n // elements * nbytes, dtype=dtypes.uint8))
  def fill(p:Tensor) -> Tensor:
    if p.dtype in (dtypes.half, dtypes.float): return (Tensor.rand(*p.shape) * 0.01).cast(p.dtype).contiguous().realize()
    return Tensor.randint(*p.shape, low=0, high=255, dtype=dtypes.int32).cast(p.dtype).contiguous().realize()
  planes = with_header(kind, shape, {name: fill(p) for name, p in planes.items()})
  return cls(kind, shape, {name: p.contiguous().realize() for name, p in planes.items()})

Cases = dict[str, tuple[Callable, Callable, Callable]]   # {name: (make weights, run with them, bytes they read)}

def lin(kind:G, *shape:int): return random_weight(QuantizedLinear, kind, *shape)
def numbers(*shape:int) -> Tensor: return Tensor.randn(1, *shape).contiguous().realize()
def norm(n:int) -> RMSNorm: return RMSNorm(Tensor.ones(n).contiguous().realize(), 1e-5)
def decode_step(depth:int, positions:int) -> Step:
  table = Tensor.arange(positions // PAGE, dtype=dtypes.int32).unsqueeze(0).contiguous().realize()
  return Step.decode(Tensor([depth], dtype=dtypes.int32).realize(), table)

KINDS = G.Q4_0, G.Q4_K, G.Q5_K, G.Q6_K, G.Q8_0, G.F16, G.BF16

def codes(beside:Tensor, width:int) -> Codes:
  """A vector as int8, as a launch before would have stored it"""
  like = empty_codes(beside, 1, width)
  words = Tensor.randint(*like.words.shape, low=-2 ** 31, high=2 ** 31 - 1, dtype=dtypes.int32)
  return Codes(words.contiguous().realize(), (Tensor.rand(*like.scales.shape) * 0.01).contiguous().realize())

def matrices() -> Cases:
  """Single matrices, (rows, width). Heads, three of no model, and a dense feed-forward's gate and up are behind a norm; to down and attn_output
  vectors come as int8, where the format has codes. A vector of 16 384 numbers is one of theirs: no model has a norm of so many"""
  (D, F), out = (7168, 18432), {}
  step, x, norm_x = decode_step(0, PAGE), numbers(D), norm(D)
  def down(x:Codes|Tensor, residual:Tensor, m:tuple) -> Tensor:
    return linear_of_codes(x, m[0], residual) if isinstance(x, Codes) else norm_linear(step, x, None, m, None, residual)[0]
  def nbytes(_:str, m:tuple) -> int: return sum(w.nbytes for w in m)
  def made(kind:G, rows:int, width:int, count:int=1) -> Callable: return lambda: tuple(lin(kind, rows, width) for _ in range(count))
  for kind in KINDS:
    integer = lin(kind, 32, 256).integer
    def gate_and_up(m:tuple, integer:bool=integer) -> list[Tensor]:
      return gate_up_launch(step, x, norm_x, m, None, empty_codes(x, 1, F)) if integer else gate_up(step, x, norm_x, *m)
    for name, rows, width in ("head ", 154880, 2048), ("head ", 163840, D), ("", 32768, 2048), ("", 8192, D), ("", 4096, 16384):
      # GLM-4.7-Flash, Kimi-K2, no model
      out[f"{kind.name} {name}{rows}x{width}"] = made(kind, rows, width), functools.partial(norm_linear, step, numbers(width), norm(width)), nbytes
    out[f"{kind.name} gate|up {F}x{D}"] = made(kind, F, D, 2), gate_and_up, nbytes
    # Kimi-K2, DeepSeek-V3, no model
    for name, rows, width in ("down", D, F), ("attn_output", D, 8192), ("attn_output", D, 16384), ("down", 4096, 16384):
      vector = codes(x, width) if integer else numbers(width)
      out[f"{kind.name} {name} {rows}x{width}"] = made(kind, rows, width), functools.partial(down, vector, numbers(rows)), nbytes
  return out

READERS, READ = 256, 8   # threads of a block that reads, and words of 16 bytes that each of them reads
READ_BLOCK = READERS * READ * 4   # words of 4 bytes

def read_alone(weight:Tensor) -> list[Tensor]:
  """A launch that reads all of uint32 (n,), and writes nothing unless what it read is a number that is hardly there"""
  target = target_of(weight.device)
  assert target is not None
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    block, thread = UOp.special(weight.shape[0] // READ_BLOCK, "gidx0"), UOp.special(READERS, "lidx0")
    words = [buffers["w"][block * READ_BLOCK + (i * READERS + thread) * 4 + j].load() for i in range(READ) for j in range(4)]
    found = functools.reduce(operator.xor, words)
    return [buffers["y"][(thread + pdl_wait(target, *words)).valid(found.eq(0x9e3779b9))].store(found)]
  return nn_norm_linear.launch(f"read_{weight.shape[0]}", {"y": kernel.empty(weight, READERS, dtype=dtypes.uint32)}, {"w": weight}, body)

def cases(model:str, depth:int) -> Cases:
  """A model's; the types are those of the public Q4_0 files"""
  D, H, nope, v, ffn, experts, used, shared, q_lora = {
    "glm": (2048, 20, 192, 256, 1536, 64, 4, 1, 768), "ds2lite": (2048, 16, 128, 128, 1408, 64, 6, 2, 0),
    "youtu": (2048, 16, 128, 128, 6144, 0, 0, 0, 1536), "kimi": (7168, 64, 128, 128, 2048, 384, 8, 1, 1536)}[model]
  L, R = 512, 64
  positions = -(-max(depth + 64, 4096) // PAGE) * PAGE
  step = decode_step(depth, positions)
  rope = Rope(Tensor.rand(positions, R // 2, 2).contiguous().realize(), nope + R, nope)
  x, x_q, q, heads, context, kv = numbers(D), numbers(q_lora or D), numbers(H * (nope + R)), numbers(H * v), numbers(H, L), numbers(L + R)
  norm_x, norm_q, norm_kv = norm(D), norm(q_lora or D), norm(L)
  def cache() -> Tensor: return Tensor.randn(positions, L + R, dtype=dtypes.half).contiguous().realize()
  def weight_bytes(m:tuple) -> int:
    return sum(w.nbytes * used // experts if isinstance(w, QuantizedExpertWeights) else w.nbytes for w in m if not isinstance(w, Tensor))
  out:dict[str, tuple[Callable, Callable]] = {}
  if q_lora:
    out["q_a|kv_a"] = lambda: (lin(G.Q4_0, q_lora, D), lin(G.Q8_0, L + R, D)), lambda m: norm_linear(step, x, norm_x, m)
    out["q_b+rope"] = lambda: (lin(G.Q4_0, H * (nope + R), q_lora),), lambda m: norm_linear(step, x_q, norm_q, m, rope)
  else: out["q|kv_a+rope"] = lambda: (lin(G.Q4_0, H * (nope + R), D), lin(G.Q8_0, L + R, D)), lambda m: norm_linear(step, x, norm_x, m, rope)
  out["attention"] = lambda: (lin(G.Q8_0, H, L, nope), cache()), lambda m: latent_attention(step, q, kv, m[0], norm_kv, m[1], rope, 0.06)
  out["v_b"] = lambda: (lin(G.Q8_0, H, v, L),), lambda m: m[0](context)
  out["attn_output"] = lambda: (lin(G.Q4_0, D, H * v),), lambda m: norm_linear(step, heads, None, m, None, x)
  if experts:
    def stack(kind:G, *shape:int): return random_weight(QuantizedExpertWeights, kind, experts, *shape)
    F, choice = shared * ffn, Routing(used, Gating.SIGMOID, True, 1.8)
    logits, hidden, beside = numbers(experts), numbers(used, ffn), numbers(F)
    sel = Tensor([[(7 * i) % experts for i in range(used)]], dtype=dtypes.int32).realize()
    kind = G.Q6_K if F % 256 == 0 else G.Q8_0
    out["gate_up shared|router"] = lambda: (lin(G.Q5_K, F, D), lin(G.Q5_K, F, D), lin(G.F32, experts, D)), lambda m: gate_up(step, x, norm_x, *m)
    out["gate_up experts"] = lambda: (stack(G.Q4_0, ffn, D), stack(G.Q4_0, ffn, D)), lambda m: expert_gate_up(step, x, norm_x, *m, logits, choice)
    out["expert_down"] = lambda: (stack(G.Q4_0, D, ffn), lin(kind, D, F)), lambda m: expert_down(step, hidden, m[0], sel, x, (beside, m[1]))
  else:
    hidden = numbers(ffn)
    out["gate_up"] = lambda: (lin(G.Q4_0, ffn, D), lin(G.Q4_0, ffn, D)), lambda m: gate_up(step, x, norm_x, *m)
    out["down"] = lambda: (lin(G.Q4_0, D, ffn),), lambda m: norm_linear(step, hidden, None, m, None, x)
  out["head"] = lambda: (lin(G.Q6_K, 102400, D),), lambda m: norm_linear(step, x, norm_x, m)
  def read(name:str, m:tuple) -> int: return weight_bytes(m) + ((depth + 1) * (L + R) * 2 if name == "attention" else 0)
  return {name: (make, run, read) for name, (make, run) in out.items()}

def chain(run:Callable, banks:list) -> Callable:
  """A JIT of a primitive on each bank in turn, all writing the same outputs"""
  kept:dict = {}
  def one_after_another(name, outs, ins, *rest, **more):
    mine = {n: kept.get((name, n), t) if n != "cache" else t for n, t in outs.items()}
    written = kernel.launch(name, mine, ins, *rest, **more)
    kept.update({(name, n): t for n, t in zip(outs, written)})
    return written
  @TinyJit
  def go():
    kept.clear()
    with contextlib.ExitStack() as stack:
      for module in (nn_norm_linear, mla_attention, moe, split_kv): stack.enter_context(mock.patch.object(module, "launch", one_after_another))
      for bank in banks: run(bank)
      return [t.realize() for t in kept.values()]
  go.cnt = 1
  return go

def timed(make:Callable, run:Callable, nbytes:Callable[[tuple], int], rounds:int) -> tuple[float, int]:
  """µs of a launch, the median of the rounds, and the bytes of what it reads. make: that"""
  size = nbytes(first := make())
  banks = [first] + [make() for _ in range(max(min(BANK // max(size, 1 << 20), 24), 4) - 1)]
  banks *= -(-CHAIN // len(banks))
  times = []
  with Context(JIT_BATCH_SIZE=0):
    go = chain(run, banks)
    for _ in range(3): go()
    for _ in range(rounds):
      Device[Device.DEFAULT].synchronize()
      start = time.perf_counter()
      for _ in range(5): go()
      Device[Device.DEFAULT].synchronize()
      times.append((time.perf_counter() - start) / 5 / len(banks))
  return statistics.median(times) * 1e6, size

def main() -> None:
  p = argparse.ArgumentParser(description="time the decode primitives")
  p.add_argument("--model", default="glm", choices=("glm", "ds2lite", "youtu", "kimi", "matrices"))
  p.add_argument("--only", default="")
  p.add_argument("--rounds", type=int, default=20)
  p.add_argument("--depth", type=int, default=512)
  args = p.parse_args()
  peak = peak_bandwidth()
  print(f"{Device.DEFAULT}: peak {peak[0] / 1e9:.0f} GB/s ({peak[1]})" if peak else Device.DEFAULT)
  result, reads = {}, {}
  def alone(size:int) -> float:
    """µs of reading so many bytes, of whole blocks"""
    words = size // 4 // READ_BLOCK * READ_BLOCK
    def make() -> Tensor: return Tensor.randint(words, low=0, high=2 ** 31 - 1, dtype=dtypes.int32).bitcast(dtypes.uint32).contiguous().realize()
    if words not in reads: reads[words] = timed(make, read_alone, lambda w: w.nbytes(), args.rounds)[0]
    return reads[words] * size / (words * 4)
  for name, (make, run, read) in (matrices() if args.model == "matrices" else cases(args.model, args.depth)).items():
    if args.only not in name: continue
    us, size = timed(make, run, functools.partial(read, name), args.rounds)
    floor, beside = size / peak[0] * 1e6 if peak else 0.0, ""
    result[name] = {"us": us, "bytes": size}
    if args.model == "matrices" and target_of(Device.DEFAULT) is not None:
      result[name]["read_us"] = alone(size)
      beside = f"   reading alone {alone(size):7.2f} us  {100 * alone(size) / us:5.1f} %"
    print(f"{name:29s} {size / 1e6:8.2f} MB  floor {floor:6.2f} us   {us:7.2f} us  {size / us / 1e3:7.1f} GB/s  {100 * floor / us:5.1f} %{beside}",
          flush=True)
  print(json.dumps({"model": args.model, "device": Device.DEFAULT, "depth": args.depth, "kernels": result}))

if __name__ == "__main__": main()

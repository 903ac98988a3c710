"""Micro-benchmark of the decode primitives: one launch at the shapes of a model, over a bank of weights larger than any cache.

  python test/external/bench_kernels.py [--model glm|ds2lite|youtu] [--only TEXT] [--rounds N] [--depth D]

Every launch of a chain writes the same outputs, so that the graph runs them one after another, as decoding does. Prints the bytes and the time at
the memory's peak first, then µs, GB/s and percent of it; the last line is JSON.
"""
from __future__ import annotations
import sys, pathlib
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import argparse, json, statistics, time
from typing import Callable
from gguf import GGMLQuantizationType as G
from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.helpers import Context
from tinygrad.apps.machine import peak_bandwidth
from tinygrad.apps.mla import RMSNorm
from tinygrad.apps.quantized import QuantizedExpertWeights, QuantizedLinear, block_size, split_planes
from tinygrad.apps.rope import Rope
from tinygrad.nn import matvec, mla_attention, moe, norm_linear, routing, split_kv

BANK = 256 << 20  # bytes of distinct weights a chain reads

def random_weight(cls:type, kind:G, *shape:int):
  """Random codes; every half is small and finite"""
  n, (elements, nbytes) = 1, block_size(kind)
  for s in shape: n *= s
  planes = split_planes(kind, shape, Tensor.empty(n // elements * nbytes, dtype=dtypes.uint8))
  def fill(p:Tensor) -> Tensor:
    if p.dtype in (dtypes.half, dtypes.float): return (Tensor.rand(*p.shape) * 0.01).cast(p.dtype).contiguous().realize()
    return Tensor.randint(*p.shape, low=0, high=255, dtype=dtypes.int32).cast(p.dtype).contiguous().realize()
  return cls(kind, shape, {name: fill(p) for name, p in planes.items()})

def cases(model:str, depth:int) -> dict[str, tuple[Callable, Callable]]:
  """{name: (make weights, run with them)}; the types are those of the public Q4_0 files"""
  D = 2048
  H, nope, v, ffn, experts, used, shared, q_lora = {"glm": (20, 192, 256, 1536, 64, 4, 1, 768), "ds2lite": (16, 128, 128, 1408, 64, 6, 2, 0),
                                                    "youtu": (16, 128, 128, 6144, 0, 0, 0, 1536)}[model]
  L, R = 512, 64
  def lin(kind:G, *shape:int): return random_weight(QuantizedLinear, kind, *shape)
  def x(n:int) -> Tensor: return Tensor.randn(1, n).contiguous().realize()
  def norm(n:int) -> RMSNorm: return RMSNorm(Tensor.ones(n).contiguous().realize(), 1e-5)
  pos, positions = Tensor([depth], dtype=dtypes.int32).realize(), max(depth + 64, 4096)
  rope = Rope(Tensor.rand(positions, R // 2, 2).contiguous().realize(), pos, nope + R, nope)
  hd, hq, hl, hv, hf = x(D), x(q_lora or D), x(H * (nope + R)), x(H * v), x(max(used, 1) * ffn)
  kv, lat = x(L + R), Tensor.randn(1, H, L).contiguous().realize()
  n_d, n_q, n_l = norm(D), norm(q_lora or D), norm(L)
  sel = Tensor([[(7 * i) % max(experts, 1) for i in range(max(used, 1))]], dtype=dtypes.int32).realize()
  logits = x(max(experts, 1))
  def cache() -> Tensor: return Tensor.randn(positions, L + R, dtype=dtypes.half).contiguous().realize()
  out:dict[str, tuple[Callable, Callable]] = {}
  if q_lora:
    out["q_a|kv_a"] = (lambda: (lin(G.Q4_0, q_lora, D), lin(G.Q8_0, L + R, D)), lambda m: norm_linear.norm_linear(hd, n_d, m))
    out["q_b+rope"] = (lambda: (lin(G.Q4_0, H * (nope + R), q_lora),), lambda m: norm_linear.norm_linear(hq, n_q, m, rope))
  else: out["q|kv_a+rope"] = (lambda: (lin(G.Q4_0, H * (nope + R), D), lin(G.Q8_0, L + R, D)), lambda m: norm_linear.norm_linear(hd, n_d, m, rope))
  out["k_b+cache"] = (lambda: (lin(G.Q8_0, H, L, nope), cache()), lambda m: norm_linear.latent_query(hl, kv, m[0], n_l, m[1], rope))
  t = target_of(Device.DEFAULT)
  tiles = split_kv.uses_tensor_cores(t, L, R)
  query = Tensor.randn(split_kv.padded(H) if tiles else H, L, dtype=dtypes.half if tiles else dtypes.float).contiguous().realize()
  out["attention"] = (lambda: (cache(),), lambda m: split_kv.split_kv(t, query, hl.reshape(H, -1), m[0], pos, 0.06))
  some = cache()
  sums = [Tensor.rand(split_kv.plan_splits(t, H, L, some)[0], H, n).contiguous().realize() for n in (L, 2)]
  out["combine"] = (lambda: (), lambda m: split_kv.mla_combine(t, *sums, some, pos))
  out["v_b"] = (lambda: (lin(G.Q8_0, H, v, L),), lambda m: m[0](lat))
  out["attn_output"] = (lambda: (lin(G.Q4_0, D, H * v),), lambda m: norm_linear.norm_linear(hv, None, m, residual=hd))
  if experts:
    def exp(kind:G, *shape:int): return random_weight(QuantizedExpertWeights, kind, experts, *shape)
    hs, F, choice = x(shared * ffn), shared * ffn, routing.Routing(used, routing.Gating.SIGMOID, True, 1.8)
    kind = G.Q6_K if F % 256 == 0 else G.Q8_0
    out["gate_up shared|router"] = (lambda: (lin(G.Q5_K, F, D), lin(G.Q5_K, F, D), lin(G.F32, experts, D)),
                                    lambda m: moe.gate_up(hd, n_d, m[:2], m[2]))
    out["gate_up experts"] = (lambda: (exp(G.Q4_0, ffn, D), exp(G.Q4_0, ffn, D)), lambda m: moe.expert_gate_up(hd, n_d, m, logits, choice))
    out["expert_down"] = (lambda: (exp(G.Q4_0, D, ffn), lin(kind, D, F)),
                          lambda m: moe.expert_down(hf.reshape(1, used, ffn), m[0], sel, hd, (hs, m[1])))
  else:
    out["gate_up"] = (lambda: (lin(G.Q4_0, ffn, D), lin(G.Q4_0, ffn, D)), lambda m: moe.gate_up(hd, n_d, m))
    out["down"] = (lambda: (lin(G.Q4_0, D, ffn),), lambda m: norm_linear.norm_linear(hf, None, m, residual=hd))
  out["head"] = (lambda: (lin(G.Q6_K, 102400, D),), lambda m: norm_linear.norm_linear(hd, n_d, m))
  def read(name:str, m:tuple) -> int:
    if name == "attention": return H * 0 + (depth + 1) * (L + R) * 2
    return sum(w.nbytes * used // experts if isinstance(w, QuantizedExpertWeights) else w.nbytes for w in m if not isinstance(w, Tensor))
  return {name: (make, run, read) for name, (make, run) in out.items()}

def chain(run:Callable, banks:list) -> Callable:
  """A JIT of one launch a bank, all writing the same outputs"""
  kept:dict = {}
  launch = matvec.launch
  def one_after_another(name, outs, ins, body, mem=None):
    mine = {n: kept.get((name, n), t) if n != "cache" else t for n, t in outs.items()}
    done = launch(name, mine, ins, body, mem)
    kept.update({(name, n): t for n, t in zip(outs, done)})
    return done
  @TinyJit
  def go():
    kept.clear()
    for m in (norm_linear, mla_attention, moe, sys.modules["tinygrad.apps.quantized"]): m.launch = one_after_another
    try:
      for bank in banks: run(bank)
      return [t.realize() for t in kept.values()]
    finally:
      for m in (norm_linear, mla_attention, moe, sys.modules["tinygrad.apps.quantized"]): m.launch = launch
  go.cnt = 1
  return go

def main() -> None:
  p = argparse.ArgumentParser(description="time the decode primitives")
  p.add_argument("--model", default="glm", choices=("glm", "ds2lite", "youtu"))
  p.add_argument("--only", default="")
  p.add_argument("--rounds", type=int, default=20)
  p.add_argument("--depth", type=int, default=512)
  args = p.parse_args()
  peak = peak_bandwidth()
  print(f"{Device.DEFAULT}: peak {peak[0] / 1e9:.0f} GB/s ({peak[1]})" if peak else Device.DEFAULT)
  result = {}
  for name, (make, run, read) in cases(args.model, args.depth).items():
    if args.only not in name: continue
    first = make()
    size = read(name, first)
    banks = [first] + [make() for _ in range(max(min(BANK // max(size, 1 << 20), 24), 4) - 1)]
    with Context(JIT_BATCH_SIZE=0):
      go = chain(run, banks)
      for _ in range(3): go()
      times = []
      for _ in range(args.rounds):
        Device[Device.DEFAULT].synchronize()
        start = time.perf_counter()
        for _ in range(5): go()
        Device[Device.DEFAULT].synchronize()
        times.append((time.perf_counter() - start) / 5 / len(banks))
    us = statistics.median(times) * 1e6
    floor = size / peak[0] * 1e6 if peak else 0.0
    print(f"{name:18s} {size / 1e6:8.2f} MB  floor {floor:6.2f} us   {us:7.2f} us  {size / us / 1e3:7.1f} GB/s  {100 * floor / us:5.1f} %",
          flush=True)
    result[name] = {"us": us, "bytes": size}
    del banks, first, go
  print(json.dumps({"model": args.model, "device": Device.DEFAULT, "depth": args.depth, "kernels": result}))

if __name__ == "__main__": main()

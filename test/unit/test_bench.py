"""The benchmark scripts: what they read, count and print, and how they refuse. No timing is judged."""
import json, math, re, subprocess, sys
from pathlib import Path
import pytest
from gguf.quants import dequantize
from extra.bench import count_kernels, head_bytes, of_block, random_weights, read_bytes, render_kernels, stand_in, with_blocks
from extra.mkgguf import MODELS, write_model
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.mla import Config, Transformer

ROOT = Path(__file__).resolve().parents[2]
TINY = "models/tiny-glm-Q4_0.gguf"

def run(*args: object, code: int = 0) -> subprocess.CompletedProcess:
  done = subprocess.run([sys.executable, *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=240)
  assert done.returncode == code, done.stdout + done.stderr
  return done

def last(out: str) -> dict: return json.loads(out.splitlines()[-1])

# *** models without a file ***

@pytest.mark.parametrize("quant", ["Q4_0", "Q4_K_M"])
@pytest.mark.parametrize("name", ["small-glm", "small-v3", "small-ds", "small-youtu"])
def test_stand_in_is_the_file(name: str, quant: str, tmp_path: Path):
  path, = write_model(tmp_path / "m.gguf", name, quant)
  made, file = stand_in(name, quant), read_gguf(path)
  assert Config.from_gguf(made) == Config.from_gguf(file)
  listed = [[(t.name, t.shape, t.type, t.data.nbytes) for t in f.tensors.values()] for f in (made, file)]
  assert listed[0] == listed[1]

def test_with_blocks():
  f = stand_in("glm")
  some = with_blocks(f, [0, 0, 3, 9, 46])
  before, after = Config.from_gguf(f), Config.from_gguf(some)
  assert (after.n_blocks, after.n_dense, after.gating) == (5, 2, before.gating)
  kinds = [of_block(f, i)["ffn_down_exps.weight"].type.name for i in (3, 9)]
  assert [of_block(some, i)["ffn_down_exps.weight"].type.name for i in (2, 3)] == kinds == ["Q4_1", "Q4_0"]
  assert len(some.tensors) == 3 + sum(len(of_block(f, i)) for i in (0, 0, 3, 9, 46)) and all(name == t.name for name, t in some.tensors.items())
  # a file without the key, whose gating goes by the number of its blocks
  del f.kv["deepseek2.expert_gating_func"]
  assert Config.from_gguf(with_blocks(f, [1])).gating == before.gating

@pytest.mark.parametrize("quant", ["Q4_0", "Q4_K_M", "F16"])
def test_random_weights(quant: str):
  f = with_blocks(stand_in("small-glm", quant), [0, 3])
  for t in random_weights(list(f.tensors.values())):
    was = f.tensors[t.name]
    assert (t.shape, t.type, t.data.nbytes) == (was.shape, was.type, was.data.nbytes)
    values = dequantize(t.data, t.type)
    if t.name.endswith("norm.weight"): assert abs(values.mean() - 1) < 0.1
    elif t.name != "token_embd.weight" and values.size >= 4096: assert values.std() * math.sqrt(t.shape[-1]) == pytest.approx(1, rel=0.15), t.name

@pytest.mark.parametrize("name", ["small-glm", "small-youtu"])
def test_bytes_a_token(name: str):
  f = stand_in(name)
  c, model = Config.from_gguf(f), Transformer.from_gguf(f, 32)
  total = sum(read_bytes(f, c, i) for i in range(c.n_blocks)) + head_bytes(f, c)
  assert total == pytest.approx(model.weight_bytes_a_step(), rel=0.02)  # which leaves out the norms
  for i in range(c.n_blocks): assert read_bytes(f, c, i) == read_bytes(f, c, i, "attn") + read_bytes(f, c, i, "ffn")
  if c.n_experts: assert 0 < read_bytes(f, c, 3) < 0.5 * sum(t.data.nbytes for t in of_block(f, 3).values())

def test_bytes_of_glm():
  """The figures that the model's public file is known by"""
  f = stand_in("glm")
  c = Config.from_gguf(f)
  assert f.total_bytes == pytest.approx(17.2e9, rel=0.01)
  assert head_bytes(f, c) == pytest.approx(260e6, rel=0.01)
  assert head_bytes(f, c) + sum(read_bytes(f, c, i) for i in range(c.n_blocks)) == pytest.approx(2.3e9, rel=0.03)

# *** bench_block.py ***

def test_bench_block(tmp_path: Path):
  """A bank of every block there is, F16 so that all of a kind are alike: its parts make up the decode graph"""
  out = run("bench_block.py", 2, "--model", "small-glm", "--quant", "F16", "--blocks", 3, "--depth", 5, "--json", tmp_path / "r.json").stdout
  r = last(out)
  assert json.loads((tmp_path / "r.json").read_text()) == r
  assert out.index("ceiling") < out.index("median us") < out.index("proxy")
  assert (r["depth"], r["blocks"], r["bank"]) == (5, {"dense": 1, "MoE": 3}, {"dense": [0, 0, 0], "MoE": [1, 2, 3]})
  parts = r["parts"]
  assert list(parts) == [f"{kind} {part}" for kind in ("dense", "MoE") for part in ("block", "attention", "feed-forward")] + ["head"]
  for p in parts.values(): assert p["rounds"] == 2 and 0 < p["p10_us"] <= p["median_us"] <= p["p90_us"] and p["kernels"] >= 1
  for kind in ("dense", "MoE"):
    assert parts[f"{kind} block"]["bytes"] == parts[f"{kind} attention"]["bytes"] + parts[f"{kind} feed-forward"]["bytes"]
  assert r["step_us"] == pytest.approx(sum(n * parts[p]["median_us"] for n, p in ((1, "dense block"), (3, "MoE block"), (1, "head"))))
  assert r["tok_s"] == pytest.approx(1e6 / r["step_us"])
  f = stand_in("small-glm", "F16")
  c = Config.from_gguf(f)
  assert r["kernels_a_step"] == count_kernels(f, r["device"])[0]          # the parts run make up the decode graph as it is scheduled
  assert r["step_bytes"] - head_bytes(f, c) - sum(read_bytes(f, c, i) for i in range(4)) in (4 * 5 * c.cache_dim * n for n in (2, 4))

def test_bench_block_of_many_sequences():
  r = last(run("bench_block.py", 1, "--model", "small-glm", "--quant", "F16", "--blocks", 1, "--depth", 5, "--parallel", 4).stdout)
  f = stand_in("small-glm", "F16")
  c = Config.from_gguf(f)
  assert r["parallel"] == 4 and r["tok_s"] == pytest.approx(4e6 / r["step_us"])
  assert r["kernels_a_step"] >= count_kernels(f, r["device"], parallel=4)[0]   # what all blocks share, a bank has once
  weights = head_bytes(f, c, 4) + sum(read_bytes(f, c, i, tokens=4) for i in range(4))
  assert r["step_bytes"] - weights in (4 * 4 * 5 * c.cache_dim * n for n in (2, 4))
  once = head_bytes(f, c) + sum(read_bytes(f, c, i) for i in range(4))
  assert once < weights < 4 * once and read_bytes(f, c, 0, tokens=4) == read_bytes(f, c, 0)   # a dense block is read once for all

def test_bench_block_takes_a_file():
  r = last(run("bench_block.py", 1, "--model", TINY, "--blocks", 1).stdout)
  f = read_gguf(ROOT / TINY)
  c = Config.from_gguf(f)
  assert r["blocks"] == {"dense": c.n_dense, "MoE": c.n_blocks - c.n_dense} and r["tok_s"] > 0
  assert r["step_bytes"] == head_bytes(f, c) + sum(read_bytes(f, c, i) for i in range(c.n_blocks))

def test_count():
  out = run("bench_block.py", "--count", "--target", "METAL", "--model", "small-youtu", "--depth", 100).stdout
  r, f = last(out), stand_in("small-youtu")
  c = Config.from_gguf(f)
  assert (r["target"], r["depth"]) == ("METAL", 100)
  (name, m), = r["models"].items()
  assert m["step_bytes"] == sum(read_bytes(f, c, i) + 100 * c.cache_dim * 2 for i in range(c.n_blocks)) + head_bytes(f, c)
  assert name == "small-youtu Q4_0" and sum(n for n, _ in m["kinds"]) == MODELS["small-youtu"].blocks and f"{m['kernels_a_step']} = " in out

def test_count_of_several_steps():
  out = run("bench_block.py", "--target", "METAL", "--model", "small-youtu", "--parallel", "1,4").stdout
  (one,), (four,) = (step["models"].values() for step in last(out)["steps"])
  assert [step["parallel"] for step in last(out)["steps"]] == [1, 4] and out.count("estimate, not a measurement") == 2
  for n, step in ((1, one), (4, four)):
    machines = [m for m in step["estimate"].values() if isinstance(m, dict)]
    assert machines and all(m["tok_s"] == pytest.approx(n * 1e3 / m["step_ms"]) for m in machines)

@pytest.mark.parametrize("target,item,parts", [("METAL", 2, ("mla_split_kv", "mla_combine")), ("CUDA", 2, ("mla_split_kv", "combine_mul_mat")),
                                               ("CPU", 4, ("mla_attention",))])
def test_count_at_a_depth(target: str, item: int, parts: tuple[str, ...]):
  """Attention's kernels move what is written of the cache, however much it could hold"""
  f, depths = with_blocks(stand_in("small-glm"), [0]), (0, 100, 4095)
  c, at = Config.from_gguf(f), [{k.name: k.read for k in render_kernels(f, target, depth=depth)} for depth in depths]
  for part in parts:
    name, = (n for n in at[0] if n.startswith(part))
    moved = [kernels[name] for kernels in at]
    if part == "combine_mul_mat": assert 0 < moved[1] - moved[0] <= (moved[2] - moved[1]) // 8   # beside v_b, which is read always
    elif part == "mla_combine": assert 0 < moved[0] <= moved[1] // 2 < moved[2] // 2  # a few splits, then all of them
    else: assert moved == [(depth + 1) * c.cache_dim * item for depth in depths]
  others = [{n: read for n, read in kernels.items() if not n.startswith(("mla_", "combine_"))} for kernels in at]
  assert others[0] == others[1] == others[2]

def test_generic():
  """Without the fork's kernels, said once on either stream; a variable of the graph holds the position"""
  done = run("bench_block.py", "--generic", "--target", "CUDA", "--model", "small-youtu")
  r = last(done.stdout)
  assert r["generic"] and done.stdout.count("the fork's kernels are off") == 1 and done.stderr.count("plain ops") == 1
  (m,), ours = r["models"].values(), count_kernels(stand_in("small-youtu"), "CUDA")[0]
  assert m["kernels_a_step"] > ours and not any(k["name"].startswith(("norm_linear", "gate_up")) for k in m["kernels"])

# *** profile_model.py ***

def test_profile_model(tmp_path: Path):
  out = run("profile_model.py", TINY, 3, "--with-source", "--json", tmp_path / "p.json").stdout
  p = last(out)
  assert json.loads((tmp_path / "p.json").read_text()) == p
  kernels = p["kernels"]
  f = read_gguf(ROOT / TINY)
  c = Config.from_gguf(f)
  assert sum(k["count"] for k in kernels) == p["launches"] == count_kernels(f, p["device"])[0]
  assert sum(k["share"] for k in kernels) == pytest.approx(1) and sum(k["sum_us"] for k in kernels) == pytest.approx(p["alone_ms"] * 1e3)
  assert [k["sum_us"] for k in kernels] == sorted((k["sum_us"] for k in kernels), reverse=True)
  for k in kernels:
    assert k["bytes"] > 0 and k["gb_s"] == pytest.approx(k["bytes"] / k["us"] / 1e3, rel=0.3) and re.match(r"[\w ]+\[\d+\]", k["buffers"])
  assert out.count("\n---- ") == len(kernels) == len(re.findall(r"^(?:WIDE )?void ", out, re.M))
  # every weight is read, and not many times over; attention reads what is written of the cache: the first token's place, 3 timed, 2 before them
  weights = head_bytes(f, c) + sum(read_bytes(f, c, i) for i in range(c.n_blocks))
  assert weights < sum(k["bytes"] * k["count"] for k in kernels) < 2 * weights
  attention = [k for k in kernels if k["kernel"].startswith(("mla_attention", "mla_split_kv"))]
  assert sum(k["count"] for k in attention) == c.n_blocks and all(k["bytes"] in (5 * c.cache_dim * n for n in (2, 4)) for k in attention)

# *** one line, exit code 2 ***

@pytest.mark.parametrize("script,args,expect", [
  ("bench_block.py", ("--model", "nothing"), "neither a file nor a name"),
  ("bench_block.py", ("--model", "nothing.gguf"), "nothing.gguf"),
  ("bench_block.py", ("--model", "README-is-no-model.gguf", "--count"), "README-is-no-model.gguf"),
  ("bench_block.py", ("0",), "whole number of at least 1"),
  ("bench_block.py", ("--target", "TPU"), "invalid choice: 'TPU'"),
  ("bench_block.py", ("--parallel", "1,,4"), "expected 1, 2, 4, 8, 16, 32, 64, or several of them with commas, found '1,,4'"),
  ("bench_block.py", ("--parallel", "3"), "found '3'"),
  ("bench_block.py", ("--json", "no/such/folder/x.json"), "no/such/folder/x.json: No such file or directory"),
  ("bench_block.py", ("--model", "small-glm", "--depth", "999999999"), "expected at most"),
  ("bench_block.py", ("--target", "METAL", "--depth", "999999999"), "expected at most"),
  ("profile_model.py", ("nothing.gguf",), "nothing.gguf"),
  ("profile_model.py", (TINY, "x"), "whole number of at least 1"),
  ("profile_model.py", (TINY, "9", "--depth", "999999999"), "expected at most"),
  ("profile_model.py", (), "required: MODEL"),
])
def test_refusals(script: str, args: tuple, expect: str):
  done = run(script, *args, code=2)
  assert expect in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr

@pytest.mark.parametrize("script", ["bench_block.py", "profile_model.py"])
def test_stock_tinygrad_is_refused(script: str, tmp_path: Path):
  """A tinygrad without the overlay, found first"""
  (tmp_path / "tinygrad.py").write_text("")
  code = f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); runpy.run_path({script!r}, run_name='__main__')"
  done = run("-c", code, code=1)
  assert "this measures the fork" in done.stderr and done.stderr.count("\n") == 1

@pytest.mark.parametrize("script,flags", [
  ("bench_block.py", ("--model", "--quant", "--depth", "--parallel", "--blocks", "--count", "--target", "--json")),
  ("profile_model.py", ("--depth", "--with-source", "--json"))])
def test_help(script: str, flags: tuple[str, ...]):
  text = run(script, "--help").stdout
  for flag in flags: assert re.search(rf"^  {flag}\b.*\n?.*[a-z]", text, re.M)

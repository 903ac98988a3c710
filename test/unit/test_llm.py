"""The command line as a person meets it: a process, its output, its exit code. And `load`, the door from Python."""
from __future__ import annotations
import io, json, math, os, re, subprocess, time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator
import numpy as np, pytest
from gguf import GGMLQuantizationType as T
from on_terminal import CTRL_C, CTRL_D, LLM, Terminal, environ, plain
from talker import Talker
from extra.mkgguf import write_model
from tinygrad.apps import llm, models
from tinygrad.apps.engine.engine import ContextFull
from tinygrad.apps.gguf import GGUFError, GGUFFile, read_gguf
from tinygrad.apps.mla import sizes_of
from tinygrad.apps.models import ALIASES, BUILT_IN, MODELS, ROOT, Model, UserError, advised_sampling, find_model, load
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.shard import Placement
from tinygrad.apps.tokenizer import Tokenizer

PROMPT = "the quick brown fox"
DRAW = Sampling(1.0, 20, .9, .01, 1.1, 7)
DRAW_FLAGS = ["--temperature", "1", "--top_k", "20", "--top_p", ".9", "--min_p", ".01", "--repeat-penalty", "1.1"]

def run(*args:str|Path, cwd:Path|None=None, **env:str) -> subprocess.CompletedProcess[str]:
  return subprocess.run([*LLM, *map(str, args)], cwd=cwd, env=environ(env), stdin=subprocess.DEVNULL, capture_output=True, text=True)

def refused(*args:str|Path, cwd:Path|None=None, **env:str) -> str:
  """The one line that a refusal is, exit code 2."""
  p = run(*args, cwd=cwd, **env)
  assert p.returncode == 2 and p.stderr.count("\n") == 1 and "Traceback" not in p.stderr, p
  return p.stderr.strip()

def write_small(path:Path) -> Path:
  """One dense block, a context of 4096 tokens, every byte in the vocabulary"""
  write_model(path, "small-glm", "Q4_0", seed=3, blocks=1, vocab=4096, dim=128, heads=2, kv_lora=64, q_lora=64, nope=32, v=32, ff=128)
  return path

@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path: return write_small(tmp_path_factory.mktemp("llm") / "small.gguf")
@pytest.fixture(scope="module")
def model(small) -> Model: return load(small, max_context=64)

# ---- names and files ----

def test_list_models(tmp_path):
  (tmp_path / "models").mkdir()
  (tmp_path / "models/Youtu-LLM-2B.q4_0.gguf").write_bytes(bytes(10**8))
  cached = tmp_path / "hub/models--unsloth--GLM-4.7-Flash-GGUF/snapshots/0/GLM-4.7-Flash-Q6_K.gguf"
  for path, text in ((cached, "x"), (cached.parents[2] / "refs/main", "0")):
    path.parent.mkdir(parents=True)
    path.write_text(text)
  p = run("--list-models", cwd=tmp_path, HF_HUB_CACHE=str(tmp_path / "hub"))
  assert p.returncode == 0 and len(p.stdout.splitlines()) == len(MODELS) + 1
  here = {"Youtu-LLM-2B.q4_0.gguf": (.1, "models/Youtu-LLM-2B.q4_0.gguf"), cached.name: (0, cached)}
  for name, (repo, file, gb) in MODELS.items():
    size, where = here.get(file, (gb, "not here"))
    assert f"{name} " in p.stdout and f"{size:.1f} GB  {repo}/{file}  {where}" in p.stdout
  for alias in ALIASES: assert f"= {alias}" in p.stdout

def test_list_models_to_a_reader_that_leaves():
  read, write = os.pipe()
  os.close(read)
  p = subprocess.run([*LLM, "--list-models"], stdout=write, stderr=subprocess.PIPE, text=True, env=environ({}))
  os.close(write)
  assert p.returncode == 1 and p.stderr == ""

def test_names_and_aliases_find_local_files(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "models").mkdir()
  for name, (_, file, _) in MODELS.items():
    (tmp_path / "models" / file).touch()
    for known in (name, *(a for a, target in ALIASES.items() if target == name)): assert find_model(known).resolve() == tmp_path / "models" / file
  (tmp_path / "models/other.bin").touch()
  assert find_model("models/other.bin") == Path("models/other.bin") and find_model("missing.gguf") == Path("missing.gguf")

def test_streams_that_are_closed_or_full(small):
  def shell(redirect:str, *args:str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", f'exec "$@" {redirect}', "sh", *LLM, *args], capture_output=True, text=True, env=environ({}))
  for redirect, code, line in ((">&-", 2, "error: stdout is closed: there is nowhere to write an answer\n"),
                               (">/dev/full", 1, "error: stdout: No space left on device\n"), ("2>&-", 0, ""), ("<&-", 0, "")):
    p = shell(redirect, "--list-models")
    assert (p.returncode, p.stderr) == (code, line), p
  p = shell("<&-")
  assert p.returncode == 2 and p.stderr == "error: stdin is closed: expected a conversation on it, or --prompt or --file\n"

def test_no_network_is_one_line_with_url_and_place(tmp_path):
  start = time.monotonic()
  line = refused("--model", "glm-4.7:flash-unsloth-Q4_0", "--benchmark", "10", cwd=tmp_path)
  assert "https://huggingface.co/unsloth/GLM-4.7-Flash-GGUF/resolve/main/GLM-4.7-Flash-Q4_0.gguf" in line
  assert str(ROOT / "models/GLM-4.7-Flash-Q4_0.gguf") in line
  assert time.monotonic() - start < 10

def test_bad_files(tmp_path):
  (bad := tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
  assert refused("--model", bad).startswith(f"GGUFError: {bad}: ")
  assert refused("--model", tmp_path) == f"GGUFError: {tmp_path}: expected a GGUF file, found a directory"
  assert refused("--model", tmp_path / "none.gguf").startswith(f"GGUFError: {tmp_path / 'none.gguf'}: cannot be read: ")
  assert "neither a file nor a name" in refused("--model", "glm-5")
  with pytest.raises(UserError): load("glm-5")
  with pytest.raises(GGUFError): load(bad)

# ---- flags ----

@pytest.mark.parametrize("flags, found", [
  ("--count 0", "--count"), ("--count x", "--count"), ("--max_context 1", "--max_context"), ("--benchmark x", "--benchmark"),
  ("--depth -1", "--depth"), ("--depth 3", "--benchmark"), ("--json", "--benchmark"), ("--benchmark 3 --json /no/such/folder", "/no/such/folder"),
  ("--prompt", "--prompt"), ("--raw-prompt", "--raw_prompt"), ("--what", "--what"), ("--mod x", "--mod"), ("--temperature nan", "temperature"),
  ("--temperature -1", "temperature"), ("--temperature inf", "temperature"), ("--top_p 0", "top_p"), ("--top_p nan", "top_p"),
  ("--top_k -1", "top_k"), ("--top_k 1.5", "--top_k"),
  ("-n 0", "--count"), ("-n -2", "--count"), ("-c 1", "--max_context"), ("--benchmark 0", "--benchmark"),
  ("-p x -f y", "--prompt and --file"), ("-p x --raw-prompt y", "--prompt and --raw_prompt"), ("-f /no/such", "/no/such"), ("-f /", "--file /"),
  ("-p x --special", "--raw_prompt"), ("--raw-prompt x -sys y", "--system"),
  ("--perplexity /dev/zero", "regular file"), ("-f /dev/zero", "at most 16 MB"),
  *((f"--max-stall-ms {ms}", "--max-stall-ms: expected milliseconds, more than 0, found") for ms in ("0", "-5", "x", "nan", "inf")),
  ("--warm 5", "5"), ("--min_p 2", "min_p"), ("--devices 0", "--devices"), ("--cpu-experts -1", "--cpu-experts"),
  ("--shard rows", "--shard"), ("--repeat_penalty nan", "repeat_penalty"), ("--seed -2", "seed"),
  ("--perplexity /no/such/file", "/no/such/file"), ("--perplexity /", "--perplexity /"), ("--benchmark 3 --perplexity x", "--perplexity")])
def test_bad_flags(flags, found, capsys):
  with pytest.raises((SystemExit, UserError, ValueError)) as e: llm.main(flags.split())
  line = capsys.readouterr().err.strip() if e.type is SystemExit else str(e.value)
  assert found in line and "\n" not in line
  if e.type is SystemExit: assert e.value.code == 2

def test_bad_flags_end_a_process_in_one_line():
  assert refused("--temperature", "nan") == "error: temperature: expected 0, or from 1e-30 to 10000, found nan"
  assert "argument -n/--count: expected a whole number of at least 1, or -1, found '0'" in refused("--count", "0")

def test_every_flag_has_a_help_line():
  for bench in (False, True):
    lines = (p := llm.parser(bench)).format_help()
    for action in p._actions: assert action.help and all(o in lines for o in action.option_strings)

def test_short_flags_are_llama_cpps():
  args = llm.parser().parse_args(["-m", "x", "-p", "y", "-n", "-1", "-c", "0", "-s", "-1", "-sys", "z", "-r", "a", "-sp", "--temp", ".5"])
  assert (args.model, args.prompt, args.count, args.max_context, args.seed) == ("x", "y", -1, 0, -1)
  assert (args.system, args.stop, args.special, args.temperature) == ("z", ["a"], True, .5)
  # beside --benchmark they are llama-bench's lists
  ours = [a for a in llm.parser(bench=True)._actions if a.dest in ("prompt", "count", "stop")]
  assert not {"-p", "-n", "-d", "-r"} & {o for a in ours for o in a.option_strings}

def test_a_near_miss_of_a_name():
  assert "did you mean glm-4.7:flash" in refused("--model", "GLM4.7-flash")
  nears = {"youtu-llm-2b": "youtu-llm:2b", "deepseek-v2-lite-q4": "deepseek-v2-lite", "glm-4.7:flash-Q4_KM": "glm-4.7:flash-Q4_K_M"}
  for name, near in nears.items():
    with pytest.raises(UserError, match=f"did you mean .*{near}"): find_model(name)
  with pytest.raises(UserError, match="shows$"): find_model("qwen")

def test_devices_that_cannot_be_used(small, tmp_path):
  assert "cannot open the device" in refused("--model", small, "--prompt", "x", DEV="NONE")
  assert "expected 'no-such-compiler' on the PATH" in refused("--model", small, "--prompt", "x", DEV="CPU", CC="no-such-compiler")

# ---- what flags ask for: a model whose words are known ----

@pytest.fixture
def talker(monkeypatch) -> Talker:
  t = Talker()
  monkeypatch.setattr(llm, "load", lambda *_, **__: t)
  return t

def test_prompts(talker, capsys, tmp_path, monkeypatch):
  (file := tmp_path / "x.txt").write_text("a\nb\n")
  monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from stdin\n")))
  for flags in (["-p", "a<think>"], ["-f", str(file), "-sys", "S"], ["-f", "-", "--no-think"], ["--raw-prompt", "<think>q"],
                ["--raw-prompt", "-f", str(file), "--special"], ["-p", "<think>q", "--raw-prompt", "--special"]):
    assert llm.main(flags) is None
  assert talker.prompts == ["<|user|>a<think><|assistant|><think>", "<|system|>S<|user|>a\nb<|assistant|><think>",
                            "<|user|>from stdin<|assistant|></think>", "<think>q", "a\nb", "<think>q"]
  out = capsys.readouterr().out
  assert out.startswith("thought on and on </think>heard") and "<think>qheard 8 characters" in out and "a\nbheard 3 characters" in out
  assert talker.lengths[3:] == [8, 3, 2]  # the name of a special token is text, or the token

def test_a_thought_that_is_hidden(talker, capsys):
  llm.main(["-p", "a", "--hide-think", "-s", "3"])
  assert capsys.readouterr() == ("heard 1 characters, 1 lines, 1 turns, seed 3\n", "")

def test_sampling_is_the_models_own_but_for_what_is_given(talker, capsys):
  talker.sampling = Sampling(.7, 20, .95)
  seeds = set()
  for flags, expected in (([], "temperature 0.7, top_k 20, top_p 0.95, seed "), (["--seed", "-1"], "temperature 0.7, top_k 20, top_p 0.95, seed "),
                          (["--top-p", "1", "--temp", "1", "-s", "5"], "temperature 1, top_k 20, seed 5]"), (["--temperature", "0"], "greedy]")):
    llm.main(["-p", "a", "--stats", "--hide-think", *flags])
    out, err = capsys.readouterr()
    assert expected in err and err.count("\n") == 1
    seeds.add(out.split()[-1])
  assert len(seeds) == 4 and "5" in seeds  # drawn each time

def test_the_target_the_cache_and_warming(talker, capsys, monkeypatch):
  """The target's flag is in milliseconds. What is recorded is for answers drawn as the run's are, and is there before the first"""
  loaded, warmed = [], []
  monkeypatch.setattr(llm, "load", lambda *args: (loaded.append(args), talker)[1])
  talker.scheduler, talker.runner = SimpleNamespace(max_rows=8), SimpleNamespace(sizes=(32, 64))
  talker.warm = lambda sampling: warmed.append((sampling, len(talker.prompts)))
  llm.main(["-p", "a", "--hide-think"])
  assert loaded.pop()[4:] == (.05, 16, 0, None, 1, 0, "layers", False) and not warmed and capsys.readouterr().err == ""
  llm.main(["-p", "a", "--hide-think", "--max-stall-ms", "12.5", "--cache-bits", "8", "--draft-ngram", "4", "--warm", "--temp", "0.5", "-s", "3"])
  out, err = capsys.readouterr()
  assert loaded.pop()[4:8] == (.0125, 8, 4, None) and warmed == [(Sampling(.5, seed=3), 1)] and "heard" in out
  assert re.fullmatch(r"steps of 1 to 8 answers and chunks of 32, 64 tokens recorded in 0\.\d s\n", err)

def test_a_target_from_python(small):
  assert load(small, 64, max_stall=.02).engine.max_stall == .02
  for wrong in (0, -1, float("nan"), True, "1"):
    with pytest.raises(ValueError, match="^max_stall: expected seconds, more than 0, found "): load(small, 64, max_stall=wrong)

def test_a_stopped_prompt_ends_with_130(talker, capsys, monkeypatch):
  def stopped(*_):
    yield ord("x")
    raise KeyboardInterrupt
  monkeypatch.setattr(talker, "stream", stopped)
  assert llm.main(["-p", "a"]) == 130 and capsys.readouterr().err == "[stopped]\n"

def test_what_a_models_makers_advise():
  def advised(pre:str, n_vocab:int, **keys) -> Sampling:
    f = GGUFFile(Path("x.gguf"), {f"general.sampling.{k}": v for k, v in keys.items()}, {})
    return advised_sampling(f, SimpleNamespace(pre=pre, n_vocab=n_vocab))
  assert advised("glm4", 154880) == Sampling(1.0, top_p=.95) and advised("glm4", 2048) == Sampling() == advised("qwen2", 151936)
  assert advised("youtu", 128256, temp=.5, top_k=-1) == Sampling(.5, 0, .95, repeat_penalty=1.05)
  assert advised("x", 9, temp=1, top_k=40, top_p=.9, min_p=.05, penalty_repeat=1.1) == Sampling(1.0, 40, .9, .05, 1.1)
  for keys, found in (({"temp": float("nan")}, "key general.sampling.temp: expected 0.* found nan"), ({"top_p": 2.0}, "top_p: expected .* found 2.0"),
                      ({"penalty_repeat": 0.0}, "penalty_repeat: expected .* found 0.0"), ({"top_k": 1.5}, "top_k: expected int"),
                      ({"min_p": "x"}, "float")):
    with pytest.raises(GGUFError, match=found): advised("glm4", 154880, **keys)
  f = read_gguf(BUILT_IN)
  assert advised_sampling(f, Tokenizer.from_gguf(f)) == Sampling()

# ---- answers ----

def test_the_built_in_model_answers():
  p = run("--prompt", "What is a list?", "--count", "40")
  assert p.returncode == 0 and p.stderr == "" and "list" in p.stdout and "sequence" in p.stdout
  assert BUILT_IN.stat().st_size < 7e6

def test_several_devices_and_experts_on_the_cpu(capsys):
  """The same text; the benchmark says where it ran, and that one device's speed is the ceiling"""
  texts = []
  for flags in ([], ["--devices", "2"], ["--cpu-experts", "3"]):
    llm.main(["--prompt", "What is a list?", "--count", "12", "--temperature", "0", *flags])
    texts.append(capsys.readouterr().out)
  assert texts[0].strip() and texts[1:] == texts[:1] * 2
  llm.main(["--benchmark", "2", "--devices", "2"])
  said = capsys.readouterr().out
  assert "device    CPU, CPU:1\n" in said and "of one device, 2 work in turn" in said

def test_devices_and_experts_that_there_are_not(monkeypatch):
  def refused(error: type[Exception], message: str, **asked: Any) -> None:
    with pytest.raises(error, match=message): load(BUILT_IN, **asked)
  refused(UserError, "^tiny-glm-Q4_0.gguf: expected at most 7 devices, as many as the model has blocks, found 8$", devices=8)
  refused(UserError, "expected at most 6 blocks of experts on the CPU, as many as the model has, found 7$", cpu_experts=7)
  for wrong in (0, -1, True, 1.5): refused(ValueError, "devices: expected a whole number of 1 or more", devices=wrong)
  monkeypatch.setattr(models, "devices_here", lambda: 2)
  refused(UserError, "^--devices 3: this machine has 2 CPU devices, found none that is CPU:2$", devices=3)

def test_what_does_not_fit(monkeypatch, capsys):
  """It is said before anything is loaded, with what would fit: more devices, these here first, experts on the CPU, fewer tokens"""
  f, free = read_gguf(BUILT_IN), {"CUDA": 5 << 20, "CPU": 1 << 30}
  sizes = sizes_of(f, 16)
  monkeypatch.setattr(models, "room_for_weights", lambda device: free[device.split(":")[0]])
  monkeypatch.setattr(models, "devices_here", lambda: 2)
  found: list[Placement] = []
  def place(card: int, tokens: int = 64, experts: int = 0) -> str:
    free["CUDA"] = card
    try: found.append(models.place_model(f, sizes, ("CUDA",), experts, tokens, "--max_context"))
    except UserError as e: return str(e)
    return ", ".join(found[-1].devices)
  whole = sum(sizes.blocks) + sum(sizes.experts) + sizes.home + sizes.largest
  rows = (64 + sizes.spare) * sizes.row * len(sizes.blocks)
  assert place(whole + rows) == "CUDA"
  assert place(whole + rows - 1).endswith("more while it is loaded: --max_context 63 or --devices 2 would fit")
  least = sum(sizes.blocks) + sizes.home + sizes.largest + rows   # all experts are elsewhere
  assert place(least).endswith("more while it is loaded: --devices 2 would fit")
  monkeypatch.setattr(models, "devices_here", lambda: 1)
  assert place(least).endswith("more while it is loaded: --cpu_experts 6 would fit") and place(least, experts=6) == "CUDA, CPU"
  assert not found[-1].brings
  assert capsys.readouterr().err == "CUDA has no room for copies of a block's experts, 1.0 MB: long prompts wait for the CPU, too\n"
  assert place(least - sizes.largest + 2 * max(sizes.experts), experts=6) == "CUDA, CPU" and found[-1].brings and not capsys.readouterr().err
  free["CPU"] = 0
  assert place(least).endswith("more while it is loaded: 2 such devices would fit")
  assert place(10).endswith("more while it is loaded: no way to place it here fits")
  monkeypatch.setattr(models, "room_for_weights", lambda device: 1 << 20)
  with pytest.raises(UserError) as e: load(BUILT_IN)
  assert str(e.value) == ("tiny-glm-Q4_0.gguf: CPU has 1.0 MB free, and is to hold 5.7 MB of weights, 12.0 MB of the cache: "
                          "no way to place it here fits")

def test_sizes_are_those_held(tmp_path: Path):
  """Not the file's, whose weights take fewer bits"""
  f = read_gguf(write_model(tmp_path / "m.gguf", "small-glm-wide", "IQ1_M", blocks=2, experts=4, vocab=320)[0])
  sizes, held = sizes_of(f, 16), sum(math.prod(t.shape) * (13 / 32 if t.type is T.IQ1_M else 4) for t in f.tensors.values())
  assert sum(sizes.blocks) + sum(sizes.experts) + sizes.home == held > 1.5 * f.total_bytes

def test_drawing_is_reproducible_and_max_context_is_clamped(small, model):
  p = run("--model", small, "--raw-prompt", PROMPT, "--count", "12", "--seed", "7", *DRAW_FLAGS, "--max_context", "99999")
  assert p.returncode == 0 and p.stderr == "--max_context 99999 is more than the model's own context: using 4096\n"
  ids = model.tokenizer.encode(PROMPT)
  drawn, other = (list(model.generate(ids, 12, Sampling(**vars(DRAW) | {"seed": seed}))) for seed in (7, 8))
  assert p.stdout == PROMPT + model.tokenizer.decode(drawn) + "\n" and drawn != other
  assert list(model.generate(ids, 12, DRAW)) == drawn

def test_greedy_text_ends_before_a_stop_string(small, model):
  text = "".join(model.complete(model.tokenizer.encode(PROMPT), 12))
  stop = text[4:7]
  p = run("--model", small, "--prompt", PROMPT, "--raw-prompt", "--count", "12", "--stop", "never to be seen", "--stop", stop)
  assert p.returncode == 0 and p.stdout == PROMPT + text[:text.index(stop)] + "\n"

def test_a_prompt_that_does_not_fit(small, model):
  p = run("--model", small, "--raw-prompt", PROMPT * 9, "--max_context", "8")
  assert p.returncode == 2 and p.stdout == "" and p.stderr.count("\n") == 1 and "max_context is 8" in p.stderr
  with pytest.raises(ContextFull): next(model.generate(list(range(65))))
  with pytest.raises(ValueError): load(small, max_context=1)

@pytest.mark.parametrize("ids", [np.zeros((2, 3), np.int64), np.array(3), [[1, 2]], [], [1.5], np.array([1., 2.]), None, 5,
                                 "abc", b"ab", [10**400], [True]],
                         ids=lambda ids: repr(ids)[:20])
def test_what_is_no_row_of_tokens(model, ids):
  for use in (model.logits, lambda ids: next(model.generate(ids)), lambda ids: next(model.complete(ids))):
    with pytest.raises(ValueError, match="^(no )?tokens?\\b") as e: use(ids)
    assert "\n" not in str(e.value) and len(str(e.value)) < 200

@pytest.mark.parametrize("context", ["x", 100.5, True, 1, [4]], ids=repr)
def test_what_is_no_context(small, context):
  with pytest.raises(ValueError, match="^max_context: expected ") as e: load(small, max_context=context)
  assert "\n" not in str(e.value)

def test_benchmark_by_name(tmp_path):
  (tmp_path / "models").mkdir()
  write_small(tmp_path / "models/GLM-4.7-Flash-Q4_0.gguf")
  p = run("--model", "glm-4.7:flash-unsloth-Q4_0", "--benchmark", "3", "--depth", "5", "--json", "out.json", cwd=tmp_path)
  assert p.returncode == 0 and all(line.startswith("this machine is loaded: ") for line in p.stderr.splitlines()), p.stderr
  lines = p.stdout.splitlines()
  assert [line.split()[0] for line in lines[:-1]] == ["device", "a", "ceiling", "load", "prefill", "kernels", "1", "2", "3", "median"]
  assert all("ms" in line and "tok/s" in line and "GB/s" in line for line in lines[6:9]) and "p10" in lines[9] and "p90" in lines[9]
  result = json.loads(lines[-1])
  assert json.loads((tmp_path / "out.json").read_text()) == result
  assert result["model"] == "glm-4.7:flash-unsloth-Q4_0" and result["depth"] == 5 and result["tokens"] == 3
  assert result["tok_s"] == pytest.approx(1e3 / result["median_ms"]) and result["p10_ms"] <= result["median_ms"] <= result["p90_ms"]
  assert result["cache_bytes"] == 1 * 5 * (64 + 32) * 4 and result["kernels"] > 0 and result["prefill_tok_s"] > 0
  assert set(result) >= {"device", "weight_bytes", "peak_gb_s", "ceiling_percent", "load_s", "first_token_s", "device_bytes"}

def test_perplexity(small, model, tmp_path):
  (file := tmp_path / "text.txt").write_text(PROMPT)
  p = run("--model", small, "--perplexity", file, "--json", cwd=tmp_path)
  ids = model.tokenizer.encode(PROMPT)
  logits = model.logits(ids)[:-1].astype(np.float64)
  log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
  expected = np.exp(-np.mean([row[i] for row, i in zip(log_p, ids[1:])]))
  result = json.loads(p.stdout.splitlines()[-1])
  assert p.returncode == 0 and result["perplexity"] == pytest.approx(expected, rel=1e-3) and result["tokens"] == len(ids) - 1
  assert f"perplexity {expected:.1f}"[:13] in p.stdout and list(tmp_path.iterdir()) == [file]

# ---- conversations ----

@pytest.fixture
def terminal() -> Iterator:
  opened:list[Terminal] = []
  yield lambda *args: opened.append(Terminal([*LLM, *map(str, args)])) or opened[-1]
  for t in opened: t.close()

def test_chat_on_a_terminal(small, terminal, tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
  t = terminal("--model", small, "--stats")
  assert "GLM-4.7-Flash-random on " in plain(t.until(">"))
  for question in ("a", "b"):
    t.type(question + "\r")
    t.until("[thinking]\r\n")                             # the answer has begun; whole, it takes a thousand tokens and more
    t.type(CTRL_C)
    said = plain(t.until("\x1b[?2004h"))                   # the next prompt; > is among the model's words
    assert all(part in said for part in ("[stopped]", " token", "the first after", "greedy", "not kept")), said
  t.type(CTRL_D)
  assert "Traceback" not in t.rest() and t.process.returncode == 0

def test_a_stopped_prompt(small, terminal):
  t = terminal("--model", small, "--prompt", "x")
  t.until("[thinking]\r\n")
  t.type(CTRL_C)
  assert "[stopped]" in t.rest() and t.process.returncode == 130

def test_ctrl_c_while_loading(terminal):
  t = terminal()
  t.until("tiny-glm-Q4_0.gguf:")                          # the progress bar
  t.type(CTRL_C)
  assert "Traceback" not in t.rest() and t.process.returncode == 130

# ---- from Python ----

def test_load(model):
  ids = model.tokenizer.encode(PROMPT)
  logits = model.logits(ids)
  assert logits.shape == (len(ids), 4096) and logits.dtype == np.float32
  assert next(model.generate(ids, 1)) == logits[-1].argmax()
  assert model.tokenizer.decode(ids) == PROMPT
  with pytest.raises(ValueError): model.logits([])
  with pytest.raises(ValueError): next(model.generate([4096]))

"""--benchmark: its table, its figures, its plot, and whether others were in the way. No timing is judged."""
from __future__ import annotations
import csv, importlib.util, io, itertools, json, re, statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
from extra.mkgguf import write_model
from tinygrad import Device
from tinygrad.apps import llm, machine, measure
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.engine.sequence import Piece
from tinygrad.apps.measure import Row, Sweep, counts, decode_seconds, draw, numbers, prefill_seconds, table
from tinygrad.apps.models import Model, UserError, load
from tinygrad.helpers import NUM_CPU_THREADS, Context

@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """One dense block, a context of 4096 tokens"""
  write_model(path := tmp_path_factory.mktemp("measure") / "small.gguf", "small-glm", "Q4_0", seed=3, blocks=1, vocab=4096, dim=128, heads=2,
              kv_lora=64, q_lora=64, nope=32, v=32, ff=128)
  return path
@pytest.fixture(scope="module")
def model(small: Path) -> Model: return load(small, max_context=512)
@pytest.fixture
def known_peak(monkeypatch: pytest.MonkeyPatch):
  """The memory's speed is not measured"""
  monkeypatch.setattr(measure, "peak_bandwidth", lambda: (1e9, "a test's"))

def without_loads(err: str) -> str: return "".join(line for line in err.splitlines(True) if not line.startswith("this machine is loaded: "))

@pytest.mark.parametrize("depth", [0, 70])
def test_a_step_is_under_way_when_the_last_is_timed(depth: int, model: Model, known_peak, monkeypatch):
  """As behind all others: with nothing to start the last would be too fast"""
  left, generate = [], model.engine.generate
  def counted(ids: list[int], count: int, *rest: Any):
    left.append(count)
    for token in generate(ids, count, *rest):
      left[-1] -= 1
      yield token
  monkeypatch.setattr(model.engine, "generate", counted)
  measure.benchmark(model, "small", 4, depth, 0.0)
  assert left[-1] == 1

# ---- flags ----

def test_lists():
  assert numbers("-d", "0,4096, 16384", 0) == [0, 4096, 16384] and numbers("-n", "5,5", 1) == [5]
  assert counts("-p", "0") == [] and counts("-p", "512,64") == [512, 64]

@pytest.mark.parametrize("flags, found", [
  ("-d x", "--depth: expected whole numbers of at least 0"), ("-d 0,-1", "--depth"), ("-d 1.5", "--depth"), ("-d ,", "--depth"), ("-d=", "--depth"),
  (f"-d {'9' * 5000}", "--depth"), ("-p 512,0", "--n_prompt: expected whole numbers of at least 1"), ("-n x", "--n_gen"), ("-n -5", "--n_gen"),
  ("-p 0 -n 0", "expected a count of tokens"), ("-r 0", "repetitions"), ("-r x", "repetitions"), ("-o yaml", "invalid choice: 'yaml'"),
  ("-t 0", "--threads"), ("10 -p 5", "--benchmark 10: expected no number beside --n_prompt"), ("10 -d 0,5", "expected no number beside --depth"),
  ("10 -o csv", "expected no number beside --output"), ("-o csv --json", "--json: expected a FILE"), ("0", "--benchmark"),
  ("--plot x.pdf", "--plot x.pdf: expected a name that ends in .png or .svg"), ("--plot no/such/folder/x.png", "x.png: No such file or directory"),
  ("--plot .png", "--plot"), ("--perplexity x -r 2", "found both")])
def test_bad_flags(flags: str, found: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
  """One line, before a model is looked for"""
  monkeypatch.setattr(llm, "load", lambda *a, **k: pytest.fail("too late"))
  with pytest.raises((SystemExit, UserError)) as e: llm.main(["--benchmark", *flags.split()])
  line = capsys.readouterr().err.strip() if e.type is SystemExit else str(e.value)
  assert found in line and "\n" not in line and len(line) < 300

@pytest.mark.parametrize("flag", ["--n_prompt 5", "--n-gen 5", "--depth 3", "--repetitions 5", "-o json", "--plot x.png"])
def test_flags_of_a_benchmark_alone(flag: str):
  with pytest.raises(UserError, match="expected --benchmark beside it"): llm.main(flag.split())

def test_no_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  monkeypatch.setattr(llm, "load", lambda *a, **k: pytest.fail("too late"))
  with pytest.raises(UserError, match="needs matplotlib, which is not installed: .* -m pip install matplotlib"):
    llm.main(["--benchmark", "--plot", str(tmp_path / "x.png")])

def test_threads(monkeypatch: pytest.MonkeyPatch):
  """Set before anything asks for them"""
  monkeypatch.setattr(NUM_CPU_THREADS, "value", NUM_CPU_THREADS.value)
  class Loaded(Exception): pass
  def stop(*a: object, **k: object): raise Loaded(machine.cpu_threads())
  monkeypatch.setattr(llm, "load", stop)
  with pytest.raises(Loaded, match="3"): llm.main(["--threads", "3", "--prompt", "x"])
  assert machine.device_name().endswith("3 threads)") or not machine.device_name().startswith("CPU")

# ---- tables ----

def cells(out: str) -> list[list[str]]: return [[c.strip() for c in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]

@pytest.mark.usefixtures("known_peak")
def test_markdown(small: Path, capsys: pytest.CaptureFixture, tmp_path: Path):
  llm.main(["--model", str(small), *"--benchmark -p 16,40 -n 4 -d 0,64 -r 3 --json".split(), str(tmp_path / "r.json")])
  out, err = capsys.readouterr()
  result = json.loads(out.splitlines()[-1])
  assert without_loads(err) == "" and result == json.loads((tmp_path / "r.json").read_text())
  head, rule, *rows = cells(out)
  assert head == ["model", "device", "test", "tok/s", "median", "GB/s", "% of ceiling"] and all(re.fullmatch("-+:?", c) for c in rule)
  assert [r[2] for r in rows] == ["pp16", "pp40", "tg4", "pp16 @ d64", "pp40 @ d64", "tg4 @ d64"] == [r["test"] for r in result]
  assert all(len(r) == len(head) for r in rows)
  assert 0 <= out.index("ceiling   1 GB/s") < out.index("a token at depth 64 reads") < out.index("| model")
  for shown, r in zip(rows, result):
    assert shown[:2] == ["small", r["device"]] and shown[3:5] == [f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}", f"{r['median_ts']:.2f}"]
    assert shown[5:] == ([f"{r['gb_s']:.1f}", f"{r['ceiling_percent']:.1f}"] if r["n_gen"] else ["", ""])
    assert len(r["samples_ns"]) == 3 and r["avg_ts"] == pytest.approx(statistics.mean(r["samples_ts"]))
    assert r["stddev_ts"] == pytest.approx(statistics.stdev(r["samples_ts"])) and r["median_ts"] == statistics.median(r["samples_ts"])

@pytest.mark.usefixtures("known_peak")
def test_streams_for_programs(small: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path):
  """Nothing but CSV, or one line of JSON, on stdout; the ceiling beside it"""
  monkeypatch.setattr(llm, "load", lambda *a, **k: model)
  def run(*args: str) -> tuple[str, str]:
    llm.main(["--model", str(small), "--benchmark", "-p", "16", "-n", "4", "-r", "2", *args])
    return capsys.readouterr()
  out, err = run("-o", "csv", "--json", str(tmp_path / "r.json"))
  rows, kept = list(csv.DictReader(io.StringIO(out))), json.loads((tmp_path / "r.json").read_text())
  assert [r["test"] for r in rows] == ["pp16", "tg4"] and "ceiling   1 GB/s" in err and None not in rows[0]
  for r, k in zip(rows, kept):
    assert {*k} - {*r} == {"samples_ns", "samples_ts"} and all(v == ("" if k[name] is None else str(k[name])) for name, v in r.items())
  out, err = run("-o", "json")
  assert out.count("\n") == 1 and [r["test"] for r in json.loads(out)] == ["pp16", "tg4"] and "ceiling   1 GB/s" in err
  assert {"avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "n_prompt", "n_gen", "n_depth", "samples_ns", "samples_ts"} <= {*json.loads(out)[0]}

@pytest.mark.usefixtures("known_peak")
def test_json_only_where_asked_for(small: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
  monkeypatch.setattr(llm, "load", lambda *a, **k: model)
  def last(*args: str) -> str:
    llm.main(["--model", str(small), "--benchmark", *args])
    return capsys.readouterr().out.splitlines()[-1]
  for silent in (("2",), ("2", "--depth", "5")): assert last(*silent).startswith("median  ")
  assert last("-p", "0", "-n", "2", "-r", "1").startswith("|")
  for asked in (("2", "--json"), ("2", "-o", "json")): assert json.loads(last(*asked))["tokens"] == 2
  (text := small.with_suffix(".txt")).write_text("the quick brown fox")
  llm.main(["--model", str(small), "--perplexity", str(text)])
  assert capsys.readouterr().out.splitlines()[-1].startswith("perplexity ")

def test_depth_beyond_the_context(small: Path, model: Model, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(llm, "load", lambda *a, **k: model)
  monkeypatch.setattr(measure, "peak_bandwidth", lambda: pytest.fail("too late"))
  for flags in ("-d 9999 -n 4 -p 0", "-d 0,400 -p 200", "-d 99999999999999999999 -r 1"):
    with pytest.raises(UserError, match=r"expected at most 510 together, found \d+: the cache holds 512 \(the model's own context is 4096\)"):
      llm.main(["--model", str(small), "--benchmark", *flags.split()])

def test_figures():
  """By hand: 10 tokens in 1, 2 and 4 s, each reading 100 MB"""
  r = Row(0, 10, 7, 1e8, 25.0, [1.0, 4.0, 2.0])
  f = r.figures()
  assert (f["test"], f["median_ts"], f["avg_ns"]) == ("tg10 @ d7", 5.0, 2333333333) and f["samples_ts"] == [10.0, 2.5, 5.0]
  assert f["avg_ts"] == pytest.approx(17.5 / 3)
  assert f["stddev_ts"] == pytest.approx(3.8188, rel=1e-4) and f["stddev_ns"] == pytest.approx(1.5275e9, rel=1e-4)
  assert f["gb_s"] == pytest.approx(.5) and f["ceiling_percent"] == pytest.approx(20)
  one = Row(64, 0, 0, 0.0, None, [2.0]).figures()
  assert (one["test"], one["avg_ts"], one["stddev_ts"], one["gb_s"], one["ceiling_percent"]) == ("pp64", 32.0, 0.0, None, None)

def test_the_first_run_is_not_counted(model: Model, monkeypatch: pytest.MonkeyPatch):
  clock = itertools.count(1)
  for name in ("prefill_seconds", "decode_seconds"): monkeypatch.setattr(measure, name, lambda *a: float(next(clock)))
  rows = [Row(4, 0, 0, 0.0, None), Row(0, 4, 0, 1.0, None)]
  assert [r.seconds for r in measure.measure(model, Sweep([4], [4], [0], 3), rows)] == [[2.0, 3.0, 4.0], [6.0, 7.0, 8.0]]

@pytest.mark.usefixtures("known_peak")
def test_the_cache_is_filled_once_a_depth(model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
  """What a run reads and where: a prefill from its depth on, and each depth's own tokens once in the whole sweep"""
  runner, ran = model.engine.runner, []
  prefill = runner.prefill
  def note(pieces: list[Piece], *rest: Any):
    ran.extend((piece.start, piece.start + len(piece.ids)) for piece in pieces)
    prefill(pieces, *rest)
  model.engine.forget()
  monkeypatch.setattr(runner, "prefill", note)
  result = table(model, "small", Sweep([48], [3], [0, 128, 256], 4), "md", None)
  assert [sum(start == depth and end - start <= 48 for start, end in ran) for depth in (0, 128, 256)] == [5, 5, 5]
  assert sum(end - start for start, end in ran) <= 256 + 15 * 48 + 3 * 5 * 63   # a decoding's last page is read again
  a_row, weights = model.transformer.cache_bytes(1), model.transformer.weight_bytes_a_step()
  for r, depth in zip([r for r in result if r["n_gen"]], (1, 128, 256)):
    assert r["bytes_a_token"] == weights + a_row * statistics.mean((depth + 1, depth + 2, depth + 3))
    assert r["ceiling_ts"] == pytest.approx(1e9 / r["bytes_a_token"])
  assert capsys.readouterr().out

def test_runs_leave_an_engine_as_any_caller_does(model: Model):
  """Answers after a benchmark are those before it"""
  ids, others = [5, 6, 7, 8], machine.Others()
  before = list(model.engine.generate(ids, 5))
  assert prefill_seconds(model.engine, list(range(20, 80)), 30, others) > 0 and decode_seconds(model.engine, list(range(20, 60)), 3, others) > 0
  assert list(model.engine.generate(ids, 5)) == before and others.wall > 0

# ---- many sequences ----

@pytest.mark.usefixtures("known_peak")
@pytest.mark.parametrize("flags, drawing", [
  ("", {"temperature": 1}), ("--top-p 0.9 --temp 0.5 --seed 7", {"temperature": .5, "top_p": .9}), ("--temp 0", {})])
def test_together(flags: str, drawing: dict, small: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
                  tmp_path: Path):
  """The ceiling first, then a row of each number of sequences; every sequence has its own prompt, and is drawn as flags say"""
  monkeypatch.setattr(llm, "load", lambda *a, **k: model)
  asked, samplings, add = [], [], model.engine.add
  monkeypatch.setattr(model.engine, "add", lambda request: (asked.append(tuple(request.ids)), samplings.append(request.sampling), add(request))[-1])
  files = tmp_path / "x.svg", tmp_path / "r.json"
  llm.main(["--model", str(small), *f"--benchmark 4 --parallel 1,3 -p 20 -r 2 {flags} --plot".split(), str(files[0]), "--json", str(files[1])])
  out, err = capsys.readouterr()
  result, t = json.loads(out.splitlines()[-1]), model.transformer
  assert without_loads(err) == "" and result == json.loads(files[1].read_text()) and files[0].read_bytes().startswith(b"<?xml")
  head, rule, *rows = cells(out)
  assert head == ["sequences", "tok/s", "of each", "ms a step", "GB/s", "% of ceiling", "prompts tok/s"]
  assert out.index("a step of  3 reads") < out.index("| sequences")
  assert len({*asked}) == len(asked) == 3 * (1 + 3) and all(len(ids) == 20 for ids in asked)
  assert {*samplings} == {Sampling(**drawing, seed=i) for i in range(3)}
  assert f" drawn each, {', '.join(f'{name} {value:g}' for name, value in drawing.items()) or 'greedy'}\n" in out
  assert all({name: r[name] for name in ("temperature", "top_p") if name in r} == drawing for r in result)
  for shown, r, n in zip(rows, result, (1, 3), strict=True):
    assert (r["n_parallel"], r["n_prompt"], r["n_gen"], len(r["samples_ts"])) == (n, 20, 4, 2)
    assert r["bytes_a_step"] == t.weight_bytes_a_step(n) + n * t.cache_bytes(1) * (20 + measure.WARM + 2.5)
    assert r["ceiling_ts"] == pytest.approx(n * 1e9 / r["bytes_a_step"]) and r["median_ts"] == statistics.median(r["samples_ts"])
    assert r["sequence_ts"] == pytest.approx(r["median_ts"] / n) and r["step_ms"] == pytest.approx(1e3 * n / r["median_ts"])
    assert shown == [f"{n}", f"{r['median_ts']:.1f} ± {r['stddev_ts']:.1f}", f"{r['sequence_ts']:.1f}", f"{r['step_ms']:.3f}",
                     f"{r['gb_s']:.1f}", f"{r['ceiling_percent']:.1f}", f"{r['prompts_ts']:.1f}"]
    assert r["prompts_ts"] == statistics.median(r["samples_prompts_ts"]) > 0 and len(r["samples_prompts_ts"]) == 2
  assert not model.engine.scheduler.live and not model.engine.pool.fault(model.engine.scheduler.tables)

def test_prompts_are_timed_apart(model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
  """Until all of them are in the cache, and before there is an answer; each figure of its own seconds"""
  engine, seen = model.engine, []
  wait, clock = engine.wait, iter(range(99))
  def noted() -> None:
    seen.append(([s.rows for s in engine.scheduler.live], [len(s.produced) for s in engine.scheduler.live]))
    wait()
  monkeypatch.setattr(engine, "wait", noted)
  monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(clock)))
  engine.forget()
  times = measure.together_seconds(engine, [[*range(i, i + 20)] for i in (5, 40, 80)], Sampling(), 2, machine.Others())
  assert seen == [([19] * 3, [0] * 3)] and min(times) > 0
  row = measure.Step(3, 20, 2, 1.0, None, seconds=[4.0], reading=[2.0])
  assert (row.figures()["median_ts"], row.figures()["prompts_ts"]) == (1.5, 30.0)

@pytest.mark.parametrize("output", ["md", "csv"])
def test_arriving(output: str, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path):
  """Every run has its own prompts; the one that arrives is read while all others run, and each step between its slices is a time"""
  loaded, asked, at_work = [], [], []
  def loading(*args: Any):
    loaded.append(m := load(*args))
    add, prefill, e = m.engine.add, m.engine.runner.prefill, m.engine
    def noted(pieces: list[Piece], size: int, slices: range, shared: bool):
      at_work.append((len(e.scheduler.running), pieces[0].start, slices))
      prefill(pieces, size, slices, shared)
    monkeypatch.setattr(e, "add", lambda request: (asked.append(tuple(request.ids)), add(request))[1])
    monkeypatch.setattr(e.runner, "prefill", noted)
    return m
  monkeypatch.setattr(llm, "load", loading)
  flags = "--benchmark 6 --parallel 1,3 --arriving 1100 -p 20 -r 2 --max-stall-ms 0.001"
  llm.main(["--model", str(small), *flags.split(), "-o", output, "--json", str(tmp_path / "r.json")])
  (out, err), result, (m,) = capsys.readouterr(), json.loads((tmp_path / "r.json").read_text()), loaded
  late = {ids for ids in asked if len(ids) == 1100}
  assert m.engine.max_stall == 1e-6 and len(late) == 2 * 2 * 3 and len({*asked} - late - {ids[:1] for ids in late}) == 3 * (1 + 3)
  slices = m.engine.runner.slices
  arrived = [(running, start, part) for running, start, part in at_work if running in (1, 3) and start + 32 > 20]
  assert {len(part) for _, _, part in arrived} == {1}                             # the target leaves no time: a slice between two steps
  for r, n in zip(result, (1, 3), strict=True):
    assert (r["n_parallel"], r["n_prompt"], r["n_arriving"], r["target_ms"]) == (n, 20, 1100, 1e-3)
    assert len(r["samples_arriving_ts"]) == len(r["samples_alone_ts"]) == 2
    assert len(r["samples_between_ms"]) >= 2 * (3 * slices + 1)                   # 512, 512 and 75 tokens
    assert 0 < r["between_p50_ms"] <= r["between_p99_ms"] <= r["between_max_ms"] == max(r["samples_between_ms"])
    assert 0 < r["before_p50_ms"] <= r["before_p99_ms"]
    assert r["arriving_ts"] == statistics.median(r["samples_arriving_ts"])
    assert r["arriving_percent"] == pytest.approx(100 * r["arriving_ts"] / r["alone_ts"])
  head = out if output == "md" else without_loads(err)
  assert "a prompt of 1100 tokens arrives while answers run\ntarget    0.001 ms from token to token" in head and "were recorded" not in err
  if output == "md":
    titles, rule, *rows = cells(out)
    assert titles == ["sequences", "p50 ms", "p99 ms", "most ms", "without", "prompt tok/s", "alone", "%"]
    keys = "between_p50_ms", "between_p99_ms", "between_max_ms", "before_p50_ms"
    for shown, r in zip(rows, result, strict=True):
      assert shown == [str(r["n_parallel"]), *(f"{r[key]:.3f}" for key in keys), f"{r['arriving_ts']:.1f}", f"{r['alone_ts']:.1f}",
                       f"{r['arriving_percent']:.1f}"]
  else: assert [row["n_parallel"] for row in csv.DictReader(io.StringIO(out))] == ["1", "3"]
  assert not m.engine.scheduler.live and not m.engine.pool.fault(m.engine.scheduler.tables)

def test_an_answer_that_ends_while_the_prompt_is_read(small: Path):
  """It says so, as the times are not those of so many"""
  m = load(small, 400, cache_tokens=4000)
  m.engine.scheduler.max_stall = 1e-6
  all_but_one = 400 - 5 - 1 - measure.WARM
  with pytest.raises(UserError, match="an answer ended, or gave way, before the prompt was read"):
    measure.arrive(m.engine, [[1] * 5], Sampling(temperature=1.0), all_but_one - 1, [7] * 300, measure.Arrival(1, 300))
  assert not m.engine.scheduler.live

@pytest.mark.parametrize("flags, found", [
  ("--top-p 0.9", "--top_p: expected --parallel beside it"), ("-n 5 --temp 0", "--temperature: expected --parallel beside it"),
  ("--arriving 5", "--arriving: expected --parallel beside it"), ("--parallel 2 --arriving 1", "expected a whole number of at least 2, found '1'"),
  ("--parallel 2 --arriving x", "--arriving"), ("--parallel 64 --arriving 5", "at most 63 sequences beside --arriving, found 64"),
  ("--parallel 2 --arriving 5 --plot x.svg", "--plot: expected no --arriving beside it"),
  ("--parallel 0", "--parallel: expected whole numbers of at least 1"), ("--parallel x", "--parallel"),
  ("--parallel 65", "at most 64 sequences, found 65"),
  ("--parallel 2 -n 5", "--n_gen: expected no --parallel beside it"), ("--parallel 2 -p 5 -d 5", "expected --depth or --n_prompt, found both"),
  ("--parallel 2 -d 5,6", "--depth: expected one number"), ("--parallel 2 -p 0", "--n_prompt: expected whole numbers of at least 1")])
def test_bad_flags_together(flags: str, found: str, capsys: pytest.CaptureFixture):
  with pytest.raises((SystemExit, UserError)) as e: llm.main(["--benchmark", *flags.split()])
  line = capsys.readouterr().err.strip() if e.type is SystemExit else str(e.value)
  assert found in line and "\n" not in line

def test_too_much_together(small: Path, model: Model, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(llm, "load", lambda *a, **k: model)
  monkeypatch.setattr(measure, "peak_bandwidth", lambda: pytest.fail("too late"))
  for flags, found in (("500 --parallel 2", "expected at most 507 tokens of a sequence, found 628: the cache holds 512"),
                       ("300 --parallel 64 -d 200", "--cache_tokens: expected at least "),
                       ("8 --parallel 2 --arriving 600 -p 9", "expected at most 510 tokens of a sequence, found 600: the cache holds 512")):
    with pytest.raises(UserError, match=found): llm.main(["--model", str(small), "--benchmark", *flags.split()])

def test_bytes_of_a_step(model: Model):
  """Experts once for all that chose them, by even routing; all else once"""
  c = replace(model.transformer.config, n_experts=64, n_chosen=4)
  assert [round(c.distinct_experts(n), 3) for n in (1, 2, 1000)] == [4.0, 7.75, 64.0]
  assert model.transformer.weight_bytes_a_step(8) > model.transformer.weight_bytes_a_step()

def test_the_ceiling_of_several_devices(monkeypatch: pytest.MonkeyPatch):
  """In turn they are as fast as one; of two kinds each reads its own part"""
  monkeypatch.setattr(measure, "peak_bandwidth", lambda kind=None: (1e11, "measured") if kind == "CPU" else (3e12, "by its clock"))
  def peak(*devices: str, in_turn: bool = True, rows: int = 1, **reads: float) -> tuple[float, str] | None:
    stages = [*devices] if in_turn else [0]
    model = SimpleNamespace(device="CUDA", devices=devices, stages=stages, in_turn=in_turn, weight_bytes_by_kind=lambda: reads)
    return measure.measured_peak(model, rows)
  assert peak("CUDA", CUDA=3e9) == (3e12, "by its clock")
  assert peak("CUDA", "CUDA:1", CUDA=3e9) == (3e12, "by its clock; of one device, 2 work in turn")
  assert peak("CUDA", "CUDA:1", rows=8, CUDA=3e9) == (3e12, "by its clock; of one device, 2 work at once")
  assert peak("CUDA", "CUDA:1", in_turn=False, CUDA=3e9) == (3e12, "by its clock; of one device, 2 work at once")
  mean, source = peak("CUDA", "CPU", CUDA=3e9, CPU=1e9)
  assert mean == pytest.approx(4e9 / .011)
  assert source == "3000.0 MB at 3000 GB/s of CUDA, by its clock; 1000.0 MB at 100 GB/s of CPU, measured"
  monkeypatch.setattr(measure, "peak_bandwidth", lambda kind=None: None)
  assert peak("CUDA", CUDA=3e9) is None

# ---- the plot ----

def sweep_rows() -> list[Row]:
  return [Row(64, 0, d, 0.0, None, [1.0 + d, 1.1 + d]) for d in (0, 100)] + \
         [Row(0, n, d, 1e6 + d, 1e9 / (1e6 + d), [n / 50, n / 40]) for n in (8, 16) for d in (100, 0)]

@pytest.mark.parametrize("suffix, begins", [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_plot(suffix: str, begins: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  from matplotlib.figure import Figure
  figures, save = [], Figure.savefig
  monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
  draw(sweep_rows(), "a model on a device", (1e9, ""), lambda d: 1e6 + 1e4 * d, path := tmp_path / f"p{suffix}")
  assert path.read_bytes().startswith(begins)
  decode, prefill = figures[0].axes
  assert figures[0].get_suptitle() == "a model on a device"
  for axes in (decode, prefill): assert "tokens" in axes.get_xlabel() and "tokens a second" in axes.get_ylabel() and axes.get_ylim()[0] == 0
  assert [t.get_text() for t in decode.get_legend().get_texts()] == ["ceiling: the memory's 1 GB/s", "decoding 8 tokens", "decoding 16 tokens"]
  assert [t.get_text() for t in prefill.get_legend().get_texts()] == ["prefill of 64 tokens"]
  x, y = decode.lines[0].get_data()
  assert (x[0], x[-1]) == (0, 100) and y[0] == pytest.approx(1000) and y[-1] == pytest.approx(500)
  x, y = decode.containers[0].lines[0].get_data()
  assert list(x) == [0, 100] and list(y) == pytest.approx([45, 45])
  if suffix == ".svg":
    draw(sweep_rows(), "a model on a device", (1e9, ""), lambda d: 1e6 + 1e4 * d, again := tmp_path / "again.svg")
    assert again.read_bytes() == path.read_bytes()

@pytest.mark.usefixtures("known_peak")
def test_a_plot_by_its_flag(small: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path):
  monkeypatch.setattr(llm, "load", lambda *a, **k: model)
  llm.main(["--model", str(small), *"--benchmark -p 0 -n 2 -r 1 --plot".split(), str(tmp_path / "x.PNG")])
  assert (tmp_path / "x.PNG").read_bytes().startswith(b"\x89PNG") and "tg2" in capsys.readouterr().out

# ---- other processes ----

STAT = "cpu  {0} 0 0 900 0 0 0 0 0 0\n" + "".join(f"cpu{i} {{0}} 0 0 {{1}} 50 1 2 3 0 0\n" for i in range(4)) + "intr 5\n"

@pytest.mark.parametrize("threads, own, cores, in_the_way", [
  (4, 200, 2.0, True),     # in 1 s 4 cores gave 4 s, 2 of them to us
  (2, 380, 0.2, False),    # two are free for us, and the others take less
  (4, 380, 0.2, True), (4, 395, 0.05, False), (4, 500, 0.0, False)])
def test_others_on_linux(threads: int, own: int, cores: float, in_the_way: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
  monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
  monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
  monkeypatch.setattr(NUM_CPU_THREADS, "value", threads)
  stats, times, clock = iter((STAT.format(1000, 7000), STAT.format(1100, 9000))), iter((0, own / 100)), iter((50.0, 51.0))
  monkeypatch.setattr(machine, "open", lambda path: io.StringIO(next(stats)), raising=False)
  monkeypatch.setattr(machine, "_own_seconds", lambda: next(times))
  monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
  with machine.Others() as others: pass
  monkeypatch.undo()
  monkeypatch.setattr(machine, "cores", lambda: 4)
  monkeypatch.setattr(NUM_CPU_THREADS, "value", threads)
  with Context(DEV="CPU"):
    assert others.cores == pytest.approx(cores) and others.in_the_way is in_the_way
    measure.say_loaded(others, "meanwhile")
  err = capsys.readouterr().err
  assert err.count("\n") == in_the_way and (f"other processes took {cores:.1f} of its" in err) is in_the_way
  with Context(DEV="CUDA"): assert not others.in_the_way

def test_others_where_no_kernel_says(monkeypatch: pytest.MonkeyPatch):
  """A mean over a minute: of 3 at work in it, our own 2 of a process that began long ago"""
  monkeypatch.setattr(machine, "_busy_seconds", lambda: None)
  monkeypatch.setattr(machine.os, "getloadavg", lambda: (3.0, 0.0, 0.0), raising=False)
  monkeypatch.setattr(machine, "BEGUN", 0.0)
  monkeypatch.setattr(machine.time, "perf_counter", iter((9999.0, 10000.0, 10000.0)).__next__)
  monkeypatch.setattr(machine, "_own_seconds", lambda: 20000.0)
  with machine.Others() as others: pass
  assert others.cores == pytest.approx(1.0)

def test_a_glance_is_too_short():
  assert machine.Others(machine.LEAST_SECONDS / 2, 5.0).cores is None and not machine.Others(machine.LEAST_SECONDS / 2, 5.0).in_the_way

@pytest.mark.skipif(not Device.DEFAULT.startswith("CPU"), reason="of other devices the CPU's load says little")
@pytest.mark.usefixtures("known_peak")
def test_a_loaded_machine_is_said_once_and_kept(model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
  monkeypatch.setattr(machine, "_busy_seconds", itertools.count(0, 50).__next__)
  monkeypatch.setattr(machine, "LEAST_SECONDS", 0.0)
  result = table(model, "small", Sweep([8], [2], [0], 1), "md", None)
  assert all(r["other_cores"] > 100 for r in result)
  said = [line.partition(" cores ")[2].partition(";")[0] for line in capsys.readouterr().err.splitlines()]
  assert said == ["while the ceiling was measured", "meanwhile"]

"""How the code is built, judged without running it: ruff, line lengths, the direction of imports, names, places that choose a form, long functions;
and that what the workflow and CONTRIBUTING.md name exists.

A check takes a clone's root, or a file's text, and returns a list of complaints, so that the same function judges this clone and faults planted
on purpose.
"""
from __future__ import annotations
import ast, fnmatch, functools, importlib.util, io, os, re, shlex, shutil, subprocess, sys, tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator
import pytest, yaml
from tinygrad.apps.llm import parser

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("tinygrad", "extra", "bench_block.py", "profile_model.py")
LINE = 150
FUNCTION_LINES, FUNCTION_PARAMETERS = 60, 8

def load_metrics() -> Any:
  spec = importlib.util.spec_from_file_location("code_metrics", ROOT / "test/external/code_metrics.py")
  sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
metrics = load_metrics()

def sources(root: Path, *paths: str) -> dict[str, str]:
  """{path from the root: text} of the Python files at or under the paths"""
  files = [f for path in paths for f in (sorted((root / path).rglob("*.py")) if (root / path).is_dir() else [root / path])]
  return {f.relative_to(root).as_posix(): f.read_text(encoding="utf-8") for f in files}

# ***** ruff, with the settings of pyproject.toml *****

def ruff(root: Path, *arguments: str, **kw: Any) -> list[str]:
  command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--quiet", "--output-format", "concise", *arguments]
  run = subprocess.run(command, cwd=root, capture_output=True, text=True, **kw)
  assert run.returncode in (0, 1) and not run.stderr, run.stderr
  return run.stdout.splitlines()

@pytest.fixture
def with_ruff() -> None:
  if importlib.util.find_spec("ruff") is None: pytest.fail("ruff is not installed: `make setup` installs the pin of pyproject.toml's extra `test`")

def test_ruff(with_ruff): assert ruff(ROOT, *PRODUCT, "test") == []

@pytest.mark.parametrize("code,text", [
  ("F401", "import os\n"), ("F841", "def f():\n  unused = 1\n"), ("F821", "print(unknown)\n"), ("E702", "a = 1; b = 2\n"),
  ("E501", f"x = '{'a' * LINE}'\n"), ("A001", "id = 1\n")])
def test_ruff_finds(with_ruff, code: str, text: str):
  for path in ("tinygrad/planted.py", "test/unit/planted.py"):
    assert [code in line for line in ruff(ROOT, "--stdin-filename", path, "-", input=text)] == [True]

# ***** line lengths *****

def check_lines(files: dict[str, str]) -> list[str]:
  return [f"{path}:{n}: {len(line)} columns" for path, text in files.items() for n, line in enumerate(text.splitlines(), 1) if len(line) > LINE]

def test_lines(): assert check_lines(sources(ROOT, *PRODUCT)) == []
def test_a_long_line(): assert check_lines({"a.py": f"{'#' * LINE}\n{'#' * (LINE + 1)}\n"}) == ["a.py:2: 151 columns"]

# ***** imports go one way *****

# lowest first: a file may import from its own layer and from those above it in this table. Patterns are paths under tinygrad/ without their ending.
LAYERS: dict[str, str] = {
  "the overlay and the compiler": "__init__ disk_cache rewriting schedule/* codegen/* runtime/*",
  "a kernel's ground": "nn/intrinsics nn/primitive nn/step",
  "launches": "nn/kernel nn/halves nn/matrices nn/warp_groups",
  "parts of several primitives": "nn/routing nn/latent_cache",
  "products of many tokens": "nn/tiles nn/*_walk nn/matmul",
  "tool boxes and back ends": "nn/matvec nn/few_tokens nn/online_softmax nn/mla_prefill* nn/mla_unabsorbed nn/head_rows nn/split_kv nn/split_plan "
                              "nn/lora_query nn/cpu* nn/metal_mul_mat_id",
  "primitives": "nn/norm_linear nn/moe nn/mla_attention nn/embedding nn/noise nn/cutoff nn/nucleus nn/draw nn/drafts nn/likeliest nn/all_reduce",
  "files, recordings, the machine, its devices": "apps/gguf apps/capture apps/machine apps/shard",
  "weights and rotation": "apps/quantized apps/rope",
  "the model": "apps/mla",
  "its block that drafts, its cut over devices": "apps/mtp apps/tensor_parallel",
  "sampling": "apps/engine/sampling",
  "constraints": "apps/engine/constraint",
  "sequences and their pages": "apps/engine/cache apps/engine/sequence",
  "drafts": "apps/engine/speculate",
  "the engine's batches": "apps/engine/batch",
  "… on their way over devices": "apps/engine/pipeline",
  "the engine's steps": "apps/engine/runner apps/engine/scheduler",
  "the engine": "apps/engine/engine",
  "text": "apps/screen apps/tokenizer apps/template apps/reasoning apps/chat apps/tool_calls",
  "models by name": "apps/models",
  "the server": "apps/serve/*",
  "the terminal and measuring": "apps/terminal apps/measure",
  "the command line": "apps/llm",
}

@dataclass(frozen=True)
class Import:
  importer: str
  imported: str
  deferred: bool   # inside a function, or under TYPE_CHECKING

@functools.cache
def import_statements(text: str) -> list[tuple[int, str, list[str], bool]]:
  """Of a file, wherever they stand: (dots in front, module, names from it, deferred)"""
  out: list[tuple[int, str, list[str], bool]] = []
  def walk(node: ast.AST, deferred: bool) -> None:
    if isinstance(node, ast.Import): out.extend((0, alias.name, [], deferred) for alias in node.names)
    elif isinstance(node, ast.ImportFrom): out.append((node.level, node.module or "", [alias.name for alias in node.names], deferred))
    for_types = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
    for child in ast.iter_child_nodes(node):
      walk(child, deferred or child in for_types or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))
  walk(ast.parse(text), False)
  return out

def imports(root: Path) -> list[Import]:
  """Every import of one file under tinygrad/ by another"""
  files = {path.removeprefix("tinygrad/").removesuffix(".py"): text for path, text in sources(root, "tinygrad").items()}
  modules = {".".join(("tinygrad", *(p for p in m.split("/") if p != "__init__"))): m for m in files}
  out: set[Import] = set()
  for importer, text in files.items():
    for level, module, names, deferred in import_statements(text):
      package = ("tinygrad/" + importer).split("/")[:-level] if level else []
      base = ".".join([*package, *([module] if module else [])])
      targets = [name if (name := f"{base}.{each}") in modules else base for each in names] or [base]
      out.update(Import(importer, modules[t], deferred) for t in targets if t in modules and modules[t] not in ("__init__", importer))
  return sorted(out, key=lambda i: (i.importer, i.imported, i.deferred))

def layer(module: str) -> int | None:
  return next((n for n, patterns in enumerate(LAYERS.values()) if any(fnmatch.fnmatch(module, p) for p in patterns.split())), None)

def circles(found: list[Import]) -> list[list[str]]:
  """The strongly connected components of more than one file: all files that reach each other"""
  graph: dict[str, set[str]] = {}
  for i in found: graph.setdefault(i.importer, set()).add(i.imported)
  def reached(start: str) -> set[str]:
    seen, todo = set(), [start]
    while todo:
      for following in graph.get(todo.pop(), set()) - seen:
        seen.add(following)
        todo.append(following)
    return seen
  reach = {module: reached(module) for module in graph}
  return sorted({tuple(sorted(m for m in reach[module] if module in reach.get(m, ()))) for module in graph if module in reach[module]})

def check_imports(root: Path) -> list[str]:
  modules = [path.removeprefix("tinygrad/").removesuffix(".py") for path in sources(root, "tinygrad")]
  complaints = [f"{m}: has no layer" for m in modules if layer(m) is None]
  found = imports(root)
  for i in found:
    low, high = layer(i.imported), layer(i.importer)
    if low is None or high is None: continue
    how = " in a function or for types" if i.deferred else ""
    if low > high: complaints.append(f"{i.importer} reaches up to {i.imported}{how}")
  return complaints + [f"a circle of imports: {', '.join(circle)}" for circle in circles(found)]

def test_imports_go_one_way(): assert complaints_here() == []

def test_layers_name_files():
  modules = [path.removeprefix("tinygrad/").removesuffix(".py") for path in sources(ROOT, "tinygrad")]
  assert [p for patterns in LAYERS.values() for p in patterns.split() if not fnmatch.filter(modules, p)] == []

@pytest.fixture
def clone(tmp_path: Path) -> Path:
  root = tmp_path / "clone"
  shutil.copytree(ROOT / "tinygrad", root / "tinygrad", ignore=shutil.ignore_patterns("__pycache__"))
  return root

@functools.cache
def complaints_here() -> list[str]: return check_imports(ROOT)

def plant(clone: Path, module: str, text: str) -> list[str]:
  """What is complained of in the clone, and not here, once the text stands at the end of a module"""
  path = clone / "tinygrad" / f"{module}.py"
  path.write_text((path.read_text(encoding="utf-8") if path.exists() else "") + f"\n{text}\n", encoding="utf-8")
  return [complaint for complaint in check_imports(clone) if complaint not in complaints_here()]

@pytest.mark.parametrize("text,where", [
  ("from tinygrad.apps.gguf import read_gguf", ""), ("import tinygrad.apps.gguf", ""), ("from tinygrad.apps import gguf", ""),
  ("from ..apps import gguf", ""), ("def late():\n  from tinygrad.apps.gguf import read_gguf", " in a function or for types"),
  ("if TYPE_CHECKING:\n  from tinygrad.apps.gguf import GGUFFile", " in a function or for types")])
def test_an_import_that_reaches_up(clone: Path, text: str, where: str):
  assert plant(clone, "nn/intrinsics", text) == [f"nn/intrinsics reaches up to apps/gguf{where}"]

def test_a_circle(clone: Path):
  found = plant(clone, "codegen/opt/postrange", "from tinygrad.codegen.opt.rows import nothing")
  assert found == ["a circle of imports: codegen/opt/postrange, codegen/opt/rows"]

def test_a_circle_inside_functions(clone: Path):
  assert plant(clone, "nn/cpu", "def late():\n  import tinygrad.nn.cpu_prefill") == ["a circle of imports: nn/cpu, nn/cpu_prefill"]

def test_a_file_without_a_layer(clone: Path):
  assert plant(clone, "apps/new", "from tinygrad.apps import llm") == ["apps/new: has no layer"]

# ***** names that were replaced *****

# nowhere under tinygrad/, not in comments either
OLD_NAMES = set("""matmat mul_mats mul_mats_id mats_target kernel_target gate_up_mats moe_mats by_expert precise_mats loaded_ahead left_out row_pairs
  Quads hidden_zero after_previous by_tiles mla_splits splits_by_lanes splits_by_tiles launch_source without_counting
  of_few one_loop _give_back Generator Superseded Variable decode_steps prefill_step""".split())
# words that mean other things too: no function, class or constant of a file, nor imported
OLD_DEFINITIONS = set("Chosen Late Text HIDDEN WIDE NARROW MANY MOST FULL worth say converse whole leave quad".split())

def definitions(tree: ast.Module) -> Iterator[tuple[str, int]]:
  """The names that a file defines for others, or imports, with their lines"""
  for n in ast.walk(tree):
    if isinstance(n, ast.alias): yield from ((name, n.lineno) for name in (n.name, n.asname) if name)
  for n in tree.body:
    if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)): yield n.name, n.lineno
    elif isinstance(n, (ast.Assign, ast.AnnAssign)):
      for target in n.targets if isinstance(n, ast.Assign) else [n.target]:
        yield from ((name.id, n.lineno) for name in ast.walk(target) if isinstance(name, ast.Name))

def words(text: str) -> Iterator[tuple[str, int]]:
  """Every word of a file, comments and strings too, with its line"""
  for t in tokenize.generate_tokens(io.StringIO(text).readline):
    yield from ((m[0], t.start[0] + t.string.count("\n", 0, m.start())) for m in re.finditer(r"[^\W\d]\w*", t.string))

def check_names(files: dict[str, str]) -> list[str]:
  found = set()
  for path, text in files.items():
    found |= {(path, line, word) for word, line in words(text) if word in OLD_NAMES or word.endswith("_mats")}
    found |= {(path, line, name) for name, line in definitions(ast.parse(text)) if name in OLD_DEFINITIONS}
  return [f"{path}:{line}: {word}" for path, line, word in sorted(found)]

def test_names(): assert check_names(sources(ROOT, "tinygrad")) == []

@pytest.mark.parametrize("text,words", [
  ("by_expert(x)", ["by_expert"]), ("# see mul_mats", ["mul_mats"]), ('"""`row_pairs`\n"""', ["row_pairs"]),
  ("def linear_mats(): pass", ["linear_mats"]), ("start: Variable|Tensor", ["Variable"]), ("raise Superseded", ["Superseded"]),
  ("from tinygrad.nn.matmat import x", ["matmat"]), ("class Late: pass", ["Late"]), ("A, MANY = 1, 2", ["MANY"]),
  ("from tinygrad.apps.terminal import say", ["say"]), ("# they say it as a whole", []), ("def f():\n  whole = Lately()", [])])
def test_an_old_name(text: str, words: list[str]): assert check_names({"a.py": text + "\n"}) == [f"a.py:1: {word}" for word in words]

# ***** who decides which form of a primitive runs *****

DOOR = ("tinygrad/nn/primitive.py", "tinygrad/nn/step.py", "tinygrad/nn/intrinsics.py")
POSITIONS = ("pos", "position", "positions", "start_pos")

def counts_tokens(n: ast.AST) -> bool:
  """x.shape[0] beside a number, in a comparison"""
  if not isinstance(n, ast.Compare): return False
  sides = [n.left, *n.comparators]
  first = any(isinstance(s, ast.Subscript) and ast.unparse(s).endswith(".shape[0]") for s in sides)
  return first and any(isinstance(s, ast.Constant) and s.value in (1, 2) for s in sides)

def asks_for_a_position(n: ast.AST) -> bool:
  """isinstance of a position: what it is would say which form is meant"""
  if not (isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "isinstance" and n.args): return False
  return (n.args[0].id if isinstance(n.args[0], ast.Name) else getattr(n.args[0], "attr", "")) in POSITIONS

def reads_the_default_device(n: ast.AST) -> bool: return isinstance(n, ast.Attribute) and ast.unparse(n) == "Device.DEFAULT"

def check_choices(files: dict[str, str]) -> list[str]:
  """Outside the door nobody counts tokens or asks what a position is; under nn/ nobody asks for the default device"""
  complaints = []
  for path, text in files.items():
    if path in DOOR: continue
    rules: list[Callable[[ast.AST], bool]] = [counts_tokens, asks_for_a_position]
    if path.startswith("tinygrad/nn/"): rules.append(reads_the_default_device)
    complaints += [f"{path}:{n.lineno}: {ast.unparse(n)}" for n in ast.walk(ast.parse(text)) if any(rule(n) for rule in rules)]
  return complaints

def test_the_door_alone_chooses(): assert check_choices(sources(ROOT, "tinygrad")) == []

@pytest.mark.parametrize("text", ["x.shape[0] == 1", "1 < x.y.shape[0]", "x.shape[0] >= 2", "isinstance(pos, Tensor)",
                                  "isinstance(step.positions, (int, UOp))", "Device.DEFAULT"])
def test_a_choice_outside_the_door(text: str):
  assert check_choices({"tinygrad/nn/moe.py": f"y = f() if {text} else g()\n"}) == [f"tinygrad/nn/moe.py:1: {text}"]
  assert check_choices({path: f"y = {text}\n" for path in DOOR}) == []

def test_no_choice():
  assert check_choices({"tinygrad/apps/models.py": "Device[Device.DEFAULT].synchronize()\n",
                        "tinygrad/nn/moe.py": "isinstance(x, Tensor) and x.shape[0] == y.shape[0] and x.shape[-1] == 1\n"}) == []

# ***** functions that a head can hold *****

# the functions that may be longer, or take more: "file function" -> why
LONG: dict[str, str] = {"tinygrad/apps/models.py load": "a flag of the command line each, given by name"}

def check_functions(files: dict[str, str], allowed: dict[str, str]) -> list[str]:
  complaints, needed = [], set()
  for path, text in files.items():
    for f in metrics.functions(ast.parse(text)):
      if f.lines <= FUNCTION_LINES and f.parameters <= FUNCTION_PARAMETERS: continue
      needed.add(key := f"{path} {f.name}")
      if key not in allowed: complaints.append(f"{key}: {f.lines} lines, {f.parameters} parameters")
  return complaints + [f"{key}: allowed, and needs no allowance" for key in allowed if key not in needed]

def test_functions(): assert check_functions(sources(ROOT, "tinygrad"), LONG) == []

def test_a_long_function():
  inner = "def outer():\n  def inner():\n" + "    pass\n" * FUNCTION_LINES
  wide = f"class A:\n  def f(self, {', '.join('abcdefg')}, *, h): pass\n  def g({', '.join('abcdefgh')}, **rest): pass\n"
  assert check_functions({"a.py": inner, "b.py": wide}, {"b.py A.f": "why"}) == [
    "a.py outer: 62 lines, 0 parameters", "a.py outer.inner: 61 lines, 0 parameters", "b.py A.g: 1 lines, 9 parameters",
    "b.py A.f: allowed, and needs no allowance"]

def test_metrics():
  m = metrics.measure("def f(x, _, longer=y):\n  return x + longer\n\n")
  assert (m.lines, m.names, m.one_letter) == (3, 5, 3) and m.longest == metrics.Function("f", 2, 3)
  run = subprocess.run([sys.executable, ROOT / "test/external/code_metrics.py", ROOT / "extra"], capture_output=True, text=True, check=True)
  assert '"one_letter_percent": ' in run.stdout.splitlines()[-1]

# ***** the workflow runs what there is *****

def commands(workflow: str) -> Iterator[list[str]]:
  """The words of each command line in a workflow's steps"""
  for job in yaml.safe_load(workflow)["jobs"].values():
    for step in job["steps"]:
      for line in step.get("run", "").replace("\\\n", " ").splitlines():
        if line.strip(): yield shlex.split(line)

def make_targets(root: Path) -> list[str]: return re.findall(r"^(\w[\w-]*):", (root / "Makefile").read_text(), re.M)

def check_command(root: Path, command: list[str]) -> list[str]:
  targets = make_targets(root)
  while command and re.fullmatch(r"\w+=.*", command[0]): command = command[1:]
  program, *rest = command
  if program == "make":
    complaints = [f"make {w}: no such target" for w in rest if "=" not in w and w not in targets]
    files = [word for w in rest if w.startswith("ARGS=") for word in shlex.split(w.removeprefix("ARGS="))]
  elif program == ".venv/bin/python":
    complaints, files = [], rest[:1]
    if rest[:1] == ["tinygrad/apps/llm.py"]:
      known = parser("--benchmark" in rest)._option_string_actions
      complaints += [f"llm.py {w}: no such flag" for w in rest[1:] if w.startswith("-") and w.split("=")[0] not in known]
  else: return [f"{program}: expected make or .venv/bin/python"]
  paths = [w.partition("::")[0] for w in files if "/" in w or w.endswith(".py")]
  return complaints + [f"{path}: no such file" for path in paths if not (root / path).exists()]

def test_the_workflow_runs_what_there_is():
  found = list(commands((ROOT / ".github/workflows/test.yml").read_text()))
  assert ["make", "test"] in found and any("--prompt" in command for command in found)
  assert [complaint for command in found for complaint in check_command(ROOT, command)] == []

@pytest.mark.parametrize("line,complaint", [
  ("make tests", "make tests: no such target"), ("make test ARGS='-k x test/gone'", "test/gone: no such file"),
  ("DEV=METAL .venv/bin/python tinygrad/apps/gone.py", "tinygrad/apps/gone.py: no such file"),
  (".venv/bin/python tinygrad/apps/llm.py --prompt x --counts 3", "llm.py --counts: no such flag"),
  ("pytest test", "pytest: expected make or .venv/bin/python")])
def test_a_command_that_is_not_there(line: str, complaint: str):
  steps = yaml.safe_dump({"jobs": {"test": {"steps": [{"uses": "actions/checkout@v6"}, {"run": f"make setup\n{line}\n"}]}}})
  assert [c for command in commands(steps) for c in check_command(ROOT, command)] == [complaint]

@pytest.mark.parametrize("given", ["{} make", "make {}"])
def test_what_recipes_do_not_see(given: str):
  """A Python and a C compiler, by whose names tinygrad goes otherwise; set-up is told which Python"""
  env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "PYTHON"}
  def said(line: str) -> str: return subprocess.run(line, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
  seen = said(given.format("CC=cc PYTHON=python3") + " -s --eval 'seen: ; @env' seen").splitlines()
  assert len(seen) > 3 and not [line for line in seen if line.startswith(("CC=", "PYTHON="))]
  assert 'PYTHON="python3" sh extra/setup.sh' in said(given.format("PYTHON=python3") + " -n setup")

# ***** CONTRIBUTING.md names what there is *****

def check_guide(root: Path, text: str) -> list[str]:
  """Every file, make target and constant that stands in backticks exists; a constant in a file that its line names"""
  complaints, targets = [], make_targets(root)
  for line in text.splitlines():
    quoted = re.findall(r"`([^`]+)`", line)
    words = [re.sub(r"^\w+=", "", word) for q in quoted for word in q.split()]
    paths = [w for w in words if re.search(r"\.(py|md|yml|toml)$", w) or ("/" in w and not w.startswith((".venv", "/")))]
    found = {w: next((f for f in (root / w, root / "tinygrad/nn" / w) if f.exists()), None) for w in paths}
    complaints += [f"{w}: no such file" for w, f in found.items() if f is None]
    complaints += [f"make {m[1]}: no such target" for q in quoted if (m := re.match(r"make (\w+)", q)) and m[1] not in targets]
    if files := [f for f in found.values() if f and f.is_file()]:
      complaints += [f"{q}: not in {' or '.join(f.name for f in files)}" for q in quoted if re.fullmatch(r"[A-Z][A-Z_]+", q)
                     and not any(re.search(rf"\b{q}\b", f.read_text(encoding="utf-8")) for f in files)]
  return complaints

def test_the_guide(): assert check_guide(ROOT, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")) == []

@pytest.mark.parametrize("text,complaint", [
  ("see `tinygrad/nn/gone.py`", "tinygrad/nn/gone.py: no such file"), ("`gone.py` and `kernel.py`", "gone.py: no such file"),
  ("`make tests`", "make tests: no such target"), ("`make test ARGS=test/gone.py`", "test/gone.py: no such file"),
  ("`tinygrad/apps/quantized.py`: a row of `FORMATTED`", "FORMATTED: not in quantized.py")])
def test_a_guide_that_is_wrong(text: str, complaint: str): assert check_guide(ROOT, text) == [complaint]

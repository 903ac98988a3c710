"""How the code reads, in numbers: lines, the longest function, the most parameters, one-letter names, characters a line; for each file and in all.

  python test/external/code_metrics.py [FOLDER|FILE ...]     default: tinygrad

A function's lines include the functions inside it; its parameters leave out self and cls. One-letter names are counted by use: every name that is
read or written, and every parameter, `_` apart. The last line is one JSON object.
"""
from __future__ import annotations
import argparse, ast, json, sys
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

ROOT = Path(__file__).resolve().parents[2]

@dataclass(frozen=True)
class Function:
  name: str        # with the names of the classes and functions around it
  lines: int
  parameters: int

@dataclass
class Metrics:
  lines: int = 0
  characters: int = 0
  names: int = 0
  one_letter: int = 0
  longest: Function = Function("", 0, 0)
  widest: Function = Function("", 0, 0)  # the one with the most parameters

  def __add__(self, other: Metrics) -> Metrics:
    return Metrics(self.lines + other.lines, self.characters + other.characters, self.names + other.names, self.one_letter + other.one_letter,
                   max(self.longest, other.longest, key=lambda f: f.lines), max(self.widest, other.widest, key=lambda f: f.parameters))
  @property
  def one_letter_percent(self) -> float: return 100 * self.one_letter / max(1, self.names)
  @property
  def characters_a_line(self) -> float: return self.characters / max(1, self.lines)

def functions(node: ast.AST, outer: tuple[str, ...] = (), method: bool = False) -> Iterator[Function]:
  """All functions of a tree, inner ones too"""
  for child in ast.iter_child_nodes(node):
    if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
      a = child.args
      names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg)))]
      bound = method and names[:1] in (["self"], ["cls"])
      yield Function(".".join((*outer, child.name)), child.end_lineno - child.lineno + 1, len(names) - bound)
      yield from functions(child, (*outer, child.name))
    elif isinstance(child, ast.ClassDef): yield from functions(child, (*outer, child.name), method=True)
    else: yield from functions(child, outer, method)

def names(tree: ast.AST) -> list[str]:
  """Every use of a name, `_` apart"""
  used = [n.id if isinstance(n, ast.Name) else n.arg for n in ast.walk(tree) if isinstance(n, (ast.Name, ast.arg))]
  return [name for name in used if name != "_"]

def measure(source: str) -> Metrics:
  tree, lines = ast.parse(source), source.splitlines()
  used, found = names(tree), [Function("", 0, 0), *functions(tree)]
  return Metrics(len(lines), sum(map(len, lines)), len(used), sum(len(name) == 1 for name in used),
                 max(found, key=lambda f: f.lines), max(found, key=lambda f: f.parameters))

def main() -> None:
  p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  p.add_argument("paths", nargs="*", type=Path, default=[ROOT / "tinygrad"], metavar="FOLDER|FILE", help="default: tinygrad")
  args = p.parse_args()
  if missing := [str(path) for path in args.paths if not path.exists()]: sys.exit(f"no such file: {', '.join(missing)}")
  files = sorted({f.resolve() for path in args.paths for f in (path.rglob("*.py") if path.is_dir() else [path])})
  if not files: sys.exit("expected a Python file, found none")
  rows = {str(f.relative_to(ROOT) if f.is_relative_to(ROOT) else f): measure(f.read_text(encoding="utf-8")) for f in files}
  total, width = sum(rows.values(), Metrics()), max(map(len, rows))
  print(f"{'':{width}s}  lines  one letter  chars/line  longest function, lines                 most parameters")
  for name, m in (*rows.items(), ("all", total)):
    longest, widest = f"{m.longest.lines:3d} {m.longest.name}", f"{m.widest.parameters:2d} {m.widest.name}"
    print(f"{name:{width}s}  {m.lines:5d}  {m.one_letter_percent:8.1f} %  {m.characters_a_line:10.1f}  {longest:38s}  {widest}")
  print(json.dumps({"files": len(rows), "lines": total.lines, "one_letter_percent": round(total.one_letter_percent, 2),
                    "characters_a_line": round(total.characters_a_line, 2), "longest_function": [total.longest.name, total.longest.lines],
                    "most_parameters": [total.widest.name, total.widest.parameters]}))

if __name__ == "__main__": main()

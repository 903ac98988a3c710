"""Which compiler makes the CPU's kernels: CC if it is clang, clang, else pip's ziglang, stood in for by a folder that passes on to clang."""
from __future__ import annotations
import os, shutil, subprocess, sys
from pathlib import Path
import pytest

ROOT, CLANG = Path(__file__).resolve().parents[2], shutil.which("clang")
pytestmark = pytest.mark.skipif(CLANG is None, reason="no clang to stand in for ziglang's")

# two kernels at once go to the pool of workers
PROGRAM = """
from tinygrad import Tensor
from tinygrad.helpers import getenv
if __name__ == "__main__":
  getenv("CC", "clang")
  a, b = Tensor([1., 2, 3]), Tensor.arange(100).contiguous()
  Tensor.realize(x := a.sum(), y := (b * 2).sum())
  print(x.item(), y.item())
"""

def run(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
  (tmp_path / "program.py").write_text(PROGRAM)
  (zig := tmp_path / "site" / "ziglang").mkdir(parents=True)
  (zig / "__init__.py").write_text("raise ImportError('it is only looked for')")
  (zig / "zig").write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/calls\nshift\nexec {CLANG} "$@"\n')
  (zig / "zig").chmod(0o755)
  kept = {k: v for k, v in os.environ.items() if k not in ("CC", "ZIGLANG", "CACHEDB", "MOCKMETAL")}
  env = dict(PATH=str(tmp_path), DEV="CPU", PARALLEL="2", PYTHONPATH=f"{ROOT}:{zig.parent}", XDG_CACHE_HOME=str(tmp_path / "cache")) | env
  return subprocess.run([sys.executable, tmp_path / "program.py"], env=kept | env, capture_output=True, text=True)

def test_ziglang_where_there_is_no_clang(tmp_path):
  found = run(tmp_path)
  assert (found.stdout, found.stderr) == ("6.0 9900\n", "no clang: compiling with pip's ziglang\n")
  calls = (tmp_path / "calls").read_text().split()
  assert len(calls) > 5 and set(calls) == {"clang"}

@pytest.mark.parametrize("env", [{"PATH": os.path.dirname(str(CLANG))}, {"CC": str(CLANG)}], ids=["a clang", "CC"])
def test_what_comes_before_ziglang(tmp_path, env):
  found = run(tmp_path, **env)
  assert (found.stdout, found.stderr) == ("6.0 9900\n", "") and not (tmp_path / "calls").exists()

def other_compiler(folder: Path, macros: str) -> Path:
  """One that says these of itself, and is clang where it compiles"""
  path = folder / "cc"
  path.write_text(f'#!/bin/sh\ncase "$*" in *-dM*) echo "{macros}";; *) exec {CLANG} "$@";; esac\n')
  path.chmod(0o755)
  return path

def test_a_clang_by_another_name(tmp_path):
  found = run(tmp_path, CC=str(other_compiler(tmp_path, "#define __clang__ 1")))
  assert (found.stdout, found.stderr) == ("6.0 9900\n", "")

@pytest.mark.parametrize("path,how", [(os.path.dirname(str(CLANG)), ""), ("", "no clang: compiling with pip's ziglang\n")], ids=["clang", "ziglang"])
def test_a_compiler_that_is_not_clang(tmp_path, path: str, how: str):
  """Said once, by however many processes compile, and not used"""
  cc = str(other_compiler(tmp_path, "#define __GNUC__ 12"))
  found = run(tmp_path, CC=cc, **({"PATH": path} if path else {}))
  assert (found.stdout, found.stderr) == ("6.0 9900\n", f"CC={cc} is not clang, which kernels for the CPU are written for: it is not used\n{how}")
  assert (tmp_path / "calls").exists() == bool(how)

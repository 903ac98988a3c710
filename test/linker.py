"""How the mocks link a kernel."""
from __future__ import annotations
import pathlib, shutil, subprocess, sys
from typing import Sequence

def link(objects: Sequence[str | pathlib.Path], out: str | pathlib.Path, driver: Sequence[str]) -> str:
  """Makes a shared object of these objects and libraries; what is complained about, empty where there is one. By the linker itself where that is
  GNU's: `driver`, a compiler's command, takes longer to look for what goes with an object than most kernels take to be compiled"""
  command = ["ld"] if sys.platform == "linux" and shutil.which("ld") else driver
  run = subprocess.run([*command, "-shared", *objects, "-o", out], capture_output=True, text=True)
  return run.stderr if run.returncode else ""

"""tinygrad's cache on disk: whatever is wrong with it, work goes on, and one line says so."""
import os, sqlite3, subprocess, sys
from pathlib import Path
from typing import Iterator
import pytest
from tinygrad import disk_cache, helpers
from tinygrad.helpers import CACHELEVEL

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import numpy as np
from tinygrad import Tensor
from tinygrad.apps.models import check_device
if __name__ == "__main__":
  check_device()
  x = Tensor(np.arange(8, dtype=np.float32)).realize()
  Tensor.realize(*(outs := [(x * i).sum() for i in range(1, 4)]))
  print([int(o.item()) for o in outs])
"""

def use(home: Path, **env: str) -> list[str]:
  """What a process says that compiles some kernels, by workers, with its cache below `home`; what it computes is right"""
  kept = {k: v for k, v in os.environ.items() if k not in ("CACHEDB", "CACHELEVEL", "PYTEST_XDIST_WORKER_COUNT")}
  run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT,
                       env=kept | dict(DEV="CPU", PARALLEL="2", PYTHONPATH=str(ROOT), XDG_CACHE_HOME=str(home)) | env)
  assert run.returncode == 0 and run.stdout == "[28, 56, 84]\n", run.stderr
  return run.stderr.splitlines()

def test_a_new_folder(tmp_path: Path):
  assert use(tmp_path / "missing" / "parent") == []
  made = sqlite3.connect(tmp_path / "missing/parent/tinygrad/cache.db")
  assert made.execute("SELECT name FROM sqlite_master WHERE name LIKE 'compile%'").fetchall()

def test_a_file_in_its_place(tmp_path: Path):
  (tmp_path / "tinygrad").write_text("mine")
  line, = use(tmp_path)
  assert line.startswith(f"{tmp_path}/tinygrad/cache.db: no cache of compiled kernels (") and "going on without" in line

def test_a_damaged_one(tmp_path: Path):
  (tmp_path / "tinygrad").mkdir()
  (tmp_path / "tinygrad/cache.db").write_bytes(b"not a database " * 999)
  line, = use(tmp_path)
  assert "(file is not a database)" in line

@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_to_read(tmp_path: Path):
  tmp_path.chmod(0o500)
  line, = use(tmp_path)
  assert "(" in line

# ---- a disk that fills up, an entry that is damaged ----

@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
  path = tmp_path / "cache.db"
  for name, value in (("CACHEDB", str(path)), ("_db_connection", None), ("_db_tables", set())): monkeypatch.setattr(helpers, name, value)
  monkeypatch.setattr(CACHELEVEL, "value", 2)
  monkeypatch.setenv("CACHELEVEL", "2")
  yield path
  if helpers._db_connection is not None: helpers._db_connection.close()

@pytest.mark.parametrize("how", ("full", "read only"))
def test_a_write_that_fails(how: str, cache: Path, capsys: pytest.CaptureFixture):
  helpers.diskcache_put("kernels", "a", b"one")
  connection = helpers.db_connection()
  connection.execute("PRAGMA max_page_count=4" if how == "full" else "PRAGMA query_only=1")
  for _ in range(3): assert helpers.diskcache_put("kernels", "b", (big := bytes(1 << 20))) is big
  assert helpers.diskcache_get("kernels", "a") is None and os.environ["CACHELEVEL"] == "0" and not CACHELEVEL
  line, = capsys.readouterr().err.splitlines()
  assert line.startswith(f"{cache}: no cache") and ("is full" if how == "full" else "readonly") in line

def test_a_damaged_entry(cache: Path, capsys: pytest.CaptureFixture):
  helpers.diskcache_put("kernels", "a", b"no pickle", prepickled=True)
  assert helpers.diskcache_get("kernels", "a") is None
  assert len(capsys.readouterr().err.splitlines()) == 1

def test_probe(cache: Path, capsys: pytest.CaptureFixture):
  disk_cache.probe()
  assert cache.exists() and capsys.readouterr().err == ""
  assert helpers.diskcache_get("kernels", "a") is None       # no such table is no failure
  assert CACHELEVEL >= 2

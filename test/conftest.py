"""Every test runs on the fork: pytest's `pythonpath` puts the clone's root first, so `import tinygrad` finds the overlay."""
import gc, os, re
import pytest
from slow import SLOW

# a pool of one worker, begun anew every 16 kernels, is what tinygrad takes where pytest's workers have a core each: they compile themselves
if (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) < 2: os.environ.setdefault("PARALLEL", "0")

gc.set_threshold(50_000, 20, 20)   # graphs that are rewritten make objects by the million, few of them cycles: a seventh of the time went by here

try: import tinygrad
except ImportError as e: pytest.exit(f"{e}; `make test` sets everything up", returncode=2)
if not hasattr(tinygrad, "OVERLAY"):
  pytest.exit(f"expected the fork's tinygrad, found {tinygrad.__file__}: run pytest from the clone's root", returncode=2)

@pytest.fixture
def planes_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
  """For files of tests with many weights of many shapes: see host_planes.py"""
  import host_planes
  from tinygrad.apps.quantized import QuantizedWeight
  monkeypatch.setattr(QuantizedWeight, "load", classmethod(host_planes.load))

def pytest_addoption(parser: pytest.Parser) -> None: parser.addoption("--all", action="store_true", help="run what takes long, too")

def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  if config.getoption("--all"): return
  def is_slow(item: pytest.Item) -> bool:
    file, _, name = item.nodeid.removeprefix("test/").partition(".py::")
    return any(re.match(pattern, name) for pattern in SLOW.get(file, ()))
  slow = [*filter(is_slow, items)]
  if slow:
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in {*slow}]

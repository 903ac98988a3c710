"""Every test runs on the fork: pytest's `pythonpath` puts the clone's root first, so `import tinygrad` finds the overlay."""
import os
import pytest

# a pool of one worker, begun anew every 16 kernels, is what tinygrad takes where pytest's workers have a core each: they compile themselves
if (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) < 2: os.environ.setdefault("PARALLEL", "0")

try: import tinygrad
except ImportError as e: pytest.exit(f"{e}; `make test` sets everything up", returncode=2)
if not hasattr(tinygrad, "OVERLAY"):
  pytest.exit(f"expected the fork's tinygrad, found {tinygrad.__file__}: run pytest from the clone's root", returncode=2)

"""Every test runs on the fork: pytest's `pythonpath` puts the clone's root first, so `import tinygrad` finds the overlay."""
import pytest

try: import tinygrad
except ImportError as e: pytest.exit(f"{e}; `make test` sets everything up", returncode=2)
if not hasattr(tinygrad, "OVERLAY"): pytest.exit(f"expected the fork's tinygrad, found {tinygrad.__file__}: run pytest from the clone's root", returncode=2)

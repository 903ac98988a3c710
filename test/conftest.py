"""Every test runs on the fork: pytest's `pythonpath` puts the clone's root first, so `import tinygrad` finds the overlay."""
import gc, os, re
import pytest

# a pool of one worker, begun anew every 16 kernels, is what tinygrad takes where pytest's workers have a core each: they compile themselves
if (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) < 2: os.environ.setdefault("PARALLEL", "0")

gc.set_threshold(50_000, 20, 20)   # graphs that are rewritten make objects by the million, few of them cycles: a seventh of the time went by here

try: import tinygrad
except ImportError as e: pytest.exit(f"{e}; `make test` sets everything up", returncode=2)
if not hasattr(tinygrad, "OVERLAY"):
  pytest.exit(f"expected the fork's tinygrad, found {tinygrad.__file__}: run pytest from the clone's root", returncode=2)

# What `make test` has no time for on two cores, and leaves out: `make test ARGS=--all` runs it too. Each repeats, on another target, type or size,
# what a test that stays proves of the same code.
SLOW = [
  r"metal/test_decode\.py::test_the_tokens_of_the_cpu\[0\]",                  # test_many's schedules have the portable kernels, too
  r"null/test_mul_mat\.py::test_every_type",                                   # test_primitives has every type on both mocks
  r"null/test_mul_mat\.py::test_shapes\[cuda-(Q4_0-16-2048|Q4_0-1-4128|Q6_K-3-1536|F16-3-4128)\]",
  r"null/test_primitives\.py::test_as_alone\[.*-METAL-",
  r"null/test_primitives\.py::test_(form|as_alone)\[.*-CUDA-decode-(5|7|8|9|19)\]",   # columns that tensor cores take but on cards without them
  r"null/test_primitives\.py::test_form\[.*-CPU-cpu_few-(12|13)\]",
  r"null/test_primitives\.py::test_form\[.*-METAL-decode-(5|8|9|19)\]",
  r"null/test_primitives\.py::test_form\[mul_mat (Q4_1|Q5_0|Q2_K|Q3_K|BF16|IQ4_XS)-METAL-",
  r"null/test_few_tokens\.py::test_groups\[64-8-384\]",
  r"null/test_cuda_decode\.py::test_decode\[metal-small-glm-",
  r"null/test_architectures\.py::test_rendered\[sm_(75|80)\]",
  r"unit/test_against_wheel\.py::test_cpu\[(2[2-9]|3|4)\d*0\]",
  r"unit/test_against_wheel\.py::test_metal\[5[2-5]0\]",
  r"unit/test_against_wheel\.py::test_backward\[convolutions-",
  r"unit/test_cpu\.py::test_feed_forward_of_few\[(2|5|8|12|13)\]",
  r"unit/test_quantized\.py::test_uses\[(Q4_1|Q5_0|Q5_1|Q2_K|Q3_K|BF16|IQ4_NL|F32)\]",
  r"unit/test_mla\.py::test_every_type\[.*-7\]",
]

def pytest_addoption(parser: pytest.Parser) -> None: parser.addoption("--all", action="store_true", help="run what takes long, too")

def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  if config.getoption("--all"): return
  slow = [item for item in items if any(re.search(pattern, item.nodeid) for pattern in SLOW)]
  if slow:
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in {*slow}]

# make run     a prompt's answer and a decode benchmark on the built-in model
# make serve   answers HTTP clients, and a chat in the browser, on http://127.0.0.1:8080 with the built-in model
# make test    the tests
# make setup   only what they need: .venv with the pins of pyproject.toml, a C compiler, the web chat's libraries; quick when nothing is to be done
# make clean   removes .venv, caches and what the web chat fetched
# PYTHON=… names the Python that .venv is made from; ARGS=… goes to llm.py --serve or to pytest

unexport CC PYTHON  # tinygrad takes the CPU device's compiler from CC, and only clang will do; it reads PYTHON as a number
PY := .venv/bin/python
PROMPT := What is a list?

.PHONY: run serve test setup clean

run: setup
	$(PY) tinygrad/apps/llm.py --prompt "$(PROMPT)" --count 200
	$(PY) tinygrad/apps/llm.py --benchmark 20

serve: setup
	$(PY) tinygrad/apps/llm.py --serve $(ARGS)

test: setup
	$(PY) -m pytest -n 2 --dist worksteal $(ARGS)

setup:
	@PYTHON="$(PYTHON)" sh extra/setup.sh

clean:
	rm -rf .venv .pytest_cache .ruff_cache tinygrad/apps/serve/web/vendor
	find . -name __pycache__ -prune -exec rm -rf {} +

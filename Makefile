# The commands of this project. `make demo` and `make test` need nothing but Python 3.11 or newer and a package index.

PYTHON ?= python3
# The environment that checks and tests run in; servers of the other versions run in theirs.
BIN = $${SGLANG_RECV_VENVS:-.venv}/sglang-0.5.23/bin
# More arguments for pytest: make test PYTEST_ARGS="-k status -x"
PYTEST_ARGS ?=
# Arguments for `sglang-recv bench`: make bench BENCH_ARGS="--model 8b --laps 3"
BENCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo bench setup lint test test-full clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo:  ## a weight update from start to end, on this machine's GPU or on its CPU
	@PYTHON='$(PYTHON)' bash scripts/command.sh demo

bench:  ## seconds of an update beside SGLang's own ways, on this machine's GPU or on its CPU
	@PYTHON='$(PYTHON)' bash scripts/command.sh bench $(BENCH_ARGS)

setup:  ## build .venv/ where it is missing or stale
	@$(PYTHON) scripts/environments.py

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## lint, unit tests, and a pairwise choice of tests with real servers
	$(BIN)/python -m pytest -m "not full and not gpu" $(PYTEST_ARGS)

test-full: lint  ## every combination, and the fault tests; GPU tests where there is one
	$(BIN)/python -m pytest $(PYTEST_ARGS)

clean:  ## remove environments, caches and builds
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find sglang_recv tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# Each verb makes .venv if it is missing, installs what it needs from the package index, and runs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-full check fmt bench

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: $(STAMP) ## train the embedded model with the default recipe
	$(BIN)/flowrl-img train pico

test: $(STAMP) ## the tests, with the 20 slowest
	$(BIN)/python -m pytest

test-full: $(STAMP) ## the tests and the larger products of cases
	$(BIN)/python -m pytest -m "full or not full"

check: $(STAMP) ## linter, formatter and type checker, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

fmt: $(STAMP) ## format the code, sort imports, apply the linter's safe fixes
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: $(STAMP) ## start of the command line, the fused kernels beside eager code, the rewards that need no weights
	$(BIN)/python scripts/bench_cli.py
	$(BIN)/python scripts/bench_kernels.py
	$(BIN)/python scripts/bench_rewards.py

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'flowrl-img needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

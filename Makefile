# `make` lists the targets. Everything runs inside .venv, which `make setup` creates on first use.

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.stamp
# Twice quiet: errors are shown, an index's warnings are not.
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
LOCKS := requirements/build.txt requirements/all.txt
# Without a hash: the same version is another file for each kind of processor. What CUDA needs, torch pins itself.
TORCH := $(shell grep '^torch==' constraints.txt)
# A file's tests stay in one process: some share a server.
PARALLEL := -n logical --maxprocesses 4 --dist loadfile
# A test that hangs shows where it does, and ends the run.
HANGS := -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true
BENCHMARKS = $(sort $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py)))

.DEFAULT_GOAL := help
.PHONY: help setup vllm verl demo test test-slow check bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  ARGS="..." is appended to the command of demo, test and test-slow; PYTHON=... chooses the interpreter of .venv'

setup: $(STAMP) ## make .venv with the pinned packages, if it is not up to date
	@echo ".venv is ready."

$(STAMP): pyproject.toml constraints.txt $(LOCKS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Headrace needs Python 3.11 or later, and $(PYTHON) is missing or older; try: make setup PYTHON=python3.11" >&2; exit 1; }
	@echo "Installing Headrace and its pinned packages into .venv: about a minute, or several with the CUDA build of torch ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@for lock in $(LOCKS); do \
	  $(PIP) install --no-compile --require-hashes --no-deps --no-build-isolation -r $$lock || exit 1; done
	@$(PIP) install --no-compile -c constraints.txt $(TORCH)
	@$(PIP) install --no-compile --no-deps --no-build-isolation -e .
	@$(PIP) check
	@# Compiling all of torch and transformers takes half a minute; compile only what a run imports.
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import peft, pytest, torch; from transformers import LlamaForCausalLM'
	@touch $@

vllm: $(STAMP) ## make .venv-vllm with vLLM's CPU build, for engine.name = "vllm" without a GPU
	@$(BIN)/python benchmarks/_environments.py vllm

verl: $(STAMP) ## make .venv-verl with verl and Headrace, for backend.name = "verl"
	@$(BIN)/python benchmarks/_environments.py verl

demo: $(STAMP) ## train the small countdown example
	$(BIN)/headrace train examples/countdown.toml $(ARGS)

test: $(STAMP) ## run the tests that take seconds
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL) $(HANGS) $(ARGS)

test-slow: $(STAMP) ## run the tests that take minutes
	$(BIN)/python -m pytest -m slow $(ARGS)

check: $(STAMP) ## lint, format, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

bench: $(STAMP) ## run every benchmark in its quick form
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script --quick; done

clean: ## remove caches and build output (keeps .venv and runs/)
	rm -rf build dist .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# make demo and make test need only python3 (3.11 or newer), pip and make.
# Options: PYTHON=python3.12   VENV=.venv-other   ARGS="flags for the command that is run"
# make test-peers: PIP_ARGS="torch==2.13.0", say, in the place of the newest build for CPUs

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
EXTRAS ?= test,examples
PIP_ARGS ?= --extra-index-url https://download.pytorch.org/whl/cpu

BIN = $(VENV)/bin
# Python compiles a file when it is first imported; pip would compile all files of all packages.
INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile

.DEFAULT_GOAL := help
.PHONY: demo test test-all test-peers soak test-gpu mutants lint bench gpu bench-float8 aot docs clean help

demo: $(VENV)/.ready ## train a small language model in six precisions and compare them
	$(BIN)/python -m ampx.examples.language_model $(ARGS)

PYTEST = $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.ready ## run the tests but for the slow ones: unit tests, doctests, a notebook
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(VENV)/.ready ## run all tests: the slow ones too (every notebook, many processes, kernels)
	$(PYTEST) $(ARGS)

test-peers: $(VENV)/.ready-torch ## run the programs of other libraries, torch's too; installs torch
	$(PYTEST) tests/peers $(ARGS)

mutants: $(VENV)/.ready ## put faults into the library, one at a time: each must fail a test
	$(BIN)/python tests/mutants.py $(ARGS)

soak: $(VENV)/.ready ## put 100,000 faults into training, and see that nothing comes of them
	$(BIN)/python tests/soak.py $(ARGS)

test-gpu: $(VENV)/.ready-cuda ## run the tests that need an NVIDIA GPU; installs CUDA's libraries
	JAX_PLATFORMS=cuda,cpu $(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(VENV)/.ready-lint ## check formatting, lint rules and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

bench: $(VENV)/.ready ## time ampx against plain optax
	$(BIN)/python -m benchmarks $(ARGS)

# Where PYTHON has all that is needed nothing is installed, so that no network is needed either.
gpu: ## on an NVIDIA GPU: tests, and all benchmarks that need one, in 8 minutes
	@if $(PYTHON) -c 'import chex, flax, hypothesis, jax_plugins, optax, pytest' 2>/dev/null; \
	then python=$(PYTHON); \
	else $(MAKE) $(VENV)/.ready-cuda $(VENV)/.ready-torch && python=$(BIN)/python; fi && \
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cuda,cpu} "$$python" -m benchmarks.gpu $(ARGS)

bench-float8: $(VENV)/.ready-cuda ## on a GPU, time products in float8 and look for them in a profile
	JAX_PLATFORMS=cuda,cpu $(BIN)/python -m benchmarks.float8 $(ARGS)

aot: $(VENV)/.ready ## count what compilers make of fused updates and float8; see benchmarks/aot.py
	$(BIN)/python -m benchmarks.aot $(ARGS)

docs: $(VENV)/.ready-docs ## build docs/_build/html; warnings are errors
	$(BIN)/sphinx-build -q -E -W -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean: ## remove environments, caches and built files
	rm -rf .venv .venv-newest build dist docs/_build docs/jupyter_execute
	rm -rf .hypothesis .jax_cache .pytest_cache .ruff_cache
	find ampx benchmarks docs tests -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "ampx needs Python 3.11 or newer, but PYTHON=$(PYTHON) is:" \
	    "$$($(PYTHON) --version 2>&1 || true)" >&2; \
	  echo "Name a newer one, for example: make test PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: its venv or ensurepip module is" \
	    "missing (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version); the first time takes a minute or two."
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e ".[$(EXTRAS)]"
	@touch $@

# What tests, lint and docs need, by one call of pip, which takes less time than three.
$(VENV)/.ready-dev: pyproject.toml
	@$(MAKE) --no-print-directory --what-if=pyproject.toml $(VENV)/.ready EXTRAS=dev
	@touch $(VENV)/.ready-lint $(VENV)/.ready-docs $@

$(VENV)/.ready-lint: $(VENV)/.ready
	@$(INSTALL) -e ".[lint]"
	@touch $@

# From the package index alone, torch for Linux would bring gigabytes of CUDA.
$(VENV)/.ready-torch: $(VENV)/.ready
	@$(INSTALL) -e ".[torch]" $(PIP_ARGS)
	@touch $@

$(VENV)/.ready-cuda: $(VENV)/.ready
	@$(INSTALL) -e ".[cuda]"
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	@$(INSTALL) -e ".[docs]"
	@touch $@

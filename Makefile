# `make` lists the targets. Everything runs in .venv, which the targets make by themselves.
SHELL := /bin/bash
VENV ?= $(CURDIR)/.venv
RANKS ?= 2
PYTEST ?=
SOAK ?=
# Three test processes for two cores, because many tests mostly wait; beyond 16 the longest test sets the time. Without
# env -u, nproc would return OMP_NUM_THREADS or OMP_THREAD_LIMIT.
TESTERS ?= $(shell cores=$$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc); echo $$((cores < 11 ? (3 * cores + 1) / 2 : 16)))
RUN_TESTS = PYTHONUTF8=1 PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
	$(VENV)/bin/python -m pytest -n $(TESTERS)
export VENV

.DEFAULT_GOAL := help
.PHONY: help setup test test-all demo soak docs check clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: ## make .venv: Python packages, MPI, Horovod (HOROVOD=no: without these two; PYTHON=, TORCH=, CXX= choose others)
	@jobs/setup.sh

test: setup ## run all but the longest tests (PYTEST="-k shift" narrows them, TESTERS=1 takes one at a time)
	@tests/install.sh $(VENV)/bin/python slurm timm transformers flux
	$(RUN_TESTS) -m "not nightly" $(PYTEST)

test-all: setup ## run all tests, those marked nightly too
	@tests/install.sh $(VENV)/bin/python slurm timm transformers flux pbs chromium
	$(RUN_TESTS) $(PYTEST)

demo: setup ## generate videos, train TSM and its 2D twin on RANKS=2 ranks, evaluate, draw the report
	@jobs/demo.sh $(RANKS)

soak: setup ## train 2,000 tiny steps under a fault a minute of ten kinds; 20 to 60 minutes (SOAK="--seed 1" adds options)
	$(VENV)/bin/python -m tests.soak $(SOAK)

docs: setup ## build the pages as a site, build/docs/index.html; a dead link is an error
	$(VENV)/bin/python -m sphinx -E -W --keep-going -q -d build/doctrees docs build/docs

check: docs ## lint, format, types and the pages
	$(VENV)/bin/ruff check --config .ci/ruff.toml .
	$(VENV)/bin/ruff format --check --config .ci/ruff.toml .
	$(VENV)/bin/mypy --config-file setup.cfg --strict summit_train

clean: ## remove .venv, the demo's output and what tools left; runs/ and the cached wheels stay
	rm -rf $(VENV) build demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find summit_train tests bench papers -name __pycache__ -type d -prune -exec rm -rf {} +

# Everything a person needs: `make demo` to see it, `make test` to check it. Both set themselves up.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MINUTES ?= 10
SEED   ?=
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint bench soak fuzz docs clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

# Two steps, so that the demo need not wait for documentation tools. torch comes first and alone: which build it is
# (CPU or CUDA) is decided by pip's own configuration, and nothing that follows may change it.
$(VENV)/.base: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: Python %d.%d is too old, keepstep needs 3.11 or newer\nhelp: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[server,torch,checkpoint,diagnose]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[server,torch,checkpoint,diagnose,dev]'
	@touch $@

setup: $(VENV)/.dev ## make .venv with everything for development

demo: $(VENV)/.base ## four nodes, six faults, one proof: under two minutes, no GPU
	$(BIN)/keepstep demo $(DEMO_ARGS)

test: $(VENV)/.dev ## all tests, real processes included
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev ## static checks only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.dev ## build the documentation, warnings are errors
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

check: lint docs test ## what a change has to pass

bench: $(VENV)/.dev ## the numbers in the README, as JSON lines
	$(BIN)/python -m benchmarks.recovery --fault kill --json
	$(BIN)/python -m benchmarks.overhead --json
	$(BIN)/python -m benchmarks.abort --json
	$(BIN)/python -m benchmarks.checkpoint --size-mb 1024 --json
	$(BIN)/python -m benchmarks.checkpoint_overhead --json
	$(BIN)/python -m benchmarks.delta --json
	$(BIN)/python -m benchmarks.replication --size-mb 1024 --json
	$(BIN)/python -m benchmarks.localise --json
	$(BIN)/python -m benchmarks.replay --json
	$(BIN)/python -m benchmarks.diagnosis --json

soak: $(VENV)/.dev ## random faults and pauses for MINUTES=10
	$(BIN)/python tests/soak/soak.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --json

fuzz: $(VENV)/.dev ## broken logs for `keepstep explain` for MINUTES=10
	$(BIN)/python tests/fuzz/explain.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

clean: ## remove what was built here (the virtual environment too)
	rm -rf $(VENV) docs/_build build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

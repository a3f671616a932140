# make test      quick tests           make demo    trains the example on 4 processes, prints a sample
# make test-all  slow tests too        make lint    ruff and mypy
#
# Each target makes its own virtual environment and keeps it; `make clean` removes them.
# PYTHON=python3.12 picks another Python, VENV=path another place for the environment.

SHELL := /bin/bash
PYTHON ?= python3
# Installed first and by its number: wherever pip is told of a CPU build it takes that one.
TORCH := torch==2.13.0
OMP_NUM_THREADS ?= 1
# Files of tests that run at a time; most start two to four processes of their own.
WORKERS ?= 2

TEST_VENV := $(or $(VENV),.venv-test)
DEMO_VENV := $(or $(VENV),.venv-demo)
TEST_READY := $(TEST_VENV)/.ready-test
DEMO_READY := $(DEMO_VENV)/.ready-demo

# $(call install,venv,extras): what is complete is kept, what was interrupted is completed.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet $(TORCH)
	$(1)/bin/python -m pip install --quiet -c constraints.txt -e '.[$(2)]'
endef

.PHONY: test test-all lint demo clean

test: $(TEST_READY)
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(TEST_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not gpu"

test-all: $(TEST_READY)
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(TEST_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not gpu"

lint: $(TEST_READY)
	$(TEST_VENV)/bin/python -m ruff check .
	$(TEST_VENV)/bin/python -m ruff format --check .
	$(TEST_VENV)/bin/python -m mypy

demo: $(DEMO_READY)
	$(DEMO_VENV)/bin/lnn-lightning fit --config configs/gpt_pipeline.yaml
	$(DEMO_VENV)/bin/python -m examples.generate runs/gpt

$(TEST_READY): pyproject.toml constraints.txt
	$(call install,$(TEST_VENV),test)
	@touch $@

$(DEMO_READY): pyproject.toml constraints.txt
	$(call install,$(DEMO_VENV),examples)
	@touch $@

clean:
	rm -rf .venv-test .venv-demo

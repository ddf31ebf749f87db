# PYTHON names the interpreter that .venv is made with: make demo PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROJECT := pyproject.toml constraints.txt

.PHONY: help demo test check fix gpu-check
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/installed  ## the main job: a strategy against plain decoding, on a real model
	$(BIN)/decodelab run task.limit=10 task.max_new_tokens=48 drafting.per_match=null

test: $(VENV)/installed-test  ## the tests
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile

check: $(VENV)/installed-test  ## ruff, mypy and the layers; edits nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	cd $(VENV)/src && ../bin/mypy --config-file decodelab/pyproject.toml --package decodelab
	$(BIN)/lint-imports

fix: $(VENV)/installed-test  ## what ruff can repair
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

gpu-check: $(VENV)/installed  ## kernels and models on the GPU, against its bars; eight minutes
	$(BIN)/python -m decodelab.experiments.gpu_check

# Stamps: nothing is installed again until $(PROJECT) change.
$(VENV)/installed: $(PROJECT) | $(BIN)/pip
	@echo "installing decodelab into $(VENV) (a minute or two the first time)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/installed-test: $(PROJECT) | $(BIN)/pip
	@echo "installing decodelab and its tests' tools into $(VENV) (a minute or two the first time)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	@mkdir -p $(VENV)/src && ln -sfn ../.. $(VENV)/src/decodelab  # mypy sees the package under its name
	@touch $@ $(VENV)/installed

$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "decodelab needs Python 3.11 or newer, and there is no '$(PYTHON)' here; make PYTHON=... names one" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "decodelab needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1); make PYTHON=... names another" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)

# make            install into .venv, with .venv/bin/sordino
# make demo       DP-SGD and λCGD under one budget, with a picture
# make test       the ordinary tests and the doctests, under ten minutes
# make test-all   the slow ones too
# make test-gpu   the tests that need a CUDA device, with the interpreter that has CUDA torch
# make lint       ruff and mypy
# make wheel      dist/sordino-*.whl

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
EXTRAS  ?= dev,text
WORKERS ?= 2
# One thread a worker: two workers on two cores must not fight over them.
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := install
.PHONY: install demo test test-all test-gpu lint format wheel clean

install: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
	@echo "Sordino is in $(VENV); try: $(BIN)/sordino --help"

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(PYTEST) -q -n $(WORKERS)

test-all: $(STAMP)
	$(PYTEST) -q -n $(WORKERS) -m "not gpu"

test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -q -m gpu tests

lint: $(STAMP)
	$(BIN)/ruff check src tests examples benchmarks experiments
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix src tests examples benchmarks experiments
	$(BIN)/ruff format src tests examples benchmarks experiments

wheel: $(STAMP)
	$(BIN)/python -m pip wheel --disable-pip-version-check -q --no-deps -w dist .
	@ls dist/*.whl

clean:
	rm -rf dist build .pytest_cache .ruff_cache .mypy_cache .hypothesis

# Two commands: `make quickstart` and `make test`. Each sets up what it needs and repeats nothing.
SHELL := /bin/sh
VENV ?= .venv
# The first Python of at least 3.11 on this machine.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
RUN ?= runs/quickstart

.PHONY: help quickstart test attack lint format docs dist clean
help:
	@echo "make quickstart   pretrain on the built-in data set and evaluate (run directory: $(RUN))"
	@echo "make test         lint, type checks and the whole test suite"
	@echo "make attack       all attacks on the command line and the readers (an hour)"
	@echo "make lint         lint and type checks only"
	@echo "make format       format the code"
	@echo "make docs         build the documentation as a site in build/site, with links checked"
	@echo "make dist         build wheel and sdist in dist/, and try each in a new environment"
	@echo "make clean        remove the virtual environment and caches"

quickstart: $(VENV)/.core
	$(BIN)/momentum2 pretrain quickstart --out $(RUN)
	$(BIN)/momentum2 evaluate knn $(RUN)

# As many tests at a time as there are cores, each with one thread: most of them wait for processes that they start.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

attack: $(VENV)/.dev
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python tests/attack/run.py
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python tests/attack/fuzz.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open build/site/index.html"

dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	for file in dist/*.whl dist/*.tar.gz; do .ci/smoke $(BIN)/python $$file || exit; done

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The stamps are newer than what they were made from, so nothing is installed twice, and once
# installed nothing needs the network.
$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.core

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "momentum2 needs Python 3.11 or newer: install it, or say make PYTHON=/path/to/python3"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# make demo and make test need nothing before them but Python 3.11, pip and a package index.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

DEVICE ?= cpu

.PHONY: demo setup check test process golden bench all clean

demo: $(READY)
	$(BIN)/atoll run demo

setup: $(READY)

# torch goes first and alone, so that nothing pulls another build of it.
$(READY): constraints.txt pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,check]'
	touch $(READY)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(READY)
	$(BIN)/pytest -q -n 2

process: $(READY)
	$(BIN)/pytest -q -m process

golden: $(READY)
	ATOLL_GOLDEN=renew $(BIN)/pytest -q tests/golden

bench: $(READY)
	$(BIN)/python bench/steps.py --device $(DEVICE)

all: check test process

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

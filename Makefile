# make demo and make test need nothing before them but Python 3.11, pip and a package index.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO = $(eval DEMO := runs/demo-$(shell n=1; while [ -e runs/demo-$$n ]; do n=$$((n+1)); done; echo $$n))$(DEMO)

DEMOS := demo demo-vertical demo-text demo-models
DEVICE ?= cpu

.PHONY: demo setup extras check test process browser picture golden bench all clean

demo: $(READY)
	for name in $(DEMOS); do $(BIN)/atoll run $$name --out "$(DEMO)/$$name" || exit 1; done
	$(BIN)/atoll report $(addprefix "$(DEMO)"/,$(DEMOS)) --out "$(DEMO)/report.html"

setup: $(READY)

# torch goes first and alone, so that nothing pulls another build of it.
$(READY): constraints.txt pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,check,psi]'
	touch $(READY)

# What only some people need: trackers and ONNX. Their tests are skipped without it.
extras: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[track,onnx]'

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(READY)
	$(BIN)/pytest -q -n 2

process: $(READY)
	$(BIN)/pytest -q -m process

browser: $(READY)
	$(BIN)/pytest -q -m browser

# The pictures in the documents: the demo with three seeds beside the method alone, and a run that
# is watched, in a real browser.
picture: $(READY)
	docs/picture.sh "$(BIN)/atoll" docs

golden: $(READY)
	ATOLL_GOLDEN=renew $(BIN)/pytest -q tests/golden tests/unit/test_errors_page.py

bench: $(READY)
	$(BIN)/python bench/steps.py --device $(DEVICE)

all: check test process browser

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

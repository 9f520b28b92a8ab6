# make demo   train at every level, print a table and draw demo.png; make demo EXAMPLE=paper runs another of examples/,
#             ARGS goes to it. In .venv-demo, which holds what the examples need and nothing else
# make lint   ruff check, ruff format --check, mypy --strict
# make test   everything that must hold: lint, types, tests (a process for each core, so one thread in each), make sim
# make sim    the tests of devices on a simulated one, which g++ builds at first; skipped, with the reason, without g++
# make unit   the tests of one wing, less the slow ones: make unit T=casting
# make fuzz   training scripts drawn at random, against the same by hand: make fuzz COUNT=2000 FIRST=0; SEED=17 prints one;
#             KIND=takeover draws scripts with torch.autocast, or without, under lists of amp_patch.native
# make test-torch TORCH=2.6.0   the tests with another torch, in .venv-torch-2.6.0; T=training takes one wing, and
#             PYTHON=python3.12 another Python, for which other packages are not pinned
# make soak   thousands of steps, sessions and interrupts in one process: nothing may have grown
# make test-clients  the tests with real trainers. In .venv-clients
# make test-examples  every example as a reader runs it, each to its end, and the tests of qlora. In .venv-demo
# make docs   the pages of docs/ as a site, in site/; a warning is an error. In .venv-docs, without torch
# make bench  overhead and step times; BENCH_ARGS goes to the step benchmark
#
# Most use .venv. An environment is made on the first run and installed into again only when a requirement changed.
# REPORTS=FOLDER has test, test-clients and test-examples write what became of each test, for tools/skipped.py.

PYTHON ?= python3
# another torch than the pinned one, and the environment for it
TORCH ?=
OTHER_PYTHON := $(and $(TORCH),$(filter-out python3,$(notdir $(PYTHON))))
VENV := .venv$(if $(TORCH),-torch-$(TORCH))$(OTHER_PYTHON:%=-%)
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
EXAMPLE ?= digits
ARGS ?=
# tests that share what is slow to start go to one process
PYTEST_ARGS ?= --numprocesses auto --dist loadgroup
BENCH_ARGS ?=
REPORTS ?=
report = $(if $(REPORTS),--junitxml=$(REPORTS)/$(1).xml)
CHECK_PYTHON := $(if $(OTHER_PYTHON),: )$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "the pinned requirements need Python 3.11: make PYTHON=python3.11")'

.PHONY: demo docs fuzz lint sim soak test unit test-torch test-clients test-examples bench install

demo: .venv-demo/.installed $(if $(filter qlora,$(EXAMPLE)),.venv-demo/.installed-qlora)
	.venv-demo/bin/python examples/$(EXAMPLE).py --plot demo.png $(ARGS)

# --constraint keeps to the versions of the tests
.venv-demo/.installed: requirements-dev.txt setup.py pyproject.toml
	$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip install --quiet --constraint requirements-dev.txt --editable ".[examples]"
	touch $@

.venv-demo/.installed-qlora: requirements-qlora.txt .venv-demo/.installed
	.venv-demo/bin/python -m pip install --quiet --constraint requirements-dev.txt --requirement requirements-qlora.txt
	touch $@

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict amp_patch

test: lint sim
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS) $(call report,test)

# processes of its own: the device cannot be unregistered. Few interrupts, which hit code of the host
sim: $(STAMP)
	AMP_PATCH_DEVICE=sim AMP_PATCH_INTERRUPTS=25 OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS) $(call report,sim) tests/devices tests/training tests/session \
		tests/apex/test_apex_amp.py tests/apex/test_apex_fp16_utils.py

unit: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS) -m "not slow" tests/$(or $(T),config)

fuzz: $(STAMP)
	$(PY) tests/support/run_programs.py --kind $(or $(KIND),training) $(if $(SEED),$(SEED),--count $(or $(COUNT),2000) --first $(or $(FIRST),0))

test-torch: $(STAMP)
	$(if $(TORCH),,$(error say which torch: make test-torch TORCH=2.6.0))
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS) tests/$(T)

soak: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) tests/soak/soak.py $(ARGS)

# without MKL_CBWR, a product's last bits depend on where in memory its operands are, and so does a training that is
# resumed
test-clients: .venv-clients/.installed
	OMP_NUM_THREADS=1 MKL_CBWR=COMPATIBLE .venv-clients/bin/python -m pytest $(PYTEST_ARGS) $(call report,clients) \
		tests/clients

test-examples: .venv-demo/.installed-tests
	OMP_NUM_THREADS=1 .venv-demo/bin/python -m pytest $(PYTEST_ARGS) $(call report,examples) \
		tests/examples/test_qlora.py tests/examples/whole_examples.py

.venv-demo/.installed-tests: requirements-tests.txt .venv-demo/.installed-qlora
	.venv-demo/bin/python -m pip install --quiet --requirement requirements-tests.txt
	touch $@

.venv-clients/.installed: requirements-clients.txt requirements-tests.txt requirements-dev.txt setup.py pyproject.toml
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --no-compile --requirement requirements-clients.txt
	.venv-clients/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.installed: requirements-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --requirement requirements-docs.txt
	touch $@

bench: $(STAMP)
	$(PY) benchmarks/overhead.py
	$(PY) benchmarks/step.py $(BENCH_ARGS)

install: $(STAMP)

$(STAMP): requirements-dev.txt setup.py pyproject.toml | $(PY)
	sed -E '$(if $(OTHER_PYTHON),/^torch==/!s/==.*//;)$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' requirements-dev.txt > $(VENV)/requirements.txt
	$(PY) -m pip install --quiet --requirement $(VENV)/requirements.txt
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(PY):
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)

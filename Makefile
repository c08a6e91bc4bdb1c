PYTHON ?= python3
# Extra arguments for the first pip step, e.g. to point it at PyTorch's index of CPU or CUDA builds.
TORCH_ARGS ?=
# Real checkpoints and text for the evidence. The report lists the parts that were replaced or left out without them.
DATA ?= ../shared/data
# Number of training runs at a time.
JOBS ?= 2
# Options of a campaign, for example --parts 1 2 3.
ARGS ?=
BIN := .venv/bin
# Tests of launches, ranks and hangs spend much of their time waiting, so three workers keep two cores busy.
WHOLE_SUITE := pytest tests -n 3 --dist loadfile --no-loadscope-reorder
# DeepSpeed compiles its operations when they are first used, not at installation.
export DS_BUILD_OPS := 0

.DEFAULT_GOAL := help
.PHONY: $(shell grep -oE '^[a-z][a-z -]*:' $(MAKEFILE_LIST) | tr -d :)

help: ## this list
	@grep -hE '^[a-z][a-z -]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 28

setup: .venv/ready ## .venv with the exact versions of requirements.lock

# pip installs torch first and separately, because this step chooses between the CPU and the CUDA build. Each build has
# different hashes, and the lock does not have those from TORCH_ARGS, so this step checks no hashes. pip checks all other
# packages against the lock, which has the hashes of the files for every platform. The lock is complete, so pip resolves
# nothing (--no-deps): OpenICL's version limits would contradict it. setuptools builds the source packages. pip
# compiles no modules: Python compiles the few that are used at their first import. Packages and project are separate
# targets, so that an image keeps them in separate layers.
.venv/packages: requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	awk '/^[^ #]/ { on = /^setuptools==/ } on' requirements.lock > .venv/setuptools.lock
	$(BIN)/pip install --quiet --no-compile --require-hashes --no-deps -r .venv/setuptools.lock
	$(BIN)/pip install --quiet --no-compile $(TORCH_ARGS) $$(grep -o '^torch==[^ ]*' requirements.lock)
	$(BIN)/pip install --quiet --no-compile --require-hashes --no-deps --no-build-isolation -r requirements.lock
	touch $@

.venv/ready: .venv/packages pyproject.toml
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# A separate environment, because the project does not need these tools or their dependencies.
build/tools/ready:
	$(PYTHON) -m venv build/tools
	build/tools/bin/pip install --quiet uv==0.13.9 pip-audit==2.10.1
	touch $@

# Locked versions stay as long as they satisfy pyproject.toml.
lock: build/tools/ready ## update versions and hashes; ARGS=--upgrade takes the newest
	echo openicl | build/tools/bin/uv pip compile --quiet --output-file requirements.lock $(ARGS) pyproject.toml -

audit: setup build/tools/ready ## known vulnerabilities of the locked versions
	$(BIN)/python -m tests.campaigns.audit build/tools/bin

quickstart: setup ## the whole product on a laptop, in minutes
	$(BIN)/python launch/quickstart.py

quickstart-test: setup ## the quickstart, undisturbed and killed repeatedly; half an hour
	$(BIN)/python -m tests.campaigns.quickstart

test: setup lint ## lint, types, tests
	$(BIN)/python -m $(WHOLE_SUITE)

# Unit tests of the packages that changed since the last commit and of the readers of their files, without launches. It
# ends within 90 seconds and prints how many tests it had no time for.
test-fast: setup ## unit tests of what changed since the last commit, within 90 seconds
	$(BIN)/python -m pytest $$($(BIN)/python -m tests.helpers.changed) -n 2 --dist loadfile --no-loadscope-reorder -m "not launch and not slow" --within 70

data: setup ## real files for tests and benches, from the hub
	$(BIN)/python -m tests.helpers.public_data data

reference: setup ## docs/reference/recipe.md and the JSON schema of recipes
	$(BIN)/python -m tests.helpers.reference

report-picture: setup ## docs/report.png, the picture in README.md; needs Chromium or Chrome
	$(BIN)/python -m tests.helpers.picture

docs: setup ## the documentation as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

coverage: setup ## which lines the tests run
	$(BIN)/coverage erase
	$(BIN)/coverage run -m $(WHOLE_SUITE)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report --skip-covered

lint: setup ## check style, imports and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy

format: setup ## fix what lint can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## side-by-side measurements
	missed=0; for name in tests/bench/[!_c]*.py; do $(BIN)/python -m tests.bench.$$(basename $$name .py) || missed=1; done; exit $$missed

equality: setup ## compare rows, losses, exports and predictions with the stored ones
	$(BIN)/python -m tests.campaigns.equality $(ARGS)

mutants: setup ## change 120 lines one at a time; the suite must fail for each
	$(BIN)/python -m tests.campaigns.mutants $(ARGS)

soak: setup ## 20 kills, 20 damaged saves
	$(BIN)/python -m tests.campaigns.soak

judge-test: setup ## 20 kills of answering and judging
	$(BIN)/python -m tests.campaigns.judging

cluster-test: setup ## two hosts, 32 nodes that fail in turn, and a Slurm, on this machine
	$(BIN)/python -m tests.campaigns.cluster $(ARGS)

template-test: setup ## every chat template that TRL ships, compared with apply_chat_template
	$(BIN)/python -m tests.campaigns.templates $(ARGS)

image-test: setup ## build the image without Docker and run it as a user without privileges; needs root on Debian
	$(BIN)/python -m tests.campaigns.image $(ARGS)

trl-test: setup ## the loss in the oldest supported version of TRL; needs a package index
	$(BIN)/python -m tests.campaigns.oldest_trl $(ARGS)

export-test: setup ## exports of every family, read by transformers 4 and gguf; needs a package index
	$(BIN)/python -m tests.campaigns.exports $(ARGS)

docs-test: setup ## every command of README.md and docs/, run or checked; ARGS="--only text-to-report" is one page
	$(BIN)/python -m tests.campaigns.docs $(ARGS)

gpu-test: setup ## all checks that need one GPU, the most important first; ARGS="--within 480", or --quick on a CPU
	$(BIN)/python -m tests.campaigns.gpu $(ARGS)

gpu-bundle: setup ## gpu-test for a machine with Python and PyTorch but no package index, in build/gpu-bundle
	$(BIN)/python -m tests.campaigns.gpu_bundle $(ARGS)

fuzz: setup ## damaged files for every parser; ARGS="--seconds 60 --only recipe" is a short run
	$(BIN)/python -m tests.campaigns.fuzz $(ARGS)

evidence evidence-full: setup ## does EMO help, and why? An hour on 2 cores; evidence-full has no limit
	$(BIN)/python -m emo.experiments.evidence experiments/configs/$@.yaml names.data=$(DATA) --jobs $(JOBS)

real: setup ## a real model of 135M parameters, continued with MLE and EMO and scored on eight tasks; an hour on 2 cores
	$(BIN)/python -m emo sweep experiments/configs/real.yaml names.data=$(DATA)
	$(BIN)/python -m emo report runs/real/results

clean: ## remove build files; results under runs/ stay
	rm -rf build dist *.egg-info

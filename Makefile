# What a person does here. `make help` lists it; each target sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where there is no NVIDIA GPU the CPU build of torch serves: a tenth of the download.
CPU_TORCH := torch==2.13.0
HAS_GPU := $(wildcard /proc/driver/nvidia/version)
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
SERVE_FLAGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test kill-storm lint fix docs bench gpu-test wheels

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 14

setup: $(VENV)/installed ## make .venv and install hotstart into it, editable

demo: $(VENV)/installed ## fetch a real small model, serve it, show the start, stream one answer, stop
	@$(BIN)/python scripts/demo.py

serve: $(VENV)/installed ## the same model, kept running: make serve SERVE_FLAGS="--port 9000"
	@$(BIN)/python scripts/demo.py --serve $(SERVE_FLAGS)

# A file stays with one worker, so that what its tests share is started once; in the order of the
# folders, because the files with the most tests are not those that take longest.
test: $(VENV)/dev ## the whole test suite, by two workers
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -rs

kill-storm: $(VENV)/dev ## 200 starts, each ended by a kill of either process at a random moment: what is left?
	@$(BIN)/python scripts/kill_storm.py --kills 200

lint: $(VENV)/dev ## format, lint, types, generated docs, sizes, leftovers, age of the README's start
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/python scripts/generate_docs.py --check
	@$(BIN)/python scripts/lint_size.py
	@$(BIN)/python scripts/lint_leftovers.py
	@$(BIN)/python scripts/lint_timeline.py

fix: $(VENV)/dev ## format, and repair what the linter can
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

docs: $(VENV)/dev ## write the generated pages again
	@$(BIN)/python scripts/generate_docs.py

bench: $(VENV)/dev ## start of the demo model against the floor; decode against transformers
	@$(BIN)/python scripts/demo.py --prepare
	@$(BIN)/python benchmarks/run.py

gpu-test: $(VENV)/dev ## the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu

wheels: $(VENV)/dev ## sdist and wheel into dist/
	@rm -rf dist && $(BIN)/python -m hatchling build -d dist

# pip 25.1 brought --group; a new venv may hold an older one.
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "hotstart needs Python 3.10 to 3.13: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "the venv module is incomplete: apt install python3-venv" >&2; exit 1; }
	@echo "installing into $(VENV)"
	@$(PIP) install 'pip>=25.1'
	@$(PIP) install $(if $(HAS_GPU),,$(CPU_TORCH)) --editable .
	@touch $@

$(VENV)/dev: $(VENV)/installed
	@echo "installing the development tools into $(VENV)"
	@$(PIP) install --group dev $(if $(HAS_GPU),,$(CPU_TORCH))
	@touch $@

# The commands of this project; `make help` lists them.
PYTHON     ?= python3
TORCH_SPEC ?= torch==2.13.0
# On Linux without a GPU's driver, torch's build for the CPU: the other one brings gigabytes of CUDA libraries. If its index cannot be
# reached, setup takes the build that pip finds.
GPUS := $(wildcard /dev/nvidia0 /dev/dxg /dev/kfd)
ifeq ($(shell uname -s)$(GPUS),Linux)
TORCH_ARGS ?= --retries 1 --index-url https://download.pytorch.org/whl/cpu
OR_ELSE    := $(if $(filter file,$(origin TORCH_ARGS)),yes)
endif
TEST_JOBS  ?= 2
VENV       := .venv
EXTRAS     := dev
BIN        := $(VENV)/bin
FORMAT     := $(BIN)/black --quiet --line-length 110 hwfsdp tests benchmarks

unexport PYTHONDONTWRITEBYTECODE  # bytecode saves time: thousands of processes import the package

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all notebooks docs clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

# The stamp records the chosen torch, so that `make setup` installs again if TORCH_SPEC or TORCH_ARGS has changed.
STAMP := $(VENV)/.installed
CHOICE := $(TORCH_SPEC) $(TORCH_ARGS)
IS_NEW := import sys; sys.exit(sys.version_info < (3, 11))

setup: $(STAMP)  ## make .venv with torch, the package (editable) and its tools

$(STAMP): setup.cfg pyproject.toml $(if $(findstring [$(CHOICE)],[$(shell cat $(STAMP) 2>/dev/null)]),,force)
	@$(BIN)/python -c '$(IS_NEW)' 2>/dev/null && $(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	    command -v "$(PYTHON)" >/dev/null || \
	        { echo "hwfsdp needs Python 3.11 or newer; there is no $(PYTHON). Try: make setup PYTHON=python3.12" >&2; exit 1; }; \
	    "$(PYTHON)" -c '$(IS_NEW)' || \
	        { echo "hwfsdp needs Python 3.11 or newer; $(PYTHON) is older. Try: make setup PYTHON=python3.12" >&2; exit 1; }; \
	    "$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || \
	        { echo "hwfsdp needs the modules venv and ensurepip; $(PYTHON) has not both. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	    "$(PYTHON)" -m venv --clear $(VENV); }
	@echo "Installing $(TORCH_SPEC), the package and its tools; this takes minutes."
	$(BIN)/python -m pip install --quiet $(TORCH_ARGS) "$(TORCH_SPEC)"$(if $(OR_ELSE), || $(BIN)/python -m pip install --quiet "$(TORCH_SPEC)")
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	@$(BIN)/python -c 'from hwfsdp.cli.doctor import installed; print(installed())'
	@printf '%s' "$(CHOICE)" > $(STAMP)

.PHONY: force
force:

# It writes results and figures to runs/demo/.
demo: setup  ## train a GPT with hwfsdp, with FSDP2 and unsharded, and compare
	$(BIN)/python -m hwfsdp demo

test: setup  ## run the tests, TEST_JOBS files at a time
	$(BIN)/python -m pytest -m "not long" --numprocesses $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

# In this run, torch compares every collective of a rank with those of the others.
test-all: setup  ## run all tests, the long ones too
	TORCH_DISTRIBUTED_DEBUG=DETAIL $(BIN)/python -m pytest --numprocesses $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: check exercises worth format lock bench clients gpu

check: setup  ## check lint, types, format, imports, public names, versions and exercises
	$(BIN)/python -m flake8 hwfsdp tests benchmarks
	$(BIN)/python -m mypy
	$(FORMAT) --check
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_public_api.py tests/test_lock_file.py
	$(BIN)/python -m hwfsdp.course.stages check
	$(BIN)/python -m hwfsdp.course.lab check

exercises: setup  ## write starters from solutions, the lab's seals, and pictures
	$(BIN)/python -m hwfsdp.course.stages write
	$(BIN)/python -m hwfsdp.course.lab write
	$(BIN)/python docs/exercise_pictures/draw.py

format: setup  ## rewrite the sources in the project's format
	$(FORMAT)

# It needs uv. The file has versions only, so it holds for every package index.
lock:  ## write the newest allowed version of each package into requirements.lock
	uv pip compile pyproject.toml --universal --extra dev --upgrade --no-annotate --no-header --quiet --output-file requirements.lock

worth: setup  ## measure what each test is worth (docs/testing.md); takes hours
	$(BIN)/python tests/support/mutation_testing.py time
	$(BIN)/python tests/support/mutation_testing.py draw --count 20 --seed 3
	$(BIN)/python tests/support/mutation_testing.py run
	$(BIN)/python tests/support/mutation_testing.py show

bench: setup  ## measure time and memory beside FSDP2, as ratios within one run
	$(BIN)/python -m benchmarks

# It installs the programs, and writes docs/comparison.md.
clients:  ## train other people's programs on FSDP2 and on hwfsdp, and compare
	$(MAKE) setup VENV=.venv-clients EXTRAS=dev,clients
	$(MAKE) setup VENV=.venv-torchtune EXTRAS=dev,torchtune
	.venv-clients/bin/python -m pytest -rP tests/clients -k "not torchtune"
	.venv-torchtune/bin/python -m pytest -rP tests/clients -k torchtune
	.venv-clients/bin/python tests/clients/compare.py

# PARTS="races speed" runs only these parts. DRY=1 uses the CPU. OUT=FOLDER is the folder for the results.
gpu:  ## run what needs a GPU; write docs/gpu.md; PARTS, DRY=1: see Makefile
	@$(PYTHON) benchmarks/on_gpu/start.py $(if $(DRY),--dry) $(if $(OUT),--out "$(OUT)") $(PARTS)

notebooks: setup  ## run the notebooks, and keep their outputs; NB="03 07" runs only two
	$(BIN)/python notebooks/write.py $(NB)

docs: setup  ## build the site into docs/_build/html; a broken link is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

clean:  ## remove environments, runs, built packages and caches
	rm -rf $(VENV) .venv-clients .venv-torchtune runs build dist *.egg-info .mypy_cache .pytest_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The project's commands. Every target sets up what it needs in .venv the first time and nothing the second time.
#
#   make demo      train the small network on lucidnn's convolutions; ARGS="--epochs 1 --device cpu" goes to the command
#   make test      the test suite, then the Triton kernels in Triton's interpreter, in WORKERS=2 processes;
#                  ARGS="-k conv -x" goes to pytest
#   make lint      ruff, pyright, import contracts
#   make gpu       the GPU test suite, in WORKERS=8 processes since most of it is compilation
#   make bench     the benchmarks, into benchmarks/results
#   make docs-table   write the README's table of results from benchmarks/results
#   make clean     remove .venv and caches
#
# PYTHON=/path/to/python3.11 chooses the interpreter that .venv is made with.
# NO_VENV=1 uses PYTHON as it is and installs nothing: for a GPU machine whose Python already has a CUDA build of torch.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test lint format gpu bench docs-table clean

VENV := .venv
ARGS ?=
NO_VENV ?=
INPUTS := pyproject.toml constraints.txt

ifeq ($(NO_VENV),)
  PY := $(VENV)/bin/python
  READY = $(VENV)/.ready-$(1)
else
  PYTHON ?= python3
  PY := PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)
  READY =
  # Such a machine may lack platformdirs, which finds the user's cache folder.
  export LUCIDNN_CACHE_DIR ?= $(CURDIR)/.cache
endif
# Under CI a quiet log; at a terminal pip's progress bar, since a CUDA build of torch is gigabytes.
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check $(if $(CI),--quiet)
INSTALL := $(PIP) install --constraint constraints.txt --build-constraint constraints.txt

help:
	@sed -n '/^# The project/,/^$$/s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

# ---- set-up: a stamp per set of packages, renewed when a pin or the project's metadata changes -------------

$(VENV)/.ready-pip: constraints.txt
	@good='import sys, ensurepip, venv; raise SystemExit(sys.version_info < (3, 11))'; found=; \
	if ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1; then \
	  for p in $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python3.14); do \
	    if "$$p" -c "$$good" >/dev/null 2>&1; then found=$$p; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "lucidnn needs Python 3.11 or newer with its venv module; $(or $(PYTHON),python3) is" \
	      "$$($(or $(PYTHON),python3) --version 2>&1 | head -n 1 || true)." \
	      "Install one (Debian, Ubuntu: apt install python3.11-venv) or name it: make PYTHON=/path/to/python3.11" >&2; \
	    exit 1; \
	  fi; \
	  echo "Setting up $(VENV) with $$("$$found" --version)"; \
	  "$$found" -m venv $(VENV); \
	fi
	@$(VENV)/bin/python -m pip --disable-pip-version-check --quiet install --upgrade --constraint constraints.txt pip
	@touch $@

$(VENV)/.ready-demo: $(INPUTS) $(VENV)/.ready-pip
	@echo "Installing lucidnn and its dependencies into $(VENV) (the first time, this downloads torch)"
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready-demo
	@echo "Installing the test tools into $(VENV)"
	@$(INSTALL) --group test
	@touch $@

$(VENV)/.ready-lint: $(VENV)/.ready-test
	@echo "Installing the lint tools into $(VENV)"
	@$(INSTALL) --group lint
	@touch $@

# ---- what people run ---------------------------------------------------------------------------------------

# A selection (ARGS="-k conv") may leave one of the two runs without a test, pytest's exit code 5; the suite may not.
MAY_BE_NONE := $(if $(ARGS),|| [ $$? -eq 5 ])

demo: $(call READY,demo)
	@$(PY) -m lucidnn train $(ARGS)

test: $(call READY,test)
	@echo "== The suite"
	@$(PY) -m pytest -n $(or $(WORKERS),2) $(ARGS) $(MAY_BE_NONE)
	@echo "== Triton kernels in Triton's interpreter"
	@TRITON_INTERPRET=1 $(PY) -m pytest -n $(or $(WORKERS),2) tests/interpreter $(ARGS) $(MAY_BE_NONE)

lint: $(call READY,lint)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m pyright
	@$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

format: $(call READY,lint)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

gpu: $(call READY,test)
	@$(PY) -c 'import torch; raise SystemExit(None if torch.cuda.is_available() else f"make gpu needs an NVIDIA GPU and a CUDA build of torch; torch {torch.__version__} sees none.")'
	@$(PY) -m pytest -m gpu -n $(or $(WORKERS),8) $(ARGS)

bench: $(call READY,test)
	@$(PY) -m benchmarks.run $(ARGS)

docs-table: $(call READY,demo)
	@$(PY) docs/readme_table.py $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist

# `make demo` trains a small GPT on the device `lazysched`, `make test` runs the tests, `make conformance` runs all of PyTorch's
# own tests on the device (hours of one core) and writes docs/conformance.md; each first sets up what it needs.
#
#   make demo DEMO_ARGS="--device cpu"   the same training without lazysched; DEMO_ARGS go to examples/train_gpt.py
#   make test TEST_ARGS="-k settings"    TEST_ARGS go to pytest
#   make test JOBS=1                     one test after the other; otherwise pytest-xdist runs a process for each core, at most 8
#   make conformance CONFORMANCE_ARGS="--processes 8"
#   make fuzz FUZZ_ARGS="--calls 20000"  random programs of PyTorch's op samples against the physical device
#   make torchcts TORCHCTS_ARGS="--write"  TorchCTS, another project's suite; --write renews docs/torchcts.md
#   PYTHON=python3.12                    the interpreter, 3.10 or newer
#   VENV=folder                          the environment; VENV=none: PYTHON's own packages, nothing is installed
#   TORCH=torch==2.12.0                  another torch
#   TORCH_INDEX=https://...              a package index for torch; empty: pip's own

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(if $(GPU),torch>=2.11,torch==2.13.0)
TORCH_INDEX ?= $(if $(GPU),,$(call reachable,https://download.pytorch.org/whl/cpu))
DEMO_ARGS ?=
TEST_ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
CONFORMANCE_ARGS ?=
FUZZ_ARGS ?=
TORCHCTS_ARGS ?=

# Recursive on purpose: asked only where something is installed.
GPU = $(shell command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep GPU)
# The index of CPU builds saves gigabytes, but pip waits a minute for one that it can't reach, so ask first.
reachable = $(shell $(PYTHON) -c "import urllib.request as r; r.urlopen('$(1)/torch/', timeout=4)" 2>/dev/null && echo $(1))
# A file's tests stay in one process, so that its fixtures are made once.
parallel = $(if $(filter-out 1,$(JOBS)),--numprocesses $(JOBS) --maxprocesses 8 --dist loadfile)

ifeq ($(VENV),none)
RUN = PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
STAMP =
else
RUN = $(VENV)/bin/python
STAMP = $(VENV)/.lazysched
endif

.PHONY: demo test conformance fuzz torchcts setup clean

demo: $(STAMP)
	$(RUN) examples/train_gpt.py $(DEMO_ARGS)

test: $(STAMP)
	$(RUN) -m pytest $(parallel) $(TEST_ARGS)

conformance: $(STAMP)
	$(RUN) -m tests.conformance $(CONFORMANCE_ARGS)

fuzz: $(STAMP)
	$(RUN) -m tests.conformance.fuzz $(FUZZ_ARGS)

# Without its dependencies: it asks for an older torch.
torchcts: $(STAMP)
	$(if $(STAMP),$(RUN) -m pip install --disable-pip-version-check --quiet --no-deps torchcts==0.4.1 psutil expecttest mpmath)
	$(RUN) -m tests.conformance.cts $(TORCHCTS_ARGS)

setup: $(STAMP)

clean:
	rm -rf $(if $(filter none,$(VENV)),,"$(VENV)") build dist *.egg-info

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'lazysched needs Python 3.10 or newer, PYTHON=$(PYTHON) is ' + sys.version)"
	@echo "lazysched: setting up $(VENV)"
	$(PYTHON) -m venv "$(VENV)"
	index="$(TORCH_INDEX)" && $(RUN) -m pip install --disable-pip-version-check "setuptools>=70.1" "$(TORCH)" $${index:+--extra-index-url $$index}
	$(RUN) -m pip install --disable-pip-version-check --quiet --no-build-isolation --editable ".[test]"
	@touch "$@"

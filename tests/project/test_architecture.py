"""docs/architecture.md shows the imports, and there are no import cycles."""

import ast
import subprocess
import sys

import networkx as nx
import pytest
from tools.architecture import BEGIN, DOCUMENT, END, ROOT, descriptions, house, module_graph, modules, table


def test_the_document_shows_the_imports():
    text = DOCUMENT.read_text()
    assert text.split(BEGIN)[1].split(END)[0].strip() == table(), "make architecture"


def test_no_import_runs_back_up():
    assert nx.is_directed_acyclic_graph(house())


def test_no_modules_import_each_other():
    assert nx.is_directed_acyclic_graph(module_graph())


def test_mutants_are_of_files_that_exist():
    """Moved modules are easily forgotten there, and the program's main package is not among those of the tests."""
    (table,) = [
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "tests" / "tools" / "mutants.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMES"
    ]
    files = [f"{folder}/{name}.py" for folder, names in table.items() for name in names.split()]
    assert [file for file in files if not (ROOT / file).is_file()] == []


#: Dataclasses that gather something as they go, or that a subclass sets up; all others are immutable.
_GATHERING = """
    Attributor BlockExplainer Cache Collection Gradient IntegratedGradients ModuleCall Occlusion OpenSizes PassResult Program
    Questions Results Run SmoothGrad _Forward _Group _Pending _Sums _Total _Waiting
"""


def test_dataclasses_are_immutable():
    found = []
    for path in [*(ROOT / "lrpfx").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            decorators = map(ast.unparse, node.decorator_list) if isinstance(node, ast.ClassDef) else ()
            found += [node.name for one in decorators if one.startswith("dataclass") and "frozen=True" not in one]
    assert sorted(found) == _GATHERING.split()


def test_rooms_say_what_is_in_them():
    assert all(descriptions().values())


FACES = ["attribution", "canonizers", "cmap", "composites", "core", "image", "layer", "rules", "torchvision", "types"]


@pytest.mark.parametrize("face", FACES)
def test_zennits_names_are_in_their_place(face):
    assert f"lrpfx.{face}" in modules()


def test_importing_takes_little_longer_than_torch():
    """The parts of the package are imported when a name of them is first used."""
    code = "import time, torch; start = time.perf_counter(); import lrpfx; print(time.perf_counter() - start)"

    def seconds():
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)

    assert any(seconds() <= 0.3 for _ in range(3)), "three times"  # another process may have been in its way

"""The wheel that users get."""

import ast
import email
import email.policy
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import tomllib
from helpers import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    for name in ("lrpfx", "passes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(directory), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = directory.glob("lrpfx-*.whl")
    return path


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"lrpfx"}
    assert {"lrpfx/py.typed", "lrpfx/passes/rewrite/rewrite.py", "lrpfx/demo/__main__.py"} <= set(names)
    assert {f"lrpfx/pages/{name}" for name in ("page.js", "page.css", "LICENCES.txt")} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_links_of_the_description_work_anywhere(wheel):
    """PyPI shows README, and has none of the files that it links to."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
        message = email.message_from_bytes(archive.read(name), policy=email.policy.default)
    description, readme = message.get_payload(decode=True).decode(), (ROOT / "README.md").read_text()
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    source = pyproject["urls"]["Source"]
    assert message["Description-Content-Type"] == "text/markdown" and message["Project-URL"] == f"Source, {source}"
    found = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", description)
    before = re.findall(r"\[[^\]]*\]\(([^)]+)\)", readme)
    assert len(found) == len(before) > 20
    for (picture, link), relative in zip(found, before, strict=True):
        if relative.startswith(("https://", "#")):
            assert link == relative
        else:
            assert link == f"{source}/{'raw' if picture else 'blob'}/HEAD/{relative}"
            assert (ROOT / relative.partition("#")[0]).exists(), relative
    assert description.replace(f"{source}/blob/HEAD/", "").replace(f"{source}/raw/HEAD/", "").strip() == readme.strip()


def test_installed_into_an_empty_environment(wheel, tmp_path):
    """Outside the checkout; the dependencies are lent from this environment, which spares a download of torch."""
    venv.create(tmp_path / "env", with_pip=False)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "lent.pth").write_text(str(Path(pytest.__file__).parent.parent))  # does not bring the editable lrpfx along
    program = (
        "import lrpfx, lrpfx.passes, torch, sys\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).eval()\n"
        "explain_model = lrpfx.transform(model, lrpfx.composites.EpsilonPlusFlat())\n"
        "print(lrpfx.attribute(explain_model, torch.rand(1, 1, 4, 4)).relevance.shape)\n"
        "assert 'passes' not in sys.modules and lrpfx.__file__.startswith(sys.prefix), lrpfx.__file__\n"
        "lrpfx.draw(explain_model).source\n"
        "lrpfx.report((explain_model, torch.rand(1, 1, 4, 4), 0), 'report.html')\n"
        "extras = {'matplotlib', 'sklearn', 'pygraphviz', 'torchvision', 'zennit'}\n"
        "extras |= {'onnx', 'onnxruntime', 'onnxscript', 'typer', 'rich', 'zarr'}\n"
        "assert not extras & set(sys.modules), 'the core imports an optional dependency'\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    python = str(tmp_path / "env" / "bin" / "python")
    process = subprocess.run([python, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "torch.Size([1, 1, 4, 4])\n"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)).save(tmp_path / "photo.jpg")
    program = (  # six lines, with a network and a preprocessing of torchvision
        "import lrpfx, torchvision\n"
        "weights = torchvision.models.ResNet18_Weights.DEFAULT\n"
        "model = torchvision.models.resnet18().eval()\n"
        "explainer = lrpfx.Explainer(model, preprocess=weights.transforms(), categories=weights.meta['categories'])\n"
        "explanation = explainer('photo.jpg')\n"
        "explanation.overlay().save('overlay.png')\n"
    )
    lent = f"import sys; sys.path.append({str(ROOT / 'tests')!r}); import torchvision_cpu; sys.path.pop()\n"
    command = [python, "-W", "error", "-c", lent + program]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0 and not process.stderr and not process.stdout, process.stderr
    assert Image.open(tmp_path / "overlay.png").size == (80, 60)


def test_the_repository_uses_its_own_passes():
    """At its root, Python finds `lrpfx` in the current folder, and `lrpfx.passes` beside it, whatever is installed."""
    code = "import lrpfx, lrpfx.passes.driver as driver; print(lrpfx.__file__, driver.__file__)"
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert printed == [str(ROOT / "lrpfx" / "__init__.py"), str(ROOT / "passes" / "driver.py")]


def _distributions(requirements):
    """The names of these distributions and of all that they require, as `make test` installs them."""
    known, open_ones = set(), list(requirements)
    while open_ones:
        requirement = Requirement(open_ones.pop())
        name = canonicalize_name(requirement.name)
        extras = ["", *sorted(requirement.extras)]
        if (name, *extras) in known:
            continue
        known.add((name, *extras))
        for further in map(Requirement, metadata.requires(name) or []):
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                open_ones.append(str(further))
    return {name for name, *_ in known}


def test_what_the_tests_import_is_installed_for_them():
    """By `make test` on a fresh machine, whatever else is in this environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    alone = re.findall(r"--no-deps (?!--)(.+)", (ROOT / "Makefile").read_text())
    installed = _distributions([*project["dependencies"], *extras["test"], *extras["docs"]])
    installed |= {canonicalize_name(Requirement(name).name) for name in [*" ".join(alone).split(), *extras["mutants"]]}
    providers = metadata.packages_distributions()
    files = [path for folder in ("tests", "lrpfx", "passes", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    own = {path.stem for path in files} | {path.parent.name for path in files} | {"lrpfx"}
    imported = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported.update({name.partition(".")[0]: path for name in names})
    missing = {
        name: str(path)
        for name, path in imported.items()
        if name not in sys.stdlib_module_names | own | {"small_model"}  # the last is a file that a test writes
        and not any(canonicalize_name(of) in installed for of in providers.get(name, [name]))
    }
    assert not missing

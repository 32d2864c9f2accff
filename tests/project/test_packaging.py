"""What users get: the wheel, the source distribution, and the workflow that publishes them."""

import ast
import email
import email.policy
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import tomllib
import yaml
from helpers import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

import lrpfx

pytestmark = pytest.mark.programs

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())


GENERATED = {"PKG-INFO", "setup.cfg"}  # by the build, in a source distribution
OF_THE_REPOSITORY = {".gitignore", ".ci/run"}  # which only a checkout needs


def sources():
    """The files of the repository, or of the source distribution that the tests run in."""
    if not (ROOT / ".git").exists():
        found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
        return {name for name in found - GENERATED if not name.startswith("lrpfx.egg-info/")}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {name for name in listed.split("\0") if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The folder with the source distribution and the wheel made from it, as the workflow that publishes makes them."""
    directory = tmp_path_factory.mktemp("distributions")
    for name in sources():
        (directory / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, directory / "source" / name)
    for rubbish in ("page/node_modules/dagre/index.js", "tests/__pycache__/helpers.pyc", "build/wheel.txt"):
        (directory / "source" / rubbish).parent.mkdir(parents=True, exist_ok=True)
        (directory / "source" / rubbish).touch()
    command = [sys.executable, "-m", "build", "--outdir", str(directory / "dist"), str(directory / "source")]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return directory / "dist"


@pytest.fixture(scope="module")
def wheel(distributions):
    (path,) = distributions.glob("lrpfx-*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(distributions, tmp_path_factory):
    """The source distribution, unpacked."""
    (path,) = distributions.glob("lrpfx-*.tar.gz")
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of an empty environment with the wheel, to which this one lends the dependencies: no download of torch."""
    folder = tmp_path_factory.mktemp("installed") / "env"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "lent.pth").write_text(str(Path(pytest.__file__).parent.parent))  # does not bring the editable lrpfx along
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def environment():
    """Without what would lead to another lrpfx."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"lrpfx"}
    assert {"lrpfx/py.typed", "lrpfx/passes/rewrite/rewrite.py", "lrpfx/demo/__main__.py"} <= set(names)
    assert {f"lrpfx/reports/pages/{name}" for name in ("page.js", "page.css", "LICENCES.txt")} <= set(names)
    modules = {name.replace("passes/", "lrpfx/passes/", 1) if name.startswith("passes/") else name for name in sources()}
    modules = {name for name in modules if name.startswith("lrpfx/") and name.endswith(".py")}
    assert modules == {name for name in names if name.endswith(".py")}, "a folder is missing in [tool.setuptools]"


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name), policy=email.policy.default)


def test_metadata(wheel):
    message = metadata_of(wheel)
    assert message["Name"] == "lrpfx" and message["Version"] == lrpfx.__version__
    assert message["License-Expression"] == "BSD-3-Clause AND MIT"
    with zipfile.ZipFile(wheel) as archive:
        for name in message.get_all("License-File"):
            (path,) = [one for one in archive.namelist() if one.endswith(f"dist-info/licenses/{name}")]
            assert archive.read(path) == (ROOT / name).read_bytes()
    assert set(message.get_all("License-File")) == {"LICENSE", "lrpfx/reports/pages/LICENCES.txt"}
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    addresses = dict(one.split(", ") for one in message.get_all("Project-URL"))
    assert set(addresses) == {"Source", "Documentation", "Changelog", "Issues"}
    assert all(addresses[name].startswith(source) for name in ("Changelog", "Issues"))
    oldest = int(message["Requires-Python"].removeprefix(">=3."))
    tried = WORKFLOW["jobs"]["try"]["strategy"]["matrix"]["python"]
    assert tried == [f"3.{minor}" for minor in range(oldest, oldest + len(tried))]
    named = {one.removeprefix("Programming Language :: Python :: ") for one in message.get_all("Classifier")}
    assert {one for one in named if one.startswith("3.")} == set(tried)


def test_the_source_distribution_has_what_its_tests_need(unpacked):
    found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    made = {name for name in found if name in GENERATED or name.startswith("lrpfx.egg-info/")}
    assert found - made == sources() - OF_THE_REPOSITORY
    tests = ["tests/project/test_citing.py", "tests/support/test_optional_packages.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    run = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_a_release_passes_the_checks_of_the_workflow(distributions):
    """Its commands, one after the other, but for the build itself, which has been done."""
    steps = [step["run"] for step in WORKFLOW["jobs"]["build"]["steps"] if "run" in step]
    (check, compare) = [step for step in steps if "pip install" not in step and step != "python -m build"]
    assert "python -m build" in steps and "twine check" in check
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command, tag, status in ((check, "", 0), (compare, f"v{lrpfx.__version__}", 0), (compare, "v99.0", 1)):
        environment = {**os.environ, "PATH": path, "GITHUB_REF_NAME": tag}
        run = subprocess.run(["bash", "-c", command], cwd=distributions.parent, env=environment, capture_output=True, text=True)
        assert run.returncode == status, (command, run.stdout, run.stderr)


def test_the_workflow_publishes_without_a_token():
    publish = WORKFLOW["jobs"]["publish"]
    assert WORKFLOW[True] == {"release": {"types": ["published"]}}  # YAML reads the key "on" as true
    assert publish["permissions"] == {"id-token": "write"} and set(publish["needs"]) == {"build", "try"}
    assert publish["steps"][-1] == {"uses": "pypa/gh-action-pypi-publish@release/v1"}
    assert WORKFLOW["permissions"] == {"contents": "read"}


def test_the_workflow_tries_what_it_publishes(installed, environment, tmp_path):
    (program,) = [step["run"] for step in WORKFLOW["jobs"]["try"]["steps"] if "lrpfx.transform" in step.get("run", "")]
    paths = f"{Path(installed).parent}{os.pathsep}{environment['PATH']}"
    command = {"args": ["bash", "-c", program], "env": {**environment, "PATH": paths}}
    run = subprocess.run(**command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and (tmp_path / "report.html").exists(), run.stderr


def test_the_changelog_has_this_release():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0].split(",")[0].split(" ")[0] == lrpfx.__version__


def test_the_command_of_an_error_needs_no_index(installed, environment):
    """Where lrpfx is installed, from a checkout too, pip takes the requirements of an extra from that, before it is on PyPI."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    code = "\n".join(path.read_text() for folder in ("lrpfx", "passes") for path in (ROOT / folder).rglob("*.py"))
    assert set(re.findall(r"lrpfx\[(\w+)\]", code)) <= set(extras)
    assert not re.search(r"pip install lrpfx\[", code), "shells read brackets without quotes as a pattern"
    here = ("onnx", "cli", "signing", "serve", "datasets", "captum", "draw", "demo", "ray")  # which make test installs
    command = [installed, "-m", "pip", "install", "--no-index", "--dry-run", f"lrpfx[{','.join(here)}]"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and "Would install" not in run.stdout, run.stderr


def test_links_of_the_description_work_anywhere(wheel):
    """PyPI shows README, and has none of the files that it links to."""
    message = metadata_of(wheel)
    description, readme = message.get_payload(decode=True).decode(), (ROOT / "README.md").read_text()
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    source = pyproject["urls"]["Source"]
    assert message["Description-Content-Type"] == "text/markdown"
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


def test_installed_into_an_empty_environment(installed, environment, tmp_path):
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
    process = subprocess.run([installed, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
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
    command = [installed, "-W", "error", "-c", lent + program]
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

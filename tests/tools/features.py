"""Which part of lrpfx works under the installed torch: each is tried, and the table of docs/installation.md gets a column.

`make test-torch` runs it in the environment of each release. A part that says which torch it needs is "no"; any other error is
one of lrpfx, and ends the program.
"""

import json
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import torch
from documents import write_between
from torch import nn

import lrpfx
from lrpfx.composites import DeepLIFT, EpsilonPlus, EpsilonPlusFlat
from lrpfx.errors import LrpfxError

ROOT = Path(__file__).parent.parent.parent
DOCUMENT, FOUND = ROOT / "docs" / "installation.md", ROOT / "docs" / "features_by_torch.json"

FEATURES: dict[str, Callable[[Path], object]] = {}


def feature(title: str) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    def listed(trial: Callable[[Path], object]) -> Callable[[Path], object]:
        FEATURES[title] = trial
        return trial

    return listed


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return nn.Sequential(*layers).eval()


X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


def compiled(**settings: object) -> nn.Module:
    explain_model: nn.Module = lrpfx.transform(network(), EpsilonPlusFlat(), **settings)
    return explain_model


def checked(relevance: torch.Tensor, expected: torch.Tensor | None = None) -> None:
    """Raise `AssertionError` unless this is the relevance of the network."""
    expected = lrpfx.attribute(compiled(), X, 1).relevance if expected is None else expected
    torch.testing.assert_close(torch.as_tensor(relevance), expected)


def runs(path: Path) -> None:
    """Raise `AssertionError` unless the program in a file gives the relevance of the network."""
    checked(lrpfx.load(path)(X, torch.tensor([1, 1]))["relevance"])


@feature("`transform` by a symbolic trace, `attribute`, the ledger")
def trace(folder: Path) -> None:
    explain_model = compiled(capture="symbolic")
    lrpfx.attribute(explain_model, X, 1)
    lrpfx.ledger(explain_model, X, 1)


@feature("`transform` by torch.export, with open batches")
def export(folder: Path) -> None:
    explain_model = compiled(capture="export", example_inputs=X)
    checked(lrpfx.attribute(explain_model, X, 1).relevance)
    lrpfx.attribute(explain_model, X[:1], 1)


@feature("one capture for several composites, shared weights")
def capture(folder: Path) -> None:
    captured = lrpfx.capture(network(), X)
    checked(lrpfx.attribute(lrpfx.transform(captured, EpsilonPlusFlat()), X, 1).relevance)
    lrpfx.transform(network(), EpsilonPlusFlat(), share=True)


@feature("derivatives of relevance (`fold=False`)")
def derivatives(folder: Path) -> None:
    explain_model = compiled(fold=False)
    x = X.clone().requires_grad_()
    (relevance,) = torch.autograd.grad(explain_model(x)[:, 1].sum(), x, create_graph=True)
    with explain_model.inactive():
        torch.autograd.grad(relevance.abs().sum(), x)


@feature("differences from a reference (DeepLIFT)")
def differences(folder: Path) -> None:
    explain_model = lrpfx.transform(network(), DeepLIFT(), example_inputs=X)
    found = lrpfx.attribute(explain_model, X, 1, reference=torch.zeros_like(X))
    expected = network()(X)[:, 1] - network()(torch.zeros_like(X))[:, 1]
    torch.testing.assert_close(found.relevance.sum((1, 2, 3)), expected.detach())


@feature("module mode, as in Zennit")
def modules(folder: Path) -> None:
    model = network()
    with EpsilonPlus().context(model) as registered:
        x = X.clone().requires_grad_()
        torch.autograd.grad(registered(x)[:, 1].sum(), x)


@feature("`lower`, and the program in this process")
def lower(folder: Path) -> None:
    checked(lrpfx.lower(compiled(), X).module()(X, torch.tensor([1, 1]))["relevance"])


@feature("ONNX files")
def onnx(folder: Path) -> None:
    runs(lrpfx.save(lrpfx.lower(compiled(), X), folder / "model.onnx"))


@feature("`.pt2` files")
def archives(folder: Path) -> None:
    runs(lrpfx.save(lrpfx.lower(compiled(), X), folder / "model.pt2"))


@feature("`package` (AOTInductor)")
def package(folder: Path) -> None:
    runs(lrpfx.package(lrpfx.lower(compiled(), X), folder / "compiled.pt2"))


@feature("`torch.compile` of an explainable module")
def by_inductor(folder: Path) -> None:
    expected = lrpfx.attribute(compiled(), X, 1).relevance
    checked(lrpfx.attribute(torch.compile(compiled()), X, 1).relevance, expected)


@feature("an `ExportedProgram` with open sizes as the model")
def exported(folder: Path) -> None:
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(network(), (X,), dynamic_shapes=({0: batch},))
    checked(lrpfx.attribute(lrpfx.transform(program, EpsilonPlusFlat()), X, 1).relevance)


@feature("the command line")
def command_line(folder: Path) -> None:
    (folder / "net.py").write_text("from torch import nn\nmake = lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()\n")
    command = [sys.executable, "-m", "lrpfx", "check", "net:make", "--shape", "1,3,8,8"]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)


def answers() -> dict[str, str]:
    """For each feature "yes", or "no" where it names the torch that it needs. Any other error ends the program."""
    found = {}
    for title, trial in FEATURES.items():
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                trial(Path(folder))
            except LrpfxError as error:
                needed = re.search(r"needs torch (\d+\.\d+) or newer", str(error))
                if needed is None:
                    traceback.print_exc()
                    sys.exit(f"under torch {torch.__version__}, this fails and does not say which torch it needs: {title}")
                found[title] = "no"
            else:
                found[title] = "yes"
        print(f"{found[title]:>4}  {title}", flush=True)
    return found


def table(by_release: dict[str, dict[str, str]]) -> str:
    """A row for each feature, and a column for each release."""
    releases = sorted(by_release, key=lambda release: tuple(map(int, release.split("."))))
    rows = [f"| with torch | {' | '.join(releases)} |", f"|---|{'---|' * len(releases)}"]
    rows += [f"| {title} | {' | '.join(by_release[one].get(title, '') for one in releases)} |" for title in FEATURES]
    return "\n".join(rows)


def main() -> None:
    by_release = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    by_release[torch.__version__.partition("+")[0]] = answers()
    FOUND.write_text(json.dumps(by_release, indent=1, sort_keys=True) + "\n")
    write_between(DOCUMENT, "features", table(by_release))


if __name__ == "__main__":
    main()

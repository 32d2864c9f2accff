"""The command line: `lrpfx export`, `run`, `inspect` and `verify`."""

import ast
import csv
import importlib
import io
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import nn

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import track
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f"the command line needs packages that are not installed: pip install 'lrpfx[cli]' ({error})") from error

from .artefacts import Runner, load, package, save, whole_file
from .composites import composite_named
from .errors import ArtefactError, InputError, InputTypeError, LrpfxError, LrpfxWarning
from .image import imsave
from .lowering import lower
from .pipeline import transform

app = typer.Typer(
    help="Attribution models as files: make them, run them, look into them.", no_args_is_help=True, add_completion=False
)

#: Suffixes of the files that `lrpfx run` takes for images.
IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

Artefact = Annotated[Path, typer.Argument(help="A file that `lrpfx export` or `lrpfx.save` wrote.")]


def main() -> None:
    """What the installed command runs: errors of lrpfx are messages, not tracebacks, and torch's warnings are its own."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("default", LrpfxWarning)
    try:
        app()
    except LrpfxError as error:
        Console(stderr=True).print(f"{type(error).__name__}: {error}", style="red", markup=False, highlight=False)
        raise SystemExit(2) from error


# --- export -----------------------------------------------------------------------------------------------------------------


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="`module:callable` that makes the model, or `module:name` of a model.")],
    output: Annotated[Path, typer.Argument(help="The file to write: .pt2 or .onnx.")],
    shape: Annotated[str, typer.Option(help="Shape of an input, the batch first: 1,3,224,224.")],
    composite: Annotated[str, typer.Option(help="Name of the composite.")] = "epsilon_plus_flat",
    setting: Annotated[list[str] | None, typer.Option(help="Setting of the composite: low=0.0. May be repeated.")] = None,
    weights: Annotated[Path | None, typer.Option(help="A state_dict, read with weights_only=True.")] = None,
    target: Annotated[str, typer.Option(help="What the program takes as its target: index, weights or max.")] = "index",
    record: Annotated[list[str] | None, typer.Option(help="Layer whose relevance is returned. May be repeated.")] = None,
    reduce: Annotated[str | None, typer.Option(help="What becomes of relevance: sum, absolute or bytes.")] = None,
    balance: Annotated[bool, typer.Option("--balance", help="Return relevance of the input less that of the output.")] = False,
    fixed_batch: Annotated[bool, typer.Option("--fixed-batch", help="Take the batch size of the shape alone.")] = False,
    input_range: Annotated[
        tuple[float, float] | None, typer.Option(help="Lowest and highest value of the input; makes rules cheaper.")
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile with AOTInductor into the .pt2 file.")] = False,
) -> None:
    """Lower a model with a composite and write the program to a file."""
    settings = dict(_setting(text) for text in setting or [])
    module = _model(model)
    if weights is not None:
        _load_weights(module, weights)
    example = torch.rand(_shape(shape))
    if input_range is not None:
        example = input_range[0] + (input_range[1] - input_range[0]) * example
    explain_model = transform(module.eval(), composite_named(composite, **settings), input_range=input_range)
    program = lower(
        explain_model,
        example,
        target=target,
        record=record or (),
        dynamic_batch=not fixed_batch,
        reduce=reduce,
        balance=balance,
    )
    write = package if compile else save
    path = write(program, output)
    Console().print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, self-test passed", highlight=False)


def _model(name: str) -> nn.Module:
    """The model that `module:callable` makes or is."""
    path, colon, attribute = name.partition(":")
    if not (path and colon and attribute):
        raise InputError(f"a model is given as module:callable, not {name!r}")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(path)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{name} cannot be imported: {error}") from error
    finally:
        sys.path.remove(os.getcwd())
    model = found if isinstance(found, nn.Module) else found() if callable(found) else found
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"{name} is or makes a {type(model).__name__}, not a torch.nn.Module")
    return model


def _load_weights(model: nn.Module, path: Path) -> None:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (pickle.UnpicklingError, EOFError, RuntimeError, TypeError, AttributeError) as error:
        raise InputError(f"{path} holds no weights of this model: {error}") from error


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"a setting is name=value, not {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError) as error:
        raise InputError(f"the value of {name} is a number, a list or the like, not {value!r}") from error


def _numbers(text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"{text!r} is no list of numbers with commas between them") from error


def _shape(text: str) -> list[int]:
    sizes = _numbers(text, int)
    if min(sizes) < 1:
        raise InputError(f"a shape has positive sizes, not {text}")
    return sizes


# --- run --------------------------------------------------------------------------------------------------------------------


@app.command()
def run(
    artefact: Artefact,
    images: Annotated[Path, typer.Argument(help="A folder of images.")],
    output: Annotated[Path, typer.Argument(help="The folder for heatmaps and outputs.csv.")],
    target: Annotated[int | None, typer.Option(help="The class to explain; by default that of the largest output.")] = None,
    mean: Annotated[str, typer.Option(help="What is subtracted from pixels in [0, 1], for each channel.")] = "0",
    std: Annotated[str, typer.Option(help="What they are then divided by.")] = "1",
    cmap: Annotated[str, typer.Option(help="Colour map of the heatmaps.")] = "bwr",
    batch_size: Annotated[int, typer.Option(min=1, help="Images that run together.")] = 8,
) -> None:
    """Explain a folder of images: a heatmap for each, and a CSV file of the outputs."""
    runner = load(artefact)
    shape = _image_shape(runner)
    paths = _image_files(images)
    scale = _numbers(mean, float), _numbers(std, float)
    if any(len(values) not in (1, shape[0]) for values in scale) or 0.0 in scale[1]:
        raise InputError(f"mean and std have one number, or one for each of {shape[0]} channels; std is not 0")
    fixed = runner.manifest["arguments"][next(iter(runner.manifest["arguments"]))]["shape"][0]
    batch_size = fixed or batch_size
    output.mkdir(parents=True, exist_ok=True)
    rows: list[list[Any]] = []
    unread: list[str] = []
    chunks = [paths[first : first + batch_size] for first in range(0, len(paths), batch_size)]
    for chunk in track(chunks, description="explaining", console=Console(stderr=True), transient=True):
        batch: dict[Path, np.ndarray] = {}
        for path in chunk:
            try:
                batch[path] = _read_image(path, shape, *scale)
            except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
                unread.append(f"{path.name}: {error}")
        if batch:
            rows += _explain(runner, batch, target, fixed, output, cmap)
    _write_table(output / "outputs.csv", rows, runner.manifest["results"]["output"]["shape"][1])
    console = Console(highlight=False)
    console.print(f"{len(rows)} heatmaps and outputs.csv in {output}/")
    if unread:
        raise InputError("these are no images that can be read:\n  " + "\n  ".join(unread))


def _image_shape(runner: Runner) -> list[int]:
    """Channels, height and width of the images that a program takes."""
    shapes = [described["shape"][1:] for name, described in runner.manifest["arguments"].items() if name != "target"]
    if len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][0] not in (1, 3):
        raise InputError(f"the program does not take one image with 1 or 3 channels: its inputs have the shapes {shapes}")
    if runner.manifest["target"] == "weights":
        raise InputError("the program takes relevance of the output as its target; export it with --target index or max")
    if len(runner.manifest["results"]["output"]["shape"]) != 2:
        raise InputError("the program's output is not of shape (batch, classes)")
    return list(shapes[0])


def _image_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGES)
    if not paths:
        raise InputError(f"there are no images in {folder}; their suffixes are {', '.join(IMAGES)}")
    return paths


def _read_image(path: Path, shape: Sequence[int], mean: list[float], std: list[float]) -> np.ndarray:
    """An image, scaled so that it covers the program's input, and the middle of it. Shape (channels, height, width)."""
    channels, height, width = shape
    with Image.open(path) as file:
        image = file.convert("L" if channels == 1 else "RGB")
    factor = max(height / image.height, width / image.width)
    size = (max(width, round(image.width * factor)), max(height, round(image.height * factor)))
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    image = image.resize(size, Image.Resampling.BILINEAR).crop((left, top, left + width, top + height))
    pixels = np.asarray(image, dtype=np.float64).reshape(height, width, channels) / 255.0
    result: np.ndarray = ((pixels - mean) / std).transpose(2, 0, 1)
    return result


def _explain(
    runner: Runner, batch: dict[Path, np.ndarray], target: int | None, fixed: int | None, output: Path, cmap: str
) -> list[list[Any]]:
    """Write the heatmaps of a batch; its rows of the table."""
    pixels = np.stack(list(batch.values()))
    if fixed is not None:  # what is missing in the last batch is filled up with copies
        pixels = np.concatenate([pixels] * fixed)[:fixed]
    name = next(iter(runner.manifest["arguments"]))
    arguments = {name: pixels.astype(runner.manifest["arguments"][name]["dtype"])}
    results = _run_for(runner, arguments, target)
    maps = results["relevance"]
    maps = maps if maps.ndim == 3 else maps.sum(1)
    rows = []
    for path, values, heatmap in zip(batch, results["output"], maps, strict=False):
        with whole_file(output / f"{path.name}.png") as temporary:
            imsave(temporary, heatmap, cmap=cmap, symmetric=True)
        best = int(values.argmax())
        total = None if heatmap.dtype == np.uint8 else float(heatmap.astype(np.float64).sum())
        explained = best if target is None else target
        rows.append([path.name, best, explained, "" if total is None else total, *map(float, values)])
    return rows


def _run_for(runner: Runner, arguments: dict[str, np.ndarray], target: int | None) -> dict[str, np.ndarray]:
    """The results for a class; where none is given, for the largest output of each sample."""
    if runner.manifest["target"] == "max":
        if target is not None:
            raise InputError("the program explains its largest output; export it with --target index to choose a class")
        return runner(**arguments)
    count = len(next(iter(arguments.values())))
    results = runner(**arguments, target=np.full(count, target or 0))
    if target is None:
        results = runner(**arguments, target=results["output"].argmax(1))
    return results


def _write_table(path: Path, rows: list[list[Any]], classes: int) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["file", "largest", "explained", "relevance", *(f"output_{number}" for number in range(classes))])
    writer.writerows(rows)
    with whole_file(path) as temporary:
        temporary.write_text(text.getvalue())


# --- inspect and verify -----------------------------------------------------------------------------------------------------


@app.command()
def inspect(artefact: Artefact) -> None:
    """Show what a file holds: where it comes from, what it takes and returns, and the rule of every node."""
    manifest = load(artefact).manifest
    console = Console(highlight=False)
    facts = {
        "program": f"{manifest['kind']}, of {manifest['title']}",
        "composite": manifest["composite"],
        "canonizers": ", ".join(manifest["canonizers"]) or "none",
        "target": manifest["target"],
        "relevance": manifest["reduce"] or "as it is",
        "tolerance": f"{manifest['tolerance']:.0e}",
        "made with": f"lrpfx {manifest['lrpfx']}, torch {manifest['torch']}",
    }
    console.print(_table(("", ""), facts.items(), header=False))
    shapes = [
        (role, name, "×".join("batch" if size is None else str(size) for size in one["shape"]), one["dtype"])
        for role in ("arguments", "results")
        for name, one in manifest[role].items()
    ]
    console.print(_table(("", "name", "shape", "dtype"), shapes))
    merged = manifest["merged"]
    rules = [(name, rule, ", ".join(merged.get(name, ()))) for name, rule in manifest["rules"].items()]
    console.print(_table(("node", "rule", "merged"), rules))


@app.command()
def verify(artefacts: Annotated[list[Path], typer.Argument(help="Files to verify.")]) -> None:
    """Run the self-tests of files; the exit status is 1 where any fails."""
    rows, failed = [], False
    for path in artefacts:
        try:
            rows.append((str(path), "passed", f"differs by {load(path).verify():.1e}"))
        except ArtefactError as error:
            failed = True
            rows.append((str(path), "FAILED", str(error)))
    Console(highlight=False).print(_table(("file", "self-test", ""), rows))
    if failed:
        raise typer.Exit(1)


def _table(columns: Sequence[str], rows: Any, header: bool = True) -> Table:
    table = Table(*columns, show_header=header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


if __name__ == "__main__":
    main()

"""The command line: `lrpfx export`, `run`, `inspect` and `verify`."""

import ast
import csv
import errno
import importlib
import io
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn

try:
    import click
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import track
    from rich.status import Status
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f"the command line needs packages that are not installed: pip install 'lrpfx[cli]' ({error})") from error

from lrpfx.composites import Composite, composite_named
from lrpfx.deploy.artefact import load, package, save, suffixes
from lrpfx.deploy.files import hash_of_file, locked, whole_file
from lrpfx.deploy.lowering import lower
from lrpfx.deploy.runner import Runner
from lrpfx.errors import (
    InputError,
    InputTypeError,
    LrpfxError,
    LrpfxWarning,
    first_lines,
    nearest,
    os_errors,
    printable,
)
from lrpfx.image import CMAPS, get_cmap, imsave
from lrpfx.pipeline import transform

app = typer.Typer(help="Create, run and inspect attribution models as files.", no_args_is_help=True, add_completion=False)

#: The environment variable that shows the traceback of an unexpected error.
TRACEBACK = "LRPFX_TRACEBACK"

INTERRUPTED = 130  # typer's exit status after Ctrl-C

#: The decoder would need more than half a GiB for a larger image.
MOST_PIXELS = 1 << 27
#: Suffixes of the files that `lrpfx run` reads as images.
IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

#: The formats that Pillow may read; for some others it would start programs.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

Artefact = Annotated[Path, typer.Argument(help="A file that `lrpfx export` or `lrpfx.save` wrote.")]


def main() -> None:
    """Run the command line: errors are messages instead of tracebacks, and only warnings of lrpfx are shown."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("default", LrpfxWarning)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for names and terminals of any encoding
    try:
        status = app(standalone_mode=False)
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        raise SystemExit(status)
    except LrpfxError as error:
        raise _failed(f"{type(error).__name__}: {error}") from error
    except click.exceptions.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        raise _failed(f"{type(error).__name__}: {error.strerror or error}") from error
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        raise _failed(f"{first_lines(error)}\nThis should not happen; set {TRACEBACK}=1 to see the traceback.") from error


def _failed(message: str) -> SystemExit:
    with suppress(OSError):  # stderr is closed
        Console(stderr=True, soft_wrap=True).print(printable(message), style="red", markup=False, highlight=False)
    return SystemExit(2)


# --- export -----------------------------------------------------------------------------------------------------------------


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="`module:callable` that makes the model, or `module:name` of a model.")],
    output: Annotated[Path, typer.Argument(help=f"The file to write: {' or '.join(suffixes())}.")],
    shape: Annotated[str, typer.Option(help="Shape of an input, batch first: 1,3,224,224.")],
    composite: Annotated[str, typer.Option(help="Name of the composite.")] = "epsilon_plus_flat",
    setting: Annotated[list[str] | None, typer.Option(help="Setting of the composite: low=0.0. May be repeated.")] = None,
    weights: Annotated[Path | None, typer.Option(help="A state_dict, read with weights_only=True.")] = None,
    target: Annotated[str, typer.Option(help="The target that the program takes: index, token, weights or max.")] = "index",
    record: Annotated[list[str] | None, typer.Option(help="Layer whose relevance is returned. May be repeated.")] = None,
    reduce: Annotated[str | None, typer.Option(help="Reduction of relevance over channels: sum, absolute or bytes.")] = None,
    balance: Annotated[bool, typer.Option("--balance", help="Return relevance of the input minus that of the output.")] = False,
    fixed_batch: Annotated[bool, typer.Option("--fixed-batch", help="Accept only the batch size of the shape.")] = False,
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
    try:
        example = torch.rand(_shape(shape), device="cpu")
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise InputError(f"there cannot be an input of shape {shape}: {first_lines(error)}") from error
    if input_range is not None:
        example = input_range[0] + (input_range[1] - input_range[0]) * example
    try:
        with torch.no_grad():
            module.eval()(example)
    except (Exception, SystemExit) as error:
        raise InputError(f"{model} cannot run on an input of shape {shape}: {first_lines(error)}") from error
    chosen = _composite(composite, settings)
    with _steps_shown():
        explain_model = transform(module, chosen, input_range=input_range)
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


def _composite(name: str, settings: dict[str, Any]) -> Composite:
    try:
        return composite_named(name, **settings)
    except LrpfxError:
        raise
    except Exception as error:
        raise InputError(f"the settings do not fit {name}: {first_lines(error)}") from error


class _StatusHandler(logging.Handler):
    def __init__(self, status: Status) -> None:
        super().__init__()
        self.status = status

    def emit(self, record: logging.LogRecord) -> None:
        self.status.update(record.getMessage())


@contextmanager
def _steps_shown() -> Iterator[None]:
    """A context in which the terminal shows the log of lrpfx."""
    logger = logging.getLogger("lrpfx")
    level = logger.level
    with Console(stderr=True).status("transforming") as status:
        handler = _StatusHandler(status)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)


def _model(name: str) -> nn.Module:
    """The model given as `module:callable` or `module:name`."""
    path, colon, attribute = name.partition(":")
    if not (path and colon and attribute):
        raise InputError(f"a model is given as module:callable, not {name!r}")
    folder = os.getcwd()
    before, sys.argv[1:] = sys.argv[1:], []  # they are not meant for the model
    sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(path)
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise InputError(f"{name} cannot be imported: {path} has no {part!r}.{nearest(part, dir(found))}")
            found = getattr(found, part)
        model = found if isinstance(found, nn.Module) or not callable(found) else found()
    except InputError:
        raise
    except ModuleNotFoundError as error:
        raise InputError(f"{name} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # from the user's code
        raise InputError(
            f"{name} cannot be imported and called without arguments: {first_lines(error)}. Give a function that takes none "
            "and returns the model"
        ) from error
    finally:
        sys.argv[1:] = before
        with suppress(ValueError):
            sys.path.remove(folder)
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"{name} gives an object of type {type(model).__name__}, not a torch.nn.Module")
    return model


def _load_weights(model: nn.Module, path: Path) -> None:
    try:
        with os_errors(InputError, path, "read"):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except Exception as error:  # torch.load raises many kinds of errors
        raise InputError(f"{path} holds no weights: {first_lines(error)}") from error
    own = model.state_dict()
    if not isinstance(state, dict):
        raise InputError(f"{path} holds no weights of this model: it is a {type(state).__name__}, not a state_dict")
    for keys, what in ((own.keys() - state.keys(), "lacks"), (state.keys() - own.keys(), "has, but the model lacks,")):
        if keys:
            first = ", ".join(sorted(map(str, keys))[:3])
            raise InputError(f"{path} holds no weights of this model: it {what} {len(keys)} of them, such as {first}")
    try:
        model.load_state_dict(state)
    except Exception as error:
        raise InputError(f"{path} holds no weights of this model: {first_lines(error)}") from error


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
        raise InputError(f"{text!r} is not a comma-separated list of numbers") from error


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
    target: Annotated[int | None, typer.Option(help="The class to explain; by default the largest output.")] = None,
    mean: Annotated[str, typer.Option(help="Subtracted from pixels in [0, 1]: one number, or one per channel.")] = "0",
    std: Annotated[str, typer.Option(help="Divides the pixels after that: one number, or one per channel.")] = "1",
    cmap: Annotated[str, typer.Option(help="Colour map of the heatmaps.")] = "bwr",
    batch_size: Annotated[int, typer.Option(min=1, help="Number of images per batch.")] = 8,
) -> None:
    """Explain a folder of images: a heatmap for each, and a CSV file of the outputs.

    Earlier results in the same folder are kept, so a stopped run resumes.
    """
    runner = load(artefact)
    shape = _image_shape(runner)
    paths = _image_files(images)
    scale = _numbers(mean, float), _numbers(std, float)
    if not all(math.isfinite(value) for values in scale for value in values):
        raise InputError(f"mean and std are finite numbers, not {mean} and {std}")
    if any(len(values) not in (1, shape[0]) for values in scale) or 0.0 in scale[1]:
        raise InputError(f"mean and std have one number, or one for each of {shape[0]} channels; std is not 0")
    _check_cmap(cmap)
    if output.exists() and images.samefile(output):
        raise InputError("the heatmaps would be images of the next run: choose another folder for them")
    classes = runner.manifest["results"]["output"]["shape"][1]
    if target is not None and not 0 <= target < classes:
        raise InputError(f"target {target} is out of range: the output has {classes} classes")
    fixed = runner.manifest["arguments"][next(iter(runner.manifest["arguments"]))]["shape"][0]
    batch_size = fixed or batch_size
    settings = {"program": hash_of_file(artefact), "target": target, "mean": mean, "std": std, "cmap": cmap}
    with os_errors(InputError, output, "written to"), _results(output, settings, classes, paths) as results:
        pending = [path for path in paths if not results.has(path)]
        chunks = [pending[first : first + batch_size] for first in range(0, len(pending), batch_size)]
        for chunk in track(chunks, description="explaining", console=Console(stderr=True), transient=True):
            batch: dict[Path, np.ndarray] = {}
            for path in chunk:
                try:
                    batch[path] = _read_image(path, shape, *scale)
                except Exception as error:  # decoders raise errors of all kinds
                    results.add_problem(path, error)
            if batch:
                for path, row, heatmap in _explained(runner, batch, target, fixed):
                    try:
                        _write_heatmap(heatmap, output / f"{path.name}.png", cmap)
                    except OSError as error:
                        if error.errno in (errno.ENOSPC, errno.EROFS, errno.EDQUOT):  # all others would fail too
                            raise
                        results.add_problem(path, error)
                    else:
                        results.add([*row, ""])
    console = Console(highlight=False)
    before = f", {len(paths) - len(pending)} of them from before," if len(pending) < len(paths) else ""
    console.print(f"{len(paths) - len(results.problems)} heatmaps{before} and outputs.csv in {output}/")
    if results.problems:
        shown = [f"{row[0]}: {row[-1]}" for row in results.problems]
        rest = [f"and {len(shown) - 10} others, in outputs.csv"] if len(shown) > 10 else []
        raise InputError("these images cannot be read:\n  " + "\n  ".join(shown[:10] + rest))


@dataclass
class _Results:
    """outputs.csv: rows are appended as they come. The last row of an image is valid; `_results` drops others in the end."""

    folder: Path
    columns: list[str]
    before: dict[str, list[str]]  # rows of a stopped run, by image name
    file: TextIO
    problems: list[list[Any]] = field(default_factory=list)

    def has(self, image: Path) -> bool:
        """Whether the image was explained already and has not been replaced since."""
        name = _name_of(image)
        heatmap = self.folder / f"{image.name}.png"
        with suppress(OSError):
            return name in self.before and heatmap.is_file() and self.before[name][-2] == _version_of(image)
        return False

    def add(self, row: list[Any]) -> None:
        if row[-1]:
            self.problems.append(row)
        csv.writer(self.file).writerow(row)
        self.file.flush()

    def add_problem(self, image: Path, error: Exception) -> None:
        """Record why there is no heatmap, and remove that of a former version of the file."""
        with suppress(OSError):
            (self.folder / f"{image.name}.png").unlink(missing_ok=True)
        self.add([_name_of(image), *[""] * (len(self.columns) - 2), printable(first_lines(error))])


@contextmanager
def _results(folder: Path, settings: dict[str, Any], classes: int, images: Sequence[Path]) -> Iterator[_Results]:
    """The results in `folder`, of an earlier run with the same settings or new. In the end there is one row for each image."""
    folder.mkdir(parents=True, exist_ok=True)
    path, table = folder / "run.json", folder / "outputs.csv"
    with open(path, "a+b") as file:
        if locked(file.fileno()) is False:
            raise InputError(f"another run writes to {folder}")
        file.seek(0)
        before = file.read()
        if not before and table.exists():
            raise InputError(f"{folder} has an outputs.csv that is not from lrpfx run: choose another folder")
        if before and before != json.dumps(settings).encode():
            raise InputError(f"{folder} has the results of another program, or of other settings: choose another folder")
        if not before:
            file.write(json.dumps(settings).encode())
            file.flush()
        columns = ["file", "largest", "explained", "relevance", *(f"output_{i}" for i in range(classes)), "version", "problem"]
        rows = {name: row for name, row in _rows(table, columns).items() if not row[-1]}
        _write_rows(table, [columns, *rows.values()])
        with open(table, "a", newline="", encoding="utf-8") as output:
            yield _Results(folder, columns, rows, output)
        rows = _rows(table, columns)
        names = [name for name in map(_name_of, images) if name in rows]
        _write_rows(table, [columns, *(rows[name] for name in dict.fromkeys([*names, *rows]))])  # those of removed images last


def _rows(table: Path, columns: list[str]) -> dict[str, list[str]]:
    """The last row of each image, by its name. The last row of a killed run may be truncated, and is dropped."""
    if not table.exists():
        return {}
    try:
        with open(table, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if len(row) == len(columns)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{table} is damaged ({error}): choose another folder, or remove it to start over") from error
    return {row[0]: row for row in rows[1:]}


def _write_rows(table: Path, rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    with whole_file(table, ".csv") as temporary:
        temporary.write_text(text.getvalue(), newline="", encoding="utf-8")


def _name_of(image: Path) -> str:
    """The name of a file as text, with escapes for bytes that are not UTF-8."""
    return os.fsencode(image.name).decode("utf-8", "backslashreplace")


def _version_of(image: Path) -> str:
    """A text that changes if the file is replaced."""
    found = image.stat()
    return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ino}"


def _image_shape(runner: Runner) -> list[int]:
    """Channels, height and width of the program's input images."""
    shapes = [described["shape"][1:] for name, described in runner.manifest["arguments"].items() if name != "target"]
    if len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][0] not in (1, 3):
        raise InputError(f"the program does not take one image with 1 or 3 channels: its inputs have the shapes {shapes}")
    if runner.manifest["target"] == "weights":
        raise InputError("the program takes relevance of the output as its target; export it with --target index or max")
    if len(runner.manifest["results"]["output"]["shape"]) != 2:
        raise InputError("the program's output is not of shape (batch, classes)")
    return list(shapes[0])


def _check_cmap(cmap: str) -> None:
    try:
        get_cmap(cmap)
    except Exception as error:
        raise InputError(f"{cmap!r} is not a colour map: {first_lines(error)}.{nearest(cmap, CMAPS)}") from error


def _image_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGES)
    if not paths:
        raise InputError(f"there are no images in {folder}; their suffixes are {', '.join(IMAGES)}")
    return paths


def _read_image(path: Path, shape: Sequence[int], mean: list[float], std: list[float]) -> np.ndarray:
    """The central crop of an image, scaled to the program's input. Shape (channels, height, width)."""
    channels, height, width = shape
    if not path.is_file():
        raise InputError("it is not a file")
    with Image.open(path, formats=FORMATS) as file:
        if file.width * file.height > MOST_PIXELS:
            raise InputError(f"it has {file.width}×{file.height} pixels, more than {MOST_PIXELS}")
        if file.mode in ("F", "I"):
            raise InputError("its values have 32 bits, and their range is unknown: convert it to 8 or 16 bits")
        upright = ImageOps.exif_transpose(file)
        image = upright if file.mode.startswith("I") else upright.convert("L" if channels == 1 else "RGB")
        if image is upright:  # 16 bits, which Pillow would clip at 255
            image = Image.fromarray(np.asarray(upright, dtype=np.float32) / 257.0)
    factor = max(height / image.height, width / image.width)
    left, top = (image.width - width / factor) / 2, (image.height - height / factor) / 2
    box = (max(left, 0.0), max(top, 0.0), min(left + width / factor, image.width), min(top + height / factor, image.height))
    image = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(image, dtype=np.float64).reshape(height, width, -1) / 255.0
    result: np.ndarray = ((np.broadcast_to(pixels, (height, width, channels)) - mean) / std).transpose(2, 0, 1)
    return result


def _explained(
    runner: Runner, batch: dict[Path, np.ndarray], target: int | None, fixed: int | None
) -> Iterator[tuple[Path, list[Any], np.ndarray]]:
    """The table row and the relevance of each image of a batch."""
    pixels = np.stack(list(batch.values()))
    if fixed is not None:  # fill up the last batch with copies
        pixels = np.concatenate([pixels] * fixed)[:fixed]
    name = next(iter(runner.manifest["arguments"]))
    arguments = {name: pixels.astype(runner.manifest["arguments"][name]["dtype"])}
    results = _run_for(runner, arguments, target)
    maps = results["relevance"]
    maps = maps if maps.ndim == 3 else maps.sum(1)
    for path, values, heatmap in zip(batch, results["output"], maps, strict=False):
        best = int(values.argmax())
        total = None if heatmap.dtype == np.uint8 else float(heatmap.astype(np.float64).sum())
        explained = best if target is None else target
        figures = [best, explained, "" if total is None else total, *map(float, values)]
        yield path, [_name_of(path), *figures, _version_of(path)], heatmap


def _write_heatmap(heatmap: np.ndarray, path: Path, cmap: str) -> None:
    """Write an image atomically. `whole_file` would scan the folder for each image."""
    temporary = path.with_name(".unfinished.png")
    try:
        imsave(temporary, heatmap, cmap=cmap, symmetric=True)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _run_for(runner: Runner, arguments: dict[str, np.ndarray], target: int | None) -> dict[str, np.ndarray]:
    """The results for a class; if none is given, for the largest output of each sample."""
    if runner.manifest["target"] == "max":
        if target is not None:
            raise InputError("the program explains its largest output; export it with --target index to choose a class")
        return runner(**arguments)
    count = len(next(iter(arguments.values())))
    results = runner(**arguments, target=np.full(count, target or 0))
    if target is None:
        results = runner(**arguments, target=results["output"].argmax(1))
    return results


# --- inspect and verify -----------------------------------------------------------------------------------------------------


@app.command()
def inspect(artefact: Artefact) -> None:
    """Show the contents of a file: its origin, arguments and results, and the rule of every node."""
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
    """Run the self-tests of files; the exit status is 1 if any fails."""
    rows, failed = [], False
    for path in artefacts:
        try:
            rows.append((str(path), "passed", f"differs by {load(path).verify():.1e}"))
        except LrpfxError as error:
            failed = True
            rows.append((str(path), "FAILED", str(error)))
    Console(highlight=False).print(_table(("file", "self-test", ""), rows))
    if failed:
        raise typer.Exit(1)


def _table(columns: Sequence[str], rows: Any, header: bool = True) -> Table:
    table = Table(*columns, show_header=header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(escape(printable(text)) for text in row))
    return table

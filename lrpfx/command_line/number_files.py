"""Files that hold no photographs, for all commands: tables, series, sounds, volumes, graphs and several inputs."""

import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lrpfx.command_line.options import ModelOptions, check_mask, classes_of, invalid
from lrpfx.command_line.terminal import Stages, say, say_data, say_table
from lrpfx.errors import InputError, first_lines, os_errors
from lrpfx.explanation.arrays import Form
from lrpfx.explanation.doors import KINDS_OF_FILES, suffix_of
from lrpfx.explanation.explainer import Explainer
from lrpfx.explanation.explanation import Explained, Several
from lrpfx.explanation.series import SeriesExplanation, SeriesExplanations, WaveExplanation, WaveExplanations
from lrpfx.explanation.tables import TableExplanation, TableExplanations
from lrpfx.explanation.volumes import VolumeExplanation
from lrpfx.images import nifti
from lrpfx.images.opening import image_suffixes
from lrpfx.request.regions import Region
from lrpfx.support.graph_data import is_graph
from lrpfx.support.numbered_names import numbered
from lrpfx.support.optional_packages import optional_package

Array = NDArray[Any]

#: Explanations of several samples that one file holds.
_OF_ROWS = (TableExplanations, SeriesExplanations, WaveExplanations)
#: How the names of files of masks end.
_MASKS = (".npy", *nifti.SUFFIXES)


@dataclass(frozen=True)
class NumberOptions:
    """What the numbers in files stand for."""

    form: Annotated[
        str | None,
        typer.Option(help="What the numbers in .csv and .npy files are: table, series or volume; by default as in Python."),
    ] = None
    names: Annotated[str | None, typer.Option(help="The names of features, separated by commas.")] = None
    channels: Annotated[
        str | None, typer.Option(help="Whether the features of series are first, as (features, steps), or last, the default.")
    ] = None

    @property
    def given(self) -> bool:
        """Whether there is any of them."""
        return (self.form, self.names, self.channels) != (None, None, None)

    @property
    def features(self) -> tuple[str, ...] | None:
        """The names of features."""
        return None if self.names is None else tuple(one.strip() for one in self.names.split(","))

    def check_unused(self) -> None:
        """Raise `InputError` if they are given for photographs."""
        if self.given:
            raise invalid(
                "--form, --names and --channels are for tables, series, sounds and volumes: .csv, .npy, .wav, .nii, .nii.gz"
            )


class Content(NamedTuple):
    """What a file holds, as an explainer takes it, what it stands for, and the samples of a sound for each second."""

    values: Any
    form: Form | None = None
    rate: float | None = None


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The paths, and in place of folders of numbers the files in them. Raises `InputError` as `numbers_in` does."""
    return [file for path in paths for file in ((numbers_in(path) if path.is_dir() else []) or [path])]


def are_of_numbers(paths: Sequence[Path]) -> bool:
    """Whether files hold numbers. Raises `InputError` where only some do, or for files that commands do not read."""
    found = [None if path.is_dir() else suffix_of(path) for path in paths]
    for path, suffix in zip(paths, found, strict=True):
        remedy = None if suffix is None else KINDS_OF_FILES[suffix].in_commands
        if suffix is not None and remedy is not None:
            raise InputError(f"{path} seems to be {KINDS_OF_FILES[suffix].what}: {remedy}", topic="image-files")
    if any(found) and not all(found):
        place = found.index(None)
        other = next(path for path, suffix in zip(paths, found, strict=True) if suffix is not None)
        raise invalid(f"{paths[place]} is no file of numbers, as {other} is: explain them apart")
    return any(found)


@dataclass(frozen=True)
class NumberExplainers:
    """Explainers of a model for files: those with the same form and rate have one.

    `settings`: arguments of `Explainer`.
    """

    model: Any
    numbers: NumberOptions
    settings: Mapping[str, Any]
    made: dict[tuple[Form | None, float | None], Explainer[Any]] = field(default_factory=dict)

    def for_content(self, content: Content) -> Explainer[Any]:
        """The explainer for what a file holds."""
        form: Any = content.form or self.numbers.form
        if self.numbers.form not in (None, form):
            raise invalid(f"--form {self.numbers.form} is for .csv and .npy: the file holds a {form}")
        if (form, content.rate) not in self.made:
            make: Any = Explainer
            said = {"names": self.numbers.features, "channels": self.numbers.channels, "rate": content.rate}
            self.made[form, content.rate] = make(self.model, form=form, **said, **self.settings)
        return self.made[form, content.rate]

    def explained(self, content: Content, targets: Sequence[str], mask: Array | None = None) -> Any:
        """The explanation of a file, or of the samples in it. `mask`: where the one class is explained."""
        explainer = self.for_content(content)
        wanted: list[Any] = [*classes_of(targets, explainer.categories)]
        values = content.values
        if isinstance(values, np.ndarray) and explainer.reading.form_of(values, self.model, False) is None:
            if values.ndim not in (3, 4) or values.dtype.kind != "f":
                raise invalid(
                    f"an array of shape {values.shape} of {values.dtype} may be many things: --form table, series or volume "
                    "says what it is; images as the model takes them are floating point, (batch, channels, height, width), and "
                    "tokens are explained in Python"
                )
            values = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        return explainer(values, targets=(wanted if mask is None else [Region(wanted[0], mask)]) or None)


def mask_for(path: Path, place: Path) -> Array:
    """The mask of a file of numbers: what a file holds, or that of a folder with the same name, but for its ending.

    Raises `InputError` if there is none, if it is no array, and if it lies elsewhere than the volume.
    """
    if place.is_dir():
        found = [one for one in sorted(place.iterdir()) if suffix_of(one) in _MASKS and _stem(one) == _stem(path)]
        if len(found) != 1:
            raise InputError(
                f"{path.name} has {len(found) or 'no'} masks in {place}: give it one with its name and any of the endings "
                f"{', '.join(_MASKS)}",
                topic="image-files",
            )
        place = found[0]
    if suffix_of(place) not in _MASKS:
        raise invalid(f"--mask of a file of numbers is an array, {', '.join(_MASKS)}, of its steps or voxels, not {place}")
    values = content_of(place).values
    if nifti.is_file_name(place):
        values, affine = nifti.opened(place)
        if nifti.is_file_name(path):
            volume, own = nifti.opened(path)
            corners = np.array([[*corner, 1] for corner in np.ndindex(2, 2, 2)]) * [*volume.shape[1:], 1]
            off = np.linalg.norm((corners @ (affine - own).T)[:, :3], axis=1).max()
            if values.shape[1:] == volume.shape[1:] and off > 0.5 * np.linalg.norm(own[:3, :3], axis=0).min():
                raise InputError(
                    f"the mask {place} lies up to {off:.3g} mm away from {path}: resample it to the voxels of the volume",
                    topic="volumes",
                )
    return np.asarray(values[0] if values.ndim == 4 and len(values) == 1 else values)


def _stem(path: Path) -> str:
    """The name of a file without its ending, .nii.gz included."""
    return path.name[: -len(suffix_of(path) or "")]


@dataclass(frozen=True)
class NumberFile:
    """A file of numbers, what it holds, and the mask of the region that is explained, if there is one."""

    path: Path
    content: Content
    mask: Array | None


def check_options_of_numbers(options: ModelOptions) -> None:
    """Raise `InputError` for options that are for photographs."""
    if options.given:
        raise invalid("--mean, --std, --size, --resize, --interpolation and --raw are for photographs")


def read_files(paths: Sequence[Path], options: ModelOptions, targets: Sequence[str], mask: Path | None) -> list[NumberFile]:
    """The content of files. Raises `InputError`, also for options that are for photographs and a mask that does not fit."""
    check_options_of_numbers(options)
    check_mask(mask, targets, None)
    return [NumberFile(path, content_of(path), None if mask is None else mask_for(path, mask)) for path in paths]


def explain_numbers(
    explainers: NumberExplainers, given: Sequence[NumberFile], targets: Sequence[str], output_folder: Path, shown: Stages
) -> Callable[[], None]:
    """Explain files of numbers: for each, and each of several targets, a sheet and its relevance. Returns what says so."""
    rows, files = [], []
    names = numbered([one.path.name.partition(".")[0] for one in given])
    for one, name in zip(given, names, strict=True):
        shown.begin(f"explaining {one.path.name}")
        classes_of(targets, explainers.for_content(one.content).categories)
        rows_of, targets_of = [], []
        asked = [[target] for target in targets] or [[]]
        found = [explainers.explained(one.content, target, one.mask) for target in asked]  # before anything is written
        for number, explained in enumerate(found, 1):
            saved = _saved(explained, output_folder / (f"{name}.{number}" if len(targets) > 1 else name))
            each = each_of(explained)
            answer = each[0].answers[0]
            rows_of.append((f"{answer.category} {answer.category.score:.4g}", f"{answer.balance.inputs:.4g}"))
            targets_of.append({"explained": str(answer.category), **saved})
        files.append({"file": one.path.name, "samples": len(each), **targets_of[0]})
        files[-1] |= {"targets": targets_of} if len(targets) > 1 else {}
        rows.append((one.path.name, str(len(each)), *("\n".join(column) for column in zip(*rows_of, strict=True))))

    def say_all() -> None:
        say_table(("file", "samples", "explained, of the first", "relevance"), rows)
        say(f"rules: {each[0].rules}")
        say(f"{len(rows)} explained: {output_folder}/")
        say_data({"folder": output_folder, "files": files})

    return say_all


def each_of(explained: Any) -> list[Explained]:
    """The explanations in the result of an explainer."""
    return [explained] if isinstance(explained, Explained) else list(explained)


def _saved(explained: Any, place: Path) -> dict[str, Any]:
    """Write the sheet and the relevance of an explanation, or of several into files of their own if no file holds them all.

    `place`: the path without an ending. Returns the paths of the "sheet" and of the "relevance", lists of several.
    """
    if isinstance(explained, Several) and not isinstance(explained, _OF_ROWS):
        parts = [_saved(one, place.with_name(f"{place.name}_{number}")) for number, one in enumerate(explained, 1)]
        return {name: [one[name] for one in parts] for name in parts[0]}
    ending = ".csv" if isinstance(explained, (*_OF_ROWS, TableExplanation, SeriesExplanation, WaveExplanation)) else ".npz"
    if isinstance(explained, VolumeExplanation) and explained.affine is not None:
        ending = ".nii.gz"
    files = {"sheet": f"{place.name}.sheet.png", "relevance": f"{place.name}{ending}"}
    return {name: explained.save(place.with_name(file)) for name, file in files.items()}


def content_of(path: Path) -> Content:
    """What a file of numbers holds. Raises `InputError`."""
    suffix = suffix_of(path) or ""
    if suffix in nifti.SUFFIXES:
        return Content(path, "volume")
    if not path.is_file():
        raise InputError(f"there is no file {path}", topic="files-and-folders")
    try:
        with os_errors(InputError, path, "read"):
            if suffix == ".csv":
                return Content(optional_package("pandas", "a file of .csv").read_csv(path))
            if suffix == ".npy":
                return Content(_numbers(path, np.load(path, allow_pickle=False)))
            if suffix == ".npz":
                with np.load(path, allow_pickle=False) as arrays:
                    return Content(dict(arrays))
            values, rate = sound_in(path)
            return Content(values, "wave", rate)
    except InputError:
        raise
    except Exception as error:  # each reader has errors of its own for files that are damaged
        is_numpy = suffix in (".npy", ".npz")
        reason = "it is damaged, or it holds objects of Python in place of numbers" if is_numpy else first_lines(error)
        raise InputError(f"{path} cannot be read: {reason}", topic="tables-series-and-waves") from error


def _numbers(path: Path, values: Array) -> Array:
    """The array in a file of .npy. Raises `InputError` if it holds no numbers."""
    if values.dtype.kind not in "fiub" or not values.ndim:
        what = str(values.dtype) if values.ndim else "a single value"
        raise InputError(f"{path} holds {what}, not numbers along axes", topic="tables-series-and-waves")
    return values


def sound_in(path: Path) -> tuple[Any, float]:
    """The samples in a file of sound, (samples,) or (1, channels, samples), from -1 to 1, and how many there are a second."""
    with wave.open(str(path), "rb") as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        content = np.frombuffer(file.readframes(file.getnframes()), dtype=np.uint8)
    if width == 1:
        values = content.astype(np.float32) - 128
    else:
        padded = np.zeros((len(content) // width, 4), dtype=np.uint8)
        padded[:, 4 - width :] = content.reshape(-1, width)  # the highest bytes of 32 bits
        values = (padded.view("<i4")[:, 0] / 2.0 ** (8 * (4 - width))).astype(np.float32)
    samples = (values / 2.0 ** (8 * width - 1)).reshape(-1, channels).T
    return (samples[0] if channels == 1 else samples[None]), float(rate)


# --- data sets ----------------------------------------------------------------------------------------------------------------


def numbers_in(place: Path) -> list[Path]:
    """The files of numbers that a path stands for, those of a folder in order; none for photographs.

    Raises `InputError` for files that commands do not read, or of several kinds.
    """
    files = sorted(path for path in place.iterdir() if path.is_file()) if place.is_dir() else [place]
    found = [path for path in files if suffix_of(path) is not None]
    found = [path for path in found if KINDS_OF_FILES[suffix_of(path) or ""].what != "a text"] or found  # such as README.txt
    photographs = image_suffixes()
    if not found or any(path.suffix.lower() in photographs for path in place.glob("**/*")):
        return []
    are_of_numbers(found)
    kinds = {suffix_of(path) for path in found}
    if len(kinds) > 1:
        raise invalid(f"{place} has files of several kinds, {', '.join(sorted(map(str, kinds)))}: give each kind a folder")
    return found


def data_set_of(paths: Sequence[Path], numbers: NumberOptions) -> tuple[Any, Content]:
    """The samples in files of one kind, as `lrpfx.datasets.attribute` takes them, and the first content.

    A table, an array or several inputs are one file, with their samples along the first axis; of sounds, volumes and graphs,
    and of several files of several inputs, each file is a sample. Raises `InputError`.
    """
    suffix = suffix_of(paths[0])
    first = content_of(paths[0])
    if suffix == ".npz" and len(paths) == 1 and not is_graph(first.values):
        return _samples_of_inputs(paths[0], first.values), first
    if suffix == ".npz" or first.form is not None:
        return NumberFiles(paths), first
    if len(paths) > 1:
        raise invalid(f"a table or an array is one file with all samples, but there are {len(paths)}: {paths[0]}, {paths[1]}")
    if suffix == ".csv" and numbers.form in (None, "table"):
        return first.values, first
    is_of_one_feature = numbers.features is not None and len(numbers.features) == 1
    least = 3 if numbers.form == "series" and not is_of_one_feature else 2
    if suffix == ".csv" or first.values.ndim < least:
        raise invalid(f"{paths[0]} is one sample: write an array with several along its first axis into a file of .npy")
    return torch.from_numpy(first.values).float(), first


def _samples_of_inputs(path: Path, arrays: Mapping[str, Array]) -> list[dict[str, torch.Tensor]]:
    """The samples of several inputs in a file, by the names of the model's arguments. Raises `InputError`."""
    counts = {name: len(one) if one.ndim else 0 for name, one in arrays.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        shown = ", ".join(f"{name} {tuple(one.shape)}" for name, one in arrays.items())
        raise InputError(f"{path} holds {shown or 'nothing'}: arrays of inputs have a first axis for samples", topic="samples")
    tensors = {name: torch.from_numpy(np.ascontiguousarray(_numbers(path, one))) for name, one in arrays.items()}
    tensors = {name: one.float() if one.is_floating_point() else one for name, one in tensors.items()}
    return [{name: one[place] for name, one in tensors.items()} for place in range(next(iter(counts.values())))]


class NumberFiles(Dataset[Any]):
    """Sounds, volumes, graphs or several inputs, a sample for each file. Those with another rate than the first have an error.

    `root` and `samples` are those of the data sets of torchvision: they name the samples.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.root = str(paths[0].parent)
        self.samples = [(str(path), None) for path in paths]
        self.rate = content_of(paths[0]).rate

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: int) -> torch.Tensor | dict[str, Any]:
        path = Path(self.samples[place][0])
        content = content_of(path)
        if is_graph(content.values):
            return dict(content.values)
        if isinstance(content.values, dict):
            inputs, *others = _samples_of_inputs(path, content.values)
            if others:
                raise InputError(f"{path} holds {1 + len(others)} samples: one of several files holds one", topic="samples")
            return inputs
        if content.rate != self.rate:
            raise InputError(f"{content.rate:g} samples a second, and {self.rate:g} in the first file", topic="samples")
        values = nifti.opened(content.values)[0] if content.form == "volume" else content.values
        values = values[0] if content.form == "wave" and values.ndim == 3 else values
        return torch.from_numpy(np.ascontiguousarray(values)).float()

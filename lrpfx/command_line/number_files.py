"""Files that hold no photographs, for all commands: tables, series, sounds, volumes, graphs and several inputs."""

import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch.utils.data import Dataset

from lrpfx.command_line.models import model_named
from lrpfx.command_line.options import CompositeOptions, ModelOptions, classes_of, invalid
from lrpfx.command_line.terminal import say, say_data, say_table, stages
from lrpfx.errors import InputError, first_lines, os_errors
from lrpfx.explanation.arrays import Form, in_form_of
from lrpfx.explanation.doors import KINDS_OF_FILES, suffix_of
from lrpfx.explanation.explainer import Explainer
from lrpfx.explanation.explanation import Explained
from lrpfx.explanation.graphs import GraphExplanation
from lrpfx.explanation.joint import JointExplanation
from lrpfx.explanation.volumes import VolumeExplanation, VolumeExplanations
from lrpfx.images import nifti
from lrpfx.images.opening import image_suffixes
from lrpfx.support.files import check_place
from lrpfx.support.numbered_names import numbered
from lrpfx.support.optional_packages import optional_package

#: How the names of files end whose numbers have a form of their own.
_FORMS: dict[str, Form] = {".wav": "wave", **dict.fromkeys(nifti.SUFFIXES, "volume")}


@dataclass(frozen=True)
class NumberOptions:
    """What the numbers in files stand for."""

    form: Annotated[
        str | None,
        typer.Option(help="What the numbers in .csv and .npy files are: table, series or volume; by default as in Python."),
    ] = None
    names: Annotated[str | None, typer.Option(help="The names of features, separated by commas.")] = None

    @property
    def given(self) -> bool:
        """Whether there is any of them."""
        return self.form is not None or self.names is not None

    @property
    def features(self) -> tuple[str, ...] | None:
        """The names of features."""
        return None if self.names is None else tuple(one.strip() for one in self.names.split(","))

    def check_unused(self) -> None:
        """Raise `InputError` if they are given for photographs."""
        if self.given:
            raise invalid("--form and --names are for tables, series, sounds and volumes: .csv, .npy, .wav, .nii, .nii.gz")


class Content(NamedTuple):
    """What a file holds, as an explainer takes it, what it stands for, and the samples of a sound for each second."""

    values: Any
    form: Form | None = None
    rate: float | None = None


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
            names = self.numbers.features
            self.made[form, content.rate] = make(self.model, form=form, names=names, rate=content.rate, **self.settings)
        return self.made[form, content.rate]

    def explained(self, content: Content, targets: Sequence[str]) -> Any:
        """The explanation of a file, or of the samples in it."""
        explainer = self.for_content(content)
        wanted = classes_of(targets, explainer.categories)
        return explainer(content.values, targets=wanted or None)


def explain_numbers(
    model: str,
    paths: Sequence[Path],
    rules: CompositeOptions,
    options: ModelOptions,
    given: NumberOptions,
    output_folder: Path,
    targets: Sequence[str],
    reference: float | list[float] | None,
    allow_native: bool,
) -> None:
    """Explain files of numbers: a sheet for each, and its relevance."""
    check_options_of_numbers(options)
    check_place(output_folder, is_folder=True)
    contents = {path: content_of(path) for path in paths}
    with stages(f"loading {model}") as shown:
        named = model_named(model, options.weights, options.metadata, options.device, allow_native=allow_native)
        categories = named.names_of_classes(options.categories)
        settings = {"composite": rules.chosen(None), "categories": categories, "reference": reference}
        explainers = NumberExplainers(named.model, given, settings)
        rows, files = [], []
        names = numbered([path.name.partition(".")[0] for path in paths])
        for path, name in zip(paths, names, strict=True):
            shown.begin(f"explaining {path.name}")
            explained = explainers.explained(contents[path], targets)
            saved = [explained.save(output_folder / f"{name}{ending}") for ending in (".sheet.png", _ending(explained))]
            each = each_of(explained)
            answers = [answer for one in each for answer in one.answers]
            rows.append((path.name, len(each), answers[0].category, answers[0].balance.inputs, each[0].rules))
            files.append({"file": path.name, "samples": len(each), "sheet": saved[0], "relevance": saved[1]})
    say_table(
        ("file", "samples", "explained, of the first", "relevance"),
        [(name, str(count), f"{one} {one.score:.4g}", f"{reached:.4g}") for name, count, one, reached, _ in rows],
    )
    say(f"rules: {rows[-1][-1]}")
    say(f"{len(rows)} explained: {output_folder}/")
    say_data({"folder": output_folder, "files": files})


def check_options_of_numbers(options: ModelOptions) -> None:
    """Raise `InputError` for options that are for photographs."""
    if options.given:
        raise invalid("--mean, --std, --size, --resize, --interpolation and --raw are for photographs")


def each_of(explained: Any) -> list[Explained]:
    """The explanations in the result of an explainer."""
    return [explained] if isinstance(explained, Explained) else list(explained)


def _ending(explained: Any) -> str:
    """How the name of the file with the relevance ends."""
    if isinstance(explained, VolumeExplanation):
        return ".npz" if explained.affine is None else ".nii.gz"
    if isinstance(explained, VolumeExplanations):
        raise InputError("a file has one volume: write several into a file each", topic="volumes")
    return ".npz" if isinstance(explained, (GraphExplanation, JointExplanation)) else ".csv"


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
                return Content(np.load(path, allow_pickle=False))
            if suffix == ".npz":
                with np.load(path, allow_pickle=False) as arrays:
                    return Content(dict(arrays))
            values, rate = sound_in(path)
            return Content(values, "wave", rate)
    except InputError:
        raise
    except Exception as error:  # each reader has errors of its own for files that are damaged
        raise InputError(f"{path} cannot be read: {first_lines(error)}", topic="tables-series-and-waves") from error


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

    A table or an array is one file, with its samples along the first axis; of sounds and volumes, each file is a sample. Raises
    `InputError`.
    """
    suffix = suffix_of(paths[0])
    if suffix == ".npz":
        raise InputError(
            f"{paths[0]} holds {KINDS_OF_FILES[suffix].what}: several inputs are explained as a data set in Python, by "
            "lrpfx.datasets.attribute, and graphs by lrpfx explain, each by itself",
            topic="samples",
        )
    first = content_of(paths[0])
    if first.form is not None:
        return NumberFiles(paths), first
    if len(paths) > 1:
        raise invalid(f"a table or an array is one file with all samples, but there are {len(paths)}: {paths[0]}, {paths[1]}")
    if suffix == ".csv" and numbers.form in (None, "table"):
        return first.values, first
    if suffix == ".npy" and first.values.dtype.kind not in "fiub":
        raise InputError(f"{paths[0]} holds {first.values.dtype}, not numbers", topic="tables-series-and-waves")
    is_of_one_feature = numbers.features is not None and len(numbers.features) == 1
    least = 3 if numbers.form == "series" and not is_of_one_feature else 2
    if suffix == ".csv" or first.values.ndim < least:
        raise invalid(f"{paths[0]} is one sample: write an array with several along its first axis into a file of .npy")
    return torch.from_numpy(first.values).float(), first


class NumberFiles(Dataset[Any]):
    """Sounds or volumes, a sample for each file. Those with another rate than the first have an error.

    `root` and `samples` are those of the data sets of torchvision: they name the samples.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.root = str(paths[0].parent)
        self.samples = [(str(path), None) for path in paths]
        self.rate = content_of(paths[0]).rate
        self.has_axis = False

    def fit(self, model: Any) -> None:
        """Give sounds of one channel an axis for it, if the model needs that."""
        first = self[0]
        self.has_axis = self.rate is not None and first.ndim == 1 and in_form_of(model, first[None])[0].ndim == 3

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: int) -> torch.Tensor:
        content = content_of(Path(self.samples[place][0]))
        if content.rate != self.rate:
            raise InputError(f"{content.rate:g} samples a second, and {self.rate:g} in the first file", topic="samples")
        values = nifti.opened(content.values)[0] if content.form == "volume" else content.values
        values = values[0] if content.form == "wave" and values.ndim == 3 else values[None] if self.has_axis else values
        return torch.from_numpy(np.ascontiguousarray(values)).float()

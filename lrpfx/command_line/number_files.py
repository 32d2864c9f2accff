"""`lrpfx explain` for files that hold no photographs: tables, series, sounds and volumes."""

import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from lrpfx.command_line.models import model_named
from lrpfx.command_line.options import CompositeOptions, ModelOptions, classes_of, invalid
from lrpfx.command_line.terminal import say, say_data, say_table, stages
from lrpfx.errors import InputError, first_lines, os_errors
from lrpfx.explanation.arrays import Form
from lrpfx.explanation.explainer import Explainer
from lrpfx.explanation.explanation import Explained
from lrpfx.explanation.volumes import VolumeExplanation, VolumeExplanations
from lrpfx.images import nifti
from lrpfx.images.opening import image_suffixes
from lrpfx.support.files import check_place
from lrpfx.support.numbered_names import numbered
from lrpfx.support.optional_packages import optional_package

#: How the names of files end that hold numbers, and what these are, if that is known.
_FORMS: dict[str, Form | None] = {".csv": None, ".npy": None, ".wav": "wave", **dict.fromkeys(nifti.SUFFIXES, "volume")}
#: Files that other doors take, and which.
_ELSEWHERE = {
    **dict.fromkeys((".txt", ".json"), "a text is explained in Python, by lrpfx.explain(model, text, tokenizer=tokenizer)"),
    **dict.fromkeys((".pt", ".pth", ".pkl", ".npz"), "graphs and several inputs are explained in Python, by lrpfx.explain"),
    **dict.fromkeys((".mp4", ".avi", ".mov"), "frames of a video are explained as an array: see docs/volumes.md"),
    **dict.fromkeys((".mp3", ".flac", ".ogg"), "sounds are read from .wav"),
    **dict.fromkeys((".dcm", ".mha", ".nrrd"), "volumes are read from .nii and .nii.gz"),
    **dict.fromkeys((".parquet", ".xlsx", ".tsv"), "tables are read from .csv"),
}


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


def suffix_of(path: Path) -> str | None:
    """How the name of a file of numbers ends; None for others."""
    return next((suffix for suffix in _FORMS if path.name.lower().endswith(suffix)), None)


def are_of_numbers(paths: Sequence[Path]) -> bool:
    """Whether files hold numbers. Raises `InputError` where only some do, or for files that have another door."""
    elsewhere = next((path for path in paths if path.suffix.lower() in _ELSEWHERE and not path.is_dir()), None)
    if elsewhere is not None:
        raise InputError(f"{elsewhere}: {_ELSEWHERE[elsewhere.suffix.lower()]}", topic="image-files")
    found = [suffix_of(path) is not None for path in paths]
    if any(found) and not all(found):
        raise invalid(
            f"{paths[found.index(False)]} is no file of numbers, as {paths[found.index(True)]} is: explain them apart"
        )
    return any(found)


def check_is_of_photographs(folder: Path) -> None:
    """Raise `InputError` for a folder or file of numbers, which data sets take in Python."""
    of_numbers = [path for path in (folder.iterdir() if folder.is_dir() else [folder]) if suffix_of(path) is not None]
    photographs = image_suffixes()
    if of_numbers and not any(path.suffix.lower() in photographs for path in folder.glob("**/*")):
        raise invalid(
            f"{of_numbers[0]} is no photograph: data sets of tables, series, sounds and volumes are explained in Python, by "
            "lrpfx.datasets.attribute(lrpfx.Explainer(model), data, output)"
        )


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
    """Explain tables (.csv), arrays (.npy), sounds (.wav) and volumes (.nii, .nii.gz): a sheet for each, and its relevance."""
    if options.given:
        raise invalid("--mean, --std, --size, --resize, --interpolation and --raw are for photographs")
    rules.check()
    check_place(output_folder, is_folder=True)
    contents = {path: _read(path) for path in paths}
    with stages(f"loading {model}") as shown:
        named = model_named(model, options.weights, options.metadata, options.device, allow_native=allow_native)
        categories = named.names_of_classes(options.categories)
        explainers: dict[tuple[Form | None, float | None], Explainer[Any]] = {}
        rows, files = [], []
        names = numbered([path.name.partition(".")[0] for path in paths])
        for path, name in zip(paths, names, strict=True):
            shown.begin(f"explaining {path.name}")
            values, rate = contents[path]
            form: Any = _FORMS[suffix_of(path) or ""] or given.form
            if (form, rate) not in explainers:
                settings = {"composite": rules.chosen(None), "categories": categories, "reference": reference}
                make: Any = Explainer
                explainers[form, rate] = make(named.model, form=form, names=given.features, rate=rate, **settings)
            explainer = explainers[form, rate]
            wanted = classes_of(targets, explainer.categories)
            explained = explainer(values, targets=wanted or None)
            saved = [explained.save(output_folder / f"{name}{ending}") for ending in (".sheet.png", _ending(explained))]
            each = [explained] if isinstance(explained, Explained) else list(explained)
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


def _ending(explained: Any) -> str:
    """How the name of the file with the relevance ends."""
    if isinstance(explained, VolumeExplanation):
        return ".npz" if explained.affine is None else ".nii.gz"
    if isinstance(explained, VolumeExplanations):
        raise InputError("a file has one volume: write several into a file each", topic="volumes")
    return ".csv"


def _read(path: Path) -> tuple[Any, float | None]:
    """The numbers in a file, as an explainer takes them, and the samples of a sound for each second."""
    suffix = suffix_of(path)
    if suffix in nifti.SUFFIXES:
        return path, None
    if not path.is_file():
        raise InputError(f"there is no file {path}", topic="files-and-folders")
    try:
        with os_errors(InputError, path, "read"):
            if suffix == ".csv":
                return optional_package("pandas", "a file of .csv").read_csv(path), None
            if suffix == ".npy":
                return np.load(path, allow_pickle=False), None
            return sound_in(path)
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

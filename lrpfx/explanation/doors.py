"""Which door takes an input: what to write where it is of another kind than it was read as."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lrpfx.errors import InputError, InputTypeError
from lrpfx.images.opening import image_suffixes


@dataclass(frozen=True)
class FileKind:
    """What files hold that are no photographs.

    `what`: in words. `in_python`: what to write there. `in_commands`: what to do for a command; None if commands read the file.
    """

    what: str
    in_python: str
    in_commands: str | None = None


_TABLE = FileKind("a table", "pass it as a DataFrame of pandas", "tables are read from .csv")
_SERIES = FileKind("a table or series", "pass pandas.read_csv(path), for series with form='series'")
_SOUND = FileKind("a sound", "pass its samples as an array, with rate=")
_VOLUME = FileKind("a volume", "the model has no layers for volumes, or pass form='volume'")
#: How names of files end -> what they hold.
KINDS_OF_FILES = {
    ".csv": _SERIES,
    ".tsv": FileKind(_SERIES.what, "pass pandas.read_csv(path, sep='\\t'), for series with form='series'", _TABLE.in_commands),
    **dict.fromkeys((".parquet", ".xlsx"), _TABLE),
    ".npy": FileKind("an array", "pass numpy.load(path)"),
    ".npz": FileKind("arrays by name, a graph or several inputs", "pass dict(numpy.load(path))"),
    ".wav": _SOUND,
    **dict.fromkeys((".flac", ".mp3", ".ogg"), FileKind(_SOUND.what, _SOUND.in_python, "sounds are read from .wav")),
    **dict.fromkeys(
        (".mp4", ".avi", ".mov"),
        FileKind(
            "a video",
            "pass its frames as a tensor (channels, frames, height, width)",
            "frames are read from .npy, (channels, frames, height, width)",
        ),
    ),
    **dict.fromkeys(
        (".pt", ".pth", ".pkl"),
        FileKind(
            "a file of Python",
            "pass what it holds",
            "graphs and several inputs are read from .npz, arrays by the names of the model's arguments",
        ),
    ),
    **dict.fromkeys((".nii", ".nii.gz"), _VOLUME),
    **dict.fromkeys(
        (".dcm", ".mha", ".nrrd"),
        FileKind(_VOLUME.what, "pass its values as an array, or a file of NIfTI", "volumes are read from .nii and .nii.gz"),
    ),
    **dict.fromkeys(
        (".txt", ".json"),
        FileKind(
            "a text", "pass what it holds, with tokenizer=", "a text is explained in Python, by lrpfx.explain(..., tokenizer=)"
        ),
    ),
}


def suffix_of(path: str | os.PathLike[str]) -> str | None:
    """How the name of a file of a known kind ends; None for others."""
    name = os.fsdecode(path).lower()
    return next((suffix for suffix in KINDS_OF_FILES if name.endswith(suffix)), None)


def is_file_name(text: str) -> bool:
    """Whether a text is the name of a file of photographs or of a known kind, and not a sentence."""
    return len(text.split()) == 1 and (suffix_of(text) is not None or os.path.splitext(text)[1].lower() in image_suffixes())


_OF_PHOTOGRAPHS = "for photographs, pass preprocess=, such as weights.transforms() for torchvision's models"
#: What an input is read as -> in words.
_READINGS = {
    None: "photographs (batch, channels, height, width)",
    "table": "a table (rows, features)",
    "series": "series (batch, steps, features)",
    "wave": "waves (batch, samples) or (batch, channels, samples), of which one with several channels is wave[None]",
    "volume": "a volume (channels, depth, height, width)",
}
OTHERS = (
    'form="table", "series" or "volume", rate= for waves, preprocess= for photographs and tokenizer= for texts say what an '
    "input is; several inputs are a dict by the names of the model's arguments"
)


def what_it_is(given: Any) -> str:
    """What an input seems to be that is no tensor of images, and what to write for it."""
    if isinstance(given, (list, tuple)) and given and not isinstance(given[0], (int, float)):
        return what_it_is(given[0])
    if isinstance(given, (str, os.PathLike)):
        suffix = suffix_of(given)
        if suffix is not None:
            return f"{given} seems to be {KINDS_OF_FILES[suffix].what}: {KINDS_OF_FILES[suffix].in_python}"
        if os.path.splitext(given)[1].lower() in image_suffixes() or os.path.exists(given):
            return _OF_PHOTOGRAPHS
        return "for texts, pass tokenizer=; for photographs preprocess=, such as weights.transforms() for torchvision's models"
    if isinstance(given, (int, float, list, tuple)):
        return f"numbers are arrays: np.array(...) or torch.tensor(...). {OTHERS}"
    if isinstance(given, (Dataset, DataLoader)):
        return "data sets are explained by lrpfx.datasets.attribute(explainer, data, path), or their inputs batch by batch"
    if isinstance(given, torch.Tensor) and given.is_complex():
        return "complex numbers are given as real ones, torch.view_as_real(x), to a module that takes these"
    is_of_integers = isinstance(given, torch.Tensor) and not given.is_floating_point()
    if is_of_integers or (isinstance(given, np.ndarray) and given.dtype.kind in "iub"):
        return "for tokens, pass tokenizer=; for pixels preprocess=; integers in a table are form='table'"
    if hasattr(given, "convert") and hasattr(given, "size"):
        return _OF_PHOTOGRAPHS
    if hasattr(given, "x_dict") and hasattr(given, "edge_index_dict"):
        return (
            "graphs with nodes of several types are explained by lrpfx.attribute, with "
            '{"x_dict": data.x_dict, "edge_index_dict": data.edge_index_dict} as the inputs and as example_inputs='
        )
    if hasattr(given, "nodes") and hasattr(given, "edges"):
        return "a graph is an object or a dict with x and edge_index, as torch_geometric.utils.from_networkx makes it"
    return OTHERS


def check_no_list(given: Any) -> None:
    """Raise `InputTypeError` for a list of numbers, which may stand for anything."""
    first = given
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    if isinstance(given, (list, tuple)) and isinstance(first, (int, float, np.number)):
        raise InputTypeError(f"a list of numbers was given: {what_it_is(first)}", topic="explainers")


def misread(error: InputError, inputs: Any, form: str | None) -> InputError:
    """The error of a model that fails on an input, with what it was read as. `inputs`: as the model was given them."""
    said = str(error).replace("itself fails on the example inputs", "itself fails on the input").rstrip(".")
    said = said.replace("example_inputs do not fit", "the input does not fit")  # which are no argument here
    if isinstance(inputs, Mapping):
        tensors = {name: one for name, one in inputs.items() if isinstance(one, torch.Tensor)}
        read = ", ".join(
            f"{name} {tuple(one.shape)} of {str(one.dtype).removeprefix('torch.')}" for name, one in tensors.items()
        )
        remedy = "their first dimension is for samples, x[None] for one"
        return type(error)(f"{said}. The model's inputs were {read}: {remedy}", topic=error.topic)
    shape = f" of shape {tuple(inputs.shape)}" if isinstance(inputs, torch.Tensor) else ""
    reading = _READINGS[form]
    if form == "series" and isinstance(inputs, torch.Tensor) and inputs.ndim == 2:
        reading = (
            "series of one feature (batch, steps), which a model of (batch, steps, features) takes as array[..., None] with "
            "form='series'"
        )
    if form == "series" and isinstance(inputs, torch.Tensor) and inputs.ndim == 3:
        reading += (
            "; a model of (batch, features, steps), as convolutions are, takes array.swapaxes(1, 2) with channels='first'"
        )
    return type(error)(f"{said}. The model's input{shape} was read as {reading}; {OTHERS}", topic=error.topic)

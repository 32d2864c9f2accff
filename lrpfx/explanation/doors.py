"""Which door takes an input: what to write where it is of another kind than it was read as."""

import os
from typing import Any

import numpy as np
import torch

from lrpfx.errors import InputError
from lrpfx.images.opening import image_suffixes

#: How names of files end, and what to write for them.
_OF_FILES = {
    **dict.fromkeys((".csv", ".tsv"), "a table or series: pass pandas.read_csv(path), for series with form='series'"),
    **dict.fromkeys((".parquet", ".xlsx"), "a table: pass it as a DataFrame of pandas"),
    ".npy": "an array: pass numpy.load(path)",
    **dict.fromkeys((".wav", ".flac", ".mp3", ".ogg"), "a sound: pass its samples as an array, with rate="),
    **dict.fromkeys((".mp4", ".avi", ".mov"), "a video: pass its frames as a tensor (channels, frames, height, width)"),
    **dict.fromkeys((".pt", ".pth", ".pkl"), "a file of Python: pass what it holds"),
    **dict.fromkeys((".nii", ".gz"), "a volume: the model has no layers for volumes, or pass form='volume'"),
}
_OF_PHOTOGRAPHS = "for photographs, pass preprocess=, such as weights.transforms() for torchvision's models"
#: What an input is read as -> in words.
_READINGS = {
    None: "photographs (batch, channels, height, width)",
    "table": "a table (rows, features)",
    "series": "series (batch, steps, features)",
    "wave": "waves",
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
        name = os.fsdecode(given).lower()
        suffix = os.path.splitext(name)[1]
        if suffix in _OF_FILES:
            return f"{given} seems to be {_OF_FILES[suffix]}"
        if suffix in image_suffixes() or os.path.exists(name):
            return _OF_PHOTOGRAPHS
        return "for texts, pass tokenizer=; for photographs preprocess=, such as weights.transforms() for torchvision's models"
    if isinstance(given, (int, float, list, tuple)):
        return f"numbers are arrays: np.array(...) or torch.tensor(...). {OTHERS}"
    is_of_integers = isinstance(given, torch.Tensor) and not given.is_floating_point()
    if is_of_integers or (isinstance(given, np.ndarray) and given.dtype.kind in "iub"):
        return "for tokens, pass tokenizer=; for pixels preprocess=; integers in a table are form='table'"
    if hasattr(given, "convert") and hasattr(given, "size"):
        return _OF_PHOTOGRAPHS
    return OTHERS


def misread(error: InputError, inputs: Any, form: str | None) -> InputError:
    """The error of a model that fails on an input, with what it was read as. `inputs`: as the model was given them."""
    shape = f" of shape {tuple(inputs.shape)}" if isinstance(inputs, torch.Tensor) else ""
    return type(error)(
        f"{str(error).rstrip('.')}. The model's input{shape} was read as {_READINGS[form]}; {OTHERS}", topic=error.topic
    )

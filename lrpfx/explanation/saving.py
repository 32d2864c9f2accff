"""Explanations as files: pictures, tables and arrays. Each is written whole or not at all."""

import io
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lrpfx.errors import InputError, first_lines
from lrpfx.explanation.answers import Array
from lrpfx.support.files import as_path, written
from lrpfx.support.table import as_csv

_FORMATS = "a picture is saved as .png, .jpg, .webp or another format of Pillow"
#: What is written in another way, by suffix.
_OTHER_FORMATS = {
    ".html": "a page is written by lrpfx.report(explanation, path)",
    ".npz": "figures are saved by each explanation",
    **dict.fromkeys((".csv", ".tsv", ".xlsx", ".json", ".parquet"), "explanation.to_pandas() is a table, which can be saved"),
}


def is_for_one_file(path: Path) -> bool:
    """Whether a path of several explanations means one picture: it has the ending of a file, and is no folder."""
    suffix = path.suffix.lower()
    return not path.is_dir() and (suffix in Image.registered_extensions() or suffix in (".npz", ".html", ".txt", ".csv"))


def format_of_picture(path: Path) -> str:
    """The format of Pillow that a suffix means. `InputError` if it writes none of this suffix."""
    form = Image.registered_extensions().get(path.suffix.lower())
    if form is None or form not in Image.SAVE:
        remedy = _OTHER_FORMATS.get(path.suffix.lower(), "figures of one explanation as .npz")
        raise InputError(f"{path}: {_FORMATS}, {remedy}", topic="explainers")
    return form


def save_arrays(arrays: Mapping[str, Array], path: Path) -> Path:
    """Write arrays by name as .npz, whole or not at all."""
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    return written(path, content.getvalue())


def save_picture(picture: Image.Image, path: Path) -> Path:
    """Write a picture, whole or not at all, in the format of the suffix."""
    form = format_of_picture(path)
    content = io.BytesIO()
    try:
        picture.save(content, format=form)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:  # some have one colour only, or need a program
        raise InputError(
            f"{path}: Pillow cannot write this picture as {form} ({first_lines(error)}); {_FORMATS}", topic="explainers"
        ) from error
    return written(path, content.getvalue())


def show(picture: Image.Image) -> None:
    """Show a picture in a notebook, or in the system's viewer."""
    try:
        shell: Any = import_module("IPython")
    except ImportError:
        picture.show()
        return
    if shell.get_ipython() is None:
        picture.show()
    else:
        shell.display.display(picture)


def save_figures_or_picture(explained: Any, path: str | Path, figures: Callable[[], Mapping[str, Array]]) -> Path:
    """Write the sheet of an explanation, or its figures as .npz, and return the path."""
    target = as_path(path)
    return save_arrays(figures(), target) if target.suffix == ".npz" else save_picture(explained.sheet(), target)


def save_table_or_picture(explained: Any, path: str | Path) -> Path:
    """Write the sheet of an explanation, or its DataFrame as .csv, and return the path."""
    target = as_path(path)
    if target.suffix == ".csv":
        return written(target, as_csv(explained.to_pandas()).encode())
    return save_picture(explained.sheet(), target)

"""Volumes in files of NIfTI, as scanners' images are kept: values, and the affine map from voxels to millimetres."""

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrpfx.errors import InputError, first_lines
from lrpfx.images.opening import files_ending_in
from lrpfx.support.optional_packages import optional_package

Array = NDArray[Any]

SUFFIXES = (".nii", ".nii.gz")


def is_file_name(value: Any) -> bool:
    """Whether a value is the path of a file in this format."""
    return isinstance(value, (str, os.PathLike)) and os.fspath(value).lower().endswith(SUFFIXES)


def files_in(value: Any) -> list[Path]:
    """The files in this format in a folder, and in folders in it; none for what is no folder."""
    is_folder = isinstance(value, (str, os.PathLike)) and os.path.isdir(os.path.expanduser(os.fspath(value)))
    return files_ending_in(Path(value).expanduser(), SUFFIXES) if is_folder else []


def is_image(value: Any) -> bool:
    """Whether a value is an image of nibabel."""
    return hasattr(value, "get_fdata") and hasattr(value, "affine")


def opened(value: Any) -> tuple[Array, Array]:
    """The values (channels, depth, height, width), in float32, and the affine (4, 4) of an image of nibabel, or of its file.

    The axes of places are those of the file, in its order; a fourth axis there is that of channels. Raises `InputError`.
    """
    name = str(value) if is_file_name(value) else "the image"
    try:
        if is_file_name(value):
            value = _nibabel().load(Path(value).expanduser())
        values: Array = value.get_fdata(dtype=np.float32)
        affine = np.asarray(value.affine, dtype=np.float64)
    except InputError:
        raise
    except Exception as error:  # nibabel has a class for each kind of damage, and NumPy and gzip have theirs
        raise InputError(f"{name} cannot be read: {first_lines(error)}", topic="volumes") from error
    if values.ndim not in (3, 4):
        raise InputError(f"{name} has the shape {values.shape}, not three axes, or four with channels", topic="volumes")
    return values[None] if values.ndim == 3 else np.moveaxis(values, 3, 0), affine


def encoded(values: Array, affine: Array, compressed: bool) -> bytes:
    """A file of NIfTI with values (depth, height, width), or (targets, depth, height, width), in float32."""
    moved = values if values.ndim == 3 else np.moveaxis(values, 0, 3)
    image = _nibabel().Nifti1Image(np.asarray(moved, dtype=np.float32), affine)
    image.header.set_xyzt_units("mm")
    content: bytes = image.to_bytes()
    return gzip.compress(content, mtime=0) if compressed else content


def _nibabel() -> Any:
    return optional_package("nibabel", "a file of NIfTI", "volumes")

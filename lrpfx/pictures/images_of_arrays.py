"""Images of relevance: heatmaps with colour maps, and grids."""

from functools import partial
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from lrpfx.errors import InputError, InputTypeError
from lrpfx.pictures.color_maps import ColorMap, LazyColorMapCache

wrong_type = partial(InputTypeError, topic="heatmaps")

CMAPS = LazyColorMapCache(
    {
        # from zero up
        "gray": "000,fff",
        "wred": "fff,f00",
        "wblue": "fff,00f",
        "hot": "000,f00,ff0,fff",
        "cold": "000,00f,0ff",
        # signed, with zero in the middle
        "coldnhot": "0ff,00f,80:000,f00,ff0,fff",
        "bwr": "00f,80:fff,f00",
        "france": "0055a4,80:fff,ef4135",
        "seismic": "0000d0,80:d0d0d0,d00000",
        "coolio": "00d0d0,80:d0d0d0,d000d0",
        "coleus": "00d000,80:d0d0d0,d000d0",
    }
)
"""The built-in colour maps by name."""


def get_cmap(cmap: ColorMap | str) -> ColorMap:
    """The colour map with this name or source.

    `cmap`: a name in `CMAPS`, a source in the language of `lrpfx.cmap`, or a `ColorMap`, which is returned as it is.
    """
    if isinstance(cmap, ColorMap):
        return cmap
    return CMAPS[cmap] if cmap in CMAPS else ColorMap(cmap)


def palette(cmap: ColorMap | str = "bwr", level: float = 1.0) -> NDArray[np.uint8]:
    """The 256 colours of a colour map, shape (256, 3).

    `cmap`: as for `get_cmap`. `level`: as for `lrpfx.cmap.ColorMap.palette`.
    """
    return get_cmap(cmap).palette(level)


def interval_norm_bounds(
    input: ArrayLike, symmetric: bool = False, dim: int | tuple[int, ...] | None = None
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The smallest and largest values, with the dimensions kept.

    `input`: the values. `symmetric`: whether the bounds are minus and plus the largest magnitude instead. `dim`: the dimensions
    to search (default: all but the first).
    """
    array = np.asarray(input)
    dim = tuple(range(1, array.ndim)) if dim is None else dim
    if symmetric:
        vmax = np.abs(array).max(axis=dim, keepdims=True)
        return -vmax, vmax
    return array.min(axis=dim, keepdims=True), array.max(axis=dim, keepdims=True)


def gridify(obj: ArrayLike, shape: tuple[int, int] | None = None, fill_value: Any = None) -> NDArray[Any]:
    """Images side by side as one image.

    `obj`: images of shape (n, height, width[, channels]) or (n, channels, height, width), with 1 or 3 channels; another shape
    is an `InputTypeError`. `shape`: the grid, (rows, columns); by default it is close to a square. `fill_value`: what empty
    cells are filled with, by default each channel's smallest value.
    """
    array, shape = np.asarray(obj), _grid_shape(shape)
    if array.ndim not in (3, 4):
        raise wrong_type(f"a grid is made of an array with 3 or 4 axes, not of shape {array.shape}")
    if array.ndim == 3:
        array = array[..., None]
    elif array.shape[1] in (1, 3) and array.shape[-1] not in (1, 3):
        array = array.transpose(0, 2, 3, 1)
    elif array.shape[-1] not in (1, 3):
        raise wrong_type(f"images have 1 or 3 channels, on the second or last axis; the shape is {array.shape}")
    count, height, width, channels = array.shape
    if shape is None:
        columns = max(1, int(np.sqrt(count)))
        rows = -(-count // columns)
    else:
        rows, columns = shape
    if fill_value is None:
        fill_value = array.min(axis=(0, 1, 2)) if count else 0
    grid = np.full((rows, columns, height, width, channels), fill_value, dtype=array.dtype)
    used = array[: rows * columns]
    grid.reshape(rows * columns, height, width, channels)[: len(used)] = used
    return grid.transpose(0, 2, 1, 3, 4).reshape(rows * height, columns * width, channels)


def imgify(
    obj: ArrayLike,
    vmin: ArrayLike | None = None,
    vmax: ArrayLike | None = None,
    cmap: ColorMap | str = "bwr",
    level: float = 1.0,
    symmetric: bool = False,
    grid: bool | tuple[int, int] = False,
    gridfill: Any = None,
) -> Image.Image:
    """An image of relevance (one channel, coloured by `cmap`) or of colours (three channels).

    Values are scaled from [vmin, vmax] to the full range. uint8 is not scaled. A constant image is drawn in the middle of the
    scale.

    Parameters
    ----------
    obj
        Anything that numpy converts to an array of shape (height, width), with an optional axis of 1 or 3 channels first or
        last, and with `grid` a leading axis of images.
    vmin, vmax
        The bounds; by default those of the array, separately for each image of a grid.
    cmap
        As for `get_cmap`.
    level
        As for `lrpfx.cmap.ColorMap.palette`.
    symmetric
        Whether missing bounds are around zero.
    grid
        Whether there are several images, or their grid as (rows, columns).
    gridfill
        As `fill_value` of `gridify`.

    Raises
    ------
    InputTypeError
        The shape is another one.
    InputError
        A value is NaN, or a bound is not finite.
    """
    array, shape = np.asarray(obj), _grid_shape(grid)
    if array.dtype == bool:
        array = array.astype(float)
    axes = (3, 4) if grid else (2, 3)
    if array.ndim not in axes:
        raise wrong_type(f"expected {axes[0]} or {axes[1]} axes, got an array of shape {array.shape}")
    if array.dtype != np.uint8:
        dim = None if grid else tuple(range(array.ndim))
        array = _scaled(array, vmin, vmax, symmetric, dim)
    if grid:
        array = gridify(array, shape, gridfill)
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[-1] not in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim == 2:
        height, width = array.shape
        image = Image.frombytes("P", (width, height), array.tobytes())
        image.putpalette(palette(cmap, level).tobytes())
        return image
    if array.shape[-1] != 3:
        raise wrong_type(f"an image has 1 or 3 channels, first or last; the shape is {array.shape}")
    return Image.fromarray(np.ascontiguousarray(array))


def _grid_shape(grid: Any) -> tuple[int, int] | None:
    """Rows and columns of a grid, or None if not given."""
    if grid is None or isinstance(grid, (bool, np.bool_)) or (isinstance(grid, int) and grid == 0):
        return None
    whole = isinstance(grid, (list, tuple)) and all(isinstance(size, (int, np.integer)) and size > 0 for size in grid)
    if not whole or len(grid) != 2:
        raise wrong_type(f"a grid is True, False or (rows, columns), both at least 1, not {grid!r}")
    return int(grid[0]), int(grid[1])


def _scaled(
    array: NDArray[Any], vmin: ArrayLike | None, vmax: ArrayLike | None, symmetric: bool, dim: tuple[int, ...] | None
) -> NDArray[np.uint8]:
    """`array` scaled from [vmin, vmax] to [0, 255]."""
    lowest, highest = interval_norm_bounds(array, symmetric=symmetric, dim=dim)
    low = lowest if vmin is None else np.asarray(vmin)
    high = highest if vmax is None else np.asarray(vmax)
    span = np.asarray(high - low, dtype=float)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(span == 0, 0.5, (array - low) / np.where(span == 0, 1.0, span))
    if np.isnan(shares).any():
        count = int(np.isnan(array).sum())
        raise InputError(
            f"the array has {count} values that are NaN" if count else "the bounds of the array are not finite",
            topic="values-not-finite",
        )
    return (shares * 255).clip(0, 255).astype(np.uint8)


def imsave(
    fp: str | BinaryIO | Any,
    obj: ArrayLike,
    vmin: ArrayLike | None = None,
    vmax: ArrayLike | None = None,
    cmap: ColorMap | str = "bwr",
    level: float = 1.0,
    grid: bool | tuple[int, int] = False,
    format: str | None = None,
    writer_params: dict[str, Any] | None = None,
    symmetric: bool = False,
    gridfill: Any = None,
) -> None:
    """Write the image that `imgify` makes to a file. Other arguments: as for `imgify`.

    `fp`: a path, or a file opened for writing. `format`: as for Pillow's `save`, by default that of the path's ending.
    `writer_params`: further arguments of it.
    """
    image = imgify(obj, vmin, vmax, cmap, level, symmetric, grid, gridfill)
    image.save(fp, format=format, **(writer_params or {}))

"""Images of arrays, under Zennit's name for the module."""

from lrpfx.pictures.images_of_arrays import CMAPS, get_cmap, gridify, imgify, imsave, interval_norm_bounds, palette

__all__ = [
    "CMAPS",
    "get_cmap",
    "gridify",
    "imgify",
    "imsave",
    "interval_norm_bounds",
    "palette",
]

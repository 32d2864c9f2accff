"""Pictures of relevance: heatmaps, relevance over photographs, and sheets of them."""

from lrpfx.pictures.colors import colors_of
from lrpfx.pictures.heatmaps import heatmap, overlay
from lrpfx.pictures.maps import relevance_map, scale_of, smoothed
from lrpfx.pictures.pixels import photograph_of
from lrpfx.pictures.sheets import LEGEND, height_of_row, sheet, strip
from lrpfx.pictures.style import Style

__all__ = [
    "LEGEND",
    "Style",
    "colors_of",
    "heatmap",
    "height_of_row",
    "overlay",
    "photograph_of",
    "relevance_map",
    "scale_of",
    "sheet",
    "smoothed",
    "strip",
]

"""Color maps, under Zennit's name for the module."""

from lrpfx.pictures.color_maps import CMapToken, ColorMap, ColorMapError, ColorNode, LazyColorMapCache

__all__ = [
    "CMapToken",
    "ColorMap",
    "ColorMapError",
    "ColorNode",
    "LazyColorMapCache",
]

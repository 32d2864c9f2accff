"""Pictures of text: relevance of tokens and words for the terminal, HTML, notebooks and PNG."""

from lrpfx.text.generation import GenerationHeatmap
from lrpfx.text.heatmap import heatmap
from lrpfx.text.pictures import TextHeatmap

__all__ = ["GenerationHeatmap", "TextHeatmap", "heatmap"]

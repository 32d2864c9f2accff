"""Explanations of whole data sets: a loop that can be stopped at any time, and a store that can be read meanwhile."""

from lrpfx.datasets.running import attribute
from lrpfx.datasets.view import Attributions, StoredArray
from lrpfx.datasets.view import open_store as open

__all__ = ["Attributions", "StoredArray", "attribute", "open"]

"""Explanations of whole data sets: a loop that can be stopped at any time, a store that can be read meanwhile, and analyses."""

from lrpfx.datasets.clusters import Spray
from lrpfx.datasets.data_set_run import attribute
from lrpfx.datasets.ray_engine import RayEngine
from lrpfx.datasets.spray_analysis import spray
from lrpfx.datasets.statistics import Summary, summarize
from lrpfx.datasets.tables import write_table
from lrpfx.datasets.verification import Verification, verify
from lrpfx.datasets.view import Attributions, StoredArray
from lrpfx.datasets.view import open_store as open

__all__ = [
    "Attributions",
    "RayEngine",
    "Spray",
    "StoredArray",
    "Summary",
    "Verification",
    "attribute",
    "open",
    "spray",
    "summarize",
    "verify",
    "write_table",
]

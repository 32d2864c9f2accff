"""Measures of explanations: whether a model relies on what a map calls relevant, and whether the map finds what is known."""

from lrpfx.measures.evaluation import Score
from lrpfx.measures.image_data import ImageData
from lrpfx.measures.methods import METHODS
from lrpfx.measures.metrics import (
    METRICS,
    Complexity,
    Metric,
    PointingGame,
    Randomization,
    RandomMasks,
    RegionPerturbation,
    RelevanceMass,
    RelevanceRank,
    Sensitivity,
    Sparseness,
)

__all__ = [
    "METHODS",
    "METRICS",
    "Complexity",
    "ImageData",
    "Metric",
    "PointingGame",
    "RandomMasks",
    "Randomization",
    "RegionPerturbation",
    "RelevanceMass",
    "RelevanceRank",
    "Score",
    "Sensitivity",
    "Sparseness",
]

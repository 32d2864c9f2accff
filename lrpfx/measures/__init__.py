"""Measures of explanations: whether a model relies on what a map calls relevant, and whether the map finds what is known."""

from lrpfx.measures.evaluation import Score
from lrpfx.measures.image_data import ImageData
from lrpfx.measures.methods import METHODS
from lrpfx.measures.metrics import (
    METRICS,
    Complexity,
    Metric,
    PartDeletion,
    PointingGame,
    RandomDeletion,
    Randomization,
    RandomMasks,
    RegionPerturbation,
    RelevanceMass,
    RelevanceRank,
    Sensitivity,
    Sparseness,
)
from lrpfx.measures.part_data import PartData
from lrpfx.measures.parts import Edges, Parts, Tokens, Values

__all__ = [
    "METHODS",
    "METRICS",
    "Complexity",
    "Edges",
    "ImageData",
    "Metric",
    "PartData",
    "PartDeletion",
    "Parts",
    "PointingGame",
    "RandomDeletion",
    "RandomMasks",
    "Randomization",
    "RegionPerturbation",
    "RelevanceMass",
    "RelevanceRank",
    "Score",
    "Sensitivity",
    "Sparseness",
    "Tokens",
    "Values",
]

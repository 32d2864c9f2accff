"""Relevance of inputs and layers in graph mode, and Zennit's attributors."""

from lrpfx.attribution.attributors import (
    Attributor,
    Gradient,
    IntegratedGradients,
    Occlusion,
    SmoothGrad,
    constant,
    identity,
    occlude_independent,
)
from lrpfx.attribution.compute import Attribution, attribute
from lrpfx.attribution.condition_module import condition
from lrpfx.attribution.experts import relevance_of_experts
from lrpfx.attribution.sequences import hypothetical_contributions
from lrpfx.attribution.training import backward_through_relevance
from lrpfx.attribution.weights import relevance_of_weights

__all__ = [
    "Attribution",
    "Attributor",
    "Gradient",
    "IntegratedGradients",
    "Occlusion",
    "SmoothGrad",
    "attribute",
    "backward_through_relevance",
    "condition",
    "constant",
    "hypothetical_contributions",
    "identity",
    "occlude_independent",
    "relevance_of_experts",
    "relevance_of_weights",
]

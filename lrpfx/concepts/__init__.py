"""Concepts: which channel, feature, head or token carried relevance (Achtibat et al. 2023).

Conditions are an argument of `lrpfx.attribute`; `Channel`, `Feature`, `Head`, `Token`, `Neuron` and `Expert` say what
their indices mean.
"""

from lrpfx.attribution.conditions import Channel, Expert, Feature, Head, Index, Neuron, Token
from lrpfx.concepts.patching import patching_effects, values_of
from lrpfx.concepts.shares import Share, Shares, relevances

__all__ = [
    "Channel",
    "Expert",
    "Feature",
    "Head",
    "Index",
    "Neuron",
    "Share",
    "Shares",
    "Token",
    "patching_effects",
    "relevances",
    "values_of",
]

"""Concepts: which channel, feature, head or token carried relevance (Achtibat et al. 2023).

Conditions are an argument of `lrpfx.attribute`; `Channel`, `Feature`, `Head`, `Token` and `Neuron` say what their indices mean.
"""

from lrpfx.attribution.conditions import Channel, Feature, Head, Index, Neuron, Token
from lrpfx.concepts.patching import patching_effects, values_of
from lrpfx.concepts.receptive_fields import ReceptiveFields, receptive_field, receptive_fields
from lrpfx.concepts.shares import Share, Shares, relevances

__all__ = [
    "Channel",
    "Feature",
    "Head",
    "Index",
    "Neuron",
    "ReceptiveFields",
    "Share",
    "Shares",
    "Token",
    "patching_effects",
    "receptive_field",
    "receptive_fields",
    "relevances",
    "values_of",
]

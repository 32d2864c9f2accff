"""Concepts: which channel, feature, head or token carried relevance (Achtibat et al. 2023).

Conditions are an argument of `lrpfx.attribute`; the classes here say what their indices mean.
"""

from lrpfx.attribution.conditions import Channel, Feature, Head, Index, Neuron, Token

__all__ = ["Channel", "Feature", "Head", "Index", "Neuron", "Token"]

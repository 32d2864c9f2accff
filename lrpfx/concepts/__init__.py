"""Concepts: which channel, feature, head or token carried relevance (Achtibat et al. 2023).

Conditions are an argument of `lrpfx.attribute`; `Channel`, `Feature`, `Head`, `Token`, `Neuron` and `Expert` say what
their indices mean.
"""

from lrpfx.concepts.attribution_graphs import AttributionGraph, attribution_graph
from lrpfx.concepts.circuit import Circuit, circuits
from lrpfx.concepts.circuit_patching import Faithfulness, faithfulness
from lrpfx.concepts.collection import Collection, Ranked, merge
from lrpfx.concepts.collector import collect
from lrpfx.concepts.latent_graphs import LatentGraph, LatentNode, latent_graph
from lrpfx.concepts.patching import patching_effects, values_of
from lrpfx.concepts.receptive_fields import ReceptiveFields, receptive_field, receptive_fields
from lrpfx.concepts.references import Reference, References, gallery, reference
from lrpfx.concepts.shares import Share, Shares, relevances
from lrpfx.request.conditions import Channel, Expert, Feature, Head, Index, Neuron, Token

__all__ = [
    "AttributionGraph",
    "Channel",
    "Circuit",
    "Collection",
    "Expert",
    "Faithfulness",
    "Feature",
    "Head",
    "Index",
    "LatentGraph",
    "LatentNode",
    "Neuron",
    "Ranked",
    "ReceptiveFields",
    "Reference",
    "References",
    "Share",
    "Shares",
    "Token",
    "attribution_graph",
    "circuits",
    "collect",
    "faithfulness",
    "gallery",
    "latent_graph",
    "merge",
    "patching_effects",
    "receptive_field",
    "receptive_fields",
    "reference",
    "relevances",
    "values_of",
]

"""What a ledger and recorded relevance say of one view of a graph, as plain data."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from lrpfx.attribution.compute import attribute
from lrpfx.attribution.ledger import PARTS, Ledger, ledger, objection
from lrpfx.explanation.compiled import check_same
from lrpfx.ir.node import data_calls, node_info
from lrpfx.reports.pages.encoding import Array, Packed, figure, packed, reduced
from lrpfx.reports.pages.graphs import GraphData
from lrpfx.reports.pages.questions import Query, View
from lrpfx.reports.pages.word_paths import layers_of_words, steps_of_words
from lrpfx.request.layouts import channel_dimension
from lrpfx.support.tensors import as_array

THUMBNAIL = 28  # pixels of each side, at most
_NARROWEST = 8  # how many times as long as wide a map may be
_TOGETHER = 2**26  # numbers that are recorded in one run, which bounds the memory
_UNKNOWN = 2**20  # numbers of a node whose shape is not known


def accounts(view: View, query: Query, graph: GraphData) -> dict[str, Any]:
    """The ledger, the relevance along each edge, thumbnails, and for a text the relevance of each word in each layer."""
    found = ledger(query.module, query.inputs, query.target, output=query.output)
    if view.score is not None:
        check_same(np.array(found.seed), np.array(view.score))
    places = {name: place for place, name in enumerate(graph.names)}
    pictures: dict[str, Packed] = {}
    of_tokens: dict[str, Array] = {}
    steps = () if view.tokens is None else layers_of_words(query.module.unfused_graph)
    for name, relevance in recorded(query):
        picture = _picture(relevance)
        if picture is not None and name in places:
            pictures[str(places[name])] = picture
        if name in steps and name in places and relevance.shape == (view.tokens,):
            of_tokens[name] = relevance
    return {
        "ledger": _ledger_data(found, graph, places),
        "flows": [figure(found.flows.get((graph.names[source], graph.names[target]), 0.0)) for source, target in graph.edges],
        "pictures": pictures,
        "path": [{"node": places[name], **step} for name, step in steps_of_words(query, view.groups, of_tokens)],
        "objection": objection(found) or "",
    }


def _ledger_data(found: Ledger, graph: GraphData, places: dict[str, int]) -> dict[str, Any]:
    """Accounts as rows [node, in, out, parts..., unexplained]; the node is its place in the graph, or a name outside of it.

    Inputs are [name, relevance, place in the graph]; an embedding, which is not an input of the graph, has no place.
    """
    figures = ("relevance_in", "relevance_out", *PARTS, "unexplained")
    rows = [[places.get(entry.name, entry.name), *(figure(getattr(entry, one)) for one in figures)] for entry in found]
    return {
        "seed": figure(found.seed),
        "magnitude": figure(found.seed_magnitude),
        "inputs": [[name, figure(value), graph.inputs.get(name)] for name, value in found.inputs.items()],
        "totals": [figure(found.total(part)) for part in PARTS],
        "balance": figure(found.balance),
        "rows": rows,
    }


def recorded(query: Query, most: int = _TOGETHER) -> Iterator[tuple[str, Array]]:
    """The relevance of nodes that can be drawn, summed over channels and without the batch: (height, width) or (places,).

    `most`: how many numbers are recorded in one run.
    """
    graph = query.module.unfused_graph
    for some in _runs([node for node in data_calls(graph) if _has_one_value(node)], most):
        found = attribute(query.module, query.inputs, query.target, record=list(some), output=query.output)
        for name, relevance in found.layers.items():
            summed = _without_channels(some[name], relevance)
            if summed is not None:
                yield name, summed


def _runs(nodes: Sequence[fx.Node], most: int) -> Iterator[dict[str, fx.Node]]:
    """The nodes by name, in parts that are recorded together."""
    some: dict[str, fx.Node] = {}
    numbers = 0
    for node in nodes:
        info = node_info(node)
        size = _UNKNOWN if info.shape is None else math.prod(info.shape)
        if some and numbers + size > most:
            yield some
            some, numbers = {}, 0
        some[info.name] = node
        numbers += size
    if some:
        yield some


def _has_one_value(node: fx.Node) -> bool:
    info = node_info(node)
    several = info.operator is not None and info.operator.returns_several
    builds = isinstance(node.target, type)
    shown = info.shape is None or (len(info.shape) in (3, 4) and channel_dimension(node, len(info.shape)) is not None)
    floating = info.dtype is None or info.dtype.is_floating_point
    return not several and not builds and not info.several and shown and floating


def _without_channels(node: fx.Node, relevance: torch.Tensor) -> Array | None:
    """A map or a row of numbers, where the graph shows which dimension has the channels; None elsewhere."""
    if relevance.ndim not in (3, 4) or len(relevance) != 1:
        return None
    channels = channel_dimension(node, relevance.ndim)
    if channels is None or channels == 0 or (relevance.ndim == 4 and channels == 2):
        return None
    return np.asarray(as_array(relevance.double().sum(channels)[0]))


def _picture(relevance: Array) -> Packed | None:
    """A thumbnail of a map or a row of the shape `of`, with a scale of its own; None where there is nothing to see."""
    is_narrow = relevance.ndim == 2 and max(relevance.shape) > _NARROWEST * min(relevance.shape)
    if relevance.size < 2 or is_narrow or not np.isfinite(relevance).all():
        return None
    whole = np.atleast_2d(relevance)
    small = reduced(whole, THUMBNAIL)
    return {**packed(small, float(np.percentile(np.abs(small), 99)) or None, bits=8), "of": list(whole.shape)}

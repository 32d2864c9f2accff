"""The paths of the words of a text: the places in each layer that the relevance of each word flows through."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import fx

from lrpfx.attribution.computation import Computation
from lrpfx.attribution.compute import Attribution
from lrpfx.ir.kinds import Activation, LayerNorm, RMSNorm
from lrpfx.ir.node import Role, bottlenecks, node_info
from lrpfx.reports.pages.encoding import Array, Packed, packed
from lrpfx.reports.pages.questions import Query
from lrpfx.request.question import Question
from lrpfx.support.tensors import as_array
from lrpfx.text.scores import of_attribution

MOST_PASSES = 256  # backward passes for the words of one view, which bound the time


def layers_of_words(graph: fx.Graph) -> list[str]:
    """The layers with a rule that all relevance flows through, in the order of execution.

    A layer whose only reader acts on each token alone, such as a sum before its layer norm, is left out for its reader.
    """
    found = [node for node in bottlenecks(graph) if node_info(node).role is Role.DATA and not node_info(node).neutral]
    alone = {one for one in found if issubclass(node_info(one).kind or object, (Activation, LayerNorm, RMSNorm))}
    read = {one.args[0] for one in alone if one.args}
    return [node_info(one).name for one in found if one not in read]


def steps_of_words(
    query: Query, groups: Sequence[Sequence[int]], layers: Mapping[str, Array]
) -> Iterator[tuple[str, dict[str, Packed]]]:
    """For each layer the relevance at the place of each word, and how much of it flows to each word.

    `groups`: the tokens of each word. `layers`: the relevance of each token in the layers, in the order of execution. Relevance
    of the words is linear in that of a layer: what flows through a place arrives if that of all other places is set to zero.
    Where the words are too many to do that in all layers, it is done in some, at equal distances.
    """
    most = min(len(layers), MOST_PASSES // max(1, len(groups)))
    traced = {round(place) for place in np.linspace(len(layers) - 1, 0, most)} if most else set()
    for number, (name, relevance) in enumerate(layers.items()):
        step = {"words": packed(_by_word(relevance, groups))}
        if number in traced:
            step["through"] = packed(_flows(query, groups, name, relevance))
        yield name, step


def _flows(query: Query, groups: Sequence[Sequence[int]], layer: str, relevance: Array) -> Array:
    """The relevance of each word that flows through the place of each word, (places, words)."""
    found = np.zeros((len(groups), len(groups)))
    places = [place for place, group in enumerate(groups) if relevance[list(group)].any()]
    masks = torch.zeros(len(places), 1, len(relevance), 1)
    for mask, place in zip(masks, places, strict=True):
        mask[0, list(groups[place])] = 1.0
    if places:
        question = Question(target=query.target, output=query.output, conditions=[{layer: mask} for mask in masks])
        answer = Computation(query.module, query.inputs, question)
        tokens, _ = of_attribution(Attribution(answer.output, answer.of_inputs), None, None)
        for place, one in zip(places, tokens, strict=True):
            found[place] = _by_word(as_array(one[0].double().sum(-1)), groups)
    return found


def _by_word(tokens: Array, groups: Sequence[Sequence[int]]) -> Array:
    return np.array([tokens[list(group)].sum() for group in groups])

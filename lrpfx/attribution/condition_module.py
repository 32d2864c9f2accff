"""Explainable modules with masks of conditions among their inputs, which can be compiled."""

import copy
import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import fx, nn

from lrpfx.errors import InputError, InputTypeError
from lrpfx.ir.node import named_nodes, node_info
from lrpfx.request.conditions import Key, checked_place, ends_of, insert_masks, is_edge, shown
from lrpfx.request.names import recorded_names
from lrpfx.runtime.compiled_graph import PassRecord, copy_graph
from lrpfx.runtime.explain_module import ExplainModule, explainable
from lrpfx.runtime.masked_relevance import MaskedRelevance
from lrpfx.support.module_tree import free_name


def condition(explain_model: nn.Module, layers: Key | Sequence[Key]) -> ExplainModule:
    """A copy of an explainable module that takes masks on relevance as further inputs.

    A mask is a tensor of floating-point numbers or truth values that broadcasts to the value at its place. In the backward
    pass, it multiplies relevance there. A mask that is left out keeps everything. Masks are not data: the forward gives them no
    gradient, and their relevance in `lrpfx.attribute` is None. torch.compile makes one graph for masks of the same shapes and
    dtypes, whatever their values. A mask of another shape or dtype, or with values that are not finite, is an `InputError`; a
    compiled module does not check this.

    Parameters
    ----------
    explain_model
        The module to copy. It is not changed: the result has copies of its parameters, and its forward.
    layers
        Where relevance is masked: a place, or a list of places. A place is the name of a node, the path of a module, a pattern
        as for `record=` of `lrpfx.attribute`, or an edge: a pair of names, of the node whose value flows and of the one that
        reads it.

    Returns
    -------
    ExplainModule
        It is called like `explain_model`, with one more argument for each place: `mask_layer3_1_add=` for the node
        "layer3.1.add", and `mask_layer1_0_conv3_to_layer1_0_add=` for the edge from "layer1.0.conv3" to "layer1.0.add". Its
        `mask_names` lists these names by place.

    Raises
    ------
    InputError
        A name is unknown, or no relevance flows at a place, or it has a mask already.
    InputTypeError
        An argument has the wrong type.

    Examples
    --------
    >>> conditioned = lrpfx.condition(explain_model, "0")
    >>> conditioned.mask_names
    {'0': 'mask_0'}
    """
    module = explainable(explain_model, "condition")
    if module is not explain_model:
        raise InputTypeError(
            "condition takes the module that lrpfx.transform returns: compile what condition returns", topic="conditions"
        )
    places = places_in(module.unfused_graph, layers)
    for place in places:
        if place in module.mask_names:
            raise InputError(f"{shown(place)} has a mask already: {module.mask_names[place]}", topic="conditions")
    names = names_of_masks(places, module.argument_names)
    copied = copy.deepcopy(module)
    switch = next(copied.rule_switches(), None)
    paths = []
    for place, name in zip(places, names, strict=True):
        paths.append(free_name(copied, name))
        copied.add_module(paths[-1], MaskedRelevance(shown(place), switch))
    fused = {name for name, _ in named_nodes(copied.graph)}
    ends = [end for place in places for end in ends_of(copied.unfused_graph, place) if end is not None]
    is_fused = all(node_info(end).name in fused for end in ends)
    unfused = copy_graph(copied.unfused_graph)
    insert_masks(unfused, places, names, paths)
    graph = unfused
    if is_fused and copied.unfused_graph is not copied.graph:
        graph = copy_graph(copied.graph)
        insert_masks(graph, places, names, paths)
    masked = {**module.mask_names, **dict(zip(places, names, strict=True))}
    copied.change(replace(copied.compiled, graph=graph, unfused=unfused, mask_names=masked))
    details = tuple((shown(place), name) for place, name in zip(places, names, strict=True))
    record = PassRecord("condition", "insert_masks", len(places), details, (), copied.code)
    copied.compiled = replace(copied.compiled, history=(*copied.compiled.history, record))
    return copied


def places_in(graph: fx.Graph, layers: Key | Sequence[Key]) -> tuple[Key, ...]:
    """The places in `layers`, each once, with patterns replaced by what they match."""
    several = [layers] if isinstance(layers, str) or is_edge(layers) else layers
    if not isinstance(several, Sequence):
        raise InputTypeError(
            f"a condition is at a node, an edge as a pair of names, or a list of these, not {layers!r}", topic="conditions"
        )
    found: dict[Key, None] = {}
    for one in several:
        named: Sequence[Key] = recorded_names(graph, one) if isinstance(one, str) else (one,)
        found |= dict.fromkeys(checked_place(graph, place) for place in named)
    if not found:
        raise InputError("there is no place for a mask: name at least one node", topic="conditions")
    return tuple(found)


def names_of_masks(places: Sequence[Key], taken: Collection[str]) -> list[str]:
    """The names of the arguments for the masks at some places, other than those in `taken`."""
    found: list[str] = []
    for place in places:
        ends = (place,) if isinstance(place, str) else place
        written = [re.sub(r"\W+", "_", end, flags=re.ASCII).strip("_") for end in ends]
        name = wanted = f"mask_{'_to_'.join(written)}"
        number = 0
        while name in found or name in taken:
            number += 1
            name = f"{wanted}_{number}"
        found.append(name)
    return found

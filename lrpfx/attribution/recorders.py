"""Modules that return the values of nodes beside the result, so that relevance can be read there."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lrpfx.attribution.cache import cache_of
from lrpfx.errors import InputError
from lrpfx.ir.kinds import Embedding, Neutral
from lrpfx.ir.node import (
    NodeInfo,
    Role,
    ancestors_of,
    data_calls,
    named_nodes,
    node_info,
    nodes_by_name,
    nodes_in,
    output_node,
    set_info,
)
from lrpfx.operators.functions import without_gradient
from lrpfx.operators.table import spelling_of
from lrpfx.request.conditions import Place, ends_of, insert_masks, mask_name
from lrpfx.request.names import resolve_names
from lrpfx.runtime.compiled_graph import copy_graph
from lrpfx.runtime.explain_module import ExplainModule, TreeGraphModule, rule_module_of
from lrpfx.support.tensors import only_finite

#: How the names of inputs for probes begin.
PROBE = "probe_"


@dataclass(frozen=True)
class Recording:
    """What a recorder does beside running the model."""

    names: tuple[str, ...] = ()  # of the nodes whose values it returns
    leaves: bool = False  # whether gradients begin at embeddings
    constants: bool = False  # whether it returns the constants that take relevance
    places: tuple[Place, ...] = ()  # of masks, which are further inputs
    start: str | None = None  # the node whose value it returns instead of the result, if any
    reference: bool = False  # whether it returns the result for the reference, after all else

    def __bool__(self) -> bool:
        return bool(self.names or self.constants or self.places or self.start is not None or self.reference)


def recorder_of(module: ExplainModule, recording: Recording, probed: bool = False) -> TreeGraphModule:
    """A module on the same tensors that returns the result, and then the values of nodes.

    With `probed`, it takes a probe for each of these values: see `_probes`.
    """
    key = (recording, probed)
    recorders = cache_of(module).recorders
    if key not in recorders:
        whole = module.unfused_graph
        found = resolve_names(whole, recording.names)
        first = [] if recording.start is None else resolve_names(whole, [recording.start])
        masked = [end for place in recording.places for end in ends_of(whole, place) if end is not None]
        fused = {name for name, _ in named_nodes(module.graph)}
        is_fused = all(node_info(node).name in fused for node in (*found, *first, *masked))
        graph = copy_graph(module.graph if is_fused else whole)
        by_name = dict(named_nodes(graph))
        nodes = [by_name[node_info(node).name] for node in found]
        (output,) = graph.find_nodes(op="output")
        result = by_name[node_info(first[0]).name] if first else output.args[0]
        if first:
            _check_before(graph, result, [*nodes, *(by_name[node_info(node).name] for node in masked)])
        output.args = (result,)
        insert_masks(graph, recording.places, [mask_name(number) for number in range(len(recording.places))])
        embeddings = [node for node in data_calls(graph) if node_info(node).kind is Embedding and recording.leaves]
        edges = _constant_terms(graph, module) if recording.constants else []
        if probed:
            for number, node in enumerate(nodes):
                _replaced(graph, node, add_to_detached if node in embeddings else operator.add, _probe(graph, number))
            terms = [
                _as_term(graph, node, user, add_to_detached, _probe(graph, number))
                for number, (node, user) in enumerate(edges, len(nodes))
            ]
        else:
            for embedding in embeddings:
                leaf = _replaced(graph, embedding, as_leaf)
                nodes = [leaf if node is embedding else node for node in nodes]
            terms = [_as_term(graph, node, user, as_leaf) for node, user in edges]
        known = nodes_by_name(graph)
        differences = [_difference(graph, node, known) for node in (*nodes, *terms) if _has_difference(node)]
        of_reference = [_result_of_reference(graph, output.args[0], known)] if recording.reference else []
        output.args = ((output.args[0], *nodes, *terms, *differences, *of_reference),)
        if first:
            for node in reversed(graph.nodes):  # the calls that nothing reads now
                if node.op not in ("placeholder", "output") and not node.users:
                    graph.erase_node(node)
        recorders[key] = TreeGraphModule(module, graph, module.title)
    return recorders[key]


def _check_before(graph: fx.Graph, start: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """Raise `InputError` for nodes that the start does not depend on."""
    before = ancestors_of(start)
    for node in nodes:
        if node not in before:
            raise InputError(
                f"{node_info(start).name}, where relevance starts, does not depend on {node_info(node).name}",
                topic="no-path-to-the-input",
            )


def recorded_by(recorder: fx.GraphModule) -> list[fx.Node]:
    """The nodes whose values a recorder returns beside the model's result."""
    results: Any = output_node(recorder.graph).args[0]
    return [node for node in results[1:] if node.target not in (difference, result_of_reference)]


def as_leaf(value: torch.Tensor) -> torch.Tensor:
    """The tensor as a leaf that requires a gradient."""
    return value.detach().requires_grad_()


def with_factors(
    recorder: fx.GraphModule, returned: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The layers that a recorder returned, and for each of them what its gradient is to be multiplied by.

    That is the layer, or its difference from that for the reference, if the gradient is a multiplier; None if it is relevance.
    """
    nodes = recorded_by(recorder) if returned else []
    layers, differences = list(returned[: len(nodes)]), iter(returned[len(nodes) :])
    factors = [
        next(differences) if _has_difference(node) else layer if node_info(node).carries_multiplier else None
        for layer, node in zip(layers, nodes, strict=True)
    ]
    return layers, factors


def _has_difference(node: fx.Node) -> bool:
    return node_info(node).carries_multiplier and bool(node_info(node).reference)


def _difference(graph: fx.Graph, node: fx.Node, known: Mapping[str, fx.Node]) -> fx.Node:
    """A call that takes the difference of a value from that for the reference. `known`: the nodes by name."""
    with graph.inserting_before(output_node(graph)):
        made = graph.call_function(difference, (node, known[node_info(node).reference]))
    set_info(made, replace(node_info(node), name=f"{node_info(node).name}.difference", role=Role.CONSTANT, reference=""))
    return made


def _result_of_reference(graph: fx.Graph, result: Any, known: Mapping[str, fx.Node]) -> fx.Node:
    """A call that gives the result for the reference. `known`: the nodes by name."""

    def twin(node: fx.Node) -> fx.Node:
        name = node_info(node).reference
        return known[name] if name else node

    with graph.inserting_before(output_node(graph)):
        made = graph.call_function(result_of_reference, (fx.map_arg(result, twin),))
    set_info(made, NodeInfo("result_of_reference", role=Role.CONSTANT))
    return made


def result_of_reference(result: Any) -> Any:
    """The result, without a gradient."""
    return without_gradient(result)


def difference(value: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The difference of two values, without a gradient; 0 where it is not finite, as that of masked scores."""
    return only_finite(value.detach() - reference.detach())


def _constant_terms(graph: fx.Graph, module: ExplainModule) -> list[tuple[fx.Node, fx.Node]]:
    """Constants that take relevance, each with the operation that gives it some."""
    found = []
    for user in data_calls(graph):
        layer = rule_module_of(user, module)
        if layer is not None:
            read = nodes_in(user.args[: layer.ruled.operation.inputs])
        else:
            read = nodes_in(user.args) if node_info(user).neutral and node_info(user).kind is not Embedding else []
        found += [(node, user) for node in dict.fromkeys(read) if _is_constant_tensor(node)]
    return found


def _is_constant_tensor(node: fx.Node) -> bool:
    info = node_info(node)
    floating = node.op == "get_attr" or (info.dtype is not None and info.dtype.is_floating_point)
    return info.role in (Role.PARAMETER, Role.METADATA) and floating


def _as_term(graph: fx.Graph, node: fx.Node, user: fx.Node, function: Callable[..., Any], *further: fx.Node) -> fx.Node:
    """A call of `function` on a constant, which replaces it for one reader, and carries what the reader gives it."""
    with graph.inserting_before(user):
        made = graph.call_function(function, (node, *further))
    user.replace_input_with(node, made)
    name = node_info(_source_of(node)).name
    set_info(made, replace(node_info(node), name=name, carries_multiplier=node_info(user).carries_multiplier))
    return made


def _source_of(constant: fx.Node) -> fx.Node:
    """The embedding or parameter that a constant is a view, a cast or an expansion of."""
    while (spelling := spelling_of(constant)) is not None and spelling.operator.kind is Neutral:
        source = constant.args[0]
        if not isinstance(source, fx.Node):
            break
        constant = source
    return constant


def _probe(graph: fx.Graph, number: int) -> fx.Node:
    """A placeholder for a probe."""
    name = f"{PROBE}{number}"
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        probe = graph.placeholder(name, default_value=None)  # it may follow inputs that have defaults
    set_info(probe, NodeInfo(name, role=Role.CONSTANT))
    return probe


def _replaced(graph: fx.Graph, node: fx.Node, function: Callable[..., Any], *further: fx.Node) -> fx.Node:
    """A call of `function` on a node, which replaces the node for all its readers."""
    with graph.inserting_after(node):
        made = graph.call_function(function, (node, *further))
    set_info(made, node_info(node))
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return made


def add_to_detached(value: torch.Tensor, probe: torch.Tensor) -> torch.Tensor:
    """Value + probe, with a gradient for the probe alone."""
    return value.detach() + probe

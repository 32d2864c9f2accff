"""Compute each value for the reference, too, where rules take differences from one."""

from dataclasses import replace

from torch import fx

from lrpfx.errors import RuleError
from lrpfx.ir.node import GIVEN, NodeInfo, Role, calls, data_calls, node_info, set_info, update_info
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call
from lrpfx.passes.properties import VALIDATED
from lrpfx.rules.differences import Difference
from lrpfx.runtime.differences import reference_of

#: What follows the name of an input in that of its reference.
SUFFIX = "_reference"


class PairWithReference(GraphPass):
    """Give the graph an input for the reference of each input, and a second node for each value that depends on them.

    Relevance does not flow through the second nodes. Sizes are those of the inputs, which references share.
    """

    name = "pair_with_reference"
    stage = "rewrite"
    requires = (VALIDATED,)

    def applies(self, program: Program) -> bool:
        return takes_differences(program)

    def run(self, program: Program) -> PassResult:
        graph = program.graph
        _refuse_other_rules(program)
        twins: dict[fx.Node, fx.Node] = {}
        own = list(calls(graph))
        placeholders = graph.find_nodes(op="placeholder")
        last = placeholders[-1]
        for node in placeholders:
            if node_info(node).role in (Role.DATA, Role.DISCRETE):
                twins[node], last = _input(graph, node, last)
        for node in own:
            if node_info(node).role is not Role.METADATA and any(source in twins for source in node.all_input_nodes):
                twins[node] = _twin(graph, node, twins)
        return PassResult(len(twins))


def takes_differences(program: Program) -> bool:
    """Whether rules of a program take differences from a reference."""
    return any(isinstance(node_info(node).rule, Difference) for node in data_calls(program.graph))


def _refuse_other_rules(program: Program) -> None:
    """Raise `RuleError` for layers with rules that know no reference."""
    others = [
        node_info(node) for node in data_calls(program.graph) if not isinstance(node_info(node).rule, (Difference, type(None)))
    ]
    if others:
        raise RuleError(
            f"{len(others)} layer(s) of {program.title} have rules that know no reference, beside others that take differences "
            f"from one: {', '.join(f'{info.name} ({info.rule})' for info in others[:5])}"
        )


def _input(graph: fx.Graph, node: fx.Node, last: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The reference of an input, and the placeholder for it, behind the placeholder `last`."""
    info, taken = node_info(node), {str(one.target) for one in graph.find_nodes(op="placeholder")}
    name = f"{node.target}{SUFFIX}"
    while name in taken:
        name += "_"
    with graph.inserting_after(last):
        given = graph.placeholder(name, default_value=None)
    set_info(given, NodeInfo(name, source=info.source, role=Role.CONSTANT))
    twin = insert_call(graph, given.next, reference_of, (node, given), _info(info, f"{name}{GIVEN}"))
    update_info(node, reference=node_info(twin).name)
    return twin, given


def _twin(graph: fx.Graph, node: fx.Node, twins: dict[fx.Node, fx.Node]) -> fx.Node:
    """A second call, of the values for the reference. It is the first of both to run: rules read its result, too."""
    info = node_info(node)
    with graph.inserting_before(node):
        twin = graph.node_copy(node, lambda source: twins.get(source, source))
    set_info(twin, _info(info, f"{info.name}.reference"))
    update_info(node, reference=node_info(twin).name)
    return twin


def _info(of: NodeInfo, name: str) -> NodeInfo:
    return replace(of, name=name, role=Role.CONSTANT, rule=None, form=None, chosen_by="", part=None, keeps_gradient=True)

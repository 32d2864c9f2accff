"""CANONIZE: compute values once more for what takes no relevance, where it would keep a batch norm from being merged."""

from dataclasses import replace

from torch import fx

from lrpfx.ir.kinds import BatchNorm
from lrpfx.ir.node import calls, is_data, node_info, output_node, readers, set_info
from lrpfx.passes.canonize.channel_places import keeps_channels
from lrpfx.passes.canonize.merge_batch_norm import has_batch_norm, is_layer_of_parameters
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE


class SeparateConstants(GraphPass):
    """Give comparisons and other constants of the relevance flow their own copy of a batch norm, and of what leads to one.

    A merge changes the value of one and the reader of the other, so it needs to know all that read them.
    """

    name = "separate_constants"
    stage = "canonize"
    requires = (CANONICAL, OUT_OF_PLACE)

    def applies(self, program: Program) -> bool:
        if not has_batch_norm(program):
            return False
        carrying, merged = _with_relevance(program.graph), _with_what_leads_to_them(program.graph)
        return any(_readers_without_relevance(node, carrying) for node in carrying & merged)

    def run(self, program: Program) -> PassResult:
        result, carrying = PassResult(), _with_relevance(program.graph)
        merged = carrying & _with_what_leads_to_them(program.graph)
        for node in reversed(list(calls(program.graph))):  # a copy of a batch norm is another reader of the layer before it
            others = _readers_without_relevance(node, carrying) if node in merged else []
            if others:
                with program.graph.inserting_after(node):
                    copied = program.graph.node_copy(node)
                info = node_info(node)
                set_info(copied, replace(info, name=f"{info.name}.of_constants"))
                for user in others:
                    user.replace_input_with(node, copied)
                result.match(info.name, f"computed again for {', '.join(node_info(user).name for user in others)}")
        return result


def _readers_without_relevance(node: fx.Node, carrying: set[fx.Node]) -> list[fx.Node]:
    """The readers of a node that take no relevance, if others do."""
    others = [user for user in readers(node) if user.op != "output" and user not in carrying]
    return others if len(others) < len(readers(node)) else []


def _with_relevance(graph: fx.Graph) -> set[fx.Node]:
    """The nodes from which signals lead to the output."""
    found: set[fx.Node] = set()
    pending = [output_node(graph)]
    while pending:
        new = [node for node in pending.pop().all_input_nodes if is_data(node) and node not in found]
        found.update(new)
        pending += new
    return found


def _with_what_leads_to_them(graph: fx.Graph) -> set[fx.Node]:
    """Batch norms, and layers before them, with the poolings and views between, through which they would be merged.

    A merge changes these, or needs to know all their readers.
    """
    found: set[fx.Node] = set()
    for node in calls(graph):
        kind = node_info(node).kind
        if kind is None or not issubclass(kind, BatchNorm):
            continue
        found.add(node)
        source = node.args[0]
        while isinstance(source, fx.Node) and source not in found:
            operator = node_info(source).operator
            passes_on = operator is not None and keeps_channels(operator)
            if passes_on or is_layer_of_parameters(source):
                found.add(source)
            source = source.args[0] if passes_on else None
    return found

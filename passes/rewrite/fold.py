"""FOLD: compute subgraphs that depend only on parameters once, as derived buffers that can be recomputed."""

import torch
from torch import fx

from lrpfx.ir.node import NodeInfo, Role, ancestors_of, calls, node_info, set_info
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import REWRITTEN
from lrpfx.runtime.module_tree import free_name, set_derived_buffer
from lrpfx.support.torch_internals import Interpreter


class Fold(GraphPass):
    """Move all computations that depend only on parameters into `program.fold_graph`, and read their results as buffers."""

    name = "fold"
    stage = "fold"
    requires = (REWRITTEN,)

    def run(self, program: Program) -> PassResult:
        graph = program.graph
        folded = {node for node in calls(graph) if node_info(node).role is Role.PARAMETER}
        while True:
            results = [node for node in graph.nodes if node in folded and not folded.issuperset(node.users)]
            if not results:
                program.fold_graph = None
                return PassResult()
            program.fold_graph = _subgraph(graph, folded, results)
            with torch.no_grad():
                values = Interpreter(program.root, graph=program.fold_graph).run()
            others = {n for n, value in zip(results, values, strict=True) if not isinstance(value, torch.Tensor)}
            if not others:
                break
            folded -= others  # a buffer holds one tensor: calls that return several stay in the graph
        names = []
        for node, value in zip(results, values, strict=True):
            name = free_name(program.root, node_info(node).name)
            names.append(name)
            set_derived_buffer(program.root, name, value)
            with graph.inserting_before(node):
                buffer = graph.create_node("get_attr", name)
            set_info(buffer, NodeInfo(node_info(node).name, source=node_info(node).source, role=Role.PARAMETER))
            node.replace_all_uses_with(buffer, delete_user_cb=lambda user: user not in folded)
        program.derived = tuple(names)
        read_only_there = _read_by(folded) - folded
        for node in reversed(list(graph.nodes)):
            if node in folded or (node in read_only_there and node.op != "get_attr" and not node.users):
                graph.erase_node(node)
        for node in list(graph.nodes):
            if node.op == "get_attr" and not node.users:
                graph.erase_node(node)
        return PassResult(len(results))


def _subgraph(graph: fx.Graph, members: set[fx.Node], results: list[fx.Node]) -> fx.Graph:
    """A graph without inputs that computes `results` from parameters."""
    copies: dict[fx.Node, fx.Node] = {}
    fold_graph = fx.Graph()
    needed = _read_by(members)
    for node in graph.nodes:
        if node in needed:
            copies[node] = fold_graph.node_copy(node, copies.__getitem__)
    fold_graph.output(tuple(copies[node] for node in results))
    return fold_graph


def _read_by(members: set[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they depend on: parameters, and dtypes of parameters."""
    return set().union(*map(ancestors_of, members))

"""FOLD: compute subgraphs that depend only on parameters once, as derived buffers that can be recomputed."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import NodeInfo, Role, ancestors_of, attribute_of, calls, map_arguments, node_info, output_node, set_info
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import REWRITTEN
from lrpfx.support.dotted_paths import dotted_path
from lrpfx.support.module_tree import free_name, set_derived_buffer
from lrpfx.support.tensors import mark_of
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
            values = _values(program, program.fold_graph)
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


def _values(program: Program, fold_graph: fx.Graph) -> Sequence[Any]:
    """The results of a fold graph: those of programs with the same tensors where there are such, or else computed."""
    shared = {} if program.shared is None else program.shared
    known: dict[fx.Node, str | None] = {}
    for node in fold_graph.nodes if program.shared is not None else ():
        known[node] = _expression(node, known, program)
    keys = [known.get(node) for node in output_node(fold_graph).all_input_nodes]
    found = [None if key is None else shared.get(key) for key in keys]
    if any(value is None for value in found):
        with torch.no_grad():
            computed = Interpreter(program.root, graph=fold_graph).run()
        found = [new if old is None else old for old, new in zip(found, computed, strict=True)]
        new = {key: value for key, value in zip(keys, found, strict=True) if isinstance(value, torch.Tensor)}
        shared.update({key: value for key, value in new.items() if key is not None})
    return found


def _expression(node: fx.Node, known: Mapping[fx.Node, str | None], program: Program) -> str | None:
    """A digest of what a node computes, which is the same for equal computations on the same tensors; None if not known."""
    if node.op == "get_attr":
        tensor = attribute_of(node, program.root)
        return f"{node.target} {mark_of(tensor, program.sums)}" if isinstance(tensor, torch.Tensor) else None
    function = dotted_path(node.target) if callable(node.target) else None
    if function is None or any(known.get(source) is None for source in node.all_input_nodes):
        return None
    arguments = map_arguments((node.args, node.kwargs), lambda leaf: known[leaf] if isinstance(leaf, fx.Node) else leaf)
    return hashlib.sha256(f"{function} {arguments!r}".encode()).hexdigest()


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

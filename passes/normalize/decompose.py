"""NORMALIZE: replace fused operations by the operations that they consist of, each of which can have its own rule.

Attention becomes matmul, softmax and matmul, with its mask, scale, causality and grouped queries. A gated linear unit becomes a
sigmoid and a gate.
"""

import operator
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import Role, calls, node_info
from lrpfx.operators.functions import several
from lrpfx.operators.table import spelling_of
from lrpfx.passes.normalize.call_builder import CallBuilder
from lrpfx.passes.normalize.remove_dead_code import remove_unread
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, DECOMPOSED, OUT_OF_PLACE


class Decompose(GraphPass):
    """Replace operations whose row has a decomposition."""

    name = "decompose"
    stage = "normalize"
    requires = (
        CANONICAL,
        OUT_OF_PLACE,
    )
    ensures = (DECOMPOSED,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            info = node_info(node)
            if info.operator is None or info.operator.decomposition is None or info.role not in (Role.DATA, Role.METADATA):
                continue
            builder = CallBuilder(program, node, info.operator)
            replacement = info.operator.decomposition(builder)
            if replacement is None:
                continue
            result.matches += 1
            found = replacement if isinstance(replacement, tuple) else (replacement,)
            names = ", ".join(dict.fromkeys(node_info(one).name for one in found))
            result.details.append((info.name, f"{info.operator}: now {names}"))
            if isinstance(replacement, tuple):
                replacement = _results(builder, node, replacement)
            node.replace_all_uses_with(replacement)
            program.graph.erase_node(node)
        if result.matches:
            remove_unread(program.graph)
            views_to_reshapes(program.graph)
        return result


def _results(builder: CallBuilder, node: fx.Node, results: tuple[fx.Node, ...]) -> fx.Node:
    """Replace what picks one of several results. The results together are for all other readers."""
    for user in list(node.users):
        if user.target is operator.getitem and isinstance(user.args[1], int):
            user.replace_all_uses_with(results[user.args[1]])
            builder.program.graph.erase_node(user)
    return builder.call("container", *results, target=several) if node.users else results[0]


def views_to_reshapes(graph: fx.Graph) -> None:
    """Replace views by reshapes, which copy if necessary: other operations with the same result may return other strides.

    At this point no operation overwrites a value, so a copy is as good as a view.
    """
    for node in calls(graph):
        spelling = spelling_of(node)
        target: Any = node.target
        copying = None if spelling is None else spelling.operator.memory.copying.get(target)
        if copying is not None and not any(_is_dtype(argument) for argument in [*node.args[1:], *node.kwargs.values()]):
            node.target = copying
            node.kwargs = {"shape" if name == "size" else name: value for name, value in node.kwargs.items()}


def _is_dtype(argument: Any) -> bool:
    """Whether an argument of a view is a dtype and not a size."""
    if isinstance(argument, fx.Node):
        return argument.target is getattr and argument.args[1] == "dtype"
    return isinstance(argument, torch.dtype)

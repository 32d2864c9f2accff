"""CANONIZE: make padding with zeros before a convolution the padding of the convolution."""

from typing import Any

from torch import fx

from lrpfx.ir.node import Role, calls, node_info, parameter_value, update_info
from lrpfx.ir.operator import Operator, WeightLayout
from lrpfx.layers.layer import bound_arguments
from lrpfx.operators.table import operator_named
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE


class MergePadding(GraphPass):
    """Merge zero padding into each convolution that reads it, if it is the same on both sides of each dimension."""

    name = "merge_padding"
    stage = "canonize"
    requires = (CANONICAL, OUT_OF_PLACE)

    def applies(self, program: Program) -> bool:
        return any(_padding(user) is not None for node in calls(program.graph) if _convolution(node) for user in node.args[:1])

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            operator = _convolution(node)
            while operator is not None and node.args:
                padded = node.args[0]
                amounts = _padding(padded)
                if amounts is None or not isinstance(padded, fx.Node):
                    break
                name = node_info(padded).name
                padding = _sum(program, node, operator, amounts)
                if isinstance(padding, str):
                    result.reasons.append((name, padding))
                    break
                node.args = (padded.args[0], *node.args[1:])
                node.kwargs = {**node.kwargs, "padding": padding}
                update_info(node, merged=(*node_info(node).merged, name))
                result.matches += 1
                result.details.append((name, f"merged into {node_info(node).name}"))
                if not padded.users:
                    program.graph.erase_node(padded)
        return result


def _convolution(node: fx.Node) -> Operator | None:
    operator = node_info(node).operator
    is_layer = operator is not None and operator.weight_layout is WeightLayout.CONVOLUTION
    return operator if is_layer and node_info(node).role is Role.DATA else None


def _padding(value: Any) -> list[int] | None:
    """The numbers of zeros that a call adds, from the last dimension on; None if it does not pad with zeros."""
    if not isinstance(value, fx.Node) or value.op != "call_function" or node_info(value).operator is not operator_named("pad"):
        return None
    bound = bound_arguments(value, operator_named("pad"))
    amounts = bound["pad"]
    numbers = isinstance(amounts, (tuple, list)) and all(isinstance(one, int) for one in amounts)
    return list(amounts) if numbers and bound.get("mode", "constant") == "constant" and not bound.get("value") else None


def _sum(program: Program, node: fx.Node, operator: Operator, amounts: list[int]) -> tuple[int, ...] | str:
    """The padding of a convolution on an unpadded value, or the reason why it has none."""
    spatial, bound = operator.spatial, bound_arguments(node, operator)
    pairs = list(zip(amounts[::2], amounts[1::2], strict=True))
    if any(pair != (0, 0) for pair in pairs[spatial:]):
        return f"it pads the channels or the batch of {node_info(node).name}"
    pairs = [*reversed(pairs[:spatial])]
    pairs = [*[(0, 0)] * (spatial - len(pairs)), *pairs]
    if any(before != after or before < 0 for before, after in pairs):
        return f"it does not pad both sides alike, as {node_info(node).name} would"
    own = bound.get("padding", 0)
    if own == "same":
        weight, dilation = bound["weight"], _each(bound.get("dilation", 1), spatial)
        if not isinstance(weight, fx.Node) or node_info(weight).role is not Role.PARAMETER:
            return f"the weight of {node_info(node).name} depends on the model's input"
        sizes = parameter_value(weight, program.root).shape[2:]
        totals = [step * (size - 1) for size, step in zip(sizes, dilation, strict=True)]
        if any(total % 2 for total in totals):
            return f"{node_info(node).name} does not pad both sides alike itself"
        own = [total // 2 for total in totals]
    before = _each(0 if own == "valid" else own, spatial)
    if not all(isinstance(one, int) for one in before):
        return f"the padding of {node_info(node).name} depends on sizes"
    return tuple(one + pair[0] for one, pair in zip(before, pairs, strict=True))


def _each(value: Any, dimensions: int) -> list[Any]:
    return [value] * dimensions if not isinstance(value, (tuple, list)) else list(value) * (dimensions // len(value))

"""NORMALIZE: distinguish the product of attention weights and values from other matrix products."""

from torch import fx

from lrpfx.ir.node import Role, calls, is_data, node_info, nodes_in, update_info
from lrpfx.ir.operator import Probability
from lrpfx.operators.table import operator_named
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, DECOMPOSED
from lrpfx.types import Activation, AvgPool, Gate, RMSNorm, Softmax, Sum


class FindAttention(GraphPass):
    """Mark a matrix product of which one factor is a softmax as weighted values, with the softmax as the first argument.

    The pass looks through element-wise functions, sums and means of softmaxes, views, constant factors and divisors. It does
    not look through dense layers.
    """

    name = "find_attention"
    stage = "normalize"
    requires = (CANONICAL, DECOMPOSED)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in calls(program.graph):
            row = node_info(node).operator
            if row is None or not row.weighted or node.kwargs:
                continue
            args = node.args
            if len(args) == 2 and isinstance(args[1], (tuple, list)):  # the operands of an exported einsum
                args = (args[0], *args[1])
            *others, first, last = args
            factors = [argument for argument in (first, last) if isinstance(argument, fx.Node) and is_data(argument)]
            if len(factors) != 2 or nodes_in(others):
                continue
            if _is_softmax(factors[0]):
                weighted = operator_named(row.weighted)
            elif _is_softmax(factors[1]):
                weighted = operator_named(row.weighted_last)
                factors.reverse()
            else:
                continue
            node.args = (*others, *factors)
            node.target = weighted.function or next(iter(weighted.functions))
            update_info(node, operator=weighted)
            result.matches += 1
            result.details.append((node_info(node).name, f"values, weighted by {node_info(factors[0]).name}"))
        return result


def _is_softmax(value: fx.Node) -> bool:
    """Whether a value consists of attention weights: a softmax, perhaps masked, normalized again, or mixed with others."""
    row = node_info(value).operator
    if value.op != "call_function" or row is None:
        return False
    if issubclass(row.kind, Softmax):
        return True
    if row.probability is Probability.OF_ALL_LOGITS:  # its logarithm, from which an exponential makes weights
        return any(node_info(user).operator is not None and _is_exponential(user) for user in value.users)
    data = [argument for argument in value.all_input_nodes if node_info(argument).role is Role.DATA]
    if not data:
        return False
    if row.kind is Gate:  # a signal and its scale
        return _is_softmax(data[0]) or _sums_up(data[-1], data[0])
    mixes = issubclass(row.kind, (Sum, AvgPool, Activation, RMSNorm)) or row.neutral or bool(row.proportional_to)
    return mixes and all(map(_is_softmax, data))


def _is_exponential(node: fx.Node) -> bool:
    return node_info(node).operator is operator_named("exp")


def _sums_up(scale: fx.Node, signal: fx.Node) -> bool:
    """Whether a value is the sum of a signal over some dimension, as the divisor of a softmax that is spelled out."""
    row = node_info(scale).operator
    while row is not None and row.neutral and isinstance(scale.args[0], fx.Node):
        scale = scale.args[0]
        row = node_info(scale).operator
    if row is None or not row.adds_up or not isinstance(scale.args[0], fx.Node):
        return False
    summed = scale.args[0]
    return summed is signal or (summed.target is signal.target and (summed.args, summed.kwargs) == (signal.args, signal.kwargs))

"""NORMALIZE: distinguish gates, in which one factor scales the other, and gated products from ordinary products."""

from typing import Any

from torch import fx

from lrpfx.ir.kinds import Activation, AvgPool, Embedding, Gate, Product, Statistic, Sum
from lrpfx.ir.node import Role, calls, is_data, node_info, update_info
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.table import operator_named
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, DECOMPOSED, GATED

#: The certainty of a factor that is bounded, but may be negative or a signal.
_BOUNDED = 1
#: Inputs of the model, for each value.
_Inputs = dict[fx.Node, frozenset[fx.Node]]


class FindGates(GraphPass):
    """Mark a product as a gate if one factor is a divisor or comes from a bounded function. The other factor is the signal.

    The signal becomes the first argument. A product of a signal and an activation, which is not bounded, is a gated product.
    The pass looks through views, constant factors, constant terms and other gates: it recognizes 0.5 * (1 + erf(x)) as a
    scale, and probabilities that are divided by their sum. A vector that is divided by its own norm is a signal, however the
    norm is written. So is a factor by which alone an input of the model reaches the product, the end of a tower: a bounded one
    such as a tanh, unless a constant is added to it, or an activation.
    """

    name = "find_gates"
    stage = "normalize"
    requires = (
        CANONICAL,
        DECOMPOSED,
    )
    ensures = (GATED,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        inputs = _inputs_of_values(program.graph)
        for node in calls(program.graph):
            operator = node_info(node).operator
            if operator is None or not operator.product.scaled or not all(is_data(argument) for argument in node.args[:2]):
                continue
            if operator.values.discrete_with in node.kwargs:
                continue
            signal, scale = node.args[:2]
            assert isinstance(signal, fx.Node) and isinstance(scale, fx.Node)
            if operator.merging.affine_in == operator.data:  # either may be the signal
                pairs = ((signal, scale), (scale, signal))
                certainties = [_certainty(*pair, inputs) for pair in pairs]
                if certainties[0] == certainties[1]:
                    activations = [_is_activation(factor) and not _ends_tower(factor, other, inputs) for factor, other in pairs]
                    if activations[0] == activations[1] or not operator.product.activated:
                        result.reasons.append((node_info(node).name, "no factor is known to scale the other"))
                        continue
                    if activations[0]:
                        signal, scale = scale, signal
                    _change(node, operator.product.activated, signal, scale)
                    result.match(node_info(node).name, f"activated: {node_info(scale).name}")
                    continue
                if certainties[0] > certainties[1]:
                    signal, scale = scale, signal
            _change(node, operator.product.scaled, signal, scale)
            result.match(node_info(node).name, f"scaled by {node_info(node.all_input_nodes[-1]).name}")
        return result


def _change(node: fx.Node, name: str, signal: fx.Node, factor: fx.Node) -> None:
    """Make a product a call of the row called `name`."""
    row = operator_named(name)
    node.target, node.args = row.canonical, (signal, factor)
    update_info(node, operator=row)


def _is_activation(value: fx.Node) -> bool:
    """Whether a value is that of an activation, or of a gate such as a spelled-out GELU."""
    while value.op == "call_function":
        row = node_info(value).operator
        if row is None or _is_normalized(value):
            return False
        if row.kind is Activation or row.kind is Gate:
            return True
        data = [argument for argument in value.all_input_nodes if node_info(argument).role is Role.DATA]
        if not row.neutral or len(data) != 1:
            return False
        value = data[0]
    return False


def _certainty(value: fx.Node, other: fx.Node, inputs: _Inputs) -> int:
    """How certain it is that `value` scales `other` in a product."""
    factor, is_shifted = value, False
    while value.op == "call_function":
        operator = node_info(value).operator
        if operator is None or _is_normalized(value):
            return 0
        scales = operator.values.scales
        certainty = scales(bound_arguments(value, operator)) if callable(scales) else scales
        if certainty == _BOUNDED and not is_shifted and _ends_tower(factor, other, inputs):
            return 0
        if certainty or callable(scales):
            return certainty
        data = [argument for argument in value.all_input_nodes if node_info(argument).role is Role.DATA]
        if issubclass(operator.kind, Gate):  # a scale that is scaled itself, such as a share of a sum
            data = data[:1]
        if len(data) > 1 and operator.entries.moves:  # parts that are put together
            return min(_certainty(one, other, inputs) for one in data)
        is_shifted = is_shifted or issubclass(operator.kind, Sum)
        affine = issubclass(operator.kind, (Product, Sum)) or operator.neutral
        if not affine or len(data) != 1:
            return 0
        value = data[0]
    return 0


def _ends_tower(value: fx.Node, other: fx.Node, inputs: _Inputs) -> bool:
    """Whether an input of the model reaches a product by `value` alone."""
    return bool(inputs[value] - inputs[other])


def _inputs_of_values(graph: fx.Graph) -> _Inputs:
    """The model's inputs that carry relevance to each value, by themselves or through an embedding."""
    found: _Inputs = {}
    read_at_all: _Inputs = {}  # whether or not with relevance
    nothing = frozenset[fx.Node]()
    for node in graph.nodes:
        of_node = frozenset({node}) if node.op == "placeholder" else nothing
        read_at_all[node] = of_node.union(*(read_at_all[one] for one in node.all_input_nodes))
        carried = (found[one] for one in node.all_input_nodes if is_data(one))
        found[node] = read_at_all[node] if node_info(node).kind is Embedding else of_node.union(*carried)
    return found


# --- normalized vectors ------------------------------------------------------------------------------------------------------

#: Element-wise steps from the entries of a vector to its norm, beside powers: some make entries positive.
_POSITIVE = ("abs", "square", "pow")
_STEPS = ("abs", "divided_by", "clamp", "clamp_min", "maximum")


def _is_normalized(call: fx.Node) -> bool:
    """Whether a gate scales a vector by a norm of its own, such as x / x.norm() or x * rsqrt(mean(x²) + eps)."""
    row = node_info(call).operator
    if row is None or row.kind is not Gate:
        return False
    signal, scale = (argument for argument in call.args[:2] if isinstance(argument, fx.Node))
    own = set(map(_computation, _affine_sources(signal)))
    return any(
        own & set(map(_computation, _affine_sources(read)))
        for statistic in _statistics_in(scale)
        for read in statistic.all_input_nodes
        if is_data(read)
    )


def _statistics_in(scale: fx.Node) -> list[fx.Node]:
    """The calls that take norms, variances, magnitudes or squares, from which a scale is computed step by step."""
    found = []
    seen, pending = {scale}, [scale]
    while pending:
        node = pending.pop()
        row = node_info(node).operator
        if row is None:
            continue
        data = [argument for argument in node.all_input_nodes if is_data(argument)]
        is_square = issubclass(row.kind, Product) and len(data) == 1 and sum(is_data(one) for one in node.args) > 1
        if row.kind is Statistic or row.name in _POSITIVE or is_square:
            found.append(node)
        if row.neutral or row.values.power is not None or row.name in _STEPS or issubclass(row.kind, (Sum, AvgPool, Product)):
            pending += [one for one in data if one not in seen]
            seen.update(data)
    return found


def _computation(node: fx.Node) -> Any:
    """What a node computes: equal for two calls of one function with the same arguments."""
    found = node.target, node.args, tuple(node.kwargs.items())
    try:
        hash(found)
    except TypeError:
        return node
    return found if node.op == "call_function" else node


def _affine_sources(value: fx.Node) -> set[fx.Node]:
    """A value, and those from which sums, means and products with constants make it."""
    found, pending = {value}, [value]
    while pending:
        node = pending.pop()
        row = node_info(node).operator
        data = [argument for argument in node.all_input_nodes if is_data(argument)]
        is_affine = row is not None and (
            row.neutral or issubclass(row.kind, (Sum, AvgPool)) or _is_constant_product(node, data)
        )
        if is_affine:
            pending += [one for one in data if one not in found]
            found.update(data)
    return found


def _is_constant_product(node: fx.Node, data: list[fx.Node]) -> bool:
    kind = node_info(node).kind
    return kind is not None and issubclass(kind, Product) and len(data) == 1

"""CANONIZE: merge batch norm into the layer before it, also through views, as arithmetic on parameters.

With a = gamma / sqrt(var + eps): W' = a W along the output channels and b' = a (b - mean) + beta. The merge changes the layer's
output. It is valid only if the batch norm is the only reader of this output.
"""

from typing import Any

import torch
from torch import fx

from lrpfx.ir.kinds import BatchNorm
from lrpfx.ir.node import (
    NodeInfo,
    Role,
    calls,
    data_calls,
    node_info,
    only_reader,
    parameter_value,
    readers,
    row_of,
    sources_of_dimensions,
    update_info,
)
from lrpfx.ir.operator import Operator, WeightLayout
from lrpfx.operators.functions import require_dimensions, require_matrix
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.table import operator_named
from lrpfx.passes.canonize.channel_places import (
    Order,
    in_order,
    keeps_channels,
    keeps_entries,
    moved_channels,
    place_of_channels,
    returns_parts,
    uncopied,
)
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE


def batch_norm_scale(running_var: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The factor of each channel. Shape (channels,)."""
    scale = torch.rsqrt(running_var + eps)
    return scale if weight is None else weight * scale


def scale_output_channels(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A dense or convolution weight (out, in, ...) with each output channel scaled."""
    return weight * scale.reshape(-1, *[1] * (weight.ndim - 1))


def scale_output_channels_transposed(weight: torch.Tensor, scale: torch.Tensor, groups: int) -> torch.Tensor:
    """The weight (in, out / groups, ...) of a transposed convolution with each output channel scaled."""
    grouped = weight.unflatten(0, (groups, -1))
    factors = scale.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
    return torch.flatten(grouped * factors, 0, 1)


def merged_bias(
    bias: torch.Tensor | None, running_mean: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None
) -> torch.Tensor:
    """The bias of the merged layer. Shape (channels,)."""
    centred = -running_mean if bias is None else bias - running_mean
    return centred * scale if shift is None else centred * scale + shift


def has_batch_norm(program: Program) -> bool:
    """Whether the model has a batch norm, merged or not."""
    infos = map(node_info, data_calls(program.graph))
    return any(info.kind is BatchNorm or info.merged for info in infos)


class MergeBatchNormLeft(GraphPass):
    """Merge each batch norm into the convolution, transposed convolution or dense layer before it, if it is the only reader.

    Views, selections of places, averages of them and conversions that keep the channels may lie between the two.
    """

    name = "merge_batch_norm"
    stage = "canonize"
    requires = (CANONICAL, OUT_OF_PLACE)

    def applies(self, program: Program) -> bool:
        return has_batch_norm(program)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            operator = node_info(node).operator
            if operator is None or not issubclass(operator.kind, BatchNorm):
                continue
            layer, order = _layer_before(program, node)
            reason = _why_not(program, node, layer)
            if reason is None and layer is not None:
                result.details.append((node_info(node).name, f"merged into {_merge(program, node, layer, order)}"))
                result.matches += 1
            elif reason is not None:
                result.reasons.append((node_info(node).name, reason))
        return result


def is_layer_of_parameters(node: fx.Node) -> bool:
    """Whether a call is a linear layer whose weight and bias depend only on parameters."""
    operator = node_info(node).operator
    if operator is None or operator.linear.weight_layout is None or node_info(node).role is not Role.DATA:
        return False
    weights = [bound_arguments(node, operator).get(name) for name in operator.parameters]
    return all(not isinstance(weight, fx.Node) or node_info(weight).role is Role.PARAMETER for weight in weights)


def _layer_before(program: Program, batch_norm: fx.Node) -> tuple[fx.Node | None, Order]:
    """The linear layer whose channels a batch norm reads, perhaps through views that it alone reads; else what it reads.

    With it, the number of the batch norm's channel that holds each channel of the layer, if they differ.
    """
    source: Any = batch_norm.args[0]
    reader = batch_norm
    views: list[fx.Node] = []
    while isinstance(source, fx.Node) and source.op == "call_function" and only_reader(source) is reader:
        operator = node_info(source).operator
        if operator is None or not keeps_channels(operator):
            break
        if not returns_parts(source):
            views.append(source)
        source, reader = source.args[0], source
    first = batch_norm.args[0] if isinstance(batch_norm.args[0], fx.Node) else None
    if not views or not isinstance(source, fx.Node) or only_reader(source) is not reader or not is_layer_of_parameters(source):
        return first, None
    if all(map(keeps_entries, views)):
        return source, None
    value, place = source, place_of_channels(row_of(source))
    for view in reversed(views):
        moved = moved_channels(program, value, view, place)
        if moved is None:
            return first, None
        value, place = view, moved
    return (source, place.order) if place.dims == (1 - len(node_info(value).shape or ()),) else (first, None)


def _why_not(program: Program, batch_norm: fx.Node, producer: fx.Node | None) -> str | None:
    """The reason why a batch norm cannot be merged into its producer, or None if it can."""
    if producer is None or producer.op != "call_function":
        return "its input is an input of the model or comes from an opaque module"
    info = node_info(producer)
    operator = info.operator
    if operator is None or operator.linear.weight_layout is None:
        return f"its input comes from {info.name} ({info.operator or info.kind_name}), which is not a linear layer"
    others = [user for user in readers(producer) if user is not batch_norm]
    if others and producer is batch_norm.args[0]:
        names = ", ".join(node_info(user).name for user in others)
        return f"the output of {info.name} has a second consumer: {names}"
    weights = [one for one in (*producer.args[1:], *batch_norm.args[1:]) if isinstance(one, fx.Node)]
    if any(node_info(weight).role is not Role.PARAMETER for weight in weights):
        return "a weight or statistic depends on the model's input"
    if len({parameter_value(weight, program.root).device for weight in weights}) > 1:
        return f"its statistics are on another device than the weight of {info.name}"
    if producer is not uncopied(batch_norm.args[0]):
        return None
    dimensions, expected = dimensions_of(program, batch_norm), operator.rank_of_batch
    if dimensions is not None and operator.linear.weight_layout is WeightLayout.DENSE and dimensions != 2:
        where = "its channels are the last dimension, but batch norm acts on the second"
        return f"the output of {info.name} has {dimensions} dimensions: {where}"
    if dimensions is not None and dimensions != expected:
        return (
            f"{info.name} takes a sample without a batch: its channels come first, but batch norm acts on the second dimension"
        )
    return None


def dimensions_of(program: Program, value: Any) -> int | None:
    """The number of dimensions of a value, proven from its operations or known from example inputs; None if unknown."""
    node = value
    while isinstance(node, fx.Node):
        operator = node_info(node).operator
        proven = None if operator is None else _made_with(program, node, operator)
        if proven is not None:
            return proven
        if operator is None or not _keeps_dimensions(node, operator):
            break
        node = node.args[0]
    shape = node_info(value).shape if isinstance(value, fx.Node) else None
    if shape is None or _depends_on_sizes(value):
        return None
    program.fixed_dimensions = True
    return len(shape)


def _made_with(program: Program, node: fx.Node, operator: Operator) -> int | None:
    """The fixed number of dimensions of an operation's result; None if it varies or is unknown."""
    if operator.dimensions.rank is not None:
        return operator.dimensions.rank(bound_arguments(node, operator))
    path = node_info(node).module_path
    if operator.dimensions.rank_of and path is not None:
        return operator.dimensions.rank_of.get(type(program.root.get_submodule(path)))
    return None


def _keeps_dimensions(node: fx.Node, operator: Operator) -> bool:
    """Whether the result of an operation has as many dimensions as its first argument."""
    alone = all(argument is node.args[0] for argument in node.all_input_nodes)
    return operator.dimensions.keeps_rank and (alone or not operator.dimensions.broadcasts)


def _depends_on_sizes(value: fx.Node) -> bool:
    """Whether a value depends on a `squeeze` whose number of dimensions may depend on the sizes of its argument."""
    pending, seen = [value], {value}
    while pending:
        node = pending.pop()
        operator = node_info(node).operator
        if operator is not None and operator.dimensions.squeezes and not _removes_an_added_dimension(node):
            return True
        found = [argument for argument in node.all_input_nodes if argument not in seen]
        seen.update(found)
        pending += found
    return False


def _removes_an_added_dimension(squeeze: fx.Node) -> bool:
    """Whether `squeeze` removes a dimension that `unsqueeze` has added and that therefore always has size 1."""
    node: Any = squeeze.args[0]
    place: Any = squeeze.kwargs.get("dim", squeeze.args[-1])
    while isinstance(node, fx.Node) and isinstance(place, int):
        shape = node_info(node).shape
        places = None if shape is None else sources_of_dimensions(node, len(shape))
        if places is None:
            return False
        place = places[place % len(places)]
        if place is None:
            return True
        node = node.args[0]
    return False


def _merge(program: Program, batch_norm: fx.Node, linear: fx.Node, order: Order) -> str:
    """Merge `batch_norm` into a linear layer. Return the name of the layer."""
    graph, source = program.graph, batch_norm.args[0]
    assert isinstance(source, fx.Node)
    operator, norm = row_of(linear), row_of(batch_norm)
    own, statistics = bound_arguments(linear, operator), bound_arguments(batch_norm, norm)
    info = node_info(linear)
    if uncopied(source) is linear and dimensions_of(program, batch_norm) is None:
        require_batch_dimensions(graph, linear, operator)

    def derive(function: Any, what: str, *args: Any) -> fx.Node:
        derived = NodeInfo(f"{info.name}.{what}", source=node_info(batch_norm).source, role=Role.PARAMETER)
        return insert_call(graph, linear, function, args, derived)

    # The statistics may come after the layer in the graph. They depend only on parameters, so they can move up.
    for value in batch_norm.args[1:]:
        if isinstance(value, fx.Node):
            move_up(value, linear)
    eps = statistics.get("eps", norm.arguments["eps"])
    scale = derive(batch_norm_scale, "batch_norm_scale", statistics["running_var"], statistics.get("weight"), eps)
    mean, shift = statistics["running_mean"], statistics.get("bias")
    if order is not None:
        scale, mean = (derive(in_order, "in_order", one, order) for one in (scale, mean))
        shift = None if shift is None else derive(in_order, "in_order", shift, order)
    if operator.linear.weight_layout is WeightLayout.TRANSPOSED_CONVOLUTION:
        groups = own.get("groups", 1)
        weight = derive(scale_output_channels_transposed, "merged_weight", own["weight"], scale, groups)
    else:
        weight = derive(scale_output_channels, "merged_weight", own["weight"], scale)
    bias = derive(merged_bias, "merged_bias", own.get("bias"), mean, scale, shift)
    linear.args = (linear.args[0], weight, bias)
    linear.kwargs = {name: value for name, value in linear.kwargs.items() if name not in operator.tensors}
    merged = (*info.merged, node_info(batch_norm).name)
    update_info(linear, merged=merged)
    batch_norm.replace_all_uses_with(source)
    graph.erase_node(batch_norm)
    return info.name


def require_batch_dimensions(graph: fx.Graph, linear: fx.Node, operator: Operator) -> None:
    """Insert a check that the second dimension of the input holds the channels, as in a batch."""
    info = node_info(linear)
    dense = operator.linear.weight_layout is WeightLayout.DENSE
    function = require_matrix if dense else require_dimensions
    name, further = function.__name__, () if dense else (operator.rank_of_batch,)
    guard = NodeInfo(f"{info.name}.{name}", source=info.source, operator=operator_named(name), description=name)
    linear.args = (insert_call(graph, linear, function, (linear.args[0], *further), guard), *linear.args[1:])


def move_up(value: fx.Node, target: fx.Node) -> None:
    """Move a parameter's node and its arguments before `target` if they come after it."""
    if value < target:
        return
    for argument in value.all_input_nodes:
        move_up(argument, target)
    target.prepend(value)

"""CANONIZE: merge affine maps into the linear layers after them, as arithmetic on parameters.

A map x -> scale * x + shift per channel before a linear layer becomes W' = W * scale along the input channels and
b' = b + W shift. If the layer pads with zeros, the shift does not apply to the padding. The bias then depends on the position:
it is the layer's output for the shift alone. Operations between the two must commute with an affine map per channel. A
`_Layout` tracks the position of the channels. If the merge is not provably correct, the map stays, and the pass says why.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from lrpfx.ir.node import NodeInfo, Role, attribute_of, calls, map_arguments, node_info, row_of, update_info
from lrpfx.ir.operator import Channels, NotAffineError, Operator, WeightLayout
from lrpfx.layers.layer import bound_arguments
from lrpfx.operators.channels import UNKNOWN_RANK, pads
from lrpfx.operators.functions import thresholded_relu
from lrpfx.operators.table import operator_named
from lrpfx.passes.canonize.merge_batch_norm import batch_norm_scale, dimensions_of, has_batch_norm, move_up
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE
from lrpfx.types import BatchNorm

# --- arithmetic on parameters ----------------------------------------------------------------------------------------------


def batch_norm_shift(running_mean: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The value that a batch norm adds to each channel after scaling it. Shape (channels,)."""
    shift = -running_mean * scale
    return shift if bias is None else bias + shift


def shift_behind_threshold(scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The shift after a thresholded ReLU. A channel with scale 0 is the constant relu(shift)."""
    return torch.where(scale == 0, shift.relu(), shift)


def scale_input_channels(weight: torch.Tensor, scale: torch.Tensor, groups: int) -> torch.Tensor:
    """A convolution's weight (out, in / groups, ...) with each input channel scaled."""
    factors = scale.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
    return torch.flatten(weight.unflatten(0, (groups, -1)) * factors, 0, 1)


def scale_features(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A dense weight (out, in) with each input feature scaled; a flattened channel is several consecutive features."""
    return weight * scale.repeat_interleave(weight.shape[1] // scale.shape[0])


def bias_of_features(weight: torch.Tensor, bias: torch.Tensor | None, shift: torch.Tensor) -> torch.Tensor:
    """The bias of a dense layer whose input features are shifted. Shape (out,)."""
    added = weight @ shift.repeat_interleave(weight.shape[1] // shift.shape[0])
    return added if bias is None else bias + added


def bias_of_channels(weight: torch.Tensor, bias: torch.Tensor | None, shift: torch.Tensor, groups: int) -> torch.Tensor:
    """The bias of a convolution without padding whose input channels are shifted. Shape (out,)."""
    added = scale_input_channels(weight, shift, groups).flatten(1).sum(1)
    return added if bias is None else bias + added


def bias_map(
    input: torch.Tensor,
    shift: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """The output of a convolution for the shift alone, on an input of this size; its padding stays zero.

    Shape (1, channels, ...).
    """
    constant = shift.reshape(1, -1, *[1] * (input.ndim - 2)).expand(1, -1, *input.shape[2:])
    convolution: Callable[..., torch.Tensor] = (torch.conv1d, torch.conv2d, torch.conv3d)[input.ndim - 3]
    return convolution(constant, weight, bias, **options)


def as_channels(value: torch.Tensor, channels: int) -> torch.Tensor:
    """A constant per channel, of a shape such as (channels, 1, 1), or a single constant, in the shape (channels,)."""
    return value.reshape(-1).expand(channels) if value.numel() == 1 else value.reshape(channels)


# --- where an affine map can go ----------------------------------------------------------------------------------------------


class _ObstacleError(Exception):
    """The reason why a map cannot be merged."""


@dataclass(frozen=True)
class _Place:
    """A linear layer that reads the scaled and shifted values."""

    node: fx.Node
    operator: Operator

    @property
    def is_dense(self) -> bool:
        return self.operator.weight_layout is WeightLayout.DENSE


class _Layout(ABC):
    """The position of the entries of a value that have the same scale and shift."""

    @abstractmethod
    def behind(self, node: fx.Node, operator: Operator) -> "_Layout":
        """The layout of an operation's result; `_ObstacleError` if the operation does not commute with the map."""

    @abstractmethod
    def check_reader(self, place: _Place) -> None:
        """Raise `_ObstacleError` unless these entries are the input channels or features of the linear layer."""


def _obstacle(node: fx.Node, why: str = "") -> _ObstacleError:
    info = node_info(node)
    because = f": {why}" if why else ""
    return _ObstacleError(f"{info.name} ({info.operator}) reads it and does not commute with an affine map{because}")


@dataclass(frozen=True)
class _Channels(_Layout):
    """Channels in the second dimension, or flattened into features."""

    channels: Channels

    def behind(self, node: fx.Node, operator: Operator) -> _Layout:
        if operator.channels is None:
            raise _obstacle(node, "its channels are flattened" if self.channels.flat else "")
        try:
            return _Channels(operator.channels(self.channels, bound_arguments(node, operator)))
        except NotAffineError as reason:
            raise _obstacle(node, str(reason)) from None

    def check_reader(self, place: _Place) -> None:
        name, dense, dimensions = node_info(place.node).name, place.is_dense, self.channels.dimensions
        if self.channels.flat and dense:
            return
        if dimensions is None and dense:
            raise _ObstacleError("a dense layer reads it, and its channels may not be the last dimension; pass example_inputs")
        if dimensions is None:
            raise _ObstacleError(f"{name} reads it, and {UNKNOWN_RANK}")
        if dimensions != place.operator.rank_of_batch:
            reads = "the last dimension" if dense else "the first as channels"
            raise _ObstacleError(f"{name} reads {reads}, but its channels are the second of {dimensions} dimensions")


@dataclass(frozen=True)
class _LastDimension(_Layout):
    """The entries lie along the last dimension."""

    program: Program

    def behind(self, node: fx.Node, operator: Operator) -> _Layout:
        if not _keeps_last_dimension(node, operator):
            raise _obstacle(node)
        self.program.fixed_dimensions = True
        return self

    def check_reader(self, place: _Place) -> None:
        if not place.is_dense:
            raise _ObstacleError("a layer other than a dense layer reads it")


@dataclass(frozen=True)
class _ConvolvedChannels(_Layout):
    """The entries are the channels of convolutions over `dimensions` dimensions."""

    dimensions: int

    def behind(self, node: fx.Node, operator: Operator) -> _Layout:
        raise _obstacle(node)

    def check_reader(self, place: _Place) -> None:
        if place.is_dense or place.operator.spatial != self.dimensions:
            raise _ObstacleError(f"a layer other than a convolution over {self.dimensions} dimensions reads it")


def _linear_readers(value: fx.Node, layout: _Layout) -> list[_Place]:
    """The linear layers that read `value`, directly or through other operations. `_ObstacleError` if others read it."""
    found: list[_Place] = []
    for user in value.users:
        info = node_info(user)
        operator = info.operator
        name = info.name or "the output of the model"
        if operator is None or user.op == "output":
            raise _ObstacleError(
                "it is an output of the model" if user.op == "output" else f"{name} reads it and is not a linear layer"
            )
        if operator.weighs_channels:
            bound = bound_arguments(user, operator)
            weights = [bound.get("weight"), bound.get("bias")]
            if bound["input"] is not value or value in weights:
                raise _ObstacleError(f"{name} takes it as a parameter")
            if any(isinstance(weight, fx.Node) and node_info(weight).role is not Role.PARAMETER for weight in weights):
                raise _ObstacleError(f"a parameter of {name} depends on the input")
            if operator.weight_layout is WeightLayout.CONVOLUTION and not operator.with_bias_map:
                raise _obstacle(user, "it has no form with a bias for each position")
            place = _Place(user, operator)
            layout.check_reader(place)
            found.append(place)
        elif user.all_input_nodes == [value]:
            found += _linear_readers(user, layout.behind(user, operator))
        else:
            raise _obstacle(user)
    return found


class _Merger:
    """Merges a scale and a shift into linear layers."""

    def __init__(self, program: Program, places: list[_Place], names: tuple[str, ...], source: str) -> None:
        self.graph = program.graph
        self.places = places
        self.names = names
        self.source = source

    def derive(
        self, before: fx.Node, name: str, function: Callable[..., Any], *args: Any, role: Role = Role.PARAMETER
    ) -> fx.Node:
        for argument in args:
            if isinstance(argument, fx.Node) and node_info(argument).role is Role.PARAMETER:
                move_up(argument, before)
        return insert_call(self.graph, before, function, args, NodeInfo(name, source=self.source, role=role))

    def merge(self, scale: fx.Node, shift: fx.Node | None) -> None:
        for place in self.places:
            node, info = place.node, node_info(place.node)
            bound = bound_arguments(node, place.operator)
            weight, bias = bound["weight"], bound.get("bias")
            if place.is_dense:
                if shift is not None:
                    bias = self.derive(node, f"{info.name}.merged_bias", bias_of_features, weight, bias, shift)
                scaled = self.derive(node, f"{info.name}.merged_weight", scale_features, weight, scale)
                node.args = (node.args[0], scaled, *([] if bias is None else [bias]))
                node.kwargs = {}
            else:
                self._merge_convolution(place, scale, shift)
            update_info(node, merged=(*info.merged, *self.names))

    def _merge_convolution(self, place: _Place, scale: fx.Node, shift: fx.Node | None) -> None:
        node, info = place.node, node_info(place.node)
        bound = bound_arguments(node, place.operator)
        weight, bias, groups = bound["weight"], bound.get("bias"), bound.get("groups", 1)
        scaled = self.derive(node, f"{info.name}.merged_weight", scale_input_channels, weight, scale, groups)
        options = {name: value for name, value in bound.items() if name not in place.operator.tensors}
        if shift is None:
            pass
        elif not pads(bound.get("padding", 0)):
            bias = self.derive(node, f"{info.name}.merged_bias", bias_of_channels, weight, bias, shift, groups)
        else:
            args = (bound["input"], shift, weight, bias, options)
            bias = self.derive(node, f"{info.name}.bias_map", bias_map, *args, role=Role.METADATA)
            mapped = operator_named(place.operator.with_bias_map)
            node.target = mapped.canonical
            update_info(node, operator=mapped)
        node.args = (node.args[0], scaled, *([] if bias is None else [bias]))
        node.kwargs = options


# --- passes ---------------------------------------------------------------------------------------------------------------


class MergeBatchNormRight(GraphPass):
    """Merge each remaining batch norm into all linear layers that read it, directly or after a ReLU.

    For a ReLU, relu(a x + c) = a T(x) + c with the thresholded ReLU T(x) = x if a x + c > 0 else -c / a.
    """

    name = "merge_batch_norm_right"
    stage = "canonize"
    requires = (CANONICAL, OUT_OF_PLACE)

    def applies(self, program: Program) -> bool:
        return has_batch_norm(program)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            operator = node_info(node).operator
            if operator is None or not issubclass(operator.kind, BatchNorm) or node_info(node).role is not Role.DATA:
                continue
            name = node_info(node).name
            try:
                into = self._merge(program, node, operator)
            except _ObstacleError as obstacle:
                result.reasons.append((name, str(obstacle)))
            else:
                result.details.append((name, f"merged into {into}"))
                result.matches += 1
        return result

    def _merge(self, program: Program, node: fx.Node, operator: Operator) -> str:
        bound, info = bound_arguments(node, operator), node_info(node)
        if any(isinstance(value, fx.Node) and node_info(value).role is not Role.PARAMETER for value in node.args[1:]):
            raise _ObstacleError("a weight or statistic depends on the model's input")
        users = list(node.users)
        relu = users[0] if len(users) == 1 and _is_positive_part(users[0]) else None
        places = _linear_readers(node if relu is None else relu, _Channels(Channels(dimensions_of(program, node))))
        if not places:
            raise _ObstacleError("no linear layer reads it")
        merger = _Merger(program, places, (info.name,), info.source)
        eps = bound.get("eps", operator.arguments["eps"])
        variance, mean, weight, bias = (bound.get(name) for name in ("running_var", "running_mean", "weight", "bias"))
        scale = merger.derive(node, f"{info.name}.scale", batch_norm_scale, variance, weight, eps)
        shift = merger.derive(node, f"{info.name}.shift", batch_norm_shift, mean, scale, bias)
        if relu is None:
            merger.merge(scale, shift)
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        else:
            merger.merge(
                scale, merger.derive(node, f"{info.name}.shift_behind_threshold", shift_behind_threshold, scale, shift)
            )
            relu.target, relu.args = thresholded_relu, (node.args[0], scale, shift)
            description = f"thresholded {node_info(relu).description}"
            merged = (*node_info(relu).merged, info.name)
            update_info(relu, operator=operator_named("thresholded_relu"), description=description, merged=merged)
        program.graph.erase_node(node)
        behind = "" if relu is None else f" after the thresholded {node_info(relu).name}"
        return ", ".join(node_info(place.node).name for place in places) + behind


def _is_positive_part(node: fx.Node) -> bool:
    operator = node_info(node).operator
    return operator is not None and operator.positive_part


class MergeInputNormalization(GraphPass):
    """Merge the normalization of the model's input, such as (x - mean) / std with constants, into the layers that read it."""

    name = "merge_input_normalization"
    stage = "canonize"
    requires = (CANONICAL, OUT_OF_PLACE)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for placeholder in [node for node in program.graph.nodes if node.op == "placeholder"]:
            chain = list(_affine_chain(placeholder))
            if not chain:
                result.reasons.append((node_info(placeholder).name, "no constant is added to it or multiplied with it"))
                continue
            try:
                places = _places_behind(program, placeholder, chain)
            except _ObstacleError as obstacle:
                result.reasons.append((node_info(chain[-1]).name, str(obstacle)))
                continue
            self._merge(program, placeholder, chain, places)
            names = ", ".join(node_info(place.node).name for place in places)
            result.details += [(node_info(node).name, f"merged into {names}") for node in chain]
            result.matches += len(chain)
            for node in reversed(chain):
                node.replace_all_uses_with(placeholder)
                program.graph.erase_node(node)
        return result

    def _merge(self, program: Program, placeholder: fx.Node, chain: list[fx.Node], places: list[_Place]) -> None:
        info = node_info(chain[0])
        merger = _Merger(program, places, tuple(node_info(node).name for node in chain), info.source)
        first = bound_arguments(places[0].node, places[0].operator)
        counts = merger.derive(chain[0], f"{info.name}.channels", _channels, first["weight"], first.get("groups", 1))
        scale: Any = merger.derive(chain[0], f"{info.name}.scale", _constant_channels, first["weight"], counts, 1.0)
        shift: Any = merger.derive(chain[0], f"{info.name}.shift", _constant_channels, first["weight"], counts, 0.0)
        for node in chain:
            value, constant = _value_and_constant(node)
            if isinstance(constant, fx.Node):
                constant = merger.derive(node, f"{node_info(node).name}.constant", as_channels, constant, counts)
            operator, name = row_of(node), node_info(node).name
            if operator.coefficients is None:  # a product or quotient
                scale = merger.derive(node, f"{name}.scale", operator.canonical, scale, constant)
                shift = merger.derive(node, f"{name}.shift", operator.canonical, shift, constant)
                continue
            factors = operator.coefficients(node.kwargs.get("alpha", 1))
            of_value, of_constant = factors if node.args[0] is value else reversed(factors)
            if of_value != 1:
                scale = merger.derive(node, f"{name}.scale", torch.mul, scale, of_value)
                shift = merger.derive(node, f"{name}.shift", torch.mul, shift, of_value)
            if of_constant != 1:
                constant = merger.derive(node, f"{name}.scaled", _scaled_constant, constant, of_constant)
            shift = merger.derive(node, f"{name}.sum", torch.add, shift, constant)
        merger.merge(scale, shift)


def _channels(weight: torch.Tensor, groups: int) -> int:
    return weight.shape[1] * groups


def _constant_channels(weight: torch.Tensor, channels: int, value: float) -> torch.Tensor:
    return torch.full((channels,), value, dtype=weight.dtype, device=weight.device)


def _scaled_constant(constant: Any, factor: Any) -> Any:
    return constant * factor


def _affine_chain(value: fx.Node) -> Iterator[fx.Node]:
    """The chain of affine operations with constants that starts at an input."""
    while len(value.users) == 1:
        (user,) = value.users
        operator = node_info(user).operator
        if operator is None or not operator.affine_in or len(user.args) != 2 or set(user.kwargs) - {"alpha"}:
            return
        if isinstance(user.kwargs.get("alpha"), fx.Node) or _value_and_constant(user)[0] is not value:
            return
        yield user
        value = user


def _value_and_constant(node: fx.Node) -> tuple[Any, Any]:
    """The operand that depends on the input, and the constant one; None for both if the operation has no such pair."""
    operator = row_of(node)
    for place, name in enumerate(operator.data):
        value, other = node.args[place], node.args[1 - place]
        is_constant = [not isinstance(one, fx.Node) or node_info(one).role is Role.PARAMETER for one in (value, other)]
        if is_constant == [False, True] and name in operator.affine_in:
            return value, other
    return None, None


def _places_behind(program: Program, placeholder: fx.Node, chain: list[fx.Node]) -> list[_Place]:
    """The convolutions that read a normalized input. `_ObstacleError` unless the constants fit their input channels."""
    first = next((node_info(user).operator for user in chain[-1].users), None)
    dimensions = 0 if first is None or first.weight_layout is not WeightLayout.CONVOLUTION else first.spatial
    places = _linear_readers(chain[-1], _ConvolvedChannels(dimensions))
    if not places:
        raise _ObstacleError("no convolution reads it")
    bound = bound_arguments(places[0].node, places[0].operator)
    weight = parameter_value(program.root, bound["weight"])
    channels = weight.shape[1] * bound.get("groups", 1)
    info = node_info(placeholder)
    if info.dtype is not None and not info.dtype.is_floating_point:
        raise _ObstacleError(f"the input has dtype {info.dtype}, which a convolution does not take")
    if info.shape is not None and info.shape[-1 - dimensions] != channels:
        raise _ObstacleError("the input has a different number of channels before its normalization")
    for node in chain:
        constant = _value_and_constant(node)[1]
        if isinstance(constant, fx.Node):
            shape = tuple(parameter_value(program.root, constant).shape)
            most = dimensions + 2 if info.shape is None else len(info.shape)
            _check_constant(node, shape, (channels, *[1] * dimensions), most)
    return places


def _check_constant(node: fx.Node, shape: tuple[int, ...], per_channel: tuple[int, ...], most: int) -> None:
    """Raise `_ObstacleError` unless a constant of this shape is one value or one per channel, in at most `most` dimensions."""
    alike = all(size == 1 for size in shape)
    fits = shape[-len(per_channel) :] == per_channel and all(size == 1 for size in shape[: -len(per_channel)])
    if not (alike or fits) or len(shape) > most:
        raise _ObstacleError(
            f"the constant of {node_info(node).name} has shape {shape}, which is not one value for each channel"
        )


def parameter_value(root: nn.Module, node: fx.Node) -> Any:
    """The value of a node that depends only on parameters."""
    if node.op == "get_attr":
        return attribute_of(node, root)
    assert node.op == "call_function" and callable(node.target)
    args, kwargs = map_arguments(
        (node.args, node.kwargs), lambda leaf: parameter_value(root, leaf) if isinstance(leaf, fx.Node) else leaf
    )
    with torch.no_grad():
        return node.target(*args, **kwargs)


class MergeLayerNorm(GraphPass):
    """Merge the weight and bias of each layer norm into the dense layers that read it. Only the normalization remains."""

    name = "merge_layer_norm"
    stage = "canonize"
    requires = (CANONICAL, OUT_OF_PLACE)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            info = node_info(node)
            operator = info.operator
            if operator is None or not operator.scales_features or info.role is not Role.DATA:
                continue
            bound = bound_arguments(node, operator)
            weight, bias = bound.get("weight"), bound.get("bias")
            try:
                if weight is None:
                    raise _ObstacleError("it has no weight")
                if len(bound["normalized_shape"]) != 1:
                    raise _ObstacleError("it normalizes more than the last dimension")
                places = _linear_readers(node, _LastDimension(program))
                if not places:
                    raise _ObstacleError("no dense layer reads it")
            except _ObstacleError as obstacle:
                result.reasons.append((info.name, str(obstacle)))
                continue
            _Merger(program, places, (f"{info.name}.weight",), info.source).merge(weight, bias)
            node.kwargs = {name: value for name, value in node.kwargs.items() if name not in ("weight", "bias")}
            names = ", ".join(node_info(place.node).name for place in places)
            result.details.append((info.name, f"weight and bias merged into {names}"))
            result.matches += 1
        return result


def _keeps_last_dimension(node: fx.Node, operator: Operator) -> bool:
    """Whether an operation is known to keep the last dimension unchanged."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or node_info(node).shape is None or operator.keeps_last_dimension is None:
        return False
    shape = node_info(source).shape
    return shape is not None and operator.keeps_last_dimension(node.args[1:], len(shape))

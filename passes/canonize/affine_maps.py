"""Affine maps per channel: which linear layers they can be merged into, and how, as arithmetic on parameters.

A map x -> scale * x + shift per channel before a linear layer becomes W' = W * scale along the input channels and
b' = b + W shift. If the layer pads with zeros, the shift does not apply to the padding. The bias then depends on the position:
it is the layer's output for the shift alone. Operations between the two must commute with an affine map per channel. A
`Layout` tracks the position of the channels. If the merge is not provably correct, the map stays, and the pass says why.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import NodeInfo, Role, node_info, readers, row_of, update_info
from lrpfx.ir.operator import Channels, NotAffineError, Operator, WeightLayout
from lrpfx.operators import functions
from lrpfx.operators.channels import UNKNOWN_RANK, pads
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.table import operator_named
from lrpfx.passes.canonize.channel_places import Order, in_order, keeps_entries
from lrpfx.passes.canonize.merge_batch_norm import move_up
from lrpfx.passes.program import Program, insert_call

# --- arithmetic on parameters ----------------------------------------------------------------------------------------------


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
    name = f"conv{input.ndim - 2}d"
    convolution: Callable[..., torch.Tensor] = (
        getattr(functions, f"padded_{name}") if "amounts" in options else getattr(torch, name)
    )
    return convolution(constant, weight, bias, **options)


def as_channels(value: torch.Tensor, channels: int, order: Order = None) -> torch.Tensor:
    """A constant per channel, of a shape such as (channels, 1, 1), or a single constant, in the shape (channels,)."""
    if value.numel() == 1:
        return value.reshape(-1).expand(channels)
    return value.reshape(channels) if order is None else in_order(value, order)


def constant_channels(weight: torch.Tensor, channels: int, value: float) -> torch.Tensor:
    """The same number for each channel, in the dtype of a weight. Shape (channels,)."""
    return torch.full((channels,), value, dtype=weight.dtype, device=weight.device)


def _scaled_constant(constant: Any, factor: Any) -> Any:
    return constant * factor


def value_and_constant(node: fx.Node) -> tuple[Any, Any]:
    """The operand of an affine operation that depends on the input, and the constant one, which is None if there is none.

    None for both if the operation is not such a sum, product or quotient.
    """
    operator = node_info(node).operator
    alpha = node.kwargs.get("alpha", 1)
    if operator is None or not operator.merging.affine_in or set(node.kwargs) - {"alpha"} or isinstance(alpha, fx.Node):
        return None, None
    if len(operator.data) == 1:
        return node.args[0], None
    if len(node.args) != 2:
        return None, None
    for place, name in enumerate(operator.data):
        value, other = node.args[place], node.args[1 - place]
        is_constant = [not isinstance(one, fx.Node) or node_info(one).role is Role.PARAMETER for one in (value, other)]
        if is_constant == [False, True] and name in operator.merging.affine_in:
            return value, other
    return None, None


# --- where an affine map can go ----------------------------------------------------------------------------------------------


class ObstacleError(Exception):
    """The reason why a map cannot be merged."""


@dataclass(frozen=True)
class Place:
    """A linear layer that reads the scaled and shifted values."""

    node: fx.Node
    operator: Operator

    @property
    def is_dense(self) -> bool:
        return self.operator.linear.weight_layout is WeightLayout.DENSE


class Layout(ABC):
    """The position of the entries of a value that have the same scale and shift."""

    @abstractmethod
    def behind(self, node: fx.Node, operator: Operator) -> "Layout":
        """The layout of an operation's result; `ObstacleError` if the operation does not commute with the map."""

    @abstractmethod
    def check_reader(self, place: Place) -> None:
        """Raise `ObstacleError` unless these entries are the input channels or features of the linear layer."""


def _obstacle(node: fx.Node, why: str = "") -> ObstacleError:
    info = node_info(node)
    because = f": {why}" if why else ""
    return ObstacleError(f"{info.name} ({info.operator}) reads it and does not commute with an affine map{because}")


@dataclass(frozen=True)
class ChannelLayout(Layout):
    """Channels in the second dimension, or flattened into features."""

    channels: Channels

    def behind(self, node: fx.Node, operator: Operator) -> Layout:
        if operator.merging.channels is None:
            raise _obstacle(node, "its channels are flattened" if self.channels.flat else "")
        try:
            return ChannelLayout(operator.merging.channels(self.channels, bound_arguments(node, operator)))
        except NotAffineError as reason:
            raise _obstacle(node, str(reason)) from None

    def check_reader(self, place: Place) -> None:
        name, dense, dimensions = node_info(place.node).name, place.is_dense, self.channels.dimensions
        if self.channels.flat and dense:
            return
        if dimensions is None and dense:
            raise ObstacleError("a dense layer reads it, and its channels may not be the last dimension; pass example_inputs")
        if dimensions is None:
            raise ObstacleError(f"{name} reads it, and {UNKNOWN_RANK}")
        if dimensions != place.operator.rank_of_batch:
            reads = "the last dimension" if dense else "the first as channels"
            raise ObstacleError(f"{name} reads {reads}, but its channels are the second of {dimensions} dimensions")


@dataclass(frozen=True)
class LastDimension(Layout):
    """The entries lie along the last dimension."""

    program: Program

    def behind(self, node: fx.Node, operator: Operator) -> Layout:
        if not _keeps_last_dimension(node, operator):
            raise _obstacle(node)
        self.program.fixed_dimensions = True
        return self

    def check_reader(self, place: Place) -> None:
        if not place.is_dense:
            raise ObstacleError("a layer other than a dense layer reads it")


@dataclass(frozen=True)
class ConvolvedChannels(Layout):
    """The entries are the channels of convolutions over `dimensions` dimensions."""

    dimensions: int

    def behind(self, node: fx.Node, operator: Operator) -> Layout:
        raise _obstacle(node)

    def check_reader(self, place: Place) -> None:
        if place.is_dense or place.operator.dimensions.spatial != self.dimensions:
            raise ObstacleError(f"a layer other than a convolution over {self.dimensions} dimensions reads it")


def linear_readers(value: fx.Node, layout: Layout) -> list[Place]:
    """The linear layers that read `value`, directly or through other operations. `ObstacleError` if others read its values."""
    found: list[Place] = []
    for user in readers(value):
        info = node_info(user)
        operator = info.operator
        name = info.name or "the output of the model"
        if operator is None or user.op == "output":
            raise ObstacleError(
                "it is an output of the model" if user.op == "output" else f"{name} reads it and is not a linear layer"
            )
        if operator.weighs_channels:
            bound = bound_arguments(user, operator)
            weights = [bound.get("weight"), bound.get("bias")]
            if bound["input"] is not value or value in weights:
                raise ObstacleError(f"{name} takes it as a parameter")
            if any(isinstance(weight, fx.Node) and node_info(weight).role is not Role.PARAMETER for weight in weights):
                raise ObstacleError(f"a parameter of {name} depends on the input")
            if operator.linear.weight_layout is WeightLayout.CONVOLUTION and not operator.linear.with_bias_map:
                raise _obstacle(user, "it has no form with a bias for each position")
            place = Place(user, operator)
            layout.check_reader(place)
            found.append(place)
        elif user.all_input_nodes == [value] or _moves_places(user, layout):
            found += linear_readers(user, layout if keeps_entries(user) else layout.behind(user, operator))
        else:
            raise _obstacle(user)
    return found


def _moves_places(node: fx.Node, layout: Layout) -> bool:
    """Whether a call resizes, pools or pads by sizes that only a run knows, which facts about channels do not depend on."""
    others = node.all_input_nodes[1:]
    return isinstance(layout, ChannelLayout) and all(node_info(one).role is Role.METADATA for one in others)


class Merger:
    """Merges a scale and a shift into linear layers."""

    def __init__(self, program: Program, places: list[Place], names: tuple[str, ...], source: str) -> None:
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

    def composed(
        self, node: fx.Node, scale: Any, shift: Any, channels: Any, before: fx.Node | None = None, order: Order = None
    ) -> tuple[Any, Any]:
        """The scale and shift of a map that is followed by the affine operation `node`, with its constant for each channel.

        They are computed before the node, or before another. `order`: which entry of the constant is that of each channel.
        """
        value, constant = value_and_constant(node)
        before = node if before is None else before
        operator, name = row_of(node), node_info(node).name
        if isinstance(constant, fx.Node):
            given = (constant, channels) if order is None else (constant, channels, order)
            constant = self.derive(before, f"{name}.constant", as_channels, *given)
        if operator.merging.coefficients is None:  # a product or quotient
            of_scale = self.derive(before, f"{name}.scale", operator.canonical, scale, constant)
            return of_scale, self.derive(before, f"{name}.shift", operator.canonical, shift, constant)
        factors = operator.merging.coefficients(node.kwargs.get("alpha", 1))
        of_value, of_constant = factors if node.args[0] is value else reversed(factors)
        if of_value != 1:
            scale = self.derive(before, f"{name}.scale", torch.mul, scale, of_value)
            shift = self.derive(before, f"{name}.shift", torch.mul, shift, of_value)
        if constant is None:
            return scale, shift
        if of_constant != 1:
            constant = self.derive(before, f"{name}.scaled", _scaled_constant, constant, of_constant)
        return scale, self.derive(before, f"{name}.sum", torch.add, shift, constant)

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

    def _merge_convolution(self, place: Place, scale: fx.Node, shift: fx.Node | None) -> None:
        node, info = place.node, node_info(place.node)
        bound = bound_arguments(node, place.operator)
        weight, bias, groups = bound["weight"], bound.get("bias"), bound.get("groups", 1)
        scaled = self.derive(node, f"{info.name}.merged_weight", scale_input_channels, weight, scale, groups)
        options = {name: value for name, value in bound.items() if name not in place.operator.tensors}
        if shift is None:
            pass
        elif not pads(bound.get("padding", 0)) and not bound.get("amounts"):
            bias = self.derive(node, f"{info.name}.merged_bias", bias_of_channels, weight, bias, shift, groups)
        else:
            args = (bound["input"], shift, weight, bias, options)
            bias = self.derive(node, f"{info.name}.bias_map", bias_map, *args, role=Role.METADATA)
            mapped = operator_named(place.operator.linear.with_bias_map)
            node.target = mapped.canonical
            update_info(node, operator=mapped)
        node.args = (node.args[0], scaled, *([] if bias is None else [bias]))
        node.kwargs = options


def _keeps_last_dimension(node: fx.Node, operator: Operator) -> bool:
    """Whether an operation is known to keep the last dimension unchanged."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or node_info(node).shape is None or operator.dimensions.keeps_last_dimension is None:
        return False
    shape = node_info(source).shape
    return shape is not None and operator.dimensions.keeps_last_dimension(node.args[1:], len(shape))

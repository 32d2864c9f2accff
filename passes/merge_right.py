"""CANONIZE: affine maps merged into the linear layers behind them, as arithmetic on parameters.

A map x -> scale * x + shift per channel in front of a linear layer becomes W' = W * scale along the input channels and
b' = b + W shift. Where the layer pads with zeros, which the shift does not reach, the bias depends on the position: it is what
the layer makes of the shift alone. Between the two there may be operations that commute with an affine map per channel.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lrpfx.functions import thresholded_relu
from lrpfx.layer_view import bound_arguments
from lrpfx.node import NodeInfo, Role, calls, node_info, update_info
from lrpfx.operators import Operator, operator_named
from lrpfx.types import AvgPool, BatchNorm, Product, Sum

from .merge_batch_norm import batch_norm_scale, is_matrix, move_up
from .program import Pass, PassResult, Program, insert_call

# --- arithmetic on parameters ----------------------------------------------------------------------------------------------


def batch_norm_shift(running_mean: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What a batch norm adds to each channel after scaling it. Shape (channels,)."""
    shift = -running_mean * scale
    return shift if bias is None else bias + shift


def shift_behind_threshold(scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The shift that goes with a thresholded ReLU; a channel that is scaled by 0 is the constant relu(shift)."""
    return torch.where(scale == 0, shift.relu(), shift)


def scale_input_channels(weight: torch.Tensor, scale: torch.Tensor, groups: int) -> torch.Tensor:
    """A convolution's weight (out, in / groups, ...) with each input channel scaled."""
    factors = scale.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
    return torch.flatten(weight.unflatten(0, (groups, -1)) * factors, 0, 1)


def scale_features(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A dense weight (out, in) with each input feature scaled; a channel may stand for several features in a row."""
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
    """What a convolution makes of the shift alone on an input of this size: zeros in its padding stay zeros.

    Shape (1, channels, ...).
    """
    constant = shift.reshape(1, -1, *[1] * (input.ndim - 2)).expand(1, -1, *input.shape[2:])
    convolution: Callable[..., torch.Tensor] = (torch.conv1d, torch.conv2d, torch.conv3d)[input.ndim - 3]
    return convolution(constant, weight, bias, **options)


def as_channels(value: torch.Tensor, channels: int) -> torch.Tensor:
    """A constant per channel, of a shape like (channels, 1, 1), or a single one. Shape (channels,)."""
    return value.reshape(-1).expand(channels) if value.numel() == 1 else value.reshape(channels)


# --- where an affine map can go ----------------------------------------------------------------------------------------------


class _ObstacleError(Exception):
    """Why a map cannot be merged."""


@dataclass(frozen=True)
class _Place:
    """A linear layer that reads the shifted values."""

    node: fx.Node
    operator: Operator


def _linear_readers(value: fx.Node, passes: Callable[[fx.Node], bool]) -> list[_Place]:
    """The linear layers that read `value`, through operations that `passes` allows. `_ObstacleError` where others read it."""
    found: list[_Place] = []
    for user in value.users:
        info = node_info(user)
        operator = operator_named(info.operator)
        name = info.name or "the output of the model"
        if operator is None or user.op == "output":
            raise _ObstacleError(
                "it is an output of the model" if user.op == "output" else f"{name} reads it, which is no linear layer"
            )
        if operator.name == "linear" or operator.name in ("conv1d", "conv2d", "conv3d"):
            bound = bound_arguments(user, operator)
            weights = [bound.get("weight"), bound.get("bias")]
            if bound["input"] is not value or value in weights:
                raise _ObstacleError(f"{name} takes it as a parameter")
            if any(isinstance(weight, fx.Node) and node_info(weight).role is not Role.PARAMETER for weight in weights):
                raise _ObstacleError(f"a parameter of {name} depends on the input")
            found.append(_Place(user, operator))
        elif passes(user):
            found += _linear_readers(user, passes)
        else:
            raise _ObstacleError(f"{name} ({operator.name}) reads it, which an affine map does not pass through")
    return found


def _commutes_per_channel(node: fx.Node) -> bool:
    """Whether an operation on (batch, channels, ...) gives the same before and after an affine map of the channels."""
    operator = operator_named(node_info(node).operator)
    assert operator is not None
    bound = bound_arguments(node, operator)
    if issubclass(operator.kind, AvgPool) and operator.name != "mean":
        padding = bound.get("padding", 0)
        padded = any(padding) if isinstance(padding, (tuple, list)) else padding
        return bool(not padded or bound.get("count_include_pad") is False)
    if operator.name == "mean":
        dims = bound.get("dim")
        return isinstance(dims, (tuple, list)) and all(isinstance(dim, int) and dim >= 2 for dim in dims)
    if operator.name == "flatten":
        return bool(bound.get("start_dim", 0) == 1 and bound.get("end_dim", -1) == -1)
    if operator.name == "pad":
        return bool(bound.get("mode", "constant") != "constant")
    return operator.name == "require_matrix"


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
            if place.operator.name == "linear":
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
        elif not _pads(bound.get("padding", 0)):
            bias = self.derive(node, f"{info.name}.merged_bias", bias_of_channels, weight, bias, shift, groups)
        else:
            args = (bound["input"], shift, weight, bias, options)
            bias = self.derive(node, f"{info.name}.bias_map", bias_map, *args, role=Role.METADATA)
            mapped = operator_named(f"{place.operator.name}_with_bias_map")
            assert mapped is not None and mapped.function is not None
            node.target = mapped.function
            update_info(node, operator=mapped.name)
        node.args = (node.args[0], scaled, *([] if bias is None else [bias]))
        node.kwargs = options


def _pads(padding: Any) -> bool:
    if isinstance(padding, str):
        return padding != "valid"
    return any(padding) if isinstance(padding, (tuple, list)) else bool(padding)


# --- passes ---------------------------------------------------------------------------------------------------------------


class MergeBatchNormRight(Pass):
    """Merge each batch norm that is left into all linear layers that read it, directly or behind a ReLU.

    Behind a ReLU, relu(a x + c) = a T(x) + c with the thresholded ReLU T(x) = x if a x + c > 0 else -c / a.
    """

    name = "merge_batch_norm_right"
    stage = "canonize"

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            operator = operator_named(node_info(node).operator)
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
        relu = users[0] if len(users) == 1 and node_info(users[0]).operator == "relu" else None
        start = node if relu is None else relu
        places = _linear_readers(start, _commutes_per_channel)
        if not places:
            raise _ObstacleError("no linear layer reads it")
        dense = [place.node for place in places if place.operator.name == "linear"]
        if any(reader.args[0] is start for reader in dense) and not is_matrix(start):
            raise _ObstacleError("a dense layer reads it, and its channels may not be the last dimension; pass example_inputs")
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
            update_info(relu, operator="thresholded_relu", description=description, merged=merged)
        program.graph.erase_node(node)
        behind = "" if relu is None else f" behind the thresholded {node_info(relu).name}"
        return ", ".join(node_info(place.node).name for place in places) + behind


class MergeInputNormalization(Pass):
    """Merge the normalization of the model's input, such as (x - mean) / std with constants, into the layers that read it."""

    name = "merge_input_normalization"
    stage = "canonize"

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for placeholder in [node for node in program.graph.nodes if node.op == "placeholder"]:
            chain = list(_affine_chain(placeholder))
            if not chain:
                result.reasons.append((node_info(placeholder).name, "no constant is added to it or multiplied with it"))
                continue
            try:
                places = _linear_readers(chain[-1], lambda node: False)
                if any(place.operator.name == "linear" for place in places) or not places:
                    raise _ObstacleError("what reads it is not only convolutions")
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
            constant: Any = next(argument for argument in node.args if argument is not placeholder and argument not in chain)
            if isinstance(constant, fx.Node):
                constant = merger.derive(node, f"{node_info(node).name}.constant", as_channels, constant, counts)
            operator = node_info(node).operator
            assert operator is not None
            factors, terms = _ARITHMETIC[operator]
            name = node_info(node).name
            alpha: Any = node.kwargs.get("alpha", 1)
            if factors is not None:
                scale = merger.derive(node, f"{name}.scale", factors, scale, constant)
                shift = merger.derive(node, f"{name}.shift", factors, shift, constant)
            elif operator == "rsub":  # constant - alpha * x
                scale = merger.derive(node, f"{name}.scale", torch.mul, scale, -alpha)
                shift = merger.derive(node, f"{name}.shift", torch.mul, shift, -alpha)
                shift = merger.derive(node, f"{name}.shift_1", torch.add, shift, constant)
            else:
                assert terms is not None
                if alpha != 1:
                    constant = merger.derive(node, f"{name}.scaled", _scaled_constant, constant, alpha)
                shift = merger.derive(node, f"{name}.shift", terms, shift, constant)
        merger.merge(scale, shift)


def _channels(weight: torch.Tensor, groups: int) -> int:
    return weight.shape[1] * groups


def _constant_channels(weight: torch.Tensor, channels: int, value: float) -> torch.Tensor:
    return torch.full((channels,), value, dtype=weight.dtype, device=weight.device)


def _scaled_constant(constant: Any, factor: Any) -> Any:
    return constant * factor


#: What an operation with a constant does to scale and shift: a function of either and the constant, or of the shift alone.
_ARITHMETIC: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {
    "mul": (torch.mul, None),
    "div": (torch.div, None),
    "add": (None, torch.add),
    "sub": (None, torch.sub),
    "rsub": (None, None),
}


def _affine_chain(value: fx.Node) -> Iterator[fx.Node]:
    """The operations with constants that an input goes through, one after the other."""
    while len(value.users) == 1:
        (user,) = value.users
        operator = operator_named(node_info(user).operator)
        if operator is None or operator.name not in _ARITHMETIC or not issubclass(operator.kind, (Sum, Product)):
            return
        others = [argument for argument in user.args if argument is not value]
        constants = [a for a in others if not isinstance(a, fx.Node) or node_info(a).role is Role.PARAMETER]
        if len(others) != 1 or len(constants) != 1 or (operator.name == "div" and user.args[0] is not value):
            return
        yield user
        value = user


class MergeLayerNorm(Pass):
    """Merge the weight and bias of each layer norm into the dense layers that read it, so that the norm alone is left."""

    name = "merge_layer_norm"
    stage = "canonize"

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            info = node_info(node)
            if info.operator != "layer_norm" or info.role is not Role.DATA:
                continue
            operator = operator_named("layer_norm")
            assert operator is not None
            bound = bound_arguments(node, operator)
            weight, bias = bound.get("weight"), bound.get("bias")
            try:
                if weight is None:
                    raise _ObstacleError("it has no weight")
                if len(bound["normalized_shape"]) != 1:
                    raise _ObstacleError("it normalizes more than the last dimension")
                places = _linear_readers(node, _keeps_last_dimension)
                if not places or any(place.operator.name != "linear" for place in places):
                    raise _ObstacleError("not only dense layers read it")
            except _ObstacleError as obstacle:
                result.reasons.append((info.name, str(obstacle)))
                continue
            _Merger(program, places, (f"{info.name}.weight",), info.source).merge(weight, bias)
            node.kwargs = {name: value for name, value in node.kwargs.items() if name not in ("weight", "bias")}
            names = ", ".join(node_info(place.node).name for place in places)
            result.details.append((info.name, f"weight and bias merged into {names}"))
            result.matches += 1
        return result


def _keeps_last_dimension(node: fx.Node) -> bool:
    """Whether an operation is known to leave the last dimension as it is."""
    info, source = node_info(node), node.args[0]
    if not isinstance(source, fx.Node) or node_info(source).shape is None or info.shape is None:
        return False
    dimensions = len(node_info(source).shape or ())
    if info.operator in ("transpose",) and len(node.args) == 3:
        return all(isinstance(dim, int) and dim % dimensions != dimensions - 1 for dim in node.args[1:])
    if info.operator == "select":
        return isinstance(node.args[1], int) and node.args[1] % dimensions != dimensions - 1
    if info.operator == "slice":
        dim = node.args[1] if len(node.args) > 1 else 0
        return isinstance(dim, int) and dim % dimensions != dimensions - 1
    if info.operator == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        plain = all(isinstance(part, (int, slice)) for part in index)
        return bool(plain and len(index) < dimensions)
    return info.operator in ("clone", "contiguous")

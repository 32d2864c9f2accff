"""Merge a normalization of the input into the first convolutions."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import node_info, only_reader, parameter_value, readers
from lrpfx.ir.operator import WeightLayout
from lrpfx.operators.layer import bound_arguments
from lrpfx.passes.canonize.affine_maps import (
    ConvolvedChannels,
    Merger,
    ObstacleError,
    Place,
    constant_channels,
    linear_readers,
    value_and_constant,
)
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE


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
            except ObstacleError as obstacle:
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

    def _merge(self, program: Program, placeholder: fx.Node, chain: list[fx.Node], places: list[Place]) -> None:
        info = node_info(chain[0])
        merger = Merger(program, places, tuple(node_info(node).name for node in chain), info.source)
        first = bound_arguments(places[0].node, places[0].operator)
        counts = merger.derive(chain[0], f"{info.name}.channels", _channels, first["weight"], first.get("groups", 1))
        scale: Any = merger.derive(chain[0], f"{info.name}.scale", constant_channels, first["weight"], counts, 1.0)
        shift: Any = merger.derive(chain[0], f"{info.name}.shift", constant_channels, first["weight"], counts, 0.0)
        for node in chain:
            scale, shift = merger.composed(node, scale, shift, counts)
        merger.merge(scale, shift)


def _channels(weight: torch.Tensor, groups: int) -> int:
    return weight.shape[1] * groups


def _affine_chain(value: fx.Node) -> Iterator[fx.Node]:
    """The chain of affine operations with constants that starts at an input."""
    while (user := only_reader(value)) is not None:
        if value_and_constant(user)[0] is not value:
            return
        yield user
        value = user


def _places_behind(program: Program, placeholder: fx.Node, chain: list[fx.Node]) -> list[Place]:
    """The convolutions that read a normalized input. `ObstacleError` unless the constants fit their input channels."""
    first = next((node_info(user).operator for user in readers(chain[-1])), None)
    dimensions = 0 if first is None or first.linear.weight_layout is not WeightLayout.CONVOLUTION else first.dimensions.spatial
    places = linear_readers(chain[-1], ConvolvedChannels(dimensions))
    if not places:
        raise ObstacleError("no convolution reads it")
    bound = bound_arguments(places[0].node, places[0].operator)
    weight = parameter_value(bound["weight"], program.root)
    channels = weight.shape[1] * bound.get("groups", 1)
    info = node_info(placeholder)
    if info.dtype is not None and not info.dtype.is_floating_point:
        raise ObstacleError(f"the input has dtype {info.dtype}, which a convolution does not take")
    if info.shape is not None and info.shape[-1 - dimensions] != channels:
        raise ObstacleError("the input has a different number of channels before its normalization")
    for node in chain:
        constant = value_and_constant(node)[1]
        if isinstance(constant, fx.Node):
            shape = tuple(parameter_value(constant, program.root).shape)
            most = dimensions + 2 if info.shape is None else len(info.shape)
            _check_constant(node, shape, (channels, *[1] * dimensions), most)
    return places


def _check_constant(node: fx.Node, shape: tuple[int, ...], per_channel: tuple[int, ...], most: int) -> None:
    """Raise `ObstacleError` unless a constant of this shape is one value or one per channel, in at most `most` dimensions."""
    alike = all(size == 1 for size in shape)
    fits = shape[-len(per_channel) :] == per_channel and all(size == 1 for size in shape[: -len(per_channel)])
    if not (alike or fits) or len(shape) > most:
        raise ObstacleError(
            f"the constant of {node_info(node).name} has shape {shape}, which is not one value for each channel"
        )

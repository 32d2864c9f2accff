"""Merge batch norms into the linear layers after them."""

import torch
from torch import fx

from lrpfx.ir.kinds import BatchNorm
from lrpfx.ir.node import Role, calls, node_info, only_reader, update_info
from lrpfx.ir.operator import Channels, Operator
from lrpfx.operators.functions import thresholded_relu
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.table import operator_named
from lrpfx.passes.canonize.affine_maps import ChannelLayout, Merger, ObstacleError, linear_readers
from lrpfx.passes.canonize.channel_places import keeps_entries
from lrpfx.passes.canonize.merge_batch_norm import batch_norm_scale, dimensions_of, has_batch_norm
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE


def batch_norm_shift(running_mean: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The value that a batch norm adds to each channel after scaling it. Shape (channels,)."""
    shift = -running_mean * scale
    return shift if bias is None else bias + shift


def shift_behind_threshold(scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The shift after a thresholded ReLU. A channel with scale 0 is the constant relu(shift)."""
    return torch.where(scale == 0, shift.relu(), shift)


class MergeBatchNormRight(GraphPass):
    """Merge each remaining batch norm into all linear layers that read it, directly or after a ReLU, or a copy of either.

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
            except ObstacleError as obstacle:
                result.reasons.append((name, str(obstacle)))
            else:
                result.details.append((name, f"merged into {into}"))
                result.matches += 1
        return result

    def _merge(self, program: Program, node: fx.Node, operator: Operator) -> str:
        bound, info = bound_arguments(node, operator), node_info(node)
        if any(isinstance(value, fx.Node) and node_info(value).role is not Role.PARAMETER for value in node.args[1:]):
            raise ObstacleError("a weight or statistic depends on the model's input")
        reader = only_reader(node)
        while reader is not None and keeps_entries(reader):
            reader = only_reader(reader)
        relu = reader if reader is not None and _is_positive_part(reader) else None
        places = linear_readers(node if relu is None else relu, ChannelLayout(Channels(dimensions_of(program, node))))
        if not places:
            raise ObstacleError("no linear layer reads it")
        merger = Merger(program, places, (info.name,), info.source)
        eps = bound.get("eps", operator.arguments["eps"])
        variance, mean, weight, bias = (bound.get(name) for name in ("running_var", "running_mean", "weight", "bias"))
        scale = merger.derive(node, f"{info.name}.scale", batch_norm_scale, variance, weight, eps)
        shift = merger.derive(node, f"{info.name}.shift", batch_norm_shift, mean, scale, bias)
        if relu is None:
            merger.merge(scale, shift)
        else:
            merger.merge(
                scale, merger.derive(node, f"{info.name}.shift_behind_threshold", shift_behind_threshold, scale, shift)
            )
            relu.target, relu.args = thresholded_relu, (relu.args[0], scale, shift)
            description = f"thresholded {node_info(relu).description}"
            merged = (*node_info(relu).merged, info.name)
            update_info(relu, operator=operator_named("thresholded_relu"), description=description, merged=merged)
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        program.graph.erase_node(node)
        behind = "" if relu is None else f" after the thresholded {node_info(relu).name}"
        return ", ".join(node_info(place.node).name for place in places) + behind


def _is_positive_part(node: fx.Node) -> bool:
    operator = node_info(node).operator
    return operator is not None and operator.values.positive_part

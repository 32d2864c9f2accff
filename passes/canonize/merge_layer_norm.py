"""Merge weights and biases of layer norms into the dense layers after them."""

from lrpfx.ir.node import Role, calls, node_info
from lrpfx.operators.layer import bound_arguments
from lrpfx.passes.canonize.affine_maps import LastDimension, Merger, ObstacleError, linear_readers
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE


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
            if operator is None or not operator.merging.scales_features or info.role is not Role.DATA:
                continue
            bound = bound_arguments(node, operator)
            weight, bias = bound.get("weight"), bound.get("bias")
            try:
                if weight is None:
                    raise ObstacleError("it has no weight")
                if len(bound["normalized_shape"]) != 1:
                    raise ObstacleError("it normalizes more than the last dimension")
                places = linear_readers(node, LastDimension(program))
                if not places:
                    raise ObstacleError("no dense layer reads it")
            except ObstacleError as obstacle:
                result.reasons.append((info.name, str(obstacle)))
                continue
            Merger(program, places, (f"{info.name}.weight",), info.source).merge(weight, bias)
            node.kwargs = {name: value for name, value in node.kwargs.items() if name not in ("weight", "bias")}
            names = ", ".join(node_info(place.node).name for place in places)
            result.details.append((info.name, f"weight and bias merged into {names}"))
            result.matches += 1
        return result

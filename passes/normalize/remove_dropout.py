"""NORMALIZE: remove dropout, which is the identity in evaluation mode, and reject operations in training mode."""

from torch import fx

from lrpfx.errors import CaptureError
from lrpfx.ir.kinds import BatchNorm, Dropout
from lrpfx.ir.node import Role, calls, node_info
from lrpfx.operators.layer import bound_arguments
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, DETERMINISTIC


class RemoveDropout(GraphPass):
    """Remove dropout. `CaptureError` for dropout, randomized activations and batch norm in training mode."""

    name = "remove_dropout"
    stage = "normalize"
    requires = (CANONICAL,)
    ensures = (DETERMINISTIC,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            operator = node_info(node).operator
            if operator is None or "training" not in operator.arguments:
                continue
            if node_info(node).role is Role.PARAMETER:  # the statistics of a weight, as in weight standardization
                continue
            if bound_arguments(node, operator).get("training", operator.arguments["training"]):
                raise CaptureError(_complaint(node), topic="training-mode")
            if issubclass(operator.kind, Dropout):
                assert isinstance(node.args[0], fx.Node)
                node.replace_all_uses_with(node.args[0])
                program.graph.erase_node(node)
                result.matches += 1
        return result


def _complaint(node: fx.Node) -> str:
    info = node_info(node)
    batch_norm = info.operator is not None and issubclass(info.operator.kind, BatchNorm)
    if batch_norm and not any(isinstance(argument, fx.Node) for argument in node.args[1:3]):
        return (
            f"{info.name} ({info.source}) normalizes with the statistics of the batch, so one sample's explanation "
            "would depend on the other samples. Use a batch norm with running statistics (track_running_stats=True)."
        )
    return f"{info.name} ({info.source}): {info.operator} is in training mode. Call model.eval() before lrpfx.transform."

"""Facts from tracing an unchanged model: the execution order of its modules, and mergeable batch norms."""

from torch import nn

from lrpfx.errors import LrpfxError
from lrpfx.frontends.symbolic import capture_copy
from lrpfx.ir.node import calls_before_output, data_calls, node_info
from lrpfx.passes.canonize.merge_batch_norm import MergeBatchNormLeft
from lrpfx.passes.driver import run_passes
from lrpfx.passes.program import Program
from lrpfx.passes.stages import Settings, Stage, passes_of
from lrpfx.support.modules import private_copy


def traced(model: nn.Module) -> Program | None:
    """The normalized graph of `model` in evaluation mode, or None if it cannot be traced."""
    try:
        program = capture_copy(private_copy(model).eval())
        run_passes(program, passes_of(Settings(), Stage.NORMALIZE))
    except LrpfxError:
        return None
    return program


def modules_in_order_of_execution(model: nn.Module) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
    """`model.named_modules()` in two parts: layers that get relevance, in the order of their first call, and all others.

    If the model cannot be traced, all count as layers that run, in the order of registration.
    """
    modules = dict(model.named_modules())
    program = traced(model)
    if program is None:
        return list(modules.items()), []
    paths = [node_info(node).module_path for node in calls_before_output(program.graph)]
    called = [path for path in dict.fromkeys(paths) if path is not None and path in modules]
    others = [item for item in modules.items() if item[0] not in set(called)]
    return [(path, modules[path]) for path in called], others


def mergeable_batch_norms(model: nn.Module) -> list[tuple[str, str]] | None:
    """Names of (linear layer, batch norm) pairs that can be merged, or None if the model cannot be traced."""
    program = traced(model)
    if program is None:
        return None
    MergeBatchNormLeft().run(program)
    pairs = []
    for node in data_calls(program.graph):
        info = node_info(node)
        if info.module_path is not None:
            pairs += [(info.module_path, merged) for merged in info.merged]
    return pairs

"""The values of the nodes of an explainable module."""

from typing import Any

import torch
from torch import fx

from lrpfx.attribution.arguments import Arguments, Inputs, misfits
from lrpfx.attribution.infinite_masks import bound_inputs
from lrpfx.runtime.explain_module import ExplainModule


def node_values(module: ExplainModule, inputs: Inputs, graph: fx.Graph | None = None) -> dict[fx.Node, Any]:
    """The values of all nodes of a graph of the module, by default the one that it runs."""
    interpreter = fx.Interpreter(module, garbage_collect_values=False, graph=graph)
    arguments = Arguments(inputs, module)
    arguments.admit(module)
    with torch.no_grad(), misfits(module, arguments):
        arguments.call(lambda *args, **options: interpreter.run(*bound_inputs(interpreter.graph, args, options)))
    return interpreter.env

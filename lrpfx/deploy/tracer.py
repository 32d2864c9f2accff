"""Runs the graph of an explainable module while it is traced."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import has_info, node_info
from lrpfx.runtime.explain_module import executed
from lrpfx.runtime.propagation import origin
from lrpfx.runtime.ruled_operation import Execution


def _take_along(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """`torch.take_along_dim` for any batch size: torch's own fixes the size when it is traced."""
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    dim = dim % input.ndim
    wide = list(torch.broadcast_shapes(*([*one.shape[:dim], 1, *one.shape[dim + 1 :]] for one in (input, indices))))
    wide[dim] = -1
    return input.expand(wide).gather(dim, indices.expand(wide))


#: Functions that torch decomposes in C++ into operators that cannot be exported -> their replacements.
EXPORTABLE: dict[Any, Callable[..., Any]] = {
    torch.take_along_dim: _take_along,
    torch.Tensor.take_along_dim: _take_along,
    torch.ops.aten.take_along_dim.default: _take_along,
}


class Tracer(fx.Interpreter):
    """Runs a module's graph, and notes the node that each operation comes from."""

    def __init__(self, module: fx.GraphModule, several: bool) -> None:
        """`several`: whether several relevances will be propagated."""
        super().__init__(executed(module, Execution(traced=True, several=several)), graph=module.graph)

    def __call__(self, **inputs: Any) -> Any:
        """The results for inputs given by name."""
        placeholders = self.graph.find_nodes(op="placeholder")
        defaults = {str(node.target): node.args[0] for node in placeholders if node.args}
        return self.run(*({**defaults, **inputs}.get(str(node.target)) for node in placeholders))

    def run_node(self, n: fx.Node) -> Any:
        self.text = ""
        if n.op.startswith("call") and has_info(n):
            info = node_info(n)
            self.text = info.name if info.rule is None else f"{info.name}: {info.rule}"
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        with origin(self.text):
            return super().call_function(EXPORTABLE.get(target, target), args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        with origin(self.text):
            return super().call_module(target, args, kwargs)

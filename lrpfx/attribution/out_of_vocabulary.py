"""Indices that an embedding does not have: token ids beyond the vocabulary, and positions beyond the longest sequence."""

from typing import Any

import torch
from torch import fx

from lrpfx.attribution.infinite_masks import bound_inputs
from lrpfx.ir.kinds import Embedding
from lrpfx.ir.node import node_info
from lrpfx.operators.table import spelling_of
from lrpfx.runtime.explain_module import TreeGraphModule
from lrpfx.support.interrupts import undisturbed


class OutOfVocabulary(fx.Interpreter):
    """Runs a graph until an embedding is given indices that it does not have. A call describes them, or returns None."""

    def __init__(self, module: TreeGraphModule) -> None:
        super().__init__(module)
        self.problem: str | None = None
        own = [(node_info(node).reference, node) for node in self.graph.nodes]  # by the names of their references
        self._inputs = {name: node for name, node in own if node.op == "placeholder"}
        self._names = {name: node_info(node).name for name, node in own if name}

    def __call__(self, *args: Any, **keywords: Any) -> str | None:
        try:
            with undisturbed(), torch.no_grad():
                self.run(*bound_inputs(self.graph, args, keywords))
        except (RuntimeError, TypeError, ValueError, IndexError):  # the error that is being explained
            return self.problem
        return None

    def run_node(self, n: fx.Node) -> Any:
        spelling = spelling_of(n)
        if spelling is not None and spelling.operator.kind is Embedding:
            bound: dict[str, Any] = dict(zip(spelling.arguments, n.args, strict=False)) | n.kwargs
            weight = self.env[bound["weight"]]
            source = self._inputs.get(node_info(bound["input"]).name, bound["input"])
            indices, of_reference = self.env.get(source), False
            if indices is None or not _outside(indices, weight):
                indices, of_reference = self.env[bound["input"]], source is not bound["input"]
            outside = _outside(indices, weight)
            if outside:
                shown = ", ".join(map(str, outside[:5])) + (", ..." if len(outside) > 5 else "")
                name = self._names.get(node_info(n).name, node_info(n).name)
                what = "indices that forward computes, such as positions of a long sequence,"
                if source.op == "placeholder":
                    what = f"indices of {'the reference of ' if of_reference else ''}the input {str(source.target)!r}"
                valid = f"valid are 0 to {len(weight) - 1}"
                self.problem = f"the embedding {name} has {len(weight)} entries, but the {what} include {shown}: {valid}"
                raise IndexError(self.problem)
        return super().run_node(n)


def _outside(indices: torch.Tensor, weight: torch.Tensor) -> list[int]:
    found: list[int] = indices[(indices < 0) | (indices >= len(weight))].unique().tolist()
    return found

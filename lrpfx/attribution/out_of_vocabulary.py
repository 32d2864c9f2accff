"""Indices that an embedding does not have: token ids beyond the vocabulary, and positions beyond the longest sequence."""

from typing import Any

import torch
from torch import fx

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

    def __call__(self, *args: Any, **keywords: Any) -> str | None:
        placeholders = self.graph.find_nodes(op="placeholder")
        given = dict(zip((str(node.target) for node in placeholders), args, strict=False)) | keywords
        try:
            with undisturbed(), torch.no_grad():
                self.run(*(given.get(str(node.target), *node.args) for node in placeholders))
        except (RuntimeError, TypeError, ValueError, IndexError):  # the error that is being explained
            return self.problem
        return None

    def run_node(self, n: fx.Node) -> Any:
        spelling = spelling_of(n)
        if spelling is not None and spelling.operator.kind is Embedding:
            bound: dict[str, Any] = dict(zip(spelling.arguments, n.args, strict=False)) | n.kwargs
            indices, weight = (self.env[bound[name]] for name in ("input", "weight"))
            outside = indices[(indices < 0) | (indices >= len(weight))].unique().tolist()
            if outside:
                shown = ", ".join(map(str, outside[:5])) + (", ..." if len(outside) > 5 else "")
                name = node_info(n).name
                inputs = self.graph.find_nodes(op="placeholder")
                direct = next((f" of the input {str(node.target)!r}" for node in inputs if node is bound["input"]), "")
                what = f"indices{direct}" if direct else "indices that forward computes, such as positions of a long sequence,"
                self.problem = (
                    f"the embedding {name} has {len(weight)} entries, but the {what} include {shown}: valid are 0 to "
                    f"{len(weight) - 1}"
                )
                raise IndexError(self.problem)
        return super().run_node(n)

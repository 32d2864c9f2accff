"""Replace views by strides that show all of a tensor in order, as torch uses them in pooling to one value, by plain ones.

A view by strides is right for one layout in memory. A value may have another one when the program runs, and runtimes other than
torch have no strides.
"""

from typing import Any

import torch
from torch import fx

from lrpfx.passes.lower.forward_forms import in_order
from lrpfx.passes.program import GraphPass, PassResult, Program

aten = torch.ops.aten


class PlainViews(GraphPass):
    """`as_strided` of a whole tensor becomes `view`. A new tensor that is filled through one is the value copied to it."""

    name = "plain_views"
    stage = "lower"

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        order = {node: number for number, node in enumerate(program.graph.nodes)}
        for copying in [node for node in order if node.target == aten.copy_.default and _fills_new(node)]:
            view: Any = copying.args[0]
            value: Any = copying.args[1]
            for other in list(view.args[0].users):
                if order[other] > order[copying]:
                    other.replace_input_with(view.args[0], value)
            copying.replace_all_uses_with(value)
            program.graph.erase_node(copying)
            result.matches += 1
        for node in program.graph.find_nodes(op="call_function", target=aten.as_strided.default):
            if not _is_plain(node):
                result.reasons.append((node.name, "it does not show all entries in order"))
                continue
            whole: Any = node.args[0]
            if _same_shape(whole, node):
                node.replace_all_uses_with(whole)
            else:
                node.target, node.args = aten.view.default, node.args[:2]
            result.matches += 1
        program.graph.eliminate_dead_code()
        return result


def _is_plain(view: fx.Node) -> bool:
    """Whether a view by strides shows all entries of a tensor in their order."""
    whole: Any = view.args[0].meta["val"]  # type: ignore[union-attr]
    shown: Any = view.meta["val"]
    return in_order(whole) and in_order(shown) and bool(whole.numel() == shown.numel())


def _fills_new(copying: fx.Node) -> bool:
    """Whether a value is copied to all of a new tensor that is read only through plain views afterwards."""
    view: Any = copying.args[0]
    value: Any = copying.args[1]
    if view.target != aten.as_strided.default or view.args[0].target != aten.new_zeros.default or len(view.users) > 1:
        return False
    views = all(user.target == aten.as_strided.default and _is_plain(user) for user in view.args[0].users)
    fits = value.meta["val"].dtype == view.meta["val"].dtype and _same_shape(value, view)
    return views and fits and in_order(value.meta["val"])


def _same_shape(first: fx.Node, second: fx.Node) -> bool:
    return bool(first.meta["val"].shape == second.meta["val"].shape)

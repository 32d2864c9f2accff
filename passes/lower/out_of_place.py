"""Replace in-place operations by out-of-place ones if no other value shares their memory."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.support.torch_internals import OpOverload


class OutOfPlace(GraphPass):
    """`add_(x, y)` becomes `add(x, y)`, and later operations read its result. Unused operations are removed."""

    name = "out_of_place"
    stage = "lower"

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        order = {node: number for number, node in enumerate(program.graph.nodes)}
        for node in order:
            if not is_in_place(node):
                continue
            reason = _obstacle(node)
            if reason:
                result.reasons.append((node.name, reason))
                continue
            changed: Any = node.args[0]
            node.target = _functional(node.target)
            replace_afterwards(changed, node, node, order)
            result.matches += 1
        program.graph.eliminate_dead_code()
        return result


def replace_afterwards(value: fx.Node, write: fx.Node, new: fx.Node, order: Mapping[fx.Node, int]) -> None:
    """Let the readers of `value` after the node `write` read `new`. `order`: the places of nodes."""
    for user in [user for user in value.users if order[user] > order[write]]:
        user.replace_input_with(value, new)


def is_in_place(node: fx.Node) -> bool:
    """Whether an ATen operation overwrites an argument."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _obstacle(node: fx.Node) -> str:
    """The reason why an operation must stay in place, or ""."""
    changed = node.args[0]
    if not isinstance(changed, fx.Node) or not _is_alone(changed):
        return "its argument may share memory with another value"
    if any(_may_share_memory(user) for user in changed.users if user is not node):
        return "another value may share memory with its argument"
    if _functional(node.target) is None:
        return "the operator has no out-of-place form"
    values = (other.meta["val"] for other in node.all_input_nodes)
    if len({value.dtype for value in values if hasattr(value, "dtype")}) > 1:
        return "out of place, the result could have another dtype"
    return ""


def _is_alone(node: fx.Node) -> bool:
    """Whether no other value that is read shares the node's memory: it is new, or the only reader of such a value by a view."""
    if node.target is torch.ops.aten.view.default:
        source: Any = node.args[0]
        return len(source.users) == 1 and _is_alone(source)
    return not _may_share_memory(node)


def _functional(target: Any) -> OpOverload | None:
    """The out-of-place form of an in-place operator, or None."""
    packet = getattr(torch.ops.aten, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
    found: OpOverload | None = getattr(packet, target._overloadname, None)
    return None if found is None or found._schema.is_mutable else found


def _may_share_memory(node: fx.Node) -> bool:
    """Whether the node's value may share memory with another node's value."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):  # one of several results
        node = node.args[0]
    if not isinstance(node.target, OpOverload):
        return True
    return any(result.alias_info is not None and not result.alias_info.is_write for result in node.target._schema.returns)

"""NORMALIZE: find straight-through estimators, such as z + (quantized - z).detach(): a value that stands for another one.

The terms z - z.detach() cancel. What is said of the value is meant for z, so z gets all of its relevance.
"""

import functools
import operator

from torch import fx

from lrpfx.ir.node import NodeInfo, calls, is_call_of, is_data, node_info
from lrpfx.operators.table import operator_named
from lrpfx.passes.constants import mark_constants
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE

#: A term of a sum: its value, its sign, and whether it is detached.
_Term = tuple[fx.Node, int, bool]
_MOST = 6  # terms of a sum


class FindStraightThrough(GraphPass):
    """Pass the relevance of a sum z - z.detach() + value on to z, in whatever order the sum is written."""

    name = "find_straight_through"
    stage = "normalize"
    requires = (CANONICAL, OUT_OF_PLACE)

    def applies(self, program: Program) -> bool:
        return any(is_call_of(node, "detach") for node in calls(program.graph))

    def run(self, program: Program) -> PassResult:
        result, row = PassResult(), operator_named("straight_through")
        for node in reversed(list(calls(program.graph))):  # whole sums first
            signal = _signal(node) if is_data(node) and _is_sum(node) else None
            if signal is None:
                continue
            info = node_info(node)
            name = f"{info.name}.{row}"
            new = NodeInfo(name, source=info.source, operator=row, description=str(row), shape=info.shape, dtype=info.dtype)
            passed = insert_call(program.graph, node.next, row.canonical, (signal, node), new)
            node.replace_all_uses_with(passed, delete_user_cb=functools.partial(operator.is_not, passed))
            mark_constants(program.graph)
            result.match(info.name, f"stands for {node_info(signal).name}")
        return result


def _signal(node: fx.Node) -> fx.Node | None:
    """The only term of a sum that is not detached, if the same value is subtracted detached."""
    terms = _terms(node)
    attached = [(value, sign) for value, sign, detached in terms if not detached and is_data(value)]
    if len(attached) != 1 or attached[0][1] != 1:
        return None
    value = attached[0][0]
    return value if (value, -1, True) in terms else None


def _terms(node: fx.Node) -> list[_Term]:
    """The terms of a sum of sums and differences; none if there are many."""
    found: list[_Term] = []
    pending: list[_Term] = [(node, 1, False)]
    while pending and len(found) + len(pending) <= _MOST:
        value, sign, detached = pending.pop()
        if is_call_of(value, "detach") and isinstance(value.args[0], fx.Node):
            pending.append((value.args[0], sign, True))
        elif _is_sum(value):
            signs = (sign, -sign if is_call_of(value, "sub") else sign)
            operands = zip(value.args, signs, strict=True)
            pending += [(one, its_sign, detached) for one, its_sign in operands if isinstance(one, fx.Node)]
        else:
            found.append((value, sign, detached))
    return [] if pending else found


def _is_sum(value: fx.Node) -> bool:
    return (is_call_of(value, "add") or is_call_of(value, "sub")) and not value.kwargs and len(value.args) == 2

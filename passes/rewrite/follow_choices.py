"""Make what comparisons of values choose between depend on these values, where rules take differences from a reference."""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import Role, calls, is_data, node_info, set_info, update_info
from lrpfx.operators.functions import chosen_by_comparison
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.table import operator_named
from lrpfx.passes.normalize.remove_dead_code import remove_unread
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call
from lrpfx.passes.properties import VALIDATED
from lrpfx.passes.rewrite.pair_with_reference import takes_differences
from lrpfx.rules.differences import Difference

_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_NOT, _AND, _OR, _XOR = (
    ("logical_not", "bitwise_not"),
    *((f"logical_{one}", f"bitwise_{one}") for one in ("and", "or", "xor")),
)


class FollowChoices(GraphPass):
    """Replace selections whose condition consists of comparisons of values by calls that read what is compared.

    A selection is `where`, `masked_fill`, an overwritten mask, or a product with truth values. Each comparison in a condition
    of several is a call of its own. Conditions of other kinds stay: what they change for the reference is due to constants.
    """

    name = "follow_choices"
    stage = "rewrite"
    requires = (VALIDATED,)

    def applies(self, program: Program) -> bool:
        return takes_differences(program)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            choice = _choice(program.graph, node)
            if choice is not None and _compares(choice[0]):
                _Selection(program.graph, node).write(*choice)
                result.match(node_info(node).name, f"chosen by {node_info(choice[0]).name}")
        if result.matches:
            remove_unread(program.graph)
        return result


def _choice(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, Any, Any] | None:
    """The condition of a selection, and what is chosen where it is true and where it is false; None for other calls."""
    info = node_info(node)
    if info.role is not Role.DATA or info.operator is None or not info.operator.arguments:
        return None
    bound = bound_arguments(node, info.operator)
    name = info.operator.name
    if name == "where":
        condition, first, last = bound["condition"], bound["input"], bound["other"]
    elif name == "masked_fill":
        condition, first, last = bound["mask"], bound["value"], bound["input"]
    elif name == "index_put" and isinstance(bound["indices"], (tuple, list)) and len(bound["indices"]) == 1:
        (condition,), first, last = bound["indices"], bound["values"], bound["input"]
        if not isinstance(condition, fx.Node) or not _is_number(first) or node_info(condition).dtype != torch.bool:
            return None
        if node_info(condition).shape is None or node_info(condition).shape != node_info(last).shape:
            return None
    elif name == "mul":
        condition, first = bound["other"], bound["input"]
        if not isinstance(condition, fx.Node) or is_data(condition):
            condition, first = first, condition
        condition = _truth_values(condition)
        if condition is None or not is_data(first) or info.dtype is None or info.dtype != node_info(first).dtype:
            return None
        if not _compares(condition):
            return None
        row = operator_named("mul")
        zero = replace(info, name=f"{info.name}.unchosen", operator=row, description="mul", shape=node_info(first).shape)
        last = insert_call(graph, node, torch.mul, (first, 0.0), zero)
    else:
        return None
    return (condition, first, last) if isinstance(condition, fx.Node) else None


def _truth_values(value: Any) -> fx.Node | None:
    """The truth values that a factor consists of, which may have been made numbers."""
    if not isinstance(value, fx.Node) or is_data(value):
        return None
    info = node_info(value)
    if info.dtype == torch.bool:
        return value
    converted = info.operator is not None and info.operator.entries.converts and bool(value.args)
    return _truth_values(value.args[0]) if converted else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, fx.Node) and node_info(value).shape == ())


def _name_of(condition: Any) -> str:
    row = node_info(condition).operator if isinstance(condition, fx.Node) and condition.op.startswith("call") else None
    return "" if row is None else row.name


def _operands(condition: fx.Node) -> list[Any]:
    """What a condition compares, negates or combines."""
    return [*condition.args, *condition.kwargs.values()]


def _compares(condition: Any) -> bool:
    """Whether a comparison of values of the signal is among what a condition consists of."""
    name = _name_of(condition)
    if name in _COMPARISONS:
        operands = _operands(condition)
        return len(operands) == 2 and isinstance(operands[0], fx.Node) and any(map(is_data, operands))
    if name in (*_NOT, *_AND, *_OR, *_XOR):
        return any(map(_compares, _operands(condition)))
    return _compares_with_number(_viewed(condition))


def _viewed(condition: Any) -> Any:
    """What a condition is a view of, in another shape; None for other conditions."""
    row = node_info(condition).operator if isinstance(condition, fx.Node) and condition.op == "call_function" else None
    is_view = row is not None and (row.memory.view or row.memory.always_view) and not row.outputs.picks
    return condition.args[0] if is_view and condition.args else None


def _compares_with_number(condition: Any) -> bool:
    """Whether a condition compares values of the signal with one number, so that views of it are those of the values."""
    return _name_of(condition) in _COMPARISONS and _compares(condition) and isinstance(_operands(condition)[1], (int, float))


class _Selection:
    """A call that becomes one of `chosen_by_comparison`, or several, one after another."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node, self.made = graph, node, 0
        self.info = replace(
            node_info(node), operator=operator_named("chosen_by_comparison"), rule=Difference(), keeps_gradient=False
        )

    def write(self, condition: fx.Node, first: Any, last: Any) -> None:
        """Let the node call the outermost selection."""
        new = self._chosen(condition, first, last)
        self.node.target, self.node.args, self.node.kwargs = new.target, new.args, new.kwargs
        set_info(self.node, replace(node_info(new), name=self.info.name))
        self.graph.erase_node(new)

    def _chosen(self, condition: Any, first: Any, last: Any) -> fx.Node:
        """A call that returns `first` where the condition is true, and `last` elsewhere."""
        name = _name_of(condition)
        if not _compares(condition):
            return self._insert(operator_named("where"), torch.where, condition, first, last)
        operands = _operands(condition)
        if name in _COMPARISONS:
            return self._insert(self.info.operator, chosen_by_comparison, first, last, *operands, name)
        if name in _NOT:
            return self._chosen(operands[0], last, first)
        viewed = _viewed(condition)
        if viewed is not None:
            value, number = _operands(viewed)
            self.made += 1
            info = replace(node_info(condition), name=f"{self.info.name}.compared_{self.made}", role=Role.DATA, dtype=None)
            arguments = (value, *condition.args[1:])
            value = insert_call(self.graph, self.node, condition.target, arguments, info, dict(condition.kwargs))
            return self._insert(self.info.operator, chosen_by_comparison, first, last, value, number, _name_of(viewed))
        one, other = operands
        if name in _AND:
            return self._chosen(one, self._chosen(other, first, last), last)
        if name in _OR:
            return self._chosen(one, first, self._chosen(other, first, last))
        return self._chosen(one, self._chosen(other, last, first), self._chosen(other, first, last))

    def _insert(self, row: Any, function: Any, *arguments: Any) -> fx.Node:
        self.made += 1
        info = replace(self.info, name=f"{self.info.name}.choice_{self.made}", operator=row)
        node = insert_call(self.graph, self.node, function, arguments, info)
        if row.neutral:
            update_info(node, rule=None, chosen_by="")
        return node

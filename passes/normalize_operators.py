"""NORMALIZE: one spelling for every operation, and what each value depends on."""

from typing import Any

import torch
from torch import fx

from lrpfx.node import Role, role_from, update_info
from lrpfx.operators import (
    METADATA_ATTRIBUTES,
    METADATA_FUNCTIONS,
    METADATA_METHODS,
    REQUIRED,
    Operator,
    Spelling,
    lookup,
    lookup_method,
    operator_named,
)
from lrpfx.types import Opaque, Recurrent, Unknown

from .program import Pass, PassResult, Program

INPLACE = "lrpfx_inplace"  # node.meta: the node overwrites its first argument


class NormalizeOperators(Pass):
    """Methods become functions, and arguments of listed operators take their canonical order and names.

    Tensors come first and by position; options follow by name, and those left at their
    default are dropped. In-place forms become their out-of-place forms; the mark `INPLACE` tells `RemoveInplace` of them.
    """

    name = "normalize_operators"
    stage = "normalize"

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in program.graph.nodes:
            if node.op in ("call_function", "call_method", "call_module"):
                _attribute_to_function(node)
                role = _role(node)
                update_info(node, role=role)
                if node.op == "call_module":
                    module = program.root.get_submodule(str(node.target))
                    update_info(node, kind=(Recurrent if isinstance(module, Recurrent) else Opaque).__name__)
                elif role is not Role.METADATA:
                    result.matches += self._normalize(node)
                elif node.op == "call_method":
                    _method_to_function(node)
        return result

    def _normalize(self, node: fx.Node) -> bool:
        """Rewrite one call; whether it changed."""
        before = (node.op, node.target, node.args, dict(node.kwargs))
        if node.op == "call_method":
            spelling = lookup_method(str(node.target))
            inplace_name = str(node.target)
            _method_to_function(node)
        else:
            assert callable(node.target)
            spelling = lookup(node.target)
            inplace_name = getattr(node.target, "__name__", "")
        if spelling is None:
            # Underscores at the end mark in-place operations throughout torch, listed in the table or not.
            node.meta[INPLACE] = inplace_name.endswith("_") and not inplace_name.endswith("__")
            update_info(node, kind=Unknown.__name__)
            return before != (node.op, node.target, node.args, dict(node.kwargs))
        operator = spelling.operator
        if operator.reflected and node.args and not isinstance(node.args[0], fx.Node):
            node.args = (*reversed(node.args[:2]), *node.args[2:])
            operator = operator_named(operator.reflected) or operator
        update_info(node, operator=operator.name, kind=operator.kind.__name__)
        node.meta[INPLACE] = spelling.inplace
        if operator.arguments:
            bound = _bind(node, spelling)
            if bound is None:
                update_info(node, operator=None, kind=Unknown.__name__)
            else:
                node.meta[INPLACE] = spelling.inplace or bool(bound.pop("inplace", False))
                _set_canonical(node, operator, bound)
        return before != (node.op, node.target, node.args, dict(node.kwargs))


def _role(node: fx.Node) -> Role:
    """What the value of a call depends on, from what its arguments depend on."""
    return Role.METADATA if _reads_metadata(node) else role_from(node.all_input_nodes)


def _reads_metadata(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target) in METADATA_METHODS
    if node.target is getattr and len(node.args) > 1:
        return node.args[1] in METADATA_ATTRIBUTES
    return node.target in METADATA_FUNCTIONS


def _attribute_to_function(node: fx.Node) -> None:
    """x.mT, x.T and x.data are operations on tensors, unlike x.shape."""
    if node.target is not getattr or len(node.args) < 2:
        return
    value, name = node.args[:2]
    if name in ("mT", "mH"):
        node.target, node.args = torch.transpose, (value, -2, -1)
    elif name in ("T", "H"):
        node.target, node.args = torch.ops.aten.numpy_T.default, (value,)
    elif name == "data":
        node.target, node.args = torch.detach, (value,)


def _method_to_function(node: fx.Node) -> None:
    method = getattr(torch.Tensor, str(node.target), None)
    if method is not None:
        node.op = "call_function"
        node.target = method


def _bind(node: fx.Node, spelling: Spelling) -> dict[str, Any] | None:
    """Arguments by canonical name, or None if they do not fit the operator's signature."""
    names = (*spelling.arguments, "inplace")
    if len(node.args) > len(names):
        return None
    bound = dict(zip(names, node.args, strict=False))
    first = spelling.arguments[0]
    for name, value in node.kwargs.items():
        name = first if name in ("self", "x") else name
        if name in bound:
            return None
        bound[name] = value
    known = spelling.operator.arguments
    bound = {name: value for name, value in bound.items() if name in known or name == "inplace"}
    missing = [name for name, default in known.items() if default is REQUIRED and name not in bound]
    return None if missing else bound


def _set_canonical(node: fx.Node, operator: Operator, bound: dict[str, Any]) -> None:
    positional: list[Any] = []
    for name, default in operator.arguments.items():
        if name not in operator.tensors:
            break
        positional.append(bound.pop(name, default))
    defaults = list(operator.arguments.values())
    while positional and positional[-1] is None and defaults[len(positional) - 1] is None:
        positional.pop()
    node.op = "call_function"
    node.target = operator.function or node.target
    node.args = tuple(positional)
    node.kwargs = {
        name: value
        for name, value in bound.items()
        if isinstance(value, fx.Node) or operator.arguments[name] is REQUIRED or value != operator.arguments[name]
    }

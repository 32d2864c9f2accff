"""Inserts the calls that a decomposed or normalized call consists of."""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import NodeInfo, Role, calls, node_info, nodes_in, parameter_value, role_from, update_info
from lrpfx.ir.operator import Builder, Operator
from lrpfx.operators.functions import attention_bias
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.table import operator_named
from lrpfx.passes.normalize.remove_dead_code import remove_unread
from lrpfx.passes.program import PassResult, Program, insert_call, replace_call


def attention_scale(query: torch.Tensor) -> float:
    """The default scale of attention scores: 1 / sqrt(size of a query)."""
    return float(query.size(-1) ** -0.5)


def causal_bias(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The bias on attention scores that hides later keys from each query. Shape (queries, keys)."""
    allowed = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    return attention_bias(allowed, query.dtype)


def queries_per_key(query: torch.Tensor, key: torch.Tensor) -> int:
    """The number of query heads that share one key head."""
    return query.size(-3) // key.size(-3)


def number_of_products(first: torch.Tensor, second: torch.Tensor, dims: tuple[int, ...]) -> int:
    """The number of entries of an element-wise product along some dimensions."""
    rank, count = max(first.ndim, second.ndim), 1
    for dim in dims:  # by hand: torch.compile cannot follow torch.broadcast_shapes
        place = dim - rank if dim >= 0 else dim
        sizes = [one.shape[place] for one in (first, second) if one.ndim >= -place]
        count = count * (sizes[0] if isinstance(sizes[-1], int) and sizes[-1] == 1 else sizes[-1])
    return count


class CallBuilder(Builder):
    """Inserts calls before the fused call, with names that start with its name."""

    def __init__(self, program: Program, node: fx.Node, row: Operator) -> None:
        self.program = program
        self.node = node
        self.info = _named_after_module(node) if row.outputs.results else node_info(node)
        self.arguments = {**row.arguments, **bound_arguments(node, row)}
        self.made: dict[str, int] = {}

    def call(
        self,
        operator_name: str,
        *args: Any,
        target: Callable[..., Any] | None = None,
        part: str = "",
        label: str | None = None,
        **options: Any,
    ) -> fx.Node:
        row = operator_named(operator_name)
        role = role_from(nodes_in((args, options)))
        node = self._insert(operator_name, target or row.function, args, role, row, options, label)
        update_info(node, part=(self.info.name, part) if part else None)
        return node

    def dtype_of(self, value: fx.Node) -> fx.Node:
        return self._metadata(getattr, value, "dtype")

    def filled_like(self, value: fx.Node, number: float) -> fx.Node:
        """A tensor of one number in the shape of a value; it depends on a parameter alone if that is one."""
        role = Role.PARAMETER if node_info(value).role is Role.PARAMETER else Role.METADATA
        return self._insert("full_like", torch.full_like, (value, number), role)

    def attention_scale(self, query: fx.Node) -> fx.Node:
        return self._metadata(attention_scale, query)

    def causal_bias(self, query: fx.Node, key: fx.Node) -> fx.Node:
        return self._metadata(causal_bias, query, key)

    def queries_per_key(self, query: fx.Node, key: fx.Node) -> fx.Node:
        return self._metadata(queries_per_key, query, key)

    def number_of_products(self, first: Any, second: Any, dims: tuple[int, ...]) -> fx.Node:
        return self._metadata(number_of_products, first, second, dims)

    def _metadata(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        """Insert a call whose result depends only on shapes and dtypes."""
        return self._insert(function.__name__, function, args, Role.METADATA)

    def _insert(
        self,
        what: str,
        function: Any,
        args: tuple[Any, ...],
        role: Role,
        operator: Operator | None = None,
        options: dict[str, Any] | None = None,
        label: str | None = None,
    ) -> fx.Node:
        if label is None:
            self.made[what] = self.made.get(what, -1) + 1
            suffix = f"{what}_{self.made[what]}" if self.made[what] else what
            info = NodeInfo(f"{self.info.name}.{suffix}", source=self.info.source, description=what)
        else:
            info = replace(self.info, name=f"{self.info.name}.{label}".rstrip("."))
        info = replace(info, operator=operator, role=role)
        return insert_call(self.program.graph, self.node, function, args, info, options)

    def is_boolean(self, value: fx.Node) -> bool:
        info = node_info(value)
        dtype = parameter_value(value, self.program.root).dtype if info.role is Role.PARAMETER else info.dtype
        return dtype == torch.bool


class LeftAloneError(Exception):
    """The reason why a call that looks like a part of something is not replaced."""


def with_replaced_calls(
    program: Program,
    replacement: Callable[[CallBuilder, fx.Node], fx.Node | None],
    described: Callable[[fx.Node, fx.Node], str],
) -> PassResult:
    """Replace each listed call with relevance for which there is another one, and remove what nothing reads any more.

    `replacement`: inserts the new call, or returns None or the call itself. `described`: the detail about both for the history.
    """
    result = PassResult()
    for node in list(calls(program.graph)):
        info = node_info(node)
        if info.operator is None or info.role is not Role.DATA:
            continue
        try:
            new = replacement(CallBuilder(program, node, info.operator), node)
        except LeftAloneError as reason:
            result.reasons.append((info.name, str(reason)))
            continue
        if new is not None and new is not node:
            result.match(info.name, described(node, new))
            replace_call(node, new)
    if result.matches:
        remove_unread(program.graph)
    return result


def _named_after_module(node: fx.Node) -> NodeInfo:
    """The knowledge about a call with several results, with the name of its module if what picks a result has taken it."""
    info = node_info(node)
    picked = [node_info(user) for user in node.users if user.target is operator.getitem]
    owner = next((one for one in picked if one.module_path is not None), info)
    return replace(info, name=owner.name, module_path=owner.module_path, description=owner.description)

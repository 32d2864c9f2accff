"""NORMALIZE: replace fused operations by the operations that they consist of, each of which can have its own rule.

Attention becomes matmul, softmax and matmul, with its mask, scale, causality and grouped queries. A product with a matrix of
parameters becomes a dense layer. A gated linear unit becomes a sigmoid and a gate.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import NodeInfo, Role, attribute_of, calls, node_info, nodes_in, role_from, update_info
from lrpfx.ir.operator import Builder, Operator
from lrpfx.layers.layer import bound_arguments
from lrpfx.operators.functions import attention_bias, several
from lrpfx.operators.table import operator_named, spelling_of
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call
from lrpfx.passes.properties import CANONICAL, DECOMPOSED, OUT_OF_PLACE


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


class Decompose(GraphPass):
    """Replace operations whose row has a decomposition."""

    name = "decompose"
    stage = "normalize"
    requires = (
        CANONICAL,
        OUT_OF_PLACE,
    )
    ensures = (DECOMPOSED,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            info = node_info(node)
            if info.operator is None or info.operator.decomposition is None or info.role is not Role.DATA:
                continue
            builder = _Builder(program, node, info.operator)
            replacement = info.operator.decomposition(builder)
            if replacement is None:
                continue
            result.matches += 1
            found = replacement if isinstance(replacement, tuple) else (replacement,)
            names = ", ".join(dict.fromkeys(node_info(one).name for one in found))
            result.details.append((info.name, f"{info.operator}: now {names}"))
            if isinstance(replacement, tuple):
                replacement = _results(builder, node, replacement)
            node.replace_all_uses_with(replacement)
            program.graph.erase_node(node)
        if result.matches:
            _views_to_reshapes(program.graph)
        return result


def _results(builder: "_Builder", node: fx.Node, results: tuple[fx.Node, ...]) -> fx.Node:
    """Replace what picks one of several results. The results together are for all other readers."""
    for user in list(node.users):
        if user.target is operator.getitem and isinstance(user.args[1], int):
            user.replace_all_uses_with(results[user.args[1]])
            builder.program.graph.erase_node(user)
    return builder.call("container", *results, target=several) if node.users else results[0]


def _views_to_reshapes(graph: fx.Graph) -> None:
    """Replace views by reshapes, which copy if necessary: decomposed operations may return other strides than fused ones.

    At this point no operation overwrites a value, so a copy is as good as a view.
    """
    for node in calls(graph):
        spelling = spelling_of(node)
        copying = None if spelling is None else spelling.operator.copying.get(node.target)  # type: ignore[arg-type]
        if copying is not None and not any(_is_dtype(argument) for argument in [*node.args[1:], *node.kwargs.values()]):
            node.target = copying
            node.kwargs = {"shape" if name == "size" else name: value for name, value in node.kwargs.items()}


def _is_dtype(argument: Any) -> bool:
    """Whether an argument of a view is a dtype and not a size."""
    if isinstance(argument, fx.Node):
        return argument.target is getattr and argument.args[1] == "dtype"
    return isinstance(argument, torch.dtype)


class _Builder(Builder):
    """Inserts calls before the fused call, with names that start with its name."""

    def __init__(self, program: Program, node: fx.Node, row: Operator) -> None:
        self.program = program
        self.node = node
        self.info = _named_after_module(node) if row.results else node_info(node)
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

    def attention_scale(self, query: fx.Node) -> fx.Node:
        return self._metadata(attention_scale, query)

    def causal_bias(self, query: fx.Node, key: fx.Node) -> fx.Node:
        return self._metadata(causal_bias, query, key)

    def queries_per_key(self, query: fx.Node, key: fx.Node) -> fx.Node:
        return self._metadata(queries_per_key, query, key)

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

    def is_parameter(self, value: Any, dimensions: tuple[int, ...]) -> bool:
        if not isinstance(value, fx.Node) or node_info(value).role is not Role.PARAMETER:
            return False
        return _evaluate(self.program, value).ndim in dimensions

    def is_looked_up(self, value: Any) -> bool:
        chosen = False
        while isinstance(value, fx.Node) and node_info(value).role in (Role.CONSTANT, Role.DISCRETE, Role.METADATA):
            spelling = spelling_of(value)
            if spelling is None or not (spelling.operator.moves or spelling.operator.converts) or not value.args:
                return False
            chosen, value = True, value.args[0]
        return chosen and isinstance(value, fx.Node) and node_info(value).role is Role.PARAMETER

    def is_boolean(self, value: fx.Node) -> bool:
        info = node_info(value)
        dtype = _evaluate(self.program, value).dtype if info.role is Role.PARAMETER else info.dtype
        return dtype == torch.bool


def _named_after_module(node: fx.Node) -> NodeInfo:
    """The knowledge about a call with several results, with the name of its module if what picks a result has taken it."""
    info = node_info(node)
    picked = [node_info(user) for user in node.users if user.target is operator.getitem]
    owner = next((one for one in picked if one.module_path is not None), info)
    return replace(info, name=owner.name, module_path=owner.module_path, description=owner.description)


def _evaluate(program: Program, node: fx.Node) -> Any:
    """The value of a node that depends only on parameters."""
    values: dict[fx.Node, Any] = {}
    pending = [node]
    while pending:
        current = pending[-1]
        if current.op == "get_attr":
            values[current] = attribute_of(current, program.root)
        missing = [argument for argument in current.all_input_nodes if argument not in values]
        if missing:
            pending += missing
            continue
        pending.pop()
        if current not in values:
            args, kwargs = fx.node.map_arg((current.args, current.kwargs), values.__getitem__)
            with torch.no_grad():
                assert callable(current.target)
                values[current] = current.target(*args, **kwargs)
    return values[node]

"""NORMALIZE: replace attention masks that depend on sizes alone by `is_causal`, or by no mask where they hide nothing.

Models write such masks out under torch.export. Fused attention is faster without them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import Role, attribute_of, calls, node_info, nodes_in
from lrpfx.layers.layer import bound_arguments
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE

_LARGEST = 8192  # the most positions for which a mask is computed


class FoldMasks(GraphPass):
    """Compute each such mask at several sizes, beyond the largest number in its computation, where a window would show."""

    name = "fold_masks"
    stage = "normalize"
    requires = (CANONICAL, OUT_OF_PLACE)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        found: dict[fx.Node, str] = {}
        for node in calls(program.graph):
            row = node_info(node).operator
            if row is None or not row.masked_by:
                continue
            bound = {**row.arguments, **bound_arguments(node, row)}
            mask = bound[row.masked_by]
            if (
                not isinstance(mask, fx.Node)
                or node_info(mask).role not in (Role.METADATA, Role.PARAMETER)
                or bound["is_causal"]
            ):
                continue
            if mask not in found:
                try:
                    found[mask] = _pattern(program, mask)
                except _UnknownMaskError as reason:
                    found[mask] = f"not folded: {reason}"
            pattern = found[mask]
            if pattern not in (_CAUSAL, _EMPTY):
                result.reasons.append((node_info(node).name, pattern))
                continue
            bound[row.masked_by] = None
            bound["is_causal"] = pattern == _CAUSAL
            names = [name for name in row.arguments if name in row.tensors and name != row.masked_by]
            node.args = tuple(bound.pop(name) for name in names)
            node.kwargs = {name: value for name, value in bound.items() if value != row.arguments[name]}
            result.matches += 1
            result.details.append((node_info(node).name, pattern))
        return result


_CAUSAL, _EMPTY = "its mask is causal", "its mask hides nothing"


class _UnknownMaskError(Exception):
    """Why a mask cannot be folded."""


def _pattern(program: Program, mask: fx.Node) -> str:
    """What a mask hides at every size."""
    before = _ancestors(mask)
    lengths = [5, 8]
    if any(_is_size(node) and node.args[1] for node in before):
        beyond = 3 + max((abs(number) for number in _numbers(before)), default=0)
        if beyond > _LARGEST:
            raise _UnknownMaskError(f"its computation contains {beyond - 3}, and may differ for more positions")
        lengths.append(beyond)
    patterns = set()
    for batch, length in zip((2, 3, 2), lengths, strict=False):
        patterns.add(_pattern_of(_value(program, mask, before, batch, length)))
    if len(patterns) > 1:
        raise _UnknownMaskError("it differs between sizes")
    return patterns.pop()


def _pattern_of(value: torch.Tensor) -> str:
    if value.ndim < 2:
        raise _UnknownMaskError("it has no dimensions for queries and keys")
    if value.dtype == torch.bool:
        allowed = value
    elif bool(((value == 0) | (value <= torch.finfo(value.dtype).min)).all()):
        allowed = value == 0
    else:
        raise _UnknownMaskError("it is a bias")
    if bool(allowed.all()):
        return _EMPTY
    queries, keys = value.shape[-2:]
    causal = torch.ones(queries, keys, dtype=torch.bool, device=value.device).tril()
    if queries == keys and bool((allowed == causal).all()):
        return _CAUSAL
    raise _UnknownMaskError("it is neither causal nor empty")


def _is_size(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sym_size.int


def _ancestors(mask: fx.Node) -> list[fx.Node]:
    """The nodes that a mask is computed from, up to sizes and facts of inputs, in order."""
    needed: set[fx.Node] = set()
    pending = [mask]
    while pending:
        node = pending.pop()
        if node in needed:
            continue
        needed.add(node)
        if not _is_size(node) and node.target is not getattr:
            pending += node.all_input_nodes
    return [node for node in mask.graph.nodes if node in needed]


def _numbers(nodes: list[fx.Node]) -> Iterator[int]:
    """The integers in the arguments of calls, without those that mean "to the end"."""
    for node in nodes:
        found: list[int] = []
        fx.node.map_aggregate(
            (node.args, node.kwargs),
            lambda leaf: found.append(leaf) if type(leaf) is int else None,  # type: ignore[func-returns-value, arg-type]
        )
        yield from (number for number in found if abs(number) < 2**31 - 1)


def _value(program: Program, mask: fx.Node, nodes: list[fx.Node], batch: int, length: int) -> torch.Tensor:
    """The mask for sizes of inputs: `batch` in dimension 0, `length` in all others."""
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in nodes:
            if node.op == "get_attr":
                if str(node.target) in program.root.state_dict():
                    raise _UnknownMaskError(f"it depends on {node.target}, which load_state_dict may change")
                values[node] = attribute_of(node, program.root)
            elif _is_size(node):
                values[node] = length if node.args[1] else batch
            elif node.target is getattr:
                info = node_info(nodes_in(node.args)[0])
                if node.args[1] != "dtype" or info.dtype is None:
                    raise _UnknownMaskError(f"it depends on {node.args[1]}")
                values[node] = info.dtype
            elif node.op == "call_function" and callable(node.target):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                try:
                    values[node] = node.target(*args, **kwargs)
                except Exception as error:
                    raise _UnknownMaskError(f"{node_info(node).name} fails for other sizes: {error}") from error
            else:
                raise _UnknownMaskError(f"it depends on {node_info(node).name}")
    found = values[mask]
    if not isinstance(found, torch.Tensor):
        raise _UnknownMaskError("it is not a tensor")
    return found

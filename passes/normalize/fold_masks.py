"""NORMALIZE: replace attention masks that depend on sizes alone by `is_causal`, or by no mask where they hide nothing.

Models write such masks out under torch.export. Fused attention is faster without them.
"""

import math
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import Role, attribute_of, calls, map_arguments, may_be_loaded, node_info, nodes_in, result_of
from lrpfx.operators.layer import bound_arguments
from lrpfx.passes.program import GraphPass, PassResult, Program
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE

_LARGEST = 8192  # the most positions for which a mask is computed


class FoldMasks(GraphPass):
    """Compute each such mask at several sizes, beyond the numbers in its computation, where a window would show."""

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
            program.rely_on(_ancestors(mask))
            bound[row.masked_by] = None
            bound["is_causal"] = pattern == _CAUSAL
            names = [name for name in row.arguments if name in row.tensors and name != row.masked_by]
            node.args = tuple(bound.pop(name) for name in names)
            node.kwargs = {name: value for name, value in bound.items() if value != row.arguments[name]}
            result.match(node_info(node).name, pattern)
        return result


_CAUSAL, _EMPTY = "its mask is causal", "its mask hides nothing"


class _UnknownMaskError(Exception):
    """Why a mask cannot be folded."""


class _FailedError(_UnknownMaskError):
    """Its computation is not possible for some sizes."""


def _pattern(program: Program, mask: fx.Node) -> str:
    """What a mask hides at every size."""
    before = _ancestors(mask)
    places = list(dict.fromkeys((node.args[0], node.args[1]) for node in before if _is_size(node)))
    samples, lengths = ([place for place in places if bool(place[1]) == is_length] for is_length in (False, True))

    def pattern(sample: int, *given: int) -> str:
        """The pattern for these sizes of dimension 0, and of the others: one for all, or one for each."""
        sizes = dict.fromkeys(samples, sample) | dict(
            zip(lengths, given * (1 if len(given) > 1 else len(lengths)), strict=False)
        )
        return _pattern_of(_value(program, mask, before, sizes))

    patterns = {pattern(2, 5), pattern(3, 8)}
    if places:
        beyond = 3 + math.prod(_numbers(program, before))
        if beyond > _LARGEST:
            raise _UnknownMaskError("its computation contains large numbers, and it may differ for more positions")
        patterns.add(pattern(2, beyond))
        patterns.add(pattern(beyond, 5))  # dimension 0 may be that of positions
    if len(lengths) > 1:
        with suppress(_FailedError):  # these sizes cannot differ
            patterns.add(pattern(2, *range(5, 5 + len(lengths))))
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


def _numbers(program: Program, nodes: list[fx.Node]) -> set[int]:
    """The numbers that a computation contains, without signs, fractions, and those that mean "to the end" or "hidden".

    A pattern such as a window may show only beyond their product.
    """
    found: list[float] = []

    def add(number: Any) -> None:
        if isinstance(number, (int, float)) and 0 < abs(number) < 2**31 - 1:
            found.append(max(abs(number), 1 / abs(number)))

    for node in nodes:
        if node.op == "get_attr":
            value = attribute_of(node, program.root)
            if isinstance(value, torch.Tensor):
                add(max(value.shape, default=1))
                if value.dtype != torch.bool and value.numel():
                    add(value.abs().max().item())
        else:
            map_arguments((node.args, node.kwargs), add)
    return {math.ceil(number) for number in found}


def _value(program: Program, mask: fx.Node, nodes: list[fx.Node], sizes: dict[Any, int]) -> torch.Tensor:
    """The mask for sizes of inputs, by tensor and dimension."""
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in nodes:
            if node.op == "get_attr":
                if may_be_loaded(node, program.root):
                    raise _UnknownMaskError(f"it depends on {node.target}, which load_state_dict may change")
                values[node] = attribute_of(node, program.root)
            elif _is_size(node):
                values[node] = sizes[node.args[0], node.args[1]]
            elif node.target is getattr:
                info = node_info(nodes_in(node.args)[0])
                if node.args[1] != "dtype" or info.dtype is None:
                    raise _UnknownMaskError(f"it depends on {node.args[1]}")
                values[node] = info.dtype
            elif node.op == "call_function" and callable(node.target):
                try:
                    values[node] = result_of(node, values.__getitem__)
                except Exception as error:
                    raise _FailedError(f"{node_info(node).name} fails for other sizes: {error}") from error
            else:
                raise _UnknownMaskError(f"it depends on {node_info(node).name}")
    found = values[mask]
    if not isinstance(found, torch.Tensor):
        raise _UnknownMaskError("it is not a tensor")
    return found

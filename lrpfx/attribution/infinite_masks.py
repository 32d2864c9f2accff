"""Inputs that may hold minus infinity: those that only hide keys from queries, according to the operator table."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lrpfx.ir.kinds import Softmax
from lrpfx.ir.node import Role, node_info


def input_node(graph: fx.Graph, place: Sequence[Any]) -> fx.Node | None:
    """The input that a place begins with: an argument, by number or by name."""
    placeholders = {str(node.target): node for node in graph.find_nodes(op="placeholder")}
    in_order = list(placeholders.values())
    first = place[0]
    return in_order[first] if isinstance(first, int) and first < len(in_order) else placeholders.get(str(first))


def items_at(node: fx.Node, keys: Sequence[Any]) -> list[fx.Node]:
    """The nodes that hold an item of a node's value."""
    found = [node]
    for key in keys:
        found = [user for one in found for user in one.users if user.target is operator.getitem and user.args[1] == key]
    return found


def hiding(mask: torch.Tensor) -> torch.Tensor:
    """The mask, with entries of -inf that take no relevance: a share of infinity is not a number."""
    return torch.where(mask == -torch.inf, mask.detach(), mask)


def other_reader(graph: fx.Graph, place: Sequence[Any]) -> fx.Node | None:
    """The first reader for which an input is more than a mask: None if its entries of -inf have a meaning wherever they go.

    Such entries are moved, are added to scores, and become 0 in a softmax; comparisons and what the user declared constant may
    read them as well. `place`: the argument, then keys in it.
    """
    start = input_node(graph, place)
    if start is None or node_info(start).role is Role.CONSTANT:
        return None
    pending = items_at(start, place[1:])
    seen: set[fx.Node] = set()
    while pending:
        for user in pending.pop().users:
            info = node_info(user) if user.op != "output" else None
            if info is not None and info.role is not Role.DATA:
                continue
            row = None if info is None else info.operator
            if row is None:
                return user
            if row.kind is Softmax or user in seen:
                continue
            if not (row.entries.moves or row.entries.selects or row.entries.converts or row.values.keeps_infinity):
                return user
            seen.add(user)
            pending.append(user)
    return None

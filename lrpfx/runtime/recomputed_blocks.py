"""Blocks of a graph that are computed again in the backward pass: until then, only what they read is kept.

This is how a graph runs, not what it computes: its nodes keep their names, and any copy of it with further results, masks or
probes can be cut into the same blocks.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from lrpfx.ir.node import has_info, node_info, update_info
from lrpfx.runtime.compiled_graph import copy_graph
from lrpfx.support.torch_internals import are_transforms_active

#: The attribute by which the code of a graph gives its module to the code of a block.
TREE = "lrpfx_tree"


@dataclass(frozen=True)
class Block:
    """A block that was cut out of a graph."""

    name: str
    call: fx.Node
    #: Nodes without the block's mark that were cut out with it: they read what it computes, and it reads what they compute.
    between: Sequence[fx.Node]


def with_recomputed_blocks(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph with one call for each block; the graph itself if it has none."""
    if not any(map(_block_of, graph.nodes)):
        return graph
    copied = copy_graph(graph)
    cut_blocks(copied)
    return copied


def cut_blocks(graph: fx.Graph) -> list[Block]:
    """Replace the nodes of each block, which have its name in their `NodeInfo.block`, by one call."""
    members: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        members.setdefault(_block_of(node), []).append(node)
    members.pop("", None)
    blocks: list[Block] = []
    for name, nodes in members.items():
        gone = {node for block in blocks for node in block.between}
        blocks += [_cut(graph, name, left)] if (left := [node for node in nodes if node not in gone]) else []
    return blocks


def _block_of(node: fx.Node) -> str:
    return node_info(node).block if node.op.startswith("call") and has_info(node) else ""


def _cut(graph: fx.Graph, name: str, members: Sequence[fx.Node]) -> Block:
    window = [members[0]]
    while window[-1] is not members[-1]:
        window.append(window[-1].next)
    dependent, needed = set(members), set(members)
    for node in window:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    for node in reversed(window):
        if node in needed:
            needed.update(node.all_input_nodes)
    inside = [node for node in window if node in dependent and node in needed]
    after = [node for node in window if node in dependent and node not in needed]
    known = set(inside)
    read = list(dict.fromkeys(source for node in inside for source in node.all_input_nodes if source not in known))
    returned = [node for node in inside if not known.issuperset(node.users)]

    inner = fx.Graph()
    inner_nodes = {source: inner.placeholder(f"value_{number}") for number, source in enumerate(read)}
    for node in inside:
        copied = inner_nodes[node] = inner.node_copy(node, inner_nodes.__getitem__)
        if has_info(copied):
            update_info(copied, block="")
    inner.output(tuple(inner_nodes[node] for node in returned))

    before = members[-1]
    with graph.inserting_after(before):
        tree = graph.create_node("get_attr", TREE)
    with graph.inserting_after(tree):
        call = graph.call_function(_recomputed(name, inner), (tree, *read))
    place = call
    for number, node in enumerate(returned):
        with graph.inserting_after(place):
            place = graph.call_function(operator.getitem, (call, number))
        node.replace_all_uses_with(place, delete_user_cb=lambda user: user not in known)
    for node in after:
        place.append(node)
        place = node
    for node in reversed(inside):
        graph.erase_node(node)
    return Block(name, call, [node for node in inside if node not in set(members)])


def _recomputed(name: str, graph: fx.Graph) -> Callable[..., Any]:
    """A function of a tree of modules, and of what a block reads, that returns the results of the block."""
    holder = fx.GraphModule(nn.Module(), fx.Graph(), class_name=name)
    holder.graph = graph
    run: Callable[..., Any] = type(holder).forward
    called = [str(node.target) for node in graph.find_nodes(op="call_module")]

    def recomputed(tree: nn.Module, *values: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or are_transforms_active():
            return run(tree, *values)
        if any(map(partial(_is_observed, tree), called)):
            return run(tree, *values)
        return checkpoint(run, tree, *values, use_reentrant=False)

    recomputed.__name__ = f"recomputed_{name.replace('.', '_')}"
    return recomputed


def _is_observed(tree: nn.Module, path: str) -> bool:
    """Whether the module has hooks, which would run twice."""
    module = tree.get_submodule(path)
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)

"""Replace strides and numbers of entries that a program computes with by products of sizes.

Tracing takes them for sizes of the same value. Files and other runtimes have sizes alone, and a tensor may have other strides
when the program runs.
"""

import functools
import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lrpfx.passes.program import GraphPass, PassResult, Program

aten = torch.ops.aten


class PlainSizes(GraphPass):
    """`sym_numel` and `sym_stride` become products of `sym_size`."""

    name = "plain_sizes"
    stage = "lower"

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in [node for node in program.graph.nodes if node.target in (aten.sym_numel.default, aten.sym_stride.int)]:
            dimensions = _factors(node)
            if dimensions is None:
                result.reasons.append((node.name, "it is not a product of sizes"))
                continue
            with program.graph.inserting_before(node):
                sizes = [_size(node, dimension) for dimension in dimensions]
                node.replace_all_uses_with(functools.reduce(_product, sizes))
            program.graph.erase_node(node)
            result.matches += 1
        return result


def _factors(node: fx.Node) -> list[int] | None:
    """The dimensions whose sizes make up a number of entries or a stride; None if no product of sizes is it."""
    tensor: Any = node.args[0]
    sizes, strides = tensor.meta["val"].shape, tensor.meta["val"].stride()
    dimensions = list(range(len(sizes)))
    if node.target == aten.sym_stride.int:
        of: Any = node.args[1]
        dimensions = [dimension for dimension in dimensions if bool(strides[dimension] < strides[of])]
    product = functools.reduce(operator.mul, (sizes[dimension] for dimension in dimensions), 1)
    return dimensions if statically_known_true(product == node.meta["val"]) else None  # for all sizes


def _size(node: fx.Node, dimension: int) -> fx.Node:
    tensor: Any = node.args[0]
    size = node.graph.call_function(aten.sym_size.int, (tensor, dimension))
    size.meta = {**node.meta, "val": tensor.meta["val"].shape[dimension]}
    return size


def _product(first: fx.Node, second: fx.Node) -> fx.Node:
    product = first.graph.call_function(operator.mul, (first, second))
    product.meta = {**first.meta, "val": first.meta["val"] * second.meta["val"]}
    return product

"""CANONIZE: make a batch norm of the factors and terms for each channel that follow no linear layer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from lrpfx.ir.node import Role, calls, is_data, node_info, parameter_value, row_of
from lrpfx.operators.table import operator_named
from lrpfx.passes.canonize.affine_maps import Merger, constant_channels, value_and_constant
from lrpfx.passes.canonize.merge_batch_norm import reads_sizes
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call, replace_call
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE
from lrpfx.types import BatchNorm, Gate, LayerNorm, RMSNorm


class FindBatchNorm(GraphPass):
    """Replace what scales and shifts each channel by parameters, such as a frozen batch norm that is written out.

    The scale and shift behind another normalization, and the normalization of a model's input, stay what they are.
    """

    name = "find_batch_norm"
    stage = "canonize"
    requires = (CANONICAL, OUT_OF_PLACE)

    def applies(self, program: Program) -> bool:
        return any(_chain(program, node) for node in calls(program.graph))

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            chain = _chain(program, node)
            if chain:
                names = [node_info(one).name for one in chain]
                result.matches += len(chain)
                result.details += [(name, f"is a part of the batch norm {names[-1]}") for name in names]
                _replace(program, chain)
        return result


def _chain(program: Program, node: fx.Node) -> list[fx.Node]:
    """The affine operations on the channels of a value from `node` on; none if they do not both scale and shift them."""
    source = value_and_constant(node)[0]
    shape = node_info(source).shape if isinstance(source, fx.Node) and is_data(source) else None
    if shape is None or len(shape) < 2 or not isinstance(source, fx.Node) or _is_apart(source):
        return []
    if value_and_constant(source) != (None, None) and _reader(source) is node:
        return []  # the chain begins earlier
    found: list[fx.Node] = []
    value: fx.Node = source
    reader: fx.Node | None = node
    while reader is not None and value_and_constant(reader)[0] is value and node_info(reader).shape == shape:
        if not _is_for_channels(program, reader, shape):
            break
        found.append(reader)
        value, reader = reader, _reader(reader)
    by_channel = [one for one in found if _constant_shape(program, one) is not None]
    scales = [one for one in by_channel if row_of(one).coefficients is None]
    if not all(bool(_value(program, one).all()) for one in scales):
        return []  # a mask: what it hides has no relevance
    return found if scales and len(scales) < len(by_channel) else []


def _is_apart(source: fx.Node) -> bool:
    """Whether a value is an input of the model, or normalized."""
    while source.op == "call_function":
        row = node_info(source).operator
        if row is None or issubclass(row.kind, (Gate, LayerNorm, RMSNorm, BatchNorm)):
            return row is not None
        if not row.neutral or len([one for one in source.all_input_nodes if is_data(one)]) != 1:
            return False
        source = next(one for one in source.all_input_nodes if is_data(one))
    return source.op == "placeholder"


def _reader(value: fx.Node) -> fx.Node | None:
    """The only reader of the entries of a value."""
    readers = [user for user in value.users if not reads_sizes(user)]
    return readers[0] if len(readers) == 1 and readers[0].op == "call_function" else None


def _constant_shape(program: Program, node: fx.Node) -> Sequence[int] | None:
    """The shape of the constant of an affine operation, if it has several entries."""
    value = _value(program, node)
    return value.shape if isinstance(value, torch.Tensor) and value.numel() > 1 else None


def _value(program: Program, node: fx.Node) -> Any:
    """The constant of an affine operation."""
    constant = value_and_constant(node)[1]
    return parameter_value(constant, program.root) if isinstance(constant, fx.Node) else constant


def _is_for_channels(program: Program, node: fx.Node, shape: tuple[int, ...]) -> bool:
    """Whether the constant of an affine operation is a number, or one number for each channel."""
    constant = value_and_constant(node)[1]
    if isinstance(constant, fx.Node) and node_info(constant).role is not Role.PARAMETER:
        return False
    value, given = _value(program, node), _constant_shape(program, node)
    if isinstance(value, torch.Tensor) and value.dtype != node_info(node).dtype:
        return False
    return given is None or (1,) * (len(shape) - len(given)) + tuple(given) == (1, shape[1], *[1] * (len(shape) - 2))


def _replace(program: Program, chain: list[fx.Node]) -> None:
    """Insert the batch norm whose mean is 0 and whose variance is 1, and remove the chain."""
    last, source = chain[-1], value_and_constant(chain[0])[0]
    info, channels = node_info(last), (node_info(last).shape or ())[1]
    like = next(value_and_constant(one)[1] for one in chain if _constant_shape(program, one) is not None)
    merger = Merger(program, [], (), node_info(chain[0]).source)
    zeros = merger.derive(last, f"{info.name}.running_mean", constant_channels, like, channels, 0.0)
    ones = merger.derive(last, f"{info.name}.running_var", constant_channels, like, channels, 1.0)
    scale, shift = ones, zeros
    for node in chain:
        scale, shift = merger.composed(node, scale, shift, channels, before=last)
    row = operator_named("batch_norm")
    made = replace(info, operator=row, description="batch_norm", merged=(*info.merged, *(node_info(one).name for one in chain)))
    norm = insert_call(program.graph, last, functional.batch_norm, (source, zeros, ones, scale, shift), made, {"eps": 0.0})
    replace_call(last, norm)
    for node in reversed(chain[:-1]):
        program.graph.erase_node(node)

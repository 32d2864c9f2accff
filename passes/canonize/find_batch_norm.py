"""CANONIZE: make a batch norm of the factors and terms for each channel that follow no linear layer."""

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from lrpfx.ir.kinds import BatchNorm, Gate, LayerNorm, RMSNorm
from lrpfx.ir.node import calls, is_data, node_info, only_reader, parameter_value, row_of
from lrpfx.operators.table import operator_named
from lrpfx.passes.canonize.affine_maps import Merger, constant_channels, value_and_constant
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call, replace_call
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE


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
    if value_and_constant(source) != (None, None) and only_reader(source) is node:
        return []  # the chain begins earlier
    found: dict[fx.Node, Any] = {}  # operations -> their constants
    value: fx.Node = source
    reader: fx.Node | None = node
    while reader is not None and value_and_constant(reader)[0] is value and node_info(reader).shape == shape:
        constant = value_and_constant(reader)[1]
        number = parameter_value(constant, program.root) if isinstance(constant, fx.Node) else constant
        if not _is_for_channels(number, shape, node_info(reader).dtype):
            break
        found[reader] = number
        value, reader = reader, only_reader(reader)
    by_channel = {one: number for one, number in found.items() if isinstance(number, torch.Tensor) and number.numel() > 1}
    scales = [number for one, number in by_channel.items() if row_of(one).merging.coefficients is None]
    if not all(bool(number.all()) for number in scales):
        return []  # a mask: what it hides has no relevance
    return list(found) if scales and len(scales) < len(by_channel) else []


def _is_apart(source: fx.Node) -> bool:
    """Whether a value is an input of the model, or normalized."""
    while source.op == "call_function":
        row = node_info(source).operator
        if row is None or issubclass(row.kind, (Gate, LayerNorm, RMSNorm, BatchNorm)):
            return row is not None
        signals = [one for one in source.all_input_nodes if is_data(one)]
        if not row.neutral or len(signals) != 1:
            return False
        (source,) = signals
    return source.op == "placeholder"


def _is_for_channels(constant: Any, shape: tuple[int, ...], dtype: torch.dtype | None) -> bool:
    """Whether the constant of an affine operation is a number, or one number for each channel."""
    if not isinstance(constant, torch.Tensor):
        return True
    sizes = (1,) * (len(shape) - constant.ndim) + tuple(constant.shape)
    return constant.dtype == dtype and (constant.numel() == 1 or sizes == (1, shape[1], *[1] * (len(shape) - 2)))


def _replace(program: Program, chain: list[fx.Node]) -> None:
    """Insert the batch norm whose mean is 0 and whose variance is 1, and remove the chain."""
    last, source = chain[-1], value_and_constant(chain[0])[0]
    info, channels = node_info(last), (node_info(last).shape or ())[1]
    like = next(constant for one in chain if isinstance(constant := value_and_constant(one)[1], fx.Node))
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

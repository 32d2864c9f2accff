"""CANONIZE: make one linear layer of pieces that `cat` or `stack` puts together, and of constants among its inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import calls, is_call_of, is_data, node_info, only_reader, parameter_value, row_of, update_info
from lrpfx.ir.operator import Operator, WeightLayout
from lrpfx.operators.channels import pads
from lrpfx.operators.layer import bound_arguments
from lrpfx.passes.canonize.affine_maps import Merger
from lrpfx.passes.canonize.channel_places import dimension_of_channels
from lrpfx.passes.canonize.merge_batch_norm import is_layer_of_parameters, move_up
from lrpfx.passes.canonize.merge_scales import Alone, alone_of
from lrpfx.passes.constants import known_size, mark_constants, number_filling, one_among_constants
from lrpfx.passes.normalize.remove_dead_code import remove_unread
from lrpfx.passes.normalize.simplify import adds_last
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call, replace_call
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE


def weight_of_pieces(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The weight of the layer whose outputs are those of all pieces."""
    return torch.cat(list(weights))


def bias_of_pieces(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The bias of the layer whose outputs are those of all pieces. Shape (channels,)."""
    pairs = zip(weights, biases, strict=True)
    return torch.cat([weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in pairs])


def weight_of_features(weight: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """The part of a weight (out, in, ...) for some of the features or channels that it takes."""
    return weight.narrow(1, first, size)


def bias_with_constants(
    weight: torch.Tensor, bias: torch.Tensor | None, values: Sequence[tuple[int, float | torch.Tensor]]
) -> torch.Tensor:
    """The bias of a layer some of whose inputs are constant: the first one's place, and a number or several. Shape (out,)."""
    weight = weight.flatten(2).sum(2) if weight.ndim > 2 else weight
    added = torch.zeros_like(weight[:, 0])
    for feature, value in values:
        if isinstance(value, torch.Tensor):
            added = added + weight.narrow(1, feature, value.numel()) @ value.reshape(-1)
        else:
            added = added + weight[:, feature] * value
    return added if bias is None else bias + added


class MergePieces(GraphPass):
    """Merge linear layers of one input whose outputs are put together along their channels, if they are functions.

    Convolutions of equal parts of the channels are one with groups. Layers that are modules stay what they are. Numbers and
    parameters among the features of a dense layer, or the channels of a convolution, are part of its bias.
    """

    name = "merge_pieces"
    stage = "canonize"
    requires = (CANONICAL, OUT_OF_PLACE)

    def applies(self, program: Program) -> bool:
        return any(
            _pieces(node) is not None or _constant_features(program, node) or _overwritten(node) is not None
            for node in calls(program.graph)
        )

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            found = _pieces(node)
            if found is not None:
                names = [node_info(piece).name for piece in found.layers]
                result.details += [(name, f"merged into {node_info(node).name}") for name in names]
                result.matches += len(names)
                program.fixed_dimensions = program.fixed_dimensions or found.groups > 1
                _merge(program, node, found)
                continue
            features = _constant_features(program, node)
            if features is not None:
                result.details.append((node_info(features.cat).name, f"merged into {node_info(node).name}"))
                result.matches += 1
                features.merge(program)
            layer = _overwritten(node)
            if layer is not None:
                reason = f"it writes a constant into a part of {node_info(layer).name}, which is no part of the layer"
                result.reasons.append((node_info(node).name, f"{reason}; torch.where with a mask of channels is one"))
        return result


def _overwritten(node: fx.Node) -> fx.Node | None:
    """The linear layer a part of whose result a call replaces by a constant that is not 0, as in y[:, 1] = 2."""
    if not (is_call_of(node, "fill") or is_call_of(node, "copy")):
        return None
    view, *constants = (*node.args, *node.kwargs.values())
    if any(map(is_data, constants)) or 0 in map(number_filling, constants):
        return None
    return next((one for one in _origins(view)[1:] if is_layer_of_parameters(one)), None)


# --- pieces of a layer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pieces:
    """Layers of one input, or of equal parts of its channels, that are put together along their channels."""

    layers: list[fx.Node]
    source: Any  # the input
    groups: int  # the number of its parts


def _pieces(node: fx.Node) -> _Pieces | None:
    """The layers that `node` puts together."""
    stacks = is_call_of(node, "stack")
    if not (stacks or is_call_of(node, "cat")) or not isinstance(node.args[0], (tuple, list)):
        return None
    dim = next(iter((*node.args[1:], *node.kwargs.values())), 0)
    parts = [_of_one_output(part) if stacks else (_of_column(part) or part) for part in node.args[0]]
    pieces = [part for part in parts if isinstance(part, fx.Node)]
    if len(pieces) < max(2, len(parts)) or len(set(pieces)) < len(pieces) or not isinstance(dim, int):
        return None
    first, shape = pieces[0], node_info(node).shape
    operator = _operator(first)
    if operator is None:
        return None
    if dim >= 0:
        dim -= 0 if shape is None else len(shape)
    channels = -1 if operator.linear.weight_layout is WeightLayout.DENSE else -1 - operator.dimensions.spatial
    options = _options(first)
    if dim != channels or options.get("groups", 1) != 1:
        return None
    if any(_operator(piece) is not operator or _options(piece) != options for piece in pieces):
        return None
    if all(piece.args[0] is first.args[0] for piece in pieces):
        return _Pieces(pieces, first.args[0], 1)
    source = (
        None if operator.linear.weight_layout is WeightLayout.DENSE else _source_of_parts([one.args[0] for one in pieces], dim)
    )
    return None if source is None else _Pieces(pieces, source, len(pieces))


def _source_of_parts(parts: Sequence[Any], dim: int) -> fx.Node | None:
    """The value whose entries along a dimension are those of all parts in their order, equally many of each."""
    origins = [_origins(part) for part in parts]
    source = next((one for one in origins[0] if all(one in some for some in origins)), None)
    shape = None if source is None else node_info(source).shape
    if source is None or shape is None:
        return None
    places = torch.arange(shape[dim]).view(-1, *[1] * (-1 - dim)).expand(shape)
    try:
        found = [_viewed(part, source, places).movedim(dim, 0) for part in parts]
    except (RuntimeError, IndexError, TypeError):  # a size that only a run knows
        return None
    whole = [shape[place] for place in range(len(shape)) if place - len(shape) != dim]
    equal = len({tuple(one.shape) for one in found}) == 1 and list(found[0].shape[1:]) == whole and 0 not in whole
    return source if equal and [int(row.flatten()[0]) for one in found for row in one] == list(range(shape[dim])) else None


def _origins(part: Any) -> list[fx.Node]:
    """A value and what it is a view, or a part, of, one after another."""
    found = []
    while isinstance(part, fx.Node):
        row = node_info(part).operator if part.op == "call_function" else None
        if row is None or not row.outputs.parts:
            found.append(part)
        part = part.args[0] if row is not None and (row.memory.always_view or row.outputs.parts or row.outputs.picks) else None
    return found


def _viewed(part: Any, source: fx.Node, value: Any) -> Any:
    """What the views and parts from `source` to `part` make of another value."""
    if part is source:
        return value
    assert callable(part.target)
    return part.target(_viewed(part.args[0], source, value), *part.args[1:], **part.kwargs)


def _options(layer: fx.Node) -> dict[str, Any]:
    """The arguments of a layer that are no tensors, by name."""
    operator = row_of(layer)
    return {name: value for name, value in bound_arguments(layer, operator).items() if name not in operator.tensors}


def _operator(value: fx.Node) -> Operator | None:
    """The operator of a function that is a linear layer, whose output has one reader; None for other values."""
    if value.op != "call_function" or not is_layer_of_parameters(value) or node_info(value).module_path is not None:
        return None
    operator = row_of(value)
    return operator if operator.weighs_channels and only_reader(value) is not None else None


def _of_column(part: Any) -> Any:
    """The dense layer of one output whose last dimension a view takes away, and another adds again."""
    is_column = isinstance(part, fx.Node) and adds_last(part) and len(part.all_input_nodes) == 1
    return _of_one_output(part.args[0]) if is_column and only_reader(part) is not None else None


def _of_one_output(part: Any) -> Any:
    """The dense layer of one output whose result, without its last dimension, is `part`."""
    if not is_call_of(part, "select") or part.args[1:] != (-1, 0) or only_reader(part) is None:
        return None
    return part.args[0]


def _merge(program: Program, node: fx.Node, found: _Pieces) -> None:
    pieces = found.layers
    operator, info = row_of(pieces[0]), node_info(node)
    bounds = [bound_arguments(piece, operator) for piece in pieces]
    merger = Merger(program, [], (), node_info(pieces[0]).source)
    weights, biases = ([bound.get(name) for bound in bounds] for name in ("weight", "bias"))
    tensors = [merger.derive(node, f"{info.name}.merged_weight", weight_of_pieces, weights)]
    if any(bias is not None for bias in biases):
        tensors.append(merger.derive(node, f"{info.name}.merged_bias", bias_of_pieces, weights, biases))
    described = replace(
        info,
        operator=operator,
        source=node_info(pieces[0]).source,
        description=operator.name,
        merged=(*info.merged, *(node_info(piece).name for piece in pieces)),
    )
    options = _options(pieces[0]) | ({"groups": found.groups} if found.groups > 1 else {})
    layer = insert_call(program.graph, node, pieces[0].target, (found.source, *tensors), described, options)
    replace_call(node, layer)
    remove_unread(program.graph)
    mark_constants(program.graph)


# --- constants among features ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ConstantFeatures:
    """A layer some of whose features or channels are constant."""

    layer: fx.Node
    cat: fx.Node  # its input
    source: fx.Node  # the same without the constants
    first: int  # the place of the first feature that is none
    size: int  # the number of features that are none
    values: list[tuple[int, Any]]  # the places of the others, and their numbers, or the first place and a parameter

    def merge(self, program: Program) -> None:
        info, operator = node_info(self.layer), row_of(self.layer)
        bound = bound_arguments(self.layer, operator)
        weight, bias = bound["weight"], bound.get("bias")
        merger = Merger(program, [], (), info.source)
        values = [(place, value.make() if isinstance(value, Alone) else value) for place, value in self.values]
        for _, value in values:
            if isinstance(value, fx.Node):
                move_up(value, self.layer)
        kept = merger.derive(self.layer, f"{info.name}.merged_weight", weight_of_features, weight, self.first, self.size)
        bias = merger.derive(self.layer, f"{info.name}.merged_bias", bias_with_constants, weight, bias, values)
        self.layer.args, self.layer.kwargs = (self.source, kept, bias), _options(self.layer)
        update_info(self.layer, merged=(*info.merged, node_info(self.cat).name))
        if not self.cat.users:
            program.graph.erase_node(self.cat)


def _constant_features(program: Program, node: fx.Node) -> _ConstantFeatures | None:
    if not is_layer_of_parameters(node) or row_of(node).linear.weight_layout is WeightLayout.TRANSPOSED_CONVOLUTION:
        return None
    row = row_of(node)
    bound, channels = bound_arguments(node, row), dimension_of_channels(row)
    weight, value = bound["weight"], bound["input"]
    if not isinstance(weight, fx.Node) or not isinstance(value, fx.Node) or bound.get("groups", 1) != 1:
        return None
    if row.linear.weight_layout is WeightLayout.DENSE:
        found = _ones_around(value) or one_among_constants(value)
    else:
        found = one_among_constants(value)
    if found is None:
        return None
    source, before, after, dim = found
    shape = node_info(value).shape
    if dim != channels and (shape is None or dim - len(shape) != channels):
        return None
    features = parameter_value(weight, program.root).shape[1]
    constants = [[_constants(program, one, dim, channels, value) for one in some] for some in (before, after)]
    if any(one is None for some in constants for one in some):
        return None
    first, last = (sum(size for size, _ in filter(None, some)) for some in constants)
    values: list[tuple[int, Any]] = []
    for some, place in zip(constants, (0, features - last), strict=True):
        for size, constant in filter(None, some):
            values += [(place, constant)] if isinstance(constant, Alone) else enumerate(constant, place)
            place += size
    if any(constant != 0 for _, constant in values) and pads(bound.get("padding", 0)):
        return None  # the constants are not those of the padding
    size = features - first - last
    return _ConstantFeatures(node, value, source, first, size, values) if size > 0 else None


def _ones_around(value: fx.Node) -> tuple[fx.Node, list[Any], list[Any], int] | None:
    """The same for padding with a number along the last dimension: each number as a list of what it pads with."""
    if not is_call_of(value, "pad"):
        return None
    bound = bound_arguments(value, row_of(value))
    amounts, number = bound["pad"], bound.get("value") or 0
    plain = (
        isinstance(amounts, (tuple, list)) and len(amounts) == 2 and all(isinstance(one, int) and one >= 0 for one in amounts)
    )
    if not plain or bound.get("mode", "constant") != "constant" or not isinstance(number, (int, float)):
        return None
    before, after = amounts
    return bound["input"], [[float(number)] * before], [[float(number)] * after], -1


def _constants(program: Program, part: Any, dim: int, channels: int, whole: fx.Node) -> tuple[int, list[float] | Alone] | None:
    """How many features a constant part has, and the numbers, or the parameter, that they are in all places."""
    if isinstance(part, list):
        return len(part), part
    number, size = number_filling(part), known_size(part, dim)
    if number is not None:
        return None if size is None else (size, [number] * size)
    alone = alone_of(program, part) if isinstance(part, fx.Node) and not is_data(part) else None
    shape, of_part, of_whole = alone and alone.shape, node_info(part).shape, node_info(whole).shape
    if alone is None or not shape or len(shape) < -channels or of_part is None or of_whole is None:
        return None
    own = [size for place, size in enumerate(shape, -len(shape)) if place != channels]
    is_same_dtype = node_info(part).dtype == node_info(whole).dtype
    return (shape[channels], alone) if set(own) <= {1} and shape[channels] == of_part[channels] and is_same_dtype else None

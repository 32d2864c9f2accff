"""CANONIZE: merge the factors and terms of each output channel that follow a linear layer into its weight and bias."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from lrpfx.ir.kinds import MaxPool
from lrpfx.ir.node import (
    Role,
    ancestors_of,
    calls,
    is_call_of,
    is_data,
    may_be_loaded,
    node_info,
    nodes_in,
    only_reader,
    parameter_value,
    row_of,
    update_info,
)
from lrpfx.ir.operator import NotAContractionError, Operator, Repeats, WeightLayout
from lrpfx.operators.channels import pads
from lrpfx.operators.contractions import added_by_index, keeps_all
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.mixing import keeps_places
from lrpfx.operators.table import operator_named, spelling_of
from lrpfx.passes.canonize.affine_maps import Merger, constant_channels, value_and_constant
from lrpfx.passes.canonize.channel_places import (
    Order,
    Place,
    keeps_channels,
    keeps_entries,
    moved_channels,
    place_of_channels,
    returns_parts,
    uncopied,
)
from lrpfx.passes.canonize.merge_batch_norm import (
    dimensions_of,
    is_layer_of_parameters,
    require_batch_dimensions,
    scale_output_channels,
    scale_output_channels_transposed,
)
from lrpfx.passes.constants import evaluated, number_filling
from lrpfx.passes.normalize.remove_dead_code import remove_unread
from lrpfx.passes.normalize.simplify import keeps
from lrpfx.passes.program import GraphPass, PassResult, Program, insert_call, replace_call
from lrpfx.passes.properties import CANONICAL, OUT_OF_PLACE


def scaled_bias(bias: torch.Tensor | None, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The bias of a layer whose output is scaled and shifted. Shape (channels,)."""
    return shift if bias is None else bias * scale + shift


def channels_of_number(weight: torch.Tensor, sizes: tuple[int, ...], number: float) -> torch.Tensor:
    """The same number for each channel, in the dtype of a weight, in a shape whose other sizes are 1."""
    return weight.new_full(sizes, number)


class MergeScales(GraphPass):
    """Merge constants that scale the output channels of a linear layer, or are added to them, into its weight and bias.

    A bias that is added by hand is the layer's bias, and a batch norm that is written out is part of the layer. So is a
    constant that takes the place of whole channels. The constants may follow views, selections and averages of places, and
    conversions that keep the channels. Positive numbers that only scale the result change no relevance, so they stay.
    """

    name = "merge_scales"
    stage = "canonize"
    requires = (CANONICAL, OUT_OF_PLACE)

    def applies(self, program: Program) -> bool:
        found: dict[fx.Node, Alone | None] = {}
        return any(
            _expanded_constant(program, node, found) is not None
            or _scales_channels(program, node)
            or (is_layer_of_parameters(node) and any(map(_may_merge, _through_views(node))))
            for node in calls(program.graph)
        )

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        alone_of_constants: dict[fx.Node, Alone | None] = {}
        for node in list(calls(program.graph)):
            expanded = _expanded_constant(program, node, alone_of_constants)
            if expanded is not None:
                constant, alone = expanded
                node.replace_input_with(constant, alone.make())
        remove_unread(program.graph)
        for node in list(calls(program.graph)):
            if _scales_channels(program, node):
                result.match(node_info(node).name, "a scale of each channel, as a product")
                _as_product(program, node)
        for node in list(calls(program.graph)):
            if not is_layer_of_parameters(node):
                continue
            chain, reason = _chain(program, node)
            if chain:
                _merge(program, node, chain)
                names = [node_info(one).name for one, _ in chain]
                result.details += [(name, f"merged into {node_info(node).name}") for name in names]
                result.matches += len(chain)
                for one, _ in chain:
                    one.replace_all_uses_with(value_and_constant(one)[0])
                    program.graph.erase_node(one)
            if reason is not None:
                result.reasons.append(reason)
        return result


def _scales_channels(program: Program, node: fx.Node) -> bool:
    """Whether a function is a convolution of one place and each channel alone, and scales the channels of a layer before it."""
    row = node_info(node).operator
    if not is_layer_of_parameters(node) or node_info(node).module_path is not None or row is None:
        return False
    bound = bound_arguments(node, row)
    weight, value = parameter_value(bound["weight"], program.root), bound["input"]
    spatial = row.dimensions.spatial
    plain = row.linear.weight_layout is WeightLayout.CONVOLUTION and weight.shape == (len(weight), *[1] * (1 + spatial))
    if not plain or bound.get("groups", 1) != len(weight) or pads(bound.get("padding", 0)) or "amounts" in bound:
        return False
    stride = bound.get("stride", 1)
    while isinstance(value, fx.Node) and only_reader(value) is not None and keeps_entries(value):
        value = value.args[0]
    is_behind = isinstance(value, fx.Node) and is_layer_of_parameters(value) and only_reader(value) is not None
    return is_behind and set(stride if isinstance(stride, (tuple, list)) else [stride]) == {1}


def channels_first(value: torch.Tensor, dimensions: int) -> torch.Tensor:
    """One value for each channel before some dimensions. Shape (channels, 1, ...)."""
    return value.reshape(-1, *[1] * dimensions)


def _as_product(program: Program, node: fx.Node) -> None:
    row, info = row_of(node), node_info(node)
    bound = bound_arguments(node, row)
    value = bound["input"]
    for name, what in (("mul", bound["weight"]), ("add", bound.get("bias"))):
        if what is not None:
            constant = _insert(program, node, channels_first, (what, row.dimensions.spatial))
            operation = operator_named(name)
            described = replace(info, name=f"{info.name}.{name}", operator=operation, description=name)
            value = insert_call(program.graph, node, operation.canonical, (value, constant), described)
    replace_call(node, value)


@dataclass(frozen=True)
class Alone:
    """A constant without what repeats its entries, to which broadcasting brings it as well."""

    shape: tuple[int, ...]
    make: Callable[[], Any]  # inserts the calls that compute it
    is_number: bool = False


def _expanded_constant(program: Program, node: fx.Node, found: dict[fx.Node, Alone | None]) -> tuple[fx.Node, Alone] | None:
    """A constant in the shape of the value that it scales or shifts, and the same in the shape of its parameters.

    `found`: what there is of constants, since the layers of a network share them, such as angles of positions.
    """
    operator, shape = node_info(node).operator, node_info(node).shape
    if operator is None or not operator.merging.affine_in or len(node.args) != 2 or shape is None:
        return None
    for value, constant in (node.args, node.args[::-1]):
        if not (isinstance(value, fx.Node) and is_data(value) and isinstance(constant, fx.Node)) or is_data(constant):
            continue
        if constant.op == "get_attr" or node_info(value).shape != shape:
            continue
        if constant not in found:
            found[constant] = alone_of(program, constant)
        alone = found[constant]
        if alone is not None and (keeps(value, constant, node) if alone.is_number else _fits(alone.shape, shape)):
            return constant, alone
    return None


def _fits(alone: Sequence[int], shape: Sequence[int] | None) -> bool:
    """Whether broadcasting brings a shape to another one."""
    pairs = zip(reversed(alone), reversed(shape or ()), strict=False)
    return shape is not None and len(alone) <= len(shape) and all(size in (1, after) for size, after in pairs)


def _repeated(value: fx.Node) -> fx.Node | None:
    """What a call repeats, in dimensions that are the last of its result, if it does nothing else."""
    spelling = spelling_of(value)
    name, repeats = ("", None) if spelling is None else (spelling.operator.name, spelling.operator.entries.repeats)
    source, given = next(iter(value.args), None), [*value.args[1:], *value.kwargs.values()]
    if repeats is Repeats.EACH and any(isinstance(one, fx.Node) and node_info(one).shape is not None for one in given):
        return None  # each entry as often as a tensor says
    if name == "getitem" and is_call_of(source, "broadcast_tensors") and isinstance(given[0], int):
        source = (source.args[0] if isinstance(source.args[0], (tuple, list)) else source.args)[given[0]]
        return source if isinstance(source, fx.Node) and not is_data(source) else None
    if spelling is not None and name == "copy":  # into another tensor
        source = bound_arguments(value, spelling.operator)["source"]
        is_same = isinstance(source, fx.Node) and node_info(source).dtype == node_info(value).dtype is not None
        source = source if is_same else None
    elif name in ("stack", "cat") and isinstance(source, (tuple, list)):
        source = source[0] if len(set(source)) == 1 and (name == "cat" or given in ([], [0])) else None
    elif repeats is None:
        source = None
    return source if isinstance(source, fx.Node) else None


def _is_parameter(value: fx.Node) -> bool:
    """Whether a value is a parameter, or computed from parameters alone and not expanded, as by a product with ones."""
    return node_info(value).role is Role.PARAMETER and all(
        _repeated(one) is None and (number_filling(one) is None or node_info(one).shape == ()) for one in ancestors_of(value)
    )


def alone_of(program: Program, constant: Any) -> Alone | None:
    """A constant as a function of the parameters in their own shapes, and of numbers; None if that is unknown."""
    number = number_filling(constant)
    if number is not None or not isinstance(constant, fx.Node):
        return Alone((), lambda: constant if number is None else number, is_number=True)
    alone = _in_order(program, constant) if _is_parameter(constant) else _narrowed(program, constant)
    if alone is not None or node_info(constant).role is not Role.PARAMETER:
        return alone
    value = parameter_value(constant, program.root)
    return Alone(tuple(value.shape), lambda: constant) if isinstance(value, torch.Tensor) else None


def _narrowed(program: Program, constant: fx.Node) -> Alone | None:
    """A constant without what expands it."""
    repeated, spelling = _repeated(constant), spelling_of(constant)
    if repeated is not None:
        alone = alone_of(program, repeated)
        return alone if alone is not None and _fits(alone.shape, node_info(constant).shape) else None
    if spelling is None:
        return None
    row = spelling.operator
    if row.entries.moves or row.outputs.picks or row.name == "embedding":
        viewed = _view_alone(program, constant, row)
        narrows = viewed is not None and viewed.shape != node_info(constant).shape
        return viewed if narrows else _in_order(program, constant) or viewed
    if row.weighs_channels or (row.product.contraction is not None and not row.entries.adds_up):
        return _of_number(program, constant, row)
    fills = row.name == "outer" and number_filling(constant.args[0]) is not None
    found = [alone_of(program, one) for one in constant.args if keeps_places(row) or fills]
    parts = [one for one in found if one is not None]
    if constant.kwargs or len(parts) < len(constant.args) or all(one.is_number for one in parts):
        return None
    shape = torch.broadcast_shapes(*(one.shape for one in parts))
    target = torch.mul if fills else constant.target
    return Alone(tuple(shape), lambda: _insert(program, constant, target, tuple(one.make() for one in parts)))


def _view_alone(program: Program, view: fx.Node, row: Operator) -> Alone | None:
    """The view of a constant alone: one that moves or adds dimensions, or whose one size of the run follows from the others."""
    (source, *_) = view.args
    if not isinstance(source, fx.Node):
        return None
    alone, before, shape = alone_of(program, source), node_info(source).shape, node_info(view).shape
    if alone is None or alone.is_number or before is None or shape is None or view.kwargs or row.name == "embedding":
        return None
    given: Any = view.args[1:]
    sizes = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    if row.name in ("view", "reshape") and alone.shape == before:
        unknown = [isinstance(one, fx.Node) for one in sizes]
        if sum(unknown) > 1 or len(sizes) != len(shape) or (any(unknown) and -1 in sizes):
            return None
        given = (tuple(-1 if isinstance(one, fx.Node) else one for one in sizes),)
    elif not (keeps_all(view) or (row.outputs.picks and _adds_dimensions(given[0]))) and (
        row.dimensions.dimension_before is None or row.dimensions.squeezes
    ):
        return None
    if nodes_in(given) or not callable(view.target):
        return None
    added = (None,) * (len(before) - len(alone.shape))
    shape = view.target(torch.empty(alone.shape)[added], *given).shape

    def make() -> fx.Node:
        program.fixed_dimensions = True
        source = alone.make()
        source = _insert(program, view, operator.getitem, (source, added)) if added else source
        return _insert(program, view, view.target, (source, *given))

    return Alone(tuple(shape), make)


def entries_of(value: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The entries of a tensor at these places, counted from its first entry to its last, in the shape of the places."""
    return value.flatten()[places.to(value.device)]


def _in_order(program: Program, constant: fx.Node) -> Alone | None:
    """A parameter whose entries repetitions, views and indices only repeat, as in b.repeat(n).view(n, -1)."""
    shape = node_info(constant).shape
    source: Any = constant
    while (place := _place_of_entries(source)) is not None and isinstance(source.args[place], fx.Node):
        if _picks_by_sizes(source, place):
            return None
        source = source.args[place]
    is_known = isinstance(source, fx.Node) and _is_parameter(source)
    value = parameter_value(source, program.root) if is_known else None
    if shape is None or not isinstance(value, torch.Tensor) or not value.numel():
        return None
    held = [one for one in ancestors_of(constant) if one.op == "get_attr" and not may_be_loaded(one, program.root)]
    known = {one: parameter_value(one, program.root) for one in held}
    try:
        places = evaluated(constant, {**known, source: torch.arange(value.numel()).view(value.shape)})
    except (RuntimeError, TypeError, ValueError, IndexError):  # sizes that only a run knows
        return None
    if not isinstance(places, torch.Tensor) or places.is_meta or places.shape != torch.Size(shape):
        return None
    for dim in range(places.ndim):
        first = places.narrow(dim, 0, 1)
        places = first if torch.equal(places, first.expand_as(places)) else places
    if places.numel() == math.prod(shape) or len(set(places.flatten().tolist())) < places.numel():
        return None
    whole = places.flatten().tolist() == list(range(value.numel()))

    def make() -> fx.Node:
        program.fixed_dimensions = True
        program.rely_on(held)
        if whole:
            return _insert(program, constant, torch.reshape, (source, tuple(places.shape)))
        return _insert(program, constant, entries_of, (source, places))

    return Alone(tuple(places.shape), make)


def _picks_by_sizes(node: fx.Node, place: int) -> bool:
    """Whether a call picks entries at places that follow from sizes of the run, such as the positions of a sequence."""
    spelling = spelling_of(node)
    if spelling is None:
        return False
    row = spelling.operator
    if row.entries.repeats is not None or not (row.outputs.picks or row.entries.indexes or row.entries.gathers or place):
        return False
    for index in nodes_in([argument for number, argument in enumerate(node.args) if number != place]):
        while (repeated := _repeated(index)) is not None:
            index = repeated
        if node_info(index).role is Role.METADATA and number_filling(index) is None:  # zeros are so in every run
            return True
    return False


def _place_of_entries(node: Any) -> int | None:
    """The place of the argument whose entries a call only moves or repeats; None for other calls."""
    spelling = spelling_of(node) if isinstance(node, fx.Node) else None
    if spelling is None or not node.args:
        return None
    row = spelling.operator
    if row.name == "embedding":
        return 1
    return 0 if row.entries.moves or row.entries.repeats or row.outputs.picks else None


def layer_of_number(weight: torch.Tensor, bias: torch.Tensor | None, number: float) -> torch.Tensor:
    """The output of a linear layer for inputs that are all the same number. Shape (channels, 1, ...)."""
    added = weight.flatten(1).sum(1) * number
    return (added if bias is None else added + bias).reshape(-1, *[1] * (weight.ndim - 2))


def product_of_number(matrix: torch.Tensor, equation: str, number: float, shape: tuple[int, ...]) -> torch.Tensor:
    """A product of a matrix and a tensor of one number, as sums of the matrix in the given shape."""
    return (torch.einsum(equation, matrix) * number).reshape(shape)


def _of_number(program: Program, constant: fx.Node, row: Operator) -> Alone | None:
    """A linear layer of parameters, or a product with one, whose other operand is a tensor of one number."""
    if row.product.contraction is not None and not row.weighs_channels:
        return _product_of_number(program, constant, row)
    bound = bound_arguments(constant, row)
    number, parameters = number_filling(bound.get("input")), [bound.get("weight"), bound.get("bias")]
    if number is None or not all(one is None or (isinstance(one, fx.Node) and _is_parameter(one)) for one in parameters):
        return None
    if row.linear.weight_layout is WeightLayout.TRANSPOSED_CONVOLUTION or (number and pads(bound.get("padding", 0))):
        return None
    weight = parameter_value(bound["weight"], program.root)
    shape = (len(weight), *[1] * (weight.ndim - 2))
    return Alone(shape, lambda: _insert(program, constant, layer_of_number, (*parameters, number)))


def _product_of_number(program: Program, constant: fx.Node, row: Operator) -> Alone | None:
    assert row.product.contraction is not None
    try:
        found = row.product.contraction(constant, lambda value: _rank(program, value))
    except NotAContractionError:
        return None
    if 0 in map(number_filling, found.operands):
        return Alone((), lambda: 0.0, is_number=True)
    for matrix, own, filled, other in zip(found.operands, found.labels, found.operands[::-1], found.labels[::-1], strict=True):
        number, kept = number_filling(filled), [letter for letter in found.result if letter in own]
        if number is None or not isinstance(matrix, fx.Node) or not _is_parameter(matrix) or "." in own or not kept:
            continue
        behind = found.result[found.result.index(kept[0]) :]
        if "." in behind or len(set(own)) < len(own) or set(other) - set(own) - set(found.result):
            continue
        sizes = dict(zip(own, parameter_value(matrix, program.root).shape, strict=True))
        shape = tuple(sizes.get(letter, 1) for letter in behind)
        equation = f"{own}->{''.join(kept)}"
        return Alone(shape, partial(_insert, program, constant, product_of_number, (matrix, equation, number, shape)))
    return None


def _rank(program: Program, value: Any) -> int | None:
    if isinstance(value, fx.Node) and node_info(value).role is Role.PARAMETER:
        return int(parameter_value(value, program.root).ndim)
    shape = node_info(value).shape if isinstance(value, fx.Node) else None
    return None if shape is None else len(shape)


def _adds_dimensions(index: Any) -> bool:
    return added_by_index(index if isinstance(index, tuple) else (index,)) is not None


def _insert(
    program: Program, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    info = replace(node_info(node), name=f"{node_info(node).name}.narrowed", role=Role.PARAMETER, shape=None)
    return insert_call(program.graph, node, target, args, info, kwargs)


def _through_views(value: fx.Node) -> list[fx.Node]:
    """The readers of a value, through views, one after another."""
    found = []
    user = only_reader(value)
    while user is not None:
        found.append(user)
        operator = node_info(user).operator
        user = only_reader(user) if operator is not None and _may_keep_channels(operator) else None
    return found


def _reader(value: fx.Node) -> fx.Node | None:
    """The only call that reads the entries of a value, or of one of several parts of it."""
    user = only_reader(value)
    return only_reader(user) if user is not None and returns_parts(user) else user


def _may_keep_channels(operator: Operator) -> bool:
    return keeps_channels(operator) or issubclass(operator.kind, MaxPool)


def _may_merge(node: fx.Node) -> bool:
    return value_and_constant(node) != (None, None) or _filled(node) is not None or _with_size(node) is not None


def _with_size(node: fx.Node) -> fx.Node | None:
    """The operand of a sum, product or quotient whose other operand is computed from sizes of the run; None for other calls."""
    row = node_info(node).operator if node.op == "call_function" else None
    values = [one for one in node.all_input_nodes if is_data(one)]
    if row is None or not row.merging.affine_in or len(values) != 1:
        return None
    return values[0] if Role.METADATA in {node_info(one).role for one in node.all_input_nodes} else None


#: Calls that write constants at fixed places of a value, besides those whose rows say what they choose between.
_WRITES = ("index_fill", "index_put")


def _filled(node: fx.Node) -> fx.Node | None:
    """The value of which a call replaces entries by constants, at places that no input changes; None for other calls."""
    row = node_info(node).operator if node.op == "call_function" else None
    if row is None or not (row.entries.chooses or row.name in _WRITES):
        return None
    values = [one for one in node.all_input_nodes if is_data(one)]
    others = {node_info(one).role for one in node.all_input_nodes if one not in values}
    return values[0] if len(values) == 1 and others <= {Role.PARAMETER, Role.METADATA} else None


#: Affine operations on the channels of a layer, and which entry of the constant of each is that of a channel.
_Chain = list[tuple[fx.Node, Order]]


def _chain(program: Program, layer: fx.Node) -> tuple[_Chain, tuple[str, str] | None]:
    """The affine operations on the channels of a layer's output, and why the next one, if any, is left alone."""
    if not any(map(_may_merge, _through_views(layer))):
        return [], None
    operator = row_of(layer)
    bound = bound_arguments(layer, operator)
    weight = parameter_value(bound["weight"], program.root)
    place = place_of_channels(operator)
    channels = output_channels(weight, operator, bound.get("groups", 1))
    found: _Chain = []
    value, reason, behind_maximum = layer, None, False
    while (user := _reader(value)) is not None:
        row = node_info(user).operator
        if row is not None and _may_keep_channels(row):
            if issubclass(row.kind, MaxPool):
                moved, behind_maximum = _behind_maximum(program, value, user, place), True
            else:
                moved = moved_channels(program, value, user, place)
            if moved is None:
                if any(map(_may_merge, _through_views(user))):
                    reason = (node_info(user).name, f"the channels of {node_info(layer).name} are not known behind it")
                break
            place, value = moved, user
            continue
        if _filled(user) is value:
            refused = "it fills the result of a max pooling"
            affine = refused if behind_maximum else _as_affine(program, layer, user, value, place, channels)
            if isinstance(affine, str):
                reason = (node_info(user).name, affine)
                break
            user = affine
        if _with_size(user) is value and any(map(_may_merge, _through_views(user))):
            reason = (node_info(user).name, "its constant is computed from sizes that only a run knows; pass a number")
        if value_and_constant(user)[0] is not value:
            break
        problem = _problem(program, layer, user, place, channels, weight)
        if behind_maximum and _factor(user) != 1:
            problem = "it scales the result of a max pooling, which negative factors do not commute with"
        if problem is not None:
            reason = (node_info(user).name, problem)
            break
        found.append((user, place.order))
        value = user
    while found and only_scales(found[-1][0]):
        found.pop()
    return found, reason


def _as_affine(program: Program, layer: fx.Node, node: fx.Node, value: fx.Node, place: Place, channels: int) -> fx.Node | str:
    """Write constants in place of whole channels of a value as a product and a sum.

    Returns the product, or the reason why there is none. Infinite constants, such as those of masks of scores, are no bias.
    """
    info, row = node_info(node), row_of(node)
    weight, shape = bound_arguments(layer, row_of(layer))["weight"], node_info(value).shape
    others = [one for one in node.all_input_nodes if one is not value]
    constants = {one: alone_of(program, one) if row.entries.chooses else None for one in others}
    if shape is not None:
        sizes = tuple(size if dim - len(shape) in place.dims else 1 for dim, size in enumerate(shape))
    elif row.entries.chooses and len(place.dims) == 1:
        sizes = (place.size(channels), *[1] * (-1 - place.dims[0]))
    else:
        return "the shape of its operand is not known; pass example_inputs"
    unknown = None in constants.values() if row.entries.chooses else any(node_info(one).role is Role.METADATA for one in others)
    if unknown or info.dtype != node_info(value).dtype:
        return "it is not known to fill whole channels"
    made = {one: one if alone is None else alone.make() for one, alone in constants.items()}

    def result_for(number: float) -> fx.Node:
        filled = made | {value: _insert(program, node, channels_of_number, (weight, sizes, number))}
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), filled.__getitem__)
        return _insert(program, node, node.target, args, kwargs)

    shift = result_for(0.0)
    scale = _insert(program, node, torch.sub, (result_for(1.0), shift))
    try:
        is_finite = bool(parameter_value(scale, program.root).isfinite().all())
        tensor = parameter_value(weight, program.root)
        problems = [_problem_of(program, layer, value, one, place, channels, tensor) for one in (scale, shift)]
    except (RuntimeError, TypeError, ValueError, IndexError):  # constants of other shapes than channels have
        is_finite, problems = True, ["it is not known to fill whole channels"]
    problem = next(filter(None, problems), None if is_finite else "it fills channels with a number that is not finite")
    if problem is not None:
        remove_unread(program.graph)
        return problem
    total: Any = value
    for name, what in (("mul", scale), ("add", shift)):
        operation = operator_named(name)
        described = replace(info, name=f"{info.name}.{name}", operator=operation, description=name)
        total = insert_call(program.graph, node, operation.canonical, (total, what), described)
    product: fx.Node = total.args[0]
    replace_call(node, total)
    return product


def _behind_maximum(program: Program, value: fx.Node, pooling: fx.Node, place: Place) -> Place | None:
    """Where the channels are behind a max pooling over places, which commutes with sums; None if it is over channels."""
    shape, after = node_info(value).shape, node_info(pooling).shape
    if pooling.args[0] is not value or shape is None or after is None or place.dims != (1 - len(shape),):
        return None
    if row_of(pooling).dimensions.spatial != len(shape) - 2 or len(after) != len(shape):
        return None
    program.fixed_dimensions = True
    return place


def output_channels(weight: torch.Tensor, operator: Operator, groups: int) -> int:
    transposed = operator.linear.weight_layout is WeightLayout.TRANSPOSED_CONVOLUTION
    return weight.shape[1] * groups if transposed else weight.shape[0]


def only_scales(node: fx.Node) -> bool:
    """Whether an operation multiplies with, or divides by, a positive number."""
    constant = value_and_constant(node)[1]
    return row_of(node).merging.coefficients is None and isinstance(constant, (int, float)) and constant > 0


def _problem(program: Program, layer: fx.Node, node: fx.Node, place: Place, channels: int, weight: torch.Tensor) -> str | None:
    """The reason why the constant of `node` does not scale or shift the channels of a layer; None if it does.

    `place`: the dimensions of the channels, from the end. A view may have split them into several, and moved them apart.
    """
    value, constant = value_and_constant(node)
    return _problem_of(program, layer, value, constant, place, channels, weight)


def _problem_of(
    program: Program, layer: fx.Node, value: fx.Node, constant: Any, place: Place, channels: int, weight: torch.Tensor
) -> str | None:
    """The reason why a constant does not scale or shift the channels of a layer in `value`; None if it does."""
    if not isinstance(constant, fx.Node):
        is_number = isinstance(constant, (int, float)) and not isinstance(constant, bool)
        return None if constant is None or is_number else f"its constant is {constant!r}"
    tensor = parameter_value(constant, program.root)
    if isinstance(tensor, (int, float)):
        return None
    keeps_dtype = isinstance(tensor, torch.Tensor) and torch.promote_types(tensor.dtype, weight.dtype) == weight.dtype
    if not isinstance(tensor, torch.Tensor) or (tensor.ndim and not keeps_dtype):
        return "its constant has another dtype than the weight"
    if tensor.device != weight.device and tensor.ndim:
        return "its constant is on another device than the weight"
    sizes, size = {number - tensor.ndim: size for number, size in enumerate(tensor.shape)}, place.size(channels)
    own = math.prod(size for number, size in sizes.items() if number in place.dims)
    if own not in (1, size) or any(size != 1 for number, size in sizes.items() if number not in place.dims):
        return f"its constant has shape {tuple(tensor.shape)}, which is not one value for each channel"
    if tensor.ndim > max((-number for number in place.dims), default=0):
        operator, dimensions = row_of(layer), dimensions_of(program, value)
        if (
            dimensions is None
            and uncopied(value) is layer
            and tensor.ndim == operator.rank_of_batch
            and operator.dimensions.spatial
        ):
            require_batch_dimensions(program.graph, layer, operator)
        elif dimensions is None or tensor.ndim > dimensions:
            return "it may add dimensions to its operand, whose number is not known; pass example_inputs"
    return None


def _merge(program: Program, layer: fx.Node, chain: _Chain) -> None:
    operator, info = row_of(layer), node_info(layer)
    bound = bound_arguments(layer, operator)
    weight, bias, groups = bound["weight"], bound.get("bias"), bound.get("groups", 1)
    channels = output_channels(parameter_value(weight, program.root), operator, groups)
    added = _plain_bias(program, chain, channels, weight) if bias is None else None
    if added is not None:
        next(calls(program.graph)).prepend(added)
        _set_parameters(layer, weight, added, [chain[0][0]])
        return
    operations = [node for node, _ in chain]
    merger = Merger(program, [], (), node_info(operations[0]).source)
    scale: Any = merger.derive(layer, f"{info.name}.scale", constant_channels, weight, channels, 1.0)
    shift: Any = merger.derive(layer, f"{info.name}.shift", constant_channels, weight, channels, 0.0)
    for node, order in chain:
        scale, shift = merger.composed(node, scale, shift, channels, before=layer, order=order)
    merge_into_layer(merger, layer, scale, shift, operations, scales=any(_factor(node) != 1 for node in operations))


def merge_into_layer(
    merger: Merger, layer: fx.Node, scale: fx.Node, shift: fx.Node, chain: Sequence[fx.Node], scales: bool = True
) -> None:
    """Scale and shift the output channels of a layer, in its weight and bias, in place of the operations of a chain."""
    operator, info = row_of(layer), node_info(layer)
    bound = bound_arguments(layer, operator)
    weight, bias = bound["weight"], bound.get("bias")
    if scales and operator.linear.weight_layout is WeightLayout.TRANSPOSED_CONVOLUTION:
        args = (weight, scale, bound.get("groups", 1))
        weight = merger.derive(layer, f"{info.name}.merged_weight", scale_output_channels_transposed, *args)
    elif scales:
        weight = merger.derive(layer, f"{info.name}.merged_weight", scale_output_channels, weight, scale)
    bias = merger.derive(layer, f"{info.name}.merged_bias", scaled_bias, bias, scale, shift)
    _set_parameters(layer, weight, bias, chain)


def _set_parameters(layer: fx.Node, weight: fx.Node, bias: fx.Node, chain: Sequence[fx.Node]) -> None:
    info = node_info(layer)
    layer.args = (layer.args[0], weight, bias)
    layer.kwargs = {name: value for name, value in layer.kwargs.items() if name not in row_of(layer).tensors}
    update_info(layer, merged=(*info.merged, *(node_info(node).name for node in chain)))


def _plain_bias(program: Program, chain: _Chain, channels: int, weight: fx.Node) -> fx.Node | None:
    """The parameter that a chain adds, if it does nothing else and has the dtype of the weight."""
    first, order = chain[0]
    coefficients = row_of(first).merging.coefficients
    constant = value_and_constant(first)[1]
    if len(chain) > 1 or order is not None or coefficients is None or coefficients(first.kwargs.get("alpha", 1)) != (1, 1):
        return None
    if not isinstance(constant, fx.Node) or constant.op != "get_attr":
        return None
    value, dtype = parameter_value(constant, program.root), parameter_value(weight, program.root).dtype
    return constant if value.shape == (channels,) and value.dtype == dtype else None


def _factor(node: fx.Node) -> Any:
    """The number that an affine operation multiplies its operand with, or None if it is not a number that the graph shows."""
    coefficients = row_of(node).merging.coefficients
    if coefficients is None:
        return None
    factors = coefficients(node.kwargs.get("alpha", 1))
    return factors[0] if node.args[0] is value_and_constant(node)[0] else factors[1]

"""NORMALIZE: turn every product with a matrix of parameters into a dense layer, however it is written."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lrpfx.ir.node import (
    Role,
    calls,
    function_name,
    is_call_of,
    is_data,
    is_learned,
    node_info,
    nodes_in,
    parameter_value,
    row_of,
    sources_of_dimensions,
)
from lrpfx.ir.operator import Contraction, NotAContractionError, Operator, Repeats
from lrpfx.operators.contractions import keeps_dimensions, summed_dimensions
from lrpfx.operators.layer import bound_arguments
from lrpfx.operators.table import spelling_of
from lrpfx.passes.canonize.merge_batch_norm import dimensions_of
from lrpfx.passes.normalize.call_builder import CallBuilder
from lrpfx.passes.normalize.decompose import views_to_reshapes
from lrpfx.passes.normalize.patches import patches_in
from lrpfx.passes.program import GraphPass, PassResult, Program, replace_call
from lrpfx.passes.properties import CANONICAL, DECOMPOSED
from lrpfx.support.tensors import is_floating

_NOT_LEARNED = "its matrix is not learned, and mixes places, as that of a graph does"


class FindLinear(GraphPass):
    """Replace contractions with parameters by dense layers: matmul, einsum, tensordot, inner and sums of products.

    The parameters may be masked, scaled or standardized: they stay arithmetic in the graph. A matrix that is expanded to one
    for each sample is one matrix. Parameters with one matrix for each entry of a dimension become a `selected_linear`.
    """

    name = "find_linear"
    stage = "normalize"
    requires = (CANONICAL, DECOMPOSED)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        for node in list(calls(program.graph)):
            info = node_info(node)
            row = info.operator
            if is_call_of(node, "linear") and info.module_path is None:
                self._replace_patches(program, node, result)
                continue
            if row is None or row.product.contraction is None or info.role is not Role.DATA or not _has_weight(node):
                continue
            found, fixed = _Weights(program), program.fixed_dimensions
            try:
                if _diagonal_of(node) is not None:
                    raise NotAContractionError("its matrix is diagonal")
                if _mixes_places(program, node):
                    raise NotAContractionError(_NOT_LEARNED)
                dense = _Dense(found, row.product.contraction(node, found.rank))
            except NotAContractionError as reason:
                program.fixed_dimensions = fixed
                other = (
                    _with_selected_matrices(program, node, row)
                    or _as_scale(program, node, row, found)
                    or _as_matrix_product(program, node, row, found)
                )
                if other is not None:
                    result.match(info.name, f"{row}: now {row_of(other)}")
                    product = node.args[0]
                    replace_call(node, other)
                    _erase_product(program, row, product)
                elif not row.entries.adds_up:  # a product that may be a layer, unlike most sums
                    result.reasons.append((info.name, str(reason)))
                continue
            build, product = CallBuilder(program, node, row), node.args[0]
            new = dense.convolution(build) or dense.build(build)
            if row.entries.adds_up and keeps_dimensions(node):
                for dim in sorted(summed_dimensions(node, found.rank)):
                    new = build.call("unsqueeze", new, dim, target=torch.unsqueeze)
            replace_call(node, new)
            result.match(info.name, f"{row}: now {node_info(dense.layer).name}")
            _erase_product(program, row, product)
        if result.matches:
            views_to_reshapes(program.graph)
        return result

    def _replace_patches(self, program: Program, node: fx.Node, result: PassResult) -> None:
        """Replace a function that is a dense layer by a convolution, if its inputs are the columns of `unfold`."""
        value, weight, *bias = bound_arguments(node, row_of(node)).values()
        try:
            dense = _Dense(_Weights(program), Contraction((value, weight), (".i", "oi"), ".o"))
        except NotAContractionError:
            return
        new = dense.convolution(CallBuilder(program, node, row_of(node)), *bias)
        if new is not None:
            result.match(node_info(node).name, f"linear: now {node_info(dense.layer).name}")
            replace_call(node, new)


def _erase_product(program: Program, row: Operator, product: Any) -> None:
    """Remove the product whose entries a call added up, unless its shape is read as well."""
    if row.entries.adds_up and isinstance(product, fx.Node) and not product.users:
        program.graph.erase_node(product)


def _has_weight(node: fx.Node) -> bool:
    """Whether a call, or the product that it adds up, may have one operand with relevance and one without."""
    row = node_info(node).operator
    if row is not None and row.entries.adds_up:
        node_or_none = node.args[0] if node.args else None
        if not isinstance(node_or_none, fx.Node) or node_or_none.target is not torch.mul:
            return False
        node = node_or_none
    return sum(map(is_data, node.all_input_nodes)) == 1 and len(node.all_input_nodes) > 1


def _with_selected_matrices(program: Program, node: fx.Node, row: Operator) -> fx.Node | None:
    """A dense layer with matrices of parameters that integers choose, perhaps inputs; None for other products."""
    if row.name != "matmul":
        return None
    first, last = node.args[:2]
    if is_data(first) and _is_looked_up(last):
        return CallBuilder(program, node, row).call("selected_linear", first, last, label="")
    if is_data(last) and _is_looked_up(first):
        return CallBuilder(program, node, row).call("selected_linear_of_columns", last, first, label="")
    return None


def _mixes_places(program: Program, node: fx.Node) -> bool:
    """Whether a product has a matrix on the left that no parameter is a part of, such as the neighbours of nodes."""
    if not is_call_of(node, "matmul") or is_data(node.args[0]) or not isinstance(node.args[0], fx.Node):
        return False
    return not is_learned(node.args[0], program.root)


def _diagonal_of(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The data and the parameter of a product with a diagonal matrix on the right."""
    if not is_call_of(node, "matmul") or len(node.args) < 2:
        return None
    data, matrix = node.args[:2]
    if not isinstance(data, fx.Node) or not is_data(data) or not isinstance(matrix, fx.Node) or matrix.kwargs:
        return None
    vector = matrix.args[0] if len(matrix.args) == 1 else None
    is_diagonal = function_name(matrix) in ("diag", "diag_embed", "diagflat")
    return (data, vector) if is_diagonal and isinstance(vector, fx.Node) else None


def _as_scale(program: Program, node: fx.Node, row: Operator, weights: "_Weights") -> fx.Node | None:
    """A product with one number of a parameter for each entry of some dimensions, such as einsum("bi,i->bi")."""
    diagonal = _diagonal_of(node)
    if diagonal is not None:
        data, vector = diagonal
        is_vector = node_info(vector).role is Role.PARAMETER and parameter_value(vector, program.root).ndim == 1
        return CallBuilder(program, node, row).call("mul", data, vector, label="") if is_vector else None
    try:
        assert row.product.contraction is not None
        contraction = row.product.contraction(node, weights.rank)
    except NotAContractionError:
        return None
    place = int(is_data(contraction.operands[0]))
    operand, weight = contraction.operands[1 - place], contraction.operands[place]
    labels, own = contraction.labels[1 - place], contraction.labels[place]
    if row.entries.adds_up or not is_data(operand) or labels != contraction.result or not own or "." in own:
        return None
    if not isinstance(weight, fx.Node) or node_info(weight).role is not Role.PARAMETER:
        return None
    kept = labels.partition(".")[2] or labels
    in_order = [letter for letter in kept if letter in own] == list(own) and len(set(labels)) == len(labels)
    if not in_order or weights.dtypes_differ(operand, weight):
        return None
    build, sizes = CallBuilder(program, node, row), dict(zip(own, parameter_value(weight, program.root).shape, strict=True))
    factors = tuple(sizes.get(letter, 1) for letter in kept[kept.index(own[0]) :])
    if factors != tuple(sizes.values()):
        weight = build.call("reshape", weight, factors, target=torch.reshape)
    return build.call("mul", operand, weight, label="")


def _as_matrix_product(program: Program, node: fx.Node, row: Operator, weights: "_Weights") -> fx.Node | None:
    """A sum of products with a matrix that is not learned, such as that of the groups of messages, as an einsum."""
    try:
        assert row.product.contraction is not None
        found = row.product.contraction(node, weights.rank) if row.entries.adds_up and not keeps_dimensions(node) else None
    except NotAContractionError:
        found = None
    if found is None:
        return None
    place = int(is_data(found.operands[1]))
    data, matrix = found.operands[place], found.operands[1 - place]
    labels, own = found.labels[place], found.labels[1 - place]
    summed, kept = set(own) - set(found.result), set(own) & set(found.result)
    is_matrix = len(summed) == len(kept) == 1 and len(own) == 2 and summed <= set(labels) and not kept & set(labels)
    if not is_matrix or set(labels) - set(found.result) != summed or not isinstance(matrix, fx.Node):
        return None
    build, dtype, other = CallBuilder(program, node, row), weights.dtype(data), weights.dtype(matrix)
    if dtype is None or other is None or (dtype != other and other.is_floating_point):
        return None
    if dtype != other:
        matrix = build.call("to", matrix, build.dtype_of(data), target=torch.Tensor.to)
    equation = f"{own},{labels}->{found.result}"
    return build.call("einsum", equation, matrix, data, target=torch.einsum)


def _is_looked_up(value: Any) -> bool:
    """Whether a value consists of entries of a parameter."""
    chosen = False
    while isinstance(value, fx.Node) and node_info(value).role in (Role.CONSTANT, Role.DISCRETE, Role.METADATA):
        spelling = spelling_of(value)
        if spelling is None or not (spelling.operator.entries.moves or spelling.operator.entries.converts) or not value.args:
            return False
        row = spelling.operator
        chosen = chosen or bool(row.indices) or (row.entries.indexes and bool(nodes_in(value.args[1:])))
        value = value.args[0]
    return chosen and isinstance(value, fx.Node) and node_info(value).role is Role.PARAMETER


class _Weights:
    """What is known about the operands of a product."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def rank(self, value: Any) -> int | None:
        """The number of dimensions of an operand, or None if it is unknown."""
        if not isinstance(value, fx.Node):
            return None
        if node_info(value).role is Role.PARAMETER:
            found = parameter_value(value, self.program.root)
            return found.ndim if isinstance(found, torch.Tensor) else None
        expanded = self._expanded(value)
        return dimensions_of(self.program, value) if expanded is None else expanded[1]

    def shape(self, value: fx.Node) -> tuple[int, ...] | None:
        return node_info(value).shape

    def dtype(self, value: fx.Node) -> torch.dtype | None:
        is_parameter = node_info(value).role is Role.PARAMETER
        return parameter_value(value, self.program.root).dtype if is_parameter else node_info(value).dtype

    def dtypes_differ(self, data: fx.Node, weight: fx.Node) -> bool:
        """Whether a product converts one of its operands, which a layer does not."""
        dtype = node_info(data).dtype
        return dtype is not None and dtype != self.dtype(weight)

    def one_matrix(self, value: fx.Node, labels: str, data: fx.Node, of_data: str) -> tuple[fx.Node, torch.Size, str]:
        """A parameter without the dimensions over which it is expanded: node, shape and labels.

        `NotAContractionError` unless the value is a parameter, or one that is expanded to a size that the data have.
        """
        expanded = self._expanded(value)
        source = value if expanded is None else expanded[0]
        added = "" if expanded is None else labels[: expanded[2]]
        shapes = self.shape(value), self.shape(data)
        for place, letter in enumerate(added):
            sizes = [shape[at] for shape, at in zip(shapes, (place, of_data.find(letter)), strict=True) if shape is not None]
            if letter not in of_data or len(set(sizes)) > 1:
                raise NotAContractionError("its parameter is expanded to a size that its other operand does not have")
        if node_info(source).role is not Role.PARAMETER:
            raise NotAContractionError("its constant operand is not a parameter")
        tensor = parameter_value(source, self.program.root)
        if not is_floating(tensor) or tensor.layout is not torch.strided:
            raise NotAContractionError("its constant operand is not a dense tensor of floating-point numbers")
        kept = labels[len(labels) - tensor.ndim :]
        if len(kept) != tensor.ndim or "." in kept:
            raise NotAContractionError("the dimensions of its parameter are not known")
        return source, tensor.shape, kept

    def _expanded(self, value: fx.Node) -> tuple[fx.Node, int, int] | None:
        """The parameter that is expanded along its first dimensions, the number of dimensions of the result, and of those."""
        spelling = spelling_of(value)
        if value.op != "call_function" or spelling is None or node_info(value).role not in (Role.METADATA, Role.PARAMETER):
            return None
        source, sizes = value.args[0], value.args[1:]
        if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
            sizes = tuple(sizes[0])
        repeats = spelling.operator.entries.repeats
        if repeats not in (Repeats.BROADCAST, Repeats.TILES) or not isinstance(source, fx.Node):
            return None
        if node_info(source).role is not Role.PARAMETER:
            return None
        tensor = parameter_value(source, self.program.root)
        matrix = tensor
        while matrix.ndim > 2 and matrix.shape[0] == 1:
            matrix = matrix[0]
        if len(sizes) < matrix.ndim:
            return None
        unchanged = 1 if repeats is Repeats.TILES else -1
        own = sizes[len(sizes) - matrix.ndim :]
        for size, given in zip(matrix.shape, own, strict=True):
            if not (given == unchanged or (unchanged == -1 and given == size)):
                return None
        return source, len(sizes), len(sizes) - matrix.ndim


class _Dense:
    """A dense layer that computes a contraction: which dimensions it reads, adds and shares with its weight."""

    def __init__(self, weights: _Weights, contraction: Contraction) -> None:
        self.of_weight = int(is_data(contraction.operands[0]))  # which operand is the weight
        self.data = contraction.operands[1 - self.of_weight]
        weight = contraction.operands[self.of_weight]
        if not is_data(self.data) or not isinstance(weight, fx.Node) or is_data(weight):
            raise NotAContractionError("not one of its operands alone depends on the input")
        self.labels, self.result = contraction.labels[1 - self.of_weight], contraction.result
        labels = self._without_dot(weights, contraction.labels[self.of_weight], weights.rank(weight))
        self.weight, self.shape, self.own = weights.one_matrix(weight, labels, self.data, self.labels)
        if weights.dtypes_differ(self.data, self.weight):
            raise NotAContractionError("its operands have different dtypes")
        self._drop_expanded(weights)
        self._check(weights)
        self.inputs = [letter for letter in self.own if letter in self.labels and letter not in self.result]
        self.outputs = [letter for letter in self.own if letter not in self.labels]
        self.shared = [letter for letter in self.own if letter in self.labels and letter in self.result]
        if not self.inputs:
            raise NotAContractionError("it sums over no dimension of its parameter")
        if self.labels[-1] not in self.inputs and not is_learned(weight, weights.program.root):
            raise NotAContractionError(_NOT_LEARNED)

    def _without_dot(self, weights: _Weights, labels: str, rank: int | None) -> str:
        """The labels of the weight, with letters for the dimensions for which a dot stands."""
        if "." not in labels:
            return labels
        if rank is None:
            raise NotAContractionError("the dimensions of its parameter are not known")
        letters = _FURTHER[len(_FURTHER) - rank + len(labels) - 1 :]
        if "." not in self.labels:
            self.result = self.result.replace(".", letters)
        elif letters:
            of_data = weights.rank(self.data)
            if of_data is None:
                raise NotAContractionError("the number of dimensions of its operands is not known; pass example_inputs")
            own = _FURTHER[len(_FURTHER) - of_data + len(self.labels) - 1 :]
            self.labels, self.result = self.labels.replace(".", own), self.result.replace(".", max(own, letters, key=len))
        return labels.replace(".", letters)

    def _drop_expanded(self, weights: _Weights) -> None:
        """Leave out dimensions of the weight along which all its entries are the same, and which the data have as well."""
        tensor = parameter_value(self.weight, weights.program.root)
        self.dropped = [
            place
            for place, letter in enumerate(self.own)
            if letter in self.labels and letter in self.result and (tensor.stride(place) == 0 or tensor.shape[place] == 1)
        ]
        self.own = "".join(letter for place, letter in enumerate(self.own) if place not in self.dropped)
        self.shape = torch.Size(size for place, size in enumerate(self.shape) if place not in self.dropped)

    def _check(self, weights: _Weights) -> None:
        for letters in (self.labels, self.own, self.result):
            if len(set(letters)) != len(letters):
                raise NotAContractionError("it reads a diagonal")
        lost = set(self.labels) - set(self.own) - set(self.result)
        if lost or ("." in self.labels) != ("." in self.result):
            raise NotAContractionError("it also sums over dimensions that its parameter does not have")
        if set(self.own) - set(self.labels) - set(self.result):
            raise NotAContractionError("it sums over dimensions of its parameter that its other operand does not have")
        shape = weights.shape(self.data)
        for letter in set(self.own) & set(self.labels):
            place = self.position(self.labels, letter)
            size = None if shape is None or len(shape) <= max(place, -1 - place) else shape[place]
            if size is not None and size != self.shape[self.own.index(letter)] and letter not in self.result:
                raise NotAContractionError("an operand is broadcast along a dimension that it sums over")

    @staticmethod
    def position(labels: str, letter: str) -> int:
        """The place of a dimension: counted from the end where a dot comes before it."""
        place = labels.index(letter)
        return place - len(labels) if "." in labels[:place] else place

    def convolution(self, build: CallBuilder, bias: fx.Node | None = None) -> fx.Node | None:
        """Insert the convolution that the layer is if its inputs are patches of images or series; None if they are not."""
        patches, shape = patches_in(self.data), node_info(self.data).shape
        if patches is None or shape is None or (patches.is_view and len(self.inputs + self.shared) <= patches.spatial):
            return None
        labels, result = self.labels, self.result
        if "." in labels:
            letters = _FURTHER[: len(shape) - len(labels) + 1]
            labels, result = labels.replace(".", letters), result.replace(".", letters)
        others = [letter for letter in labels if letter not in self.own]
        places, groups = len(others) - 1, self._size(self.shared)
        are_in_order = patches.orders(self.data)
        for inputs in itertools.permutations(self.inputs):
            order = [labels.index(letter) for letter in (*others, *self.shared, *inputs)]
            if are_in_order(order, places, groups):
                break
        else:
            return None
        build.program.fixed_dimensions = True
        weight = self.weight
        for place in reversed(self.dropped):
            weight = build.call("select", weight, place, 0, target=torch.select)
        channels = [*self.shared, *self.outputs]
        weight = self._ordered(build, weight, [*channels, *inputs])
        sizes = (self._size(channels), self._size(inputs) // math.prod(patches.kernel), *patches.kernel)
        weight = build.call("reshape", weight, sizes, target=torch.reshape)
        tensors = [weight] if bias is None else [weight, bias]
        options = patches.options | ({"groups": groups} if groups > 1 else {})
        value = self.layer = build.call(f"conv{patches.spatial}d", patches.source, *tensors, **options)
        if places < patches.spatial:
            value = build.call("flatten", value, -patches.spatial, -1, target=torch.flatten)
        if not channels:
            value = build.call("select", value, 1, 0, target=torch.select)
        if len(channels) > 1:
            value = build.call("unflatten", value, 1, self._sizes(channels), target=torch.unflatten)
        order_of_result = "".join((others[0], *channels, *others[1:]))
        if order_of_result == result:
            return value
        return build.call("permute", value, tuple(order_of_result.index(letter) for letter in result), target=torch.permute)

    def build(self, build: CallBuilder) -> fx.Node:
        """Insert the layer, between views of its input and of its output."""
        weight = self.weight
        for place in reversed(self.dropped):
            weight = build.call("select", weight, place, 0, target=torch.select)
        if self.shared:
            return self._of_each(build, weight)
        weight = self._ordered(build, weight, [*self.outputs, *self.inputs])
        if (len(self.outputs), len(self.inputs)) != (1, 1):
            weight = build.call("reshape", weight, (self._size(self.outputs), self._size(self.inputs)), target=torch.reshape)
        value, order = self._move_last(build, self.data, self.labels, self.inputs)
        if len(self.inputs) > 1:
            value = build.call("flatten", value, -len(self.inputs), -1, target=torch.flatten)
        value = self.layer = build.call("linear", value, weight)
        return self._with_outputs(build, value, order)

    def _of_each(self, build: CallBuilder, weight: fx.Node) -> fx.Node:
        """One matrix for each entry of the shared dimensions."""
        weight = self._ordered(build, weight, [*self.shared, *self.inputs, *self.outputs])
        sizes = (*self._sizes(self.shared), self._size(self.inputs), self._size(self.outputs))
        if (len(self.outputs), len(self.inputs)) != (1, 1):
            weight = build.call("reshape", weight, sizes, target=torch.reshape)
        value, order = self._move_last(build, self.data, self.labels, [*self.shared, *self.inputs])
        order += "".join(self.shared)
        if len(self.inputs) > 1:
            value = build.call("flatten", value, -len(self.inputs), -1, target=torch.flatten)
        value = build.call("unsqueeze", value, -2, target=torch.unsqueeze)
        value = self.layer = build.call("selected_linear", value, weight)
        value = build.call("select", value, -2, 0, target=torch.select)
        return self._with_outputs(build, value, order)

    def _with_outputs(self, build: CallBuilder, value: fx.Node, others: str) -> fx.Node:
        """The result, from a value whose last dimension holds all outputs, after the others."""
        if not self.outputs:
            value = build.call("select", value, -1, 0, target=torch.select)
        if len(self.outputs) > 1:
            value = build.call("unflatten", value, -1, self._sizes(self.outputs), target=torch.unflatten)
        return self._arrange(build, value, others + "".join(self.outputs))

    def _sizes(self, letters: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.shape[self.own.index(letter)] for letter in letters)

    def _size(self, letters: Sequence[str]) -> int:
        return math.prod(self._sizes(letters))

    def _ordered(self, build: CallBuilder, weight: fx.Node, letters: list[str]) -> fx.Node:
        """The weight with its dimensions in this order."""
        order = [self.own.index(letter) for letter in letters]
        if order == sorted(order):
            return weight
        if order == [1, 0]:
            transposed = _transposed(weight, build)
            return build.call("transpose", weight, 0, 1, target=torch.transpose) if transposed is None else transposed
        return build.call("permute", weight, tuple(order), target=torch.permute)

    def _move_last(self, build: CallBuilder, value: fx.Node, labels: str, letters: list[str]) -> tuple[fx.Node, str]:
        """The value with these dimensions last, in this order, and the labels of its other dimensions."""
        others = "".join(letter for letter in labels if letter not in letters)
        if labels == others + "".join(letters):
            return value, others
        sources = tuple(self.position(labels, letter) for letter in letters)
        return _moved(build, value, sources, tuple(range(-len(letters), 0))), others

    def _arrange(self, build: CallBuilder, value: fx.Node, labels: str) -> fx.Node:
        """The value with its dimensions in the order of the result."""
        if labels == self.result:
            return value
        if "." not in labels:
            if len(labels) == 2:
                return build.call("transpose", value, 0, 1, target=torch.transpose)
            return build.call("permute", value, tuple(labels.index(one) for one in self.result), target=torch.permute)
        letters = [letter for letter in labels if letter != "."]
        sources = tuple(self.position(labels, letter) for letter in letters)
        return _moved(build, value, sources, tuple(self.position(self.result, letter) for letter in letters))


#: Letters for dimensions without a name; torch.einsum has no Greek letters.
_FURTHER = "αβγδεζηθικλμνξοπρστυφχψω"


def _moved(build: CallBuilder, value: fx.Node, sources: tuple[int, ...], targets: tuple[int, ...]) -> fx.Node:
    moves = [(source, target) for source, target in zip(sources, targets, strict=True)]
    if {(-2, -1), (-1, -2)} >= set(moves):
        return build.call("transpose", value, -2, -1, target=torch.transpose)
    return build.call("movedim", value, sources, targets, target=torch.movedim)


def _transposed(weight: fx.Node, build: CallBuilder) -> fx.Node | None:
    """The matrix of which a weight is the transpose, if the graph shows it."""
    source = weight.args[0] if weight.op == "call_function" else None
    if not isinstance(source, fx.Node) or sources_of_dimensions(weight, 2) != [1, 0]:
        return None
    return source if parameter_value(source, build.program.root).ndim == 2 else None

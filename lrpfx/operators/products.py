"""Element-wise products and quotients, and matrix products."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lrpfx.ir import kinds
from lrpfx.ir.node import Role, is_call_of, is_data, node_info
from lrpfx.ir.operator import Adjoint, Between, Bound, Builder, Form, Function, Operator
from lrpfx.operators import contractions, mixing, signs
from lrpfx.operators.functions import (
    gate,
    gated_product,
    quotient,
    values_weighted_einsum,
    weighted_einsum,
)
from lrpfx.operators.row import standard_row
from lrpfx.operators.samples import IMAGE, MATRIX, POSITIVE, Signal, call, of, signal, weight

# --- adjoints ---------------------------------------------------------------------------------------------------------------


def _matrices_adjoint(first_factor: str, last_factor: str) -> Adjoint:
    def adjoint(gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound) -> tuple[torch.Tensor | None, ...] | None:
        first, last = arguments[first_factor], arguments[last_factor]
        if first is last or min(first.ndim, last.ndim) < 2:
            return None  # the caller differentiates the forward instead
        found = [gradient @ last.mH if value is first else first.mH @ gradient for value in inputs]
        return tuple(one.sum_to_size(value.shape) for one, value in zip(found, inputs, strict=True))

    return adjoint


# --- decompositions ---------------------------------------------------------------------------------------------------------


def _scaled(build: Builder, value: fx.Node, factor: Any) -> fx.Node:
    return value if isinstance(factor, (int, float)) and factor == 1 else build.call("mul", value, factor)


def sum_and_product(first: str, second: str) -> Callable[[Builder], fx.Node]:
    """Decompose beta * input + alpha * first @ second."""

    def decompose(build: Builder) -> fx.Node:
        bias, product = build["input"], build.call("matmul", build[first], build[second])
        if build["beta"] == 0:
            return _scaled(build, product, build["alpha"])
        return build.call("add", _scaled(build, bias, build["beta"]), _scaled(build, product, build["alpha"]))

    return decompose


def _sum_of_batch_and_product(build: Builder) -> fx.Node:
    """Beta * input + alpha * the sum of batch1 @ batch2 over the batch."""
    products = build.call("einsum", "bij,bjk->ik", build["batch1"], build["batch2"], target=torch.einsum)
    return build.call("add", _scaled(build, build["input"], build["beta"]), _scaled(build, products, build["alpha"]))


def _dot_products(build: Builder) -> fx.Node:
    """The sums of products along a dimension, with the conjugate of the first factor."""
    first, dtype = build["input"], node_info(build["input"]).dtype
    if dtype is not None and dtype.is_complex:
        first = build.call("conj", first, target=torch.conj)
    return build.call("sum", build.call("mul", first, build["other"]), build["dim"])


def _sum_and(combined: str) -> Callable[[Builder], fx.Node]:
    """Decompose input + value * tensor1 * tensor2, or the same with tensor1 / tensor2."""

    def decompose(build: Builder) -> fx.Node:
        product = _scaled(build, build.call(combined, build["tensor1"], build["tensor2"]), build["value"])
        return build.call("add", build["input"], product)

    return decompose


def _cosine(build: Builder) -> fx.Node:
    """The dot product of two normalized vectors."""
    dimension, eps = build["dim"], build["eps"]
    first, second = (build.call("normalize", build[name], 2.0, dimension, eps) for name in ("x1", "x2"))
    return build.call("sum", build.call("mul", first, second), dimension)


def _gated_linear_unit(build: Builder) -> fx.Node:
    halves = _parts_of_equal_size(build["input"], build["dim"])
    if halves is None:
        chunks = build.call("chunk", build["input"], 2, build["dim"], target=torch.chunk)
        halves = [build.call("getitem", chunks, index, target=operator.getitem) for index in (0, 1)]
    signal, control = halves
    return build.call("gate", signal, build.call("sigmoid", control), target=gate)


def _parts_of_equal_size(value: Any, dim: int) -> list[fx.Node] | None:
    """The two values of one shape that a call joins along a dimension, if it is such a call."""
    parts: Any = value.args[0] if is_call_of(value, "cat") else None
    shape = node_info(value).shape
    if shape is None or not isinstance(parts, (tuple, list)) or not all(map(is_data, parts)):
        return None
    along: Any = next(iter((*value.args[1:], *value.kwargs.values())), 0)
    shapes = {node_info(part).shape for part in parts}
    is_pair = len(parts) == 2 and len(shapes) == 1 and None not in shapes
    return list(parts) if is_pair and isinstance(along, int) and (dim - along) % len(shape) == 0 else None


def _columns_times_rows(build: Builder) -> fx.Node:
    column = build.call("unsqueeze", build["input"], -1, target=torch.unsqueeze)
    return build.call("mul", column, build["other"])


def _bilinear_form(build: Builder) -> fx.Node:
    """A bilinear form of two inputs, with one matrix per output."""
    equation = "...i,oij,...j->...o"
    product = build.call("einsum", equation, build["input1"], build["weight"], build["input2"], target=torch.einsum)
    return product if build["bias"] is None else build.call("add", product, build["bias"])


def _in_steps(build: Builder) -> fx.Node | None:
    """An einsum as plainer calls: a product of entries, a permuted and summed value, or an einsum that another value scales."""
    node = build.node
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    inputs, arrow, result = str(equation).replace(" ", "").partition("->")
    if node.kwargs or "." in inputs or not arrow:
        return None
    if len(operands) == 1 and isinstance(operands[0], fx.Node) and is_data(operands[0]):
        return _permuted_and_summed(build, operands[0], inputs, result)
    return _product(build, operands, inputs.split(","), result)


def _product(build: Builder, operands: Sequence[Any], labels: Sequence[str], result: str) -> fx.Node | None:
    """An einsum of several values: of two that sums nothing, or of more, one of which has only dimensions of the result."""
    if any(len(set(one)) != len(one) for one in (*labels, result)):
        return None
    if len(operands) == 2:
        sums_nothing = set("".join(labels)) == set(result) and all(map(is_data, operands))
        return _product_of_entries(build, operands, labels, result) if sums_nothing else None
    data = [place for place, one in enumerate(operands) if is_data(one)]
    if len(data) == 1 and all(node_info(one).role in (Role.DATA, Role.PARAMETER) for one in operands):
        return _with_one_weight(build, operands, labels, result, data[0])
    scales = [place for place, own in enumerate(labels) if set(own) <= set(result)]
    if len(operands) < 3 or not scales:
        return None
    others, their_labels = ([one for place, one in enumerate(some) if place != scales[-1]] for some in (operands, labels))
    if not any(map(is_data, others)):
        return None
    kept = "".join(letter for letter in result if letter in "".join(their_labels))
    value = _product(build, others, their_labels, kept)
    if value is None:
        value = build.call("einsum", f"{','.join(their_labels)}->{kept}", *others, target=torch.einsum)
    return _product_of_entries(build, (value, operands[scales[-1]]), (kept, labels[scales[-1]]), result)


def _with_one_weight(build: Builder, operands: Sequence[Any], labels: Sequence[str], result: str, place: int) -> fx.Node:
    """An einsum of the data at a place and of parameters, one after another: the factors of a matrix are layers."""
    own, rest = labels[place], [one for one in range(len(operands)) if one != place]
    value: fx.Node = operands[place]
    for places in _in_turn(labels, result, place):
        rest = [one for one in rest if one not in places]
        needed = result + "".join(labels[one] for one in rest)
        kept = "".join(dict.fromkeys(letter for one in places for letter in labels[one] if letter in needed + own))
        weight, equation = operands[places[0]], f"{','.join(labels[one] for one in places)}->{kept}"
        if equation != f"{kept}->{kept}":
            weight = build.call("einsum", equation, *(operands[one] for one in places), target=torch.einsum)
        after = "".join(dict.fromkeys(letter for letter in own + kept if letter in needed)) if rest else result
        value = _product(build, (value, weight), (own, kept), after) or build.call(
            "einsum", f"{own},{kept}->{after}", value, weight, target=torch.einsum
        )
        own = after
    return value


def _in_turn(labels: Sequence[str], result: str, place: int) -> list[list[int]]:
    """The places of the parameters to multiply with the data at a place, in turn; those in one list are multiplied first.

    These are masks and scales of another, or all, if not each one sums over a dimension of the data by itself.
    """
    parameters, data = [one for one in range(len(labels)) if one != place], labels[place]
    groups: dict[int, list[int]] = {}
    for one in sorted(parameters, key=lambda one: -len(labels[one])):
        groups.setdefault(next((other for other in groups if set(labels[one]) <= set(labels[other])), one), []).append(one)
    order = []
    while groups:
        for one in sorted(groups):
            others = result + "".join(labels[other] for other in groups if other != one)
            if set(data) & set(labels[one]) - set(others):
                break
        else:
            return [parameters]
        data = "".join(letter for letter in data + labels[one] if letter in others)
        order.append(sorted(groups.pop(one)))
    return order


def _product_of_entries(build: Builder, operands: Sequence[Any], labels: Sequence[str], result: str) -> fx.Node:
    aligned = []
    for value, own in zip(operands, labels, strict=True):
        order = [own.index(letter) for letter in result if letter in own]
        if order != sorted(order):
            value = build.call("permute", value, tuple(order), target=torch.permute)
        for place, letter in enumerate(result):
            if letter not in own:
                value = build.call("unsqueeze", value, place, target=torch.unsqueeze)
        aligned.append(value)
    return build.call("mul", *aligned, label="")


def _permuted_and_summed(build: Builder, value: fx.Node, labels: str, result: str) -> fx.Node | None:
    """An einsum of one value without a diagonal."""
    summed = [place for place, letter in enumerate(labels) if letter not in result]
    if len(set(labels)) != len(labels) or not set(result) <= set(labels):
        return None
    if summed:
        value = build.call("sum", value, tuple(summed), target=torch.sum)
    order = [label for label in labels if label in result]
    return build.call("permute", value, tuple(map(order.index, result)), target=torch.permute)


# --- rows ------------------------------------------------------------------------------------------------------------------


def _sum_with(name: str, combined: str, **sample: Any) -> Operator:
    return standard_row(
        name,
        kinds.Product,
        "input tensor1 tensor2 value=1",
        getattr(torch, name),
        data="input tensor1 tensor2",
        spelled=name,
        decomposition=_sum_and(combined),
        keeps_dimensions=True,
        sample=call(input=MATRIX, tensor1=signal(2, 4), **sample, value=3),
    )


def _of_two(name: str, kind: type[kinds.Kind], function: Function, other: Signal, **facts: Any) -> Operator:
    """A row for an element-wise operator of two operands, which only the compiler calls."""
    sample = call(input=MATRIX, other=other)
    return standard_row(name, kind, "input other", function, elementwise=True, sample=sample, **facts)


ROWS: tuple[Operator, ...] = (
    standard_row(
        "mul",
        kinds.Product,
        "input other",
        spelled="mul multiply",
        functions=[operator.mul],
        inplace=[operator.imul],
        methods="__mul__ __rmul__",
        inplace_methods="__imul__",
        reflected="mul",
        sign=signs.of_product,
        elementwise=True,
        affine_in="input other",
        proportional_to="input other",
        scaled="gate",
        activated="gated_product",
        sample=call(input=MATRIX, other=signal(2, 4)),
    ),
    standard_row(
        "div",
        kinds.Product,
        "input other rounding_mode=None",
        between=Between.QUOTIENT,
        spelled="div divide true_divide",
        functions=[operator.truediv],
        inplace=[operator.itruediv],
        methods="__truediv__",
        inplace_methods="__itruediv__",
        reflected="divided_by",
        sign=signs.of_quotient,
        elementwise=True,
        affine_in="input",
        proportional_to="input",
        scaled="quotient",
        discrete_with="rounding_mode",
        sample=call(input=MATRIX, other=POSITIVE, rounding_mode=None),
    ),
    standard_row(
        "divided_by",
        kinds.Activation,
        "input other",
        methods="__rtruediv__",
        sign=signs.of_product,
        scales=2,
        mixes=mixing.no_dimension,
        sample=call(input=POSITIVE, other=2.0),
    ),
    standard_row(
        "neg",
        kinds.Product,
        "input",
        spelled="neg negative",
        functions=[operator.neg],
        methods="__neg__",
        sign=signs.flipped,
        elementwise=True,
        affine_in="input",
        coefficients=lambda alpha: (-1, 0),
        proportional_to="input",
        sample=call(input=MATRIX),
    ),
    standard_row(
        "prod",
        kinds.Product,
        "input dim=None keepdim=False dtype=None",
        between=Between.PRODUCT,
        multiplies_up=True,
        mixes=mixing.given(),
        sample=call(input=POSITIVE, dim=1, keepdim=True, dtype=torch.float64),
    ),
    standard_row(
        "cumprod",
        kinds.Product,
        "input dim dtype=None",
        between=Between.RUNNING_PRODUCT,
        multiplies_up=True,
        accumulates=mixing.given(),
        sample=call(input=POSITIVE, dim=1, dtype=torch.float64),
    ),
    _of_two("gate", kinds.Gate, gate, signal(2, 4), sign=signs.of_product, proportional_to="input other"),
    _of_two(
        "gated_product", kinds.GatedProduct, gated_product, signal(2, 4), sign=signs.of_product, proportional_to="input other"
    ),
    _of_two(
        "quotient",
        kinds.Gate,
        quotient,
        POSITIVE,
        between=Between.QUOTIENT,
        sign=signs.of_quotient,
        proportional_to="input",
    ),
    standard_row(
        "matmul",
        kinds.MatMul,
        "input other",
        spelled="matmul bmm mm mv linalg_matmul",
        functions=[operator.matmul, torch.linalg.matmul],
        methods="__matmul__",
        aten="bmm.default mm.default mv.default",
        sign=signs.of_matrix_product,
        weighted="weighted_values",
        weighted_last="values_weighted",
        contraction=contractions.of_matmul,
        form=Form.MATRICES,
        adjoint=_matrices_adjoint("input", "other"),
        sample=call(input=signal(2, 3, 4), other=signal(2, 4, 5)),
    ),
    standard_row(
        "weighted_values",
        kinds.WeightedValues,
        "input other",
        sign=signs.of_matrix_product,
        form=Form.MATRICES,
        adjoint=_matrices_adjoint("input", "other"),
        sample=call(input=signal(2, 3, 4), other=signal(2, 4, 5)),
    ),
    standard_row(
        "values_weighted",
        kinds.WeightedValues,
        "input other",
        sign=signs.of_matrix_product,
        form=Form.MATRICES,
        adjoint=_matrices_adjoint("other", "input"),
        reversed=True,
        sample=call(input=signal(2, 3, 4), other=signal(2, 5, 3)),
    ),
    standard_row(
        "weighted_sum",
        kinds.WeightedValues,
        "input other dim keepdim=False",
        sign=signs.of_product,
        form=Form.SUM,
        sample=call(input=signal(2, 3, 1), other=signal(2, 3, 4), dim=1),
    ),
    standard_row(
        "weighted_product",
        kinds.WeightedValues,
        "input other",
        sign=signs.of_product,
        elementwise=True,
        sample=call(input=signal(2, 3, 1), other=signal(2, 3, 4)),
    ),
    standard_row(
        "einsum",
        kinds.MatMul,
        aten="einsum.default",
        contraction=contractions.of_einsum,
        decomposition=_in_steps,
        weighted="weighted_einsum",
        weighted_last="values_weighted_einsum",
        form=Form.EINSUM,
        sample=of(lambda x, y: torch.einsum("bij,bjk->bik", x, y), (2, 3, 4), (2, 4, 5)),
    ),
    standard_row(
        "weighted_einsum",
        kinds.WeightedValues,
        functions=[weighted_einsum],
        form=Form.EINSUM,
        sample=of(lambda x, y: weighted_einsum("bij,bjk->bik", x, y), (2, 3, 4), (2, 4, 5)),
    ),
    standard_row(
        "values_weighted_einsum",
        kinds.WeightedValues,
        functions=[values_weighted_einsum],
        form=Form.EINSUM,
        reversed=True,
        sample=of(lambda x, y: values_weighted_einsum("bjk,bij->bik", x, y), (2, 3, 4), (2, 4, 5)),
    ),
    standard_row(
        "tensordot",
        kinds.MatMul,
        contraction=contractions.of_tensordot,
        sample=of(lambda x, y: torch.tensordot(x, y, dims=([1, 2], [1, 0])), (2, 3, 4), (4, 3, 2), batch=False),
    ),
    standard_row(
        "dot",
        kinds.MatMul,
        spelled="dot vdot",
        contraction=contractions.of_inner,
        sample=of(lambda x, y: torch.dot(x, y), (4,), (4,), batch=False),
    ),
    standard_row(
        "inner",
        kinds.MatMul,
        "input other",
        contraction=contractions.of_inner,
        sample=call(batch=False, input=MATRIX, other=signal(3, 4)),
    ),
    standard_row(
        "outer",
        kinds.Product,
        "input other",
        spelled="outer ger",
        aten="outer.default ger.default",
        decomposition=_columns_times_rows,
        sample=call(batch=False, input=signal(3), other=signal(4)),
    ),
    standard_row(
        "bilinear",
        kinds.MatMul,
        "input1 input2 weight bias=None",
        data="input1 input2",
        aten="bilinear.default",
        decomposition=_bilinear_form,
        sample=call(loses="constants", input1=MATRIX, input2=signal(2, 3), weight=weight(5, 4, 3), bias=weight(5)),
    ),
    standard_row(
        "addmm",
        kinds.MatMul,
        "input mat1 mat2 beta=1 alpha=1",
        data="input mat1 mat2",
        decomposition=sum_and_product("mat1", "mat2"),
        sample=call(batch=False, input=signal(2, 5), mat1=MATRIX, mat2=signal(4, 5), beta=2, alpha=3),
    ),
    standard_row(
        "baddbmm",
        kinds.MatMul,
        "input batch1 batch2 beta=1 alpha=1",
        data="input batch1 batch2",
        decomposition=sum_and_product("batch1", "batch2"),
        sample=call(input=signal(2, 3, 5), batch1=signal(2, 3, 4), batch2=signal(2, 4, 5), beta=2, alpha=3),
    ),
    standard_row(
        "addmv",
        kinds.MatMul,
        "input mat vec beta=1 alpha=1",
        data="input mat vec",
        decomposition=sum_and_product("mat", "vec"),
        sample=call(batch=False, input=signal(2), mat=MATRIX, vec=signal(4), beta=2, alpha=3),
    ),
    standard_row(
        "addbmm",
        kinds.MatMul,
        "input batch1 batch2 beta=1 alpha=1",
        data="input batch1 batch2",
        decomposition=_sum_of_batch_and_product,
        sample=call(batch=False, input=signal(3, 5), batch1=signal(2, 3, 4), batch2=signal(2, 4, 5), beta=2, alpha=3),
    ),
    standard_row(
        "vecdot",
        kinds.MatMul,
        "input other dim=-1",
        torch.linalg.vecdot,
        aten="linalg_vecdot.default",
        aliases="x=input y=other",
        decomposition=_dot_products,
        sample=call(input=IMAGE, other=signal(2, 4, 5, 6), dim=2),
    ),
    standard_row(
        "cosine_similarity",
        kinds.Product,
        "x1 x2 dim=1 eps=1e-08",
        data="x1 x2",
        aten="cosine_similarity.default",
        decomposition=_cosine,
        sample=call(x1=IMAGE, x2=signal(2, 4, 5, 6), dim=2, eps=0.1),
    ),
    standard_row(
        "glu",
        kinds.Gate,
        "input dim=-1",
        decomposition=_gated_linear_unit,
        keeps_dimensions=True,
        sample=call(input=MATRIX, dim=1),
    ),
    _sum_with("addcmul", "mul", tensor2=signal(2, 4)),
    _sum_with("addcdiv", "div", tensor2=POSITIVE),
)

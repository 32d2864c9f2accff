"""Forms of operations whose backward pass carries the multipliers of differences from a reference.

The multiplier m of a tensor t is defined by: the sum of m (t - t⁰) over all inputs is f(x) - f(r), where t⁰ is the value that t
has for the reference r, and f what is explained (Shrikumar et al. 2017, https://arxiv.org/abs/1704.02685). The values of a call
are those of the operation, and then the references of its data inputs. For an operation that is at most quadratic in its
inputs, the derivative at the midpoint (t + t⁰) / 2 is exact; others have a slope, or are composed of both.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lrpfx.errors import InputError
from lrpfx.operators.attention import softmax_dimension
from lrpfx.operators.layer import Operation
from lrpfx.operators.normalization import per_channel
from lrpfx.runtime.final_relevance import final
from lrpfx.runtime.layer_call import LayerCall
from lrpfx.runtime.multipliers import Absorbed, MultiplierForm, multiplier_from
from lrpfx.support.derivatives import vjp
from lrpfx.support.tensors import relevance_from, save_values, saved_values
from lrpfx.support.torch_internals import apply

Tensors = Sequence[torch.Tensor]

#: Differences smaller than this share of the value have rounding errors: the derivative takes the place of the slope.
_SMALL = {torch.float64: 1e-9, torch.float32: 3e-4}
_SMALL_IN_HALF_PRECISION = 3e-2


def reference_of(value: Any, reference: Any) -> Any:
    """The reference of an input: what was given for it or, where no relevance is asked for, the input itself."""
    if reference is None:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise InputError(
                "the module explains differences from a reference: lrpfx.attribute(explain_model, x, target, reference=...)",
                topic="references",
            )
        return value
    return reference.detach()


def carry_difference(value: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The value, at a place where multipliers end: its readers give it a multiplier m, and it gets (value - reference) * m."""
    carried: torch.Tensor = apply(_CarryDifference, value, reference)
    return carried


class _CarryDifference(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, multiplier: torch.Tensor) -> Any:
        value, reference = ctx.saved_tensors
        return final(relevance_from(value - reference, multiplier)), None


class _OfDifferences(torch.autograd.Function):
    """Forward: an operation. Backward: the multipliers of its inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(form: "DifferenceForm", operation: Operation, *values: Any) -> torch.Tensor:
        output: torch.Tensor = operation(values)
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.form, ctx.operation, *values = inputs
        save_values(ctx, values)

    @staticmethod
    def backward(ctx: Any, multiplier: torch.Tensor) -> Any:
        values, _ = saved_values(ctx)
        count = ctx.operation.inputs
        found = ctx.form.multipliers(ctx.operation, values[:-count], values[-count:], multiplier)
        return None, None, *found, *(None for _ in values[count:])


class DifferenceForm(MultiplierForm):
    """An operation whose derivative is replaced by multipliers of differences."""

    divides = True
    needs_reference = True

    def run(self, operation: Operation, values: Sequence[Any]) -> Any:
        return apply(_OfDifferences, self, operation, *values)

    @abstractmethod
    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        """Those of the data inputs, which are the first of `values`, for that of the output."""

    def absorbed(self, call: LayerCall, multiplier: torch.Tensor) -> Absorbed | None:
        return {}


@dataclass(frozen=True)
class AtMidpoint(DifferenceForm):
    """The derivative at the mean of value and reference: exact for operations that are at most quadratic in their inputs."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        others = values[operation.inputs :]
        means = [(value + reference) / 2 for value, reference in zip(values, references, strict=False)]
        return vjp(lambda *inputs: operation([*inputs, *others]), *means)[1](multiplier)


@dataclass(frozen=True)
class BySlope(DifferenceForm):
    """The slope Δy/Δx of an element-wise function of one input (the Rescale rule)."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        return [multiplier * slope(_of_first(operation, values), values[0], references[0])]


def _of_first(operation: Operation, values: Sequence[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """An operation as a function of its first value."""
    return lambda first: operation([first, *values[1:]])


def slope(function: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Δy/Δx of an element-wise function, and its derivative at the midpoint where Δx is within the rounding of x."""
    output, pull = vjp(function, (value + reference) / 2)
    derivative = pull(torch.ones_like(output))[0]
    finite = torch.where(derivative.isfinite(), derivative, torch.zeros_like(derivative))
    return _quotient(function(value) - function(reference), value, reference, finite)


def _quotient(change: torch.Tensor, value: torch.Tensor, reference: torch.Tensor, derivative: torch.Tensor) -> torch.Tensor:
    """A change divided by the difference of a value, and the derivative where the difference is within rounding."""
    difference, mean = value - reference, (value + reference) / 2
    small = difference.abs() <= _SMALL.get(value.dtype, _SMALL_IN_HALF_PRECISION) * mean.abs()
    return torch.where(small, derivative, change / torch.where(small, torch.ones_like(difference), difference))


@dataclass(frozen=True)
class OfQuotient(DifferenceForm):
    """a / b as the product of a and 1 / b, whose slope is -1 / (b b⁰)."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        (first, last), (first_reference, last_reference) = values[:2], references
        of_first = multiplier * (1 / last + 1 / last_reference) / 2
        of_last = -multiplier * (first + first_reference) / 2 / (last * last_reference)
        return [of_first.sum_to_size(first.shape), of_last.sum_to_size(last.shape)]


@dataclass(frozen=True)
class OfSoftmax(DifferenceForm):
    """exp(z - c) times the reciprocal of its sum S, with one shift c for value and reference."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        value, reference = values[0], references[0]
        dimension = operation.arguments(values)["dim"]
        dimension = softmax_dimension(value.ndim) if dimension is None else dimension
        if value.dtype in (torch.float16, torch.bfloat16):
            value, reference, multiplier = value.float(), reference.float(), multiplier.float()
        shift = torch.maximum(value.amax(dimension, True), reference.amax(dimension, True))
        shift = torch.where(shift.isfinite(), shift, torch.zeros_like(shift))
        terms, other_terms = (value - shift).exp(), (reference - shift).exp()
        share, other_share = (_reciprocal(one.sum(dimension, True)) for one in (terms, other_terms))
        of_total = -(multiplier * (terms + other_terms) / 2).sum(dimension, True) * share * other_share
        of_terms = multiplier * (share + other_share) / 2 + of_total
        return [(of_terms * _slope_of_exponential(value, reference, shift)).to(values[0].dtype)]


def _reciprocal(value: torch.Tensor) -> torch.Tensor:
    """1 / value, and 0 for 0: where all entries of a softmax are masked, or all entries of a norm are 0."""
    return multiplier_from(value, torch.ones_like(value))


def _slope_of_exponential(value: torch.Tensor, reference: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """(exp(z - c) - exp(z⁰ - c)) / (z - z⁰), which nothing cancels in; 0 where either is masked."""
    half = (value - reference) / 2
    half = torch.where(half.isfinite(), half, torch.zeros_like(half))
    is_small = half.abs() < 1e-3
    safe = torch.where(is_small, torch.ones_like(half), half)
    # exp((z + z⁰) / 2 - c) sinh(h) / h, written with the larger of both, so that no factor overflows
    largest = torch.maximum(value, reference) - shift
    of_large = largest.exp() * -torch.expm1(-2 * safe.abs()) / (2 * safe.abs())
    of_small = ((value + reference) / 2 - shift).exp() * (1 + half.square() / 6)
    found = torch.where(is_small, of_small, of_large)
    return torch.where((value - reference).isfinite(), found, torch.zeros_like(found))


@dataclass(frozen=True)
class OfNormalization(DifferenceForm):
    """u s with u = x, or x minus its mean, and s = 1 / sqrt(mean(u²) + eps), as products and a slope."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        arguments, name = operation.arguments(values), operation.listed.name
        value, reference = values[0], references[0]
        weight = arguments["weight"]
        if name in ("layer_norm", "rms_norm"):
            shape: tuple[int, ...] = (*value.shape[: value.ndim - len(arguments["normalized_shape"])], -1)
        else:
            weight = per_channel(weight, value)
            shape = (value.shape[0], arguments["num_groups"] if name == "group_norm" else value.shape[1], -1)
        multiplier = multiplier if weight is None else multiplier * weight
        rows, other_rows, of_rows = (one.reshape(shape) for one in (value, reference, multiplier))
        eps = arguments["eps"]
        eps = torch.finfo(value.dtype).eps if eps is None else eps
        if name != "rms_norm":
            rows, other_rows = rows - rows.mean(-1, True), other_rows - other_rows.mean(-1, True)
        scale, other_scale = (torch.rsqrt(one.square().mean(-1, True) + eps) for one in (rows, other_rows))
        sums = rows + other_rows
        of_scale = (of_rows * sums / 2).sum(-1, True)
        of_square = -of_scale * (scale * other_scale).square() / (scale + other_scale)
        found = of_rows * (scale + other_scale) / 2 + of_square * sums / rows.shape[-1]
        if name != "rms_norm":
            found = found - found.mean(-1, True)
        return [found.reshape(value.shape)]


@dataclass(frozen=True)
class OfRoot(DifferenceForm):
    """The root y of a square q, such as a norm: the slope 1 / (y + y⁰) times the derivative of q at the midpoint."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        value, reference, root = values[0], references[0], _of_first(operation, values)
        total = root(value) + root(reference)
        found = vjp(lambda one: root(one).square(), (value + reference) / 2)[1](multiplier * _reciprocal(total))[0]
        return [torch.where(found.isfinite(), found, torch.zeros_like(found))]


@dataclass(frozen=True)
class OfNormalized(DifferenceForm):
    """x / max(|x|, eps), with the Euclidean norm, as a quotient and a root."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        arguments = operation.arguments(values)
        (value, *_), (reference,) = values, references
        dimension, eps = arguments["dim"], arguments["eps"]
        norm, other_norm = (torch.linalg.vector_norm(one, dim=dimension, keepdim=True) for one in (value, reference))
        scale, other_scale = norm.clamp(min=eps), other_norm.clamp(min=eps)
        sums, share, other_share = value + reference, 1 / scale, 1 / other_scale
        of_scale = -(multiplier * sums / 2).sum(dimension, True) * share * other_share
        of_norm = of_scale * slope(lambda one: one.clamp(min=eps), norm, other_norm)
        return [multiplier * (share + other_share) / 2 + of_norm * sums * _reciprocal(norm + other_norm)]


@dataclass(frozen=True)
class OfLarger(DifferenceForm):
    """The larger of two values, or the smaller, as half of their sum and of their distance, which has a slope."""

    smaller: bool = False

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        (first, last, *_), (first_reference, last_reference) = values, references
        half = slope(torch.abs, first - last, first_reference - last_reference) / 2
        half = -half if self.smaller else half
        of_first, of_last = multiplier * (0.5 + half), multiplier * (0.5 - half)
        return [of_first.sum_to_size(first.shape), of_last.sum_to_size(last.shape)]


@dataclass(frozen=True)
class OfLargest(DifferenceForm):
    """Maxima y through max(y, y⁰): from y⁰ to there by the entry that is largest for x, and on to y by that for r.

    `smallest`: for minima.
    """

    smallest: bool = False

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        value, reference, function = values[0], references[0], _of_first(operation, values)
        (output, pull), (other_output, pull_other) = vjp(function, value), vjp(function, reference)
        between = (torch.minimum if self.smallest else torch.maximum)(output, other_output)
        (first,), (last,) = pull(multiplier * (between - other_output)), pull_other(multiplier * (output - between))
        return [_quotient(first + last, value, reference, pull(multiplier)[0])]

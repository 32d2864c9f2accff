"""Forms of operations whose backward pass carries the multipliers of differences from a reference.

The multiplier m of a tensor t is defined by: the sum of m (t - t⁰) over all inputs is f(x) - f(r), where t⁰ is the value that t
has for the reference r, and f what is explained (Shrikumar et al. 2017, https://arxiv.org/abs/1704.02685). The values of a call
are those of the operation, and then the references of its data inputs. For an operation that is at most quadratic in its
inputs, the derivative at the midpoint (t + t⁰) / 2 is exact; others have a slope, or are composed of both.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lrpfx.errors import InputError, RuleError
from lrpfx.ir.node import floating_tensors
from lrpfx.operators.attention import softmax_dimension
from lrpfx.operators.layer import Operation
from lrpfx.operators.normalization import per_channel
from lrpfx.operators.scans import delayed, recurrence_backwards
from lrpfx.runtime.final_relevance import final
from lrpfx.runtime.layer_call import LayerCall
from lrpfx.runtime.multipliers import Absorbed, MultiplierForm, multiplier_from
from lrpfx.support.derivatives import derivative_of, vjp
from lrpfx.support.tensors import all_finite, detached, is_floating, only_finite, reads_values, save_values, saved_values
from lrpfx.support.torch_internals import apply, pytree

Tensors = Sequence[torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]  # a value, and that for the reference

#: Differences smaller than this share of the value have rounding errors: the derivative takes the place of the slope.
_SMALL = {torch.float64: 1e-9, torch.float32: 3e-4}
_SMALL_IN_HALF_PRECISION = 3e-2
#: By how many units of rounding the results of a function may be off.
_UNITS_OF_ROUNDING = 4
#: The largest share of entries whose derivatives are computed apart from the others.
MOST_APART = 0.2
#: From how many channels on pooling is faster with channels in the last dimension.
_MANY_CHANNELS = 8
#: Entries that are looked through together.
_ROW = 128


def reference_of(value: Any, reference: Any) -> Any:
    """The reference of an input: what was given for it or, where no relevance is asked for, the input itself."""
    if reference is None:
        if torch.is_grad_enabled() and any(one.requires_grad for one in floating_tensors(value)):
            raise InputError(
                "the module explains differences from a reference: lrpfx.attribute(explain_model, x, target, reference=...)",
                topic="references",
            )
        return value
    return pytree.tree_map(detached, reference)


def carry_difference(value: Any, reference: Any) -> Any:
    """The value, at a place where multipliers end: its readers give it a multiplier m, and it gets (value - reference) * m.

    So does each tensor of floating-point numbers in a nested value.
    """
    if isinstance(value, torch.Tensor):
        return apply(_CarryDifference, value, reference)

    def carried(one: Any, other: Any) -> Any:
        return apply(_CarryDifference, one, other) if is_floating(one) else one

    return pytree.tree_map(carried, value, reference)


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
        difference = only_finite(value - reference)  # a mask of minus infinity for both has none
        return final(difference * multiplier), None


class _OfDifferences(torch.autograd.Function):
    """Forward: an operation. Backward: the multipliers of its inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(form: "DifferenceForm", operation: Operation, *values: Any) -> Any:
        output = operation(values)
        return tuple(output) if isinstance(output, tuple) else output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.form, ctx.operation, *values = inputs
        if isinstance(output, tuple):  # maxima and their places
            ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # zeros for what is prepared
        save_values(ctx, values)

    @staticmethod
    def backward(ctx: Any, multiplier: torch.Tensor, *_: Any) -> Any:
        values, _ = saved_values(ctx)
        count = ctx.operation.inputs
        found = ctx.form.multipliers(ctx.operation, values[:-count], values[-count:], multiplier)
        return None, None, *found, *(None for _ in values[count:])


class _ReferenceForm(MultiplierForm):
    """What forms with a reference have in common: nothing takes any of the difference."""

    divides = True
    needs_reference = True

    def absorbed(self, call: LayerCall, multiplier: torch.Tensor) -> Absorbed | None:
        return {}


class DifferenceForm(_ReferenceForm):
    """An operation whose derivative is replaced by multipliers of differences."""

    def run(self, operation: Operation, values: Sequence[Any]) -> Any:
        return apply(_OfDifferences, self, operation, *values)

    @abstractmethod
    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        """Those of the data inputs, which are the first of `values`, for that of the output."""


@dataclass(frozen=True)
class Same(DifferenceForm):
    """A value that is returned as it is, also where the author has cut the gradient: it differs as its input does."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        return [multiplier]


class _AtMidpoint(torch.autograd.Function):
    """Forward: an operation, and the means of its inputs and their references. Backward: the derivative at these means."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operation: Operation, *values: Any) -> tuple[torch.Tensor, ...]:
        own, references = values[: -operation.inputs], values[-operation.inputs :]
        means = [torch.lerp(value, reference, 0.5) for value, reference in zip(own, references, strict=False)]
        return operation(own), *means

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.operation, *values = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # zeros for what is prepared
        count = ctx.operation.inputs
        save_values(ctx, [*output[1:], *values[count:-count]])

    @staticmethod
    def backward(ctx: Any, multiplier: torch.Tensor, *_: Any) -> Any:
        values, _ = saved_values(ctx)
        row, count = ctx.operation.operator, ctx.operation.inputs
        if row is not None and row.entries.elementwise and len(values) == count == 2:  # without another product
            first, last = (multiplier * one for one in reversed(values))
            found: Tensors = [first.sum_to_size(values[0].shape), last.sum_to_size(values[1].shape)]
        else:
            found = _adjoint(ctx.operation, multiplier, values)
        return None, *found, *(None for _ in values)


@dataclass(frozen=True)
class AtMidpoint(_ReferenceForm):
    """The derivative at the mean of value and reference: exact for operations that are at most quadratic in their inputs."""

    def run(self, operation: Operation, values: Sequence[Any]) -> Any:
        if torch.is_grad_enabled() and any(value.requires_grad for value in values[: operation.inputs]):
            return apply(_AtMidpoint, operation, *values)[0]
        return operation(values[: -operation.inputs])


@dataclass(frozen=True)
class OfFactors(DifferenceForm):
    """A product of more than two factors, which take their values one after another: the mean over their order and the reverse.

    Of two factors, each has the mean of the other, as at the midpoint.
    """

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        inputs, others = values[: operation.inputs], values[operation.inputs :]
        found = [torch.zeros_like(value) for value in inputs]
        for order in (range(len(inputs)), reversed(range(len(inputs)))):
            current = list(references)
            for place in order:

                def of_one(one: torch.Tensor, place: int = place, current: Tensors = tuple(current)) -> Any:
                    return operation([*current[:place], one, *current[place + 1 :], *others])

                found[place] = found[place] + vjp(of_one, inputs[place])[1](multiplier)[0] / 2
                current[place] = inputs[place]
        return found


def _adjoint(operation: Operation, multiplier: torch.Tensor, values: Sequence[Any]) -> Tensors:
    """The ordinary derivatives of an operation, times the multiplier."""
    found: Any = operation.adjoint(multiplier, values)
    if found is None:
        inputs, others = values[: operation.inputs], values[operation.inputs :]
        found = vjp(lambda *changed: operation([*changed, *others]), *inputs)[1](multiplier)
    adjoint: Tensors = found
    return adjoint


class _OfOneInput(torch.autograd.Function):
    """Forward: an operation, and what its form prepares. Backward: the multiplier of its input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(form: "FormOfOneInput", operation: Operation, *values: Any) -> tuple[torch.Tensor, ...]:
        own, (reference, *others) = form.split(values)
        return form.result(operation, own, reference, *others)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.form, ctx.operation, *values = inputs
        ctx.count, ctx.shape = len(values), values[0].shape
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # zeros for what is prepared
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, multiplier: torch.Tensor, *_: Any) -> Any:
        found = ctx.form.multiplier(ctx.saved_tensors, multiplier, ctx.shape)
        return None, None, found, *(None for _ in range(ctx.count - 1))


class FormOfOneInput(_ReferenceForm):
    """An operation on one input, whose forward pass prepares what the multipliers need: less than both values of the input.

    The values of a call end with the reference of the input and the results for it.
    """

    reference_results = 1

    def run(self, operation: Operation, values: Sequence[Any]) -> Any:
        if torch.is_grad_enabled() and values[0].requires_grad:
            return apply(_OfOneInput, self, operation, *values)[0]
        return operation(self.split(values)[0])

    def split(self, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        """The values of the operation, and the reference with the results for it."""
        count = len(values) - 1 - self.reference_results
        return values[:count], values[count:]

    @abstractmethod
    def result(
        self, operation: Operation, values: Sequence[Any], reference: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The output, and what is prepared: tensors that are not the inputs. `others`: the results for the reference."""

    @abstractmethod
    def multiplier(self, prepared: Tensors, multiplier: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """That of the input, which has this shape, from what is prepared."""


@dataclass(frozen=True)
class BySlope(FormOfOneInput):
    """The slope Δy/Δx of an element-wise function of one input (the Rescale rule)."""

    def result(
        self, operation: Operation, values: Sequence[Any], reference: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        output: torch.Tensor = operation(values)
        alone = not any(isinstance(value, torch.Tensor) for value in values[1:])
        function, pair = _first_result(operation, values), (output, others[0])
        derivative = _derivative_of(operation, values)
        is_precise = operation.operator is not None and operation.operator.values.ratio is not None
        return output, slope(function, values[0], reference, pair, alone, _clips(operation), derivative, is_precise)

    def multiplier(self, prepared: Tensors, multiplier: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return multiplier * prepared[0]


def _clips(operation: Operation) -> bool:
    return operation.operator is not None and operation.operator.values.clips


def _derivative_of(operation: Operation, values: Sequence[Any]) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The derivative of an element-wise function, if its row knows a formula."""
    formula = None if operation.operator is None else operation.operator.values.derivative
    if formula is None:
        return None
    arguments = operation.arguments(values)
    return lambda value: formula(value, arguments)


@dataclass(frozen=True)
class BySigns(DifferenceForm):
    """An element-wise function of what a dense layer or a convolution returns, by its positive and its negative terms.

    The terms w Δh of Δx add up to Δx⁺ and Δx⁻ by their signs. Both are inputs of the function, each in turn with a slope
    (RevealCancel). Relevance of x is that of the whole slope s, and the terms get what differs from it: m (s⁺ - s) for positive
    ones, m (s⁻ - s) for negative ones, and the mean of both where Δh is 0. This adds up to 0.

    The data inputs are x and h, and the other values end with those of the layer, which begin at `first`. Since |w Δh| is
    |w| |Δh|, the sums of terms by sign take one more call of the layer, and their multipliers two more of its adjoint.
    """

    layer: Operation | None = None  # the compiler knows it where it places the form
    first: int = 0

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        if self.layer is None:
            raise RuleError("a form by signs is placed without the layer before it", topic="defects")
        (value, signal, *_), (reference, other_signal) = values, references
        change, own = signal - other_signal, values[self.first :]
        magnitudes = [
            parameter.abs() if name == "weight" else torch.zeros_like(parameter)
            for name, parameter in zip(self.layer.parameters, own, strict=False)
        ]
        size_of_terms = self.layer([change.abs(), *magnitudes, *own[len(magnitudes) :]])
        with_positive = reference + (value - reference + size_of_terms) / 2
        with_negative = reference + (value - reference - size_of_terms) / 2

        def slope_between(first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
            return slope(_first_result(operation, values), last, first, clips=_clips(operation))

        whole = slope_between(reference, value)
        of_positive = slope_between(reference, with_positive) + slope_between(with_negative, value)
        of_negative = slope_between(reference, with_negative) + slope_between(with_positive, value)
        of_terms = multiplier * ((of_positive + of_negative) / 4 - whole)
        of_sizes = multiplier * (of_positive - of_negative) / 4
        (of_signal,) = _adjoint(self.layer, of_terms, [signal, *own])
        (of_size,) = _adjoint(self.layer, of_sizes, [signal, *magnitudes, *own[len(magnitudes) :]])
        return [multiplier * whole, of_signal + change.sign() * of_size]


@dataclass(frozen=True)
class BySlopes(DifferenceForm):
    """An element-wise function of several inputs, which take their values one after another, each in turn with a slope.

    It is the mean over their order and the reverse one: for two inputs, the Shapley value; for a product of two, the mean of
    the other factor.
    """

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        return through_slopes(_first_result(operation, values), values[: operation.inputs], references, multiplier)


def through_slopes(
    function: Callable[..., torch.Tensor], values: Tensors, references: Tensors, multiplier: torch.Tensor
) -> Tensors:
    """The multipliers of the inputs of an element-wise function, as `BySlopes` says."""
    inputs, others = torch.broadcast_tensors(*values), torch.broadcast_tensors(*references)
    slopes = [torch.zeros_like(multiplier)] * len(inputs)
    for order in (range(len(inputs)), reversed(range(len(inputs)))):
        current = list(others)
        for place in order:

            def of_one(one: torch.Tensor, place: int = place, current: Tensors = tuple(current)) -> torch.Tensor:
                return function(*current[:place], one, *current[place + 1 :])

            slopes[place] = slopes[place] + slope(of_one, inputs[place], others[place]) / 2
            current[place] = inputs[place]
    return [(multiplier * one).sum_to_size(value.shape) for one, value in zip(slopes, values, strict=True)]


def _first_result(operation: Operation, values: Sequence[Any]) -> Callable[..., torch.Tensor]:
    """The first result of an operation, as a function of its first values."""

    def function(*first: torch.Tensor) -> torch.Tensor:
        result = operation([*first, *values[len(first) :]])
        found: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return found

    return function


def slope(
    function: Callable[[torch.Tensor], torch.Tensor],
    value: torch.Tensor,
    reference: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor] | None = None,
    of_entries: bool = False,
    clips: bool = False,
    derivative: Callable[[torch.Tensor], torch.Tensor] | None = None,
    is_precise: bool = False,
) -> torch.Tensor:
    """Δy/Δx of an element-wise function, and its derivative at the midpoint where Δx is within the rounding of x.

    So it is where Δy is within the rounding of y: near 0, a sigmoid is 0.5, which differences of x may be far below. The
    derivative has to explain Δy up to rounding, since a function may jump, bend or be steep between both, or return to the same
    value.

    `results`: those for value and reference, if they are known. `of_entries`: whether the function takes single entries, too.
    `clips`: whether each result is the input or a bound, so that differences of results are exact. `derivative`: a formula.
    `is_precise`: whether f(x) / x is finite, so that Δy is within rounding only where Δx is, or where the slope vanishes.
    """
    output, other = results or (function(value), function(reference))

    def slopes(value: torch.Tensor, reference: torch.Tensor, output: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        difference, change, middle = value - reference, output - other, (value + reference) / 2
        derivatives = only_finite(derivative_of(function, middle) if derivative is None else derivative(middle))
        small = _is_small(difference / (difference if clips else reference))
        if not clips:
            bound, missed = _UNITS_OF_ROUNDING * torch.finfo(change.dtype).eps, (derivatives * difference - change).abs()
            # results of x times what is at most 1 are as precise as x; the difference of two masks is no number
            jumps = missed.gt(bound * torch.maximum(other.abs(), reference.abs())).logical_and_(difference != 0)
            small = small.logical_and_(jumps.logical_not_())
            if not is_precise:
                small = small.logical_or(_is_small(change / other).logical_and(missed <= bound * other.abs()))
        return _quotient(change, difference, small, derivatives)

    difference = value - reference
    if reads_values(value) and not difference.requires_grad:
        found = (output - other).div_(difference)
        if clips and all_finite(found):  # no difference is 0, which a comparison of each entry would take longer to say
            return found
        # differences of what clips are small where they are 0, and have no share
        share = difference.div_(difference if clips else reference).abs_()
        if not clips and not is_precise:
            share = torch.minimum(share, (output - other).div_(other).abs_())
        places = _places_of_small(share)
        if not len(places):
            return found
        if of_entries and len(places) < MOST_APART * value.numel():  # a few derivatives cost less than all of them
            found = found.contiguous()
            found.view(-1)[places] = slopes(*(one.reshape(-1)[places] for one in (value, reference, output, other)))
            return found
    return slopes(value, reference, output, other)


def quotient(change: torch.Tensor, value: torch.Tensor, reference: torch.Tensor, derivative: torch.Tensor) -> torch.Tensor:
    """A change divided by the difference of a value, and the derivative where the difference is within rounding."""
    difference = value - reference
    return _quotient(change, difference, _is_small(difference / reference), derivative)


def _is_small(share: torch.Tensor) -> torch.Tensor:
    """Whether differences that are this share of their reference are within rounding; so are those of two masks."""
    return (share.abs() > _SMALL.get(share.dtype, _SMALL_IN_HALF_PRECISION)).logical_not_()


def _places_of_small(share: torch.Tensor) -> torch.Tensor:
    """Where `_is_small` holds of sizes of shares. Comparing is slow: only entries of rows with a small one are compared."""
    rows = share.reshape(-1, math.gcd(share.numel(), _ROW))
    near = _is_small(rows.amin(1)).nonzero()[:, 0]
    within = _is_small(rows[near]).nonzero()
    return near[within[:, 0]] * rows.shape[1] + within[:, 1]


def _quotient(change: torch.Tensor, difference: torch.Tensor, small: torch.Tensor, derivative: torch.Tensor) -> torch.Tensor:
    return torch.where(small, derivative, change / difference.masked_fill(small, 1.0))


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


class _OfProbabilities(FormOfOneInput):
    """A function of z by a softmax p = exp(z - L), L being the logarithm of the sum of all exp(z).

    Its form has the logarithmic mean s = Δp / Δ log p of both softmaxes. Since the changes of p add up to 0, ΔL is the mean of
    Δz with the weights s. Multipliers hence do not depend on a shift of z, as derivatives do not.
    """

    def result(
        self, operation: Operation, values: Sequence[Any], reference: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        output: torch.Tensor = operation(values)
        dtype = torch.float32 if output.dtype in (torch.float16, torch.bfloat16) else output.dtype
        dim = self.dimension(operation, values)
        means = self.means((values[0].to(dtype), reference.to(dtype)), (output.to(dtype), others[0].to(dtype)), dim)
        if reads_values(means):
            scale = means.sum(dim, True).reciprocal_()
            if all_finite(scale):  # no softmax whose entries are all masked
                return output, means, scale
        means = only_finite(means)
        return output, means, _reciprocal(means.sum(dim, True))

    def dimension(self, operation: Operation, values: Sequence[Any]) -> Any:
        """The dimensions over which p adds up to 1."""
        dimension: int | None = operation.arguments(values)["dim"]
        return softmax_dimension(values[0].ndim) if dimension is None else dimension

    @abstractmethod
    def means(self, values: Pair, outputs: Pair, dim: Any) -> torch.Tensor:
        """The logarithmic means. Both pairs are the value and that for the reference."""


def logarithmic_means(changes: torch.Tensor, shares: Pair) -> torch.Tensor:
    """(p - p⁰) / (log p - log p⁰), which changes by `changes`, without cancellation."""
    distance = changes.abs().neg_()
    factor = torch.expm1(distance).div_(distance).nan_to_num_(1.0)  # in the limit, and where entries are masked for both
    return factor.mul_(torch.maximum(*shares))


def logarithmic_means_of(shares: Pair, lower: torch.Tensor) -> torch.Tensor:
    """The same without logarithms, as |Δp| / log(1 + |Δp| / min(p, p⁰)). `lower` is that minimum, not 0, and overwritten."""
    changes = torch.sub(*shares).abs_().clamp_min_(torch.finfo(lower.dtype).tiny)  # for the limit where there is none
    return changes.div_(lower.reciprocal_().mul_(changes).log1p_())


@dataclass(frozen=True)
class OfSoftmax(_OfProbabilities):
    """Δp = s (Δz - ΔL)."""

    def means(self, values: Pair, outputs: Pair, dim: Any) -> torch.Tensor:
        if reads_values(outputs[0]):
            lower = torch.minimum(*outputs)
            if lower.numel() and lower.amin() >= torch.finfo(lower.dtype).tiny:  # no probability has vanished
                return logarithmic_means_of(outputs, lower)
        # the largest entries give L: rounding takes none of them
        ours, theirs = (z.amax(dim, True) - p.amax(dim, True).log() for z, p in zip(values, outputs, strict=True))
        return logarithmic_means((values[0] - values[1]).sub_(ours - theirs), outputs)

    def multiplier(self, prepared: Tensors, multiplier: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        means, scale = prepared
        mean = (multiplier * means).sum_to_size(scale.shape) * scale
        return ((multiplier - mean) * means).to(multiplier.dtype)


@dataclass(frozen=True)
class OfLogSoftmax(_OfProbabilities):
    """Δz - ΔL."""

    def means(self, values: Pair, outputs: Pair, dim: Any) -> torch.Tensor:
        return logarithmic_means(outputs[0] - outputs[1], (outputs[0].exp(), outputs[1].exp()))

    def multiplier(self, prepared: Tensors, multiplier: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        means, scale = prepared
        return (multiplier - multiplier.sum_to_size(scale.shape) * scale * means).to(multiplier.dtype)


@dataclass(frozen=True)
class OfLogSum(_OfProbabilities):
    """ΔL."""

    def dimension(self, operation: Operation, values: Sequence[Any]) -> Any:
        args, options = operation.filled(values)
        return options["dim"] if "dim" in options else args[1]

    def means(self, values: Pair, outputs: Pair, dim: Any) -> torch.Tensor:
        ours, theirs = (one - one.logsumexp(dim, True) for one in values)
        return logarithmic_means(ours - theirs, (ours.exp(), theirs.exp()))

    def multiplier(self, prepared: Tensors, multiplier: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        means, scale = prepared
        return (multiplier.reshape(scale.shape) * scale * means).to(multiplier.dtype)


@dataclass(frozen=True)
class OfRunningLogSum(DifferenceForm):
    """The logarithms L of the sums of exponentials of all entries z so far, as slopes of logarithms and of exponentials.

    An entry gets e^(b - a) of the multiplier of each later L, with the logarithms a and b of both logarithmic means. Since a
    grows from step to step, and is no less than b, no factor of the recurrence is larger than 1.
    """

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        args, options = operation.filled(values)
        dim = options["dim"] if "dim" in options else args[1]
        pair = values[0].double(), references[0].double()
        of_entries = _logarithm_of_mean(*pair)
        of_sums = _logarithm_of_mean(*(one.logcumsumexp(dim) for one in pair))
        factors = only_finite(delayed(of_sums, 1, dim) - of_sums).exp()
        found = recurrence_backwards(multiplier.double(), factors, dim) * (of_entries - of_sums).nan_to_num(-math.inf).exp()
        return [found.to(values[0].dtype)]


def _logarithm_of_mean(value: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The logarithm of (e^z - e^z⁰) / (z - z⁰)."""
    distance = (value - reference).abs()
    return torch.maximum(value, reference) + torch.expm1(-distance).div(-distance).nan_to_num(1.0).log()


@dataclass(frozen=True)
class OfShares(DifferenceForm):
    """A quotient of exponentials and their sums, both of which are inputs beside what they are exponentials of."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        names = operation.names_of_inputs
        ours, theirs = operation.arguments(values), operation.arguments([*references, *values[operation.inputs :]])
        terms, sums, other_terms, other_sums = (one[name] for one in (ours, theirs) for name in ("exponentials", "sums"))
        found = {
            "exponentials": multiplier * (1 / sums + 1 / other_sums) / 2,
            "sums": -multiplier * (terms + other_terms) / 2 / (sums * other_sums),
        }
        shapes = [one.shape for one in values[: operation.inputs]]
        return [
            found[name].sum_to_size(shape) if name in found else multiplier.new_zeros(shape)
            for name, shape in zip(names, shapes, strict=True)
        ]


def _reciprocal(value: torch.Tensor) -> torch.Tensor:
    """1 / value, and 0 for 0: where all entries of a softmax are masked, or all entries of a norm are 0."""
    return multiplier_from(value, torch.ones_like(value))


@dataclass(frozen=True)
class OfNormalization(FormOfOneInput):
    """u s with u = x, or x minus its mean, and s = 1 / sqrt(mean(u²) + eps), as products and a slope.

    With h = (u + u⁰) s s⁰ / (s + s⁰), multipliers are those of the derivative: (s + s⁰) / 2 (m - mean(m) - h mean(m h)).
    `centred`: whether it subtracts the mean.
    """

    centred: bool = True

    def result(
        self, operation: Operation, values: Sequence[Any], reference: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        arguments, name = operation.arguments(values), operation.listed.name
        value, weight = values[0], arguments["weight"]
        if name in ("layer_norm", "rms_norm"):
            leading: tuple[int, ...] = value.shape[: value.ndim - len(arguments["normalized_shape"])]
            size = math.prod(value.shape[len(leading) :])
        else:
            weight = per_channel(weight, value)
            leading = value.shape[0], arguments["num_groups"] if name == "group_norm" else value.shape[1]
            size = math.prod(value.shape[1:]) // leading[1]
        rows, other_rows = value.reshape(*leading, size), reference.reshape(*leading, size)
        eps = arguments["eps"]
        eps = torch.finfo(value.dtype).eps if eps is None else eps
        sums = rows + other_rows
        if self.centred:  # the kernel of a layer norm is the fastest way to both statistics
            (mean, scale), (other_mean, other_scale) = (
                torch.native_layer_norm(one, one.shape[-1:], None, None, eps)[1:] for one in (rows, other_rows)
            )
            sums.sub_(mean + other_mean)
        else:
            scale, other_scale = (torch.rsqrt(one.square().mean(-1, True) + eps) for one in (rows, other_rows))
        total = scale + other_scale
        found = [operation(values), sums.mul_(scale * other_scale / total), total / 2]
        return (*found, *([] if weight is None else [weight.clone()]))

    def multiplier(self, prepared: Tensors, multiplier: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        share, scale, *weights = prepared
        for weight in weights:
            multiplier = multiplier * weight
        rows = multiplier.reshape(share.shape)
        found = rows - share * (rows * share).mean(-1, True)
        if self.centred:
            found.sub_(rows.mean(-1, True))
        return found.mul_(scale).reshape(shape).to(multiplier.dtype)


def layer_norm_with_statistics(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer norm, the mean, and the scale 1 / sqrt(var + eps), of which torch's function returns the first."""
    return torch.native_layer_norm(input, normalized_shape, weight, bias, eps)


@dataclass(frozen=True)
class OfLayerNorm(FormOfOneInput):
    """What `OfNormalization` says, by the kernels of a layer norm, which find the statistics and the derivative at once.

    It is the derivative of a layer norm whose input is c (x + x⁰), with c = 2 s s⁰ / (s + s⁰)² and the scale (s + s⁰) / 2.
    """

    reference_results = 3

    def for_reference(self, function: Callable[..., Any], options: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        return layer_norm_with_statistics, options

    def result(
        self, operation: Operation, values: Sequence[Any], reference: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        arguments, (_, other_mean, other_scale) = operation.arguments(values), others
        output, mean, scale = layer_norm_with_statistics(**arguments)
        total, weight = scale + other_scale, arguments["weight"]
        factor = 2 * scale * other_scale / total.square()
        found = (values[0] + reference).mul_(factor), (mean + other_mean) * factor, total / 2
        first = mean.ndim - len(arguments["normalized_shape"])
        return (output, *(one.flatten(first) for one in found), *([] if weight is None else [weight.flatten().clone()]))

    def multiplier(self, prepared: Tensors, multiplier: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        input, mean, scale, *weights = prepared
        weight = weights[0] if weights else None
        found: torch.Tensor = torch.ops.aten.native_layer_norm_backward(
            multiplier.reshape(input.shape), input, input.shape[-1:], mean, scale, weight, None, [True, False, False]
        )[0]
        return found.reshape(shape)


@dataclass(frozen=True)
class OfRoot(DifferenceForm):
    """The root y of a square q, such as a norm: the slope 1 / (y + y⁰) times the derivative of q at the midpoint."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        value, reference, root = values[0], references[0], _first_result(operation, values)
        total = root(value) + root(reference)
        found = vjp(lambda one: root(one).square(), (value + reference) / 2)[1](multiplier * _reciprocal(total))[0]
        return [torch.where(found.isfinite(), found, torch.zeros_like(found))]


@dataclass(frozen=True)
class OfChannelNormalization(DifferenceForm):
    """x T^(-beta) with T = k + alpha times the mean of x² over neighbouring channels, as a product, a slope and a square."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        arguments = operation.arguments(values)
        size, alpha, beta, k = (arguments[name] for name in ("size", "alpha", "beta", "k"))
        (value, *_), (reference,) = values, references

        def total(one: torch.Tensor) -> torch.Tensor:
            channels = one.square().movedim(1, -1)
            padded = torch.nn.functional.pad(channels, (size // 2, (size - 1) // 2))
            mean = padded.unfold(-1, size, 1).mean(-1).movedim(-1, 1)
            return torch.add(mean * alpha, k)

        def scale(one: torch.Tensor) -> torch.Tensor:
            return one.pow(-beta)

        totals = total(value), total(reference)
        of_total = multiplier * (value + reference) / 2 * slope(scale, *totals)
        of_square = vjp(total, (value + reference) / 2)[1](of_total)[0]
        return [multiplier * (scale(totals[0]) + scale(totals[1])) / 2 + of_square]


@dataclass(frozen=True)
class OfPowerRoot(DifferenceForm):
    """The root y = q^(1 / p) of a sum q of powers |x|^p, as two slopes and the derivative of q by the powers."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        return [_through_root(_first_result(operation, values), exponent(operation), values[0], references[0], multiplier)]


def _through_root(
    root: Callable[[torch.Tensor], torch.Tensor],
    power: float,
    value: torch.Tensor,
    reference: torch.Tensor,
    multiplier: torch.Tensor,
) -> torch.Tensor:
    """The multipliers behind a norm with an exponent, or another root of a sum of powers."""
    if math.isinf(power):
        sizes, other_sizes = value.abs(), reference.abs()
        of_sizes = _through_largest(root, [sizes], [other_sizes], multiplier, smallest=power < 0)[0]
        return of_sizes * slope(torch.abs, value, reference)
    output, other = root(value), root(reference)
    mean = (output + other) / 2
    derivative = torch.where(mean == 0, torch.zeros_like(mean), mean.pow(1 - power) / power)
    of_total = multiplier * quotient(output - other, output.pow(power), other.pow(power), derivative)
    ones = torch.ones_like(value)  # the sum is linear in the powers: its derivative is the same everywhere
    (of_powers,) = vjp(lambda powers: root(powers.pow(1 / power)).pow(power), ones)[1](of_total)
    found: torch.Tensor = of_powers * slope(lambda one: one.abs().pow(power), value, reference)
    return found


def exponent(operation: Operation) -> float:
    """The exponent of a norm, or of a pooling by norms. Raises `RuleError` for norms of matrices, which are other functions."""
    later = operation.args[1:2]
    options = operation.kwargs
    found = next((options[name] for name in ("p", "ord", "norm_type") if name in options), later[0] if later else None)
    of_matrices = operation.function in (torch.linalg.norm, torch.ops.aten.linalg_norm.default)
    dimension = options.get("dim", operation.args[2] if len(operation.args) > 2 else None)
    if found in (None, "fro"):
        return 2.0
    if isinstance(found, str) or found == 0 or (of_matrices and not isinstance(dimension, int)):
        raise RuleError(f"a norm of the order {found!r} has no formula", topic="references")
    return float(found)


@dataclass(frozen=True)
class OfNormalized(DifferenceForm):
    """x / max(|x|, eps) as a quotient and a norm."""

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        arguments = operation.arguments(values)
        (value, *_), (reference,) = values, references
        power, dimension, eps = arguments["p"], arguments["dim"], arguments["eps"]

        def norm(one: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.linalg.vector_norm(one, power, dim=dimension, keepdim=True)
            return found

        norms = norm(value), norm(reference)
        share, other_share = (1 / one.clamp(min=eps) for one in norms)
        of_scale = -(multiplier * (value + reference) / 2).sum(dimension, True) * share * other_share
        of_norm = of_scale * slope(lambda one: one.clamp(min=eps), *norms)
        return [multiplier * (share + other_share) / 2 + _through_root(norm, power, value, reference, of_norm)]


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
        smallest = self.smallest or operation.arguments(values).get("reduce") == "amin"
        function = _first_result(operation, values)
        return _through_largest(function, values[: operation.inputs], references, multiplier, smallest)


def max_pool2d_with_places(input: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """Maxima of windows, and their places.

    torch's kernel for channels in the last dimension finds the same, several times faster for all but a few channels, also
    where it has to move them there.
    """
    function: Any = torch.nn.functional.max_pool2d
    moves = reads_values(input) and input.ndim == 4 and input.shape[1] >= _MANY_CHANNELS and input.is_contiguous()
    pooled = input.contiguous(memory_format=torch.channels_last) if moves else input
    found: tuple[torch.Tensor, ...] = function(pooled, *args, **{**options, "return_indices": True})
    return tuple(one.contiguous() for one in found) if moves else found


@dataclass(frozen=True)
class OfPooled(FormOfOneInput):
    """Maxima of windows as `OfLargest`, by the places of the maxima, which pooling finds, too.

    A window has one entry with a multiplier: where the maximum gains, that which is largest for x, and where it loses, that
    which is largest for r. Its share is the change of the maximum by its own. `spatial`: how many dimensions windows have.
    """

    spatial: int

    reference_results = 2

    def for_reference(self, function: Callable[..., Any], options: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        if self.spatial == 2:
            return max_pool2d_with_places, options
        return function, {**options, "return_indices": True}

    def result(
        self, operation: Operation, values: Sequence[Any], reference: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        own: Any = operation.listed.function
        function, arguments = self.for_reference(own, operation.arguments(values))
        output, places = function(**arguments)
        other, other_places = others
        gain = output - other
        chosen = torch.where(gain >= 0, places, other_places)
        at = self._flat(chosen)
        change = (self._flat(values[0]).gather(-1, at) - self._flat(reference).gather(-1, at)).view_as(gain)
        return output, chosen, torch.nan_to_num(gain / change, 1.0)  # an entry that does not change has the derivative

    def multiplier(self, prepared: Tensors, multiplier: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        chosen, share = prepared
        found = self._flat(multiplier.new_zeros(shape))
        return found.scatter_add(-1, self._flat(chosen), self._flat(multiplier * share)).view(shape)

    def _flat(self, value: torch.Tensor) -> torch.Tensor:
        return value.flatten(-self.spatial)


def _through_largest(
    function: Callable[..., torch.Tensor], values: Tensors, references: Tensors, multiplier: torch.Tensor, smallest: bool
) -> Tensors:
    """The multipliers behind a function that chooses the largest of entries."""
    (output, pull), (other_output, pull_other) = vjp(function, *values), vjp(function, *references)
    gains = (output <= other_output) if smallest else (output >= other_output)
    of_gains, of_losses = multiplier * gains, multiplier * ~gains

    def shared(first: torch.Tensor, last: torch.Tensor) -> list[torch.Tensor]:
        """What entries get that are chosen for the value, and for the reference."""
        return [one + other for one, other in zip(pull(first), pull_other(last), strict=True)]

    change = output - other_output
    changes, derivatives = shared(of_gains * change, of_losses * change), shared(of_gains, of_losses)
    differences = [value - reference for value, reference in zip(values, references, strict=True)]
    unchanged = [one.abs().gt(0).logical_not_() for one in differences]  # a maximum changes by no more than its entry does
    return [_quotient(*one) for one in zip(changes, differences, unchanged, derivatives, strict=True)]


@dataclass(frozen=True)
class OfChoice(DifferenceForm):
    """One of two values by a comparison, as the product of each with a step of the distance of what is compared.

    Values have the mean of both steps. What the step changes has the slope of the step: where the comparison turns out
    differently for the reference, the compared values do differ.
    """

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        count = operation.inputs
        ours, theirs = operation.arguments(values), operation.arguments([*references, *values[count:]])
        compared = getattr(torch, ours["comparison"])
        step, other_step = (compared(one["first"], one["last"]).to(multiplier.dtype) for one in (ours, theirs))
        share = multiplier * (step + other_step) / 2
        gain = (ours["input"] - ours["other"] + theirs["input"] - theirs["other"]) / 2 * (step - other_step)
        distance = ours["first"] - ours["last"] - (theirs["first"] - theirs["last"])
        turned = step != other_step
        of_first = torch.where(turned, multiplier * only_finite(gain / distance), torch.zeros_like(multiplier))
        found = {"input": share, "other": multiplier - share, "first": of_first, "last": -of_first}
        pairs = zip(operation.names_of_inputs, values[:count], strict=True)
        return [found[name].sum_to_size(value.shape) for name, value in pairs]


@dataclass(frozen=True)
class OfSampling(DifferenceForm):
    """Values of maps at the places of a grid: the maps have the mean derivative at both grids, and the grid what is left.

    The coordinates of a place take their values one after another, in both orders, as in `BySlopes`; what its samples gain over
    all channels and the mean of both maps, is shared among them.
    """

    def multipliers(
        self, operation: Operation, values: Sequence[Any], references: Tensors, multiplier: torch.Tensor
    ) -> Tensors:
        count = operation.inputs
        ours, theirs = operation.arguments(values), operation.arguments([*references, *values[count:]])
        maps, grids = (ours["input"], theirs["input"]), (ours["grid"], theirs["grid"])
        function: Any = operation.listed.function

        def sampled(of: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = function(**{**ours, "input": of, "grid": grid})
            return found

        def of_maps() -> torch.Tensor:
            first, last = (vjp(lambda of, grid=grid: sampled(of, grid), maps[0])[1](multiplier)[0] for grid in grids)
            mean: torch.Tensor = (first + last) / 2
            return mean

        def of_grid() -> torch.Tensor:
            map = (maps[0] + maps[1]) / 2  # samples are linear in it
            gains = torch.zeros_like(grids[0])
            places = torch.arange(grids[0].shape[-1], device=gains.device)
            for order in (range(len(places)), reversed(range(len(places)))):
                grid, before = grids[1], sampled(map, grids[1])
                for place in order:
                    grid = torch.where(places == place, grids[0], grid)
                    after = sampled(map, grid)
                    gain = (multiplier * (after - before)).sum(1)
                    gains, before = gains + gain.unsqueeze(-1) * (places == place) / 2, after
            derivative = vjp(lambda grid: sampled(map, grid), (grids[0] + grids[1]) / 2)[1](multiplier)[0]
            return quotient(gains, grids[0], grids[1], derivative)

        return [of_maps() if name == "input" else of_grid() for name in operation.names_of_inputs]

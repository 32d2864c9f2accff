"""Relevance without division: forms of operations whose backward pass carries multipliers.

The multiplier m of a tensor t with relevance R is defined by R = t m. For the rules that have such a form, the multipliers of
the inputs are vector-Jacobian products of those of the output (Achtibat et al. 2024, https://arxiv.org/abs/2402.05602; Ali et
al. 2022, https://proceedings.mlr.press/v162/ali22a.html). No denominator needs a stabilizer, and torch's own derivatives save
no more than for a gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lrpfx.errors import RuleError
from lrpfx.ir.operator import SavedScale
from lrpfx.layers.layer import Operation
from lrpfx.runtime.final_relevance import final
from lrpfx.runtime.layer_call import LayerCall, linear_part
from lrpfx.support.torch_internals import apply

Absorbed = dict[str, Any]


class MultiplierForm(ABC):
    """How an operation runs so that its derivative takes the multiplier of its output to those of its inputs."""

    #: Whether the relevance form of the rule divides by the operation's output.
    divides: bool

    @abstractmethod
    def run(self, operation: Operation, values: Sequence[Any]) -> Any:
        """The result for the values of a call. All but the data inputs are detached."""

    def keeps_from(self, place: int) -> bool:
        """Whether the data input at a place gets no relevance."""
        return False

    def absorbed(self, call: LayerCall, multiplier: torch.Tensor) -> Absorbed | None:
        """Relevance that no input receives, for the multiplier of the output; None if the rule's own account holds."""
        return None


@dataclass(frozen=True)
class Derivative(MultiplierForm):
    """The ordinary derivative, with a share for each input: 1/n for n factors of a product, 0 for a factor that only scales."""

    shares: tuple[float, ...] | None = None  # None: 1 for each input
    divides: bool = True

    def run(self, operation: Operation, values: Sequence[Any]) -> Any:
        if self.shares is None:
            return operation(values)
        inputs = [scaled(value, share) for value, share in zip(values, self.shares, strict=False)]
        return operation([*inputs, *values[len(inputs) :]])

    def keeps_from(self, place: int) -> bool:
        return self.shares is not None and self.shares[place] == 0.0

    def absorbed(self, call: LayerCall, multiplier: torch.Tensor) -> Absorbed | None:
        """What the output has beyond the part that is linear in the inputs, times the multiplier."""
        if not self.divides:
            return None
        shares = self.shares or (1.0,) * len(call.inputs)
        places = [place for place, share in enumerate(shares) if share]

        def run(changed: Sequence[Any], parameters: Sequence[Any]) -> torch.Tensor:
            inputs = dict(enumerate(call.inputs)) | dict(zip(places, changed, strict=True))
            return call.run_with(list(inputs.values()), parameters)

        factors = 1 if self.shares is None else len(places)
        inputs = tuple(call.inputs[place] for place in places)
        output, remainders = call.with_remainders(run, inputs, call.parameters, factors)
        return {part: where_finite(output, multiplier * value).sum() / factors for part, value in remainders.items()}


@dataclass(frozen=True)
class Ratio(MultiplierForm):
    """The ratio f(x) / x of an element-wise function, for relevance that passes unchanged."""

    divides: bool = False

    def run(self, operation: Operation, values: Sequence[Any]) -> Any:
        return apply(_ByRatio, operation, *values)


@dataclass(frozen=True)
class HeldScale(MultiplierForm):
    """The derivative of a normalization whose scale is held constant."""

    divides: bool = True

    def run(self, operation: Operation, values: Sequence[Any]) -> Any:
        if operation.listed.saved_scale is not None:
            return apply(_WithSavedScale, operation, *values)[0]
        return apply(_WithHeldScale, operation, *values)

    def absorbed(self, call: LayerCall, multiplier: torch.Tensor) -> Absorbed | None:
        """The bias times the multiplier, where a normalization subtracts its own mean."""
        if not self.divides:
            return None
        output, linear = linear_part(lambda input: _held(call.operation, (input, *call.own_values()[1:])), call.inputs)
        return {"bias": (multiplier * (output - linear)).sum()}


@dataclass(frozen=True)
class WithoutRelevance(MultiplierForm):
    """The plain operation, for a layer that gets no relevance: it only reads detached values."""

    divides: bool = False

    def run(self, operation: Operation, values: Sequence[Any]) -> Any:
        return operation(values)

    def absorbed(self, call: LayerCall, multiplier: torch.Tensor) -> Absorbed | None:
        return {}


def scaled(value: torch.Tensor, share: float) -> torch.Tensor:
    """The value, with a derivative that is multiplied by `share`."""
    if share == 1.0:
        return value
    return apply(_Scaled, value, share) if share else value.detach()


def carry_multiplier(value: torch.Tensor) -> torch.Tensor:
    """The value, at a place where multipliers begin: its readers give it relevance R, and it gets m = R / value.

    No value of zero has relevance, unless the rules before it put it there; it is then lost.
    """
    return apply(_CarryMultiplier, value)  # type: ignore[no-any-return]


def carry_relevance(value: torch.Tensor) -> torch.Tensor:
    """The value, at a place where multipliers end: its readers give it a multiplier m, and it gets R = value * m."""
    return apply(_CarryRelevance, value)  # type: ignore[no-any-return]


def where_finite(output: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, with 0 where `output` is infinite: masked scores, for example, have no relevance to pass on."""
    return torch.where(torch.isinf(output), torch.zeros_like(value), value)


def relevance_from(value: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """Value * multiplier, with 0 where the value is infinite, as a masked score is."""
    return where_finite(value, value * multiplier)


class _Scaled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor, share: float) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.share = inputs[1]

    @staticmethod
    def backward(ctx: Any, multiplier: torch.Tensor) -> Any:
        return multiplier * ctx.share, None


class _CarryMultiplier(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, relevance: torch.Tensor) -> Any:
        (value,) = ctx.saved_tensors
        return torch.where(value == 0, torch.zeros_like(relevance), relevance / value)


class _CarryRelevance(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, multiplier: torch.Tensor) -> Any:
        (value,) = ctx.saved_tensors
        return final(relevance_from(value, multiplier))


class _ByRatio(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(operation: Operation, *values: Any) -> torch.Tensor:
        return operation(values)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.operation, value, *others = inputs
        ctx.others = others  # plain numbers: a function with tensors besides its input has no ratio
        ctx.save_for_backward(value)

    @staticmethod
    def backward(ctx: Any, multiplier: torch.Tensor) -> Any:
        (value,) = ctx.saved_tensors
        ratio = ctx.operation.listed.ratio(value, ctx.operation.arguments((value, *ctx.others)))
        return None, multiplier * ratio, *(None for _ in ctx.others)


class _WithSavedScale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(operation: Operation, *values: Any) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = operation.arguments(values)
        return _saved_scale(operation).forward(arguments["input"], arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.operation, _, *others = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in others]
        ctx.save_for_backward(output[1], *(value if isinstance(value, torch.Tensor) else None for value in others))

    @staticmethod
    def backward(ctx: Any, multiplier: torch.Tensor, _: Any) -> Any:
        scale, *saved = ctx.saved_tensors
        others = [other if tensor is None else tensor for tensor, other in zip(saved, ctx.others, strict=True)]
        arguments = ctx.operation.arguments((None, *others))
        return None, _saved_scale(ctx.operation).pull(multiplier, scale, arguments), *(None for _ in others)


def _saved_scale(operation: Operation) -> SavedScale:
    found = operation.listed.saved_scale
    if found is None:
        raise RuleError(f"{operation.listed} has no derivative that saves its scale only")
    return found


class _WithHeldScale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(operation: Operation, *values: Any) -> torch.Tensor:
        return operation(values)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.operation, *values = inputs
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in values]
        ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in values))

    @staticmethod
    def backward(ctx: Any, multiplier: torch.Tensor) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        value, *others = (other if tensor is None else tensor for tensor, other in pairs)
        pull = torch.func.vjp(lambda input: _held(ctx.operation, (input, *others)), value)[1]
        return None, pull(multiplier)[0], *(None for _ in others)


def _held(operation: Operation, values: Sequence[Any]) -> torch.Tensor:
    """A normalization with its scale held constant."""
    arguments, detached = operation.arguments(values), operation.listed.detached
    if detached is None:
        raise RuleError(f"{operation.listed} does not normalize")
    return detached(arguments["input"], arguments)

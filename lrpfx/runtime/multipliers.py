"""Relevance without division: forms of operations whose backward pass carries multipliers.

The multiplier m of a tensor t with relevance R is defined by R = t m. For the rules that have such a form, the multipliers of
the inputs are vector-Jacobian products of those of the output (Achtibat et al. 2024, https://arxiv.org/abs/2402.05602; Ali et
al. 2022, https://proceedings.mlr.press/v162/ali22a.html). No denominator needs a stabilizer, and torch's own derivatives save
no more than for a gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lrpfx.errors import RuleError
from lrpfx.ir.operator import SavedScale
from lrpfx.operators.layer import Operation
from lrpfx.runtime.final_relevance import final
from lrpfx.runtime.layer_call import LayerCall, share_of, with_linear_shares
from lrpfx.support.derivatives import vjp
from lrpfx.support.tensors import is_floating, relevance_from, save_values, saved_values
from lrpfx.support.torch_internals import apply, pytree

Absorbed = dict[str, Any]


class MultiplierForm(ABC):
    """How an operation runs so that its derivative takes the multiplier of its output to those of its inputs."""

    #: Whether the relevance form of the rule divides by the operation's output.
    divides: bool
    #: Whether the values of a call end with those of the data inputs for a reference.
    needs_reference = False
    #: How many results of the operation for the reference follow.
    reference_results = 0

    @abstractmethod
    def run(self, operation: Operation, values: Sequence[Any]) -> Any:
        """The result for the values of a call. All but the data inputs are detached."""

    def for_reference(self, function: Callable[..., Any], options: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """The function with these results, the output first, that takes the place of the operation, and its named arguments."""
        return function, options

    def keeps_from(self, place: int) -> bool:
        """Whether the data input at a place gets no relevance."""
        return False

    def plain_shares(self, inputs: int) -> tuple[float, ...] | None:
        """The shares of so many data inputs, if `with_shares` and the plain operation are all that `run` does."""
        return None

    def absorbed(self, call: LayerCall, multiplier: torch.Tensor) -> Absorbed | None:
        """Relevance that no input receives, for the multiplier of the output; None if the rule's own account holds."""
        return None

    def relevance_of_parameter(self, call: LayerCall, multiplier: torch.Tensor, place: int) -> torch.Tensor | None:
        """What a linear layer sends through each entry of a parameter (see `Rule`), for the multiplier of the output."""
        return None


@dataclass(frozen=True)
class Derivative(MultiplierForm):
    """The ordinary derivative, with a share for each input: 1/n for n factors of a product, 0 for a factor that only scales."""

    shares: tuple[float, ...] | None = None  # None: 1 for each input
    divides: bool = True

    def run(self, operation: Operation, values: Sequence[Any]) -> Any:
        if self.shares is None:
            return operation(values)
        inputs = len(self.shares)
        return operation([*with_shares(self.shares, *values[:inputs]), *values[inputs:]])

    def keeps_from(self, place: int) -> bool:
        return self.shares is not None and self.shares[place] == 0.0

    def plain_shares(self, inputs: int) -> tuple[float, ...] | None:
        return self.shares or (1.0,) * inputs

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
        _, taken = call.with_remainders(run, inputs, call.parameters, factors)
        return {part: amount / factors for part, amount in taken(multiplier).items()}

    def relevance_of_parameter(self, call: LayerCall, multiplier: torch.Tensor, place: int) -> torch.Tensor | None:
        if self.shares is not None and any(share != 1.0 for share in self.shares):
            return None
        weight: torch.Tensor = call.parameters[place]
        return weight * call.parameter_gradient(multiplier, place, call.inputs, call.parameters)


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
        if operation.listed.normalization.saved_scale is not None:
            return apply(_WithSavedScale, operation, *values)[0]
        return apply(_WithHeldScale, operation, *values)

    def absorbed(self, call: LayerCall, multiplier: torch.Tensor) -> Absorbed | None:
        """The bias times the multiplier, where a normalization subtracts its own mean."""
        if not self.divides:
            return None
        others = call.own_values()[1:]
        output, shares = with_linear_shares(lambda input: _held(call.operation, (input, *others)), call.inputs)
        return {"bias": share_of(output, multiplier) - sum(shares(multiplier))}


@dataclass(frozen=True)
class WithoutRelevance(MultiplierForm):
    """The plain operation, for a layer that gets no relevance: it only reads detached values."""

    divides: bool = False

    def run(self, operation: Operation, values: Sequence[Any]) -> Any:
        return operation(values)

    def plain_shares(self, inputs: int) -> tuple[float, ...] | None:
        return (1.0,) * inputs

    def absorbed(self, call: LayerCall, multiplier: torch.Tensor) -> Absorbed | None:
        return {}

    def relevance_of_parameter(self, call: LayerCall, multiplier: torch.Tensor, place: int) -> torch.Tensor | None:
        return torch.zeros_like(call.parameters[place])


def with_shares(shares: Sequence[float], *values: torch.Tensor) -> Sequence[torch.Tensor]:
    """The values, with derivatives that are multiplied by the shares."""
    changed = [value if share else value.detach() for share, value in zip(shares, values, strict=True)]
    places = [place for place, share in enumerate(shares) if share not in (0.0, 1.0)]
    if places:  # one Function for all: a Function costs as much as a small layer
        found = apply(_WithShares, [shares[place] for place in places], *[values[place] for place in places])
        for place, value in zip(places, found, strict=True):
            changed[place] = value
    return changed


def carry_multiplier(value: torch.Tensor) -> torch.Tensor:
    """The value, at a place where multipliers begin: its readers give it relevance R, and it gets m = R / value.

    No value of zero has relevance, unless the rules before it put it there; it is then lost.
    """
    carried: torch.Tensor = apply(_CarryMultiplier, value)
    return carried


def begins_multipliers(value: torch.Tensor) -> bool:
    """Whether multipliers begin at a value, so that its relevance may be sparse."""
    return getattr(value.grad_fn, "_forward_cls", None) is _CarryMultiplier


def carry_relevance(value: Any) -> Any:
    """The value, at a place where multipliers end: its readers give it a multiplier m, and it gets R = value * m.

    So does each tensor of floating-point numbers in a nested value, such as an input that is a list.
    """
    if isinstance(value, torch.Tensor):
        return apply(_CarryRelevance, value)
    return pytree.tree_map(lambda leaf: apply(_CarryRelevance, leaf) if is_floating(leaf) else leaf, value)


class _WithShares(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(shares: Sequence[float], *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.shares = inputs[0]

    @staticmethod
    def backward(ctx: Any, *multipliers: torch.Tensor) -> Any:
        return None, *(multiplier * share for multiplier, share in zip(multipliers, ctx.shares, strict=True))


def multiplier_from(value: torch.Tensor, relevance: torch.Tensor) -> torch.Tensor:
    """The multiplier of a value with this relevance, 0 where the value is 0. Relevance of few entries may be sparse."""
    if not torch.compiler.is_compiling() and relevance.layout is torch.sparse_coo:
        relevance = relevance.coalesce()
        places = tuple(relevance.indices())
        found = torch.zeros_like(value)
        found[places] = multiplier_from(value[places], relevance.values())
        return found
    return torch.where(value == 0, torch.zeros_like(relevance), relevance / value)


class _Conversion(torch.autograd.Function):
    """Forward: the value, which is saved."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])


class _CarryMultiplier(_Conversion):
    @staticmethod
    def backward(ctx: Any, relevance: torch.Tensor) -> Any:
        (value,) = ctx.saved_tensors
        return multiplier_from(value, relevance)


class _CarryRelevance(_Conversion):
    @staticmethod
    def backward(ctx: Any, multiplier: torch.Tensor) -> Any:
        (value,) = ctx.saved_tensors
        return final(relevance_from(value, multiplier))


class _Function(torch.autograd.Function):
    """Forward: an operation, whose values are saved."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operation: Operation, *values: Any) -> torch.Tensor:
        output: torch.Tensor = operation(values)
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.operation, *values = inputs
        save_values(ctx, values)


class _ByRatio(_Function):
    @staticmethod
    def backward(ctx: Any, multiplier: torch.Tensor) -> Any:
        values, _ = saved_values(ctx)
        ratio = ctx.operation.listed.values.ratio(values[0], ctx.operation.arguments(values))
        return None, multiplier * ratio, *(None for _ in values[1:])


class _WithHeldScale(_Function):
    @staticmethod
    def backward(ctx: Any, multiplier: torch.Tensor) -> Any:
        (value, *others), _ = saved_values(ctx)
        pull = vjp(lambda input: _held(ctx.operation, (input, *others)), value)[1]
        return None, pull(multiplier)[0], *(None for _ in others)


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
        save_values(ctx, [None, *others], [output[1]])

    @staticmethod
    def backward(ctx: Any, multiplier: torch.Tensor, _: Any) -> Any:
        values, (scale,) = saved_values(ctx)
        arguments = ctx.operation.arguments(values)
        return None, _saved_scale(ctx.operation).pull(multiplier, scale, arguments), *(None for _ in values[1:])


def _saved_scale(operation: Operation) -> SavedScale:
    found = operation.listed.normalization.saved_scale
    if found is None:
        raise RuleError(f"{operation.listed} has no derivative that saves its scale only", topic="defects")
    return found


def _held(operation: Operation, values: Sequence[Any]) -> torch.Tensor:
    """A normalization with its scale held constant."""
    arguments, detached = operation.arguments(values), operation.listed.normalization.detached
    if detached is None:
        raise RuleError(f"{operation.listed} does not normalize", topic="defects")
    return detached(arguments["input"], arguments)

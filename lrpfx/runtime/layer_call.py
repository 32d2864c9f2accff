"""One executed call of a layer, in the form that rules receive."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from lrpfx.errors import RuleError
from lrpfx.ir.kinds import AvgPool, BatchNorm, Interpolation, Linear, MatMul, Product, Sum
from lrpfx.operators.layer import Operation
from lrpfx.support.derivatives import vjp
from lrpfx.support.tensors import only_finite, where_finite


class ParameterChange(Protocol):
    """The part of a branch's parameter modifier that a call of a layer needs."""

    @property
    def arithmetic(self) -> bool: ...

    def apply(self, parameter: Any, name: str) -> Any: ...


class LayerCall:
    """One executed call of a layer, which a rule receives in the backward pass.

    `inputs` and `output` are those of the forward pass; `output` is None if it was not saved. `branches[k]` holds the values of
    the operation's parameters in the k-th modified copy.
    """

    def __init__(
        self,
        operation: Operation,
        inputs: tuple[torch.Tensor, ...],
        parameters: tuple[Any, ...],
        branches: tuple[tuple[Any, ...], ...],
        extras: tuple[Any, ...],
        output: Any,
        kept: dict[str, Any] | None = None,
        is_traced: bool = False,
    ) -> None:
        """`is_traced`: whether the call becomes part of a compiled or lowered program."""
        self.operation = operation
        self.inputs = inputs
        self.parameters = parameters
        self.branches = branches
        self.extras = extras
        self.output = output
        self.kept = kept
        self.is_traced = is_traced

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result of `compute`, which must not depend on the relevance: it is kept if several relevances are propagated."""
        if self.kept is None:
            return compute()
        if name not in self.kept:
            self.kept[name] = compute()
        return self.kept[name]

    def multiplied(self, own: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
        """`own` * `factor`, in place unless gradients are enabled."""
        return own * factor if torch.is_grad_enabled() else own.mul_(factor)

    def added(self, own: torch.Tensor, other: torch.Tensor, weight: float | None = None) -> torch.Tensor:
        """`own` + `weight` * `other`, in place unless gradients are enabled (or, for a weighted sum, the call is traced)."""
        if weight is not None and self.is_traced:
            return own + other * weight  # inductor loses `alpha` when it fuses the addition into a product
        alpha = 1 if weight is None else weight
        return own.add(other, alpha=alpha) if torch.is_grad_enabled() else own.add_(other, alpha=alpha)

    def values(self, inputs: Sequence[Any], parameters: Sequence[Any]) -> tuple[Any, ...]:
        """All values of the operation, in the order of its slots. Buffers are copied, since training changes them in place."""
        extras = [extra.clone() if isinstance(extra, torch.Tensor) else extra for extra in self.extras]
        return (*inputs, *parameters, *extras)

    def with_modified(self, modifiers: Sequence[ParameterChange]) -> "LayerCall":
        """The same call with one branch for each modifier."""
        named = tuple(zip(self.operation.parameters, self.parameters, strict=True))

        def modified() -> tuple[tuple[Any, ...], ...]:
            return tuple(tuple(modifier.apply(value, name) for name, value in named) for modifier in modifiers)

        branches = self.once("branches", modified)
        values = (self.extras, self.output, self.kept, self.is_traced)
        return LayerCall(self.operation, self.inputs, self.parameters, branches, *values)

    def own_values(self) -> tuple[Any, ...]:
        """All values of the operation in the forward pass."""
        return self.values(self.inputs, self.parameters)

    def own_output(self) -> torch.Tensor:
        """The output of the forward pass, recomputed if it was not saved."""
        return self.run(*self.inputs) if self.output is None else self.output

    def arguments(self) -> dict[str, Any]:
        """The arguments of a listed operator, by name."""
        return self.operation.arguments(self.own_values())

    def with_remainders(
        self,
        run: Callable[[Sequence[Any], Sequence[Any]], torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
        parameters: Sequence[Any],
        factors: int = 1,
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], dict[str, torch.Tensor]]]:
        """The result y of `run`, and a function from a gradient of y to the share of what comes from no input, by origin.

        It comes from the remainder y - J x beyond the part linear in the inputs. That of a sum is its "constants", and that of
        other linear layers the "bias". For a nonlinear layer, J x is the linear part of the Taylor expansion at x, and the
        remainder is split into "bias", the contribution of the biases, and "expansion", the rest of the constant term. A
        product is linear in each of its `factors`, so its derivative along all of them counts it once for each.
        """
        biases: list[int] = []
        kind = self.operation.kind
        if issubclass(kind, Sum):
            origin = "constants"
        elif issubclass(kind, AFFINE) or (issubclass(kind, (MatMul, Product)) and factors == len(inputs)):
            origin = "bias"
        else:
            origin = "expansion"
            named = enumerate(zip(self.operation.parameters, parameters, strict=True))
            biases = [at for at, (name, value) in named if value is not None and "bias" in name.rpartition(".")[2]]

        def run_changed(*changed: torch.Tensor) -> torch.Tensor:
            given = dict(zip(biases, changed[len(inputs) :], strict=True))
            return run(changed[: len(inputs)], [given.get(place, value) for place, value in enumerate(parameters)])

        output, linear_shares = with_linear_shares(run_changed, (*inputs, *(parameters[place] for place in biases)))

        row = self.operation.operator
        unbiased = row is not None and row.linear.weight_layout is not None and self.arguments().get("bias") is None

        def taken(gradient: torch.Tensor) -> dict[str, torch.Tensor]:
            shares = linear_shares(gradient)
            remainder = factors * share_of(output, gradient) - sum(shares)
            rounding = factors * torch.finfo(output.dtype).eps * share_of(output.abs(), gradient.abs())
            if unbiased or remainder.abs() <= rounding:  # a layer without a bias has none
                remainder = torch.zeros_like(remainder)
            return {origin: remainder} | ({"bias": torch.stack(shares[len(inputs) :]).sum()} if biases else {})

        return output, taken

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The layer's output for other inputs."""
        return self.run_with(inputs, self.parameters)

    def run_with(self, inputs: Sequence[Any], parameters: Sequence[Any]) -> torch.Tensor:
        """The layer's output for other inputs and parameters."""
        output: torch.Tensor = self.operation(self.values(inputs, parameters))
        return output

    def times_inputs(self, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the inputs, each multiplied by its input."""
        pairs = zip(self.inputs, gradients, strict=True)
        return tuple(gradient if gradient is None else input * gradient for input, gradient in pairs)

    def run_branch(self, branch: int, input: torch.Tensor) -> torch.Tensor:
        """The layer's output for another input and the parameters of a branch."""
        output: torch.Tensor = self.operation(self.values((input,), self.branches[branch]))
        return output

    def named_branch(self, branch: int) -> dict[str, Any]:
        """The parameters of a branch, by name."""
        return dict(zip(self.operation.parameters, self.branches[branch], strict=True))

    def pull_back_branch(self, branch: int, gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """The gradient of the layer's one input with the parameters of a branch, in new memory."""
        return self.pull_back_with(gradient, self.branches[branch], input)

    def pull_back_with(self, gradient: torch.Tensor, parameters: Sequence[Any], input: torch.Tensor) -> torch.Tensor:
        """The gradient of the layer's one input with other parameters, in new memory."""
        return self._single(self.adjoint(gradient, (input,), parameters))

    def pull_back_single(self, gradient: torch.Tensor) -> torch.Tensor:
        """The layer's ordinary gradient with respect to its one input."""
        return self._single(self.pull_back(gradient))

    @staticmethod
    def _single(gradients: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        (gradient,) = gradients
        if gradient is None:
            raise RuleError("the layer's output does not depend on its input", topic="no-path-to-the-input")
        return gradient

    def pull_back(self, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The layer's ordinary gradient with respect to each input."""
        return self.adjoint(gradient, self.inputs, self.parameters)

    def adjoint(
        self, gradient: torch.Tensor, inputs: tuple[torch.Tensor, ...], parameters: Sequence[Any]
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradient of the inputs: by the operator's transposed map if the table has one, by torch.func.vjp otherwise."""
        result = self.operation.adjoint(gradient, self.values(inputs, parameters))
        if result is not None:
            return result
        pulled = vjp(lambda *changed: self.operation(self.values(changed, parameters)), *inputs)
        return pulled[1](gradient)

    def parameter_gradient(
        self, gradient: torch.Tensor, place: int, inputs: Sequence[torch.Tensor], parameters: Sequence[Any]
    ) -> torch.Tensor:
        """The ordinary gradient of the parameter at a place, for other inputs and parameters."""

        def run(changed: torch.Tensor) -> Any:
            given = [changed if at == place else value for at, value in enumerate(parameters)]
            return self.operation(self.values(inputs, given))

        found: torch.Tensor = vjp(run, parameters[place])[1](gradient)[0]
        return found

    def parameter_gradients(
        self, gradient: torch.Tensor, places: Sequence[int], wanted: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        """The layer's ordinary gradient with respect to the parameters at the `wanted` positions."""
        if not wanted:
            return ()

        def run(*changed: torch.Tensor) -> Any:
            given = dict(zip(wanted, changed, strict=True))
            parameters = [given.get(at, value) for at, value in zip(places, self.parameters, strict=True)]
            return self.operation(self.values(self.inputs, parameters))

        primals = [self.parameters[places.index(at)] for at in wanted]
        return vjp(run, *primals)[1](gradient)


#: Layers that are linear in their input up to a bias.
AFFINE = (Linear, BatchNorm, AvgPool, Interpolation)


def with_linear_shares(
    function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, Callable[[torch.Tensor], list[torch.Tensor]]]:
    """The result y of `function`, and a function from a gradient g of y to the shares g · J x of the inputs x, J = dy/dx.

    J x itself is not computed: g · J x = Jᵀ g · x. Forward-mode derivatives number their levels for all threads together, and
    are infinite at places where the gradient that relevance follows is not, such as the zeros of a root behind a ReLU.
    """
    output, pull = vjp(function, *inputs)

    def shares(gradient: torch.Tensor) -> list[torch.Tensor]:
        pulled = pull(where_finite(output, gradient))
        return [share_of(input, one) for input, one in zip(inputs, pulled, strict=True)]

    return output, shares


def share_of(value: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """The sum of value * multiplier, without entries that are not finite: masked scores, and zeros with an infinite slope."""
    return only_finite(value.detach() * multiplier.detach()).double().sum()

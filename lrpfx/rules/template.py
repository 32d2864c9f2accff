"""What a rule is: the replacement of a layer's gradient by relevance.

`Hook` is any such replacement. `BasicHook` is the template that nearly all rules of Layer-wise Relevance Propagation fit: K
modified copies of the layer are run, the incoming relevance is divided among their outputs, sent back through each of them,
and the results are combined (Bach et al. 2015, https://doi.org/10.1371/journal.pone.0130140; Montavon et al. 2019,
https://doi.org/10.1007/978-3-030-28954-6_10).
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn

from lrpfx import types
from lrpfx.errors import InputTypeError, RuleError
from lrpfx.layers.layer import Layer, Operation, layer_of_module
from lrpfx.module_mode.registration import (
    Forward,
    Registration,
    RemovableHandle,
    RemovableHandleList,
    call_with_code,
    call_with_rule,
    inner_forward,
    ruled_call,
    stored_arguments,
    takes_kwargs,
)
from lrpfx.rules.modifiers import Clamp, NoMod, ParamMod, Unchanged, describe_value
from lrpfx.rules.stabilizer import Stabilizer, StabilizerFunction
from lrpfx.runtime.propagation import Gate, LayerCall

Tensors = Sequence[torch.Tensor]
Absorbed = dict[str, Any]  # what becomes of relevance that no input gets -> its amount, a number or a scalar tensor
InputFunction = Callable[[torch.Tensor], torch.Tensor]
GradientMapper = Callable[[torch.Tensor, Tensors], "torch.Tensor | Sequence[torch.Tensor | None]"]
Reducer = Callable[[Tensors, Sequence[torch.Tensor | None]], torch.Tensor]


class Hook:
    """The replacement of a layer's gradient; as it stands here, it keeps the gradient.

    There are two ways to write one. A rule of propagation overrides `propagate`, as the built-in rules do. A rule with code of
    its own overrides `forward(module, args, kwargs, output)`, to look at a call, and
    `backward(module, grad_input, grad_output)`, to return other gradients of the inputs, or None to leave them;
    `stored_tensors` keeps what one needs for the other, for each call by itself.
    """

    #: Names of the attributes that `repr` shows, in order.
    shown: ClassVar[tuple[str, ...]] = ()
    #: Whether `propagate` reads the layer's inputs and parameters.
    saves_inputs: ClassVar[bool] = True

    #: Whether `forward` takes (module, args, kwargs, output) rather than (module, input, output).
    forward_takes_kwargs: ClassVar[bool] = True

    #: Whether the rule is code around a call: it overrides one of the methods for that below the class with its `propagate`.
    has_code: ClassVar[bool] = True

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.forward_takes_kwargs = takes_kwargs(cls.forward)
        cls.has_code = _overrides_code(cls)

    def __init__(self) -> None:
        self.stored_tensors: dict[str, Any] = {}
        self.gate = Gate()

    @property
    def active(self) -> bool:
        """Whether the rule acts on gradients; while it does not, layers have their ordinary gradient."""
        return self.gate.open

    @active.setter
    def active(self, value: bool) -> None:
        self.gate.open = value

    # --- code of one's own

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called before the module; returns the (args, kwargs) to call it with, or None to leave them."""
        return args, kwargs

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Called after the module; may return another output. The shorter signature (module, input, output) works as well.

        A rule of propagation stores the call's arguments here, as "input" and "kwargs".
        """
        if self.propagates:
            self.stored_tensors.update(input=args, kwargs=kwargs)

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Called last in the forward pass; returns the output, or None to leave it."""
        return output

    def pre_backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        """Called when the gradient of the outputs is known."""

    def backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        """Gradients of the inputs in place of `grad_input`, the ordinary ones; None leaves them.

        A rule of propagation returns the relevance of the inputs.
        """
        return self.propagate(self._call_of(module), grad_output[0]) if self.propagates else None

    def _call_of(self, module: nn.Module) -> LayerCall:
        """The call whose backward pass runs."""
        call: LayerCall | None = self.stored_tensors.get("call")
        if call is not None:
            return call
        args, kwargs = self.stored_tensors["input"], self.stored_tensors["kwargs"]
        ruled, values = ruled_call(self, self.gate, module, inner_forward(module), args, kwargs)
        return ruled.layer_call(tuple(values), None)

    # --- module mode

    def register(self, module: nn.Module) -> RemovableHandleList:
        """Put the rule on a module until the handles are removed. `RuleError` if it cannot fit the module.

        Whether it fits the number of inputs and the shapes is found out when the module is called.
        """
        if not isinstance(module, nn.Module):
            raise InputTypeError(f"a rule is registered on a torch.nn.Module, not on {type(module).__name__}")
        try:
            self.check(layer_of_module(module))
        except RuleError as error:
            raise RuleError(f"{self} does not fit {type(module).__name__}: {error}") from error
        self.gate = Gate()
        return RemovableHandleList([RemovableHandle(self), Registration(module, self)])

    def remove(self) -> None:
        """Forget stored tensors; gradients of calls made so far are the ordinary ones from now on."""
        self.stored_tensors.clear()
        self.gate.open = False

    def call(self, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """A call of a module that the rule is registered on."""
        if self.has_code:
            return call_with_code(self, self.gate, module, forward, args, kwargs)
        self.stored_tensors = stored_arguments(args, kwargs) if self.saves_inputs else {}
        return call_with_rule(self, self.gate, module, forward, args, kwargs)

    @property
    def title(self) -> str:
        """The rule's name."""
        return type(self).__name__

    @property
    def propagates(self) -> bool:
        """Whether the rule says how relevance propagates."""
        return type(self).propagate is not Hook.propagate

    # --- rules of propagation

    @property
    def saves_output(self) -> bool:
        """Whether `propagate` reads the layer's output."""
        return False

    @property
    def parameter_modifiers(self) -> tuple[ParamMod, ...]:
        """How each branch changes the parameters; the compiler evaluates this ahead of time."""
        return ()

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Relevance of each of the layer's inputs, from the relevance of its output."""
        return call.pull_back(relevance)

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed | None:
        """Where the relevance goes that `propagate` does not pass on to the inputs, in total; None where the rule cannot say.

        Keys: "bias", "expansion" and "constants" for what the layer adds to the part that is linear in its input (see
        `LayerCall.with_remainders`), "stabilizer" for what keeps denominators from zero, "absent" for relevance of outputs to
        which nothing contributes that the rule could follow, and "stopped" for what the rule means to hold back.
        """
        return None

    def check(self, layer: Layer) -> None:
        """`RuleError` if the rule cannot be applied to `layer`: a call in a graph, or a module before any call."""

    def check_call(self, operation: Operation, inputs: Sequence[torch.Size], output: torch.Size) -> None:
        """`RuleError` if the rule cannot be applied to a call of `operation` with inputs and output of these shapes.

        Asked in each forward pass, before any relevance flows, and by the compiler where it knows the shapes.
        """

    def copy(self) -> Self:
        """A rule with the same settings, for composites use rules as templates; to override where __init__ takes arguments."""
        return type(self)()

    def __repr__(self) -> str:
        settings = [(name, getattr(self, name)) for name in self.shown]
        shown = ", ".join(
            f"{name}={describe_value(value)}" for name, value in settings if value is not None and value is not False
        )
        return f"{self.title}({shown})"


def _overrides_code(rule: type[Hook]) -> bool:
    for base in rule.__mro__:
        if "propagate" in vars(base):
            return base is Hook
        if any(name in vars(base) for name in ("pre_forward", "forward", "post_forward", "pre_backward", "backward")):
            return True
    return False


class BasicHook(Hook):
    """The rule template with K branches.

        x_k = input_modifiers[k](x)
        y_k = output_modifiers[k](layer(x_k; param_modifiers[k](parameters)))
        (g_1, ..., g_K) = gradient_mapper(relevance, [y_1, ..., y_K])
        v_k = (dy_k / dx_k)^T g_k
        relevance of the input = reducer([x_1, ..., x_K], [v_1, ..., v_K])

    Layers with several inputs (a sum, say) get each input modified and reduced in the same way. Missing lists are identities.
    By default every branch divides the relevance by its stabilized output, and the products x_k * v_k are summed.
    """

    def __init__(
        self,
        input_modifiers: Sequence[InputFunction] | None = None,
        param_modifiers: Sequence[ParamMod | Callable[[torch.Tensor, str], torch.Tensor]] | None = None,
        output_modifiers: Sequence[InputFunction] | None = None,
        gradient_mapper: GradientMapper | None = None,
        reducer: Reducer | None = None,
        stabilizer: float | StabilizerFunction = 1e-6,
    ) -> None:
        lengths = {len(part) for part in (input_modifiers, param_modifiers, output_modifiers) if part is not None}
        if len(lengths) > 1:
            raise RuleError(f"a rule needs as many modifiers of each part as branches, got {sorted(lengths)}")
        count = lengths.pop() if lengths else 1
        super().__init__()
        self.input_modifiers = [Unchanged()] * count if input_modifiers is None else input_modifiers
        self.param_modifiers = [NoMod()] * count if param_modifiers is None else param_modifiers
        self.output_modifiers = [Unchanged()] * count if output_modifiers is None else output_modifiers
        self.gradient_mapper = OwnRatios(Stabilizer.ensure(stabilizer)) if gradient_mapper is None else gradient_mapper
        self.reducer = WeightedProducts() if reducer is None else reducer

    def copy(self) -> Self:
        copied = copy.copy(self)
        Hook.__init__(copied)
        return copied

    @property
    def parameter_modifiers(self) -> tuple[ParamMod, ...]:
        return tuple(ParamMod.ensure(modifier) for modifier in self.param_modifiers)

    def _is_forward(self, branch: int) -> bool:
        """Whether a branch is the layer as it is, so that its output is the forward's own."""
        modifier = self.parameter_modifiers[branch]
        return (
            isinstance(self.input_modifiers[branch], Unchanged)
            and isinstance(modifier, NoMod)
            and (not modifier.zero_params or modifier.param_keys == [])
            and isinstance(self.output_modifiers[branch], Unchanged)
        )

    @property
    def saves_output(self) -> bool:
        return any(self._is_forward(branch) for branch in range(len(self.input_modifiers)))

    @property
    def is_proportional(self) -> bool:
        """Whether relevance of an input is known to be the input times something, so that there is none where it is 0."""
        as_written = type(self).propagate is BasicHook.propagate and not self.has_code
        return as_written and type(self.reducer) is WeightedProducts and all(map(_keeps_zero, self.input_modifiers))

    def check(self, layer: Layer) -> None:
        super().check(layer)
        for modifier in self.parameter_modifiers:
            modifier.check(tuple(layer.parameters))
        if layer.input_count == 0:
            raise RuleError("the layer has no input that relevance could go to")
        several = (layer.input_count or 0) > 1 and issubclass(layer.kind, (types.MatMul, types.Product))
        row = layer.operation.row
        of_entries = issubclass(layer.kind, types.Product) and row is not None and not row.elementwise
        if several or of_entries or issubclass(layer.kind, types.Gate):
            raise RuleError(
                "it is for layers that are linear in their inputs, but this one multiplies, and each factor would get all "
                "relevance. UniformEpsilon fits products of matrices, Uniform other products"
            )

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs: list[tuple[torch.Tensor, ...]] = []
        outputs: list[torch.Tensor] = []
        pulls: list[Callable[[torch.Tensor], tuple[torch.Tensor | None, ...]]] = []
        for branch, modify in enumerate(self.input_modifiers):
            modified = tuple(modify(input) for input in call.inputs)
            output, pull = self._run_branch(branch, call, modified)
            inputs.append(modified)
            outputs.append(output)
            pulls.append(pull)
        mapped = self.gradient_mapper(relevance, outputs)
        gradients = (mapped,) if isinstance(mapped, torch.Tensor) else tuple(mapped)
        if len(gradients) != len(outputs):
            raise RuleError(f"the gradient mapper returned {len(gradients)} tensors for {len(outputs)} branches")
        nothing = (None,) * len(call.inputs)
        pulled = [nothing if gradient is None else pull(gradient) for pull, gradient in zip(pulls, gradients, strict=True)]
        return tuple(
            self.reducer([modified[position] for modified in inputs], [values[position] for values in pulled])
            for position in range(len(call.inputs))
        )

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed | None:
        weigh = getattr(self.reducer, "branch_weights", None)
        account = getattr(self.gradient_mapper, "absorbed", None)
        if weigh is None or account is None:
            return None
        weights: Sequence[float] = weigh(len(self.input_modifiers))
        outputs, remainders = [], []
        for branch, modify in enumerate(self.input_modifiers):
            inputs = tuple(modify(input) for input in call.inputs)
            output, remainder = call.with_remainders(self._branch_function(branch, call), inputs, call.branches[branch])
            outputs.append(output)
            remainders.append(remainder)
        mapped = self.gradient_mapper(relevance, outputs)
        gradients = (mapped,) if isinstance(mapped, torch.Tensor) else tuple(mapped)
        taken = [
            {part: weight * where_finite(output, gradient * value).sum() for part, value in remainder.items()}
            for weight, gradient, output, remainder in zip(weights, gradients, outputs, remainders, strict=True)
            if gradient is not None
        ]
        return added([account(relevance, outputs, weights), *taken])

    def _branch_function(self, branch: int, call: LayerCall) -> Callable[[Sequence[Any], Sequence[Any]], torch.Tensor]:
        modify_output = self.output_modifiers[branch]
        return lambda inputs, parameters: modify_output(call.operation(call.values(inputs, parameters)))

    def _run_branch(
        self, branch: int, call: LayerCall, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor | None, ...]]]:
        """Output of a branch, and the map that sends a gradient back through it."""
        parameters, modify_output = call.branches[branch], self.output_modifiers[branch]
        branch_function = self._branch_function(branch, call)

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            return branch_function(inputs, parameters)

        if not (call.operation.has_adjoint and isinstance(modify_output, Unchanged)):
            differentiated = torch.func.vjp(run, *inputs)
            return differentiated[0], differentiated[1]
        saved = self._is_forward(branch) and call.output is not None
        output = call.output if saved else run(*inputs)
        return output, lambda gradient: call.adjoint(gradient, inputs, parameters)


# --- gradient mappers and reducers of the built-in rules -------------------------------------------------------------------


def _keeps_zero(modify: InputFunction) -> bool:
    if isinstance(modify, Clamp):
        return (modify.min is None or modify.min <= 0) and (modify.max is None or modify.max >= 0)
    return isinstance(modify, Unchanged)


class OwnRatios:
    """Each branch: relevance over its own stabilized output."""

    def __init__(self, stabilizer: StabilizerFunction) -> None:
        self.stabilizer = stabilizer

    def __call__(self, relevance: torch.Tensor, outputs: Tensors) -> list[torch.Tensor]:
        return [relevance / self.stabilizer(output) for output in outputs]

    def absorbed(self, relevance: torch.Tensor, outputs: Tensors, weights: Sequence[float]) -> Absorbed:
        """What the denominators keep, and what branches hold back that do not weigh 1 together."""
        kept = [held_back(weight * relevance, output, self.stabilizer) for weight, output in zip(weights, outputs, strict=True)]
        return added([*kept, {"stopped": (1.0 - sum(weights)) * relevance.sum()}])


class SharedRatios:
    """Groups of branches, each divided by the stabilized signed sum of its outputs.

    `groups`: for each group the branches in it with the sign of their output.
    """

    def __init__(self, stabilizer: StabilizerFunction, groups: Sequence[dict[int, int]]) -> None:
        self.stabilizer = stabilizer
        self.groups = tuple(groups)

    def __call__(self, relevance: torch.Tensor, outputs: Tensors) -> list[torch.Tensor | None]:
        gradients: list[torch.Tensor | None] = [None] * len(outputs)
        for group in self.groups:
            terms = [outputs[branch] if sign > 0 else -outputs[branch] for branch, sign in group.items()]
            ratio = relevance / self.stabilizer(sum_of(terms))
            for branch in group:
                gradients[branch] = ratio
        return gradients

    def absorbed(self, relevance: torch.Tensor, outputs: Tensors, weights: Sequence[float]) -> Absorbed:
        """What the denominators keep, and what groups hold back that do not weigh 1 together."""
        kept, total = [], 0.0
        for group in self.groups:
            weight = next(weights[branch] * sign for branch, sign in group.items())
            output = sum_of([sign * outputs[branch] for branch, sign in group.items()])
            kept.append(held_back(weight * relevance, output, self.stabilizer))
            total += weight
        return added([*kept, {"stopped": (1.0 - total) * relevance.sum()}])


class ConservingRatios:
    """Two groups of two branches, of positive and of negative contributions, weighted by alpha and by -beta.

    Where one of them is empty, the other one takes all relevance: see `weights_by_sign`.
    """

    def __init__(self, stabilizer: StabilizerFunction, alpha: float, beta: float) -> None:
        self.stabilizer = stabilizer
        self.alpha = alpha
        self.beta = beta

    def _groups(self, relevance: torch.Tensor, outputs: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each group the relevance that it is given, and the sum of its outputs."""
        totals = (outputs[0] + outputs[1], outputs[2] + outputs[3])
        weights = weights_by_sign(*totals, self.alpha, self.beta)
        return [(weight * relevance, total) for weight, total in zip(weights, totals, strict=True)]

    def __call__(self, relevance: torch.Tensor, outputs: Tensors) -> list[torch.Tensor]:
        ratios = [share / self.stabilizer(total) for share, total in self._groups(relevance, outputs)]
        return [ratio for ratio in ratios for _ in range(2)]

    def absorbed(self, relevance: torch.Tensor, outputs: Tensors, weights: Sequence[float]) -> Absorbed:
        """What the denominators keep."""
        return added([held_back(share, total, self.stabilizer) for share, total in self._groups(relevance, outputs)])


#: How many units of rounding of the contributions of one sign those of the other may be and count as none: what convolutions
#: that transform their input leave behind where they should give zero.
NONE_TO_ROUNDING = 4.0


def weights_by_sign(
    positive: torch.Tensor, negative: torch.Tensor, alpha: float, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares of positive and of negative contributions: alpha and -beta, or 1 and 0 where those of one sign are zero in sum."""
    rounding = NONE_TO_ROUNDING * torch.finfo(positive.dtype).eps
    no_negative = negative.abs() <= rounding * positive.abs()
    no_positive = (positive.abs() <= rounding * negative.abs()) & ~no_negative
    of_positive = torch.where(no_negative, 1.0, torch.where(no_positive, 0.0, torch.full_like(positive, alpha)))
    of_negative = torch.where(no_negative, 0.0, torch.where(no_positive, 1.0, torch.full_like(negative, -beta)))
    return of_positive, of_negative


def held_back(relevance: torch.Tensor, output: torch.Tensor, stabilizer: StabilizerFunction) -> Absorbed:
    """Relevance that a stabilized denominator keeps from the terms of its output.

    The stabilizer takes it, except where the terms are zero in sum: there nothing is that it could be shared out by.
    """
    stabilized = stabilizer(output)
    kept = where_finite(output, relevance / stabilized * (stabilized - output))
    nothing = torch.zeros_like(kept)
    return {
        "stabilizer": torch.where(output == 0, nothing, kept).sum(),
        "absent": torch.where(output == 0, kept, nothing).sum(),
    }


def added(accounts: Sequence[Absorbed]) -> Absorbed:
    """The accounts as one."""
    parts: Absorbed = {}
    for account in accounts:
        for part, amount in account.items():
            parts[part] = parts.get(part, 0.0) + amount
    return parts


def where_finite(output: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, and 0 where `output` is infinite, as masked scores are: they have no relevance to give."""
    return torch.where(torch.isinf(output), torch.zeros_like(value), value)


def sum_of(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of one or more tensors."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


class WeightedProducts:
    """Sum over branches of weight * input * pulled-back gradient; branches without a gradient add nothing."""

    def __init__(self, weights: Sequence[float] | None = None) -> None:
        self.weights = weights

    def __call__(self, inputs: Tensors, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        weights = self.weights or (1.0,) * len(inputs)
        terms = [
            input * gradient if weight == 1.0 else weight * (input * gradient)
            for weight, input, gradient in zip(weights, inputs, gradients, strict=True)
            if gradient is not None
        ]
        return sum_of(terms)

    def branch_weights(self, count: int) -> Sequence[float]:
        """The weight of each of `count` branches."""
        return self.weights or (1.0,) * count


class FirstGradient:
    """The pulled-back gradient of the first branch alone, without the input as a factor."""

    def __call__(self, inputs: Tensors, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        assert gradients[0] is not None
        return gradients[0]

    def branch_weights(self, count: int) -> Sequence[float]:
        """The weight of each of `count` branches; the input of the first one is taken as 1."""
        return (1.0, *(0.0,) * (count - 1))

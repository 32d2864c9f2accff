"""The autograd Function that puts a rule in place of a layer's gradient."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.fx import traceback as fx_traceback

from lrpfx.errors import InputError, RuleError
from lrpfx.ir.node import is_floating, map_arguments
from lrpfx.layers.layer import Operation, Slot
from lrpfx.types import AvgPool, BatchNorm, Interpolation, Linear, MatMul, Product, Sum


class ParameterModifier(Protocol):
    """The parameter modifier of a branch, as far as a call of a layer needs it."""

    def apply(self, parameter: Any, name: str) -> Any: ...


class LayerCall:
    """One executed call of a layer, as a rule sees it while relevance flows back.

    `inputs` and `output` are those of the forward pass (`output` is None where it was not saved); `branches[k]` are the
    values of the operation's parameters in the k-th modified copy.
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
    ) -> None:
        self.operation = operation
        self.inputs = inputs
        self.parameters = parameters
        self.branches = branches
        self.extras = extras
        self.output = output
        self.kept = kept

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result of `compute`, which does not depend on the relevance: kept while several relevances go back."""
        if self.kept is None:
            return compute()
        if name not in self.kept:
            self.kept[name] = compute()
        return self.kept[name]

    def values(self, inputs: Sequence[Any], parameters: Sequence[Any]) -> tuple[Any, ...]:
        """All values of the operation, in the order of its slots; buffers as copies, for training changes them in place."""
        extras = [extra.clone() if isinstance(extra, torch.Tensor) else extra for extra in self.extras]
        return (*inputs, *parameters, *extras)

    def with_modified(self, modifiers: Sequence[ParameterModifier]) -> "LayerCall":
        """The same call with a branch for each of the modifiers."""
        named = tuple(zip(self.operation.parameters, self.parameters, strict=True))
        branches = tuple(tuple(modifier.apply(value, name) for name, value in named) for modifier in modifiers)
        return LayerCall(self.operation, self.inputs, self.parameters, branches, self.extras, self.output, self.kept)

    def own_values(self) -> tuple[Any, ...]:
        """All values of the operation as the forward had them."""
        return self.values(self.inputs, self.parameters)

    def own_output(self) -> torch.Tensor:
        """The forward's output, computed again where it was not saved."""
        return self.run(*self.inputs) if self.output is None else self.output

    def arguments(self) -> dict[str, Any]:
        """The arguments of a listed operator by name."""
        return self.operation.arguments(self.own_values())

    def with_remainders(
        self,
        run: Callable[[Sequence[Any], Sequence[Any]], torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
        parameters: Sequence[Any],
        factors: int = 1,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The result of `run`, and what is left of it after the part that is linear in the inputs: y - J x, by its origin.

        In a sum that is its "constants", and in other layers that are linear the "bias". Where a layer is not linear, J x is
        the linear part of its Taylor expansion at x, and what is left is what its biases add there, "bias", and the constant
        term without them, "expansion". A product is linear in each of its `factors`, so that its derivative along all of them
        counts it as often.
        """
        output, linear = _linear_part(lambda *changed: run(changed, parameters), inputs)
        remainder = factors * output - linear
        kind = self.operation.kind
        if issubclass(kind, Sum):
            return output, {"constants": remainder}
        if issubclass(kind, AFFINE) or (issubclass(kind, (MatMul, Product)) and factors == len(inputs)):
            return output, {"bias": remainder}
        biases = [
            place
            for place, (name, value) in enumerate(zip(self.operation.parameters, parameters, strict=True))
            if value is not None and "bias" in name.rpartition(".")[2]
        ]
        if not biases:
            return output, {"expansion": remainder}

        def of_biases(*changed: torch.Tensor) -> torch.Tensor:
            given = dict(zip(biases, changed, strict=True))
            return run(inputs, [given.get(place, value) for place, value in enumerate(parameters)])

        bias = _linear_part(of_biases, tuple(parameters[place] for place in biases))[1]
        return output, {"bias": bias, "expansion": remainder - bias}

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
        """The layer's output for another input, with the parameters of a branch."""
        output: torch.Tensor = self.operation(self.values((input,), self.branches[branch]))
        return output

    def named_branch(self, branch: int) -> dict[str, Any]:
        """The parameters of a branch by name."""
        return dict(zip(self.operation.parameters, self.branches[branch], strict=True))

    def pull_back_branch(self, branch: int, gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """A layer's gradient with the parameters of a branch, for its one input; new memory."""
        return self.pull_back_with(gradient, self.branches[branch], input)

    def pull_back_with(self, gradient: torch.Tensor, parameters: Sequence[Any], input: torch.Tensor) -> torch.Tensor:
        """A layer's gradient with other parameters, for its one input; new memory."""
        (relevance,) = self.adjoint(gradient, (input,), parameters)
        assert relevance is not None
        return relevance

    def pull_back(self, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The layer's ordinary gradient with respect to each input."""
        return self.adjoint(gradient, self.inputs, self.parameters)

    def adjoint(
        self, gradient: torch.Tensor, inputs: tuple[torch.Tensor, ...], parameters: Sequence[Any]
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradient of the inputs: the operator's transposed map where the table has one, what torch derives elsewhere."""
        result = self.operation.adjoint(gradient, self.values(inputs, parameters))
        if result is not None:
            return result
        pulled = torch.func.vjp(lambda *changed: self.operation(self.values(changed, parameters)), *inputs)
        return pulled[1](gradient)  # type: ignore[no-any-return]

    def parameter_gradients(
        self, gradient: torch.Tensor, places: Sequence[int], wanted: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        """The layer's ordinary gradient with respect to those of its parameters whose place is wanted."""
        if not wanted:
            return ()

        def run(*changed: torch.Tensor) -> Any:
            given = dict(zip(wanted, changed, strict=True))
            parameters = [given.get(at, value) for at, value in zip(places, self.parameters, strict=True)]
            return self.operation(self.values(self.inputs, parameters))

        primals = [value for at, value in zip(places, self.parameters, strict=True) if at in wanted]
        return torch.func.vjp(run, *primals)[1](gradient)  # type: ignore[no-any-return]


#: Layers that are linear in their input up to a bias.
AFFINE = (Linear, BatchNorm, AvgPool, Interpolation)


def _linear_part(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of `function`, and its derivative along `inputs`: y and J x."""
    try:
        output, linear = torch.func.jvp(function, inputs, inputs)[:2]
    except (NotImplementedError, RuntimeError):  # no forward-mode derivative: transpose the transposed map
        output, pull = torch.func.vjp(function, *inputs)[:2]
        push = torch.func.vjp(pull, torch.zeros_like(output))[1]
        (linear,) = push(inputs)
    return output, linear


class Gate:
    """Whether a rule acts: while it does not, the layer has its ordinary gradient."""

    def __init__(self) -> None:
        self.open = True


class Rule(Protocol):
    """What the Function needs of a rule (see `lrpfx.rules.template.Hook`)."""

    saves_inputs: ClassVar[bool]
    has_code: ClassVar[bool]
    gate: Gate
    stored_tensors: dict[str, Any]

    @property
    def title(self) -> str: ...

    @property
    def saves_output(self) -> bool: ...

    @property
    def parameter_modifiers(self) -> tuple[ParameterModifier, ...]: ...

    def check_call(self, operation: Operation, inputs: Sequence[torch.Size], output: torch.Size) -> None: ...

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]: ...


_POSITIVE = "_lrpfx_positive"  # attribute of an output: its positive part, and the output's version of which it is that
ORIGIN = "lrpfx"  # key under which traced operations say where they come from
ABSENT = -1  # the place of a parameter that a branch leaves out, such as a bias taken as zero


@dataclass(frozen=True)
class RuledOperation:
    """An operation with the rule that replaces its gradient.

    The operation's data inputs come first among the tensors that a call passes, then every distinct parameter, modified or
    not. `parameters` says where the operation's own parameters stand among them, and `branches[k]` where those of the rule's
    k-th modified copy do, or `ABSENT`; without `branches`, parameters are modified when relevance flows back. From
    `first_extra` on stand the operation's other values.
    """

    rule: Rule
    operation: Operation
    parameters: tuple[int, ...]
    branches: tuple[tuple[int, ...], ...] | None
    first_extra: int
    #: For layers whose rule can be switched off, and whose parameters get their ordinary gradient. It costs memory: all inputs
    #: are saved, whatever the rule reads.
    gate: Gate | None = None
    #: Inputs that are not saved but computed again: which, the operation that made it, and where its values stand.
    recomputed: tuple[tuple[int, Operation, tuple[int, ...]], ...] = ()
    #: Of the node.
    name: str = ""
    #: Whether the positive part of the output is all that the rule reads of it, and what the ReLU behind it returns.
    hands_on_positive: bool = False
    takes_positive: bool = False
    #: Where the rule finds the relevance of the output: what it keeps of a call of a module.
    stored_tensors: dict[str, Any] | None = None

    def with_recomputed(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values with the inputs that were not saved."""
        changed = list(values)
        for place, operation, places in self.recomputed:
            if values[place] is None:
                changed[place] = operation([values[at] for at in places])
        return tuple(changed)

    def with_inputs(self, inputs: Sequence[Any], values: tuple[Any, ...]) -> Any:
        """The operation's result for other inputs, with the parameters and extras among `values`."""
        _, parameters, _, extras = self.split(values)
        return self.operation((*inputs, *parameters, *extras))

    def check(self, values: tuple[Any, ...], output: torch.Tensor) -> None:
        """`RuleError` if the rule does not fit this call."""
        try:
            shapes = [value.shape for value in values[: self.operation.inputs]]
            self.rule.check_call(self.operation, shapes, output.shape)
        except RuleError as error:
            raise RuleError(f"{self.name}: {self.rule}: {error}") from error

    def split(
        self, values: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[tuple[Any, ...], ...], tuple[Any, ...]]:
        """Inputs, own parameters, parameters of each branch, and extras."""
        branches = tuple(tuple(None if at == ABSENT else values[at] for at in branch) for branch in self.branches or ())
        parameters = tuple(values[at] for at in self.parameters)
        return values[: self.operation.inputs], parameters, branches, values[self.first_extra :]

    def layer_call(self, values: tuple[Any, ...], output: Any, kept: dict[str, Any] | None = None) -> LayerCall:
        """The call with these values, as the rule sees it."""
        inputs, parameters, branches, extras = self.split(values)
        call = LayerCall(self.operation, inputs, parameters, branches, extras, output, kept)
        return call if self.branches is not None else call.with_modified(self.rule.parameter_modifiers)


_origins: ContextVar[bool] = ContextVar("origins", default=False)
_several: ContextVar[bool] = ContextVar("several", default=False)


@contextmanager
def _switched_on(switch: ContextVar[bool]) -> Iterator[None]:
    token = switch.set(True)
    try:
        yield
    finally:
        switch.reset(token)


def noting_origins() -> AbstractContextManager[None]:
    """A context in which traced operations note the node and the rule that they come from."""
    return _switched_on(_origins)


def several_relevances() -> AbstractContextManager[None]:
    """A context for forward passes through which more than one relevance will go back: what these share is kept."""
    return _switched_on(_several)


def is_traced() -> bool:
    """Whether the call becomes part of a compiled or lowered program."""
    return torch.compiler.is_compiling() or _origins.get()


def origin(text: str) -> AbstractContextManager[Any]:
    """A context for the operations of one node, while origins are noted."""
    if torch.compiler.is_compiling() or not _origins.get():
        return nullcontext()
    return fx_traceback.annotate({ORIGIN: text})


class CodeOfCall:
    """The code of a rule around one call of a layer in a graph.

    It acts on a copy of the rule, so that every call has stored tensors of its own, and the compiler sees no side effects.
    """

    def __init__(self, rule: Any, module: nn.Module | None) -> None:
        self.rule = copy.copy(rule)
        self.module = module

    def look_at(self, inputs: tuple[Any, ...], output: Any) -> tuple[list[torch.Tensor], Any]:
        """Let the rule look at the call: the tensors that it stores, and where they stand in what it stores."""
        self.rule.stored_tensors = {}
        arguments: tuple[Any, ...] = (inputs, {}) if self.rule.forward_takes_kwargs else (inputs,)
        if self.rule.forward(self.module, *arguments, output) is not None:
            raise RuleError(f"{self.rule} returns another output, which a rule of a graph cannot; register it on the module")
        tensors: list[torch.Tensor] = []

        def keep(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            tensors.append(leaf)
            return Slot(len(tensors) - 1)

        stored = map_arguments(self.rule.stored_tensors, keep)
        return tensors, stored

    def gradients(
        self, call: LayerCall, relevance: torch.Tensor, stored: Any, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        """What the rule makes of the gradients of the layer's inputs."""
        self.rule.stored_tensors = map_arguments(stored, lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf)
        self.rule.stored_tensors.update(grad_output=(relevance,), call=call)
        self.rule.pre_backward(self.module, [], (relevance,))
        ordinary = call.pull_back(relevance)
        result = self.rule.backward(self.module, list(ordinary), (relevance,))
        if result is None:
            return ordinary
        return (result,) if isinstance(result, torch.Tensor) else tuple(result)


class PropagateRelevance(torch.autograd.Function):
    """Forward: the layer. Backward: its rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(ruled: RuledOperation, module: nn.Module | None, *values: Any) -> Any:
        if ruled.takes_positive:
            positive, version = getattr(values[0], _POSITIVE, (None, None))
            if positive is not None and values[0]._version == version:
                return positive.detach()
        for place, value in enumerate(values[: ruled.operation.inputs]):
            if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
                raise InputError(
                    f"{ruled.name or 'a layer'} gets a tensor of {value.dtype} as input {place}, which the compiler took for a "
                    "signal. Pass example_inputs to lrpfx.transform, so that it knows the dtypes, or declare the input of the "
                    "model that it comes from to be no signal: constants=(name,)"
                )
        output = ruled.with_inputs(values[: ruled.operation.inputs], values)
        if not isinstance(output, torch.Tensor):
            raise RuleError(f"{ruled.rule} takes a layer that returns one tensor, but this one returns {type(output).__name__}")
        if not ruled.rule.has_code:
            ruled.check(values, output)
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ruled, module, *values = inputs
        ctx.ruled = ruled
        ctx.module = module
        ctx.kept = {} if not is_traced() and _several.get() else None
        device = output.device.type
        ctx.autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        kept: list[torch.Tensor] = []
        if ruled.rule.has_code:
            kept, ctx.stored = CodeOfCall(ruled.rule, module).look_at(tuple(values[: ruled.operation.inputs]), output)
        ctx.shapes = [value.shape for value in values[: ruled.operation.inputs]]
        if ruled.gate is not None:
            # Buffers are kept as they were: training changes them in place.
            buffers = values[ruled.first_extra :]
            values[ruled.first_extra :] = [None] * len(buffers)
            ctx.buffers = [value.clone() if isinstance(value, torch.Tensor) else value for value in buffers]
        elif not (ruled.rule.saves_inputs or ruled.rule.has_code):
            values = [None] * len(values)
        if ruled.gate is None and not is_traced():  # compilers decide themselves what they keep
            for place, _, _ in ruled.recomputed:
                values[place] = None
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in values]
        tensors = [value if isinstance(value, torch.Tensor) else None for value in values]
        # Where the rule can be switched off, the output is computed again: the next module may overwrite it.
        saves_output = ruled.rule.saves_output and ruled.gate is None
        if saves_output and ruled.hands_on_positive and not is_traced():
            # One tensor instead of two: the ReLU returns it, the next layer keeps it, and so does this one.
            positive = output.clamp(min=0.0)
            setattr(output, _POSITIVE, (positive, output._version))
            output = positive
        ctx.save_for_backward(*tensors, output if saves_output else None, *kept)

    @staticmethod
    def backward(ctx: Any, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ruled: RuledOperation = ctx.ruled
        count = len(ctx.others)
        tensors, output, kept = ctx.saved_tensors[:count], ctx.saved_tensors[count], ctx.saved_tensors[count + 1 :]
        values = tuple(other if tensor is None else tensor for tensor, other in zip(tensors, ctx.others, strict=True))
        if ruled.gate is not None:
            values = (*values[: ruled.first_extra], *ctx.buffers)
        dtypes = [value.dtype if isinstance(value, torch.Tensor) else None for value in values]
        if ctx.autocast:  # the forward ran in the precision of its output, whatever its inputs had
            values = tuple(_cast(value, relevance.dtype) for value in values)
        if ruled.gate is None:
            values = ruled.with_recomputed(values)
        call = ruled.layer_call(values, output, ctx.kept)
        if ruled.stored_tensors is not None:  # without its history, which leads back to this call
            ruled.stored_tensors["grad_output"] = (relevance.detach() if relevance.requires_grad else relevance,)
        gradients: list[torch.Tensor | None] = [None] * len(values)
        if ruled.gate is not None:
            wanted = [at for at in ruled.parameters if ctx.needs_input_grad[at + 2]]
            for at, gradient in zip(wanted, call.parameter_gradients(relevance, ruled.parameters, wanted), strict=True):
                gradients[at] = gradient
        acts = ruled.gate is None or ruled.gate.open
        if not acts:
            relevances = call.pull_back(relevance)
        elif ruled.rule.has_code:
            relevances = CodeOfCall(ruled.rule, ctx.module).gradients(call, relevance, ctx.stored, kept)
        else:
            with origin(f"{ruled.name}: {ruled.rule}"):
                relevances = ruled.rule.propagate(call, relevance)
        if len(relevances) != len(ctx.shapes):
            raise RuleError(f"{ruled.rule} returned {len(relevances)} relevances for {len(ctx.shapes)} inputs")
        for result, shape in zip(relevances, ctx.shapes, strict=True):
            if result is not None and result.shape != shape:
                raise RuleError(
                    f"{ruled.rule} returned relevance of shape {tuple(result.shape)} for an input of shape {tuple(shape)}; "
                    "give this layer a rule that fits a layer which changes the shape"
                )
        gradients[: len(relevances)] = relevances
        if ctx.autocast:
            gradients = [_cast(gradient, dtype) for gradient, dtype in zip(gradients, dtypes, strict=True)]
        if ruled.gate is None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            gradients = [gradient if gradient is None else _Final.apply(gradient) for gradient in gradients]  # type: ignore[no-untyped-call]
        return (None, None, *gradients)


class _Final(torch.autograd.Function):
    """Relevance that has no derivative: the modified weights do not follow the parameters, and other rules would act on it."""

    @staticmethod
    def forward(relevance: torch.Tensor) -> torch.Tensor:
        return relevance.view_as(relevance)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise InputError(
            "relevance is not differentiable in this module; transform the model with fold=False, and take the derivative "
            "inside `with explain_model.inactive()`"
        )


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """A floating-point tensor in another precision; anything else as it is."""
    return value.to(dtype) if dtype is not None and is_floating(value) else value


def propagate_relevance(ruled: RuledOperation, *values: Any, module: nn.Module | None = None) -> Any:
    """Run the layer, and its rule in place of the gradient when relevance flows back.

    `module` is what a rule with code of its own is told that it is called for.
    """
    return PropagateRelevance.apply(ruled, module, *values)  # type: ignore[no-untyped-call]

"""The autograd Functions that replace a layer's gradient with a rule."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lrpfx.errors import InputError, RuleError, add_note
from lrpfx.runtime.code_of_rules import CodeOfCall
from lrpfx.runtime.final_relevance import final
from lrpfx.runtime.layer_call import LayerCall
from lrpfx.runtime.live_derivatives import with_derivatives_only_off
from lrpfx.runtime.multipliers import MultiplierForm
from lrpfx.runtime.overwriting import Untouched
from lrpfx.runtime.ruled_operation import Handoff, RuledOperation, relevances_from
from lrpfx.support.tensors import is_floating, save_values, saved_values
from lrpfx.support.torch_internals import annotated, apply, has_autocast

ORIGIN = "lrpfx"  # the key under which traced operations record their origin

Relevances = tuple[torch.Tensor | None, ...]


def propagate_relevance(ruled: RuledOperation, *values: Any, module: nn.Module | None = None) -> Any:
    """Run the layer. In the backward pass, its rule replaces the gradient.

    `module` is the module that a rule with its own code receives.
    """
    if ruled.form is not None:
        return carry_multipliers(ruled, ruled.form, values)
    handoff = values[-1] if values and isinstance(values[-1], Handoff) else None  # a hook may have dropped it
    if handoff is not None:
        values = values[:-1]
    if ruled.switch is not None:
        if ruled.live is not None and not ruled.execution.traced:
            values = tuple(with_derivatives_only_off(ruled.switch, values, ruled.live))
        return apply(PropagateOrDifferentiate, ruled, module, *values)
    if ruled.rule.has_code:
        return apply(PropagateByCode, ruled, module, *values)
    return apply(PropagateRelevance, ruled, None if ruled.is_traced else handoff, *values)


def carry_multipliers(ruled: RuledOperation, form: MultiplierForm, values: Sequence[Any]) -> Any:
    """Run the layer, with multipliers in the backward pass."""
    inputs = ruled.operation.inputs
    _refuse_other_kinds(ruled, values[:inputs])
    arranged = ruled.arranged(values)
    if len(arranged) > inputs:
        arranged = (*arranged[:inputs], *map(constant, arranged[inputs:]))
    if not ruled.execution.traced:
        return form.run(ruled.operation, arranged)
    with origin(f"{ruled.name}: {ruled.rule}"):
        return form.run(ruled.operation, arranged)


def constant(value: Any) -> Any:
    """A value of a call that gets no gradient."""
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value


def origin(text: str) -> AbstractContextManager[Any]:
    """A context in which traced operations, and errors, as notes, record the node and the rule that they come from."""
    return _noted(text) if text else nullcontext()


@contextmanager
def _noted(text: str) -> Iterator[None]:
    with annotated({ORIGIN: text}):
        try:
            yield
        except Exception as error:
            add_note(error, f"at {text}")
            raise


class PropagateRelevance(torch.autograd.Function):
    """Forward: the layer. Backward: its rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(ruled: RuledOperation, handoff: Handoff | None, *values: Any) -> Any:
        positive = handoff.take(values[0]) if handoff is not None and ruled.takes_over else None
        return _run(ruled, values) if positive is None else positive.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ruled, handoff, *values = inputs
        ctx.kept = {} if ruled.execution.several else None
        saved = list(values) if ruled.rule.saves_inputs else [None] * len(values)
        if not ruled.is_traced:  # compilers decide on their own what to keep
            for place, _, _ in ruled.recomputed:
                saved[place] = None
        saved_output = output if ruled.rule.saves_output and ruled.saves_output else None
        if saved_output is not None and handoff is not None and ruled.hands_off:
            saved_output = handoff.give(output)
        _save(ctx, ruled, values, saved, [saved_output])

    @staticmethod
    def backward(ctx: Any, relevance: torch.Tensor) -> Relevances:
        ruled: RuledOperation = ctx.ruled
        values, (output,) = _saved(ctx, relevance)
        values, output, relevance = _for_code(ruled, ruled.with_recomputed(values), output, relevance)
        untouched = _untouched(ruled, values, output, relevance)
        with _own_precision(ctx, relevance):
            relevances = _propagated(ruled, ruled.layer_call(values, output, ctx.kept), relevance)
        untouched.check(ruled.rule, ruled.name)
        return (None, None, *_all_final(_checked(ctx, relevances)))


class PropagateByCode(torch.autograd.Function):
    """Forward: the layer, observed by the rule's code. Backward: the rule's code."""

    generate_vmap_rule = True

    @staticmethod
    def forward(ruled: RuledOperation, module: nn.Module | None, *values: Any) -> Any:
        return _run(ruled, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ruled, ctx.module, *values = inputs
        kept, ctx.stored = _looked_at(ruled, ctx.module, values, output)
        _save(ctx, ruled, values, values, [output if ruled.rule.saves_output else None, *kept])

    @staticmethod
    def backward(ctx: Any, relevance: torch.Tensor) -> Relevances:
        ruled: RuledOperation = ctx.ruled
        values, (output, *kept) = _saved(ctx, relevance)
        untouched = _untouched(ruled, values, output, relevance)
        call = ruled.layer_call(values, output)
        with _own_precision(ctx, relevance):
            relevances = CodeOfCall(ruled.rule, ctx.module).gradients(call, relevance, ctx.stored, kept)
        untouched.check(ruled.rule, ruled.name)
        return (None, None, *_all_final(_checked(ctx, relevances)))


class PropagateOrDifferentiate(torch.autograd.Function):
    """Forward: the layer. Backward: its rule or, with the switch off, its gradient; parameters get their gradient either way.

    All inputs are saved. The output is recomputed, since the next module may overwrite it, and buffers are copied, since
    training changes them in place.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(ruled: RuledOperation, module: nn.Module | None, *values: Any) -> Any:
        return _run(ruled, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ruled, ctx.module, *values = inputs
        first = ruled.first_extra
        ctx.buffers = [value.clone() if isinstance(value, torch.Tensor) else value for value in values[first:]]
        kept: list[torch.Tensor] = []
        if ruled.rule.has_code:
            kept, ctx.stored = _looked_at(ruled, ctx.module, values, output)
        _save(ctx, ruled, values, [*values[:first], *[None] * len(ctx.buffers)], kept)

    @staticmethod
    def backward(ctx: Any, relevance: torch.Tensor) -> Relevances:
        ruled: RuledOperation = ctx.ruled
        values, kept = _saved(ctx, relevance)
        buffers = ctx.buffers if ctx.dtypes is None else [_cast(buffer, relevance.dtype) for buffer in ctx.buffers]
        values = (*values[: ruled.first_extra], *buffers)
        if ruled.live is not None and ruled.switch is not None:  # what the relevance depends on, if it is to be differentiated
            values = tuple(with_derivatives_only_off(ruled.switch, values, range(ruled.first_extra)))
        values, _, relevance = _for_code(ruled, values, None, relevance)
        untouched = _untouched(ruled, values, None, relevance)
        call = ruled.layer_call(values, None)
        if ruled.stored_tensors is not None:  # detached: its history leads back to this call
            ruled.stored_tensors["grad_output"] = (relevance.detach() if relevance.requires_grad else relevance,)
        wanted = [at for at in dict.fromkeys(ruled.parameters) if ctx.needs_input_grad[at + 2]]
        with _own_precision(ctx, relevance):
            if ruled.switch is None or not ruled.switch.on:
                relevances = call.pull_back(relevance)
            elif ruled.rule.has_code:
                relevances = CodeOfCall(ruled.rule, ctx.module).gradients(call, relevance, ctx.stored, kept)
            else:
                relevances = _propagated(ruled, call, relevance)
            of_parameters = call.parameter_gradients(relevance, ruled.parameters, wanted)
        untouched.check(ruled.rule, ruled.name)
        gradients = list(_checked(ctx, relevances))
        for at, gradient in zip(wanted, of_parameters, strict=True):
            gradients[at] = gradient if ctx.dtypes is None else _cast(gradient, ctx.dtypes[at])
        return (None, None, *gradients)


# --- forward -----------------------------------------------------------------------------------------------------------------


def _run(ruled: RuledOperation, values: Sequence[Any]) -> torch.Tensor:
    """The layer's output. Raises `RuleError` if the rule does not fit, and `InputError` for inputs that are not signals."""
    _refuse_other_kinds(ruled, values[: ruled.operation.inputs])
    output = ruled.run(values)
    if not isinstance(output, torch.Tensor):
        returned = f"{ruled.name or 'this one'} returns a {type(output).__name__}"
        raise RuleError(
            f"{ruled.rule} takes a layer that returns one tensor, but {returned}; give rules to the layers inside it instead"
        )
    if not ruled.rule.has_code:
        ruled.check(values, output)
    return output


def _refuse_other_kinds(ruled: RuledOperation, inputs: Sequence[Any]) -> None:
    """Raise `InputError` for data inputs that are not signals."""
    for place, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
            raise InputError(
                f"{ruled.name or 'a layer'} gets a tensor of {value.dtype} as input {place}, which the compiler took for a "
                "signal. Pass example_inputs to lrpfx.transform, so that it knows the dtypes, or declare that the model input "
                "that it comes from is not a signal: constants=(name,)",
                topic="graph-made-for-other-inputs",
            )


# --- saved values ------------------------------------------------------------------------------------------------------------


def _save(
    ctx: Any, ruled: RuledOperation, values: Sequence[Any], saved: Sequence[Any], more: Sequence[torch.Tensor | None]
) -> None:
    """Save what the backward pass reads: the values in `saved`, and the tensors in `more`."""
    ctx.ruled = ruled
    ctx.shapes = [value.shape for value in values[: ruled.operation.inputs]]
    device = values[0].device.type
    autocast = has_autocast(device) and torch.is_autocast_enabled(device)
    ctx.dtypes = [value.dtype if isinstance(value, torch.Tensor) else None for value in values] if autocast else None
    save_values(ctx, saved, more)


def _saved(ctx: Any, relevance: torch.Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The values and further tensors that `_save` saved.

    Under autocast, the forward pass ran in the precision of its output, whatever the dtypes of its inputs. The backward pass
    runs in the same precision.
    """
    values, more = saved_values(ctx)
    if ctx.dtypes is not None:
        values = tuple(_cast(value, relevance.dtype) for value in values)
    return values, more


def _own_precision(ctx: Any, relevance: torch.Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast changes no dtypes: all that the rule reads has the dtype of its relevance already."""
    return nullcontext() if ctx.dtypes is None else torch.autocast(relevance.device.type, enabled=False)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """A floating-point tensor cast to `dtype`; any other value unchanged."""
    return value.to(dtype) if dtype is not None and is_floating(value) else value


# --- relevance ---------------------------------------------------------------------------------------------------------------


def _propagated(ruled: RuledOperation, call: LayerCall, relevance: torch.Tensor) -> Relevances:
    """The relevance that the rule gives the inputs."""
    with origin(f"{ruled.name}: {ruled.rule}" if ruled.execution.traced else ""):
        return ruled.rule.propagate(call, relevance)


def _for_code(ruled: RuledOperation, values: Sequence[Any], output: Any, relevance: Any) -> tuple[Any, Any, Any]:
    """What a rule gets: copies for a user's rule in a compiled program, which does not count what is written into tensors."""
    own = type(ruled.rule).propagate.__module__.startswith("lrpfx.rules.")
    if own or not torch.compiler.is_compiling():
        return values, output, relevance
    return tuple(map(_copied, values)), _copied(output), _copied(relevance)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _untouched(ruled: RuledOperation, values: Sequence[Any], output: Any, relevance: torch.Tensor | None) -> Untouched:
    """What a rule must not write into: the tensors of a call of a layer."""
    inputs, first = ruled.operation.inputs, ruled.first_extra
    own = {"input": values[:inputs], "parameters": values[inputs:first], "buffers": values[first:]}
    return Untouched({**own, "output": (output,), "relevance": (relevance,)})


def _looked_at(
    ruled: RuledOperation, module: nn.Module | None, values: Sequence[Any], output: Any
) -> tuple[list[torch.Tensor], Any]:
    """What the rule's code stores of a call."""
    untouched = _untouched(ruled, values, output, None)
    found = CodeOfCall(ruled.rule, module).look_at(tuple(values[: ruled.operation.inputs]), output)
    untouched.check(ruled.rule, ruled.name)
    return found


def _checked(ctx: Any, relevances: Relevances) -> Relevances:
    """Relevance of the inputs in their dtypes, then None for the other values of the call. `RuleError` for wrong shapes."""
    ruled: RuledOperation = ctx.ruled
    relevances = relevances_from(ruled.rule, relevances, ctx.shapes)
    if ctx.dtypes is not None:
        relevances = tuple(_cast(value, dtype) for value, dtype in zip(relevances, ctx.dtypes, strict=False))
    return (*relevances, *[None] * (len(ctx.others) - len(relevances)))


def _all_final(relevances: Relevances) -> Relevances:
    return tuple(value if value is None else final(value) for value in relevances)

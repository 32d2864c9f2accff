"""An operation with the rule that replaces its gradient, built alike for a node of a graph and for a call of a module."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import torch

from lrpfx.errors import RuleError
from lrpfx.layers.layer import Layer, Operation
from lrpfx.runtime.layer_call import LayerCall, ParameterModifier


class Rule(Protocol):
    """The part of a rule that acts on calls of a layer (see `lrpfx.rules.rule.Rule`)."""

    saves_inputs: ClassVar[bool]
    has_code: ClassVar[bool]
    passes_all: ClassVar[bool]
    reads_positive_output: ClassVar[bool]
    recomputes_inputs: ClassVar[bool]
    recomputes_output: ClassVar[bool]

    @property
    def title(self) -> str: ...

    @property
    def saves_output(self) -> bool: ...

    @property
    def parameter_modifiers(self) -> Sequence[ParameterModifier]: ...

    def check_call(self, operation: Operation, inputs: Sequence[torch.Size], output: torch.Size) -> None: ...

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]: ...


class Switch:
    """Whether a rule acts: while it is off, the layer has its ordinary gradient."""

    def __init__(self) -> None:
        self.on = True


class Handoff:
    """Carries the positive part of a layer's output to the ReLU after it, within one run of a graph.

    The ReLU returns the tensor that the layer has saved, so that one is held instead of two.
    """

    def __init__(self) -> None:
        self.held: tuple[torch.Tensor, int, torch.Tensor] | None = None  # an output, its version, its positive part

    def give(self, output: torch.Tensor) -> torch.Tensor:
        """The positive part of `output`, which is held for `take`."""
        positive = output.clamp(min=0.0)
        self.held = output, output._version, positive
        return positive

    def take(self, output: torch.Tensor) -> torch.Tensor | None:
        """The positive part of `output`; None where that is another tensor, or was changed, as a hook may do."""
        held, self.held = self.held, None
        if held is None or held[0] is not output or held[1] != output._version:
            return None
        return held[2]


@dataclass(frozen=True)
class Execution:
    """How a graph is run, where that differs from an ordinary call."""

    #: The operations become part of a program: they say where they come from, and overwrite nothing.
    traced: bool = False
    #: More than one relevance will go back: results that they share are kept.
    several: bool = False


ORDINARY = Execution()

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
    switch: Switch | None = None
    #: Inputs that are not saved but computed again: which, the operation that made it, and where its values stand.
    recomputed: tuple[tuple[int, Operation, tuple[int, ...]], ...] = ()
    #: The name of the node or module.
    name: str = ""
    #: Whether the last value of a call is a `Handoff`, and whether this layer gives it the positive part of its output, which
    #: is then all that the rule reads of the output, or takes that for its own output.
    hands_off: bool = False
    takes_over: bool = False
    #: Where a rule registered on a module finds the relevance of the output.
    stored_tensors: dict[str, Any] | None = None
    #: Whether the output is saved where the rule reads it, rather than computed again.
    saves_output: bool = True
    execution: Execution = ORDINARY

    def during(self, execution: Execution) -> Self:
        """The same operation, run in another way."""
        return self if execution == self.execution else replace(self, execution=execution)

    @property
    def is_traced(self) -> bool:
        """Whether calls become part of a compiled or lowered program."""
        return self.execution.traced or torch.compiler.is_compiling()

    def with_recomputed(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values with the inputs that were not saved."""
        changed = list(values)
        for place, operation, places in self.recomputed:
            if values[place] is None:
                changed[place] = operation([values[at] for at in places])
        return tuple(changed)

    def run(self, values: Sequence[Any]) -> Any:
        """The operation's result, with its own parameters."""
        parameters = [values[at] for at in self.parameters]
        return self.operation((*values[: self.operation.inputs], *parameters, *values[self.first_extra :]))

    def check(self, values: Sequence[Any], output: torch.Tensor) -> None:
        """`RuleError` if the rule does not fit this call."""
        try:
            shapes = [value.shape for value in values[: self.operation.inputs]]
            self.rule.check_call(self.operation, shapes, output.shape)
        except RuleError as error:
            raise RuleError(f"{self.name}: {self.rule}: {error}") from error

    def layer_call(self, values: Sequence[Any], output: Any, kept: dict[str, Any] | None = None) -> LayerCall:
        """The call with these values, as the rule sees it."""
        branches = tuple(tuple(None if at == ABSENT else values[at] for at in branch) for branch in self.branches or ())
        call = LayerCall(
            self.operation,
            tuple(values[: self.operation.inputs]),
            tuple(values[at] for at in self.parameters),
            branches,
            tuple(values[self.first_extra :]),
            output,
            kept,
            self.is_traced,
        )
        return call if self.branches is not None else call.with_modified(self.rule.parameter_modifiers)


def ruled_operation(
    layer: Layer,
    rule: Rule,
    alias: Callable[[Any], Any],
    branches: Sequence[Sequence[Any]] | None = None,
    **settings: Any,
) -> tuple[RuledOperation, list[Any]]:
    """A layer's operation with a rule, and the values that a call of it passes: nodes, or tensors.

    `branches`: the values of the operation's parameters in each modified copy, None for one that is left out; without it,
    parameters are modified when relevance flows back. `alias` makes a second value of one that comes twice: `x + x` has two
    operands. `settings`: further fields of `RuledOperation`.
    """
    values: list[Any] = []
    for value in layer.inputs:
        values.append(alias(value) if any(value is other for other in values) else value)
    first = len(values)

    def place(value: Any) -> int:
        if value is None:
            return ABSENT
        at = next((at for at in range(first, len(values)) if values[at] is value), len(values))
        if at == len(values):
            values.append(value)
        return at

    operation = layer.operation
    own = tuple(place(layer.parameters[name]) for name in operation.parameters)
    places = None if branches is None else tuple(tuple(map(place, branch)) for branch in branches)
    ruled = RuledOperation(rule, operation, own, places, len(values), **settings)
    return ruled, [*values, *layer.extras]

"""An operation with the rule that replaces its gradient. Graph nodes and module calls both build one."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from typing_extensions import Self

from lrpfx.errors import InputError, RuleError
from lrpfx.operators.layer import Layer, Operation
from lrpfx.runtime.layer_call import LayerCall, ParameterChange
from lrpfx.runtime.multipliers import MultiplierForm


class Rule(Protocol):
    """The part of a rule that handles calls of a layer (see `lrpfx.rules.rule.Rule`)."""

    saves_inputs: ClassVar[bool]
    has_code: ClassVar[bool]
    passes_all: ClassVar[bool]
    reads_positive_output: ClassVar[bool]
    recomputes_inputs: ClassVar[bool]
    recomputes_output: ClassVar[bool]

    @property
    def title(self) -> str: ...

    @property
    def as_written(self) -> "Rule": ...

    @property
    def saves_output(self) -> bool: ...

    @property
    def parameter_modifiers(self) -> Sequence[ParameterChange]: ...

    def check_call(self, operation: Operation, inputs: Sequence[torch.Size], output: torch.Size) -> None: ...

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]: ...

    def relevance_of_parameter(self, call: LayerCall, relevance: torch.Tensor, place: int) -> torch.Tensor | None: ...


def relevances_from(rule: Any, result: Any, shapes: Sequence[torch.Size] | None = None) -> tuple[torch.Tensor | None, ...]:
    """What a rule returned, as one relevance for each input, of these shapes. `RuleError` for anything else."""
    found = result if isinstance(result, (tuple, list)) else (result,)
    strange = next((one for one in found if not (one is None or isinstance(one, torch.Tensor))), None)
    if result is None or strange is not None:
        what = "None" if result is None else f"a {type(strange).__name__}"
        raise RuleError(
            f"{rule} returned {what}, not one relevance for each input: a tensor, or None for no relevance", topic="own-rules"
        )
    if shapes is not None and len(found) != len(shapes):
        raise RuleError(f"{rule} returned {len(found)} relevances for {len(shapes)} inputs", topic="own-rules")
    for one, shape in zip(found, shapes or (), strict=False):
        if one is not None and one.shape != shape:
            raise RuleError(
                f"{rule} returned relevance of shape {tuple(one.shape)} for an input of shape {tuple(shape)}; "
                "give this layer a rule for layers that change the shape",
                topic="own-rules",
            )
    return tuple(found)


_PAUSING = threading.Lock()


class Switch:
    """Turns a rule on and off. While it is off, the layer has its ordinary gradient.

    `pauses`: how often the rule was paused so far, in any thread.
    """

    def __init__(self) -> None:
        self._is_on = True
        self._pausing = self.pauses = 0

    @property
    def on(self) -> bool:
        """Whether the rule acts."""
        return self._is_on and not self._pausing

    @on.setter
    def on(self, value: bool) -> None:
        self._is_on = value

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which the rule is off. Those of several threads may overlap in any way."""
        with _PAUSING:
            self._pausing += 1
            self.pauses += 1
        try:
            yield
        finally:
            with _PAUSING:
                self._pausing -= 1


class Handoff:
    """Passes the positive part of a layer's output to the ReLU after it, within one run of a graph.

    The ReLU returns the tensor that the layer has saved, so memory holds one tensor instead of two.
    """

    def __init__(self) -> None:
        self.held: tuple[torch.Tensor, int, torch.Tensor] | None = None  # an output, its version, its positive part

    def give(self, output: torch.Tensor) -> torch.Tensor:
        """The positive part of `output`. It is kept for `take`."""
        positive = output.clamp(min=0.0)
        self.held = output, output._version, positive
        return positive

    def take(self, output: torch.Tensor) -> torch.Tensor | None:
        """The positive part of `output`; None if `output` is another tensor or was changed since, for example by a hook."""
        held, self.held = self.held, None
        if held is None or held[0] is not output or held[1] != output._version:
            return None
        return held[2]


@dataclass(frozen=True)
class Execution:
    """How a run of a graph differs from an ordinary call."""

    #: The operations become part of a program: they record their origin and overwrite nothing.
    traced: bool = False
    #: Several relevances will be propagated: results that they share are kept.
    several: bool = False
    #: Rules run without the shortcuts that assume that relevance enters at the output.
    as_written: bool = False


ORDINARY = Execution()

ABSENT = -1  # the position of a parameter that a branch omits, such as a bias that counts as zero


@dataclass(frozen=True)
class RuledOperation:
    """An operation with the rule that replaces its gradient.

    The values of a call are the operation's data inputs, then each distinct parameter, modified or not, and from `first_extra`
    on the operation's other values. `parameters` holds the positions of the operation's own parameters, and `branches[k]` the
    positions of those of the rule's k-th modified copy, or `ABSENT`. Without `branches`, parameters are modified in the
    backward pass.
    """

    rule: Rule
    operation: Operation
    parameters: tuple[int, ...]
    branches: tuple[tuple[int, ...], ...] | None
    first_extra: int
    #: For layers whose rule can be switched off and whose parameters get their ordinary gradient. It costs memory: all inputs
    #: are saved, even those that the rule does not read.
    switch: Switch | None = None
    #: In a graph with a switch, the positions of what comes from parameters alone: it has a gradient only while the switch is
    #: off, and so has relevance. None in module mode, where a backward pass reaches parameters as it does in other libraries.
    live: tuple[int, ...] | None = None
    #: Inputs that are recomputed rather than saved: position, the operation that computes it, and the positions of its values.
    recomputed: tuple[tuple[int, Operation, tuple[int, ...]], ...] = ()
    #: The name of the node or module.
    name: str = ""
    #: If either is set, the last value of a call is a `Handoff`. This layer gives it the positive part of its output
    #: (`hands_off`; the rule then reads only that part of the output), or takes its own output from it (`takes_over`).
    hands_off: bool = False
    takes_over: bool = False
    #: The dict that receives the relevance of the output, for a rule registered on a module.
    stored_tensors: dict[str, Any] | None = None
    #: Whether an output that the rule reads is saved rather than recomputed.
    saves_output: bool = True
    #: The form of the rule that carries multipliers, if the operation has that form.
    form: MultiplierForm | None = None
    execution: Execution = ORDINARY

    def during(self, execution: Execution) -> Self:
        """The same operation with another `execution`."""
        if execution == self.execution:
            return self
        rule = self.rule.as_written
        if not execution.as_written or rule is self.rule:
            return replace(self, execution=execution)
        if not all(modifier.arithmetic for modifier in rule.parameter_modifiers):
            raise InputError(
                f"{self.name}: relevance that enters where the value is not positive needs the rule as it is written: "
                "lrpfx.transform(..., optimize=False)",
                topic="start-of-relevance",
            )
        return replace(
            self,
            execution=execution,
            rule=rule,
            branches=None,
            recomputed=(),
            hands_off=False,
            takes_over=False,
            saves_output=True,
        )

    @property
    def is_traced(self) -> bool:
        """Whether calls become part of a compiled or lowered program."""
        return self.execution.traced or torch.compiler.is_compiling()

    def with_recomputed(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values, with recomputed inputs for those that were not saved."""
        changed = list(values)
        for place, operation, places in self.recomputed:
            if values[place] is None:
                changed[place] = operation([values[at] for at in places])
        return tuple(changed)

    def arranged(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The values of a call in the operation's order, with its own parameters."""
        parameters = [values[at] for at in self.parameters]
        return (*values[: self.operation.inputs], *parameters, *values[self.first_extra :])

    def run(self, values: Sequence[Any]) -> Any:
        """The operation's result with its own parameters."""
        return self.operation(self.arranged(values))

    def check(self, values: Sequence[Any], output: torch.Tensor) -> None:
        """Raise `RuleError` if the rule does not fit this call."""
        try:
            shapes = [value.shape for value in values[: self.operation.inputs]]
            self.rule.check_call(self.operation, shapes, output.shape)
        except RuleError as error:
            raise RuleError(f"{self.name}: {self.rule}: {error}", topic=error.topic) from error

    def layer_call(self, values: Sequence[Any], output: Any, kept: dict[str, Any] | None = None) -> LayerCall:
        """A call with these values, in the form that rules receive."""
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
    """A layer's operation with a rule, and the values of a call of it: nodes or tensors.

    `branches`: for each modified copy, the values of the operation's parameters, with None for an omitted one. Without it,
    parameters are modified in the backward pass. `alias` copies a value that occurs twice: `x + x` has two operands.
    `settings`: further fields of `RuledOperation`.
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

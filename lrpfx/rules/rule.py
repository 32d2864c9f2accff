"""The base class of rules. A rule turns the relevance of a layer's output into relevance of its inputs."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import Self

from lrpfx.ir.node import Facts
from lrpfx.operators.layer import Layer, Operation
from lrpfx.rules.modifiers import ParamMod, describe_value
from lrpfx.runtime.layer_call import LayerCall
from lrpfx.runtime.multipliers import MultiplierForm

Absorbed = dict[str, Any]  # destination of relevance that no input receives -> amount, a number or a scalar tensor


class Rule:
    """A propagation rule: its formula, the relevance it absorbs, the layers it fits, and its shortcuts.

    The base class propagates the ordinary gradient. No subclass inherits a shortcut, a multiplier form, or a fact about the
    formula, because it may change the formula: facts fall back to the defaults below unless the subclass states them.
    """

    #: Names of the attributes that `repr` shows, in order.
    shown: ClassVar[tuple[str, ...]] = ()
    #: Whether the rule is code around a call, with no formula of its own.
    has_code: ClassVar[bool] = False
    #: Whether `propagate` reads the layer's inputs and parameters.
    saves_inputs: ClassVar[bool] = True
    #: Whether the rule passes relevance on unchanged.
    passes_all: ClassVar[bool] = False
    #: Whether `propagate` reads only the positive part of the output.
    reads_positive_output: ClassVar[bool] = False
    #: Whether inputs, or the output, may be recomputed rather than saved where that is cheap.
    recomputes_inputs: ClassVar[bool] = False
    recomputes_output: ClassVar[bool] = False
    #: Whether the relevance of an input has the input as a factor, and so is 0 where the input is 0.
    proportional: ClassVar[bool] = False
    #: Whether arguments that only control the result, such as the factors of a recurrence, are inputs for the rule.
    reads_controls: ClassVar[bool] = False

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        own = vars(cls)
        for name in ("shortcut", "multiplier_form", *_FACTS):
            if name not in own:
                setattr(cls, name, vars(Rule)[name])

    @property
    def title(self) -> str:
        """The rule's name."""
        return type(self).__name__

    @property
    def as_written(self) -> "Rule":
        """The rule that this one is a shortcut for, or the rule itself."""
        return self

    @property
    def saves_output(self) -> bool:
        """Whether `propagate` reads the layer's output."""
        return False

    @property
    def is_proportional(self) -> bool:
        """The fact `proportional`, or what a template finds out about its parts."""
        return self.proportional

    @property
    def parameter_modifiers(self) -> tuple[ParamMod, ...]:
        """The parameter modifier of each branch. The compiler evaluates them ahead of time."""
        return ()

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The relevance of each of the layer's inputs, in its shape; None for an input without relevance.

        `call`: the call of the layer, with its inputs and parameters. `relevance`: that of its output.
        """
        return call.pull_back(relevance)

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed | None:
        """The total relevance that `propagate` does not pass on to the inputs, by destination; None without an account.

        Keys are "bias", "expansion" and "constants" for terms of the output beyond the part linear in the inputs (see
        `LayerCall.with_remainders`), "stabilizer" for the stabilizers of denominators, "absent" for the relevance of outputs
        without a contribution that the rule could follow, and "stopped" for relevance that the rule holds back on purpose.
        `call` and `relevance`: as for `propagate`.
        """
        return None

    def relevance_of_parameter(self, call: LayerCall, relevance: torch.Tensor, place: int) -> torch.Tensor | None:
        """What `propagate` sends through each entry of a parameter of a linear layer; None if this is not known.

        In the shape of the parameter, summed over all inputs and outputs that it connects. `call` and `relevance`: as for
        `propagate`. `place`: that of the parameter in `call.parameters`.
        """
        return None

    def check(self, layer: Layer) -> None:
        """Raise `RuleError` unless the rule fits a `layer`: a call in a graph, or a module before any call."""

    def check_call(self, operation: Operation, inputs: Sequence[torch.Size], output: torch.Size) -> None:
        """Raise `RuleError` unless the rule fits a call of an `operation` with the shapes `inputs` and `output`.

        Runs in every forward pass, before any relevance flows, and in the compiler if it knows the shapes.
        """

    def shortcut(self, layer: Layer, facts: Facts) -> "Rule":
        """A cheaper rule that gives the same relevance for a `layer`, given `facts` such as signs; by default this rule."""
        return self

    def multiplier_form(self, layer: Layer) -> MultiplierForm | None:
        """The form that carries multipliers R / t instead of relevance R through a `layer`; None if the rule has none."""
        return None

    def copy(self) -> Self:
        """A rule with the same settings: composites use rules as templates. Override it if `__init__` takes arguments."""
        return type(self)()

    def __repr__(self) -> str:
        settings = [(name, getattr(self, name)) for name in self.shown]
        shown = ", ".join(
            f"{name}={describe_value(value)}" for name, value in settings if value is not None and value is not False
        )
        return f"{self.title}({shown})"


_FACTS = ("saves_inputs", "passes_all", "reads_positive_output", "recomputes_inputs", "recomputes_output", "proportional")

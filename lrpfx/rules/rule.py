"""What a rule is: how the relevance of a layer's output becomes relevance of its inputs."""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch

from lrpfx.ir.node import Facts
from lrpfx.layers.layer import Layer, Operation
from lrpfx.rules.modifiers import ParamMod, describe_value
from lrpfx.runtime.layer_call import LayerCall

Absorbed = dict[str, Any]  # what becomes of relevance that no input gets -> its amount, a number or a scalar tensor


class Rule:
    """A rule of propagation: its formula, what it absorbs, which layers it fits, and its shortcuts.

    As it stands here, it keeps the gradient. Facts that a class states of its formula do not hold for a subclass with another
    one: they are the weakest there, unless it states them anew.
    """

    #: Names of the attributes that `repr` shows, in order.
    shown: ClassVar[tuple[str, ...]] = ()
    #: Whether the rule is code around a call, with no formula of its own.
    has_code: ClassVar[bool] = False
    #: Whether `propagate` reads the layer's inputs and parameters.
    saves_inputs: ClassVar[bool] = True
    #: Whether relevance passes unchanged.
    passes_all: ClassVar[bool] = False
    #: Whether `propagate` reads only the positive part of the output.
    reads_positive_output: ClassVar[bool] = False
    #: Whether inputs, or the output, may be computed again rather than saved, where that is cheap.
    recomputes_inputs: ClassVar[bool] = False
    recomputes_output: ClassVar[bool] = False

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        own = vars(cls)
        if "shortcut" not in own:
            cls.shortcut = Rule.shortcut  # type: ignore[method-assign]  # even where nothing else differs
        if "propagate" in own:
            for fact in _FACTS:
                if fact not in own:
                    setattr(cls, fact, vars(Rule)[fact])

    @property
    def title(self) -> str:
        """The rule's name."""
        return type(self).__name__

    @property
    def saves_output(self) -> bool:
        """Whether `propagate` reads the layer's output."""
        return False

    @property
    def is_proportional(self) -> bool:
        """Whether relevance of an input is the input times something, so that there is none where the input is 0."""
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

    def shortcut(self, layer: Layer, facts: Facts) -> "Rule":
        """A rule that gives the same relevance for `layer` with less work, given facts about the call; itself by default."""
        return self

    def copy(self) -> Self:
        """A rule with the same settings, for composites use rules as templates; to override where __init__ takes arguments."""
        return type(self)()

    def __repr__(self) -> str:
        settings = [(name, getattr(self, name)) for name in self.shown]
        shown = ", ".join(
            f"{name}={describe_value(value)}" for name, value in settings if value is not None and value is not False
        )
        return f"{self.title}({shown})"


_FACTS = ("saves_inputs", "passes_all", "reads_positive_output", "recomputes_inputs", "recomputes_output", "is_proportional")

"""Rules on modules: Zennit's protocol of hooks around a call."""

from typing import Any, ClassVar

from torch import nn

from lrpfx.errors import InputTypeError, RuleError
from lrpfx.layers.layer import layer_of_module
from lrpfx.module_mode.call_with_code import call_with_code, takes_kwargs
from lrpfx.module_mode.call_with_rule import call_with_rule, ruled_call, stored_arguments
from lrpfx.module_mode.registration import Forward, Registration, RemovableHandle, RemovableHandleList, inner_forward
from lrpfx.rules.rule import Rule
from lrpfx.runtime.layer_call import LayerCall
from lrpfx.runtime.ruled_operation import Switch


class Hook(Rule):
    """A rule that can be registered on a module.

    There are two ways to write one. A rule of propagation overrides `propagate`, as the built-in rules do. A rule with code of
    its own overrides `forward(module, args, kwargs, output)`, to look at a call, and
    `backward(module, grad_input, grad_output)`, to return other gradients of the inputs, or None to leave them;
    `stored_tensors` keeps what one needs for the other, for each call by itself.
    """

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
        self.switch = Switch()

    @property
    def active(self) -> bool:
        """Whether the rule acts on gradients; while it does not, layers have their ordinary gradient."""
        return self.switch.on

    @active.setter
    def active(self, value: bool) -> None:
        self.switch.on = value

    @property
    def propagates(self) -> bool:
        """Whether the rule says how relevance propagates."""
        return type(self).propagate is not Rule.propagate

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
        ruled, values = ruled_call(self, module, inner_forward(module), args, kwargs)
        return ruled.layer_call(tuple(values), None)

    # --- registration

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
        self.switch = Switch()
        return RemovableHandleList([RemovableHandle(self), Registration(module, self)])

    def remove(self) -> None:
        """Forget stored tensors; gradients of calls made so far are the ordinary ones from now on."""
        self.stored_tensors.clear()
        self.switch.on = False

    def call(self, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """A call of a module that the rule is registered on."""
        if self.has_code:
            return call_with_code(self, module, forward, args, kwargs)
        self.stored_tensors = stored_arguments(args, kwargs) if self.saves_inputs else {}
        return call_with_rule(self, module, forward, args, kwargs)


def _overrides_code(rule: type[Hook]) -> bool:
    for base in rule.__mro__:
        if "propagate" in vars(base):
            return base is Rule
        if base is not Hook and any(name in vars(base) for name in _CODE):
            return True
    return False


_CODE = ("pre_forward", "forward", "post_forward", "pre_backward", "backward")

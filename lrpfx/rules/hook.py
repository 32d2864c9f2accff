"""Rules that can be registered on modules: Zennit's hook protocol."""

from typing import Any, ClassVar

from torch import nn

from lrpfx.errors import InputTypeError, RuleError
from lrpfx.ir.kinds import Recurrent
from lrpfx.operators.layer import kind_of, layer_of_module
from lrpfx.operators.layer_of_call import Forward
from lrpfx.rules.rule import Rule
from lrpfx.runtime.layer_call import LayerCall
from lrpfx.runtime.module_mode.call_by_parts import call_by_parts
from lrpfx.runtime.module_mode.call_with_code import call_with_code, takes_kwargs
from lrpfx.runtime.module_mode.call_with_rule import call_with_rule, ruled_call, stored_arguments
from lrpfx.runtime.module_mode.registration import Registration, RemovableHandle, RemovableHandleList, inner_forward
from lrpfx.runtime.ruled_operation import Switch


class Hook(Rule):
    """A rule that can be registered on a module.

    There are two ways to write one. A propagation rule overrides `propagate`, as the built-in rules do. A rule with its own
    code overrides `forward(module, args, kwargs, output)` to observe a call, and `backward(module, grad_input, grad_output)`
    to replace the gradients of the inputs; None keeps them. `stored_tensors` carries values from one to the other, separately
    for each call.
    """

    #: Whether `forward` takes (module, args, kwargs, output) rather than (module, input, output).
    forward_takes_kwargs: ClassVar[bool] = True

    #: Whether the rule is code around a call: it has no `propagate`, or a class derived from the one with `propagate` overrides
    #: a method such as `backward`.
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
        """Whether the rule replaces gradients. While it is inactive, layers have their ordinary gradient."""
        return self.switch.on

    @active.setter
    def active(self, value: bool) -> None:
        self.switch.on = value

    @property
    def propagates(self) -> bool:
        """Whether the rule overrides `propagate`."""
        return type(self).propagate is not Rule.propagate

    # --- the rule's own code

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs before the module.

        Parameters
        ----------
        module
            The module that is called.
        args
            Its arguments.
        kwargs
            Its keyword arguments.

        Returns
        -------
        Any
            The (args, kwargs) to call it with, or None to keep them.
        """
        return args, kwargs

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Runs after the module. The shorter signature (module, input, output) also works.

        A propagation rule stores the call's arguments here, as "input" and "kwargs".

        Parameters
        ----------
        module
            The module that was called.
        args
            Its arguments.
        kwargs
            Its keyword arguments.
        output
            What it returned.

        Returns
        -------
        Any
            Another output, or None to keep it.
        """
        if self.propagates:
            self.stored_tensors.update(input=args, kwargs=kwargs)

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Runs last in the forward pass.

        Parameters
        ----------
        module
            The module that was called.
        args
            Its arguments.
        kwargs
            Its keyword arguments.
        output
            What it and `forward` returned.

        Returns
        -------
        Any
            The output, or None to keep it.
        """
        return output

    def pre_backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        """Runs once the gradient of the outputs is known.

        Parameters
        ----------
        module
            The module that was called.
        grad_input
            The ordinary gradients of its inputs.
        grad_output
            The gradients of its outputs.
        """

    def backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        """Gradients in place of the ordinary ones.

        A propagation rule returns the relevance of the inputs.

        Parameters
        ----------
        module
            The module that was called.
        grad_input
            The ordinary gradients of its inputs.
        grad_output
            The gradients of its outputs, a tuple.

        Returns
        -------
        Any
            Gradients to replace `grad_input`, or None to keep those.
        """
        return self.propagate(self._call_of(module), grad_output[0]) if self.propagates else None

    def _call_of(self, module: nn.Module) -> LayerCall:
        """The call whose backward pass is running."""
        call: LayerCall | None = self.stored_tensors.get("call")
        if call is not None:
            return call
        args, kwargs = self.stored_tensors["input"], self.stored_tensors["kwargs"]
        ruled, values = ruled_call(self, module, inner_forward(module), args, kwargs)
        return ruled.layer_call(tuple(values), None)

    # --- registration

    def register(self, module: nn.Module) -> RemovableHandleList:
        """Register the rule on a module until the handles are removed.

        The number of inputs and the shapes are checked when the module is called.

        Parameters
        ----------
        module
            The module.

        Raises
        ------
        InputTypeError
            This is not a module.
        RuleError
            The rule cannot fit the module, or the module has a rule already.
        """
        if not isinstance(module, nn.Module):
            raise InputTypeError(
                f"a rule is registered on a torch.nn.Module, not on {type(module).__name__}", topic="own-rules"
            )
        try:
            self.check(layer_of_module(module))
        except RuleError as error:
            raise RuleError(f"{self} does not fit {type(module).__name__}: {error}", topic=error.topic) from error
        self.switch = Switch()
        return RemovableHandleList([RemovableHandle(self), Registration(module, self)])

    def remove(self) -> None:
        """Clear the stored tensors. From now on, calls made so far have their ordinary gradient."""
        self.stored_tensors.clear()
        self.switch.on = False

    def call(self, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module on which the rule is registered.

        Parameters
        ----------
        module
            The module.
        forward
            What it computes.
        *args
            Its arguments.
        **kwargs
            Its keyword arguments.
        """
        if self.has_code:
            return call_with_code(self, module, forward, args, kwargs)
        if issubclass(kind_of(module), Recurrent):
            return call_by_parts(self, module, forward, args, kwargs)
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

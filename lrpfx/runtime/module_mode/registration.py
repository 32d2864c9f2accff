"""Rules registered on the modules of a model, without a graph.

A registered rule takes over the calls of a module through an attribute `forward` of that one instance. Removing the rule
restores the attribute. Nothing else of the module changes: not its class, parameters, buffers or hooks.
"""

import functools
import threading
import weakref
from typing import Any, Protocol

from torch import nn

from lrpfx.errors import RuleError
from lrpfx.operators.layer_of_call import Forward

#: Held while rules are registered or removed, so that of two threads with one model the second finds the rules of the first.
REGISTERING = threading.RLock()


class Caller(Protocol):
    """An object that takes over the calls of a module."""

    def call(self, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any: ...


class Removable(Protocol):
    """An object with a method `remove`."""

    def remove(self) -> None: ...


class RemovableHandle:
    """A weak handle: removes its `instance` if that is still alive."""

    def __init__(self, instance: Removable) -> None:
        self.instance = weakref.ref(instance)

    def remove(self) -> None:
        """Remove the instance if it is still alive."""
        instance = self.instance()
        if instance is not None:
            instance.remove()


class RemovableHandleList(list[Any]):
    """A list of handles that are removed together in reverse order, so that each finds the state that it left."""

    def remove(self) -> None:  # type: ignore[override]
        """Remove the handles, the last one first, and empty the list."""
        while self:
            self.pop().remove()


class RegisteredForward:
    """The `forward` of one module while a rule is registered on it."""

    def __init__(self, module: nn.Module, caller: Caller) -> None:
        self.module = module
        self.previous: Forward | None = vars(module).get("forward")
        self.caller = caller

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.caller.call(self.module, inner_forward(self.module), *args, **kwargs)


class Registration:
    """A rule on a module; `remove` takes it off. `RuleError` if the module has a rule already."""

    def __init__(self, module: nn.Module, caller: Caller) -> None:
        with REGISTERING:
            present = _registered_on(module)
            if present is not None:
                raise RuleError(
                    f"{type(module).__name__} has a rule already: {present.caller}. Remove its handles, or leave its context, "
                    "before another rule is registered",
                    topic="rules-already",
                )
            self.forward = RegisteredForward(module, caller)
            vars(module)["forward"] = self.forward

    def remove(self) -> None:
        with REGISTERING:
            attributes, previous = vars(self.forward.module), self.forward.previous
            if attributes.get("forward") is not self.forward:
                return
            if previous is None:
                del attributes["forward"]
            else:
                attributes["forward"] = previous


def _registered_on(module: nn.Module) -> RegisteredForward | None:
    forward = vars(module).get("forward")
    return forward if isinstance(forward, RegisteredForward) else None


def refuse_rules(model: nn.Module) -> None:
    """Raise `RuleError` if a rule is registered on a module of the model: two registrations would change each other's maps."""
    for name, module in model.named_modules():
        present = _registered_on(module)
        if present is not None:
            raise RuleError(
                f"the model has rules already: {present.caller} is registered on {name or 'the model itself'}. Leave the other "
                "context or remove its handles first. MixedComposite combines composites; threads that explain one model share "
                "the result of lrpfx.transform(model, composite), or have a copy of the model each",
                topic="rules-already",
            )


def inner_forward(module: nn.Module) -> Forward:
    """The `forward` of a module without the rule registered on it."""
    present = _registered_on(module)
    forward = vars(module).get("forward") if present is None else present.previous
    return forward or functools.partial(type(module).forward, module)

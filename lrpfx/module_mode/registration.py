"""Rules registered on the modules of a model, without a graph.

A registered rule takes over the calls of a module through an attribute `forward` of that one instance. Removing the rule
restores the attribute. Nothing else of the module changes: not its class, parameters, buffers or hooks.
"""

import functools
import weakref
from typing import Any, Protocol

from torch import nn

from lrpfx.layers.layer_of_call import Forward


class Caller(Protocol):
    """An object that takes over the calls of a module."""

    def call(self, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any: ...


class Removable(Protocol):
    """An object with a method `remove`."""

    def remove(self) -> None: ...


class RemovableHandle:
    """A weak handle: removes its instance if that is still alive.

    Parameters
    ----------
    instance
        What to remove.
    """

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
    """The `forward` of one module while rules are registered on it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.previous: Forward | None = vars(module).get("forward")
        self.callers: list[Caller] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = inner_forward(self.module)
        for caller in self.callers:
            forward = functools.partial(caller.call, self.module, forward)
        return forward(*args, **kwargs)


class Registration:
    """A rule on a module; `remove` takes it off."""

    def __init__(self, module: nn.Module, caller: Caller) -> None:
        self.module = module
        self.caller = caller
        forward = vars(module).get("forward")
        if not isinstance(forward, RegisteredForward):
            forward = vars(module)["forward"] = RegisteredForward(module)
        forward.callers.append(caller)

    def remove(self) -> None:
        forward = vars(self.module).get("forward")
        if not isinstance(forward, RegisteredForward) or self.caller not in forward.callers:
            return
        forward.callers.remove(self.caller)
        if forward.callers:
            return
        if forward.previous is None:
            del vars(self.module)["forward"]
        else:
            vars(self.module)["forward"] = forward.previous


def inner_forward(module: nn.Module) -> Forward:
    """The `forward` of a module without the rules registered on it."""
    forward = vars(module).get("forward")
    if isinstance(forward, RegisteredForward):
        forward = forward.previous
    return forward or functools.partial(type(module).forward, module)

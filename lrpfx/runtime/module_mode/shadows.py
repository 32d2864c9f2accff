"""Attributes of module instances that are replaced for a while, by several replacements that end in any order."""

from typing import Any

from torch import nn

#: The attribute of a module that holds the replaced attributes, while there are any.
_KEY = "_lrpfx_shadows"


class _Absent:
    """In place of an attribute that is not there: a class, since a copy of a model shall find it, too."""


class _Stack:
    """What one entry of a table was at first, and the values that replace it, the latest last."""

    def __init__(self, first: Any) -> None:
        self.first = first
        self.values: list[tuple[Shadow, Any]] = []

    @property
    def top(self) -> Any:
        return self.values[-1][1] if self.values else self.first

    def notice(self, present: Any) -> None:
        """Take what someone else has put into the table since: weight_norm does so before each call."""
        if present is not self.top:
            self.first = present

    def beneath(self, owner: "Shadow") -> Any:
        place = self.place_of(owner)
        return self.values[place - 1][1] if place else self.first

    def place_of(self, owner: "Shadow") -> int:
        return next((place for place, (other, _) in enumerate(self.values) if other is owner), len(self.values))


class Shadow:
    """Values in place of attributes or children of modules, until `restore`."""

    def __init__(self) -> None:
        self.replaced: list[tuple[nn.Module, str, str]] = []

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        """Put a value in the place of an attribute, or of a child if the value is a module."""
        kind = "_modules" if isinstance(value, nn.Module) else "__dict__"
        table: dict[str, Any] = getattr(module, kind)
        stacks: dict[tuple[str, str], _Stack] = vars(module).setdefault(_KEY, {})
        stack = stacks.setdefault((kind, name), _Stack(table.get(name, _Absent)))
        stack.notice(table.get(name, _Absent))
        place = stack.place_of(self)
        if place == len(stack.values):
            self.replaced.append((module, kind, name))
        stack.values[place : place + 1] = [(self, value)]
        table[name] = stack.top

    def beneath(self, module: nn.Module, name: str) -> Any:
        """The attribute as it is without this shadow and those after it."""
        value = vars(module).get(name, _Absent)
        stack: _Stack | None = vars(module).get(_KEY, {}).get(("__dict__", name))
        if stack is not None:
            stack.notice(value)
            value = stack.beneath(self)
        if value is not _Absent:
            return value
        return module._parameters[name] if name in module._parameters else module._buffers.get(name)

    def restore(self) -> None:
        """Take the values away. What other shadows put in the same places stays."""
        while self.replaced:
            module, kind, name = self.replaced.pop()
            table: dict[str, Any] = getattr(module, kind)
            stacks = vars(module)[_KEY]
            stack: _Stack = stacks[kind, name]
            del stack.values[stack.place_of(self)]
            if stack.top is _Absent:
                table.pop(name, None)
            else:
                table[name] = stack.top
            if not stack.values:
                del stacks[kind, name]
            if not stacks:
                del vars(module)[_KEY]

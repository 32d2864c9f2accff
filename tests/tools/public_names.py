"""Everything that a user reaches by a public name: the reference lists it, and the tests check its docstrings.

A namespace is the package itself, or a module that a namespace has in its `__all__`.
"""

import functools
import inspect
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import lrpfx
from lrpfx.errors import InputError

#: members of a class that have docstrings
_MEMBERS = (FunctionType, property, classmethod, staticmethod, functools.cached_property)


def namespaces() -> dict[str, ModuleType]:
    """The public modules by dotted name, the package first; without those that need a package which is not installed."""
    found: dict[str, ModuleType] = {}
    waiting: list[tuple[str, ModuleType]] = [("lrpfx", lrpfx)]
    while waiting:
        name, module = waiting.pop(0)
        found[name] = module
        waiting += [(f"{name}.{one}", value) for one, value in _exported(module) if isinstance(value, ModuleType)]
    return found


def public_names() -> Iterator[tuple[str, Any]]:
    """Dotted name and object: public modules, what each lists in `__all__`, and the members of public classes.

    Members are the methods, properties and `__call__` that lrpfx defines. A class has its own members and those of its private
    base classes. It does not repeat what it shares with a public base class, which includes a method that it replaces without a
    docstring: that of the base holds. An object that two namespaces export has two names. Methods, also those
    of the class, static ones and cached properties, are functions; properties are properties.
    """
    modules = namespaces()
    exported = [
        (f"{namespace}.{name}", value)
        for namespace, module in modules.items()
        for name, value in _exported(module)
        if not isinstance(value, ModuleType)
    ]
    classes = {value for _, value in exported if inspect.isclass(value)}
    yield from modules.items()
    for name, value in exported:
        yield name, value
        if inspect.isclass(value):
            yield from ((f"{name}.{member}", one) for member, one in _members(value, classes))


def _exported(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """What a module has in its `__all__`, as far as its packages are installed."""
    for name in sorted(module.__all__):
        try:
            yield name, getattr(module, name)
        except InputError as error:
            if error.topic != "missing-package":
                raise


def _members(owner: type, public: set[type]) -> Iterator[tuple[str, Any]]:
    """The members to list under a public class, in the order of definition."""
    bases = [base for base in owner.__mro__ if base.__module__.split(".")[0] == "lrpfx"]
    shared = [base for base in bases if base is not owner and base in public]
    own = [base for base in bases if base not in shared]
    for name in dict.fromkeys(name for base in own for name in vars(base) if name == "__call__" or not name.startswith("_")):
        member = inspect.getattr_static(owner, name)
        if not isinstance(member, _MEMBERS):
            continue
        of_bases = [inspect.getattr_static(base, name) for base in shared if hasattr(base, name)]
        if member in of_bases or (of_bases and not member.__doc__):
            continue
        function = getattr(member, "__func__", getattr(member, "func", member))  # of a class method, of a cached property
        if not getattr(function, "__name__", name).startswith("_") or name == "__call__":
            yield name, function

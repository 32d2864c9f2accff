"""Composites by their names."""

import inspect
from typing import Any

from lrpfx.composites.composite import COMPOSITES, Composite
from lrpfx.errors import InputError, InputTypeError, nearest
from lrpfx.rules.hook import Hook


def is_composite(name: str) -> bool:
    """Whether there is a registered composite of this `name`."""
    return _folded(name) in _forms()


def composite_class(name: str) -> type[Composite]:
    """The registered composite of a `name`, such as `epsilon_plus_flat` or `EpsilonPlusFlat`. `InputError` if it is unknown."""
    forms = _forms()
    if _folded(name) not in forms:
        known = ", ".join(sorted(COMPOSITES))
        suggested = nearest(name, COMPOSITES) or nearest(name, [composite.__name__ for composite in COMPOSITES.values()])
        raise InputError(f"there is no composite named {name!r}; there are: {known}.{suggested}", topic="composites")
    return forms[_folded(name)]


def _forms() -> dict[str, type[Composite]]:
    """The registered composites by their names, folded."""
    return {_folded(form): composite for key, composite in COMPOSITES.items() for form in (key, composite.__name__)}


def _folded(name: str) -> str:
    return name.replace("_", "").casefold()


def as_composite(value: Any, caller: str, **known: Any) -> Composite:
    """The composite that a value stands for: itself, or the one of this name.

    `caller`: for messages. `known`: settings that a composite gets by name if it has them. Errors: `InputError`: the name is
    unknown; `InputTypeError`: it is neither.
    """
    if isinstance(value, str):
        parameters = inspect.signature(composite_class(value)).parameters
        return composite_named(value, **{name: setting for name, setting in known.items() if name in parameters})
    if isinstance(value, type) and issubclass(value, Composite):
        raise InputTypeError(f"{caller} takes a composite, not its class; did you mean {value.__name__}()?", topic="composites")
    if not isinstance(value, Composite):
        is_rule = isinstance(value, Hook) or (isinstance(value, type) and issubclass(value, Hook))
        remedy = "; a composite assigns rules, such as LayerMapComposite([(lrpfx.types.Linear, rule)])" if is_rule else ""
        raise InputTypeError(f"{caller} takes a composite or its name, not {type(value).__name__}{remedy}", topic="composites")
    return value


def composite_named(name: str, **settings: Any) -> Composite:
    """The registered composite of a `name`, as for `composite_class`, with these `settings` as its arguments.

    `InputError` if the name is unknown, or if a setting is missing or unknown.
    """
    composite = composite_class(name)
    parameters = inspect.signature(composite).parameters
    missing = [one.name for one in parameters.values() if one.default is one.empty and one.name not in settings]
    if missing:
        raise InputError(
            f"the composite {name} needs the settings {', '.join(missing)}; it has {', '.join(parameters)}", topic="composites"
        )
    unknown = next((one for one in settings if one not in parameters), None)
    if unknown is not None:
        known = ", ".join(parameters)
        raise InputError(
            f"the composite {name} has no setting {unknown!r}; it has {known}.{nearest(unknown, parameters)}",
            topic="composites",
        )
    return composite(**settings)

"""`lrpfx composites`: the composites by name."""

from inspect import Parameter, cleandoc, signature

import lrpfx
from lrpfx.command_line.terminal import say, say_data

#: Settings that a command line cannot give.
_OF_CODE = ("layer_map", "first_map", "canonizers")


def composites() -> None:
    """List the composites with their settings. Without --composite, `lrpfx explain` chooses by what the model consists of."""
    for name, composite in lrpfx.composites.COMPOSITES.items():
        say(f"[bold]{name}[/bold], {composite.__name__}({_settings(composite)})", markup=True)
        say(f"    {_first_line(composite)}")
    say_data(
        [
            {"name": name, "class": one.__name__, "settings": _settings(one), "description": _first_line(one)}
            for name, one in lrpfx.composites.COMPOSITES.items()
        ]
    )


def _settings(composite: type[lrpfx.composites.Composite]) -> str:
    return ", ".join(_setting(one) for one in signature(composite).parameters.values() if one.name not in _OF_CODE)


def _setting(parameter: Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"


def _first_line(composite: type[lrpfx.composites.Composite]) -> str:
    return cleandoc(composite.__doc__ or "").partition("\n")[0]

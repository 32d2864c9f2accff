"""lrpfx: a compiler for Layer-wise Relevance Propagation."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import attribution, canonizers, cmap, composites, core, image, layer, rules, torchvision, types
    from .accounting import Ledger, ledger
    from .artefacts import Runner, load, package, save
    from .attribution import Attribution, attribute
    from .drawing import draw, to_networkx
    from .errors import (
        ArtefactError,
        CaptureError,
        InputError,
        InputTypeError,
        LoweringError,
        LrpfxError,
        LrpfxWarning,
        PassError,
        RuleError,
        UnsupportedOperationError,
        VerificationError,
    )
    from .inspection import assignment, history
    from .lowering import lower
    from .pipeline import node_names, transform
    from .preflight import Report, check

__version__ = "0.1.0"

#: module -> the public names in it; modules are imported when one is first used, since torch takes long to import
_NAMES_IN = {
    "accounting": ("Ledger", "ledger"),
    "artefacts": ("Runner", "load", "package", "save"),
    "attribution": ("Attribution", "attribute"),
    "drawing": ("draw", "to_networkx"),
    "errors": (
        *("ArtefactError", "CaptureError", "InputError", "InputTypeError", "LoweringError", "LrpfxError", "LrpfxWarning"),
        *("PassError", "RuleError", "UnsupportedOperationError", "VerificationError"),
    ),
    "inspection": ("assignment", "history"),
    "lowering": ("lower",),
    "pipeline": ("node_names", "transform"),
    "preflight": ("Report", "check"),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    else:
        try:
            value = importlib.import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]


__all__ = [
    "ArtefactError",
    "Attribution",
    "CaptureError",
    "InputError",
    "InputTypeError",
    "Ledger",
    "LoweringError",
    "LrpfxError",
    "LrpfxWarning",
    "PassError",
    "Report",
    "RuleError",
    "Runner",
    "UnsupportedOperationError",
    "VerificationError",
    "assignment",
    "attribute",
    "attribution",
    "canonizers",
    "check",
    "cmap",
    "composites",
    "core",
    "draw",
    "history",
    "image",
    "layer",
    "ledger",
    "load",
    "lower",
    "node_names",
    "package",
    "rules",
    "save",
    "to_networkx",
    "torchvision",
    "transform",
    "types",
]

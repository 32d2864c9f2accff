"""lrpfx for Captum, inseq, Quantus, SHAP and ViRelAy. A module is imported when it is first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrpfx.adapters import captum, inseq, quantus, shap, virelay

__all__ = ["captum", "inseq", "quantus", "shap", "virelay"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]

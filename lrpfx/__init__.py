"""lrpfx: a compiler for Layer-wise Relevance Propagation."""

from . import attribution, canonizers, cmap, composites, core, image, layer, rules, torchvision, types
from .accounting import Ledger, ledger
from .attribution import Attribution, attribute
from .drawing import draw, to_networkx
from .errors import (
    CaptureError,
    InputError,
    InputTypeError,
    LrpfxError,
    LrpfxWarning,
    PassError,
    RuleError,
    UnsupportedOperationError,
    VerificationError,
)
from .inspection import assignment, history
from .pipeline import node_names, transform
from .preflight import Report, check

__version__ = "0.1.0"

__all__ = [
    "Attribution",
    "CaptureError",
    "InputError",
    "InputTypeError",
    "Ledger",
    "LrpfxError",
    "LrpfxWarning",
    "PassError",
    "Report",
    "RuleError",
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
    "node_names",
    "rules",
    "to_networkx",
    "torchvision",
    "transform",
    "types",
]

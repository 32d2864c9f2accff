"""lrpfx: a compiler for Layer-wise Relevance Propagation."""

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

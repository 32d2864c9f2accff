"""lrpfx: a compiler for Layer-wise Relevance Propagation."""

import importlib
import os
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

__version__ = _version("lrpfx")

if TYPE_CHECKING:
    from lrpfx import (
        adapters,
        attribution,
        canonizers,
        cmap,
        composites,
        concepts,
        core,
        datasets,
        detection,
        image,
        layer,
        measures,
        pictures,
        request,
        rules,
        serve,
        text,
        torchvision,
        types,
    )
    from lrpfx.attribution.compute import Attribution, attribute
    from lrpfx.attribution.condition_module import condition
    from lrpfx.attribution.ledger import Ledger, ledger
    from lrpfx.attribution.training import backward_through_relevance
    from lrpfx.attribution.weights import relevance_of_weights
    from lrpfx.concepts.circuit import Circuit, circuits
    from lrpfx.concepts.dictionary import dictionary
    from lrpfx.deploy.artefact import load, package, save, sign
    from lrpfx.deploy.lowering import lower
    from lrpfx.deploy.runner import Runner
    from lrpfx.errors import (
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
    from lrpfx.explanation.detections import DetectionExplanation
    from lrpfx.explanation.explainer import Explainer, explain, explain_generation
    from lrpfx.explanation.explanation import Explanation, Explanations
    from lrpfx.explanation.generation import GenerationExplanation, ImageGenerationExplanation
    from lrpfx.explanation.graphs import GraphExplanation
    from lrpfx.explanation.joint import JointExplanation, JointExplanations
    from lrpfx.explanation.sentences import TextExplanation
    from lrpfx.explanation.series import SeriesExplanation, SeriesExplanations, WaveExplanation, WaveExplanations
    from lrpfx.explanation.tables import TableExplanation, TableExplanations
    from lrpfx.explanation.volumes import VolumeExplanation, VolumeExplanations
    from lrpfx.measures.choice import Choice, choose
    from lrpfx.measures.evaluation import Evaluation, evaluate
    from lrpfx.pipeline import Captured, capture, node_names, transform
    from lrpfx.reports.assignment import assignment
    from lrpfx.reports.check import Report, check
    from lrpfx.reports.comparison import Comparison, compare
    from lrpfx.reports.drawing import draw, to_networkx
    from lrpfx.reports.history import history
    from lrpfx.reports.pages.report import report
    from lrpfx.request.boxes import Box
    from lrpfx.request.regions import Region

# An installation has lrpfx.passes inside this folder. In the repository, passes/ is beside it.
if not os.path.isdir(os.path.join(os.path.dirname(__file__), "passes")):
    __path__.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

#: module -> the public names in it; modules are imported when one is first used, since torch takes long to import
_NAMES_IN = {
    "attribution.ledger": ("Ledger", "ledger"),
    "deploy.artefact": ("load", "package", "save", "sign"),
    "deploy.runner": ("Runner",),
    "attribution": ("Attribution", "attribute", "backward_through_relevance", "condition", "relevance_of_weights"),
    "reports.drawing": ("draw", "to_networkx"),
    "concepts.circuit": ("Circuit", "circuits"),
    "concepts.dictionary": ("dictionary",),
    "errors": (
        *("ArtefactError", "CaptureError", "InputError", "InputTypeError", "LoweringError", "LrpfxError", "LrpfxWarning"),
        *("PassError", "RuleError", "UnsupportedOperationError", "VerificationError"),
    ),
    "reports.assignment": ("assignment",),
    "reports.history": ("history",),
    "deploy.lowering": ("lower",),
    "pipeline": ("Captured", "capture", "node_names", "transform"),
    "reports.check": ("Report", "check"),
    "reports.comparison": ("Comparison", "compare"),
    "request.boxes": ("Box",),
    "request.regions": ("Region",),
    "measures.choice": ("Choice", "choose"),
    "measures.evaluation": ("Evaluation", "evaluate"),
    "reports.pages.report": ("report",),
    "explanation.detections": ("DetectionExplanation",),
    "explanation.explainer": ("Explainer", "explain", "explain_generation"),
    "explanation.explanation": ("Explanation", "Explanations"),
    "explanation.generation": ("GenerationExplanation", "ImageGenerationExplanation"),
    "explanation.graphs": ("GraphExplanation",),
    "explanation.joint": ("JointExplanation", "JointExplanations"),
    "explanation.sentences": ("TextExplanation",),
    "explanation.series": ("SeriesExplanation", "SeriesExplanations", "WaveExplanation", "WaveExplanations"),
    "explanation.tables": ("TableExplanation", "TableExplanations"),
    "explanation.volumes": ("VolumeExplanation", "VolumeExplanations"),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}


if not TYPE_CHECKING:  # type checkers would take any name for one of the package

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
    "Box",
    "CaptureError",
    "Captured",
    "Choice",
    "Circuit",
    "Comparison",
    "DetectionExplanation",
    "Evaluation",
    "Explainer",
    "Explanation",
    "Explanations",
    "GenerationExplanation",
    "GraphExplanation",
    "ImageGenerationExplanation",
    "InputError",
    "InputTypeError",
    "JointExplanation",
    "JointExplanations",
    "Ledger",
    "LoweringError",
    "LrpfxError",
    "LrpfxWarning",
    "PassError",
    "Region",
    "Report",
    "RuleError",
    "Runner",
    "SeriesExplanation",
    "SeriesExplanations",
    "TableExplanation",
    "TableExplanations",
    "TextExplanation",
    "UnsupportedOperationError",
    "VerificationError",
    "VolumeExplanation",
    "VolumeExplanations",
    "WaveExplanation",
    "WaveExplanations",
    "__version__",
    "adapters",
    "assignment",
    "attribute",
    "attribution",
    "backward_through_relevance",
    "canonizers",
    "capture",
    "check",
    "choose",
    "circuits",
    "cmap",
    "compare",
    "composites",
    "concepts",
    "condition",
    "core",
    "datasets",
    "detection",
    "dictionary",
    "draw",
    "evaluate",
    "explain",
    "explain_generation",
    "history",
    "image",
    "layer",
    "ledger",
    "load",
    "lower",
    "measures",
    "node_names",
    "package",
    "pictures",
    "relevance_of_weights",
    "report",
    "request",
    "rules",
    "save",
    "serve",
    "sign",
    "text",
    "to_networkx",
    "torchvision",
    "transform",
    "types",
]

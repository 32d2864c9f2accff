"""What is asked of a model: which output, which target, under which conditions, and of which nodes."""

from lrpfx.request.boxes import Box
from lrpfx.request.regions import Region
from lrpfx.request.targets import (
    Class,
    Classes,
    Contrast,
    ForEach,
    Function,
    Label,
    Largest,
    Position,
    Seed,
    Target,
    as_target,
    as_targets,
)

__all__ = [
    "Box",
    "Class",
    "Classes",
    "Contrast",
    "ForEach",
    "Function",
    "Label",
    "Largest",
    "Position",
    "Region",
    "Seed",
    "Target",
    "as_target",
    "as_targets",
]

"""Boxes that a detector finds: why a box, why its class, why an edge of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from typing_extensions import Self

from lrpfx.errors import InputError, InputTypeError
from lrpfx.request.candidates import Candidates, Corners, overlap_of
from lrpfx.request.targets import NO_BOX, Class, IndexOf, Largest, NameOf, Target
from lrpfx.support.numbers import is_whole

SCORE = "score"
#: The edges of a box, in the order of their columns.
EDGES = ("x1", "y1", "x2", "y2")


@dataclass(frozen=True)
class Box(Target):
    """A box that a detector finds: its class, one of its edges, or another class at its place.

    It is a target for `lrpfx.Explainer(detector)`, and for the output of `lrpfx.detection.heads(detector)`. Boxes are those
    that the detector returns: the most confident ones, without doubles.

    Parameters
    ----------
    k
        The number of the box, by confidence: 0 is the one of which the detector is most sure.
    what
        "score" for the logit of the box's class; "x1", "y1", "x2" or "y2" for the position of an edge in pixels, of which an
        anchor's share is a constant; or a class, by index or name, for its logit at the place of the box.
    class_
        The class whose boxes count, by index or name; by default those of all classes.
    corners, iou
        As `near` has them.

    Raises
    ------
    InputError
        A number or an overlap is out of range; an `InputTypeError` if it is of another type.

    Examples
    --------
    >>> lrpfx.Box(0), lrpfx.Box(1, "x1", class_="cat").what
    (Box(k=0, what='score', class_=None, corners=None, iou=0.5), 'x1')
    """

    k: int = 0
    what: int | str = SCORE
    class_: int | str | None = None
    corners: Corners | None = None
    iou: float = 0.5

    def __post_init__(self) -> None:
        if not is_whole(self.k):
            raise InputTypeError(f"k is the number of a box, 0 for the most confident one, not {self.k!r}", topic="targets")
        if self.k < 0:
            raise InputError(f"k is the number of a box, at least 0, not {self.k}", topic="targets")
        object.__setattr__(self, "k", int(self.k))
        for name in ("what", "class_"):
            value = getattr(self, name)
            if is_whole(value):
                object.__setattr__(self, name, int(value))
            elif not (isinstance(value, str) or (value is None and name == "class_")):
                raise InputTypeError(f"{name} is the index or the name of a class, not {value!r}", topic="targets")
        if self.corners is not None:
            object.__setattr__(self, "corners", _as_corners(self.corners))
            if isinstance(self.iou, bool) or not isinstance(self.iou, (int, float)) or not 0 < self.iou <= 1:
                raise InputError(f"iou is an overlap above 0 and up to 1, not {self.iou!r}", topic="targets")

    @classmethod
    def near(
        cls, corners: Sequence[float] | Any, class_: int | str | None = None, what: int | str = SCORE, iou: float = 0.5
    ) -> Self:
        """The most confident box that overlaps a given one.

        `corners`: left, top, right and bottom edge, in pixels of the photograph in an `lrpfx.Explainer`, and otherwise of the
        model's input. `class_`: of the box; by default any. `what`: as for `Box`. `iou`: the least intersection over union.
        """
        return cls(0, what, class_, _as_corners(corners), iou)

    @property
    def is_of_classes(self) -> bool:
        return False

    @property
    def _index(self) -> int | None:
        return None if self.class_ is None else int(self.class_)

    def check(self, output: torch.Tensor, chosen: str = "output") -> None:
        candidates = Candidates(output)
        candidates.check()
        for one in (self.class_, None if self.what in (SCORE, *EDGES) else self.what):
            if one is not None:
                Class(one).check(output[:, 0, : candidates.classes], chosen)
        _, are_there = self.places(candidates)
        missing = (~are_there).nonzero()
        if len(missing):
            sample = "" if len(output) == 1 else f" in sample {int(missing[0, 0])}"
            reason = self._reason(Candidates(output[missing[0, 0] : missing[0, 0] + 1]))
            unit = "" if self.corners is None else ", in pixels of the model's input"
            raise InputError(f"the detector finds no {self}{unit}{sample}: {reason}", topic="detectors")

    def _reason(self, one: Candidates) -> str:
        """What there is in place of a box that is missing. `one`: the candidates of its sample."""
        left = one.of_class(self._index)
        if self.corners is None:
            count = 0
            while bool((left > 0).any()):
                left = one.without_doubles(left, left.argmax(1))
                count += 1
            if not count:
                found = "it finds none" if self.class_ is None else "it finds none of this class"
                return f"{found}; lrpfx.detection.heads(detector, threshold=) with a lower threshold finds more"
            return f"it finds {count}{'' if self.class_ is None else ' of this class'}, and the first is number 0"
        overlaps = overlap_of(one.corners, torch.tensor(self.corners).to(one.output)) * (left > 0)
        best = int(overlaps.argmax())
        if not overlaps.any():
            return "none overlaps it"
        nearest = ", ".join(f"{float(edge):.0f}" for edge in one.corners[0, best])
        share = f"{float(overlaps.max()):.2f}"
        return f"the nearest one, of class {int(one.labels[0, best])} at ({nearest}), overlaps it by {share}"

    def places(self, candidates: Candidates) -> tuple[torch.Tensor, torch.Tensor]:
        """The place of the box among the candidates of each sample, (batch, 1), and whether there is such a box.

        `candidates`: the output, read.
        """
        if self.corners is not None:
            return candidates.near(self.corners, self._index, self.iou)
        places, are_there = candidates.found(self.k + 1, self._index)
        return places[:, -1:], are_there[:, -1:]

    def relevance(self, output: torch.Tensor) -> torch.Tensor:
        candidates = Candidates(output)
        places, are_there = self.places(candidates)
        rows = torch.arange(output.shape[1], device=output.device) == places
        if self.what == SCORE:
            column = candidates.labels.gather(1, places)
        else:
            number = candidates.classes + EDGES.index(str(self.what)) if self.what in EDGES else int(self.what)
            column = torch.full_like(places, number)
        columns = torch.arange(output.shape[2], device=output.device) == column
        return output * ((rows & are_there)[..., None] & columns[:, None]).to(output)

    def resolved(self, index_of: IndexOf) -> Target:
        what = self.what if self.what in (SCORE, *EDGES) else index_of(self.what)
        return replace(self, what=what, class_=None if self.class_ is None else index_of(self.class_))

    def of_sample(self, number: int) -> Target | None:
        return self

    def least_sizes(self) -> tuple[int, ...]:
        return 1, self.k + 1, 8

    def title(self, name_of: NameOf) -> str:
        def named(index: int | str) -> str:
            return name_of(index) if isinstance(index, int) else index

        kind = "" if self.class_ is None else f" of {named(self.class_)}"
        near = "" if self.corners is None else f" near ({', '.join(f'{edge:g}' for edge in self.corners)})"
        box = f"box{kind}{near}" if near else f"box {self.k}{kind}"
        return box if self.what == SCORE else f"{self.what if self.what in EDGES else named(self.what)} of {box}"

    def __str__(self) -> str:
        return self.title("class {}".format)


def _as_corners(corners: Any) -> Corners:
    """The edges of a box as numbers."""
    try:
        values = [float(edge) for edge in np.asarray(corners, dtype=np.float64).reshape(-1)]
    except (TypeError, ValueError):
        raise InputTypeError(f"a box is (x1, y1, x2, y2), not {corners!r}", topic="targets") from None
    if len(values) != 4 or not np.isfinite(values).all() or not (values[0] < values[2] and values[1] < values[3]):
        raise InputError(f"a box is (x1, y1, x2, y2) with x1 < x2 and y1 < y2, not {corners!r}", topic="targets")
    return values[0], values[1], values[2], values[3]


def as_box(target: Target) -> Box:
    """The box that a target of a detector means: a class is its most confident box. `InputTypeError` for other targets."""
    if isinstance(target, Box):
        return target
    if isinstance(target, Largest):
        return Box(0)
    if isinstance(target, Class):
        return Box(0, class_=target.index)
    raise InputTypeError(f"{NO_BOX}, or by a class for its first box, not {target}", topic="detectors")

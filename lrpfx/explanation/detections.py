"""Explanations of what a detector finds: a detector and photographs in, relevance of boxes out."""

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from typing_extensions import Unpack

from lrpfx.attribution.compute import attribute
from lrpfx.composites import Composite
from lrpfx.detection.detector_heads import DetectorHeads
from lrpfx.errors import InputError, LrpfxError, first_lines
from lrpfx.explanation.answers import Answer, Array, Category, Names, Scores
from lrpfx.explanation.compiled import CompiledModel, Run, keep_origin
from lrpfx.explanation.explanation import Explanation
from lrpfx.images.geometry import Geometry
from lrpfx.pictures.boxes import with_boxes
from lrpfx.pictures.style import Style, StyleSettings, styled
from lrpfx.pipeline import transform
from lrpfx.request.boxes import EDGES, SCORE, Box, as_box
from lrpfx.request.candidates import Candidates, Corners
from lrpfx.request.targets import ForEach, Target, as_target
from lrpfx.request.targets_of_samples import resolved
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.support.numbers import whole_number
from lrpfx.support.tensors import as_array, on_device_of

#: Pixels of the width of the photograph on which a sheet draws boxes, at least.
_LEAST = 380
#: Boxes that a sheet draws on the photograph.
_DRAWN = 20
#: The height and width, or the other way round, of the example that heads are compiled with.
_EXAMPLE = 128, 160

logger = logging.getLogger(__name__)


def in_input(box: Box, geometry: Geometry | None) -> Box:
    """A box near corners on a photograph as a box near those on the input."""
    if box.corners is None or geometry is None:
        return box
    places = _mapped(np.array(box.corners), geometry, undo=False)
    return replace(box, corners=tuple(places.tolist()))


def on_photograph(corners: Array, geometry: Geometry | None) -> Array:
    """Edges of boxes on the input, (..., 4), as those on the photograph."""
    return corners.astype(np.float64) if geometry is None else _mapped(corners, geometry, undo=True)


def _mapped(corners: Array, geometry: Geometry, undo: bool) -> Array:
    axes = geometry.columns, geometry.rows
    ends = []
    for place in range(4):
        axis, edge = axes[place % 2], corners[..., place]
        ends.append(axis.start + axis.step * edge if undo else (edge - axis.start) / axis.step)
    x, y = np.sort(ends[0::2], 0), np.sort(ends[1::2], 0)  # a preprocessing may mirror
    return np.stack([x[0], y[0], x[1], y[1]], -1)


def arguments_of(heads: DetectorHeads, images: torch.Tensor) -> Any:
    """What the forward of heads takes for images: a tensor, or a tuple with what is found before."""
    further = heads.further(images)
    return (images, *further) if further else images


def compiled_heads(heads: DetectorHeads, composite: Composite, images: torch.Tensor, example: Any = None) -> ExplainModule:
    """The explainable module of heads for images of any size, or else of this one.

    Every check of a compilation runs the model. So the example is a small picture of the images, if the graph leaves sizes
    open, which are then verified at other sizes. `example`: the user's, for `lrpfx.transform`, in place of it.
    """
    if example is not None and not isinstance(example, torch.Tensor):
        return transform(heads, composite, example, constants=heads.further_names)
    images = on_device_of(heads, images if example is None else example, True)
    size = _EXAMPLE if images.shape[2] <= images.shape[3] else _EXAMPLE[::-1]
    if example is None and images.shape[2] > size[0] and images.shape[3] > size[1]:
        name, *further = inspect.signature(heads.forward).parameters
        open_sizes = {name: dict.fromkeys((0, 2, 3), True), **{one: {0: True, 1: True} for one in further}}
        smaller = functional.interpolate(images[:1].float(), size, mode="bilinear", antialias=True).to(images)  # no 16 bits
        try:
            made = _transformed(heads, composite, smaller, capture="symbolic", dynamic_shapes=open_sizes)
        except LrpfxError as error:  # that of another size or front end is found again
            logger.info("compiling for images of one size: %s", first_lines(error, 1))
        else:
            given = dict(zip((name, *further), (images, *heads.further(images)), strict=True))
            if not any(guard.problem(given) for guard in made.guards):
                return made
    return _transformed(heads, composite, images)


def _transformed(heads: DetectorHeads, composite: Composite, images: torch.Tensor, **settings: Any) -> ExplainModule:
    return transform(heads, composite, arguments_of(heads, images), constants=heads.further_names, **settings)


class CompiledDetector(CompiledModel):
    """A detector up to its raw heads as an explainable module."""

    def __init__(
        self, module: nn.Module, heads: DetectorHeads, categories: Sequence[str] | None, record: tuple[str, ...] = ()
    ) -> None:
        """`module`: compiled from `heads`."""
        super().__init__(module, categories, record, None, Scores.OTHER)
        self.heads = heads

    @property
    def has_fixed_sizes(self) -> bool:
        """Whether it takes images of one size alone: torch.export fixes it."""
        return any(one.stage == "capture" and one.name == "export" for one in self.explain_model.compiled.history)

    def placed(self, inputs: Any) -> Any:
        placed = super().placed(inputs)
        return arguments_of(self.heads, placed)

    def run(self, inputs: Any, targets: Sequence[Sequence[Target]], record: Sequence[str] = ()) -> Run:
        columns = [[resolved(as_box(one), self.categories) for one in column] for column in zip(*targets, strict=True)]
        seeds = [column[0] if all(one == column[0] for one in column) else ForEach(tuple(column)) for column in columns]
        found = attribute(self.module, self.placed(inputs), targets=seeds, record=(*self.record, *record))
        candidates = Candidates(found.output)
        self._check_categories(candidates)
        relevance = found.relevance if isinstance(found.relevance, torch.Tensor) else found.relevance[0]
        arrays = {"relevance": as_array(relevance), **{name: as_array(one) for name, one in found.layers.items()}}
        outputs = self._detections(candidates)
        answers: list[tuple[Answer, ...]] = []
        for place in range(len(inputs)):
            of_sample: list[Answer] = []
            for number, column in enumerate(columns):
                layers = {name: one[number, place] for name, one in arrays.items()}
                box = column[place]
                assert isinstance(box, Box)
                of_sample.append(self._answer(box, Candidates(found.output[place : place + 1]), layers))
            answers.append(tuple(of_sample))
        again = [tuple(column[place] for column in columns) for place in range(len(inputs))]
        return Run(outputs, answers, again, self.explain_model.composite, self.scores)

    def _check_categories(self, candidates: Candidates) -> None:
        if self.categories is not None and len(self.categories) not in (candidates.classes, candidates.classes - 1):
            raise InputError(
                f"categories= has {len(self.categories)} names of classes, but the detector has {candidates.classes} classes",
                topic="classes-and-their-names",
            )

    def _detections(self, candidates: Candidates) -> list[Array]:
        """The rows of what is found in each sample, (detections, classes + 7)."""
        found = []
        for output in candidates.output.detach().split(1):
            one = Candidates(output)
            rows: list[torch.Tensor] = []
            left = one.confidences
            while len(rows) < self.heads.limit and bool((left > 0).any()):
                best = left.argmax(1)
                rows.append(output[0, best[0]])
                left = one.without_doubles(left, best)
            found.append(as_array(torch.stack(rows) if rows else output[0, :0]))
        return found

    def _answer(self, box: Box, candidates: Candidates, layers: dict[str, Array]) -> Answer:
        relevance = layers.pop("relevance")
        row = as_array(candidates.output[0, box.places(candidates)[0][0, 0]])
        region = _region(row[-7:-3], relevance.shape[-2:])
        return Answer(category_of_row(row, box.what, self.categories), relevance, layers, region)


def category_of_row(row: Array, what: int | str, categories: Names) -> Category:
    """What is explained of a box, by its row of the output, (classes + 7,)."""
    label = round(float(row[-2]))
    name, confidence = _name(label, categories), float(row[-3])
    if what == SCORE:
        return Category(label, name, float(row[label]), confidence)
    if what in EDGES:
        return Category(label, f"{what} of {name}", float(row[len(row) - 7 + EDGES.index(str(what))]), None)
    return Category(int(what), f"{_name(int(what), categories)} in place of {name}", float(row[int(what)]), None)


def _name(index: int, categories: Names) -> str:
    return str(index) if categories is None or index >= len(categories) else categories[index]


def _region(corners: Array, size: tuple[int, ...]) -> Array:
    """The pixels of the input within a box, bool, (height, width)."""
    x1, y1, x2, y2 = corners
    rows, columns = (np.arange(side) + 0.5 for side in size)
    return np.asarray(((rows > y1) & (rows < y2))[:, None] & (columns > x1) & (columns < x2))


@dataclass(frozen=True)
class FoundBox:
    """A box that a detector found in a photograph. Its pictures and relevance need the model.

    `number`: by confidence, from 0. `corners`: x1, y1, x2 and y2 in pixels of the photograph. `category`: its class, with the
    logit as `score` and the confidence as `probability`.
    """

    number: int
    corners: Corners
    category: Category
    explanation_of_all: "DetectionExplanation"

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.category.name

    @property
    def confidence(self) -> float:
        """How sure the detector is of the class, from 0 to 1."""
        return float(self.category.probability or 0.0)

    def explain(self, *what: int | str) -> "DetectionExplanation":
        """The explanation of the box's score, or of what else `lrpfx.Box` takes, such as "x1" or another class."""
        return self.explanation_of_all.of(*(Box(self.number, one) for one in what or (SCORE,)))

    @property
    def relevance(self) -> Array:
        """Relevance of each pixel of the photograph for the score of the box, (height, width)."""
        return self.explain().relevance

    def overlay(self, style: Style | None = None, **settings: Unpack[StyleSettings]) -> Image.Image:
        """The relevance for the score over the photograph, with the box. `style`, `settings`: as for `Explanation.overlay`."""
        return self.explain().overlay(style, **settings)

    def heatmap(self, *, style: Style | None = None, **settings: Unpack[StyleSettings]) -> Image.Image:
        """The relevance for the score in colours. `style`, `settings`: as for `Explanation.heatmap`."""
        return self.explain().heatmap(style=style, **settings)

    def show(self) -> None:
        """Show the sheet of the box's explanation."""
        self.explain().show()

    def __repr__(self) -> str:
        corners = ", ".join(f"{edge:.0f}" for edge in self.corners)
        return f"<box {self.number}: {self.category} at ({corners})>"


@dataclass(frozen=True, eq=False, repr=False)
class DetectionExplanation(Explanation):
    """Why a detector found a box: its class, an edge of it, or another class at its place.

    `output`: a row for each box that was found, (boxes, classes + 7), as `lrpfx.detection.heads` has them. The region of an
    answer is its box. Other arguments: as for `Explanation`.

    Examples
    --------
    >>> explanation = lrpfx.explain(detector, "cat.jpg", categories=["cat", "dog"])
    >>> [(one.name, one.overlay().size) for one in explanation.boxes]
    [('cat', (60, 40)), ('cat', (60, 40))]
    """

    @property
    def boxes(self) -> tuple[FoundBox, ...]:
        """All boxes that were found, the most confident first."""
        corners = on_photograph(self.output[:, -7:-3], self.geometry)
        return tuple(
            FoundBox(number, tuple(edges), category_of_row(row, SCORE, self.categories), self)
            for number, (edges, row) in enumerate(zip(corners.tolist(), self.output, strict=True))
        )

    def top(self, count: int = 5) -> list[Category]:
        """The classes of the most confident boxes, with their logits and confidences. `count`: how many."""
        count = whole_number(count, "top takes a number of boxes", 1, "detectors")
        return [category_of_row(row, SCORE, self.categories) for row in self.output[:count]]

    def of(self, *targets: Box) -> "DetectionExplanation":
        """The explanation of other boxes of the same photograph, or of other edges or classes; the model runs again for them.

        `targets`: those of `lrpfx.Box`, whose corners are in pixels of the photograph.
        """
        origin = self._origin("relevance for other boxes", "pass targets= when you explain")
        asked = tuple(in_input(one, self.geometry) for one in targets)
        if asked == origin.targets:
            return self
        found = replace(self, answers=origin.answers(asked))
        keep_origin(found, replace(origin, targets=asked))
        return found

    def _answers_for(self, classes: Sequence[Any]) -> list[Answer]:
        return list(self.of(*(as_box(as_target(one)) for one in classes)).answers)

    def compare(
        self, classes: Sequence[Any] | int = 2, style: Style | None = None, **settings: Unpack[StyleSettings]
    ) -> Image.Image:
        """Overlays for several boxes side by side, with one scale.

        `classes`: those of `lrpfx.Box`, classes for their first boxes, or how many of the most confident boxes. `style`,
        `settings`: as for `overlay`.
        """
        if isinstance(classes, (int, np.integer)):
            count = whole_number(classes, "compare takes a number of boxes", 1, "detectors")
            classes = [Box(number) for number in range(min(count, len(self.output)))]
        return super().compare(classes, style, **settings)

    def photograph_with_boxes(self, count: int = _DRAWN, size: tuple[int, int] | None = None) -> Image.Image:
        """The photograph with the boxes that were found, their numbers and their classes.

        `count`: how many boxes at most. `size`: (width, height), by default that of the photograph.
        """
        canvas = self._canvas(size)
        across, down = (new / old for new, old in zip(canvas.photograph.size, self.photograph.size, strict=True))
        shown = self.boxes[:count]
        corners = [tuple(np.array(one.corners) * (across, down, across, down)) for one in shown]
        return with_boxes(canvas.photograph, corners, [f"{one.number}: {one.category}" for one in shown])

    def row(self, style: Style | None = None, **settings: Unpack[StyleSettings]) -> list[tuple[str, Image.Image]]:
        """The pictures of `sheet` with their titles: the boxes that were found, the map, and the map over the photograph.

        `style`, `settings`: as for `overlay`.
        """
        (_, photograph), *others = super().row(styled(style, settings))
        enlarged = max(1, -(-_LEAST // photograph.width))  # names of classes have the size of letters
        size = photograph.width * enlarged, photograph.height * enlarged
        return [(self.name, self.photograph_with_boxes(size=size)), *others]

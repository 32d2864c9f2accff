"""What a report was asked for: samples, and for each composite and target the model, its inputs, and the relevance found."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from lrpfx.attribution.arguments import Inputs
from lrpfx.attribution.compute import Attribution, attribute
from lrpfx.errors import InputError, InputTypeError, LrpfxError
from lrpfx.explanation.answers import Answer, Category
from lrpfx.explanation.compiled import CompiledModel, origin_of
from lrpfx.explanation.explanation import Explained, Explanation, Several
from lrpfx.explanation.joint import CompiledJoint
from lrpfx.explanation.sentences import TextExplanation
from lrpfx.explanation.series import SeriesExplanation
from lrpfx.explanation.tables import TableExplanation
from lrpfx.explanation.volumes import VolumeExplanation
from lrpfx.pictures import scale_of, smoothed
from lrpfx.pictures.pixels import as_image
from lrpfx.reports.pages.encoding import Array, Packed, figure, image_address, packed, reduced
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.targets import Class, Classes, Largest, Target, as_target
from lrpfx.runtime.explain_module import ExplainModule, explainable
from lrpfx.support.numbered_names import numbered
from lrpfx.text.pictures import visible

#: Errors about what a report is on.
invalid, wrong_type = partial(InputError, topic="reports"), partial(InputTypeError, topic="reports")

NO_MODEL = (
    "This explanation was made without a compiled model at hand: it was pickled, or comes from an exported program. Its graph, "
    "ledger and compilation are not known here."
)
_FINEST = 448  # pixels of each side of a map
_SLICES = 64  # of a volume
_SHOWN = 40  # entries of an input that is not a photograph or a text


#: From the place of an entry of an input to its names.
NamesOfEntries = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True)
class Query:
    """A question to an explainable module, with its inputs."""

    module: ExplainModule
    inputs: Inputs
    target: Target
    output: OutputSelector

    def answered(self) -> Attribution[Any]:
        """The relevance of the inputs."""
        return attribute(self.module, self.inputs, self.target, output=self.output)


@dataclass(frozen=True)
class View:
    """One answer: a sample under a composite for a target. `query` is None where there is no compiled model."""

    composite: str
    sample: int
    rules: str
    data: dict[str, Any]
    query: Query | None
    score: float | None = None  # the output that was explained, by which a model that has changed since is noticed
    tokens: int | None = None  # of a text
    groups: Sequence[Sequence[int]] = ()  # the tokens of each word


@dataclass
class Questions:
    """All samples, as data, and all views of them.

    `output`: which output of a model is explained, for calls; explanations have made their choice.
    """

    output: OutputSelector = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    _known: dict[Any, int] = field(default_factory=dict)

    def add(self, composite: str, what: Any) -> None:
        """Add what a user gave under the name of a composite."""
        if self.output is not None and isinstance(what, Explained):
            raise invalid("output= belongs to a tuple (explain_model, inputs, target): an explanation has chosen its output")
        if isinstance(what, (Several, list)):
            if not len(what):
                raise invalid("there are no explanations to report on")
            for one in what:
                self.add(composite, one)
        elif isinstance(what, Explanation):
            self._add_photograph(composite, what)
        elif isinstance(what, TextExplanation):
            self._add_text(composite, what)
        elif isinstance(what, VolumeExplanation):
            self._add_volume(composite, what)
        elif isinstance(what, Explained):
            self._add_values(composite, what)
        elif isinstance(what, tuple):
            self._add_call(composite, what)
        else:
            raise wrong_type(
                "a report is on an explanation, several of them, a list, a tuple (explain_model, inputs, target), or a dict "
                f"with these under the names of composites, not on {type(what).__name__}"
            )

    def number(self) -> None:
        """Tell samples of one name apart, and targets of one sample under one composite."""
        for sample, name in zip(self.samples, numbered([sample["name"] for sample in self.samples]), strict=True):
            sample["name"] = name
        together: dict[tuple[int, str], list[dict[str, Any]]] = {}
        for view in self.views:
            together.setdefault((view.sample, view.composite), []).append(view.data["target"])
        for targets in together.values():
            for target, name in zip(targets, numbered([target["name"] for target in targets]), strict=True):
                target["name"] = name

    def _sample(self, key: Any, data: dict[str, Any]) -> int:
        """The number of a sample. Two composites may explain the same one, which then is one sample."""
        if key not in self._known:
            self._known[key] = len(self.samples)
            self.samples.append(data)
        return self._known[key]

    # --- explanations --------------------------------------------------------------------------------------------------------

    def _add_photograph(self, composite: str, one: Explanation) -> None:
        key = ("photograph", one.name, one.photograph.size, _digest(one.photograph.tobytes()))
        sample = self._sample(key, _photograph(one.name, one.photograph, *one.photograph.size))
        for place, answer in enumerate(one.answers):
            data = {**_target(one, answer), **_map(answer.summed, one)}
            self.views.append(View(composite, sample, one.rules, data, _query_of(one, place), answer.category.score))

    def _add_text(self, composite: str, one: TextExplanation) -> None:
        picture = one.picture
        shown = [
            {"text": visible(text), "special": bool(special)}
            for text, special in zip(picture.words, picture.special, strict=True)
        ]
        key = ("text", one.name, one.tokens.tobytes())
        sample = self._sample(key, {"kind": "text", "name": one.name, "words": shown})
        words = (len(one.tokens), picture.places)
        for place, answer in enumerate(one.answers):
            others = [[name, figure(values[place])] for name, values in picture.others.items()]
            data = {**_target(one, answer), "words": list(map(figure, picture.scores[place])), "others": others}
            self.views.append(View(composite, sample, one.rules, data, _query_of(one, place), answer.category.score, *words))

    def _add_volume(self, composite: str, one: VolumeExplanation) -> None:
        """Add a volume as a picture of its slices, side by side."""
        slices = one.slices(_SLICES)
        columns = math.ceil(math.sqrt(len(slices)))
        photograph = Image.fromarray(_tiled([np.asarray(picture) for _, picture, _ in slices], columns))
        sample = self._sample(
            ("volume", one.name, one.volume.shape, _digest(one.volume.tobytes())),
            _photograph(one.name, photograph, *photograph.size),
        )
        for place, answer in enumerate(one.answers):
            tiled = _tiled([map for _, _, map in one.slices(_SLICES, target=place)], columns)
            data = {**_target(one, answer), **_map(tiled, None)}
            self.views.append(View(composite, sample, one.rules, data, _query_of(one, place), answer.category.score))

    def _add_values(self, composite: str, one: Explained) -> None:
        """Add inputs by their entries with the most relevance: several of them, or numbers."""
        for place, answer in enumerate(one.answers):
            query = _query_of(one, place)
            if query is None:
                raise invalid(
                    f"a report on {one.name} needs the explanation itself, not a copy without the model or that of a program"
                )
            self._add_answer(composite, one.name, query, query.answered(), _target(one, answer), _names_of_entries(one, query))

    # --- calls ---------------------------------------------------------------------------------------------------------------

    def _add_call(self, composite: str, what: tuple[Any, ...]) -> None:
        if len(what) not in (2, 3) or not isinstance(what[0], nn.Module):
            raise wrong_type("a tuple is (explain_model, inputs, target), where the target may be left out")
        module, inputs, target = explainable(what[0], "report"), what[1], what[2] if len(what) == 3 else None
        targets = target if isinstance(target, list) else [target]
        if not targets:
            raise InputError("the list of targets is empty", topic="targets")
        queries = [Query(module, inputs, as_target(one), self.output) for one in targets]
        found = [one.answered() for one in queries]
        split = _samples_of(queries, found)
        if split is None:
            for question, answer in zip(queries, found, strict=True):
                self._add_answer(composite, "inputs", question, answer)
        else:
            for number, sample in enumerate(split):
                for question, answer in sample:
                    self._add_answer(composite, f"sample {number + 1}", question, answer)

    def _add_answer(
        self,
        composite: str,
        name: str,
        query: Query,
        found: Attribution[Any],
        known: dict[str, Any] | None = None,
        names: NamesOfEntries | None = None,
    ) -> None:
        """Add relevance of a call. `known`: what is said of the target. `names`: of entries of an input, by their places."""
        values = list(_leaves("", query.inputs, found.relevance))
        key = ("call", name, *((path, tuple(value.shape), _digest(value.numpy().tobytes())) for path, value, _ in values))
        data: dict[str, Any] = {"target": _name_of_target(query.target, found.output), "top": [], **(known or {})}
        only = values[0] if len(values) == 1 else None
        if only is not None and _is_picture(only[1]):
            relevance = only[2]
            assert relevance is not None
            picture = as_image(only[1][0].detach().cpu().double())
            sample = self._sample(key, _photograph(name, picture, *only[1].shape[:1:-1]))
            data |= _map(relevance[0].double().sum(0).numpy(), None)
        else:
            sample = self._sample(key, {"kind": "values", "name": name})
            data["inputs"] = [_entries(*value, names if only is not None else None) for value in values]
        self.views.append(View(composite, sample, str(query.module.composite), data, query))


def _query_of(one: Explained, place: int) -> Query | None:
    """What one answer of an explanation was computed from; None where there is no compiled model."""
    origin = origin_of(one)
    if origin is None or not isinstance(origin.compiled, (CompiledModel, CompiledJoint)):
        return None
    compiled = origin.compiled
    return Query(compiled.explain_model, compiled.placed(origin.inputs), origin.targets[place], compiled.output)


def _photograph(name: str, image: Image.Image, width: int, height: int) -> dict[str, Any]:
    """A photograph as data of a sample."""
    size = {"width": width, "height": height}
    return {"kind": "photograph", "name": name, **size, "photograph": image_address(image)}


def _digest(content: bytes) -> bytes:
    """A short text that differs for different contents, to tell samples apart."""
    return hashlib.sha256(content).digest()


def _target(one: Explained, answer: Answer) -> dict[str, Any]:
    def described(best: Category) -> dict[str, Any]:
        probability = None if best.probability is None else figure(best.probability)
        return {"name": best.name, "score": figure(best.score), "probability": probability}

    return {
        "target": described(answer.category),
        "top": [list(described(best).values()) for best in one.top(5)],
        "balance": {"output": figure(answer.balance.output), "inputs": figure(answer.balance.inputs)},
    }


def _map(relevance: Array, one: Explanation | None) -> dict[str, Packed]:
    """The relevance of the model's pixels, exact and as it is drawn, and the part of the photograph that it covers.

    There is none if values are not finite: the page says so.
    """
    if not np.isfinite(relevance).all():
        return {}
    height, width = relevance.shape
    box = [0.0, 0.0, float(width), float(height)]
    mirrored = [False, False]
    padding = 0.0
    if one is not None and one.geometry is not None:
        columns, rows = one.geometry.columns, one.geometry.rows
        left, right = sorted(columns.edges[[0, -1]].tolist())
        top, bottom = sorted(rows.edges[[0, -1]].tolist())
        box, mirrored = [left, top, right, bottom], [bool(columns.step < 0), bool(rows.step < 0)]
        padding = one.padding_relevance
    small = reduced(relevance, _FINEST)
    drawn = smoothed(small)
    found = {
        "box": list(map(figure, box)),
        "mirrored": mirrored,
        "padding": figure(padding),
        "pixels": [width, height],
        "exact": packed(small),
        "drawn": packed(drawn, scale_of(small), bits=8),
    }
    return {"map": found}


def _samples_of(
    queries: Sequence[Query], found: Sequence[Attribution[Any]]
) -> list[list[tuple[Query, Attribution[Any]]]] | None:
    """Pairs of a question to each image or row of a single tensor and its answer; None where the batch belongs together.

    It does with a function of the output or a target of several parts, and if its samples by themselves have another relevance:
    their first dimension may be time, or the model may compute one sample from others. `found`: the answers for the batch.
    """
    inputs = queries[0].inputs
    if not isinstance(inputs, torch.Tensor) or inputs.ndim < 2 or len(inputs) < 2:
        return None
    samples = []
    for number in range(len(inputs)):
        place, sample = slice(number, number + 1), []
        for question, whole in zip(queries, found, strict=True):
            target = question.target.of_sample(number)
            if target is None:
                return None
            one = Query(question.module, inputs[place], target, question.output)
            try:
                answer = one.answered()
            except LrpfxError:  # of a batch of one
                return None
            leaves = zip(_leaves("", inputs, whole.relevance), _leaves("", one.inputs, answer.relevance), strict=True)
            pairs = [(whole.output, answer.output), *((theirs, own) for (_, _, theirs), (_, _, own) in leaves)]
            if not all(own is None or (theirs is not None and _agree(theirs[place], own)) for theirs, own in pairs):
                return None
            sample.append((one, answer))
        samples.append(sample)
    return samples


def _agree(part: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether a part of what was computed of a batch is what was computed of its sample alone, up to rounding."""
    if part.shape != own.shape:
        return False
    finite = part[part.isfinite()].abs().double()
    tolerance = torch.finfo(part.dtype).eps ** 0.5 * (float(finite.max()) if finite.numel() else 0.0)
    return torch.allclose(part.double(), own.double(), rtol=0.0, atol=tolerance, equal_nan=True)


def _leaves(path: str, inputs: Any, relevance: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """The tensors among inputs with their relevance, each under its path."""
    if isinstance(inputs, torch.Tensor):
        if isinstance(relevance, Mapping):  # of several embeddings
            for name, one in relevance.items():
                yield from _leaves(f"{path}: {name}", inputs, one)
        else:
            held = None if relevance is None else relevance.detach().cpu()
            value = inputs.detach().cpu()
            yield path or "x", value.float() if value.dtype == torch.bfloat16 else value, held
    elif isinstance(inputs, Mapping):
        for name, value in inputs.items():
            yield from _leaves(f"{path}.{name}" if path else str(name), value, relevance[name])
    elif isinstance(inputs, (tuple, list)):
        for place, value in enumerate(inputs):
            yield from _leaves(f"{path}[{place}]" if path else f"input {place + 1}", value, relevance[place])


def _is_picture(value: torch.Tensor) -> bool:
    shaped = value.ndim == 4 and len(value) == 1 and value.shape[1] in (1, 3) and min(value.shape[2:]) > 1
    return shaped and value.is_floating_point()


def _names_of_entries(one: Explained, query: Query) -> NamesOfEntries | None:
    """The names that features and steps have, where it is known which axis is theirs."""
    if not isinstance(query.inputs, torch.Tensor):
        return None
    shape = tuple(query.inputs.shape[1:])
    if isinstance(one, TableExplanation) and shape == (len(one.features),):
        return lambda place: [one.features[place[1]]]
    if isinstance(one, SeriesExplanation):
        count, width = one.values.shape
        if shape in ((count, width), (count,)) and count != width:
            return lambda place: [str(one.steps[place[1]]), one.features[place[2] if len(place) > 2 else 0]]
        if shape == (width, count) and count != width:
            return lambda place: [str(one.steps[place[2]]), one.features[place[1]]]
    return None


def _tiled(slices: Sequence[Array], columns: int) -> Array:
    """Slices of one shape (height, width, ...) side by side in rows, with nothing where the last row ends."""
    empty = [np.zeros_like(slices[0])] * (-len(slices) % columns)
    rows = [*slices, *empty]
    return np.concatenate([np.concatenate(rows[first : first + columns], 1) for first in range(0, len(rows), columns)], 0)


def _entries(
    path: str, value: torch.Tensor, relevance: torch.Tensor | None, names: NamesOfEntries | None = None
) -> dict[str, Any]:
    """An input by its entries of the largest relevance. Relevance of an embedding is summed over its features.

    Of one that reads some of the entries, only the total is known.
    """
    data: dict[str, Any] = {"name": path, "shape": list(value.shape), "total": None, "entries": []}
    if relevance is None:
        return data
    summed = relevance.double()
    data["total"] = figure(float(summed.sum()))
    if summed.shape != value.shape:
        summed = summed.flatten(value.ndim).sum(-1) if summed.shape[: value.ndim] == value.shape else summed.sum(-1)
    if summed.numel() != value.numel():
        return data
    flat = summed.flatten()
    order = torch.argsort(flat.nan_to_num().abs(), descending=True, stable=True)[:_SHOWN]
    for index in order.tolist():
        place = [int(one) for one in np.unravel_index(index, tuple(value.shape))] if value.ndim else []
        shown = place if names is None else names(place)
        data["entries"].append([shown, figure(float(value.flatten()[index])), figure(float(flat[index]))])
    return data


def _name_of_target(target: Target, output: torch.Tensor) -> dict[str, Any]:
    """What is known of a target of `lrpfx.attribute`."""
    name, score = str(target), None
    is_one = isinstance(output, torch.Tensor) and output.ndim == 2 and len(output) == 1
    if isinstance(target, Classes) and target.indices.numel() == 1:
        target = Class(int(target.indices))
    if isinstance(target, Largest) and isinstance(output, torch.Tensor) and output.ndim:
        best = output.argmax(-1).flatten().tolist()
        name = f"class {best[0]}, the largest" if len(best) == 1 else name
        score = figure(float(output.max())) if len(best) == 1 else None
    elif isinstance(target, Class) and is_one:
        score = figure(float(output[0, int(target.index)]))
    return {"name": name, "score": score, "probability": None}

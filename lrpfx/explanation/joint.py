"""Explanations of models with several inputs: photographs, texts and numbers of one sample in, the share of each out."""

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from PIL import Image
from torch import nn
from typing_extensions import Unpack

from lrpfx import text as pictures_of_text
from lrpfx.attribution.compute import attribute
from lrpfx.attribution.ledger import Ledger
from lrpfx.errors import InputError, InputTypeError, printable
from lrpfx.explanation.answers import Answer, Array, Balance, percent
from lrpfx.explanation.arrays import numbered_features, numbers_of_frame
from lrpfx.explanation.compiled import (
    Compiled,
    CompiledModel,
    Origin,
    Run,
    answers_of,
    checked_output,
    keep_origin,
    shown_outputs,
)
from lrpfx.explanation.doors import is_file_name
from lrpfx.explanation.explanation import Explained, Explanation, SeveralPictures
from lrpfx.explanation.saving import save_figures_or_picture
from lrpfx.explanation.sentences import TextExplanation
from lrpfx.explanation.series import SeriesExplanation
from lrpfx.explanation.tables import CONSTANTS, WITHIN, TableExplanation, sheet_of_charts
from lrpfx.explanation.texts import OF_TEXT, Encoding, ReadText, check_fits, read, readable
from lrpfx.explanation.volumes import VolumeExplanation
from lrpfx.images.geometry import Geometry
from lrpfx.images.opening import OpenedImage, as_seen, images_of_inputs, opened_images
from lrpfx.images.preprocessing import Preprocessing
from lrpfx.pictures import charts
from lrpfx.pictures.style import Style, StyleSettings, styled
from lrpfx.request.layouts import channel_dimension
from lrpfx.request.targets import Target
from lrpfx.request.targets_of_samples import TargetsOfSamples, resolved
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.support.graph_data import is_graph
from lrpfx.support.html import element, image_html
from lrpfx.support.modules import uncompiled
from lrpfx.support.optional_packages import is_frame, progress_bar
from lrpfx.support.tensors import as_array, is_floating, not_dense, on_device_of
from lrpfx.text.scores import chosen_embeddings

_TOPIC = "several-inputs"
#: The argument of models of Hugging Face that images are.
_IMAGES = "pixel_values"
#: Kinds of parameters that have names.
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, eq=False)
class AnswerOfInputs(Answer):
    """The relevance of each input for one class, (inputs,). `maps`: that of the entries of each input, without the batch."""

    maps: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class AnswerOfInput(Answer):
    """The relevance of one input among several. `others`: the total relevance of the other inputs."""

    others: float = 0.0

    @property
    def balance(self) -> Balance:
        """How much of the output's relevance reached this input, and the others."""
        return replace(super().balance, others=self.others)


@dataclass(frozen=True, eq=False, repr=False)
class JointExplanation(Explained):
    """Why a model that takes several inputs gave a sample its class: each input in its own form, and its share.

    It is plain data. `Explanation` describes `name`, `output`, `categories`, `rules` and `scores`.

    `answers`: for each explained class, the relevance of each input, (inputs,). `names`: of these inputs. Inputs without
    relevance, such as masks, are left out. `parts`: the explanations of those inputs that are photographs, texts, rows of
    numbers, series or volumes.

    Examples
    --------
    >>> class Sum(torch.nn.Module):
    ...     def forward(self, first, second):
    ...         return first.flatten(1).sum(1, keepdim=True) + 2 * second.flatten(1).sum(1, keepdim=True)
    >>> explanation = lrpfx.explain(Sum().eval(), (torch.ones(1, 3, 4, 4), torch.ones(1, 3, 4, 4)))
    >>> explanation.shares
    {'first': 48.0, 'second': 96.0}
    """

    answers: tuple[AnswerOfInputs, ...]
    names: tuple[str, ...]
    parts: Mapping[str, Explained]

    def __getitem__(self, name: str) -> Explained:
        """The explanation of one input. Raises `InputError` for one that has no form of its own."""
        if name not in self.parts:
            known = f"there are {', '.join(self.parts)}" if self.parts else "there is none"
            raise InputError(f"no explanation of an input {name!r}: {known}; `maps` has relevance of all", topic=_TOPIC)
        return self.parts[name]

    @property
    def maps(self) -> dict[str, Array]:
        """Relevance of each entry of each input for the first class, without the batch; of words, that of their vectors."""
        return self.answers[0].maps

    @property
    def relevance(self) -> Array:
        """Relevance of each input, (inputs,)."""
        return self.answers[0].input_relevance

    @property
    def shares(self) -> dict[str, float]:
        """The relevance of each input. With `balance.constants`, they sum to the output."""
        return dict(zip(self.names, map(float, self.relevance), strict=True))

    def waterfall(self, style: Style | None = None, **settings: Unpack[StyleSettings]) -> Image.Image:
        """Bars from zero to the output: one of each input, and one of biases and other constants.

        `style`: how it is drawn. `settings`: fields of `lrpfx.pictures.Style`, which replace those of `style`.
        """
        steps = [*self.shares.items(), (CONSTANTS, self.balance.constants)]
        return charts.waterfall(steps, f"output for {self._shown(self.target.name)}", styled(style, settings))

    def sheet(self, style: Style | None = None, **settings: Unpack[StyleSettings]) -> Image.Image:
        """Each input in its own form with its share, and all shares as bars. Each map has its own scale.

        `style`, `settings`: as for `Explanation.sheet`.
        """
        style = styled(style, settings)
        title = f"{printable(self.name)}: relevance for {self._shown(str(self.target))}"
        drawn = [(self._titled(name), _picture(one, style)) for name, one in self.parts.items()]
        shares = ("shares of the output", self.waterfall(replace(style, width=WITHIN.width)))
        return sheet_of_charts([(title, _line()), *drawn, shares], caption=self.rules, legend=self._legend, style=style)

    def layers(self, names: Sequence[str] | None = None) -> NoReturn:
        """Layers are drawn over one input: `explanation[name].layers()`. Raises `InputError`. `names`: of nodes."""
        raise InputError(
            f"layers of a model of several inputs are drawn over one of them: explanation[name].layers(), where name is one "
            f"of {', '.join(self.parts) or 'no input here'}",
            topic=_TOPIC,
        )

    def _titled(self, name: str) -> str:
        share, output = self.shares[name], self.balance.output
        return f"{name}: {share:.3g}" + (f", {percent(share / output)} of the output" if output else "")

    def save(self, path: str | Path) -> Path:
        """Write the sheet as a picture, or the figures as .npz: `relevance.NAME` of the entries of each input, and the output.

        `path`: the file. Its ending names the form. In .npz, relevance for several targets is on a first axis, and `targets`
        has their names. Returns the path.
        """

        def arrays(answer: Any) -> dict[str, Array]:
            return {f"relevance.{name}": one for name, one in answer.maps.items()}

        return save_figures_or_picture(self, path, lambda: self._figures(arrays))

    def _repr_html_(self) -> str:
        return image_html(self.sheet(), repr(self)) + element("p", str(self.balance))


class JointExplanations(SeveralPictures[JointExplanation]):
    """Explanations of several samples, in their order.

    `items`: the explanations. `problems`: none.
    """

    def sheet(self) -> Image.Image:
        """The sheets of all samples, one above the other."""
        return charts.stacked([("", one.sheet()) for one in self._some()], WITHIN)

    def _names_of_files(self) -> Sequence[str]:
        return self._numbered("sample_{}.png")


def _picture(part: Explained, style: Style) -> Image.Image:
    """An input as a sheet shows it."""
    if isinstance(part, TextExplanation):
        return part.picture.to_image(width=WITHIN.width)
    if isinstance(part, TableExplanation):
        return part.waterfall(style=replace(style, width=WITHIN.width))
    if isinstance(part, SeriesExplanation):
        return part.heatmap(style=replace(style, width=WITHIN.width))
    if isinstance(part, VolumeExplanation):
        return part.sheet(replace(style, width=WITHIN.width))
    assert isinstance(part, Explanation)
    (_, photograph), *_, (_, overlay) = part.row(style)
    size = round(photograph.width * _HEIGHT / photograph.height), _HEIGHT
    pair = Image.new("RGB", (2 * size[0] + _GAP, size[1]), "white")
    for place, one in enumerate((photograph, overlay)):
        pair.paste(one.resize(size, Image.Resampling.LANCZOS), (place * (size[0] + _GAP), 0))
    return pair


def _line() -> Image.Image:
    return Image.new("RGB", (WITHIN.width, 1), "white")


#: Pixels of photographs on a sheet, and between them.
_HEIGHT, _GAP = 260, 12


# --- what is given ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GivenInput:
    """One argument of one sample: its value, a tensor with a batch of one or another constant, and what it is a form of.

    `names`: of the features of a row of a table, if they are known. `shown`: the user's name, if it is another one than that of
    the argument.
    """

    value: Any
    photograph: OpenedImage | None = None
    geometry: Geometry | None = None
    text: ReadText | None = None
    names: tuple[str, ...] | None = None
    shown: str | None = None


Sample = Mapping[str, GivenInput]


def are_of_several_inputs(given: Any, model: Any, has_tokenizer: bool) -> bool:
    """Whether a value holds several inputs of a model by name or in order, or is a list of such.

    A tuple does if the model needs several arguments; else it holds samples. A dict does if it holds more than one text.
    """
    each = given if isinstance(given, list) else [given]
    return bool(each) and all(_is_of_several_inputs(one, model, has_tokenizer) for one in each)


def _is_of_several_inputs(given: Any, model: Any, has_tokenizer: bool) -> bool:
    if isinstance(given, tuple):
        return len(given) > 1 and len(names_of_arguments(model)[1]) > 1
    if not isinstance(given, Mapping) or is_graph(given) or {"role", "messages"} & set(given):
        return False
    if not has_tokenizer or any(_is_no_text(one) for name, one in given.items() if name != "labels"):
        return True
    names = names_of_arguments(model)[0]
    return sum(isinstance(one, str) for one in given.values()) > 1 and names is not None and set(given) <= set(names)


def _is_no_text(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.ndim > 1 and (is_floating(value) or getattr(value.dtype, "kind", "") == "f" or value.ndim > 2)
    return _is_photograph(value)


def _is_photograph(value: Any) -> bool:
    is_bytes = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3)
    return isinstance(value, (Image.Image, os.PathLike)) or hasattr(value, "read") or is_bytes


def are_of_images(inputs: Mapping[str, Any]) -> bool:
    """Whether images, volumes or videos are among the inputs of a model: numbers with four axes or more."""
    return any(isinstance(one, torch.Tensor) and is_floating(one) and one.ndim >= 4 for one in inputs.values())


def are_of_texts(inputs: Mapping[str, Any]) -> bool:
    """Whether tokens are among the inputs of a model, by their name."""
    return OF_TEXT[0] in inputs


def names_of_arguments(model: Any) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """The names of all arguments, None for any, and of those that a tuple has, in order: of texts, their ids alone."""
    inner = uncompiled(model)
    if isinstance(inner, ExplainModule):
        names = inner.argument_names
        return names, tuple(name for name in names if name not in OF_TEXT[1:])
    parameters = _parameters(inner)
    is_open = any(one.kind is one.VAR_KEYWORD for one in parameters)
    named = [one for one in parameters if one.kind in _NAMED]
    needed = [one.name for one in named if one.default is one.empty and one.name not in OF_TEXT[1:]]
    return None if is_open else tuple(one.name for one in named), tuple(needed)


def _parameters(model: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(model.forward).parameters.values()) if isinstance(model, nn.Module) else []


def _named_arguments(model: Any) -> tuple[str, ...]:
    """The arguments that a model names, also where it takes others."""
    known, _ = names_of_arguments(model)
    return tuple(one.name for one in _parameters(model) if one.kind in _NAMED) if known is None else known


def further_arguments(given: Any, model: Any) -> str:
    """What to write for a tuple where a model needs one argument and takes others, as the end of a message; "" for others."""
    names, needed = names_of_arguments(model)
    if not isinstance(given, tuple) or names is None or not len(needed) < 2 <= len(given) <= len(names):
        return ""
    shown = ", ".join(f'"{name}": ...' for name in names[: len(given)])
    return f". A tuple holds samples here; several inputs of one sample are a dict: {{{shown}}}"


@dataclass(frozen=True)
class SampleReader:
    """Reads what users give as several inputs of a model."""

    model: nn.Module
    preprocess: Preprocessing | None
    tokenizer: Any

    def samples(self, given: Any) -> list[Sample]:
        """The samples of a tuple or mapping. Raises `InputError`, `InputTypeError`."""
        names, ordered = names_of_arguments(self.model)
        if isinstance(given, tuple):
            if len(given) != len(ordered):
                raise InputError(
                    f"{len(given)} inputs were given, but the model takes {len(ordered)}: {', '.join(ordered)}", topic=_TOPIC
                )
            given = dict(zip(ordered, given, strict=True))
        for name, value in given.items():
            if isinstance(value, str) and self.tokenizer is not None and name not in OF_TEXT and is_file_name(value):
                raise InputTypeError(
                    f"the input {name!r} is the string {value!r}, and with a tokenizer strings are texts: give a photograph as "
                    "an image of Pillow or its pathlib.Path, and numbers as tensors",
                    topic=_TOPIC,
                )
        arguments = {name: self._argument(name, given) for name in given}
        unknown = [name for name, argument in arguments.items() if names is not None and argument not in names]
        if unknown:
            raise InputError(
                f"the forward of {type(self.model).__name__} takes {', '.join(names or ())}, not {unknown[0]!r}: inputs have "
                "the names of its arguments",
                topic=_TOPIC,
            )
        same = [name for name in given if list(arguments.values()).count(arguments[name]) > 1]
        if same:
            raise InputError(
                f"the inputs {' and '.join(map(repr, same))} would both be the argument {arguments[same[0]]} of "
                f"{type(self.model).__name__}: inputs have the names of its arguments",
                topic=_TOPIC,
            )
        columns: dict[str, list[GivenInput]] = {}
        for name, value in given.items():
            own = arguments[name]
            made = self._columns(own, value, arguments.values())
            if own != name:
                made[own] = [replace(one, shown=name) for one in made[own]]
            columns.update(made)
        sizes = {name: len(column) for name, column in columns.items() if isinstance(column[0].value, torch.Tensor)}
        if not sizes or len(set(sizes.values())) > 1:
            found = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "no tensors"
            raise InputError(
                f"the inputs of a sample belong together, but they have batches of other sizes: {found}. Tensors have a first "
                "dimension for samples, x[None] for one. The data of a graph are x and edge_index, which the forward of the "
                "model names so",
                topic=_TOPIC,
            )
        (count,) = set(sizes.values())
        each = {name: column if name in sizes else column * count for name, column in columns.items()}
        return [{name: column[place] for name, column in each.items()} for place in range(count)]

    def _argument(self, name: str, given: Mapping[str, Any]) -> str:
        """The argument that an input is: that of its name, or else, of models of Hugging Face, that of images or of texts."""
        named = _named_arguments(self.model)
        value = given[name]
        is_array = isinstance(value, (torch.Tensor, np.ndarray))
        is_image = _is_photograph(value) or (is_array and value.ndim == 4)
        is_text = isinstance(value, str) and self.tokenizer is not None
        argument = _IMAGES if is_image else OF_TEXT[0] if is_text else name
        return argument if name not in named and argument in named and argument not in given else name

    def _columns(self, name: str, value: Any, given: Collection[str]) -> dict[str, list[GivenInput]]:
        """The arguments that an input becomes, each with one entry for each sample. `given`: the arguments that there are."""
        if isinstance(value, str) and self.tokenizer is not None:
            text = read(self.tokenizer, value)
            check_fits(self.model, self.tokenizer, text)
            parts = readable(self.model, text.encoding) if name == OF_TEXT[0] else {name: text.encoding[OF_TEXT[0]]}
            further = {one: [GivenInput(part)] for one, part in parts.items() if one not in given}
            return {name: [GivenInput(text.encoding[OF_TEXT[0]], text=text)], **further}
        if isinstance(value, str) or _is_photograph(value):
            if self.preprocess is None:
                raise InputTypeError(
                    f"the input {name!r} is a {type(value).__name__}: pass preprocess=, the function from a photograph to the "
                    "model's input, or tokenizer= for texts",
                    topic=_TOPIC,
                )
            (photograph,) = opened_images(value)
            tensor, geometry = self.preprocess.prepared(photograph.image)
            if geometry is None:  # pictures show what the model saw
                photograph = as_seen(photograph, tensor)
            return {name: [GivenInput(tensor[None], photograph, geometry)]}
        if is_frame(value):
            names, numbers = tuple(map(str, value.columns)), torch.from_numpy(numbers_of_frame(value))
            return {name: [GivenInput(row, names=names) for row in numbers.split(1)]}
        is_list = isinstance(value, (list, tuple)) and bool(value)
        if is_list and (isinstance(value[0], str) or _is_photograph(value[0])):
            raise InputTypeError(
                f"the input {name!r} is a {type(value).__name__} of {type(value[0]).__name__}: several samples are a list "
                "with a dict for each",
                topic=_TOPIC,
            )
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if isinstance(value, Mapping) and any(isinstance(one, torch.Tensor) for one in value.values()):
            raise InputTypeError(
                f"the input {name!r} holds several tensors, as those of graphs with nodes of several types: lrpfx.attribute "
                "takes such inputs, and lrpfx.transform as example_inputs=",
                topic=_TOPIC,
            )
        if not isinstance(value, torch.Tensor):
            return {name: [GivenInput(value)]}
        if not_dense(value) is not None:
            raise InputTypeError(
                f"the input {name!r} is {not_dense(value)}: give it as a dense tensor, such as {name}.to_dense()", topic=_TOPIC
            )
        if value.ndim < 2 and is_floating(value):
            raise InputError(
                f"the input {name!r} has shape {tuple(value.shape)}: tensors are as the model takes them, with a first "
                "dimension for samples",
                topic=_TOPIC,
            )
        if self.tokenizer is not None and value.ndim == 2 and name not in OF_TEXT[1:] and not is_floating(value):
            texts = [read(self.tokenizer, Encoding({OF_TEXT[0]: row})) for row in value.long().split(1)]
            for text in texts:
                check_fits(self.model, self.tokenizer, text)
            return {name: [GivenInput(row, text=text) for row, text in zip(value.split(1), texts, strict=True)]}
        if value.ndim == 4 and is_floating(value):
            shown = images_of_inputs(value)
            return {name: [GivenInput(row, one) for row, one in zip(value.split(1), shown, strict=True)]}
        return {name: [GivenInput(row) for row in value.split(1)]}


# --- what is explained --------------------------------------------------------------------------------------------------------


def explain_joint(
    compiled_for: Callable[[dict[str, Any]], CompiledModel],
    reader: SampleReader,
    given: Any,
    wanted_for: Callable[[int], TargetsOfSamples],
    names: Sequence[str] | None,
    join: bool = True,
    progress: bool = False,
) -> JointExplanation | JointExplanations:
    """The explanation of one sample, or of several.

    `compiled_for`: the compiled model for the model's inputs. `wanted_for`: the targets of so many samples. `names`: of the
    features of inputs that are rows of numbers.
    """
    parts = given if isinstance(given, list) else [given]
    samples = [sample for one in parts for sample in reader.samples(one)]
    wanted = wanted_for(len(samples))
    found = []
    for place, sample in enumerate(progress_bar(samples, progress, "explaining", "sample", len(samples))):
        inputs = placed_on(reader.model, {name: one.value for name, one in sample.items()})
        try:
            joint = CompiledJoint(compiled_for(inputs), sample, reader.tokenizer, names, join)
            found.append(joint.explanation(f"sample {place + 1}", wanted.of_sample(place)))
        except InputError as error:
            lists = [name for name, one in inputs.items() if _holds_numbers(one)]
            if lists:
                raise InputTypeError(
                    f"{str(error).rstrip('.')}. The input {lists[0]!r} is a {type(inputs[lists[0]]).__name__} of numbers: "
                    "tensors are as the model takes them, torch.tensor(...) with a first dimension for samples; texts are "
                    "strings",
                    topic=_TOPIC,
                ) from error
            if not place and any(map(_may_be_graph, parts)):
                raise InputError(
                    f"{str(error).rstrip('.')}. A matrix of as many rows and columns as another input has rows may be that of "
                    "the edges of a graph, whose rows are no samples: a model of (batch, nodes, features) takes both with a "
                    "batch in front, x[None] and adj[None], and lrpfx.attribute takes what any other one does",
                    topic=error.topic,
                ) from error
            raise
    return found[0] if not isinstance(given, list) and len(found) == 1 else JointExplanations(found)


def _holds_numbers(value: Any) -> bool:
    """Whether a value is a list or tuple with numbers in it, or in lists in it."""
    is_list = isinstance(value, (list, tuple))
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return is_list and isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _may_be_graph(given: Any) -> bool:
    """Whether one of the inputs is a square matrix, and another one has as many rows."""
    values = given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple) else ()
    shapes = [tuple(np.shape(one)) for one in values if isinstance(one, (torch.Tensor, np.ndarray))]
    squares = [one for one in shapes if len(one) == 2 and one[0] == one[1]]
    return any(other[:1] == one[:1] for one in squares for other in shapes if other is not one)


def placed_on(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors among inputs on the device of a module, in its dtype."""
    return {name: on_device_of(module, one, True) if isinstance(one, torch.Tensor) else one for name, one in inputs.items()}


class CompiledJoint(Compiled):
    """A compiled model for one sample of several inputs; `part` names the input whose answers `run` returns."""

    def __init__(
        self,
        compiled: CompiledModel,
        sample: Sample,
        tokenizer: Any,
        names: Sequence[str] | None,
        join: bool,
        part: str | None = None,
    ) -> None:
        self.compiled, self.sample, self.part = compiled, sample, part
        self.tokenizer, self.names, self.join = tokenizer, names, join
        self.categories, self.record = compiled.categories, compiled.record

    @property
    def explain_model(self) -> ExplainModule:
        """The explainable module."""
        return self.compiled.explain_model

    @property
    def output(self) -> Any:
        """The choice of the explained output."""
        return self.compiled.output

    def _of_part(self, name: str) -> "CompiledJoint":
        return CompiledJoint(self.compiled, self.sample, self.tokenizer, self.names, self.join, name)

    def placed(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs on the device of the model, in its dtype."""
        return placed_on(self.compiled.module, inputs)

    def run(self, inputs: Any, targets: Sequence[Sequence[Target]], record: Sequence[str] = ()) -> Run:
        run, of_inputs = self._run(inputs, targets, record)
        if self.part is None:
            return run
        return replace(run, answers=[self._answers_of(self.part, run, of_inputs)])

    def ledger(self, inputs: Any, target: Target) -> Ledger:
        return self.compiled.ledger(self.placed(inputs), target)

    def spatial_layers(self, axes: int = 2) -> list[str]:
        return self.compiled.spatial_layers(axes)

    def axis_of_channels(self, name: str, dimensions: int) -> int:
        return self.compiled.axis_of_channels(name, dimensions)

    def _run(
        self, inputs: Any, targets: Sequence[Sequence[Target]], record: Sequence[str] = ()
    ) -> tuple[Run, dict[str, Array]]:
        """The answers with the relevance of each input, and that of the entries of each input, (targets, ...)."""
        (asked,) = targets
        resolved_targets = [resolved(one, self.categories) for one in asked]
        module, output = self.compiled.module, self.compiled.output
        options: dict[str, Any] = {"output": output, "record": (*self.record, *record), "reference": self.compiled.reference}
        found = attribute(module, self.placed(inputs), targets=resolved_targets, **options)
        result = as_array(found.output)
        columns = [[one] for one in resolved_targets]
        outputs = checked_output(result[:, None] if result.ndim == 1 else result, columns)
        if len(outputs) != 1:
            raise InputError(
                f"the explained output has shape {result.shape} for one sample: choose one with output=, (1, classes)",
                topic=_TOPIC,
            )
        relevance = {name: _of_input(one) for name, one in found.relevance.items()}
        of_inputs = {name: one[:, 0] for name, one in relevance.items() if one is not None}
        sums = np.stack([one.reshape(len(one), -1).sum(1, dtype=np.float64) for one in of_inputs.values()], 1)
        layers = {name: as_array(one) for name, one in found.layers.items()}
        rows = [
            {"relevance": sums[place][None], **{name: one[place] for name, one in layers.items()}}
            for place in range(len(resolved_targets))
        ]
        other = found.reference_output
        references = None if other is None else as_array(other).reshape(outputs.shape)
        answers, again = answers_of(outputs, columns, rows, self.categories, self.compiled.scores, references)
        answers = [tuple(replace(one, input_relevance=one.input_relevance[0]) for one in some) for some in answers]
        if result.ndim == 1:  # there are no classes to ask for
            again = [tuple(resolved_targets)]
        shown = shown_outputs(outputs, columns)
        return Run(shown, answers, again, self.explain_model.composite, self.compiled.scores), of_inputs

    def _answers_of(self, name: str, run: Run, of_inputs: Mapping[str, Array]) -> tuple[Answer, ...]:
        """The answers of one input."""
        place = list(of_inputs).index(name)
        return tuple(
            AnswerOfInput(
                one.category,
                relevance,
                one.layers,
                one.region,
                one.difference,
                others=float(one.input_relevance.sum() - one.input_relevance[place]),
            )
            for one, relevance in zip(run.answers[0], of_inputs[name], strict=True)
        )

    def explanation(self, name: str, targets: tuple[Target, ...]) -> JointExplanation:
        """The explanation of the sample for targets."""
        inputs = {one: given.value for one, given in self.sample.items()}
        run, of_inputs = self._run(inputs, [targets])
        found_parts = {one: self._part(one, run, of_inputs) for one in of_inputs}
        kept = {one: part for one, part in found_parts.items() if part is not None}
        output = run.outputs[0]
        for one, part in kept.items():
            keep_origin(part, Origin(self._of_part(one), inputs, run.targets[0], output))
        shown = {one: self._shown(one) for one in of_inputs}
        parts = {shown[one]: part for one, part in kept.items()}
        answers = tuple(
            AnswerOfInputs(
                one.category,
                one.input_relevance,
                one.layers,
                one.region,
                one.difference,
                maps={shown[name]: value[place] for name, value in of_inputs.items()},
            )
            for place, one in enumerate(run.answers[0])
        )
        facts = (output, self.categories, answers, run.rules, run.scores)
        found = JointExplanation(name, *facts, tuple(shown.values()), parts)
        keep_origin(found, Origin(self, inputs, run.targets[0], output))
        return found

    def _shown(self, name: str) -> str:
        """The name of an input: the user's."""
        return self.sample[name].shown or name

    def _part(self, name: str, run: Run, of_inputs: Mapping[str, Array]) -> Explained | None:
        """The explanation of one input in its own form; None if it has none."""
        given, answers = self.sample[name], self._answers_of(name, run, of_inputs)
        facts = (run.outputs[0], self.categories, answers, run.rules, run.scores)
        value = given.value.detach().cpu()
        if given.photograph is not None:
            title = self._shown(name) if given.photograph.name.startswith("image ") else given.photograph.name
            return Explanation(title, *facts, given.photograph.image, given.geometry, value[0])
        if given.text is not None:
            scores = np.stack([one.input_relevance.sum(-1) for one in answers])
            titles = [str(one.category) for one in answers]
            drawn = pictures_of_text.heatmap(scores, given.text.encoding, self.tokenizer, targets=titles, join=self.join)
            return TextExplanation(given.text.title(self.tokenizer), *facts, as_array(value[0]), drawn)
        if value.ndim == 2 and is_floating(value):
            return TableExplanation(
                self._shown(name), *facts, given.names or self._features(value.shape[1]), as_array(value[0])
            )
        if value.ndim == 3 and is_floating(value):
            (node,) = (one for one in self.explain_model.unfused_graph.find_nodes(op="placeholder") if str(one.target) == name)
            series = as_array(value[0])
            if channel_dimension(node, 3) == 1:
                series = series.T
                of_steps = tuple(replace(one, input_relevance=one.input_relevance.T) for one in answers)
                facts = (*facts[:2], of_steps, *facts[3:])
            return SeriesExplanation(
                self._shown(name), *facts, self._features(series.shape[1]), tuple(range(len(series))), series
            )
        if value.ndim == 5 and is_floating(value):
            return VolumeExplanation(self._shown(name), *facts, as_array(value[0]))
        return None

    def _features(self, count: int) -> tuple[str, ...]:
        """The names of so many features: those that are given, if they are as many."""
        fitting = self.names if self.names is not None and len(self.names) == count else None
        return numbered_features(count) if fitting is None else tuple(fitting)


def _of_input(relevance: Any) -> Array | None:
    """Relevance of the entries of an input, (targets, batch, ...); of tokens, that of the vectors that tell which they are."""
    if isinstance(relevance, Mapping):
        relevance, _ = chosen_embeddings(dict(relevance), None)
    return as_array(relevance) if isinstance(relevance, torch.Tensor) else None

"""References: the samples that show what a channel stands for, cropped to what its unit sees, and their sheets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import default_collate

from lrpfx.attribution.computation import Computation
from lrpfx.concepts.collection import Collection, Layer, Ranked
from lrpfx.concepts.collector import scores_of
from lrpfx.concepts.receptive_fields import ReceptiveFields, receptive_fields
from lrpfx.errors import InputError, InputTypeError
from lrpfx.ir.node import node_info
from lrpfx.pictures import sheet
from lrpfx.pictures.contours import enclosing_level
from lrpfx.pictures.maps import relevance_map, smoothed
from lrpfx.pictures.pixels import as_image
from lrpfx.request.channels import KINDS
from lrpfx.request.conditions import Condition
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.question import Question
from lrpfx.request.targets import TargetLike
from lrpfx.request.targets_of_samples import as_target_of_samples
from lrpfx.runtime.explain_module import ExplainModule, explainable
from lrpfx.runtime.fingerprints import fingerprint_of_module
from lrpfx.samples.items import is_indexed, parts_of
from lrpfx.samples.preparation import Preparation
from lrpfx.support.graph_data import are_of_graph
from lrpfx.support.html import Html, image_html
from lrpfx.support.table import Rows
from lrpfx.support.torch_internals import pytree

#: The share of the relevance that `Reference.masked` leaves as it is.
SHOWN = 0.8
_FADED = 0.18  # what is left of the other pixels, on grey
_GREY = 0.5
_SAME = 1e-3  # by which the score of a sample may differ from the one that it was ranked by, relative to it ...
_ROUNDING = 1e-5  # ... and relative to the largest of the sample


@dataclass(frozen=True, eq=False)
class Reference:
    """A sample that shows what a channel stands for.

    `sample`: its number in the dataset. `score`: what it is ranked by. `position`: where in the channel the entry is largest,
    as for `Ranked`. `label`: of the sample, if the dataset has labels. `input`: as the dataset gives it. `relevance`: what
    passes through this channel alone; in the structure of the input, with the relevance of embeddings for integers. `field`:
    what the unit with the largest entry sees, a slice for each dimension of the input, so that
    `reference.input[reference.field]` is that part. `picture`: the input as an image, if it is one.
    """

    sample: int
    score: float
    position: tuple[int, ...]
    label: int | None
    input: Any
    relevance: Any
    field: Any
    picture: Image.Image | None

    @property
    def cropped(self) -> Image.Image:
        """The part of the picture that the unit with the largest entry sees.

        Errors: `InputError`: the sample is not an image.
        """
        return self._seen(self._image())

    @property
    def masked(self) -> Image.Image:
        """The same, faded where less relevance is: the pixels with most of it, which hold 80 %, are as they were."""
        picture = self._image()
        values = np.abs(smoothed(relevance_map(self.relevance, channels="first")))
        pixels = np.asarray(picture, dtype=np.float64) / 255
        level = enclosing_level(values, SHOWN) if values.any() else 1.0
        shown = (2 * values / level - 1).clip(0, 1)[:, :, None]  # faint already at half of the level
        mixed = pixels * shown + (_GREY + _FADED * (pixels - _GREY)) * (1 - shown)
        return self._seen(Image.fromarray((mixed * 255).round().astype(np.uint8)))

    def _image(self) -> Image.Image:
        if self.picture is None:
            raise InputError(
                "the samples are not images, which are tensors of shape (1 or 3 channels, height, width)", topic="collections"
            )
        return self.picture

    def _seen(self, picture: Image.Image) -> Image.Image:
        rows, columns = self.field[1:]
        if rows.start == rows.stop or columns.start == columns.stop:
            return picture
        return picture.crop((columns.start, rows.start, columns.stop, rows.stop))

    def _repr_html_(self) -> Html | None:
        """The masked picture, for notebooks."""
        return None if self.picture is None else image_html(self.masked, f"sample {self.sample}, {self.score:.3g}", 160)


class References(Rows[Reference]):
    """The samples that show what one channel stands for, those with the largest scores first.

    `layer`: the name of the layer. `channel`: the index of the channel. `references`: the samples.
    """

    def __init__(self, layer: str, channel: int, references: Sequence[Reference]) -> None:
        super().__init__(references)
        self.layer = layer
        self.channel = channel
        self.references = self.rows

    def __repr__(self) -> str:
        return f"<references of {self.layer}, {self.channel}: samples {', '.join(str(one.sample) for one in self)}>"


def reference(
    explain_model: nn.Module,
    dataset: Any,
    collection: Collection,
    layer: str,
    channel: int,
    *,
    by: str = "relevance",
    reduction: str = "sum",
    predicted: int | None = None,
    true: int | None = None,
    count: int = 8,
    target: TargetLike = None,
    output: OutputSelector = None,
    gates: bool = True,
) -> References:
    """The samples with the largest scores for one channel, with what the channel saw in them; none with a score of 0.

    For samples ranked by relevance, their relevance is that of the target through this channel; for samples ranked by
    activation, that of the channel's own activation.

    `explain_model`: that of which `lrpfx.concepts.collect` made the collection. `dataset`: the dataset, likewise. `collection`:
    the collection. `layer`: the name of the layer. `channel`: the index of the channel. `by`, `reduction`, `predicted`, `true`,
    `count`: see `Collection.top`. `target`: as for `collect`; by default the target that the collection was made for, if that
    was not a function. `output`: as for `collect`. `gates`: see `receptive_fields`. Errors: `InputError`: the model is another
    one, or samples do not have the scores that they were ranked by, as those of another dataset or of random preprocessing.
    """
    return _ReferenceFinder(explain_model, dataset, collection, target, output, gates).references(
        layer, channel, by=by, reduction=reduction, predicted=predicted, true=true, count=count
    )


def gallery(
    explain_model: nn.Module,
    dataset: Any,
    collection: Collection,
    layer: str,
    channels: Sequence[int],
    *,
    by: str = "relevance",
    reduction: str = "sum",
    predicted: int | None = None,
    true: int | None = None,
    count: int = 8,
    target: TargetLike = None,
    output: OutputSelector = None,
    gates: bool = True,
    cropped: bool = True,
    masked: bool = True,
    **settings: Any,
) -> Image.Image:
    """A sheet with a row for each channel: its references, cropped to what its unit sees and masked by their relevance.

    `channels`: such as `relevances(attribution, layer).indices[:5]`. `cropped`: whether to show only what the unit sees.
    `masked`: whether to darken what has no relevance. `settings`: those of `lrpfx.pictures.sheet`.
    Other arguments: as for `reference`. Errors: `InputError`: the samples are not images, or as for `reference`;
    `InputTypeError`: the channels are not a list.
    """
    finder = _ReferenceFinder(explain_model, dataset, collection, target, output, gates)
    if not isinstance(channels, Sequence):
        raise InputTypeError(f"a gallery has a row for each of several channels, not {channels!r}", topic="collections")
    rows = []
    for channel in channels:
        found = finder.references(layer, channel, by=by, reduction=reduction, predicted=predicted, true=true, count=count)
        whole = found if cropped else [replace(one, field=(slice(0, 0),) * 3) for one in found]
        drawn = [one.masked if masked else one.cropped for one in whole]
        titles = [f"channel {found.channel}\n" * (not place) + f"{one.score:.3g}" for place, one in enumerate(found)]
        rows.append(list(zip(titles, drawn, strict=True)))
    if not any(rows):
        raise InputError("there are no references to draw", topic="collections")
    empty = [str(channel) for channel, row in zip(channels, rows, strict=True) if not row]
    note = f"without any {by}: {', '.join(empty)}" if empty else None
    named = {"title": f"{layer}: largest {by} ({reduction})", "caption": note}
    return sheet([row for row in rows if row], **{**named, **settings})


class _ReferenceFinder:
    """What references are made of: the model, the dataset and the collection that was made of them."""

    def __init__(
        self,
        explain_model: nn.Module,
        dataset: Any,
        collection: Collection,
        target: TargetLike,
        output: OutputSelector,
        gates: bool,
    ) -> None:
        if not isinstance(collection, Collection):
            raise InputTypeError(
                f"references are those of a collection, not of a {type(collection).__name__}", topic="collections"
            )
        self.module = explainable(explain_model, "reference")  # not compiled, since relevance may start anywhere there
        if are_of_graph(self.module.argument_names):
            raise InputError(
                "references are cut from images and series, not from graphs: collection.top names the graph and the node of "
                "each, whose relevance lrpfx.Explainer(model, record=layer)(graph) gives",
                topic="collections",
            )
        self.collection = collection
        self.output = output
        self.gates = gates
        self._fields: dict[tuple[Any, ...], ReceptiveFields] = {}
        if not is_indexed(dataset):
            raise InputTypeError(
                f"references need a dataset with indices, which {type(dataset).__name__} does not have", topic="collections"
            )
        self.dataset = dataset
        self.preparation = Preparation(self.module.argument_names)
        if fingerprint_of_module(self.module) != collection.facts.model:
            raise InputError(
                "the collection was made of another model, of other weights or of other rules", topic="collections"
            )
        given = collection.facts.target_of_samples if target is None else target
        if given is None:
            raise InputError(
                f"the relevance is that of a function, {collection.facts.target}: pass it as target=", topic="collections"
            )
        self.target = as_target_of_samples(given, None)

    def references(self, layer: str, channel: int, **settings: Any) -> References:
        described = self.collection.checked(layer, channel)
        ranked = [one for one in self.collection.top(layer, channel, **settings) if one.score]
        channel = int(channel) % described.channels
        found = (self._reference(layer, described, channel, one, settings["by"], settings["reduction"]) for one in ranked)
        return References(layer, channel, tuple(found))

    def _reference(self, name: str, layer: Layer, channel: int, ranked: Ranked, by: str, reduction: str) -> Reference:
        if ranked.sample >= len(self.dataset):
            raise InputError(
                f"the dataset has {len(self.dataset)} samples, but the collection has sample {ranked.sample}",
                topic="collections",
            )
        sample, label = parts_of(self.dataset[ranked.sample])
        inputs = default_collate([self.preparation.prepared(sample)])
        kind = KINDS[layer.kind]
        if by == "activation":
            found = Computation(self.module, inputs, Question(kind(channel), start=name))
            values, relevance = found.output, found.of_inputs
        else:
            target = self.target.of_labels([label])
            conditions: list[Condition] = [{name: kind(channel)}, {name: torch.ones(1)}]
            found = Computation(self.module, inputs, Question(target, conditions=conditions, record=name, output=self.output))
            values = found.layers[name][1]
            relevance = pytree.tree_map(lambda one: one[0], found.of_inputs)
        self._check(name, layer, channel, ranked, by, reduction, values)
        entry = list(ranked.position)
        entry.insert(kind.dimension % (layer.dimensions + 2) - 1, channel)
        return Reference(
            ranked.sample,
            ranked.score,
            ranked.position,
            label,
            sample,
            pytree.tree_map(lambda one: one[0] if isinstance(one, torch.Tensor) else one, relevance),
            self._fields_of(name, inputs)[tuple(entry)],
            _picture_of(sample, self.module),
        )

    def _fields_of(self, name: str, inputs: Any) -> ReceptiveFields:
        """The receptive fields of a layer, which depend on the shapes of the inputs alone."""
        key = (name, *(tuple(leaf.shape) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)))
        if key not in self._fields:
            self._fields[key] = receptive_fields(self.module, inputs, name, gates=self.gates)
        return self._fields[key]

    def _check(
        self, name: str, layer: Layer, channel: int, ranked: Ranked, by: str, reduction: str, values: torch.Tensor
    ) -> None:
        """Raise `InputError` unless a sample has the score that it was ranked by."""
        normalized = by in self.collection.facts.normalized
        if values.ndim != layer.dimensions + 2 or values.shape[KINDS[layer.kind].dimension] != layer.channels:
            scores = np.full(layer.channels, np.nan)
        else:
            scores = scores_of(layer, values, normalized)[0][reduction][0]
        if not abs(scores[channel] - ranked.score) <= _SAME * abs(ranked.score) + _ROUNDING * np.abs(scores).max():
            found = f"{scores[channel]:.4g} for {name}, channel {channel}, but was ranked by {ranked.score:.4g}"
            cause = "it is of another dataset, of another target, or its preprocessing is random"
            raise InputError(f"sample {ranked.sample} has {found}: {cause}", topic="collections")


def _picture_of(sample: Any, module: ExplainModule) -> Image.Image | None:
    """A sample as an image, scaled from the range of the model's input, or of its own values; None if it is not one."""
    if isinstance(sample, Mapping | tuple | list) or not hasattr(sample, "shape"):
        return None
    values = torch.as_tensor(sample).detach().cpu().double()
    if values.ndim != 3 or len(values) not in (1, 3):
        return None
    (first, *_) = module.graph.find_nodes(op="placeholder")
    return as_image(values, node_info(first).value_range)

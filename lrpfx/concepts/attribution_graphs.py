"""Attribution graphs: a concept decomposed into those of the layers below it (Achtibat et al. 2023)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import fx, nn

from lrpfx.attribution.arguments import Inputs
from lrpfx.attribution.computation import Computation
from lrpfx.errors import InputError, InputTypeError
from lrpfx.ir.node import ancestors_of
from lrpfx.pictures import colors_of, heatmap, overlay
from lrpfx.pictures.colors import DEFAULT
from lrpfx.request.channels import Layers, by_channel, kind_of, named_layers
from lrpfx.request.conditions import Condition
from lrpfx.request.names import resolve_names
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.question import Question
from lrpfx.request.targets import TargetLike
from lrpfx.runtime.explain_module import explainable
from lrpfx.support.html import Html, image_html
from lrpfx.support.numbers import is_whole, whole_number
from lrpfx.support.torch_internals import pytree

Concept = tuple[str, int]  # layer, channel

#: The node above all concepts: what is explained.
TARGET: Concept = ("target", 0)

_SMALLEST, _LARGEST = 24, 150  # pixels of the side of a heatmap
_GREY, _INK, _SOFT = (210, 210, 210), (20, 20, 20), (95, 95, 95)


@dataclass(frozen=True, eq=False)
class AttributionGraph:
    """The concepts that carry the relevance of a target, layer by layer.

    `graph`: from `TARGET` downwards. A node (layer, channel) has the attributes `relevance`, what flows into it from the nodes
    above, `share`, its part of the sum of magnitudes over all channels of its layer, those that are not in the graph included,
    and `heatmap`, the relevance of the inputs that flows through it. An edge has the `relevance` that flows along it and its
    `share` of the sum of magnitudes over all channels below. `layers`: the names of the layers, the one nearest to the output
    first.
    """

    graph: "nx.DiGraph[Concept]"
    layers: tuple[str, ...]

    def concepts(self, layer: str) -> list[int]:
        """The channels of a layer that are in the graph, the largest magnitude of relevance first.

        `layer`: the name of the layer.
        """
        return [channel for name, channel in self.graph if name == layer]

    def picture(self, photograph: Any = None, *, width: int = 1200, cmap: Any = DEFAULT) -> Image.Image:
        """The graph as an image: a row for each layer, concepts with their heatmaps, edges in proportion to their shares.

        Without relevance of images, concepts are boxes. The colours of edges and frames are those of positive and negative
        relevance.

        `photograph`: what heatmaps are drawn over, see `lrpfx.pictures.overlay`. `width`: of the image, in pixels. `cmap`: the
        colours, as for `lrpfx.pictures.heatmap`.
        """
        width = whole_number(width, "width is a number of pixels", 300, "attribution-graphs")
        return _Drawing(self, photograph, width, cmap).image()

    def _repr_html_(self) -> Html:
        return image_html(self.picture(), f"concepts in {', '.join(self.layers)}")


def attribution_graph(
    explain_model: nn.Module,
    inputs: Inputs,
    target: TargetLike = None,
    *,
    layers: Layers,
    channels: Sequence[int] | None = None,
    width: int | Sequence[int] = 4,
    output: OutputSelector = None,
) -> AttributionGraph:
    """Which concepts carry the relevance of a target, and of which concepts below they are made.

    Relevance flows from layer to layer through the concepts of the graph alone, so what flows into a concept is the sum of its
    edges. It takes one forward pass for each layer and one backward pass for each concept.

    `inputs`: one sample, as a batch of one. `layers`: names as for `record=`, in any order; they are decomposed from the one
    nearest to the output downwards. `channels`: those to begin with in the first; by default those with the largest magnitude
    of relevance. `width`: how many are kept of each layer, or how many of each of them, from the output downwards.
    Other arguments: as for `lrpfx.attribute`. Errors: `InputError`: the batch has several samples, layers do not lie on one
    way, or a channel is out of range. The errors of `lrpfx.attribute` are raised too.
    """
    module = explainable(explain_model, "attribution_graph")
    named = named_layers(module, layers)
    names = _downwards(module.unfused_graph, list(named))
    given = list(width) if isinstance(width, Sequence) else [width] * len(names)
    if len(given) != len(names):
        raise InputError(f"there are {len(given)} widths for {len(names)} layers", topic="attribution-graphs")
    widths = [whole_number(one, "width is a number of concepts", 1, "attribution-graphs") for one in given]
    graph: nx.DiGraph[Concept] = nx.DiGraph()
    conditions: list[Condition] | None = None  # one for each parent
    parents, above = [TARGET], dict[Any, Any]()
    for place, name in enumerate([*names, None]):
        question = Question(target, conditions=conditions, record=() if name is None else name, output=output)
        found = Computation(explain_model, inputs, question)
        if len(found.output) != 1:
            raise InputError(
                f"an attribution graph is that of one sample, but the batch is {len(found.output)}", topic="attribution-graphs"
            )
        of_inputs = found.of_inputs if conditions else pytree.tree_map(lambda one: one[None], found.of_inputs)
        if place == 0:
            graph.add_node(TARGET, relevance=float(found.seeds[0].sum()), share=1.0)
        for number, parent in enumerate(parents):
            graph.nodes[parent]["heatmap"] = pytree.tree_map(
                lambda one, number=number: one[number][0] if isinstance(one, torch.Tensor) else one, of_inputs
            )
        if name is None:
            break
        values = found.layers[name][:, 0] if conditions else found.layers[name]  # in place of the batch: the parents
        kind = kind_of(module, name, tuple(values.shape), named[name])
        flows = by_channel(values, kind).sum(2)  # (parents, channels)
        kept = _kept(flows.sum(0), channels if place == 0 else None, widths[place], name)
        _connect(graph, name, parents, flows, kept)
        conditions = [{**above, name: kind(channel)} for channel in kept]
        parents, above = [(name, channel) for channel in kept], {**above, name: kind(*kept)}
    return AttributionGraph(graph, tuple(names))


def _downwards(graph: fx.Graph, names: Sequence[str]) -> list[str]:
    """The names in the order of relevance. `InputError` unless each layer computes what the one above it reads."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    nodes = sorted(zip(resolve_names(graph, names), names, strict=True), key=lambda one: -order[one[0]])
    for (upper, above), (lower, below) in itertools.pairwise(nodes):
        if lower not in ancestors_of(upper):
            raise InputError(
                f"{above} does not depend on {below}: the layers of an attribution graph lie on one way",
                topic="attribution-graphs",
            )
    return [name for _, name in nodes]


def _kept(totals: torch.Tensor, channels: Sequence[int] | None, width: int, name: str) -> list[int]:
    """The channels of a layer that the graph has, the largest magnitude first."""
    if channels is None:
        order = totals.abs().argsort(descending=True, stable=True)[:width].tolist()
        kept = [channel for channel in order if totals[channel] != 0]
        if not kept:
            raise InputError(f"no relevance flows through {name}", topic="attribution-graphs")
        return kept
    if not isinstance(channels, Sequence) or not len(channels) or not all(map(is_whole, channels)):
        raise InputTypeError(f"channels are one or more indices, not {channels!r}", topic="attribution-graphs")
    outside = [one for one in channels if not -len(totals) <= one < len(totals)]
    if outside:
        raise InputError(f"channel {outside[0]} is out of range: {name} has {len(totals)}", topic="attribution-graphs")
    found = dict.fromkeys(int(one) % len(totals) for one in channels)
    return sorted(found, key=lambda one: -abs(float(totals[one])))


def _connect(
    graph: "nx.DiGraph[Concept]", name: str, parents: Sequence[Concept], flows: torch.Tensor, kept: Sequence[int]
) -> None:
    """Add the kept channels of a layer, and their edges. `flows`: the relevance from each parent to each channel."""
    totals = flows.sum(0)
    for channel in kept:
        share = totals[channel] / (totals.abs().sum() or 1.0)
        graph.add_node((name, channel), relevance=float(totals[channel]), share=float(share))
    for parent, flow in zip(parents, flows, strict=True):
        whole = flow.abs().sum() or 1.0
        for channel in kept:
            graph.add_edge(parent, (name, channel), relevance=float(flow[channel]), share=float(flow[channel] / whole))


class _Drawing:
    """A graph as an image: rows of concepts from the target downwards, and edges between them."""

    def __init__(self, found: AttributionGraph, photograph: Any, width: int, cmap: Any) -> None:
        self.graph = found.graph
        self.photograph = photograph
        self.cmap = cmap
        self.width = width
        self.rows = [[TARGET], *([(name, channel) for channel in found.concepts(name)] for name in found.layers)]
        size = max(11, width // 80)
        self.font: Any = ImageFont.load_default(size)
        self.line = round(size * 1.35)
        self.names = [self._cut(row[0][0], width // 4) for row in self.rows]
        self.left = max(int(self.font.getlength(name)) for name in self.names) + 2 * self.line
        room = (width - self.left) // max(map(len, self.rows))
        self.side = min(_LARGEST, room - self.line)
        if self.side < _SMALLEST:
            raise InputError(
                f"{max(map(len, self.rows))} concepts in a row do not fit into a picture {width} pixels wide",
                topic="attribution-graphs",
            )
        self.step = self.side + self.line + max(60, self.side // 2)
        colors = colors_of(cmap)
        (self.negative, self.positive) = (tuple((colors(np.array(one)) * 255).astype(int).tolist()) for one in (-0.8, 0.8))

    def image(self) -> Image.Image:
        height = self.step * len(self.rows) - (self.step - self.side - self.line) + 2 * self.line
        image = Image.new("RGB", (self.width, height), "white")
        draw = ImageDraw.Draw(image)
        edges = sorted(self.graph.edges(data=True), key=lambda edge: abs(edge[2]["share"]))  # the widest in front
        widest = self.side / 10 / (abs(edges[-1][2]["share"]) or 1.0)
        for upper, lower, facts in edges:
            (start, top), (end, bottom) = self._place(upper), self._place(lower)
            top += self.side + (self.line if upper != TARGET else 0)
            width = max(1, round(widest * abs(facts["share"])))
            draw.line([(start, top), (end, bottom)], fill=self._color(facts["relevance"]), width=width)
        for number, row in enumerate(self.rows):
            top = self.line + number * self.step
            draw.text((self.line // 2, top + self.side // 2), self.names[number], fill=_SOFT, font=self.font, anchor="lm")
            for concept in row:
                self._draw_concept(image, draw, concept)
        return image

    def _cut(self, name: str, width: int) -> str:
        """The end of a name that fits into a width: the last parts of names tell layers apart."""
        shown = name
        while self.font.getlength(shown) > width and len(name) > 1:
            name = name[1:]
            shown = f"…{name}"
        return shown

    def _place(self, concept: Concept) -> tuple[int, int]:
        """The middle of the upper side of a concept."""
        number = next(number for number, row in enumerate(self.rows) if concept in row)
        row = self.rows[number]
        room = (self.width - self.left) / len(row)
        return round(self.left + (row.index(concept) + 0.5) * room), self.line + number * self.step

    def _draw_concept(self, image: Image.Image, draw: ImageDraw.ImageDraw, concept: Concept) -> None:
        facts = self.graph.nodes[concept]
        middle, top = self._place(concept)
        box = (middle - self.side // 2, top, middle - self.side // 2 + self.side, top + self.side)
        draw.rectangle(box, fill="white")
        drawn = self._heatmap(facts["heatmap"])
        if drawn is not None:
            drawn = ImageOps.contain(drawn, (self.side, self.side), Image.Resampling.BICUBIC)
            image.paste(drawn, (middle - drawn.width // 2, top + (self.side - drawn.height) // 2))
        draw.rectangle(box, outline=self._color(facts["relevance"]), width=2)
        draw.rectangle((box[0], box[3] + 1, box[2], box[3] + self.line), fill="white")
        text = "" if concept == TARGET else f"{concept[1]}: {facts['share']:.0%}"
        draw.text((middle, box[3] + 2), text, fill=_INK, font=self.font, anchor="ma")

    def _heatmap(self, relevance: Any) -> Image.Image | None:
        """The heatmap of an image's relevance; None for other inputs."""
        if not isinstance(relevance, torch.Tensor) or relevance.ndim != 3 or len(relevance) not in (1, 3):
            return None
        if self.photograph is None:
            return heatmap(relevance, cmap=self.cmap, channels="first")
        return overlay(self.photograph, relevance, cmap=self.cmap)

    def _color(self, relevance: float) -> Any:
        return self.positive if relevance > 0 else self.negative if relevance < 0 else _GREY

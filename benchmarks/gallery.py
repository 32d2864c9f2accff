"""Measure explanations of photographs by blurring what they call relevant; write the tables of docs/gallery.md: `make gallery`.

Blocks of 16×16 pixels are blurred in the order of their relevance, by `lrpfx.measures.RegionPerturbation`. Crops of one
photograph are alike, so intervals are over the photographs. Numbers are kept in build/gallery, so a stopped run goes on.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from documents import write_between
from PIL import Image, ImageOps
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonAlpha2Beta1Flat, EpsilonGammaBox, EpsilonPlus, EpsilonPlusFlat, GammaByDepth, GuidedBackprop
from lrpfx.demo import photographs
from lrpfx.demo.photographs import HIGH, LOW, NETWORKS, PHOTOGRAPHS, Classifier
from lrpfx.measures import ImageData, RegionPerturbation
from lrpfx.measures.evaluation import Evaluation
from lrpfx.measures.intervals import Mean
from lrpfx.rules import ReLUGuidedBackprop
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.support.table import Table
from lrpfx.types import Activation

DOCUMENT = Path(__file__).parents[1] / "docs" / "gallery.md"
RESULTS = Path(__file__).parents[1] / "build" / "gallery"
METRIC = RegionPerturbation(fill="blur", block=16)
BATCH = 28

OURS, RANDOM = "GammaByDepth", "random order"  # with the first one, others are compared


@cache
def _guided(model: nn.Module) -> ExplainModule:
    return lrpfx.transform(model, GuidedBackprop(layer_map=[(Activation, ReLUGuidedBackprop())]))


def guided_by_magnitude(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Guided backpropagation, which adds up magnitudes over the colours; all other methods add up values."""
    return lrpfx.attribute(_guided(model), images, targets).relevance.abs()


METHODS: dict[str, Any] = {
    OURS: GammaByDepth(low=LOW, high=HIGH),
    "EpsilonGammaBox": EpsilonGammaBox(low=LOW, high=HIGH),
    "EpsilonPlus": EpsilonPlus(),
    "EpsilonPlusFlat": EpsilonPlusFlat(),
    "EpsilonAlpha2Beta1Flat": EpsilonAlpha2Beta1Flat(),
    "integrated gradients": "integrated_gradients",
    "gradient × input": "gradient_times_input",
    "guided backpropagation": guided_by_magnitude,
    "Grad-CAM": "grad_cam",
    RANDOM: "random",
}


def views(photograph: str, count: int | None = None) -> list[Image.Image]:
    """The first `count` of ten squares: the centre and the four corners of the photograph, each with its mirror image."""
    image = photographs.load(photograph)
    width, height = image.size
    shorter = min(width, height)
    centre, corner = round(0.875 * shorter), round(0.75 * shorter)
    places = [((width - centre) // 2, (height - centre) // 2, centre)]
    places += [(left, top, corner) for top in (0, height - corner) for left in (0, width - corner)]
    squares = [image.crop((left, top, left + side, top + side)) for left, top, side in places]
    return [one for square in squares for one in (square, ImageOps.mirror(square))][:count]


def data_of(classifier: Classifier, count: int) -> ImageData:
    """`count` views of each photograph, for the class that the network predicts."""
    found = [(name, classifier.preprocess_whole(view)) for name in PHOTOGRAPHS for view in views(name, count)]
    groups, images = zip(*found, strict=True)
    model = classifier.model.to(memory_format=torch.channels_last)  # of many blurred copies, it saves a quarter of the time
    return ImageData(model, torch.stack(images), groups=groups)


def evaluated(classifier: Classifier, methods: Mapping[str, Any], count: int, kept: str | None = None) -> Evaluation:
    """The methods on `count` views of each photograph, with prices of one image at a time. `kept`: the name of the files."""
    outputs = [None if kept is None else RESULTS / f"{kept}{part}.json" for part in ("", "_times")]
    found = lrpfx.evaluate(methods, data_of(classifier, count), METRIC, batch_size=BATCH, output=outputs[0], progress=True)
    alone = lrpfx.evaluate(methods, data_of(classifier, 2), "sparseness", batch_size=1, output=outputs[1])
    return replace(found, prices=alone.prices)


def table(evaluation: Evaluation) -> str:
    """Areas between the curves, largest first, with the differences to those of `OURS`."""
    column = next(iter(METRIC.columns))
    numbers = dict.fromkeys(("area between the curves", f"minus {OURS}", "time, in gradients"), "float64")
    scores = sorted((one for one in evaluation.scores if one.metric == column), key=lambda one: -one.mean)
    rows = []
    for one in scores:
        minus = evaluation.difference(one.method, OURS, column)
        rows.append(
            (
                one.method,
                str(Mean(one.mean, one.low, one.high)),
                "" if one.method == OURS else str(Mean(minus.mean, minus.low, minus.high)),
                "" if one.method == RANDOM else f"{evaluation.prices[one.method]:.1f}",
            )
        )
    return Table({"method": "str"} | numbers, rows).to_markdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", help=f"some of {', '.join(NETWORKS)}; by default all")
    parser.add_argument("--views", type=int, default=4, help="of each photograph, at most 10 (default: 4)")
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in arguments.networks or NETWORKS:
        classifier = photographs.load_classifier(name)
        found = evaluated(classifier, METHODS, arguments.views, name)
        counted = f"{NETWORKS[name]}, {len(found.groups)} inputs of {len(set(found.groups))} photographs:"
        print(f"\n{counted}\n\n{table(found)}", flush=True)
        write_between(DOCUMENT, name, f"\n{counted}\n\n{table(found)}")


if __name__ == "__main__":
    main()

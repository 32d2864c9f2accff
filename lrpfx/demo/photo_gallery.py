"""Pictures of photographs and what a network saw in them: for the demo, README and docs/gallery.md."""

import argparse
from pathlib import Path

from PIL import Image

import lrpfx
from lrpfx.demo import photographs

#: Photographs of the picture that README begins with.
SHOWN = ("chelsea", "china", "flower", "rocket")
#: A photograph in which the network sees several things, and what they are.
SEVERAL_CLASSES = ("astronaut", ("football helmet", "bobsled", "barbell"))


def composites() -> dict[str, lrpfx.composites.Composite]:
    """Composites whose maps are compared, by name."""
    low, high = photographs.LOW, photographs.HIGH
    return {
        "GammaByDepth": lrpfx.composites.GammaByDepth(low=low, high=high),
        "EpsilonGammaBox": lrpfx.composites.EpsilonGammaBox(low=low, high=high),
        "EpsilonPlus": lrpfx.composites.EpsilonPlus(),
        "EpsilonPlusFlat": lrpfx.composites.EpsilonPlusFlat(),
        "EpsilonAlpha2Beta1Flat": lrpfx.composites.EpsilonAlpha2Beta1Flat(),
        "ExcitationBackprop": lrpfx.composites.ExcitationBackprop(),
        "GuidedBackprop": lrpfx.composites.GuidedBackprop(),
    }


def main() -> None:
    """Write the pictures of README and docs/gallery.md."""
    parser = argparse.ArgumentParser(prog="python -m lrpfx.demo.photo_gallery", description=main.__doc__)
    parser.add_argument("--directory", type=Path, default=Path("docs/images"), help="where they go (default: docs/images)")
    directory = parser.parse_args().directory
    explainer = explainer_of()
    explained = explainer([photographs.path(name) for name in SHOWN])
    write = {
        "photographs": explained.sheet(),
        "gallery_classes": explainer(photographs.path(SEVERAL_CLASSES[0])).compare(SEVERAL_CLASSES[1]),
        "gallery_layers": explained[0].layers(),
        "gallery_composites": by_composite(SHOWN),
    }
    for name, picture in write.items():
        picture.save(directory / f"{name}.jpg")
        print(directory / f"{name}.jpg")


def explainer_of(composite: lrpfx.composites.Composite | None = None) -> lrpfx.Explainer:
    """Explains photographs with EfficientNet-Lite0."""
    network = photographs.load_classifier()
    return lrpfx.Explainer(network.model, preprocess=network.preprocess, categories=network.categories, composite=composite)


def by_composite(names: tuple[str, ...]) -> Image.Image:
    """Overlays of photographs, one row for each composite."""
    files = [photographs.path(name) for name in names]
    rows = []
    for name, composite in composites().items():
        found = explainer_of(composite)(files)
        rows.append([(name if not place else "", one.overlay()) for place, one in enumerate(found)])
    return lrpfx.pictures.sheet(rows, legend=lrpfx.pictures.LEGEND)


def explain_photographs(directory: Path) -> None:
    """The first part of the demo: what EfficientNet-Lite0 sees in photographs, as pictures in `directory`."""
    explainer = explainer_of()
    explained = explainer([photographs.path(name) for name in photographs.PHOTOGRAPHS])
    print(f"EfficientNet-Lite0 explained by {explained[0].rules}")
    for one in explained:
        print(f"{one.name:20} {', '.join(map(str, one.top(3)))}")
    explained.sheet().save(directory / "photographs.png")
    overlays = directory / "overlays"
    overlays.mkdir(exist_ok=True)
    for one in explained:
        one.overlay().save(overlays / Path(one.name).with_suffix(".png").name)
    by_name = dict(zip(photographs.PHOTOGRAPHS, explained, strict=True))
    photograph, classes = SEVERAL_CLASSES
    by_name[photograph].compare(classes).save(directory / "classes.png")
    by_name["chelsea"].layers().save(directory / "layers.png")
    lrpfx.draw(explainer.explain_model).render(outfile=directory / "rules_of_efficientnet.svg")


if __name__ == "__main__":
    main()

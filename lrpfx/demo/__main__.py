"""`python -m lrpfx.demo`: explain photographs; then train on digits, explain, measure, and write all to a directory."""

import argparse
from pathlib import Path

import matplotlib
import torch
from torch import nn

import lrpfx
from lrpfx.demo import digits
from lrpfx.demo.photo_gallery import explain_photographs
from lrpfx.demo.pixel_flipping import pixel_flipping
from lrpfx.measures.deletion import Deletion
from lrpfx.support.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot

COMPOSITES: dict[str, lrpfx.composites.Composite] = {
    "EpsilonPlus": lrpfx.composites.EpsilonPlus(),
    "EpsilonPlusFlat": lrpfx.composites.EpsilonPlusFlat(),
    "EpsilonGammaBox": lrpfx.composites.EpsilonGammaBox(low=0.0, high=1.0),
    "EpsilonAlpha2Beta1": lrpfx.composites.EpsilonAlpha2Beta1(),
    "ExcitationBackprop": lrpfx.composites.ExcitationBackprop(),
    "GuidedBackprop": lrpfx.composites.GuidedBackprop(),
}
SHOWN = "EpsilonGammaBox"  # the composite whose rules are drawn and listed, and whose program is saved


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lrpfx.demo", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("demo"), help="where the results go (default: demo)")
    parser.add_argument("--epochs", type=int, default=20, help="how long to train (default: 20)")
    arguments = parser.parse_args()
    run(arguments.directory, arguments.epochs)


def run(directory: Path, epochs: int) -> None:
    """Run the demo and write the results to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    explain_photographs(directory)
    train, held_out = digits.load()
    model = digits.train(train, epochs)
    print(f"accuracy on {len(held_out.labels)} held-out digits: {digits.accuracy(model, held_out):.1%}\n")

    explained = {
        name: lrpfx.transform(model, composite, example_inputs=held_out.images[:2]) for name, composite in COMPOSITES.items()
    }
    relevances = {name: lrpfx.attribute(module, held_out.images).relevance for name, module in explained.items()}
    print(_relevance_against_logit(model, held_out.images, relevances))

    orders = {
        **relevances,
        "plain gradient, absolute": _sensitivity(model, held_out.images),
        "random order": torch.rand(held_out.images.shape, generator=torch.Generator().manual_seed(0)),
    }
    flippings = pixel_flipping(model, held_out.images, orders)
    print(_flipping_table(flippings))

    _write_heatmaps(directory / "heatmaps.png", held_out, relevances)
    _write_curves(directory / "pixel_flipping.png", flippings)
    program = lrpfx.lower(explained[SHOWN], held_out.images[:2])
    lrpfx.save(program, directory / "digits.onnx")
    lrpfx.draw(explained[SHOWN]).render(outfile=directory / "rules.svg")
    (directory / "assignment.txt").write_text(f"{lrpfx.assignment(explained[SHOWN])}\n")
    print(f"written to {directory}/: " + ", ".join(sorted(path.name for path in directory.iterdir())))


def _sensitivity(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """The magnitude of the gradient of the largest output with respect to the pixels."""
    leaf = images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf).max(1).values.sum(), leaf)
    return gradient.abs()


def _relevance_against_logit(model: nn.Module, images: torch.Tensor, relevances: dict[str, torch.Tensor]) -> str:
    with torch.no_grad():
        logit = model(images).max(1).values
    rows = []
    for name, relevance in relevances.items():
        if COMPOSITES[name].unassigned == "gradient":
            continue  # keeps plain gradients, which do not conserve relevance
        total = relevance.sum((1, 2, 3))
        rows.append((name, f"{logit.mean():.3f}", f"{total.mean():.3f}", f"{total.mean() / logit.mean():.1%}"))
    numbers = dict.fromkeys(("logit", "relevance sum", "share"), "float64")
    return f"{Table({'means over held-out digits': 'str'} | numbers, rows)}\n"


def _flipping_table(flippings: dict[str, Deletion]) -> str:
    rows = [
        (name, f"{f.area_most_relevant_first:.3f}", f"{f.area_least_relevant_first:.3f}", f"{f.area:.3f}")
        for name, f in sorted(flippings.items(), key=lambda item: -item[1].area)
    ]
    numbers = dict.fromkeys(("most relevant first", "least relevant first", "area between"), "float64")
    return f"{Table({'pixel flipping': 'str'} | numbers, rows)}\n"


def _write_heatmaps(path: Path, held_out: digits.Digits, relevances: dict[str, torch.Tensor]) -> None:
    """One row for each of the ten digits: the image and its relevance under every composite."""
    samples = [int((held_out.labels == label).nonzero()[0]) for label in range(10)]
    figure, axes = pyplot.subplots(10, 1 + len(relevances), figsize=(1.5 + 1.5 * len(relevances), 15), layout="constrained")
    for row, sample in zip(axes, samples, strict=True):
        row[0].imshow(held_out.images[sample, 0], cmap="gray", vmin=0, vmax=1)
        for axis, relevance in zip(row[1:], relevances.values(), strict=True):
            heatmap = relevance[sample].sum(0)
            limit = float(heatmap.abs().max()) or 1.0
            axis.imshow(heatmap, cmap="bwr", vmin=-limit, vmax=limit)
    for axis, title in zip(axes[0], ("input", *relevances), strict=True):
        axis.set_title(title, fontsize=9)
    for axis in axes.flat:
        axis.set_axis_off()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _write_curves(path: Path, flippings: dict[str, Deletion]) -> None:
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for index, (name, flipping) in enumerate(flippings.items()):
        axis.plot(flipping.most_relevant_first, color=f"C{index}", label=f"{name} ({flipping.area:.3f})")
        axis.plot(flipping.least_relevant_first, color=f"C{index}", linestyle="--")
    axis.set_xlabel("flipped pixels (solid: most relevant first, dashed: least relevant first)")
    axis.set_ylabel("probability of the first prediction")
    axis.legend(title="area between the curves", fontsize=8, title_fontsize=8)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    main()

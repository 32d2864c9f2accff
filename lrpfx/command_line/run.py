"""`lrpfx run`: explain a folder of images with the program in a file."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

import lrpfx
from lrpfx.command_line.image_files import ImageFile, images_in
from lrpfx.command_line.models import model_named
from lrpfx.command_line.options import ALLOW_NATIVE, ARTEFACT, CATEGORIES, ImageOptions, class_of, invalid
from lrpfx.command_line.results import ResultFolder, Results, results_in
from lrpfx.command_line.terminal import Stages, say, say_data, stages
from lrpfx.deploy.image_facts import check_image_facts, image_shape
from lrpfx.deploy.lowering import FIXED
from lrpfx.deploy.program import inputs_of, number_of_targets
from lrpfx.deploy.runner import Runner
from lrpfx.errors import InputError, first_lines, nearest
from lrpfx.images.opening import opened_in_depth
from lrpfx.images.stored_preprocessing import StoredPreprocessing, stored_form
from lrpfx.request.places import scores_of_classes
from lrpfx.request.reduction import CHANNELS
from lrpfx.support.files import check_place
from lrpfx.support.numbers import counted
from lrpfx.support.stored_arrays import RefusedError

Array = NDArray[Any]


def run(
    artefact: ARTEFACT,
    images: Annotated[Path, typer.Argument(help="A folder with images in it, at any depth, or one image.")],
    output: Annotated[Path, typer.Argument(help="The folder for heatmaps and outputs.csv.")],
    *,
    options: ImageOptions,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="The class to explain, by name or index; by default the largest output. Given once for each target of the "
            "program, if it takes several."
        ),
    ] = None,
    categories: CATEGORIES = None,
    cmap: Annotated[str, typer.Option(help="Colour map of the heatmaps.")] = "bwr",
    batch_size: Annotated[int, typer.Option(min=1, help="Number of images per batch.")] = 8,
    allow_native: ALLOW_NATIVE = False,
) -> None:
    """Explain the images of a folder with an exported program: a heatmap for each, and a CSV file of the outputs.

    A program that takes several targets makes as many heatmaps of each image, by default of the largest outputs. The file's own
    preprocessing applies, unless options change it. Earlier results in the same folder are kept, so a stopped run resumes.
    """
    if categories is not None and target is None:
        raise InputError(
            "--categories is for a --target by name: outputs.csv has the classes by index", topic="classes-and-their-names"
        )
    check_place(output, is_folder=True)
    found = images_in([images])
    _check_cmap(cmap)
    if output.exists() and images.samefile(output):
        raise invalid("the heatmaps would be images of the next run: choose another folder for them")
    with stages(f"loading {artefact}"):
        given = model_named(str(artefact), allow_native=allow_native)
    runner = given.model
    if not isinstance(runner, Runner):
        raise invalid(f"{artefact} is not a file that lrpfx export wrote; lrpfx explain takes other models")
    shape = _image_shape(runner)
    preprocessing = stored_form(given.required_preprocessing(options))
    try:
        check_image_facts({**runner.manifest, "preprocessing": preprocessing.to_dict()})
    except RefusedError as error:
        raise invalid(f"these options do not fit {artefact}: {error}") from error
    classes = runner.manifest["results"]["output"]["shape"][1]
    names = given.names_of_classes(categories)
    if names is not None and len(names) != classes:
        raise InputError(
            f"there are {len(names)} names of classes, but the output has {classes} classes", topic="classes-and-their-names"
        )
    chosen = [class_of(one, names, classes) for one in target or ()]
    several = number_of_targets(runner.manifest)
    if len(chosen) not in (0, several or 1):
        raise invalid(f"the program explains {several or 1} classes of each image, but --target gives {len(chosen)}")
    fixed = runner.manifest["arguments"][next(iter(runner.manifest["arguments"]))]["shape"][0]
    if fixed is None and preprocessing.size is None and None in shape:
        batch_size = 1  # each image has its own size
    settings = {
        "program": given.origin,
        "target": chosen if several else next(iter(chosen), None),
        "preprocessing": preprocessing.to_dict(),
        "cmap": cmap,
    }
    numbers = [f"_{number + 1}" for number in range(several)] if several else [""]
    explained = [f"{name}{number}" for number in numbers for name in ("explained", "relevance")]
    columns = ("largest", *explained, *(f"output_{number}" for number in range(classes)))
    pictures = tuple(f"{number.replace('_', '.')}.png" for number in numbers)
    place = ResultFolder(output, "run.json", "outputs.csv", columns, pictures)
    with results_in(place, settings, found, "lrpfx run", one_program=True) as results:
        pending = [image for image in results.images if not results.has(image, image.version)]
        with stages("explaining", len(found)) as shown:
            shown.advance(len(found) - len(pending))
            _explain_all(runner, pending, preprocessing, results, chosen, cmap, fixed or batch_size, fixed, shown)
    before = f", {len(found) - len(pending)} of them from before," if len(pending) < len(found) else ""
    done = len(found) - len(results.problems)
    say(f"{counted(done * len(pictures), 'heatmap')}{before} and outputs.csv in {output}/")
    problems = {row[0]: row[-1] for row in results.problems}
    say_data({"folder": output, "table": place.table, "explained": done, "problems": problems})
    results.raise_problems("these images cannot be read")


def _explain_all(
    runner: Runner,
    images: Sequence[ImageFile],
    preprocessing: StoredPreprocessing,
    results: Results,
    targets: list[int],
    cmap: str,
    batch_size: int,
    fixed: int | None,
    shown: Stages,
) -> None:
    for first in range(0, len(images), batch_size):
        batch: dict[ImageFile, Array] = {}
        for image in images[first : first + batch_size]:
            try:
                batch[image] = preprocessing.array(opened_in_depth(image.path))
            except Exception as error:  # decoders raise errors of all kinds
                results.add_problem(image, error)
        for image, row, heatmaps in _explained(runner, batch, targets, fixed) if batch else ():
            writers = [partial(lrpfx.image.imsave, obj=heatmap, cmap=cmap, symmetric=True) for heatmap in heatmaps]
            results.add(image, image.version, row, writers)
        shown.advance(len(images[first : first + batch_size]))


def _image_shape(runner: Runner) -> list[int | None]:
    """Channels, height and width of the program's input images, None for open sizes."""
    shape = image_shape(runner.manifest)
    if shape is None or shape[0] not in (1, 3):
        shapes = [one["shape"][1:] for one in inputs_of(runner.manifest).values()]
        raise invalid(f"the program does not take one image with 1 or 3 channels: its inputs have the shapes {shapes}")
    if runner.manifest["target"] in ("weights", FIXED):
        raise invalid(
            "the program explains relevance of the output that is given, or one target; export it with --target index or max"
        )
    if runner.manifest["reduce"] == CHANNELS:
        raise invalid("the program returns relevance of channels, not of pixels; export it without --reduce channels")
    if len(runner.manifest["results"]["output"]["shape"]) not in (2, 4):
        raise invalid("the program's output is not of shape (batch, classes), or (batch, classes, height, width)")
    return shape


def _check_cmap(cmap: str) -> None:
    try:
        lrpfx.image.get_cmap(cmap)
    except Exception as error:
        raise InputError(
            f"{cmap!r} is not a colour map: {first_lines(error)}.{nearest(cmap, lrpfx.image.CMAPS)}", topic="colour-maps"
        ) from error


def _explained(
    runner: Runner, batch: dict[ImageFile, Array], targets: list[int], fixed: int | None
) -> Iterator[tuple[ImageFile, list[Any], Sequence[Array]]]:
    """The figures of the table and the relevance of each image of a batch, for each target."""
    pixels = np.stack(list(batch.values()))
    if fixed is not None:  # fill up the last batch with copies
        pixels = np.concatenate([pixels] * fixed)[:fixed]
    name = next(iter(runner.manifest["arguments"]))
    arguments = {name: pixels.astype(runner.manifest["arguments"][name]["dtype"])}
    results, explained = _run_for(runner, arguments, targets)
    maps = results["relevance"]
    maps = maps if number_of_targets(runner.manifest) else maps[:, None]
    maps = maps if maps.ndim == 4 else maps.sum(2)
    for image, values, classes, heatmaps in zip(batch, results["output"], explained, maps, strict=False):
        totals = ["" if one.dtype == np.uint8 else float(one.astype(np.float64).sum()) for one in heatmaps]
        figures = [figure for pair in zip(map(int, classes), totals, strict=True) for figure in pair]
        yield image, [int(values.argmax()), *figures, *map(float, values)], list(heatmaps)


def _run_for(runner: Runner, arguments: dict[str, Array], targets: list[int]) -> tuple[dict[str, Array], Array]:
    """The results for classes, by default for the largest outputs of each sample, and these classes: (batch, targets)."""
    if runner.manifest["target"] == "max":
        if targets:
            raise invalid("the program explains its largest output; export it with --target index to choose a class")
        results = _with_scores(runner(**arguments))
        return results, results["output"].argmax(1)[:, None]
    several = number_of_targets(runner.manifest)

    def explained(classes: Array) -> dict[str, Array]:
        return _with_scores(runner(**arguments, target=classes if several else classes[:, 0]))

    shape = (len(next(iter(arguments.values()))), several or 1)
    chosen = np.broadcast_to(np.array(targets or 0), shape)
    results = explained(chosen)
    if not targets:
        ranked = np.argsort(-results["output"], axis=1, kind="stable")
        chosen = ranked[:, np.arange(shape[1]) % ranked.shape[1]]
        results = explained(chosen)
    return results, chosen


def _with_scores(results: dict[str, Array]) -> dict[str, Array]:
    """Results with the score of each class as the output, (batch, classes), in place of one with places."""
    return {**results, "output": scores_of_classes(torch.from_numpy(results["output"])).numpy()}

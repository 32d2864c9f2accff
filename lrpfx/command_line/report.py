"""`lrpfx report`: photographs or numbers in, one interactive page out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lrpfx.command_line.image_files import images_in, masks_of, opened_in_rgb
from lrpfx.command_line.models import model_named
from lrpfx.command_line.number_files import (
    NumberExplainers,
    NumberFile,
    NumberOptions,
    are_of_numbers,
    each_of,
    files_of,
    read_files,
)
from lrpfx.command_line.options import (
    BOX,
    IMAGES,
    MASK,
    MODEL,
    SETTINGS,
    ModelOptions,
    boxes_of,
    check_alone,
    check_composite,
    check_mask,
    classes_of,
    composite_of,
    invalid,
)
from lrpfx.command_line.terminal import say, say_data, stages
from lrpfx.errors import InputError
from lrpfx.explanation.captures import Captures
from lrpfx.explanation.explainer import Explainer
from lrpfx.reports.pages.report import SUFFIXES
from lrpfx.reports.pages.report import report as report_on
from lrpfx.request.regions import Region
from lrpfx.support.files import check_place
from lrpfx.support.numbers import counted


def report(
    model: MODEL,
    photographs: IMAGES,
    *,
    options: ModelOptions,
    numbers: NumberOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    target: Annotated[
        list[str] | None,
        typer.Option(help="The class to explain, by name or index; by default the predicted one. Repeat it for several."),
    ] = None,
    mask: MASK = None,
    box: BOX = None,
    composite: Annotated[
        list[str] | None,
        typer.Option(help="Name of the composite; see `lrpfx composites`. Repeat it to compare several."),
    ] = None,
    setting: SETTINGS = None,
    title: Annotated[str | None, typer.Option(help="The title of the page; by default the names of the photographs.")] = None,
) -> None:
    """Write an interactive report on photographs: their maps, the graph with its relevance, the ledger and the compilation.

    The page opens in a browser and needs no network. Each class of each photograph adds some 300 kB. Files of numbers are
    reported on as `lrpfx explain` takes them: tables with their rows, series, sounds, volumes, graphs and several inputs.
    """
    if output.suffix.lower() not in SUFFIXES:
        raise InputError(f"{output}: a report is written as .html", topic="reports")
    check_place(output)
    names = composite or []
    if setting and len(names) != 1:
        raise invalid("--set is for the settings of one --composite")
    if len(set(names)) < len(names):
        raise invalid(f"--composite names one twice: {', '.join(names)}")
    for name in names:
        check_composite(name, setting)
        check_alone(name, "lrpfx explain and lrpfx dataset take --reference")
    options.check(target or ())
    boxes_of(box or (), ())
    photographs = files_of(photographs)
    if are_of_numbers(photographs):
        if box:
            raise invalid("--box is for photographs")
        number_files = read_files(photographs, options, target or (), mask)
        found = {}
        with stages(f"loading {model}") as shown:
            given = model_named(model, options.weights, options.metadata, options.device)
            known = given.names_of_classes(options.categories)
            for name in names or [""]:
                shown.begin(f"preparing {name}".rstrip())
                settings = {"composite": composite_of(name, setting, None) if name else None, "categories": known}
                found[name] = _explained_numbers(NumberExplainers(given.model, numbers, settings), number_files, target or ())
        _write(found, output, title, "sample")
        return
    numbers.check_unused()
    check_mask(mask, target, box)
    files = images_in(photographs)
    masks = masks_of(mask, files)
    images = [(image.shown, opened_in_rgb(image.path)) for image in files]
    opened = [one for _, one in images]
    regions = [] if masks is None else [masks.for_photograph(file, one.size) for file, one in zip(files, opened, strict=True)]
    with stages(f"loading {model}") as shown:
        given = model_named(model, options.weights, options.metadata, options.device)
        preprocess = given.required_preprocessing(options)
        known, found = given.names_of_classes(options.categories), {}
        if known is not None:
            classes_of(target or (), known)
        source = given.model if len(names) < 2 else given.module("report")
        captures = Captures()
        for name in names or [""]:
            shown.begin(f"preparing {name}".rstrip())
            chosen = composite_of(name, setting, preprocess) if name else None
            explainer = Explainer(source, composite=chosen, preprocess=preprocess, categories=known)
            explainer.captures = captures
            classes = classes_of(target or [], explainer.categories)
            targets: list[Any] = [*boxes_of(box, classes)] if box else [*classes]
            asked: dict[str, Any] = {"targets": targets or None}
            if regions:
                class_: Any = classes[0]
                asked = {"target": [Region(class_, region) for region in regions]}
            explained = explainer(opened, **asked)
            found[name] = [one.renamed(text) for one, (text, _) in zip(explained, images, strict=True)]
    _write(found, output, title, "photograph")


def _explained_numbers(explainers: NumberExplainers, files: Sequence[NumberFile], targets: Sequence[str]) -> list[Any]:
    """The explanations of files of numbers, with the names of the files."""
    found = []
    for one in files:
        each = each_of(explainers.explained(one.content, targets, one.mask))
        titles = [one.path.name] if len(each) == 1 else [f"{one.path.name}: {part.name}" for part in each]
        found += [part.renamed(title) for part, title in zip(each, titles, strict=True)]
    return found


def _write(found: Mapping[str, Sequence[Any]], output: Path, title: str | None, what: str) -> None:
    """Write the report, and say what is in it. `what`: one of what is explained, in words."""
    with stages("writing"):
        path = report_on(found, output, title=title)
    names = [one.name for one in next(iter(found.values()))]
    say_data({"file": path, f"{what}s": names})
    say(f"{path}: {counted(len(names), what)}, {path.stat().st_size / 1e6:.1f} MB")

"""`lrpfx report`: photographs in, one interactive page out."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lrpfx.command_line.image_files import images_in, opened_in_rgb
from lrpfx.command_line.models import graph_of, model_named
from lrpfx.command_line.number_files import are_of_numbers
from lrpfx.command_line.options import IMAGES, MODEL, SETTINGS, ModelOptions, check_composite, classes_of, composite_of, invalid
from lrpfx.command_line.terminal import say, say_data, stages
from lrpfx.errors import InputError
from lrpfx.explanation.explainer import Explainer
from lrpfx.pages.report import SUFFIXES
from lrpfx.pages.report import report as report_on
from lrpfx.support.files import check_place
from lrpfx.support.numbers import counted


def report(
    model: MODEL,
    photographs: IMAGES,
    *,
    options: ModelOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    target: Annotated[
        list[str] | None,
        typer.Option(help="The class to explain, by name or index; by default the predicted one. Repeat it for several."),
    ] = None,
    composite: Annotated[
        list[str] | None,
        typer.Option(help="Name of the composite; see `lrpfx composites`. Repeat it to compare several."),
    ] = None,
    setting: SETTINGS = None,
    title: Annotated[str | None, typer.Option(help="The title of the page; by default the names of the photographs.")] = None,
) -> None:
    """Write an interactive report on photographs: their maps, the graph with its relevance, the ledger and the compilation.

    The page opens in a browser and needs no network. Each class of each photograph adds some 300 kB.
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
    options.check(target or ())
    if are_of_numbers(photographs):
        raise invalid(
            f"{photographs[0]} is no photograph: lrpfx explain takes it, and a report is written in Python, by "
            "lrpfx.report(lrpfx.explain(model, data), path)"
        )
    images = [(image.shown, opened_in_rgb(image.path)) for image in images_in(photographs)]
    with stages(f"loading {model}") as shown:
        given = model_named(model, options.weights, options.metadata, options.device)
        preprocess = given.required_preprocessing(options)
        known, found = given.names_of_classes(options.categories), {}
        if known is not None:
            classes_of(target or (), known)
        source: Any = given.model if len(names) < 2 else graph_of(given.module("report"), preprocess, images[0][1])
        for name in names or [""]:
            shown.begin(f"preparing {name}".rstrip())
            chosen = composite_of(name, setting, preprocess) if name else None
            explainer = Explainer(source, composite=chosen, preprocess=preprocess, categories=known)
            targets = classes_of(target or [], explainer.categories)
            explained = explainer([photograph for _, photograph in images], targets=targets or None)
            found[name] = [one.renamed(text) for one, (text, _) in zip(explained, images, strict=True)]
        shown.begin("writing")
        path = report_on(found, output, title=title)
    say_data({"file": path, "photographs": [name for name, _ in images]})
    say(f"{path}: {counted(len(images), 'photograph')}, {path.stat().st_size / 1e6:.1f} MB")

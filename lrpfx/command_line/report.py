"""`lrpfx report`: photographs in, one interactive page out."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lrpfx.command_line.image_files import images_in, opened, reason
from lrpfx.command_line.models import NamedModel, model_named
from lrpfx.command_line.options import (
    CATEGORIES,
    INTERPOLATION,
    MEAN,
    METADATA,
    MODEL,
    RAW,
    RESIZE,
    SETTINGS,
    SIZE,
    STD,
    WEIGHTS,
    PhotographOptions,
    class_of,
    composite_of,
)
from lrpfx.command_line.terminal import counted, say, stages
from lrpfx.errors import InputError
from lrpfx.explanation.explainer import Explainer
from lrpfx.pages.report import SUFFIXES
from lrpfx.pages.report import report as report_on


def report(
    model: MODEL,
    photographs: Annotated[
        list[Path], typer.Argument(metavar="PHOTO...", help="Photographs, or folders with photographs in them.")
    ],
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
    weights: WEIGHTS = None,
    metadata: METADATA = None,
    mean: MEAN = None,
    std: STD = None,
    size: SIZE = None,
    resize: RESIZE = None,
    interpolation: INTERPOLATION = None,
    raw: RAW = False,
    categories: CATEGORIES = None,
) -> None:
    """Write an interactive report on photographs: their maps, the graph with its relevance, the ledger and the compilation.

    The page opens in a browser and needs no network. Each class of each photograph adds some 300 kB.
    """
    if output.suffix.lower() not in SUFFIXES:
        raise InputError(f"{output}: a report is written as .html", topic="reports")
    names = composite or []
    if setting and len(names) != 1:
        raise InputError("--set is for the settings of one --composite", topic="options-of-commands")
    if len(set(names)) < len(names):
        raise InputError(f"--composite names one twice: {', '.join(names)}", topic="options-of-commands")
    with stages(f"loading {model}") as shown:
        given = model_named(model, weights, metadata)
        preprocess = given.required_preprocessing(PhotographOptions(mean, std, size, resize, interpolation, raw))
        images = []
        for image in images_in(photographs):
            try:
                images.append((image.shown, opened(image.path).convert("RGB")))
            except Exception as error:  # decoders raise errors of all kinds
                raise InputError(f"{image.path}: {reason(error)}", topic="image-files") from error
        found = {}
        for name in names or [""]:
            shown.begin(f"explaining {name}".rstrip())
            explainer = _explainer(given, preprocess, name, setting, categories)
            targets = [class_of(text, explainer.categories) for text in target or []]
            if len(set(targets)) < len(targets):
                raise InputError(f"--target names a class twice: {', '.join(target or [])}", topic="options-of-commands")
            explained = explainer([photograph for _, photograph in images], targets=targets or None)
            found[name] = [one.renamed(text) for one, (text, _) in zip(explained, images, strict=True)]
        shown.begin("writing")
        path = report_on(found, output, title=title)
    say(f"{path}: {counted(len(images), 'photograph')}, {path.stat().st_size / 1e6:.1f} MB")


def _explainer(
    given: NamedModel, preprocess: Callable[..., Any], name: str, setting: list[str] | None, categories: Path | None
) -> Explainer:
    return Explainer(
        given.model,
        composite=composite_of(name, setting, preprocess) if name else None,
        preprocess=preprocess,
        categories=given.names_of_classes(categories),
    )

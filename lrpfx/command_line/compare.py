"""`lrpfx compare`: two composites on one photograph, node by node."""

from pathlib import Path
from typing import Annotated

import typer

from lrpfx.command_line.image_files import opened, reason
from lrpfx.command_line.models import model_named
from lrpfx.command_line.options import (
    CATEGORIES,
    INTERPOLATION,
    MEAN,
    METADATA,
    MODEL,
    RAW,
    RESIZE,
    SIZE,
    STD,
    WEIGHTS,
    PhotographOptions,
    class_of,
    composite_of,
)
from lrpfx.command_line.terminal import say, say_table, stages
from lrpfx.errors import InputError
from lrpfx.explanation.explainer import Explainer
from lrpfx.explanation.explanation import format_of_picture, save_picture
from lrpfx.reports.comparison import compare as compared


def compare(
    model: MODEL,
    photograph: Annotated[Path, typer.Argument(metavar="PHOTO", help="A photograph.")],
    composite: Annotated[
        list[str] | None, typer.Option(help="Name of a composite; see `lrpfx composites`. It is there twice.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The class to explain, by name or index; by default the predicted one.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A picture to write (.png): both maps, and their difference.")
    ] = None,
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
    """Compare two composites on a photograph: where their rules differ, and where their accounts of relevance part.

    `lrpfx report` with two composites shows their maps on the photograph, and their graphs.
    """
    names = composite or []
    if output is not None:
        format_of_picture(output)
    if len(names) != 2:
        raise InputError(f"--composite is given {len(names)} times: pass it twice, for the two that are compared")
    with stages(f"loading {model}") as shown:
        given = model_named(model, weights, metadata)
        preprocess = given.required_preprocessing(PhotographOptions(mean, std, size, resize, interpolation, raw))
        module = given.module("compare")
        try:
            image = opened(photograph).convert("RGB")
        except Exception as error:  # decoders raise errors of all kinds
            raise InputError(f"{photograph}: {reason(error)}") from error
        known = given.names_of_classes(categories)
        found = []
        for name in names:
            shown.begin(f"explaining {name}")
            chosen = composite_of(name, None, preprocess)
            explainer = Explainer(module, composite=chosen, preprocess=preprocess, categories=known)
            explanation = explainer(image, None if target is None else class_of(target, explainer.categories))
            found.append((explainer.explain_model, explanation))
        shown.begin("comparing")
        (one, explanation), (other, _) = found
        comparison = compared(one, other, explanation.input[None], explanation.target.index)
    if output is not None:
        save_picture(comparison.picture(), output)
    say(f"relevance for {explanation.target}")
    say(comparison.summary)
    if comparison.shown:
        say_table(comparison.columns, comparison.shown)

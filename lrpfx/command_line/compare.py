"""`lrpfx compare`: two composites, or two models, on one photograph, node by node."""

from pathlib import Path
from typing import Annotated

import typer

import lrpfx
from lrpfx.command_line.image_files import opened_in_rgb
from lrpfx.command_line.models import model_named
from lrpfx.command_line.options import MODEL, ModelOptions, check_alone, check_composite, class_of, composite_of, invalid
from lrpfx.command_line.terminal import say, say_data, say_table, stages
from lrpfx.explanation.captures import Captures
from lrpfx.explanation.explainer import Explainer
from lrpfx.explanation.saving import format_of_picture, save_picture
from lrpfx.support.files import check_place


def compare(
    model: MODEL,
    photograph: Annotated[Path, typer.Argument(metavar="PHOTO", help="A photograph.")],
    *,
    options: ModelOptions,
    composite: Annotated[
        list[str] | None,
        typer.Option(help="Name of a composite; see `lrpfx composites`. It is there twice, or for two models at least once."),
    ] = None,
    other: Annotated[
        str | None, typer.Option(help="Another model, named like the first; both see the photograph as the first one does.")
    ] = None,
    other_weights: Annotated[str | None, typer.Option(help="Its weights, as for --weights.")] = None,
    target: Annotated[
        str | None, typer.Option(help="The class to explain, by name or index; by default the predicted one.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A picture to write (.png): both maps, and their difference.")
    ] = None,
) -> None:
    """Compare two composites, or two models, on a photograph: where rules differ, and where accounts of relevance part.

    `lrpfx report` with two composites shows their maps on the photograph, and their graphs.
    """
    names = composite or []
    if output is not None:
        format_of_picture(output)
        check_place(output)
    if other is not None and len(names) == 1:
        names *= 2
    if len(names) != 2:
        raise invalid(f"--composite is given {len(names)} times: pass it twice, for the two that are compared")
    if other is None and other_weights is not None:
        raise invalid("--other-weights are those of --other, which is missing")
    for name in names:
        check_composite(name, None)
        check_alone(name, "lrpfx explain and lrpfx dataset take --reference")
    options.check([] if target is None else [target])
    image = opened_in_rgb(photograph)
    with stages(f"loading {model}") as shown:
        given = model_named(model, options.weights, options.metadata, options.device)
        preprocess = given.required_preprocessing(options)
        known = given.names_of_classes(options.categories)
        if known is not None and target is not None:
            class_of(target, known)
        modules = [given.module("compare")]
        if other is not None:
            shown.begin(f"loading {other}")
        modules.append(
            modules[0] if other is None else model_named(other, other_weights, device=options.device).module("compare")
        )
        captures, found = Captures() if other is None else None, []
        wanted: int | None = None
        for module, name in zip(modules, names, strict=True):
            shown.begin(f"preparing {name}")
            chosen = composite_of(name, None, preprocess)
            explainer = Explainer(module, composite=chosen, preprocess=preprocess, categories=known)
            explainer.captures = captures
            if target is not None and wanted is None:
                wanted = class_of(target, explainer.categories)
            explanation = explainer(image, wanted)
            wanted = explanation.target.index  # the class of the first model, for both
            found.append((explainer.explain_model, explanation))
        shown.begin("comparing")
        (one, explanation), (another, _) = found
        comparison = lrpfx.compare(one, another, explanation.input[None], wanted)
    if output is not None:
        save_picture(comparison.picture(), output)
    say(f"relevance for {explanation.target}")
    say(comparison.summary)
    say_data({"target": explanation.target.name, **comparison.to_dict()})
    if comparison.shown:
        say_table(comparison.columns, comparison.shown)

"""`lrpfx draw`: the graph of a model's rules as a picture."""

from pathlib import Path
from typing import Annotated

import typer

import lrpfx
from lrpfx.command_line.models import model_named
from lrpfx.command_line.options import DEVICE, MODEL, SHAPE, WEIGHTS, CompositeOptions, example_of, invalid
from lrpfx.command_line.terminal import say, say_data, stages
from lrpfx.errors import InputError, os_errors
from lrpfx.reports.drawing import RulePicture
from lrpfx.support.files import check_place, written
from lrpfx.support.numbers import counted
from lrpfx.support.tensors import on_device_of

SUFFIXES = (".svg", ".png", ".pdf")


def draw(
    model: MODEL,
    *,
    rules: CompositeOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help=f"The file to write: {', '.join(SUFFIXES)}.")] = Path(
        "graph.svg"
    ),
    depth: Annotated[int | None, typer.Option(min=1, help="Modules at this depth become one node.")] = None,
    weights: WEIGHTS = None,
    shape: SHAPE = None,
    device: DEVICE = None,
) -> None:
    """Draw the graph of a model, every operation in the colour of its rule.

    Rules do not depend on weights, so a library's model has random ones unless --weights names others.
    """
    if output.suffix.lower() not in SUFFIXES:
        raise invalid(f"{output}: a drawing is written as {', '.join(SUFFIXES)}")
    check_place(output)
    form = output.suffix.lower().removeprefix(".")
    RulePicture().pipe(format=form)  # an error if Graphviz is missing, before the work begins
    rules.check()
    if shape is not None:
        example_of(shape, None)
    with stages(f"loading {model}") as shown:
        given = model_named(model, weights, device=device, random=True)
        module = given.module("draw")
        example = on_device_of(module, example_of(shape, given.preprocess))
        shown.begin("transforming")
        chosen = rules.chosen_or_default(given.preprocess)
        explain_model = lrpfx.transform(module, chosen, example_inputs=example)
        shown.begin("drawing")
        picture = lrpfx.draw(explain_model, depth=depth).pipe(format=form)
        with os_errors(InputError, output, "written"):
            written(output, picture)
    say_data({"file": output, "composite": explain_model.composite})
    say(f"{output}: {counted(len(explain_model.unfused_graph.nodes), 'node')}, {explain_model.composite}")

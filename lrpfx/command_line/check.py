"""`lrpfx check`: what would happen to a model, without compiling it."""

import typer

import lrpfx
from lrpfx.command_line.models import model_named
from lrpfx.command_line.options import DEVICE, MODEL, SHAPE, WEIGHTS, CompositeOptions, example_of
from lrpfx.command_line.terminal import in_options, say, say_data, stages
from lrpfx.support.tensors import on_device_of


def check(
    model: MODEL, *, rules: CompositeOptions, weights: WEIGHTS = None, shape: SHAPE = None, device: DEVICE = None
) -> None:
    """Report on a model before it is compiled: front ends, operators and rules. The exit status is 1 if there are problems.

    Rules do not depend on weights, so a library's model has random ones unless --weights names others.
    """
    rules.check()
    if shape is not None:
        example_of(shape, None)
    with stages(f"loading {model}") as shown:
        given = model_named(model, weights, device=device, random=True)
        module = given.module("check")
        example = on_device_of(module, example_of(shape, given.preprocess))
        shown.begin("checking")
        report = lrpfx.check(module, rules.chosen_or_default(given.preprocess), example_inputs=example)
    say(in_options(str(report)))
    say_data(report.to_dict())
    if not report.ok:
        raise typer.Exit(1)

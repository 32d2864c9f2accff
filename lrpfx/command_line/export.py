"""`lrpfx export`: a model and a composite in, the file of a program out."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

import lrpfx
from lrpfx.command_line.models import model_named
from lrpfx.command_line.options import (
    MODEL,
    SHAPE,
    CompositeOptions,
    ModelOptions,
    check_composite,
    composite_of,
    example_of,
    invalid,
)
from lrpfx.command_line.terminal import say, say_data, stages
from lrpfx.deploy.artefact import check_before_work, package, save, suffixes
from lrpfx.deploy.lowering import lower
from lrpfx.errors import first_lines
from lrpfx.images.stored_preprocessing import stored_form
from lrpfx.support.tensors import on_device_of

#: The composite of programs.
_DEFAULT = "epsilon_plus_flat"

TargetKind = Enum(
    "TargetKind", [("INDEX", "index"), ("TARGETS", "targets"), ("TOKEN", "token"), ("WEIGHTS", "weights"), ("MAX", "max")]
)
Reduction = Enum("Reduction", [("SUM", "sum"), ("ABSOLUTE", "absolute"), ("CHANNELS", "channels"), ("BYTES", "bytes")])


def export(
    model: MODEL,
    output: Annotated[Path, typer.Argument(help=f"The file to write: {' or '.join(suffixes())}.")],
    *,
    rules: CompositeOptions,
    options: ModelOptions,
    shape: SHAPE = None,
    target: Annotated[TargetKind, typer.Option(help="The target that the program takes.")] = TargetKind.INDEX,
    number_of_targets: Annotated[
        int | None, typer.Option(min=1, help="How many classes of each sample, with --target targets.")
    ] = None,
    record: Annotated[list[str] | None, typer.Option(help="Layer whose relevance is returned. May be repeated.")] = None,
    reduce: Annotated[Reduction | None, typer.Option(help="Reduction of relevance over channels.")] = None,
    balance: Annotated[bool, typer.Option("--balance", help="Return relevance of the input minus that of the output.")] = False,
    fixed_batch: Annotated[bool, typer.Option("--fixed-batch", help="Accept only the batch size of the shape.")] = False,
    input_range: Annotated[
        tuple[float, float] | None, typer.Option(help="Lowest and highest value of the input; makes rules cheaper.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile with AOTInductor into a .pt2 file, or for XNNPACK into a .pte file.")
    ] = False,
) -> None:
    """Lower a model with a composite, by default EpsilonPlusFlat, and write the program to a file.

    The file also holds the preprocessing of photographs and the names of the classes, if the model's library states them or
    options give them: `lrpfx run` and `lrpfx explain` apply them.
    """
    check_before_work(output, compiled=compile)
    options.check()
    check_composite(rules.composite or _DEFAULT, rules.setting)
    if shape is not None:
        example_of(shape, None)
    with stages(f"loading {model}"):
        given = model_named(model, options.weights, options.metadata, options.device)
    module = given.module("export")
    stated = given.preprocessing(options)
    preprocessing = None if stated is None else stored_form(stated)
    names = given.names_of_classes(options.categories)
    chosen = composite_of(rules.composite or _DEFAULT, rules.setting, preprocessing)
    example = example_of(shape, preprocessing)
    if example is None:
        raise invalid("--shape is missing, such as 1,3,224,224: the size of the model's input is not known")
    example = on_device_of(module, example)
    if preprocessing is not None:
        preprocessing = preprocessing.for_inputs(tuple(example.shape[1:]))
    if input_range is not None:
        example = input_range[0] + (input_range[1] - input_range[0]) * example
    try:
        with stages("running the model"), torch.no_grad():
            module(example)
    except (Exception, SystemExit) as error:
        wanted = ",".join(map(str, example.shape))
        raise invalid(f"{model} cannot run on an input of shape {wanted}: {first_lines(error)}") from error
    with stages("tracing the model"):
        explain_model = lrpfx.transform(module, chosen, example_inputs=example, input_range=input_range)
        for name, of_reference in explain_model.reference_names.items():
            raise invalid(
                f"{chosen} explains differences from a reference, which is an input of the program that this command does not "
                f"know: in Python, lrpfx.lower(explain_model, {{{name!r}: x, {of_reference!r}: reference}}), whose "
                "program lrpfx.save writes"
            )
        program = lower(
            explain_model,
            example,
            target=target.value,
            number_of_targets=number_of_targets,
            record=record or (),
            dynamic_batch=not fixed_batch,
            reduce=None if reduce is None else reduce.value,
            balance=balance,
        )
        write = package if compile else save
        path = write(program, output, preprocess=preprocessing, categories=names)
    say(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, self-test passed")
    say_data({"file": path, "preprocessing": None if preprocessing is None else preprocessing.to_dict()})
    say(f"preprocessing: {preprocessing or 'none is stored; lrpfx run will ask for --mean and --std'}")

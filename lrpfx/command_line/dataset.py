"""`lrpfx dataset`: explanations of all photographs in a folder, or other samples, as arrays in a store."""

import warnings
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from lrpfx.command_line.image_files import images_in
from lrpfx.command_line.models import model_named
from lrpfx.command_line.number_files import (
    NumberExplainers,
    NumberOptions,
    check_options_of_numbers,
    data_set_of,
    numbers_in,
)
from lrpfx.command_line.options import (
    BOX,
    MODEL,
    REFERENCE,
    CompositeOptions,
    ModelOptions,
    boxes_of,
    classes_of,
    invalid,
)
from lrpfx.command_line.spray import ClusterOptions, write_clusters
from lrpfx.command_line.terminal import say, say_data, stages
from lrpfx.datasets.data_set_run import attribute
from lrpfx.datasets.locations import location_of
from lrpfx.datasets.tables import checked_table_path, write_table
from lrpfx.datasets.view import Attributions
from lrpfx.errors import InputError, LrpfxWarning
from lrpfx.explanation.explainer import Explainer
from lrpfx.request.targets_of_samples import PREDICTED, TRUE
from lrpfx.support.files import check_place
from lrpfx.support.numbers import counted

#: Samples whose problem is printed.
_SHOWN = 10


Reduce = Enum("Reduce", [("NONE", "none"), ("SUM", "sum"), ("ABSOLUTE", "absolute"), ("CHANNELS", "channels")])
EngineName = Enum("EngineName", [("EMBEDDED", "embedded"), ("RAY", "ray")])
Precision = Enum("Precision", [("FLOAT16", "float16"), ("FLOAT32", "float32"), ("FLOAT64", "float64")])


def dataset(
    model: MODEL,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="A folder with photographs in it, or in folders in it; or with sounds (.wav) or volumes (.nii.gz), or a table "
            "(.csv) or an array (.npy) of samples.",
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="The store to write: a folder, in Zarr's format, or a path such as s3://bucket/store."
        ),
    ],
    *,
    rules: CompositeOptions,
    options: ModelOptions,
    numbers: NumberOptions,
    analysis: ClusterOptions,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="The class to explain, by name or index, `predicted`, the default, or `true` for that of its folder. Repeat "
            "it to explain several for each."
        ),
    ] = None,
    mask: Annotated[Path | None, typer.Option(hidden=True)] = None,
    box: BOX = None,
    record: Annotated[
        list[str] | None,
        typer.Option(help="A layer whose relevance is stored, or LAYER=sum or LAYER=channels for less of it. May be repeated."),
    ] = None,
    reduce: Annotated[
        Reduce, typer.Option(help="Store the sum of the input's relevance over channels, or one number for each channel.")
    ] = Reduce.NONE,
    dtype: Annotated[Precision, typer.Option(help="float16 is rounded to eleven bits, and smaller.")] = Precision.FLOAT32,
    reference: REFERENCE = None,
    scores: Annotated[int | None, typer.Option(min=1, help="Store the largest outputs only, so many of them.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="How many photographs run together.")] = 32,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="How many are written together; a killed run loses these.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that open photographs.")] = 0,
    engine: Annotated[
        EngineName,
        typer.Option(help="`ray` explains on the processes and machines of Ray, which the variable RAY_ADDRESS names."),
    ] = EngineName.EMBEDDED,
    table: Annotated[
        Path | None,
        typer.Option(help="Also write a table (.parquet) with the scores and the shares of relevance of each photograph."),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try photographs again that failed in a former run.")
    ] = False,
    spray: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Also cluster the photographs of each class by their relevance, as `lrpfx spray` does."
        ),
    ] = None,
) -> None:
    """Explain all photographs in a folder, and write relevance, outputs and predictions as arrays into a store.

    Run again after it was stopped, it goes on where it was. lrpfx.datasets.open reads the store, and so do zarr and xarray. A
    photograph that cannot be explained is there with its reason, the exit status is 2, and --retry-failed tries it again.
    Sounds and volumes are samples in the same way, and so are the rows of a table and the entries of an array along its first
    axis.
    """
    if mask is not None:
        raise invalid(
            "a mask is of one photograph, and a data set has one target for all: lrpfx explain and lrpfx report take --mask; "
            "--target alone is a class where it is predicted"
        )
    if table is not None:
        checked_table_path(table)
    recorded = dict(map(_recorded, record or []))
    if len(recorded) < len(record or []):
        raise invalid(f"--record names a layer twice: {', '.join(record or [])}")
    is_clustered = spray is not None or analysis.virelay is not None
    if is_clustered and (box or (target or [PREDICTED]) not in ([PREDICTED], [TRUE])):
        raise invalid("--spray and --virelay take the photographs of each class: pass --target predicted or --target true")
    if analysis.virelay is not None and scores is not None:
        raise invalid("--virelay shows whole outputs: leave out --scores")
    if analysis.virelay is not None and reduce is Reduce.CHANNELS:
        raise invalid("--virelay shows relevance over photographs, which --reduce channels leaves nothing of")
    analysis.check(folder, spray, output)
    place = location_of(output)
    if isinstance(place.path, Path):
        check_place(place.path, is_folder=True)
    named = [one for one in target or () if one not in (PREDICTED, TRUE)]
    options.check(named)
    if box and len(named) < len(target or ()):
        raise invalid("--box is of a class by name or index, or of any: leave out --target predicted and --target true")
    boxes_of(box or (), ())
    rules.check()
    compared = rules.compared_with(reference)
    files = numbers_in(folder) if folder.exists() else []
    if files:
        check_options_of_numbers(options)
        if box:
            raise invalid("--box is for photographs")
        if is_clustered:
            raise invalid("--spray and --virelay group photographs; lrpfx.datasets.spray groups other samples, in Python")
        data, content = data_set_of(files, numbers)
    else:
        numbers.check_unused()
        images_in([folder])
        data, content = folder, None
    with stages(f"loading {model}") as shown:
        given = model_named(model, options.weights, options.metadata, options.device)
        preprocess = None if files else given.required_preprocessing(options)
        known = given.names_of_classes(options.categories)
        if known is not None:
            classes_of(named, known)
        module = given.module("dataset")
        settings: dict[str, Any] = {
            "composite": rules.chosen(preprocess),
            "preprocess": preprocess,
            "categories": known,
            "batch_size": batch_size,
            "reference": compared,
        }
        made = (
            Explainer(module, **settings)
            if content is None
            else NumberExplainers(module, numbers, settings).for_content(content)
        )
        explainer: Explainer[Any] = made
        wanted: list[Any] = [
            one if one in (PREDICTED, TRUE) else classes_of([one], explainer.categories)[0] for one in target or [PREDICTED]
        ]
        wanted = wanted if not box else [*boxes_of(box, classes_of(named, explainer.categories))]
    with stages("preparing samples" if files else "preparing photographs", 0) as shown, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*could not be explained", LrpfxWarning)  # `_show` lists them
        found = attribute(
            explainer,
            data,
            output,
            target=wanted[0] if len(wanted) == 1 else None,
            targets=wanted if len(wanted) > 1 else None,
            record=recorded,
            reduce=None if reduce is Reduce.NONE else reduce.value,
            dtype=dtype.value,
            scores=scores,
            block_size=block_size,
            workers=workers,
            engine=engine.value,
            retry_failed=retry_failed,
            progress=shown.report,
        )
    if table is not None:
        with stages("writing the table"):
            path = write_table(found, table)
        say(f"table: {path}")
    if is_clustered:
        write_clusters(found, folder, spray, analysis, preprocess, model)
    _show(found, "sample" if files else "photograph")


def _recorded(text: str) -> tuple[str, str | None]:
    """A layer and its reduction."""
    name, equals, reduction = text.rpartition("=")
    return (name, reduction) if equals else (text, None)


def _show(found: Attributions, what: str) -> None:
    """Print what is in the store, and raise `InputError` for samples that failed. `what`: a sample, in words."""
    errors, keys = found.errors, found["key"]
    say(f"rules: {found.manifest['composite']}")
    say(f"{len(found) - len(errors)} of {counted(len(found), what)} explained: {found.path}")
    problems = {keys[number]: reason for number, reason in errors.items()}
    facts = {"store": found.path, "composite": found.manifest["composite"], "explained": len(found) - len(errors)}
    say_data({**facts, "problems": problems})
    if errors:
        lines = [f"{keys[number]}: {reason}" for number, reason in list(errors.items())[:_SHOWN]]
        rest = [f"and {len(errors) - _SHOWN} others, in the array 'error'"] if len(errors) > _SHOWN else []
        raise InputError(f"these {what}s could not be explained:\n  " + "\n  ".join(lines + rest), topic="results-of-commands")

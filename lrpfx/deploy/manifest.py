"""Manifests: the descriptions of programs in files, and the checks that they must pass."""

import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from lrpfx.deploy import self_test
from lrpfx.deploy.image_facts import check_image_facts
from lrpfx.deploy.lowering import FIXED, TARGETS
from lrpfx.deploy.program_facts import argument_examples, facts_of, open_dimensions
from lrpfx.deploy.verification import tolerance_of
from lrpfx.errors import ArtefactError, InputError, InputTypeError, LrpfxWarning
from lrpfx.runtime.compiled_graph import PassRecord
from lrpfx.support.stored_arrays import RefusedError

logger = logging.getLogger(__name__)

FORMAT = 12
#: The formats that are read, each with the entries that older ones lack.
READABLE: dict[int, tuple[str, ...]] = {
    7: (),
    8: ("preprocessing", "categories"),
    9: ("conditions",),
    10: ("weights", "runtimes"),
    11: ("buffers",),
    12: ("explained",),
}

#: The largest difference of a result that a self-test tolerates, relative to its norm, whatever a file says.
MOST_TOLERATED = 0.1
#: If rounding changes relevance by more than this, saving warns.
UNDETERMINED = 0.01


def checked_facts(program: ExportedProgram) -> dict[str, Any]:
    if not isinstance(program, ExportedProgram):
        raise InputTypeError(f"a program is what lrpfx.lower returns, not a {type(program).__name__}", topic="lowering")
    facts = facts_of(program)
    if facts is None:
        raise ArtefactError(
            "the program was not made by lrpfx.lower, so its arguments and results are unknown", topic="lowering"
        )
    return facts


def warn_undetermined(title: str, change: float, allowed: str = "") -> None:
    """Warn of relevance that rounding changes by such a share of its norm."""
    warnings.warn(
        f"the relevance of {title} is numerically undetermined: rounding alone changes it by up to {change:.1e} of its norm, "
        f"so another runtime or machine may give another map.{allowed} Rules with a larger epsilon or stabilizer change less",
        LrpfxWarning,
        stacklevel=7,
    )


def describe(
    program: ExportedProgram,
    kind: str,
    runtimes: Mapping[str, str],
    history: Sequence[PassRecord],
    photographs: Mapping[str, Any],
) -> tuple[dict[str, Any], bytes]:
    """The manifest without hashes, and the self-test.

    `runtimes`: the versions of the packages that run the file. `history`: the stages that made the program. `photographs`: its
    preprocessing and categories, if any.
    """
    logger.info("recording a self-test")
    facts = checked_facts(program)
    tolerance = min(facts["tolerance"], MOST_TOLERATED)
    arguments = argument_examples(program)[0]
    opened = open_dimensions(program)
    test, results = self_test.recorded(program.module(), arguments, facts["dynamic_batch"], tolerance)
    if facts["tolerance"] > max(UNDETERMINED, tolerance_of(results["output"].dtype)):
        warn_undetermined(facts["title"], facts["tolerance"], f" The file's self-test allows a difference of {tolerance:.1e}.")
    manifest = {
        **photographs,
        "format": FORMAT,
        "kind": kind,
        "torch": str(torch.__version__),
        "runtimes": dict(runtimes),
        **facts,
        "tolerance": tolerance,
        "arguments": {name: _description(value, opened[name]) for name, value in arguments.items()},
        "results": {name: _description(value, opened[name]) for name, value in results.items()},
        "self_test": list(test.sizes),
        "stages": [f"{stage.stage} {stage.name}: {stage.matches}" for stage in history],
    }
    try:
        check_image_facts(manifest)
    except RefusedError as error:
        raise InputError(f"the file would not be loaded: {error}", topic="preprocessing") from error
    return manifest, test.to_bytes()


def _description(value: torch.Tensor, opened: Sequence[int]) -> dict[str, Any]:
    """The shape, with None for sizes that may vary, and the dtype."""
    shape = [None if number in opened else size for number, size in enumerate(value.shape)]
    return {"shape": shape, "dtype": str(value.dtype).removeprefix("torch.")}


def manifest_of(text: str | bytes) -> dict[str, Any]:
    """The manifest in `text`, with all fields checked. Raises `RefusedError`."""
    manifest = json.loads(text)
    if not isinstance(manifest, dict):
        raise RefusedError("its manifest is not a JSON object")
    format = manifest.get("format")
    if type(format) is not int or format not in READABLE:
        raise RefusedError(
            f"it has format {format!r}, but this version of lrpfx reads the formats {min(READABLE)} to {max(READABLE)}"
        )
    if any(key in manifest for later, keys in READABLE.items() if later > format for key in keys):
        raise RefusedError("its manifest has entries that its format does not have")
    manifest = {**{"conditions": {}, "weights": None, "runtimes": {}, "buffers": {}, "explained": None}, **manifest}
    for key, kind in _MANIFEST_KEYS.items():
        if not isinstance(manifest.get(key), kind):
            raise RefusedError(f"its manifest has no {key}, or an invalid value for it")
    for role in ("arguments", "results"):
        for name, described in manifest[role].items():
            sizes, dtype = described["shape"], described["dtype"]
            valid = dtype in DTYPES and all(size is None or (type(size) is int and size >= 0) for size in sizes)
            if not valid or (role == "arguments" and not sizes):
                raise RefusedError(f"its manifest does not give a valid shape and dtype for {name}")
    _check_sizes(manifest)
    if not all(isinstance(name, str) and name in manifest["arguments"] for name in manifest["masks"]):
        raise RefusedError("its manifest does not name the arguments that are masks")
    _check_conditions(manifest)
    masks, results = manifest["conditions"], manifest["results"]
    names = [name for name in manifest["arguments"] if name not in masks]
    if not 0 < manifest["tolerance"] < math.inf:
        raise RefusedError(f"its manifest does not give a valid tolerance: {manifest['tolerance']}")
    manifest["tolerance"] = min(manifest["tolerance"], MOST_TOLERATED)
    if not names or "output" not in results or manifest["target"] not in (*TARGETS, FIXED):
        raise RefusedError("its manifest does not describe the program's arguments and results")
    has_target = names[-1] == "target" if manifest["target"] not in ("max", FIXED) else "target" not in names
    dimensions = len(results["output"]["shape"])
    of_classes = dimensions == 2 or dimensions >= 4  # a number for each class, or for each class at places
    fits = has_target and {"index": of_classes, "targets": of_classes, "token": dimensions == 3}.get(manifest["target"], True)
    if fits and manifest["target"] == "targets":
        fits = [type(size) for size in manifest["arguments"]["target"]["shape"][1:]] == [int]
    if not fits:
        raise RefusedError("its manifest does not describe the program's target")
    described = [manifest["canonizers"], manifest.get("stages", []), *manifest["merged"].values()]
    described += [list(manifest[key].values()) for key in ("rules", "runtimes")]
    if not all(isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in described):
        raise RefusedError("its manifest does not list the rules of its nodes")
    explained = manifest["explained"]
    if explained is not None and not (
        sorted(explained) == ["sizes", "target"]
        and isinstance(explained["target"], str)
        and isinstance(explained["sizes"], list)
        and all(type(size) is int and size > 0 for size in explained["sizes"])
        and len(explained["sizes"]) <= len(results["output"]["shape"])
    ):
        raise RefusedError("its manifest does not describe the target that it explains")
    check_image_facts(manifest)
    strange = next((text for text in _texts_of(manifest) if not text.isprintable()), None)
    if strange is not None:
        raise RefusedError(f"its manifest has {strange!r}, which cannot be printed")
    return manifest


def _check_sizes(manifest: dict[str, Any]) -> None:
    """Raise `RefusedError` unless each size that may vary, except batches, is one of those in `sizes`, with its limits.

    The first dimensions of arguments are batches if the program takes any batch.
    """
    limited = []
    for shared in manifest["sizes"]:
        limits = shared["lower"], shared["upper"]
        if type(limits[0]) is not int or not (limits[1] is None or type(limits[1]) is int) or not shared["of"]:
            raise RefusedError("its manifest does not give valid limits of sizes")
        limited += [(name, number) for name, number in shared["of"]]
    shapes = {name: enumerate(described["shape"]) for name, described in manifest["arguments"].items()}
    first = 1 if manifest["dynamic_batch"] else 0
    varying = [(name, number) for name, shape in shapes.items() for number, size in shape if size is None and number >= first]
    if sorted(limited) != sorted(varying):
        raise RefusedError("its manifest does not give the limits of all sizes")


def _check_conditions(manifest: dict[str, Any]) -> None:
    """Raise `RefusedError` unless `conditions` names the last arguments, with places, in sizes of others."""
    conditions, arguments = manifest["conditions"], manifest["arguments"]
    shared = [[name for name, _ in one["of"]] for one in manifest["sizes"]]
    of_inputs = all(any(name not in conditions for name in names) for names in shared)
    last = list(arguments)[len(arguments) - len(conditions) :]
    edges = [place for place in conditions.values() if not isinstance(place, str)]
    valid = all(type(place) is list and len(place) == 2 and all(isinstance(name, str) for name in place) for place in edges)
    floating = all("float" in arguments[name]["dtype"] for name in last)
    if list(conditions) != last or "target" in conditions or not (valid and floating and of_inputs):
        raise RefusedError("its manifest does not describe the masks of its conditions")
    if not conditions.keys().isdisjoint(manifest["masks"]):
        raise RefusedError("its manifest does not name the arguments that are masks")
    batches = {arguments[name]["shape"][0] for name in arguments}
    if conditions and len(batches) > 1:
        raise RefusedError("its manifest gives different batches for the masks of its conditions")


def _texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts_of([*value, *value.values()])
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_of(inner)


_MANIFEST_KEYS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("kind", "torch", "lrpfx", "title", "composite", "target"), str),
    **dict.fromkeys(("arguments", "results", "rules", "merged", "conditions", "runtimes", "buffers"), dict),
    **dict.fromkeys(("reduce", "weights"), (str, type(None))),
    **dict.fromkeys(("canonizers", "self_test", "sizes", "masks"), list),
    **{"explained": (dict, type(None)), "dynamic_batch": bool, "tolerance": float},
}
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")

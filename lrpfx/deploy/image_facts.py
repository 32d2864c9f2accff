"""The preprocessing of images and the names of classes in the manifests of programs."""

from collections.abc import Mapping, Sequence
from typing import Any

from lrpfx.deploy.program import inputs_of
from lrpfx.errors import InputTypeError
from lrpfx.images.stored_preprocessing import preprocessing_in, stored_form
from lrpfx.support.stored_arrays import RefusedError

_LONGEST_NAME = 1000  # characters of a category


def check_image_facts(manifest: Mapping[str, Any]) -> None:
    """Raise `RefusedError` unless the stored preprocessing and categories are valid and fit the program."""
    preprocessing = preprocessing_in(manifest)
    if preprocessing is not None:
        shape = image_shape(manifest)
        if shape is None:
            raise RefusedError(
                "it has a preprocessing of photographs, but does not take one input (batch, channels, height, width)"
            )
        if shape[0] != len(preprocessing.mean):
            raise RefusedError(f"its preprocessing has {len(preprocessing.mean)} channels, but the program takes {shape[0]}")
        made = preprocessing.output_size or (None, None)
        if any(want is not None and got != want for want, got in zip(shape[1:], made, strict=True)):
            wanted = "×".join("any" if size is None else str(size) for size in shape[1:])
            raise RefusedError(f"its preprocessing gives inputs of another size than {wanted}, which the program takes")
    categories = manifest.get("categories")
    if categories is None:
        return
    if not isinstance(categories, list) or not all(isinstance(name, str) and name.isprintable() for name in categories):
        raise RefusedError("its categories are not a list of printable names")
    if not all(0 < len(name) <= _LONGEST_NAME for name in categories):
        raise RefusedError(f"its categories have names that are empty, or longer than {_LONGEST_NAME} characters")
    classes = manifest["results"]["output"]["shape"]
    if len(classes) not in (2, 4) or classes[1] != len(categories):
        raise RefusedError(f"it has {len(categories)} categories, but its output has shape {classes}")


def image_shape(manifest: Mapping[str, Any]) -> list[int | None] | None:
    """Channels, height and width of the images that a program takes, None for open sizes; None if it takes no images."""
    inputs = list(inputs_of(manifest).values())
    if len(inputs) != 1 or len(inputs[0]["shape"]) != 4 or not inputs[0]["dtype"].startswith(("float", "bfloat")):
        return None
    return list(inputs[0]["shape"][1:])


def image_facts(preprocess: Any, categories: Any) -> dict[str, Any]:
    """The part of a manifest that is about images. It is checked together with the rest."""
    part: dict[str, Any] = {}
    if preprocess is not None:
        part["preprocessing"] = stored_form(preprocess).to_dict()
    if categories is not None:
        if isinstance(categories, str) or not isinstance(categories, Sequence):
            raise InputTypeError(
                f"categories are a list of names, not {type(categories).__name__}", topic="classes-and-their-names"
            )
        part["categories"] = [str(name) for name in categories]
    return part

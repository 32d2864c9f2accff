"""Running a model for an explanation: an explainable module, or a program that was exported."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lrpfx.attribution.compute import attribute
from lrpfx.attribution.targets import relevance_of_class
from lrpfx.deploy.runner import Runner
from lrpfx.errors import InputError, InputTypeError
from lrpfx.explanation.explanation import Answer, Array, category_of, index_of
from lrpfx.runtime.explain_module import explainable

#: A class by index or by name, or None for the class with the largest output.
Class = int | str | None


class Wanted:
    """The classes to explain for each image: one for all, one for each, or several for all."""

    def __init__(self, target: Any, targets: Any) -> None:
        if targets is not None:
            if target is not None:
                raise InputError("target= is one class for each image, targets= are several for each; pass one of them")
            if isinstance(targets, (str, bytes)) or not hasattr(targets, "__len__") or not len(targets):
                raise InputTypeError(f"targets are several classes, such as [281, 285], not {targets!r}")
        self.several = None if targets is None else _as_list(targets)
        self.each = _as_list(target) if isinstance(target, (list, tuple, np.ndarray, torch.Tensor)) else None
        self.target = None if self.each is not None else target

    def of_image(self, number: int) -> list[Class]:
        """The classes of one image."""
        if self.several is not None:
            return self.several
        if self.each is None:
            return [self.target]
        if number >= len(self.each):
            raise InputError(f"there are {len(self.each)} targets, one for each image, but more images")
        return [self.each[number]]

    def check_number(self, images: int) -> None:
        """Raise `InputError` unless there are as many targets as images."""
        if self.each is not None and len(self.each) != images:
            raise InputError(
                f"there are {len(self.each)} targets, one for each image, but {images} images; for several classes of each "
                "image, pass targets="
            )


def _as_list(classes: Any) -> list[Class]:
    if isinstance(classes, (np.ndarray, torch.Tensor)):
        if classes.ndim > 1:
            raise InputError(f"targets have one axis, but this has shape {tuple(classes.shape)}")
        return list(classes.reshape(-1).tolist())
    return list(classes)


@dataclass(frozen=True)
class Run:
    """The results for a batch: the outputs, the answers for each image, and the rules."""

    outputs: list[Array]
    answers: list[tuple[Answer, ...]]
    rules: str


def placed_for(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The inputs in the dtype and on the device of a model."""
    like = next((one for one in module.parameters() if one.is_floating_point()), inputs)
    return inputs.to(device=like.device, dtype=like.dtype)


def run_module(
    module: nn.Module,
    inputs: torch.Tensor,
    classes: list[list[Class]],
    categories: Sequence[str] | None,
    record: Sequence[str],
) -> Run:
    """Explain a batch of inputs with an explainable module."""
    columns = [list(column) for column in zip(*classes, strict=True)]
    seeds = [_target_of(column, categories) for column in columns]
    placed = placed_for(module, inputs)
    chosen = {"targets": seeds} if len(seeds) > 1 else {"target": seeds[0]}
    found = attribute(module, placed, **chosen, record=record)
    results = {"output": found.output, "relevance": found.relevance, **found.layers}
    arrays = {name: as_array(value) for name, value in results.items()}
    outputs = checked_output(arrays.pop("output"))
    rows = [{name: value[place] if len(seeds) > 1 else value for name, value in arrays.items()} for place in range(len(seeds))]
    return Run(list(outputs), _answers(outputs, columns, rows, categories), explainable(module, "explain").composite)


def _target_of(column: Sequence[Class], categories: Sequence[str] | None) -> Any:
    """The target for `lrpfx.attribute`: one class for each input."""
    if all(one is None for one in column):
        return None
    if None not in column and categories is not None:
        return torch.tensor([index_of(one, categories, len(categories)) for one in column])

    def seed(output: torch.Tensor) -> torch.Tensor:
        checked_output(output)
        best = output.argmax(1).tolist()
        chosen = [
            best[place] if one is None else index_of(one, categories, output.shape[1]) for place, one in enumerate(column)
        ]
        return relevance_of_class(output, torch.tensor(chosen, device=output.device))

    return seed


def run_program(
    runner: Runner,
    inputs: torch.Tensor,
    classes: list[list[Class]],
    categories: Sequence[str] | None,
    record: Sequence[str],
) -> Run:
    """Explain a batch of inputs with a program that was exported.

    A batch that is smaller than the program's, if that is fixed, is filled up with copies.
    """
    manifest = runner.manifest
    results = manifest["results"]
    if manifest["target"] not in ("index", "max") or "relevance" not in results:
        raise InputError(
            "the program was not exported for classes of images: lrpfx.lower(..., target='index') explains one class of each"
        )
    if results["relevance"]["dtype"] == "uint8":
        raise InputError("the program returns pictures of relevance in bytes; export it without reduce='bytes'")
    missing = [name for name in record if name not in results]
    if missing:
        raise InputError(f"the program does not record {missing[0]!r}; export it with lrpfx.lower(..., record={missing!r})")
    columns = [list(column) for column in zip(*classes, strict=True)]
    if manifest["target"] == "max" and any(one is not None for column in columns for one in column):
        raise InputError("the program explains the largest output only; export it with lrpfx.lower(..., target='index')")
    described = next(iter(manifest["arguments"].values()))
    count, size = len(inputs), described["shape"][0] or len(inputs)
    places = [place % count for place in range(size)]
    inputs = inputs.to(getattr(torch, described["dtype"]))[places]
    rows, outputs = [], None
    for column in columns:
        column = [column[place] for place in places]
        found = runner(inputs) if manifest["target"] == "max" else _run_index(runner, inputs, column, categories)
        arrays = {name: as_array(value)[:count] for name, value in found.items()}
        outputs = checked_output(arrays.pop("output"))
        rows.append({name: value for name, value in arrays.items() if name == "relevance" or name in record})
    assert outputs is not None
    return Run(list(outputs), _answers(outputs, columns, rows, categories), str(manifest.get("composite", "")))


def _run_index(runner: Runner, inputs: torch.Tensor, column: Sequence[Class], categories: Sequence[str] | None) -> Any:
    classes = runner.manifest["results"]["output"]["shape"][-1]
    chosen = [0 if one is None else index_of(one, categories, classes) for one in column]
    found = runner(inputs, torch.tensor(chosen))
    if None in column:
        best = found["output"].argmax(1).tolist()
        resolved = [best[place] if one is None else chosen[place] for place, one in enumerate(column)]
        found = found if resolved == chosen else runner(inputs, torch.tensor(resolved))
    return found


def _answers(
    outputs: Array, columns: list[list[Class]], rows: list[dict[str, Array]], categories: Sequence[str] | None
) -> list[tuple[Answer, ...]]:
    """The answers for each image: one for each column of classes."""
    if categories is not None and len(categories) != outputs.shape[1]:
        raise InputError(f"categories= has {len(categories)} names of classes, but the output has {outputs.shape[1]} classes")

    def answer(place: int, one: Class, arrays: dict[str, Array]) -> Answer:
        output = outputs[place]
        index = int(output.argmax()) if one is None else index_of(one, categories, len(output))
        layers = {name: value[place] for name, value in arrays.items()}
        relevance = layers.pop("relevance")
        return Answer(category_of(output, index, categories), relevance if relevance.ndim > 2 else relevance[None], layers)

    return [
        tuple(answer(place, column[place], arrays) for column, arrays in zip(columns, rows, strict=True))
        for place in range(len(outputs))
    ]


def as_array(value: torch.Tensor) -> Array:
    """A tensor as an array; in float32 if it is bfloat16, which NumPy does not have."""
    value = value.detach().cpu()
    return value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()


def checked_output(output: Any) -> Any:
    """An output, if it has the form (batch, classes)."""
    if output.ndim != 2:
        raise InputError(
            f"the model returns an output of shape {tuple(output.shape)}, not (batch, classes); lrpfx.attribute explains "
            "outputs of any shape"
        )
    return output

"""Targets: what to explain of a model's output, as relevance of that output."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from lrpfx.errors import InputError, InputTypeError
from lrpfx.ir.node import floating_tensors, is_floating, nodes_in, output_node
from lrpfx.passes import final_probabilities
from lrpfx.runtime.multipliers import multiplier_from
from lrpfx.support.tensors import not_dense

_ALMOST_ZERO = 1e-30  # a normal number in float32
FUNCTION = "f(output)"  # what a user's function as `output=` chooses, in messages

Index = int | np.integer[Any]
Array = torch.Tensor | np.ndarray[Any, Any]
Contrast = Mapping[Any, float]  # class or token, an `Index` -> weight
Class = Index | Array | Contrast | None
OneTarget = Class | tuple[Index | Array, Class] | Callable[[torch.Tensor], torch.Tensor]
Target = OneTarget | Sequence[OneTarget]  # one for all samples, or a list with one for each
Targets = Sequence[Target] | Array  # several for each sample
OutputSelector = int | str | Callable[[Any], torch.Tensor] | None  # of several outputs


def listed(targets: Any) -> list[Any]:
    """Several targets as a list."""
    found = without_arrays(targets)
    if isinstance(found, torch.Tensor) and found.ndim:
        found = list(found)
    if not isinstance(found, Sequence) or isinstance(found, (str, bytes)):
        raise InputTypeError(
            f"targets are several, such as [0, 1], not {type(targets).__name__}; for one, pass target=", topic="targets"
        )
    if not found:
        raise InputError("the list of targets is empty", topic="targets")
    return list(found)


def without_arrays(target: Any) -> Any:
    """A target with plain numbers and tensors in place of NumPy's, also in tuples, lists and dicts."""
    if isinstance(target, np.generic):
        return target.item()
    if isinstance(target, np.ndarray):
        try:
            return torch.as_tensor(target)
        except TypeError as error:
            raise InputTypeError(
                f"a target is an array of dtype {target.dtype}, which torch does not have", topic="targets"
            ) from error
    if isinstance(target, (tuple, list)):
        items = [without_arrays(item) for item in target]
        return tuple(items) if isinstance(target, tuple) else items
    if isinstance(target, Mapping):
        return {without_arrays(key): without_arrays(value) for key, value in target.items()}
    return target


def relevance_of_output(output: torch.Tensor, target: Target, chosen: str = "output") -> torch.Tensor:
    """Relevance of the output, with its shape and dtype. `chosen`: how `output` is chosen among the outputs, for messages."""
    output = output.detach()
    target = without_arrays(target)
    if isinstance(target, torch.Tensor) and not_dense(target) is not None:
        raise InputTypeError(f"the target is {not_dense(target)}", topic="targets")
    if callable(target) and not isinstance(target, torch.Tensor):
        target = without_arrays(target(output))
        if not isinstance(target, torch.Tensor) or target.shape != output.shape:
            shape = tuple(target.shape) if isinstance(target, torch.Tensor) else type(target).__name__
            raise InputError(
                f"the target function returned {shape} for an output of shape {tuple(output.shape)}", topic="targets"
            )
    if isinstance(target, list):
        return _relevance_by_sample(output, target)
    if isinstance(target, torch.Tensor) and target.is_floating_point():
        if target.shape != output.shape:
            several = "; several targets are passed as targets=" if target.shape[1:] == output.shape else ""
            raise InputError(
                f"the target has shape {tuple(target.shape)}, but the output has {tuple(output.shape)}{several}",
                topic="targets",
            )
        if not torch.isfinite(target).all():
            raise InputError("the target has values that are not finite", topic="values-not-finite")
        return target.to(output)
    if output.ndim == 3:
        return _relevance_at_position(output, target)
    if output.ndim < 2 and target is None:
        return output  # one value for each sample
    if output.ndim != 2:
        raise InputError(
            f"a class index needs an output of shape (batch, classes), but it is {tuple(output.shape)}; "
            f"{one_place(output.ndim, chosen)}, or give lrpfx.attribute the relevance of the output as the target: a tensor of "
            "its shape, or a function of it",
            topic="targets",
        )
    if isinstance(target, Mapping):
        return _relevance_of_contrast(output, target)
    return relevance_of_class(output, _class_indices(output, target))


def multiplier_of_output(output: torch.Tensor, seed: torch.Tensor, target: Target) -> torch.Tensor:
    """Relevance of the output divided by the output, with its shape and dtype. `seed`: the relevance, by `relevance_of_output`.

    Where the output is 0, it is the weight of the entry for targets by index and functions that weigh it, and 0 for others.
    """
    output, target = output.detach(), without_arrays(target)
    found = multiplier_from(output, seed)
    zeros = output == 0
    if (isinstance(target, torch.Tensor) and target.is_floating_point()) or not bool(zeros.any()):
        return found
    almost = output.to(torch.promote_types(output.dtype, torch.float32)).masked_fill(zeros, _ALMOST_ZERO)
    weighed = relevance_of_output(almost, target)
    is_weighed = zeros & (weighed.abs() < _ALMOST_ZERO**0.5)  # no number that a function sets there
    return torch.where(is_weighed, (weighed / almost).to(output), found)


def one_place(dimensions: int, chosen: str = "output") -> str:
    """How to choose a value for each class from an output of so many dimensions, for messages."""
    if dimensions < 2:
        return "it has one value for each sample, which target=None explains"
    named = ", with your function f" if chosen == FUNCTION else ""
    return f"choose a place: output=lambda output: {chosen}{index_of_place(dimensions)}{named}"


def index_of_place(dimensions: int) -> str:
    """The index of the first place of an output of so many dimensions, as Python code."""
    return f"[:, :{', 0' * (dimensions - 2)}]"


def expression_of(result: Any, selector: OutputSelector) -> str:
    """How an output is chosen among those of a model, as Python code, for messages."""
    if callable(selector):
        return FUNCTION
    if selector is None and isinstance(result, Mapping):
        selector = next((name for name in (*_EXPLAINED, *result) if is_floating(result.get(name))), None)
    if selector is None:
        named = next((name for name in _EXPLAINED if is_floating(_item(result, name))), "")
        return f"output.{named}" if named else "output"
    is_attribute = isinstance(selector, str) and not isinstance(result, Mapping)
    return f"output.{selector}" if is_attribute else f"output[{selector!r}]"


def _relevance_by_sample(output: torch.Tensor, targets: list[Any]) -> torch.Tensor:
    """Relevance of a target of its own for each sample."""
    if len(targets) != len(output):
        raise InputError(
            f"a list as the target has one entry for each sample, but it has {len(targets)} and the batch is {len(output)}; to "
            "explain several targets of each sample, pass them as targets=",
            topic="targets",
        )
    if output.ndim == 3:
        for one in targets:
            _check_place(output, one)
    strange = [one for one in targets if isinstance(one, list) or callable(one) or (isinstance(one, torch.Tensor) and one.ndim)]
    if strange:
        raise InputTypeError(
            f"the target of one sample is an index, a position and a token, a dict of weights or None, not "
            f"{type(strange[0]).__name__}; tensors and functions are targets of the whole batch",
            topic="targets",
        )
    if not targets:
        raise InputError("the list of targets is empty", topic="targets")
    if output.ndim == 2 and all(isinstance(one, int) and not isinstance(one, bool) for one in targets):
        return relevance_of_class(output, _class_indices(output, torch.tensor(targets)))
    return torch.cat([relevance_of_output(output[place : place + 1], one) for place, one in enumerate(targets)])


def _check_place(output: torch.Tensor, target: Any) -> None:
    """Raise `InputError` unless the target is a position and a token. Output (batch, sequence, vocabulary)."""
    if not isinstance(target, tuple) or len(target) != 2:
        raise InputError(
            f"the output has shape {tuple(output.shape)}: the target is (position, token), (position, {{token: weight, ...}}), "
            "a list with one of these for each sample, a tensor of the output's shape, or a function of the output; several "
            "targets of each sample are passed as targets=",
            topic="targets",
        )


def _relevance_at_position(output: torch.Tensor, target: Any) -> torch.Tensor:
    """Relevance of one position of each sequence, zero elsewhere. Output (batch, sequence, vocabulary)."""
    _check_place(output, target)
    position, token = target
    batch, length, _ = output.shape
    if isinstance(position, bool) or not isinstance(position, (int, torch.Tensor)):
        raise InputTypeError(f"a position is an index or a tensor of indices, not {type(position).__name__}", topic="targets")
    relevance = torch.zeros_like(output)
    if isinstance(position, int):
        if not -length <= position < length:
            raise InputError(f"position {position} is out of range: the output has {length} positions", topic="targets")
        relevance[:, position] = relevance_of_output(output[:, position], token)
        return relevance
    places = torch.as_tensor(position, device=output.device)
    if places.is_floating_point() or places.dtype == torch.bool:
        raise InputTypeError(f"positions are integers, not a tensor of {places.dtype}", topic="targets")
    places = places.long()  # small integers do not hold all positions, and some cannot be compared
    places = places.expand(batch) if places.ndim == 0 else places
    if places.shape != (batch,):
        raise InputError(f"the positions have shape {tuple(places.shape)}, but the batch is {batch}", topic="targets")
    outside = places[(places < -length) | (places >= length)]
    if outside.numel():
        raise InputError(f"position {int(outside[0])} is out of range: the output has {length} positions", topic="targets")
    samples = torch.arange(batch, device=output.device)
    relevance[samples, places % length] = relevance_of_output(output[samples, places % length], token)
    return relevance


def _relevance_of_contrast(output: torch.Tensor, weights: Contrast) -> torch.Tensor:
    """The weighted outputs of several classes, zero elsewhere. Output (batch, classes)."""
    check_contrast(weights)
    total = torch.zeros_like(output)
    for index, weight in weights.items():
        if index is None:
            raise InputTypeError("a contrast names its classes by index", topic="targets")
        total += weight * relevance_of_class(output, _class_indices(output, index))
    return total


def check_contrast(weights: Contrast) -> None:
    """Raise `InputError` unless a contrast has classes, each with a finite number."""
    if not weights:
        raise InputError("a contrast has at least one class: {class: weight, ...}", topic="targets")
    for index, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise InputTypeError(f"the weight of class {index} is a finite number, not {weight!r}", topic="targets")


def _class_indices(output: torch.Tensor, target: Any) -> torch.Tensor:
    """A class index for each sample. Shape (batch,)."""
    batch, classes = output.shape
    if target is None:
        return output.argmax(1)
    if isinstance(target, bool) or not isinstance(target, (int, torch.Tensor)):
        raise InputTypeError(
            f"a target is an index, a list or tensor with one for each sample, a dict of weights, a function or None, not "
            f"{type(target).__name__}; several targets of each sample are passed as targets=",
            topic="targets",
        )
    if isinstance(target, int) and not 0 <= target < classes:
        raise InputError(f"target {target} is out of range: the output has {classes} classes", topic="targets")
    indices = torch.as_tensor(target, device=output.device)
    if indices.dtype == torch.bool:
        raise InputTypeError("the target is a tensor of bool; class indices are integers", topic="targets")
    indices = indices.long()  # small integers do not hold all classes, and some cannot be compared
    if indices.ndim == 0:
        indices = indices.expand(batch)
    if indices.shape != (batch,):
        raise InputError(f"target indices have shape {tuple(indices.shape)}, but the batch is {batch}", topic="targets")
    outside = indices[(indices < 0) | (indices >= classes)]
    if outside.numel():
        raise InputError(f"target {int(outside[0])} is out of range: the output has {classes} classes", topic="targets")
    return indices


def relevance_of_class(output: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The output of one class per sample, zero elsewhere. Output (batch, classes), indices (batch,)."""
    classes = torch.arange(output.shape[1], device=output.device)
    return output * (classes == indices[:, None]).to(output)


def select_output(result: Any, selector: OutputSelector) -> torch.Tensor:
    """The tensor to explain among the outputs of a model."""
    chosen = result
    if callable(selector):
        chosen = selector(result)
    elif selector is not None:
        try:
            is_attribute = isinstance(selector, str) and not isinstance(result, Mapping)
            chosen = getattr(result, str(selector)) if is_attribute else result[selector]
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise InputError(
                f"the model's output has no {selector!r}; it is {_describe_output(result)}", topic="choice-of-output"
            ) from error
    if isinstance(chosen, torch.Tensor):
        if chosen.is_complex():
            raise InputTypeError(
                f"the output has dtype {chosen.dtype}, which carries no relevance; let the model return real numbers, such as "
                "z.abs(), or torch.view_as_real(z) for both parts",
                topic="choice-of-output",
            )
        if not chosen.is_floating_point():
            raise InputTypeError(f"the output has dtype {chosen.dtype}, which carries no relevance", topic="choice-of-output")
        return chosen
    tensors = floating_tensors(chosen)
    if selector is None:
        named = [_item(chosen, name) for name in _EXPLAINED]
        tensors = [one for one in named if is_floating(one)][:1] or tensors
        if len(tensors) == 1:
            return tensors[0]
    raise InputTypeError(
        f"attribute explains one tensor, but the model returns {_describe_output(chosen)}; choose one with output=, by its "
        "index, its key or attribute, or a function",
        topic="choice-of-output",
    )


#: The output to explain among several, if it has one of these names.
_EXPLAINED = ("logits", "last_hidden_state")


def _item(result: Any, name: str) -> Any:
    """An output by key or attribute, or None."""
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)


def _describe_output(result: Any) -> str:
    if isinstance(result, Mapping):
        return f"a {type(result).__name__} with the keys {', '.join(map(repr, result))}"
    if dataclasses.is_dataclass(result):
        return f"a {type(result).__name__} with {', '.join(item.name for item in dataclasses.fields(result))}"
    return f"a {type(result).__name__}" + (f" of {len(result)}" if isinstance(result, (tuple, list)) else "")


def explained_nodes(graph: fx.Graph, selector: OutputSelector) -> list[fx.Node]:
    """The nodes of the explained output, of all outputs for a function; none if there is no such output."""
    chosen: Any = output_node(graph).args[0]
    if selector is None:
        named = [one for one in (_item(chosen, name) for name in _EXPLAINED) if isinstance(one, fx.Node)]
        chosen = named[0] if named else chosen
    elif not callable(selector):
        try:
            is_attribute = isinstance(selector, str) and not isinstance(chosen, Mapping)
            chosen = getattr(chosen, str(selector)) if is_attribute else chosen[selector]
        except (AttributeError, KeyError, IndexError, TypeError):
            return []
    return nodes_in(chosen)


def final_probabilities_of(graph: fx.Graph, selector: OutputSelector) -> fx.Node | None:
    """The softmax or sigmoid that computes the explained output, if the graph shows it."""
    leaves = explained_nodes(graph, selector)
    return final_probabilities(leaves[0]) if len(leaves) == 1 else None

"""The explained tensor among a model's outputs: how it is chosen, in values and in graphs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

from lrpfx.errors import InputError, InputTypeError
from lrpfx.ir.final_probabilities import final_probabilities
from lrpfx.ir.node import floating_tensors, nodes_in, output_node
from lrpfx.support.tensors import is_floating

FUNCTION = "f(output)"  # what a user's function as `output=` chooses, in messages
#: The output to explain among several, if it has one of these names.
_EXPLAINED = ("logits", "last_hidden_state", "out")  # the last of torchvision's segmentation networks

#: Which of several outputs is explained: its index, its key or attribute, a function of all, or None for the usual one.
OutputSelector = int | str | Callable[[Any], torch.Tensor] | None


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
            raise InputTypeError(
                f"the output has dtype {chosen.dtype}, which carries no relevance: let the model return the scores behind it, "
                "those that an arg max, a comparison or a rounding reads, or choose them with output=",
                topic="choice-of-output",
            )
        return chosen
    tensors = floating_tensors(chosen)
    if selector is None:
        named = [_item(chosen, name) for name in _EXPLAINED]
        tensors = [one for one in named if is_floating(one)][:1] or tensors
        if len(tensors) == 1:
            return tensors[0]
    remedy = "choose one with output=, by its index, its key or attribute, or a function"
    if isinstance(chosen, (bool, int, float, str, np.ndarray, np.generic)):
        remedy = "let it return the tensor behind it, without .item(), .numpy() or names of classes"
    raise InputTypeError(
        f"attribute explains one tensor, but the model returns {_describe_output(chosen)}; {remedy}",
        topic="choice-of-output",
    )


def _item(result: Any, name: str) -> Any:
    """An output by key or attribute, or None."""
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)


def _describe_output(result: Any) -> str:
    if isinstance(result, Mapping):
        return f"a {type(result).__name__} with the keys {', '.join(map(repr, result))}"
    if dataclasses.is_dataclass(result):
        return f"a {type(result).__name__} with {', '.join(item.name for item in dataclasses.fields(result))}"
    name = type(result).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}" + (f" of {len(result)}" if isinstance(result, (tuple, list)) else "")


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


def are_probabilities(scores: torch.Tensor) -> bool:
    """Whether scores, (batch, classes), look like probabilities: none is negative, and those of a sample sum to 1."""
    sums = scores.double().sum(1)
    return bool((scores >= 0).all() and ((sums - 1.0).abs() < 1e-3).all())

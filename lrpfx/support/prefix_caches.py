"""Caches of the keys and values of a prefix, as language models of transformers take them: in plain form, and back."""

import copy
import dataclasses
from typing import Any

import torch

from lrpfx.errors import InputError, InputTypeError

#: Layers that hold the keys and values of all tokens, and those that hold a window of them and how many tokens there were.
_LAYERS = {"DynamicLayer": (), "DynamicSlidingWindowLayer": ("cumulative_length",)}


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of transformers, which is not imported for it."""
    return any(cls.__name__ == "Cache" and cls.__module__ == "transformers.cache_utils" for cls in type(value).__mro__)


def plain_cache(cache: Any) -> list[dict[str, Any]]:
    """The keys and values, (batch, heads, tokens, features), and lengths of each layer of a cache.

    Raises `InputTypeError` for caches that hold anything else, and `InputError` for an empty one.
    """
    layers = getattr(cache, "layers", None)
    kinds = [type(cache).__name__] if layers is None else [type(layer).__name__ for layer in layers]
    others = [kind for kind in kinds if kind not in _LAYERS]
    if others or getattr(cache, "offloading", False):
        raise InputTypeError(
            f"the cache has {'layers that are offloaded' if not others else f'the form {others[0]}'}; a DynamicCache with "
            "layers of keys and values is an input of a graph. Pass one, or the whole text",
            topic="kinds-of-inputs",
        )
    if not layers or any(not isinstance(layer.keys, torch.Tensor) or not layer.keys.numel() for layer in layers):
        raise InputError("the cache is empty: leave it out of the inputs", topic="kinds-of-inputs")
    return [
        {"keys": layer.keys, "values": layer.values, **{name: getattr(layer, name) for name in _LAYERS[type(layer).__name__]}}
        for layer in layers
    ]


def filled_cache(template: Any, plain: Any) -> Any:
    """A cache like `template` with these keys and values: what a model adds to it changes neither."""
    if is_cache(plain):
        plain = plain_cache(plain)
    made = copy.copy(template)
    made.layers = [copy.copy(layer) for layer in template.layers]
    for layer, entries in zip(made.layers, plain, strict=True):
        vars(layer).update(entries)
    return made


def holds_caches(output: Any) -> bool:
    """Whether a model returns caches beside other values."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return any(is_cache(getattr(output, field.name)) for field in dataclasses.fields(output))
    values = output.values() if type(output) is dict else output if type(output) in (tuple, list) else ()
    return any(map(is_cache, values))


def without_caches(output: Any) -> Any:
    """A model's output without the caches that it returns beside others: state of a generation, nothing to explain."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        names = [field.name for field in dataclasses.fields(output) if is_cache(getattr(output, field.name))]
        return dataclasses.replace(output, **dict.fromkeys(names)) if names else output
    if type(output) is dict:
        return {name: value for name, value in output.items() if not is_cache(value)}
    if type(output) in (tuple, list):
        return type(output)(value for value in output if not is_cache(value))
    return output

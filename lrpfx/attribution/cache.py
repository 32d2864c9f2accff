"""What attribution makes of an explainable module once, for later calls."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lrpfx.request.conditions import Index
from lrpfx.runtime.explain_module import ExplainModule, TreeGraphModule
from lrpfx.runtime.plain_calls import Called


@dataclass
class Cache:
    """It never holds the module itself, so that it goes with the module."""

    recorders: dict[tuple[Hashable, bool], TreeGraphModule] = field(default_factory=dict)  # (recording, probed) ->
    #: (a recorder, None for the module; several relevances?) -> the modules that it calls; it with plain calls, or None.
    runners: dict[tuple[TreeGraphModule | None, bool], tuple[Called, TreeGraphModule | None]] = field(default_factory=dict)
    compiled: dict[tuple[nn.Module, Any], Callable[..., Any]] = field(default_factory=dict)  # (a runner, its compiler) ->
    #: (recording, dtypes and shapes of inputs) -> recorded values on the meta device; the layouts of masked values.
    layouts: dict[tuple[Hashable, ...], tuple[list[torch.Tensor], Any]] = field(default_factory=dict)
    meanings: dict[tuple[str, int], type[Index] | None] = field(default_factory=dict)  # of indices of a node with n dimensions
    embeddings: dict[tuple[Any, ...], list[str]] = field(default_factory=dict)  # place of an integer input -> its embeddings
    checked_balance: bool = False  # whether relevance was watched at operations that keep their plain gradient
    rows_mix: bool = False  # whether rows of inputs are known to be no samples, but nodes of a graph, for example
    cut_inputs: dict[Any, str | None] = field(default_factory=dict)  # output -> which inputs a rule leaves without relevance
    wiring: Any = None  # of its residual stream


_caches: WeakKeyDictionary[ExplainModule, Cache] = WeakKeyDictionary()


def cache_of(module: ExplainModule) -> Cache:
    """The cache of a module, which is the same in every call."""
    cache = _caches.get(module)
    return _caches.setdefault(module, Cache()) if cache is None else cache

"""Graphs of one model that several methods share."""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import torch
from torch import nn

from lrpfx.composites import Composite
from lrpfx.errors import InputError
from lrpfx.explanation.arrays import leaves_of
from lrpfx.ir.guards import FixedEntries, FixedSizes, FixedValue, SharedSize, SizeCondition
from lrpfx.pipeline import Captured, capture, transform
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.support.identity.descriptions import fingerprint_of_value
from lrpfx.support.identity.structure import Snapshot
from lrpfx.support.prefix_caches import is_cache, plain_cache

#: How many graphs of a model stay that are for some sizes alone, so that sizes may take turns. Each has weights of its own.
KEPT = 4
#: Topics of errors about composites that need a graph of their own.
_OF_COMPOSITES = ("canonizers-of-modules", "captured-models")
#: What a graph is for of its inputs' sizes and values; dtypes are cast.
_OF_INPUTS = (FixedSizes, SharedSize, SizeCondition, FixedEntries, FixedValue)


class Captures:
    """The captures of one model, which methods share: of the last inputs whose sizes other graphs do not take.

    A model that changes is captured again.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, Captured] = {}
        self._snapshot: Snapshot | None = None

    def __reduce__(self) -> Any:
        return Captures, ()  # other processes make their own

    def module(
        self, model: nn.Module, composite: Composite, inputs: Any, constants: Collection[str] = (), explain: str = "output"
    ) -> ExplainModule:
        """The module with the rules of a composite, for inputs like these. Arguments and errors: as for `transform`."""
        if self._snapshot is not None and not self._snapshot.is_of(model):
            self._made.clear()
            self._snapshot = None
        key = _key(inputs)
        captured = self._made.pop(key, None) or capture(model, inputs, constants=constants)
        self._made[key] = captured  # as the last one
        for oldest in list(self._made)[:-KEPT]:
            del self._made[oldest]
        try:
            made = transform(captured, composite, explain=explain)
        except InputError as error:
            if error.topic not in _OF_COMPOSITES:
                raise
            return transform(model, composite, inputs, constants=constants, explain=explain)
        if self._snapshot is None:
            self._snapshot = Snapshot(model, dict(made.named_parameters(remove_duplicate=False)))
        return made

    def with_rules(
        self, model: nn.Module, composite: Composite, example: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor], ExplainModule]:
        """What gives the module with the rules of a composite for a batch. `example`: the first batch to capture it for."""
        modules: deque[ExplainModule] = deque(maxlen=KEPT)

        def module_for(batch: torch.Tensor) -> ExplainModule:
            if not modules and example is not None:
                modules.append(self.module(model, composite, example))
            found = next((one for one in reversed(modules) if takes(one, batch)), None)
            if found is None:
                modules.append(found := self.module(model, composite, batch))
            return found

        return module_for


def _key(inputs: Any) -> Hashable:
    """The sizes of inputs; of those that are no floating-point numbers, the content, on which a graph may rely."""
    if isinstance(inputs, Mapping):
        return tuple((name, _key(value)) for name, value in inputs.items())
    if isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
        return inputs.shape, inputs.dtype
    return fingerprint_of_value(inputs)


def takes(module: ExplainModule, inputs: Any) -> bool:
    """Whether the graph is for inputs of these sizes, and with the values that forward reads as numbers."""
    given = inputs if isinstance(inputs, Mapping) else zip(module.argument_names, leaves_of(inputs), strict=False)
    known = {name: plain_cache(value) if is_cache(value) else value for name, value in dict(given).items()}
    arguments = {name: value for name, value in known.items() if isinstance(value, (torch.Tensor, list))}
    return all(guard.problem(arguments) is None for guard in module.guards if isinstance(guard, _OF_INPUTS))

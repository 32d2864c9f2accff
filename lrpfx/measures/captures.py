"""Rules for one model and inputs of all sizes, also those that its graph fixes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lrpfx.composites import Composite
from lrpfx.errors import InputError
from lrpfx.pipeline import Captured, capture, transform
from lrpfx.runtime.explain_module import ExplainModule


class Captures:
    """The captures of one model, which its methods share: one, or one for each size of batches that the others do not take."""

    def __init__(self) -> None:
        self._made: dict[torch.Size, Captured] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_made": {}}  # other processes make their own

    def with_rules(
        self, model: nn.Module, composite: Composite, example: torch.Tensor | None = None
    ) -> Callable[[torch.Tensor], ExplainModule]:
        """What gives the module with the rules of a composite for a batch. `example`: the first batch to capture it for."""
        modules: list[ExplainModule] = []

        def module_for(batch: torch.Tensor) -> ExplainModule:
            if not modules and example is not None:
                modules.append(transform(self._for(model, example), composite))
            found = next((one for one in modules if _takes(one, batch)), None)
            if found is None:
                modules.append(found := transform(self._for(model, batch), composite))
            return found

        return module_for

    def _for(self, model: nn.Module, batch: torch.Tensor) -> Captured:
        if batch.shape not in self._made:
            self._made[batch.shape] = capture(model, batch)
        return self._made[batch.shape]


def _takes(module: ExplainModule, batch: Any) -> bool:
    """Whether the graph is for batches of this size."""
    try:
        module.admit((batch,), {})
    except InputError:
        return False
    return True

"""The settings of a run over a data set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lrpfx.attribution.conditions import Condition
from lrpfx.attribution.names import recorded_names, resolve_names
from lrpfx.attribution.targets import OutputSelector
from lrpfx.datasets.explaining import PREDICTED, TRUE, Reduction, TargetOfSamples, checked_reduction
from lrpfx.errors import InputError, InputTypeError
from lrpfx.explanation.explanation import index_of
from lrpfx.runtime.explain_module import ExplainModule


@dataclass(frozen=True)
class Settings:
    """What is asked of each sample, as it was given."""

    target: TargetOfSamples | None
    targets: Sequence[TargetOfSamples] | None
    record: str | Sequence[str] | Mapping[str, Reduction]
    conditions: Sequence[Condition] | None
    reduce: Reduction
    dtype: str
    scores: int | None
    output: OutputSelector
    chunk_size: int | None

    def of_samples(self, categories: Sequence[str] | None) -> tuple[TargetOfSamples, ...]:
        """The targets of each sample, names of classes replaced by indices."""
        if self.target is not None and self.targets is not None:
            raise InputError(
                "target= is one target for each sample, targets= are several for each; pass one of them", topic="targets"
            )
        several = self.targets
        if several is not None and (not isinstance(several, Sequence) or isinstance(several, str) or not several):
            raise InputTypeError(f"targets are several, such as ['predicted', 'true'], not {several!r}", topic="targets")
        found = [PREDICTED if self.target is None else self.target] if several is None else list(several)
        return tuple(_checked_target(one, categories) for one in found)

    def recorded(self, module: ExplainModule, others: Sequence[str]) -> dict[str, Reduction]:
        """The reduction of each recorded layer. `others`: further layers, whose relevance is not reduced."""
        given = self.record
        wanted: dict[str, Reduction] = dict.fromkeys(others)
        if isinstance(given, Mapping):
            wanted |= given
        else:
            wanted |= dict.fromkeys(recorded_names(module.unfused_graph, given))
        found: dict[str, Reduction] = {}
        for pattern, reduction in wanted.items():
            names = recorded_names(module.unfused_graph, [pattern])
            resolve_names(module.unfused_graph, names)
            found |= dict.fromkeys(names, checked_reduction(f"record[{pattern!r}]", reduction))
        return found


def _checked_target(target: Any, categories: Sequence[str] | None) -> TargetOfSamples:
    if isinstance(target, str) and target in (PREDICTED, TRUE):
        return target
    if isinstance(target, str):
        if categories is None:
            raise InputError(
                f'target is "{PREDICTED}", "{TRUE}", the index of a class or a function of the output, not {target!r}; names '
                "of classes need an lrpfx.Explainer with categories=",
                topic="targets",
            )
        return index_of(target, categories, len(categories))
    if callable(target) and not isinstance(target, torch.Tensor):
        found: TargetOfSamples = target
        return found
    if isinstance(target, bool) or not isinstance(target, (int, np.integer)):
        raise InputTypeError(
            f'the target of samples is "{PREDICTED}", "{TRUE}", the index of a class or a function from the output to its '
            f"relevance, not {type(target).__name__}",
            topic="targets",
        )
    return int(target)

"""The settings of a run over a data set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lrpfx.errors import InputTypeError
from lrpfx.request.conditions import Condition
from lrpfx.request.names import recorded_names, resolve_names
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.reduction import OF_NUMBERS, Reduction, checked_reduction
from lrpfx.request.targets import Target, TargetLike, check_one_of
from lrpfx.request.targets_of_samples import as_target_of_samples
from lrpfx.runtime.explain_module import ExplainModule


@dataclass(frozen=True)
class Settings:
    """What is asked of each sample, as it was given."""

    target: TargetLike
    targets: Sequence[TargetLike] | None
    record: str | Sequence[str] | Mapping[str, Reduction]
    conditions: Sequence[Condition] | None
    reduce: Reduction
    dtype: str
    scores: int | None
    output: OutputSelector
    chunk_size: int | None

    def of_samples(self, categories: Sequence[str] | None) -> tuple[Target, ...]:
        """The targets of each sample, names of classes replaced by indices."""
        check_one_of(self.target, self.targets)
        several = self.targets
        if several is not None and (not isinstance(several, Sequence) or isinstance(several, str) or not several):
            raise InputTypeError(f"targets are several, such as ['predicted', 'true'], not {several!r}", topic="targets")
        found = [self.target] if several is None else list(several)
        return tuple(as_target_of_samples(one, categories) for one in found)

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
            found |= dict.fromkeys(names, checked_reduction(f"record[{pattern!r}]", reduction, OF_NUMBERS))
        return found

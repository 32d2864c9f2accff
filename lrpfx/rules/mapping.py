"""The interface between composites and the compiler: a mapping from layers to rules."""

from typing import Any, Protocol

from torch import nn


class MappingContext(dict[Any, Any]):
    """The state of a composite while it maps the layers of one model.

    Composites may store anything in it. `reason` names the entry that made the last choice; `used` holds the entries that have
    matched so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""
        self.used: set[tuple[int, str]] = set()


class RuleMapping(Protocol):
    """The part of `lrpfx.composites.Composite` that chooses rules."""

    @property
    def module_map(self) -> Any: ...

    def unmatched(self, ctx: MappingContext) -> list[str]:
        """User-written entries that matched nothing in the model that `ctx` belongs to."""

    def maps_whole(self, name: str, module: nn.Module) -> bool:
        """Whether one rule covers this whole module, so that the compiler must not look inside it."""

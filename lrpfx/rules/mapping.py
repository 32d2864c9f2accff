"""What a composite is to the compiler: a choice of rules for layers."""

from typing import Any, Protocol

from torch import nn


class MappingContext(dict[Any, Any]):
    """What a composite remembers while it maps the layers of one model.

    Composites may keep any state in it. `reason` is which entry made the last choice; `used` are the entries that have matched.
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
        """Entries that the user wrote and that matched nothing in the model that `ctx` belongs to."""

    def maps_whole(self, name: str, module: nn.Module) -> bool:
        """Whether this module gets a rule as a whole, so that its inside must not be looked at."""

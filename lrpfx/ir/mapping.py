"""The interface between composites and the compiler: a mapping from layers to rules."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from torch import nn


class MappingContext(dict[Any, Any]):
    """The state of a composite while it maps the layers of one model.

    Composites may store anything in it. `layers`: names and layers of the model in the order of execution, all that relevance
    flows through, for choices that depend on more than the layers so far. In graph mode, each call is a layer; in module mode,
    these are the modules that run, in the order of their first call, or all in the order of registration if the model cannot
    be traced. It is empty where a composite is asked about a single layer only. `inputs`: the names of the model's inputs that
    each layer depends on, by its name, in graph mode. `reason` names the entry that made the last choice; `used` holds the
    entries that have matched so far.
    """

    def __init__(
        self, layers: Iterable[tuple[str, Any]] = (), inputs: Mapping[str, frozenset[str]] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.inputs = inputs
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

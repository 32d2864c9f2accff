"""Relevances of an output, most of which give relevance to few of its entries: of all logits of a text, one is explained."""

from collections.abc import Iterable, Sequence
from typing import overload

import torch

from lrpfx.attribution.plausibility import magnitudes
from lrpfx.runtime.multipliers import begins_multipliers
from lrpfx.support.torch_internals import is_traced, is_transformed

#: From how many entries on, and up to which share of them with relevance, only these entries are held.
LARGE, FEW = 2**16, 1 / 16


class Seeds(Sequence[torch.Tensor]):
    """Tensors of the output's shape, of which only few entries are held where the others are 0."""

    def __init__(self, values: Iterable[torch.Tensor]) -> None:
        self.held = [_compact(value) for value in values]

    def __len__(self) -> int:
        return len(self.held)

    @overload
    def __getitem__(self, place: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, place: slice) -> list[torch.Tensor]: ...

    def __getitem__(self, place: int | slice) -> torch.Tensor | list[torch.Tensor]:
        return [whole(one) for one in self.held[place]] if isinstance(place, slice) else whole(self.held[place])


def whole(held: torch.Tensor) -> torch.Tensor:
    """A seed that may be held by its entries, as a tensor of the output's shape."""
    return held.to_dense() if held.layout is torch.sparse_coo else held


def entries_of(output: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a backward pass starts from, and its gradient: the output, or those of its entries that have relevance."""
    if held.layout is not torch.sparse_coo or begins_multipliers(output):
        return output, held
    return output[tuple(held.indices())], held.values()


def magnitude_of(held: torch.Tensor) -> float:
    """The largest sum of magnitudes of any sample."""
    if held.layout is not torch.sparse_coo:
        return magnitudes([held[None]], 1)[0]
    values = held.values().abs()
    values = values.float() if values.element_size() < 4 else values
    return float(values.new_zeros(held.shape[0]).index_add_(0, held.indices()[0], values).amax())


def _compact(value: torch.Tensor) -> torch.Tensor:
    if is_traced(value) or is_transformed(value) or value.numel() < LARGE:
        return value
    if int(value.count_nonzero()) > FEW * value.numel():
        return value
    return value.to_sparse().coalesce()

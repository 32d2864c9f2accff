"""What metrics measure maps on: one input, and what the model says when some of it is taken away."""

import hashlib
import math
from abc import ABC
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Sample(ABC):
    """One input. `number`: its place among the inputs, which seeds what is random. `mask`: where the evidence is, if known."""

    number: int
    mask: torch.Tensor | None

    def generator(self) -> torch.Generator:
        """Random numbers of this input: the same at each call, and whatever other inputs there are."""
        return torch.Generator().manual_seed(self.number)


@dataclass(frozen=True, eq=False)
class PartSample(Sample):
    """An input whose parts can be deleted, with its mask, (1, parts), if there is one.

    `scores`: what the model says of copies of the input without the parts that masks, (n, parts), mark: (n,), float64.
    """

    scores: Callable[[torch.Tensor], torch.Tensor]


#: Scores that were computed before, by what they depend on.
KnownScores = dict[Hashable, torch.Tensor]


def remembered(known: KnownScores, masks: torch.Tensor, settings: Hashable, score: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The scores of masks with these settings, which are computed once: further methods are measured by the same masks."""
    key = settings, hashlib.sha256(masks.cpu().contiguous().view(torch.uint8).numpy().tobytes()).digest()
    if key not in known:
        known[key] = score()
    return known[key]


def random_masks(sample: Sample, count: int, units: int) -> torch.Tensor:
    """Masks, (count, units), each with half of the units."""
    order = torch.rand(count, units, generator=sample.generator(), dtype=torch.float64).argsort(1)
    return order < math.ceil(units / 2)

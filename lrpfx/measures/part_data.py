"""What methods are measured on beyond images: a model, inputs whose parts can be deleted, and what is known about them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lrpfx.errors import add_note
from lrpfx.measures.data import Data, check_masks, invalid, wrong_type
from lrpfx.measures.parts import Parts
from lrpfx.measures.sample import PartSample, Sample
from lrpfx.support.identity.descriptions import fingerprint_of_value


@dataclass(frozen=True, eq=False)
class PartData(Data):
    """A model with inputs of any kind whose parts can be deleted, for `lrpfx.evaluate`.

    Attributes
    ----------
    parts
        What the parts are, and what the model says without some of them: `Tokens`, `Values`, `Edges`, or a class of your own.
    inputs
        Texts, arrays or graphs, as `parts` takes them.
    targets
        The index of the class to explain for each input, or one for all; by default the class that the model predicts.
    groups
        What each input belongs to, such as the document that it was cut from: intervals are of groups. By default, each input
        is a group of its own.
    masks
        Which parts are known to be the evidence, for metrics of localization: truth values, (parts,), or in the shape of the
        relevance of the input, for each input.

    Raises
    ------
    InputError
        The numbers do not fit, an input has fewer than two parts, a mask is empty or full, or there is only one group.
    InputTypeError
        Something has the wrong type.

    Examples
    --------
    >>> table = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    >>> rows = lrpfx.measures.PartData(lrpfx.measures.Values(table), torch.rand(8, 4))
    >>> evaluation = lrpfx.evaluate(["epsilon_plus", "occlusion", "random"], rows, "random_deletion")
    >>> [(score.method, score.metric) for score in evaluation.scores][0]
    ('epsilon_plus', 'random_deletion')
    """

    sample_type: ClassVar[type[Sample]] = PartSample
    parts: Parts
    inputs: Sequence[Any]
    targets: Any = None
    groups: Sequence[Hashable] | None = None
    masks: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.parts, Parts):
            raise wrong_type(
                f"parts say what the parts of an input are, such as lrpfx.measures.Tokens(model, tokenizer), not "
                f"{type(self.parts).__name__}"
            )
        if isinstance(self.inputs, (str, bytes)) or not hasattr(self.inputs, "__len__"):
            raise wrong_type(f"inputs are a list, not {type(self.inputs).__name__}")
        object.__setattr__(self, "inputs", list(self.inputs))
        self._check_groups()
        counts = [self.count_of(number) for number in range(len(self))]
        few = next((number for number, count in enumerate(counts) if count < 2), None)
        if few is not None:
            raise invalid(f"{self.noun} {few} has {counts[few]} parts: there is no order of fewer than two")
        if self.masks is not None:
            object.__setattr__(self, "masks", self._as_masks(self.masks, counts))

    @property
    def noun(self) -> str:
        """What an input is, such as "text"."""
        return self.parts.noun

    def __len__(self) -> int:
        return len(self.inputs)

    def facts(self) -> dict[str, Any]:
        """What decides on the numbers of the inputs, as plain data."""
        given = [self.parts.as_read(one) for one in self.inputs]
        known = fingerprint_of_value([given, self.targets, self.masks])
        return {**self.parts.facts(), "inputs, targets and masks": known}

    def count_of(self, number: int) -> int:
        """How many parts an input has. `number`: its place among the inputs."""
        try:
            return self.parts.count(self.inputs[number])
        except Exception as error:
            add_note(error, f"for {self.noun} {number}")
            raise

    def _as_masks(self, masks: Any, counts: Sequence[int]) -> list[torch.Tensor]:
        if len(masks) != len(counts):
            raise invalid(f"there are {len(masks)} masks for {len(counts)} {self.noun}s")
        found = []
        for number, (mask, count) in enumerate(zip(masks, counts, strict=True)):
            given = torch.as_tensor(mask)
            if given.dtype is not torch.bool:
                raise wrong_type(f"masks are truth values, not {given.dtype}")
            known = torch.as_tensor(self.parts.of_relevance(self.inputs[number], given)).bool()
            if known.shape != (count,):
                raise invalid(f"mask {number} has the shape {tuple(given.shape)}, and {self.noun} {number} {count} parts")
            found.append(known)
        check_masks(found)
        return found

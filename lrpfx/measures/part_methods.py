"""Methods that explain inputs by their parts: by name, as composites, explainers or functions."""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from lrpfx.composites import Composite
from lrpfx.composites.names import is_composite
from lrpfx.errors import add_note
from lrpfx.explanation.explainer import Explainer
from lrpfx.measures.data import invalid, wrong_type
from lrpfx.measures.methods import BuiltMethods, Ratios, check_same_model, reporting, timed
from lrpfx.measures.part_data import PartData
from lrpfx.measures.sample import KnownScores, PartSample, remembered
from lrpfx.request.outputs import are_probabilities

#: The rules that an explainer chooses by what the model consists of.
DEFAULT = object()


class PartMethods(BuiltMethods):
    """Methods for inputs with parts."""

    unit = "forwards"

    def __init__(self, methods: Any, data: PartData, size: int = 16) -> None:
        data.parts.check()
        self.data: PartData = data
        super().__init__(methods, size)

    def _built(self, name: str, method: Any) -> Callable[[int, int], Any]:
        """What gives the relevance of the input of this number for a class."""
        if method == "random":
            return lambda number, _: torch.randn(self.data.count_of(number), generator=torch.Generator().manual_seed(number))
        if method == "occlusion":
            return self._occlusion
        if method is DEFAULT:
            explain = self.data.parts.by_composite(None)
        elif isinstance(method, str) and not is_composite(method):
            explain = self.data.parts.by_gradients(method)
        elif isinstance(method, (str, Composite)):
            explain = self.data.parts.by_composite(method)
        elif isinstance(method, Explainer):
            if hasattr(self.data.parts, "model"):
                check_same_model(name, method, self.data.parts.model)
            explain = self.data.parts.by_explainer(method)
        else:
            explain = _of_copies(reporting(name, method, "(input, target)"))
        return lambda number, target: explain(self.data.inputs[number], target)

    def _occlusion(self, number: int, target: int) -> torch.Tensor:
        count = self.data.count_of(number)
        scores = self._scores(number, target)(torch.cat([torch.zeros(1, count), torch.eye(count)]).bool())
        return scores[0] - scores[1:]

    def first_maps(self, name: str, numbers: Sequence[int]) -> torch.Tensor:
        """The relevance of the parts of some inputs, (n, parts); where one has fewer, the rest is 0."""
        maps = [self.map(name, number, int(self.targets[number])) for number in numbers]
        return torch.nn.utils.rnn.pad_sequence(maps, batch_first=True)

    def map(self, name: str, number: int, target: int) -> torch.Tensor:
        """The relevance of the parts of an input, (parts,), float64, on the CPU. `InputError` unless it is finite."""
        given, count = self.data.inputs[number], self.data.count_of(number)
        returned = self.explain[name](number, target)
        where = f"the method {name!r} returns, for {self.data.noun} {number},"
        try:
            found = torch.as_tensor(self.data.parts.of_relevance(given, torch.as_tensor(returned)))
        except (TypeError, ValueError, RuntimeError) as error:
            raise wrong_type(f"{where} {type(returned).__name__}, which is no tensor of numbers") from error
        if found.is_complex():
            raise wrong_type(f"{where} complex numbers, which have no order")
        if found.shape != (count,):
            raise invalid(f"{where} the shape {tuple(found.shape)}, and there are {count} parts")
        if not found.isfinite().all():
            raise invalid(f"{where} values that are not finite")
        return found.detach().to("cpu", torch.float64)

    def warm_up(self) -> None:
        """Do what happens at a first call, and is no part of the price."""
        for name in self.explain:
            self.map(name, 0, int(self.targets[0]))

    def samples(self, numbers: Sequence[int], ratios: Ratios) -> Iterator[tuple[PartSample, torch.Tensor]]:
        """Inputs, with the relevance of their parts by all methods, (methods, 1, parts). `ratios`: takes times in forwards."""
        for number in numbers:
            target = int(self.targets[number])
            scores = self._scores(number, target)
            unit = timed(partial(scores, torch.zeros(1, self.data.count_of(number), dtype=torch.bool)))[1]
            maps = []
            for name in self.explain:
                found, taken = timed(partial(self.map, name, number, target))
                maps.append(found)
                ratios[name].append(taken / unit)
            mask = None if self.data.masks is None else self.data.masks[number][None]
            remembering = partial(_remembered, self._known_scores(number), scores)
            yield PartSample(number, mask, remembering), torch.stack(maps)[:, None]

    @cached_property
    def outputs(self) -> torch.Tensor:
        """What the model returns for the inputs, (N, classes). `InputError` unless it is finite."""
        rows: list[torch.Tensor] = []
        for number in range(len(self.data)):
            found = self._outputs_without(number, torch.zeros(1, self.data.count_of(number), dtype=torch.bool))
            if found.ndim != 2 or (rows and found.shape != rows[0].shape):
                raise invalid(f"the model returns {tuple(found.shape)} for {self.data.noun} {number}, not (1, classes)")
            rows.append(found)
        outputs = torch.cat(rows)
        if not outputs.isfinite().all():
            raise invalid("the model returns values that are not finite")
        return outputs

    @torch.no_grad()
    def _outputs_without(self, number: int, deleted: torch.Tensor) -> torch.Tensor:
        try:
            return self.data.parts.outputs(self.data.inputs[number], deleted)
        except Exception as error:
            add_note(error, f"in the model of lrpfx.evaluate, for {self.data.noun} {number}")
            raise

    def _scores(self, number: int, target: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """The probability of a class without parts that masks mark, or the output itself if there is only one."""
        known = self.outputs.shape[1] == 1 or are_probabilities(self.outputs)

        def scores(masks: torch.Tensor) -> torch.Tensor:
            found = torch.cat([self._outputs_without(number, some) for some in masks.split(self.size)])
            return (found if known else found.softmax(1))[:, target].double().cpu()

        return scores


def _of_copies(function: Callable[..., Any]) -> Callable[[Any, int], Any]:
    """A function of a user that gets inputs of its own, into which it may write."""

    def explain(given: Any, target: int) -> Any:
        return function(given.detach().clone() if isinstance(given, torch.Tensor) else copy.deepcopy(given), target)

    return explain


def _remembered(known: KnownScores, scores: Callable[[torch.Tensor], torch.Tensor], masks: torch.Tensor) -> torch.Tensor:
    return remembered(known, masks, None, partial(scores, masks))

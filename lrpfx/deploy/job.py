"""What a lowered program computes: forward and relevance, as tensors in and tensors out."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lrpfx.attribution.computation import Computation, relevances_of
from lrpfx.attribution.infinite_masks import hiding, other_reader
from lrpfx.attribution.recorders import Recording, recorder_of, with_factors
from lrpfx.deploy.tracer import Tracer
from lrpfx.errors import InputError, InputTypeError, LoweringError, LrpfxError, first_lines
from lrpfx.ir.node import node_info
from lrpfx.request.conditions import Key, ends_of, mask_name
from lrpfx.request.explained_output import ExplainedOutput, explained_output
from lrpfx.request.layouts import check_positions
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.places import has_classes, has_places, largest_classes
from lrpfx.request.question import Question
from lrpfx.request.reduction import reduced
from lrpfx.request.targets import Classes, Position, Seed, Target
from lrpfx.runtime.explain_module import ExplainModule
from lrpfx.support.tensors import is_floating
from lrpfx.support.torch_internals import pytree

#: Errors about the arguments of `lrpfx.lower`.
invalid, wrong_type = partial(InputError, topic="lowering"), partial(InputTypeError, topic="lowering")


@dataclass(frozen=True)
class Job:
    """The computation of a program."""

    module: ExplainModule
    inputs: tuple[str, ...]
    constants: dict[str, Any]  # arguments that the graph has fixed
    embeddings: dict[str, tuple[str, ...]]  # integer input -> the embeddings that it indexes
    target: str  # one of `TARGETS`, or `FIXED`
    fixed: Target | None  # what the program always explains, if it takes no target
    number_of_targets: int | None  # of each sample, if the program takes several
    record: tuple[str, ...]
    reduce: str | None
    balance: bool
    output: OutputSelector
    is_linear: bool  # whether a function computes the explained output
    conditions: dict[Key, str]  # place -> the argument that is its mask

    @property
    def masks(self) -> list[str]:
        """The inputs that may hold -inf, if they are floating-point tensors."""
        return [name for name in self.inputs if other_reader(self.module.unfused_graph, (name,)) is None]

    def arguments(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Arguments of the program: the inputs, a target if the program takes one, and masks."""
        with torch.no_grad():
            result = self.explained(self.module(**self.values(tensors))).value
        target = self._example_target(result)
        masks = map(_example_mask, self.masked_values(tensors))
        return [*tensors, *([] if target is None else [target]), *masks]

    def explained(self, result: Any) -> ExplainedOutput:
        """The explained output among those of the module."""
        return explained_output(result, self.output, self.is_linear, of_multipliers=bool(self.module.reference_names))

    def masked_values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values at the places of conditions."""
        if not self.conditions:
            return []
        sources = [ends_of(self.module.unfused_graph, place)[0] for place in self.conditions]
        names = [node_info(source).name for source in sources]
        with torch.no_grad():
            recorder = recorder_of(self.module, Recording(tuple(names)))
            _, *returned = recorder(**self.values(tensors))
        return with_factors(recorder, returned)[0]

    def _example_target(self, result: torch.Tensor) -> torch.Tensor | None:
        """A target for an output; None if the program takes none."""
        if self.target == "max" and not has_classes(result):
            raise invalid(f'"max" is for outputs of shape (batch, classes, ...), not {tuple(result.shape)}')
        if self.fixed is not None:
            check_positions(self.module.unfused_graph, self.output, result, [self.fixed])
            self.fixed.check(result)
            return None
        if self.target == "weights":  # not proportional to the output: that would give 0 under a softmax
            entries = torch.arange(result[0].numel(), device=result.device, dtype=torch.float64)
            return result * (1 + entries.cos() / 2).to(result.dtype).reshape(result.shape[1:])
        samples = torch.arange(len(result), device=result.device)
        if self.target == "token":
            if result.ndim != 3:
                raise invalid(f'"token" is for outputs of shape (batch, positions, tokens), not {tuple(result.shape)}')
            return torch.stack([-1 - samples % result.shape[1], samples % result.shape[2]], 1)
        if not has_classes(result):
            other = '"token" or "weights"' if result.ndim == 3 else '"weights"'
            raise invalid(f"class indices need an output of shape (batch, classes), not {tuple(result.shape)}: use {other}")
        if has_places(result):
            samples = largest_classes(result)  # others may be predicted nowhere
        if self.number_of_targets is not None:
            samples = samples[:, None] + torch.arange(self.number_of_targets, device=result.device)
        return samples % result.shape[1]

    def values(self, arguments: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The model's arguments by name."""
        return {**dict(zip(self.inputs, arguments, strict=False)), **self.constants}

    def _signals(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that are no references."""
        references = set(self.module.reference_names.values())
        return {name: value for name, value in values.items() if name not in references}

    def names(self) -> list[str]:
        """Names of the program's arguments."""
        inputs = ["input"] if len(self.inputs) == 1 else list(self.inputs)
        return [*inputs, *([] if self.fixed is not None else ["target"]), *self.conditions.values()]

    def masks_in(self, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The masks of conditions among the program's arguments."""
        return arguments[len(arguments) - len(self.conditions) :]

    def targets_in(self, arguments: Sequence[torch.Tensor]) -> list[Target]:
        """The targets for `lrpfx.attribute`, of which there is one unless the program takes several."""
        if self.fixed is not None:
            return [self.fixed]
        given = arguments[len(self.inputs)]
        if self.number_of_targets is not None:
            return [Classes(one) for one in given.unbind(1)]
        if self.target == "token":
            positions, tokens = given.unbind(1)
            return [Position(positions, Classes(tokens))]
        return [Seed(given) if self.target == "weights" else Classes(given)]

    def results(self, result: Any, explanations: Sequence["_OfTarget"]) -> dict[str, torch.Tensor]:
        """The program's results, from the module's output and what was found for each target."""
        found = {"output": self.explained(result).value.detach()}
        if not isinstance(result, torch.Tensor):
            found.update({f"output.{key}": value.detach() for key, value in _tensors_of(result)})
        named = [self._results_of(one) for one in explanations]
        several = self.number_of_targets is not None
        return found | {name: torch.stack([one[name] for one in named], 1) if several else named[0][name] for name in named[0]}

    def _results_of(self, found: "_OfTarget") -> dict[str, torch.Tensor]:
        """The results that depend on the target."""
        relevances = found.relevances
        reduced = {name: self._reduced(name, relevance) for name, relevance in relevances.items()}
        named = {"relevance" if len(reduced) == 1 else f"relevance.{name}": value for name, value in reduced.items()}
        named.update(found.layers)
        if self.balance:
            totals = [relevance.flatten(1).sum(1) for relevance in relevances.values()]
            named["balance"] = torch.stack(totals).sum(0) - found.seed.flatten(1).sum(1)
        return named

    def _reduced(self, name: str, relevance: torch.Tensor) -> torch.Tensor:
        """Relevance of an input, reduced over its channels. Embeddings have their channels last."""
        of_embedding = name.partition(".")[0] in self.embeddings and self.reduce is not None
        return reduced(relevance, self.reduce, relevance.ndim - 1 if of_embedding else 1)

    def run(self, *arguments: torch.Tensor) -> dict[str, torch.Tensor]:
        """The traced function: forward, and relevance by autograd."""
        values = dict(zip(self.inputs, arguments, strict=False))
        with torch.enable_grad():
            signals = self._signals(values)
            leaves = {name: value.detach().requires_grad_() for name, value in signals.items() if is_floating(value)}
            names = tuple(dict.fromkeys([*self.record, *itertools.chain(*self.embeddings.values())]))
            recording = Recording(names, bool(self.embeddings), places=tuple(self.conditions))
            runner = recorder_of(self.module, recording) if recording else self.module
            read = {name: hiding(leaf) if name in self.masks else leaf for name, leaf in leaves.items()}
            masks = {mask_name(number): mask for number, mask in enumerate(self.masks_in(arguments))}
            result = Tracer(runner, self.number_of_targets is not None)(**{**values, **read, **masks})
            result, returned = (result[0], result[1:]) if recording else (result, ())
            recorded, of_layers = with_factors(runner, returned)
            explained = self.explained(result)
            factors = [*(None for _ in leaves), *of_layers]
            wanted, targets = [*leaves.values(), *recorded], self.targets_in(arguments)
            explanations = []
            for left, target in zip(reversed(range(len(targets))), targets, strict=True):
                seed = self._seed(target, explained.value.detach())
                start = explained.start(seed, target)
                found = relevances_of(explained.value, wanted, start, factors, retain_graph=left > 0)
                layers = dict(zip(names, found[len(leaves) :], strict=True))
                explanations.append(self._of_target(seed, dict(zip(leaves, found, strict=False)), layers))
        return self.results(result, explanations)

    def _seed(self, target: Target, output: torch.Tensor) -> torch.Tensor:
        """The relevance of the output, traced. An exception of the user's function or class is a `LoweringError`."""
        try:
            return target.relevance(output)
        except LrpfxError:
            raise
        except Exception as error:
            raise LoweringError(
                f"the target cannot be part of a program ({target}): {first_lines(error)}. What it computes of the output may "
                "not depend on values by `if`, `.item()` or `len(output)`"
            ) from error

    def _of_target(
        self, seed: torch.Tensor, relevances: dict[str, torch.Tensor], layers: Mapping[str, torch.Tensor]
    ) -> "_OfTarget":
        """What was found for one target: the relevance of floating-point inputs, and of layers and embeddings."""
        for name, embeddings in self.embeddings.items():
            of_input = {embedding: layers[embedding] for embedding in embeddings}
            relevances.update(_by_name(name, of_input if len(of_input) > 1 else layers[embeddings[0]]))
        return _OfTarget(seed, relevances, {name: layers[name] for name in self.record})

    def expected(self, arguments: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The program's results according to `lrpfx.attribute`."""
        values = self.values(arguments)
        targets, several = self.targets_in(arguments), self.number_of_targets is not None
        named = zip(self.conditions, self.masks_in(arguments), strict=True)
        conditions = [dict(named)] if self.conditions else None
        asked = {"targets": targets} if several else {"target": targets[0]}
        references = {name: values[of] for name, of in self.module.reference_names.items() if of in values} or None
        question = Question(**asked, conditions=conditions, record=self.record, output=self.output, reference=references)
        signals = self._signals(values)
        found = Computation(self.module, signals, question)
        names = [*(name for name, value in signals.items() if is_floating(value)), *self.embeddings]

        def of_target(number: int) -> _OfTarget:
            """Relevances have a dimension for conditions, and one for targets, if there are any."""
            place = (*(() if conditions is None else (0,)), *((number,) if several else ()))
            of_inputs, layers = pytree.tree_map_only(torch.Tensor, lambda value: value[place], (found.of_inputs, found.layers))
            relevances: dict[str, torch.Tensor] = {}
            for name in names:
                relevances.update(_by_name(name, of_inputs[name]))
            return _OfTarget(found.seeds[number], relevances, layers)

        return self.results(found.result, list(map(of_target, range(len(targets)))))


@dataclass(frozen=True)
class _OfTarget:
    """The relevance of the output for one target, and that of inputs and layers by name."""

    seed: torch.Tensor
    relevances: dict[str, torch.Tensor]
    layers: dict[str, torch.Tensor]


def _example_mask(value: torch.Tensor) -> torch.Tensor:
    """A mask for a value, neither all ones nor all zeros, with other entries for each sample."""
    entries = torch.arange(value.numel(), device=value.device, dtype=torch.float64)
    mask = torch.where(entries % 3 == 2, 0.0, 0.75 + (entries + 1).cos() / 4)
    return mask.to(value.dtype).reshape(value.shape)


def _by_name(name: str, relevance: torch.Tensor | dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Relevance of one input by name, or of each embedding if the input indexes several."""
    if isinstance(relevance, torch.Tensor):
        return {name: relevance}
    return {f"{name}.{embedding}": value for embedding, value in relevance.items()}


def _tensors_of(result: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a model's output with their paths in it, such as "0" or "boxes.1"."""
    leaves, _ = pytree.tree_flatten_with_path(result)
    return [
        (".".join(str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", "")))) for key in path), leaf)
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    ]

"""What must hold for every network and composite."""

import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

import lrpfx
from lrpfx import composites, rules, types
from lrpfx.errors import InputError
from lrpfx.ir.node import named_nodes, node_info
from lrpfx.passes.stages import STAGES
from lrpfx.runtime.explain_module import ExplainModule

from .composites import conserves
from .network import BATCH, Network

#: Two computations of one relevance may differ by this much of the largest relevance that any node has.
TOLERANCE = 1e-9
IN_SINGLE = 1e-6  # where the network computes constants in float32: their sums and shares are rounded to it
#: Where they differ more, by as many times what changes of the weights in the last digits do.
ROUNDING, AMPLIFIED = 1e-14, 100.0


class FailedError(Exception):
    """A property that does not hold."""


@dataclass
class Case:
    """A network with a composite, and what several checks need of them."""

    network: Network
    composite: str
    undetermined: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.network.build()
        self.examples = self.network.examples()
        with torch.no_grad():
            self.expected = self.selected(self.model(*self.examples))
        generator = torch.Generator().manual_seed(self.network.seed)
        self.seed = torch.randn(self.expected.shape, generator=generator)
        self.explain_model = self.transformed()

    def selected(self, result: Any) -> torch.Tensor:
        return result if self.network.output is None else result[self.network.output]

    def made_composite(self) -> composites.Composite:
        names = {name: getattr(room, name) for room in (types, rules, composites) for name in dir(room)}
        return eval(self.composite, names)

    def transformed(self, model: nn.Module | None = None, capture: str = "auto", **options: Any) -> ExplainModule:
        return lrpfx.transform(
            self.model if model is None else model,
            self.made_composite(),
            example_inputs=self.examples,
            capture=capture,
            **options,
        )

    def attribution(
        self, explain_model: nn.Module, examples: Sequence[torch.Tensor] | None = None, target: Any = None, **options: Any
    ) -> lrpfx.Attribution:
        examples = self.examples if examples is None else examples
        target = self.seed if target is None and "targets" not in options else target
        return lrpfx.attribute(explain_model, tuple(examples), target, output=self.network.output, **options)

    def relevance(
        self, explain_model: nn.Module, examples: Sequence[torch.Tensor] | None = None, target: Any = None, **options: Any
    ) -> torch.Tensor:
        """Relevance of all inputs, one after the other. Shape (..., batch, entries)."""
        found = self.attribution(explain_model, examples, target, **options).relevance
        return flattened(found, batched_at=1 if "targets" in options else 0)

    @cached_property
    def magnitude(self) -> float:
        """The largest relevance of any entry of any node."""
        accounts = lrpfx.ledger(self.explain_model, self.examples, self.seed, output=self.network.output)
        reached = {entry.name for entry in accounts if entry.relevance_in}
        tensors = {name for name, node in named_nodes(self.explain_model.graph) if node_info(node).shape is not None}
        names = sorted(reached & tensors)
        try:
            found = [*self.attribution(self.explain_model, record=names).layers.values()]
        except InputError:  # one of them, which does not depend on the inputs, has no gradient
            found = []
            for name in names:
                with suppress(InputError):
                    found += self.attribution(self.explain_model, record=[name]).layers.values()
        return max(float(value.abs().max()) for value in [self.seed, *found] if value.numel())

    def must_have_the_output(self, explain_model: nn.Module) -> None:
        """`FailedError` where the output is not the source model's."""
        result = self.selected(explain_model(*self.examples)).detach()
        difference = (result - self.expected).abs().max()
        if not difference <= 1e-10 * max(1.0, float(self.expected.abs().max())):
            raise FailedError(f"the output differs by {float(difference):.2e}")

    @property
    def tolerance(self) -> float:
        return IN_SINGLE if ".float()" in self.network.source() else TOLERANCE

    def must_agree(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """`FailedError` where two relevances differ by more than rounding explains."""
        if actual.shape != expected.shape:
            raise FailedError(f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
        if not torch.isfinite(expected).all() or not torch.isfinite(actual).all():
            raise FailedError(f"{what}: relevance is not finite")
        if not expected.numel():
            return
        difference = float((actual - expected).abs().max())
        tolerance = self.tolerance
        if difference <= tolerance * float(expected.abs().max()) or difference <= tolerance * self.magnitude:
            return
        if difference <= AMPLIFIED * self.change_by_rounding():
            self.undetermined.append(what)
            return
        raise FailedError(
            f"{what}: differs by {difference:.2e}, where the largest relevance is {float(expected.abs().max()):.2e}"
        )

    def change_by_rounding(self) -> float:
        """By how much relevance changes with the last digits of the weights and inputs."""
        found, reference = 0.0, self.relevance(self.explain_model)
        for number in range(3):
            generator = torch.Generator().manual_seed(number)

            def shaken(value: torch.Tensor, generator=generator) -> torch.Tensor:
                noise = torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1
                return value * (1 + ROUNDING * noise) if value.is_floating_point() else value

            model = self.network.build()
            with torch.no_grad():
                for tensor in [*model.parameters(), *model.buffers()]:
                    tensor.copy_(shaken(tensor))
            other = self.relevance(self.transformed(model), [shaken(example) for example in self.examples])
            found = max(found, float((other - reference).abs().max()))
        return found if math.isfinite(found) else math.inf


def flattened(relevance: Any, batched_at: int = 0) -> torch.Tensor:
    """Relevance of several inputs as one tensor. An input that nothing embeds has none."""
    if isinstance(relevance, dict):
        relevance = tuple(relevance.values())
    if isinstance(relevance, (tuple, list)):
        parts = [flattened(part, batched_at) for part in relevance if part is not None]
        return torch.cat(parts, batched_at + 1)
    return relevance.flatten(batched_at + 1) if relevance.ndim > batched_at + 1 else relevance.unsqueeze(-1)


# --- the checks ------------------------------------------------------------------------------------------------------------


def outputs_are_equal(case: Case) -> None:
    case.must_have_the_output(case.explain_model)


def shortcuts_change_nothing(case: Case) -> None:
    plain = case.transformed(optimize=False)
    case.must_agree(case.relevance(case.explain_model), case.relevance(plain), "relevance with shortcuts and without")


def front_ends_agree(case: Case) -> None:
    used = {stage.name for stage in case.explain_model.compiled.history if stage.stage == "capture"}
    if "export" in used:
        return  # there are models that only torch.export can follow
    exported = case.transformed(capture="export")
    case.must_have_the_output(exported)
    case.must_agree(case.relevance(exported), case.relevance(case.explain_model), "relevance through torch.export")


def samples_are_independent(case: Case) -> None:
    whole = case.relevance(case.explain_model)
    for number in (0, BATCH - 1):
        sample = [example[number : number + 1] for example in case.examples]
        alone = case.relevance(case.explain_model, sample, case.seed[number : number + 1])
        case.must_agree(alone, whole[number : number + 1], "relevance of a sample alone")


def the_ledger_balances(case: Case) -> None:
    accounts = lrpfx.ledger(case.explain_model, case.examples, case.seed, output=case.network.output)
    magnitude = case.magnitude * len(accounts)
    total = float(case.relevance(case.explain_model).sum())
    amounts = {"relevance of the inputs differs from what attribute gives": sum(accounts.inputs.values()) - total}
    if conserves(case.composite):
        amounts["the balance"] = accounts.balance
        for entry in accounts:
            amounts[f"{entry.name} ({entry.rule})"] = entry.unexplained
    for what, amount in amounts.items():
        if not abs(amount) <= case.tolerance * max(magnitude, 1.0):
            if math.isfinite(amount) and abs(amount) <= AMPLIFIED * case.change_by_rounding():
                case.undetermined.append("the ledger")
                continue
            raise FailedError(f"the ledger leaves {amount:.2e} unexplained: {what}")


def targets_together_are_targets_alone(case: Case) -> None:
    targets = [case.seed, -2 * case.seed, case.seed.flip(0)]
    together = case.relevance(case.explain_model, targets=targets)
    for number, target in enumerate(targets):
        case.must_agree(together[number], case.relevance(case.explain_model, target=target), "relevance of several targets")
    chunks = case.attribution(case.explain_model, targets=targets, chunk_size=2).relevance
    case.must_agree(flattened(chunks, 1), together, "relevance of several targets in chunks")


def constants_take_nothing(case: Case) -> None:
    """What is computed from integers, truth values, comparisons and positions can as well be held in buffers."""
    if not case.network.constants():
        return
    held = case.network.with_held_constants(case.examples)
    of_case, of_twin = case.explain_model, case.transformed(held)
    found, in_twin = ({one.name: one.matches for one in lrpfx.history(model)} for model in (of_case, of_twin))
    reading = [name for name in _READING_CONSTANTS if in_twin.get(name, 0) < found.get(name, 0)]
    weighing = [name for name in _READING_WEIGHTS if in_twin.get(name, 0) > found.get(name, 0)]
    if reading or weighing:
        with _without((*_READING_CONSTANTS, *weighing)):
            of_case, of_twin = case.transformed(), case.transformed(held)
    case.must_agree(case.relevance(of_case), case.relevance(of_twin), "relevance beside constants")


#: Passes that read constants: x.masked_fill(sign(x) <= 0, 0) is a ReLU, and linear(zeros) a bias, but not if they are held.
_READING_CONSTANTS = ("find_activations", "find_gated_products", "merge_scales")

#: Passes to which a held constant is a weight: (x * c).sum(-1) is a linear layer then, but not if c is ceil(x).
_READING_WEIGHTS = ("find_linear",)


@contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    """Compile without the passes of these names."""
    before = dict(STAGES)
    for stage, passes in before.items():
        STAGES[stage] = lambda settings, passes=passes: [one for one in passes(settings) if one.name not in names]
    try:
        yield
    finally:
        STAGES.update(before)


def lowered_programs_agree(case: Case) -> None:
    example = tuple(case.examples)
    target = "weights" if case.expected.ndim != 2 or case.network.seed % 2 else "index"
    program = lrpfx.lower(case.explain_model, example, target=target, output=case.network.output).module()
    given = case.seed if target == "weights" else torch.arange(BATCH) % case.expected.shape[1]
    found = {
        tuple(key.split(".")): value for key, value in program(*example, given).items() if key.partition(".")[0] == "relevance"
    }
    names = [argument.value.name for argument in case.network.inputs]
    ordered = sorted(found, key=lambda path: names.index(path[1]) if len(path) > 1 else 0)
    relevance = flattened([found[path] for path in ordered])
    case.must_agree(relevance, case.relevance(case.explain_model, target=given), "relevance of the lowered program")


def compiled_modules_agree(case: Case, backend: str = "aot_eager") -> None:
    torch._dynamo.reset()
    compiled = torch.compile(case.explain_model, fullgraph=True, backend=backend)
    case.must_agree(case.relevance(compiled), case.relevance(case.explain_model), "relevance under torch.compile")


def code_of_inductor_agrees(case: Case) -> None:
    compiled_modules_agree(case, "inductor")


#: The checks in order, and the share of the networks that each is made for.
CHECKS: dict[Callable[[Case], None], float] = {
    outputs_are_equal: 1.0,
    the_ledger_balances: 1.0,
    samples_are_independent: 1.0,
    shortcuts_change_nothing: 1.0,
    constants_take_nothing: 1.0,
    targets_together_are_targets_alone: 1.0,
    front_ends_agree: 0.5,
    lowered_programs_agree: 0.1,
    compiled_modules_agree: 0.05,
    code_of_inductor_agrees: 0.002,
}


@dataclass(frozen=True)
class Failure:
    """A check that does not hold for a network. `kind` is the same for failures that have one cause, as far as can be told."""

    check: str
    error: str
    message: str

    @property
    def kind(self) -> tuple[str, str]:
        words = re.sub(
            r"\(.*?\.py:\d+\)|[-+]?[\d.]+(e[-+]\d+)?|[a-z]+_?\d+(\.[a-z_]+)*", "", " ".join(self.message.splitlines()[:3])
        )
        return self.check, f"{self.error}: {' '.join(words.split())[:150]}"


@contextmanager
def _in_double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


def examined(
    network: Network, composite: str, shares: float = 1.0, only: str = "", undetermined: list[str] | None = None
) -> Failure | None:
    """The first check that does not hold. `shares` multiplies the shares below 1; `only`: the name of the one check to make."""
    chance = random.Random(network.seed + 2)
    with _in_double_precision():
        check = Case
        try:
            case = Case(network, composite)
            overflows = not torch.isfinite(case.expected).all()  # in the source model: there is nothing to explain
            if overflows:
                case.undetermined.append("an output that is not finite")
            for check, share in () if overflows else CHECKS.items():
                drawn = chance.random()
                if check.__name__ == only or (not only and (share == 1.0 or drawn < share * shares)):
                    check(case)
        except Exception as error:
            name = "transform" if check is Case else check.__name__
            return Failure(name, type(error).__name__, str(error))
        if undetermined is not None:
            undetermined.extend(case.undetermined)
    return None


def shrunk(network: Network, composite: str, failure: Failure) -> tuple[Network, str, Failure]:
    """A smaller network that fails in the same way; what stays the same is the composite."""
    only = "" if failure.check == "transform" else failure.check
    for smaller in network.smaller():
        if len(smaller.steps) < len(network.steps):
            found = examined(smaller, composite, only=only)
            if found is not None and found.kind == failure.kind:
                return shrunk(smaller, composite, found)
    return network, composite, failure


def report(network: Network, composite: str, failure: Failure) -> str:
    """A failure with the script that shows it."""
    return f"seed {network.seed}: {failure.check}: {failure.error}: {failure.message}\n\n{network.reproduction(composite)}"

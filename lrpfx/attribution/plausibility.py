"""Implausible maps: how to detect them, and the layer where the problem began.

Only the sum of magnitudes of a map is checked. If it is implausible, the network runs once more to watch the flow.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from lrpfx.attribution.infinite_masks import bound_inputs
from lrpfx.ir.kinds import Softmax
from lrpfx.ir.node import Role, data_calls, map_arguments, node_info, output_node
from lrpfx.rules.formulas import Epsilon, Norm, SoftmaxTaylor
from lrpfx.runtime.explain_module import TreeGraphModule
from lrpfx.support.interrupts import undisturbed
from lrpfx.support.tensors import is_floating, relevance_from

#: The largest plausible ratio of a sample's relevance to its seed, in sums of magnitudes. For sixteen classifiers of
#: torchvision with random weights it is at most 200 under the LRP composites, relative to the largest logit, and up to 1e37 if
#: Gamma leaves biases out of its denominators.
EXCESS = 1e3
#: Relevance counts as lost at a final softmax if less than this share of the seed passes it.
LOST = 1e-2
#: Relevance misses the difference from a reference if it is off by more than this share of the larger output.
UNEXPLAINED, UNEXPLAINED_IN_DOUBLE_PRECISION = 1e-2, 1e-5
#: Relevance counts as out of balance at an operation without a rule if this share of what it received is missing, or added.
UNBALANCED = 1e-3


def magnitudes(tensors: Sequence[torch.Tensor], count: int) -> list[float]:
    """The largest sum of magnitudes of any sample, for each of `count` relevances in the first dimension of the tensors."""
    totals = [0.0] * count
    for tensor in tensors:
        if tensor.numel():
            samples = tensor.shape[1] if tensor.ndim > 1 else 1
            wide = torch.float32 if tensor.element_size() < 4 else tensor.dtype  # 16 bits would overflow
            sums = tensor.reshape(count, samples, -1).abs().sum(2, dtype=wide)
            totals = [total + largest for total, largest in zip(totals, sums.amax(1).tolist(), strict=True)]
    return totals


class Watch(fx.Interpreter):
    """Runs the graph of an explainable module, and records how much relevance flows back along each edge."""

    def __init__(self, module: TreeGraphModule) -> None:
        super().__init__(module)
        self.flows: dict[tuple[fx.Node, fx.Node], float] = {}  # (node, its reader), in backward order: sums of magnitudes
        self.totals: dict[tuple[fx.Node, fx.Node], float] = {}  # the same: sums

    def run_with(self, *args: Any, **keywords: Any) -> Any:
        """The module's result."""
        with undisturbed():
            return self.run(*bound_inputs(self.graph, args, keywords))

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not n.op.startswith("call"):
            return super().fetch_args_kwargs_from_env(n)

        def watched(argument: Any) -> Any:
            if not isinstance(argument, fx.Node) or node_info(argument).role is not Role.DATA:
                return self.env[argument] if isinstance(argument, fx.Node) else argument
            return map_arguments(self.env[argument], lambda value: self._watch((argument, n), value))

        args, kwargs = map_arguments((n.args, n.kwargs), watched)
        return args, kwargs

    def _watch(self, edge: tuple[fx.Node, fx.Node], value: Any) -> Any:
        if not is_floating(value) or not value.requires_grad:
            return value

        def note(relevance: torch.Tensor | None) -> None:
            if relevance is not None and node_info(edge[0]).carries_multiplier:
                relevance = relevance_from(value.detach(), relevance)
            amount = 0.0 if relevance is None else magnitudes([relevance[None]], 1)[0]  # None: zero, as autograd knows
            self.flows[edge] = self.flows.get(edge, 0.0) + amount
            self.totals[edge] = self.totals.get(edge, 0.0) + (0.0 if relevance is None else float(relevance.double().sum()))

        alias = value.view_as(value)
        alias.register_hook(note)
        return alias

    def first_beyond(self, limit: float) -> fx.Node | None:
        """The first node that passed on more than `limit`, or non-finite values."""
        return next((user for (_, user), amount in self.flows.items() if not amount <= limit), None)

    def first_that_stops(self) -> fx.Node | None:
        """The first node that received relevance and passed on none."""
        received, passed = {user: 0.0 for _, user in self.flows}, {user: 0.0 for _, user in self.flows}
        for (source, user), amount in self.flows.items():
            passed[user] += amount
            received[source] = received.get(source, 0.0) + amount
        outputs = output_node(self.graph).all_input_nodes
        return next((node for node in passed if not passed[node] and (received[node] or node in outputs)), None)

    def first_out_of_balance(self) -> tuple[fx.Node, float, float] | None:
        """The first node that keeps its plain gradient and passes on another sum than it received: with both sums."""
        outputs = output_node(self.graph).all_input_nodes
        kept = [node for node in data_calls(self.graph) if node_info(node).keeps_gradient and node not in outputs]
        for node in reversed(kept):
            edges = [edge for edge in self.flows if edge[0] is node]
            if not edges:
                continue
            received = sum(self.totals[edge] for edge in edges)
            passed = sum(total for (_, user), total in self.totals.items() if user is node)
            if not abs(passed - received) <= UNBALANCED * sum(self.flows[edge] for edge in edges):
                return node, received, passed
        return None

    def passed_by(self, name: str) -> float:
        """The relevance that the node called `name` passes on."""
        return sum(amount for (_, user), amount in self.flows.items() if node_info(user).name == name)


def saturates(softmax: fx.Node) -> bool:
    """Whether the rule of a final softmax loses the relevance of a class that the network is sure of."""
    info = node_info(softmax)
    return info.kind is not Softmax or type(info.rule) in (SoftmaxTaylor, Epsilon, Norm, type(None))


def is_inverted(sigmoid: fx.Node, seeds: Sequence[torch.Tensor]) -> bool:
    """Whether relevance changes its sign at a final sigmoid: its result is positive, but its input is negative."""
    row = node_info(sigmoid).operator
    return row is not None and not row.values.logarithm and any(bool(((seed > 0.0) & (seed < 0.5)).any()) for seed in seeds)


def advice_on_sign(sigmoid: fx.Node) -> str:
    """Advice for a model that ends in a sigmoid and says no."""
    info = node_info(sigmoid)
    return (
        f"the model ends in a {info.operator} ({info.name}), whose result is below one half: positive relevance then marks "
        'what speaks against the class; explain the logits: lrpfx.transform(..., explain="logits")'
    )


def advice(softmax: fx.Node) -> str:
    """Advice for a model that ends in a softmax."""
    info = node_info(softmax)
    return (
        f"the model ends in a {info.operator} ({info.name}), which passes on next to nothing of a class that it is sure of; "
        'explain the logits: lrpfx.transform(..., explain="logits")'
    )


def objection_to(
    relevances: Sequence[torch.Tensor],
    seeds: Sequence[float],
    scale: Callable[[], float],
    softmax: fx.Node | None,
    watch: Callable[[int], Watch],
) -> str | None:
    """Why the relevance of the inputs is implausible, or None.

    `relevances` of the inputs have a leading dimension for the seeds; `seeds`: the sums of their magnitudes. `scale` gives the
    reference for relevance if it exceeds the seed; it is asked only for large maps, since it reads the whole output. `softmax`
    computes the output, if any. `watch` runs the network again for one seed.
    """
    for number, (magnitude, seed) in enumerate(zip(magnitudes(relevances, len(seeds)), seeds, strict=True)):
        limit = EXCESS * seed
        if not magnitude <= limit:
            limit = max(limit, EXCESS * scale())
        if not magnitude <= limit:
            watched = watch(number)
            keeps_gradient = any(node_info(node).keeps_gradient for node in data_calls(watched.graph))
            if not (keeps_gradient and math.isfinite(magnitude)):  # a plain gradient is not a share of the output
                place = _place("it began at", watched.first_beyond(limit))
                remedy = "docs/rules.md says which choices of rules do this"
                return f"the map is not determined: {_amounts(magnitude, seed)}{place}; {remedy}"
        elif seed and (not magnitude or (softmax is not None and magnitude <= LOST * seed)):
            watched = watch(number)
            if softmax is not None and watched.passed_by(node_info(softmax).name) <= LOST * seed:
                return f"the map is empty: {_amounts(magnitude, seed)}; {advice(softmax)}"
            if not magnitude:
                place = _place("nothing goes on from", watched.first_that_stops())
                return f"the map is empty: {_amounts(magnitude, seed)}{place}"
    return None


class SumsOfSamples(NamedTuple):
    """What relevance explains of a difference of outputs, in double precision.

    `rows`: relevance of the inputs, the difference, and the magnitudes of both outputs, of shape (4, samples), or (4, 1) where
    the first dimensions of the inputs and of the output differ. `bound`: which share of the larger magnitude may be missing.
    """

    rows: torch.Tensor
    bound: float


def sums_of_samples(
    relevances: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    outputs: tuple[torch.Tensor, torch.Tensor],
) -> list[SumsOfSamples]:
    """One for each seed.

    `relevances` of the inputs have a leading dimension for the seeds, which are the differences times the weights of the
    outputs. `outputs`: those of the input and of the reference.
    """
    found = []
    for number, (seed, weight) in enumerate(zip(seeds, weights, strict=True)):
        of_seed = [one[number].detach() for one in relevances if one is not None]
        count = seed.shape[0] if seed.ndim else 1
        if count < 2 or any(one.ndim == 0 or one.shape[0] != count for one in of_seed):
            count = 1

        def of_rows(value: torch.Tensor, count: int = count) -> torch.Tensor:
            return value.reshape(count, -1).sum(1, dtype=torch.float64)

        explained = sum(map(of_rows, of_seed), seed.new_zeros(count, dtype=torch.float64))
        sizes = [of_rows(relevance_from(one, weight).abs_()) for one in outputs]
        bound = UNEXPLAINED_IN_DOUBLE_PRECISION if seed.dtype == torch.float64 else UNEXPLAINED
        found.append(SumsOfSamples(torch.stack([explained, of_rows(seed), *sizes]), bound))
    return found


def missing_difference(
    found: Sequence[SumsOfSamples], weights: Sequence[torch.Tensor], outputs: tuple[torch.Tensor, torch.Tensor]
) -> str | None:
    """Where relevance does not add up to the difference of the outputs, or None. Arguments: as for `sums_of_samples`."""
    for sums, weight in zip(found, weights, strict=True):
        explained, expected, *sizes = sums.rows.sum(1).tolist()
        if abs(explained - expected) <= sums.bound * max(sizes):
            continue
        if not outputs[1][weight != 0].isfinite().all():
            return (
                "the output for the reference is not finite, so no relevance adds up to the difference: forward divides by "
                "what the reference makes 0, or takes its logarithm. Compare with another reference"
            )
        return (
            f"relevance adds up to {explained:.4g}, but the outputs for the input and the reference differ by "
            f"{expected:.4g}: an operation chooses other entries for the reference, positions that are counted by tokens "
            "differ, or rounding decides. lrpfx.ledger(..., reference=) says where"
        )
    return None


def row_that_misses(found: Sequence[SumsOfSamples]) -> tuple[int, int] | None:
    """The number of a seed and of a sample whose relevance misses the difference of its outputs, if rows are samples; or None.

    Samples with small outputs are measured by the mean of all.
    """
    for number, (rows, bound) in enumerate(found):
        if rows.shape[1] > 1:
            size = torch.maximum(rows[2], rows[3])
            excess = (rows[0] - rows[1]).abs_() - bound * torch.maximum(size, size.mean())
            if bool((excess > 0).any()):
                return number, int(excess.argmax())
    return None


def constants_of_function(seed: float, constants: float) -> str:
    """What is wrong with a function of the outputs whose value is not that of the outputs alone."""
    return (
        f"the map does not add up to the output: constants in the function given as output= take {constants:.3g} of its "
        f"relevance of {seed:.3g}, and no input explains them; leave them out of the function"
    )


def out_of_balance(watched: Watch) -> str | None:
    """Which operation that keeps its plain gradient passes on more or less relevance than it received, or None."""
    found = watched.first_out_of_balance()
    if found is None:
        return None
    node, received, passed = found
    info = node_info(node)
    return (
        f"the map does not add up: {info.located} has no rule and keeps its plain gradient, "
        f"which makes {passed:.3g} of the {received:.3g} that it receives; give it a rule by name: (['{info.name}'], rule)"
    )


def _amounts(magnitude: float, seed: float) -> str:
    amount = "not finite" if not math.isfinite(magnitude) else f"{magnitude:.1e}" if magnitude else "exactly zero"
    return f"relevance of the inputs is {amount}, and that of the output {seed:.2e}"


def _place(text: str, node: fx.Node | None) -> str:
    if node is None:
        return ""
    info = node_info(node)
    return f"; {text} {info.name} ({info.rule or info.operator})"

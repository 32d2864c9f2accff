"""Shortcuts: rules that give the same relevance with less work, using facts that the compiler knows about a layer.

They cover dense layers, convolutions and sums. A rule chooses one in its method `shortcut`; subclasses of a rule do not inherit
it. Each shortcut is tested against the rule that it replaces. `transform(..., optimize=False)` uses none of them. The notation
is that of `lrpfx.rules.formulas`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lrpfx.errors import RuleError
from lrpfx.ir.node import Facts
from lrpfx.ir.operator import Sign
from lrpfx.operators.layer import Layer
from lrpfx.rules.modifiers import ClampMod, ParamMod, SquareMod, expanded_bound
from lrpfx.rules.ratios import weights_by_sign
from lrpfx.rules.rule import Absorbed, Rule
from lrpfx.rules.stabilizer import Stabilizer, StabilizerFunction
from lrpfx.runtime.layer_call import LayerCall


def is_affine(layer: Layer) -> bool:
    """Whether a layer is a dense layer or convolution of one input: linear up to a bias, with a known transposed map."""
    return layer.operation.has_adjoint and len(layer.inputs) == 1 and layer.parameters.get("weight") is not None


def is_plain_addition(layer: Layer) -> bool:
    """Whether a layer computes a + b."""
    operation = layer.operation
    coefficients = None if operation.operator is None else operation.operator.merging.coefficients
    adds = coefficients is not None and coefficients(1) == (1, 1)
    return adds and operation.inputs == 2 and operation.kwargs.get("alpha", 1) == 1 and len(operation.args) == 2


def is_elementwise(stabilizer: StabilizerFunction) -> bool:
    """Whether a stabilizer acts on each entry independently of the others."""
    return type(stabilizer) is Stabilizer and not stabilizer.norm_scale


class Shortcut(Rule):
    """A cheaper form of a rule. Its title, `repr` and account of relevance are those of the rule."""

    def __init__(self, rule: Rule, stabilizer: StabilizerFunction) -> None:
        self.rule = rule
        self.stabilizer = stabilizer

    @property
    def title(self) -> str:
        return self.rule.title

    @property
    def as_written(self) -> Rule:
        return self.rule

    def __repr__(self) -> str:
        return repr(self.rule)

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed | None:
        return self.rule.absorbed(call.with_modified(self.rule.parameter_modifiers), relevance)

    def relevance_of_parameter(self, call: LayerCall, relevance: torch.Tensor, place: int) -> torch.Tensor | None:
        return self.rule.relevance_of_parameter(call.with_modified(self.rule.parameter_modifiers), relevance, place)


# --- rules that treat positive and negative inputs separately ----------------------------------------------------------------


class _Split(Shortcut):
    """Base class for rules with pairs of branches that share a total.

    One branch is for the positive and one for the negative part of the input. A branch is omitted if its part is known to be
    zero and it adds no bias.
    """

    pairs = 1  # number of the rule's pairs that are in use

    def __init__(
        self,
        rule: Rule,
        stabilizer: StabilizerFunction,
        layer: Layer,
        facts: Facts,
        zero_params: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(rule, stabilizer)
        self.facts = facts
        self.zero_params = zero_params
        has_bias = layer.parameters.get("bias") is not None and "bias" not in (zero_params or ())
        absent = {Sign.NONNEGATIVE: 1, Sign.NONPOSITIVE: None if has_bias else 0}.get(facts.signs[0])
        self.kept = [branch for branch in range(2 * self.pairs) if branch % 2 != absent]

    @property
    def parameter_modifiers(self) -> tuple[ParamMod, ...]:
        return tuple(self.rule.parameter_modifiers[branch] for branch in self.kept)

    def parts(self, call: LayerCall) -> dict[int, torch.Tensor]:
        """The parts of the input that are in use: 0 is the positive part, 1 the negative one."""
        (input,), (sign,) = call.inputs, self.facts.signs
        parts: dict[int, torch.Tensor] = {}
        for part in dict.fromkeys(branch % 2 for branch in self.kept):
            limits, known = ({"min": 0.0}, Sign.NONNEGATIVE) if part == 0 else ({"max": 0.0}, Sign.NONPOSITIVE)
            parts[part] = input if sign is known else input.clamp(**limits)
        return parts

    def total(self, call: LayerCall, pair: int, parts: dict[int, torch.Tensor]) -> torch.Tensor:
        """The sum of the outputs of a pair, in new memory."""
        outputs = [call.run_branch(self._place(pair, part), input) for part, input in parts.items()]
        return outputs[0] if len(outputs) == 1 else call.added(outputs[0], outputs[1])

    def _place(self, pair: int, part: int) -> int:
        return self.kept.index(2 * pair + part)

    def send_back(
        self, call: LayerCall, parts: dict[int, torch.Tensor], ratios: Iterable[tuple[float | None, torch.Tensor]]
    ) -> tuple[torch.Tensor | None, ...]:
        """The relevance of the input: the sum over its parts of part * gradient pulled back to it.

        `ratios` yields a weight (None for 1) and a ratio for each pair. It is consumed one pair at a time, to save memory.
        """
        gradients: dict[int, torch.Tensor] = {}
        for pair, (weight, ratio) in enumerate(ratios):
            for part, input in parts.items():
                pulled = call.pull_back_branch(self._place(pair, part), ratio, input)
                if weight is not None and part not in gradients:
                    pulled = call.multiplied(pulled, weight)
                gradients[part] = pulled if part not in gradients else call.added(gradients[part], pulled, weight)
                del pulled
            del ratio
        relevances = [call.multiplied(gradients.pop(part), input) for part, input in parts.items()]
        return (relevances[0] if len(relevances) == 1 else call.added(relevances[0], relevances[1]),)


class PositiveTotal(_Split):
    """One pair, whose total is >= 0 where relevance is nonzero: ZPlus, and Gamma if all relevance is where z > 0."""

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = self.parts(call)
        divisor = call.once("divisor", lambda: _divisor(self.stabilizer, self.total(call, 0, parts)))
        return self.send_back(call, parts, [(None, relevance / divisor)])


class PositiveAndNegativeTotals(_Split):
    """AlphaBeta: one pair with the total z⁺ >= 0, and one with the total z⁻ <= 0.

    If all relevance is where z > 0, z⁺ is computed as z + |z⁻|, which cannot cancel. Otherwise it could, and both totals are
    computed from their branches. ZPlus with `conserve` is AlphaBeta(1, 0) with `conserve`.
    """

    pairs = 2
    reads_positive_output = True

    def __init__(
        self,
        rule: Rule,
        stabilizer: StabilizerFunction,
        layer: Layer,
        facts: Facts,
        zero_params: str | Sequence[str] | None,
        alpha: float,
        beta: float,
        conserve: bool,
    ) -> None:
        super().__init__(rule, stabilizer, layer, facts, zero_params)
        self.alpha = alpha
        self.beta = beta
        self.conserve = conserve

    @property
    def saves_output(self) -> bool:
        return self.facts.relevant_where_positive and not self.zero_params and is_elementwise(self.stabilizer)

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = self.parts(call)
        if self.conserve:
            factors = list(call.once("factors", lambda: self._factors(call, parts)))
            return self.send_back(call, parts, ((None, relevance * factors.pop(0)) for _ in range(self.pairs)))
        divisors = list(call.once("divisors", lambda: self._divisors(call, parts)))
        return self.send_back(call, parts, ((weight, relevance / divisors.pop(0)) for weight in (self.alpha, -self.beta)))

    def _factors(self, call: LayerCall, parts: dict[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The factor of the relevance for each pair, with `conserve`."""
        positive, negative = self._totals(call, parts)
        weights = weights_by_sign(positive, negative, self.alpha, self.beta)
        divisors = _divisor(self.stabilizer, positive), _divisor(self.stabilizer, negative, positive=False)
        return weights[0] / divisors[0], weights[1] / divisors[1]

    def _divisors(self, call: LayerCall, parts: dict[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        positive, negative = self._totals(call, parts)
        return _divisor(self.stabilizer, positive), _divisor(self.stabilizer, negative, positive=False)

    def _totals(self, call: LayerCall, parts: dict[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """z⁺ and z⁻, in new memory."""
        negative = self.total(call, 1, parts)
        if not self.saves_output:
            positive = self.total(call, 0, parts)
        else:
            positive = call.added(call.own_output().clamp(min=0.0), negative, -1.0)
        return positive, negative


class TotalOfOwnSign(_Split):
    """Gamma: the total for negative outputs is (2 + gamma) z minus the total for positive ones.

    It is needed only where z < 0. There the two terms have different signs, and their difference cannot cancel. The magnitude
    of the total that matches the sign of z is then (total for positive outputs) - (2 + gamma) z⁻, with z⁻ = min(z, 0).
    """

    pairs = 2
    recomputes_output = True

    def __init__(self, rule: Rule, stabilizer: StabilizerFunction, layer: Layer, facts: Facts, gamma: float) -> None:
        super().__init__(rule, stabilizer, layer, facts)
        self.weight = -2.0 - gamma

    @property
    def saves_output(self) -> bool:
        return True

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = self.parts(call)
        factors = list(call.once("factors", lambda: self._factors(call, parts)))
        return self.send_back(call, parts, ((None, relevance * factors.pop(0)) for _ in range(self.pairs)))

    def _factors(self, call: LayerCall, parts: dict[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of the relevance for positive and for negative outputs."""
        output = call.own_output()
        total = call.added(self.total(call, 0, parts), output.clamp(max=0.0), self.weight)
        divisor = _divisor(self.stabilizer, total)
        factor = output.sign().div_(divisor)
        return factor.clamp(min=0.0), factor.clamp(max=0.0)


def _divisor(stabilizer: StabilizerFunction, total: torch.Tensor, positive: bool = True) -> torch.Tensor:
    """Stabilize a total of known sign, in place if possible."""
    return stabilizer.of_sign(total, positive) if isinstance(stabilizer, Stabilizer) else stabilizer(total)


# --- sums --------------------------------------------------------------------------------------------------------------------


class ShareOfSum(Shortcut):
    """Norm for a + b: R_a = a / st(a + b) R. Recomputing the sum is cheaper than saving it."""

    recomputes_inputs = True

    def __init__(self, rule: Rule, stabilizer: StabilizerFunction, facts: Facts) -> None:
        super().__init__(rule, stabilizer)
        self.facts = facts

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        shares = call.once("shares", lambda: self._shares(call))
        return tuple((relevance * share).sum_to_size(input.shape) for share, input in zip(shares, call.inputs, strict=True))

    def _shares(self, call: LayerCall) -> list[torch.Tensor]:
        total = call.inputs[0] + call.inputs[1]
        is_positive = self.facts.relevant_where_positive
        divisor = _divisor(self.stabilizer, total) if is_positive else self.stabilizer(total)
        return [input / divisor for input in call.inputs]


# --- rules with constants in the denominator ---------------------------------------------------------------------------------


class EvenSpread(Shortcut):
    """Flat: all channels of a group are equal, so one is enough, and the denominators are counts of entries."""

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input,), arguments = call.inputs, call.arguments()
        weight = arguments["weight"]
        if weight.ndim == 2:
            count = relevance.new_full((1,) * relevance.ndim, weight.shape[1])
            share = relevance.sum(-1, keepdim=True) / self.stabilizer(count)
            return (share.expand(*relevance.shape[:-1], weight.shape[1]).contiguous(),)
        channel, groups = 1 - weight.ndim, arguments["groups"]
        members = input.shape[channel] // groups
        ones = weight.new_ones((groups, 1, *weight.shape[2:]))
        arguments = {**arguments, "weight": ones, "bias": None}
        count = members * _constant_response(call, None, {**arguments, "weight": ones[:1], "groups": 1})
        shares = relevance.unflatten(channel, (groups, -1)).sum(channel) / self.stabilizer(count)
        adjoint = call.operation.listed.linear.adjoint
        pulled = None if adjoint is None else adjoint(shares, (input.narrow(channel, 0, groups),), arguments)
        if pulled is None or pulled[0] is None:
            return self.rule.propagate(call.with_modified(self.rule.parameter_modifiers), relevance)
        return (pulled[0].repeat_interleave(members, channel),)


class ConstantTotal(Shortcut):
    """WSquare: the denominator is computed for one sample, from kernels summed over their inputs."""

    @property
    def parameter_modifiers(self) -> tuple[ParamMod, ...]:
        return (SquareMod(),)

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = _constant_response(call, None, {**call.arguments(), **call.named_branch(0)})
        ratio = relevance / self.stabilizer(total)
        return (call.pull_back_branch(0, ratio, call.inputs[0]),)


class BoundedInput(Shortcut):
    """ZBox: R' = (x - high) Wᵀ s + (high - low) W⁺ᵀ s with s = R / st(z - W high - b - W⁺ (low - high)).

    If each channel has one lower and one upper bound, their contribution to the denominator is computed for one sample.
    """

    def __init__(
        self, rule: Rule, stabilizer: StabilizerFunction, low: float | torch.Tensor, high: float | torch.Tensor
    ) -> None:
        super().__init__(rule, stabilizer)
        self.low = low
        self.high = high

    @property
    def parameter_modifiers(self) -> tuple[ParamMod, ...]:
        return (ClampMod(min=0.0, param_keys=["weight"]),)

    @property
    def saves_output(self) -> bool:
        return True

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input,) = call.inputs
        low, high = (_bound(bound, input) for bound in (self.low, self.high))
        ratio = relevance / call.once("divisor", lambda: self._divisor(call, low, high))
        result = call.multiplied(call.pull_back_with(ratio, call.parameters, input), input - high)
        return (call.added(result, call.multiplied(call.pull_back_branch(0, ratio, input), high - low)),)

    def _divisor(self, call: LayerCall, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        own, positive = call.arguments(), {**call.arguments(), **call.named_branch(0), "bias": None}
        constant = _output_for(call, high, own) + _output_for(call, low - high, positive)
        return self.stabilizer(call.own_output() - constant)


def _constant_response(call: LayerCall, values: torch.Tensor | None, arguments: dict[str, Any]) -> torch.Tensor:
    """The layer's output for an input with one value in each channel, by default 1."""
    respond = call.operation.listed.linear.constant_response
    if respond is None:
        raise RuleError(f"the row {call.operation.listed} has no response to a constant input")
    return respond(call.inputs[0].shape, values, arguments)


def _bound(bound: float | torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """A bound of the input, in a shape that expands to the input's."""
    if not isinstance(bound, torch.Tensor):
        return input.new_full((1,) * input.ndim, bound)
    bound = bound.to(input)
    if bound.ndim == 0:
        return bound + input.new_zeros((1,) * input.ndim)  # inductor cannot reshape a single number
    missing = input.ndim - bound.ndim
    expanded_bound(bound, input)  # raises the error if it does not fit
    bound = bound[(...,) + (None,) * missing]
    return bound[: input.shape[0]]


def _output_for(call: LayerCall, values: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    """The layer's output for `values` expanded to the input's shape; for one sample if each channel has one value."""
    (input,), weight = call.inputs, arguments["weight"]
    channel = input.ndim - (weight.ndim - 1)
    alike = all(size == 1 for place, size in enumerate(values.shape) if place != channel)
    if alike:
        return _constant_response(call, values.flatten().expand(input.shape[channel]), arguments)
    result: torch.Tensor = call.operation.listed.canonical(**{**arguments, "input": values.expand(-1, *input.shape[1:])})
    return result

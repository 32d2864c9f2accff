"""The rules of Layer-wise Relevance Propagation.

Notation: x is the input, W the weight, b the bias, z = Wx + b the output, R its relevance, and R' the relevance of the input.
a⁺ and a⁻ are the positive and negative parts of a, and st is a stabilizer. Products with R and x are element-wise. For a
nonlinear layer, W denotes the layer, and Wᵀ its vector-Jacobian product at x.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from lrpfx.errors import InputError, RuleError
from lrpfx.ir import kinds
from lrpfx.ir.node import Facts
from lrpfx.operators.layer import Layer, Operation
from lrpfx.operators.table import lookup
from lrpfx.rules.hook import Hook
from lrpfx.rules.modifiers import (
    Bound,
    Clamp,
    ClampMod,
    GammaMod,
    NoMod,
    Ones,
    OnesMod,
    ParamMod,
    SquareMod,
    Unchanged,
    zero_bias,
)
from lrpfx.rules.ratios import (
    ConservingRatios,
    FirstGradient,
    SharedRatios,
    Tensors,
    WeightedProducts,
    added,
    held_back,
    sum_of,
)
from lrpfx.rules.rule import Absorbed, Rule
from lrpfx.rules.shortcuts import (
    BoundedInput,
    ConstantTotal,
    EvenSpread,
    PositiveAndNegativeTotals,
    PositiveTotal,
    ShareOfSum,
    TotalOfOwnSign,
    is_affine,
    is_elementwise,
    is_plain_addition,
)
from lrpfx.rules.stabilizer import Stabilizer, StabilizerFunction
from lrpfx.rules.template import BasicHook
from lrpfx.runtime.layer_call import LayerCall
from lrpfx.runtime.multipliers import Derivative, HeldScale, MultiplierForm, Ratio
from lrpfx.support.derivatives import vjp
from lrpfx.support.numbers import finite_number

Names = str | Sequence[str] | None
Stabilization = float | StabilizerFunction


class Epsilon(BasicHook):
    """R' = x Wᵀ (R / st(z)).

    Parameters
    ----------
    epsilon
        The stabilizer st: what it adds to the magnitude of z, or a function; see `lrpfx.core.Stabilizer`.
    zero_params
        Names of parameters that count as zeros, such as "bias".

    References
    ----------
    .. [1] Bach et al. 2015, eq. 58, https://doi.org/10.1371/journal.pone.0130140

    Examples
    --------
    >>> rule = lrpfx.rules.Epsilon(1e-3)
    >>> composite = lrpfx.composites.LayerMapComposite([(nn.Linear, rule)])
    """

    shown = ("epsilon", "zero_params")

    def __init__(self, epsilon: Stabilization = 1e-6, zero_params: Names = None) -> None:
        self.epsilon = Stabilizer.ensure(epsilon)
        self.zero_params = zero_params
        super().__init__(
            param_modifiers=[NoMod(zero_params=zero_params)],
            gradient_mapper=SharedRatios(self.epsilon, [{0: 1}]),
        )

    def multiplier_form(self, layer: Layer) -> MultiplierForm | None:
        return Derivative() if is_exact(self.epsilon) and not self.zero_params and is_listed(layer) else None


class Norm(BasicHook):
    """Epsilon with unmodified parameters, for sums and average pooling.

    `stabilizer`: as `epsilon` of `Epsilon`.
    """

    shown = ("stabilizer",)

    def __init__(self, stabilizer: Stabilization = 1e-6) -> None:
        self.stabilizer = Stabilizer.ensure(stabilizer)
        super().__init__(
            param_modifiers=[NoMod(param_keys=[])],
            gradient_mapper=SharedRatios(self.stabilizer, [{0: 1}]),
        )

    def shortcut(self, layer: Layer, facts: Facts) -> Rule:
        applies = is_plain_addition(layer) and is_elementwise(self.stabilizer)
        return ShareOfSum(self, self.stabilizer, facts) if applies else self

    def multiplier_form(self, layer: Layer) -> MultiplierForm | None:
        return Derivative() if is_exact(self.stabilizer) and is_listed(layer) else None


def is_listed(layer: Layer) -> bool:
    """Whether a layer is a call of the operator table."""
    return layer.operation.operator is not None


def is_exact(stabilizer: StabilizerFunction) -> bool:
    """Whether a stabilizer leaves all values but 0 as they are."""
    return type(stabilizer) is Stabilizer and stabilizer.epsilon == 0


def _proportional_inputs(layer: Layer) -> list[bool]:
    """For each input of an element-wise product, whether the output is proportional to it if the others are constant."""
    row = layer.operation.operator
    if row is None or not row.entries.elementwise or not issubclass(layer.kind, kinds.Product):
        return [False]
    names = layer.operation.names_of_inputs
    return [name in row.product.proportional_to for name in names] if len(names) == len(layer.inputs) else [False]


def _parts_by_sign(zero_params: Names) -> tuple[list[Clamp], list[ClampMod]]:
    """Input and parameter modifiers for positive contributions (x⁺ W⁺ and x⁻ W⁻) and negative ones (x⁺ W⁻ and x⁻ W⁺)."""
    without_bias = zero_bias(zero_params)
    return [Clamp(min=0.0), Clamp(max=0.0), Clamp(min=0.0), Clamp(max=0.0)], [
        ClampMod(min=0.0, zero_params=zero_params),
        ClampMod(max=0.0, zero_params=without_bias),
        ClampMod(max=0.0, zero_params=zero_params),
        ClampMod(min=0.0, zero_params=without_bias),
    ]


class ZPlus(BasicHook):
    """R' = x⁺ W⁺ᵀ s + x⁻ W⁻ᵀ s with s = R / st(z⁺), z⁺ = W⁺x⁺ + W⁻x⁻ + b⁺.

    Parameters
    ----------
    stabilizer
        As `epsilon` of `Epsilon`.
    zero_params
        As for `Epsilon`.
    conserve
        Where z⁺ = 0, no positive contribution can take the relevance of the output, and it is lost. With True, the negative
        contributions take it: R' = x⁺ W⁻ᵀ t + x⁻ W⁺ᵀ t with t = R / st(z⁻), z⁻ = W⁻x⁺ + W⁺x⁻ + b⁻.

    References
    ----------
    .. [1] Montavon et al. 2017, https://doi.org/10.1016/j.patcog.2016.11.008

    Examples
    --------
    >>> composite = lrpfx.composites.NameMapComposite([("0", lrpfx.rules.ZPlus())])
    """

    shown = ("stabilizer", "zero_params", "conserve")

    def __init__(self, stabilizer: Stabilization = 1e-6, zero_params: Names = None, conserve: bool = False) -> None:
        self.stabilizer = Stabilizer.ensure(stabilizer)
        self.zero_params = zero_params
        self.conserve = conserve
        inputs, parameters = _parts_by_sign(zero_params)
        used = 4 if conserve else 2
        super().__init__(
            input_modifiers=inputs[:used],
            param_modifiers=parameters[:used],
            gradient_mapper=(
                ConservingRatios(self.stabilizer, 1.0, 0.0) if conserve else SharedRatios(self.stabilizer, [{0: 1, 1: 1}])
            ),
        )

    def shortcut(self, layer: Layer, facts: Facts) -> Rule:
        if not is_affine(layer):
            return self
        known = (self, self.stabilizer, layer, facts, self.zero_params)
        if self.conserve and (self.zero_params or not facts.relevant_where_positive):
            return PositiveAndNegativeTotals(*known, alpha=1.0, beta=0.0, conserve=True)
        return PositiveTotal(*known)  # where z > 0, positive contributions exist and no relevance is lost


class AlphaBeta(BasicHook):
    """Positive contributions weighted by alpha, negative ones by beta, with alpha - beta = 1.

    R' = alpha (x⁺ W⁺ᵀ + x⁻ W⁻ᵀ) R / st(z⁺) - beta (x⁺ W⁻ᵀ + x⁻ W⁺ᵀ) R / st(z⁻), z⁺ = W⁺x⁺ + W⁻x⁻ + b⁺, z⁻ = W⁻x⁺ + W⁺x⁻ + b⁻

    Parameters
    ----------
    alpha
        The weight of positive contributions.
    beta
        The weight of negative contributions.
    stabilizer, zero_params
        As for `ZPlus`.
    conserve
        Where z⁻ = 0, no negative contribution can take -beta R, and the inputs receive alpha R instead of R; a depthwise kernel
        of one sign is an example. Where z⁺ = 0, they receive -beta R. With True, outputs with z⁻ = 0 use alpha = 1 and beta =
        0, and outputs with z⁺ = 0 use alpha = 0 and beta = -1. The contributions of the other sign then take all of R.

    Raises
    ------
    InputError
        A weight is negative, or alpha - beta is not 1.

    References
    ----------
    .. [1] Bach et al. 2015, eq. 60, https://doi.org/10.1371/journal.pone.0130140
    """

    shown = ("alpha", "beta", "stabilizer", "zero_params", "conserve")

    def __init__(
        self,
        alpha: float = 2.0,
        beta: float = 1.0,
        stabilizer: Stabilization = 1e-6,
        zero_params: Names = None,
        conserve: bool = False,
    ) -> None:
        alpha, beta = finite_number("alpha", alpha, least=0.0), finite_number("beta", beta, least=0.0)
        if alpha - beta != 1.0:
            raise InputError(f"alpha - beta must be 1, got {alpha} - {beta} = {alpha - beta}")
        self.alpha = alpha
        self.beta = beta
        self.stabilizer = Stabilizer.ensure(stabilizer)
        self.zero_params = zero_params
        self.conserve = conserve
        inputs, parameters = _parts_by_sign(zero_params)
        super().__init__(
            input_modifiers=inputs,
            param_modifiers=parameters,
            gradient_mapper=(
                ConservingRatios(self.stabilizer, alpha, beta)
                if conserve
                else SharedRatios(self.stabilizer, [{0: 1, 1: 1}, {2: 1, 3: 1}])
            ),
            reducer=WeightedProducts(None if conserve else [alpha, alpha, -beta, -beta]),
        )

    def shortcut(self, layer: Layer, facts: Facts) -> Rule:
        if not is_affine(layer):
            return self
        known = (self, self.stabilizer, layer, facts, self.zero_params)
        return PositiveAndNegativeTotals(*known, alpha=self.alpha, beta=self.beta, conserve=self.conserve)


class GammaRatios:
    """Relevance of positive outputs goes to branches 0 and 1, that of negative ones to 2 and 3. Branch 4 is the output."""

    def __init__(self, stabilizer: StabilizerFunction) -> None:
        self.stabilizer = stabilizer

    def __call__(self, relevance: torch.Tensor, outputs: Tensors) -> list[torch.Tensor | None]:
        output = outputs[4]
        positive = (output > 0) * relevance / self.stabilizer(outputs[0] + outputs[1])
        negative = (output < 0) * relevance / self.stabilizer(outputs[2] + outputs[3])
        return [positive, positive, negative, negative, None]

    def absorbed(self, relevance: torch.Tensor, outputs: Tensors, weights: Sequence[float]) -> Absorbed:
        """The share of the stabilizers, and the relevance of outputs that are zero."""
        output = outputs[4]
        positive = held_back((output > 0) * relevance, outputs[0] + outputs[1], self.stabilizer)
        negative = held_back((output < 0) * relevance, outputs[2] + outputs[3], self.stabilizer)
        return added([positive, negative, {"absent": ((output == 0) * relevance).sum()}])


class Gamma(BasicHook):
    """Favours contributions with the sign of the output by gamma, for inputs of either sign.

    With P = W + gamma W⁺ and N = W + gamma W⁻, and p and n defined in the same way for the bias: R' = x⁺ (Pᵀ s₊ + Nᵀ s₋) + x⁻
    (Nᵀ s₊ + Pᵀ s₋), where s₊ = [z > 0] R / st(P x⁺ + N x⁻ + p) and s₋ = [z < 0] R / st(N x⁺ + P x⁻ + n).

    Parameters
    ----------
    gamma
        How much a contribution of the output's sign gains.
    stabilizer, zero_params
        As for `ZPlus`.

    Raises
    ------
    InputError
        Gamma is negative: the denominators, z plus gamma times the contributions of its sign, could then be zero.

    References
    ----------
    .. [1] Montavon et al. 2019, https://doi.org/10.1007/978-3-030-28954-6_10
    .. [2] Andéol et al. 2021, https://arxiv.org/abs/2106.04923, which has this form

    Examples
    --------
    >>> composite = lrpfx.composites.EpsilonPlus(layer_map=[(lrpfx.types.Convolution, lrpfx.rules.Gamma(0.1))])
    """

    shown = ("gamma", "stabilizer", "zero_params")

    def __init__(self, gamma: float = 0.25, stabilizer: Stabilization = 1e-6, zero_params: Names = None) -> None:
        self.gamma = gamma = finite_number("gamma", gamma, least=0.0)
        self.stabilizer = Stabilizer.ensure(stabilizer)
        self.zero_params = zero_params
        without_bias = zero_bias(zero_params)
        super().__init__(
            input_modifiers=[Clamp(min=0.0), Clamp(max=0.0), Clamp(min=0.0), Clamp(max=0.0), Unchanged()],
            param_modifiers=[
                GammaMod(gamma, min=0.0, zero_params=zero_params),
                GammaMod(gamma, max=0.0, zero_params=without_bias),
                GammaMod(gamma, max=0.0, zero_params=zero_params),
                GammaMod(gamma, min=0.0, zero_params=without_bias),
                NoMod(),
            ],
            gradient_mapper=GammaRatios(self.stabilizer),
        )

    def shortcut(self, layer: Layer, facts: Facts) -> Rule:
        if not is_affine(layer) or self.zero_params or not is_elementwise(self.stabilizer):
            return self
        if facts.relevant_where_positive:
            return PositiveTotal(self, self.stabilizer, layer, facts)
        return TotalOfOwnSign(self, self.stabilizer, layer, facts, self.gamma)


class _OtherInputs(BasicHook):
    """Base class of rules that run a layer on inputs other than its own. This is valid only for layers linear in them."""

    def check(self, layer: Layer) -> None:
        super().check(layer)
        if issubclass(layer.kind, (kinds.LayerNorm, kinds.RMSNorm, kinds.Softmax, kinds.Statistic)):
            raise RuleError(f"it is for layers linear in their input, but this one is of kind {layer.kind.__name__}")


class _OnesAsInput(_OtherInputs):
    """Base class of rules that run a layer on ones. Ones cancel in layers that subtract, so those are rejected."""

    shown = ("stabilizer", "zero_params")

    def __init__(self, stabilizer: Stabilization = 1e-6, zero_params: Names = None) -> None:
        self.stabilizer = Stabilizer.ensure(stabilizer)
        self.zero_params = zero_params
        super().__init__(
            input_modifiers=[Ones()],
            param_modifiers=[self._modifier()],
            gradient_mapper=SharedRatios(self.stabilizer, [{0: 1}]),
            reducer=FirstGradient(),
        )

    @abstractmethod
    def _modifier(self) -> ParamMod:
        """The modifier of parameters."""

    def check(self, layer: Layer) -> None:
        super().check(layer)
        if layer.input_count is not None:
            self._check_count(layer.input_count)
        row = layer.operation.row
        if row is not None and issubclass(row.kind, kinds.Sum) and len(row.data) == 1 and not row.entries.adds_up:
            raise RuleError(f"it runs the layer on ones, but {row.name} subtracts, so that the ones cancel")

    def check_call(self, operation: Operation, inputs: Sequence[torch.Size], output: torch.Size) -> None:
        super().check_call(operation, inputs, output)
        self._check_count(len(inputs))

    @staticmethod
    def _check_count(inputs: int) -> None:
        if inputs > 1:
            raise RuleError(f"it takes a layer with one input, but this one has {inputs}; Uniform gives them equal shares")


class ZBox(_OtherInputs):
    """R' = x Wᵀ s - low W⁺ᵀ s - high W⁻ᵀ s with s = R / st(Wx - W⁺ low - W⁻ high): for inputs in [low, high], such as pixels.

    Parameters
    ----------
    low
        The lowest value of the input: a number or a tensor that expands to the input's shape.
    high
        The highest value, likewise.
    stabilizer, zero_params
        As for `ZPlus`.

    Raises
    ------
    InputError
        A bound is not finite, or low exceeds high.

    References
    ----------
    .. [1] Montavon et al. 2017, eq. 13, https://doi.org/10.1016/j.patcog.2016.11.008

    Examples
    --------
    >>> composite = lrpfx.composites.EpsilonPlusFlat(first_map=[(nn.Conv2d, lrpfx.rules.ZBox(0.0, 1.0))])
    """

    shown = ("low", "high", "stabilizer", "zero_params")

    def __init__(
        self,
        low: float | torch.Tensor,
        high: float | torch.Tensor,
        stabilizer: Stabilization = 1e-6,
        zero_params: Names = None,
    ) -> None:
        low, high = _finite_bound("low", low), _finite_bound("high", high)
        if isinstance(low, float) and isinstance(high, float) and low > high:
            raise InputError(f"low must be at most high, but low={low} and high={high}")
        self.low = low
        self.high = high
        self.stabilizer = Stabilizer.ensure(stabilizer)
        self.zero_params = zero_params
        super().__init__(
            input_modifiers=[Unchanged(), Bound(low), Bound(high)],
            param_modifiers=[
                NoMod(zero_params=zero_params),
                ClampMod(min=0.0, zero_params=zero_params),
                ClampMod(max=0.0, zero_params=zero_params),
            ],
            gradient_mapper=SharedRatios(self.stabilizer, [{0: 1, 1: -1, 2: -1}]),
            reducer=WeightedProducts([1.0, -1.0, -1.0]),
        )

    def shortcut(self, layer: Layer, facts: Facts) -> Rule:
        applies = is_affine(layer) and not self.zero_params
        return BoundedInput(self, self.stabilizer, self.low, self.high) if applies else self


def _finite_bound(name: str, bound: float | torch.Tensor) -> float | torch.Tensor:
    if not isinstance(bound, torch.Tensor):
        return finite_number(name, bound)
    if not torch.isfinite(bound).all():
        raise InputError(f"{name} has values that are not finite", topic="values-not-finite")
    return bound


class WSquare(_OnesAsInput):
    """R' = (W²)ᵀ (R / st(W² 1 + b²)): independent of the input's values.

    Other arguments: as for `ZPlus`.

    References
    ----------
    .. [1] Montavon et al. 2017, eq. 12, https://doi.org/10.1016/j.patcog.2016.11.008
    """

    def _modifier(self) -> ParamMod:
        return SquareMod(zero_params=self.zero_params)

    def shortcut(self, layer: Layer, facts: Facts) -> Rule:
        applies = is_affine(layer) and not self.zero_params and isinstance(self.stabilizer, Stabilizer)
        return ConstantTotal(self, self.stabilizer) if applies else self


class Flat(_OnesAsInput):
    """Spreads relevance evenly over the inputs of each output, as if W were 1 and b were 0.

    Other arguments: as for `ZPlus`.

    References
    ----------
    .. [1] Lapuschkin et al. 2019, https://doi.org/10.1038/s41467-019-08987-4
    """

    def _modifier(self) -> ParamMod:
        return OnesMod(zero_params=zero_bias(self.zero_params), require_params=False)

    def shortcut(self, layer: Layer, facts: Facts) -> Rule:
        row = layer.operation.operator
        alike = is_affine(layer) and row is not None and row.linear.constant_response is not None
        applies = alike and not self.zero_params and isinstance(self.stabilizer, Stabilizer)
        return EvenSpread(self, self.stabilizer) if applies else self


def _fit(relevance: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Relevance of an input that was broadcast: the sum over its copies, in the input's shape."""
    return relevance if relevance.shape == input.shape else relevance.sum_to_size(input.shape)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of shape `shape` broadcasts to the shape `to`."""
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(have == want or have == 1 for have, want in pairs)


# Code that runs in a call compares kinds by identity, not by `issubclass`: torch.compile cannot trace the metaclass of kinds.


def _is_gated_unit(kind: type[kinds.Kind], inputs: int) -> bool:
    """Whether the operands of a layer are the two halves of its one input."""
    return inputs == 1 and kind is kinds.Gate


def _adds_up(operation: Operation) -> bool:
    """Whether the operator table marks a layer as one that adds up entries of its input."""
    return operation.row is not None and operation.row.entries.adds_up


class _SharingRule(Hook):
    """Base class of rules that divide the relevance of an output entry among the input entries that it combines."""

    def check(self, layer: Layer) -> None:
        super().check(layer)
        if issubclass(layer.kind, (kinds.MatMul, kinds.Neutral)):
            raise RuleError(f"it is for sums and element-wise products, but this layer is of kind {layer.kind.__name__}")
        if layer.kind is kinds.Gate and layer.operation.row is None:
            raise RuleError("it is for sums and element-wise products, but a subclass of such a layer may compute anything")

    def check_call(self, operation: Operation, inputs: Sequence[torch.Size], output: torch.Size) -> None:
        if _is_gated_unit(operation.kind, len(inputs)) or self.divides(operation, inputs, output):
            return
        row = operation.row
        if row is not None and len(row.data) > 1 and not row.entries.elementwise:
            raise RuleError(
                f"it divides relevance entry by entry, but {row.name} does not combine entries at the same position; "
                "lrpfx.transform gives each step of a module its own rule"
            )
        misfit = next((shape for shape in inputs if not _broadcasts(shape, output)), None)
        if misfit is not None:
            raise RuleError(
                f"it is for sums and element-wise products, but this layer returns an output of shape {tuple(output)} for an "
                f"input of shape {tuple(misfit)}. Norm and Epsilon fit layers that change the shape; lrpfx.transform gives "
                "each step of a module its own rule"
            )

    def divides(self, operation: Operation, inputs: Sequence[torch.Size], output: torch.Size) -> bool:
        """Whether the rule divides relevance among the entries of one input that a reduction combines.

        `operation`, `inputs` and `output`: as for `check_call`.
        """
        return False


class Uniform(_SharingRule):
    """Equal shares of relevance: R / n for each of n operands, or for each of n entries of one input that a layer combines.

    For products, and for sums and means whose terms are to get equal shares.
    """

    def divides(self, operation: Operation, inputs: Sequence[torch.Size], output: torch.Size) -> bool:
        """Whether the shares go to the entries of one input that the layer adds up or multiplies: see `check_call`.

        `operation`, `inputs` and `output`: as for `check_call`.
        """
        return len(inputs) == 1 and (_adds_up(operation) or self._multiplies_up(operation))

    @staticmethod
    def _multiplies_up(operation: Operation) -> bool:
        """Whether an entry of a layer's output is a product of entries of its input."""
        return operation.row is not None and operation.row.entries.multiplies_up

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first = call.inputs[0]
        if _is_gated_unit(call.operation.kind, len(call.inputs)):
            return (torch.cat([relevance / 2.0] * 2, call.arguments()["dim"]),)
        if _adds_up(call.operation):
            weights = self._weights(call)
            return call.pull_back(torch.where(weights == 0, torch.zeros_like(relevance), relevance / weights))
        if self._multiplies_up(call.operation):
            # With all factors set to 1, the derivative is 1 for each factor of a product and 0 for all other entries.
            ones = torch.ones_like(first)
            pulled = vjp(call.run, ones)[1]
            counts = vjp(lambda share: pulled(share)[0], torch.zeros_like(relevance))[1](ones)[0]
            shares: tuple[torch.Tensor, ...] = pulled(relevance / counts)
            return shares
        share = relevance / len(call.inputs)
        return tuple(_fit(share, input) for input in call.inputs)

    @staticmethod
    def _weights(call: LayerCall) -> torch.Tensor:
        """The sum of the weights of each output; 0 for outputs without terms, as between the patches of a fold."""
        return call.run(torch.ones_like(call.inputs[0]))

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed:
        return {"stopped": ((self._weights(call) == 0) * relevance).sum()} if _adds_up(call.operation) else {}

    def multiplier_form(self, layer: Layer) -> MultiplierForm | None:
        proportional = _proportional_inputs(layer)
        return Derivative((1 / len(proportional),) * len(proportional), divides=False) if all(proportional) else None


class Only(_SharingRule):
    """All relevance goes to one input, such as the skip connection or the block of a sum, or the signal of a gate.

    Parameters
    ----------
    input
        The position of this input among those of the layer, from 0.
    """

    shown = ("input",)

    def __init__(self, input: int = 0) -> None:
        super().__init__()
        self.input = input

    def copy(self) -> Self:
        return type(self)(self.input)

    def check(self, layer: Layer) -> None:
        super().check(layer)
        if layer.input_count is not None:
            self._check_index(layer.kind, layer.input_count)

    def check_call(self, operation: Operation, inputs: Sequence[torch.Size], output: torch.Size) -> None:
        self._check_index(operation.kind, len(inputs))
        super().check_call(operation, inputs, output)

    def _check_index(self, kind: type[kinds.Kind], inputs: int) -> None:
        if not 0 <= self.input < (2 if _is_gated_unit(kind, inputs) else inputs):
            raise RuleError(f"it sends relevance to input {self.input}, but the layer has {inputs}")

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if _is_gated_unit(call.operation.kind, len(call.inputs)):
            halves = [relevance if half == self.input else torch.zeros_like(relevance) for half in range(2)]
            return (torch.cat(halves, call.arguments()["dim"]),)
        return tuple(
            _fit(relevance, input) if index == self.input else torch.zeros_like(input)
            for index, input in enumerate(call.inputs)
        )

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed:
        return {}

    def multiplier_form(self, layer: Layer) -> MultiplierForm | None:
        proportional = _proportional_inputs(layer)
        if self.input >= len(proportional) or not proportional[self.input]:
            return None
        return Derivative(tuple(float(place == self.input) for place in range(len(proportional))), divides=False)


class AbsoluteRatio(_SharingRule):
    """For sums and means: R_a = |a| R / st(Σ |a|) for each term a. The magnitude of R_a never exceeds that of R.

    `stabilizer`: as `epsilon` of `Epsilon`.
    """

    shown = ("stabilizer",)
    proportional = True

    def __init__(self, stabilizer: Stabilization = 1e-6) -> None:
        super().__init__()
        self.stabilizer = Stabilizer.ensure(stabilizer)

    def copy(self) -> Self:
        return type(self)(self.stabilizer)

    def check(self, layer: Layer) -> None:
        super().check(layer)
        if not issubclass(layer.kind, (kinds.Sum, kinds.AvgPool, kinds.Opaque, kinds.Unknown)):
            raise RuleError(f"it is for sums and means, but this layer is of kind {layer.kind.__name__}")

    def check_call(self, operation: Operation, inputs: Sequence[torch.Size], output: torch.Size) -> None:
        super().check_call(operation, inputs, output)
        if len(inputs) == 1 and operation.row is None:
            raise RuleError("it is for sums and means, but a module with one input is not known to be one")

    def divides(self, operation: Operation, inputs: Sequence[torch.Size], output: torch.Size) -> bool:
        """Whether the relevance goes to the entries of one input that the layer adds up.

        `operation`, `inputs` and `output`: as for `check_call`.
        """
        return len(inputs) == 1 and _adds_up(operation)

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sizes = self._sizes(call)
        ratio = relevance / self.stabilizer(sum_of(sizes))
        if _adds_up(call.operation):
            return (call.inputs[0].abs() * call.pull_back_single(ratio),)
        return tuple(_fit(size * ratio, input) for size, input in zip(sizes, call.inputs, strict=True))

    def _sizes(self, call: LayerCall) -> list[torch.Tensor]:
        """The magnitude of each input's contribution, or the sum of magnitudes if a layer adds up entries of one input."""
        if _adds_up(call.operation):
            return [call.run(call.inputs[0].abs())]
        if len(call.inputs) == 1 or call.operation.kind is not kinds.Sum:
            return [input.abs() for input in call.inputs]
        alone = (
            [input if at == place else torch.zeros_like(input) for at, input in enumerate(call.inputs)]
            for place in range(len(call.inputs))
        )
        return [call.run(*inputs).abs() for inputs in alone]

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed:
        return held_back(relevance, sum_of(self._sizes(call)), self.stabilizer)


class EpsilonRule(Hook):
    """Base class of rules that divide by the layer's own stabilized output."""

    shown = ("epsilon",)

    def __init__(self, epsilon: Stabilization = 1e-6) -> None:
        super().__init__()
        self.epsilon = Stabilizer.ensure(epsilon)

    def copy(self) -> Self:
        return type(self)(self.epsilon)

    @property
    def saves_output(self) -> bool:
        return True


class _ProductRule(EpsilonRule):
    """Base class of rules for matrix products."""

    def check(self, layer: Layer) -> None:
        super().check(layer)
        if layer.input_count is not None:
            self._check_product(layer.operation, layer.input_count)

    def check_call(self, operation: Operation, inputs: Sequence[torch.Size], output: torch.Size) -> None:
        super().check_call(operation, inputs, output)
        self._check_product(operation, len(inputs))

    @staticmethod
    def _check_product(operation: Operation, inputs: int) -> None:
        kind, row = operation.kind, operation.row
        of_entries = kind is kinds.Product and row is not None and not row.entries.elementwise
        if (
            kind is kinds.Gate
            or of_entries
            or (inputs > 1 and kind not in (kinds.MatMul, kinds.WeightedValues, kinds.Product, kinds.GatedProduct))
        ):
            raise RuleError(
                f"it is for matrix products, but this layer has {inputs} input(s) and is of kind {kind.__name__}; "
                "Uniform gives all operands equal shares, Only(0) gives all relevance to the first of several inputs"
            )

    def _absorbed_by(self, relevance: torch.Tensor, total: torch.Tensor, taken: Callable[[torch.Tensor], Absorbed]) -> Absorbed:
        """The share of the stabilizer, and what is `taken` of the ratios by parts of the total that come from no input."""
        return added([held_back(relevance, total, self.epsilon), taken(relevance / self.epsilon(total))])


class UniformEpsilon(_ProductRule):
    """For matrix products O = A B of n factors: R_A = A (R / st(n O)) Bᵀ, and the same for B.

    If only one factor depends on the input, this is Epsilon.

    Other arguments: as for `Epsilon`.

    References
    ----------
    .. [1] Achtibat et al. 2024, eq. 14, https://arxiv.org/abs/2402.05602
    """

    proportional = True

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ratio = relevance / self.epsilon(len(call.inputs) * call.own_output())
        return call.times_inputs(call.pull_back(ratio))

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed:
        factors = len(call.inputs)
        output, taken = call.with_remainders(call.run_with, call.inputs, call.parameters, factors)
        return self._absorbed_by(relevance, factors * output, taken)

    def multiplier_form(self, layer: Layer) -> MultiplierForm | None:
        count = len(layer.inputs)
        return Derivative((1 / count,) * count) if is_exact(self.epsilon) and is_listed(layer) else None


class ValueOnly(_ProductRule):
    """For the product of attention weights and values: Epsilon for the last factor, the values.

    The attention weights get no relevance, so queries and keys get none either.

    Other arguments: as for `Epsilon`.

    References
    ----------
    .. [1] Ali et al. 2022, section 3.1, https://proceedings.mlr.press/v162/ali22a.html
    """

    proportional = True

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = call.pull_back(relevance / self.epsilon(call.own_output()))
        *others, last = call.times_inputs(gradients)
        return (*(other if other is None else torch.zeros_like(other) for other in others), last)

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed:
        *others, last = call.inputs
        output, taken = call.with_remainders(
            lambda inputs, parameters: call.run_with((*others, *inputs), parameters), (last,), call.parameters
        )
        return self._absorbed_by(relevance, output, taken)

    def multiplier_form(self, layer: Layer) -> MultiplierForm | None:
        shares = (*(0.0 for _ in layer.inputs[1:]), 1.0)
        return Derivative(shares) if is_exact(self.epsilon) and is_listed(layer) else None


class ProductTaylor(EpsilonRule):
    """For products O = A B of n factors: R_A = A (R / st(O)) Bᵀ, and the same for B, so that each factor gets all of R.

    The constant term of the product's Taylor expansion takes the other (1 - n) R: relevance is not conserved. In multipliers,
    this is the ordinary derivative.

    Other arguments: as for `Epsilon`.

    References
    ----------
    .. [1] Jafari et al. 2025, https://arxiv.org/abs/2508.21258, where attention keeps its ordinary derivative
    """

    proportional = True

    def check(self, layer: Layer) -> None:
        super().check(layer)
        if layer.kind is kinds.Gate or not issubclass(layer.kind, (kinds.MatMul, kinds.Product)):
            raise RuleError(f"it is for products of matrices or entries, but this layer is of kind {layer.kind.__name__}")

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return call.times_inputs(call.pull_back(relevance / self.epsilon(call.own_output())))

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed:
        output, taken = call.with_remainders(call.run_with, call.inputs, call.parameters)
        return added([held_back(relevance, output, self.epsilon), taken(relevance / self.epsilon(output))])

    def multiplier_form(self, layer: Layer) -> MultiplierForm | None:
        return Derivative() if is_exact(self.epsilon) and is_listed(layer) else None


class SoftmaxTaylor(Hook):
    """R' = x (R - s Σ R) with s = softmax(x) and the sum over the softmax's dimension; 0 where x is -inf.

    References
    ----------
    .. [1] Achtibat et al. 2024, eq. 10, https://arxiv.org/abs/2402.05602
    """

    proportional = True

    @property
    def saves_output(self) -> bool:
        return True

    def check(self, layer: Layer) -> None:
        super().check(layer)
        row = layer.operation.operator
        is_softmax = issubclass(layer.kind, kinds.Softmax) and row is not None and row.values.total is not None
        if layer.input_count not in (None, 1) or not is_softmax:
            raise RuleError("it is only for softmax")

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, output = _scores(call), call.own_output()
        result = input * (relevance - output * _total(call, relevance))
        return (torch.where(torch.isinf(input), torch.zeros_like(result), result),)

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed:
        """The constant term of the softmax's Taylor expansion at x absorbs the rest, since the softmax is not linear.

        `call` and `relevance`: as for `propagate`.
        """
        scores = _scores(call)
        input = torch.where(torch.isinf(scores), torch.zeros_like(scores), scores)
        weighted = _total(call, call.own_output() * input)
        return {"expansion": (relevance * (1.0 - input + weighted)).sum()}

    def multiplier_form(self, layer: Layer) -> MultiplierForm | None:
        row = layer.operation.operator
        return None if row is None or row.values.negates else Derivative(divides=False)


def _scores(call: LayerCall) -> torch.Tensor:
    """The argument of the softmax: the input, negated for a softmin module."""
    operator = call.operation.operator
    return -call.inputs[0] if operator is not None and operator.values.negates else call.inputs[0]


def _total(call: LayerCall, values: torch.Tensor) -> torch.Tensor:
    """The sum of values over what a softmax normalizes over, at each entry."""
    operator = call.operation.operator
    assert operator is not None and operator.values.total is not None
    return operator.values.total(values, call.arguments())


class _Scales(TorchFunctionMode):
    """A mode that reads what normalization operators read, and treats their scale as a constant if it knows of what it is.

    `sources`: what the operators read in an earlier run, in order. `read`: what they read in this one.
    """

    def __init__(self, sources: Sequence[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.sources = sources
        self.read: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        spelling = lookup(func)
        if spelling is None or spelling.operator.normalization.detached is None:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip(spelling.arguments, args, strict=False)), **(kwargs or {})}
        self.read.append(given["input"])
        if self.sources is None:
            return func(*args, **(kwargs or {}))
        source = self.sources[len(self.read) - 1]
        return spelling.operator.normalization.detached(given["input"], {**spelling.operator.arguments, **given}, source)


class NormalizationEpsilon(EpsilonRule):
    """For layer, group and instance norm: Epsilon with the scale held constant, which leaves an affine function.

    R' = x Jᵀ (R / st(y)), where J is the Jacobian of y = weight * (x - mean(x)) / sd + bias for a constant sd. The bias and the
    mean are in the denominator here, other than in the source.

    Other arguments: as for `Epsilon`.

    References
    ----------
    .. [1] Ali et al. 2022, section 3.2, https://proceedings.mlr.press/v162/ali22a.html
    """

    proportional = True

    def check(self, layer: Layer) -> None:
        super().check(layer)
        operator = layer.operation.operator
        whole = operator is None and issubclass(
            layer.kind, (kinds.LayerNorm, kinds.Opaque)
        )  # a module that normalizes somewhere inside
        if not whole and (operator is None or operator.normalization.detached is None):
            raise RuleError("it is only for layer, group and instance norm")

    def check_call(self, operation: Operation, inputs: Sequence[torch.Size], output: torch.Size) -> None:
        if len(inputs) != 1:
            raise RuleError(f"it is for a layer with one input, but this one has {len(inputs)}")

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pull = vjp(self._with_constant_scale(call), call.inputs[0])[1]
        return (call.inputs[0] * pull(relevance / self.epsilon(call.own_output()))[0],)

    @staticmethod
    def _with_constant_scale(call: LayerCall) -> Callable[[torch.Tensor], torch.Tensor]:
        """The layer as a function of its input, with a derivative that treats the scale as a constant.

        The scale is that of the layer's own input: if relevance is differentiated, it depends on what that one depends on.
        """
        operator, own = call.operation.operator, call.inputs[0]
        if operator is not None and operator.normalization.detached is not None:
            detached, arguments = operator.normalization.detached, call.arguments()
            return lambda input: detached(input, arguments, own)

        def run(input: torch.Tensor, scales: _Scales) -> torch.Tensor:  # a module that normalizes somewhere inside
            with scales:
                result: torch.Tensor = call.operation(call.values((input, *call.inputs[1:]), call.parameters))
            return result

        own_scales = _Scales()
        run(own, own_scales)
        return lambda input: run(input, _Scales(own_scales.read))

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed:
        output = call.own_output()
        pull = vjp(self._with_constant_scale(call), call.inputs[0])[1]
        linear = vjp(pull, torch.zeros_like(output))[1]((call.inputs[0],))[0]
        bias = (relevance / self.epsilon(output) * (output - linear)).sum()
        return added([held_back(relevance, output, self.epsilon), {"bias": bias}])

    def multiplier_form(self, layer: Layer) -> MultiplierForm | None:
        row = layer.operation.operator
        return HeldScale() if is_exact(self.epsilon) and row is not None and row.normalization.detached is not None else None


class _ElementWiseRule(Hook):
    """Base class of rules for layers with one input and an output of the same shape."""

    def check(self, layer: Layer) -> None:
        super().check(layer)
        if layer.input_count is not None:
            self._check_count(layer.input_count)
        row = layer.operation.row
        if issubclass(layer.kind, kinds.Neutral) and not (row is not None and row.entries.elementwise):
            raise RuleError("it acts entry by entry, but this layer only moves values and needs no rule")

    def check_call(self, operation: Operation, inputs: Sequence[torch.Size], output: torch.Size) -> None:
        self._check_count(len(inputs))
        if inputs[0] != output:
            raise RuleError(
                f"it acts entry by entry, but this layer returns an output of shape {tuple(output)} for an input of shape "
                f"{tuple(inputs[0])}; give it a rule for layers that change the shape"
            )

    def _check_count(self, inputs: int) -> None:
        if inputs != 1:
            raise RuleError(f"{type(self).__name__} takes a layer with one input, but this one has {inputs}")


class Pass(_ElementWiseRule):
    """R' = R, for element-wise layers."""

    saves_inputs = False
    passes_all = True

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (relevance,)

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed:
        return {}

    def multiplier_form(self, layer: Layer) -> MultiplierForm | None:
        row = layer.operation.operator
        if row is not None and issubclass(row.kind, kinds.RMSNorm) and row.normalization.detached is not None:
            return HeldScale(divides=False)
        has_ratio = row is not None and row.values.ratio is not None and not layer.parameters and not layer.extras
        return Ratio() if has_ratio else None


class ReLUDeconvNet(_ElementWiseRule):
    """R' = R⁺ (Zeiler and Fergus 2014, https://doi.org/10.1007/978-3-319-10590-1_53)."""

    saves_inputs = False

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (relevance.clamp(min=0.0),)

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed:
        return {"stopped": relevance.clamp(max=0.0).sum()}


class ReLUGuidedBackprop(_ElementWiseRule):
    """The gradient where the incoming relevance is positive, 0 elsewhere.

    References
    ----------
    .. [1] Springenberg et al. 2015, https://arxiv.org/abs/1412.6806
    """

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = call.pull_back_single(relevance)
        return (gradient * (relevance > 0.0),)

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed:
        gradient = call.pull_back_single(relevance)
        return {"stopped": relevance.clamp(max=0.0).sum() + ((relevance - gradient) * (relevance > 0.0)).sum()}


class ReLUBetaSmooth(_ElementWiseRule):
    """R' = sigmoid(beta_smooth x) R: the gradient of a smoothed ReLU.

    Parameters
    ----------
    beta_smooth
        How sharp it is: the larger, the closer to the ReLU.

    Raises
    ------
    InputError
        `beta_smooth` is negative, which would pass relevance where the ReLU is 0.

    References
    ----------
    .. [1] Dombrowski et al. 2019, https://arxiv.org/abs/1906.07983
    """

    shown = ("beta_smooth",)

    def __init__(self, beta_smooth: float = 10.0) -> None:
        super().__init__()
        self.beta_smooth = finite_number("beta_smooth", beta_smooth, least=0.0)

    def copy(self) -> Self:
        return type(self)(self.beta_smooth)

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (torch.sigmoid(self.beta_smooth * call.inputs[0]) * relevance,)

    def absorbed(self, call: LayerCall, relevance: torch.Tensor) -> Absorbed:
        return {"stopped": (torch.sigmoid(-self.beta_smooth * call.inputs[0]) * relevance).sum()}

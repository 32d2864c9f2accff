"""The rules of Layer-wise Relevance Propagation.

Notation: x input, W weight, b bias, z = Wx + b output, R its relevance, R' the input's; a⁺ and a⁻ are the positive and
negative parts of a, st a stabilizer, and products with R and x are element-wise. For a layer that is not linear, W and its
transpose stand for the layer and for its vector-Jacobian product at x.
"""

from collections.abc import Sequence
from typing import Self

import torch

from .errors import InputError, RuleError
from .hooks import BasicHook, FirstGradient, Hook, SharedRatios, Tensors, WeightedProducts
from .layer_view import Layer
from .modifiers import (
    Bound,
    Clamp,
    ClampMod,
    GammaMod,
    NoMod,
    Ones,
    OnesMod,
    SquareMod,
    Unchanged,
    zero_bias,
)
from .propagation import LayerCall
from .stabilizer import Stabilizer, StabilizerFunction

__all__ = [
    "AlphaBeta",
    "BasicHook",
    "ClampMod",
    "Epsilon",
    "Flat",
    "Gamma",
    "GammaMod",
    "Hook",
    "NoMod",
    "Norm",
    "Pass",
    "ReLUBetaSmooth",
    "ReLUDeconvNet",
    "ReLUGuidedBackprop",
    "WSquare",
    "ZBox",
    "ZPlus",
    "zero_bias",
]

Names = str | Sequence[str] | None
Stabilization = float | StabilizerFunction


class Epsilon(BasicHook):
    """R' = x Wᵀ (R / st(z)) (Bach et al. 2015, eq. 58)."""

    shown = ("epsilon", "zero_params")

    def __init__(self, epsilon: Stabilization = 1e-6, zero_params: Names = None) -> None:
        self.epsilon = Stabilizer.ensure(epsilon)
        self.zero_params = zero_params
        super().__init__(
            param_modifiers=[NoMod(zero_params=zero_params)],
            gradient_mapper=SharedRatios(self.epsilon, [{0: 1}]),
        )


class Norm(BasicHook):
    """Epsilon for layers whose parameters, if there are any, stay as they are: sums and average pooling."""

    shown = ("stabilizer",)

    def __init__(self, stabilizer: Stabilization = 1e-6) -> None:
        self.stabilizer = Stabilizer.ensure(stabilizer)
        super().__init__(
            param_modifiers=[NoMod(param_keys=[])],
            gradient_mapper=SharedRatios(self.stabilizer, [{0: 1}]),
        )


class ZPlus(BasicHook):
    """R' = x⁺ W⁺ᵀ s + x⁻ W⁻ᵀ s with s = R / st(W⁺x⁺ + W⁻x⁻ + b⁺) (Montavon et al. 2017, https://doi.org/10.1016/j.patcog.2016.11.008)."""

    shown = ("stabilizer", "zero_params")

    def __init__(self, stabilizer: Stabilization = 1e-6, zero_params: Names = None) -> None:
        self.stabilizer = Stabilizer.ensure(stabilizer)
        self.zero_params = zero_params
        super().__init__(
            input_modifiers=[Clamp(min=0.0), Clamp(max=0.0)],
            param_modifiers=[
                ClampMod(min=0.0, zero_params=zero_params),
                ClampMod(max=0.0, zero_params=zero_bias(zero_params)),
            ],
            gradient_mapper=SharedRatios(self.stabilizer, [{0: 1, 1: 1}]),
        )


class AlphaBeta(BasicHook):
    """Positive contributions weighted by alpha, negative ones by beta, with alpha - beta = 1 (Bach et al. 2015, eq. 60).

    R' = alpha (x⁺ W⁺ᵀ + x⁻ W⁻ᵀ) R / st(W⁺x⁺ + W⁻x⁻ + b⁺) - beta (x⁺ W⁻ᵀ + x⁻ W⁺ᵀ) R / st(W⁻x⁺ + W⁺x⁻ + b⁻)
    """

    shown = ("alpha", "beta", "stabilizer", "zero_params")

    def __init__(
        self, alpha: float = 2.0, beta: float = 1.0, stabilizer: Stabilization = 1e-6, zero_params: Names = None
    ) -> None:
        if alpha < 0 or beta < 0:
            raise InputError(f"alpha and beta must not be negative, got alpha={alpha} and beta={beta}")
        if alpha - beta != 1.0:
            raise InputError(f"alpha - beta must be 1, got {alpha} - {beta} = {alpha - beta}")
        self.alpha = alpha
        self.beta = beta
        self.stabilizer = Stabilizer.ensure(stabilizer)
        self.zero_params = zero_params
        without_bias = zero_bias(zero_params)
        super().__init__(
            input_modifiers=[Clamp(min=0.0), Clamp(max=0.0), Clamp(min=0.0), Clamp(max=0.0)],
            param_modifiers=[
                ClampMod(min=0.0, zero_params=zero_params),
                ClampMod(max=0.0, zero_params=without_bias),
                ClampMod(max=0.0, zero_params=zero_params),
                ClampMod(min=0.0, zero_params=without_bias),
            ],
            gradient_mapper=SharedRatios(self.stabilizer, [{0: 1, 1: 1}, {2: 1, 3: 1}]),
            reducer=WeightedProducts([alpha, alpha, -beta, -beta]),
        )


class GammaRatios:
    """Relevance of positive outputs to the first two branches, of negative ones to the next two, decided by the fifth."""

    def __init__(self, stabilizer: StabilizerFunction) -> None:
        self.stabilizer = stabilizer

    def __call__(self, relevance: torch.Tensor, outputs: Tensors) -> list[torch.Tensor | None]:
        output = outputs[4]
        positive = (output > 0) * relevance / self.stabilizer(outputs[0] + outputs[1])
        negative = (output < 0) * relevance / self.stabilizer(outputs[2] + outputs[3])
        return [positive, positive, negative, negative, None]


class Gamma(BasicHook):
    """Contributions of the output's own sign are favoured by gamma (Montavon et al. 2019, here for inputs of either sign:
    Andéol et al. 2021, https://arxiv.org/abs/2106.16102).

    With P = W + gamma W⁺, N = W + gamma W⁻, and p, n the same for the bias:
    R' = x⁺ (Pᵀ s₊ + Nᵀ s₋) + x⁻ (Nᵀ s₊ + Pᵀ s₋), where s₊ = [z > 0] R / st(P x⁺ + N x⁻ + p) and
    s₋ = [z < 0] R / st(N x⁺ + P x⁻ + n).
    """

    shown = ("gamma", "stabilizer", "zero_params")

    def __init__(self, gamma: float = 0.25, stabilizer: Stabilization = 1e-6, zero_params: Names = None) -> None:
        self.gamma = gamma
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


class ZBox(BasicHook):
    """For inputs known to lie in [low, high], such as pixels (Montavon et al. 2017, eq. 13).

    R' = x Wᵀ s - low W⁺ᵀ s - high W⁻ᵀ s with s = R / st(Wx - W⁺ low - W⁻ high). `low` and `high` are numbers or tensors that
    expand to the input's shape.
    """

    shown = ("low", "high", "stabilizer", "zero_params")

    def __init__(
        self,
        low: float | torch.Tensor,
        high: float | torch.Tensor,
        stabilizer: Stabilization = 1e-6,
        zero_params: Names = None,
    ) -> None:
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


class WSquare(BasicHook):
    """R' = (W²)ᵀ (R / st(W² 1 + b²)): independent of the input's values (Montavon et al. 2017, eq. 12)."""

    shown = ("stabilizer", "zero_params")

    def __init__(self, stabilizer: Stabilization = 1e-6, zero_params: Names = None) -> None:
        self.stabilizer = Stabilizer.ensure(stabilizer)
        self.zero_params = zero_params
        super().__init__(
            input_modifiers=[Ones()],
            param_modifiers=[SquareMod(zero_params=zero_params)],
            gradient_mapper=SharedRatios(self.stabilizer, [{0: 1}]),
            reducer=FirstGradient(),
        )


class Flat(BasicHook):
    """Relevance spread evenly over the inputs that an output sees: W taken as 1 and b as 0 (Lapuschkin et al. 2019,
    https://doi.org/10.1038/s41467-019-08987-4).
    """

    shown = ("stabilizer", "zero_params")

    def __init__(self, stabilizer: Stabilization = 1e-6, zero_params: Names = None) -> None:
        self.stabilizer = Stabilizer.ensure(stabilizer)
        self.zero_params = zero_params
        super().__init__(
            input_modifiers=[Ones()],
            param_modifiers=[OnesMod(zero_params=zero_bias(zero_params), require_params=False)],
            gradient_mapper=SharedRatios(self.stabilizer, [{0: 1}]),
            reducer=FirstGradient(),
        )


class _ElementWiseRule(Hook):
    """Base of the rules for layers with one input and an output of its shape."""

    def check(self, layer: Layer) -> None:
        super().check(layer)
        if len(layer.inputs) != 1:
            raise RuleError(f"{type(self).__name__} takes a layer with one input, but this one has {len(layer.inputs)}")


class Pass(_ElementWiseRule):
    """R' = R: for layers that act element by element."""

    saves_inputs = False

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (relevance,)


class ReLUDeconvNet(_ElementWiseRule):
    """R' = R⁺ (Zeiler and Fergus 2014, https://doi.org/10.1007/978-3-319-10590-1_53)."""

    saves_inputs = False

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (relevance.clamp(min=0.0),)


class ReLUGuidedBackprop(_ElementWiseRule):
    """The gradient where the incoming one is positive (Springenberg et al. 2015, https://arxiv.org/abs/1412.6806)."""

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = call.pull_back(relevance)
        assert gradient is not None
        return (gradient * (relevance > 0.0),)


class ReLUBetaSmooth(_ElementWiseRule):
    """R' = sigmoid(beta_smooth x) R: the gradient of a smoothed ReLU (Dombrowski et al. 2019, https://arxiv.org/abs/1906.07983)."""

    shown = ("beta_smooth",)

    def __init__(self, beta_smooth: float = 10.0) -> None:
        super().__init__()
        self.beta_smooth = beta_smooth

    def copy(self) -> Self:
        return type(self)(self.beta_smooth)

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (torch.sigmoid(self.beta_smooth * call.inputs[0]) * relevance,)

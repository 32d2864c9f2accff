"""The rules of differences from a reference."""

from typing import Any

import torch
from torch import fx

from lrpfx.errors import RuleError
from lrpfx.ir import kinds
from lrpfx.ir.node import node_info
from lrpfx.ir.operator import Between, Operator, WeightLayout
from lrpfx.operators.layer import Layer
from lrpfx.rules.hook import Hook
from lrpfx.runtime.differences import (
    AtMidpoint,
    BySigns,
    BySlope,
    BySlopes,
    OfChannelNormalization,
    OfChoice,
    OfFactors,
    OfLarger,
    OfLargest,
    OfLayerNorm,
    OfLogSoftmax,
    OfLogSum,
    OfNormalization,
    OfNormalized,
    OfPooled,
    OfPowerRoot,
    OfQuotient,
    OfRoot,
    OfRunningLogSum,
    OfSampling,
    OfShares,
    OfSoftmax,
    Same,
    exponent,
)
from lrpfx.runtime.differences_in_time import (
    OfDeltaRule,
    OfProduct,
    OfRecurrence,
    OfRecurrent,
    OfRecurrentStep,
    OfSelectiveScan,
    OfWeightedMean,
)
from lrpfx.runtime.layer_call import LayerCall
from lrpfx.runtime.multipliers import Derivative, MultiplierForm

#: Kinds of layers that are linear in their inputs, up to constants.
_LINEAR = (kinds.Linear, kinds.BatchNorm, kinds.AvgPool, kinds.Sum, kinds.Interpolation)
_FORMS: dict[Between, MultiplierForm] = {
    Between.SOFTMAX: OfSoftmax(),
    Between.LOG_SOFTMAX: OfLogSoftmax(),
    Between.LOG_SUM: OfLogSum(),
    Between.RUNNING_LOG_SUM: OfRunningLogSum(),
    Between.SHARES: OfShares(),
    Between.QUOTIENT: OfQuotient(),
    Between.CHANNEL_NORMALIZATION: OfChannelNormalization(),
    Between.ROOT: OfRoot(),
    Between.POWER_ROOT: OfPowerRoot(),
    Between.NORMALIZED: OfNormalized(),
    Between.LARGER: OfLarger(),
    Between.SMALLER: OfLarger(smaller=True),
    Between.LARGEST: OfLargest(),
    Between.SMALLEST: OfLargest(smallest=True),
    Between.SAMPLING: OfSampling(),
    Between.CHOICE: OfChoice(),
    Between.PRODUCT: OfProduct(),
    Between.RUNNING_PRODUCT: OfProduct(running=True),
    Between.RECURRENT: OfRecurrent(),
    Between.RECURRENT_STEP: OfRecurrentStep(),
    Between.RECURRENCE: OfRecurrence(),
    Between.SELECTIVE_SCAN: OfSelectiveScan(),
    Between.DELTA_RULE: OfDeltaRule(),
    Between.WEIGHTED_MEAN: OfWeightedMean(),
}
#: Forms of layers with two inputs, of which a constant may be one.
_OF_TWO = (Between.QUOTIENT, Between.LARGER, Between.SMALLER)


class Difference(Hook):
    """Multipliers of differences from a reference, m' = m Δy/Δx (Rescale), exact for each operation.

    Linear layers have their ordinary derivative, element-wise functions the slope, products the mean of value and reference of
    the other factor, and softmaxes, normalizations and maxima are composed of these.

    References
    ----------
    .. [1] Shrikumar et al. 2017, https://arxiv.org/abs/1704.02685

    Examples
    --------
    >>> composite = lrpfx.composites.DeepLIFT()
    """

    reads_controls = True

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise RuleError(f"{self} needs the values for a reference, which only a whole model has: use lrpfx.transform")

    def check(self, layer: Layer) -> None:
        if layer.inputs and self.multiplier_form(layer) is None:
            raise RuleError(f"{self} has no formula for {layer.operation.row or layer.kind.__name__}{_what_depends(layer)}")
        if layer.operation.row is not None and layer.operation.row.values.between is Between.POWER_ROOT:
            exponent(layer.operation)

    def multiplier_form(self, layer: Layer) -> MultiplierForm | None:
        row, inputs = layer.operation.row, len(layer.inputs)
        if row is None:
            return None
        between = row.values.between
        if between in _OF_TWO and inputs == 1:  # a bound, a factor or a numerator that is constant
            is_factor = between is Between.QUOTIENT and layer.operation.names_of_inputs == [row.data[0]]
            return Derivative() if is_factor else BySlope()
        if issubclass(row.kind, kinds.MaxPool) and "return_indices" in row.arguments and row.dimensions.spatial:
            return OfPooled(row.dimensions.spatial)
        if between is Between.SAMPLING and layer.operation.names_of_inputs == [row.data[0]]:
            return Derivative()  # at places that are constant
        if row.name == "layer_norm":
            return OfLayerNorm()
        if between is Between.NORMALIZATION:
            return OfNormalization(centred=row.name != "rms_norm")
        if between is not None:
            return _FORMS[between]
        if issubclass(row.kind, kinds.Detach):
            return Same()
        if issubclass(row.kind, kinds.MatMul) or (
            row.product.proportional_to and set(row.data) <= {*row.product.proportional_to}
        ):
            if inputs > max(2, len(row.data)):  # an argument holds several factors
                return OfFactors()
            return Derivative() if inputs == 1 else AtMidpoint()
        if issubclass(row.kind, _LINEAR) and not set(layer.operation.names_of_inputs) & set(row.controls):
            return Derivative()
        if row.entries.elementwise or issubclass(row.kind, kinds.Activation):
            return BySlope() if inputs == 1 else BySlopes()
        return None


class RevealCancel(Difference):
    """Positive and negative terms of a sum have multipliers of their own, where `Difference` has one slope for both.

    For element-wise functions of what a dense layer or a convolution returns. Terms that cancel in the sum get relevance: of
    the smaller of two inputs, a - relu(a - b), both get a share.

    References
    ----------
    .. [1] Shrikumar et al. 2017, section 3.5.3, https://arxiv.org/abs/1704.02685

    Examples
    --------
    >>> composite = lrpfx.composites.DeepLIFT(reveal_cancel="dense")
    """

    def check(self, layer: Layer) -> None:
        super().check(layer)
        if not isinstance(super().multiplier_form(layer), BySlope):
            raise RuleError(f"{self} is for element-wise functions of one value", topic="references")
        if row_before(layer) is None:
            raise RuleError(
                f"{self} is for functions of what a dense layer or a convolution returns, and this one reads "
                f"{getattr(layer.inputs[0], 'name', 'something else')}: give it Difference()",
                topic="references",
            )

    def multiplier_form(self, layer: Layer) -> MultiplierForm | None:
        return BySigns()


def row_before(layer: Layer) -> Operator | None:
    """The row of the dense layer or convolution whose output an element-wise function reads; None for others."""
    source = layer.inputs[0] if len(layer.inputs) == 1 else None
    row = node_info(source).operator if isinstance(source, fx.Node) else None
    return row if row is not None and row.linear.weight_layout is not None else None


def has_differences(layer: Any) -> bool:
    """Whether a layer of a graph is an operation whose row says what `Difference` does, also one without a rule for LRP."""
    return isinstance(layer, Layer) and layer.operation.row is not None and layer.operation.row.values.between is not None


def reveals(layer: Any, places: str) -> bool:
    """Whether `RevealCancel` is for a layer at these places: "dense", or "linear" for convolutions, too."""
    row = row_before(layer) if isinstance(layer, Layer) else None
    fits = row is not None and (places != "dense" or row.linear.weight_layout is WeightLayout.DENSE)
    return fits and isinstance(Difference().multiplier_form(layer), BySlope)


def _what_depends(layer: Layer) -> str:
    """Which arguments of a call depend on the model's input although the operation only reads them."""
    row = layer.operation.operator
    names = [] if row is None or not row.arguments else [one for one in layer.operation.names_of_inputs if one in row.controls]
    return f" whose {' and '.join(names)} depends on the input" if names else ""

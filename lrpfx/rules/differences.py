"""The rule of differences from a reference."""

from typing import Any

import torch

from lrpfx.errors import RuleError
from lrpfx.ir import kinds
from lrpfx.operators.layer import Layer, Operation
from lrpfx.rules.hook import Hook
from lrpfx.runtime.differences import (
    AtMidpoint,
    BySlope,
    OfLarger,
    OfLargest,
    OfNormalization,
    OfNormalized,
    OfQuotient,
    OfRoot,
    OfSoftmax,
)
from lrpfx.runtime.layer_call import LayerCall
from lrpfx.runtime.multipliers import Derivative, MultiplierForm

#: Kinds of layers that are linear in their inputs, up to constants.
_LINEAR = (kinds.Linear, kinds.BatchNorm, kinds.AvgPool, kinds.Sum, kinds.Interpolation)
_QUOTIENTS = ("div", "quotient")
#: Products of matrices that are not quadratic in their inputs.
_OTHER_PRODUCTS = ("scaled_dot_product_attention", "multi_dot")
#: Maxima, which need no other rule.
MAXIMA = {
    "amax": OfLargest(),
    "amin": OfLargest(smallest=True),
    "maximum": OfLarger(),
    "minimum": OfLarger(smaller=True),
}
_NORMALIZATIONS = ("layer_norm", "group_norm", "instance_norm", "rms_norm")


class Difference(Hook):
    """m' = m Δy/Δx: the multipliers of differences from a reference (Rescale), exact for each operation.

    Linear layers have their ordinary derivative, element-wise functions the slope, products the mean of value and reference of
    the other factor, and softmaxes, normalizations and maxima are composed of these.

    References
    ----------
    .. [1] Shrikumar et al. 2017, https://arxiv.org/abs/1704.02685

    Examples
    --------
    >>> composite = lrpfx.composites.DeepLIFT()
    """

    def propagate(self, call: LayerCall, relevance: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Raise `RuleError`: a layer alone has no reference."""
        raise RuleError(f"{self} needs the values for a reference, which only a whole model has: use lrpfx.transform")

    def check(self, layer: Layer) -> None:
        """Raise `RuleError` for layers whose difference has no formula."""
        if layer.inputs and self.multiplier_form(layer) is None:
            raise RuleError(f"{self} has no formula for {layer.operation.row or layer.kind.__name__}")

    def multiplier_form(self, layer: Layer) -> MultiplierForm | None:
        row = layer.operation.row
        if row is None:
            return None
        if row.name in MAXIMA:
            return MAXIMA[row.name] if len(layer.inputs) == 1 or row.name in ("maximum", "minimum") else None
        if row.name in _QUOTIENTS:
            if len(layer.inputs) == 2:
                return OfQuotient()
            return Derivative() if layer.operation.names_of_inputs == [row.data[0]] else BySlope()
        if row.name in _NORMALIZATIONS:
            return OfNormalization()
        if row.name in ("softmax", "masked_softmax"):
            return OfSoftmax()
        if issubclass(row.kind, kinds.MaxPool):
            return OfLargest()
        if row.name in ("std", "norm", "normalize"):
            form = OfNormalized() if row.name == "normalize" else OfRoot()
            return form if row.name == "std" or _exponent(layer.operation) in (2, 2.0, "fro", None) else None
        if issubclass(row.kind, kinds.Activation):
            return BySlope() if len(layer.inputs) == 1 else None
        if issubclass(row.kind, kinds.Product) and not set(row.data) <= set(row.product.proportional_to):
            return None
        if issubclass(row.kind, (kinds.Product, kinds.MatMul)) and row.name not in _OTHER_PRODUCTS:
            return Derivative() if len(layer.inputs) == 1 else AtMidpoint()
        return Derivative() if issubclass(row.kind, _LINEAR) and not issubclass(row.kind, kinds.Scan) else None


def _exponent(operation: Operation) -> Any:
    """The exponent of a norm; None for the default, 2."""
    later = operation.args[1:2]
    return operation.kwargs.get("p", operation.kwargs.get("ord", later[0] if later else None))

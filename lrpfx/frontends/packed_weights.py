"""Weights of linear layers in the formats of GPTQ and AWQ, unpacked.

GPTQ: Frantar et al. 2023, https://arxiv.org/abs/2210.17323; AWQ: Lin et al. 2024, https://arxiv.org/abs/2306.00978. Both hold
codes of a few bits in integers, and for each group of inputs a scale and a zero point, of which the weight is
scale · (code - zero).
"""

from collections.abc import Callable
from typing import Any

import torch

from lrpfx.support.tensors import is_floating

#: Positions of eight neighbouring outputs in an integer of AWQ, from the lowest bits on.
_ORDER_OF_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def unpacked_weights(module: Any) -> list[torch.Tensor]:
    """The weight (outputs, inputs) of a layer of GPTQ or AWQ in float64; empty for other layers.

    Two of them where the layer does not say whether it holds its zero points less one, as the first version of GPTQ's format
    does, or as they are, as the second does. Layers whose kernels order their codes anew are not known by their names.
    """
    unpack = _FORMATS.get(type(module).__name__)
    bits = getattr(module, "bits", getattr(module, "w_bit", None))
    codes, zeros, scales = (getattr(module, name, None) for name in ("qweight", "qzeros", "scales"))
    if unpack is None or not isinstance(bits, int) or not is_floating(scales) or getattr(module, "adapter", None) is not None:
        return []
    if not all(isinstance(one, torch.Tensor) and not is_floating(one) and one.ndim == 2 for one in (codes, zeros)):
        return []
    inputs, outputs = sizes_of(module)
    found = unpack(module, bits, inputs, codes, zeros, scales.double())
    return [weight for weight in found if tuple(weight.shape) == (outputs, inputs)]


def sizes_of(module: Any) -> tuple[Any, Any]:
    """The numbers of inputs and outputs of a linear layer, by either of their names; None where there is none."""
    names = (("in_features", "infeatures"), ("out_features", "outfeatures"))
    inputs, outputs = (getattr(module, new, getattr(module, old, None)) for new, old in names)
    return inputs, outputs


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes in each row, which is a stream of bits, the lowest of each integer first."""
    size = 8 * words.element_size()
    step = bits if size % bits == 0 else 1
    parts: torch.Tensor = (words.long()[..., None] >> torch.arange(0, size, step, device=words.device)) & (2**step - 1)
    if step == bits:
        return parts.flatten(1)
    places = torch.arange(bits, device=words.device)
    return torch.sum(parts.flatten(1).unflatten(1, (-1, bits)) << places, -1)


def _groups(module: Any, inputs: int, device: torch.device) -> torch.Tensor:
    """The group of each input."""
    size = module.group_size if module.group_size > 0 else inputs
    return torch.arange(inputs, device=device) // size


def _gptq(
    module: Any, bits: int, inputs: int, words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor
) -> list[torch.Tensor]:
    if words.shape[0] * 8 * words.element_size() != inputs * bits:
        return []
    groups = getattr(module, "g_idx", None)
    groups = _groups(module, inputs, words.device) if groups is None else groups.long()
    codes, stored = _codes(words.T, bits), _codes(zeros, bits)
    if codes.shape[0] != scales.shape[1] or stored.shape != scales.shape:
        return []
    added = (0,) if hasattr(module, "qzero_format") and module.qzero_format() == 2 else (1, 0)
    return [((codes.T - (stored + one)[groups]) * scales[groups]).T for one in added]


def _awq(
    module: Any, bits: int, inputs: int, words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor
) -> list[torch.Tensor]:
    if words.shape[0] != inputs or bits != 4 or words.dtype != torch.int32:
        return []
    groups = _groups(module, inputs, words.device)
    codes, stored = (_codes(one, bits).unflatten(1, (-1, 8))[..., _places_of_awq()].flatten(1) for one in (words, zeros))
    if codes.shape[1] != scales.shape[1] or stored.shape != scales.shape:
        return []
    return [((codes - stored[groups]) * scales[groups]).T]


def _awq_by_outputs(
    module: Any, bits: int, inputs: int, words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor
) -> list[torch.Tensor]:
    if bits != 4 or words.dtype != torch.int32:
        return []
    groups = _groups(module, inputs, words.device)
    codes, stored = _codes(words, bits), _codes(zeros, bits)
    if codes.shape[1] != inputs or codes.shape[0] != scales.shape[0] or stored.shape != scales.shape:
        return []
    return [(codes - stored[:, groups]) * scales[:, groups]]


def _places_of_awq() -> list[int]:
    return [_ORDER_OF_AWQ.index(output) for output in range(8)]


#: What unpacks the layers of a class. Others of these libraries, as those of Marlin and ExLlama, order codes for their kernels.
_FORMATS: dict[str, Callable[..., list[torch.Tensor]]] = {
    **dict.fromkeys(("TorchQuantLinear", "TritonV2QuantLinear", "TorchLinear", "TritonV2Linear"), _gptq),
    **dict.fromkeys(("WQLinear_GEMM", "AwqTorchQuantLinear", "AwqGEMMQuantLinear"), _awq),
    "WQLinear_GEMV": _awq_by_outputs,
}

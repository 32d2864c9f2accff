"""What the operators have in common through which an affine map per channel passes."""

from typing import Any

from lrpfx.ir.operator import Channels, NotAffineError

UNKNOWN_RANK = "how many dimensions the value has is not known; pass example_inputs"


def not_flat(channels: Channels) -> None:
    """`NotAffineError` where channels are flattened into features."""
    if channels.flat:
        raise NotAffineError("its channels are flattened")


def pads(padding: Any) -> bool:
    """Whether the argument `padding` of a convolution or pooling adds anything."""
    if isinstance(padding, str):
        return padding != "valid"
    return any(padding) if isinstance(padding, (tuple, list)) else bool(padding)

"""Shared checks for operators that commute with an affine map per channel."""

from typing import Any

from lrpfx.ir.operator import Channels, NotAffineError

UNKNOWN_RANK = "the number of dimensions is unknown; pass example_inputs"


def not_flat(channels: Channels) -> None:
    """Raise `NotAffineError` if the channels are flattened into features."""
    if channels.flat:
        raise NotAffineError("its channels are flattened")


def pads(padding: Any) -> bool:
    """Whether the argument `padding` of a convolution or pooling adds anything."""
    if isinstance(padding, str):
        return padding != "valid"
    return any(padding) if isinstance(padding, (tuple, list)) else bool(padding)

"""Which tensors are dense, their content, and values that autograd saves.

The values of a dense tensor are in memory as shape and strides describe.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lrpfx.support.torch_internals import DisableTorchFunction, is_transformed


def not_dense(value: torch.Tensor) -> str | None:
    """A description of a tensor that is not dense, or None."""
    with DisableTorchFunction():  # a subclass may override attributes
        if value.is_meta:
            return "on the meta device, where there are no values"
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or is_transformed(value):
            return f"a {type(value).__name__} that stands for other tensors"
        if value.is_nested:
            return "nested"
        if value.is_quantized:
            return "quantized"
        return None if value.layout == torch.strided else f"of layout {value.layout}"


def save_values(ctx: Any, values: Sequence[Any], further: Sequence[torch.Tensor | None] = ()) -> None:
    """Save the values of a call for the backward pass of an autograd Function, and further tensors."""
    ctx.others = [None if isinstance(value, torch.Tensor) else value for value in values]
    ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in values), *further)


def saved_values(ctx: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The values and the further tensors that `save_values` saved."""
    count, saved = len(ctx.others), ctx.saved_tensors  # read once: tensors may be recomputed
    pairs = zip(saved[:count], ctx.others, strict=True)
    return tuple(other if tensor is None else tensor for tensor, other in pairs), saved[count:]


def content_of(value: torch.Tensor) -> Iterator[bytes]:
    """The dtype, shape and values of a tensor as bytes, on any device; without values, if it has none."""
    yield f"{value.dtype}{tuple(value.shape)}".encode()
    if value.layout is torch.strided and value.device.type != "meta":
        dense = value.detach().cpu()
        dense = (dense.dequantize() if dense.is_quantized else dense).resolve_conj().resolve_neg()
        yield dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

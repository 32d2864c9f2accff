"""Which tensors are dense: their values are in memory as shape and strides describe."""

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

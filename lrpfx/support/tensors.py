"""Which tensors have values that lie in memory as their shape and strides say."""

import torch

from lrpfx.support.torch_internals import DisableTorchFunction, is_transformed


def not_dense(value: torch.Tensor) -> str | None:
    """What a tensor is that has no such values, or None where it has them."""
    with DisableTorchFunction():  # a subclass may change what its attributes are
        if value.is_meta:
            return "on the meta device, where there are no values"
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or is_transformed(value):
            return f"a {type(value).__name__} that stands for other tensors"
        if value.is_nested:
            return "nested"
        if value.is_quantized:
            return "quantized"
        return None if value.layout == torch.strided else f"of layout {value.layout}"

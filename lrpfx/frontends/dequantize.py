"""Before CAPTURE: replace dynamically quantized layers by layers with dequantized weights.

Such a layer rounds its input in every call, with steps that depend on the batch, and computes in integers: it has no gradient,
and samples cannot be explained separately. lrpfx explains the network with dequantized weights instead.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from lrpfx.errors import CaptureError
from lrpfx.frontends.symbolic import private_copy
from lrpfx.passes.program import PassResult

THE_MODEL = "the model"
_QUANTIZED = ("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")


def dequantized(model: nn.Module) -> tuple[nn.Module, PassResult]:
    """`model`, or a copy without quantized layers, and a list of these. `CaptureError` for unsupported quantized modules."""
    result = PassResult()
    if not any(_is_quantized(module) for module in model.modules()):
        return model, result
    copied = private_copy(model, share_parameters=True)
    replacements: dict[nn.Module, nn.Module] = {}
    for name, module in list(copied.named_modules(remove_duplicate=False)):
        if not _is_quantized(module) or any(name.startswith(f"{outer}.") for outer, _ in result.details):
            continue
        if module not in replacements:
            replacements[module] = _dequantized(name, module)
        result.matches += 1
        result.details.append(
            (name or THE_MODEL, f"explained by its dequantized weight: {module} is now {replacements[module]}")
        )
        if not name:
            return replacements[module], result
        path, _, leaf = name.rpartition(".")
        copied.get_submodule(path).register_module(leaf, replacements[module])
    return copied, result


def _is_quantized(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_QUANTIZED)


def _dequantized(name: str, module: Any) -> nn.Module:
    """The layer of torch.nn that corresponds to a quantized module."""
    kind = f"{type(module).__module__}.{type(module).__name__}"
    if ".dynamic." in kind and type(module).__name__ in ("Linear", "LinearReLU"):
        linear = nn.Linear(module.in_features, module.out_features, module.bias() is not None)
        linear.weight = nn.Parameter(_values(module.weight()))
        if module.bias() is not None:
            linear.bias = nn.Parameter(_values(module.bias()))
        layer: nn.Module = linear
        if type(module).__name__ == "LinearReLU":
            layer = nn.Sequential(OrderedDict(linear=linear, relu=nn.ReLU()))
        return layer.train(module.training)
    if type(module).__name__ == "Embedding":
        embedding: nn.Module = nn.Embedding.from_pretrained(_values(module.weight()))
        return embedding.train(module.training)
    raise CaptureError(
        f"{name or THE_MODEL} is a quantized {type(module).__name__} ({kind}), which computes in integers. Only dynamically "
        "quantized Linear and quantized Embedding are explained, by their dequantized weights; transform the model as it was "
        "before the others were quantized."
    )


def _values(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.dequantize() if tensor.is_quantized else tensor
    return values.detach().float()

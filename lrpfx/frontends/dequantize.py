"""Before CAPTURE: replace quantized layers and weights by dequantized ones, and sparse weights by dense ones.

A dynamically quantized layer rounds its input in every call, with steps that depend on the batch, and computes in integers: it
has no gradient, and samples cannot be explained separately. lrpfx explains the network with dequantized weights instead.
Weights that torchao quantized, and sparse weights, are tensors of other classes and layouts, which the rules cannot modify.
Layers of other libraries (bitsandbytes, HQQ, GPTQ, AWQ and the like) pack their weights in formats of their own: those of GPTQ
and AWQ are unpacked, and what others multiply by is measured, by their results for unit vectors.
"""

from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import nn

from lrpfx.errors import CaptureError, first_lines
from lrpfx.frontends.packed_weights import sizes_of, unpacked_weights
from lrpfx.passes.program import PassResult
from lrpfx.support.modules import linear_layer

THE_MODEL = "the model"
_TORCHAO = "torchao."
#: How much a packed layer may differ from a product with its weight, by rounding its inputs to 8 bits.
_ROUNDING = 0.02
#: How many unit vectors a packed layer gets at once.
_AT_ONCE = 1024
_QUANTIZED = ("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")


def is_quantized(model: nn.Module) -> bool:
    """Whether a model has quantized layers or weights, or sparse weights."""
    return any(map(_is_stored_otherwise, model.parameters())) or any(map(_is_quantized_layer, model.modules()))


def dequantize(copied: nn.Module) -> tuple[nn.Module, PassResult]:
    """Replace quantized layers and weights of a private copy; a list of these. `CaptureError` for unsupported ones.

    Returns another module if the copy itself is such a layer.
    """
    result = PassResult()
    stored = [name for name, value in copied.named_parameters(remove_duplicate=False) if _is_stored_otherwise(value)]
    _replace_weights(copied, stored, result)
    replacements: dict[nn.Module, nn.Module] = {}
    dtype = _main_dtype(copied)
    for name, module in list(copied.named_modules(remove_duplicate=False)):
        if not _is_quantized_layer(module) or any(name.startswith(f"{outer}.") for outer, _ in result.details):
            continue
        if module not in replacements:
            replacements[module] = _dequantized(name, module) if _is_quantized(module) else _of_packed(name, module, dtype)
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


def _is_quantized_layer(module: nn.Module) -> bool:
    return _is_quantized(module) or _is_packed(module)


def _is_packed(module: nn.Module) -> bool:
    """Whether a linear layer of another library holds its weight in integers."""
    inputs, outputs = sizes_of(module)
    if type(module).__module__.startswith("torch.") or not (isinstance(inputs, int) and isinstance(outputs, int)):
        return False
    tensors = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    tensors += [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    whole = inputs * outputs
    is_dense = any(one.is_floating_point() and one.numel() == whole for one in tensors)
    return (
        whole > 0
        and not is_dense
        and any(not one.is_floating_point() and 8 * one.element_size() * one.numel() >= whole for one in tensors)
    )


def _main_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype in which a model computes: that of most entries of its floating-point parameters. None if it has none."""
    entries = Counter[torch.dtype]()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            entries[parameter.dtype] += parameter.numel()
    return max(entries, key=entries.__getitem__, default=None)


def _of_packed(name: str, module: Any, dtype: torch.dtype | None) -> nn.Module:
    """The layer of torch.nn that computes what a packed layer does, up to the rounding of inputs.

    `dtype`: that of its weight; None for the one in which the layer computes.
    """
    inputs, outputs = sizes_of(module)
    weights = unpacked_weights(module)
    biases = [getattr(module, "bias", None)] * len(weights)

    def refused(what: str) -> CaptureError:
        return CaptureError(
            f"{name or THE_MODEL} is a {type(module).__name__} with packed weights, {what}. Transform the model as it was "
            "before it was quantized.",
            topic="scripted-and-quantized",
        )

    probe = torch.randn(4, inputs, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        try:
            found = _results(module, probe)
        except Exception as error:
            if len(weights) != 1:
                raise refused(f"which fails on numbers: {first_lines(error)}") from error
            found = None  # its kernel is for other devices
        if found is not None:
            if not weights:
                shift = _results(module, torch.zeros(1, inputs))[0]
                weights, biases = [(_results(module, torch.eye(inputs)) - shift).T], [shift if shift.any() else None]
            if tuple(found.shape) != (4, outputs):
                raise refused(f"whose result for {outputs} outputs has the shape {tuple(found.shape)}")
            differences = [_difference(found, probe, *pair) for pair in zip(weights, biases, strict=True)]
            weights = [weights[differences.index(min(differences))]]
            if not min(differences) <= _ROUNDING:
                raise refused(f"whose result differs by {min(differences):.1%} from a product with the weight that it shows")
    weight = weights[0].to(dtype or getattr(module, "scales", weights[0]).dtype)
    return linear_layer(weight, None if biases[0] is None else biases[0].to(weight)).train(module.training)


def _difference(found: torch.Tensor, probe: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> float:
    """How much the results of a layer differ from a product with a weight, in parts of them."""
    expected = nn.functional.linear(probe.to(weight), weight, None if bias is None else bias.to(weight))
    return float((found - expected).norm() / found.norm().clamp(min=1e-30))


def _results(module: Any, vectors: torch.Tensor) -> torch.Tensor:
    """What a packed layer gives for vectors, in the first dtype of those that its kernel may take."""
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    failure: Exception | None = None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        try:
            return torch.cat([module(some.to(device, dtype)).float() for some in vectors.split(_AT_ONCE)])
        except Exception as error:
            failure = failure or error
    assert failure is not None
    raise failure


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
        "before the others were quantized.",
        topic="scripted-and-quantized",
    )


def _is_stored_otherwise(value: torch.Tensor) -> bool:
    """Whether a parameter is sparse, or quantized by torchao."""
    return value.layout is not torch.strided or type(value).__module__.startswith(_TORCHAO)


def _replace_weights(model: nn.Module, names: list[str], result: PassResult) -> None:
    """Replace these parameters of a private copy by dense ones; a shared parameter stays shared."""
    replacements: dict[int, nn.Parameter] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        value = module._parameters[leaf]
        assert value is not None
        if id(value) not in replacements:
            replacements[id(value)] = nn.Parameter(_dense(name, value), requires_grad=False)
        module._parameters[leaf] = replacements[id(value)]
        vars(module).pop("extra_repr", None)  # torchao's, which describes the quantized weight
        how = "quantized" if value.layout is torch.strided else "sparse"
        result.matches += 1
        result.details.append((name, f"a {how} weight ({type(value).__name__}), explained by its values as a dense tensor"))


def _dense(name: str, value: torch.Tensor) -> torch.Tensor:
    """The values of a quantized or sparse parameter."""
    with torch.no_grad():
        if value.layout is not torch.strided:
            return value.detach().to_dense()
        if type(value).dequantize is torch.Tensor.dequantize:
            raise CaptureError(
                f"{name} is a {type(value).__name__} of torchao, which has no dequantize() that gives its values. "
                "Transform the model as it was before it was quantized.",
                topic="scripted-and-quantized",
            )
        return value.dequantize().detach()


def _values(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.dequantize() if tensor.is_quantized else tensor
    return values.detach().float()

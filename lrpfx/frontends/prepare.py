"""PREPARE: the model that captures start from, in one private copy if anything in it has to change."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from lrpfx.errors import CaptureError, InputError, InputTypeError
from lrpfx.frontends.dequantize import dequantize, is_quantized
from lrpfx.frontends.offloaded import moving_hooks, onload
from lrpfx.passes.program import PassResult
from lrpfx.support.modules import COMPILED, private_copy
from lrpfx.support.prefix_caches import filled_cache, without_caches

Model = nn.Module | ExportedProgram
#: The attribute that nnsight gives modules, beside a `forward` that reports calls and calls that of the class.
_NNSIGHT = "__nnsight__"


@dataclass(frozen=True)
class Prepared:
    """A model that can be captured. It may share parameters with the user's, so that each capture and run copies it."""

    model: Model
    dequantized: PassResult  # quantized and sparse layers and weights that were replaced


def prepare(model: Model, canonizers: Sequence[Any] = (), needs_values: bool = True, share: bool = False) -> Prepared:
    """The model with its weights in memory, without a cache and without quantized layers, and changed by the canonizers.

    The user's model is not changed. `canonizers` are those that change modules. Raises `InputError` and `CaptureError` for
    models that cannot be explained as they are: wrapped, scripted, in training mode, or on the meta device although
    values are needed. To `share` the memory of the model, nothing may have to be another tensor.
    """
    if isinstance(model, ExportedProgram):
        if canonizers:
            raise InputError(
                f"{canonizers[0]} changes modules, which an exported program does not have; transform the model itself",
                topic="canonizers-of-modules",
            )
        return Prepared(model, PassResult())
    _check_module(model)
    hooks = moving_hooks(model)
    if share:
        _check_sharing(model, canonizers, bool(hooks))
    copied = model
    watched = any(_NNSIGHT in vars(one) for one in model.modules())
    if hooks or canonizers or watched or is_quantized(model) or any(map(_keeps_cache, model.modules())):
        # Canonizers may write into parameters, of which an offloaded model keeps some elsewhere.
        stores = [hook.weights_map for found in hooks.values() for hook in found]
        copied = private_copy(model, share_tensors=not canonizers or bool(hooks), shared=stores)
        onload(copied)
        copied = private_copy(copied) if canonizers and hooks else copied
    if needs_values:
        _check_values(copied)
    for module in copied.modules():
        if vars(module).pop(_NNSIGHT, None) is not None:
            vars(module).pop("forward", None)
        if _keeps_cache(module):
            vars(module)["config"].use_cache = False
    copied, replaced = dequantize(copied)
    for canonizer in canonizers:
        canonizer.apply(copied)
    return Prepared(copied, replaced)


def with_plain_caches(model: nn.Module, caches: Mapping[str, Any]) -> nn.Module:
    """A copy whose forward takes the keys and values of caches in plain form, as `plain_cache` makes it, and returns no cache.

    `caches`: examples, by argument. The copy shares parameters with the model.
    """
    copied = private_copy(model, share_tensors=True)
    signature, own = inspect.signature(model.forward), vars(copied).get("forward")

    def forward(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        for arguments in (bound.arguments, *(one for one in bound.arguments.values() if isinstance(one, dict))):
            arguments.update({name: filled_cache(caches[name], arguments[name]) for name in caches if name in arguments})
        method = functools.partial(type(copied).forward, copied) if own is None else own
        return without_caches(method(*bound.args, **bound.kwargs))

    vars(forward)["__signature__"] = signature
    vars(copied)["forward"] = forward
    return copied


def _check_module(model: nn.Module) -> None:
    """Raise an error for wrappers whose names would be in the way, for parts without code or shapes, and for training mode."""
    name = type(model).__name__
    if hasattr(model, COMPILED):
        raise InputTypeError("the model is wrapped by torch.compile; transform the model itself and compile the result")
    if type(getattr(model, "transform", None)).__name__ == "GeneralizedRCNNTransform":  # a detector of torchvision
        raise CaptureError(
            f"{name} returns the boxes that are left after a suppression of doubles, through which no relevance flows: "
            "lrpfx.Explainer(model) explains its boxes, and lrpfx.transform takes lrpfx.detection.heads(model), whose targets "
            "are lrpfx.Box",
            topic="detectors",
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise InputTypeError(f"the model is wrapped by {name}; transform model.module and wrap the result")
    for path, module in model.named_modules():
        if any(is_lazy(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise InputError(
                f"{path or 'the model'} is a {type(module).__name__} whose parameters have no shape yet; "
                "call the model once on an input first"
            )
        if isinstance(module, torch.jit.ScriptModule):
            what = f"the submodule {path!r} is" if path else "the model is"
            raise CaptureError(
                f"{what} a {type(module).__name__} of torch.jit, whose code the compiler cannot follow. Transform the Python "
                "model that it was made from, which can load its state_dict().",
                topic="scripted-and-quantized",
            )
    names = [name or "the model" for name, module in model.named_modules() if module.training and _differs_in_training(module)]
    if names:
        raise CaptureError(
            f"{type(model).__name__} is in training mode: {', '.join(names[:5])}{' and others' if len(names) > 5 else ''} "
            "would be random, depend on the batch, or change their weights with every call. Call model.eval() first.",
            topic="training-mode",
        )


def _check_sharing(model: nn.Module, canonizers: Sequence[Any], is_offloaded: bool) -> None:
    """Raise `InputError` if the graph would be on other tensors than the model has."""
    if canonizers:
        raise InputError(
            f"share=True, but {canonizers[0]} changes modules, which takes a copy of the model: leave share=True out, or "
            "change the model itself before",
            topic="canonizers-of-modules",
        )
    if is_offloaded or is_quantized(model):
        what = "loads weights when it calls layers" if is_offloaded else "has quantized or sparse weights"
        raise InputError(
            f"share=True, but {type(model).__name__} {what}, which the graph holds as others: leave share=True out",
            topic="kinds-of-inputs" if is_offloaded else "scripted-and-quantized",
        )


def _check_values(model: nn.Module) -> None:
    """Raise `InputError` for tensors without values."""
    missing = [path for path, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if missing:
        raise InputError(
            f"{type(model).__name__} is on the meta device, where there are no values to explain: {', '.join(missing[:3])}"
            f"{' and others' if len(missing) > 3 else ''}. Load its weights first, as with "
            "load_state_dict(..., assign=True)",
            topic="kinds-of-inputs",
        )


def _differs_in_training(module: nn.Module) -> bool:
    random = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.RReLU, nn.MultiheadAttention)
    power_iteration = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    return power_iteration or isinstance(module, (*random, parametrizations._SpectralNorm))


def _keeps_cache(module: nn.Module) -> bool:
    """Whether a module's configuration asks for a cache.

    Language models of transformers return the keys and values of all layers by default: state of a generation, not an output
    to explain. Each submodule may hold a configuration of its own.
    """
    return getattr(vars(module).get("config"), "use_cache", None) is True

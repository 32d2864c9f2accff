"""LRP as a function that Quantus calls for explanations."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lrpfx.adapters.compilations import Compilations, invalid, wrong_type
from lrpfx.attribution.compute import attribute
from lrpfx.composites import Composite
from lrpfx.errors import first_lines

__all__ = ["explain_func"]

Array = npt.NDArray[Any]


def explain_func(composite: Composite | None = None, *, sum_channels: bool = False) -> Callable[..., Array]:
    """A function for the argument `explain_func` of the metrics of Quantus, and for `xai_methods` of `quantus.evaluate`.

    The function has the signature `(model, inputs, targets, *, device=None, method="")`. `model` is a module in evaluation
    mode, or the result of `lrpfx.transform`, which has its rules already. `inputs` are an array (samples, ...), which is cast
    to the model's dtype, as Quantus does it for predictions. `targets` are an int for each sample, or one for all: the class
    that is explained. `device` is where the model is; by default, the model is asked. `method` is the name that
    `quantus.evaluate` has for it, and changes nothing. It returns relevance, an array of the shape of the inputs, of dtype
    float64 for models of this dtype and float32 for others.

    A model is compiled at the first call. Later calls explain the model as it is then: a model that differs only in its
    parameters from an earlier one, such as a copy that a metric perturbs, takes the graph of that one. The errors are those of
    `lrpfx.transform` and `lrpfx.attribute`, and `InputError` and `InputTypeError` for other arguments.

    `composite`: the rules; by default they are chosen by what the model consists of, as by `lrpfx.Explainer`. `sum_channels`:
    return the sum over dimension 1, (samples, 1, ...), which metrics of localization need for images with several channels.
    """
    compilations = Compilations("explain_func", composite)

    def explain(model: nn.Module, inputs: Any, targets: Any, *, device: Any = None, method: str = "", **others: Any) -> Array:
        compilations.check(model)
        if others:
            raise wrong_type(f"there is no argument {next(iter(others))!r}: explain_func_kwargs may have device alone")
        images = _as_tensor(inputs, model, device)
        classes = _as_classes(targets, len(images))
        relevance = attribute(compilations.graph_for(model, (images,)), images, classes).relevance
        if sum_channels:
            if relevance.ndim < 3:
                raise invalid(f"sum_channels=True is for inputs with channels, and these have shape {tuple(images.shape)}")
            relevance = relevance.sum(1, keepdim=True)
        found: Array = relevance.to("cpu", torch.float64 if relevance.dtype == torch.float64 else torch.float32).numpy()
        return found

    return explain


def _as_tensor(inputs: Any, model: nn.Module, device: Any) -> torch.Tensor:
    """The inputs with the dtype of the model, where the model is."""
    if not isinstance(inputs, (np.ndarray, torch.Tensor)):
        raise wrong_type(f"inputs are an array, not {type(inputs).__name__}")
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind not in "buif":
        raise wrong_type(f"inputs are an array of numbers, not of dtype {inputs.dtype}")
    if not inputs.ndim:
        raise invalid("inputs are an array with the samples in dimension 0, not one number")
    held = next((one for one in (*model.parameters(), *model.buffers()) if one.is_floating_point()), torch.empty(0))
    place = held.device if device is None else _device(device)
    if held.numel() and place != held.device:
        raise invalid(f"the device is {device}, but the model is on {held.device}: move it by model.to({str(device)!r})")
    if isinstance(inputs, torch.Tensor):
        return inputs.detach().to(place, held.dtype)
    native = np.asarray(inputs, np.float64, order="C")  # torch takes no negative strides and foreign byte orders
    return torch.tensor(native).to(place, held.dtype)


def _device(device: Any) -> torch.device:
    """A device with its number, where it has one."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # AssertionError: torch without CUDA
        raise invalid(f"the device {device!r} cannot be used: {first_lines(error)}") from error


def _as_classes(targets: Any, samples: int) -> torch.Tensor:
    """A class for each sample."""
    try:
        classes = torch.as_tensor(np.asarray(targets))
    except (TypeError, ValueError) as error:
        raise wrong_type(f"targets are ints, not {type(targets).__name__}") from error
    if classes.is_floating_point() or classes.is_complex() or classes.dtype is torch.bool:
        raise wrong_type(f"targets are ints, not {classes.dtype}")
    if classes.ndim and classes.shape != (samples,):
        raise invalid(f"targets have shape {tuple(classes.shape)}, but there are {samples} samples")
    return classes.expand(samples)

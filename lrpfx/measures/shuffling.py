"""Models without what they learned: copies whose weights are shuffled, layer by layer from the output."""

import copy
from typing import Any

import torch
from torch import nn

from lrpfx.measures.data import invalid
from lrpfx.support.numbers import counted


def with_shuffled_weights(model: nn.Module, images: torch.Tensor, steps: int) -> list[nn.Module]:
    """Copies of a model with more and more shuffled layers, the last one with all of them.

    Layers are modules with parameters of their own, in the order of their first call. `steps`: how many copies there are, of
    equal numbers of further layers to rounding. `InputError` if there are fewer layers.
    """
    layers = _parameters_by_layer(model, images)
    if len(layers) < steps:
        raise invalid(f"the model has {counted(len(layers), 'layer')} with weights: choose Randomization(steps={len(layers)})")
    generator = torch.Generator().manual_seed(0)
    found, current = [], model
    done = 0
    for step in range(1, steps + 1):
        current = copy.deepcopy(current)
        parameters = dict(current.named_parameters())
        until = round(len(layers) * step / steps)
        for name in (name for layer in layers[done:until] for name in layer):
            values = parameters[name].data
            order = torch.randperm(values.numel(), generator=generator).to(values.device)
            values.copy_(values.flatten()[order].reshape(values.shape))
        found.append(current)
        done = until
    return found


def _parameters_by_layer(model: nn.Module, images: torch.Tensor) -> list[list[str]]:
    """The names of the parameters of each layer, the last layer first.

    Parameters of a module that is not called itself belong to the layer around it.
    """
    observed, called = copy.deepcopy(model), dict[str, None]()

    def note(name: str) -> Any:
        return lambda module, args: called.setdefault(name)

    for name, module in observed.named_modules():
        module.register_forward_pre_hook(note(name))
    with torch.no_grad():
        observed(images)
    layers: dict[str, list[str]] = {name: [] for name in called}
    for parameter, _ in model.named_parameters():
        owner = parameter.rpartition(".")[0]
        while owner not in layers:
            owner = owner.rpartition(".")[0]
        layers[owner].append(parameter)
    return [names for names in reversed(layers.values()) if names]

"""Before CAPTURE: bring back the weights that accelerate has offloaded to memory or disk.

Between calls, an offloaded weight is on the meta device; a hook of accelerate on its module fetches it for each call.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

#: Attributes under which accelerate keeps the hook of a module, and the forward that the hook wraps.
_HOOK, _WRAPPED = "_hf_hook", "_old_forward"


def moving_hooks(model: nn.Module) -> dict[str, list[Any]]:
    """The hooks of accelerate that only move tensors between devices, by the paths of their modules."""
    return {path: found for path, module in model.named_modules() if (found := list(_moving_hooks(module)))}


def onload(copied: nn.Module) -> None:
    """Give a private copy the weights that were offloaded, on the devices that compute, and remove the hooks that move them.

    Hooks of other classes stay: they may change values.
    """
    for path, found in moving_hooks(copied).items():
        module = copied.get_submodule(path)
        for hook in found:
            if hook.offload:
                _fetch(module, hook)
        _release(module)


def _moving_hooks(module: nn.Module) -> Iterator[Any]:
    """The hooks of accelerate on a module that only move tensors between devices."""
    return (hook for hook in _hooks(module) if f"{type(hook).__module__}.{type(hook).__name__}" == _MOVES)


_MOVES = "accelerate.hooks.AlignDevicesHook"


def _hooks(module: nn.Module) -> list[Any]:
    hook = vars(module).get(_HOOK)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def _fetch(module: nn.Module, hook: Any) -> None:
    """Give a private copy of a module the values of its offloaded parameters and buffers."""
    for path, holder in module.named_modules() if hook.place_submodules else [("", module)]:
        for table in (holder._parameters, holder._buffers):
            for leaf, former in table.items():
                if former is None or not former.is_meta:
                    continue
                value = hook.weights_map[f"{path}.{leaf}".lstrip(".")]
                value = value if hook.execution_device is None else value.to(hook.execution_device)
                table[leaf] = nn.Parameter(value, former.requires_grad) if isinstance(former, nn.Parameter) else value


def _release(module: nn.Module) -> None:
    """Remove the hooks that only move tensors from a private copy of a module, or stop them where others remain."""
    moving = list(_moving_hooks(module))
    if len(moving) < len(_hooks(module)):
        for hook in moving:
            hook.offload = False
        return
    attributes = vars(module)
    del attributes[_HOOK]
    wrapped = attributes.pop(_WRAPPED)
    attributes.pop("forward", None)
    if getattr(wrapped, "__func__", None) is not type(module).forward:
        attributes["forward"] = wrapped

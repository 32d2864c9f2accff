"""Canonizers: reversible changes that bring a model into a form that rules can handle, in module mode.

They shadow attributes of module instances and remove them again; parameters, buffers and state_dict are unchanged. In graph
mode the compiler itself merges batch norm and splits relevance at sums: `transform` skips canonizers that only do this, and
applies all others to a copy of the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch import nn

from lrpfx.core import collect_leaves
from lrpfx.errors import InputError
from lrpfx.frontends.execution_order import mergeable_batch_norms
from lrpfx.passes.canonize import merge_input_normalization, merge_layer_norm
from lrpfx.passes.canonize.merge_batch_norm import (
    batch_norm_scale,
    merged_bias,
    scale_output_channels,
    scale_output_channels_transposed,
)
from lrpfx.passes.program import GraphPass
from lrpfx.types import BatchNorm, ConvolutionTranspose, Linear

__all__ = [
    "AttributeCanonizer",
    "Canonizer",
    "CompositeCanonizer",
    "GraphCanonizer",
    "MergeBatchNorm",
    "MergeInputNormalization",
    "MergeLayerNorm",
    "NamedMergeBatchNorm",
    "SequentialMergeBatchNorm",
]

_ABSENT = object()


class Canonizer(ABC):
    """Base of the canonizers: `apply` finds places to change, and registers one instance at each."""

    #: Whether the canonizer is unnecessary in graph mode, because the compiler does the same.
    superfluous_in_graphs: ClassVar[bool] = False

    def apply(self, root_module: nn.Module) -> "list[Canonizer]":
        """Apply to `root_module` and its submodules. Returns the instances to `remove`."""
        return []

    @abstractmethod
    def register(self, *args: Any, **kwargs: Any) -> None:
        """Change one place."""

    @abstractmethod
    def remove(self) -> None:
        """Undo the change."""

    def copy(self) -> Self:
        """A canonizer with the same settings. Override it if __init__ takes arguments."""
        return type(self)()


class _Shadow:
    """Attributes set directly in the __dict__ of module instances, and their former values."""

    def __init__(self) -> None:
        self.before: list[tuple[nn.Module, str, Any]] = []

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        self.before.append((module, name, vars(module).get(name, _ABSENT)))
        vars(module)[name] = value

    def restore(self) -> None:
        while self.before:
            module, name, value = self.before.pop()
            if value is _ABSENT:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value


class MergeBatchNorm(Canonizer):
    """Merge batch norms into the linear layers before them."""

    superfluous_in_graphs = True
    linear_type: ClassVar[tuple[type, ...]] = (Linear,)
    batch_norm_type: ClassVar[tuple[type, ...]] = (BatchNorm,)

    def __init__(self) -> None:
        super().__init__()
        self.linears: tuple[nn.Module, ...] = ()
        self.batch_norm: nn.Module | None = None
        self._shadow = _Shadow()

    def register(self, linears: Sequence[nn.Module], batch_norm: nn.Module) -> None:
        """Merge `batch_norm` into each of `linears`: they compute both, and it becomes the identity."""
        self.linears, self.batch_norm = tuple(linears), batch_norm
        self._merge(self._shadow, linears, batch_norm)

    def remove(self) -> None:
        self._shadow.restore()

    @staticmethod
    def merge_batch_norm(modules: Sequence[nn.Module], batch_norm: nn.Module) -> None:
        """Merge permanently."""
        MergeBatchNorm._merge(_Shadow(), modules, batch_norm)

    @staticmethod
    def _merge(shadow: _Shadow, linears: Sequence[nn.Module], batch_norm: nn.Module) -> None:
        mean, var = getattr(batch_norm, "running_mean", None), getattr(batch_norm, "running_var", None)
        if not isinstance(mean, torch.Tensor) or not isinstance(var, torch.Tensor):
            raise InputError(f"{batch_norm} has no running statistics that could be merged")
        norm: Any = batch_norm
        affine, eps = (norm.weight, norm.bias), norm.eps
        scale = batch_norm_scale(var, affine[0], eps)
        for linear in linears:
            weight, bias = linear.weight, linear.bias
            if not isinstance(weight, torch.Tensor) or not isinstance(bias, (torch.Tensor, type(None))):
                raise InputError(f"{linear} has no weight that {batch_norm} could be merged into")
            if isinstance(linear, ConvolutionTranspose):
                merged = scale_output_channels_transposed(weight, scale, int(getattr(linear, "groups", 1)))
            else:
                merged = scale_output_channels(weight, scale)
            shadow.set(linear, "weight", merged)
            shadow.set(linear, "bias", merged_bias(bias, mean, scale, affine[1]))
        for name, value in (("running_mean", torch.zeros_like(mean)), ("running_var", torch.ones_like(var)), ("eps", 0.0)):
            shadow.set(batch_norm, name, value)
        if affine[0] is not None:
            shadow.set(batch_norm, "weight", torch.ones_like(affine[0]))
            shadow.set(batch_norm, "bias", torch.zeros_like(affine[1]))


class SequentialMergeBatchNorm(MergeBatchNorm):
    """Merge every batch norm that is the only reader of a linear layer.

    If the model cannot be traced: every batch norm registered directly after a linear layer with as many channels.
    """

    def apply(self, root_module: nn.Module) -> list[Canonizer]:
        pairs = mergeable_batch_norms(root_module)
        modules = dict(root_module.named_modules())
        found = [(modules[linear], modules[norm]) for linear, norm in pairs or ()]
        found += self._neighbours(root_module) if pairs is None else []
        instances: list[Canonizer] = []
        for linear, norm in found:
            fitting = isinstance(linear, self.linear_type), isinstance(norm, self.batch_norm_type)
            if all(fitting):
                instance = self.copy()
                instance.register((linear,), norm)
                instances.append(instance)
        return instances

    def _neighbours(self, root_module: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
        found = []
        for first, second in pairwise(collect_leaves(root_module)):
            if isinstance(first, self.linear_type) and isinstance(second, self.batch_norm_type):
                channels = getattr(first, "out_channels", None) or getattr(first, "out_features", None)
                if channels == getattr(second, "num_features", None) and getattr(second, "running_mean", None) is not None:
                    found.append((first, second))
        return found


class NamedMergeBatchNorm(MergeBatchNorm):
    """Merge batch norms by name: `name_map` lists ([names of linear layers], name of the batch norm)."""

    def __init__(self, name_map: Sequence[tuple[Sequence[str], str]]) -> None:
        super().__init__()
        self.name_map = name_map

    def apply(self, root_module: nn.Module) -> list[Canonizer]:
        modules = dict(root_module.named_modules())
        instances: list[Canonizer] = []
        for linears, norm in self.name_map:
            missing = [name for name in (*linears, norm) if name not in modules]
            if missing:
                raise InputError(f"there is no module named {missing[0]!r} to merge")
            instance = self.copy()
            instance.register([modules[name] for name in linears], modules[norm])
            instances.append(instance)
        return instances

    def copy(self) -> Self:
        return type(self)(self.name_map)


class AttributeCanonizer(Canonizer):
    """Set attributes on modules: `attribute_map(name, module)` returns them as a dict, or None for modules to skip.

    A typical use sets a `forward` that makes an operation visible as a module, together with that module.
    """

    def __init__(self, attribute_map: Callable[[str, nn.Module], dict[str, Any] | None]) -> None:
        self.attribute_map = attribute_map
        self._shadow = _Shadow()
        self._children: list[tuple[nn.Module, str, Any]] = []

    def apply(self, root_module: nn.Module) -> list[Canonizer]:
        instances: list[Canonizer] = []
        for name, module in list(root_module.named_modules()):
            attributes = self.attribute_map(name, module)
            if attributes is not None:
                instance = self.copy()
                instance.register(module, attributes)
                instances.append(instance)
        return instances

    def register(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        """Set `attributes` on `module`; modules among them become its children."""
        for name, value in attributes.items():
            if isinstance(value, nn.Module):
                self._children.append((module, name, module._modules.get(name, _ABSENT)))
                module._modules[name] = value
            else:
                self._shadow.set(module, name, value)

    def remove(self) -> None:
        self._shadow.restore()
        while self._children:
            module, name, value = self._children.pop()
            if value is _ABSENT:
                module._modules.pop(name, None)
            else:
                module._modules[name] = value

    def copy(self) -> Self:
        copied = type(self).__new__(type(self))
        AttributeCanonizer.__init__(copied, self.attribute_map)
        return copied


class CompositeCanonizer(Canonizer):
    """Several canonizers in sequence."""

    def __init__(self, canonizers: Sequence[Canonizer]) -> None:
        self.canonizers = list(canonizers)

    def apply(self, root_module: nn.Module) -> list[Canonizer]:
        instances: list[Canonizer] = []
        try:
            for canonizer in self.canonizers:
                instances += canonizer.apply(root_module)
        except BaseException:
            for instance in reversed(instances):
                instance.remove()
            raise
        return instances

    def register(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the contained canonizers register themselves."""

    def remove(self) -> None:
        """Do nothing: `apply` returns the instances to remove."""

    def copy(self) -> Self:
        copied = type(self).__new__(type(self))
        CompositeCanonizer.__init__(copied, [canonizer.copy() for canonizer in self.canonizers])
        return copied


class GraphCanonizer(Canonizer):
    """Base of canonizers that are compiler passes: options for `lrpfx.transform`, not for module mode."""

    @abstractmethod
    def graph_pass(self) -> GraphPass:
        """The compiler pass."""

    def apply(self, root_module: nn.Module) -> list[Canonizer]:
        raise InputError(f"{type(self).__name__} works only on graphs: use lrpfx.transform(model, composite)")

    def register(self, *args: Any, **kwargs: Any) -> None:
        raise InputError(f"{type(self).__name__} works only on graphs: use lrpfx.transform(model, composite)")

    def remove(self) -> None:
        """Do nothing: there is nothing to undo."""


class MergeLayerNorm(GraphCanonizer):
    """Merge the weight and bias of layer norms into the dense layers after them, in graphs."""

    def graph_pass(self) -> GraphPass:
        return merge_layer_norm.MergeLayerNorm()


class MergeInputNormalization(GraphCanonizer):
    """Merge an input normalization at the start of a model into its first convolutions, in graphs.

    Rules that need the input range, such as ZBox, then take it in the units of the model's input.
    """

    def graph_pass(self) -> GraphPass:
        return merge_input_normalization.MergeInputNormalization()


def graph_passes(canonizers: Sequence[Any]) -> list[GraphPass]:
    """The compiler passes of a composite's canonizers."""
    found: list[GraphPass] = []
    for canonizer in canonizers:
        if isinstance(canonizer, CompositeCanonizer):
            found += graph_passes(canonizer.canonizers)
        elif isinstance(canonizer, GraphCanonizer):
            found.append(canonizer.graph_pass())
    return found


def needed_in_graphs(canonizers: Sequence[Any]) -> list[Any]:
    """The canonizers that do more than the compiler itself."""
    needed: list[Any] = []
    for canonizer in canonizers:
        if isinstance(canonizer, CompositeCanonizer):
            needed += needed_in_graphs(canonizer.canonizers)
        elif not getattr(canonizer, "superfluous_in_graphs", False) and not isinstance(canonizer, GraphCanonizer):
            needed.append(canonizer)
    return needed

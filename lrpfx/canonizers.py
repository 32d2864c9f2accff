"""Canonizers: reversible changes that bring a model into a form that rules can handle, in module mode.

They shadow attributes of module instances and remove them again; parameters, buffers and state_dict are unchanged. In graph
mode the compiler itself merges batch norm and splits relevance at sums: `transform` skips canonizers that only do this, and
applies all others to a copy of the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import Self

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
from lrpfx.runtime.module_mode.shadows import Shadow
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


def collect_leaves(module: nn.Module) -> Iterator[nn.Module]:
    """The leaves of a `module`, depth first in the order of registration; the module itself if it has no children."""
    children = list(module.children())
    if not children:
        yield module
    for child in children:
        yield from collect_leaves(child)


class Canonizer(ABC):
    """Base of the canonizers: `apply` finds places to change, and registers one instance at each."""

    #: Whether the canonizer is unnecessary in graph mode, because the compiler does the same.
    superfluous_in_graphs: ClassVar[bool] = False

    def apply(self, root_module: nn.Module) -> "list[Canonizer]":
        """Apply to `root_module` and its submodules. Returns the instances to `remove`."""
        return []

    @abstractmethod
    def register(self, *args: Any, **kwargs: Any) -> None:
        """Change one place, which `args` and `kwargs` give as the class says."""

    @abstractmethod
    def remove(self) -> None:
        """Undo the change."""

    def copy(self) -> Self:
        """A canonizer with the same settings. Override it if __init__ takes arguments."""
        return type(self)()

    def _registered_at(self, places: "Sequence[tuple[Any, ...]]") -> "list[Canonizer]":
        """A copy registered at each place, or at none if one of them fails."""
        instances: list[Canonizer] = [self.copy() for _ in places]
        with ExitStack() as undo:
            for instance, place in zip(instances, places, strict=True):
                undo.callback(instance.remove)
                instance.register(*place)
            undo.pop_all()
        return instances


class MergeBatchNorm(Canonizer):
    """Merge batch norms into the linear layers before them."""

    superfluous_in_graphs = True
    linear_type: ClassVar[tuple[type, ...]] = (Linear,)
    batch_norm_type: ClassVar[tuple[type, ...]] = (BatchNorm,)

    def __init__(self) -> None:
        super().__init__()
        self.linears: tuple[nn.Module, ...] = ()
        self.batch_norm: nn.Module | None = None
        self._shadow = Shadow()
        self._hooks: list[Any] = []

    def register(self, linears: Sequence[nn.Module], batch_norm: nn.Module) -> None:
        """Merge a `batch_norm` into the layers `linears`: they compute both, and it becomes the identity.

        Each call of a layer merges anew, so that it follows `load_state_dict` and the steps of an optimizer. `InputError` if a
        parametrization computes one of them, the batch norm has no running statistics, or a layer has no weight.
        """
        self.linears, self.batch_norm = tuple(linears), batch_norm
        for module in (*self.linears, batch_norm):
            if is_parametrized(module):
                raise InputError(
                    f"a parametrization computes tensors of a {type(module).__name__}, and merged ones cannot replace them. "
                    "Remove it by torch.nn.utils.parametrize.remove_parametrizations, or use lrpfx.transform, which merges it",
                    topic="canonizers-of-modules",
                )
        try:
            for module in (*self.linears, batch_norm):
                self._merge_at(module)
                self._hooks.append(module.register_forward_pre_hook(self._before_call))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._shadow.restore()

    def _before_call(self, module: nn.Module, args: Any) -> None:
        self._merge_at(module)

    def _merge_at(self, module: nn.Module) -> None:
        """Compute what a module has while it is merged."""
        norm, read = self.batch_norm, self._shadow.beneath
        assert norm is not None
        for name, value in (_identity(norm, read) if module is norm else _merged(module, norm, read)).items():
            self._shadow.set(module, name, value)

    @staticmethod
    def merge_batch_norm(modules: Sequence[nn.Module], batch_norm: nn.Module) -> None:
        """Merge a `batch_norm` permanently into the linear layers `modules`.

        `InputError` if the batch norm has no running statistics, or if a layer has no weight.
        """
        found = [(module, _merged(module, batch_norm, getattr)) for module in modules]
        for module, tensors in (*found, (batch_norm, _identity(batch_norm, getattr))):
            vars(module).update(tensors)


def _merged(linear: nn.Module, norm: nn.Module, read: Callable[[nn.Module, str], Any]) -> dict[str, Any]:
    """The weight and bias of a linear layer with a batch norm merged into it. `read` gives attributes before the merge."""
    weight, bias = (read(linear, name) if hasattr(linear, name) else None for name in ("weight", "bias"))
    if not isinstance(weight, torch.Tensor) or not isinstance(bias, (torch.Tensor, type(None))):
        raise InputError(f"{linear} has no weight that {norm} could be merged into", topic="canonizers-of-modules")
    mean, var = _statistics(norm, read)
    if norm.training:
        raise InputError(
            f"{norm} is in training mode and normalizes by its batch, which no layer can take over: call model.eval()",
            topic="training-mode",
        )
    scale = batch_norm_scale(var, read(norm, "weight"), read(norm, "eps"))
    if isinstance(linear, ConvolutionTranspose):
        merged = scale_output_channels_transposed(weight, scale, int(getattr(linear, "groups", 1)))
    else:
        merged = scale_output_channels(weight, scale)
    return {"weight": merged, "bias": merged_bias(bias, mean, scale, read(norm, "bias"))}


def _identity(norm: nn.Module, read: Callable[[nn.Module, str], Any]) -> dict[str, Any]:
    """The tensors of a batch norm that computes nothing."""
    mean, var = _statistics(norm, read)
    found = {"running_mean": torch.zeros_like(mean), "running_var": torch.ones_like(var), "eps": 0.0}
    weight, bias = read(norm, "weight"), read(norm, "bias")
    if weight is not None:
        found |= {"weight": torch.ones_like(weight), "bias": torch.zeros_like(bias)}
    return found


def _statistics(norm: nn.Module, read: Callable[[nn.Module, str], Any]) -> tuple[torch.Tensor, torch.Tensor]:
    mean, var = (read(norm, name) if hasattr(norm, name) else None for name in ("running_mean", "running_var"))
    if not isinstance(mean, torch.Tensor) or not isinstance(var, torch.Tensor):
        raise InputError(f"{norm} has no running statistics that could be merged", topic="canonizers-of-modules")
    return mean, var


class SequentialMergeBatchNorm(MergeBatchNorm):
    """Merge every batch norm that is the only reader of a linear layer.

    If the model cannot be traced: every batch norm registered directly after a linear layer with as many channels.
    """

    def apply(self, root_module: nn.Module) -> list[Canonizer]:
        pairs = mergeable_batch_norms(root_module)
        modules = dict(root_module.named_modules())
        found = [(modules[linear], modules[norm]) for linear, norm in pairs or ()]
        if pairs is None:
            found = [pair for pair in pairwise(collect_leaves(root_module)) if _fit_together(*pair)]
        kinds = self.linear_type, self.batch_norm_type
        return self._registered_at([((linear,), norm) for linear, norm in found if all(map(isinstance, (linear, norm), kinds))])


def _fit_together(linear: nn.Module, norm: nn.Module) -> bool:
    """Whether a batch norm has statistics of as many channels as a layer returns."""
    channels = getattr(linear, "out_channels", None) or getattr(linear, "out_features", None)
    return channels == getattr(norm, "num_features", None) and getattr(norm, "running_mean", None) is not None


class NamedMergeBatchNorm(MergeBatchNorm):
    """Merge batch norms by name. `name_map`: pairs of a list of names of linear layers and the name of the batch norm."""

    def __init__(self, name_map: Sequence[tuple[Sequence[str], str]]) -> None:
        super().__init__()
        self.name_map = name_map

    def apply(self, root_module: nn.Module) -> list[Canonizer]:
        modules = dict(root_module.named_modules())
        missing = [name for linears, norm in self.name_map for name in (*linears, norm) if name not in modules]
        if missing:
            raise InputError(f"there is no module named {missing[0]!r} to merge", topic="canonizers-of-modules")
        return self._registered_at([([modules[name] for name in linears], modules[norm]) for linears, norm in self.name_map])

    def copy(self) -> Self:
        return type(self)(self.name_map)


class AttributeCanonizer(Canonizer):
    """Set attributes on modules.

    `attribute_map`: the function of a name and a module that returns the attributes as a dict, or None for modules to skip. A
    typical use sets a `forward` that makes an operation visible as a module, together with that module.
    """

    def __init__(self, attribute_map: Callable[[str, nn.Module], dict[str, Any] | None]) -> None:
        self.attribute_map = attribute_map
        self._shadow = Shadow()

    def apply(self, root_module: nn.Module) -> list[Canonizer]:
        found = [(module, self.attribute_map(name, module)) for name, module in list(root_module.named_modules())]
        return self._registered_at([(module, attributes) for module, attributes in found if attributes is not None])

    def register(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        """Set `attributes` by name on a `module`; modules among them become its children."""
        for name, value in attributes.items():
            self._shadow.set(module, name, value)

    def remove(self) -> None:
        self._shadow.restore()

    def copy(self) -> Self:
        copied = type(self).__new__(type(self))
        AttributeCanonizer.__init__(copied, self.attribute_map)
        return copied


class CompositeCanonizer(Canonizer):
    """Several `canonizers` in sequence."""

    def __init__(self, canonizers: Sequence[Canonizer]) -> None:
        self.canonizers = list(canonizers)

    def apply(self, root_module: nn.Module) -> list[Canonizer]:
        instances: list[Canonizer] = []
        with ExitStack() as undo:
            for canonizer in self.canonizers:
                for instance in canonizer.apply(root_module):
                    undo.callback(instance.remove)
                    instances.append(instance)
            undo.pop_all()
        return instances

    def register(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing with `args` and `kwargs`: the contained canonizers register themselves."""

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

    def apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InputError(
            f"{type(self).__name__} works only on graphs: use lrpfx.transform(model, composite)", topic="canonizers-of-modules"
        )

    register = apply

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
    return [one.graph_pass() for one in _single(canonizers) if isinstance(one, GraphCanonizer)]


def needed_in_graphs(canonizers: Sequence[Any]) -> list[Any]:
    """The canonizers that do more than the compiler itself."""
    others = (one for one in _single(canonizers) if not isinstance(one, GraphCanonizer))
    return [one for one in others if not getattr(one, "superfluous_in_graphs", False)]


def _single(canonizers: Sequence[Any]) -> Iterator[Any]:
    """The canonizers, with those that a `CompositeCanonizer` contains in its place."""
    for canonizer in canonizers:
        yield from _single(canonizer.canonizers) if isinstance(canonizer, CompositeCanonizer) else (canonizer,)

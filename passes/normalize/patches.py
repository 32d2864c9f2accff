"""Patches of images and series, by torch.nn.functional.unfold or Tensor.unfold, as a convolution reads them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from lrpfx.ir.node import node_info
from lrpfx.passes.constants import evaluated

#: torch.nn.functional.unfold in both front ends, and its arguments.
_UNFOLDS = (functional.unfold, torch.ops.aten.im2col.default)
_UNFOLD = ("input", "kernel_size", "dilation", "padding", "stride")
#: Tensor.unfold in both.
_WINDOWS = (torch.Tensor.unfold, torch.ops.aten.unfold.default)


@dataclass(frozen=True)
class Patches:
    """The patches that a convolution reads: of which value, how large, and its other arguments."""

    source: fx.Node
    kernel: tuple[int, ...]
    options: dict[str, Any]
    is_view: bool  # by Tensor.unfold

    @property
    def spatial(self) -> int:
        """The number of dimensions of a patch, without that of the channels."""
        return len(self.kernel)

    def orders(self, value: fx.Node) -> Callable[[Sequence[int], int, int], bool]:
        """A function that says whether a view of the patches has its entries in the order in which a convolution reads them.

        It takes the order of the view's dimensions (the sample, `places` of them for the places, those of the groups, those of
        the inputs of a group), the number of places, and that of groups.
        """
        shape = node_info(self.source).shape
        if shape is None or len(shape) != 2 + self.spatial:
            return lambda order, places, groups: False
        size = math.prod(shape)
        entries = torch.arange(1, size + 1, dtype=torch.float32 if size < 2**24 else torch.float64).view(shape)
        patches = self._of(entries)
        try:
            found = evaluated(value, {self.source: entries})
        except (RuntimeError, TypeError, ValueError, IndexError):  # sizes that only a run knows
            found = torch.empty(0, device="meta")

        def are_in_order(order: Sequence[int], places: int, groups: int) -> bool:
            if found.is_meta or places not in (1, self.spatial) or shape[1] % groups:
                return False
            viewed = found.permute(*order)
            whole = patches if places == self.spatial else patches.flatten(1, self.spatial)
            alike = viewed.shape[: 1 + places] == whole.shape[: 1 + places] and viewed.numel() == whole.numel()
            sizes = (*whole.shape[: 1 + places], groups, -1)
            return alike and torch.equal(viewed.reshape(sizes), whole.reshape(sizes))

        return are_in_order

    def _of(self, value: torch.Tensor) -> torch.Tensor:
        """The patches of a value, in the shape (sample, places..., channels, kernel...)."""
        dilation, padding, stride = (self._numbers(name, default) for name, default in _DEFAULTS.items())
        value = functional.pad(value, [one for one in reversed(padding) for _ in range(2)])
        for dim, (size, step, apart) in enumerate(zip(self.kernel, stride, dilation, strict=True), start=2):
            value = value.unfold(dim, (size - 1) * apart + 1, step)[..., ::apart]
        return value.movedim(1, 1 + self.spatial)

    def _numbers(self, name: str, default: int) -> tuple[int, ...]:
        given = self.options.get(name, default)
        return (given,) * self.spatial if isinstance(given, int) else tuple(given)


_DEFAULTS = {"dilation": 1, "padding": 0, "stride": 1}


def patches_in(value: Any) -> Patches | None:
    """The patches of which a value is a view; None if the graph does not show them."""
    while isinstance(value, fx.Node) and value.op == "call_function":
        if value.target in _UNFOLDS:
            return _columns(value)
        if value.target in _WINDOWS:
            return _windows(value)
        row = node_info(value).operator
        if row is None or not row.entries.moves:
            return None
        value = value.args[0]
    return None


def _columns(unfold: fx.Node) -> Patches | None:
    given: dict[str, Any] = dict(zip(_UNFOLD, unfold.args, strict=False)) | unfold.kwargs
    options = {name: given[name] for name in _DEFAULTS if name in given}
    sizes = given["kernel_size"]
    kernel = (sizes, sizes) if isinstance(sizes, int) else tuple(sizes)
    numbers = [*kernel, *(size for one in options.values() for size in ([one] if isinstance(one, int) else one))]
    return Patches(given["input"], kernel, options, is_view=False) if all(isinstance(one, int) for one in numbers) else None


def _windows(value: Any) -> Patches | None:
    found: dict[int, tuple[int, int]] = {}
    while isinstance(value, fx.Node) and value.target in _WINDOWS:
        source: Any = value.args[0]
        shape = node_info(source).shape
        given: dict[str, Any] = dict(zip(("dimension", "size", "step"), value.args[1:], strict=False)) | value.kwargs
        if shape is None or not all(isinstance(one, int) for one in given.values()):
            return None
        found[given["dimension"] % len(shape)] = given["size"], given["step"]
        value = source
    shape = node_info(value).shape
    if shape is None or sorted(found) != list(range(2, len(shape))) or len(found) > 3:
        return None
    kernel, stride = zip(*(found[dim] for dim in sorted(found)), strict=True)
    return Patches(value, kernel, {"stride": stride}, is_view=True)

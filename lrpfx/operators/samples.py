"""Building blocks for samples of rows: random tensors, and calls with them."""

from dataclasses import dataclass
from typing import Any

import torch

from lrpfx.ir.operator import ExampleCall, Function


@dataclass(frozen=True)
class Signal:
    """A tensor that carries relevance."""

    shape: tuple[int, ...]
    low: float = -1.0
    high: float = 1.0

    def make(self) -> torch.Tensor:
        return torch.rand(self.shape) * (self.high - self.low) + self.low


@dataclass(frozen=True)
class Weight(Signal):
    """A parameter or buffer of the network."""


@dataclass(frozen=True)
class Fixed:
    """An integer or boolean tensor that is an input of the network."""

    values: Any

    def make(self) -> torch.Tensor:
        return torch.tensor(self.values)


def signal(*shape: int, low: float = -1.0, high: float = 1.0) -> Signal:
    return Signal(shape, low, high)


def weight(*shape: int, low: float = -1.0, high: float = 1.0) -> Weight:
    return Weight(shape, low, high)


def call(loses: str = "", batch: bool = True, **arguments: Any) -> ExampleCall:
    """A call with these arguments, by their canonical names."""
    return ExampleCall(arguments, loses=loses, batch=batch)


def of(function: Function, *shapes: tuple[int, ...], loses: str = "", batch: bool = True) -> ExampleCall:
    """A call of a function with signals of these shapes, by default with one matrix."""
    signals = {f"x{place}": Signal(shape) for place, shape in enumerate(shapes or [(2, 4)])}
    return ExampleCall(signals, function, loses, batch)


def joined(pair: Any, dimension: int = 0) -> torch.Tensor:
    """The two results of a call as one tensor, taken by their places: torch 2.6 traces no `cat` of the call itself."""
    return torch.cat((pair[0], pair[1]), dimension)


def mask(function: Function, *shapes: tuple[int, ...], batch: bool = True) -> ExampleCall:
    """A call of a function whose result is not a signal, multiplied by a signal."""
    return of(lambda x, *others: x * function(x, *others).to(x.dtype), *shapes, batch=batch)


IMAGE, MATRIX, POSITIVE = signal(2, 4, 5, 6), signal(2, 4), signal(2, 4, low=0.5, high=2.0)

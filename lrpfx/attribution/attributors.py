"""Attributors: attribution methods for a model, in module mode if a composite is given.

An attributor is called with an input of shape (batch, ...) and weights for the output. It returns the model's output and the
attribution, which has the input's shape. It takes plain models, models under a composite, and explainable modules.
"""

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import InitVar, dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import Self

from lrpfx.composites import Composite
from lrpfx.errors import InputError, InputTypeError
from lrpfx.support.interrupts import NativeContext
from lrpfx.support.numbers import is_whole
from lrpfx.support.optional_packages import progress_bar

AttrOutput = torch.Tensor | Callable[[torch.Tensor], torch.Tensor] | None
OutputFunction = Callable[[torch.Tensor], torch.Tensor]


def identity(obj: Any) -> Any:
    """The argument.

    `obj`: anything.
    """
    return obj


def constant(obj: Any) -> Callable[..., Any]:
    """A function that always returns the same.

    `obj`: what it returns.
    """

    def function(*args: Any, **kwargs: Any) -> Any:
        return obj

    return function


def occlude_independent(
    input: torch.Tensor,
    mask: torch.Tensor,
    fill_fn: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like,
    invert: bool = False,
) -> torch.Tensor:
    """The input where a mask is true, and something else elsewhere.

    `input`: the input. `mask`: truth values, of the input's shape. `fill_fn`: the function of the input that gives its values
    elsewhere. `invert`: whether to keep the input where the mask is false instead.
    """
    mask = ~mask if invert else mask
    return input * mask + ~mask * fill_fn(input)


@dataclass(eq=False, repr=False)
class Attributor(NativeContext):
    """Base of the attributors.

    As a context manager, the composite is registered once for all calls in the context; otherwise for each call.

    `model`: the model, a module. `composite`: the composite to register on it; None for none. `attr_output`: the weights of the
    output: a tensor of its shape, a function of the output, or None for the output itself.
    """

    model: nn.Module
    composite: Composite | None = None
    attr_output: InitVar[AttrOutput] = None

    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        if inspect.isabstract(cls):  # checked here since io.IOBase.__new__, unlike object.__new__, does not
            raise TypeError(f"{cls.__name__} is abstract: it has no {', '.join(sorted(cls.__abstractmethods__))}")
        return super().__new__(cls)

    def __post_init__(self, attr_output: AttrOutput) -> None:
        self.attr_output_fn = self._function_of(attr_output)

    @staticmethod
    def _function_of(attr_output: AttrOutput) -> OutputFunction:
        if attr_output is None:
            return identity
        if isinstance(attr_output, torch.Tensor):
            return constant(attr_output)
        if callable(attr_output):
            return attr_output
        raise InputTypeError(f"attr_output is a tensor, a function or None, not {type(attr_output).__name__}")

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    def entered(self) -> Generator[Self, None, None]:
        """What happens around the body of the `with` statement. Yields the attributor."""
        if self.composite is None:
            yield self
            return
        registered = self.composite.context(self.model).entered()
        try:
            next(registered)
            yield self
        finally:
            registered.close()

    def __call__(self, input: torch.Tensor, attr_output: AttrOutput = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's output, and the attribution.

        `input`: the input, a batch. `attr_output`: as for the class, which it overrides. Errors: `RuleError`: the model has
        rules already, for example those of a call in another thread.
        """
        attr_output_fn = self.attr_output_fn if attr_output is None else self._function_of(attr_output)
        if self.composite is None or not self.composite.reserve():
            return self.forward(input, attr_output_fn)
        try:
            with self:
                return self.forward(input, attr_output_fn)
        finally:
            self.composite.used_by = None

    @property
    def inactive(self) -> Callable[[], AbstractContextManager[Composite]] | None:
        """The composite's `inactive`, for derivatives of relevance; None without a composite."""
        return None if self.composite is None else self.composite.inactive

    @abstractmethod
    def forward(self, input: torch.Tensor, attr_output_fn: OutputFunction) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's output, and the attribution.

        `input`: the input, a batch. `attr_output_fn`: the function from the output to its weights.
        """


@dataclass(eq=False, repr=False)
class Gradient(Attributor):
    """The gradient, which under a composite is relevance.

    `create_graph`: as for `torch.autograd.grad`: whether the attribution can be differentiated. `retain_graph`: as for
    `torch.autograd.grad`. Other arguments: as for `Attributor`.
    """

    create_graph: bool = False
    retain_graph: bool | None = None

    def grad(self, input: torch.Tensor, attr_output_fn: OutputFunction) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and gradient.

        `input`: the input, a batch. `attr_output_fn`: the function from the output to its weights. Errors: `InputTypeError`:
        the input is not a tensor of floating-point numbers.
        """
        if not input.is_floating_point():
            raise InputTypeError(f"the input has dtype {input.dtype}, which has no gradient")
        with torch.enable_grad():
            if not input.requires_grad:
                input.requires_grad_()
            output = self.model(input)
            if not isinstance(output, torch.Tensor):
                raise InputTypeError(f"attributors take a model that returns one tensor, not {type(output).__name__}")
            weights = attr_output_fn(output)
            (gradient,) = torch.autograd.grad(
                (output,), (input,), grad_outputs=(weights,), create_graph=self.create_graph, retain_graph=self.retain_graph
            )
        return output, gradient

    def forward(self, input: torch.Tensor, attr_output_fn: OutputFunction) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = input.view_as(input) if self.create_graph else input.detach()
        return self.grad(leaf, attr_output_fn)


class _Sampling(Gradient):
    """Base of attributors that average the gradient over `n_iter` variants of the input."""

    n_iter: int
    batch_size: int
    progress: bool

    def __post_init__(self, attr_output: AttrOutput) -> None:
        super().__post_init__(attr_output)
        _check_positive(n_iter=self.n_iter, batch_size=self.batch_size)

    def _mean_gradient(
        self, input: torch.Tensor, variant: Callable[[int], torch.Tensor], attr_output_fn: OutputFunction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of the last variant, and the mean gradient over all."""
        total = torch.zeros_like(input)
        output = total
        samples = len(input)
        for start in progress_bar(range(0, self.n_iter, self.batch_size), self.progress, type(self).__name__):
            indices = range(start, min(start + self.batch_size, self.n_iter))
            batch = torch.cat([variant(index) for index in indices])
            outputs, gradients = self.grad(batch, _for_each(attr_output_fn, len(indices)))
            total = total + gradients.unflatten(0, (len(indices), samples)).sum(0)
            output = outputs[-samples:]
        return output, total / self.n_iter


@dataclass(eq=False, repr=False)
class SmoothGrad(_Sampling):
    """The mean gradient over noisy inputs.

    The noise is normal. The last input has no noise, and its output is returned.

    `noise_level`: the standard deviation of the noise, as a share of the value range of each sample. `n_iter`: how many inputs.
    `batch_size`: how many of them run together. `progress`: whether to show a bar (needs tqdm).
    Other arguments: as for `Gradient`.

    References
    ----------
    .. [1] Smilkov et al. 2017, https://arxiv.org/abs/1706.03825

    Examples
    --------
    >>> attributor = lrpfx.attribution.SmoothGrad(model, noise_level=0.1, n_iter=5)
    >>> output, gradient = attributor(x, torch.eye(2))
    """

    noise_level: float = 0.1
    n_iter: int = 20
    batch_size: int = 1
    progress: bool = False

    def forward(self, input: torch.Tensor, attr_output_fn: OutputFunction) -> tuple[torch.Tensor, torch.Tensor]:
        dims = tuple(range(1, input.ndim))
        input = input if self.create_graph else input.detach()
        deviation = self.noise_level * (input.amax(dims, keepdim=True) - input.amin(dims, keepdim=True)).detach()

        def noisy(index: int) -> torch.Tensor:
            return input if index == self.n_iter - 1 else input + torch.randn_like(input) * deviation

        return self._mean_gradient(input, noisy, attr_output_fn)


@dataclass(eq=False, repr=False)
class IntegratedGradients(_Sampling):
    """The gradient along the line from a baseline to the input, times their difference.

    `baseline_fn`: the function from an input to its baseline, by default zeros. `n_iter`: how many points of the line.
    `batch_size`: how many of them run together. `progress`: whether to show a bar (needs tqdm).
    Other arguments: as for `Gradient`.

    References
    ----------
    .. [1] Sundararajan et al. 2017, https://arxiv.org/abs/1703.01365
    """

    baseline_fn: Callable[[torch.Tensor], torch.Tensor] | None = None
    n_iter: int = 20
    batch_size: int = 1
    progress: bool = False

    def __post_init__(self, attr_output: AttrOutput) -> None:
        super().__post_init__(attr_output)
        self.baseline_fn = self.baseline_fn or torch.zeros_like

    def forward(self, input: torch.Tensor, attr_output_fn: OutputFunction) -> tuple[torch.Tensor, torch.Tensor]:
        input = input if self.create_graph else input.detach()
        assert self.baseline_fn is not None
        baseline = self.baseline_fn(input)

        def between(index: int) -> torch.Tensor:
            return baseline + (index + 1) / self.n_iter * (input - baseline)

        output, gradient = self._mean_gradient(input, between, attr_output_fn)
        return output, gradient * (input - baseline)


@dataclass(eq=False, repr=False)
class Occlusion(Attributor):
    """Weighted outputs for the input with all but one window occluded; each is added to the positions in its window.

    A window that extends past the end of a dimension wraps around to its start.

    `occlusion_fn`: the function of an input and a boolean mask that occludes everything outside the mask, by default with
    zeros. `window`: an int for all dimensions but the batch, or a tuple for the last dimensions, the batch included at most;
    other dimensions are covered entirely. `stride`: the same, but steps for other dimensions equal the window. `batch_size`:
    how many windows run together. `progress`: whether to show a bar (needs tqdm). Other arguments: as for `Attributor`. Errors:
    `InputError`: a size is not positive; `InputTypeError`: a size is not an int or a tuple.
    """

    occlusion_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    window: int | tuple[int, ...] = 8
    stride: int | tuple[int, ...] = 8
    batch_size: int = 1
    progress: bool = False

    def __post_init__(self, attr_output: AttrOutput) -> None:
        super().__post_init__(attr_output)
        for name, value, least in (("window", self.window, 0), ("stride", self.stride, 1)):
            sizes = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(size, int) for size in sizes) or isinstance(value, bool):
                raise InputTypeError(f"{name} is an int or a tuple of ints, not {value!r}")
            if any(size < least for size in sizes):
                raise InputError(f"a {name} is at least {least} in each dimension, not {value!r}")
        _check_positive(batch_size=self.batch_size)
        self.occlusion_fn = self.occlusion_fn or occlude_independent

    def _masks(self, input: torch.Tensor) -> tuple[int, Iterator[torch.Tensor]]:
        """The number of windows, and a boolean mask of the input's shape for each."""
        shape = tuple(input.shape)
        window = _with_leading(_per_dimension("window", self.window, shape), shape)
        stride = _with_leading(_per_dimension("stride", self.stride, shape), window)
        steps = [range(0, size, max(step, 1)) for size, step in zip(shape, stride, strict=True)]
        first = torch.zeros(shape, dtype=torch.bool, device=input.device)
        first[tuple(slice(size) for size in window)] = True
        dims = tuple(range(input.ndim))
        return math.prod(map(len, steps)), (first.roll(offset, dims) for offset in product(*steps))

    @torch.no_grad()
    def forward(self, input: torch.Tensor, attr_output_fn: OutputFunction) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.occlusion_fn is not None
        result = torch.zeros_like(input)
        count, masks = self._masks(input)
        samples = len(input)
        for _ in progress_bar(range(0, count, self.batch_size), self.progress, type(self).__name__):
            chosen = list(islice(masks, self.batch_size))
            occluded = torch.cat([self.occlusion_fn(input, mask) for mask in chosen])
            scores = _for_each(attr_output_fn, len(chosen))(self.model(occluded)).reshape(len(occluded), -1).sum(1)
            for mask, score in zip(chosen, scores.split(samples), strict=True):
                result += mask * score.reshape(-1, *[1] * (input.ndim - 1))
        return self.model(input), result


def _per_dimension(name: str, value: int | tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """A window or stride as a tuple for the last dimensions of an input."""
    if isinstance(value, int):
        return tuple(min(value, size) for size in shape[1:])
    if len(value) > len(shape):
        raise InputError(f"the {name} {value} has more dimensions than the input, whose shape is {shape}")
    return value


def _with_leading(value: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """`value` for the last dimensions, and `others` for the leading ones."""
    return (*others[: len(others) - len(value)], *value)


def _for_each(attr_output_fn: OutputFunction, count: int) -> OutputFunction:
    """The function applied to each of `count` concatenated batches."""
    if count == 1:
        return attr_output_fn
    return lambda output: torch.cat([attr_output_fn(part) for part in output.chunk(count)])


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if not is_whole(value):
            raise InputTypeError(f"{name} is an int, not {value!r}")
        if value < 1:
            raise InputError(f"{name} is at least 1, not {value}")

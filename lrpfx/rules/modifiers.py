"""Modifiers: changes to inputs and parameters before a rule runs a layer again.

The modifiers in lrpfx are small classes that passes can recognize and compare. A user's function may replace any of them; it is
opaque and always executed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lrpfx.errors import InputError, InputTypeError, RuleError
from lrpfx.runtime.overwriting import on_copies
from lrpfx.support.tensors import tensor_from

# --- inputs ----------------------------------------------------------------------------------------------------------------


class InputModifier:
    """Base class of the input modifiers that passes recognize. Objects with equal settings are equal."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        raise TypeError(f"{type(self).__name__} does not define how it modifies an input")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *sorted(self.__dict__.items())))

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.__dict__.items() if value is not None)
        return f"{type(self).__name__}({settings})"


class Unchanged(InputModifier):
    """The unmodified input."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return input


class Clamp(InputModifier):
    """The input clamped to [min, max]."""

    def __init__(self, min: float | None = None, max: float | None = None) -> None:
        self.min = min
        self.max = max

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return input.clamp(min=self.min, max=self.max)


class Ones(InputModifier):
    """Ones of the input's shape."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(input)


class Bound(InputModifier):
    """A bound of the input domain, expanded to the input's shape (see `expand`)."""

    def __init__(self, bound: float | torch.Tensor) -> None:
        self.bound = bound

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(self.bound, torch.Tensor):
            return expanded_bound(self.bound.to(dtype=input.dtype, device=input.device), input)
        return torch.full_like(input, self.bound)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bound) and self.bound is other.bound

    def __hash__(self) -> int:
        return hash((Bound, id(self.bound)))

    def __repr__(self) -> str:
        return f"Bound({describe_value(self.bound)})"


def describe_value(value: Any) -> str:
    """A short text for a rule's argument. Tensors with more than one element appear as their shape."""
    if isinstance(value, torch.Tensor):
        return f"{value.item():g}" if value.numel() == 1 else f"Tensor{tuple(value.shape)}"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def expanded_bound(bound: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """A bound of the input domain for each entry of a layer's input (see `expand`)."""
    try:
        return expand(bound, input.shape, cut_batch_dim=True)
    except ShapeError as error:
        raise ShapeError(
            f"a bound of shape {tuple(bound.shape)} does not fit the input of its layer, of shape {tuple(input.shape)}. Give "
            "bounds in the shape that this layer sees, such as behind a flatten; a number fits every layer"
        ) from error


def expand(tensor: Any, shape: Sequence[int], cut_batch_dim: bool = False) -> torch.Tensor:
    """Expand a number or `tensor` to a `shape`. A tensor with fewer dimensions is aligned with the leading ones.

    With `cut_batch_dim`, a tensor that is larger than the shape in dimension 0 is cut to it. `ShapeError`, which is an
    `InputError`, if the shapes do not fit.
    """
    value: torch.Tensor = tensor if isinstance(tensor, torch.Tensor) else torch.tensor(tensor)
    shape = tuple(shape)
    if 0 < value.ndim < len(shape) and all(have in (1, want) for have, want in zip(value.shape, shape, strict=False)):
        value = value[(...,) + (None,) * (len(shape) - value.ndim)]
    fits = [have in (1, want) for have, want in zip(value.shape, shape, strict=False)]
    if cut_batch_dim and 0 < value.ndim == len(shape) and all(fits[1:]) and value.shape[0] > shape[0]:
        value = value[: shape[0]]
        fits[0] = True
    if value.ndim in (0, len(shape)) and all(fits):
        return torch.broadcast_to(value, shape)
    raise ShapeError(f"a tensor of shape {tuple(value.shape)} does not expand to the shape {shape}")


class ShapeError(InputError, RuntimeError):
    """A tensor does not expand to the required shape."""


# --- parameters ------------------------------------------------------------------------------------------------------------

ParameterFunction = Callable[[torch.Tensor, str], torch.Tensor]


class ParamMod:
    """A change of a layer's parameters inside a rule.

    Parameters
    ----------
    modifier
        The function from a parameter and its name to the changed parameter. It must not write into its argument.
    param_keys
        Names of the parameters to change (default: all of the layer's own).
    zero_params
        Names of those to replace with zeros instead.
    require_params
        Whether a missing name in `param_keys` is an error.
    """

    #: Whether the modifier may be traced into operations of the graph. A user's function is opaque.
    arithmetic = False
    #: Suffix of the names of modified parameters, as in weight_modified.
    label = "modified"

    def __init__(
        self,
        modifier: ParameterFunction,
        param_keys: Sequence[str] | None = None,
        zero_params: str | Sequence[str] | None = None,
        require_params: bool = True,
    ) -> None:
        self.modifier = modifier
        self.param_keys = param_keys
        self.zero_params = None if zero_params is None else _names(zero_params)
        self.require_params = require_params

    @staticmethod
    def ensure(modifier: "ParamMod | ParameterFunction") -> "ParamMod":
        """A `ParamMod` around a function `modifier`; a `ParamMod` is returned as it is. `InputTypeError` for anything else."""
        if isinstance(modifier, ParamMod):
            return modifier
        if callable(modifier):
            return ParamMod(modifier)
        raise InputTypeError(f"a parameter modifier is a ParamMod or a callable, not {modifier!r}")

    def zeroes(self, name: str) -> bool:
        """Whether the parameter `name` is replaced with zeros."""
        return bool(self.zero_params) and name in (self.zero_params or ())

    def selects(self, name: str) -> bool:
        """Whether the parameter `name` is changed. By default, the layer's own parameters are, but not those of submodules."""
        return "." not in name if self.param_keys is None else name in self.param_keys

    def check(self, names: Sequence[str]) -> None:
        """Raise `RuleError` if a required parameter is not among the `names` of a layer's parameters."""
        missing = [name for name in self.param_keys or () if name not in names]
        if missing and self.require_params:
            raise RuleError(
                f"the rule modifies the parameter {missing[0]!r}, but the layer has {list(names) or 'none'}", topic="arguments"
            )

    def apply(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """The changed `parameter`: zeros if its `name` is in `zero_params`, the parameter itself if it is not selected."""
        if not self.selects(name):
            return parameter
        if self.zeroes(name):
            return torch.zeros_like(parameter)
        changed = self.modifier(parameter, name) if self.arithmetic else on_copies(self.modifier, parameter, name)
        if not isinstance(parameter, torch.Tensor):
            return changed
        return tensor_from(self.modifier, changed, parameter, computed_with=True)

    def state_dicts(self, module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The original and the changed parameters of a `module`. `RuleError` if a required parameter is missing."""
        own = dict(module.named_parameters(recurse=False))
        keys = list(own) if self.param_keys is None else list(self.param_keys)
        self.check([key for key in keys if key in own or hasattr(module, key)])
        original = {key: value.detach() for key in keys if (value := getattr(module, key, None)) is not None}
        return original, {key: self.apply(value, key).detach() for key, value in original.items()}

    @contextmanager
    def __call__(self, module: nn.Module) -> Iterator[nn.Module]:
        """A context in which a `module` computes with the changed parameters. Its Parameter objects stay the same."""
        original, modified = self.state_dicts(module)
        parameters = {key: getattr(module, key) for key in original}
        try:
            for key, parameter in parameters.items():
                parameter.data = modified[key]
            yield module
        finally:
            for key, parameter in parameters.items():
                parameter.data = original[key]

    def keeps(self, name: str) -> bool:
        """Whether the parameter `name` is known to stay unchanged."""
        return not self.selects(name)

    @property
    def key(self) -> tuple[Any, ...]:
        """A key for comparison: modifiers with equal keys change parameters in the same way."""
        return (id(self),)


class _NamedMod(ParamMod):
    """Base class of the parameter modifiers that passes recognize."""

    arithmetic = True

    def __init__(
        self,
        param_keys: Sequence[str] | None = None,
        zero_params: str | Sequence[str] | None = None,
        require_params: bool = True,
    ) -> None:
        super().__init__(self.modify, param_keys, zero_params, require_params)

    def modify(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        raise TypeError(f"{type(self).__name__} does not define how it modifies a parameter")

    @property
    def key(self) -> tuple[Any, ...]:
        settings = {key: value for key, value in self.__dict__.items() if key not in ("modifier", "require_params")}
        return (type(self), *((name, repr(value)) for name, value in sorted(settings.items())))


class NoMod(_NamedMod):
    """Unchanged parameters, except those in `zero_params`.

    Other arguments: as for `lrpfx.core.ParamMod`.
    """

    label = "unchanged"

    def modify(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """The `parameter` itself, whatever its `name`."""
        return parameter

    def keeps(self, name: str) -> bool:
        return not self.selects(name) or not self.zeroes(name)


class ClampMod(_NamedMod):
    """Parameters clamped to [`min`, `max`], without a bound that is None. Other `settings`: as for `NoMod`."""

    def __init__(self, min: float | None = None, max: float | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.min = min
        self.max = max
        self.label = _label_of_range(min, max)

    def modify(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """The clamped `parameter`, whatever its `name`."""
        return torch.clamp(parameter, min=self.min, max=self.max)


class GammaMod(_NamedMod):
    """Parameters plus `gamma` times their values clamped to [`min`, `max`]. Other `settings`: as for `NoMod`."""

    def __init__(self, gamma: float = 0.25, min: float | None = None, max: float | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.gamma = gamma
        self.min = min
        self.max = max
        self.label = f"gamma_{_label_of_range(min, max)}"

    def modify(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """The `parameter` plus its share, whatever its `name`."""
        return parameter + self.gamma * torch.clamp(parameter, min=self.min, max=self.max)


class SquareMod(_NamedMod):
    """Squared parameters."""

    label = "squared"

    def modify(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        return torch.square(parameter)


class OnesMod(_NamedMod):
    """Ones in place of the parameters."""

    label = "ones"

    def modify(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        return torch.ones_like(parameter)


def _label_of_range(min: float | None, max: float | None) -> str:
    return {(0.0, None): "positive", (None, 0.0): "negative"}.get((min, max), "clamped")


def _names(names: str | Sequence[str]) -> str | Sequence[str]:
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise InputTypeError(f"names of parameters must be strings, not {names!r}")
    return names


def zero_bias(zero_params: str | Sequence[str] | None = None) -> list[str]:
    """The names of the parameters that count as zeros: `zero_params`, with "bias" among them."""
    if zero_params is None:
        return ["bias"]
    names = [zero_params] if isinstance(zero_params, str) else list(_names(zero_params))
    return names if "bias" in names else [*names, "bias"]

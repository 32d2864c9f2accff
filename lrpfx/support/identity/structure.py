"""A model as a value: equal for copies of a model with other parameters, different for models that may run other code."""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from lrpfx.support.identity.descriptions import described, is_released
from lrpfx.support.tensors import not_dense
from lrpfx.support.torch_internals import has_hooks_for_all_modules

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout))

#: How far from a module an object is compared by its content: a chain of objects may be longer than Python's stack.
DEEPEST = 50
#: Hooks that run only where a state is saved or loaded.
_OF_STATES = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
#: Where each module keeps hooks, tensors and modules. Most of these are empty in most modules: they say nothing, and are many.
_OF_MODULES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, Collection))


class Structure:
    """What a model consists of at this moment.

    `layout`: classes with their code, attributes, hooks, and the shapes, dtypes, devices and sharing of tensors, nested in
    tuples. Objects whose state is not known, and tensors that are not dense, are equal to themselves alone. `parameters`:
    parameters and the statistics of batch norms by name, which a graph only computes with. `constants`: the other tensors,
    which the compiler may have read: buffers such as masks, and plain attributes. The tensors are the model's own.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        for path, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, nn.modules.batchnorm._NormBase):
                parameters.update(module.named_buffers(prefix=path, recurse=False, remove_duplicate=False))
        self.parameters = {name: tensor for name, tensor in parameters.items() if not_dense(tensor) is None}
        walk = _Walk()
        self.layout = walk.describe(model), _code_of(walk), has_hooks_for_all_modules()
        replaceable = {id(tensor) for tensor in self.parameters.values()}
        self.constants = [tensor for tensor in walk.tensors if id(tensor) not in replaceable]


class Snapshot:
    """A model at one moment: what it would run, and copies of its values.

    `held`: tensors of the names of the model's parameters that keep their values; those that are equal need no copy.
    """

    def __init__(self, model: nn.Module, held: Mapping[str, torch.Tensor]) -> None:
        structure = Structure(model)
        self._layout = structure.layout
        self._constants = [tensor.detach().clone() for tensor in structure.constants]
        self._parameters = {
            name: held[name] if are_equal(held.get(name), tensor) else tensor.detach().clone()
            for name, tensor in structure.parameters.items()
        }

    def is_of(self, model: nn.Module) -> bool:
        """Whether the model has this structure and these values."""
        structure = Structure(model)
        return (
            self._layout == structure.layout
            and all(map(are_equal, self._constants, structure.constants))
            and all(are_equal(self._parameters[name], tensor) for name, tensor in structure.parameters.items())
        )


def are_equal(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether two tensors have equal values, shapes, dtypes and devices. Values that are no numbers are equal to each other."""
    if one is None or one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    one, other = one.detach(), other.detach()
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


class _Walk:
    """Describes an object and all that it refers to."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.classes: dict[type, None] = {}  # of modules and objects, without those of installed packages
        self._seen: dict[int, tuple[int, Any]] = {}  # id -> its number, and the object, so that no other takes the id

    def describe(self, value: Any, depth: int = 0) -> Any:
        """A value that can be compared, in place of an object. `depth`: how far the object is from a module."""
        if type(value) in _PLAIN:
            return type(value), value
        if type(value) is tuple:
            return tuple, *self._all(value, depth)
        if id(value) in self._seen:
            return self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value
        return type(value), self._content(value, depth)

    def _all(self, values: Iterable[Any], depth: int) -> tuple[Any, ...]:
        return tuple([self.describe(value, depth + 1) for value in values])

    def _content(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            self._note(type(value))
            attributes = sorted(vars(value).items())  # a copy may have set them in another order
            return tuple(
                [
                    (name, self.describe(one))
                    for name, one in attributes
                    if name not in _OF_STATES and (name not in _OF_MODULES or one)
                ]
            )
        if depth > DEEPEST:
            return _Same(value)
        if type(value) in (dict, OrderedDict):
            return self._all(value.items(), depth)
        if type(value) is list:
            return self._all(value, depth)
        if type(value) in (set, frozenset) and all(type(item) in _PLAIN for item in value):
            return frozenset((type(item), item) for item in value)
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return value.dtype.str, value.shape, value.tobytes()
        if type(value) is weakref.ref:
            return self.describe(value(), depth + 1)
        if type(value) is MethodType:
            return _Same(value.__func__), self.describe(value.__self__, depth + 1)
        if type(value) is FunctionType:
            return _Same(value), repr(described(value)), self._all(vars(value).items(), depth)  # a hook may read all of these
        if type(value) is partial:
            return self._all((value.func, value.args, value.keywords), depth)
        if isinstance(value, type):
            self._note(value)
        state = _state_of(value)
        if state is None:
            return _Same(value)
        self._note(type(value))
        return self._all(state, depth)

    def _note(self, kind: type) -> None:
        self.classes.update((base, None) for base in kind.__mro__ if not is_released(base))

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if not_dense(tensor) is not None:  # values that cannot be compared
            return _Same(tensor), None if tensor.is_inference() else tensor._version
        self.tensors.append(tensor)
        return tensor.dtype, tuple(tensor.shape), tensor.device


def _code_of(walk: _Walk) -> Any:
    """What the classes of modules and objects define: attributes may be changed there, and `forward` may read global values."""
    found: dict[type, Any] = {}
    while len(found) < len(walk.classes):  # what a class holds may have further classes
        for kind in [one for one in walk.classes if one not in found]:
            attributes = ((name, value) for name, value in vars(kind).items() if not name.startswith("__"))
            own = {name: walk.describe(value) if type(value) in _HELD else _Same(value) for name, value in attributes}
            found[kind] = own, repr(described(vars(kind).get("forward")))
    return found


#: Values of a class that are compared by what they hold. Others, such as its functions, are equal to themselves alone.
_HELD = (*_PLAIN, type, dict, OrderedDict, list, tuple, set, frozenset, np.ndarray, torch.Tensor)


class _Same:
    """An object that is equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _state_of(value: Any) -> tuple[Any, ...] | None:
    """All that an object holds, if Python says what that is, by default or by a class of its own library; None otherwise."""
    kind: Any = type(value)
    by_default = (kind.__reduce_ex__, kind.__reduce__, getattr(kind, "__getstate__", None)) == _OF_OBJECTS
    if isinstance(value, type) or not (by_default or kind.__module__ in sys.stdlib_module_names):
        return None
    try:
        reduced = value.__reduce_ex__(2)
        _, args, state, items, pairs = tuple(reduced) + (None,) * (5 - len(reduced))
    except Exception:  # it holds what Python does not see
        return None
    contents = [None if one is None else list(one) for one in (items, pairs)]
    return (state, *contents) if by_default else (args, state, *contents)


_OF_OBJECTS = (object.__reduce_ex__, object.__reduce__, getattr(object, "__getstate__", None))  # of Python 3.11

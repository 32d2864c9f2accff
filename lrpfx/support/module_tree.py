"""The tree of modules that replaces a model: it has the model's names, parameters and buffers, and rule modules as leaves."""

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from lrpfx.support.tensors import address_of, held_as


class Scope(nn.Module):
    """Replaces one module of the source model. It holds parameters, buffers and children, and computes nothing."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.lrpfx_title = title

    def _get_name(self) -> str:
        return self.lrpfx_title


def scope_tree(module: nn.Module, made: dict[nn.Module, Scope] | None = None) -> Scope:
    """A tree of scopes with the names, parameters and buffers of `module`; shared modules and tensors stay shared.

    `made` maps modules of the same model to the scopes that exist already.
    """
    made = {} if made is None else made
    if module in made:
        return made[module]
    scope = made[module] = Scope(module._get_name())
    scope.training = module.training
    scope._parameters.update(module._parameters)
    scope._buffers.update(module._buffers)
    scope._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
    for name, child in module._modules.items():
        scope._modules[name] = None if child is None else scope_tree(child, made)
    # Tensors that the model keeps as plain attributes, and constants that tracing found.
    for name, value in module.__dict__.items():
        if isinstance(value, torch.Tensor) and not hasattr(scope, name):
            scope.register_buffer(name, value, persistent=False)
    return scope


#: The attributes in which a torch.nn module stores its contents.
TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def share_tables(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the contents of `source`, now and in the future: both use the same tables."""
    for table in TABLES:
        setattr(target, table, getattr(source, table))


def alias_tensors(root: nn.Module, derived: Collection[str]) -> None:
    """Give a tree that the compiler made parameters and buffers of its own, which share memory with the present ones.

    Modules of other classes with tensors in it are copied. A change of dtype or device then is one of this tree alone. Derived
    buffers are replaced as a whole whenever they change, so they may stay those of other trees.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in map(root.get_buffer, derived)}
    _alias_in(root, memo)


def _alias_in(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    if not isinstance(module, Scope):
        tensors = [*module.parameters(), *module.buffers()]
        for tensor in tensors:
            _alias_of(tensor, memo)
        return copy.deepcopy(module, memo) if tensors else module
    if id(module) not in memo:
        memo[id(module)] = module
        for table in (module._parameters, module._buffers):
            table.update({name: _alias_of(tensor, memo) for name, tensor in table.items() if tensor is not None})
        children = module._modules.items()
        module._modules.update({name: _alias_in(child, memo) for name, child in children if child is not None})
    return module


def _alias_of(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        memo[id(tensor)] = held_as(tensor, tensor)
    return memo[id(tensor)]


def tree_with_same_tensors(module: nn.Module, made: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """A light copy of a tree of modules with tables of its own: what is put into it is not in the tree itself."""
    made = {} if made is None else made
    if module not in made:
        copied = made[module] = copy.copy(module)
        for table in TABLES:
            setattr(copied, table, copy.copy(getattr(module, table)))
        for name, child in module._modules.items():
            copied._modules[name] = None if child is None else tree_with_same_tensors(child, made)
    return made[module]


def own_tensors(root: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the parameters and buffers in a tree that `change` copies by new ones, which nothing is shared with.

    Neither the memory nor the counter of changes in place: a parameter keeps the latter through an assignment to `.data`.
    """
    made: dict[int, Any] = {}

    def changed(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            with torch.no_grad():
                value = change(tensor)
            address = address_of(value)
            is_new = address is None or address != address_of(tensor)
            new = made[id(tensor)] = held_as(tensor, value) if is_new else tensor
            made[id(new)] = new
        return made[id(tensor)]

    for module in root.modules():
        for table in (module._parameters, module._buffers):
            table.update({name: changed(tensor) for name, tensor in table.items() if tensor is not None})


def set_derived_buffer(root: nn.Module, name: str, value: torch.Tensor, persistent: bool = False) -> None:
    """Register `value` as a buffer under the qualified name `name`. By default, state_dict leaves it out."""
    *path, leaf = name.split(".")
    scope_at(root, path).register_buffer(leaf, value, persistent=persistent)


def scope_at(root: nn.Module, path: Sequence[str]) -> nn.Module:
    """The module at `path` below `root`. Missing scopes are created."""
    for part in path:
        child = root._modules.get(part)
        if child is None:
            child = Scope("Scope")
            root.add_module(part, child)
        root = child
    return root


def free_name(tree: nn.Module, name: str) -> str:
    """`name`, followed by as many underscores as needed for a name that is free in the tree."""
    path, _, leaf = name.rpartition(".")
    try:
        parent = tree.get_submodule(path)
    except AttributeError:
        return name
    while hasattr(parent, leaf):
        leaf += "_"
    return f"{path}.{leaf}" if path else leaf


class ModuleTree:
    """The tree of scopes that replaces the model, into which new modules can be placed."""

    def __init__(self, model: nn.Module) -> None:
        self.root = scope_tree(model)
        self.places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for parent in self.root.modules():
            for name, child in parent._modules.items():
                if child is not None:
                    self.places.setdefault(child, []).append((parent, name))

    def place(self, name: str, module: nn.Module) -> str:
        """Put `module` at `name`, or at a free name near it, and return that name. Missing scopes are created.

        A scope at `name` was the layer itself. It gives its tensors and children to `module`, which replaces it everywhere.
        """
        *path, leaf = name.split(".")
        parent = scope_at(self.root, path)
        standing = parent._modules.get(leaf)
        if type(standing) is Scope:
            for table in TABLES:
                getattr(module, table).update(getattr(standing, table))
            for holder, key in self.places.get(standing) or [(parent, leaf)]:
                holder._modules[key] = module
            for child in module.children():  # children of the scope are now children of the layer
                held = self.places.get(child, [])
                self.places[child] = [(module if holder is standing else holder, key) for holder, key in held]
            return name
        if hasattr(parent, leaf):  # a method of nn.Module, or a tensor
            leaf = free_name(parent, leaf)
            name = ".".join([*path, leaf])
        parent.add_module(leaf, module)
        return name

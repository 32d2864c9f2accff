"""The tree of modules that takes the place of a model: its names, parameters and buffers, and rule modules on its leaves."""

from collections.abc import Sequence

import torch
from torch import nn


class Scope(nn.Module):
    """A place in the tree of the source model that holds its parameters, buffers and children, and computes nothing."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def _get_name(self) -> str:
        return self.title


def scope_tree(module: nn.Module, made: dict[nn.Module, Scope] | None = None) -> Scope:
    """A tree of scopes with the names, parameters and buffers of `module`; shared modules and tensors stay shared.

    `made` are the scopes that exist already for other parts of the same model.
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


#: Where torch.nn keeps what a module holds.
TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def share_tables(source: nn.Module, target: nn.Module) -> None:
    """Let `target` hold what `source` holds, now and later: by the same tables."""
    for table in TABLES:
        setattr(target, table, getattr(source, table))


def set_derived_buffer(root: nn.Module, name: str, value: torch.Tensor, persistent: bool = False) -> None:
    """Put `value` at the qualified name `name` as a buffer, by default one that no state_dict holds."""
    *path, leaf = name.split(".")
    scope_at(root, path).register_buffer(leaf, value, persistent=persistent)


def scope_at(root: nn.Module, path: Sequence[str]) -> nn.Module:
    """The module at `path` below `root`; scopes are made where there is none."""
    for part in path:
        child = root._modules.get(part)
        if child is None:
            child = Scope("Scope")
            root.add_module(part, child)
        root = child
    return root


def free_name(tree: nn.Module, name: str) -> str:
    """`name`, or `name_` with as many underscores as make it free in the tree."""
    path, _, leaf = name.rpartition(".")
    try:
        parent = tree.get_submodule(path)
    except AttributeError:
        return name
    while hasattr(parent, leaf):
        leaf += "_"
    return f"{path}.{leaf}" if path else leaf


class ModuleTree:
    """The tree of scopes that takes the place of the model, with room for new modules in it."""

    def __init__(self, model: nn.Module) -> None:
        self.root = scope_tree(model)
        self.places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for parent in self.root.modules():
            for name, child in parent._modules.items():
                if child is not None:
                    self.places.setdefault(child, []).append((parent, name))

    def place(self, name: str, module: nn.Module) -> str:
        """Put `module` at `name`, creating scopes on the way; the name under which it now stands.

        A scope that stands there hands its tensors and children over, in all its places: it was the layer itself.
        """
        *path, leaf = name.split(".")
        parent = scope_at(self.root, path)
        standing = parent._modules.get(leaf)
        if type(standing) is Scope:
            for table in TABLES:
                getattr(module, table).update(getattr(standing, table))
            for holder, key in self.places.get(standing) or [(parent, leaf)]:
                holder._modules[key] = module
            for child in module.children():  # what stood in the scope now stands in the layer
                held = self.places.get(child, [])
                self.places[child] = [(module if holder is standing else holder, key) for holder, key in held]
            return name
        if hasattr(parent, leaf):  # a method of nn.Module, or a tensor
            leaf = free_name(parent, leaf)
            name = ".".join([*path, leaf])
        parent.add_module(leaf, module)
        return name

"""Modules made of what exists: linear layers of weights, private copies of models, and what torch.compile wraps."""

import copy
import functools
import operator
from collections.abc import Iterable, Mapping
from types import CellType, FunctionType
from typing import Any, cast

import torch
from torch import nn

from lrpfx.errors import CaptureError, first_lines
from lrpfx.support.tensors import address_of, held_as
from lrpfx.support.torch_internals import FakeTensor, OpOverload, TorchDispatchMode, pytree
from lrpfx.support.user_files import user_source

COMPILED = "_orig_mod"  # the child that is the module itself, in the wrapper of torch.compile
_UNFLATTENED = "UnflattenedModule"  # what torch.export.unflatten returns

#: Layouts of sparse tensors that cannot be copied.
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that torch.compile wrapped, or the module itself."""
    inner = getattr(model, COMPILED, model)
    return inner if isinstance(inner, nn.Module) else model


def linear_layer(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A linear layer with the given weight (outputs, inputs) and bias, which are not trained."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def private_copy(
    model: nn.Module,
    share_tensors: bool = False,
    shared: Iterable[Any] = (),
    aliases: Mapping[int, torch.Tensor] | None = None,
) -> nn.Module:
    """A deep copy of `model`, even if it holds computed tensors (old-style weight norm, pruning).

    With `share_tensors`, the copy uses the model's own parameters and buffers: for a copy that is never run. It also uses the
    objects in `shared`, and in place of the tensors whose ids are in `aliases` those that are there.
    """
    memo: dict[int, Any] = {id(one): one for one in shared} | dict(aliases or {})
    if share_tensors:
        memo.update({id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    for module in model.modules():
        for value in module.__dict__.values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    try:
        root = copy.deepcopy(model, memo)
    except Exception as error:
        if type(model).__name__ == _UNFLATTENED:
            raise CaptureError(
                "the model is an UnflattenedModule of torch.export, whose graphs hold tensors without values and cannot be "
                "copied. Transform the ExportedProgram itself, or its module(): the names are the same."
            ) from error
        compressed = [name for name, one in model.state_dict().items() if getattr(one, "layout", None) in _COMPRESSED]
        remedy = f". Keep {compressed[0]!r} in coordinates: .to_sparse_coo()" if compressed else ""
        raise CaptureError(f"the model {type(model).__name__} cannot be deep-copied: {first_lines(error)}{remedy}") from error
    for module in root.modules():
        for table in (vars(module), *vars(module).values()):  # the second of hooks
            if isinstance(table, dict):
                functions = {key: value for key, value in table.items() if isinstance(value, FunctionType)}
                table.update({key: _rebound(value, memo) for key, value in functions.items()})
    return root


def shared_copy(model: nn.Module) -> tuple[nn.Module, "Unwritten"]:
    """A private copy whose parameters share memory with the model's, and the context in which it can be run.

    Parameters of a class of their own, and those that are not dense, are copied. So are buffers, into which models write:
    `share_buffers` shares them when all is done.
    """
    shared = {name: one for name, one in model.named_parameters() if _can_be_shared(one)}
    aliases = {id(one): held_as(one, one) for one in shared.values()}
    names = {address: name for name, one in shared.items() if (address := address_of(one)) is not None}
    return private_copy(model, aliases=aliases), Unwritten(names)


def share_buffers(root: nn.Module, model: nn.Module) -> None:
    """Let the buffers of a graph's modules, and tensors in plain attributes, share memory with the model's of these names."""
    aliases: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        try:
            of_graph = root.get_submodule(path)
        except AttributeError:  # a module that the graph does not have
            continue
        for source, table in ((module._buffers, of_graph._buffers), (vars(module), vars(of_graph))):
            for name, tensor in source.items():
                present = table.get(name)
                if not isinstance(tensor, torch.Tensor) or not _can_be_shared(tensor) or not isinstance(present, torch.Tensor):
                    continue
                if present.shape == tensor.shape and present.dtype == tensor.dtype:
                    table[name] = aliases.setdefault(id(tensor), held_as(tensor, tensor))


def _can_be_shared(tensor: torch.Tensor) -> bool:
    return type(tensor) in (nn.Parameter, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_inference()


class Unwritten(TorchDispatchMode):
    """Refuses operations that write into memory that the user's model has."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """`names`: of the parameters, by address."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class has no types
        self.names = names

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            given = dict(zip((one.name for one in arguments), args, strict=False)) | keywords
            written = [given.get(one.name) for one in arguments if one.alias_info is not None and one.alias_info.is_write]
            for value in pytree.tree_leaves(written):
                real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
                name = self.names.get(address_of(value) or 0) if real else None
                if name is not None:
                    raise CaptureError(
                        f"forward writes into {name!r} ({user_source() or 'source unknown'}), which would "
                        "change the model that shares it: transform it without share=True",
                        topic="overwritten-tensors",
                    )
        return func(*args, **keywords)


def _rebound(function: FunctionType, copies: dict[int, Any]) -> FunctionType:
    """A function that a model holds, such as a hook, with the copies of what it closes over or has as a default.

    A deep copy does not copy functions: they would go on to read and change the model that was copied.
    """
    if id(function) in copies:
        return cast(FunctionType, copies[id(function)])
    copies[id(function)] = function  # it may close over itself

    def copied(value: Any) -> Any:
        return _rebound(value, copies) if isinstance(value, FunctionType) else copies.get(id(value), value)

    def copied_cell(cell: CellType) -> CellType:
        try:
            changed = copied(cell.cell_contents)
        except ValueError:  # nothing is assigned yet
            return cell
        return cell if changed is cell.cell_contents else CellType(changed)

    closure, defaults = function.__closure__ or (), function.__defaults__ or ()
    cells, values = tuple(map(copied_cell, closure)), tuple(map(copied, defaults))
    if all(map(operator.is_, (*cells, *values), (*closure, *defaults))):
        return function
    made = FunctionType(function.__code__, function.__globals__, function.__name__, values or None, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    copies[id(function)] = functools.update_wrapper(made, function)
    return made

"""The tensors of a model at one moment, without copies of them."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from lrpfx.support.tensors import mark_of, memory_of, not_dense


class Weights:
    """Where the tensors of a model are, and marks of their values, by which others are noticed."""

    def __init__(self, model: nn.Module | ExportedProgram, in_place: bool) -> None:
        """`in_place`: whether a tensor of equal values in other memory is another one."""
        tensors = _tensors_of(model)
        self._in_place = in_place
        self._marks = {name: (_place_of(tensor), *mark_of(tensor)) for name, tensor in tensors.items()}
        self._held = tensors if in_place else {}  # no other tensor takes their memory

    def first_changed(self, model: nn.Module | ExportedProgram, sums: MutableMapping[Any, int] | None = None) -> str | None:
        """The name of a tensor that is another now, or None. `sums`: as for `mark_of`."""
        tensors = _tensors_of(model)
        for name in (*self._marks, *tensors):
            if name not in tensors or name not in self._marks:
                return name
            place, changes, content = self._marks[name]
            now = (_place_of(tensors[name]), *mark_of(tensors[name], sums))
            if now[2] != content or ((self._in_place or content is None) and now[:2] != (place, changes)):
                return name
        return None


def _tensors_of(model: nn.Module | ExportedProgram) -> dict[str, torch.Tensor]:
    """Parameters, buffers and tensors in plain attributes, by all their names."""
    if isinstance(model, ExportedProgram):
        held: dict[str, Any] = {**model.state_dict, **model.constants}
        return {name: one for name, one in held.items() if isinstance(one, torch.Tensor)}
    return {
        f"{path}.{name}".lstrip("."): one
        for path, module in model.named_modules(remove_duplicate=False)
        for table in (module._parameters, module._buffers, vars(module))
        for name, one in table.items()
        if isinstance(one, torch.Tensor)
    }


def _place_of(tensor: torch.Tensor) -> Any:
    return memory_of(tensor) if not_dense(tensor) is None else id(tensor)

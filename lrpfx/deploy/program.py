"""Lowered programs, which check the sizes of their arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from lrpfx.errors import InputError
from lrpfx.ir.guards import Place, SharedSize
from lrpfx.support.torch_internals import has_conditions

Sizes = Sequence[int | None]  # of one argument; None for a size that may vary


class LoweredProgram(ExportedProgram):
    """An exported program of `lrpfx.lower`, whose module raises `InputError` for sizes that it was not lowered for."""

    lrpfx_sizes: Mapping[str, Sizes]  # of the arguments, in their order
    lrpfx_shared: Sequence[Mapping[str, Any]]  # sizes that several of them share, other than the batch, with their limits

    def module(self, check_guards: bool = True) -> fx.GraphModule:
        """The program as a module, which checks sizes before torch's own guards do."""
        module = super().module(*[check_guards] * has_conditions(self))
        wanted, shared = dict(self.lrpfx_sizes), list(self.lrpfx_shared)

        def check(_: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            tensors = {**dict(zip(wanted, args, strict=False)), **keywords}
            given = {name: value for name, value in tensors.items() if name in wanted and isinstance(value, torch.Tensor)}
            problem = problem_of_sizes(given, wanted, shared)
            if problem is not None:
                raise InputError(problem, topic="running-programs")

        module.register_forward_pre_hook(check, prepend=True, with_kwargs=True)
        return module


def checked(program: ExportedProgram, sizes: Mapping[str, Sizes], shared: Sequence[Mapping[str, Any]]) -> LoweredProgram:
    """The same program, which checks its arguments from now on."""
    program.__class__ = LoweredProgram
    assert isinstance(program, LoweredProgram)
    program.lrpfx_sizes, program.lrpfx_shared = sizes, shared
    return program


def problem_of_sizes(
    tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, Sizes], shared: Sequence[Mapping[str, Any]]
) -> str | None:
    """Why a program does not take tensors of these shapes, by the name of its argument; None if it does."""
    of_shared = {(name, number) for one in shared for name, number in one["of"]}
    batches = {(name, 0) for name in tensors if wanted[name][0] is None} - of_shared
    for name, tensor in tensors.items():
        shape, sizes = list(tensor.shape), wanted[name]
        letters = ["batch" if (name, number) in batches else "any" for number in range(len(sizes))]
        shown = [letter if size is None else str(size) for letter, size in zip(letters, sizes, strict=True)]
        found = f"{name} has shape {'×'.join([str(size) for size in shape]) or '()'}, but the program takes {'×'.join(shown)}"
        if len(shape) != len(sizes):
            return found
        wrong = [number for number, want in enumerate(sizes) if want not in (None, shape[number])]
        if wrong:
            fixed = [f"dimension {number} was fixed at {sizes[number]} when it was lowered" for number in wrong]
            return f"{found}: {'; '.join(fixed)}"
        if not shape[0]:
            return f"{name} is empty" if (name, 0) in of_shared else f"{name} is an empty batch"
    found_sizes = {name: tensor.shape[0] for name, tensor in tensors.items() if (name, 0) in batches}
    if len(set(found_sizes.values())) > 1:
        return f"the batch sizes differ: {', '.join([f'{name} {size}' for name, size in found_sizes.items()])}"
    for one in shared:
        of = tuple((Place(name), number) for name, number in one["of"])
        problem = SharedSize(of, one["lower"], one["upper"]).problem(tensors)
        if problem is not None:
            return problem
    return None


def inputs_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a program that are inputs of the model: without the target and the masks of conditions."""
    others = {"target", *manifest.get("conditions", ())}
    return {name: described for name, described in manifest["arguments"].items() if name not in others}


def number_of_targets(manifest: Mapping[str, Any]) -> int | None:
    """How many targets of each sample a program takes at once; None if it takes one, or explains the largest output."""
    number: int | None = manifest["arguments"]["target"]["shape"][1] if manifest["target"] == "targets" else None
    return number

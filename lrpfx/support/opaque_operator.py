"""Functions with loops over time that compilers treat as one operation: else each step would become operations of its own."""

from collections.abc import Callable
from typing import Any

import torch

from lrpfx.support.torch_internals import OpOverload

Function = Callable[..., torch.Tensor]

_library = torch.library.Library("lrpfx", "FRAGMENT")  # must live as long as the operators


def opaque_operator(schema: str, function: Function, result: Function, by_parts: Function | None = None) -> OpOverload:
    """An operator without a gradient that runs `function`, a pure function of the arguments of `schema`.

    `result` makes an empty tensor in the result's shape and dtype from the same arguments. `by_parts`: a function that computes
    the same with operations that `torch.vmap` can map, if `function` does not.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, lambda *arguments: function(*arguments).contiguous(), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lrpfx::{name}", lambda *arguments: result(*arguments).contiguous(), lib=_library)

    def mapped(info: Any, in_dims: Any, *arguments: Any) -> tuple[torch.Tensor, int]:
        return torch.vmap(by_parts or function, in_dims=in_dims, out_dims=0)(*arguments), 0

    if hasattr(torch.library, "register_vmap"):  # torch 2.4 lacks it
        torch.library.register_vmap(f"lrpfx::{name}", mapped, lib=_library)
    overload: OpOverload = getattr(torch.ops.lrpfx, name).default
    return overload

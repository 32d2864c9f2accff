"""Which tensors are dense, their content, and values that autograd saves.

The values of a dense tensor are in memory as shape and strides describe.
"""

import cmath
import functools
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lrpfx.errors import RuleError
from lrpfx.support.graph_data import GraphData
from lrpfx.support.torch_internals import DisableTorchFunction, is_traced, is_transformed, pytree


def no_tensors(value: Any) -> str:
    """What a value is that a module does not take as its inputs, and what to write for it, for messages."""
    name = type(value).__name__
    if isinstance(value, np.ndarray):
        return f"{name}: pass torch.from_numpy(array)"
    if isinstance(value, GraphData):
        return f'{name}: pass a graph by the names of the model\'s arguments, {{"x": graph.x, "edge_index": graph.edge_index}}'
    return f"{name}: lrpfx.Explainer(model) takes photographs, texts, tables and files"


def not_dense(value: torch.Tensor) -> str | None:
    """A description of a tensor that is not dense, or None."""
    with DisableTorchFunction():  # a subclass may override attributes
        if value.is_meta:
            return "on the meta device, where there are no values"
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or is_transformed(value):
            return f"a {type(value).__name__} that stands for other tensors"
        if value.is_nested:
            return "nested"
        if value.is_quantized:
            return "quantized"
        return None if value.layout == torch.strided else f"of layout {value.layout}"


def as_array(value: torch.Tensor) -> NDArray[Any]:
    """The values of a tensor, which NumPy shares where it can; in float32 if it is bfloat16, which NumPy does not have."""
    value = value.detach().cpu()
    array: NDArray[Any] = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return np.asarray(array, order="C")


def tensor_from(function: Any, result: Any, like: torch.Tensor | None = None, computed_with: bool = False) -> torch.Tensor:
    """What a user's function returned. `RuleError` unless it is a tensor, and of the shape of `like`, which it was given.

    `computed_with`: the layer computes with the result, so it has the dtype of `like`, too.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if not isinstance(result, torch.Tensor):
        raise RuleError(
            f"{name} returned {'None' if result is None else f'a {type(result).__name__}'}, not a tensor", topic="own-rules"
        )
    if like is not None and result.shape != like.shape:
        raise RuleError(
            f"{name} returned a tensor of shape {tuple(result.shape)}, not of {tuple(like.shape)}", topic="own-rules"
        )
    if computed_with and like is not None and result.dtype != like.dtype:
        raise RuleError(
            f"{name} returned a tensor of {result.dtype}, not of {like.dtype}, with which its layer computes", topic="own-rules"
        )
    return result


def distinct(values: Any) -> Any:
    """The same structure of values, with a copy of a tensor at each further place: tracers take one tensor for one input."""
    seen: set[int] = set()

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) not in seen:
            seen.add(id(value))
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    return pytree.tree_map(one, values)


def save_values(ctx: Any, values: Sequence[Any], further: Sequence[torch.Tensor | None] = ()) -> None:
    """Save the values of a call for the backward pass of an autograd Function, and further tensors."""
    ctx.others = [None if isinstance(value, torch.Tensor) else value for value in values]
    ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in values), *further)


def saved_values(ctx: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The values and the further tensors that `save_values` saved."""
    count, saved = len(ctx.others), ctx.saved_tensors  # read once: tensors may be recomputed
    pairs = zip(saved[:count], ctx.others, strict=True)
    return tuple(other if tensor is None else tensor for tensor, other in pairs), saved[count:]


def content_of(value: torch.Tensor) -> Iterator[bytes]:
    """The dtype, shape and values of a tensor as bytes, on any device; without values, if it has none."""
    yield f"{value.dtype}{tuple(value.shape)}".encode()
    if value.layout is torch.strided and value.device.type != "meta":
        dense = value.detach().cpu()
        dense = (dense.dequantize() if dense.is_quantized else dense).resolve_conj().resolve_neg()
        flat = dense.flatten().clone(memory_format=torch.contiguous_format)  # of one value, contiguous() keeps a stride of 0
        yield flat.view(torch.uint8).numpy().tobytes()


def where_finite(output: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, with 0 where `output` is infinite: masked scores, for example, have no relevance to pass on."""
    return torch.where(torch.isinf(output), torch.zeros_like(value), value)


def relevance_from(value: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """Value * multiplier, with 0 where the value is infinite, as a masked score is."""
    return where_finite(value, value * multiplier)


def only_finite(value: torch.Tensor) -> torch.Tensor:
    """`value`, with 0 in place of what is infinite or not a number."""
    return torch.nan_to_num(value, 0.0, 0.0, 0.0)


def all_finite(value: torch.Tensor) -> bool:
    """Whether all entries are finite. If their sum is, they are: comparisons of each entry take far longer."""
    return cmath.isfinite(value.sum().item()) or bool(value.isfinite().all())


def reads_values(value: torch.Tensor) -> bool:
    """Whether the values of a tensor can be read at no cost, to choose among formulas."""
    return value.device.type == "cpu" and not is_traced(value) and not is_transformed(value)


def detached(value: Any) -> Any:
    """A detached tensor; other values unchanged."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def on_device_of(module: nn.Module, inputs: Any, is_cast: bool = False) -> Any:
    """The inputs on the device of a model; if `is_cast`, those of floating point also in its dtype."""
    like = next((one for one in module.parameters() if one.is_floating_point()), None)

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or like is None:
            return leaf
        return leaf.to(like) if is_cast and leaf.is_floating_point() else leaf.to(like.device)

    return pytree.tree_map(placed, inputs)


def is_discrete(dtype: Any) -> bool:
    """Whether it is a dtype of integers or truth values."""
    return isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex)


def is_floating(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a floating-point tensor, which can have a gradient and relevance."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def held_as(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A tensor with the memory of `value`, as a parameter if `tensor` is one."""
    return nn.Parameter(value.detach(), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value.detach()


def address_of(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's memory; None if it has none of its own, as empty and sparse tensors."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a dense tensor has its entries: equal for two of which each sees what is written into the other."""
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def mark_of(tensor: torch.Tensor, sums: MutableMapping[Any, int] | None = None) -> tuple[int | None, int | None]:
    """Two numbers of which one changes with the values: the counter of changes in place, and a number for all bits.

    torch does not count changes through `.data`, by fused optimizers, and of the statistics of a batch norm that trains.

    `sums`: those of memory in which nothing has changed since, and where they are kept.
    """
    version = None if tensor.is_inference() else tensor._version
    if not_dense(tensor) is not None or tensor.is_meta or tensor.is_complex():
        return version, None
    place = None if sums is None else memory_of(tensor)
    if sums is not None and place in sums:
        return version, sums[place]
    found = _number_of(tensor.detach().reshape(-1).view(torch.uint8)) if tensor.numel() else 0
    if sums is not None:
        sums[place] = found
    return version, found


def _number_of(content: torch.Tensor) -> int:
    """A number that depends on each byte and its place, in this process.

    Of most of a large tensor, it is the sum of all words of 64 bits, each times an odd number of its own; of the rest, Python's
    hash. Products are modulo 2**64, so that of the highest bits of words only their count would matter. These must not be signs
    of entries: on a CPU, where any address will do, words begin at the second byte; elsewhere, their halves are mixed.
    """
    is_on_cpu = content.device.type == "cpu"
    first = 1 if is_on_cpu else -content.data_ptr() % 8
    rows = (len(content) - first) // (8 * _ROW)
    if rows <= 0:
        return hash(content.cpu().numpy().tobytes())
    last = first + 8 * _ROW * rows
    if is_on_cpu:
        words = torch.frombuffer(content.numpy(), dtype=torch.int64, count=rows * _ROW, offset=first)
    else:
        words = content[first:last].view(torch.int64)
    total, factors = 0, _factors(content.device)
    for number, part in enumerate(words.view(rows, _ROW).split(_ROWS)):
        # Only a CPU multiplies matrices of integers.
        of_rows = part.mv(factors[:_ROW]) if is_on_cpu else ((part ^ (part >> 31)) * factors[:_ROW]).sum(1)
        total += (2 * number + 1) * int((of_rows * factors[_ROW : _ROW + len(part)]).sum())
    return hash((total, *(one.cpu().numpy().tobytes() for one in (content[:first], content[last:]))))


#: Words in a row, and rows, that are taken at once: the factors of a row stay in the fastest cache.
_ROW, _ROWS = 1024, 4096


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Odd numbers: those of the places in a row, then those of rows."""
    generator = torch.Generator("cpu").manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (_ROW + _ROWS,), generator=generator, device="cpu") | 1).to(device)

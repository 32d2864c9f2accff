"""Implementations of operators that have no suitable function in torch."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from lrpfx.errors import InputError
from lrpfx.ir.operator import Function
from lrpfx.support.tensors import detached
from lrpfx.support.torch_internals import is_traced, pytree, unwrapped

_Kept = TypeVar("_Kept", bound=Callable[..., torch.Tensor])


def kept_in_traces(function: _Kept) -> _Kept:
    """A function of tensors that symbolic tracing keeps as one call, as it does with functions of torch."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        given = (*args, *options.values())
        if torch.overrides.has_torch_function(given):
            return torch.overrides.handle_torch_function(call, given, *args, **options)
        return function(*args, **options)

    return cast(_Kept, call)


def _padded(convolution: Function) -> Function:
    def convolve(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        amounts: Sequence[int] = (),
        **options: Any,
    ) -> torch.Tensor:
        result: torch.Tensor = convolution(torch.nn.functional.pad(input, tuple(amounts)), weight, bias, **options)
        return result

    convolve.__name__ = convolve.__qualname__ = f"padded_{convolution.__name__}"
    convolve.__doc__ = (
        "A convolution that first adds `amounts` zeros as `torch.nn.functional.pad` does: other ones on each side."
    )
    return convolve


padded_conv1d, padded_conv2d, padded_conv3d = map(_padded, (torch.conv1d, torch.conv2d, torch.conv3d))


def _with_bias_map(convolution: Function) -> Function:
    def convolve(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        result: torch.Tensor = convolution(input, weight, None, **options)
        return result if bias is None else result + bias

    convolve.__name__ = convolve.__qualname__ = f"{convolution.__name__}_with_bias_map"
    convolve.__doc__ = "A convolution whose bias depends on the position. Shape (1, channels, ...)."
    return convolve


conv1d_with_bias_map, conv2d_with_bias_map, conv3d_with_bias_map = map(
    _with_bias_map, (torch.conv1d, torch.conv2d, torch.conv3d)
)
padded_conv1d_with_bias_map, padded_conv2d_with_bias_map, padded_conv3d_with_bias_map = map(
    _with_bias_map, (padded_conv1d, padded_conv2d, padded_conv3d)
)


def thresholded_relu(input: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The input where scale * input + shift > 0, otherwise the input at which this term is zero.

    scale * thresholded_relu(x) + shift equals relu(scale * x + shift) where scale is not 0. Where it is 0, the result is 0.
    Channels are dimension 1.
    """
    shape = (1, -1, *[1] * (input.ndim - 2))
    factor, offset = scale.reshape(shape), shift.reshape(shape)
    threshold = -offset / torch.where(factor == 0, torch.ones_like(factor), factor)
    result = torch.where(factor * input + offset > 0, input, threshold)
    return torch.where(factor == 0, torch.zeros_like(result), result)


def divided_by(input: torch.Tensor, other: Any) -> torch.Tensor:
    """`other` / `input`."""
    result: torch.Tensor = other / input
    return result


def exponential(input: torch.Tensor, other: Any) -> torch.Tensor:
    """`other` to the power of `input`."""
    return torch.pow(other, input)


def floor_divided(input: Any, other: Any) -> torch.Tensor:
    """`input` / `other`, rounded down."""
    return torch.div(input, other, rounding_mode="floor")


def floor_divides(input: torch.Tensor, other: Any) -> torch.Tensor:
    """`other` / `input`, rounded down."""
    return torch.div(other, input, rounding_mode="floor")


def heaviside(input: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The step function, which has no gradient in torch."""
    return torch.heaviside(input.detach(), values.detach())


def histogram(input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """`torch.histc`, which has no gradient in torch."""
    return torch.histc(input.detach(), bins, min, max)


def gate(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`input` * `other`, where `other` scales the signal `input`."""
    return input * other


def gated_product(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`input` * `other`, where `other` is an activation."""
    return input * other


def weighted_values(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`input` @ `other`, where `input` holds attention weights and `other` values."""
    return input @ other


def weighted_product(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`input` * `other`, where `input` holds attention weights and `other` values that are added up afterwards."""
    return input * other


def weighted_sum(input: torch.Tensor, other: torch.Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> torch.Tensor:
    """The sum of `input` * `other`, where `input` holds attention weights and `other` values."""
    return (input * other).sum(dim, keepdim)


def weighted_einsum(equation: str, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """torch.einsum of attention weights and values."""
    return torch.einsum(equation, input, other)


def values_weighted(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`other` @ `input`, where `input` holds attention weights and `other` values."""
    return other @ input


def values_weighted_einsum(equation: str, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """torch.einsum of values and attention weights, `input`."""
    return torch.einsum(equation, other, input)


def quotient(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`input` / `other`, where both depend on the model's input."""
    return input / other


def masked_softmax(input: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax over `dim` that is 0 where all entries are -inf, as in fused attention."""
    empty = (input == -torch.inf).all(dim, keepdim=True)
    return torch.softmax(input.masked_fill(empty, 0.0), dim).masked_fill(empty, 0.0)


@kept_in_traces
def exponential_shares(
    input: torch.Tensor, exponentials: torch.Tensor, sums: torch.Tensor, dim: int | tuple[int, ...] | None
) -> torch.Tensor:
    """`exponentials` / `sums`, a softmax of `input` over `dim` with a mask or a stabilized sum; None: over all dimensions.

    The derivative is that of the exponentials of `input` and of their sum over `dim`.
    """
    return _shares(input, exponentials, sums, lambda values: total_over(values, dim))


@kept_in_traces
def shares_of_groups(
    input: torch.Tensor,
    exponentials: torch.Tensor,
    sums: torch.Tensor,
    totals: torch.Tensor,
    index: torch.Tensor,
    dim: int,
) -> torch.Tensor:
    """`exponentials` / `sums`, a softmax of `input` in groups along `dim`, which `index` numbers.

    `totals` holds the sums of the groups, and `sums` the one for each entry.
    """
    return _shares(input, exponentials, sums, lambda values: total_of_groups(values, totals, index, dim))


def _shares(
    input: torch.Tensor,
    exponentials: torch.Tensor,
    sums: torch.Tensor,
    total: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    shares = (exponentials / sums).detach()
    change = torch.where(torch.isinf(input), torch.zeros_like(input), input - input.detach())  # 0, with a derivative of 1
    return shares * torch.exp(change) / (1 + total(shares * torch.expm1(change)))


def total_over(values: torch.Tensor, dim: int | tuple[int, ...] | None) -> torch.Tensor:
    """The sum over dimensions, which stay with size 1. None: over all dimensions."""
    return values.sum(keepdim=True, dim=tuple(range(values.ndim)) if dim is None else dim)


def total_of_groups(values: torch.Tensor, totals: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum of the group of each entry."""
    empty = torch.zeros_like(totals)
    if index.ndim == 1:
        return empty.index_add(dim, index, values).index_select(dim, index)
    return empty.scatter_add(dim, index, values).gather(dim, index)


def attention_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An attention mask as a bias on the scores: -inf where a boolean mask is False."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)
    return torch.where(mask == -torch.inf, mask.detach(), mask)  # entries of -inf take no relevance


def padding_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of shape (batch, keys), True for masked keys, as a bias on the scores."""
    return _forbidding(mask, dtype)[:, None, None, :]


def head_bias(mask: torch.Tensor, dtype: torch.dtype, heads: int) -> torch.Tensor:
    """A mask of shape (queries, keys) or (batch * heads, queries, keys), True for masked keys, as a bias on the scores."""
    bias = _forbidding(mask, dtype)
    return torch.unflatten(bias, 0, (-1, heads)) if bias.ndim == 3 else bias


def _forbidding(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return attention_bias(~mask if mask.dtype == torch.bool else mask, dtype)


def copied(input: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`source` in the shape and dtype of `input`, which it overwrites."""
    return source.to(input.dtype).expand_as(input)


def scattered(input: torch.Tensor, dim: int, index: torch.Tensor, source: Any) -> torch.Tensor:
    """`input` with the entries at `index` replaced by entries of a tensor, or by a number."""
    return torch.scatter(input, dim, index, source)


def several(*results: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Several results of one operator."""
    return results


def straight_through(input: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, with the derivative of `input`."""
    return value + (input - input.detach())


def slope(input: torch.Tensor, dim: int, spacing: Any = 1, edge_order: int = 1) -> torch.Tensor:
    """Finite differences along one dimension. `spacing`: of neighbours, a number, or the places of all entries."""
    spacings = (spacing,) if isinstance(spacing, torch.Tensor) else spacing
    return torch.gradient(input, spacing=spacings, dim=dim, edge_order=edge_order)[0]


@kept_in_traces
def affine_grid(theta: torch.Tensor, size: Sequence[int], align_corners: bool | None = None) -> torch.Tensor:
    """`torch.nn.functional.affine_grid`, which programs can compute for any batch: torch's derivative takes fixed sizes.

    `theta`: affine maps of shape (batch, d, d + 1). `size`: that of the images, (batch, channels, [depth,] height, width).
    Returns the places (batch, [depth,] height, width, d) in the range from -1 to 1, the last axis of the images first.
    """
    axes = [
        torch.linspace(-1, 1, length, dtype=theta.dtype, device=theta.device)
        * (1.0 if align_corners and length > 1 else (length - 1) / length)
        for length in size[2:]
    ]
    places = torch.meshgrid(*axes, indexing="ij")
    grid = torch.stack([*reversed(places), torch.ones_like(places[0])], -1).flatten(0, -2)
    found: torch.Tensor = torch.matmul(grid, theta.mT).unflatten(1, tuple(size[2:]))
    return found


def mask_scattered(input: torch.Tensor, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`input` with the entries where `mask` is True replaced by entries of `source`, in order."""
    return torch.masked_scatter(input, mask, source)


def scatter_added(input: torch.Tensor, source: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """`input` with the entries of `source` added at `index`."""
    return torch.scatter_add(input, dim, index, source)


def index_added(input: torch.Tensor, source: torch.Tensor, dim: int, index: torch.Tensor, alpha: float = 1) -> torch.Tensor:
    """`input` with `alpha` times the slices of `source` added at `index`."""
    return torch.index_add(input, dim, index, source, alpha=alpha)


def index_copied(input: torch.Tensor, source: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """`input` with the slices at `index` replaced by those of `source`."""
    return torch.index_copy(input, dim, index, source)


def index_filled(input: torch.Tensor, value: Any, dim: int, index: torch.Tensor) -> torch.Tensor:
    """`input` with the slices at `index` replaced by a number."""
    return torch.index_fill(input, dim, index, value)


_NEVER_CHOSEN = {"amax": -math.inf, "amin": math.inf}


def _reduction(function: Function, name: str, what: str) -> Function:
    placed: Any = torch.scatter if function is torch.scatter_reduce else torch.index_fill

    def reduced(
        input: torch.Tensor, source: torch.Tensor, dim: int, index: torch.Tensor, reduce: str, include_self: bool = True
    ) -> torch.Tensor:
        if not include_self and reduce in _NEVER_CHOSEN:
            # torch shares its derivative with entries of `input` that are as large as the result, though they are left out
            replaced = placed(torch.zeros_like(input), dim, index, 1)
            input, include_self = input.masked_fill(replaced != 0, _NEVER_CHOSEN[reduce]), True
        result: torch.Tensor = function(input, dim, index, source, reduce, include_self=include_self)
        return result

    reduced.__name__ = reduced.__qualname__ = name
    reduced.__doc__ = f"`torch.{function.__name__}` by {what}."
    return reduced


scatter_reduced = _reduction(torch.scatter_reduce, "scatter_reduced", "any reduction")
scatter_averaged = _reduction(torch.scatter_reduce, "scatter_averaged", "a sum or a mean, linear in `input` and `source`")
scatter_chosen = _reduction(torch.scatter_reduce, "scatter_chosen", "the largest or the smallest entry")
index_reduced = _reduction(torch.index_reduce, "index_reduced", "any reduction")
index_averaged = _reduction(torch.index_reduce, "index_averaged", "a mean, linear in `input` and `source`")
index_chosen = _reduction(torch.index_reduce, "index_chosen", "the largest or the smallest entry")


def quantile_without(
    input: torch.Tensor,
    missing: torch.Tensor,
    q: Any,
    dim: int | None = None,
    keepdim: bool = False,
    interpolation: str = "linear",
) -> torch.Tensor:
    """The quantile of the entries that are not missing."""
    return torch.nanquantile(input.masked_fill(missing, torch.nan), q, dim, keepdim, interpolation=interpolation)


def solved(input: torch.Tensor, matrix: torch.Tensor, left: bool = True) -> torch.Tensor:
    """The solution X of `matrix` @ X = `input`, or of X @ `matrix` = `input`."""
    result: torch.Tensor = torch.linalg.solve(matrix, input, left=left)
    return result


def solved_triangular(
    input: torch.Tensor, matrix: torch.Tensor, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    """The same for a triangular matrix."""
    result: torch.Tensor = torch.linalg.solve_triangular(matrix, input, upper=upper, left=left, unitriangular=unitriangular)
    return result


def overwritten_at(input: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    """`input` with `values` at `indices`, which may be None for whole dimensions, unlike those of torch.index_put."""
    result: torch.Tensor = torch.ops.aten.index_put.default(input, indices, values, accumulate)
    return result


def chosen_by_comparison(input: Any, other: Any, first: torch.Tensor, last: Any, comparison: str) -> torch.Tensor:
    """`input` where the comparison of `first` and `last` that torch has under this name is true, and `other` elsewhere."""
    return torch.where(getattr(torch, comparison)(first, last), input, other)


def index_put_accumulated(input: torch.Tensor, values: torch.Tensor, indices: Any) -> torch.Tensor:
    """`input` with `values` added at `indices`."""
    result: torch.Tensor = torch.ops.aten.index_put.default(input, indices, values, True)
    return result


def selected_linear(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`input` @ `weight`, where `weight` was looked up among parameters: each sample has matrices of its own."""
    return input @ weight


def selected_linear_of_columns(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`weight` @ `input`, where `weight` was looked up among parameters: each sample has matrices of its own."""
    return weight @ input


@kept_in_traces
def grouped_linear(input: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """Groups of rows of `input`, each times its own matrix: a mixture of experts.

    Shapes: (rows, in), (groups, in, out), and (groups,) for the number of the row after each group. Rows after the last group
    become 0.
    """
    if input.ndim != 2 or weight.ndim != 3 or offsets is None:
        raise InputError(
            f"a grouped product of shapes {tuple(input.shape)} and {tuple(weight.shape)} is not supported, only that of rows "
            "with one matrix for each group of them: (rows, in) and (groups, in, out), with offsets",
            topic="inputs-do-not-fit",
        )
    if is_traced(offsets):  # sizes of groups are not known
        places = torch.arange(input.shape[0], device=input.device)
        starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
        chosen = (places[:, None] >= starts) & (places[:, None] < offsets)  # (rows, groups)
        return torch.stack([(input @ weight[group]) * chosen[:, group, None] for group in range(weight.shape[0])]).sum(0)
    ends = unwrapped(offsets).tolist()
    parts = [input[start:end] @ weight[group] for group, (start, end) in enumerate(itertools.pairwise([0, *ends]))]
    return torch.cat([*parts, input.new_zeros(input.shape[0] - ends[-1], weight.shape[2])])


def grid_sampled(
    input: torch.Tensor,
    grid: torch.Tensor,
    mode: str | int = "bilinear",
    padding_mode: str | int = "zeros",
    align_corners: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.grid_sample`, with modes given by name or by ATen's numbers."""
    named = ("bilinear", "nearest", "bicubic")[mode] if isinstance(mode, int) else mode
    padding = ("zeros", "border", "reflection")[padding_mode] if isinstance(padding_mode, int) else padding_mode
    return torch.nn.functional.grid_sample(input, grid, named, padding, bool(align_corners))


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str | int = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.embedding_bag`, with the mode given by name or by ATen's number."""
    named = ("sum", "mean", "max")[mode] if isinstance(mode, int) else mode
    return torch.nn.functional.embedding_bag(
        input,
        weight,
        offsets,
        max_norm,
        norm_type,
        scale_grad_by_freq,
        named,
        sparse,
        per_sample_weights,
        include_last_offset,
        padding_idx,
    )


def require_matrix(input: torch.Tensor) -> torch.Tensor:
    """Return `input`. `InputError` unless it has two dimensions, which the compiler could not prove."""
    if input.ndim != 2:
        raise InputError(
            f"a batch norm was merged into a dense layer on the assumption that its input has shape (batch, features), but it "
            f"has {input.ndim} dimensions. Pass example_inputs to lrpfx.transform: the compiler then knows the shapes.",
            topic="example-inputs",
        )
    return input


def require_dimensions(input: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Return `input`. `InputError` unless it has `dimensions` dimensions, which the compiler could not prove."""
    if input.ndim != dimensions:
        raise InputError(
            f"a batch norm was merged into a convolution on the assumption that its input has {dimensions} dimensions, the "
            f"batch first, but it has {input.ndim}. Pass example_inputs to lrpfx.transform: the compiler then knows the "
            "shapes.",
            topic="example-inputs",
        )
    return input


def require_batch(input: torch.Tensor, dimensions: int, name: str) -> torch.Tensor:
    """Return `input`. `InputError` unless it is a batch with `dimensions` dimensions, which the trace did not show."""
    if input.ndim != dimensions:
        raise InputError(
            f"an input of {name} has {input.ndim} dimensions, but without example_inputs the graph is made for a batch, which "
            f"has {dimensions}. Pass example_inputs with the shapes of your inputs to lrpfx.transform.",
            topic="example-inputs",
        )
    return input


@kept_in_traces
def held(input: torch.Tensor) -> torch.Tensor:
    """The values of `input` as a constant, which takes relevance in an account of its own and passes none on."""
    return input.detach().clone()


def without_gradient(value: Any) -> Any:
    """The value, with all tensors in nested containers detached."""
    return pytree.tree_map(detached, value)


@kept_in_traces
def strided(input: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int = 0) -> torch.Tensor:
    """`torch.as_strided` of a contiguous tensor, for tensors of any layout in memory: the entries in order, at these steps.

    Entries may be read several times, as by windows that overlap.
    """
    steps = torch.meshgrid(
        *(torch.arange(n, device=input.device) * step for n, step in zip(size, stride, strict=True)), indexing="ij"
    )
    return torch.take(input, functools.reduce(torch.add, steps, torch.tensor(storage_offset, device=input.device)))

"""Operators in forms of others.

They replace what ONNX lacks, mainly the backward of convolutions, pooling, padding and resampling, and what a program must not
contain, since it reads or writes memory unchecked.

Each backward is linear in the gradient, so forward operators can express it: a transposed convolution, a product with a matrix
for each dimension, or a scatter.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lrpfx.support.torch_internals import aten as aten_operator

aten = torch.ops.aten

Matrix = torch.Tensor

# --- convolutions -----------------------------------------------------------------------------------------------------------


def _convolution_backward(
    gradient: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """The input's gradient as a convolution; `NotImplemented` if gradients of parameters are requested."""
    if output_mask[1] or output_mask[2]:
        return NotImplemented
    dimensions = len(stride)
    sizes, kernel, none = input.shape[2:], weight.shape[2:], [0] * dimensions
    if transposed:
        result = aten.convolution(gradient, weight, None, stride, padding, dilation, False, none, groups)
        for dimension, size in enumerate(sizes):
            result = result.narrow(dimension + 2, 0, size)
        return result, None, None
    around = [step * (length - 1) - amount for step, length, amount in zip(dilation, kernel, padding, strict=True)]
    if all(step == 1 for step in stride) and min(around) >= 0:  # plain convolutions are faster than transposed ones
        turned = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(list(range(2, dimensions + 2)))
        return aten.convolution(gradient, turned, None, stride, around, dilation, False, none, groups), None, None
    reached = [
        (length - 1) * step + extent - amount + 1
        for length, step, extent, amount in zip(gradient.shape[2:], stride, around, padding, strict=True)
    ]
    missing = [size - length for size, length in zip(sizes, reached, strict=True)]
    return aten.convolution(gradient, weight, None, stride, padding, dilation, True, missing, groups), None, None


# --- pooling, padding and resampling: a matrix for each dimension ------------------------------------------------------------


def _along_each(value: torch.Tensor, matrices: Sequence[Matrix]) -> torch.Tensor:
    """Multiply each of the last dimensions of `value` by its matrix of shape (input size, output size)."""
    for dimension, matrix in zip(range(-len(matrices), 0), matrices, strict=True):
        value = torch.matmul(value.transpose(dimension, -1), matrix).transpose(dimension, -1)
    return value


def _places(size: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(size, device=like.device, dtype=like.dtype)


def _averages(starts: torch.Tensor, ends: torch.Tensor, size: int, lengths: torch.Tensor) -> Matrix:
    """The weights of averages over windows. Shape (windows, size)."""
    places = _places(size, starts)
    inside = (places >= starts[:, None]) & (places < ends[:, None])
    return inside.to(starts.dtype) / lengths[:, None]


def _adaptive_bounds(size: int, windows: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = _places(windows, like)
    return torch.floor((numbers * size + 0.5) / windows), torch.ceil(((numbers + 1) * size - 0.5) / windows)


def _adaptive_windows(size: int, windows: int, like: torch.Tensor) -> Matrix:
    starts, ends = _adaptive_bounds(size, windows, like)
    return _averages(starts, ends, size, ends - starts)


def _average_windows(
    size: int, windows: int, kernel: int, stride: int, padding: int, counts_padding: bool, normalize: bool, like: torch.Tensor
) -> Matrix:
    starts = _places(windows, like) * stride - padding
    ends = (starts + kernel).clamp(max=size + padding)
    first, last = starts.clamp(min=0), ends.clamp(max=size)
    lengths = ends - starts if counts_padding else last - first
    return _averages(starts, ends, size, lengths if normalize else torch.ones_like(lengths))


def _average_pool_backward(
    gradient: torch.Tensor,
    input: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    dimensions = len(kernel_size)
    steps, paddings = _each(stride or kernel_size, dimensions), _each(padding, dimensions)
    sizes = zip(input.shape[-dimensions:], gradient.shape[-dimensions:], kernel_size, steps, paddings, strict=True)
    normalize = divisor_override is None
    matrices = [_average_windows(*size, count_include_pad, normalize, gradient) for size in sizes]
    result = _along_each(gradient, matrices)
    return result if divisor_override is None else result / divisor_override


def _each(value: Sequence[int], dimensions: int) -> list[int]:
    return list(value) * (dimensions // len(value))


def _adaptive_average_pool(input: torch.Tensor, output_size: Sequence[int]) -> torch.Tensor:
    shapes = zip(input.shape[-len(output_size) :], output_size, strict=True)
    return _along_each(input, [_adaptive_windows(*shape, input).t() for shape in shapes])


def _adaptive_average_pool_backward(dimensions: int) -> Callable[..., torch.Tensor]:
    def backward(gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        shapes = zip(input.shape[-dimensions:], gradient.shape[-dimensions:], strict=True)
        return _along_each(gradient, [_adaptive_windows(*shape, gradient) for shape in shapes])

    return backward


def _adaptive_max_pool(pool: Any) -> Callable[..., Any]:
    def adaptive(input: torch.Tensor, output_size: Sequence[int]) -> Any:
        shapes = list(zip(input.shape[-len(output_size) :], output_size, strict=True))
        if all(windows == 1 for _, windows in shapes):
            whole = input.flatten(-len(shapes)).max(-1)
            sizes = [*input.shape[: -len(shapes)], *output_size]
            return whole.values.view(sizes), whole.indices.view(sizes)
        if all(isinstance(size, int) for size, _ in shapes) and not any(size % windows for size, windows in shapes):
            kernel = [size // windows for size, windows in shapes]
            return pool(input, kernel, kernel)
        members = _adaptive_members(shapes, input)
        values, first = input.flatten(-len(shapes))[..., members].max(-1)
        indices = members.expand(*first.shape, -1).gather(-1, first.unsqueeze(-1))
        sizes = [*input.shape[: -len(shapes)], *output_size]
        return values.view(sizes), indices.view(sizes)

    return adaptive


def _adaptive_members(shapes: Sequence[tuple[int, int]], like: torch.Tensor) -> torch.Tensor:
    """Flat indices of each window's members. Shape (windows, members); smaller windows repeat their last index.

    A size that may vary is no number that windows could be counted in one by one: their longest has two more at most.
    """
    flat = torch.zeros((1, 1), dtype=torch.long, device=like.device)
    for size, windows in shapes:
        starts, ends = _adaptive_bounds(size, windows, like)
        lengths = [-(-(number + 1) * size // windows) - number * size // windows for number in range(windows)]
        longest = max(lengths) if isinstance(size, int) else size // windows + 2
        places = torch.minimum(starts[:, None] + _places(longest, like), ends[:, None] - 1).long()
        flat = (flat[:, None, :, None] * size + places[None, :, None, :]).flatten(2).flatten(0, 1)
    return flat


def _max_pool_backward(dimensions: int) -> Callable[..., torch.Tensor]:
    def backward(gradient: torch.Tensor, input: torch.Tensor, *settings: Any) -> torch.Tensor:
        nothing = input.new_zeros((*input.shape[:-dimensions], math.prod(input.shape[-dimensions:])))
        total = nothing.scatter_add(-1, settings[-1].flatten(-dimensions), gradient.flatten(-dimensions))
        return total.view(input.shape)

    return backward


def _scatter_add_of_halves(input: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
    if input.dtype != torch.float16:
        return NotImplemented
    return input.float().scatter_add(dim, index, source.float()).to(input.dtype)


def _layer_norm_of_halves(
    input: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Any:
    if input.dtype != torch.float16:
        return NotImplemented
    weight, bias = (None if value is None else value.float() for value in (weight, bias))
    return tuple(value.to(input.dtype) for value in aten.native_layer_norm(input.float(), shape, weight, bias, eps))


def _step(size: int, results: int, scale: float | None, corners: bool) -> float:
    """The distance in the input between neighboring entries of a resampled result."""
    if corners:
        return (size - 1) / max(results - 1, 1)
    return 1 / scale if scale else size / results


def _sources(size: int, results: int, scale: float | None, corners: bool, like: torch.Tensor) -> torch.Tensor:
    """The positions in the input of the entries of an upsampled result."""
    numbers, step = _places(results, like), _step(size, results, scale, corners)
    return numbers * step if corners else (numbers + 0.5) * step - 0.5


def _nearest(exact: bool) -> Callable[..., Matrix]:
    def matrix(size: int, results: int, scale: float | None, corners: bool, like: torch.Tensor) -> Matrix:
        numbers = _places(results, like) + (0.5 if exact else 0.0)
        nearest = torch.floor(numbers * _step(size, results, scale, corners)).clamp(max=size - 1)
        return (_places(size, like) == nearest[:, None]).to(like.dtype)

    return matrix


def _linear(size: int, results: int, scale: float | None, corners: bool, like: torch.Tensor) -> Matrix:
    sources = _sources(size, results, scale, corners, like).clamp(min=0, max=size - 1)
    return torch.relu(1 - (sources[:, None] - _places(size, like)).abs())


def _cubic(size: int, results: int, scale: float | None, corners: bool, like: torch.Tensor) -> Matrix:
    sources = _sources(size, results, scale, corners, like)
    below = torch.floor(sources)
    total = torch.zeros(1, device=like.device, dtype=like.dtype)
    for step in (-1, 0, 1, 2):
        weight = _cubic_kernel((sources - below - step).abs(), -0.75)
        at = (below + step).clamp(min=0, max=size - 1)
        total = total + weight[:, None] * (_places(size, like) == at[:, None]).to(like.dtype)
    return total


def _antialiased(support: int, kernel: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Matrix]:
    """Averages over places within a distance of `support` steps of the coarser grid, weighted by `kernel` of the distance."""

    def matrix(size: int, results: int, scale: float | None, corners: bool, like: torch.Tensor) -> Matrix:
        step = _step(size, results, scale, corners)
        centres = (_places(results, like) + 0.5) * (step if results > 1 or not corners else 0.0)
        reach = support * max(step, 1.0)
        starts = torch.floor(centres - reach + 0.5).clamp(min=0)
        ends = torch.floor(centres + reach + 0.5).clamp(max=size)
        places = _places(size, like)
        weights = kernel((places + 0.5 - centres[:, None]).abs() / max(step, 1.0))
        weights = weights * ((places >= starts[:, None]) & (places < ends[:, None])).to(like.dtype)
        return weights / weights.sum(1, keepdim=True)

    return matrix


def _triangle(distance: torch.Tensor) -> torch.Tensor:
    return torch.relu(1 - distance)


def _cubic_kernel(distance: torch.Tensor, sharpness: float = -0.5) -> torch.Tensor:
    near = ((sharpness + 2) * distance - (sharpness + 3)) * distance * distance + 1
    far = ((sharpness * distance - 5 * sharpness) * distance + 8 * sharpness) * distance - 4 * sharpness
    return torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(distance)))


def _upsample(matrix: Callable[..., Matrix]) -> Callable[..., torch.Tensor]:
    def forward(input: torch.Tensor, output_size: Sequence[int], corners: bool, *scales: Any) -> torch.Tensor:
        each = (*scales, *[None] * (len(output_size) - len(scales)))
        shapes = zip(input.shape[-len(output_size) :], output_size, each, strict=True)
        return _along_each(input, [matrix(*shape, corners, input).t() for shape in shapes])

    return forward


def _clamped(places: torch.Tensor, size: int) -> torch.Tensor:
    return places.clamp(min=0, max=size - 1)


def _reflected(places: torch.Tensor, size: int) -> torch.Tensor:
    return (size - 1) - ((size - 1) - places.abs()).abs()


def _pad_backward(source: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`source`: the position in a row of some size that a position before, within or behind it repeats."""

    def backward(gradient: torch.Tensor, input: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
        matrices = []
        for dimension, before in zip(range(-len(padding) // 2, 0), reversed(padding[::2]), strict=True):
            size = input.shape[dimension]
            sources = source(_places(gradient.shape[dimension], gradient) - before, size)
            matrices.append((_places(size, gradient) == sources[:, None]).to(gradient.dtype))
        return _along_each(gradient, matrices)

    return backward


def _reflection_pad(input: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    for dimension, before, after in zip(range(-1, -len(padding), -1), padding[::2], padding[1::2], strict=False):
        size = input.shape[dimension]
        places = torch.arange(before + size + after, device=input.device) - before
        input = input.index_select(dimension, _reflected(places, size))
    return input


def _upsample_backward(matrix: Callable[..., Matrix], has_corners: bool) -> Callable[..., torch.Tensor]:
    def backward(gradient: torch.Tensor, output_size: Sequence[int], input_size: Sequence[int], *settings: Any) -> torch.Tensor:
        corners = has_corners and bool(settings[0])
        scales = settings[1:] if has_corners else settings
        scales = (*scales, *[None] * (len(output_size) - len(scales)))
        shapes = zip(input_size[2:], output_size, scales, strict=True)
        return _along_each(gradient, [matrix(*shape, corners, gradient) for shape in shapes])

    return backward


# --- views ------------------------------------------------------------------------------------------------------------------


def _on_diagonal(rows: int, columns: int, offset: int, device: torch.device) -> torch.Tensor:
    """Flat indices of a matrix's diagonal."""
    first = -offset * columns if offset < 0 else offset
    length = min(rows + offset, columns) if offset < 0 else min(rows, columns - offset)
    return first + torch.arange(length, device=device) * (columns + 1)


def _diagonal(input: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    matrices = input.movedim((dim1, dim2), (-2, -1))
    places = _on_diagonal(matrices.shape[-2], matrices.shape[-1], offset, input.device)
    return matrices.flatten(-2).index_select(-1, places)


def _diagonal_backward(gradient: torch.Tensor, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> torch.Tensor:
    dim1, dim2 = dim1 % len(input_sizes), dim2 % len(input_sizes)
    rows, columns = input_sizes[dim1], input_sizes[dim2]
    places = _on_diagonal(rows, columns, offset, gradient.device)
    others = [size for dimension, size in enumerate(input_sizes) if dimension not in (dim1, dim2)]
    flat = gradient.new_zeros([*others, rows * columns])
    result = flat.scatter(-1, places.expand(gradient.shape), gradient).view(*others, rows, columns)
    return result.movedim((-2, -1), (dim1, dim2))


def in_order(value: torch.Tensor) -> bool:
    """Whether a tensor begins where its memory begins, with the strides of a contiguous one but in dimensions of size 1."""
    return _in_order(value.shape, value.stride(), value.storage_offset())


def _in_order(sizes: Sequence[int], strides: Sequence[int], offset: int | torch.SymInt | None) -> bool:
    step = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step = step * size
    return not offset


def _as_strided(input: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """A reshape, if all entries stay in order; otherwise `NotImplemented`."""
    plain = _in_order(size, stride, storage_offset) and in_order(input)
    return input.reshape(size) if plain and input.numel() == math.prod(size) else NotImplemented


def _as_strided_scatter(
    input: torch.Tensor, src: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    everything = _as_strided(input, size, stride, storage_offset) is not NotImplemented
    return src.reshape(input.shape) if everything else NotImplemented


def _unfold_backward(gradient: torch.Tensor, sizes: Sequence[int], dimension: int, size: int, step: int) -> torch.Tensor:
    """Torch's own form has places of 32 bits, which ONNX does not take."""
    dimension %= len(sizes)
    places = torch.arange(sizes[dimension], device=gradient.device).unfold(0, size, step).flatten()
    windows = gradient.movedim(-1, dimension + 1).flatten(dimension, dimension + 1)
    return gradient.new_zeros(sizes).index_add(dimension, places, windows)


def embedding_of_own_rows(weight: torch.Tensor, indices: torch.Tensor, *settings: Any) -> torch.Tensor:
    """Rows of a table. ONNX takes negative indices for places from the end, which torch refuses: so they are out of range."""
    places = torch.where(indices < 0, weight.shape[0], indices)
    return weight.index_select(0, places.reshape(-1)).reshape(*indices.shape, weight.shape[1])


def _embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Sums and means of bags. torch's operator reads where indices and offsets say."""
    if mode not in (0, 1):
        return NotImplemented
    starts = offsets[:-1] if include_last_offset else offsets
    counted = (indices != padding_idx).to(weight.dtype)
    values = torch.nn.functional.embedding(indices, weight) * counted[:, None]
    values = values if per_sample_weights is None else values * per_sample_weights[:, None]
    places = torch.arange(indices.shape[0], device=indices.device)
    bags = torch.searchsorted(starts, places.to(starts.dtype), right=True) - 1
    sums = values.new_zeros(starts.shape[0], weight.shape[1]).index_add(0, bags, values)
    sizes = counted.new_zeros(starts.shape[0]).index_add(0, bags, counted)
    result = sums / sizes.clamp(min=1)[:, None] if mode == 1 else sums
    return result, bags, sizes.to(indices.dtype), sizes.to(indices.dtype)


# --- activations ------------------------------------------------------------------------------------------------------------


def _rrelu(
    input: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    *generator: Any,
) -> Any:
    return NotImplemented if training else (torch.nn.functional.leaky_relu(input, (lower + upper) / 2), noise)


def _rrelu_in_place(*args: Any) -> Any:
    result = _rrelu(*args)
    return result if result is NotImplemented else result[0]


def _rrelu_backward(
    gradient: torch.Tensor, input: torch.Tensor, noise: torch.Tensor, lower: float, upper: float, training: bool, *result: Any
) -> Any:
    return NotImplemented if training else torch.where(input > 0, gradient, gradient * ((lower + upper) / 2))


def _for_each(pattern: str, form: Callable[..., Any], names: Sequence[Any] = (1, 2, 3)) -> dict[Any, Callable[..., Any]]:
    """A form for each operator of a pattern of names, such as one for each number of dimensions."""
    return {getattr(aten, pattern.format(name)).default: form for name in names}


#: Operators that ONNX lacks -> functions that express them in other operators.
FORWARD_FORMS: dict[Any, Callable[..., Any]] = {
    aten.convolution_backward.default: _convolution_backward,
    **_for_each("avg_pool{}d_backward", _average_pool_backward, (2, 3)),
    **_for_each("_adaptive_avg_pool{}d", _adaptive_average_pool, (2, 3)),
    aten._adaptive_avg_pool2d_backward.default: _adaptive_average_pool_backward(2),
    aten._adaptive_avg_pool3d_backward.default: _adaptive_average_pool_backward(3),
    aten_operator("rrelu_with_noise_functional.default"): _rrelu,  # not in torch 2.4
    aten.rrelu_with_noise.default: _rrelu_in_place,
    aten.rrelu_with_noise_backward.default: _rrelu_backward,
    **_for_each("replication_pad{}d_backward", _pad_backward(_clamped)),
    **_for_each("reflection_pad{}d", _reflection_pad),
    **_for_each("reflection_pad{}d_backward", _pad_backward(_reflected)),
    aten.adaptive_max_pool2d.default: _adaptive_max_pool(aten.max_pool2d_with_indices),
    aten.adaptive_max_pool3d.default: _adaptive_max_pool(aten.max_pool3d_with_indices),
    **_for_each("{}_backward", _max_pool_backward(2), ("max_pool2d_with_indices", "adaptive_max_pool2d")),
    **_for_each("{}_backward", _max_pool_backward(3), ("max_pool3d_with_indices", "adaptive_max_pool3d")),
    **_for_each("upsample_nearest{}d_backward", _upsample_backward(_nearest(False), False)),
    **_for_each("_upsample_nearest_exact{}d_backward", _upsample_backward(_nearest(True), False)),
    **_for_each("upsample_{}_backward", _upsample_backward(_linear, True), ("linear1d", "bilinear2d", "trilinear3d")),
    aten.upsample_bicubic2d_backward.default: _upsample_backward(_cubic, True),
    aten._upsample_bilinear2d_aa.default: _upsample(_antialiased(1, _triangle)),
    aten._upsample_bicubic2d_aa.default: _upsample(_antialiased(2, _cubic_kernel)),
    aten._upsample_bilinear2d_aa_backward.default: _upsample_backward(_antialiased(1, _triangle), True),
    aten._upsample_bicubic2d_aa_backward.default: _upsample_backward(_antialiased(2, _cubic_kernel), True),
    aten.diagonal.default: _diagonal,
    aten.diagonal_backward.default: _diagonal_backward,
    aten.unfold_backward.default: _unfold_backward,
    **_for_each("_embedding_bag{}", _embedding_bag, ("", "_forward_only")),
    aten.as_strided.default: _as_strided,
    aten.as_strided_scatter.default: _as_strided_scatter,
}


def _without_alpha(operator: Any) -> Callable[..., Any]:
    def combined(input: torch.Tensor, other: torch.Tensor, *, alpha: float = 1) -> Any:
        return NotImplemented if alpha == 1 else operator(input, other * alpha)

    return combined


#: Sums with a factor -> the same as a product and a sum. ExecuTorch 1.5 applies the factor to the wrong operand if the first
#: one is a single number.
WITHOUT_ALPHA: dict[Any, Callable[..., Any]] = {
    operator: _without_alpha(operator) for operator in (aten.add.Tensor, aten.sub.Tensor)
}


def _cut_and_padded(input: torch.Tensor, padding: Sequence[int], value: float = 0) -> Any:
    if min(padding, default=0) >= 0:
        return NotImplemented
    for number, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        dimension, first = input.ndim - 1 - number, max(-before, 0)
        input = input.narrow(dimension, first, input.shape[dimension] - first - max(-after, 0))
    return aten.constant_pad_nd.default(input, [max(amount, 0) for amount in padding], value)


#: Padding by negative amounts -> the part that is left, padded by the others. ExecuTorch takes none below 0.
WITHOUT_NEGATIVE_PADDING: dict[Any, Callable[..., Any]] = {aten.constant_pad_nd.default: _cut_and_padded}

#: Operators that ONNX Runtime lacks for float16, or whose statistics are float32 there -> the same in float32, for float16.
FORMS_OF_HALVES: dict[Any, Callable[..., Any]] = {
    aten.scatter_add.default: _scatter_add_of_halves,
    aten.native_layer_norm.default: _layer_norm_of_halves,
}


def _layer_norm_of_doubles(
    input: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Any:
    """The norm, its mean and its reciprocal deviation, of which ONNX returns the latter two in float32."""
    if input.dtype != torch.float64:
        return NotImplemented
    dimensions = list(range(-len(shape), 0))
    mean = input.mean(dimensions, keepdim=True)
    centered = input - mean
    reciprocal = ((centered * centered).mean(dimensions, keepdim=True) + eps).rsqrt()
    output = centered * reciprocal
    output = output if weight is None else output * weight
    return output if bias is None else output + bias, mean, reciprocal


#: Operators that ONNX computes in float32 in part -> the same in float64, for float64 only.
FORMS_OF_DOUBLES: dict[Any, Callable[..., Any]] = {aten.native_layer_norm.default: _layer_norm_of_doubles}


def _zeros(input: torch.Tensor, size: Sequence[int] | None = None, *strides: Any, **settings: Any) -> torch.Tensor:
    """Zeros of the size and settings of an operator that makes a tensor like `input`."""
    settings.pop("pin_memory", None)
    return torch.zeros_like(input, **settings) if size is None else input.new_zeros(size, **settings)


def _plain_zeros(size: Sequence[int], *strides: Any, **settings: Any) -> torch.Tensor:
    settings.pop("memory_format", None)
    return torch.zeros(size, **{"dtype": torch.get_default_dtype(), **settings})


#: Operators that return memory that nobody has written -> the same with zeros.
WRITTEN_MEMORY: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default), _zeros),
    **dict.fromkeys((aten.empty.memory_format, aten.empty_strided.default), _plain_zeros),
}

"""The operators of torch that programs in .pt2 files may call, and the checks of their calls.

`lrpfx.lower` writes programs in these operators. Each is a pure function that draws nothing, reads only its arguments, and
raises an error for arguments that it does not take. torch itself checks most of them; guards check the rest in each call.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx

from lrpfx.deploy.manifest import DTYPES
from lrpfx.support.stored_arrays import RefusedError
from lrpfx.support.torch_internals import OpOverload, decomposes_always

Arguments = Mapping[str, Any]

_NAMES = (
    # entry by entry
    """
    abs acos acosh add addcdiv addcmul all angle any asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min complex copysign cos cosh div eq erf erfc
    erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod frac ge gt heaviside hypot isinf isnan le lerp lgamma log log10
    log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt maximum minimum mul nan_to_num
    ne neg polar pow reciprocal remainder round rsqrt rsub sgn sign sin sinc sinh sqrt sub tan trunc where xlogy
    """
    # activations
    """
    _log_softmax _log_softmax_backward_data _prelu_kernel _prelu_kernel_backward _safe_softmax _softmax
    _softmax_backward_data celu elu elu_backward gelu gelu_backward glu hardshrink hardsigmoid hardsigmoid_backward
    hardswish hardswish_backward hardtanh hardtanh_backward leaky_relu leaky_relu_backward mish relu sigmoid
    sigmoid_backward silu softplus softplus_backward softshrink tanh tanh_backward threshold threshold_backward
    """
    # sums, products and statistics
    """
    _cdist_forward _fft_c2c _fft_c2r _fft_r2c _native_batch_norm_legit_no_training addbmm addmm addmv amax amin argmax
    argmin baddbmm bmm convolution convolution_backward count_nonzero cummax cummin cumprod cumsum dot linalg_vector_norm
    kthvalue logcumsumexp logsumexp max mean median min mm mv native_group_norm native_layer_norm norm prod sort std
    std_mean sum topk var var_mean vdot
    """
    # pooling, resampling and padding
    """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    adaptive_max_pool2d adaptive_max_pool3d avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward grid_sampler_2d
    grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward max_pool2d_with_indices max_pool3d_with_indices
    max_unpool2d max_unpool3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    _upsample_nearest_exact1d _upsample_nearest_exact1d_backward _upsample_nearest_exact2d
    _upsample_nearest_exact2d_backward _upsample_nearest_exact3d _upsample_nearest_exact3d_backward upsample_bicubic2d
    upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d
    upsample_linear1d_backward upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward
    upsample_nearest3d upsample_nearest3d_backward upsample_trilinear3d upsample_trilinear3d_backward constant_pad_nd
    reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward reflection_pad3d
    reflection_pad3d_backward replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward
    replication_pad3d replication_pad3d_backward
    """
    # views, copies and selections
    """
    _conj _conj_physical _to_copy _unsafe_view alias as_strided as_strided_scatter cat channel_shuffle clone col2im copy
    detach diag_embed diagonal diagonal_backward diagonal_scatter embedding expand flip im2col lift_fresh_copy permute
    pixel_shuffle pixel_unshuffle repeat roll rot90 select select_backward select_scatter slice slice_backward slice_scatter
    split split_with_sizes squeeze stack sym_size.int t transpose tril triu unbind unfold unfold_backward unsqueeze
    view.default view_as_complex view_as_real _unsafe_index _unsafe_index_put _unsafe_masked_index
    _unsafe_masked_index_put_accumulate bucketize gather index index_add index_copy index_fill index_put index_select isin
    masked_fill masked_scatter scatter scatter_add scatter_reduce searchsorted
    """
    # checks of values, without results
    """
    _assert_async.msg
    """
    # new tensors
    """
    arange fill full full_like linspace new_full new_ones new_zeros ones ones_like scalar_tensor zero zeros zeros_like
    """
)
#: Names of ATen operators, with all overloads but those that are only functions of other operators; or of one overload.
NAMES = frozenset(_NAMES.split())


@functools.cache
def is_allowed(operator: OpOverload) -> bool:
    """Whether a program may call an operator."""
    schema = operator._schema
    if str(operator).removeprefix("aten.") in NAMES:
        return True
    of_tensors = any("Tensor" in str(value.type) for value in (*schema.arguments, *schema.returns))  # not one of TorchScript
    is_named = schema.name.startswith("aten::") and schema.name.removeprefix("aten::") in NAMES
    return is_named and of_tensors and not schema.is_mutable and not decomposes_always(operator)


def allowed() -> Iterator[OpOverload]:
    """All operators that a program may call."""
    for name in sorted(NAMES):
        packet = getattr(torch.ops.aten, name.partition(".")[0])
        yield from (one for one in (getattr(packet, each) for each in packet.overloads()) if is_allowed(one))


# --- calls ------------------------------------------------------------------------------------------------------------------

_DTYPES = {getattr(torch, name) for name in (*DTYPES, "complex64", "complex128")}
#: Type of an argument -> whether a program may state a value. torch takes any number for these types, and some end the process.
_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "ScalarType": lambda value: isinstance(value, torch.dtype) and value in _DTYPES,
    "Layout": lambda value: value is torch.strided,
    "MemoryFormat": lambda value: isinstance(value, torch.memory_format),
    "Device": lambda value: isinstance(value, torch.device),
}


def check_calls(graph: fx.Graph) -> None:
    """Check the settings of calls, such as dtypes. Raises `RefusedError`."""
    for node in graph.nodes:
        if isinstance(node.target, OpOverload):
            problem = problem_of_call(node.target, node.args, node.kwargs)
            if problem is not None:
                raise RefusedError(f"its program calls {node.target} with {problem}")


def problem_of_call(operator: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any]) -> str | None:
    """The first setting of a call with a value that a program may not state; None if there is none."""
    given = _bound(operator, args, keywords)
    for argument in operator._schema.arguments:
        value = given.get(argument.name)
        fits = (fits for name, fits in _SETTINGS.items() if name in str(argument.real_type))
        if value is not None and not all(fit(value) for fit in fits):
            return f"{value!r} as {argument.name}"
    return None


def guarded(operator: OpOverload) -> Callable[..., Any]:
    """An operator with the check of its arguments that torch lacks, or the operator itself if it lacks none."""
    name = operator._schema.name.removeprefix("aten::")
    guard = next((guard for pattern, guard in GUARDS.items() if fnmatchcase(name, pattern)), None)
    if guard is None:
        return operator

    # not `functools.wraps`: fx writes functions of torch by their names, and would call the operator itself
    def call(*args: Any, **keywords: Any) -> Any:
        if not guard(_bound(operator, args, keywords)):
            raise ValueError(f"{operator} does not take these arguments")
        return operator(*args, **keywords)

    return call


def bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation on sizes. Larger numbers than sizes, which only a crafted file computes, may take time without end."""

    def call(*numbers: Any) -> Any:
        fits = all(isinstance(one, (int, float)) and abs(one) < 2**63 for one in numbers)
        if not fits or (function is operator.pow and numbers[1] > 64):
            raise ValueError(f"{function.__name__} does not take these arguments")
        return function(*numbers)

    return call


def _bound(operator: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    return {**{one.name: value for one, value in zip(operator._schema.arguments, args, strict=False)}, **keywords}


def _fits_transform(given: Arguments) -> bool:
    """Whether a Fourier transform has distinct dimensions of its input and, if its result is real, a size that fits."""
    shape, dimensions = given["self"].shape, given["dim"]
    if not dimensions or not all(0 <= one < len(shape) for one in dimensions) or len(set(dimensions)) < len(dimensions):
        return False
    size = given.get("last_dim_size")
    return size is None or (size >= 1 and size // 2 + 1 == shape[dimensions[-1]])


def _fits_scales(given: Arguments) -> bool:
    """Whether the factors of resampling are those of its sizes."""
    results = given["output_size"]
    sizes = given["input_size"][2:] if "input_size" in given else given.get("self", given.get("input")).shape[2:]
    scales = [value for name, value in given.items() if name.startswith("scales")]
    if len(sizes) != len(results) or len(scales) > len(results):
        return False
    pairs = zip(sizes, results, [*scales, *[None] * (len(results) - len(scales))], strict=True)
    return all(
        scale is None or (scale > 0 and abs(size * scale - result) <= 1 + 1e-3 * result) for size, result, scale in pairs
    )


def _fits_padding(given: Arguments) -> bool:
    """Whether padding cuts off less than there is, and a gradient of the padded value has its shape."""
    value, padding = given["self"], given["padding"]
    pairs = list(zip(padding[::2], padding[1::2], strict=True))
    sizes = value.shape[::-1][: len(pairs)]
    if len(pairs) >= value.ndim or not all(
        -size < number < 2**24 for size, pair in zip(sizes, pairs, strict=True) for number in pair
    ):
        return False
    padded = [*[0] * (value.ndim - len(pairs)), *(before + after for before, after in reversed(pairs))]
    shape = [size + more for size, more in zip(value.shape, padded, strict=True)]
    return "grad_output" not in given or list(given["grad_output"].shape) == shape


def _fits_reflection(given: Arguments) -> bool:
    """Whether a padded value has the entries that its padding reflects, and the gradient its shape."""
    sizes = given["self"].shape[::-1]
    return _fits_padding(given) and all(number < sizes[place // 2] for place, number in enumerate(given["padding"]))


def _fits_pooling(given: Arguments) -> bool:
    """Whether the gradient of an adaptive average has its sizes other than those of the image, and no size is 0."""
    gradient, value = given["grad_output"], given["self"]
    return gradient.ndim == value.ndim and 0 not in (*gradient.shape, *value.shape) and gradient.shape[:2] == value.shape[:2]


def _fits_kernel(given: Arguments) -> bool:
    """Whether the numbers of a kernel are small enough that positions of its entries can be computed."""
    numbers = [number for name in ("kernel_size", "stride", "padding", "dilation") for number in given.get(name) or ()]
    return all(0 <= number < 2**24 for number in numbers)


def _fits_average(given: Arguments) -> bool:
    """Whether the gradient of averages in windows has the number of samples of the averaged value."""
    gradient, value = given["grad_output"], given["self"]
    return _fits_kernel(given) and gradient.ndim == value.ndim > 0 and gradient.shape[0] == value.shape[0]


def _fits_softmax(given: Arguments) -> bool:
    """Whether the gradient of a softmax has the shape of its result, and no size is 0."""
    return given["grad_output"].shape == given["output"].shape and 0 not in given["output"].shape


def _fits_channels(given: Arguments) -> bool:
    """Whether the statistics and parameters of a batch norm have one entry for each channel of its input."""
    channels = given["input"].shape[1:2]
    return bool(channels) and all(
        given[name] is None or given[name].shape == channels for name in ("weight", "bias", "running_mean", "running_var")
    )


def _fits_division(given: Arguments) -> bool:
    """Whether a truncated division of integers does not divide the least one by -1, which ends the process."""
    if given.get("rounding_mode") != "trunc":
        return True
    dtype = torch.result_type(given["self"], given["other"])
    if dtype not in (torch.int32, torch.int64):
        return True
    dividend, divisor = (torch.as_tensor(given[name]).to(dtype) for name in ("self", "other"))
    return not ((dividend == torch.iinfo(dtype).min) & (divisor == -1)).any()


def _fits_grid(given: Arguments) -> bool:
    """Whether the gradient of resampling at the places of a grid has the shape of the result, and modes exist."""
    gradient, value, grid = given["grad_output"], given["input"], given["grid"]
    return (
        gradient.ndim == value.ndim == grid.ndim
        and len(value) == len(grid)
        and grid.shape[-1] == value.ndim - 2
        and (*gradient.shape[:2], *gradient.shape[2:]) == (*value.shape[:2], *grid.shape[1:-1])
        and 0 not in (*value.shape, *grid.shape)
        and gradient.dtype == value.dtype == grid.dtype
        and given["interpolation_mode"] in (0, 1, 2)
        and given["padding_mode"] in (0, 1, 2)
    )


def _fits_range(given: Arguments) -> bool:
    """Whether the numbers of a range are so small that its length can be computed."""
    return all(abs(given.get(name, 0)) < 2**61 for name in ("start", "end", "step"))


def _fits_windows(given: Arguments) -> bool:
    """Whether the gradient of windows has the shape that they have in an input of this size."""
    shape, dimension, size, step = list(given["input_sizes"]), given["dim"], given["size"], given["step"]
    if step < 1 or not -len(shape) <= dimension < len(shape) or not 0 <= size <= shape[dimension]:
        return False
    shape[dimension] = (shape[dimension] - size) // step + 1
    return list(given["grad_in"].shape) == [*shape, size]


def _fits_strides(given: Arguments) -> bool:
    """Whether a view lies within the entries of a tensor, which may be a part of a larger one."""
    value = given["self"]
    offset = given.get("storage_offset")
    offset = value.storage_offset() if offset is None else offset
    last = value.storage_offset() + _reach(value.shape, value.stride())
    return bool(value.storage_offset() <= offset <= last - _reach(given["size"], given["stride"]))


def _reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The distance from the first to the last entry of a tensor with these strides."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if 0 not in sizes else 0


#: Pattern of an operator's name -> whether it takes these arguments.
GUARDS: dict[str, Callable[[Arguments], bool]] = {
    "as_strided*": _fits_strides,
    "_fft_*": _fits_transform,
    "*upsample_*": _fits_scales,
    "reflection_pad?d*": _fits_reflection,
    "*_pad?d*": _fits_padding,
    "_adaptive_avg_pool?d_backward": _fits_pooling,
    "avg_pool?d_backward": _fits_average,
    "*_pool?d*": _fits_kernel,
    "im2col": _fits_kernel,
    "col2im": _fits_kernel,
    "*softmax_backward_data": _fits_softmax,
    "gelu_backward": lambda given: given["grad_output"].shape == given["self"].shape,
    "_native_batch_norm_legit_no_training": _fits_channels,
    "grid_sampler_?d_backward": _fits_grid,
    "div": _fits_division,
    "arange": _fits_range,
    "unfold_backward": _fits_windows,
}

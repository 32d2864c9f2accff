"""The operator table: what every callable that a front end can emit means.

One row per operator: its kind, the names of its arguments in order, which of them carry data, parameters or buffers, and
every spelling (function, method, operator, in-place form, ATen overload) under which it can appear in a graph. The compiler
reads the table to normalize a graph, to build layers and to tell neutral operations; the tests read it for samples.
"""

import ast
import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from . import layer as layers
from . import types
from .functions import (
    Adjoint,
    Detached,
    Function,
    Uniform,
    addition_adjoint,
    attention_bias,
    conv1d_with_bias_map,
    conv2d_with_bias_map,
    conv3d_with_bias_map,
    convolution_adjoint,
    convolution_uniform,
    copied,
    detached_group_norm,
    detached_instance_norm,
    detached_layer_norm,
    divided_by,
    gate,
    linear_adjoint,
    linear_uniform,
    masked_softmax,
    quotient,
    require_matrix,
    thresholded_relu,
)


@dataclass(frozen=True)
class Operator:
    """A row of the operator table."""

    name: str
    kind: type[types.Kind]
    function: Function | None = None  # the canonical spelling; None: every spelling keeps its own function
    arguments: dict[str, Any] = field(default_factory=dict)  # names in order -> default, `REQUIRED` where there is none
    data: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()  # learned; parameter modifiers apply to them
    buffers: tuple[str, ...] = ()  # statistics; no modifier applies to them
    modules: tuple[type, ...] = ()  # torch.nn classes that are spellings of this operator
    view: bool = False  # the result may share memory with the first argument
    adjoint: Adjoint | None = None  # the transposed map, where the operator is linear in its data
    uniform: Uniform | None = None  # its output for an input that is the same everywhere, likewise
    reflected: str = ""  # the row for a call whose first argument is a number: 1 - x is rsub(x, 1)
    detached: Detached | None = None  # the operator with its scale held constant, where it normalizes

    @property
    def neutral(self) -> bool:
        """Whether the operator needs no rule: it moves values, the winner takes all, or relevance is reported behind it."""
        return issubclass(self.kind, (types.Neutral, types.MaxPool, types.Embedding))

    @property
    def shares_with_constants(self) -> bool:
        """Whether a parameter or constant among the data takes its share of the relevance, as in x + position."""
        return not issubclass(self.kind, (types.Product, types.MatMul))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the arguments that are tensors; they lead the canonical argument list, in its order."""
        return self.data + self.parameters + self.buffers


@dataclass(frozen=True)
class Spelling:
    """One way to write an operator."""

    operator: Operator
    arguments: tuple[str, ...]  # names of the positional arguments in the order of this spelling
    inplace: bool = False


REQUIRED = object()
_functions: dict[Function, Spelling] = {}
_foreign: dict[str, Spelling] = {}  # functions of libraries that need not be installed, by module and name
_methods: dict[str, Spelling] = {}
_operators: dict[str, Operator] = {}

#: Results that are host values or depend on shapes alone, never on the values of a tensor.
METADATA_METHODS = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_contiguous", "get_device"}
    | {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
)
METADATA_FUNCTIONS: frozenset[Any] = frozenset(
    {torch._assert, torch.numel, torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like}
    | {torch.sym_max, torch.sym_min, torch.sym_float, torch.sym_int, torch.sym_not, torch._check, isinstance}
    | {
        getattr(getattr(torch.ops.aten, name), overload)
        for name, overload in [
            ("sym_size", "int"),
            ("sym_numel", "default"),
            ("sym_stride", "int"),
            ("zeros_like", "default"),
            ("ones_like", "default"),
            ("empty_like", "default"),
            ("full_like", "default"),
            ("new_zeros", "default"),
            ("new_ones", "default"),
            ("new_full", "default"),
            ("new_empty", "default"),
            ("_assert_tensor_metadata", "default"),
        ]
    }
)
METADATA_ATTRIBUTES = frozenset(
    {"shape", "is_nested", "dtype", "device", "ndim", "is_cuda", "requires_grad", "layout", "itemsize"}
)


def lookup(function: Function) -> Spelling | None:
    """The spelling behind a callable, or None if the table does not list it."""
    try:
        spelling = _functions.get(function)
    except TypeError:  # unhashable callables are nobody's spelling
        return None
    if isinstance(function, type) and dataclasses.is_dataclass(function):
        return Spelling(_operators["container"], ())
    return spelling or _foreign.get(f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}")


def lookup_method(name: str) -> Spelling | None:
    """The spelling behind a tensor method, or None if the table does not list it."""
    return _methods.get(name)


def operator_named(name: str | None) -> Operator | None:
    """The row called `name`, or None."""
    return None if name is None else _operators.get(name)


def is_neutral(name: str | None) -> bool:
    """Whether the row called `name` exists and needs no rule."""
    operator = operator_named(name)
    return operator is not None and operator.neutral


def all_operators() -> tuple[Operator, ...]:
    """Every row of the table."""
    return tuple(_operators.values())


def module_classes() -> tuple[type, ...]:
    """All torch.nn classes that are spellings of some operator."""
    return tuple({module for row in _operators.values() for module in row.modules})


def _aten(names: str) -> list[Function]:
    overloads = []
    for name in names.split():
        packet, overload = name.split(".")
        overloads.append(getattr(getattr(torch.ops.aten, packet), overload))
    return overloads


def _parse_arguments(text: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for word in text.split():
        name, _, default = word.partition("=")
        arguments[name] = ast.literal_eval(default) if default else REQUIRED
    return arguments


def _row(
    name: str,
    kind: type[types.Kind],
    function: Function | None = None,
    arguments: str = "",
    *,
    data: str = "input",
    parameters: str = "",
    buffers: str = "",
    modules: Sequence[type] = (),
    functions: Sequence[Function] = (),
    inplace: Sequence[Function] = (),
    methods: str = "",
    inplace_methods: str = "",
    aten: str = "",
    inplace_aten: str = "",
    reordered: Sequence[tuple[Function, str]] = (),
    view: bool = False,
    adjoint: Adjoint | None = None,
    uniform: Uniform | None = None,
    reflected: str = "",
    detached: Detached | None = None,
    foreign: str = "",
) -> None:
    """Add a row.

    `reordered` lists spellings whose positional arguments come in another order; `foreign` functions of other libraries, by
    module and name.
    """
    parsed = _parse_arguments(arguments)
    row = Operator(
        name,
        kind,
        function,
        parsed,
        tuple(data.split()),
        tuple(parameters.split()),
        tuple(buffers.split()),
        tuple(modules),
        view,
        adjoint,
        uniform,
        reflected,
        detached,
    )
    _operators[name] = row
    order = tuple(parsed)
    for spelled in ([function] if function else []) + list(functions) + _aten(aten):
        _functions[spelled] = Spelling(row, order)
    for spelled in list(inplace) + _aten(inplace_aten):
        _functions[spelled] = Spelling(row, order, inplace=True)
    for spelled, text in reordered:
        _functions[spelled] = Spelling(row, tuple(text.split()))
    for spelled_as in foreign.split():
        _foreign[spelled_as] = Spelling(row, order)
    for method in methods.split():
        _methods[method] = Spelling(row, order)
    for method in inplace_methods.split():
        _methods[method] = Spelling(row, order, inplace=True)


# --- linear layers ---------------------------------------------------------------------------------------------------------

_row(
    "linear",
    types.Linear,
    functional.linear,
    "input weight bias=None",
    parameters="weight bias",
    modules=[nn.Linear],
    aten="linear.default",
    adjoint=linear_adjoint,
    uniform=linear_uniform,
)
_convolutions: list[tuple[int, Function, Function, type, type]] = [
    (1, torch.conv1d, torch.conv_transpose1d, nn.Conv1d, nn.ConvTranspose1d),
    (2, torch.conv2d, torch.conv_transpose2d, nn.Conv2d, nn.ConvTranspose2d),
    (3, torch.conv3d, torch.conv_transpose3d, nn.Conv3d, nn.ConvTranspose3d),
]
for _dimensions, _convolution, _transposed, _module, _transposed_module in _convolutions:
    _row(
        f"conv{_dimensions}d",
        types.ConvolutionStandard,
        _convolution,
        "input weight bias=None stride=1 padding=0 dilation=1 groups=1",
        parameters="weight bias",
        modules=[_module],
        aten=f"conv{_dimensions}d.default conv{_dimensions}d.padding",
        adjoint=convolution_adjoint(_dimensions, transposed=False),
        uniform=convolution_uniform(_dimensions, transposed=False, function=_convolution),
    )
    _suffix = "default" if _dimensions == 1 else "input"
    _row(
        f"conv_transpose{_dimensions}d",
        types.ConvolutionTranspose,
        _transposed,
        "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1",
        parameters="weight bias",
        modules=[_transposed_module],
        aten=f"conv_transpose{_dimensions}d.{_suffix}",
        adjoint=convolution_adjoint(_dimensions, transposed=True),
        uniform=convolution_uniform(_dimensions, transposed=True, function=_transposed),
    )


for _dimensions, _mapped, _module in [
    (1, conv1d_with_bias_map, nn.Conv1d),
    (2, conv2d_with_bias_map, nn.Conv2d),
    (3, conv3d_with_bias_map, nn.Conv3d),
]:
    _row(
        f"conv{_dimensions}d_with_bias_map",
        types.ConvolutionStandard,
        _mapped,
        "input weight bias=None stride=1 padding=0 dilation=1 groups=1",
        parameters="weight bias",
        modules=[_module],
        adjoint=convolution_adjoint(_dimensions, transposed=False),
        uniform=convolution_uniform(_dimensions, transposed=False, function=_mapped),
    )

# --- batch normalization ---------------------------------------------------------------------------------------------------

_native_batch_norm = "input weight bias running_mean running_var training momentum eps cudnn_enabled"
_row(
    "batch_norm",
    types.BatchNorm,
    functional.batch_norm,
    "input running_mean running_var weight=None bias=None training=False momentum=0.1 eps=1e-05",
    parameters="weight bias",
    buffers="running_mean running_var",
    modules=[nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d],
    reordered=[(torch.batch_norm, _native_batch_norm), (torch.ops.aten.batch_norm.default, _native_batch_norm)],
)

# --- activations -----------------------------------------------------------------------------------------------------------


def _activation(
    name: str, function: Function, arguments: str = "input", modules: Sequence[type] = (), **spellings: Any
) -> None:
    _row(name, types.Activation, function, arguments, modules=modules, **spellings)


_f = functional
_activation(
    "relu",
    _f.relu,
    modules=[nn.ReLU],
    functions=[torch.relu],
    inplace=[torch.relu_, _f.relu_],
    methods="relu",
    inplace_methods="relu_",
    aten="relu.default",
    inplace_aten="relu_.default",
)
_activation(
    "relu6",
    _f.relu6,
    modules=[nn.ReLU6],
    aten="relu6.default",
    inplace_aten="relu6_.default",
)
_activation(
    "hardtanh",
    _f.hardtanh,
    "input min_val=-1.0 max_val=1.0",
    modules=[nn.Hardtanh, nn.ReLU6],
    inplace=[_f.hardtanh_],
    aten="hardtanh.default",
    inplace_aten="hardtanh_.default",
)
_activation(
    "clamp",
    torch.clamp,
    "input min=None max=None",
    functions=[torch.clip],
    inplace=[torch.clamp_, torch.clip_],
    methods="clamp clip",
    inplace_methods="clamp_ clip_",
    aten="clamp.default",
    inplace_aten="clamp_.default",
)
_activation(
    "clamp_min",
    torch.clamp_min,
    "input min",
    inplace=[torch.clamp_min_],
    methods="clamp_min",
    inplace_methods="clamp_min_",
    aten="clamp_min.default",
    inplace_aten="clamp_min_.default",
)
_activation(
    "elu",
    _f.elu,
    "input alpha=1.0",
    modules=[nn.ELU],
    inplace=[_f.elu_],
    aten="elu.default",
    inplace_aten="elu_.default",
)
_activation(
    "selu",
    _f.selu,
    modules=[nn.SELU],
    functions=[torch.selu],
    inplace=[torch.selu_, _f.selu_],
    aten="selu.default",
    inplace_aten="selu_.default",
)
_activation(
    "celu",
    _f.celu,
    "input alpha=1.0",
    modules=[nn.CELU],
    functions=[torch.celu],
    inplace=[torch.celu_, _f.celu_],
    aten="celu.default",
    inplace_aten="celu_.default",
)
_activation("gelu", _f.gelu, "input approximate='none'", modules=[nn.GELU], aten="gelu.default")
_activation(
    "sigmoid",
    torch.sigmoid,
    modules=[nn.Sigmoid],
    functions=[_f.sigmoid, torch.special.expit],
    inplace=[torch.sigmoid_],
    methods="sigmoid",
    inplace_methods="sigmoid_",
    aten="sigmoid.default",
    inplace_aten="sigmoid_.default",
)
_activation(
    "hardsigmoid",
    _f.hardsigmoid,
    modules=[nn.Hardsigmoid],
    aten="hardsigmoid.default",
    inplace_aten="hardsigmoid_.default",
)
_activation("silu", _f.silu, modules=[nn.SiLU], aten="silu.default", inplace_aten="silu_.default")
_activation(
    "hardswish",
    _f.hardswish,
    modules=[nn.Hardswish],
    aten="hardswish.default",
    inplace_aten="hardswish_.default",
)
_activation("mish", _f.mish, modules=[nn.Mish], aten="mish.default", inplace_aten="mish_.default")
_activation(
    "tanh",
    torch.tanh,
    modules=[nn.Tanh],
    functions=[_f.tanh],
    inplace=[torch.tanh_],
    methods="tanh",
    inplace_methods="tanh_",
    aten="tanh.default",
    inplace_aten="tanh_.default",
)
_activation("tanhshrink", _f.tanhshrink, modules=[nn.Tanhshrink])
_activation("softsign", _f.softsign, modules=[nn.Softsign])
_activation("softplus", _f.softplus, "input beta=1.0 threshold=20.0", modules=[nn.Softplus], aten="softplus.default")
_activation("softshrink", _f.softshrink, "input lambd=0.5", modules=[nn.Softshrink], aten="softshrink.default")
_activation(
    "hardshrink",
    torch.hardshrink,
    "input lambd=0.5",
    modules=[nn.Hardshrink],
    functions=[_f.hardshrink],
    methods="hardshrink",
    aten="hardshrink.default",
)
_activation("logsigmoid", _f.logsigmoid, modules=[nn.LogSigmoid], aten="log_sigmoid.default")
_activation(
    "leaky_relu",
    _f.leaky_relu,
    "input negative_slope=0.01",
    modules=[nn.LeakyReLU],
    inplace=[_f.leaky_relu_],
    aten="leaky_relu.default",
    inplace_aten="leaky_relu_.default",
)
_activation(
    "rrelu",
    _f.rrelu,
    "input lower=0.125 upper=0.3333333333333333 training=False",
    modules=[nn.RReLU],
    functions=[torch.rrelu],
    inplace=[torch.rrelu_, _f.rrelu_],
    aten="rrelu.default",
    inplace_aten="rrelu_.default",
)
_activation(
    "threshold",
    _f.threshold,
    "input threshold value",
    modules=[nn.Threshold],
    functions=[torch.threshold, vars(_f)["_threshold"]],
    inplace=[torch.threshold_, vars(_f)["threshold_"]],
    aten="threshold.default",
    inplace_aten="threshold_.default",
)
_activation(
    "prelu",
    torch.prelu,
    "input weight",
    modules=[nn.PReLU],
    functions=[_f.prelu],
    methods="prelu",
    parameters="weight",
    aten="prelu.default",
)

for _name in [
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "sqrt",
    "rsqrt",
    "abs",
    "square",
    "erf",
    "sin",
    "cos",
    "atan",
    "reciprocal",
]:
    _elementwise: Function = getattr(torch, _name)
    _activation(
        _name,
        _elementwise,
        inplace=[getattr(torch, f"{_name}_")],
        methods=_name,
        inplace_methods=f"{_name}_",
        aten=f"{_name}.default",
        inplace_aten=f"{_name}_.default",
    )
_activation(
    "pow",
    torch.pow,
    "input exponent",
    functions=[operator.pow],
    inplace=[operator.ipow],
    methods="pow __pow__",
    inplace_methods="pow_ __ipow__",
    aten="pow.Tensor_Scalar pow.Tensor_Tensor",
    inplace_aten="pow_.Scalar",
)
_activation(
    "log_softmax",
    torch.log_softmax,
    "input dim dtype=None",
    modules=[nn.LogSoftmax],
    methods="log_softmax",
    aten="log_softmax.int",
    reordered=[(_f.log_softmax, "input dim _stacklevel dtype")],
)


_activation("thresholded_relu", thresholded_relu, "input scale shift", modules=[nn.ReLU], buffers="scale shift")

# --- pooling ---------------------------------------------------------------------------------------------------------------

_average_pools: list[tuple[int, Function, Function, str, type, type]] = [
    (1, _f.avg_pool1d, _f.adaptive_avg_pool1d, "", nn.AvgPool1d, nn.AdaptiveAvgPool1d),
    (2, _f.avg_pool2d, _f.adaptive_avg_pool2d, " divisor_override=None", nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    (3, _f.avg_pool3d, _f.adaptive_avg_pool3d, " divisor_override=None", nn.AvgPool3d, nn.AdaptiveAvgPool3d),
]
for _dimensions, _pool, _adaptive, _extra, _module, _adaptive_module in _average_pools:
    _row(
        f"avg_pool{_dimensions}d",
        types.AvgPool,
        _pool,
        "input kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True" + _extra,
        modules=[_module],
        aten=f"avg_pool{_dimensions}d.default",
    )
    _row(
        f"adaptive_avg_pool{_dimensions}d",
        types.AvgPool,
        _adaptive,
        "input output_size",
        modules=[_adaptive_module],
        aten=f"adaptive_avg_pool{_dimensions}d.default",
    )
_row(
    "mean",
    types.AvgPool,
    torch.mean,
    "input dim=None keepdim=False dtype=None",
    methods="mean",
    aten="mean.default mean.dim",
)
_max_pools: list[tuple[int, Function, Function, Function, Function, type, type]] = [
    (
        1,
        _f.max_pool1d,
        _f.max_pool1d_with_indices,
        _f.adaptive_max_pool1d,
        _f.adaptive_max_pool1d_with_indices,
        nn.MaxPool1d,
        nn.AdaptiveMaxPool1d,
    ),
    (
        2,
        _f.max_pool2d,
        _f.max_pool2d_with_indices,
        _f.adaptive_max_pool2d,
        _f.adaptive_max_pool2d_with_indices,
        nn.MaxPool2d,
        nn.AdaptiveMaxPool2d,
    ),
    (
        3,
        _f.max_pool3d,
        _f.max_pool3d_with_indices,
        _f.adaptive_max_pool3d,
        _f.adaptive_max_pool3d_with_indices,
        nn.MaxPool3d,
        nn.AdaptiveMaxPool3d,
    ),
]
for _dimensions, _pool, _pool_indices, _adaptive, _adaptive_indices, _module, _adaptive_module in _max_pools:
    _plain: list[Function] = [getattr(torch, f"max_pool{_dimensions}d")]
    _row(
        f"max_pool{_dimensions}d",
        types.MaxPool,
        _pool,
        "input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False",
        modules=[_module],
        functions=_plain,
        aten=f"max_pool{_dimensions}d.default",
    )
    _row(
        f"max_pool{_dimensions}d_with_indices",
        types.MaxPool,
        functions=[_pool_indices],
        aten=f"max_pool{_dimensions}d_with_indices.default",
    )
    _row(
        f"adaptive_max_pool{_dimensions}d",
        types.MaxPool,
        _adaptive,
        "input output_size return_indices=False",
        modules=[_adaptive_module],
    )
    _row(
        f"adaptive_max_pool{_dimensions}d_with_indices",
        types.MaxPool,
        functions=[_adaptive_indices],
        aten=f"adaptive_max_pool{_dimensions}d.default",
    )

# --- sums ------------------------------------------------------------------------------------------------------------------

_row(
    "add",
    types.Sum,
    torch.add,
    "input other alpha=1",
    data="input other",
    modules=[layers.Sum],
    functions=[operator.add],
    inplace=[operator.iadd],
    methods="add __add__ __radd__",
    inplace_methods="add_ __iadd__",
    aten="add.Tensor add.Scalar",
    inplace_aten="add_.Tensor add_.Scalar",
    adjoint=addition_adjoint,
    reflected="add",
)
_row(
    "sub",
    types.Sum,
    torch.sub,
    "input other alpha=1",
    data="input other",
    functions=[operator.sub, torch.subtract],
    inplace=[operator.isub],
    methods="sub subtract __sub__",
    inplace_methods="sub_ subtract_ __isub__",
    aten="sub.Tensor sub.Scalar",
    inplace_aten="sub_.Tensor sub_.Scalar",
    reflected="rsub",
)
_row(
    "rsub",
    types.Sum,
    torch.rsub,
    "input other alpha=1",
    data="input other",
    methods="__rsub__",
    aten="rsub.Tensor rsub.Scalar",
)
_row(
    "sum",
    types.Sum,
    torch.sum,
    "input dim=None keepdim=False dtype=None",
    modules=[layers.Sum],
    methods="sum",
    aten="sum.default sum.dim_IntList",
)

_row(
    "cumsum",
    types.Sum,
    torch.cumsum,
    "input dim dtype=None",
    methods="cumsum",
    aten="cumsum.default",
)

for _name, _overloads in [("std", "default dim correction"), ("var", "default dim correction")]:
    _row(
        _name,
        types.Statistic,
        functions=[getattr(torch, _name)],
        methods=_name,
        aten=" ".join(f"{_name}.{overload}" for overload in _overloads.split()),
    )
_row(
    "norm",
    types.Statistic,
    functions=[torch.norm, torch.linalg.norm, torch.linalg.vector_norm],
    methods="norm",
    aten="linalg_vector_norm.default linalg_norm.default norm.Scalar norm.ScalarOpt_dim",
)
_row(
    "detach",
    types.Detach,
    functions=[torch.detach],
    methods="detach",
    inplace_methods="detach_",
    aten="detach.default",
    inplace_aten="detach_.default",
    view=True,
)

# --- products ----------------------------------------------------------------------------------------------------------------

_row(
    "mul",
    types.Product,
    torch.mul,
    "input other",
    data="input other",
    functions=[operator.mul, torch.multiply],
    inplace=[operator.imul],
    methods="mul multiply __mul__ __rmul__",
    inplace_methods="mul_ multiply_ __imul__",
    aten="mul.Tensor mul.Scalar",
    inplace_aten="mul_.Tensor mul_.Scalar",
    reflected="mul",
)
_row(
    "div",
    types.Product,
    torch.div,
    "input other rounding_mode=None",
    data="input other",
    functions=[operator.truediv, torch.divide, torch.true_divide],
    inplace=[operator.itruediv],
    methods="div divide true_divide __truediv__",
    inplace_methods="div_ divide_ true_divide_ __itruediv__",
    aten="div.Tensor div.Scalar",
    inplace_aten="div_.Tensor div_.Scalar",
    reflected="divided_by",
)


_row("divided_by", types.Activation, divided_by, "input other", methods="__rtruediv__")
_row(
    "neg", types.Product, torch.neg, "input", functions=[operator.neg], inplace=[torch.neg_], methods="neg", aten="neg.default"
)
_row("gate", types.Gate, gate, "input other", data="input other")
_row("quotient", types.Gate, quotient, "input other", data="input other")
_row(
    "matmul",
    types.MatMul,
    torch.matmul,
    "input other",
    data="input other",
    functions=[operator.matmul, torch.bmm, torch.mm, torch.mv],
    methods="matmul __matmul__ bmm mm mv",
    aten="matmul.default bmm.default mm.default mv.default",
)
_row("einsum", types.MatMul, functions=[torch.einsum], aten="einsum.default")

# --- normalization with the sample's own statistics ----------------------------------------------------------------------


_row(
    "layer_norm",
    types.LayerNorm,
    _f.layer_norm,
    "input normalized_shape weight=None bias=None eps=1e-05",
    parameters="weight bias",
    modules=[nn.LayerNorm],
    reordered=[
        (torch.layer_norm, "input normalized_shape weight bias eps cudnn_enable"),
        (torch.ops.aten.layer_norm.default, "input normalized_shape weight bias eps cudnn_enable"),
    ],
    detached=detached_layer_norm,
)
_row(
    "group_norm",
    types.LayerNorm,
    _f.group_norm,
    "input num_groups weight=None bias=None eps=1e-05",
    parameters="weight bias",
    modules=[nn.GroupNorm],
    reordered=[
        (torch.group_norm, "input num_groups weight bias eps cudnn_enabled"),
        (torch.ops.aten.group_norm.default, "input num_groups weight bias eps cudnn_enabled"),
    ],
    detached=detached_group_norm,
)
_native_instance_norm = "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled"
_row(
    "instance_norm",
    types.LayerNorm,
    _f.instance_norm,
    "input running_mean=None running_var=None weight=None bias=None use_input_stats=True momentum=0.1 eps=1e-05",
    parameters="weight bias",
    buffers="running_mean running_var",
    modules=[nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d],
    reordered=[
        (torch.instance_norm, _native_instance_norm),
        (torch.ops.aten.instance_norm.default, _native_instance_norm),
    ],
    detached=detached_instance_norm,
)
_row(
    "rms_norm",
    types.RMSNorm,
    _f.rms_norm,
    "input normalized_shape weight=None eps=None",
    parameters="weight",
    modules=[nn.RMSNorm],
    functions=[torch.rms_norm],
    aten="rms_norm.default",
)
_row("normalize", types.RMSNorm, _f.normalize, "input p=2.0 dim=1 eps=1e-12 out=None")
_row(
    "local_response_norm",
    types.RMSNorm,
    _f.local_response_norm,
    "input size alpha=0.0001 beta=0.75 k=1.0",
    modules=[nn.LocalResponseNorm],
)

# --- softmax, attention, look-up, resizing ----------------------------------------------------------------------------------

_row(
    "softmax",
    types.Softmax,
    _f.softmax,  # which, unlike torch.softmax, takes no dimension for the one that it always took
    "input dim=None dtype=None",
    modules=[nn.Softmax],
    functions=[torch.softmax],
    methods="softmax",
    aten="softmax.int",
    reordered=[(_f.softmax, "input dim _stacklevel dtype")],
)


_row(
    "masked_softmax",
    types.Softmax,
    masked_softmax,
    "input dim",
    reordered=[(torch.ops.aten._safe_softmax.default, "input dim dtype")],
)
_row(
    "scaled_dot_product_attention",
    types.MatMul,
    _f.scaled_dot_product_attention,
    "query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False",
    data="query key value attn_mask",
    aten="scaled_dot_product_attention.default",
)
_row(
    "addmm",
    types.MatMul,
    torch.addmm,
    "input mat1 mat2 beta=1 alpha=1",
    data="input mat1 mat2",
    methods="addmm",
    aten="addmm.default",
)
_row(
    "baddbmm",
    types.MatMul,
    torch.baddbmm,
    "input batch1 batch2 beta=1 alpha=1",
    data="input batch1 batch2",
    methods="baddbmm",
    aten="baddbmm.default",
)
for _name in ("addcmul", "addcdiv"):
    _row(
        _name,
        types.Product,
        getattr(torch, _name),
        "input tensor1 tensor2 value=1",
        data="input tensor1 tensor2",
        methods=_name,
        inplace_methods=f"{_name}_",
        aten=f"{_name}.default",
        inplace_aten=f"{_name}_.default",
    )
_row(
    "lerp",
    types.Sum,
    torch.lerp,
    "input end weight",
    data="input end weight",
    methods="lerp",
    aten="lerp.Tensor lerp.Scalar",
)
_row(
    "cosine_similarity",
    types.Product,
    _f.cosine_similarity,
    "x1 x2 dim=1 eps=1e-08",
    data="x1 x2",
    modules=[nn.CosineSimilarity],
    aten="cosine_similarity.default",
)
_row("glu", types.Gate, _f.glu, "input dim=-1", modules=[nn.GLU], aten="glu.default")
_row(
    "embedding",
    types.Embedding,
    _f.embedding,
    "input weight padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False sparse=False",
    parameters="weight",
    modules=[nn.Embedding],
    reordered=[
        (torch.embedding, "weight input padding_idx scale_grad_by_freq sparse"),
        (torch.ops.aten.embedding.default, "weight input padding_idx scale_grad_by_freq sparse"),
    ],
)
_row(
    "interpolate",
    types.Interpolation,
    _f.interpolate,
    "input size=None scale_factor=None mode='nearest' align_corners=None recompute_scale_factor=None antialias=False",
    modules=[nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d],
    functions=[_f.upsample, _f.upsample_nearest, _f.upsample_bilinear],
)
_row(
    "upsample",
    types.Interpolation,
    aten="upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_linear1d.vec upsample_bilinear2d.vec "
    "upsample_trilinear3d.vec upsample_bicubic2d.vec _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec "
    "_upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec",
)
_row("fold", types.Sum, _f.fold, "input output_size kernel_size dilation=1 padding=0 stride=1", modules=[nn.Fold])
_row("col2im", types.Sum, aten="col2im.default")

# --- dropout, which the compiler removes -----------------------------------------------------------------------------------

for _name, _module in [
    ("dropout", nn.Dropout),
    ("dropout1d", nn.Dropout1d),
    ("dropout2d", nn.Dropout2d),
    ("dropout3d", nn.Dropout3d),
    ("alpha_dropout", nn.AlphaDropout),
    ("feature_alpha_dropout", nn.FeatureAlphaDropout),
]:
    _function: Function = getattr(functional, _name)
    _row(
        _name,
        types.Dropout,
        _function,
        "input p=0.5 training=True",
        modules=[_module],
        reordered=[(torch.dropout, "input p training"), (torch.ops.aten.dropout.default, "input p training")]
        if _name == "dropout"
        else [],
        view=True,
    )

_row(
    "stochastic_depth",
    types.Dropout,
    None,
    "input p mode training=True",
    foreign="torchvision.ops.stochastic_depth.stochastic_depth",
    view=True,
)

# --- neutral operations: they move values --------------------------------------------------------------------------------


def _neutral(
    name: str, functions: Sequence[Function] = (), *, methods: str | None = None, aten: str = "", view: bool = True
) -> None:
    _row(
        name,
        types.Neutral,
        functions=functions,
        methods=name if methods is None else methods,
        aten=aten,
        view=view,
    )


_row(
    "flatten",
    types.Neutral,
    torch.flatten,
    "input start_dim=0 end_dim=-1",
    modules=[nn.Flatten],
    methods="flatten",
    aten="flatten.using_ints",
    view=True,
)
_row(
    "unflatten",
    types.Neutral,
    modules=[nn.Unflatten],
    methods="unflatten",
    functions=[torch.unflatten],
    aten="unflatten.int",
    view=True,
)
_row("container", types.Neutral)  # a model's output as a dataclass
_neutral("view", methods="view view_as", aten="view.default _unsafe_view.default view_as.default")
_neutral("reshape", [torch.reshape], methods="reshape reshape_as", aten="reshape.default reshape_as.default")
_neutral("permute", [torch.permute], aten="permute.default")
_neutral(
    "transpose",
    [torch.transpose, torch.swapaxes, torch.swapdims, torch.t, torch.adjoint],
    methods="transpose swapaxes swapdims t adjoint",
    aten="transpose.int swapaxes.default swapdims.default t.default mT.default numpy_T.default adjoint.default",
)
_neutral(
    "movedim",
    [torch.movedim, torch.moveaxis],
    methods="movedim moveaxis",
    aten="movedim.int movedim.intlist moveaxis.int moveaxis.intlist",
)
_neutral("squeeze", [torch.squeeze], aten="squeeze.default squeeze.dim squeeze.dims")
_neutral("unsqueeze", [torch.unsqueeze], aten="unsqueeze.default")
_neutral("expand", methods="expand expand_as", aten="expand.default expand_as.default")
_neutral("getitem", [operator.getitem], methods="__getitem__")
_neutral("select", [torch.select], aten="select.int")
_neutral("narrow", [torch.narrow], aten="narrow.default")
_neutral("slice", methods="", aten="slice.Tensor")
_neutral("chunk", [torch.chunk], aten="chunk.default")
_neutral("split", [torch.split], methods="split", aten="split.Tensor split_with_sizes.default split.sizes")
_neutral("tensor_split", [torch.tensor_split], aten="tensor_split.indices tensor_split.sections")
_neutral("unbind", [torch.unbind], aten="unbind.int")
_neutral("diagonal", [torch.diagonal], aten="diagonal.default")
_neutral("contiguous", aten="contiguous.default")
_neutral("to", methods="to float double half bfloat16 type_as type", aten="to.dtype to.device to.dtype_layout type_as.default")
_neutral("_to_copy", methods="", aten="_to_copy.default")
_neutral("alias", methods="", aten="alias.default lift_fresh_copy.default")
_neutral("broadcast_to", [torch.broadcast_to], aten="broadcast_to.default")
_neutral("unfold", [_f.unfold], aten="im2col.default unfold.default")
_neutral("clone", [torch.clone], aten="clone.default", view=False)
_neutral("repeat", aten="repeat.default", view=False)
_neutral("tile", [torch.tile], aten="tile.default", view=False)
_neutral(
    "repeat_interleave", [torch.repeat_interleave], aten="repeat_interleave.self_int repeat_interleave.self_Tensor", view=False
)
_neutral("cat", [torch.cat, torch.concat, torch.concatenate], methods="", aten="cat.default", view=False)
_neutral("stack", [torch.stack], methods="", aten="stack.default", view=False)
for _name in ("hstack", "vstack", "dstack"):
    _neutral(_name, [getattr(torch, _name)], methods="", view=False)
_neutral("flip", [torch.flip], aten="flip.default", view=False)
_neutral("roll", [torch.roll], aten="roll.default", view=False)
_neutral("rot90", [torch.rot90], aten="rot90.default", view=False)
_neutral("gather", [torch.gather], aten="gather.default", view=False)
_neutral("take_along_dim", [torch.take_along_dim], aten="take_along_dim.default", view=False)
_neutral("index_select", [torch.index_select], aten="index_select.default", view=False)
_neutral("index", methods="", aten="index.Tensor", view=False)
_neutral("where", [torch.where], aten="where.self where.ScalarOther where.ScalarSelf where.Scalar", view=False)
_row(
    "masked_fill",
    types.Neutral,
    torch.masked_fill,
    "input mask value",
    methods="masked_fill",
    inplace_methods="masked_fill_",
    aten="masked_fill.Scalar masked_fill.Tensor",
    inplace_aten="masked_fill_.Scalar masked_fill_.Tensor",
)
_neutral("slice_scatter", [torch.slice_scatter], aten="slice_scatter.default", view=False)
_neutral("select_scatter", [torch.select_scatter], aten="select_scatter.default", view=False)
_neutral("index_put", [torch.index_put], aten="index_put.default", view=False)
_neutral("scatter", [torch.scatter], aten="scatter.src scatter.value", view=False)


_row("copy", types.Neutral, copied, "input source non_blocking=False", aten="copy.default")
_neutral("fill", [torch.fill], methods="", aten="fill.Tensor fill.Scalar", view=False)
_neutral("tril", [torch.tril], aten="tril.default", view=False)
_neutral("triu", [torch.triu], aten="triu.default", view=False)
_neutral("channel_shuffle", [_f.channel_shuffle], methods="", aten="channel_shuffle.default", view=False)
_neutral("maximum", [torch.maximum], aten="maximum.default", view=False)
_neutral("minimum", [torch.minimum], aten="minimum.default", view=False)
_neutral("amax", [torch.amax], aten="amax.default", view=False)
_neutral("amin", [torch.amin], aten="amin.default", view=False)
_neutral("max", [torch.max], aten="max.default max.dim max.other", view=False)
_neutral("min", [torch.min], aten="min.default min.dim min.other", view=False)
_neutral("topk", [torch.topk], aten="topk.default", view=False)
_neutral("sort", [torch.sort], aten="sort.default", view=False)

# Results that are integers or truth values: no relevance goes through them.
for _name, _overload in [
    *[(name, "Tensor Scalar") for name in ("eq", "ne", "lt", "le", "gt", "ge")],
    *[(name, "default") for name in ("argmax", "argmin", "argsort", "logical_not", "isnan", "isinf", "bitwise_not")],
    *[(name, "default") for name in ("logical_and", "logical_or", "all", "any")],
]:
    _neutral(
        _name,
        [getattr(torch, _name), *([getattr(operator, _name)] if hasattr(operator, _name) else [])],
        aten=" ".join(f"{_name}.{overload}" for overload in _overload.split()) if hasattr(torch.ops.aten, _name) else "",
        view=False,
    )
_neutral("bitwise_and", [operator.and_, torch.bitwise_and], methods="__and__", aten="bitwise_and.Tensor", view=False)
_neutral("bitwise_or", [operator.or_, torch.bitwise_or], methods="__or__", aten="bitwise_or.Tensor", view=False)
_neutral("invert", [operator.invert], methods="__invert__", view=False)


_neutral("require_matrix", [require_matrix], methods="")


_neutral("attention_bias", [attention_bias], methods="", view=False)
for _name in ("padding_bias", "head_bias"):
    _row(_name, types.Neutral, foreign=f"lrpfx.passes.traceable.{_name}")
_row(
    "pad",
    types.Neutral,
    functional.pad,
    "input pad mode='constant' value=None",
    aten="pad.default constant_pad_nd.default",
)
_neutral("pixel_shuffle", [_f.pixel_shuffle], methods="", aten="pixel_shuffle.default", view=False)
_neutral("max_unpool", [_f.max_unpool1d, _f.max_unpool2d, _f.max_unpool3d], methods="", aten="max_unpool2d.default", view=False)
_neutral("pixel_unshuffle", [_f.pixel_unshuffle], methods="", aten="pixel_unshuffle.default", view=False)

"""The operator table: what every callable that a front end can emit means.

One row per operator: its kind, the names of its arguments in order, which of them carry data, parameters or buffers, what is
known of its result, and every spelling (function, method, operator, in-place form, ATen overload) under which it can appear in
a graph. A fact that a row does not state is not assumed: the sign of the result is unknown, its entries may be anything.
"""

import ast
import builtins
import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from lrpfx import layer as layers
from lrpfx import types
from lrpfx.operators import signs
from lrpfx.operators.functions import (
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
    embedding_bag,
    exponential,
    floor_divided,
    floor_divides,
    gate,
    grid_sampled,
    head_bias,
    heaviside,
    histogram,
    index_added,
    index_put_accumulated,
    linear_adjoint,
    linear_uniform,
    masked_softmax,
    padding_bias,
    quotient,
    require_batch,
    require_dimensions,
    require_matrix,
    scatter_added,
    scattered,
    thresholded_relu,
)
from lrpfx.operators.signs import SignOf
from lrpfx.support.torch_internals import OpOverload
from lrpfx.support.torch_internals import aten as aten_operator


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
    sign: SignOf | None = None  # the sign of the result; None: unknown
    moves: bool = False  # every entry of the result is an entry of a tensor argument, or a number
    scales: int = 0  # how surely the result is what scales a signal, and not the signal itself
    discrete: bool = False  # the result is of integers or truth values, or constant piece by piece
    discrete_results: tuple[int, ...] = ()  # those of several results, likewise
    results: tuple[str, ...] = ()  # names of the results, where there are several
    indices: tuple[str, ...] = ()  # arguments that are tensors of integers or truth values, by name or place
    aliases: dict[str, str] = field(default_factory=dict)  # other names of arguments
    controls: tuple[str, ...] = ()  # arguments that may depend on the inputs, and take no relevance: they steer the result
    elementwise: bool = False  # an entry of the result is made of the entries of the data at its place, broadcast
    adds_up: bool = False  # an entry of the result is a sum of entries of its one input, none with a negative weight
    multiplies_up: bool = False  # an entry of the result is a product of entries of its one input

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
    """One way to write an operator.

    `arguments` may name more than the row does: settings of a kernel, which change nothing, and options that must stay None.
    """

    operator: Operator
    arguments: tuple[str, ...]  # names of the positional arguments in the order of this spelling
    inplace: bool = False


REQUIRED = object()

#: Names that numpy and ATen use for arguments: each stands for what follows, where the row has such an argument.
ALIASES = {
    "self": ("input",),
    "x": ("input",),
    "a": ("input",),
    "x1": ("input",),
    "x2": ("other",),
    "mat2": ("other",),
    "vec": ("other",),
    "vec2": ("other",),
    "axis": ("dim",),
    "keepdims": ("keepdim",),
    "src": ("source",),
    "train": ("training",),
}
#: Settings of kernels and of warnings, which change no result.
WITHOUT_EFFECT = frozenset({"cudnn_enabled", "cudnn_enable", "_stacklevel"})

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
        *map(aten_operator, ["sym_size.int", "sym_numel.default", "sym_stride.int", "zeros_like.default", "ones_like.default"]),
        *map(aten_operator, ["empty_like.default", "full_like.default", "new_zeros.default", "new_ones.default"]),
        *map(aten_operator, ["new_full.default", "new_empty.default", "_assert_tensor_metadata.default"]),
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
    if isinstance(function, type) and (dataclasses.is_dataclass(function) or hasattr(function, "_fields")):
        return Spelling(_operators["container"], ())
    name = getattr(function, "__name__", "")
    if spelling is None and name in _methods and getattr(torch.Tensor, name, None) is function:
        return _methods[name]
    return spelling or _foreign.get(f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}")


def lookup_method(name: str) -> Spelling | None:
    """The spelling behind a tensor method, or None if the table does not list it."""
    return _methods.get(name)


def operator_named(name: str | None) -> Operator | None:
    """The row called `name`, or None."""
    return None if name is None else _operators.get(name)


def spelling_of(node: fx.Node) -> Spelling | None:
    """The spelling that a call is, or None if the table does not list it."""
    if node.op == "call_method":
        return lookup_method(str(node.target))
    return lookup(node.target) if node.op == "call_function" and callable(node.target) else None


def writes_in_place(node: fx.Node) -> bool:
    """Whether a call overwrites its first argument: what the table says of its spelling, and otherwise its name.

    Underscores at the end mark in-place operations throughout torch, listed in the table or not.
    """
    spelling = spelling_of(node)
    if spelling is not None:
        return spelling.inplace
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return node.target is operator.setitem or (name.endswith("_") and not name.endswith("__"))


def is_neutral(name: str | None) -> bool:
    """Whether the row called `name` exists and needs no rule."""
    operator = operator_named(name)
    return operator is not None and operator.neutral


def all_operators() -> tuple[Operator, ...]:
    """Every row of the table."""
    return tuple(_operators.values())


@functools.cache
def aten_names() -> frozenset[str]:
    """Names of ATen's operators that rows list, without their overloads."""
    return frozenset(function.overloadpacket.__name__ for function in _functions if isinstance(function, OpOverload))


def module_classes() -> tuple[type, ...]:
    """All torch.nn classes that are spellings of some operator."""
    return tuple({module for row in _operators.values() for module in row.modules})


def _aten_overloads(names: str) -> list[Function]:
    return [operator for operator in map(aten_operator, names.split()) if operator is not None]


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
    reordered: Sequence[tuple[Function | None, str]] = (),
    reordered_methods: Sequence[tuple[str, str]] = (),
    reordered_inplace_methods: Sequence[tuple[str, str]] = (),
    view: bool = False,
    adjoint: Adjoint | None = None,
    uniform: Uniform | None = None,
    reflected: str = "",
    detached: Detached | None = None,
    sign: SignOf | None = None,
    moves: bool = False,
    scales: int = 0,
    discrete: bool = False,
    discrete_results: Sequence[int] = (),
    results: str = "",
    indices: str = "",
    aliases: str = "",
    controls: str = "",
    elementwise: bool = False,
    adds_up: bool = False,
    multiplies_up: bool = False,
    foreign: str = "",
) -> None:
    """Add a row; its modules are of its kind.

    The `reordered` ones are spellings whose positional arguments come in another order; `foreign` functions of
    other libraries, by module and name.
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
        sign,
        moves,
        scales,
        discrete,
        tuple(discrete_results),
        tuple(results.split()),
        tuple(indices.split()),
        dict(pair.split("=") for pair in aliases.split()),
        tuple(controls.split()),
        elementwise,
        adds_up,
        multiplies_up,
    )
    _operators[name] = row
    kind.include(row.modules)
    order = tuple(parsed)
    for spelled in ([function] if function else []) + list(functions) + _aten_overloads(aten):
        _functions[spelled] = Spelling(row, order)
    for spelled in list(inplace) + _aten_overloads(inplace_aten):
        _functions[spelled] = Spelling(row, order, inplace=True)
    for spelled_so, text in reordered:
        if spelled_so is not None:
            _functions[spelled_so] = Spelling(row, tuple(text.split()))
    for spelled_as in foreign.split():
        _foreign[spelled_as] = Spelling(row, order)
    for method in methods.split():
        _methods[method] = Spelling(row, order)
    for method in inplace_methods.split():
        _methods[method] = Spelling(row, order, inplace=True)
    for method, text in reordered_methods:
        _methods[method] = Spelling(row, tuple(text.split()))
    for method, text in reordered_inplace_methods:
        _methods[method] = Spelling(row, tuple(text.split()), inplace=True)


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
    modules=[nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm],
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
    sign=signs.never_negative,
)
_activation(
    "relu6",
    _f.relu6,
    modules=[nn.ReLU6],
    aten="relu6.default",
    inplace_aten="relu6_.default",
    sign=signs.never_negative,
    scales=1,
)
_activation(
    "hardtanh",
    _f.hardtanh,
    "input min_val=-1.0 max_val=1.0",
    modules=[nn.Hardtanh, nn.ReLU6],
    inplace=[_f.hardtanh_],
    aten="hardtanh.default",
    inplace_aten="hardtanh_.default",
    sign=signs.of_hardtanh,
    scales=1,
)
_activation(
    "clamp",
    torch.clamp,
    "input min=None max=None",
    functions=[torch.clip],
    inplace=[torch.clamp_, torch.clip_],
    methods="clamp clip",
    inplace_methods="clamp_ clip_",
    aten="clamp.default clamp.Tensor clip.default clip.Tensor",
    inplace_aten="clamp_.default clamp_.Tensor clip_.default clip_.Tensor",
    sign=signs.of_clamp,
)
_activation(
    "clamp_min",
    torch.clamp_min,
    "input min",
    inplace=[torch.clamp_min_],
    methods="clamp_min",
    inplace_methods="clamp_min_",
    aten="clamp_min.default clamp_min.Tensor",
    inplace_aten="clamp_min_.default clamp_min_.Tensor",
    sign=signs.of_clamp,
)
_activation(
    "clamp_max",
    torch.clamp_max,
    "input max",
    inplace=[torch.clamp_max_],
    methods="clamp_max",
    inplace_methods="clamp_max_",
    aten="clamp_max.default clamp_max.Tensor",
    inplace_aten="clamp_max_.default clamp_max_.Tensor",
    sign=signs.of_clamp,
)
for _name in ("remainder", "fmod"):
    _activation(
        _name,
        getattr(torch, _name),
        "input other",
        functions=[operator.mod] if _name == "remainder" else [],
        methods=f"{_name} __mod__" if _name == "remainder" else _name,
        inplace_methods=f"{_name}_",
        aten=f"{_name}.Scalar {_name}.Tensor",
        inplace_aten=f"{_name}_.Scalar {_name}_.Tensor",
    )
_activation(
    "elu",
    _f.elu,
    "input alpha=1.0",
    modules=[nn.ELU],
    inplace=[_f.elu_],
    aten="elu.default",
    inplace_aten="elu_.default",
    sign=signs.of_elu,
)
_activation(
    "selu",
    _f.selu,
    modules=[nn.SELU],
    functions=[torch.selu],
    inplace=[torch.selu_, _f.selu_],
    aten="selu.default",
    inplace_aten="selu_.default",
    sign=signs.of_input,
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
    sign=signs.of_elu,
)
_activation("gelu", _f.gelu, "input approximate='none'", modules=[nn.GELU], aten="gelu.default", sign=signs.of_input)
_activation(
    "sigmoid",
    torch.sigmoid,
    modules=[nn.Sigmoid],
    functions=[_f.sigmoid, torch.special.expit],
    inplace=[torch.sigmoid_],
    methods="sigmoid",
    inplace_methods="sigmoid_",
    aten="sigmoid.default special_expit.default",
    inplace_aten="sigmoid_.default",
    sign=signs.never_negative,
    scales=2,
)
_activation(
    "hardsigmoid",
    _f.hardsigmoid,
    modules=[nn.Hardsigmoid],
    aten="hardsigmoid.default",
    inplace_aten="hardsigmoid_.default",
    sign=signs.never_negative,
    scales=2,
)
_activation("silu", _f.silu, modules=[nn.SiLU], aten="silu.default", inplace_aten="silu_.default", sign=signs.of_input)
_activation(
    "hardswish",
    _f.hardswish,
    modules=[nn.Hardswish],
    aten="hardswish.default",
    inplace_aten="hardswish_.default",
    sign=signs.of_input,
)
_activation("mish", _f.mish, modules=[nn.Mish], aten="mish.default", inplace_aten="mish_.default", sign=signs.of_input)
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
    sign=signs.of_input,
    scales=1,
)
_activation("tanhshrink", _f.tanhshrink, modules=[nn.Tanhshrink], sign=signs.of_input)
_activation("softsign", _f.softsign, modules=[nn.Softsign], sign=signs.of_input)
_activation(
    "softplus",
    _f.softplus,
    "input beta=1.0 threshold=20.0",
    modules=[nn.Softplus],
    aten="softplus.default",
    sign=signs.of_softplus,
)
_activation(
    "softshrink", _f.softshrink, "input lambd=0.5", modules=[nn.Softshrink], aten="softshrink.default", sign=signs.of_input
)
_activation(
    "hardshrink",
    torch.hardshrink,
    "input lambd=0.5",
    modules=[nn.Hardshrink],
    functions=[_f.hardshrink],
    methods="hardshrink",
    aten="hardshrink.default",
    sign=signs.of_input,
)
_activation("logsigmoid", _f.logsigmoid, modules=[nn.LogSigmoid], aten="log_sigmoid.default", sign=signs.never_positive)
_activation(
    "leaky_relu",
    _f.leaky_relu,
    "input negative_slope=0.01",
    modules=[nn.LeakyReLU],
    inplace=[_f.leaky_relu_],
    aten="leaky_relu.default",
    inplace_aten="leaky_relu_.default",
    sign=signs.of_leaky_relu,
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
    sign=signs.of_threshold,
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
    sign=signs.of_prelu,
)

_elementwise_signs: dict[str, SignOf | None] = {
    "exp": signs.never_negative,
    "exp2": signs.never_negative,
    "expm1": signs.of_input,
    "log": None,
    "log1p": signs.of_input,
    "log2": None,
    "log10": None,
    "sqrt": signs.never_negative,
    "rsqrt": signs.never_negative,
    "abs": signs.never_negative,
    "square": signs.never_negative,
    "erf": signs.of_input,
    "sin": None,
    "cos": None,
    "tan": None,
    "sinh": signs.of_input,
    "cosh": signs.never_negative,
    "atan": signs.of_input,
    "asinh": signs.of_input,
    "reciprocal": signs.of_input,
    "frac": signs.of_input,
    "logit": None,
    "deg2rad": signs.of_input,
    "rad2deg": signs.of_input,
    "sinc": None,
    "nan_to_num": None,
}
for _name, _sign in _elementwise_signs.items():
    _elementwise: Function = getattr(torch, _name)
    _activation(
        _name,
        _elementwise,
        functions=[builtins.abs, torch.absolute] if _name == "abs" else [],
        inplace=[getattr(torch, f"{_name}_")],
        methods=f"{_name} __abs__ absolute" if _name == "abs" else _name,
        inplace_methods=f"{_name}_",
        aten=f"{_name}.default" + (" absolute.default" if _name == "abs" else ""),
        inplace_aten=f"{_name}_.default",
        sign=_sign,
        scales={"rsqrt": 2, "reciprocal": 2, "erf": 1}.get(_name, 0),
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
    inplace_aten="pow_.Scalar pow_.Tensor",
    reflected="exponential",
    sign=signs.of_power,
)
_activation(
    "log_softmax",
    torch.log_softmax,
    "input dim dtype=None",
    modules=[nn.LogSoftmax],
    methods="log_softmax",
    aten="log_softmax.int",
    reordered=[(_f.log_softmax, "input dim _stacklevel dtype")],
    sign=signs.never_positive,
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
        sign=signs.of_pooling,
        adds_up=True,
    )
    _row(
        f"adaptive_avg_pool{_dimensions}d",
        types.AvgPool,
        _adaptive,
        "input output_size",
        modules=[_adaptive_module],
        aten=f"adaptive_avg_pool{_dimensions}d.default",
        sign=signs.of_input,
        adds_up=True,
    )
_row(
    "mean",
    types.AvgPool,
    torch.mean,
    "input dim=None keepdim=False dtype=None",
    methods="mean",
    aten="mean.default mean.dim",
    sign=signs.of_input,
    adds_up=True,
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
        sign=signs.of_input,
        moves=True,
        discrete_results=(1,),
    )
    _row(
        f"max_pool{_dimensions}d_with_indices",
        types.MaxPool,
        functions=[_pool_indices],
        aten=f"max_pool{_dimensions}d_with_indices.default",
        sign=signs.of_input,
        moves=True,
        discrete_results=(1,),
    )
    _row(
        f"adaptive_max_pool{_dimensions}d",
        types.MaxPool,
        _adaptive,
        "input output_size return_indices=False",
        modules=[_adaptive_module],
        sign=signs.of_input,
        moves=True,
        discrete_results=(1,),
    )
    _row(
        f"adaptive_max_pool{_dimensions}d_with_indices",
        types.MaxPool,
        functions=[_adaptive_indices],
        aten=f"adaptive_max_pool{_dimensions}d.default",
        sign=signs.of_input,
        moves=True,
        discrete_results=(1,),
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
    sign=signs.of_sum,
    elementwise=True,
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
    aten="sub.Tensor sub.Scalar subtract.Tensor subtract.Scalar",
    inplace_aten="sub_.Tensor sub_.Scalar",
    reflected="rsub",
    sign=signs.of_difference,
    elementwise=True,
)
_row(
    "rsub",
    types.Sum,
    torch.rsub,
    "input other alpha=1",
    data="input other",
    methods="__rsub__",
    aten="rsub.Tensor rsub.Scalar",
    sign=signs.of_reversed_difference,
    elementwise=True,
)
_row(
    "sum",
    types.Sum,
    torch.sum,
    "input dim=None keepdim=False dtype=None",
    modules=[layers.Sum],
    methods="sum",
    aten="sum.default sum.dim_IntList",
    sign=signs.of_input,
    adds_up=True,
)

_row(
    "cumsum",
    types.Sum,
    torch.cumsum,
    "input dim dtype=None",
    methods="cumsum",
    aten="cumsum.default",
    sign=signs.of_input,
    adds_up=True,
)

_row("diff", types.Sum, functions=[torch.diff], methods="diff", aten="diff.default")
_row(
    "scatter_add",
    types.Sum,
    scatter_added,
    "input source dim index",
    data="input source",
    reordered=[(spelled, "input dim index source") for spelled in (torch.scatter_add, torch.ops.aten.scatter_add.default)],
    reordered_methods=[("scatter_add", "input dim index source")],
    reordered_inplace_methods=[("scatter_add_", "input dim index source")],
    indices="index",
)
_row(
    "index_add",
    types.Sum,
    index_added,
    "input source dim index alpha=1",
    data="input source",
    reordered=[(spelled, "input dim index source alpha") for spelled in (torch.index_add, torch.ops.aten.index_add.default)],
    reordered_methods=[("index_add", "input dim index source alpha")],
    reordered_inplace_methods=[("index_add_", "input dim index source alpha")],
    indices="index",
)
_row("index_put_accumulated", types.Sum, index_put_accumulated, "input values indices", data="input values")
_row(
    "affine_grid",
    types.Sum,
    _f.affine_grid,
    "theta size align_corners=None",
    data="theta",
    aten="affine_grid_generator.default",
)

for _name, _overloads in [("std", "default dim correction"), ("var", "default dim correction")]:
    _row(
        _name,
        types.Statistic,
        functions=[getattr(torch, _name)],
        methods=_name,
        aten=" ".join(f"{_name}.{overload}" for overload in _overloads.split()),
        sign=signs.never_negative,
    )
_row(
    "norm",
    types.Statistic,
    functions=[torch.norm, torch.linalg.norm, torch.linalg.vector_norm],
    methods="norm",
    aten="linalg_vector_norm.default linalg_norm.default norm.Scalar norm.ScalarOpt_dim "
    "norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype linalg_norm.ord_str",
    sign=signs.never_negative,
)
for _name in ("var_mean", "std_mean"):
    _row(
        _name,
        types.Statistic,
        functions=[getattr(torch, _name)],
        aten=f"{_name}.default {_name}.dim {_name}.correction",
        sign=None,
    )
_row(
    "lp_pool",
    types.Statistic,
    functions=[_f.lp_pool1d, _f.lp_pool2d, _f.lp_pool3d],
    modules=[nn.LPPool1d, nn.LPPool2d, nn.LPPool3d],
)
_row(
    "cdist",
    types.Statistic,
    torch.cdist,
    "x1 x2 p=2.0 compute_mode=None",
    data="x1 x2",
    aten="cdist.default",
    sign=signs.never_negative,
)
_row(
    "pairwise_distance",
    types.Statistic,
    _f.pairwise_distance,
    "x1 x2 p=2.0 eps=1e-06 keepdim=False",
    data="x1 x2",
    modules=[nn.PairwiseDistance],
    aten="pairwise_distance.default",
    sign=signs.never_negative,
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
    aten="mul.Tensor mul.Scalar multiply.Tensor multiply.Scalar",
    inplace_aten="mul_.Tensor mul_.Scalar",
    reflected="mul",
    sign=signs.of_product,
    elementwise=True,
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
    aten="div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode divide.Tensor divide.Scalar divide.Tensor_mode "
    "divide.Scalar_mode true_divide.Tensor true_divide.Scalar",
    inplace_aten="div_.Tensor div_.Scalar div_.Tensor_mode div_.Scalar_mode",
    reflected="divided_by",
    sign=signs.of_quotient,
    elementwise=True,
)


_row("divided_by", types.Activation, divided_by, "input other", methods="__rtruediv__", sign=signs.of_product, scales=2)
_row(
    "exponential",
    types.Activation,
    exponential,
    "input other",
    methods="__rpow__",
    reordered=[(torch.ops.aten.pow.Scalar, "other input")],
    sign=signs.of_exponential,
)
_row(
    "neg",
    types.Product,
    torch.neg,
    "input",
    functions=[operator.neg, torch.negative],
    inplace=[torch.neg_, torch.negative_],
    methods="neg negative __neg__",
    inplace_methods="neg_ negative_",
    aten="neg.default negative.default",
    inplace_aten="neg_.default",
    sign=signs.flipped,
    elementwise=True,
)
_row(
    "prod",
    types.Product,
    torch.prod,
    "input dim=None keepdim=False dtype=None",
    methods="prod",
    multiplies_up=True,
    aten="prod.default prod.dim_int",
)
_row(
    "cumprod",
    types.Product,
    torch.cumprod,
    "input dim dtype=None",
    methods="cumprod",
    multiplies_up=True,
    aten="cumprod.default",
)
_row("gate", types.Gate, gate, "input other", data="input other", sign=signs.of_product, elementwise=True)
_row("quotient", types.Gate, quotient, "input other", data="input other", sign=signs.of_quotient, elementwise=True)
_row(
    "matmul",
    types.MatMul,
    torch.matmul,
    "input other",
    data="input other",
    functions=[operator.matmul, torch.bmm, torch.mm, torch.mv, torch.linalg.matmul],
    methods="matmul __matmul__ bmm mm mv",
    aten="linalg_matmul.default matmul.default bmm.default mm.default mv.default",
    sign=signs.of_matrix_product,
)
_row("einsum", types.MatMul, functions=[torch.einsum], aten="einsum.default")
_row("tensordot", types.MatMul, functions=[torch.tensordot], aten="tensordot.default")
_row("dot", types.MatMul, functions=[torch.dot, torch.vdot], methods="dot vdot", aten="dot.default vdot.default")
_row("inner", types.MatMul, torch.inner, "input other", data="input other", methods="inner", aten="inner.default")
_row(
    "outer",
    types.Product,
    torch.outer,
    "input other",
    data="input other",
    functions=[torch.ger],
    methods="outer ger",
    aten="outer.default ger.default",
)
_row(
    "bilinear",
    types.MatMul,
    functional.bilinear,
    "input1 input2 weight bias=None",
    data="input1 input2",
    parameters="weight bias",
    modules=[nn.Bilinear],
    aten="bilinear.default",
)

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
_row("normalize", types.RMSNorm, _f.normalize, "input p=2.0 dim=1 eps=1e-12 out=None", sign=signs.of_input)
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
    modules=[nn.Softmax, nn.Softmax2d],
    functions=[torch.softmax],
    methods="softmax",
    aten="softmax.int",
    reordered=[(_f.softmax, "input dim _stacklevel dtype")],
    sign=signs.never_negative,
    scales=2,
)


_row(
    "softmin",
    types.Softmax,
    _f.softmin,
    "input dim=None dtype=None",
    modules=[nn.Softmin],
    reordered=[(_f.softmin, "input dim _stacklevel dtype")],
    sign=signs.never_negative,
    scales=2,
)
_row(
    "masked_softmax",
    types.Softmax,
    masked_softmax,
    "input dim",
    reordered=[(aten_operator("_safe_softmax.default"), "input dim dtype")],
    sign=signs.never_negative,
    scales=2,
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
    indices="input",
    aliases="indices=input",
    modules=[nn.Embedding],
    reordered=[
        (torch.embedding, "weight input padding_idx scale_grad_by_freq sparse"),
        (torch.ops.aten.embedding.default, "weight input padding_idx scale_grad_by_freq sparse"),
    ],
)
_row(
    "embedding_bag",
    types.Embedding,
    embedding_bag,
    "input weight offsets=None max_norm=None norm_type=2.0 scale_grad_by_freq=False mode='mean' sparse=False "
    "per_sample_weights=None include_last_offset=False padding_idx=None",
    parameters="weight",
    modules=[nn.EmbeddingBag],
    functions=[_f.embedding_bag],
    indices="input offsets",
    aliases="indices=input",
    controls="per_sample_weights",
)
_row(
    "interpolate",
    types.Interpolation,
    _f.interpolate,
    "input size=None scale_factor=None mode='nearest' align_corners=None recompute_scale_factor=None antialias=False",
    modules=[nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d],
    sign=signs.of_interpolation,
)
_row(
    "upsample",
    types.Interpolation,
    aten="upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_linear1d.vec upsample_bilinear2d.vec "
    "upsample_trilinear3d.vec upsample_bicubic2d.vec _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec "
    "_upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec",
)
_row(
    "grid_sample",
    types.Interpolation,
    grid_sampled,
    "input grid mode='bilinear' padding_mode='zeros' align_corners=None",
    functions=[_f.grid_sample, torch.grid_sampler],
    aten="grid_sampler.default grid_sampler_2d.default grid_sampler_3d.default",
    aliases="interpolation_mode=mode",
    controls="grid",
)
_row(
    "fold",
    types.Sum,
    _f.fold,
    "input output_size kernel_size dilation=1 padding=0 stride=1",
    modules=[nn.Fold],
    sign=signs.of_input,
    adds_up=True,
)
_row("col2im", types.Sum, aten="col2im.default", sign=signs.of_input, adds_up=True)

# --- dropout, which the compiler removes -----------------------------------------------------------------------------------

_aten: Any = torch.ops.aten
_dropouts: list[tuple[str, type, list[Function]]] = [
    ("dropout", nn.Dropout, [torch.dropout, _aten.dropout.default]),
    ("dropout1d", nn.Dropout1d, []),
    ("dropout2d", nn.Dropout2d, [torch.feature_dropout, _aten.feature_dropout.default]),
    ("dropout3d", nn.Dropout3d, []),
    ("alpha_dropout", nn.AlphaDropout, [torch.alpha_dropout, _aten.alpha_dropout.default]),
    ("feature_alpha_dropout", nn.FeatureAlphaDropout, [torch.feature_alpha_dropout, _aten.feature_alpha_dropout.default]),
]
for _name, _module, _native in _dropouts:
    _function: Function = getattr(functional, _name)
    _row(
        _name,
        types.Dropout,
        _function,
        "input p=0.5 training=True",
        modules=[_module],
        reordered=[(spelled, "input p training") for spelled in _native],
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

# --- neutral operations: they move values, or their results are no signal -------------------------------------------------


def _neutral(name: str, functions: Sequence[Function] = (), *, methods: str | None = None, **facts: Any) -> None:
    _row(name, types.Neutral, functions=functions, methods=name if methods is None else methods, **facts)


def _moving(name: str, functions: Sequence[Function] = (), *, view: bool = True, **facts: Any) -> None:
    """A row for an operator whose results are entries of its first argument."""
    _neutral(name, functions, view=view, sign=signs.of_input, moves=True, **facts)


def _combining(name: str, functions: Sequence[Function], **facts: Any) -> None:
    """A row for an operator that puts the tensors of a list together."""
    _neutral(name, functions, methods="", sign=signs.of_tensors, moves=True, **facts)


_row(
    "flatten",
    types.Neutral,
    torch.flatten,
    "input start_dim=0 end_dim=-1",
    modules=[nn.Flatten],
    methods="flatten",
    aten="flatten.using_ints",
    view=True,
    sign=signs.of_input,
    moves=True,
)
_moving("unflatten", [torch.unflatten], modules=[nn.Unflatten], aten="unflatten.int")
_neutral("container", methods="")  # a model's output as a dataclass or named tuple
_moving("view", methods="view view_as", aten="view.default _unsafe_view.default view_as.default")
_moving("reshape", [torch.reshape], methods="reshape reshape_as", aten="reshape.default reshape_as.default")
_moving("ravel", [torch.ravel], aten="ravel.default")
_moving("permute", [torch.permute], aten="permute.default")
_moving(
    "transpose",
    [torch.transpose, torch.swapaxes, torch.swapdims, torch.t, torch.adjoint],
    methods="transpose swapaxes swapdims t adjoint",
    aten="transpose.int swapaxes.default swapdims.default t.default mT.default numpy_T.default adjoint.default",
)
_moving(
    "movedim",
    [torch.movedim, torch.moveaxis],
    methods="movedim moveaxis",
    aten="movedim.int movedim.intlist moveaxis.int moveaxis.intlist",
)
_moving("squeeze", [torch.squeeze], aten="squeeze.default squeeze.dim squeeze.dims")
_moving("unsqueeze", [torch.unsqueeze], aten="unsqueeze.default")
_moving("expand", methods="expand expand_as", aten="expand.default expand_as.default")
_moving("getitem", [operator.getitem], methods="__getitem__")
_moving("select", [torch.select], aten="select.int")
_moving("narrow", [torch.narrow], aten="narrow.default")
_moving("slice", methods="", aten="slice.Tensor")
_moving("chunk", [torch.chunk], aten="chunk.default")
_moving(
    "split",
    [torch.split, torch.split_with_sizes],
    methods="split split_with_sizes",
    aten="split.Tensor split_with_sizes.default split.sizes",
)
_moving("tensor_split", [torch.tensor_split], aten="tensor_split.indices tensor_split.sections")
_moving("unbind", [torch.unbind], aten="unbind.int")
_moving("diagonal", [torch.diagonal], aten="diagonal.default")
_moving("diag_embed", [torch.diag_embed], aten="diag_embed.default", view=False)
_moving("contiguous", aten="contiguous.default", elementwise=True)
_moving(
    "to",
    methods="to float double half bfloat16 type_as type cpu cuda",
    aten="to.dtype to.device to.dtype_layout to.other type_as.default",
    elementwise=True,
)
_moving("_to_copy", methods="", aten="_to_copy.default", elementwise=True)
_moving("alias", methods="", aten="alias.default lift_fresh_copy.default", elementwise=True)
_moving("broadcast_to", [torch.broadcast_to], aten="broadcast_to.default")
_moving("unfold", [_f.unfold], modules=[nn.Unfold], aten="im2col.default unfold.default")
_moving("clone", [torch.clone], aten="clone.default", view=False, elementwise=True)
_moving("repeat", aten="repeat.default", view=False)
_moving("tile", [torch.tile], aten="tile.default", view=False)
_moving(
    "repeat_interleave", [torch.repeat_interleave], aten="repeat_interleave.self_int repeat_interleave.self_Tensor", view=False
)
_moving(
    "flip",
    [torch.flip, torch.fliplr, torch.flipud],
    methods="flip fliplr flipud",
    aten="flip.default fliplr.default flipud.default",
    view=False,
)
_moving("roll", [torch.roll], aten="roll.default", view=False)
_moving("rot90", [torch.rot90], aten="rot90.default", view=False)
_moving("gather", [torch.gather], aten="gather.default", view=False, indices="2 index")
_moving("take_along_dim", [torch.take_along_dim], aten="take_along_dim.default", view=False, indices="1 indices")
_moving("index_select", [torch.index_select], aten="index_select.default", view=False, indices="2 index")
_moving("index", methods="", aten="index.Tensor", view=False)
_moving("masked_select", [torch.masked_select], aten="masked_select.default", view=False, indices="1 mask")
_moving("tril", [torch.tril], aten="tril.default", view=False)
_moving("triu", [torch.triu], aten="triu.default", view=False)
_moving(
    "channel_shuffle",
    [_f.channel_shuffle, torch.channel_shuffle],
    methods="",
    modules=[nn.ChannelShuffle],
    aten="channel_shuffle.default",
    view=False,
)
_moving("pixel_shuffle", [_f.pixel_shuffle], methods="", modules=[nn.PixelShuffle], aten="pixel_shuffle.default", view=False)
_moving(
    "pixel_unshuffle", [_f.pixel_unshuffle], methods="", modules=[nn.PixelUnshuffle], aten="pixel_unshuffle.default", view=False
)
_moving("require_matrix", [require_matrix], methods="")
_moving("require_dimensions", [require_dimensions], methods="")
_moving("require_batch", [require_batch], methods="")
_row(
    "pad",
    types.Neutral,
    functional.pad,
    "input pad mode='constant' value=None",
    aten="pad.default",
    reordered=[(torch.ops.aten.constant_pad_nd.default, "input pad value"), (torch.constant_pad_nd, "input pad value")],
    sign=signs.of_padding,
    moves=True,
)
_combining("cat", [torch.cat, torch.concat, torch.concatenate], aten="cat.default concat.default concatenate.default")
_combining("stack", [torch.stack], aten="stack.default")
_combining("hstack", [torch.hstack], aten="hstack.default")
_combining("vstack", [torch.vstack, torch.row_stack], aten="vstack.default row_stack.default")
_combining("dstack", [torch.dstack], aten="dstack.default")
_combining("column_stack", [torch.column_stack], aten="column_stack.default")
_neutral("broadcast_tensors", [torch.broadcast_tensors], methods="", aten="broadcast_tensors.default", view=True)
_neutral("meshgrid", [torch.meshgrid], methods="", aten="meshgrid.default meshgrid.indexing", view=True)
_row(
    "where",
    types.Neutral,
    torch.where,
    "condition input other",
    data="condition input other",
    reordered_methods=[("where", "input condition other")],
    aten="where.self where.ScalarOther where.ScalarSelf where.Scalar",
    indices="condition",
    sign=signs.of_both,
)
_row(
    "masked_fill",
    types.Neutral,
    torch.masked_fill,
    "input mask value",
    methods="masked_fill",
    inplace_methods="masked_fill_",
    aten="masked_fill.Scalar masked_fill.Tensor",
    inplace_aten="masked_fill_.Scalar masked_fill_.Tensor",
    indices="mask",
    sign=signs.of_masked_fill,
)
_neutral("slice_scatter", [torch.slice_scatter], aten="slice_scatter.default")
_neutral("select_scatter", [torch.select_scatter], aten="select_scatter.default")
_neutral("diagonal_scatter", [torch.diagonal_scatter], aten="diagonal_scatter.default")
# What is accumulated has a row of its own, among the sums.
_row(
    "index_put",
    types.Neutral,
    torch.index_put,
    "input indices values accumulate=False",
    methods="index_put",
    inplace_methods="index_put_",
    aten="index_put.default",
    inplace_aten="index_put_.default",
)
_row(
    "scatter",
    types.Neutral,
    scattered,
    "input dim index source",
    functions=[torch.scatter],
    methods="scatter",
    inplace_methods="scatter_",
    aten="scatter.src scatter.value",
    inplace_aten="scatter_.src scatter_.value",
    aliases="value=source",
    indices="index",
)
_row(
    "copy",
    types.Neutral,
    copied,
    "input source non_blocking=False",
    methods="",
    inplace_methods="copy_",
    aten="copy.default",
    inplace_aten="copy_.default",
)
_row(
    "fill",
    types.Neutral,
    torch.fill,
    "input value",
    inplace_methods="fill_",
    aten="fill.Tensor fill.Scalar",
    inplace_aten="fill_.Tensor fill_.Scalar",
)
_row(
    "zero",
    types.Neutral,
    torch.zeros_like,
    "input",
    inplace=[torch.zero_],
    aten="zero.default",
    inplace_methods="zero_",
    inplace_aten="zero_.default",
    discrete=True,
)
_neutral("attention_bias", [attention_bias], methods="")
_neutral("padding_bias", [padding_bias], methods="")
_neutral("head_bias", [head_bias], methods="")
_neutral(
    "max_unpool",
    [_f.max_unpool1d, _f.max_unpool2d, _f.max_unpool3d],
    methods="",
    modules=[nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d],
    aten="max_unpool2d.default max_unpool3d.default",
    sign=signs.of_input,
)

# The winner takes all: its gradient is its relevance.
for _name, _others in [("maximum", [torch.fmax]), ("minimum", [torch.fmin])]:
    _row(
        _name,
        types.Neutral,
        getattr(torch, _name),
        "input other",
        data="input other",
        functions=_others,
        methods=f"{_name} {_others[0].__name__}",
        aten=f"{_name}.default {_others[0].__name__}.default",
        sign=signs.of_both,
    )
_neutral("amax", [torch.amax], aten="amax.default", sign=signs.of_input)
_neutral("amin", [torch.amin], aten="amin.default", sign=signs.of_input)
for _name, _overloads in [
    ("max", "default dim other"),
    ("min", "default dim other"),
    ("median", "default dim"),
    ("nanmedian", "default dim"),
    ("mode", "default"),
    ("kthvalue", "default"),
    ("topk", "default"),
    ("sort", "default stable"),
    ("cummax", "default"),
    ("cummin", "default"),
]:
    _neutral(
        _name,
        [getattr(torch, _name)],
        aten=" ".join(f"{_name}.{overload}" for overload in _overloads.split()),
        results="values indices",
        discrete_results=(1,),
    )
_neutral("logsumexp", [torch.logsumexp], aten="logsumexp.default")  # the soft maximum: its gradient is shares of one

# Results that are integers, truth values, or constant piece by piece: to relevance they are constants.


def _all_overloads(packet: str) -> str:
    """All overloads of an ATen operator that return what they compute."""
    known = getattr(torch.ops.aten, packet).overloads() if hasattr(torch.ops.aten, packet) else []
    return " ".join(f"{packet}.{name}" for name in known if "out" not in name and name not in ("int", "str", "dimname"))


_comparisons = ("eq", "ne", "lt", "le", "gt", "ge")
_python_spellings: dict[str, tuple[list[Function], list[Function], str, str]] = {  # functions, in place, methods, likewise
    **{name: ([getattr(operator, name)], [], f"__{name}__", "") for name in _comparisons},
    "bitwise_and": ([operator.and_], [operator.iand], "__and__ __rand__", "__iand__"),
    "bitwise_or": ([operator.or_], [operator.ior], "__or__ __ror__", "__ior__"),
    "bitwise_xor": ([operator.xor], [operator.ixor], "__xor__ __rxor__", "__ixor__"),
    "bitwise_not": ([operator.invert], [], "__invert__", ""),
    "round": ([builtins.round], [], "__round__", ""),
    "floor": ([math.floor], [], "__floor__", ""),
    "ceil": ([math.ceil], [], "__ceil__", ""),
    "trunc": ([torch.fix], [], "fix", "fix_"),
}
for _name in [
    *(*_comparisons, "isclose", "isin", "isnan", "isinf", "isfinite", "signbit", "logical_not", "logical_and", "logical_or"),
    *("logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "all", "any", "count_nonzero", "nonzero"),
    *("argmax", "argmin", "argsort", "searchsorted", "bucketize", "bincount"),
    *("sign", "sgn", "round", "floor", "ceil", "trunc"),
]:
    _functions_of, _inplace_of, _methods_of, _inplace_methods_of = _python_spellings.get(_name, ([], [], "", ""))
    _logic = _name.removeprefix("bitwise_") if _name in ("bitwise_and", "bitwise_or", "bitwise_xor") else ""
    _integers = "0 1 input other" if _logic else "0 input" if _name == "bitwise_not" else ""
    _neutral(
        _name,
        [getattr(torch, _name), *_functions_of],
        inplace=_inplace_of,
        methods=f"{_name} {_methods_of}",
        inplace_methods=f"{_name}_ {_inplace_methods_of}" if hasattr(torch.Tensor, f"{_name}_") else _inplace_methods_of,
        aten=f"{_all_overloads(_name)} {_all_overloads(f'__{_logic}__')}" if _logic else _all_overloads(_name),
        discrete=True,
        indices=_integers,
    )
_row(
    "floor_divide",
    types.Neutral,
    floor_divided,
    "input other",
    functions=[torch.floor_divide, operator.floordiv],
    inplace=[operator.ifloordiv],
    methods="floor_divide __floordiv__",
    inplace_methods="floor_divide_ __ifloordiv__",
    aten=_all_overloads("floor_divide"),
    discrete=True,
    reflected="floor_divides",
)
_row("floor_divides", types.Neutral, floor_divides, "input other", methods="__rfloordiv__", discrete=True)
_row(
    "heaviside",
    types.Neutral,
    heaviside,
    "input values",
    functions=[torch.heaviside],
    methods="heaviside",
    aten="heaviside.default",
    discrete=True,
)
_row(
    "histc",
    types.Neutral,
    histogram,
    "input bins=100 min=0 max=0",
    functions=[torch.histc],
    methods="histc",
    aten="histc.default",
    discrete=True,
)
_neutral("to_integer", methods="bool long int short byte char", discrete=True)
_neutral("one_hot", [_f.one_hot], methods="", aten="one_hot.default", discrete=True, indices="0 input self")

"""The operator table: what every callable that a front end can emit means.

One row per operator: its kind, the names of its arguments in order, which of them carry data, parameters or buffers, and
every spelling (function, method, operator, in-place form, ATen overload) under which it can appear in a graph. The compiler
reads the table to normalize a graph, to build layers and to tell neutral operations; the tests read it for samples.
"""

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from . import layer as layers
from . import types
from .errors import InputError

Function = Callable[..., Any]
Adjoint = Callable[[torch.Tensor, Sequence[Any], dict[str, Any]], tuple[torch.Tensor | None, ...] | None]


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
    reflected: str = ""  # the row for a call whose first argument is a number: 1 - x is rsub(x, 1)

    @property
    def neutral(self) -> bool:
        """Whether the operator's gradient is its relevance: it moves values, or the winner takes all."""
        return issubclass(self.kind, (types.Neutral, types.MaxPool))

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
_methods: dict[str, Spelling] = {}
_operators: dict[str, Operator] = {}

#: Results that are host values or depend on shapes alone, never on the values of a tensor.
METADATA_METHODS = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_contiguous", "get_device"}
    | {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
)
METADATA_FUNCTIONS: frozenset[Function] = frozenset(
    {torch._assert, torch.numel, torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like}
)
METADATA_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "layout", "itemsize"})


def lookup(function: Function) -> Spelling | None:
    """The spelling behind a callable, or None if the table does not list it."""
    try:
        return _functions.get(function)
    except TypeError:  # unhashable callables are nobody's spelling
        return None


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
    reflected: str = "",
) -> None:
    """Add a row; `reordered` lists spellings whose positional arguments come in another order."""
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
        reflected,
    )
    _operators[name] = row
    order = tuple(parsed)
    for spelled in ([function] if function else []) + list(functions) + _aten(aten):
        _functions[spelled] = Spelling(row, order)
    for spelled in list(inplace) + _aten(inplace_aten):
        _functions[spelled] = Spelling(row, order, inplace=True)
    for spelled, text in reordered:
        _functions[spelled] = Spelling(row, tuple(text.split()))
    for method in methods.split():
        _methods[method] = Spelling(row, order)
    for method in inplace_methods.split():
        _methods[method] = Spelling(row, order, inplace=True)


# --- adjoints: the transposed maps of operators that are linear in their data ---------------------------------------------


def _linear_adjoint(
    gradient: torch.Tensor, inputs: Sequence[Any], arguments: dict[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    return (torch.matmul(gradient, arguments["weight"]),)


def _per_dimension(value: Any, dimensions: int) -> list[int]:
    return [value] * dimensions if isinstance(value, int) else list(value) * (dimensions // len(value))


def _convolution_adjoint(dimensions: int, transposed: bool) -> Adjoint:
    def adjoint(
        gradient: torch.Tensor, inputs: Sequence[Any], arguments: dict[str, Any]
    ) -> tuple[torch.Tensor | None, ...] | None:
        (input,) = inputs
        padding = arguments["padding"]
        if isinstance(padding, str):
            if padding != "valid":
                return None  # "same" may pad unevenly: the general route differentiates the forward
            padding = 0
        batched = input.ndim == dimensions + 2
        result = torch.ops.aten.convolution_backward(
            gradient if batched else gradient.unsqueeze(0),
            input if batched else input.unsqueeze(0),
            arguments["weight"],
            None,
            _per_dimension(arguments["stride"], dimensions),
            _per_dimension(padding, dimensions),
            _per_dimension(arguments["dilation"], dimensions),
            transposed,
            _per_dimension(arguments.get("output_padding", 0), dimensions),
            arguments["groups"],
            [True, False, False],
        )[0]
        return (result if batched else result.squeeze(0),)

    return adjoint


def _addition_adjoint(
    gradient: torch.Tensor, inputs: Sequence[Any], arguments: dict[str, Any]
) -> tuple[torch.Tensor | None, ...] | None:
    if arguments["alpha"] != 1:
        return None
    return tuple(gradient.sum_to_size(value.shape) for value in inputs)


# --- linear layers ---------------------------------------------------------------------------------------------------------

_row(
    "linear",
    types.Linear,
    functional.linear,
    "input weight bias=None",
    parameters="weight bias",
    modules=[nn.Linear],
    aten="linear.default",
    adjoint=_linear_adjoint,
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
        adjoint=_convolution_adjoint(_dimensions, transposed=False),
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
        adjoint=_convolution_adjoint(_dimensions, transposed=True),
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
    _row(f"max_pool{_dimensions}d_with_indices", types.MaxPool, functions=[_pool_indices])
    _row(
        f"adaptive_max_pool{_dimensions}d",
        types.MaxPool,
        _adaptive,
        "input output_size return_indices=False",
        modules=[_adaptive_module],
    )
    _row(f"adaptive_max_pool{_dimensions}d_with_indices", types.MaxPool, functions=[_adaptive_indices])

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
    adjoint=_addition_adjoint,
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
_row("unflatten", types.Neutral, modules=[nn.Unflatten], methods="unflatten", functions=[torch.unflatten], view=True)
_neutral("view", methods="view view_as", aten="view.default")
_neutral("reshape", [torch.reshape], methods="reshape reshape_as", aten="reshape.default")
_neutral("permute", [torch.permute], aten="permute.default")
_neutral("transpose", [torch.transpose, torch.swapaxes], methods="transpose swapaxes t", aten="transpose.int")
_neutral("movedim", [torch.movedim, torch.moveaxis], methods="movedim moveaxis")
_neutral("squeeze", [torch.squeeze], aten="squeeze.default squeeze.dim squeeze.dims")
_neutral("unsqueeze", [torch.unsqueeze], aten="unsqueeze.default")
_neutral("expand", methods="expand expand_as", aten="expand.default")
_neutral("getitem", [operator.getitem], methods="__getitem__")
_neutral("select", [torch.select], aten="select.int")
_neutral("narrow", [torch.narrow])
_neutral("slice", methods="", aten="slice.Tensor")
_neutral("chunk", [torch.chunk], aten="chunk.default")
_neutral("split", [torch.split], methods="split", aten="split.Tensor split_with_sizes.default")
_neutral("unbind", [torch.unbind], aten="unbind.int")
_neutral("contiguous", aten="contiguous.default")
_neutral("to", methods="to float double half bfloat16 type_as")
_neutral("alias", methods="", aten="alias.default")
_neutral("clone", [torch.clone], aten="clone.default", view=False)
_neutral("repeat", aten="repeat.default", view=False)
_neutral("cat", [torch.cat, torch.concat, torch.concatenate], methods="", aten="cat.default", view=False)
_neutral("stack", [torch.stack], methods="", aten="stack.default", view=False)
_neutral("flip", [torch.flip], aten="flip.default", view=False)
_neutral("roll", [torch.roll], aten="roll.default", view=False)


def require_matrix(input: torch.Tensor) -> torch.Tensor:
    """`input`, which must have two dimensions: where the compiler could not prove what it relied on."""
    if input.ndim != 2:
        raise InputError(
            f"a batch norm was merged into a dense layer on the assumption that its input has shape (batch, features), but it "
            f"has {input.ndim} dimensions. Pass example_inputs to lrpfx.transform, so that the compiler knows the shapes."
        )
    return input


_neutral("require_matrix", [require_matrix], methods="")
_row(
    "pad",
    types.Neutral,
    functional.pad,
    "input pad mode='constant' value=None",
    aten="pad.default constant_pad_nd.default",
)
_neutral("pixel_shuffle", [_f.pixel_shuffle, _f.pixel_unshuffle], methods="", aten="pixel_shuffle.default", view=False)

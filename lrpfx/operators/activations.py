"""Element-wise functions."""

import builtins
import math
import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from lrpfx.ir import kinds
from lrpfx.ir.node import is_data
from lrpfx.ir.operator import Bound, Builder, Derivative, ExampleCall, Function, Operator, Probability, Ratio, SignOf
from lrpfx.operators import mixing, signs
from lrpfx.operators.row import standard_row
from lrpfx.operators.samples import MATRIX, POSITIVE, call, signal, weight

_MATRIX = call(input=MATRIX)


def _activation(
    name: str,
    arguments: str = "input",
    function: Function | None = None,
    sample: ExampleCall | None = _MATRIX,
    **facts: Any,
) -> Operator:
    options: dict[str, Any] = {"keeps_rank": True, "mixes": mixing.no_dimension}
    return standard_row(name, kinds.Activation, arguments, function, sample=sample, **options, **facts)


def _bounded(bound: Bound) -> int:
    """The certainty that a clamped value scales another: 1 if it has both bounds, otherwise 0."""
    return int(bound.get("min") is not None and bound.get("max") is not None)


def _bounded_by_data(build: Builder) -> fx.Node | None:
    """Use maximum and minimum if a bound depends on the input: it takes the relevance of the entries that it replaces."""
    result: fx.Node = build["input"]
    bounds = {"min": "maximum", "max": "minimum"}
    given = [name for name in bounds if build.arguments.get(name) is not None]
    if not any(is_data(build[name]) for name in given):
        return None
    for name in given:
        result = build.call(bounds[name] if is_data(build[name]) else f"clamp_{name}", result, build[name])
    return result


#: Powers that have functions of their own.
_ROOTS = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}


def _root(build: Builder) -> fx.Node | None:
    """The function that a power is, if it has a name."""
    exponent = build["exponent"]
    name = _ROOTS.get(exponent) if isinstance(exponent, (int, float)) else None
    return None if name is None else build.call(name, build["input"])


# --- f(x) / x, for relevance that passes unchanged --------------------------------------------------------------------------


def _step(input: torch.Tensor, bound: Bound) -> torch.Tensor:
    return (input > 0).to(input.dtype)


def _ratio_of_leaky_relu(input: torch.Tensor, bound: Bound) -> torch.Tensor:
    return torch.where(input > 0, 1.0, torch.full_like(input, bound["negative_slope"]))


def _ratio_of_gelu(input: torch.Tensor, bound: Bound) -> torch.Tensor:
    if bound["approximate"] == "tanh":
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (input + 0.044715 * input**3)))
    half = torch.full((), 0.5, dtype=input.dtype, device=input.device)
    return torch.add(half, torch.erf(input * math.sqrt(0.5)), alpha=0.5)


def _ratio_of_hardswish(input: torch.Tensor, bound: Bound) -> torch.Tensor:
    return ((input + 3) / 6).clamp(0, 1)


def _ratio_of_hardshrink(input: torch.Tensor, bound: Bound) -> torch.Tensor:
    passes = torch.ones_like(input, dtype=torch.bool) if bound["lambd"] <= 0 else input.abs() > bound["lambd"]
    return passes.to(input.dtype)


def _ratio_of_softshrink(input: torch.Tensor, bound: Bound) -> torch.Tensor:
    return _quotient(functional.softshrink, float(bound["lambd"] == 0))(input, bound)


def _quotient(function: Function, slope: float = 1.0) -> Ratio:
    """f(x) / x for a function with f(0) = 0 and this derivative at 0. torch computes such f(x) to relative precision near 0."""

    def ratio(input: torch.Tensor, bound: Bound) -> torch.Tensor:
        options = {name: value for name, value in bound.items() if name != "input"}
        zero = input == 0
        quotient = function(input, **options) / torch.where(zero, torch.ones_like(input), input)
        return torch.where(zero, torch.full_like(input, slope), quotient)

    return ratio


# --- derivatives ------------------------------------------------------------------------------------------------------------


def _derivative_of_gelu(input: torch.Tensor, bound: Bound) -> torch.Tensor:
    found: torch.Tensor = torch.ops.aten.gelu_backward(torch.ones_like(input), input, approximate=bound["approximate"])
    return found


def _derivative_of_sigmoid(input: torch.Tensor, bound: Bound) -> torch.Tensor:
    return torch.sigmoid(input) * torch.sigmoid(-input)


def _derivative_of_hardsigmoid(input: torch.Tensor, bound: Bound) -> torch.Tensor:
    return (input.abs() < 3).to(input.dtype) / 6


def _backward(name: str) -> Derivative:
    """The derivative by a kernel of torch that takes the gradient of the result, and the input."""
    kernel = getattr(torch.ops.aten, name)
    return lambda input, bound: kernel(torch.ones_like(input), input)


def _remainder(name: str, **facts: Any) -> Operator:
    return _activation(name, "input other", sample=call(input=POSITIVE, other=0.7), **facts)


def _of_torch(name: str, sign: SignOf | None = None, sample: ExampleCall = _MATRIX, also: str = "", **facts: Any) -> Operator:
    """A row for a function without options that torch offers under one name, or two, in all its forms."""
    return _activation(name, spelled=f"{name} {also}", sign=sign, sample=sample, **facts)


ROWS: tuple[Operator, ...] = (
    _activation(
        "relu",
        function=functional.relu,
        sign=signs.never_negative,
        positive_part=True,
        clips=True,
        keeps_nonpositive=True,
        ratio=_step,
    ),
    _activation(
        "relu6",
        sign=signs.never_negative,
        scales=1,
        clips=True,
        keeps_nonpositive=True,
        ratio=_quotient(functional.relu6, 0.0),
    ),
    _activation(
        "hardtanh",
        "input min_val=-1.0 max_val=1.0",
        modules=[nn.Hardtanh, nn.ReLU6],
        sign=signs.of_hardtanh,
        scales=1,
        clips=True,
        sample=call(input=MATRIX, min_val=-0.3, max_val=0.4),
    ),
    _activation(
        "clamp",
        "input min=None max=None",
        spelled="clamp clip",
        sign=signs.of_clamp,
        scales=_bounded,
        clips=True,
        decomposition=_bounded_by_data,
        sample=call(input=MATRIX, min=-0.3, max=0.4),
    ),
    _activation(
        "clamp_min",
        "input min",
        sign=signs.of_clamp,
        clips=True,
        decomposition=_bounded_by_data,
        sample=call(input=MATRIX, min=-0.3),
    ),
    _activation(
        "clamp_max",
        "input max",
        sign=signs.of_clamp,
        clips=True,
        decomposition=_bounded_by_data,
        sample=call(input=MATRIX, max=0.3),
    ),
    _activation(
        "elu",
        "input alpha=1.0",
        aten="elu.default",
        inplace_aten="elu_.default",
        sign=signs.of_elu,
        ratio=_quotient(functional.elu),
        sample=call(input=MATRIX, alpha=0.7),
    ),
    _activation("selu", function=functional.selu, sign=signs.of_input, ratio=_quotient(functional.selu, 1.0507009873554805)),
    _activation(
        "celu",
        "input alpha=1.0",
        functional.celu,
        sign=signs.of_elu,
        ratio=_quotient(functional.celu),
        sample=call(input=MATRIX, alpha=0.7),
    ),
    _activation(
        "gelu",
        "input approximate='none'",
        sign=signs.of_input,
        ratio=_ratio_of_gelu,
        derivative=_derivative_of_gelu,
        sample=call(input=MATRIX, approximate="tanh"),
    ),
    _activation(
        "sigmoid",
        spelled="sigmoid expit",
        sign=signs.never_negative,
        scales=2,
        probability=Probability.OF_ONE_LOGIT,
        derivative=_derivative_of_sigmoid,
    ),
    # torch's own derivative has a sixth in single precision
    _activation("hardsigmoid", sign=signs.never_negative, scales=2, derivative=_derivative_of_hardsigmoid),
    _activation(
        "silu", sign=signs.of_input, ratio=lambda input, bound: torch.sigmoid(input), derivative=_backward("silu_backward")
    ),
    _activation("hardswish", sign=signs.of_input, ratio=_ratio_of_hardswish, derivative=_backward("hardswish_backward")),
    _activation("mish", sign=signs.of_input, ratio=lambda input, bound: torch.tanh(functional.softplus(input))),
    _activation(
        "tanh",
        sign=signs.of_input,
        scales=1,
        ratio=_quotient(torch.tanh),
        derivative=lambda input, bound: 1 - torch.tanh(input).square(),
    ),
    _activation(
        "tanhshrink",
        sign=signs.of_input,
        whole={"(Tensor input) -> Tensor": (functional.tanhshrink,)},
        ratio=_quotient(functional.tanhshrink, 0.0),
    ),
    _activation(
        "softsign",
        sign=signs.of_input,
        whole={"(Tensor input) -> Tensor": (functional.softsign,)},
        ratio=lambda input, bound: 1 / (1 + input.abs()),
    ),
    _activation(
        "softplus", "input beta=1.0 threshold=20.0", sign=signs.of_softplus, sample=call(input=MATRIX, beta=2.0, threshold=0.5)
    ),
    _activation(
        "softshrink",
        "input lambd=0.5",
        sign=signs.of_input,
        whole={"(Tensor input, float lambd=0.5) -> Tensor": (functional.softshrink,)},
        ratio=_ratio_of_softshrink,
        sample=call(input=MATRIX, lambd=0.2),
    ),
    _activation(
        "hardshrink",
        "input lambd=0.5",
        sign=signs.of_input,
        whole={"(Tensor input, float lambd=0.5) -> Tensor": (torch.hardshrink, functional.hardshrink, torch.Tensor.hardshrink)},
        ratio=_ratio_of_hardshrink,
        sample=call(input=MATRIX, lambd=0.2),
    ),
    _activation("logsigmoid", spelled="log_sigmoid", sign=signs.never_positive, probability=Probability.OF_ONE_LOGIT),
    _activation(
        "leaky_relu",
        "input negative_slope=0.01",
        sign=signs.of_leaky_relu,
        ratio=_ratio_of_leaky_relu,
        sample=call(input=MATRIX, negative_slope=0.3),
    ),
    _activation(
        "rrelu",
        "input lower=0.125 upper=0.3333333333333333 training=False",
        functional.rrelu,
        aten="rrelu.default",
        inplace_aten="rrelu_.default",
        sample=call(input=MATRIX, lower=0.2, upper=0.3, training=False),
    ),
    _activation(
        "threshold",
        "input threshold value",
        functional.threshold,
        sign=signs.of_threshold,
        sample=call(input=MATRIX, threshold=0.1, value=0.3),
    ),
    _activation("prelu", "input weight", sign=signs.of_prelu, broadcasts=False, sample=call(input=MATRIX, weight=weight(4))),
    _remainder("remainder", functions=[operator.mod], methods="__mod__"),
    _remainder("fmod"),
    _of_torch("exp", signs.never_negative, of_softmax=True, derivative=lambda input, bound: torch.exp(input)),
    _of_torch("exp2", signs.never_negative, of_softmax=True),
    _of_torch("expm1", signs.of_input, ratio=_quotient(torch.expm1)),
    _of_torch("log", sample=call(input=POSITIVE), logarithm=True, of_softmax=True),
    _of_torch("log1p", signs.of_input, call(input=POSITIVE), ratio=_quotient(torch.log1p)),
    _of_torch("log2", sample=call(input=POSITIVE)),
    _of_torch("log10", sample=call(input=POSITIVE)),
    _of_torch("sqrt", signs.never_negative, call(input=POSITIVE), power=0.5),
    _of_torch("rsqrt", signs.never_negative, call(input=POSITIVE), scales=2, power=-0.5),
    _of_torch(
        "abs",
        signs.never_negative,
        also="absolute",
        functions=[builtins.abs],
        methods="__abs__",
        returns_complex=False,
        ratio=lambda input, bound: input.sign(),
    ),
    _of_torch("square", signs.never_negative, power=2, ratio=lambda input, bound: input),
    _of_torch("erf", signs.of_input, scales=1, ratio=_quotient(torch.erf, 2 / math.sqrt(math.pi))),
    _of_torch("erfc", signs.never_negative, scales=2),
    _of_torch(
        "erfinv",
        signs.of_input,
        call(input=signal(2, 4, low=-0.9, high=0.9)),
        ratio=_quotient(torch.erfinv, math.sqrt(math.pi) / 2),
    ),
    _activation("ndtr", sign=signs.never_negative, scales=2),
    _activation("log_ndtr", sign=signs.never_positive),
    _of_torch("sin", ratio=_quotient(torch.sin)),
    _of_torch("cos"),
    _of_torch("tan", ratio=_quotient(torch.tan)),
    _of_torch("sinh", signs.of_input, ratio=_quotient(torch.sinh)),
    _of_torch("cosh", signs.never_negative),
    _of_torch("atan", signs.of_input, also="arctan", ratio=_quotient(torch.atan)),
    _of_torch("asin", signs.of_input, call(input=signal(2, 4, low=-0.9, high=0.9)), also="arcsin", ratio=_quotient(torch.asin)),
    _of_torch("acos", signs.never_negative, call(input=signal(2, 4, low=-0.9, high=0.9)), also="arccos"),
    _of_torch(
        "atanh", signs.of_input, call(input=signal(2, 4, low=-0.9, high=0.9)), also="arctanh", ratio=_quotient(torch.atanh)
    ),
    _of_torch("acosh", signs.never_negative, call(input=signal(2, 4, low=1.1, high=2.0)), also="arccosh"),
    standard_row(
        "atan2",
        kinds.Gate,
        "input other",
        spelled="atan2 arctan2",
        elementwise=True,
        mixes=mixing.no_dimension,
        sample=call(input=MATRIX, other=POSITIVE),
    ),
    _of_torch("asinh", signs.of_input, also="arcsinh", ratio=_quotient(torch.asinh)),
    _of_torch("reciprocal", signs.of_input, call(input=POSITIVE), scales=2, power=-1),
    _of_torch("frac", signs.of_input),
    _of_torch("logit", sample=call(input=signal(2, 4, low=0.1, high=0.9), eps=0.2), arguments="input eps=None"),
    _of_torch("deg2rad", signs.of_input),
    _of_torch("rad2deg", signs.of_input),
    _of_torch("sinc"),
    _of_torch(
        "nan_to_num",
        None,
        call(input=MATRIX, nan=0.1, posinf=2.0, neginf=-2.0),
        arguments="input nan=None posinf=None neginf=None",
    ),
    _activation(
        "pow",
        "input exponent",
        functions=[operator.pow],
        inplace=[operator.ipow],
        methods="__pow__",
        inplace_methods="__ipow__",
        reflected="exponential",
        sign=signs.of_power,
        decomposition=_root,
        power="exponent",
        sample=call(input=POSITIVE, exponent=3.0),
    ),
    _activation(
        "exponential",
        "input other",
        spelled="",
        methods="__rpow__",
        reordered=[(torch.ops.aten.pow.Scalar, "other input")],
        sign=signs.of_exponential,
        of_softmax=True,
        sample=call(input=MATRIX, other=2.0),
    ),
    _activation(
        "straight_through",
        "input value",
        controls="value",
        broadcasts=False,
        sample=None,
        without_sample="only the compiler inserts it",
    ),
    _activation(
        "thresholded_relu",
        "input scale shift",
        modules=[nn.ReLU],
        buffers="scale shift",
        broadcasts=False,
        sample=None,
        without_sample="only the compiler inserts it",
    ),
)

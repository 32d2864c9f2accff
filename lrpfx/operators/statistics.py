"""Norms, distances, standard deviations and variances."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from lrpfx.ir import kinds
from lrpfx.ir.operator import Between, Builder, Operator
from lrpfx.operators import mixing, signs
from lrpfx.operators.row import standard_row
from lrpfx.operators.samples import MATRIX, call, joined, of, signal
from lrpfx.support.torch_internals import OpOverload


def _distance(build: Builder) -> fx.Node:
    """The norm of the difference of two vectors, with eps added to each entry."""
    difference = build.call("add", build.call("sub", build["x1"], build["x2"]), build["eps"])
    return build.call("norm", difference, build["p"], -1, build["keepdim"], target=torch.norm)


def _norm_of_difference(build: Builder) -> fx.Node:
    return build.call("norm", build.call("sub", build["input"], build["other"]), build["p"], target=torch.norm)


def _norm_of_two(build: Builder) -> fx.Node:
    """The norm of vectors of two entries, whose derivative is finite where both are 0."""
    both = build.call("broadcast_tensors", build["input"], build["other"], target=torch.broadcast_tensors)
    pairs = build.call("stack", both, -1, target=torch.stack)
    return build.call("norm", pairs, 2, -1, target=torch.norm)


def _distances(build: Builder) -> fx.Node:
    """The norms of the differences between all vectors of one set and all vectors of another."""
    first = build.call("unsqueeze", build["x1"], -2, target=torch.unsqueeze)
    second = build.call("unsqueeze", build["x2"], -3, target=torch.unsqueeze)
    return build.call("norm", build.call("sub", first, second), build["p"], -1, target=torch.norm)


def _deviation_of(function: Any) -> Any:
    """The standard deviation function that takes the same arguments as a given variance function."""
    if isinstance(function, OpOverload):
        return getattr(torch.ops.aten.std, function._overloadname)
    return torch.Tensor.std if function is torch.Tensor.var else torch.std


def _variance(build: Builder) -> fx.Node:
    """The square of the standard deviation. A rule on the variance itself, which is quadratic, would double relevance."""
    node = build.node
    options: dict[str, Any] = dict(node.kwargs)
    deviation = build.call("std", *node.args, target=_deviation_of(node.target), **options)
    return build.call("square", deviation)


def _with_mean(squared: bool) -> Callable[[Builder], tuple[fx.Node, fx.Node]]:
    """The standard deviation, or the variance as its square, and the mean, as separate calls."""

    def decompose(build: Builder) -> tuple[fx.Node, fx.Node]:
        data, *positional = build.node.args
        options: dict[str, Any] = dict(build.node.kwargs)
        for aliased, name in (("axis", "dim"), ("keepdims", "keepdim")):
            if aliased in options:
                options[name] = options.pop(aliased)
        names = ("unbiased",) if positional and isinstance(positional[0], bool) else ("dim", "unbiased", "keepdim")
        options.update(zip(names, positional, strict=False))
        if "unbiased" in options:
            options["correction"] = int(options.pop("unbiased"))
        spread = build.call("std", data, target=torch.std, **options)
        if squared:
            spread = build.call("square", spread)
        mean = build.call("mean", data, **{name: value for name, value in options.items() if name != "correction"})
        return spread, mean

    return decompose


_LP_POOL = (
    "(Tensor input, float norm_type, int{dimensions} kernel_size, int{dimensions}? stride=None, bool ceil_mode=False) -> Tensor"
)


ROWS: tuple[Operator, ...] = (
    standard_row(
        "std",
        kinds.Statistic,
        between=Between.ROOT,
        sign=signs.never_negative,
        mixes=mixing.given(),
        sample=of(lambda x: x.std(1, correction=0, keepdim=True)),
    ),
    standard_row(
        "var",
        kinds.Statistic,
        sign=signs.never_negative,
        decomposition=_variance,
        mixes=mixing.given(),
        sample=of(lambda x: torch.var(x, 1, unbiased=False, keepdim=True)),
    ),
    standard_row(
        "var_mean",
        kinds.Statistic,
        decomposition=_with_mean(squared=True),
        sample=of(lambda x: joined(torch.var_mean(x, 1, keepdim=True), 1)),
    ),
    standard_row(
        "std_mean",
        kinds.Statistic,
        decomposition=_with_mean(squared=False),
        sample=of(lambda x: joined(torch.std_mean(x, dim=1, correction=0, keepdim=True), 1)),
    ),
    standard_row(
        "norm",
        kinds.Statistic,
        between=Between.POWER_ROOT,
        spelled="norm linalg_norm linalg_vector_norm",
        functions=[torch.linalg.norm, torch.linalg.vector_norm],
        sign=signs.never_negative,
        mixes=mixing.given(2),
        sample=of(lambda x: x.norm(3, 1)),
    ),
    standard_row(
        "lp_pool",
        kinds.Statistic,
        between=Between.POWER_ROOT,
        spelled="lp_pool1d lp_pool2d lp_pool3d",
        modules=[nn.LPPool1d, nn.LPPool2d, nn.LPPool3d],
        whole={
            _LP_POOL.format(dimensions=""): (functional.lp_pool1d,),
            _LP_POOL.format(dimensions="[2]"): (functional.lp_pool2d,),
            _LP_POOL.format(dimensions="[3]"): (functional.lp_pool3d,),
        },
        channels_second=True,
        sample=of(lambda x: functional.lp_pool2d(x, 2.0, 2), (2, 3, 4, 4)),
    ),
    standard_row(
        "cdist",
        kinds.Statistic,
        "x1 x2 p=2.0 compute_mode=None",
        data="x1 x2",
        sign=signs.never_negative,
        decomposition=_distances,
        sample=call(x1=signal(2, 3, 4), x2=signal(2, 5, 4), p=3.0),
    ),
    standard_row(
        "dist",
        kinds.Statistic,
        "input other p=2",
        sign=signs.never_negative,
        decomposition=_norm_of_difference,
        sample=call(batch=False, input=MATRIX, other=signal(2, 4), p=3),
    ),
    standard_row(
        "hypot",
        kinds.Statistic,
        "input other",
        sign=signs.never_negative,
        decomposition=_norm_of_two,
        sample=call(input=MATRIX, other=signal(2, 4)),
    ),
    standard_row(
        "pairwise_distance",
        kinds.Statistic,
        "x1 x2 p=2.0 eps=1e-06 keepdim=False",
        data="x1 x2",
        sign=signs.never_negative,
        decomposition=_distance,
        sample=call(loses="constants", x1=MATRIX, x2=signal(2, 4), p=3.0, eps=0.1, keepdim=True),
    ),
)

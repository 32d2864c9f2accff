"""Softmax and attention."""

import torch
from torch import fx, nn
from torch.nn import functional

from lrpfx.errors import CaptureError
from lrpfx.ir import kinds
from lrpfx.ir.node import node_info
from lrpfx.ir.operator import Between, Bound, Builder, Operator, Probability
from lrpfx.operators import mixing, signs
from lrpfx.operators.functions import (
    attention_bias,
    head_bias,
    masked_softmax,
    padding_bias,
    total_of_groups,
    total_over,
)
from lrpfx.operators.row import neutral, standard_row
from lrpfx.operators.samples import MATRIX, Fixed, call, signal, weight
from lrpfx.support.torch_internals import aten as aten_operator


def _total(values: torch.Tensor, bound: Bound) -> torch.Tensor:
    """The sum over the dimension of a softmax, which has torch's default."""
    return total_over(values, softmax_dimension(values.ndim) if bound["dim"] is None else bound["dim"])


def softmax_dimension(rank: int) -> int:
    """The dimension that torch derives from the number of them, if a softmax is given none."""
    return 0 if rank in (0, 1, 3) else 1


def _of_the_negative(build: Builder) -> fx.Node:
    negated = build.call("neg", build["input"])
    options = {} if build["dtype"] is None else {"dtype": build["dtype"]}
    return build.call("softmax", negated, build["dim"], **options)


def _attention(build: Builder) -> fx.Node:
    """Two matrix products and a softmax, with mask, scale, causality and grouped queries."""
    query, key, value, mask = build["query"], build["key"], build["value"], build["attn_mask"]
    if build["dropout_p"]:
        info = node_info(build.node)
        raise CaptureError(
            f"{info.name} ({info.source}) is attention with dropout. Call model.eval() before lrpfx.transform, and "
            "pass dropout_p=0.0 to functional.scaled_dot_product_attention in evaluation mode.",
            topic="training-mode",
        )
    scale = build.attention_scale(query) if build["scale"] is None else build["scale"]
    if build["enable_gqa"]:
        groups = build.queries_per_key(query, key)
        key, value = (
            build.call("repeat_interleave", tensor, groups, -3, target=torch.repeat_interleave, part=f"repeated {what}")
            for tensor, what in ((key, "key"), (value, "value"))
        )
    transposed = build.call("transpose", key, -2, -1, target=torch.transpose, part="transposed")
    scaled = build.call("mul", query, scale, part="scaled")
    scores = build.call("matmul", scaled, transposed, part="scores")
    if build["is_causal"]:
        scores = build.call("add", scores, build.causal_bias(query, build["key"]), part="causal")
    if mask is None:
        weights = build.call("softmax", scores, -1, target=torch.softmax, part="weights")
    else:
        if build.is_boolean(mask):
            forbidden = build.call("logical_not", mask, target=torch.logical_not, part="mask")
            scores = build.call("masked_fill", scores, forbidden, -torch.inf, part="masked")
        else:
            bias = build.call("attention_bias", mask, build.dtype_of(query), target=attention_bias, part="mask")
            scores = build.call("add", scores, bias, part="masked")
        weights = build.call("masked_softmax", scores, -1, target=masked_softmax, part="weights")
    return build.call("matmul", weights, value, part="output")


ROWS: tuple[Operator, ...] = (
    standard_row(
        "softmax",
        kinds.Softmax,
        "input dim=None dtype=None",
        functional.softmax,
        between=Between.SOFTMAX,
        modules=[nn.Softmax, nn.Softmax2d],
        reordered=[(functional.softmax, "input dim _stacklevel dtype")],
        sign=signs.never_negative,
        scales=2,
        probability=Probability.OF_ALL_LOGITS,
        total=_total,
        mixes=mixing.given(),
        keeps_dimensions=True,
        sample=call(loses="expansion", input=MATRIX, dim=1, dtype=torch.float64),
    ),
    standard_row(
        "softmin",
        kinds.Softmax,
        "input dim=None dtype=None",
        reordered=[(functional.softmin, "input dim _stacklevel dtype")],
        sign=signs.never_negative,
        scales=2,
        probability=Probability.OF_ALL_LOGITS,
        negates=True,
        total=_total,
        decomposition=_of_the_negative,
        mixes=mixing.given(),
        keeps_dimensions=True,
        sample=call(loses="expansion", input=MATRIX, dim=1, dtype=torch.float64),
    ),
    standard_row(
        "masked_softmax",
        kinds.Softmax,
        "input dim",
        between=Between.SOFTMAX,
        reordered=[(aten_operator("_safe_softmax.default"), "input dim dtype")],
        sign=signs.never_negative,
        scales=2,
        probability=Probability.OF_ALL_LOGITS,
        total=_total,
        mixes=mixing.given(),
        sample=call(loses="expansion", input=MATRIX, dim=1),
    ),
    standard_row(
        "exponential_shares",
        kinds.Softmax,
        "input exponentials sums dim",
        between=Between.SHARES,
        controls="exponentials sums",
        scales=2,
        probability=Probability.OF_ALL_LOGITS,
        total=lambda values, bound: total_over(values, bound["dim"]),
        mixes=mixing.given(),
        sample=call(
            loses="expansion",
            batch=False,
            input=MATRIX,
            exponentials=weight(2, 4, low=0.1),
            sums=weight(2, 1, low=5.0, high=6.0),
            dim=1,
        ),
    ),
    standard_row(
        "shares_of_groups",
        kinds.Softmax,
        "input exponentials sums totals index dim",
        between=Between.SHARES,
        controls="exponentials sums totals",
        scales=2,
        probability=Probability.OF_ALL_LOGITS,
        total=lambda values, bound: total_of_groups(values, bound["totals"], bound["index"], bound["dim"]),
        mixes=mixing.given(),
        sample=call(
            loses="expansion",
            batch=False,
            input=MATRIX,
            exponentials=weight(2, 4, low=0.1),
            sums=weight(2, 4, low=5.0, high=6.0),
            totals=weight(2, 2),
            index=Fixed([0, 1, 1, 0]),
            dim=1,
        ),
    ),
    standard_row(
        "scaled_dot_product_attention",
        kinds.MatMul,
        "query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False",
        data="query key value attn_mask",
        masked_by="attn_mask",
        aten="scaled_dot_product_attention.default",
        decomposition=_attention,
        sample=call(
            loses="expansion constants",
            query=signal(2, 4, 3, 4),
            key=signal(2, 2, 3, 4),
            value=signal(2, 2, 3, 4),
            attn_mask=weight(3, 3),
            dropout_p=0.0,
            is_causal=False,
            scale=0.3,
            enable_gqa=True,
        ),
    ),
    neutral(
        "attention_bias",
        spelled="",
        functions=[attention_bias],
        mixes=mixing.no_dimension,
        keeps_infinity=True,
        without_sample="only the compiler inserts it",
    ),
    neutral(
        "padding_bias", spelled="", functions=[padding_bias], keeps_infinity=True, without_sample="only the compiler inserts it"
    ),
    neutral("head_bias", spelled="", functions=[head_bias], keeps_infinity=True, without_sample="only the compiler inserts it"),
    standard_row(
        "log_softmax",
        kinds.Activation,
        "input dim dtype=None",
        between=Between.LOG_SOFTMAX,
        reordered=[(functional.log_softmax, "input dim _stacklevel dtype")],
        sign=signs.never_positive,
        probability=Probability.OF_ALL_LOGITS,
        keeps_rank=True,
        mixes=mixing.given(),
        sample=call(input=MATRIX, dim=1, dtype=torch.float64),
    ),
)

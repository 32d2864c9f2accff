"""Dropout, which the compiler removes."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from lrpfx.ir import kinds
from lrpfx.ir.operator import Function, Operator
from lrpfx.operators import mixing
from lrpfx.operators.row import standard_row
from lrpfx.operators.samples import IMAGE, call, signal

_aten = torch.ops.aten


def _dropout(name: str, shape: tuple[int, ...], native: Sequence[Function] = ()) -> Operator:
    return standard_row(
        name,
        kinds.Dropout,
        "input p=0.5 training=True",
        getattr(functional, name),
        functions=native,
        view=True,
        mixes=mixing.no_dimension,
        sample=call(input=signal(2, 4, *shape), p=0.3, training=False),
    )


ROWS: tuple[Operator, ...] = (
    _dropout("dropout", (), [torch.dropout, _aten.dropout.default]),
    _dropout("dropout1d", (3,)),
    _dropout("dropout2d", (3, 3), [torch.feature_dropout, _aten.feature_dropout.default]),
    _dropout("dropout3d", (3, 3, 3)),
    _dropout("alpha_dropout", (), [torch.alpha_dropout, _aten.alpha_dropout.default]),
    _dropout("feature_alpha_dropout", (3, 3), [torch.feature_alpha_dropout, _aten.feature_alpha_dropout.default]),
    standard_row(
        "stochastic_depth",
        kinds.Dropout,
        "input p mode training=True",
        foreign="torchvision.ops.stochastic_depth.stochastic_depth",
        view=True,
        mixes=mixing.no_dimension,
        sample=call(input=IMAGE, p=0.3, mode="row", training=False),
    ),
)

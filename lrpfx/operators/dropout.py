"""Dropout, which the compiler removes."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from lrpfx.ir import kinds
from lrpfx.ir.operator import Function, Operator
from lrpfx.operators import mixing
from lrpfx.operators.row import row
from lrpfx.operators.samples import IMAGE, call, signal

_aten = torch.ops.aten


def _dropout(name: str, module: type, shape: tuple[int, ...], native: Sequence[Function] = ()) -> Operator:
    return row(
        name,
        kinds.Dropout,
        getattr(functional, name),
        "input p=0.5 training=True",
        modules=[module],
        functions=native,
        view=True,
        mixes=mixing.no_dimension,
        sample=call(input=signal(2, 4, *shape), p=0.3, training=False),
    )


ROWS: tuple[Operator, ...] = (
    _dropout("dropout", nn.Dropout, (), [torch.dropout, _aten.dropout.default]),
    _dropout("dropout1d", nn.Dropout1d, (3,)),
    _dropout("dropout2d", nn.Dropout2d, (3, 3), [torch.feature_dropout, _aten.feature_dropout.default]),
    _dropout("dropout3d", nn.Dropout3d, (3, 3, 3)),
    _dropout("alpha_dropout", nn.AlphaDropout, (), [torch.alpha_dropout, _aten.alpha_dropout.default]),
    _dropout(
        "feature_alpha_dropout",
        nn.FeatureAlphaDropout,
        (3, 3),
        [torch.feature_alpha_dropout, _aten.feature_alpha_dropout.default],
    ),
    row(
        "stochastic_depth",
        kinds.Dropout,
        None,
        "input p mode training=True",
        foreign="torchvision.ops.stochastic_depth.stochastic_depth",
        view=True,
        mixes=mixing.no_dimension,
        sample=call(input=IMAGE, p=0.3, mode="row", training=False),
    ),
)

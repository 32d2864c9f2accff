"""Resizing, and sampling of images on a grid."""

import torch
from torch import nn

from lrpfx.ir import kinds
from lrpfx.ir.operator import Between, Bound, Channels, NotAffineError, Operator
from lrpfx.operators import signs
from lrpfx.operators.channels import UNKNOWN_RANK, not_flat
from lrpfx.operators.functions import grid_sampled
from lrpfx.operators.row import standard_row
from lrpfx.operators.samples import IMAGE, call, of, signal


def _resized(channels: Channels, bound: Bound) -> Channels:
    """The channels after resizing. The weights of each result add up to 1, in all modes."""
    not_flat(channels)
    if channels.dimensions is None:
        raise NotAffineError(UNKNOWN_RANK)
    return channels


ROWS: tuple[Operator, ...] = (
    standard_row(
        "interpolate",
        kinds.Interpolation,
        "input size=None scale_factor=None mode='nearest' align_corners=None recompute_scale_factor=None antialias=False",
        modules=[nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d],
        sign=signs.of_interpolation,
        channels=_resized,
        keeps_dimensions=True,
        sample=call(
            input=IMAGE,
            size=None,
            scale_factor=(2.0, 1.5),
            mode="bilinear",
            align_corners=True,
            recompute_scale_factor=True,
            antialias=False,
        ),
    ),
    standard_row(
        "upsample",
        kinds.Interpolation,
        spelled="",
        modules=(),
        aten="upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_linear1d.vec "
        "upsample_bilinear2d.vec upsample_trilinear3d.vec upsample_bicubic2d.vec _upsample_bilinear2d_aa.vec "
        "_upsample_bicubic2d_aa.vec _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec "
        "_upsample_nearest_exact3d.vec",
        channels=_resized,
        keeps_dimensions=True,
        sample=of(lambda x: torch.ops.aten.upsample_nearest2d.vec(x, [6, 6], None), (2, 3, 4, 4)),
    ),
    standard_row(
        "grid_sample",
        kinds.Interpolation,
        "input grid mode='bilinear' padding_mode='zeros' align_corners=None",
        grid_sampled,
        spelled="grid_sample grid_sampler",
        aten="grid_sampler.default grid_sampler_2d.default grid_sampler_3d.default",
        aliases="interpolation_mode=mode",
        controls="grid",
        between=Between.SAMPLING,
        channels_second=True,
        sample=call(input=IMAGE, grid=signal(2, 3, 3, 2), mode="bilinear", padding_mode="border", align_corners=True),
    ),
)

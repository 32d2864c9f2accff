"""Linear maps of real tensors that pass through complex numbers: rotations of pairs, and Fourier transforms.

Relevance is defined for real numbers, so such a map is one operator from its last real tensor to its next one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lrpfx import types
from lrpfx.ir.node import is_data, node_info
from lrpfx.ir.operator import Bound, Builder, Operator
from lrpfx.operators import mixing
from lrpfx.operators.functions import kept_in_traces
from lrpfx.operators.row import row
from lrpfx.operators.samples import call, of, signal

# --- functions --------------------------------------------------------------------------------------------------------------


@kept_in_traces
def rotated(input: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Pairs of numbers, as complex numbers times `by`. Shape (..., 2)."""
    return torch.view_as_real(torch.view_as_complex(input.contiguous()) * by)


@kept_in_traces
def real_fourier(input: torch.Tensor, dim: Sequence[int] | None = None, norm: str | None = None) -> torch.Tensor:
    """The real part of the Fourier transform over some dimensions."""
    transformed: torch.Tensor = torch.fft.fftn(input, dim=dim, norm=norm)
    return transformed.real


def _rotated_adjoint(gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound) -> tuple[torch.Tensor | None, ...]:
    (input,) = inputs
    return (rotated(gradient, arguments["by"].conj()).sum_to_size(input.shape),)


def _fourier_adjoint(gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound) -> tuple[torch.Tensor | None, ...]:
    """The map itself: its matrix is symmetric."""
    return (real_fourier(gradient, arguments["dim"], arguments["norm"]),)


# --- decompositions ---------------------------------------------------------------------------------------------------------


def _call_of(value: Any, name: str) -> bool:
    """Whether a value is the result of an operator of the table."""
    row = node_info(value).operator if isinstance(value, fx.Node) else None
    return row is not None and row.name == name


def _pairs(build: Builder) -> fx.Node | None:
    """The rotation of pairs that were complex numbers for one product."""
    product = build["input"]
    if not _call_of(product, "mul"):
        return None
    turned = [factor for factor in product.args if _call_of(factor, "view_as_complex")]
    others = [factor for factor in product.args if not is_data(factor)]
    if len(turned) != 1 or len(others) != 1:
        return None
    return build.call("rotated", turned[0].args[0], others[0])


def _real_part(build: Builder) -> fx.Node | None:
    transform = build["input"]
    if not _call_of(transform, "fft_fftn"):
        return None
    if transform.kwargs.get("s") is not None:
        return None
    return build.call("real_fourier", transform.args[0], **transform.kwargs)


# --- rows ------------------------------------------------------------------------------------------------------------------

_WITHOUT_SAMPLE = "it has no rule by itself, only as a part of a real map"

ROWS: tuple[Operator, ...] = (
    row(
        "view_as_complex",
        types.Unknown,
        torch.view_as_complex,
        "input",
        aten="view_as_complex.default",
        view=True,
        without_sample=_WITHOUT_SAMPLE,
    ),
    row(
        "view_as_real",
        types.Unknown,
        torch.view_as_real,
        "input",
        aten="view_as_real.default",
        view=True,
        decomposition=_pairs,
        sample=of(lambda x: torch.view_as_real(torch.view_as_complex(x) * torch.tensor([0.6 + 0.8j, 1j])), (2, 2, 2)),
    ),
    row(
        "fft_fftn",
        types.Unknown,
        torch.fft.fftn,
        "input s=None dim=None norm=None",
        aten="fft_fftn.default",
        without_sample=_WITHOUT_SAMPLE,
    ),
    row(
        "real",
        types.Unknown,
        torch.real,
        "input",
        aten="real.default",
        view=True,
        decomposition=_real_part,
        sample=of(lambda x: torch.real(torch.fft.fftn(x, dim=(1,)))),
    ),
    row(
        "rotated",
        types.Sum,
        rotated,
        "input by",
        adjoint=_rotated_adjoint,
        mixes=mixing.last_dimension,
        sample=of(lambda x: rotated(x, torch.tensor([0.6 + 0.8j, 1j])), (2, 2, 2)),
    ),
    row(
        "real_fourier",
        types.Sum,
        real_fourier,
        "input dim=None norm=None",
        adjoint=_fourier_adjoint,
        mixes=mixing.given(),
        keeps_rank=True,
        sample=call(input=signal(2, 4), dim=(1,), norm="ortho"),
    ),
)

"""Complex numbers and Fourier transforms.

Relevance belongs to real numbers: a complex value has that of its real part and that of its imaginary part. The pass
`split_complex_numbers` therefore computes with the two parts. Rows state whether their result is complex; the pass knows what
becomes of each operation. A transform remains one operation, linear in its real input or in the pairs of its complex one.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lrpfx.ir import kinds
from lrpfx.ir.operator import Bound, Builder, ExampleCall, Operator
from lrpfx.operators import mixing
from lrpfx.operators.functions import kept_in_traces
from lrpfx.operators.row import neutral, standard_row
from lrpfx.operators.samples import of
from lrpfx.support.dotted_paths import resolve_path

# --- functions --------------------------------------------------------------------------------------------------------------


@kept_in_traces
def rotated(input: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Pairs of numbers, as complex numbers times `by`. Shape (..., 2)."""
    return torch.view_as_real(torch.view_as_complex(input.contiguous()) * by)


def fourier(transform: str, input: torch.Tensor, of_pairs: bool, *args: Any, **options: Any) -> torch.Tensor:
    """A transform, by the import path of its function, of real numbers or of pairs (..., 2) that stand for complex ones.

    A complex result is returned as pairs.
    """
    given = torch.view_as_complex(input.contiguous()) if of_pairs else input
    result: torch.Tensor = _function_at(transform)(given, *args, **options)
    return torch.view_as_real(result.resolve_conj()) if result.is_complex() else result


def short_time_waves(window: torch.Tensor, size: int, normalized: bool, onesided: bool) -> torch.Tensor:
    """The kernels of a short-time Fourier transform: of all real parts, then of all imaginary parts. Shape (2 n, 1, size).

    The window is padded with zeros on both sides to the size.
    """
    before = (size - window.shape[0]) // 2
    padded = torch.nn.functional.pad(window.double(), (before, size - window.shape[0] - before))
    places = torch.arange(size, dtype=torch.float64, device=window.device)
    angles = 2 * math.pi / size * torch.remainder(places[: size // 2 + 1 if onesided else size, None] * places, size)
    waves = torch.cat([angles.cos(), -angles.sin()]) * padded * (size**-0.5 if normalized else 1.0)
    return waves[:, None].to(window.dtype)


_function_at = functools.cache(resolve_path)


def _rotated_adjoint(gradient: torch.Tensor, inputs: Sequence[Any], arguments: Bound) -> tuple[torch.Tensor | None, ...]:
    (input,) = inputs
    return (rotated(gradient, arguments["by"].conj()).sum_to_size(input.shape),)


# --- decompositions ---------------------------------------------------------------------------------------------------------


def _polar(build: Builder) -> fx.Node:
    """The parts of a complex number with this magnitude and angle."""
    magnitude, angle = build["abs"], build["angle"]
    parts = [build.call("mul", magnitude, build.call(name, angle)) for name in ("cos", "sin")]
    return build.call("complex", *parts)


# --- rows ------------------------------------------------------------------------------------------------------------------


def _pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _window(size: int) -> torch.Tensor:
    return torch.hann_window(size, dtype=torch.float64)


def _transform(name: str, to_complex: bool, sample: ExampleCall, **facts: Any) -> Operator:
    return standard_row(name, kinds.Sum, spelled=name, returns_complex=to_complex, transforms=True, sample=sample, **facts)


def _of_torch(name: str) -> Operator:
    """The row of a function of torch.fft."""
    function, of_signals = getattr(torch.fft, name), name.startswith(("rfft", "ihfft"))
    options = {"dim": (-2, -1)} if name.endswith(("2", "n")) else {"dim": 1}
    to_complex = not name.startswith(_TO_REAL)

    def sampled(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = function(x if of_signals else _pairs(x), norm="ortho", **options)
        return torch.view_as_real(result.resolve_conj()) if to_complex else result

    # The imaginary part of a sum of real numbers is 0, whatever relevance it is given.
    sample = of(sampled, (2, 4, 4), loses="absent" if of_signals else "")
    return _transform(f"fft_{name}", to_complex, sample, functions=[function])


def _shift(name: str) -> Operator:
    function = getattr(torch.fft, name)
    return neutral(f"fft_{name}", functions=[function], moves=True, sample=of(lambda x: function(x, dim=1)))


_TO_COMPLEX, _TO_REAL = ("fft", "ifft", "rfft", "ihfft"), ("irfft", "hfft")


ROWS: tuple[Operator, ...] = (
    standard_row(
        "view_as_complex",
        kinds.Neutral,
        "input",
        view=True,
        returns_complex=True,
        sample=of(lambda x: torch.view_as_complex(x).real, (2, 2, 2)),
    ),
    standard_row(
        "view_as_real",
        kinds.Neutral,
        "input",
        view=True,
        returns_complex=False,
        sample=of(lambda x: torch.view_as_real(torch.view_as_complex(x) * torch.tensor([0.6 + 0.8j, 1j])), (2, 2, 2)),
    ),
    standard_row(
        "real",
        kinds.Neutral,
        "input",
        view=True,
        returns_complex=False,
        sample=of(lambda x: torch.real(torch.fft.fftn(x, dim=(1,)))),
    ),
    standard_row("imag", kinds.Neutral, "input", view=True, returns_complex=False, sample=of(lambda x: torch.imag(_pairs(x)))),
    standard_row(
        "complex",
        kinds.Neutral,
        "real imag",
        data="real imag",
        returns_complex=True,
        sample=of(lambda x, y: torch.view_as_real(torch.complex(x, y)), (2, 4), (2, 4)),
    ),
    standard_row(
        "polar",
        kinds.Product,
        "abs angle",
        data="abs angle",
        returns_complex=True,
        decomposition=_polar,
        sample=of(lambda x, y: torch.view_as_real(torch.polar(x, y)), (2, 4), (2, 4)),
    ),
    neutral(
        "conj",
        spelled="conj conj_physical",
        inplace=[torch.conj_physical_],
        inplace_methods="conj_physical_",
        aten="_conj.default _conj_physical.default",
        inplace_aten="conj_physical_.default",
        view=True,
        sample=of(lambda x: torch.view_as_real(torch.view_as_complex(x).conj() * torch.tensor([0.6 + 0.8j, 1j])), (2, 2, 2)),
    ),
    neutral(
        "resolve_conj",
        spelled="resolve_conj resolve_neg",
        view=True,
        sample=of(lambda x: torch.view_as_real(torch.view_as_complex(x).resolve_conj()), (2, 2, 2)),
    ),
    standard_row(
        "angle",
        kinds.Unknown,
        "input",
        returns_complex=False,
        sample=of(lambda x: torch.angle(torch.view_as_complex(x)), (2, 2, 2)),
    ),
    standard_row(
        "rotated",
        kinds.Sum,
        "input by",
        rotated,
        returns_complex=False,
        adjoint=_rotated_adjoint,
        mixes=mixing.last_dimension,
        sample=of(lambda x: rotated(x, torch.tensor([0.6 + 0.8j, 1j])), (2, 2, 2)),
    ),
    standard_row(
        "fourier", kinds.Sum, functions=[fourier], returns_complex=False, without_sample="only the compiler inserts it"
    ),
    *(_of_torch(f"{name}{dimensions}") for name in (*_TO_COMPLEX, *_TO_REAL) for dimensions in ("", "2", "n")),
    _shift("fftshift"),
    _shift("ifftshift"),
    _transform(
        "stft",
        True,
        of(
            lambda x: torch.stft(x.flatten(1), 8, 4, window=_window(8).to(x), return_complex=True).abs(),
            (2, 4, 4),
            loses="stabilizer",  # the sine of frequency 0 is 0
        ),
    ),
    _transform(
        "istft",
        False,
        of(
            lambda x: torch.istft(torch.fft.rfft(x, dim=1), 4, 2, window=_window(4).to(x)),
            (2, 4, 4),
        ),
    ),
)

"""Relevance of frequencies by virtual inspection (Vielhaben et al. 2024, https://doi.org/10.1016/j.patcog.2023.110042).

A Fourier transform and its inverse in front of the network change nothing of what it computes. The inverse is linear in the
coefficients, and Epsilon passes relevance on to them in proportion to what each contributes to each sample. So no layer has to
be inserted: with the multipliers m = R / x of the samples, the relevance of a coefficient is its share of the sum of x m,
which Parseval's theorem divides among frequencies.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrpfx.errors import InputError, LrpfxWarning
from lrpfx.support.identity.plain_data import PlainData
from lrpfx.support.numbers import whole_number

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Spectrum(PlainData):
    """Relevance of frequencies.

    `frequencies`: in hertz, from 0 to half the rate, (frequencies,). `relevance`: of each, (frequencies,). `magnitude`: of each
    in the wave, (frequencies,).
    """

    frequencies: Array
    relevance: Array
    magnitude: Array


@dataclass(frozen=True, eq=False)
class Spectrogram(PlainData):
    """Relevance of frequencies at times.

    `times`: the middles of the windows in seconds, (windows,). `frequencies`: in hertz, (frequencies,). `relevance`:
    (frequencies, windows). `magnitude`: of the wave, (frequencies, windows).
    """

    times: Array
    frequencies: Array
    relevance: Array
    magnitude: Array


def spectrum(wave: Array, relevance: Array, rate: float) -> Spectrum:
    """The relevance of the frequencies of a wave, which sums to that of its samples.

    `wave`, `relevance`: (channels, samples). Relevance of a sample of exactly 0 is left out, with a warning.
    """
    count = wave.shape[1]
    transformed, parts = _parts(wave, _multipliers(wave, relevance))
    return Spectrum(np.fft.rfftfreq(count, 1 / rate), parts.sum(0), np.abs(transformed).mean(0))


def spectrogram(wave: Array, relevance: Array, rate: float, window: int | None = None) -> Spectrogram:
    """The relevance of frequencies in windows that overlap by a half, which sums to that of the samples.

    `wave`, `relevance`: (channels, samples). `window`: the length of a window in samples, even; by default about 32 ms, or a
    sixteenth of a short wave.
    """
    count = wave.shape[1]
    if window is None:
        window = min(2 ** round(np.log2(max(2.0, 0.032 * rate))), max(2, 2 * (count // 32)))
    window = whole_number(window, "window is an even number of samples", 2, "tables-series-and-waves")
    if window % 2:
        raise InputError(f"window is an even number of samples, not {window}", topic="tables-series-and-waves")
    hop, found = window // 2, []
    # The squares of sines, half a window apart, sum to 1: one factor is for the wave, one for the multipliers.
    shape = np.sin(np.pi * (np.arange(window) + 0.5) / window)
    windows = -(-count // hop) + 1
    padding = ((0, 0), (hop, (windows + 1) * hop - hop - count))
    padded, multipliers = np.pad(wave, padding), np.pad(_multipliers(wave, relevance), padding)
    for first in range(0, windows * hop, hop):
        part = slice(first, first + window)
        found.append(_parts(padded[:, part] * shape, multipliers[:, part] * shape))
    times = (np.arange(windows) * hop) / rate
    magnitude = np.stack([np.abs(transformed).mean(0) for transformed, _ in found], 1)
    return Spectrogram(times, np.fft.rfftfreq(window, 1 / rate), np.stack([parts.sum(0) for _, parts in found], 1), magnitude)


def _multipliers(wave: Array, relevance: Array) -> Array:
    """Relevance divided by the value. A value of 0 has none under the rules of products; what others give it is reported."""
    result: Array = np.divide(relevance, wave, out=np.zeros_like(relevance), where=wave != 0)
    lost, whole = np.abs(relevance[wave == 0]).sum(), np.abs(relevance).sum()
    if lost > 1e-6 * whole:
        warnings.warn(
            LrpfxWarning(
                f"{lost / whole:.1%} of the relevance lies on samples that are 0, which no frequency holds: rules such as Flat "
                "and ZBox give it to them. Frequencies hold that of the other samples.",
                topic="tables-series-and-waves",
            ),
            stacklevel=4,
        )
    return result


def _parts(wave: Array, multipliers: Array) -> tuple[Array, Array]:
    """The transform of a wave, and how much of the sum of wave * multipliers each frequency holds, (channels, frequencies)."""
    count = wave.shape[1]
    transformed = np.fft.rfft(wave, axis=1)
    shares = (transformed * np.fft.rfft(multipliers, axis=1).conj()).real / count
    twice = slice(1, (count + 1) // 2)  # a frequency between 0 and a half of the rate has two coefficients
    shares[:, twice] *= 2
    return transformed, shares

"""Explanations of series and of waves: relevance of steps, of features, and of frequencies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image
from typing_extensions import Unpack

from lrpfx import pictures
from lrpfx.errors import InputError
from lrpfx.explanation.answers import Array
from lrpfx.explanation.explanation import Explained, Several
from lrpfx.explanation.frequencies import Spectrogram, Spectrum, spectrogram, spectrum
from lrpfx.explanation.saving import save_table_or_picture
from lrpfx.explanation.tables import WITHIN, caption_for, columns_of, sheet_of_charts
from lrpfx.pictures import charts
from lrpfx.pictures.style import Style, StyleSettings, styled
from lrpfx.support.html import image_html
from lrpfx.support.optional_packages import optional_package

if TYPE_CHECKING:
    from pandas import DataFrame

#: Features that are drawn with their curves; more are rows of a heatmap.
_CURVES = 24
#: Bands in which the spectrum of relevance is drawn.
_BANDS = 200


@dataclass(frozen=True, eq=False, repr=False)
class SeriesExplanation(Explained):
    """Why a model gave a series its output.

    It is plain data. `Explanation` describes `name`, `output`, `categories`, `answers`, `rules` and `scores`.

    `features`: their names. `steps`: the index of a DataFrame, or numbers. `values`: the series, (steps, features).

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(20 * 2, 1)).eval()
    >>> explanation = lrpfx.explain(model, torch.randn(20, 2), names=["wind", "sun"], form="series")
    >>> explanation.relevance.shape
    (20, 2)
    """

    features: tuple[str, ...]
    steps: tuple[Any, ...]
    values: Array

    @property
    def relevance(self) -> Array:
        """Relevance of each feature at each step, (steps, features)."""
        return self.answers[0].input_relevance

    def to_pandas(self) -> "DataFrame":
        """A row for each step and a column of relevance for each feature, as a DataFrame.

        For several targets, columns are pairs of a target and a feature. Raises `InputError` without pandas.
        """
        pandas = optional_package("pandas", "a DataFrame")
        titles = columns_of(self.answers)
        frames = {
            title: pandas.DataFrame(answer.input_relevance, list(self.steps), self.features)
            for title, answer in zip(titles, self.answers, strict=True)
        }
        found: DataFrame = pandas.concat(frames, axis=1) if len(frames) > 1 else next(iter(frames.values()))
        return found

    def heatmap(
        self, *, curves: bool | None = None, style: Style | None = None, **settings: Unpack[StyleSettings]
    ) -> Image.Image:
        """A row for each feature, in the colours of its relevance at each step.

        `curves`: whether the values are drawn over it; by default for 24 features or fewer. `style`: how it is drawn.
        `settings`: fields of `lrpfx.pictures.Style`, which replace those of `style`.
        """
        shown = len(self.features) <= _CURVES if curves is None else curves
        drawn = _exact(styled(style, settings), self.relevance)
        axis = (str(self.steps[0]), str(self.steps[-1]), "step")
        values = self.values.T.astype(np.float64) if shown else None
        return charts.curves(self.features, self.relevance.T, values, drawn, axis)

    def sheet(self) -> Image.Image:
        """The heatmap with a legend, the rules, and the share of the output in it."""
        title = self.name if len(self.output) == 1 else f"{self.name}: relevance for {self._shown(str(self.target))}"
        scale = _exact(WITHIN, self.relevance).scale
        caption, legend = caption_for(self), _legend(self)
        return sheet_of_charts([(title, self.heatmap(style=WITHIN))], caption=caption, legend=legend, scale=scale)

    def save(self, path: str | Path) -> Path:
        """Write the sheet as a picture, or the relevance of all steps as .csv.

        `path`: the file. Its ending names the form. Returns the path.
        """
        return save_table_or_picture(self, path)

    def layers(
        self, names: Sequence[str] | None = None, style: Style | None = None, **settings: Unpack[StyleSettings]
    ) -> Image.Image:
        """Relevance through the network: a band for the steps of the input and of each layer, each with a scale of its own.

        Beside a layer stands the share of the output in it. `names`: nodes with an output (channels, steps) or (steps,
        channels), by default the recorded ones, or else the last of each number of steps; others need the compiled model.
        `style`, `settings`: as for `heatmap`. Raises `InputError` for relevance of another shape.
        """
        maps = self._with_shares({"input": self.relevance.sum(1), **self._layers(names, ("channels", "steps"))})
        return _bands(maps, styled(style, settings), (str(self.steps[0]), str(self.steps[-1]), "step"))

    def _repr_html_(self) -> str:
        return image_html(self.sheet(), repr(self))


@dataclass(frozen=True, eq=False, repr=False)
class WaveExplanation(Explained):
    """Why a model gave a sound, or another wave, its output.

    It is plain data. `Explanation` describes `name`, `output`, `categories`, `answers`, `rules` and `scores`.

    `wave`: what the model was given, (channels, samples). `rate`: samples for each second. `reference`: the wave that it is
    compared with, whose difference the frequencies are of; None without a reference, NaN where there are several.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(800, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
    >>> explanation = lrpfx.explain(model, torch.randn(800), rate=8000)
    >>> explanation.relevance.shape, explanation.spectrum().frequencies[-1]
    ((800,), np.float64(4000.0))
    """

    wave: Array
    rate: float
    reference: Array | None = None

    @property
    def relevance(self) -> Array:
        """Relevance of each sample, (samples,): the sum over channels."""
        found: Array = self.answers[0].input_relevance.sum(0)
        return found

    def spectrum(self) -> Spectrum:
        """Relevance of frequencies, by virtual inspection: it sums to that of the samples.

        With a reference, frequencies are those of the difference from it. Raises `InputError` if there are several references.
        """
        return spectrum(*self._arrays(), self.rate)

    def spectrogram(self, window: int | None = None) -> Spectrogram:
        """Relevance of frequencies at times, by virtual inspection: it sums to that of the samples.

        `window`: the length of a window in samples, even; by default about 32 ms. Windows overlap by a half. Raises
        `InputError` for another length, and if there are several references.
        """
        return spectrogram(*self._arrays(), self.rate, window)

    def to_pandas(self) -> "DataFrame":
        """A row for each sample as a DataFrame: its time in seconds, and its relevance, for several targets one column of each.

        Raises `InputError` without pandas.
        """
        pandas = optional_package("pandas", "a DataFrame")
        relevance = (answer.input_relevance.sum(0) for answer in self.answers)
        columns = dict(zip(columns_of(self.answers), relevance, strict=True))
        times = pandas.Index(np.arange(self.wave.shape[1]) / self.rate, name="time")
        found: DataFrame = pandas.DataFrame(columns, index=times)
        return found

    def overlay(self, style: Style | None = None, **settings: Unpack[StyleSettings]) -> Image.Image:
        """The waveform over its relevance, summed over what one column of pixels shows.

        `style`: how it is drawn. `settings`: fields of `lrpfx.pictures.Style`, which replace those of `style`.
        """
        drawn = styled(style, settings)
        summed = _summed(self.relevance, drawn.width // 2)
        wave = self.wave.mean(0, dtype=np.float64)
        return charts.curves(["wave"], summed[None], wave[None], _exact(drawn, summed[None]), self._seconds(), height=9)

    def heatmap(self, window: int | None = None, style: Style | None = None, **settings: Unpack[StyleSettings]) -> Image.Image:
        """Relevance of frequencies at times. `window`: as for `spectrogram`. `style`, `settings`: as for `overlay`."""
        found = self.spectrogram(window)
        drawn = _exact(styled(style, settings), found.relevance)
        return charts.plane(found.relevance, drawn, self._seconds(), _hertz(found.frequencies))

    def layers(
        self, names: Sequence[str] | None = None, style: Style | None = None, **settings: Unpack[StyleSettings]
    ) -> Image.Image:
        """Relevance through the network. `names`, `style`, `settings`: as for `SeriesExplanation.layers`."""
        maps = self._with_shares({"input": self.relevance, **self._layers(names, ("channels", "samples"))})
        return _bands(maps, styled(style, settings), self._seconds())

    def sheet(self) -> Image.Image:
        """The waveform over its relevance, relevance of frequencies at times, and the spectrum of relevance.

        Without frequencies if there are several references.
        """
        name = self.name if len(self.output) == 1 else f"{self.name}: relevance for {self._shown(str(self.target))}"
        rows = [(f"{name}\nrelevance of times, and the wave", self.overlay(style=WITHIN))]
        if not self._has_frequencies:
            return sheet_of_charts(rows, caption=caption_for(self), legend=_legend(self))
        found = self.spectrum()
        bands, magnitude = _summed(found.relevance, _BANDS), _summed(found.magnitude, _BANDS)
        decibels = np.log10(magnitude + 1e-3 * magnitude.max() + 1e-30)
        drawn = charts.curves(
            ["spectrum"], bands[None], decibels[None], _exact(WITHIN, bands[None]), _hertz(found.frequencies), height=6
        )
        rows += [
            ("relevance of frequencies at times", self.heatmap(style=WITHIN)),
            ("relevance of frequencies, and the magnitude of the wave", drawn),
        ]
        return sheet_of_charts(rows, caption=caption_for(self), legend=_legend(self))

    def save(self, path: str | Path) -> Path:
        """Write the sheet as a picture, or the relevance of all samples as .csv.

        `path`: the file. Its ending names the form. Returns the path.
        """
        return save_table_or_picture(self, path)

    def _arrays(self) -> tuple[Array, Array]:
        wave, relevance = self.wave.astype(np.float64), self.answers[0].input_relevance.astype(np.float64)
        if not self._has_frequencies:
            raise InputError(
                "relevance for several references, or for one of another form than the wave, has no frequencies: ask for "
                "relevance for one reference",
                topic="tables-series-and-waves",
            )
        return wave if self.reference is None else wave - self.reference, relevance

    @property
    def _has_frequencies(self) -> bool:
        return self.reference is None or not np.isnan(self.reference).any()

    def _seconds(self) -> charts.Axis:
        return "0", f"{self.wave.shape[1] / self.rate:.4g}", "seconds"

    def _repr_html_(self) -> str:
        return image_html(self.sheet(), repr(self))


_Timed = TypeVar("_Timed", SeriesExplanation, WaveExplanation)


class _Sheets(Several[_Timed]):
    def to_pandas(self) -> "DataFrame":
        """The DataFrames of all, below each other, with the name of each in front of the index."""
        pandas = optional_package("pandas", "a DataFrame")
        found: DataFrame = pandas.concat({one.name: one.to_pandas() for one in self._some()})
        return found

    def sheet(self) -> Image.Image:
        """All explanations below each other."""
        return charts.stacked([("", one.sheet()) for one in self._some()], WITHIN)

    def save(self, path: str | Path) -> Path:
        """Write the sheet of all as one picture.

        `path`: the file. Its ending names the form of the picture. Returns the path.
        """
        return save_table_or_picture(self, path)


class SeriesExplanations(_Sheets[SeriesExplanation]):
    """Explanations of several series, in their order.

    `items`: the explanations. `problems`: none.
    """


class WaveExplanations(_Sheets[WaveExplanation]):
    """Explanations of several waves, in their order.

    `items`: the explanations. `problems`: none.
    """


def _bands(maps: Mapping[str, Array], style: Style, axis: charts.Axis) -> Image.Image:
    """A band for each map (steps,), of any number of steps, in the colours of its own scale."""
    most, rows = max(map(len, maps.values())), []
    for one in maps.values():
        scale = _exact(style, one[None]).scale or 1.0
        rows.append(one[np.arange(most) * len(one) // most] / scale)
    return charts.curves(list(maps), np.stack(rows), None, replace(style, sigma=0, scale=1.0), axis, height=2)


def _hertz(frequencies: Array) -> charts.Axis:
    return f"{frequencies[0]:,.0f}", f"{frequencies[-1]:,.0f}", "hertz"


def _legend(explained: Any) -> tuple[str, str]:
    return ("lowers the output", "raises the output") if len(explained.output) == 1 else explained._legend


def _exact(style: Style, relevance: Array) -> Style:
    """The style without smoothing, and with the scale of all relevance if it has none."""
    scale = pictures.scale_of(relevance, style.percentile, sigma=0) if style.scale is None else style.scale
    return replace(style, sigma=0, scale=scale)


def _summed(values: Array, most: int) -> Array:
    """Sums of neighbours, so that no more than `most` are left."""
    width = -(-len(values) // most)
    padded = np.pad(values.astype(np.float64), (0, -len(values) % width))
    found: Array = padded.reshape(-1, width).sum(1)
    return found

"""Tables, series and waves through the front door: the relevance is that of `attribute`, in the shape of what was given."""

import numpy as np
import pandas as pd
import pytest
import torch
import torchvision_cpu  # noqa: F401  # before torchvision, which transformers imports
from helpers import assert_close
from torch import nn

import lrpfx
import lrpfx.datasets
from lrpfx.composites import EpsilonPlus
from lrpfx.errors import InputError, InputTypeError
from lrpfx.explanation.frequencies import spectrogram, spectrum
from lrpfx.pictures import charts
from lrpfx.rules import Epsilon
from lrpfx.types import Linear


def dense(features, outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, outputs)).eval()


class Recurrent(nn.Module):
    """One number for each series."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])[:, 0]


class Categories(nn.Module):
    """Numbers, and categories that have embeddings of their own, or a common one."""

    def __init__(self, common):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(6, 4) for _ in range(1 if common else 2))
        self.common, self.head = common, nn.Linear(2 + 8, 1)

    def forward(self, numbers, categories):
        if self.common:
            parts = self.embeddings[0](categories + torch.tensor([0, 3])).flatten(1)
        else:  # in another order than the columns
            parts = torch.cat([self.embeddings[1](categories[:, 1]), self.embeddings[0](categories[:, 0])], 1)
        return self.head(torch.cat([numbers, parts], 1))


@pytest.fixture
def frame():
    values = np.random.default_rng(0).normal(size=(30, 3))
    return pd.DataFrame(values, columns=["age", "income", "debt"], index=[f"person {place}" for place in range(30)])


def test_a_table(frame):
    explainer = lrpfx.Explainer(dense(3, 2), categories=["no", "yes"])
    found = explainer(frame, "yes")
    direct = lrpfx.attribute(explainer.explain_model, torch.tensor(frame.to_numpy()).to(explainer.model[0].weight), 1)
    np.testing.assert_allclose(found.relevance, direct.relevance, rtol=1e-5, atol=1e-7)
    pd.testing.assert_frame_equal(found.to_pandas(), pd.DataFrame(found.relevance, frame.index, frame.columns))
    assert isinstance(found, lrpfx.TableExplanations) and found[0].target.probability is not None

    one = explainer(frame.iloc[4], targets=["no", "yes"])
    assert one.name == "person 4" and one.features == ("age", "income", "debt")
    np.testing.assert_allclose(one.to_pandas()["yes"], found[4].relevance, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(one.to_pandas()["value"], frame.iloc[4])
    assert one.balance.inputs + one.balance.constants == pytest.approx(one.target.score)


@pytest.mark.parametrize("common", [False, True])
def test_categories_have_the_relevance_of_their_embeddings(common):
    torch.manual_seed(0)
    model = Categories(common).eval()
    table = pd.DataFrame({"a": [0.5, 1.0], "b": [2.0, -1.0], "color": ["red", "blue"], "size": ["L", "S"]})

    def preprocess(table):
        color, size = (table[name].map({"red": 0, "blue": 1, "S": 1, "L": 2}) for name in ("color", "size"))
        return torch.tensor(table[["a", "b"]].to_numpy()), torch.tensor(np.stack([color, size], 1))

    found = lrpfx.explain(model, table, preprocess=preprocess)
    numbers, categories = preprocess(table)
    weight = model.head.weight[0].detach()
    tables = [one.weight.detach() for one in model.embeddings]
    of_size, of_color = weight[2:6], weight[6:]
    if common:
        of_color, of_size = of_size, of_color
    expected = torch.stack(
        [
            *(numbers * weight[:2]).T,
            tables[0][categories[:, 0]] @ of_color,
            tables[-1][categories[:, 1] + (3 if common else 0)] @ of_size,
        ],
        1,
    )
    np.testing.assert_allclose(found.to_pandas()[["a", "b", "color", "size"]], expected, rtol=1e-4, atol=1e-5)
    assert list(found[0].to_pandas()["value"]) == [0.5, 2.0, "red", "L"]
    assert found[0].waterfall().width > 100 and found.beeswarm().width > 100


def test_a_row_of_objects():
    """Numbers are a row; what may have lost its type, or is no number, is an error that says what keeps it."""
    table = pd.DataFrame({"a": [1, 2], "b": [0.5, -1.0], "c": [True, False]})
    model = dense(3, 2)
    row = table.iloc[1]
    assert row.dtype == object
    found = lrpfx.explain(model, row, 1)
    np.testing.assert_allclose(found.relevance, lrpfx.explain(model, table, 1)[1].relevance, rtol=1e-5)
    assert found.features == ("a", "b", "c")
    with pytest.raises(InputTypeError, match=r"df\.iloc\[\[0\]\]"):
        lrpfx.explain(model, row, preprocess=lambda frame: torch.tensor(frame.to_numpy(np.float32)))
    with pytest.raises(InputTypeError, match="column 'd' does not hold numbers"):
        lrpfx.explain(model, table.assign(d=pd.Categorical(["x", "y"])).iloc[0])


def test_series():
    torch.manual_seed(0)
    model, series = Recurrent().eval(), torch.randn(4, 20, 3)
    explainer = lrpfx.Explainer(model, names=["wind", "sun", "rain"])
    found = explainer(series)
    assert isinstance(found, lrpfx.SeriesExplanations)
    direct = lrpfx.attribute(explainer.explain_model, series)
    np.testing.assert_allclose([one.relevance for one in found], direct.relevance, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose([one.output[0] for one in found], model(series).detach(), rtol=1e-5)
    assert found[0].target.probability is None and abs(found[0].ledger.unexplained) < 1e-4

    days = pd.date_range("2020-01-01", periods=20)
    frame = pd.DataFrame(series[1].numpy(), days, ["wind", "sun", "rain"])
    one = lrpfx.explain(model, frame, form="series")
    np.testing.assert_allclose(one.relevance, found[1].relevance, rtol=1e-4, atol=1e-7)
    assert list(one.to_pandas().index) == list(days) and list(one.to_pandas()) == ["wind", "sun", "rain"]
    assert isinstance(lrpfx.explain(model, series), lrpfx.SeriesExplanations), "the layers say that it is no picture"


class OfSteps(nn.Module):
    """Two classes at each step of a series."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0])


def test_an_output_for_each_step(tmp_path):
    """A step and a class is a target, for one series and for several, and so is the region of a class."""
    torch.manual_seed(0)
    series = torch.randn(4, 6, 3)
    explainer = lrpfx.Explainer(OfSteps().eval(), form="series", categories=["up", "down"])
    region = lrpfx.Region("down", mask=[1, 1, 0, 0, 0, 1])
    for target, index in (((2, "down"), (2, 1)), ((-1, {"up": 1.0, "down": -1.0}), (-1, {0: 1.0, 1: -1.0}))):
        found = explainer(series, target)
        direct = lrpfx.attribute(explainer.explain_model, series, index)
        np.testing.assert_allclose([one.relevance for one in found], direct.relevance, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose([one.output for one in found], direct.output[:, index[0]], rtol=1e-5)
        assert abs(found[0].ledger.unexplained) < 1e-4
        view = lrpfx.datasets.attribute(explainer, series, tmp_path / f"store{index[0]}", target=target)
        np.testing.assert_allclose(view["relevance"], direct.relevance, rtol=1e-3, atol=1e-6)
    one = explainer(series[0], targets=[(2, "down"), (3, 0)])
    assert [answer.category.name for answer in one.answers] == ["down (position 2)", "up (position 3)"]
    assert {category.name for category in one.top()} == {"up", "down"}
    found = explainer(series[0], region)
    direct = lrpfx.attribute(explainer.explain_model, series[:1], lrpfx.Region(1, mask=[1, 1, 0, 0, 0, 1]))
    np.testing.assert_allclose(found.relevance, direct.relevance[0], rtol=1e-5, atol=1e-8)
    assert found.target.area == 0.5 and found.output.shape == (2, 6) and found.sheet().width > 100
    best = found.top(1)[0]
    is_best = direct.output[0].argmax(1) == best.index
    assert best.score == pytest.approx(float(direct.output[0, is_best, best.index].clamp(min=0).sum()), rel=1e-5)
    assert lrpfx.report([one, found], tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("target", [1, None, (0, 1)])
def test_a_class_needs_a_step_where_each_has_an_output(target):
    explainer = lrpfx.Explainer(OfSteps().eval(), form="series")
    with pytest.raises(InputError, match=r"the target is \(position, class\)"):
        explainer(torch.randn(2, 6, 3), target)  # two integers are a class for each of two
    with pytest.raises(InputError, match="position 9 is out of range"):
        explainer(torch.randn(6, 3), (9, 1))


def test_relevance_of_several_is_that_of_each_in_one_array():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    for given, settings in (
        (torch.randn(3, 6, 2), {"form": "series"}),
        (torch.randn(3, 12), {"rate": 10}),
        (torch.randn(3, 12), {"form": "table"}),
    ):
        found = lrpfx.explain(model, given, [0, 1, 0], **settings)
        np.testing.assert_array_equal(found.relevance, np.stack([one.relevance for one in found]))
        np.testing.assert_array_equal(found.to_numpy(), found.relevance)
    pooled = nn.Sequential(nn.Conv3d(1, 2, 2), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2, 2)).eval()
    with pytest.raises(InputError, match="one by one"):
        _ = lrpfx.explain(pooled, [torch.rand(1, 3, 4, 5), torch.rand(1, 4, 4, 5)]).relevance


def test_series_with_features_first_and_of_one_feature():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)).eval()
    found = lrpfx.explain(model, torch.randn(3, 2, 10), names=["left", "right"])
    assert found[0].relevance.shape == (10, 2) and "Gamma 0.25" in found[0].rules
    explain_model = lrpfx.transform(model, EpsilonPlus(layer_map=[(lrpfx.types.Convolution, lrpfx.rules.Gamma(0.25))]))
    direct = lrpfx.attribute(explain_model, torch.from_numpy(np.stack([one.values.T for one in found])))
    np.testing.assert_allclose([one.relevance.T for one in found], direct.relevance, rtol=1e-4, atol=1e-7)
    sales = lrpfx.explain(dense(12, 4), torch.randn(3, 12), names=["sales"])
    assert isinstance(sales, lrpfx.SeriesExplanations) and sales[2].relevance.shape == (12, 1)
    assert sales[0].target.probability is None, "a forecast has no classes"


def test_programs(tmp_path):
    model, rows = dense(3, 2), torch.randn(5, 3)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    program = lrpfx.lower(explain_model, rows, target="index")
    lrpfx.save(program, tmp_path / "table.pt2")
    found = lrpfx.explain(lrpfx.load(tmp_path / "table.pt2"), rows, 1, names=["a", "b", "c"])
    np.testing.assert_allclose(found.relevance, lrpfx.attribute(explain_model, rows, 1).relevance, rtol=1e-4, atol=1e-6)


class Inspected(nn.Module):
    """A network behind the inverse of a Fourier transform, written as a dense layer from coefficients to samples."""

    def __init__(self, model, count):
        super().__init__()
        self.inverse, self.model = nn.Linear(count, count, bias=False, dtype=torch.float64), model
        basis = torch.fft.fft(torch.eye(count, dtype=torch.float64), norm="ortho")
        self.rows = torch.cat([basis.real[: count // 2 + 1], basis.imag[1 : (count + 1) // 2]])
        self.rows /= self.rows.norm(dim=1, keepdim=True)
        self.inverse.weight.data = self.rows.T.contiguous()

    def forward(self, coefficients):
        return self.model(self.inverse(coefficients))


@pytest.mark.parametrize("count", [16, 17])
def test_relevance_of_frequencies_is_that_of_an_inserted_transform(count):
    torch.manual_seed(0)
    model = dense(count, 2).double()
    wave = torch.randn(1, count, dtype=torch.float64)
    inserted = Inspected(model, count).eval()
    composite = EpsilonPlus(epsilon=1e-12, layer_map=[(Linear, Epsilon(1e-12))])
    coefficients = wave @ inserted.rows.T
    relevance = lrpfx.attribute(lrpfx.transform(inserted, composite), coefficients, 1).relevance[0]
    expected = relevance[: count // 2 + 1].clone()
    expected[1 : (count + 1) // 2] += relevance[count // 2 + 1 :]
    of_samples = lrpfx.attribute(lrpfx.transform(model, composite), wave, 1).relevance
    found = spectrum(wave.numpy(), of_samples.numpy(), rate=count)
    np.testing.assert_allclose(found.relevance, expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(found.frequencies, np.arange(count // 2 + 1))


@pytest.mark.parametrize(("count", "window"), [(1000, None), (997, 64), (5, 8), (2, None)])
def test_relevance_of_frequencies_sums_to_that_of_samples(count, window):
    random = np.random.default_rng(0)
    wave, relevance = random.normal(size=(2, 2, count))
    found = spectrogram(wave, relevance, 100.0, window)
    assert found.relevance.sum() == pytest.approx(relevance.sum())
    assert found.relevance.shape == (len(found.frequencies), len(found.times)) == found.magnitude.shape


def test_a_wave_shows_the_tone_that_decides():
    """The network answers with the energy at 1000 hertz, between 0.5 and 0.6 seconds."""
    times = torch.arange(4000) / 4000
    tone = torch.stack([part(2 * torch.pi * 1000 * times[:400]) for part in (torch.cos, torch.sin)])

    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.tones = nn.Linear(400, 2, bias=False)
            self.tones.weight.data = tone

        def forward(self, x):
            return self.tones(x[:, 2000:2400]).square().sum(1, keepdim=True)

    wave = torch.sin(2 * torch.pi * 1000 * times) + torch.sin(2 * torch.pi * 300 * times + 0.1)
    found = lrpfx.explain(Energy().eval(), wave, rate=4000)
    assert isinstance(found, lrpfx.WaveExplanation) and found.relevance.shape == (4000,)
    parts = found.spectrogram(200)
    assert parts.relevance.sum() == pytest.approx(found.relevance.sum(), rel=1e-4)
    row, column = np.unravel_index(parts.relevance.argmax(), parts.relevance.shape)
    assert parts.frequencies[row] == 1000 and 0.5 <= parts.times[column] <= 0.6
    near = np.abs(parts.frequencies - 1000) <= 20
    assert parts.relevance[near].sum() > 0.9 * parts.relevance.sum()
    assert list(found.to_pandas()) == ["relevance"] and found.to_pandas().index[-1] == pytest.approx(3999 / 4000)


class Band(nn.Module):
    """The energy of 900 to 1100 hertz at a rate of 4000, by a short-time Fourier transform."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(200))
        self.head = nn.Linear(101, 1)
        self.head.weight.data = ((torch.arange(101) * 20 - 1000).abs() <= 100).to(self.head.weight)[None]

    def forward(self, x):
        transformed = torch.stft(x, 200, 50, window=self.window, return_complex=True)
        return self.head(torch.view_as_real(transformed).square().sum(-1).mean(2))


def test_a_short_time_fourier_transform_in_front_of_a_network():
    times = torch.arange(2000) / 4000
    wave = torch.sin(2 * torch.pi * 300 * times) + torch.sin(2 * torch.pi * 1000 * times + 0.3)
    explainer = lrpfx.Explainer(Band().eval(), rate=4000)
    found = explainer(wave)
    assert_close(torch.from_numpy(found.relevance), lrpfx.attribute(explainer.explain_model, wave[None]).relevance[0], 1e-10)
    assert abs(found.ledger.unexplained) < 1e-9 * found.output[0]
    spectrum = found.spectrum()
    near = np.abs(spectrum.frequencies - 1000) <= 100
    assert spectrum.relevance[near].sum() > 0.9 * np.abs(spectrum.relevance).sum()


def test_a_transformer_for_speech():
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8, 8),
        conv_stride=(5, 4, 2),
        conv_kernel=(10, 8, 4),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        num_labels=3,
    )
    model, wave = transformers.Wav2Vec2ForSequenceClassification(config).double().eval(), torch.randn(800)
    found = lrpfx.explain(model, wave, 1, rate=16000)
    assert found.rules.startswith("AttnLRP") and found.relevance.any() and found.relevance.shape == (800,)
    assert found.target.score == pytest.approx(float(model(wave[None]).logits[0, 1]))
    assert abs(found.ledger.unexplained) < 1e-10
    assert found.spectrogram().relevance.sum() == pytest.approx(found.relevance.sum())


def test_sheets_and_files(frame, tmp_path):
    one, several = (lrpfx.explain(dense(3, 1), given) for given in (frame.iloc[0], frame))
    series = lrpfx.explain(Recurrent().eval(), torch.randn(2, 20, 3))
    wave = lrpfx.explain(dense(400, 2), torch.randn(400), rate=4000)
    waves = lrpfx.explain(dense(400, 2), torch.randn(2, 400), rate=4000)
    for number, explained in enumerate((one, several, series[0], series, wave, waves)):
        assert explained.sheet().getextrema() != ((255, 255),) * 3
        assert "<img" in explained._repr_html_()
        table = pd.read_csv(explained.save(tmp_path / f"{number}.csv"))
        assert len(table) == len(explained.to_pandas())
        assert explained.save(tmp_path / f"{number}.png").stat().st_size > 1000


def test_layers_of_tables_and_of_several_inputs_say_where_they_are():
    with pytest.raises(InputError, match="places of the input"):
        lrpfx.explain(dense(3, 1), torch.randn(3)).layers()
    both = lrpfx.explain(Categories(True).eval(), (torch.randn(1, 2), torch.zeros(1, 2).long()))
    with pytest.raises(InputError, match=r"explanation\[name\]\.layers"):
        both.layers()


def test_bars_add_up():
    picture = charts.waterfall([("a", 1.0), ("b", -3.0)], "output", lrpfx.pictures.Style(width=400))
    reds = np.asarray(picture).astype(int)
    red, blue = ((reds[..., one] - reds[..., other] > 100).any(0).nonzero()[0] for one, other in ((0, 2), (2, 0)))
    assert len(blue) == pytest.approx(3 * len(red), rel=0.05) and blue.max() == pytest.approx(red.max(), abs=3)


@pytest.mark.parametrize(
    ("given", "settings", "kind", "message"),
    [
        (torch.randn(2, 3), {"names": ["a", "b"]}, InputError, "2 names"),
        (torch.randn(2, 5, 3), {"names": ["a", "b"]}, InputError, "channels="),
        (torch.randn(2, 3), {"names": "ab"}, InputTypeError, "list"),
        (torch.randn(2, 3), {"form": "tables"}, InputError, "table"),
        (torch.randn(2, 3), {"form": "wave"}, InputError, "rate="),
        (torch.randn(2, 3), {"rate": -1}, InputError, "rate="),
        (torch.randn(2, 3), {"rate": 5, "form": "series"}, InputError, "rate= is for waves, and the input is read as series"),
        (torch.randn(2, 3), {"rate": 5, "names": [*"abc"]}, InputError, "names= is for tables or series.*read as waves"),
        (torch.randn(2, 3), {"rate": 5, "channels": "last"}, InputError, "channels= is for series.*read as waves"),
        (torch.randn(2, 3), {"channels": "last"}, InputError, "channels= is for series.*read as tables"),
        (torch.rand(1, 3, 8, 8), {"channels": "last"}, InputError, "channels= is for series.*read as texts or photographs"),
        ((torch.randn(90), 16000), {}, InputTypeError, r"pair\[0\], with rate=16000"),
        ((np.int64(8000), np.zeros(90)), {"rate": 8000}, InputTypeError, r"pair\[1\], with rate=8000"),
        ({"array": np.zeros(90), "sampling_rate": 8000}, {}, InputTypeError, r'sample\["array"\], with rate=8000'),
        (torch.randn(2000, 2), {"rate": 8000}, InputError, r"wave\.T\[None\]"),
        (torch.full((2, 3), torch.nan), {}, InputError, "finite"),
        (torch.zeros(0, 3), {}, InputError, "no rows"),
        (torch.randn(2, 2, 2, 3), {"form": "series"}, InputError, "series"),
        (pd.DataFrame({"a": ["x"], "b": [1]}), {}, InputTypeError, "'a'"),
        (np.zeros(100, np.int16), {"rate": 100}, InputError, "32768"),
        (np.array([["x", "y", "z"]]), {"form": "table"}, InputTypeError, "numbers"),
    ],
)
def test_errors(given, settings, kind, message):
    with pytest.raises(kind, match=message):
        lrpfx.explain(dense(3, 2), given, **settings)


class Listener(nn.Module):
    """Two numbers for each wave, by convolutions over (batch, channels, samples)."""

    def __init__(self, channels):
        super().__init__()
        torch.manual_seed(0)
        self.filters, self.head = nn.Conv1d(channels, 4, 3, padding=1), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.filters(x).relu().mean(2))


@pytest.mark.parametrize("channels", [1, 2])
def test_waves_have_the_axis_of_channels_that_the_model_needs(channels):
    """Mono with and without it, stereo in the order of either reader, and several of them."""
    model, waves = Listener(channels).double().eval(), torch.randn(3, channels, 90, dtype=torch.float64)
    composite = EpsilonPlus()
    explainer = lrpfx.Explainer(model, rate=100, composite=composite)
    direct = lrpfx.attribute(lrpfx.transform(model, composite), waves, 1).relevance
    given = {"batch": waves, "wave": waves[0, 0] if channels == 1 else waves[0], "one": waves[:1]}
    given |= {"rows": waves[:, 0]} if channels == 1 else {"columns": waves[0].T}
    for name, one in given.items():
        found = explainer(one, 1)
        is_one = name in ("wave", "columns")
        assert isinstance(found, lrpfx.WaveExplanation if is_one else lrpfx.WaveExplanations), name
        relevance = np.stack([each.answers[0].input_relevance for each in ([found] if is_one else found)])
        np.testing.assert_allclose(relevance, direct[: len(relevance)], rtol=1e-9, atol=1e-12, err_msg=name)


def test_layers_of_series_and_waves():
    """A band for each layer; channels are first after convolutions, and last after recurrent layers."""
    found = lrpfx.explain(Forecasts(), torch.randn(30, 2), form="series")
    assert found.layers().height < found.layers(["filters", "layer"]).height
    assert {name: one.shape for name, one in found._layers(["filters", "layer"], ("channels", "steps")).items()} == {
        "filters": (28,),
        "layer": (28,),
    }
    of_filters = found._origin("", "").answers(found._origin("", "").targets, ["filters"])[0].layers["filters"]
    np.testing.assert_allclose(found._layers(["filters"], ("channels", "steps"))["filters"], of_filters.sum(0))
    with pytest.raises(InputError, match=r"not \(channels, steps\)"):
        found.layers(["head"])
    listener = nn.Sequential(nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 4, 9, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    listener(torch.randn(1, 100))
    assert lrpfx.explain(listener.eval(), torch.randn(100), rate=50).layers(["1"]).width > 100


class Forecasts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.filters, self.layer, self.head = nn.Conv1d(2, 5, 3), nn.LSTM(5, 7, batch_first=True), nn.Linear(7, 1)
        self.eval()

    def forward(self, series):
        return self.head(self.layer(self.filters(series.transpose(1, 2)).transpose(1, 2))[0][:, -1])


MIXED = pd.DataFrame({"a": [1.0, 2.0, -3.0], "kind": [0, 1, 4], "b": [0.5, 0.2, -1.0], "group": [3, 2, 1]})


def numbers_and_categories(frame):
    return torch.tensor(frame[["a", "b"]].values).float(), torch.tensor(frame[["kind", "group"]].values)


class InOrder(nn.Module):
    """A linear function of numbers, and of the embeddings of categories in some order."""

    def __init__(self, order):
        super().__init__()
        torch.manual_seed(0)
        self.order, self.embedding, self.layer = order, nn.Embedding(6, 3), nn.Linear(8, 2, bias=False)

    def forward(self, numbers, categories):
        return self.layer(torch.cat([numbers, self.embedding(self.order(categories)).flatten(1)], 1))


ORDERS = {
    "as given": (lambda ids: ids, False),
    "flip": (lambda ids: ids.flip(1), True),
    "index": (lambda ids: ids[:, [1, 0]], True),
    "stack": (lambda ids: torch.stack([ids[:, 1], ids[:, 0]], 1), True),
    "cat": (lambda ids: torch.cat([ids[:, 1:], ids[:, :1]], 1), True),
    "roll": (lambda ids: ids.roll(1, 1), True),
}


@pytest.mark.parametrize("name", ORDERS)
def test_columns_are_found_by_changes(name):
    """Those of a table whose `preprocess` takes them apart, and those that a model reads in another order."""
    order, is_swapped = ORDERS[name]
    model = InOrder(order).float().eval()
    found = lrpfx.explain(model, MIXED, 0, preprocess=numbers_and_categories).to_pandas()
    numbers, ids = numbers_and_categories(MIXED)
    weight = model.layer.weight[0].detach()
    of_places = (model.embedding(order(ids)) * weight[2:].view(2, 3)).sum(-1).detach()
    expected = torch.cat([numbers * weight[:2], of_places.flip(1) if is_swapped else of_places], 1)
    assert list(found.columns) == ["a", "b", "kind", "group"]
    np.testing.assert_allclose(found.to_numpy(), expected.numpy(), atol=1e-5)


class OfTwoEmbeddings(InOrder):
    def __init__(self, order):
        super().__init__(order)
        self.other = nn.Embedding(6, 3)

    def forward(self, numbers, categories):
        vectors = self.embedding(categories[:, 0]), self.other(categories[:, 1])
        return self.layer(torch.cat([numbers, *vectors], 1))


@pytest.mark.parametrize("kind", [InOrder, OfTwoEmbeddings])
def test_inputs_may_be_named_in_any_order(kind):
    model = kind(lambda ids: ids).float().eval()
    expected = lrpfx.explain(model, MIXED, 0, preprocess=numbers_and_categories).to_pandas()

    def named(frame):
        numbers, categories = numbers_and_categories(frame)
        return {"categories": categories, "numbers": numbers}

    found = lrpfx.explain(model, MIXED, 0, preprocess=named).to_pandas()
    assert list(found.columns) == ["kind", "group", "a", "b"]
    np.testing.assert_array_equal(found[expected.columns].to_numpy(), expected.to_numpy())


def test_features_of_several_columns_have_no_names_of_columns():
    model = nn.Linear(4, 2).float().eval()

    def mixed(frame):
        values = torch.tensor(frame.values).float()
        return values + values[:, [1, 0, 3, 2]]

    assert list(lrpfx.explain(model, MIXED, 0, preprocess=mixed).to_pandas().columns) == [f"feature {n}" for n in range(4)]
    ordered = lrpfx.explain(
        model, MIXED, 0, preprocess=lambda frame: torch.tensor(frame[["b", "a", "group", "kind"]].values).float()
    )
    assert list(ordered.to_pandas().columns) == ["b", "a", "group", "kind"] and ordered[0].values[0] == 0.5


def of_two(change):
    return lambda frame: torch.tensor(np.stack([change(frame["a"].to_numpy()), frame["b"].to_numpy()], 1)).float()


NAMED = {
    "clipped": (lambda frame: torch.tensor(frame[["a", "b"]].clip(lower=9).values).float(), ["a", "b"]),
    "rounded": (lambda frame: torch.tensor((frame[["b", "a"]] / 100).round().values).float(), ["b", "a"]),
    "at a threshold": (of_two(lambda values: values > -10), ["a", "b"]),
    "never seen": (of_two(lambda values: 0 * values), ["a", "b"]),
    "column left out": (lambda frame: torch.tensor(frame[["group", "a"]].values).float(), ["group", "a"]),
    "several never seen": (lambda frame: torch.tensor((frame * [1, 0, 1, 0]).values).float(), ["a", "kind", "b", "group"]),
    "several moved": (lambda frame: torch.tensor((frame[["kind", "b", "a", "group"]] * [1, 0, 1, 0]).values).float(), None),
    "none seen": (lambda frame: torch.zeros(len(frame), 4), None),
    "sums": (lambda frame: torch.tensor(frame[["a", "b"]].values @ [[1.0, 0], [1, 1]]).float(), None),
    "a column twice": (lambda frame: torch.tensor(frame[["a", "a"]].values).float(), None),
}


@pytest.mark.filterwarnings("ignore::lrpfx.errors.LrpfxWarning")  # maps of zeros
@pytest.mark.parametrize("name", NAMED)
def test_names_where_no_change_is_seen(name):
    """Other changes show a column, or the others do; where several ways are left, names are numbers."""
    preprocess, expected = NAMED[name]
    frame = MIXED if name in ("column left out", "several never seen", "several moved", "none seen") else MIXED[["a", "b"]]
    count = preprocess(frame).shape[1]
    found = lrpfx.explain(nn.Linear(count, 1).eval(), frame, 0, preprocess=preprocess)[0]
    assert list(found.features) == (expected or [f"feature {place}" for place in range(count)])
    assert list(found.values) == ([frame[one].iloc[0] for one in expected] if expected else [None] * count)


class Crossed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(36, 2)

    def forward(self, numbers, categories):
        return self.embedding(categories[:, 0] * 6 + categories[:, 1]) + numbers


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(6, 3), nn.Linear(6, 1)

    def forward(self, x):
        return self.layer(torch.cat([x[:, [0, 2, 3]], self.embedding(x[:, 1].long())], 1))


class OneHot(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, numbers, categories):
        return self.layer(torch.cat([numbers, nn.functional.one_hot(categories[:, 0], 6).to(numbers.dtype)], 1))


def test_categories_whose_relevance_is_in_no_column_are_not_silent():
    with pytest.raises(InputError, match=r"reads the columns \[0, 1\] together"):
        lrpfx.explain(Crossed().float().eval(), MIXED, preprocess=numbers_and_categories)
    with pytest.warns(lrpfx.LrpfxWarning, match="embedding reads as categories"):
        lrpfx.explain(Cast().float().eval(), MIXED)
    with pytest.warns(lrpfx.LrpfxWarning, match="no embedding reads"):
        lrpfx.explain(OneHot().float().eval(), MIXED, preprocess=numbers_and_categories)


def test_frequencies_of_a_difference_from_a_reference():
    model = nn.Linear(400, 2, bias=False).float().eval()
    wave, reference = torch.randn(400).float(), torch.randn(400).float()
    found = lrpfx.explain(model, wave, 0, rate=100, composite=lrpfx.composites.DeepLIFT(), reference=reference)
    change, weight = (wave - reference).double().numpy(), model.weight[0].detach().double().numpy()
    expected = (np.fft.rfft(change) * np.fft.rfft(weight).conj()).real / 400
    expected[1:200] *= 2
    np.testing.assert_allclose(found.spectrum().relevance, expected, atol=1e-6)
    assert abs(found.spectrogram().relevance.sum() - expected.sum()) <= 1e-5


def test_relevance_of_zeros_has_no_frequencies():
    wave, relevance = np.array([[1.0, 0.0, 2.0, -1.0]]), np.array([[0.5, 0.25, 0.25, 0.0]])
    with pytest.warns(lrpfx.LrpfxWarning, match="25.0% of the relevance lies on samples that are 0"):
        found = spectrum(wave, relevance, 4.0)
    assert abs(found.relevance.sum() - 0.75) <= 1e-12


def test_a_frame_with_columns_in_another_order_is_an_error():
    """Features are told by their places: with other names, the map would be that of other columns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).float().eval()
    frame = pd.DataFrame({"age": [1.0, 2.0], "sun": [3.0, 4.0], "rain": [5.0, 6.0]})
    with pytest.raises(InputError, match=r"another order \(age, sun, rain\) than names= \(sun, age, rain\)"):
        lrpfx.explain(model, frame, 1, names=["sun", "age", "rain"])
    explainer = lrpfx.Explainer(model)
    explainer(frame, 1)
    with pytest.raises(InputError, match=r"those of an earlier one \(age, sun, rain\): .*frame\[\['age', 'sun', 'rain'\]\]"):
        explainer(frame[["sun", "age", "rain"]], 1)
    explainer(frame.iloc[:1], 1)
    steps = pd.DataFrame({"wind": range(12), "sun": range(12)}, dtype="float32")
    series = nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(3, 2)).float().eval()
    with pytest.raises(InputError, match="another order"):
        lrpfx.explain(series, steps, 1, form="series", names=["sun", "wind"], channels="first")

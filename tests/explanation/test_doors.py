"""A wrong kind of input is an error that names the door for it, and what the error says to write works."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

import lrpfx
from lrpfx.errors import InputError, LrpfxError


def dense(features=3):
    return nn.Sequential(nn.Linear(features, 4), nn.ReLU(), nn.Linear(4, 2)).eval()


def of_images():
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)).eval()


def of_series():
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)).eval()


def of_volumes():
    return nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2, 2)).eval()


GRAPH = {"x": torch.rand(2, 3), "edge_index": torch.tensor([[0], [1]])}


class LastStep(nn.Module):
    """Reads an input of two axes as the steps of one series."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class EachStep(nn.Module):
    """A recurrent layer, and the output of each step."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0])


OF_STEPS = {"target": lrpfx.Region("a"), "categories": ["a", "b"]}


class OfTwo(nn.Module):
    def forward(self, first, second):
        return (first.flatten(1).sum(1) + second.flatten(1).sum(1))[:, None]


class OfOneOrTwo(nn.Module):
    def forward(self, x, gain=None):
        return x.flatten(1) if gain is None else x.flatten(1) * gain


class Decided(nn.Module):
    """Returns what was decided of the scores."""

    def __init__(self, decide):
        super().__init__()
        self.scores, self.decide = nn.Linear(3, 2), decide

    def forward(self, x):
        return self.decide(self.scores(x))


class OfGraph(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x, edge_index, edge_weight=None):
        return self.head(torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]).mean(0, keepdim=True))


def of_pixels():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()


PAIR = {"first": torch.rand(1, 90), "second": torch.rand(1, 2)}
PIXELS = torch.rand(1, 3, 8, 8)


@pytest.mark.parametrize(
    ("make", "given", "settings", "message"),
    [
        (of_images, "a sentence", {}, "tokenizer="),
        (of_images, "photo.jpg", {}, "preprocess="),
        (of_images, Image.new("RGB", (8, 8)), {}, "preprocess="),
        (of_series, "bird.wav", {}, "rate="),
        (of_series, "bird.wav", {"rate": 8000}, "samples as an array"),
        (dense, "houses.csv", {}, "pandas.read_csv"),
        (dense, "houses.csv", {"form": "table"}, "pandas.read_csv"),
        (dense, [0.1, 0.2, 0.3], {}, "a list of numbers was given.*np.array"),
        (of_images, [[1, 2], [3, 4]], {"preprocess": np.asarray}, "a list of numbers was given.*np.array"),
        (dense, [[0.1, 0.2, 0.3]], {}, "np.array"),
        (dense, 3, {}, "np.array"),
        (dense, torch.tensor([[1, 2, 3]]), {}, "form='table'"),
        (lambda: EachStep(nn.GRU(3, 4, batch_first=True)), torch.rand(9, 3), {}, 'depends on the others.*form="series"'),
        (lambda: EachStep(nn.GRU(3, 4)), torch.rand(5, 6, 3), {"target": (0, 1)}, "depends on the others.*batch_first=True"),
        (lambda: nn.Conv1d(1, 2, 3), torch.rand(1, 1, 9), {**OF_STEPS, "rate": 8}, r"output\.movedim\(1, 2\)"),
        (dense, torch.rand(3, 8, 8), {}, r"\(1, 3, 8, 8\) was read as photographs.*form="),
        (of_images, torch.rand(1000), {}, "read as a table.*rate="),
        (of_images, pd.DataFrame({"a": [1.0, 2.0]}), {}, "read as a table"),
        (of_images, torch.rand(1, 3, 4, 8, 8), {}, "read as a volume"),
        (of_series, torch.rand(5, 3, 10), {}, "read as series"),
        (of_volumes, Image.new("RGB", (8, 8)), {}, "a volume is an array"),
        (OfTwo, torch.rand(1, 3, 4, 4), {}, "dict by the names"),
        (
            lambda: nn.Bilinear(3, 4, 2),
            {"input1": torch.rand(1, 3), "input2": torch.rand(1, 5)},
            {},
            r"input2 \(1, 5\) of float",
        ),
        (dense, pd.DataFrame(np.ones((2, 3)), columns=["a", "a", "b"]), {}, "two columns named 'a'"),
        (dense, pd.DataFrame(index=[0, 1]), {}, "no columns"),
        (dense, [np.ones(3), np.ones(2)], {"form": "table"}, "different shapes"),
        (of_series, [torch.ones(2, 10), torch.ones(2, 9)], {"form": "series"}, "different shapes"),
        (of_series, [np.ones(10), np.ones(9)], {"rate": 8}, "different shapes"),
        (of_series, torch.rand(2, 9), {"rate": 8}, "channels, samples"),
        (dense, [GRAPH, 3], {}, "int among the graphs"),
        (dense, {**GRAPH, "edge_index": torch.tensor([[-1], [0]])}, {}, "nodes -1 to 0"),
        (dense, GRAPH, {"form": "table"}, "a graph was given"),
        (dense, GRAPH, {}, "Sequential was given the graph as one object.*takes x and edge_index"),
        (of_volumes, "houses.csv", {}, "pandas.read_csv"),
        (OfTwo, PAIR, {"rate": 90}, "rate= and channels= say what one input is.*leave them out"),
        (OfTwo, [PAIR], {"form": "series"}, "leave them out"),
        (OfTwo, tuple(PAIR.values()), {"form": "table"}, "leave them out"),
        (OfTwo, (GRAPH["x"], torch.zeros(3, 1)), {}, "x and edge_index, which the forward of the model names so"),
        (OfOneOrTwo, (torch.rand(1, 3), torch.rand(1, 2)), {}, r'a dict: \{"x": ..., "gain": ...\}'),
        (OfOneOrTwo, (torch.rand(1, 3), torch.rand(1, 3)), {}, r'a dict: \{"x": ..., "gain": ...\}'),
        (LastStep, torch.rand(24), {"names": ["load"]}, r"one feature.*array\[..., None\] with form='series'"),
        (of_pixels, PIXELS, {"target": (1, 2, 3)}, r"lrpfx\.Region\(class, mask\)"),
        (of_pixels, PIXELS, {"target": (1, (2, 3))}, r"lrpfx\.Region\(class, mask\)"),
        (of_pixels, PIXELS, {"target": np.ones((6, 6), bool)}, r"lrpfx\.Region\(class, mask\)"),
        (lambda: Decided(lambda scores: scores.argmax(1)), torch.rand(2, 3), {}, "int64.*return the scores behind it"),
        (lambda: Decided(lambda scores: scores > 0), torch.rand(2, 3), {}, "bool.*return the scores behind it"),
        (lambda: Decided(lambda scores: scores.argmax().item()), torch.rand(1, 3), {}, "an int; let it return the tensor"),
        (dense, torch.rand(2, 3).to_sparse(), {}, r"x\.to_dense\(\)"),
        (of_images, PIXELS + 0j, {}, "view_as_real"),
        (of_images, DataLoader([PIXELS[0]] * 2, 2), {}, r"lrpfx\.datasets\.attribute\(explainer, data, path\)"),
        (of_series, torch.rand(5, 10, 2), {}, r"swapaxes\(1, 2\) with channels='first'"),
        (LastStep, pd.DataFrame(np.ones((4, 3))), {}, r"\(2,\) for 4 samples.*form=\"series\""),
    ],
)
def test_the_error_names_the_door(make, given, settings, message):
    with pytest.raises(InputError, match=message):
        lrpfx.explain(make().eval(), given, **settings)


def _broken(given):
    raise ZeroDivisionError("of the user")


@pytest.mark.parametrize(
    ("make", "given", "settings"),
    [
        (dense, pd.DataFrame(np.ones((2, 3))), {}),
        (of_series, torch.rand(5, 10, 2), {"form": "series"}),
        (of_series, torch.rand(2, 9), {"rate": 8}),
        (of_volumes, torch.rand(1, 4, 5, 6), {}),
        (of_images, Image.new("RGB", (8, 8)), {}),
        (OfTwo, {"first": Image.new("RGB", (8, 8)), "second": torch.rand(1, 3)}, {}),
    ],
)
def test_exceptions_of_preprocessing_keep_their_cause(make, given, settings):
    with pytest.raises(InputError, match=r"preprocess=? failed.*ZeroDivisionError: of the user") as caught:
        lrpfx.explain(make().eval(), given, preprocess=_broken, **settings)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(("make", "given"), [(dense, torch.rand(1, 5)), (OfTwo, torch.rand(2, 3)), (of_images, PIXELS[:, :1])])
def test_errors_speak_of_the_input_that_was_given(make, given):
    with pytest.raises(InputError, match=r"the input|fails on the input") as caught:
        lrpfx.explain(make().eval(), given)
    assert "example" not in str(caught.value)


def test_what_is_no_target_of_a_module_names_regions():
    with pytest.raises(InputError, match=r"lrpfx\.Region\(class, mask\)"):
        lrpfx.attribute(lrpfx.transform(of_pixels(), lrpfx.composites.EpsilonPlus()), PIXELS, (1, 2, 3))


def test_functions_of_numpy_name_those_of_torch():
    model = Decided(lambda scores: np.argmax(scores.detach().numpy(), 1)).eval()
    with pytest.raises(LrpfxError, match="in place of NumPy's"):
        lrpfx.explain(model, torch.rand(1, 3))


def test_a_tuple_in_the_order_of_the_arguments_is_a_graph():
    model, graph = OfGraph().eval(), (torch.rand(4, 3), torch.tensor([[0, 1, 2], [1, 2, 3]]))
    expected = lrpfx.explain(model, dict(zip(("x", "edge_index"), graph, strict=True)), 1)
    found = lrpfx.explain(model, graph, 1)
    np.testing.assert_array_equal(found.nodes, expected.nodes)
    several = lrpfx.explain(model, [graph, (*graph, torch.ones(3))], 1)
    assert len(several) == 2
    np.testing.assert_array_equal(several.relevance, np.stack([expected.nodes, expected.nodes]))


def test_a_single_name_reads_one_axis_as_a_series():
    model, load = nn.Sequential(nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(44, 2)), torch.rand(24)
    found = lrpfx.explain(model.eval(), load, names=["load"])
    assert isinstance(found, lrpfx.SeriesExplanation) and found.features == ("load",)
    first, _ = lrpfx.explain(model, load.repeat(2, 1), names=["load"])
    np.testing.assert_array_equal(found.relevance, first.relevance)


def test_three_axes_of_a_dense_model_are_series_unless_they_have_the_channels_of_a_picture():
    assert isinstance(lrpfx.explain(dense(), torch.rand(2, 7, 3), **OF_STEPS)[0], lrpfx.SeriesExplanation)
    assert isinstance(lrpfx.explain(nn.Sequential(nn.Flatten(), dense(9)), torch.rand(1, 3, 3)), lrpfx.Explanation)


@pytest.mark.parametrize(
    ("make", "given", "settings"),
    [
        (dense, [torch.ones(3, requires_grad=True), torch.ones(3)], {"form": "table"}),
        (dense, np.ones((2, 3), dtype=">f8"), {}),
        (dense, np.ones((2, 6))[::-1, ::2], {}),
        (of_series, np.ones((2, 2, 10), dtype=">f4"), {}),
        (of_volumes, np.random.default_rng(0).random((4, 5, 6)).astype(">f4"), {}),
    ],
)
def test_forms_of_memory(make, given, settings):
    model = make()
    plain = torch.stack(list(given)).detach() if isinstance(given, list) else torch.from_numpy(given.astype("=f8").copy())
    found, expected = lrpfx.explain(model, given, **settings), lrpfx.explain(model, plain, **settings)
    for one, other in zip(*(each if isinstance(each, Sequence) else [each] for each in (found, expected)), strict=True):
        np.testing.assert_allclose(one.relevance, other.relevance, rtol=1e-5, atol=1e-7)


def test_what_the_errors_say_to_write_works():
    table = torch.tensor([[1, 2, 3]])
    assert isinstance(lrpfx.explain(dense(), table, form="table"), lrpfx.TableExplanations)
    assert isinstance(lrpfx.explain(dense(), np.array([0.1, 0.2, 0.3])), lrpfx.TableExplanation)
    assert isinstance(lrpfx.explain(dense(8), torch.rand(3, 8), form="table"), lrpfx.TableExplanations)
    assert isinstance(
        lrpfx.explain(OfTwo().eval(), {"first": torch.rand(1, 4), "second": torch.rand(1, 4)}), lrpfx.JointExplanation
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("cat.jpg", "photographs, pass preprocess="),
        ("scans/head.nii.gz", "a volume"),
        (["a good film", "bird.wav"], "bird.wav seems to be a sound"),
        (["rows.csv"], "a table or series"),
    ],
)
def test_the_name_of_a_file_beside_a_tokenizer_is_no_text(given, message):
    model = nn.Sequential(nn.Embedding(4, 2), nn.Flatten(), nn.Linear(8, 2)).eval()
    with pytest.raises(InputError, match=message):
        lrpfx.explain(model, given, tokenizer=lambda text, **settings: {"input_ids": [[1, 2, 3]]})

"""`DeepExplainer` gives the values of shap's where that is right, adds up where it is not, and runs in shap's plots."""

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("shap")

import shap

import lrpfx
from lrpfx.adapters.shap import DeepExplainer


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Sigmoid(), nn.Linear(5, 3)).eval()


@pytest.mark.filterwarnings("ignore:.*")
def test_values_are_those_of_shap():
    model, x, background = chain().float(), torch.randn(4, 6).float(), torch.randn(7, 6).float()
    theirs, ours = shap.DeepExplainer(model, background), DeepExplainer(model, background)
    np.testing.assert_allclose(ours.shap_values(x), theirs.shap_values(x), atol=1e-6)
    np.testing.assert_allclose(ours.expected_value, theirs.expected_value, atol=1e-6)
    for order in ("max", "min", "max_abs"):
        expected, places = theirs.shap_values(x, ranked_outputs=2, output_rank_order=order, check_additivity=False)
        found, own_places = ours.shap_values(x, ranked_outputs=2, output_rank_order=order)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        assert torch.equal(own_places, places)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, a, b):
        return nn.functional.gelu(self.left(a)) * self.right(b).softmax(1)


def test_several_inputs_add_up():
    explainer = DeepExplainer(Two().eval(), [torch.randn(5, 3), torch.randn(5, 2)])
    x = [torch.randn(2, 3), torch.randn(2, 2)]
    values = explainer.shap_values(x)
    assert [one.shape for one in values] == [(2, 3, 4), (2, 2, 4)]
    total = values[0].sum(1) + values[1].sum(1)
    np.testing.assert_allclose(total, explainer.model(*x).detach().numpy() - explainer.expected_value, atol=1e-12)


@pytest.mark.parametrize("outputs", [1, 3])
def test_plots_take_the_explanation(outputs):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import pandas

    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, outputs)).eval()
    rows = pandas.DataFrame(np.random.default_rng(0).normal(size=(9, 4)), columns=["age", "dose", "weight", "height"])
    explanation = DeepExplainer(model, rows[:5])(rows)
    of_one = explanation if outputs == 1 else explanation[..., 1]
    assert explanation.values.shape == ((9, 4) if outputs == 1 else (9, 4, 3)) and of_one.base_values.shape == (9,)
    expected = model(torch.tensor(rows.to_numpy())).detach().numpy()[:, min(1, outputs - 1)]
    np.testing.assert_allclose(of_one.values.sum(1) + of_one.base_values, expected, atol=1e-12)
    shap.plots.waterfall(of_one[0], show=False)
    assert [label.get_text() for label in plt.gca().get_yticklabels() if "dose" in label.get_text()]
    plt.close("all")
    shap.plots.beeswarm(of_one, show=False)
    assert {"age", "dose"} <= {label.get_text() for label in plt.gca().get_yticklabels()}
    plt.close("all")
    shap.plots.force(of_one[0], matplotlib=True, show=False)
    plt.close("all")


def test_plots_of_features_without_names():
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    explanation = DeepExplainer(nn.Linear(4, 3).eval(), torch.randn(5, 4))(torch.randn(6, 4))[..., 1]
    shap.plots.heatmap(explanation, show=False)
    assert "Feature 3" in {label.get_text() for label in plt.gca().get_yticklabels()}
    plt.close("all")


@pytest.mark.parametrize(
    ("background", "message"),
    [
        (torch.zeros(0, 6), "the background has no samples"),
        (np.array([["a"] * 6]), "an array of numbers"),
    ],
)
def test_backgrounds_that_do_not_fit(background, message):
    with pytest.raises(lrpfx.InputError, match=message):
        DeepExplainer(chain(), background)


@pytest.mark.parametrize("samples", [torch.ones(2, 5), torch.ones(2, 6, dtype=torch.half)])
def test_samples_that_do_not_fit(samples):
    with pytest.raises(lrpfx.InputError, match="the model cannot run on these samples"):
        DeepExplainer(chain(), samples)
    with pytest.raises(lrpfx.InputError, match="the model cannot run on these samples"):
        DeepExplainer(chain(), torch.zeros(2, 6)).shap_values(samples)


def test_outputs_that_do_not_fit():
    with pytest.raises(lrpfx.InputError, match=r"outputs of shape \(samples, classes\), not \(2,\)"):
        DeepExplainer(nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)).eval(), torch.zeros(2, 6))
    with pytest.raises(lrpfx.InputError, match="output_rank_order is one of"):
        DeepExplainer(chain(), torch.zeros(2, 6)).shap_values(torch.ones(2, 6), 1, "largest")


@pytest.mark.parametrize("number", [0, -1, 2.5, "2"])
def test_a_number_of_ranked_outputs_is_whole(number):
    with pytest.raises(lrpfx.InputError, match="ranked_outputs is a number of outputs, 1 or more, not"):
        DeepExplainer(chain(), torch.zeros(2, 6)).shap_values(torch.ones(2, 6), ranked_outputs=number)


def test_names_that_do_not_fit():
    with pytest.raises(lrpfx.InputError, match="output_names has 2 names, but there are 3 outputs"):
        DeepExplainer(chain(), torch.zeros(2, 6), output_names=["a", "b"])
    with pytest.raises(lrpfx.InputError, match="feature_names has 2 names, but there are 6 features"):
        DeepExplainer(chain(), torch.zeros(2, 6), feature_names=["a", "b"])(torch.ones(2, 6))


def test_inputs_in_a_tuple_are_those_in_a_list():
    background, x = [torch.randn(5, 3), torch.randn(5, 2)], [torch.randn(2, 3), torch.randn(2, 2)]
    model = Two().eval()
    expected, found = (
        DeepExplainer(model, background).shap_values(x),
        DeepExplainer(model, tuple(background)).shap_values(tuple(x)),
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(lrpfx.InputTypeError, match="an array of numbers"):
        DeepExplainer(model, [[[1.0], [1.0, 2.0]], background[1]])


def test_bfloat16_is_explained_in_float32():
    explainer = DeepExplainer(chain().bfloat16(), torch.zeros(2, 6).bfloat16())
    values = explainer.shap_values(torch.ones(2, 6).bfloat16(), check_additivity=False)
    assert explainer.expected_value.dtype == values.dtype == np.float32


def test_the_inputs_of_a_layer_have_a_remedy():
    model = chain()
    with pytest.raises(lrpfx.InputTypeError, match="those of a layer within: for these, write") as error:
        DeepExplainer((model, model[1]), torch.zeros(2, 6))
    x, background = torch.randn(3, 6), torch.randn(2, 6)
    names = {"lrpfx": lrpfx, "model": model, "x": x, "target": 1, "background": background, "name": "0"}
    line = str(error.value).split("write ")[1].split(", where name")[0]
    found = eval(line, names)
    difference = (model(x) - model(background).mean(0))[:, 1].detach()
    torch.testing.assert_close(found.sum(1), difference, rtol=1e-4, atol=1e-5)

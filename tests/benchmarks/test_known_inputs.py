"""The networks for series and tables of the benchmark, through the front door, and what it measures."""

import numpy as np
import pytest
import torch
from known_inputs import ATTRIBUTIONS, TASKS, share_on
from torch import nn

import lrpfx

pytestmark = pytest.mark.filterwarnings(
    "ignore:entries of:lrpfx.errors.LrpfxWarning"
)  # composites name more than one network has

NETWORKS = {
    (name, form): (make, network)
    for make, networks in TASKS.values()
    for name, network in networks.items()
    for form in ["series" if name in ("LSTM", "TCN", "PatchTST", "N-BEATS") else "table"]
}
#: The rules that the front door chooses.
RULES = {"TCN": "EpsilonPlus, Gamma", "PatchTST": "AttnLRP", "FT-Transformer": "AttnLRP", "TabNet": "AttnLRP"}


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("name", "form"), NETWORKS)
def test_each_network_is_explained(name, form):
    torch.manual_seed(0)
    make, network = NETWORKS[name, form]
    model, (x, _, _) = network().eval(), make(3)
    found = lrpfx.explain(model, x, form=form)
    for place, one in enumerate(found):
        assert one.rules.startswith(RULES.get(name, "EpsilonPlus()")) and one.relevance.shape == x.shape[1:]
        np.testing.assert_allclose(one.output, model(x)[place].detach(), rtol=1e-4, atol=1e-5)
        assert abs(one.ledger.unexplained) < 1e-4 * max(1.0, abs(one.ledger.seed))
        assert one.ledger.seed == pytest.approx(float(one.output[0]), rel=1e-4)
    default = ATTRIBUTIONS["Gamma for convolutions (default)"](model, x)
    relevance = np.stack([one.relevance for one in found])
    size = float(default.abs().max())
    np.testing.assert_allclose(relevance, default, rtol=2e-2, atol=2e-2 * size)  # the table's column is what the door gives


def test_shares_on_the_inputs_that_decide():
    """A linear network that reads the deciding inputs alone, and half of the others."""
    make, _ = TASKS["three of 96 values"]
    x, _, decides = make(20)
    model = nn.Sequential(nn.Flatten(), nn.Linear(96, 1, bias=False)).eval()
    model[1].weight.data = decides[:1].flatten(1).float()
    for attribute in ATTRIBUTIONS.values():
        assert share_on(attribute(model, x).detach(), decides) == pytest.approx(1.0, abs=1e-5)
    model[1].weight.data = 1 - model[1].weight.data
    for attribute in ATTRIBUTIONS.values():
        assert share_on(attribute(model, x).detach(), decides) == pytest.approx(0.0, abs=1e-5)


def test_a_network_of_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8, "prediction_length": 4}
    config = transformers.PatchTSTConfig(**sizes, d_model=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32)
    model = transformers.PatchTSTForPrediction(config).eval()
    found = lrpfx.explain(model, torch.randn(32, 3), 2, form="series", output=lambda made: made["prediction_outputs"][:, :, 0])
    assert found.relevance.shape == (32, 3) and found.output.shape == (4,) and found.rules == "AttnLRP()"
    assert abs(found.ledger.unexplained) < 1e-4 * abs(found.ledger.seed)

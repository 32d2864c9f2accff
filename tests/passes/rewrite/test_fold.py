"""FOLD: derived buffers."""

import pytest
import torch
from helpers import NETWORKS, small_net
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonAlpha2Beta1, EpsilonPlus, LayerMapComposite
from lrpfx.rules.template import BasicHook
from lrpfx.types import Linear


@pytest.mark.parametrize("name", sorted(NETWORKS))
@pytest.mark.sampled(3)
def test_folding_changes_no_number(name):
    model, x = NETWORKS[name]()
    folded = lrpfx.attribute(lrpfx.transform(model, EpsilonAlpha2Beta1()), x, 1)
    live_model = lrpfx.transform(model, EpsilonAlpha2Beta1(), fold=False)
    live = lrpfx.attribute(live_model, x, 1)
    assert torch.equal(live.output, folded.output) and torch.equal(live.relevance, folded.relevance)
    assert list(live_model.state_dict()) == list(model.state_dict())
    assert "clamp" in live_model.code
    live_model.refold()  # has nothing to do


def test_derived_buffers_are_named_after_their_layer_and_not_saved():
    explain_model = lrpfx.transform(small_net(), EpsilonPlus())
    derived = set(dict(explain_model.named_buffers())) - set(explain_model.state_dict())
    assert {"conv1.merged_weight", "conv1.merged_bias"} <= derived
    assert derived == set(explain_model.compiled.derived)
    assert all(not buffer.requires_grad for buffer in explain_model.buffers())


def test_users_modifiers_are_folded_and_kept():
    calls = []

    def modifier(parameter, name):
        calls.append(name)
        return parameter.clamp(min=0)

    model = nn.Sequential(nn.Linear(3, 2)).eval()
    explain_model = lrpfx.transform(model, LayerMapComposite([(Linear, BasicHook(param_modifiers=[modifier]))]))
    assert set(calls) == {"weight", "bias"}
    calls.clear()
    explain_model(torch.randn(2, 3))
    assert not calls
    explain_model.refold()
    assert calls == ["weight", "bias"]


def test_results_that_are_no_tensors_stay_in_the_graph():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x):
            first, second = torch.split(self.weight, [2, 2])[0:2][0], self.weight[2:]
            return torch.nn.functional.linear(x, first) + torch.nn.functional.linear(x, second)

    model, x = Net().eval(), torch.randn(2, 3)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert torch.equal(explain_model(x), model(x))


def test_weights_that_rules_modify_are_not_held():
    """lrpfx's own modifiers run in the backward pass; what a batch norm was merged into is held."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).eval()
    for composite in (EpsilonPlus(), EpsilonAlpha2Beta1(), lrpfx.composites.GammaByDepth()):
        explain_model = lrpfx.transform(model, composite)
        assert set(explain_model.compiled.derived) == {"0.merged_weight", "0.merged_bias"}
        x = torch.rand(2, 2, 4, 4)
        live = lrpfx.attribute(lrpfx.transform(model, composite, fold=False), x, targets=[0, 1]).relevance
        assert torch.allclose(lrpfx.attribute(explain_model, x, targets=[0, 1]).relevance, live, rtol=1e-5, atol=1e-6)

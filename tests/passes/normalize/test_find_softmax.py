"""What is subtracted from all entries of a softmax cancels."""

import pytest
import torch
from helpers import Unary, assert_close
from torch.nn import functional

import lrpfx
from lrpfx.composites import AttnLRP


def relevance_of(function, x, capture="symbolic"):
    explain_model = lrpfx.transform(Unary(function), AttnLRP(), example_inputs=x, capture=capture)
    return lrpfx.attribute(explain_model, x, lambda output: output * torch.linspace(0.5, 2, 4)).relevance


SHIFTS = {
    "largest": lambda x: x.amax(-1, keepdim=True),
    "detached largest": lambda x: x.amax(dim=2, keepdim=True).detach(),
    "largest of detached": lambda x: x.detach().max(-1, keepdim=True).values,
    "detached data": lambda x: x.max(dim=-1, keepdim=True)[0].detach(),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "logsumexp": lambda x: torch.logsumexp(x, -1, keepdim=True).detach(),
    "largest of all": lambda x: x.max(),
    "number": lambda x: 2.0,
}


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("name", SHIFTS)
def test_a_softmax_of_shifted_scores_is_that_of_the_scores(name, capture):
    x = torch.randn(2, 3, 4)
    expected = relevance_of(lambda x: torch.softmax(x, -1), x)
    assert_close(relevance_of(lambda x: torch.softmax(x - SHIFTS[name](x), -1), x, capture), expected, 1e-9)


def test_also_in_a_logarithm_and_twice():
    x = torch.randn(2, 3, 4)
    expected = relevance_of(lambda x: functional.log_softmax(x, -1), x)
    shifted = relevance_of(lambda x: functional.log_softmax(x - x.amax(-1, keepdim=True).detach() - 1, -1), x)
    assert_close(shifted, expected, 1e-9)


@pytest.mark.parametrize(
    "shift",
    [lambda x: x.amax(1, keepdim=True), lambda x: x.flip(-1), lambda x: x.mean((0, 1), keepdim=True), lambda x: x[..., :1]],
)
def test_other_differences_stay(shift):
    explain_model = lrpfx.transform(Unary(lambda x: torch.softmax(x - shift(x), -1)), AttnLRP())
    assert "sub" in lrpfx.node_names(explain_model)


OTHER_SUMS = {
    "of other exponentials": lambda x, v: torch.einsum("bqk,bkd->bqd", x.exp(), v) / x.flip(-1).exp().sum(-1, keepdim=True),
    "along another dimension": lambda x, v: torch.einsum("qk,kd->dq", x[0].exp(), v[0]) / x[0].exp().sum(-1, keepdim=True),
    "of squares": lambda x, v: functional.normalize(x.exp(), p=2.0, dim=-1) @ v,
    "with a third factor": lambda x, v: torch.einsum("bqk,bkd,q->bqd", x.exp(), v, x[0, :, 0]) / x.exp().sum(-1, keepdim=True),
}


@pytest.mark.filterwarnings("ignore::lrpfx.errors.LrpfxWarning")
@pytest.mark.parametrize("name", OTHER_SUMS)
def test_other_quotients_stay(name):
    x = torch.randn(2, 3, 4)
    net = Unary(lambda x: OTHER_SUMS[name](x, x.transpose(1, 2)))
    explain_model = lrpfx.transform(net, AttnLRP(), example_inputs=x)
    assert_close(explain_model(x), net(x), 1e-12)
    assert not any("softmax" in node for node in lrpfx.node_names(explain_model))


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_a_softmax_without_a_dimension():
    x = torch.randn(2, 3)
    net = Unary(lambda x: functional.normalize(torch.nn.Softmax()(x), dim=-1))
    explain_model = lrpfx.transform(net, AttnLRP(), example_inputs=x, capture="symbolic")
    assert_close(explain_model(x), net(x), 1e-12)


def test_a_softmax_in_single_precision_between_double_precision():
    """The graph rounds it in another order, so its outputs are compared with the precision of its values."""
    x = torch.randn(2, 3, dtype=torch.float64)

    def by_hand(x):
        weights = torch.exp(x.float() - x.float().amax(-1, keepdim=True))
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype)

    maps = []
    for function in (by_hand, lambda x: torch.softmax(x.float(), -1).to(x.dtype)):
        torch.manual_seed(0)
        explain_model = lrpfx.transform(Unary(function), AttnLRP(), example_inputs=x)
        maps.append(lrpfx.attribute(explain_model, x, torch.cos).relevance)
    assert torch.allclose(*maps, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 3, 4, 5)])
def test_a_dimension_that_is_left_out_is_derived(shape):
    """A shift along it cancels, as for one that is given."""

    x = torch.randn(shape, dtype=torch.float64)
    model = Unary(lambda x: functional.softmax(x + 0.5))
    explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=x, capture="symbolic")
    assert [entry.name for entry in lrpfx.assignment(explain_model)] == ["x", "softmax"]

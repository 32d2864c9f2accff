"""Operations that get no relevance need no rule, and a cut of the gradient elsewhere has one to choose."""

import pytest
import torch
from helpers import Unary, assert_close
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import rules, types
from lrpfx.composites import AttnLRP, EpsilonPlus
from lrpfx.errors import UnsupportedOperationError


def relevance_of(function, x, capture="symbolic", **options):
    explain_model = lrpfx.transform(Unary(function), AttnLRP(**options), example_inputs=x, capture=capture)
    assert lrpfx.ledger(explain_model, x, lambda output: output).unexplained <= 1e-9
    return lrpfx.attribute(explain_model, x, lambda output: output).relevance


WITHOUT = {
    "indices": (lambda x: x[:, x.detach().argmax(1)], lambda x: x[:, x.argmax(1)]),
    "comparison": (lambda x: x * (x.detach() > 0), lambda x: x * (x > 0)),
    "rank": (lambda x: x.gather(1, x.detach().topk(2, 1)[1]), lambda x: x.gather(1, x.topk(2, 1)[1])),
    "mask": (lambda x: torch.where(x.detach().abs() > 0.5, x, 2 * x), lambda x: torch.where(x.abs() > 0.5, x, 2 * x)),
    "divisor": (lambda x: x / x.norm(dim=1, keepdim=True).detach(), lambda x: x / x.norm(dim=1, keepdim=True)),
    "unlisted": (lambda x: x * (torch.special.i0(x) > 1.1), lambda x: x * (torch.i0(x) > 1.1)),
}


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("name", WITHOUT)
def test_what_gets_no_relevance_needs_no_rule(name, capture):
    detached, plain = WITHOUT[name]
    x = torch.randn(3, 4)
    assert_close(relevance_of(detached, x, capture), relevance_of(plain, x), 1e-12)


def test_a_cut_that_relevance_would_cross_names_the_rule_to_choose():
    """The message's own entry is taken: relevance passes."""
    x = torch.randn(3, 4)
    with pytest.raises(UnsupportedOperationError, match=r"\(lrpfx.types.Detach, lrpfx.rules.Pass\(\)\)"):
        relevance_of(lambda x: x + 0.5 * x.flip(1).detach(), x)
    found = relevance_of(lambda x: x + 0.5 * x.flip(1).detach(), x, layer_map=[(types.Detach, rules.Pass())])
    assert_close(found, relevance_of(lambda x: x + 0.5 * x.flip(1), x), 1e-12)


class Masked(nn.Module):
    """Features that are averaged behind a mask, which is found among them or held as a constant."""

    mask: torch.Tensor | None = None

    def __init__(self, choose):
        super().__init__()
        self.linear, self.choose = nn.Linear(4, 4), choose

    def forward(self, x):
        x = self.linear(x)
        return (x * (self.choose(x) if self.mask is None else self.mask)).mean(1)


CHOICES = {
    "one_hot": lambda x: F.one_hot(x.argmax(-1), 4).type(torch.get_default_dtype()),
    "comparison": lambda x: (x > 0).to(x.dtype),
    "truth values": lambda x: x > 0,
}


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("choose", CHOICES)
def test_a_choice_behind_parameters_is_a_constant_factor(choose, capture):
    model, x = Masked(CHOICES[choose]), torch.randn(3, 5, 4)
    held = Masked(None)
    held.linear, held.mask = model.linear, CHOICES[choose](model.linear(x)).detach()
    composite = EpsilonPlus(epsilon=0.01, stabilizer=0.01)
    found, expected = (
        lrpfx.attribute(lrpfx.transform(one, composite, example_inputs=x, capture=capture), x, lambda output: output).relevance
        for one in (model, held)
    )
    assert_close(found, expected, 1e-12)

"""Operations that get no relevance need no rule, and a cut of the gradient elsewhere has one to choose."""

import pytest
import torch
from helpers import Unary, assert_close

import lrpfx
from lrpfx import rules, types
from lrpfx.composites import AttnLRP
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

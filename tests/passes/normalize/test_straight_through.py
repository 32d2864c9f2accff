"""Values that stand for others, by terms that are cut from the gradient."""

import pytest
import torch
from helpers import assert_close
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import types
from lrpfx.composites import EpsilonPlus
from lrpfx.rules import Pass


class Estimator(nn.Module):
    """Two dense layers with a function between them, and the vectors of a codebook."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(6, 4), nn.Linear(4, 3), function
        self.codebook = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        return self.last(self.function(self, self.first(x)))


def nearest(m, z):
    return m.codebook[torch.cdist(z, m.codebook).argmin(-1)]


def one_hot(z):
    return F.one_hot(z.argmax(-1), z.shape[-1]).to(z)


SPELLINGS = {
    "quantized": (nearest, lambda m, z: z + (nearest(m, z) - z).detach()),
    "quantized, the other way": (nearest, lambda m, z: (nearest(m, z) - z).detach() + z),
    "signs": (lambda m, z: z.sign(), lambda m, z: z + (z.sign() - z).detach()),
    "rounded": (lambda m, z: z.round(), lambda m, z: z - z.detach() + z.round().detach()),
    "hard attention": (lambda m, z: one_hot(z), lambda m, z: one_hot(z) - z.detach() + z),
}


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_the_value_that_has_the_gradient_gets_the_relevance(name, capture):
    value, spelled = SPELLINGS[name]
    model, x = Estimator(spelled).double().eval(), torch.randn(3, 6, dtype=torch.float64)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture=capture)
    found = lrpfx.attribute(explain_model, x, 1, record="first")
    assert_close(found.output, model(x).detach(), 1e-12)
    last = lrpfx.transform(nn.Sequential(model.last).eval(), EpsilonPlus(), example_inputs=x[:, :4])
    expected = lrpfx.attribute(last, value(model, model.first(x)).detach(), 1).relevance
    assert_close(found.layers["first"], expected, 1e-9)
    assert lrpfx.ledger(explain_model, x, 1).unexplained <= 1e-9


@pytest.mark.parametrize(
    "function", [lambda m, z: z + (z.sign() + z).detach(), lambda m, z: z + z - z.detach(), lambda m, z: z + z.sin().detach()]
)
def test_other_sums_keep_their_detach(function):
    model, x = Estimator(function).eval(), torch.randn(3, 6)
    with pytest.raises(lrpfx.errors.UnsupportedOperationError, match="where the author has cut the gradient"):
        lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert lrpfx.transform(model, EpsilonPlus(layer_map=[(types.Detach, Pass())]), example_inputs=x)

"""Products with parameters become dense layers, whose results may have other strides."""

import pytest
import torch
from helpers import assert_close
from small_transformers import architecture, inputs_for, small_model
from torch import nn

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonPlus
from lrpfx.support.torch_internals import NEWEST_KNOWN, release


# transformers asks CUDA whether it captures a graph, and `make test-torch` has stubs in the place of its libraries.
@pytest.mark.skipif(release() < NEWEST_KNOWN, reason="needs a torch with CUDA, or one that was built without")
def test_a_view_of_a_product_copies_if_a_layer_in_its_place_has_other_strides():
    """Funnel's shift of relative positions is a reshape, which the exported graph has as a view."""
    one = architecture("FunnelForSequenceClassification")
    model = small_model(one)
    inputs = inputs_for(one, model, one.lengths[0])
    explain_model = lrpfx.transform(model, AttnLRP(), inputs)
    with torch.no_grad():
        torch.testing.assert_close(explain_model(**inputs)["logits"], model(**inputs).logits)


def test_a_product_whose_shape_is_read_stays():
    """A mean over the channels of a scaled layer is a dense layer, and sizes of the product are read beside it."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Conv2d(2, 3, 3), nn.Parameter(torch.randn(3, 1, 1))

        def forward(self, x):
            y = self.layer(x) * self.scale
            return nn.functional.interpolate(x, size=(y.shape[-2], y.shape[-1])) + y.mean(1, keepdim=True)

    model, x = Network().double(), torch.randn(3, 2, 5, 4, dtype=torch.float64)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert_close(explain_model(x), model(x))
    assert lrpfx.ledger(explain_model, x, torch.cos).unexplained <= 1e-12

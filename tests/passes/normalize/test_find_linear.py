"""Products with parameters become dense layers, whose results may have other strides."""

import pytest
import torch
from small_transformers import architecture, inputs_for, small_model

import lrpfx
from lrpfx.composites import AttnLRP
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

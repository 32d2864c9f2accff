"""What attribution keeps of an explainable module."""

import gc
import weakref

import torch
from torch import nn

import lrpfx
from lrpfx.attribution.cache import cache_of
from lrpfx.composites import EpsilonPlusFlat


def test_the_cache_goes_with_its_module():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).eval(), torch.rand(2, 4)
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x)
    lrpfx.attribute(explain_model, x, 0, record=["0"])
    lrpfx.attribute(explain_model, x, targets=[0, 1])
    cache = cache_of(explain_model)
    assert cache.recorders and cache.runners and cache_of(explain_model) is cache
    module, kept = weakref.ref(explain_model), weakref.ref(cache)
    del explain_model, cache
    gc.collect()
    assert module() is None and kept() is None

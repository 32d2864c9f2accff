"""Products with patches: which are convolutions, and which are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.composites import EpsilonPlusFlat


class OfPatches(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(4, 4, 3, 3, dtype=torch.float64)), function

    def forward(self, x):
        return self.function(x, self.weight).flatten(2).mean(2)


def transformed(function, *shape):
    model, x = OfPatches(function).eval(), torch.randn(shape, dtype=torch.float64)
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x)
    assert torch.allclose(explain_model(x), model(x), rtol=1e-9)
    names = [detail for stage in lrpfx.history(explain_model) if stage.name == "find_linear" for _, detail in stage.details]
    return explain_model, model, [detail.rpartition(".")[2] for detail in names]


def windows(x):
    return x.unfold(2, 3, 1).unfold(3, 3, 1)


CONVOLUTIONS = {
    "columns": lambda x, w: w.flatten(1) @ F.unfold(x, 3, padding=1, stride=2),
    "dilated columns": lambda x, w: torch.einsum("bkl,ok->bol", F.unfold(x, 3, dilation=2), w.flatten(1)),
    "windows of another shape": lambda x, w: torch.einsum("bchwij,ocij->bohw", x.unfold(2, 3, 2).unfold(3, 2, 1), w[..., :2]),
    "windows in another order": lambda x, w: torch.einsum("bchwji,ocij->bohw", x.unfold(3, 3, 1).unfold(2, 3, 1), w),
    "places that are swapped": lambda x, w: torch.einsum("bcwhij,ocij->bohw", windows(x), w),
    "windows of series": lambda x, w: torch.einsum("bclk,ock->bol", x.flatten(2).unfold(2, 3, 1), w[:, :, 0]),
}


@pytest.mark.parametrize("function", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_product_with_patches_is_a_convolution(function):
    explain_model, model, names = transformed(function, 2, 4, 9, 8)
    assert names and names[0].startswith("conv")
    x = torch.randn(3, 4, 9, 8, dtype=torch.float64)
    assert torch.allclose(explain_model(x), model(x), rtol=1e-9)


OTHERS = {
    "windows that are turned": lambda x, w: torch.einsum("bchwij,ocij->bohw", windows(x).flip(4), w),
    "channels in another order": lambda x, w: torch.einsum("bchwij,ocij->bohw", windows(x)[:, [1, 0, 3, 2]], w),
    "flattened windows": lambda x, w: windows(x).permute(0, 2, 3, 1, 4, 5).flatten(3) @ w.flatten(1).T,
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_other_products_are_dense_layers(function):
    assert "linear" in transformed(function, 2, 4, 9, 9)[2]


def test_an_image_without_a_batch_stays():
    model = OfPatches(lambda x, w: (w.flatten(1) @ F.unfold(x, 3))[None]).eval()
    x = torch.randn(4, 9, 9, dtype=torch.float64)
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x)
    assert torch.allclose(explain_model(x), model(x), rtol=1e-9)

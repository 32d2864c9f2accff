"""What comparisons read does not keep a batch norm from being merged."""

import pytest
import torch
from helpers import assert_close
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlusFlat


class Compared(nn.Module):
    """A mask from the value of a layer or of a batch norm, which is computed from the input or held."""

    def __init__(self, of, before):
        super().__init__()
        self.of = of
        make = {
            "conv": lambda: nn.Conv2d(3, 3, 3, padding=1),
            "pool": lambda: nn.AvgPool2d(2),
            "shuffle": lambda: nn.ChannelShuffle(3),
        }
        self.first = nn.Sequential(*(make[name]() for name in before))
        self.norm = nn.BatchNorm2d(3)
        self.second = nn.Conv2d(3, 4, 3)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)
            self.norm.weight.normal_()
            self.norm.bias.normal_()

    def forward(self, x):
        y = self.first(x)
        z = self.norm(y)
        compared = {"layer": y, "norm": z}[self.of]
        mask = self.mask if hasattr(self, "mask") else (compared > compared.mean((2, 3), keepdim=True)).to(x.dtype)
        return (self.second(z) * mask[:, :1, 1:-1, 1:-1]).mean((2, 3))


@pytest.mark.parametrize(
    "of, before", [("layer", ["conv"]), ("norm", ["conv"]), ("norm", []), ("norm", ["conv", "pool", "shuffle"])]
)
@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_masks_that_are_computed_are_as_those_that_are_held(of, before, capture):
    model, x = Compared(of, before).eval(), torch.rand(2, 3, 6, 6)
    composite = EpsilonPlusFlat(1e-13, 1e-13)
    found = lrpfx.transform(model, composite, example_inputs=x, capture=capture)
    compared = model.first(x) if of == "layer" else model.norm(model.first(x))
    model.register_buffer("mask", (compared > compared.mean((2, 3), keepdim=True)).to(x.dtype))
    held = lrpfx.transform(model, composite, example_inputs=x, capture=capture)
    assert_close(lrpfx.attribute(found, x, 1).relevance, lrpfx.attribute(held, x, 1).relevance, 1e-9)
    names = {row.name: row.kind for row in lrpfx.assignment(found) if row.rule}
    assert "norm" not in names and "second" in names
    stages = {stage.name: stage for stage in lrpfx.history(found)}
    assert stages["separate_constants"].matches and "computed again for" in stages["separate_constants"].details[0][1]
    assert "separate_constants" not in {stage.name for stage in lrpfx.history(held)}
    assert_close(found(x), model(x), 1e-12)

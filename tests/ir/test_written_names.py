"""Names of modules that the code of a graph can or cannot contain."""

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
        self.head = nn.Linear(4, 2)
        self.name = name

    def forward(self, x):
        return self.head(self._modules[self.name](x))


@pytest.mark.parametrize("name", ['a"b', "a\nb", "a\\b", "\x00", "class", 'a"; 1 / 0; "', "ﬁ"])
@pytest.mark.parametrize("capture", ["auto", "symbolic", "export"])
def test_names_that_torch_cannot_write(name, capture):
    with pytest.raises(lrpfx.CaptureError) as caught:
        lrpfx.transform(Named(name).eval(), EpsilonPlus(), example_inputs=torch.rand(2, 3), capture=capture)
    if capture != "export":  # whose own error may come first
        assert repr(name) in str(caught.value) and "give it another name" in str(caught.value)


@pytest.mark.parametrize("name", ["a'b", "a b", "é", "a{b}%`]", "0", "a\tb", "match", "<b>", "a/b"])
def test_names_that_it_can_write(name):
    torch.manual_seed(0)
    model, x = Named(name).eval().double(), torch.rand(2, 3, dtype=torch.float64)
    other = Named("child").eval().double()
    other.load_state_dict(dict(zip(other.state_dict(), model.state_dict().values(), strict=True)))
    found, expected = (
        lrpfx.attribute(lrpfx.transform(one, EpsilonPlus(), example_inputs=x), x, 1).relevance for one in (model, other)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["title", "graph", "code", "compiled", "composite", "guards", "refold"])
def test_names_that_explainable_modules_have(name):
    x = torch.rand(2, 3)
    with pytest.raises(
        lrpfx.CaptureError, match=f"named '{name}', which an explainable module has too.*wrap Named in a module"
    ):
        lrpfx.transform(Named(name).eval(), EpsilonPlus(), example_inputs=x)
    wrapped = nn.Sequential(Named(name)).eval()
    torch.testing.assert_close(lrpfx.transform(wrapped, EpsilonPlus(), example_inputs=x)(x), wrapped(x))

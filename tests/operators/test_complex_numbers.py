"""Maps through complex numbers have the relevance of the same maps in real numbers."""

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import AttnLRP
from lrpfx.operators import table
from lrpfx.operators.complex_numbers import real_fourier, rotated


def test_adjoints_of_rotations():
    """With broadcast factors, too."""
    row = table.operator_named("rotated")
    for shape in ((2,), (3, 2)):
        x, gradient = torch.randn(3, 1, 2, 2), torch.randn(3, 3, 2, 2)
        by = torch.polar(torch.rand(shape), torch.rand(shape))
        output = rotated(x, by)
        gradient = gradient.expand_as(output) if output.shape[1] == 3 else gradient[:, :1]
        (found,) = row.adjoint(gradient, (x,), {"by": by})
        assert found.shape == x.shape
        torch.testing.assert_close((output * gradient).sum(), (x * found).sum())


class Rotating(nn.Module):
    """Rotary embeddings in complex numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.tensor([0.3, 1.2]))

    def forward(self, x):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(self.angles), self.angles)).flatten(-2)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_rotations_in_complex_numbers(capture):
    """Relevance is that of the same rotation in real numbers."""
    model, x = Rotating().eval(), torch.randn(2, 4)
    explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=x, capture=capture)
    seed = torch.randn(2, 4)
    found = lrpfx.attribute(explain_model, x, seed)
    assert torch.equal(found.output, model(x))
    (expected,) = torch.autograd.grad(model(leaf := x.clone().requires_grad_()), leaf, seed / model(x))
    torch.testing.assert_close(found.relevance, x * expected)
    assert lrpfx.ledger(explain_model, x, seed).unexplained <= 1e-12


def test_products_of_two_complex_signals_have_no_rule():
    class Squared(nn.Module):
        def forward(self, x):
            pairs = torch.view_as_complex(x)
            return torch.view_as_real(pairs * pairs)

    with pytest.raises(lrpfx.UnsupportedOperationError, match="view_as_real"):
        lrpfx.transform(Squared().eval(), AttnLRP(), example_inputs=torch.randn(3, 2))


@pytest.mark.parametrize("norm", [None, "ortho", "forward"])
def test_real_parts_of_fourier_transforms(norm):
    x = torch.randn(2, 3, 4)
    model = nn.Module()
    model.forward = lambda x: torch.fft.fftn(x, dim=(1, 2), norm=norm).real
    explain_model = lrpfx.transform(model.eval(), AttnLRP(), example_inputs=x)
    output = real_fourier(x, (1, 2), norm)
    found = lrpfx.attribute(explain_model, x, lambda output: output)
    assert torch.equal(found.output, output)
    (expected,) = torch.autograd.grad(real_fourier(leaf := x.clone().requires_grad_(), (1, 2), norm).sum(), leaf)
    torch.testing.assert_close(found.relevance, x * expected)

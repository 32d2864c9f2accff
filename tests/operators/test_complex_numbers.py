"""Maps through complex numbers have the relevance of the same maps in real numbers."""

import pytest
import torch
from helpers import assert_close
from torch import nn
from torch.nn import functional

import lrpfx
from lrpfx import rules
from lrpfx.composites import AttnLRP, EpsilonAlpha2Beta1, EpsilonPlus, EpsilonPlusFlat, LayerMapComposite, layer_map_base
from lrpfx.operators import table
from lrpfx.operators.complex_numbers import rotated
from lrpfx.types import Linear


def test_adjoints_of_rotations():
    """With broadcast factors, too."""
    row = table.operator_named("rotated")
    for shape in ((2,), (3, 2)):
        x, gradient = torch.randn(3, 1, 2, 2), torch.randn(3, 3, 2, 2)
        by = torch.polar(torch.rand(shape), torch.rand(shape))
        output = rotated(x, by)
        gradient = gradient.expand_as(output) if output.shape[1] == 3 else gradient[:, :1]
        (found,) = row.linear.adjoint(gradient, (x,), {"by": by})
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


class Spectrogram(nn.Module):
    """A network on magnitudes or powers of a short-time Fourier transform."""

    def __init__(self, power):
        super().__init__()
        self.power = power
        self.register_buffer("window", torch.hann_window(16))
        self.dense = nn.Linear(9 * 5, 3)

    def transformed(self, x):
        return torch.stft(x, 16, 4, window=self.window, center=False, return_complex=True)

    def forward(self, x):
        return self.dense(self.power(self.transformed(x)).flatten(1))


class Convolved(Spectrogram):
    """The same network as a convolution with the windowed cosines and sines."""

    def __init__(self, power, other):
        super().__init__(power)
        angles = torch.arange(9)[:, None] * torch.arange(16) * (2 * torch.pi / 16)
        self.register_buffer("kernel", (torch.cat([angles.cos(), -angles.sin()]) * self.window)[:, None])
        self.dense = other.dense

    def transformed(self, x):
        return functional.conv1d(x[:, None], self.kernel, stride=4).unflatten(1, (2, 9)).unbind(1)


POWERS = {
    "magnitude": lambda z: z.abs(),
    "magnitude of pairs": lambda z: torch.norm(torch.view_as_real(z), dim=-1),
    "hypot": lambda z: torch.hypot(z.real, z.imag),
    "power": lambda z: z.abs() ** 2,
    "power of parts": lambda z: z.real**2 + z.imag**2,
    "power of pairs": lambda z: torch.view_as_real(z).square().sum(-1),
    "conjugate": lambda z: (z * z.conj()).real,
    "adjoint": lambda z: (z * z.mH.mT).real,
    "in place": lambda z: z.mul_(z.conj()).real,
}
WRITTEN_OUT = {
    "magnitude": lambda parts: torch.norm(torch.stack(parts, -1), dim=-1),
    "power": lambda parts: parts[0] ** 2 + parts[1] ** 2,
}


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.3])
@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("spelled", POWERS)
@pytest.mark.filterwarnings("ignore:entries of")
@pytest.mark.sampled(3)
def test_a_short_time_fourier_transform_is_a_convolution(spelled, capture, epsilon):
    kind = "magnitude" if spelled in ("magnitude", "magnitude of pairs", "hypot") else "power"
    composite = LayerMapComposite([(Linear, rules.Epsilon(epsilon)), *layer_map_base(epsilon)])
    model, x = Spectrogram(POWERS[spelled]).eval(), torch.randn(2, 32)
    convolved = Convolved(WRITTEN_OUT[kind], model).eval()
    explain_model = lrpfx.transform(model, composite, example_inputs=x, capture=capture)
    found = lrpfx.attribute(explain_model, x, 0)
    expected = lrpfx.attribute(lrpfx.transform(convolved, composite, example_inputs=x), x, 0)
    assert_close(found.output, expected.output, 1e-12)
    assert_close(found.relevance, expected.relevance, 1e-9)
    assert lrpfx.ledger(explain_model, x, 0).unexplained <= 1e-12


def in_matrices(name, x):
    """A transform over the last dimension of 8 numbers, by matrices of real numbers; it returns real parts, imaginary parts."""
    size = 8
    names = {"ifft": -1, "ihfft": -1}
    places = torch.arange(size)
    angles = -2 * torch.pi / size * names.get(name, 1) * places[:, None] * places
    rows = size // 2 + 1 if name in ("rfft", "ihfft") else size
    scale = 1 / size if name in names else 1
    return x @ (angles.cos() * scale)[:rows].T, x @ (angles.sin() * scale)[:rows].T


class Transformed(nn.Module):
    def __init__(self, transform):
        super().__init__()
        self.transform = transform
        self.register_buffer("weight", torch.randn(2, 8))

    def forward(self, x):
        real, imaginary = self.transform(x)
        size = real.shape[-1]
        return (torch.relu(real) * self.weight[0, :size] + torch.relu(imaginary) * self.weight[1, :size]).sum(-1, keepdim=True)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "ihfft"])
def test_transforms_are_products_with_their_matrices(name, capture):
    x = torch.randn(3, 8)

    def parts(x):
        z = getattr(torch.fft, name)(x)
        return z.real, z.imag

    model = Transformed(parts).eval()
    written = Transformed(lambda x: in_matrices(name, x)).eval()
    written.load_state_dict(model.state_dict())
    found, expected = (lrpfx.transform(one, AttnLRP(), example_inputs=x, capture=capture) for one in (model, written))
    assert_close(lrpfx.attribute(found, x, 0).relevance, lrpfx.attribute(expected, x, 0).relevance, 1e-9)


def test_a_filter_in_the_frequency_domain_is_a_circular_convolution():
    """A transform, a product with complex parameters, and the transform back: all is one linear map, up to its steps."""

    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex128))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8)

    model, x = Filter().eval(), torch.randn(2, 8)
    seed = torch.randn(2, 8)
    explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=x)
    found = lrpfx.attribute(explain_model, x, seed)
    (expected,) = torch.autograd.grad(model(leaf := x.clone().requires_grad_()), leaf, seed / model(x))
    assert_close(found.output, model(x), 1e-12)
    assert_close(found.relevance, x * expected, 1e-9)
    assert lrpfx.ledger(explain_model, x, seed).unexplained <= 1e-12


class Steps(nn.Module):
    """Steps between a complex number and two real ones."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.complex_weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
        self.real_weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x):
        z = self.steps(self, torch.view_as_complex(x))
        return torch.view_as_real(z.resolve_conj()) if z.is_complex() else z


STEPS = {
    "linear": lambda net, z: functional.linear(z, net.complex_weight, net.complex_weight[0]),
    "matmul": lambda net, z: z @ net.complex_weight,
    "real numbers converted": lambda net, z: z.real.to(torch.complex128) @ net.complex_weight,
    "einsum": lambda net, z: torch.einsum("bci,io->bco", z, net.complex_weight),
    "product with a matrix in front": lambda net, z: net.complex_weight @ z.transpose(1, 2),
    "gate": lambda net, z: z * torch.sigmoid(z.abs()),
    "normalized": lambda net, z: z / z.abs().sum(-1, keepdim=True),
    "moved": lambda net, z: torch.cat([z.roll(1, -1), z.flip(1)], 1)[:, 1:].permute(0, 2, 1).reshape(2, -1).conj(),
    "padded": lambda net, z: functional.pad(z, (1, 1), value=2.0).masked_fill(torch.eye(6, dtype=torch.bool)[:3], 3.0),
    "chosen": lambda net, z: torch.where(net.mask, z, z.conj() * 2j),
    "filled": lambda net, z: torch.where(net.mask, z, 1.5 + 0.5j),
    "summed": lambda net, z: torch.sum(z, 1) - z.mean(1) + z.cumsum(1)[:, 0],
    "with numbers": lambda net, z: (2 - z) / 4 + (0.5 - 1j) + 3j * z,
    "with real signals": lambda net, z: z.abs() - z + z.imag * (1 + 2j),
    "power": lambda net, z: z**2 + z.square() * 0.5,
    "exponential": lambda net, z: torch.exp(1j * z.real) * torch.polar(z.abs(), z.imag),
    "buffer": lambda net, z: z.new_zeros(2, 3, 4) + z,
    "vecdot": lambda net, z: torch.linalg.vecdot(z, net.complex_weight[0]) + torch.linalg.vecdot(z, net.real_weight[0] + 0j),
    "adjoint": lambda net, z: z.mH + torch.adjoint(z),
}


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.sampled(3)
def test_steps_in_complex_numbers_conserve_relevance(name, capture):
    model, x = Steps(STEPS[name]).eval(), torch.randn(2, 3, 4, 2)
    explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=x, capture=capture)
    assert_close(explain_model(x), model(x), 1e-12)
    accounts = lrpfx.ledger(explain_model, x, lambda output: output * torch.linspace(0.5, 1, output.numel()).view_as(output))
    assert accounts.unexplained <= 1e-9 and abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude


@pytest.mark.parametrize("name", ["linear", "matmul", "einsum", "product with a matrix in front", "moved"])
def test_linear_steps_have_the_relevance_of_their_derivative(name):
    model, x = Steps(STEPS[name]).eval(), torch.randn(2, 3, 4, 2)
    explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=x)
    output = model(leaf := x.clone().requires_grad_())
    seed = torch.randn(output.shape)
    (expected,) = torch.autograd.grad(output, leaf, seed / output)
    assert_close(lrpfx.attribute(explain_model, x, seed).relevance, x * expected, 1e-9)


@pytest.mark.parametrize(
    "name, step, reason",
    [
        ("tan", lambda net, z: torch.tan(z), "real and imaginary parts"),
        ("reciprocal", lambda net, z: z / (z * z), "conjugate"),
        ("prod", lambda net, z: z.prod(1), "real and imaginary parts"),
        ("power", lambda net, z: z**3, "exponent 2"),
        ("solve", lambda net, z: torch.linalg.solve(net.complex_weight, z.mT), "'matrix' is complex"),
        ("add", lambda net, z: torch.add(z, z, alpha=2j), "'alpha' is complex"),
        ("dot", lambda net, z: torch.vdot(z.flatten(), z.flatten()), "conj"),
    ],
)
@pytest.mark.parametrize("unassigned", ["error", "gradient"])
def test_other_steps_are_refused_whatever_is_allowed(name, step, reason, unassigned):
    """Their plain gradient does not carry relevance, so nothing allows it."""
    with pytest.raises(lrpfx.errors.UnsupportedOperationError, match=reason) as caught:
        lrpfx.transform(Steps(step).eval(), AttnLRP(), example_inputs=torch.randn(2, 3, 4, 2), unassigned=unassigned)
    assert "unassigned" not in str(caught.value)


def test_the_remedy_for_a_refused_step():
    """A quotient of complex numbers, written as the message says."""
    x = torch.randn(2, 3, 4, 2)
    model = Steps(lambda net, z: z * z.conj() / (z.real**2 + z.imag**2) * z).eval()
    explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=x)
    assert lrpfx.ledger(explain_model, x, lambda output: output).unexplained <= 1e-9


def test_complex_outputs_have_parts():
    model = nn.Module()
    model.forward = lambda x: torch.fft.rfft(x)
    x = torch.randn(2, 8)
    explain_model = lrpfx.transform(model.eval(), AttnLRP(), example_inputs=x)
    assert torch.equal(explain_model(x), model.forward(x))
    with pytest.raises(lrpfx.errors.InputTypeError, match="view_as_real"):
        lrpfx.attribute(explain_model, x, 0)
    with pytest.raises(lrpfx.errors.InputTypeError, match="real and imaginary"):
        lrpfx.attribute(explain_model, torch.fft.rfft(x), 0)


@pytest.mark.parametrize("norm", [None, "ortho", "forward"])
def test_real_parts_of_fourier_transforms(norm):
    x = torch.randn(2, 3, 4)
    model = nn.Module()
    model.forward = lambda x: torch.fft.fftn(x, dim=(1, 2), norm=norm).real
    explain_model = lrpfx.transform(model.eval(), AttnLRP(), example_inputs=x)
    found = lrpfx.attribute(explain_model, x, lambda output: output)
    assert torch.equal(found.output, model.forward(x))
    (expected,) = torch.autograd.grad(model.forward(leaf := x.clone().requires_grad_()).sum(), leaf)
    assert_close(found.relevance, x * expected, 1e-9)


class Spectrum(nn.Module):
    """Features of a short-time Fourier transform: of torch's, or of a convolution with a window's waves.

    The window is a buffer ("held"), made by forward ("made"), or one of ones that the call does not name ("none").
    """

    def __init__(self, by_convolution, which, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.by_convolution, self.which, self.settings = by_convolution, which, settings
        size, length = settings["n_fft"], settings.get("win_length", settings["n_fft"])
        make = torch.ones if which == "none" else torch.hann_window
        self.register_buffer("window", make(length, dtype=torch.float64))
        frequencies = size if settings.get("onesided") is False else size // 2 + 1
        angles = torch.arange(frequencies)[:, None] * torch.arange(size) * 2 * torch.pi / size
        before = (size - length) // 2
        window = nn.functional.pad(self.window, (before, size - length - before))
        waves = torch.cat([angles.cos(), -angles.sin()]) * window * (size**-0.5 if settings.get("normalized") else 1)
        self.register_buffer("waves", waves[:, None])
        self.layer, self.head = nn.Conv1d(frequencies, 5, 3), nn.Linear(5, 3)

    def forward(self, x):
        if self.by_convolution:
            if self.settings.get("center", True):
                size = self.settings["n_fft"] // 2
                x = nn.functional.pad(x[:, None], (size, size), "reflect")[:, 0]
            real, imaginary = nn.functional.conv1d(x[:, None], self.waves, stride=self.settings["hop_length"]).chunk(2, 1)
        else:
            window = {"held": self.window, "none": None}.get(self.which)
            if self.which == "made":
                window = torch.hann_window(self.settings["n_fft"], dtype=x.dtype, device=x.device)
            values = torch.stft(x, window=window, return_complex=True, **self.settings)
            real, imaginary = values.real, values.imag
        return self.head(self.layer((real**2 + imaginary**2).log1p()).relu().mean(-1))


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("composite", [EpsilonPlus, EpsilonPlusFlat, EpsilonAlpha2Beta1, AttnLRP])
@pytest.mark.parametrize(
    "settings",
    [
        {"which": "held", "n_fft": 16, "hop_length": 4},
        {"which": "made", "n_fft": 16, "hop_length": 4},
        {"which": "held", "n_fft": 16, "hop_length": 5, "win_length": 10, "normalized": True},
        {"which": "none", "n_fft": 16, "hop_length": 5, "win_length": 10},
        {"which": "none", "n_fft": 12, "hop_length": 3, "center": False, "onesided": False},
    ],
)
@pytest.mark.sampled(3)
def test_a_short_time_transform_is_a_convolution(settings, composite, capture):
    x = torch.randn(2, 64, dtype=torch.float64)
    maps = []
    for by_convolution in (False, True):
        model = Spectrum(by_convolution, **settings).double().eval()
        explain_model = lrpfx.transform(model, composite(), example_inputs=x, capture=capture)
        maps.append(lrpfx.attribute(explain_model, x, 1).relevance)
    assert_close(maps[0], maps[1], 1e-8)

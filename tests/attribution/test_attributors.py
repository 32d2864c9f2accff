"""Attributors against zennit 0.5.1, against their formulas, and on explainable modules."""

import copy

import pytest
import torch
import zennit.attribution
import zennit.composites
from helpers import Unary, assert_close
from torch import nn

import lrpfx
from lrpfx import attribution
from lrpfx.composites import EpsilonPlusFlat, LayerMapComposite
from lrpfx.rules import Epsilon, Pass
from lrpfx.types import Activation, Linear


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4 * 9, 5)]
    return nn.Sequential(*layers).eval()


@pytest.fixture
def x():
    return torch.randn(2, 3, 6, 6)


ATTRIBUTORS = {
    "Gradient": {},
    "SmoothGrad": {"noise_level": 0.2, "n_iter": 5},
    "IntegratedGradients": {"n_iter": 6},
    "Occlusion": {"window": (3, 2), "stride": 2},
}


def call(module, composites, name, model, x, attr_output, with_composite, **settings):
    composite = composites.EpsilonPlusFlat() if with_composite else None
    torch.manual_seed(1)
    attributor = getattr(module, name)(model, composite, attr_output, **{**ATTRIBUTORS[name], **settings})
    return attributor(x)


@pytest.mark.parametrize("attr_output", ["none", "tensor", "function"])
@pytest.mark.parametrize("with_composite", [True, False])
@pytest.mark.parametrize("name", ATTRIBUTORS)
def test_equals_zennit(name, with_composite, attr_output, model, x):
    weights = {"none": None, "tensor": torch.eye(5)[[1, 3]], "function": lambda output: output.detach().softmax(1)}[attr_output]
    actual = call(attribution, lrpfx.composites, name, model, x, weights, with_composite)
    expected = call(zennit.attribution, zennit.composites, name, copy.deepcopy(model), x, weights, with_composite)
    assert_close(actual[0], expected[0], 1e-12)
    assert_close(actual[1], expected[1], 1e-10)


@pytest.mark.parametrize("batch_size", [2, 4, 100])
@pytest.mark.parametrize("name", ["SmoothGrad", "IntegratedGradients", "Occlusion"])
def test_batches_give_the_same(name, batch_size, model, x):
    one = call(attribution, lrpfx.composites, name, model, x, torch.eye(5)[[1, 3]], True)
    many = call(attribution, lrpfx.composites, name, model, x, torch.eye(5)[[1, 3]], True, batch_size=batch_size)
    assert_close(many[0], one[0], 1e-12)
    assert_close(many[1], one[1], 1e-11)


@pytest.mark.parametrize("name", ["SmoothGrad", "IntegratedGradients", "Occlusion"])
def test_progress_bar_on_request(name, model, x, capsys):
    call(attribution, lrpfx.composites, name, model, x, None, False)
    assert capsys.readouterr().err == ""
    call(attribution, lrpfx.composites, name, model, x, None, False, progress=True)
    shown = capsys.readouterr().err
    assert "100%" in shown and shown.startswith(f"\r{name}: ")


def test_on_an_explainable_module(model, x):
    """There the gradient is relevance, without a composite."""
    explain_model = lrpfx.transform(model, EpsilonPlusFlat())
    expected = attribution.Gradient(model, EpsilonPlusFlat(), lambda output: output.detach())(x)
    output, relevance = attribution.Gradient(explain_model, attr_output=lambda output: output.detach())(x)
    assert_close(output, expected[0], 1e-13)
    assert_close(relevance, expected[1], 1e-13)
    assert_close(relevance, lrpfx.attribute(explain_model, x, lambda output: output).relevance, 1e-14)


def test_special_cases_by_formula(model, x):
    gradient = attribution.Gradient(model, attr_output=torch.ones(2, 5))(x)[1]
    assert_close(attribution.SmoothGrad(model, attr_output=torch.ones(2, 5), n_iter=1)(x)[1], gradient, 1e-13)
    once = attribution.IntegratedGradients(model, attr_output=torch.ones(2, 5), n_iter=1)(x)[1]
    assert_close(once, gradient * x, 1e-13)
    many = attribution.IntegratedGradients(
        model, attr_output=torch.ones(2, 5), n_iter=2000, batch_size=500, baseline_fn=lambda input: 0.5 * torch.ones_like(input)
    )(x)[1]
    difference = model(x).sum(1) - model(0.5 * torch.ones_like(x)).sum(1)
    assert_close(many.sum((1, 2, 3)), difference.detach(), 1e-3)


def test_occlusion_by_hand():
    model, x = Unary(lambda x: x.flatten(1)), torch.arange(1.0, 7.0).reshape(1, 1, 2, 3)
    _, scores = attribution.Occlusion(model, attr_output=lambda output: output, window=(1, 2), stride=(1, 2))(x)
    # windows of two columns at columns 0 and 2; the second goes on at column 0
    expected = [[1 + 2 + 3 + 1, 1 + 2, 3 + 1], [4 + 5 + 6 + 4, 4 + 5, 6 + 4]]
    assert scores[0, 0].tolist() == expected
    _, kept = attribution.Occlusion(
        model, window=2, stride=2, occlusion_fn=lambda input, mask: attribution.occlude_independent(input, mask, invert=True)
    )(x)
    assert kept.shape == x.shape


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("stride", [2, 9, (2,), (2, 3), (1, 2, 3), (3, 2, 2, 4), torch.Size((4, 3, 5, 6))])
@pytest.mark.parametrize("window", [3, 9, (), (2,), (2, 9), (3, 2, 2), (1, 3, 2, 2), (2, 1, 3, 9), torch.Size((4, 3, 5, 6))])
def test_windows_and_strides_equal_zennit(window, stride, batch_size):
    """An int, a tuple for the last dimensions, or one for all of them with the batch's."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 3, 5, 6), torch.randn(90, 2)
    model = Unary(lambda x: (x.flatten(1) @ weight).tanh())

    def occlude(input, mask):  # a mask of the input's shape can index it
        input = input.clone()
        input[mask] = 0.5
        return input

    for occlusion_fn in (None, occlude):
        actual = attribution.Occlusion(model, None, torch.exp, occlusion_fn, window, stride, batch_size)(x)
        expected = zennit.attribution.Occlusion(model, None, torch.exp, occlusion_fn, window, stride)(x)
        assert_close(actual[0], expected[0], 1e-14)
        assert_close(actual[1], expected[1], 1e-12)


def test_occlusion_of_a_model_with_one_number_for_each_sample():
    x = torch.randn(3, 4)
    single, column = Unary(lambda x: x.square().sum(1)), Unary(lambda x: x.square().sum(1, keepdim=True))
    actual, expected = (attribution.Occlusion(model, window=1, stride=1)(x)[1] for model in (single, column))
    assert_close(actual, expected, 1e-14)


@pytest.mark.parametrize("window", [[2, 2], "2", {2}, range(2), 1.5, (1.0,), True, None])
def test_windows_that_are_none(window, model):
    for settings in ({"window": window}, {"stride": window}):
        with pytest.raises(TypeError, match="is an int or a tuple of ints") as caught:
            attribution.Occlusion(model, **settings)
        assert isinstance(caught.value, lrpfx.LrpfxError)


def test_errors(model, x):
    with pytest.raises(lrpfx.InputTypeError, match="attr_output is a tensor, a function or None, not int"):
        attribution.Gradient(model, attr_output=3)
    with pytest.raises(lrpfx.InputTypeError, match=r"torch\.int64"):
        attribution.Gradient(model)(torch.ones(1, 3, 6, 6, dtype=torch.int64))
    with pytest.raises(lrpfx.InputTypeError, match="not tuple"):
        attribution.Gradient(Unary(lambda x: (x, x)))(x)
    with pytest.raises(lrpfx.InputError, match="n_iter is at least 1, not 0"):
        attribution.SmoothGrad(model, n_iter=0)
    for settings in ({"window": (1,) * 5}, {"stride": (1,) * 5}):
        with pytest.raises(lrpfx.InputError, match="more dimensions than the input"):
            attribution.Occlusion(model, **settings)(x)
    with pytest.raises(lrpfx.InputError, match="a stride is at least 1 in each dimension"):
        attribution.Occlusion(model, stride=(2, 0))
    with pytest.raises(TypeError):
        attribution.Attributor(model)


def test_helpers():
    mask = torch.tensor([True, False])
    values = torch.tensor([2.0, 3.0])
    assert attribution.occlude_independent(values, mask).tolist() == [2.0, 0.0]
    assert attribution.occlude_independent(values, mask, invert=True).tolist() == [0.0, 3.0]
    assert attribution.occlude_independent(values, mask, fill_fn=lambda input: input + 10).tolist() == [2.0, 13.0]
    assert attribution.identity(3) == 3 and attribution.constant(4)(1, key=2) == 4


def test_as_a_context_and_by_call(model, x):
    composite = EpsilonPlusFlat()
    attributor = attribution.Gradient(model, composite)
    outside = attributor(x, torch.ones(2, 5))[1]
    assert "forward" not in vars(model[0])
    with attributor as same:
        assert same is attributor and "forward" in vars(model[0])
        assert_close(attributor(x, torch.ones(2, 5))[1], outside, 1e-14)
        assert "forward" in vars(model[0])
    assert "forward" not in vars(model[0])
    assert not x.requires_grad


def test_the_call_comes_before_the_constructor(model, x):
    attributor = attribution.Gradient(model, attr_output=torch.zeros(2, 5))
    assert not attributor(x)[1].any() and attributor(x, torch.ones(2, 5))[1].any()


class GradientTimesInput(attribution.Attributor):
    def forward(self, input, attr_output_fn):
        leaf = input.detach().requires_grad_(True)
        output = self.model(leaf)
        (gradient,) = torch.autograd.grad((output,), (leaf,), (attr_output_fn(output.detach()),))
        return output, gradient * input


class SensitivityAnalysis(attribution.Attributor):
    def __init__(self, model, sum_channels=False, composite=None, attr_output=None):
        super().__init__(model, composite=composite, attr_output=attr_output)
        self.sum_channels = sum_channels

    def forward(self, input, attr_output_fn):
        output, gradient = attribution.Gradient(self.model).grad(input.detach(), attr_output_fn)
        return output, gradient.abs().sum(1) if self.sum_channels else gradient.abs()


def test_attributors_of_ones_own(model, x):
    gradient = attribution.Gradient(model, attr_output=lambda output: output.detach())(x)[1]
    with GradientTimesInput(model) as attributor:
        assert_close(attributor(x)[1], gradient * x, 1e-13)
    with SensitivityAnalysis(model, sum_channels=True) as attributor:
        assert_close(attributor(x)[1], attribution.Gradient(model)(x)[1].abs().sum(1), 1e-13)


def test_intermediate_relevance_by_hooks_and_by_record():
    """The way with hooks and retained gradients, and the way of a graph, give the same tensors."""
    model = nn.Sequential(nn.Conv2d(3, 10, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(10 * 8 * 8, 10))
    x, composite = torch.randn(1, 3, 8, 8), EpsilonPlusFlat()
    attributor = attribution.Gradient(model, composite)

    def store_hook(module, input, output):
        module.output = output
        output.retain_grad()

    with attributor:
        handles = [module.register_forward_hook(store_hook) for module in model.modules()]
        _, relevance = attributor(x, torch.eye(10)[[1]])
    for handle in handles:
        handle.remove()
    recorded = lrpfx.attribute(lrpfx.transform(model, composite), x, torch.eye(10)[[1]], record=["0", "1", "2", "3"])
    assert_close(recorded.relevance, relevance, 1e-13)
    for name, value in recorded.layers.items():
        assert_close(value, model.get_submodule(name).output.grad, 1e-13)


def test_intermediate_relevance_by_hooks_equals_zennit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 10, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(10 * 32 * 32, 10))
    x, gradients = torch.randn(1, 3, 32, 32, requires_grad=True), []
    for library, composites in ((attribution, lrpfx.composites), (zennit.attribution, zennit.composites)):
        outputs = {}

        def store_hook(module, input, output, outputs=outputs):
            outputs[module] = output
            output.retain_grad()

        with library.Gradient(model, composites.EpsilonPlusFlat()) as attributor:
            handles = [module.register_forward_hook(store_hook) for module in model.modules()]
            _, relevance = attributor(x, torch.eye(10)[[1]])
        for handle in handles:
            handle.remove()
        gradients.append([relevance, *(outputs[module].grad for module in model.modules())])
    assert len(gradients[0]) == 6
    for ours, theirs in zip(*gradients, strict=True):
        assert_close(ours, theirs, 1e-10)


def test_derivatives_of_relevance(model):
    """create_graph inside the context, the derivative with the rules inactive: as by finite differences."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 3))
    composite = LayerMapComposite([(Activation, Pass()), (Linear, Epsilon(0.3))])
    x, weights, seed = torch.randn(1, 4), torch.randn(1, 4), torch.randn(1, 3)
    leaf = x.clone().requires_grad_()
    with attribution.Gradient(model, composite, seed, create_graph=True) as attributor:
        relevance = attributor(leaf)[1]
        with attributor.inactive():
            (derivative,) = torch.autograd.grad((relevance * weights).sum(), leaf)
    numeric = torch.zeros_like(x)
    plain = attribution.Gradient(model, composite, seed)
    for index in range(4):
        step = torch.zeros_like(x)
        step[0, index] = 1e-6
        above, below = ((plain(x + sign * step)[1] * weights).sum() for sign in (1, -1))
        numeric[0, index] = (above - below) / 2e-6
    assert_close(derivative, numeric, 1e-6)

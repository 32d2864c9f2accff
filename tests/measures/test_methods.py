"""Methods by name against what they are defined as."""

import pytest
import torch
from helpers import assert_untouched, snapshot
from torch import nn

import lrpfx
from lrpfx.composites import COMPOSITES, DeepLIFT, EpsilonGammaBox, EpsilonPlus
from lrpfx.errors import InputError
from lrpfx.measures import METHODS, ImageData
from lrpfx.measures.methods import Methods, gradient

TARGETS = torch.tensor([2, 0, 1, 2, 0])


def map_of(data, name, method=None):
    return Methods([name] if method is None else {name: method}, data).maps(name, data.images, TARGETS, range(len(TARGETS)))


def chosen(model, images):
    return model(images)[torch.arange(len(images)), TARGETS]


def of_composite(data, composite, **settings):
    explain_model = lrpfx.transform(data.model, composite, data.images)
    return lrpfx.attribute(explain_model, data.images, TARGETS, **settings).relevance.sum(1)


def test_all_composites_have_their_names():
    assert set(COMPOSITES) < set(METHODS)


def test_gradient_times_input(data):
    images = data.images.clone().requires_grad_()
    (expected,) = torch.autograd.grad(chosen(data.model, images).sum(), images)
    torch.testing.assert_close(gradient(data.model, data.images, TARGETS), expected)
    torch.testing.assert_close(map_of(data, "gradient_times_input"), (expected * data.images).sum(1))


def test_composites(data):
    torch.testing.assert_close(map_of(data, "epsilon_plus"), of_composite(data, EpsilonPlus()))
    torch.testing.assert_close(map_of(data, "EpsilonPlus"), map_of(data, "epsilon_plus"), rtol=0, atol=0)
    low, high = data.images.amin((0, 2, 3), keepdim=True), data.images.amax((0, 2, 3), keepdim=True)
    torch.testing.assert_close(map_of(data, "epsilon_gamma_box"), of_composite(data, EpsilonGammaBox(low, high)))
    torch.testing.assert_close(map_of(data, "mine", EpsilonGammaBox(-1.0, 2.0)), of_composite(data, EpsilonGammaBox(-1.0, 2.0)))


def test_differences_are_from_the_mean_colour_of_each_image(data):
    """Both add up to what the output changes by, integrated gradients to the precision of its steps."""
    reference = data.images.mean((2, 3), keepdim=True).expand_as(data.images)
    difference = chosen(data.model, data.images) - chosen(data.model, reference)
    torch.testing.assert_close(map_of(data, "deep_lift").sum((1, 2)), difference)
    torch.testing.assert_close(map_of(data, "deep_lift"), of_composite(data, DeepLIFT(), reference=reference.clone()))
    torch.testing.assert_close(map_of(data, "integrated_gradients").sum((1, 2)), difference, rtol=0.02, atol=1e-3)


def test_smooth_grad_is_the_magnitude_of_a_mean_gradient_and_keeps_the_random_state(data):
    state = torch.get_rng_state()
    found = map_of(data, "smooth_grad")
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(found, map_of(data, "smooth_grad"))
    torch.manual_seed(0)
    weights = torch.nn.functional.one_hot(TARGETS, 3).double()
    expected = lrpfx.attribution.SmoothGrad(data.model)(data.images, weights)[1].abs().sum(1)
    torch.testing.assert_close(found, expected)


def test_occlusion_is_what_is_lost_without_each_block(model):
    """Blocks of two pixels on 34 x 28: the sum over a block is what the output loses."""
    data = ImageData(model, torch.rand(5, 3, 28, 33))
    found = map_of(data, "occlusion")
    for top, left, right in ((0, 0, 2), (10, 6, 8), (26, 32, 33)):
        occluded = data.images.clone()
        occluded[:, :, top : top + 2, left:right] = data.images.mean((2, 3), keepdim=True)
        lost = chosen(model, data.images) - chosen(model, occluded)
        torch.testing.assert_close(found[:, top : top + 2, left:right].sum((1, 2)), lost)


def test_grad_cam_is_of_the_last_layer_with_places(data):
    """Its output is overwritten by nothing here: the ReLU behind it works in place."""
    methods = Methods(["grad_cam"], data)
    assert methods.notes == {"grad_cam": "of the last output of 4"}
    found = methods.maps("grad_cam", data.images, TARGETS, range(len(TARGETS)))
    features = data.model[:5](data.images).detach().requires_grad_()
    (of_features,) = torch.autograd.grad(chosen(data.model[5:], features).sum(), features)
    coarse = (of_features.mean((2, 3))[:, :, None, None] * features).sum(1, keepdim=True).detach()
    torch.testing.assert_close(found, torch.nn.functional.interpolate(coarse, (12, 16), mode="bilinear")[:, 0])


def test_grad_cam_of_a_layer_whose_output_is_overwritten():
    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(self.conv(x).relu_().mean((2, 3)))

    model = Overwriting().eval().requires_grad_(False)
    data = ImageData(model, torch.rand(5, 3, 12, 16))
    features = model.conv(data.images).requires_grad_()
    (of_features,) = torch.autograd.grad(chosen(lambda x: model.fc(x.relu().mean((2, 3))), features).sum(), features)
    coarse = (of_features.mean((2, 3), keepdim=True) * features).sum(1, keepdim=True).detach()
    expected = torch.nn.functional.interpolate(coarse, (12, 16), mode="bilinear")[:, 0]
    torch.testing.assert_close(map_of(data, "grad_cam"), expected)


def test_a_random_map_is_the_same_each_time_and_of_either_sign(data):
    found = map_of(data, "random")
    assert torch.equal(found, map_of(data, "random")) and 0.4 < (found > 0).double().mean() < 0.6


@pytest.mark.parametrize("shape", [(5, 12, 16), (5, 1, 12, 16), (5, 3, 12, 16)])
def test_functions_get_the_model_a_batch_and_its_classes(data, shape):
    def method(model, images, targets):
        assert model is data.model and torch.equal(targets, TARGETS)
        images.zero_()  # a copy
        return torch.ones(shape, dtype=torch.float32)

    before = data.images.clone()
    assert torch.equal(map_of(data, "mine", method), torch.full((5, 12, 16), 3.0 if shape[1] == 3 else 1.0))
    assert torch.equal(data.images, before)


def test_the_model_stays_as_it_is(data):
    before = snapshot(data.model)
    methods = Methods(METHODS, data)
    for name in METHODS:
        methods.maps(name, data.images, TARGETS, range(len(TARGETS)))
    assert_untouched(data.model, before)
    assert all(parameter.grad is None for parameter in data.model.parameters())


def not_finite(model, images, targets):
    maps = torch.zeros(len(images), 12, 16)
    maps[3, 2, 2] = torch.nan
    return maps


@pytest.mark.parametrize(
    ("methods", "error", "message"),
    [
        ("epsilon_pluss", lrpfx.InputError, "no method named 'epsilon_pluss'.*Did you mean 'epsilon_plus'"),
        ([], lrpfx.InputError, "there is no method"),
        ([EpsilonPlus()], lrpfx.InputTypeError, "need one: pass {name: method}"),
        (3, lrpfx.InputTypeError, "methods are names, or a dict"),
        ({3: "random"}, lrpfx.InputTypeError, "the name of a method is a text, not 3"),
        ({"mine": EpsilonPlus}, lrpfx.InputTypeError, "'mine' is EpsilonPlus"),
        ({"mine": 3}, lrpfx.InputTypeError, "'mine' is int"),
        ({"mine": lambda *args: None}, lrpfx.InputTypeError, "'mine' returns a tensor, not NoneType"),
        ({"mine": lambda *args: torch.rand(12, 16)}, lrpfx.InputError, r"'mine' returns the shape \(12, 16\)"),
        ({"mine": not_finite}, lrpfx.InputError, "map of image 13 by the method 'mine' has values that are not finite"),
    ],
)
def test_what_is_no_method_is_an_error(data, methods, error, message):
    with pytest.raises(error, match=message) as caught:
        built = Methods(methods, data)
        built.maps(next(iter(built.explain)), data.images, TARGETS, range(10, 10 + len(TARGETS)))
    assert caught.value.topic == "evaluation"


def test_an_error_of_a_function_says_which_one_it_is(data):
    def method(model, images, targets):
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        map_of(data, "mine", method)
    assert "in the method 'mine' of lrpfx.evaluate" in caught.value.__notes__


def test_grad_cam_needs_a_layer_with_places():
    data = ImageData(nn.Sequential(nn.Flatten(), nn.Linear(27, 2)).eval(), torch.rand(2, 3, 3, 3))
    with pytest.raises(lrpfx.InputError, match="grad_cam needs a layer"):
        Methods(["grad_cam"], data)


def test_in_inference_mode_gradients_are_taken(data):
    methods = ["gradient_times_input", "grad_cam", "epsilon_plus"]
    expected = lrpfx.evaluate(methods, data, "random_masks")
    with torch.inference_mode():
        found = lrpfx.evaluate(methods, data, "random_masks")
    torch.testing.assert_close(found.samples, expected.samples)


def test_a_model_that_trains_again_is_an_error(data):
    data.model.train()
    with pytest.raises(InputError, match="training mode"):
        lrpfx.evaluate(["random"], data)

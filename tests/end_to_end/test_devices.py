"""Other devices: attributions stay on that of the model, and a GPU finds the maps of the CPU.

The latter run where there is a GPU, by `make gpu`. TEST_DEVICE=cpu tries them without one.
"""

import copy
import os

import pytest
import torch
from helpers import relative_difference
from small_families import FAMILIES, small_family
from small_transformers import architecture, inputs_for, small_model
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import lrpfx
from lrpfx.composites import CPLRP, AttnLRP, EpsilonGammaBox, EpsilonPlusFlat

TRANSFORMERS = ("BertForSequenceClassification", "GPT2LMHeadModel", "LlamaForCausalLM")
DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cuda"))
TOLERANCE = 1e-4  # of the largest entry, in float32


class OnOtherDevices(TorchDispatchMode):
    """Notes the operations whose results are on another device than "meta"."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if any(isinstance(one, torch.Tensor) and one.device.type != "meta" for one in pytree.tree_leaves(results)):
            self.found.add(str(function))
        return results


def on_meta(inputs):
    """The inputs without values; those of floating point require gradients."""

    def placed(tensor):
        return tensor.to("meta").requires_grad_(tensor.is_floating_point())

    return pytree.tree_map(placed, inputs)


def elsewhere(explain_model, inputs):
    """The operations of a forward and a backward pass on the meta device that leave it."""
    explain_model.to("meta")
    with OnOtherDevices() as watched:
        leaves = on_meta(inputs)
        output = logits_of(explain_model(**leaves) if isinstance(leaves, dict) else explain_model(leaves))
        reached = [leaf for leaf in pytree.tree_leaves(leaves) if leaf.requires_grad]
        torch.autograd.grad(output, reached, torch.ones_like(output))
    return watched.found


def logits_of(output):
    return output if isinstance(output, torch.Tensor) else output["logits"]


def transformer(name, dtype, of_vectors=False):
    """A small transformer, and its inputs: tokens, or their vectors."""
    one = architecture(name)
    model = small_model(one, dtype)
    inputs = inputs_for(one, model, one.lengths[0], dtype)
    if of_vectors:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    return model, inputs


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "composite", [EpsilonPlusFlat(), EpsilonGammaBox(-3.0, 3.0)], ids=lambda composite: type(composite).__name__
)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_operation_leaves_the_device(name, composite):
    model, x = small_family(name)
    assert elsewhere(lrpfx.transform(model, composite, example_inputs=x), x) == set()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("composite", [AttnLRP(), CPLRP()], ids=lambda composite: type(composite).__name__)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_no_operation_of_a_transformer_leaves_the_device(name, composite):
    model, inputs = transformer(name, torch.float64, of_vectors=True)
    assert elsewhere(lrpfx.transform(model, composite, example_inputs=inputs), inputs) == set()


# --- the same maps -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def device():
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    torch.set_default_dtype(torch.float32)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield DEVICE


def moved(value, device):
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)


def relevances(explain_model, inputs, target, output=None):
    """The relevance of all inputs, in float64 on the CPU."""
    found = lrpfx.attribute(explain_model, inputs, target, output=output).relevance
    return [one.double().cpu() for one in pytree.tree_leaves(found) if one is not None]


def both(make, x, composite, device, target=3, output=None):
    """The relevance that the CPU and the device find, each with a compilation of its own."""
    found = []
    for place in ("cpu", device):
        inputs = moved(x, place)
        explain_model = lrpfx.transform(make().to(place), composite, example_inputs=inputs)
        found.append(relevances(explain_model, inputs, target, output))
    return found


def assert_same(expected, actual, tolerance=TOLERANCE):
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual, strict=True):
        assert (one - other).abs().max() <= tolerance * one.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "composite", [EpsilonPlusFlat(), EpsilonGammaBox(-3.0, 3.0)], ids=lambda composite: type(composite).__name__
)
@pytest.mark.parametrize("name", FAMILIES)
def test_classifiers(name, composite, device):
    """Where relevance is a difference of larger terms, rounding changes it by more, on the CPU as well."""
    model, x = small_family(name)
    exact, on_device = both(lambda: copy.deepcopy(model), x, composite, device)
    assert_same(exact, on_device, 1e-6)  # torch's hardswish on a GPU takes a sixth in float32, in float64 as well
    here, there = both(lambda: copy.deepcopy(model).float(), x.float(), composite, device)
    rounding = max(float((one - other).abs().max() / one.abs().max()) for one, other in zip(exact, here, strict=True))
    assert_same(here, there, max(TOLERANCE, 10 * rounding))


@pytest.mark.gpu
@pytest.mark.parametrize("composite", [AttnLRP(), CPLRP()], ids=lambda composite: type(composite).__name__)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name, composite, device):
    model, inputs = transformer(name, torch.float32)
    target = 1 if name.startswith("Bert") else (-1, 3)
    assert_same(*both(lambda: copy.deepcopy(model), inputs, composite, device, target, "logits"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet", "densenet", "googlenet"])
def test_convolutions_in_tf32(name, device):
    """As GPUs compute them unless told otherwise: ten binary digits are enough for verification, and for the map."""
    model, x = small_family(name)
    exact = relevances(lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x), x, 3)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        inputs = x.float().to(device)
        explain_model = lrpfx.transform(copy.deepcopy(model).float().to(device), EpsilonPlusFlat(), example_inputs=inputs)
        found = relevances(explain_model, inputs, 3)
    assert all(relative_difference(one, other) <= 0.02 for one, other in zip(found, exact, strict=True))


@pytest.mark.gpu
def test_a_network_of_full_depth_in_tf32(device):
    torchvision = pytest.importorskip("torchvision")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        model, x = torchvision.models.resnet50().eval().to(device), torch.rand(4, 3, 224, 224, device=device)
        relevance = lrpfx.attribute(lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x), x, 3).relevance
    assert relevance.isfinite().all()


def assert_rounds_as_the_cpu(exact, rounded_here, rounded_there):
    """Relevance in a low precision is another one on each device, and as near to the exact one."""
    for one, here, there in zip(exact, rounded_here, rounded_there, strict=True):
        assert relative_difference(there, one) <= 2 * relative_difference(here, one) + 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("is_cast", [True, False], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("name", ["resnet", "vgg", "vit", "convnext"])
def test_low_precision(name, is_cast, device):
    model, x = small_family(name)
    composite = AttnLRP() if name == "vit" else EpsilonPlusFlat()
    exact = relevances(lrpfx.transform(model, composite, example_inputs=x), x, 3)
    dtype, found = torch.bfloat16 if is_cast else torch.float32, []
    for place in (torch.device("cpu"), device):
        inputs = x.to(place, dtype)
        explain_model = lrpfx.transform(copy.deepcopy(model).to(place, dtype), composite, example_inputs=inputs)
        with torch.autocast(place.type, dtype=torch.bfloat16, enabled=not is_cast):
            found.append(relevances(explain_model, inputs, 3))
    assert_rounds_as_the_cpu(exact, *found)


class OnTwoDevices(nn.Module):
    """A network whose second half is on another device."""

    def __init__(self, device):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.second = nn.Sequential(nn.Flatten(), nn.Linear(8 * 7 * 7, 10)).to(device)
        self.device = device

    def forward(self, x):
        return self.second(self.first(x).to(self.device))


@pytest.mark.gpu
def test_two_devices(device):
    x = torch.randn(2, 3, 16, 16)
    expected, actual = (
        relevances(lrpfx.transform(OnTwoDevices(place).eval(), EpsilonPlusFlat(), example_inputs=x), x, 3)
        for place in (torch.device("cpu"), device)
    )
    assert_same(expected, actual)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_compiled(name, device):
    model, x = small_family(name)
    composite, inputs = AttnLRP() if name == "vit" else EpsilonPlusFlat(), x.float().to(device)
    explain_model = lrpfx.transform(model.float().to(device), composite, example_inputs=inputs)
    compiled = torch.compile(explain_model, fullgraph=True)
    assert_same(relevances(explain_model, inputs, 3), relevances(compiled, inputs, 3))

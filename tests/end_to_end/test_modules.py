"""Ways in which models come to lrpfx and explainable modules are used: the table of docs/modules.md, and more."""

import copy

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from helpers import ROOT, assert_close
from test_errors import raised
from tools import module_table
from tools.ways import TARGET, explained, images, network
from tools.ways_in import WAYS_IN, doubled, pruned, quantized, with_weights_of
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torchao.quantization import Int8WeightOnlyConfig

import lrpfx
from lrpfx.composites import EpsilonPlus

pytestmark = pytest.mark.programs


def test_the_table_is_current():
    assert module_table.document() == (ROOT / "docs" / "modules.md").read_text(), "run `make modules`"


def test_the_plain_network_is_explained_as_the_papers_say():
    """ZPlus for the convolution with its batch norm merged, the average pool by shares, Epsilon for dense layers."""
    model, x, stabilizer = network(), images(), 1e-6
    convolution, norm = model[0], model[1]
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    weight = (convolution.weight * scale[:, None, None, None]).detach()
    bias = ((convolution.bias - norm.running_mean) * scale + norm.bias).detach()
    hidden = functional.conv2d(x, weight, bias, padding=1).relu()
    pooled = functional.adaptive_avg_pool2d(hidden, 4)
    features = pooled.flatten(1)
    dense = functional.linear(features, *model[5].parameters()).detach()

    def stabilized(value):
        return value + torch.where(value < 0, -stabilizer, stabilizer)

    def through_dense(layer, value, relevance):
        output = functional.linear(value, layer.weight, layer.bias)
        return (value * ((relevance / stabilized(output)) @ layer.weight)).detach()

    output = functional.linear(dense.relu(), *model[7].parameters())
    relevance = torch.zeros_like(output)
    relevance[:, TARGET] = output[:, TARGET]
    relevance = through_dense(model[5], features, through_dense(model[7], dense.relu(), relevance)).reshape(pooled.shape)
    spread = (relevance / stabilized(pooled) / 4).repeat_interleave(2, 2).repeat_interleave(2, 3)
    relevance = hidden * spread
    positive = functional.conv2d(x.clamp(min=0), weight.clamp(min=0), bias.clamp(min=0), padding=1)
    positive += functional.conv2d(x.clamp(max=0), weight.clamp(max=0), padding=1)
    share = relevance / stabilized(positive)
    expected = x.clamp(min=0) * functional.conv_transpose2d(share, weight.clamp(min=0), padding=1)
    expected += x.clamp(max=0) * functional.conv_transpose2d(share, weight.clamp(max=0), padding=1)
    assert_close(explained(model), expected, 1e-10)


@pytest.mark.filterwarnings("ignore")
def test_the_names_of_tensors_are_those_of_the_model():
    """But for models that are an error."""
    wrong, compared = {}, 0
    for way in WAYS_IN:
        model, expected = way.run()
        if expected is None or not isinstance(model, nn.Module):
            continue
        explain_model = lrpfx.transform(model, EpsilonPlus())
        keys = {name.replace("_packed_params._packed_params", "weight") for name in model.state_dict()}
        keys = {name for name in keys if not name.endswith((".scale", ".zero_point", "_packed_params.dtype"))}
        if way.title == "`torch.ao.quantization.quantize_dynamic`":
            keys |= {"5.bias", "7.bias"}
        if different := set(explain_model.state_dict()) ^ keys:
            wrong[way.title] = different
        compared += 1
    assert not wrong and compared > 35


def test_pruned_weights_follow_the_parameters_that_are_loaded():
    explain_model, other = lrpfx.transform(pruned(), EpsilonPlus()), pruned()
    with torch.no_grad():
        for path in ("0", "5", "7"):
            other.get_submodule(path).weight_orig.mul_(1.5)
    other(images())
    explain_model.load_state_dict(other.state_dict())
    assert_close(lrpfx.attribute(explain_model, images(), TARGET).relevance, explained(with_weights_of(other)), 1e-12)


def test_pruned_weights_follow_a_change_of_dtype():
    x = images().float()
    found = lrpfx.attribute(lrpfx.transform(pruned(), EpsilonPlus()).float(), x, TARGET).relevance
    assert found.dtype == torch.float32
    assert_close(found.double(), explained(with_weights_of(pruned())), 1e-3)


def test_a_batch_norm_is_merged_into_a_pruned_convolution():
    assigned = lrpfx.assignment(lrpfx.transform(pruned(), EpsilonPlus()))
    assert next(one for one in assigned if one.name == "0").merged == ("1",)


class DoubleHook(ModelHook):
    """A hook of the user's, which changes values."""

    def post_forward(self, module, output):
        return output * 2


def test_hooks_that_change_values_stay_where_accelerate_offloads():
    model = accelerate.cpu_offload(network(), execution_device=torch.device("cpu"))
    add_hook_to_module(model[5], DoubleHook(), append=True)
    assert_close(explained(model), explained(doubled("5")), 1e-12)


@pytest.mark.parametrize("name", ["5", "0"])
def test_pruned_explainable_modules_cannot_be_copied_or_cast(name):
    explain_model = lrpfx.transform(network(), EpsilonPlus())
    prune.l1_unstructured(explain_model.get_submodule(name), "weight", 0.5)
    for use in (copy.deepcopy, lambda e: e.float(), lambda e: e(images())):
        assert "Prune or parametrize the source model" in raised(lrpfx.InputError, use, explain_model)


def test_parameters_that_a_function_on_an_instance_reads_can_be_loaded():
    def with_forward(seed):
        model = network(seed)
        layer = model[5]
        layer.forward = lambda x: functional.linear(x, layer.weight * 2, layer.bias)
        return model

    explain_model = lrpfx.transform(with_forward(0), EpsilonPlus())
    explain_model.load_state_dict(network(3).state_dict())
    assert_close(lrpfx.attribute(explain_model, images(), TARGET).relevance, explained(with_forward(3)), 1e-12)


def test_a_forward_of_the_instance_is_not_replaced():
    """Modules of torch.nn with a forward that cannot be traced get another one, unless the user has changed theirs."""
    model = nn.Sequential(nn.Softmax2d(), nn.Flatten(), nn.Linear(192, 3)).double()
    model[0].forward = lambda x: x * 3
    expected = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).double()
    expected[1].load_state_dict(model[2].state_dict())
    with torch.no_grad():
        expected[1].weight.mul_(3)
    assert_close(explained(model), explained(expected), 1e-5)


def test_pre_hooks_that_need_positional_arguments_are_named():
    model = network()
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    message = raised(lrpfx.InputError, lrpfx.transform, model, EpsilonPlus(), example_inputs=images())
    assert "with_kwargs=True" in message


def test_quantized_layers_are_in_the_history():
    model, _ = quantized(Int8WeightOnlyConfig())
    history = lrpfx.history(lrpfx.transform(model, EpsilonPlus()))
    assert "7.weight: a quantized weight (Int8Tensor)" in next(str(one) for one in history if one.name == "dequantize")

"""Rules that write into the tensors of their callers say so; those of a model and its inputs stay as they are."""

import pytest
import torch
from helpers import assert_close
from torch import nn

import lrpfx
from lrpfx.composites import LayerMapComposite
from lrpfx.core import BasicHook, Hook, ParamMod
from lrpfx.errors import RuleError
from lrpfx.rules import Epsilon


class OwnPropagation(Hook):
    def propagate(self, call, relevance):
        call.inputs[0].relu_()
        return call.times_inputs(call.pull_back(relevance / (call.own_output() + 0.1)))


class OwnCode(Hook):
    def forward(self, module, args, kwargs, output):
        args[0].clamp_(min=0.0)

    def backward(self, module, grad_input, grad_output):
        return grad_input


class OwnBackward(Hook):
    def backward(self, module, grad_input, grad_output):
        return (grad_input[0] * grad_output[0].mul_(2.0).sum(),)


#: Functions that get copies: nothing of the caller changes.
FUNCTIONS = {
    "input": lambda: BasicHook(input_modifiers=[lambda x: x.clamp_(min=0.0)]),
    "view of the input": lambda: BasicHook(input_modifiers=[lambda x: x, lambda x: x + x[:, :1].zero_()]),
    "parameter": lambda: BasicHook(param_modifiers=[lambda parameter, name: parameter.clamp_(min=0.0)]),
    "parameter of a ParamMod": lambda: BasicHook(
        param_modifiers=[ParamMod(lambda parameter, name: parameter.zero_(), ["bias"])]
    ),
    "mapper, relevance": lambda: BasicHook(gradient_mapper=lambda relevance, outputs: [relevance.div_(outputs[0] + 0.1)]),
    "mapper, output": lambda: BasicHook(gradient_mapper=lambda relevance, outputs: relevance / outputs[0].add_(0.1)),
    "reducer": lambda: BasicHook(reducer=lambda inputs, gradients: inputs[0].mul_(gradients[0])),
}
#: Code that gets the tensors themselves.
CODE = {"propagate": OwnPropagation, "forward": OwnCode, "backward": OwnBackward}


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).eval()


def explain(model, rule, mode, x, seed):
    composite = LayerMapComposite([(nn.Linear, rule)])
    if mode == "module":
        with composite.context(model):
            return torch.autograd.grad(model(x), x, seed)[0]
    explain_model = lrpfx.transform(model, composite, fold=mode == "graph")
    return torch.autograd.grad(explain_model(x), x, seed)[0]


@pytest.mark.parametrize("mode", ["graph", "live", "module"])
@pytest.mark.parametrize("name", [*FUNCTIONS, *CODE])
def test_rules_that_write_into_their_arguments(name, mode):
    model, x, seed = network(), torch.randn(2, 3), torch.randn(2, 2)
    before = [tensor.clone() for tensor in (*model.parameters(), x, seed)]
    with pytest.raises(RuleError, match="in place"):
        explain(model, {**FUNCTIONS, **CODE}[name](), mode, x.requires_grad_(), seed)
    if name in FUNCTIONS:
        for tensor, original in zip((*model.parameters(), x, seed), before, strict=True):
            assert torch.equal(tensor, original)


def test_stabilizers_that_write_into_the_output():
    rule = Epsilon(lambda output: output.add_(0.1))
    with pytest.raises(RuleError, match="writes into the output in place"):
        explain(network(), rule, "graph", torch.randn(2, 3, requires_grad=True), torch.randn(2, 2))


@pytest.mark.parametrize("mode", ["graph", "live", "module"])
def test_what_torch_does_not_count_changes_copies_alone(mode):
    """Writing through `.data`, and into tensors of inference mode."""
    unnoticed = BasicHook(
        input_modifiers=[lambda x: x.data.clamp_(min=0.0)],
        param_modifiers=[lambda parameter, name: parameter.data.clamp_(min=0.0)],
    )
    plain = BasicHook(
        input_modifiers=[lambda x: x.clamp(min=0.0)], param_modifiers=[lambda parameter, name: parameter.clamp(min=0.0)]
    )
    model, x, seed = network(), torch.randn(2, 3), torch.randn(2, 2)
    before = [tensor.clone() for tensor in (*model.parameters(), x)]
    maps = [explain(model, rule, mode, x.requires_grad_(), seed) for rule in (unnoticed, plain)]
    assert_close(*maps, 1e-12)
    assert all(torch.equal(*pair) for pair in zip((*model.parameters(), x), before, strict=True))
    with torch.inference_mode():
        made = network()
        weight = made[0].weight.clone()
        with pytest.raises(RuleError, match="in place"):
            ParamMod(lambda parameter, name: parameter.zero_()).state_dicts(made[0])
        assert made[0].weight.is_inference() and torch.equal(made[0].weight, weight)


@pytest.mark.parametrize("several", ["attribute", "vjp", "compiled"])
def test_functions_that_leave_their_arguments_alone(several):
    rule = BasicHook(
        input_modifiers=[lambda x: x.clone().clamp_(min=0.0), lambda x: x.clamp(max=0.0)],
        param_modifiers=[
            lambda parameter, name: parameter.clamp(min=0.0),
            lambda parameter, name: parameter * (name != "bias"),
        ],
        gradient_mapper=lambda relevance, outputs: [relevance / (outputs[0] + outputs[1] + 0.1)] * 2,
        reducer=lambda inputs, gradients: inputs[0] * gradients[0] + inputs[1] * gradients[1],
    )
    explain_model, x = lrpfx.transform(network(), LayerMapComposite([(nn.Linear, rule)])), torch.randn(2, 3)
    expected = lrpfx.attribute(explain_model, x, 1).relevance
    if several == "attribute":
        found = lrpfx.attribute(explain_model, x, targets=[0, 1]).relevance[1]
    elif several == "compiled":
        found = lrpfx.attribute(torch.compile(explain_model, backend="aot_eager", fullgraph=True), x, 1).relevance
    else:
        output, pull = torch.func.vjp(explain_model, x)
        (found,) = pull(output.detach() * torch.tensor([0.0, 1.0]))
    assert_close(found, expected, 1e-12)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", ["input", "mapper, relevance", "mapper, output", "reducer", "propagate", "backward"])
@pytest.mark.sampled(3)
def test_compiled_rules_write_into_copies(name, fold):
    """A compiled program does not count what is written into tensors, so there is no error; nothing of the caller changes."""
    model, x, seed = network(), torch.randn(2, 3), torch.randn(2, 2)
    explain_model = lrpfx.transform(model, LayerMapComposite([(nn.Linear, {**FUNCTIONS, **CODE}[name]())]), fold=fold)
    before = [tensor.clone() for tensor in (*explain_model.parameters(), x, seed)]
    compiled = torch.compile(explain_model, backend="aot_eager")
    torch.autograd.grad(compiled(x.requires_grad_()), x, seed)
    for tensor, original in zip((*explain_model.parameters(), x, seed), before, strict=True):
        assert torch.equal(tensor, original)

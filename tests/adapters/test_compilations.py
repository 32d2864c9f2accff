"""A graph that takes another model's parameters explains as a fresh one, and what it cannot take is compiled again."""

import copy
import gc
import weakref

import pytest
import torch
from helpers import Layered, assert_close, randomize_batch_norm
from small_families import small_family
from torch import nn
from torch.nn.utils import parametrizations

import lrpfx
from lrpfx.adapters.compilations import LIMIT, Compilations
from lrpfx.composites import EpsilonAlpha2Beta1, EpsilonGammaBox, EpsilonPlus, EpsilonPlusFlat
from lrpfx.errors import CaptureError, InputError, InputTypeError


class Network(nn.Module):
    """Merged batch norms, tied and normalized weights, dropout, buffers that are read as masks and numbers, and attributes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 1)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.normalized = parametrizations.weight_norm(nn.Linear(4, 4))
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.normalized.parametrizations.weight.original1
        self.head = nn.Linear(4, 3)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))
        self.register_buffer("steps", torch.tensor(2))
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.plain = torch.ones(4)
        self.settings = {"rate": 1.0}

    def forward(self, x):
        x = self.relu(self.bn(self.conv(x)))
        x = self.relu(self.second(x) + x).mean((2, 3)) * self.mask * self.scale + self.plain
        x = self.tied(self.drop(self.normalized(x).tanh() * self.settings["rate"]))
        for _ in range(int(self.steps)):
            x = x.sigmoid() + x
        return self.head(x)


class Recurrent(Layered):
    def forward(self, x):
        return self.head(self.lstm(x)[0].mean(1))


NETWORKS = {
    "lstm": lambda: (
        Recurrent(lstm=nn.LSTM(3, 4, batch_first=True, bidirectional=True), head=nn.Linear(8, 3)),
        torch.randn(2, 5, 3),
    )
}


def network():
    model = Network().eval()
    randomize_batch_norm(model)
    return model


def relevance(explain_model, inputs):
    return lrpfx.attribute(explain_model, inputs, 1).relevance


def scaled(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def reset(model):
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


PARAMETERS = {
    "one weight": lambda model: model.conv.reset_parameters(),
    "a weight that is merged, through .data": lambda model: model.conv.weight.data.neg_(),
    "a bias": lambda model: nn.init.uniform_(model.second.bias),
    "a batch norm": lambda model: model.bn.reset_parameters(),
    "the statistics of a batch norm": lambda model: model.bn.running_var.mul_(3),
    "a tied weight": lambda model: nn.init.normal_(model.tied.weight),
    "the magnitude of a normalized weight": lambda model: nn.init.uniform_(model.normalized.parametrizations.weight.original0),
    "another tensor": lambda model: setattr(model.head, "weight", nn.Parameter(torch.randn(3, 4))),
    "the whole state": lambda model: model.load_state_dict(Network().state_dict()),
    "all of them": scaled,
    "all layers": reset,
    "requires_grad": lambda model: model.requires_grad_(False),
}
STRUCTURE = {
    "a mask": lambda model: model.mask.neg_(),
    "a number": lambda model: model.steps.fill_(3),
    "a buffer that is not saved": lambda model: model.scale.mul_(2),
    "a plain tensor": lambda model: model.plain.mul_(2),
    "a plain tensor, through .data": lambda model: model.plain.data.mul_(2),
    "a setting": lambda model: model.settings.update(rate=0.5),
    "a layer": lambda model: setattr(model, "second", nn.Conv2d(4, 4, 1, bias=False)),
    "an attribute of a layer": lambda model: setattr(model.conv, "stride", (2, 2)),
    "a hook": lambda model: model.second.register_forward_hook(lambda module, args, result: result * 2),
    "an untied weight": lambda model: setattr(model.tied, "weight", nn.Parameter(torch.randn(4, 4))),
    "the dtype": lambda model: setattr(model.float(), "plain", model.plain.float()),
}


@pytest.mark.parametrize("change", PARAMETERS.values(), ids=PARAMETERS)
@pytest.mark.parametrize(
    ("composite", "of_copy"),
    [(EpsilonPlusFlat(), True), (EpsilonGammaBox(-3.0, 3.0), False)],
    ids=["of a copy", "of the model"],
)
@pytest.mark.sampled(4)
def test_other_parameters_need_no_compilation(compiled, composite, of_copy, change):
    compilations, inputs, model = Compilations("f", composite), torch.randn(2, 2, 6, 6), network()
    before = relevance(compilations.graph_for(model, (inputs,)), inputs)
    changed = copy.deepcopy(model) if of_copy else model
    change(changed)
    found = relevance(compilations.graph_for(changed, (inputs,)), inputs)
    assert_close(found, relevance(lrpfx.transform(changed, composite), inputs), 1e-12)
    if of_copy:
        assert_close(relevance(compilations.graph_for(model, (inputs,)), inputs), before, 1e-12)
    assert len(compiled) == 1


@pytest.mark.parametrize("change", STRUCTURE.values(), ids=STRUCTURE)
def test_another_structure_is_compiled(compiled, change):
    compilations, inputs, model = Compilations("f", EpsilonPlus()), torch.randn(2, 2, 6, 6), network()
    before = relevance(compilations.graph_for(model, (inputs,)), inputs)
    change(model)
    inputs = inputs.to(model.conv.weight.dtype)
    found = relevance(compilations.graph_for(model, (inputs,)), inputs)
    assert_close(found, relevance(lrpfx.transform(model, EpsilonPlus(), inputs), inputs), 1e-12)
    assert len(compiled) == 2
    assert not torch.equal(found, before)


@pytest.mark.parametrize("name", ["resnet", "densenet", "googlenet", "mobilenet_v3", "efficientnet", "convnext", "vit", "lstm"])
@pytest.mark.sampled(3)
def test_copies_of_networks_need_no_compilation(compiled, name):
    """Real ones: their attributes, hooks and tensors are equal in copies."""
    model, inputs = NETWORKS[name]() if name in NETWORKS else small_family(name)
    composite, compilations = EpsilonPlus(), Compilations("f", EpsilonPlus())
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    compilations.graph_for(model, (inputs,))
    found = relevance(compilations.graph_for(changed, (inputs,)), inputs)
    assert_close(found, relevance(lrpfx.transform(changed, composite, example_inputs=inputs), inputs), 1e-12)
    assert len(compiled) == 1


def test_the_model_is_as_before():
    model, inputs = network(), torch.randn(2, 2, 6, 6)
    state, attributes = copy.deepcopy(model.state_dict()), {path: set(vars(module)) for path, module in model.named_modules()}
    compilations = Compilations("f")
    for _ in range(2):
        found = compilations.graph_for(model, (inputs,))
        held = {parameter.data_ptr() for parameter in found.parameters()}
        assert not held & {parameter.data_ptr() for parameter in model.parameters()}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert attributes == {path: set(vars(module)) for path, module in model.named_modules()}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_models_and_shapes_alternate_without_compilations(compiled):
    first, second = network(), nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).eval()
    third = copy.deepcopy(first)
    reset(third)
    compilations, composite = Compilations("f", EpsilonPlus()), EpsilonPlus()
    fresh = {model: lrpfx.transform(model, composite) for model in (first, second, third)}
    for size in (6, 6, 6):
        for model, batch in ((first, 2), (second, 1), (third, 3)):
            inputs = torch.randn(batch, 2, size, size)
            assert_close(relevance(compilations.graph_for(model, (inputs,)), inputs), relevance(fresh[model], inputs), 1e-12)
    assert compiled == [first, second]


def test_other_arguments_are_compiled_where_the_graph_does_not_take_them(compiled):
    class Scaled(Layered):
        def forward(self, x, factor):
            return self.fc(x) * factor if factor > 1 else self.fc(x)

    model, compilations = Scaled(fc=nn.Linear(3, 2)), Compilations("f", EpsilonPlus())
    inputs = torch.randn(2, 3)
    for factor in (1, 3, 1, 3):
        found = lrpfx.attribute(compilations.graph_for(model, (inputs, factor)), (inputs, factor), 0).output
        assert_close(found, model(inputs, factor).detach(), 1e-12)
    assert len(compiled) == 2


def test_tensors_that_shared_memory_are_apart(compiled):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
            self.second.running_mean = self.first.running_mean[:]
            self.fc, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 2)
            self.rows = nn.Parameter(self.fc.weight.data[:2])

        def forward(self, x):
            return self.head(self.second(self.fc(self.first(x))).relu()) + x @ self.rows.T

    model, inputs, compilations = Shared().eval(), torch.rand(2, 3), Compilations("f", EpsilonPlus())
    compilations.graph_for(model, (inputs,))
    for change, compilations_so_far in (
        (lambda: model.fc.weight.data.mul_(-2), 1),
        (lambda: setattr(model, "rows", nn.Parameter(torch.rand(2, 3))), 1),
        (lambda: model.first.running_mean.add_(1), 1),
        (lambda: setattr(model.second, "running_mean", torch.rand(3)), 2),
    ):
        change()
        for _ in range(2):
            found = relevance(compilations.graph_for(model, (inputs,)), inputs)
            assert_close(found, relevance(lrpfx.transform(model, EpsilonPlus()), inputs), 1e-12)
        assert len(compiled) == compilations_so_far


def test_the_default_rules_are_chosen_for_text_and_for_numbers(compiled):
    class Weighted(Layered):
        def forward(self, x, weights):
            return self.fc(x) * weights

    model, compilations, inputs = Weighted(fc=nn.Linear(3, 2)), Compilations("f"), torch.randn(2, 3)
    for weights in (torch.tensor(2), torch.tensor(2.0), torch.tensor(2)):
        compilations.graph_for(model, (inputs, weights))
    assert len(compiled) == 2


def test_only_the_last_graphs_are_kept(compiled):
    inputs, compilations = torch.randn(2, 3), Compilations("f", EpsilonPlus())
    models = [nn.Sequential(nn.Linear(3, size), nn.ReLU(), nn.Linear(size, 2)).eval() for size in range(2, 3 + LIMIT)]
    graphs = [weakref.ref(compilations.graph_for(model, (inputs,))) for model in models]
    gc.collect()
    assert [graph() is None for graph in graphs] == [True] + [False] * LIMIT
    compilations.graph_for(models[-1], (inputs,))
    assert compiled == models


def test_a_deleted_model_is_not_held():
    inputs, compilations, model = torch.randn(2, 2, 6, 6), Compilations("f", EpsilonPlus()), network()
    compilations.graph_for(model, (inputs,))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_an_error_leaves_the_graphs_valid(compiled):
    """A change that cannot be compiled is an error each time, and the model is explained after the change is undone."""
    inputs, compilations, model = torch.randn(2, 2, 6, 6), Compilations("f", EpsilonAlpha2Beta1()), network()
    before = relevance(compilations.graph_for(model, (inputs,)), inputs)
    model.train()
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"model\.eval\(\)"):
            compilations.graph_for(model, (inputs,))
    model.eval()
    with pytest.raises(InputError):
        relevance(compilations.graph_for(model, (inputs,)), inputs * torch.nan)
    scaled(model)
    scaled_once = relevance(compilations.graph_for(model, (inputs,)), inputs)
    assert_close(scaled_once, relevance(lrpfx.transform(model, EpsilonAlpha2Beta1()), inputs), 1e-12)
    assert not torch.equal(before, scaled_once)
    assert len(compiled) == 3


def test_values_that_are_no_numbers_are_equal(compiled):
    inputs, compilations, model = torch.randn(2, 2, 6, 6), Compilations("f", EpsilonPlus()), network()
    model.register_buffer("unused", torch.tensor(torch.nan))
    for _ in range(2):
        compilations.graph_for(model, (inputs,))
    assert len(compiled) == 1


@pytest.mark.parametrize("composite", [None, EpsilonPlus()])
def test_modules_with_rules_are_used_as_they_are(compiled, composite):
    model = nn.Sequential(nn.Linear(3, 2)).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus())
    compilations = Compilations("the caller", composite)
    if composite is None:
        assert compilations.graph_for(explain_model, (torch.randn(1, 3),)) is explain_model
    else:
        with pytest.raises(InputError, match="the caller was given a composite and a model that has its rules already"):
            compilations.graph_for(explain_model, (torch.randn(1, 3),))
    assert not compiled


@pytest.mark.parametrize("model", [None, lambda x: x, nn.Linear])
def test_what_is_not_a_module_is_refused(model):
    with pytest.raises(InputTypeError, match=r"the caller takes a torch\.nn\.Module"):
        Compilations("the caller").check(model)

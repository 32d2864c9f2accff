"""Symbolic trace and torch.export: the same graph, names and relevance, and what happens where one of them fails."""

import copy
import dataclasses

import pytest
import torch
import torchvision
from helpers import NETWORKS, Binary, Unary, assert_close, both_front_ends, small_net
from small_families import FAMILIES, small_family
from tools.torchvision_sweep import random_model
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx import passes
from lrpfx.composites import AttnLRP, EpsilonAlpha2Beta1Flat, EpsilonPlus, NameMapComposite
from lrpfx.frontends.exported import capture_export
from lrpfx.ir.node import node_info
from lrpfx.passes import stages
from lrpfx.rules import Pass
from lrpfx.types import Activation


def family(name, size):
    model = random_model(name)
    return model, torch.randn(2, 3, size, size)


CLASSIFIERS = {
    "alexnet": 64, "vgg11_bn": 32, "resnet18": 32, "resnext50_32x4d": 32, "densenet121": 32, "googlenet": 32,
    "inception_v3": 75, "squeezenet1_1": 32, "mobilenet_v2": 32, "mobilenet_v3_small": 32, "mnasnet0_5": 32,
    "shufflenet_v2_x0_5": 32, "efficientnet_b0": 32, "regnet_x_400mf": 32, "regnet_y_400mf": 32, "convnext_tiny": 32,
    "vit_b_32": 224,
}  # fmt: skip
NEED_EXPORT = ("swin",)
#: Their blocks and how they are joined are in others, or they are many of a kind.
SLOW_FAMILIES = ("vgg", "googlenet", "resnext", "regnet_x", "mobilenet_v3")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_FAMILIES)) for name in FAMILIES if name not in NEED_EXPORT],
)
@pytest.mark.sampled(3)
def test_both_give_the_same_relevance_and_names(name):
    compare_front_ends(*small_family(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_both_give_the_same_relevance_and_names_for_classifiers_of_torchvision(name):
    compare_front_ends(*family(name, CLASSIFIERS[name]))


def compare_front_ends(model, x):
    results = {}
    for capture in ("symbolic", "export"):
        explain_model = lrpfx.transform(model, EpsilonAlpha2Beta1Flat(), example_inputs=x, capture=capture)
        assert lrpfx.history(explain_model)[0].name == capture
        results[capture] = (lrpfx.attribute(explain_model, x, torch.cos), lrpfx.assignment(explain_model))
    assert_close(results["export"][0].relevance, results["symbolic"][0].relevance, 1e-9)
    ruled = [
        {(row.name, row.rule) for row in table if row.rule not in ("neutral", "input") and "attention" not in row.name}
        for _, table in results.values()
    ]
    assert ruled[0] == ruled[1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "vgg11")) for name in sorted(NETWORKS)]
)
@pytest.mark.thorough
def test_the_same_names_for_networks_of_layers(name):
    model, x = NETWORKS[name]()
    names = [
        lrpfx.node_names(lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture=capture))
        for capture in ("symbolic", "export")
    ]
    assert names[0] == names[1]


@pytest.mark.filterwarnings("ignore:entries of")
@pytest.mark.parametrize(
    "function",
    [
        F.softsign,
        F.tanhshrink,
        lambda x: F.softshrink(x, 0.3),
        lambda x: F.hardshrink(x, lambd=0.3),
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.normalize(x, 3.0, (1, 2)),
        lambda x: F.local_response_norm(x, 2),
        lambda x: F.lp_pool1d(x.flatten(2), 2.0, 3, stride=2),
        lambda x: F.lp_pool2d(x, norm_type=4, kernel_size=(2, 3), stride=(1, 2), ceil_mode=True),
        lambda x: F.lp_pool3d(x.unsqueeze(1), 2, 2),
        nn.LPPool2d(2.0, 2),
    ],
)
def test_functions_that_torch_export_would_take_apart(function):
    """Rules for the parts would show."""
    model, x = Unary(function), torch.randn(2, 3, 4, 6)
    expected, found = (
        lrpfx.attribute(
            lrpfx.transform(
                model, EpsilonPlus(epsilon=0.1, layer_map=[(Activation, Pass())]), example_inputs=x, capture=capture
            ),
            x,
            torch.cos,
        ).relevance
        for capture in ("symbolic", "export")
    )
    assert_close(found, expected, 1e-12)


ATTENTION = [{}, {"kdim": 4, "vdim": 4}, {"bias": False}, {"batch_first": False}]
#: Each way to share, and each option, at least once.
ALWAYS = {("all", 0), ("all", 2), ("key and value", 1), ("key and value", 3), ("nothing", 0), ("nothing", 2)}


@pytest.mark.parametrize(
    "shared, sizes",
    [
        pytest.param(shared, sizes, marks=[] if (shared, place) in ALWAYS else [pytest.mark.slow])
        for shared in ("all", "key and value", "nothing")
        for place, sizes in enumerate(ATTENTION)
    ],
)
@pytest.mark.sampled(3)
def test_the_first_layer_of_an_attention_is_the_same(shared, sizes):
    """Where query, key and value are one tensor, one layer projects all three."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, **{"batch_first": True, **sizes})
            self.eval()

        def forward(self, x, y):
            y = y[..., : sizes.get("kdim", 6)]
            keys = {"all": (x, x), "key and value": (y, y), "nothing": (y, 2 * y)}[shared]
            return self.attention(x, *keys, need_weights=False)[0] + 0 * y.sum()

    if shared == "all" and "kdim" in sizes:
        return
    model, inputs = First(), (torch.randn(3, 3, 6), torch.randn(3, 3, 6))
    found = [
        lrpfx.attribute(
            lrpfx.transform(model, lrpfx.composites.EpsilonPlusFlat(), example_inputs=inputs, capture=capture),
            inputs,
            torch.cos,
        )
        for capture in ("symbolic", "export")
    ]
    for one, other in zip(*(attribution.relevance for attribution in found), strict=True):
        assert (one - other).abs().max() <= 1e-10 * found[0].relevance[0].abs().max()


VIEWS = [lambda x: x.flatten(1), lambda x: x.reshape(2, -1), lambda x: x[:, :1], lambda x: x.mT]
WRITES = [lambda x: x.add_(1), lambda x: x[:, 1:].zero_(), lambda x: x[:, :1].mul_(3)]


@pytest.mark.parametrize(
    "view, write",  # each view with two of the writes; the third is a slow test
    [
        pytest.param(view, write, marks=[pytest.mark.slow] * ((row + column) % 3 == 0))
        for row, view in enumerate(VIEWS)
        for column, write in enumerate(WRITES)
    ],
)
@pytest.mark.sampled(3)
def test_views_that_are_read_after_their_memory_was_overwritten(view, write):
    def overwriting(x):
        value = 2 * x
        seen = view(value)
        write(value)
        return seen.flatten(1)

    def copying(x):
        value = 2 * x
        write(value)
        return view(value).flatten(1)

    x = torch.randn(2, 3, 4)
    found, expected = (
        lrpfx.attribute(lrpfx.transform(Unary(function), EpsilonPlus(), example_inputs=x), x, torch.cos)
        for function in (overwriting, copying)
    )
    assert_close(found.output, overwriting(x), 1e-12)
    assert (found.relevance - expected.relevance).abs().max() <= 1e-12


def test_tokens_that_are_read_for_a_shape_have_no_relevance():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 4)
            self.eval()

        def forward(self, tokens, x):
            return x * torch.arange(1, 1 + self.embedding(tokens).relu().shape[1])

    model, inputs = Positions(), (torch.randint(7, (2, 5)), torch.randn(2, 5))
    for capture in ("symbolic", "export"):
        explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=inputs, capture=capture)
        of_tokens, of_x = lrpfx.attribute(explain_model, inputs, 1).relevance
        assert of_tokens is None
        assert_close(of_x.sum(), model(*inputs)[:, 1].sum(), 1e-9)


@pytest.mark.thorough
def test_swin_needs_torch_export():
    model = torchvision.models.SwinTransformer([4, 4], 12, [2], [3], [7, 7], num_classes=5).eval().double()
    x = torch.randn(1, 3, 64, 64)
    with pytest.raises(lrpfx.UnsupportedOperationError, match="shifted_window_attention"):
        lrpfx.transform(model, EpsilonPlus())
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert lrpfx.history(explain_model)[0].name == "export"
    for batch in (1, 3):
        inputs = torch.randn(batch, 3, 64, 64)
        assert_close(explain_model(inputs), model(inputs).detach(), 1e-11)
    assert lrpfx.ledger(explain_model, x).unexplained <= 1e-9


@pytest.mark.parametrize("examples", [1, 2, 5])
@pytest.mark.thorough
def test_the_batch_may_vary(examples):
    model = small_net()
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.randn(examples, 3, 8, 8), capture="export")
    symbolic = lrpfx.transform(model, EpsilonPlus())
    for batch in (1, 2, 7):
        x = torch.randn(batch, 3, 8, 8)
        assert_close(lrpfx.attribute(explain_model, x, 1).relevance, lrpfx.attribute(symbolic, x, 1).relevance, 1e-11)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.eval()

    def forward(self, x):
        return self.linear(x) if x.shape[1] == 4 else x


def test_where_the_trace_fails_examples_help():
    with pytest.raises(lrpfx.CaptureError) as caught:
        lrpfx.transform(Branches(), EpsilonPlus())
    assert any("pass example_inputs" in note for note in caught.value.__notes__)
    x = torch.randn(2, 4)
    with pytest.raises(lrpfx.CaptureError) as caught:
        lrpfx.transform(Branches(), EpsilonPlus(), example_inputs=x, capture="symbolic")
    assert any('capture="export"' in note for note in caught.value.__notes__)
    explain_model = lrpfx.transform(Branches(), EpsilonPlus(), example_inputs=x)
    assert lrpfx.history(explain_model)[0].name == "export"


def test_where_both_fail():
    model = Unary(lambda x: x.relu() if x.sum() > 0 else x)
    with pytest.raises(lrpfx.CaptureError, match="branches on a value that depends on the input") as caught:
        lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.randn(2, 3))
    assert "Torch.export fails, too: torch.export cannot follow the forward" in str(caught.value)


class BranchesThenUnknown(Branches):
    """The trace stops at the branch on a size; torch.export does not, and an operation has no rule."""

    def forward(self, x):
        return torch.lgamma(super().forward(x))


def test_the_cause_that_matters_comes_first():
    with pytest.raises(lrpfx.UnsupportedOperationError) as caught:
        lrpfx.transform(BranchesThenUnknown(), EpsilonPlus(), example_inputs=torch.randn(2, 4))
    first, second = str(caught.value).split("\n\n")
    assert "lgamma" in first and second.startswith("The symbolic trace fails, too: ") and "branches on a value" in second


class MisreadsFloats(nn.Module):
    """The trace takes the wrong branch, and torch.export cannot return a set."""

    def forward(self, x):
        return {1.0, x.relu()} if isinstance(x, torch.Tensor) else x.sigmoid()


def test_a_front_end_that_came_further_comes_first():
    with pytest.raises(lrpfx.VerificationError) as caught:
        lrpfx.transform(MisreadsFloats().eval(), EpsilonPlus(), example_inputs=torch.randn(2, 4))
    assert "Torch.export fails, too: torch.export cannot follow the forward of MisreadsFloats" in str(caught.value)


class SpoilsTraces(passes.GraphPass):
    """A stage that fails for graphs of one front end."""

    name, stage = "spoils_traces", "assign"

    def __init__(self, front_ends):
        self.front_ends = front_ends

    def run(self, program):
        if program.history[0].name in self.front_ends:
            raise lrpfx.PassError(f"no graph of {program.history[0].name}")
        return passes.PassResult()


@pytest.fixture
def spoiled(monkeypatch):
    """Makes a stage fail for the graphs of the named front ends."""

    def spoil(*front_ends):
        assign = stages.STAGES[stages.Stage.ASSIGN]
        monkeypatch.setitem(stages.STAGES, stages.Stage.ASSIGN, lambda settings: (*assign(settings), SpoilsTraces(front_ends)))

    return spoil


def test_where_a_later_stage_fails_the_export_is_tried(spoiled):
    spoiled("symbolic")
    model, x = Unary(lambda x: x.relu() * 2.0), torch.randn(2, 3)
    history = lrpfx.history(lrpfx.transform(model, EpsilonPlus(), example_inputs=x))
    assert history[0].name == "export"
    assert any("no graph of symbolic" in reason for stage in history for _, reason in stage.reasons)
    for keywords in ({}, {"example_inputs": x, "capture": "symbolic"}):
        with pytest.raises(lrpfx.PassError, match="no graph of symbolic") as caught:
            lrpfx.transform(model, EpsilonPlus(), **keywords)
        assert str(caught.value) == "no graph of symbolic"


def test_each_note_is_given_once(spoiled):
    spoiled("symbolic")
    composite = NameMapComposite([(["nothing"], Pass())])
    with pytest.warns(lrpfx.LrpfxWarning) as caught:
        lrpfx.transform(Unary(lambda x: x.relu() * 2.0), composite, example_inputs=torch.randn(2, 3), unassigned="gradient")
    assert [warning.message.topic for warning in caught] == ["entries-that-match-nothing"]
    assert caught[0].filename == __file__


def test_where_a_later_stage_fails_for_both(spoiled):
    spoiled("symbolic", "export")
    with pytest.raises(lrpfx.PassError) as caught:
        lrpfx.transform(Unary(lambda x: x.relu() * 2.0), EpsilonPlus(), example_inputs=torch.randn(2, 3))
    assert str(caught.value) == "no graph of symbolic\n\nTorch.export fails, too: no graph of export"


def test_a_hopeless_export_is_given_up_soon(monkeypatch):
    exports = []

    def counted(*arguments):
        exports.append(arguments)
        return capture_export(*arguments)

    monkeypatch.setattr("lrpfx.frontends.capture.capture_export", counted)
    model = Unary(lambda x: x.relu() if x.sum() > 0 else x)
    with pytest.raises(lrpfx.CaptureError):
        lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.randn(2, 3, 5), capture="export")
    assert len(exports) == 2


def test_arguments_of_capture():
    model = small_net()
    with pytest.raises(lrpfx.InputError, match='"auto", "symbolic" or "export"'):
        lrpfx.transform(model, EpsilonPlus(), capture="jit")
    with pytest.raises(lrpfx.InputError, match="pass example_inputs"):
        lrpfx.transform(model, EpsilonPlus(), capture="export")
    whole = NameMapComposite([(["0"], Pass())])
    nested = nn.Sequential(nn.Sequential(nn.ReLU(), nn.ReLU())).eval()
    with pytest.raises(lrpfx.CaptureError, match="maps 0 as a whole"):
        lrpfx.transform(nested, whole, example_inputs=torch.randn(2, 3), capture="export")


@pytest.mark.thorough
def test_slice_assignment_is_functional_in_torch_export():
    class Assigns(nn.Module):
        def forward(self, x):
            y = x * 2.0
            y[:, 0] = 0.0
            y[:, 1:] += x[:, 1:]
            return y

    x = torch.randn(3, 4)
    explain_model = lrpfx.transform(Assigns().eval(), EpsilonPlus(), example_inputs=x)
    assert_close(explain_model(x), Assigns()(x), 1e-14)
    seed = torch.randn(3, 4)
    accounts = lrpfx.ledger(explain_model, x, seed)
    assert accounts.unexplained <= 1e-9
    assert_close(torch.tensor(accounts.total("constants")), seed[:, 0].sum(), 1e-6)


@pytest.mark.parametrize("index", [torch.tensor([True, False, True]), torch.tensor([0, 2])], ids=["mask", "places"])
def test_entries_of_later_dimensions_are_assigned(index):
    class Assigns(nn.Module):
        def forward(self, x):
            y = x * 2.0
            y[:, :, index] = 0.0
            return y

    x = torch.randn(2, 4, 3)
    explain_model = lrpfx.transform(Assigns().eval(), EpsilonPlus(), example_inputs=x)
    assert_close(explain_model(x), Assigns()(x), 1e-14)
    expected = torch.ones_like(x)
    expected[:, :, index] = 0.0
    assert_close(lrpfx.attribute(explain_model, x, lambda output: output).relevance, 2 * x * expected, 1e-12)


def test_exported_programs():
    model, x = small_net(), torch.randn(4, 3, 8, 8)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    before = {name: value.clone() for name, value in program.state_dict.items()}
    explain_model = lrpfx.transform(program, EpsilonPlus())
    expected = lrpfx.transform(model, EpsilonPlus())
    assert (
        lrpfx.node_names(explain_model)
        == lrpfx.node_names(expected)
        == [name for name in lrpfx.node_names(program) if name not in ("bn1", "bn2")]
    )
    assert str(lrpfx.assignment(explain_model).rule_of("conv1")) == lrpfx.assignment(expected).rule_of("conv1")
    assert_close(lrpfx.attribute(explain_model, x, 1).relevance, lrpfx.attribute(expected, x, 1).relevance, 1e-11)
    assert set(explain_model.state_dict()) == set(program.state_dict)
    assert all(torch.equal(program.state_dict[name], value) for name, value in before.items())
    assert "conv1" in dict(explain_model.named_modules())
    with pytest.raises(lrpfx.InputError, match="give 2 arguments"):
        lrpfx.transform(program, EpsilonPlus(), example_inputs=(x, x))


def test_frozen_models_and_models_with_constants():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.table = torch.arange(4.0, dtype=torch.float64)

        def forward(self, x):
            return self.linear(x) * self.table + torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)

    model, x = Net().eval().requires_grad_(False), torch.randn(2, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture="export")
    assert_close(explain_model(x), model(x), 1e-14)
    accounts = lrpfx.ledger(explain_model, x, torch.ones(2, 4))
    assert accounts.unexplained <= 1e-9 and accounts.total("bias") != 0  # the tensor is added to each output


# --- several inputs and outputs -----------------------------------------------------------------------------------------------


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(4, 3), nn.Linear(5, 3)
        self.eval()

    def forward(self, batch, scale=1.0):
        image, text = self.image(batch["image"]), self.text(batch["texts"][0])
        return {"image": image, "text": text, "similarity": (image * text).sum(-1) * scale}


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_nested_inputs_and_dictionaries_of_outputs(capture):
    model = TwoTowers()
    inputs = ({"image": torch.randn(3, 4), "texts": [torch.randn(3, 5)]},)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=inputs, capture=capture)
    result = lrpfx.attribute(explain_model, inputs, lambda output: output, output="similarity")
    assert_close(result.output, model(*inputs)["similarity"].detach(), 1e-13)
    (relevance,) = result.relevance
    assert relevance["image"].shape == (3, 4) and relevance["texts"][0].shape == (3, 5)
    accounts = lrpfx.ledger(explain_model, inputs, lambda output: output, output="similarity")
    assert accounts.unexplained <= 1e-9 and abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude
    total = relevance["image"].sum() + relevance["texts"][0].sum()
    assert_close(torch.tensor(sum(accounts.inputs.values())), total, 1e-9)
    image = lrpfx.attribute(explain_model, inputs, output=lambda outputs: outputs["image"], target=0)
    assert not image.relevance[0]["texts"][0].any()
    with pytest.raises(
        lrpfx.InputTypeError, match="a dict with the keys 'image', 'text', 'similarity'; choose one with output="
    ):
        lrpfx.attribute(explain_model, inputs)
    with pytest.raises(lrpfx.InputError, match="has no 'logits'"):
        lrpfx.attribute(explain_model, inputs, output="logits")


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    logits: torch.Tensor
    states: torch.Tensor


def test_dataclasses_of_outputs():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x):
            hidden = self.first(x).relu()
            return Result(hidden, self.second(hidden), hidden.relu())

    x = torch.randn(3, 4)
    explain_model = lrpfx.transform(Net().eval(), EpsilonPlus(), example_inputs=x)
    assert isinstance(explain_model(x), Result)
    result = lrpfx.attribute(explain_model, x, 1, output="logits")
    accounts = lrpfx.ledger(explain_model, x, 1, output="logits")
    assert accounts.unexplained <= 1e-9
    assert_close(torch.tensor(accounts.inputs["x"]), result.relevance.sum(), 1e-12)
    assert torch.equal(lrpfx.attribute(explain_model, x, 1).relevance, result.relevance)  # logits is the default


def test_outputs_that_are_no_classes():
    """A segmentation map: relevance of one region of one class."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(2, 3, 6, 6)
    region = torch.zeros(2, 4, 12, 12)
    region[:, 2, :4, :4] = 1.0
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    result = lrpfx.attribute(explain_model, x, lambda output: output * region)
    assert result.relevance[:, :, :3, :3].any() and not result.relevance[:, :, 4:, 4:].any()
    accounts = lrpfx.ledger(explain_model, x, lambda output: output * region)
    assert accounts.unexplained <= 1e-9 and abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude


class TextModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(10, 8), nn.Embedding(6, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.eval()

    def forward(self, tokens, padding=None):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.words(tokens) + self.positions(places)
        return self.head(self.layer(hidden, src_key_padding_mask=padding).mean(1))


class Embedded(nn.Module):
    """The text model behind its word embedding."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, embedded):
        hidden = embedded + self.model.positions(torch.arange(5))
        return self.model.head(self.model.layer(hidden).mean(1))


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.thorough
def test_integer_inputs_get_the_relevance_of_their_embedding(capture, frozen):
    model = TextModel().requires_grad_(not frozen)
    tokens = torch.randint(0, 10, (2, 5))
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=tokens, capture=capture)
    result = lrpfx.attribute(explain_model, tokens, 1)
    assert result.relevance.shape == (2, 5, 8) and result.relevance.abs().sum() > 0
    accounts = lrpfx.ledger(explain_model, tokens, 1)
    assert accounts.unexplained <= 1e-9 and abs(accounts.balance) <= 1e-9 * accounts.seed_magnitude
    assert_close(torch.tensor(accounts.inputs["words"]), result.relevance.sum(), 1e-10)
    assert accounts.total("constants") != 0, "the position embedding takes a share"
    recorded = lrpfx.attribute(explain_model, tokens, 1, record=["words", "head"])
    assert torch.equal(recorded.layers["words"], result.relevance) and recorded.layers["head"].shape == (2, 3)
    with torch.no_grad():  # the same relevance as for a model that takes the embeddings
        embedded = model.words(tokens)
    expected = lrpfx.attribute(lrpfx.transform(Embedded(model).eval(), EpsilonPlus(), capture="symbolic"), embedded, 1)
    assert_close(result.relevance, expected.relevance, 1e-8)


def test_padding_masks_as_inputs():
    model, tokens = TextModel(), torch.randint(0, 10, (2, 5))
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    inputs = {"tokens": tokens, "padding": padding}
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=inputs)
    result = lrpfx.attribute(explain_model, inputs, 1)
    assert result.relevance["padding"] is None and torch.isfinite(result.relevance["tokens"]).all()
    assert_close(result.output, model(**inputs).detach(), 1e-11)
    assert lrpfx.ledger(explain_model, inputs, 1).unexplained <= 1e-9


def test_an_input_that_two_embeddings_read():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Embedding(10, 4), nn.Embedding(10, 4)

        def forward(self, tokens):
            return self.a(tokens).sum(1) + self.b(tokens).sum(1)

    tokens = torch.randint(0, 10, (2, 3))
    relevance = lrpfx.attribute(lrpfx.transform(Net().eval(), EpsilonPlus()), tokens, 0).relevance
    assert sorted(relevance) == ["a", "b"] and all(value.shape == (2, 3, 4) for value in relevance.values())


@pytest.mark.parametrize("name", ["vit", "densenet", "mobilenet_v3", "convnext"])
def test_each_sample_by_itself(name):
    compare_with_each_sample_by_itself(*small_family(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_b_32", "densenet121", "mobilenet_v3_small", "convnext_tiny"])
def test_each_sample_by_itself_for_classifiers_of_torchvision(name):
    compare_with_each_sample_by_itself(*family(name, CLASSIFIERS[name]))


def compare_with_each_sample_by_itself(model, x):
    """Batch mates change nothing: neither their order nor their presence."""
    x = torch.cat([x, torch.randn_like(x[:1])])
    explain_model = lrpfx.transform(model, EpsilonPlus())
    target = torch.tensor([1, 2, 3])
    together = lrpfx.attribute(explain_model, x, target).relevance
    order = [2, 0, 1]
    assert_close(lrpfx.attribute(explain_model, x[order], target[order]).relevance, together[order], 1e-9)
    for index in range(3):
        alone = lrpfx.attribute(explain_model, x[index : index + 1], target[index : index + 1]).relevance
        assert torch.equal(torch.isfinite(alone), torch.ones_like(alone, dtype=torch.bool))
        if together[index].any():
            assert_close(together[index : index + 1], alone, 1e-9)


def test_two_inputs_by_position_and_name():
    model = Binary(lambda a, b: F.relu(a) + b)
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs={"a": a, "b": b}, capture="export")
    by_position = lrpfx.attribute(explain_model, (a, b), torch.cos).relevance
    by_name = lrpfx.attribute(explain_model, {"b": b, "a": a}, torch.cos).relevance
    assert torch.equal(by_position[0], by_name["a"]) and torch.equal(by_position[1], by_name["b"])


def test_blocks_without_gradients_are_part_of_the_graph():
    """Whether a block records gradients does not concern relevance, as in a symbolic trace, which does not see it."""

    class Rotary(nn.Module):
        def __init__(self, of_data):
            super().__init__()
            self.linear, self.of_data = nn.Linear(4, 4), of_data

        def forward(self, x):
            with torch.no_grad():
                angles = torch.arange(x.shape[1], dtype=x.dtype) * 0.1
                scale = x.abs().mean() if self.of_data else angles.mean()
            with torch.autocast("cpu", enabled=False):
                return self.linear(x * torch.cos(angles)) * scale

    x = torch.randn(2, 4)
    model = Rotary(False).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture="export")
    assert_close(explain_model(x), model(x).detach(), 1e-14)
    assert lrpfx.ledger(explain_model, x, torch.cos).unexplained <= 1e-9
    model = Rotary(True).eval()
    symbolic, exported = (
        lrpfx.attribute(lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture=capture), x, 1)
        for capture in ("symbolic", "export")
    )
    assert_close(exported.relevance, symbolic.relevance, 1e-12)
    assert exported.relevance.any()


def test_autocast_inside_a_model_is_refused():
    class Casting(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ x.T

    with pytest.raises(lrpfx.CaptureError, match="autocast"):
        lrpfx.transform(Casting().eval(), EpsilonPlus(), example_inputs=torch.randn(2, 3), capture="export")


def test_forwards_without_names_for_their_arguments():
    class Gathers(nn.Module):
        def forward(self, *tensors):
            return tensors[0] + tensors[1]

    with pytest.raises(lrpfx.InputError, match="gathers arguments in 'tensors'"):
        lrpfx.transform(Gathers().eval(), EpsilonPlus(), example_inputs=(torch.randn(2), torch.randn(2)))


def test_models_that_fail_on_their_examples():
    with pytest.raises(lrpfx.InputError, match="ResidualNet itself fails on the example inputs: RuntimeError"):
        lrpfx.transform(small_net(), EpsilonPlus(), example_inputs=torch.randn(2, 5, 8, 8))


# --- parametrizations --------------------------------------------------------------------------------------------------------


class Standardized(nn.Module):
    """A parametrization of a user's own, which looks at shapes."""

    def forward(self, weight):
        if weight.ndim < 2:
            return weight
        return weight / weight.flatten(1).norm(dim=1).reshape(-1, *[1] * (weight.dim() - 1)) / len(weight)


PARAMETRIZATIONS = {
    "spectral": nn.utils.parametrizations.spectral_norm,
    "spectral, other dimension": lambda layer: nn.utils.parametrizations.spectral_norm(layer, dim=1),
    "spectral, old style": nn.utils.spectral_norm,
    "weight": nn.utils.parametrizations.weight_norm,
    "weight, old style": nn.utils.weight_norm,
    **{
        f"orthogonal, {name}": lambda layer, name=name: nn.utils.parametrizations.orthogonal(layer, orthogonal_map=name)
        for name in ("matrix_exp", "cayley", "householder")
    },
    "orthogonal, trivial": lambda layer: nn.utils.parametrizations.orthogonal(layer, use_trivialization=False),
    "one's own": lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Standardized()),
}


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
@pytest.mark.parametrize(
    "make",
    [lambda: nn.Linear(4, 6), lambda: nn.Linear(6, 3, bias=False), lambda: nn.Conv2d(3, 5, 3)],
    ids=["wide", "tall", "conv"],
)
@pytest.mark.sampled(3)
def test_parametrizations_are_arithmetic_on_parameters(name, make):
    layer = make()  # here, where the seed is set
    model, other = (nn.Sequential(PARAMETRIZATIONS[name](copy.deepcopy(layer).double())) for _ in range(2))
    x = torch.randn(2, 3, 5, 5) if isinstance(layer, nn.Conv2d) else torch.randn(2, layer.in_features)
    for network in (model, other):
        with torch.no_grad():
            for parameter in network.parameters():
                noise = 0.1 * torch.randn(parameter.shape)
                if noise.ndim > 1:
                    noise.diagonal(dim1=-2, dim2=-1).zero_()  # where the signs of Householder's map stand
                parameter += noise
        network(x)  # old style: power iteration
    both_front_ends(model.eval(), x)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert lrpfx.history(explain_model)[0].name == "symbolic" and explain_model.compiled.derived
    explain_model.load_state_dict(other.eval().state_dict())
    assert_close(explain_model(x), other(x).detach(), 1e-12)


def test_power_iteration_in_training_mode_is_refused():
    for name in ("spectral", "spectral, old style"):
        with pytest.raises(lrpfx.CaptureError, match="change their weights with every call"):
            lrpfx.transform(nn.Sequential(PARAMETRIZATIONS[name](nn.Linear(3, 3))).train(), EpsilonPlus())


class OfFunction(nn.Module):
    """A network with a function of its own and its input."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.linear(x), x)


@pytest.mark.parametrize(
    ("written", "message", "mended"),
    [
        (lambda y, x: y / int(x.shape[0]), r"x\.shape\[0\] for int", lambda y, x: y / x.shape[0]),
        (lambda y, x: y / float(x.size(0)), r"x\.shape\[0\] for int", lambda y, x: y / x.size(0)),
    ],
)
def test_sizes_that_are_read_as_numbers(written, message, mended):
    """The remedy leads to a graph for any batch."""
    x = torch.randn(2, 4)
    with pytest.raises(lrpfx.CaptureError, match=message):
        lrpfx.transform(OfFunction(written).eval(), EpsilonPlus(), x, dynamic_shapes={"x": {0: True}})
    model, other = OfFunction(mended).eval(), torch.randn(5, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus(), x, dynamic_shapes={"x": {0: True}})
    assert_close(explain_model(other), model(other), 1e-14)
    assert lrpfx.ledger(explain_model, other, 1).unexplained <= 1e-12


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_the_length_of_a_tensor_may_vary(capture):
    """Also in functions of the model's files; afterwards they have Python's own `len`."""
    x, other = torch.randn(2, 4), torch.randn(5, 4)
    model = OfFunction(lambda y, x: y.reshape(len(x), 2, len([1, 2])).sum(1) / len(x.T)).eval()
    explain_model = lrpfx.transform(model, EpsilonPlus(), x, capture=capture)
    assert_close(explain_model(other), model(other), 1e-14)
    assert "len" not in globals()
    with pytest.raises(lrpfx.LrpfxError):
        lrpfx.transform(OfFunction(lambda y, x: y / len(y.sum())).eval(), EpsilonPlus(), x, capture=capture)
    assert "len" not in globals()


def test_a_number_of_a_value_has_no_rule_and_the_tensor_has():
    x = torch.randn(2, 4)
    with pytest.raises(lrpfx.UnsupportedOperationError, match=r"x\.max\(\) for x\.max\(\)\.item\(\)"):
        lrpfx.transform(OfFunction(lambda y, x: y * x.max().item()).eval(), EpsilonPlus(), x)
    explain_model = lrpfx.transform(OfFunction(lambda y, x: y * x.max()).eval(), EpsilonPlus(), x)
    assert lrpfx.ledger(explain_model, x, 1).unexplained <= 1e-12


@pytest.mark.parametrize(
    "computed", [lambda n: n, lambda n: n * 2, lambda n: n + 3, lambda n: 9 - n, lambda n: n // 2, lambda n: -n]
)
def test_what_is_computed_from_numbers_of_values_is_a_number(computed):
    """Where operators take numbers alone, such as comparisons, sizes and the numbers that fill tensors."""

    class Compared(nn.Module):
        def forward(self, x, mask):
            number = computed(mask.sum().item())
            counted = computed(mask.cumsum(0))
            return x * (counted == number) + 2 * x * (counted < number) + x * torch.full((6,), number)

    x, mask = torch.randn(2, 6), torch.tensor([1, 0, 1, 1, 0, 0])
    explain_model = lrpfx.transform(Compared().eval(), AttnLRP(), example_inputs=(x, mask), capture="export")
    for one in (mask, torch.ones(6, dtype=torch.int64)):
        assert_close(explain_model(x, one), Compared()(x, one), 1e-14)
        assert lrpfx.ledger(explain_model, (x, one), 1).unexplained <= 1e-12


def test_parts_of_a_value_whose_size_depends_on_values():
    class Chosen(nn.Module):
        def forward(self, x, mask):
            return (x[:, mask.nonzero()[:, 0]][:, :4] * 2.0).sum(1)

    x, mask = torch.randn(2, 6, 3), torch.tensor([1, 0, 1, 1, 0, 0])
    explain_model = lrpfx.transform(Chosen().eval(), EpsilonPlus(), example_inputs=(x, mask), capture="export")
    for one in (mask, torch.ones(6, dtype=torch.int64)):
        assert_close(explain_model(x, one), Chosen()(x, one), 1e-14)


def test_modules_whose_names_look_like_further_calls():
    """Importers of ONNX call modules conv@0 and conv@1, as torch numbers further calls of one module."""

    class Numbered(nn.Module):
        def __init__(self):
            super().__init__()
            for number, (before, after) in enumerate([(2, 3), (3, 3), (3, 2)]):
                self.add_module(f"conv@{number}", nn.Conv1d(before, after, 3))

        def forward(self, x):
            first, second, third = self.children()
            return third(second(second(first(x))))

    model, x = Numbered().eval(), torch.randn(2, 2, 12)
    names = ["conv@0", "conv@1", "conv@1_1", "conv@2"]
    composite = lrpfx.composites.GammaByDepth(low=-5.0, high=5.0)
    maps = []
    for capture in ("symbolic", "export"):
        explain_model = lrpfx.transform(model, composite, x, capture=capture, optimize=False)
        infos = [node_info(node) for node in explain_model.unfused_graph.nodes if node.op.startswith("call")]
        assert [info.name for info in infos] == names
        assert [info.module_path for info in infos] == ["conv@0", "conv@1", "conv@1", "conv@2"]
        assert [type(info.rule).__name__ for info in infos] == ["ZBox", "Gamma", "Gamma", "Gamma"]
        maps.append(lrpfx.attribute(explain_model, x, lambda output: output).relevance)
    assert_close(*maps)

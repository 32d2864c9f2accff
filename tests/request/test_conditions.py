"""Conditions and starts: relevance on some entries of a node alone, or from a hidden node on."""

import re
import warnings

import numpy as np
import pytest
import torch
from helpers import assert_close, torchvision_model
from torch import nn

import lrpfx
from lrpfx.composites import AttnLRP, EpsilonAlpha2Beta1, EpsilonGammaBox, EpsilonPlus, EpsilonPlusFlat
from lrpfx.concepts import Channel, Feature, Head, Neuron, Token
from lrpfx.errors import InputError, InputTypeError, LrpfxWarning

pytestmark = pytest.mark.filterwarnings("ignore:conditions.*leaves no relevance")


class Net(nn.Module):
    """Two blocks with a skip connection around the second."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.third = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 4, 1)
        self.classes = nn.Linear(4, 3)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        y = self.third(self.second(x).relu())
        return self.classes((x + y).relu().mean((2, 3)))


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, 2, 6, 6)


def attribution_model(composite=None, **settings):
    return lrpfx.transform(Net().eval(), composite or EpsilonPlus(), **settings)


def every(name, count):
    return [{name: [index]} for index in range(count)]


@pytest.mark.parametrize("composite", [EpsilonPlus(), EpsilonAlpha2Beta1(), EpsilonGammaBox(-4.0, 4.0), AttnLRP()])
@pytest.mark.parametrize("name, count", [("first", 4), ("relu", 4), ("add", 4), ("relu_2", 4), ("classes", 3)])
def test_channels_of_a_node_that_all_relevance_passes_add_up(composite, name, count, x):
    explain_model = attribution_model(composite)
    whole = lrpfx.attribute(explain_model, x, 1).relevance
    parts = lrpfx.attribute(explain_model, x, 1, conditions=every(name, count)).relevance
    assert parts.shape == (count, *x.shape)
    assert torch.allclose(parts.sum(0), whole, rtol=1e-10, atol=1e-12 * whole.abs().max())


def test_a_skip_connection_is_in_every_part(x):
    explain_model = attribution_model()
    whole = lrpfx.attribute(explain_model, x, 1).relevance
    parts = lrpfx.attribute(explain_model, x, 1, conditions=every("second", 6)).relevance
    around = lrpfx.attribute(explain_model, x, 1, conditions=[{"second": []}]).relevance[0]
    assert around.abs().max() > 1e-4 and not torch.allclose(parts.sum(0), whole)
    assert torch.allclose(parts.sum(0), whole - around + 6 * around, atol=1e-12)
    without = [{"second": [index], ("relu", "add"): []} for index in range(6)]
    through = lrpfx.attribute(explain_model, x, 1, conditions=without).relevance
    assert torch.allclose(through.sum(0), whole - around, atol=1e-12)


def test_masks_are_those_of_the_flow(x):
    """Against relevance that is masked by hand: the relevance of a node, propagated on from there."""
    explain_model = attribution_model(optimize=False)
    recorded = lrpfx.attribute(explain_model, x, 2, record="add").layers["add"]
    mask = torch.zeros(1, 4, 1, 1)
    mask[:, [1, 3]] = 1.0
    expected = lrpfx.attribute(explain_model, x, recorded * mask, start="add").relevance
    for wanted in ([1, 3], Channel(1, 3), [Channel(1), 3], np.array([1, 3]), mask, mask.bool(), torch.tensor([1, 3])):
        found = lrpfx.attribute(explain_model, x, 2, conditions=[{"add": wanted}], record="add")
        assert torch.allclose(found.relevance[0], expected, atol=1e-12)
        assert torch.equal(found.layers["add"][0], recorded * mask)


def test_conditions_at_several_nodes_all_hold(x):
    explain_model = attribution_model()
    both = lrpfx.attribute(explain_model, x, 0, conditions=[{"first": [2], "add": [1]}, {"add": [1]}], record="first")
    assert torch.equal(both.layers["first"][0][:, [0, 1, 3]], torch.zeros(2, 3, 6, 6))
    parts = [{"first": [index], "add": [1]} for index in range(4)]
    found = lrpfx.attribute(explain_model, x, 0, conditions=parts).relevance
    assert torch.allclose(found.sum(0), both.relevance[1], atol=1e-12) and torch.allclose(found[2], both.relevance[0])


@pytest.mark.parametrize("chunk_size", [None, 1, 4, 100])
def test_conditions_and_targets_equal_one_at_a_time(chunk_size, x):
    explain_model = attribution_model()
    conditions = [{"first": [0]}, {"second": [1, 2], "first": Neuron(1, 2, 3)}, {"add": torch.rand(1, 4, 6, 1)}]
    found = lrpfx.attribute(
        explain_model, x, targets=[0, 2], conditions=conditions, chunk_size=chunk_size, record="relu", constants=True
    )
    assert found.relevance.shape == (3, 2, *x.shape) and found.conditions == 3 and found.targets == 2
    for number, condition in enumerate(conditions):
        for place, target in enumerate([0, 2]):
            alone = lrpfx.attribute(explain_model, x, target, conditions=[condition], record="relu", constants=True)
            assert torch.allclose(found.relevance[number, place], alone.relevance[0], atol=1e-12)
            assert torch.allclose(found.layers["relu"][number, place], alone.layers["relu"][0], atol=1e-12)
    assert "3 conditions" in found._repr_html_()


def test_a_compiled_module_takes_other_masks_without_compiling(x):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    explain_model = attribution_model()
    compiled = torch.compile(explain_model, backend=backend)
    for conditions in (every("second", 3), [{"second": [4]}], [{"second": []}], [{"second": torch.rand(1, 6, 6, 6)}]):
        found = lrpfx.attribute(compiled, x, 1, conditions=conditions, record="relu")
        expected = lrpfx.attribute(explain_model, x, 1, conditions=conditions, record="relu")
        assert torch.allclose(found.relevance, expected.relevance, atol=1e-12)
        assert torch.allclose(found.layers["relu"], expected.layers["relu"], atol=1e-12)
    assert len(graphs) == 1


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
        self.classes = nn.Linear(8, 3)

    def forward(self, ids):
        return self.classes(self.layer(self.embedding(ids)).mean(1))


def test_heads_tokens_and_features():
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    for composite in (AttnLRP(), EpsilonPlus()):
        explain_model = lrpfx.transform(Attention().eval(), composite, example_inputs=ids)
        names = lrpfx.node_names(explain_model)
        weights = next(name for name in names if name.endswith("softmax"))
        whole = lrpfx.attribute(explain_model, ids, 1, record=[weights, "layer"]).layers
        assert whole[weights].ndim == 4 or composite is not None
        around = lrpfx.attribute(explain_model, ids, 1, conditions=[{weights: []}]).relevance[0]
        heads = lrpfx.attribute(explain_model, ids, 1, conditions=[{weights: Head(0)}, {weights: Head(1)}]).relevance
        total = lrpfx.attribute(explain_model, ids, 1).relevance
        assert torch.allclose(heads.sum(0) - around, total, atol=1e-10)
        tokens = lrpfx.attribute(explain_model, ids, 1, conditions=every("layer", 5), record="layer")
        assert torch.allclose(tokens.relevance.sum(0), total, atol=1e-10), "an index of a hidden state is a token"
        assert torch.equal(tokens.layers["layer"][3][:, :3], torch.zeros(1, 3, 8))
        named = lrpfx.attribute(explain_model, ids, 1, conditions=[{"layer": Token(3)}, {"layer": Feature(3)}], record="layer")
        assert torch.equal(named.layers["layer"][0], tokens.layers["layer"][3])
        assert named.layers["layer"][1][..., [0, 1, 2, 4]].abs().max() == 0.0
        dense = lrpfx.attribute(explain_model, ids, 1, conditions=[{"layer.linear1": [3]}], record="layer.linear1")
        assert dense.layers["layer.linear1"][0][..., [0, 1, 2, 4]].abs().max() == 0.0


def test_a_start_runs_what_is_before_it_alone(x):
    model = Net().eval()
    explain_model = lrpfx.transform(model, EpsilonPlusFlat())
    plain = lrpfx.transform(Net().eval(), EpsilonPlusFlat(), optimize=False)
    calls = []
    explain_model.get_submodule("classes").register_forward_hook(lambda *args: calls.append(1))
    value = lrpfx.attribute(explain_model, x, start="second").output
    assert value.shape == (2, 6, 6, 6) and not calls
    assert (value < 0).any(), "the shortcuts of the whole network expect no relevance there"
    for target in (3, [1, 5], Channel(1, 2), Neuron(1, 2, 3), None, torch.randn_like(value), lambda value: value.clamp(max=0)):
        found = lrpfx.attribute(explain_model, x, target, start="second")
        expected = lrpfx.attribute(plain, x, target, start="second")
        assert torch.allclose(found.relevance, expected.relevance, rtol=1e-10, atol=1e-12)
    several = lrpfx.attribute(explain_model, x, targets=[0, 3], start="second", record="relu")
    alone = lrpfx.attribute(plain, x, 3, start="second", record="relu")
    assert torch.allclose(several.layers["relu"][1], alone.layers["relu"], atol=1e-12)
    linear = lrpfx.attribute(lrpfx.transform(Net().eval(), AttnLRP()), x, 3, start="second")
    assert linear.output.shape == value.shape and linear.relevance.abs().max() > 0.0


def test_a_start_equals_a_model_that_ends_there():
    model = torchvision_model("resnet18").double()
    x = torch.rand(1, 3, 32, 32, dtype=torch.float64)
    explain_model = lrpfx.transform(model, EpsilonPlusFlat(), example_inputs=x)
    found = lrpfx.attribute(explain_model, x, 7, start="layer2.0.add").relevance

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            net = self.model
            x = net.layer1(net.maxpool(net.relu(net.bn1(net.conv1(x)))))
            block = net.layer2[0]
            y = block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x)))))
            return y + block.downsample(x)

    part = lrpfx.transform(Part().eval(), EpsilonPlusFlat(), example_inputs=x)

    def channel(output):
        relevance = torch.zeros_like(output)
        relevance[:, 7] = output[:, 7]
        return relevance

    assert torch.allclose(found, lrpfx.attribute(part, x, channel).relevance, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"conditions": {"first": [1]}}, InputTypeError, "conditions are a list of dicts"),
        ({"conditions": []}, InputTypeError, "conditions are a list of dicts"),
        ({"conditions": [{}]}, InputTypeError, "a condition is a dict"),
        ({"conditions": [{3: [1]}]}, InputTypeError, "at a node, or at an edge"),
        ({"conditions": [{"frist": [1]}]}, InputError, "no node or module named 'frist'; did you mean 'first'"),
        ({"conditions": [{("first", "add"): [1]}]}, InputError, "add does not read first; its readers are relu"),
        ({"conditions": [{"first": [4]}]}, InputError, "Channel(4): index 4 is out of range, since the value of first has"),
        ({"conditions": [{"first": [1.5]}]}, InputTypeError, "first takes indices, not 1.5"),
        ({"conditions": [{"first": [True]}]}, InputTypeError, "first takes indices, not True"),
        ({"conditions": [{"first": Neuron(1, 2)}]}, InputError, "Neuron(1, 2) has 2 indices"),
        ({"conditions": [{"first": Neuron(1, 2, 9)}]}, InputError, "index 9 is out of range"),
        ({"conditions": [{"classes": Head(1)}]}, InputError, "without such a dimension"),
        ({"conditions": [{"first": torch.ones(3)}]}, InputError, "the mask for first has the shape (3,)"),
        ({"conditions": [{"first": torch.tensor(torch.nan)}]}, InputError, "not finite"),
        ({"start": "relu_9"}, InputError, "no node or module named 'relu_9'"),
        ({"start": 3}, InputTypeError, "start is the name of a node"),
        ({"start": "first", "output": 0}, InputError, "pass one of them"),
        ({"start": "first", "record": "add"}, InputError, "first, where relevance starts, does not depend on add"),
        ({"start": "first", "target": torch.ones(2, 2)}, InputError, "relevance where it starts has shape (2, 2)"),
        ({"start": "first", "target": 9}, InputError, "index 9 is out of range"),
    ],
)
def test_what_is_no_condition(arguments, error, message, x):
    with pytest.raises(error, match=re.escape(message)):
        lrpfx.attribute(attribution_model(), x, **arguments)


@pytest.mark.filterwarnings("default")
def test_a_condition_that_cuts_everything_is_said(x):
    explain_model = attribution_model()
    with pytest.warns(LrpfxWarning, match=re.escape("conditions[1], {'add': []}, leaves no relevance")):
        lrpfx.attribute(explain_model, x, 1, conditions=[{"add": [0, 1, 2, 3]}, {"add": []}])
    with warnings.catch_warnings():
        warnings.simplefilter("error", LrpfxWarning)
        lrpfx.attribute(explain_model, x, 1, conditions=[{"add": [0, 1, 2, 3]}])
    assert lrpfx.attribute(explain_model, x, 1).relevance.any(), "a mask is gone after the call"


class Looked(nn.Module):
    """An embedding with a skip connection around a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.m, self.fc = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, ids):
        x = self.emb(ids)
        return self.fc((x + self.m(x)).relu().mean(1))


def test_conditions_at_embeddings():
    ids = torch.tensor([[1, 2, 3, 4]])
    explain_model = lrpfx.transform(Looked().eval(), EpsilonPlus(), example_inputs=ids)
    whole = lrpfx.attribute(explain_model, ids, 0).relevance
    conditions = [
        {"emb": Feature(*range(6))},
        {"emb": Feature(2)},
        {("emb", "m"): torch.tensor(1.0)},
        {"relu": Token(0, 1, 2, 3)},
    ]
    found = lrpfx.attribute(explain_model, ids, 0, conditions=conditions).relevance
    for number in (0, 2, 3):
        assert torch.allclose(found[number], whole, atol=1e-12)
    assert torch.allclose(found[1][..., 2], whole[..., 2], atol=1e-12) and found[1][..., [0, 1, 3, 4, 5]].abs().max() == 0.0
    compiled = lrpfx.attribute(torch.compile(explain_model, backend="eager"), ids, 0, conditions=conditions).relevance
    assert torch.allclose(compiled, found, atol=1e-12)
    with pytest.raises(InputError, match="ids carries no relevance"):
        lrpfx.attribute(explain_model, ids, 0, conditions=[{"ids": [1]}])


def test_optional_arguments_beside_masks():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x, m=None):
            return self.fc((x * m).relu())

    x, m = torch.randn(2, 4), torch.rand(2, 4)
    explain_model = lrpfx.transform(Net().eval(), EpsilonPlus(), example_inputs=(x, m))
    whole = lrpfx.attribute(explain_model, (x, m), 0, record="relu")
    found = lrpfx.attribute(explain_model, (x, m), 0, conditions=every("relu", 4))
    assert torch.allclose(found.relevance[0].sum(0), whole.relevance[0], atol=1e-12)
    compiled = lrpfx.attribute(torch.compile(explain_model, backend="eager"), (x, m), 0, record="relu")
    assert torch.allclose(compiled.layers["relu"], whole.layers["relu"], atol=1e-12)


def test_integers_are_no_masks(x):
    explain_model = attribution_model()
    for wanted in (torch.ones(4, dtype=torch.uint8), torch.tensor([1, 1, 0, 1])):
        with pytest.raises(InputTypeError, match="masks are boolean or floating point"):
            lrpfx.attribute(explain_model, x, 0, conditions=[{"first": wanted}])
    assert lrpfx.attribute(explain_model, x, targets=[0, 1], chunk_size=np.int64(2)).targets == 2


def test_channels_that_are_last():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.fc = nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, x):
            x = x.permute(0, 2, 3, 1)
            return self.fc((x + self.dense(x)).mean((1, 2)))

    x = torch.randn(1, 5, 4, 4)
    explain_model = lrpfx.transform(Last().eval(), EpsilonPlus(), example_inputs=x)
    whole = lrpfx.attribute(explain_model, x, 0).relevance
    parts = lrpfx.attribute(explain_model, x, 0, conditions=every("add", 5)).relevance
    assert torch.allclose(parts.sum(0), whole, atol=1e-12), "features of a dense layer"
    of_permuted, of_dense = (
        lrpfx.attribute(explain_model, x, 0, conditions=[{"permute": index}]).relevance for index in ([1], Feature(1))
    )
    assert torch.equal(of_permuted, of_dense), "the dense layer reads its features"


def test_an_edge_to_a_reader_that_reads_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv1d(2, 3, 1), nn.Linear(3, 2)

        def forward(self, x):
            hidden = self.conv(x).relu()
            return self.head((hidden + hidden).mean(2))

    x = torch.rand(2, 2, 5)
    explain_model = lrpfx.transform(Twice().eval(), EpsilonPlus(), example_inputs=x)
    with pytest.warns(lrpfx.LrpfxWarning, match="leaves no relevance"):
        found = lrpfx.attribute(explain_model, x, 0, conditions=[{("relu", "add"): []}])
    assert not found.relevance.any()
    halves = lrpfx.attribute(explain_model, x, 0, conditions=[{("relu", "add"): torch.tensor(0.5)}]).relevance[0]
    assert_close(halves, lrpfx.attribute(explain_model, x, 0).relevance / 2)


@pytest.mark.parametrize("record", [(), ["0", "1"]])
def test_several_together_in_other_memory_formats(record):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    x = torch.rand(2, 3, 8, 8)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    conditions = [{"0": [0]}, {"0": [1]}, {"0": [2, 3]}]
    expected = lrpfx.attribute(explain_model, x, targets=[0, 1], conditions=conditions, record=record)
    last = x.to(memory_format=torch.channels_last)
    for size in (2, 6):
        found = lrpfx.attribute(explain_model, last, targets=[0, 1], conditions=conditions, record=record, chunk_size=size)
        assert_close(found.relevance, expected.relevance)
        for name, relevance in expected.layers.items():
            assert_close(found.layers[name], relevance)


@pytest.mark.parametrize(
    "mask", [torch.zeros(2, 4, 6, 6, dtype=torch.long), torch.zeros(4, dtype=torch.complex64), np.array(["a"]), "0", {1: 2}]
)
def test_what_is_no_mask_is_an_error(mask):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 3)).eval()
    x = torch.rand(2, 3, 8, 8)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    with pytest.raises(InputError, match=r"masks are boolean or floating point|takes indices"):
        lrpfx.attribute(explain_model, x, 0, conditions=[{"0": mask}])


def test_pooling_that_returns_indices():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.pool, self.head = nn.MaxPool1d(2, return_indices=True), nn.Linear(3, 2)

        def forward(self, x):
            values, places = self.pool(x)
            return self.head(values.mean(2) + 0 * places.float().mean(2))

    x = torch.rand(2, 3, 4)
    explain_model = lrpfx.transform(Pooled().eval(), EpsilonPlus(), example_inputs=x)
    for settings in ({"record": "pool"}, {"conditions": [{"pool": [0]}]}):
        with pytest.raises(InputError, match="'pool' returns several tensors"):
            lrpfx.attribute(explain_model, x, 0, **settings)

"""What an index means at a node follows from the layers around it, or is an error."""

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.concepts import Channel, Feature, Head, Token, collect, relevances
from lrpfx.ir.node import node_info
from lrpfx.request.layouts import channel_dimension


class Mixed(nn.Module):
    """Images with channels first and last, joined, split, gated, and as a sequence."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.norm, self.gate = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1)
        self.scale = nn.Parameter(torch.rand(8))
        self.dense, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        joined = torch.cat([self.one(x), self.other(x)], 1).relu()
        normed = self.norm(joined)
        first, second = normed.chunk(2, 1)
        rejoined = torch.cat([second, first], 1)
        gated = rejoined * self.gate(rejoined.mean((2, 3), keepdim=True)).sigmoid()
        last = gated.permute(0, 2, 3, 1) * self.scale
        last = last + self.dense(last)
        back = last.permute(0, 3, 1, 2)
        unknown = back.reshape(len(x), 4, 16, 8)
        return self.head(unknown.reshape(len(x), 8, 64).sum(2) + back.mean((2, 3)))


class Sequences(nn.Module):
    """A convolution along time, then attention among its steps."""

    def __init__(self):
        super().__init__()
        self.conv, self.pool, self.norm = nn.Conv1d(2, 6, 3, padding=1), nn.MaxPool1d(2), nn.BatchNorm1d(6)
        self.dense, self.after, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        steps = self.norm(self.pool(self.conv(x).relu())).transpose(1, 2)
        heads = self.dense(steps).unflatten(-1, (2, 3)).transpose(1, 2)
        weights = (heads @ heads.transpose(-1, -2)).softmax(-1)
        mixed = (weights @ heads).transpose(1, 2).flatten(-2)
        return self.head(self.after(steps + mixed).mean(1))


class Videos(nn.Module):
    """Videos with channels last."""

    def __init__(self):
        super().__init__()
        self.conv, self.dense, self.head = nn.Conv3d(1, 4, 1), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.dense(self.conv(x).permute(0, 2, 3, 4, 1)).relu().mean((1, 2, 3)))


class Steps(nn.Module):
    """A recurrent network over steps that come first."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x.transpose(0, 1))[0].sum(0))


INPUTS = {Mixed: (2, 3, 8, 8), Sequences: (2, 2, 8), Videos: (2, 1, 2, 3, 3), Steps: (2, 5, 3)}
MEANINGS = {
    Mixed: {
        **dict.fromkeys(["x", "one", "cat", "relu", "norm", "chunk.0", "cat_1", "sigmoid", "mul", "permute_1"], Channel),
        **dict.fromkeys(["permute", "mul_1", "dense", "add", "head"], Feature),
        "reshape": None,
    },
    Sequences: {
        **dict.fromkeys(["x", "conv", "relu", "pool", "norm"], Channel),
        **dict.fromkeys(["transpose", "flatten", "add", "after"], Token),
        **dict.fromkeys(["softmax", "matmul_1"], Head),
        "dense": Feature,
    },
    Videos: {"conv": Channel, "permute": Feature, "dense": Feature, "relu": Feature},
    Steps: {"lstm.l0": None},
}


@pytest.fixture(params=list(MEANINGS), ids=lambda kind: kind.__name__)
def case(request):
    torch.manual_seed(0)
    x = torch.rand(INPUTS[request.param])
    explain_model = lrpfx.transform(request.param().eval(), EpsilonPlus(), example_inputs=x)
    names = dict.fromkeys(lrpfx.node_names(explain_model))
    meanings = {name: meaning for name, meaning in MEANINGS[request.param].items() if name in names}
    assert len(meanings) >= len(MEANINGS[request.param]) - 2, lrpfx.node_names(explain_model)
    return explain_model, x, meanings


@pytest.mark.filterwarnings("ignore:.*leaves no relevance")
def test_a_plain_index_means_what_the_layers_around_show(case):
    explain_model, x, meanings = case
    for name, meaning in meanings.items():
        if meaning is None:
            with pytest.raises(lrpfx.InputError, match=r"the graph does not show|samples or its steps first"):
                lrpfx.attribute(explain_model, x, 0, conditions=[{name: [1]}])
            continue
        plain, said = (
            lrpfx.attribute(explain_model, x, 0, conditions=[{name: index}, {name: 0}], record=name).layers[name]
            for index in ([1], meaning(1))
        )
        assert torch.equal(plain, said), name


def test_tables_and_collections_agree(case):
    explain_model, x, meanings = case
    for name, meaning in meanings.items():
        if meaning is None:
            with pytest.raises(lrpfx.InputError, match="say what is meant"):
                relevances(lrpfx.attribute(explain_model, x, 0, record=name), name)
            continue
        layer = collect(explain_model, x, name, target=0).facts.layers[name]
        assert layer.kind == (Feature if meaning is Token else meaning).__name__, name
        if meaning is not Token:
            assert relevances(lrpfx.attribute(explain_model, x, 0, record=name), name).kind == meaning.__name__.lower()


def test_the_features_of_recurrent_layers_are_last():
    torch.manual_seed(0)
    x = torch.rand(2, 5, 3)
    model = nn.LSTM(3, 4, batch_first=True)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = model, nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.lstm(x)[0].sum(1))

    explain_model = lrpfx.transform(Last().eval(), EpsilonPlus(), example_inputs=x)
    name = next(name for name in lrpfx.node_names(explain_model) if name.startswith("lstm"))
    assert collect(explain_model, x, name, target=0).facts.layers[name].kind == "Feature"


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return self.layer(x).permute(0, 2, 3, 1)


@pytest.mark.parametrize("target", [None, 1, lrpfx.Region(1)])
def test_classes_in_the_last_of_four_dimensions_are_refused(target):
    x = torch.randn(1, 3, 8, 6)
    explain_model = lrpfx.transform(ChannelsLast().eval(), lrpfx.composites.EpsilonPlus(), example_inputs=x)
    with pytest.raises(lrpfx.InputError, match=r"channels in dimension 3.*output\.movedim\(3, 1\)"):
        lrpfx.attribute(explain_model, x, target)
    moved = lrpfx.attribute(explain_model, x, lrpfx.Region(1), output=lambda output: output.movedim(3, 1))
    assert moved.relevance.any()


class Reduced(nn.Module):
    """A dense layer on what a function leaves of series (batch, 5, 3), or (batch, 3, 5)."""

    def __init__(self, change):
        super().__init__()
        self.change, self.dense = change, nn.Linear(3, 2)

    def forward(self, x):
        return self.dense(self.change(x))


REDUCTIONS = {
    "values": lambda x, dim: x.max(dim).values,
    "first": lambda x, dim: torch.min(x, dim)[0],
    "places, too": lambda x, dim: (lambda values, places: values + places.float())(*x.max(dim)),
    "size of one": lambda x, dim: x.max(dim, keepdim=True)[0].squeeze(dim),
    "median": lambda x, dim: x.median(dim)[0],
    "amax": lambda x, dim: x.amax(dim),
    "mean": lambda x, dim: x.mean(dim),
    "sum": lambda x, dim: x.sum(dim),
    "deviation": lambda x, dim: x.std(dim),
    "logarithm of a sum": lambda x, dim: x.logsumexp(dim),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dim", [1, 2])
def test_channels_are_followed_through_reductions(name, dim):
    """To the input, from the layer that reads what is left; and from a convolution to what is left of it."""
    torch.manual_seed(0)
    x = torch.rand(2, 5, 3) if dim == 1 else torch.rand(2, 3, 5)
    read = lrpfx.transform(Reduced(lambda x: REDUCTIONS[name](x, dim)).eval(), EpsilonPlus(), x)
    assert channel_dimension(next(iter(read.unfused_graph.nodes)), 3) == 3 - dim
    model = nn.Sequential(nn.Conv1d(2, 3, 1), Left(REDUCTIONS[name])).eval()
    made = lrpfx.transform(model, EpsilonPlus(), torch.rand(2, 2, 6))
    nodes = [node for node in made.unfused_graph.nodes if node_info(node).shape == (2, 3)]
    assert nodes and channel_dimension(nodes[0], 2) == 1


class Left(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(x, 2)


@pytest.mark.parametrize("kept", [lambda x: x.sort(2)[0], lambda x: x.topk(2, 2)[0], lambda x: x.cummax(2)[0]])
def test_channels_stay_where_others_are_sorted(kept):
    made = lrpfx.transform(
        nn.Sequential(nn.Conv1d(2, 3, 1), Reduced(lambda x: kept(x).mean(2))).eval(), EpsilonPlus(), torch.rand(2, 2, 6)
    )
    sorted_values = next(node for node in made.unfused_graph.nodes if "getitem" in node.name)
    assert channel_dimension(sorted_values, 3) == 1

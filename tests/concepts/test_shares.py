"""Tables of what carried relevance."""

import re

import pytest
import torch

import lrpfx
from lrpfx.attribution import Attribution
from lrpfx.concepts import Channel, Feature, Head, Neuron, Token, relevances
from lrpfx.errors import InputError, InputTypeError


@pytest.fixture
def attribution():
    layers = {
        "conv": torch.tensor([[[[1.0, 2.0]], [[-9.0, 1.0]], [[0.0, 0.5]]], [[[1.0, 0.0]], [[0.0, 0.0]], [[0.0, 0.5]]]]),
        "dense": torch.tensor([[3.0, -1.0], [0.0, 0.0]]),
        "hidden": torch.arange(12.0).reshape(2, 3, 2),
    }
    return Attribution(torch.zeros(2, 3), torch.zeros(2, 1), layers, meanings={"conv": Channel, "dense": Feature})


def test_shares_are_sums_over_positions(attribution):
    table = relevances(attribution, "conv")
    assert table.indices == [1, 0, 2] and [row.relevance for row in table] == [-8.0, 4.0, 1.0]
    assert [row.share for row in table] == [-8 / 13, 4 / 13, 1 / 13]
    assert [row.relevance for row in relevances(attribution, "conv", sample=0)] == [-8.0, 3.0, 0.5]
    assert [row.relevance for row in relevances(attribution, "conv", sample=-1)] == [1.0, 0.5, 0.0]
    assert [row.share for row in relevances(attribution, "dense", sample=1)] == [0.0, 0.0]
    assert relevances(attribution, "hidden", of=Token).indices == [2, 1, 0]
    assert [row.relevance for row in relevances(attribution, "hidden", of=Feature)] == [36.0, 30.0]


def test_tables(attribution):
    table = relevances(attribution, "conv")
    assert str(table).splitlines()[0] == "conv" and "-61.5%" in str(table) and "channel" in str(table)
    assert table.to_pandas().columns.tolist() == ["index", "relevance", "share"] and len(table[:2]) == 2
    assert table._repr_html_().startswith("<table")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layer": "cnov"}, InputError, "'cnov' was not recorded"),
        ({"layer": "hidden"}, InputError, "of=Token or of=Feature"),
        ({"layer": "conv", "of": Neuron}, InputTypeError, "neurons are not summed"),
        ({"layer": "conv", "of": int}, InputTypeError, "of= is Channel"),
        ({"layer": "dense", "of": Head}, InputError, "without a dimension of Heads"),
        ({"layer": "dense", "of": Token}, InputError, "without a dimension of Tokens"),
        ({"layer": "conv", "of": Channel, "sample": 2}, InputError, "sample 2 is out of range"),
    ],
)
def test_wrong_questions(attribution, arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        relevances(attribution, **arguments)


def test_attributions_of_several_targets_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2)).eval()
    explain_model = lrpfx.transform(model, lrpfx.composites.EpsilonPlus())
    several = lrpfx.attribute(explain_model, torch.ones(1, 3), targets=[0, 1], record="0")
    with pytest.raises(InputError, match="of one target"):
        relevances(several, "0")
    with pytest.raises(InputTypeError, match="relevances takes what"):
        relevances(several.layers, "0")

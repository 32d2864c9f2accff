"""Seeds of large outputs are held by their entries, and give the same maps as whole ones."""

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.attribution import seeds as module
from lrpfx.attribution.seeds import Seeds, entries_of, magnitude_of, whole
from lrpfx.composites import AttnLRP, DeepLIFT, EpsilonPlus


class Tokens(nn.Module):
    """Logits of 100 tokens at each of 70 positions, for ten samples."""

    def __init__(self):
        super().__init__()
        self.inner, self.logits = nn.Linear(4, 8), nn.Linear(8, 100)
        self.eval()

    def forward(self, x):
        return self.logits(self.inner(x).relu())


@pytest.fixture
def network():
    torch.manual_seed(0)
    return Tokens().double()


@pytest.fixture
def x():
    return torch.randn(10, 70, 4, dtype=torch.float64)


def test_what_is_held():
    few, many, small = torch.zeros(10, 70, 100), torch.ones(10, 70, 100), torch.zeros(3)
    few[2, 3, 4], few[9, 0, 0] = 5.0, -1.0
    seeds = Seeds(iter([few, many, small]))
    assert [one.layout for one in seeds.held] == [torch.sparse_coo, torch.strided, torch.strided]
    assert all(torch.equal(found, one) for found, one in zip(seeds, (few, many, small), strict=True))
    assert torch.equal(seeds[-3:][0], few) and len(seeds) == 3
    output = torch.randn(10, 70, 100)
    entries, values = entries_of(output, seeds.held[0])
    assert entries.tolist() == [output[2, 3, 4], output[9, 0, 0]] and values.tolist() == [5.0, -1.0]
    assert entries_of(output, many) == (output, many) and whole(many) is many
    assert [magnitude_of(one) for one in seeds.held] == [5.0, 7000.0, 0.0]


@pytest.mark.parametrize("composite", [AttnLRP(), EpsilonPlus(), DeepLIFT()], ids=repr)
def test_maps_are_those_of_whole_seeds(network, x, composite, monkeypatch):
    explain_model = lrpfx.transform(network, composite, x)
    of_entries = [index := torch.arange(10) * 7, torch.arange(10)]
    options = [
        {"target": (-1, 3)},
        {"target": (-1, {3: 1.0, 5: -1.0}), "record": ["inner", "logits"]},
        {"target": (-1, 3), "record": ["logits.*"] if isinstance(composite, AttnLRP) else []},
        {"targets": [(-1, 3), tuple(of_entries), (2, None)]},
        {"targets": [(-1, 3), (index, 4)], "chunk_size": 2},
        {"target": (-1, 3), "conditions": [{"inner": [2]}, {"inner": [3]}]},
    ]
    if isinstance(composite, DeepLIFT):
        options = [{**one, "reference": torch.zeros_like(x)} for one in options if "conditions" not in one]
    found = [lrpfx.attribute(explain_model, x, **one) for one in options]
    monkeypatch.setattr(module, "LARGE", 2**30)
    for one, held in zip(options, found, strict=True):
        expected = lrpfx.attribute(explain_model, x, **one)
        torch.testing.assert_close(held.relevance, expected.relevance, rtol=0, atol=0)
        assert float(expected.relevance.abs().max()) > 0
        torch.testing.assert_close(held.layers, expected.layers, rtol=0, atol=0)

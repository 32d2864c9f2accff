"""What the graph shows of tensors of one number."""

import operator

import torch
from torch import fx, nn

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.passes.constants import evaluated, number_filling


def sum_of_halves(graph, start, depth):
    """The start plus itself, halved, so many times: each value is used twice."""
    value = start
    for _ in range(depth):
        half = graph.call_function(operator.mul, (value, 0.5))
        value = graph.call_function(operator.add, (half, half))
    return value


def test_sums_of_numbers_may_be_deep_and_used_twice():
    graph = fx.Graph()
    ones = graph.call_function(torch.ones, (2, 2))
    assert number_filling(sum_of_halves(graph, ones, 2000)) == 1.0
    assert number_filling(graph.call_function(operator.add, (ones, 2))) == 3.0


def test_sums_with_data_are_no_number_however_deep():
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert number_filling(sum_of_halves(graph, x, 2000)) is None
    for _ in range(2000):  # the data is the first term or the last
        x = graph.call_function(operator.add, (x, graph.call_function(torch.relu, (x,))))
    assert number_filling(x) is None


class SelectedRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x, index):
        return torch.index_select(self.layer(x), 0, index).relu()


def test_entries_at_an_unknown_index_are_unknown_and_not_what_memory_holds():
    examples = torch.randn(5, 3), torch.tensor([1, 1, 4])
    graph = lrpfx.transform(SelectedRows(), EpsilonPlus(), examples).unfused_graph
    nodes = {node.name: node for node in graph.nodes}
    found = evaluated(nodes["index_select"], {nodes["layer"]: torch.rand(5, 4)})
    assert found.is_meta and found.shape == (3, 4)

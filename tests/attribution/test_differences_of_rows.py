"""Differences from a reference add up for each row of the operator table, or the row chooses entries."""

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import DeepLIFT
from lrpfx.operators import table
from lrpfx.operators.samples import Fixed, Signal, Weight

#: Rows whose samples choose entries or count them: what they choose for the reference may be other entries. What is held is a
#: constant, whose difference is in the ledger's account of constants.
CHOICES = {
    *("quantile", "nanquantile", "gather", "take_along_dim", "max_unpool", "median", "nanmedian", "mode", "kthvalue", "topk"),
    *("sort", "msort", "lt", "le", "gt", "ge", "signbit", "logical_and", "logical_or", "logical_xor", "bitwise_and"),
    *("bitwise_or", "bitwise_xor", "bitwise_not", "argmax", "argmin", "argsort", "searchsorted", "bucketize", "bincount"),
    *("sign", "sgn", "round", "floor", "ceil", "floor_divide", "histc", "one_hot", "held"),
}
#: Rows whose samples are no calls of a network: without signals, or with an argument that only the compiler gives.
OTHERS = {"outer", "vecdot", "embedding", "embedding_bag", "stochastic_depth", "index_put", "heaviside"}


class Sample(nn.Module):
    """The sample of a row as a network with one output: a sum of all entries of its results with different weights."""

    def __init__(self, row):
        super().__init__()
        self.row = row
        arguments = row.sample.arguments
        self.signals = [name for name, leaf in arguments.items() if type(leaf) is Signal]
        for name, leaf in arguments.items():
            if isinstance(leaf, (Weight, Fixed)):
                self.register_buffer(f"own_{name}", leaf.make())

    def run(self, *signals):
        given = dict(zip(self.signals, signals, strict=True))
        named = {
            name: given[name] if name in given else getattr(self, f"own_{name}", leaf)
            for name, leaf in self.row.sample.arguments.items()
        }
        result = self.row.sample.function(*named.values()) if self.row.sample.function else self.row.function(**named)
        total = torch.zeros(())
        for one in result if isinstance(result, (tuple, list)) else [result]:
            one = torch.view_as_real(one) if one.is_complex() else one
            if one.is_floating_point():
                total = total + (one * torch.arange(one.numel()).cos().reshape(one.shape)).sum()
        return total.reshape(1, 1)


class OfOne(Sample):
    def forward(self, a):
        return self.run(a)


class OfTwo(Sample):
    def forward(self, a, b):
        return self.run(a, b)


class OfThree(Sample):
    def forward(self, a, b, c):
        return self.run(a, b, c)


class OfFour(Sample):
    def forward(self, a, b, c, d):
        return self.run(a, b, c, d)


def signals_of(row):
    return [leaf for leaf in row.sample.arguments.values() if type(leaf) is Signal]


ROWS = [row.name for row in table.all_operators() if row.sample is not None and row.name not in OTHERS and signals_of(row)]


@pytest.mark.filterwarnings("ignore:relevance adds up to", "ignore:the map is")
@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ROWS)
def test_relevance_adds_up_to_the_difference(name):
    row = table.operator_named(name)
    leaves = signals_of(row)
    model = [OfOne, OfTwo, OfThree, OfFour][len(leaves) - 1](row).eval()
    x, reference = (tuple(leaf.make() for leaf in leaves) for _ in range(2))
    attribution = lrpfx.attribute(lrpfx.transform(model, DeepLIFT(), x, capture="export"), x, 0, reference=reference)
    explained = sum(float(one.sum()) for one in attribution.relevance if one is not None)
    outputs = float(model(*x)), float(model(*reference))
    adds_up = abs(explained - (outputs[0] - outputs[1])) <= 1e-9 * max(map(abs, outputs))
    assert adds_up or name in CHOICES

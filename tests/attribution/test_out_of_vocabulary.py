"""Errors for inputs on which a model cannot run: indices outside of an embedding, and dtypes that do not fit."""

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import AttnLRP, DeepLIFT, EpsilonPlus


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(10, 8), nn.Embedding(6, 8), nn.Linear(8, 3)

    def forward(self, ids):
        return self.out((self.words(ids) + self.places(torch.cumsum(torch.ones_like(ids), 1) - 1)).mean(1))


@pytest.fixture(params=["symbolic", "export"])
def explain_model(request):
    return lrpfx.transform(Words().eval(), AttnLRP(), example_inputs=torch.ones(2, 4, dtype=torch.int64), capture=request.param)


@pytest.mark.parametrize("as_input", [lambda ids: ids, lambda ids: {"ids": ids}, lambda ids: (ids,)])
def test_ids_outside_of_the_vocabulary(explain_model, as_input):
    ids = as_input(torch.tensor([[1, 10, 2, 3], [0, 11, -1, 9]]))
    message = r"the embedding words has 10 entries, but the indices of the input 'ids' include -1, 10, 11: valid are 0 to 9"
    for options in ({}, {"record": "out"}, {"constants": True}):
        with pytest.raises(lrpfx.InputError, match=message):
            lrpfx.attribute(explain_model, ids, 1, **options)
    with pytest.raises(lrpfx.InputError, match=message):
        lrpfx.ledger(explain_model, ids, 1)


@pytest.mark.parametrize("capture", ["symbolic", "export"])
def test_references_outside_of_the_vocabulary(capture):
    ids = torch.ones(2, 4, dtype=torch.int64)
    explain_model = lrpfx.transform(Words().eval(), DeepLIFT(), example_inputs=ids, capture=capture)
    of_reference = "the embedding words has 10 entries, but the indices of the reference of the input 'ids' include 10"
    of_input = "the embedding words has 10 entries, but the indices of the input 'ids' include 11"
    for explained in (lrpfx.attribute, lrpfx.ledger):
        with pytest.raises(lrpfx.InputError, match=of_reference):
            explained(explain_model, ids, 1, reference=10)
        for reference in (10, 0, {"ids": torch.full_like(ids, 11)}):
            with pytest.raises(lrpfx.InputError, match=of_input):
                explained(explain_model, ids + 10, 1, reference=reference)


def test_many_ids_are_not_all_listed(explain_model):
    with pytest.raises(lrpfx.InputError, match=r"include 20, 21, 22, 23, 24, \.\.\.: valid"):
        lrpfx.attribute(explain_model, torch.arange(20, 26)[None].repeat(2, 1), 1)


def test_positions_beyond_the_longest_sequence():
    explain_model = lrpfx.transform(Words().eval(), AttnLRP())
    with pytest.raises(
        lrpfx.InputError, match=r"the embedding places has 6 entries, .* positions of a long sequence, include 6, 7"
    ):
        lrpfx.attribute(explain_model, torch.ones(2, 8, dtype=torch.int64), 1)


def test_other_errors_of_indices_are_not_blamed_on_embeddings():
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(10, 8)

        def forward(self, ids):
            return self.words(ids)[:, 5]

    explain_model = lrpfx.transform(Picks().eval(), EpsilonPlus())
    with pytest.raises(lrpfx.InputError, match=r"cannot run on these inputs.*IndexError"):
        lrpfx.attribute(explain_model, torch.ones(2, 4, dtype=torch.int64), 1)


def test_dtypes_that_the_model_itself_does_not_mix():
    class InSingle(Words):
        def forward(self, ids):
            return self.out(self.words(ids).float().mean(1))

    explain_model = lrpfx.transform(InSingle().float().eval(), AttnLRP(), capture="symbolic").to(torch.bfloat16)
    with pytest.raises(
        lrpfx.InputError, match=r"tensors of different dtypes meet in forward, and the parameters are torch.bfloat16"
    ):
        lrpfx.attribute(explain_model, torch.ones(2, 4, dtype=torch.int64), 1)

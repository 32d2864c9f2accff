"""Contributions of letters: as its definition says, and on a network that reads planted motifs."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lrpfx
from lrpfx.attribution import hypothetical_contributions
from lrpfx.composites import DeepLIFT

LETTERS, LENGTH = 4, 30


def one_hot(letters):
    return F.one_hot(letters, LETTERS).transpose(1, 2).to(torch.get_default_dtype())


def random_sequences(count):
    return one_hot(torch.randint(0, LETTERS, (count, LENGTH)))


def network():
    torch.manual_seed(0)
    layers = [nn.Conv1d(4, 8, 5, padding=2), nn.ReLU(), nn.MaxPool1d(3), nn.Conv1d(8, 8, 3), nn.GELU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.LayerNorm(64), nn.Linear(64, 2)).eval()


def test_contributions_are_those_of_the_definition():
    model, x, reference = network(), random_sequences(3), random_sequences(3)
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    found = hypothetical_contributions(explain_model, x, 1, reference=reference)
    attribution = lrpfx.attribute(explain_model, x, 1, reference=reference, record_multipliers="input")
    multipliers = attribution.multipliers["input"]
    torch.testing.assert_close(multipliers * (x - reference), attribution.relevance)
    for letter in range(LETTERS):
        other = torch.zeros_like(x)
        other[:, letter] = 1.0
        torch.testing.assert_close(found[:, letter], (multipliers * (other - reference)).sum(1))
    torch.testing.assert_close((found * x).sum(1), attribution.relevance.sum(1))
    torch.testing.assert_close((found * x).sum((1, 2)), (model(x) - model(reference))[:, 1].detach())


def test_several_references_are_averaged():
    x, references = random_sequences(2), [random_sequences(2) for _ in range(3)]
    explain_model = lrpfx.transform(network(), DeepLIFT(), x)
    each = [hypothetical_contributions(explain_model, x, 0, reference=one) for one in references]
    torch.testing.assert_close(hypothetical_contributions(explain_model, x, 0, reference=references), sum(each) / 3)


MOTIF = torch.tensor([2, 0, 3, 3, 1, 0])


class ReadsMotif(nn.Module):
    """The logarithm of one more than how well the best place fits the motif: attention over positions pools the fits."""

    def __init__(self):
        super().__init__()
        self.fit = nn.Conv1d(LETTERS, 1, len(MOTIF))
        with torch.no_grad():
            self.fit.weight.copy_(2 * F.one_hot(MOTIF, LETTERS).T[None] - 0.5)
            self.fit.bias.fill_(-4.0)

    def forward(self, x):
        fit = F.softplus(self.fit(x))
        return (fit * fit.softmax(2)).sum(2)


def test_planted_motifs_are_found():
    torch.manual_seed(1)
    letters = torch.randint(0, LETTERS, (8, LENGTH))
    places = torch.randint(0, LENGTH - len(MOTIF), (8,))
    for row, place in enumerate(places):
        letters[row, place : place + len(MOTIF)] = MOTIF
    x = one_hot(letters)
    shuffled = [x[:, :, torch.randperm(LENGTH)] for _ in range(8)]
    model = ReadsMotif().eval()
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    contributions = hypothetical_contributions(explain_model, x, 0, reference=shuffled)
    expected = model(x) - torch.stack([model(one) for one in shuffled]).mean(0)
    torch.testing.assert_close((contributions * x).sum((1, 2)), expected[:, 0].detach())
    for row, place in enumerate(places):
        own = (contributions * x)[row].sum(0)
        inside = own[place : place + len(MOTIF)].sum()
        assert inside > 0.8 * own.sum()
        assert torch.equal(contributions[row, :, place : place + len(MOTIF)].argmax(0), MOTIF)


@pytest.mark.parametrize("change", [lambda x: x[0], lambda x: x + 0.1, lambda x: torch.zeros_like(x), torch.ones_like])
def test_sequences_are_one_hot(change):
    x = random_sequences(2)
    explain_model = lrpfx.transform(network(), DeepLIFT(), x)
    with pytest.raises(lrpfx.InputError, match="sequences are one-hot") as error:
        hypothetical_contributions(explain_model, change(x), 0, reference=0)
    assert error.value.topic == "references"


def test_other_composites_have_no_contributions():
    x = random_sequences(2)
    explain_model = lrpfx.transform(network(), lrpfx.composites.EpsilonPlus(), x)
    with pytest.raises(lrpfx.InputError, match="0 inputs have one here"):
        hypothetical_contributions(explain_model, x, 0, reference=0)


@pytest.mark.parametrize("reference", [{"input": 0.25}, (0.25,), [], None, [torch.zeros(1), None]])
def test_references_of_sequences_are_tensors_or_numbers(reference):
    x = random_sequences(2)
    with pytest.raises(lrpfx.InputTypeError, match="a tensor, a number or a list of these") as error:
        hypothetical_contributions(lrpfx.transform(network(), DeepLIFT(), x), x, 0, reference=reference)
    assert error.value.topic == "references"

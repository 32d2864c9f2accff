"""Choices that rounding decides do not refuse a model; other differences do."""

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.passes.choices import RecordChoices, RepeatChoices
from lrpfx.passes.driver import Verification
from lrpfx.pipeline import normal_form

CHOOSING = {
    "topk": lambda x: x.topk(2).indices,
    "topk along another dimension": lambda x: torch.topk(x.mT, 2, dim=-2).indices.mT,
    "sort": lambda x: x.sort(descending=True).indices[:, :2],
    "stable sort": lambda x: torch.sort(x, stable=True, dim=1, descending=True).indices,
    "argsort": lambda x: x.argsort(1, descending=True),
    "max": lambda x: x.max(1).indices,
    "max, dimension kept": lambda x: x.max(1, keepdim=True).indices,
    "min": lambda x: (-x).min(1).indices,
    "argmax": lambda x: x.argmax(-1),
    "argmax of all": lambda x: x.argmax(),
    "argmin": lambda x: (-x).argmin(1, keepdim=True),
    "kthvalue": lambda x: x.kthvalue(4, 1).indices,
    "median": lambda x: x[:, [0, 1, 2]].median(1).indices,
    "greater": lambda x: x > 0.9,
    "at least": lambda x: x[:, 0] >= x[:, 1],
    "less": lambda x: x.lt(x[:, 1:2]),
    "at most": lambda x: x <= 0.9,
}


def scores(difference):
    """Two large scores that differ by this, beside small ones; the first row hides some."""
    return torch.tensor([[0.9, 0.9, 0.5, -torch.inf], [0.9, 0.9, 0.1, 0.5]]) + torch.tensor([difference, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("name", CHOOSING)
@pytest.mark.parametrize("tolerance, repeated", [(1e-2, True), (1e-4, False)])
def test_choices_are_repeated_within_the_tolerance(name, tolerance, repeated):
    choose = CHOOSING[name]
    made, own = choose(scores(-1e-3)), choose(scores(1e-3))
    assert not torch.equal(made, own)
    with RecordChoices() as record:
        choose(scores(-1e-3))
    with RepeatChoices(record.made, lambda dtype: tolerance):
        found = choose(scores(1e-3))
    assert torch.equal(found, made if repeated else own)


def test_results_belong_to_the_repeated_choice():
    with RecordChoices() as record:
        scores(-1e-3).topk(1)
    own = scores(1e-3)
    with RepeatChoices(record.made, lambda dtype: 1e-2):
        values, indices = own.topk(1)
    assert torch.equal(values, own.gather(1, indices)) and indices.flatten().tolist() == [1, 1]


def test_other_calls_than_those_recorded_make_their_own_choices():
    with RecordChoices() as record:
        scores(-1e-3).argmax(1)
        torch.tensor([2, 1]).argmax()  # integers are not rounded
    with RepeatChoices(record.made, lambda dtype: 1e-2):
        assert scores(1e-3)[:1].argmax(1).tolist() == [0]  # another shape
        assert scores(1e-3).argmax(1).tolist() == [0, 0]  # there is no second one
    assert sum(map(len, record.made.values())) == 1


class Mixture(nn.Module):
    """Each row goes to the expert with the highest score; `nudge` is added to the scores of the first expert."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 8, 8, dtype=dtype))
        self.router = nn.Parameter(torch.randn(4, 8, dtype=dtype))
        self.nudge = nn.Parameter(torch.zeros(4, dtype=dtype))
        with torch.no_grad():
            self.router[1] = self.router[0]  # a tie for every row in which the first two experts win
        self.eval()

    def forward(self, x):
        weights, chosen = (torch.nn.functional.linear(x, self.router) + self.nudge).float().softmax(-1).max(-1)
        return (x[:, None] @ self.experts[chosen])[:, 0] * weights[:, None].to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_flipped_routing_does_not_refuse_the_model(dtype):
    model, x = Mixture(dtype), torch.randn(32, 8, dtype=dtype)
    program, verification = normal_form(model, x, capture="export")
    step = torch.finfo(dtype).eps / 4

    def with_nudge(size):
        with torch.no_grad():
            dict(program.root.named_parameters())["nudge"].copy_(torch.tensor([-size, size, 0.0, 0.0]))

    with_nudge(step)
    flipped = Verification((x,), verification.expected, again=verification.again)
    flipped.check(program, "a pass that rounds otherwise")
    alone = Verification((x,), verification.expected)
    with pytest.raises(lrpfx.VerificationError):
        alone.check(program, "a pass that rounds otherwise")
    with_nudge(1.0)
    with pytest.raises(lrpfx.VerificationError, match="does not compute the same"):
        flipped.check(program, "a pass that routes otherwise")
    with_nudge(step)
    with torch.no_grad():
        dict(program.root.named_parameters())["experts"][0].neg_()
    with pytest.raises(lrpfx.VerificationError, match="does not compute the same"):
        flipped.check(program, "a pass that changes an expert")


def test_an_ordinary_mixture_is_transformed():
    model, x = Mixture(), torch.randn(32, 8, dtype=torch.bfloat16)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert torch.equal(explain_model(x), model(x))

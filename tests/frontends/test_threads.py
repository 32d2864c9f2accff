"""torch.export marks the whole process as exporting, but only its own thread is."""

import threading

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.runtime import explain_module


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(x.shape[1]):
            x = self.layer(x).relu()
        return x


def exported():
    x = torch.randn(2, 4)
    explain_model = lrpfx.transform(Repeated().eval(), EpsilonPlus(), example_inputs=x, capture="export")
    lrpfx.attribute(explain_model, x, lambda output: output)


def lowered():
    x = torch.randn(2, 4)
    lrpfx.lower(lrpfx.transform(nn.Linear(4, 3).eval(), EpsilonPlus(), example_inputs=x), x)


@pytest.mark.parametrize("work", [exported, lowered])
def test_tracers_in_several_threads(work):
    failures = []

    def run():
        try:
            work()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_an_explainable_module_runs_while_another_thread_exports(monkeypatch):
    x = torch.randn(2, 4)
    explain_model = lrpfx.transform(Repeated().eval(), EpsilonPlus(), example_inputs=x)
    expected = lrpfx.attribute(explain_model, x, lambda output: output).relevance
    monkeypatch.setattr(explain_module.torch.compiler, "is_exporting", lambda: True)
    assert torch.equal(lrpfx.attribute(explain_model, x, lambda output: output).relevance, expected)


class FourBits(nn.Module):
    """A layer whose weight is integers, as those of quantizers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randint(0, 15, (3, 4), dtype=torch.uint8), requires_grad=False)
        self.scale, self.dense = nn.Parameter(torch.tensor(0.1)), nn.Linear(3, 2)

    def forward(self, x):
        return self.dense(nn.functional.linear(x, (self.weight.to(x.dtype) - 7) * self.scale).relu())


def test_parameters_of_integers_have_no_gradient():
    model, x = FourBits().eval(), torch.randn(2, 4)
    found = [
        lrpfx.attribute(lrpfx.transform(model, EpsilonPlus(), example_inputs=x, capture=capture), x, 0).relevance
        for capture in ("symbolic", "export")
    ]
    torch.testing.assert_close(found[1], found[0])
    assert lrpfx.check(model, EpsilonPlus(), x)

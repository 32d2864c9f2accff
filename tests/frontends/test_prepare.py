"""The model that captures start from."""

from types import SimpleNamespace

import torch
from torch import nn

from lrpfx.frontends.prepare import prepare
from lrpfx.support.modules import private_copy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.dense = nn.Linear(3, 2)

    def forward(self, x):
        return self.dense(x)


class Doubling:
    """A canonizer that writes into parameters."""

    def apply(self, model):
        model.dense.weight.data *= 2


def test_a_model_that_needs_no_change_is_not_copied():
    model = nn.Linear(3, 2).eval()
    assert prepare(model).model is model


def test_all_changes_are_made_on_one_copy(monkeypatch):
    copies = []

    def counted(*args, **options):
        copies.append(private_copy(*args, **options))
        return copies[-1]

    monkeypatch.setattr("lrpfx.frontends.prepare.private_copy", counted)
    model = Model().eval()
    before = model.dense.weight.detach().clone()
    prepared = prepare(model, [Doubling()]).model
    assert len(copies) == 1 and not prepared.config.use_cache and model.config.use_cache
    assert torch.equal(prepared.dense.weight, 2 * before) and torch.equal(model.dense.weight, before)
    assert prepare(model).model.dense.weight is model.dense.weight

"""A count of compilations, and a small network, explained."""

import pytest
from data_sets import small_explain_model

from lrpfx.adapters import compilations


@pytest.fixture
def compiled(monkeypatch):
    """The models that adapters have compiled in the test."""
    models = []

    def transform(model, *args, **keywords):
        models.append(model)
        return original(model, *args, **keywords)

    original = compilations.transform
    monkeypatch.setattr(compilations, "transform", transform)
    return models


@pytest.fixture(scope="session")
def explain_model():
    return small_explain_model()

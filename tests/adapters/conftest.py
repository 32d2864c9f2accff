"""A count of compilations."""

import pytest

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

"""The small network, explained."""

import pytest
from data_sets import small_explain_model


@pytest.fixture(scope="session")
def explain_model():
    return small_explain_model()

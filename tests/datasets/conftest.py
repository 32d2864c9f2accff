"""The small network, explained."""

from pathlib import Path

import pytest
from data_sets import small_explain_model


@pytest.fixture(scope="session")
def explain_model():
    return small_explain_model()


def pytest_collection_modifyitems(items):
    """Most data sets here have samples that cannot be explained, of which a warning is given."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore:.*could not be explained:lrpfx.errors.LrpfxWarning"))

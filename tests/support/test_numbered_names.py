"""Names that are told apart by numbers."""

import pytest

from lrpfx.support.numbered_names import numbered


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["crane", "ox", "crane"], ["crane", "ox", "crane (2)"]),
        (["crane", "crane (2)", "crane", "crane"], ["crane", "crane (2)", "crane (3)", "crane (4)"]),
        ([], []),
    ],
)
def test_equal_names_are_numbered(names, expected):
    assert numbered(names) == expected

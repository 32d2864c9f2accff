"""Checks of numbers."""

import numpy as np
import pytest

from lrpfx.errors import InputError
from lrpfx.support.numbers import is_whole, whole_number


@pytest.mark.parametrize(
    "value, whole", [(3, True), (np.int8(-2), True), (True, False), (np.bool_(1), False), (2.0, False), ("2", False)]
)
def test_whole_numbers(value, whole):
    assert is_whole(value) is whole
    if whole:
        assert type(whole_number(value, "size is a number", -2)) is int


def test_whole_numbers_that_are_too_small():
    with pytest.raises(InputError, match=r"^size is a number, 1 or more, not 0$") as caught:
        whole_number(0, "size is a number", 1, "heatmaps")
    assert caught.value.topic == "heatmaps"

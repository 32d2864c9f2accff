"""Targets mean what they mean in Captum."""

import numpy as np
import pytest
import torch

pytest.importorskip("captum")

from captum._utils.common import _select_targets

from lrpfx.adapters.captum_targets import chosen_entries
from lrpfx.errors import InputError, InputTypeError

SHAPES_AND_TARGETS = [
    ((3,), None),
    ((3, 1), None),
    ((3, 1, 1), None),
    ((3, 4), 2),
    ((3, 4), -1),
    ((3, 4), (2,)),
    ((3, 4), [0, 3, 1]),
    ((3, 4), [(0,), (3,), (1,)]),
    ((3, 4), torch.tensor(2)),
    ((3, 4), torch.tensor([2])),
    ((3, 4), torch.tensor([[2]])),
    ((3, 4), torch.tensor([0, 3, 1])),
    ((3, 4), torch.tensor([0, 3, 1], dtype=torch.uint8)),
    ((1, 4), torch.tensor([3])),
    ((1, 4), [3]),
    ((3, 4, 5), (2, 4)),
    ((3, 4, 5), (2, -5)),
    ((3, 4, 5), [(2, 4), (0, 0), (3, 1)]),
    ((3, 4, 1), 2),
    ((3, 2, 3, 4), (1, 2, 3)),
]


@pytest.mark.parametrize(("shape", "target"), SHAPES_AND_TARGETS)
def test_entries_are_those_that_captum_selects(shape, target):
    output = torch.randn(shape)
    wide = target.long() if isinstance(target, torch.Tensor) else target  # Captum's gather takes no smaller integers
    expected = _select_targets(output, wide).flatten()
    assert torch.equal(output.flatten()[chosen_entries(output, target)], expected)


@pytest.mark.parametrize("target", [np.int64(2), np.array([2, 0, 1]), [np.int64(0), np.int64(1), torch.tensor(2)]])
def test_numbers_of_numpy_are_ints(target):
    numbers = np.broadcast_to(np.array([int(one) for one in np.atleast_1d(target)]), 3)
    assert chosen_entries(torch.randn(3, 4), target).tolist() == [4 * sample + number for sample, number in enumerate(numbers)]


WRONG = [
    ((3, 4), None, InputError, "pass target="),
    ((), None, InputError, "one number for all samples"),
    ((0, 4), 1, InputError, "no samples"),
    ((3, 4), 4, InputError, "out of range"),
    ((3, 4), -5, InputError, "out of range"),
    ((3,), 0, InputError, "out of range"),
    ((3, 4), (1, 1), InputError, "out of range"),
    ((3, 4, 5), 1, InputError, "more than one number per sample"),
    ((3, 4, 5), [1, 1, 1], InputError, "more than one number per sample"),
    ((3, 4), [0, 1], InputError, "2 entries, but there are 3 samples"),
    ((3, 4), torch.tensor([0, 1]), InputError, "2 entries, but there are 3 samples"),
    ((3, 4), torch.zeros(3, 1, dtype=torch.int64), InputError, "one int for each sample"),
    ((3, 4), torch.tensor(1.0), InputTypeError, "holds ints, not torch.float"),
    ((3, 4), torch.tensor(True), InputTypeError, "holds ints, not torch.bool"),
    ((3, 4), True, InputTypeError, "an int or a tuple of ints"),
    ((3, 4), "1", InputTypeError, "an int or a tuple of ints"),
    ((3, 4), 1.0, InputTypeError, "an int or a tuple of ints"),
    ((3, 4), [0, None, 1], InputTypeError, "an int or a tuple of ints"),
]


@pytest.mark.parametrize(("shape", "target", "error", "message"), WRONG)
def test_targets_that_do_not_fit_are_errors(shape, target, error, message):
    with pytest.raises(error, match=message):
        chosen_entries(torch.randn(shape), target)

"""Bootstrap intervals cover what they promise, and all rows are resampled alike."""

import torch

from lrpfx.measures.intervals import interval, resampled_means


def test_intervals_cover_as_they_promise():
    """Of 400 samples of 40 normal numbers, about 95 % of the intervals contain the true mean."""
    values = torch.randn(400, 40, generator=torch.Generator().manual_seed(1)) + 2.0
    low, high = interval(resampled_means(values, 2000))
    assert 0.91 <= float(((low < 2.0) & (high > 2.0)).double().mean()) <= 0.97
    standard_error = values.std(1) / 40**0.5
    torch.testing.assert_close((high - low).mean(), 2 * 1.96 * standard_error.mean(), rtol=0.05, atol=0.0)


def test_rows_are_resampled_alike():
    values = torch.randn(1, 30).expand(2, -1) + torch.tensor([[0.0], [1.0]])
    means = resampled_means(values, 100)
    torch.testing.assert_close(means[1] - means[0], torch.ones(100))
    assert torch.equal(means, resampled_means(values, 100)) and means[0].std() > 0.0

"""Rounded values, and the sizes of chunks and blocks."""

import numpy as np
import pytest

from lrpfx.datasets.layout import ArrayLayout, default_block, rounded


@pytest.mark.parametrize("exponent", [-110, -20, 0, 20, 126])
def test_rounded_values(exponent):
    """Those of float16, whatever their size: plain float16 would lose small values, and large ones."""
    values = np.random.default_rng(0).uniform(1, 2, (5, 3, 40)).astype(np.float32) * np.float32([[-1], [1], [1]])
    found = rounded(np.ldexp(values, exponent))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.ldexp(values.astype(np.float16).astype(np.float32), exponent))


def test_rounded_zeros_missing_values_and_halves():
    largest = np.finfo(np.float32).max
    values = np.array([0.0, -0.0, np.nan, largest, 1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11 - 2.0**-20], dtype=np.float32)
    expected = [0.0, -0.0, np.nan, 2.0**128 - 2.0**117, 1.0, 1 + 2.0**-9, -1 - 2.0**-10]
    found = rounded(values)
    np.testing.assert_array_equal(found, np.array(expected, dtype=np.float32))
    assert np.signbit(found).tolist() == np.signbit(values).tolist()


@pytest.mark.parametrize("block", [1, 7, 16, 1000, 1024, 2048])
@pytest.mark.parametrize("shape", [(), (1, 8, 8), (3, 224, 224), (512, 512, 512)])
def test_chunks_divide_blocks(block, shape):
    one = ArrayLayout("relevance", shape, "float32", ("sample", *map(str, range(len(shape)))))
    rows = one.chunk_rows(block)
    assert block % rows == 0 and (rows == 1 or rows * one.row_bytes <= 1 << 18)


@pytest.mark.parametrize(
    ("shape", "batch", "inputs", "block"),
    [((1, 8, 8), 64, 64, 4096), ((3, 224, 224), 8, 1, 24), ((3, 224, 224), 64, 1, 64), ((8, 1, 1), 32, 3 * 224 * 224 * 4, 96)],
)
def test_default_blocks_are_whole_batches(shape, batch, inputs, block):
    layouts = [ArrayLayout("relevance", shape, "float32", ("sample", "1", "2", "3"))]
    assert default_block(layouts, batch, inputs) == block

"""Values in float16 with a scale, texts in bytes, and the sizes of chunks and blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrpfx.datasets.layout import ArrayLayout, default_block, scaled, text_rows, texts_of


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1e-37, 8e-7, 1.0, 1e6, 3e38])
def test_scaled_values(size, dtype):
    """Rounding to eleven bits; plain float16 would lose small values altogether."""
    values = (np.random.default_rng(0).standard_cauchy((5, 3, 40)) * 1e-3).clip(-1, 1).astype(dtype) * np.dtype(dtype).type(
        size
    )
    stored, factors = scaled(values)
    assert stored.dtype == np.float16 and np.isfinite(stored).all() and factors.dtype == np.float32
    back = stored.astype(np.float64) * factors.astype(np.float64)[:, None, None]
    largest = np.abs(values).max((1, 2), keepdims=True)
    seen = np.abs(values) > largest * 2.0**-28
    assert (np.abs(back - values)[seen] <= np.abs(values)[seen] * 2.0**-11).all()
    assert (np.abs(back - values) <= largest * 2.0**-39 + np.abs(values) * 2.0**-11).all()
    assert (np.frexp(factors)[0] == 0.5).all()  # powers of two


def test_scaled_zeros_and_missing_values():
    stored, factors = scaled(np.array([[0.0, -0.0], [np.nan, np.nan], [2.0, -4.0]], dtype=np.float32))
    assert (stored[0] == 0).all() and np.isnan(stored[1]).all() and np.isnan(factors).tolist() == [False, True, False]
    assert (stored[2].astype(np.float32) * factors[2]).tolist() == [2.0, -4.0]


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=4), st.integers(1, 40))
def test_texts(texts, size):
    found = texts_of(text_rows(texts, size))
    for one, text in zip(found, texts, strict=True):
        assert text.startswith(one) and (len(text.encode()) > size or one == text)
        assert len(one.encode()) > size - 4 or one == text


@pytest.mark.parametrize("block", [1, 7, 16, 1000, 1024, 2048])
@pytest.mark.parametrize("shape", [(), (1, 8, 8), (3, 224, 224), (512, 512, 512)])
def test_chunks_divide_blocks(block, shape):
    one = ArrayLayout("relevance", shape, "float32", ("sample", *map(str, range(len(shape)))))
    rows = one.chunk_rows(block)
    assert block % rows == 0 and (rows == 1 or rows * one.row_bytes <= 1 << 20)


@pytest.mark.parametrize(
    ("shape", "batch", "inputs", "block"),
    [((1, 8, 8), 64, 64, 4096), ((3, 224, 224), 8, 1, 24), ((3, 224, 224), 64, 1, 64), ((8, 1, 1), 32, 3 * 224 * 224 * 4, 96)],
)
def test_default_blocks_are_whole_batches(shape, batch, inputs, block):
    layouts = [ArrayLayout("relevance", shape, "float32", ("sample", "1", "2", "3"))]
    assert default_block(layouts, batch, inputs) == block

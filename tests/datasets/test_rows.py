"""Arrays with a row for each sample, read in blocks."""

from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
import zarr

from lrpfx.datasets.rows import chosen, column, labels_of, samples_by_label
from lrpfx.errors import InputError, InputTypeError

COUNT = 100
VALUES = np.random.default_rng(0).standard_normal((COUNT, 3, 2))


def _hdf5(values, folder):
    file = h5py.File(folder / "a.h5", "w")
    file.create_dataset("a", data=values, chunks=(7, 3, 2))
    return file["a"]


def _memory_map(values, folder):
    np.save(folder / "a.npy", values)
    return np.load(folder / "a.npy", mmap_mode="r")


SOURCES = {
    "numpy": lambda values, folder: values,
    "memory map": _memory_map,
    "torch": lambda values, folder: torch.as_tensor(values),
    "zarr": lambda values, folder: zarr.array(values, chunks=(7, 3, 2)),
    "hdf5": _hdf5,
    "list": lambda values, folder: list(values),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("size", [1, 500, 48 * 20, 1 << 20])  # bytes of a block
@pytest.mark.parametrize(
    "samples", [None, [5], [99, 0], range(0, 100, 3), [*range(10), 40, 41, 99], np.arange(50, 60, dtype=np.uint8)]
)
def test_each_sample_comes_once_and_in_order(name, size, samples, tmp_path):
    found = column(SOURCES[name](VALUES, tmp_path), "values", COUNT)
    found = replace(found, block_bytes=size, skipped_bytes=3 * 48)
    wanted = chosen(samples, COUNT)
    blocks = list(found.floats(wanted))
    assert np.concatenate([one.numbers for one in blocks]).tolist() == sorted(range(COUNT) if samples is None else samples)
    np.testing.assert_array_equal(np.concatenate([one.values for one in blocks]), VALUES[wanted])
    assert [one.places.start for one in blocks] == np.cumsum([0, *(len(one.numbers) for one in blocks)])[:-1].tolist()
    assert max(np.ptp(one.numbers) for one in blocks) < max(size // 48, 7)


@pytest.mark.parametrize("labels", [np.array([2, 0, -1, 2, 0, 2]), [2, 0, -1, 2, 0, 2], torch.tensor([2, 0, -1, 2, 0, 2])])
def test_samples_by_label(labels):
    found = samples_by_label(labels_of(labels, 6), chosen([0, 1, 2, 4, 5], 6))
    assert {label: samples.tolist() for label, samples in found.items()} == {0: [1, 4], 2: [0, 5]}


def test_what_is_no_array_of_samples():
    class Damaged:
        shape = (4, 2)

        def __getitem__(self, rows):
            raise OSError(5, "Input/output error")

    class Short(Damaged):
        def __getitem__(self, rows):
            return np.zeros((1, 2))

    with pytest.raises(InputError, match="values of the samples 0 to 3 cannot be read: Input/output error"):
        list(column(Damaged(), "values").blocks(chosen(None, 4)))
    with pytest.raises(InputError, match=r"values has the shape \(4, 2\), but \[0:4\] of it \(1, 2\)"):
        list(column(Short(), "values").blocks(chosen(None, 4)))
    for wrong in (3, "abc", {"a": 1}, {1, 2}, np.float64(3)):
        with pytest.raises(InputTypeError):
            column(wrong, "values")


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([3, -1, 5], "numbers of samples, from 0"),
        ([3, 0, 5], "sample 5 is out of range: there are 5"),
        ([1, 2, 1], "given twice"),
        ([], "no samples"),
    ],
)
def test_samples_that_are_not_there(samples, message):
    with pytest.raises(InputError, match=message):
        chosen(samples, 5)

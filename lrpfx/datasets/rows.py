"""Arrays with a row for each sample, read in blocks: of NumPy, Zarr, HDF5, torch, or anything else that can be sliced."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lrpfx.errors import InputError, InputTypeError, os_errors
from lrpfx.pictures.maps import Floats, array_of
from lrpfx.samples.selection import checked_numbers

Numbers = NDArray[np.int64]


class Rows(Protocol):
    """An array with a row for each sample. Row i belongs to sample i; only slices of rows are read, some MiB at a time.

    Arrays of NumPy (also memory maps), Zarr and h5py are such, and tensors of torch.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of samples, then the shape of each."""
        ...

    def __getitem__(self, rows: slice, /) -> Any:
        """Some rows, as an array."""
        ...


@dataclass(frozen=True)
class Block:
    """Rows that were read together. `first`: the place of the first among all that are read. `values`: one row for each."""

    first: int
    numbers: Numbers
    values: NDArray[Any]

    @property
    def places(self) -> slice:
        """Where the rows are among all that are read."""
        return slice(self.first, self.first + len(self.numbers))


@dataclass(frozen=True)
class Column:
    """One quantity of the samples: `Rows`, or a sequence of arrays if their shapes differ. Made by `column`."""

    what: str
    source: Any
    shape: tuple[int, ...] | None  # of a sample; None if shapes may differ
    block_bytes: int = 8 << 20  # that are read together
    skipped_bytes: int = 256 << 10  # read and not used, at most, between two samples: less than the cost of another read

    def __len__(self) -> int:
        return len(self.source) if self.shape is None else int(self.source.shape[0])  # Zarr's arrays have no length

    def blocks(self, samples: Numbers) -> Iterator[Block]:
        """The rows of these samples, which rise, in order."""
        first = 0
        size, skipped = self._rows_per_block()
        while first < len(samples):
            last = int(np.searchsorted(samples, samples[first] + size))
            apart = np.flatnonzero(np.diff(samples[first:last]) > skipped)
            last = first + int(apart[0]) + 1 if len(apart) else last
            numbers = samples[first:last]
            yield Block(first, numbers, self._read(numbers))
            first = last

    def floats(self, samples: Numbers) -> Iterator[Block]:
        """The same in float64. `InputError` for values that are not finite."""
        for block in self.blocks(samples):
            yield Block(block.first, block.numbers, self._finite(block))

    def values(self, samples: Numbers) -> NDArray[Any]:
        """The rows of these samples, which rise, in one array."""
        return np.concatenate([block.values for block in self.blocks(samples)])

    def _finite(self, block: Block) -> Floats:
        if not np.issubdtype(block.values.dtype, np.floating):
            raise InputTypeError(f"{self.what} has floating-point numbers, not {block.values.dtype}", topic="statistics")
        values = block.values.astype(np.float64)
        wrong = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if wrong.any():
            number = int(block.numbers[wrong][0])
            raise InputError(
                f"{self.what} of sample {number} is not finite everywhere: leave the sample out, with samples=",
                topic="values-not-finite",
            )
        return values

    def item(self, number: int) -> Any:
        """What the source has for one sample."""
        with os_errors(InputError, Path(f"{self.what} of sample {number}"), "read"):
            return self.source[number]

    def _read(self, numbers: Numbers) -> NDArray[Any]:
        if self.shape is None:
            return array_of(self.item(int(numbers[0])), f"{self.what} of sample {numbers[0]}")[None]
        first, end = int(numbers[0]), int(numbers[-1]) + 1
        with os_errors(InputError, Path(f"{self.what} of the samples {first} to {end - 1}"), "read"):
            part = array_of(self.source[first:end], self.what)
        if part.shape != (end - first, *self.shape):
            raise InputError(
                f"{self.what} has the shape {(len(self), *self.shape)}, but [{first}:{end}] of it {part.shape}",
                topic="statistics",
            )
        return part[numbers - first]

    def _rows_per_block(self) -> tuple[int, int]:
        """How many rows are read together, a multiple of those in a chunk, and how far apart two samples may be."""
        if self.shape is None:
            return 1, 1
        row = max(1, int(np.prod(self.shape, dtype=np.int64))) * getattr(getattr(self.source, "dtype", None), "itemsize", 8)
        chunk = (getattr(self.source, "chunks", None) or (1,))[0]
        size = max(1, self.block_bytes // row)
        return max(chunk, size // chunk * chunk) if chunk * row <= 4 * self.block_bytes else size, max(
            1, self.skipped_bytes // row
        )


def column(source: Any, what: str, count: int | None = None) -> Column:
    """A checked quantity of the samples. `count`: how many samples there must be."""
    is_sized = hasattr(source, "shape") or hasattr(source, "__len__")
    if isinstance(source, (str, bytes)) or not hasattr(source, "__getitem__") or not is_sized:
        raise InputTypeError(
            f"{what} is an array with a row for each sample, or a sequence of arrays, not {type(source).__name__}",
            topic="statistics",
        )
    if hasattr(source, "shape"):
        if not len(source.shape):
            raise InputTypeError(f"{what} is an array with a row for each sample, not a single number", topic="statistics")
        shape: tuple[int, ...] | None = tuple(map(int, source.shape[1:]))
    elif not isinstance(source, Sequence) and hasattr(source, "keys"):
        raise InputTypeError(f"{what} is an array or a sequence, not a mapping ({type(source).__name__})", topic="statistics")
    else:
        shape = None
    found = Column(what, source, shape)
    if count is not None and len(found) != count:
        raise InputError(f"{what} has {len(found)} samples, the other arrays have {count}", topic="statistics")
    return found


def without_label(item: Any) -> Any:
    """The image of a pair (image, label), as data sets of torchvision have them; other items as they are."""
    return item[0] if isinstance(item, (tuple, list)) and len(item) == 2 else item


def chosen(samples: Any, count: int) -> Numbers:
    """The numbers of samples in rising order: all, or those that are given. `InputError` for others and for none."""
    found: Numbers = np.asarray(np.arange(count) if samples is None else checked_numbers(samples, count), dtype=np.int64)
    if not len(found):
        raise InputError("there are no samples", topic="samples")
    return found


def labels_of(labels: Any, count: int) -> Column:
    """Labels: integers of shape (samples,), or booleans of shape (samples, classes) where samples may have several."""
    source = np.asarray(labels) if isinstance(labels, (list, tuple)) else labels
    found = column(source, "labels", count)
    if found.shape is None:
        raise InputTypeError("labels are an array", topic="statistics")
    dtype = array_of(source[:1], "labels").dtype
    single = found.shape == () and np.issubdtype(dtype, np.integer)
    if not single and not (len(found.shape) == 1 and np.issubdtype(dtype, np.bool_)):
        raise InputTypeError(
            "labels are integers of shape (samples,), or booleans of shape (samples, classes) where a sample may have several, "
            f"not {dtype} of shape {(count, *found.shape)}",
            topic="statistics",
        )
    return found


def samples_by_label(labels: Column, samples: Numbers) -> dict[int, Numbers]:
    """The samples of each label. Negative labels are those of samples without one."""
    found: dict[int, list[Numbers]] = {}
    for block in labels.blocks(samples):
        marked = block.values if block.values.ndim == 2 else None
        present = np.flatnonzero(marked.any(axis=0)) if marked is not None else np.unique(block.values)
        for label in present[present >= 0].tolist():
            mine = marked[:, label] if marked is not None else block.values == label
            found.setdefault(label, []).append(block.numbers[mine])
    return {label: np.concatenate(found[label]) for label in sorted(found)}

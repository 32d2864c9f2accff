"""The arrays of a store: what each holds for a sample, and how it lies in chunks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Arrays of what was found out; those of relevance of several inputs or of layers have names that begin so.
RELEVANCE, LAYERS = "relevance", "layers."
OUTPUT, PREDICTION, TOP_CLASSES, TOP_SCORES = "output", "prediction", "top_classes", "top_scores"
SEED, REACHED = "seed", "reached"
#: What a sample is in the array "status".
MISSING, EXPLAINED, FAILED = 0, 1, 2
#: Arrays with a row for each sample that every store has.
STATUS, LABEL, KEY, ERROR, DIGEST = "status", "label", "key", "error", "digest"
#: The array with an entry for each block: 1 once it is done.
DONE = "done"
#: The beginning of the names of scales of the values of another array.
SCALE = "scale_of."

#: Dimensions.
SAMPLE, BLOCK, CONDITION, TARGET = "sample", "block", "condition", "target"
TEXT_BYTES = {KEY: 256, ERROR: 512}
_CHUNK_BYTES = 1 << 20
_FILLS: dict[str, float | int] = {"float16": math.nan, "float32": math.nan, "float64": math.nan, "int64": -1}
_FILLS |= {"uint8": 0, "uint64": 0}

Array = NDArray[Any]


@dataclass(frozen=True)
class ArrayLayout:
    """One array. `dimensions`: names, of which the first is that of samples or blocks. `shape`: without this one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    dimensions: tuple[str, ...]
    is_scaled: bool = False  # values are those in the array times those in another, whose name begins with `SCALE`

    @property
    def fill(self) -> float | int:
        """The value of entries that were not written."""
        return _FILLS[self.dtype]

    @property
    def row_bytes(self) -> int:
        """The size of one sample."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def chunk_rows(self, block: int) -> int:
        """How many samples are compressed together: as many as make a good size, of a number that divides the block."""
        if self.dimensions[0] == BLOCK:
            return 1
        most = max(1, _CHUNK_BYTES // max(1, self.row_bytes))
        return next(rows for rows in range(min(most, block), 0, -1) if block % rows == 0)

    def empty(self, rows: int) -> Array:
        """Rows that hold nothing yet."""
        return np.full((rows, *self.shape), self.fill, dtype=self.dtype)

    def to_json(self) -> dict[str, Any]:
        """The layout as plain data."""
        found = {"shape": list(self.shape), "dtype": self.dtype, "dimensions": list(self.dimensions)}
        return {**found, "scaled": self.is_scaled}

    @classmethod
    def from_json(cls, name: str, data: Any) -> "ArrayLayout":
        """The layout that a manifest states."""
        return cls(name, tuple(data["shape"]), data["dtype"], tuple(data["dimensions"]), data["scaled"])


def own_layouts() -> list[ArrayLayout]:
    """The arrays that every store has."""
    texts = [ArrayLayout(name, (size,), "uint8", (SAMPLE, f"{name}.byte")) for name, size in TEXT_BYTES.items()]
    numbers = [
        ArrayLayout(name, (), dtype, (SAMPLE,)) for name, dtype in ((STATUS, "uint8"), (LABEL, "int64"), (DIGEST, "uint64"))
    ]
    return [*numbers, *texts, ArrayLayout(DONE, (), "uint8", (BLOCK,))]


def layouts_of(
    values: Mapping[str, Array], dimensions: Mapping[str, tuple[str, ...]], scaled: Sequence[str]
) -> list[ArrayLayout]:
    """The arrays for explanations like these, and those that every store has. `scaled`: the names of those in float16."""
    found = []
    for name, value in values.items():
        of_scaled = name in scaled
        dtype = "float16" if of_scaled else str(value.dtype)
        found.append(ArrayLayout(name, value.shape[1:], dtype, dimensions[name], of_scaled))
        if of_scaled:
            found.append(ArrayLayout(SCALE + name, (), "float32", (SAMPLE,)))
    return [*found, *own_layouts()]


def default_block(layouts: Sequence[ArrayLayout], batch_size: int, input_bytes: int) -> int:
    """How many samples are written together: some 16 MiB of them, at most 4096, in whole batches.

    `input_bytes`: of one sample, whose inputs go from one machine to another with those of its block: at most some 64 MiB.
    """
    size = sum(one.row_bytes for one in layouts if one.dimensions[0] == SAMPLE)
    rows = max(1, min(4096, (16 << 20) // max(1, size), (64 << 20) // max(1, input_bytes)))
    return max(1, rows // batch_size) * batch_size


def scaled(values: Array) -> tuple[Array, Array]:
    """Values of samples in float16, and a power of two for each sample that they are to be multiplied with.

    The largest magnitude of a sample comes to lie between 2¹⁴ and 2¹⁵, so that entries down to 2⁻²⁹ of it keep the eleven bits
    of float16. Of samples that are not there it is NaN, as their values are.
    """
    found = np.abs(values).reshape(len(values), -1).max(1, initial=0.0)
    largest = np.where(np.isfinite(found), found, 0.0)
    exponents = np.clip(np.frexp(largest)[1] - 15, -126, 113)
    factors = np.ldexp(np.float32(1.0), np.where(largest > 0, exponents, 0)).astype(np.float32)
    factors[~np.isfinite(found)] = np.nan
    inverse = np.ldexp(1.0, np.where(largest > 0, -exponents, 0)).astype(values.dtype)
    return (values * inverse.reshape(-1, *[1] * (values.ndim - 1))).astype(np.float16), factors


def names_of_relevance(names: Iterable[str]) -> list[str]:
    """Those among the names of arrays that have relevance, of inputs and layers."""
    return [name for name in names if name == RELEVANCE or name.startswith((RELEVANCE + ".", LAYERS))]


def text_rows(texts: Sequence[str], size: int) -> Array:
    """Texts as rows of bytes in UTF-8, filled up with zeros."""
    rows = np.zeros((len(texts), size), dtype=np.uint8)
    for row, text in zip(rows, texts, strict=True):
        content = text.encode("utf-8", "backslashreplace")[:size]
        row[: len(content)] = np.frombuffer(content, dtype=np.uint8)
    return rows


def texts_of(rows: Array) -> list[str]:
    """The texts in rows of bytes."""
    return [row.tobytes().rstrip(b"\0").decode("utf-8", "ignore") for row in rows]

"""The arrays of a store: what each holds for a sample, and how it lies in chunks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Arrays of what was found out; those of relevance of several inputs or of layers have names that begin so.
RELEVANCE, LAYERS = "relevance", "layers."
#: That of messages along the edges of graphs, and how many nodes and edges each graph has.
MESSAGES, NODES, EDGES = "messages", "nodes", "edges"
OUTPUT, PREDICTION, TOP_CLASSES, TOP_SCORES = "output", "prediction", "top_classes", "top_scores"
SEED, REACHED = "seed", "reached"
#: What a sample is in the array "status".
MISSING, EXPLAINED, FAILED = 0, 1, 2
#: Arrays with a row for each sample that every store has.
STATUS, LABEL, KEY, ERROR, DIGEST = "status", "label", "key", "error", "digest"
#: The array with an entry for each block: 1 once it is done.
DONE = "done"

#: Dimensions.
SAMPLE, BLOCK, CONDITION, TARGET, FEATURE = "sample", "block", "condition", "target", "feature"
#: The entry of a manifest with the names of the features of a table.
FEATURES = "features"
#: The dtype of texts, which have any length.
STRING = "string"
#: What is read together at least. With less, reading all samples takes several times as long, and one sample no less.
_CHUNK_BYTES = 1 << 18
_FILLS: dict[str, float | int | str] = {
    "float32": math.nan,
    "float64": math.nan,
    "int64": -1,
    "uint8": 0,
    "uint64": 0,
    STRING: "",
}
#: Bits of the significands of rounded numbers that are not stored: those of float32 beyond those of float16.
_DROPPED_BITS = 13
#: The largest of them.
_LARGEST = np.float32(2.0**127 * (2.0 - 2.0**-10))
#: Attributes of arrays, for other readers; `comment` is what the CF conventions call a text for them.
_ATTRIBUTES: dict[str, dict[str, Any]] = {
    OUTPUT: {"comment": "the output of the model"},
    PREDICTION: {"comment": "the class of the largest output; -1: none"},
    TOP_CLASSES: {"comment": "the classes of the largest outputs, in falling order; -1: none"},
    TOP_SCORES: {"comment": "the largest outputs, in falling order"},
    MESSAGES: {"comment": "relevance of the messages along edges, the sum over layers; NaN: missing or failed"},
    NODES: {"comment": "how many nodes the graph has, behind which relevance is 0; -1: missing or failed"},
    EDGES: {"comment": "how many edges the graph has, behind which relevance is 0; -1: missing or failed"},
    SEED: {"comment": "the relevance that the output was given"},
    REACHED: {"comment": "what of the seed reached the inputs"},
    STATUS: {"flag_values": [MISSING, EXPLAINED, FAILED], "flag_meanings": "missing explained failed"},
    LABEL: {"comment": "the label; -1: none"},
    KEY: {"comment": "the name of the sample, such as a path"},
    ERROR: {"comment": "why the sample could not be explained"},
    DIGEST: {"comment": "a hash of the sample; 0: none"},
    DONE: {"comment": "1: all samples of the block are there"},
}

Array = NDArray[Any]


@dataclass(frozen=True)
class ArrayLayout:
    """One array. `dimensions`: names, of which the first is that of samples or blocks. `shape`: without this one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    dimensions: tuple[str, ...]
    is_rounded: bool = False  # to the precision of float16

    @property
    def is_text(self) -> bool:
        """Whether values are texts."""
        return self.dtype == STRING

    @property
    def fill(self) -> float | int | str:
        """The value of entries that were not written."""
        return _FILLS[self.dtype]

    @property
    def row_bytes(self) -> int:
        """The size of one sample, without texts."""
        return 0 if self.is_text else math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def chunk_rows(self, block: int) -> int:
        """How many samples are compressed together: as many as make a good size, of a number that divides the block."""
        if self.dimensions[0] == BLOCK:
            return 1
        most = max(1, _CHUNK_BYTES // max(1, self.row_bytes))
        return next(rows for rows in range(min(most, block), 0, -1) if block % rows == 0)

    def empty(self, rows: int) -> Array:
        """Rows that hold nothing yet."""
        return np.full((rows, *self.shape), self.fill, dtype=object if self.is_text else self.dtype)

    def attributes(self, names_of: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """What the array says to other readers. `names_of`: conditions and targets, by dimension."""
        found = dict(_ATTRIBUTES.get(self.name, {"comment": "relevance; NaN: missing or failed"}))
        details = [f"{one}s: {', '.join(names_of[one])}" for one in self.dimensions if one in names_of]
        if details or self.is_rounded:
            found["comment"] = "; ".join([found["comment"], *details, *["rounded to 11 bits"] * self.is_rounded])
        if self.dimensions[0] == SAMPLE and self.name not in (LABEL, KEY):
            found["coordinates"] = f"{LABEL} {KEY}"
        return found

    def to_json(self) -> dict[str, Any]:
        """The layout as plain data."""
        found = {"shape": list(self.shape), "dtype": self.dtype, "dimensions": list(self.dimensions)}
        return {**found, "rounded": self.is_rounded}

    @classmethod
    def from_json(cls, name: str, data: Any) -> "ArrayLayout":
        """The layout that a manifest states."""
        return cls(name, tuple(data["shape"]), data["dtype"], tuple(data["dimensions"]), data["rounded"])


def own_layouts() -> list[ArrayLayout]:
    """The arrays that every store has."""
    dtypes = {STATUS: "uint8", LABEL: "int64", DIGEST: "uint64", KEY: STRING, ERROR: STRING}
    of_samples = [ArrayLayout(name, (), dtype, (SAMPLE,)) for name, dtype in dtypes.items()]
    return [*of_samples, ArrayLayout(DONE, (), "uint8", (BLOCK,))]


def layouts_of(
    values: Mapping[str, Array], dimensions: Mapping[str, tuple[str, ...]], are_rounded: Sequence[str]
) -> list[ArrayLayout]:
    """The arrays for explanations like these, and those that every store has. `are_rounded`: the names of those that are."""
    found = [
        ArrayLayout(name, value.shape[1:], str(value.dtype), dimensions[name], name in are_rounded)
        for name, value in values.items()
    ]
    return [*found, *own_layouts()]


def default_block(layouts: Sequence[ArrayLayout], batch_size: int, input_bytes: int) -> int:
    """How many samples are written together: some 16 MiB of them, at most 4096, in whole batches.

    `input_bytes`: of one sample, whose inputs go from one machine to another with those of its block: at most some 64 MiB.
    """
    size = sum(one.row_bytes for one in layouts if one.dimensions[0] == SAMPLE)
    rows = max(1, min(4096, (16 << 20) // max(1, size), (64 << 20) // max(1, input_bytes)))
    return max(1, rows // batch_size) * batch_size


def rounded(values: Array) -> Array:
    """Values in float32, rounded to the eleven bits of float16, but in the range of float32.

    Bits that are zero are compressed to next to nothing, so that they need no more space than numbers of 16 bits with a scale
    for each sample, and any reader gets the right ones.
    """
    bits: Array = np.clip(values, -_LARGEST, _LARGEST, dtype=np.float32).view(np.uint32)
    last = (bits >> np.uint32(_DROPPED_BITS)) & np.uint32(1)  # to the nearest, of two equally near ones to the even one
    kept: Array = (bits + np.uint32((1 << _DROPPED_BITS - 1) - 1) + last) & np.uint32(~((1 << _DROPPED_BITS) - 1) & 0xFFFFFFFF)
    return kept.view(np.float32)


def names_of_relevance(names: Iterable[str]) -> list[str]:
    """Those among the names of arrays that have relevance, of inputs, messages and layers."""
    return [name for name in names if name in (RELEVANCE, MESSAGES) or name.startswith((RELEVANCE + ".", LAYERS))]

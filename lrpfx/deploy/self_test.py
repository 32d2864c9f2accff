"""Self-tests of artefacts: arguments of a program, and its results for them when it was saved."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lrpfx.support.stored_arrays import RefusedError, read_arrays
from lrpfx.support.tensors import as_array

#: The largest batch for which a file may hold fewer rows and repeat them. The limit keeps small files from using much memory.
MOST_REPEATED = 64


#: Of arguments and results; bfloat16 is stored as float32.
_DTYPES = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"))


@dataclass(frozen=True)
class SelfTest:
    """Arguments and expected results for batches of `sizes`, the largest first.

    `arrays` holds those of the largest batch, as "in.<argument>" and "out.<result>". An array with fewer rows than the batch is
    repeated. Smaller batches use the first rows; a result that differs from them is stored as it is, as "<size>.out.<result>".
    A result whose first dimension is not the batch is stored so for every size. Arguments with different first dimensions, such
    as nodes and edges of a graph, have no batch: they are stored as they are.
    """

    sizes: tuple[int, ...]
    arrays: dict[str, np.ndarray]

    def arguments(self, manifest: Mapping[str, Any], size: int) -> dict[str, np.ndarray]:
        """The arguments for a batch of `size` by name. `manifest`: that of the program."""
        rows = {name: self._count(name, manifest, size) for name in manifest["arguments"]}
        return {name: self._rows(f"in.{name}", count) for name, count in rows.items()}

    def _count(self, name: str, manifest: Mapping[str, Any], size: int) -> int:
        """How many rows an argument has."""
        first: int | None = manifest["arguments"][name]["shape"][0]
        if first is not None:
            return first
        return size if manifest["dynamic_batch"] else len(self.arrays[f"in.{name}"])

    def expected(self, name: str, size: int) -> np.ndarray:
        of_size = f"{size}.out.{name}"
        return self.arrays[of_size] if of_size in self.arrays else self._rows(f"out.{name}", size)

    def difference(self, name: str, size: int, value: np.ndarray) -> float:
        """The norm of a result's error, relative to the norm of the expected result of the largest batch."""
        scale = self.expected("output" if name == "balance" else name, self.sizes[0])  # a balance is a difference of sums
        change = np.linalg.norm(value.astype(np.float64) - self.expected(name, size))
        return float(change / (np.linalg.norm(scale.astype(np.float64)) or 1.0))

    def _rows(self, key: str, size: int) -> np.ndarray:
        array = self.arrays[key]
        return np.resize(array, (size, *array.shape[1:])) if array.ndim else array

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        np.savez(file, **self.arrays)  # type: ignore[arg-type]  # the stub takes any keyword for allow_pickle
        return file.getvalue()


def recorded(
    run: Callable[..., Mapping[str, torch.Tensor]], arguments: Mapping[str, torch.Tensor], any_batch: bool, tolerance: float
) -> tuple[SelfTest, Mapping[str, torch.Tensor]]:
    """A self-test of these arguments and, with `any_batch`, of the first row alone; and the results for the arguments.

    Rows and results that differ from stored ones by at most a tenth of `tolerance` are not stored again.
    """
    largest = len(next(iter(arguments.values())))
    results = run(*arguments.values())
    whole = {f"in.{name}": as_array(value) for name, value in arguments.items()}
    smaller = (1,) if any_batch else ()  # compilers may mistake a batch of one for another memory format
    test = SelfTest((largest, *smaller), whole)
    of_sizes = {largest: results} | {size: run(*(value[:size] for value in arguments.values())) for size in smaller}
    for name, result in results.items():
        if any(len(found[name]) != size for size, found in of_sizes.items() if result.ndim):
            whole |= {f"{size}.out.{name}": as_array(found[name]) for size, found in of_sizes.items()}
        else:
            whole[f"out.{name}"] = as_array(result)
    for size in smaller:
        for name, value in of_sizes[size].items():
            if f"out.{name}" in whole and not test.difference(name, size, as_array(value)) <= tolerance / 10:
                whole[f"{size}.out.{name}"] = as_array(value)
    if largest <= MOST_REPEATED and len(set(map(len, arguments.values()))) == 1:
        for key, array in whole.items():
            if key.startswith(("in.", "out.")):
                whole[key] = _distinct_rows(array, 0.0 if key.startswith("in.") else tolerance / 10)
    return test, results


def _distinct_rows(array: np.ndarray, allowed: float) -> np.ndarray:
    """The shortest run of first rows that gives the array when it is repeated, up to a relative error of `allowed`."""
    if not np.isfinite(array).all():  # a mask, whose entries of -inf have no difference
        return array
    scale = np.linalg.norm(array.astype(np.float64))
    for count in range(1, len(array) if array.ndim else 1):
        change = np.linalg.norm(np.resize(array[:count], array.shape).astype(np.float64) - array)
        if change <= allowed * scale:
            return array[:count]
    return array


def read(content: bytes, manifest: Mapping[str, Any]) -> SelfTest:
    """The self-test of an artefact with this manifest. Raises `RefusedError`, or numpy's errors for damaged arrays."""
    sizes = manifest["self_test"]
    arrays = read_arrays(content)
    if not 1 <= len(sizes) <= 2 or not all(type(size) is int and size > 0 for size in sizes) or sizes[0] < sizes[-1]:
        raise RefusedError("its manifest does not list valid batch sizes for its self-test")
    needed = {f"in.{name}" for name in manifest["arguments"]}
    allowed, repeated = set(needed), set(needed)
    for name in manifest["results"]:
        of_sizes = {f"{size}.out.{name}" for size in sizes}
        allowed |= {f"out.{name}"} | of_sizes
        needed |= of_sizes if of_sizes <= arrays.keys() else {f"out.{name}"}
        repeated.add(f"out.{name}")
    described = manifest["arguments"]
    batch = sizes[0] if manifest["dynamic_batch"] else None
    counts = {f"in.{name}": one["shape"][0] or batch for name, one in described.items()}
    fits = needed <= set(arrays) <= allowed and not any(
        _is_misshapen(array, counts.get(name, sizes[0])) for name, array in arrays.items() if name in repeated
    )
    if any(array.dtype.name not in _DTYPES for array in arrays.values()):
        raise RefusedError("its self-test has arrays of other dtypes than programs take and give")
    if not fits or not all(_is_described(arrays[f"in.{name}"], one["shape"]) for name, one in described.items()):
        raise RefusedError("its self-test does not have the arguments and results of its manifest")
    return SelfTest(tuple(sizes), arrays)


def _is_described(array: np.ndarray, sizes: Sequence[int | None]) -> bool:
    """Whether the rows of an array have the sizes in the manifest, of which None may be any."""
    pairs = zip(array.shape[1:], sizes[1:], strict=False)
    return array.ndim == len(sizes) and all(wanted in (None, size) for size, wanted in pairs)


def _is_misshapen(array: np.ndarray, size: int | None) -> bool:
    """Whether an array does not have so many rows, or fewer to repeat. `size`: None for any number."""
    if size is None:
        return not len(array)
    return bool(array.ndim) and not (len(array) == size or 0 < len(array) <= size <= MOST_REPEATED)

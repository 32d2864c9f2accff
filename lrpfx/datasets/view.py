"""Reading a store, also one that is still written to. Nothing is loaded before it is asked for."""

import operator
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lrpfx.datasets.layout import (
    CONDITION,
    DIGEST,
    ERROR,
    EXPLAINED,
    FAILED,
    FEATURE,
    FEATURES,
    KEY,
    LABEL,
    LAYERS,
    RELEVANCE,
    SAMPLE,
    STATUS,
    TARGET,
    Array,
    ArrayLayout,
)
from lrpfx.datasets.locations import Location, location_of, zarr_package
from lrpfx.datasets.store import (
    Manifest,
    check_is_there,
    chunk_of,
    damaged,
    done_of,
    names_along,
    open_arrays,
    read,
    read_manifest,
    with_missed_chunks,
)
from lrpfx.errors import ArtefactError, InputError, InputTypeError, LrpfxError, first_lines, nearest
from lrpfx.samples.plan import DoneBlocks
from lrpfx.support.html import element, html_table
from lrpfx.support.optional_packages import optional_package

if TYPE_CHECKING:
    from xarray import Dataset


class StoredArray:
    """An array of a store. What is indexed is read, as NumPy's array; the first dimension is that of samples.

    Texts come as an array of str.

    `location`: of the store. `manifest`: what the store says of itself. `layout`: what the array is. `array`: that of Zarr.
    `length`: how many samples there are.
    """

    def __init__(self, location: Location, manifest: Manifest, layout: ArrayLayout, array: Any, length: int) -> None:
        self._location = location
        self._manifest = manifest
        self._layout = layout
        self._array = array
        self._length = length
        self.name = layout.name
        self.dimensions = layout.dimensions
        self.shape = (length, *layout.shape)
        self.dtype = np.dtype(object if layout.is_text else layout.dtype)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: Any) -> Any:
        """Values at indices, slices, and arrays of indices or truth values, as in NumPy.

        `key`: the index. What it has for the first dimension chooses the samples that are read; an array for them has one
        dimension. A new axis (None) cannot come first. Errors: `InputError`: it is out of range; `InputTypeError`: it is not an
        index; `ArtefactError`: a chunk is damaged or lost, or the store is gone.
        """
        first, *rest = (key if isinstance(key, tuple) else (key,)) or (slice(None),)
        if first is Ellipsis:
            taken = sum(one.ndim if _is_mask(one) else 1 for one in rest if one is not None and one is not Ellipsis)
            if taken < self.ndim:
                first, rest = slice(None), [Ellipsis, *rest]
            elif rest:
                first, *rest = rest
        try:
            samples = self._samples(first)
            values = self._values(np.array([samples]) if isinstance(samples, int) else samples)
            if isinstance(samples, int):
                return values[(0, *rest)]
            # an array for an array, which NumPy pairs with others
            own = slice(None) if isinstance(first, slice) else np.arange(len(values))
            return values[(own, *rest)] if rest else values
        except (IndexError, TypeError, ValueError) as error:
            if isinstance(error, LrpfxError):
                raise
            raise InputError(f"{self.name} has the shape {self.shape}: {first_lines(error)}", topic="reading-stores") from error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype=dtype)

    def __iter__(self) -> Iterator[Any]:
        """The values of each sample; some are read together."""
        step = self._layout.chunk_rows(1024)
        for first in range(0, self._length, step):
            yield from self[first : first + step]

    def __repr__(self) -> str:
        return f"<{self.name}: {self.dtype} {self.shape}>"

    def _samples(self, first: Any) -> int | slice | Array:
        """The samples that an index of the first dimension means, as NumPy has it."""
        if isinstance(first, slice):
            start, stop, step = first.indices(self._length)
            return slice(start, max(start, stop)) if step == 1 else np.arange(start, stop, step)
        if hasattr(first, "__index__") and not np.ndim(first) and not isinstance(first, (bool, np.bool_)):
            return range(self._length)[operator.index(first)]
        found = np.arange(self._length)[first if isinstance(first, list) else np.asarray(first)]
        if found.ndim != 1:
            raise InputTypeError(
                f"samples are chosen by an index, a slice, or an array of indices or truth values, not {first!r}",
                topic="reading-stores",
            )
        return found

    def _values(self, chosen: Any) -> Array:
        try:
            return self._read(chosen)
        except ArtefactError:
            check_is_there(self._location)
            numbers = np.arange(self._length)[chosen]
            for block in np.unique(numbers // self._manifest.block):
                self._read_block(int(block))
            raise

    def _read_block(self, block: int) -> None:
        """Read a chunk, for the `ArtefactError` that names it."""
        first = block * self._manifest.block
        try:
            self._read(slice(first, min(first + self._manifest.block, self._length)))
        except ArtefactError as error:
            raise damaged(self._location, chunk_of(self._layout, block), error) from error

    def _read(self, chosen: Any) -> Array:
        places: Any = slice(None)
        if not isinstance(chosen, slice) and chosen.size:
            chosen, places = np.unique(chosen, return_inverse=True)  # Zarr takes them in order
        elif not isinstance(chosen, slice):
            chosen = slice(0, 0)
        found: Array = read(self._location, self._array, chosen)[places].astype(self.dtype, copy=False)
        return found


def _is_mask(one: Any) -> bool:
    return isinstance(one, np.ndarray) and one.dtype.kind == "b"


class Attributions:
    """What was found out about the samples of a data set: a read-only view of a store.

    `view["relevance"]` is an array whose chunks are read when it is indexed. Arrays have a row for each sample: "relevance" (or
    "relevance.NAME" of each input), "layers.NAME" of recorded layers, "messages", "nodes" and "edges" of graphs, "output" or
    "top_scores" and "top_classes", "prediction", "label" (-1: none), "key", "seed" (the relevance that the output was given),
    "reached" (what of it reached the inputs; the rest is that of biases, stabilizers and other constants, or was stopped by
    conditions), "status" (0: not there yet, 1: explained, 2: failed), "error" and "digest" (of the inputs, 0 where they could
    not be loaded). After the dimension of samples come those of conditions and targets, if there are. Samples that are not
    there or failed have NaN in them. The attribute `path` is that of the store, a str if it has a scheme such as "s3://".

    `location`: of the store. Errors: `ArtefactError`: there is no store, or it is damaged.
    """

    def __init__(self, location: Location) -> None:
        self.path = location.path
        self._location = location
        self._manifest: Manifest = read_manifest(location)
        self._layouts = {one.name: one for one in self._manifest.layouts}
        self._arrays = open_arrays(location, self._manifest, with_missed_chunks)
        self._length = self._manifest.samples
        if self._length is None:  # of a stream whose end is not reached
            self._length = self._end()

    def _end(self) -> int:
        """The samples up to the last that is there."""
        counts = self.blocks().counts
        last = max((block for block, count in enumerate(counts) if count), default=-1)
        return 0 if last < 0 else last * self._manifest.block + counts[last]

    def blocks(self) -> DoneBlocks:
        """Which blocks are done, at this moment."""
        return done_of(self._location, self._manifest, self._arrays)

    def __len__(self) -> int:
        """The number of samples of the data set; of a stream, those up to the last that was there when it was opened."""
        return self._length or 0

    @property
    def manifest(self) -> dict[str, Any]:
        """What the store says of itself, as plain data."""
        return self._manifest.to_json()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays."""
        return tuple(name for name, one in self._layouts.items() if one.dimensions[0] == SAMPLE)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> StoredArray:
        if name not in self.names:
            raise InputError(
                f"the store has no array {name!r}.{nearest(str(name), self.names)} It has {', '.join(self.names)}",
                topic="reading-stores",
            )
        return StoredArray(self._location, self._manifest, self._layouts[name], self._arrays[name], len(self))

    @property
    def relevance(self) -> StoredArray:
        """The relevance of the input.

        Errors: `InputError`: the model has several inputs: they have names.
        """
        return self[RELEVANCE]

    @property
    def layers(self) -> dict[str, StoredArray]:
        """The relevance of recorded layers, by their names."""
        return {name.removeprefix(LAYERS): self[name] for name in self.names if name.startswith(LAYERS)}

    @property
    def labels(self) -> Array:
        """The label of each sample, -1 without one."""
        return np.asarray(self[LABEL][:])

    @property
    def keys(self) -> list[str]:
        """The name of each sample, such as the path of an image in its folder; an empty text without one."""
        return [str(one) for one in self[KEY][:]]

    @property
    def done(self) -> Array:
        """Whether each sample is there, explained or failed, at this moment."""
        found = np.zeros(len(self), dtype=bool)
        for block, count in enumerate(self.blocks().counts):
            first = block * self._manifest.block
            found[first : first + count] = True
        return found

    @property
    def is_complete(self) -> bool:
        """Whether all samples of the data set are explained: none is missing, and none failed.

        Of a stream, that is known after its end.
        """
        return self._manifest.samples is not None and len(self.explained) == len(self)

    @property
    def explained(self) -> Array:
        """The numbers of the samples that are there and did not fail."""
        return np.asarray((self.done & (self[STATUS][:] == EXPLAINED)).nonzero()[0])

    @property
    def errors(self) -> dict[int, str]:
        """The samples that could not be explained, with the reason of each."""
        failed = (self.done & (self[STATUS][:] == FAILED)).nonzero()[0]
        return dict(zip(failed.tolist(), map(str, self[ERROR][failed]), strict=True))

    def to_xarray(self) -> "Dataset":
        """The arrays as a Dataset of xarray, which reads values when they are asked for.

        `to_xarray().chunk(sample=1000)` reads by dask. Coordinates are "sample", "label" and "key", and the names of targets,
        conditions and a table's features; attributes the composite, the model's hash and the versions of packages. Errors:
        `InputError`: xarray is not installed. What is indexed later raises `ArtefactError` for a chunk that is lost, and the
        error of Zarr for one that is damaged.
        """
        xarray = optional_package("xarray", "a Dataset of xarray", "datasets")
        with self._location.errors("opened"):
            store = with_missed_chunks(self._location.zarr_store(read_only=True))
            opened = xarray.open_zarr(store, consolidated=False, zarr_format=3, chunks=None)
        names = [name for name in self.names if name != DIGEST]
        found: Dataset = opened[names].isel({SAMPLE: slice(len(self))}).assign_coords({SAMPLE: np.arange(len(self))})
        facts = self._manifest.facts
        named = {CONDITION, TARGET, FEATURE} if FEATURES in facts else {CONDITION, TARGET}
        for one in named.intersection(found.dims):
            found = found.assign_coords({one: np.array(names_along(facts, str(one)), dtype=object)})
        versions = {f"{name}_version": one for name, one in facts["versions"].items()}
        found.attrs = {"composite": facts["composite"], "model": facts["model"], **versions}
        return found

    def __repr__(self) -> str:
        return f"<{self._summary()}: {', '.join(self.names)}>"

    def _summary(self) -> str:
        done = int(self.done.sum())
        total = self._manifest.samples
        of = f"{done} samples" if total == done else f"{done} of {'?' if total is None else total} samples"
        failed = done - len(self.explained)
        return f"explanations of {of}{f', of which {failed} failed,' if failed else ''} by {self._manifest.facts['composite']}"

    def _repr_html_(self) -> str:
        """The arrays as a table, for notebooks."""
        rows = [(name, str(self[name].dtype), " × ".join(map(str, self[name].shape))) for name in self.names]
        return element("div", element("p", self._summary()), html_table(("array", "dtype", "shape"), rows))


def open_store(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Attributions:
    """The explanations in a store that `lrpfx.datasets.attribute` wrote or is writing.

    Nothing is loaded before it is indexed.

    `path`: of the store. `storage_options`: for the file system of fsspec that a path such as "s3://bucket/store" belongs to.
    Errors: `ArtefactError`: there is no store, or it is damaged; `InputError`: Zarr is not installed.
    """
    zarr_package()
    location = location_of(path, storage_options)
    if not location.sizes():
        raise ArtefactError(f"there is no store {path}", topic="reading-stores")
    return Attributions(location)

"""A store: a Zarr 3 group that is written block by block, each of which counts once its entry in "done" is written."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lrpfx.datasets.layout import (
    CONDITION,
    DIGEST,
    DONE,
    ERROR,
    EXPLAINED,
    FAILED,
    FEATURE,
    FEATURES,
    LABEL,
    MISSING,
    SAMPLE,
    STATUS,
    TARGET,
    Array,
    ArrayLayout,
    rounded,
)
from lrpfx.datasets.locations import Location, zarr_package
from lrpfx.errors import ArtefactError, InputError, LrpfxError, first_lines
from lrpfx.samples.plan import NO_LABEL, DoneBlocks, KnownSample, samples_in
from lrpfx.samples.preparation import Sample
from lrpfx.samples.sources import check_unchanged
from lrpfx.support.identity.descriptions import text_of
from lrpfx.support.numbered_names import numbered

FORMAT = 2
#: The attribute of the group with the manifest.
MANIFEST = "lrpfx"
#: Its entry that no other store has, at this place or elsewhere.
RUN = "run"
#: The attribute while the arrays are made.
_BEGINNING = "beginning"
_GROUP = "zarr.json"
_DONE_BYTES = 20  # of an entry of "done", compressed, at least


# --- manifests ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """What a store says of itself. `facts`: plain data; its arrays, the length of its blocks, how many samples if known."""

    facts: dict[str, Any]
    layouts: list[ArrayLayout]
    block: int
    samples: int | None

    def to_json(self) -> dict[str, Any]:
        arrays = {one.name: one.to_json() for one in self.layouts}
        return {"format": FORMAT, **self.facts, "block": self.block, "samples": self.samples, "arrays": arrays}

    @classmethod
    def from_json(cls, data: Any) -> "Manifest":
        """The manifest. Errors: `ArtefactError`."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            version = data.get("format") if isinstance(data, dict) else None
            raise ArtefactError(
                f"the store is not of lrpfx, or of another release of it (format {version!r}, not {FORMAT})",
                topic="damaged-stores",
            )
        facts = {name: value for name, value in data.items() if name not in ("format", "block", "samples", "arrays")}
        try:
            layouts = [ArrayLayout.from_json(name, one) for name, one in data["arrays"].items()]
            return cls(facts, layouts, data["block"], data["samples"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ArtefactError(f"the store's manifest is damaged: {first_lines(error)}", topic="damaged-stores") from error

    @property
    def capacity(self) -> int:
        """The samples that there is room for at first."""
        return self.block if self.samples is None else self.samples


def names_along(facts: Mapping[str, Any], dimension: str) -> list[str]:
    """What a manifest calls the conditions or targets of each sample, of which those of one name are numbered, or features."""
    if dimension == FEATURE:
        return list(facts.get(FEATURES, ()))
    found = facts["settings"].get(f"{dimension}s")
    return numbered([text_of(one) for one in found]) if isinstance(found, list) else []


def is_begun(location: Location) -> bool:
    """Whether anything is stored at a location. What a run left that was killed at once does not count."""
    return bool(location.sizes()) and not _is_beginning(location)


def _is_beginning(location: Location) -> bool:
    """Whether there is nothing but what a run leaves that is killed while it makes the arrays: descriptions, no values."""
    if _GROUP not in location.sizes() or _attributes(location).get(MANIFEST) != _BEGINNING:
        return False
    return all(re.fullmatch(rf"([^/]+/)?{re.escape(_GROUP)}", name) for name in location.sizes_of_all(""))


def read_manifest(location: Location) -> Manifest:
    """The manifest of a store. Errors: `ArtefactError`."""
    if _GROUP not in (names := location.sizes()):
        there = f"it has {', '.join(sorted(names)[:3])}" if names else "it is empty"
        raise ArtefactError(
            f"{location} is not a store of lrpfx.datasets.attribute: {there}, and no {_GROUP}", topic="damaged-stores"
        )
    attributes = _attributes(location)
    if MANIFEST not in attributes:
        raise ArtefactError(f"{location} is a Zarr group that lrpfx.datasets.attribute did not write", topic="damaged-stores")
    if attributes[MANIFEST] == _BEGINNING:
        raise ArtefactError(
            f"{location} is not a store yet: a run has just begun it, or was stopped at that moment. lrpfx.datasets.attribute "
            "begins anew there if nothing else is in it",
            topic="damaged-stores",
        )
    return Manifest.from_json(attributes[MANIFEST])


def _attributes(location: Location) -> dict[str, Any]:
    try:
        data = json.loads(location.content(_GROUP))
        attributes = data["attributes"] if data["zarr_format"] == 3 and data["node_type"] == "group" else None
    except (ValueError, KeyError, TypeError) as error:
        raise ArtefactError(f"{location}/{_GROUP} is damaged: {first_lines(error)}", topic="damaged-stores") from error
    if attributes is None:
        raise ArtefactError(f"{location} is not a Zarr 3 group", topic="damaged-stores")
    return dict(attributes)


# --- writing -----------------------------------------------------------------------------------------------------------------


@contextmanager
def _damage_ignored() -> Iterator[None]:
    """A context that ends where something cannot be read, unless the file system is why."""
    try:
        yield
    except ArtefactError as error:
        if isinstance(error.__cause__, OSError):
            raise


class BlockWriter:
    """Writes the blocks of a store, in any order. Several processes may do so, each of which writes whole blocks.

    Of a store of unknown length, one of them makes room for the others.
    """

    def __init__(self, location: Location, manifest: Manifest) -> None:
        self.location = location
        self.manifest = manifest
        self._open()

    def _open(self) -> None:
        with self.location.errors("opened"):
            store = self.location.zarr_store()
            self.group = zarr_package().open_group(store, mode="r+", zarr_format=3, use_consolidated=False)
            found = {one.name: self.group[one.name] for one in self.manifest.layouts}
        self.arrays = {name: array.with_config({"write_empty_chunks": True}) for name, array in found.items()}

    def empty(self, block: int) -> dict[str, Array]:
        """Rows for the samples of a block, without a value yet."""
        rows = samples_in(block, self.manifest.block, self.manifest.samples)
        return {one.name: one.empty(rows) for one in self.manifest.layouts if one.dimensions[0] == SAMPLE}

    def write(self, block: int, rows: Mapping[str, Array]) -> None:
        """Write the rows of a block, and then that it is done.

        Each array gets its chunk, so that one that is lost is missed. Errors: `ArtefactError`, also where the store is not that
        which this run has begun or found; `InputError` if the block has rows of other samples, which stay. Samples of it that
        were explained before, and fail now, keep what they have.
        """
        self._check_is_ours()
        if block >= self.arrays[DONE].shape[0]:
            self._open()  # another process may have made room
            self.make_room(block)
        first = block * self.manifest.block
        self._reconcile(block, rows)
        with self.location.errors("written"):
            of_samples = [one for one in self.manifest.layouts if one.dimensions[0] == SAMPLE]
            mark = self.location.remove([f"{DONE}/c/{block}"])  # of a block that is tried again: half of it must not count
            self.location.make_lasting(mark)
            for one in of_samples:
                values = rounded(rows[one.name]) if one.is_rounded else rows[one.name]
                self.arrays[one.name][first : first + len(values)] = values
            self.location.make_lasting(chunk_of(one, block) for one in of_samples)
            self._check_is_ours()  # writing may have taken long
            self.arrays[DONE][block] = 1

    def _check_is_ours(self) -> None:
        """Raise `ArtefactError` if the store of this run was removed, and another one begun at its place."""
        try:
            stated = _attributes(self.location).get(MANIFEST)  # each block costs this twice, so no folder is listed
        except ArtefactError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            stated = None
        if not isinstance(stated, dict) or stated.get(RUN) != self.manifest.facts[RUN]:
            raise ArtefactError(
                f"{self.location} was removed while this run wrote to it, or is another run's store now: this run has ended",
                topic="damaged-stores",
            )

    def _reconcile(self, block: int, rows: Mapping[str, Array]) -> None:
        """Put rows of a former run in place of failures. `InputError` if it explained other samples there."""
        first = block * self.manifest.block
        places = slice(first, first + len(rows[DIGEST]))
        with _damage_ignored():  # such a block is written anew
            were_explained = read(self.location, self.arrays[STATUS], places) == EXPLAINED
            if not were_explained.any():  # of most blocks, for which no more is read
                return
            digests, labels = (read(self.location, self.arrays[name], places) for name in (DIGEST, LABEL))
            relabelled = (labels != rows[LABEL]) & (labels != NO_LABEL)  # a chunk of labels may be lost
            for place in np.flatnonzero(((digests != rows[DIGEST]) | relabelled) & were_explained).tolist():
                label, problem = int(rows[LABEL][place]), str(rows[ERROR][place])
                sample = Sample(first + place, None, label, problem=problem, digest=int(rows[DIGEST][place]))
                check_unchanged(sample, KnownSample(int(digests[place]), int(labels[place]) if relabelled[place] else None))
            worse = were_explained & (rows[STATUS] == FAILED)
            is_done = worse.any() and str(block) in self.location.sizes(f"{DONE}/c")  # half of a block may be of two runs
            if is_done and _with_all_chunks(self.location, self.manifest, [block]):
                former = {name: read(self.location, self.arrays[name], places) for name in rows}
                for name, values in rows.items():
                    values[worse] = former[name][worse]

    def make_room(self, block: int) -> None:
        """Lengthen the arrays of a store of unknown length for a block, that of the blocks that are done last of all."""
        room = self.arrays[DONE].shape[0]
        if block >= room:
            room = max(block + 1, 2 * room)
            with self.location.errors("written"):
                self.resize(room * self.manifest.block, room)

    def resize(self, samples: int, blocks: int) -> None:
        """Give arrays this many rows; rows that remain keep what they have."""
        for one in sorted(self.manifest.layouts, key=lambda layout: layout.name == DONE):
            rows = samples if one.dimensions[0] == SAMPLE else blocks
            if self.arrays[one.name].shape[0] != rows:
                self.arrays[one.name].resize((rows, *one.shape))
                self.location.make_lasting([f"{one.name}/{_GROUP}"])

    def finish(self, samples: int) -> None:
        """State the number of samples, once it is known."""
        self._open()  # others may have made room
        with self.location.errors("written"):
            self.resize(samples, -(-samples // self.manifest.block))
        self.state(replace(self.manifest, samples=samples))

    def state(self, manifest: Manifest) -> None:
        """Replace the manifest."""
        with self.location.errors("written"):
            self.group.attrs[MANIFEST] = manifest.to_json()
            self.location.make_lasting([_GROUP])
        self.manifest = manifest


def create(location: Location, manifest: Manifest) -> BlockWriter:
    """A new store. It counts as one when all its arrays are there. Errors: `ArtefactError`.

    Only what a killed beginning left is replaced, whatever the caller has found out before.
    """
    names = location.sizes()
    if names and not _is_beginning(location):
        raise ArtefactError(
            f"{location} is not empty, and is not made a store: it has {', '.join(sorted(names)[:3])}", topic="damaged-stores"
        )
    with location.errors("written"):
        store = location.zarr_store()
        group = zarr_package().create_group(store, zarr_format=3, attributes={MANIFEST: _BEGINNING}, overwrite=bool(names))
        names_of = {dimension: names_along(manifest.facts, dimension) for dimension in (CONDITION, TARGET)}
        for one in manifest.layouts:
            _create_array(group, one, manifest, names_of)
        group.attrs[MANIFEST] = manifest.to_json()
        location.make_lasting(location.sizes_of_all(""))
    return BlockWriter(location, manifest)


def _create_array(group: Any, layout: ArrayLayout, manifest: Manifest, names_of: Mapping[str, Sequence[str]]) -> None:
    codecs = zarr_package().codecs
    blocks = -(-manifest.capacity // manifest.block)
    rows, held = (manifest.capacity, manifest.block) if layout.dimensions[0] == SAMPLE else (blocks, 1)
    sizes = tuple(max(1, size) for size in layout.shape)
    together = layout.chunk_rows(manifest.block)
    compressor = codecs.ZstdCodec(level=1)
    if not layout.is_text:  # bits of the same place beside each other, in the whole chunk
        size = max(1, together * layout.row_bytes)
        compressor = codecs.BloscCodec(cname="zstd", clevel=1, shuffle="bitshuffle", blocksize=size)
    group.create_array(
        layout.name,
        shape=(rows, *layout.shape),
        dtype=layout.dtype,
        chunks=(together, *sizes),
        shards=None if together == held else (held, *sizes),
        dimension_names=layout.dimensions,
        fill_value=layout.fill,
        filters=None,
        compressors=[compressor, codecs.Crc32cCodec()],
        attributes=layout.attributes(names_of),
    )


def opened_for_writing(location: Location, manifest: Manifest) -> BlockWriter:
    """The store at a location, after a former run: what a killed one left half written is removed, or written again."""
    location.remove_leftovers()
    writer = BlockWriter(location, manifest)
    if manifest.samples is None:  # it may have been killed while it lengthened the arrays
        blocks = writer.arrays[DONE].shape[0]
        with location.errors("written"):
            writer.resize(blocks * manifest.block, blocks)
    return writer


# --- what is there -----------------------------------------------------------------------------------------------------------


def blocks_among(names: Iterable[str]) -> set[int]:
    """The blocks whose numbers are among names of files: others may have files there, too."""
    return {int(name) for name in names if name.isascii() and name.isdigit() and name == str(int(name))}


def done_of(location: Location, manifest: Manifest, arrays: Mapping[str, Any], *, looks_for_chunks: bool = False) -> DoneBlocks:
    """What is done. Errors: `ArtefactError`.

    A chunk of the array of digests is there once its block is done: a list of their names is read instead of each.
    `looks_for_chunks`: count a block only if all its chunks are still there too.
    """
    sizes = location.sizes(f"{DONE}/c")
    found = {block: sizes[str(block)] for block in sorted(blocks_among(sizes))}
    if not found:
        check_is_there(location)
    blocks = {block: size for block, size in found.items() if block < arrays[DONE].shape[0]}
    for block, size in blocks.items():
        if size < _DONE_BYTES:  # after a power failure, or of a disk that is full
            raise damaged(location, f"{DONE}/c/{block}", "it is too short")
    if looks_for_chunks:
        blocks = {block: blocks[block] for block in _with_all_chunks(location, manifest, blocks)}
    values = partial(_of_chunk, location, arrays, size=manifest.block)
    last = max(blocks, default=-1)
    counts = [manifest.block if block in blocks else 0 for block in range(last + 1)]
    if blocks:
        if manifest.samples is None:  # the last block of a stream may be shorter
            status = _of_chunk(location, arrays, STATUS, last, size=manifest.block)
            counts[last] = int((status != MISSING).sum())
        else:
            counts[last] = samples_in(last, manifest.block, manifest.samples)
    return DoneBlocks(
        counts,
        lambda block: np.where(values(STATUS, block) == EXPLAINED, values(DIGEST, block), np.uint64(0)),
        partial(values, LABEL),
    )


def without_failed(done: DoneBlocks, location: Location, writer: BlockWriter) -> DoneBlocks:
    """The same without the blocks that have samples which failed."""
    size, counts = writer.manifest.block, list(done.counts)
    for block in done.blocks:
        status = _of_chunk(location, writer.arrays, STATUS, block, size=size)
        counts[block] = 0 if FAILED in status else counts[block]
    return replace(done, counts=counts)


def _with_all_chunks(location: Location, manifest: Manifest, blocks: Iterable[int]) -> set[int]:
    """The blocks of these whose chunks are there, in all arrays."""
    whole = set(blocks)
    for one in manifest.layouts:
        if whole and one.dimensions[0] == SAMPLE and 0 not in one.shape:
            sizes = location.sizes_of_all(one.name)
            whole = {block for block in whole if sizes.get(chunk_of(one, block))}
    return whole


def _of_chunk(location: Location, arrays: Mapping[str, Any], name: str, block: int, *, size: int) -> Array:
    """The values of an array of numbers for a block of so many samples. `ArtefactError` if they are damaged."""
    try:
        return read(location, arrays[name], slice(block * size, (block + 1) * size))
    except ArtefactError as error:
        raise damaged(location, f"{name}/c/{block}", error) from error


def chunk_of(layout: ArrayLayout, block: int) -> str:
    """The name of the file or object that has the values of a block."""
    return f"{layout.name}/c/{block}" + "/0" * len(layout.shape)


def damaged(location: Location, chunk: str, reason: BaseException | str) -> ArtefactError:
    """The error for a chunk that cannot be read."""
    text = reason if isinstance(reason, str) else reason_of(reason)
    return ArtefactError(
        f"{location}/{chunk} cannot be read: {text.rstrip('.')}. Remove what is left of this file, and call "
        "lrpfx.datasets.attribute with the same arguments: it explains the samples of this block anew",
        topic="damaged-stores",
    )


def reason_of(error: BaseException) -> str:
    """Why a chunk cannot be read, of the error of `read`."""
    cause = error.__cause__ or error
    return str(cause) if isinstance(cause, LrpfxError) else first_lines(cause)


def read(location: Location, array: Any, key: Any) -> Array:
    """Values of an array. `key`: numbers of samples in order, or as for Zarr. `ArtefactError` if they are damaged."""
    try:
        return np.asarray(array.oindex[key] if isinstance(key, np.ndarray) else array[key])
    except (IndexError, zarr_package().errors.BoundsCheckError) as error:
        raise InputError(
            f"{array.name.strip('/')} has the shape {tuple(array.shape)}: {first_lines(error)}", topic="reading-stores"
        ) from error
    except (MemoryError, LrpfxError):
        raise
    except Exception as error:  # of the codecs, in many kinds
        raise ArtefactError(
            f"the array {array.name.strip('/')!r} of {location} cannot be read: {first_lines(error)}", topic="damaged-stores"
        ) from error


def open_arrays(location: Location, manifest: Manifest, wrapped: Callable[[Any], Any] = lambda store: store) -> dict[str, Any]:
    """The arrays of Zarr of a store, to be read. `wrapped`: from the store of Zarr to another. Errors: `ArtefactError`."""
    try:
        store = wrapped(location.zarr_store(read_only=True))
        group = zarr_package().open_group(store, mode="r", zarr_format=3, use_consolidated=False)
        found = {one.name: group[one.name] for one in manifest.layouts}
        for one in manifest.layouts:
            _check_description(one, found[one.name], manifest)
        return found
    except ArtefactError:
        raise
    except Exception as error:  # of a damaged description, in many kinds
        raise ArtefactError(f"{location} is damaged: {first_lines(error)}", topic="damaged-stores") from error


def _check_description(layout: ArrayLayout, array: Any, manifest: Manifest) -> None:
    """Raise `ArtefactError` unless the description of an array is that of the manifest."""
    samples, blocks = manifest.samples, None if manifest.samples is None else -(-manifest.samples // manifest.block)
    rows = samples if layout.dimensions[0] == SAMPLE else blocks
    is_known = rows is None or array.shape[0] == rows  # room for a stream is made array by array
    if not is_known or tuple(array.shape[1:]) != layout.shape or (not layout.is_text and array.dtype != np.dtype(layout.dtype)):
        raise ArtefactError(
            f"the description of the array {layout.name!r} is damaged: it says {tuple(array.shape)} and {array.dtype}, and the "
            f"manifest {(rows, *layout.shape)} and {layout.dtype}",
            topic="damaged-stores",
        )


def check_is_there(location: Location) -> None:
    """Raise `ArtefactError` if a store that was opened is gone: what is not there would read as not yet written."""
    if _GROUP not in location.sizes():
        raise ArtefactError(
            f"the store {location} is not there any more: it was moved or removed since it was opened", topic="damaged-stores"
        )


def with_missed_chunks(store: Any) -> Any:
    """A store of Zarr where a chunk that is lost is an `ArtefactError`: for Zarr, its values are those of nothing written."""
    kind: Any = zarr_package().storage.WrapperStore

    class WithMissedChunks(kind):
        async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
            found = await super().get(key, prototype, byte_range)
            array, is_chunk, chunk = key.partition("/c/")
            if found is not None or not is_chunk:
                return found
            if array != DONE and await super().exists(f"{DONE}/c/{chunk.partition('/')[0]}"):
                found = await super().get(key, prototype, byte_range)  # it may have been written in between
                if found is None:
                    raise ArtefactError("it is lost", topic="damaged-stores")
            elif not await super().exists(_GROUP):
                raise ArtefactError("the store is gone", topic="damaged-stores")
            return found

        def __reduce__(self) -> tuple[Any, ...]:
            return with_missed_chunks, (self._store,)

    return WithMissedChunks(store)

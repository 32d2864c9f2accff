"""A store on disk: a Zarr 3 group that is written block by block, each of which counts once its entry in "done" is written."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from lrpfx.datasets.layout import DONE, MISSING, SAMPLE, SCALE, STATUS, TEXT_BYTES, Array, Layout, scaled
from lrpfx.deploy.files import as_path
from lrpfx.errors import ArtefactError, InputError, first_lines, os_errors
from lrpfx.support.optional_packages import optional_package

FORMAT = 1
#: The attribute of the group with the manifest.
MANIFEST = "lrpfx"
_GROUP = "zarr.json"
_CODECS = {"sharding_indexed", "bytes", "zstd", "crc32c"}
_MOST_BYTES = 64 << 20  # of metadata
_MOST_SAMPLES = 1 << 40


def zarr_package() -> Any:
    """The package zarr. `InputError` if it is not installed."""
    return optional_package("zarr", "a store of explanations", "datasets")


# --- manifests ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """What a store says of itself. `facts`: plain data; its arrays, the length of its blocks, how many samples if known."""

    facts: dict[str, Any]
    layouts: list[Layout]
    block: int
    samples: int | None

    def to_json(self) -> dict[str, Any]:
        arrays = {one.name: one.to_json() for one in self.layouts}
        return {"format": FORMAT, **self.facts, "block": self.block, "samples": self.samples, "arrays": arrays}

    @classmethod
    def from_json(cls, data: Any) -> "Manifest":
        """The manifest, checked. Errors: `ArtefactError`."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            version = data.get("format") if isinstance(data, dict) else None
            raise ArtefactError(f"the store is not of lrpfx, or of another release of it (format {version!r}, not {FORMAT})")
        facts = {name: value for name, value in data.items() if name not in ("format", "block", "samples", "arrays")}
        block, samples, arrays = data.get("block"), data.get("samples"), data.get("arrays")
        dicts = all(isinstance(facts.get(name), dict) for name in ("versions", "settings", "data"))
        texts = all(isinstance(facts.get(name), str) for name in ("model", "composite"))
        if not (_is_count(block, 1) and (samples is None or _is_count(samples, 0)) and dicts and texts):
            raise ArtefactError("the store's manifest is damaged")
        if not isinstance(arrays, dict):
            raise ArtefactError("the store's manifest names no arrays")
        layouts = [Layout.from_json(name, one) for name, one in arrays.items()]
        names = {one.name for one in layouts}
        if missing := {STATUS, DONE} - names:
            raise ArtefactError(f"the store has no array {sorted(missing)[0]!r}")
        return cls(facts, layouts, block, samples)

    @property
    def capacity(self) -> int:
        """The samples that there is room for at first."""
        return self.block if self.samples is None else self.samples


def _is_count(value: Any, least: int) -> TypeGuard[int]:
    return type(value) is int and least <= value <= _MOST_SAMPLES


def read_manifest(path: Path) -> Manifest:
    """The manifest of a store. Errors: `ArtefactError`."""
    data = _json_in(path / _GROUP)
    if data.get("zarr_format") != 3 or data.get("node_type") != "group" or not isinstance(data.get("attributes"), dict):
        raise ArtefactError(f"{path} is not a Zarr 3 group")
    if MANIFEST not in data["attributes"]:
        raise ArtefactError(f"{path} is a Zarr group, but not one that lrpfx.datasets.attribute wrote")
    return Manifest.from_json(data["attributes"][MANIFEST])


def _json_in(path: Path) -> dict[str, Any]:
    with os_errors(ArtefactError, path, "read"):
        if path.stat().st_size > _MOST_BYTES:
            raise ArtefactError(f"{path} is too large")
        content = path.read_bytes()
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"{path} is damaged: {first_lines(error)}") from error
    if not isinstance(found, dict):
        raise ArtefactError(f"{path} is damaged")
    return found


def rows_of(path: Path, manifest: Manifest, layout: Layout) -> int:
    """The samples or blocks that an array has room for. `ArtefactError` unless it is as the manifest says.

    Only the codecs that lrpfx writes are let pass, before Zarr sees any: it would look for others among installed packages.
    """
    data = _json_in(path / layout.name / _GROUP)
    try:
        rows, *shape = data["shape"]
        codecs = list(data["codecs"])
        for one in list(codecs):
            codecs += [*one.get("configuration", {}).get("codecs", ()), *one.get("configuration", {}).get("index_codecs", ())]
        names = {one["name"] for one in codecs}
        grid = data["chunk_grid"]["configuration"]["chunk_shape"]
        held = manifest.block if layout.dimensions[0] == SAMPLE else 1
        fits = (
            data["node_type"] == "array"
            and data["zarr_format"] == 3
            and data["data_type"] == layout.dtype
            and tuple(shape) == layout.shape
            and type(rows) is int
            and 0 <= rows <= _MOST_SAMPLES
            and list(grid) == [held, *(max(1, size) for size in layout.shape)]
            and names <= _CODECS
            and not data.get("storage_transformers")
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtefactError(f"the array {layout.name!r} of {path} is damaged: {first_lines(error)}") from error
    if not fits:
        raise ArtefactError(f"the array {layout.name!r} of {path} is not as the store's manifest says")
    return int(rows)


# --- writing -----------------------------------------------------------------------------------------------------------------


class BlockWriter:
    """Writes the blocks of a store. Blocks may be written in any order, by several processes if the length is known."""

    def __init__(self, path: Path, manifest: Manifest, is_resumed: bool = True) -> None:
        zarr = zarr_package()
        self.is_resumed = is_resumed
        self.path = path
        self.manifest = manifest
        self.group = zarr.open_group(zarr.storage.LocalStore(path), mode="r+", zarr_format=3, use_consolidated=False)
        self.arrays = {one.name: self.group[one.name] for one in manifest.layouts}

    def empty(self, block: int) -> dict[str, Array]:
        """Rows for the samples of a block, without a value yet; those of texts may be added."""
        rows = self.manifest.block
        if self.manifest.samples is not None:
            rows = min(rows, self.manifest.samples - block * rows)
        made = {}
        for one in self.manifest.layouts:
            if one.dimensions[0] == SAMPLE and not one.name.startswith(SCALE) and one.name not in TEXT_BYTES:
                made[one.name] = np.full((rows, *one.shape), one.fill, dtype="float32" if one.is_scaled else one.dtype)
        return made

    def write(self, block: int, rows: Mapping[str, Array], digest: int) -> None:
        """Write the rows of a block, and then that it is done. Arrays without rows keep what is in every store at first.

        Errors: `ArtefactError`.
        """
        with os_errors(ArtefactError, self.path, "written"):
            self._make_room(block)
            first = block * self.manifest.block
            for one in self.manifest.layouts:
                if one.dimensions[0] != SAMPLE or one.name.startswith(SCALE):
                    continue
                if one.name not in rows:
                    if self.is_resumed:  # a killed run may have written some
                        self.arrays[one.name][first : first + self.manifest.block] = one.fill
                    continue
                values = rows[one.name]
                if one.is_scaled:
                    values, factors = scaled(values)
                    self.arrays[SCALE + one.name][first : first + len(values)] = factors
                self.arrays[one.name][first : first + len(values)] = values
            self.arrays[DONE][block] = digest

    def _make_room(self, block: int) -> None:
        """Lengthen the arrays of a store of unknown length, that of the blocks that are done last of all."""
        room = self.arrays[DONE].shape[0]
        if block < room:
            return
        room = max(block + 1, 2 * room)
        self._resize(room * self.manifest.block, room)

    def _resize(self, samples: int, blocks: int) -> None:
        for one in sorted(self.manifest.layouts, key=lambda layout: layout.name == DONE):
            rows = samples if one.dimensions[0] == SAMPLE else blocks
            if self.arrays[one.name].shape[0] != rows:
                self.arrays[one.name].resize((rows, *one.shape))

    def finish(self, samples: int) -> None:
        """State the number of samples, once it is known."""
        with os_errors(ArtefactError, self.path, "written"):
            manifest = Manifest(self.manifest.facts, self.manifest.layouts, self.manifest.block, samples)
            self._resize(samples, -(-samples // self.manifest.block))
            self.group.attrs[MANIFEST] = manifest.to_json()
            self.manifest = manifest


def create(path: Path, manifest: Manifest) -> None:
    """An empty store, which is there with all its arrays or not at all. Errors: `ArtefactError`."""
    zarr = zarr_package()
    made = path.with_name(f".{path.name}.lrpfx-new")
    with os_errors(ArtefactError, path, "written"):
        shutil.rmtree(made, ignore_errors=True)  # of a killed run
        store = zarr.storage.LocalStore(made)
        group = zarr.create_group(store, zarr_format=3, attributes={MANIFEST: manifest.to_json()})
        for one in manifest.layouts:
            _create_array(group, one, manifest)
        os.replace(made, path)


def _create_array(group: Any, layout: Layout, manifest: Manifest) -> None:
    codecs = zarr_package().codecs
    blocks = -(-manifest.capacity // manifest.block)
    rows, held = (manifest.capacity, manifest.block) if layout.dimensions[0] == SAMPLE else (blocks, 1)
    sizes = tuple(max(1, size) for size in layout.shape)
    together = layout.chunk_rows(manifest.block)
    group.create_array(
        layout.name,
        shape=(rows, *layout.shape),
        dtype=layout.dtype,
        chunks=(together, *sizes),
        shards=None if together == held else (held, *sizes),
        dimension_names=layout.dimensions,
        fill_value=layout.fill,
        filters=None,
        compressors=[codecs.ZstdCodec(level=1), codecs.Crc32cCodec()],
    )


def opened_for_writing(path: Path, manifest: Manifest) -> BlockWriter:
    """The store at `path`, after a former run: what a killed one left half written is removed, or written again."""
    with os_errors(ArtefactError, path, "read"):
        for left in path.rglob("*.partial"):
            left.unlink()
    rows = {one.name: rows_of(path, manifest, one) for one in manifest.layouts}
    writer = BlockWriter(path, manifest)
    if manifest.samples is None:  # it may have been killed while it lengthened the arrays
        blocks = rows[DONE]
        with os_errors(ArtefactError, path, "written"):
            writer._resize(blocks * manifest.block, blocks)
    return writer


def progress_of(path: Path, manifest: Manifest, arrays: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """The samples of each block that is done, or 0, and the digests of blocks. Errors: `ArtefactError`."""
    digests = read(path, arrays[DONE], slice(None)).tolist()
    counts = []
    for block, is_done in enumerate(digests):
        first = block * manifest.block
        rows = 0
        if is_done and manifest.samples is None:  # the last block of a stream may be shorter
            rows = int((read(path, arrays[STATUS], slice(first, first + manifest.block)) != MISSING).sum())
        elif is_done and manifest.samples is not None:
            rows = min(manifest.block, manifest.samples - first)
        counts.append(rows)
    return counts, digests


def read(path: Path, array: Any, key: Any) -> Array:
    """Values of an array. `ArtefactError` if they are damaged."""
    try:
        return np.asarray(array[key])
    except (IndexError, zarr_package().errors.BoundsCheckError) as error:
        raise InputError(f"{array.name.strip('/')} has the shape {tuple(array.shape)}: {first_lines(error)}") from error
    except MemoryError:
        raise
    except Exception as error:  # of the codecs, in many kinds
        raise ArtefactError(
            f"the array {array.name.strip('/')!r} of {path} cannot be read, it may be damaged: {first_lines(error)}"
        ) from error


def store_path(path: str | os.PathLike[str]) -> Path:
    """The path of a store; "~" is the home folder."""
    try:
        return as_path(path).expanduser().absolute()
    except RuntimeError as error:
        raise InputError(f"{path}: {error}") from error

"""Whether everything in a store can be read: checksums, chunks that are lost, and what a power failure left."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from lrpfx.datasets.layout import DONE, MISSING, SAMPLE, STATUS
from lrpfx.datasets.locations import Location, location_of
from lrpfx.datasets.store import Manifest, blocks_among, chunk_of, open_arrays, read, read_manifest, reason_of
from lrpfx.errors import ArtefactError
from lrpfx.samples.plan import samples_in
from lrpfx.support.numbers import counted


@dataclass(frozen=True)
class Verification:
    """What `verify` found in a store.

    `path`: that of the store. `done`: how many blocks count as done, whatever is wrong with them. `damaged`: what is wrong
    with a chunk of such a block, by the name of its file. `unfinished`: blocks that a run had begun when it was stopped; the
    next one writes them anew. `leftovers`: files that were being written then. `is_repaired`: damaged chunks and leftovers
    were removed, and the blocks of the former no longer count as done.
    """

    path: str
    done: int
    damaged: dict[str, str]
    unfinished: list[int]
    leftovers: list[str]
    is_repaired: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether every block that counts as done can be read, as it was found or since it was repaired."""
        return not self.damaged or self.is_repaired

    def __str__(self) -> str:
        lines = [f"{self.path}: {counted(self.done, 'block')} done, {counted(len(self.damaged), 'damaged chunk')}"]
        lines += [f"  {chunk}: {reason}" for chunk, reason in self.damaged.items()]
        if self.unfinished:
            lines.append(f"{counted(len(self.unfinished), 'unfinished block')}: the next run writes them anew")
        if self.leftovers:
            lines.append(f"{counted(len(self.leftovers), 'file')} of a run that was stopped: {', '.join(self.leftovers)}")
        if self.is_repaired:
            lines.append("removed; call lrpfx.datasets.attribute with the same arguments to explain these samples anew")
        return "\n".join(lines)


def verify(
    store: str | os.PathLike[str], *, repair: bool = False, storage_options: Mapping[str, Any] | None = None
) -> Verification:
    """Read everything in a store that `lrpfx.datasets.attribute` wrote, compare checksums, and say what is damaged or lost.

    Every block reaches the disk before it counts as done, so a power failure loses at most blocks that are not. What a disk, a
    copy or another program damages later is found here, unless it is a whole file of another place, whose checksum is right.

    Parameters
    ----------
    store
        The path of the store.
    repair
        Whether to remove damaged chunks and what a stopped run left. The samples of the blocks that they belong to are then
        explained anew by `lrpfx.datasets.attribute` with the arguments of the first run.
    storage_options
        For the file system of a path with a scheme.

    Raises
    ------
    ArtefactError
        There is no store, or its manifest or the description of an array is damaged, which cannot be repaired.
    InputError
        A run writes to the store that is to be repaired.
    """
    location = location_of(store, storage_options)
    manifest = read_manifest(location)
    with location.sole_writer() if repair else nullcontext():
        return _verified(location, manifest, repair)


def _verified(location: Location, manifest: Manifest, repair: bool) -> Verification:
    arrays = open_arrays(location, manifest)
    layouts = [one for one in manifest.layouts if one.dimensions[0] == SAMPLE and 0 not in one.shape]
    there = {one.name: location.sizes_of_all(one.name) for one in layouts}
    done = sorted(blocks_among(location.sizes(f"{DONE}/c")))
    damaged: dict[str, str] = {}
    broken = set()
    for block in done:
        found = {} if _problem(location, arrays[DONE], block, block + 1) is None else {f"{DONE}/c/{block}": "it cannot be read"}
        first, last = block * manifest.block, (block + 1) * manifest.block
        for one in layouts:
            chunk = chunk_of(one, block)
            problem = _problem(location, arrays[one.name], first, last) if chunk in there[one.name] else "it is lost"
            if problem is not None:
                found[chunk] = problem
        if not found and manifest.samples is not None:
            status = read(location, arrays[STATUS], slice(first, first + samples_in(block, manifest.block, manifest.samples)))
            if MISSING in status:
                found[f"{STATUS}/c/{block}"] = "it is of another state: samples are missing in it"
        damaged |= found
        broken |= {block} if found else set()
    begun = blocks_among(name.split("/")[2] for names in there.values() for name in names if "/c/" in name)
    leftovers = location.leftovers()
    if repair:
        location.remove([*(f"{DONE}/c/{block}" for block in sorted(broken)), *damaged, *leftovers])
    is_repaired = repair and bool(damaged or leftovers)
    return Verification(str(location), len(done), damaged, sorted(begun - set(done)), leftovers, is_repaired)


def _problem(location: Location, array: Any, first: int, last: int) -> str | None:
    """Why the values of a block cannot be read, or None."""
    try:
        read(location, array, slice(first, last))
    except ArtefactError as error:
        return reason_of(error)
    return None

"""Archives: .pt2 files are torch's zip files with a manifest, its hash and a self-test as additional entries."""

import hashlib
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

Entries = dict[str, bytes]  # name, without the top folder of the archive -> content

FOLDER = "lrpfx"
MANIFEST, MANIFEST_HASH, SELF_TEST = f"{FOLDER}/manifest.json", f"{FOLDER}/manifest.json.sha256", f"{FOLDER}/self_test.npz"
_TOP = "program"
_FORMAT, _VERSION = "archive_format", "archive_version"
_ALWAYS = "archive_format|archive_version|byteorder|" + r"\.data/(version|serialization_id)"


class RefusedError(ValueError):
    """A file is damaged or holds something that does not belong in it; the message gives the reason."""


# --- zip files -----------------------------------------------------------------------------------------------------------


def read_zip(content: bytes) -> Entries:
    """The entries of a zip file as torch and numpy write it: unique names, no compression, checksums verified.

    The entries together are no larger than the file, so a small file cannot use much memory.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        infos = archive.infolist()
        names = Counter(info.orig_filename for info in infos)
        twice = sorted(name for name, count in names.items() if count > 1)
        if twice:
            raise RefusedError(f"it has {len(twice)} entry names twice: {', '.join(twice[:3])}")
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise RefusedError(f"{info.filename} is compressed, which lrpfx does not write")
        if sum(info.file_size for info in infos) > len(content):
            raise RefusedError("its entries are larger than the file")
        return {info.orig_filename: archive.read(info) for info in infos}


def read_archive(content: bytes) -> Entries:
    """The entries of an archive."""
    files = read_zip(content)
    folders = {name.partition("/")[0] for name in files}
    if len(folders) != 1:
        raise RefusedError("it is damaged, or was not written by lrpfx: its entries are not in one folder")
    return {name.partition("/")[2]: value for name, value in files.items()}


def archive_of(entries: Mapping[str, bytes]) -> bytes:
    """An archive of exactly these entries: torch reads what was checked, and nothing else that the file may hold."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(f"{_TOP}/{name}"), content)  # without a date: equal entries give equal archives
    return whole.getvalue()


def read_arrays(content: bytes) -> dict[str, np.ndarray]:
    """The arrays of an .npz file. The size of each must match its entry."""
    arrays = {}
    for name, data in read_zip(content).items():
        file = io.BytesIO(data)
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise RefusedError(f"the array {name} has an unknown form")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        rest = data[file.tell() :]
        size = int(np.prod([1, *shape], dtype=object))
        if dtype.hasobject or fortran or size * dtype.itemsize != len(rest):
            raise RefusedError(f"the size of the array {name} does not match its header")
        arrays[name.removesuffix(".npy")] = np.frombuffer(rest, dtype).reshape(shape).copy()
    return arrays


# --- entries ---------------------------------------------------------------------------------------------------------------


def signed_archive(entries: Mapping[str, bytes], manifest: Mapping[str, Any], self_test: bytes) -> bytes:
    """An archive of `signed_entries`."""
    return archive_of(signed_entries(entries, manifest, self_test))


def signed_entries(entries: Mapping[str, bytes], manifest: Mapping[str, Any], self_test: bytes) -> Entries:
    """A program's entries, its self-test, and its manifest, which contains the hash of everything else."""
    whole = {**entries, SELF_TEST: self_test}
    text = json.dumps({**manifest, "hash": hash_of(whole)}, indent=1).encode()
    return {**whole, MANIFEST: text, MANIFEST_HASH: hashlib.sha256(text).hexdigest().encode()}


def read_signed_archive(content: bytes) -> tuple[bytes, bytes, Entries]:
    """What `read_signed_entries` gives for the entries of an archive."""
    return read_signed_entries(read_archive(content))


def read_signed_entries(entries: Entries) -> tuple[bytes, bytes, Entries]:
    """The manifest among entries, the self-test, and the other entries. Raises `RefusedError` if a hash does not match."""
    if not {MANIFEST, MANIFEST_HASH, SELF_TEST} <= set(entries):
        raise RefusedError("it is damaged, or was not written by lrpfx: it has no manifest")
    text = entries.pop(MANIFEST)
    if hashlib.sha256(text).hexdigest().encode() != entries.pop(MANIFEST_HASH):
        raise RefusedError("it is damaged: its manifest has another hash")
    if hash_of(entries) != json.loads(text)["hash"]:
        raise RefusedError("it is damaged: its content has another hash")
    return text, entries.pop(SELF_TEST), entries


def hash_of(entries: Mapping[str, bytes]) -> str:
    """The SHA-256 of the names, sizes and contents of the entries."""
    total = hashlib.sha256()
    for name in sorted(entries):
        total.update(f"{name}\n{len(entries[name])}\n".encode())
        total.update(entries[name])
    return total.hexdigest()


def check_entries(entries: Mapping[str, bytes], names: str, needed: tuple[str, ...] = ()) -> None:
    """Raise `RefusedError` unless each entry is one of every archive or matches the pattern `names`, and none is missing."""
    known = re.compile(f"{_ALWAYS}|{names}")
    strange = [name for name in entries if not known.fullmatch(name)]
    if strange:
        raise RefusedError(f"it holds {', '.join(map(repr, strange[:3]))}, which does not belong in it")
    missing = [name for name in (_FORMAT, _VERSION, *needed) if name not in entries]
    if missing or entries[_FORMAT] != b"pt2" or entries[_VERSION] != b"0":
        raise RefusedError(f"it does not have torch's current archive format{f': it has no {missing[0]}' if missing else ''}")

"""Archives: .pt2 files are torch's zip files with a manifest, its hash and a self-test as additional entries."""

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping
from typing import Any

from lrpfx.support.stored_arrays import Entries, RefusedError, read_zip

FOLDER = "lrpfx"
MANIFEST, MANIFEST_HASH, SELF_TEST = f"{FOLDER}/manifest.json", f"{FOLDER}/manifest.json.sha256", f"{FOLDER}/self_test.npz"
_TOP = "program"
_FORMAT, _VERSION = "archive_format", "archive_version"
_ALWAYS = "archive_format|archive_version|byteorder|" + r"\.data/(version|serialization_id)"


# --- zip files -----------------------------------------------------------------------------------------------------------


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

"""Signatures of files with a key of Ed25519. A signature lies beside its file, as `model.onnx.sig`."""

import hashlib
import os
from pathlib import Path
from typing import Any

from lrpfx.errors import ArtefactError, InputError, os_errors
from lrpfx.support.files import as_path, written
from lrpfx.support.optional_packages import optional_package
from lrpfx.support.stored_arrays import RefusedError

#: The length of the shortest text of a private key, in base64 alone. No error repeats texts that are as long.
SHORTEST_KEY = 44

#: A path of a file in PEM format, or its content.
Key = str | os.PathLike[str] | bytes


def write_signature(path: Path, content: bytes, key: Key) -> None:
    """Sign the content of a file with a private key."""
    loaded = _key(key, "private", password=None)
    written(_beside(path), loaded.sign(_message(content)).hex().encode())


def check_signature(path: Path, content: bytes, key: Key) -> None:
    """Raise `RefusedError` unless the content of a file was signed with the private key that belongs to a public key."""
    loaded = _key(key, "public")
    invalid = optional_package("cryptography.exceptions", "a signature", "signing").InvalidSignature
    if not _beside(path).is_file():
        raise RefusedError(f"it is not signed: there is no {_beside(path).name} beside it")
    try:
        loaded.verify(bytes.fromhex(_beside(path).read_text()), _message(content))
    except (invalid, ValueError) as error:
        raise RefusedError("its signature is not one of this key for this content") from error


def _key(key: Key, half: str, **settings: Any) -> Any:
    """The key of Ed25519 in `key`. `half`: "private" or "public"."""
    serialization = optional_package("cryptography.hazmat.primitives.serialization", "a signature", "signing")
    kinds = optional_package("cryptography.hazmat.primitives.asymmetric.ed25519", "a signature", "signing")
    if isinstance(key, str) and key.lstrip().startswith("-----BEGIN"):  # the text may be secret: no error repeats it
        raise InputError(
            f"the {half} key is its text as a str, which would be a path: pass the text as bytes", topic="refused-files"
        )
    if not isinstance(key, bytes):
        path = as_path(key)
        if len(os.fspath(path)) >= SHORTEST_KEY and not os.path.isfile(path):
            raise ArtefactError(f"the {half} key cannot be read: there is no such file", topic="files-and-folders")
        with os_errors(ArtefactError, path, "read"):
            key = path.read_bytes()
    try:
        loaded = getattr(serialization, f"load_pem_{half}_key")(key, **settings)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"this is not an Ed25519 {half} key in PEM format without a password: {error}", topic="refused-files"
        ) from error
    if not isinstance(loaded, getattr(kinds, f"Ed25519{half.title()}Key")):
        raise InputError(f"this is a {half} key of another kind, not an Ed25519 {half} key", topic="refused-files")
    return loaded


def _message(content: bytes) -> bytes:
    return b"lrpfx\n" + hashlib.sha256(content).digest()


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.sig")

"""Files of arrays, such as .npz, read without executing anything and without using more memory than they have bytes."""

import io
import zipfile
from collections import Counter

import numpy as np

Entries = dict[str, bytes]  # name, without the top folder of the archive -> content


class RefusedError(ValueError):
    """A file is damaged or holds something that does not belong in it; the message gives the reason."""


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

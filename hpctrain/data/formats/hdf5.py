"""HDF5: arrays of a file by their path in it, read by h5py.

    contiguous, not compressed      mapped to memory: the rows that are used are read, no others
    chunked                         whole chunks are decoded, and the last ones kept

Arrays that lie in other files (external links, external storage, virtual) are refused: where such
a file is missing, HDF5 reads its fill value in place of the data.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.core.files import open_regular
from hpctrain.core.names import unknown
from hpctrain.core.opening import NAMED
from hpctrain.data.formats.arrays import (
    Part,
    ReadRows,
    guarded,
    must_be_numbers,
    must_be_unpacked,
    refuse_missing,
)
from hpctrain.data.formats.blocks import CACHE_BYTES, numeric_blocks
from hpctrain.data.formats.libraries import describe, faults_of, load_library
from hpctrain.data.stored import count_bytes, map_range, take_rows

_EXPECTED = "an HDF5 file"
_processes: set[int] = set()  #: that opened files: at most one, since HDF5 does not survive a fork


def probe(path: Path, keys: tuple[str, ...]) -> list[Part]:
    """Return the arrays `keys` of a file; raise UsageError for a file or array of another kind."""
    with _open(path) as file, faults_of(str(path), _EXPECTED):
        return [_probe_array(path, file, key) for key in keys]


def list_keys(path: Path) -> list[str]:
    """Return the names of a file's arrays."""
    with _open(path) as file, faults_of(str(path), _EXPECTED):
        return _names(file)


def _open(path: Path) -> Any:
    open_regular(path, NAMED).close()  # no FIFO, no device; HDF5 opens by name, to lock the file
    h5py = load_library("h5py", "hdf5")
    _processes.add(os.getpid())
    if len(_processes) > 1:
        raise HpctrainError(
            f"{path}: the HDF5 library was used before this process was forked, and cannot be used "
            "in both; start processes by spawn, or read the file in a single process"
        )
    try:
        return h5py.File(path, "r")
    except BlockingIOError:
        raise UsageError(
            f"{path}: expected a file that nobody writes to, seen one that is locked: another "
            "process has it open for writing. Close it there; if the file system has no locks, or "
            "the writer is gone, set HDF5_USE_FILE_LOCKING=FALSE"
        ) from None
    except Exception as error:  # h5py does not document errors of damaged bytes
        raise UsageError(
            f"{path}: expected {_EXPECTED}, seen: {describe(error)}; copy it again"
        ) from None


def _names(file: Any) -> list[str]:
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if hasattr(item, "dtype") else None)
    return names


def _probe_array(path: Path, file: Any, key: str) -> Part:
    dataset, place = _dataset(path, file, key), f"{path}: {key}"
    shape, dtype = dataset.shape, dataset.dtype
    must_be_numbers(dtype, shape or (), place)
    if dataset.is_virtual or dataset.external:
        raise UsageError(
            f"{place}: expected an array in the file itself, seen one in other files; name those: "
            "path = 'part-*.h5'"
        )
    must_be_unpacked(dataset.attrs, place)
    note = f"{dataset.compression or 'not compressed'}" if dataset.chunks else "contiguous"
    chunk_rows = dataset.chunks[0] if dataset.chunks else None
    open_rows = partial(_open_rows, path, key)
    is_mapped = _mapped(path, dataset) is not None
    return Part(place, shape, dtype, chunk_rows, open_rows, note, in_any_order=is_mapped)


def _dataset(path: Path, file: Any, key: str) -> Any:
    """Return the dataset `key`; no part of its name may be a link into another file."""
    import h5py

    names = key.strip("/").split("/")
    for end in range(1, len(names) + 1):
        with faults_of(str(path), _EXPECTED):
            link = file.get("/".join(names[:end]), getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise UsageError(
                f"{path}: {key}: expected an array in the file itself, seen a link to "
                f"{link.filename}; give that file as path"
            )
    item = file.get(key) if key.strip("/") else None
    if not isinstance(item, h5py.Dataset):
        raise UsageError(unknown(f"array in {path}:", key, _names(file)))
    return item


def _open_rows(path: Path, key: str) -> ReadRows:
    file = _open(path)
    with faults_of(str(path), _EXPECTED):
        dataset, place = _dataset(path, file, key), f"{path}: {key}"
        read = _mapped(path, dataset) or _decoded(dataset)
        read = refuse_missing(read, dataset.attrs, place)
    return guarded(read, place, "a whole HDF5 file")


def _mapped(path: Path, dataset: Any) -> ReadRows | None:
    """Return the function of the rows of a contiguous dataset; None for another."""
    offset = dataset.id.get_offset()
    if offset is None or dataset.chunks is not None or not _is_plain(dataset):
        return None
    with open_regular(path, NAMED) as file:
        array = map_range(file, path, dataset.dtype, dataset.shape, offset)
    return partial(take_rows, array)


def _is_plain(dataset: Any) -> bool:
    """Return whether the bytes of a dataset are NumPy's: not so for enumerations, such as bool."""
    import h5py

    size_bytes = count_bytes(dataset.dtype, dataset.shape)
    return (
        dataset.id.get_storage_size() == size_bytes
        and dataset.dtype.kind in "iuf"
        and dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype)
    )


def _decoded(dataset: Any) -> ReadRows:
    """Return the function of rows that are read by chunks, or where a chunk is large, by runs."""
    chunk_rows = dataset.chunks[0] if dataset.chunks else 0
    row_bytes = count_bytes(dataset.dtype, dataset.shape[1:])
    if chunk_rows and chunk_rows * row_bytes <= CACHE_BYTES:
        return numeric_blocks(dataset.shape[0], chunk_rows, lambda part: dataset[part])

    def read(rows: np.ndarray) -> np.ndarray:
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        pieces = [dataset[run[0] : run[-1] + 1] for run in runs if len(run)]
        return np.concatenate([np.empty((0, *dataset.shape[1:]), dataset.dtype), *pieces])

    return read

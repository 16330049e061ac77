"""Zarr, formats 2 and 3: arrays of a group, a folder or a .zip file, read by the zarr library.

Whole chunks, or shards of chunks, are decoded, and the last ones kept. A chunk that is not stored
has the fill value of its array: Zarr does not tell a lost chunk from one that was never written.

In arrays of format 2, xarray's mark of missing values is the fill value. A fill value of 0 is no
mark here, since it is also Zarr's default, and 0 is a pixel or a label more often than a gap.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
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
from hpctrain.data.formats.blocks import numeric_blocks
from hpctrain.data.formats.libraries import faults_of, load_library

log = logging.getLogger(__name__)
_EXPECTED = "a group of Zarr arrays"
_REMEDY = "write it with zarr.open_group(path, mode='w'), or copy it again"
MAX_LISTED = 10_000  #: files and chunks that are looked for; a damaged shape may have any number
MAX_ROW_CHUNKS = 100_000  #: that hold the values of a row; more need seconds to be looked for


def probe(path: Path, keys: tuple[str, ...]) -> list[Part]:
    """Return the arrays `keys` of a group; raise UsageError for other kinds."""
    group = _open(path)
    return [_probe_array(path, group, key) for key in keys]


def list_keys(path: Path) -> list[str]:
    """Return the names of a group's arrays."""
    return sorted(_arrays(path, _open(path)))


def _open(path: Path) -> Any:
    zarr = load_library("zarr", "zarr")
    logging.getLogger("asyncio").addFilter(_is_not_of_zarr)
    is_folder = path.is_dir()
    if not is_folder:
        open_regular(path, NAMED).close()
    with faults_of(str(path), _EXPECTED, _REMEDY):
        _must_have_regular_files(path)
        store = str(path) if is_folder else zarr.storage.ZipStore(str(path), mode="r")
        return zarr.open_group(store, mode="r")


def _is_not_of_zarr(record: logging.LogRecord) -> bool:
    """Return False for the traceback of a task that Zarr left after the first error, now ours."""
    text = record.getMessage()
    return not ("never retrieved" in text and "zarr" in text)


def _must_have_regular_files(folder: Path) -> None:
    """Raise UsageError for a FIFO or a device, which the library would read without an end.

    The first MAX_LISTED files are looked at.
    """
    for entry in islice(_iterate_files(folder), MAX_LISTED):
        if not entry.is_file(follow_symlinks=False) and not os.path.isdir(entry):
            open_regular(Path(entry), NAMED).close()


def _iterate_files(folder: Path | os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    """Yield the files below a folder; none, if it is no folder."""
    with suppress(NotADirectoryError, FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            yield from _iterate_files(entry) if entry.is_dir(follow_symlinks=False) else (entry,)


def _arrays(path: Path, group: Any, prefix: str = "") -> dict[str, Any]:
    """Return the arrays of a group and the groups in it, by name."""
    with faults_of(str(path), _EXPECTED, _REMEDY):
        arrays = {f"{prefix}{name}": array for name, array in group.arrays()}
        groups = list(group.groups())
    for name, inner in groups:
        arrays |= _arrays(path, inner, f"{prefix}{name}/")
    return arrays


def _array(path: Path, group: Any, key: str) -> Any:
    with faults_of(f"{path}: {key}", "a Zarr array", _REMEDY):
        item = group.get(key)
    if item is None or not hasattr(item, "chunks"):
        raise UsageError(unknown(f"array in {path}:", key, _arrays(path, group)))
    return item


def _probe_array(path: Path, group: Any, key: str) -> Part:
    array, place = _array(path, group, key), f"{path}: {key}"
    with faults_of(place, "a Zarr array", _REMEDY):
        shape, dtype = tuple(array.shape), np.dtype(array.dtype)
        must_be_numbers(dtype, shape, place)
        _must_not_run_code(array, place)
        must_be_unpacked(_attributes(array), place)
        if _is_of_xarray(array) and _fills_with_zero(array):
            _announce_zeros(key)
        rows, note = _chunk_rows(array), f"{array.nchunks} chunks"
        row_chunks = array.nchunks // -(-shape[0] // max(1, array.chunks[0]))
        if row_chunks > MAX_ROW_CHUNKS:
            raise UsageError(
                f"{place}: expected at most {MAX_ROW_CHUNKS} chunks across a row, seen shape "
                f"{shape} in chunks of {array.chunks}; write larger chunks, or copy it again"
            )
        if array.nchunks <= MAX_LISTED:
            note = f"{array.nchunks_initialized} of {note} stored"
    return Part(place, shape, dtype, rows, partial(_open_rows, path, key), note)


def _must_not_run_code(array: Any, place: str) -> None:
    """Raise UsageError for a codec that would execute code from the file."""
    metadata = array.metadata.to_dict() if hasattr(array.metadata, "to_dict") else array.metadata
    if "pickle" in str(metadata).lower():
        raise UsageError(f"{place}: expected numbers, seen pickles, which can run any code")


def _attributes(array: Any) -> dict[str, Any]:
    """Return the attributes; xarray writes `_FillValue` as the fill value of a format-2 array."""
    attributes = dict(array.attrs)
    if _is_of_xarray(array) and array.fill_value is not None and not _fills_with_zero(array):
        attributes["_FillValue"] = array.fill_value
    return attributes


def _is_of_xarray(array: Any) -> bool:
    return "_ARRAY_DIMENSIONS" in array.attrs and array.metadata.zarr_format == 2


def _fills_with_zero(array: Any) -> bool:
    return array.fill_value is not None and not array.fill_value


@cache  # once, of however many files
def _announce_zeros(key: str) -> None:
    if launchers.launched(os.environ).rank == 0:
        log.warning(
            "[data] %s: values of 0 are read as 0. To xarray they are missing, since the fill "
            "value is 0; if they are, write the attribute _FillValue = 0", key,
        )  # fmt: skip


def _chunk_rows(array: Any) -> int:
    return int((getattr(array, "shards", None) or array.chunks)[0])


def _open_rows(path: Path, key: str) -> ReadRows:
    array, place = _array(path, _open(path), key), f"{path}: {key}"
    chunk_rows = max(1, _chunk_rows(array))
    read: ReadRows = numeric_blocks(
        array.shape[0], chunk_rows, lambda part: np.asarray(array[part])
    )
    read = refuse_missing(read, _attributes(array), place)
    return guarded(read, place, "whole chunks of a Zarr array")

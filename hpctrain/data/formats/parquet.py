"""Parquet: columns of a file by name, read by pyarrow, one row group at a time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.files import open_regular
from hpctrain.core.names import counted
from hpctrain.core.opening import NAMED
from hpctrain.data.formats import arrow
from hpctrain.data.formats.arrays import Part, ReadRows, guarded
from hpctrain.data.formats.blocks import Blocks
from hpctrain.data.formats.libraries import faults_of, load_library

BUFFER_BYTES = 1 << 20  #: of a compressed column in memory; by default all of a row group
_EXPECTED = "a Parquet file"


def probe(path: Path, keys: tuple[arrow.Key, ...]) -> list[Part]:
    """Return an array for each of `keys`, a column or a list of columns of numbers side by side.

    Raises UsageError for another file and for columns of no numbers. Missing values are found when
    they are read: of the counts in a damaged file Arrow would end the process.
    """
    file = _open(path)
    return [_probe_columns(path, file, key) for key in keys]


def list_keys(path: Path) -> list[str]:
    """Return the names of a file's columns."""
    return list(_open(path).schema_arrow.names)


def _open(path: Path) -> Any:
    parquet = load_library("pyarrow.parquet", "parquet")
    pyarrow = load_library("pyarrow", "parquet")
    # By descriptor, which Arrow's threads read without the interpreter: they may outlive it.
    with open_regular(path, NAMED) as source, faults_of(str(path), _EXPECTED):
        descriptor = pyarrow.OSFile(f"/proc/self/fd/{source.fileno()}")
        file = parquet.ParquetFile(descriptor, buffer_size=BUFFER_BYTES)
        file.schema_arrow  # noqa: B018 (it is parsed here)
        return file


def _probe_columns(path: Path, file: Any, key: arrow.Key) -> Part:
    names = arrow.must_have(key, file.schema_arrow.names, str(path))
    with faults_of(f"{path}: {', '.join(names)}", _EXPECTED):
        if not file.metadata.num_rows:
            raise UsageError(f"{path}: expected rows, seen none")
        columns = _columns(path, file, key)
        shape = (file.metadata.num_rows, *columns.shape)
        note = counted(file.num_row_groups, "row group")
        open_rows = partial(_open_rows, path, key)
        chunk_rows = int(max(_group_rows(file)))
        return Part(columns.place, shape, columns.dtype, chunk_rows, open_rows, note)


def _columns(path: Path, file: Any, key: arrow.Key) -> arrow.Columns:
    names = arrow.must_have(key, file.schema_arrow.names, str(path))
    (number, *_) = np.flatnonzero(_group_rows(file))
    row = file.iter_batches(1, row_groups=[int(number)], columns=names, use_threads=False)
    first = load_library("pyarrow", "parquet").Table.from_batches([next(row)])
    return arrow.probe_columns(file.schema_arrow, first, key, str(path), "parquet")


def _group_rows(file: Any) -> np.ndarray:
    groups = range(file.num_row_groups)
    return np.array([file.metadata.row_group(i).num_rows for i in groups], np.int64)


def _open_rows(path: Path, key: arrow.Key) -> ReadRows:
    file = _open(path)
    with faults_of(str(path), _EXPECTED):
        columns, ends = _columns(path, file, key), np.cumsum(_group_rows(file))
    names = [column.name for column in columns.columns]
    release_unused = load_library("pyarrow", "parquet").default_memory_pool().release_unused

    def load(number: int) -> Any:
        group = file.read_row_group(number, columns=names, use_threads=False)
        release_unused()  # Arrow would keep the memory of blocks that were dropped
        return group

    def take(table: Any, rows: np.ndarray, first: int) -> np.ndarray:
        return columns.read(table.take(arrow.indexes(rows - first)), rows)

    def number_of(rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(ends, rows, side="right")

    first_of = [0, *ends.tolist()].__getitem__
    blocks = Blocks(number_of, first_of, load, take, lambda table: table.nbytes)
    return guarded(blocks, columns.place, "a whole Parquet file")

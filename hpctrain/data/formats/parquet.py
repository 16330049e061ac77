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
from hpctrain.data.formats.arrays import Blocks, Part, ReadRows, guarded
from hpctrain.data.formats.libraries import faults_of, load_library

_EXPECTED = "a Parquet file"


def probe(path: Path, keys: tuple[arrow.Key, ...]) -> list[Part]:
    """Return an array for each of `keys`, a column or a list of columns of numbers side by side.

    Raises UsageError for another file, for columns of no numbers, and for missing values that the
    file counts; others are found when they are read.
    """
    file = _open(path)
    return [_probe_columns(path, file, key) for key in keys]


def list_keys(path: Path) -> list[str]:
    """Return the names of a file's columns."""
    return list(_open(path).schema_arrow.names)


def _open(path: Path) -> Any:
    parquet = load_library("pyarrow.parquet", "parquet")
    source = open_regular(path, NAMED)
    try:
        with faults_of(str(path), _EXPECTED):
            file = parquet.ParquetFile(source)
            file.schema_arrow  # noqa: B018 (it is parsed here)
            return file
    except UsageError:
        source.close()
        raise


def _probe_columns(path: Path, file: Any, key: arrow.Key) -> Part:
    names = arrow.must_have(key, file.schema_arrow.names, str(path))
    with faults_of(f"{path}: {', '.join(names)}", _EXPECTED):
        if not file.metadata.num_rows:
            raise UsageError(f"{path}: expected rows, seen none")
        columns = _columns(path, file, key)
        missing = {name: _missing(file, name) for name in names}
        _must_be_whole(path, file, missing)
        shape = (file.metadata.num_rows, *columns.shape)
        note = counted(file.num_row_groups, "row group")
        open_rows = partial(_open_rows, path, key)
        chunk_rows = int(max(_group_rows(file)))
        return Part(columns.place, shape, columns.dtype, chunk_rows, open_rows, note)


def _must_be_whole(path: Path, file: Any, missing: dict[str, int | None]) -> None:
    """Raise UsageError for missing values that the file counts."""
    for name, count in missing.items():
        if count:
            column = file.read(columns=[name], use_threads=False).column(name)
            nulls = np.flatnonzero(column.is_null().to_numpy())
            row_text = f", the first in row {nulls[0]}" if len(nulls) else " in its lists"
            raise UsageError(
                f"{path}: {name}: {counted(count, 'value')} missing (null){row_text}; expected "
                "none: fill them, or remove the rows"
            )


def _columns(path: Path, file: Any, key: arrow.Key) -> arrow.Columns:
    names = arrow.must_have(key, file.schema_arrow.names, str(path))
    (number, *_) = np.flatnonzero(_group_rows(file))
    first = file.read_row_group(int(number), columns=names, use_threads=False).slice(0, 1)
    return arrow.probe_columns(file.schema_arrow, first, key, str(path), "parquet")


def _group_rows(file: Any) -> np.ndarray:
    groups = range(file.num_row_groups)
    return np.array([file.metadata.row_group(i).num_rows for i in groups], np.int64)


def _missing(file: Any, name: str) -> int | None:
    """Return the nulls of a column that the file counts; None if it does not."""
    counts = []
    for i in range(file.num_row_groups):
        group = file.metadata.row_group(i)
        for j in range(group.num_columns):
            column, stored = group.column(j), file.schema.column(j)
            if column.physical_type != stored.physical_type:  # Arrow would end the process
                raise ValueError(f"{column.physical_type} for {stored.physical_type}")
            if column.path_in_schema.partition(".")[0] == name:
                statistics = column.statistics
                counts.append(
                    statistics.null_count if statistics and statistics.has_null_count else None
                )
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _open_rows(path: Path, key: arrow.Key) -> ReadRows:
    file = _open(path)
    with faults_of(str(path), _EXPECTED):
        columns, ends = _columns(path, file, key), np.cumsum(_group_rows(file))
    names = [column.name for column in columns.columns]

    def load(number: int) -> Any:
        return file.read_row_group(number, columns=names, use_threads=False)

    def take(table: Any, rows: np.ndarray, first: int) -> np.ndarray:
        return columns.read(table.take(arrow.indexes(rows - first)), rows)

    blocks = Blocks(ends, load, take, lambda table: table.nbytes)
    return guarded(blocks, columns.place, "a whole Parquet file")
